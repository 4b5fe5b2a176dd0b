import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from gpulab.training import checks, claims
from gpulab.training.claims import Claims, InFolder


@pytest.fixture
def place(tmp_path):
    return InFolder(tmp_path)


def test_of_many_at_once_one_has_the_claim(place):
    with ThreadPoolExecutor(16) as pool:
        for name in ("a", "b.c", "b"):
            assert sum(pool.map(lambda _, name=name: Claims(place).take(name), range(64))) == 1


def test_a_claim_that_nobody_touches_is_taken_after_a_while_and_by_one(place, monkeypatch):
    elsewhere = Claims(place)  # it never begins to touch what it holds
    assert elsewhere.take("run")
    others = [Claims(place) for _ in range(8)]
    assert not any(each.take("run") for each in others)
    monkeypatch.setattr(claims, "STALE", 0.3)
    time.sleep(0.4)
    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(lambda each: each.take("run"), others)) == 1


def test_a_claim_that_is_touched_stays(place, monkeypatch):
    monkeypatch.setattr(claims, "STALE", 0.2)
    monkeypatch.setattr(claims, "BEAT", 0.02)
    with Claims(place) as mine:
        assert mine.take("run")
        other = Claims(place)
        for _ in range(40):
            assert not other.take("run")
            mine.ended.wait(0.01)
        mine.ended.set()  # as if it had died
        mine.beat.join()
        end = time.monotonic() + 10
        while not other.take("run") and time.monotonic() < end:
            time.sleep(0.02)
    assert other.held == {"run": 2}


def test_a_claim_of_a_process_of_this_machine_that_is_gone_is_taken_at_once(place):
    code = f"from gpulab.training.claims import *; Claims(InFolder(Path({str(place.folder.parent)!r}))).take('run')"
    subprocess.run([sys.executable, "-c", code + "; os._exit(0)"], check=True)
    (left,) = place.folder.iterdir()
    assert checks.check(place.folder.parent, mend=False, progress=False).path.tolist() == [str(left)]
    with Claims(place) as mine:
        assert mine.take("run")
        mine.release("run")
    assert os.listdir(place.folder) == []


def test_what_is_held_is_given_back_at_the_end(place):
    with Claims(place) as mine:
        assert mine.take("run")
    assert Claims(place).take("run")
