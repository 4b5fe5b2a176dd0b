"""All uses of torch's private API in gpulab. No other file of `gpulab/` uses it.

The private API consists of all modules, functions and attributes of torch whose names begin with an
underscore, and of some other names that torch's documentation does not describe, such as
`StorageWeakRef`. Torch may change them in any release. Therefore, the docstring of each entry
states which versions of torch it was tested with, and what will break in gpulab if torch changes
it.

To check a new release of torch, install it and run `pytest tests/test_torch_internals.py`. This
file has a test for each entry, so a failure names the entry to repair, and it fails if another
module of gpulab uses the private API. Then run the tests of the packages that use the entries:
`tests/guards`, `tests/audits`, `tests/numerics`, `tests/engines`, `tests/saddles` and
`tests/device`.

The guards import this module and need nothing but torch, so it imports nothing from gpulab. Nor
does it import torch's compiler (`torch._dynamo`, `torch._inductor`), which takes seconds and 150
MB: the functions that need the compiler import it when they are called.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch._C._dynamo import eval_frame
from torch._decomp import get_decompositions
from torch.autograd.function import once_differentiable
from torch.autograd.graph import Node
from torch.multiprocessing import reductions
from torch.nn import parameter
from torch.nn.utils import stateless
from torch.optim import adam as adam_module
from torch.optim import optimizer as optimizer_module
from torch.utils import _python_dispatch, _pytree, weak

Nested: TypeAlias = Any
"""Tensors, numbers, texts, None, and lists, tuples and dicts of these in any depth.

This is the type of the arguments and results of operations and of users' models. A narrower type is
impossible: which of these types a value has depends on the operation's schema or on the user's
code, so every use would need a cast.
"""

Span: TypeAlias = tuple[int, int]
"""The first address of a piece of memory, and the one after its last."""

Function = TypeVar("Function", bound=Callable[..., Nested])


# --- operators and their schemas ------------------------------------------------------------------

OpOverload = torch._ops.OpOverload
"""An operation as a dispatch mode sees it, such as `torch.ops.aten.add.Tensor`.

gpulab also uses its attributes `tags`, `is_view`, `overloadpacket`, `decompose` and `name`.

Tested with torch 2.6 and 2.15. If torch changes this, audits, guards, emulations and rooflines will
see no operations.
"""

TO_COPY = torch.ops.aten._to_copy.default
"""The operation behind `Tensor.to`.

Tested with torch 2.6 and 2.15. If torch changes this, the guard will miss copies that continue
after the call.
"""

UNSAFE_VIEW = torch.ops.aten._unsafe_view.default
"""A view that autograd does not track as one, as in `torch.matmul`.

Tested with torch 2.6 and 2.15. If torch changes this, Hessians of such losses will be computed more
slowly.
"""

fused_lstm_cell = torch.ops.aten._thnn_fused_lstm_cell
"""The kernel of `nn.LSTMCell` on a GPU: from the gates and the cell to the new state and cell.

Tested with torch 2.11, on CUDA. If torch changes this, PredNet's analytic engine will fail on GPUs.
"""

fused_lstm_cell_backward = torch.ops.aten._thnn_fused_lstm_cell_backward_impl
"""The gradients of `fused_lstm_cell`.

Tested with torch 2.11, on CUDA. If torch changes this, PredNet's analytic engine will fail on GPUs.
"""

OPERATOR_MODULE = "torch._ops"
"""The module whose frame lies between a dispatch mode and the operation that it calls.

