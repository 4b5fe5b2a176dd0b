"""Experiments: workers in processes and threads, and several drivers."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch

import gpulab as gl
from gpulab.store import _run_store as stores
from gpulab.training import _experiment as training_experiment
from gpulab.training import _progress as progress
from gpulab.training import _workers as workers

TINY = {"model_options": {"channels": [3, 4], "size": [8, 12]}, "data_options": {"size": [8, 12]}}
ONE = "cpu:threads=1"
SETTINGS = [ONE, "cpu:threads=1,precision=float64"]


def experiment(store, settings=(ONE,), seeds=2, options=None, **more):
    options = {**TINY, "frames": 60, **(options or {})}
    return gl.Experiment("prednet", settings, seeds, "smoke", store, options=options, **more)


def test_experiment_jobs_are_each_variant_under_each_setting_from_each_seed(tmp_path):
    exp = experiment(tmp_path, ["cpu:precision=float64,threads=1", "cpu"], seeds=[7, 3], reruns=2)
    assert exp.settings == ["cpu:threads=1,precision=float64", "cpu"]
    assert [(job["setting"], job["rerun"], job["seed"]) for job in exp.jobs()] == [
        (setting, rerun, seed) for setting in exp.settings for rerun in (0, 1) for seed in (7, 3)
    ]
    variants = [{}, {"flip": 3}, {"data": "moving-digits", "data_options": {"speed": 2.0}}]
    jobs = experiment(tmp_path, ["cpu", "cpu:threads=1"], variants=variants).jobs()
    assert (
        len({(job["setting"], job["seed"], job.get("flip"), job.get("data")) for job in jobs})
        == len(jobs)
        == 12
    )
    assert len(gl.Experiment("prednet", ["cpu"], profile="paper", store=tmp_path).jobs()) == 10


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """Two settings × two seeds, each run twice in a worker."""
    store = tmp_path_factory.mktemp("store")
    return store, experiment(store, SETTINGS, reruns=2).run(progress=False)


def test_experiment_runs_every_setting_from_every_seed_again_with_the_same_bits(done):
    store, frame = done
    jobs = [[setting, seed] for setting in SETTINGS for seed in (0, 0, 1, 1)]
    assert frame[["setting", "seed"]].values.tolist() == jobs
    assert frame.rerun.groupby([frame.setting, frame.seed]).apply(sorted).tolist() == [[0, 1]] * 4
    assert set(frame.status) == {"finished"}
    assert frame.groupby(["setting", "seed"]).weights.nunique().tolist() == [1] * 4, (
        "with one thread, the bits are the same"
    )
    assert frame.weights.nunique() == 4
    assert len(gl.runs(store)) == 8
    assert gl.verdict(frame[frame.setting == SETTINGS[0]]).reruns.same_bits.tolist() == [True, True]


def test_worker_gives_the_same_bits_as_train(done):
    frame = done[1]
    (there,) = frame[(frame.setting == ONE) & (frame.seed == 1) & (frame.rerun == 0)].itertuples()
    run = gl.train(**experiment(None).jobs()[1] | {"store": None}, progress=False)
    assert (there.id, there.weights) == (run.record["id"], run.record["summary"]["weights"])
    assert there.final_loss == run.final_loss


def test_experiment_starts_no_worker_for_runs_that_are_done(done, monkeypatch):
    store, frame = done
    monkeypatch.setattr(workers, "ProcessPoolExecutor", None)
    assert experiment(store, SETTINGS, reruns=2).run(progress=False).equals(frame)
    part = experiment(store, SETTINGS[1:], seeds=[1]).run(progress=False)
    assert part[["setting", "seed"]].values.tolist() == [[SETTINGS[1], 1]], (
        "runs of other experiments are left out"
    )


def dies(seed):
    """Kill the process for some seeds, as a system does that runs out of memory."""
    if seed in (1, 2):
        os.kill(os.getpid(), signal.SIGKILL)
    return seed


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this operating system has no SIGKILL")
def test_experiment_loses_only_the_runs_of_a_worker_that_dies(tmp_path):
    with pytest.raises(gl.GpulabError) as error:
        gl.Experiment(dies, [ONE], 4, store=tmp_path, workers=2).run(progress=False)
    assert str(error.value).startswith("2 of 4 runs failed")
    assert f"stored in {tmp_path}. Run again" in str(error.value)
    assert re.search(
        r"cpu:threads=1 seed 1.*its worker process ended: .*SIGKILL", str(error.value), re.DOTALL
    )
    assert gl.runs(tmp_path).seed.tolist() == [0, 3]


def test_experiment_continues_after_a_failing_job_in_the_order_of_variants(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = {
        "seeds": 1,
        "variants": [{"flip": flip} for flip in (5, 1, 4)],
        "options": {"frames": 20},
    }
    with pytest.raises(
        gl.GpulabError, match=r"3 of 6 runs failed.*cuda:77 seed 0.*'cuda:77' cannot run here"
    ):
        experiment("runs", ["cuda:77", ONE], **given).run(progress=False)
    assert experiment("runs", **given).run(progress=False).flip.tolist() == [5, 1, 4]


def named(seed, width=3):
    """A training function that names its metrics."""
    return {"accuracy": 0.5 + 0.1 * seed, "steps": width}


def test_experiment_has_no_column_of_nan_where_a_training_names_its_metrics(tmp_path):
    frame = gl.Experiment(named, [ONE], 2, store=tmp_path).run(progress=False)
    assert frame.accuracy.tolist() == [0.5, 0.6]
    assert not {"final_loss", "heldout_loss"} & set(frame)
    assert "final_loss" in gl.runs(tmp_path), "the table of a store has all columns"
    assert list(gl.seed_runs(named, seeds=2, progress=False)) == [
        "setting",
        "seed",
        "status",
        "accuracy",
        "steps",
    ]
    diverged = gl.seed_runs(lambda seed: {"accuracy": seed / 0}, seeds=2, progress=False)
    assert list(diverged) == ["setting", "seed", "status", "final_loss"]


def test_progress_bar_moves_within_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "REPORT_SECONDS", 0.0)
    seen = []
    monkeypatch.setattr(training_experiment, "update_bar", lambda *shown: seen.append(shown[3]))
    monkeypatch.setattr(workers, "POLL_SECONDS", 0.05)
    notes, real = [], workers.Workers.run_job

    def run_job(self, job, note=None):
        notes.append(note)
        return real(self, job, note)

    monkeypatch.setattr(workers.Workers, "run_job", run_job)
    experiment(tmp_path, seeds=1, options={"frames": 400}).run(progress=False)
    shares = [share for noted in seen for share in noted.values()]
    assert shares == sorted(shares)
    assert notes[0] is not None
    assert any(0 < share <= 1 for share in shares), "the share of an active run"


def test_run_clock_estimates_the_time_left_from_the_speed_of_each_setting():
    now = [0.0]
    clock = progress.RunClock(["fast", "fast", "slow", "slow"], n_parallel=1, clock=lambda: now[0])
    assert clock.seconds_left({}) is None
    clock.start_run(0)
    now[0] = 1.0
    clock.end_run(0)
    clock.start_run(2)
    now[0] = 21.0
    assert clock.seconds_left({}) == pytest.approx(1 + 20), (
        "the active run has taken twenty seconds, and the other will take as long"
    )
    assert clock.seconds_left({2: 0.5}) == pytest.approx(1 + 20 + 40), "half of it is done"
    assert 0.9 < clock.shares({})[2] < 1
    now[0] = 41.0
    clock.end_run(2)
    assert clock.seconds_left({}) == pytest.approx(1 + 40)
    clock.skip(1)
    assert clock.seconds_left({}) == pytest.approx(40)
    clock.start_run(3)
    now[0] = 51.0
    assert clock.shares({}) == {3: 0.25}
    assert clock.seconds_left({}) == pytest.approx(30)


# --- workers: processes, and threads that share a device ------------------------------------------

JOB = {"profile": "smoke", "setting": ONE, "keep_weights": True}
NETS = [("prednet", 0), ("autoencoder", 0), ("prednet", 1), ("whitener", 1)]
OF_A_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SHARED = [
    pytest.param(f"cuda:tf32={tf32},deterministic=on", marks=OF_A_GPU) for tf32 in ("off", "on")
]


def jobs(store, setting=ONE):
    for net, seed in NETS:
        frames = 400 if net == "whitener" else 100
        yield {
            **JOB,
            "net": net,
            "seed": seed,
            "setting": setting,
            "frames": frames,
            "store": store,
        }


def alone(setting=ONE):
    """Return the weights of each network, trained one after the other."""
    return [
        gl.train(**job, progress=False).record["summary"]["weights"] for job in jobs(None, setting)
    ]


def do_each(jobs, count=4):
    """Return the id of each run, or the error if it failed."""
    ended = {}

    def do(number):
        try:
            ended[number] = engine.run_job(jobs[number])
        except gl.GpulabError as error:
            ended[number] = str(error)

    with workers.Workers(count) as engine:
        engine.run_each(do, dict(enumerate(jobs)))
    return [ended[number] for number in range(len(jobs))]


@contextlib.contextmanager
def ctrl_c(when):
    def press():
        while not when():
            time.sleep(0.1)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    # In a background job SIGINT is ignored, so the default handler is set.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.1, press).start()
    with pytest.raises(KeyboardInterrupt):
        yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def trained_together(monkeypatch):
    """Train in threads that share a device (a CPU if there is no GPU), and return the weights."""
    monkeypatch.setattr(workers.Workers, "_shared_setting", lambda _, job: job["setting"])

    def trained(store, setting=ONE):
        run_ids = do_each([*jobs(store, setting)])
        frame = gl.runs(store)
        assert set(run_ids) <= set(frame.id)
        return frame.set_index(["experiment", "seed"]).weights[NETS].tolist()

    return trained


@pytest.mark.parametrize("setting", [ONE, *SHARED])
def test_workers_in_threads_give_networks_the_same_bits_as_alone(
    trained_together, tmp_path, setting
):
    threads = torch.get_num_threads()
    assert trained_together(tmp_path, setting) == alone(setting)
    assert torch.get_num_threads() == threads
    records = [json.loads(file.read_text()) for file in tmp_path.glob("*/run.json")]
    assert [record.get("shared", False) for record in records] == [
        setting.startswith("cuda")
    ] * len(NETS)


def test_sigint_in_threads_saves_checkpoints_that_resume_to_the_same_bits(
    trained_together, tmp_path
):
    waiting = dict(enumerate(jobs(tmp_path)))
    with ctrl_c(lambda: True), workers.Workers(len(NETS)) as engine:
        engine.run_each(lambda number: engine.run_job(waiting[number]), waiting)
    assert len(gl.runs(tmp_path)) < len(NETS)
    assert trained_together(tmp_path) == alone()


@pytest.mark.slow("waits for the first checkpoint of a training in another process")
def test_sigint_in_a_process_saves_a_checkpoint_from_which_it_resumes(tmp_path):
    exp = experiment(tmp_path, options={"frames": 40_000})
    with ctrl_c(lambda: [*tmp_path.glob(f"{stores.WORK_FOLDER}/*.safetensors")]):
        exp.run(progress=False)
    assert gl.runs(tmp_path).empty
    run = gl.train(**exp.jobs()[0], progress=False)
    assert 0 < run.record["resumed_at"] < len(run.history) == 2000


@pytest.mark.parametrize(
    ("setting", "shares"),
    [("cuda:tf32=off", True), ("cuda:compile=inductor", False), ("cpu", False)],
)
def test_shared_setting_says_which_settings_share_a_gpu_in_threads(setting, shares):
    job = {"net": "prednet", "setting": setting}
    assert workers.Workers(2)._shared_setting(job) == (setting if shares else "")
    assert workers.Workers(1)._shared_setting(job) == ""


def test_workers_in_threads_that_share_a_gpu_have_one_setting_at_a_time(monkeypatch):
    monkeypatch.setattr(workers.Workers, "_shared_setting", lambda _, job: job["setting"])
    seen = []

    def do(number):
        time.sleep(0.1)
        seen.append((number, torch.get_num_threads()))

    with workers.Workers(2) as engine:
        settings = [ONE, ONE, "cpu:threads=2"]
        waiting = {
            number: JOB | {"net": "prednet", "setting": setting}
            for number, setting in enumerate(settings)
        }
        engine.run_each(do, waiting)
    assert sorted(seen) == [(0, 1), (1, 1), (2, 2)]


def goes_on(seed, begun=""):
    """Ignore the request to end."""
    Path(begun).write_text(str(os.getpid()))
    while True:
        with contextlib.suppress(KeyboardInterrupt):
            time.sleep(600)


def test_sigint_waits_for_no_run_that_has_not_begun(monkeypatch, tmp_path):
    waited_for, usual = [], workers.Workers.stop
    monkeypatch.setattr(
        workers.Workers, "stop", lambda self, tasks: waited_for.extend(tasks) or usual(self, tasks)
    )
    begun = tmp_path / "begun"
    job = {"net": lambda seed: begun.touch() or time.sleep(600), "setting": ONE, "seed": 0}
    with ctrl_c(begun.exists), workers.Workers(1) as engine:
        engine.run_each(lambda _: engine.run_job(job), {0: job, 1: job})
    assert [task.cancelled() for task in waited_for] == [False]


def test_kill_timeout_ends_a_process_that_ignores_the_interruption(monkeypatch, tmp_path):
    monkeypatch.setattr(workers, "KILL_TIMEOUT", 1.0)
    begun = tmp_path / "begun"
    job = {"net": goes_on, "setting": ONE, "seed": 0, "begun": str(begun)}
    with ctrl_c(lambda: begun.exists() and begun.read_text()), workers.Workers(1) as engine:
        engine.run_each(lambda _: engine.run_job(job), {0: job})
    assert not psutil.pid_exists(int(begun.read_text()))


def test_workers_use_processes_of_one_setting_again_with_its_environment(tmp_path):
    def looks(seed):
        return {"process": os.getpid(), "threads": int(os.environ["OMP_NUM_THREADS"])}

    settings = [ONE, ONE, "cpu:threads=2"]
    job = {"net": looks, "store": str(tmp_path)}
    do_each(
        [job | {"setting": setting, "seed": number} for number, setting in enumerate(settings)], 1
    )
    frame = gl.runs(tmp_path).sort_values("seed", ignore_index=True)
    assert frame.threads.tolist() == [1, 1, 2]
    assert frame.process[0] == frame.process[1] != frame.process[2]


# --- several drivers, and a cluster ---------------------------------------------------------------

SLOW = """
import pathlib, time

