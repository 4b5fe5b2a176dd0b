"""Public questions of the kind "CPU and GPU differ", and whether the audit's first line is right.

    python benchmarks/correctness/public_cases.py --write benchmarks/results/public_cases.md

Each case is a step rewritten by us from a public thread in which the cause was confirmed: by a
maintainer's comment or label, by a merged change, or by the setting that removed the difference. It
states which two settings are compared, which kind of finding should come first and, as a regular
expression, at which operation. These answers were written down before the audit was run on any of
the cases, and have not been changed since. Inputs are drawn from a seed.
"""

from __future__ import annotations

import inspect
import re
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn
from tqdm.auto import tqdm

import gpulab as gl
from benchmarks.measuring import made_by, markdown, show, table

ANOTHER_ANSWER = "another valid answer"
REDUCED, ROUNDING, RANDOM = "reduced precision", "rounding", "different random numbers"
MATRIX = r"^(mm|addmm|bmm|baddbmm|linear|mv|addmv|matmul)"
DRAWS = "rand|normal|uniform|bernoulli"

# The two settings of the question if there is a GPU, and two that show the same on a CPU.
TF32 = ("cuda:tf32=off", "cuda:tf32=on"), ("cpu", "cpu:emulate=tf32")
BFLOAT16_PRODUCTS = ("cuda:tf32=off", "cuda:emulate=bfloat16"), ("cpu", "cpu:emulate=bfloat16")
FLOAT16_PRODUCTS = ("cuda:tf32=off", "cuda:emulate=float16"), ("cpu", "cpu:emulate=float16")
BFLOAT16 = ("cuda:tf32=off", "cuda:precision=bfloat16"), ("cpu", "cpu:precision=bfloat16")
FLOAT64 = ("cuda:tf32=off", "cuda:precision=float64"), ("cpu", "cpu:precision=float64")
DEVICES = ("cpu", "cuda:tf32=off"), ("cpu:threads=2", "cpu:threads=1")
ORDERS = ("cpu", "cuda:tf32=off"), ("cpu:order=sequential", "cpu:order=pairwise")
NEEDS_GPU = ("cpu", "cuda:tf32=off"), None
NEEDS_CUDNN = ("cuda:tf32=off", "cuda:tf32=off,cudnn=off"), None
DENORMALS = None, ("cpu:threads=1", "cpu:threads=1,denormals=off")


@dataclass(frozen=True)
class Case:
    """A public question: the step, its source, the cause, and the audit's expected first line."""

    name: str
    thread: str
    cause: str
    pairs: tuple[tuple[str, str] | None, tuple[str, str] | None]
    kind: str
    operation: str
    function: Callable[..., Any]

    def step(self) -> Callable[..., Any]:
        """Return the audited step: the function itself, or the `gpulab.Step` that it makes."""
        return self.function if inspect.signature(self.function).parameters else self.function()


CASES: list[Case] = []


def case(
    thread: str, pairs: Any, kind: str, operation: str = "", cases: list[Case] = CASES
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add the function to the cases; its docstring is the cause that was confirmed."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        cases.append(
            Case(
                function.__name__, thread, function.__doc__ or "", pairs, kind, operation, function
            )
        )
        return function

    return add


def drawn(setting: gl.Setting, *shape: int, seed: int = 0, leaf: bool = False) -> Tensor:
    """Return normal numbers that float32 can represent, drawn by NumPy, the same in any setting."""
    return given(setting, batch(*shape, seed=seed)).requires_grad_(leaf)


def given(setting: gl.Setting, numbers: Any) -> Tensor:
    return torch.as_tensor(np.asarray(numbers, np.float32)).to(
        setting.device, setting.dtype, copy=True
    )


