"""How much faster, where the time goes, what it costs: tables, figures and the finding of notebook 07.

What is measured stands in `workloads`; what other machines measured is kept in `data/speed`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from gpulab import records
from gpulab.companion.findings import SIZES, CheckedSentences, Part, listed
from gpulab.errors import UsageError
from gpulab.plots.style import FAINT, INK, canvas, colour, finished, level_colours, log_scale, points, stacked_shares
from gpulab.report import Picture
from gpulab.stats.verdicts import Verdict, verdict

KIND = "workloads"  # of a document in data/speed
PHASES = {"forward": "#56B4E9", "backward": "#D55E00", "update": FAINT}
HOUR = 3600


class Claim(NamedTuple):
    """What a source says is so many times faster or smaller, and the two numbers, of a device and way, that tell."""

    words: str
    claimed: str
    part: str
    unit: str
    slow: tuple[str, str]  # an empty way: the best that there is
    fast: tuple[str, str]
    differs: str


# fmt: off
CLAIMS = [Claim(*each) for each in (
    ("text classification is faster on a GPU", "198.2 s / 14.4 s = 13.76×", "text", "s",
     ("cpu", "float32"), ("gpu", "float32"), "theirs: nothing named; here: a small Transformer on docstrings"),
    ("gradient-boosted trees are faster on GPUs", "23.2×", "trees", "s",
     ("cpu", "fifty trees"), ("gpu", "fifty trees"), "theirs: RAPIDS, four GPUs; here: XGBoost, one, random numbers"),
    ("GPUs serve faster", "804 % faster = 9.04×", "inference", "images/s",
     ("cpu", ""), ("gpu", ""), "theirs: three GPUs, five clusters of CPUs; here: the devices and cores of one machine"),
    ("tensor cores train faster in mixed precision", "faster", "text", "s",
     ("gpu", "float32"), ("gpu", "bfloat16"), "theirs: no number; here: bfloat16, against float32 without TF32"),
    ("compilation makes training faster", "faster", "text", "s",
     ("gpu", "float32"), ("gpu", "float32, compiled"), "theirs: no number; here: without the time to compile"),
    ("transfers can be hidden behind computation", "hidden", "transfer", "s",
     ("gpu", "pageable"), ("gpu", "overlapped"), "theirs: no number; here: images, while resnet18 reads those before"),
    ("accumulated gradients need less memory", "less", "memory", "MB",
     ("gpu", "1 part"), ("gpu", "4 parts"), "theirs: no number; here: a Transformer's batch in four parts"),
)]
# fmt: on
# What torch calls a backend, and what gpulab does not measure on it.
BACKENDS = {
    "CUDA": ("cuda", "TF32 before Ampere (compute capability 8.0)"),
    "ROCm": ("cuda", "TF32; energy"),
    "Metal": ("mps", "float64, TF32; pinned memory, overlapping; what holds memory; several devices; energy"),
    "XPU": ("xpu", "TF32; pinned memory, overlapping; what holds memory; energy"),
}


# --- tables ----------------------------------------------------------------------------------------------


def recorded_speed() -> pd.DataFrame:
    """What other machines measured, as `gpulab.companion.measure_speed`; `recorded` is True.

    Examples:
        >>> bool(recorded_speed().recorded.all())
        True
    """
    found = [record for record in records.read_documents("speed") if record.get("kind") == KIND]
    rows = pd.DataFrame([row for record in found for row in record["rows"]])
    return rows.assign(recorded=True).astype({"value": float, "spread": float, "seed": "Int64"})


def speed_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows of one section for reading: the median over seeds of each number, and where there is none, why.

    Args:
        frame: From `measure_speed` or `recorded_speed`, or both.
    """
    by = ["what", "way", "unit", "note", "size", "machine", "setting", "recorded"]
    rows = frame.groupby(by, sort=False, as_index=False).value.median()
    return rows.assign(value=rows.value.map(_short), where=rows.apply(_where, axis=1))[
        ["what", "way", "value", "unit", "where", "size", "note"]
    ]


