"""What two traces of one step say about each other, operation by operation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter
from typing import Any

from gpulab.audits.comparison import Comparison, differing, largest, or_infinite
from gpulab.audits.findings import (
    ADVICE,
    DETAILS,
    Finding,
    advice_on_precision,
    described,
    in_module,
    named,
    place_of,
)
from gpulab.audits.not_finite import NotFinite, find_not_finite, is_infinite
from gpulab.audits.rounding import FLUSHED, NOT_UNIQUE
from gpulab.audits.tolerances import (
    CARRIED,
    DECIDES,
    INHERITED,
    SAME_INPUTS,
    SAME_VALUE,
    SHORT,
    SHORT_SIZE,
    TF32_SIZE,
    UNEXPLAINED,
)
from gpulab.audits.tracer import RESULT, Operation
from gpulab.audits.traces import Trace
from gpulab.settings import Setting


class Judge:
    """Goes through the pairs of a comparison and says of each what is to be said; `findings` are in that order.

    `unexplained` is the pair of results that are furthest apart though no operation says why, if there are such.
    """

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison
        self.a, self.b = comparison.a, comparison.b
        self.parted: dict[int, bool] = {}  # pairs whose results part, by both of their operations: is it explained?
        self.wrong_alone: set[int] = set()  # the operations with a finding of their own
        self.drew_otherwise: set[int] = set()  # the operations that are known to draw other numbers
        self.blamed: set[int] = set()  # the operations blamed for what they make: it has many users
        self.unexplained: tuple[Operation, Operation] | None = None
        origins = [(number, find_not_finite(trace)) for number, trace in enumerate((self.a, self.b))]
        self.not_finite = {number: origin for number, origin in origins if origin}
        self.findings = list(self._all())

    def _finding(self, kind: str, op: Operation, detail: str, advice: str = "", **fields: Any) -> Finding:
        ratio = math.nan if op.ratio is None else op.ratio
        born = self.comparison.nan_causes.get(id(op))
        if born is not None and born is not op:
            detail += DETAILS["becomes NaN"].format(name=born.name, phase=born.phase, line=born.line)
        title = self.comparison.trace_of[id(op)].title
        location = (op.name, op.phase, op.module, op.line)
        return Finding(kind, title, *location, ratio, detail, advice or ADVICE[kind], op=op, **fields)

    def _between(self, kind: str, op: Operation, gap: float, about: str, advice: str = "", **words: Any) -> Finding:
        """A finding that shows side by side: what is said `about` it, of an operation that is so far from its twin."""
        other_title = self.comparison.other_trace(op).title
        detail = DETAILS[about].format(gap=gap, there=other_title, **words)
        advice_text = ADVICE[advice or kind].format(place=place_of(op), setting=self.comparison.trace_of[id(op)].title)
        return self._finding(kind, op, detail, advice_text, size=gap, side_by_side=True)

    def _all(self) -> Iterator[Finding]:
        yield from _united(*(list(_overwritten(trace)) for trace in (self.a, self.b)))
        if len(self.not_finite) == 2:
            yield from _united(*([self._not_finite(origin)] for origin in self.not_finite.values()))
        for pair in self.comparison.pairs:
            both_flush = bool(pair.a and pair.b and pair.a.format == pair.b.format == FLUSHED)
            of_one = []
            if not both_flush:
                of_one = _united(*(list(self._by_itself(op)) if op else [] for op in (pair.a, pair.b)))
            yield from of_one
            self.wrong_alone |= {id(op) for op in (pair.a, pair.b) if op and of_one}
            if pair.a and pair.b:
                other_arguments = self._other_arguments(pair.a, pair.b)
                of_both = [other_arguments] if other_arguments else []
                if not of_both and all(finding.kind == "reduced precision" for finding in of_one):
                    of_both = list(self._side_by_side(pair.a, pair.b, rightly=not of_one))
                yield from of_both
                if self._differ(pair.a, pair.b):
                    explained = bool(of_one or of_both) or self.comparison.values_may_differ
                    explained = explained or self._inherits(pair.a, pair.b)
                    self.parted |= dict.fromkeys((id(pair.a), id(pair.b)), explained)
            elif pair.one.phase == RESULT:
                yield self._missing(pair.one)
        yield from self._cause_not_found()
        yield self._rounding()

    # --- NaN and infinity under both settings -----------------------------------------------------------------

    def _not_finite(self, origin: NotFinite) -> Finding:
        """The finding that a result of one setting is NaN or infinite, as that of the other is."""
        first, *others = origin.results
        more = f" and {len(others)} more results" if others else ""
        words = {"what": origin.what, "reaches": f"it reaches {described(first)}{more}", "of": "", "exact": ""}
        exact = find_not_finite(replace(self.a, operations=self.a.reference))
        if exact is not None:
            words["exact"] = "; so it is in float64"
        elif first.name not in ("gradient", "updated"):  # of large gradients in float64 nobody knows
            words["exact"] = "; in float64, the loss is finite"
        if origin.infinity is not None:
            words["of"] = DETAILS["of infinity"].format(maker=named(origin.infinity))
        detail = DETAILS["makes it" if origin.made else "is given it"].format(**words)
        return self._finding("not finite", origin.op, detail)

    # --- one operation by itself ---------------------------------------------------------------------------

    def _by_itself(self, op: Operation) -> Iterator[Finding]:
        """What an operation shows without the other setting."""
        if op.anew:
            yield self._finding("nondeterminism", op, DETAILS["anew"], ADVICE["anew"], side_by_side=True)
        elif op.repeats is False:
            detail = DETAILS["restless" if op.spread is None else "spread"].format(spread=op.spread)
            size = math.nan if op.spread is None else op.spread
            yield self._finding("nondeterminism", op, detail, size=size)
        if op.format or (op.dtype in SHORT and op.inputs and op.error is not None):
            yield self._reduced_precision(op)
        elif op.ratio is not None and not op.ratio <= 1:
            error = op.error if op.error is not None else math.nan
            times = "rounding explains none" if math.isinf(op.ratio) else f"{op.ratio:.3g} times what rounding explains"
            size = error if math.isfinite(error) else math.nan
            yield self._finding("mismatch", op, DETAILS["wrong"].format(error=error, times=times), size=size)

    def _reduced_precision(self, op: Operation) -> Finding:
        about = "short type"
        if op.format == FLUSHED:
            about = "flushed"
        elif op.format:
            about = "rounded before" if op.rounded_before or op.error is None else "rounded by kernel"
        detail = DETAILS[about].format(dtype=op.dtype, format=op.format, error=op.error)
        size = op.error if op.error is not None and math.isfinite(op.error) else math.nan
        return self._finding(
            "reduced precision", op, detail, advice_on_precision(op, self.comparison.trace_of[id(op)]), size=size
        )

    def _rounding(self) -> Finding:
        """The operation that rounding alone moved most: a measure of how well all is."""
        fine = [
            (op.ratio, op)
            for trace in (self.a, self.b)
            for op in trace.operations
            if op.ratio is not None and op.ratio <= 1 and op.format is None
        ]
        if not fine:
            return Finding("rounding", "", "", "", "", "", math.nan, DETAILS["no twin"], "")
        ratio, op = max(fine, key=lambda entry: entry[0])
        return self._finding("rounding", op, DETAILS["rounding"].format(count=len(fine), ratio=ratio))

    # --- one operation under both settings -----------------------------------------------------------------

    def _other_arguments(self, a: Operation, b: Operation) -> Finding | None:
        """The finding that one was called with other arguments, and made something else of its inputs.

        Numbers may follow from the data or, with another data type, from its precision.
        """
        comparison = self.comparison
        values = differing(a, b)
        if a.dtype != b.dtype or ((comparison.values_may_differ or self.drew_otherwise) and not a.random):
            values = {
                name: value_pair
                for name, value_pair in values.items()
                if not all(isinstance(v, float) for v in value_pair)
            }
        if not values or comparison.same_results(a, b):
            return None
        listed_b, listed_a = (
            ", ".join(f"{name}={value_pair[side]!r}" for name, value_pair in values.items()) for side in (1, 0)
        )
        line = f", at {a.line}" if a.line != b.line else ""
        gap = largest([0.0, *comparison.result_gaps(a, b)])
        words = {"arguments": listed_b, "others": listed_a, "line": line}
        return self._between("mismatch", b, gap, "other arguments", "other arguments", **words)

    def _side_by_side(self, a: Operation, b: Operation, rightly: bool) -> Iterator[Finding]:
        """What shows only when two are laid side by side; if both compute `rightly`, they should make the same."""
        comparison = self.comparison
        if a.random or b.random:
            if not comparison.same_bits(a, b):
                yield self._other_draw(b, largest(comparison.result_gaps(a, b)))
                self.drew_otherwise |= {id(a), id(b)}
            return
        gaps = comparison.gaps(a.inputs, b.inputs)
        same, explained = (SHORT_SIZE, math.inf) if comparison.is_short(a, b) else (SAME_VALUE, UNEXPLAINED)
        for x, y, gap in zip(a.inputs, b.inputs, map(or_infinite, gaps), strict=False):
            if gap <= same or comparison.common(x, y, a):
                continue
            makers = [maker for maker in (comparison.maker(0, x), comparison.maker(1, y)) if maker is not None]
            by_both = all(id(maker) in comparison.partners for maker in makers)
            if a.name != b.name:
                continue  # kernels of other names take what they are given in another order
            if len(makers) < 2 and by_both:
                if comparison.values_may_differ:
                    continue
                yield self._between("mismatch", b, gap, "other data")
                return
            if comparison.in_doubt(b):
                continue
            if by_both and not comparison.values_may_differ:
                if not self._cause_is_known(x, y, a):
                    words = {"maker": described(makers[1]), "other_maker": described(makers[0])}
                    yield self._between("mismatch", b, gap, "other wiring", "other wiring", **words)
                return
            finding = self._other_function(x, y, b, gap, explained)
            if finding:
                if id(finding.op) not in self.blamed:
                    yield finding
                self.blamed.add(id(finding.op))
                return
        if not rightly:
            return
        if a.ratio is None or b.ratio is None:
            yield from self._without_a_twin(a, b, gaps)
        elif a.name in NOT_UNIQUE & DECIDES:
            if not any(gaps):  # else roundings before it may decide
                yield from self._another_kernel(a, b)
        elif a.name not in DECIDES and max(map(or_infinite, gaps), default=0.0) <= SAME_INPUTS:
            yield from self._another_kernel(a, b)

    def _other_draw(self, op: Operation, gap: float) -> Finding:
        """The finding that an operation drew other numbers."""
        return self._between("different random numbers", op, gap, "other draw")

    def _another_kernel(self, a: Operation, b: Operation) -> Iterator[Finding]:
        """For kernels that agree with their twins in float64, and not with each other: they are two functions."""
        for number, gap in enumerate(self.comparison.result_gaps(a, b)):
            tolerance = self.comparison.tolerance(a, b, number)
            if a.name in NOT_UNIQUE and gap > UNEXPLAINED:
                yield self._between("another valid answer", b, gap, "not unique")
                return
            if gap > CARRIED * tolerance:
                yield self._between("mismatch", b, gap, "other kernel", "other kernel", tolerance=tolerance)
                return

    def _without_a_twin(self, a: Operation, b: Operation, of_inputs: list[float]) -> Iterator[Finding]:
        """For kernels without a twin in float64: do they make the same of nearly the same?"""
        finite = [gap for gap in of_inputs if not math.isnan(gap)]
        if not finite or max(finite) > SAME_INPUTS:
            return
        infinite = any(is_infinite(trace.sketches[v]) for trace, op in ((self.a, a), (self.b, b)) for v in op.inputs)
        if (a.name in DECIDES or infinite) and any(finite):
            return  # as a cast to whole numbers, where roundings before it decide
        gap = largest(self.comparison.result_gaps(a, b))
        for op in (a, b):
            if self._tf32_explains(gap, op):
                yield self._as_by_tf32(op, gap, "results as by TF32")
                return
        if gap > UNEXPLAINED:
            yield self._between("mismatch", b, gap, "other results")

    def _as_by_tf32(self, op: Operation, gap: float, about: str) -> Finding:
        advice = advice_on_precision(op, self.comparison.trace_of[id(op)])
        return replace(self._between("reduced precision", op, gap, about, "rounding"), advice=advice)

    def _tf32_explains(self, apart: float, op: Operation) -> bool:
        """Whether two results are as far apart as TF32 makes them, and a GPU may use it."""
        trace = self.comparison.trace_of[id(op)]
        allowed = trace.arithmetic.get("matmul_fp32"), trace.arithmetic.get("convolution_fp32")
        least, most = TF32_SIZE
        return Setting.parse(trace.setting).kind == "cuda" and "tf32" in allowed and least < apart < most

    # --- operations of one setting alone -------------------------------------------------------------------

    def _missing(self, result: Operation) -> Finding:
        """The finding that a result is there under one setting alone."""
        other_title = self.comparison.other_trace(result).title
        advice = ADVICE["missing"].format(setting=other_title)
        return self._finding("mismatch", result, DETAILS["missing"].format(there=other_title), advice, bounded=False)

    def _other_function(self, x: str, y: str, user: Operation, gap: float, explained: float) -> Finding | None:
        """What is wrong with the operations of one setting alone that lead to two values that should be one."""
        comparison = self.comparison
        stretch = comparison.stretch(x, y)
        alone = [*stretch.alone_b, *stretch.alone_a]
        random = [op for op in alone if op.random]
        if random:  # then nobody can tell what else they did
            reported = any(id(op) in self.drew_otherwise for op in random)
            finding = None if reported else self._other_draw(random[0], gap)
            self.drew_otherwise |= set(map(id, random))
            return finding
        begins = [apart for _, _, apart in stretch.before]
        if gap <= INHERITED * largest([0.0, *begins, *(op.error or 0.0 for op in alone)]):
            return None
        for of_one in (stretch.alone_b, stretch.alone_a):
            kernel = max((op for op in of_one if op.error is None), key=lambda op: len(op.inputs), default=None)
            if kernel and kernel.inputs and self._tf32_explains(gap, kernel):
                return self._as_by_tf32(kernel, gap, "as by TF32")
        if gap <= explained or comparison.values_may_differ:
            return None
        # Two values that should be one come from different operations: blame the one that made it, not its user.
        maker_a, maker_b = comparison.maker(0, x), comparison.maker(1, y)
        blamed, other_maker = (maker_b, maker_a) if maker_b else (maker_a, maker_b)
        assert blamed is not None
        words = {
            "other_maker": named(other_maker) if other_maker else "data or weights",
            "user": user.name + in_module(user.module),
        }
        finding = self._between("mismatch", blamed, gap, "other function", "other function", **words)
        return replace(finding, instead=(x, y))

    # --- whether it is known why values part ---------------------------------------------------------------

    def _differ(self, a: Operation, b: Operation) -> bool:
        """Whether what a pair made is further apart than the roundings of the step lead."""
        comparison = self.comparison
        if a.nans != b.nans:
            return True
        gaps = comparison.result_gaps(a, b)
        return any(gap > comparison.tolerance(a, b, number) for number, gap in enumerate(gaps))

    def _inherits(self, a: Operation, b: Operation) -> bool:
        """Whether it is known why results part: a decision that rounding tips, or what came before and is known."""
        causes_known = [self._cause_is_known(x, y, a) for x, y in zip(a.inputs, b.inputs, strict=False)]
        parted = [why for why in causes_known if why is not None]
        return all(parted) if parted else a.name in DECIDES | NOT_UNIQUE

    def _cause_is_known(self, x: str, y: str, user: Operation) -> bool | None:
        """Whether it is known why two values part; None for values that do not."""
        comparison = self.comparison
        if x == y:
            return None
        common = comparison.common(x, y, user)
        if common:
            return self.parted.get(id(common[0]))
        if comparison.gap(x, y) <= SAME_VALUE:
            return None
        stretch = comparison.stretch(x, y)
        with_finding = self.wrong_alone | self.blamed
        alone = (*stretch.alone_a, *stretch.alone_b)
        if any(id(op) in with_finding or op.random or op.name == "_to_copy" for op in alone):
            return True
        if any(id(maker) in self.blamed for maker in (comparison.maker(0, x), comparison.maker(1, y))):
            return True
        why = [self.parted[id(op)] for op, _, _ in stretch.before if id(op) in self.parted]
        return bool(why) and all(why)

    def _cause_not_found(self) -> Iterator[Finding]:
        """The finding that the step's results part though nothing above says why; and between which operations."""
        comparison = self.comparison
        unknown = [pair for pair in comparison.matched if self.parted.get(id(pair[0])) is False]
        results = [pair for pair in unknown if pair[0].phase == RESULT]
        gaps = [max(map(or_infinite, comparison.gaps(a.outputs, b.outputs))) for a, b in results]
        if not gaps:
            return
        self.unexplained = a, b = results[gaps.index(max(gaps))]
        begins = comparison.matched.index(unknown[0])
        words: dict[str, Any] = {
            "result": described(b),
            "more": f" (and {len(gaps) - 1} more results)" if len(gaps) > 1 else "",
            "tolerance": comparison.tolerance(a, b, 0),
            "begin": " and ".join(described(op) for _, op in comparison.matched[max(0, begins - 1) : begins + 1]),
        }
        yield self._between("cause not found", unknown[0][1], max(gaps), "no cause", **words)


def _united(first: list[Finding], second: list[Finding]) -> list[Finding]:
    """What both settings show, once."""
    key = attrgetter("kind", "operation", "line")
    second_by_key = {key(finding): finding for finding in second}
    merged = [
        replace(
            f,
            setting=f"{f.setting} and {second_by_key[key(f)].setting}",
            size=math.hypot(f.size, second_by_key[key(f)].size),
        )
        for f in first
        if key(f) in second_by_key
    ]
    shared = {key(finding) for finding in merged}
    return merged + [finding for finding in (*first, *second) if key(finding) not in shared]


def _overwritten(trace: Trace) -> Iterator[Finding]:
    for entry in trace.overwritten:
        detail = DETAILS["overwritten"].format(why=entry["why"])
        location = (entry["operation"], "backward", "", entry["line"])
        yield Finding("overwritten", trace.title, *location, math.nan, detail, entry["remedy"], bounded=False)