def batch(*shape: int, seed: int = 0) -> Tensor:
    return torch.as_tensor(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def network(
    make: Callable[[], nn.Module], inputs: Tensor, loss: Callable[[Any, Any], Tensor] | None = None
) -> gl.Step:
    """Return a training step of a network whose weights are drawn from seed 0."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return gl.Step(make(), inputs if loss is None else (inputs, inputs), loss)


def second(setting: gl.Setting) -> bool:
    """Return whether the setting has the other implementation: the GPU, or one thread instead."""
    return setting.kind == "cuda" or setting.threads == 1


# --- TF32 and shorter formats in products ---------------------------------------------------------


@case("pytorch/pytorch#53635", TF32, REDUCED, MATRIX)
def times_one(setting: gl.Setting) -> Tensor:
    """TF32 rounds each factor to 10 fraction bits, too few for 1024.5."""
    x = torch.full((8, 8), 1024.5, device=setting.device, dtype=setting.dtype)
    return x @ torch.eye(8, device=setting.device, dtype=setting.dtype)


@case("pytorch/pytorch#58688", TF32, REDUCED, MATRIX)
def times_the_unit_matrix(setting: gl.Setting) -> Tensor:
    """A product with the unit matrix rounds the other factor to TF32."""
    a = drawn(setting, 128, 3)
    return (a @ torch.eye(3, device=setting.device, dtype=setting.dtype) - a).norm()


@case("pytorch/pytorch#84334", TF32, REDUCED, MATRIX)
def product_on_an_rtx_3080(setting: gl.Setting) -> Tensor:
    """A maintainer: the error is to be expected with TF32, which an older card does not have."""
    return (100 * drawn(setting, 64, 96)) @ drawn(setting, 96, 48, seed=1)


@case("pytorch/pytorch#61890", TF32, REDUCED, MATRIX)
def rotated_mesh(setting: gl.Setting) -> Tensor:
    """The corners of a face are displaced when they are rotated by a matrix product in TF32."""
    c, s = np.cos(0.3), np.sin(0.3)
    return (200 + 80 * drawn(setting, 500, 3)) @ given(setting, [[c, -s, 0], [s, c, 0], [0, 0, 1]])


@case("pytorch/pytorch#107514", TF32, REDUCED, "convolution")
def convolution_on_an_rtx_3090() -> gl.Step:
    """Convolutions may use TF32 by default; `cudnn.allow_tf32 = False` removed the difference."""
    return network(lambda: nn.Conv2d(32, 64, 3, padding=1), batch(16, 32, 32, 32))


@case("pytorch/pytorch#153698", TF32, REDUCED, "convolution")
def convolution_of_whole_numbers(setting: gl.Setting) -> Tensor:
    """TF32 cannot represent odd integers beyond 2048, and one of the values is 2077."""
    numbers = given(setting, np.arange(16 * 32 * 32 * 32).reshape(16, 32, 32, 32) % 2080)
    return F.conv2d(numbers, given(setting, np.ones((64, 32, 3, 3))))


@case("pytorch/torchdynamo#611", TF32, REDUCED, "convolution")
def convolution_and_batch_norm() -> gl.Step:
    """TF32 in the products, not the batch normalisation between them, makes the outputs differ."""

    def layers(channels: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(channels, 64, 3), nn.BatchNorm2d(64), nn.ReLU())

    return network(lambda: layers(32).append(layers(64)), batch(16, 32, 32, 32))


@case("pytorch/pytorch#57690", TF32, REDUCED, rf"{MATRIX}|euclidean|cdist")
def distances_to_itself(setting: gl.Setting) -> Tensor:
    """Distances are computed by a matrix product, which TF32 makes so inexact that a point is far
    from itself.
    """
    x = drawn(setting, 64, 32)
    return torch.cdist(x, x)


@case("triton-lang/triton#1800", TF32, REDUCED, MATRIX)
def product_of_a_tutorial(setting: gl.Setting) -> Tensor:
    """A kernel multiplies float32 matrices in TF32 unless it requests IEEE; PyTorch does not."""
    return drawn(setting, 128, 32) @ drawn(setting, 32, 128, seed=1)


@case("evintunador/triton_docs_tutorials#6", TF32, REDUCED, MATRIX)
def attention_of_a_tutorial(setting: gl.Setting) -> tuple[Tensor, ...]:
    """Products inside flash attention are in TF32, which affects the gradients more than the
    output.
    """
    q, k, v = (drawn(setting, 1, 64, 32, seed=seed, leaf=True) for seed in range(3))
    weights = (q @ k.transpose(1, 2) / 32**0.5).softmax(-1)
    (weights @ v).square().sum().backward()
    return tuple(t.grad for t in (q, k, v) if t.grad is not None)


@case("tensorflow/tensorflow#127346", TF32, REDUCED, MATRIX)
def large_linear_layer(setting: gl.Setting) -> Tensor:
    """The error of 3e-4 comes from TF32, as rounding the same numbers to TF32 shows."""
    x, w, b = drawn(setting, 64, 256), drawn(setting, 32, 256, seed=1), drawn(setting, 32, seed=2)
    return F.linear(1000 * x, 50 * w, 50 * b)


class Decoder(nn.Module):
    """Two layers of a language model without dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(50, 32), nn.Embedding(16, 32)
        layer = nn.TransformerEncoderLayer(
            32, 4, 64, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers, self.norm = (
            nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
            nn.LayerNorm(32),
        )

    def forward(self, words: Tensor) -> Tensor:
        length = words.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=words.device).triu(1)
        h = self.words(words) + self.places(torch.arange(length, device=words.device))
        out: Tensor = self.norm(self.layers(h, mask=mask)) @ self.words.weight.T
        return out


def sentences(count: int) -> Tensor:
    return torch.as_tensor(np.random.default_rng(0).integers(0, 50, (count, 12)))


def next_word(scores: Tensor, words: Tensor) -> Tensor:
    return F.cross_entropy(scores[:, :-1].flatten(0, 1), words[:, 1:].flatten())


@case("Lightning-AI/lightning-thunder#2579", TF32, REDUCED, rf"{MATRIX}|attention")
def small_gpt() -> gl.Step:
    """A chain of TF32 products leads to errors of 1e-3 in the outputs of a small GPT."""
    return network(Decoder, sentences(4), next_word)


@case("jax-ml/jax#9973", BFLOAT16_PRODUCTS, REDUCED, MATRIX)
def two_by_two_on_a_tpu(setting: gl.Setting) -> Tensor:
    """A TPU multiplies float32 matrices in bfloat16 by default."""
    return given(setting, [[0.37, 0.17], [0.47, 0.17]]) @ given(
        setting, [[0.39, 0.12], [0.16, 0.31]]
    )


@case("huggingface/transformers#25938", FLOAT16_PRODUCTS, REDUCED, MATRIX)
def too_large_for_float16(setting: gl.Setting) -> Tensor:
    """Sums over all pixels of a mask exceed the range of float16, and the cost becomes infinite."""
    masks, targets = (
        20 * drawn(setting, 6, 8000).abs(),
        (drawn(setting, 4, 8000, seed=1) > 0).to(setting.dtype),
    )
    return (masks @ targets.T).softmax(1)


# --- data types -----------------------------------------------------------------------------------


@case("huggingface/transformers#25420", BFLOAT16, REDUCED)
def decoder_in_bfloat16() -> gl.Step:
    """Outputs depend on shapes and caches because of rounding: hardly in float32, visibly in a
    16-bit type.
    """
    return network(Decoder, sentences(4), next_word)


@case("pytorch/pytorch#111457", BFLOAT16, REDUCED, MATRIX)
def product_in_bfloat16(setting: gl.Setting) -> Tensor:
    """Both are as far from float64 as is expected for a sum of so many products in bfloat16."""
    return drawn(setting, 32, 512) @ drawn(setting, 512, 32, seed=1)


@case("pytorch/pytorch#69969", DEVICES, REDUCED, MATRIX)
def linear_layer_in_float16(setting: gl.Setting) -> Tensor:
    """A CPU summed float16 products in float16; the step itself requests this type."""
    x, w = (drawn(setting, 24, 512, seed=seed).half() for seed in range(2))
    return F.linear(x, w)


@case("pytorch/pytorch#180150", DEVICES, REDUCED, "cumsum")
def running_sum_in_float16(setting: gl.Setting) -> Tensor:
    """A running sum of float16 numbers is as inexact as the type, and more so if the sum is kept in
    it.
    """
    return drawn(setting, 50_000).half().cumsum(0)


@case("pytorch/pytorch#82196", DEVICES, REDUCED, rf"{MATRIX}|_to_copy")
def under_autocast(setting: gl.Setting) -> Tensor | None:
    """Under autocast layers compute in bfloat16; losses were moved back to float32 for accuracy."""
    w = drawn(setting, 8, 32, leaf=True)
    with torch.autocast(setting.kind, torch.bfloat16):
        F.mse_loss(
            F.linear(drawn(setting, 16, 32, seed=1), w), drawn(setting, 16, 8, seed=2)
        ).backward()
    return w.grad


@case("pytorch/pytorch#34758", FLOAT64, ROUNDING)
def odd_numbers_beyond_two_to_the_24(setting: gl.Setting) -> Tensor:
    """Float32 has 24 bits, so it cannot represent odd integers beyond 16,777,216."""
    return torch.tensor([16_777_217, 16_777_219], device=setting.device).to(setting.dtype) / 3


@case("PriorLabs/TabPFN#800", FLOAT64, ROUNDING)
def rows_together_and_in_parts(setting: gl.Setting) -> tuple[Tensor, Tensor]:
    """Different shapes are computed in different tiles; in float64 the difference disappears."""
    x, w = drawn(setting, 40, 48), drawn(setting, 48, 24, seed=1)
    return (x @ w).relu().mean(1), torch.cat([(part @ w).relu().mean(1) for part in x.split(9)])


@case("pytorch/pytorch#137687", FLOAT64, ROUNDING)
def determinant_of_an_ill_conditioned_matrix(setting: gl.Setting) -> Tensor:
    """The matrix is extremely ill-conditioned: rounding its entries changes the size of the
    determinant.
    """
    n = torch.arange(1.0, 8.0, device=setting.device, dtype=setting.dtype)
    return torch.linalg.slogdet(1 / (n[:, None] + n - 1)).logabsdet


# --- another order of summation -------------------------------------------------------------------


@case("pytorch/pytorch#88718", DEVICES, ROUNDING)
def linear_layer_by_threads(setting: gl.Setting) -> Tensor:
    """The number of threads decides how a sum is split."""
    return F.linear(
        drawn(setting, 56), drawn(setting, 444, 56, seed=1), drawn(setting, 444, seed=2)
    )


@case("torch/torch7#721", DEVICES, ROUNDING)
def sum_of_five(setting: gl.Setting) -> Tensor:
    """A CPU adds sequentially, a GPU pairwise."""
    return drawn(setting, 5).abs().sum()


@case("torch/cutorch#407", ORDERS, ROUNDING)
def product_in_another_order(setting: gl.Setting) -> Tensor:
    """Both products are correct in float32, but accumulated in different orders."""
    return drawn(setting, 24, 200) @ drawn(setting, 200, 24, seed=1)


@case("pytorch/pytorch#180153", DEVICES, ROUNDING)
def long_running_sum(setting: gl.Setting) -> Tensor:
    """A CPU keeps a running sum in float64, a GPU in float32."""
    return (1e10 * drawn(setting, 50_000)).cumsum(0)


@case("pytorch/pytorch#180154", DEVICES, ROUNDING)
def long_running_product(setting: gl.Setting) -> Tensor:
    """A CPU keeps a running product in float64, a GPU in float32, in which rounding errors
    accumulate.
    """
    return (1 + 1e-4 * drawn(setting, 200_000)).cumprod(0)


@case("pytorch/pytorch#87944", DEVICES, ROUNDING)
def just_below_one_cut_to_a_whole_number(setting: gl.Setting) -> Tensor:
    """A GPU's logarithm is off by one ulp, -0.99999988, and a cast to integers makes it 0."""
    x = torch.arange(1, 6, device=setting.device)
    return (-(x.to(setting.dtype) ** 2)).exp().log().to(torch.int64)


@case("pytorch/pytorch#58128", DEVICES, ROUNDING)
def one_row_alone_minus_the_same_in_a_batch(setting: gl.Setting) -> Tensor:
    """A different batch size is a different operation, for which libraries may choose another
    algorithm.
    """
    x, w = drawn(setting, 32, 256), drawn(setting, 256, 64, seed=1)
    return ((x @ w)[:1] - x[:1] @ w).abs().max()


@case("huggingface/transformers#2401", DEVICES, ROUNDING)
def decoder_in_another_environment() -> gl.Step:
    """Differences of 1e-7 are to be expected with another batch size, GPU or environment."""
    return network(Decoder, sentences(3), next_word)


@case("Dao-AILab/flash-attention#410", DEVICES, ROUNDING)
def fused_attention(setting: gl.Setting) -> tuple[Tensor, ...]:
    """Additions of floating-point numbers are not associative: a fused kernel adds in another
    order.
    """
    q, k, v = (drawn(setting, 2, 4, 48, 16, seed=seed, leaf=True) for seed in range(3))
    F.scaled_dot_product_attention(q, k, v, is_causal=True).square().sum().backward()
    return tuple(t.grad for t in (q, k, v) if t.grad is not None)


@case("mhpi/generic_deltamodel#75", DEVICES, ROUNDING)
def long_short_term_memory() -> gl.Step:
    """In float32, an LSTM on a CPU and on a GPU differs by 1e-5; in float64, only in the last
    digits.
    """
    return network(lambda: nn.LSTM(8, 16), batch(20, 4, 8))


@case("pytorch/pytorch#82493", DEVICES, ROUNDING)
def weight_gradient_of_batch_norm(setting: gl.Setting) -> Tensor | None:
    """The gradient is the sum of the normalised values, which consists of nothing but rounding
    errors.
    """
    weight, bias = drawn(setting, 3, seed=1, leaf=True), drawn(setting, 3, seed=2, leaf=True)
    F.batch_norm(
        100 * drawn(setting, 16, 3, 16, 16), None, None, weight, bias, training=True
    ).sum().backward()
    return weight.grad


@case("pytorch/pytorch#9602", DEVICES, ROUNDING)
def batch_norm_of_two() -> gl.Step:
    """Normalising two values leaves only their signs, whatever the values were, so the gradient
    before it vanishes.
    """
    return network(
        lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)),
        batch(2, 4),
        lambda out, _: (out**3).sum(),
    )


