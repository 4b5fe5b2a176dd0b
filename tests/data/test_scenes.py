import hashlib

import numpy as np
import pytest

from gpulab.data._scenes import MovingDigits, Walk

# The "digits" are ramps of grey, so that nothing depends on how another library scales digits.
RAMPS = (np.arange(7 * 28 * 28) % 251).astype(np.uint8).reshape(7, 28, 28)


def moving(seed, size, speed=1.0):
    return MovingDigits(RAMPS, seed, size, speed)


SCENES = pytest.mark.parametrize("scene", [Walk, moving])
# The bytes are the same with every NumPy, on every platform. If one of these digests changes, all
# recorded runs on the scene were trained on other data than this version renders.
BYTES = [  # digests of the frames 0, 137 and 5000, one after the other
    (Walk, 0, (48, 64), 1.0, "31489e6b94b8aa2795214e73e1739a7cc6c3aac6934849bd5e9cf441d1af2c92"),
    (Walk, 3, (24, 32), 2.0, "85603fb00f69a013db3b087b1261d8da539bf8e7ac8b136efe9da9e883c1e28c"),
    (Walk, 7, (45, 61), 0.5, "cc16c8069981f3d2a7a0e81f82ab4a6da19fa93c34092b10350ace968003e90c"),
    (Walk, 1, (240, 320), 4.0, "d1d5f02ddc526a0c4dea6c7183bc52fbdb1344ce32553a71de523dc31f6f2c17"),
    (moving, 5, (64, 48), 4.0, "1c2dc9226c7e1b2b9467eafab979756e52811250acc89d883cb0f429f7939393"),
    (moving, 0, (48, 64), 1.0, "4151a2acffee94ad19754204746e2069abad9ffaf4ab1a801b3acfa1eea6f154"),
    (moving, 3, (24, 32), 2.0, "c7d900a470262f450677424f45269961b7b05ebce70e8320daf1f34cfebd3421"),
]


def frames(scene, start, stop):
    return np.stack(list(scene.stream(start, stop)))


@pytest.mark.parametrize(("scene", "seed", "size", "speed", "digest"), BYTES)
def test_scene_has_the_same_bytes_everywhere(scene, seed, size, speed, digest):
    made = [
        next(scene(seed, size, speed).stream(number, number + 1)).tobytes()
        for number in (0, 137, 5000)
    ]
    assert hashlib.sha256(b"".join(made)).hexdigest() == digest


@SCENES
def test_scene_frame_does_not_depend_on_where_the_stream_began(scene):
    size = 240, 320  # a chunk holds 13 of these frames
    whole = frames(scene(1, size), 0, 40)
    for start, stop in [(0, 1), (1, 40), (12, 14), (13, 39), (39, 40)]:
        assert (frames(scene(1, size), start, stop) == whole[start:stop]).all()


def test_walk_threads_render_the_same_frames():
    plain = frames(Walk(21, (48, 64)), 0, 400)
    for streams in (1, 3):
        drawn = [Walk(21, (48, 64)).stream(0, 400, threads=3) for _ in range(streams)]
        for number, same in enumerate(zip(*drawn, strict=True)):
            assert all((frame == plain[number]).all() for frame in same)
