"""Float64 references: a float64 copy of each storage that torch uses while a step runs.

Every operation of the step is repeated on these copies, with the same random numbers and along the
same branches of the program. So each value has a reference of its own, by construction: no second
program has to be run in float64, and nothing has to be paired. An operation that has no kernel for
float64, and no formula here, leaves its recorded result as the reference, which is then marked as
not exact; so is all that follows from it.

This is shadow-value analysis, as Fpdebug (Benz, Hildebrandt, Hack 2012, PLDI) and Herbgrind
(Sanchez-Stern et al. 2018, PLDI) do it for each floating-point instruction, done here for each
operation on tensors.
"""

from __future__ import annotations

import itertools
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

HALF_PRECISION_DTYPES = (torch.float16, torch.bfloat16)
MIN_GROWTH = 1 << 18  # bytes of new copies before freed storages are searched for
MAX_GROWTH = 1 / 32  # the same, relative to all copies
MIN_NEW_STORAGES = 64  # before freed storages are searched for, whatever their size
# Operations that return or write numbers of the program's own state, which the reference shares.
UNREPEATED_OPERATIONS = {"_amp_update_scale", "_cudnn_rnn_flatten_weight"}
_REAL_DTYPES = {
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
    torch.complex32: torch.float16,
}


class Memory:
    """A storage: its float64 copy, and its history.

    Attributes:
        serial: A number of its own; an address may be that of another storage later.
        numbers: The copy, flat; None for data that no operation has written to, and where there is
            none.
        resized_reference: The float64 result of an operation if it has another size, such as a
            kernel's notes.
        version: How often it has been written to.
        maker: The operation that wrote to it last; None for data.
        exact: Whether the copy was computed in float64 all the way.
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
        self.failures: dict[str, str] = {}  # operations without float64, and what torch said
        self.is_disabled = False
        self.new_bytes = 0  # bytes of copies since freed storages were last discarded
        self.next_bytes = MIN_GROWTH  # the number of new bytes at which they are discarded next
        self.next_count = MIN_NEW_STORAGES

    # --- storages ---------------------------------------------------------------------------------

    def memory(self, tensor: Tensor) -> Memory:
        """The record of a plain tensor's storage."""
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

        The more remain, the later this is done again.
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
        self.new_bytes = 0
        self.next_bytes = max(MIN_GROWTH, int(MAX_GROWTH * copied_bytes))

    def is_exact(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the references of all these were computed in float64 all the way."""
        return not self.is_disabled and all(self.memory(t).exact for t in tensors)

    def has_copy(self, tensor: Tensor) -> bool:
        """Whether a plain tensor's reference is a copy; else it is the recorded numbers."""
        memory = self.memory(tensor)
        return memory.numbers is not None or memory.resized_reference is not None

    def of(self, tensor: Tensor, for_writing: bool = False) -> Tensor:
        """The reference of a plain tensor: a view of its storage's copy.

        Whole numbers are referred to by a copy.

        Data have no copy until an operation writes to them. Their numbers are converted to float64
        at each call.

        Args:
            tensor: A tensor whose numbers lie in memory by its strides.
            for_writing: Whether what is written to the reference must stay. The storage then gets a
                copy.
        """
        memory = self.memory(tensor)
        real = _real_type(tensor.dtype)
        if memory.resized_reference is not None:
            return memory.resized_reference
        if self.is_disabled or tensor.device.type not in sketches.FLOAT64_DEVICES:
            return _widened(tensor)
        storage = tensor.untyped_storage()
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
            memory.exact = False  # the bits are looked at as another type
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
            tensor: What an operation returned.
            reference: What it returned in float64.
            exact: Whether that was computed in float64 all the way.
            is_second: Whether another result of the same call lies in the same storage.
            may_own: Whether nothing else uses the memory of the reference, so that it need not be
                copied.
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
        self, tensor: Tensor, exact: bool, is_repeated: bool, float32_draws: Tensor | None
    ) -> None:
        """Record that an operation wrote to a tensor.

        Args:
            tensor: What it wrote to.
            exact: Whether the references of what it read are exact.
            is_repeated: Whether it was repeated on the reference. If not, the recorded numbers are
                the reference.
            float32_draws: For random numbers in a short format, those that would have been drawn in
                float32.
        """
        memory = self.memory(tensor)
        if self.is_disabled:
            memory.exact = False
            return
        fills_storage = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
        memory.exact = exact if fills_storage else exact and memory.exact
        if not is_repeated:
            self.of(tensor, for_writing=True).copy_(
                tensor if float32_draws is None else float32_draws
            )

    def reread(self, tensor: Tensor) -> None:
        """Reset the reference of a storage that something other than torch wrote to."""
        memory = self.memory(tensor)
        memory.exact = memory.exact and memory.maker is None
        memory.version += 1
        memory.maker = None
        memory.numbers = None

    def record_copy(self, out: Tensor, source: Tensor) -> None:
        """Record that a new tensor is a copy of another one, in any format."""
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

    def inputs_of(
        self, args: Sequence[Nested], kwargs: dict[str, Nested], written: Sequence[Tensor] = ()
    ) -> Nested:
        """The arguments of a call as its reference takes them.

        Args:
            args: The positional arguments.
            kwargs: The named arguments.
            written: The plain tensors among them that the call writes to.
        """
        for tensor in written:
            self.of(tensor, for_writing=True)

        def substitute(value: Nested) -> Nested:
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
        """The arguments with the references of floats that the program read from tensors."""
        if isinstance(values, list | tuple):
            return type(values)([self._with_exact_numbers(value) for value in values])
        if isinstance(values, dict):
            return {key: self._with_exact_numbers(value) for key, value in values.items()}
        return self.read_numbers.get(values, values) if type(values) is float else values

    def compute(
        self,
        operation: OpOverload,
        name: str,
        inputs: Nested,
        out: Nested,
        is_random: bool,
    ) -> Nested | None:
        """Apply an operation to the references, in place where it writes; None if it fails.

        Args:
            operation: An overload of `torch.ops`.
            name: Its bare name.
            inputs: What `inputs_of` gave before the operation ran.
            out: What it returned.
            is_random: Whether it draws random numbers. Its reference shares them.
        """
        args, kwargs = inputs
        if self.is_disabled:
            return None
        if name in UNREPEATED_OPERATIONS:
            return ()
        try:
            if is_random:
                return _with_same_draws(operation, name, args, kwargs, out)
            if name == "_amp_foreach_non_finite_check_and_unscale":
                for gradient in args[0]:
                    gradient.mul_(args[2])
                return ()
            if name in FORMULAS:
                return FORMULAS[name](named_arguments(operation, args, kwargs))
            if name in ("_softmax", "_log_softmax"):
                # The last argument would request a conversion from float16 to float32.
                args = [*args[:2], False]
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
        except Exception as error:  # no kernel for float64, or a check of torch's own
            self.failures.setdefault(
                name, next(iter(str(error).splitlines()), type(error).__name__)
            )
            return None


