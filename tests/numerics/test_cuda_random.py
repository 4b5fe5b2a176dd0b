"""What `torch.rand` draws on a GPU, computed on a CPU: against published numbers, and a GPU where there is one."""

import numpy as np
import pytest
import torch

import gpulab as gl
from gpulab.numerics.cuda_random import THREADS, cuda_threads, cuda_uniform, explain_draws, philox, same_draws

# Known answers of Random123 (Salmon et al. 2011), tests/kat_vectors, philox4x32 with ten rounds.
KNOWN = {
    "00000000 " * 6: "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    "ffffffff " * 6: "408f276d 41c83b0e a20bc7c6 6d5451fd",
    "243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0": "d16cfe09 94fdcceb 5001e420 24126ea1",
}


@pytest.mark.parametrize("given", KNOWN)
def test_philox_gives_the_known_answers(given):
    *counter, high, low = (int(word, 16) for word in given.split())
    assert " ".join(f"{int(word):08x}" for word in philox(counter, (high, low))) == KNOWN[given]


def test_the_first_numbers_are_those_that_gpus_are_known_to_print():
    """`torch.manual_seed(0); torch.rand(12, device="cuda")`, as a test of TensorRT-LLM holds it, among others."""
    known = [0.3990, 0.5167, 0.0249, 0.9401, 0.9459, 0.7967, 0.4150, 0.8203, 0.2290, 0.9096, 0.1183, 0.0752]
    assert cuda_uniform(0, (3, 4)).flatten().tolist() == pytest.approx(known, abs=5e-5)


@pytest.mark.parametrize(("card", "last"), [("H100", (-0.6970, -0.7780, 0.3267)), ("A100", (0.1549, -0.6797, -0.1656))])
def test_two_cards_divide_a_large_draw_as_they_are_known_to(card, last):
    """`randn` with seed 1, in pytorch/pytorch issue 143086: two uniform numbers of a thread make two normal ones."""
    numbers, threads = 49 * 12 * 112 * 144, cuda_threads(card)
    places = np.array([0, 1, 2, numbers - 3, numbers - 2, numbers - 1])
    turns, lanes = np.divmod(places // threads, 4)
    words = np.stack(philox((turns, 0, places % threads, 0), (1, 0)), axis=1)
    uniform = words * 2.0**-32 + 2.0**-33
    radius, angle = np.sqrt(-2 * np.log(uniform[:, ::2])), 2 * np.pi * uniform[:, 1::2]
    normal = np.stack([radius * np.sin(angle), radius * np.cos(angle)], axis=2).reshape(-1, 4)
    known = (-0.2963, 2.6764, -0.1408, *last)
    assert normal[range(6), lanes].tolist() == pytest.approx(known, abs=6e-5)


@pytest.mark.parametrize(("card", "other"), [("T4", "H100"), ("V100", "RTX 3090"), ("A100", 512), ("H100", "H200")])
@pytest.mark.parametrize("numbers", [0, 1, 513, 40_961, 300_000])
def test_two_cards_have_the_numbers_in_common_that_their_threads_explain(card, other, numbers):
    same = same_draws(card, other, numbers)
    equal = cuda_uniform(3, (numbers,), card) == cuda_uniform(3, (numbers,), other)
    assert equal[:same].all()
    assert equal[same:].sum() <= 2, "more than by chance"


def test_the_shape_only_arranges_the_numbers_and_the_seed_chooses_them():
    flat = cuda_uniform(5, (60_000,), "T4")
    assert torch.equal(cuda_uniform(5, (3, 200, 100), "Tesla T4"), flat.reshape(3, 200, 100))
    for seed in (6, 5 + 2**32, 2**64 - 1):
        assert not torch.equal(cuda_uniform(seed, (60_000,), "T4"), flat)


def test_a_number_that_would_round_to_one_is_zero(monkeypatch):
    extremes = np.array([[0xFFFFFFFF, 0xFFFFFF00, 0, 1]], dtype=np.uint32)
    monkeypatch.setattr("gpulab.numerics.cuda_random.philox", lambda *_: [extremes] * 4)
    assert cuda_uniform(0, (4,)).tolist() == [0, 1 - 2**-24, 2**-33, 2**-32 + 2**-33]


def test_what_cannot_be_followed_is_refused_by_name():
    for arguments, words in (
        ((0, (2,), "GTX 1"), "card 'GTX 1': expected one of K80, .* or the number of its threads"),
        ((0, (2,), 1000), "card 1000: .* multiple of 256"),
        ((2**64, (2,)), "seed 18446744073709551616"),
        ((0, (2**15, 2**15)), r"shape \(32768, 32768\): expected at most 2\^29"),
    ):
        with pytest.raises(gl.UsageError, match=words):
            cuda_uniform(*arguments)


def test_an_audit_is_told_why_two_gpus_drew_other_numbers():
    gpus = "Tesla T4", "NVIDIA GeForce RTX 3090"
    assert "the first 40,960 of its 1,000,000 numbers are the same" in explain_draws("uniform_", 10**6, *gpus)
    assert explain_draws("uniform_", 10**6, *gpus[::-1]).endswith("Tesla T4 with 40,960")
    assert explain_draws("rand", 40_960, *gpus) == "", "then the models explain nothing"
    assert explain_draws("rand", 10**6, "NVIDIA H200", "NVIDIA H100 80GB HBM3") == ""
    assert explain_draws("native_dropout", 10**6, *gpus) == "", "a kernel that divides its numbers otherwise"
    assert explain_draws("rand", 10**6, "Tesla T4", "NVIDIA GeForce RTX 3090 Ti") == "", "one that is not listed"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA GPU")
@pytest.mark.parametrize("seed", [0, 2**40 + 7])
@pytest.mark.parametrize("size", [0.001, 0.5, 1, 1.01, 3.5, 4, 4.001, 13.7], ids="{} times the threads".format)
def test_this_gpu_draws_these_bits(seed, size):
    card = torch.cuda.get_device_properties(0)
    threads = card.multi_processor_count * (card.max_threads_per_multi_processor // 256) * 256
    shape = (2, int(threads * size) // 2)
    drawn = torch.rand(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))
    assert torch.equal(drawn.cpu(), cuda_uniform(seed, shape, threads))
    name = torch.cuda.get_device_name(0)
    if gl.numerics.cuda_random.card_name(name) in THREADS:
        assert cuda_threads(name) == threads
