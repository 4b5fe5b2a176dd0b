"""The figure on the front page, from the recorded runs. `python docs/answer.py` draws `answer.svg` anew.

Every seed twice: each frame in memory of its own, and all frames of a window in one array, as the published line has
it on a CPU. Five rows are the authors' own network in Chainer, the others gpulab's port: ten times as long, and at the
published length, where three speeds of the walk are one row.
"""

from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.ticker import FixedLocator, NullLocator

import companion
import gpulab as gl
from companion.findings import listed
from gpulab.plots.style import BESIDE, INK, ON_CPU, ON_GPU, canvas, points
from gpulab.report import Picture

FILE = Path(__file__).with_name("answer.svg")
OWN, SHARED = "own", "shared"
TINTS = {"GPU": ON_GPU, "CPU": ON_CPU}


PORT = {"paper": "160x120, our port", "quick": "64x48, our port"}


def short_runs():
    """The port's registered runs of the published line, without those whose device copies in any case."""
    runs = gl.recorded_runs().query("experiment == 'prednet' and loader != 'window'")
    return runs[(runs.profile == "paper") | (runs.device == "cpu")]


def pairs():
    """A row a run: `row` (where, on what, how long), `seed`, `memory`, `times` (final loss over that of repeating)."""
    published = companion.published_runs()
    published = published[~published.condition.str.endswith("no round trip")].assign(code="authors", speed=2.0)
    port = pd.concat([companion.longer_runs().query("setting == 'cuda:tf32=off'"), short_runs()], ignore_index=True)
    port = port.assign(film="walk", size=port.profile.map(PORT), repeat_loss=companion.repeat_losses(port))
    runs = pd.concat([published, port.assign(code=port.profile)], ignore_index=True)
    device = runs.device.map({"cuda": "GPU", "cpu": "CPU"})
    # As published: on a GPU each frame is copied, on a CPU none is.
    shared = runs.loader.isin(["shared", "imitated"]) | ((runs.loader == "reused") & (runs.device == "cpu"))
    long = runs.frames.map("\n{:,} frames".format).where(runs.code != "authors", "")
    row = runs.film + ", " + device + "\n" + runs["size"].str.replace("x", "×") + long
    return runs.assign(
        row=row, memory=shared.map({True: SHARED, False: OWN}), times=runs.final_loss / runs.repeat_loss, device=device
    )


def counted(runs):
    """How many pairs end higher with shared memory, of how many, and of what, by name."""
    losses = paired(runs)
    worse, code = losses[SHARED] > losses[OWN], losses.index.get_level_values("code")
    long = losses.index.get_level_values("row").str.contains("50,000")
    of = {
        "authors": ("of the authors' code", code == "authors"),
        "long": ("of our port after 50,000 frames", long),
        "short": ("of our port after 5,000 frames", (code == "paper") & ~long),
        "small": ("of our port at a small size", code == "quick"),
    }
    return {name: (worse[which].sum(), which.sum(), words) for name, (words, which) in of.items()}


def sentence(runs):
    """What the figure shows, from the runs: its text alternative."""
    losses = paired(runs)
    higher = [f"in {worse} of {count} pairs {words}" for worse, count, words in counted(runs).values()]
    beat = (losses < 1).sum()
    return (
        f"Every seed twice. Where all frames of a window share one memory, the loss ends higher {listed(higher)}. "
        f"Repeating the last frame is beaten by {beat[OWN]} of {len(losses)} runs with a memory for each frame, by "
        f"{beat[SHARED]} of {len(losses)} with shared memory."
    )


def paired(runs):
    """A row for each pair: `times` by memory."""
    return runs.pivot_table(index=["code", "row", "speed", "seed"], columns="memory", values="times").dropna()


def verdicts():
    """What the verdicts are on the mean loss of the port's short trainings, for the caption."""
    table = companion.anomaly_table(short_runs())
    table = table[table.metric == "final loss of all seeds"]
    said = []
    for profile, rows in table.groupby("profile", sort=False):
        of_decision = rows.groupby("decision", sort=False).speed
        speeds = [f"*{decision}* at speed {listed(map('{:g}'.format, which))}" for decision, which in of_decision]
        said.append(f"at {PORT[profile].partition(',')[0].replace('x', '×')} {', '.join(speeds)}")
    return "; ".join(said)


