"""`python -P -m gpulab.training.worker`: the process in which an experiment trains; see `experiment.worker_loop`."""

import os

from gpulab import signals


def main() -> None:
    """Do the jobs that come on standard input; save a checkpoint and end when asked to."""
    signals.leave_quietly()
    import contextlib

    from gpulab.training.experiment import worker_loop

    jobs = os.fdopen(os.dup(0), encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a function that reads its input does not read the jobs
    with signals.Raising("interrupted"), contextlib.suppress(BrokenPipeError):
        worker_loop(iter(jobs.readline, ""))


if __name__ == "__main__":
    main()
