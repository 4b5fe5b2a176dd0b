"""Commands of gpulab that write, what they do to the disk when nothing disturbs them, and what they leave."""

from __future__ import annotations

import functools
import os
import re
import shutil
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from attacks import children, formats
from attacks.children import BASE, Child, Ended, fault
from attacks.formats import SETTING

import gpulab as gl

# Where a call that writes to a disk can fail; what only reads, or removes what was written, is left alone.
WRITES = re.compile(r"(p?write(v|64)?|openat|f(data)?sync|ftruncate|mkdir(at)?|rename(at2?)?)\(")
GOES_ON = re.compile(r"/\.unfinished/[^./][^/]*(-[0-9a-f]{10}\.safetensors|-[0-9a-f]{10}/state\.(json|new))$")
HALF = re.compile(r"\.part$|/\.unfinished/")  # what is being written, which nobody reads
FUNCTION = """
import json
def train(seed, setting, folder, rate=0.1):
    file = folder / "state.json"
    begin, loss = json.loads(file.read_text()) if file.exists() else (0, 1.0 + seed)
    for step in range(begin, 40):
        loss *= 1 - rate
        part = folder / "state.new"
        part.write_text(json.dumps([step + 1, loss]))
        part.replace(file)
    return loss
"""


class Command(NamedTuple):
    """A command line, the file it writes beside the store, and what lies in its folder before."""

    line: str
    output: str = ""
    prepare: Callable[[Path], None] = lambda _: None


NETWORK = f"--profile smoke --setting {SETTING} --store store --checkpoint-seconds 0"
COMMANDS = {  # the short form has the first ones
    "train": Command(f"train autoencoder --seed 3 {NETWORK}"),
    "pack": Command("pack store packed.parquet", "packed.parquet", formats.make_store),
    "function": Command(f"train own.py:train --setting {SETTING} --store store"),
    "prednet": Command(f"train prednet --frames 100 {NETWORK}"),
}


class Call(NamedTuple):
    """A system call of a command that writes in its folder: its name, and the how manieth of that name it is."""

    name: str
    place: int


class Usual(NamedTuple):
    """What a command does that nothing disturbs: what is there before and after, its system calls, its exit status."""

    before: dict[str, Any]
    after: dict[str, Any]
    calls: list[Call]  # of any kind
    writes: list[Call]  # those that write
    status: int


class Place:
    """A folder of its own for a command that is to be disturbed."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.command, self.folder = name, COMMANDS[name], folder
        source = BASE / name
        if not source.exists():
            Child(_prepare, self.command, source, memory=None).result(120)
        shutil.copytree(source, folder, dirs_exist_ok=True)

    def run(self, *strace: str, **options: Any) -> Ended:
        return children.run(self.command.line, self.folder, *strace, **options)

    def left(self) -> dict[str, Any]:
        return Child(_left, self.command, self.folder, memory=None).result(60)

    def refused(self, ended: Ended, allowed: tuple[int, ...] = (1,)) -> None:
        """A command that was disturbed says one line, and no traceback."""
        if ended.status is None:
            raise fault("hang", ended.said)
        if "Traceback" in ended.said:
            raise fault("traceback", ended.said)
        if ended.status and ended.status not in allowed:
            raise fault("status", f"{ended.status}: {ended.said}")
        lines = ended.lines()
        errors = [line for line in lines if line.startswith("gpulab: ")]
        if ended.status == 1 and not (len(errors) == 1 and errors == lines[-1:]):
            raise fault("not one line", lines)

    def intact(self, usual: Usual, killed: bool = False) -> None:
        """All that is there is whole, and what was there still is; only a killed command leaves something else."""
        facts = self.left()
        self._compare(facts, usual.after, usual.before)
        strays = [file for file in sorted(facts["files"] - usual.after["files"]) if not GOES_ON.search(file)]
        if strays and not killed:
            raise fault("stray", strays)

    def again(self, usual: Usual) -> None:
        """The same command to its end leaves what an undisturbed one leaves, beside half-written files of a kill."""
        ended = self.run()
        if ended.status not in (0, usual.status):
            raise fault("unhealed", f"the same command again: {ended.status}: {ended.said}")
        facts = self.left()
        self._compare(facts, usual.after, usual.after)
        if strays := [file for file in sorted(facts["files"] - usual.after["files"]) if not HALF.search(file)]:
            raise fault("stray", f"after the same command: {strays}")

    def _compare(self, facts: dict[str, Any], after: dict[str, Any], needed: dict[str, Any]) -> None:
        for name in sorted((facts.keys() | needed.keys()) - {"files"}):
            if name not in facts:
                raise fault("lost", name)
            if facts[name] != after.get(name):
                kind = name if name == "warnings" else "silent"
                raise fault(kind, f"{name}: {facts[name]!r:.300} and not {after.get(name)!r:.300}")


def _prepare(command: Command, folder: Path) -> None:
    """The folder before the command: with a run of somebody's that must stay as it is."""
    folder.mkdir()
    os.chdir(folder)
    (folder / "fn.py").write_text(formats.FUNCTION)
    (folder / "own.py").write_text(FUNCTION)
    formats.train(folder, "function", seed=99)
    command.prepare(folder)


def _left(command: Command, folder: Path) -> dict[str, Any]:
    """What there is in the folder: every run, what the command wrote beside them, and every file."""
    os.chdir(folder)
    files = [path for path in folder.rglob("*") if not path.is_dir() and "__pycache__" not in path.parts]
    facts: dict[str, Any] = {"files": {str(path.relative_to(folder)) for path in files}}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        frame = gl.runs("store")
        facts |= formats.rows(frame) | formats.histories(frame)
    if command.output and (folder / command.output).exists():
        facts[command.output] = (folder / command.output).read_bytes()[-4:]  # by which all these formats end
    if said:
        facts["warnings"] = [str(warning.message) for warning in said]
    (bystander,) = folder.glob(f"store/fn.py_train*-{SETTING.replace(':', '_').replace('=', '_')}-seed99-*")
    facts["bystander"] = [file.read_bytes() for file in sorted(bystander.iterdir())]
    return facts


@functools.cache
def usual(name: str) -> Usual:
    """What a command does that nothing disturbs."""
    with children.room() as room:
        place = Place(name, room / "folder")
        before, ended = place.left(), place.run("trace=all")
        place.refused(ended)
        if ended.status is None or not ended.calls:
            raise SystemExit(f"{name} cannot be traced: {ended}")
        return Usual(before, place.left(), *_calls(ended, place.folder), ended.status)


def _calls(ended: Ended, folder: Path) -> tuple[list[Call], list[Call]]:
    """All calls of the command's own process; and those that write in the folder."""
    counts: Counter[str] = Counter()
    calls, writes = [], []
    for line in ended.calls:
        process, _, call = line.partition(" ")
        if process != str(ended.process) or not (named := re.match(r"(\w+)\(", call := call.lstrip())):
            continue
        counts[named[1]] += 1
        calls.append(Call(named[1], counts[named[1]]))
        inside = str(folder) in call or re.match(r'\w+\("[^/]', call)
        if not inside or not WRITES.match(call) or "O_RDONLY" in call or "__pycache__" in call:
            continue
        writes.append(calls[-1])
    return calls, writes
