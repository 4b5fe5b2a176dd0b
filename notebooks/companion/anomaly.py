"""Notebook 05, the anomaly: the effect of overwritten frames in the authors' code and our port.

The loop that the paper's authors published (`main.py` of github.com/eijwat/prednet_in_chainer_py3)
writes every frame into the same NumPy buffer and wraps it for the device. Where wrapping does not
copy, the gradient of every step is computed with the window's last frame. Their experiment was run
in its own code, with one change at a time; the comparisons, seeds, films and tests were planned in
`data/README.md` before the runs. The dose-response runs come from `benchmarks/record.py dose`
(commit 6aece191): a cell is a window length and a speed of motion, and every seed was trained once
with copied and once with overwritten frames. The unit of analysis is the cell, because the seeds of
a cell see one film and all cells share the same seeds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

import gpulab as gl
from companion.findings import (
    SIZES,
    SUMMARY,
    CheckedSentences,
    Part,
    finding,
    listed,
    span,
    speeds_in_text,
)
from companion.first_windows import recorded_windows
from companion.learning import ALPHA, blurred_losses, corrected
from companion.metrics import ALL, BEAT
from companion.published_cpu import (
    compare_published,
    count_common_windows,
    published_losses,
    published_windows,
)
from gpulab.store.recorded import recorded_table
from gpulab.wording import COPIED, OVERWRITTEN

FULL = "160x120"  # the published size
BEATS, LOSS = "share that beats repeating the last frame", "final loss"
# The column, and the margin: a share of the seeds, or a number of standard deviations.
METRICS = {
    BEATS: ("beats_repeating", 0.1),
    LOSS: ("final_loss", 0.25),
}
FEWEST = 5  # cells needed for the interval of a rank correlation
COLUMNS = (
    "family",
    "film",
    "size",
    "condition",
    "reference",
    "endpoint",
    "seeds",
    "decision",
    "difference",
    "low",
    "high",
    "ratio",
    "worse",
    "margin",
    "p",
    "p_holm",
    "p_equivalent",
    "uncorrected",
    "beat",
    "beat_reference",
    "beat_blurred",
    "machine",
    "machine_reference",
)
HEADINGS = {
    "one line, on a GPU": (
        "The published code on a GPU, with one line changed so that frames are overwritten"
    ),
    "one line, on a CPU": "The same on a CPU",
    "four cells": "Is it the device? Device and condition crossed, at half the size",
}


# --- the published network ------------------------------------------------------------------------


class PlannedPair(NamedTuple):
    """A planned comparison; the films (or the comparisons) of a family are corrected together."""

    family: str
    condition: str
    reference: str
    full: bool  # whether at the published size; otherwise at half that size


PLANNED = (
    PlannedPair("one line, on a GPU", f"GPU, {OVERWRITTEN}", f"GPU, {COPIED}", True),
    PlannedPair("one line, on a CPU", f"CPU, {OVERWRITTEN}", f"CPU, {COPIED}", True),
    PlannedPair("four cells", f"CPU, {COPIED}", f"GPU, {COPIED}", False),
    PlannedPair("four cells", f"CPU, {OVERWRITTEN}", f"GPU, {OVERWRITTEN}", False),
    PlannedPair("four cells", f"CPU, {OVERWRITTEN}", f"CPU, {COPIED}", False),
)


def published_runs() -> pd.DataFrame:
    """The recorded runs of the authors' network in Chainer, the walk first.

    The format is that of `gpulab.runs`, with more columns: `film`; `condition`, the device and
    whether frames were copied or overwritten; `full`, whether the size is the published one.
    """
    runs = described(gl.recorded_runs("published"))
    return runs.sort_values(["full", "film"], ascending=False, kind="stable", ignore_index=True)


def described(frame: pd.DataFrame) -> pd.DataFrame:
    """Runs of `benchmarks/peers/published.py`, with the columns of `published_runs`.

    The published line, `reused`, writes all frames into one array. A CPU uses this array itself,
    and a GPU gets copies. The loader `shared` overwrites one array in the GPU's memory.
    """
    on_cpu = frame.device == "cpu"
    overwritten = (frame.loader == "shared") | (on_cpu & (frame.loader == "reused"))
    condition = on_cpu.map({True: "CPU, ", False: "GPU, "}) + overwritten.map(
        {True: OVERWRITTEN, False: COPIED}
    )
    condition += (on_cpu | frame.round_trip.astype(bool)).map({True: "", False: ", no round trip"})
    film = frame.data.map(lambda name: Path(name).stem)
    # the authors write the width first
    upright = frame["size"].str.split("x").str[::-1].str.join("x")
    frame = frame.assign(
        film=film, condition=condition, full=frame["size"] == FULL, frame_size=upright, scene_seed=0
    )
    return frame.drop(columns=["protocol", "options"], errors="ignore")


def published_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Every planned comparison of `published_runs`, Holm-corrected in each family and endpoint.

    A row for each comparison, film and endpoint: `decision` after the correction; `difference`
    (condition minus reference) with its interval `low`, `high`; `ratio`, the median over seeds of
    the ratio of the losses; `worse`, the number of seeds whose loss is higher; `beat` and
    `beat_reference`, the number of seeds that beat repeating the last frame; `beat_blurred`, the
    number of the reference's seeds that beat repeating it blurred, if that is harder.
    """
    rows = []
    for comparison in PLANNED:
        for film, film_runs in frame[frame.full == comparison.full].groupby("film", sort=False):
            if {comparison.condition, comparison.reference} <= set(film_runs.condition):
                rows += [
                    _film_endpoint(film_runs, comparison, endpoint) | {"film": film}
                    for endpoint in METRICS
                ]
    table = corrected(pd.DataFrame(rows), ["family", "endpoint"])
    return table.assign(p_equivalent=table.p_equivalent_holm)[[*COLUMNS]]


