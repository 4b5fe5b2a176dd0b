"""Writes to memory that a tensor shares before it is read are reported only if they are faults."""

import contextlib
import re
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import gpulab as gl
from benchmarks.correctness import shared_memory_cases
from gpulab.cli import app
from gpulab.guards import _shared_reads as shared_reads

NET = nn.Linear(4, 2)
MAKERS = {  # each looks up its function's name when it is called, as programs do
    "from_numpy": lambda array: torch.from_numpy(array),
    "as_tensor": lambda array: torch.as_tensor(array),
    "asarray": lambda array: torch.asarray(array),
    "from_dlpack": lambda array: torch.from_dlpack(array),
    "from_dlpack of utils": lambda array: torch.utils.dlpack.from_dlpack(array),
    "frombuffer": lambda array: torch.frombuffer(array, dtype=torch.float32),
    **{
        f"{make.__name__}, imported before": make
        for make in (torch.from_numpy, torch.as_tensor, torch.asarray)
    },
}


class Environment:
    """Like many in reinforcement learning: each step overwrites the array with the observation."""

    def __init__(self):
        self.seen = np.zeros(4, np.float32)

    def step(self):
        self.seen += 1
        return self.seen


def stacked(make=MAKERS["from_numpy"]):
    environment = Environment()
    return torch.stack([make(environment.step()) for _ in range(2)]).sum()


@pytest.mark.parametrize("case", shared_memory_cases.CASES, ids=lambda case: case.program.__name__)
def test_guard_of_public_programs_that_share_memory(case):
    seen = shared_memory_cases.tried(case)
    assert (seen["as expected"], seen["placed"]) == (True, True if case.cause else None), seen


def test_guard_finding_of_a_stale_read_names_maker_reader_and_remedy():
    environment = Environment()
    with warnings.catch_warnings(action="ignore"), gl.guard(on="warn", reads="any") as report:
        first = torch.from_numpy(environment.step())
        torch.from_numpy(environment.step())
        first.sum()
    (finding,) = report.findings
    assert (finding.cause, finding.operation, finding.shape) == ("stale", "sum", (4,))
    assert {did: line.text for did, line in finding.lines.items()} == {
        "made by": "first = torch.from_numpy(environment.step())",
        "made again by": "torch.from_numpy(environment.step())",
        "read by": "first.sum()",
    }
    assert {line.file for line in finding.lines.values()} == {__file__}
    assert (
        "float32 of shape (4,) on cpu: its memory was overwritten before it was read again"
        in str(finding)
    )
    assert re.search(r"do: copy .*: torch\.tensor\(environment\.seen\)", str(finding))


def test_guard_reports_a_fault_that_a_backward_pass_meets_once():
    frame = np.zeros((3, 4), np.float32)

    def window():
        losses = []
        for number in range(4):
            frame[:] = number
            losses.append(NET(torch.from_numpy(frame)).square().mean())
        sum(losses).backward()

    with warnings.catch_warnings(action="ignore"), gl.guard(on="warn", reads="any") as report:
        window()
    ((cause, count),) = [(finding.cause, finding.count) for finding in report.findings]
    assert (cause, count) == ("numpy", 3)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_guard_notes_every_function_that_makes_a_tensor_without_a_copy(make):
    with pytest.raises(gl.OverwrittenError, match="share one memory"), gl.guard(reads="any"):
        stacked(make)


def test_guard_puts_back_the_functions_that_it_replaces_in_torch():
    def own():
        names = [
            (torch, "from_numpy"),
            (torch, "frombuffer"),
            (torch.Tensor, "numpy"),
            (torch.Tensor, "tolist"),
        ]
        return [getattr(owner, name) for owner, name in [*names, (torch.cuda.Event, "query")]]

    before = own()
    with contextlib.suppress(ZeroDivisionError), gl.guard(reads="any"):
        with gl.guard(reads="any"), gl.guard(reads="backward"):
            assert torch.ones(2).tolist() == torch.ones(2).numpy().tolist() == [1, 1]
        assert not {*before} & {*own()}
        raise ZeroDivisionError
    assert own() == before


def test_guard_refuses_other_reads():
    with pytest.raises(gl.UsageError, match="reads='all': expected 'backward' or 'any'"):
        gl.guard(reads="all")


def test_guard_of_one_thread_can_outlive_that_of_another():
    maker, first = torch.frombuffer, gl.guard(reads="any")
    with ThreadPoolExecutor(1) as thread:
        thread.submit(first.__enter__).result()
        with gl.guard(reads="any"):
            thread.submit(first.__exit__, None, None, None).result()
            with pytest.raises(gl.OverwrittenError):
                stacked(MAKERS["frombuffer"])
    assert torch.frombuffer is maker


