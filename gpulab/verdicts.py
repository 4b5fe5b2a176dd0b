"""What a comparison of settings on the same seeds allows one to say."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpulab.errors import UsageError

if TYPE_CHECKING:
    import pandas as pd


AGAIN = " again"  # marks the reruns of the reference: the same seed and setting, a second time


@dataclass(frozen=True)
class Comparison:
    """Settings compared on the same seeds with a reference.

    `table` has a row per other setting, and one for the reference's own reruns where there are any:
    `setting`, `seeds` (compared), `same_bits` (in how many the trained weights are identical),
    `mean_difference` from the reference, `largest_difference` on one seed, and `diverged`.
    `differences` has a row per setting and seed. `between_seeds` is the standard deviation over
    seeds under the reference. `diverged` counts the diverged runs, the reference's included.
    """

    metric: str
    reference: str
    table: pd.DataFrame
    differences: pd.DataFrame
    between_seeds: float
    diverged: int

    @property
    def largest(self) -> float:
        """The largest change that another setting made to any seed; NaN when no seed was in common."""
        others = self.table[self.table.setting != self.reference + AGAIN]
        return float(others.largest_difference.max()) if len(others) else 0.0

    @property
    def ratio(self) -> float:
        """The largest change as a multiple of the spread between seeds; NaN when either is unknown."""
        return self.largest / self.between_seeds if self.between_seeds else math.nan

    def __str__(self) -> str:
        again = self.table[self.table.setting == self.reference + AGAIN]
        others = len(self.table) - len(again)
        lines = []
        if not others:
            lines.append(f"Only {self.reference} was run: there is nothing to compare it with.")
        elif math.isnan(self.largest):
            lines.append(f"No seed ended with a number both under {self.reference} and under another setting.")
        else:
            lines.append(
                f"Against {self.reference}, on the same seeds, the largest change of {self.metric} that another "
                f"setting made to a seed is {self.largest:.2e} (settings compared: {others})."
            )
        if math.isnan(self.between_seeds):
            lines.append(f"One seed under {self.reference}: the spread between seeds is unknown.")
        else:
            lines.append(f"The standard deviation between seeds under {self.reference} is {self.between_seeds:.2e}.")
        if others and not math.isnan(self.ratio):
            size = "smaller" if self.ratio < 1 else "not smaller"
            lines.append(f"The change of setting is {size} than the change of seed: {self.ratio:.2g} of it.")
        if len(again):
            repeat = again.iloc[0]
            lines.append(
                f"The same setting run again changed a seed by up to {repeat.largest_difference:.2e}; "
                f"{repeat.same_bits} of {repeat.seeds} seeds gave the same bits twice."
            )
        lines.append(f"Diverged runs: {self.diverged}.")
        return "\n".join(lines)


def compare(frame: pd.DataFrame, reference: str, metric: str = "final_loss") -> Comparison:
    """Compare each setting in a frame of runs with the reference, seed by seed.

    Descriptive: it says how far the settings are apart, in units of the spread between seeds, and
    claims nothing about seeds that were not run. Raises `UsageError` when the frame mixes protocols,
    when two machines ran the same setting, or when the reference was not run.
    """
    import pandas as pd

    _check_comparable(frame)
    if metric not in frame:
        raise UsageError(f"no column {metric!r}; there are {', '.join(frame.columns)}")
    base = frame[(frame.setting == reference) & (frame.rerun == 0)].drop(columns="rerun")
    if base.empty:
        raise UsageError(f"no runs under {reference!r}; there are {sorted(frame.setting.unique())}")
    others = {setting: group for setting, group in frame.groupby("setting", sort=False) if setting != reference}
    firsts = {setting: group[group.rerun == 0] for setting, group in others.items()}
    again = frame[(frame.setting == reference) & (frame.rerun > 0)]
    if len(again):
        firsts[reference + AGAIN] = again
    rows, moved = [], []
    for setting, group in firsts.items():
        both = base.merge(group, on="seed", suffixes=("", "_other"))
        difference = both[f"{metric}_other"].astype(float) - both[metric].astype(float)
        moved.append(pd.DataFrame({"setting": setting, "seed": both.seed, "difference": difference}))
        rows.append(
            {
                "setting": setting,
                "seeds": both.seed.nunique(),
                "same_bits": int((both.weights == both.weights_other).groupby(both.seed).all().sum()),
                "mean_difference": difference.mean(),
                "largest_difference": difference.abs().max(),
                "diverged": int((group.status == "diverged").sum()),
            }
        )
    columns = ["setting", "seeds", "same_bits", "mean_difference", "largest_difference", "diverged"]
    differences = pd.concat(moved) if moved else pd.DataFrame(columns=["setting", "seed", "difference"])
    table = pd.DataFrame(rows, columns=columns)
    spread = float(base[metric].astype(float).std())
    diverged = int(table.diverged.sum() + (base.status == "diverged").sum())
    return Comparison(metric, reference, table, differences, spread, diverged)


def check_one_protocol(frame: pd.DataFrame) -> None:
    """Raise `UsageError` when a frame mixes runs that learned different things or for different times."""
    protocols = frame[["experiment", "profile", "frames", "protocol"]].drop_duplicates()
    if len(protocols) > 1:
        raise UsageError(f"the frame mixes {protocols.to_dict('records')}; compare runs of one protocol at a time")


def _check_comparable(frame: pd.DataFrame) -> None:
    check_one_protocol(frame)
    twice = frame[frame.duplicated(["setting", "seed", "rerun"], keep=False)]
    if len(twice):
        raise UsageError(
            f"{twice.setting.iloc[0]!r} seed {twice.seed.iloc[0]} was run more than once, on "
            f"{', '.join(sorted(set(twice.machine)))}; compare one machine's runs of a setting at a time"
        )
