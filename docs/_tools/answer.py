"""The figure on the front page and in the papers, from the recorded runs. `python
docs/_tools/answer.py` draws it anew.

Each seed was trained twice: with copied frames, and with overwritten frames, where all frames of a
window lie in one array, as the published line leaves them on a CPU. Five rows show the authors' own
network in Chainer. The other rows show gpulab's port: trained ten times as long, and at the
published length, where three speeds of the walk share one row.
"""

from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.ticker import FixedLocator, NullLocator

import companion
import gpulab as gl
from companion.findings import listed
from gpulab.picture import Picture
from gpulab.plots.theme import INK, ON_CPU, ON_GPU, RIGHT_OF_AXES, canvas, draw_points, with_theme
from gpulab.wording import COPIED, OVERWRITTEN

DOCS = Path(__file__).parents[1]
FILE = DOCS / "_static" / "answer.svg"
LOOP = DOCS / "_static" / "loop.svg"  # the mechanism, also on the front page
IN_PAPERS = DOCS / "paper" / "answer.png"  # the tools of journals do not accept SVG
TINTS = {"GPU": ON_GPU, "CPU": ON_CPU}
# Where the names of the groups begin and the counts end, in widths of the axes.
NAMES = -0.4
COUNTS = 1.28
TEXT = {"fontsize": 9.5, "bbox": {"fc": "white", "ec": "none", "pad": 0.8}, **RIGHT_OF_AXES}
PORT = {"paper": "160×120", "quick": "64×48"}


def short_runs():
    """Return the port's registered runs of the published line, except those on a device that
    always copies.
    """
    runs = gl.recorded_runs().query("experiment == 'prednet' and loader != 'window'")
    return runs[(runs.profile == "paper") | (runs.device == "cpu")]


def pairs():
    """Return one row per run: `row` (film, device, size and length), `seed`, `frames_are`, and
    `times` (loss divided by that of repeating the last frame).
    """
    published = companion.published_runs()
    published = published[~published.condition.str.endswith("no round trip")].assign(
        code="authors", speed=2.0
    )
    port = pd.concat(
        [gl.recorded_runs("longer").query("setting == 'cuda:tf32=off'"), short_runs()],
        ignore_index=True,
    )
    port = port.assign(
        film="walk", size=port.profile.map(PORT), repeat_loss=companion.repeat_losses(port)
    )
    runs = pd.concat([published, port.assign(code=port.profile)], ignore_index=True)
    device = runs.device.map({"cuda": "GPU", "cpu": "CPU"})
    # The published line, `reused`, copies each frame on a GPU and none on a CPU.
    overwritten = runs.loader.isin(["shared", "imitated"]) | (
        (runs.loader == "reused") & (runs.device == "cpu")
    )
    long = runs.frames.map("\n{:,} frames".format).where(runs.code != "authors", "")
    row = runs.film + ", " + device + "\n" + runs["size"].str.replace("x", "×") + long
    return runs.assign(
        row=row,
        frames_are=overwritten.map({True: OVERWRITTEN, False: COPIED}),
        times=runs.final_loss / runs.repeat_loss,
        device=device,
    )


def counted(runs):
    """Count the pairs that end higher with overwritten frames: by name, the count, the number of
    pairs, and a description of them.
    """
    losses = paired(runs)
    worse, code = losses[OVERWRITTEN] > losses[COPIED], losses.index.get_level_values("code")
    long = losses.index.get_level_values("row").str.contains("50,000")
    of = {
        "authors": ("of the authors' code", code == "authors"),
        "long": ("of our port after 50,000 frames", long),
        "short": ("of our port after 5,000 frames", (code == "paper") & ~long),
        "small": ("of our port at a small size", code == "quick"),
    }
    return {name: (worse[which].sum(), which.sum(), words) for name, (words, which) in of.items()}


def sentence(runs):
    """Return the figure's text alternative, computed from the runs."""
    losses = paired(runs)
    higher = [
        f"in {worse} of {count} pairs {words}" for worse, count, words in counted(runs).values()
    ]
    beat = (losses < 1).sum()
    return (
        "Each seed was trained twice, with copied and with overwritten frames. With overwritten"
        f" frames the loss ends higher {listed(higher)}. Of the {len(losses)} runs with copied"
        f" frames, {beat[COPIED]} beat repeating the last frame; of the {len(losses)} with"
        f" overwritten frames, {beat[OVERWRITTEN] or 'none does'}."
    )