@case("pytorch/pytorch#110387", DEVICES, ROUNDING)
def convolution_of_another_layout(setting: gl.Setting) -> tuple[Tensor, Tensor]:
    """For other strides a convolution may use another kernel, which rounds differently."""
    x, w = drawn(setting, 4, 3, 24, 24), drawn(setting, 16, 3, 3, 3, seed=1)
    return F.conv2d(x, w), F.conv2d(x.to(memory_format=torch.channels_last), w)


@case("pytorch/pytorch#187444", NEEDS_CUDNN, ROUNDING)
def batch_norm_of_cudnn() -> gl.Step:
    """Each implementation repeats to the bit, and the two differ by 1e-7 in every operation."""
    return network(
        lambda: nn.Sequential(nn.BatchNorm2d(8), nn.ReLU(), nn.BatchNorm2d(8)), batch(8, 8, 12, 12)
    )


@case("pytorch/pytorch#123074", DEVICES, ROUNDING)
def fused_adam(setting: gl.Setting) -> Tensor:
    """Updates of the fused kernel and the loop differ by slightly more than the usual tolerance."""
    weight = drawn(setting, 40, 20, leaf=True)
    optimizer = torch.optim.Adam([weight], lr=0.01, fused=True)
    for seed in range(3):
        optimizer.zero_grad()
        (drawn(setting, 8, 40, seed=seed + 1) @ weight).square().mean().backward()
        optimizer.step()
    return weight.detach()


