"""What an operation was called with, read from a trace: the arguments that are no tensors, by name."""

from __future__ import annotations

import ast
import math
from typing import Any, NamedTuple

TENSOR = "·"  # what stands for one
OF_DATA = 2.0**-12  # numbers as near as this may have been computed from the data, and rounded otherwise
# What says how to compute, where to put it or for whom, and not what.
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
    "return_debug_mask",
}
SYNONYMS = {"epsilon": "eps", "exponential_average_factor": "momentum", "train": "training"}


class Call(NamedTuple):
    """The arguments of a call as they are written: in their places, and by name."""

    placed: list[str]
    named: dict[str, str]


def differing(name_a: str, called_a: str, name_b: str, called_b: str) -> dict[str, tuple[str, str]]:
    """The arguments that two calls disagree on: name, and both values as they are written.

    Tensors are not compared, nor arguments that say how to compute something and not what, such as a
    memory format or the gradients that are asked for, nor numbers that differ by a rounding. Two kernels
    of different names are compared in the arguments that they share. A call that cannot be read
    disagrees on nothing.

    >>> differing("gelu", "(['·'], {})", "gelu", "(['·'], {'approximate': 'tanh'})")
    {'approximate': ("'none'", "'tanh'")}
    """
    if name_a == name_b and called_a == called_b:
        return {}
    call_a, call_b = _read(called_a), _read(called_b)
    if call_a is None or call_b is None:
        return {}
    kernels = name_a != name_b  # each of which may fill in what it was not given
    schema_a = _schema(name_a, call_a) if kernels else _schema(name_a, call_a, call_b)
    schema_b = _schema(name_b, call_b) if kernels else schema_a
    a, b = _named(call_a, schema_a), _named(call_b, schema_b)
    names = (a.keys() & b.keys() if kernels else a.keys() | b.keys()) - HOW
    values = {name: (a.get(name, "nothing"), b.get(name, "nothing")) for name in sorted(names)}
    return {name: pair for name, pair in values.items() if not _agree(*pair, kernels)}


def are_numbers(*written: str) -> bool:
    """Whether every one of these values is a number with a fraction, as what is computed from data is."""
    return all(_number(value) is not None and not value.lstrip("-").isdigit() for value in written)


def _agree(a: str, b: str, kernels: bool) -> bool:
    if a == b or TENSOR in a + b or (kernels and "None" in (a, b)):
        return True
    x, y = _number(a), _number(b)
    return x is not None and y is not None and math.isclose(x, y, rel_tol=OF_DATA)


def _number(written: str) -> float | None:
    try:
        return float(written)
    except ValueError:
        return None


def _named(call: Call, schema: Any) -> dict[str, str]:
    """The arguments of a call by name, as text, with the operation's defaults for those not given."""
    if schema is None:
        return {f"argument {place + 1}": value for place, value in enumerate(call.placed)} | call.named
    defaults = {a.name: repr(a.default_value) for a in schema.arguments if a.has_default_value()}
    placed = {a.name: value for a, value in zip(schema.arguments, call.placed, strict=False)}
    return {SYNONYMS.get(name, name): value for name, value in (defaults | placed | call.named).items()}


def _read(called: str) -> Call | None:
    """The text of each argument, without evaluating any."""
    try:
        tree = ast.parse(called, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    match tree:
        case ast.Tuple(elts=[ast.List(elts=placed), ast.Dict(keys=keys, values=values)]):
            named = zip(keys, values, strict=True)
            texts = {str(key.value): _text(value) for key, value in named if isinstance(key, ast.Constant)}
            return Call([_text(value) for value in placed], texts)
    return None


def _text(node: ast.expr) -> str:
    return TENSOR if isinstance(node, ast.Constant) and node.value == TENSOR else ast.unparse(node)


def _schema(operation: str, *calls: Call) -> Any:
    """The operation's overload that these calls fit, and best: a number may stand for a tensor. None if unknown."""
    import torch

    packets = [getattr(torch.ops.aten, name, None) for name in (operation, f"{operation}_")]
    schemas = [getattr(packet, name)._schema for packet in packets if packet for name in packet.overloads()]
    fitting = [schema for schema in schemas if all(_fits(schema, call) for call in calls)]
    return max(fitting, key=lambda schema: sum(_tensors_in_place(schema, call) for call in calls), default=None)


def _fits(schema: Any, call: Call) -> bool:
    positional = [argument for argument in schema.arguments if not argument.kwarg_only]
    names = {argument.name for argument in schema.arguments}
    filled = {argument.name for argument in positional[: len(call.placed)]} | call.named.keys()
    needed = {argument.name for argument in schema.arguments if not argument.has_default_value()}
    return len(call.placed) <= len(positional) and call.named.keys() <= names and needed <= filled


def _tensors_in_place(schema: Any, call: Call) -> int:
    pairs = zip(schema.arguments, call.placed, strict=False)
    return sum(("Tensor" in str(argument.type)) == (TENSOR in value) for argument, value in pairs)
