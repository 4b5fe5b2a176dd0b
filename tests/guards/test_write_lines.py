"""Findings name the line that wrote, for NumPy, torch, other libraries, collation and threads."""

import collections
import ctypes
import queue
import re
import sys
import threading
import warnings

import numpy as np
import pytest
import torch

import gpulab as gl
from gpulab.guards import _write_lines


class Filler:
    """Keeps refilling one array, as some collate functions do."""

    def __init__(self, buffer):
        self.buffer = buffer

    def __call__(self, items):
        self.buffer[:] = items[0]  # collates
        return torch.from_numpy(self.buffer)


def slice_assignment(buffer, _):
    buffer[:] = 2  # writes


def ufunc_with_out(buffer, _):
    np.add(buffer, 1, out=buffer)  # writes


def copyto(buffer, _):
    np.copyto(buffer, 3)  # writes


def method(buffer, _):
    buffer.fill(7)  # writes


def augmented_in_a_loop(buffer, _):
    for index in range(4):
        buffer[index] += index + 1  # writes


def memory_view(buffer, _):
    memoryview(buffer)[0:1] = memoryview(np.full(1, 4, np.float32))  # writes


def foreign_library(_, tensor):
    ctypes.memset(tensor.data_ptr(), 1, 8)  # writes


def view_of_the_tensor(_, tensor):
    tensor.numpy()[1:] = 9  # writes


def torch_copy(_, tensor):
    tensor.copy_(torch.full((4,), 5.0))  # writes


def torch_out(_, tensor):
    torch.add(tensor.detach(), 1, out=tensor)  # writes


def through_data(_, tensor):
    tensor.data.mul_(3)  # writes


def collate(buffer, _):
    list(torch.utils.data.DataLoader([5.0, 6.0], batch_size=1, collate_fn=Filler(buffer)))


WRITERS = [
    *(
        slice_assignment,
        ufunc_with_out,
        copyto,
        method,
        augmented_in_a_loop,
        memory_view,
        foreign_library,
    ),
    *(view_of_the_tensor, torch_copy, torch_out, through_data, collate),
]
not_followed = pytest.mark.skipif(
    sys.gettrace() is not None, reason="a debugger or coverage follows the lines"
)


def finding_of(write, reads="any", own=False):
    weight = torch.ones(4, requires_grad=True)
    with warnings.catch_warnings(action="ignore"), gl.guard(on="warn", reads=reads) as report:
        buffer = np.ones(4, np.float32)
        tensor = torch.from_numpy(buffer)
        if own:  # torch's memory, of which NumPy has a view
            tensor = torch.ones(4)
            buffer = tensor.numpy()
        loss = (weight * tensor).sum()
        write(buffer, tensor)
        torch.ones(2).exp()
        loss.backward()
    (finding,) = report.findings
    return finding


@not_followed
@pytest.mark.parametrize("own", [False, True], ids=["NumPy's", "torch's"])
@pytest.mark.parametrize("write", WRITERS)
def test_guard_finding_names_the_line_that_wrote(write, own):
    finding = finding_of(write, own=own)
    (writer,) = finding.writers
    assert writer.text.endswith("# collates" if write is collate else "# writes")
    assert writer.function == ("__call__" if write is collate else write.__name__)
    assert f"written by {writer}\n      {writer.text}" in str(finding)


@not_followed
def test_guard_finding_names_one_of_several_threads_as_a_possible_writer():
    def thread(buffer, _):
        requests = queue.Queue()

        def work():
            requests.get()
            buffer[:] = 8  # writes

        worker = threading.Thread(target=work)
        worker.start()
        requests.put(None)
        worker.join()

    finding = finding_of(thread)
    assert any(writer.text.endswith("# writes") for writer in finding.writers)
    assert ("written by this line" in str(finding)) == (len(finding.writers) > 1)


@not_followed
def test_guard_finding_of_a_stale_read_names_the_line_that_filled_the_array_again():
    buffer, kept = np.zeros(4, np.float32), []
    with warnings.catch_warnings(action="ignore"), gl.guard(on="warn", reads="any") as report:
        for value in range(3):
            buffer[:] = value + 1  # fills
            kept.append(torch.from_numpy(buffer))
        torch.stack(kept)
    assert [writer.text for writer in report.findings[0].writers] == [
        "buffer[:] = value + 1  # fills"
    ]


def test_guard_finding_says_that_the_writer_is_unknown_under_reads_backward():
    finding = finding_of(slice_assignment, reads="backward")
    assert finding.writers == ()
    assert re.search(r'the line that wrote is not known.*guard\(reads="any"\)', finding.explanation)


def test_guard_does_not_trace_lines_where_another_tracer_is_active():
    def trace(*_):
        return None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        finding = finding_of(slice_assignment)
        assert sys.gettrace() is trace
    finally:
        sys.settrace(before)
    assert finding.writers == ()
    assert "the line that wrote is not known" in finding.explanation
    assert "guard(" not in finding.explanation


