"""How often a verdict is wrong, by simulation: error rates, power, and the published analysis beside it.

Writes `verdict_calibration.md` and `verdict_power.png` beside this file. Losses are standardised to a
standard deviation of 1 between seeds; a pair's difference is a shift plus noise, and the noise is the
difference of two fresh losses, scaled: under no effect both settings are exchangeable.
"""

from __future__ import annotations

import platform
import shlex
import sys
import time
from collections.abc import Callable
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pandas as pd
import scipy
import statsmodels
from matplotlib.figure import Figure
from scipy import stats
from tqdm import tqdm

import gpulab as gl
from gpulab.stats import tests as inference
from gpulab.stats.decisions import JUMP
from gpulab.store import listing

HERE = Path(__file__).parent
SEEDS = (5, 10, 30)
NOISES = (1e-5, 0.1, 0.5, 1.0)
SHARE, ALPHA = 0.25, 0.05
SETTLED_MARGIN = 0.3
MIXED = "mixed"  # on the command line: this section alone, printed
REPEATS = 10_000
HUMP = 0.35  # share of seeds that stay on the plateau; of the recorded PredNets about a third do


def two_humps(generator: np.random.Generator, shape: tuple[int, ...], share: float = HUMP) -> np.ndarray:
    plateau = generator.random(shape) < share
    losses = plateau + 0.05 * generator.standard_normal(shape)
    return (losses - share) / np.sqrt(share * (1 - share) + 0.05**2)


LOSSES = {
    "normal": lambda generator, shape: generator.standard_normal(shape),
    "Student t, 3 d.f.": lambda generator, shape: generator.standard_t(3, shape) / np.sqrt(3),
    "lognormal": lambda generator, shape: (
        (generator.lognormal(size=shape) - np.sqrt(np.e)) / np.sqrt((np.e - 1) * np.e)
    ),
    "two humps, 35 %": two_humps,
    "two humps, 10 %": lambda generator, shape: two_humps(generator, shape, 0.1),
}


def jumps(share: float) -> Callable[..., np.ndarray]:
    """Differences of which a share jump up and all others make up for it."""
    return lambda generator, shape: (
        (generator.random(shape) < share) - share + 0.05 * np.sqrt(share) * generator.standard_normal(shape)
    )


DIFFERENCES = {  # whose mean is zero
    "normal": LOSSES["normal"],
    "Student t, 3 d.f.": LOSSES["Student t, 3 d.f."],
    "one in ten jumps, either way": lambda generator, shape: (
        (generator.random(shape) < 0.1) * generator.choice([-1, 1], shape) + 0.01 * generator.standard_normal(shape)
    ),
    "lognormal, sigma 0.5": lambda generator, shape: generator.lognormal(sigma=0.5, size=shape) - np.exp(0.125),
    "exponential": lambda generator, shape: generator.exponential(size=shape) - 1,
    "lognormal, sigma 1": LOSSES["lognormal"],
    **{f"{share:.0%} jump, the others make up for it": jumps(share) for share in (0.35, 0.2, 0.1, 0.05)},
}


def different_p(moved: np.ndarray) -> np.ndarray:
    """`inference.mean_p` of each row of (repeats, n), for differences other than zero."""
    n, (mean, skewness), p = moved.shape[1], moments(moved), flipped_p(moved)
    corrected = np.maximum(p, 2 * stats.t.sf(np.abs(inference.skewed_t(mean, skewness, n)), n - 1))
    return np.where(mean * skewness < 0, corrected, p)


