"""Trace one execution of a training step below autograd: every operation and its results.

The results of a step are its loss, gradients and updates. The states of modules, optimizers and
leaves are restored afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks

from gpulab._torch_internals import (
    Nested,
    OpOverload,
    UncompiledDispatchMode,
    base_of,
    call_composite_kernel,
    component_tensors,
    decomposition_of,
    find_tensors,
    has_wrapper_subclass,
    is_composite,
    is_view,
    map_nested,
    name_as_written,
    named_arguments,
    named_leaves,
    only_allocates,
    operation_name,
    overwrites_first_argument,
    register_optimizer_step_pre_hook,
    request_work_handle,
    result_names,
    returned_or_written,
    storage_identity,
    written_tensors,
)
from gpulab.audits import _count_sketch as sketches
from gpulab.audits._collectives import (
    RANKS,
    Collective,
    check_module,
    find_collective,
    run_collective,
)
from gpulab.audits._float64_calls import DEFINITIONS, writes_to_arguments
from gpulab.audits._references import (
    HALF_PRECISION_DTYPES,
    UNREPEATED_OPERATIONS,
    References,
    redraw_in_float32,
)
from gpulab.audits._rounding import forward_error
from gpulab.audits._traces import HASH_MARK, RESULT, Operation, as_json
from gpulab.audits._values import Slabs, Value
from gpulab.guards._call_sites import OperationCallers
from gpulab.guards._fingerprints import content_digest
from gpulab.guards._reentrancy import as_guard_work, is_guard_running, without_dispatch_modes
from gpulab.numerics._emulation import COMPOSED_OPERATIONS
from gpulab.steps import Snapshot

IGNORED_OPERATIONS = {"detach", "alias", "set", "lift_fresh"}  # these operations compute nothing
# Outputs that a kernel returns in addition to its results, by their names in torch's schemas. They
# prepare the backward pass. Without dropout, or in unused parts, their memory may be uninitialised,
# so they cannot be compared.
AUXILIARY_OUTPUTS = {"philox_seed", "philox_offset", "rng_state", "unused", "debug_attn_mask"}
# cuDNN's recurrent layers return a copy of the weights and their internal state.
AUXILIARY_OUTPUTS |= {
    "weight_buf",
    "reserve",
    "dropout_state",
}
AUXILIARY_OUTPUTS |= {"logsumexp", "log_sumexp", "log_alpha"}  # these are only partly written
# These kernels overwrite an input although their schema does not declare it: the state that the
# forward pass saved can be used only once.
UNDECLARED_WRITERS = {"_cudnn_rnn_backward", "miopen_rnn_backward"}
MAX_TRACKED_UPDATE_SIZE = 1 << 28  # lost updates are not counted in leaves with more numbers
MAX_SIMPLE_NUMBER_DIGITS = 5  # a number with at most this many digits may be a constant
COPY_OPERATIONS = {"_to_copy", "clone", "copy"}
# Options of optimizers that change how an update is executed, and not what it computes.
EXECUTION_OPTIONS = {"capturable", "differentiable", "foreach", "fused"}
MAX_STATE_LETTERS = 80  # longer texts among states are shortened


class Call:
    """The call of an operation.

    Attributes:
        operation: An overload of `torch.ops`.
        name: The name of the operation without its namespace and overload.
        args: The positional arguments.
        kwargs: The named arguments.
        named_args: All arguments by name.
        arguments: All arguments by name, converted to JSON.
        input_tensors: The tensors among the arguments.
        mutated_tensors: The tensors that the operation writes to.
        bases: The base tensors of those `mutated_tensors` that are views.
        is_mutating: Whether the operation writes to any of its arguments.
        is_random: Whether the operation draws random numbers.
        overwritten_argument: The argument that is overwritten without being read, if there is one.
        read_arguments: The arguments that the operation reads.
    """

    def __init__(
        self, operation: OpOverload, name: str, args: Sequence[Nested], kwargs: dict[str, Nested]
    ) -> None:
        self.operation = operation
        self.name = name
        self.args = args
        self.kwargs = kwargs
        self.named_args = named_arguments(operation, args, kwargs)
        self.arguments = {key: as_json(value) for key, value in self.named_args.items()}
        self.input_tensors = find_tensors((args, kwargs))
        self.mutated_tensors = [
            t
            for t in written_tensors(operation, args, kwargs)
            if sketches.is_strided(t) and t.numel()
        ]
        bases = map(base_of, self.mutated_tensors)
        self.bases = [
            base
            for base in bases
            if base is not None and base.numel() and sketches.is_strided(base)
        ]
        self.is_mutating = writes_to_arguments(operation) or name in UNDECLARED_WRITERS
        self.is_random = _is_random(operation, self.arguments)
        overwrites_argument = writes_to_arguments(operation) and (
            self.is_random or overwrites_first_argument(name)
        )
        self.overwritten_argument = args[0] if overwrites_argument else None
        self.read_arguments = [
            v
            for key, v in self.named_args.items()
            if key not in AUXILIARY_OUTPUTS and v is not self.overwritten_argument
        ]

    def copied_arguments(self) -> Nested:
        """Copy the arguments, so that they remain available after a call that changes them."""
        return map_nested(_copy_tensor, (self.args, self.kwargs))


class Tracer(UncompiledDispatchMode):
    """Record every operation below autograd, forward and backward, and the step's results.

    Args:
        on_operation: The function to call after each operation.
        is_measuring: Whether each value gets a float64 reference, and each operation is repeated to
            measure its error.
        slabs: The memory for sketches. An earlier execution of the same step may share its own, so
            that tensors with equal content are sketched once.

    Attributes:
        operations: The recorded operations in the order of their execution.
        values: The contents of tensors, by the names that operations use for them.
        is_outside_step: Whether the step has not begun, or has ended. Operations are not recorded
            then, such as those that move a model and its batch to a setting. Copies inherit the
            references of their sources.
    """

    def __init__(
        self,
        on_operation: Callable[[], object],
        is_measuring: bool = False,
        slabs: Slabs | None = None,
    ) -> None:
        super().__init__()
        self.on_operation = on_operation
        self.is_measuring = is_measuring
        self.is_outside_step = False
        self.references = References()
        self.slabs = slabs or Slabs()
        self.results = StepResults(self)
        self.operations: list[Operation] = []
        self.values: dict[str, Value] = {}
        self.names: dict[tuple[Nested, ...], str] = {}
        self.digests: dict[str, int] = {}  # of the content, by name
        # Contiguous values are identified by their memory alone, so that reshaped views are
        # recognised.
        self.flat_values: dict[tuple[Nested, ...], tuple[int, Value]] = {}
        self.numbers_read: dict[float, str] = {}
        self.callers = OperationCallers()

    def __torch_dispatch__(
        self,
        operation: OpOverload,
        types: Sequence[type],
        args: Sequence[Nested] = (),
        kwargs: dict[str, Nested] | None = None,
    ) -> Nested:
        """Run an operation and record it, unless it is ignored or split into smaller ones."""
        kwargs = kwargs or {}
        name = operation_name(operation)
        if operation.namespace == "c10d":
            args, kwargs = request_work_handle(operation, args, kwargs)
        if name in IGNORED_OPERATIONS or is_guard_running():
            return operation(*args, **kwargs)
        if self.is_outside_step:
            return self._run_outside_step(operation, name, args, kwargs)
        # Forward-mode differentiation makes zero tensors without memory. Values need memory.
        if name == "_efficientzerotensor":
            return torch.zeros(*args, **kwargs)
        if only_allocates(name):
            out = operation(*args, **kwargs)
            # The memory is uninitialised. Zeros make the recorded content reproducible.
            if type(out) is Tensor and sketches.is_strided(out):
                out.zero_()
            return out
        if has_wrapper_subclass(types):
            self.results.find_leaves(args)
            # The subclass then calls operations on its parts, which are traced instead. Nested
            # tensors are an example.
            return NotImplemented
        # This operation has no kernel. Its decomposition, a product and a root, is traced instead.
        if name == "_euclidean_dist":
            with self:
                return decomposition_of(operation)(*args)
        # These have no kernel either. The operations that they call are traced.
        if name in COMPOSED_OPERATIONS:
            with self:
                return call_composite_kernel(operation, args, kwargs, is_explicit=True)
        if is_composite(operation):
            with self:
                return operation.decompose(*args, **kwargs)
        collective = find_collective(operation, args)
        if collective is not None:
            return self._record_collective(Call(operation, name, args, kwargs), collective)
        return self._record_call(operation, name, args, kwargs)

    def _run_outside_step(
        self, operation: OpOverload, name: str, args: Sequence[Nested], kwargs: dict[str, Nested]
    ) -> Nested:
        """Run an operation without recording it; a copy inherits the reference of its source."""
        out = operation(*args, **kwargs)
        if self.is_measuring and name in COPY_OPERATIONS and isinstance(out, Tensor):
            source = args[1] if name == "copy" else args[0]
            self._try_with_references(
                partial(as_guard_work(self.references.record_copy), out, source)
            )
        return out

    @as_guard_work
    def _record_call(
        self, operation: OpOverload, name: str, args: Sequence[Nested], kwargs: dict[str, Nested]
    ) -> Nested:
        """Run an operation, repeat it on the references, and record both."""
        call = Call(operation, name, args, kwargs)
        # The repetition that measures the error needs the arguments as they were before the call.
        initial_arguments = (
            self._retry_without_references(call.copied_arguments)
            if call.is_mutating and self.is_measuring
            else (args, kwargs)
        )
        op = self._start_record(call)
        follows = self.is_measuring and not operation.is_view
        exact = follows and all(map(self._is_exact, find_tensors(call.read_arguments)))
        inputs = (
            self._try_with_references(
                lambda: self.references.inputs_of(args, kwargs, call.mutated_tensors)
            )
            if follows
            else None
        )
        # Random numbers in a short format are drawn again in float32 from the same generator state.
        draws_short = call.is_random and any(
            t.dtype in HALF_PRECISION_DTYPES for t in call.mutated_tensors
        )
        state = torch.get_rng_state() if draws_short else None

        finish_copies = self._follow_copies(call) if follows else None
        out = self._retry_without_references(lambda: operation(*args, **kwargs))
        if self.references.is_disabled:
            inputs = None  # otherwise they would keep the memory of the references occupied
        for t in call.mutated_tensors:
            memory = self.references.memory(t)
            memory.version += 1
            memory.maker = op
        reference_out = None
        if inputs is not None:
            compute_reference = partial(
                self.references.compute, operation, name, inputs, out, is_random=call.is_random
            )
            reference_out = self._try_with_references(compute_reference)
        if follows:
            self._update_written_references(
                self.references, call, reference_out, exact=exact, state=state
            )
            self._store_new_references(
                self.references, call, out, reference_out, exact=exact, inputs=inputs
            )
        self._note_maker(call, op, out, follows=follows)
        if name == "_local_scalar_dense" and isinstance(out, float) and op.inputs:
            self._record_number_read(out, op.inputs[0])
        self._finish_record(call, op, out, initial_arguments)
        if finish_copies is not None:
            finish_copies(op, out, initial_arguments)
        return out

    @as_guard_work
    def _record_collective(self, call: Call, collective: Collective) -> Nested:
        """Run a collective and wait for it, do the same with the references, and record both.

        All ranks must record it, because they exchange their references as well.
        """
        if not collective.sent:
            return call.operation(*call.args, **call.kwargs)
        call.mutated_tensors = collective.received
        call.read_arguments = collective.sent
        op = self._start_record(call)
        op.arguments = {
            **{key: value for key, value in op.arguments.items() if value is not None},
            RANKS: collective.ranks,
        }
        exact = self.is_measuring and all(map(self._is_exact, collective.sent))
        inputs = None
        if self.is_measuring:
            inputs = self.references.inputs_of(call.args, call.kwargs, collective.received)
        out = run_collective(call.operation, call.args, call.kwargs)
        if inputs is not None:
            run_collective(call.operation, *inputs)
        for t in collective.received:
            memory = self.references.memory(t)
            memory.version += 1
            memory.maker = op
            if self.is_measuring:
                self.references.record_write(t, exact=exact, is_repeated=True)
        results = sketches.nonempty_components(collective.received)
        op.shape = list(results[0].shape)
        op.dtype = str(results[0].dtype).removeprefix("torch.")
        op.outputs = [self.value_of(t, op) for t in results]
        self.operations.append(op)
        self.on_operation()
        return out

    def _follow_copies(self, call: Call) -> Callable[..., None] | None:  # noqa: ARG002
        """Prepare to repeat an operation on the additional copies that a subclass may have.

        Returns:
            A function to be called after the operation has run, with the record of the operation,
            its results, and its arguments before the call; None without additional copies.
        """
        return None

    def _start_record(self, call: Call) -> Operation:
        """Create the record of an operation that is about to run: its caller and its inputs."""
        running_module = self.results.path[-1] if self.results.path else ""
        phase, module, line = self.callers.caller_of_operation(running_module)
        op = Operation(
            name=call.name,
            phase=phase,
            module=module,
            line=line,
            # The other fields are filled in below and after the call.
            inputs=[],
            outputs=[],
            shape=[],
            dtype="",
            arguments=call.arguments,
            is_random=call.is_random,
            is_view=call.operation.is_view,
        )
        op.inputs = [self.value_of(t) for t in _numeric_tensors(call.read_arguments)]
        op.lanes = _count_lanes(call.name, call.named_args, op.inputs)
        # A write to a view changes only a part of its base, so the result depends on the base, too.
        base_values = [self.value_of(base) for base in call.bases]
        op.inputs += [value for value in base_values if value not in op.inputs]
        # The overwritten argument is always the first one.
        read_arguments = call.args[1:] if call.overwritten_argument is not None else call.args
        self._retry_without_references(lambda: self.results.find_leaves(read_arguments))
        self._retry_without_references(
            lambda: self.results.save_initial_contents(call.mutated_tensors)
        )
        return op

    @without_dispatch_modes
    def _update_written_references(
        self,
        references: References,
        call: Call,
        reference_out: Nested | None,
        *,
        exact: bool,
        state: Tensor | None,
    ) -> None:
        """Update the references of the tensors that an operation wrote to."""
        float32_draws = None
        if state is not None:
            float32_draws = redraw_in_float32(
                call.operation, call.mutated_tensors[0], call.args, call.kwargs, state
            )
        is_repeated = (
            reference_out is not None
            and not call.is_random
            and call.name not in UNREPEATED_OPERATIONS
        )
        for t in call.mutated_tensors:
            self._try_with_references(
                partial(
                    references.record_write,
                    t,
                    exact=exact and reference_out is not None,
                    is_repeated=is_repeated,
                    float32_draws=float32_draws,
                )
            )

    @without_dispatch_modes
    def _store_new_references(
        self,
        references: References,
        call: Call,
        out: Nested,
        reference_out: Nested | None,
        *,
        exact: bool,
        inputs: Nested,
    ) -> None:
        """Store the references of the tensors that an operation made."""
        # A reference that shares one of these storages has to be copied before it is stored.
        existing_tensors = find_tensors((inputs, call.input_tensors, out))
        shared_storages = {
            storage_identity(t.untyped_storage())
            for t in existing_tensors
            if sketches.is_strided(t)
        }
        # Several results of an operation may be views of one storage.
        new_storages: set[int] = set()
        for t, reference, storage in _pair_with_references(call, out, reference_out):
            # Integers and the results of operations that are not repeated are their own reference.
            is_note = reference_out is not None and (
                not sketches.is_float_or_complex(t) or call.name in UNREPEATED_OPERATIONS
            )
            is_exact = exact and (reference is not None or is_note)
            content = t if reference is None else reference
            is_second = storage in new_storages
            may_own = storage_identity(content.untyped_storage()) not in shared_storages
            shared_storages.add(storage_identity(content.untyped_storage()))
            self._try_with_references(
                partial(
                    references.store,
                    t,
                    content,
                    exact=is_exact,
                    is_second=is_second,
                    may_own=may_own,
                )
            )
            new_storages.add(storage)

    def _note_maker(self, call: Call, op: Operation, out: Nested, *, follows: bool) -> None:
        """Note the operation that created the memory of new tensors.

        If the references follow the call, its sparse results are also noted as inexact, unless they
        are exact copies.
        """
        for t, _, _ in _pair_with_references(call, out, None):
            self.references.memory(t).maker = op
        if not follows:
            return
        for t in find_tensors(out):
            same_type = bool(call.input_tensors) and t.dtype == call.input_tensors[0].dtype
            is_copy = (
                same_type and call.name in COPY_OPERATIONS and self._is_exact(call.input_tensors[0])
            )
            # The references of sparse tensors are not followed.
            if not sketches.is_strided(t) and not is_copy:
                for memory in map(self.references.memory, sketches.nonempty_components(t)):
                    memory.exact = False
                    memory.maker = op

    def _record_number_read(self, number: float, value: str) -> None:
        """Record that the program read a number, so that the references use its exact value.

        A simple number such as 0.5 is not replaced, because it may be a constant of the program.
        """
        self.numbers_read[number] = value
        reference = self.values[value].reference
        if reference is not None and not _is_simple_number(number):
            self.references.read_numbers[number] = float(reference[0])

    def _finish_record(
        self,
        call: Call,
        op: Operation,
        out: Nested,
        initial_arguments: tuple[Sequence[Nested], dict[str, Nested]],
    ) -> None:
        """Complete the record of an operation that has run, unless it returned no numbers."""
        raw_results = returned_or_written(call.operation, call.args, out)
        results = _numeric_results(call.operation, raw_results)
        if not results:
            return
        op.shape = list(results[0].shape)
        op.dtype = str(results[0].dtype).removeprefix("torch.")
        op.outputs = [self.value_of(t, op) for t in results]
        written = call.mutated_tensors if call.overwritten_argument is None else []
        changed = [self.value_of(t, op) for t in (*written, *call.bases)]
        op.mutated_values = [value for value in dict.fromkeys(changed) if value not in op.outputs]
        # Only floating-point results have a rounding error.
        rounded = [t for t in results if sketches.is_float_or_complex(t)]
        op.has_nan = self.is_measuring and any(map(_has_nan, rounded))
        is_measured = self.is_measuring and not call.is_random and not call.operation.is_view
        if is_measured and (rounded or call.name in DEFINITIONS):
            self._retry_without_references(
                lambda: self._measure(call, op, initial_arguments, raw_results)
            )
        self.operations.append(op)
        self.on_operation()

    def _try_with_references(self, function: Callable[[], Nested]) -> Nested:
        """Call a function that uses references; disable them, return None if memory runs out."""
        try:
            return function()
        except torch.OutOfMemoryError:
            self.references.disable()
            return None

    def _retry_without_references(self, function: Callable[[], Nested]) -> Nested:
        """Call a function; if memory runs out, disable the references and call it again.

        Raises:
            torch.OutOfMemoryError: If memory runs out although the references are disabled.
        """
        try:
            return function()
        except torch.OutOfMemoryError:
            if self.references.is_disabled:
                raise
        self.references.disable()
        torch.cuda.empty_cache()
        return function()

    def _measure(
        self,
        call: Call,
        op: Operation,
        initial_arguments: tuple[Sequence[Nested], dict[str, Nested]],
        raw_results: Nested,
    ) -> None:
        """Measure whether a repetition returns the same bits, and the error against float64."""
        operation = call.operation
        initial_args, initial_kwargs = initial_arguments
        args, kwargs = (
            map_nested(_copy_tensor, initial_arguments) if call.is_mutating else initial_arguments
        )
        repeated_out = operation(*args, **kwargs)
        repeated = _numeric_results(operation, returned_or_written(operation, args, repeated_out))
        outputs = [self.values[value] for value in op.outputs]
        if [sketches.content_id(t) for t in repeated] != [value.content for value in outputs]:
            op.repeats = False
            op.spread = sketches.max_distance(
                [sketches.sketch(t) for t in repeated], [value.sketch for value in outputs]
            )
        # The error against float64 can be measured only if all tensors are strided.
        if all(map(sketches.is_strided, find_tensors((initial_arguments, raw_results)))):
            accuracy = forward_error(operation, op.name, initial_args, initial_kwargs, raw_results)
            # An `Operation` has all fields of an `Accuracy`.
            vars(op).update(vars(accuracy))

    # --- values -----------------------------------------------------------------------------------

    @without_dispatch_modes
    def value_of(self, tensor: Tensor, maker: Operation | None = None) -> str:
        """Return the name of a tensor's current value; store a value that is new.

        Args:
            tensor: A strided tensor.
            maker: The operation that is being recorded, if it made the tensor.
        """
        memory = self.references.memory(tensor)
        digest = content_digest(tensor)
        key = _value_key(tensor, memory.serial, memory.version)
        name = self.names.get(key)
        if name is not None and digest == self.digests[name]:
            return name
        flat = (
            _value_key(tensor.view(-1), memory.serial, memory.version)
            if tensor.is_contiguous()
            else ()
        )
        known_digest, equal_value = self.flat_values.get(flat, (digest, None))
        if name is not None or known_digest != digest:
            # The memory has changed without a recorded write, for example by NumPy. `reread`
            # updates the reference, and the call below then finds or stores the new value.
            self.references.reread(tensor)
            return self.value_of(tensor, maker)
        name = self.names[key] = str(len(self.values))
        self.digests[name] = digest
        value = self.values[name] = self._new_value(tensor, digest, equal_value)
        if flat:
            self.flat_values.setdefault(flat, (digest, value))
        if maker is None and memory.maker is not None:
            # This is another view of memory that an earlier operation wrote to.
            memory.maker.mutated_values.append(name)
        return name

    def _new_value(self, tensor: Tensor, digest: int, equal_value: Value | None) -> Value:
        """Create the value of a tensor, with a reference if there is one of the same shape.

        Otherwise, the recorded numbers stand in for the reference if the tracer is measuring.
        """
        references = self.references

        def make_with_reference() -> Value | None:
            """Create the value with its reference; None if their shapes differ."""
            reference = references.of(tensor) if references.has_copy(tensor) else tensor
            if reference.shape != tensor.shape:
                return None
            return Value.of(
                tensor,
                reference,
                exact=references.memory(tensor).exact,
                slabs=self.slabs,
                digest=digest,
                equal_value=equal_value,
            )

        def make_as_recorded() -> Value:
            """Create the value without a reference."""
            return Value.as_recorded(
                tensor,
                stands_in=self.is_measuring,
                slabs=self.slabs,
                digest=digest,
                equal_value=equal_value,
            )

        value: Value | None = None
        if self.is_measuring and not references.is_disabled:
            value = self._try_with_references(make_with_reference)
        if value is None:  # no reference, another shape, or out of memory
            value = self._retry_without_references(make_as_recorded)
        return value

    def _is_exact(self, tensor: Tensor) -> bool:
        """Return whether a tensor's reference was computed entirely in float64.

        A tensor that is not strided counts as exact if no operation of the step has written to it.
        """
        if sketches.is_strided(tensor):
            return self.references.is_exact([tensor])
        memories = map(self.references.memory, sketches.nonempty_components(tensor))
        return all(memory.exact and memory.maker is None for memory in memories)


def describe_state(value: Nested) -> str:
    """Describe a piece of state, such that equal states have equal descriptions; hash a tensor.

    >>> describe_state(0.1), describe_state(torch.ones(2)).partition("#")[0]
    ('0.1', 'float32 of shape (2,) ')
    """
    if not isinstance(value, Tensor):
        text = repr(value).replace(HASH_MARK, "")
        return text if len(text) <= MAX_STATE_LETTERS else f"{text[:MAX_STATE_LETTERS]}…"
    dtype = str(value.dtype).removeprefix("torch.")
    if value.dim() == 0:
        return repr(value.item())
    digest = sketches.content_id(value.detach())
    return f"{dtype} of shape {tuple(value.shape)} {HASH_MARK}{digest}"


def _is_simple_number(number: float) -> bool:
    """Return whether a number has so few digits that it may be a constant of the program.

    >>> _is_simple_number(0.125), _is_simple_number(0.31783719360828)
    (True, False)
    """
    return (
        len(repr(number).lstrip("-0.").replace(".", "").partition("e")[0])
        <= MAX_SIMPLE_NUMBER_DIGITS
    )


def _value_key(tensor: Tensor, serial: int, version: int) -> tuple[Nested, ...]:
    """Return the key that identifies a value within one execution: memory, version, layout."""
    layout = tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype
    return serial, version, *layout, tensor.is_conj(), tensor.is_neg()


def _pair_with_references(
    call: Call, out: Nested, reference_out: Nested
) -> Iterator[tuple[Tensor, Tensor | None, int]]:
    """Yield each new tensor that a call returned, its float64 reference or None, and its storage.

    Tensors that are not strided, and those with the memory of an argument, are left out.
    """
    input_storages = {
        storage_identity(t.untyped_storage()) for t in call.input_tensors if sketches.is_strided(t)
    }
    for t, reference in _pair_results(out, reference_out):
        storage = storage_identity(t.untyped_storage()) if sketches.is_strided(t) else None
        if storage is not None and storage not in input_storages:
            yield t, reference, storage


def _pair_results(out: Nested, reference_out: Nested) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield each tensor that an operation returned, with its float64 reference or None."""
    if isinstance(out, Tensor):
        yield out, reference_out if isinstance(reference_out, Tensor) else None
    elif isinstance(out, list | tuple):
        references = reference_out if isinstance(reference_out, list | tuple) else ()
        for index, value in enumerate(out):
            yield from _pair_results(value, references[index] if index < len(references) else None)


