"""Notebook 11: CartPole with overwritten and with copied frames, and questions asked in public."""

import pytest
import torch

import companion
import gpulab as gl


def test_learn_cartpole_balances_longer_with_copied_observations():
    copied, overwritten = (
        companion.learn_cartpole(seed=7, keep=keep)["steps_up"] for keep in ("tensor", "as_tensor")
    )
    assert copied > 3 * overwritten
    assert gl.recorded_runs("cartpole").groupby("keep").seed.nunique().tolist() == [32, 32]


def test_public_questions_are_a_table_with_words():
    questions = companion.public_questions(["times one", "one buffer for every frame"])
    assert questions.said.tolist() == ["reduced precision", "overwritten"]


@pytest.mark.parametrize(("chunks", "heard"), [([0, 1, 2, 3], 4), ([3, 3, 3, 3], 1)])
def test_pitches_title_counts_different_pitches(chunks, heard):
    title = companion.pitches_title({"copied frames": torch.eye(4)[chunks]})
    assert title == f"Pitches heard: {heard} with copied frames"
