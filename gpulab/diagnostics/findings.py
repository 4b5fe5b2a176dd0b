"""What two traces of one step say about each other: findings, each with its kind, its place and what to do."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import numpy as np

from gpulab.diagnostics.reference import NOT_UNIQUE
from gpulab.diagnostics.count_sketch import distance
from gpulab.diagnostics.trace_files import TENSOR
from gpulab.diagnostics.traces import ROUNDOFF, TWINS, Trace, aligned
from gpulab.diagnostics.tracer import RESULT, Operation
from gpulab.errors import DataError
from gpulab.settings import Setting

# Worst first.
KINDS = (
    "mismatch",
    "overwritten",
    "cause not found",
    "nondeterminism",
    "different random numbers",
    "another valid answer",
    "reduced precision",
    "rounding",
)
UNEXPLAINED = 2.0**-12  # half of float32's digits: no chain of roundings in one operation loses as many
SAME_INPUTS = UNEXPLAINED / 64
SAME_VALUE = 2.0**-20
TF32_SIZE = 2.0**-14, 2.0**-8  # the error of a kernel that multiplies in TF32 lies between
INHERITED = 16.0  # how much a few operations may make of the difference that they begin with
SHORT_SIZE = 2.0**-6  # of data and weights that were rounded to bfloat16, or shorter
SAME_STEP = 1e-6  # of float64 on two CPUs, after a whole step
OF_DATA = 2.0**-12  # arguments as near as this may have been computed from the data, and rounded otherwise
SAME_BITS = 2.0**-44  # of sketches that two devices made of the same bits
CARRIED = 4.0  # how many times the change that random roundings carried there two right values may be apart
# What decides: where two inputs lie next to an edge, two right results lie on either side of it. So does an optimizer
# that divides a gradient by its size: of a gradient of next to nothing there remains the sign.
_DECIDES = """
    adaptive_max_pool2d addcdiv amax amin aminmax argmax argmin bucketize ceil clamp clamp_max clamp_min cummax cummin
    elu_backward eq floor floor_divide fmod _foreach_addcdiv frac fractional_max_pool2d _fused_adam _fused_adamw ge gt
    hardswish hardswish_backward hardtanh hardtanh_backward huber_loss_backward isfinite kthvalue le leaky_relu_backward
    lt max max_pool2d_with_indices max_pool2d_with_indices_backward max_pool3d_with_indices maximum median min minimum
    mode msort multinomial ne _prelu_kernel_backward relu remainder round searchsorted sgn sign smooth_l1_loss_backward
    sort threshold_backward _to_copy topk trunc _unique2 unique_consecutive where
