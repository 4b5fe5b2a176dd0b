"""The trace of a training step: the result, error and caller of each operation.

A trace can be saved to a file, so that executions on different machines can be compared. The file
is in the Parquet format, with one row for each operation. Its metadata contain the fields that
concern the whole step, as JSON. A row contains the fields of an `Operation` as JSON, and its values
(inputs, outputs and changed inputs). Each value is stored once, in the first row that needs it, as
a JSON description and arrays.
"""

from __future__ import annotations

import difflib
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from pydantic import ConfigDict, TypeAdapter
from torch import Tensor

from gpulab import files
from gpulab._torch_internals import Nested
from gpulab.audits._rounding import ATTENTION_OPERANDS, Accuracy
from gpulab.audits._values import Value
from gpulab.errors import DataError
from gpulab.settings import Setting

# A JSON value. A narrower type would make pydantic convert the values that it reads from a file.
Json: TypeAlias = Any

RESULT = "result"  # the phase of results: loss, gradients and updates
RANK = "rank"  # the argument of a result that names its rank, in a joined trace
RANKS_NOTE = "ranks"  # the note of a joined trace with the number of its ranks
HASH_MARK = "#"  # begins the hash of a tensor in the description of a state
TENSOR = "Tensor"  # the placeholder for a tensor among an operation's arguments
FORMAT = 7
KEY = "gpulab trace"
# Fields of a trace that are stored in rows, and not in the metadata.
ROW_FIELDS = {
    "operations",
    "values",
}
# The keys that files use for attributes of an operation that have been renamed since.
STORED_KEYS = {
    "mutated_values": "changed",
    "is_random": "random",
    "has_nan": "nans",
    "inputs_changed": "anew",
    "has_rounded_factors": "rounded_before",
    "max_bound": "loosest",
}
ATTRIBUTES = {key: attribute for attribute, key in STORED_KEYS.items()}
COMPRESSION: dict[str, bool | int | str] = {
    "use_dictionary": False,
    "compression": "zstd",
    "compression_level": 19,
}
# The largest allowed number of values in a column. The largest recorded network has about 200,000.
MAX_COLUMN_NUMBERS = 1 << 27

# Kernels of different devices that compute the same thing.
KERNEL_ALIASES = {"_unsafe_view": "view"}
for _suffix in ("", "_backward"):
    KERNEL_ALIASES |= {
        f"{library}_batch_norm{_suffix}": f"native_batch_norm{_suffix}"
        for library in ("cudnn", "miopen")
    }
    KERNEL_ALIASES |= {f"{kernel}{_suffix}": f"attention{_suffix}" for kernel in ATTENTION_OPERANDS}


@dataclass
class Operation(Accuracy):
    """One operation: its inputs, its outputs and its error.

    In the phase `result`, the object is not an operation but a result of the step: the `loss`, a
    `gradient`, or a tensor that was `updated`. The inputs of the last two are the initial values of
    the parameter. The gradient is the last one that an optimizer received, or the final gradient if
    there is no optimizer. The `arguments` of an update contain how many of its numbers `moved` in
    the float64 reference, and how many of these were `lost`, because their bits did not change. For
    the state of an optimizer, they contain its name as `state`.

    Attributes:
        name: The name of the operation in torch, without device or overload.
        phase: `forward`, `backward` or `result`, for example.
        module: The path of the module that called the operation or, in the backward pass, that
            called the differentiated operation.
        line: The line of the user's code.
        inputs: The names of the values that the operation reads.
        outputs: The names of the values that the operation returns.
        shape: The shape of the first output.
        dtype: The type of the first output.
        arguments: The arguments, by their names in torch's schema and including defaults, as JSON.
            A tensor is represented by "Tensor".
        mutated_values: The names of the new values of inputs that the operation wrote to.
        is_random: Whether the operation draws random numbers.
        repeats: Whether the operation returned the same bits when it was repeated immediately, and
            in the second execution of the step; None if it was not repeated.
        has_nan: Whether an output contains NaN.
        inputs_changed: Whether the operation received values or arguments that differed in the
            second execution although no operation explains the difference.
        spread: The relative difference between the results of repetitions; None if there is none.
        lanes: For an operation on lists of tensors, the length and the number of the lists.
        is_view: Whether the operation only returns a view of its input.
    """

    name: str
    phase: str
    module: str
    line: str
    inputs: list[str]
    outputs: list[str]
    shape: list[int]
    dtype: str
    arguments: dict[str, Json] = field(default_factory=dict)
    mutated_values: list[str] = field(default_factory=list)
    is_random: bool = False
    repeats: bool | None = None
    has_nan: bool = False
    inputs_changed: bool = False
    spread: float | None = None
    lanes: list[int] = field(default_factory=list)
    is_view: bool = False
    # Each call is a separate operation.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    @property
    def values(self) -> list[str]:
        """The names of all values that the operation read or wrote."""
        return [*self.inputs, *self.outputs, *self.mutated_values]


