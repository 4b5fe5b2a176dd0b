"""What every attack stands on: work in a child process that may hang, crash or eat memory, and lanes of such work."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

QUIET = 10.0  # seconds without a word after which a child hangs
GIB = 1 << 30
# The memory of this machine, where there is such a folder: thousands of stores are copied, and synced to a disk.
ROOM = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
BASE = Path(tempfile.mkdtemp(prefix="attacked-", dir=ROOM))  # undamaged ones of everything, and room for cases
Tell = Callable[..., None]


@dataclass
class Finding:
    """One failure: of which attack and seed, of which kind, and what was done."""

    attack: str
    seed: int
    kind: str  # silent, traceback, hang, memory, crash, lost, unhealed, …
    what: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.attack} --only {self.seed}: {self.what}\n    {self.detail[-1500:]}"


@dataclass
class Score:
    """How many cases an attack had, and what was found."""

    attack: str
    cases: int = 0
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0

    def row(self) -> str:
        kinds = Counter(finding.kind for finding in self.findings)
        words = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        return f"| `{self.attack}` | {self.cases:,} | {len(self.findings):,} | {words} | {self.seconds:.0f} s |"


def attend(work: Callable[[Tell], Any], quiet: float = QUIET, memory: int | None = GIB) -> Iterator[dict[str, Any]]:
    """Do work in a child, which tells messages; the last one is its end: `{"end": "", "hang" or "crash"}`.

    Args:
        work: Called with `tell(**message)`.
        quiet: Seconds without a message after which it hangs.
        memory: Bytes that it may ask for beyond what it inherits; None for all.
    """
    heard, told = os.pipe()
    sys.stdout.flush()
    if (child := os.fork()) == 0:
        _work(work, told, memory)
    os.close(told)
    end, rest = "", b""
    try:
        while True:
            if not select.select([heard], [], [], quiet)[0]:
                end = "hang"
                break
            if not (part := os.read(heard, 1 << 16)):
                break
            *lines, rest = (rest + part).split(b"\n")
            yield from map(json.loads, lines)
    finally:
        os.close(heard)
        with contextlib.suppress(ProcessLookupError):
            if end or sys.exc_info()[0]:
                os.killpg(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
    if not end and status:
        end = f"crash ({signal.Signals(status).name})" if os.WIFSIGNALED(status) else "crash"
    yield {"end": end}


def _work(work: Callable[[Tell], Any], told: int, memory: int | None) -> None:
    status = 1
    try:
        os.setpgid(0, 0)
        if memory:
            with contextlib.suppress(OSError):  # no /proc outside Linux
                inherited = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
                resource.setrlimit(resource.RLIMIT_AS, 2 * (inherited + memory,))
        stream = os.fdopen(told, "w")
        work(lambda **message: print(json.dumps(message), file=stream, flush=True))
        status = 0
    except BaseException as error:  # whatever it is, this child must not go on as its parent
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        os._exit(status)


def in_lanes(attack: str, seeds: Iterable[int], case: Callable[[int], tuple[int, list[Finding]]], lanes: int) -> Score:
    """The cases of all seeds, spread over processes; each gives how many cases it was and what it found."""
    begin, score, seeds = time.perf_counter(), Score(attack), list(seeds)
    running: dict[int, int] = {}
    for lane in range(min(lanes, len(seeds))):
        heard, told = os.pipe()
        if (child := os.fork()) == 0:
            os.close(heard)
            _work(lambda tell, lane=lane: _lane(seeds[lane::lanes], case, tell), told, None)
        os.close(told)
        running[heard] = child
    rests = dict.fromkeys(running, b"")
    while running:
        for heard in select.select(list(running), [], [])[0]:
            if not (part := os.read(heard, 1 << 16)):
                os.close(heard)
                if os.waitpid(running.pop(heard), 0)[1]:
                    raise SystemExit(f"{attack}: the attack itself failed, see above")
                continue
            *lines, rests[heard] = (rests[heard] + part).split(b"\n")
            for message in map(json.loads, lines):
                score.cases += message["cases"]
                score.findings += [Finding(**finding) for finding in message["findings"]]
    score.seconds = time.perf_counter() - begin
    return score


def _lane(seeds: list[int], case: Callable[[int], tuple[int, list[Finding]]], tell: Tell) -> None:
    for seed in seeds:
        cases, findings = case(seed)
        tell(cases=cases, findings=[asdict(finding) for finding in findings])


@contextlib.contextmanager
def room() -> Iterator[Path]:
    """A folder for one case."""
    with tempfile.TemporaryDirectory(prefix="case-", dir=BASE, ignore_cleanup_errors=True) as folder:
        yield Path(folder)
