"""Checks of the exercises in `08_scale_out.ipynb`."""

from __future__ import annotations

from companion.exercises.answers import Answer, exercise, near, need, number, pair, shown, table


@exercise("08-1", "a number of devices")
def _twice_the_price(answer: Answer) -> str:
    # n devices take (1 + 64 / 8n) / (1 + 64 / 8) times the updates of one, so the price is (n + 8)
    # / 9 times as high.
    mistakes = {
        10: "there the price is 2, and more than that is asked for",
        16: "dear enough, but not the fewest",
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
        "fewer than six seeds: take six at least",
    )
    for frame in (small, large):
        speeds = frame.groupby("way").updates_per_second.mean()
        gains.append(speeds["lock-free"] / speeds["synchronous"])
    need(
        small.weights.max() < large.weights.max(),
        "the smaller network comes first, and has fewer weights",
    )
    return (
        f"without a lock the small network makes {gains[0]:.2f} times the updates a second, the"
        f" large {gains[1]:.2f}"
    )


@exercise(
    "08-3",
    "[(critical batch, devices), …], a phase each, two at least, of equally many updates at least",
)
def _schedule(answer: Answer) -> str:
    need(
        isinstance(answer, (list, tuple)) and 2 <= len(answer) <= 1000,
        f"{shown(answer)} is no list of two phases",
    )
    batches, devices = zip(
        *([number(value) for value in pair(phase)] for phase in answer), strict=True
    )
    need(min(batches) > 0, "a critical batch is above 0")
    need(
        all(count >= 1 and count.is_integer() for count in devices),
        "a number of devices is whole, and at least 1",
    )
    need(
        batches[0] < batches[-1],
        "the critical batch does not grow, and the question is what to do when it does",
    )
    # costs as much: a phase's price is proportional to its devices + B_crit / 8
    mean = sum(devices) / len(devices)
    # S = S_min (1 + B_crit / B), and B is 8 for each device
    steady = sum(1 + batch / (8 * mean) for batch in batches)
    gain = steady / sum(
        1 + batch / (8 * count) for batch, count in zip(batches, devices, strict=True)
    )
    need(
        gain > 1,
        f"for the same price {mean:.3g} devices all the time are {1 / gain:.2f} times as fast",
    )
    return (
        f"by the law it is {gain:.2f} times as fast as {mean:.3g} devices all the time, for the"
        " same price. Whether it ends where the usual training does only a verdict says, and no"
        " run was looked at here."
    )
