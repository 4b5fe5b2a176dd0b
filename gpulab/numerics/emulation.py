"""Another chip's arithmetic on this one: the products of any PyTorch code, rounded and summed as it would.

What a chip does differently lies in two places: the format that the factors of a product are rounded to,
and how the products are summed. The first makes nearly all of the difference, and costs little to imitate.

Sources: Fasi, Higham, Mikaitis, Pranesh 2021, *Numerical behavior of NVIDIA tensor cores* (PeerJ Computer
Science 7:e330); Xie, Wang, Yang, Yang 2025, *MMA-Sim* (arXiv 2511.10909); Khattak, Mikaitis 2025, *Accurate
models of NVIDIA tensor cores* (arXiv 2512.07004); NVIDIA, *A100 Tensor Core GPU Architecture* (TF32).
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

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
CHUNK = 1 << 18  # products that are looked at together: a tensor of 2 MiB, which caches hold


@dataclass(frozen=True)
class Arithmetic:
    """How a chip multiplies and sums matrices of float32 numbers.

    Factors are rounded to `format`: those of matrix products, of convolutions with the gradient of their
    input, and of the gradient of their weight by one rounding each of `roundings`. The sum is float32's, in
    this machine's order or in `order`; where it is split into `slices`, that many sums are made and added in
    turn. The result is rounded to `result`.

    A tensor core adds `block` products to the sum at once, each cut `fraction` bits below the leading bit of
    the largest, and cuts the new sum to `kept` significant bits. Factors that are 16-bit numbers themselves
    are its own too: `half_block` of them at once. A slice is a multiple of `step` products. A convolution
    runs through `tile` channels at every place of its kernel, then through the next ones; through all of
    them where there is no tile.
    """

    name: str
    format: str = "float32"
    roundings: tuple[str, str, str] = ("nearest", "nearest", "nearest")
    result: str = "float32"
    order: str | None = None
    slices: int = 1
    block: int = 8
    half_block: int = 16
    fraction: int = 25
    kept: int = 24
    step: int = 8
    tile: int | None = None

    def __str__(self) -> str:
        parts = [self.order] if self.order else []
        parts += [f"split-{self.slices}"] if self.slices > 1 else []
        return f"{self.name}, summed {'+'.join(parts)}" if parts else self.name


# Asked for 16 bits, as autocast asks, a GPU returns 16 bits. Of 8-bit products its tensor cores keep 14 bits.
PRECISIONS = {name: Arithmetic(name, name) for name in FORMATS} | {
    "bfloat16": Arithmetic("bfloat16", "bfloat16", result="bfloat16", block=16, step=64),
    "float16": Arithmetic("float16", "float16", result="float16", block=16, step=64),
    "float8_e4m3fn": Arithmetic("float8_e4m3fn", "float8_e4m3fn", block=32, fraction=13, kept=14, step=128),
    "float8_e5m2": Arithmetic("float8_e5m2", "float8_e5m2", block=32, fraction=13, kept=14, step=128),
}
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
    """Look an arithmetic up by the name of a format or a chip, with another order of summation or rounding.

    >>> str(arithmetic_of("tf32", "tensor-core+split-2"))
    'tf32, summed tensor-core+split-2'
    """
    if name not in KNOWN:
        raise UsageError(
            f"arithmetic {name!r}: there are the formats {', '.join(PRECISIONS)} and the chips {', '.join(CHIPS)}"
        )
    if rounding is not None and rounding not in MODES:
        raise UsageError(f"rounding {rounding!r}: expected {', '.join(MODES)}")
    found = re.fullmatch(rf"({'|'.join(ORDERS)})?(?:(?:^|\+)split-([1-9]\d{{0,3}}))?", order or "")
    if order is not None and (not order or not found):
        raise UsageError(
            f"order {order!r}: expected {', '.join(ORDERS)} or split-N (N sums, added in turn; N from 1 to 9999), "
            f"or both, such as {ORDERS[-1]}+split-4"
        )
    whole, slices = found.groups() if found else (None, None)
    known = KNOWN[name]
    if whole == "tensor-core" and known.format.startswith("float32") and (name == "pascal" or name in PRECISIONS):
        raise UsageError(f"order {order!r}: there are no tensor cores for {name}; tf32, ampere or hopper have them")
    roundings = known.roundings if rounding is None else (rounding,) * 3
    return replace(known, order=whole, slices=int(slices or 1), roundings=roundings)


@contextlib.contextmanager
def emulate(
    name: str | Arithmetic = "float32", *, order: str | None = None, rounding: str | None = None
) -> Iterator[Arithmetic]:
    """Inside the `with` block, products of matrices and convolutions compute as another chip would.

    Those of any PyTorch code, forward and backward, on any device, as long as the numbers are float32.

    `name` is a format (`tf32`, `bfloat16`, `float16`, `float8_e4m3fn`, `float8_e5m2`, `float32`,
    `float32_ftz`, which takes subnormal numbers for zero) or a generation of cards (`pascal`: GTX 10;
    `turing`: RTX 20; `ampere`: RTX 30, A100; `hopper`: H100, H200), or an `Arithmetic` of one's own. The
    16-bit formats return 16-bit numbers, as autocast does; the 8-bit ones scale each tensor to their range
    first, as torchao does.

    `order` says how the products are added: `sequential`, `pairwise`, `tensor-core`, or `split-N`, into N
    sums that are added in turn, as N threads or a split-K kernel would; `tensor-core+split-4` is both. None
    leaves it to this machine's libraries, the fast way: sums are float32's then, and only the formats differ.

    `rounding` of the factors is `nearest` in a format, and for a chip what its libraries' kernels do (cuDNN's
    newest cut the factors of weight gradients); `nearest`, `away` or `truncate` is used for all if given.
    An emulation inside another one replaces it for its block.

    What it cannot know is which kernel a library will choose: an H200 that may use TF32 computes many small
    convolutions in float32 all the same (`gpulab.products`).

    Raises `UsageError` for unknown names, and `GpulabError` where an operation hides its products.

    >>> x = torch.tensor([[1.0, 1 / 3]])
    >>> with emulate("tf32"):
    ...     (x @ x.T).item()
    1.1110568046569824
    >>> (x @ x.T).item()
    1.1111111640930176

    Sources: Fasi, Higham, Mikaitis, Pranesh 2021 (PeerJ Computer Science 7:e330); Xie et al. 2025 (arXiv 2511.10909).
    """
    how = name if isinstance(name, Arithmetic) else arithmetic_of(name, order, rounding)
    outer = _in_force()
    fast_path = torch.backends.mha.get_fastpath_enabled()
    for mode in outer:
        mode.paused = True
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        with sdpa_kernel(SDPBackend.MATH), _Unfused(), _Emulator(how):
            yield how
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
        for mode in outer:
            mode.paused = False


def emulating() -> bool:
    """Whether an emulation is in force here.

    >>> with emulate("tf32"):
    ...     emulating()
    True
    """
    return bool(_in_force())


def _in_force() -> list[_Emulator]:
    return [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, _Emulator) and not mode.paused]


# --- which operations ------------------------------------------------------------------------------------

# Where the two factors stand among the arguments, and where what is added to their product.
MATRIX_PRODUCTS = {
    "mm": (0, 1, None),
    "bmm": (0, 1, None),
    "mv": (0, 1, None),
    "dot": (0, 1, None),
    "vdot": (0, 1, None),
    "addmm": (1, 2, 0),
    "addmv": (1, 2, 0),
    "baddbmm": (1, 2, 0),
    "addbmm": (1, 2, 0),
}
# Operations with products inside that no rounding of the arguments reaches.
FUSED = re.compile(
    r"_?(mkldnn_rnn|cudnn_rnn|miopen_rnn|thnn_fused|scaled_dot_product|flash_attention|efficient_attention"
    r"|native_multi_head|transformer_encoder|mkldnn_linear|scaled_mm|grouped_mm|addmm_activation|cdist_forward).*"
)


class _Emulator(TorchDispatchMode):
    """Sees each operation below autograd, those of the backward pass included."""

    def __init__(self, how: Arithmetic) -> None:
        super().__init__()
        self.how, self.paused = how, False

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, a product as the chip would."""
        kwargs = kwargs or {}
        name = None if self.paused else _product_in(operation)
        if name is None:
            return operation(*args, **kwargs)
        factors = MATRIX_PRODUCTS[name][:2] if name in MATRIX_PRODUCTS else (0, 1)
        if not self._concerns(args[place] for place in factors):
            return operation(*args, **kwargs)
        if name in MATRIX_PRODUCTS:
            return _matrix_product(operation, name, args, kwargs, self.how)
        if name in CONVOLUTIONS:
            return CONVOLUTIONS[name](operation, args, self.how)
        if name == "_euclidean_dist":
            return _euclidean_distances(args[0], args[1], self.how)
        raise GpulabError(f"emulation does not reach the products inside {name}: {_remedy(name)}")

    def _concerns(self, factors: Iterable[Any]) -> bool:
        """Whether these are numbers that the chip would treat in its own way: float32; 16-bit ones in its order."""
        dtypes = {factor.dtype for factor in factors if isinstance(factor, Tensor)}
        return dtypes == {torch.float32} or (
            self.how.order == "tensor-core" and len(dtypes) == 1 and dtypes <= set(HALVES)
        )


