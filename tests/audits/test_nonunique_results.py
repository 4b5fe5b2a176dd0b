"""Any correct result of an operation with several is accepted, and wrong results are not."""

from typing import NamedTuple

import pytest
import torch
from torch import nn

import gpulab as gl
from gpulab.audits._rounding import Accuracy
from tests.audits._helpers import audited, compared, drawn, seeded

aten = torch.ops.aten


TIES = torch.tensor([[3.0, 2, 3, 2, 1, 1, 3, 3], [0, 5, 5, -1, 5, 2, 2, 2]])


def is_right(operation, args, out, **kwargs):
    seen = compared(operation, args, out, **kwargs)
    assert seen.error is not None
    return bool(seen.error <= seen.bound)


def places(*rows):
    return torch.tensor(rows)


# --- places of numbers ----------------------------------------------------------------------------


class Selection(NamedTuple):
    """An operation that selects numbers of each row of `TIES` and returns their indices."""

    id: str
    operation: torch._ops.OpOverload
    options: tuple  # the arguments after the tensor
    right: list[list]  # places that are right
    wrong: list[list]  # places that are wrong


SELECTIONS = [
    Selection(
        "topk",
        aten.topk.default,
        (2, 1),
        right=[[[0, 2], [1, 2]], [[7, 6], [4, 1]]],
        wrong=[[[0, 0], [1, 2]], [[0, 1], [1, 2]], [[0, 8], [1, 2]]],
    ),
    Selection(
        "topk without order",
        aten.topk.default,
        (3, 1, False, False),
        right=[[[4, 5, 1], [3, 0, 5]], [[3, 5, 4], [7, 0, 3]]],
        wrong=[[[4, 5, 0], [3, 0, 5]]],
    ),
    Selection("max", aten.max.dim, (1, False), right=[[0, 1], [7, 4]], wrong=[[1, 1]]),
    Selection(
        "min",
        aten.min.dim,
        (1, True),
        right=[[[4], [3]], [[5], [3]]],
        wrong=[[[4], [0]]],
    ),
    Selection("median", aten.median.dim, (1,), right=[[1, 5], [3, 7]], wrong=[[4, 5]]),
    Selection("nanmedian", aten.nanmedian.dim, (1,), right=[[1, 5], [3, 6]], wrong=[[1, 1]]),
    Selection("kthvalue", aten.kthvalue.default, (2, 1), right=[[4, 0], [5, 0]], wrong=[[4, 3]]),
    Selection(
        "sort",
        aten.sort.default,
        (1,),
        right=[
            [[4, 5, 1, 3, 0, 2, 6, 7], [3, 0, 5, 6, 7, 1, 2, 4]],
            [[5, 4, 3, 1, 7, 6, 2, 0], [3, 0, 7, 6, 5, 4, 2, 1]],
        ],
        wrong=[
            [[4, 4, 1, 3, 0, 2, 6, 7], [3, 0, 5, 6, 7, 1, 2, 4]],
            [[4, 1, 5, 3, 0, 2, 6, 7], [3, 0, 5, 6, 7, 1, 2, 4]],
        ],
    ),
    Selection(
        "cummax",
        aten.cummax.default,
        (1,),
        right=[
            [[0, 0, 2, 2, 2, 2, 6, 7], [0, 1, 2, 2, 4, 4, 4, 4]],
            [[0, 0, 0, 0, 0, 0, 0, 0], [0, 1, 1, 1, 1, 1, 1, 1]],
        ],
        wrong=[[[0, 1, 2, 2, 2, 2, 6, 7], [0, 1, 1, 1, 1, 1, 1, 1]]],
    ),
]


def selected_numbers(index):
    """Return the numbers of `TIES` at the given indices of each row."""
    rows = index if index.dim() == 2 else index[:, None]
    return TIES.gather(1, rows.clamp(max=7)).view(index.shape)


