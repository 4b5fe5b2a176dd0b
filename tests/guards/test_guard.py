import gc
import warnings
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from torchvision.models.resnet import BasicBlock, ResNet

import gpulab as gl
from gpulab.guards import _fingerprints as fingerprints
from gpulab.guards import _guard as guards
from gpulab.guards._fingerprints import fingerprint

needs_cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="this machine has no CUDA GPU"
)
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])


def findings(step):
    """Return what the guard collects in a step that runs to its end."""
    with warnings.catch_warnings(record=True) as caught, gl.guard(on="warn") as report:
        warnings.simplefilter("always")
        step()
    assert bool(caught) == bool(report)
    return report.findings


def clean(step):
    """Assert that the guard raises nothing in a step, and has checked something."""
    with gl.guard() as report:
        step()
    assert not report.findings
    assert report.checked > 0
    return report


def spoiled(forward, spoil):
    """Return what the guard collects if something is overwritten between the two passes."""

    def step():
        loss = forward().sum()
        spoil()
        loss.backward()

    return findings(step)


class Weight(nn.Module):
    """One weight; `mul` saves its input."""

    def __init__(self, *shape):
        super().__init__()
        self.w = nn.Parameter(torch.rand(shape))

    def forward(self, x):
        return x * self.w


# --- what it detects ------------------------------------------------------------------------------


def test_guard_finds_a_numpy_buffer_that_is_used_again():
    net, buffer = nn.Conv2d(3, 3, 3, padding=1), np.zeros((1, 3, 6, 8), np.float32)

    def train():
        losses = []
        for step in range(3):
            buffer[...] = step
            frame = torch.as_tensor(buffer)
            losses.append(F.mse_loss(net(frame), frame))
        sum(losses).backward()

    with pytest.raises(gl.OverwrittenError) as caught, gl.guard():
        train()
    finding = caught.value.finding
    assert (finding.operation, finding.function, finding.operand) == (
        "MseLossBackward0",
        "mse_loss",
        "target",
    )
    assert (finding.shape, finding.dtype, finding.device, finding.cause) == (
        (1, 3, 6, 8),
        "float32",
        "cpu",
        "numpy",
    )
    assert (finding.line.file, finding.line.function) == (__file__, "train")
    assert finding.line.text == "losses.append(F.mse_loss(net(frame), frame))"
    for words in (
        "mse_loss (MseLossBackward0)",
        "`target`",
        "array `buffer` (float32",
        "torch.tensor(buffer)",
    ):
        assert words in str(caught.value)


def test_guard_on_warn_warns_the_caller_and_backward_goes_on():
    net, buffer = Weight(3), np.ones(3, np.float32)

    def guarded():
        with gl.guard(on="warn") as report:
            loss = net(torch.from_numpy(buffer)).sum()
            buffer[:] = 5
            loss.backward()
        return report

    with pytest.warns(gl.OverwrittenWarning, match="NumPy array `buffer`") as caught:
        report = guarded()
    assert net.w.grad.tolist() == [5, 5, 5]
    assert (len(report), [warning.filename for warning in caught]) == (1, [__file__])
    assert "mul" in str(report)


@DEVICES
def test_guard_finds_a_write_through_data(device):
    net, x = Weight(3).to(device), torch.ones(3, device=device)
    (finding,) = spoiled(lambda: net(x), lambda: x.data.mul_(2))
    assert finding.cause == "data"
    assert finding.device.startswith(device)
    assert "`x`" in finding.explanation
    assert "through .data" in finding.explanation


def test_guard_finds_data_that_is_assigned():
    """Autograd uses a leaf's new values without the guard, and the old ones with it.

    The guard must therefore report the assignment.
    """
    net, x = Weight(3), torch.ones(3, requires_grad=True)
    (finding,) = spoiled(lambda: net(x), lambda: setattr(net.w, "data", torch.full((3,), 9.0)))
    assert (finding.cause, finding.operand) == ("replaced", "other")
    assert not spoiled(lambda: net(x), lambda: setattr(net.w, "data", net.w.data.clone()))


