"""PredNet and the autoencoder in JAX: pure functions of the weights, named as in torch."""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import same_start
from same_start import batches, begun, computed, final_loss, weights_of

from companion.first_windows import Computed
from gpulab.errors import GpulabError
from gpulab.settings import Setting
from gpulab.training._networks import NetworkRun

try:
    import jax
    import jax.numpy as jnp
    from jax import Array, lax
    from jax.nn import relu, sigmoid
except ImportError:
    raise same_start.MissingLibraryError("JAX", "jax") from None

NPROC = os.environ.get("NPROC")  # the number of JAX's threads on a CPU, if it is set
BETAS, EPSILON = (0.9, 0.999), 1e-8
Weights = dict[str, Array]
State = list[tuple[Array, Array, Array]]  # R, c and P of each layer, as in `gpulab.models.prednet`


# --- the networks ---------------------------------------------------------------------------------


def conv(weights: Weights, name: str, x: Array) -> Array:
    """Compute a convolution of x (B, C, H, W) that keeps the size."""
    # On a CPU, XLA's convolutions are ten times slower in the body of a loop
    # (github.com/jax-ml/jax/issues/12868).
    library = functools.partial(lax.conv, window_strides=(1, 1), padding="SAME")
    y = lax.platform_dependent(x, weights[f"{name}.weight"], cpu=as_product, default=library)
    return y + weights[f"{name}.bias"][:, None, None]


def as_product(x: Array, kernel: Array) -> Array:
    """Compute the same as one product of the kernel (O, I, k, k) with shifted copies of x."""
    out, into, k, _ = kernel.shape
    (_, _, height, width), edge = x.shape, k // 2
    wide = jnp.pad(x, ((0, 0), (0, 0), (edge, edge), (edge, edge)))
    places = [
        wide[:, :, top : top + height, left : left + width] for top in range(k) for left in range(k)
    ]
    return jnp.einsum("oik,bikhw->bohw", kernel.reshape(out, into, k * k), jnp.stack(places, 2))


def conv_lstm(weights: Weights, name: str, inputs: list[Array], cell: Array) -> tuple[Array, Array]:
    """Return the new hidden state and cell of a convolutional LSTM; the last input is the old."""
    i, f, g, o = jnp.split(conv(weights, f"{name}.gates", jnp.concatenate(inputs, 1)), 4, axis=1)
    peep_i, peep_f, peep_o = (weights[f"{name}.peep_{gate}"] for gate in "ifo")
    new_cell = sigmoid(i + peep_i * cell) * jnp.tanh(g) + sigmoid(f + peep_f * cell) * cell
    return sigmoid(o + peep_o * cell) * jnp.tanh(new_cell), new_cell


def predict(weights: Weights, state: State, frame: Array) -> tuple[State, Array]:
    """Return PredNet's state and prediction after a frame (B, C, H, W)."""
    errors: list[Array] = []
    for layer, (_, _, prediction) in enumerate(state):
        target = (
            max_pool(relu(conv(weights, f"conv_a.{layer - 1}", errors[-1]))) if layer else frame
        )
        errors.append(relu(jnp.concatenate([target - prediction, prediction - target], 1)))
    following: State = []
    for layer, (r, c, _) in reversed([*enumerate(state)]):
        above = [jnp.repeat(jnp.repeat(following[0][0], 2, 2), 2, 3)] if following else []
        r, c = conv_lstm(weights, f"lstm.{layer}", [errors[layer], *above, r], c)
        p = relu(conv(weights, f"conv_p.{layer}", r))
        following.insert(0, (r, c, p if layer else jnp.minimum(p, 1)))
    return following, following[0][2]


def max_pool(x: Array) -> Array:
    """Return the largest of every 2×2 pixels."""
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")


