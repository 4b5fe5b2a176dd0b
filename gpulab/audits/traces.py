"""One training step, operation by operation: what each computed, how exactly, and for whom.

A trace is a file of its own: two laboratories record the same step, each on its card, and compare.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gpulab.audits import trace_files
from gpulab.audits.operations import RESULT, Operation
from gpulab.audits.rounding import ATTENTION
from gpulab.errors import DataError, UsageError
from gpulab.settings import Setting

# Kernels of different devices that compute the same thing.
TWINS = {"_unsafe_view": "view"}
for _suffix in ("", "_backward"):
    TWINS |= {f"{library}_batch_norm{_suffix}": f"native_batch_norm{_suffix}" for library in ("cudnn", "miopen")}
    TWINS |= {f"{kernel}{_suffix}": f"attention{_suffix}" for kernel in ATTENTION}


@dataclass
class Trace:
    """One step under one setting: every operation of torch that it ran, and a sketch of each value.

    Attributes:
        setting: What the step was done under.
        operations: The operations, in the order in which they ran.
        reference: Those of the same step in float64.
        sketches: The values of both, by name, each as a float64 array of at most 64 numbers.
        overwritten: What the guard found.
        passport: The machine.
        arithmetic: The flags in force, such as TF32.
        label: What reports call the trace, instead of its setting.
        notes: What else is known of the step: the `loss` that was taken where it names none, the format of `autocast`,
            and that a `compiled` model was not run as such.

    Examples:
        >>> import torch
        >>> import gpulab as gl
        >>> trace = gl.record(gl.Step(torch.nn.Linear(4, 2), torch.ones(3, 4)), "cpu", progress=False)
        >>> "addmm" in [operation.name for operation in trace.operations], trace.overwritten
        (True, [])
    """

    setting: str
    operations: list[Operation]
    reference: list[Operation]
    sketches: dict[str, np.ndarray]
    overwritten: list[dict[str, str]] = field(default_factory=list)
    passport: dict[str, Any] = field(default_factory=dict)
    arithmetic: dict[str, Any] = field(default_factory=dict)
    label: str = ""
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """What the trace is called in reports: its label, or the setting, with autocast's format."""
        autocast = f"autocast to {self.notes['autocast']}" if "autocast" in self.notes else ""
        return self.label or ", ".join(filter(None, (self.setting, autocast, self.notes.get("compiled"))))

    def __repr__(self) -> str:
        count = sum(op.phase != RESULT for op in self.operations)
        return f"trace of {count} operations under {self.setting}"

    def save(self, file: str | Path) -> Path:
        """Write the trace to one file (Parquet, compressed), whole or not at all."""
        names = ("setting", "label", "overwritten", "passport", "arithmetic", "notes")
        notes = {name: getattr(self, name) for name in names}
        trace_files.write(file, notes, (self.operations, self.reference), self.sketches)
        return Path(file)

    @classmethod
    def load(cls, file: str | Path, content: bytes | None = None, most: int | None = None) -> Trace:
        """Read a trace.

        Args:
            file: What to read; or what errors call it, where there is a content.
            content: Of a file that is not on this disk, such as one that was uploaded.
            most: Numbers that a column of it may have, where that is less than of any trace.

        Raises:
            DataError: naming the file, for one that is missing, cut short, damaged or foreign.
        """
        notes, (operations, reference), sketches = trace_files.read(file, content, most)
        try:
            Setting.parse(notes["setting"])
        except UsageError as error:
            raise DataError(f"{file}: a damaged trace: {error}") from None
        return cls(operations=operations, reference=reference, sketches=sketches, **notes)


def call_of(op: Operation) -> tuple[str, str, str]:
    """What operations are aligned by: phase, module and name, kernels of `TWINS` being one."""
    return op.phase, op.module, TWINS.get(op.name, op.name)


def aligned(first: list[Operation], second: list[Operation]) -> list[tuple[Operation | None, Operation | None]]:
    """Operations that stand for each other, in order, and None beside one that only one of the two ran."""
    keys_of_both = list(map(call_of, first)), list(map(call_of, second))
    if keys_of_both[0] == keys_of_both[1]:
        return list(zip(first, second, strict=True))
    pairs: list[tuple[Operation | None, Operation | None]] = []
    matcher = difflib.SequenceMatcher(None, *keys_of_both, autojunk=False)
    for tag, a, a_end, b, b_end in matcher.get_opcodes():
        if tag == "equal":
            pairs += zip(first[a:a_end], second[b:b_end], strict=True)
        else:
            pairs += [(op, None) for op in first[a:a_end]]
            pairs += [(None, op) for op in second[b:b_end]]
    return pairs