"""
DECIDES = frozenset(_DECIDES.split())
SHORT = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
# Arguments that say how to compute, where to put it or for whom, and not what.
HOW = {
    "allow_tf32",
    "benchmark",
    "compute_log_sumexp",
    "cudnn_enabled",
    "deterministic",
    "generator",
    "grad_input_mask",
    "half_to_float",
    "memory_format",
    "non_blocking",
    "output_mask",
    "pin_memory",
    "return_debug_mask",
}
SYNONYMS = {"epsilon": "eps", "exponential_average_factor": "momentum", "train": "training"}
ADVICE = {
    "mismatch": "look for a bug here: compare this operation's arguments and kernel under both settings",
    "nondeterminism": (
        "if runs must repeat, use deterministic=on (torch.use_deterministic_algorithms); else compare settings "
        "only by verdicts over many seeds"
    ),
    "different random numbers": (
        "draw on the CPU with a seeded torch.Generator and move the result; generators of CPUs and GPUs differ"
    ),
    "another valid answer": (
        "if the loss depends on signs, or on the basis of equal values, compute it from what does not, such as the "
        "product of a vector with itself; else nothing"
    ),
    "rounding": "nothing",
    "cause not found": (
        "look at the lines between these two: what they do outside of torch's operations (NumPy, hooks, other "
        "libraries, control flow) is not seen"
    ),
}
ANEW = (
    "seed it inside of the step, or draw once and use that: an unseeded generator (numpy.random.default_rng(), "
    "random.Random()), the clock or a loader that goes on gives other values each time"
)
ANOTHER_FUNCTION = "it computes another function there"


@dataclass(frozen=True)
class Finding:
    """What was found about one operation, under `setting`: its `kind` (of `KINDS`) and what to do.

    `module` is the path of the module, `line` the user's line, `ratio` the operation's own error in
    units of what rounding explains (NaN where it has no twin in float64), `detail` what was seen; `op`
    is the operation in its trace, and `instead` two values, one of each setting, that should be one.
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
    instead: tuple[str, str] | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        at = f"\n      at {self.line}" if self.line else ""
        return (
            f"{self.kind}: {self.operation} ({self.phase}){_in(self)}, under {self.setting}{at}"
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
        return self.a or self.b  # type: ignore[return-value]


class Comparison:
    """Two traces of one step side by side: their operations in `pairs`, and the `findings`, worst first.

    `first_nan` holds for each trace the operation that made the step's first NaN, or None.
    """

    def __init__(self, a: Trace, b: Trace) -> None:
        self.a, self.b = a, b
        self.pairs = list(_paired(a, b))
        self.other = {id(a): b, id(b): a}
        self.trace_of = {id(op): trace for trace in (a, b) for op in trace.operations}
        self.partners = {
            id(op): (pair.a, pair.b) for pair in self.pairs if pair.a and pair.b for op in (pair.a, pair.b)
        }
        self.makers = _makers(a), _makers(b)
        self.sources = _makers(a, passed_on=True), _makers(b, passed_on=True)
        self.place = {id(op): place for trace in (a, b) for place, op in enumerate(trace.operations)}
        self.parted: dict[int, bool] = {}  # pairs whose results part, by both of their operations: is it explained?
        self.found: set[int] = set()  # the operations with a finding of their own
        self.calls = Counter(map(_call, a.operations)), Counter(map(_call, b.operations))
        self.short_setting = any(Setting.parse(trace.setting).precision in SHORT for trace in (a, b))
        self.drew_otherwise: set[int] = set()  # the operations that are known to draw other numbers
        self.has_finding: set[int] = set()  # the operations blamed for what they make: it has many users
        # Where the step is known not to repeat itself, or to have computed with wrong memory, values may differ.
        unsteady = any(op.repeats is False for trace in (a, b) for op in trace.operations)
        self.values_may_differ = bool(a.overwritten or b.overwritten or unsteady)
        births = [_first_nan(trace, makers) for trace, makers in zip((a, b), self.makers, strict=True)]
        self.first_nan = [born for born, _ in births]
        causes = {id(cause): born for born, cause in births if cause is not None}

        def severity(finding: Finding) -> tuple[int, bool, float]:
            unexplained = finding.ratio if finding.ratio > 1 else 0.0
            return KINDS.index(finding.kind), id(finding.op) not in causes, -unexplained

        findings = []
        for finding in self._all():
            born = causes.get(id(finding.op))
            if born is not None and born is not finding.op:
                becomes = f"; what follows from it becomes NaN in {born.name} ({born.phase}), at {born.line}"
                finding = replace(finding, detail=finding.detail + becomes)
            findings.append(finding)
        self.findings = sorted(findings, key=severity)

    def _finding(self, kind: str, op: Operation, detail: str, advice: str = "") -> Finding:
        ratio = math.nan if op.ratio is None else op.ratio
        title = self.trace_of[id(op)].title
        return Finding(kind, title, op.name, op.phase, op.module, op.line, ratio, detail, advice or ADVICE[kind], op)

    def _all(self) -> Iterator[Finding]:
        yield from _united(*(list(_overwritten(trace)) for trace in (self.a, self.b)))
        for pair in self.pairs:
            own = _united(*(list(self._by_itself(op)) if op else [] for op in (pair.a, pair.b)))
            yield from own
            self.found |= {id(op) for op in (pair.a, pair.b) if op and own}
            if pair.a and pair.b:
                other_arguments = self._other_arguments(pair.a, pair.b)
                found = [other_arguments] if other_arguments else []
                if not found and not own:
                    found = list(self._side_by_side(pair.a, pair.b))
                yield from found
                if self._part(pair.a, pair.b):
                    explained = bool(own or found) or self.values_may_differ or self._inherits(pair.a, pair.b)
                    self.parted |= dict.fromkeys((id(pair.a), id(pair.b)), explained)
            elif pair.one.phase == RESULT:
                yield self._missing(pair)
        yield from self._without_cause()
        yield self._rounding()

    def _by_itself(self, op: Operation) -> Iterator[Finding]:
        """What an operation shows without the other setting."""
        if op.anew:
            detail = "was given other values when the step was done again, which no operation of the step had made"
            yield self._finding("nondeterminism", op, detail, ANEW)
        elif op.repeats is False:
            yield self._finding("nondeterminism", op, "gave other bits when the step was done again")
        if op.format or (op.dtype in SHORT and op.inputs and op.error is not None):
            detail = f"computed in {op.dtype}"
            if op.format:
                when = "were rounded to {} before" if op.rounded_before else "are rounded to {} by the kernel"
                size = f"; error {op.error:.1e}" if op.error is not None and not op.rounded_before else ""
                detail = f"its factors {when.format(op.format)}{size}"
            yield self._reduced_precision(op, detail)
        elif op.ratio is not None and not op.ratio <= 1:
            times = "rounding explains none" if math.isinf(op.ratio) else f"{op.ratio:.3g} times what rounding explains"
            yield self._finding("mismatch", op, f"its error against float64 is {op.error:.1e}, {times}")

    def _reduced_precision(self, op: Operation, detail: str) -> Finding:
        trace = self.trace_of[id(op)]
        setting = Setting.parse(trace.setting)
        convolution = op.name.startswith("convolution")
        if op.dtype in SHORT:
            advice = f"look for autocast, .to(torch.{op.dtype}) or precision={op.dtype} if float32 was meant"
        elif op.rounded_before:
            advice = f"look for what rounds to {op.format} before this line: an emulation, or a cast there and back"
        elif setting.emulated:
            advice = f"{trace.setting} asks for it; gpulab.float32_products() around this line keeps it in float32"
            if op.line:
                advice += f", and float32={':'.join(op.line.split(':', 2)[:2])} in the setting its gradients, too"
        elif setting.kind == "cuda":
            backend = "cudnn" if convolution or op.name.startswith("_cudnn") else "cuda.matmul"
            advice = f"tf32=off, or torch.backends.{backend}.allow_tf32 = False, computes it in float32"
        else:
            part = "conv" if convolution else "matmul"
            advice = f'torch.backends.mkldnn.{part}.fp32_precision = "ieee" computes it in float32'
        return self._finding("reduced precision", op, detail, advice)

    def _other_draw(self, op: Operation) -> Finding:
        there = self.other[id(self.trace_of[id(op)])]
        return self._finding("different random numbers", op, f"drew other numbers than under {there.title}")

    def _rounding(self) -> Finding:
        """The operation that rounding alone moved most: a measure of how well all is."""
        fine = [
            (op.ratio, op)
            for trace in (self.a, self.b)
            for op in trace.operations
            if op.ratio is not None and op.ratio <= 1 and op.format is None
        ]
        if not fine:
            return Finding("rounding", "", "", "", "", "", math.nan, "no operation has a twin in float64", "")
        ratio, op = max(fine, key=lambda entry: entry[0])
        detail = f"{len(fine)} operations within what rounding explains; this one comes nearest, {ratio:.2f} of it"
        return self._finding("rounding", op, detail)

    # --- one operation under both settings -----------------------------------------------------------------

    def _gap(self, value_a: str, value_b: str) -> float:
        """How far two values are apart, relative to the first; to the second where the first is nothing."""
        if value_a == value_b:
            return 0.0
        x, y = self.a.sketches[value_a], self.b.sketches[value_b]
        return distance(y, x) if x.any() else distance(x, y)

    def _gaps(self, values_a: Iterable[str], values_b: Iterable[str]) -> list[float]:
        return [self._gap(x, y) for x, y in zip(values_a, values_b, strict=False)]

    def _other_arguments(self, a: Operation, b: Operation) -> Finding | None:
        """The finding that one was called with other arguments, and made something else of its inputs.

        Numbers may follow from the data or, with another data type, from its precision.
        """
        parts = self._part(a, b) and not any(self.parted.get(id(op)) is not None for op in self._before(a, b))
        values = differing(a, b, exactly=parts)
        if a.dtype != b.dtype or ((self.values_may_differ or self.drew_otherwise) and not a.random):
            values = {name: both for name, both in values.items() if not all(isinstance(v, float) for v in both)}
        if not values or self._in_doubt(b) or (not parts and self._same_results(a, b)):
            return None
        here, there = (", ".join(f"{name}={both[side]!r}" for name, both in values.items()) for side in (1, 0))
        where = f", at {a.line}" if a.line != b.line else ""
        detail = f"called with {here}; under {self.a.title} with {there}{where}"
        place = b.module or b.line or "the step"
        advice = f"see why {place} calls it with other arguments under {self.b.title}: {ANOTHER_FUNCTION}"
        return self._finding("mismatch", b, detail, advice)

    def _in_doubt(self, op: Operation) -> bool:
        """Whether its module called it more often under one setting: which call stands for which is a guess."""
        return self.calls[0][_call(op)] != self.calls[1][_call(op)]

    def _same_results(self, a: Operation, b: Operation) -> bool:
        """Whether two made the same of the same, but for rounding; of other inputs, whether they compute nothing."""
        if a.random or b.random:
            return self.same_bits(a, b)
        of_inputs = max(map(_or_infinite, self._gaps(a.inputs, b.inputs)), default=0.0)
        computes = a.bound is not None and b.bound is not None
        if of_inputs > SAME_INPUTS:
            return not computes
        results = self._gaps((*a.outputs, *a.changed), (*b.outputs, *b.changed))
        apart = max(map(_or_infinite, results[:1] if a.name != b.name else results))
        if not computes:
            return apart <= max(SAME_VALUE, 4 * of_inputs)
        bounds, errors = (a.bound or 0.0) + (b.bound or 0.0), (a.error or 0.0) + (b.error or 0.0)
        return apart <= bounds * max(1.0, of_inputs / ROUNDOFF) + errors

    def _part(self, a: Operation, b: Operation) -> bool:
        """Whether what a pair made is further apart than the roundings of the step lead."""
        if a.nans != b.nans:
            return True
        gaps = self._gaps(a.outputs, b.outputs)
        if a.bound is b.bound is a.carried is None and a.inputs:  # a view, or a result: what was made before, or not
            common = [self._common(x, y, a) for x, y in zip(a.inputs, b.inputs, strict=False) if x != y]
            if all(pair and id(pair[0]) not in self.parted for pair in common):
                return False
        return any(
            gap > self._tolerance(a, b, place) for place, gap in enumerate(gaps[:1] if a.name != b.name else gaps)
        )

    def _tolerance(self, a: Operation, b: Operation, place: int) -> float:
        """How far two right values may be apart, relative to the first."""
        least, unknown = (SHORT_SIZE, SHORT_SIZE) if self._is_short(a, b) else (8 * ROUNDOFF, UNEXPLAINED)
        if a.carried is None or b.carried is None or place >= min(len(a.carried), len(b.carried)):
            before = _largest([0.0, *self._gaps(a.inputs, b.inputs)])
            bounds, errors = (a.bound or 0.0) + (b.bound or 0.0), (a.error or 0.0) + (b.error or 0.0)
            return max(unknown, INHERITED * before, bounds * max(1.0, before / ROUNDOFF) + errors)
        values = self.a.sketches[a.outputs[place]], self.b.sketches[b.outputs[place]]
        size = next((size for size in map(float, map(np.linalg.norm, values)) if size), math.inf)  # as `_gap` has it
        return max(least, CARRIED * (a.carried[place] + b.carried[place]) / size)

    def _is_short(self, a: Operation, b: Operation) -> bool:
        return self.short_setting or (a.dtype != b.dtype and (a.dtype in SHORT or b.dtype in SHORT))

    def _common(self, x: str, y: str, user: Operation) -> tuple[Operation, Operation] | None:
        """The pair of operations that made two values before they were used, if one did."""
        made_b = {id(op) for op in self.sources[1].get(y, ())}
        pairs = (
            self.partners.get(id(op)) for op in self.sources[0].get(x, ()) if self.place[id(op)] < self.place[id(user)]
        )
        return next((pair for pair in pairs if pair and id(pair[1]) in made_b), None)

    def _before(self, a: Operation, b: Operation) -> list[Operation]:
        """The operations of the first that made what a pair was given, where their partners made it for the other."""
        common = (self._common(x, y, a) for x, y in zip(a.inputs, b.inputs, strict=False) if x != y)
        return [pair[0] for pair in common if pair]

    def _inherits(self, a: Operation, b: Operation) -> bool:
        """Whether it is known why results part: a decision that rounding tips, or what came before and is known."""
        known = [self._known(x, y, a) for x, y in zip(a.inputs, b.inputs, strict=False)]
        parted = [why for why in known if why is not None]
        return all(parted) if parted else a.name in DECIDES | NOT_UNIQUE

    def _known(self, x: str, y: str, user: Operation) -> bool | None:
        """Whether it is known why two values part; None for values that do not."""
        if x == y:
            return None
        common = self._common(x, y, user)
        if common:
            return self.parted.get(id(common[0]))
        if self._gap(x, y) <= SAME_VALUE:
            return None
        (alone_a, before_a), (alone_b, before_b) = map(self._stretch, (x, y), self.makers)
        blamed = self.found | self.has_finding
        if any(id(op) in blamed or op.random or op.name == "_to_copy" for op in (*alone_a, *alone_b)):
            return True
        if any(id(maker) in self.has_finding for maker in (self._maker(0, x), self._maker(1, y))):
            return True
        why = [self.parted[id(op)] for op, _ in (*before_a, *before_b) if id(op) in self.parted]
        return bool(why) and all(why)

    def _missing(self, pair: Pair) -> Finding:
        """The finding that a result is there under one setting alone."""
        there = self.other[id(self.trace_of[id(pair.one)])]
        detail = f"under {there.title} there is none"
        return self._finding("mismatch", pair.one, detail, f"see why {there.title} computes none: {ANOTHER_FUNCTION}")

    def _without_cause(self) -> Iterator[Finding]:
        """The finding that the step's results part though nothing above says why; and between which operations."""
        matched = [(pair.a, pair.b) for pair in self.pairs if pair.a and pair.b]
        unknown = [pair for pair in matched if self.parted.get(id(pair[0])) is False]
        results = [pair for pair in unknown if pair[0].phase == RESULT]
        gaps = [max(map(_or_infinite, self._gaps(a.outputs, b.outputs))) for a, b in results]
        if not gaps:
            return
        a, b = results[gaps.index(max(gaps))]
        rest = f" (and {len(gaps) - 1} more results)" if len(gaps) > 1 else ""
        begins = matched.index(unknown[0])
        begin = " and ".join(_described(op) for _, op in matched[max(0, begins - 1) : begins + 1])
        detail = (
            f"{_described(b)}{rest} is {max(gaps):.1e} (relative) from what it is under {self.a.title}; roundings lead "
            f"to {self._tolerance(a, b, 0):.1e}; it begins between {begin}"
        )
        yield self._finding("cause not found", unknown[0][1], detail)

    def _side_by_side(self, a: Operation, b: Operation) -> Iterator[Finding]:
        """What shows only when the two are laid side by side."""
        if a.random or b.random:
            if not self.same_bits(a, b):
                self.drew_otherwise |= {id(a), id(b)}
                yield self._other_draw(b)
            return
        gaps = self._gaps(a.inputs, b.inputs)
        same, explained = (SHORT_SIZE, math.inf) if self._is_short(a, b) else (SAME_VALUE, UNEXPLAINED)
        of_the_same = not self._in_doubt(b) and max(map(_or_infinite, gaps), default=0.0) <= SAME_INPUTS
        for x, y, gap in zip(a.inputs, b.inputs, map(_or_infinite, gaps), strict=False):
            if gap <= same or (math.isinf(gap) and a.name != b.name) or self._common(x, y, a):
                continue
            maker_a, maker_b = self._maker(0, x), self._maker(1, y)
            makers = [maker for maker in (maker_a, maker_b) if maker is not None]
            if len(makers) < 2 and all(id(maker) in self.partners for maker in makers):
                if self.values_may_differ:
                    continue
                detail = f"was given other data or weights than under {self.a.title}: {gap:.1e} apart"
                yield self._finding("mismatch", b, detail)
                return
            if any(maker.name == "_to_copy" for maker in makers):
                continue  # a cast, as autocast makes them; a finding of its own where it is to short numbers
            if self._in_doubt(b) or (a.name != b.name and all(id(maker) in self.partners for maker in makers)):
                continue
            if not self.values_may_differ and all(id(maker) in self.partners for maker in makers) and len(makers) == 2:
                if not self._known(x, y, a):
                    yield self._other_wiring(b, gap, maker_a, maker_b)  # type: ignore[arg-type]
                return
            finding = self._stretch_finding(x, y, b, gap, math.inf if self.values_may_differ else explained)
            if finding:
                if id(finding.op) not in self.has_finding:
                    yield finding
                self.has_finding.add(id(finding.op))
                return
        if a.ratio is None or b.ratio is None:
            yield from self._unchecked(a, b, gaps)
        elif of_the_same and a.name not in DECIDES and not any(id(op) in self.parted for op in self._before(a, b)):
            yield from self._another_kernel(a, b)

    def _another_kernel(self, a: Operation, b: Operation) -> Iterator[Finding]:
        """For kernels that agree with their twins in float64, and not with each other: they are two functions."""
        for place, gap in enumerate(self._gaps(a.outputs, b.outputs)[: 1 if a.name != b.name else None]):
            tolerance = self._tolerance(a, b, place)
            if a.name in NOT_UNIQUE and gap > UNEXPLAINED:  # which roundings alone can lead to, too
                detail = f"each fits its definition, and they are {gap:.1e} (relative) apart: it has no single answer"
                yield self._finding("another valid answer", b, detail)
                return
            if gap > CARRIED * tolerance:
                detail = (
                    f"of the same inputs it makes what is {gap:.1e} (relative) from its result under {self.a.title}; "
                    f"roundings lead to {tolerance:.1e}"
                )
                advice = f"compare the kernels registered for both settings: {ANOTHER_FUNCTION}"
                yield self._finding("mismatch", b, detail, advice)
                return

    def same_bits(self, a: Operation, b: Operation) -> bool:
        """Whether two made the same; large tensors of two devices are known by their sketches."""
        return all(gap < SAME_BITS for gap in self._gaps(a.outputs, b.outputs))

    def _maker(self, side: int, value: str) -> Operation | None:
        return next(iter(self.makers[side].get(value, ())), None)

    def _other_wiring(self, b: Operation, gap: float, maker_a: Operation, maker_b: Operation) -> Finding:
        """The finding that an operation gets its input from another one than under the other setting."""
        detail = (
            f"is given what {_described(maker_b)} makes; under {self.a.title} what {_described(maker_a)} makes, "
            f"{gap:.1e} (relative) apart"
        )
        advice = (
            f"see why {b.module or b.line or 'the step'} uses another value under {self.b.title}: {ANOTHER_FUNCTION}"
        )
        return self._finding("mismatch", b, detail, advice)

    def _unchecked(self, a: Operation, b: Operation, of_inputs: list[float]) -> Iterator[Finding]:
        """For kernels without a twin in float64: do they make the same of nearly the same?"""
        finite = [gap for gap in of_inputs if not math.isnan(gap)]
        if not finite or max(finite) > SAME_INPUTS:
            return
        results = self._gaps(a.outputs, b.outputs)
        # Twins share what they compute, not what they keep for the backward pass.
        apart = _largest(results[:1] if a.name != b.name else results)
        detail = f"from the same inputs, its results are {apart:.1e} apart"
        for op in (a, b):
            if self._tf32_explains(apart, op):
                yield self._reduced_precision(op, f"{detail}, as TF32 makes them")
                return
        if apart > UNEXPLAINED:
            yield self._finding("mismatch", b, detail)

    def _tf32_explains(self, apart: float, op: Operation) -> bool:
        """Whether two results are as far apart as TF32 makes them, and a GPU may use it."""
        trace = self.trace_of[id(op)]
        allowed = trace.arithmetic.get("matmul_fp32"), trace.arithmetic.get("convolution_fp32")
        least, most = TF32_SIZE
        return Setting.parse(trace.setting).kind == "cuda" and "tf32" in allowed and least < apart < most

    # --- operations of one setting alone -------------------------------------------------------------------

    def _stretch_finding(self, x: str, y: str, user: Operation, gap: float, explained: float) -> Finding | None:
        """What is wrong with the operations of one setting alone that lead to two values that should be one."""
        (alone_a, before_a), (alone_b, before_b) = map(self._stretch, (x, y), self.makers)
        random = [op for op in (*alone_b, *alone_a) if op.random]
        if random:  # then nobody can tell what else they did
            reported = any(id(op) in self.drew_otherwise for op in random)
            self.drew_otherwise |= set(map(id, random))
            return None if reported else self._other_draw(random[0])
        begins = [apart for _, apart in (*before_a, *before_b)]
        if gap <= INHERITED * _largest([0.0, *begins, *(op.error or 0.0 for op in (*alone_a, *alone_b))]):
            return None
        for alone, there in ((alone_b, self.a), (alone_a, self.b)):
            kernel = max((op for op in alone if op.error is None), key=lambda op: len(op.inputs), default=None)
            if kernel and kernel.inputs and self._tf32_explains(gap, kernel):
                detail = f"what it makes is {gap:.1e} (relative) from what there is under {there.title}, as by TF32"
                return self._reduced_precision(kernel, detail)
        if gap <= (explained if alone_a or alone_b or self.values_may_differ else SAME_VALUE):
            return None
        # Two values that should be one come from different operations: blame the one that made it, not its user.
        maker_a, maker_b = self._maker(0, x), self._maker(1, y)
        blamed, other, there = (maker_b, maker_a, self.a) if maker_b else (maker_a, maker_b, self.b)
        assert blamed is not None
        origin = f"{other.name} ({other.phase}){_in(other)}" if other else "data or weights"
        detail = (
            f"what it makes is {gap:.1e} (relative) from what {origin} makes in its place under {there.title}, "
            f"though each computes rightly what it is asked to; first used by {user.name}{_in(user)}"
        )
        place, setting = blamed.module or blamed.line or "this line", self.other[id(there)].title
        advice = f"see what {place} does under {setting}: {ANOTHER_FUNCTION}"
        return replace(self._finding("mismatch", blamed, detail, advice), instead=(x, y))

    def _stretch(
        self, value: str, makers: dict[str, list[Operation]]
    ) -> tuple[list[Operation], list[tuple[Operation, float]]]:
        """The operations of one setting alone that lead to a value, the nearest first; and before them operations of
        both, each with how far apart the two made what was used.
        """
        alone: dict[int, Operation] = {}
        before: list[tuple[Operation, float]] = []
        front = [value]
        for name in front:  # which grows
            op = next(iter(makers.get(name, ())), None)
            if op is not None and id(op) in self.partners:
                a, b = self.partners[id(op)]
                places = [place for place, output in enumerate(op.outputs) if output == name]
                gaps = self._gaps(a.outputs, b.outputs)
                before.append((a, _largest([gaps[place] for place in places if place < len(gaps)] or gaps)))
            elif op is not None and id(op) not in alone:
                alone[id(op)] = op
                front += op.inputs
        return list(alone.values()), before


def _in(op: Operation | Finding) -> str:
    return f" in {op.module}" if op.module else ""


def _described(op: Operation) -> str:
    """An operation or a result in words, with its place."""
    if op.phase == RESULT:
        return f"{op.name} of {op.module}" if op.module else f"the {op.name}"
    return f"{op.name} ({op.phase}){_in(op)}" + (f" at {op.line}" if op.line else "")


def _or_infinite(gap: float) -> float:
    return math.inf if math.isnan(gap) else gap


def _largest(gaps: list[float]) -> float:
    """The largest of some distances; NaN only where there is no other."""
    return max(gaps, key=lambda gap: -1.0 if math.isnan(gap) else gap)


class _Nothing:
    def __repr__(self) -> str:
        return "nothing"


def differing(a: Operation, b: Operation, exactly: bool = False) -> dict[str, tuple[Any, Any]]:
    """The arguments that two calls disagree on: name, and both values.

    Tensors are not compared, nor arguments that say how to compute something and not what, such as a
    memory format or the gradients that are asked for, nor, unless `exactly`, numbers that differ by a
    rounding. Two kernels of different names are compared in the arguments that they share; of those of
    one name, which versions of torch may give more arguments, a default is not held against nothing.
    """

    def named(values: dict[str, Any]) -> dict[str, Any]:
        return {SYNONYMS.get(name, name): value for name, value in values.items()}

    given_a, given_b = named(a.arguments), named(b.arguments)
    all_a, all_b = named(a.defaults) | given_a, named(b.defaults) | given_b
    names = all_a.keys() & all_b.keys()
    kernels = a.name != b.name  # each of which may fill in what it was not given
    if names and not kernels:
        names |= given_a.keys() | given_b.keys()
    both = {name: (all_a.get(name, _Nothing()), all_b.get(name, _Nothing())) for name in sorted(names - HOW)}
    return {name: values for name, values in both.items() if not _agree(*values, kernels, exactly)}


def _agree(a: Any, b: Any, kernels: bool, exactly: bool) -> bool:
    if repr(a) == repr(b) or TENSOR in repr((a, b)) or (kernels and None in (a, b)):
        return True
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (a, b))
    return numbers and math.isclose(a, b, rel_tol=0.0 if exactly else OF_DATA)


