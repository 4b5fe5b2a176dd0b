"""Steps that once led to raw errors or wrong findings.

They use uninitialised memory, sparse tensors, state and autocast.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gpulab as gl
from gpulab.errors import UsageError
from tests.audits._helpers import Own, audited, drawn, seeded

X = drawn(8, 6)


def computing(function, inputs=X):
    """Return a step of a layer, with a function applied to its output."""
    return gl.Step(seeded(lambda: nn.Sequential(nn.Linear(6, 4), Own(function))), inputs)


def test_audit_of_a_step_that_clips_its_gradients():
    net = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 2))

    def step():
        net.zero_grad()
        net(X).square().mean().backward()
        # a single call of `_foreach_norm` for all gradients
        return nn.utils.clip_grad_norm_(net.parameters(), 0.01)

    assert audited(step).kind == "rounding"


# --- uninitialised memory -------------------------------------------------------------------------


def in_part_of_new_memory(y):
    memory = y.new_empty(1000, 4)
    memory[10:18] = y
    return memory.view(100, 40)[1:2].view(-1, 4)[:8].square().mean()


def test_audit_takes_unwritten_memory_for_no_data():
    for _ in range(5):
        freed = [torch.full((size,), torch.nan) for size in (10, 40, 90, 160, 300, 500)]
        del freed  # leaves NaN in the memory that is allocated next
        answer = audited(computing(in_part_of_new_memory))
        assert answer.kind == "rounding"
        assert {op.repeats for trace in (answer.a, answer.b) for op in trace.operations} <= {
            True,
            None,
        }


# --- tensors of other kinds -----------------------------------------------------------------------

EDGES = torch.tensor([[0, 1, 2, 3, 5, 7, 7], [1, 0, 3, 2, 6, 1, 4]])
ADJACENCY = torch.sparse_coo_tensor(EDGES, torch.linspace(0.1, 1, 7), (8, 8)).coalesce()


@pytest.mark.parametrize("adjacency", [ADJACENCY, ADJACENCY.to_sparse_csr()], ids=["coo", "csr"])
def test_audit_of_a_graph_network_with_a_sparse_adjacency(adjacency):
    step = computing(lambda y: torch.sparse.mm(adjacency.to(y.dtype), y))
    assert audited(step).kind == "rounding"
    assert audited(step, b="cpu:emulate=tf32").kind == "reduced precision"


def test_audit_of_a_nested_tensor_sees_its_products():
    nested = torch.nested.nested_tensor([X[:3], X[3:]], layout=torch.jagged)
    answer = audited(computing(lambda y: y.to_padded_tensor(0.0), nested), b="cpu:emulate=tf32")
    assert answer.kind == "reduced precision"


@pytest.mark.parametrize("dtype", [torch.uint64, torch.float8_e4m3fn])
def test_audit_of_types_that_numpy_or_most_operations_lack(dtype):
    positions = torch.arange(400) % 97
    step = computing(lambda y: y * positions.to(torch.float32).to(dtype).to(y.dtype).mean())
    assert audited(step).kind == "rounding"


# --- what a setting cannot do ---------------------------------------------------------------------


def test_audit_names_a_tensor_that_is_no_buffer():
    step = computing(lambda y: y @ step.model[1].table)
    step.model[1].table = torch.ones(4, 4)
    with pytest.raises(UsageError, match=r"cpu:precision=bfloat16.*Own\.table"):
        audited(step, b="cpu:precision=bfloat16")


def test_audit_of_a_bare_network_says_how_to_make_a_step():
    with pytest.raises(UsageError, match=r"expected gpulab\.Step.*, got the network Linear"):
        audited(nn.Linear(2, 2))


# --- state that a function step changes -----------------------------------------------------------


def test_audit_puts_back_buffers_gradients_and_optimizers():
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters())
    before = [value.clone() for value in model.state_dict().values()]

    def step():  # gradients are not set to zero
        loss = model(X).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    assert audited(step).kind == "rounding"
    assert all(map(torch.equal, before, model.state_dict().values()))
    assert (len(optimizer.state), model[0].weight.grad) == (0, None)


# --- autocast, compiled models, threads -----------------------------------------------------------


def test_audit_of_a_compiled_model_compiles_nothing_of_ours(python):
    python(
        """
        import sys, torch, gpulab as gl
        step = gl.Step(torch.nn.Linear(3, 2), torch.ones(4, 3))
        gl.audit(step, "cpu", "cpu:threads=1", progress=False)
        assert "torch._dynamo" not in sys.modules
        compiled = gl.Step(torch.compile(step.model, backend="aot_eager"), step.batch)
        answer = gl.audit(compiled, "cpu", "cpu:emulate=tf32", progress=False)
        assert answer.a.title == "cpu, not compiled", answer.a.title
        assert answer.kind == "reduced precision" and len(answer.pairs) > 8, answer
        """
    )


def test_audit_of_two_traces_of_one_name_tells_them_apart_by_file(tmp_path):
    step = gl.Step(nn.Linear(6, 2), X)
    files = [tmp_path / f"{name}.trace" for name in ("here", "there")]
    for file in files:
        gl.record(step, "cpu", file, progress=False)
    assert str(gl.audit(*files)).startswith("cpu (here) against cpu (there): ")
    assert str(audited(step, b="cpu")).startswith("cpu (first) against cpu (second): ")


def test_audit_says_which_loss_it_took_of_a_step_without_one():
    report = audited(gl.Step(nn.Linear(6, 2), X))
    assert report.a.notes == {"loss": "the mean square of the output"}
    assert "The loss was the mean square of the output." in str(report).partition("\n")[0]


HIDDEN_PRODUCTS = {  # products inside operations whose kernels call other operations
    "affine grid": (
        lambda x: F.affine_grid(x.view(2, 2, 3), [2, 1, 5, 5], align_corners=False),
        12,
    ),
    "affine grid in space": (
        lambda x: F.affine_grid(x.view(2, 3, 4), [2, 1, 3, 4, 5], align_corners=False),
        24,
    ),
    "bilinear": (lambda x: F.bilinear(x.view(8, 3), x.view(8, 3), x[:18].view(2, 3, 3)), 24),
    "convolution in time": (
        lambda x: torch.conv_tbc(x.view(9, 3, 3), x[:27].view(3, 3, 3), x[:3], 1),
        81,
    ),
    "distances": (lambda x: torch.cdist(x.view(40, 6), x.view(40, 6)[1:] + 1), 240),
    "pseudoinverse": (lambda x: torch.linalg.pinv(x.view(8, 3)), 24),
}


@pytest.mark.parametrize("name", HIDDEN_PRODUCTS)
def test_audit_calls_emulated_products_inside_other_operations_reduced_precision(name):
    function, size = HIDDEN_PRODUCTS[name]
    drawn = torch.randn(size, generator=torch.Generator().manual_seed(0))

    def step(setting):
        x = drawn.to(setting.dtype).requires_grad_()
        function(x).square().sum().backward()
        return {"gradient": x.grad}

    report = gl.audit(step, "cpu", "cpu:emulate=tf32", progress=False)
    assert {finding.kind for finding in report.findings} == {"reduced precision", "rounding"}
    assert any(
        finding.phase == "forward"
        for finding in report.findings
        if finding.kind == "reduced precision"
    )
