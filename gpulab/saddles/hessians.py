"""The Hessian of a loss, as a linear operator that is never written out."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.stateless import _reparametrize_module

from gpulab.errors import DataError, UnsupportedError, UsageError
from gpulab.saddles._forward import linearize_gradient

Loss = Callable[..., Tensor]
Batch = tuple[Any, Any]
Product = Callable[..., list[Tensor]]
FORWARD, REVERSE = "forward over reverse", "reverse over reverse"
METHODS = ("auto", FORWARD, REVERSE)
MOST_AT_ONCE = 10
ROOM = {"cpu": 2**28, "cuda": 3 * 2**30}  # bytes for the tangents of vectors that go through together


class Hessian:
    """The symmetric (n, n) matrix of second derivatives of a loss, known by its products.

    `H @ v` is a product with a vector (n,), or with k vectors at once (n, k), of the operator's
    `dtype` and on its `device`; k vectors cost much less than k times one. The operator keeps the weights
    it was made from: a model that goes on training does not change it. `hessian` makes one.

    Attributes:
        parameters: From names to the tensors that were differentiated; vectors are these, flattened, in this order.
        loss: The loss at that point.
        gradient: (n,) the gradient there.
        shape: (n, n).
        method: How products are made. `forward over reverse`: the gradient was written down as a list of
            operations, and each product is its derivative along the vector, on a GPU in a CUDA graph.
            `reverse over reverse`: autograd's own graph of the gradient is kept, and differentiated each time.
        at_once: How many vectors of `H @ V` go through together.
    """

    def __init__(
        self, objective: Callable[[], Tensor], parameters: dict[str, Tensor], method: str, at_once: int | None
    ) -> None:
        self.parameters = parameters
        first = next(iter(parameters.values()))
        self.dtype, self.device = first.dtype, first.device
        size = sum(tensor.numel() for tensor in parameters.values())
        self.shape = (size, size)
        self.method, loss, gradients, self._product = _differentiate(objective, list(parameters.values()), method)
        self.loss = float(loss)
        self.gradient: Float[Tensor, " n"] = self.flatten(gradients)
        if at_once is None:  # as many as fit into the memory that is set aside for them
            room = ROOM["cuda" if self.device.type == "cuda" else "cpu"]
            at_once = max(1, min(MOST_AT_ONCE, room // max(1, getattr(self._product, "bytes", room))))
        self.at_once = at_once

    def __matmul__(self, vectors: Float[Tensor, "n ..."]) -> Float[Tensor, "n ..."]:
        if not isinstance(vectors, Tensor) or vectors.shape[:1] != self.shape[:1] or vectors.ndim > 2:
            shape = tuple(getattr(vectors, "shape", ())) or type(vectors).__name__
            raise UsageError(f"H @ {shape}: expected a tensor of shape ({self.shape[0]},) or ({self.shape[0]}, k)")
        if (vectors.dtype, vectors.device) != (self.dtype, self.device):
            raise UsageError(f"H @ v: v is {vectors.dtype} on {vectors.device}, H {self.dtype} on {self.device}")
        if vectors.ndim == 1:
            return self._rows(vectors[None])[0]
        products = torch.empty_like(vectors)
        for first in range(0, vectors.shape[1], self.at_once):
            some = slice(first, first + self.at_once)
            products[:, some] = self._rows(vectors[:, some].T).T
        return products

    @torch.no_grad()
    def _rows(self, vectors: Float[Tensor, "k n"]) -> Float[Tensor, "k n"]:
        shapes = [tensor.shape for tensor in self.parameters.values()]
        pieces = vectors.split([shape.numel() for shape in shapes], dim=1)
        tangents = [piece.reshape(len(vectors), *shape) for piece, shape in zip(pieces, shapes, strict=True)]
        return torch.cat([product.reshape(len(vectors), -1) for product in self._product(*tangents)], dim=1)

    def split(self, vector: Float[Tensor, " n"]) -> dict[str, Tensor]:
        """The parts of a vector (n,) that belong to each parameter, in its shape."""
        pieces = vector.split([tensor.numel() for tensor in self.parameters.values()])
        return {n: piece.view_as(t) for piece, (n, t) in zip(pieces, self.parameters.items(), strict=True)}

    def flatten(self, tensors: Iterable[Tensor]) -> Float[Tensor, " n"]:
        """One vector (n,) from tensors in the shapes and the order of the parameters."""
        return torch.cat([tensor.reshape(-1) for tensor in tensors])

    def dense(self) -> Float[Tensor, "n n"]:
        """The whole matrix (n, n), by as many products as it has columns."""
        return self @ torch.eye(self.shape[0], dtype=self.dtype, device=self.device)

    def __repr__(self) -> str:
        return f"Hessian of {self.shape[0]:,} parameters, {self.dtype} on {self.device}, loss {self.loss:.6g}"


def hessian(
    model: nn.Module,
    loss: Loss,
    batch: Batch | None = None,
    *,
    parameters: str | Sequence[str] | None = None,
    method: str = "auto",
    at_once: int | None = None,
) -> Hessian:
    """The Hessian of `loss(model(inputs), targets)` for `batch = (inputs, targets)`, as a linear operator.

    Args:
        model: With parameters in float32 or float64, on any device.
        loss: Of outputs and targets; without a batch, any function of the model, `loss()`. Returns a scalar.
        batch: Inputs and targets.
        parameters: The names of those to differentiate by, or of the layers that hold them (`"layers.0"`);
            the others are constants.
        method: One of `Hessian`'s, or `auto`: the first where it can.
        at_once: How many vectors of `H @ V` go through together: more are faster and take more memory.

    Returns:
        The operator: `H @ v`, `H.gradient`, `H.loss`.

    Raises:
        UsageError: For a model in training mode that draws random numbers or keeps statistics, for a loss that is
            not a scalar, does not depend on the parameters or has no second derivatives, for unknown parameters.
        DataError: For weights or a loss that are not finite.

    Examples:
        >>> layer = torch.nn.Linear(3, 1, bias=False).double()
        >>> x, y = torch.randn(50, 3, dtype=torch.float64), torch.randn(50, 1, dtype=torch.float64)
        >>> H = hessian(layer, torch.nn.functional.mse_loss, (x, y))
        >>> torch.allclose(H @ torch.ones(3, dtype=torch.float64), 2 / 50 * x.T @ x.sum(1))
        True

    References:
        Pearlmutter 1994, *Fast exact multiplication by the Hessian* (Neural Computation 6).
    """
    if method not in METHODS:
        raise UsageError(f"method={method!r}: expected one of {', '.join(METHODS)}")
    if at_once is not None and (not isinstance(at_once, int) or at_once < 1):
        raise UsageError(f"at_once={at_once!r}: expected a whole number from 1")
    for name, module in model.named_modules():
        drops = isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
        drops = drops or (isinstance(module, nn.RNNBase) and module.dropout > 0)
        if module.training and (drops or isinstance(module, nn.modules.batchnorm._BatchNorm)):
            # The loss would be another function each time.
            raise UsageError(f"{name or 'the model'} ({type(module).__name__}) is in training mode: call model.eval()")
    # Copies: the model may go on training while the operator lives.
    points = {n: t.detach().clone().requires_grad_() for n, t in _select(model, parameters).items()}
    for name, tensor in points.items():
        if not tensor.isfinite().all():
            raise DataError(f"{name} has {int((~tensor.isfinite()).sum())} values that are not finite")

    def objective() -> Tensor:
        with _reparametrize_module(model, points, tie_weights=True), _twice_differentiable_kernels(model):
            value = loss() if batch is None else loss(model(batch[0]), batch[1])
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise UsageError(f"the loss is {getattr(value, 'shape', type(value).__name__)}: expected a scalar tensor")
        if not value.requires_grad:
            raise UsageError("the loss does not depend on the parameters by operations that torch can differentiate")
        if not math.isfinite(float(value.detach())):
            raise DataError(f"the loss is {float(value.detach())}: expected a finite number")
        return value

    return Hessian(objective, points, method, at_once)


def _select(model: nn.Module, names: str | Sequence[str] | None) -> dict[str, Tensor]:
    """The parameters of these names, or of the modules of these names."""
    every: dict[str, Tensor] = {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}
    selected = every
    if names is not None:
        prefixes = [names] if isinstance(names, str) else list(names)
        for prefix in prefixes:
            if not any(name == prefix or name.startswith(prefix + ".") for name in every):
                raise UsageError(f"parameters={prefix!r}: expected one of {', '.join(every)}, or a module of theirs")
        selected = {n: t for n, t in every.items() if any(n == p or n.startswith(p + ".") for p in prefixes)}
    if not selected:
        raise UsageError(f"{type(model).__name__} has no parameters that require gradients")
    kinds = {(tensor.dtype, tensor.device) for tensor in selected.values()}
    if len(kinds) > 1 or next(iter(kinds))[0] not in (torch.float32, torch.float64):
        raise UsageError(f"parameters of {sorted(map(str, kinds))}: expected float32 or float64, all on one device")
    return selected


@contextlib.contextmanager
def _twice_differentiable_kernels(model: nn.Module) -> Iterator[None]:
    """Choose kernels that can be differentiated twice, where torch has others too."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if any(isinstance(module, nn.RNNBase) for module in model.modules()):
            stack.enter_context(torch.backends.mkldnn.flags(enabled=False))
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        yield


