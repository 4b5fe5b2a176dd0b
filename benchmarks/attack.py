"""Attacks gpulab: damaged files, kills, faults at every call, a full disk, several writers. `all` prints the table.

    python benchmarks/attack.py all                        # the long form
    python benchmarks/attack.py short                      # a few cases of each, as in the tests
    python benchmarks/attack.py mutate --case checkpoint   # one case; what failed before is tried first, and made small

Hypothesis draws what is done, makes a failure as small as it can be, and keeps it in `build/attack`, by case. strace
makes system calls fail, or the last ones of a process. Exit status 1 where anything was found.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import os
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

# One thread, because children are forked; and an allocator that reserves no more than it needs.
os.environ |= {
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "OMP_NUM_THREADS": "1",
    "GPULAB_PROFILE": "smoke",
    "COLUMNS": "200",
}

import hypothesis
from attacks import children, damage, formats
from attacks.children import BASE, Child, Fault, fault, room
from attacks.commands import COMMANDS, Call, Place, usual
from attacks.formats import BY_NAME, REQUIRED, Format
from hypothesis import strategies as st
from hypothesis.database import DirectoryBasedExampleDatabase

import gpulab as gl
from gpulab import files
from gpulab.progress import Progress

ROOT = Path(__file__).parents[1]
DATABASE = ROOT / "build" / "attack"


# --- damaged files ----------------------------------------------------------------------------------------


def mutate(name: str, damaged: bytes, sealed_again: bool) -> None:
    """The reader refuses a damaged file by name, or says exactly what the undamaged one says."""
    damaged = _seal_again(damaged) if sealed_again else damaged
    _judge(BY_NAME[name], lambda file: file.write_bytes(damaged), sealed_again)


def content_of(name: str) -> bytes:
    """The content of an undamaged file, which is made once."""
    form, folder = BY_NAME[name], BASE / name
    if not folder.exists():
        Child(_make, form, folder, memory=None).result(120)
    return next(folder.glob(form.file)).read_bytes()


def _make(form: Format, folder: Path) -> None:
    folder.mkdir()
    os.chdir(folder)
    form.make(folder)


def _judge(form: Format, do: Callable[[Path], Any], hostile: bool = False) -> None:
    """Raise what is wrong with what the reader makes of a file to which something was done."""
    whole = _whole(form)
    facts, words, refused, trace, name = _read_in_child(form, do)
    if trace:
        raise fault("traceback", trace)
    if len(refused.splitlines()) > 1 or len(refused) > 20_000:
        raise fault("not one line", refused)
    if refused and name not in refused:
        raise fault("nameless", refused)
    for fact in sorted(whole.keys() | facts.keys()):
        if hostile and not fact.startswith("other"):  # a stranger may have written anything
            continue
        if fact not in facts:
            if fact.startswith(REQUIRED):
                raise fault("lost" if fact.startswith("other") else "unhealed", f"{fact}: {words} {refused}")
            if name not in words + refused:
                raise fault("silent", f"nothing of {fact}, no word")
        elif facts[fact] != whole.get(fact):
            kind = "unhealed" if fact == "again reported" else "silent"
            raise fault(kind, f"{fact}: {facts[fact]!r:.400}, undamaged {whole.get(fact)!r:.400}")


@functools.cache
def _whole(form: Format) -> dict[str, Any]:
    return _read_in_child(form, lambda _: None)[0]


def _read_in_child(form: Format, do: Callable[[Path], Any]) -> tuple[dict[str, Any], str, str, str, str]:
    with room() as folder:
        shutil.copytree(BASE / form.name, folder, symlinks=True, dirs_exist_ok=True)
        do(file := next(folder.glob(form.file)))
        return *Child(_read, form, folder).result(15), file.name


def _read(form: Format, folder: Path) -> tuple[dict[str, Any], str, str, str]:
    """The facts, the words of warnings, those of a refusal, and the traceback of anything else."""
    os.chdir(folder)
    facts: dict[str, Any] = {}
    refused = trace = ""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            for name, fact in form.read(folder):
                facts[name] = fact
        except gl.GpulabError as error:
            refused = str(error)
        except BaseException:
            trace = traceback.format_exc()
    return facts, "\n".join(str(warning.message) for warning in said), refused, trace


def _seal_again(content: bytes) -> bytes:
    """A content whose checksum is right, as a stranger would send it; as it was where there is none."""
    place = content.rfind(files.SEAL) + len(files.SEAL)
    with contextlib.suppress(AssertionError):
        return files.seal(content[:place] + files.DIGITS * b"0" + content[place + files.DIGITS :])
    return content


SPECIAL: dict[str, Callable[[Path], Any]] = {
    "a pipe": os.mkfifo,
    "a link to /dev/zero": lambda file: file.symlink_to("/dev/zero"),
    "a link to itself": lambda file: file.symlink_to(file.name),
    "a link to nothing": lambda file: file.symlink_to("nothing-there"),
    "a folder": Path.mkdir,
    "gone": lambda _: None,
}
EMPTY = list(SPECIAL)[2:]  # in the place of a store that is an empty one


def special(what: str, name: str) -> None:
    """Something that is no file in a file's place."""
    content_of(name)
    _judge(BY_NAME[name], lambda file: (file.unlink(), SPECIAL[what](file)))


