"""Models that `torch.compile` has compiled, under a guard: the guard itself is never compiled."""

import numpy as np
import pytest
import torch
from torch import nn
from torch._C._dynamo import eval_frame

import gpulab as gl

# Torch 2.6 compiles the code that runs between the graphs of a compiled function that calls
# `backward`.
needs_newer_torch = pytest.mark.skipif(
    not hasattr(eval_frame, "_FrameAction"),
    reason="this torch cannot leave out a function and all that it calls",
)
BACKENDS = pytest.mark.parametrize("backend", ["eager", "aot_eager"])


def network():
    torch.manual_seed(0)
    layers = [
        nn.Conv1d(2, 3, 3),
        nn.BatchNorm1d(3),
        nn.ReLU(inplace=True),
        nn.Dropout(0.2),
        nn.Flatten(),
    ]
    return nn.Sequential(*layers, nn.Linear(18, 4))


@pytest.fixture
def compiled_frames(monkeypatch):
    """The files of the frames that TorchDynamo compiles."""
    from torch._dynamo import convert_frame

    torch._dynamo.reset()
    compile_frame, files = convert_frame._compile, []

    def noting(code, *arguments, **options):
        files.append(code.co_filename)
        return compile_frame(code, *arguments, **options)

    monkeypatch.setattr(convert_frame, "_compile", noting)
    yield files
    torch._dynamo.reset()


def gradients(step, net):
    every = []
    for _ in range(2):
        torch.manual_seed(1)
        net.zero_grad(set_to_none=True)
        step(net, torch.ones(5, 2, 8))
        every += [parameter.grad.clone() for parameter in net.parameters()]
    return every


def forward_compiled(backend):
    compiled = {}

    def step(net, x):
        compiled.setdefault(net, torch.compile(net, backend=backend))(x).square().sum().backward()

    return step


def whole_step_compiled(backend):
    """The backward pass runs between two graphs, where TorchDynamo compiles any code it finds."""
    return torch.compile(lambda net, x: net(x).square().sum().backward(), backend=backend)


@BACKENDS
@pytest.mark.parametrize("reads", ["backward", "any"])
@pytest.mark.parametrize(
    "way", [forward_compiled, pytest.param(whole_step_compiled, marks=needs_newer_torch)]
)
def test_guard_leaves_a_compiled_model_its_gradients_and_is_not_compiled(
    way, reads, backend, compiled_frames
):
    step = way(backend)
    plain = gradients(step, network())
    with gl.guard(reads=reads) as report:
        guarded = gradients(step, network())
    assert all(map(torch.equal, plain, guarded))
    assert not report.findings
    assert report.checked > 0
    assert not [file for file in compiled_frames if "/guards/" in file and file != __file__]


@pytest.mark.parametrize(
    "backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow("compiles"))]
)
def test_guard_finds_an_overwritten_input_of_a_compiled_model(backend, compiled_frames):
    net, buffer = nn.Linear(3, 2), np.ones((4, 3), np.float32)
    compiled = torch.compile(net, backend=backend)
    with gl.guard():
        loss = compiled(torch.from_numpy(buffer)).sum()
    buffer[:] = 2
    with pytest.raises(gl.OverwrittenError, match="NumPy array `buffer`"):
        loss.backward()
    assert compiled_frames


def test_guard_imports_no_compiler(python):
    python(
        """
        import sys, torch, gpulab as gl
        with gl.guard(reads="any"):
            torch.ones(3, requires_grad=True).exp().sum().backward()
        assert "torch._dynamo" not in sys.modules
        """
    )
