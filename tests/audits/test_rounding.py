import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from gpulab._torch_internals import operation_name
from gpulab.audits._rounding import SAFETY_FACTOR, Accuracy, forward_error
from gpulab.numerics._formats import round_to
from tests.audits._helpers import compared, drawn, ratio

aten = torch.ops.aten
UNIT = 2.0**-24


class Watched(TorchDispatchMode):
    """Measure the error of every operation, after `fault` has changed its results."""

    def __init__(self, fault=lambda tensor: tensor):
        super().__init__()
        self.fault, self.seen = fault, []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = operation_name(operation)
        before = tree_map(lambda v: v.clone() if isinstance(v, torch.Tensor) else v, (args, kwargs))
        out = operation(*args, **kwargs)
        random = torch.Tag.nondeterministic_seeded in operation.tags and "attention" not in name
        if (
            not random
            and not operation.is_view
            and "empty" not in name
            and name not in ("detach", "_to_copy")
        ):
            self.seen.append(
                (name, forward_error(operation, name, *before, tree_map(self._falsified, out)))
            )
        return out

    def _falsified(self, value):
        return (
            self.fault(value)
            if isinstance(value, torch.Tensor) and value.is_floating_point()
            else value
        )


def watched(function, *tensors, fault=lambda tensor: tensor):
    """Return the names and accuracies of a function's operations, forward and backward."""
    leaves = [
        tensor.detach().clone().requires_grad_(tensor.is_floating_point()) for tensor in tensors
    ]
    with Watched(fault) as mode:
        out = function(*leaves)
        if out.requires_grad:
            out.backward(drawn(*out.shape, seed=9).to(out.dtype))
    return mode.seen


# --- closed forms ---------------------------------------------------------------------------------


def test_forward_error_and_bound_of_a_product_are_those_computed_by_hand():
    a, b = drawn(5, 30), drawn(30, 7, seed=1)
    made = a @ b
    seen = compared(aten.mm.default, (a, b), made)
    exact = a.double().numpy() @ b.double().numpy()
    size = np.linalg.norm(exact)
    assert seen.error == pytest.approx(
        np.linalg.norm(made.double().numpy() - exact) / size, rel=1e-9
    )
    bound = (
        SAFETY_FACTOR
        * math.sqrt(30)
        * UNIT
        * np.linalg.norm(np.abs(a.double().numpy()) @ np.abs(b.double().numpy()))
    )
    assert seen.bound == pytest.approx(bound / size, rel=1e-9)
    assert (seen.format, seen.has_rounded_factors) == (None, False)


def inner_products():
    """Yield an operation, its arguments, and the number of summed products in each result."""
    x, w, grad = drawn(2, 6, 9), drawn(8, 3, 4, seed=1), drawn(2, 8, 6, seed=2)
    more = ([1], [0], [1], False, [0], 2)
    yield aten.convolution.default, (x, w, None, *more), [12]
    backward = (grad, x, w, [8], *more)
    yield aten.convolution_backward.default, (*backward, [True, True, True]), [16, 12, 12]
    yield aten.convolution_backward.default, (*backward, [False, True, False]), [12]
    yield aten.convolution_backward.default, (*backward, [True, False, True]), [16, 12]
    turned = drawn(6, 4, 3, seed=3)
    yield aten.convolution.default, (x, turned, None, [1], [0], [1], True, [0], 2), [9]
    yield aten.addmm.default, (drawn(7), drawn(4, 5), drawn(5, 7)), [5]
    yield aten.bmm.default, (drawn(3, 4, 5), drawn(3, 5, 7)), [5]
    yield aten.dot.default, (drawn(50), drawn(50, seed=1)), [50]
    yield aten.addmv.default, (drawn(4), drawn(4, 5), drawn(5)), [5]
    yield aten.addbmm.default, (drawn(4, 7), drawn(3, 4, 5), drawn(3, 5, 7)), [15]


def in_double(operation, args, change):
    made = operation(
        *tree_map(lambda v: change(v.double()) if isinstance(v, torch.Tensor) else v, list(args))
    )
    return [
        result for result in (made if isinstance(made, tuple) else [made]) if result is not None
    ]