# --- commands that are disturbed --------------------------------------------------------------------------


@contextlib.contextmanager
def _place(name: str) -> Any:
    with room() as folder:
        yield Place(name, folder / "folder")


def kill(name: str, calls: list[Call]) -> None:
    """Calls that write are a process's last, once to three times; then the same command again."""
    with _place(name) as place:
        for call, number in calls:
            place.run(f"trace={call}", f"inject={call}:signal=KILL:when={number}")
        place.intact(usual(name), killed=True)
        place.again(usual(name))


def interrupt(name: str, call: Call, sent: str) -> None:
    """Ctrl-C, or a polite end, at any call: no traceback, and the same command again."""
    number = getattr(signal, f"SIG{sent}")
    strace = [f"trace={call.name}", f"inject={call.name}:signal={sent}:when={call.place}"]
    _hindered(name, strace, (1, 128 + number, -number))


def hinder(name: str, call: Call, error: str, later: str) -> None:
    """A call that writes fails, and with `+` all later ones of its name: the disk is full."""
    _hindered(name, [f"trace={call.name}", f"inject={call.name}:error={error}:when={call.place}{later}"])


def _hindered(name: str, strace: Iterable[str] = (), allowed: tuple[int, ...] = (1,)) -> None:
    with _place(name) as place:
        place.refused(place.run(*strace), allowed)
        place.intact(usual(name))
        place.again(usual(name))


def writers(case: str) -> None:
    """Eight writers and two readers on one store: no word, no half-written run, no other result."""
    trainings = int(case)
    with room() as folder:
        formats.make_store(folder, seeds=0)
        works = [Child(_write, folder, number, trainings, memory=None) for number in range(8)]
        works += [Child(_list, folder, 4 * trainings, memory=None) for _ in range(2)]
        known: dict[str, Any] = {}
        last = Child(_list, folder, 1, memory=None)
        for name, outcome in [pair for work in [*works, last] for pair in work.result(60 + trainings)]:
            if known.setdefault(name, outcome) != outcome:
                raise fault("silent", f"{name}: {outcome} and {known[name]}")
        after = Child(_list, folder, 1, memory=None).result()
        for what in ("row", "history"):
            found = sum(name.startswith(what) for name, _ in after)
            if found != sum(name.startswith("trained") for name in known):
                raise fault("lost", f"{found} {what} in the store afterwards")
        if strays := [*(folder / "store" / ".unfinished").iterdir()]:
            raise fault("stray", strays)


def _write(folder: Path, writer: int, trainings: int) -> list[tuple[str, Any]]:
    os.chdir(folder)
    warnings.simplefilter("error")
    outcomes = []
    for number in range(trainings):
        what, seed = ("function", "autoencoder")[number % 2], (writer + number) // 2 % 6
        run = formats.train(folder, what, seed=seed, resume=number % 3 > 0)
        outcomes.append((f"trained {what} {seed}", formats.outcome(run)))
    return outcomes


def _list(folder: Path, times: int) -> list[tuple[str, Any]]:
    warnings.simplefilter("error")
    seen: set[tuple[str, Any]] = set()
    for _ in range(times):
        frame = gl.runs(folder / "store")
        seen |= {*formats.rows(frame).items(), *formats.histories(frame).items()}
    return sorted(seen)


# --- all of them ------------------------------------------------------------------------------------------


class Attack(NamedTuple):
    """What is attacked, what Hypothesis draws for each, how many examples at most, and those of how many in short."""

    work: Callable[..., None]
    cases: list[str]
    drawn: Callable[[str], tuple[st.SearchStrategy[Any], ...]]
    long: int
    short: int = 1
    of: int = 3
    traced: bool = False


def _damaged(name: str) -> st.SearchStrategy[bytes]:
    content = content_of(name)
    return damage.blind(content) | BY_NAME[name].hostile(content)