def claims_table(frame: pd.DataFrame, size: str = "quick") -> pd.DataFrame:
    """The sources' claims, a row each: from what to what, how many times here, how many claimed, and what differs.

    What was measured here is taken where it is there, else what was recorded.

    Args:
        frame: From `measure_speed` and `recorded_speed`.
        size: The profile whose rows count.
    """
    frame, rows = frame[frame["size"] == size], []
    for claim in CLAIMS:
        slow, fast = (_number(frame, claim, *side) for side in (claim.slow, claim.fast))
        sides = ((claim.slow, slow), (claim.fast, fast))
        missing = [_why_not(frame, claim, *side) for side, found in sides if found is None]
        times = np.nan
        if slow is not None and fast is not None:
            times = fast[0] / slow[0] if claim.unit == "images/s" else slow[0] / fast[0]
        rows.append(
            {
                "claim": claim.words,
                "claimed": claim.claimed,
                "measured": "; ".join(dict.fromkeys(missing)) or f"{times:.3g}×",
                "from": "" if slow is None else slow[1],
                "to": "" if fast is None else fast[1],
                "what differs": claim.differs,
                "times": times,
            }
        )
    return pd.DataFrame(rows)


def cost_table(frame: pd.DataFrame, per_hour: Mapping[str, float]) -> pd.DataFrame:
    """What one trained text classifier costs, in float32.

    Args:
        frame: The part `text` of `measure_speed` and `recorded_speed`.
        per_hour: The price of an hour on a `cpu` and on a `gpu`, in any currency.

    Returns:
        A row a machine, setting and size: `seconds` (the median over seeds), `per_hour`, `per_thousand` (the price of
        a thousand trained models), `watt_hours` of one (NaN where nobody counts), and `breaks_even`: how many times as
        dear as the cheapest CPU of that size an hour may be until a model costs the same.

    Raises:
        UsageError: For a price that is missing or not positive.
    """
    if any(not per_hour.get(kind, 0) > 0 for kind in ("cpu", "gpu")):
        raise UsageError(f"per_hour={dict(per_hour)}: expected a price above 0 for 'cpu' and for 'gpu'")
    trained = frame[(frame.part == "text") & (frame.way == "float32") & frame.unit.isin(["s", "J"])]
    by = ["size", "machine", "setting", "recorded"]
    table = trained.pivot_table("value", by, "unit", "median", sort=False)
    table = table.reindex(columns=["s", "J"]).rename_axis(columns=None).reset_index()
    price = np.where(on_gpu(table), per_hour["gpu"], per_hour["cpu"])
    cpu = table[~on_gpu(table)].groupby("size").s.min()
    return table[by].assign(
        seconds=table.s,
        per_hour=price,
        per_thousand=1000 * table.s * price / HOUR,
        watt_hours=table.J / HOUR,
        breaks_even=table["size"].map(cpu) / table.s,
    )


def precision_verdict(frame: pd.DataFrame) -> Verdict:
    """What the precision does to the loss of the text classifier, against float32 on the same seeds.

    Args:
        frame: The part `text` of one machine, setting and size.
    """
    losses = frame[(frame.part == "text") & (frame.unit == "loss") & ~frame.way.str.contains("compiled")]
    named = losses.rename(columns={"way": "precision", "value": "final_loss"})
    return verdict(named[["precision", "seed", "final_loss"]], factor="precision", reference="float32")


def crossover(frame: pd.DataFrame) -> float:
    """The width from which on an update of three layers takes longer on the CPU; NaN where the lines do not cross.

    Args:
        frame: The part `small` of a CPU and of another device.
    """
    seconds = _on_both(frame)
    gain = np.log(seconds[False] / seconds[True]).to_numpy()
    if not len(gain) or gain[0] > 0 or gain[-1] < 0:
        return float("nan")
    after = int(np.flatnonzero(gain < 0)[-1]) + 1 if (gain < 0).any() else 0
    if after == 0:
        return float(seconds.index[0])
    places = np.log2(seconds.index.to_numpy())[after - 1 : after + 1]
    return float(2 ** np.interp(0, gain[after - 1 : after + 1], places))