def chained(weights: Weights, state: State) -> State:
    """Return the same state, each P but the lowest chained to its convolution: see `PredNet`."""
    lowest, *above = state
    again = [conv(weights, f"conv_p.{layer}", r) for layer, (r, _, _) in enumerate(above, 1)]
    again = [made - lax.stop_gradient(made) for made in again]
    return [
        lowest,
        *((r, c, p + (p > 0) * zero) for (r, c, p), zero in zip(above, again, strict=True)),
    ]


def prednet_loss(
    truncation: str, weights: Weights, state: State, frames: Array
) -> tuple[Array, tuple[Array, State]]:
    """Return the summed and separate errors of frames (T, B, C, H, W), and the state after them."""
    state = {"loss": chained, "state": lambda _, before: before}[truncation](weights, state)
    state, predictions = lax.scan(functools.partial(predict, weights), state, frames[:-1])
    errors = jnp.square(predictions - frames[1:]).mean((1, 2, 3, 4))
    return errors.sum(), (errors, state)


def autoencoder_loss(
    weights: Weights, state: State, images: Array
) -> tuple[Array, tuple[Array, State]]:
    """Return the mean squared error of an image (1, 1, H, W), as `prednet_loss`, and no state."""
    pixels = x = images.reshape(len(images), -1)
    names = [name.removesuffix(".weight") for name in weights if name.endswith(".weight")]
    for name in names:
        x = x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]
        x = sigmoid(x) if name == names[-1] else relu(x)
    errors = jnp.square(x - pixels).mean(1)
    return errors.mean(), (errors, state)


# --- training -------------------------------------------------------------------------------------


def adam(weights: Weights, moments: Any, gradient: Weights, rate: float) -> tuple[Weights, Any]:
    """Return the weights after an update by Adam, and its moments: step and two running means."""
    step, mean, square = moments
    step, (beta1, beta2) = step + 1, BETAS
    mean = jax.tree.map(lambda m, g: beta1 * m + (1 - beta1) * g, mean, gradient)
    square = jax.tree.map(lambda v, g: beta2 * v + (1 - beta2) * g * g, square, gradient)
    # 1 − βᵗ is not computed from a power in float32, which would make the first 1 − 0.999 wrong by
    # 5e-5.
    unbias1, unbias2 = (-jnp.expm1(step * math.log(beta)) for beta in BETAS)
    weights = jax.tree.map(
        lambda w, m, v: w - rate / unbias1 * m / (jnp.sqrt(v / unbias2) + EPSILON),
        weights,
        mean,
        square,
    )
    return weights, (step, mean, square)


@functools.partial(jax.jit, static_argnums=0)
def train_window(loss: Any, carried: Any, window: Array, rate: float) -> tuple[Any, Array]:
    """Update on each batch of a window; return `carried` (weights, moments, state) and losses."""

    def update(carried: Any, batch: Array) -> tuple[Any, Array]:
        weights, moments, state = carried
        gradient, (errors, state) = jax.grad(loss, has_aux=True)(weights, state, batch)
        return (*adam(weights, moments, gradient, rate), state), errors

    return lax.scan(update, carried, window)


def losses_of(spec: NetworkRun, loss: Any) -> Iterator[float]:
    """Train as specified; yield the mean loss of each window."""
    with on(spec.setting):
        weights = jax.tree.map(jnp.asarray, weights_of(spec))
        zeros = jax.tree.map(jnp.zeros_like, weights)
        moments, state = (
            (jnp.zeros((), weights[next(iter(weights))].dtype), zeros, zeros),
            blank(weights),
        )
        for window, restart in batches(spec):
            carried = (weights, moments, blank(weights) if restart else state)
            (weights, moments, state), errors = train_window(
                loss, carried, window, spec.configuration["learning_rate"]
            )
            yield float(np.mean(errors, dtype=float))


def blank(weights: Weights) -> State:
    """Return PredNet's state before the first frame, all zeros; none for the autoencoder."""
    zeros = [jnp.zeros_like(array) for name, array in weights.items() if name.endswith("peep_i")]
    return [(zero, zero, zero) for zero in zeros]


