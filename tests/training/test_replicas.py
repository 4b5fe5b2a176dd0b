"""Trainings that take turns: each has the result that it has alone, whatever happens to the others."""

import concurrent.futures
import itertools
import json
import sys
import threading

import pytest
import torch

import gpulab as gl
from gpulab.data.scenes import Walk
from gpulab.errors import GpulabError
from gpulab.training import replicas, run, workers
from gpulab.training.workers import Workers, may_share

SMOKE = {"profile": "smoke", "frames": 200}


def together(jobs, most=16, answers=None):
    """What is answered to jobs that come at once, by number."""
    answers = {} if answers is None else answers

    def answer(number, **message):
        answers.setdefault(number, []).append(message)

    lines = [json.dumps({"number": number, **job}) for number, job in enumerate(jobs)]
    coming = replicas.Coming(iter(lines))
    for number, job in coming:
        replicas.train_together(number, job, coming, answer, most)
    return answers


def jobs(tmp_path, net, seeds, setting="cpu", **more):
    return [
        {"net": net, "setting": setting, "seed": s, "store": str(tmp_path / "shared"), **SMOKE, **more} for s in seeds
    ]


def results(store):
    return gl.runs(store).set_index("seed")[["weights", "final_loss", "heldout_loss"]].sort_index()


def check_each_as_alone(tmp_path, net, seeds, setting="cpu"):
    """What was trained together, against the same trained one by one."""
    for seed in seeds:
        gl.train(net, seed=seed, setting=setting, store=tmp_path / "alone", progress=False, **SMOKE)
    assert results(tmp_path / "shared").equals(results(tmp_path / "alone"))
    assert results(tmp_path / "alone").weights.nunique() == len(seeds)