def check_same_step(a: Trace, b: Trace) -> None:
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
        name, where = first.name, first.module or first.line or "the step"
        if first.shape != second.shape:
            raise DataError(
                f"the traces are of different data: {name} in {where} makes {first.shape} in one and {second.shape} in "
                f"the other"
            )
        for argument, (here, there) in differing(first, second).items():
            if distance(b.sketches[second.outputs[0]], a.sketches[first.outputs[0]]) > SAME_STEP:
                raise DataError(
                    f"the traces are of different steps: even in float64, {name} in {where} is called with "
                    f"{argument}={here!r} in one and {argument}={there!r} in the other"
                )
        gaps = [distance(b.sketches[y], a.sketches[x]) for x, y in zip(first.inputs, second.inputs, strict=False)]
        apart = next((gap for gap in gaps if gap > SAME_STEP), None)
        if apart is not None:
            raise DataError(
                f"the traces are of different data or weights: {name} in {where} begins with values {apart:.1e} apart "
                f"in float64; use the same seeds and files on both machines"
            )


def _united(first: list[Finding], second: list[Finding]) -> list[Finding]:
    """What both settings show, once."""
    key = attrgetter("kind", "operation", "line")
    others = {key(finding): finding for finding in second}
    both = [replace(f, setting=f"{f.setting} and {others[key(f)].setting}") for f in first if key(f) in others]
    shared = {key(finding) for finding in both}
    return both + [finding for finding in (*first, *second) if key(finding) not in shared]