def test_guard_traces_lines_no_longer_than_its_block():
    before = sys.gettrace(), threading.gettrace()
    finding_of(slice_assignment)
    assert (sys.gettrace(), threading.gettrace()) == before
    assert sys._getframe().f_trace is None or before[0] is not None


def test_guard_traces_no_line_before_memory_is_shared():
    before = sys.gettrace()
    with gl.guard(reads="any"):
        torch.ones(3, requires_grad=True).exp().sum().backward()
        assert sys.gettrace() is before


# --- writes to parts of arrays --------------------------------------------------------------------


def one_element(array):
    array[5, 7] = 9  # writes


def one_row(array):
    array[-3] = 9  # writes


def patch(array):
    array[10:40, 10:40] = 1  # writes


def some_rows(array):
    array[::50] = 1  # writes


def partial_write_findings(size, writes, steps=1):
    """Return the findings of training steps that share one array of size × size, and the report."""
    array, layer = np.zeros((size, size), np.float32), torch.nn.Linear(size, 2)
    with warnings.catch_warnings(action="ignore"), gl.guard(on="warn", reads="any") as report:
        for step in range(steps):
            array[0, 0] = step
            loss = layer(torch.from_numpy(array)).sum()
            for write in writes:
                write(array + 1)
                write(array)
                array[0, 0] += 0
            array.sum()
            loss.backward()
            array[...] = 0
    return report.findings


@pytest.fixture(autouse=True)
def full_time(monkeypatch):
    """Give the guard the time for comparing that it has when a program begins."""
    monkeypatch.setattr(_write_lines, "_time_limit", _write_lines._TimeLimit())


@pytest.fixture
def no_time(monkeypatch):
    """Give the guard no time to compare all of the memory."""
    monkeypatch.setattr(_write_lines, "COMPARING_SHARE", 0.0)
    _write_lines._time_limit.available = 0.0
    _write_lines._time_limit.has_time = False


def names(finding):
    return [writer.function for writer in finding.writers]


@not_followed
@pytest.mark.parametrize("size", [64, 1000])
@pytest.mark.parametrize("write", [one_element, one_row, patch, some_rows])
def test_guard_names_the_line_that_wrote_into_a_part_of_an_array(write, size):
    (finding,) = partial_write_findings(size, [write])
    assert [writer.text.endswith("# writes") for writer in finding.writers] == [True]
    assert names(finding) == [write.__name__]
    assert "not known" not in finding.explanation


@not_followed
@pytest.mark.usefixtures("no_time")
@pytest.mark.parametrize(("size", "has_time"), [(1000, False), (1300, False), (1300, True)])
def test_guard_names_the_line_when_a_write_that_it_missed_is_repeated(monkeypatch, size, has_time):
    # There is no time to compare all blocks, or the array has more blocks than are compared.
    _write_lines._time_limit.available = float(has_time)
    _write_lines._time_limit.has_time = has_time
    # The guard compares the last block first, but the write is in a different block.
    monkeypatch.setattr("random.Random.randrange", lambda _, stop: stop - 1)
    (first,) = partial_write_findings(size, [one_element], steps=1)
    assert names(first) == []
    assert first.explanation.count("; the line that wrote is not known, only that") == 1
    (repeated,) = partial_write_findings(size, [one_element], steps=4)
    assert names(repeated) == ["one_element"]
    assert repeated.count == 4
    assert repeated.explanation.endswith("; the line that wrote is not known for 1 of 4 times")


@not_followed
@pytest.mark.usefixtures("no_time")
def test_guard_names_no_line_that_ran_after_the_write_when_it_has_no_time():
    # The blocks that are compared vary from step to step.
    (finding,) = partial_write_findings(1000, [one_element, one_row, patch], steps=8)
    assert finding.writers
    assert all(writer.text.endswith("# writes") for writer in finding.writers)


@not_followed
def test_guard_names_all_lines_that_wrote_into_one_tensor():
    (finding,) = partial_write_findings(64, [one_row, patch])
    assert names(finding) == ["one_row", "patch"]
    assert str(finding).count("written by ") == 2
    assert "or by" not in str(finding)


@not_followed
@pytest.mark.parametrize("number", [2, 40])
def test_guard_names_the_writers_of_several_buffers_that_one_line_saved(number):
    buffers, layer = [np.zeros((4, 8), np.float32) for _ in range(number)], torch.nn.Linear(8, 2)
    with warnings.catch_warnings(action="ignore"), gl.guard(on="warn", reads="any") as report:
        losses = [layer(torch.from_numpy(buffer)).sum() for buffer in buffers]
        buffers[0][:] = 1
        buffers[-1][:] = 2
        sum(losses).backward()
    (finding,) = report.findings
    assert finding.count == 2
    assert {writer.text for writer in finding.writers} == {
        "buffers[0][:] = 1",
        "buffers[-1][:] = 2",
    }
    assert "or by" not in str(finding)


