import hashlib
import itertools
import tracemalloc

import numpy as np
import pytest

from gpulab.data.scenes import BLOCK, STREET, MovingDigits, Walk, _Path, cosine, random_bytes, sine, uniform

# Two "digits" that are ramps of grey, so that nothing depends on how another library scales digits.
RAMPS = (np.arange(7 * 28 * 28) % 251).astype(np.uint8).reshape(7, 28, 28)


def moving(seed, size, speed=1.0):
    return MovingDigits(RAMPS, seed, size, speed)


SCENES = pytest.mark.parametrize("scene", [Walk, moving])
# The bytes are the same with every NumPy, on every platform. If one of these changes, every recorded
# run that was trained on the scene says something about other data than this version renders.
BYTES = [
    (Walk, 0, (48, 64), 1.0, 0, "cae003d20c4644b16613131c6811b783eed92f253c31656305cda3a901e93746"),
    (Walk, 0, (48, 64), 1.0, 137, "815916969acccd2673bd1d4f8ede7519881a032b2ae15651fcf13b55002bbcfb"),
    (Walk, 0, (48, 64), 1.0, 5000, "72b37f5c4c0aa2e1f5a342a0e9d88f485f1a96c0aabfd3fbcaf81a657dd18486"),
    (Walk, 3, (24, 32), 2.0, 0, "5a2508d64734491a93438462cb4b2b9ba386e613291004b173ec54d47b680a31"),
    (Walk, 3, (24, 32), 2.0, 137, "7ceabcd42d3943f34c6cb6b237fd5ca2942575494ec8d737d0ad783c3833b082"),
    (Walk, 3, (24, 32), 2.0, 5000, "7eac14b225aa54769b96347681e99f187d52a95b8b540d67c8a27a42bc7972ce"),
    (Walk, 7, (45, 61), 0.5, 0, "84c7f36ca743a947a08a87d24e90e4ccd795321b3f6f007b0f36c64b6e00ec7e"),
    (Walk, 7, (45, 61), 0.5, 137, "89a9fb9901e6773ad31100f72604adb56ac60a7502140723f37af1f64c03ac71"),
    (Walk, 7, (45, 61), 0.5, 5000, "da44f927d68456780d8c1e08ffd03c082a6605e66877e491e9f3c938ea66c484"),
    (moving, 0, (48, 64), 1.0, 0, "4923781a4542c0f063f6db9871a611c1067b9e77533805310fed16ffd37d307b"),
    (moving, 0, (48, 64), 1.0, 137, "1914304826eb381f7aed8624f79614a4339b005f2f5cb5b2c7b797057f8bd3ef"),
    (moving, 0, (48, 64), 1.0, 5000, "aba374bedd705c20d6e98ce894589b69de053ac0f92c34ff3a61a16a82f59200"),
    (moving, 3, (24, 32), 2.0, 0, "ac0d733784569e61f145a6116cc4cd6e5a1744213c44c7ae653bc3f387f43643"),
    (moving, 3, (24, 32), 2.0, 137, "c9711e640db335812490514ad1427e680ec563d4ad285832af7d22b4332ab131"),
    (moving, 3, (24, 32), 2.0, 5000, "30ed07c01891efef689b102b3b8ce1694ec40b720f4eccb30724d1edfb6acc3d"),
]


def frames(scene, start, stop):
    return np.stack(list(scene.stream(start, stop)))


@pytest.mark.parametrize(("scene", "seed", "size", "speed", "number", "digest"), BYTES)
def test_a_scene_has_the_same_bytes_everywhere(scene, seed, size, speed, number, digest):
    (frame,) = scene(seed, size, speed).stream(number, number + 1)
    assert hashlib.sha256(frame.tobytes()).hexdigest() == digest


def test_random_numbers_are_the_same_everywhere_and_depend_on_the_whole_key():
    assert random_bytes(1, 2, 3, count=9).tolist() == [144, 185, 201, 246, 248, 17, 164, 171, 251]
    assert uniform(1, 2, 3, count=2).tolist() == [0.6704722626516632, 0.1110146366693816]
    assert random_bytes(1, 2, 3, count=5).tolist() == random_bytes(1, 2, 3, count=9)[:5].tolist()
    assert len({uniform(*key, count=1)[0] for key in itertools.product(range(5), repeat=3)}) == 125


@SCENES
@pytest.mark.parametrize("size", [(24, 32), (45, 61), (1, 1), (90, 40)])
def test_frames_are_bytes_of_the_size_asked_for_and_seeds_differ(scene, size):
    first = [frames(scene(seed, size), 3, 8) for seed in range(8)]
    assert {(drawn.shape, drawn.dtype) for drawn in first} == {((5, 3, *size), np.dtype(np.uint8))}
    assert size == (1, 1) or len({drawn.tobytes() for drawn in first}) == 8


