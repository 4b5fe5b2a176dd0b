"""What an operation's result is held against: the same call in float64, on the same arguments.

Of an operation with several right answers a reference in float64 may well give another one, so that an answer is held
against its definition instead. Each check gets the call and its results, all in float64, and returns the answer's
error, relative to its size, with the number of roundings that explain it. None stands for a call that has one answer
alone; `UNKNOWN` for what a check cannot follow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from gpulab._torch_internals import (
    Nested,
    OpOverload,
    find_tensors,
    has_failed,
    is_mutable,
    map_nested,
    named_arguments,
    returned_or_written,
    schema_name,
)
from gpulab.audits.count_sketch import FLOAT64_DEVICES, rounds, to_float64_device

Answer = tuple[float | None, float | None]
UNKNOWN: Answer = None, None
WRONG: Answer = math.inf, 1.0
UNIQUE_INDEX_OPERATIONS = {"sort", "topk"}
SMALLEST = torch.tensor(1, dtype=torch.int32).view(torch.float32)  # the smallest subnormal number


class Float64Reference:
    """An operation and its arguments in float64, to be called on these as they are or changed.

    It returns so many of the results as are compared. `compute` may be another function of the same arguments.
    """

    def __init__(self, operation: OpOverload, args: Sequence[Nested], kwargs: dict[str, Nested], results: int) -> None:
        self.operation, self.results = operation, results
        self.compute: Callable[..., Nested] = operation
        self.args, self.kwargs = map_nested(in_float64, (list(args), kwargs))
        self.in_place = writes(operation)

    @cached_property
    def named(self) -> dict[str, Nested]:
        """All arguments by name."""
        return named_arguments(self.operation, self.args, self.kwargs)

    @property
    def numbers(self) -> list[Tensor]:
        """The tensors of numbers that rounding can touch."""
        return [t for t in find_tensors((self.args, self.kwargs)) if rounds(t)]

    def __call__(
        self, change: Callable[[Tensor], Tensor] = lambda x: x, positions: Sequence[int] | None = None
    ) -> list[Tensor]:
        """The results of arguments that are changed first, all or those at some places."""

        def changed(value: Nested) -> Nested:
            return change(value) if isinstance(value, Tensor) and rounds(value) else value

        args, kwargs = (self.args, self.kwargs)
        if self.in_place:  # what the operation overwrites is still needed
            args, kwargs = map_nested(_cloned, (args, kwargs))
        args = [map_nested(changed, arg) if positions is None or i in positions else arg for i, arg in enumerate(args)]
        out = self.compute(*args, **(map_nested(changed, kwargs) if positions is None else kwargs))
        if has_failed(self.operation, out):
            raise RuntimeError("a factorisation failed")
        return rounded_results(returned_or_written(self.operation, args, out))[: self.results]

    def check_definition(self, name: str, out: Nested) -> Answer | None:
        """What the definition of an operation with several right answers says of what it returned."""
        if name not in DEFINITIONS:
            return None
        return DEFINITIONS[name](self, name, find_tensors(map_nested(in_float64, out)))


def _cloned(value: Nested) -> Nested:
    return value.clone() if isinstance(value, Tensor) else value


def in_float64(value: Nested) -> Nested:
    """A tensor of real or complex numbers in float64, any other as it is; both on a device that has float64."""
    if isinstance(value, torch.device):
        return value if value.type in FLOAT64_DEVICES else torch.device("cpu")
    if not isinstance(value, Tensor):
        return value
    value = to_float64_device(value.detach())
    if value.is_complex():
        return value.to(torch.complex128)
    if value.dtype == torch.float32 and not SMALLEST.double():  # a cast takes subnormal numbers for zero then, too
        bits = value.view(torch.int32)
        sizes = (bits & 0x7FFFFF).double() * 2.0**-149
        return torch.where(bits & 0x7F800000 == 0, torch.where(bits < 0, -sizes, sizes), value.double())
    return value.double() if value.is_floating_point() else value


def writes(operation: OpOverload) -> bool:
    """Whether an operation writes to its arguments; a batch normalisation does, and its schema does not say so."""
    return is_mutable(operation) or "batch_norm" in schema_name(operation)


def rounded_results(out: Nested) -> list[Tensor]:
    """The tensors that an operation returned whose numbers are rounded."""
    return [to_float64_device(t.detach()) for t in find_tensors(out) if rounds(t) and t.numel()]


def norm(tensor: Tensor) -> float:
    """The Euclidean norm of all numbers, computed in float64."""
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    return float(torch.linalg.vector_norm(tensor, dtype=wide))


def distance(result: Tensor, exact: Tensor) -> float:
    """The norm of the difference; where both are infinite with one sign, or both NaN, nothing."""
    gap = exact - result
    apart = norm(gap)
    if not math.isnan(apart):
        return apart
    same = (result == exact) | (result.isnan() & exact.isnan())
    return norm(torch.where(same, 0.0, gap))


# --- operations with several right answers --------------------------------------------------------------------


def _relative(result: Tensor, exact: Tensor) -> float:
    """The distance relative to the exact numbers that are finite."""
    apart = distance(result.double(), exact.double())
    size = norm(torch.where(exact.isfinite(), exact, 0.0))
    return apart / (size or 1.0)


# --- places of numbers, where several are equal ---------------------------------------------------------------


def _selection(reference: Float64Reference, name: str, results: list[Tensor]) -> Answer | None:
    """The numbers at the places named are those at the places that float64 names, and no place is named twice."""
    arguments = reference.named
    x, dim = arguments["self"], arguments.get("dim")
    *values, indices = results
    of_all = not values and not name.startswith("arg")  # the largest number of all, which comes without its place
    if of_all or arguments.get("indices") is not None or arguments.get("stable"):
        return None
    made = reference.operation(**{key: value for key, value in arguments.items() if key not in ("values", "indices")})
    exact_indices = made[-1] if isinstance(made, tuple) else made
    if "pool" in name:
        sides = 3 if "3d" in name else 2
        x, indices, exact_indices = (t.flatten(-sides) for t in (x, indices, exact_indices))
        values, dim = [t.flatten(-sides) for t in values], -1
    elif dim is None:
        x, indices, exact_indices, dim = x.flatten(), indices.flatten(), exact_indices.flatten(), 0
    elif indices.dim() < x.dim():
        indices, exact_indices, *values = (t.unsqueeze(dim) for t in (indices, exact_indices, *values))
    length = x.shape[dim] if x.dim() else 1
    if indices.shape != exact_indices.shape or bool(((indices < 0) | (indices >= length)).any()):
        return WRONG
    if name in UNIQUE_INDEX_OPERATIONS and x.dim() and bool((indices.sort(dim).values.diff(dim=dim) == 0).any()):
        return WRONG
    selected, exact = (x.gather(dim, where) if x.dim() else x for where in (indices, exact_indices))
    error = max((_relative(value, selected) for value in values), default=0.0)
    if name == "topk" and not arguments["sorted"]:
        selected, exact = (t.sort(dim).values for t in (selected, exact))
    return max(error, _relative(selected, exact)), 1.0


# --- several numbers written to one place ---------------------------------------------------------------------


def _written(reference: Float64Reference, *_: object) -> Answer | None:
    """Where a place is named twice, either number may stay; of sums, and one number for all places, nobody can tell."""
    summed = reference.named.get("reduce") is not None or reference.named.get("accumulate")
    return UNKNOWN if not summed and "value" not in reference.named and repeats(reference.named) > 1 else None


def repeats(arguments: dict[str, Nested]) -> int:
    """How often a place is named that is named most often; a mask names none twice."""
    indices = find_tensors(arguments.get("indices", arguments.get("index")))
    return min(1 if t.dtype == torch.bool else int(t.unique(return_counts=True)[1].max()) for t in indices)


# --- matrices --------------------------------------------------------------------------------------------------


def _factorisation(reference: Float64Reference, name: str, factors: list[Tensor]) -> Answer | None:
    """The factors' product is the matrix, and the bases are orthogonal, whatever their signs and order.

    Of an n × n matrix roundings lead to about n units in the last place of its size (Higham 2002, Accuracy and
    Stability of Numerical Algorithms, ch. 19): these algorithms are backward stable.
    """
    matrix = reference.named["A"]
    if matrix.is_complex() or not all(t.numel() and bool(t.isfinite().all()) for t in (matrix, *factors)):
        return UNKNOWN
    bases = factors[:1]
    if name == "linalg_qr":
        product = factors[0] @ factors[1]
    elif name == "_linalg_svd":
        rank = factors[1].shape[-1]
        product = factors[0][..., :rank] * factors[1].unsqueeze(-2) @ factors[2][..., :rank, :]
        bases = [factors[0], factors[2].mT]
    else:  # the eigenvectors of a symmetric matrix, of which one triangle is read
        upper = reference.named["UPLO"] == "U"
        matrix = matrix.triu() + matrix.triu(1).mT if upper else matrix.tril() + matrix.tril(-1).mT
        matrix, product, bases = matrix @ factors[1], factors[1] * factors[0].unsqueeze(-2), factors[1:]
    angles = [basis.mT @ basis for basis in bases]
    right = [torch.eye(each.shape[-1], dtype=each.dtype, device=each.device).expand_as(each) for each in angles]
    return max(map(_relative, [product, *angles], [matrix, *right])), float(max(matrix.shape[-2:]))


_SELECTIONS = """
    adaptive_max_pool2d adaptive_max_pool3d argmax argmin cummax cummin kthvalue max max_pool2d_with_indices
    max_pool3d_with_indices median min nanmedian sort topk
"""
DEFINITIONS: dict[str, Callable[[Float64Reference, str, list[Tensor]], Answer | None]] = (
    dict.fromkeys(_SELECTIONS.split(), _selection)
    | dict.fromkeys(("scatter", "index_copy", "index_put", "_index_put_impl"), _written)
    | dict.fromkeys(("_linalg_eigh", "_linalg_svd", "linalg_qr"), _factorisation)
    | dict.fromkeys(("_unique2", "linalg_eig", "linalg_lstsq", "mode"), lambda *_: UNKNOWN)
)
