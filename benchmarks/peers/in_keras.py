"""PredNet and the autoencoder in Keras 3 on TensorFlow, with channels-last frames."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import same_start
from same_start import batches, begun, computed, final_loss, weights_of

from companion.first_windows import Computed
from gpulab.errors import GpulabError
from gpulab.settings import Setting
from gpulab.training._networks import NetworkRun

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
# While loading, TensorFlow prints only errors.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
try:
    import keras
    import tensorflow as tf
    from keras import layers, ops
except ImportError:
    raise same_start.MissingLibraryError("Keras on TensorFlow", "keras") from None
if keras.backend.backend() != "tensorflow":
    raise GpulabError(
        f"Keras uses {keras.backend.backend()}; start Python with KERAS_BACKEND=tensorflow"
    )

TO_KERAS = {1: (0,), 2: (1, 0), 4: (2, 3, 1, 0)}  # axes of torch's weights, by their number
State = list[tuple[Any, Any, Any]]  # R, c and P of each layer, as in `gpulab.models.prednet`


# --- the networks ---------------------------------------------------------------------------------


class ConvLSTM(layers.Layer):
    """A convolutional LSTM with peepholes."""

    def __init__(self, channels: int, size: tuple[int, int]) -> None:
        super().__init__()
        self.peep_i, self.peep_f, self.peep_o = (
            self.add_weight(shape=(*size, channels)) for _ in "ifo"
        )
        self.gates = layers.Conv2D(4 * channels, 3, padding="same")

    def call(self, inputs: list[Any], cell: Any) -> tuple[Any, Any]:
        """Return the new hidden state and cell; the last input is the old hidden state."""
        i, f, g, o = ops.split(self.gates(ops.concatenate(inputs, -1)), 4, axis=-1)
        new_cell = (
            ops.sigmoid(i + self.peep_i * cell) * ops.tanh(g)
            + ops.sigmoid(f + self.peep_f * cell) * cell
        )
        return ops.sigmoid(o + self.peep_o * cell) * ops.tanh(new_cell), new_cell


class PredNet(keras.Model):
    """The published PredNet: given a state and a frame (B, H, W, C), it returns the next state.

    The prediction of the next frame is the P of the lowest layer.
    """

    def __init__(
        self, channels: list[int], size: tuple[int, int], truncation: str = "loss"
    ) -> None:
        super().__init__()
        self.truncation = truncation
        self.shapes = [
            (1, size[0] >> layer, size[1] >> layer, here) for layer, here in enumerate(channels)
        ]
        self.conv_a = [
            layers.Conv2D(here, 3, padding="same", activation="relu") for here in channels[1:]
        ]
        self.conv_p = [layers.Conv2D(here, 3, padding="same") for here in channels]
        self.lstm = [ConvLSTM(shape[-1], shape[1:3]) for shape in self.shapes]
        self.pool, self.upsample = layers.MaxPooling2D(), layers.UpSampling2D()
        state = self.blank()
        self(state, state[0][0])  # This call creates the weights.

    def blank(self) -> State:
        """Return the state before the first frame, all zeros."""
        return [(ops.zeros(shape),) * 3 for shape in self.shapes]

    def call(self, state: State, frame: Any) -> State:
        """Process one frame: the errors from the bottom up, then the states from the top down."""
        errors: list[Any] = []
        for layer, (_, _, prediction) in enumerate(state):
            target = self.pool(self.conv_a[layer - 1](errors[-1])) if layer else frame
            errors.append(ops.relu(ops.concatenate([target - prediction, prediction - target], -1)))
        following: State = []
        for layer, (r, c, _) in reversed([*enumerate(state)]):
            above = [self.upsample(following[0][0])] if following else []
            r, c = self.lstm[layer]([errors[layer], *above, r], c)
            p = ops.relu(self.conv_p[layer](r))
            following.insert(0, (r, c, p if layer else ops.minimum(p, 1.0)))
        return following

    def chained(self, state: State) -> State:
        """Return the same state, with each P but the lowest chained to its convolution."""
        lowest, *above = state
        again = [conv(r) for conv, (r, _, _) in zip(self.conv_p[1:], above, strict=True)]
        again = [made - ops.stop_gradient(made) for made in again]
        return [
            lowest,
            *(
                (r, c, p + ops.where(p > 0, zero, 0))
                for (r, c, p), zero in zip(above, again, strict=True)
            ),
        ]

    def window_loss(self, state: State, frames: Any) -> tuple[Any, Any, State]:
        """Return the summed and separate errors of frames (T, B, H, W, C), and the final state."""
        state = {"loss": self.chained, "state": lambda before: before}[self.truncation](state)
        states = tf.scan(self, frames[:-1], state)  # the states after every frame
        predictions, state = states[0][2], tf.nest.map_structure(lambda each: each[-1], states)
        errors = ops.mean(ops.square(predictions - frames[1:]), axis=(1, 2, 3, 4))
        return ops.sum(errors), errors, state


class Autoencoder(keras.Sequential):
    """A fully connected autoencoder, with ReLU inside and a sigmoid at the end."""

    def __init__(self, widths: list[int]) -> None:
        inside = [layers.Dense(width, activation="relu") for width in widths[1:-1]]
        super().__init__(
            [layers.Input(widths[:1]), *inside, layers.Dense(widths[-1], activation="sigmoid")]
        )

    def blank(self) -> State:
        """Return an empty state."""
        return []

    def window_loss(self, state: State, images: Any) -> tuple[Any, Any, State]:
        """Return the mean squared error of an image (1, 1, H, W, 1), as `PredNet.window_loss`."""
        pixels = ops.reshape(images, (images.shape[0], -1))
        errors = ops.mean(ops.square(self(pixels) - pixels), axis=1)
        return ops.mean(errors), errors, state


# --- training -------------------------------------------------------------------------------------


class Adam(keras.optimizers.Adam):
    """Adam with epsilon added to √v̂ as in torch and algorithm 1 of the paper, unlike in Keras.

    The rest is that of Keras, which rounds β to float32 before it computes 1 − βᵗ: its first steps
    are off by some 1e-5.
    """

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Update one variable."""
        step = ops.cast(self.iterations + 1, variable.dtype)
        self.epsilon = 1e-8 * ops.sqrt(1 - ops.power(ops.cast(self.beta_2, variable.dtype), step))
        super().update_step(gradient, variable, learning_rate)


