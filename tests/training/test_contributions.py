import copy
import functools
import getpass
import gzip
import json
import os
import platform
import random
import re
import subprocess
import sys
import time
import zlib
from pathlib import Path

import pytest

import gpulab as gl
from gpulab import files, records
from gpulab.errors import DataError, UsageError
from gpulab.training import contributions, folders
from gpulab.training.contributions import contribution, merge

PRIVATE = ["anna-laptop", "anna", "/home/anna", "/srv/secret/film.mp4", "~/notes.txt"]


@pytest.fixture(scope="module")
def frame():
    runs = gl.runs(records.recorded_folder("runs") / "prednet-quick.parquet")
    return runs[(runs.loader == "window") & runs.seed.isin([0, 1])]


@pytest.fixture
def document(frame, tmp_path):
    contribution(frame[frame.seed == 0]).save(tmp_path / "fine.json.gz")
    return json.loads(gzip.decompress((tmp_path / "fine.json.gz").read_bytes()))


def command(*words, **options):
    line = [sys.executable, "-m", "gpulab", *map(str, words)]
    return subprocess.run(line, capture_output=True, text=True, **options)


def test_every_shipped_run_of_our_networks_makes_the_round_trip_to_another_folder(frame, tmp_path):
    shared = contribution(frame)
    assert len(shared.runs) == len(frame) > 8
    assert not shared.left_out
    digest = shared.save(tmp_path / "mine.json.gz")
    assert merge(tmp_path / "mine.json.gz", tmp_path / "atlas") == len(frame)
    there = gl.runs(tmp_path / "atlas")
    columns = ["id", "setting", "seed", "status", "final_loss", "weights", "protocol", "machine", "torch", "frames"]
    before, after = (some.sort_values("id", ignore_index=True)[columns] for some in (frame, there))
    assert before.equals(after)
    one = there.iloc[0]
    record = gl.training.store.record_of(one)
    assert record["contribution"] == digest
    assert record["command"].startswith("gpulab train prednet --profile quick --setting")
    twin = gl.training.store.history(frame[frame.id == one.id])
    assert (gl.training.store.history(there[there.id == one.id]).loss.to_numpy() == twin.loss.to_numpy()).all()


def test_what_is_recorded_on_every_kind_of_machine_can_be_shared():
    for name in ("runs", "title", "longer"):
        some = gl.runs(records.recorded_folder(name))
        some = some.groupby(["experiment", "profile", "setting", "loader", "torch"]).head(1)
        assert not contribution(some).left_out, name


def planted(store, record, history, change):
    """A run in a store, with what others should not see in it."""
    record = copy.deepcopy(record)
    change(record)
    folders.write_run(store, record, history)
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
    (_, record, rows), *_ = gl.training.store.with_histories(frame[frame.id == row.id])
    return {**record, "format": records.FORMAT}, rows.to_pandas()


def test_nothing_private_is_in_the_bytes(one, tmp_path):
    shared = contribution(planted(tmp_path / "store", *one, everywhere))
    assert len(shared.runs) == 1
    shared.save(tmp_path / "mine.json.gz")
    content = (tmp_path / "mine.json.gz").read_bytes()
    text = gzip.decompress(content).decode()
    kept = (tmp_path / "store" / one[0]["id"] / "run.json").read_text()
    for name in PRIVATE:
        assert name in kept
        assert name not in text
        assert name.encode() not in content
    assert "/" not in json.dumps(json.loads(text)["runs"])
    assert not any(name in str(shared) for name in PRIVATE)


@pytest.mark.parametrize("place", [("data", "video:/srv/secret/film.mp4"), ("data_options", {"note": "anna"})])
def test_a_run_whose_name_hangs_on_something_private_is_left_out(one, tmp_path, place):
    def change(record):
        record["configuration"][place[0]] = place[1]

    shared = contribution(planted(tmp_path / "store", *one, change))
    assert not shared.runs
    assert sum(shared.left_out.values()) == 1
    with pytest.raises(UsageError, match="no runs to contribute"):
        shared.save(tmp_path / "mine.json.gz")


