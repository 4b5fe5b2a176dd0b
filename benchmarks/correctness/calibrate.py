"""How often a verdict is wrong, by simulation.

    python benchmarks/correctness/calibrate.py [--only looks]

It fills the tables `errors`, `skewed` and `looks` of `benchmarks/results/verdict_calibration.md`,
which explains how to read them. Losses are standardised to a standard deviation of 1 between seeds.
The difference of a pair is a shift plus noise, and the noise is the scaled difference of two newly
drawn losses, so without an effect the two settings are exchangeable.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Annotated, Any

import numpy as np
import pandas as pd
import typer
from scipy import stats
from tqdm import tqdm

from benchmarks.measuring import RESULTS, made_by, markdown, run, show
from gpulab.stats import _inference as inference
from gpulab.stats._decisions import sd_confidence

PAGE = RESULTS / "verdict_calibration.md"
SEEDS = (5, 10, 30)
NOISES = (1e-5, 0.1, 0.5, 1.0)
SHARE, ALPHA = 0.25, 0.05
REPEATS = 10_000
PLANNED = (8, 16, 24, 32)  # seeds at each look
LOOKS = len(PLANNED)
MOST_SEEDS = 64  # the largest number of seeds at a look whose time depends on the results
HUMP = 0.35  # share of seeds that stay on the plateau; about a third of the recorded PredNets do
Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


def two_humps(
    generator: np.random.Generator, shape: tuple[int, ...], share: float = HUMP
) -> np.ndarray:
    plateau = generator.random(shape) < share
    losses = plateau + 0.05 * generator.standard_normal(shape)
    return (losses - share) / np.sqrt(share * (1 - share) + 0.05**2)


def lognormal(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return (generator.lognormal(size=shape) - np.sqrt(np.e)) / np.sqrt((np.e - 1) * np.e)


LOSSES: dict[str, Draw] = {
    "normal": lambda generator, shape: generator.standard_normal(shape),
    "Student t, 3 d.f.": lambda generator, shape: generator.standard_t(3, shape) / np.sqrt(3),
    "lognormal": lognormal,
    "two humps, 35 %": two_humps,
    "two humps, 10 %": lambda generator, shape: two_humps(generator, shape, 0.1),
}


def jumps(share: float) -> Draw:
    """Return differences of which a share jump up, while all others compensate for it."""
    return lambda generator, shape: (
        (generator.random(shape) < share)
        - share
        + 0.05 * np.sqrt(share) * generator.standard_normal(shape)
    )


DIFFERENCES: dict[str, Draw] = {  # differences with a mean of zero
    "normal": LOSSES["normal"],
    "Student t, 3 d.f.": LOSSES["Student t, 3 d.f."],
    "one in ten jumps, either way": lambda generator, shape: (
        (generator.random(shape) < 0.1) * generator.choice([-1, 1], shape)
        + 0.01 * generator.standard_normal(shape)
    ),
    "lognormal, sigma 0.5": lambda generator, shape: (
        generator.lognormal(sigma=0.5, size=shape) - np.exp(0.125)
    ),
    "exponential": lambda generator, shape: generator.exponential(size=shape) - 1,
    "lognormal, sigma 1": lognormal,
    **{
        f"{share:.0%} jump, the others make up for it": jumps(share)
        for share in (0.35, 0.2, 0.1, 0.05)
    },
}


# --- the shipped tests, for many rows at once -----------------------------------------------------


def different_p(moved: np.ndarray) -> np.ndarray:
    """Compute `inference.mean_p` of each row of (repeats, n), for differences other than zero."""
    n, (mean, skewness), p = moved.shape[1], moments(moved), flipped_p(moved)
    corrected = np.maximum(p, 2 * stats.t.sf(np.abs(inference.skewed_t(mean, skewness, n)), n - 1))
    return np.where(mean * skewness < 0, corrected, p)


def moments(moved: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Compute each row's mean divided by its standard deviation, and its skewness."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return moved.mean(axis=1) / moved.std(axis=1, ddof=1), stats.skew(moved, axis=1)


def flipped_p(moved: np.ndarray) -> np.ndarray:
    """Compute `inference.sign_flip_p` of each row."""
    moved = np.sort(moved, axis=1)
    n = moved.shape[1]
    signs = 2.0 * np.concatenate(list(inference.sign_flips(n))).T - 1
    p = np.empty(len(moved))
    for part in np.array_split(np.arange(len(moved)), max(1, len(moved) // 500)):
        limit = np.abs(moved[part].sum(axis=1)) - 1e-12 * np.abs(moved[part]).sum(axis=1)
        extreme = (np.abs(moved[part] @ signs) >= limit[:, None]).sum(axis=1)
        is_exact = n <= inference.MAX_EXACT_DIFFERENCES
        p[part] = (
            extreme / signs.shape[1] if is_exact else (1 + extreme) / (1 + inference.N_DRAWN_FLIPS)
        )

    return p


def equivalent_p(
    moved: np.ndarray, margin: np.ndarray | float, corrected: bool = True
) -> np.ndarray:
    """Compute `inference.equivalence_p` of each row, uncorrected, from Student's t alone."""
    n, (mean, skewness) = moved.shape[1], moments(moved)
    with np.errstate(divide="ignore", invalid="ignore"):
        reach = margin / moved.std(axis=1, ddof=1)
        rooms = [
            inference.skewed_t(reach + sign * mean, sign * skewness * corrected, n)
            for sign in (1, -1)
        ]
        p = stats.t.sf(np.minimum.reduce(rooms), n - 1)
    return np.where(moved.any(axis=1), p, 0.0)


