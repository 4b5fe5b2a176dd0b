"""How much faster, where the time goes, what it costs: tables, figures and the finding of notebook 07.

What is measured stands in `workloads`; what other machines measured is kept in `data/measured`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb

import gpulab as gl
from companion.findings import SIZES, CheckedSentences, Part, finding, listed
from gpulab.plots import style
from gpulab.plots.names import setting_words
from gpulab.plots.style import FAINT, INK
from gpulab.report import Picture
from gpulab.stats.verdicts import Verdict
from gpulab.store.recorded import recorded_table

PHASES = {"forward": "#56B4E9", "backward": "#D55E00", "update": FAINT}
HOUR = 3600
PLACE = ["recorded", "machine", "setting", "size"]


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
CLAIMS = [Claim(*fields) for fields in (
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
    "Metal": ("mps", "float64, TF32; pinned memory, overlapping; peak of memory; several devices; energy"),
    "XPU": ("xpu", "TF32; pinned memory, overlapping; peak of memory; energy"),
}


def recorded_speed() -> pd.DataFrame:
    """What other machines measured, as `companion.measure_speed`; `recorded` is True."""
    return recorded_table("speed").astype({"value": float, "spread": float, "seed": "Int64"})


def speed_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows of `measure_speed` and `recorded_speed` for reading: a number's median over seeds, or why there is none."""
    group_columns = ["what", "way", "unit", "note", "size", "machine", "setting", "recorded"]
    rows = frame.groupby(group_columns, sort=False, as_index=False).value.median()
    columns = ["what", "way", "value", "unit", "where", "size", "note"]
    return rows.assign(value=rows.value.map(_number_words), where=_origin_words(rows))[columns]


def claims_table(frame: pd.DataFrame, size: str = "quick") -> pd.DataFrame:
    """The sources' claims, a row each: from what to what, how many times here, how many claimed, and what differs.

    What was measured here in this `size` is taken where it is there, else what was recorded.
    """
    rows = []
    for claim in CLAIMS:
        sides = [_claim_side(frame[frame["size"] == size], claim, *side) for side in (claim.slow, claim.fast)]
        (slow, slow_words, _), (fast, fast_words, _) = sides
        times = fast / slow if claim.unit == "images/s" else slow / fast
        missing = "; ".join(dict.fromkeys(reason for *_, reason in sides if reason))
        row = {"claim": claim.words, "claimed": claim.claimed, "measured": missing or f"{times:.3g}×"}
        rows.append(row | {"from": slow_words, "to": fast_words, "what differs": claim.differs, "times": times})
    return pd.DataFrame(rows)


def _claim_side(frame: pd.DataFrame, claim: Claim, device: str, way: str) -> tuple[float, str, str]:
    """One side of a claim: the best that a device can, in words with where it is from; or why there is no number."""
    frame = frame[(frame.part == claim.part) & (on_gpu(frame) == (device == "gpu"))]
    rows = frame[(frame.unit == claim.unit) & frame.value.notna() & ((frame.way == way) | (not way))]
    if rows.empty:
        notes = frame.note[frame.way.isin([way, ""]) & frame.value.isna() & frame.note.fillna("").ne("")]
        return np.nan, "", f"not measured on a {device.upper()}" + "".join(f": {note}" for note in notes[:1])
    rows = rows[rows.recorded == rows.recorded.min()]
    medians = rows.assign(where=_origin_words(rows)).groupby(["way", "where"], sort=False).value.median()
    value = medians.max() if claim.unit == "images/s" else medians.min()
    best, origin = medians.index[medians == value][0]
    return value, f"{_number_words(value)} {claim.unit}, {best}: {origin}", ""


