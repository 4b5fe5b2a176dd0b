"""Assert that a function of tensors is as accurate as rounding allows, number by number."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from scipy import stats
from torch import Tensor

from gpulab._torch_internals import Nested, find_tensors, map_nested, named_leaves
from gpulab.audits._audit import compare
from gpulab.audits._findings import FAULTS
from gpulab.audits._perturbation import PerturbingTracer
from gpulab.audits._recording import SEED, describe_step, perform
from gpulab.audits._rounding import SAFETY_FACTOR
from gpulab.audits._tracer import Tracer
from gpulab.audits._traces import Trace
from gpulab.errors import GpulabError, UsageError
from gpulab.guards._reentrancy import as_guard_work
from gpulab.settings import Setting
from gpulab.steps import seed_generators
from gpulab.testing._failure import Message, fail

N_COPIES = 16  # perturbed executions
# The probability that a correct function fails in one call, for all its numbers together.
FALSE_ALARM_RATE = 1e-6


@dataclass(frozen=True)
class ResultBound:
    """A result of the expected function in float64, and the errors that rounding explains.

    Attributes:
        name: The name of the result, such as `result [0]` or `gradient of inputs[1]`.
        recorded: The result in the format of the inputs.
        exact: The result in float64. Numbers beyond the range of the format are infinite.
        spread: For each number, the root mean square distance of the perturbed executions from the
            exact one, combined with the rounding of the number itself. For integers, zero where the
            perturbed executions agree and infinity elsewhere.
    """

    name: str
    recorded: Tensor
    exact: Tensor
    spread: Tensor


def assert_rounding(
    actual_fn: Callable[..., Nested],
    inputs: Tensor | Sequence[Nested],
    expected_fn: Callable[..., Nested] | None = None,
    *,
    msg: Message = None,
) -> None:
    """Assert that the results of a function differ from float64 by no more than rounding explains.

    Use it to test your own kernels without choosing a tolerance, as you would have to for
    `torch.testing.assert_close`. The results are the values that the function returns, and the
    gradients of the inputs that require one. The tolerance allows for sums in any order, so an
    error smaller than that of a long sum is not found.

    The tolerance follows from the data. `expected_fn` is executed once. Every operation is repeated
    in float64, which gives the exact results, and in 16 more float64 executions, in each of which
    the result of every operation is perturbed at random by as much as rounding may change it in the
    format that the operation computes in. The result of an operation without rounding, such as a
    copy or a doubling, is not perturbed. For products and sums, the perturbation is the bound for
    any order of summation. The root mean square distance of these executions from the exact one,
    together with one rounding of the result, is called the spread of a number.

    - A number may differ from the exact number by up to its spread times a quantile of Student's t
      distribution. The quantile is chosen such that a correct function with normally distributed
      errors fails once in a million calls.
    - The norm of all differences in a result may be up to four times the norm of all spreads. This
      criterion finds small errors in many numbers.

    Args:
        actual_fn: The function to test. It is called with copies of `inputs`, and returns a tensor
            or any nesting of tensors.
        inputs: The arguments of the function, or its only argument if that is a tensor. The
            floating-point tensors among them have the format to be tested, such as float32 or
            bfloat16.
        expected_fn: A function of the same arguments that computes the same results with torch
            operations, in a numerically stable way. If it converts its arguments to float32 and its
            result to bfloat16, that accuracy is expected. If None, `actual_fn` itself is used,
            which must then consist of operations that torch can repeat in float64. Without
            `expected_fn`, a wrong formula is not found, because it is wrong in float64 as well;
            only errors that occur in the short format alone are found.
        msg: The failure message, or a function that makes it from the default message, as in
            `torch.testing.assert_close`.

    Raises:
        AssertionError: If structure, shapes or types of the results differ, or if a result is
            further from float64 than rounding explains. The message names the result, the number
            with the largest error, the ratio of this error to what rounding explains, and the line.
        UsageError: If no tensor among the inputs is in a format shorter than float64, if the
            expected function draws random numbers, or if it cannot be repeated in float64.

    Examples:
        A softmax over many numbers. All results are smaller than the absolute tolerance of
        `torch.testing.assert_close`, which therefore accepts any kernel:

        >>> import torch
        >>> import gpulab as gl
        >>> def softmax(x):
        ...     powers = (x - x.max()).exp()
        ...     return powers / powers.sum()
        >>> def kernel(x):
        ...     return torch.softmax(x, -1)
        >>> def wrong_kernel(x):
        ...     return torch.softmax(x / 2, -1)
        >>> x = torch.linspace(-1, 1, 100_000)
        >>> torch.testing.assert_close(wrong_kernel(x), softmax(x))
        >>> gl.testing.assert_rounding(kernel, x, softmax)
        >>> gl.testing.assert_rounding(wrong_kernel, x, softmax)
        Traceback (most recent call last):
        AssertionError: wrong_kernel is further from float64 than rounding explains...

    References:
        - D. S. Parker 1997, Monte Carlo arithmetic: exploiting randomness in floating-point
          arithmetic, Technical Report CSD-970002, University of California, Los Angeles.
        - N. J. Higham, T. Mary 2019, A new approach to probabilistic rounding error analysis, SIAM
          J. Sci. Comput. 41(5).
    """
    __tracebackhide__ = True
    arguments = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    setting = _setting_of(arguments)
    trace, bounds = _derive_bounds(expected_fn or actual_fn, arguments, setting)
    if expected_fn is None:
        actual = {bound.name: bound.recorded for bound in bounds}
    else:
        with seed_generators(setting, SEED):
            actual = _call_with_gradients(actual_fn, arguments)
    failures = _compare(actual, bounds)
    if failures:
        summary = f"{describe_step(actual_fn)} is further from float64 than rounding explains."
        if expected_fn is None:
            place = _find_inaccurate_operation(trace)
        else:
            place = _find_divergence(actual_fn, arguments, setting, trace)
        fail("\n".join([summary, *failures, *place]), msg)


def _setting_of(arguments: Sequence[Nested]) -> Setting:
    """Return the setting of the device that the arguments are on.

    Raises:
        UsageError: If no tensor is in a floating-point format shorter than float64.
    """
    tensors = find_tensors(arguments)
    formats = {str(t.dtype).removeprefix("torch.") for t in tensors}
    if not any(t.is_floating_point() and t.dtype != torch.float64 for t in tensors):
        raise UsageError(
            "inputs: expected a tensor in float32 or a shorter format, got"
            f" {', '.join(sorted(formats)) or 'no tensor'}; the reference is computed in float64"
        )
    is_on_gpu = any(t.device.type == "cuda" for t in tensors)
    return Setting.parse("cuda" if is_on_gpu else "cpu")


def _call_with_gradients(
    function: Callable[..., Nested], arguments: Sequence[Nested]
) -> dict[str, Tensor]:
    """Call a function with copies of the arguments; return its results and gradients by name.

    The gradients are those of the sum of all results, each multiplied by fixed random numbers.
    """

    def copy(value: Nested) -> Nested:
        """Copy a tensor as a new leaf; return any other value unchanged."""
        if not isinstance(value, Tensor):
            return value
        return value.detach().clone().requires_grad_(value.requires_grad)

    copies = as_guard_work(map_nested)(copy, tuple(arguments))
    leaves = named_leaves(function(*copies))
    results = {
        f"result {path}".rstrip(): value for path, value in leaves if isinstance(value, Tensor)
    }
    inputs = [
        (path, value)
        for path, value in named_leaves(list(copies))
        if isinstance(value, Tensor) and value.requires_grad
    ]
    outputs = [value for value in results.values() if value.requires_grad]
    if inputs and outputs:
        gradients = torch.autograd.grad(
            outputs,
            [value for _, value in inputs],
            [_draw_cotangent(output) for output in outputs],
            allow_unused=True,
        )
        results |= {
            f"gradient of inputs{path}": gradient
            for (path, _), gradient in zip(inputs, gradients, strict=True)
            if gradient is not None
        }
    return {name: value.detach() for name, value in results.items()}


@as_guard_work
def _draw_cotangent(output: Tensor) -> Tensor:
    """Draw the same random numbers, in the format of a result, in every execution."""
    generator = torch.Generator().manual_seed(SEED)
    drawn = torch.randn(output.shape, generator=generator, dtype=torch.float32)
    return drawn.to(output.device, output.dtype)


def _derive_bounds(
    function: Callable[..., Nested], arguments: Sequence[Nested], setting: Setting
) -> tuple[Trace, list[ResultBound]]:
    """Execute a function with perturbed float64 copies; return its trace and its bounds.

    Raises:
        UsageError: If the function draws random numbers, writes to memory from outside torch, or
            uses an operation that cannot be repeated in float64.
    """
    tracer = PerturbingTracer(N_COPIES)
    results: dict[str, Tensor] = {}

    def step() -> dict[str, Tensor]:
        results.update(_call_with_gradients(function, arguments))
        return results

    name = describe_step(function)
    try:
        trace = replace(perform(step, setting, tracer), step=name)
    except UsageError as error:
        raise UsageError(
            f"{name}: {error}; pass an expected_fn made of torch operations"
        ) from error
    drawing = next((op for op in trace.operations if op.is_random), None)
    if drawing is not None:
        raise UsageError(
            f"{name} draws random numbers in {drawing.name} at {drawing.line}: expected a function"
            " that draws none; pass the random numbers as an input"
        )
    if trace.without_reference:
        operation, reason = next(iter(trace.without_reference.items()))
        raise UsageError(
            f"{name} cannot be repeated in float64, because of {operation} ({reason}): pass an"
            " expected_fn made of torch operations"
        )
    if tracer.has_foreign_writes or any(map(tracer.is_written_elsewhere, results.values())):
        raise UsageError(
            f"{name} writes to tensors outside torch operations, which cannot be repeated in"
            " float64: pass an expected_fn made of torch operations"
        )
    return trace, [_bound_of(tracer, name, result) for name, result in results.items()]


def _bound_of(tracer: PerturbingTracer, name: str, result: Tensor) -> ResultBound:
    """Return the exact numbers of a result and their spread in the perturbed executions."""
    exact = tracer.references.of(result).clone()
    copies = [copy.of(result) for copy in tracer.copies]
    if not result.is_floating_point() and not result.is_complex():
        agree = torch.stack([copy == exact for copy in copies]).all(0)
        return ResultBound(name, result, exact, torch.where(agree, 0.0, math.inf).double())
    real_exact, *real_copies = map(_as_real, (exact, *copies))
    squares = torch.stack([(copy - real_exact).square() for copy in real_copies])
    info = torch.finfo(result.dtype)
    # Another implementation of the function rounds its result, even if this one is exact.
    spread = torch.hypot(squares.mean(0).sqrt(), info.eps / 2 * real_exact).nan_to_num(math.inf)
    largest = info.max
    real_exact = torch.where(real_exact.abs() > largest, real_exact * math.inf, real_exact)
    return ResultBound(name, _as_real(result), real_exact, spread)


def _as_real(tensor: Tensor) -> Tensor:
    """View a complex tensor as a real tensor with an additional dimension of size 2."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _compare(actual: dict[str, Tensor], bounds: Sequence[ResultBound]) -> list[str]:
    """Compare results with their bounds; return a line for each that fails."""
    names = [bound.name for bound in bounds]
    if list(actual) != names:
        return [f"expected {', '.join(names)}; got {', '.join(actual) or 'no tensor'}"]
    n_numbers = sum(bound.exact.numel() for bound in bounds) or 1
    quantile = float(stats.t.isf(FALSE_ALARM_RATE / (2 * n_numbers), N_COPIES))
    failures = (_compare_result(actual[bound.name], bound, quantile) for bound in bounds)
    return [failure for failure in failures if failure]


