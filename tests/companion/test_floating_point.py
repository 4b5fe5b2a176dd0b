"""Notebook 02: titles about sums and about changes that grow, with data that refute them."""

import pandas as pd
import pytest

import companion


@pytest.mark.parametrize(
    ("errors", "words"),
    [
        ([0, 0, 1, -2], "3 different sums of the same numbers; 50 %"),
        ([0, 0, 0, 0], "1 sum of the same numbers; 100 %"),
        ([5, 5, 5, 5], "1 sum of the same numbers; 0 %"),
    ],
)
def test_sums_title_counts_sums_and_exact_ones(errors, words):
    assert companion.sums_title(errors).startswith(words)


@pytest.mark.parametrize(
    ("last", "words"),
    [
        ([5e-8, 7e-8, 1e-6, 3e-6], "grew 60-fold (PredNet) and 2,000-fold (Autoencoder)"),
        ([1e-10, 1e-10, 1e-6, 3e-6], "shrank 10-fold (PredNet) and grew 2,000-fold"),
        ([0.0, 0.0, 1e-6, 3e-6], "vanished (PredNet) and grew 2,000-fold"),
    ],
)
def test_growth_title_says_whether_a_change_grew(last, words):
    index = pd.MultiIndex.from_product(
        [["prednet", "autoencoder"], [0, 1]], names=["network", "seed"]
    )
    first = pd.Series(1e-9, index)
    assert words in companion.growth_title(first, pd.Series(last, index))