# --- random numbers -------------------------------------------------------------------------------


@case("pytorch/pytorch#79496", NEEDS_GPU, RANDOM, DRAWS)
def drawn_on_the_device(setting: gl.Setting) -> Tensor:
    """Each kind of device has its own generator: one seed, two sequences."""
    torch.manual_seed(10)
    return torch.randn(64, device=setting.device, dtype=setting.dtype).exp()


@case("pytorch/pytorch#32535", FLOAT64, RANDOM, DRAWS)
def drawn_in_another_type(setting: gl.Setting) -> Tensor:
    """A float64 number takes more random bits than a float32 one, so the sequences part."""
    torch.manual_seed(0)
    return torch.randn(64, device=setting.device, dtype=setting.dtype).tanh()


@case("pytorch/pytorch#2976", NEEDS_GPU, RANDOM, f"dropout|{DRAWS}")
def dropout(setting: gl.Setting) -> Tensor | None:
    """CPU and GPU drop different units from the same seed."""
    torch.manual_seed(0)
    x = drawn(setting, 32, 16, leaf=True)
    F.dropout(x, 0.5).square().mean().backward()
    return x.grad


@case("pytorch/pytorch#107433", NEEDS_GPU, RANDOM, DRAWS)
def alignment_of_drawn_inputs(setting: gl.Setting) -> Tensor:
    """The two losses belong to different inputs, which were drawn on the devices; inputs that are
    moved give the same loss.
    """
    torch.manual_seed(2024)
    scores = torch.randn(20, 4, 10, device=setting.device, dtype=setting.dtype).log_softmax(2)
    targets = torch.arange(24, device=setting.device).view(4, 6) % 9 + 1
    lengths = (torch.full((4,), length, device=setting.device) for length in (20, 6))
    return F.ctc_loss(scores, targets, *lengths)


