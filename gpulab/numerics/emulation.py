"""Another chip's arithmetic on this one: the products of any PyTorch code, rounded and summed as it would.

A chip differs in the format that the factors of a product are rounded to, which makes nearly all of the difference
and costs little to imitate, and in how the products are summed.

Sources: Fasi, Higham, Mikaitis, Pranesh 2021, *Numerical behavior of NVIDIA tensor cores* (PeerJ Computer
Science 7:e330); Xie, Wang, Yang, Yang 2025, *MMA-Sim* (arXiv 2511.10909); Khattak, Mikaitis 2025, *Accurate
models of NVIDIA tensor cores* (arXiv 2512.07004); NVIDIA, *A100 Tensor Core GPU Architecture* (TF32).
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from gpulab.errors import GpulabError, UsageError
from gpulab.numerics.formats import FORMATS, MODES, power_of_two, round_to

ORDERS = ("sequential", "pairwise", "tensor-core")
HALVES = (torch.float16, torch.bfloat16)
MATRIX, CONVOLUTION, WEIGHT = range(3)  # places in `Arithmetic.roundings`
CHUNK = 1 << 18  # products that are looked at together: a tensor of 2 MiB, which caches hold


@dataclass(frozen=True)
class Arithmetic:
    """How a chip multiplies and sums matrices of float32 numbers."""

    name: str
    format: str = "float32"  # that factors are rounded to
    # How: of matrix products; of convolutions and the gradient of their input; of that of their weight.
    roundings: tuple[str, str, str] = ("nearest", "nearest", "nearest")
    result: str = "float32"  # the format that the sum, which is float32's, is rounded to
    order: str | None = None  # of the sum; None for this machine's
    slices: int = 1  # into so many sums it is split, which are added in turn
    block: int = 8  # products that a tensor core adds to the sum at once
    half_block: int = 16  # the same where the factors are 16-bit numbers themselves; 0 where it takes none
    fraction: int = 25  # each product is cut so many bits below the leading bit of the block's largest
    kept: int = 24  # significant bits that the new sum is cut to
    step: int = 8  # a slice is a multiple of so many products
    tile: int | None = None  # channels run through at every place of a kernel, before the next ones; None for all

    def __str__(self) -> str:
        parts = [self.order] if self.order else []
        parts += [f"split-{self.slices}"] if self.slices > 1 else []
        return f"{self.name}, summed {'+'.join(parts)}" if parts else self.name


# Asked for 16 bits, as autocast asks, a GPU returns 16 bits. Of 8-bit products its tensor cores keep 14 bits.
PRECISIONS = {name: Arithmetic(name, name) for name in FORMATS}
PRECISIONS |= {n: Arithmetic(n, n, result=n, block=16, step=64) for n in ("bfloat16", "float16")}
PRECISIONS |= {n: Arithmetic(n, n, block=32, fraction=13, kept=14, step=128) for n in ("float8_e4m3fn", "float8_e5m2")}
# Generations of cards. Only from Ampere on do tensor cores take float32 numbers, as TF32. Blocks and bits are
# those of Fasi et al. 2021 and Xie et al. 2025. Roundings and tiles are what cuBLAS's and cuDNN's kernels for
# each generation were found to do on an H200, which runs both; for hopper, blocks and bits as well (data/gpu_products).
CHIPS = {
    "pascal": Arithmetic("pascal", half_block=0),
    "turing": Arithmetic("turing", half_block=8, fraction=24),
    "ampere": Arithmetic("ampere", "tf32", ("nearest", "away", "away"), block=4, half_block=8, fraction=24),
    "hopper": Arithmetic("hopper", "tf32", ("nearest", "nearest", "truncate"), tile=32),
}
KNOWN = PRECISIONS | CHIPS


def arithmetic_of(name: str = "float32", order: str | None = None, rounding: str | None = None) -> Arithmetic:
    """Look an arithmetic up by the name of a format or a chip, with another order of summation or rounding."""
    if name not in KNOWN:
        formats, chips = ", ".join(PRECISIONS), ", ".join(CHIPS)
        raise UsageError(f"arithmetic {name!r}: there are the formats {formats} and the chips {chips}")
    if rounding is not None and rounding not in MODES:
        raise UsageError(f"rounding {rounding!r}: expected {', '.join(MODES)}")
    parts = re.fullmatch(rf"({'|'.join(ORDERS)})?(?:(?:^|\+)split-([1-9]\d{{0,3}}))?", order or "")
    if parts is None or order == "":
        raise UsageError(
            f"order {order!r}: expected {', '.join(ORDERS)} or split-N (N sums, added in turn; N from 1 to 9999), "
            f"or both, such as {ORDERS[-1]}+split-4"
        )
    whole, slices = parts.groups()
    how = KNOWN[name]
    if whole == "tensor-core" and how.format.startswith("float32") and (name == "pascal" or name in PRECISIONS):
        raise UsageError(f"order {order!r}: there are no tensor cores for {name}; tf32, ampere or hopper have them")
    roundings = how.roundings if rounding is None else (rounding,) * 3
    return replace(how, order=whole, slices=int(slices or 1), roundings=roundings)


@contextlib.contextmanager
def emulate(
    name: str | Arithmetic = "float32", *, order: str | None = None, rounding: str | None = None
) -> Iterator[Arithmetic]:
    """Inside the `with` block, products of matrices and convolutions compute as another chip would.

    Those of any PyTorch code, forward and backward, on any device, as long as the numbers are float32. An emulation
    inside another one replaces it. It cannot know which kernel a library will choose: an H200 that may use TF32
    computes many small convolutions in float32 all the same (`gpulab.diagnostics.compare_products`).
    A card with TF32, `ampere` or `hopper`, uses it where the program allows it: in matrix products by
    `torch.backends.cuda.matmul` or `torch.set_float32_matmul_precision`, off by torch's default (since 1.12); in
    convolutions by `torch.backends.cudnn`, on by default. The setting `cpu:tf32=on,emulate=ampere` allows both, and a
    format, or an `Arithmetic`, asks no one. Recurrent layers, which are taken apart here, count as matrix products.

    Args:
        name: a format (`tf32`, `bfloat16`, `float16`, `float8_e4m3fn`, `float8_e5m2`, `float32`, or `float32_ftz`,
            which takes subnormal numbers for zero), a generation of cards (`pascal`: GTX 10; `turing`: RTX 20;
            `ampere`: RTX 30, A100; `hopper`: H100, H200), or an `Arithmetic`. The 16-bit formats return 16-bit
            numbers, as autocast does; the 8-bit ones scale each tensor to their range first, as torchao does.
        order: how the products are added: `sequential`, `pairwise`, `tensor-core`, or `split-N`, into N sums that are
            added in turn, as N threads or a split-K kernel would; `tensor-core+split-4` is both. None leaves it to
            this machine's libraries, the fast way: sums are float32's then, and only the formats differ.
        rounding: of the factors: `nearest`, `away` or `truncate`. None is `nearest` in a format, and for a chip what
            its libraries' kernels do (cuDNN's newest cut the factors of weight gradients).

    Raises:
        UsageError: for unknown names.
        GpulabError: where an operation hides its products.

    Examples:
        >>> x = torch.tensor([[1.0, 1 / 3]])
        >>> with emulate("tf32"):
        ...     (x @ x.T).item()
        1.1110568046569824
        >>> with emulate("ampere"):
        ...     (x @ x.T).item()
        1.1111111640930176

    References:
        Fasi, Higham, Mikaitis, Pranesh 2021 (PeerJ Computer Science 7:e330); Xie et al. 2025 (arXiv 2511.10909).
    """
    how = name if isinstance(name, Arithmetic) else arithmetic_of(name, order, rounding)
    otherwise = replace(how, format="float32") if name in CHIPS and how.format == "tf32" else how
    outer = _in_force()
    fast_path = torch.backends.mha.get_fastpath_enabled()
    for mode in outer:
        mode.paused = True
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        with sdpa_kernel(SDPBackend.MATH), _Unfused(), _Emulator(how, otherwise):
            yield how
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
        for mode in outer:
            mode.paused = False


def emulating() -> bool:
    """Whether an emulation is in force here."""
    return bool(_in_force())


def _in_force() -> list[_Emulator]:
    return [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, _Emulator) and not mode.paused]


# --- which operations ------------------------------------------------------------------------------------

MATRIX_PRODUCTS = {"mm", "bmm", "mv", "dot", "vdot"}
SUMS_WITH_PRODUCTS = {"addmm", "addmv", "baddbmm", "addbmm"}  # what is added stands before the two factors
EMULATED = MATRIX_PRODUCTS | SUMS_WITH_PRODUCTS | {"convolution", "convolution_backward", "_euclidean_dist"}
# Operations with products inside that no rounding of the arguments reaches.
FUSED = re.compile(
    r"_?(mkldnn_rnn|cudnn_rnn|miopen_rnn|thnn_fused|scaled_dot_product|flash_attention|efficient_attention"
    r"|native_multi_head|transformer_encoder|mkldnn_linear|scaled_mm|grouped_mm|addmm_activation|cdist_forward).*"
)


class _Emulator(TorchDispatchMode):
    """Sees each operation below autograd, those of the backward pass included; `otherwise` is without TF32."""

    def __init__(self, how: Arithmetic, otherwise: Arithmetic) -> None:
        super().__init__()
        self.how, self.otherwise, self.paused = how, otherwise, False

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, a product as the chip would."""
        kwargs = kwargs or {}
        name = None if self.paused else _product_in(operation)
        first = 1 if name in SUMS_WITH_PRODUCTS else 0
        if name is None or not self._concerns(args[first : first + 2]):
            return operation(*args, **kwargs)
        if name not in EMULATED:
            write = "write it with matrix products, or leave it outside the block"
            remedy = "use cudnn=off" if "cudnn" in name else write
            raise GpulabError(f"emulation does not reach the products inside {name}: {remedy}")
        how = self.how if _allows_tf32(name) else self.otherwise
        if name.startswith("convolution"):
            return (_convolution if name == "convolution" else _convolution_backward)(operation, args, how)
        if name == "_euclidean_dist":
            return _euclidean_distances(args[0], args[1], how)
        return _matrix_product(operation, name, args, kwargs, how)

    def _concerns(self, factors: Sequence[Any]) -> bool:
        """Whether these are numbers that the chip would treat in its own way: float32; 16-bit ones in its order."""
        dtypes = {factor.dtype for factor in factors if isinstance(factor, Tensor)}
        halves = self.how.order == "tensor-core" and dtypes in ({torch.float16}, {torch.bfloat16})
        return dtypes == {torch.float32} or halves


