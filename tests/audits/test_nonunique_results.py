"""Any right answer of an operation that has several is right, and a wrong one is wrong."""

import pytest
import torch

from gpulab.audits._rounding import Accuracy
from tests.audits._helpers import compared, drawn

aten = torch.ops.aten


TIES = torch.tensor([[3.0, 2, 3, 2, 1, 1, 3, 3], [0, 5, 5, -1, 5, 2, 2, 2]])


def is_right(operation, args, out, **kwargs):
    seen = compared(operation, args, out, **kwargs)
    assert seen.error is not None
    return bool(seen.error <= seen.bound)


def places(*rows):
    return torch.tensor(rows)


# --- places of numbers ----------------------------------------------------------------------------


def answers(*texts):
    """The places in each row: a word for a row, a digit for a place."""
    return [torch.tensor([[int(digit) for digit in row] for row in text.split()]) for text in texts]


# The operation, its arguments after the tensor, the places of two right answers, and wrong ones.
SELECTIONS = {
    "topk": (
        aten.topk.default,
        (2, 1),
        answers("02 12", "76 41"),
        answers("00 12", "01 12", "08 12"),
    ),
    "topk without order": (
        aten.topk.default,
        (3, 1, False, False),
        answers("451 305", "354 703"),
        answers("450 305"),
    ),
    "max": (aten.max.dim, (1, False), [places(0, 1), places(7, 4)], [places(1, 1)]),
    "min": (aten.min.dim, (1, True), answers("4 3", "5 3"), answers("4 0")),
    "median": (aten.median.dim, (1,), [places(1, 5), places(3, 7)], [places(4, 5)]),
    "nanmedian": (aten.nanmedian.dim, (1,), [places(1, 5), places(3, 6)], [places(1, 1)]),
    "kthvalue": (aten.kthvalue.default, (2, 1), [places(4, 0), places(5, 0)], [places(4, 3)]),
    "sort": (
        aten.sort.default,
        (1,),
        answers("45130267 30567124", "54317620 30765421"),
        answers("44130267 30567124", "41530267 30567124"),
    ),
    "cummax": (
        aten.cummax.default,
        (1,),
        answers("00222267 01224444", "00000000 01111111"),
        answers("01222267 01111111"),
    ),
}


@pytest.mark.parametrize("name", SELECTIONS)
def test_forward_error_accepts_any_of_equal_numbers_that_is_selected(name):
    operation, more, right, wrong = SELECTIONS[name]

    def answer(index):
        taken = TIES.gather(1, (index if index.dim() == 2 else index[:, None]).clamp(max=7))
        return taken.view(index.shape), index

    for index in right:
        assert is_right(operation, (TIES, *more), answer(index))
    for index in wrong:
        assert not is_right(operation, (TIES, *more), answer(index))
    values, index = answer(right[0])
    assert not is_right(operation, (TIES, *more), (values + 1e-3, index)), (
        "a value that is none of them"
    )


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
    for oblong in (x, x.T):  # whose bases, whole, have vectors that meet no singular value
        whole = aten._linalg_svd.default(oblong, True)
        assert is_right(aten._linalg_svd.default, (oblong, True), whole)
    symmetric = x.T @ x
    for side in ("L", "U"):
        values, vectors = aten._linalg_eigh.default(symmetric, side)
        assert is_right(aten._linalg_eigh.default, (symmetric, side), (values, vectors * signs))
        assert not is_right(aten._linalg_eigh.default, (symmetric, side), (values.flip(0), vectors))
        assert not is_right(aten._linalg_eigh.default, (symmetric, side), (values, vectors + 0.01))
