"""Execute a step or a single module, and collect the results that compiled code exposes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gpulab import _torch_internals
from gpulab._torch_internals import Nested, named_leaves, tree_map
from gpulab.audits._count_sketch import is_float_or_complex, to_float64_device
from gpulab.audits._float64_failures import Request, ShortFormatRequests, line_of_error
from gpulab.audits._recording import SEED
from gpulab.errors import GpulabError, UsageError
from gpulab.numerics._flags import arithmetic
from gpulab.settings import Setting
from gpulab.steps import PreparedStep, Step, explain_step_error, loss_of, seed_generators

NamedTensors = dict[str, Tensor]
# The tolerance for a correct result in float32, as a multiple of one rounding. Inputs are perturbed
# by this much, rather than scaling the effect of one rounding, because near a kink, such as ReLU's,
# two correct results may lie on either side of it.
MAX_ERROR_RATIO = 64.0
MAX_NUDGE = 2.0**-6  # the largest relative perturbation; 64 roundings of TF32 exceed it
# In bfloat16 and float16, 64 roundings would hide any fault, so inputs are perturbed by one. A
# format counts as short if its unit roundoff is at least this.
MIN_SHORT_ROUNDOFF = 2.0**-11


@dataclass(frozen=True)
class Execution:
    """One execution of a step, or of a module alone.

    Attributes:
        results: All results by name, converted to float64.
        random_state: The final states of torch's random number generators, of CPU and device.
    """

    results: NamedTensors
    random_state: tuple[bytes, ...]


@dataclass(frozen=True)
class ModuleCall(Step):
    """A module of a model and its first call, as a step that can be executed alone.

    `name` is the path of the module in the model. `batch` holds the positional arguments, the named
    arguments and the output gradients of the call.
    """

    name: str = ""

    @property
    def signature(self) -> tuple[object, ...]:
        """The key of the compiled code; only one of the calls with equal keys is tried."""
        shapes = [(name, t.shape, t.dtype) for name, t in named_tensors("", self.batch[:2]).items()]
        return type(self.model), repr(self.model), self.model.training, *shapes

    def contains(self, name: str) -> bool:
        """Return whether a module, given by name, is this one or inside it."""
        return not self.name or name == self.name or name.startswith(f"{self.name}.")


class _StepRun(PreparedStep):
    """A prepared step that returns the loss, the outputs, the gradients and the changed buffers.

    `nudge` is the seed of a perturbation of all initial numbers: each is increased or decreased by
    the relative amount `nudge_size`. A `nudge` of 0 changes nothing. If `first_rounded_to` is
    given, all numbers are rounded to this format before they are converted to the setting's.
    """

    def __init__(
        self,
        step: Step,
        setting: Setting,
        nudge: int = 0,
        first_rounded_to: torch.dtype | None = None,
    ) -> None:
        # This is set first, because the base class already calls `_convert`.
        self.first_rounded_to = first_rounded_to
        super().__init__(step, setting)
        self.nudge = nudge
        self.generator = torch.Generator().manual_seed(nudge)
        self.outputs: NamedTensors = {}
        # The batch may be the user's, so it is copied.
        self.batch = tree_map(self._nudge, self.batch)

    def __call__(self) -> NamedTensors:  # type: ignore[override]  # all results in place of the loss
        """Perturb the parameters, execute the step, and return copies of its results by name."""
        self._wrap_model(self.model)
        for parameter in self.model.parameters():
            parameter.data.copy_(self._nudge(parameter.data))
        initial_buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        results = self.results()
        parameters = self.model.named_parameters()
        buffers = self.model.named_buffers()
        results |= {f"gradient of {name}": p.grad for name, p in parameters if p.grad is not None}
        results |= {
            f"updated {n}": b
            for n, b in buffers
            if n not in initial_buffers or not torch.equal(b, initial_buffers[n])
        }
        return {
            name: _detached_copy(tensor)
            for name, tensor in results.items()
            if is_float_or_complex(tensor)
        }

    def _convert(self, tensor: Tensor) -> Tensor:
        """Convert a tensor to the setting, after rounding it to `first_rounded_to`."""
        if self.first_rounded_to is not None and tensor.is_floating_point():
            tensor = tensor.to(self.first_rounded_to)
        return super()._convert(tensor)

    def _nudge(self, value: Nested) -> Nested:
        """Perturb all numbers of a tensor with random signs; return any other value unchanged."""
        if not self.nudge or not isinstance(value, Tensor) or not is_float_or_complex(value):
            return value
        signs = 2 * torch.randint(0, 2, value.shape, generator=self.generator).to(value.device) - 1
        # The factors are in float32 at least, because bfloat16 cannot represent 1 + 2**-8.
        factors = 1 + nudge_size(self.setting) * signs.to(
            torch.promote_types(value.dtype, torch.float32)
        )
        return (value * factors).to(value.dtype)

    def _wrap_model(self, model: nn.Module) -> None:
        """Record the model's outputs, and compile its calls if the setting has `compile`.

        The snapshot of the step undoes this at the end.
        """

        # A function is compiled, because `torch.compile` skips the classes of torch itself.
        def call(*args: Nested, **kwargs: Nested) -> Nested:
            return _torch_internals.call_as_written(model, *args, **kwargs)

        run = self.setting.compiled(call) if self.setting.compile else call

        # A forward hook could record the outputs, too, but it would be compiled with the model.
        def call_and_keep(*args: Nested, **kwargs: Nested) -> Nested:
            """Call the model, and keep its outputs."""
            output = run(*args, **kwargs)
            self.outputs |= named_tensors("output", output)
            return output

        _torch_internals.replace_call(model, call_and_keep)

    def results(self) -> NamedTensors:
        """Execute forward and backward pass, and return the loss and the outputs."""
        loss, self.loss_taken = loss_of(self.model, self.batch, self.loss)
        with torch.autocast(loss.device.type, enabled=False):
            loss.backward()
        return {"loss": loss} | self.outputs


class _IsolatedModuleRun(_StepRun):
    """A prepared module with the inputs and output gradients that it had in a step."""

    def results(self) -> NamedTensors:
        """Execute forward and backward pass, and return outputs and input gradients."""
        args, kwargs, gradients = self.batch
        inputs = named_tensors("input", args) | named_tensors("input", kwargs)
        for tensor in inputs.values():
            tensor.requires_grad_()
        # Some modules change their inputs in place, which is forbidden for leaves. So the module
        # receives clones.
        args, kwargs = tree_map(_clone, (args, kwargs))
        self.model(*args, **kwargs)
        followed = {
            name: out
            for name, out in self.outputs.items()
            if name in gradients and out.requires_grad
        }
        if followed:
            with torch.autocast(self.setting.kind, enabled=False):
                torch.autograd.backward(
                    [*followed.values()], [gradients[name] for name in followed]
                )
        return self.outputs | {
            f"gradient of {name}": t.grad for name, t in inputs.items() if t.grad is not None
        }


def named_tensors(prefix: str, values: Nested) -> NamedTensors:
    """Return the floating-point and complex tensors among nested values, by their paths."""
    leaves = [(path, leaf) for path, leaf in named_leaves(values) if isinstance(leaf, Tensor)]
    return {f"{prefix}{path}": leaf for path, leaf in leaves if is_float_or_complex(leaf)}


def rounding_unit(setting: Setting) -> float:
    """Return the largest relative error of rounding a product once under the active setting.

    >>> rounding_unit(Setting.parse("cpu")) == 2**-24
    True
    """
    if setting.kind == "cuda" and "tf32" in arithmetic().values():
        return 2.0**-11  # TF32 has a significand of 11 bits
    dtype = getattr(torch, setting.autocast) if setting.autocast else setting.dtype
    return torch.finfo(dtype).eps / 2


def uses_short_format(setting: Setting) -> bool:
    """Return whether a setting computes in bfloat16 or float16, at least under autocast.

    >>> [
    ...     uses_short_format(Setting.parse(text))
    ...     for text in ("cpu", "cpu:precision=bfloat16", "cpu:autocast=float16")
    ... ]
    [False, True, True]
    """
    dtype = getattr(torch, setting.autocast) if setting.autocast else setting.dtype
    return torch.finfo(dtype).eps / 2 >= MIN_SHORT_ROUNDOFF


def nudge_size(setting: Setting) -> float:
    """Return the relative perturbation of a step's initial numbers under the active setting.

    >>> (
    ...     nudge_size(Setting.parse("cpu")) == 2**-18,
    ...     nudge_size(Setting.parse("cpu:precision=bfloat16")) == 2**-8,
    ... )
    (True, True)
    """
    unit = rounding_unit(setting)
    return unit if uses_short_format(setting) else min(MAX_ERROR_RATIO * unit, MAX_NUDGE)


def _clone(value: Nested) -> Nested:
    return value.clone() if isinstance(value, Tensor) else value


def _detached_copy(value: Nested) -> Nested:
    """Return a detached copy of a tensor, or any other value unchanged."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def execute(
    step: Step,
    setting: Setting,
    nudge: int = 0,
    first_rounded_to: torch.dtype | None = None,
    context: AbstractContextManager[object] | None = None,
) -> Execution:
    """Execute a step, or a single module, once, with fixed random numbers.

    Args:
        step: The step, or a `ModuleCall`.
        setting: The setting to execute it under.
        nudge: The seed of a perturbation of all initial numbers by `nudge_size`; 0 for none.
        first_rounded_to: The format that all initial numbers are rounded to before they are
            converted to the setting's; None for no rounding.
        context: A context manager that is active during the step.

    Raises:
        GpulabError: If torch's compiler fails, or the step fails.
    """
    run_class = _IsolatedModuleRun if isinstance(step, ModuleCall) else _StepRun
    with seed_generators(setting, SEED), setting.apply():
        with (
            run_class(step, setting, nudge, first_rounded_to) as prepared,
            _explain_errors(setting, prepared.model),
            context or contextlib.nullcontext(),
        ):
            results: NamedTensors = prepared()  # type: ignore[assignment]  # all results in place of the loss
        state = _random_state(setting)
    return Execution(
        {name: to_float64_device(tensor).double() for name, tensor in results.items()}, state
    )


