"""`python -m gpulab.training.worker`: the process in which an experiment trains; see `experiment.worker_loop`."""

import signal
import sys

from gpulab.training.experiment import worker_loop


def main() -> None:
    """Do the jobs that come on standard input; save a checkpoint and end when asked to."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        worker_loop(iter(sys.stdin.readline, ""))
    except (KeyboardInterrupt, BrokenPipeError):
        sys.exit(1)


if __name__ == "__main__":
    main()
