"""`python -m gpulab.training.worker`: the process in which an experiment trains; see `experiment.worker_loop`."""

import os
import signal
import sys

from gpulab.training.experiment import worker_loop


def main() -> None:
    """Do the jobs that come on standard input; save a checkpoint and end when asked to."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    jobs = os.fdopen(os.dup(0), encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a function that reads its input does not read the jobs
    try:
        worker_loop(iter(jobs.readline, ""))
    except (KeyboardInterrupt, BrokenPipeError):
        sys.exit(1)


if __name__ == "__main__":
    main()