def find_failing_request(step: Step, setting: Setting) -> Request | None:
    """Find the request for a short format that makes a step or module fail in float64.

    Returns:
        The most likely request; None if there is none, so the failure has a different reason.
    """
    requests = ShortFormatRequests(step.model, calling_file=__file__)
    with contextlib.suppress(GpulabError):
        execute(step, setting, context=requests)
    return requests.most_likely


def _random_state(setting: Setting) -> tuple[bytes, ...]:
    """Return the states of the random number generators of the CPU and the device."""
    states = [torch.get_rng_state()]
    if setting.kind != "cpu":
        states.append(
            torch.get_device_module(setting.kind).get_rng_state(torch.device(setting.device))
        )
    return tuple(state.cpu().numpy().tobytes() for state in states)


@contextlib.contextmanager
def _explain_errors(setting: Setting, model: nn.Module) -> Iterator[None]:
    """Convert errors of torch's compiler and of the step to a sentence with the user's line.

    Raises:
        GpulabError: For an error of the compiler.
        UsageError: For any other error of the step.
    """
    compiler_error = _torch_internals.compiler_error()
    try:
        yield
    except compiler_error as error:
        reason = " ".join(str(error).partition("\n\n")[0].split())
        raise GpulabError(
            f"setting {str(setting)!r}: torch's compiler fails on this step: {reason}"
        ) from error
    except GpulabError:
        raise
    except Exception as error:  # of any kind, since the code is the user's
        explained = explain_step_error(error, setting, model.modules())
        if not isinstance(explained, UsageError):
            words = ": ".join([type(error).__name__, *str(error).splitlines()[:1]])
            explained = UsageError(f"the step fails under {setting}: {words}")
        line = line_of_error(error)
        raise UsageError(f"{explained} (at {line})" if line else str(explained)) from error