def test_guard_tells_the_overwritten_part_of_a_large_memory_from_others():
    block = shared_reads.BLOCK_BYTES // 4
    array = np.zeros((3, block), np.float32)
    array[2, -1] = 1
    with gl.guard(reads="any"):
        old = torch.from_numpy(array)
        old[0].sum()
        array[1] = 1
        new = torch.from_numpy(array)
        assert old[0].sum() + old[2].sum() == 1
        assert new[1].sum() == block
        with pytest.raises(
            gl.OverwrittenError, match=f"of shape \\({block},\\) on cpu: its memory was overwritten"
        ):
            old[1].sum()
        old[1].copy_(new[1])  # an operation that does not read `old[1]`, and increments its version
        assert old.sum() == block + 1


def test_guard_forgets_tensors_whose_memory_is_gone():
    guard = gl.guard(reads="any")
    with guard:
        for array in np.zeros((3000, 4), np.float32):
            torch.from_numpy(array)
    assert len(guard._shared_reads.tracked) <= shared_reads.PRUNE_INTERVAL


def kept_beside_a_temporary():
    """The tensor that is created last no longer exists when the list is read."""
    camera, memory = Environment(), []
    for _ in range(5):
        seen = camera.step()
        memory.append(torch.from_numpy(seen))
        NET(torch.from_numpy(seen)).argmax()
    return torch.stack(memory)


def read_as_a_list():
    camera = Environment()
    return [seen.tolist() for seen in [torch.from_numpy(camera.step()) for _ in range(3)]]


@pytest.mark.parametrize("program", [kept_beside_a_temporary, read_as_a_list])
def test_guard_finds_overwritten_memory_in_subtle_programs(program):
    with pytest.raises(gl.OverwrittenError), gl.guard(reads="any"):
        program()


def columns():
    """Each tensor is a view of a column, and other columns are filled after it."""
    table, kept = np.zeros((5, 3), np.float32), []
    for column in range(3):
        table[:, column] = column + 1
        kept.append(torch.from_numpy(table)[:, column])
    assert torch.stack(kept).sum() == 5 * (1 + 2 + 3)


def logged_by_a_copy():
    """An intended view, none or all of which is read, in addition to copies of the array."""
    array = np.zeros(4, np.float32)
    batch = torch.from_numpy(array)
    for number in range(3):
        array[:] = number
        torch.tensor(array).mean()
        NET(batch).sum().backward()
        batch[:0].sum()
    torch.stack([batch, torch.from_numpy(array)])


@pytest.mark.parametrize("program", [columns, logged_by_a_copy])
def test_guard_leaves_unchanged_parts_and_copies_beside_a_view_alone(program):
    with gl.guard(reads="any") as report:
        program()
    assert report.findings == []


# --- a script that does not use gpulab ------------------------------------------------------------

SCRIPT = """
import sys
import numpy as np, torch
seen, kept = np.zeros(4, np.float32), []
for number in range(int(sys.argv[1])):
    seen += 1
    kept.append(torch.from_numpy(seen))
print("sum", float(torch.stack(kept).sum()))
sys.exit(int(sys.argv[2]))
"""
CLEAN = "nothing was overwritten (uses of saved tensors: 0; reads of memory shared"


@pytest.mark.parametrize(
    ("options", "arguments", "status", "printed", "words"),
    [
        ([], ["3", "0"], 1, "sum 36.0\n", "stack read a tensor"),
        (["--stop"], ["3", "0"], 1, "", "stack read a tensor"),
        ([], ["1", "0"], 0, "sum 4.0\n", CLEAN),
        ([], ["1", "3"], 3, "sum 4.0\n", CLEAN),
    ],
)
def test_guard_command_runs_a_script(
    options, arguments, status, printed, words, tmp_path, monkeypatch
):
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    done = CliRunner().invoke(app, ["guard", *options, str(tmp_path / "script.py"), *arguments])
    assert (done.exit_code, done.stdout) == (status, printed)
    assert words in done.stderr


def test_guard_report_counts_compared_and_uncompared_reads():
    array = np.ones(4, np.float32)
    with gl.guard(reads="any") as report:
        torch.from_numpy(array) + 1
        torch.ones(3).to_sparse() * 2
    assert (report.checked, report.unchecked) == (0, 1)
    nothing_found, uncompared = str(report).splitlines()
    assert nothing_found.startswith("nothing was overwritten")
    assert [int(number) for number in re.findall(r": (\d+)", nothing_found)] == [0, 1]
    assert uncompared.startswith("not compared")
    assert uncompared.endswith(": 1")
