import copy
import functools
import json
import os
import platform

import pandas as pd
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import gpulab as gl
from gpulab.cli import app
from gpulab.errors import DataError, UsageError
from gpulab.store import listing, records, run_files
from gpulab.training import sharing
from gpulab.training.sharing import merge, shared_runs

PRIVATE = ["anna-laptop", "anna", "/home/anna", "/srv/secret/film.mp4", "~/notes.txt"]


@pytest.fixture(scope="module")
def frame():
    runs = gl.runs(records.recorded_folder("runs") / "prednet-quick.parquet")
    return runs[(runs.loader == "window") & runs.seed.isin([0, 1])]


@pytest.fixture
def document(frame):
    """What a shared file holds, to be changed."""
    runs = shared_runs(frame[frame.seed == 0]).runs
    return {"runs": [{**record, "history": history.to_pydict()} for record, history in runs]}


def packed(document, compressed=False):
    """The content of the file."""
    runs = []
    for run in copy.deepcopy(document["runs"]):
        runs.append((run, {name: pd.Series(values) for name, values in run.pop("history").items()}))
    return records.packed(runs, compressed=compressed)


def test_every_shipped_run_of_our_networks_makes_the_round_trip_to_another_folder_once(frame, tmp_path):
    some, every, atlas = tmp_path / "some.parquet", tmp_path / "every.parquet", tmp_path / "atlas"
    shared = shared_runs(frame)
    assert len(shared.runs) == len(frame) > 8
    assert not shared.left_out
    digest = shared.save(every)
    assert merge(every, atlas) == len(frame)
    there = gl.runs(atlas)
    columns = ["id", "setting", "seed", "status", "final_loss", "weights", "protocol", "machine", "torch", "frames"]
    before, after = (some.sort_values("id", ignore_index=True)[columns] for some in (frame, there))
    assert before.equals(after)
    assert listing.record_of(there.iloc[0])["contribution"] == digest
    losses, expected = (listing.history(runs[runs.id == there.id[0]]).loss.tolist() for runs in (there, frame))
    assert losses == expected
    shared_runs(frame[frame.seed == 0]).save(some)
    with pytest.raises(DataError, match=f" of .* runs are in {atlas} already"):
        merge(some, atlas)
    assert len(list(atlas.iterdir())) == 1


def test_what_is_recorded_on_every_kind_of_machine_can_be_shared():
    for name in (None, "title", "longer"):
        some = gl.recorded_runs(name)
        some = some.groupby(["experiment", "profile", "setting", "loader", "torch"]).head(1)
        assert not shared_runs(some).left_out, name


def planted(store, record, history, change):
    """A run in a store, with what others should not see in it."""
    record = copy.deepcopy(record)
    change(record)
    run_files.write_run(store, record, history)
    return gl.runs(store)


def everywhere(record):
    record["command"] = f"gpulab train prednet --store {PRIVATE[2]}/runs --data video:{PRIVATE[3]}"
    record |= {"notes": PRIVATE[4], "host": PRIVATE[0], "options": {"file": PRIVATE[3]}, "gradients": PRIVATE[2]}
    record["passport"] |= {"host": PRIVATE[0], "user": PRIVATE[1]}
    record["passport"]["cpu"] |= {"hostname": PRIVATE[0], "architecture": f"{PRIVATE[2]}/x86"}
    record["passport"]["software"] |= {"os": f"Linux-6.1.0-{PRIVATE[0]}", "commit": PRIVATE[1], "path": PRIVATE[2]}
    record["summary"]["folder"] = PRIVATE[2]
    record["arithmetic"] |= {"cpu_capability": PRIVATE[3], "library": PRIVATE[2]}


@pytest.fixture
def one(frame):
    row = frame[frame.device == "cpu"].iloc[0]
    (_, record, rows), *_ = listing.with_histories(frame[frame.id == row.id])
    return {**record, "format": records.FORMAT}, rows.to_pandas()


def test_nothing_private_is_in_the_bytes(one, tmp_path):
    shared = shared_runs(planted(tmp_path / "store", *one, everywhere))
    assert len(shared.runs) == 1
    shared.save(tmp_path / "mine.parquet")
    content = (tmp_path / "mine.parquet").read_bytes()
    assert set(pq.read_table(tmp_path / "mine.parquet").column_names) == sharing.COLUMNS
    text = json.dumps([record for record, _ in shared.runs])
    kept = (tmp_path / "store" / one[0]["id"] / "run.json").read_text()
    for name in PRIVATE:
        assert name in kept
        assert name not in text
        assert name.encode() not in content
    assert "/" not in text
    assert not any(name in str(shared) for name in PRIVATE)


