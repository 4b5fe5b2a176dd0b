"""Steps that an audit met with a raw error or a wrong word: memory nobody wrote, sparse tensors, state, autocast."""

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gpulab as gl
from gpulab.audits import recording
from gpulab.errors import UsageError

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))


class Computing(nn.Module):
    """A layer, and what a function makes of it."""

    def __init__(self, function, width=4):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.function = nn.Linear(6, width), function

    def forward(self, x):
        return self.function(self.layer(x))


def audited(step, other="cpu:threads=1"):
    return gl.audit(step, "cpu", other, progress=False)


def test_audit_of_a_step_that_clips_its_gradients():
    net = nn.Sequential(Computing(torch.tanh), nn.LayerNorm(4), nn.Linear(4, 2))

    def step():
        net.zero_grad()
        net(X).square().mean().backward()
        return nn.utils.clip_grad_norm_(net.parameters(), 0.01)  # one call, `_foreach_norm`, for all of them

    assert audited(step).kind == "rounding"


def test_audit_of_two_versions_of_torch_that_draw_other_numbers_from_one_seed(monkeypatch, tmp_path):
    step, files = gl.Step(Computing(F.dropout), X), [str(tmp_path / name) for name in ("old.trace", "new.trace")]
    for seed, file in enumerate(files):
        monkeypatch.setattr(recording, "SEED", seed)  # as dropout on a CPU does between torch 2.6 and 2.15
        gl.record(step, "cpu", file, progress=False)
    answer = gl.audit(*files, progress=False)
    assert answer.kind == "different random numbers"


# --- memory that nobody has written ---------------------------------------------------------------------------


def ctc(y):
    return F.ctc_loss(y.log_softmax(-1)[:, None].expand(-1, 2, -1), torch.tensor([[1, 2, 1], [3, 1, 2]]),
                      torch.tensor([8, 8]), torch.tensor([1, 3]))  # fmt: skip


def in_part_of_new_memory(y):
    memory = y.new_empty(1000, 4)
    memory[10:18] = y
    return memory.view(100, 40)[1:2].view(-1, 4)[:8].square().mean()


@pytest.mark.parametrize("function", [ctc, in_part_of_new_memory])
def test_audit_takes_unwritten_memory_for_no_data(function):
    for _ in range(5):
        freed = [torch.full((size,), torch.nan) for size in (10, 40, 90, 160, 300, 500)]
        del freed  # which leaves NaN in the memory that is given out next
        answer = audited(gl.Step(Computing(function), X))
        assert answer.kind == "rounding"
        assert {op.repeats for trace in (answer.a, answer.b) for op in trace.operations} <= {True, None}


# --- tensors of other kinds -----------------------------------------------------------------------------------

EDGES = torch.tensor([[0, 1, 2, 3, 5, 7, 7], [1, 0, 3, 2, 6, 1, 4]])
ADJACENCY = torch.sparse_coo_tensor(EDGES, torch.linspace(0.1, 1, 7), (8, 8)).coalesce()


@pytest.mark.parametrize("adjacency", [ADJACENCY, ADJACENCY.to_sparse_csr()], ids=["coo", "csr"])
def test_audit_of_a_graph_network_with_a_sparse_adjacency(adjacency):
    step = gl.Step(Computing(lambda y: torch.sparse.mm(adjacency.to(y.dtype), y)), X)
    assert audited(step).kind == "rounding"
    assert audited(step, "cpu:emulate=tf32").kind == "reduced precision"


def test_audit_of_a_nested_tensor_sees_its_products():
    nested = torch.nested.nested_tensor([X[:3], X[3:]], layout=torch.jagged)
    answer = audited(gl.Step(Computing(lambda y: y.to_padded_tensor(0.0)), nested), "cpu:emulate=tf32")
    assert answer.kind == "reduced precision"


@pytest.mark.parametrize("dtype", [torch.uint64, torch.float8_e4m3fn])
def test_audit_of_types_that_numpy_or_most_operations_lack(dtype):
    positions = torch.arange(400) % 97
    step = gl.Step(Computing(lambda y: y * positions.to(torch.float32).to(dtype).to(y.dtype).mean()), X)
    assert audited(step).kind == "rounding"


# --- what a setting cannot do ---------------------------------------------------------------------------------


def test_audit_names_a_tensor_that_is_no_buffer():
    model = Computing(lambda y: y @ model.table)
    model.table = torch.ones(4, 4)
    with pytest.raises(UsageError, match=r"cpu:precision=bfloat16.*Computing\.table"):
        audited(gl.Step(model, X), "cpu:precision=bfloat16")


def test_audit_of_a_bare_network_says_how_to_make_a_step():
    with pytest.raises(UsageError, match=r"Linear, which is a network; expected gpulab\.Step"):
        audited(nn.Linear(2, 2))


# --- state that a function step changes -----------------------------------------------------------------------


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)), 0

    def forward(self, x):
        self.calls += 1
        return self.layer(x) * self.calls


def test_audit_puts_back_buffers_gradients_counters_and_optimizers():
    model = Counting()
    optimizer = torch.optim.Adam(model.parameters())
    before = [value.clone() for value in model.state_dict().values()]

    def step():  # no gradient is set to zero
        loss = model(X).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    assert audited(step).kind == "rounding"
    assert all(map(torch.equal, before, model.state_dict().values()))
    assert (model.calls, len(optimizer.state), model.layer[0].weight.grad) == (0, 0, None)


# --- autocast, compiled models, threads -----------------------------------------------------------------------


def step_of(autocast):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))

    def step():
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(X).square().mean()
        loss.backward()
        return loss

    return step


def test_audit_of_a_compiled_model_compiles_nothing_of_ours():
    program = """if True:
        import sys, torch, gpulab as gl
        step = gl.Step(torch.nn.Linear(3, 2), torch.ones(4, 3))
        gl.audit(step, "cpu", "cpu:threads=1", progress=False)
        assert "torch._dynamo" not in sys.modules
        for backend in ("eager", "aot_eager"):
            compiled = gl.Step(torch.compile(step.model, backend=backend), step.batch)
            answer = gl.audit(compiled, "cpu", "cpu:emulate=tf32", progress=False)
            assert answer.a.title == "cpu, not compiled", answer.a.title
            assert answer.kind == "reduced precision" and len(answer.pairs) > 8, answer
    """
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


def test_traces_of_one_name_are_told_apart_by_file(tmp_path):
    step = gl.Step(nn.Linear(6, 2), X)
    files = [tmp_path / f"{name}.trace" for name in ("here", "there")]
    for file in files:
        gl.record(step, "cpu", file, progress=False)
    assert str(gl.audit(*files)).startswith("cpu (here) against cpu (there): ")
    assert str(audited(step, "cpu")).startswith("cpu (first) against cpu (second): ")


def test_trace_says_which_loss_was_taken():
    assert gl.record(gl.Step(nn.Linear(6, 2), X), progress=False).notes == {"loss": "the mean square of the output"}