def paired(runs):
    """Return one row per pair: `times` by condition."""
    return runs.pivot_table(
        index=["code", "row", "speed", "seed"], columns="frames_are", values="times"
    ).dropna()


def device_table():
    """Compare a CPU with a GPU, both with copied frames: one row per metric of the port's
    trainings at the published size.
    """
    runs = companion.title_runs().query("experiment == 'prednet' and gradients == 'written out'")
    runs = runs[(runs.profile == "paper") & ~runs.setting.str.endswith("again")]
    return companion.learning_table(runs, factor="setting", reference="cuda:tf32=off").set_index(
        "metric"
    )


@with_theme
def picture():
    """Draw two rows for each device, film, size and length, copied above overwritten frames, with
    the two trainings of each seed joined. The figure is narrow, to be read on a telephone.
    """
    runs = pairs()
    figure, (axes,) = canvas(height=7.2)
    figure.set_figwidth(4.0)
    names = dict(zip(runs.row, runs.code, strict=True))
    # Groups of two rows, and space for a heading above the first group of each code.
    places = [row + (0 if code == "authors" else 0.7) for row, code in enumerate(names.values())]
    ticks = {}
    for place, name in zip(places, names, strict=True):
        some = runs[runs.row == name]
        tint = TINTS[some.device.iloc[0]]
        heights = {COPIED: place - 0.07, OVERWRITTEN: place + 0.26}
        losses = paired(some)
        # one line with gaps for all pairs
        joined = losses.assign(between=np.nan)[[*heights, "between"]]
        up_down = np.tile([*heights.values(), np.nan], len(losses))
        axes.plot(joined.to_numpy().ravel(), up_down, color=tint, lw=0.5, alpha=0.35, zorder=1)
        for condition, part in some.groupby("frames_are"):
            height = heights[condition]
            draw_points(axes, part.times, [height] * len(part), tint, is_hollow=True, s=14)
            left = f"{(part.times < 1).sum()} of {len(part)}"
            axes.annotate(left, (COUNTS, height), ha="right", **TEXT)
            ticks[height] = condition.partition(" ")[0]
        worse = f"{(losses[OVERWRITTEN] > losses[COPIED]).sum()} of {len(losses)} pairs worse"
        axes.annotate(name.replace("\n", ", "), (NAMES, place - 0.36), color=tint, **TEXT)
        axes.annotate(worse, (COUNTS, place - 0.36), ha="right", color=tint, **TEXT)
    axes.axvline(1, color=INK, lw=0.8, ls="--", zorder=1)
    ported = next(
        place for place, code in zip(places, names.values(), strict=True) if code != "authors"
    )
    for words, place in (("The authors' code", places[0]), ("Our port", ported)):
        axes.annotate(words, (NAMES, place - 0.75), weight="bold", **TEXT)
    axes.annotate("left of the line", (COUNTS, places[0] - 0.75), ha="right", **TEXT)
    axes.set_yticks([*ticks], [*ticks.values()])
    axes.tick_params(labelsize=9.5)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_ylim(places[-1] + 0.45, -0.9)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator([0.3, 1, 3, 10, 20]))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(
        "final loss, divided by that of repeating\nthe last frame (dashed; left is better)",
        fontsize=9.5,
    )
    return Picture(figure, sentence(runs))


def write(drawn, file):
    """Write a picture as SVG, with the same bytes each time."""
    with mpl.rc_context({"svg.hashsalt": "gpulab"}):
        drawn.figure.savefig(file, metadata={"Date": None, "Title": drawn.alt}, bbox_inches="tight")


if __name__ == "__main__":
    drawn = picture()
    write(drawn, FILE)
    write(companion.draw_published_loop(), LOOP)
    drawn.figure.savefig(IN_PAPERS, dpi=200, bbox_inches="tight", metadata={"Software": None})