def backends(passport: Mapping[str, Any]) -> pd.DataFrame:
    """CUDA, ROCm, Metal and XPU: what a passport says of each, and what is not measured there.

    Args:
        passport: From `gpulab.passport`, or a recorded one.

    Examples:
        >>> import gpulab as gl
        >>> backends(gl.passport()).backend.tolist()
        ['CUDA', 'ROCm', 'Metal', 'XPU']
    """
    rocm, rows = passport["software"].get("rocm"), []
    for name, (kind, missing) in BACKENDS.items():
        version = {"CUDA": passport["software"].get("cuda"), "ROCm": rocm}.get(name)
        of_other_backend = kind == "cuda" and bool(rocm) != (name == "ROCm")  # torch calls both of them cuda
        gpus = [] if of_other_backend else [gpu for gpu in passport["gpus"] if gpu["kind"] == kind]
        devices = [", capability ".join(filter(None, (gpu["name"], gpu.get("compute_capability")))) for gpu in gpus]
        row = {"backend": name, "setting": kind, "torch's version of it": version or "not in the passport"}
        rows.append(row | {"devices": ", ".join(devices) or "none here", "not measured there": missing})
    return pd.DataFrame(rows)


def _on_both(frame: pd.DataFrame) -> pd.DataFrame:
    """Seconds of an update of three layers, a row a width, on a CPU (False) and on another device (True)."""
    rows = frame[frame.part == "small"].assign(gpu=on_gpu, width=lambda some: some.way)
    rows = rows.astype({"width": float}).sort_values("recorded", kind="stable")
    return rows.groupby(["width", "gpu"]).value.first().unstack().reindex(columns=[False, True]).dropna()


def speed_finding(frame: pd.DataFrame) -> CheckedSentences:
    """What was measured here, then what was recorded.

    Args:
        frame: Everything from `measure_speed` and `recorded_speed`.
    """
    here, recorded = frame[~frame.recorded], frame[frame.recorded]
    mine = here[~on_gpu(here)] if not on_gpu(here).all() else here
    shares = _phases(mine)
    back = [f"{share:.0%} ({row[0]})" for row, share in (shares.backward / shares.sum(axis=1)).items()]
    text = mine[mine.part == "text"].groupby(["way", "unit"]).value.median()
    parts: list[tuple[str, Part]] = [
        (f"On this {'GPU' if on_gpu(mine).all() else 'CPU'}", f"Backpropagation takes {listed(back)} of a step.")
    ]
    numbers = [
        f"A text classifier trains in {text['float32', 's']:.3g} s here; right on {text['float32', 'accuracy']:.0%} "
        f"of unseen texts, and {text['most frequent class', 'accuracy']:.0%} are of the most frequent class.",
    ]
    for machine, rows in recorded[on_gpu(recorded)].groupby("machine"):
        seconds = _on_both(pd.concat([mine, rows]))
        less = int((seconds[False] < seconds[True]).sum())
        small = f"An update of three layers takes less time here than there at {less} of {len(seconds)} widths."
        parts.append((f"Small networks, against {machine}", small))
        both = pd.concat([recorded[~on_gpu(recorded)], rows])
        claims = pd.concat([claims_table(both, size).assign(size=SIZES[size]) for size in ("quick", "paper")])
        said = []
        for (claim, claimed), measured in claims.dropna(subset="times").groupby(["claim", "claimed"], sort=False):
            answers = [
                f"{'yes' if t > 1 else 'no'}, {t:.3g}× ({size})"
                for t, size in zip(measured.times, measured["size"], strict=True)
            ]
            said.append(f"{claim[0].upper()}{claim[1:]}: {'; '.join(answers)}. Claimed: {claimed}.")
        parts += [(f"What was claimed, recorded on {machine}", said)] if said else []
    return CheckedSentences(parts, numbers)


def on_gpu(frame: pd.DataFrame) -> pd.Series:
    """Which rows are of another device than the CPU."""
    return ~frame.setting.astype(str).str.startswith("cpu")


def _number(frame: pd.DataFrame, claim: Claim, device: str, way: str) -> tuple[float, str] | None:
    """A side of a claim as a number, and in words with where it is from; None where nobody measured it."""
    rows = frame[(frame.part == claim.part) & (frame.unit == claim.unit) & (on_gpu(frame) == (device == "gpu"))]
    rows = rows[rows.value.notna() & ((rows.way == way) | (not way))]
    if rows.empty:
        return None
    rows, rate = rows[rows.recorded == rows.recorded.min()], claim.unit == "images/s"
    medians = rows.groupby(["machine", "setting", "way"], sort=False).value.median()
    machine, setting, way = medians.idxmax() if rate else medians.idxmin()  # the best that a device can
    place = _where(pd.Series({"machine": machine, "setting": setting, "recorded": rows.recorded.iloc[0]}))
    value = float(medians.max() if rate else medians.min())
    return value, f"{_short(value)} {claim.unit}, {way}: {place}"


