import math

import pandas as pd
import pytest

import gpulab as gl

NEW = "cpu:threads=1,precision=bfloat16"
FLAG = {"precision": ["float32"]}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def old(store):
    """The autoencoder on real digits, from twelve seeds in float32."""
    return gl.Experiment("autoencoder", ["cpu:threads=1"], 12, "smoke", store, workers=2).run(progress=False)


@pytest.fixture(scope="module")
def by_flag(store, old):
    space = {"learning_rate": [5e-4, 2e-3], **FLAG}
    return gl.reproduce(old, space, NEW, store=store, workers=2, progress=False)


def test_the_flag_is_the_answer_and_no_learning_rate_is(by_flag):
    assert by_flag.best == {"precision": "float32"}
    assert by_flag.confirmed
    assert by_flag.best_setting == "cpu:threads=1,precision=float32"
    table = by_flag.table
    assert table.changes.tolist()[0] == "nothing"
    assert table[table.confirmed].changes.tolist() == ["precision bfloat16 → float32"]
    assert table.decision.tolist()[0] == "different"
    flag = table[table.confirmed].iloc[0]
    assert (flag.distance, flag.difference, flag.seeds, flag.fresh_seeds) == (1, 0, 6, 6)
    assert by_flag.smaller_left == 0


def test_nothing_works(store, old):
    found = gl.reproduce(old, {"learning_rate": [5e-4, 2e-3]}, NEW, store=store, workers=2, progress=False)
    assert found.best is None
    assert not found.confirmed
    assert found.smaller_left == 0
    assert len(found.table) == 3
    assert not math.isnan(found.table.difference.iloc[1])
    assert found.finding.startswith("No change tried gives the losses of cpu:threads=1")


def test_a_search_that_is_done_is_read(store, old, by_flag, monkeypatch):
    monkeypatch.setattr(gl.reproduction.Trainings, "losses", None)
    again = gl.reproduce(old, {"learning_rate": [5e-4, 2e-3], **FLAG}, NEW, store=store, progress=False)
    pd.testing.assert_frame_equal(again.table, by_flag.table)
    assert str(again) == str(by_flag)
