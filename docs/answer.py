"""The figure on the front page, from the recorded runs. `python docs/answer.py` draws `answer.svg` anew.

Every seed twice: each frame in memory of its own, and all frames of a window in one array, as the published line has
it on a CPU. Five rows are the authors' own network in Chainer, the last is gpulab's port, ten times as long.
"""

from pathlib import Path

import matplotlib as mpl
import pandas as pd
from matplotlib.ticker import FixedLocator, NullLocator

import gpulab as gl
from gpulab.plots.style import BESIDE, INK, ON_CPU, ON_GPU, canvas, points
from gpulab.report import Picture

FILE = Path(__file__).with_name("answer.svg")
OWN, SHARED = "own", "shared"
TINTS = {"GPU": ON_GPU, "CPU": ON_CPU}


def pairs():
    """A row a run: `row` (where, on what, how long), `seed`, `memory`, `times` (final loss over that of repeating)."""
    published = gl.companion.published_runs()
    published = published[~published.condition.str.endswith("no round trip")]
    longer = gl.companion.longer_runs().query("setting == 'cuda:tf32=off'")
    longer = longer.assign(film="walk", size="160x120", repeat_loss=gl.companion.repeat_losses(longer))
    runs = pd.concat([published, longer], ignore_index=True)
    device = runs.device.map({"cuda": "GPU", "cpu": "CPU"})
    # As published: on a GPU each frame is copied, on a CPU none is.
    shared = runs.loader.isin(["shared", "imitated"]) | ((runs.loader == "reused") & (runs.device == "cpu"))
    long = runs.frames.map("\n{:,} frames".format).where(runs.frames > runs.frames.min(), "")
    row = runs.film + ", " + device + "\n" + runs["size"].str.replace("x", "×") + long
    return runs.assign(
        row=row, memory=shared.map({True: SHARED, False: OWN}), times=runs.final_loss / runs.repeat_loss, device=device
    )


def sentence(runs):
    """What the figure shows, from the runs: its text alternative."""
    losses = runs.pivot_table(index=["row", "seed"], columns="memory", values="times").dropna()
    worse, beat = (losses[SHARED] > losses[OWN]).sum(), (losses < 1).sum()
    return (
        f"Every seed twice. Where all frames of a window share one memory, the loss ends higher in {worse} of "
        f"{len(losses)} pairs. Repeating the last frame is beaten by {beat[OWN]} of {len(losses)} runs with a "
        f"memory for each frame, by {beat[SHARED]} of {len(losses)} with shared memory."
    )


def picture():
    """A row for each device, film, size and length; own memory above shared, seeds joined."""
    runs = pairs()
    figure, (axes,) = canvas(1, height=5.0)
    figure.set_figwidth(5.6)
    beside = {"textcoords": "offset points", "va": "center", "fontsize": 10}
    names = list(dict.fromkeys(runs.row))
    for place, name in enumerate(names):
        some = runs[runs.row == name]
        tint = TINTS[some.device.iloc[0]]
        heights = {OWN: place - 0.2, SHARED: place + 0.2}
        for _, pair in some.groupby("seed"):
            axes.plot(pair.times, pair.memory.map(heights), color=tint, lw=0.5, alpha=0.35, zorder=1)
        for memory, part in some.groupby("memory"):
            points(axes, part.times, [heights[memory]] * len(part), tint, hollow=True, s=16)
            beat = f"{(part.times < 1).sum()} of {len(part)}"
            axes.annotate(beat, (1.03, heights[memory]), fontsize=10, **BESIDE)
            if place == 0:
                axes.annotate(f"{memory} memory", (part.times.max(), heights[memory]), (9, 0), **beside)
    axes.axvline(1, color=INK, lw=0.8, ls="--", zorder=1)
    axes.annotate("repeating the last frame", (1, -0.7), (4, 0), **beside)
    axes.annotate("seeds that\nbeat it", (1.03, -0.7), fontsize=10, **BESIDE)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.95)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator([0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5]))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("final loss / loss of repeating the last frame")
    return Picture(figure, sentence(runs))


def write(drawn, file):
    """Write a picture as SVG: the same bytes each time."""
    with mpl.rc_context({"svg.hashsalt": "gpulab"}):
        drawn.figure.savefig(file, metadata={"Date": None, "Title": drawn.alt}, bbox_inches="tight")


if __name__ == "__main__":
    write(picture(), FILE)
