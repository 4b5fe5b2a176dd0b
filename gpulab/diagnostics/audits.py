"""The audit: one training step under two settings, compared operation by operation, and explained."""

from __future__ import annotations

import html
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gpulab.diagnostics.arguments import are_numbers, differing
from gpulab.diagnostics.traces import Operation, Trace, aligned, record
from gpulab.errors import DataError, UsageError
from gpulab.report import Report
from gpulab.settings import Setting

if TYPE_CHECKING:
    import pandas as pd


# Worst first.
KINDS = ("mismatch", "overwritten", "nondeterminism", "different random numbers", "reduced precision", "rounding")
FAULTS = KINDS[:2]  # what no correct device explains
UNEXPLAINED = 2.0**-12  # half of float32's digits: no chain of roundings in one operation loses as many
SAME_VALUE = 2.0**-20
TF32_SIZE = 2.0**-14, 2.0**-8  # the error of a kernel that multiplies in TF32 lies between
INHERITED = 16.0  # how much a few operations may make of the difference that they begin with
ROUNDOFF = 2.0**-24
SHORT_SIZE = 2.0**-6  # of data and weights that were rounded to bfloat16, or shorter
SAME_STEP = 1e-6  # of float64 on two CPUs, after a whole step
SHORT = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
# Kernels of different devices that compute the same thing.
TWINS = {
    "cudnn_batch_norm": "native_batch_norm",
    "miopen_batch_norm": "native_batch_norm",
    "cudnn_batch_norm_backward": "native_batch_norm_backward",
    "miopen_batch_norm_backward": "native_batch_norm_backward",
    "_unsafe_view": "view",
    "_scaled_dot_product_flash_attention_for_cpu": "attention",
    "_scaled_dot_product_efficient_attention": "attention",
    "_scaled_dot_product_flash_attention": "attention",
    "_scaled_dot_product_cudnn_attention": "attention",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "attention_backward",
    "_scaled_dot_product_efficient_attention_backward": "attention_backward",
    "_scaled_dot_product_flash_attention_backward": "attention_backward",
    "_scaled_dot_product_cudnn_attention_backward": "attention_backward",
}
ADVICE = {
    "mismatch": "look for a bug here: compare this operation's arguments and kernel under both settings",
    "nondeterminism": (
        "if runs must repeat, use deterministic=on (torch.use_deterministic_algorithms); else compare settings "
        "only by verdicts over many seeds"
    ),
    "different random numbers": (
        "draw on the CPU with a seeded torch.Generator and move the result; generators of CPUs and GPUs differ"
    ),
    "rounding": "nothing",
}
ANOTHER_FUNCTION = "see what {module} does under {setting}: it computes another function there"
OTHER_ARGUMENTS = "see why {module} calls it with other arguments under {setting}: it computes another function there"


@dataclass(frozen=True)
class Finding:
    """What was found about one operation, under `setting`: its `kind` (of `KINDS`) and what to do.

    `module` is the path of the module, `line` the user's line, `ratio` the operation's own error in
    units of what rounding explains (NaN where it has no twin in float64), `detail` what was seen; `op`
    is the operation in its trace.
    """

    kind: str
    setting: str
    operation: str
    phase: str
    module: str
    line: str
    ratio: float
    detail: str
    advice: str
    op: Operation | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        where = f" in {self.module}" if self.module else ""
        at = f"\n      at {self.line}" if self.line else ""
        return (
            f"{self.kind}: {self.operation} ({self.phase}){where}, under {self.setting}{at}"
            f"\n      {self.detail}\n      do: {self.advice}"
        )


@dataclass(frozen=True)
class Pair:
    """An operation under both settings, or under one alone, and the same one in float64."""

    a: Operation | None
    b: Operation | None
    exact: Operation | None

    @property
    def one(self) -> Operation:
        """Either of the two, for what they have in common."""
        found = self.a or self.b
        assert found is not None
        return found