def as_json(argument: Nested) -> Json:
    """Convert an argument to JSON: `TENSOR` for a tensor, None for a type that JSON lacks."""
    if isinstance(argument, Tensor):
        return TENSOR
    if isinstance(argument, list | tuple):
        return [as_json(item) for item in argument]
    return argument if isinstance(argument, bool | int | float | str) else None


@dataclass
class Trace:
    """One step under one setting: every torch operation, and every value with its reference.

    Attributes:
        setting: The setting that the step was executed under.
        operations: The operations in the order of their execution.
        values: The contents of tensors, by name; see `Value`.
        overwritten: The findings of the guard, each with `operation`, `line`, `why` and `remedy`.
        passport: A description of the machine.
        arithmetic: The flags that affect arithmetic, such as those of TF32.
        label: The name of the trace in reports; empty to use its setting.
        notes: Remarks on the step: under `loss`, how the loss was chosen if the step has no loss
            function; under `compiled`, that a compiled model ran uncompiled; under `guard`, that
            the guard could not be used; under `ranks`, the number of ranks that were joined.
        without_reference: The operations that have no float64 reference, with torch's error.
        step: The name of the step. Traces with equal names count as the same program.
        state: The state that the step started from, if it was recorded in a running program:
            numbers as text and tensors as hashes, by name.

    Examples:
        >>> import torch
        >>> import gpulab as gl
        >>> trace = gl.record(
        ...     gl.Step(torch.nn.Linear(4, 2), torch.ones(3, 4)), "cpu", progress=False
        ... )
        >>> "addmm" in [operation.name for operation in trace.operations], trace.overwritten
        (True, [])
    """

    __pydantic_config__ = ConfigDict(arbitrary_types_allowed=True)

    setting: str
    operations: list[Operation]
    values: dict[str, Value]
    overwritten: list[dict[str, str]] = field(default_factory=list)
    passport: dict[str, Json] = field(default_factory=dict)
    arithmetic: dict[str, Json] = field(default_factory=dict)
    label: str = ""
    notes: dict[str, str] = field(default_factory=dict)
    without_reference: dict[str, str] = field(default_factory=dict)
    step: str = ""
    state: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        Setting.parse(self.setting)  # raises an error for an invalid setting

    @property
    def title(self) -> str:
        """The title of the trace in reports: its label, or the setting."""
        return self.label or ", ".join(filter(None, (self.setting, self.notes.get("compiled"))))

    def __repr__(self) -> str:
        count = sum(op.phase != RESULT for op in self.operations)
        return f"trace of {count} operations under {self.setting}"

    def save(self, file: str | Path) -> Path:
        """Write the trace to one file (Parquet, compressed), atomically.

        Each value is stored once, in the row of the first operation that has it. Values that belong
        to no operation are not stored, because nothing refers to them.

        Returns:
            The path of the file.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        unsaved = dict(self.values)
        rows = []
        for op in self.operations:
            # An operation may have the same value several times, for example as both factors.
            new_names = [name for name in dict.fromkeys(op.values) if name in unsaved]
            values = [(name, unsaved.pop(name)) for name in new_names]
            descriptions = [[name, *_describe_value(value)] for name, value in values]
            arrays = [array for _, value in values for array in _arrays(value)]
            stored_op = {
                STORED_KEYS.get(name, name): field_value for name, field_value in vars(op).items()
            }
            rows.append(
                {
                    "operation": json.dumps(stored_op),
                    "values": json.dumps(descriptions),
                    "numbers": arrays,
                }
            )
        metadata = {
            name: field_value for name, field_value in vars(self).items() if name not in ROW_FIELDS
        }
        # `files.seal` replaces the placeholder `UNSEALED` by the checksum of the finished file.
        text = json.dumps({"format": FORMAT, **metadata, "seal": files.UNSEALED})
        numbers = pa.list_(pa.list_(pa.float64()))
        schema = pa.schema(
            {"operation": pa.string(), "values": pa.string(), "numbers": numbers}, {KEY: text}
        )
        buffer = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(rows, schema), buffer, **COMPRESSION)
        files.write(file, files.seal(buffer.getvalue()))
        return Path(file)

    @classmethod
    def load(cls, file: str | Path, content: bytes | None = None, most: int | None = None) -> Trace:
        """Read a trace from a file or from bytes.

        Args:
            file: The file to read. If `content` is given, it is only named in error messages.
            content: The content of a file that is not on disk, such as an uploaded file.
            most: The largest allowed number of values in a column; None for the usual limit.

        Raises:
            DataError: If the file is missing, truncated, damaged or not a trace. The message names
                the file.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        content = files.read(file) if content is None else content
        kind = "not a trace, or a damaged trace; write one with `gpulab record`"
        with (
            files.convert_read_errors(file, kind),
            pq.ParquetFile(pa.BufferReader(content)) as parquet,
        ):
            metadata = files.read_json(file, parquet.schema_arrow.metadata[KEY.encode()])
            if metadata.pop("format") != FORMAT:
                raise DataError(
                    f"{file}: expected a trace of format {FORMAT}, got another format; record the"
                    " step again"
                )
            files.check_seal(file, content)
            del metadata["seal"]
            files.check_table_size(file, parquet.metadata, most or MAX_COLUMN_NUMBERS)
            table = parquet.read()
            columns = (
                f"[{','.join(table[name].to_pylist())}]".encode()
                for name in ("operation", "values")
            )
            stored_ops, descriptions = (files.read_json(file, column) for column in columns)
            operations = [
                {ATTRIBUTES.get(key, key): value for key, value in op.items()} for op in stored_ops
            ]
            trace = TypeAdapter(cls).validate_python(
                {**metadata, "operations": operations, "values": {}}
            )
            arrays = table["numbers"].combine_chunks().flatten()
            starts = np.cumsum(arrays.value_lengths().to_numpy())[:-1]
            numbers = iter(np.split(arrays.flatten().to_numpy(), starts))
            all_descriptions = [description for row in descriptions for description in row]
            for name, *description in TypeAdapter(list[ValueDescription]).validate_python(
                all_descriptions
            ):
                trace.values[name] = _restore_value(description, numbers)
            missing = {name for op in trace.operations for name in op.values} - trace.values.keys()
            if missing or next(numbers, None) is not None:
                raise ValueError("operations refer to values that the file does not contain")
        return trace


