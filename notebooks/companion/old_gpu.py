"""An old card and a new one: why a covariance fails in TF32, what the cure costs, and what one may say of it.

The network is `gpulab.models.Whitener`. What an H200 did with it is kept in `data/runs`, `measured` and `traces`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np
import pandas as pd
import seaborn as sns
import torch

import gpulab as gl
from companion.findings import CheckedSentences, Part, finding, listed, setting_in_text
from companion.first_windows import FirstWindow
from gpulab.audits.audits import Audit
from gpulab.models.autoencoders import COVARIANCES, EPSILON, Whitener, covariance
from gpulab.plots import style
from gpulab.plots.names import setting_words
from gpulab.plots.style import BESIDE, FAINT, INK, Look
from gpulab.report import Picture
from gpulab.stats.verdicts import Verdict
from gpulab.store.recorded import recorded_folder, recorded_table
from gpulab.store.runs import history

USUAL = "one-pass under cuda:tf32=off"  # what the cures are held against
MARGINS = {"0.25sd": "a quarter", "0.5sd": "half"}
DECIDED = {
    "equivalent": "the same",
    "different but negligible": "slightly different",
    "inconclusive": "undecided",
    "different": "different",
}
WAY_COLOURS = {"one-pass": "#D55E00", "float32": "#0072B2", "centred": "#009E73"}


def covariance_spectrum(
    settings: Iterable[str], seeds: Iterable[int] = range(10), profile: str = "quick", ways: Iterable[str] = COVARIANCES
) -> pd.DataFrame:
    """The eigenvalues of the covariance that the whitener computes from its first batch, before any training.

    From the weights of each seed, computed under each of the settings, in each of the `ways`; the eigenvalues in
    float64. A row each: `setting`, `covariance` (one of `ways`), `seed`, `rank` (1 for the largest) and `eigenvalue`.

    >>> spectra = covariance_spectrum(["cpu", "cpu:emulate=tf32"], seeds=[7], ways=["one-pass"])
    >>> (spectra.eigenvalue < 0).groupby(spectra.setting).any().tolist()
    [False, True]
    """
    rows = []
    for setting, seed in itertools.product(settings, seeds):
        parsed, step = gl.Setting.parse(setting), FirstWindow("whitener", seed=seed, profile=profile)
        net = step.spec.model
        assert isinstance(net, Whitener)
        images = torch.from_numpy(step.frames[: net.batch_size]).float().div(255)
        with parsed.apply(), torch.no_grad():
            codes = net.to(parsed.device, parsed.dtype).codes(images.to(parsed.device, parsed.dtype))
            covariances = {way: covariance(codes, way).double().cpu() for way in ways}
        for way, matrix in covariances.items():
            values = torch.linalg.eigvalsh(matrix).flip(0).tolist()
            rows += [(setting, way, seed, rank, value) for rank, value in enumerate(values, 1)]
    return pd.DataFrame(rows, columns=["setting", "covariance", "seed", "rank", "eigenvalue"])


def recorded_prices() -> pd.DataFrame:
    """What a step of a large whitener cost on the machines that recorded it: a row for each setting and covariance.

    `ms` is the median, in milliseconds a step; `ms_low` and `ms_high` are the quartiles.
    """
    return recorded_table("precision")


def recorded_cards_audit() -> Audit:
    """The audit of the whitener's first step on an H200, in float32 against TF32, from the recorded traces."""
    folder = recorded_folder("traces")
    answer = gl.audit(folder / "whitener-cuda-tf32-off.trace", folder / "whitener-cuda-tf32-on.trace")
    assert isinstance(answer, Audit)
    return answer


def cards_table(frame: pd.DataFrame) -> pd.DataFrame:
    """How many runs became NaN, for each setting and covariance in a frame of runs; here and recorded apart.

    `updates` is the median update at which they did, `final_loss` the mean of the others.
    """
    group_columns = ["recorded", "machine", "setting", "covariance"]
    runs = frame.assign(lost=frame.status == "diverged")
    measures = {"diverged": ("lost", "sum"), "updates": ("diverged_at", "median"), "final_loss": ("final_loss", "mean")}
    return runs.groupby(group_columns, sort=False, as_index=False).agg(seeds=("seed", "nunique"), **measures)


