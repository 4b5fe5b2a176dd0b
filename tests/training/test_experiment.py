import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import gpulab as gl
from gpulab.settings import cpu_flags
from gpulab.store import run_files
from gpulab.training import workers
from gpulab.training.request import planned

TINY = {"model_options": {"channels": [3, 4], "size": [8, 12]}, "data_options": {"size": [8, 12]}}
BROKEN = [sys.executable, "-c", "import sys; sys.exit('boom')"]
SETTINGS = ["cpu:threads=1", "cpu:threads=1,precision=float64"]


def experiment(store, settings=("cpu:threads=1",), seeds=2, options=None, **more):
    options = {**TINY, "frames": 60, **(options or {})}
    return gl.Experiment("prednet", settings, seeds, "smoke", store, options=options, **more)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """Two settings × two seeds, run in workers, and what the parent process was like before and after."""
    store = tmp_path_factory.mktemp("store")
    before = torch.get_num_threads(), dict(os.environ)
    frame = experiment(store, SETTINGS).run(progress=False)
    return store, frame, before, (torch.get_num_threads(), dict(os.environ))


def test_every_setting_is_run_from_every_seed(done):
    store, frame, _, _ = done
    assert frame[["setting", "seed"]].values.tolist() == [[setting, seed] for setting in SETTINGS for seed in (0, 1)]
    assert set(frame.status) == {"finished"}
    assert frame.weights.is_unique
    assert len(gl.runs(store)) == 4


def test_a_worker_gives_the_bits_that_training_here_gives(done):
    run = gl.train("prednet", profile="smoke", setting="cpu:threads=1", seed=1, frames=60, progress=False, **TINY)
    frame = done[1]
    (there,) = frame[(frame.setting == "cpu:threads=1") & (frame.seed == 1)].itertuples()
    assert there.weights == run.record["summary"]["weights"]
    assert there.final_loss == run.final_loss
    assert there.id == planned(**experiment("anywhere").jobs()[1]).id


def test_the_threads_of_workers_do_not_leak_into_this_process(done):
    _, frame, before, after = done
    assert before == after
    records = [run_files.read_record(Path(path)) for path in frame.path]
    assert [record["arithmetic"]["threads"] for record in records] == [1, 1, 1, 1]


def test_what_is_done_is_skipped_without_a_worker(done, monkeypatch):
    store, frame, _, _ = done
    monkeypatch.setattr(workers, "WORKER", BROKEN)
    again = experiment(store, SETTINGS).run(progress=False)
    assert again.equals(frame)
    part = experiment(store, SETTINGS[1:], seeds=[1]).run(progress=False)
    assert part[["setting", "seed"]].values.tolist() == [[SETTINGS[1], 1]], "runs of other experiments are left out"


def test_a_worker_that_dies_is_reported_with_setting_seed_and_its_last_words(done, monkeypatch, tmp_path):
    store = done[0]
    monkeypatch.setattr(workers, "WORKER", BROKEN)
    with pytest.raises(gl.GpulabError) as error:
        experiment(store, SETTINGS[:1], seeds=[0, 1, 2, 3, 4, 5]).run(progress=False)
    message = str(error.value)
    assert "4 of 6 runs failed" in message
    which = ", ".join(f"cpu:threads=1 seed {seed}" for seed in (2, 3, 4, 5))
    assert f"{which}: its worker process ended with status 1: boom" in message, "a reason is given once"
    assert str(store) in message
    assert len(gl.runs(store)) == 4, "the others are kept"
    assert "seed 0" not in message
    with pytest.raises(gl.GpulabError, match="2 of 2 runs failed"):
        experiment(tmp_path, seeds=2).run(progress=False)


KILLED = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this operating system has no SIGKILL")
@pytest.mark.parametrize(
    ("worker", "words"),
    [(KILLED, "ended with status -9: it said nothing"), (["no-python"], "could not be started")],
)
def test_a_worker_that_is_killed_or_cannot_be_started_is_reported(worker, words, monkeypatch, tmp_path):
    monkeypatch.setattr(workers, "WORKER", worker)
    with pytest.raises(gl.GpulabError, match=f"cpu:threads=1 seed 0: its worker process {words}"):
        experiment(tmp_path, seeds=1).run(progress=False)


