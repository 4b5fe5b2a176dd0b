"""A program that ends an experiment's workers and their children once its process has died.

It reads the ids of workers from its standard input, one a line, and ends when it is killed or has
done its work. A thread of a worker could not do this: a worker that hangs at its end runs no
threads.
"""

import contextlib
import os
import select
import signal
import sys

import psutil

POLL_SECONDS = 0.5  # between two looks at whether the parent lives
KILL_TIMEOUT = 10.0  # seconds after which a worker that does not end by itself is killed


def main(parent: int) -> None:
    """Wait for the end of the parent, and end the workers."""
    workers: dict[int, psutil.Process] = {}
    unread = b""
    while os.getppid() == parent:
        if not select.select([0], [], [], POLL_SECONDS)[0]:
            continue
        received = os.read(0, 4096)
        if not received:  # the parent has closed its end, as it died
            break
        *lines, unread = (unread + received).split(b"\n")
        for line in lines:
            with contextlib.suppress(psutil.NoSuchProcess):
                workers[int(line)] = psutil.Process(int(line))
    end_workers(list(workers.values()))


def end_workers(workers: list[psutil.Process]) -> None:
    """Have workers save checkpoints and end; then kill the rest of their process groups."""
    # `is_running` is false for another process that has since received the same id.
    running = [worker for worker in workers if worker.is_running()]
    leaders = []
    for worker in running:
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getpgid(worker.pid) == worker.pid:
                leaders.append(worker.pid)
            worker.terminate()
    for worker in psutil.wait_procs(running, KILL_TIMEOUT)[1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.kill()
    for leader in leaders:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]))