# torch wraps the method so that its compiler leaves it alone, and the wrapper imports the compiler: 120 MB.
_Emulator.__torch_dispatch__ = getattr(_Emulator.__torch_dispatch__, "__wrapped__", _Emulator.__torch_dispatch__)  # type: ignore[method-assign]


class _Unfused(TorchFunctionMode):
    """Has recurrent layers computed from products that can be seen, instead of by one kernel."""

    RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") not in self.RECURRENT:
            return function(*args, **(kwargs or {}))
        # The public `flags` of the two libraries would set their other flags as well.
        onednn, cudnn = torch._C._get_mkldnn_enabled(), torch._C._get_cudnn_enabled()
        try:
            torch._C._set_mkldnn_enabled(False)
            torch._C._set_cudnn_enabled(False)
            return function(*args, **(kwargs or {}))
        finally:
            torch._C._set_mkldnn_enabled(onednn)
            torch._C._set_cudnn_enabled(cudnn)


def _allows_tf32(name: str) -> bool:
    """Whether the program allows it for this product; torch's new interface says so whichever was used."""
    backends: Any = torch.backends
    by_cudnn = name.startswith("convolution") and backends.cudnn.enabled
    return (backends.cudnn.conv if by_cudnn else backends.cuda.matmul).fp32_precision == "tf32"


