"""The collective operations of `torch.distributed` that the audit follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpulab._torch_internals import (
    Nested,
    OpOverload,
    argument_names,
    find_tensors,
    operation_name,
    process_group_ranks,
    wait_for_collective,
)
from gpulab.errors import UsageError

_FOLLOWED_COLLECTIVES = """
    allgather _allgather_base allreduce alltoall alltoall_base broadcast _reduce_scatter_base
"""
FOLLOWED_COLLECTIVES = frozenset(_FOLLOWED_COLLECTIVES.split())
SYNCHRONISATIONS = {"barrier", "monitored_barrier"}
RANKS = "ranks"  # the argument of a recorded collective that names its process group
# Operations of these namespaces exchange numbers in ways that the audit does not follow.
REFUSED_NAMESPACES = {
    "_c10d_functional": "functional collectives, which DTensor and compiled code use,",
    "_c10d_functional_autograd": "functional collectives, which DTensor and compiled code use,",
    "fsdp": "fully sharded parameters (fully_shard)",
    "symm_mem": "symmetric memory",
}
REFUSED_MODULES = {"FullyShardedDataParallel", "FSDPModule"}


@dataclass(frozen=True)
class Collective:
    """A call of a collective.

    Attributes:
        sent: The tensors that this rank sends.
        received: The tensors that this rank receives.
        ranks: The ranks of the process group, in order.
    """

    sent: list[Tensor]
    received: list[Tensor]
    ranks: list[int]


def find_collective(operation: OpOverload, args: Sequence[Nested]) -> Collective | None:
    """Return what a collective exchanges; None for any other operation.

    Raises:
        UsageError: If the operation exchanges numbers in a way that the audit does not follow.
    """
    namespace = operation.namespace
    if namespace in REFUSED_NAMESPACES:
        raise _refusal(REFUSED_NAMESPACES[namespace])
    name = operation_name(operation)
    if namespace != "c10d" or name in SYNCHRONISATIONS:
        return None
    if name not in FOLLOWED_COLLECTIVES:
        raise _refusal(f"the collective {name}")
    group = argument_names(operation).index("process_group")
    # `allreduce` and `broadcast` write to their inputs.
    sent = args[0] if group == 1 else args[1]
    return Collective(find_tensors(sent), find_tensors(args[0]), process_group_ranks(args[group]))


def run_collective(
    operation: OpOverload, args: Sequence[Nested], kwargs: dict[str, Nested]
) -> Nested:
    """Run a collective, and wait until its results are available.

    gloo implements reduce-scatter in two parts, and copies the result again each time that the
    caller waits. So the caller receives the handle of another, completed collective instead.
    """
    out = operation(*args, **kwargs)
    wait_for_collective(out)
    if "reduce_scatter" in operation_name(operation):
        group = args[argument_names(operation).index("process_group")]
        _, finished = torch.ops.c10d.broadcast_([torch.zeros_like(args[0])], group, 0, 0)
        wait_for_collective(finished)
        return args[0], finished
    return out


def check_module(module: torch.nn.Module) -> None:
    """Raise `UsageError` for a module whose parameters are spread over ranks by FSDP."""
    names = {base.__name__ for base in type(module).__mro__}
    if names & REFUSED_MODULES:
        raise _refusal("fully sharded parameters (FSDP)")


def _refusal(what: str) -> UsageError:
    """Make the error for something that exchanges numbers and cannot be followed."""
    return UsageError(
        f"{what} cannot be followed: expected the collectives"
        f" {', '.join(sorted(FOLLOWED_COLLECTIVES))} of torch.distributed, as in DDP and"
        " tensor-parallel layers"
    )
