"""Checks of the exercises in `08_scale_out.ipynb`."""

from __future__ import annotations

from companion.exercises.answers import Answer, exercise, near, need, number, pair, shown, table


@exercise("08-1", "a number of devices")
def _twice_the_price(answer: Answer) -> str:
    # n devices take (1 + 64 / 8n) / (1 + 64 / 8) times the updates of one, so the price is (n + 8)
    # / 9 times as high.
    mistakes = {
        10: "the price is 2 for this number, but the question asks for more than 2",
        16: "the price is above 2, but fewer devices suffice",
    }
    near(answer, 11, mistakes, rel=1e-6)
    return f"11 devices are {9 * 11 / 19:.2f} times as fast for {19 / 9:.2f} times the price."


@exercise(
    "08-2", "(small, large), the tables `descents` of hogwild.py with two sizes of `--hidden`"
)
def _gain_without_a_lock(answer: Answer) -> str:
    small, large = (
        table(descents, "way", "seed", "weights", "updates_per_second") for descents in pair(answer)
    )
    gains = []
    need(
        min(small.seed.nunique(), large.seed.nunique()) >= 6,
        "fewer than six seeds: use at least six",
    )
    for frame in (small, large):
        speeds = frame.groupby("way").updates_per_second.median()
        gains.append(speeds["lock-free"] / speeds["synchronous"])
    need(
        small.weights.max() < large.weights.max(),
        "the smaller network, with fewer weights, comes first",
    )
    return (
        f"without a lock the small network makes {gains[0]:.2f} times as many updates per second,"
        f" the large one {gains[1]:.2f} times as many"
    )


@exercise(
    "08-3",
    "[(critical batch, devices), …], at least two phases with the same minimum number of updates",
)
def _schedule(answer: Answer) -> str:
    need(
        isinstance(answer, (list, tuple)) and 2 <= len(answer) <= 1000,
        f"{shown(answer)} is not a list of at least two phases",
    )
    batches, devices = zip(
        *([number(value) for value in pair(phase)] for phase in answer), strict=True
    )
    need(min(batches) > 0, "a critical batch must be above 0")
    need(
        all(count >= 1 and count.is_integer() for count in devices),
        "the number of devices must be an integer of at least 1",
    )
    need(
        batches[0] < batches[-1],
        "the critical batch must grow, because the question is what to do then",
    )
    # this number costs the same: a phase's price is proportional to its devices + B_crit / 8
    mean = sum(devices) / len(devices)
    # S = S_min (1 + B_crit / B), and B is 8 for each device
    steady = sum(1 + batch / (8 * mean) for batch in batches)
    gain = steady / sum(
        1 + batch / (8 * count) for batch, count in zip(batches, devices, strict=True)
    )
    need(
        gain > 1,
        f"for the same price, {mean:.3g} devices throughout are {1 / gain:.2f} times as fast",
    )
    return (
        f"by the law this is {gain:.2f} times as fast as {mean:.3g} devices throughout, for the"
        " same price. Only a verdict on runs can show whether it ends at the same loss as the"
        " usual training; none was computed here."
    )