def sd_limit(losses: np.ndarray, confidence: float = inference.SD_CONFIDENCE) -> np.ndarray:
    """Compute `inference.sd_lower_limit` of each row."""
    kurtosis, freedom = (
        np.maximum(3.0, 3 + stats.kurtosis(losses, axis=1, bias=False)),
        losses.shape[1] - 1,
    )
    quantile = stats.t.ppf(confidence, freedom)
    return losses.std(axis=1, ddof=1) * np.exp(-quantile * np.sqrt((kurtosis - 1) / freedom) / 2)


def rate(p: np.ndarray) -> float:
    """Return how often a test rejects."""
    return float((p <= ALPHA).mean())


def check_that_these_are_the_shipped_tests() -> None:
    generator = np.random.default_rng(1)
    for n in SEEDS:
        moved = generator.standard_t(3, (20, n))
        assert np.allclose(different_p(moved), [inference.mean_p(row) for row in moved], atol=1e-12)
        assert np.allclose(
            flipped_p(moved), [inference.sign_flip_p(row) for row in moved], atol=1e-12
        )
        assert np.allclose(
            equivalent_p(moved, 0.5), [inference.equivalence_p(row, 0.5) for row in moved]
        )
        assert np.allclose(sd_limit(moved), [inference.sd_lower_limit(row) for row in moved])


# --- error rates ----------------------------------------------------------------------------------


def error_rates() -> pd.DataFrame:
    """Compute false `different` without an effect, and false `equivalent` at one of a margin."""
    rows = []
    for (name, draw), n, noise in tqdm(
        [*product(LOSSES.items(), SEEDS, NOISES)], desc="error rates"
    ):
        generator, shape = np.random.default_rng(2), (REPEATS, n)
        base = draw(generator, shape)
        wobble = noise * (draw(generator, shape) - draw(generator, shape)) / np.sqrt(2)
        at_edge = SHARE + wobble
        rows.append(
            {
                "losses": name,
                "seeds": n,
                "noise (sd)": f"{noise:g}",
                "false different": rate(different_p(wobble)),
                "false equivalent, absolute margin": rate(equivalent_p(at_edge, SHARE)),
                "false equivalent, 0.25sd": rate(equivalent_p(at_edge, SHARE * sd_limit(base))),
                "the same, naive sd": rate(equivalent_p(at_edge, SHARE * base.std(axis=1, ddof=1))),
            }
        )
    return pd.DataFrame(rows)


