import re

import pytest
import torch

import gpulab as gl


def images(count, size=(28, 28)):
    return torch.rand(count, 1, *size, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("hidden", "size"), [((128, 32), (28, 28)), ((5,), (28, 28)), ([64, 16, 8], (6, 10))])
@torch.no_grad()
def test_images_come_back_in_their_shape_and_in_0_to_1(hidden, size):
    net = gl.models.Autoencoder(hidden, size)
    made = net(images(3, size))
    assert made.shape == (3, 1, *size)
    assert 0 < made.min() < made.max() < 1
    widths = [layer.out_features for layer in net.layers if isinstance(layer, torch.nn.Linear)]
    assert widths == [*hidden, *reversed(hidden[:-1]), size[0] * size[1]]


@torch.no_grad()
def test_the_layers_are_those_of_the_docstring_written_out():
    net, picture = gl.models.Autoencoder((6, 3), (4, 5)), images(1, (4, 5))
    assert [p.shape for p in net.parameters()] == [(6, 20), (6,), (3, 6), (3,), (6, 3), (6,), (20, 6), (20,)]
    a, b, c, d = (layer for layer in net.layers if isinstance(layer, torch.nn.Linear))
    for layer in (a, b, c, d):
        layer.bias += 0.1
    code = (picture.flatten() @ a.weight.T + 0.1).clamp(min=0)
    code = (code @ b.weight.T + 0.1).clamp(min=0)
    code = (code @ c.weight.T + 0.1).clamp(min=0)
    expected = 1 / (1 + torch.exp(-(code @ d.weight.T + 0.1)))
    torch.testing.assert_close(net(picture).flatten(), expected, rtol=0, atol=1e-6)


def test_images_of_another_shape_and_widths_and_batch_sizes_that_make_no_sense_are_refused():
    for shape in ((1, 28, 28), (2, 3, 28, 28), (2, 1, 28, 27), (2, 784)):
        with pytest.raises(gl.UsageError, match=rf"{re.escape(str(shape))}.*expected \(B, 1, 28, 28\)"):
            gl.models.Autoencoder()(torch.zeros(shape))
    for options in ({"hidden": ()}, {"hidden": (8, -1)}, *({"batch_size": n} for n in (0, -1, 2.0, "4"))):
        with pytest.raises(gl.UsageError, match=f"{next(iter(options))}="):
            gl.models.Autoencoder(**options)


def test_batch_size_says_how_many_images_an_update_sees():
    window = torch.rand(20, 1, 28, 28)
    assert [len(batch) for batch in gl.models.Autoencoder().batches(window)] == 20 * [1]
    batches = list(gl.models.Autoencoder(batch_size=8).batches(window))
    assert [len(batch) for batch in batches] == [8, 8, 4]
    assert (torch.cat(batches) == window).all()
    net = gl.models.Autoencoder(batch_size=8)
    loss, each, _ = net.training_loss(window[:8], None)
    assert each.tolist() == 8 * [loss.item()]
    assert loss.item() == pytest.approx((net(window[:8]) - window[:8]).square().mean().item(), rel=1e-6)
    run = gl.train("autoencoder", profile="smoke", frames=40, model_options={"batch_size": 8}, progress=False)
    assert run.history.step.iloc[-1] == 6  # two windows of three updates