@pytest.mark.parametrize("case", SELECTIONS, ids=lambda case: case.id)
def test_forward_error_accepts_any_of_equal_numbers_that_is_selected(case):
    args = (TIES, *case.options)
    for right in map(torch.tensor, case.right):
        assert is_right(case.operation, args, (selected_numbers(right), right))
    for wrong in map(torch.tensor, case.wrong):
        assert not is_right(case.operation, args, (selected_numbers(wrong), wrong))
    right = torch.tensor(case.right[0])
    other_values = selected_numbers(right) + 1e-3
    assert not is_right(case.operation, args, (other_values, right))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16], ids=str)
def test_forward_error_of_argmax_and_argmin_accepts_any_place_of_the_extreme(dtype):
    x = TIES.to(dtype)
    for right in (9, 10, 12):
        assert is_right(aten.argmax.default, (x,), torch.tensor(right))
    assert not is_right(aten.argmax.default, (x,), torch.tensor(0))
    assert is_right(aten.argmin.default, (x, 1), places(5, 3))
    assert is_right(aten.argmin.default, (x, 1, True), places([5], [3]))
    assert not is_right(aten.argmin.default, (x, 1), places(6, 3))
    assert is_right(aten.argmax.default, (x[0, 0],), torch.tensor(0)), "a number alone"


def test_forward_error_of_max_pool_accepts_any_of_the_largest_numbers():
    x = torch.tensor([[[[1.0, 5, 0, 2], [5, 3, 2, 1]]]])
    args = (x, [2, 2], [2, 2])
    pool = aten.max_pool2d_with_indices.default
    for largest, *where, right in [
        (2, 1, 3, True),
        (2, 4, 6, True),
        (2, 1, 2, False),
        (3, 1, 5, False),
    ]:
        assert (
            is_right(pool, args, (torch.tensor([[[[5.0, largest]]]]), places([[where]]))) is right
        )


# --- several numbers in one place -----------------------------------------------------------------


def test_forward_error_of_scatter_accepts_any_of_several_numbers_written_to_one_place():
    before, once, twice, source = (
        drawn(6),
        torch.tensor([0, 1, 2]),
        torch.tensor([0, 1, 1]),
        drawn(3, seed=1),
    )
    for operation, args in [
        (aten.scatter.src, (before, 0, once, source)),
        (aten.index_copy.default, (before, 0, once, source)),
        (aten.index_put.default, (before, [once], source)),
    ]:
        made = operation(*args)
        assert is_right(operation, args, made)
        assert not is_right(operation, args, made + 0.5)
    made = aten.scatter.src(before, 0, twice, source)
    assert compared(aten.scatter.src, (before, 0, twice, source), made) == Accuracy()
    sums = aten.index_put.default(before, [twice], source, True)
    assert is_right(aten.index_put.default, (before, [twice], source, True), sums)


# --- matrices -------------------------------------------------------------------------------------


def test_forward_error_of_qr_svd_and_eigh_accepts_either_sign_of_basis_vectors():
    x = drawn(5, 3)
    q, r = aten.linalg_qr.default(x)
    signs = torch.tensor([1.0, -1, -1])
    assert is_right(aten.linalg_qr.default, (x,), (q * signs, r * signs[:, None]))
    assert not is_right(aten.linalg_qr.default, (x,), (q * signs, r))
    u, s, v = aten._linalg_svd.default(x)
    assert is_right(aten._linalg_svd.default, (x,), (u * signs, s, v * signs[:, None]))
    assert not is_right(aten._linalg_svd.default, (x,), (u, s * 1.001, v))
    for oblong in (x, x.T):  # the full bases contain vectors without a singular value
        whole = aten._linalg_svd.default(oblong, True)
        assert is_right(aten._linalg_svd.default, (oblong, True), whole)
    symmetric = x.T @ x
    for side in ("L", "U"):
        values, vectors = aten._linalg_eigh.default(symmetric, side)
        assert is_right(aten._linalg_eigh.default, (symmetric, side), (values, vectors * signs))
        assert not is_right(aten._linalg_eigh.default, (symmetric, side), (values.flip(0), vectors))
        assert not is_right(aten._linalg_eigh.default, (symmetric, side), (values, vectors + 0.01))


SQUARE = drawn(6, 6)
RIGHT_SIDE = drawn(6, 2, seed=1)