def test_a_function_of_ones_own_is_left_out(tmp_path):
    gl.train(lambda seed, secret="/srv/secret/film.mp4": seed + len(secret), store=tmp_path)
    shared = contribution(gl.runs(tmp_path))
    assert not shared.runs
    assert dict(shared.left_out) == {"of a model or a function of your own": 1}


def test_a_run_made_here_names_neither_this_machine_nor_its_user(tmp_path):
    gl.train("autoencoder", profile="smoke", store=tmp_path / "store", progress=False)
    shared = contribution(gl.runs(tmp_path / "store"))
    shared.save(tmp_path / "mine.json.gz")
    text = gzip.decompress((tmp_path / "mine.json.gz").read_bytes()).decode()
    for name in {platform.node(), getpass.getuser(), str(Path.home()), str(tmp_path)}:
        assert not re.search(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", text) or len(name) < 3
    assert merge(tmp_path / "mine.json.gz", tmp_path / "atlas") == 1


# --- forged files -------------------------------------------------------------------------------------------


def forged(change, checksums=True):
    """A document that was changed, with its seal made anew, and with `checksums` those of its runs."""

    def write(document):
        change(document)
        for run in document["runs"] if checksums else ():
            run["checksum"] = contributions._checksum(run)
        document["seal"] = files.UNSEALED
        return gzip.compress(bytes(files.seal(json.dumps(document).encode())))

    return write


def of_run(**fields):
    return forged(lambda document: document["runs"][0].update(fields))


def inside(name, checksums=True, **fields):
    return forged(lambda document: document["runs"][0][name].update(fields), checksums)


def whole(document):
    return gzip.compress(json.dumps(document).encode())


def lengthened(document):
    document["runs"][0]["history"]["loss"].append(0.1)


def twice(document):
    document["runs"].append(copy.deepcopy(document["runs"][0]))


def zip_bomb(_):
    packer = zlib.compressobj(9, wbits=31)
    return packer.compress(bytes(contributions.UNPACKED + 2)) + packer.flush()


def lying_bomb(document):
    return zip_bomb(document)[:-4] + (10).to_bytes(4, "little")  # says that it has ten bytes


def other_chip(document):
    passport = document["runs"][0]["passport"]
    passport["cpu"]["model"] = "AMD Ryzen 9"
    passport["gpus"] = [{"name": "NVIDIA RTX 4090"}]


FORGED = {
    "a loss, in a file sealed anew": (inside("summary", checksums=False, final_loss=0.001), "its checksum is that of"),
    "a loss, with all checksums made anew": (inside("summary", final_loss=0.001), "last fifth of its history"),
    "a setting": (of_run(setting="cpu:threads=7"), "its id is not"),
    "a seed": (of_run(seed=77), "its id is not"),
    "a learning rate": (inside("configuration", learning_rate=0.1), "its id is not"),
    "a factor": (of_run(loader="reused"), "its id is not"),
    "a chip": (forged(other_chip), "its id is not"),
    "a version of torch": (
        forged(lambda document: document["runs"][0]["passport"]["software"].update(torch="9.9")),
        "its id is not",
    ),
    "memory in a passport": (inside("passport", checksums=False, memory_bytes=1), "its checksum is that of"),
    "an id that is a path": (of_run(id="../../evil"), "id: String should match"),
    "a path in a passport": (
        forged(lambda document: document["runs"][0]["passport"]["cpu"].update(model="/home/anna")),
        "model: String should match",
    ),
    "a field of its own": (of_run(host="anna-laptop"), "host: Extra inputs"),
    "a field of its own outside": (forged(lambda document: document.update(path="/etc")), "path: Extra inputs"),
    "a negative loss": (inside("summary", final_loss=-1.0), "final_loss: Input should be greater"),
    "an infinite loss": (inside("summary", final_loss=float("inf")), "final_loss"),
    "a loss that is missing": (inside("summary", final_loss=None), "a loss that is no number"),
    "a loss that is text": (inside("summary", final_loss="0.1"), "final_loss"),
    "a history too long": (forged(lengthened), "rows missing"),
    "a history cut": (
        forged(lambda d: [rows.pop() for rows in d["runs"][0]["history"].values()]),
        "windows, its 1000 frames 50",
    ),
    "updates that were not": (
        forged(lambda d: d["runs"][0]["history"].update(step=[10**6 + n for n in range(50)])),
        "its frames do not make",
    ),
    "a speed": (inside("summary", frames_per_second=1e6), "its speed"),
    "a time": (inside("summary", seconds=1e-9), "longer than the run"),
    "the future": (of_run(started="2999-01-01T00:00:00Z"), "started 2999"),
    "a date that is none": (of_run(started="yesterday"), "started"),
    "a diverged run with a loss": (of_run(status="diverged", diverged_at=3), "it diverged, and has"),
    "a version of the format": (forged(lambda document: document.update(format=99)), "format '99'"),
    "no runs": (forged(lambda document: document.update(runs=[])), "runs: List should have"),
    "a run twice": (forged(twice), "is in it 2 times"),
    "no seal": (lambda d: whole({k: v for k, v in d.items() if k != "seal"}), "checksum is missing"),
    "edited by hand": (lambda d: gzip.compress(json.dumps(d).replace('"seed": 0', '"seed": 1').encode()), "damaged"),
    "another document": (lambda _: whole({"kind": "a diary"}), "not a contribution"),
    "a list": (lambda _: whole([1, 2]), "not a contribution"),
    "deep nesting": (lambda _: gzip.compress(b"[" * 10_000), "nested"),
    "not JSON": (lambda _: gzip.compress(b"\x00\x01"), "not whole JSON"),
    "not gzipped": (lambda document: json.dumps(document).encode(), "not a contribution"),
    "empty": (lambda _: b"", "cut short"),
    "truncated": (lambda document: whole(document)[:-100], "cut short"),
    "something behind": (lambda document: whole(document) + b"more", "more behind its end"),
    "a bit flipped": (lambda d: (c := whole(d))[:2000] + bytes([c[2000] ^ 1]) + c[2001:], "damaged|JSON|cut short"),
    "a bomb": (zip_bomb, "too large: unpacks"),
    "a bomb that says it is small": (lying_bomb, "too large: unpacks"),
    "oversized": (lambda _: os.urandom(1) * (contributions.LARGEST + 1), "it has 16,777,217 bytes"),
}


@pytest.mark.parametrize("kind", FORGED)
def test_a_forged_file_is_refused_with_the_reason_and_nothing_is_added(kind, document, tmp_path):
    forge, reason = FORGED[kind]
    file, folder = tmp_path / "forged.json.gz", tmp_path / "atlas"
    file.write_bytes(forge(document))
    with pytest.raises(DataError, match=reason):
        merge(file, folder)
    assert not folder.exists()


JUNK = [
    None,
    -1,
    0,
    2**70,
    1e308,
    -0.0,
    float("nan"),
    "",
    "..",
    "\x1b[31m",
    "cpu:threads=9999",
    "a" * 500,
    {},
    [[]],
    True,
]


def places(document, path=()):
    """The paths to all that is in a document; of lists to the first two."""
    inside = document.items() if isinstance(document, dict) else enumerate(document[:2])
    for name, value in inside:
        yield (*path, name)
        if isinstance(value, dict | list):
            yield from places(value, (*path, name))


def test_whatever_stands_anywhere_it_is_merged_or_refused_in_words(document, tmp_path):
    draw, everywhere = random.Random(0), list(places(document))
    refused = 0
    for number in range(400):
        changed = copy.deepcopy(document)
        *path, last = draw.choice(everywhere)
        place = functools.reduce(lambda inside, name: inside[name], path, changed)
        place[last] = draw.choice(JUNK)
        try:
            content = forged(lambda _: None)(changed)
        except (TypeError, AttributeError, ValueError):  # so broken that it has no checksums
            content = whole(changed)
        (tmp_path / "junk.json.gz").write_bytes(content)
        try:
            merge(tmp_path / "junk.json.gz", folder := tmp_path / str(number))
            assert len(gl.runs(folder)) == len(document["runs"])
        except DataError:
            refused += 1
            assert not folder.exists()
    assert refused > 300


def test_what_is_forged_with_a_loss_and_its_history_cannot_be_told(document, tmp_path):
    """A checksum is no signature, as docs/atlas.md says."""

    def change(document):
        run = document["runs"][0]
        run["history"]["loss"] = [loss / 2 for loss in run["history"]["loss"]]
        run["summary"]["final_loss"] /= 2

    (tmp_path / "forged.json.gz").write_bytes(forged(change)(document))
    assert merge(tmp_path / "forged.json.gz", tmp_path / "atlas") == len(document["runs"])


def test_a_whole_number_is_a_loss_like_any_other(document, tmp_path):
    (tmp_path / "whole.json.gz").write_bytes(inside("summary", heldout_loss=2**70)(document))
    merge(tmp_path / "whole.json.gz", tmp_path / "atlas")
    assert 2.0**70 in set(gl.runs(tmp_path / "atlas").heldout_loss)


def test_a_file_is_merged_once_and_one_with_a_run_that_is_there_adds_none(frame, tmp_path):
    contribution(frame[frame.seed == 0]).save(tmp_path / "some.json.gz")
    contribution(frame).save(tmp_path / "all.json.gz")
    count = merge(tmp_path / "some.json.gz", tmp_path / "atlas")
    for name in ("some", "all"):
        with pytest.raises(DataError, match=f"{count} of .* runs are in .* already"):
            merge(tmp_path / f"{name}.json.gz", tmp_path / "atlas")
    assert len(gl.runs(tmp_path / "atlas")) == count
    assert len(list((tmp_path / "atlas").iterdir())) == 1


def test_a_run_that_is_in_the_store_as_a_folder_is_not_added_again(tmp_path):
    gl.train("autoencoder", profile="smoke", store=tmp_path / "store", progress=False)
    contribution(gl.runs(tmp_path / "store")).save(tmp_path / "mine.json.gz")
    with pytest.raises(DataError, match="already"):
        merge(tmp_path / "mine.json.gz", tmp_path / "store")


def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path):
    (tmp_path / "bomb.json.gz").write_bytes(gzip.compress(bytes(1 << 28), 1))
    begin = time.process_time()
    with pytest.raises(DataError, match="unpacks"):
        merge(tmp_path / "bomb.json.gz", tmp_path / "atlas")
    assert time.process_time() - begin < 2


