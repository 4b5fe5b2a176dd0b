"""A finding names a line of user code, never one of the guard or of its calls of torch."""

import numpy as np
import pytest
import torch

import gpulab as gl
from gpulab import _torch_internals as internals
from gpulab.guards._call_sites import user_line
from gpulab.guards._scripts import remove_guard_frames

aten = torch.ops.aten


def test_user_line_is_not_in_the_module_that_calls_torchs_private_api():
    class Module:
        _call_impl = staticmethod(user_line)

    line = internals.call_as_written(Module())
    assert (line.file, line.text) == (__file__, "line = internals.call_as_written(Module())")


def test_guard_finding_blames_the_line_that_calls_through_that_module():
    buffer = np.ones((2, 2), np.float32)
    weight = torch.ones(2, 2, requires_grad=True)
    with gl.guard():
        loss = internals.call_composite_kernel(
            aten.matmul.default, (weight, torch.from_numpy(buffer)), {}
        ).sum()
    buffer[:] = 2
    with pytest.raises(gl.OverwrittenError) as caught:
        loss.backward()
    line = caught.value.finding.lines["saved by"]
    assert (line.file, line.text.partition(" = ")[0]) == (__file__, "loss")


def test_remove_guard_frames_leaves_no_frame_of_that_module():
    with pytest.raises(RuntimeError) as caught:
        internals.call_composite_kernel(
            aten.matmul.default, (torch.ones(2, 3), torch.ones(2, 3)), {}
        )
    remove_guard_frames(caught.value)
    files, trace = [], caught.value.__traceback__
    while trace:
        files.append(trace.tb_frame.f_code.co_filename)
        trace = trace.tb_next
    assert files == [__file__]


def test_remove_guard_frames_keeps_a_module_whose_name_begins_like_runpy():
    namespace = {"__name__": "runpy_tools"}
    exec(compile("def fail():\n    raise ValueError('x')", "runpy_tools.py", "exec"), namespace)
    with pytest.raises(ValueError, match="x") as caught:
        namespace["fail"]()
    remove_guard_frames(caught.value)
    assert caught.value.__traceback__.tb_next.tb_frame.f_code.co_filename == "runpy_tools.py"