@functools.cache
def _product_in(operation: Any) -> str | None:
    """The bare name of an operation that multiplies, such as `addmm` for `aten::addmm_`; None for the others."""
    name = operation._schema.name.partition("::")[2].rstrip("_")
    return name if name in EMULATED or FUSED.fullmatch(name) else None


# --- products --------------------------------------------------------------------------------------------


def product(a: Tensor, b: Tensor, how: Arithmetic, kind: int = MATRIX) -> Tensor:
    """The product of matrices (…, M, K) and (…, K, N) by an arithmetic, before it is rounded to its result."""
    if a.dtype in HALVES:  # as they are: only the sum is a tensor core's own
        return summed(a.float(), b.float(), replace(how, block=how.half_block, kept=24, step=64))
    return summed(_rounded(a, how, kind), _rounded(b, how, kind), how)


def rounded_factor(x: Tensor, name: str, rounding: str | None = None) -> Tensor:
    """A factor of a matrix product as an arithmetic has it: in its format, scaled first where that has 8 bits."""
    return _rounded(x, arithmetic_of(name, rounding=rounding))


def _rounded(x: Tensor, how: Arithmetic, kind: int = MATRIX) -> Tensor:
    """A factor in the format; 8-bit formats with a scale, a power of two, that makes use of their range."""
    if how.format == "float32":
        return x
    if not how.format.startswith("float8"):
        return round_to(x, how.format, how.roundings[kind])
    largest = x.abs().amax() if x.numel() else x.new_tensor(1.0)
    exponent = torch.log2(FORMATS[how.format].largest / largest).floor()
    scale = torch.where(exponent.isfinite(), torch.exp2(exponent.clamp(-100, 100)), 1.0)
    return round_to(x * scale, how.format, how.roundings[kind]) / scale


