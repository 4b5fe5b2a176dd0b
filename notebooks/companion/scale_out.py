"""Start the programs of notebook 08 and show their source, and state its finding.

This module does not import torch: the programs do, in processes of their own. So the notebook's
kernel needs little memory while they run.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

import gpulab as gl
from companion.findings import SUMMARY, CheckedSentences, finding, span
from gpulab.stats import Verdict
from gpulab.store.recorded import read_document
from gpulab.wording import setting_words

PROGRAMS = Path(__file__).parents[1] / "programs"
HERE = "Measured here:"  # tests/nbval.cfg ignores the rest of such a line, which can be withheld
BUSY = "this machine is too busy to"


@dataclass(frozen=True)
class SourceCode:
    """Python source that a notebook shows with its syntax highlighted."""

    text: str

    def __repr__(self) -> str:
        return self.text

    def _repr_markdown_(self) -> str:
        return f"```python\n{self.text}\n```"


def show_source(program: str, *names: str) -> SourceCode:
    """Show functions and classes of `programs/PROGRAM.py`, without importing the program.

    Examples:
        >>> print(str(show_source("serve", "predict")).splitlines()[1])
        def predict(copies, films):

    Raises:
        UsageError: If the program has no function or class of one of these names.
    """
    source = (PROGRAMS / f"{program}.py").read_text(encoding="utf-8")
    lines, found = source.splitlines(), {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            found[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
    if missing := [name for name in names if name not in found]:
        raise gl.UsageError(
            f"expected names of functions or classes in {program}.py ({', '.join(found)}), got"
            f" {', '.join(missing)}"
        )
    return SourceCode("\n\n\n".join(found[name] for name in names))


def run_program(name: str, *arguments: object) -> dict[str, pd.DataFrame]:
    """Run `programs/NAME.py` with arguments, and return the tables that it records.

    The table `trust` says in words whether the times can be trusted. Numbers that the program
    withholds are missing.

    Raises:
        GpulabError: If the program fails, with its error output.
    """
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder, "record.json")
        command = [
            sys.executable,
            str(PROGRAMS / f"{name}.py"),
            *map(str, arguments),
            "--record",
            str(record),
        ]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=dict(os.environ)
        )
        if done.returncode:
            raise gl.GpulabError(
                f"{name}.py {' '.join(map(str, arguments))}: {done.stderr.strip()}"
            )
        document = read_document(record)
    return {
        key: _without_nulls(pd.DataFrame(value)).assign(machine="this machine", recorded=False)
        for key, value in document.items()
        if isinstance(value, list)
    }


def _without_nulls(table: pd.DataFrame) -> pd.DataFrame:
    """Turn columns in which every number is withheld into columns of missing numbers."""
    return table.astype({name: float for name in table if table[name].isna().all()})


def overheads(scaling: pd.DataFrame) -> pd.Series:
    """How many seconds longer an update takes together than a share alone does.

    Measurements in rounds contain this number, or it is withheld. In recordings of single means it
    is the difference of two of them.
    """
    is_mean = scaling.rounds.isna()
    return scaling.overhead.where(~is_mean, scaling.seconds - scaling.compute)


def lock_free_gains(speeds: pd.DataFrame) -> pd.Series:
    """How many times as many updates per second lock-free workers make, in each repetition.

    Args:
        speeds: A row for each `way` and `repetition`, with `updates_per_second`, missing where it
            was withheld.
    """
    table = speeds.pivot(index="repetition", columns="way", values="updates_per_second")
    return table["lock-free"] / table["synchronous"]


def compare_lock_free(descents: pd.DataFrame) -> pd.DataFrame:
    """Compare lock-free with synchronous workers in each repetition.

    Args:
        descents: A row for each run of `programs/hogwild.py`, with `condition` and `repetition`.

    Returns:
        A row for each condition and repetition: the `decision` of `gpulab.verdict` on the loss of
        held-out images; the `difference` of the mean loss; `higher`, the seeds whose loss is higher
        without a lock; the mean `lost_share` of the changes; and the mean `age` of a gradient, in
        updates.
    """
    rows = []
    for (condition, repetition), runs in descents.groupby(["condition", "repetition"], sort=False):
        losses = runs[["way", "seed", "heldout_loss"]]
        verdict = gl.verdict(losses, "heldout_loss", "way", reference="synchronous")
        pairs = losses.pivot_table(index="seed", columns="way", values="heldout_loss")
        free = runs[runs.way == "lock-free"]
        rows.append(
            {
                "condition": condition,
                "repetition": repetition,
                "decision": verdict.table.decision.iloc[0],
                "difference": verdict.table.difference.iloc[0],
                "higher": int((pairs["lock-free"] > pairs.synchronous).sum()),
                "seeds": len(pairs),
                "lost_share": free.lost_share.mean(),
                "age": free.age.mean(),
            }
        )
    return pd.DataFrame(rows)


def describe_gains(gains: pd.Series) -> str:
    """State in a sentence how much faster lock-free workers are, or that it was not measured."""
    measured = gains.dropna()
    if measured.empty:
        return f"{BUSY.capitalize()} time workers with and without a lock."
    return (
        f"Lock-free workers update {span(measured, '.2f')} times as fast as synchronous ones"
        f" ({len(measured)} of {len(gains)} repetitions)."
    )


def scale_finding(
    ends: pd.DataFrame,
    scaling: pd.DataFrame,
    descents: pd.DataFrame,
    speeds: pd.DataFrame,
    verdicts: Sequence[Verdict],
    serving: pd.DataFrame,
) -> CheckedSentences:
    """State what was measured here and what was recorded elsewhere; details are folded.

    Args:
        ends: How far the weights of divided training runs differ from those of one device.
        scaling: How fast several devices trained.
        descents: Lock-free and synchronous runs, with the number of their `repetition`.
        speeds: Updates per second of lock-free and synchronous workers, as for `lock_free_gains`.
        verdicts: The verdicts on the loss of lock-free training, one for each repetition.
        serving: How many images per second one device and several devices predict.
    """
    here = ends[~ends.recorded]
    most = here.groupby("precision").weights.max()
    same = (
        f"{span(here.devices)} devices that divide batches end with the weights of one, to within"
        f" {most.float32:.1e} in float32 and {most.float64:.1e} in float64."
    )
    places = [
        (HERE, scaling[~scaling.recorded], serving[~serving.recorded]),
        *(
            (f"Recorded on {machine}:", rows, serving[serving.machine == machine])
            for machine, rows in scaling[scaling.recorded].groupby("machine", sort=False)
        ),
    ]
    short = [same]
    short += [f"{place} {_describe_speed(rows, served)}" for place, rows, served in places]
    short.append(f"{HERE} {describe_gains(lock_free_gains(speeds))}")
    short.append(count_decisions(verdicts))
    details = [f"{place} {line}" for place, rows, _ in places for line in _describe_sizes(rows)]
    return finding(
        {
            SUMMARY: short,
            "Dividing a batch": details,
            "Without a lock": describe_lock_free(descents),
        }
    )


def describe_lock_free(descents: pd.DataFrame) -> str:
    """State how old gradients were and how many changes were lost, over all repetitions.

    Args:
        descents: As for `scale_finding`.
    """
    means = descents.groupby(["way", "repetition"])[["age", "lost_share"]].mean()
    synchronous, free = (means.loc[way] for way in ("synchronous", "lock-free"))
    return (
        f"In {len(free)} repetitions a gradient was {span(free.age, '.2f')} updates old when it"
        f" was applied. The share of changes that were lost is {span(free.lost_share, '.1e')}"
        f" (with the lock at most {synchronous.lost_share.max():.1e}, from rounding)."
    )


def count_decisions(verdicts: Sequence[Verdict]) -> str:
    """State how often each decision on the loss was reached."""
    counts = Counter(verdict.table.decision.iloc[0] for verdict in verdicts)
    decisions = ", ".join(f"{count} {decision}" for decision, count in counts.items())
    return f"Verdicts on the loss without a lock: {decisions}."


def _describe_speed(scaling: pd.DataFrame, serving: pd.DataFrame) -> str:
    """State how many times as fast as one device several devices train and serve."""
    together = scaling[scaling.devices > 1]
    strong, weak = (
        together.speedup[together.scaling == kind].dropna() for kind in ("strong", "weak")
    )
    one, several = (
        serving[is_served].set_index("size").images_per_second
        for is_served in (serving.devices == 1, serving.devices > 1)
    )
    gains = (several / one).dropna()
    measured, withheld = [], []
    if strong.empty or weak.empty:
        withheld.append("training")
    else:
        measured.append(
            f"train {span(strong, '.2f')} times as fast as one with divided batches,"
            f" {span(weak, '.2f')} times with whole ones"
        )
    if gains.empty:
        withheld.append("serving")
    else:
        measured.append(f"serve {span(gains, '.2f')} times as fast")
    clauses = []
    if measured:
        clauses.append(f"{span(together.devices)} devices {', and '.join(measured)}")
    if withheld:
        clauses.append(f"{BUSY} time {' and '.join(withheld)}")
    return f"{'; '.join(clauses)}."


def _describe_sizes(scaling: pd.DataFrame) -> list[str]:
    """State how fast several devices train a network of each size under each setting."""
    lines = []
    for (size, setting), rows in scaling[scaling.devices > 1].groupby(
        ["size", "setting"], sort=False
    ):
        strong, weak = (rows[rows.scaling == kind] for kind in ("strong", "weak"))
        speeds = [
            f"{span(known, '.2f')} times as fast"
            if len(known := part.speedup.dropna())
            else "withheld"
            for part in (strong, weak)
        ]
        shares = (overheads(strong) / strong.seconds).dropna()
        waiting = f"{span(shares, '.0%')}" if len(shares) else "an unknown share"
        lines.append(
            f"PredNet ({size}), {setting_words(setting)}, with a divided batch of"
            f" {span(strong.batch)}: {speeds[0]}; with whole batches: {speeds[1]}. Waiting and"
            f" communication take {waiting} of a divided update."
        )
    return lines
