"""What cannot be is refused in one clear line that names it."""

import functools
import math

import pytest
import torch
from saddle_problems import FLOAT64, SIX_SCALES, escape
from torch import nn

import gpulab as gl

MSE = nn.functional.mse_loss
BATCH = SIX_SCALES, SIX_SCALES
SADDLE = gl.saddles.linear_autoencoder_saddle(SIX_SCALES, [1, 2])
MINIMUM = gl.saddles.linear_autoencoder_saddle(SIX_SCALES, [0, 1])
NAN = torch.full((4, 4), math.nan)
UNSYMMETRIC = torch.ones(90, 90).triu()


def network(value=0.5):
    net = gl.models.LinearAutoencoder(6, 2)
    for parameter in net.parameters():
        nn.init.constant_(parameter, value)
    return net


def search(net=None, **options):
    return gl.saddles.find_critical_point(net or network(), MSE, BATCH, progress=False, **options)


def curvature(net="autoencoder", **options):
    return gl.saddles.curvature_along(net, profile="smoke", frames=40, progress=False, **options)


saddle_of = gl.saddles.linear_autoencoder_saddle
leave = functools.partial(escape, SADDLE)
leave_table = functools.partial(gl.saddles.escape_table, SADDLE, progress=False)
lanczos, density = gl.saddles.lanczos, gl.saddles.spectral_density
REQUESTS = {
    "tolerance=0": lambda: search(tolerance=0),
    "max_steps=0": lambda: search(max_steps=0),
    "training mode": lambda: search(nn.Sequential(nn.Linear(6, 6), nn.Dropout())),
    r"\(3, 4\): expected \(n, n\)": lambda: lanczos(torch.eye(4)[:3]),
    "torch.int32: expected torch.float32": lambda: lanczos(torch.eye(4).int()),
    "shape str: expected": lambda: lanczos("a matrix"),
    "k=5: expected a whole number from 1 to 4": lambda: lanczos(torch.eye(4), 5),
    "k=0": lambda: lanczos(torch.eye(4), 0),
    "which='SA': expected one of smallest, largest": lambda: lanczos(torch.eye(4), which="SA"),
    "tolerance=-1": lambda: lanczos(torch.eye(4), tolerance=-1),
    "max_products=0": lambda: lanczos(torch.eye(4), max_products=0),
    "probes=0": lambda: density(torch.eye(3), probes=0),
    "steps=1.5": lambda: density(torch.eye(3), steps=1.5),
    "probes=3: expected 6 or more": lambda: gl.saddles.trace(torch.eye(30), 3),
    "component 6: the data have 6, numbered from 0 to 5": lambda: saddle_of(SIX_SCALES, [6]),
    "component -1": lambda: saddle_of(SIX_SCALES, [-1]),
    "each can be held once": lambda: saddle_of(SIX_SCALES, [1, 1]),
    "whole numbers": lambda: saddle_of(SIX_SCALES, [0.5]),
    "sequence of whole numbers": lambda: saddle_of(SIX_SCALES, 3),
    "hidden=1: expected a whole number from 2": lambda: saddle_of(SIX_SCALES, [0, 1], hidden=1),
    "hidden=1.5": lambda: saddle_of(SIX_SCALES, [0], hidden=1.5),
    "hidden=0": lambda: gl.models.LinearAutoencoder(4, 0),
    "extent=inf: expected a distance above 0": lambda: gl.saddles.landscape(
        SADDLE.model, MSE, BATCH, progress=False
    ).slice(extent=math.inf),
    "no direction leads down": lambda: escape(MINIMUM),
    "no critical point|no direction": lambda: escape(search(max_steps=1)),
    "those of the saddle are": lambda: gl.saddles.escape(nn.Linear(6, 6), SADDLE),
    "steps=0": lambda: leave(steps=0),
    "batch_size=101: expected a whole number from 1 to 100": lambda: leave(batch_size=101),
    "perturbation=-1.0": lambda: leave(perturbation=-1.0),
    "radius=0.0": lambda: leave(radius=0.0),
    "learning_rate=0.0": lambda: leave(learning_rate=0.0),
    "'gpu': expected a device": lambda: leave("gpu"),
    "each needs one or more": lambda: leave_table([]),
    r"learning_rate=0.1: optimizers=\{'adam'": lambda: leave_table(optimizers={"adam": [1e-3]}, learning_rate=0.1),
    "'lion': expected sgd, momentum, rmsprop, adam, or a function": lambda: leave(optimizer="lion"),
    "LBFGS needs a closure": lambda: leave(optimizer=torch.optim.LBFGS),
    "it returned a list, no torch.optim.Optimizer": lambda: leave(optimizer=lambda weights, **_: weights),
    "not called with weights and lr=": lambda: leave(optimizer=lambda weights: torch.optim.SGD(weights)),
    "does not use the learning rate it is given": lambda: leave(
        optimizer=lambda weights, lr: torch.optim.SGD(weights, min(lr, 1e-9))
    ),
    "Invalid epsilon": lambda: leave(optimizer=functools.partial(torch.optim.Adam, eps=-1.0)),
    "SparseAdam does not support dense": lambda: leave(optimizer=torch.optim.SparseAdam),
    "expected one or more of each": lambda: curvature(seeds=0),
    "setting 'gpu': expected a device": lambda: curvature(setting="gpu"),
    "snapshots=0: expected a whole number from 1": lambda: curvature(snapshots=0),
    "evaluated=0": lambda: curvature(evaluated=0),
    "model 'resnet': expected one of": lambda: curvature("resnet"),
}
DATA = {
    "values that are not finite": lambda: search(network(math.nan)),
    "H @ v has 8 values that are not finite": lambda: lanczos(NAN),
    "H @ v has values that are not finite": lambda: density(NAN, probes=1),
    "not symmetric": lambda: lanczos(UNSYMMETRIC),
    "the operator is not symmetric": lambda: density(UNSYMMETRIC),
    "the operator is not symmetric: two elements differ": lambda: gl.saddles.index(torch.ones(9, 9).triu()),
    r"shape \(3,\)": lambda: saddle_of(torch.zeros(3), [0]),
    r"shape \(0, 3\)": lambda: saddle_of(torch.zeros(0, 3), [0]),
    "2 of 4 values are not finite": lambda: saddle_of(torch.tensor([[1.0, math.nan], [math.inf, 0.0]]), [0]),
    "data of type str": lambda: saddle_of("digits", [0]),
    "not finite; learning_rate=1e": lambda: leave(learning_rate=1e200, perturbation=1e-2, radius=1e300),
    "a slope needs 3": lambda: leave_table([FLOAT64], perturbations=[1e-3], steps=3).slope(),
}


@pytest.mark.parametrize("words", REQUESTS | DATA)
def test_what_cannot_be_is_one_clear_line(words):
    with pytest.raises(gl.UsageError if words in REQUESTS else gl.DataError, match=words) as error:
        (REQUESTS | DATA)[words]()
    assert "\n" not in str(error.value)