@pytest.mark.parametrize(
    ("operation", "args", "inner"), list(inner_products()), ids=lambda value: str(value)[:24]
)
def test_forward_error_of_products_is_bounded_by_the_number_of_their_terms(operation, args, inner):
    made = operation(*args)
    seen = compared(operation, args, made)
    assert 0 <= ratio(seen) < 1
    assert seen.error is not None
    sizes, results = (in_double(operation, args, change) for change in (torch.abs, torch.clone))
    bounds = [
        float(SAFETY_FACTOR * math.sqrt(n) * UNIT * size.norm() / result.norm())
        for n, size, result in zip(inner, sizes, results, strict=True)
    ]
    assert min(abs(seen.bound / bound - 1) for bound in bounds) < 1e-6


# --- right kernels --------------------------------------------------------------------------------

RIGHT = {
    "exp": lambda x: x.exp(),
    "log near 1": lambda x: (1 + 1e-5 * x).log(),
    "gelu": F.gelu,
    "a sum that cancels": lambda x: torch.cat([x, -x * (1 + 1e-6)]).sum(),
    "a mean off zero": lambda x: (x + 1000).mean(0),
    "norm": lambda x: torch.linalg.vector_norm(x),
    "cumsum": lambda x: x.cumsum(0),
    "softmax": lambda x: x.softmax(1),
    "softmax of a masked row": lambda x: x.masked_fill(x > 1, -math.inf).softmax(1),
    "log_softmax": lambda x: (30 * x).log_softmax(1),
    "cross entropy": lambda x: F.cross_entropy(x, torch.arange(len(x)) % x.shape[1]),
    "layer norm": lambda x: F.layer_norm(x + 10, x.shape[1:]),
    "layer norm of nearly a constant": lambda x: F.layer_norm(0.3 + 1e-6 * x, x.shape[1:]),
    "batch norm": lambda x: F.batch_norm(x + 5, torch.zeros(12), torch.ones(12), training=True),
    "sort of what is close": lambda x: (1 + 1e-7 * x).sort(0).values,
    "relu at zero": lambda x: (x.round() * 0 + x.detach().round()).relu() + 0 * x,
    "max pooling": lambda x: F.max_pool2d(x[None], 3, 2, 1),
    "bilinear": lambda x: F.interpolate(x[None, None], size=(71, 53), mode="bilinear"),
    "nearest": lambda x: F.interpolate(x[None, None], scale_factor=1.7),
    "embedding of few words": lambda x: F.embedding(torch.arange(300) % 7, x),
    "index_add": lambda x: torch.zeros(3, 12).index_add(0, torch.arange(len(x)) % 3, x),
    "attention": lambda x: F.scaled_dot_product_attention(*[x.view(1, 2, -1, 12)] * 3),
    "a product that cancels": lambda x: torch.addmm(-(x @ x.T).detach(), x, x.T),
    "conv1d": lambda x: F.conv1d(x[None], drawn(4, len(x) // 2, 3), groups=2, stride=2, dilation=2),
    "conv3d": lambda x: F.conv3d(x.view(1, 1, 4, -1, 12), drawn(2, 1, 3, 3, 3)),
    "transposed convolution": lambda x: F.conv_transpose2d(
        x[None, None], drawn(1, 3, 3, 3), stride=2
    ),
    "depthwise convolution": lambda x: F.conv1d(x[None], drawn(len(x), 1, 3), groups=len(x)),
    "solve": lambda x: torch.linalg.solve(x[:12].T @ x[:12] + 9 * torch.eye(12), x.T),
    "complex numbers": lambda x: (torch.complex(x, 2 * x) @ torch.complex(x.T, x.T)).abs(),
}


@pytest.mark.parametrize("scale", [1.0, 1e-30], ids=str)
@pytest.mark.parametrize("name", RIGHT)
def test_forward_error_of_right_results_stays_below_the_bound(name, scale, as_recorded):
    if scale != 1 and name in ("norm", "complex numbers", "layer norm"):
        pytest.skip("its squares are too small for float32: the error is one of range")
    torch.manual_seed(0)
    seen = watched(RIGHT[name], scale * drawn(24, 12))
    assert [
        (n, e.error, e.bound) for n, e in seen if e.error is not None and not ratio(e) <= 1
    ] == []
    assert [(n, e) for n, e in seen if e.format] == []
    if scale == 1:
        # The processor's kernels decide which gradient has the largest error, and what remains of
        # numbers that cancel.
        loose = name in ("attention", "a product that cancels")
        as_recorded(
            name,
            [f"{n}: {e.bound or 0:.4g}" for n, e in seen],
            "torch",
            rtol=0.5 if loose else 0.05,
        )


# --- wrong kernels --------------------------------------------------------------------------------

# Operations on zeros only, or on numbers that cancel, hide faults.
HIDING = (
    "a sum that cancels",
    "a product that cancels",
    "log near 1",
    "relu at zero",
    "complex numbers",
)
ZEROS = ["zeros", "new_zeros", "zeros_like"]
COARSER = [
    "embedding_dense_backward",
    "linalg_vector_norm",
    "native_layer_norm_backward",
    "upsample_bilinear2d",
]


@pytest.mark.parametrize(
    ("size", "others"), [(1e-5, [*COARSER, "upsample_bilinear2d_backward"]), (1e-3, [])]
)
@pytest.mark.parametrize("name", [name for name in RIGHT if name not in HIDING])
def test_forward_error_notices_small_relative_errors(name, size, others):
    def fault(tensor):
        return tensor * (1 + size * drawn(*tensor.shape, seed=5).to(tensor.dtype))

    torch.manual_seed(0)
    seen = watched(RIGHT[name], drawn(24, 12), fault=fault)
    ratios = {n: ratio(e) for n, e in seen if e.error is not None and n not in [*others, *ZEROS]}
    assert ratios or others
    assert {n: by for n, by in ratios.items() if not by > 1} == {}


@pytest.mark.parametrize("wrong", [1.0, math.nan, math.inf])
def test_forward_error_notices_one_wrong_number_among_many(wrong):
    x = drawn(100, 100)
    for operation in (aten.relu.default, aten.exp.default):
        made = operation(x)
        made[3, 7] += wrong
        assert not ratio(compared(operation, (x,), made)) <= 1000


# --- special numbers ------------------------------------------------------------------------------


def test_forward_error_explains_results_out_of_range_by_the_range():
    for x in (drawn(50) * 1e30, drawn(50) * 1e-30):
        assert ratio(compared(aten.mul.Tensor, (x, x), x * x)) <= 1
    small = torch.linspace(-104, -80, 50)
    assert ratio(compared(aten.exp.default, (small,), small.exp())) <= 1
    wrong = torch.full((50,), 1e38)
    assert ratio(compared(aten.mul.Tensor, (wrong / 1e38 * 1e20, wrong), wrong)) > 1


def flushed(x):
    return torch.where(x.abs() < torch.finfo(torch.float32).tiny, 0.0, x)


def test_forward_error_names_kernels_that_flush_subnormal_numbers_to_zero():
    x, small = drawn(64), drawn(64) * 1e-39
    a, b = 1e-20 * drawn(8, 30), 1e-20 * drawn(30, 8, seed=1)
    powers = torch.linspace(-104, -80, 50)
    for operation, args, made in [
        (aten.mul.Tensor, (x * 1e-38, torch.tensor(0.01)), flushed(x * 1e-38 * 0.01)),
        (aten.mul.Tensor, (small, torch.tensor(1e38)), torch.zeros(64)),
        (aten.add.Tensor, (small, small), torch.zeros(64)),
        (aten.mm.default, (a, b), torch.zeros(8, 8)),
        (aten.exp.default, (powers,), flushed(powers.exp())),
    ]:
        seen = compared(operation, args, made)
        assert (seen.format, seen.has_rounded_factors) == ("float32_ftz", False)
        right = compared(operation, args, operation(*args))
        assert right.format is None
        assert ratio(right) <= 1
        wrong = compared(
            operation, args, made + 1e-3 * operation(*args).abs().max().clamp(min=1e-33)
        )
        assert wrong.format is None
        assert ratio(wrong) > 1


def test_forward_error_ignores_nan_and_infinity_of_the_inputs():
    x = torch.tensor([math.nan, math.inf, -math.inf, 1.0])
    for operation in (aten.exp.default, aten.tanh.default, aten.relu.default):
        seen = compared(operation, (x,), operation(x))
        assert seen.error is None or ratio(seen) <= 1


def test_forward_error_is_unknown_for_operations_without_a_float64_reference():
    whole = torch.arange(4)
    for operation, args in [
        (aten.add.Tensor, (whole, whole)),
        (aten.exp.default, (torch.empty(0),)),
        (aten.gt.Scalar, (drawn(4), 0)),
        (aten._linalg_eigh.default, (torch.eye(3, dtype=torch.complex64),)),
    ]:
        seen = compared(operation, args, operation(*args))
        assert (seen.error, seen.bound, seen.format) == (None, None, None)


# --- short formats --------------------------------------------------------------------------------

ALIKE = {"float16": ["tf32", "float16"]}  # except for its range, float16 rounds like TF32
SHORT = [
    ("tf32", "nearest"),
    ("tf32", "away"),
    ("tf32", "truncate"),
    ("bfloat16", "nearest"),
    ("float16", "nearest"),
]


@pytest.mark.parametrize(("format_", "mode"), SHORT, ids=str)
@pytest.mark.parametrize("shape", [(1, 2000, 1), (3, 2, 4), (64, 512, 64)], ids=str)
def test_forward_error_recognizes_the_format_of_rounded_factors_in_products(format_, mode, shape):
    rows, inner, columns = shape
    a, b = drawn(rows, inner), drawn(inner, columns, seed=1)
    made = round_to(a, format_, mode) @ round_to(b, format_, mode)
    seen = compared(aten.mm.default, (a, b), made)
    assert seen.format in ALIKE.get(format_, [format_])
    assert not seen.has_rounded_factors


@pytest.mark.parametrize(("format_", "mode"), SHORT, ids=str)
@pytest.mark.parametrize(
    "wanted", [[True, True, False], [False, True, False], [True, False, False]], ids=str
)
def test_forward_error_recognizes_the_format_of_rounded_factors_in_convolutions(
    wanted, format_, mode
):
    tensors = drawn(2, 8, 9, 9, seed=2), drawn(2, 6, 9, 9), drawn(8, 6, 3, 3, seed=1)
    more = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    rounded = [round_to(tensor, format_, mode) for tensor in tensors]
    forward, backward = aten.convolution.default, aten.convolution_backward.default
    assert compared(forward, (*tensors[1:], *more), forward(*rounded[1:], *more)).format
    seen = compared(backward, (*tensors, *more, wanted), backward(*rounded, *more, wanted))
    assert seen.format in ALIKE.get(format_, [format_])
    assert not seen.has_rounded_factors


def test_forward_error_takes_no_right_product_of_few_numbers_for_a_short_format():
    """One number in three is nearer to the result in one of four formats than to the exact one."""
    alarms = 0
    for seed in range(300):
        a, b = drawn(1, 3000, seed=seed).abs(), drawn(3000, 1, seed=seed + 1000).abs()
        alarms += compared(aten.mm.default, (a, b), a @ b).format is not None
    assert alarms <= 3


def test_forward_error_ignores_what_a_failed_factorization_leaves():
    not_positive = torch.tensor([[1.0, 2.0], [2.0, 1.0]])
    cholesky = aten.linalg_cholesky_ex.default
    left, info = cholesky(not_positive)
    assert info != 0
    for rest in (left, torch.full_like(left, torch.nan)):
        assert compared(cholesky, (not_positive,), (rest, info)) == Accuracy()
    fine = torch.eye(2)
    assert compared(cholesky, (fine,), cholesky(fine)).error == 0
    wrong = (2 * fine, torch.tensor(0))
    seen = compared(cholesky, (fine,), wrong)
    assert seen.error > seen.bound