Tested with torch 2.6 and 2.15. If torch changes this, `gpulab guard` will show one more frame in
tracebacks.
"""


def schema_name(operation: OpOverload) -> str:
    """Return the full name of an operation, such as `aten::addmm_`.

    Tested with torch 2.6 and 2.15. If torch changes this, no operation will have a name.
    """
    return operation._schema.name


def operation_name(operation: OpOverload) -> str:
    """Return the bare name of an operation, such as `addmm` for `aten::addmm_`.

    Tested with torch 2.6 and 2.15. If torch changes this, no operation will have a name.

    >>> operation_name(torch.ops.aten.add_.Tensor), operation_name(torch.ops.aten._to_copy.default)
    ('add', '_to_copy')
    """
    return operation._schema.name.partition("::")[2].rstrip("_")


def process_group_ranks(group: Nested) -> list[int]:
    """Return the ranks of a process group that an operation of `torch.distributed` was given.

    Tested with torch 2.6 and 2.15. If torch changes this, it will be impossible to join the traces
    of ranks.
    """
    from torch import distributed

    return distributed.get_process_group_ranks(distributed.ProcessGroup.unbox(group))


def request_work_handle(
    operation: OpOverload, args: Sequence[Nested], kwargs: Mapping[str, Nested]
) -> tuple[Sequence[Nested], dict[str, Nested]]:
    """Change the arguments of an operation of `c10d` so that it returns a valid work handle.

    Collectives run asynchronously. Code that needs their result waits for the work handle that the
    operation returns, as `wait_for_collective` does. With `async_op=False`, NCCL returns an empty
    handle, and waiting for it crashes Python. Therefore, `async_op` is set to True. This does not
    change the results, because `torch.distributed` waits for any handle that it receives.

    Tested with torch 2.6 and 2.15. If torch changes this, recording a rank on a GPU will end
    in a segmentation fault.

    Returns:
        The positional and the keyword arguments for the call. They are unchanged for an operation
        without the argument `async_op`, such as `monitored_barrier_`.
    """
    kwargs = dict(kwargs)
    names = argument_names(operation)
    # The name of the argument depends on the version of torch.
    name = next((name for name in ("async_op", "asyncOp") if name in names), None)
    if name is None:
        return args, kwargs
    position = names.index(name)
    is_positional = position < len(args)
    if is_positional:
        args = [*args[:position], True, *args[position + 1 :]]
    else:
        kwargs[name] = True
    return args, kwargs


def wait_for_collective(out: Nested) -> None:
    """Wait for a collective operation whose result contains the handle of its work.

    Tested with torch 2.6 and 2.15. If torch changes this, collectives will be recorded before they
    have run.
    """
    for value in out if isinstance(out, tuple) else (out,):
        if isinstance(value, torch.ScriptObject) and hasattr(value, "wait"):
            value.wait()


def is_mutable(operation: OpOverload) -> bool:
    """Return whether an operation writes to an argument, according to its schema.

    Tested with torch 2.6 and 2.15. If torch changes this, audits will compare arguments that were
    overwritten.
    """
    return operation._schema.is_mutable


def argument_names(operation: OpOverload) -> list[str]:
    """Return the names of an operation's arguments, in order.

    Tested with torch 2.6 and 2.15. If torch changes this, Hessian products will be unable to
    follow in-place operations.
    """
    return [argument.name for argument in operation._schema.arguments]


def result_names(operation: OpOverload) -> list[str]:
    """Return the names of an operation's results, in order; empty for those without one.

    Tested with torch 2.6 and 2.15. If torch changes this, audits will compare the auxiliary outputs
    of kernels.
    """
    return [result.name for result in operation._schema.returns]


def named_arguments(
    operation: OpOverload,
    args: Sequence[Nested],
    kwargs: dict[str, Nested],
) -> dict[str, Nested]:
    """Return the arguments of a call by name, in the order of the schema, defaults included.

    Tested with torch 2.6 and 2.15. If torch changes this, audits will be unable to compare
    arguments.

    >>> named_arguments(torch.ops.aten.add.Tensor, (1, 2), {})
    {'self': 1, 'other': 2, 'alpha': 1}
    """
    defaults = _default_arguments(operation)
    positional = dict(zip(defaults, args, strict=False))
    return defaults | positional | kwargs


@functools.cache
def _default_arguments(operation: OpOverload) -> dict[str, Nested]:
    """Return the arguments of an operation with their default values; None without a default."""
    return {argument.name: argument.default_value for argument in operation._schema.arguments}


def returned_or_written(operation: OpOverload, args: Sequence[Nested], returned: Nested) -> Nested:
    """Return the results of a call, or the arguments it wrote to if it returns nothing.

    Operations of optimizers return nothing. For `_ctc_loss`, only the first result is returned,
    because the kernel leaves parts of the second uninitialised.

    Tested with torch 2.6 and 2.15. If torch changes this, audits and rooflines will miss the steps
    of optimizers.
    """
    if returned is not None:
        return returned[:1] if operation._schema.name == "aten::_ctc_loss" else returned
    arguments = zip(operation._schema.arguments, args, strict=False)
    return [value for argument, value in arguments if _is_written(argument)]


def _is_written(argument: torch.Argument) -> bool:
    """Return whether an operation writes to an argument, according to its schema."""
    return argument.alias_info is not None and argument.alias_info.is_write


def written_tensors(
    operation: OpOverload,
    args: Sequence[Nested],
    kwargs: dict[str, Nested],
) -> list[Tensor]:
    """Return the tensors that a call writes to.

    Batch normalisations in training mode are a special case: they write to their running
    statistics, although their schemas do not declare it.

    Tested with torch 2.6 and 2.15. If torch changes this, audits will miss changes by in-place
    operations.

    >>> x = torch.ones(2)
    >>> written_tensors(torch.ops.aten.add_.Tensor, (x, 1), {})[0] is x
    True
    """
    arguments = named_arguments(operation, args, kwargs)
    written = [arguments[a.name] for a in operation._schema.arguments if _is_written(a)]
    if "batch_norm" in operation._schema.name and not written:
        is_training = arguments.get("training", arguments.get("train", False))
        statistics = (arguments.get("running_mean"), arguments.get("running_var"))
        written = [statistics] if is_training and "grad_out" not in arguments else []
    return find_tensors(written)


@contextlib.contextmanager
def ctc_lengths_as_lists() -> Iterator[None]:
    """Inside the block, convert the lengths for `torch.ctc_loss` on a GPU from tensors to lists.

    Lengths may be tensors on the CPU. Torch converts them itself, but not while a dispatch mode is
    active. It then raises an error, because the other arguments are on a GPU.

    Tested with torch 2.6 and 2.15. If torch changes this, audits of CTC losses will fail on GPUs.
    """
    original = torch.ctc_loss

    @functools.wraps(original)
    def with_lists(log_probs: Tensor, targets: Tensor, *args: Nested, **kwargs: Nested) -> Tensor:
        def as_list(value: Nested) -> Nested:
            is_on_cpu = (
                isinstance(value, Tensor) and value.device.type == "cpu" != log_probs.device.type
            )
            return value.tolist() if is_on_cpu else value

        kwargs = {name: as_list(value) for name, value in kwargs.items()}
        return original(log_probs, targets, *map(as_list, args), **kwargs)

    torch.ctc_loss = with_lists
    try:
        yield
    finally:
        torch.ctc_loss = original


def negative_view(tensor: Tensor) -> Tensor:
    """Return a view of a tensor that is read with the opposite sign.

    Tested with torch 2.6 and 2.15. If torch changes this, the references of negated views will be
    wrong.

    >>> negative_view(torch.ones(2)).tolist()
    [-1.0, -1.0]
    """
    return torch._neg_view(tensor)


def has_failed(operation: OpOverload, returned: Nested) -> bool:
    """Return whether a linear algebra routine failed: its result `info` is not zero.

    Tested with torch 2.6 and 2.15. If torch changes this, audits will compare failed
    factorisations.
    """
    names = result_names(operation)
    return "info" in names and bool(returned[names.index("info")].any())


def only_allocates(name: str) -> bool:
    """Return whether an operation, given by its bare name, returns uninitialised memory.

    Tested with torch 2.6 and 2.15. If torch changes these names, audits will compare uninitialised
    memory.
    """
    return name.startswith(("empty", "new_empty"))


def overwrites_first_argument(name: str) -> bool:
    """Return whether an operation overwrites its first argument without reading it.

    `name` is the bare name of the operation.

    Tested with torch 2.6 and 2.15. If torch changes these names, audits will compare inputs that
    are never read.
    """
    return name in ("copy", "fill", "zero")


def functional_variant(operation: OpOverload) -> OpOverload | None:
    """Return the variant of an in-place operation that returns a new tensor instead.

    The result is None if the operation is not in-place, or if no variant has the same arguments.

    Tested with torch 2.6 and 2.15. If torch changes this, Hessian products will be unable to
    follow in-place operations.

    >>> functional_variant(torch.ops.aten.add_.Tensor)
    <OpOverload(op='aten.add', overload='Tensor')>
    """
    name = operation._schema.name
    packet = getattr(torch.ops.aten, name.removeprefix("aten::").removesuffix("_"), None)
    if packet is None or not name.endswith("_"):
        return None
    names = argument_names(operation)
    overloads = [getattr(packet, overload) for overload in packet.overloads()]
    fitting = [o for o in overloads if argument_names(o) == names and not is_mutable(o)]
    preferred = operation._overloadname
    return min(fitting, key=lambda o: o._overloadname != preferred, default=None)


@functools.cache
def is_composite(operation: OpOverload) -> bool:
    """Return whether an operation is implemented only by calls of other operations.

    A dispatch mode sees these other operations, except in inference mode. An operation that also
    has a kernel for a device, such as the backward pass of SiLU, is not composite.

    Tested with torch 2.6 and 2.15. If torch changes this, emulations will miss products in
    inference mode.
    """
    keys = ("CompositeImplicitAutograd", "CPU", "CUDA", "MPS")
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    composite, *device_kernels = (has_kernel(operation.name(), key) for key in keys)
    return composite and not any(device_kernels)


def call_composite_kernel(
    operation: OpOverload,
    args: Sequence[Nested],
    kwargs: Mapping[str, Nested],
    is_explicit: bool = False,
) -> Nested:
    """Call the kernel of an operation that calls other operations.

    Args:
        operation: The operation.
        args: Its positional arguments.
        kwargs: Its named arguments.
        is_explicit: Whether the kernel is registered as `CompositeExplicitAutograd` (or as
            `CompositeExplicitAutogradNonFunctional`), with a backward pass of its own, and not as
            `CompositeImplicitAutograd`.

    Tested with torch 2.6 and 2.15. If torch changes this, emulations will fail in inference mode
    and in `cdist`.
    """
    keys = torch._C.DispatchKey
    key = keys.CompositeImplicitAutograd
    if is_explicit:
        is_plain = torch._C._dispatch_has_kernel_for_dispatch_key(
            operation.name(), "CompositeExplicitAutograd"
        )
        key = (
            keys.CompositeExplicitAutograd
            if is_plain
            else keys.CompositeExplicitAutogradNonFunctional
        )
    return operation._op_dk(key, *args, **kwargs)


def decomposition_of(operation: OpOverload) -> Callable[..., Nested]:
    """Return torch's Python function that computes an operation by simpler ones.

    Tested with torch 2.6 and 2.15. If torch changes this, audits of `cdist` will fail.
    """
    return get_decompositions([operation])[operation]


def flop_formulas() -> dict[Nested, Callable[..., int]]:
    """Return torch's formulas for floating-point operations, by overload packet.

    Importing them imports Triton, which takes 70 MB.

    Tested with torch 2.6 and 2.15. If torch changes this, `gpulab.device.place` and rooflines will
    count no FLOP.
    """
    from torch.utils.flop_counter import flop_registry

    return flop_registry


# --- dispatch modes -------------------------------------------------------------------------------


class UncompiledDispatchMode(_python_dispatch.TorchDispatchMode):
    """A dispatch mode that torch's compiler leaves uncompiled, with everything that it calls.

    Torch protects every other mode from compilation by a wrapper, which imports the compiler and
    takes 120 MB. This class replaces the wrapper. Torch 2.6 has no wrapper, because it compiles
    nothing while a dispatch mode is active.

    Tested with torch 2.6 and 2.15. If torch changes this, guards and audits will import the
    compiler.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        dispatch = uncompiled(inspect.unwrap(cls.__torch_dispatch__))
        cls.__torch_dispatch__ = dispatch  # type: ignore[method-assign]