def _film_endpoint(
    frame: pd.DataFrame, comparison: PlannedPair, endpoint: str
) -> dict[str, object]:
    """One endpoint of one comparison on one film, for the seeds trained under both conditions."""
    both = frame[frame.condition.isin([comparison.condition, comparison.reference])]
    both = both[both.groupby("seed").condition.transform("nunique") == 2].drop(
        columns=["setting", "loader"]
    )
    reference, changed = (
        both[both.condition == name] for name in (comparison.reference, comparison.condition)
    )
    metric, margin = METRICS[endpoint]
    if endpoint == LOSS:  # as planned: in standard deviations of the sample itself
        margin *= float(reference.final_loss.std())
    judged = gl.verdict(both, metric, "condition", margin=margin, reference=comparison.reference)
    (level,) = judged.table.rename(columns={"decision": "uncorrected"}).to_dict("records")
    losses = both.pivot_table(index="seed", columns="condition", values="final_loss").dropna()
    ratio = losses[comparison.condition] / losses[comparison.reference]
    blurred = blurred_losses(reference).fillna(
        reference.film.map(recorded_table("blurred").set_index("film").loss)
    )
    harder = blurred.lt(reference.repeat_loss).all()  # otherwise, beating repeating implies it
    return {
        **level,
        **comparison._asdict(),
        "size": reference["size"].iloc[0],
        "endpoint": endpoint,
        "ratio": ratio.median(),
        "worse": int((ratio > 1).sum()),
        "beat": int(changed.beats_repeating.sum()),
        "beat_reference": int(reference.beats_repeating.sum()),
        "beat_blurred": (reference.final_loss < blurred).sum() if harder else np.nan,
        "machine": ", ".join(sorted(set(changed.machine))),
        "machine_reference": ", ".join(sorted(set(reference.machine))),
    }


def condition_pairs(frame: pd.DataFrame) -> pd.DataFrame:
    """The final losses of `published_runs`: a row for each pair, a column for each condition."""
    frame = frame[~frame.condition.str.endswith("no round trip")]
    frame = frame.assign(
        condition=frame.condition.str.partition(", ")[2], device=frame.condition.str[:3]
    )
    index = ["film", "size", "device", "seed"]
    return frame.pivot(index=index, columns="condition", values="final_loss").dropna().reset_index()