def cost_table(frame: pd.DataFrame, per_hour: Mapping[str, float]) -> pd.DataFrame:
    """What one trained text classifier costs, in float32, where an hour on a `cpu` and on a `gpu` costs so much.

    A row a machine, setting and size: `seconds` (the median over seeds), `per_hour`, `per_thousand` (the price of a
    thousand trained models), `watt_hours` of one (NaN where nobody counts), and `breaks_even`: how many times as dear
    as the cheapest CPU of that size an hour may be until a model costs the same.
    """
    if any(not per_hour.get(device, 0) > 0 for device in ("cpu", "gpu")):
        raise gl.UsageError(f"per_hour={dict(per_hour)}: expected a price above 0 for 'cpu' and for 'gpu'")
    trained = frame[(frame.part == "text") & (frame.way == "float32") & frame.unit.isin(["s", "J"])]
    group_columns = ["size", "machine", "setting", "recorded"]
    table = trained.pivot_table("value", group_columns, "unit", "median", sort=False)
    table = table.reindex(columns=["s", "J"]).rename_axis(columns=None).reset_index()
    price = np.where(on_gpu(table), per_hour["gpu"], per_hour["cpu"])
    cpu = table[~on_gpu(table)].groupby("size").s.min()
    return table[group_columns].assign(
        seconds=table.s,
        per_hour=price,
        per_thousand=1000 * table.s * price / HOUR,
        watt_hours=table.J / HOUR,
        breaks_even=table["size"].map(cpu) / table.s,
    )


def precision_verdict(frame: pd.DataFrame) -> Verdict:
    """What the precision does to the loss of the text classifier of one machine, setting and size, against float32."""
    losses = frame[(frame.part == "text") & (frame.unit == "loss") & ~frame.way.str.contains("compiled")]
    precision_losses = losses.rename(columns={"way": "precision", "value": "final_loss"})
    return gl.verdict(precision_losses[["precision", "seed", "final_loss"]], factor="precision", reference="float32")


def crossover(frame: pd.DataFrame) -> float:
    """The width from which on an update of three layers takes longer on the CPU; NaN where the lines do not cross."""
    seconds = _update_seconds(frame)
    gain = np.log(seconds[False] / seconds[True]).to_numpy()
    if not len(gain) or gain[0] >= 0 or gain[-1] < 0:
        return float("nan")
    last = int(np.flatnonzero(gain < 0)[-1])  # at which the CPU leads
    return float(2 ** np.interp(0, gain[last : last + 2], np.log2(seconds.index)[last : last + 2]))


def backends(passport: Mapping[str, Any]) -> pd.DataFrame:
    """CUDA, ROCm, Metal and XPU: what a passport (`gpulab.passport`) says of each, and what is not measured there."""
    rocm, rows = passport["software"].get("rocm"), []
    for name, (kind, missing) in BACKENDS.items():
        version = {"CUDA": passport["software"].get("cuda"), "ROCm": rocm}.get(name)
        of_other_backend = kind == "cuda" and bool(rocm) != (name == "ROCm")  # torch calls both of them cuda
        gpus = [] if of_other_backend else [gpu for gpu in passport["gpus"] if gpu["kind"] == kind]
        devices = [", capability ".join(filter(None, (gpu["name"], gpu.get("compute_capability")))) for gpu in gpus]
        row = {"backend": name, "setting": kind, "torch's version of it": version or "not in the passport"}
        rows.append(row | {"devices": ", ".join(devices) or "none here", "not measured there": missing})
    return pd.DataFrame(rows)


def _update_seconds(frame: pd.DataFrame) -> pd.DataFrame:
    """Seconds of an update of three layers, a row a width, on a CPU (False) and on another device (True)."""
    rows = frame[frame.part == "small"].assign(gpu=on_gpu, width=lambda small_rows: small_rows.way)
    rows = rows.astype({"width": float}).sort_values("recorded", kind="stable")
    return rows.groupby(["width", "gpu"]).value.first().unstack().reindex(columns=[False, True]).dropna()


