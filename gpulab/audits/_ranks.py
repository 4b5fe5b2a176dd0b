"""Join the traces of the ranks of a distributed step, for a comparison with a single process."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gpulab.audits._collectives import RANKS
from gpulab.audits._comparison import LEAF_RESULTS
from gpulab.audits._matching import is_same_value
from gpulab.audits._tolerances import REFERENCE_TOLERANCE, REFERENCE_TOLERANCE_PER_DEVIATION
from gpulab.audits._traces import RANK, RANKS_NOTE, RESULT, Operation, Trace
from gpulab.audits._values import Value
from gpulab.errors import UsageError


def join_ranks(traces: Sequence[Trace | str | Path], file: str | Path | None = None) -> Trace:
    """Join the traces recorded by the ranks of a distributed step into one trace.

    `gpulab.audit` can then compare it with the trace of the same step in a single process. Each
    rank records the step with `gpulab.record`, for example under `torchrun`, after
    `torch.distributed.init_process_group`. All ranks must record, because the collectives exchange
    the float64 references as well.

    In the joined trace, a collective is one operation that has the values of all its ranks as
    inputs and outputs. Copies of a parameter that agree on all ranks are merged. If they do not
    agree, each copy is compared with the single process. Parts of a parameter or of a returned
    tensor are compared with the whole: for example the halves of a weight in tensor-parallel
    layers, or the outputs for parts of a batch. Returned numbers that differ between ranks, such as
    the loss of a part of a batch, have no counterpart in a single process and are only listed.

    `DistributedDataParallel` is supported, and so are the collectives all-reduce, broadcast,
    all-gather, reduce-scatter and all-to-all of `torch.distributed`, with gloo or NCCL. FSDP,
    DTensor and functional collectives, and messages between two ranks are not supported: recording
    the step raises an error that names them.

    Args:
        traces: The traces, or their files, in the order of the ranks.
        file: The file in which the joined trace is saved; None to save no file.

    Returns:
        The joined `Trace`.

    Raises:
        UsageError: If there is no trace, or if the ranks do not call the same collectives in the
            same order, for example because a trace is missing.

    Examples:
        In a script that `torchrun --nproc-per-node 2` starts:

        >>> def main(step, rank):
        ...     torch.distributed.init_process_group("gloo")
        ...     gl.record(step, "cpu", f"rank{rank}.trace")

        A step without collectives, joined from a single rank:

        >>> import torch
        >>> import gpulab as gl
        >>> step = gl.Step(torch.nn.Linear(4, 2), torch.ones(3, 4))
        >>> joined = gl.audits.join_ranks([gl.record(step, progress=False)])
        >>> gl.audit(gl.record(step, progress=False), joined).kind
        'rounding'
    """
    loaded = [t if isinstance(t, Trace) else Trace.load(t) for t in traces]
    if not loaded:
        raise UsageError("traces: expected one trace for each rank, got none")
    ranked = [_with_rank(trace, rank) for rank, trace in enumerate(loaded)]
    values = {name: value for trace in ranked for name, value in trace.values.items()}
    operations = _join_operations([_without_results(trace) for trace in ranked])
    results = _join_results(
        [[op for op in trace.operations if op.phase == RESULT] for trace in ranked], values
    )
    first = ranked[0]
    title = f"{len(ranked)} ranks" if len(ranked) > 1 else "1 rank"
    joined = replace(
        first,
        operations=[*operations, *results],
        values=values,
        overwritten=[entry for trace in ranked for entry in trace.overwritten],
        without_reference={
            name: reason for trace in ranked for name, reason in trace.without_reference.items()
        },
        notes={**first.notes, RANKS_NOTE: str(len(ranked))},
        label=f"{first.setting} ({title})",
        step=f"{first.step} on {title}",
    )
    if file is not None:
        joined.save(file)
    return joined


def _with_rank(trace: Trace, rank: int) -> Trace:
    """Return a trace with the rank in the names of its values."""

    def rename(names: Sequence[str]) -> list[str]:
        return [f"{rank}:{name}" for name in names]

    operations = [
        replace(
            op,
            inputs=rename(op.inputs),
            outputs=rename(op.outputs),
            mutated_values=rename(op.mutated_values),
        )
        for op in trace.operations
    ]
    values = {f"{rank}:{name}": value for name, value in trace.values.items()}
    return replace(trace, operations=operations, values=values)


def _without_results(trace: Trace) -> list[Operation]:
    return [op for op in trace.operations if op.phase != RESULT]


def _join_operations(operations_by_rank: list[list[Operation]]) -> list[Operation]:
    """Merge the operations of all ranks; a collective follows all earlier ones of its ranks.

    Each rank advances to its next collective. Then a group whose members all wait at the same
    collective is found, their calls are merged into one operation, and these ranks advance. This is
    repeated until no rank has an operation left.

    Raises:
        UsageError: If the ranks wait for each other at different collectives.
    """
    remaining = [deque(operations) for operations in operations_by_rank]
    joined: list[Operation] = []
    while True:
        for operations in remaining:
            while operations and not _is_collective(operations[0]):
                joined.append(operations.popleft())
        waiting = {rank: operations[0] for rank, operations in enumerate(remaining) if operations}
        if not waiting:
            return joined
        meeting_ranks = _find_meeting_ranks(waiting)
        if meeting_ranks is None:
            raise UsageError(_describe_deadlock(waiting, n_ranks=len(operations_by_rank)))
        joined.append(_merge_calls([remaining[rank].popleft() for rank in meeting_ranks]))


def _is_collective(op: Operation) -> bool:
    return RANKS in op.arguments


def _group_of(op: Operation) -> list[int]:
    ranks: list[int] = op.arguments[RANKS]
    return ranks


def _find_meeting_ranks(waiting: dict[int, Operation]) -> list[int] | None:
    """Return the ranks of a group that all wait at the same collective; None if no group does.

    Args:
        waiting: The collective at which each rank waits.
    """
    groups = map(_group_of, waiting.values())
    return next((members for members in groups if _meet(members, waiting)), None)


def _meet(members: Sequence[int], waiting: dict[int, Operation]) -> bool:
    """Return whether all ranks of a group wait at the same collective of that group."""
    calls = [waiting[rank] for rank in members if rank in waiting]
    names = {op.name for op in calls}
    return (
        len(calls) == len(members)
        and len(names) == 1
        and all(_group_of(op) == list(members) for op in calls)
    )


def _merge_calls(calls: Sequence[Operation]) -> Operation:
    """Merge the calls of a collective on its ranks into one operation with all their values."""
    return replace(
        calls[0],
        inputs=[name for op in calls for name in op.inputs],
        outputs=[name for op in calls for name in op.outputs],
        mutated_values=[name for op in calls for name in op.mutated_values],
    )


def _describe_deadlock(waiting: dict[int, Operation], n_ranks: int) -> str:
    """Describe at which collective each rank waits, for an error message."""
    places = "; ".join(
        f"rank {rank} is at {op.name} of ranks {_group_of(op)}, {op.line}"
        for rank, op in waiting.items()
    )
    return (
        f"the {n_ranks} traces do not reach the same collectives: {places}; expected the traces of"
        " all ranks, in order"
    )


def _join_results(
    results_by_rank: list[list[Operation]], values: dict[str, Value]
) -> list[Operation]:
    """Merge the results that agree on all ranks; name the rank in the others.

    A result of the first rank gets no argument `RANK`. A returned value gets the rank in its name
    only if the ranks do not agree.
    """
    copies_by_result: dict[tuple[str, str], list[tuple[int, Operation]]] = defaultdict(list)
    for rank, results in enumerate(results_by_rank):
        for op in results:
            copies_by_result[op.name, op.module].append((rank, op))
    joined = []
    for (name, _), copies in copies_by_result.items():
        distinct = _find_distinct(copies, values)
        is_returned = name not in LEAF_RESULTS
        for rank, op in distinct:
            arguments = op.arguments | {RANK: rank} if rank else op.arguments
            new_name = f"{name} of rank {rank}" if is_returned and len(distinct) > 1 else name
            joined.append(replace(op, name=new_name, arguments=arguments))
    return joined


def _find_distinct(
    copies: Sequence[tuple[int, Operation]], values: dict[str, Value]
) -> list[tuple[int, Operation]]:
    """Return the copies of a result that do not agree with a copy on an earlier rank."""
    distinct: list[tuple[int, Operation]] = []
    for rank, op in copies:
        if not any(_are_same(op, other, values) for _, other in distinct):
            distinct.append((rank, op))
    return distinct


def _are_same(a: Operation, b: Operation, values: dict[str, Value]) -> bool:
    """Return whether two results have equal values and belong to equal initial values."""
    pairs = [
        (values[x], values[y])
        for names in ((a.inputs, b.inputs), (a.outputs, b.outputs))
        for x, y in zip(*names, strict=False)
    ]
    same_length = len(a.outputs) == len(b.outputs) and len(a.inputs) == len(b.inputs)
    return same_length and all(is_same_value(x, y, _tolerance) for x, y in pairs)


def _tolerance(value: Value) -> float:
    """Return the relative distance up to which two references count as the same value."""
    return REFERENCE_TOLERANCE + REFERENCE_TOLERANCE_PER_DEVIATION * value.deviation