def _call(name: str, part: str = "") -> st.SearchStrategy[Call]:
    """A call of a command that writes, with that part in its name."""
    return st.sampled_from([call for call in usual(name).writes if part in call.name])


def _files(what: str) -> st.SearchStrategy[str]:
    return st.sampled_from([name for name in BY_NAME if name != "packed runs" or what not in EMPTY])


SENT, ERRORS = st.sampled_from(["INT", "TERM"]), st.sampled_from(["ENOSPC", "EIO"])
LINES = [*COMMANDS]
ATTACKS = {
    "mutate": Attack(mutate, [*BY_NAME], lambda name: (_damaged(name), st.booleans()), 300, 3, len(BY_NAME)),
    "special": Attack(special, [*SPECIAL], lambda what: (_files(what),), len(BY_NAME), 1, len(SPECIAL)),
    "kill": Attack(kill, LINES, lambda name: (st.lists(_call(name), min_size=1, max_size=3),), 60, 4, 2, traced=True),
    "interrupt": Attack(interrupt, LINES, lambda name: (st.sampled_from(usual(name).calls), SENT), 30, 2, traced=True),
    "hinder": Attack(hinder, LINES, lambda name: (_call(name), ERRORS, st.just("")), 60, 4, traced=True),
    "full": Attack(hinder, LINES, lambda name: (_call(name, "write"), ERRORS, st.just("+")), 30, 2, 2, traced=True),
    "writers": Attack(writers, ["6", "400"], lambda _: (), 1, 1, 1),
}


def explore(attack: str, case: str, short: bool, seed: int) -> tuple[int, list[Fault]]:
    """Try the examples of a case: how many, and what failed, made small except in the short form, and kept."""
    work, drawn, long, few = ATTACKS[attack].work, ATTACKS[attack].drawn, ATTACKS[attack].long, ATTACKS[attack].short
    examples = 0

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=few if short else long,
        database=DirectoryBasedExampleDatabase(DATABASE / attack / case.replace("/", "-")),
        deadline=None,
        phases=[phase for phase in hypothesis.Phase if not short or phase.name != "shrink"],
        report_multiple_bugs=False,
        suppress_health_check=list(hypothesis.HealthCheck),
        verbosity=hypothesis.Verbosity.quiet,
    )
    @hypothesis.given(st.tuples(*drawn(case)))
    def example(given: tuple[Any, ...]) -> None:
        nonlocal examples
        examples += 1
        try:
            work(case, *given)
        except Fault as error:
            shown = ", ".join(f"{part!r:.200}" for part in given)
            raise type(error)(f"{attack} --case '{case}': {shown}\n    {error}") from None

    try:
        example()
    except Fault as found:
        return examples, [found]
    return examples, []


def prepare() -> None:
    """Load here what children need, so that each has not to."""
    for name in ("joblib", "pandas", "pyarrow.parquet", "safetensors.torch", "scipy.stats", "torch"):
        importlib.import_module(name)
    for name in ("gpulab.__main__", "gpulab.cli", "gpulab.training.run"):
        importlib.import_module(name)
    gl.passport()
    gl.load("digits")


def table(asked: argparse.Namespace) -> bool:
    """Print the table, row by row with what was found; returns whether anything was."""
    short, traced, failed = asked.attack == "short", children.traces(), False
    print("| attack | examples | failures | time |", "|---|---|---|---|", sep="\n")
    for name in ATTACKS if asked.attack in ("all", "short") else [asked.attack]:
        attack = ATTACKS[name]
        if attack.traced and not traced:
            print(f"| `{name}` | not done | strace is not installed here, or may not trace | |", flush=True)
            continue
        cases = [case for case in attack.cases if asked.case in (None, case)][: attack.of if short else None]
        begin = time.perf_counter()
        scores = [explore(name, case, short, asked.seed) for case in Progress(cases, desc=name, leave=False)]
        found = [fault for _, faults in scores for fault in faults]
        examples, seconds = sum(count for count, _ in scores), time.perf_counter() - begin
        print(f"| `{name}` | {examples:,} | {len(found)} | {seconds:.0f} s |", flush=True)
        print(*(f"{type(fault).__name__}: {fault}\n" for fault in found), sep="", end="", flush=True)
        failed |= bool(found)
    return failed


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("attack", choices=[*ATTACKS, "all", "short"])
    parser.add_argument("--case", help="one case, by its name")
    parser.add_argument("--seed", type=int, default=0, help="draw other examples")
    asked = parser.parse_args()
    try:
        prepare()
        failed = table(asked)
    finally:
        shutil.rmtree(BASE, ignore_errors=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