@case("pytorch/pytorch#143086", NEEDS_GPU, RANDOM, DRAWS)
def drawn_beyond_the_grid(setting: gl.Setting) -> Tensor:
    """The position of each number depends on how many threads run at the same time, and so on the
    model of the card.
    """
    generator = torch.Generator(setting.device).manual_seed(1)
    return torch.randn(
        600_000, device=setting.device, dtype=setting.dtype, generator=generator
    ).square()


# --- what does not repeat -------------------------------------------------------------------------


@case("rusty1s/pytorch_scatter#20", NEEDS_GPU, "nondeterminism", "scatter_add|index_add")
def messages_added_at_nodes(setting: gl.Setting) -> Tensor:
    """Atomic additions come in any order on a GPU."""
    nodes = torch.as_tensor(np.random.default_rng(1).integers(0, 50, 100_000)).to(setting.device)
    return torch.zeros(50, device=setting.device, dtype=setting.dtype).scatter_add(
        0, nodes, drawn(setting, 100_000)
    )


@case("pytorch/pytorch#68961", NEEDS_GPU, "nondeterminism", "upsample_bilinear2d_backward")
def gradient_of_an_enlarged_image(setting: gl.Setting) -> Tensor | None:
    """The gradient of bilinear interpolation is added up by atomics on a GPU."""
    x = drawn(setting, 2, 4, 16, 16, leaf=True)
    (
        F.interpolate(x, scale_factor=8, mode="bilinear") * drawn(setting, 2, 4, 128, 128, seed=1)
    ).sum().backward()
    return x.grad


