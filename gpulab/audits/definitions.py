"""Operations with several right answers: what an answer must fulfil, whichever of them a device gives.

A twin in float64 may well give another one, so that an answer is held against its definition instead. Each check gets
the call's arguments by name and its results, all in float64, and returns the answer's error, relative to its size, with
the number of roundings that explain it. None stands for a call that has one answer alone; `UNKNOWN` for what a check
cannot follow.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gpulab.audits.count_sketch import leaves
from gpulab.audits.twins import distance, norm

Answer = tuple[float | None, float | None]
UNKNOWN: Answer = None, None
WRONG: Answer = math.inf, 1.0
NO_PLACE_TWICE = {"sort", "topk"}


def _relative(result: Tensor, exact: Tensor) -> float:
    """The distance relative to the exact numbers that are finite; infinite for another number of them."""
    if result.shape != exact.shape:
        return math.inf
    apart = distance(result.double(), exact.double())
    size = norm(torch.where(exact.isfinite(), exact, 0.0))
    return apart / (size or 1.0)


# --- places of numbers, where several are equal ---------------------------------------------------------------


def _selection(operation: Any, name: str, arguments: dict[str, Any], results: list[Tensor]) -> Answer | None:
    """The numbers at the places named are those at the places that float64 names, and no place is named twice."""
    x, dim = arguments["self"], arguments.get("dim")
    *values, indices = results
    of_all = not values and not name.startswith("arg")  # the largest number of all, which comes without its place
    if of_all or arguments.get("indices") is not None or arguments.get("stable"):
        return None
    twin = operation(**{key: value for key, value in arguments.items() if key not in ("values", "indices")})
    exact_indices = twin[-1] if isinstance(twin, tuple) else twin
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
    if name in NO_PLACE_TWICE and x.dim() and bool((indices.sort(dim).values.diff(dim=dim) == 0).any()):
        return WRONG
    selected, exact = (x.gather(dim, where) if x.dim() else x for where in (indices, exact_indices))
    error = max((_relative(value, selected) for value in values), default=0.0)
    if name == "topk" and not arguments["sorted"]:
        selected, exact = (t.sort(dim).values for t in (selected, exact))
    return max(error, _relative(selected, exact)), 1.0


# --- several numbers written to one place ---------------------------------------------------------------------


def _written(operation: Any, name: str, arguments: dict[str, Any], results: list[Tensor]) -> Answer | None:  # noqa: ARG001
    """Where a place is named twice, either number may stay; of sums, and one number for all places, nobody can tell."""
    if arguments.get("reduce") is not None or arguments.get("accumulate") or "value" in arguments:
        return None
    return UNKNOWN if repeats(arguments) > 1 else None


def repeats(arguments: dict[str, Any]) -> int:
    """How often a place is named that is named most often; a mask names none twice."""
    indices = leaves(arguments.get("indices", arguments.get("index")))
    return min(1 if t.dtype == torch.bool else int(t.unique(return_counts=True)[1].max()) for t in indices)


# --- matrices --------------------------------------------------------------------------------------------------


def _factorisation(operation: Any, name: str, arguments: dict[str, Any], results: list[Tensor]) -> Answer | None:  # noqa: ARG001
    """The factors' product is the matrix, and the bases are orthogonal, whatever their signs and order.

    Of an n × n matrix roundings lead to about n units in the last place of its size (Higham 2002, Accuracy and
    Stability of Numerical Algorithms, ch. 19): these algorithms are backward stable.
    """
    matrix, factors = arguments["A"], results
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
        upper = arguments["UPLO"] == "U"
        matrix = matrix.triu() + matrix.triu(1).mT if upper else matrix.tril() + matrix.tril(-1).mT
        matrix, product, bases = matrix @ factors[1], factors[1] * factors[0].unsqueeze(-2), factors[1:]
    angles = [basis.mT @ basis for basis in bases]
    right = [torch.eye(each.shape[-1], dtype=each.dtype, device=each.device).expand_as(each) for each in angles]
    return max(map(_relative, [product, *angles], [matrix, *right])), float(max(matrix.shape[-2:]))


_SELECTIONS = """
    adaptive_max_pool2d adaptive_max_pool3d argmax argmin cummax cummin kthvalue max max_pool2d_with_indices
    max_pool3d_with_indices median min nanmedian sort topk
"""
DEFINITIONS: dict[str, Callable[[Any, str, dict[str, Any], list[Tensor]], Answer | None]] = (
    dict.fromkeys(_SELECTIONS.split(), _selection)
    | dict.fromkeys(("scatter", "index_copy", "index_put", "_index_put_impl"), _written)
    | dict.fromkeys(("_linalg_eigh", "_linalg_svd", "linalg_qr"), _factorisation)
    | dict.fromkeys(("_unique2", "linalg_eig", "linalg_lstsq", "mode"), lambda *_: UNKNOWN)
)
