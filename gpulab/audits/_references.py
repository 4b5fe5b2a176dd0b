"""Float64 references: a float64 copy of each storage that torch uses while a step runs.

Every operation of the step is repeated on these copies, with the same random numbers and along the
same branches of the program, so each value has its own reference. No second program has to run in
float64, and no values have to be paired. If an operation has neither a kernel for float64 nor a
formula in `_formulas`, its recorded result becomes the reference. This reference is marked as not
exact, and so are all references that are computed from it.

This is shadow-value analysis. Fpdebug (Benz, Hildebrandt, Hack 2012, PLDI) and Herbgrind
(Sanchez-Stern et al. 2018, PLDI) apply it to each floating-point instruction. Here it is applied to
each operation on tensors.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from gpulab._torch_internals import (
    Nested,
    OpOverload,
    StorageWeakRef,
    argument_names,
    find_tensors,
    map_nested,
    named_arguments,
    negative_view,
    storage_identity,
)
from gpulab.audits import _count_sketch as sketches
from gpulab.audits._formulas import FORMULAS
from gpulab.audits._traces import Operation
from gpulab.guards._reentrancy import without_dispatch_modes

HALF_PRECISION_DTYPES = (torch.float16, torch.bfloat16)
# Freed storages are searched for when the new copies reach the larger of these two sizes: a number
# of bytes, and a share of all copies.
MIN_GROWTH = 1 << 20
MAX_GROWTH = 1 / 16
RETURN_INTERVAL = 1 << 27  # bytes of new copies after which freed memory is returned
MIN_NEW_STORAGES = 64  # new storages, of any size, before freed ones are searched for
# Operations on the program's own state, such as the scale of a gradient scaler. Their recorded
# results are also the reference.
UNREPEATED_OPERATIONS = {"_amp_update_scale", "_cudnn_rnn_flatten_weight"}
_REAL_DTYPES = {
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
    torch.complex32: torch.float16,
}


def return_freed_memory() -> None:
    """Return freed memory to the operating system, if the C library is glibc.

    glibc keeps freed memory for later use. Blocks of many sizes leave gaps that later blocks do not
    fit into, so a recording would need about twice the memory of the tensors that exist.
    """
    if sys.platform == "linux":  # elsewhere `CDLL(None)` may raise other errors
        with contextlib.suppress(OSError, AttributeError):  # a Linux without glibc
            ctypes.CDLL(None).malloc_trim(0)


class Memory:
    """A storage: its float64 copy, and its history.

    Attributes:
        serial: A unique number. An address is not unique, because it may be reused later.
        numbers: The float64 copy as a flat tensor; None if there is no copy, as for data that no
            operation has written to.
        resized_reference: The float64 result of an operation if its shape differs from that of the
            recorded result, as auxiliary outputs of kernels may.
        version: The number of writes to the storage.
        maker: The operation that wrote to the storage last; None for data.
        exact: Whether the copy was computed entirely in float64.
    """

    def __init__(self, storage: torch.UntypedStorage, serial: int) -> None:
        self.weak_reference = StorageWeakRef(storage)
        self.serial = serial
        self.numbers: Tensor | None = None
        self.resized_reference: Tensor | None = None
        self.version = 0
        self.exact = True
        self.maker: Operation | None = None


class References:
    """The float64 copies of all storages of one execution of a step."""

    def __init__(self) -> None:
        self.memories: dict[int, Memory] = {}
        self.serials = itertools.count(1)
        # Floats that the program read from tensors, and their references.
        self.read_numbers: dict[float, float] = {}
        self.failures: dict[str, str] = {}  # torch's error by operation, if float64 failed
        self.is_disabled = False
        self.new_bytes = 0  # bytes of copies since freed storages were last discarded
        self.kept_bytes = 0  # bytes of copies since freed memory was last returned
        self.next_bytes = MIN_GROWTH  # the number of new bytes at which they are discarded next
        self.next_count = MIN_NEW_STORAGES

    # --- storages ---------------------------------------------------------------------------------

    def memory(self, tensor: Tensor) -> Memory:
        """Return the record of a strided tensor's storage; create it for a new storage."""
        storage = tensor.untyped_storage()
        key = storage_identity(storage)
        memory = self.memories.get(key)
        if memory is None or memory.weak_reference.expired():
            if len(self.memories) >= self.next_count or self.new_bytes >= self.next_bytes:
                self._discard_freed()
            memory = Memory(storage, next(self.serials))
            self.memories[key] = memory
        return memory

    def _discard_freed(self) -> None:
        """Discard freed storages and their copies.

        The limits for the next search grow with the number and size of the remaining storages.
        """
        self.memories = {
            key: memory
            for key, memory in self.memories.items()
            if not memory.weak_reference.expired()
        }
        copied_bytes = sum(
            memory.numbers.nbytes for memory in self.memories.values() if memory.numbers is not None
        )
        self.next_count = MIN_NEW_STORAGES + 2 * len(self.memories)
        self.kept_bytes += self.new_bytes
        if self.kept_bytes > RETURN_INTERVAL:
            return_freed_memory()
            self.kept_bytes = 0
        self.new_bytes = 0
        self.next_bytes = max(MIN_GROWTH, int(MAX_GROWTH * copied_bytes))

    def is_exact(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether the references of all tensors were computed entirely in float64."""
        return not self.is_disabled and all(self.memory(t).exact for t in tensors)

    def has_copy(self, tensor: Tensor) -> bool:
        """Return whether a strided tensor has a float64 copy; if not, it is its own reference."""
        memory = self.memory(tensor)
        return memory.numbers is not None or memory.resized_reference is not None

    def of(self, tensor: Tensor, for_writing: bool = False) -> Tensor:
        """Return the reference of a tensor: a view of the float64 copy of its storage.

        Data have no copy until an operation writes to them. Until then, their numbers are converted
        to float64 at each call. Integers are copied without conversion.

        Args:
            tensor: A strided tensor.
            for_writing: Whether the caller writes to the reference. The storage then gets a copy,
                so that the written numbers are kept.
        """
        memory = self.memory(tensor)
        real = _real_type(tensor.dtype)
        if memory.resized_reference is not None:
            return memory.resized_reference
        if self.is_disabled or tensor.device.type not in sketches.FLOAT64_DEVICES:
            return _widened(tensor)
        storage = tensor.untyped_storage()
        # The storage may have been resized since the copy was made.
        is_outdated = (
            memory.numbers is not None
            and memory.numbers.numel() * real.itemsize != storage.nbytes()
        )
        if is_outdated or (memory.numbers is None and for_writing):
            memory.numbers = _converted(
                torch.empty(0, dtype=real, device=tensor.device).set_(storage)
            )
            self.new_bytes += memory.numbers.nbytes
        if memory.numbers is None:
            return _with_layout_of(tensor, _converted(_span(tensor)), 0)
        if memory.numbers.dtype != (torch.float64 if real.is_floating_point else real):
            # The tensor views the bits as another type, for which the copy has no numbers.
            memory.exact = False
            return _widened(tensor)
        return _with_layout_of(tensor, memory.numbers, int(tensor.storage_offset()))

    def store(
        self,
        tensor: Tensor,
        reference: Tensor,
        exact: bool,
        is_second: bool = False,
        may_own: bool = False,
    ) -> None:
        """Store a reference for a new tensor.

        Args:
            tensor: A result of an operation.
            reference: The result of the operation in float64.
            exact: Whether the reference was computed entirely in float64.
            is_second: Whether another result of the same call has the same storage.
            may_own: Whether nothing else uses the memory of the reference, so that no copy is
                needed.
        """
        memory = self.memory(tensor)
        real = _real_type(tensor.dtype)
        memory.exact = exact and (memory.exact or not is_second)
        if is_second and memory.numbers is not None and reference.shape == tensor.shape:
            self.of(tensor).copy_(reference)
            return
        if (
            tensor.device.type not in sketches.FLOAT64_DEVICES
            or self.is_disabled
            or not tensor.numel()
        ):
            return
        if reference.shape != tensor.shape:
            memory.resized_reference = reference
            self.new_bytes += reference.nbytes
            return
        if 0 in tensor.stride():
            # Several elements share memory; the numbers are read from the tensor when needed.
            memory.numbers = None
            return
        dtype = torch.float64 if real.is_floating_point else real
        count = tensor.untyped_storage().nbytes() // real.itemsize
        self.new_bytes += count * dtype.itemsize
        if may_own and reference.dtype == dtype and _has_layout(reference, tensor, count):
            memory.numbers = reference.as_strided((count,), (1,), 0)
            return
        memory.numbers = torch.zeros(count, dtype=dtype, device=tensor.device)
        self.of(tensor).copy_(reference)

    def record_write(
        self,
        tensor: Tensor,
        *,
        exact: bool,
        is_repeated: bool,
        float32_draws: Tensor | None = None,
    ) -> None:
        """Record that an operation wrote to a tensor.

        After `disable`, there are no references to update, and no write counts as exact.

        Args:
            tensor: The tensor that was written to.
            exact: Whether the references of all inputs are exact.
            is_repeated: Whether the operation was repeated on the reference. If not, the recorded
                numbers become the reference.
            float32_draws: For random numbers in a short format, the numbers that would have been
                drawn in float32. They become the reference instead of the recorded numbers. None
                for all other writes.
        """
        memory = self.memory(tensor)
        if self.is_disabled:
            memory.exact = False
            return
        # A write to a part of the storage leaves the rest as exact or inexact as it was.
        fills_storage = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
        memory.exact = exact if fills_storage else exact and memory.exact
        if not is_repeated:
            self.of(tensor, for_writing=True).copy_(
                tensor if float32_draws is None else float32_draws
            )

    def reread(self, tensor: Tensor) -> None:
        """Discard the reference of a storage that was written to from outside torch.

        The new numbers are data. They count as exact only if the previous ones were exact data.
        """
        memory = self.memory(tensor)
        memory.exact = memory.exact and memory.maker is None
        memory.version += 1
        memory.maker = None
        memory.numbers = None

    def record_copy(self, out: Tensor, source: Tensor) -> None:
        """Store the reference of a new tensor that is a copy of another one, in any format.

        Nothing is stored if the two share memory, or if the copy is its own reference.
        """
        if sketches.is_strided(out) and sketches.is_strided(source) and out is not source:
            same_storage = storage_identity(out.untyped_storage()) == storage_identity(
                source.untyped_storage()
            )
            same_numbers = out.dtype == source.dtype and not self.has_copy(source)
            if not same_storage and not same_numbers and out.shape == source.shape:
                self.store(out, self.of(source), self.memory(source).exact)

    def disable(self) -> None:
        """Continue without references, because memory ran out."""
        self.memories.clear()
        self.is_disabled = True
        self.failures["all operations"] = "there was not enough memory for float64 copies"

    # --- operations -------------------------------------------------------------------------------

    @without_dispatch_modes
    def inputs_of(
        self, args: Sequence[Nested], kwargs: dict[str, Nested], written: Sequence[Tensor] = ()
    ) -> Nested:
        """Return the arguments of a call with references instead of tensors.

        Floating-point types among the arguments become float64, and numbers that the program read
        from tensors are replaced by their exact values.

        Args:
            args: The positional arguments.
            kwargs: The named arguments.
            written: The strided tensors among the arguments that the call writes to.
        """
        for tensor in written:
            self.of(tensor, for_writing=True)

        def substitute(value: Nested) -> Nested:
            """Return the reference of a tensor, or the float64 type in place of a shorter one."""
            if isinstance(value, Tensor):
                return self.of(value) if sketches.is_strided(value) else _widened(value)
            if isinstance(value, torch.dtype):
                if value.is_complex:
                    return torch.complex128
                return torch.float64 if value.is_floating_point else value
            return value

        inputs = map_nested(substitute, (list(args), dict(kwargs)))
        return self._with_exact_numbers(inputs) if self.read_numbers else inputs

    def _with_exact_numbers(self, values: Nested) -> Nested:
        """Replace floats that the program read from tensors by their exact values."""
        if isinstance(values, list | tuple):
            return type(values)([self._with_exact_numbers(value) for value in values])
        if isinstance(values, dict):
            return {key: self._with_exact_numbers(value) for key, value in values.items()}
        return self.read_numbers.get(values, values) if type(values) is float else values

    @without_dispatch_modes
    def compute(
        self,
        operation: OpOverload,
        name: str,
        inputs: Nested,
        out: Nested,
        is_random: bool,
    ) -> Nested | None:
        """Apply an operation to the references, which it may overwrite.

        Args:
            operation: An overload of `torch.ops`.
            name: The name of the operation without namespace and overload.
            inputs: The result of `inputs_of` before the operation ran.
            out: The recorded result of the operation.
            is_random: Whether the operation draws random numbers. The reference then uses the
                recorded ones.

        Returns:
            The result in float64; an empty tuple if there is no result; None if float64 failed.
        """
        args, kwargs = inputs
        if self.is_disabled:
            return None
        if name in UNREPEATED_OPERATIONS:
            return ()
        try:
            if is_random:
                return _with_same_draws(operation, name, args, kwargs, out)
            # torch accepts the factor only in float32, and the factor of the reference is in
            # float64. So the gradients are multiplied here instead.
            if name == "_amp_foreach_non_finite_check_and_unscale":
                gradients = args[0]
                inverse_scale = args[2]
                for gradient in gradients:
                    gradient.mul_(inverse_scale)
                return ()
            if name in FORMULAS:
                return FORMULAS[name](named_arguments(operation, args, kwargs))
            if name in ("_softmax", "_log_softmax"):
                # The last argument would request a conversion from float16 to float32.
                args = [*args[:2], False]
            # An operation without tensor arguments, such as `rand` or `ones`, would otherwise
            # return torch's default type.
            makes_reals = any(sketches.is_float_or_complex(t) for t in find_tensors(out))
            if (
                "dtype" in argument_names(operation)
                and makes_reals
                and not find_tensors((args, kwargs))
            ):
                kwargs = kwargs | {"dtype": torch.float64}
            outputs = operation(*args, **kwargs)
            return () if outputs is None else outputs  # operations on lists return nothing
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # there is no kernel for float64, or torch refuses the arguments
            self.failures.setdefault(
                name, next(iter(str(error).splitlines()), type(error).__name__)
            )
            return None


def _with_same_draws(
    operation: OpOverload, name: str, args: Nested, kwargs: Nested, out: Nested
) -> Nested | None:
    """Compute the reference of a random operation from the numbers that it has drawn.

    Returns:
        The reference; None if the draws cannot be separated from the rest of the operation.
    """
    named = named_arguments(operation, args, kwargs)
    if name == "native_dropout":
        _, mask = out
        probability = named["p"]
        scale = 1.0
        if named["train"] is not False:
            scale = 1 / (1 - probability) if probability < 1 else 0.0
        return named["input"] * mask * scale, mask
    reals = [t for t in find_tensors((args, kwargs)) if sketches.is_float_or_complex(t)]
    drawn = [t for t in find_tensors(out) if sketches.is_float_or_complex(t)]
    if drawn and reals and name not in ("bernoulli", *FACTORY_DRAWS):
        return None

    def widen(value: Nested) -> Nested:
        return _widened(value) if isinstance(value, Tensor) else value

    return map_nested(widen, out)


# Random operations that use only the shape of the tensor that they receive, and not its numbers.
FACTORY_DRAWS = {
    *("uniform", "normal", "random", "exponential", "geometric", "cauchy", "log_normal"),
    *("rand_like", "randn_like", "randint_like"),
}


def redraw_in_float32(
    operation: OpOverload, tensor: Tensor, args: Nested, kwargs: Nested, state: Tensor
) -> Tensor | None:
    """Repeat a random operation in a short format with the same generator state in float32.

    On a CPU, torch draws numbers of some distributions in float32 and then rounds them to the short
    format, for example for `exponential_`, `cauchy_` and `log_normal_`. For others, such as
    `uniform_`, it draws numbers in a different way.

    Returns:
        The float32 numbers. None on other devices, or if the numbers in the short format are not
        the rounded float32 numbers.
    """
    if tensor.device.type != "cpu":
        return None
    final_state = torch.get_rng_state()
    torch.set_rng_state(state)
    float32_draws = torch.empty_like(tensor, dtype=torch.float32)
    operation(float32_draws, *args[1:], **kwargs)
    has_same_state = torch.equal(torch.get_rng_state(), final_state)
    torch.set_rng_state(final_state)
    difference = float((float32_draws - tensor.float()).abs().max()) if tensor.numel() else 0.0
    # Rounding to bfloat16 changes a number by at most 2^-8 of its size, or 0.4 %, and rounding to
    # float16 by less. The difference of independent draws is much larger than 1 % of the largest
    # number.
    is_same_draw = has_same_state and difference <= 0.01 * float(float32_draws.abs().max())
    return float32_draws if is_same_draw else None


def _span(tensor: Tensor) -> Tensor:
    """Return the memory from the first to the last element of a tensor, as a flat real tensor."""
    real = _real_type(tensor.dtype)
    # A complex number has two parts.
    parts = tensor.dtype.itemsize // real.itemsize
    length = 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    flat = torch.empty(0, dtype=real, device=tensor.device).set_(tensor.untyped_storage())
    return flat.narrow(0, tensor.storage_offset() * parts, length * parts if tensor.numel() else 0)


def _converted(numbers: Tensor) -> Tensor:
    """Copy a real tensor; convert floating-point numbers to float64."""
    return numbers.to(torch.float64 if numbers.is_floating_point() else numbers.dtype, copy=True)


def _with_layout_of(tensor: Tensor, numbers: Tensor, offset: int) -> Tensor:
    """View a flat real tensor with the type, shape, strides and lazy signs of another tensor."""
    flat = torch.view_as_complex(numbers.view(-1, 2)) if tensor.is_complex() else numbers
    view = flat.as_strided(tensor.shape, tensor.stride(), offset)
    view = view.conj() if tensor.is_conj() else view
    return negative_view(view) if tensor.is_neg() else view


def _has_layout(reference: Tensor, tensor: Tensor, count: int) -> bool:
    """Return whether a real reference has the memory layout of a tensor.

    `count` is the number of real numbers in the tensor's storage.
    """
    same_offset = int(reference.storage_offset()) == int(tensor.storage_offset())
    same_places = same_offset and reference.stride() == tensor.stride()
    same_size = reference.untyped_storage().nbytes() == count * reference.dtype.itemsize
    return same_places and same_size and not (reference.is_neg() or tensor.is_neg())


def _real_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type of the parts of a complex type, or any other type unchanged."""
    return _REAL_DTYPES.get(dtype, dtype)


def _widened(tensor: Tensor) -> Tensor:
    """Convert recorded numbers to float64; clone integers, and all numbers without float64."""
    tensor = tensor.detach()
    if (
        not sketches.is_float_or_complex(tensor)
        or tensor.device.type not in sketches.FLOAT64_DEVICES
    ):
        return tensor.clone()
    return tensor.to(torch.complex128) if tensor.is_complex() else tensor.double()
