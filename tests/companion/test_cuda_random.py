"""The random numbers that a GPU draws from a seed, computed on a CPU."""

import pytest

from companion.cuda_random import THREADS, cuda_uniform, philox

# Known answers of Random123 (Salmon et al. 2011), tests/kat_vectors, philox4x32 with ten rounds.
KNOWN = {
    "00000000 " * 6: "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    "ffffffff " * 6: "408f276d 41c83b0e a20bc7c6 6d5451fd",
    "243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0": "d16cfe09 94fdcceb 5001e420 24126ea1",
}


@pytest.mark.parametrize("given", KNOWN)
def test_philox_known_answers(given):
    *counter, high, low = (int(word, 16) for word in given.split())
    assert " ".join(f"{int(word):08x}" for word in philox(counter, (high, low))) == KNOWN[given]


def test_cuda_uniform_published_numbers():
    """The numbers of `torch.manual_seed(0); torch.rand(12, device="cuda")` as published, for
    example, in a test of TensorRT-LLM.
    """
    known = [
        0.3990,
        0.5167,
        0.0249,
        0.9401,
        0.9459,
        0.7967,
        0.4150,
        0.8203,
        0.2290,
        0.9096,
        0.1183,
        0.0752,
    ]
    assert cuda_uniform(0, (3, 4), "T4").flatten().tolist() == pytest.approx(known, abs=5e-5)


@pytest.mark.parametrize(
    ("card", "other"), [("T4", "H100"), ("V100", "RTX 4090"), ("H100", "H100")]
)
@pytest.mark.parametrize("count", [1, 40_961, 300_000])
def test_cuda_uniform_differs_from_where_a_thread_draws_again(card, other, count):
    equal = cuda_uniform(3, (count,), card) == cuda_uniform(3, (count,), other)
    same = count if THREADS[card] == THREADS[other] else min(count, THREADS[card], THREADS[other])
    assert equal[:same].all()
    assert equal[same:].sum() <= 2, "more equal numbers than by chance"
