import io
import itertools

import numpy as np
import pytest
from PIL import Image

import gpulab as gl
from gpulab.data.jpeg import DECODERS, SUBSAMPLINGS, compare_decoders

HERE = gl.data.available_decoders()
FRAMES = next(gl.load("walk", frames=20, size=(24, 32)).windows(5)).frames


@pytest.mark.parametrize("subsampling", SUBSAMPLINGS)
def test_a_frame_is_encoded_as_pillow_does(subsampling):
    frame = FRAMES[0]
    made = gl.data.encode_jpeg(frame, 90, subsampling)
    file = io.BytesIO()
    Image.fromarray(frame.transpose(1, 2, 0)).save(file, "JPEG", quality=90, subsampling=subsampling)
    assert made == file.getvalue()
    assert (gl.data.decode_jpeg(made) == np.asarray(Image.open(file)).transpose(2, 0, 1)).all()


@pytest.mark.parametrize("decoder", HERE)
@pytest.mark.parametrize("channels", [1, 3])
def test_each_decoder_gives_the_same_picture_but_for_small_differences(decoder, channels):
    frame = FRAMES[0, :channels]
    made = gl.data.decode_jpeg(gl.data.encode_jpeg(frame, 100, "4:4:4"), decoder)
    assert made.dtype == np.uint8
    assert made.shape == frame.shape
    assert np.abs(made.astype(int) - frame).max() <= 12


def test_the_table_counts_what_differs():
    assert {"pillow", "torchvision", "av"} <= set(HERE) <= set(DECODERS)
    table = compare_decoders(FRAMES).set_index(["decoder", "channel"])
    assert (table.loc["pillow", ["differ", "mean", "largest"]] == 0).all(axis=None)
    files = [gl.data.encode_jpeg(frame) for frame in FRAMES]
    av, pillow = (
        np.stack([gl.data.decode_jpeg(file, name) for file in files]).astype(int) for name in ("av", "pillow")
    )
    row = table.loc[("av", "green")]
    assert row.differ == (av != pillow)[:, 1].mean()
    assert row["mean"] == np.abs(av - pillow)[:, 1].mean()
    assert row.largest == np.abs(av - pillow)[:, 1].max()
    assert row.differ > 0, "otherwise there is no factor to speak of"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: gl.load("walk", decoder="av"), "write jpeg:walk"),
        (lambda: gl.load("jpeg:walk", quality=101), "quality=101: .* 1 to 100"),
        (lambda: gl.load("jpeg:digits"), "such as jpeg:walk"),
    ],
)
def test_nonsense_is_refused(call, words):
    with pytest.raises(gl.UsageError, match=words):
        call()


@pytest.mark.parametrize("decoder", HERE)
def test_a_damaged_file_and_one_of_too_many_pixels_is_a_data_error_in_one_line(decoder):
    whole = gl.data.encode_jpeg(FRAMES[0])
    size = whole.index(b"\xff\xc0") + 5
    enormous = whole[:size] + b"\xf0\x00\xf0\x00" + whole[size + 4 :]
    for file, words in ((b"", ""), (whole[:3], ""), (whole[:300], ""), (enormous, " pixels")):
        with pytest.raises(gl.DataError, match=rf"\A{decoder} cannot decode these {len(file)} bytes: .*{words}.*\Z"):
            gl.data.decode_jpeg(file, decoder)


def test_jpeg_data_are_the_frames_encoded_and_decoded():
    plain, again = (gl.load(name, frames=20, size=(24, 32)) for name in ("walk", "jpeg:walk"))
    frames, made = (next(data.windows(5)).frames for data in (plain, again))
    assert all((gl.data.decode_jpeg(gl.data.encode_jpeg(a)) == b).all() for a, b in zip(frames, made, strict=True))
    assert again.options() == {**plain.options(), "quality": 75, "subsampling": "4:2:0"}
    assert (next(again.heldout(2)).frames != next(plain.heldout(2)).frames).any()


def test_a_decoder_is_a_factor_and_the_quality_is_not(tmp_path):
    small = {"setting": "cpu:threads=1", "profile": "smoke", "frames": 20, "progress": False}
    small |= {"data": "jpeg:walk", "model_options": {"channels": [3, 4]}}
    for decoder, seed in itertools.product(("pillow", "av"), range(2)):
        gl.train("prednet", seed=seed, store=tmp_path, data_options={"decoder": decoder}, **small)
    frame = gl.runs(tmp_path)
    assert sorted(frame.decoder) == ["av", "av", "pillow", "pillow"]
    assert frame.protocol.nunique() == 1
    seen = gl.verdict(frame, factor="decoder", reference="pillow")
    assert (seen.table.seeds.tolist(), seen.table.same_bits.tolist()) == ([2], [0])
    assert "--decoder av" in (tmp_path / frame.id[frame.decoder == "av"].iloc[0] / "run.json").read_text()
