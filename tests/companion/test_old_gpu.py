"""Notebook 09: an H200 behaves as its emulation does."""

import math
import re

import numpy as np
import pandas as pd
import pytest
import torch
from torch.nn.functional import mse_loss

import gpulab as gl
from companion import old_gpu
from gpulab.store.recorded import recorded_folder, recorded_table


def test_audit_of_an_h200_and_of_its_emulation_blame_the_same_line():
    traces = recorded_folder("traces")
    report = gl.audit(
        traces / "whitener-cuda-tf32-off.trace", traces / "whitener-cuda-tf32-on.trace"
    )
    net = gl.models.Whitener()
    net.draw_weights(torch.Generator().manual_seed(7))
    images = torch.from_numpy(next(gl.load("digits").windows(200, 7)).frames[:50]).float() / 255
    settings = "cpu:threads=1", "cpu:threads=1,tf32=on,emulate=ampere"
    emulated = gl.audit(gl.Step(net, (images, images), mse_loss), *settings, progress=False)
    for found in (report.findings[0], emulated.findings[0]):
        assert (found.kind, found.operation) == ("reduced precision", "mm")
        assert "codes.T @ codes" in found.line
    assert report.findings[0].op.error == pytest.approx(emulated.findings[0].op.error, rel=1e-3)


@pytest.mark.parametrize(
    ("shift", "lost", "counts"),
    [
        (0.0, 0, [1, 1, 0, 0, 10]),
        (9.0, 0, [0, 1, 0, 0, 10]),
        (0.0, 10, [0, 1, 0, 10, 10]),
    ],
)
def test_describe_kernels_counts_outcomes_and_runs_that_became_nan(shift, lost, counts):
    """The numbers of the sentence: kernels that restored the old losses, all kernels, runs that
    became NaN, all runs.
    """
    losses = [1.0 + 0.1 * seed for seed in range(10)]
    tried = [math.nan if seed < lost else loss + shift for seed, loss in enumerate(losses)]
    rows = [("old card", seed, loss, "finished") for seed, loss in enumerate(losses)]
    for seed, loss in enumerate(tried):
        rows.append(("kernel 3", seed, loss, "diverged" if math.isnan(loss) else "finished"))
    frame = pd.DataFrame(rows, columns=["retuning", "seed", "final_loss", "status"])
    kernels = gl.verdict(frame, factor="retuning", reference="old card", margin="1sd")
    (sentence,) = old_gpu._describe_kernels(kernels)
    assert [int(number) for number in re.findall(r"\d+", sentence)] == counts


def recorded_cures(shifts, seeds=16):
    """Make recorded runs of both cures whose losses differ from the old ones by a shift."""
    rng = np.random.default_rng(0)
    rows = []
    for seed in range(seeds):
        old = 1.0 + 0.1 * rng.standard_normal()
        rows.append((old_gpu.OLD, "one-pass", seed, old))
        for cure, shift in shifts.items():
            rows.append((old_gpu.NEW, cure, seed, old + shift + 0.001 * rng.standard_normal()))
    frame = pd.DataFrame(rows, columns=["setting", "covariance", "seed", "final_loss"])
    return frame.assign(status="finished", recorded=True)


def test_repeat_cures_counts_outcomes_and_the_spread_of_groups():
    """One cure restores the old losses in every group, and the other in none."""
    runs = recorded_cures({"centred": 0.0, "float32": 0.5})
    table = old_gpu.repeat_cures(runs, [8, 16])
    outcomes = table[["verdicts", "restored", "different", "undecided"]]
    assert outcomes.loc["centred"].to_numpy().tolist() == [[2, 2, 0, 0], [1, 1, 0, 0]]
    assert outcomes.loc["product in float32"].to_numpy().tolist() == [[2, 0, 2, 0], [1, 0, 1, 0]]
    assert (table.lowest <= table.highest).all()
    shifted = table.loc["product in float32", ["lowest", "highest"]]
    assert ((shifted > 40) & (shifted < 60)).all(axis=None), "0.5 is about 50 % of the old losses"
    whole = table.xs(16, level="seeds")
    assert whole.lowest.tolist() == whole.highest.tolist()


def test_repeat_cures_leaves_out_an_incomplete_group_and_refuses_too_large_ones():
    runs = recorded_cures({"centred": 0.0, "float32": 0.0}, seeds=10)
    assert old_gpu.repeat_cures(runs, [8]).verdicts.tolist() == [1, 1]
    with pytest.raises(gl.UsageError, match="expected 2 to 10"):
        old_gpu.repeat_cures(runs, [11])


def test_describe_repetitions_counts_both_cures():
    runs = recorded_cures({"centred": 0.0, "float32": 0.5})
    (sentence,) = old_gpu._describe_repetitions(runs)
    few = old_gpu.FEW
    assert [int(number) for number in re.findall(r"\d+", sentence.replace("float32", ""))] == [
        *(2, 4, few),
        *(1, 2, 16),
    ]


def test_finding_counts_repeated_verdicts_in_at_most_120_words():
    recorded = gl.recorded_runs().query("experiment == 'whitener'")
    few = recorded[recorded.seed < old_gpu.FEW]
    here = few[few.covariance == "one-pass"].assign(recorded=False)
    emulated = "cpu:threads=1,tf32=on,emulate=ampere"
    here["setting"] = here.setting.map({old_gpu.OLD: "cpu:threads=1", old_gpu.NEW: emulated})
    traces = recorded_folder("traces")
    names = ("whitener-cuda-tf32-off.trace", "whitener-cuda-tf32-on.trace")
    report = gl.audit(*(traces / name for name in names))
    cured = old_gpu._verdict_on_cures(few, "1sd")
    conversions = recorded_table("factors", "conversions")
    runs = pd.concat([here, recorded])
    found = old_gpu.cards_finding(runs, report, cured, cured, conversions, cured)
    lines = dict(found.sentences())["In short"]
    assert sum(len(line.split()) for line in lines) <= 120
    assert old_gpu._describe_repetitions(recorded)[0] in lines