@SCENES
def test_a_frame_does_not_depend_on_where_the_stream_began(scene):
    whole = frames(scene(1, (24, 32)), 0, 400)
    for start, stop in [(0, 1), (1, 400), (129, 131), (130, 390), (399, 400)]:  # a chunk holds 130 of these frames
        assert (frames(scene(1, (24, 32)), start, stop) == whole[start:stop]).all()
    endless = scene(1, (24, 32)).stream(395)
    assert (np.stack(list(itertools.islice(endless, 5))) == whole[395:]).all()


def test_a_frame_does_not_depend_on_how_many_are_rendered_together():
    walk = Walk(2, (24, 32))
    together = walk.render(np.arange(60))
    assert (together == np.concatenate([walk.render(np.array([number])) for number in range(60)])).all()
    backwards = walk.render(np.arange(60)[::-1])
    assert (together == backwards[::-1]).all()


def test_a_longer_stream_takes_no_more_memory():
    def peak(count):
        stream = Walk(0, (24, 32)).stream(0, count)
        tracemalloc.start()
        try:
            assert sum(1 for _ in stream) == count
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(150)  # what is made once, is made now
    # Of a walk the last 32 chunks are kept, 4,160 of these frames; a frame alone has 2,304 bytes.
    assert peak(5500) < peak(4500) + 10_000


def test_digits_stay_inside_appear_whole_and_are_others_every_hundred_frames():
    alike = np.arange(1, 201, dtype=np.uint8)[:, None, None].repeat(28, 1).repeat(28, 2)
    shown = []
    for frame in MovingDigits(alike, 5, (40, 50), speed=3.0).stream(0, 300):
        assert (frame == frame[0]).all()
        assert 28 * 28 <= (frame[0] > 0).sum() <= 2 * 28 * 28
        shown.append(set(np.unique(frame)) - {0})
    lives = [set.union(*shown[start : start + 100]) for start in (0, 100, 200)]
    assert [len(life) for life in lives] == [2, 2, 2]
    assert len(set.union(*lives)) == 6


def test_sine_and_cosine_are_accurate():
    angles = np.concatenate([np.linspace(-1e4, 1e4, 200_001), np.arange(-40, 41) * (np.pi / 8)])
    assert np.abs(sine(angles) - np.sin(angles)).max() < 1e-8
    assert np.abs(cosine(angles) - np.cos(angles)).max() < 1e-8


@pytest.mark.parametrize("seed", range(5))
def test_the_walker_never_enters_a_house(seed):
    """A point is in a street when either coordinate is within STREET of the beginning of its block."""
    x, y, _ = _Path(seed).at(np.arange(0, 5_000, 0.05))
    # The walker sways by 0.03 to either side; a quarter of a unit must be free.
    for aside_x, aside_y in itertools.product((-0.25, 0.25), repeat=2):
        assert (((x + aside_x) % BLOCK < STREET) | ((y + aside_y) % BLOCK < STREET)).all()


def test_the_path_is_walked_at_an_even_pace_without_jumps():
    path = _Path(3)
    x, y, heading = path.at(np.arange(0, 2_000, 0.01))
    assert {turn for turn in path.turns if turn is not None} == {-1, 0, 1}, "it turns both ways and goes straight on"
    pace = np.hypot(np.diff(x), np.diff(y)) / 0.01
    assert np.abs(pace - 1).max() < 1e-3
    turned = np.diff(heading)
    assert np.abs(turned).max() < 0.0101  # a quarter circle of radius one turns as far as it goes
    sideways = np.diff(y) * cosine(heading[:-1]) - np.diff(x) * sine(heading[:-1])
    assert np.abs(sideways).max() < 1e-4  # the walker goes where it faces


def test_threads_render_the_same_frames():
    plain = frames(Walk(21, (48, 64)), 0, 400)
    for streams in (1, 3):
        drawn = [Walk(21, (48, 64)).stream(0, 400, threads=3) for _ in range(streams)]
        for number, same in enumerate(zip(*drawn, strict=True)):
            assert all((frame == plain[number]).all() for frame in same)


def test_a_rendering_that_fails_says_so_and_is_tried_again(monkeypatch):
    usual, failed = Walk.render, []

    def render(self, numbers):
        if not failed and 0 in numbers:
            failed.append(numbers)
            raise MemoryError("no room")
        return usual(self, numbers)

    monkeypatch.setattr(Walk, "render", render)
    with pytest.raises(MemoryError, match="no room"):
        next(Walk(22, (48, 64)).stream(0, 50, threads=2))
    assert (next(Walk(22, (48, 64)).stream(0, 50)) == frames(Walk(22, (48, 64)), 0, 1)[0]).all()
