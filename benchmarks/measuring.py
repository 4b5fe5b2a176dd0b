"""What the benchmarks share: `race`, records, and tables between the marks of a page."""

from __future__ import annotations

import re
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import typer
from tqdm.auto import tqdm

import gpulab as gl
from gpulab.errors import describe_error
from gpulab.settings import Setting
from gpulab.store import recorded

ROOT = Path(__file__).resolve().parents[1]  # of the clone
RESULTS = ROOT / "benchmarks" / "results"
Step = Callable[[], Any]
WARM_UP = 3  # steps of each way before any is timed


@dataclass
class Way:
    """One way of doing something: its step, its seconds in each round, and its peak GPU memory."""

    step: Step
    memory: int | None = None
    seconds: list[float] = field(default_factory=list)

    def per_second(self, count: int) -> dict[str, Any]:
        """Median and quartiles of how many are done in a second, where a step does `count`."""
        slow, median, fast = (count / seconds for seconds in quartiles(self.seconds)[::-1])
        return {"per_second": median, "quartiles": [slow, fast], "memory": self.memory}


def race(
    made: Mapping[str, Callable[[], Step]],
    setting: Setting,
    rounds: int,
    steps: int = 1,
    warm_up: int = WARM_UP,
    label: str = "",
    failed: dict[str, str] | None = None,
) -> dict[str, Way]:
    """Time several ways of doing something: each is made and warmed up, then they take turns.

    So a machine that warms up or slows down favours none.

    Args:
        made: Makes the step of each way.
        setting: Of the device, which is waited for; it is not applied here.
        rounds: How many turns each has.
        steps: Of a turn, which are timed together.
        warm_up: Steps before.
        label: Of the progress bar.
        failed: Takes what kept a way from being made and warmed up, which is then left out; without
            it that is raised.

    Returns:
        The ways. `memory` is the most that was allocated on a GPU while one was made and warmed up,
        above what the others hold.
    """
    ways: dict[str, Way] = {}
    for name, make in made.items():
        if setting.kind == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        try:
            way = Way(make())
            for _ in range(warm_up):
                way.step()
            wait_for(setting)
        except Exception as problem:
            # Whatever a library raises, the others are still to be measured.
            if failed is None:
                raise
            failed[name] = describe_error(problem)[:200]
            continue
        if setting.kind == "cuda":
            way.memory = torch.cuda.max_memory_allocated() - before
        ways[name] = way
    for _ in tqdm(range(rounds), desc=label, disable=None):
        for way in ways.values():
            way.seconds.append(seconds(way.step, setting, steps))
    return ways


def seconds(step: Step, setting: Setting, steps: int = 1) -> float:
    """How long a step takes until the device is done, the mean of so many."""
    wait_for(setting)
    started = time.perf_counter()
    for _ in range(steps):
        step()
    wait_for(setting)
    return (time.perf_counter() - started) / steps


def wait_for(setting: Setting) -> None:
    """Until the device has done what it was told."""
    getattr(torch, setting.kind).synchronize()


def quartiles(values: list[float]) -> list[float]:
    """The lower quartile, the median and the upper quartile; of one value, that value."""
    return statistics.quantiles(values, n=4) if len(values) > 1 else 3 * values


# --- records and pages ----------------------------------------------------------------------------


def this_command() -> str:
    """The command line of this process."""
    return shlex.join(["python", *sys.argv])


def made_by() -> str:
    """Which command made a page, when and where."""
    return f"Made by `{this_command()}` on {date.today()}: {machine()}."


def keep(file: Path | None, device: str, **tables: Any) -> dict[str, Any]:
    """What was measured, with passport, machine and command; in a file, too, where one is named."""
    document = recorded.make_measurement(device, **tables)
    if file:
        recorded.write_document(file, document)
    return document


def machine() -> str:
    """This machine for a page, and how many threads torch has."""
    return f"{gl.passport().summary()}, {torch.get_num_threads()} threads"


def table(heads: str, rows: Iterable[Sequence[Any]]) -> str:
    """A table of Markdown; heads are separated by `|`."""
    lines = [heads.split("|"), ["---"] * (1 + heads.count("|")), *rows]
    return "\n".join(f"| {' | '.join(str(cell).strip() for cell in line)} |" for line in lines)


def markdown(frame: pd.DataFrame) -> str:
    """The same of a frame, without its index."""
    return table("|".join(frame.columns), frame.itertuples(index=False))


def show(title: str, page: Path | None, **parts: str) -> None:
    """Print what was measured, and put it on a page: what people wrote there stays.

    Args:
        title: Of a page that is not there yet.
        page: A Markdown file, in which a part stands between `<!-- NAME -->` and `<!-- /NAME -->`.
        parts: By their names.
    """
    print("\n\n".join(parts.values()))
    if page is None:
        return
    empty = "\n".join(f"\n<!-- {name} -->\n<!-- /{name} -->" for name in parts)
    text = page.read_text(encoding="utf-8") if page.exists() else f"# {title}\n{empty}\n"
    for name, part in parts.items():
        marks = re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- /{name} -->)", re.DOTALL)
        if not marks.search(text):
            raise SystemExit(f"{page} has no marks <!-- {name} --> and <!-- /{name} -->")
        text = marks.sub(lambda _, part=part: f"{part.strip()}\n", text)
    page.write_text(text, encoding="utf-8")


def command_line(doc: str) -> typer.Typer:
    """An application with subcommands, which the first line of a docstring explains."""
    return typer.Typer(
        help=doc.splitlines()[0], rich_markup_mode=None, add_completion=False, no_args_is_help=True
    )


def run(app: Callable[[], Any]) -> None:
    """A command line whose errors of gpulab's are a sentence."""
    try:
        app()
    except gl.GpulabError as error:
        raise SystemExit(f"error: {error}") from None