@case("pytorch/pytorch#33798", NEEDS_GPU, "nondeterminism", "index_put")
def written_to_one_place_many_times(setting: gl.Setting) -> Tensor:
    """If several values are written to one position, any of them may remain."""
    places = torch.as_tensor(np.random.default_rng(0).integers(0, 100, 100_000)).to(setting.device)
    sums = torch.zeros(100, device=setting.device, dtype=setting.dtype)
    sums[places] += drawn(setting, 100_000)
    return sums


@case("bethgelab/imagecorruptions#11", DEVICES, "nondeterminism")
def noise_of_numpy(setting: gl.Setting) -> Tensor:
    """Noise comes from NumPy, whose generator is not affected by torch's seed."""
    noise = np.random.default_rng().standard_normal((16, 8)).astype(np.float32)
    return (drawn(setting, 16, 8) + given(setting, noise)).square().mean()


# --- not unique is not wrong ----------------------------------------------------------------------


@case("TransformerLensOrg/TransformerLens#330", NEEDS_GPU, ANOTHER_ANSWER, "svd")
def signs_of_singular_vectors(setting: gl.Setting) -> tuple[Tensor, Tensor]:
    """The signs of a pair of singular vectors may change together."""
    u, _, vh = torch.linalg.svd(drawn(setting, 12, 8), full_matrices=False)
    return u, vh


@case("pytorch/pytorch#54002", FLOAT64, ANOTHER_ANSWER, "svd")
def basis_of_equal_singular_values(setting: gl.Setting) -> Tensor:
    """Any basis of the space that belongs to equal singular values is correct."""
    return torch.linalg.svd(householder(setting) * 3).U


@case("pytorch/pytorch#121010", NEEDS_GPU, ANOTHER_ANSWER, "eigh")
def signs_of_eigenvectors(setting: gl.Setting) -> Tensor:
    """An eigenvector times minus one is also an eigenvector."""
    a = drawn(setting, 10, 10)
    return torch.linalg.eigh(a + a.T).eigenvectors


@case("pytorch/pytorch#47599", FLOAT64, ANOTHER_ANSWER, "eigh")
def basis_of_equal_eigenvalues(setting: gl.Setting) -> Tensor:
    """If eigenvalues are equal, any basis of their space is valid, and the gradient is not uniquely
    defined.
    """
    q = householder(setting)
    return torch.linalg.eigh(
        q @ torch.diag(given(setting, [0.5, 1, 1, 1, 2, 2])) @ q.T
    ).eigenvectors


def householder(setting: gl.Setting) -> Tensor:
    v = given(setting, [[0.5], [-0.25], [1.0], [0.75], [-0.5], [0.25]])
    return torch.eye(6, device=setting.device, dtype=setting.dtype) - 2 * v @ v.T / v.square().sum()


@case("numpy/numpy#18177", NEEDS_GPU, ANOTHER_ANSWER, "qr")
def signs_of_qr(setting: gl.Setting) -> tuple[Tensor, Tensor]:
    """The signs of a column of Q and the corresponding row of R may change together."""
    q, r = torch.linalg.qr(drawn(setting, 12, 6))
    return q, r


@case("pytorch/pytorch#180157", NEEDS_GPU, ANOTHER_ANSWER, "lstsq|gels")
def least_squares_without_full_rank(setting: gl.Setting) -> Tensor:
    """A matrix without full rank has many solutions, and the GPU's method is documented only for
    full rank.
    """
    a = given(setting, np.arange(1, 10).reshape(3, 3))
    return torch.linalg.lstsq(a, a).solution


