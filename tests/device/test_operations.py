import numpy as np

from gpulab.device import operations
from gpulab.device.operations import FORMATS, byte_round_trip


def test_the_numbers_are_those_of_numpy_and_a_conversion_that_loses_bytes_is_seen(monkeypatch):
    table = byte_round_trip().set_index(["way", "format"])
    assert len(table) == 5 * len(FORMATS) == len(table.index.unique())
    pixels = np.arange(256, dtype=np.float32)
    divided, multiplied = pixels / np.float32(255), pixels * np.float32(1 / 255)
    assert table.loc[("x * (1 / 255)", "float32"), "as_division"] == (divided == multiplied).sum() < 256
    assert table.loc[("x / 255", "float32"), "as_division"] == 256
    assert table.loc[("x * (1 / 255)", "float32"), "returned"] == (np.rint(multiplied * 255) == pixels).sum()
    assert table.loc[("x * (1 / 255)", "float32"), "cut"] == (np.trunc(multiplied * np.float32(255)) == pixels).sum()
    monkeypatch.setattr(operations, "_to_numbers", lambda x, _, dtype: {"lossy": (x // 2 * 2).to(dtype) / 255})
    assert byte_round_trip().set_index("format").loc["float32", "returned"] == 128
