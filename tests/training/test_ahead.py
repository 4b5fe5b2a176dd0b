"""Windows that are made while a device is busy."""

import itertools
import threading
import time

import numpy as np
import pytest

import gpulab as gl
from gpulab.training.run import ahead


def test_windows_come_in_order_and_none_is_lost():
    film = gl.load("walk", frames=200, size=(24, 32))
    expected = list(itertools.islice(film.windows(20), 12))
    found = list(itertools.islice(ahead(film.windows(20)), 12))
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.restart == theirs.restart
        np.testing.assert_array_equal(mine.frames, theirs.frames)
    assert list(ahead(iter(expected))) == expected


def test_the_next_one_is_made_meanwhile_and_no_more():
    made = []

    def windows():
        for number in itertools.count():
            made.append(number)
            yield number

    coming = ahead(windows())
    assert next(coming) == 0
    time.sleep(0.1)
    assert made == [0, 1]
    before = threading.active_count()
    coming.close()
    assert threading.active_count() == before - 1


def test_what_goes_wrong_there_is_said_here():
    def windows():
        yield 0
        raise gl.errors.DataError("clip.mp4: truncated")

    coming = ahead(windows())
    assert next(coming) == 0
    with pytest.raises(gl.errors.DataError, match="truncated"):
        next(coming)
