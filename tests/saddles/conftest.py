import pytest
import torch

import gpulab as gl


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """The problems here are so small that a second thread would only be waited for."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def small_autoencoder(dtype):
    model = gl.models.Autoencoder(hidden=(8, 3), size=(6, 6)).to(dtype)
    images = torch.rand(20, 1, 6, 6, generator=torch.Generator().manual_seed(3)).to(dtype)
    return gl.hessian(model, lambda: model.training_loss(images, None)[0])


def small_prednet(dtype):
    model = gl.models.PredNet(channels=(1, 2), size=(4, 4)).to(dtype)
    frames = torch.rand(3, 1, 1, 4, 4, generator=torch.Generator().manual_seed(3)).to(dtype)
    return gl.hessian(model, lambda: model.training_loss(frames, None)[0])


@pytest.fixture(scope="session", params=[small_autoencoder, small_prednet])
def small_hessian(request):
    """A function from a dtype to the Hessian of a small network, and that Hessian as a matrix in float64."""
    matrix = request.param(torch.float64).dense()
    return request.param, (matrix + matrix.T) / 2


@pytest.fixture(scope="session")
def known(small_hessian):
    """The Hessian of a small network as a matrix, and its eigenvalues."""
    _, matrix = small_hessian
    return matrix, torch.linalg.eigvalsh(matrix)