class Audit(Report):
    """What `audit` returns. `findings`, worst first; `table`, a row for each operation; `plot()`.

    `kind` is the worst kind found; `faulty` says whether something is wrong that no correct device
    explains: a mismatch, or overwritten memory.
    """

    def __init__(self, a: Trace, b: Trace) -> None:
        self.a, self.b = a, b
        self.pairs = list(_paired(a, b))
        self._drawn: set[int] = set()  # the operations that are known to draw other numbers
        self._told: set[int] = set()  # the operations blamed for what they make: it has many users
        self.first_nan = {id(trace): _first_nan(trace) for trace in (a, b)}
        self.findings = sorted((self._with_nan(finding) for finding in self._find()), key=self._severity)

    @property
    def kind(self) -> str:
        """The worst kind of finding; `rounding` when all is well."""
        return self.findings[0].kind

    @property
    def faulty(self) -> bool:
        """Whether there is a mismatch or overwritten memory."""
        return self.kind in FAULTS

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row for each operation, in the order in which they ran.

        `operation`, `phase`, `module`, `line`; `kind`; for both settings the operation's own error
        `error_a` against float64 from the same inputs, the bound that rounding explains `bound_a`, and
        `ratio_a`; the error that has come together since the beginning of the step, `so_far_a`; the
        `difference` between the two settings; all relative to the size of the exact result (NaN where
        that is next to nothing, as the gradient of a bias before a normalisation is); and whether both
        gave the `same_bits`.
        """
        import pandas as pd

        kinds = {id(finding.op): finding.kind for finding in reversed(self.findings)}
        ordinary = self._ordinary()
        rows = []
        for pair in self.pairs:
            op = pair.one
            row: dict[str, Any] = {"operation": op.name, "phase": op.phase, "module": op.module, "line": op.line}
            found = [kinds[id(one)] for one in (pair.a, pair.b) if id(one) in kinds]
            row["kind"] = min(found, key=KINDS.index, default="rounding")
            exact = pair.exact if pair.exact and self._size(pair.exact) > ordinary else None
            for side, trace, mine in (("a", self.a, pair.a), ("b", self.b, pair.b)):
                row[f"error_{side}"] = _number(mine.error if mine else None)
                row[f"bound_{side}"] = _number(mine.bound if mine else None)
                row[f"ratio_{side}"] = _number(mine.ratio if mine else None)
                row[f"so_far_{side}"] = _apart(trace, mine, self.a, exact)
            row["difference"] = _apart(self.b, pair.b, self.a, pair.a)
            row["same_bits"] = bool(pair.a and pair.b and pair.a.outputs == pair.b.outputs)
            rows.append(row)
        return pd.DataFrame(rows)

    def _size(self, op: Operation) -> float:
        return float(np.linalg.norm(self.a.sketches[op.outputs[0]]))

    def _ordinary(self) -> float:
        """The size from which on a result is more than what roundings leave of zero."""
        sizes = [self._size(pair.exact) for pair in self.pairs if pair.exact and not pair.exact.nans]
        return 2.0**-36 * float(np.median(sizes)) if sizes else 0.0

    def __str__(self) -> str:
        return f"{self._headline()}\n" + "\n".join(f"  {text}" for text in self._grouped())

    def __repr__(self) -> str:
        return str(self)

    def html(self) -> str:
        """The findings, and all operations."""
        shown = ["operation", "phase", "module", "kind", "ratio_a", "ratio_b", "so_far_a", "so_far_b", "difference"]
        rows = "".join(
            f"<tr><td><b>{html.escape(f.kind)}</b></td><td>{html.escape(f.operation)} ({f.phase})</td>"
            f"<td>{html.escape(f.module)}</td><td>{html.escape(f.setting)}</td>"
            f"<td style='text-align:left'>{html.escape(f.detail)}"
            f"<br><code>{html.escape(f.line)}</code><br><i>{html.escape(f.advice)}</i></td></tr>"
            for f in self.findings[:20]
        )
        more = f"<p>and {len(self.findings) - 20} more findings</p>" if len(self.findings) > 20 else ""
        every = self.table[shown].to_html(index=False, float_format=lambda v: f"{v:.2g}", na_rep="")
        return (
            f"<p>{html.escape(self._headline())}</p><table><thead><tr><th>finding</th><th>operation</th><th>module"
            f"</th><th>under</th><th style='text-align:left'>what was seen, where, and what to do</th></tr></thead>"
            f"<tbody>{rows}</tbody></table>{more}"
            f"<details><summary>all {len(self.pairs)} operations</summary>{every}</details>"
        )

    def save(self, file: str | Path, title: str = "") -> None:
        """Write the report to an HTML file of its own, the plot included."""
        super().save(file, title or f"Audit: {self.a.title} against {self.b.title}")

    def _headline(self) -> str:
        both = sum(pair.a is not None and pair.b is not None for pair in self.pairs)
        alone = len(self.pairs) - both
        checked = [op for pair in self.pairs for op in (pair.a, pair.b) if op is not None and op.ratio is not None]
        counts = Counter(finding.kind for finding in self.findings if finding.kind != "rounding")
        said = ", ".join(f"{counts[kind]} × {kind}" for kind in KINDS if counts[kind]) or "all is well: rounding alone"
        other = f" ({alone} more ran under one setting only)" if alone else ""
        return (
            f"{self.a.title} against {self.b.title}: {said}. {both} operations were matched{other}; "
            f"{len(checked)} were checked against float64.{self._nan_sentence()}"
        )

    def _nan_sentence(self) -> str:
        """Where numbers end, if they end under one setting only."""
        nans = [(trace, self.first_nan[id(trace)][0]) for trace in (self.a, self.b)]
        found = [(trace, born) for trace, born in nans if born is not None]
        if len(found) != 1:
            return ""
        ((trace, born),) = found
        where = f" in {born.module}" if born.module else ""
        return f" Under {trace.title} alone the step makes NaN, first in {born.name} ({born.phase}){where}."

    def _grouped(self, most: int = 12) -> list[str]:
        """The findings as text, those of one kind and operation together."""
        groups: dict[tuple[str, ...], list[Finding]] = {}
        for finding in self.findings:
            groups.setdefault((finding.kind, finding.setting, finding.operation, finding.advice), []).append(finding)
        texts = []
        for alike in groups.values():
            more = f"\n      and {len(alike) - 1} more such operations" if len(alike) > 1 else ""
            texts.append(f"{alike[0]}{more}")
        return texts[:most] + ([f"… and {len(texts) - most} more groups"] if len(texts) > most else []) + self._alone()

    def _alone(self, most: int = 6) -> list[str]:
        """What ran under one setting only, by module: another kernel, or another function."""
        counts: dict[tuple[str, str, str], Counter[str]] = {}
        for pair in self.pairs:
            if pair.a is None or pair.b is None:
                title = self.b.title if pair.a is None else self.a.title
                counts.setdefault((title, pair.one.phase, pair.one.module), Counter())[pair.one.name] += 1
        texts = [
            f"under {title} only, {phase}{f' in {module}' if module else ''}: "
            + ", ".join(name if count == 1 else f"{count} × {name}" for name, count in names.items())
            for (title, phase, module), names in counts.items()
        ]
        return texts[:most] + ([f"… and in {len(texts) - most} more places"] if len(texts) > most else [])

    # --- finding ---------------------------------------------------------------------------------------

    def _find(self) -> Iterator[Finding]:
        yield from _united(list(_overwritten(self.a)), list(_overwritten(self.b)))
        unsteady = any(op.repeats is False for trace in (self.a, self.b) for op in trace.operations)
        blamed = bool(self.a.overwritten or self.b.overwritten or unsteady)
        for pair in self.pairs:
            sides = [list(_own_findings(op, trace)) if op else [] for op, trace in ((pair.a, self.a), (pair.b, self.b))]
            own = _united(*sides)
            yield from own
            if not pair.a or not pair.b:
                continue
            called = self._other_arguments(pair.a, pair.b, other_data=blamed or bool(self._drawn))
            if called:
                yield called
            elif not own:
                yield from self._pair_findings(pair.a, pair.b, blamed)
        yield self._rounding()

    def _other_arguments(self, a: Operation, b: Operation, other_data: bool) -> Finding | None:
        """The finding that one was called with other arguments, and made something else of what it was given.

        Numbers may follow from the data or, with another data type, from its precision.
        """
        found = differing(a.name, a.arguments, b.name, b.arguments)
        if a.dtype != b.dtype or (other_data and not a.random):
            found = {name: values for name, values in found.items() if not are_numbers(*values)}
        if not found or self._in_doubt(b) or self._same_results(a, b):
            return None
        here, there = (", ".join(f"{name}={values[side]}" for name, values in found.items()) for side in (1, 0))
        where = f", at {a.line}" if a.line != b.line else ""
        detail = f"called with {here}; under {self.a.title} with {there}{where}"
        place = b.module or b.line or "the step"
        return _finding("mismatch", self.b, b, detail, OTHER_ARGUMENTS.format(module=place, setting=self.b.title))

    def _in_doubt(self, op: Operation) -> bool:
        """Whether its module called it more often under one setting: which call stands for which is a guess."""
        return self._often[0][_call(op)] != self._often[1][_call(op)]

    @cached_property
    def _often(self) -> tuple[Counter[tuple[str, str, str]], ...]:
        return _calls(self.a.operations), _calls(self.b.operations)

    def _same_results(self, a: Operation, b: Operation) -> bool:
        """Whether two made the same of the same, but for rounding; of other inputs, whether they compute nothing."""
        if a.random or b.random:
            return a.outputs == b.outputs
        gaps = [self._gap(x, y) for x, y in zip(a.inputs, b.inputs, strict=False)]
        given = max((math.inf if math.isnan(gap) else gap for gap in gaps), default=0.0)
        computes = a.bound is not None and b.bound is not None
        if given > UNEXPLAINED / 64:
            return not computes
        results = list(zip((*a.outputs, *a.changed), (*b.outputs, *b.changed), strict=False))
        if a.name != b.name:  # twins share what they compute, not what they keep for the backward pass
            results = results[:1]
        apart = max(math.inf if math.isnan(gap) else gap for gap in (self._gap(x, y) for x, y in results))
        rounded = (_of(a.bound) + _of(b.bound)) * max(1.0, given / ROUNDOFF) + _of(a.error) + _of(b.error)
        return apart <= (rounded if computes else max(SAME_VALUE, 4 * given))

    def _pair_findings(self, a: Operation, b: Operation, blamed: bool) -> Iterator[Finding]:
        """What shows only when the two are laid side by side."""
        if a.random or b.random:
            if a.outputs != b.outputs:
                self._drawn |= {id(a), id(b)}
                yield _drew_otherwise(b, self.b, self.a)
            return
        gaps = [self._gap(x, y) for x, y in zip(a.inputs, b.inputs, strict=False)]
        short = self._short or (a.dtype != b.dtype and (a.dtype in SHORT or b.dtype in SHORT))
        same, explained = (SHORT_SIZE, math.inf) if short else (SAME_VALUE, UNEXPLAINED)
        for x, y, gap in zip(a.inputs, b.inputs, gaps, strict=False):
            if gap <= same or math.isnan(gap):
                continue
            makers = self._makers[0].get(x), self._makers[1].get(y)
            if makers == (None, None):
                if blamed:
                    continue
                yield _finding(
                    "mismatch",
                    self.b,
                    b,
                    f"was given other data or weights than under {self.a.title}: {gap:.1e} apart",
                )
                return
            if any(maker.name == "_to_copy" for maker in makers if maker is not None):
                continue  # a cast, as autocast makes them; a finding of its own where it is to short numbers
            if self._in_doubt(b) or all(maker is not None and id(maker) in self._matched for maker in makers):
                continue
            found = self._stretch_finding(x, y, b, gap, math.inf if blamed else explained)
            if found:
                if id(found.op) not in self._told:
                    yield found
                self._told.add(id(found.op))
                return
        if a.ratio is None or b.ratio is None:
            yield from self._unchecked_findings(a, b, gaps)

    @cached_property
    def _makers(self) -> tuple[dict[str, Operation], dict[str, Operation]]:
        return _makers(self.a), _makers(self.b)

    @cached_property
    def _short(self) -> bool:
        """Whether one setting rounds data and weights to a short format."""
        return any(Setting.parse(trace.setting).precision in SHORT for trace in (self.a, self.b))

    @cached_property
    def _matched(self) -> dict[int, tuple[Operation, Operation]]:
        """For each operation that both settings ran, the two that stand for each other."""
        both = [(pair.a, pair.b) for pair in self.pairs if pair.a and pair.b]
        return {id(op): (a, b) for a, b in both for op in (a, b)}

    def _stretch_finding(self, x: str, y: str, user: Operation, gap: float, explained: float) -> Finding | None:
        """What is wrong with the operations of one setting alone that lead to two values that should be one."""
        (ops_a, begins_a), (ops_b, begins_b) = (
            self._stretch(value, makers) for value, makers in zip((x, y), self._makers, strict=True)
        )
        sides = (ops_b, self.b, self.a), (ops_a, self.a, self.b)
        random = [(op, trace, there) for ops, trace, there in sides for op in ops if op.random]
        if random:  # then nobody can tell what else they did
            known = any(id(op) in self._drawn for op, _, _ in random)
            self._drawn |= {id(op) for op, _, _ in random}
            return None if known else _drew_otherwise(*random[0])
        begins = [self._results_apart(op) for op in (*begins_a, *begins_b)]
        errors = [_of(op.error) for op in (*ops_a, *ops_b)]
        if gap <= INHERITED * max((*begins, *errors), default=0.0):
            return None
        for ops, trace, there in sides:
            unchecked = [op for op in ops if op.error is None and op.inputs]
            if unchecked and _tf32_explains(gap, trace):
                kernel = max(unchecked, key=lambda op: len(op.inputs))
                detail = f"what it makes is {gap:.1e} (relative) from what there is under {there.title}, as by TF32"
                return _finding("reduced precision", trace, kernel, detail, _precision_advice(kernel, trace))
        if gap <= explained:
            return None
        return self._another_function(self._makers[0].get(x), self._makers[1].get(y), user, gap)

    def _stretch(self, value: str, makers: dict[str, Operation]) -> tuple[list[Operation], list[Operation]]:
        """The operations of one setting alone that lead to a value, the nearest first, and those before them."""
        alone: dict[int, Operation] = {}
        before: dict[int, Operation] = {}
        front = [value]
        while front:
            made_by = {id(op): op for name in front if (op := makers.get(name)) is not None}
            before |= {key: op for key, op in made_by.items() if key in self._matched}
            new = {key: op for key, op in made_by.items() if key not in self._matched and key not in alone}
            alone |= new
            front = [name for op in new.values() for name in op.inputs]
        return list(alone.values()), list(before.values())

    def _results_apart(self, op: Operation) -> float:
        """How far the results of an operation that both settings ran are apart."""
        a, b = self._matched[id(op)]
        return max(_number_or_nothing(self._gap(x, y)) for x, y in zip(a.outputs, b.outputs, strict=False))

    def _another_function(
        self, maker_a: Operation | None, maker_b: Operation | None, b: Operation, gap: float
    ) -> Finding:
        """Two values that should be one come from different operations: blame the one that made it, not its user."""
        blamed, trace = (maker_b, self.b) if maker_b is not None else (maker_a, self.a)
        if blamed is None or maker_a is maker_b:
            blamed, trace = b, self.b
        other, there = (maker_a, self.a) if trace is self.b else (maker_b, self.b)
        detail = (
            f"what it makes is {gap:.1e} (relative) from what {_origin(other)} makes in its place under {there.title}, "
            f"though each computes rightly what it is asked to; first used by {b.name}"
            f"{f' in {b.module}' if b.module else ''}"
        )
        place = blamed.module or blamed.line or "this line"
        return _finding("mismatch", trace, blamed, detail, ANOTHER_FUNCTION.format(module=place, setting=trace.title))

    def _unchecked_findings(self, a: Operation, b: Operation, gaps: list[float]) -> Iterator[Finding]:
        """For kernels without a twin in float64: do they make the same of nearly the same?"""
        known = [gap for gap in gaps if not math.isnan(gap)]
        results = list(zip(a.outputs, b.outputs, strict=False))
        if a.name != b.name:  # twins share what they compute, not what they keep for the backward pass
            results = results[:1]
        apart = max((self._gap(x, y) for x, y in results), key=_number_or_nothing)
        if not known or max(known) > UNEXPLAINED / 64:
            return
        detail = f"from the same inputs, its results are {apart:.1e} apart"
        for op, trace in ((a, self.a), (b, self.b)):
            if _tf32_explains(apart, trace):
                advice = _precision_advice(op, trace)
                yield _finding("reduced precision", trace, op, f"{detail}, as TF32 makes them", advice)
                return
        if apart > UNEXPLAINED:
            yield _finding("mismatch", self.b, b, detail)

    def _gap(self, value_a: str, value_b: str) -> float:
        return 0.0 if value_a == value_b else distance(self.b.sketches[value_b], self.a.sketches[value_a])

    def _with_nan(self, finding: Finding) -> Finding:
        """A finding that says so where the step's first NaN goes back to it."""
        for trace in (self.a, self.b):
            born, cause = self.first_nan[id(trace)]
            if born is not None and cause is not None and finding.op is cause and cause is not born:
                becomes = f"; what follows from it becomes NaN in {born.name} ({born.phase}), at {born.line}"
                return replace(finding, detail=finding.detail + becomes)
        return finding

    def _severity(self, finding: Finding) -> tuple[int, bool, float]:
        """Worst first; among those of one kind, what made the step's first NaN."""
        causes = [cause for _, cause in self.first_nan.values() if cause is not None]
        no_cause = not any(finding.op is cause for cause in causes)
        unexplained = finding.ratio if finding.ratio > 1 else 0.0
        return KINDS.index(finding.kind), no_cause, -unexplained

    def _rounding(self) -> Finding:
        """The operation that rounding alone moved most: a measure of how well all is."""
        traced = [(op, trace) for trace in (self.a, self.b) for op in trace.operations if op.ratio is not None]
        fine = [(op, trace) for op, trace in traced if (op.ratio or 0.0) <= 1 and op.format is None]
        if not fine:
            return Finding("rounding", "", "", "", "", "", math.nan, "no operation has a twin in float64", "")
        op, trace = max(fine, key=lambda pair: pair[0].ratio or 0.0)
        detail = f"{len(fine)} operations within what rounding explains; this one comes nearest, {op.ratio:.2f} of it"
        return _finding("rounding", trace, op, detail)