def overwriting_title(pairs: pd.DataFrame, panels: Sequence[str] = ()) -> str:
    """Say in how many pairs of runs the loss is higher with overwritten frames.

    Args:
        pairs: The final losses of otherwise identical runs: a row for each pair, with the columns
            `copied` and `overwritten`. Pairs in which a run diverged (NaN) are not counted.
        panels: Columns that name the panels of the figure. With several, the title gives the
            range of their counts.

    >>> pairs = pd.DataFrame({"copied": [1.0, 1.0, 1.0], "overwritten": [2.0, 0.5, 3.0]})
    >>> print(overwriting_title(pairs))
    With overwritten frames the loss is higher in 2 of 3 pairs of runs
    """
    pairs = pairs.dropna(subset=["copied", "overwritten"])
    higher = pairs.overwritten > pairs.copied
    if not panels:
        return (
            f"With {OVERWRITTEN} the loss is higher in {higher.sum()} of {len(pairs)} pairs of runs"
        )
    counts = higher.groupby([pairs[name] for name in panels]).agg(["sum", "size"])
    return (
        f"With {OVERWRITTEN} the loss is higher in {span(counts['sum'])} of {span(counts['size'])}"
        " pairs of runs in each panel"
    )


def round_trips(frame: pd.DataFrame) -> pd.DataFrame:
    """Compare the `published_runs` on a GPU with and without a round trip to the CPU per update.

    A row for each film and condition: the `seeds` that were run both ways, the number of their
    `windows`, and the number of windows whose loss has the `same_bits`.
    """
    runs = frame[(frame.device == "cuda") & frame.full].astype({"round_trip": bool})
    runs["condition"] = runs.condition.str.removesuffix(", no round trip")
    losses = gl.store.history(runs)[["id", "window", "loss"]]
    losses = losses.merge(runs[["id", "film", "condition", "seed", "round_trip"]], on="id")
    both = losses.pivot(
        index=["film", "condition", "seed", "window"], columns="round_trip", values="loss"
    ).dropna()
    both = both.assign(same=both[True] == both[False]).reset_index()
    counts = {
        "seeds": ("seed", "nunique"),
        "windows": ("same", "size"),
        "same_bits": ("same", "sum"),
    }
    return both.groupby(["film", "condition"], sort=False).agg(**counts).reset_index()


# --- dose and response ----------------------------------------------------------------------------


def dose_cells(frame: pd.DataFrame) -> pd.DataFrame:
    """A row for each cell of the study `dose`: `seeds`, mean `bias` and `ratio`.

    `ratio` is the geometric mean of the loss with overwritten frames over that with copied
    frames.
    """
    cells = frame.assign(ratio=np.log(frame.shared / frame.copied)).groupby(
        ["machine", "setting", "window", "speed"]
    )
    table = cells.agg(
        seeds=("seed", "nunique"), bias=("bias", "mean"), ratio=("ratio", "mean")
    ).reset_index()
    return table.assign(ratio=np.exp(table.ratio))


def rank_correlation(x: ArrayLike, y: ArrayLike) -> tuple[float, float, float]:
    """Spearman's rank correlation of pairs, x and y of shape (n,), and its 95 % interval.

    By Fisher's z with the variance (1 + ρ²/2) / (n − 3) of Bonett, Wright 2000, *Sample size
    requirements for estimating Pearson, Kendall and Spearman correlations*. If all ranks agree,
    the formula gives an interval without width; in its place stands the interval around the
    correlation of ranks of which two neighbours are exchanged.
    """
    from scipy.stats import norm, spearmanr

    x, y = np.asarray(x, float), np.asarray(y, float)
    if len(x) < FEWEST or min(np.ptp(x), np.ptp(y)) == 0:
        raise gl.UsageError(
            f"expected at least {FEWEST} pairs, and neither x nor y constant; got {len(x)} pairs"
        )
    rho = float(spearmanr(x, y).statistic)
    largest_rho = 1 - 12 / (len(x) * (len(x) ** 2 - 1))
    z = math.atanh(max(-largest_rho, min(rho, largest_rho)))
    reach = norm.ppf(1 - ALPHA / 2) * math.sqrt((1 + rho**2 / 2) / (len(x) - 3))
    return rho, math.tanh(z - reach), math.tanh(z + reach)


