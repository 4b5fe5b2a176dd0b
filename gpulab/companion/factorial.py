"""The published experiment in its own code, one thing changed at a time: what the registered runs say.

What is compared, on which seeds and films, and by which tests, was laid down in `data/README.md` before the runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.ticker import LogLocator, NullLocator

from gpulab import records
from gpulab.companion.anomaly import window_finding
from gpulab.companion.dose import dose_finding
from gpulab.companion.findings import SIZES, CheckedSentences, Part, listed
from gpulab.companion.learning import ALL, BEAT, blurred_losses
from gpulab.plots.style import INK, ON_CPU, ON_GPU, canvas, finished, key, origin_keys, points
from gpulab.report import Picture
from gpulab.stats.tests import holm
from gpulab.stats.verdicts import Verdict, decide, p_text, verdict
from gpulab.training import store

FULL = "160x120"  # the published size
HANDED = {"reused": "as published", "copied": "frames copied", "shared": "memory shared"}
BEATS, LOSS = "share that beats repeating the last frame", "final loss"
ORDER = ("GPU, as published", "CPU, frames copied", "GPU, memory shared", "CPU, as published")  # in the figure
METRICS = {
    BEATS: ("beats_repeating", 0.1),
    LOSS: ("final_loss", 0.25),
}  # and the margin: a share, or in standard deviations
COLUMNS = "family film size condition reference endpoint seeds decision difference low high ratio worse margin p p_holm"
COLUMNS += " p_equivalent uncorrected beat beat_reference beat_blurred machine machine_reference"
CLAIM = (
    "Pietrowski et al. (2021, arXiv 2109.01451): PredNet reaches a lower loss on a GPU than on a CPU in the same "
    "number of steps, an autoencoder does not. Retracted in version 4: the difference came with the library, Chainer, "
    "and the authors' port to PyTorch does not show it. They suspect a bug and do not say which."
)
LINE = (
    "The published loop puts each new frame into the same NumPy array, over the last one, and hands it on with "
    "xp.asarray, which copies it on a GPU and does not on a CPU. The network is trained on windows of 20 frames, with "
    "one update after each. The loss of a frame is computed while that frame is still there, and is right. The "
    "gradient is computed after the twentieth, when every step finds the twentieth frame in memory, and is wrong. An "
    "autoencoder takes its gradient after each image, and the authors' port loads whole clips: neither is touched. Nor "
    "are Chainer 1 and 2, whose squared error kept the difference of prediction and frame for the gradient; since 3.0 "
    "it keeps the two arrays. The cure is to copy each frame."
)
MEASURE = (
    "By the loss, which is the mean squared error of predicted frames; and by whether it is below that of repeating "
    "the last frame, the laziest prediction. Seeds, films and tests were laid down before the runs; the data "
    "card says when."
)
UNKNOWN = (
    "Whether this line made the published difference, or all of it: it is enough to make one. Their network was "
    "run unchanged, in Chainer 7.8.1, by a loop with the operations of theirs. They name 7.8.0, which differs in what "
    "it knows of CuPy alone; in it their own script gives, on a CPU and with one NumPy, the same bits in its first "
    "updates. Which release made the paper's numbers is not said. Their film, from body-worn cameras, and "
    "their machines were not at hand. Their GPUs used cuDNN, which today's CuPy does not have for Chainer; whether "
    "that matters is not known."
)
HEADINGS = {
    "one line, on a GPU": "In the losses: the published code on a GPU, one line changed, so that frames share memory",
    "one line, on a CPU": "The same on a CPU",
    "four cells": "Is it the device? The same code with device and memory crossed, at half the size",
}


class RegisteredPair(NamedTuple):
    """What is held against what, as registered; the films, or the comparisons, of a family are tested together."""

    family: str
    condition: str
    reference: str
    full: bool  # at the published size, or at half of it


REGISTERED = (
    RegisteredPair("one line, on a GPU", "GPU, memory shared", "GPU, as published", True),
    RegisteredPair("one line, on a CPU", "CPU, as published", "CPU, frames copied", True),
    RegisteredPair("four cells", "CPU, frames copied", "GPU, as published", False),
    RegisteredPair("four cells", "CPU, as published", "GPU, memory shared", False),
    RegisteredPair("four cells", "CPU, as published", "CPU, frames copied", False),
)


def published_runs() -> pd.DataFrame:
    """The recorded runs of the authors' network in Chainer, as `gpulab.runs`.

    More columns: `film`; `condition`, the device and how frames were handed over; `full`, whether at the published
    size; `machine`. `protocol` and `options` are left out, since the condition is part of them.
    """
    found = described(store.runs(records.recorded_folder("published")).assign(recorded=True))
    return found.sort_values(["full", "film"], ascending=False, kind="stable", ignore_index=True)  # the walk first


def described(frame: pd.DataFrame) -> pd.DataFrame:
    """Runs of `benchmarks/published.py`, with the columns that `published_runs` has."""
    device = frame.device.map({"cpu": "CPU", "cuda": "GPU"})
    tripped = (frame.device == "cuda") & ~frame.round_trip.astype(bool)
    condition = device + ", " + frame.loader.map(HANDED) + tripped.map({True: ", no round trip", False: ""})
    film = frame.data.map(lambda name: Path(name).stem)
    upright = frame["size"].str.split("x").str[::-1].str.join("x")  # the authors write the width first
    of_film = frame.assign(frame_size=upright, scene_seed=0)
    described = of_film.assign(film=film, condition=condition, full=frame["size"] == FULL)
    return described.drop(columns=["protocol", "options"], errors="ignore")


def published_verdict(frame: pd.DataFrame, comparison: RegisteredPair, film: str, endpoint: str) -> Verdict:
    """One endpoint of one comparison on one film, on the seeds that both have."""
    asked = frame[(frame.film == film) & (frame.full == comparison.full)]
    both = [asked[asked.condition == name] for name in (comparison.reference, comparison.condition)]
    seeds = set(both[0].seed) & set(both[1].seed)
    paired = pd.concat(both)
    paired = paired[paired.seed.isin(seeds)].drop(columns=["setting", "loader"])
    metric, margin = METRICS[endpoint]
    if endpoint == LOSS:  # as registered: of the sample itself
        margin *= float(paired[paired.condition == comparison.reference].final_loss.std())
    return verdict(paired, metric, "condition", margin=margin, reference=comparison.reference)


def published_table(frame: pd.DataFrame, alpha: float = 0.05) -> pd.DataFrame:
    """Every registered comparison that the runs allow, corrected by Holm within each family and endpoint.

    Args:
        frame: From `published_runs`.

    Returns:
        A row for each comparison, film and endpoint: `decision` after the correction, `difference` (condition minus
        reference) with its interval `low`, `high`; `ratio`, the median over seeds of the losses' ratio; `worse`, the
        seeds whose loss is higher; `beat` and `beat_reference`, the seeds that beat repeating the last frame;
        `beat_blurred`, those of the reference that beat it blurred, which takes no motion either.
    """
    table = pd.DataFrame(_rows(frame))
    if table.empty:
        return pd.DataFrame(columns=COLUMNS.split())
    family = table.groupby(["family", "endpoint"])
    for name in ("different", "equivalent"):
        table[f"p_{name}_holm"] = family[f"p_{name}"].transform(holm)
    table["decision"] = [decide(row, alpha) for row in table.itertuples()]
    names = {"p_different": "p", "p_different_holm": "p_holm"}
    return table.drop(columns="p_equivalent").rename(columns={**names, "p_equivalent_holm": "p_equivalent"})[
        COLUMNS.split()
    ]


def _rows(frame: pd.DataFrame) -> Iterator[dict[str, Any]]:
    for comparison in REGISTERED:
        of_size = frame[frame.full == comparison.full]
        for film, some in of_size.groupby("film", sort=False):
            if not {comparison.condition, comparison.reference} <= set(some.condition):
                continue
            for endpoint in METRICS:
                judged = published_verdict(frame, comparison, str(film), endpoint)
                (level,) = judged.table.rename(columns={"decision": "uncorrected"}).to_dict("records")
                yield {
                    **level,
                    **comparison._asdict(),
                    "film": film,
                    "size": some["size"].iloc[0],
                    "endpoint": endpoint,
                    **_counts(judged.runs, comparison),
                }


def _counts(runs: pd.DataFrame, comparison: RegisteredPair) -> dict[str, Any]:
    losses = runs.pivot_table(index="seed", columns="condition", values="final_loss").dropna()
    ratio = losses[comparison.condition] / losses[comparison.reference]
    beat = runs.groupby("condition").beats_repeating.sum()
    usual = runs[runs.condition == comparison.reference]
    blurred = blurred_losses(usual).fillna(usual.film.map(_recorded_blurred()))
    machine = runs.groupby("condition").machine.agg(lambda names: ", ".join(sorted(set(names))))
    return {
        "ratio": ratio.median(),
        "worse": int((ratio > 1).sum()),
        "beat": int(beat[comparison.condition]),
        "beat_reference": int(beat[comparison.reference]),
        "beat_blurred": (usual.final_loss < blurred).sum() if blurred.notna().all() else np.nan,
        "machine": machine[comparison.condition],
        "machine_reference": machine[comparison.reference],
    }


def _recorded_blurred() -> dict[str, float]:
    """Of real films, by `benchmarks/record_blurred.py`."""
    return {
        film: loss
        for document in records.read_documents("published")
        for film, loss in document.get("blurred", {}).items()
    }


def round_trips(frame: pd.DataFrame) -> pd.DataFrame:
    """Runs on a GPU with the round trip to the CPU after each update against the same without, window by window.

    Args:
        frame: From `published_runs`.

    Returns:
        A row for each film and condition: `seeds` that were run both ways, `windows` of all of them, `same_bits`, the
        windows whose loss is the same in every bit.
    """
    rows = []
    trips = frame[(frame.device == "cuda") & frame.full]
    for (film, loader), some in trips.groupby(["film", "loader"], sort=False):
        with_it, without = (some[some.round_trip.astype(bool) == kept] for kept in (True, False))
        seeds = sorted(set(with_it.seed) & set(without.seed))
        if not seeds:
            continue
        losses = [
            store.history(part[part.seed.isin(seeds)]).sort_values(["seed", "window"]).loss.to_numpy()
            for part in (with_it, without)
        ]
        same = int((losses[0] == losses[1]).sum()) if len(losses[0]) == len(losses[1]) else 0
        row = {"film": film, "condition": f"GPU, {HANDED[loader]}", "seeds": len(seeds)}
        rows.append({**row, "windows": len(losses[0]), "same_bits": same})
    return pd.DataFrame(rows, columns=["film", "condition", "seeds", "windows", "same_bits"])


def published_figure(frame: pd.DataFrame) -> Picture:
    """Each seed's final loss under each condition, as a multiple of the loss of repeating the last frame.

    Seeds are joined. Below the dashed line a network has learned more than to repeat.

    Args:
        frame: From `published_runs`.
    """
    shown = frame[~frame.condition.str.endswith("no round trip")].assign(
        times=frame.final_loss / frame.repeat_loss, panel=frame.film + ", " + frame["size"].str.replace("x", "×")
    )
    names = list(dict.fromkeys(shown.sort_values("full", ascending=False).panel))
    places: list[float] = []
    labels: list[str] = []
    figure, (axes,) = canvas(1, height=4.4)
    start = 0.0
    for name in names:
        some = shown[shown.panel == name]
        conditions = [c for c in ORDER if c in set(some.condition)]
        columns = {condition: start + place for place, condition in enumerate(conditions)}
        for _, seed in some.groupby("seed"):
            one = seed.set_index("condition").times.reindex(conditions).dropna()
            axes.plot([columns[c] for c in one.index], one, color=INK, lw=0.5, alpha=0.35, zorder=1)
        for condition, part in some.groupby("condition"):
            tint = ON_GPU if condition.startswith("GPU") else ON_CPU
            points(axes, np.full(len(part), columns[condition]), part.times, tint, True, s=18)
        axes.text(
            start + (len(conditions) - 1) / 2, 1.02, name, transform=axes.get_xaxis_transform(), ha="center", fontsize=9
        )
        places += columns.values()
        labels += [c.replace(",", "").replace(" ", "\n") for c in conditions]
        start += len(conditions) + 0.6
    axes.axhline(1, color=INK, lw=0.8, ls="--", zorder=1)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(10, subs=(1.0, 1.4, 2.0, 3.0, 5.0, 7.0)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xticks(places, labels, fontsize=8)
    axes.set_xlim(-0.6, start - 1)
    axes.set_ylabel("final loss / loss of repeating the last frame")
    main = [row for row in _rows(frame) if row["family"] == REGISTERED[0].family and row["endpoint"] == LOSS]
    worse, seeds = (sum(row[name] for row in main) for name in ("worse", "seeds"))
    title = f"With one line different, the published network ends worse in {worse} of {seeds} pairs at 160×120"
    keys = [key("repeating the last frame", color=INK, ls="--", lw=0.8), *origin_keys(shown)]
    alt = "Final loss of each seed over the loss of repeating the last frame, by film and condition, seeds joined."
    return finished(figure, title * bool(main), alt, keys, columns=3)


def published_page(
    window: pd.DataFrame,
    table: pd.DataFrame,
    trips: pd.DataFrame,
    dose: pd.DataFrame | None = None,
    windows: pd.DataFrame | None = None,
    longer: pd.DataFrame | None = None,
    port: pd.DataFrame | None = None,
) -> CheckedSentences:
    """What was claimed, what was wrong, how one knows and what remains unknown, on one page.

    Args:
        window: From `gpulab.companion.first_window`: the gradient in our own port.
        table: From `published_table`.
        trips: From `round_trips`.
        dose: From `recorded_dose`.
        windows: From `recorded_windows`: gradients of the published code on both devices.
        longer: From `learning_table`, of `longer_runs`: shared memory against a frame's own.
        port: From `anomaly_table`: our own port, shared memory against copied frames.
    """
    parts: list[tuple[str, Part]] = [
        ("Claimed", CLAIM),
        ("What was wrong", LINE),
        ("In short", _short(table, longer, port)),
    ]
    parts.append(("How it is measured", MEASURE))
    numbers = [f"First window of our own port, here: {window_finding(row)}" for row in window.itertuples()]
    if windows is not None:
        first = windows[(windows.window == 0) & ~windows.of.str.endswith("trip")]
        parts.append(("In the first gradient", _gradients(first)))
        numbers += [f"First window of the published code: {'; '.join(map(_in_chainer, first.itertuples()))}."]
    for family, rows in table.groupby("family", sort=False):
        pairs = rows.groupby(["condition", "reference"], sort=False)
        parts.append((HEADINGS[family], [_over_films(pair) for _, pair in pairs]))
        films = rows.groupby(["condition", "reference", "film"], sort=False)
        numbers += [f"{family}: {_compared([*pair.itertuples()])}" for _, pair in films]
    if port is not None:
        parts.append(("Our own port to PyTorch, which keeps the one array", port))
    if longer is not None:
        parts.append(("Does longer training close the gap? Our own port, ten times as long", _longer(longer)))
    if dose is not None:
        found = dose_finding(dose)
        parts += found.parts
        numbers += found.numbers
    if len(trips):
        same, counted = trips.same_bits.sum(), trips.windows.sum()
        bits = "the same bits" if same == counted else f"the same bits in {same:,} of {counted:,} only"
        text = f"With and without it the losses of {counted:,} windows have {bits} ({trips.seeds.sum()} pairs of runs)."
        parts.append(
            ("Is it another step? On a GPU the loop takes the network to the CPU and back at each update", text)
        )
    return CheckedSentences([*parts, ("Not known", UNKNOWN)], numbers)


def _gradients(first: pd.DataFrame) -> list[str]:
    """How far gradients are apart whose frames have memory of their own, or share it, or one does and the other not."""
    sharing = [cells.isin(["cpu reused", "cuda shared"]) for cells in (first.of, first.against)]
    unlike = sharing[0] != sharing[1]
    apart, alike = first.gradient_difference[unlike], first.gradient_difference[~unlike]
    same, losses = first.same_losses[unlike].sum(), first.losses[unlike].sum()
    return [
        f"Where frames are handed over alike, a CPU and a GPU agree to {alike.max():.4%}. With shared "
        f"memory and without they differ by {apart.max():.1%}, on a CPU and on a GPU.",
        f"The losses of that window do not tell: {same} of {losses} have the same bits.",
    ]


def _short(table: pd.DataFrame, longer: pd.DataFrame | None, port: pd.DataFrame | None) -> list[str]:
    """Sentences: in how many of all registered pairs of runs the memory decides, and in how many the device."""
    losses = table[table.endpoint == LOSS]
    alike = [_device(a) != _device(b) for a, b in zip(losses.condition, losses.reference, strict=True)]
    memory, devices = (losses[[is_alike == wanted for is_alike in alike]] for wanted in (False, True))
    pairs = [f"{_pairs(memory)} of the authors' code"]
    if longer is not None:
        pairs.append(f"{_pairs(longer[longer.metric == ALL])} of our port after 50,000 frames")
    if port is not None:  # where all bits are the same, the device copied: the memory does not differ
        asked = port[(port.experiment == "prednet") & (port.metric == ALL) & (port.same_bits < port.seeds)]
        for profile, rows in asked.groupby("profile", sort=False):
            counts = ", ".join(f"{decision} at {n}" for decision, n in rows.decision.value_counts(sort=False).items())
            pairs.append(f"{_pairs(rows)} of our port at the {SIZES[profile]} (of {len(rows)} speeds {counts})")
    said = [
        f"Of the pairs laid down beforehand in which only the memory differs, sharing it ends worse in {listed(pairs)}."
    ]
    if len(devices):
        said.append(f"Where only the device differs, the CPU does in {_pairs(devices)}.")
    if not (losses["size"].eq(FULL) & losses.condition.str.startswith("CPU")).any():
        said.append(
            "At the published size the authors' code was trained on a GPU alone, which imitates a CPU's sharing."
        )
    return said


def _device(condition: str) -> str:
    """The device of a condition."""
    return condition.partition(",")[0]


def _pairs(rows: pd.DataFrame) -> str:
    return f"{rows.worse.sum()} of {rows.seeds.sum()}"


def _in_chainer(row: Any) -> str:
    names = (
        f"{kind} {HANDED[loader]}" for kind, loader in (cell.split(",")[0].split() for cell in (row.of, row.against))
    )
    off = f"differs by {row.gradient_difference:.1g}" if row.gradient_difference else "has the same bits"
    return " against ".join(names).replace("cuda", "GPU").replace("cpu", "CPU") + f" {off}"


def _over_films(rows: pd.DataFrame) -> str:
    """One comparison, of all its films together."""
    loss, share = (rows[rows.endpoint == endpoint] for endpoint in (LOSS, BEATS))
    seeds, ratios = loss.seeds.sum(), sorted({f"{loss.ratio.min():.2f}", f"{loss.ratio.max():.2f}"}, key=float)
    films = f" on {len(loss)} films" if len(loss) > 1 else ""
    known = share[share.beat_blurred.notna() & (share.beat_reference > 0)]
    by_film = ", ".join(f"{row.beat_blurred:.0f} of {row.beat_reference} ({row.film})" for row in known.itertuples())
    blurred = f" Of those that do, {by_film} beat a blurred copy of it, too." * bool(len(known))
    return (
        f"{loss.condition.iloc[0]}, against {loss.reference.iloc[0]}: the loss is {' to '.join(ratios)} times as high, "
        f"higher for {loss.worse.sum()} of {seeds} seeds{films} ({listed(dict.fromkeys(loss.decision))}); "
        f"{share.beat.sum()} instead of {share.beat_reference.sum()} of {seeds} beat repeating the last frame.{blurred}"
    )


def _longer(table: pd.DataFrame) -> str:
    share, loss = (next(table[table.metric == metric].itertuples()) for metric in (BEAT, ALL))
    return (
        f"After 50,000 frames the loss with shared memory is {1 + loss.relative:.2f} times as high, higher for "
        f"{loss.worse} of {loss.seeds} seeds ({loss.decision}); {share.beat - share.beat_reference} instead of "
        f"{share.beat_reference} of {share.seeds} beat repeating the last frame."
    )


def _compared(rows: list[Any]) -> str:
    """One comparison on one film."""
    share, loss = (next(row for row in rows if row.endpoint == endpoint) for endpoint in METRICS)
    where = dict.fromkeys((share.machine_reference, share.machine))
    known = share.beat_blurred == share.beat_blurred
    blurred = f", {share.beat_blurred:g} of {share.seeds} a blurred copy of it" if known else ""
    return (
        f"{share.film} at {share.size.replace('x', '×')}, {share.seeds} seeds ({', '.join(where)}): {share.reference}, "
        f"{share.beat_reference} of {share.seeds} beat repeating the last frame{blurred}; {share.condition}, "
        f"{share.beat} of {share.seeds} beat repeating ({_decided(share)}). The loss is "
        f"{loss.ratio:.2f} times as high (median), higher for {loss.worse} of {loss.seeds} seeds ({_decided(loss)})."
    )


def _decided(row: Any) -> str:
    p = row.p_equivalent if row.decision == "equivalent" else row.p_holm
    return f"{row.decision}, p = {p_text(p)}"