def _count_lanes(name: str, named: Mapping[str, Nested], inputs: Sequence[str]) -> list[int]:
    """Return the length and number of an operation's tensor lists.

    The list is empty if the operation takes no tensor lists, if their lengths differ, or if not all
    of their tensors are among the inputs.
    """
    if not name.startswith(("_foreach_", "_fused_", "_amp_foreach_")):
        return []
    lists = [
        value for value in named.values() if isinstance(value, list | tuple) and find_tensors(value)
    ]
    lengths = {len(find_tensors(value)) for value in lists}
    if len(lengths) != 1 or len(lists) * min(lengths) > len(inputs):
        return []
    return [lengths.pop(), len(lists)]


def _numeric_tensors(values: Nested) -> list[Tensor]:
    """Return the nonempty tensors among nested values.

    If any of them holds floating-point numbers, uint8 tensors are left out: they are then buffers
    of a kernel, such as the states of random number generators.
    """
    tensors = sketches.nonempty_components(values)
    return (
        [t for t in tensors if t.dtype != torch.uint8]
        if any(map(sketches.is_float_or_complex, tensors))
        else tensors
    )


def _numeric_results(operation: OpOverload, raw_results: Nested) -> list[Tensor]:
    """Return the tensors that an operation computed, without its auxiliary outputs."""
    names = result_names(operation)
    if isinstance(raw_results, tuple) and len(raw_results) == len(names):
        raw_results = [
            value
            for name, value in zip(names, raw_results, strict=True)
            if name not in AUXILIARY_OUTPUTS
        ]
    return _numeric_tensors(raw_results)


