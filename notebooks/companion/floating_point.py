"""Notebook 02: what the titles of its figures say about sums and about changes that grow."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from companion.findings import listed, network_words


def sums_title(errors: Sequence[float]) -> str:
    """Count the different sums of the same numbers, and the share of orders with the exact sum.

    Args:
        errors: The distance of each sum from the exact one, one for each order of the numbers.

    >>> print(sums_title([0, 0, 1, -2]))
    3 different sums of the same numbers; 50 % of the orders give the exact one
    """
    values = np.asarray(errors)
    different = len(np.unique(values))
    sums = "1 sum" if different == 1 else f"{different} different sums"
    share = 100 * (values == 0).mean()
    return f"{sums} of the same numbers; {share:.0f} % of the orders give the exact one"


def growth_title(first: pd.Series, last: pd.Series) -> str:
    """Say for each network how many times a distance is as large at the end as at the beginning.

    Args:
        first, last: The relative distance of two runs after the first and the last update, with
            the levels `network` and `seed` in the index.

    >>> index = pd.MultiIndex.from_product([["prednet"], [0, 1]], names=["network", "seed"])
    >>> print(growth_title(pd.Series([1e-9, 1e-9], index), pd.Series([5e-8, 7e-8], index)))
    A one-bit change grew 60-fold (PredNet), median of seeds
    """
    clauses: dict[str, list[str]] = {}  # by verb
    for network, times in (last / first).groupby("network", sort=False).median().items():
        name = network_words(str(network))
        if math.isnan(times) or times == 0:
            clauses.setdefault("vanished", []).append(f"({name})")
        elif times >= 1:
            clauses.setdefault("grew", []).append(f"{times:,.0f}-fold ({name})")
        else:
            clauses.setdefault("shrank", []).append(f"{1 / times:,.0f}-fold ({name})")
    said = listed(f"{verb} {listed(networks)}" for verb, networks in clauses.items())
    return f"A one-bit change {said}, median of seeds"