dispatch_disabled = torch._C._DisableTorchDispatch
"""A context manager inside which dispatch modes do not see operations.

Tested with torch 2.6 and 2.15. If torch changes this, audits and guards will see their own
computations.
"""


def active_dispatch_modes() -> list[_python_dispatch.TorchDispatchMode]:
    """Return the dispatch modes that are active in this thread, the innermost last.

    Tested with torch 2.6 and 2.15. If torch changes this, an emulation inside another one will not
    replace it.
    """
    return _python_dispatch._get_current_dispatch_mode_stack()


def has_wrapper_subclass(tensor_types: Iterable[type]) -> bool:
    """Return whether any type is a tensor subclass that calls operations on its parts.

    The class of nested tensors is an example.

    Tested with torch 2.6 and 2.15. If torch changes this, audits and emulations of nested tensors
    will fail.
    """
    return any(map(_python_dispatch.is_traceable_wrapper_subclass_type, tensor_types))


def has_computation_observers() -> bool:
    """Return whether a dispatch mode, function mode or saved-tensor hook is active in this thread.

    In torch 2.6 this cannot be determined for hooks for saved tensors, so the result is always
    true.

    Tested with torch 2.6 and 2.15. If torch changes this, faster engines will hide operations from
    guards.
    """
    hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: True)
    modes = torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack()
    return bool(modes or hooks(True))