def _overwritten(trace: Trace) -> Iterator[Finding]:
    for entry in trace.overwritten:
        detail = f"what it needed had been overwritten since it was saved: {entry['why']}"
        place = (entry["operation"], "backward", "", entry["line"])
        yield Finding("overwritten", trace.title, *place, math.nan, detail, entry["remedy"])


def _paired(a: Trace, b: Trace) -> Iterator[Pair]:
    """Operations of the two that stand for each other, each with the one in float64."""
    calls_a, calls_b, calls_exact = (Counter(map(_call, ops)) for ops in (a.operations, b.operations, a.reference))
    exact: dict[int, Operation] = {}
    for trace, calls in ((a, calls_a), (b, calls_b)):
        # A few operations alike amid others, in a kernel that float64 lacks, are no counterparts.
        for op, twin in aligned(trace.operations, a.reference, at_least=3):
            if op and twin and op.shape == twin.shape and calls[_call(op)] == calls_exact[_call(op)]:
                exact[id(op)] = twin
    for one, other in aligned(a.operations, b.operations):
        if one and other and one.shape != other.shape and calls_a[_call(one)] != calls_b[_call(one)]:
            yield Pair(one, None, exact.get(id(one)))
            yield Pair(None, other, exact.get(id(other)))
        else:
            yield Pair(one, other, exact.get(id(one)) or exact.get(id(other)))


