"""`gpulab` and `python -m gpulab`: the command line, which Ctrl-C ends in one line from the
first import on.
"""

import sys

from gpulab import interruption


def main() -> None:
    """Run the command line. What it imports is imported here, so that Ctrl-C is answered then,
    too.
    """
    interruption.answer_while_importing()
    try:
        from gpulab.cli import main as run_command_line

        run_command_line()
    except KeyboardInterrupt:
        interruption.say_interrupted()
        sys.exit(interruption.INTERRUPTED)
    finally:
        interruption.forget_interruption()


if __name__ == "__main__":
    main()
