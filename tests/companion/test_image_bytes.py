"""Notebook 09: bytes as numbers and back, and what several decoders make of one JPEG file."""

import io

import numpy as np
import pytest
from PIL import Image

import companion
import gpulab as gl
from companion import image_bytes
from companion.image_bytes import FORMATS, encode_jpeg, jpeg_decoders

FRAMES = next(gl.load("walk", frames=20, size=(24, 32)).windows(5)).frames


def test_byte_round_trip_agrees_with_numpy_and_counts_lost_bytes(monkeypatch):
    table = companion.byte_round_trip().set_index(["way", "format"])
    assert len(table) == 5 * len(FORMATS) == len(table.index.unique())
    pixels = np.arange(256, dtype=np.float32)
    divided, multiplied = pixels / np.float32(255), pixels * np.float32(1 / 255)
    assert table.loc[("x * (1 / 255)", "float32"), "as_division"] == (divided == multiplied).sum() < 256
    assert table.loc[("x / 255", "float32"), "as_division"] == 256
    assert table.loc[("x * (1 / 255)", "float32"), "returned"] == (np.rint(multiplied * 255) == pixels).sum()
    monkeypatch.setattr(image_bytes, "numbers_of_bytes", lambda x, _, dtype: {"lossy": (x // 2 * 2).to(dtype) / 255})
    assert companion.byte_round_trip().set_index("format").loc["float32", "returned"] == 128


@pytest.mark.parametrize("colours", ["4:4:4", "4:2:0"])
def test_encode_jpeg_as_pillow(colours):
    file = io.BytesIO()
    Image.fromarray(FRAMES[0].transpose(1, 2, 0)).save(file, "JPEG", quality=90, subsampling=colours)
    assert encode_jpeg(FRAMES[0], 90, colours) == file.getvalue()
    assert (jpeg_decoders()["pillow"](file.getvalue()) == np.asarray(Image.open(file)).transpose(2, 0, 1)).all()


@pytest.mark.parametrize("decoder", jpeg_decoders())
def test_jpeg_decoders_agree_up_to_small_differences(decoder):
    pixels = jpeg_decoders()[decoder](encode_jpeg(FRAMES[0], 100, "4:4:4"))
    assert pixels.dtype == np.uint8
    assert pixels.shape == FRAMES[0].shape
    assert np.abs(pixels.astype(int) - FRAMES[0]).max() <= 12


def test_ffmpeg_decodes_halved_colours_otherwise_than_pillow():
    decoders, file = jpeg_decoders(), encode_jpeg(FRAMES[0])
    assert {"pillow", "torchvision", "av"} <= set(decoders)
    assert (decoders["av"](file) != decoders["pillow"](file)).any(), "otherwise there is no factor to speak of"
    assert "3 decoders" in str(companion.decoded(FRAMES[0])) or len(decoders) != 3