def speed_finding(frame: pd.DataFrame) -> CheckedSentences:
    """What was measured here, then what was recorded: everything from `measure_speed` and `recorded_speed`."""
    measured_here, recorded = frame[~frame.recorded], frame[frame.recorded]
    one_device = measured_here[~on_gpu(measured_here)] if not on_gpu(measured_here).all() else measured_here
    shares = _phase_seconds(one_device)
    backward_shares = [f"{share:.0%} ({row[0]})" for row, share in (shares.backward / shares.sum(axis=1)).items()]
    device = "GPU" if on_gpu(one_device).all() else "CPU"
    sections: dict[str, Part] = {f"On this {device}": f"Backpropagation takes {listed(backward_shares)} of a step."}
    for machine, rows in recorded[on_gpu(recorded)].groupby("machine"):
        seconds = _update_seconds(pd.concat([one_device, rows]))
        cpu_leads = int((seconds[False] < seconds[True]).sum())
        small = f"An update of three layers takes less time here than there at {cpu_leads} of {len(seconds)} widths."
        sections[f"Small networks, against {machine}"] = small
        cpu_and_gpu = pd.concat([recorded[~on_gpu(recorded)], rows])
        claims = pd.concat([claims_table(cpu_and_gpu, size).assign(size=SIZES[size]) for size in ("quick", "paper")])
        sentences = []
        for (claim, claimed), measured in claims.dropna(subset="times").groupby(["claim", "claimed"], sort=False):
            answers = [
                f"{'yes' if times > 1 else 'no'}, {times:.3g}× ({size})"
                for times, size in measured[["times", "size"]].itertuples(index=False)
            ]
            sentences.append(f"{claim[0].upper()}{claim[1:]}: {'; '.join(answers)}. Claimed: {claimed}.")
        sections[f"What was claimed, recorded on {machine}"] = sentences
    text = one_device[one_device.part == "text"].groupby(["way", "unit"]).value.median()
    number = (
        f"A text classifier trains in {text['float32', 's']:.3g} s here; right on {text['float32', 'accuracy']:.0%} "
        f"of unseen texts, and {text['most frequent class', 'accuracy']:.0%} are of the most frequent class."
    )
    return finding(sections, [number])


def on_gpu(frame: pd.DataFrame) -> pd.Series:
    """Which rows are of another device than the CPU."""
    return ~frame.setting.astype(str).str.startswith("cpu")


def _origin_words(frame: pd.DataFrame) -> pd.Series:
    """What made each row, in words."""
    return (
        frame.machine + ", " + frame.setting.map(setting_words) + frame.recorded.map({True: " (recorded)", False: ""})
    )


def _number_words(value: float) -> str:
    return "" if value != value else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _phase_seconds(frame: pd.DataFrame) -> pd.DataFrame:
    """Seconds of each phase of a step, a row a network and place."""
    frame = frame[frame.part == "step"]
    return frame.assign(where=_origin_words(frame)).pivot_table("value", ["what", "where"], "way", sort=False)[
        [*PHASES]
    ]


def named_lines(axes: Axes, frame: pd.DataFrame, x: str, y: str) -> None:
    """A line with its points for each `name`, in the colour of its `setting`; hollow where it was `recorded`."""
    for (name, setting, recorded), rows in frame.groupby(["name", "setting", "recorded"], sort=False):
        tint = style.colour(setting)
        axes.plot(rows[x], rows[y], label=name, color=tint, marker="o", mfc="white" if recorded else tint)


