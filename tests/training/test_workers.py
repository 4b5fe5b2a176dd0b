"""Several networks in threads that share a device, and processes."""

import contextlib
import json
import os
import signal
import threading
import time

import psutil
import pytest
import torch

import gpulab as gl
from gpulab.training import workers

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


@pytest.fixture
def trained_together(monkeypatch):
    """What threads that share a device give; a CPU stands in for it where there is none."""
    monkeypatch.setattr(workers, "may_share", lambda _: True)

    def trained(store, setting="cpu:threads=1"):
        news = []
        with workers.Workers(len(NETS)) as engine:
            assert all(engine.start(number, job) for number, job in enumerate(jobs(store, setting)))
            while len(news) < len(NETS):
                news += engine.news(1.0)
        assert all(run_id and not why for _, run_id, why in news), news
        return gl.runs(store).set_index(["experiment", "seed"]).weights

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
    with contextlib.suppress(KeyboardInterrupt), workers.Workers(len(NETS)) as engine:
        for number, job in enumerate(jobs(tmp_path)):
            engine.start(number, job)
        raise KeyboardInterrupt
    assert len(gl.runs(tmp_path)) < len(NETS)
    together = trained_together(tmp_path)
    assert {key: together[key] for key in NETS} == {key: weights(*key) for key in NETS}


def test_threads_wait_for_those_of_another_setting(monkeypatch, tmp_path):
    monkeypatch.setattr(workers, "may_share", lambda _: True)
    going_on = threading.Event()
    monkeypatch.setattr(workers, "do_run", lambda *_: going_on.wait() and "an id")
    (first, *_), (other, *_) = jobs(tmp_path), jobs(tmp_path, "cpu:threads=2")
    with workers.Workers(2) as engine:
        assert engine.start(0, first)
        assert not engine.start(1, other), "the flags of a setting hold for all threads"
        going_on.set()
        assert [*engine.news(5.0)] == [(0, "an id", "")]
        assert engine.start(1, other)


def ended(engine):
    """What the next run that ends says."""
    news = []
    while not news:
        news = [*engine.news(1.0)]
    return news[0]


@pytest.mark.parametrize("share", [True, False])
def test_run_that_cannot_be_begun_does_not_stop_the_next(share, monkeypatch, tmp_path):
    monkeypatch.setattr(workers, "may_share", lambda _: share)
    (good, *_), (bad, *_) = jobs(tmp_path), jobs(tmp_path, "cuda:77")
    with workers.Workers(2) as engine:
        for number, job in enumerate([bad, bad, good]):
            assert engine.start(number, job)
            _, run_id, why = ended(engine)
            assert ("cuda:77' cannot run here" in why, bool(run_id)) == ((job is bad), (job is good))


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this operating system has no SIGKILL")
def test_process_that_is_killed_while_idle_is_replaced():
    job = {"net": lambda seed: seed, "setting": "cpu:threads=1", "seed": 0}
    with workers.Workers(1) as engine:
        engine.start(0, job)
        assert ended(engine)[1]
        os.kill(engine.idle[0].number, signal.SIGKILL)
        engine.start(1, job)
        assert ended(engine)[1]


def goes_on(seed):
    """Does not hear that it should end."""
    while True:
        with contextlib.suppress(KeyboardInterrupt):
            time.sleep(600)


def test_process_that_does_not_hear_is_killed(monkeypatch):
    monkeypatch.setattr(workers, "DEAF", 1.0)
    with contextlib.suppress(KeyboardInterrupt), workers.Workers(1) as engine:
        engine.start(0, {"net": goes_on, "setting": "cpu:threads=1", "seed": 0})
        (_, process), *_ = engine.tasks.values()
        raise KeyboardInterrupt
    assert not psutil.pid_exists(process.number)


def test_processes_of_one_setting_are_used_again():
    with workers.Workers(1) as engine:
        seen = []
        for number, setting in enumerate(["cpu:threads=1", "cpu:threads=1", "cpu:threads=2"]):
            engine.start(number, {"net": lambda seed: os.getpid(), "setting": setting, "seed": 0})
            assert ended(engine)[1]
            seen.append(engine.idle[0].number)
    assert seen[0] == seen[1] != seen[2]
