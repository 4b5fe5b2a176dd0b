import contextlib
import json
import math
import re
import shutil
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import gpulab as gl
from gpulab import files
from gpulab.errors import printable
from gpulab.passports import OTHERS
from gpulab.store import identities, records, run_files
from gpulab.store import listing as stores

HISTORY = pd.DataFrame({"window": [0, 1], "step": [1, 2], "loss": [0.5, 0.25], "seconds": [0.1, 0.2]})


@pytest.fixture(scope="module")
def record():
    """The record of a real run, to make others from."""
    return gl.train("autoencoder", profile="smoke", frames=20, progress=False).record


def numbered(record, seed, **changes):
    return {**record, "id": f"run-{seed}", "seed": seed, **changes}


def write(store, record, **options):
    return run_files.write_run(store, record, HISTORY, **options)


# --- writing and reading -----------------------------------------------------------------------------------


def test_what_is_written_is_read_back(record, tmp_path):
    weights = {"a": torch.arange(6.0).reshape(2, 3).T, "b": torch.tensor(3)}
    folder = write(tmp_path / "new" / "store", numbered(record, 5), weights=weights)
    assert folder == tmp_path / "new" / "store" / "run-5"
    assert sorted(file.name for file in folder.iterdir()) == ["history.parquet", "run.json", "weights.safetensors"]
    back, history = run_files.read_run(folder)
    assert back == numbered(record, 5)
    assert history.equals(HISTORY)
    from safetensors.torch import load_file

    assert all((tensor == weights[name]).all() for name, tensor in load_file(folder / "weights.safetensors").items())
    assert list((tmp_path / "new" / "store" / run_files.WORK).iterdir()) == []


def test_a_run_that_cannot_be_written_whole_leaves_nothing(record, tmp_path):
    with pytest.raises(TypeError):
        write(tmp_path, numbered(record, 1, command=object()))  # JSON has no objects
    assert not (tmp_path / "run-1").exists()
    assert [path.name for path in tmp_path.rglob("*")] == [run_files.WORK]
    assert gl.runs(tmp_path).empty


def test_the_id_depends_on_what_is_run_and_on_nothing_else(record):
    identity = {"experiment": "prednet", "profile": "quick", "setting": "cuda:tf32=off", "seed": 3, "extra": {"a": 1}}
    name = identities.run_id(identity)
    assert re.fullmatch(r"prednet-quick-cuda_tf32_off-seed3-[0-9a-f]{10}", name)
    assert identities.run_id(dict(reversed(identity.items()))) == name
    assert len({identities.run_id({**identity, key: 7}) for key in identity} | {name}) == 6
    assert re.fullmatch(r"[a-z0-9._-]+", record["id"]), "a folder of this name can be made anywhere"


def test_many_threads_write_at_once_and_readers_see_whole_runs_only(record, tmp_path):
    writers, seeds = 8, 6
    tmp_path.joinpath(run_files.WORK).mkdir()
    finished = threading.Event()

    def work(writer):
        for seed in range(seeds):  # all write these
            history = HISTORY.assign(loss=[float(writer), float(seed)])
            weights = {"writer": torch.tensor([writer])}
            run_files.write_run(tmp_path, numbered(record, seed, command=f"writer {writer}"), history, weights)
        write(tmp_path, numbered(record, 100 + writer))  # and this one alone

    def read():
        seen = 0
        while not finished.is_set():
            frame = gl.runs(tmp_path)
            assert len(frame) >= seen
            seen = len(frame)
            stores.history(frame)

    with warnings.catch_warnings(), ThreadPoolExecutor(writers + 1) as pool:
        warnings.simplefilter("error")
        reader = pool.submit(read)
        try:
            for done in [pool.submit(work, writer) for writer in range(writers)]:
                done.result()
        finally:
            finished.set()
        reader.result()
    frame = gl.runs(tmp_path)
    assert frame.seed.tolist() == [*range(seeds), *range(100, 100 + writers)]
    for row in frame[frame.seed < 100].itertuples():  # each is wholly of one writer
        back, history = run_files.read_run(Path(row.path))
        assert back["command"] == f"writer {int(history.loss[0])}"
    assert list((tmp_path / run_files.WORK).iterdir()) == []


