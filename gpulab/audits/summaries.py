"""An audit in words and tables: its first line, what was found in which line, and a row for each operation."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from gpulab.audits.comparison import Comparison
from gpulab.audits.findings import KINDS, Finding, described, in_module, named
from gpulab.audits.operations import RESULT

MOST_LINES = 12  # of findings that are shown


def headline(comparison: Comparison, findings: Sequence[Finding]) -> str:
    """The two settings, what was found between them, what was looked at, and what was not."""
    a, b = comparison.a, comparison.b
    sentences = [f"{a.title} against {b.title}: {_kinds(comparison, findings)}.", *_extent(comparison)]
    if len(comparison.not_finite) == 1:
        ((side, origin),) = comparison.not_finite.items()
        where = f"{described(origin.results[0])}, first in {named(origin.op)}"
        sentences.append(f"Under {(a, b)[side].title} alone {origin.what} reaches {where}.")
    return " ".join(sentences)


def _kinds(comparison: Comparison, findings: Sequence[Finding]) -> str:
    """How often each kind was found. What both settings share is no difference between them, and said last."""
    shared = [f.kind for f in findings if f.under_both and f.kind == "reduced precision"]
    counts = Counter(f.kind for f in findings if f.kind != "rounding")
    counts.subtract(shared)
    kinds = ", ".join(f"{counts[kind]} × {kind}" for kind in KINDS if counts[kind])
    if not kinds:
        identical = all(pair.a and pair.b and comparison.same_bits(pair.a, pair.b) for pair in comparison.pairs)
        kinds = "identical to the last bit" if identical else "all is well: rounding alone"
    return f"{kinds}; under both {len(shared)} × reduced precision" if shared else kinds


def _extent(comparison: Comparison) -> list[str]:
    """What was compared and checked, of which loss, and what the step leaves that could not be."""
    results = comparison.results
    alone = len(comparison.pairs) - len(comparison.matched)
    unpaired = f" ({alone} more ran under one setting only)" if alone else ""
    checked = sum(op.ratio is not None for pair in comparison.pairs for op in pair.operations)
    sentences = [
        f"{len(comparison.matched) - len(results)} operations and {len(results)} results were matched{unpaired}; "
        f"{checked} were checked against float64."
    ]
    if "loss" in comparison.a.notes:
        sentences.append(f"The loss was {comparison.a.notes['loss']}.")
    if not results:
        sentences.append("The step returned nothing and left no gradient: what it is for could not be compared.")
    elif not any(pair.one.name in ("gradient", "updated") for pair in comparison.pairs if pair.one.phase == RESULT):
        sentences.append("It left no gradient and updated nothing: only what it returned was compared.")
    return sentences


def by_line(findings: Sequence[Finding]) -> list[str]:
    """The findings as text, those of one kind and line together."""
    lines: dict[tuple[str, ...], list[Finding]] = {}
    for f in findings:
        lines.setdefault((f.kind, f.setting, f.line or f.module or f.operation, f.advice), []).append(f)
    texts = []
    for first, *alike in lines.values():
        operations = Counter(f"{f.operation} ({f.phase}){in_module(f.module)}" for f in alike)
        counted = (name if count == 1 else f"{count} × {name}" for name, count in operations.most_common(3))
        listed = ", ".join(counted) + (", …" if len(operations) > 3 else "")
        texts.append(f"{first}\n      and so in this line: {listed}" if alike else str(first))
    more = [f"… and {len(texts) - MOST_LINES} more lines"] if len(texts) > MOST_LINES else []
    return texts[:MOST_LINES] + more


def operations_table(comparison: Comparison, findings: Sequence[Finding]) -> pd.DataFrame:
    """A row for each operation, in the order in which they ran, as `Audit.table` says."""
    kinds = {finding.op: finding.kind for finding in reversed(findings)}
    rows = []
    for pair in comparison.pairs:
        of_both = [kinds[one] for one in pair.operations if one in kinds]
        row: dict[str, Any] = {name: getattr(pair.one, name) for name in ("name", "phase", "module", "line")}
        row["kind"] = min(of_both, key=KINDS.index, default="rounding")
        for side, op in (("a", pair.a), ("b", pair.b)):
            row |= {f"{name}_{side}": np.float64(getattr(op, name, None)) for name in ("error", "bound", "ratio")}
        row["difference"] = comparison.gap((pair.a.outputs[0], pair.b.outputs[0])) if pair.a and pair.b else math.nan
        row["same_bits"] = bool(pair.a and pair.b and comparison.same_bits(pair.a, pair.b))
        rows.append(row)
    return pd.DataFrame(rows).rename(columns={"name": "operation"})