def cards_finding(
    runs: pd.DataFrame, report: Audit, cured: Verdict, retuned: Verdict, conversions: pd.DataFrame
) -> CheckedSentences:
    """What runs of the whitener, an audit, verdicts, recorded prices and ways to read a byte allow one to say.

    `cured` and `retuned` are the verdicts on changes of the arithmetic and of the training that were tried here; those
    on a GPU are made of the recorded runs. `conversions` are `recorded_measurements("conversions")` with those made
    here.
    """
    nan_sentences = []
    for row in cards_table(runs[runs.covariance == "one-pass"]).itertuples():
        origin = f"recorded on {row.machine}" if row.recorded else "here"
        nan_sentences.append(f"{row.diverged} of {row.seeds} seeds under {setting_in_text(row.setting)}, {origin}.")
    first = report.findings[0]
    runs_by_way = runs[runs.recorded].assign(way=lambda frame: frame.covariance + " under " + frame.setting)
    cure_runs = runs_by_way[
        (runs_by_way.way == USUAL) | ((runs_by_way.setting == "cuda:tf32=on") & (runs_by_way.covariance != "one-pass"))
    ]
    verdicts = [gl.verdict(cure_runs, factor="way", margin=margin, reference=USUAL) for margin in MARGINS]
    cures = []
    for row in verdicts[0].table.itertuples():
        covariance, setting = row.way.split(" under ")
        within = listed(
            f"{DECIDED[judged.decisions[row.way]]} within {words}"
            for words, judged in zip(MARGINS.values(), verdicts, strict=True)
        )
        cures.append(
            f"{covariance.capitalize()} under {setting_in_text(setting)}: {row.diverged} of {row.seeds} seeds became "
            f"NaN; the loss is {within} of the spread between seeds."
        )
    sections: dict[str, Part] = {
        "One-pass covariance became NaN": nan_sentences,
        "The operation": f"The audit blames {first.operation} ({first.phase}), {first.kind}, at {first.line}.",
        f"The cures, against one-pass under {setting_in_text(USUAL.split()[-1])}": cures,
    }
    for machine, rows in recorded_prices().groupby("machine"):
        ms = rows.set_index(["setting", "covariance"]).ms
        sections[f"The price, on {machine}"] = (
            f"A step of a large one takes {ms['cuda:tf32=off', 'one-pass']:.1f} ms in float32; in TF32 "
            f"{ms['cuda:tf32=on', 'centred']:.1f} ms centred, and {ms['cuda:tf32=on', 'float32']:.1f} ms with the one "
            "product kept in float32."
        )
    sections["The old losses, within one standard deviation between seeds"] = [
        f"Of {len(retuned.table)} retunings of the training {_outcomes(retuned)}.",
        f"Of {len(cured.table)} changes of the arithmetic {_outcomes(cured)}.",
    ]
    unchanged_share = (conversions.returned == 256).mean()
    divided = conversions.query("machine != 'here' and way == 'x / 255' and format == 'float32'")
    sections["Bytes of an image"] = [
        f"All 256 return as they were in {unchanged_share:.0%} of the ways, formats and devices tried.",
        *(
            f"x / 255 on {row.machine}: {row.as_division} of 256 have the bits of a division on this CPU."
            for row in divided.itertuples()
        ),
    ]
    return finding(sections, [line for judged in verdicts for line in str(judged).splitlines()])


def _outcomes(judged: Verdict) -> str:
    """How many changes gave the old losses back, how many were shown not to, and of how many neither is known."""
    decisions = judged.table.decision
    matches, rejected = decisions.isin(["equivalent", "different but negligible"]), decisions == "different"
    counts = {"gave the old losses back": matches, "did not": rejected, "left it open": ~matches & ~rejected}
    return ", ".join(f"{count.sum()} {words}" for words, count in counts.items())


@style.themed
def divergence(old: pd.DataFrame, new: pd.DataFrame) -> Picture:
    """Every run's loss while it learns, in the old card's arithmetic left, in the new one's right.

    Emulated runs are dashed, recorded ones thin. Above, a row a setting, a tick where a run became NaN.
    """
    figure, panels = style.canvas(2, height=3.9, sharey=True)
    counts = []
    for axes, frame, name in zip(panels, (old, new), ("old card", "new card"), strict=True):
        counts.append(f"{(frame.status == 'diverged').sum()} of {len(frame)}")
        across = axes.get_xaxis_transform()
        for row, (setting, runs) in enumerate(frame.groupby("setting", sort=False)):
            recorded, emulated, tint = runs.recorded.any(), gl.Setting.parse(setting).emulated, style.colour(setting)
            origin = f"recorded on {runs.machine.iloc[0]}" if recorded else "emulated here" if emulated else "here"
            line: Look = {"color": tint, "lw": 0.6 if recorded else 1.0, "ls": "--" if emulated else "-", "alpha": 0.7}
            losses = history(runs)
            sns.lineplot(
                losses[np.isfinite(losses.loss)], x="step", y="loss", units="id", estimator=None, ax=axes, **line
            )
            axes.plot([], [], label=f"{setting_words(setting)}, {origin}", **line)
            for update, count in runs.diverged_at[runs.status == "diverged"].astype(float).value_counts().items():
                axes.vlines(update, 0.88 - 0.1 * row, 0.92 - 0.1 * row, color=tint, lw=1.2, transform=across)
                count_words = f"{count}" if count > 1 else ""
                axes.annotate(count_words, (update, 0.93 - 0.1 * row), xycoords=across, ha="center", fontsize=7)
        axes.set(title=f"{name}: {counts[-1]} runs became NaN", xscale="log", xlabel="updates")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.margins(y=0.3)
        style.log_scale(axes.yaxis)
    last = max(axes.get_xlim()[1] for axes in panels)
    for axes in panels:
        axes.set_xlim(0.8, last)
    if (new.status == "diverged").any():
        ticks = "a tick: at this update\na run became NaN\n(or so many)"
        panels[1].annotate(ticks, (0.99, 0.68), xycoords="axes fraction", ha="right", va="center", fontsize=7)
    panels[0].set_ylabel(style.metric_label("loss", new.experiment))
    alt = (
        f"Loss against updates, a line for each run. Of the old card's runs {counts[0]} became NaN, of the new "
        f"card's {counts[1]}, each marked by a tick at the update where it did."
    )
    return style.finished(figure, "One network, one seed after another, on two cards' arithmetic", alt)


