"""The programs of notebook 11: each is wrong with shared memory, right with its own, and under the guard."""

import itertools
import warnings

import numpy as np
import pytest
import torch

import companion
import gpulab as gl
from companion.cartpole import _returns

WAYS = {make.__name__: make for make in (torch.as_tensor, torch.tensor)}
SOURCES = {"microphone": companion.microphone, "inbox": companion.inbox, "pendulum": companion.pendulum}


def kept(source):
    return {name: [make(part) for part in source()] for name, make in WAYS.items()}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_a_source_hands_over_one_array_and_other_numbers_each_time(source):
    shared, own = kept(source).values()
    assert len({tensor.data_ptr() for tensor in shared}) == 1
    assert all(torch.equal(tensor, own[-1]) for tensor in shared)
    assert all(not torch.equal(one, other) for one, other in itertools.pairwise(own))


@pytest.mark.parametrize(("keep", "cause"), [("as_tensor", "together"), ("tensor", "")])
@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_the_guard_tells_of_what_shares(source, keep, cause):
    with warnings.catch_warnings(action="ignore"), gl.guard(on="warn", reads="any") as report:
        torch.stack([WAYS[keep](part) for part in source()])
    assert {finding.cause for finding in report.findings} == ({cause} if cause else set())


def test_the_tone_rises_by_700_hz_for_a_half_second_and_has_one_pitch_where_memory_is_shared():
    picture = companion.spectrograms(kept(companion.microphone))
    assert "1 with shared memory and 31 with own memory" in picture.alt
    pitches = torch.fft.rfft(torch.stack(kept(companion.microphone)["tensor"])).abs().argmax(1) * 8000 / 512
    assert pitches.diff().mean() == pytest.approx(1400 * 512 / 8000, abs=8)


def test_each_user_is_asked_for_themselves_with_own_memory_alone():
    table = companion.delivered(kept(companion.inbox))
    assert table["own memory"].tolist() == table.asked.tolist()
    assert set(table["shared memory"]) == {table.asked.iloc[-1]}


def test_images_are_known_and_motion_is_foreseen_with_own_memory():
    epochs = {name: [(make(x), y) for x, y in companion.image_loader()] for name, make in WAYS.items()}
    known = companion.accuracies(epochs)
    assert known["own memory"] > 0.9
    assert known["shared memory"] < 0.5
    errors = companion.foreseen(kept(companion.pendulum))
    assert errors.loc["shared memory", "error on what was kept"] == 0
    on_the_true = errors["error on the true motion"]
    assert on_the_true["own memory"] < on_the_true["shared memory"]


def test_a_return_ends_where_the_pole_falls():
    returns = _returns(np.array([[False], [True], [False]]))
    raw = np.array([1 + 0.99, 1, 1])
    np.testing.assert_allclose(returns[:, 0], (raw - raw.mean()) / raw.std(), rtol=1e-5)


def test_a_pole_stays_up_longer_where_observations_are_copied():
    own, shared = (companion.learn_cartpole(seed=7, keep=keep)["steps_up"] for keep in ("tensor", "as_tensor"))
    assert own > 3 * shared
    recorded = companion.cartpole_runs()
    assert set(recorded.memory) == {"own memory", "shared memory"}
    assert recorded.groupby("memory").seed.nunique().tolist() == [32, 32]


def test_copies_under_way_and_public_questions_are_tables_with_words():
    copies = companion.copies_under_way()
    assert {"overwritten too early", "read too early", "nothing"} == set(copies.said)
    questions = companion.public_questions(["times one", "one buffer for every frame"])
    assert questions.said.tolist() == ["reduced precision", "overwritten"]