def test_a_store_that_cannot_be_written_is_told_once_before_any_worker_starts(monkeypatch, tmp_path):
    monkeypatch.setattr(workers, "WORKER", BROKEN)
    (tmp_path / "a-file").write_text("")
    with pytest.raises(gl.GpulabError, match="cannot be written: a part of its path is a file"):
        experiment(tmp_path / "a-file").run(progress=False)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="this operating system does not list descriptors")
def test_a_worker_that_is_replaced_leaves_nothing(monkeypatch):
    monkeypatch.setattr(workers, "WORKER", [sys.executable, "-S", "-c", "import sys; sys.exit('boom')"])

    def counts():
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    with workers.Workers(1) as pool:
        before = counts()
        for _ in range(10):
            with pytest.raises(gl.GpulabError, match="boom"):
                pool.train({"net": "autoencoder", "setting": "cpu"}, lambda *_: None)
        assert len(pool.all) == 1
    assert counts() == before


def test_nothing_in_the_current_folder_is_imported_by_a_worker_in_which_a_library_may_print(monkeypatch, tmp_path):
    monkeypatch.setenv("MKL_VERBOSE", "1")  # prints from C, past Python's sys.stdout
    for name in ("queue", "contextlib", "numpy", "typing_extensions"):
        (tmp_path / f"{name}.py").write_text("open('imported', 'a').close()")
    monkeypatch.chdir(tmp_path)
    assert len(experiment("runs", seeds=1).run(progress=False)) == 1
    assert not (tmp_path / "imported").exists()


def test_a_failing_job_does_not_stop_the_good_ones(tmp_path):
    with pytest.raises(gl.GpulabError, match=r"2 of 4 runs failed.*'cuda:77' cannot run here") as error:
        experiment(tmp_path, ["cuda:77", "cpu:threads=1"]).run(progress=False)
    assert "cuda:77 seed 0" in str(error.value)
    assert "cuda:77 seed 1" in str(error.value)
    assert gl.runs(tmp_path)[["setting", "seed"]].values.tolist() == [["cpu:threads=1", 0], ["cpu:threads=1", 1]]


def test_two_workers_and_reruns(tmp_path):
    frame = experiment(tmp_path, reruns=2, workers=2).run(progress=False)
    assert sorted(frame[["seed", "rerun"]].values.tolist()) == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert frame.id.is_unique
    by_seed = frame.groupby("seed").weights
    assert by_seed.nunique().tolist() == [1, 1], "one thread gives the same bits every time"
    assert frame.weights.nunique() == 2
    assert gl.verdict(frame).reruns.same_bits.tolist() == [True, True]


@pytest.mark.skipif("avx512f" not in cpu_flags(), reason="running as AVX2 shows on an AVX-512 CPU only")
def test_workers_are_started_with_the_instruction_set_of_their_setting(tmp_path):
    frame = experiment(tmp_path, ["cpu:isa=avx2"], seeds=1).run(progress=False)
    assert run_files.read_record(Path(frame.path[0]))["arithmetic"]["cpu_capability"] == "AVX2"


INTERRUPTED = """
import json, sys
import gpulab as gl

exp = gl.Experiment("prednet", ["cpu:threads=1"], 2, "smoke", sys.argv[1], options=json.loads(sys.argv[2]))
exp.run(progress=False)
"""


def hears_ctrl_c():
    """A process started by one that ignores SIGINT (a job in the background) would ignore it too."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT for one process")
def test_an_interrupted_experiment_saves_a_checkpoint_ends_its_workers_and_goes_on(tmp_path):
    options = {**TINY, "frames": 2000, "checkpoint_seconds": 0}
    command = [sys.executable, "-c", INTERRUPTED, str(tmp_path), json.dumps(options)]
    parent = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=hears_ctrl_c)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(f"{run_files.WORK}/*.safetensors")):
        assert parent.poll() is None, parent.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    parent.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in parent.communicate(timeout=60)[1]
    assert gl.runs(tmp_path).empty
    (checkpoint,) = tmp_path.glob(f"{run_files.WORK}/*.safetensors")
    before = checkpoint.read_bytes()
    time.sleep(0.2)
    assert checkpoint.read_bytes() == before, "no worker goes on by itself"
    exp = gl.Experiment("prednet", ["cpu:threads=1"], 2, "smoke", tmp_path, options=options)
    run = gl.train(**{**exp.jobs()[0], "checkpoint_seconds": 60}, progress=False)
    assert 0 < run.record["resumed_at"] < 100
    assert len(run.history) == 100


SLOW = """
import pathlib, time