def audit(
    step: Callable[..., Any] | Trace | str | Path,
    a: str | Setting | Trace | Path,
    b: str | Setting | None = None,
    *,
    progress: bool = True,
) -> Audit:
    """Do one training step under two settings and in float64, and explain where they part.

    `audit(step, "cpu", "cuda")` does the step here, as `gpulab.record` does; `audit(trace_a, trace_b)`
    compares two traces, or files of traces, from different machines.

    Each operation's result is compared with the same operation in float64 from the same inputs, and its
    error with what rounding explains. The findings: `rounding`, all is well; `reduced precision`, a
    product was computed in TF32, bfloat16 or float16; `nondeterminism`, the step does not repeat itself;
    `different random numbers`, drawn on the device; `overwritten`, memory that the backward pass needed
    had changed; `mismatch`, nothing known explains it, or the step calls an operation with other arguments:
    a bug.

    Raises `UsageError` for arguments that are neither, `DataError` for traces of different steps.

    >>> import torch
    >>> from gpulab.diagnostics.traces import Step
    >>> audit(Step(torch.nn.Linear(4, 2), torch.ones(3, 4)), "cpu", "cpu:threads=1", progress=False).kind
    'rounding'
    """
    if isinstance(step, Trace | str | Path):
        if b is not None or not isinstance(a, Trace | str | Path):
            raise UsageError("audit of traces: expected two, as audit(trace_a, trace_b)")
        traces = [x if isinstance(x, Trace) else Trace.load(x) for x in (step, a)]
        _check_same_step(*traces)
        return Audit(*traces)
    if not isinstance(a, str | Setting) or not isinstance(b, str | Setting):
        raise UsageError('audit of a step: expected two settings, as audit(step, "cpu", "cuda")')
    for setting in (a, b):
        Setting.parse(setting).check()
    first = record(step, a, progress=progress)
    return Audit(first, record(step, b, reference=first, progress=progress))


