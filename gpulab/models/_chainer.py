"""Read the `.model` files of the authors' Chainer code.

These are NumPy archives with an array for each parameter.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from gpulab.errors import DataError, describe_error, printable
from gpulab.files import read

GATES = "ifco"  # the letters of the gates in Chainer's names, in the order of `ConvLSTM.gates`
MAX_FILE_BYTES = 1 << 31  # the largest size of a file, and of its unpacked content


class _Cell(Protocol):
    """The attributes of a `ConvLSTM` that are used here, besides its peepholes."""

    groups: tuple[int, ...]
    gates: nn.Conv2d


class _PredNet(Protocol):
    """The attributes of a `PredNet` that are used here; its module imports this one."""

    fresh: bool
    conv_a: Sequence[nn.Conv2d]
    conv_p: Sequence[nn.Conv2d]

    def __init__(self, channels: Sequence[int], size: tuple[int, int]) -> None: ...

    @property
    def lstm(self) -> Sequence[_Cell]: ...


Network = TypeVar("Network", bound=_PredNet)


def read_chainer(file: str | Path, network: type[Network]) -> Network:
    """Read a network of the class `network` from a `.model` file.

    Raises:
        DataError: If the file has no such network. The message names the file.
    """
    arrays = _read_arrays(Path(file))
    # Each layer has one convolution for its prediction.
    layers = sum(re.fullmatch(r"ConvP\d+/W", name) is not None for name in arrays)
    try:
        channels = [arrays[f"ConvP{layer}/W"].shape[0] for layer in range(layers)]
        height, width = arrays["ConvLSTM0/c_i/W"].shape[2:]
        # A network on the meta device has no memory, and this subclass draws no random numbers. Its
        # shapes are compared with those in the file before a real network is made.
        shape_only_class = type(network.__name__, (network,), {"draw_weights": lambda *_: None})
        with torch.device("meta"):
            empty_net = shape_only_class(channels, (height, width))
    except (KeyError, ValueError, IndexError, RuntimeError) as error:
        names_found = ", ".join(sorted(arrays)[:4]) or "nothing"
        raise DataError(
            f"{file}: not a PredNet saved by the authors' code; it contains {names_found}, …:"
            f" {describe_error(error)}"
        ) from None
    expected_views = chainer_views(empty_net, lambda parameter: parameter)
    expected = {name: tuple(view.shape) for name, view in expected_views.items()}
    shapes = {name: array.shape for name, array in arrays.items()}
    mismatched = sorted(
        name for name in expected | shapes if expected.get(name) != shapes.get(name)
    )
    if mismatched:
        raise DataError(
            f"{file}: not a PredNet of {len(channels)} layers: these arrays are missing, unknown"
            f" or of the wrong shape: {', '.join(mismatched)}"
        )
    net = network(channels, (height, width))
    for name, view in chainer_views(net, lambda parameter: parameter.data).items():
        view.copy_(torch.from_numpy(arrays[name]))
    net.fresh = False
    return net


def chainer_views(net: _PredNet, select: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Return views of a network's parameters, by the names that Chainer gives to these parts.

    In Chainer each gate has a convolution for each group of inputs. Here a single convolution
    computes all gates, so its weight is split. `select` is called with each parameter and returns
    the tensor to split.
    """

    def weight_and_bias(conv: nn.Conv2d) -> tuple[Tensor, Tensor]:
        assert conv.bias is not None, "every convolution of a PredNet has a bias"
        return select(conv.weight), select(conv.bias)

    views = {}
    for layer, conv in enumerate(net.conv_a, start=1):
        views[f"ConvA{layer}/W"], views[f"ConvA{layer}/b"] = weight_and_bias(conv)
    for layer, conv in enumerate(net.conv_p):
        views[f"ConvP{layer}/W"], views[f"ConvP{layer}/b"] = weight_and_bias(conv)
    for layer, cell in enumerate(net.lstm):
        prefix = f"ConvLSTM{layer}"
        weights, biases = (tensor.chunk(4) for tensor in weight_and_bias(cell.gates))
        for gate, weight, bias in zip(GATES, weights, biases, strict=True):
            *inputs, hidden = weight.split(cell.groups, dim=1)  # the hidden state is the last group
            views[f"{prefix}/h_{gate}/W"] = hidden
            views[f"{prefix}/h_{gate}/b"] = bias
            for number, group in enumerate(inputs):
                if group.shape[1]:  # The top layer has no inputs from above.
                    views[f"{prefix}/x_{gate}{number}/W"] = group
        for gate in "ifo":
            views[f"{prefix}/c_{gate}/W"] = select(getattr(cell, f"peep_{gate}"))
    return views


def _read_arrays(file: Path) -> dict[str, np.ndarray]:
    """Read the arrays of a NumPy archive as float32.

    Raises:
        DataError: If the file is damaged, or if values are not finite floating-point numbers.
    """
    content = read(file, MAX_FILE_BYTES)
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as archive:
            if sum(entry.file_size for entry in archive.zip.infolist()) > MAX_FILE_BYTES:
                raise ValueError(f"it unpacks to more than {MAX_FILE_BYTES:,} bytes")
            # The authors wrap the network in a classifier, which adds a prefix to every name.
            arrays = {
                printable(name.removeprefix("predictor/")): archive[name] for name in archive.files
            }
        for name, array in arrays.items():
            if array.dtype.kind != "f":
                raise ValueError(
                    f"{name} is of type {array.dtype}; expected floating-point numbers"
                )
            with np.errstate(over="ignore"):
                arrays[name] = array.astype(np.float32)
            if not np.isfinite(arrays[name]).all():
                raise ValueError(f"{name} holds numbers that are not finite in float32")
    except Exception as error:  # zipfile and NumPy raise errors of many types for damaged files.
        raise DataError(
            f"{file}: not a model saved by Chainer (a NumPy archive): {describe_error(error)}"
        ) from None
    return arrays