def _why_not(frame: pd.DataFrame, claim: Claim, device: str, way: str) -> str:
    """Why a side of a claim has no number."""
    rows = frame[(frame.part == claim.part) & (on_gpu(frame) == (device == "gpu")) & frame.way.isin([way, ""])]
    notes = rows.note[rows.value.isna() & rows.note.fillna("").ne("")]
    return f"not measured on a {device.upper()}" + (f": {notes.iloc[0]}" if len(notes) else "")


def _where(row: pd.Series) -> str:
    return f"{row.machine}, {row.setting}{' (recorded)' if row.recorded else ''}"


def _short(value: float) -> str:
    return "" if value != value else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _phases(frame: pd.DataFrame) -> pd.DataFrame:
    """Seconds of each phase of a step, a row a network and place."""
    frame = frame[frame.part == "step"]
    frame = frame.assign(where=[_where(row) for _, row in frame.iterrows()])
    return frame.pivot_table("value", ["what", "where"], "way", sort=False)[[*PHASES]]


# --- figures ---------------------------------------------------------------------------------------------


def scaling(frame: pd.DataFrame) -> Picture:
    """Rates of matrix products against their size, filled for this machine, hollow for recorded ones.

    Args:
        frame: From `gpulab.roofline`, and from `gpulab.device.recorded_rooflines`.
    """
    figure, (axes,) = canvas(1, height=3.8)
    frame = frame[frame.kind == "matrix"]
    frame = frame.assign(edge=frame.operation.str.extract(r"(\d+)$").astype(int), machine=frame.get("machine", np.nan))
    for (machine, setting), rows in frame.groupby(["machine", "setting"], dropna=False, sort=False):
        recorded, rows = isinstance(machine, str), rows.sort_values("edge")
        _line(axes, rows.edge, rows.gflops, str(setting), f"{machine} (recorded)" if recorded else "here", recorded)
    _widths(axes, frame.edge)
    axes.set(yscale="log", xlabel="edge of the matrices", ylabel="rate (Gflop/s)")
    axes.yaxis.set_major_formatter("{x:,g}")
    best = frame.groupby(["edge", on_gpu(frame)]).gflops.max().unstack().dropna()
    ahead = best.index[best[True] > best[False]] if best.shape[1] == 2 else []
    headline = f"At an edge of {ahead[0]:,} a GPU has overtaken the CPU" if len(ahead) else "One kind of device leads"
    return finished(figure, headline, f"Rate of square matrix products against their edge. {headline}.")


def shares(frame: pd.DataFrame) -> Picture:
    """What share of a training step each phase takes, for each network and machine.

    Args:
        frame: The part `step` of `measure_speed` and `recorded_speed`.
    """
    table = _phases(frame)
    back = table.backward / table.sum(axis=1)
    headline = f"Backpropagation takes {back.min():.0%} to {back.max():.0%} of a step"
    alt = f"Shares of forward pass, backpropagation and update. {headline}."
    table = table.set_axis([", ".join(pair) for pair in table.index])
    label = "share of a training step (right: the whole step)"
    return stacked_shares(table, table.sum(axis=1), PHASES, label, headline, alt)


def kernels() -> Picture:
    """What kinds of work an update of PredNet spends its time on, on the machines where that was recorded.

    The fast path of `gpulab.train`; how far it is from a machine's peak stands in `benchmarks/prednet.md`.
    """
    found = [record for record in records.read_documents("speed") if record.get("kind") == "kernels"]
    rows = pd.DataFrame([{"machine": record["machine"], **row} for record in found for row in record["rows"]])
    rows = rows.assign(name=rows[["machine", "setting", "size"]].agg(", ".join, axis=1))
    table = rows.pivot_table("ms", "name", "what", sort=False).fillna(0)
    table = table[table.sum().sort_values(ascending=False).index]
    share = table["convolutions"] / table.sum(axis=1)
    headline = f"Convolutions, weight gradients apart, are {share.min():.0%} to {share.max():.0%} of an update's work"
    tints = dict(zip(table, level_colours("what", [*table]).values(), strict=True))
    alt = f"Shares of an update of PredNet by kind of work. {headline}."
    label = "share of its kernels' time (right: the sum; on a GPU some run beside others)"
    return stacked_shares(table / 1e3, table.sum(axis=1) / 1e3, tints, label, headline, alt)