@case("pytorch/pytorch#127196", NEEDS_GPU, ANOTHER_ANSWER, "topk")
def largest_among_equals(setting: gl.Setting) -> Tensor:
    """It is unspecified which of several equal values `topk` returns."""
    return given(setting, [3, 2, 3, 2, 1, 1, 3, 3]).topk(2).indices


@case("pytorch/torchtitan#3336", NEEDS_GPU, ANOTHER_ANSWER, "topk")
def experts_among_equals(setting: gl.Setting) -> Tensor:
    """The kernel breaks ties between experts, so tokens go to different experts, independently of
    seeds.
    """
    scores = (drawn(setting, 64, 16) * 2).round() / 8
    return drawn(setting, 16, 4, seed=1)[scores.topk(2).indices].sum((1, 2))


@case("pytorch/pytorch#46942", NEEDS_GPU, ANOTHER_ANSWER, "median")
def place_of_a_median_among_equals(setting: gl.Setting) -> Tensor:
    """The median occurs at several positions, and any of them may be returned."""
    return torch.ones(3, 4, device=setting.device, dtype=setting.dtype).median(1).indices


@case("pytorch/pytorch#37130", NEEDS_GPU, ANOTHER_ANSWER, "scatter")
def scattered_to_one_place(setting: gl.Setting) -> Tensor:
    """If indices repeat, any of the values may remain."""
    places = torch.tensor([0, 1, 1, 1, 2], device=setting.device)
    return drawn(setting, 9).scatter(0, places, drawn(setting, 5, seed=1))


# --- two implementations of one name, casts and small numbers -------------------------------------


@case("apache/mxnet#18751", DEVICES, "mismatch", "var")
def running_variance(setting: gl.Setting) -> Tensor:
    """One device keeps the variance of the batch, the other that of the population it was drawn
    from.
    """
    return 0.9 + 0.1 * drawn(setting, 8, 3).var(0, correction=int(second(setting)))


@case("root-project/root#5367", DEVICES, "mismatch")
def reset_gate_before_or_after(setting: gl.Setting) -> Tensor:
    """The GRU of cuDNN resets the state after multiplying it by the weights, that of the CPU
    before.
    """
    state, reset, w = (
        drawn(setting, 4, 8),
        drawn(setting, 4, 8, seed=1).sigmoid(),
        drawn(setting, 8, 8, seed=2),
    )
    return (reset * (state @ w) if second(setting) else (reset * state) @ w).tanh()


@case("pytorch/pytorch#180159", NEEDS_GPU, "mismatch", "_to_copy")
def whole_number_of_nan(setting: gl.Setting) -> Tensor:
    """C++ does not define which integers NaN and infinity become; each device returns another."""
    return given(setting, [np.nan, np.inf, -np.inf, 1.5]).to(torch.int32)


@case("pytorch/pytorch#195041", DENORMALS, REDUCED, "mul|div")
def halved_below_the_smallest_normal_number(setting: gl.Setting) -> Tensor:
    """Code compiled to flush denormal numbers treats float32 numbers below 1.2e-38 as zero."""
    return drawn(setting, 64) * 1e-38 * 0.01 * 1e38


# --- shared memory --------------------------------------------------------------------------------


@case("jax-ml/jax#37830", DEVICES, "overwritten")
def one_buffer_for_every_frame(setting: gl.Setting) -> tuple[Tensor, Tensor | None]:
    """On a CPU the array shares NumPy's buffer, which the next frame overwrites; on a GPU it is
    a copy.
    """
    frames = np.random.default_rng(0).standard_normal((3, 4, 6)).astype(np.float32)
    buffer = np.empty((4, 6), np.float64 if setting.dtype == torch.float64 else np.float32)
    w, loss = (
        drawn(setting, 6, 5, seed=1, leaf=True),
        torch.zeros((), device=setting.device, dtype=setting.dtype),
    )
    for frame in frames:
        buffer[:] = frame
        loss = loss + (torch.as_tensor(buffer, device=setting.device) @ w).square().mean()
    loss.backward()
    return loss.detach(), w.grad


@case("pytorch/tutorials#485", DEVICES, "overwritten")
def target_changed_through_numpy(setting: gl.Setting) -> Tensor | None:
    """A tensor on a CPU and its NumPy array share memory, so changing one changes the other."""
    w, target = drawn(setting, 8, 3, seed=1, leaf=True), drawn(setting, 5, 3, seed=2)
    out = drawn(setting, 5, 8) @ w
    loss = (out * target).sum()
    if setting.kind == "cpu":
        target.numpy()[:] = 0
    loss.backward()
    return w.grad