def begin(spec: NetworkRun) -> Any:
    """Return the specified network with its weights."""
    net: Any = spec.model
    if spec.experiment == "prednet":
        model: Any = PredNet(net.channels, net.size, net.truncation)
    else:
        pixels, *hidden = [layer.in_features for layer in net.layers[::2]]
        model = Autoencoder([pixels, *hidden, pixels])
    arrays = [array.transpose(TO_KERAS[array.ndim]) for array in weights_of(spec).values()]
    model.set_weights(
        [array.reshape(own.shape) for array, own in zip(arrays, model.weights, strict=True)]
    )
    return model


def gradient_of(model: Any, state: State, frames: Any) -> tuple[list[Any], Any, State]:
    """Return the gradient of each variable, the errors, and the next state."""
    with tf.GradientTape() as tape:
        loss, errors, state = model.window_loss(state, frames)
    return tape.gradient(loss, model.trainable_variables), errors, state


def losses_of(spec: NetworkRun) -> Iterator[float]:
    """Train as specified; yield the mean loss of each window."""
    with on(spec.setting):
        model, optimizer = begin(spec), Adam(spec.configuration["learning_rate"])
        optimizer.build(model.trainable_variables)

        @tf.function(autograph=False)
        def update(state: State, frames: Any) -> tuple[Any, State]:
            gradient, errors, state = gradient_of(model, state, frames)
            optimizer.apply(gradient)
            return errors, state

        state = model.blank()
        for window, restart in batches(spec):
            state, errors = model.blank() if restart else state, []
            for batch in channels_last(window):
                loss, state = update(state, batch)
                errors.append(loss)
            yield float(np.mean(errors, dtype=float))


