"""What a batch may be, of `hessian`, `landscape` and `find_critical_point` alike; anything else is refused by name."""

from collections import UserDict

import pytest
import torch
from saddle_problems import rand
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import gpulab as gl

INPUTS, TARGETS = rand(10, 2), rand(10, 1, seed=2)
MSE = F.mse_loss


class Named(nn.Linear):
    """A layer whose inputs have a name, as those of language models."""

    def __init__(self):
        super().__init__(2, 1, bias=False, dtype=torch.float64)
        with torch.no_grad():
            self.weight.fill_(0.5)

    def forward(self, features):
        return super().forward(features)


class OnlyOutputs(nn.Module):
    def forward(self, outputs):
        return outputs.square().mean()


def labelled(outputs, batch):
    return MSE(outputs, batch["labels"])


def loader(*tensors):
    return DataLoader(TensorDataset(*tensors), batch_size=4, shuffle=True)


MAPPING = {"features": INPUTS, "labels": TARGETS, "unused": torch.ones(3)}
ROWS = [{"features": x, "labels": y} for x, y in zip(INPUTS, TARGETS, strict=True)]
SQUARED = {"features": INPUTS}, lambda outputs, _: outputs.square().mean()
BATCHES = {
    "a pair": ((INPUTS, TARGETS), MSE),
    "a list, as a DataLoader gives": ([INPUTS, TARGETS], nn.MSELoss()),
    "a pair with a dictionary": (({"features": INPUTS}, TARGETS), MSE),
    "a mapping with labels": (UserDict(MAPPING), labelled),
    "a loader, of batches of 4, 4 and 2": (loader(INPUTS, TARGETS), MSE),
    "a loader of mappings": (DataLoader(ROWS, 4), labelled),
}
OUTPUTS_ALONE = {
    "a tensor": (INPUTS, lambda outputs: outputs.square().mean()),
    "a tensor of two rows is not a pair": (INPUTS[:2], OnlyOutputs()),
    "a dictionary": SQUARED,
}


@pytest.mark.parametrize("kind", BATCHES | OUTPUTS_ALONE)
def test_each_kind_of_batch_gives_the_loss_of_all_its_examples(kind):
    net, (batch, loss) = Named(), (BATCHES | OUTPUTS_ALONE)[kind]
    x = batch if isinstance(batch, torch.Tensor) else INPUTS
    expected = gl.hessian(net, lambda: MSE(net(x), TARGETS) if kind in BATCHES else net(x).square().mean())
    H, around = gl.hessian(net, loss, batch), gl.saddles.landscape(net, loss, batch)
    assert H.loss == pytest.approx(expected.loss, rel=1e-14)
    torch.testing.assert_close(H.dense(), expected.dense(), rtol=0, atol=1e-13)
    assert around.slice(0, extent=1.0, places=3).loss[1] == pytest.approx(expected.loss, rel=1e-14)
    point = gl.saddles.find_critical_point(net.float(), loss, batch, progress=False)
    assert point.found
    assert float(point.objective(point.model).detach()) == pytest.approx(point.loss, abs=1e-15)
    torch.testing.assert_close(point.hessian().dense(), expected.dense(), rtol=0, atol=1e-12)


def test_a_function_of_nothing_asks_the_model_and_a_search_on_a_copy_cannot():
    net = Named()
    H = gl.hessian(net, lambda: MSE(net(INPUTS), TARGETS))
    torch.testing.assert_close(H.dense(), gl.hessian(net, MSE, (INPUTS, TARGETS)).dense())
    with pytest.raises(gl.UsageError, match="a copy of the model: give a batch"):
        gl.saddles.find_critical_point(net, lambda: net(INPUTS).sum(), None)


REFUSED = {
    "loss=mse_loss needs targets, and the batch is a tensor": (INPUTS, MSE),
    r"loss=mse_loss takes arguments, and there is no batch": (None, MSE),
    "loss=<lambda> does not take outputs and targets": ((INPUTS, TARGETS), lambda: 0),
    "batch is a tuple of 3": ((INPUTS, TARGETS, TARGETS), MSE),
    "batch is a list of 1": ([INPUTS], MSE),
    "batch is a str": ("batch", MSE),
    "batch is a generator": ((pair for pair in [(INPUTS, TARGETS)]), MSE),
    "the DataLoader given as a batch has none": (DataLoader([]), MSE),
    "batch is a list of 1 ": (loader(INPUTS), MSE),
    "a batch of the DataLoader, a list, has no tensor": (DataLoader(["a", "b"]), MSE),
    "Named got a pair as its one input": (((INPUTS, INPUTS), TARGETS), MSE),
}


@pytest.mark.parametrize("words", REFUSED)
def test_anything_else_is_refused_by_name(words):
    batch, loss = REFUSED[words]
    for function in (gl.hessian, gl.saddles.landscape, gl.saddles.find_critical_point)[: 2 if batch is None else 3]:
        with pytest.raises(gl.UsageError, match=words.strip()):
            function(Named(), loss, batch)


def test_a_saddle_on_other_data_than_a_pair_of_tensors_has_no_escape():
    net = nn.Sequential(nn.Linear(2, 1, bias=False), nn.Linear(1, 2, bias=False)).double()
    for parameter in net.parameters():
        nn.init.constant_(parameter, 1e-3)
    point = gl.saddles.find_critical_point(net, MSE, loader(INPUTS, INPUTS), progress=False)
    assert point.found
    assert len(point.batch) == 3
    with pytest.raises(gl.UsageError, match="no pair of tensors"):
        gl.saddles.escape(point, progress=False)