def _with_same_draws(
    operation: OpOverload, name: str, args: Nested, kwargs: Nested, out: Nested
) -> Nested | None:
    """The reference of an operation that draws: its recorded draws, applied in float64."""
    named = named_arguments(operation, args, kwargs)
    if name == "native_dropout":
        mask = out[1]
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


# Operations that draw by numbers, and read nothing of the tensor that they are given but its shape.
FACTORY_DRAWS = {
    *("uniform", "normal", "random", "exponential", "geometric", "cauchy", "log_normal"),
    *("rand_like", "randn_like", "randint_like"),
}


def redraw_in_float32(
    operation: OpOverload, tensor: Tensor, args: Nested, kwargs: Nested, state: Tensor
) -> Tensor | None:
    """The float32 numbers that a short-format random operation draws from the same state.

    Weights of a model in bfloat16 are drawn as those in float32 are, and rounded. None where the
    draws are others.
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
    is_same_draw = has_same_state and difference <= 0.01 * float(float32_draws.abs().max())
    return float32_draws if is_same_draw else None


def _span(tensor: Tensor) -> Tensor:
    """The real numbers of a storage from the first of a tensor's to its last."""
    real = _real_type(tensor.dtype)
    parts = tensor.dtype.itemsize // real.itemsize
    length = 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    flat = torch.empty(0, dtype=real, device=tensor.device).set_(tensor.untyped_storage())
    return flat.narrow(0, tensor.storage_offset() * parts, length * parts if tensor.numel() else 0)


def _converted(numbers: Tensor) -> Tensor:
    """A copy, of floating-point numbers in float64."""
    return numbers.to(torch.float64 if numbers.is_floating_point() else numbers.dtype, copy=True)


def _with_layout_of(tensor: Tensor, numbers: Tensor, offset: int) -> Tensor:
    """A view of a flat real tensor with the shape, strides and lazy signs of another one."""
    flat = torch.view_as_complex(numbers.view(-1, 2)) if tensor.is_complex() else numbers
    view = flat.as_strided(tensor.shape, tensor.stride(), offset)
    view = view.conj() if tensor.is_conj() else view
    return negative_view(view) if tensor.is_neg() else view


def _has_layout(reference: Tensor, tensor: Tensor, count: int) -> bool:
    """Whether a real reference has the memory layout of a tensor with such a storage size."""
    same_offset = int(reference.storage_offset()) == int(tensor.storage_offset())
    same_places = same_offset and reference.stride() == tensor.stride()
    same_size = reference.untyped_storage().nbytes() == count * reference.dtype.itemsize
    return same_places and same_size and not (reference.is_neg() or tensor.is_neg())


def _real_type(dtype: torch.dtype) -> torch.dtype:
    return _REAL_DTYPES.get(dtype, dtype)


def _widened(tensor: Tensor) -> Tensor:
    """The recorded numbers in float64; whole numbers as they are."""
    tensor = tensor.detach()
    if (
        not sketches.is_float_or_complex(tensor)
        or tensor.device.type not in sketches.FLOAT64_DEVICES
    ):
        return tensor.clone()
    return tensor.to(torch.complex128) if tensor.is_complex() else tensor.double()