@contextlib.contextmanager
def without_fused_rnn() -> Iterator[None]:
    """Inside the block, disable oneDNN and cuDNN, so that recurrent layers use smaller operations.

    The public context managers `flags` are not used, because they also set other flags of the two
    libraries.

    Tested with torch 2.6 and 2.15. If torch changes this, emulations will not reach the products of
    recurrent layers.
    """
    onednn = torch._C._get_mkldnn_enabled()
    cudnn = torch._C._get_cudnn_enabled()
    try:
        torch._C._set_mkldnn_enabled(False)
        torch._C._set_cudnn_enabled(False)
        yield
    finally:
        torch._C._set_mkldnn_enabled(onednn)
        torch._C._set_cudnn_enabled(cudnn)


# --- the compiler: Dynamo and Inductor ------------------------------------------------------------


def uncompiled(function: Function) -> Function:
    """Mark a function so that Dynamo compiles neither the function nor anything that it calls.

    `torch.compiler.disable` does the same, but imports the compiler. Torch 2.6 has no other
    complete way: Dynamo still compiles the function if compiled code calls it or `backward`.

    Tested with torch 2.15. If torch changes this, a guard around compiled code will itself be
    compiled.
    """
    if action := getattr(eval_frame, "_FrameAction", None):
        # The first action is for the function itself, the second for the functions that it calls.
        strategy = eval_frame._FrameExecStrategy(action.SKIP, action.SKIP)
        eval_frame.set_code_exec_strategy(function.__code__, strategy)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


def is_compiler_loaded() -> bool:
    """Return whether this process has imported torch's compiler.

    Tested with torch 2.6 and 2.15. If torch changes this, Hessians of compiled models will fail.
    """
    return "torch._dynamo" in sys.modules


def report_skipped_frames(report: Callable[[], None]) -> Callable[[], None]:
    """Call a function whenever compiled code runs uncompiled because a dispatch mode is active.

    The call imports the compiler, and replaces functions of Dynamo.

    Returns:
        A function that restores Dynamo's functions, which ends the reports.

    Tested with torch 2.6 and 2.15. If torch changes this, the guard will not report that compiled
    code ran uncompiled.
    """
    from torch._dynamo import convert_frame

    names = ("any_torch_dispatch_mode_on_stack", "is_in_any_mode_without_ignore_compile_internals")
    originals = {
        n: getattr(convert_frame, n)
        for n in (*names, "is_in_torch_dispatch_mode")
        if hasattr(convert_frame, n)
    }

    def wrap(original: Callable[..., bool]) -> Callable[..., bool]:
        def wrapper(*args: Nested, **kwargs: Nested) -> bool:
            is_skipped = original(*args, **kwargs)
            if is_skipped:
                report()
            return is_skipped

        return uncompiled(wrapper)

    for name, original in originals.items():
        setattr(convert_frame, name, wrap(original))

    def undo() -> None:
        for name, original in originals.items():
            setattr(convert_frame, name, original)

    return undo