# The description of a value in a row, in addition to its arrays: name, content, shape, type,
# whether it is exact, sums, and the dimensions with profiles (None if there is no reference).
ValueDescription: TypeAlias = tuple[str, str, list[int], str, bool, list[float], list[int] | None]


def _describe_value(value: Value) -> list[Json]:
    """Return the JSON description of a value, which leaves out its arrays."""
    dims = None if value.reference is None else list(value.profiles)
    return [value.content, value.shape, value.dtype, value.exact, value.total, dims]


def _arrays(value: Value) -> list[np.ndarray]:
    """Return the arrays of a value, in the order in which `_restore_value` reads them."""
    if value.reference is None:
        return [value.sketch]
    return [
        value.sketch,
        value.reference,
        *(profile.ravel() for profile in value.profiles.values()),
    ]


def _restore_value(description: list[Json], numbers: Iterator[np.ndarray]) -> Value:
    """Restore a saved value from its description and the next arrays of the file."""
    content, shape, dtype, exact, total, dims = description
    value = Value(content, shape, dtype, next(numbers), exact=exact, total=total)
    if dims is not None:
        value.reference = next(numbers)
        value.profiles = {dim: next(numbers).reshape(2, shape[dim]) for dim in dims}
    return value


def alignment_key(op: Operation) -> tuple[str, str, str]:
    """Return the key for aligning operations: phase, module and name.

    Equivalent kernels have the same name, by `KERNEL_ALIASES`.
    """
    return op.phase, op.module, KERNEL_ALIASES.get(op.name, op.name)


def align_operations(
    operations_a: list[Operation], operations_b: list[Operation]
) -> list[tuple[Operation | None, Operation | None]]:
    """Pair operations of two executions in order; an unmatched operation is paired with None."""
    first_keys = list(map(alignment_key, operations_a))
    second_keys = list(map(alignment_key, operations_b))
    if first_keys == second_keys:
        return list(zip(operations_a, operations_b, strict=True))
    pairs: list[tuple[Operation | None, Operation | None]] = []
    matcher = difflib.SequenceMatcher(None, first_keys, second_keys, autojunk=False)
    for tag, a, a_end, b, b_end in matcher.get_opcodes():
        if tag == "equal":
            pairs += zip(operations_a[a:a_end], operations_b[b:b_end], strict=True)
        else:
            pairs += [(op, None) for op in operations_a[a:a_end]]
            pairs += [(None, op) for op in operations_b[b:b_end]]
    return pairs
