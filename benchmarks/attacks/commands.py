"""Commands of gpulab that write, run in a child that can be killed, and what they leave."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from attacks import formats
from attacks.formats import SETTING, Facts
from attacks.harness import attend

import gpulab as gl

MARK = "ATTACK"  # in the environment of every process that a command starts
PROGRESS = re.compile(
    r"\d+%\|| \?(run|frame|step|operation)|\d+(run|frame|step|operation)s? |/s[,\]]|s/(run|frame|step|operation)"
)
GOES_ON = re.compile(r"/\.unfinished/[^./][^/]*(-[0-9a-f]{10}\.safetensors|-[0-9a-f]{10}/state\.(json|new))$")
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
STEP = f"import sys\nsys.path.insert(0, {str(Path(__file__).parents[1])!r})\nfrom attacks.formats import step\n"


class Command(NamedTuple):
    """A command line, what lies in its folder before, and what files it writes beside the store."""

    name: str
    line: str
    outputs: tuple[str, ...] = ()
    prepare: Callable[[Path], None] = lambda _: None
    weight: int = 1  # how often it is killed


def prepare(command: Command, folder: Path) -> None:
    """The folder before the command: with a run of somebody's that must stay as it is."""
    os.chdir(folder)
    formats.write_function(folder)
    (folder / "own.py").write_text(FUNCTION)
    (folder / "step.py").write_text(STEP)
    formats.train(folder, "function", seed=99)
    command.prepare(folder)


def _twelve_runs(folder: Path) -> None:
    for seed in range(12):
        formats.train(folder, "function", seed=seed)


AUTOENCODER = f"train autoencoder --profile smoke --setting {SETTING} --store store --checkpoint-seconds 0"
COMMANDS = [
    Command("train", f"{AUTOENCODER} --seed 3", weight=10),
    Command(
        "prednet",
        f"train prednet --profile smoke --frames 100 --setting {SETTING} --store store --checkpoint-seconds 0",
        weight=8,
    ),
    Command("function", f"train own.py:train --setting {SETTING} --store store", weight=10),
    Command("pack", "pack store packed.parquet", ("packed.parquet",), formats.make_store, weight=8),
    Command("record", f"record step.py:step --setting {SETTING} --output a.trace", ("a.trace",), weight=8),
    Command(
        "reproduce",
        f"reproduce fn.py:train --target {SETTING} --setting cpu --search rate=0.1,0.11,0.2 --store store",
        (),
        _twelve_runs,
        weight=8,
    ),
    Command("picture", f"{AUTOENCODER} --frames 20 --picture p.png", ("p.png",), weight=1),
    Command("html", "audit a.trace a.trace --html r.html", ("r.html",), formats.make_trace, weight=1),
    Command(
        "experiment",
        f"experiment autoencoder --profile smoke --frames 40 --setting {SETTING} --setting cpu:threads=2 --seeds 2 "
        "--workers 2 --store store",
        weight=2,
    ),
]
BY_NAME = {command.name: command for command in COMMANDS}
ALONE = [command for command in COMMANDS if command.name != "experiment"]  # without worker processes


_pipes: dict[int, tuple[Path, list[int]]] = {}  # by process: where its words go, and what they come out of


def start(line: str, folder: Path, said: Path, before: Callable[[], Any] = lambda: None) -> int:
    """Begin a command in a child, whose words `wait` puts into the files `out` and `err`; returns its process id."""
    pipes = [os.pipe() for _ in range(2)]
    for reader, writer in pipes:
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 1 << 20)  # nobody reads before the end
        os.set_blocking(reader, False)
    sys.stdout.flush()
    if child := os.fork():
        for _, writer in pipes:
            os.close(writer)
        _pipes[child] = said, [reader for reader, _ in pipes]
        return child
    status = 1
    try:
        os.setpgid(0, 0)
        os.chdir(folder)
        os.environ[MARK] = str(said)
        for number, (_, writer) in enumerate(pipes, 1):
            os.dup2(writer, number)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.argv = ["gpulab", *line.split()]
        before()
        status = _as_the_interpreter()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _hear(child: int) -> None:
    said, readers = _pipes.pop(child)
    for name, reader in zip(("out", "err"), readers, strict=True):
        words = b""
        with contextlib.suppress(BlockingIOError):  # a worker still holds it
            while part := os.read(reader, 1 << 20):
                words += part
        os.close(reader)
        (said / name).write_bytes(words)