def distance(x: np.ndarray, reference: np.ndarray) -> float:
    """The distance of two sketched values relative to the second; NaN where they have other sizes."""
    if x.shape != reference.shape:
        return math.nan
    with np.errstate(over="ignore"):  # numbers near the largest have no norm
        size = float(np.linalg.norm(reference))
        apart = float(np.linalg.norm(x - reference))
    return apart / size if size else (math.inf if apart else 0.0)


def _own_findings(op: Operation, trace: Trace) -> Iterator[Finding]:
    """What an operation shows by itself."""
    if op.repeats is False:
        yield _finding("nondeterminism", trace, op, "gave other bits when the step was done again")
    if op.format or (op.dtype in SHORT and op.inputs and op.error is not None):
        yield _finding("reduced precision", trace, op, _precision_detail(op), _precision_advice(op, trace))
    elif op.ratio is not None and not op.ratio <= 1:
        times = "rounding explains none" if math.isinf(op.ratio) else f"{op.ratio:.3g} times what rounding explains"
        yield _finding("mismatch", trace, op, f"its error against float64 is {op.error:.1e}, {times}")


def _drew_otherwise(op: Operation, trace: Trace, other: Trace) -> Finding:
    return _finding("different random numbers", trace, op, f"drew other numbers than under {other.title}")