# --- the run --------------------------------------------------------------------------------------


def compared(one: Case) -> tuple[str, str] | None:
    """Return the settings to run, on a GPU if there is one and the case has a pair for it."""
    cuda, cpu = one.pairs
    return (cuda if torch.cuda.is_available() else None) or cpu


def first_line(step: Any, a: str, b: str) -> dict[str, Any]:
    """Return the audit's first finding on a step, its operation, and how long the audit took."""
    start = time.perf_counter()
    try:
        first = gl.audit(step, a, b, progress=False).findings[0]
        said, at, text = first.kind, first.operation, str(first)
    except Exception as error:  # A researcher would see this error instead of an answer.
        said, at, text = "error", type(error).__name__, f"{type(error).__name__}: {error}"
    return {"said": said, "at": at, "seconds": time.perf_counter() - start, "text": text}


def examined(one: Case, pair: tuple[str, str]) -> dict[str, Any]:
    """Return the audit's first finding, and whether it was expected."""
    found = first_line(one.step(), *pair)
    return found | {
        "right": found["said"] == one.kind and re.search(one.operation, found["at"]) is not None
    }


def run(cases: list[Case]) -> pd.DataFrame:
    """Return a row for every case; `said` is missing if its settings cannot run here."""
    rows = []
    for one in tqdm(cases, disable=None):
        pair = compared(one)
        row = {"case": one.name.replace("_", " "), "thread": one.thread, "cause": one.cause}
        row |= {"a": pair[0], "b": pair[1]} if pair else {"a": "", "b": ""}
        row |= {"kind": one.kind, "operation": one.operation, "said": None, "right": False}
        rows.append(row | (examined(one, pair) if pair else {}))
    return pd.DataFrame(rows)


def totals(found: pd.DataFrame) -> pd.DataFrame:
    """Count, for each expected kind, the cases that were run and those that were right."""
    counts = (
        found[found.said.notna()].groupby("kind", sort=False).right.agg(run="size", right="sum")
    )
    counts.loc["all"] = counts.sum()
    return counts.rename_axis("expected").reset_index()


def said_instead(missed: pd.DataFrame) -> str:
    """Return the reports that do not begin with the expected line."""
    return "\n\n".join(
        f"{row[1]}, `{row.a}` against `{row.b}`:\n\n" + textwrap.indent(row.text, "    ")
        for row in missed.itertuples()
    )


def document(found: pd.DataFrame) -> str:
    """Return the text and the tables for a page."""
    done = found[found.said.notna()]
    missed = done[~done.right]
    false_mismatches = missed[(missed.said == "mismatch") & (missed.kind != "mismatch")]
    made = (
        f"{done.right.sum()} of {len(done)} audits begin with the expected line;"
        f" {len(false_mismatches)} report *mismatch* although another kind is correct."
        f" {len(found) - len(done)} cases need settings that this machine cannot run. {made_by()}"
    )
    rows = []
    for row in found.itertuples():
        expected = (
            f"{row.kind}: `{row.operation}`".replace("|", "\\|") if row.operation else row.kind
        )
        answer = ["", expected, "not run", "", ""]
        if isinstance(row.said, str):
            right = "yes" if row.right else "**no**"
            answer = [
                f"`{row.a}`, `{row.b}`",
                expected,
                f"{row.said}: `{row.at}`",
                right,
                f"{row.seconds:.1f}",
            ]
        rows.append([row.case, row.thread, row.cause, *answer])
    cases = table("case|thread|cause confirmed there|settings|expected|said|right|s", rows)
    parts = [
        made,
        markdown(totals(found)),
        cases,
        "## Other first lines" * (len(missed) > 0),
        said_instead(missed),
    ]
    return "\n\n".join(filter(None, parts))


def command(title: str, cases: list[Case]) -> None:
    """Run the command line of a script with cases."""

    def main(
        only: Annotated[
            str, typer.Option(help="names of cases, or parts of names, separated by commas")
        ] = "",
        write: Annotated[
            Path | None,
            typer.Option("--write", "--record", help="page of Markdown, between its marks"),
        ] = None,
    ) -> None:
        """Audit the cases and report how many first lines are as expected."""
        parts = [part.strip().replace(" ", "_") for part in only.split(",")]
        found = run([one for one in cases if any(part in one.name for part in parts)])
        show(
            title,
            write,
            measured=document(found) if len(found) else f"no case has {only!r} in its name",
        )

    typer.run(main)


if __name__ == "__main__":
    command("Public questions", CASES)