def skewed() -> pd.DataFrame:
    """Compute errors about the mean of skewed or jumping differences, by each test."""
    rows = []
    for (name, draw), n in tqdm(
        [*product(DIFFERENCES.items(), (6, 10, 20, 32, 50))], desc="skewed"
    ):
        moved = draw(np.random.default_rng(9), (REPEATS, n))
        sd = draw(np.random.default_rng(10), (1_000_000,)).std()
        at_margin = np.concatenate([moved[::2], -moved[::2]]) + 3 * sd  # skewed to either side
        shifted = at_margin + (3 / np.sqrt(n) - 3) * sd
        share = float(name.split("%")[0]) / 100 if "make up" in name else np.nan
        rows.append(
            {
                "differences": name,
                "seeds": n,
                "no jump seen": (1 - share) ** n,
                "false different, sign flips": rate(flipped_p(moved)),
                "false different": rate(different_p(moved)),
                "false equivalent, t": rate(equivalent_p(at_margin, 3 * sd, corrected=False)),
                "false equivalent": rate(equivalent_p(at_margin, 3 * sd)),
                "right different, sign flips": rate(flipped_p(shifted)),
                "right different": rate(different_p(shifted)),
            }
        )
    return pd.DataFrame(rows)


# --- repeated looks -------------------------------------------------------------------------------

Test = Callable[[np.ndarray, int], np.ndarray]  # (experiment numbers, number of seeds) -> p values


def rejected_at_planned_looks(test: Test, level: float) -> float:
    """Return how often a test rejects at one of the `PLANNED` looks, each at `level`."""
    rejected = np.zeros(REPEATS, bool)
    for n in PLANNED:
        left = np.flatnonzero(~rejected)
        rejected[left] = test(left, n) <= level
    return float(rejected.mean())


def rejected_at_chosen_looks(test: Test, level: float, sides: int) -> float:
    """Return the same if the results so far determine the next look in the worst way.

    If z is below the quantile c, the next look has (c / z)² times as many seeds (Proschan and
    Hunsberger 1995), up to `MOST_SEEDS`.
    """
    rejected = np.zeros(REPEATS, bool)
    seeds = np.full(REPEATS, PLANNED[0])
    c = stats.norm.isf(level / sides)
    for _ in range(LOOKS):
        for n in np.unique(seeds[~rejected]):
            at_n = np.flatnonzero(~rejected & (seeds == n))
            p = test(at_n, int(n))
            rejected[at_n] = p <= level
            z = np.maximum(stats.norm.isf(p / sides), 1e-3)
            seeds[at_n] = np.clip(np.ceil(n * (c / z) ** 2), n + 1, MOST_SEEDS)
    return float(rejected.mean())


def errors_over_looks(test: Test, sides: int) -> dict[str, float]:
    """Compute errors of a test at one look, and over several looks without and with correction."""
    level = ALPHA / LOOKS
    return {
        "one look": rate(test(np.arange(REPEATS), PLANNED[-1])),
        "uncorrected": rejected_at_planned_looks(test, ALPHA),
        "planned": rejected_at_planned_looks(test, level),
        "chosen": rejected_at_chosen_looks(test, level, sides),
    }


def tests_on_losses(draw: Draw) -> Iterator[tuple[str, Test, int]]:
    """Yield the tests of losses whose distributions are equal or differ by one margin."""
    generator, shape = np.random.default_rng(3), (REPEATS, MOST_SEEDS)
    base, noise = (
        draw(generator, shape),
        (draw(generator, shape) - draw(generator, shape)) / np.sqrt(2),
    )
    yield "different", lambda rows, n: different_p(noise[rows, :n]), 2
    for scale in NOISES:
        at_edge = SHARE + scale * noise
        label = f"noise {scale:g}"

        def absolute(rows: np.ndarray, n: int, at_edge: np.ndarray = at_edge) -> np.ndarray:
            return equivalent_p(at_edge[rows, :n], SHARE)

        def of_sd(
            rows: np.ndarray, n: int, at_edge: np.ndarray = at_edge, looks: int = LOOKS
        ) -> np.ndarray:
            return equivalent_p(
                at_edge[rows, :n], SHARE * sd_limit(base[rows, :n], sd_confidence(looks))
            )

        yield f"equivalent, absolute margin, {label}", absolute, 1
        yield f"equivalent, 0.25sd, {label}", of_sd, 1