def _tf32_explains(apart: float, trace: Trace) -> bool:
    """Whether two results are as far apart as TF32 makes them, and a GPU may use it."""
    allowed = trace.arithmetic.get("matmul_fp32"), trace.arithmetic.get("convolution_fp32")
    least, most = TF32_SIZE
    return Setting.parse(trace.setting).kind == "cuda" and "tf32" in allowed and least < apart < most


def _origin(maker: Operation | None) -> str:
    """Where a value comes from, in words."""
    if maker is None:
        return "data or weights"
    return f"{maker.name} ({maker.phase}){f' in {maker.module}' if maker.module else ''}"


def _united(first: list[Finding], second: list[Finding]) -> list[Finding]:
    """What both settings show, once."""

    def same(finding: Finding) -> tuple[str, str, str]:
        return finding.kind, finding.operation, finding.line

    others = {same(finding): finding for finding in second}
    both = [replace(f, setting=f"{f.setting} and {others[same(f)].setting}") for f in first if same(f) in others]
    known = {same(finding) for finding in both}
    return both + [finding for finding in (*first, *second) if same(finding) not in known]


def _precision_detail(op: Operation) -> str:
    if op.format is None:
        return f"computed in {op.dtype}"
    when = "were rounded to {} before" if op.rounded_before else "are rounded to {} by the kernel"
    size = f"; error {op.error:.1e}" if op.error is not None and not op.rounded_before else ""
    return f"its factors {when.format(op.format)}{size}"