@contextlib.contextmanager
def on(setting: Setting) -> Iterator[None]:
    """Compute on the setting's device, in its precision and threads, or raise `GpulabError`."""
    if os.environ.get("NPROC") != (wanted := str(setting.threads) if setting.threads else NPROC):
        try:
            # JAX refuses to change this once it has started, which is when it reads NPROC.
            for count in ((usual := jax.config.jax_num_cpu_devices) + 1, usual):
                jax.config.update("jax_num_cpu_devices", count)
        except RuntimeError:
            raise GpulabError(
                f"setting {str(setting)!r}: JAX chooses its threads once per process; use"
                " gpulab.Experiment"
            ) from None
        os.environ.update({"NPROC": wanted} if wanted else {})
    try:
        device = jax.devices(setting.kind)[int(setting.device.partition(":")[2] or 0)]
    except (RuntimeError, IndexError) as error:
        raise GpulabError(f"setting {str(setting)!r} cannot run here: JAX: {error}") from None
    products = {
        None: jax.config.jax_default_matmul_precision,
        True: "tensorfloat32",
        False: "highest",
    }[setting.tf32]
    with (
        jax.default_device(device),
        jax.default_matmul_precision(products),
        jax.enable_x64(setting.precision == "float64"),
    ):
        yield


# --- what gpulab calls ----------------------------------------------------------------------------


def prednet(seed: int, setting: Setting, size: str = "quick", truncation: str = "loss") -> float:
    """Train the published PredNet with the weights, frames and protocol of `gpulab.train`.

    The settings are `cpu` and `cuda`, with `threads`, `tf32` and `precision` (float32 or float64).
    Other settings raise an error.

    Examples:
        >>> from gpulab import train
        >>> run = train(
        ...     "benchmarks/peers/in_jax.py:prednet",
        ...     model_options={"size": "smoke"},
        ...     progress=False,
        ... )
        >>> run.status, 0.03 < run.final_loss < 0.06
        ('finished', True)

    References:
        Pietrowski et al. 2021, *Impact of GPU uncertainty on the training of predictive deep neural
        networks* (arXiv 2109.01451); Bradbury et al. 2018, *JAX: composable transformations of
        Python+NumPy programs*.
    """
    return final_loss(windows("prednet", seed, setting, size, truncation=truncation))


def autoencoder(seed: int, setting: Setting, size: str = "quick") -> float:
    """Train the autoencoder as `gpulab.train("autoencoder")` does; everything else as `prednet`.

    Examples:
        >>> from gpulab import train
        >>> run = train(
        ...     "benchmarks/peers/in_jax.py:autoencoder",
        ...     model_options={"size": "smoke"},
        ...     progress=False,
        ... )
        >>> run.status, 0.03 < run.final_loss < 0.06
        ('finished', True)
    """
    return final_loss(windows("autoencoder", seed, setting, size))


def windows(net: str, seed: int, setting: Setting, size: str, **options: str) -> Iterator[float]:
    """Train; yield the mean loss of each window when it is done."""
    loss = functools.partial(prednet_loss, options["truncation"]) if options else LOSSES[net]
    return losses_of(begun(net, seed, setting, size, **options), loss)


def first_window(
    net: str, setting: Setting | str = "cpu", seed: int = 0, size: str = "quick"
) -> Computed:
    """Return losses and gradient of the first window before any update, as `FirstWindow.gradient`.

    Examples:
        >>> first_window("autoencoder", size="smoke").losses.shape
        torch.Size([20])
    """
    spec = begun(net, seed, Setting.parse(setting), size)
    with on(spec.setting):
        weights = jax.tree.map(jnp.asarray, weights_of(spec))
        window, _ = next(batches(spec))
        gradients = jax.jit(jax.vmap(jax.grad(LOSSES[net], has_aux=True), (None, None, 0)))
        gradient, (errors, _) = gradients(weights, blank(weights), window)
        return computed(spec, errors, {name: array.sum(0) for name, array in gradient.items()})


LOSSES = {"prednet": functools.partial(prednet_loss, "loss"), "autoencoder": autoencoder_loss}
