"""A network cut over two devices computes what it computes on one."""

import copy

import pytest
import torch

import gpulab as gl
from gpulab.models import Autoencoder, PredNet
from gpulab.training.engines import Engines
from gpulab.training.model_parallel import begin_split, memory_per_part, split
from gpulab.training.plan import plan_run
from gpulab.training.run import heldout_loss, set_up, train_to_the_end

CARDS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="this machine has not two CUDA GPUs")
PLACES = [("cpu", "cpu"), pytest.param(("cuda:0", "cuda:1"), marks=CARDS)]
FILMS = {"model_options": {"channels": [3, 4, 6], "size": (8, 12)}, "data_options": {"size": (8, 12)}}
NETS = {"autoencoder": {"model_options": {"hidden": [16, 8]}}, "prednet": FILMS}


@pytest.mark.parametrize("devices", PLACES)
@pytest.mark.parametrize("name", NETS)
def test_a_split_network_has_the_same_losses(name, devices):
    def whole_network(plan):
        training = set_up(plan)
        return training, Engines(plan, training)

    def trained(begin_with_engine):
        plan = plan_run(name, **NETS[name], profile="smoke", frames=100, fast=False, setting="cpu:precision=float64")
        plan.draw_weights()
        training, engine = begin_with_engine(plan)
        train_to_the_end(plan, training, engine)
        return [note.loss for note in training.history], heldout_loss(plan, training.model)

    whole, held = trained(whole_network)
    parts, parts_held = trained(lambda plan: begin_split(plan, devices))
    assert parts == pytest.approx(whole, abs=1e-10)
    assert parts_held == pytest.approx(held, abs=1e-10)


def test_what_a_layer_reads_is_brought_to_its_device():
    """The device `meta` has shapes and no numbers: whatever is not brought there is an error."""
    net = split(PredNet((3, 4), (8, 12)), ["meta", "meta"])
    losses = net.training_loss(torch.rand(3, 1, 3, 8, 12, device="meta"), None)[0]
    assert losses.device.type == "meta"
    halves = split(PredNet((3, 4, 6), (8, 12)), ["cpu", "meta"])
    state = halves.initial_state(torch.rand(1, 3, 8, 12))
    assert [layer.r.device.type for layer in state] == ["cpu", "cpu", "meta"]
    with pytest.raises(NotImplementedError, match="meta"):  # the way back, of what has no numbers
        split(Autoencoder((16, 8)), ["cpu", "meta"])(torch.rand(2, 1, 28, 28))


def test_memory_per_part():
    net = Autoencoder((16, 8))
    batch = torch.rand(5, 1, 28, 28)
    (whole,) = memory_per_part(split(copy.deepcopy(net), ["cpu"]), batch, 1)
    parts = memory_per_part(split(net, ["cpu", "cpu"]), batch, 2)
    count = sum(p.numel() for p in net.parameters())
    assert whole["weights"] == 4 * count
    assert [part["weights"] for part in parts] == [4 * (785 * 16 + 17 * 8), 4 * (9 * 16 + 17 * 784)]
    assert sum(part["activations"] for part in parts) == whole["activations"]
    assert all(part["activations"] > 0 and part["optimizer"] == 3 * part["weights"] for part in parts)


def test_what_cannot_be_split_is_refused():
    with pytest.raises(gl.UsageError, match="2 layers over 3"):
        split(Autoencoder((8,)), ["cpu"] * 3)
    with pytest.raises(gl.UsageError, match="Whitener: an Autoencoder or a PredNet"):
        split(gl.models.Whitener(), ["cpu"] * 2)
