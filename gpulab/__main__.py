"""The command line, `gpulab` or `python -m gpulab`.

Ctrl-C ends it with a one-line message, even during its imports.
"""

import sys

from gpulab import interruption


def main() -> None:
    """Run the command line, and exit with the status of an interrupted command after Ctrl-C."""
    interruption.exit_on_interrupted_import()
    try:
        # Imported only now, so that the handler above is already active.
        from gpulab.cli import main as run_command_line

        run_command_line()
    except KeyboardInterrupt:
        interruption.report_interruption()
        sys.exit(interruption.INTERRUPTED_EXIT_STATUS)
    finally:
        interruption.prevent_exit_by_signal()


if __name__ == "__main__":
    main()