def _precision_advice(op: Operation, trace: Trace) -> str:
    setting = Setting.parse(trace.setting)
    kind = setting.kind
    if op.dtype in SHORT:
        return f"look for autocast, .to(torch.{op.dtype}) or precision={op.dtype} if float32 was meant"
    if op.rounded_before:
        return f"look for what rounds to {op.format} before this line: an emulation, or a cast there and back"
    if setting.emulated:
        return f"{trace.setting} asks for it; gpulab.float32_products() around this line keeps it in float32"
    if kind == "cuda":
        backend = "cudnn" if op.name.startswith(("convolution", "_cudnn")) else "cuda.matmul"
        return f"tf32=off, or torch.backends.{backend}.allow_tf32 = False, computes it in float32"
    part = "conv" if op.name.startswith("convolution") else "matmul"
    return f'torch.backends.mkldnn.{part}.fp32_precision = "ieee" computes it in float32'


def _overwritten(trace: Trace) -> Iterator[Finding]:
    for found in trace.overwritten:
        yield Finding(
            "overwritten",
            trace.title,
            found["operation"],
            "backward",
            "",
            found["line"],
            math.nan,
            f"what it needed had been overwritten since it was saved: {found['why']}",
            found["remedy"],
        )


def _finding(kind: str, trace: Trace, op: Operation, detail: str, advice: str = "") -> Finding:
    ratio = math.nan if op.ratio is None else op.ratio
    advice = advice or ADVICE[kind]
    return Finding(kind, trace.title, op.name, op.phase, op.module, op.line, ratio, detail, advice, op)