def train(seed, setting, folder):
    with open("begun", "a") as log:
        log.write(f"{seed} ")
    while not pathlib.Path("go").exists():
        time.sleep(0.05)
    return seed / 2
"""
WAITING = "import gpulab as gl; gl.Experiment('slow.py:train', ['cpu'], 1, store='runs').run(progress=False)"


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this operating system has no SIGKILL")
@pytest.mark.parametrize("machine", ["this one", "another"])
def test_two_drivers_do_no_run_twice_and_a_killed_one_does_not_hold_them_up_for_long(machine, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("slow.py").write_text(SLOW)
    killed = subprocess.Popen([sys.executable, "-c", WAITING], start_new_session=True)
    deadline = time.monotonic() + 180
    while not Path("begun").exists():
        assert killed.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    Path("begun").unlink()
    Path("go").touch()
    (mark,) = Path("runs/.claims").iterdir()
    if machine == "another":
        monkeypatch.setattr("gpulab.training.experiment.LEASE", 5.0)
        mark.write_text(mark.read_text().replace(f"host={socket.gethostname()}", "host=x").replace("=120.0", "=5.0"))
        assert {"host=x", "duration=5.0"} <= set(mark.read_text().splitlines())
    drivers = [gl.Experiment("slow.py:train", ["cpu"], [0, 1, 1], store="runs") for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        frames = list(pool.map(lambda each: each.run(progress=False), drivers))
    assert [frame.final_loss.tolist() for frame in frames] == [[0.0, 0.5], [0.0, 0.5]], "both have them all"
    assert sorted(Path("begun").read_text().split()) == ["0", "1"]
    assert os.listdir("runs/.claims") == []


def test_jobs_are_each_variant_under_each_setting_from_each_seed(tmp_path):
    exp = experiment(tmp_path, ["cpu:precision=float64,threads=1", "cpu"], seeds=[7, 3], reruns=2)
    assert exp.settings == ["cpu:threads=1,precision=float64", "cpu"]
    assert [(job["setting"], job["rerun"], job["seed"]) for job in exp.jobs()] == [
        (setting, rerun, seed) for setting in exp.settings for rerun in (0, 1) for seed in (7, 3)
    ]
    assert all(job["frames"] == 60 for job in exp.jobs())
    variants = [{}, {"flip": 3}, {"data": "jpeg:walk", "data_options": {"decoder": "av", "quality": 50}}]
    jobs = gl.Experiment("prednet", ["cpu", "cpu:threads=1"], [0, 1], "smoke", tmp_path, variants=variants).jobs()
    assert len({(job["setting"], job["seed"], job.get("flip"), job.get("data")) for job in jobs}) == len(jobs) == 12
    of_profile = {name: gl.Experiment("prednet", ["cpu"], profile=name, store=tmp_path) for name in ("smoke", "paper")}
    assert {name: len(exp.jobs()) for name, exp in of_profile.items()} == {"smoke": 2, "paper": 10}


def test_variants_come_in_the_order_in_which_they_were_given(tmp_path):
    variants = [{"flip": flip} for flip in (5, 1, 4, 2, 3)]
    exp = gl.Experiment(
        "autoencoder", ["cpu:threads=1"], [0], "smoke", tmp_path, options={"frames": 20}, variants=variants
    )
    assert exp.run(progress=False).flip.tolist() == [5, 1, 4, 2, 3]


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"variants": []}, "variants"),
        ({"model": "resnet"}, "'resnet'"),
        ({"profile": "huge"}, "'huge'"),
        ({"settings": ["gpu"]}, "'gpu'"),
        ({"settings": []}, "settings"),
        ({"seeds": []}, "seeds"),
        ({"seeds": 0}, "seeds"),
        ({"reruns": 0}, "reruns"),
        ({"workers": 0}, "workers"),
        ({"options": {"model_options": {"size": [9, 9]}}}, r"\(9, 9\)"),
        ({"options": {"frames": 3}}, "3"),
    ],
)
def test_an_experiment_that_makes_no_sense_is_refused_before_any_worker_starts(wrong, named, tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "WORKER", BROKEN)
    wanted = {"model": "prednet", "settings": ["cpu"], "seeds": 1, "profile": "smoke", "store": tmp_path}
    with pytest.raises(gl.UsageError, match=named):
        gl.Experiment(**{**wanted, **wrong}).run(progress=False)