@pytest.mark.parametrize("place", [("data", "video:/srv/secret/film.mp4"), ("data_options", {"note": "anna"})])
def test_a_run_whose_name_hangs_on_something_private_is_left_out(one, tmp_path, place):
    gl.train(lambda seed, secret="/srv/secret/film.mp4": seed + len(secret), store=tmp_path / "store")
    shared = shared_runs(planted(tmp_path / "store", *one, lambda record: record["configuration"].update([place])))
    assert not shared.runs
    assert sum(shared.left_out.values()) == 2
    assert shared.left_out["of a model or a function of your own"] == 1
    with pytest.raises(UsageError, match="no runs to share"):
        shared.save(tmp_path / "mine.parquet")


def put(document, path, value):
    """Change what is at a place inside a document."""
    *path, last = path
    functools.reduce(lambda inside, name: inside[name], path, document)[last] = value


def forged(change):
    """A document that was changed, and then sealed anew."""

    def content(document):
        change(document)
        return packed(document)

    return content


def of_run(*path, value):
    return forged(lambda document: put(document["runs"][0], path, value))


FORGED = {
    "a loss": (of_run("summary", "final_loss", value=0.001), "last fifth of its history"),
    "a setting": (of_run("setting", value="cpu:threads=7"), "its id is not"),
    "an id that is a path": (of_run("id", value="../../evil"), "id: String should match"),
    "a path in a passport": (of_run("passport", "cpu", "model", value="/home/anna"), "cpu.model: String should match"),
    "a field of its own": (of_run("host", value="anna-laptop"), "host: Extra inputs"),
    "a diverged run with a loss": (of_run("status", value="diverged"), "it diverged, and has"),
    "a run twice": (forged(lambda d: d["runs"].append(copy.deepcopy(d["runs"][0]))), "is in it 2 times"),
    "what may be a bomb": (lambda document: packed(document, compressed=True), "compressed"),
    "oversized": (lambda _: os.urandom(1) * (sharing.LARGEST + 1), "it has 16,777,217 bytes"),
}


@pytest.mark.parametrize("kind", FORGED)
def test_a_forged_file_is_refused_with_the_reason_and_nothing_is_added(kind, document, tmp_path):
    forge, reason = FORGED[kind]
    file, folder = tmp_path / "forged.parquet", tmp_path / "atlas"
    file.write_bytes(forge(document))
    with pytest.raises(DataError, match=reason):
        merge(file, folder)
    assert not folder.exists()


def test_pack_shares_what_it_shows_when_told_to_and_merge_adds(tmp_path):
    def command(*words, **options):
        return CliRunner().invoke(app, [*map(str, words)], **options)

    store, file = records.recorded_folder("runs") / "prednet-quick.parquet", tmp_path / "a.parquet"
    asked = ["pack", store, file, "--share", "--where", "setting=cpu", "--where", "seed=0"]
    no = command(*asked, input="n\n")
    assert no.exit_code == 1
    assert not file.exists()
    assert '"model": "Intel(R) Xeon(R) Processor"' in no.output
    command(*asked, input="y\n")
    assert gl.runs(file).setting.tolist() == ["cpu"]
    merged = command("merge", file, "--store", tmp_path / "atlas").output
    assert merged.startswith(f"1 runs added to {tmp_path / 'atlas'}; all are under cpu: ")


def test_merging_says_which_runs_have_the_same_bits_as_others(frame, tmp_path):
    repeated = frame[frame.duplicated("weights", keep=False)]
    first = ~repeated.duplicated("weights")
    before, after = tmp_path / "before.parquet", tmp_path / "after.parquet"
    shared_runs(repeated[first]).save(before)
    shared_runs(repeated[~first]).save(after)
    merge(before, tmp_path / "atlas")
    merge(after, tmp_path / "atlas")
    assert f"; {sum(~first)} have the same weights, bit for bit, as" in sharing.remarks(after, tmp_path / "atlas")


def test_a_name_of_this_machine_is_not_written_unseen(frame, monkeypatch):
    monkeypatch.setattr(platform, "node", lambda: "Xeon.example.org")
    assert shared_runs(frame[:1]).private() == ["Xeon"]
    assert "LOOK: Xeon" in str(shared_runs(frame[:1]))