def test_guard_finds_an_in_place_operation_that_torch_would_refuse():
    """While hooks are active, torch no longer compares versions."""
    net, x = Weight(3), torch.ones(3)
    (finding,) = spoiled(lambda: net(x), lambda: x.add_(1))
    assert (finding.cause, finding.function, finding.operand) == ("inplace", "mul", "self")
    assert "in-place operation" in finding.explanation
    (finding,) = spoiled(lambda: net(x).exp().mul_(0), lambda: None)
    assert (finding.cause, finding.function, finding.operand) == ("inplace", "exp", "result")


def numpy_loader():
    hidden = np.zeros(3, np.float32)
    for value in range(3):
        hidden[:] = value
        yield torch.from_numpy(hidden)


def test_guard_finds_a_loader_that_fills_one_numpy_buffer_repeatedly():
    reader = numpy_loader()  # not the generator's array, which has no name in this frame
    (finding,) = findings(lambda: sum(Weight(3)(batch).sum() for batch in reader).backward())
    assert (finding.cause, finding.count) == ("numpy", 2)  # the last batch is unchanged
    assert "(2 times)" in str(finding)
    holder = "it shares memory with the NumPy array `hidden` (float32, shape (3,)) in numpy_loader"
    assert finding.explanation.startswith(f"NumPy wrote into its memory; {holder}")
    assert finding.remedy == "copy it: torch.tensor(hidden) or torch.as_tensor(hidden.copy())"


@pytest.mark.parametrize("on", ["raise", "warn"])
def test_guard_checks_a_backward_pass_after_its_block(on):
    net, buffer = Weight(3), np.ones(3, np.float32)
    with gl.guard(on=on) as report:
        loss = net(torch.from_numpy(buffer)).sum()
        buffer[:] = 2
    assert not report, "what is overwritten but never used is no error"
    with (
        pytest.raises(gl.OverwrittenError) if on == "raise" else pytest.warns(gl.OverwrittenWarning)
    ):
        loss.backward()
    assert len(report) == 1


class Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x)
        return x * w

    @staticmethod
    def backward(ctx, gradient):
        return None, gradient * ctx.saved_tensors[0]


def checkpointed(x, constant):
    """A checkpoint saves its inputs, which the guard sees."""
    return checkpoint(lambda a, b: (a * b).sin(), x, constant, use_reentrant=False)