def _paired(a: Trace, b: Trace) -> Iterator[Pair]:
    """Operations of the two that stand for each other, each with the one in float64."""
    exact: dict[int, Operation | None] = {}
    for trace in (a, b):
        # A few operations alike amid others, in a kernel that float64 lacks, are no counterparts.
        pairs = aligned(trace.operations, a.reference, TWINS, at_least=3)
        often, often_exact = _calls(trace.operations), _calls(a.reference)
        sure = [(op, twin) for op, twin in pairs if op and twin and often[_call(op)] == often_exact[_call(op)]]
        exact |= {id(op): twin for op, twin in sure if op.shape == twin.shape}
    often_a, often_b = _calls(a.operations), _calls(b.operations)
    for one, other in aligned(a.operations, b.operations, TWINS):
        found = exact.get(id(one)) or exact.get(id(other))
        if one and other and one.shape != other.shape and often_a[_call(one)] != often_b[_call(one)]:
            yield Pair(one, None, exact.get(id(one)))
            yield Pair(None, other, exact.get(id(other)))
        else:
            yield Pair(one, other, found)


def _call(op: Operation) -> tuple[str, str, str]:
    return op.phase, op.module, TWINS.get(op.name, op.name)


def _calls(operations: list[Operation]) -> Counter[tuple[str, str, str]]:
    """How often each module called each operation."""
    return Counter(map(_call, operations))