def repeated_looks() -> pd.DataFrame:
    """Compute errors over four looks, for every distribution of the other two tables."""
    rows = []
    for name, draw in tqdm(LOSSES.items(), desc="looks, losses"):
        for question, test, sides in tests_on_losses(draw):
            rows.append(
                {"losses or differences": name, "false": question, **errors_over_looks(test, sides)}
            )
    for name, draw in tqdm(DIFFERENCES.items(), desc="looks, differences"):
        if name in LOSSES:
            continue
        moved = draw(np.random.default_rng(11), (REPEATS, MOST_SEEDS))
        sd = draw(np.random.default_rng(10), (1_000_000,)).std()
        at_margin = np.concatenate([moved[::2], -moved[::2]]) + 3 * sd  # skewed to either side
        share = float(name.split("%")[0]) / 100 if "make up" in name else np.nan
        unseen = {"no jump seen": (1 - share) ** PLANNED[0]}
        questions = {
            "different": (partial(_of_rows, different_p, moved), 2),
            "equivalent, margin 3 sd": (
                partial(_of_rows, partial(equivalent_p, margin=3 * sd), at_margin),
                1,
            ),
        }
        for question, (test, sides) in questions.items():
            rows.append(
                {
                    "losses or differences": name,
                    "false": question,
                    **errors_over_looks(test, sides),
                    **unseen,
                }
            )
    return pd.DataFrame(rows)


