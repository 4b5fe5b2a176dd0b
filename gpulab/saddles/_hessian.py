"""The Hessian of a loss as a linear operator, without computing its matrix."""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import NoReturn

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from gpulab._torch_internals import (
    BatchNormModule,
    DropoutModule,
    Nested,
    graph_nodes,
    is_compiler_loaded,
    is_once_differentiable,
    leaf_of,
    reparametrized,
    weight_norm,
)
from gpulab.errors import DataError, UnsupportedError, UsageError
from gpulab.guards._call_sites import line_of_forward_call
from gpulab.saddles._objectives import Batch, Loss, Objective
from gpulab.saddles._operators import check_symmetric

try:
    from gpulab.engines import hessian_product
except ModuleNotFoundError as error:  # Everything works without this package, only more slowly.
    if error.name != "gpulab.engines":
        raise

    def hessian_product(*_: object) -> NoReturn:  # type: ignore[misc]  # another signature
        """Raise `UnsupportedError`, because the package with the faster method is missing."""
        raise UnsupportedError("the optional package gpulab/engines is missing")


Product = Callable[..., list[Tensor]]
Linearize = Callable[[Callable[[], Tensor], list[Tensor]], tuple[Tensor, list[Tensor], Product]]
FORWARD = "forward over reverse"
REVERSE = "reverse over reverse"
# The remedy for missing second derivatives, by a word in torch's error. "" matches any error.
SECOND_DERIVATIVES = {
    "attention": (
        "use the math kernel: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)"
    ),
    "inplace": "use the out-of-place operation",
    "": "write it with operations that torch can differentiate twice",
}
MAX_BATCHED_VECTORS = 10  # the largest number of vectors that are multiplied together


