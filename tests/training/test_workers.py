"""Several networks in threads that share a device, and processes."""

import contextlib
import json
import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

import gpulab as gl
from gpulab.training import experiment as workers

JOB = {"profile": "smoke", "setting": "cpu:threads=1", "keep_weights": True}
NETS = [("prednet", 0), ("autoencoder", 0), ("prednet", 1), ("whitener", 1)]


def jobs(store, setting="cpu:threads=1"):
    for net, seed in NETS:
        frames = 400 if net == "whitener" else 100
        yield {**JOB, "net": net, "seed": seed, "setting": setting, "frames": frames, "store": str(store)}


def weights(net, seed, setting="cpu:threads=1"):
    frames = 400 if net == "whitener" else 100
    run = gl.train(net, None, setting, seed, "smoke", frames=frames, progress=False)
    return run.record["summary"]["weights"]


def do_each(jobs, count=4):
    """The id of each run, or why it has none."""
    ended = {}

    def do(number):
        try:
            ended[number] = engine.do(jobs[number])
        except gl.GpulabError as error:
            ended[number] = str(error)

    with workers.Workers(count) as engine:
        engine.each(do, dict(enumerate(jobs)))
    return [ended[number] for number in range(len(jobs))]


@contextlib.contextmanager
def ctrl_c(when):
    def press():
        while not when():
            time.sleep(0.1)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    threading.Timer(0.1, press).start()
    with pytest.raises(KeyboardInterrupt):
        yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def trained_together(monkeypatch):
    """What threads that share a device give; a CPU stands in for it where there is none."""
    monkeypatch.setattr(workers.Workers, "_shared_setting", lambda _, job: job["setting"])

    def trained(store, setting="cpu:threads=1"):
        run_ids = do_each([*jobs(store, setting)])
        frame = gl.runs(store)
        assert set(run_ids) <= set(frame.id)
        return frame.set_index(["experiment", "seed"]).weights

    return trained


def test_networks_in_threads_have_the_bits_that_they_have_alone(trained_together, tmp_path):
    threads = torch.get_num_threads()
    together = trained_together(tmp_path)
    assert {key: together[key] for key in NETS} == {key: weights(*key) for key in NETS}
    assert torch.get_num_threads() == threads


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("setting", ["cuda:tf32=off,deterministic=on", "cuda:tf32=on,deterministic=on"])
def test_networks_on_streams_of_one_gpu_have_the_bits_that_they_have_alone(trained_together, tmp_path, setting):
    together = trained_together(tmp_path, setting)
    assert {key: together[key] for key in NETS} == {key: weights(*key, setting) for key in NETS}
    records = [json.loads(file.read_text()) for file in tmp_path.glob("*/run.json")]
    assert all(record["shared"] and record["summary"]["frames_per_second"] is None for record in records)


def test_interrupted_threads_save_checkpoints_and_resume_to_the_same_bits(trained_together, tmp_path):
    waiting = dict(enumerate(jobs(tmp_path)))
    with ctrl_c(lambda: True), workers.Workers(len(NETS)) as engine:
        engine.each(lambda number: engine.do(waiting[number]), waiting)
    assert len(gl.runs(tmp_path)) < len(NETS)
    together = trained_together(tmp_path)
    assert {key: together[key] for key in NETS} == {key: weights(*key) for key in NETS}


@pytest.mark.parametrize(
    ("setting", "shares"), [("cuda:tf32=off", True), ("cuda:compile=inductor", False), ("cpu", False)]
)
def test_which_settings_share_a_gpu_in_threads(setting, shares):
    job = {"net": "prednet", "setting": setting}
    assert workers.Workers(2)._shared_setting(job) == (setting if shares else "")
    assert workers.Workers(1)._shared_setting(job) == ""


def test_threads_that_share_a_gpu_have_one_setting_at_a_time(monkeypatch):
    monkeypatch.setattr(workers.Workers, "_shared_setting", lambda _, job: job["setting"])
    seen = []

    def do(number):
        time.sleep(0.1)
        seen.append((number, torch.get_num_threads()))

    with workers.Workers(2) as engine:
        settings = ["cpu:threads=1", "cpu:threads=1", "cpu:threads=2"]
        waiting = {number: JOB | {"net": "prednet", "setting": setting} for number, setting in enumerate(settings)}
        engine.each(do, waiting)
    assert sorted(seen) == [(0, 1), (1, 1), (2, 2)]


@pytest.mark.parametrize("share", [True, False])
def test_run_that_cannot_be_begun_does_not_stop_the_next(share, monkeypatch, tmp_path):
    shares = {"cpu:threads=1"} if share else set()
    monkeypatch.setattr(workers.Workers, "_shared_setting", lambda _, job: job["setting"] * (job["setting"] in shares))
    (good, *_), (bad, *_) = jobs(tmp_path), jobs(tmp_path, "cuda:77")
    one, two, three = do_each([bad, bad, good], 2)
    assert "cuda:77' cannot run here" in one
    assert one == two
    assert three.startswith("prednet-smoke-cpu")


def goes_on(seed, begun=""):
    """Does not hear that it should end."""
    Path(begun).write_text(str(os.getpid()))
    while True:
        with contextlib.suppress(KeyboardInterrupt):
            time.sleep(600)


def test_interruption_waits_for_no_run_that_has_not_begun(monkeypatch, tmp_path):
    waited_for, usual = [], workers.Workers.stop
    monkeypatch.setattr(workers.Workers, "stop", lambda self, tasks: waited_for.extend(tasks) or usual(self, tasks))
    begun = tmp_path / "begun"
    job = {"net": lambda seed: begun.touch() or time.sleep(600), "setting": "cpu:threads=1", "seed": 0}
    with ctrl_c(begun.exists), workers.Workers(1) as engine:
        engine.each(lambda _: engine.do(job), {0: job, 1: job})
    assert [task.cancelled() for task in waited_for] == [False]


def test_process_that_does_not_hear_is_killed(monkeypatch, tmp_path):
    monkeypatch.setattr(workers, "DEAF", 1.0)
    begun = tmp_path / "begun"
    job = {"net": goes_on, "setting": "cpu:threads=1", "seed": 0, "begun": str(begun)}
    with ctrl_c(lambda: begun.exists() and begun.read_text()), workers.Workers(1) as engine:
        engine.each(lambda _: engine.do(job), {0: job})
    assert not psutil.pid_exists(int(begun.read_text()))


def test_processes_of_one_setting_are_used_again(tmp_path):
    settings = ["cpu:threads=1", "cpu:threads=1", "cpu:threads=2"]
    job = {"net": lambda seed: {"process": os.getpid()}, "store": str(tmp_path)}
    do_each([job | {"setting": setting, "seed": number} for number, setting in enumerate(settings)], 1)
    first, second, third = gl.runs(tmp_path).sort_values("seed").process
    assert first == second != third
