"""Reads the `.model` files of the authors' Chainer code: NumPy archives, one array a parameter."""

from __future__ import annotations

import re
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpulab.errors import DataError, UsageError

GATES = "ifco"


def read_chainer(file: str | Path, network: Callable[..., Any]) -> Any:
    """The `network` in a `.model` file; `DataError`, naming the file, for anything that is not one."""
    arrays = _read_arrays(Path(file))
    layers = sum(re.fullmatch(r"ConvP\d+/W", name) is not None for name in arrays)
    try:
        channels = [arrays[f"ConvP{layer}/W"].shape[0] for layer in range(layers)]
        height, width = arrays["ConvLSTM0/c_i/W"].shape[2:]
        net = network(channels, (height, width))
    except UsageError as error:
        raise DataError(f"{file}: not a PredNet of the authors: {error}") from None
    except (KeyError, ValueError, IndexError):
        found = ", ".join(sorted(arrays)[:4]) or "nothing"
        raise DataError(f"{file}: not a PredNet of the authors (found {found}, …)") from None
    views = chainer_views(net, lambda parameter: parameter.data)
    missing, unknown = sorted(views.keys() - arrays), sorted(arrays.keys() - views)
    if missing or unknown:
        raise DataError(f"{file}: not a PredNet of {len(channels)} layers: missing {missing}, unknown {unknown}")
    for name, view in views.items():
        if tuple(view.shape) != arrays[name].shape:
            raise DataError(f"{file}: {name} has shape {arrays[name].shape}, expected {tuple(view.shape)}")
        view.copy_(torch.from_numpy(arrays[name]))
    net.fresh = False
    return net


def chainer_views(net: Any, of: Callable[[Any], Tensor]) -> dict[str, Tensor]:
    """Chainer's name → the part of a parameter that it names, of its data or gradient: `of(parameter)`.

    Chainer gives each gate a convolution per group of inputs; here one convolution holds them all.
    """
    views = {}
    for layer, conv in enumerate(net.conv_a, start=1):
        views[f"ConvA{layer}/W"], views[f"ConvA{layer}/b"] = of(conv.weight), of(conv.bias)
    for layer, conv in enumerate(net.conv_p):
        views[f"ConvP{layer}/W"], views[f"ConvP{layer}/b"] = of(conv.weight), of(conv.bias)
    for layer, cell in enumerate(net.lstm):
        prefix = f"ConvLSTM{layer}"
        weights, biases = of(cell.gates.weight).chunk(4), of(cell.gates.bias).chunk(4)
        for gate, weight, bias in zip(GATES, weights, biases, strict=True):
            *inputs, hidden = weight.split(cell.groups, dim=1)
            views[f"{prefix}/h_{gate}/W"], views[f"{prefix}/h_{gate}/b"] = hidden, bias
            for number, group in enumerate(inputs):
                if group.shape[1]:
                    views[f"{prefix}/x_{gate}{number}/W"] = group
        for gate in "ifo":
            views[f"{prefix}/c_{gate}/W"] = of(getattr(cell, f"peep_{gate}"))
    return views


def _read_arrays(file: Path) -> dict[str, np.ndarray]:
    try:
        archive = np.load(file, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise ValueError("one array, not an archive of them")
        with archive:
            # The authors wrap the network in a classifier, which adds a prefix to every name.
            return {name.removeprefix("predictor/"): archive[name].astype(np.float32) for name in archive.files}
    except FileNotFoundError:
        raise DataError(f"{file}: no such file") from None
    except (OSError, ValueError, EOFError, zlib.error, zipfile.BadZipFile) as error:
        raise DataError(f"{file}: not a model saved by Chainer (a NumPy archive): {error}") from None
