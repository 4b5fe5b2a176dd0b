"""Two blogs' claims on the speed of GPUs compared with measurements; the finding of notebook 07."""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

import pandas as pd

from companion.findings import SUMMARY, CheckedSentences, Part, finding, listed
from companion.timing import BUSY, MAX_SPREAD
from gpulab.store.recorded import read_measured
from gpulab.wording import setting_words

CLAIM_SIZES = {"quick": "small", "paper": "large"}  # the sizes of the claims' workloads
ENOUGH = 6  # seeds: six agree by chance in 3 of 100 cases


class Claim(NamedTuple):
    """A source's claim of a factor in speed or size between two measured numbers.

    Each number belongs to a device and a way of computing.
    """

    words: str
    claimed: str
    part: str
    unit: str
    slow: tuple[str, str]  # an empty way stands for the best one measured
    fast: tuple[str, str]
    differs: str


# fmt: off
CLAIMS = [Claim(*fields) for fields in (
    ("text classification is faster on a GPU", "198.2 s / 14.4 s = 13.76×", "text", "s",
     ("cpu", "float32"), ("gpu", "float32"),
     "theirs: nothing named; here: a small Transformer on docstrings"),
    ("gradient-boosted trees are faster on GPUs", "23.2×", "trees", "s",
     ("cpu", "fifty trees"), ("gpu", "fifty trees"),
     "theirs: RAPIDS, four GPUs; here: XGBoost, one GPU, random numbers"),
    ("GPUs serve faster", "804 % faster = 9.04×", "inference", "images/s",
     ("cpu", ""), ("gpu", ""),
     "theirs: three GPUs, five clusters of CPUs; here: the devices and cores of one machine"),
    ("tensor cores train faster in mixed precision", "faster", "text", "s",
     ("gpu", "float32"), ("gpu", "bfloat16"),
     "theirs: no number; here: bfloat16, against float32 without TF32"),
    ("compilation makes training faster", "faster", "text", "s",
     ("gpu", "float32"), ("gpu", "float32, compiled"),
     "theirs: no number; here: compile time excluded"),
    ("transfers can be hidden behind computation", "hidden", "transfer", "s",
     ("gpu", "pageable"), ("gpu", "overlapped"),
     "theirs: no number; here: images, copied while resnet18 processes the previous batch"),
    ("accumulated gradients need less memory", "less", "memory", "MB",
     ("gpu", "1 part"), ("gpu", "4 parts"),
     "theirs: no number; here: a Transformer's batch in four parts"),
)]
# fmt: on


def claims_table(frame: pd.DataFrame, size: str = "quick") -> pd.DataFrame:
    """The sources' claims, a row each: claimed and measured ratio, answer, and differences.

    Measurements made here at this `size` are preferred to recorded ones. If runs from several
    seeds are compared, the answer is yes or no only if there are at least six seeds and all agree.
    """
    rows = []
    for claim in CLAIMS:
        sides = [
            _side(frame[frame["size"] == size], claim, *side) for side in (claim.slow, claim.fast)
        ]
        (slow, slow_words), (fast, fast_words) = sides
        row = {
            "claim": claim.words,
            "claimed": claim.claimed,
            "measured": "",
            "answer": "not measured",
        }
        if len(slow) and len(fast):
            row["measured"], row["answer"] = _compared(slow, fast, claim.unit)
        rows.append(
            row | {"from": slow_words, "to": fast_words, "how the cases differ": claim.differs}
        )
    return pd.DataFrame(rows)


def _side(frame: pd.DataFrame, claim: Claim, device: str, way: str) -> tuple[pd.Series, str]:
    """One side of a claim: a device's best numbers by seed, described, or why there are none."""
    frame = frame[(frame.part == claim.part) & (on_gpu(frame) == (device == "gpu"))]
    rows = frame[
        (frame.unit == claim.unit) & frame.value.notna() & ((frame.way == way) | (not way))
    ]
    if rows.empty:
        notes = frame.note[
            frame.way.isin([way, ""]) & frame.value.isna() & frame.note.fillna("").ne("")
        ]
        return rows.value, f"not measured on a {device.upper()}" + "".join(
            f": {note}" for note in notes[:1]
        )
    rows = rows[rows.recorded == rows.recorded.min()]
    medians = rows.groupby(["way", "where"], sort=False).value.median()
    best_way, where = medians.idxmax() if claim.unit == "images/s" else medians.idxmin()
    best = rows[(rows.way == best_way) & (rows["where"] == where)]
    best = best.set_index(pd.to_numeric(best.seed)).value
    span = f" ({best.min():.3g} to {best.max():.3g})" if len(best) > 1 else ""
    median = f"{best.median():,.0f}" if best.median() >= 1000 else f"{best.median():.3g}"
    return best, f"{median} {claim.unit}{span}, {best_way}: {where}"