def module_calls(step: Step, setting: Setting) -> list[ModuleCall]:
    """Record the first call of each module in an uncompiled step; inner modules come first."""
    prepared = _StepRun(step, setting)
    calls: dict[nn.Module, ModuleCall] = {}
    inputs: dict[nn.Module, Nested] = {}

    def save_inputs(
        module: nn.Module, args: Sequence[Nested], kwargs: Mapping[str, Nested]
    ) -> None:
        """Save the inputs of a module before it can change them in place."""
        inputs[module] = tree_map(_detached_copy, (args, kwargs))

    def save_call(name: str, module: nn.Module, output: Nested) -> None:
        """Save the first call of a module; its output gradients are added during backward."""
        if module not in calls:
            gradients: NamedTensors = {}
            calls[module] = ModuleCall(module, (*inputs.pop(module), gradients), name=name)
            for path, tensor in named_tensors("output", output).items():
                if tensor.requires_grad:
                    tensor.register_hook(
                        lambda gradient, path=path: gradients.update(
                            {path: _detached_copy(gradient)}
                        )
                    )

    with seed_generators(setting, SEED), setting.apply(), prepared, contextlib.ExitStack() as hooks:
        for name, module in prepared.model.named_modules():
            output_hook = module.register_forward_hook(
                lambda module, _, output, name=name: save_call(name, module, output)
            )
            for handle in (
                module.register_forward_pre_hook(save_inputs, with_kwargs=True),
                output_hook,
            ):
                hooks.callback(handle.remove)
        prepared()
    return list(calls.values())
