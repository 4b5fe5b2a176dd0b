"""Memory that a tensor shares is written, and the tensor is read later: told where it is a fault, and nowhere else."""

import collections
import contextlib
import importlib
import queue
import re
import sys
import tempfile
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import gpulab as gl
from gpulab.cli import app
from gpulab.guards.findings import CAUSES

NET = nn.Linear(4, 2)
MAKERS = {  # by a name that is looked up when it is called, as programs do
    "from_numpy": lambda array: torch.from_numpy(array),
    "as_tensor": lambda array: torch.as_tensor(array),
    "asarray": lambda array: torch.asarray(array),
    "from_dlpack": lambda array: torch.from_dlpack(array),
    "from_dlpack of utils": lambda array: torch.utils.dlpack.from_dlpack(array),
    "frombuffer": lambda array: torch.frombuffer(array, dtype=torch.float32),
}
MADE_BEFORE = {make.__name__: make for make in (torch.from_numpy, torch.as_tensor, torch.asarray)}  # no guard is there


class Environment:
    """Like many of reinforcement learning: what it sees lies in one array, which the next step overwrites."""

    def __init__(self):
        self.seen = np.zeros(4, np.float32)

    def step(self):
        self.seen += 1
        return self.seen


def replayed(make=MAKERS["from_numpy"]):
    """A policy looks at each observation, and learns from all of them later."""
    environment, memory = Environment(), collections.deque(maxlen=8)
    for _ in range(5):
        seen = make(environment.step())
        with torch.no_grad():
            NET(seen)
        memory.append(seen)
    return sum(NET(seen).sum() for seen in memory)


def stacked(make=MAKERS["from_numpy"]):
    environment = Environment()
    return torch.stack([make(environment.step()) for _ in range(5)]).sum()


def compared(make=MAKERS["from_numpy"]):
    """What was before the step and what is after it, which are the same."""
    environment = Environment()
    before = make(environment.step())
    after = make(environment.step())
    return NET(after).sum() - NET(before[None])[0].sum()


WRONG = {"stale": [replayed, compared], "together": [stacked]}


@pytest.mark.parametrize(("cause", "program"), [(cause, program) for cause in WRONG for program in WRONG[cause]])
def test_a_fault_is_told_with_who_made_it_who_read_it_and_the_cure(cause, program):
    with pytest.raises(gl.OverwrittenError) as told, gl.guard(reads="any"):
        program()
    message = str(told.value)
    assert CAUSES[cause][0].partition(": ")[2] in message
    assert "  made by " in message
    assert f"tests/guards/{__name__.rpartition('.')[2]}.py" in message
    assert "torch.tensor(" in message
    with warnings.catch_warnings(action="ignore"), gl.guard(on="warn", reads="any") as report:
        program()
    assert {finding.cause for finding in report.findings} == {cause}


def test_a_fault_that_a_backward_pass_meets_is_told_once():
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
def test_whatever_makes_a_tensor_without_a_copy_is_noted(make):
    with pytest.raises(gl.OverwrittenError, match="share one memory"), gl.guard(reads="any"):
        stacked(make)


@pytest.mark.parametrize("program", [replayed, stacked, compared])
@pytest.mark.parametrize(
    "make", [lambda array: torch.from_numpy(array.copy()), torch.tensor, lambda array: torch.as_tensor(array).clone()]
)
def test_with_a_copy_the_same_programs_are_right(program, make):
    with gl.guard(reads="any") as report:
        program(make)
    assert report.findings == []


def staged():
    """One tensor over one array, filled again for each batch: a view on purpose."""
    array = np.zeros((3, 4), np.float32)
    batch = torch.from_numpy(array)
    for number in range(4):
        array[:] = number
        NET(batch).sum().backward()


def made_anew():
    environment = Environment()
    for _ in range(4):
        NET(torch.from_numpy(environment.step())).sum().backward()


def two_buffers():
    arrays = [np.zeros(4, np.float32) for _ in range(2)]
    before = torch.from_numpy(arrays[1])
    for number in range(4):
        arrays[number % 2][:] = number
        now = torch.from_numpy(arrays[number % 2])
        (NET(now) - NET(before)).sum().backward()
        before = now.clone()


def loaded():
    data = torch.utils.data.TensorDataset(torch.from_numpy(np.random.default_rng(0).random((12, 4), np.float32)))
    batches = [batch for (batch,) in torch.utils.data.DataLoader(data, batch_size=3)]
    return torch.cat(batches).sum()