def recompilations_allowed(count: int) -> AbstractContextManager[object]:
    """Inside the block, let Dynamo compile up to `count` variants of a function.

    Dynamo raises an error for any further variant. By default, it compiles fewer variants and runs
    the others uncompiled. Up to torch 2.6, the option is called `cache_size_limit`.

    Tested with torch 2.6 and 2.15. If torch changes this, settings with `compile` will fail.
    """
    from torch._dynamo import config

    limit = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"
    return config.patch({limit: count, f"fail_on_{limit.replace('_size', '')}_hit": True})


def uncompiled_random_numbers(use_fallback: bool = True) -> AbstractContextManager[object]:
    """Inside the block, let Inductor draw the same random numbers as uncompiled code.

    If `use_fallback` is false, Inductor uses its own random number generator instead.

    Tested with torch 2.6 and 2.15. If torch changes this, audits will blame the dropout of compiled
    models.
    """
    from torch._inductor import config

    return config.patch(fallback_random=use_fallback)


def draws_as_uncompiled() -> bool:
    """Return whether Inductor is set to draw the random numbers of uncompiled code.

    Tested with torch 2.6 and 2.15. If torch changes this, audits will recommend an option that is
    already set.
    """
    from torch._inductor import config

    return bool(config.fallback_random)


def compiler_error() -> type[Exception]:
    """Return the class of the errors that the compiler raises.

    Tested with torch 2.6 and 2.15. If torch changes this, audits will not explain errors of the
    compiler.
    """
    from torch._dynamo.exc import TorchDynamoException

    return TorchDynamoException


def forget_compiled_graphs() -> None:
    """Reset the count of compiled graphs to zero.

    All other counters of Dynamo are reset as well.

    Tested with torch 2.6 and 2.15. If torch changes this, audits will also count the graphs of
    earlier audits.
    """
    from torch._dynamo.utils import counters

    counters.clear()


def compiled_graph_count() -> int:
    """Return how many graphs Dynamo has compiled since `forget_compiled_graphs`.

    Tested with torch 2.6 and 2.15. If torch changes this, audits will reject compiled models as not
    compiled.
    """
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def original_module(module: nn.Module) -> nn.Module:
    """Return the module that `torch.compile` wrapped, or the module itself.

    Tested with torch 2.6 and 2.15. If torch changes this, audits will compare a compiled model with
    itself.
    """
    return getattr(module, "_orig_mod", module)


def is_compiled(module: nn.Module) -> bool:
    """Return whether `torch.compile` wrapped a module or `Module.compile` compiled it in place.

    Tested with torch 2.6 and 2.15. If torch changes this, audits will not report that a model ran
    uncompiled.
    """
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


def name_as_written(name: str) -> str:
    """Return the name of a module or parameter without the prefix that `torch.compile` adds.

    Tested with torch 2.6 and 2.15. If torch changes this, audits of compiled models will show other
    names.

    >>> name_as_written("_orig_mod.0.weight"), name_as_written("_orig_mod")
    ('0.weight', '')
    """
    return name.replace("_orig_mod.", "").removesuffix("_orig_mod")


def call_as_written(module: nn.Module, *args: Nested, **kwargs: Nested) -> Nested:
    """Call a module and its hooks without the function set by `Module.compile` or `replace_call`.

    Tested with torch 2.6 and 2.15. If torch changes this, audits of compiled models will fail.
    """
    return module._call_impl(*args, **kwargs)


def replace_call(module: nn.Module, call: Callable[..., Nested]) -> None:
    """Replace the function that is executed when a module is called, as `Module.compile` does.

    Tested with torch 2.6 and 2.15. If torch changes this, audits of compiled models will fail.
    """
    module._compiled_call_impl = call


# --- autograd: nodes of the graph, and hooks ------------------------------------------------------


def graph_nodes(result: Tensor) -> Iterator[Node]:
    """Iterate over the nodes of a result's autograd graph; each node occurs once.

    This function uses only torch's public API.
    """
    pending: list[Node | None] = [result.grad_fn]
    visited: set[Node] = set()
    while pending:
        node = pending.pop()
        if node is not None and node not in visited:
            visited.add(node)
            pending += [next_node for next_node, _ in node.next_functions]
            yield node


def current_node() -> Node | None:
    """Return the node whose backward function this thread is running, or None outside of backward.

    Tested with torch 2.6 and 2.15. If torch changes this, audits and guards will be unable to name
    backward operations.
    """
    return torch._C._current_autograd_node()


def node_number(node: Node) -> int:
    """Return autograd's sequence number of a node; each thread numbers its nodes separately.

    Tested with torch 2.6 and 2.15. If torch changes this, audits will show no line for backward
    operations.
    """
    return node._sequence_nr()


def newest_node_number() -> int:
    """Return the sequence number of the node that this thread created last.

    Tested with torch 2.6 and 2.15. If torch changes this, audits will show no line for backward
    operations.
    """
    return torch.autograd._get_sequence_nr() - 1


def current_backward_pass() -> int:
    """Return the number of this thread's current backward pass, or -1 outside of one.

    Tested with torch 2.6 and 2.15. If torch changes this, the guard will check nothing on
    accelerators.
    """
    return torch._C._current_graph_task_id()


