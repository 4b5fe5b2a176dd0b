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


saddle_of = gl.saddles.linear_autoencoder_saddle
leave = functools.partial(escape, SADDLE)
leave_table = functools.partial(gl.saddles.escape_table, SADDLE, progress=False)
extremes, density = gl.saddles.extreme_eigenpairs, gl.saddles.spectral_density
REQUESTS = {
    "tolerance=1.0: expected a number between 0 and 1": lambda: extremes(torch.eye(4), tolerance=1.0),
    "batch_size=101: expected a whole number from 1 to 100": lambda: leave(batch_size=101),
    "training mode": lambda: search(nn.Sequential(nn.Linear(6, 6), nn.Dropout())),
    "component 6: the data have 6, numbered from 0 to 5": lambda: saddle_of(SIX_SCALES, [6]),
    "each can be held once": lambda: saddle_of(SIX_SCALES, [1, 1]),
    "no direction leads down": lambda: escape(MINIMUM),
    "'lion': expected sgd, momentum, rmsprop, adam, or a function": lambda: leave(optimizer="lion"),
    "it returned a list, no torch.optim.Optimizer": lambda: leave(optimizer=lambda weights, **_: weights),
    "does not use the learning rate it is given": lambda: leave(
        optimizer=lambda weights, lr: torch.optim.SGD(weights, min(lr, 1e-9))
    ),
}
DATA = {
    "values that are not finite": lambda: search(network(math.nan)),
    "H @ v has values that are not finite": lambda: density(NAN, probes=1),
    "not symmetric": lambda: extremes(UNSYMMETRIC),
    "the operator is not symmetric: two elements differ": lambda: gl.saddles.index(torch.ones(9, 9).triu()),
    "2 of 4 values are not finite": lambda: saddle_of(torch.tensor([[1.0, math.nan], [math.inf, 0.0]]), [0]),
    "not finite; learning_rate=1e": lambda: leave(learning_rate=1e200, perturbation=1e-2, radius=1e300),
    "a slope needs 3": lambda: leave_table([FLOAT64], perturbations=[1e-3], steps=3).slope(),
}


@pytest.mark.parametrize("words", REQUESTS | DATA)
def test_what_cannot_be_is_one_clear_line(words):
    with pytest.raises(gl.UsageError if words in REQUESTS else gl.DataError, match=words) as error:
        (REQUESTS | DATA)[words]()
    assert "\n" not in str(error.value)
