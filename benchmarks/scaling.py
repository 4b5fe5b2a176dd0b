"""How the time and the memory of training PredNet grow with frames, channels, window and replicas.

    python benchmarks/scaling.py cpu:threads=2 --record data/measured/scaling-my-cpu.json
    python benchmarks/scaling.py cuda:tf32=on --size paper --record data/measured/scaling-my-gpu.json --replicas
    python benchmarks/scaling.py --plot benchmarks    # a picture of each record

One of them changes at a time, from the size named. Plain and fast path take turns, as in `prednet.py`; replicas are
measured as in `replicas.py`. Memory is the most that a GPU's allocator gave.
"""

from pathlib import Path
from typing import Annotated, Any

import entrants
import pandas as pd
import prednet
import replicas
import torch
import typer
from matplotlib.ticker import NullLocator

import gpulab as gl
from gpulab.plots.style import canvas, colour, finished, key, log_scale, points
from gpulab.report import Picture
from gpulab.store import records

Shape = tuple[int, int, int, int, tuple[int, ...]]
FACTORS = (0.5, 1.0, 2.0)
WINDOWS = (5, 10, 20, 40)
COUNTS = (1, 2, 4, 8, 16)
AXES = {
    "frame size": "pixels of a frame",
    "channels": "times the channels",
    "window": "frames of a window",
    "replicas": "networks at once",
}


def variants(shape: Shape) -> list[tuple[str, float, Shape]]:
    """What changes, to what, and the size that this makes."""
    batch, count, height, width, channels = shape
    found: list[tuple[str, float, Shape]] = []
    for factor in FACTORS:
        halved = 2 ** (len(channels) - 1)  # each layer but the last halves a frame
        edges = int(height * factor) // halved * halved, int(width * factor) // halved * halved
        found.append(("frame size", edges[0] * edges[1], (batch, count, *edges, channels)))
    for factor in FACTORS:
        wider = (channels[0], *(int(c * factor) for c in channels[1:]))
        found.append(("channels", factor, (batch, count, height, width, wider)))
    found += [("window", length, (batch, length, height, width, channels)) for length in WINDOWS]
    return found


def measure(text: str, size: str, rounds: int, many: bool) -> list[dict[str, Any]]:
    """A row an entrant and variant; `per_second` is in frames."""
    rows: list[dict[str, Any]] = []
    with gl.setting(text) as setting:
        for what, value, shape in variants(prednet.SIZES[size]):
            prednet.SIZES["now"] = shape
            made = {
                "gpulab, plain": lambda: prednet.gpulabs("now", setting, False),
                "gpulab": lambda: prednet.gpulabs("now", setting, True),
            }
            raced, _ = entrants.race(made, shape[0] * shape[1], setting, rounds, f"{what} {value:g}")
            rows += [{"what": what, "value": value, **row} for row in raced]
    if many:
        replicas.replicas.TELL = 0.0
    for count in COUNTS if many else ():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        row = {"what": "replicas", "value": count, "setting": text, "entrant": "gpulab"}
        row["per_second"] = replicas.speed("prednet", size, text, count)
        rows.append(row | {"memory": torch.cuda.max_memory_allocated()})
    return rows


def picture(record: dict[str, Any]) -> Picture:
    """Frames per second above, memory below where it was measured."""
    rows = pd.DataFrame(record["rows"])
    kinds = [*dict.fromkeys(rows.what)]
    has_memory = bool(rows.memory.notna().any())
    figure, axes = canvas(len(kinds), height=4.2 if has_memory else 2.6, rows=1 + has_memory)
    tint = colour(rows.setting[0])
    for place, axis in enumerate(axes):
        if place % len(kinds):
            axis.sharey(axes[place - 1])
        kind, column = kinds[place % len(kinds)], "memory" if place >= len(kinds) else "per_second"
        for entrant, some in rows[rows.what == kind].groupby("entrant", sort=False):
            plain, y = entrant != "gpulab", some[column] / (2**30 if column == "memory" else 1)
            axis.plot(some.value, y, color=tint, lw=1.2, ls=":" if plain else "-")
            points(axis, some.value, y, tint, hollow=plain, s=20)
        axis.set(xscale="log")
        whole = rows[column].dropna() / (2**30 if column == "memory" else 1)
        log_scale(axis.yaxis, whole.min(), whole.max())
        axis.set_xticks(sorted(set(rows[rows.what == kind].value)), minor=False)
        axis.xaxis.set_major_formatter("{x:,g}")
        axis.xaxis.set_minor_locator(NullLocator())
        axis.tick_params(labelsize=7)
        if place >= len(axes) - len(kinds):
            axis.set_xlabel(AXES[kind], fontsize=8)
        if place % len(kinds) == 0:
            axis.set_ylabel("memory (GiB)" if column == "memory" else "frames/s", fontsize=8)
    title = f"PredNet, from the {record['size']} size, {record['machine']}, {rows.setting[0]}"
    keys = [key("fast path", color=tint, marker="o"), key("plain", color=tint, ls=":", marker="o", mfc="white")]
    return finished(figure, title, f"Frames per second against {', '.join(kinds)}. {title}.", keys)


def main(
    setting: Annotated[str | None, typer.Argument()] = None,
    size: Annotated[str, typer.Option(help="quick or paper")] = "quick",
    rounds: int = 5,
    many: Annotated[bool, typer.Option("--replicas", help="also networks that share a GPU")] = False,
    record: Annotated[Path | None, typer.Option(help="JSON file, such as data/measured/scaling-my-gpu.json")] = None,
    plot: Annotated[Path | None, typer.Option(help="folder for a picture of each record")] = None,
) -> None:
    if setting:
        rows = measure(setting, size, rounds, many)
        print(pd.DataFrame(rows).to_string())
        if record:
            records.write_json(record, records.measured(setting.partition(":")[0], size=size, rows=rows))
    for file in sorted(entrants.RECORDS.glob("scaling-*.json")) if plot else ():
        picture(records.read_json(file)).save(plot / f"{file.stem}.png")


if __name__ == "__main__":
    typer.run(main)