# torch wraps the method so that its compiler leaves it alone, and the wrapper imports the compiler: 120 MB.
_Emulator.__torch_dispatch__ = getattr(_Emulator.__torch_dispatch__, "__wrapped__", _Emulator.__torch_dispatch__)  # type: ignore[method-assign]


class _Unfused(TorchFunctionMode):
    """Has recurrent layers computed from products that can be seen, instead of by one kernel."""

    RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
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


@functools.cache
def _product_in(operation: Any) -> str | None:
    """The bare name of an operation that multiplies, such as `addmm` for `aten::addmm_`; None for the others."""
    name = operation._schema.name.partition("::")[2].rstrip("_")
    known = name in MATRIX_PRODUCTS or name in CONVOLUTIONS or name == "_euclidean_dist" or FUSED.fullmatch(name)
    return name if known else None


def _remedy(name: str) -> str:
    return "use cudnn=off" if "cudnn" in name else "write it with matrix products, or leave it outside the block"


# --- products --------------------------------------------------------------------------------------------


MATRIX, CONVOLUTION, WEIGHT = range(3)  # places in `Arithmetic.roundings`


def product(a: Tensor, b: Tensor, how: Arithmetic, kind: int = MATRIX) -> Tensor:
    """The product of matrices (…, M, K) and (…, K, N) by an arithmetic, before it is rounded to its result."""
    if a.dtype in HALVES:  # as they are: only the sum is a tensor core's own
        return summed(a.float(), b.float(), replace(how, block=how.half_block, kept=24, step=64))
    return summed(_rounded(a, how, kind), _rounded(b, how, kind), how)


