"""Join the ranks of a distributed step, and compare them with the step in a single process."""

import os
import re
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import gpulab as gl
from gpulab.audits import join_ranks
from gpulab.audits._traces import Operation, Trace
from tests.audits import _rank_programs as programs
from tests.audits._helpers import drawn, recorded

RANKS = pytest.mark.slow("starts two processes")
FAULTS = [
    pytest.param(name, fault, id=f"{name}-{fault}")
    for name, (_, _, faults) in programs.PROGRAMS.items()
    for fault in faults
]


NCCL = pytest.param(
    "nccl",
    marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
)


@pytest.fixture(scope="module", params=["gloo", NCCL])
def backend(request):
    """Return how the ranks communicate: gloo on a CPU, or NCCL on two GPUs."""
    if request.param == "nccl":
        programs.use_device("cuda:0")
    yield request.param
    programs.use_device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, backend):
    """Return the folder with the traces of all programs on two ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    programs.record_all(folder, backend)
    return folder


def audit_of_ranks(folder, name, fault=""):
    files = [folder / f"{name}.{fault}.{rank}" for rank in range(programs.N_RANKS)]
    _, one_process, _ = programs.PROGRAMS[name]
    one_trace = recorded(one_process, programs.setting_of(programs.DEVICE))
    return gl.audit(one_trace, join_ranks(files))


@RANKS
@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_joined_ranks_of_a_right_program_are_one_process(folder, name):
    report = audit_of_ranks(folder, name)
    assert (report.kind, report.faulty) == ("rounding", False), str(report)
    assert not report.comparison.differing_results
    names = {result.representative.name for result in report.comparison.unpaired_results}
    assert names <= {"loss of rank 0", "loss of rank 1"}, str(report)
    assert any(result.agrees for result in report.comparison.results)


@RANKS
@pytest.mark.parametrize(("name", "fault"), FAULTS)
def test_joined_ranks_of_a_faulty_program_are_found_at_the_line(folder, name, fault):
    report = audit_of_ranks(folder, name, fault)
    assert report.faulty, str(report)
    assert report.kind == "mismatch", str(report)
    assert all(finding.line for finding in report.findings)
    line = programs.PROGRAMS[name][2][fault]
    assert line in report.findings[0].line + report.findings[0].detail, str(report)


@RANKS
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fully_sharded", "fully sharded parameters"),
        ("sharded_flat_parameters", "fully sharded parameters"),
        ("sends_messages", "the collective (send|recv) cannot be followed"),
        ("uses_functional_collectives", "functional collectives, which DTensor"),
    ],
)
def test_joined_ranks_that_cannot_be_followed_are_refused_by_name(folder, name, said):
    for rank in range(programs.N_RANKS):
        text = (folder / f"{name}.{rank}.txt").read_text()
        assert re.search(said, text), text
        assert "expected the collectives" in text


@RANKS
def test_join_ranks_saves_a_trace_and_names_a_missing_rank(folder, tmp_path):
    files = [folder / f"data_parallel..{rank}" for rank in range(2)]
    joined = join_ranks(files, tmp_path / "joined.trace")
    loaded = Trace.load(tmp_path / "joined.trace")
    assert loaded.title == joined.title == f"{programs.setting_of(programs.DEVICE)} (2 ranks)"
    assert [op.name for op in loaded.operations] == [op.name for op in joined.operations]
    with pytest.raises(gl.UsageError, match="expected the traces of all ranks, in order"):
        join_ranks(files[:1])
    other = folder / "sequence_parallel..1"
    with pytest.raises(gl.UsageError, match="do not reach the same collectives: rank 0 is at"):
        join_ranks([files[0], other])


@pytest.mark.slow("starts two processes")
def test_joined_ranks_example_of_the_page_runs_under_torchrun(tmp_path):
    page = Path(gl.__file__).parents[1] / "docs" / "own_model.md"
    (example,) = re.findall(
        r"`ranks.py`:\n```\n(.+?)```", page.read_text(encoding="utf-8"), re.DOTALL
    )
    (tmp_path / "ranks.py").write_text(example)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    command = (
        f"-m torch.distributed.run --nproc-per-node 2 --master-addr 127.0.0.1 --master-port {port}"
    )
    done = subprocess.run(
        [sys.executable, *command.split(), "ranks.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "mismatch: mm (backward) in module.2, under cpu (2 ranks)" in done.stdout
    assert "at ranks.py:25: loss = cross_entropy(net(x), y)" in done.stdout
    assert "loss = loss / n_ranks" in example.splitlines()[25]


# --- fast tests in one process --------------------------------------------------------------------


@pytest.fixture
def process_group(tmp_path, monkeypatch):
    monkeypatch.setitem(os.environ, "GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_recorded_collective_has_its_ranks_and_is_exact():
    def step():
        x = drawn(5, 3).requires_grad_()
        loss = x.exp().sum()
        loss.backward()
        dist.all_reduce(x.grad)
        gathered = torch.empty(5, 3)
        dist.all_gather_into_tensor(gathered, x.grad)
        return gathered

    trace = recorded(step)
    collectives = {op.name: op for op in trace.operations if "ranks" in op.arguments}
    assert list(collectives) == ["allreduce", "_allgather_base"]
    assert all(op.arguments["ranks"] == [0] for op in collectives.values())
    (result,) = [op for op in trace.operations if op.name == "loss"]
    value = trace.values[result.outputs[0]]
    assert value.exact
    assert 0 < value.deviation < 1e-6
    assert gl.audit(trace, join_ranks([trace])).kind == "rounding"


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("name", ["fully_sharded", "sharded_flat_parameters"])
def test_recorded_step_with_fsdp_is_refused_by_name(name, monkeypatch):
    monkeypatch.setattr(programs, "N_RANKS", 1)
    with pytest.raises(gl.UsageError, match=r"\(FSDP\)"):
        recorded(programs.REFUSED[name])


def test_join_ranks_needs_a_trace():
    with pytest.raises(gl.UsageError, match="expected one trace for each rank, got none"):
        join_ranks([])


def collective(ranks, name="allreduce"):
    return Operation(name, "forward", "", "train.py:3: reduce", [], [], [], "", {"ranks": ranks})


def operation(name):
    return Operation(name, "forward", "", "", [], [], [], "float32")


def test_join_ranks_orders_operations_by_collectives():
    """There are two groups of two ranks, and each rank calls them in a different order."""
    orders = [
        [operation("a0"), collective([0, 1]), collective([0, 2])],
        [collective([0, 1]), operation("a1"), collective([1, 3])],
        [collective([2, 3]), operation("a2"), collective([0, 2])],
        [collective([2, 3]), collective([1, 3]), operation("a3")],
    ]
    traces = [Trace("cpu", operations, {}) for operations in orders]
    joined = join_ranks(traces).operations
    assert sorted(op.name for op in joined) == sorted(["a0", "a1", "a2", "a3"] + 4 * ["allreduce"])
    assert [op.arguments["ranks"] for op in joined if op.name == "allreduce"].count([0, 1]) == 1
    names = [op.name for op in joined]
    assert names.index("a0") < names.index("allreduce")
    assert names[-1] == "a3"


def test_join_ranks_says_where_ranks_wait_for_each_other():
    traces = [Trace("cpu", [collective([0, 1], name)], {}) for name in ("allreduce", "broadcast")]
    with pytest.raises(gl.UsageError, match=r"rank 0 is at allreduce of ranks \[0, 1\], train.py"):
        join_ranks(traces)
    with pytest.raises(gl.UsageError, match="do not reach the same collectives"):
        join_ranks([replace(traces[0]), Trace("cpu", [], {})])
