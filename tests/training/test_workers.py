"""Several networks in threads of one worker process."""

import json

import pytest
import torch

import gpulab as gl
from gpulab.training.worker import train_together

JOB = {"profile": "smoke", "setting": "cpu:threads=1", "frames": 100, "keep_weights": True}
NETS = [("prednet", 0), ("autoencoder", 0), ("prednet", 1), ("whitener", 1)]


def lines(store, setting="cpu:threads=1"):
    for number, (net, seed) in enumerate(NETS):
        frames = 400 if net == "whitener" else 100
        job = {**JOB, "net": net, "seed": seed, "setting": setting, "frames": frames, "store": str(store)}
        yield json.dumps({"number": number, **job})


def weights(net, seed, setting="cpu:threads=1"):
    frames = 400 if net == "whitener" else 100
    run = gl.train(net, None, setting, seed, "smoke", frames=frames, progress=False)
    return run.record["summary"]["weights"]


def trained_together(store, setting="cpu:threads=1"):
    answers = {}
    train_together(lines(store, setting), lambda number, **said: answers.update({number: said}), setting, len(NETS))
    assert all("id" in answers[number] for number in range(len(NETS))), answers
    return gl.runs(store).set_index(["experiment", "seed"]).weights


def test_networks_in_threads_have_the_bits_that_they_have_alone(tmp_path):
    threads = torch.get_num_threads()
    together = trained_together(tmp_path)
    assert {key: together[key] for key in NETS} == {key: weights(*key) for key in NETS}
    assert torch.get_num_threads() == threads


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("setting", ["cuda:tf32=off,deterministic=on", "cuda:tf32=on,deterministic=on"])
def test_networks_on_streams_of_one_gpu_have_the_bits_that_they_have_alone(tmp_path, setting):
    together = trained_together(tmp_path, setting)
    assert {key: together[key] for key in NETS} == {key: weights(*key, setting) for key in NETS}
    records = [json.loads(file.read_text()) for file in tmp_path.glob("*/run.json")]
    assert all(record["shared"] and record["summary"]["frames_per_second"] is None for record in records)


def test_interrupted_threads_save_checkpoints_and_resume_to_the_same_bits(tmp_path):
    def jobs_then_interrupt():
        yield from lines(tmp_path)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_together(jobs_then_interrupt(), lambda *_, **__: None, "cpu:threads=1", len(NETS))
    assert len(gl.runs(tmp_path)) < len(NETS)
    together = trained_together(tmp_path)
    assert {key: together[key] for key in NETS} == {key: weights(*key) for key in NETS}
