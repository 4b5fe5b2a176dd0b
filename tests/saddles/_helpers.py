"""Helpers of several test files: data, matrices and networks whose Hessians are known."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import gpulab as gl
from gpulab.errors import UnsupportedError
from gpulab.saddles import _hessian as hessians

DOUBLE = torch.float64
FLOAT64 = "cpu:precision=float64"
TOKENS = torch.tensor([[1, 2, 2], [0, 6, 1]])


def rand(*shape, seed=1):
    return torch.randn(shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


def scaled_data(samples, *scales):
    """Draw independent normal numbers, with a column for each standard deviation."""
    return rand(samples, len(scales), seed=0) * torch.tensor(scales)


SIX_SCALES = scaled_data(100, 2.0, 1.6, 1.2, 0.9, 0.6, 0.3)
SADDLE = gl.saddles.linear_autoencoder_saddle(SIX_SCALES, [1, 2])


def hessian_by(method, *arguments, **options):
    """Return the Hessian; for `reverse over reverse`, make forward over reverse fail first."""

    def follow_nothing(*_):
        raise UnsupportedError("nothing is followed here")

    with pytest.MonkeyPatch.context() as patch:
        if method == hessians.REVERSE:
            patch.setattr(hessians, "hessian_product", follow_nothing)
        return gl.hessian(*arguments, **options)


def symmetric(values, seed=0):
    """Return a dense float64 matrix with these eigenvalues."""
    turn = torch.linalg.qr(rand(len(values), len(values), seed=seed)).Q
    matrix = turn @ torch.diag(torch.as_tensor(values, dtype=DOUBLE)) @ turn.T
    return (matrix + matrix.T) / 2


def escape(
    saddle=SADDLE,
    setting=FLOAT64,
    optimizer="sgd",
    rate=None,
    perturbation=0.0,
    batch_size=None,
    **options,
):
    """Return one escape: its row as attributes, and its `history`."""
    options |= {
        "optimizers": {optimizer: [rate]},
        "perturbations": [perturbation],
        "batch_sizes": [batch_size],
    }
    escapes = gl.saddles.escape_table(saddle, [setting], **options, progress=False)
    return SimpleNamespace(**escapes.table.iloc[0], history=escapes.paths)


class Model(nn.Module):
    """Layers and tensors by name, and a function that uses them."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if isinstance(part, torch.Tensor) else part)

    def forward(self, *inputs):
        return self.function(self, *inputs)


def on_rows(function, **parts):
    return Model(function, **parts), rand(5, 3)


def of_layer(function):
    """Return a function that makes the model of a function that uses one layer."""

    def make():
        return on_rows(function, layer=nn.Linear(3, 4))

    return make


def language_model(padding=None):
    table, head = nn.Embedding(7, 4, padding_idx=padding), nn.Linear(4, 7, bias=False)
    head.weight = table.weight
    return nn.Sequential(table, nn.Linear(4, 4), nn.Tanh(), head), TOKENS


def problem(make):
    """Return a model in float64 with weights from seed 0, and its inputs."""
    torch.manual_seed(0)
    model, inputs = make()
    return model.double().eval(), inputs


def loss_of(model, inputs):
    """Return the sum of squares, so that the curvatures of the model and of the loss both count."""
    return (torch.tanh(model(inputs)) ** 2).mean()
