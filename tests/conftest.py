import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

os.environ.setdefault("GPULAB_PROFILE", "smoke")  # the kernels of the notebooks inherit it and train small
os.environ.setdefault("GOMP_SPINCOUNT", "0")  # threads that wait by spinning starve the other test processes


@pytest.fixture(scope="session")
def shared():
    """Real data for development, which lies beside the checkout and is no part of the project."""
    folder = Path(__file__).parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(
            "the folder shared/data with real MNIST, a real video and Chainer's numbers is not beside the checkout"
        )
    return folder


@pytest.fixture(scope="session")
def python():
    """Run a piece of Python in a process of its own, with variables added to the environment."""

    def run(code, *arguments, check=True, timeout=120, **environment):
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert not check or done.returncode == 0, done.stderr
        return done

    return run


def small_autoencoder(dtype):
    import torch

    import gpulab as gl

    model = gl.Autoencoder(hidden=(8, 3), size=(6, 6)).to(dtype)
    images = torch.rand(20, 1, 6, 6, generator=torch.Generator().manual_seed(3)).to(dtype)
    return gl.hessian(model, lambda: model.training_loss(images, None)[0])


def small_prednet(dtype):
    import torch

    import gpulab as gl

    model = gl.PredNet(channels=(1, 2), size=(4, 4)).to(dtype)
    frames = torch.rand(3, 1, 1, 4, 4, generator=torch.Generator().manual_seed(3)).to(dtype)
    return gl.hessian(model, lambda: model.training_loss(frames, None)[0])


@pytest.fixture(scope="session", params=[small_autoencoder, small_prednet])
def small_hessian(request):
    """A function from a dtype to the Hessian of a small network, and that Hessian as a matrix in float64."""
    import torch

    matrix = request.param(torch.float64).dense()
    return request.param, (matrix + matrix.T) / 2
