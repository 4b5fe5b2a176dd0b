"""Checks of the exercises in `09_old_gpu_new_gpu.ipynb`."""

from __future__ import annotations

import torch

from companion.exercises.answers import Answer, exercise, near, need, recorded, shown, table


@exercise("09-1", "a number of updates")
def _updates_to_nan(answer: Answer) -> str:
    runs = recorded("whitener", "quick", covariance="one-pass", setting="cuda:tf32=on")
    updates = runs.diverged_at[runs.status == "diverged"].astype(float)
    mistakes = {updates.mean(): "the mean, which a few late ones draw up: take the median"}
    near(answer, updates.median(), mistakes, rel=1e-6)
    return (
        f"half of {len(updates)} are NaN after {updates.median():g} updates, the last after"
        f" {updates.max():g}."
    )


@exercise(
    "09-2", "a table of runs, one-pass and centred, under two arithmetics, on six seeds at least"
)
def _centred(answer: Answer) -> str:
    runs = table(answer, "setting", "covariance", "status", "seed")
    runs = runs[
        runs.setting.str.contains("emulate=|tf32=on")
        & runs.covariance.isin(["one-pass", "centred"])
    ]
    seeds = runs.groupby(["setting", "covariance"]).seed.nunique().unstack()
    need(
        len(seeds) > 1,
        "two arithmetics of fewer bits: take cpu:tf32=on,emulate=ampere and cpu:emulate=bfloat16",
    )
    need(
        seeds.shape[1] == 2,
        "'one-pass' and 'centred' are compared: without the one nothing is at risk",
    )
    need(
        (seeds >= 6).all(axis=None),
        f"{seeds.min(axis=None):g} seeds in one of the cells: take six at least",
    )
    lost = (runs.status == "diverged").groupby(runs.covariance).sum()
    need(lost["one-pass"], "no run in one pass became NaN: train longer, for the control must fail")
    return (
        f"NaN: {lost['one-pass']} runs in one pass, {lost['centred']} centred. Why, the proof must"
        " say."
    )


@exercise(
    "09-3",
    "the covariance (24, 24) of the exercise's codes, from sums alone, under gl.emulate('tf32')",
)
def _shifted(answer: Answer) -> str:
    codes = torch.randn(50, 24, generator=torch.Generator().manual_seed(0)) * 0.003 + 0.5
    exact = torch.cov(codes.double().T, correction=0)
    need(
        isinstance(answer, torch.Tensor) and answer.shape == exact.shape,
        f"{shown(answer)} is no tensor (24, 24)",
    )
    error = float((answer.detach().cpu().double() - exact).norm() / exact.norm())
    need(abs(error - 1 / 49) > 1e-3, "divided by 49: here it is by 50, as in the notebook")
    need(
        error < 0.5,
        f"off by {error:.2g} times its size: that is one pass. Subtract a number near the mean"
        " before",
    )
    need(
        error < 0.005,
        f"off by {error:.1%}: what you subtracted is not quite the mean. Take its product"
        " away, too",
    )
    need(
        error > 1e-5,
        f"off by {error:.0e}: no product was in TF32. Compute it under gl.emulate('tf32')",
    )
    return (
        f"off by {error:.1e} only. That the product is innocent, a matrix does not show: an audit"
        " of the step does."
    )
