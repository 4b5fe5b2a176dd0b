import math

import numpy as np
import pytest
import torch

from gpulab.diagnostics.comparison import differing
from gpulab.diagnostics.count_sketch import distance
from gpulab.diagnostics.tracer import Operation
from gpulab.diagnostics.traces import TWINS

FUSED, ON_CPU = "_scaled_dot_product_efficient_attention", "_scaled_dot_product_flash_attention_for_cpu"
T = "Tensor"


def called(name, arguments, defaults=None):
    return Operation(name, "forward", "", "", [], [], [], "float32", arguments, defaults or {})


def texts(a, b):
    return {name: tuple(map(repr, values)) for name, values in differing(a, b).items()}


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (({"self": T}, {"x": "none"}), ({"self": T, "x": "tanh"},), {"x": ("'none'", "'tanh'")}),
        (({"self": T, "alpha": 2},), ({"self": T}, {"alpha": 1}), {"alpha": ("2", "1")}),
        (({"self": T, "dim": 0},), ({"self": T, "dim": 1},), {"dim": ("0", "1")}),
        (({"self": T},), ({"self": T, "dim": [0]},), {"dim": ("nothing", "[0]")}),
        (({"self": T, "x": True},), ({"self": T, "x": 1},), {"x": ("True", "1")}),
        (({"self": T, "x": None},), ({"self": T, "x": [1, math.inf]},), {"x": ("None", "[1, inf]")}),
    ],
    ids=str,
)
def test_an_argument_that_differs_is_named_and_shown_with_its_default(a, b, expected):
    assert texts(called("gelu", *a), called("gelu", *b)) == expected


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (({"self": T, "memory_format": "some"},), ({"self": T},)),
        (({"self": T, "non_blocking": True},), ({"self": T}, {"non_blocking": False})),
        (({"self": T}, {"approximate": "none"}), ({"self": T, "approximate": "none"},)),
        (({"self": T, "other": 0.5},), ({"self": T, "other": 0.50001},)),
        (({"self": T, "exponent": 2},), ({"self": T, "exponent": 2.0},)),
        (({"self": T, "other": T},), ({"self": T, "other": 0.5},)),
        (({"self": T, "value": math.nan},), ({"self": T, "value": math.nan},)),
        (({"self": T}, {"new_in_this_torch": 3}), ({"self": T},)),
        (({"self": T, "dim": 1},), ({"argument 1": T, "argument 2": 0},)),
        (({"self": T, "dim": 1},), ({},)),
    ],
    ids=str,
)
def test_what_says_how_or_is_not_known_by_name_is_no_difference(a, b):
    assert texts(called("gelu", *a), called("gelu", *b)) == {}
    assert texts(called("gelu", *b), called("gelu", *a)) == {}


def test_kernels_of_two_devices_are_compared_in_what_they_share():
    defaults = {"is_causal": False, "scale": None}
    plain = called(ON_CPU, {"query": T}, defaults)
    assert texts(plain, called(FUSED, {"query": T, "compute_log_sumexp": True}, defaults)) == {}
    causal = called(FUSED, {"query": T, "is_causal": True, "scale": 0.125}, {"dropout_p": 0.0})
    assert texts(plain, causal) == {"is_causal": ("False", "True")}
    norms = called("native_batch_norm", {"training": True, "eps": 1e-5}), called("cudnn_batch_norm", {"epsilon": 1e-3})
    assert texts(*norms) == {"eps": ("1e-05", "0.001")}


def test_the_distance_of_two_values():
    x = np.array([3.0, 4.0])
    assert distance(x * 1.1, x) == pytest.approx(0.1)
    assert distance(x, x) == 0
    assert distance(x, 0 * x) == math.inf
    assert distance(0 * x, 0 * x) == 0
    assert math.isnan(distance(x, np.ones(3)))


def test_twins_name_kernels_of_torch_that_there_are():
    assert [name for name in TWINS if not hasattr(torch.ops.aten, name)] == []
    assert TWINS["miopen_batch_norm_backward"] == "native_batch_norm_backward"
    assert TWINS[FUSED] == TWINS[ON_CPU] == "attention"