def dose_title(cells: pd.DataFrame) -> str:
    """Say in how many `dose_cells` the loss is higher, and on which machines it shows a trend.

    >>> cells = dose_cells(gl.recorded_runs("dose"))
    >>> print(dose_title(cells))
    With overwritten frames the loss is higher in 23 of 24 combinations,
    but no trend with the error of the gradient is established
    """
    trends = []
    for machine, rows in cells.groupby("machine"):
        _, low, high = rank_correlation(rows.bias, rows.ratio)
        if low > 0 or high < 0:
            trends.append(f"{'rises' if low > 0 else 'falls'} with the error on {machine}")
    higher = f"the loss is higher in {(cells.ratio > 1).sum()} of {len(cells)} combinations"
    trend = "but no trend with the error of the gradient is established"
    if trends:
        trend = f"and the loss {listed(trends)}"
    return f"With {OVERWRITTEN} {higher},\n{trend}"


def dose_sentence(cells: pd.DataFrame) -> str:
    """Whether the bias predicts the loss in the `dose_cells` of one machine."""
    rho, low, high = rank_correlation(cells.bias, cells.ratio)
    trend = "rises" if low > 0 else "falls" if high < 0 else "may rise or fall"
    return (
        f"{cells.machine.iloc[0]}: with {OVERWRITTEN} the loss is higher in"
        f" {(cells.ratio > 1).sum()} of {len(cells)} combinations (up to {cells.seeds.max()} seeds"
        f" each); as the error of the gradient grows, the loss {trend} (rank correlation"
        f" {rho:+.2f}, 95 % interval {low:+.2f} to {high:+.2f})."
    )


# --- in words -------------------------------------------------------------------------------------


def published_page(
    published: pd.DataFrame, table: pd.DataFrame, port: pd.DataFrame, longer: pd.DataFrame
) -> CheckedSentences:
    """The findings on one page: in short, and the evidence behind a fold.

    The arguments are `published_runs` and their `published_table`, the `learning_table` of our
    port, and that of the runs that are ten times as long.
    """
    sections: dict[str, Part] = {
        SUMMARY: main_finding(published, table),
        "In our own port": _port_sentences(port, longer),
    }
    windows = recorded_windows().query("window == 0 and not of.str.endswith('trip')")
    unlike = windows.gradient.str.contains(OVERWRITTEN) != windows.compared_with.str.contains(
        OVERWRITTEN
    )
    sections["In the first gradient"] = (
        "Under the same condition, the gradients on a CPU and on a GPU differ by at most"
        f" {windows[~unlike].gradient_difference.max():.4%}. Between the conditions they differ by"
        f" {windows[unlike].gradient_difference.max():.1%} on either device, and"
        f" {windows[unlike].same_losses.sum()} of {windows[unlike].losses.sum()} losses have the"
        " same bits."
    )
    for family, rows in table.groupby("family", sort=False):
        pairs = rows.groupby(["condition", "reference"], sort=False)
        sections[HEADINGS[family]] = [_over_films(pair) for _, pair in pairs]
    sections["Our PyTorch port"] = port
    share, loss = (longer.set_index("metric").loc[metric] for metric in (BEAT, ALL))
    sections["Does longer training close the gap? Our own port, ten times as long"] = (
        f"After 50,000 frames the mean loss with {OVERWRITTEN} is {1 + loss.relative:.2f} times"
        f" that with {COPIED}, and the loss is higher for {loss.worse} of {loss.seeds} seeds"
        f" ({loss.decision}). {share.beat - share.beat_reference} of {share.seeds} seeds beat"
        f" repeating the last frame, compared with {share.beat_reference} with {COPIED}."
    )
    cells = dose_cells(gl.recorded_runs("dose"))
    sections["Dose and response, in our own port"] = [
        dose_sentence(rows) for _, rows in cells.groupby("machine")
    ]
    trips = round_trips(published)
    sections[
        "Is it the round trip? On a GPU the loop moves the network to the CPU and back after every"
        " update"
    ] = (
        "With and without the round trip, the loss has the same bits in"
        f" {trips.same_bits.sum():,} of {trips.windows.sum():,} windows"
        f" ({trips.seeds.sum()} pairs of runs)."
    )
    shown = [
        "film",
        "size",
        "condition",
        "reference",
        "endpoint",
        "seeds",
        "worse",
        "ratio",
        "p_holm",
        "decision",
    ]
    numbers = [
        (
            "The published code. If all n seeds are worse, the p value of the loss before the"
            " correction is the smallest possible: 2 / 2ⁿ for up to 16 seeds, and 0.0001 for more,"
            " because 9,999 sign flips are drawn."
        ),
        *table[shown].to_string(index=False, float_format="{:.3g}".format).splitlines(),
    ]
    return finding(sections, numbers)


