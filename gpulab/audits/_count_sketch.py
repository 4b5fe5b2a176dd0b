"""The record of a tensor in a trace: a hash of its content, and a sketch of at most 64 numbers."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gpulab._torch_internals import Nested, component_tensors, find_tensors
from gpulab.guards._fingerprints import content_digest

# The length of a sketch. A tensor with at most this many numbers is its own sketch. Distances
# between sketches are accurate to about a fifth.
SKETCH_SIZE = 64
MAX_SKETCHED_NUMBER = 2.0**127  # sums and squares of such numbers are finite
FLOAT64_DEVICES = ("cpu", "cuda", "meta")  # device types that always support float64
BLOCK_SIZE = 1 << 20  # numbers sketched at a time; the limit bounds the memory for their signs


def nonempty_components(values: Nested) -> list[Tensor]:
    """Return the nonempty tensors among nested values, in order.

    Sparse and jagged tensors are replaced by their parts.
    """
    return [
        component
        for value in find_tensors(values)
        for component in component_tensors(value)
        if component.numel()
    ]


def is_strided(tensor: Tensor) -> bool:
    """Return whether a tensor is strided: not sparse, nested or quantised.

    >>> is_strided(torch.eye(2)), is_strided(torch.eye(2).to_sparse())
    (True, False)
    """
    return tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_quantized


def is_float_or_complex(tensor: Tensor) -> bool:
    """Return whether a tensor holds floating-point or complex numbers, which rounding affects."""
    return tensor.is_floating_point() or tensor.is_complex()


def content_id(tensor: Tensor, digest: int | None = None) -> str:
    """Return a hash of a tensor's content, type and shape, which is the same on every device.

    The digest of the content is computed if it is not given.

    >>> content_id(torch.arange(3.0))  # existing files of traces contain this hash
    '1cb49f68f94f8002eb0f1fdf'
    """
    digest = content_digest(tensor) if digest is None else digest
    text = f"{tensor.dtype}{tuple(tensor.shape)}{digest}"
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def to_float64_device(tensor: Tensor) -> Tensor:
    """Move a tensor to the CPU if its device, such as an Apple GPU, may not support float64."""
    return tensor if tensor.device.type in FLOAT64_DEVICES else tensor.cpu()


def sketch(tensor: Tensor) -> np.ndarray:
    """Compute the sketch of a tensor in float64.

    The sketch of a small tensor consists of its numbers. That of a large tensor consists of
    `SKETCH_SIZE` sums of its numbers with pseudorandom signs. This is a count sketch (Charikar,
    Chen, Farach-Colton 2002). It is linear, so the distance of two tensors can be estimated from
    their sketches. The signs depend only on the position, and are equal on every machine. In the
    sums, infinity counts as `MAX_SKETCHED_NUMBER`, and NaN as zero.

    >>> sketch(torch.arange(5000.0))[:4].tolist()  # existing files of traces contain these numbers
    [-6788.0, 10228.0, -36556.0, -14178.0]
    >>> sketch(torch.arange(BLOCK_SIZE + 5000.0))[:3].tolist()
    [-79262916.0, -42136738.0, -19806478.0]
    >>> holed, nothing = torch.ones(5000), torch.ones(5000)
    >>> holed[7], nothing[7] = torch.nan, 0.0
    >>> bool((sketch(holed) == sketch(nothing)).all())
    True
    """
    tensor = to_float64_device(tensor.detach())
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    numbers = tensor.reshape(-1)
    if numbers.numel() <= SKETCH_SIZE:
        return numbers.to("cpu", torch.float64, copy=True).numpy()
    sums = _sketch_sums(numbers)
    if np.isfinite(sums).all():
        return sums
    finite_numbers = (
        numbers.double().nan_to_num(0.0).clamp(-MAX_SKETCHED_NUMBER, MAX_SKETCHED_NUMBER)
    )
    return _sketch_sums(finite_numbers)


def _sketch_sums(numbers: Tensor) -> np.ndarray:
    """Sum the sketches of all blocks, with a shift and a sign that depend on the block."""
    if numbers.numel() <= BLOCK_SIZE:
        return _block_sums(numbers, shift=0)
    blocks = enumerate(numbers.split(BLOCK_SIZE))
    return np.sum(
        [_block_sums(block, number % SKETCH_SIZE) * (-1) ** number for number, block in blocks],
        axis=0,
    )


def _block_sums(numbers: Tensor, shift: int) -> np.ndarray:
    """Compute the sketch of a block.

    The signed numbers are split into `SKETCH_SIZE` consecutive stretches. Each stretch is summed
    into `SKETCH_SIZE` columns. The columns of all stretches are added, each stretch rotated by one
    more position than the previous one, and all of them by `shift`.
    """
    count = numbers.numel()
    signed = numbers.new_empty(
        SKETCH_SIZE * SKETCH_SIZE * math.ceil(count / SKETCH_SIZE**2), dtype=torch.float64
    )
    # Conversion and product are two operations, because torch is slower if they are one.
    signed[:count].copy_(numbers).mul_(_signs(str(numbers.device))[:count])
    signed[count:] = 0.0  # pad the last stretch
    folded = signed.view(SKETCH_SIZE, -1, SKETCH_SIZE).sum(1).cpu().numpy()
    with np.errstate(invalid="ignore", over="ignore"):
        return folded.ravel()[_shifted_indices(shift)].sum(0)


@functools.cache
def _shifted_indices(shift: int) -> np.ndarray:
    """Return flat indices that rotate row r of a square array by r + `shift` positions."""
    rows = np.arange(SKETCH_SIZE)[:, None]
    return rows * SKETCH_SIZE + (np.arange(SKETCH_SIZE) - rows - shift) % SKETCH_SIZE


@functools.cache
def _signs(device: str) -> Tensor:
    """Compute a pseudorandom sign for each element of a block.

    The constants and shifts are those of splitmix64 (Steele et al. 2014), applied to the index of
    the element. The sign is the highest bit of the result.
    """
    with np.errstate(over="ignore"):
        x = (np.arange(BLOCK_SIZE, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        highest_bit = (x ^ (x >> np.uint64(31))) >> np.uint64(63)
    signs = np.where(highest_bit, -1.0, 1.0)
    return torch.from_numpy(signs).to(device)


def shrinking_factors(like: Tensor, draw: int, unit: float) -> Tensor:
    """Return 1 or 1 − 2 `unit` in float64, at random for each number and each `draw`.

    >>> shrinking_factors(torch.zeros(8), 3, 0.25).tolist()
    [0.5, 1.0, 1.0, 0.5, 0.5, 0.5, 1.0, 1.0]
    """
    count = like.numel()
    # Each draw starts at another position. 7919 is a prime number.
    start = draw * 7919 % (BLOCK_SIZE - min(count, BLOCK_SIZE) + 1)
    factors = _block_of_shrinking_factors(str(like.device), unit)[start : start + count]
    if count > BLOCK_SIZE:
        factors = factors.repeat(math.ceil(count / BLOCK_SIZE))[:count]
    return factors.view(like.shape)


@functools.cache
def _block_of_shrinking_factors(device: str, unit: float) -> Tensor:
    """Compute a factor for each element of a block."""
    return 1 + unit * _signs(device) - unit


def relative_distance(x: np.ndarray, reference: np.ndarray) -> float:
    """Compute the distance of two sketches relative to the norm of the second.

    Positions at which both are NaN or the same infinity are left out.

    Returns:
        The distance; NaN if the shapes differ or only one sketch is NaN at some position; infinity
        if the reference is zero and the other sketch is not.
    """
    if x.shape != reference.shape:
        return math.nan
    with np.errstate(over="ignore", invalid="ignore"):  # the norm of very large numbers overflows
        is_same_nonfinite = (np.isnan(x) & np.isnan(reference)) | (np.isinf(x) & (x == reference))
        size = float(np.linalg.norm(reference[~is_same_nonfinite]))
        difference = float(np.linalg.norm((x - reference)[~is_same_nonfinite]))
    if size:
        return difference / size
    return math.inf if difference else 0.0


def max_distance(sketches: Sequence[np.ndarray], references: Sequence[np.ndarray]) -> float:
    """Return the largest relative distance between paired sketches; infinity without pairs."""
    distances = (relative_distance(x, y) for x, y in zip(sketches, references, strict=False))
    return max(distances, default=math.inf)