@pytest.mark.parametrize(
    "matrix",
    [SQUARE, SQUARE.mT, drawn(6, 9)[:, :6], drawn(3, 6, 6)],
    ids=["contiguous", "transposed", "a slice", "batch"],
)
def test_forward_error_accepts_triangular_factors_of_any_layout(matrix):
    for operation, args in [
        (aten._linalg_det.default, (matrix,)),
        (aten._linalg_slogdet.default, (matrix,)),
        (aten._linalg_solve_ex.default, (matrix, RIGHT_SIDE.expand(*matrix.shape[:-2], 6, 2))),
        (aten.linalg_lu_factor_ex.default, (matrix,)),
        (aten.linalg_lu.default, (matrix,)),
    ]:
        assert is_right(operation, args, operation(*args)), operation


def test_forward_error_of_lu_accepts_other_pivots_and_finds_wrong_results():
    operation = aten._linalg_det.default
    determinant, factors, pivots = operation(SQUARE)
    of_transpose = operation(SQUARE.mT.contiguous())
    assert not factors.equal(of_transpose[1])
    assert is_right(operation, (SQUARE,), of_transpose)
    assert not is_right(operation, (SQUARE,), (determinant * 1.001, factors, pivots))
    assert not is_right(operation, (SQUARE,), (-determinant, factors, pivots))
    assert not is_right(operation, (SQUARE,), (determinant, factors * 1.001, pivots))
    operation = aten._linalg_slogdet.default
    sign, logarithm, factors, pivots = operation(SQUARE)
    assert not is_right(operation, (SQUARE,), (-sign, logarithm, factors, pivots))
    assert not is_right(operation, (SQUARE,), (sign, logarithm + 0.01, factors, pivots))
    operation, args = aten._linalg_solve_ex.default, (SQUARE, RIGHT_SIDE)
    solution, *others = operation(*args)
    assert not is_right(operation, args, (solution * 1.001, *others))
    vector = (SQUARE, RIGHT_SIDE[:, 0])
    assert is_right(operation, vector, operation(*vector))
    from_the_right = (SQUARE, RIGHT_SIDE.mT)
    options = {"left": False}
    assert is_right(operation, from_the_right, operation(*from_the_right, **options), **options)


@pytest.mark.parametrize("function", [torch.linalg.det, torch.linalg.slogdet, torch.logdet])
def test_audit_of_a_determinant_of_a_slice_finds_rounding_alone(function):
    """torch factorises the transpose of a contiguous matrix, and a slice as it is."""

    def step():
        layer = seeded(lambda: nn.Linear(16, 6))
        h = layer(drawn(4, 16))
        positive = h @ h.mT + torch.eye(4)  # for the logarithm
        result = function(torch.cat([positive, h], dim=1)[:, :4])
        loss = (result if isinstance(result, torch.Tensor) else result.logabsdet).square()
        loss.backward()
        return loss.detach()

    report = audited(step, a="cpu", b="cpu:threads=1")
    assert (report.kind, report.faulty) == ("rounding", False), str(report)


def _topk_of_the_last(numbers, k, dim=-1, largest=True, sorted=True):  # noqa: A002, ARG001
    """Select the last of equal numbers, as a different kernel may."""
    order = numbers.flip(dim).sort(dim=dim, descending=True, stable=True)
    places = numbers.shape[dim] - 1 - order.indices
    return order.values.narrow(dim, 0, k).clone(), places.narrow(dim, 0, k).clone()


def test_audit_names_topk_where_equal_scores_choose_other_experts():
    def experts(setting):
        scores = (drawn(64, 16).to(setting.dtype) * 2).round() / 8
        weights = drawn(16, 4, seed=1).to(setting.dtype)
        return weights[scores.topk(2).indices].sum((1, 2))

    def experts_of_another_kernel(setting):
        with torch.library._scoped_library("aten", "IMPL") as library:
            library.impl("topk", _topk_of_the_last, "CPU")
            return experts(setting)

    answer = gl.audit(experts, experts_of_another_kernel, setting="cpu:threads=1", progress=False)
    assert answer.kind == "another valid answer"
    assert answer.findings[0].operation == "topk"
    assert not answer.faulty
