"""What notebook 08 says about its programs, for made-up numbers."""

import pandas as pd
import pytest

import companion
import gpulab as gl
from companion.scale_out import describe_lock_free


def descents(lost, speed, shift=0.0):
    """Lock-free and synchronous runs from eight seeds, for each repetition."""
    rows = []
    for repetition, (share, updates) in enumerate(zip(lost, speed, strict=True)):
        for seed in range(8):
            loss = 1.0 + 0.1 * seed
            rows += [
                (repetition, "synchronous", seed, loss, 100.0, 1.0, 1e-8),
                (repetition, "lock-free", seed, loss + shift, updates, 2.0, share),
            ]
    names = ["repetition", "way", "seed", "heldout_loss", "updates_per_second", "age", "lost_share"]
    return pd.DataFrame(rows, columns=names)


def verdicts_of(frame):
    """The verdict on the loss of each repetition."""
    return [
        gl.verdict(
            rows[["way", "seed", "heldout_loss"]],
            "heldout_loss",
            "way",
            block="seed",
            reference="synchronous",
        )
        for _, rows in frame.groupby("repetition")
    ]


def test_describe_lock_free_states_the_spread_over_repetitions():
    frame = descents(lost=[1e-6, 0.27, 0.006], speed=[110.0, 200.0, 150.0])
    (words,) = describe_lock_free(frame, verdicts_of(frame))
    assert "in 3 repetitions" in words
    assert "1.0e-06 to 2.7e-01" in words
    assert "1.10 to 2.00 times" in words


@pytest.mark.parametrize(("shift", "decision"), [(0.0, "equivalent"), (9.0, "different")])
def test_describe_lock_free_counts_the_decisions(shift, decision):
    frame = descents(lost=[0.1, 0.2], speed=[100.0, 100.0], shift=shift)
    (words,) = describe_lock_free(frame, verdicts_of(frame))
    assert f"{decision} in 2 of 2 repetitions" in words


@pytest.mark.parametrize(
    "name", ["draw_data_parallel", "draw_lock_free", "draw_model_parallel", "draw_serving"]
)
def test_drawings_of_shared_work_have_their_words(name):
    picture = getattr(companion, name)()
    texts = " ".join(text.get_text() for text in picture.figure.axes[0].texts)
    assert texts
    assert picture.alt.endswith(".")
