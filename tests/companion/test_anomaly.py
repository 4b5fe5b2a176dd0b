"""The effect of overwritten frames: the first window, and the verdicts on what is learned."""

import pandas as pd
import pytest

import companion
from companion import learning, metrics


@pytest.mark.parametrize(("net", "losses"), [("prednet", 19), ("autoencoder", 20)])
def test_first_window_overwritten_frames_change_no_loss_and_only_the_gradient_of_prednet(
    net, losses
):
    copied, overwritten = (
        companion.FirstWindow(net, loader, profile="smoke") for loader in ("copied", "reused")
    )
    difference = overwritten.gradient("cpu").against(copied.gradient("cpu"))
    assert difference["same_losses"] == difference["losses"] == losses
    assert (difference["gradient_difference"] > 0.001) == (net == "prednet")
    assert difference["gradient_difference"] == 0 or net == "prednet"


def runs(loader, losses, **columns):
    common = {
        "experiment": "prednet",
        "profile": "smoke",
        "setting": "cpu",
        "data": "walk",
        "speed": 1.0,
    }
    common |= {"scene_seed": 0, "frame_size": "24x32", "machine": "m", "recorded": False}
    common |= {"frames": 200, "protocol": "p", "rerun": 0, "status": "finished"}
    rows = [
        {"loader": loader, "seed": n, "final_loss": x, "weights": f"{loader}{n}"}
        for n, x in enumerate(losses)
    ]
    return pd.DataFrame(rows).assign(**{**common, **columns})


COPIED = [0.010, 0.012, 0.011, 0.013, 0.009, 0.014, 0.0105, 0.15]
WORSE = [2 * loss for loss in COPIED[:-1]] + [0.15]


def test_learning_verdicts_answer_four_questions():
    both = pd.concat([runs("copied", COPIED), runs("reused", WORSE)])
    verdicts = learning.learning_verdicts(both, "loader", "copied", plateau=0.05, repeat=0.0125)
    assert list(verdicts) == list(metrics.METRICS)
    assert verdicts[metrics.BEAT].table.difference[0] == pytest.approx(-5 / 8), (
        "no network with overwritten frames beats the repetition"
    )
    assert verdicts[metrics.STUCK].table.difference[0] == 0
    assert verdicts[metrics.BEAT].margin == verdicts[metrics.STUCK].margin == 0.1
    assert verdicts[metrics.LEARNED].decision == "different"
    assert verdicts[metrics.LEARNED].table.seeds[0] == 7, "one seed stays on the plateau"


def test_learning_table_has_every_decision_corrected_uncorrected_and_by_registered_margin():
    frame = pd.concat([runs("copied", COPIED), runs("reused", WORSE)])
    slow, fast = frame, frame.assign(speed=2.0)
    table = companion.learning_table(pd.concat([slow, fast]), "loader", "copied")
    assert set(table.condition) == {"overwritten frames"}
    assert table.metric.tolist() == [*metrics.METRICS] * 2
    (alone,) = table.query("metric == @metrics.LEARNED and speed == 1").to_dict("records")
    assert (alone["p"], alone["p_holm"]) == (2 / 2**7, 8 * 2 / 2**7), "two speeds, four metrics"
    assert (alone["uncorrected"], alone["registered"], alone["decision"]) == (
        "different",
        "different",
        "inconclusive",
    )
    spread = pd.Series(COPIED[:-1]).std()
    assert alone["registered_margin"] == pytest.approx(0.25 * spread)
    assert alone["margin"] < alone["registered_margin"]
    better = frame.final_loss < companion.repeat_losses(frame)
    assert (
        (alone["beat"], alone["beat_reference"])
        == (better.sum(), better[frame.loader == "copied"].sum())
        == (2, 2)
    )


@pytest.mark.parametrize(
    ("overwritten", "panels", "words"),
    [
        ([2.0, 2.0, 2.0, 2.0], [], "in 4 of 4 pairs of runs"),
        ([0.5, 0.5, 1.0, 2.0], [], "in 1 of 4 pairs of runs"),
        ([2.0, 2.0, 2.0, float("nan")], [], "in 3 of 3 pairs of runs"),
        ([2.0, 2.0, 2.0, 2.0], ["speed"], "in 2 of 2 pairs of runs in each panel"),
        ([0.5, 0.5, 1.0, 2.0], ["speed"], "in 0 to 1 of 2 pairs of runs in each panel"),
    ],
)
def test_overwriting_title_counts_pairs_with_a_higher_loss(overwritten, panels, words):
    pairs = pd.DataFrame({"copied": 1.0, "overwritten": overwritten, "speed": [1, 1, 2, 2]})
    assert companion.overwriting_title(pairs, panels).endswith(f"the loss is higher {words}")