@style.themed
def scaling(frame: pd.DataFrame) -> Picture:
    """Rates of matrix products against their size: filled from `gpulab.roofline`, hollow from `recorded_rooflines`."""
    figure, (axes,) = style.canvas(height=3.9)
    frame = frame[frame.kind == "matrix"].reset_index(drop=True)
    edge = frame.operation.str.extract(r"(\d+)$", expand=False).astype(int)
    machine = frame.get("machine", pd.Series(np.nan, frame.index))
    name = frame.setting.map(setting_words) + (", " + machine + " (recorded)").fillna(", here")
    frame = frame.assign(edge=edge, name=name, recorded=machine.notna()).sort_values("edge", kind="stable")
    named_lines(axes, frame, "edge", "gflops")
    _widths(axes, edge)
    axes.set(xlabel="edge of the matrices", ylabel="rate (Gflop/s)")
    style.log_scale(axes.yaxis)
    best = frame.groupby(["edge", on_gpu(frame)]).gflops.max().unstack().dropna()
    ahead = best.index[best[True] > best[False]] if best.shape[1] == 2 else []
    headline = f"At an edge of {ahead[0]:,} a GPU has overtaken the CPU" if len(ahead) else "One kind of device leads"
    return style.finished(figure, headline, "Rate of square matrix products against their edge.")


def shares(frame: pd.DataFrame) -> Picture:
    """What share of a training step each phase takes, for each network and machine."""
    table = _phase_seconds(frame)
    backward_shares = table.backward / table.sum(axis=1)
    headline = f"Backpropagation takes {backward_shares.min():.0%} to {backward_shares.max():.0%} of a step"
    table = table.set_axis(table.index.map(", ".join))
    label = "share of a training step (right: the whole step)"
    return _stacked_shares(table, PHASES, label, headline, "Shares of forward pass, backpropagation and update.")


def kernels() -> Picture:
    """What kinds of work an update of PredNet spends its time on, on the machines where that was recorded.

    The fast path of `gpulab.train`; how far it is from a machine's peak stands in `benchmarks/prednet.md`.
    """
    rows = recorded_table("kernels")
    where = rows.machine + ", " + rows.setting.map(setting_words) + ", " + rows["size"]
    table = (
        rows.assign(where=where, seconds=rows.ms / 1e3).pivot_table("seconds", "where", "what", sort=False).fillna(0)
    )
    table = table[table.sum().sort_values(ascending=False).index]
    share = table["convolutions"] / table.sum(axis=1)
    headline = f"Convolutions, weight gradients apart, are {share.min():.0%} to {share.max():.0%} of an update's work"
    label = "share of its kernels' time (right: the sum; on a GPU some run beside others)"
    tints = style.level_colours("what", [*table])
    return _stacked_shares(table, tints, label, headline, "Shares of an update of PredNet by kind of work.")


@style.themed
def _stacked_shares(seconds: pd.DataFrame, tints: Mapping[str, str], label: str, headline: str, alt: str) -> Picture:
    """A bar for each row of seconds, divided by the shares of its columns, and beside it the whole in milliseconds."""
    figure, (axes,) = style.canvas(height=1.3 + 0.3 * len(seconds))
    whole = seconds.sum(axis=1)
    seconds[[*tints]].div(whole, axis=0).plot.barh(stacked=True, color=tints, width=0.7, ax=axes)
    bars: Any
    for bars, tint in zip(axes.containers, tints.values(), strict=True):
        words = [f"{bar.get_width():.0%}" if bar.get_width() > 0.06 else "" for bar in bars]
        axes.bar_label(bars, words, label_type="center", color="white" if sum(to_rgb(tint)) < 1.5 else "black")
    for row, total in enumerate(whole):
        axes.annotate(f" {1e3 * total:.3g} ms", (1, row), **style.BESIDE)
    axes.invert_yaxis()
    axes.set(xlim=(0, 1), xlabel=label, ylabel="")
    axes.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    return style.finished(figure, headline, alt, columns=3)


def end_to_end() -> pd.DataFrame:
    """What `gl.train("prednet")` does in a second, frames and record included, beside its captured step alone.

    Recorded by `benchmarks/training_speed.py end-to-end`; `data alone` is how many frames come when nobody trains.
    """
    rows = recorded_table("end_to_end")
    speeds = {"end to end": "seconds", "captured step alone": "step_seconds", "data alone": "data_seconds"}
    table = rows[["size", "data"]].assign(where=_origin_words(rows))
    for name, column in speeds.items():
        table[name] = rows.window / rows[column]
    table["of the step"] = (table["end to end"] / table["captured step alone"]).map("{:.0%}".format)
    return table.round(0).astype(dict.fromkeys(speeds, int))