# --- frames ----------------------------------------------------------------------------------------------


def test_a_frame_has_a_row_a_run_with_the_columns_documented(record, tmp_path):
    for seed in (10, 9, 1):
        write(tmp_path, numbered(record, seed))
    frame = gl.runs(tmp_path)
    assert frame.seed.tolist() == [1, 9, 10]
    documented = re.findall(r"`(\w+)`", gl.runs.__doc__.partition("Columns:")[2].partition("A damaged")[0])
    assert sorted(frame.columns) == sorted(documented)
    row = frame.iloc[0]
    assert (row.experiment, row.profile, row.setting, row.device) == ("autoencoder", "smoke", "cpu", "cpu")
    assert (row.status, row.rerun, row.recorded, row.frames) == ("finished", 0, False, 20)
    assert row.final_loss == record["summary"]["final_loss"]
    assert row.weights == record["summary"]["weights"]
    assert row.machine == row.cpu == record["passport"]["cpu"]["model"]
    assert row.torch == torch.__version__
    assert row.gpulab == gl.__version__
    assert row.path == str(tmp_path / "run-1")


def test_rows_tell_machines_protocols_and_missing_losses(record, tmp_path):
    passport = {**record["passport"], "gpus": [{"name": "Titan"}]}
    write(tmp_path, numbered(record, 0, setting="cuda:tf32=off", passport=passport))
    lost = {**record["summary"], "final_loss": None, "heldout_loss": None}
    write(tmp_path, numbered(record, 1, status="diverged", diverged_at=3, summary=lost))
    other = {**record["configuration"], "learning_rate": 2e-3}
    write(tmp_path, numbered(record, 2, configuration=other))
    diverged, third, gpu = gl.runs(tmp_path).itertuples()
    assert (gpu.device, gpu.machine, gpu.gpu) == ("cuda", "Titan", "Titan")
    assert gpu.protocol == diverged.protocol != third.protocol
    assert math.isnan(diverged.final_loss)
    frame = gl.runs(tmp_path)
    assert frame.final_loss.dtype == frame.heldout_loss.dtype == float
    assert frame.final_loss.count() == 2
    assert not frame.recorded.any()


def test_a_store_that_is_empty_or_absent_gives_an_empty_frame_with_all_columns(tmp_path):
    for store in (tmp_path, tmp_path / "absent"):
        assert gl.runs(store).empty
        assert list(gl.runs(store).columns) == stores.COLUMNS


def test_the_default_store_is_told_by_the_environment(record, tmp_path, monkeypatch):
    write(tmp_path / "told", numbered(record, 1))
    write(tmp_path / "runs", numbered(record, 2))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GPULAB_STORE", str(tmp_path / "told"))
    assert gl.runs().seed.tolist() == [1]
    monkeypatch.delenv("GPULAB_STORE")
    assert gl.runs().seed.tolist() == [2]


def test_prepared_runs_are_copied_and_not_trained_again(tmp_path, monkeypatch):
    shelf, mine = tmp_path / "shelf", tmp_path / "mine"
    (prepared,) = gl.Experiment("autoencoder", ["cpu:threads=1"], 1, "smoke", shelf).run(progress=False).path
    for path in Path(prepared).iterdir():
        path.chmod(0o444)
    Path(prepared).chmod(0o555)
    monkeypatch.setenv("GPULAB_PREPARED", str(shelf))
    two = gl.Experiment("autoencoder", ["cpu:threads=1"], 2, "smoke", mine).run(progress=False)
    copied, trained = ((Path(path) / run_files.RECORD).read_bytes() for path in two.path)
    assert (Path(prepared) / run_files.RECORD).read_bytes() == copied != trained
    assert len(gl.runs(shelf)) == 1, "what was missing is in the store of who asked"
    assert not any((mine / run_files.WORK).iterdir())
    shutil.rmtree(mine)


