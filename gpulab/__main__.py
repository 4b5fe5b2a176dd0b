"""`gpulab`, and `python -m gpulab`: the command line, quiet from its first line on when it is interrupted."""

import sys

from gpulab import signals


def main() -> None:
    """Run the command line."""
    signals.leave_quietly()
    from gpulab.cli import main

    main()


if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # the current folder, where a queue.py may lie
    main()
