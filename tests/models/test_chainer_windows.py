"""The published network, compared window by window with the authors' own in stock Chainer
(make_chainer_windows.py).
"""

from pathlib import Path

import numpy as np
import pytest
import torch

import gpulab as gl
from gpulab.data._feed import Loader
from gpulab.models._chainer import chainer_views

FILE = Path(__file__).with_name("chainer_windows.npz")


@pytest.fixture(scope="module")
def chainer():
    with np.load(FILE) as archive:
        return {name: archive[name] for name in archive.files}


def windows(chainer):
    """Split the frames into windows as the published loop does: each begins with the last frame
    of the window before.
    """
    count = sum(name.startswith("losses") for name in chainer)
    frames, length = chainer["frames"], len(chainer["frames"]) // count
    return [frames[max(0, number * length - 1) : (number + 1) * length] for number in range(count)]


def network(chainer, truncation="loss"):
    """Make a network with the weights with which Chainer began."""
    net = gl.models.PredNet((3, 4, 8), chainer["frames"].shape[2:], truncation=truncation)
    place = 0
    for _, weights in sorted(chainer_views(net, lambda parameter: parameter.data).items()):
        weights.copy_(
            torch.from_numpy(
                chainer["weights"][place : (place := place + weights.numel())]
            ).view_as(weights)
        )
    return net


class ChainersAdam:
    """Adam as at the end of section 2 of Kingma and Ba 2014: epsilon is added to the root of the
    moment before the bias correction.
    """

    def __init__(self, parameters):
        self.parameters, self.count = parameters, 0
        self.moments = [
            (torch.zeros_like(parameter), torch.zeros_like(parameter)) for parameter in parameters
        ]

    @torch.no_grad()
    def step(self):
        self.count += 1
        rate = 1e-3 * np.sqrt(1 - 0.999**self.count) / (1 - 0.9**self.count)
        for (mean, square), parameter in zip(self.moments, self.parameters, strict=True):
            mean += 0.1 * (parameter.grad - mean)
            square += 0.001 * (parameter.grad**2 - square)
            parameter -= rate * mean / (square.sqrt() + 1e-8)


def trained(chainer, truncation="loss", loader="window"):
    """Yield the losses of each window, and its gradient by Chainer's names."""
    net = network(chainer, truncation)
    optimizer = ChainersAdam(list(net.parameters()))
    loading, state = Loader(loader, gl.Setting.parse("cpu")), None
    for frames in windows(chainer):
        (batch,) = loading.batches(net, frames)
        net.zero_grad()
        objective, losses, state = net.training_loss(batch, state)
        objective.backward()
        views = chainer_views(net, lambda parameter: parameter.grad)
        yield losses.numpy(), {name: views[name].numpy().ravel().copy() for name in sorted(views)}
        optimizer.step()


def distances(chainer, number, gradient):
    """Return the relative distance of each array of a gradient from Chainer's, and of `all`."""
    theirs, place, found = chainer[f"gradient{number}"], 0, {}
    for name, mine in gradient.items():
        part = theirs[place : (place := place + len(mine))]
        found[name] = np.linalg.norm(mine - part) / np.linalg.norm(part)
    whole = np.concatenate(list(gradient.values()))
    return found | {"all": np.linalg.norm(whole - theirs) / np.linalg.norm(theirs)}


@pytest.mark.parametrize("loader", ["window", "copied"])
def test_prednet_windows_have_the_losses_and_the_gradient_of_chainer(chainer, loader):
    for number, (losses, gradient) in enumerate(trained(chainer, loader=loader)):
        np.testing.assert_allclose(losses, chainer[f"losses{number}"], rtol=1e-5, atol=0)
        assert {
            name: d for name, d in distances(chainer, number, gradient).items() if not d < 1e-4
        } == {}


def test_truncation_state_lacks_a_term_in_later_windows(chainer):
    (_, first), *later = trained(chainer, "state")
    assert max(distances(chainer, 0, first).values()) < 1e-4
    for number, (_, gradient) in enumerate(later, start=1):
        assert distances(chainer, number, gradient)["all"] > 3e-3
    far = {name for name, d in distances(chainer, 1, later[0][1]).items() if d > 1e-4} - {"all"}
    assert far == {"ConvP1/W", "ConvP1/b", "ConvP2/W", "ConvP2/b"}


def after_a_window(chainer, truncation, dtype=torch.float32):
    """A network, the second window, and the state that it begins with."""
    net = network(chainer, truncation).to(dtype)
    first, second, *_ = (
        torch.from_numpy(frames).to(dtype).div(255)[:, None] for frames in windows(chainer)
    )
    return net, second, net.training_loss(first, None)[2]


def gradient_of(net, batch, state):
    net.zero_grad()
    net.training_loss(batch, state)[0].backward()
    return torch.cat([parameter.grad.flatten().clone() for parameter in net.parameters()])


def test_truncation_loss_adds_the_term_that_autograd_gives_for_a_kept_graph(chainer):
    net, batch, state = after_a_window(chainer, "state", torch.float64)
    # the last P are made again from the last R, which is where Chainer's graph ends
    kept = [state[0]]
    for conv, layer in zip(net.conv_p[1:], state[1:], strict=True):
        kept.append(layer._replace(p=torch.relu(conv(layer.r))))
        assert (kept[-1].p == layer.p).all()
    expected = gradient_of(net, batch, kept)
    found = gradient_of(*after_a_window(chainer, "loss", torch.float64))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)
    assert (expected - gradient_of(net, batch, state)).norm() > 3e-3 * expected.norm()


def test_hessian_of_a_chainer_window_is_that_of_double_backward(chainer):
    net, batch, state = after_a_window(chainer, "loss", torch.float64)
    parameters = list(net.parameters())
    v = torch.randn(15468, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    gradient = torch.autograd.grad(
        net.training_loss(batch, state)[0], parameters, create_graph=True
    )
    slope = torch.cat([part.flatten() for part in gradient]) @ v
    expected = torch.cat([part.flatten() for part in torch.autograd.grad(slope, parameters)])
    found = gl.hessian(net, lambda: net.training_loss(batch, state)[0]) @ v
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