# --- the commands -------------------------------------------------------------------------------------------


def test_contribute_shows_and_asks_and_merge_adds(tmp_path):
    store = records.recorded_folder("runs") / "prednet-quick.parquet"
    asked = ["contribute", store, "--where", "setting=cpu", "--where", "seed=0", "--output", tmp_path / "a.json.gz"]
    no = command(*asked, input="n\n")
    assert no.returncode == 1
    assert not (tmp_path / "a.json.gz").exists()
    for said in ("cpu model: Intel(R) Xeon(R) Processor", "prednet quick, walk, cpu: seeds 0", "Of each run: id, "):
        assert said in no.stdout
    assert command(*asked, input="y\n").returncode == 0
    again = command(*asked, "--yes")
    assert again.returncode == 2
    assert "is there already" in again.stderr
    assert command(*asked, "--yes", "--overwrite").returncode == 0
    added = command("merge", tmp_path / "a.json.gz", "--store", tmp_path / "atlas")
    assert added.stdout == f"1 runs added to {tmp_path / 'atlas'}\n"
    refused = command("merge", tmp_path / "a.json.gz", "--store", tmp_path / "atlas")
    assert refused.returncode == 2
    assert refused.stderr.startswith("gpulab: refused: ")


def test_a_name_of_this_machine_is_not_written_unseen(frame, monkeypatch):
    monkeypatch.setattr(platform, "node", lambda: "Xeon.example.org")
    assert contribution(frame[:1]).private() == ["Xeon"]
    assert "LOOK: Xeon" in str(contribution(frame[:1]))
