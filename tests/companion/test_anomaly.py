"""What one reused buffer does: the first window, and the verdicts on what is learned."""

import math

import pandas as pd
import pytest
import torch

import gpulab as gl
from gpulab.companion import anomaly


def test_the_forward_losses_agree_and_the_gradient_does_not():
    (prednet,) = gl.first_window(["cpu"], "prednet", profile="smoke").to_dict("records")
    assert prednet["same_losses"] == prednet["losses"] == 19
    assert prednet["gradient_difference"] > 1000 * prednet["rounding"] > 0
    (control,) = gl.first_window(["cpu"], "autoencoder", profile="smoke").to_dict("records")
    assert (control["same_losses"], control["gradient_difference"]) == (20, 0)


def test_the_gradient_is_that_of_training():
    step = gl.FirstWindow("prednet", "copied", seed=3, profile="smoke")
    computed = step.gradient("cpu")
    model, data = gl.PredNet(channels=(3, 8, 16), size=(24, 32)), gl.load("walk", frames=200, size=(24, 32))
    model.draw_weights(torch.Generator().manual_seed(3))
    frames = torch.from_numpy(next(data.windows(20)).frames).float().div(255)[:, None]
    objective, per_frame, _ = model.training_loss(frames, None)
    objective.backward()
    assert torch.allclose(computed.losses, per_frame.double(), rtol=1e-6)
    for name, parameter in model.named_parameters():
        assert torch.allclose(computed.gradient[name], parameter.grad.double(), rtol=1e-4, atol=1e-9), name


def test_the_audit_names_the_overwritten_frame():
    traces = [
        gl.record(gl.FirstWindow("prednet", loader, profile="smoke", frames=4), label=loader, progress=False)
        for loader in ("copied", "reused")
    ]
    report = gl.audit(*traces)
    assert report.kind == "overwritten"
    (found,) = [finding for finding in report.findings if finding.kind == "overwritten"]
    assert (found.operation, found.setting) == ("MseLossBackward0", "reused")
    assert "NumPy" in found.detail


def runs(loader, losses, **columns):
    common = {"experiment": "prednet", "profile": "smoke", "setting": "cpu", "data": "walk", "speed": 1.0}
    common |= {"frames": 200, "protocol": "p", "rerun": 0, "status": "finished", "machine": "m", "recorded": False}
    rows = [{"loader": loader, "seed": n, "final_loss": x, "weights": f"{loader}{n}"} for n, x in enumerate(losses)]
    return pd.DataFrame(rows).assign(**{**common, **columns})


COPIED = [0.010, 0.012, 0.011, 0.013, 0.009, 0.014, 0.0105, 0.15]
WORSE = [2 * loss for loss in COPIED[:-1]] + [0.15]


def test_three_questions_are_asked():
    judged = gl.anomaly_verdicts(pd.concat([runs("copied", COPIED), runs("reused", WORSE)]), plateau=0.05)
    assert list(judged) == list(anomaly.METRICS)
    assert judged[anomaly.METRICS[1]].table.difference[0] == 0
    learned = judged[anomaly.METRICS[2]]
    assert learned.table.seeds[0] == 7, "the seed on the plateau did not learn"
    assert learned.decision == "different"


def test_a_seed_that_learned_one_way_only_counts_among_those_that_did_not():
    lost = [*WORSE[:6], 0.2, 0.15]
    judged = gl.anomaly_verdicts(pd.concat([runs("copied", COPIED), runs("imitated", lost)]), plateau=0.05)
    assert judged[anomaly.METRICS[1]].table.difference[0] == pytest.approx(1 / 8)
    assert judged[anomaly.METRICS[2]].table.seeds[0] == 6


def test_a_diverged_run_did_not_learn():
    diverged = runs("reused", [math.nan, *WORSE[1:]])
    diverged.loc[0, "status"] = "diverged"
    judged = gl.anomaly_verdicts(pd.concat([runs("copied", COPIED), diverged]), plateau=0.05)
    assert judged[anomaly.METRICS[1]].table.difference[0] == pytest.approx(1 / 8)


@pytest.mark.parametrize("loaders", [("copied",), ("window", "reused"), ("copied", "reused", "imitated")])
def test_other_loaders_are_refused_by_name(loaders):
    frame = pd.concat([runs(loader, COPIED) for loader in loaders])
    with pytest.raises(gl.UsageError, match=loaders[-1]):
        gl.anomaly_verdicts(frame, plateau=0.05)


def test_the_finding_follows_from_the_tables():
    window = gl.first_window(["cpu"], "prednet", profile="smoke")
    table = gl.anomaly_table(pd.concat([runs("copied", COPIED), runs("reused", WORSE)]))
    told = gl.anomaly_finding(window, table)
    assert "19 of 19 forward losses have the same bits; the gradient is off" in told
    assert "final loss of the seeds that learned: different at speed 1 (+100%, higher in 7 of 7 pairs)" in told
    assert "computes a wrong gradient" in told
    assert "is not known" in told
    control = gl.first_window(["cpu"], "autoencoder", profile="smoke")
    same = pd.concat([runs("copied", COPIED, weights="w"), runs("reused", COPIED, weights="w")])
    told = gl.anomaly_finding(control, gl.anomaly_table(same))
    assert "agrees to the last bit" in told
    assert "the same bits in 8 of 8 pairs" in told
    assert "wrong gradient" not in told


def test_recorded_runs_answer_for_both_sizes():
    recorded = gl.recorded_runs().query("loader != 'window'")
    counts = recorded.groupby(["experiment", "profile", "device", "speed", "loader"], dropna=False).seed.nunique()
    assert counts.min() == 32
    assert {1.0, 2.0, 4.0} == set(recorded[recorded.experiment == "prednet"].speed)
    for _, pair in recorded.groupby(["experiment", "profile", "device", "speed"], dropna=False):
        assert pair.loader.nunique() == 2
        assert set(pair[pair.loader == "copied"].seed) == set(pair[pair.loader != "copied"].seed)
    on_gpu = recorded.query("device == 'cuda' and profile == 'quick'").pivot_table(
        index=["experiment", "speed", "seed"], columns="loader", values="weights", aggfunc="first", dropna=False
    )
    assert (on_gpu["copied"] == on_gpu["reused"]).sum() == len(on_gpu.dropna()), "a GPU copies"
