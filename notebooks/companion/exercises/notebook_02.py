"""Checks of the exercises in `02_floating_point.ipynb`."""

from __future__ import annotations

import math

import numpy as np
import torch

from companion.exercises.answers import (
    Answer,
    decisions,
    exercise,
    fields,
    judged,
    near,
    need,
    number,
)


@exercise("02-1", "a number of orders out of the thousand")
def _exact_orders(answer: Answer) -> str:
    def hits(x: np.ndarray) -> int:
        orders = np.random.default_rng(0)
        sums = [np.add.accumulate(orders.permutation(x))[-1] for _ in range(1000)]
        return sums.count(np.float32(math.fsum(x)))

    x = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    of_x, right = hits(x.numpy()), hits((x * 1e4 - 5e3).numpy())
    mistakes = {
        of_x: "this is the number for x itself, not for x * 1e4 - 5e3",
        0: "is the exact sum still in float64? Round it to float32 before you compare",
    }
    near(answer, right, mistakes, rel=1e-6)
    return (
        f"with x itself, {of_x} orders give the exact sum. Here the intermediate sums are far"
        " larger than the final one, whose last digits are lost."
    )


@exercise("02-2", "a verdict on `distance` by `change`, at the last step, from at least six seeds")
def _grown(answer: Answer) -> str:
    distances = judged(answer, "change", metric="distance")
    levels = ", ".join(map(str, [distances.reference, *distances.decisions]))
    need(
        "tf32" in levels.lower() and "bit" in levels,
        f"TF32 and one bit of one weight are not both among {levels}",
    )
    need(distances.runs.step.min() > 0, "this is the first step, before any training: use the last")
    return f"after {distances.runs.step.max()} updates, {decisions(distances)}."


@exercise("02-3", "{'start': w, 'neighbour': w, 'end': loss, 'neighbour_end': loss}, four numbers")
def _one_bit_decides(answer: Answer) -> str:
    names = ("start", "neighbour", "end", "neighbour_end")
    start, neighbour, *ends = (number(fields(answer, *names)[name]) for name in names)
    ulps = abs(int(np.float32(start).view(np.int32)) - int(np.float32(neighbour).view(np.int32)))
    need(
        ulps == 1,
        f"start and neighbour are {ulps} float32 numbers apart, not one: use torch.nextafter",
    )
    low, high = sorted(ends)
    need(
        high - low > 0.01 * abs(high),
        f"{low:.6g} and {high:.6g} differ by less than 1 %: the bit makes no difference",
    )
    return (
        f"one bit decides between {low:.3g} and {high:.3g}. Whether such a start is ever"
        " drawn is another question."
    )
