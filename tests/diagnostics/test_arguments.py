import pytest

from gpulab.diagnostics.arguments import are_numbers, differing

FUSED, ON_CPU = "_scaled_dot_product_efficient_attention", "_scaled_dot_product_flash_attention_for_cpu"


@pytest.mark.parametrize(
    ("operation", "a", "b", "expected"),
    [
        ("gelu", "(['·'], {})", "(['·'], {'approximate': 'tanh'})", {"approximate": ("'none'", "'tanh'")}),
        ("add", "(['·', '·'], {'alpha': 2})", "(['·', '·'], {})", {"alpha": ("2", "1")}),
        ("sum", "(['·', [0]], {})", "(['·', [0], True], {})", {"keepdim": ("False", "True")}),
        ("bernoulli", "(['·'], {})", "(['·', 0.6], {})", {"p": ("0.5", "0.6")}),
        ("softmax_of_somebody", "(['·', 0], {})", "(['·', 1], {})", {"argument 2": ("0", "1")}),
        ("softmax_of_somebody", "(['·'], {})", "(['·'], {'x': [1, inf]})", {"x": ("nothing", "[1, inf]")}),
    ],
)
def test_an_argument_is_named_and_shown_with_its_default(operation, a, b, expected):
    assert differing(operation, a, operation, b) == expected


@pytest.mark.parametrize(
    ("operation", "a", "b"),
    [
        ("clone", "(['·'], {'memory_format': torch.contiguous_format})", "(['·'], {})"),
        ("_to_copy", "(['·'], {'non_blocking': True})", "(['·'], {})"),
        ("gelu", "(['·'], {})", "(['·'], {'approximate': 'none'})"),
        ("mul", "(['·', 0.5], {})", "(['·', 0.50001], {})"),
        ("pow", "(['·', 2], {})", "(['·', 2.0], {})"),
        ("mul", "(['·', '·'], {})", "(['·', 0.5], {})"),
        ("gelu", "(['·', <object at 0x7f>], {})", "(['·', <object at 0x8f>], {})"),
        ("gelu", "(" * 1000, ")"),
        ("gelu", "1", "2"),
    ],
)
def test_what_says_how_or_cannot_be_read_is_no_difference(operation, a, b):
    assert differing(operation, a, operation, b) == {}


def test_kernels_of_two_devices_are_compared_in_what_they_share():
    plain, fused = "(['·', '·', '·'], {})", "(['·', '·', '·', None, True], {})"
    assert differing(ON_CPU, plain, FUSED, fused) == {}
    assert differing(ON_CPU, plain, FUSED, "(['·', '·', '·', None, True, 0.0, True], {'scale': 0.125})") == {
        "is_causal": ("False", "True")
    }
    norm, eps = "(['·', '·', '·', '·', '·', True, 0.1, {}], {{}})", "eps"
    different = differing("native_batch_norm", norm.format(1e-05), "cudnn_batch_norm", norm.format(1e-03))
    assert different == {eps: ("1e-05", "0.001")}


def test_numbers_with_a_fraction_are_told_from_counts_and_words():
    assert are_numbers("0.5", "1e-05")
    assert are_numbers("-inf", "0.5")
    assert not are_numbers("3", "0.5")
    assert not are_numbers("'tanh'", "0.5")
