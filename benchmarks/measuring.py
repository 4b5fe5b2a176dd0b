"""Helpers of the benchmarks: `race`, records, and tables between the marks of a page."""

from __future__ import annotations

import ctypes
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

ROOT = Path(__file__).resolve().parents[1]  # the root of the clone
RESULTS = ROOT / "benchmarks" / "results"
Step = Callable[[], Any]
WARM_UP = 3  # steps of each way before any step is timed
ENERGY_SECONDS = 3.0  # the energy of a way is measured for so long, since counters are coarse


@dataclass
class Way:
    """One way of doing something.

    Attributes:
        step: Does it once.
        memory: The peak GPU memory in bytes.
        seconds: The seconds of a step, in each round.
        joules: The energy of a step, as the GPU counts it; None if it is not measured.
    """

    step: Step
    memory: int | None = None
    seconds: list[float] = field(default_factory=list)
    joules: float | None = None

    def per_second(self, count: int) -> dict[str, Any]:
        """Describe the speed, if a step does `count` items.

        Returns:
            The median and the quartiles of items per second, `memory`, and `joules` for an item.
        """
        slow, median, fast = (count / seconds for seconds in quartiles(self.seconds)[::-1])
        joules = None if self.joules is None else self.joules / count
        return {
            "per_second": median,
            "quartiles": [slow, fast],
            "memory": self.memory,
            "joules": joules,
        }


def race(
    made: Mapping[str, Callable[[], Step]],
    setting: Setting,
    rounds: int,
    steps: int = 1,
    warm_up: int = WARM_UP,
    label: str = "",
    failed: dict[str, str] | None = None,
) -> dict[str, Way]:
    """Time several ways of doing something: each is prepared and warmed up, then they take turns.

    A machine that warms up or slows down therefore favours none of them.

    Args:
        made: For each way, a function that makes its step.
        setting: The setting whose device is waited for. It is not applied by this function.
        rounds: The number of turns of each way.
        steps: The number of steps in a turn, which are timed together.
        warm_up: The number of steps before the first turn.
        label: The label of the progress bar.
        failed: Receives the error of each way that could not be prepared and warmed up, which is
            then left out. If it is None, the error is raised.

    Returns:
        The ways. `memory` is the largest GPU memory that was allocated while a way was prepared and
        warmed up, in addition to what the others hold.
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
            # A library may raise any error. The others are still measured.
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


def energy(step: Step, setting: Setting) -> float | None:
    """Return the mean energy of a step in joules, as the GPU counts it; None if it does not.

    Steps are repeated for `ENERGY_SECONDS`. The energy that the card uses when idle is included,
    and that of the rest of the machine is not.
    """
    wait_for(setting)
    before = joules(setting)
    if before is None:
        return None
    started = time.perf_counter()
    steps = 0
    while time.perf_counter() - started < ENERGY_SECONDS:
        step()
        wait_for(setting)
        steps += 1
    after = joules(setting)
    return None if after is None else (after - before) / steps


def seconds(step: Step, setting: Setting, steps: int = 1) -> float:
    """Return the mean time of `steps` steps, until the device is done."""
    wait_for(setting)
    started = time.perf_counter()
    for _ in range(steps):
        step()
    wait_for(setting)
    return (time.perf_counter() - started) / steps


def wait_for(setting: Setting) -> None:
    """Wait until the device has finished its work."""
    getattr(torch, setting.kind).synchronize()


def joules(setting: Setting) -> float | None:
    """Return the energy used by a GPU since its driver was loaded (NVML); None if not counted.

    Examples:
        >>> joules(Setting.parse("cpu")) is None
        True
    """
    if setting.kind != "cuda" or torch.version.hip:
        return None
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    handle, used = ctypes.c_void_p(), ctypes.c_ulonglong()
    uuid = f"GPU-{torch.cuda.get_device_properties(setting.device).uuid}".encode()
    failed = nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(handle))
    failed = failed or nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(used))
    return None if failed else used.value / 1000


def quartiles(values: list[float]) -> list[float]:
    """Return the lower quartile, the median and the upper quartile; a single value three times."""
    return statistics.quantiles(values, n=4) if len(values) > 1 else 3 * values


# --- records and pages ----------------------------------------------------------------------------


def this_command() -> str:
    """Return the command line of this process."""
    return shlex.join(["python", *sys.argv])


def made_by() -> str:
    """State which command made a page, when and where."""
    return f"Made by `{this_command()}` on {date.today()}: {machine()}."


def keep(file: Path | None, device: str, **tables: Any) -> dict[str, Any]:
    """Return measurements with passport, machine and command; write them to `file` if given."""
    document = recorded.make_measurement(device, **tables)
    if file:
        recorded.write_document(file, document)
    return document


def machine() -> str:
    """Describe this machine for a page, with the number of torch's threads."""
    return f"{gl.passport().summary()}, {torch.get_num_threads()} threads"


def table(heads: str, rows: Iterable[Sequence[Any]]) -> str:
    """Return a Markdown table; `heads` are separated by `|`."""
    lines = [heads.split("|"), ["---"] * (1 + heads.count("|")), *rows]
    return "\n".join(f"| {' | '.join(str(cell).strip() for cell in line)} |" for line in lines)


def markdown(frame: pd.DataFrame) -> str:
    """Return a data frame as a Markdown table, without its index."""
    return table("|".join(frame.columns), frame.itertuples(index=False))


def show(title: str, page: Path | None, **parts: str) -> None:
    """Print results, and put them on a page without changing the rest of the page.

    Args:
        title: The title of a page that does not exist yet.
        page: A Markdown file, in which each part is between `<!-- NAME -->` and `<!-- /NAME -->`.
        parts: The parts, by their names.
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
    """Create a command line with subcommands, whose help is the first line of a docstring."""
    return typer.Typer(
        help=doc.splitlines()[0], rich_markup_mode=None, add_completion=False, no_args_is_help=True
    )


def run(app: Callable[[], Any]) -> None:
    """Run a command line, and print an error of gpulab as one sentence."""
    try:
        app()
    except gl.GpulabError as error:
        raise SystemExit(f"error: {error}") from None
