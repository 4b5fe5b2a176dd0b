"""Attacks gpulab: damaged files, kills, faults at every call, a full disk, several writers. `all` prints the table.

    python benchmarks/attack.py all                  # the long form, the table in attack.md
    python benchmarks/attack.py short                # a few cases of each, as in `make test`
    python benchmarks/attack.py mutate --only 17     # the cases of one seed again, with every finding
    python benchmarks/attack.py ten                  # ten kinds of damage in one store, and what gpulab says

Every finding names its attack and its seed. Exit status 1 where there are any.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import functools
import importlib
import importlib.util
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# One thread, because children are forked; and an allocator that reserves no more than it needs.
os.environ |= {
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "OMP_NUM_THREADS": "1",
    "GPULAB_PROFILE": "smoke",
    "COLUMNS": "200",
}

from attacks import commands, formats, mutations
from attacks.commands import ALONE, COMMANDS, Command
from attacks.formats import FORMATS, REQUIRED, SETTING, Facts, Format
from attacks.harness import BASE, Finding, Score, Tell, attend, in_lanes, room

import gpulab as gl

BATCH = 100  # mutations a seed
MEMORY_WORDS = re.compile(r"MemoryError|[Cc]annot allocate|can't allocate|malloc of size|bad_alloc|Unable to allocate")


# --- mutations ----------------------------------------------------------------------------------------------------


def mutate(seed: int, count: int = BATCH) -> tuple[int, list[Finding]]:
    """Mutations of one format: the reader refuses by name, or says exactly what the undamaged file says."""
    import hypothesis

    form, skipped = FORMATS[seed % len(FORMATS)], set()
    findings: list[Finding] = []
    name = "mutate" if count == BATCH else f"mutate --count {count}"  # which is drawn depends on how many are

    def batch(tell: Tell) -> None:
        number = 0
        with room() as folder:
            reference = _read(form, folder / "whole")[0]
            content = next((BASE / form.name).glob(form.file)).read_bytes()

            @hypothesis.seed(seed)
            @hypothesis.settings(
                max_examples=count,
                database=None,
                deadline=None,
                phases=[hypothesis.Phase.generate],
                suppress_health_check=list(hypothesis.HealthCheck),
            )
            @hypothesis.given(mutations.mutations(content, form.knows))
            def attack(mutation: tuple[str, bytes]) -> None:
                nonlocal number
                number += 1
                if number in skipped or mutation[1] == content:
                    return
                what, damaged = mutation
                sealed_again = _seal_again(damaged) if number % 2 else damaged
                hostile = sealed_again != damaged
                tell(at=number, what=f"{form.name}: {what}{', sealed again' if hostile else ''}")
                for kind, detail in _judge(form, reference, *_read(form, folder / "case", sealed_again), hostile)[:1]:
                    tell(kind=kind, what=f"{form.name}: {what}{', sealed again' if hostile else ''}", detail=detail)

            attack()

    for _ in range(20):  # a batch that hangs or crashes is done again without the mutation that did it
        at, what, end, findings = 0, form.name, "", [f for f in findings if f.kind.startswith(("hang", "crash"))]
        for message in attend(_quietly(batch), 15):
            if "at" in message:
                at, what = message["at"], message["what"]
            elif "kind" in message:
                findings.append(Finding(name, seed, **message))
            else:
                end = message["end"]
        if not end:
            break
        if not at:
            raise SystemExit(f"{form.name}: the undamaged one cannot be read ({end})")
        findings.append(Finding(name, seed, end, what))
        skipped.add(at)
    return at, findings


def _quietly(work: Callable[[Tell], Any]) -> Callable[[Tell], Any]:
    """Work whose words go nowhere."""

    def quiet(tell: Tell) -> None:
        for number in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
        work(tell)

    return quiet if "--loud" not in sys.argv else work


def _read(form: Format, folder: Path, content: bytes | None = None) -> tuple[Facts, str, BaseException | None]:
    """The facts in a copy of the form's folder, with another content in the file; what was said; what was raised."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(BASE / form.name, folder, symlinks=True)
    os.chdir(folder)
    if content is not None:
        next(folder.glob(form.file)).write_bytes(content)
    return _facts(form, folder)