def _call(op: Operation) -> tuple[str, str, str]:
    return op.phase, op.module, TWINS.get(op.name, op.name)


def _makers(trace: Trace, passed_on: bool = False) -> dict[str, list[Operation]]:
    """Which operations computed each value, in order; also those that passed on what they were given."""
    makers: dict[str, list[Operation]] = {}
    for op in trace.operations:
        for value in (*op.outputs, *op.changed):
            if op.phase != RESULT and (passed_on or value not in op.inputs):
                makers.setdefault(value, []).append(op)
    return makers


def _first_nan(trace: Trace, makers: dict[str, list[Operation]]) -> tuple[Operation | None, Operation | None]:
    """The operation that made the step's first NaN, and the nearest one before it that had lost precision.

    The way back is along the values; a NaN in what was given to the step is nobody's.
    """
    bad = {value for op in trace.operations if op.nans for value in op.outputs}
    born = next((op for op in trace.operations if op.nans and op.inputs and not bad & set(op.inputs)), None)
    front = [] if born is None else [born]
    visited = set(map(id, front))
    for op in front:  # which grows
        if op.format or op.dtype in SHORT:
            return born, op
        before = [makers[value][0] for value in op.inputs if value in makers]
        front += {id(maker): maker for maker in before if id(maker) not in visited}.values()
        visited |= set(map(id, before))
    return born, None
