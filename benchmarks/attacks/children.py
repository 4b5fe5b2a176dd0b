"""Work and commands of gpulab in a child that may hang, crash, eat memory, be killed, or see a system call fail."""

from __future__ import annotations

import contextlib
import ctypes
import io
import multiprocessing
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

FORK: Any = multiprocessing.get_context("fork")
GIB = 1 << 30
MAY_BE_TRACED = 0x59616D61  # by any process: PR_SET_PTRACER of Linux's Yama
# The memory of this machine, where there is such a folder: thousands of stores are copied, and synced to a disk.
BASE = Path(tempfile.mkdtemp(prefix="attacked-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))


class Fault(Exception):  # noqa: N818
    """What an attack found; each kind is a class of its own, so that Hypothesis tells them apart."""


KINDS: dict[str, type[Fault]] = {}


def fault(kind: str, detail: object = "") -> Fault:
    """A failure of a kind: silent, traceback, hang, memory, crash, lost, unhealed, stray, …"""
    return KINDS.setdefault(kind, type(kind, (Fault,), {}))(str(detail)[-1500:])


class Child:
    """Work that is done in a child, with at most `memory` bytes more than it inherits."""

    def __init__(self, work: Callable[..., Any], *given: Any, memory: int | None = GIB) -> None:
        self.heard, told = FORK.Pipe(duplex=False)
        self.process = FORK.Process(target=_tell, args=(told, memory, work, given))
        self.process.start()
        told.close()

    def result(self, seconds: float = 20.0) -> Any:
        """What the work returns. Raises the `Fault` that it hung or crashed."""
        try:
            if not self.heard.poll(seconds):
                raise fault("hang", f"no answer for {seconds} s")
            answer, error = self.heard.recv()
        except EOFError:
            self.process.join()
            answer, error = None, f"exit status {self.process.exitcode}"
        finally:
            self.process.kill()
            self.process.join()
        if error:
            raise fault("crash", error)
        return answer


def _tell(told: Any, memory: int | None, work: Callable[..., Any], given: tuple[Any, ...]) -> None:
    with open(os.devnull, "w") as nowhere:
        for number in (1, 2):
            os.dup2(nowhere.fileno(), number)
    if memory:
        inherited = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (inherited + memory, inherited + memory))
    try:
        answer = work(*given), ""
    except BaseException:
        answer = None, traceback.format_exc()
    told.send(answer)


@contextlib.contextmanager
def room() -> Iterator[Path]:
    """A folder for one case."""
    with tempfile.TemporaryDirectory(prefix="case-", dir=BASE, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


# --- commands ---------------------------------------------------------------------------------------------


class Ended(NamedTuple):
    """A command that ended: its process, exit status (negative for a signal, None if it hung), words, system calls."""

    process: int
    status: int | None
    said: str
    calls: list[str]

    def lines(self) -> list[str]:
        """The lines on standard error; a progress bar writes its own again and again."""
        return [line.strip() for line in re.split(r"[\r\n]", self.said.replace("\x1b[A", "")) if line.strip()]


def run(
    line: str,
    folder: Path,
    *strace: str,
    seconds: float = 120.0,
) -> Ended:
    """Run a command of gpulab in a folder to its end, and to that of all that it started.

    Args:
        line: The command, without `gpulab`.
        folder: Where it runs.
        strace: Expressions such as `inject=write:error=ENOSPC:when=3`; with none it is not traced.
        seconds: After these it hangs, and is killed with all that it started.
    """
    heard, told = socket.socketpair()
    child = FORK.Process(target=_command, args=(line, folder, told, bool(strace)))
    child.start()
    told.close()
    log = folder.with_name(f"{folder.name}.calls")
    expressions = [part for expression in strace for part in ("-e", expression)]
    tracing = ["strace", "-f", "-y", "-p", str(child.pid), "-o", str(log), *expressions]
    tracer = subprocess.Popen(tracing, stderr=subprocess.DEVNULL) if strace else None
    said, end, hangs = b"", time.monotonic() + seconds, False
    with heard:
        try:
            while True:
                heard.settimeout(max(end - time.monotonic(), 0.01))
                if not (part := heard.recv(1 << 16)):
                    break
                said += part
        except TimeoutError:
            hangs = True
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.join()
    calls = log.read_text(errors="replace").splitlines() if tracer and tracer.wait() is not None else []
    return Ended(child.pid, None if hangs else child.exitcode, said.decode(errors="replace"), calls)


def _command(line: str, folder: Path, told: socket.socket, traced: bool) -> None:
    from gpulab.__main__ import main

    os.setpgid(0, 0)
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(told.fileno(), 2)
    # By `sendto`, and not at all: so that words come through where every `write` fails.
    sys.stdout, sys.stderr = io.StringIO(), told.makefile("w")
    sys.stderr.reconfigure(line_buffering=True)
    sys.argv = ["gpulab", *line.split()]
    if traced:
        ctypes.CDLL(None).prctl(MAY_BE_TRACED, -1)
        while "TracerPid:\t0" in Path("/proc/self/status").read_text():
            time.sleep(0.001)
    try:
        main()
    finally:
        sys.stdout.flush()


def traces() -> bool:
    """Whether system calls can be made to fail here: `strace` is installed, and may trace."""
    line = ["strace", "-e", "trace=write", "-e", "inject=write:error=EIO", "true"]
    return bool(shutil.which("strace")) and subprocess.run(line, capture_output=True).returncode == 0