def moments(moved: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean over standard deviation and skewness of each row."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return moved.mean(axis=1) / moved.std(axis=1, ddof=1), stats.skew(moved, axis=1)


def flipped_p(moved: np.ndarray) -> np.ndarray:
    """`inference.sign_flip_p` of each row."""
    moved = np.sort(moved, axis=1)
    n = moved.shape[1]
    signs = 2.0 * np.concatenate(list(inference.sign_flips(n))).T - 1
    p = np.empty(len(moved))
    for part in np.array_split(np.arange(len(moved)), max(1, len(moved) // 500)):
        limit = np.abs(moved[part].sum(axis=1)) - 1e-12 * np.abs(moved[part]).sum(axis=1)
        extreme = (np.abs(moved[part] @ signs) >= limit[:, None]).sum(axis=1)
        p[part] = extreme / signs.shape[1] if n <= inference.EXACT else (1 + extreme) / (1 + inference.FLIPS)
    return p


def equivalent_p(moved: np.ndarray, margin: np.ndarray | float, corrected: bool = True) -> np.ndarray:
    """`inference.equivalence_p` of each row; uncorrected, by Student's t alone."""
    n, (mean, skewness) = moved.shape[1], moments(moved)
    with np.errstate(divide="ignore", invalid="ignore"):
        reach = margin / moved.std(axis=1, ddof=1)
        rooms = [inference.skewed_t(reach + sign * mean, sign * skewness * corrected, n) for sign in (1, -1)]
        p = stats.t.sf(np.minimum.reduce(rooms), n - 1)
    return np.where(moved.any(axis=1), p, 0.0)


def sd_limit(losses: np.ndarray) -> np.ndarray:
    """`inference.sd_lower_limit` of each row."""
    kurtosis = np.maximum(3.0, 3 + stats.kurtosis(losses, axis=1, bias=False))
    return losses.std(axis=1, ddof=1) * inference.sd_limit_ratio(losses.shape[1], kurtosis)


def check_that_these_are_the_shipped_tests() -> None:
    generator = np.random.default_rng(1)
    for n in SEEDS:
        moved = generator.standard_t(3, (20, n))
        assert np.allclose(different_p(moved), [inference.mean_p(row) for row in moved], atol=1e-12)
        assert np.allclose(flipped_p(moved), [inference.sign_flip_p(row) for row in moved], atol=1e-12)
        assert np.allclose(equivalent_p(moved, 0.5), [inference.equivalence_p(row, 0.5) for row in moved])
        assert np.allclose(sd_limit(moved), [inference.sd_lower_limit(row) for row in moved])
    for _ in range(20):
        losses, moved, _ = freed(0.1, 3e-3)(generator, 27)
        both = {
            "setting": np.repeat(["a", "b"], 27),
            "seed": [*range(27)] * 2,
            "final_loss": [*losses, *losses + moved],
        }
        assert ("mixes" in str(gl.verdict(pd.DataFrame(both)))) == says_that_it_mixes(losses, moved)


def error_rates() -> pd.DataFrame:
    """False `different` without an effect, false `equivalent` with one as large as the margin."""
    rows = []
    cases = [(name, n, noise) for name in LOSSES for n in SEEDS for noise in NOISES]
    for name, n, noise in tqdm(cases, desc="error rates"):
        generator = np.random.default_rng(2)
        draw, shape = LOSSES[name], (REPEATS, n)
        base = draw(generator, shape)
        wobble = noise * (draw(generator, shape) - draw(generator, shape)) / np.sqrt(2)
        at_edge = SHARE + wobble
        rows.append(
            {
                "losses": name,
                "seeds": n,
                "noise (sd)": f"{noise:g}",
                "false different": (different_p(wobble) <= ALPHA).mean(),
                "false equivalent, absolute margin": (equivalent_p(at_edge, SHARE) <= ALPHA).mean(),
                "false equivalent, 0.25sd": (equivalent_p(at_edge, SHARE * sd_limit(base)) <= ALPHA).mean(),
                "the same, naive sd": (equivalent_p(at_edge, SHARE * base.std(axis=1, ddof=1)) <= ALPHA).mean(),
            }
        )
    return pd.DataFrame(rows)


def skewed() -> pd.DataFrame:
    """Errors about the mean where differences are skewed or jump, by sign flips or t alone and as corrected."""
    rows = []
    for (name, draw), n in tqdm([*product(DIFFERENCES.items(), (6, 10, 20, 32, 50))], desc="skewed"):
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
                "false different, sign flips": (flipped_p(moved) <= ALPHA).mean(),
                "false different": (different_p(moved) <= ALPHA).mean(),
                "false equivalent, t": (equivalent_p(at_margin, 3 * sd, corrected=False) <= ALPHA).mean(),
                "false equivalent": (equivalent_p(at_margin, 3 * sd) <= ALPHA).mean(),
                "right different, sign flips": (flipped_p(shifted) <= ALPHA).mean(),
                "right different": (different_p(shifted) <= ALPHA).mean(),
            }
        )
    return pd.DataFrame(rows)


Pairs = tuple[np.ndarray, np.ndarray, np.ndarray]  # losses under the reference, differences, whether a seed jumped


def any_losses(share: float) -> Callable[[np.random.Generator, int], Pairs]:
    """`jumps`, whatever the losses: the differences alone tell which seeds jumped."""

    def draw(generator: np.random.Generator, n: int) -> Pairs:
        moved = jumps(share)(generator, n)
        return generator.standard_normal(n), moved, moved > 0.5

    return draw


def freed(share: float, noise: float, back: bool = True) -> Callable[[np.random.Generator, int], Pairs]:
    """Losses like the recorded PredNets': 30 % are stuck near 0.14, and some of these are freed; it pays for the rest.

    Or, not `back`, the rest moves along with them.
    """

    def draw(generator: np.random.Generator, n: int) -> Pairs:
        stuck = generator.random(n) < 0.3
        losses = np.where(stuck, generator.normal(0.14, 0.01, n), generator.normal(0.04, 0.015, n))
        jump = stuck & (generator.random(n) < share / 0.3)
        rest = 0.1 * share / (1 - share) * (1 if back else -1)
        return losses, np.where(jump, -0.1, rest) + noise * generator.standard_normal(n), jump

    return draw


def alike(name: str, shift: float) -> Callable[[np.random.Generator, int], Pairs]:
    """No seed jumps: all shift by so many standard deviations of the noise, which is the difference of two losses."""

    def draw(generator: np.random.Generator, n: int) -> Pairs:
        losses, one, other = (LOSSES[name](generator, (n,)) for _ in range(3))
        return losses, shift + (one - other) / np.sqrt(2), np.zeros(n, bool)

    return draw


def says_that_it_mixes(losses: np.ndarray, moved: np.ndarray) -> bool:
    """Whether a verdict on such pairs says that some seeds jumped, and the others moved the other way."""
    jumped = inference.jumped(moved, JUMP * inference.sample_sd(losses))
    if not jumped.any() or moved[jumped].mean() * moved[~jumped].mean() >= 0:
        return False
    return inference.mean_p(moved[~jumped]) <= ALPHA


def mixed(repeats: int = 400) -> pd.DataFrame:
    """How often a verdict calls a mean other than zero, and how often it says that the mean mixes two parts."""
    shares = (0.05, 0.1, 0.2)
    cases = {f"{share:.0%} jump, the others make up for it": any_losses(share) for share in shares}
    for share, noise in product(shares, (3e-3, 1.5e-2)):
        cases[f"{share:.0%} are freed, the others pay; noise {noise:g}"] = freed(share, noise)
    for share in (0.05, 0.2):
        cases[f"{share:.0%} are freed, the others gain, too; noise 0.003"] = freed(share, 3e-3, back=False)
    for shift, name in product((0, 0.5), [*LOSSES][:4]):
        cases[f"{'all shift by half the noise' if shift else 'nothing differs'}; {name}"] = alike(name, shift)
    cases["skewed about a mean of zero: lognormal, sigma 1"] = lambda generator, n: (
        *(LOSSES[name](generator, (n,)) for name in ("normal", "lognormal")),
        np.zeros(n, bool),
    )
    rows = []
    for (name, draw), n in tqdm([*product(cases.items(), (8, 16, 27))], desc="mixed"):
        generator, seen = np.random.default_rng(11), []
        for _ in range(repeats):
            losses, moved, jumped = draw(generator, n)
            seen.append((jumped.any(), inference.mean_p(moved) <= ALPHA, says_that_it_mixes(losses, moved)))
        jump, different, said = np.array(seen).T
        rows.append(
            {
                "pairs": name,
                "seeds": n,
                "one jumped": jump.mean(),
                "`different`": different.mean(),
                "the same, and nothing said": (different & ~said).mean(),
                "said, if one jumped": said[jump].mean() if jump.any() else np.nan,
                "said, if none did": said[~jump].mean() if not jump.all() else np.nan,
            }
        )
    return pd.DataFrame(rows)


def about_mixed_means() -> str:
    """The section on what a verdict says of jumps against all others."""
    table = mixed()
    none_did, skewed = table["said, if none did"], table.pairs.str.startswith("skewed")
    return f"""## Jumps against all others
By `{shlex.join(["python", "benchmarks/calibrate_verdicts.py", MIXED])}`, 400 simulated experiments a row
(standard error of a rate of 5 %: 1.1 points).

What no test of a mean can exclude can be seen in part: where some seeds jumped and the others moved the other way (p at
most 5 %), a verdict says so in its first sentence, with both means. A seed jumped if it moved {inference.APART} times
as far as any that did not, and by {JUMP:g} standard deviations between seeds or more; fewer than half can. The decision
stays as it is. Where no seed of the sample jumped there is nothing to see, and that is where `different` is most often
wrong: there a verdict only says which jumps could undo its mean.

`freed`: losses like the recorded PredNets', 30 % stuck at 0.14 ± 0.01, the others at 0.04 ± 0.015. Some of those that
are stuck are freed (−0.1), and the others get worse by so much that the mean is zero. Noise is the standard deviation
of the others' differences; where it is 0.015, a jump is seldom {inference.APART} times as far as the farthest of the
others, or their move is not significant itself.

Without a jump it is said in {none_did[~skewed].max():.1%} of samples at most; of skewed differences, whose tail looks
like jumps, in {none_did[skewed].max():.1%}.

{markdown(table)}
"""


def rare_switch() -> pd.DataFrame:
    """The effect is that few seeds jump from the low hump to the high one; the mean moves by the margin."""
    rows = []
    for n in (*SEEDS, 100):
        generator = np.random.default_rng(3)
        plateau = generator.random((REPEATS, n)) < HUMP
        sd = np.sqrt(HUMP * (1 - HUMP) + 0.05**2)
        losses = (plateau + 0.05 * generator.standard_normal((REPEATS, n))) / sd
        jumps = ~plateau & (generator.random((REPEATS, n)) < SHARE * sd / (1 - HUMP))
        noise = 1e-5 * generator.standard_normal((REPEATS, n))
        moved, still = jumps / sd + noise, noise
        limit = SHARE * sd_limit(losses)
        # A guard: what may have gone unseen, the jumps' possible rate times the distance of the losses.
        guard = (1 - 0.05 ** (1 / n)) * np.ptp(losses, axis=1)
        guarded = [equivalent_p(values, limit - guard) <= ALPHA for values in (moved, still)]
        rows.append(
            {
                "seeds": n,
                "seeds that jump": SHARE * sd,
                "no jump seen": (~jumps.any(axis=1)).mean(),
                "different": (different_p(moved) <= ALPHA).mean() if n <= 30 else np.nan,
                "false equivalent, absolute margin": (equivalent_p(moved, SHARE) <= ALPHA).mean(),
                "false equivalent, 0.25sd": (equivalent_p(moved, limit) <= ALPHA).mean(),
                "right equivalent, 0.25sd": (equivalent_p(still, limit) <= ALPHA).mean(),
                "false, with a guard": guarded[0].mean(),
                "right, with a guard": guarded[1].mean(),
            }
        )
    return pd.DataFrame(rows)


def coverage(repeats: int = 1000) -> pd.DataFrame:
    """How often the 95 % interval holds the true mean difference."""
    rows = []
    differences = {
        f"{name}, symmetric": lambda generator, shape, draw=LOSSES[name]: (
            draw(generator, shape) - draw(generator, shape)
        )
        for name in ("normal", "Student t, 3 d.f.", "two humps, 35 %")
    }
    differences["lognormal, skewed"] = LOSSES["lognormal"]
    for name, draw in tqdm(differences.items(), desc="coverage"):
        for n in (6, *SEEDS[1:]):
            moved = draw(np.random.default_rng(4), (repeats, n))
            row = {"differences": name, "seeds": n}
            for what, interval in (("sign flips", inference.sign_flip_interval), ("as used", inference.mean_interval)):
                row[f"coverage, {what}"] = np.mean([low <= 0 <= high for low, high in map(interval, moved)])
            rows.append(row)
    return pd.DataFrame(rows)


def further_seeds(kind: str, size: float, n: int, generator: np.random.Generator) -> pd.DataFrame:
    """Runs of n seeds; `size` is a shift in margins, or the share of seeds that jump, are lost or diverge."""
    base, noise = generator.standard_normal(n), generator.standard_normal(n)
    some = generator.random(n) < size
    if kind == "learned or not":
        base = (generator.random(n) < 0.9).astype(float)
    moved = {
        "shift": base + SETTLED_MARGIN * (size + 2 * noise),
        "jump": base + 1.5 * some + 1e-3 * noise,
        "learned or not": np.where(some, 0.0, base),
        "diverge": np.where(some, np.nan, base + 0.1 * noise),
    }[kind]
    losses = np.concatenate([base, moved])
    return pd.DataFrame({"setting": np.repeat(["a", "b"], n), "seed": [*range(n)] * 2, "final_loss": losses})


def settled(repeats: int = 40) -> pd.DataFrame:
    """Of experiments that are inconclusive, how many the number of seeds that the verdict names does settle."""
    rows = []
    cases = [("shift", (0.0, 0.5, 1.0, 2.0)), ("jump", (0.1, 0.25, 0.4)), ("learned or not", (0.05, 0.25, 0.4))]
    cases.append(("diverge", (0.02, 0.25, 0.5)))
    cases = [(kind, size, n) for kind, sizes in cases for size in sizes for n in (6, 12, 20)]
    for kind, size, n in tqdm(cases, desc="settled"):
        generator, named, done = np.random.default_rng(8), [], []
        for _ in range(repeats):
            runs = further_seeds(kind, size, n, generator)
            needed = gl.verdict(runs, margin=SETTLED_MARGIN).table.seeds_needed[0]
            if not needed <= 3000:
                continue
            more = further_seeds(kind, size, int(needed) - n, generator)
            whole = pd.concat([runs, more.assign(seed=more.seed + n)])
            named.append(needed)
            done.append(gl.verdict(whole, margin=SETTLED_MARGIN).decision != "inconclusive")
        row = {"further seeds": kind, "size": f"{size:g}", "seeds": n, "inconclusive": len(done) / repeats}
        middle = f"{np.median(named):.0f}" if named else ""
        rows.append({**row, "seeds named (median)": middle, "settled then": np.mean(done) if len(done) > 9 else np.nan})
    return pd.DataFrame(rows)


def power_curves(noise: float = 0.25) -> pd.DataFrame:
    rows = []
    shifts = np.linspace(0, 0.75, 16)
    for n in tqdm(SEEDS, desc="power"):
        generator = np.random.default_rng(5)
        draw, shape = LOSSES["normal"], (4000, n)
        limit = SHARE * sd_limit(draw(generator, shape))
        wobble = noise * draw(generator, shape)
        for shift in shifts:
            different = (different_p(shift + wobble) <= ALPHA).mean()
            equivalent = (equivalent_p(shift + wobble, limit) <= ALPHA).mean()
            rows.append({"seeds": n, "shift": shift, "different": different, "equivalent": equivalent})
    return pd.DataFrame(rows)


def draw_power(curves: pd.DataFrame, published: float) -> Figure:
    figure = Figure(figsize=(7.2, 3.2), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, what in zip(panels, ("different", "equivalent"), strict=True):
        for (n, some), style in zip(curves.groupby("seeds"), (":", "--", "-"), strict=True):
            axes.plot(some["shift"], some[what], ls=style, color="#0072B2", label=f"{n} seeds")
        axes.axvline(SHARE, color="#999999", lw=0.8)
        axes.set_xlabel("true difference (sd between seeds)")
        axes.set_title(f"probability of “{what}”", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].scatter([0], [published], marker="x", color="#D55E00", zorder=3)
    panels[0].annotate(
        "one seed each, the last\n50 batches as replicates,\nno effect",
        (0.01, published),
        (0.36, 0.45),
        fontsize=8,
        arrowprops={"arrowstyle": "-", "color": "#D55E00", "lw": 0.8},
    )
    panels[1].annotate(" margin", (SHARE, 0.96), fontsize=8)
    panels[1].legend(frameon=False, fontsize=8)
    return figure


def batches_as_replicates(first: np.ndarray, second: np.ndarray) -> bool:
    """The published kind of analysis: one run each, its last 50 batches taken for replicates, t test."""
    return bool(stats.ttest_ind(first[-50:], second[-50:]).pvalue <= ALPHA)


def published_analysis() -> pd.DataFrame:
    """False alarms between runs that differ in the seed only."""
    rows = []
    runs = gl.recorded_runs()
    runs = runs[(runs.rerun == 0) & (runs.status == "finished")]
    for (experiment, profile, setting), some in runs.groupby(["experiment", "profile", "setting"]):
        if setting not in ("cpu", "cuda:tf32=off"):
            continue
        losses = [part.loss.to_numpy() for _, part in listing.history(some).groupby("seed")]
        alarms = [batches_as_replicates(a, b) for a, b in combinations(losses, 2)]
        rows.append({"runs": f"recorded: {experiment}, {profile}, {setting}", "pairs": len(alarms)})
        rows[-1]["false alarms"] = np.mean(alarms)
    for spread, words in ((0.0, "no spread between seeds"), (1.0, "two humps")):
        generator = np.random.default_rng(6)
        noise = generator.standard_normal((2, 2000, 50))
        for step in range(1, 50):
            noise[..., step] = 0.8 * noise[..., step - 1] + 0.6 * noise[..., step]
        level = spread * two_humps(generator, (2, 2000, 1))
        first, second = level + 0.2 * noise
        alarms = stats.ttest_ind(first, second, axis=1).pvalue <= ALPHA
        rows.append({"runs": f"synthetic: autocorrelation 0.8, {words}", "pairs": 2000, "false alarms": alarms.mean()})
    return pd.DataFrame(rows)


def speed(seeds: int = 1000, settings: int = 12) -> float:
    """Seconds for one verdict."""
    generator = np.random.default_rng(7)
    base = generator.standard_normal(seeds)
    frame = pd.concat(
        pd.DataFrame(
            {"setting": f"s{k}", "seed": range(seeds), "final_loss": base + 1e-3 * generator.standard_normal(seeds)}
        )
        for k in range(settings)
    )
    gl.verdict(frame[frame.seed < 20])
    start = time.perf_counter()
    gl.verdict(frame)
    return time.perf_counter() - start


def markdown(table: pd.DataFrame) -> str:
    def show(value: object) -> str:
        return ("" if np.isnan(value) else f"{value:.1%}") if isinstance(value, float) else str(value)

    lines = ["| " + " | ".join(table.columns) + " |", "|" + " --- |" * len(table.columns)]
    lines += ["| " + " | ".join(map(show, row)) + " |" for row in table.itertuples(index=False)]
    return "\n".join(lines)


def main() -> None:
    start = time.perf_counter()
    check_that_these_are_the_shipped_tests()
    errors, lopsided, switch, covered, then = error_rates(), skewed(), rare_switch(), coverage(), settled()
    curves, published = power_curves(), published_analysis()
    synthetic = published[published.runs.str.contains("two humps")]["false alarms"].iloc[0]
    draw_power(curves, synthetic).savefig(HERE / "verdict_power.png", dpi=100)
    rates = errors.columns[3:6]
    over = errors[(errors[rates] > 0.06).any(axis=1)]
    no_jumps = lopsided[lopsided["no jump seen"].isna()]
    before, after = (no_jumps[f"false different{test}"].max() for test in (", sign flips", ""))
    excess = (lopsided["false different"] - lopsided["no jump seen"]).max()
    seconds = speed()
    worst = ", ".join(f"{name} {errors[name].max():.1%}" for name in rates)
    text = f"""# How often a verdict is wrong

`{shlex.join(["python", *sys.argv])}`, {REPEATS:,} simulated experiments a row
(standard error of a rate of 5 %: 0.2 points). Python {platform.python_version()}, NumPy {np.__version__},
SciPy {scipy.__version__}, statsmodels {statsmodels.__version__}.
One verdict on 1,000 seeds × 12 settings: {seconds:.2f} s.

`noise` is the standard deviation of the paired differences over that between seeds. `false different`:
no effect at all. `false equivalent`: the true difference is exactly the margin, a quarter of the true
standard deviation between seeds. alpha is 5 %; the target was 6 % at most. Highest: {worst}.
Rows above 6 %: {len(over)} of {len(errors)}. With 5 seeds a difference cannot be shown: p is at least 2/32.

{markdown(errors)}

`naive sd` is what the margin would do if the sample's standard deviation were taken for the true one. The
verdict takes the sd's lower {inference.SD_CONFIDENCE:.1%} limit instead.

## Skewed differences, and jumps that the others make up for
Sign flips test whether differences are symmetric about zero, and studentising changes nothing (all flips have the same
sum of squares). A mean of zero need not be symmetric. So where the sample's tail is on the side of zero, a t corrected
for skewness (Johnson 1978) must agree; the equivalence tests are made of it. `false different`: the mean difference is
zero. `false equivalent`: it is the margin, three standard deviations of the differences, skewed to either side.
`right different`: it is three standard errors, skewed to either side. Without jumps the false `different` are at most
{after:.1%} (by sign flips alone {before:.1%}).

Jumps that the others make up for defeat any test (Bahadur and Savage 1956): where no seed of the sample jumped, all
agree on a mean that is not the true one. The error is then at least about `no jump seen`, and at most
{100 * excess:.1f} points more. A verdict says what jump could undo its mean.

{markdown(lopsided)}

{about_mixed_means()}
## A limit: few seeds jump
The effect makes some seeds jump from the low hump to the high one, and leaves all others as they are; the
mean moves by exactly the margin. The rate of false `equivalent` is then close to the chance that no seed
of the sample jumped: **no test can see what did not happen.** So a verdict says which share of seeds could
have moved unseen. A metric of 0 and 1 is the same case.

{markdown(switch)}

`with a guard`: equivalence asked beside the possible unseen jumps (95 % limit of their rate × range of the
losses). Not adopted: without any effect it would almost never find equivalence with 10 or 30 seeds.

## The interval
Coverage of the 95 % interval of the mean difference: every shift that sign flips allow, which is exact for symmetric
differences, and as it is used, every shift that they or the corrected t allow.

{markdown(covered)}

## “About N seeds would settle it”
Experiments that are inconclusive go on, from the same truth, to the N seeds that their verdict names. The
promise is 80 %, if further seeds are like those seen, and is kept on average:
{then["settled then"].mean():.0%}. Six seeds
that are unlike the truth mislead; a shift is in margins, the noise of differences is two margins, other sizes are
shares of seeds.

{markdown(then)}

## Power
Normal losses, noise 0.25 sd. ![Probability of each decision against the true difference](verdict_power.png)

{markdown(curves[np.isclose(curves["shift"] % 0.25, 0)].assign(shift=lambda t: t["shift"].map("{:g} sd".format)))}

## The published kind of analysis
One run per device, its last 50 batches taken as replicates, t test at 5 %. Here both runs are of the *same*
setting and differ in the seed only: every alarm is false.

{markdown(published)}
"""
    (HERE / "verdict_calibration.md").write_text(text, encoding="utf-8")
    print(text)
    print(
        f"one verdict on 1,000 seeds × 12 settings: {seconds:.2f} s; all of this: {time.perf_counter() - start:.0f} s"
    )


if __name__ == "__main__":
    if sys.argv[1:] == [MIXED]:
        print(about_mixed_means())
    else:
        main()