def worst_error(looks: int, growth: float, sides: int, level: float) -> float:
    """Compute the error over several looks, each at `level`, for the worst data-dependent rule.

    z is the sum of the differences divided by the root of its variance. If the variance has grown
    from 1 to r between two looks, the second z is normal with mean z / √r and variance 1 − 1 / r.
    The worst rule picks the r at which rejection at that look or a later one is most likely. It is
    found backwards from the last look (dynamic programming). The last look has at most `growth`
    times as many seeds as the first. For two looks, one side and any growth, the error is level +
    exp(−c² / 2) / 4, where c is the normal quantile of the level (Proschan and Hunsberger 1995).
    """
    c = stats.norm.isf(level / sides)
    edges = np.linspace(-c if sides == 2 else -7, c, 161)
    z, log_seeds = (edges[1:] + edges[:-1]) / 2, np.linspace(0, np.log(growth), 48)

    def transition(r: float, start: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return, for each z, the probability that the next is beyond the edges or in each cell."""
        below = stats.norm.cdf((edges - start[:, None] / np.sqrt(r)) / np.sqrt(1 - 1 / r))
        rejects = 1 - below[:, -1] + (below[:, 0] if sides == 2 else 0)
        if sides == 1:
            below[:, 0] = 0
        return rejects, np.diff(below, axis=1)

    moves = [transition(np.exp(step), z) for step in log_seeds[1:]]
    later = np.zeros((len(log_seeds), len(z)))  # the chance of rejection at the remaining looks
    for _ in range(looks - 1):
        later = np.array(
            [
                np.max(
                    [
                        np.zeros_like(z),
                        *(p + q @ later[now + 1 + k] for k, (p, q) in enumerate(moves[: 47 - now])),
                    ],
                    0,
                )
                for now in range(len(log_seeds))
            ]
        )
    (first,), (stays,) = transition(1e12, np.zeros(1))
    return float(first + stays @ later[0])


def worst_times() -> pd.DataFrame:
    """Compute errors over several data-dependent looks, in the limit of normal sums."""
    assert (
        abs(worst_error(2, 1e6, 1, ALPHA) - (ALPHA + np.exp(-(stats.norm.isf(ALPHA) ** 2) / 2) / 4))
        < 0.002
    )
    rows = []
    for looks, growth in tqdm([*product((2, 4, 8), (2, 4, 8, 16, 100))], desc="worst times"):
        errors = {
            f"{kind}, {name}": worst_error(looks, growth, sides, level)
            for kind, level in (("each look at 5 %", ALPHA), ("corrected", ALPHA / looks))
            for name, sides in (("different", 2), ("equivalent", 1))
        }
        rows.append({"looks": str(looks), "last over first": f"{growth:g}", **errors})
    return pd.DataFrame(rows)


def _of_rows(
    p: Callable[[np.ndarray], np.ndarray], moved: np.ndarray, rows: np.ndarray, n: int
) -> np.ndarray:
    return p(moved[rows, :n])


# --- the commands ---------------------------------------------------------------------------------


def percent(frame: pd.DataFrame) -> str:
    """Return a table of rates in percent."""

    def shown(value: Any) -> Any:
        if not isinstance(value, float):
            return value
        return "" if np.isnan(value) else f"{value:.1%}"

    return markdown(frame.astype(object).map(shown))


def errors_part() -> str:
    """Return the table of two exchangeable settings."""
    errors = error_rates()
    rates = errors.columns[3:6]
    worst = ", ".join(f"{name} {errors[name].max():.1%}" for name in rates)
    made = (
        f"{REPEATS:,} simulated experiments a row (standard error of a rate of 5 %: 0.2 points)."
        f" {made_by()}\n\nHighest: {worst}. Rows above 6 %:"
        f" {(errors[rates] > 0.06).any(axis=1).sum()} of {len(errors)}."
    )
    return f"{made}\n\n{percent(errors)}"


def skewed_part() -> str:
    """Return the table of differences that are skewed or jump."""
    lopsided = skewed()
    no_jumps = lopsided[lopsided["no jump seen"].isna()]
    before, after = (no_jumps[f"false different{test}"].max() for test in (", sign flips", ""))
    excess = (lopsided["false different"] - lopsided["no jump seen"]).max()
    without = (
        f"Without jumps the false `different` are at most {after:.1%} (by sign flips alone"
        f" {before:.1%}). With them the error is at least about `no jump seen`, and at most"
        f" {100 * excess:.1f} points more."
    )
    return f"{without}\n\n{percent(lopsided)}"


def looks_part() -> str:
    """Return the tables of repeated looks."""
    started = time.process_time()
    looked_at, worst = repeated_looks(), worst_times()
    alike = looked_at["no jump seen"].isna()
    symmetric = looked_at["losses or differences"].isin(LOSSES)
    highest = "; ".join(
        f"{words} planned {looked_at.planned[which].max():.1%}, chosen"
        f" {looked_at.chosen[which].max():.1%}"
        for words, which in (
            ("both settings alike, or apart by the margin:", symmetric),
            ("skewed differences:", alike & ~symmetric),
            ("jumps that the others make up for:", ~alike),
        )
    )
    made = (
        f"{REPEATS:,} simulated experiments a row (standard error of a rate of 5 %: 0.2 points)."
        f" {made_by()} {time.process_time() - started:.0f} s of one core.\n\nHighest: {highest}."
    )
    times = "Normal sums, without simulation: the highest error of any rule of when to look."
    return f"{made}\n\n{percent(looked_at)}\n\n{times}\n\n{percent(worst)}"


PARTS = {"errors": errors_part, "skewed": skewed_part, "looks": looks_part}


def verdicts(
    only: Annotated[str, typer.Option(help=f"one of {', '.join(PARTS)}; all by default")] = "",
) -> None:
    """Compute the error rates, which takes minutes."""
    check_that_these_are_the_shipped_tests()
    parts = {name: part() for name, part in PARTS.items() if only in ("", name)}
    show("How often a verdict is wrong", PAGE, **parts)


if __name__ == "__main__":
    run(lambda: typer.run(verdicts))