@pytest.mark.parametrize("trouble", ["damaged", "unreadable"])
def test_a_prepared_run_that_is_of_no_use_is_trained_and_left_as_it_was(trouble, tmp_path, monkeypatch):
    shelf, mine = tmp_path / "shelf", tmp_path / "mine"
    gl.train("autoencoder", profile="smoke", store=shelf, progress=False)
    (run,) = gl.runs(shelf).path
    (Path(run) / run_files.HISTORY).write_bytes(b"PAR1")
    before = {path: path.read_bytes() for path in shelf.rglob("*") if path.is_file()}
    monkeypatch.setenv("GPULAB_PREPARED", str(shelf))
    if trouble == "unreadable":
        monkeypatch.setattr(shutil, "copyfile", lambda *_: (tmp_path / "absent").read_bytes())
    with pytest.warns(match="trained again") if trouble == "damaged" else contextlib.nullcontext():
        gl.train("autoencoder", profile="smoke", store=mine, progress=False)
    assert gl.runs(mine).status.tolist() == ["finished"]
    assert {path: path.read_bytes() for path in shelf.rglob("*") if path.is_file()} == before


def test_histories_are_put_below_each_other_with_the_columns_of_their_runs(record, tmp_path):
    for seed in (1, 2):
        write(tmp_path, numbered(record, seed))
    histories = stores.history(gl.runs(tmp_path))
    assert histories.loss.tolist() == [0.5, 0.25, 0.5, 0.25]
    assert histories.seed.tolist() == [1, 1, 2, 2]
    assert set(histories.setting) == {"cpu"}
    assert histories.id.tolist() == ["run-1", "run-1", "run-2", "run-2"]
    assert stores.history(gl.runs(tmp_path / "absent")).empty


# --- damage ------------------------------------------------------------------------------------------------


def without(field):
    def change(folder):
        record = json.loads((folder / "run.json").read_text())
        del record[field]
        (folder / "run.json").write_text(json.dumps(record))

    return change


def cut(name, size):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


def written(name, content):
    return lambda folder: (folder / name).write_bytes(content)


DAMAGE = {  # beside what a store's check is tested with
    "record binary": written("run.json", bytes(range(128, 256))),
    "record a list": written("run.json", b"[1, 2]"),
    "record of a later format": written("run.json", b'{"format": 99}'),
    **{f"record without a {field}": without(field) for field in ("seed", "passport", "configuration", "seal")},
    "history missing": lambda folder: (folder / "history.parquet").unlink(),
    "history garbage": written("history.parquet", b"PAR" * 1000),
    "history truncated": cut("history.parquet", 500),
}


def test_damaged_runs_are_reported_and_skipped(record, tmp_path):
    folders_ = [write(tmp_path, numbered(record, seed)) for seed in range(len(DAMAGE) + 1)]
    before = gl.runs(tmp_path)
    for damage, folder in zip(DAMAGE.values(), folders_, strict=False):
        damage(folder)
    with pytest.warns(UserWarning, match=rf"{len(DAMAGE)} damaged run\(s\) skipped") as warned:
        frame = gl.runs(tmp_path)
    assert frame.seed.tolist() == [len(DAMAGE)]
    assert frame.attrs["damaged"] == len(DAMAGE)
    assert warned[0].filename == __file__
    said = str(warned[0].message)
    for number, (damage, folder) in enumerate(zip(DAMAGE, folders_, strict=False)):
        assert (f"{folder}/" in said) or number >= stores.MOST_NAMED, damage
        with pytest.raises(gl.DataError, match=rf"{folder.name}.(run\.json|history\.parquet)"):
            stores.history(before[before.id == folder.name])


# --- checkpoints -------------------------------------------------------------------------------------------


def resumed(file):
    """What a checkpoint gives back, if anything."""
    given = []
    assert run_files.resume(file, lambda *parts: given.extend(parts)) == bool(given)
    return given or None


def test_a_checkpoint_is_read_back_unless_there_is_none_or_one_of_a_later_format(tmp_path, monkeypatch):
    file = run_files.checkpoint_file(tmp_path, "a-run")
    assert resumed(file) is None
    for step, count in ((1, 3), (2, 4)):
        notes = {"step": step, "state": {}, "ways": ["autograd"]}
        run_files.write_checkpoint(file, {"a": torch.arange(count)}, notes)
    tensors, notes = resumed(file)
    assert tensors["a"].tolist() == [0, 1, 2, 3]
    assert notes["step"] == 2
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    monkeypatch.setattr(run_files, "CHECKPOINT_FORMAT", 99)
    with pytest.warns(UserWarning, match="another version"):
        assert resumed(file) is None


