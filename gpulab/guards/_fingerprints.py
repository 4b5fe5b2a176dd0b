"""Fingerprints: numbers that change when the content of a tensor changes."""

from __future__ import annotations

import ctypes
import functools
import math

import torch
import xxhash
from torch import Tensor

from gpulab._torch_internals import component_tensors, dispatch_disabled

# A large tensor is digested in rows of words. Each place in a row has a random multiplier.
MAX_ROW_WORDS = 1 << 16
MIN_ROW_WORDS = 1 << 6  # a tensor whose rows would be shorter is padded with zeros
MAX_CHUNK_WORDS = 1 << 24  # words that are multiplied at a time, which bounds the memory in use
# The integer type of each word size. A tensor is read in the widest type that fits.
WORD_DTYPES = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
}
MAX_HASHED_ON_HOST = 1 << 12  # numbers of a tensor that is copied from a GPU and hashed on the host


def fingerprint(tensor: Tensor) -> int | Tensor | None:
    """Compute a number that depends on every bit of a tensor's content and on its position.

    On a CPU it is the XXH3 hash of the tensor's memory. On other devices it is a sum modulo 2^64:
    each 32-bit word is multiplied by a random 64-bit number that belongs to its position. A large
    tensor is split into rows. The sum of each row is computed, and then in the same way the sum of
    these sums. Two different contents have the same fingerprint with a probability of about 2^-32.
    Dense memory is read in place; a view with gaps is copied.

    Args:
        tensor: A tensor of any shape, type and layout.

    Returns:
        An integer on a CPU. On other devices, an int64 tensor () on the same device, so that the
        program need not wait for it. None if torch does not expose the content.

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
    with dispatch_disabled():  # Modes that watch operations must not see these.
        if any(component.device.type != "cpu" for component in ordinary):
            digests = [_digest(component) for component in ordinary]
            return digests[0] if len(digests) == 1 else _digest(torch.stack(digests))
        hashed = xxhash.xxh3_64()
        for flat in map(_flatten_in_memory_order, ordinary):
            hashed.update(host_memory(flat.data_ptr(), flat.data_ptr() + flat.nbytes))
        return hashed.intdigest()


def _flatten_in_memory_order(tensor: Tensor) -> Tensor:
    """Return the elements in memory order, each once; copy them only if there are gaps.

    >>> (
    ...     _flatten_in_memory_order(torch.arange(6).reshape(2, 3).T).tolist(),
    ...     _flatten_in_memory_order(torch.ones(1, 1).expand(4, 1)).tolist(),
    ... )
    ([0, 1, 2, 3, 4, 5], [1.0])
    """
    if not tensor.is_contiguous():
        # An expanded dimension repeats the same elements, so one of them is enough.
        for dim, stride in enumerate(tensor.stride()):
            if stride == 0 and tensor.shape[dim] > 1:
                tensor = tensor.narrow(dim, 0, 1)
        strides = tensor.stride()
        tensor = tensor.permute(
            sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
        ).contiguous()
    return tensor.as_strided((tensor.numel(),), (1,))


def host_memory(start: int, stop: int) -> ctypes.Array[ctypes.c_char]:
    """Return a view of the host's memory from `start` up to, not including, `stop`."""
    # `.numpy()` is not used, because torch would then refuse to resize the tensor.
    return (ctypes.c_char * (stop - start)).from_address(start)


def memory_digest(start: int, stop: int) -> int:
    """Compute a 64-bit digest of the host's memory from `start` up to, not including, `stop`."""
    return xxhash.xxh3_64_intdigest(host_memory(start, stop))


def content_digest(tensor: Tensor) -> int:
    """Compute a 64-bit digest of the content of an ordinary tensor.

    A large tensor is not copied to the host, so its digests on a CPU and on a GPU differ.

    >>> # The names of recorded values come from these numbers, so they must not change.
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
    """Compute the digest of a tensor that is not on a CPU; see `fingerprint`.

    It uses few kernels, because launching them takes most of the time. `level` is the depth of the
    recursion: each level has its own multipliers.
    """
    flat = _flatten_in_memory_order(tensor)
    size = flat.element_size()
    # The widest word of at most 4 bytes that divides the tensor's size and offset in bytes.
    words = flat.view(WORD_DTYPES[math.gcd(4, size * len(flat), size * flat.storage_offset())])
    multipliers = _random_multipliers(str(words.device), level)
    if len(words) <= MAX_ROW_WORDS:
        return (words * multipliers[: len(words)]).sum()
    if len(words) > MAX_CHUNK_WORDS:
        # The sums of rows within a chunk have the next level, so the digests of chunks skip it.
        return _digest(
            torch.stack([_digest(chunk, level) for chunk in words.split(MAX_CHUNK_WORDS)]),
            level + 2,
        )
    # The length of a row: the largest power of two that divides the number of words.
    width = min(len(words) & -len(words), MAX_ROW_WORDS)
    if width < MIN_ROW_WORDS:
        words = torch.nn.functional.pad(words, (0, -len(words) % MAX_ROW_WORDS))
        width = MAX_ROW_WORDS
    return _digest((words.view(-1, width) * multipliers[:width]).sum(1), level + 1)


@functools.cache
def _random_multipliers(device: str, level: int) -> Tensor:
    """Return the random 64-bit numbers of a level, one for each position in a row."""
    # A separate generator leaves the user's random state unchanged.
    generator = torch.Generator().manual_seed(level)
    return torch.randint(-(1 << 63), (1 << 63) - 1, (MAX_ROW_WORDS,), generator=generator).to(
        device
    )