@style.themed
def spectrum(frame: pd.DataFrame) -> Picture:
    """The eigenvalues of one seed's covariance, and the smallest of each seed's, from `covariance_spectrum`.

    Below −ε, the dotted line, a covariance has no Cholesky factor.
    """
    figure, (rank_axes, smallest_axes) = style.canvas(2, height=3.8, sharey=True)
    smallest = frame.groupby(["setting", "covariance", "seed"]).eigenvalue.min()
    worst = smallest.idxmin()[2]
    names = []
    for position, ((setting, way), rows) in enumerate(frame.groupby(["setting", "covariance"], sort=False)):
        emulated = gl.Setting.parse(setting).emulated
        tint = WAY_COLOURS[way] if emulated else INK
        names.append(f"{way}\n{'emulated' if emulated else 'float32'}")
        worst_seed, smallest_values = rows[rows.seed == worst], smallest[setting, way]
        rank_axes.plot(
            worst_seed["rank"],
            worst_seed.eigenvalue,
            ls="--" if emulated else "-",
            lw=1.2,
            color=tint,
            label=f"{way}, {setting_words(setting)}",
        )
        style.points(
            smallest_axes, position + np.linspace(-0.2, 0.2, len(smallest_values)), smallest_values, tint, s=20
        )
    for axes in (rank_axes, smallest_axes):
        axes.axhline(-EPSILON, color=INK, lw=0.9, ls=":")
        axes.axhline(0, color=FAINT, lw=0.8)
        axes.set_yscale("symlog", linthresh=1e-5)
        axes.yaxis.set_major_formatter(style.power_of_ten)
    label_look: Look = {"xytext": (0, -3), "textcoords": "offset points", "va": "top", "fontsize": 8}
    rank_axes.annotate("no Cholesky factor below", (1, -EPSILON), **label_look)
    rank_axes.set(xlabel=f"rank of the eigenvalue (seed {worst}, first batch)", ylabel="eigenvalue of the covariance")
    smallest_axes.set_xticks(range(len(names)), names, fontsize=7)
    smallest_axes.set_xlabel("smallest eigenvalue, a point a seed")
    without_factor, seeds = int((smallest.xs("one-pass", level="covariance") < -EPSILON).sum()), frame.seed.nunique()
    headline = (
        f"First batch: in one pass {without_factor} of {seeds} covariances have an eigenvalue too negative for a factor"
    )
    alt = (
        f"Eigenvalues of the covariance of one batch by rank, and the smallest one for each of "
        f"{seeds} seeds, by setting and way of computing; below minus {EPSILON:g} there is no factor."
    )
    return style.finished(figure, headline, alt)


@style.themed
def prices(frame: pd.DataFrame) -> Picture:
    """The time of a step in float32, and in TF32 with either cure, from `companion.recorded_prices`."""
    slowest = frame.ms.max()
    figure, (axes,) = style.canvas(height=1.3 + 0.4 * len(frame))
    names = frame.setting.map(setting_words) + ", " + frame.covariance
    for row, (setting, ms, low, high) in enumerate(
        frame[["setting", "ms", "ms_low", "ms_high"]].itertuples(index=False)
    ):
        axes.hlines(row, low, high, color=INK, lw=2, zorder=2)
        style.points(axes, ms, row, style.colour(setting), hollow=True)
        axes.annotate(f" {ms:.1f} ms, {slowest / ms:.2f}×", (1, row), **BESIDE)
    axes.set_yticks(range(len(frame)), names)
    label = f"milliseconds a step (median and quartiles), batches of {frame.batch_size.iloc[0]:,} images"
    axes.set(xlim=(0, 1.05 * slowest), ylim=(len(frame) - 0.4, -0.6), xlabel=label)
    machines = ", ".join(sorted(frame.machine.unique()))
    faster = frame[frame.ms < slowest].ms.max()
    headline = f"With either cure a step in TF32 takes at most {faster:.1f} ms, in float32 {slowest:.1f} ms"
    alt = f"Milliseconds a step on {machines} for float32 and for TF32 with either cure."
    return style.finished(figure, f"{headline}, recorded on {machines}", alt)