def one_tensor_many_times():
    return torch.stack([torch.from_numpy(Environment().step())] * 3).sum()


@pytest.mark.parametrize("program", [staged, made_anew, two_buffers, loaded, one_tensor_many_times])
def test_a_right_program_gives_no_finding_and_the_same_bits(program):
    def gradients():
        NET.zero_grad(set_to_none=True)
        returned = program()
        return returned, None if NET.weight.grad is None else NET.weight.grad.clone()

    plain = gradients()
    with gl.guard(reads="any") as report:
        guarded = gradients()
    assert report.findings == []
    for one, other in zip(plain, guarded, strict=True):
        assert one is other is None or torch.equal(one, other)


def test_what_makes_tensors_is_put_back_and_reads_is_one_of_two():
    makers = [getattr(torch, name) for name in ("from_numpy", "as_tensor", "frombuffer")]
    with contextlib.suppress(ZeroDivisionError), gl.guard(reads="any"), gl.guard(reads="any"):
        assert torch.frombuffer is not makers[2]
        raise ZeroDivisionError
    assert [getattr(torch, name) for name in ("from_numpy", "as_tensor", "frombuffer")] == makers
    with pytest.raises(gl.UsageError, match="reads='all': expected 'backward' or 'any'"):
        gl.guard(reads="all")


def test_threads_may_leave_in_another_order_than_they_came():
    maker, first_left, both_in = torch.frombuffer, threading.Event(), threading.Event()

    def first():
        with gl.guard(reads="any"):
            both_in.wait(60)
        first_left.set()

    thread = threading.Thread(target=first)
    thread.start()
    with gl.guard(reads="any") as report:
        both_in.set()
        assert first_left.wait(60)
        with pytest.raises(gl.OverwrittenError):
            stacked()
    thread.join()
    assert report.findings
    assert torch.frombuffer is maker


def test_of_a_large_memory_what_was_overwritten_is_told_from_what_was_not():
    block = gl.guards.shared_reads.BLOCK // 4
    array = np.zeros((3, block), np.float32)
    array[2, -1] = 1
    with gl.guard(reads="any"):
        old = torch.from_numpy(array)
        old[0].sum()
        array[1] = 1
        new = torch.from_numpy(array)
        assert old[0].sum() + old[2].sum() == 1
        assert new[1].sum() == block
        with pytest.raises(gl.OverwrittenError, match=f"of shape \\({block},\\) on cpu: its memory was overwritten"):
            old[1].sum()
        old[1].copy_(new[1])  # which reads nothing of it, and is counted
        assert old.sum() == block + 1


def test_of_many_tensors_those_are_forgotten_whose_memory_is_gone():
    guard = gl.guard(reads="any")
    with guard:
        for _ in range(3000):
            torch.from_numpy(np.zeros(4, np.float32))
    assert len(guard._shared.births) <= gl.guards.shared_reads.FEW


@pytest.mark.parametrize("make", MADE_BEFORE.values(), ids=MADE_BEFORE)
@pytest.mark.parametrize("program", [replayed, stacked, compared])
def test_names_that_were_imported_before_the_guard_are_followed(make, program):
    with pytest.raises(gl.OverwrittenError), gl.guard(reads="any"):
        program(make)


def kept_beside_a_temporary():
    """The tensor that is made last is gone when the list is read."""
    camera, memory = Environment(), []
    for _ in range(5):
        seen = camera.step()
        memory.append(torch.from_numpy(seen))
        NET(torch.from_numpy(seen)).argmax()
    return torch.stack(memory)


def one_kept_and_temporaries():
    """The difference to a background is that of a thing and itself."""
    camera = Environment()
    background = torch.from_numpy(camera.step())
    return torch.from_numpy(camera.step()).double() - background.double()


def kept_from_a_buffer():
    buffer, kept = bytearray(4), []
    for number in range(3):
        buffer[0] = number
        kept.append(torch.asarray(memoryview(buffer), dtype=torch.uint8))
    return torch.stack(kept)


def from_a_thread():
    """A loader's thread makes the tensors."""
    camera, waiting = Environment(), queue.Queue()
    thread = threading.Thread(target=lambda: [waiting.put(torch.from_numpy(camera.step())) for _ in range(3)])
    thread.start()
    thread.join()
    return torch.stack([waiting.get() for _ in range(3)])