def small_work(frame: pd.DataFrame) -> Picture:
    """The time of an update of three layers against their width, and where a CPU and another device take the same.

    Args:
        frame: The part `small` of `measure_speed` and `recorded_speed`.
    """
    figure, (axes,) = canvas(1, height=3.6)
    frame = frame[frame.part == "small"].assign(width=lambda rows: rows.way.astype(int))
    for (recorded, machine, setting), rows in frame.groupby(["recorded", "machine", "setting"], sort=False):
        one = rows.groupby("width").value.median()
        _line(axes, one.index, 1e3 * one, setting, f"{machine}{' (recorded)' if recorded else ', here'}", recorded)
    _widths(axes, frame.width)
    log_scale(axes.yaxis, *(1e3 * frame.value.agg(["min", "max"])))
    axes.set(xlabel="width of each of three layers, 32 examples", ylabel="one update (ms)")
    cross = crossover(frame)
    headline = "The same device leads at every width" if on_gpu(frame).any() else "A CPU alone: no GPU was recorded"
    if cross == cross:
        axes.axvline(cross, color=INK, lw=0.8, ls=":")
        headline = f"The CPU is faster up to a width of about {cross:.0f}"
    return finished(figure, headline, f"Milliseconds of an update against the width of the network. {headline}.")


def ladder(frame: pd.DataFrame) -> Picture:
    """How many times as fast as in float32 the text classifier trains in each precision, seed by seed.

    Args:
        frame: The part `text` of `measure_speed` and `recorded_speed`.
    """
    absent = frame.note.fillna("").ne("") & ~frame.recorded  # of what was recorded only what there is
    frame = frame[(frame.part == "text") & ((frame.unit == "s") | absent)]
    by = ["recorded", "machine", "setting", "size"]
    usual = frame[frame.way == "float32"].groupby(by, as_index=False).value.median()
    frame = frame.merge(usual.rename(columns={"value": "usual"}), on=by).assign(times=lambda row: row.usual / row.value)
    groups = list(frame.groupby(by, sort=False))
    figure, (axes,) = canvas(1, height=0.9 + 0.21 * frame.groupby(by).way.nunique().sum())
    names: list[str] = []
    for (recorded, machine, setting, size), rows in groups:
        for way, some in rows.groupby("way", sort=False):
            points(axes, some.times, np.full(len(some), len(names)), colour(setting), hollow=recorded, s=18)
            if some.times.isna().all():
                axes.annotate(some.note.iloc[0], (1.02, len(names)), va="center", fontsize=7, color=INK)
            names.append(f"{way}, {size}, {setting}, {'recorded on ' + machine if recorded else 'here'}")
    axes.axvline(1, color=FAINT, lw=0.8)
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.set(ylim=(len(names) - 0.5, -0.5), xlabel="times as fast as the median in float32 there (a point a seed)")
    axes.set_xlim(0)
    medians = frame.groupby([*by, "way"]).times.median()
    best = medians.idxmax()
    headline = f"The most gained: {best[-1]} on {best[1]}, {medians.max():.2f} times as fast as float32"
    headline = "Nothing trains faster than float32" if best[-1] == "float32" else headline
    return finished(figure, headline, f"Speed of training in each precision over float32. {headline}.")


def _line(axes: Any, x: Any, y: Any, setting: str, place: str, hollow: bool) -> None:
    """A line with its points and its key."""
    axes.plot(x, y, color=colour(setting), lw=1.2)
    points(axes, x, y, colour(setting), hollow=hollow)
    face = "white" if hollow else colour(setting)
    axes.plot([], [], color=colour(setting), marker="o", mfc=face, lw=1.2, label=f"{setting}, {place}")
    axes.legend(fontsize=8, frameon=False, loc="upper left")


def _widths(axes: Any, widths: Any) -> None:
    """A logarithmic horizontal axis with a tick at each power of four."""
    axes.set_xscale("log", base=2)
    low, high = np.log2(min(widths)), np.log2(max(widths))
    ticks = [2**power for power in range(int(low), int(high) + 1, 2)]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
