import shutil

import pandas as pd
import pytest

import gpulab as gl
from gpulab import files
from gpulab.training import folders, index
from gpulab.training import store as stores

HISTORY = pd.DataFrame({"window": [0, 1], "step": [1, 2], "loss": [0.5, 0.25], "seconds": [0.1, 0.2]})
OWN = """
def train(seed, width=3, name="a"):
    return {"score": seed + 0.5, "rank": seed}
"""


@pytest.fixture(scope="module")
def record():
    return gl.train("autoencoder", profile="smoke", frames=20, progress=False).record


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setattr(files, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(index, "FEWEST", 2)
    return tmp_path / "cache" / "stores"


@pytest.fixture
def store(record, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    store = tmp_path / "store"
    for seed in range(5):
        write(store, record, seed)
    for seed, width in ((0, 3), (1, [4])):
        gl.train(f"{tmp_path}/own.py:train", seed=seed, model_options={"width": width}, store=store, progress=False)
    gl.train("prednet", profile="smoke", frames=20, store=tmp_path / "other", progress=False, flip=3)
    stores.pack(tmp_path / "other", store / "packed.parquet")
    return store


def write(store, record, seed, **changes):
    return folders.write_run(store, {**record, "id": f"run-{seed}", "seed": seed, **changes}, HISTORY)


def without_index(store, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(index, "read", lambda *_: None)
        patch.setattr(index, "write", lambda *_: None)
        return gl.runs(store)


def same(store, monkeypatch):
    one, other = gl.runs(store), without_index(store, monkeypatch)
    assert set(one) == set(other)
    empty = [name for name in other if other[name].isna().all()]  # of whatever type
    assert one[empty].isna().all(axis=None)
    pd.testing.assert_frame_equal(one.drop(columns=empty), other.drop(columns=empty), check_like=True)
    return one


def test_from_the_index_comes_the_table_that_reading_gives(store, cache, monkeypatch):
    assert len(gl.runs(store)) == 8
    assert len(list(cache.iterdir())) == 1
    with monkeypatch.context() as patch:
        patch.setattr(stores, "_rows", lambda *_: pytest.fail("nothing is to be read"))
        again = gl.runs(store)
    pd.testing.assert_frame_equal(again, without_index(store, monkeypatch))


@pytest.mark.usefixtures("cache")
def test_only_what_is_new_or_other_is_read(store, record, monkeypatch):
    gl.runs(store)
    read = []
    rows = stores._rows
    monkeypatch.setattr(stores, "_rows", lambda entry, recorded: read.append(entry) or rows(entry, recorded))
    monkeypatch.setattr(index, "FEWEST", 100)  # the index stays as it is
    write(store, record, 7)
    gl.runs(store)
    assert read == [str(store / "run-7")]
    assert 7 in set(same(store, monkeypatch).seed)
    shutil.rmtree(store / "run-7")
    shutil.rmtree(store / "run-3")
    assert 3 not in set(same(store, monkeypatch).seed)
    write(store, record, 3, status="diverged", diverged_at=5)
    assert same(store, monkeypatch).status.tolist().count("diverged") == 1
    (store / "packed.parquet").unlink()
    assert "prednet" not in set(same(store, monkeypatch).experiment)


@pytest.mark.usefixtures("cache")
def test_a_run_that_is_damaged_later_is_left_out_with_a_warning(store):
    gl.runs(store)
    content = bytearray((store / "run-2" / "history.parquet").read_bytes())
    content[40] ^= 1
    (store / "run-2" / "history.parquet").write_bytes(content)
    for _ in range(2):
        with pytest.warns(UserWarning, match="1 damaged"):
            assert 2 not in gl.runs(store).query("experiment == 'autoencoder'").seed.tolist()


def test_a_damaged_index_is_made_anew(store, cache):
    before = gl.runs(store)
    (file,) = cache.iterdir()
    file.write_bytes(file.read_bytes()[:-50])
    with pytest.warns(UserWarning, match="made anew"):
        assert gl.runs(store).equals(before)
    assert gl.runs(store).equals(before)


def test_a_small_store_has_no_index(store, cache, monkeypatch):
    monkeypatch.setattr(index, "FEWEST", 2000)
    gl.runs(store)
    assert not cache.exists()