def _facts(form: Format, folder: Path) -> tuple[Facts, str, BaseException | None]:
    facts: Facts = {}
    raised: BaseException | None = None
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            form.read(folder, facts)
        except BaseException as error:
            raised = error
    return facts, "\n".join(str(warning.message) for warning in said), raised


def _judge(
    form: Format, reference: Facts, facts: Facts, words: str, raised: BaseException | None, hostile: bool
) -> list[tuple[str, str]]:
    """What is wrong with what a reader did, (kind, detail), the worst first."""
    found = []
    if raised is not None:
        text = "".join(traceback.format_exception(raised))
        if MEMORY_WORDS.search(text) and not isinstance(raised, gl.GpulabError):
            found.append(("memory", text))
        elif not isinstance(raised, gl.GpulabError):
            found.append(("traceback", text))
        elif len(str(raised).splitlines()) > 1 or len(str(raised)) > 20_000:
            found.append(("not one line", str(raised)))
        words += f"\n{raised}"
    names = [part for pattern in form.file.split("/") for part in pattern.split("*") if len(part) > 4]
    named = any(name in words for name in names)
    if isinstance(raised, gl.GpulabError) and not isinstance(raised, formats.Said) and not named:
        found.append(("nameless", words))
    for name in () if form.foreign else sorted(reference.keys() | facts.keys()):
        if hostile and not name.startswith("other"):
            continue
        if name not in facts:
            if name.startswith(REQUIRED):
                found.append(("lost" if name.startswith("other") else "unhealed", f"{name}: {words}"))
            elif not named:
                found.append(("silent", f"nothing of {name}, no word"))
        elif facts[name] != reference.get(name):
            kind = "unhealed" if name == "again: reported" else "silent"
            found.append((kind, f"{name}: {facts[name]!r:.400}, undamaged {reference.get(name)!r:.400}"))
    return found


def _seal_again(content: bytes) -> bytes:
    """A content whose checksum is right, as a stranger would send it; as it was where there is none."""
    with contextlib.suppress(ImportError, AssertionError):
        from gpulab.files import DIGITS, SEAL, seal

        if (place := content.rfind(SEAL)) >= 0:
            place += len(SEAL)
            return bytes(seal(content[:place] + b"0" * DIGITS + content[place + DIGITS :]))
    return content


# --- truncated films ----------------------------------------------------------------------------------------------


DECLARING = ("film mp4", "film mkv", "film webm", "film avi")


def cut_film(seed: int) -> tuple[int, list[Finding]]:
    """A film that is cut short: where it says how long it is, it is refused, or no half second is missing."""
    films = [form for form in FORMATS if form.name.startswith("film")]
    form, findings, count = films[seed % len(films)], [], 20
    content = next((BASE / form.name).glob(form.file)).read_bytes()

    def batch(tell: Tell) -> None:
        with room() as folder:
            reference = _read(form, folder / "whole")[0]
            for number in range(1, count + 1):
                share = (number - random.Random(seed * count + number).random()) / count
                facts, _, raised = _read(form, folder / "case", content[: int(share * len(content))])
                tell(at=number)
                missing = 0 if raised else reference["frames"] - facts["frames"]
                if form.name in DECLARING and missing > 13:
                    tell(
                        kind="silent",
                        what=f"{form.name} cut to {share:.1%}",
                        detail=f"{facts['frames']} of {reference['frames']} frames, no word",
                    )
                elif raised is not None and not isinstance(raised, gl.GpulabError):
                    tell(kind="traceback", what=f"{form.name} cut to {share:.1%}", detail=repr(raised))

    for message in attend(_quietly(batch), 20):
        if "kind" in message:
            findings.append(Finding("film", seed, **message))
        elif message.get("end"):
            findings.append(Finding("film", seed, message["end"], form.name))
    return count, findings


# --- special files ------------------------------------------------------------------------------------------------

SPECIAL: dict[str, Callable[[Path], Any]] = {
    "a pipe": os.mkfifo,
    "a link to /dev/zero": lambda file: file.symlink_to("/dev/zero"),
    "a link to itself": lambda file: file.symlink_to(file.name),
    "a link to nothing": lambda file: file.symlink_to("nothing-there"),
    "a folder": Path.mkdir,
    "no permission": lambda file: (file.write_bytes(b"x"), file.chmod(0)),
    "gone": lambda _: None,
}