def _differentiate(
    objective: Callable[[], Tensor], points: list[Tensor], method: str
) -> tuple[str, Tensor, list[Tensor], Product]:
    """(the method used, the loss, its gradients, products of tangents (k, …) of the points)."""
    if method != REVERSE:
        try:
            return FORWARD, *linearize_gradient(objective, points)
        except UnsupportedError:
            if method == FORWARD:
                raise
    try:
        with torch.enable_grad():
            loss = objective()
            gradients = torch.autograd.grad(loss, points, create_graph=True, materialize_grads=True)
        varying = [place for place, gradient in enumerate(gradients) if gradient.requires_grad]

        def product(*tangents: Tensor) -> list[Tensor]:
            if not varying:
                return [torch.zeros_like(tangent) for tangent in tangents]
            outputs, rows = [gradients[place] for place in varying], []
            for row in range(len(tangents[0])):
                vectors = [tangents[place][row] for place in varying]
                rows.append(torch.autograd.grad(outputs, points, vectors, retain_graph=True, materialize_grads=True))
            return [torch.stack(column) for column in zip(*rows, strict=True)]

        product(*[torch.zeros_like(point)[None] for point in points])  # to fail here and not later
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(f"the loss has no second derivatives that torch can compute: {reason}") from error
    return REVERSE, loss.detach(), [gradient.detach() for gradient in gradients], product