def _has_nan(tensor: Tensor) -> bool:
    """Return whether a tensor contains NaN.

    >>> _has_nan(torch.tensor([torch.inf, -torch.inf])), _has_nan(torch.tensor([1.0, torch.nan]))
    (False, True)
    """
    tensor = tensor.float() if tensor.element_size() == 1 else tensor  # float8 has no sum
    # The sum is faster to compute and is NaN if any number is NaN. A sum of opposite infinities is
    # NaN as well, so the numbers are then checked one by one.
    return bool(tensor.sum().isnan()) and bool(tensor.isnan().any())


def _copy_tensor(value: Nested) -> Nested:
    """Copy a tensor with its strides, since another layout may select another kernel.

    >>> _copy_tensor(torch.arange(6).reshape(2, 3).T).stride()
    (1, 3)
    """
    if not isinstance(value, Tensor):
        return value
    if not sketches.is_strided(value) or value.is_conj() or value.is_neg() or not value.numel():
        return value.clone()
    # The number of elements of memory from the first element of the tensor to the last.
    span = 1 + sum(
        (size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True)
    )
    return value.detach().as_strided((span,), (1,)).clone().as_strided(value.shape, value.stride())


def _is_random(operation: OpOverload, arguments: Mapping[str, object]) -> bool:
    """Return whether an operation draws random numbers.

    torch tags attention and LSTMs as random even if their dropout is zero, when they draw nothing.
    """
    dropped = (arguments.get(name) for name in ("dropout_p", "dropout"))
    return torch.Tag.nondeterministic_seeded in operation.tags and 0.0 not in dropped