def _compared(slow: pd.Series, fast: pd.Series, unit: str) -> tuple[str, str]:
    """How many times as fast or as small, and the answer: yes, no, or not decided."""
    times = fast.median() / slow.median() if unit == "images/s" else slow.median() / fast.median()
    words, answer = f"{times:.3g}×", "yes" if times > 1 else "no"
    # one number for each side, the median of many calls
    if slow.index.isna().any() or fast.index.isna().any():
        return words, answer
    pairs = (slow / fast).dropna()
    agree = int(((pairs > 1) == (times > 1)).sum())
    if len(pairs) < ENOUGH:
        return f"{words} ({len(pairs)} of the {ENOUGH} seeds needed)", "not decided"
    return f"{words} (in {agree} of {len(pairs)} seeds)", answer if agree == len(
        pairs
    ) else "not decided"


def claimed_costs() -> pd.DataFrame:
    """The ratios that the sources claim, as rows of the table of costs in notebook 07.

    Returns:
        A row for each claimed time, and for each claimed ratio without times: `size` (claimed),
        `where` (the claim in words), `setting` (cpu or gpu), `time, s`, and `breaks even at`, the
        ratio of hourly prices at which the claimed work costs the same on both devices.

    Examples:
        >>> claimed_costs()["breaks even at"].round(2).tolist()
        [1.0, 13.76, 23.2, 9.04]
    """
    rows = []
    for claim in CLAIMS:
        ratio = re.search(r"([\d.]+)×", claim.claimed)
        if not ratio:
            continue
        words = f"{claim.words} ({claim.claimed})"
        times = [float(number) for number in re.findall(r"([\d.]+) s", claim.claimed)]
        if times:
            rows.append(("cpu", f"{words}, CPU", times[0], 1.0))
        rows.append(("gpu", f"{words}, GPU", times[1] if times else math.nan, float(ratio[1])))
    columns = ["setting", "where", "time, s", "breaks even at"]
    return pd.DataFrame(rows, columns=columns).assign(size="claimed")


def recorded_conditions() -> pd.DataFrame:
    """What was recorded for notebook 07, and how busy the machine was meanwhile.

    Returns:
        A table with a row for each machine with its setting (`where`) and each size, or two rows if
        the load was recorded only for some sections:

        - `what was measured`: the sections of the notebook.
        - `cores used by others`: the smallest and the largest number over the sections, of all
          cores of the machine; or that it was not recorded.
        - `rounds differ by more than 20 %`: the number of times and rates for which this is so, of
          all whose spread was recorded, if any was.

    Examples:
        >>> recorded_conditions().columns[1]
        'cores used by others'
    """
    rows = []
    for kind in ("speed", "autoencoder", "prednet", "peers", "rooflines", "kernels", "end_to_end"):
        for document in read_measured(kind):
            rows += _describe_record(kind, document)
    frame = pd.DataFrame(rows).groupby(["where", "size", "is_loaded"], sort=False).agg("sum")
    frame = frame.droplevel("is_loaded")
    others = [
        f"{min(used):.1f} to {max(used):.1f} of {max(cores)}" if used else "not recorded"
        for used, cores in zip(frame.others, frame.cores, strict=True)
    ]
    return pd.DataFrame(
        {
            "what was measured": frame.parts.map(dict.fromkeys).map(", ".join),
            "cores used by others": others,
            f"rounds differ by more than {MAX_SPREAD:.0%}".replace("%", " %"): [
                f"{sum(spread > MAX_SPREAD for spread in spreads)} of {len(spreads)}"
                if spreads
                else "not recorded"
                for spreads in frame.spreads
            ],
        },
        index=frame.index,
    )


def _describe_record(kind: str, document: dict[str, Any]) -> list[dict[str, Any]]:
    """The parts, spreads and loads of a recorded document, for each setting and size, as lists."""
    table = pd.DataFrame(document["rows"])
    if "quartiles" in table:
        lower, upper = table.quartiles.str[0], table.quartiles.str[1]
        table = table.assign(
            part=kind, value=table.per_second, spread=(upper - lower) / table.per_second
        )
    elif "part" not in table:
        table = table.assign(part=kind, value=1.0)
    table = table.reindex(columns=[*dict.fromkeys([*table, "spread"])])[table.value.notna()]
    sizes = table.get("size", "all" if kind == "rooflines" else "quick")
    loads = document.get("cores_of_others", {})
    found = []
    for (setting, size), rows in table.assign(size=sizes).groupby(["setting", "size"], sort=False):
        parts = list(rows.part.unique())
        used = [loads[f"{size} {part}"] for part in parts if f"{size} {part}" in loads]
        found.append(
            {
                "where": f"{document['machine']}, {setting_words(setting)} (recorded)",
                "size": size,
                "parts": parts,
                "is_loaded": bool(loads),
                "others": used,
                "cores": [document["passport"]["cpu"]["logical_cores"]],
                "spreads": rows.spread.dropna().tolist(),
            }
        )
    return found