def test_no_bit_of_a_checkpoint_is_unguarded_and_a_damaged_one_is_set_aside(tmp_path):
    file = run_files.checkpoint_file(tmp_path, "a-run")
    run_files.write_checkpoint(file, {"a": torch.arange(3)}, {"step": 1, "state": {}, "ways": []})
    whole = file.read_bytes()
    flipped = [bytearray(whole) for _ in range(8 * len(whole))]
    for bit, content in enumerate(flipped):
        content[bit // 8] ^= 1 << bit % 8
    for content in [b"", b"not tensors", bytes(100_000), whole[:-1], *flipped]:
        file.write_bytes(content)
        with pytest.warns(UserWarning, match="damaged checkpoint"):
            assert resumed(file) is None
        assert not file.exists()
        (moved,) = (tmp_path / run_files.DAMAGED).iterdir()
        assert moved.read_bytes() == content
        moved.unlink()


# --- what is shipped -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shipped():
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # none of them is damaged
        return gl.recorded_runs()


@pytest.mark.parametrize(
    ("model", "profile", "settings"),
    [
        *(
            (model, "paper", ("cuda:tf32=off", "cuda:tf32=on", "cuda:cudnn=off", "cuda:deterministic=on"))
            for model in ("autoencoder", "prednet")
        ),
        *((model, "quick", ("cpu", "cpu:threads=1")) for model in ("autoencoder", "prednet")),
    ],
)
def test_there_are_recorded_runs_of_ten_seeds(shipped, model, profile, settings):
    of_the_notebooks = (shipped.loader == "window") & (shipped["rerun"] == 0)
    these = shipped[(shipped.experiment == model) & (shipped.profile == profile) & of_the_notebooks]
    for setting in settings:
        assert these[these.setting == setting].seed.nunique() >= 10, setting
    assert these[these.setting.isin(settings)].protocol.nunique() == 1


def test_every_recorded_run_has_the_passport_of_its_machine_and_its_command(shipped):
    assert shipped.recorded.all()
    here = gl.passport()
    for file in set(shipped.path):
        for record in records.packed_runs(Path(file)):
            passport = record["passport"]
            assert passport.keys() == here.keys(), record["id"]
            assert passport["cpu"].keys() == here["cpu"].keys()
            assert passport["software"].keys() == here["software"].keys() - set(OTHERS)
            software = {key: passport["software"][key] for key in ("torch", "python", "os", "gpulab", "commit")}
            assert None not in software.values(), record["id"]
            assert re.fullmatch("[0-9a-f]{40}", software["commit"]), f"{record['id']}: a commit to be looked up"
            assert record["command"].startswith("gpulab "), record["id"]
            if record["setting"].startswith("cuda"):
                assert passport["gpus"][0]["driver"], record["id"]
                assert passport["software"]["cuda"]


def test_every_recorded_history_is_whole_and_agrees_with_its_summary(shipped):
    told = dict(list(stores.history(shipped).groupby("id")))
    for row in shipped.itertuples():
        history = told[row.id]
        assert history.window.tolist() == list(range(len(history)))
        if row.status == "finished":
            assert len(history) == row.frames // {"whitener": 200}.get(row.experiment, 20)
            assert history.loss[-(len(history) // 5) :].mean() == pytest.approx(row.final_loss, rel=1e-12), row.id


def test_what_is_recorded_is_small():
    sizes = {
        name: sum(f.stat().st_size for f in (records.DATA / name).rglob("*") if f.is_file()) for name in (".", "runs")
    }
    assert sizes["runs"] < 3_000_000
    assert sizes["."] < 10_000_000


# --- packed ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def packed(record, tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed")
    for seed in range(3):
        summary = {**record["summary"], "final_loss": None if seed == 1 else 0.1 * seed}
        write(folder / "store", numbered(record, seed, summary=summary, flip=seed, resumed_at=seed or None))
    assert stores.pack(folder / "store", folder / "shared.parquet") == 3
    return folder


def test_packed_runs_are_the_runs_that_were_packed(packed):
    store, file = gl.runs(packed / "store"), gl.runs(packed / "shared.parquet")
    assert file.drop(columns="path").equals(store.drop(columns="path"))
    here, there = stores.history(store), stores.history(file)
    assert there.drop(columns="seconds").equals(here.drop(columns="seconds"))
    assert (there.seconds - here.seconds).abs().max() <= 1 / 2048, "rounded to 1/1024"
    for one, other in zip(store.itertuples(), file.itertuples(), strict=True):
        assert stores.record_of(other) == stores.record_of(one)
    _, shared = records.read_rows(packed / "shared.parquet", [])
    assert {name: len(shared[name]) for name in records.SHARED} == dict.fromkeys(records.SHARED, 1), "kept once"
    shutil.copy(packed / "shared.parquet", packed / "store")
    assert len(gl.runs(packed / "store")) == 6, "a store may hold packed runs beside its folders"
    (packed / "store" / "shared.parquet").unlink()


def test_what_is_no_file_of_whole_packed_runs_is_reported_and_skipped(packed, tmp_path):
    whole = (packed / "shared.parquet").read_bytes()
    records.write_table(tmp_path / "other.parquet", HISTORY, {"passport": {}})
    with pytest.warns(UserWarning, match="skipped"), pytest.raises(gl.DataError, match="no runs to pack"):
        stores.pack(tmp_path, tmp_path / "b.parquet")
    (tmp_path / "whole.parquet").write_bytes(whole)
    for name, content in {"empty": b"", "garbage": b"PAR1" * 100, "cut": whole[: len(whole) // 2]}.items():
        (tmp_path / f"{name}.parquet").write_bytes(content)
    with pytest.warns(UserWarning, match=r"4 damaged.*cut\.parquet: cannot.*other\.parquet: not a file of packed runs"):
        assert len(gl.runs(tmp_path)) == 3


def test_nothing_is_ever_unpickled_from_a_file():
    # What joblib does in memory and through the pipes of its processes reads no file; its `load` does.
    in_memory = r" import cpu_count|\.externals\.loky import ProcessPoolExecutor"
    pattern = rf"pickle\.loads?\([^\n]*|torch\.load\b|joblib(?!{in_memory})|allow_pickle=True|read_pickle"
    found = [
        (file.name, hit)
        for file in Path(gl.__file__).parent.rglob("*.py")
        for hit in re.findall(pattern, file.read_text())
    ]
    # What a process sends its own worker, through the pipe between them.
    assert found == [("worker.py", 'pickle.loads(base64.b64decode(job["pickled"]))')]


def test_a_column_is_as_large_as_all_its_row_groups_together(tmp_path):
    file = tmp_path / "many.parquet"
    pq.write_table(pa.table({"loss": range(1000)}), file, row_group_size=200, use_dictionary=False)
    metadata = pq.read_metadata(file)
    records.check_size(file, metadata, 2000)
    with pytest.raises(gl.DataError, match="too large: more than 900 numbers in a column"):
        records.check_size(file, metadata, 900)


@pytest.mark.parametrize("path", ["a\0b", 300 * "x"], ids=["NUL", "long"])
def test_a_path_that_can_be_none_is_one_clear_line(path):
    for use in (
        gl.runs,
        lambda path: gl.train("autoencoder", profile="smoke", frames=20, store=path),
        lambda path: gl.train("autoencoder", profile="smoke", frames=20, registered=path),
        lambda path: gl.train(f"{path}.py:train"),
        lambda path: files.write(path, b""),
    ):
        with pytest.raises(gl.GpulabError, match=r"(?i)(name is|name) too long|embedded null") as error:
            use(path)
        assert printable(path) in str(error.value)


def test_a_long_text_as_an_option_of_a_function_is_no_path():
    def train(seed, prompt=""):
        return float(seed + len(prompt))

    assert gl.train(train, model_options={"prompt": 300 * "x"}, progress=False).metrics["final_loss"] == 300