def train(seed, setting):
    with open("begun", "a") as log:
        log.write(f"{seed} ")
    while not pathlib.Path("go").exists():
        time.sleep(0.05)
    return seed / 2
"""
WAITING = """
import gpulab as gl

gl.Experiment('slow.py:train', ['cpu'], 1, store='runs').run(progress=False)
"""


@pytest.mark.slow("kills a process that trains in another, and has two drivers train in theirs")
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this operating system has no SIGKILL")
@pytest.mark.parametrize("machine", ["this one", "another"])
def test_experiment_by_two_drivers_does_no_run_twice_nor_waits_for_a_killed_one(
    machine, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("slow.py").write_text(SLOW)
    killed = subprocess.Popen([sys.executable, "-c", WAITING], start_new_session=True)
    while not Path("begun").exists():
        assert killed.poll() is None, "it ended"
        time.sleep(0.01)
    started = psutil.Process(killed.pid).children(recursive=True)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    assert not psutil.wait_procs(started, 60)[1], "the processes of a killed driver end"
    Path("begun").unlink()
    Path("go").touch()
    (mark,) = Path("runs/.claims").iterdir()
    if machine == "another":
        monkeypatch.setattr("gpulab.training._experiment.LOCK_LEASE_SECONDS", 5.0)
        mark.write_text(
            mark.read_text()
            .replace(f"host={socket.gethostname()}", "host=x")
            .replace("=120.0", "=5.0")
        )
        assert {"host=x", "duration=5.0"} <= set(mark.read_text().splitlines())
    drivers = [
        gl.Experiment("slow.py:train", ["cpu"], [0, 1, 1], store="runs", workers=2)
        for _ in range(2)
    ]
    with ThreadPoolExecutor(2) as pool:
        frames = list(pool.map(lambda each: each.run(progress=False), drivers))
    assert [frame.final_loss.tolist() for frame in frames] == [[0.0, 0.5], [0.0, 0.5]], (
        "both drivers return all runs"
    )
    assert sorted(Path("begun").read_text().split()) == ["0", "1"]
    assert os.listdir("runs/.claims") == []