def special(seed: int) -> tuple[int, list[Finding]]:
    """Something that is no file in a file's place."""
    name = list(SPECIAL)[seed % len(SPECIAL)]
    form, findings = FORMATS[seed // len(SPECIAL) % len(FORMATS)], []
    # Root may read all; and a store that is not there, or a folder, is an empty one.
    empty = ("gone", "a link to nothing", "a link to itself", "a folder")
    if (name == "no permission" and os.geteuid() == 0) or (form.name == "packed runs" and name in empty):
        return 0, []

    def one(tell: Tell) -> None:
        with room() as folder:
            reference = _read(form, folder / "whole")[0]
            shutil.copytree(BASE / form.name, folder / "case", symlinks=True)
            file = next((folder / "case").glob(form.file))
            file.unlink()
            SPECIAL[name](file)
            os.chdir(folder / "case")
            for kind, detail in _judge(form, reference, *_facts(form, folder / "case"), hostile=False)[:1]:
                tell(kind=kind, what=f"{form.name} is {name}", detail=detail)

    for message in attend(_quietly(one), 12):
        if "kind" in message:
            findings.append(Finding("special", seed, **message))
        elif message["end"]:
            findings.append(Finding("special", seed, message["end"], f"{form.name} is {name}"))
    return 1, findings


# --- commands that are disturbed ----------------------------------------------------------------------------------


class Case:
    """A command in a folder of its own, to be disturbed."""

    def __init__(self, attack: str, seed: int, command: Command, base: Path) -> None:
        self.attack, self.seed, self.command = attack, seed, command
        self.folder, self.said = base / "folder", base / "said"
        self.said.mkdir(exist_ok=True)
        known = undisturbed(command)
        self.reference, self.before, self.seconds = known["after"], known["before"], known["seconds"]
        self.status = known["status"]
        self.findings: list[Finding] = []
        self.what = command.name
        if not self.folder.exists():
            shutil.copytree(BASE / "command" / command.name, self.folder)

    def found(self, kind: str, detail: str) -> None:
        self.findings.append(Finding(self.attack, self.seed, kind, self.what, detail))

    def start(self, before: Callable[[], Any] = lambda: None) -> int:
        return commands.start(self.command.line, self.folder, self.said, before)

    def refused(self, status: int | None, allowed: tuple[int, ...] = (1,)) -> None:
        """Hold what a command that was disturbed said against what it should: one line, no traceback."""
        words = commands.words(self.said)
        text = (self.said / "err").read_text(errors="replace")
        if status is None:
            self.found("hang", text)
        elif "Traceback" in text:
            self.found("traceback", text)
        elif status and status not in allowed:
            self.found("status", f"{status}: {text}")
        elif status == 1 and not (len(words) == 1 and words[0].startswith("gpulab: ")):
            self.found("not one line", f"{words}")

    def intact(self, strays: bool) -> None:
        """All that is there must be whole; what was there must still be."""
        facts = commands.left(self.command, self.folder)
        for kind, detail in commands.differences(self.reference, facts, self.before):
            if strays or kind != "stray":
                self.found(kind, detail)

    def again(self) -> None:
        """The same command to its end, which must leave what an undisturbed one leaves."""
        status = commands.wait(self.start())
        if status not in (0, self.status):
            self.found(
                "unhealed", f"the same command again: {status}: {(self.said / 'err').read_text(errors='replace')}"
            )
            return
        wrong = self._wrong()
        if any(kind == "stray" for kind, _ in wrong) and CHECKS:
            commands.wait(commands.start("check store", self.folder, self.said))
            wrong = self._wrong()
        for kind, detail in wrong:
            self.found(kind, f"after the same command again: {detail}")

    def _wrong(self) -> list[tuple[str, str]]:
        """What is wrong with what is left; half an output beside the store, which a kill leaves, may stay."""
        facts = commands.left(self.command, self.folder)
        facts["files"] = [name for name in facts["files"] if name.startswith("store/") or not name.endswith(".part")]
        return commands.differences(self.reference, facts)


def undisturbed(command: Command) -> dict[str, Any]:
    """What a command leaves that runs to its end, with its exit status, the seconds it takes, and what was there."""
    folder, known = BASE / "command" / command.name, BASE / "command" / f"{command.name}.json"
    if known.exists():
        return json.loads(known.read_text())
    before = commands.left(command, folder)
    with room() as base:
        (base / "said").mkdir()
        shutil.copytree(folder, base / "folder")
        begin = time.perf_counter()
        status = commands.wait(commands.start(command.line, base / "folder", base / "said"), 200)
        seconds, after = time.perf_counter() - begin, commands.left(command, base / "folder")
        words = (base / "said" / "err").read_text()
    if status is None or "Traceback" in words or "error" in after:
        raise SystemExit(f"{command.name}, undisturbed: {status}: {words} {after.get('error')}")
    scratch = known.with_suffix(f".{os.getpid()}")  # another lane may be at it, too
    scratch.write_text(json.dumps({"before": before, "after": after, "seconds": seconds, "status": status}))
    scratch.replace(known)
    return undisturbed(command)


CHECKS = any(
    getattr(command, "callback", None) and command.callback.__name__ == "check"
    for command in importlib.import_module("gpulab.cli").app.registered_commands
)


@contextlib.contextmanager
def _case(attack: str, seed: int, command: Command) -> Iterator[Case]:
    with room() as base:
        yield Case(attack, seed, command, base)


def kills(seed: int) -> tuple[int, list[Finding]]:
    """SIGKILL at random moments, once to three times; then the same command again."""
    draw = random.Random(seed)
    command = draw.choices(COMMANDS, [c.weight for c in COMMANDS])[0]
    with _case("kill", seed, command) as case:
        count = draw.choice([1, 1, 2, 3])
        for number in range(count):
            child, moment = case.start(), draw.uniform(0, 1.05) * case.seconds
            time.sleep(moment)
            case.what = f"{command.name}, kill {number + 1} of {count} after {moment:.2f} s"
            workers = (
                [pid for pid in commands.processes(case.said) if pid != child] if command.name == "experiment" else []
            )
            victim = draw.choice([child, *workers])
            commands.kill(victim)
            status = commands.wait(child)
            if victim != child:
                case.what += ", a worker"
                case.refused(status)
            if command.name == "experiment":
                _orphans(case)
        case.intact(strays=False)
        case.again()
        return count, case.findings[:1]


def _orphans(case: Case) -> None:
    end = time.monotonic() + 20
    while left := commands.processes(case.said):
        if time.monotonic() > end:
            case.found("orphan", f"{len(left)} workers outlived their parent by 20 s")
            for pid in left:
                commands.kill(pid)
            return
        time.sleep(0.1)


def interrupts(seed: int) -> tuple[int, list[Finding]]:
    """Ctrl-C, or a polite end, at a random moment: no traceback, and the same command again."""
    draw = random.Random(seed)
    command, fresh, sent = draw.choice(ALONE), seed % 5 == 0, draw.choice([signal.SIGINT, signal.SIGTERM])
    with _case("interrupt", seed, command) as case:
        moment = draw.uniform(0.1, 3.0) if fresh else draw.uniform(0, 1.05) * case.seconds
        case.what = f"{command.name}, {sent.name} after {moment:.2f} s{' of a fresh process' if fresh else ''}"
        before = functools.partial(os.execv, *_fresh(command)) if fresh else os.getpid
        child = case.start(before)
        time.sleep(moment + 0.05)
        commands.kill(child, sent)
        status = commands.wait(child)
        if "gpulab" in (case.said / "err").read_text(errors="replace"):  # else Python's own start was interrupted
            case.refused(status, (1, 128 + sent, -sent))
        case.intact(strays=True)
        case.again()
        return 1, case.findings[:1]


def _fresh(command: Command) -> tuple[str, list[str]]:
    known = importlib.util.find_spec("gpulab.__main__")  # else of before there was one
    program = [sys.executable, *(["-m", "gpulab"] if known else ["-c", "from gpulab.cli import main; main()"])]
    return program[0], [*program, *command.line.split()]


def calls(seed: int) -> tuple[int, list[Finding]]:
    """Each opening for writing, rename, making of a folder and sync fails in its turn, or is the process's last."""
    command, killed, place = ALONE[seed % len(ALONE)], seed // len(ALONE) % 2, seed // len(ALONE) // 2 + 1
    with _case("call", seed, command) as case:
        mark = case.said / "fault"
        status = commands.wait(case.start(lambda: _plant(case.folder, place, mark, bool(killed))))
        if not mark.exists():
            return 0, []
        mark.rmdir()
        case.what = f"{command.name}, call {place} {'is the last' if killed else 'fails'}"
        if not killed:
            case.refused(status)
        case.intact(strays=not killed)
        case.again()
        return 1, case.findings[:1]


def _plant(folder: Path, place: int, mark: Path, killed: bool) -> None:
    """Make the call of that number that writes in a folder fail, or the process's last."""
    left = place

    def call(path: str | bytes, error: int) -> None:
        nonlocal left
        if os.path.abspath(os.fsdecode(path)).startswith(str(folder)):
            left -= 1
            if left == 0:
                mark.mkdir()
                if killed:
                    os.kill(os.getpid(), signal.SIGKILL)
                raise OSError(error, os.strerror(error))

    def hook(event: str, given: tuple[Any, ...]) -> None:
        writes = event == "open" and isinstance(given[2], int) and given[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if (writes or event in ("os.rename", "os.mkdir")) and isinstance(given[0], str | bytes):
            call(given[0], errno.ENOSPC)

    def synced(descriptor: Any, sync: Callable[[Any], None] = os.fsync) -> None:
        call(os.readlink(f"/dev/fd/{descriptor if isinstance(descriptor, int) else descriptor.fileno()}"), errno.EIO)
        sync(descriptor)

    os.fsync = synced
    sys.addaudithook(hook)


WRITING = {
    "write": "ENOSPC",
    "pwrite64": "ENOSPC",
    "rename": "EIO",
    "fsync": "EIO",
    "mkdir": "ENOSPC",
    "openat": "ENOSPC",
    "ftruncate": "EIO",
}


def system_calls(seed: int) -> tuple[int, list[Finding]]:
    """The same with strace, for what libraries do, too: twenty of the calls that touch the folder."""
    command, killed = ALONE[seed % len(ALONE)], seed // len(ALONE) % 2
    findings, cases = [], 0
    found = _traced(command)
    for call, place in random.Random(seed).sample(found, min(len(found), 20)):
        with _case("syscall", seed, command) as case:
            case.what = f"{command.name}, {call} {place} {'is the last' if killed else WRITING[call]}"
            action = "signal=KILL" if killed else f"error={WRITING[call]}"
            status, log = _under_strace(case, [f"trace={call}", f"inject={call}:{action}:when={place}"])
            if not any(str(case.folder) in line for line in log if "INJECTED" in line or "KILL" in line) and not (
                killed and status == -9
            ):
                continue  # another call than in the first run
            if not killed:
                case.refused(status)
            case.intact(strays=not killed)
            case.again()
            cases += 1
            findings += case.findings[:1]
    return cases, findings


def _traced(command: Command) -> list[tuple[str, int]]:
    """(call, the how manieth of its thread) of all calls that write in the folder."""
    with _case("syscall", 0, command) as case:
        _, log = _under_strace(case, [f"trace={','.join(WRITING)}"])
        counts: dict[tuple[str, str], int] = {}
        found = []
        for line in log:
            if not (parts := re.match(r"(\d+)\s+(\w+)\(", line)):
                continue
            key = (parts[1], parts[2])
            counts[key] = counts.get(key, 0) + 1
            reads = parts[2] == "openat" and "O_RDONLY" in line
            if str(case.folder) in line and not reads and "__pycache__" not in line:
                found.append((parts[2], counts[key]))
        return list(dict.fromkeys(found))


def _under_strace(case: Case, filters: list[str]) -> tuple[int | None, list[str]]:
    ready, go = os.pipe()
    child = case.start(lambda: (os.close(go), os.read(ready, 1)))
    os.close(ready)
    log = case.said / "calls"
    options = [part for text in filters for part in ("-e", text)]
    strace = subprocess.Popen(
        ["strace", "-f", "-y", "-p", str(child), "-o", str(log), *options], stderr=subprocess.PIPE, text=True
    )
    assert strace.stderr is not None
    strace.stderr.readline()  # attached
    os.write(go, b"x")
    os.close(go)
    status = commands.wait(child)
    strace.wait(20)
    return status, log.read_text(errors="replace").splitlines()


def full(seed: int) -> tuple[int, list[Finding]]:
    """A file that may not grow, a disk of a few pages, or a full one behind standard output."""
    draw = random.Random(seed)
    command, way = ALONE[seed % len(ALONE)], ["limit", "disk", "output"][seed // len(ALONE) % 3]
    with room() as base, contextlib.ExitStack() as stack:
        (base / "folder").mkdir()
        if way == "disk":
            if (
                os.geteuid()
                or subprocess.run(
                    ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", base / "folder"], capture_output=True
                ).returncode
            ):
                return 0, []
            stack.callback(subprocess.run, ["umount", "-l", base / "folder"], check=True)
        shutil.copytree(BASE / "command" / command.name, base / "folder", dirs_exist_ok=True)
        case = Case("full", seed, command, base)
        size = int(2 ** draw.uniform(0, 19))
        case.what = f"{command.name}, {way} of {size} bytes"
        filler = base / "folder" / "__pycache__" / "filler"
        if way == "disk":
            filler.parent.mkdir(exist_ok=True)
            found = os.statvfs(base / "folder")
            room_left = size // found.f_frsize
            with filler.open("wb") as stream:
                os.posix_fallocate(stream.fileno(), 0, max(found.f_bavail - room_left, 1) * found.f_frsize)

        def before() -> None:
            if way == "limit":
                resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
            elif way == "output":
                os.dup2(os.open("/dev/full", os.O_WRONLY), 1)

        status = commands.wait(case.start(before))
        case.refused(status, (1, 120) if way == "output" else (1,))
        filler.unlink(missing_ok=True)
        case.intact(strays=True)
        case.again()
        return 1, case.findings[:1]


PLACES = {"a name of 300 characters": 300 * "n", "below a file": "step.py/x", "where nobody may write": "/sys/x"}


def places(seed: int) -> tuple[int, list[Finding]]:
    """What a command writes goes where it cannot."""
    able = [command for command in ALONE if command.name != "reproduce"]
    command, where = able[seed % len(able)], list(PLACES)[seed // len(able)]
    with _case("place", seed, command) as case:
        case.what = f"{command.name}, {where}"
        old = f" {command.outputs[0]}" if command.outputs else "--store store"
        line = command.line.replace(old, f"{old.rpartition(' ')[0]} {PLACES[where]}{Path(old).suffix}")
        status = commands.wait(commands.start(line, case.folder, case.said))
        case.refused(status)
        if not status:
            case.found("silent", f"exit status {status}: {(case.said / 'out').read_text()}")
        case.intact(strays=True)
        return 1, case.findings[:1]


# --- several at once ----------------------------------------------------------------------------------------------


def writers(seed: int, seconds: float = 75.0) -> tuple[int, list[Finding]]:
    """Eight writers and two readers on one store: no word, no half-written run, no other result."""
    findings: list[Finding] = []
    with room() as folder:
        os.chdir(folder)
        formats.write_function(folder)
        seeds, end = range(6), time.monotonic() + seconds
        jobs = [(what, number) for what in ("function", "autoencoder") for number in seeds]

        def write(writer: int, tell: Tell) -> None:
            draw = random.Random(seed * 100 + writer)
            while time.monotonic() < end:
                what, number = draw.choice(jobs)
                run = formats.train(folder, what, seed=number, resume=draw.random() < 0.5)
                tell(run=f"{what} {number}", outcome=formats.outcome(run))

        def read(tell: Tell) -> None:
            while time.monotonic() < end:
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    frame = gl.runs(folder / "store")
                    for name, text in (
                        formats.rows(frame) | {f"history of {k}": v for k, v in formats.histories(frame).items()}
                    ).items():
                        tell(run=name, outcome=text)

        known: dict[str, str] = {}
        cases = 0
        workers = [functools.partial(write, writer) for writer in range(8)] + [read, read]
        for number, messages in enumerate(_together(workers, seconds + 30)):
            cases += len(messages)
            for message in messages:
                if message.get("end") or "error" in message:
                    findings.append(
                        Finding(
                            "writers",
                            seed,
                            message.get("end") or "traceback",
                            f"process {number}",
                            message.get("error", ""),
                        )
                    )
                elif "run" in message and known.setdefault(message["run"], message["outcome"]) != message["outcome"]:
                    findings.append(
                        Finding(
                            "writers",
                            seed,
                            "silent",
                            message["run"],
                            f"{message['outcome']} and {known[message['run']]}",
                        )
                    )
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            if len(gl.runs(folder / "store")) > len(jobs) or said:
                findings.append(
                    Finding("writers", seed, "lost", "the store afterwards", str([str(w.message) for w in said]))
                )
        if strays := [
            file for file in commands.files(folder) if "/.unfinished/" in file and not file.endswith(".lock")
        ]:
            findings.append(Finding("writers", seed, "stray", ", ".join(strays)))
    return cases, findings


def _together(works: list[Callable[[Tell], Any]], seconds: float) -> list[list[dict[str, Any]]]:
    """Works at the same time, each in a thread's child; what each told."""
    files = [Path(f"said-{number}") for number in range(len(works))]
    children = []
    for file, work in zip(files, works, strict=True):
        if (child := os.fork()) == 0:
            with file.open("w") as stream:
                try:
                    work(lambda stream=stream, **message: print(json.dumps(message), file=stream, flush=True))
                except BaseException:
                    print(json.dumps({"error": traceback.format_exc()}), file=stream, flush=True)
                finally:
                    os._exit(0)
        children.append(child)
    end, messages = time.monotonic() + seconds, []
    for child, file in zip(children, files, strict=True):
        while not (done := os.waitpid(child, os.WNOHANG)[0]) and time.monotonic() < end:
            time.sleep(0.05)
        if not done:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        messages.append(
            [json.loads(line) for line in file.read_text().splitlines()] + ([] if done else [{"end": "hang"}])
        )
        file.unlink()
    return messages


# --- one store, ten kinds of damage -------------------------------------------------------------------------------


def ten() -> None:
    """Damage ten runs of a store in ten ways, and show what gpulab says of it."""
    with room() as folder:
        os.chdir(folder)
        line = f"experiment autoencoder --profile smoke --frames 40 --setting {SETTING} --seeds 12 --store store"
        (folder / "said").mkdir()
        show = functools.partial(_show, folder)
        show(line)
        before = {
            path.name: (path / "history.parquet").read_bytes() for path in sorted((folder / "store").glob("auto*"))
        }
        runs = [folder / "store" / name for name in before]
        text = (runs[0] / "run.json").read_text()
        flipped = bytearray((runs[7] / "history.parquet").read_bytes())
        flipped[40] ^= 4
        damages: list[tuple[str, Callable[[], Any]]] = [
            ("run.json emptied", lambda: (runs[0] / "run.json").write_text("")),
            ("run.json with a text as loss", lambda: _edit(runs[1], summary={"final_loss": "good"})),
            ("run.json with a list as seed", lambda: _edit(runs[2], seed=[1])),
            ("run.json of 2,000 brackets", lambda: (runs[3] / "run.json").write_text(2000 * "[")),
            ("run.json cut in half", lambda: (runs[4] / "run.json").write_text(text[: len(text) // 2])),
            ("run.json is a pipe", lambda: ((runs[5] / "run.json").unlink(), os.mkfifo(runs[5] / "run.json"))),
            ("history.parquet gone", lambda: (runs[6] / "history.parquet").unlink()),
            ("history.parquet with one bit flipped", lambda: (runs[7] / "history.parquet").write_bytes(flipped)),
            ("the folder emptied", lambda: [file.unlink() for file in runs[8].iterdir()]),
            (
                "run.json is a link to /dev/zero",
                lambda: ((runs[9] / "run.json").unlink(), (runs[9] / "run.json").symlink_to("/dev/zero")),
            ),
        ]
        for run, (what, damage) in zip(runs, damages, strict=False):
            print(f"{run.name}: {what}")
            damage()
        show("runs store")
        if CHECKS:
            show("check store")
        show(line)
        show("runs store")


def _edit(run: Path, **changes: Any) -> None:
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(record | changes))


def _show(folder: Path, line: str) -> None:
    status = commands.wait(commands.start(line, folder, folder / "said"), 200)
    print(f"\n$ gpulab {line}")
    print((folder / "said" / "out").read_text().rstrip())
    words = commands.words(folder / "said")
    print("\n".join(["Traceback …", words[-1]] if any("Traceback" in word for word in words) else words))
    print(f"[exit status {status}]" if status is not None else "[hangs, and is killed]")


# --- all of them --------------------------------------------------------------------------------------------------

ATTACKS: dict[str, tuple[Callable[..., Any], range, list[int]]] = {  # seeds of the long form and of the short one
    "mutate": (mutate, range(5 * len(FORMATS)), [*range(14), 18, 21]),
    "film": (cut_film, range(7), []),
    "special": (special, range(len(SPECIAL) * len(FORMATS)), [0, 10, 15, 20, 30, 50, 55]),
    "kill": (kills, range(290), [0, 1, 4]),
    "interrupt": (interrupts, range(100), [1, 3, 4]),
    "call": (calls, range(2 * 20 * len(ALONE)), [0, 10, 18, 27, 28]),
    "syscall": (system_calls, range(2 * len(ALONE)), []),
    "full": (full, range(120), [2, 3, 8, 18]),
    "place": (places, range(len(PLACES) * 7), [0, 10, 18]),
    "writers": (writers, range(1), [0]),
}


def prepare() -> None:
    """Make an undamaged one of everything in a child, and load here whatever that loaded there."""

    def work(tell: Tell) -> None:
        for form in FORMATS:
            folder = BASE / form.name
            folder.mkdir(parents=True)
            os.chdir(folder)
            form.make(folder)
        for command in COMMANDS:
            folder = BASE / "command" / command.name
            folder.mkdir(parents=True)
            commands.prepare(command, folder)
        with room() as folder:
            shutil.copytree(BASE / "command" / "html", folder / "html")
            for form in (formats.BY_NAME["weights"], formats.BY_NAME["trace"], formats.BY_NAME["csv"]):
                _read(form, folder / "read")
        tell(modules=[name for name in sys.modules if not name.startswith("__")])

    for name in ("torch", "gpulab.training.request", "gpulab.cli", "pyarrow.parquet", "hypothesis"):
        importlib.import_module(name)
    *messages, end = attend(_quietly(work), 120, None)
    if end["end"] or not messages:
        raise SystemExit("the undamaged files could not be made; --loud says why")
    gl.passport()
    gl.load("digits")
    for name in messages[0]["modules"]:
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("attack", choices=[*ATTACKS, "all", "short", "ten"])
    parser.add_argument("--only", type=int, help="one seed")
    parser.add_argument("--seeds", type=int, help="how many seeds of an attack, from 0")
    parser.add_argument("--count", type=int, default=BATCH, help="how many mutations a seed")
    parser.add_argument("--lanes", type=int, default=max(2, (os.cpu_count() or 1) // 2), help="cases at a time")
    parser.add_argument("--write", type=Path, help="write the table to this file")
    parser.add_argument("--findings", type=Path, help="write every finding to this file")
    parser.add_argument("--loud", action="store_true", help="let the children print what they print")
    asked = parser.parse_args()
    write, to = (path and path.resolve() for path in (asked.write, asked.findings))
    scores: list[Score] = []
    try:
        prepare()
        if asked.attack == "ten":
            ten()
            return
        if asked.attack in ("all", "mutate") and asked.count == BATCH:
            mutations.bomb()  # which takes seconds, once for all children
        for name in ATTACKS if asked.attack in ("all", "short") else [asked.attack]:
            case, long, short = ATTACKS[name]
            seeds: Any = short if asked.attack == "short" else range(asked.seeds) if asked.seeds else long
            seeds = seeds if asked.only is None else [asked.only]
            if name == "mutate":
                case = functools.partial(mutate, count=5 if asked.attack == "short" else asked.count)
            if name == "writers" and asked.attack == "short":
                case = functools.partial(writers, seconds=3)
            if not seeds or (name == "syscall" and not shutil.which("strace")):
                continue
            scores.append(in_lanes(name, seeds, case, asked.lanes))
            print(scores[-1].row(), flush=True)
            for finding in scores[-1].findings if asked.only is not None or asked.attack == "short" else ():
                print(finding)
    finally:
        shutil.rmtree(BASE, ignore_errors=True)
    findings = [finding for score in scores for finding in score.findings]
    if to:
        to.write_text("\n".join(map(str, findings)) + "\n")
    if write:
        head = ["| attack | cases | failures | of which | time |", "|---|---|---|---|---|"]
        write.write_text("\n".join([*head, *(score.row() for score in scores)]) + "\n")
    sys.exit(bool(findings))


if __name__ == "__main__":
    main()