def call_after_backward(callback: Callable[[], None]) -> None:
    """Register a function to be called when the current backward pass ends.

    Torch 2.15 also has the public function `torch.autograd.graph.queue_callback`.

    Tested with torch 2.6 and 2.15. If torch changes this, the guard will report nothing on
    accelerators.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def push_saved_tensor_hooks(
    pack: Callable[[Tensor], Nested],
    unpack: Callable[[Nested], Tensor],
) -> None:
    """Add hooks for saved tensors, as `saved_tensors_hooks` does on entry.

    The class itself is not used, because an instance cannot be entered again, and several instances
    must be exited in reverse order.

    Tested with torch 2.6 and 2.15. If torch changes this, it will be impossible to enter a guard.
    """
    torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def pop_saved_tensor_hooks() -> None:
    """Remove the hooks for saved tensors that this thread added last.

    Tested with torch 2.6 and 2.15. If torch changes this, it will be impossible to exit a guard.
    """
    torch._C._autograd._pop_saved_tensors_default_hooks()


def saved_values(node: Node | None, names: Iterable[str] = ()) -> Iterator[tuple[str, Nested]]:
    """Iterate over the values that a node has saved for its backward pass, with their names.

    Args:
        node: A node; None has no saved values.
        names: The names of the requested values; empty for all values. The value is None for a name
            that the node does not have. Values that torch has already released are skipped.

    Tested with torch 2.6 and 2.15. If torch changes this, the guard will name no operands and will
    blame batch normalisation.
    """
    prefix = "_saved_"
    attributes = [prefix + name for name in names] or dir(node)
    for attribute in attributes:
        if attribute.startswith(prefix):
            try:
                value = getattr(node, attribute, None)
            except RuntimeError:  # torch has released the value
                continue
            yield attribute.removeprefix(prefix), value


def is_checkpoint_frame(frame: types.FrameType | None) -> bool:
    """Return whether a frame runs code of `torch.utils.checkpoint`, which recomputes activations.

    Tested with torch 2.6 and 2.15. If torch changes this, the guard will name the wrong operation
    for checkpoints.
    """
    return frame is not None and frame.f_globals.get("__name__") == "torch.utils.checkpoint"


def is_once_differentiable(node: Node) -> bool:
    """Return whether a node belongs to a user's function with a `once_differentiable` backward.

    Tested with torch 2.6 and 2.15. If torch changes this, Hessians will silently treat such
    gradients as constants.
    """
    backward = getattr(getattr(type(node), "_forward_cls", None), "backward", None)
    return getattr(backward, "__code__", None) is _ONCE_DIFFERENTIABLE


# The decorator returns a wrapper, so all decorated functions have the same code object.
_ONCE_DIFFERENTIABLE = once_differentiable(len).__code__


def leaf_of(node: Node) -> Tensor | None:
    """Return the leaf that a node accumulates a gradient for; None for other nodes.

    Tested with torch 2.6 and 2.15. If torch changes this, Hessians of losses that hold parameters
    will be wrong.
    """
    return getattr(node, "variable", None)


def has_tensor_hooks(tensor: Tensor) -> bool:
    """Return whether a leaf has hooks that can read or change its gradient.

    Tested with torch 2.6 and 2.15. If torch changes this, faster engines will skip a user's hooks.
    """
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def has_module_hooks(module: nn.Module) -> bool:
    """Return whether a module has forward or backward hooks; submodules do not count.

    Tested with torch 2.6 and 2.15. If torch changes this, faster engines will skip a user's hooks.
    """
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return any(hooks)


def has_global_module_hooks() -> bool:
    """Return whether there are global forward or backward hooks, which apply to all modules.

    Tested with torch 2.6 and 2.15. If torch changes this, faster engines will skip a user's hooks.
    """
    module = nn.modules.module
    hooks = (
        module._global_forward_hooks,
        module._global_forward_pre_hooks,
        module._global_backward_hooks,
        module._global_backward_pre_hooks,
    )
    return any(hooks)


register_optimizer_step_pre_hook = optimizer_module.register_optimizer_step_pre_hook
"""Register a function to be called before each step of every optimizer.

Tested with torch 2.6 and 2.15. If torch changes this, audits will not restore the state of
optimizers.
"""

register_optimizer_step_post_hook = optimizer_module.register_optimizer_step_post_hook
"""Register a function to be called after each step of every optimizer.

Tested with torch 2.6 and 2.15. If torch changes this, the guard will be unable to attribute a write
to an optimizer step.
"""


# --- tensors, storages and memory -----------------------------------------------------------------

StorageWeakRef = reductions.StorageWeakRef
"""A weak reference to a storage; `expired` says whether its memory is gone, `cdata` identifies it.

Tested with torch 2.6 and 2.15. If torch changes this, the guard will keep memory alive or blame
reused memory.
"""


def storage_alive(reference: StorageWeakRef) -> torch.UntypedStorage | None:
    """Return the storage of a weak reference; None if its memory has been freed.

    The returned object keeps the memory alive.

    Tested with torch 2.6 and 2.15. If torch changes this, the guard will not name the line that
    wrote.
    """
    return torch.UntypedStorage._new_with_weak_ptr(reference.cdata)


WeakTensorKeyDictionary = weak.WeakTensorKeyDictionary
"""A dictionary whose keys are tensors, compared as objects and not kept alive.

