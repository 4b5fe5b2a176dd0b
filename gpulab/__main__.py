"""`gpulab` and `python -m gpulab`: the command line, which Ctrl-C ends in one line from the
first import on.
"""

import sys

from gpulab import interruption


def main() -> None:
    """Run the command line. What it imports is imported here, so that Ctrl-C is answered then,
    too.
    """
    interruption.exit_on_interrupted_import()
    try:
        from gpulab.cli import main as run_command_line

        run_command_line()
    except KeyboardInterrupt:
        interruption.report_interruption()
        sys.exit(interruption.INTERRUPTED_EXIT_STATUS)
    finally:
        interruption.prevent_exit_by_signal()


if __name__ == "__main__":
    main()