DEVICES = [
    "cpu",
    pytest.param("cuda:tf32=off", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
]


@pytest.mark.parametrize("setting", DEVICES)
@pytest.mark.parametrize("net", ["autoencoder", "whitener", "prednet"])
def test_each_has_the_bits_that_it_has_alone_and_says_that_it_shared(tmp_path, net, setting):
    here = f"{setting}:threads=1,deterministic=on" if setting == "cpu" else f"{setting},deterministic=on"
    answers = together(jobs(tmp_path, net, range(3), here), most=2)
    assert [answer[-1].keys() for answer in answers.values()] == [{"id"}] * 3
    check_each_as_alone(tmp_path, net, range(3), here)
    for store, is_shared in (("shared", True), ("alone", False)):
        records = [json.loads(file.read_text()) for file in (tmp_path / store).glob("*/run.json")]
        assert {record.get("shared", False) for record in records} == {is_shared}
        assert gl.runs(tmp_path / store).frames_per_second.isna().tolist() == [is_shared] * 3
    again = gl.train(net, setting=here, store=tmp_path / "shared", progress=False, **SMOKE)
    assert "sharing its GPU" in repr(again)


def test_random_numbers_of_one_are_not_those_of_another(tmp_path, monkeypatch):
    """A network that draws while it trains, beside another: as alone."""

    class Noisy(gl.models.Autoencoder):
        def training_loss(self, batch, state):
            return super().training_loss(batch + 0.1 * torch.rand_like(batch), state)

    monkeypatch.setitem(replicas.MODELS, "autoencoder", Noisy)
    together(jobs(tmp_path, "autoencoder", range(3)))
    check_each_as_alone(tmp_path, "autoencoder", range(3))


def test_one_that_fails_does_not_stop_the_others(tmp_path):
    bad = jobs(tmp_path, "autoencoder", [9], data="walk")
    worse = jobs(tmp_path, "autoencoder", [9], model_options={"width": 3})
    answers = together([*jobs(tmp_path, "autoencoder", [0]), *bad, *worse, *jobs(tmp_path, "autoencoder", [1])])
    assert "sequence of frames" in answers[1][-1]["error"]
    assert "width" in answers[2][-1]["error"]
    assert [*results(tmp_path / "shared").index] == [0, 1]


@pytest.mark.parametrize("room", [2, 0])
def test_one_that_does_not_fit_waits_until_another_has_ended_or_says_so(tmp_path, monkeypatch, room):
    """Stands in for a GPU's memory: at most two of the trainings' windows are under way, or none."""
    usual, going = run.carry_out, set()

    def carry_out(plan, *args, **kwargs):
        me = object()
        if len(going) == room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        going.add(me)
        try:
            return (yield from usual(plan, *args, **kwargs))
        finally:
            going.discard(me)

    monkeypatch.setattr(run, "carry_out", carry_out)
    answers = together(jobs(tmp_path, "autoencoder", range(5)))
    assert len(gl.runs(tmp_path / "shared")) == (5 if room else 0)
    for answer in answers.values():
        assert "id" in answer[-1] if room else "out of memory" in answer[-1]["error"]


def test_an_interruption_saves_a_checkpoint_of_each_and_nothing_is_lost(tmp_path, monkeypatch):
    usual, turns = replicas.Replica.turn, itertools.count()

    def turn(self):
        if next(turns) == 20:
            raise KeyboardInterrupt
        usual(self)

    monkeypatch.setattr(replicas.Replica, "turn", turn)
    with pytest.raises(KeyboardInterrupt):
        together(jobs(tmp_path, "autoencoder", range(3)))
    monkeypatch.undo()
    together(jobs(tmp_path, "autoencoder", range(3)))
    records = [json.loads(file.read_text()) for file in (tmp_path / "shared").glob("*/run.json")]
    assert min(record["resumed_at"] for record in records) >= 5
    check_each_as_alone(tmp_path, "autoencoder", range(3))


def test_jobs_that_come_later_join_in():
    """And the thread that waits for more begins only when several are done together."""
    before = threading.active_count()
    coming = replicas.Coming(iter(f'{{"number": {n}, "seed": {n}}}' for n in range(3)))
    assert next(iter(coming)) == (0, {"seed": 0})
    assert threading.active_count() == before
    assert [*coming] == [(1, {"seed": 1}), (2, {"seed": 2})]
    coming = replicas.Coming(iter(['{"number": 7}']))
    while (item := coming.now()) is None:
        pass
    assert item == (7, {})
    assert coming.now() is None
    assert [*coming] == []


def test_what_shares_a_gpu():
    job = {"net": "prednet", "setting": "cuda:tf32=off", "seed": 0}
    others = [{"setting": "cpu"}, {"net": "mine.py:train"}, {"devices": 2}, {"guard": True}]
    assert may_share(job)
    assert not any(map(may_share, [{"pickled": "", "path": []}, *(job | other for other in others)]))
    assert Workers(1, [job]).count == 16
    assert Workers(2, [job]).count == 2
    assert Workers(1, [job | {"setting": "cpu"}]).count == 1


def test_frames_that_several_want_are_rendered_once(monkeypatch):
    rendered, usual = [], Walk.render
    monkeypatch.setattr(Walk, "render", lambda self, frames: rendered.append(frames) or usual(self, frames))
    streams = [Walk(12, (24, 32)).stream(0, 500) for _ in range(4)]
    for frames in zip(*streams, strict=True):
        assert all((frame == frames[0]).all() for frame in frames)
    assert sum(map(len, rendered)) == 500


def test_one_process_answers_several_who_ask_at_once(tmp_path):
    worker = workers.Worker("cpu:threads=1", 1)
    heard = {seed: [] for seed in range(4)}

    def ask(seed):
        job = jobs(tmp_path, "autoencoder", [seed], "cpu:threads=1", data="nonsense" if seed == 2 else None)[0]
        return worker.train(job, lambda done, _: heard[seed].append(done))

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(ask, seed) for seed in heard]
    worker.close()
    assert "nonsense" in str(answers.pop(2).exception())
    assert {answer.result() for answer in answers} == {*gl.runs(tmp_path / "shared").id}
    assert [bool(done) for done in heard.values()] == [True, True, False, True]
    with pytest.raises(GpulabError, match="ended with status"):
        ask(7)


def test_jobs_for_a_gpu_that_is_not_there_say_so(tmp_path):
    answers = together(jobs(tmp_path, "autoencoder", range(3), "cuda:77"))
    assert ["cuda:77" in answer[-1]["error"] for answer in answers.values()] == [True] * 3


def test_a_process_that_talks_nonsense_is_ended(tmp_path, monkeypatch):
    talk = "import time; print('hello', flush=True); time.sleep(600)"
    monkeypatch.setattr("gpulab.training.workers.WORKER", [sys.executable, "-c", talk])
    worker = workers.Worker("cpu", 1)
    with pytest.raises(GpulabError, match="ended with status -9"):
        worker.train(jobs(tmp_path, "autoencoder", [0])[0], lambda *_: None)