Tested with torch 2.6 and 2.15. If torch changes this, it will be impossible to capture gradients
for Hessians.
"""


def storage_identity(storage: torch.UntypedStorage) -> int:
    """Return a number that identifies a storage as long as it lives.

    Tested with torch 2.6 and 2.15. If torch changes this, rooflines will count shared memory twice.
    """
    return storage._cdata


def is_plain(tensor: Nested) -> bool:
    """Return whether a value is an ordinary strided tensor, whose memory can be read directly.

    Sparse, nested and meta tensors, and tensors of a subclass or inside a transform, are not.

    Tested with torch 2.6 and 2.15. If torch changes this, the guard will read the memory of wrapped
    tensors.
    """
    if type(tensor) not in (Tensor, nn.Parameter):
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False
    is_strided = tensor.layout == torch.strided and not tensor.is_nested
    return is_strided and tensor.device.type != "meta"


def span_of(tensor: Nested) -> Span:
    """Return the addresses of the memory from the first to the last element of a plain tensor.

    For any other value and for empty tensors, the span is empty and overlaps no other span.

    Tested with torch 2.6 and 2.15. If torch changes this, the guard will not find tensors that
    share memory.
    """
    if not is_plain(tensor) or tensor.numel() == 0:
        return 0, 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    # The number of elements between the first and the last one. Strides are not negative.
    last_offset = sum((size - 1) * stride for size, stride in steps)
    return tensor.data_ptr(), tensor.data_ptr() + (last_offset + 1) * tensor.element_size()


def component_tensors(tensor: Tensor) -> list[Tensor]:
    """Return the ordinary tensors that a tensor consists of; none if its content cannot be read.

    Tested with torch 2.6 and 2.15. If torch changes this, audits and guards will skip or misread
    tensors.
    """
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    if wrapped or tensor.device.type == "meta":
        return []
    if tensor.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return []  # while a CUDA graph is captured, reading the content is forbidden
    is_subclass = type(tensor) is not Tensor  # for speed, ordinary tensors skip the next checks
    if is_subclass and _python_dispatch.is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return [
            component for name in names for component in component_tensors(getattr(tensor, name))
        ]
    if is_subclass:
        try:
            tensor = tensor.as_subclass(Tensor)
        except RuntimeError:  # torch 2.6 cannot convert a FakeTensor
            return []
        if torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Python):
            return []  # a FakeTensor, for example
    methods = _SPARSE_METHODS.get(tensor.layout)
    if methods:
        return [getattr(tensor, method)() for method in methods]
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
        return []
    if tensor.is_conj():  # a flag, which can be removed without a copy
        tensor = tensor.conj()
    return [torch._neg_view(tensor) if tensor.is_neg() else tensor]


_ROWS = ("crow_indices", "col_indices", "values")
_COLUMNS = ("ccol_indices", "row_indices", "values")
# The methods that return the parts of a sparse tensor, by layout.
_SPARSE_METHODS: dict[torch.layout, tuple[str, ...]] = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: _ROWS,
    torch.sparse_bsr: _ROWS,
    torch.sparse_csc: _COLUMNS,
    torch.sparse_bsc: _COLUMNS,
}


def version_of(tensor: Tensor) -> int:
    """Return how many in-place operations of torch have changed a tensor's memory.

    Tested with torch 2.6 and 2.15. If torch changes this, the guard will miss in-place operations.
    """
    return tensor._version


def base_of(tensor: Tensor) -> Tensor | None:
    """Return the tensor that a tensor is a view of; None if it is not a view.

    Tested with torch 2.6 and 2.15. If torch changes this, audits will miss changes made through a
    view.
    """
    return tensor._base


def is_view(tensor: Tensor) -> bool:
    """Return whether autograd treats a tensor as a view of another one.

    Tested with torch 2.6 and 2.15. If torch changes this, audits will report gradients of views.
    """
    return tensor._is_view()


def is_zero_tensor(tensor: Tensor) -> bool:
    """Return whether a tensor is a zero of forward-mode differentiation, which has no memory.

    Tested with torch 2.6 and 2.15. If torch changes this, emulations will fail inside forward-mode
    differentiation.
    """
    return tensor._is_zerotensor()


# --- nested values --------------------------------------------------------------------------------

tree_flatten = _pytree.tree_flatten
"""Return the leaves of nested values, and the specification for `tree_unflatten`.

Tested with torch 2.6 and 2.15. If torch changes this, it will be impossible to capture gradients
for Hessians.
"""

tree_unflatten = _pytree.tree_unflatten
"""Rebuild nested values from the leaves and the specification that `tree_flatten` returned.

Tested with torch 2.6 and 2.15. If torch changes this, it will be impossible to capture gradients
for Hessians.
"""

tree_leaves = _pytree.tree_leaves
"""Return the leaves of nested values, in all types of containers that torch knows.

Tested with torch 2.6 and 2.15. If torch changes this, steps will find no loss among outputs.
"""

tree_map = _pytree.tree_map
"""Return nested values with a function applied to each leaf.