def _compare_result(actual: Tensor, bound: ResultBound, quantile: float) -> str:
    """Describe how a result exceeds its bound; empty if it does not."""
    name = bound.name
    actual = _as_real(actual)
    for what, got, wanted in (
        ("shape", tuple(actual.shape), tuple(bound.exact.shape)),
        ("type", actual.dtype, bound.recorded.dtype),
    ):
        if got != wanted:
            return f"{name}: expected {what} {wanted}, got {got}"
    numbers = actual.double()
    exact = bound.exact.double()
    differences = (numbers - exact).abs()
    is_same = (numbers == exact) | (numbers.isnan() & exact.isnan())
    differences = torch.where(is_same, 0.0, differences).nan_to_num(math.inf, math.inf)
    allowed = quantile * bound.spread
    is_beyond = (differences > allowed) | (differences.isinf() & exact.isfinite())
    n_beyond = int(is_beyond.sum())
    if n_beyond:
        ratios = torch.where(is_beyond, differences / allowed, 0.0)
        ratios = torch.where(differences.isinf() & is_beyond, math.inf, ratios)
        place = torch.unravel_index(ratios.argmax(), ratios.shape) if ratios.dim() else ()
        index = tuple(int(i) for i in place)
        share = f"{n_beyond:,} of {ratios.numel():,} numbers are beyond their bound"
        return (
            f"{name}: {_times(float(ratios[index]))} at {index}: got {float(numbers[index]):.9g},"
            f" float64 gives {float(exact[index]):.9g}; they differ by"
            f" {float(differences[index]):.1e}, rounding explains {float(allowed[index]):.1e}"
            f" ({share})"
        )
    is_bounded = bound.spread.isfinite() & differences.isfinite()
    distance = float(differences[is_bounded].norm())
    explained = SAFETY_FACTOR * float(bound.spread[is_bounded].norm())
    if distance <= explained:
        return ""
    return (
        f"{name}: {_times(distance / explained if explained else math.inf)} as a whole: the norm of"
        f" its difference from float64 is {distance:.1e}, rounding explains {explained:.1e} (no"
        " single number is beyond its own bound)"
    )


