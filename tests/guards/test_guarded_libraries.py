"""Other libraries under `gl.guard(reads="any")`: their correct code gives no findings.

Libraries that are not installed are skipped.
"""

import tempfile

import numpy as np
import pytest
import torch
from torch import nn

import gpulab as gl


@pytest.mark.parametrize(("copy", "found"), [(True, []), (False, ["together"])])
def test_guard_of_gymnasium_vector_environment(copy, found):
    gymnasium = pytest.importorskip("gymnasium")
    worlds = gymnasium.make_vec(
        "CartPole-v1", 4, vectorization_mode="sync", vector_kwargs={"copy": copy}
    )
    net, kept = nn.Linear(4, 2), []
    observed, _ = worlds.reset(seed=0)
    report = gl.guard(reads="any")
    try:
        with report:
            for _ in range(20):
                kept.append(torch.as_tensor(observed))
                observed, *_ = worlds.step(net(kept[-1]).argmax(1).numpy())
            net(torch.stack(kept)).sum().backward()
    except gl.OverwrittenError:
        assert found
    assert [finding.cause for finding in report.findings] == found


@pytest.mark.parametrize("name", ["PPO", "A2C", "DQN"])
def test_guard_of_stable_baselines3(name):
    baselines = pytest.importorskip("stable_baselines3")
    options = {
        "PPO": {"n_steps": 64, "batch_size": 32},
        "A2C": {},
        "DQN": {"learning_starts": 50, "train_freq": 4},
    }
    with gl.guard(reads="any") as report:
        getattr(baselines, name)("MlpPolicy", "CartPole-v1", device="cpu", **options[name]).learn(
            200
        )
    assert report.checked > 100


def test_guard_of_transformers_trainer():
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    shape = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 50, "n_positions": 32}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape))
    rows = np.random.default_rng(0).integers(0, 50, (16, 16))
    data = [{"input_ids": torch.from_numpy(row), "labels": torch.from_numpy(row)} for row in rows]
    options = {
        "max_steps": 3,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
    }
    arguments = transformers.TrainingArguments(tempfile.mkdtemp(), **options)
    with gl.guard(reads="any") as report:
        transformers.Trainer(model, arguments, train_dataset=data).train()
    assert (report.checked > 0, len(report)) == (True, 0)