Tested with torch 2.6 and 2.15. If torch changes this, it will be impossible to move batches to a
device.
"""

tree_map_only = _pytree.tree_map_only
"""Return nested values with a function applied to each leaf of a type.

Tested with torch 2.6 and 2.15. If torch changes this, it will be impossible to convert batches and
to capture graphs.
"""


def named_leaves(values: Nested) -> list[tuple[str, Nested]]:
    """Return the leaves of nested values, each with its path in Python syntax.

    Tested with torch 2.6 and 2.15. If torch changes this, audits will be unable to name the outputs
    of models.

    >>> named_leaves([1, {"loss": 2}])
    [('[0]', 1), ("[1]['loss']", 2)]
    """
    leaves, _ = _pytree.tree_flatten_with_path(values)
    return [(_pytree.keystr(path), leaf) for path, leaf in leaves]


_SIMPLE_TYPES = (int, float, str, type(None))


def map_nested(change: Callable[[Nested], Nested], values: Nested) -> Nested:
    """Apply a function to all values in nested lists, tuples and dicts, and return the result.

    Numbers, texts and None are returned unchanged. The function is faster than `tree_map`, which
    supports more types of containers.

    This function uses only torch's public API. The arguments of operations come in no other
    containers.
    """
    if isinstance(values, list | tuple):
        return type(values)([map_nested(change, value) for value in values])
    if isinstance(values, dict):
        return {key: map_nested(change, value) for key, value in values.items()}
    return values if isinstance(values, _SIMPLE_TYPES) else change(values)


def find_tensors(values: Nested) -> list[Tensor]:
    """Return the tensors nested in lists, tuples and dicts, in order.

    This function uses only torch's public API. The arguments of operations come in no other
    containers.
    """
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, list | tuple):
        return []
    return [
        tensor
        for value in values
        if not isinstance(value, _SIMPLE_TYPES)
        for tensor in find_tensors(value)
    ]


# --- modules and optimizers -----------------------------------------------------------------------

DropoutModule = nn.modules.dropout._DropoutNd
"""The base class of all dropout layers.

Tested with torch 2.6 and 2.15. If torch changes this, Hessians of models in training mode will not
be refused.
"""

BatchNormModule = nn.modules.batchnorm._BatchNorm
"""The base class of all batch normalisations.

Tested with torch 2.6 and 2.15. If torch changes this, Hessians of models in training mode will not
be refused.
"""

weight_norm = torch._weight_norm
"""The function behind `torch.nn.utils.parametrizations.weight_norm`, as function modes see it.

Tested with torch 2.6 and 2.15. If torch changes this, Hessians of layers with weight normalisation
will be wrong.
"""

reparametrized = stateless._reparametrize_module
"""A context manager that replaces parameters and buffers of a module, given by name.

`torch.func.functional_call` does the same for one call of the module only.

Tested with torch 2.6 and 2.15. If torch changes this, it will be impossible to compute Hessians and
landscapes.
"""

is_lazy = parameter.is_lazy
"""Whether a parameter or buffer has no shape yet.

Tested with torch 2.6 and 2.15. If torch changes this, audits of lazy modules will fail without an
explanation.
"""

adam = adam_module.adam
"""The update of Adam as a function. The class `torch.optim.Adam` imports the compiler.

Tested with torch 2.6 and 2.15. If torch changes this, it will be impossible to train a network.
"""


def convert_tensors(module: nn.Module, convert: Callable[[Tensor], Tensor]) -> None:
    """Replace each parameter, gradient and buffer of a module by the result of a function.

    Tested with torch 2.6 and 2.15. If torch changes this, audits will be unable to move models to a
    device.
    """
    module._apply(convert)


# --- CUDA -----------------------------------------------------------------------------------------


def register_gpu_wait_callback(callback: Callable[..., None]) -> None:
    """Register a function to be called whenever a thread waits for a device, stream or event.

    A registered function cannot be removed.

    Tested with torch 2.11, on CUDA. If torch changes this, the guard will report copies that were
    waited for.
    """
    from torch.cuda import _gpu_trace

    torch._C._activate_gpu_trace()
    _gpu_trace.register_callback_for_device_synchronization(callback)
    _gpu_trace.register_callback_for_stream_synchronization(callback)
    _gpu_trace.register_callback_for_event_synchronization(callback)


def is_event_finished(event: torch.cuda.Event) -> bool:
    """Return whether all work before an event is finished, by the original `Event.query`.

    The guard replaces `Event.query` itself, so that method cannot be used here.

    Tested with torch 2.11, on CUDA. If torch changes this, the guard will keep finished copies.
    """
    return torch._C._CudaEventBase.query(event)


def clear_cublas_workspaces() -> None:
    """Release the memory that cuBLAS keeps for each stream.

    Tested with torch 2.11, on CUDA. If torch changes this, two CUDA graphs will overwrite each
    other's memory.
    """
    torch._C._cuda_clearCublasWorkspaces()


def compile_elementwise_kernel(code: str) -> Callable[..., Tensor]:
    """Compile a C++ function of one element to a kernel for tensors.

    Tested with torch 2.11, on CUDA. If torch changes this, Hessian products will fail on GPUs.
    """
    return torch.cuda.jiterator._create_jit_fn(code)