class Hessian:
    """The Hessian of a loss, the symmetric (n, n) matrix of second derivatives, as an operator.

    `gpulab.hessian` returns one. The matrix is computed only by `dense`. `H @ v` is the product
    with a vector (n,), or with k vectors at once (n, k), which costs much less than k products.
    Vectors must have the operator's `dtype` and be on its `device`; otherwise `H @ v` raises
    `UsageError`. The operator keeps a copy of the weights, so training the model further does not
    change it.

    Attributes:
        parameters: The tensors with respect to which the loss was differentiated, by name. A vector
            consists of all of them, flattened, in this order.
        loss: The loss at these weights.
        gradient: The gradient at these weights, (n,).
        shape: (n, n).
        dtype: The type of parameters and vectors, float32 or float64.
        device: The device of parameters and vectors.
        method: The method that computes products. With `forward over reverse`, the gradient was
            recorded as a list of operations, and each product is the derivative of this list along
            the vector; on a GPU it is computed by a CUDA graph. With `reverse over reverse`,
            autograd's graph of the gradient is kept and differentiated for each product. The second
            method is used if the first one does not support an operation.
        at_once: The number of vectors in `H @ V` that are multiplied together: as many as fit into
            256 MiB on a CPU or 3 GiB on a GPU, but at most ten; one with reverse over reverse.
            Multiplying more vectors at once is faster and takes more memory.

    Examples:
        >>> import torch
        >>> import gpulab as gl
        >>> weights = torch.nn.Linear(2, 1, bias=False).double()
        >>> H = gl.hessian(weights, lambda: weights.weight.pow(2).sum())
        >>> H.shape, H.dense().tolist()
        ((2, 2), [[2.0, 0.0], [0.0, 2.0]])

    References:
        Pearlmutter 1994, *Fast exact multiplication by the Hessian* (Neural Computation 6).
    """

    def __init__(
        self,
        objective: Callable[[], Tensor],
        parameters: dict[str, Tensor],
        bound_weights: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.parameters = parameters
        self.bound_weights = bound_weights
        self._product: Product  # set by `_differentiate`
        first_parameter = next(iter(parameters.values()))
        self.dtype = first_parameter.dtype
        self.device = first_parameter.device
        size = sum(tensor.numel() for tensor in parameters.values())
        self.shape = (size, size)
        # Forward over reverse is faster, but does not support every operation. If it fails or gives
        # a matrix that is not symmetric, reverse over reverse decides.
        try:
            self._differentiate(objective, FORWARD)
        except (UnsupportedError, DataError):
            self._differentiate(objective, REVERSE)

    def _differentiate(self, objective: Callable[[], Tensor], method: str) -> None:
        """Prepare products by a method, and check the symmetry with two random vectors.

        Raises:
            UnsupportedError: If the method does not support an operation.
            DataError: If the matrix is not symmetric.
        """
        linearize: Linearize = hessian_product if method == FORWARD else _linearize_by_graph
        # The weights stay bound during the backward pass, which recomputes checkpointed parts.
        with self.bound_weights():
            loss, gradients, self._product = linearize(objective, list(self.parameters.values()))
        self.method = method
        self.loss = float(loss)
        self.gradient: Float[Tensor, " n"] = torch.cat(
            [gradient.reshape(-1) for gradient in gradients]
        )
        max_tangent_bytes = 3 * 2**30 if self.device.type == "cuda" else 2**28
        # A product that does not state how much memory a vector takes gets one vector at a time.
        bytes_of_vector = max(1, getattr(self._product, "bytes", max_tangent_bytes))
        fitting_vectors = max_tangent_bytes // bytes_of_vector
        self.at_once = max(1, min(MAX_BATCHED_VECTORS, fitting_vectors))
        random_rows = torch.randn(2, self.shape[0], generator=torch.Generator().manual_seed(0))
        vectors = random_rows.T.to(self.device, self.dtype)
        try:
            check_symmetric(self, vectors, self @ vectors)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            first_line = str(error).partition("\n")[0]
            raise UnsupportedError(f"{method}: {first_line}") from error
        except DataError as error:
            reason = (
                "the gradient that torch computes is not that of the loss, or cannot be"
                " differentiated at these weights"
            )
            remedy = (
                "look for hooks on tensors, custom backward functions, scale_grad_by_freq,"
                " square roots of 0"
            )
            raise DataError(f"{error}: {reason}; {remedy}") from None

    def __matmul__(self, vectors: Float[Tensor, "n ..."]) -> Float[Tensor, "n ..."]:
        """Return the product with a vector (n,), or with k vectors (n, k)."""
        if (
            not isinstance(vectors, Tensor)
            or vectors.shape[:1] != self.shape[:1]
            or vectors.ndim > 2
        ):
            shape = tuple(getattr(vectors, "shape", ())) or type(vectors).__name__
            raise UsageError(
                f"H @ {shape}: expected a tensor of shape ({self.shape[0]},) or"
                f" ({self.shape[0]}, k)"
            )
        if (vectors.dtype, vectors.device) != (self.dtype, self.device):
            raise UsageError(
                f"H @ v: v is {vectors.dtype} on {vectors.device}, H {self.dtype} on {self.device}:"
                " use v.to(H.device, H.dtype)"
            )
        if vectors.ndim == 1:
            return self._multiply_rows(vectors[None])[0]
        products = torch.empty_like(vectors)
        for start in range(0, vectors.shape[1], self.at_once):
            columns = slice(start, start + self.at_once)
            products[:, columns] = self._multiply_rows(vectors[:, columns].T).T
        return products

    @torch.no_grad()
    def _multiply_rows(self, vectors: Float[Tensor, "k n"]) -> Float[Tensor, "k n"]:
        """Compute the products with k vectors, given and returned as rows."""
        shapes = [tensor.shape for tensor in self.parameters.values()]
        blocks = vectors.contiguous().split([shape.numel() for shape in shapes], dim=1)
        tangents = [
            block.reshape(len(vectors), *shape) for block, shape in zip(blocks, shapes, strict=True)
        ]
        # Only autograd's graph may recompute parts of the network, for which it needs its weights.
        with self.bound_weights() if self.method == REVERSE else contextlib.nullcontext():
            products = self._product(*tangents)
        return torch.cat([product.reshape(len(vectors), -1) for product in products], dim=1)

    def dense(self) -> Float[Tensor, "n n"]:
        """Compute the whole matrix, with one product for each column.

        Returns:
            The matrix (n, n), in the operator's `dtype`, on its `device`.
        """
        return self @ torch.eye(self.shape[0], dtype=self.dtype, device=self.device)

    def __repr__(self) -> str:
        return (
            f"Hessian of {self.shape[0]:,} parameters, {self.dtype} on {self.device}, loss"
            f" {self.loss:.6g}"
        )


def hessian(
    model: nn.Module,
    loss: Loss,
    batch: Batch | None = None,
    *,
    parameters: str | Sequence[str] | None = None,
) -> Hessian:
    """Build the Hessian of a loss as a linear operator: products `H @ v` without the matrix.

    The loss is `loss(model(inputs), targets)` for `batch = (inputs, targets)`, or any function that
    returns a scalar. `find_critical_point` and `landscape` accept the same batches.

    Args:
        model: A network with parameters in float32 or float64, on any device.
        loss: A function of the model's outputs and the targets that returns a scalar. If there is
            no batch, a function without arguments that calls the model itself.
        batch: The data of the loss:

            - a pair of inputs and targets;
            - a tensor of inputs; the loss is then a function of the outputs alone;
            - a mapping, such as a tokenizer's output; the model then receives the items that its
              `forward` names, and the loss receives the outputs and the whole mapping;
            - a `DataLoader` of such batches. All batches are drawn once, and their graphs are in
              memory at the same time. The loss is then the mean over all examples, provided that
              `loss` is the mean over the examples of a batch.
        parameters: The names of the parameters with respect to which the loss is differentiated, or
            of the layers that contain them (`"layers.0"`). Other parameters are constants. By
            default, all parameters that require gradients. A tied parameter counts once, under its
            first name. Different parameters that share memory count separately, as in autograd. The
            padding row of an embedding is a constant, as in torch.

    Returns:
        The operator, a `gpulab.saddles.Hessian`, with `H @ v`, `H.gradient` and `H.loss`. Its
        symmetry was checked with two products. This check detects a gradient that is not the
        gradient of any function. It does not detect the gradient of a different function: if a
        custom backward function or hook is wrong by a factor, so is the Hessian.

    Raises:
        UsageError: If the model is in training mode and draws random numbers or keeps statistics;
            if the loss differs from call to call, is not a scalar, does not depend on the
            parameters, refers to a parameter directly instead of through the model, or has no
            second derivatives; if embeddings change their weights when they are used (`max_norm`);
            if the loss does not fit the batch; or if a parameter is unknown.
        DataError: If weights or the loss are not finite, or if the operator is not symmetric.

    Examples:
        >>> import torch
        >>> import gpulab as gl
        >>> layer = torch.nn.Linear(3, 1, bias=False).double()
        >>> x, y = torch.randn(50, 3, dtype=torch.float64), torch.randn(50, 1, dtype=torch.float64)
        >>> H = gl.hessian(layer, torch.nn.functional.mse_loss, (x, y))
        >>> torch.allclose(H @ torch.ones(3, dtype=torch.float64), 2 / 50 * x.T @ x.sum(1))
        True

    References:
        Pearlmutter 1994, *Fast exact multiplication by the Hessian* (Neural Computation 6).
    """
    objective_of = Objective.of(loss, batch)
    _check_modules(model)
    selected = _select(model, parameters)
    model_tensors = dict([*model.named_parameters(), *model.named_buffers()])
    # The operator works on copies, because the model may be trained further.
    copies = {name: tensor.detach().clone() for name, tensor in model_tensors.items()}
    points = {name: copies[name].requires_grad_() for name in selected}
    for name, tensor in points.items():
        if not tensor.isfinite().all():
            raise DataError(
                f"{name} has {int((~tensor.isfinite()).sum())} values that are not finite"
            )

    def objective() -> Tensor:
        """Compute the loss; raise if it cannot be differentiated twice as a function."""
        value = objective_of(model)
        # The leaves of autograd's graph: the parameters that the loss depends on.
        leaves: set[int] = set()
        for node in graph_nodes(value):
            leaf = leaf_of(node)
            if leaf is not None:
                leaves.add(id(leaf))
            # Autograd would silently treat the gradients of such a function as constants.
            if is_once_differentiable(node):
                line = _line_of_node(lambda: objective_of(model), type(node).__name__)
                raise UsageError(
                    f"{type(node).__name__} has no second derivatives: it is marked"
                    " once_differentiable; if torch can differentiate everything in its backward,"
                    f" remove the mark{line}"
                )
        # The model computes with the copies. A loss that uses an original parameter bypasses it.
        captured = [name for name, tensor in selected.items() if id(tensor) in leaves]
        if captured:
            raise UsageError(
                f"the loss refers to {captured[0]} directly: get it from the model at each call"
                f" (model.{captured[0]})"
            )
        if not value.requires_grad:
            raise UsageError(
                "the loss does not depend on the parameters through operations that torch can"
                " differentiate"
            )
        if not math.isfinite(float(value.detach())):
            raise DataError(f"the loss is {float(value.detach())}: expected a finite number")
        return value

    H = Hessian(objective, points, functools.partial(_bind_copies, model, copies))
    with H.bound_weights():
        second_loss = float(objective().detach())
    _check_unchanged(model_tensors, copies)
    _check_same_loss(H.loss, second_loss, H.dtype)
    return H


def _check_modules(model: nn.Module) -> None:
    """Raise `UsageError` for modules that compute a different function at each call.

    These are embeddings that rescale their weights, and modules in training mode that draw random
    numbers or keep statistics.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            reason = (
                f"{name or 'the model'} rescales its own weights when it is used"
                f" (max_norm={module.max_norm})"
            )
            remedy = (
                "rescale them once with weight.data.renorm_(norm_type, 0, max_norm), and set"
                " max_norm = None"
            )
            raise UsageError(f"{reason}: {remedy}")
        is_active_dropout = isinstance(module, DropoutModule) and module.p > 0
        is_rnn_with_dropout = isinstance(module, nn.RNNBase) and module.dropout > 0
        has_dropout = is_active_dropout or is_rnn_with_dropout
        if module.training and (has_dropout or isinstance(module, BatchNormModule)):
            raise UsageError(
                f"{name or 'the model'} ({type(module).__name__}) is in training mode: call"
                " model.eval()"
            )


def _check_unchanged(tensors: dict[str, Tensor], copies: dict[str, Tensor]) -> None:
    """Raise `UsageError` if computing the loss has changed the copies of the model's tensors."""
    for name, tensor in tensors.items():
        # NaN differs from itself and does not count.
        if tensor.layout == torch.strided and ((tensor != copies[name]) & ~tensor.isnan()).any():
            raise UsageError(f"{name} changes every time the loss is computed: call model.eval()")


def _check_same_loss(first_loss: float, second_loss: float, dtype: torch.dtype) -> None:
    """Raise `UsageError` if the loss differs between two calls by more than rounding."""
    # A difference up to a thousand rounding errors may come from a different order of summation.
    rounding = 1e3 * torch.finfo(dtype).eps * abs(first_loss)
    if abs(second_loss - first_loss) > rounding:
        message = (
            f"the loss is {first_loss:.6g} at the first call and {second_loss:.6g} at the second:"
            " it draws random numbers; "
        )
        raise UsageError(message + "call model.eval(), or draw the numbers beforehand")


def _select(model: nn.Module, names: str | Sequence[str] | None) -> dict[str, Tensor]:
    """Select the parameters with these names, or in modules with these names; None selects all.

    Raises:
        UsageError: If a name is unknown, if no parameter is selected, or if parameters have
            different types or devices.
    """
    trainable: dict[str, Tensor] = {
        name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad
    }
    selected = trainable if names is None else _select_by_name(model, names, trainable)
    if not selected:
        name = type(model).__name__
        raise UsageError(
            f"{name} has no parameters that require gradients: call requires_grad_() on the"
            " parameters to differentiate"
        )
    kinds = {(tensor.dtype, tensor.device) for tensor in selected.values()}
    has_usable_types = {dtype for dtype, _ in kinds} <= {torch.float32, torch.float64}
    if len(kinds) > 1 or not has_usable_types:
        raise UsageError(
            f"parameters of {sorted(map(str, kinds))}: expected float32 or float64, all on one"
            " device"
        )
    return selected


def _select_by_name(
    model: nn.Module, names: str | Sequence[str], trainable: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Select the trainable parameters with these names, or in modules with these names.

    Raises:
        UsageError: If no trainable parameter belongs to a name.
    """
    # A tied parameter has several names, and `trainable` has only the first of them.
    all_names = [
        (name, tensor)
        for name, tensor in model.named_parameters(remove_duplicate=False)
        if tensor.requires_grad
    ]
    selected_ids: set[int] = set()
    for prefix in [names] if isinstance(names, str) else names:
        # The added dot makes `layer` match `layer.weight`, but not `layer2.weight`.
        matching = {id(tensor) for name, tensor in all_names if f"{name}.".startswith(f"{prefix}.")}
        if not matching:
            raise UsageError(
                f"parameters={prefix!r}: expected one of {', '.join(trainable)}, or a module that"
                " contains some of them"
            )
        selected_ids |= matching
    return {name: tensor for name, tensor in trainable.items() if id(tensor) in selected_ids}


@contextlib.contextmanager
def _bind_copies(model: nn.Module, copies: dict[str, Tensor]) -> Iterator[None]:
    """Make the model compute with copies of its tensors and with twice-differentiable kernels."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(reparametrized(model, copies, tie_weights=True))
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.enter_context(_UnfusedWeightNorm())
        # The fused kernels of recurrent layers can be differentiated only once.
        if any(isinstance(module, nn.RNNBase) for module in model.modules()):
            stack.enter_context(torch.backends.mkldnn.flags(enabled=False))
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        if is_compiler_loaded():  # Compiled code can be differentiated only once.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


class _UnfusedWeightNorm(TorchFunctionMode):
    """Inside the block, weight norms are computed without torch's fused kernel."""

    def __torch_function__(
        self,
        function: Callable[..., Nested],
        types: Sequence[type],
        args: Sequence[Nested] = (),
        kwargs: dict[str, Nested] | None = None,
    ) -> Nested:
        """Call a function of torch; compute a weight norm from its definition.

        The second derivatives of torch's fused kernel for weight norms are wrong.
        """
        kwargs = kwargs or {}
        if function is weight_norm:
            return _unfused_weight_norm(*args, **kwargs)
        return function(*args, **kwargs)


def _unfused_weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """Return g v / ‖v‖, where the norm is taken over all dimensions except `dim`.

    The parameters have the names and the default of the function that this one replaces, which may
    be called with positional or named arguments.
    """
    return v * (g / torch.norm_except_dim(v, 2, dim))


def _linearize_by_graph(
    objective: Callable[[], Tensor], points: list[Tensor]
) -> tuple[Tensor, list[Tensor], Product]:
    """Compute the loss and its gradients, and return them with a function for Hessian products.

    The function takes k tangents for each point, (k, …), and differentiates autograd's graph of the
    gradients for each of them.

    Raises:
        UsageError: If torch cannot differentiate the loss twice.
    """
    try:
        with torch.enable_grad():
            loss = objective()
            gradients = torch.autograd.grad(loss, points, create_graph=True, materialize_grads=True)
        if any(gradient.layout != torch.strided for gradient in gradients):
            raise UsageError("the loss has sparse gradients: use embeddings with sparse=False")
        # The other gradients are constants, which contribute nothing to a product.
        varying = [index for index, gradient in enumerate(gradients) if gradient.requires_grad]

        def product(*tangents: Tensor) -> list[Tensor]:
            """Return the product with each of k vectors; `tangents` has their parts, by point."""
            if not varying:
                return [torch.zeros_like(tangent) for tangent in tangents]
            outputs = [gradients[index] for index in varying]
            rows = []
            for row in range(len(tangents[0])):
                vectors = [tangents[index][row] for index in varying]
                rows.append(
                    torch.autograd.grad(
                        outputs, points, vectors, retain_graph=True, materialize_grads=True
                    )
                )
            return [torch.stack(column) for column in zip(*rows, strict=True)]

        # An operation without second derivatives raises its error here, not in a later product.
        product(*[torch.zeros_like(point)[None] for point in points])
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        line = _line_of_failure(objective, points)
        # The first match, which for other causes is that of the empty text.
        remedy = next(words for cause, words in SECOND_DERIVATIVES.items() if cause in reason)
        message = (
            f"the loss has no second derivatives that torch can compute: {reason}; {remedy}{line}"
        )
        raise UsageError(message) from error
    return loss.detach(), [gradient.detach() for gradient in gradients], product


def _line_of_failure(objective: Callable[[], Tensor], points: list[Tensor]) -> str:
    """Find the user's line whose operation has no second derivative.

    torch records lines only if anomaly detection is on, so the loss is computed and differentiated
    again. This raises the same `RuntimeError` again. Before the error, anomaly detection issues a
    warning with the traceback of the forward call.

    Returns:
        The end of an error message, such as " (at train.py:7: y = f(x))"; empty if no line is
        known.
    """
    with (
        warnings.catch_warnings(record=True, action="always") as caught,
        torch.autograd.detect_anomaly(check_nan=False),
        torch.enable_grad(),
        contextlib.suppress(RuntimeError),
    ):
        gradients = torch.autograd.grad(
            objective(), points, create_graph=True, materialize_grads=True
        )
        varying = [gradient.sum() for gradient in gradients if gradient.requires_grad]
        torch.autograd.grad(varying, points, materialize_grads=True)
    lines = [line_of_forward_call(str(warning.message)) for warning in caught]
    # The last warning belongs to the error. Earlier ones may have other causes.
    return next((f" (at {line})" for line in reversed(lines) if line), "")


def _line_of_node(objective: Callable[[], Tensor], name: str) -> str:
    """Find the user's line that made a node of autograd's graph.

    torch records lines only if anomaly detection is on, so the loss is computed again.

    Args:
        objective: A function that computes the loss.
        name: The name of the node's class. If several nodes have it, the first one is taken.

    Returns:
        The end of an error message, such as " (at train.py:7: y = f(x))"; empty if no line is
        known.
    """
    with (
        warnings.catch_warnings(action="ignore"),
        torch.autograd.detect_anomaly(check_nan=False),
        torch.enable_grad(),
    ):
        nodes = [node for node in graph_nodes(objective()) if type(node).__name__ == name]
    metadata: Nested = nodes[0].metadata if nodes else {}
    # Anomaly detection stores the traceback of the forward call under this name.
    line = line_of_forward_call("".join(metadata.get("traceback_", ())))
    return f" (at {line})" if line else ""