def devices():
    """What the verdicts are on a CPU against a GPU where each frame has a memory of its own, for the front page."""
    runs = companion.title_runs().query("experiment == 'prednet' and gradients == 'written out'")
    runs = runs[(runs.profile == "paper") & ~runs.setting.str.endswith("again")]
    table = companion.learning_table(runs, factor="setting", reference="cuda:tf32=off").set_index("metric")
    every, learned = table.loc["final loss of all seeds"], table.loc["final loss of the seeds that learned"]
    stuck = table.loc["share of seeds that did not learn"]
    return (
        f"With a memory for each frame, the mean loss of our port is *{learned.decision}* on a CPU and a GPU over "
        f"the {learned.seeds} seeds that learn: it differs by {abs(learned.relative):.1%}, and the margin is "
        f"{learned.margin_relative:.1%}. Over all {every.seeds} seeds it is *{every.decision}*, too, but the "
        f"{every.seeds - learned.seeds} that learn on neither widen the margin to {every.margin_relative:.0%}, which "
        f"says little. Whether the device decides how many seeds learn is *{stuck.decision}*: "
        f"{abs(stuck.difference) * stuck.seeds:.0f} of {stuck.seeds} changed sides."
    ).replace("%", " %")


def picture():
    """A row for each device, film, size and length; own memory above shared, seeds joined."""
    runs = pairs()
    figure, (axes,) = canvas(1, height=7.0)
    figure.set_figwidth(6.2)
    beside = {"textcoords": "offset points", "va": "center", "fontsize": 10}
    names = list(dict.fromkeys(runs.row))
    for place, name in enumerate(names):
        some = runs[runs.row == name]
        tint = TINTS[some.device.iloc[0]]
        heights = {OWN: place - 0.2, SHARED: place + 0.2}
        losses = paired(some)
        joined = losses.assign(between=np.nan)[[OWN, SHARED, "between"]]  # one line for all pairs, with gaps
        up_down = np.tile([*heights.values(), np.nan], len(losses))
        axes.plot(joined.to_numpy().ravel(), up_down, color=tint, lw=0.5, alpha=0.35, zorder=1)
        for memory, part in some.groupby("memory"):
            points(axes, part.times, [heights[memory]] * len(part), tint, hollow=True, s=16)
            beat = f"{(part.times < 1).sum()} of {len(part)}"
            axes.annotate(beat, (1.03, heights[memory]), fontsize=10, **BESIDE)
            if place == 0:
                axes.annotate(f"{memory} memory", (part.times.max(), heights[memory]), (9, 0), **beside)
        worse = f"{(losses[SHARED] > losses[OWN]).sum()} of {len(losses)}"
        axes.annotate(worse, (1.28, place), fontsize=10, **BESIDE)
    axes.axvline(1, color=INK, lw=0.8, ls="--", zorder=1)
    axes.annotate("repeating the last frame", (1, -0.7), (4, 0), **beside)
    axes.annotate("runs that\nbeat it", (1.03, -0.75), fontsize=10, **BESIDE)
    axes.annotate("pairs higher\nwith shared", (1.28, -0.75), fontsize=10, **BESIDE)
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(labelsize=10)  # read where a page is narrow
    axes.set_ylim(len(names) - 0.5, -0.95)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator([0.3, 0.5, 1, 2, 3, 5, 10, 20]))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("final loss / loss of repeating the last frame (lower is better)", fontsize=10)
    return Picture(figure, sentence(runs))


def write(drawn, file):
    """Write a picture as SVG: the same bytes each time."""
    with mpl.rc_context({"svg.hashsalt": "gpulab"}):
        drawn.figure.savefig(file, metadata={"Date": None, "Title": drawn.alt}, bbox_inches="tight")


if __name__ == "__main__":
    write(picture(), FILE)
