import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import gpulab as gl
from gpulab.settings import cpu_flags
from gpulab.store import runs as stores
from gpulab.training import experiment as workers
from gpulab.training.spec import RunSpec

TINY = {"model_options": {"channels": [3, 4], "size": [8, 12]}, "data_options": {"size": [8, 12]}}
SETTINGS = ["cpu:threads=1", "cpu:threads=1,precision=float64"]


def experiment(store, settings=("cpu:threads=1",), seeds=2, options=None, **more):
    options = {**TINY, "frames": 60, **(options or {})}
    return gl.Experiment("prednet", settings, seeds, "smoke", store, options=options, **more)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """Two settings × two seeds, each twice, run in a worker."""
    store = tmp_path_factory.mktemp("store")
    return store, experiment(store, SETTINGS, reruns=2).run(progress=False)


def test_every_setting_is_run_from_every_seed_again_with_the_same_bits(done):
    store, frame = done
    jobs = [[setting, seed] for setting in SETTINGS for seed in (0, 0, 1, 1)]
    assert frame[["setting", "seed"]].values.tolist() == jobs
    assert frame.rerun.groupby([frame.setting, frame.seed]).apply(sorted).tolist() == [[0, 1]] * 4
    assert set(frame.status) == {"finished"}
    assert frame.groupby(["setting", "seed"]).weights.nunique().tolist() == [1] * 4, "one thread: the same bits"
    assert frame.weights.nunique() == 4
    assert len(gl.runs(store)) == 8
    assert gl.verdict(frame[frame.setting == SETTINGS[0]]).reruns.same_bits.tolist() == [True, True]


def test_a_worker_gives_the_bits_that_training_here_gives_and_its_threads_stay_there(done):
    threads = torch.get_num_threads()
    run = gl.train("prednet", profile="smoke", setting="cpu:threads=1", seed=1, frames=60, progress=False, **TINY)
    frame = done[1]
    (there,) = frame[(frame.setting == "cpu:threads=1") & (frame.seed == 1) & (frame.rerun == 0)].itertuples()
    assert there.weights == run.record["summary"]["weights"]
    assert there.final_loss == run.final_loss
    assert there.id == RunSpec.of(**experiment("anywhere").jobs()[1]).identity(gl.passport()).id
    assert torch.get_num_threads() == threads


def test_experiment_starts_no_worker_for_runs_that_are_done(done, monkeypatch):
    store, frame = done
    monkeypatch.setattr(workers, "ProcessPoolExecutor", None)
    assert experiment(store, SETTINGS, reruns=2).run(progress=False).equals(frame)
    part = experiment(store, SETTINGS[1:], seeds=[1]).run(progress=False)
    assert part[["setting", "seed"]].values.tolist() == [[SETTINGS[1], 1]], "runs of other experiments are left out"


def dies(seed):
    """From some seeds its process is killed, as by a system without memory."""
    if seed in (1, 2):
        os.kill(os.getpid(), signal.SIGKILL)
    return seed


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this operating system has no SIGKILL")
def test_experiment_loses_only_the_runs_of_a_worker_that_dies(tmp_path):
    with pytest.raises(gl.GpulabError) as error:
        gl.Experiment(dies, ["cpu:threads=1"], 4, store=tmp_path, workers=2).run(progress=False)
    assert str(error.value).startswith(
        f"2 of 4 runs failed, the others are kept in {tmp_path}; run again to try those: "
    )
    assert re.search(r"cpu:threads=1 seed 1.*its worker process ended: .*SIGKILL", str(error.value), re.DOTALL)
    assert gl.runs(tmp_path).seed.tolist() == [0, 3]