def kept_from_a_mapped_file():
    """Another mapping of the file writes, as another process would."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(bytes(64))
        file.flush()
        read, written = (np.memmap(file.name, np.float32, "r+") for _ in range(2))
        kept = []
        for number in range(3):
            written[:] = number
            kept.append(torch.from_numpy(read))
        return torch.stack(kept)


SUBTLE = [kept_from_a_mapped_file, kept_beside_a_temporary, one_kept_and_temporaries, kept_from_a_buffer, from_a_thread]


@pytest.mark.parametrize("program", SUBTLE, ids=lambda program: program.__name__)
def test_subtle_programs_are_caught(program):
    with pytest.raises(gl.OverwrittenError), gl.guard(reads="any"):
        program()


def prefixes():
    """What was appended later lies behind what an earlier tensor shows."""
    tokens, contexts = np.zeros(64, np.int64), []
    for length in range(1, 9):
        tokens[length - 1] = length
        contexts.append(torch.from_numpy(tokens)[:length])
    assert [context.tolist() for context in contexts] == [list(range(1, n)) for n in range(2, 10)]


def columns():
    """Each tensor shows a column, and other columns are filled after it."""
    table, kept = np.zeros((5, 3), np.float32), []
    for column in range(3):
        table[:, column] = column + 1
        kept.append(torch.from_numpy(table)[:, column])
    assert torch.stack(kept).sum() == 5 * (1 + 2 + 3)


def logged_by_a_copy():
    """A view that is meant, and copies of the array beside it."""
    array, model = np.zeros(4, np.float32), NET
    batch, losses = torch.from_numpy(array), []
    for number in range(3):
        array[:] = number
        losses.append(torch.tensor(array).mean())
        model(batch).sum().backward()


@pytest.mark.parametrize("program", [prefixes, columns, logged_by_a_copy], ids=lambda program: program.__name__)
def test_parts_that_did_not_change_and_copies_beside_a_view_are_no_finding(program):
    with gl.guard(reads="any") as report:
        program()
    assert report.findings == []


def test_a_list_of_numbers_is_a_read():
    camera = Environment()
    with pytest.raises(gl.OverwrittenError, match="tolist read a tensor"), gl.guard(reads="any"):
        [seen.tolist() for seen in [torch.from_numpy(camera.step()) for _ in range(3)]]


sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
CASES = importlib.import_module("shared_memory_cases")


@pytest.mark.parametrize("case", CASES.CASES, ids=lambda case: case.program.__name__)
def test_faults_of_public_threads_are_caught_where_they_are_and_right_programs_left_alone(case):
    seen = CASES.tried(case)
    assert (seen["as expected"], seen["placed"]) == (True, True if case.cause else None), seen


# --- a script that knows nothing of gpulab ----------------------------------------------------------------------

SCRIPT = """
import sys
import numpy as np, torch
from beside import observe

seen, kept = np.zeros(4, np.float32), []
for number in range(int(sys.argv[2])):
    kept.append(observe(seen))
print("sum", float(torch.stack(kept).sum()), __name__)
sys.exit(int(sys.argv[-1]))
"""
BESIDE = """
import torch

def observe(seen):
    seen += 1
    return torch.from_numpy(seen)
"""


@pytest.fixture
def guarded(tmp_path, monkeypatch):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text(BESIDE)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(*options, arguments=("--steps", "3", "0")):
        command = ["guard", *options, str(tmp_path / "script.py"), *arguments]
        return CliRunner().invoke(app, [str(each) for each in command])

    yield run
    sys.modules.pop("beside", None)


def test_a_script_is_run_with_its_arguments_and_what_is_found_is_told(guarded):
    done = guarded()
    assert (done.exit_code, "sum 36.0 __main__" in done.output) == (1, True)
    assert "stack read a tensor" in done.output
    assert re.search(r"made by observe, .*beside.py:6\n +return torch.from_numpy\(seen\)", done.output)
    assert re.search(r"read by <module>, .*script.py:9", done.output)


def test_a_script_that_is_right_ends_as_it_would_and_says_how_much_was_looked_at(guarded):
    done = guarded(arguments=("--steps", "1", "0"))
    assert (done.exit_code, "nothing was overwritten in 0 uses of saved tensors and 1 reads" in done.output) == (
        0,
        True,
    )
    assert guarded(arguments=("--steps", "1", "3")).exit_code == 3, "the script's own status"


def test_a_script_can_be_ended_at_the_first_finding_and_must_be_there(guarded):
    done = guarded("--stop")
    assert (done.exit_code, "sum" in done.stdout) == (1, False)
    assert "no such script" in str(CliRunner().invoke(app, ["guard", "nowhere.py"]).exception)