def _finished(x: Tensor, how: Arithmetic, dtype: torch.dtype) -> Tensor:
    rounded = round_to(x, how.result) if dtype == torch.float32 and how.result != "float32" else x
    return rounded.to(dtype).contiguous()  # as kernels return it


def _matrix_product(operation: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any], how: Arithmetic) -> Any:
    first = 1 if name in SUMS_WITH_PRODUCTS else 0
    a, b = args[first : first + 2]
    if not _reordered(how, a.dtype):
        out = operation(*args[:first], _rounded(a, how), _rounded(b, how), *args[first + 2 :], **kwargs)
        return out if how.result == "float32" else out.copy_(round_to(out, how.result))
    if name in ("mv", "addmv"):
        out = product(a, b[:, None], how)[:, 0]
    elif name in ("dot", "vdot"):
        out = product(a[None], b[:, None], how)[0, 0]
    elif name == "addbmm":  # the sum runs over the batch as well
        out = product(a.transpose(0, 1).flatten(1), b.flatten(0, 1), how)
    else:
        out = product(a, b, how)
    if name in SUMS_WITH_PRODUCTS:
        beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", 1)
        out = alpha * out + beta * args[0] if beta else alpha * out
    out = _finished(out, how, a.dtype)
    target = args[0] if operation._schema.name.endswith("_") else kwargs.get("out")
    return out if target is None else target.resize_(out.shape).copy_(out)


def _euclidean_distances(x: Tensor, y: Tensor, how: Arithmetic) -> Tensor:
    """What `torch.cdist` makes of many points: |x|² − 2 x·y + |y|², in one product of longer vectors."""
    x_squared, y_squared = (v.square().sum(-1, keepdim=True) for v in (x, y))
    left = torch.cat([-2 * x, x_squared, torch.ones_like(x_squared)], -1)
    right = torch.cat([y, torch.ones_like(y_squared), y_squared], -1)
    return _finished(product(left, right.mT, how), how, x.dtype).clamp_min(0).sqrt()


def _reordered(how: Arithmetic, dtype: torch.dtype) -> bool:
    """Whether the sum is to be made here: float32 numbers do not pass the tensor cores of old cards."""
    if how.order == "tensor-core" and dtype == torch.float32 and how.format == "float32":
        return False
    return how.order is not None or how.slices > 1


# --- convolutions ----------------------------------------------------------------------------------------


