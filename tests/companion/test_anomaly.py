"""What overwritten frames do: the first window, and the verdicts on what is learned."""

import pandas as pd
import pytest
import torch

import companion
import gpulab as gl
from companion import learning


@pytest.mark.parametrize(("net", "losses"), [("prednet", 19), ("autoencoder", 20)])
def test_overwritten_frames_change_no_loss_and_prednet_s_gradient_alone(net, losses):
    copied, overwritten = (companion.FirstWindow(net, loader, profile="smoke") for loader in ("copied", "reused"))
    difference = overwritten.gradient("cpu").against(copied.gradient("cpu"))
    assert difference["same_losses"] == difference["losses"] == losses
    assert (difference["gradient_difference"] > 0.001) == (net == "prednet")
    assert difference["gradient_difference"] == 0 or net == "prednet"


def test_the_gradient_is_that_of_training():
    step = companion.FirstWindow("prednet", "copied", seed=3, profile="smoke", frames=5)
    computed = step.gradient("cpu")
    model, data = gl.models.PredNet(channels=(3, 8, 16), size=(24, 32)), gl.load("walk", frames=200, size=(24, 32))
    model.draw_weights(torch.Generator().manual_seed(3))
    frames = torch.from_numpy(next(data.windows(20)).frames[:5]).float().div(255)[:, None]
    objective, per_frame, _ = model.training_loss(frames, None)
    objective.backward()
    assert torch.allclose(computed.losses, per_frame.double(), rtol=1e-6)
    for name, parameter in model.named_parameters():
        assert torch.allclose(computed.gradient[name], parameter.grad.double(), rtol=1e-4, atol=1e-9), name


def runs(loader, losses, **columns):
    common = {"experiment": "prednet", "profile": "smoke", "setting": "cpu", "data": "walk", "speed": 1.0}
    common |= {"scene_seed": 0, "frame_size": "24x32", "machine": "m", "recorded": False}
    common |= {"frames": 200, "protocol": "p", "rerun": 0, "status": "finished"}
    rows = [{"loader": loader, "seed": n, "final_loss": x, "weights": f"{loader}{n}"} for n, x in enumerate(losses)]
    return pd.DataFrame(rows).assign(**{**common, **columns})


COPIED = [0.010, 0.012, 0.011, 0.013, 0.009, 0.014, 0.0105, 0.15]
WORSE = [2 * loss for loss in COPIED[:-1]] + [0.15]


def test_four_questions_are_asked():
    both = pd.concat([runs("copied", COPIED), runs("reused", WORSE)])
    verdicts = learning.learning_verdicts(both, "loader", "copied", plateau=0.05, repeat=0.0125)
    assert list(verdicts) == list(learning.METRICS)
    assert verdicts[learning.BEAT].table.difference[0] == pytest.approx(-5 / 8), "none with overwritten frames"
    assert verdicts[learning.STUCK].table.difference[0] == 0
    assert verdicts[learning.BEAT].margin == verdicts[learning.STUCK].margin == 0.1
    assert verdicts[learning.LEARNED].decision == "different"
    assert verdicts[learning.LEARNED].table.seeds[0] == 7, "the seed on the plateau did not learn"


def test_the_table_has_every_decision_with_and_without_correction_and_against_the_registered_margin():
    frame = pd.concat([runs("copied", COPIED), runs("reused", WORSE)])
    slow, fast = frame, frame.assign(speed=2.0)
    table = companion.learning_table(pd.concat([slow, fast]), "loader", "copied")
    assert set(table.condition) == {"overwritten frames"}
    assert table.metric.tolist() == [*learning.METRICS] * 2
    (alone,) = table.query("metric == @learning.LEARNED and speed == 1").to_dict("records")
    assert (alone["p"], alone["p_holm"]) == (2 / 2**7, 8 * 2 / 2**7), "two speeds, four metrics"
    assert (alone["uncorrected"], alone["registered"], alone["decision"]) == ("different", "different", "inconclusive")
    spread = pd.Series(COPIED[:-1]).std()
    assert alone["registered_margin"] == pytest.approx(0.25 * spread)
    assert alone["margin"] < alone["registered_margin"]
    better = frame.final_loss < companion.repeat_losses(frame)
    assert (alone["beat"], alone["beat_reference"]) == (better.sum(), better[frame.loader == "copied"].sum()) == (2, 2)
