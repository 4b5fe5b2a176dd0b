"""Emulation of another chip's arithmetic: PyTorch's matrix products, rounded as on that chip.

Chips differ in two ways:

- They round the factors of a product to different formats. This causes nearly all of the difference
  between results, and is cheap to imitate.
- They sum the products in different orders.

Sources: Fasi, Higham, Mikaitis, Pranesh 2021, *Numerical behavior of NVIDIA tensor cores* (PeerJ
Computer Science 7:e330); Xie, Wang, Yang, Yang 2025, *MMA-Sim* (arXiv 2511.10909); Khattak,
Mikaitis 2025, *Accurate models of NVIDIA tensor cores* (arXiv 2512.07004); NVIDIA, *A100 Tensor
Core GPU Architecture* (TF32).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from gpulab._torch_internals import (
    Nested,
    OpOverload,
    UncompiledDispatchMode,
    active_dispatch_modes,
    call_composite_kernel,
    has_wrapper_subclass,
    is_composite,
    operation_name,
    schema_name,
    without_fused_rnn,
)
from gpulab.errors import GpulabError, UsageError
from gpulab.guards._call_sites import innermost_line
from gpulab.numerics._flags import precision_allowed, restore_tf32_on_exit, switch_tf32
from gpulab.numerics._formats import FORMATS, round_to

# --- what chips do --------------------------------------------------------------------------------

ORDERS = ("sequential", "pairwise", "tensor-core")
MATRIX, CONVOLUTION, WEIGHT = range(3)  # kinds of product: the indices of `Arithmetic.roundings`
# The number of products computed together: in float64 a tensor of 2 MiB, which fits into caches.
MAX_CHUNK_PRODUCTS = 1 << 18


@dataclass(frozen=True)
class Arithmetic:
    """How a chip multiplies matrices of float32 numbers.

    Attributes:
        name: The name of the format or the chip.
        format: The format to which the factors are rounded, a name of `gpulab.numerics.FORMATS`.
        roundings: The modes of `gpulab.numerics.round_to` by which factors are rounded, for three
            kinds of product: matrix products; convolutions and the gradients of their inputs; the
            gradients of convolutions' weights.
        result: The format to which the float32 sum is rounded.
        order: The order in which products are added (see `gpulab.numerics.emulate`). None leaves
            the order to this machine's libraries.
        slices: The number of partial sums that a sum is split into; these are added in turn.
        block_size: The number of products that a tensor core adds to the sum at once.
        fraction_bits: The number of bits of each product that a tensor core keeps below the leading
            bit of the largest term in the block.
        significant_bits: The number of significant bits of the new sum that a tensor core keeps.
        slice_multiple: The number of products in a slice is a multiple of this.
        channel_tile: The number of channels in a tile. A convolution adds the products of one tile
            at every position of its kernel before it begins the next tile. None means one tile of
            all channels.
    """

    name: str
    format: str = "float32"
    roundings: tuple[str, str, str] = ("nearest", "nearest", "nearest")
    result: str = "float32"
    order: str | None = None
    slices: int = 1
    block_size: int = 8
    fraction_bits: int = 25
    significant_bits: int = 24
    slice_multiple: int = 8
    channel_tile: int | None = None

    def round_factor(self, x: Tensor, kind: int = MATRIX) -> Tensor:
        """Round a factor to the format.

        For an 8-bit format, the factor is first multiplied by a power of two, and divided by it
        after rounding. The power brings the largest number close to the format's largest number.
        """
        if self.format == "float32":
            return x
        if not self.format.startswith("float8"):
            return round_to(x, self.format, self.roundings[kind])
        largest = x.abs().amax() if x.numel() else x.new_tensor(1.0)
        exponent = torch.log2(FORMATS[self.format].largest / largest).floor()
        # A tensor of zeros, or with infinities or NaN, is not scaled. The limits of the exponent
        # keep the scaled numbers and the scale itself within float32's range.
        scale = torch.where(exponent.isfinite(), torch.exp2(exponent.clamp(-100, 100)), 1.0)
        return round_to(x * scale, self.format, self.roundings[kind]) / scale

    def round_result(self, x: Tensor) -> Tensor:
        """Round a product to the result's format; make it contiguous, like a kernel's output."""
        return (x if self.result == "float32" else round_to(x, self.result)).contiguous()

    @property
    def sums_in_order(self) -> bool:
        """Whether `multiply` sums the products itself, without this machine's libraries."""
        if self.order == "tensor-core" and self.format == "float32":
            return False  # Tensor cores do not take float32 factors.
        return self.order is not None or self.slices > 1

    def multiply(self, a: Tensor, b: Tensor) -> Tensor:
        """Multiply float32 matrices (…, M, K) and (…, K, N), summing in the emulated order.

        The factors are not rounded here: `round_factor` does that.
        """
        # −(−a // b) rounds a / b up.
        slice_size = max(1, -(-a.shape[-1] // self.slices))
        if self.order == "tensor-core":
            slice_size = -(-slice_size // self.slice_multiple) * self.slice_multiple
        tensor_core = functools.partial(_multiply_on_tensor_core, arithmetic=self)
        add_up: dict[str | None, Callable[[Tensor, Tensor], Tensor]] = {
            None: torch.matmul,
            "sequential": _multiply_sequentially,
            "pairwise": _multiply_pairwise,
            "tensor-core": tensor_core,
        }
        slices = zip(a.split(slice_size, -1), b.split(slice_size, -2), strict=True)
        return functools.reduce(torch.add, itertools.starmap(add_up[self.order], slices))


# A GPU returns 16-bit results for 16-bit factors, as autocast requests them. Its tensor cores keep
# 14 bits in sums of 8-bit products.
PRECISIONS = {name: Arithmetic(name, name) for name in FORMATS}
PRECISIONS |= {
    n: Arithmetic(n, n, result=n, block_size=16, slice_multiple=64) for n in ("bfloat16", "float16")
}
PRECISIONS |= {
    n: Arithmetic(n, n, block_size=32, fraction_bits=13, significant_bits=14, slice_multiple=128)
    for n in ("float8_e4m3fn", "float8_e5m2")
}
# Generations of cards whose tensor cores round float32 numbers to TF32. Older cards multiply
# float32 numbers without tensor cores. Blocks and bits are those of Fasi et al. 2021 and Xie et al.
# 2025. Roundings and tiles were measured on an H200, which runs cuBLAS's and cuDNN's kernels for
# both generations. Blocks and bits of hopper were measured as well (data/measured).
CHIPS = {
    "ampere": Arithmetic(
        "ampere", "tf32", ("nearest", "away", "away"), block_size=4, fraction_bits=24
    ),
    "hopper": Arithmetic("hopper", "tf32", ("nearest", "nearest", "truncate"), channel_tile=32),
}
ARITHMETICS = PRECISIONS | CHIPS


def find_arithmetic(name: str = "float32", order: str | None = None) -> Arithmetic:
    """Look up an arithmetic by the name of a format or a chip, and set its order of summation.

    Raises:
        UsageError: For an unknown name or order, and for tensor cores with float32.
    """
    if name not in ARITHMETICS:
        raise UsageError(
            f"arithmetic {name!r}: expected a format, {', '.join(PRECISIONS)}, or"
            f" {' or '.join(CHIPS)}"
        )
    # An order, `split-N`, or both joined by a plus sign. The pattern also matches an empty string,
    # which stands for None here. An empty string given by the caller is an error.
    words = re.fullmatch(rf"({'|'.join(ORDERS)})?(?:(?:^|\+)split-([1-9]\d{{0,3}}))?", order or "")
    if words is None or order == "":
        raise UsageError(
            f"order {order!r}: expected {', '.join(ORDERS)}, or split-N (N partial sums, added in"
            f" turn; N from 1 to 9999), or both, such as {ORDERS[-1]}+split-4"
        )
    slice_order, slices = words.groups()
    if slice_order == "tensor-core" and name == "float32":
        raise UsageError(
            f"order {order!r}: there are no tensor cores for {name}; use tf32, ampere or hopper,"
            " for example"
        )
    return replace(ARITHMETICS[name], order=slice_order, slices=int(slices or 1))


def round_factor_to(x: Tensor, name: str, rounding: str = "nearest") -> Tensor:
    """Round a factor of a matrix product to a format; see `Arithmetic.round_factor`."""
    same_for_all_kinds = (rounding, rounding, rounding)
    return replace(find_arithmetic(name), roundings=same_for_all_kinds).round_factor(x)


# --- orders of summation --------------------------------------------------------------------------


def _multiply_sequentially(a: Tensor, b: Tensor) -> Tensor:
    """Multiply matrices by sequential fused multiply-adds, like a GPU thread without tensor cores.

    A fused multiply-add rounds once. Here the product is exact in float64, the sum is rounded to
    float64, and then to float32. The first of these two roundings rarely changes the result.
    """
    a = a.double()
    b = b.double()
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    total = a.new_zeros(*batch, a.shape[-2], b.shape[-1])
    for k in range(a.shape[-1]):
        column = a[..., :, k : k + 1]
        row = b[..., k : k + 1, :]
        total = torch.addcmul(total, column, row).float().double()
    return total.float()


def _multiply_pairwise(a: Tensor, b: Tensor) -> Tensor:
    """Multiply matrices by pairwise summation of the products.

    The sum is split into two sums. The number of products in the first is the largest power of two
    below the number of all products.
    """
    terms = a.shape[-1]
    if terms < 2:
        # The sum of one product, or of none, which is zero.
        return (a[..., None] * b[..., None, :, :]).sum(-2)
    half = 1 << ((terms - 1).bit_length() - 1)  # the largest power of two below `terms`
    first_sum = _multiply_pairwise(a[..., :half], b[..., :half, :])
    second_sum = _multiply_pairwise(a[..., half:], b[..., half:, :])
    return first_sum + second_sum


def _multiply_on_tensor_core(a: Tensor, b: Tensor, arithmetic: Arithmetic) -> Tensor:
    """Multiply matrices as a tensor core does, block by block (see `_sum_in_blocks`).

    The rows are computed in chunks, so that the products of a block fit into caches.
    """
    matrices = math.prod(torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]))
    products_per_row = matrices * arithmetic.block_size * b.shape[-1]
    rows = max(1, MAX_CHUNK_PRODUCTS // max(1, products_per_row))
    row_chunks = a.split(rows, dim=-2)
    return torch.cat([_sum_in_blocks(chunk, b, arithmetic) for chunk in row_chunks], dim=-2)


def _sum_in_blocks(a: Tensor, b: Tensor, arithmetic: Arithmetic) -> Tensor:
    """Multiply matrices (…, M, K) and (…, K, N), summing in blocks as a tensor core does.

    A tensor core adds all products of a block to the running sum at once. It aligns the terms to
    the largest exponent, truncates them there, adds them exactly, and truncates the new sum.
    """
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    total = a.new_zeros(*batch, a.shape[-2], b.shape[-1], dtype=torch.float64)
    for start in range(0, a.shape[-1], arithmetic.block_size):
        span = slice(start, start + arithmetic.block_size)
        columns = a[..., span, None]
        rows = b[..., None, span, :]
        products = columns.double() * rows.double()  # (…, M, block, N), exact
        # A product's exponent is taken as the sum of its factors' exponents, before a carry.
        largest_of_products = (_exponents(columns) + _exponents(rows)).amax(-2)
        largest = torch.maximum(largest_of_products, _exponents(total.float()))
        # Every term is truncated to a whole number of last places.
        last_place = _power_of_two(largest - arithmetic.fraction_bits)
        aligned_products = torch.trunc(products / last_place[..., None, :])
        aligned_sum = aligned_products.sum(-2) + torch.trunc(total / last_place)
        new_total = _truncate(aligned_sum * last_place, arithmetic.significant_bits)
        # Infinities and NaN cannot be aligned. Their sum is computed directly.
        all_finite = products.isfinite().all(-2) & total.isfinite()
        total = new_total.where(all_finite, products.sum(-2) + total)
    return total.float()


def _exponents(x: Tensor) -> Tensor:
    """Return the exponent of each float32 number.

    Zeros and subnormals get the smallest exponent of a normal number.

    >>> _exponents(torch.tensor([1.0, 6.0, 0.0])).tolist()
    [0, 2, -126]
    """
    # float32 stores the exponent in the 8 bits above the 23 of its fraction, increased by 127.
    return (x.view(torch.int32) >> 23).bitwise_and_(0xFF).clamp_min_(1).sub_(127)


def _truncate(x: Tensor, bits: int) -> Tensor:
    """Truncate float64 numbers to `bits` significant bits, in float32's range."""
    # `frexp` gives a significand in [0.5, 1), so −125 belongs to float32's smallest normal number.
    step = _power_of_two(torch.frexp(x).exponent.clamp_min(-125) - bits)
    return (torch.trunc(x / step) * step).float().double()


def _power_of_two(exponent: Tensor) -> Tensor:
    """Compute two to the power of whole numbers from -1022 to 1023, exactly, in float64."""
    # float64 stores the exponent in the bits above the 52 of its fraction, increased by 1023.
    return ((exponent.to(torch.int64) + 1023) << 52).view(torch.float64)


# --- emulation ------------------------------------------------------------------------------------


@contextlib.contextmanager
def emulate(
    name: str | Arithmetic = "float32", *, order: str | None = None
) -> Iterator[Arithmetic]:
    """Compute matrix products and convolutions in the `with` block as another chip would.

    The emulation applies to float32 products of any PyTorch code, forward and backward, on any
    device. Recurrent layers are split into matrix products. If emulations are nested, the innermost
    one applies.

    A card that has TF32 (`ampere`, `hopper`) uses it only if the program allows it, and so does the
    emulation:

    - for matrix products, through `torch.backends.cuda.matmul` or
      `torch.set_float32_matmul_precision`; not allowed by default (since torch 1.12);
    - for convolutions, through `torch.backends.cudnn`; allowed by default.

    The setting `cpu:tf32=on,emulate=ampere` allows both. If `name` is a format or an `Arithmetic`,
    it applies regardless of these flags.

    An emulation cannot predict which kernel a library will choose. For example, an H200 computes
    many small convolutions in float32 even if TF32 is allowed (`benchmarks/results/products.md`).

    Args:
        name: The arithmetic, given in one of three ways:

            - A format: `tf32`, `bfloat16`, `float16`, `float8_e4m3fn`, `float8_e5m2` or `float32`.
              Products in a 16-bit format return 16-bit numbers, as with autocast. An 8-bit format
              first scales each tensor to its range, as torchao does.
            - A generation of cards: `ampere` (RTX 30, A100) or `hopper` (H100, H200).
            - An `Arithmetic`, such as the one that this function yields.
        order: The order in which products are added:

            - `sequential`: one after the other;
            - `pairwise`: neighbours first, then their sums;
            - `tensor-core`: in the blocks of the chip's tensor cores;
            - `split-N`: in N partial sums, which are then added in turn, as with N threads or a
              split-K kernel. `tensor-core+split-4` combines two orders;
            - None: in the order of this machine's libraries. This is fast, because only the factors
              and results are rounded, and sums are computed in float32.

            The libraries always determine the order for numbers that are not float32.

    Yields:
        The `Arithmetic` that is emulated.

    Raises:
        UsageError: If the name or the order is unknown, or if there are no tensor cores for the
            format.
        GpulabError: Inside the block, if the emulation cannot reach the products of an operation.
            If an order is given, also if a convolution is dilated, transposed, grouped, or not over
            two dimensions.

    Examples:
        >>> import torch
        >>> import gpulab as gl
        >>> x = torch.tensor([[1.0, 1 / 3]])
        >>> with gl.emulate("tf32"):
        ...     (x @ x.T).item()
        1.1110568046569824

    References:
        Fasi, Higham, Mikaitis, Pranesh 2021, *Numerical behavior of NVIDIA tensor cores* (PeerJ
        Computer Science 7:e330); Xie, Wang, Yang, Yang 2025, *MMA-Sim* (arXiv 2511.10909).
    """
    arithmetic = name if isinstance(name, Arithmetic) else find_arithmetic(name, order)
    # Where the program does not allow TF32, these cards do not round the factors.
    follows_tf32_flags = name in CHIPS and arithmetic.format == "tf32"
    without_tf32 = replace(arithmetic, format="float32") if follows_tf32_flags else arithmetic
    with contextlib.ExitStack() as stack:
        # An outer emulation is paused, and resumes when this one ends.
        for mode in active_emulators():
            stack.callback(setattr, mode, "is_paused", False)
            mode.is_paused = True
        stack.callback(
            torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled()
        )
        # The fast path of attention and its fused kernels would hide their products.
        torch.backends.mha.set_fastpath_enabled(False)
        with (
            sdpa_kernel(SDPBackend.MATH),
            _UnfusedRecurrentLayers(),
            _Emulator(arithmetic, without_tf32),
        ):
            yield arithmetic


def active_emulators() -> list[_Emulator]:
    """Return a list with the active emulator, which is empty outside emulations."""
    return [
        mode
        for mode in active_dispatch_modes()
        if isinstance(mode, _Emulator) and not mode.is_paused
    ]


@contextlib.contextmanager
def float32_products() -> Iterator[None]:
    """Compute matrix products and convolutions in the `with` block in float32, in any setting.

    It is meant for the few lines of a training program that need full precision, while the rest may
    use TF32 or emulated arithmetic. If `backward` runs after the block, as is usual, the products
    of the backward pass are computed as the setting requires.

    Examples:
        >>> import torch
        >>> import gpulab as gl
        >>> x = torch.tensor([[1.0, 1 / 3]])
        >>> with gl.setting("cpu:emulate=tf32"):
        ...     with gl.float32_products():
        ...         inside = (x @ x.T).item()
        ...     inside, (x @ x.T).item()
        (1.1111111640930176, 1.1110568046569824)
    """
    with (
        restore_tf32_on_exit(),
        emulate("float32") if active_emulators() else contextlib.nullcontext(),
    ):
        switch_tf32(False)
        yield


# --- which operations -----------------------------------------------------------------------------

MATRIX_PRODUCTS = {"mm", "bmm", "mv", "dot", "vdot"}
# The first argument of these operations is the summand; the two factors follow.
SUMS_WITH_PRODUCTS = {
    "addmm",
    "addmv",
    "baddbmm",
    "addbmm",
}
# Operations whose kernels call other operations for their products. A mode does not see these calls
# unless it runs the composite kernel itself.
COMPOSED_OPERATIONS = {
    "_euclidean_dist",
    "_trilinear",
    "affine_grid_generator",
    "conv_tbc",
    "linalg_pinv",
}
# Operations that compute products of intermediate results, which rounding their arguments does not
# affect.
FUSED_PATTERN = re.compile(
    r"_?(mkldnn_rnn|cudnn_rnn|miopen_rnn|thnn_fused|scaled_dot_product|flash_attention|efficient_attention"
    r"|native_multi_head|transformer_encoder|mkldnn_linear|scaled_mm|grouped_mm|addmm_activation|cdist_forward"
    r"|linalg_matrix_exp|linalg_matrix_sqrth|linalg_polar|linear_cross_entropy).*"
)


class _Emulator(UncompiledDispatchMode):
    """Intercepts each operation below autograd, in both passes, and emulates products.

    Products for which the program does not allow TF32 are computed with the arithmetic
    `without_tf32`. A paused emulator changes nothing.
    """

    def __init__(self, arithmetic: Arithmetic, without_tf32: Arithmetic) -> None:
        super().__init__()
        self.arithmetic = arithmetic
        self.without_tf32 = without_tf32
        self.is_paused = False

    def __torch_dispatch__(
        self,
        operation: OpOverload,
        types: Sequence[type],
        args: Sequence[Nested] = (),
        kwargs: dict[str, Nested] | None = None,
    ) -> Nested:
        """Run an operation; compute it as the chip would if it is a product.

        Raises:
            GpulabError: For a fused operation whose products cannot be reached.
        """
        kwargs = kwargs or {}
        if self.is_paused:
            return operation(*args, **kwargs)
        if has_wrapper_subclass(types):
            # The class of a nested tensor, for instance, calls operations on its parts.
            return NotImplemented
        name = _product_name(operation)
        # Composite operations arrive here undecomposed only in inference mode. Their kernels run
        # inside this mode again, so that it sees the operations they consist of.
        if name in COMPOSED_OPERATIONS or is_composite(operation):
            with self:
                return call_composite_kernel(
                    operation, args, kwargs, is_explicit=name in COMPOSED_OPERATIONS
                )
        first_factor = 1 if name in SUMS_WITH_PRODUCTS else 0
        factors = [
            factor for factor in args[first_factor : first_factor + 2] if isinstance(factor, Tensor)
        ]
        has_float32_factors = all(
            factor.dtype == torch.float32 and factor.layout == torch.strided for factor in factors
        )
        # Operations without products, and products of other formats or layouts, are not emulated.
        if name is None or not has_float32_factors:
            return operation(*args, **kwargs)
        if FUSED_PATTERN.fullmatch(name):
            if name == "_cdist_forward" and not _uses_matrix_product(*args):
                return operation(*args, **kwargs)
            remedy = "write it with matrix products, or move it out of the block"
            raise GpulabError(
                f"emulation does not reach the products inside {name}: {remedy}{_line_phrase()}"
            )
        arithmetic = self.arithmetic if _allows_tf32(name) else self.without_tf32
        if name in CONVOLUTIONS:
            return CONVOLUTIONS[name](operation, args, arithmetic)
        return _matrix_product(operation, name, args, kwargs, arithmetic)


class _UnfusedRecurrentLayers(TorchFunctionMode):
    """Computes recurrent layers by separate products, which the emulator can see."""

    def __torch_function__(
        self,
        function: Callable[..., Nested],
        types: Sequence[type],
        args: Sequence[Nested] = (),
        kwargs: dict[str, Nested] | None = None,
    ) -> Nested:
        """Call a function of torch, without fused kernels if it is a recurrent layer."""
        kwargs = kwargs or {}
        is_recurrent_layer = getattr(function, "__name__", "") in (
            "lstm",
            "gru",
            "rnn_tanh",
            "rnn_relu",
        )
        with without_fused_rnn() if is_recurrent_layer else contextlib.nullcontext():
            return function(*args, **kwargs)


def _uses_matrix_product(a: Tensor, b: Tensor, exponent: float, compute_mode: int | None) -> bool:
    """Return whether `torch.cdist` computes distances by a matrix product.

    It can do so only for Euclidean distances: on request (`compute_mode` 1), or by default
    (`compute_mode` 0 or None) for more than 25 points.

    >>> x, y = torch.ones(30, 2), torch.ones(3, 2)
    >>> _uses_matrix_product(x, y, 2.0, None), _uses_matrix_product(x, x, 1.0, None)
    (True, False)
    """
    is_large = a.shape[-2] > 25 or b.shape[-2] > 25
    return exponent == 2 and (compute_mode == 1 or (not compute_mode and is_large))


def _line_phrase() -> str:
    """Return the user's current line as the end of an error message."""
    line = innermost_line()
    return f" (at {line})" if line else ""


def _allows_tf32(name: str) -> bool:
    """Return whether the program allows TF32 for this product.

    With cuDNN switched off, convolutions are computed as matrix products and follow their flag.
    """
    uses_cudnn = name.startswith("convolution") and torch.backends.cudnn.enabled
    return precision_allowed("conv" if uses_cudnn else "matmul") == "tf32"


@functools.cache
def _product_name(operation: OpOverload) -> str | None:
    """Return an operation's base name if it multiplies, such as `addmm` for `aten::addmm_`."""
    name = operation_name(operation)
    multiplies = (
        name in MATRIX_PRODUCTS | SUMS_WITH_PRODUCTS | CONVOLUTIONS.keys() | COMPOSED_OPERATIONS
    )
    return name if multiplies or FUSED_PATTERN.fullmatch(name) else None


def _matrix_product(
    operation: OpOverload,
    name: str,
    args: Sequence[Nested],
    kwargs: dict[str, Nested],
    arithmetic: Arithmetic,
) -> Tensor:
    """Compute a matrix product, or a sum with one, in an arithmetic.

    Rounded factors go to the operation itself, unless the order of summation is emulated.
    """
    first_factor = 1 if name in SUMS_WITH_PRODUCTS else 0
    a, b = map(arithmetic.round_factor, args[first_factor : first_factor + 2])
    if not arithmetic.sums_in_order:
        out = operation(*args[:first_factor], a, b, *args[first_factor + 2 :], **kwargs)
        if arithmetic.result == "float32":
            return out
        return out.copy_(round_to(out, arithmetic.result))
    if name == "addbmm":
        # The sum runs over the batch as well, so the batch becomes a part of the inner dimension.
        a = a.transpose(0, 1).flatten(1)
        b = b.flatten(0, 1)
    # Vectors become matrices of one row or column, and the result loses that dimension again.
    is_vector = b.dim() == 1
    out = arithmetic.multiply(torch.atleast_2d(a), b[:, None] if is_vector else b)
    if is_vector:
        out = out.reshape(a.shape[:-1])
    if name in SUMS_WITH_PRODUCTS:
        beta = kwargs.get("beta", 1)
        alpha = kwargs.get("alpha", 1)
        # As in torch, a summand with the factor 0 is ignored, even if it has NaN.
        out = alpha * out + beta * args[0] if beta else alpha * out
    out = arithmetic.round_result(out)
    # An in-place operation writes into its first argument, and one with `out` into `out`.
    target = args[0] if schema_name(operation).endswith("_") else kwargs.get("out")
    return out if target is None else target.resize_(out.shape).copy_(out)


# --- convolutions ---------------------------------------------------------------------------------


def _convolution(operation: OpOverload, args: Sequence[Nested], arithmetic: Arithmetic) -> Tensor:
    """Compute a convolution in an arithmetic.

    Rounded factors go to the operation itself, unless the order of summation is emulated.
    """
    x, weight = (arithmetic.round_factor(factor, CONVOLUTION) for factor in args[:2])
    if not arithmetic.sums_in_order:
        return arithmetic.round_result(operation(x, weight, *args[2:]))
    bias, stride, padding, *options = args[2:]
    _check_supported(x, options)
    out = _correlation(x, weight, stride, padding, arithmetic)
    return arithmetic.round_result(out if bias is None else out + bias[:, None, None])


def _convolution_backward(
    operation: OpOverload, args: Sequence[Nested], arithmetic: Arithmetic
) -> list[Tensor | None]:
    """Compute the gradients of input, weight and bias that the mask (the last argument) selects.

    Each gradient is computed by its own call, because its factors are rounded in its own mode.
    """
    output_gradient, x, weight, *options, mask = args
    compute: Callable[..., Nested] = operation
    if arithmetic.sums_in_order:
        compute = functools.partial(_gradients_in_order, arithmetic)
    gradients: list[Tensor | None] = [None, None, None]
    for position, kind in enumerate((CONVOLUTION, WEIGHT)):
        if mask[position]:
            factors = [
                arithmetic.round_factor(factor, kind) for factor in (output_gradient, x, weight)
            ]
            only_this = [position == 0, position == 1, False]
            gradient = compute(*factors, *options, only_this)[position]
            gradients[position] = arithmetic.round_result(gradient)
    if mask[2]:  # The gradient of the bias is a sum without products.
        gradients[2] = output_gradient.sum([0, *range(2, output_gradient.dim())])
    return gradients


def _gradients_in_order(
    arithmetic: Arithmetic, output_gradient: Tensor, x: Tensor, weight: Tensor, *options: Nested
) -> list[Tensor | None]:
    """Compute the gradient of the input or of the weight, as the mask (the last option) selects.

    The mask selects one of them. The result has None in place of the other.
    """
    _bias_sizes, stride, padding, *geometry, (of_input, _, _) = options
    _check_supported(x, geometry)
    if not of_input:
        # Each entry is a sum over all outputs of all images: the output's gradient times the input
        # that the entry was multiplied by.
        columns = _patches(x, weight.shape[2:], stride, padding).flatten(3).flatten(0, 2)
        rows = output_gradient.transpose(0, 1).flatten(1)
        return [None, arithmetic.multiply(rows[None], columns.T[None]).reshape(weight.shape)]
    # The gradient of the input is a convolution of the output's gradient with the kernel rotated by
    # 180°. The output's gradient is first spread out by the stride, with zeros in between.
    # For each of the two dimensions: the lengths of input and kernel, and the padding.
    lengths = [*zip(x.shape[2:], weight.shape[2:], padding, strict=True)]
    spread = output_gradient.new_zeros(
        *output_gradient.shape[:2], *(n - k + 1 + 2 * p for n, k, p in lengths)
    )
    spread[:, :, :: stride[0], :: stride[1]] = output_gradient
    margins = [k - 1 - p for _, k, p in lengths]
    return [
        _correlation(spread, weight.transpose(0, 1).flip(2, 3), (1, 1), margins, arithmetic),
        None,
    ]


def _check_supported(x: Tensor, options: Sequence[Nested]) -> None:
    """Raise `GpulabError` for a convolution whose order of summation cannot be emulated."""
    dilation, transposed, _, groups = options
    if x.dim() != 4 or max(dilation) > 1 or transposed or groups > 1:
        raise GpulabError(
            f"a convolution with dimensions={x.dim() - 2}, {dilation=}, {transposed=}, {groups=}:"
            " orders of summation are emulated only for plain convolutions over two dimensions;"
            f" leave out `order`, or move the operation out of the block{_line_phrase()}"
        )


def _patches(
    x: Tensor, size: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> Tensor:
    """Return the patch of the input that each output sees, (C, kernel size, N, output size).

    The sizes of kernel and output are each two dimensions, height and width.
    """
    padded = F.pad(x, (padding[1], padding[1], padding[0], padding[0]))  # the width comes first
    windows = padded.unfold(2, size[0], stride[0]).unfold(3, size[1], stride[1])
    return windows.permute(1, 4, 5, 0, 2, 3)


def _correlation(
    x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], arithmetic: Arithmetic
) -> Tensor:
    """Correlate images (N, C, H, W) with kernels (O, C, h, w), which torch calls a convolution."""
    patches = _patches(x, weight.shape[2:], stride, padding)
    rows = weight.flatten(1)[None]
    columns = patches.flatten(3).flatten(0, 2)[None]
    if arithmetic.order == "tensor-core":
        # A GPU adds the products of one tile of channels at each position of the kernel, and then
        # those of the next tile. `terms` numbers the products: a row for each channel, a column for
        # each position. A transposed tile lists the channels of one position after the other.
        terms = torch.arange(weight[0].numel()).reshape(weight.shape[1], -1)
        tiles = terms.split(arithmetic.channel_tile or len(terms))
        order = torch.cat([tile.T.flatten() for tile in tiles])
        rows = rows[:, :, order]
        columns = columns[:, order]
    product = arithmetic.multiply(rows, columns)
    return product.reshape(len(weight), *patches.shape[3:]).transpose(0, 1)


CONVOLUTIONS = {"convolution": _convolution, "convolution_backward": _convolution_backward}