@style.themed
def small_work(frame: pd.DataFrame) -> Picture:
    """The time of an update of three layers against their width, and where a CPU and another device take the same."""
    figure, (axes,) = style.canvas()
    rows = frame[frame.part == "small"]
    origin = rows.recorded.map({True: " (recorded)", False: ", here"})
    rows = rows.assign(
        width=rows.way.astype(int),
        ms=1e3 * rows.value,
        name=rows.setting.map(setting_words) + ", " + rows.machine + origin,
    )
    medians = rows.groupby(["name", "setting", "recorded", "width"], sort=False, as_index=False).ms.median()
    named_lines(axes, medians.sort_values("width", kind="stable"), "width", "ms")
    _widths(axes, rows.width)
    style.log_scale(axes.yaxis)
    axes.set(xlabel="width of each of three layers, 32 examples", ylabel="one update (ms)")
    cross = crossover(frame)
    headline = "The same device leads at every width" if on_gpu(rows).any() else "A CPU alone: no GPU was recorded"
    if cross == cross:
        axes.axvline(cross, color=INK, lw=0.8, ls=":")
        headline = f"The CPU is faster up to a width of about {cross:.0f}"
    return style.finished(figure, headline, "Milliseconds of an update against the width of the network.")


@style.themed
def ladder(frame: pd.DataFrame) -> Picture:
    """How many times as fast as in float32 the text classifier trains in each precision, seed by seed."""
    absent = frame.note.fillna("").ne("") & ~frame.recorded  # of what was recorded only what there is
    frame = frame[(frame.part == "text") & ((frame.unit == "s") | absent)]
    float32_medians = frame[frame.way == "float32"].groupby(PLACE, as_index=False).value.median()
    frame = frame.merge(float32_medians.rename(columns={"value": "usual"}), on=PLACE)
    frame["times"] = frame.usual / frame.value
    frame["where"] = frame.recorded.map({True: "recorded on ", False: "here, "}) + frame.machine + "\n"
    frame["where"] += frame.setting.map(setting_words) + ", " + frame["size"]
    ways = list(frame.way.unique())
    figure, (axes,) = style.canvas(height=1.4 + 0.75 * frame["where"].nunique())
    look = {
        "hue": "way",
        "palette": style.level_colours("way", ways),
        "hue_order": ways,
        "dodge": True,
        "jitter": False,
    }
    sns.stripplot(frame, x="times", y="where", size=4.5, ax=axes, **look)
    axes.axvline(1, color=INK, lw=0.8, zorder=1)
    axes.set(xlim=(0, None), ylabel="", xlabel="times as fast as the median in float32 there (a point a seed)")
    medians = frame.groupby([*PLACE, "way"]).times.median()
    _, machine, _, _, best = medians.idxmax()
    headline = f"The most gained: {best} on {machine}, {medians.max():.2f} times as fast as float32"
    headline = "Nothing trains faster than float32" if best == "float32" else headline
    notes = frame[frame.times.isna()].drop_duplicates("way")
    absent = "".join(f" Not {way} here: {note}." for way, note in zip(notes.way, notes.note, strict=True))
    return style.finished(figure, headline, f"Speed of training in each precision over float32.{absent}", columns=4)


def _widths(axes: Axes, widths: pd.Series) -> None:
    """A logarithmic horizontal axis with a tick at each power of four."""
    axes.set_xscale("log", base=2)
    low, high = np.log2([widths.min(), widths.max()]).astype(int)
    ticks = [2**power for power in range(low, high + 1, 2)]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