def channels_last(frames: npt.NDArray[Any]) -> Any:
    """Return batches (n, t, B, C, H, W) as tensors (n, t, B, H, W, C)."""
    return tf.constant(np.moveaxis(frames, -3, -1))


@contextlib.contextmanager
def on(setting: Setting) -> Iterator[None]:
    """Compute on the setting's device, in its precision and threads, or raise `GpulabError`."""
    kind, _, number = setting.device.partition(":")
    name = f"{'gpu' if kind == 'cuda' else kind}:{number or 0}"
    try:
        tf.config.threading.set_intra_op_parallelism_threads(setting.threads or 0)
        tf.config.threading.set_inter_op_parallelism_threads(setting.threads or 0)
    except RuntimeError:
        raise GpulabError(
            f"setting {str(setting)!r}: TensorFlow chooses its threads once per process; use"
            " gpulab.Experiment"
        ) from None
    if name not in {
        device.name.partition("device:")[2].lower() for device in tf.config.list_logical_devices()
    }:
        raise GpulabError(f"setting {str(setting)!r} cannot run here: TensorFlow finds no {name}")
    usual = keras.config.floatx(), tf.config.experimental.tensor_float_32_execution_enabled()
    try:
        _switch(setting.precision or "float32", usual[1] if setting.tf32 is None else setting.tf32)
        with tf.device(name):
            yield
    finally:
        _switch(*usual)


def _switch(precision: str, tf32: bool) -> None:
    keras.config.set_floatx(precision)  # the type of tensors
    keras.config.set_dtype_policy(precision)  # the type of layers
    tf.config.experimental.enable_tensor_float_32_execution(tf32)


# --- what gpulab calls ----------------------------------------------------------------------------


def prednet(seed: int, setting: Setting, size: str = "quick", truncation: str = "loss") -> float:
    """Train the published PredNet; everything else as `in_jax.prednet`.

    Examples:
        >>> from gpulab import train
        >>> run = train(
        ...     "benchmarks/peers/in_keras.py:prednet",
        ...     model_options={"size": "smoke"},
        ...     progress=False,
        ... )
        >>> run.status, 0.03 < run.final_loss < 0.06
        ('finished', True)

    References:
        Abadi et al. 2016, *TensorFlow: a system for large-scale machine learning* (OSDI).
    """
    return final_loss(windows("prednet", seed, setting, size, truncation=truncation))


def autoencoder(seed: int, setting: Setting, size: str = "quick") -> float:
    """Train the autoencoder; everything else as `prednet`."""
    return final_loss(windows("autoencoder", seed, setting, size))


def windows(net: str, seed: int, setting: Setting, size: str, **options: str) -> Iterator[float]:
    """Train; yield the mean loss of each window when it is done."""
    return losses_of(begun(net, seed, setting, size, **options))


def first_window(
    net: str, setting: Setting | str = "cpu", seed: int = 0, size: str = "quick"
) -> Computed:
    """Return losses and gradient of the first window, before any update, as in `in_jax`."""
    spec = begun(net, seed, Setting.parse(setting), size)
    with on(spec.setting):
        model, (window, _) = begin(spec), next(batches(spec))
        steps = [gradient_of(model, model.blank(), batch) for batch in channels_last(window)]
    gradient = {}
    for place, (name, p) in enumerate(spec.model.named_parameters()):
        axes = TO_KERAS[p.ndim]
        summed = np.sum([arrays[place] for arrays, _, _ in steps], axis=0).reshape(
            [p.shape[axis] for axis in axes]
        )
        gradient[name] = summed.transpose(np.argsort(axes))
    return computed(spec, [errors for _, errors, _ in steps], gradient)