def rounded_factor(x: Tensor, name: str, rounding: str | None = None) -> Tensor:
    """A factor of a matrix product as an arithmetic has it: in its format, scaled first where that has 8 bits.

    >>> rounded_factor(torch.tensor([1e-4, 3e-4]), "float8_e4m3fn").tolist()
    [9.918212890625e-05, 0.00030517578125]
    """
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
    made = round_to(x, how.result) if dtype == torch.float32 and how.result != "float32" else x
    return made.to(dtype).contiguous()  # as kernels return it


def _matrix_product(operation: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any], how: Arithmetic) -> Any:
    first, second, added = MATRIX_PRODUCTS[name]
    factors = args[first], args[second]
    dtype = factors[0].dtype
    if not _reordered(how, dtype):
        changed = list(args)
        changed[first], changed[second] = (_rounded(factor, how) for factor in factors)
        made = operation(*changed, **kwargs)
        return made if how.result == "float32" else made.copy_(round_to(made, how.result))
    made = _shaped_product(name, *factors, how)
    if added is not None:
        beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", 1)
        made = alpha * made + beta * args[added] if beta else alpha * made
    made = _finished(made, how, dtype)
    target = args[0] if operation._schema.name.endswith("_") else kwargs.get("out")
    return made if target is None else target.resize_(made.shape).copy_(made)


