"""The batches that `hessian`, `landscape` and `find_critical_point` accept.

The error for any other batch names its type.
"""

from collections import UserDict
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import gpulab as gl
from tests.saddles._helpers import DOUBLE, rand

INPUTS, TARGETS = rand(10, 2), rand(10, 1, seed=2)
MSE = F.mse_loss
FUNCTIONS = gl.hessian, gl.saddles.landscape, gl.saddles.find_critical_point


def network():
    return nn.Linear(2, 1, bias=False, dtype=DOUBLE)


def labelled(outputs, batch):
    return MSE(outputs, batch["labels"])


def loader(*tensors):
    return DataLoader(TensorDataset(*tensors), batch_size=4, shuffle=True)


MAPPING = {"input": INPUTS, "labels": TARGETS, "unused": torch.ones(3)}
ROWS = [{"input": x, "labels": y} for x, y in zip(INPUTS, TARGETS, strict=True)]
BATCHES = {
    "a pair": ((INPUTS, TARGETS), MSE),
    "a list, as a DataLoader gives": ([INPUTS, TARGETS], nn.MSELoss()),
    "a pair with a dictionary": (({"input": INPUTS}, TARGETS), MSE),
    "a mapping with labels": (UserDict(MAPPING), labelled),
    "a loader, of batches of 4, 4 and 2": (loader(INPUTS, TARGETS), MSE),
    "a loader of mappings": (DataLoader(ROWS, 4), labelled),
    "a tensor, also of two rows": (INPUTS[:2], lambda outputs: outputs.square().mean()),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_batch_of_each_kind_gives_the_loss_of_all_its_examples(kind):
    net, (batch, loss) = network(), BATCHES[kind]
    x, y = (
        (batch, torch.zeros(len(batch), 1))
        if isinstance(batch, torch.Tensor)
        else (INPUTS, TARGETS)
    )
    expected = gl.hessian(net, lambda: MSE(net(x), y))
    H, around = gl.hessian(net, loss, batch), gl.saddles.landscape(net, loss, batch)
    assert H.loss == pytest.approx(expected.loss, rel=1e-14)
    torch.testing.assert_close(H.dense(), expected.dense(), rtol=0, atol=1e-13)
    assert around.slice(0, extent=1.0, places=3).loss[1] == pytest.approx(expected.loss, rel=1e-14)
    point = gl.saddles.find_critical_point(net.float(), loss, batch, progress=False)
    assert point.found
    torch.testing.assert_close(point.hessian().dense(), expected.dense(), rtol=0, atol=1e-12)


def no_loss():
    return 0


class RefusedBatch(NamedTuple):
    """A batch with a loss that does not fit, and a pattern of the error message."""

    id: str
    batch: object
    message: str
    loss: Callable = MSE


REFUSED_BATCHES = [
    RefusedBatch("tensor", INPUTS, "loss=mse_loss needs targets, but the batch is a tensor"),
    RefusedBatch("none", None, "loss=mse_loss takes arguments, but there is no batch"),
    RefusedBatch(
        "loss without arguments",
        (INPUTS, TARGETS),
        "loss=no_loss does not take outputs and targets",
        no_loss,
    ),
    RefusedBatch("tuple of 3", (INPUTS, TARGETS, TARGETS), "got a tuple of 3"),
    RefusedBatch("list of 1", loader(INPUTS), "got a list of 1"),
    RefusedBatch(
        "generator",
        (pair for pair in [(INPUTS, TARGETS)]),
        "batch is a generator without tensors",
    ),
    RefusedBatch(
        "rows that differ",
        DataLoader([(torch.ones(8, 2), torch.ones(2, 1))] * 2, batch_size=None),
        r"tensors of \[2, 8\] rows",
    ),
    RefusedBatch("pair as input", ((INPUTS, INPUTS), TARGETS), "Linear received a pair"),
]


@pytest.mark.parametrize("case", REFUSED_BATCHES, ids=lambda case: case.id)
def test_batch_of_another_kind_is_refused_by_name(case):
    functions = FUNCTIONS
    if case.batch is None:
        functions = FUNCTIONS[:2]
    for function in functions:
        with pytest.raises(gl.UsageError, match=case.message):
            function(network(), case.loss, case.batch)
