import numpy as np
import pytest
import torch

import gpulab as gl
from gpulab.diagnostics.operations import FORMATS, WAYS


def test_every_way_in_every_format_is_tried():
    table = gl.conversion_check()
    assert len(table) == len(FORMATS) * len(WAYS) == table[["way", "format"]].drop_duplicates().shape[0]
    assert (table.device == "cpu").all()


def test_the_numbers_are_those_of_numpy():
    table = gl.conversion_check().set_index(["way", "format"])
    pixels = np.arange(256, dtype=np.float32)
    divided, multiplied = pixels / np.float32(255), pixels * np.float32(1 / 255)
    assert table.loc[("x * (1 / 255)", "float32"), "as_division"] == (divided == multiplied).sum() < 256
    assert table.loc[("x / 255", "float32"), "as_division"] == 256
    assert table.loc[("x * (1 / 255)", "float32"), "returned"] == (np.rint(multiplied * 255) == pixels).sum()
    assert table.loc[("x * (1 / 255)", "float32"), "cut"] == (np.trunc(multiplied * np.float32(255)) == pixels).sum()


def test_a_conversion_that_loses_bytes_is_seen(monkeypatch):
    monkeypatch.setitem(WAYS, "lossy", lambda _, dtype: (torch.arange(256) // 2 * 2).to(dtype) / 255)
    table = gl.conversion_check().set_index(["way", "format"])
    assert table.loc[("lossy", "float32"), "returned"] == 128


def test_a_device_that_is_not_here_is_told():
    with pytest.raises(gl.UsageError, match="tpu"):
        gl.conversion_check("tpu")
    if not torch.cuda.is_available():
        with pytest.raises(gl.GpulabError, match="cannot run here"):
            gl.conversion_check("cuda")
