"""Repeat an operation in float64 on the same arguments, or check its result by its definition.

If an operation has several correct results, float64 may return a different one. The result is then
checked against the definition of the operation. Each check receives the call and its results in
float64. It returns the relative error of the results, and the number of roundings that explain it.
It returns None for a call with only one correct result, and `UNCHECKABLE` for a call that it does
not support.
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
from gpulab.audits._count_sketch import FLOAT64_DEVICES, is_float_or_complex, to_float64_device

# The relative error, and the number of roundings that explain it.
DefinitionCheck = tuple[float | None, float | None]
UNCHECKABLE: DefinitionCheck = (None, None)
INVALID: DefinitionCheck = (math.inf, 1.0)
# The number of results before triangular factors, which are returned for the backward pass. Torch
# factorises the matrix or its transpose, depending on the layout in memory, and float64 may choose
# other pivots.
RESULTS_BEFORE_FACTORS = {"_linalg_det": 1, "_linalg_slogdet": 2, "_linalg_solve_ex": 1}
UNIQUE_INDEX_OPERATIONS = {"sort", "topk"}
# The smallest subnormal number of float32. Its conversion to float64 is zero if the machine flushes
# subnormal numbers to zero.
SMALLEST_SUBNORMAL = torch.tensor(1, dtype=torch.int32).view(torch.float32)


class Float64Reference:
    """An operation and its arguments in float64, which can be called with changed arguments.

    It returns only the results that are compared, the first `n_results`. `compute` may be another
    function of the same arguments.
    """

    def __init__(
        self,
        operation: OpOverload,
        args: Sequence[Nested],
        kwargs: dict[str, Nested],
        n_results: int,
    ) -> None:
        self.operation = operation
        self.n_results = n_results
        self.compute: Callable[..., Nested] = operation
        self.args, self.kwargs = map_nested(to_float64, (list(args), kwargs))
        self.is_in_place = writes_to_arguments(operation)

    @cached_property
    def arguments(self) -> dict[str, Nested]:
        """All arguments by name."""
        return named_arguments(self.operation, self.args, self.kwargs)

    @property
    def float_tensors(self) -> list[Tensor]:
        """The tensors among the arguments that hold floating-point or complex numbers."""
        return [t for t in find_tensors((self.args, self.kwargs)) if is_float_or_complex(t)]

    def __call__(
        self,
        change: Callable[[Tensor], Tensor] | None = None,
        positions: Sequence[int] | None = None,
    ) -> list[Tensor]:
        """Compute the results after a change of all arguments, or of those at some positions.

        Raises:
            RuntimeError: If a factorisation fails.
        """

        def apply_change(value: Nested) -> Nested:
            if change is None or not isinstance(value, Tensor) or not is_float_or_complex(value):
                return value
            return change(value)

        # Later calls need the original arguments.
        arguments = (self.args, self.kwargs)
        own_args, own_kwargs = (
            map_nested(_clone_tensor, arguments) if self.is_in_place else arguments
        )
        if positions is None:
            args, kwargs = map_nested(apply_change, (own_args, own_kwargs))
        else:
            args = [
                map_nested(apply_change, arg) if i in positions else arg
                for i, arg in enumerate(own_args)
            ]
            kwargs = own_kwargs
        out = self.compute(*args, **kwargs)
        if has_failed(self.operation, out):
            raise RuntimeError("a factorisation failed")
        results = prepare_rounded_results(returned_or_written(self.operation, args, out))
        return results[: self.n_results]

    def check_definition(self, name: str, out: Nested) -> DefinitionCheck | None:
        """Check a result by the definition of the operation; None if the operation has no check."""
        if name not in DEFINITIONS:
            return None
        return DEFINITIONS[name](self, name, find_tensors(map_nested(to_float64, out)))


def _clone_tensor(value: Nested) -> Nested:
    return value.clone() if isinstance(value, Tensor) else value


def to_float64(value: Nested) -> Nested:
    """Convert a real or complex tensor to float64, and move it to a device that has float64.

    Other tensors are only moved.
    """
    if isinstance(value, torch.device):
        return value if value.type in FLOAT64_DEVICES else torch.device("cpu")
    if not isinstance(value, Tensor):
        return value
    value = to_float64_device(value.detach())
    if value.is_complex():
        return value.to(torch.complex128)
    # If the machine flushes subnormal numbers to zero, so does a conversion. They are then
    # converted by their bits: the significand in units of the smallest subnormal number.
    if value.dtype == torch.float32 and not SMALLEST_SUBNORMAL.double():
        bits = value.view(torch.int32)
        sizes = (bits & 0x7FFFFF).double() * 2.0**-149
        return torch.where(
            bits & 0x7F800000 == 0, torch.where(bits < 0, -sizes, sizes), value.double()
        )
    return value.double() if value.is_floating_point() else value


def writes_to_arguments(operation: OpOverload) -> bool:
    """Return whether an operation writes to its arguments.

    Batch normalisation does, although its schema does not declare it.
    """
    return is_mutable(operation) or "batch_norm" in schema_name(operation)


def prepare_rounded_results(out: Nested) -> list[Tensor]:
    """Return the results of an operation that rounding affects, for comparisons in float64.

    These are the nonempty floating-point and complex tensors. They are detached from autograd's
    graph, and moved to the CPU if their device may not support float64. Their type does not change.
    """
    return [
        to_float64_device(t.detach())
        for t in find_tensors(out)
        if is_float_or_complex(t) and t.numel()
    ]


def norm(tensor: Tensor) -> float:
    """Return the Euclidean norm of all numbers, computed in float64."""
    dtype = torch.complex128 if tensor.is_complex() else torch.float64
    return float(torch.linalg.vector_norm(tensor, dtype=dtype))


def difference_norm(result: Tensor, exact: Tensor) -> float:
    """Return the norm of the difference; NaN and infinity in both tensors count as equal."""
    difference = exact - result
    size = norm(difference)
    if not math.isnan(size):
        return size
    is_equal = (result == exact) | (result.isnan() & exact.isnan())
    return norm(torch.where(is_equal, 0.0, difference))


# --- operations with several correct results ------------------------------------------------------


def _relative_error(result: Tensor, exact: Tensor) -> float:
    """Return the norm of the difference, relative to the norm of the finite exact numbers."""
    error = difference_norm(result.double(), exact.double())
    size = norm(torch.where(exact.isfinite(), exact, 0.0))
    return error / (size or 1.0)


# --- indices of numbers, some of which are equal --------------------------------------------------


def _check_selection(
    reference: Float64Reference, name: str, results: list[Tensor]
) -> DefinitionCheck | None:
    """Check that returned indices select the same numbers as in float64.

    The indices of `sort` and `topk` also have to be distinct. The check does not apply if no
    indices are returned, or if the operation is stable.
    """
    arguments = reference.arguments
    x = arguments["self"]
    dim = arguments.get("dim")
    *values, indices = results
    # The maximum or minimum over all numbers is returned without its index.
    has_no_index = not values and not name.startswith("arg")
    if has_no_index or arguments.get("indices") is not None or arguments.get("stable"):
        return None
    exact_results = reference.operation(
        **{key: value for key, value in arguments.items() if key not in ("values", "indices")}
    )
    exact_indices = exact_results[-1] if isinstance(exact_results, tuple) else exact_results
    if "pool" in name:
        sides = 3 if "3d" in name else 2
        x, indices, exact_indices = (t.flatten(-sides) for t in (x, indices, exact_indices))
        values = [t.flatten(-sides) for t in values]
        dim = -1
    elif dim is None:
        x, indices, exact_indices = (t.flatten() for t in (x, indices, exact_indices))
        dim = 0
    elif indices.dim() < x.dim():
        indices, exact_indices, *values = (
            t.unsqueeze(dim) for t in (indices, exact_indices, *values)
        )
    length = x.shape[dim] if x.dim() else 1
    if indices.shape != exact_indices.shape or bool(((indices < 0) | (indices >= length)).any()):
        return INVALID
    if (
        name in UNIQUE_INDEX_OPERATIONS
        and x.dim()
        and bool((indices.sort(dim).values.diff(dim=dim) == 0).any())
    ):
        return INVALID
    selected, exact = (x.gather(dim, index) if x.dim() else x for index in (indices, exact_indices))
    error = max((_relative_error(value, selected) for value in values), default=0.0)
    if name == "topk" and not arguments["sorted"]:
        selected, exact = (t.sort(dim).values for t in (selected, exact))
    return max(error, _relative_error(selected, exact)), 1.0


# --- several numbers written to one index ---------------------------------------------------------


def _check_written(reference: Float64Reference, *_: object) -> DefinitionCheck | None:
    """Report a call as uncheckable if it writes different numbers to the same index.

    Any of the numbers may be the final one. The result is unique if they are summed, if one number
    is written everywhere, or if no index occurs twice.
    """
    arguments = reference.arguments
    is_summed = arguments.get("reduce") is not None or arguments.get("accumulate")
    if is_summed or "value" in arguments or max_index_repeats(arguments) <= 1:
        return None
    return UNCHECKABLE


def max_index_repeats(arguments: dict[str, Nested]) -> int:
    """Bound the number of writes to one element: occurrences of the most frequent index.

    With several index tensors, the smallest of their numbers is returned. A mask counts as 1.
    """
    indices = find_tensors(arguments.get("indices", arguments.get("index")))
    repeats = []
    for t in indices:
        if t.dtype == torch.bool:
            repeats.append(1)
        else:
            _, counts = t.unique(return_counts=True)
            repeats.append(int(counts.max()))
    return min(repeats)


# --- matrices -------------------------------------------------------------------------------------


def _check_factorisation(
    reference: Float64Reference, name: str, factors: list[Tensor]
) -> DefinitionCheck | None:
    """Check that the product of the factors is the matrix, and that the bases are orthogonal.

    Neither the signs of vectors nor the choice of a basis for equal eigenvalues affects this.

    For an n × n matrix, rounding errors amount to about n units in the last place of its size
    (Higham 2002, Accuracy and Stability of Numerical Algorithms, ch. 19), because these algorithms
    are backward stable.
    """
    matrix = reference.arguments["A"]
    if matrix.is_complex() or not all(
        t.numel() and bool(t.isfinite().all()) for t in (matrix, *factors)
    ):
        return UNCHECKABLE
    if name == "linalg_qr":
        q, r = factors
        product = q @ r
        bases = [q]
    elif name == "_linalg_svd":
        u, singular_values, vh = factors
        rank = singular_values.shape[-1]
        product = u[..., :rank] * singular_values.unsqueeze(-2) @ vh[..., :rank, :]
        bases = [u, vh.mT]
    else:  # `_linalg_eigh` reads only one triangle of a symmetric matrix
        eigenvalues, eigenvectors = factors
        upper = reference.arguments["UPLO"] == "U"
        matrix = matrix.triu() + matrix.triu(1).mT if upper else matrix.tril() + matrix.tril(-1).mT
        # The definition is A V = V diag(λ), so the left side is compared with the right one.
        matrix = matrix @ eigenvectors
        product = eigenvectors * eigenvalues.unsqueeze(-2)
        bases = [eigenvectors]
    grams = [basis.mT @ basis for basis in bases]
    identities = [
        torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device).expand_as(gram)
        for gram in grams
    ]
    error = max(map(_relative_error, [product, *grams], [matrix, *identities]))
    return error, float(max(matrix.shape[-2:]))


def _check_lu(
    reference: Float64Reference, name: str, results: list[Tensor]
) -> DefinitionCheck | None:
    """Check that the product of triangular factors is the matrix.

    Which of two nearly equal pivots is chosen depends on rounding, so the factors may differ.

    For an n × n matrix, rounding errors amount to about n units in the last place, multiplied by
    the growth factor: the largest pivot, relative to the largest number of the matrix (Higham 2002,
    section 9.3).
    """
    matrix = reference.arguments["A"]
    factors = results[:-1] if name == "linalg_lu_factor_ex" else results  # without `info`
    is_finite = all(t.numel() and bool(t.isfinite().all()) for t in (matrix, *factors))
    if matrix.is_complex() or not is_finite:
        return UNCHECKABLE
    if name == "linalg_lu_factor_ex":
        factors = list(torch.lu_unpack(factors[0], factors[1]))
    permutation, lower, upper = factors
    growth = float(upper.abs().max() / matrix.abs().max())
    error = _relative_error(permutation @ lower @ upper, matrix)
    return error, float(max(matrix.shape[-2:])) * max(growth, 1.0)


def _reject_check(*_: object) -> DefinitionCheck:
    """Report that an operation is uncheckable, because there is no check for it."""
    return UNCHECKABLE


_SELECTIONS = """
    adaptive_max_pool2d adaptive_max_pool3d argmax argmin cummax cummin kthvalue max
    max_pool2d_with_indices max_pool3d_with_indices median min nanmedian sort topk
"""
DEFINITIONS: dict[str, Callable[[Float64Reference, str, list[Tensor]], DefinitionCheck | None]] = (
    dict.fromkeys(_SELECTIONS.split(), _check_selection)
    | dict.fromkeys(("scatter", "index_copy", "index_put", "_index_put_impl"), _check_written)
    | dict.fromkeys(("_linalg_eigh", "_linalg_svd", "linalg_qr"), _check_factorisation)
    | dict.fromkeys(("linalg_lu", "linalg_lu_factor_ex"), _check_lu)
    | dict.fromkeys(("_unique2", "linalg_eig", "linalg_lstsq", "mode"), _reject_check)
)