GRAPHS = {
    "custom function": (lambda x, constant: Times.apply(constant, x), "Times (TimesBackward)"),
    "checkpoint": (checkpointed, "recomputation"),
    "batch norm in use": (
        lambda x, constant: F.batch_norm(x, constant, torch.ones(3)).square(),
        "`running_mean`",
    ),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_guard_sees_what_graphs_of_other_kinds_have_saved(name):
    function, words = GRAPHS[name]
    x, constant = torch.rand(4, 3, requires_grad=True), torch.rand(3)
    clean(lambda: function(x, constant).sum().backward())
    found = spoiled(lambda: function(x, constant), lambda: constant.data.add_(1))
    assert {finding.cause for finding in found} == {"data"}
    assert words in "".join(map(str, found))


def test_guard_that_is_nested_and_used_again():
    net, x = Weight(3), torch.ones(3)
    outer = gl.guard()
    for inner in (gl.guard(on="warn"), torch.autograd.graph.save_on_cpu()):
        with outer, inner:
            net(x).sum().backward()
        assert outer.checked == 0  # torch applies only the innermost hooks
        assert getattr(inner, "checked", 1) > 0
    with outer, outer:
        net(x).sum().backward()
    before = outer.checked
    assert before > 0
    net(x).sum().backward()
    assert outer.checked == before


def test_guard_refuses_another_word_for_on():
    with pytest.raises(gl.UsageError, match=r"'ignore'.*'raise' or 'warn'"):
        gl.guard(on="ignore")


def test_guard_is_refused_inside_torch_func():
    def guarded(a):
        with gl.guard():
            return square(a)

    def square(a):
        return (a * a).sum()

    with pytest.raises(gl.GpulabError, match=r"torch\.func"), gl.guard():
        torch.func.grad(square)(torch.ones(2))
    with pytest.raises(gl.GpulabError, match="does not allow"):
        torch.func.grad(guarded)(torch.ones(2))


def test_guard_finding_is_printed_with_its_line_of_source_the_holder_and_a_cure():
    weight = torch.ones(3, requires_grad=True)
    with warnings.catch_warnings(action="ignore"), gl.guard(on="warn") as report:
        scale = torch.ones(3)
        loss = (weight * scale).sum()
        scale.numpy()[:] = 2
        loss.backward()
    first, saved, source, why, cure = str(report).splitlines()
    assert first.startswith(
        "the backward pass of mul (MulBackward0) was given its `other`, float32 of shape (3,)"
        " on cpu"
    )
    assert saved.startswith("  saved by test_guard_finding_is_printed")
    assert source == "      loss = (weight * scale).sum()"
    assert "it shares memory with the tensor `scale` (torch.float32, shape (3,))" in why
    assert cure == "  do: copy it before it is overwritten: .clone()"


def test_guard_passes_on_an_error_of_the_program_itself():
    with pytest.raises(RuntimeError, match="my own") as caught, gl.guard():
        raise RuntimeError("my own")
    assert type(caught.value) is RuntimeError


# --- what it does not report ----------------------------------------------------------------------


KERNEL = nn.Parameter(torch.rand(3, 3, 1, 1))
LAYERS = [
    nn.BatchNorm2d(3),
    nn.BatchNorm2d(3).eval(),
    nn.InstanceNorm2d(3, affine=True, track_running_stats=True),
]
LAYERS += [
    nn.RReLU(),
    nn.RReLU(inplace=True),
    nn.Dropout2d(),
    parametrizations.spectral_norm(nn.Conv2d(3, 3, 1)),
]
FUNCTIONS = {
    **{f"{type(layer).__name__} {number}": layer for number, layer in enumerate(LAYERS)},
    "autocast": torch.autocast("cpu", torch.bfloat16)(
        lambda x: F.conv2d(x, KERNEL) + F.conv2d(x, KERNEL)
    ),
    "sparse": lambda x: torch.sparse.mm(torch.eye(4).to_sparse(), x[0, 0]),
    "complex numbers": lambda x: (torch.fft.fft(x).conj() * x).abs(),
    "views": lambda x: x[:, 0, None].expand(2, 3, 4, 4).transpose(0, 2)[:, ::2].square(),
    "nothing": lambda x: x[0, 0, 0].sum() + (x[0, 0, 0] * torch.empty(0, 4)).sum(),
    "scalars": lambda x: x[0, 0, 0, 0] * 3.0 * x[0, 0, 0, 0],
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_guard_leaves_layers_and_tensors_of_every_kind_alone(name):
    first, function = nn.Conv2d(3, 3, 1), FUNCTIONS[name]

    def step():
        for _ in range(2):
            one, two = (function(first(torch.rand(2, 3, 4, 4))) for _ in range(2))
            (one.square().mean() + two.mean()).backward()

    clean(step)


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "end", [torch.Tensor.backward, torch.Tensor.detach], ids=["backward", "dropped"]
)
def test_guard_frees_memory_without_the_garbage_collector(end):
    def step():
        with gl.guard():
            y = Weight(1000)(torch.zeros(1000)).exp()
            end(y.sum())
            return weakref.ref(y)

    gc.disable()
    try:
        assert step()() is None
    finally:
        gc.enable()


# --- the fingerprint ------------------------------------------------------------------------------


def in_words(tensor):
    """Compute the fingerprint that accelerators use, on this device."""
    return int(fingerprints._digest(tensor))


DTYPES = ["float32", "float64", "float16", "bfloat16", "complex64", "complex128"]
DTYPES += ["int64", "int32", "int16", "uint8", "bool"]
BOTH_WAYS = pytest.mark.parametrize("take", [fingerprint, in_words])


@BOTH_WAYS
@pytest.mark.parametrize("dtype", DTYPES)
def test_fingerprint_changes_with_every_bit_and_place(take, dtype):
    dtype = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(1)
    bits = 1 if dtype == torch.bool else 8
    raw = torch.randint(0, 2**bits, (17 * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    x = raw.view(dtype)
    mark = take(x)
    assert take(x.clone()) == mark, "of NaN, too"
    assert mark not in (take(x.flip(0)), take(x.roll(1)))
    for place in range(len(raw)):
        for bit in range(bits):
            other = raw.clone()
            other[place] ^= 1 << bit
            assert take(other.view(dtype)) != mark


KINDS = {
    "channels last": lambda x: x.to(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(1, 3),
    "gaps": lambda x: x[:, :, ::2, 1:3],
    "expanded": lambda x: x[:1, :, :1].expand(4, 3, 4, 5),
    "scalar": lambda x: x[0, 0, 0, 0],
    "scalar expanded": lambda x: x[0, 0, 0, 0].expand(4),
    "windows": lambda x: x.flatten().unfold(0, 4, 1),
    "odd offset": lambda x: x.half().flatten()[1:],
    "long": lambda x: x.repeat(fingerprints.MAX_ROW_WORDS // 100, 1, 1, 1).flatten()[5:],
}


@BOTH_WAYS
@pytest.mark.parametrize("kind", KINDS)
def test_fingerprint_changes_in_memory_of_every_layout(take, kind):
    tensor = KINDS[kind](torch.rand(2, 3, 4, 5))
    mark = take(tensor)
    assert mark == take(tensor)
    tensor.data[(0,) * tensor.dim()] += 1
    assert take(tensor) != mark


def test_fingerprint_of_a_tensor_of_several_chunks(monkeypatch):
    x, chunk = torch.rand(5 * fingerprints.MAX_ROW_WORDS + 3), 2 * fingerprints.MAX_ROW_WORDS
    monkeypatch.setattr(fingerprints, "MAX_CHUNK_WORDS", chunk)
    others = [
        x.index_add(0, torch.tensor([place]), torch.ones(1))
        for place in (0, chunk // 2, chunk, len(x) - 1)
    ]
    others.append(torch.cat([x[chunk : 2 * chunk], x[:chunk], x[2 * chunk :]]))
    state = torch.get_rng_state()
    fingerprints._random_multipliers.cache_clear()
    assert len({in_words(x), *map(in_words, others)}) == 6
    assert torch.equal(state, torch.get_rng_state()), (
        "its table is drawn beside the generator of training"
    )


def test_guard_compares_at_the_end_of_backward_as_on_a_gpu(monkeypatch):
    """The comparison is postponed to the end of backward, in this test with tensors on a CPU."""
    monkeypatch.setattr(guards, "fingerprint", lambda tensor: fingerprints._digest(tensor))
    net, x = Weight(3), torch.rand(3)

    def step(spoil):
        y = net(x).exp()
        for tensor in (x, y):
            tensor.data.add_(spoil)
        y.sum().backward()

    clean(lambda: step(0))
    assert sorted(finding.function for finding in findings(lambda: step(1))) == ["exp", "mul"]
    with pytest.raises(gl.OverwrittenError), gl.guard() as report:
        step(1)
    assert not report._pending
    norm = nn.BatchNorm1d(3)
    clean(lambda: (norm(torch.rand(4, 3)).mean() + norm(torch.rand(4, 3)).mean()).backward())


def test_fingerprint_of_sparse_complex_and_parameter_tensors():
    dense = torch.rand(3, 3)
    for sparse in (dense.to_sparse(), dense.to_sparse_csr(), dense.to_sparse_csc()):
        mark = fingerprint(sparse)
        assert mark is not None
        sparse.values().data.add_(
            1
        ) if sparse.layout != torch.sparse_coo else sparse._values().add_(1)
        assert fingerprint(sparse) != mark
    x = torch.rand(3, dtype=torch.complex64)
    # the same memory, and the flag cannot be changed
    assert fingerprint(x.conj()) == fingerprint(x)
    assert fingerprint(x.conj().imag) is not None
    assert fingerprint(nn.Parameter(dense)) == fingerprint(dense), "of a subclass"


# --- where it is used -----------------------------------------------------------------------------


def test_guard_leaves_a_training_the_same_bits():
    options = {
        "model_options": {"hidden": [16]},
        "frames": 40,
        "profile": "smoke",
        "progress": False,
    }
    options["setting"] = (
        "cpu:threads=1"  # with several threads, even the same training may give other bits
    )
    plain = gl.train("autoencoder", **options)
    with gl.guard():
        guarded = gl.train("autoencoder", **options)
    assert plain.record["summary"]["weights"] == guarded.record["summary"]["weights"]
    assert plain.record["id"] == guarded.record["id"]


@pytest.mark.slow("starts a process")
def test_guard_lets_a_process_end_as_usual_after_a_backward_that_failed(python):
    """Tasks that a failed backward leaves in the queue are not destroyed after Python has ended."""
    python(
        """
        import torch, gpulab as gl
        weight, x, loss = torch.ones(3, requires_grad=True), torch.ones(3), 0
        with gl.guard():
            for _ in range(4):
                loss = loss + (weight * x).sum()
                x.data.add_(1)
        try:
            loss.backward()
        except gl.OverwrittenError:
            raise SystemExit
        """
    )


VISION_TRANSFORMER = {"num_layers": 2, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 32}


class LSTM(nn.LSTM):
    def forward(self, x):
        return super().forward(x)[0]


MODELS = {
    "resnet": (lambda: ResNet(BasicBlock, [1, 1, 1, 1], num_classes=10), (2, 3, 32, 32)),
    "vision transformer": (
        lambda: torchvision.models.VisionTransformer(32, 16, **VISION_TRANSFORMER),
        (1, 3, 32, 32),
    ),
    "lstm": (lambda: LSTM(5, 7, num_layers=2, dropout=0.1, batch_first=True), (3, 6, 5)),
}


def two_steps(name, device):
    """Return every gradient of two updates of a real model."""
    torch.manual_seed(0)
    build, shape = MODELS[name]
    net, x = build().to(device), torch.rand(shape, device=device)
    optimizer = torch.optim.Adam(net.parameters(), 1e-3, foreach=True)
    gradients = []
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(
            net(x).flatten(1), torch.zeros(len(x), dtype=torch.long, device=device)
        ).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        gradients += [p.grad.clone() for p in net.parameters()]
        optimizer.step()
    return gradients


@DEVICES
@pytest.mark.parametrize("name", MODELS)
def test_guard_leaves_real_models_alone_and_their_gradients_the_same_bits(name, device):
    with torch.backends.cudnn.flags(deterministic=True):
        plain, guarded = two_steps(name, device), []
        clean(lambda: guarded.extend(two_steps(name, device)))
    assert device == "cuda" or all(map(torch.equal, plain, guarded))


def test_guard_report_says_how_many_uses_were_not_compared():
    seen, unseen = (
        torch.rand(3, requires_grad=True),
        torch.rand(3, device="meta", requires_grad=True),
    )
    with gl.guard() as report:
        seen.exp().sum().backward()
        assert "not compared" not in str(report)
        unseen.exp().sum().backward()
    assert str(report) == (
        "nothing was overwritten (uses of saved tensors: 1)\n"
        "not compared, because torch does not expose the tensor's content: 1"
    )


CELL = """
def step(x):
    loss = x.exp().sum()
    loss.grad_fn.next_functions[0][0]._saved_result.data.zero_()
    return loss
"""


def test_guard_finding_calls_a_line_in_a_notebook_a_cell():
    exec(compile(CELL, "/tmp/ipykernel_171/1402239833.py", "exec"), names := {})
    with (
        pytest.warns(gl.OverwrittenWarning, match="saved by step, a notebook cell:3"),
        gl.guard("warn"),
    ):
        names["step"](torch.ones(3, requires_grad=True) * 1).backward()