def _shaped_product(name: str, a: Tensor, b: Tensor, how: Arithmetic) -> Tensor:
    if name in ("mv", "addmv"):
        return product(a, b[:, None], how)[:, 0]
    if name in ("dot", "vdot"):
        return product(a[None], b[:, None], how)[0, 0]
    if name == "addbmm":  # the sum runs over the batch as well
        return product(a.transpose(0, 1).flatten(1), b.flatten(0, 1), how)
    return product(a, b, how)


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


@dataclass(frozen=True)
class _Geometry:
    """Stride, padding, dilation and output padding in two dimensions, and the number of groups."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    output_padding: tuple[int, ...]
    groups: int

    @classmethod
    def of(cls, sides: int, groups: int, stride: Any, padding: Any, dilation: Any, output_padding: Any) -> _Geometry:
        def both(values: Sequence[int], fill: int) -> tuple[int, ...]:
            return (fill,) * (2 - sides) + tuple(values if len(values) == sides else [*values] * sides)

        return cls(both(stride, 1), both(padding, 0), both(dilation, 1), both(output_padding, 0), groups)


def _convolution(operation: Any, args: Sequence[Any], how: Arithmetic) -> Tensor:
    x, weight, bias, stride, padding, dilation, transposed, output_padding, groups = args
    if not _reordered(how, x.dtype):
        factors = (_rounded(factor, how, CONVOLUTION) for factor in (x, weight))
        return _finished(operation(*factors, *args[2:]), how, x.dtype)
    geometry = _Geometry.of(_sides(x), groups, stride, padding, dilation, output_padding)
    flat, kernel = _two_sided(x), _two_sided(weight)
    if transposed:
        size = [
            (n - 1) * s - 2 * p + d * (k - 1) + o + 1
            for n, s, p, d, k, o in zip(
                flat.shape[2:],
                geometry.stride,
                geometry.padding,
                geometry.dilation,
                kernel.shape[2:],
                geometry.output_padding,
                strict=True,
            )
        ]
        made = _input_gradient(flat, kernel, size, geometry, how)
    else:
        made = _correlation(flat, kernel, geometry, how)
    made = made if bias is None else made + bias[:, None, None]
    return _finished(made.reshape(*made.shape[:2], *made.shape[4 - _sides(x) :]), how, x.dtype)


def _convolution_backward(operation: Any, args: Sequence[Any], how: Arithmetic) -> tuple[Tensor | None, ...]:
    gradient, x, weight, _, stride, padding, dilation, transposed, output_padding, groups, wanted = args
    to_bias = gradient.sum([0, *range(2, gradient.dim())]) if wanted[2] else None  # a sum, not a product
    if not _reordered(how, x.dtype):
        to_input, to_weight = _both_gradients(operation, args, how)
    else:
        geometry = _Geometry.of(_sides(x), groups, stride, padding, dilation, output_padding)
        flow, seen, kernel = (_two_sided(t) for t in (gradient, x, weight))
        if transposed:
            to_input = _correlation(flow, kernel, geometry, how) if wanted[0] else None
            to_weight = _weight_gradient(seen, flow, kernel, geometry, how) if wanted[1] else None
        else:
            to_input = _input_gradient(flow, kernel, seen.shape[2:], geometry, how) if wanted[0] else None
            to_weight = _weight_gradient(flow, seen, kernel, geometry, how) if wanted[1] else None
    made = (
        None if t is None or not asked else _finished(t.reshape(like.shape), how, x.dtype)
        for t, asked, like in zip((to_input, to_weight), wanted, (x, weight), strict=False)
    )
    return *made, to_bias


def _both_gradients(operation: Any, args: Sequence[Any], how: Arithmetic) -> tuple[Tensor | None, Tensor | None]:
    """In this machine's order: at once, or one after the other where their factors are rounded differently."""
    wanted = args[10][:2]
    if how.roundings[CONVOLUTION] == how.roundings[WEIGHT] or not all(wanted):
        kind = CONVOLUTION if wanted[0] else WEIGHT
        factors = (_rounded(factor, how, kind) for factor in args[:3])
        return operation(*factors, *args[3:10], [*wanted, False])[:2]
    halves = []
    for kind in (CONVOLUTION, WEIGHT):
        factors = (_rounded(factor, how, kind) for factor in args[:3])
        halves.append(operation(*factors, *args[3:10], [kind == CONVOLUTION, kind == WEIGHT, False]))
    return halves[0][0], halves[1][1]


