"""The graph of one execution: the operations, their inputs and their outputs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gpulab.audits import _tolerances as tol
from gpulab.audits._traces import RESULT, Operation, Trace
from gpulab.audits._values import Value


@dataclass(frozen=True, eq=False)
class Node:
    """An operation, or the part of a list operation for one position in the lists.

    Attributes:
        op: The operation.
        inputs: The values that the operation reads.
        outputs: The values that the operation returns or changes.
        number: The index of the node in the graph.
    """

    op: Operation
    inputs: list[Value]
    outputs: list[Value]
    number: int


class Graph:
    """The operations of a trace as nodes, in order.

    Args:
        trace: The execution.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.nodes: list[Node] = []
        for op in trace.operations:
            if op.phase != RESULT:
                for input_names, output_names in _split_lanes(op):
                    inputs = [trace.values[name] for name in dict.fromkeys(input_names)]
                    outputs = [trace.values[name] for name in dict.fromkeys(output_names)]
                    self.nodes.append(Node(op, inputs, outputs, len(self.nodes)))

    @cached_property
    def maker(self) -> dict[Value, Node]:
        """The node that first made a value.

        A node that returns one of its inputs did not make the value, nor did a node that recreates
        an earlier value, for example by a second transposition.
        """
        makers: dict[Value, Node] = {}
        existing_values: set[Value] = set()
        for node in self.nodes:
            existing_values.update(node.inputs)
            makers |= {value: node for value in node.outputs if value not in existing_values}
            existing_values.update(node.outputs)
        return makers

    @cached_property
    def users(self) -> dict[Value, list[Node]]:
        """The nodes that have a value as an input."""
        users: dict[Value, list[Node]] = {}
        for node in self.nodes:
            for value in node.inputs:
                users.setdefault(value, []).append(node)
        return users

    @cached_property
    def node_of(self) -> dict[Operation, Node]:
        """The first node of an operation."""
        nodes: dict[Operation, Node] = {}
        for node in self.nodes:
            nodes.setdefault(node.op, node)
        return nodes

    @cached_property
    def pure_rounding_values(self) -> set[Value]:
        """Values that consist of rounding errors, and those computed only from them and from zeros.

        The running means of a normalisation are an example.
        """
        pure_rounding: set[Value] = set()
        for node in self.nodes:
            reals = [value for value in node.inputs if value.is_float_or_complex]
            has_rounding_input = any(value.deviation > tol.PURE_ROUNDING_RATIO for value in reals)
            has_rounding_input = has_rounding_input or not pure_rounding.isdisjoint(reals)
            if has_rounding_input and all(v.is_pure_rounding or v in pure_rounding for v in reals):
                pure_rounding.update(node.outputs)
            largest = max((_reference_norm(value) for value in reals), default=0.0)
            for value in node.outputs:
                if (
                    value.is_float_or_complex
                    and not value.sketch.any()
                    and 0 < _reference_norm(value) <= tol.CANCELLATION_RESIDUE * largest
                ):
                    # The recorded sum is zero, and the sum of the reference is negligible.
                    pure_rounding.add(value)
        return pure_rounding

    def values(self) -> list[Value]:
        """Return all values that nodes read or wrote, in order."""
        return list(
            dict.fromkeys(value for node in self.nodes for value in (*node.inputs, *node.outputs))
        )

    def following(self, values: set[Value]) -> set[Value]:
        """Return the given values and all values that were computed from them."""
        reached = set(values)
        for node in self.nodes:
            if not reached.isdisjoint(node.inputs):
                reached.update(node.outputs)
        return reached


def _reference_norm(value: Value) -> float:
    """Return the norm of a value's reference; 0 without a reference."""
    return float(np.linalg.norm(value.reference)) if value.reference is not None else 0.0


def _split_lanes(op: Operation) -> list[tuple[list[str], list[str]]]:
    """Return the inputs and outputs for each list position; most operations have only one position.

    >>> op = Operation(
    ...     "_foreach_add",
    ...     "",
    ...     "",
    ...     "",
    ...     ["a", "b", "x", "y", "rate"],
    ...     ["c", "d"],
    ...     [],
    ...     "",
    ...     lanes=[2, 2],
    ... )
    >>> _split_lanes(op)
    [(['a', 'x', 'rate'], ['c']), (['b', 'y', 'rate'], ['d'])]
    """
    outputs = [*op.outputs, *op.mutated_values]
    if not op.lanes:
        return [(op.inputs, outputs)]
    length, lists = op.lanes
    single_inputs = op.inputs[length * lists :]
    n_lane_outputs = len(op.outputs) // length * length
    single_outputs = outputs[n_lane_outputs:]
    return [
        (
            [op.inputs[lane + length * number] for number in range(lists)] + single_inputs,
            op.outputs[lane:n_lane_outputs:length] + single_outputs,
        )
        for lane in range(length)
    ]