class _Geometry(NamedTuple):
    """What a convolution does along each of two dimensions, and its number of groups."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    output_padding: tuple[int, ...]
    groups: int


def _geometry(x: Tensor, *sizes: Sequence[int], groups: int) -> _Geometry:
    """Of stride, padding, dilation and output padding; a convolution along a line is one of height 1."""
    sides = x.dim() - 2
    if sides > 2:
        raise GpulabError(
            f"orders of summation are emulated for convolutions over one or two dimensions, and this one runs over "
            f"{sides}: leave `order` away, or the operation outside the block"
        )
    stride, padding, dilation, output_padding = (
        (fill,) * (2 - sides) + tuple(values if len(values) == sides else [*values] * sides)
        for fill, values in zip((1, 0, 1, 0), sizes, strict=True)
    )
    return _Geometry(stride, padding, dilation, output_padding, groups)


def _convolution(operation: Any, args: Sequence[Any], how: Arithmetic) -> Tensor:
    x, weight, bias, stride, padding, dilation, transposed, output_padding, groups = args
    if not _reordered(how, x.dtype):
        factors = (_rounded(factor, how, CONVOLUTION) for factor in (x, weight))
        return _finished(operation(*factors, *args[2:]), how, x.dtype)
    geometry = _geometry(x, stride, padding, dilation, output_padding, groups=groups)
    image, kernel = _two_sided(x), _two_sided(weight)
    if transposed:
        sides = zip(image.shape[2:], kernel.shape[2:], *geometry[:4], strict=True)
        size = [(n - 1) * s - 2 * p + d * (k - 1) + o + 1 for n, k, s, p, d, o in sides]
        out = _input_gradient(image, kernel, size, geometry, how)
    else:
        out = _correlation(image, kernel, geometry, how)
    out = out if bias is None else out + bias[:, None, None]
    return _finished(out if x.dim() == 4 else out.squeeze(2), how, x.dtype)


def _convolution_backward(operation: Any, args: Sequence[Any], how: Arithmetic) -> tuple[Tensor | None, ...]:
    gradient, x, weight, _, stride, padding, dilation, transposed, output_padding, groups, mask = args
    to_input: Any = None
    to_weight: Any = None
    if not _reordered(how, x.dtype):
        # At once, or one after the other where their factors are rounded differently.
        at_once = how.roundings[CONVOLUTION] == how.roundings[WEIGHT] or not all(mask[:2])
        gradients = []
        for wanted in [mask[:2]] if at_once else [[True, False], [False, True]]:
            factors = (_rounded(factor, how, CONVOLUTION if wanted[0] else WEIGHT) for factor in args[:3])
            gradients.append(operation(*factors, *args[3:10], [*wanted, False]))
        to_input, to_weight = gradients[0][0], gradients[-1][1]
    else:
        geometry = _geometry(x, stride, padding, dilation, output_padding, groups=groups)
        flow, image, kernel = (_two_sided(t) for t in (gradient, x, weight))
        if mask[0] and transposed:
            to_input = _correlation(flow, kernel, geometry, how)
        elif mask[0]:
            to_input = _input_gradient(flow, kernel, image.shape[2:], geometry, how)
        if mask[1]:
            to_weight = _weight_gradient(*((image, flow) if transposed else (flow, image)), kernel, geometry, how)
    to_input = _finished(to_input.reshape(x.shape), how, x.dtype) if mask[0] else None
    to_weight = _finished(to_weight.reshape(weight.shape), how, x.dtype) if mask[1] else None
    to_bias = gradient.sum([0, *range(2, gradient.dim())]) if mask[2] else None  # a sum, not a product
    return to_input, to_weight, to_bias


def _two_sided(x: Tensor) -> Tensor:
    return x if x.dim() == 4 else x.unsqueeze(2)


def _patches(x: Tensor, size: Sequence[int], geometry: _Geometry) -> Tensor:
    """What each output sees, (groups, channels of a group × size, images × places)."""
    columns = F.unfold(x, tuple(size), geometry.dilation, geometry.padding, geometry.stride)
    return columns.unflatten(1, (geometry.groups, -1)).permute(1, 2, 0, 3).flatten(2)


def _correlation(x: Tensor, weight: Tensor, geometry: _Geometry, how: Arithmetic) -> Tensor:
    """What torch calls a convolution: (N, C, H, W) and (O, C / groups, h, w) to (N, O, H', W')."""
    size = weight.shape[2:]
    rows, columns = weight.flatten(1).unflatten(0, (geometry.groups, -1)), _patches(x, size, geometry)
    if how.order == "tensor-core":
        # A GPU runs through a tile of channels at each of the kernel's places, then through the next tile.
        terms = torch.arange(weight[0].numel()).reshape(weight.shape[1], -1)
        order = torch.cat([tile.T.flatten() for tile in terms.split(how.tile or len(terms))])
        rows, columns = rows[:, :, order], columns[:, order]
    out = product(rows, columns, how, CONVOLUTION)
    sides = zip(x.shape[2:], size, *geometry[:3], strict=True)
    places = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sides]
    return out.reshape(len(weight), len(x), *places).transpose(0, 1)


def _input_gradient(gradient: Tensor, weight: Tensor, size: Any, geometry: _Geometry, how: Arithmetic) -> Tensor:
    """The gradient of the input, of height and width `size`: the turned kernel over the spread-out gradient."""
    stride, places = geometry.stride, gradient.shape[2:]
    spread = gradient.new_zeros(*gradient.shape[:2], *((n - 1) * s + 1 for n, s in zip(places, stride, strict=True)))
    spread[:, :, :: stride[0], :: stride[1]] = gradient
    margins: list[int] = []
    for n, have, k, p, d in zip(size, spread.shape[2:], weight.shape[2:], *geometry[1:3], strict=True):
        margins = [d * (k - 1) - p, n + p - have, *margins]  # F.pad begins with the last dimension
    turned = weight.unflatten(0, (geometry.groups, -1)).transpose(1, 2).flatten(0, 1).flip(2, 3)
    return _correlation(F.pad(spread, margins), turned, geometry._replace(stride=(1, 1), padding=(0, 0)), how)


def _weight_gradient(gradient: Tensor, x: Tensor, weight: Tensor, geometry: _Geometry, how: Arithmetic) -> Tensor:
    flow = gradient.unflatten(1, (geometry.groups, -1)).permute(1, 2, 0, 3, 4).flatten(2)
    return product(flow, _patches(x, weight.shape[2:], geometry).transpose(1, 2), how, WEIGHT).reshape(weight.shape)


# --- sums ------------------------------------------------------------------------------------------------


def summed(a: Tensor, b: Tensor, how: Arithmetic) -> Tensor:
    """The product of float32 matrices (…, M, K) and (…, K, N), added up in the order of an arithmetic."""
    inner = a.shape[-1]
    each = max(1, -(-inner // how.slices))
    if how.order == "tensor-core":
        each = -(-each // how.step) * how.step
    tensor_core: Any = functools.partial(_tensor_core, how=how)
    orders = {None: torch.matmul, "sequential": _sequential, "pairwise": _pairwise, "tensor-core": tensor_core}
    add_up, starts = orders[how.order], range(0, max(1, inner), each)
    return functools.reduce(torch.add, (add_up(a[..., k : k + each], b[..., k : k + each, :]) for k in starts))


def _sequential(a: Tensor, b: Tensor) -> Tensor:
    """One product after the other, each fused with its addition, as a thread of a GPU's plain cores does.

    In float64 the product is exact, so that the sum is rounded to float32 all but once.
    """
    a, b = a.double(), b.double()
    total = a.new_zeros(*torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    for k in range(a.shape[-1]):
        total = torch.addcmul(total, a[..., :, k : k + 1], b[..., k : k + 1, :]).float().double()
    return total.float()


def _pairwise(a: Tensor, b: Tensor) -> Tensor:
    """Neighbours are added, then neighbouring sums, and so on; a sum waits for one of as many products."""
    waiting: list[tuple[int, Tensor]] = []
    for k in range(a.shape[-1]):
        size, total = 1, a[..., :, k : k + 1] * b[..., k : k + 1, :]
        while waiting and waiting[-1][0] == size:
            total = waiting.pop()[1] + total
            size *= 2
        waiting.append((size, total))
    sums = [total for _, total in reversed(waiting)]
    return functools.reduce(lambda total, longer: longer + total, sums) if sums else torch.matmul(a, b)


def _tensor_core(a: Tensor, b: Tensor, how: Arithmetic) -> Tensor:
    """A block of products and the sum so far at once: aligned to the largest, cut, added, cut to float32."""
    shape = (*torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    a = a.expand(*shape[:-2], *a.shape[-2:]).reshape(-1, *a.shape[-2:])
    b = b.expand(*shape[:-2], *b.shape[-2:]).reshape(-1, *b.shape[-2:])
    rows = max(1, CHUNK // max(1, how.block * shape[-1]))
    sums = [torch.cat([_fused(part, y, how) for part in x.split(rows)]) for x, y in zip(a, b, strict=True)]
    return torch.stack(sums).reshape(shape) if sums else a.new_zeros(shape)


def _fused(a: Tensor, b: Tensor, how: Arithmetic) -> Tensor:
    total = a.new_zeros(a.shape[0], b.shape[1], dtype=torch.float64)
    exponents_a, exponents_b = _exponents(a), _exponents(b)
    for start in range(0, a.shape[1], how.block):
        span = slice(start, start + how.block)
        products = a[:, span, None].double() * b[None, span].double()  # exact
        largest = (exponents_a[:, span, None] + exponents_b[None, span]).amax(1)
        largest = torch.maximum(largest, _exponents(total.float()))
        last_place = power_of_two(largest - how.fraction)
        aligned = torch.trunc(products / last_place[:, None]).sum(1) + torch.trunc(total / last_place)
        usual = products.isfinite().all(1) & total.isfinite()
        total = _cut(aligned * last_place, how.kept).where(usual, products.sum(1) + total)
    return total.float()


def _exponents(x: Tensor) -> Tensor:
    """The exponent of each float32 number; that of the smallest normal one for zeros and subnormal numbers."""
    return (x.view(torch.int32) >> 23).bitwise_and_(0xFF).clamp_min_(1).sub_(127)


def _cut(x: Tensor, bits: int) -> Tensor:
    """Float64 numbers without what lies below so many significant bits, in float32's range."""
    step = power_of_two(torch.frexp(x).exponent.clamp_min(-125) - bits)
    return (torch.trunc(x / step) * step).float().double()
