"""Checks of the exercises in `09_old_gpu_new_gpu.ipynb`."""

from __future__ import annotations

import torch

from companion.exercises.answers import Answer, exercise, near, need, recorded, shown, table


@exercise("09-1", "a number of updates")
def _updates_to_nan(answer: Answer) -> str:
    runs = recorded("whitener", "quick", covariance="one-pass", setting="cuda:tf32=on")
    updates = runs.diverged_at[runs.status == "diverged"].astype(float)
    mistakes = {updates.mean(): "this is the mean, which a few late runs raise: take the median"}
    near(answer, updates.median(), mistakes, rel=1e-6)
    return (
        f"half of {len(updates)} runs are NaN after {updates.median():g} updates, the last one"
        f" after {updates.max():g}."
    )


@exercise(
    "09-2", "a table of runs, one-pass and centred, in two number formats, from at least six seeds"
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
        "expected runs in two formats: use cpu:tf32=on,emulate=ampere and cpu:emulate=bfloat16",
    )
    need(
        seeds.shape[1] == 2,
        "expected runs with both 'one-pass' and 'centred': without 'one-pass' there is no control",
    )
    need(
        (seeds >= 6).all(axis=None),
        f"one combination has only {seeds.min(axis=None):g} seeds: use at least six",
    )
    lost = (runs.status == "diverged").groupby(runs.covariance).sum()
    need(
        lost["one-pass"], "no one-pass run became NaN: train longer, because the control must fail"
    )
    return (
        f"NaN in {lost['one-pass']} one-pass runs and in {lost['centred']} centred runs. Why the"
        " centred form cannot fail needs a proof."
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
        f"{shown(answer)} is not a tensor of shape (24, 24)",
    )
    error = float((answer.detach().cpu().double() - exact).norm() / exact.norm())
    need(abs(error - 1 / 49) > 1e-3, "this is divided by 49: divide by 50, as in the notebook")
    need(
        error < 0.5,
        f"off by {error:.2g} times its size, as in the one-pass form: subtract a number near the"
        " mean first",
    )
    need(
        error < 0.005,
        f"off by {error:.1%}: the number that you subtracted is not quite the mean. Also subtract"
        " the product of the remaining means",
    )
    need(
        error > 1e-5,
        f"off by {error:.0e}: no product was in TF32. Compute it under gl.emulate('tf32')",
    )
    return (
        f"off by only {error:.1e}. A matrix does not show that the product is harmless: an audit of"
        " the step does."
    )