def _times(ratio: float) -> str:
    """Describe an error as a multiple of the error that rounding explains."""
    if math.isinf(ratio):
        return "further than rounding explains"
    return f"{ratio:.3g} times further than rounding explains"


# --- where the difference begins ------------------------------------------------------------------


def _find_inaccurate_operation(trace: Trace) -> list[str]:
    """Name the operation whose own error exceeds its bound the most, if any operation does."""
    ratios = {op: op.ratio for op in trace.operations if op.ratio is not None}
    # The ratio is above 1, or NaN, which counts as infinite.
    inaccurate = {
        op: math.inf if math.isnan(ratio) else ratio
        for op, ratio in ratios.items()
        if not ratio <= 1
    }
    if not inaccurate:
        return []
    op = max(inaccurate, key=inaccurate.__getitem__)
    what = f"the error of {op.name} ({op.phase}) is {op.ratio:.3g} times what rounding explains"
    return [what, *([f"  at {op.line}"] if op.line else [])]


def _find_divergence(
    function: Callable[..., Nested], arguments: Sequence[Nested], setting: Setting, expected: Trace
) -> list[str]:
    """State where a function deviates from the expected function, if an audit finds it."""
    tracer = Tracer(lambda: None, is_measuring=True)
    name = describe_step(function)
    try:
        trace = perform(lambda: _call_with_gradients(function, arguments), setting, tracer)
        titles = (expected.step, name) if name != expected.step else ("expected_fn", "actual_fn")
        sides = [
            replace(side, label=title, step=title)
            for side, title in zip((expected, trace), titles, strict=True)
        ]
        findings = compare(*sides).findings
    except GpulabError:
        return []  # the function cannot be recorded; it has been called without a tracer
    findings = [f for f in findings if f.kind in (*FAULTS, "reduced precision")]
    if not findings:
        return []
    _, tested_title = titles
    # A line of the tested function is more informative than a line of the expected function.
    first = next((f for f in findings if f.setting == tested_title), findings[0])
    what = f"{first.kind}: {first.operation} ({first.phase}), in {first.setting}"
    return [what, *([f"  at {first.line}"] if first.line else []), f"  {first.detail}"]