def _makers(trace: Trace) -> dict[str, Operation]:
    """Which operation first computed each value."""
    makers: dict[str, Operation] = {}
    for op in trace.operations:
        for value in (*op.outputs, *op.changed):
            if value not in op.inputs:
                makers.setdefault(value, op)
    return makers


def _first_nan(trace: Trace) -> tuple[Operation | None, Operation | None]:
    """The operation that made the step's first NaN, and the nearest one before it that had lost precision.

    The way back is along the values; a NaN in what was given to the step is nobody's.
    """
    makers = _makers(trace)
    bad = {value for op in trace.operations if op.nans for value in op.outputs}
    born = next((op for op in trace.operations if op.nans and op.inputs and not bad & set(op.inputs)), None)
    if born is None:
        return None, None
    seen, front = {id(born)}, [born]
    while front:
        cause = next((op for op in front if op.format or op.dtype in SHORT), None)
        if cause is not None:
            return born, cause
        before = [makers[value] for op in front for value in op.inputs if value in makers]
        front = list({id(op): op for op in before if id(op) not in seen}.values())
        seen |= {id(op) for op in front}
    return born, None


def _check_same_step(a: Trace, b: Trace) -> None:
    """Raise `DataError` for traces of steps that are not one and the same."""
    pairs = aligned(a.reference, b.reference)
    common = [(first, second) for first, second in pairs if first is not None and second is not None]
    if 2 * len(common) < max(len(a.reference), len(b.reference)):
        raise DataError(
            f"the traces are of different steps: {len(common)} operations in common, of {len(a.reference)} and "
            f"{len(b.reference)}"
        )
    if any(op.repeats is False for trace in (a, b) for op in trace.operations):
        return  # a step that does not repeat itself may well begin differently
    for first, second in common:
        if first.phase != "forward" or first.random:
            continue
        if first.shape != second.shape:
            raise DataError(
                f"the traces are of different data: {first.name} in {first.module or first.line or 'the step'} makes "
                f"{first.shape} in one and {second.shape} in the other"
            )
        where = first.module or first.line or "the step"
        for name, (here, there) in differing(first.name, first.arguments, second.name, second.arguments).items():
            if distance(b.sketches[second.outputs[0]], a.sketches[first.outputs[0]]) > SAME_STEP:
                raise DataError(
                    f"the traces are of different steps: even in float64, {first.name} in {where} is called with "
                    f"{name}={here} in one and {name}={there} in the other"
                )
        for x, y in zip(first.inputs, second.inputs, strict=False):
            gap = distance(b.sketches[y], a.sketches[x])
            if gap > SAME_STEP:
                raise DataError(
                    f"the traces are of different data or weights: {first.name} in {where} begins with values "
                    f"{gap:.1e} apart in float64; use the same seeds and files on both machines"
                )


def _apart(trace: Trace, op: Operation | None, other: Trace, exact: Operation | None) -> float:
    if op is None or exact is None:
        return math.nan
    return distance(trace.sketches[op.outputs[0]], other.sketches[exact.outputs[0]])


def _of(value: float | None) -> float:
    return value or 0.0


def _number_or_nothing(gap: float) -> float:
    return -1.0 if math.isnan(gap) else gap


def _number(value: float | None) -> float:
    return math.nan if value is None else value