def _as_the_interpreter() -> int:
    """The command's exit status; what Python itself would print of an error is printed."""
    try:
        from gpulab.__main__ import main
    except ImportError:  # of before it was quiet from its first line on
        from gpulab.cli import main
    status: Any = 0
    try:
        main()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        traceback.print_exc()
        status = 130 if isinstance(error, KeyboardInterrupt) else 1
    try:
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
        status = 120
    return status


def wait(child: int, seconds: float = 60.0) -> int | None:
    """The exit status, negative for a signal; None for a command that hung and was killed."""
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.005)
        kill(child, group=True)
        os.waitpid(child, 0)
        return None
    finally:
        _hear(child)


def kill(child: int, sent: int = signal.SIGKILL, group: bool = False) -> None:
    with contextlib.suppress(ProcessLookupError):
        (os.killpg if group else os.kill)(child, sent)


def words(said: Path) -> list[str]:
    """The lines on standard error, without those of a progress bar."""
    lines = re.split(r"[\r\n]", (said / "err").read_text(errors="replace").replace("\x1b[A", ""))
    return [line.strip() for line in lines if line.strip() and not PROGRESS.search(line)]


def processes(said: Path) -> list[int]:
    """The processes that a command started with `exec`, and those below."""
    import psutil

    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == str(said) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def left(command: Command, folder: Path) -> Facts:
    """What there is in the folder after a command: every run, every output that can be read, every file."""

    def look(tell: Any) -> None:
        os.chdir(folder)
        facts: Facts = {}
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                frame = gl.runs("store")
                facts |= {f"run {name}": text for name, text in formats.rows(frame).items()}
                facts |= {f"history {name}": text for name, text in formats.histories(frame).items()}
                for name in command.outputs:
                    if (folder / name).exists():
                        facts[name] = _read(folder / name)
            except Exception as error:
                facts["error"] = repr(error)
        if said:
            facts["warnings"] = [str(warning.message) for warning in said]
        of_setting = SETTING.replace(":", "_").replace("=", "_")  # a search has runs of this seed under another one
        bystander = next(folder.glob(f"store/fn.py_train*-{of_setting}-seed99-*"))
        facts["bystander"] = [file.read_bytes().hex() for file in sorted(bystander.iterdir())]
        facts["files"] = files(folder)
        tell(facts=facts)

    *messages, end = attend(look, 30, None)
    return messages[0]["facts"] if messages else {"error": end["end"]}


def _read(file: Path) -> Any:
    if file.suffix == ".parquet":
        frame = gl.runs(file)
        return [formats.rows(frame), formats.histories(frame)]
    if file.suffix == ".trace":
        trace = gl.diagnostics.Trace.load(file)
        return repr((trace.operations, sorted((name, values.tolist()) for name, values in trace.sketches.items())))
    if file.suffix == ".png":
        from PIL import Image

        with Image.open(file) as image:
            image.load()
            return list(image.size)
    text = file.read_text()
    return [text.rstrip().endswith("</html>"), text.count("<table")]


def files(folder: Path) -> list[str]:
    return sorted(
        str(file.relative_to(folder))
        for file in folder.rglob("*")
        if not file.is_dir() and "__pycache__" not in file.parts
    )


def differences(reference: Facts, facts: Facts, before: Facts | None = None) -> list[tuple[str, str]]:
    """(kind, what) that is wrong in what is left; with `before`, of a command that did not end, all may be missing."""
    found = []
    strays = sorted(set(facts.get("files", ())) - set(reference["files"]))
    if before is not None:  # what it goes on from may stay
        strays = [file for file in strays if not GOES_ON.search(file)]
    for name in sorted((reference.keys() | facts.keys()) - {"files"}):
        if name in ("error", "warnings"):
            found.append((name, str(facts[name])))
        elif name not in facts:
            if before is None or name in before:
                found.append(("lost", name))
        elif facts[name] != reference.get(name):
            found.append(("silent", f"{name}: {facts[name]!r:.300} and not {reference.get(name)!r:.300}"))
    return found + [("stray", ", ".join(strays))] * bool(strays)
