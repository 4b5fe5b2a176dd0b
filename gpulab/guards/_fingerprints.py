"""Fingerprints: a number that changes when the content of a tensor changes."""

from __future__ import annotations

import ctypes
import functools
import math

import torch
import xxhash
from torch import Tensor

from gpulab._torch_internals import component_tensors, dispatch_disabled

MAX_ROW_WORDS = 1 << 16  # random numbers, one for each place in a row of words
# words in a row; a tensor that would have shorter ones is filled up with zeros
MIN_ROW_WORDS = 1 << 6
MAX_CHUNK_WORDS = 1 << 24  # words that are multiplied at a time: what bounds the memory for it
# The integer type of each word size; a tensor is read in the widest that fits.
WORD_DTYPES = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
}
MAX_HASHED_ON_HOST = 1 << 12  # numbers that are brought from a GPU to be hashed


def fingerprint(tensor: Tensor) -> int | Tensor | None:
    """A number that stands for the content of a tensor, bit by bit and place by place.

    On a CPU it is the XXH3 hash of the tensor's memory. On another device it is the sum of the
    32-bit words, each times a random 64-bit number of its place, modulo 2^64; of a large tensor
    each row has such a sum, and then the sums have one. Two contents share a fingerprint by
    accident with a probability of about 2^-32. Dense memory is read where it lies; a view with gaps
    is copied.

    Args:
        tensor: of any shape, type and layout.

    Returns:
        On a CPU a whole number; elsewhere an int64 tensor () that stays there, so that nobody has
        to wait for it; None where torch gives no content away.

    Examples:
        >>> x = torch.arange(6.0)
        >>> fingerprint(x) == fingerprint(x.clone()), fingerprint(x) == fingerprint(x.flip(0))
        (True, False)

    References:
        Carter, Wegman 1979, *Universal classes of hash functions*.
    """
    ordinary = component_tensors(tensor.detach())
    if not ordinary:
        return None
    with dispatch_disabled():  # nobody who watches operations is to see these
        if any(component.device.type != "cpu" for component in ordinary):
            digests = [_digest(component) for component in ordinary]
            return digests[0] if len(digests) == 1 else _digest(torch.stack(digests))
        hashed = xxhash.xxh3_64()
        for flat in map(_flatten_in_memory_order, ordinary):
            hashed.update(host_memory(flat.data_ptr(), flat.data_ptr() + flat.nbytes))
        return hashed.intdigest()


def _flatten_in_memory_order(tensor: Tensor) -> Tensor:
    """The elements in memory order, each once; they are copied only if there are gaps.

    >>> (
    ...     _flatten_in_memory_order(torch.arange(6).reshape(2, 3).T).tolist(),
    ...     _flatten_in_memory_order(torch.ones(1, 1).expand(4, 1)).tolist(),
    ... )
    ([0, 1, 2, 3, 4, 5], [1.0])
    """
    if not tensor.is_contiguous():
        for dim, stride in enumerate(tensor.stride()):
            if stride == 0 and tensor.shape[dim] > 1:
                tensor = tensor.narrow(dim, 0, 1)
        strides = tensor.stride()
        tensor = tensor.permute(
            sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
        ).contiguous()
    return tensor.as_strided((tensor.numel(),), (1,))


def host_memory(start: int, stop: int) -> ctypes.Array[ctypes.c_char]:
    """The host's memory from one address to before another, as it is whenever it is read."""
    # Not through .numpy(), after which torch would refuse to resize the tensor.
    return (ctypes.c_char * (stop - start)).from_address(start)


def memory_digest(start: int, stop: int) -> int:
    """A 64-bit digest of the host's memory from one address up to another, exclusive."""
    return xxhash.xxh3_64_intdigest(host_memory(start, stop))


def content_digest(tensor: Tensor) -> int:
    """A 64-bit digest of the content of an ordinary tensor.

    A large tensor has different digests on a CPU and on a GPU, since it is not copied to the host.

    >>> # The names of recorded values come from these numbers.
    >>> (
    ...     content_digest(torch.arange(3.0)),
    ...     content_digest(torch.arange(2**24 + 1)),
    ... )
    (7541795801147682588, 12559343085713087326)
    """
    ordered = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if ordered.numel() <= MAX_HASHED_ON_HOST:
        ordered = ordered.cpu()
    return int(fingerprint(ordered))  # type: ignore[arg-type]


def _digest(tensor: Tensor, level: int = 0) -> Tensor:
    """Few kernels: on a GPU it is their launching that costs."""
    flat = _flatten_in_memory_order(tensor)
    size = flat.element_size()
    words = flat.view(WORD_DTYPES[math.gcd(4, size * len(flat), size * flat.storage_offset())])
    multipliers = _random_multipliers(str(words.device), level)
    if len(words) <= MAX_ROW_WORDS:
        return (words * multipliers[: len(words)]).sum()
    if len(words) > MAX_CHUNK_WORDS:
        return _digest(
            torch.stack([_digest(chunk, level) for chunk in words.split(MAX_CHUNK_WORDS)]),
            level + 2,
        )
    # The largest power of two that divides the number of words.
    width = min(len(words) & -len(words), MAX_ROW_WORDS)
    if width < MIN_ROW_WORDS:
        words = torch.nn.functional.pad(words, (0, -len(words) % MAX_ROW_WORDS))
        width = MAX_ROW_WORDS
    return _digest((words.view(-1, width) * multipliers[:width]).sum(1), level + 1)


@functools.cache
def _random_multipliers(device: str, level: int) -> Tensor:
    generator = torch.Generator().manual_seed(level)  # the user's random numbers are left alone
    return torch.randint(-(1 << 63), (1 << 63) - 1, (MAX_ROW_WORDS,), generator=generator).to(
        device
    )
