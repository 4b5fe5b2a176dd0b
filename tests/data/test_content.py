"""Data know what they are made from, by content."""

import hashlib
import os
import shutil

import pytest
from files_cases import SMALL, noise, write_idx, write_images, write_video

import gpulab as gl

CLIP, OTHER = noise(12, 24, 32, 3), noise(24, 24, 32, 3)[12:]


def load(where, **options):
    return gl.load(f"{'frames' if where.is_dir() else 'video'}:{where}", size=SMALL, **options)


def test_a_film_is_its_bytes_and_another_clip_of_its_name_is_another(tmp_path):
    film = write_video(tmp_path / "a.mkv", CLIP)
    first = load(film).content
    assert first == hashlib.sha256(film.read_bytes()).hexdigest()
    shutil.copy(film, tmp_path / "copy.mkv")
    assert load(tmp_path / "copy.mkv").content == first == load(film, grey=True).content
    write_video(film, OTHER)
    assert load(film).content not in (first, "", None)


def test_a_folder_is_the_names_and_bytes_of_its_images_in_order(tmp_path):
    def of(frames, folder="images"):
        shutil.rmtree(tmp_path / folder, ignore_errors=True)
        return load(write_images(tmp_path / folder, frames)).content

    first = of(CLIP)
    assert of(CLIP) == of(CLIP, "elsewhere") == first
    (tmp_path / "images" / "011.png").rename(tmp_path / "images" / "012.png")
    renamed = load(tmp_path / "images").content
    assert len({first, renamed, of(OTHER), of(CLIP[::-1]), of(CLIP[:-1])}) == 5


def test_images_are_known_by_their_arrays_and_scenes_come_from_no_file(tmp_path):
    write_idx(tmp_path / "one" / "train-images-idx3-ubyte.gz", noise(30, 28, 28))
    write_idx(tmp_path / "two" / "train-images-idx3-ubyte", noise(30, 28, 28))
    one, two = (gl.load(f"mnist:{tmp_path / name}").content for name in ("one", "two"))
    assert one == two
    assert gl.load("digits").content not in ("", None, one)
    assert gl.load("walk").content == gl.load("moving-digits").content == ""


@pytest.mark.parametrize("how", ["rewritten", "removed"])
@pytest.mark.parametrize("kind", ["video", "frames"])
def test_a_file_that_was_changed_since_it_was_loaded_is_named(tmp_path, kind, how):
    film, folder = write_video(tmp_path / "a.mkv", CLIP), write_images(tmp_path / "images", CLIP)
    data = load(folder if kind == "frames" else film)
    data.check_unchanged()
    file = folder / "009.png" if kind == "frames" else film
    if how == "rewritten":
        os.utime(file, ns=(10**18, 10**18))
    else:
        file.unlink()
    words = (
        "cannot be read: No such file or directory" if how == "removed" else "was changed while it was read; run again"
    )
    for check in (data.check_unchanged, lambda: data.content):
        with pytest.raises(gl.DataError, match=f"{file}: {words}"):
            check()
