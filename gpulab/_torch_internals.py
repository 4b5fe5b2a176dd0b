"""All contact with torch's private API."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._dynamo import eval_frame
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

Span = tuple[int, int]  # the first address of a piece of memory and the one after its last


def is_plain(tensor: Any) -> bool:
    """Whether something is a tensor and memory, no more: of no subclass, sparse, nested, meta, or in a transform."""
    if type(tensor) not in (Tensor, torch.nn.Parameter) or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False
    return tensor.layout == torch.strided and tensor.device.type != "meta" and not tensor.is_nested


def span_of(tensor: Any) -> Span:
    """The memory from the first to the last element of a tensor that is plain; else none, which nothing overlaps."""
    if not is_plain(tensor) or tensor.numel() == 0:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


Function = TypeVar("Function", bound=Callable[..., Any])


def uncompiled(function: Function) -> Function:
    """Keep TorchDynamo from compiling a function and what that calls, and from tracing into it.

    `torch.compiler.disable` does the same, and imports the compiler, which takes seconds and 150 MB. An older torch
    (2.6) has nothing else, and compiles the function where a compiled one calls `backward`.
    """
    if action := getattr(eval_frame, "_FrameAction", None):
        eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(action.SKIP, action.SKIP))
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


SPARSE: dict[torch.layout, tuple[str, ...]] = {  # the methods that give a layout's parts
    torch.sparse_coo: ("_indices", "_values"),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), ("crow_indices", "col_indices", "values")),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), ("ccol_indices", "row_indices", "values")),
}


def component_tensors(tensor: Tensor) -> list[Tensor]:
    """The ordinary tensors that a tensor consists of; none if its content cannot be seen."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor) or tensor.device.type == "meta":
        return []
    if tensor.device.type == "cuda" and torch.cuda.is_current_stream_capturing():  # when nobody may wait for it
        return []
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return [component for name in names for component in component_tensors(getattr(tensor, name))]
    if type(tensor) is not Tensor:
        tensor = tensor.as_subclass(Tensor)
        if torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Python):  # a FakeTensor and its like
            return []
    if methods := SPARSE.get(tensor.layout):
        return [getattr(tensor, method)() for method in methods]
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
        return []
    if tensor.is_conj():  # a flag, with the memory as it was; taking it off copies nothing
        tensor = tensor.conj()
    return [torch._neg_view(tensor) if tensor.is_neg() else tensor]


class UncompiledDispatchMode(TorchDispatchMode):
    """A dispatch mode that torch's compiler leaves alone, with all that it calls, where a compiled model is at work.

    torch wraps the method of every other mode to that end; the wrapper imports the compiler, which takes 120 MB. An
    older torch (2.6) wraps nothing, and compiles nothing where such a mode is entered.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.__torch_dispatch__ = inspect.unwrap(cls.__torch_dispatch__)  # type: ignore[method-assign]
        if hasattr(eval_frame, "_FrameAction"):
            skip = eval_frame._FrameAction.SKIP
            strategy = eval_frame._FrameExecStrategy(skip, skip)  # of the method, and of what it calls
            eval_frame.set_code_exec_strategy(cls.__torch_dispatch__.__code__, strategy)


@functools.cache
def is_composite(operation: Any) -> bool:
    """Whether an operation consists of others, which a mode sees instead of it except in inference mode.

    One that also has a kernel of a device, as the backward pass of SiLU has, is an operation of its own.
    """
    keys = ("CompositeImplicitAutograd", "CPU", "CUDA", "MPS")
    composite, *own = (torch._C._dispatch_has_kernel_for_dispatch_key(operation.name(), key) for key in keys)
    return composite and not any(own)


def graph_nodes(result: Tensor) -> Iterator[Any]:
    """The nodes of autograd's graph of a result."""
    waiting: list[Any] = [result.grad_fn]
    met: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in met:
            met.add(node)
            waiting += [following for following, _ in node.next_functions]
            yield node