def speed_finding(
    steps: pd.DataFrame, updates: pd.DataFrame, everything: pd.DataFrame
) -> CheckedSentences:
    """State what was measured here and what was recorded elsewhere.

    The claims are in short with their answers, and with the seeds behind the fold.
    """
    steps_here, everything_here = steps[~steps.recorded], everything[~everything.recorded]
    first = steps_here.setting.iloc[0]  # the CPU, if it is one of the devices
    here = steps_here[steps_here.setting == first].set_index("what")[
        ["forward", "backward", "update"]
    ]
    device = "CPU" if first.startswith("cpu") else "GPU"
    backward = _describe_backward(here)
    summary = [f"On this {device}: {backward}"]
    parts: dict[str, Part] = {SUMMARY: summary, f"On this {device}": backward}
    seconds_here = updates[updates.setting == updates[~updates.recorded].setting.iloc[0]].query(
        "not recorded"
    )
    for machine, rows in everything[everything.recorded & on_gpu(everything)].groupby("machine"):
        both = seconds_here.merge(
            updates[updates.recorded & (updates.machine == machine)], on="width"
        )
        both = both.dropna(subset=["seconds_x", "seconds_y"])
        ahead = int((both.seconds_x < both.seconds_y).sum())
        words = f"{BUSY}."
        if len(both):
            words = (
                f"An update of three layers is faster here than on {machine} at {ahead} of"
                f" {len(both)} widths."
            )
            summary.append(words)
        parts[f"Small networks, compared with {machine}"] = words
        there = pd.concat([everything[everything.recorded & ~on_gpu(everything)], rows])
        claims = pd.concat(
            [claims_table(there, size).assign(size=words) for size, words in CLAIM_SIZES.items()]
        )
        sentences = []
        summary.append(f"Claims, measured on {machine} (recorded):")
        for (claim, claimed), answers in claims[claims.measured != ""].groupby(
            ["claim", "claimed"], sort=False
        ):
            words = "; ".join(
                f"{row.answer}, {row.measured}, {row.size}" for row in answers.itertuples()
            )
            sentences.append(f"{claim[0].upper()}{claim[1:]}: {words}. Claimed: {claimed}.")
            summary.append(_claim_in_short(claim, claimed, answers))
        parts[f"What was claimed, and measured on {machine} (recorded)"] = sentences
    text = everything_here[everything_here.part == "text"].groupby(["way", "unit"]).value.median()
    seconds = text["float32", "s"]
    speed = f"{BUSY}." if pd.isna(seconds) else f"A text classifier trains in {seconds:.3g} s here."
    numbers = (
        f"{speed} The text classifier classifies"
        f" {text['float32', 'accuracy']:.0%} of the unseen texts correctly;"
        f" {text['most frequent class', 'accuracy']:.0%} belong to the most frequent class."
    )
    return finding(parts, [numbers])


def _claim_in_short(claim: str, claimed: str, answers: pd.DataFrame) -> str:
    """A claim with its ratio, and the answer and the measured ratio at each size."""
    ratio = f" (claimed {claimed.rpartition(' = ')[2]})" if "×" in claimed else ""
    words = [f"{row.answer}, {row.measured.split()[0]}, {row.size}" for row in answers.itertuples()]
    return f"{claim[0].upper()}{claim[1:]}{ratio}: {'; '.join(words)}."


def _describe_backward(steps: pd.DataFrame) -> str:
    """The share of backpropagation in each network's step, without the times that were withheld."""
    steps = steps.dropna()
    if steps.empty:
        return f"{BUSY}."
    shares = steps.backward / steps.sum(axis=1)
    words = [f"{share:.0%} ({name})" for name, share in shares.items()]
    return f"Backpropagation takes {listed(words)} of a step."


def on_gpu(frame: pd.DataFrame) -> pd.Series:
    """Which rows come from a device other than the CPU."""
    return ~frame.setting.astype(str).str.startswith("cpu")