# --- results of the step --------------------------------------------------------------------------


class StepResults:
    """Follow the modules, leaves and optimizers of a step, and report their final states.

    Args:
        tracer: The tracer that names and stores values.

    Attributes:
        path: The names of the modules that are running, the innermost last.
        restores: Whether modules, leaves and optimizers are restored to their initial states after
            the step.
        counts_updates: Whether updates that are lost are counted.
        start: The states of optimizers before their first update: numbers as text, and hashes of
            tensors.
    """

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer
        self.restores = True
        self.counts_updates = True
        self.start: dict[str, str] = {}
        self.path: list[str] = []
        self.names: dict[nn.Module, str] = {}
        self.saved_owners: set[nn.Module | Tensor | torch.optim.Optimizer] = set()
        self.undo = contextlib.ExitStack()
        # The outermost modules, and the values of their buffers.
        self.roots: dict[nn.Module, dict[str, list[str]]] = {}
        # The initial values of each leaf by type and device. `Module.to` may change the type or the
        # device of a leaf, which does not count as an update.
        self.leaves: dict[Tensor, dict[tuple[torch.dtype, torch.device], list[str]]] = {}
        self.gradients: dict[Tensor, list[str]] = {}
        self.optimizers: dict[torch.optim.Optimizer, None] = {}
        # The gradients that an optimizer received at its last call.
        self.optimizer_gradients: dict[Tensor, list[str]] = {}
        # The initial contents of a leaf and of its reference.
        self.initial_contents: dict[Tensor, tuple[Tensor, Tensor]] = {}

    @contextlib.contextmanager
    def follow(self) -> Iterator[None]:
        """Follow which module is running until the step is done, then undo all hooks."""

        def enter(module: nn.Module, inputs: Nested) -> None:  # noqa: ARG001
            """Note a module that begins to run; an outermost one names all modules inside it."""
            check_module(module)
            if not self.path:
                own_name = type(module).__name__
                self.names = {
                    inner: name_as_written(name) or own_name
                    for name, inner in module.named_modules()
                }
                if module not in self.roots:
                    self._save_state(module)
                    self.roots[module] = self._buffer_values(module)
            self.path.append(self.names.get(module, type(module).__name__))

        def leave(module: nn.Module, inputs: Nested, output: Nested) -> None:  # noqa: ARG001
            if self.path:
                self.path.pop()

        with self.undo:
            for handle in (
                register_optimizer_step_pre_hook(
                    lambda optimizer, *_: self._save_optimizer(optimizer)
                ),
                hooks.register_module_forward_pre_hook(enter),
                hooks.register_module_forward_hook(leave, always_call=True),
            ):
                self.undo.callback(handle.remove)
            yield

    def _save_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Before the step of an optimizer, save its state and the gradients that it receives."""
        if optimizer not in self.optimizers:
            self._describe_start(optimizer)
        self.optimizers[optimizer] = None
        self._save_state(optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.optimizer_gradients[parameter] = self._value_names(parameter.grad)

    @as_guard_work
    def _describe_start(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the state and the options of an optimizer before its first update in the step."""
        kind = type(optimizer).__name__
        names = self._parameter_names()
        for parameter, state in optimizer.state.items():
            name = names.get(parameter) or self._number_leaf(parameter)
            for key, value in state.items():
                self.start[f"{key} of {name} ({kind})"] = describe_state(value)
        for number, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if key != "params" and key not in EXECUTION_OPTIONS:
                    self.start[f"{key} of group {number} ({kind})"] = describe_state(value)

    def _parameter_names(self) -> dict[Tensor, str]:
        """Return the names of the parameters of all modules that ran."""
        names: dict[Tensor, str] = {}
        # The order is reversed, so that a parameter of two modules gets its name from the first.
        for root in reversed(self.roots):
            names |= {
                parameter: name_as_written(name) for name, parameter in root.named_parameters()
            }
        return names

    @as_guard_work
    def _save_state(self, owner: nn.Module | Tensor | torch.optim.Optimizer) -> None:
        """Save the state of a module, optimizer or tensor before its first use, for `follow`."""
        if isinstance(owner, nn.Module) and not all(
            component_tensors(p) for p in owner.parameters() if p.numel()
        ):
            # `torch.func.functional_call` has replaced the parameters, and restores them itself.
            return
        if self.restores and owner not in self.saved_owners:
            self.saved_owners.add(owner)
            self.undo.callback(Snapshot(owner, with_contents=True).restore)

    def find_leaves(self, args: Nested) -> None:
        """Find the leaves among an operation's arguments, and start to record their gradients."""
        for t in find_tensors(args):
            if not t.requires_grad or is_view(t) or not t.is_leaf or not component_tensors(t):
                continue  # not a leaf, or a tensor in a transform of torch.func (no components)
            if t not in self.leaves and not t.is_inference():
                self.undo.callback(
                    t.register_post_accumulate_grad_hook(self._record_gradient).remove
                )
                self._save_state(t)
            contents = self.leaves.setdefault(t, {})
            if (t.dtype, t.device) not in contents:
                # `Module.to` changed the type or device, so the saved content is out of date.
                self.initial_contents.pop(t, None)
                contents[t.dtype, t.device] = self._value_names(t)

    def _record_gradient(self, leaf: Tensor) -> None:
        """Record the gradient of a leaf after the backward pass has added to it."""
        self.gradients[leaf] = [] if leaf.grad is None else self._value_names(leaf.grad)

    def save_initial_contents(self, written: Sequence[Tensor]) -> None:
        """Save the contents of leaves before the first write, so that lost updates are found.

        Nothing is saved if lost updates are not counted, and leaves that are too large are skipped.
        """
        references = self.tracer.references
        if references.is_disabled or not (self.counts_updates and self.tracer.is_measuring):
            return
        storages = {storage_identity(t.untyped_storage()) for t in written}
        if not storages:
            return
        for leaf in self.leaves:
            is_skipped = (
                leaf in self.initial_contents
                or not (sketches.is_strided(leaf) and sketches.is_float_or_complex(leaf))
                or leaf.numel() > MAX_TRACKED_UPDATE_SIZE
            )
            if not is_skipped and storage_identity(leaf.untyped_storage()) in storages:
                recorded = leaf.detach().clone()
                has_copy = references.has_copy(leaf)
                self.initial_contents[leaf] = (
                    recorded,
                    references.of(leaf.detach()).clone() if has_copy else recorded,
                )

    @as_guard_work
    def _value_names(self, tensor: Tensor) -> list[str]:
        """Return the names of a tensor's values, without recording the operations for it."""
        return [self.tracer.value_of(t) for t in sketches.nonempty_components(tensor.detach())]

    @as_guard_work
    def _count_lost_updates(self, leaf: Tensor) -> dict[str, int]:
        """Count the numbers of a leaf that the step updates, and the updates that are lost.

        Returns:
            `moved`, the number of updates that change the reference, and `lost`, how many of these
            leave the recorded bits unchanged. Empty if the leaf has no comparable initial content.
        """
        if leaf not in self.initial_contents or self.tracer.references.is_disabled:
            return {}
        recorded, start = self.initial_contents[leaf]
        current = leaf.detach()
        reference = self.tracer.references.of(current)
        if (current.shape, current.dtype, current.device) != (
            recorded.shape,
            recorded.dtype,
            recorded.device,
        ):
            return {}
        is_changed = reference != start.to(reference.dtype)
        return {
            "moved": int(is_changed.sum()),
            "lost": int((is_changed & (current == recorded)).sum()),
        }

    def _have_changed(self, old_names: list[str], new_names: list[str]) -> bool:
        """Return whether the recorded bits or the references of a tensor have changed."""
        if len(old_names) != len(new_names):
            return True
        values = self.tracer.values
        pairs = [
            (values[x], values[y]) for x, y in zip(old_names, new_names, strict=True) if x != y
        ]
        return any(
            x.content != y.content
            or (
                x.reference is not None
                and y.reference is not None
                and not np.array_equal(x.reference, y.reference, equal_nan=True)
            )
            for x, y in pairs
        )

    def _buffer_values(self, module: nn.Module) -> dict[str, list[str]]:
        """Return the names of the current values of a module's buffers, by buffer."""
        return {
            name_as_written(name): self._value_names(buffer)
            for name, buffer in module.named_buffers()
        }

    def used_modules(self) -> list[nn.Module]:
        """Return the modules that a step called, and their submodules."""
        return [submodule for model in self.roots for submodule in model.modules()]

    def to_operations(self, returned: Nested) -> list[Operation]:
        """Convert the results of the step to operations, sorted by name and module.

        The results are returned values, gradients, changed parameters and buffers, and optimizer
        states. The `inputs` of a gradient or update are the initial values of the parameter or
        buffer.
        """
        entries: list[Operation] = []
        returned_leaves = named_leaves(returned)
        for path, value in returned_leaves:
            if isinstance(value, Tensor | float):
                label = "loss" if len(returned_leaves) == 1 else f"result {path}"
                values = (
                    self._value_names(value)
                    if isinstance(value, Tensor)
                    else [self._name_of_number(value)]
                )
                entries.append(self._make_result(label, "", values, values))
        names = self._parameter_names()
        for leaf, contents in self.leaves.items():
            if self._is_alias(leaf, names):
                continue
            name = names.get(leaf) or self._number_leaf(leaf)
            values = self._value_names(leaf)
            start = contents.get((leaf.dtype, leaf.device)) or next(iter(contents.values()))
            entries.append(self._gradient_result(leaf, name, start))
            if self._have_changed(contents.get((leaf.dtype, leaf.device), values), values):
                entries.append(
                    self._make_result(
                        "updated", name, start, values, self._count_lost_updates(leaf)
                    )
                )
        for module, initial_values in self.roots.items():
            for name, values in self._buffer_values(module).items():
                if self._have_changed(initial_values.get(name, []), values):
                    entries.append(
                        self._make_result("updated", name, initial_values.get(name, []), values)
                    )
        for optimizer in self.optimizers:
            for parameter, state in optimizer.state.items():
                name = names.get(parameter) or self._number_leaf(parameter)
                contents = self.leaves.get(parameter, {})
                start = contents.get((parameter.dtype, parameter.device)) or next(
                    iter(contents.values()), []
                )
                for key, value in state.items():
                    if isinstance(value, Tensor) and sketches.is_float_or_complex(value):
                        values = self._value_names(value)
                        entries.append(
                            self._make_result(
                                "updated", f"{key} of {name}", start, values, {"state": key}
                            )
                        )
        return sorted((op for op in entries if op.outputs), key=lambda op: (op.name, op.module))

    def _is_alias(self, leaf: Tensor, names: Mapping[Tensor, str]) -> bool:
        """Return whether a leaf has the memory and shape of another with a name or a gradient.

        An example is the tensor object that a convolution's kernel receives instead of the weight.
        """
        if leaf in names or leaf in self.gradients or not sketches.is_strided(leaf):
            return False
        candidates = (
            t
            for t in (*names, *self.leaves)
            if t is not leaf and (t in names or t in self.gradients)
        )
        return any(
            sketches.is_strided(t) and t.data_ptr() == leaf.data_ptr() and t.shape == leaf.shape
            for t in candidates
        )

    def _number_leaf(self, leaf: Tensor) -> str:
        """Return the name of a leaf that belongs to no module: its number and its shape."""
        number = next(
            (number for number, candidate in enumerate(self.leaves, 1) if candidate is leaf), 0
        )
        return f"tensor {number} of shape {tuple(leaf.shape)}"

    def _gradient_result(self, leaf: Tensor, name: str, start: list[str]) -> Operation:
        """Return the gradient that an optimizer last received for a leaf, or else the final one.

        The final gradient comes second because some optimizers write to it. If it has been removed
        or set to zero, the gradient after the last accumulation is returned.
        """
        final = [] if leaf.grad is None else self._value_names(leaf.grad)
        values = [self.tracer.values[name] for name in final]
        is_left = any(value.sketch.any() or not value.is_pure_rounding for value in values)
        gradient = self.optimizer_gradients.get(leaf)
        if not gradient:
            gradient = final if is_left else self.gradients.get(leaf, [])
        return self._make_result("gradient", name, start, gradient)

    def _make_result(
        self,
        label: str,
        name: str,
        start: list[str],
        values: list[str],
        about: Mapping[str, int | str] | None = None,
    ) -> Operation:
        """Make the record of a result.

        Args:
            label: The kind of the result, such as `loss`, `gradient` or `updated`.
            name: The name of the parameter, buffer or state; empty for a returned value.
            start: The names of its initial values.
            values: The names of its values.
            about: The arguments of the record, if there are any.
        """
        shape = self.tracer.values[values[-1]].shape if values else []
        return Operation(
            name=label,
            phase=RESULT,
            module=name,
            line="",
            inputs=start,
            outputs=values,
            shape=list(shape),
            dtype="float64",
            arguments=dict(about or {}),
        )

    @as_guard_work
    def _name_of_number(self, number: float) -> str:
        """Return the name of the value of a returned number.

        This is the value of the tensor that the number was read from. A number that was not read
        from a tensor gets a separate value.
        """
        if number not in self.tracer.numbers_read:
            self.tracer.numbers_read[number] = self.tracer.value_of(
                torch.tensor(number, dtype=torch.float64)
            )
        return self.tracer.numbers_read[number]
