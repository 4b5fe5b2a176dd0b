"""Notebook 09: the pixels that several decoders read from one JPEG file."""

import io

import numpy as np
import pytest
from PIL import Image

import gpulab as gl
from companion.image_bytes import encode_jpeg, jpeg_decoders

FRAMES = next(gl.load("walk", frames=20, size=(24, 32)).windows(5)).frames


@pytest.mark.parametrize("colours", ["4:4:4", "4:2:0"])
def test_encode_jpeg_as_pillow(colours):
    file = io.BytesIO()
    Image.fromarray(FRAMES[0].transpose(1, 2, 0)).save(
        file, "JPEG", quality=90, subsampling=colours
    )
    assert encode_jpeg(FRAMES[0], 90, colours) == file.getvalue()
    assert (
        jpeg_decoders()["pillow"](file.getvalue())
        == np.asarray(Image.open(file)).transpose(2, 0, 1)
    ).all()


@pytest.mark.parametrize("decoder", jpeg_decoders())
def test_jpeg_decoders_agree_up_to_small_differences(decoder):
    pixels = jpeg_decoders()[decoder](encode_jpeg(FRAMES[0], 100, "4:4:4"))
    assert pixels.dtype == np.uint8
    assert pixels.shape == FRAMES[0].shape
    assert np.abs(pixels.astype(int) - FRAMES[0]).max() <= 12


def test_jpeg_decoders_ffmpeg_and_pillow_differ_for_halved_colours():
    decoders, file = jpeg_decoders(), encode_jpeg(FRAMES[0])
    assert {"pillow", "torchvision", "av"} <= set(decoders)
    assert (decoders["av"](file) != decoders["pillow"](file)).any(), (
        "the choice of the decoder would have no effect"
    )
