"""Findings name the line that wrote, for NumPy, torch, other libraries, collation and threads."""

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