@not_followed
@pytest.mark.parametrize("width", [3, 500, 40_000])
def test_guard_names_only_the_line_that_wrote_into_the_row_that_was_saved(width):
    array, weight = np.zeros((6, width), np.float32), torch.ones(width, requires_grad=True)
    with warnings.catch_warnings(action="ignore"), gl.guard(on="warn", reads="any") as report:
        loss = (weight * torch.from_numpy(array)[2]).sum()
        array[[1, 3]] = 5
        array[2, 1] = 6
        array[3:] = 7
        array[:2] = 8
        loss.backward()
    (finding,) = report.findings
    assert [writer.text for writer in finding.writers] == ["array[2, 1] = 6"]


@not_followed
def test_guard_names_the_row_that_a_loop_wrote_long_ago():
    array, weight = np.zeros((3000, 8), np.float32), torch.ones(8, requires_grad=True)
    with warnings.catch_warnings(action="ignore"), gl.guard(on="warn", reads="any") as report:
        loss = (weight * torch.from_numpy(array)[2]).sum()
        for row in range(len(array)):
            array[row] = row + 1
        loss.backward()
    (finding,) = report.findings
    assert [writer.text for writer in finding.writers] == ["array[row] = row + 1"]


@not_followed
def test_guard_attributes_no_write_after_its_block():
    array, weight = np.zeros(8, np.float32), torch.ones(8, requires_grad=True)
    with warnings.catch_warnings(action="ignore"):
        with gl.guard(on="warn", reads="any") as report:
            loss = (weight * torch.from_numpy(array)).sum()
        array[:] = 1
        loss.backward()
    assert report.findings[0].writers == ()
    assert "the line that wrote is not known" in report.findings[0].explanation


@not_followed
def test_guard_names_the_writer_in_a_block_that_is_entered_again():
    array, weight = np.zeros(8, np.float32), torch.ones(8, requires_grad=True)
    tensor, report = torch.from_numpy(array), gl.guard(on="warn", reads="any")
    with warnings.catch_warnings(action="ignore"):
        with report:
            (weight * tensor).sum().backward()
        array[:] = 1
        with report:
            loss = (weight * tensor).sum()
            array[:] = 2
            loss.backward()
    assert [writer.text for writer in report.findings[0].writers] == ["array[:] = 2"]


@not_followed
def test_guard_names_no_line_if_a_thread_that_is_not_traced_may_have_written():
    array, weight = np.zeros(8, np.float32), torch.ones(8, requires_grad=True)
    requests, answers = queue.Queue(), queue.Queue()

    def work():
        requests.get()
        array[:] = 8
        answers.put(None)
        requests.get()

    worker = threading.Thread(target=work)
    worker.start()  # before the guard
    try:
        with warnings.catch_warnings(action="ignore"), gl.guard(on="warn", reads="any") as report:
            loss = (weight * torch.from_numpy(array)).sum()
            requests.put(None)
            answers.get()
            loss.backward()
    finally:
        requests.put(None)
        worker.join()
    assert report.findings[0].writers == ()


@not_followed
def test_guard_that_raises_says_how_to_find_the_line_next_time(monkeypatch):
    array, weight = np.zeros(8, np.float32), torch.ones(8, requires_grad=True)
    monkeypatch.setattr(_write_lines.WriteLines, "writers_since", lambda *_: [])

    def step():
        loss = (weight * torch.from_numpy(array)).sum()
        array[:] = 1
        loss.backward()

    with pytest.raises(gl.OverwrittenError) as error, gl.guard(reads="any"):
        step()
    assert 'gpulab.guard(on="warn", reads="any")' in error.value.finding.explanation


@not_followed
def test_guard_does_not_trace_named_tuples_but_traces_text_that_the_program_executes(monkeypatch):
    traced = []

    def end_line(self, thread, line):
        traced.append(line)
        return original(self, thread, line)

    original = _write_lines.WriteLines._end_line
    monkeypatch.setattr(_write_lines.WriteLines, "_end_line", end_line)
    pair = collections.namedtuple("pair", "first second")
    with gl.guard(reads="any"):
        torch.from_numpy(np.zeros(3))
        pair(1, 2)
        exec("executed = 1")
    files = [line.file for line in traced if line is not None]
    assert files.count("<string>") == 1
    assert __file__ in files


def test_guard_limits_the_time_for_comparing_memory(monkeypatch):
    now = 0.0
    monkeypatch.setattr(_write_lines.time, "perf_counter", lambda: now)
    limit = _write_lines._TimeLimit()
    compared = 0.0
    for _ in range(10_000):
        now += 0.01  # a line of the program
        limit.start()
        if limit.has_time:
            now += 0.05
            compared += 0.05
        limit.stop()
    allowed = _write_lines.MAX_COMPARING_SECONDS + _write_lines.COMPARING_SHARE * now
    assert 0.8 * allowed < compared < allowed + 0.05
