"""What an audit may find: the kinds of findings, and what to do about each."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from gpulab.audits.comparison import Comparison
from gpulab.audits.operations import RESULT, Operation
from gpulab.audits.rounding import FLUSHED
from gpulab.audits.tolerances import SHORT
from gpulab.settings import Setting

# Worst first, where findings explain as much of the difference.
KINDS = (
    "not finite",
    "mismatch",
    "overwritten",
    "cause not found",
    "nondeterminism",
    "different random numbers",
    "another valid answer",
    "reduced precision",
    "rounding",
)
ANOTHER_FUNCTION = "it computes another function there"
ADVICE = {
    "not finite": (
        "mend this first, for no difference can be measured beside it: look for a row that is masked out entirely, a "
        "division by zero, a logarithm or a root of zero or less, or numbers beyond what the format holds"
    ),
    "mismatch": "look for a bug here: compare this operation's arguments and kernel under both settings",
    "nondeterminism": (
        "if runs must repeat, use deterministic=on (torch.use_deterministic_algorithms); else compare settings "
        "only by verdicts over many seeds"
    ),
    "different random numbers": (
        "draw on the CPU with a seeded torch.Generator and move the result; generators of CPUs and GPUs differ"
    ),
    "another valid answer": (
        "if the loss depends on signs, on the basis of equal values, or on which of equal numbers comes first, compute "
        "it from what does not, such as the product of a vector with itself; else nothing"
    ),
    "rounding": "nothing",
    "cause not found": (
        "look at this line and those before it: what they do outside of torch's operations (NumPy, hooks, other "
        "libraries, control flow) is not seen"
    ),
}


@dataclass(frozen=True)
class Finding:
    """What was found about one operation, under `setting`: its `kind` (of `KINDS`) and what to do.

    `module` is the path of the module, `line` the user's line, `ratio` the operation's own error in units of what
    rounding explains (NaN where it has no twin in float64), `detail` what was seen. `size` is how far the operation's
    result is off for this reason, relative to it (NaN where that is not known), and `share` how much of the
    difference in the step's results goes back to that (NaN where it cannot be told, and where there is none). What
    computed with wrong memory, or is missing, is not `bounded`: it could explain everything.

    `op` is the operation in its trace. `under_both` says whether both settings show it; `side_by_side` whether it was
    found by comparing the two settings, each of which computes rightly what it is asked to.
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
    size: float = math.nan
    share: float = math.nan
    bounded: bool = True
    op: Operation | None = field(default=None, repr=False, compare=False)
    side_by_side: bool = field(default=False, repr=False, compare=False)
    under_both: bool = field(default=False, repr=False, compare=False)

    def __str__(self) -> str:
        at = f"\n      at {self.line}" if self.line else ""
        return (
            f"{self.kind}: {self.operation} ({self.phase}){in_module(self.module)}, under {self.setting}{at}"
            f"\n      {self.detail}{self._effect()}\n      do: {self.advice}"
        )

    def _effect(self) -> str:
        if not self.bounded:
            return "\n      its effect has no bound: it could explain all of the difference in the results"
        if math.isnan(self.share) or self.kind == "rounding":
            return ""
        share = f"{self.share:.0%}" if self.share >= 0.01 else "less than 1%"
        return f"\n      {share} of the difference in the results goes back to it"


def finding_of(comparison: Comparison, kind: str, op: Operation, detail: str, advice: str = "", **more: Any) -> Finding:
    """A finding about an operation of one of two traces."""
    ratio = math.nan if op.ratio is None else op.ratio
    location = (op.name, op.phase, op.module, op.line)
    title = comparison.trace_of(op).title
    return Finding(kind, title, *location, ratio, detail, advice or ADVICE[kind], op=op, **more)


def finding_between(
    comparison: Comparison, kind: str, op: Operation, gap: float, detail: str, advice: str = ""
) -> Finding:
    """A finding that shows side by side, of an operation that is so far from its twin."""
    return finding_of(comparison, kind, op, detail, advice, size=gap, side_by_side=True)


def another_function(comparison: Comparison, op: Operation, gap: float, detail: str, look: str) -> Finding:
    """A mismatch that shows side by side: an operation computes something else than its twin."""
    advice = f"{look} {comparison.here(op)}: {ANOTHER_FUNCTION}"
    return finding_between(comparison, "mismatch", op, gap, detail, advice)


def in_module(module: str) -> str:
    """Where an operation belongs, as an end of a sentence."""
    return f" in {module}" if module else ""


def named(op: Operation) -> str:
    """An operation with its phase and module."""
    return f"{op.name} ({op.phase}){in_module(op.module)}"


def described(op: Operation) -> str:
    """An operation or a result in words, with its line."""
    if op.phase == RESULT:
        return f"{op.name} of {op.module}" if op.module else f"the {op.name}"
    return named(op) + (f" at {op.line}" if op.line else "")


def place_of(op: Operation) -> str:
    """Where the user finds an operation: its module, or its line."""
    return op.module or op.line or "the step"


def advice_on_precision(comparison: Comparison, op: Operation) -> str:
    """Which switch lets an operation keep all digits, by what had rounded them."""
    setting = Setting.parse(comparison.trace_of(op).setting)
    convolution = op.name.startswith("convolution")
    if op.format == FLUSHED:
        return "denormals=on, or torch.set_flush_denormal(False), keeps them; or scale the numbers up before this line"
    if op.dtype in SHORT:
        return f"look for autocast, .to(torch.{op.dtype}) or precision={op.dtype} if float32 was meant"
    if op.rounded_before:
        return f"look for what rounds to {op.format} before this line: an emulation, or a cast there and back"
    if setting.emulated:
        return f"{setting} asks for it; gpulab.float32_products() around this line keeps it in float32"
    if setting.kind == "cuda":
        backend = "cudnn" if convolution or op.name.startswith("_cudnn") else "cuda.matmul"
        return f"tf32=off, or torch.backends.{backend}.allow_tf32 = False, computes it in float32"
    product_type = "conv" if convolution else "matmul"
    return f'torch.backends.mkldnn.{product_type}.fp32_precision = "ieee" computes it in float32'
