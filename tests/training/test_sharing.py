import copy
import functools
import getpass
import json
import os
import platform
import random
import re
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import gpulab as gl
from gpulab import files
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


def packed(document):
    """The content of the file."""
    runs = []
    for run in copy.deepcopy(document["runs"]):
        runs.append((run, {name: pd.Series(values) for name, values in run.pop("history").items()}))
    return records.packed(runs, compressed=False)


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
    record = listing.record_of(there.iloc[0])
    assert record["contribution"] == digest
    assert record["command"].startswith("gpulab train prednet --profile quick --setting")
    losses, expected = (listing.history(runs[runs.id == there.id[0]]).loss.tolist() for runs in (there, frame))
    assert losses == expected
    shared_runs(frame[frame.seed == 0]).save(some)
    for file in (some, every):
        with pytest.raises(DataError, match=f" of .* runs are in {atlas} already"):
            merge(file, atlas)
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


def test_a_run_made_here_names_neither_this_machine_nor_its_user(tmp_path):
    gl.train("autoencoder", profile="smoke", store=tmp_path / "store", progress=False)
    shared = shared_runs(gl.runs(tmp_path / "store"))
    shared.save(tmp_path / "mine.parquet")
    text = (tmp_path / "mine.parquet").read_bytes().decode("latin-1")
    for name in {platform.node(), getpass.getuser(), str(Path.home()), str(tmp_path)}:
        assert not re.search(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", text) or len(name) < 3
    assert merge(tmp_path / "mine.parquet", tmp_path / "atlas") == 1
    with pytest.raises(DataError, match="already"):
        merge(tmp_path / "mine.parquet", tmp_path / "store")


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


def opened(document):
    """The table in the file, and its notes."""
    table = pq.read_table(pa.BufferReader(packed(document)))
    notes = pq.read_metadata(pa.BufferReader(packed(document))).metadata[b"gpulab"]
    return table, {name: value for name, value in json.loads(notes).items() if name not in ("format", "seal")}


def of_table(change, **options):
    """The table changed, and sealed anew."""

    def content(document):
        table, notes = opened(document)
        return bytes(records.as_table(change(table), notes, **{"compression": "none"} | options))

    return content


def with_text(text):
    """The text in each row, which the file has once."""

    def change(table):
        column = pa.DictionaryArray.from_arrays(pa.array([0] * len(table), pa.int32()), [text])
        return table.set_column(table.column_names.index("more"), "more", column)

    return change


def many_rows_with(text):
    return lambda table: with_text(text)(pa.concat_tables([table] * 400))


def of_version(document):
    content = packed(document)
    place = content.rfind(files.SEAL) + len(files.SEAL)
    unsealed = content[:place] + b"0" * files.DIGITS + content[place + files.DIGITS :]
    assert b'"format": 2' in unsealed
    return bytes(files.seal(unsealed.replace(b'{"format": 2', b'{"format": 9')))


def with_a_row_less(document):
    for rows in document["runs"][0]["history"].values():
        rows.pop()


FORGED = {
    "a loss": (of_run("summary", "final_loss", value=0.001), "last fifth of its history"),
    "a setting": (of_run("setting", value="cpu:threads=7"), "its id is not"),
    "a chip": (of_run("passport", "cpu", "model", value="AMD Ryzen 9"), "its id is not"),
    "an id that is a path": (of_run("id", value="../../evil"), "id: String should match"),
    "a path in a passport": (of_run("passport", "cpu", "model", value="/home/anna"), "cpu.model: String should match"),
    "a field of its own": (of_run("host", value="anna-laptop"), "host: Extra inputs"),
    "a column of its own": (
        of_table(lambda table: table.append_column("host", pa.array(["anna-laptop"] * len(table)))),
        "host: not a column of shared runs",
    ),
    "a negative loss": (of_run("summary", "final_loss", value=-1.0), "final_loss: Input should be greater"),
    "a loss that is missing": (of_run("summary", "final_loss", value=None), "a loss that is no number"),
    "losses without windows": (of_run("history", "loss", value=[0.1]), "not a file of packed runs"),
    "a history cut": (forged(with_a_row_less), "windows, its 1000 frames 50"),
    "a window left out": (of_run("history", "window", 3, value=4), "rows missing"),
    "a speed": (of_run("summary", "frames_per_second", value=1e6), "its speed"),
    "a time": (of_run("summary", "seconds", value=1e-9), "longer than the run"),
    "the future": (of_run("started", value="2999-01-01T00:00:00Z"), "started 2999"),
    "a diverged run with a loss": (of_run("status", value="diverged"), "it diverged, and has"),
    "a version of the format": (of_version, "format '9'"),
    "no runs": (of_table(lambda table: table[:0]), "no runs are in it"),
    "a run twice": (forged(lambda d: d["runs"].append(copy.deepcopy(d["runs"][0]))), "is in it 2 times"),
    "no seal": (lambda document: packed(document).replace(files.SEAL, b"vouched for ok "), "checksum is missing"),
    "another recording": (
        lambda _: bytes(records.as_table(pd.DataFrame({"seed": [1]}), {}, compression="none")),
        "not a file of packed runs",
    ),
    "not JSON": (of_table(with_text("{")), "not whole JSON"),
    "not Parquet": (lambda _: bytes(files.seal(files.UNSEALED.encode())), "not a file of shared runs"),
    "a bomb": (of_table(with_text("a" * (1 << 26)), compression="zstd"), "compressed"),
    "a bomb that says it is small": (of_table(many_rows_with("a" * (1 << 20))), "too large"),
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


LONG = ["", "..", "\x1b[31m", "cpu:threads=9999", "a" * 500]
JUNK = [None, -1, 0, 2**70, 1e308, -0.0, float("nan"), *LONG, {}, [[]], True]


def places(document, path=()):
    """The paths to all that is in a document; of lists to the first two."""
    inside = document.items() if isinstance(document, dict) else enumerate(document[:2])
    for name, value in inside:
        yield (*path, name)
        if isinstance(value, dict | list):
            yield from places(value, (*path, name))


def test_whatever_stands_anywhere_it_is_merged_or_refused_in_words(document, tmp_path):
    del document["runs"][1:]  # a column holds values of one kind
    draw, everywhere = random.Random(0), list(places(document))
    refused = 0
    for number in range(150):
        changed = copy.deepcopy(document)
        put(changed, draw.choice(everywhere), draw.choice(JUNK))
        folder = tmp_path / str(number)
        try:
            (tmp_path / "junk.parquet").write_bytes(packed(changed))
        except Exception:  # no table can hold it
            continue
        try:
            merge(tmp_path / "junk.parquet", folder)
            assert len(gl.runs(folder)) == len(document["runs"])
        except DataError:
            refused += 1
            assert not folder.exists()
    assert refused > 75


def test_pack_shares_what_it_shows_when_told_to_and_merge_adds(tmp_path):
    def command(*words, **options):
        return CliRunner().invoke(app, [*map(str, words)], **options)

    store, file = records.recorded_folder("runs") / "prednet-quick.parquet", tmp_path / "a.parquet"
    asked = ["pack", store, file, "--share", "--where", "setting=cpu", "--where", "seed=0"]
    no = command(*asked, input="n\n")
    assert no.exit_code == 1
    assert not file.exists()
    for said in ('"model": "Intel(R) Xeon(R) Processor"', "prednet quick, walk, cpu: seeds 0", "Of each run, beside"):
        assert said in no.output
    assert "1 runs packed into" in command(*asked, input="y\n").output
    assert gl.runs(file).setting.tolist() == ["cpu"]
    assert command("merge", file, "--store", tmp_path / "atlas").output == f"1 runs added to {tmp_path / 'atlas'}\n"
    assert str(command("merge", file, "--store", tmp_path / "atlas").exception).startswith("refused: ")


def test_a_name_of_this_machine_is_not_written_unseen(frame, monkeypatch):
    monkeypatch.setattr(platform, "node", lambda: "Xeon.example.org")
    assert shared_runs(frame[:1]).private() == ["Xeon"]
    assert "LOOK: Xeon" in str(shared_runs(frame[:1]))