def main_finding(published: pd.DataFrame, table: pd.DataFrame) -> list[str]:
    """A few sentences on what the authors' code shows about the condition and the device."""
    losses = table[table.endpoint == LOSS]
    same_device = losses.condition.str[:3] == losses.reference.str[:3]
    pairs, devices = condition_pairs(published), losses[~same_device]
    decided = "; ".join(
        f"{row.condition.partition(', ')[2].removesuffix(' frames')}: {row.decision}"
        for row in devices.itertuples()
    )
    sentences = [
        (
            "In the authors' code, the loss is higher with overwritten than with copied frames in"
            f" {(pairs[OVERWRITTEN] > pairs[COPIED]).sum()} of {len(pairs)} otherwise identical"
            f" pairs of runs. For {losses[same_device].seeds.sum()} pairs a test was planned before"
            " the runs."
        ),
        (
            f"Where only the device differs, the CPU's loss is higher in {_pairs(devices)}"
            f" ({decided})."
        ),
    ]
    if not (losses["size"].eq(FULL) & losses.condition.str.startswith("CPU")).any():
        windows = published_windows()
        primary = compare_published(published_losses(windows)).iloc[0]
        sentences.append(
            "At the published size, overwriting was imitated on a GPU; on a real CPU, the code ran"
            f" for {count_common_windows(windows)} windows, with a higher loss than on a GPU in"
            f" {primary.higher} of {primary.pairs} seeds."
        )
    return sentences


def _port_sentences(port: pd.DataFrame, longer: pd.DataFrame) -> list[str]:
    """In how many pairs of our port the loss is higher, by size and decision."""
    ended = f"with {OVERWRITTEN} the loss is higher in"
    sentences = [f"Our port after 50,000 frames: {ended} {_pairs(longer[longer.metric == ALL])}."]
    # If all bits are the same, the device made copies, so the conditions do not differ.
    prednet_rows = port[
        (port.experiment == "prednet") & (port.metric == ALL) & (port.same_bits < port.seeds)
    ]
    for profile, rows in prednet_rows.groupby("profile", sort=False):
        decided = [
            f"{decision} at {speeds_in_text(decision_rows.speed)}"
            for decision, decision_rows in rows.groupby("decision", sort=False)
        ]
        sentences.append(
            f"Our port after fewer frames, {SIZES[profile]}: {ended} {_pairs(rows)}"
            f" ({', '.join(decided)})."
        )
    return sentences


def _pairs(rows: pd.DataFrame) -> str:
    return f"{rows.worse.sum()} of {rows.seeds.sum()} pairs"


def _over_films(rows: pd.DataFrame) -> str:
    """One comparison in a sentence, all its films together."""
    loss, share = (rows[rows.endpoint == endpoint] for endpoint in (LOSS, BEATS))
    seeds = loss.seeds.sum()
    films = f" on {len(loss)} films" if len(loss) > 1 else ""
    high, low = (
        name.replace(", ", " with ") for name in (loss.condition.iloc[0], loss.reference.iloc[0])
    )
    harder = share[share.beat_blurred.notna() & (share.beat_reference > 0)]
    blurred = [
        f"{row.beat_blurred:.0f} of {row.beat_reference} ({row.film})"
        for row in harder.itertuples()
    ]
    return (
        f"{high}: the loss is {span(loss.ratio, '.2f')} times that of a {low}, higher for"
        f" {loss.worse.sum()} of {seeds} seeds{films} ({listed(dict.fromkeys(loss.decision))});"
        f" {share.beat.sum()} of {seeds} beat repeating the last frame, compared with"
        f" {share.beat_reference.sum()} for the reference"
        + (
            f"; of the latter, {listed(blurred)} also beat the blurred last frame, which is"
            " harder to beat on these films."
            if blurred
            else "."
        )
    )
