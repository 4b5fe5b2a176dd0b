import pytest
import torch

import gpulab as gl


@pytest.mark.parametrize(("hidden", "size"), [((128, 32), (28, 28)), ((5,), (4, 5)), ([64, 16, 8], (6, 10))])
@torch.no_grad()
def test_the_layers_are_those_of_the_docstring_written_out(hidden, size):
    net, pictures = gl.models.Autoencoder(hidden, size), torch.rand(3, 1, *size)
    layers = [layer for layer in net.layers if isinstance(layer, torch.nn.Linear)]
    assert [layer.out_features for layer in layers] == [*hidden, *reversed(hidden[:-1]), size[0] * size[1]]
    assert sum(p.numel() for p in net.parameters()) == sum(layer.weight.numel() + len(layer.bias) for layer in layers)
    code = pictures.flatten(1)
    for layer in layers:
        layer.bias += 0.1
        before = code @ layer.weight.T + 0.1
        code = before.clamp(min=0)
    expected = 1 / (1 + torch.exp(-before))
    torch.testing.assert_close(net(pictures), expected.view_as(pictures), rtol=0, atol=1e-6)


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
