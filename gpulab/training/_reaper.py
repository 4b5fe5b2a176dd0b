"""A program that ends an experiment's workers and their children after the experiment has died.

It reads the ids of workers from its standard input, one on each line. It runs until it is killed,
or until the experiment's process has died and all workers have ended. A thread inside a worker
could not do this, since a worker that hangs while it exits runs no threads.
"""

import contextlib
import os
import select
import signal
import sys

import psutil

STDIN = 0  # the file descriptor of the standard input
POLL_SECONDS = 0.5  # seconds between two checks whether the parent is alive
KILL_TIMEOUT = 10.0  # seconds after which a worker that does not end by itself is killed


def main(parent: int) -> None:
    """Collect the ids of workers until the parent has died, and then end the workers."""
    workers: dict[int, psutil.Process] = {}
    incomplete_line = b""
    while os.getppid() == parent:
        readable, _, _ = select.select([STDIN], [], [], POLL_SECONDS)
        if not readable:
            continue
        received = os.read(STDIN, 4096)
        if not received:  # the pipe is closed: the parent has died
            break
        *lines, incomplete_line = (incomplete_line + received).split(b"\n")
        for line in lines:
            with contextlib.suppress(psutil.NoSuchProcess):
                workers[int(line)] = psutil.Process(int(line))
    end_workers(list(workers.values()))


def end_workers(workers: list[psutil.Process]) -> None:
    """Ask workers to save checkpoints and end, and then kill the rest of their process groups.

    Workers that take longer than `KILL_TIMEOUT` are killed.
    """
    # `is_running` is false if the worker has ended and another process has received its id.
    running = [worker for worker in workers if worker.is_running()]
    leaders = []  # of process groups; their groups may outlive them
    for worker in running:
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getpgid(worker.pid) == worker.pid:
                leaders.append(worker.pid)
            worker.terminate()
    _ended, still_running = psutil.wait_procs(running, KILL_TIMEOUT)
    for worker in still_running:
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.kill()
    for leader in leaders:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]))
