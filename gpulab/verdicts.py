"""What a comparison of settings on the same seeds allows one to say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpulab.errors import UsageError

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Comparison:
    """Settings compared on the same seeds with a reference.

    `table` has a row per other setting: `setting`, `seeds` (compared), `same_bits` (in how many the
    trained weights are identical), `mean_difference` from the reference, `largest_difference` on one
    seed, and `diverged`. `between_seeds` is the standard deviation over seeds under the reference.
    """

    metric: str
    reference: str
    table: pd.DataFrame
    between_seeds: float

    @property
    def largest(self) -> float:
        """The largest difference that any setting made on any seed."""
        return float(self.table.largest_difference.max()) if len(self.table) else 0.0

    @property
    def ratio(self) -> float:
        """The largest difference as a multiple of the spread between seeds."""
        return self.largest / self.between_seeds if self.between_seeds else float("inf")

    def __str__(self) -> str:
        if self.table.empty:
            return f"Only {self.reference} was run: there is nothing to compare it with."
        size = "smaller" if self.ratio < 1 else "not smaller"
        diverged = int(self.table.diverged.sum())
        return (
            f"Against {self.reference}, on the same seeds, the largest change of {self.metric} that any of "
            f"{len(self.table)} other settings made to any seed is {self.largest:.2e}.\n"
            f"The standard deviation between seeds under {self.reference} is {self.between_seeds:.2e}.\n"
            f"The change of setting is {size} than the change of seed: {self.ratio:.4f} of it.\n"
            f"Diverged runs: {diverged}."
        )


def compare(frame: pd.DataFrame, reference: str, metric: str = "final_loss") -> Comparison:
    """Compare each setting in a frame of runs with the reference, seed by seed.

    Descriptive: it says how far the settings are apart, in units of the spread between seeds, and
    claims nothing about seeds that were not run. The frame must hold one experiment and profile.
    """
    import pandas as pd

    groups = frame[["experiment", "profile"]].drop_duplicates()
    if len(groups) > 1:
        raise UsageError(f"the frame mixes {groups.to_dict('records')}; compare one experiment at a time")
    base = frame[frame.setting == reference].drop_duplicates("seed").set_index("seed")
    if base.empty:
        raise UsageError(f"no runs under {reference!r}; there are {sorted(frame.setting.unique())}")
    rows = []
    for setting, group in frame[frame.setting != reference].groupby("setting", sort=False):
        other = group.drop_duplicates("seed").set_index("seed")
        both = base.join(other, rsuffix="_other", how="inner")
        difference = both[f"{metric}_other"].astype(float) - both[metric].astype(float)
        rows.append(
            {
                "setting": setting,
                "seeds": len(both),
                "same_bits": int((both.weights == both.weights_other).sum()),
                "mean_difference": difference.mean(),
                "largest_difference": difference.abs().max(),
                "diverged": int((other.status == "diverged").sum()),
            }
        )
    table = pd.DataFrame(
        rows, columns=["setting", "seeds", "same_bits", "mean_difference", "largest_difference", "diverged"]
    )
    spread = float(base[metric].astype(float).std()) if len(base) > 1 else 0.0
    return Comparison(metric, reference, table, spread)