def test_a_failing_job_does_not_stop_the_good_ones_which_come_in_the_order_of_the_variants(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = {"seeds": 1, "variants": [{"flip": flip} for flip in (5, 1, 4)], "options": {"frames": 20}}
    with pytest.raises(gl.GpulabError, match=r"3 of 6 runs failed.*cuda:77 seed 0.*'cuda:77' cannot run here"):
        experiment("runs", ["cuda:77", "cpu:threads=1"], **given).run(progress=False)
    assert experiment("runs", **given).run(progress=False).flip.tolist() == [5, 1, 4]


@pytest.mark.slow("starts a process for one run")
@pytest.mark.skipif("avx512f" not in cpu_flags(), reason="running as AVX2 shows on an AVX-512 CPU only")
def test_workers_are_started_with_the_instruction_set_of_their_setting(tmp_path):
    frame = experiment(tmp_path, ["cpu:isa=avx2"], seeds=1).run(progress=False)
    assert stores.read_run(Path(frame.path[0]))[0]["arithmetic"]["cpu_capability"] == "AVX2"


INTERRUPTED = """
import json, sys
import gpulab as gl

exp = gl.Experiment("prednet", ["cpu:threads=1"], 2, "smoke", sys.argv[1], options=json.loads(sys.argv[2]))
exp.run(progress=False)
"""


def until(condition, process):
    """Wait for what a process does."""
    deadline = time.monotonic() + 180
    while not condition():
        assert process.poll() is None, "it ended"
        assert time.monotonic() < deadline
        time.sleep(0.01)


def hears_ctrl_c():
    """A process started by one that ignores SIGINT (a job in the background) would ignore it too."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.slow("interrupts a process that trains in others")
@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT for one process")
def test_an_interrupted_experiment_saves_a_checkpoint_ends_its_workers_and_goes_on(tmp_path):
    options = {**TINY, "frames": 40_000}
    command = [sys.executable, "-c", INTERRUPTED, str(tmp_path), json.dumps(options)]
    parent = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=hears_ctrl_c)
    until(lambda: list(tmp_path.glob(f"{stores.WORK}/*.safetensors")), parent)
    parent.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in parent.communicate(timeout=60)[1]
    assert gl.runs(tmp_path).empty
    (checkpoint,) = tmp_path.glob(f"{stores.WORK}/*.safetensors")
    before = checkpoint.read_bytes()
    time.sleep(0.2)
    assert checkpoint.read_bytes() == before, "no worker goes on by itself"
    exp = gl.Experiment("prednet", ["cpu:threads=1"], 2, "smoke", tmp_path, options=options)
    run = gl.train(**exp.jobs()[0], progress=False)
    assert 0 < run.record["resumed_at"] < 2000
    assert len(run.history) == 2000


SLOW = """
import pathlib, time

def train(seed, setting):
    with open("begun", "a") as log:
        log.write(f"{seed} ")
    while not pathlib.Path("go").exists():
        time.sleep(0.05)
    return seed / 2
"""
WAITING = "import gpulab as gl; gl.Experiment('slow.py:train', ['cpu'], 1, store='runs').run(progress=False)"


@pytest.mark.slow("kills a process that trains in another, and has two drivers train in theirs")
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this operating system has no SIGKILL")
@pytest.mark.parametrize("machine", ["this one", "another"])
def test_two_drivers_do_no_run_twice_and_a_killed_one_does_not_hold_them_up_for_long(machine, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("slow.py").write_text(SLOW)
    killed = subprocess.Popen([sys.executable, "-c", WAITING], start_new_session=True)
    until(Path("begun").exists, killed)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    Path("begun").unlink()
    Path("go").touch()
    (mark,) = Path("runs/.claims").iterdir()
    if machine == "another":
        monkeypatch.setattr("gpulab.training.experiment.LEASE", 5.0)
        mark.write_text(mark.read_text().replace(f"host={socket.gethostname()}", "host=x").replace("=120.0", "=5.0"))
        assert {"host=x", "duration=5.0"} <= set(mark.read_text().splitlines())
    drivers = [gl.Experiment("slow.py:train", ["cpu"], [0, 1, 1], store="runs", workers=2) for _ in range(2)]
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
    variants = [{}, {"flip": 3}, {"data": "moving-digits", "data_options": {"speed": 2.0}}]
    jobs = gl.Experiment("prednet", ["cpu", "cpu:threads=1"], [0, 1], "smoke", tmp_path, variants=variants).jobs()
    assert len({(job["setting"], job["seed"], job.get("flip"), job.get("data")) for job in jobs}) == len(jobs) == 12
    assert len(gl.Experiment("prednet", ["cpu"], profile="paper", store=tmp_path).jobs()) == 10