CONVOLUTIONS = {"convolution": _convolution, "convolution_backward": _convolution_backward}


def _sides(x: Tensor) -> int:
    if x.dim() > 4:
        raise GpulabError(
            f"orders of summation are emulated for convolutions over one or two dimensions, and this one runs over "
            f"{x.dim() - 2}: leave `order` away, or the operation outside the block"
        )
    return x.dim() - 2


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
        way = _way(weight.shape[1], size, how.tile)
        rows, columns = rows[:, :, way], columns[:, way]
    made = product(rows, columns, how, CONVOLUTION)
    height, width = (
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, p, d, k, s in zip(x.shape[2:], geometry.padding, geometry.dilation, size, geometry.stride, strict=True)
    )
    return made.reshape(len(weight), len(x), height, width).transpose(0, 1)


def _way(channels: int, size: Sequence[int], tile: int | None) -> Tensor:
    """In which order a GPU runs through the products of an output: tiles of channels, the kernel's places, channels."""
    places = torch.arange(channels * size[0] * size[1]).reshape(channels, -1)
    return torch.cat([part.T.flatten() for part in places.split(tile or channels)])


def _input_gradient(
    gradient: Tensor, weight: Tensor, size: Sequence[int], geometry: _Geometry, how: Arithmetic
) -> Tensor:
    """The gradient of the input, of height and width `size`: the turned kernel over the spread-out gradient."""
    spread = gradient.new_zeros(
        *gradient.shape[:2],
        *((n - 1) * s + 1 for n, s in zip(gradient.shape[2:], geometry.stride, strict=True)),
    )
    spread[:, :, :: geometry.stride[0], :: geometry.stride[1]] = gradient
    margins: list[int] = []
    for n, have, p, d, k in zip(
        size, spread.shape[2:], geometry.padding, geometry.dilation, weight.shape[2:], strict=True
    ):
        margins = [d * (k - 1) - p, n + p - have, *margins]  # F.pad begins with the last dimension
    turned = weight.unflatten(0, (geometry.groups, -1)).transpose(1, 2).flatten(0, 1).flip(2, 3)
    plain = replace(geometry, stride=(1, 1), padding=(0, 0))
    return _correlation(F.pad(spread, margins), turned, plain, how)


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
    total, *others = (
        _summed_whole(a[..., k : k + each], b[..., k : k + each, :], how) for k in range(0, max(1, inner), each)
    )
    for part in others:
        total = total + part
    return total


def _summed_whole(a: Tensor, b: Tensor, how: Arithmetic) -> Tensor:
    if how.order == "sequential":
        return _sequential(a, b)
    if how.order == "pairwise":
        return _pairwise(a, b)
    if how.order == "tensor-core":
        return _tensor_core(a, b, how)
    return torch.matmul(a, b)


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
    if not waiting:
        return torch.matmul(a, b)
    total = waiting.pop()[1]
    while waiting:
        total = waiting.pop()[1] + total
    return total


def _tensor_core(a: Tensor, b: Tensor, how: Arithmetic) -> Tensor:
    """A block of products and the sum so far at once: aligned to the largest, cut, added, cut to float32."""
    shape = (*torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    a = a.expand(*shape[:-2], *a.shape[-2:]).reshape(-1, *a.shape[-2:])
    b = b.expand(*shape[:-2], *b.shape[-2:]).reshape(-1, *b.shape[-2:])
    rows = max(1, CHUNK // max(1, how.block * shape[-1]))
    made = [torch.cat([_fused(part, y, how) for part in x.split(rows)]) for x, y in zip(a, b, strict=True)]
    return torch.stack(made).reshape(shape) if made else a.new_zeros(shape)


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
