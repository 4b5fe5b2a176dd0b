"""Does rounding help networks past saddle points? The evidence from escapes and curvature."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from companion.findings import SUMMARY, CheckedSentences, Part, finding, listed
from gpulab.settings import Setting
from gpulab.stats import Verdict
from gpulab.wording import optimizer_words

ALPHA = 0.05
PUBLISHED = "adam"  # the optimiser of the paper, which decides the answer
# share of pairs required for the answer yes; chosen after the recorded escapes were seen
CLEAR = 0.9
# the beginning of a setting's name; settings are compared on the same device
DEVICE = r"^(cuda|cpu:threads=1|cpu)"


def saddle_finding(
    escapes: pd.DataFrame, related: pd.DataFrame, verdicts: Mapping[str, Verdict]
) -> CheckedSentences:
    """Whether rounding helps a network to leave a saddle, by optimiser, and why.

    Args:
        escapes: The `table` of `gpulab.saddles.escape_table`, or several of them.
        related: A row for each network, with the correlation of the loss with the share of descent
            directions `over the training`, and the `p` of the correlation at one step.
        verdicts: For each network, the verdict on whether a setting changes the share of descent
            directions at the end of training.
    """
    full_batch, unpushed = escapes.batch_size == 0, escapes.perturbation == 0
    masters = escapes.master_weights.astype(bool)
    plain = escapes[full_batch & unpushed & ~masters]
    pairs = against_float64(plain)
    decisions = pd.concat([judged.table for judged in verdicts.values()], ignore_index=True)
    fewer = int(((decisions.decision == "different") & (decisions.difference < 0)).sum())
    ends = "comparisons found fewer descent directions at the end of training"
    sections: dict[str, Part] = {
        SUMMARY: _summary(pairs),
        "Does rounding help": [
            _whether(pairs[pairs.optimizer == "sgd"]),
            _whether(pairs[pairs.optimizer == "momentum"]),
            _whether(pairs[pairs.optimizer == PUBLISHED], f". {fewer} of {len(decisions)} {ends}"),
            _with_minibatches(escapes[~full_batch]),
        ],
        "When rounding keeps a network at the saddle": _held(
            plain, escapes[full_batch & unpushed & masters]
        ),
        "During training": _along_trainings(related, decisions),
    }
    pushed = escapes[full_batch & ~unpushed]
    numbers = [f"Pushed off the saddle: {pushed.escaped.sum()} of {len(pushed)} left."]
    others = pairs[~pairs.optimizer.isin([PUBLISHED, "sgd", "momentum"])]
    numbers += [_whether(rows) for _, rows in others.groupby("optimizer", sort=False)]
    numbers += [
        f"{network}: {line}"
        for network, judged in verdicts.items()
        for line in str(judged).splitlines()
    ]
    return finding(sections, numbers)


def against_float64(escapes: pd.DataFrame) -> pd.DataFrame:
    """Pair each escape with that in float64 on the same device, seed and learning rate.

    `times` is the ratio of their numbers of steps; NaN if one of the two never left.
    """
    keys = ["device", "optimizer", "learning_rate", "seed"]
    escapes = escapes.assign(device=escapes.setting.str.extract(DEVICE, expand=False))
    escapes = escapes.drop_duplicates([*keys, "setting"])  # some were recorded twice
    exact = escapes.setting.str.contains("precision=float64")
    pairs = escapes[~exact].merge(
        escapes.loc[exact, [*keys, "steps", "escaped"]], on=keys, suffixes=("", "_float64")
    )
    return pairs.assign(times=pairs.steps / pairs.steps_float64)


def _summary(pairs: pd.DataFrame) -> str:
    """How often networks left sooner in coarser arithmetic than in float64, by optimiser."""
    counts: list[str] = []
    for optimizer in ("sgd", "momentum", PUBLISHED):
        times = pairs.times[pairs.optimizer == optimizer].dropna()
        name = optimizer_words(optimizer)
        if optimizer == PUBLISHED:
            name += ", the optimiser of the paper"
        runs = " pairs of runs" if not counts else ""
        counts.append(f"in {(times < 1).sum()} of {len(times)}{runs} with {name}")
    summary = (
        f"Networks left the saddle sooner in coarser arithmetic than in float64 {listed(counts)}."
    )
    later, others = (times > 1).sum(), (times == 1).sum()
    if later > (times < 1).sum():
        summary += (
            f" In {later} of these {len(times)} they left later, and in {others} after the same"
            " number of steps."
        )
    return summary


def _whether(pairs: pd.DataFrame, also: str = "") -> str:
    """Whether networks left the saddle sooner in coarser arithmetic: yes, or not shown."""
    name = optimizer_words(pairs.optimizer.iloc[0])
    who = f"{name}, the optimiser of the paper" if pairs.optimizer.iloc[0] == PUBLISHED else name
    times, held = pairs.times.dropna(), (~pairs.escaped).sum()
    sooner, later = (times < 1).sum(), (times > 1).sum()
    answer = "not shown"
    if sooner >= CLEAR * len(times):
        answer = "yes, unless rounding keeps the network there" if held else "yes"
    stayed = f"; {held} never left (weights in {_formats_held(pairs)})" if held else ""
    return (
        f"With {who}: {answer}. In {len(times)} pairs both networks left the saddle; the one in"
        f" coarser arithmetic left sooner than the one in float64 in {sooner} pairs and later in"
        f" {later} (median ratio of steps {times.median():.2f}){stayed}{also}."
    )


def _formats_held(escapes: pd.DataFrame) -> str:
    """The formats of the weights of the networks that never left."""
    return listed(
        sorted(
            {
                Setting.parse(setting).precision or "float32"
                for setting in escapes[~escapes.escaped].setting
            }
        )
    )


def curvature_title(related: pd.DataFrame) -> str:
    """Say in which networks a higher loss goes with more descent directions at the same step.

    Args:
        related: A row for each network, with the correlation of the loss with the share of descent
            directions `at one step`, and its `p`.

    >>> related = pd.DataFrame({"at one step": [0.2, 0.9], "p": [0.4, 0.01]}, ["A", "B"])
    >>> print(curvature_title(related))
    At the same step, a higher loss goes with more descent directions in B
    >>> print(curvature_title(related[:1]))
    At the same step, no link between loss and descent directions is shown
    """
    shown = related[related.p <= ALPHA]
    if shown.empty:
        return "At the same step, no link between loss and descent directions is shown"
    clauses = []
    for sign, words in ((1, "more"), (-1, "fewer")):
        networks = shown.index[sign * shown["at one step"] > 0]
        if len(networks):
            clauses.append(f"{words} descent directions in {listed(networks)}")
    return f"At the same step, a higher loss goes with {listed(clauses)}"


def leaves_saddle(paths: pd.DataFrame, radius: float = 0.1) -> pd.Series:
    """Return for each row of a table of paths whether its network is further away at the end.

    Args:
        paths: The `paths` of `gpulab.saddles.escape_table`; `unstable` is the distance along the
            descent direction.
        radius: A network has left the saddle if it ends further away than this.
    """
    network = ["optimizer", "setting", "batch_size", "master_weights", "seed"]
    last = paths.groupby([name for name in network if name in paths], dropna=False).unstable
    return last.transform("last") > radius


def leaving_title(escaped: pd.Series, circumstances: str = "") -> str:
    """Say how many networks leave the saddle; `circumstances` begin the sentence.

    >>> print(leaving_title(pd.Series([True, False, True]), "With minibatches"))
    With minibatches, 2 of 3 networks leave the saddle
    """
    text = f"{int(escaped.sum())} of {len(escaped)} networks leave the saddle"
    return f"{circumstances}, {text}" if circumstances else text


def step_length_title(escapes: pd.DataFrame) -> str:
    """Say for how many networks the length of a step predicts whether they leave the saddle.

    A network should leave if its steps are longer than half the distance to the next number in the
    format of its weights (`step_ratio` above 1), and stay otherwise.

    >>> print(step_length_title(pd.DataFrame({"step_ratio": [9, 0.1], "escaped": [True, True]})))
    1 of 2 networks leave or stay as the length of their steps predicts
    """
    right = escapes.escaped == (escapes.step_ratio > 1)
    return (
        f"{right.sum()} of {len(escapes)} networks leave or stay as the length of their steps"
        " predicts"
    )


def _with_minibatches(escapes: pd.DataFrame) -> str:
    """How much the arithmetic matters with the same minibatches, and how much the seed does."""
    # NaN for networks that never left
    steps = escapes.pivot_table(index=["optimizer", "seed"], columns="setting", values="steps")
    arithmetic, by_optimizer = steps.max(axis=1) / steps.min(axis=1) - 1, steps.groupby("optimizer")
    seeds = (by_optimizer.max() / by_optimizer.min() - 1).stack()
    held = ""
    if not escapes.escaped.all():
        held = (
            f"; {(~escapes.escaped).sum()} of {len(escapes)} never left (weights in"
            f" {_formats_held(escapes)})"
        )
    return (
        f"With the same minibatches, networks that left took {arithmetic.median():.1%} more steps"
        " in the slowest arithmetic than in the fastest (median). The slowest seed took"
        f" {seeds.median():.0%} more than the fastest{held}."
    )


def _held(plain: pd.DataFrame, masters: pd.DataFrame) -> list[str]:
    """State which networks leave the saddle, by step length, and the effect of precise weights."""
    measured = plain[plain.step_ratio.notna()]
    longer, shorter = (measured[measured.step_ratio > 1], measured[measured.step_ratio <= 1])
    sentences = [
        "Where a step is longer than half the distance from a weight to the next number in its"
        f" format, {longer.escaped.sum()} of {len(longer)} networks left the saddle; where it is"
        f" shorter, {shorter.escaped.sum()} of {len(shorter)}."
    ]
    freed = masters.merge(
        plain.loc[~plain.escaped, ["setting", "optimizer", "learning_rate"]].drop_duplicates()
    )
    if len(freed):
        conclusion = (
            ": what is rounded away is the update, not the gradient" if freed.escaped.all() else ""
        )
        sentences.append(
            f"With the same gradients but weights in float64, {freed.escaped.sum()} of the"
            f" {len(freed)} networks that had not left the saddle did leave it{conclusion}."
        )
    return sentences


def _along_trainings(related: pd.DataFrame, decisions: pd.DataFrame) -> list[str]:
    falls, shown = int((related["over the training"] > 0).sum()), int((related.p <= ALPHA).sum())
    counts = decisions.decision.value_counts()
    return [
        (
            f"Over a whole run, a lower loss goes with fewer descent directions in {falls} of"
            f" {len(related)} groups of runs. Between seeds at the same step, this is shown in"
            f" {shown} of them; in the others, both may simply change as training proceeds."
        ),
        (
            "Verdicts on whether a setting changes the share of descent directions at the end of"
            f" training: {listed(f'{count} {decision}' for decision, count in counts.items())}."
        ),
    ]
