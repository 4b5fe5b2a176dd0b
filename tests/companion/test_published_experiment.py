"""The registered runs of the published network, and dose and response: tables, statistics and
titles.
"""

import math

import numpy as np
import pandas as pd
import pytest

import companion
import gpulab as gl
from companion import anomaly
from companion.anomaly import dose_cells, rank_correlation
from companion.benchmarks import SCRIPTS

CPU = "cpu:threads=1"
TRAINING = f"{SCRIPTS}/recording/dose_training.py:bias_and_loss"
CELLS = np.arange(12)


@pytest.fixture(scope="module")
def recorded():
    return companion.published_runs()


@pytest.fixture(scope="module")
def table(recorded):
    return companion.published_table(recorded)


def runs(
    device="cuda",
    loader="reused",
    losses=(),
    film="walk",
    size="160x120",
    round_trip=True,
    repeat=0.01,
):
    losses = np.array(losses, float)
    frame = pd.DataFrame({"final_loss": losses, "seed": range(100, 100 + len(losses))})
    frame = frame.assign(
        beats_repeating=losses < repeat,
        repeat_loss=repeat,
        device=device,
        loader=loader,
        data=film,
        setting=device,
    )
    frame = frame.assign(
        size=size, round_trip=round_trip, frames=5000, speed=2.0, status="finished", recorded=True
    )
    return anomaly.described(
        frame.assign(machine=device, experiment="published", profile="own", rerun=0)
    )


def test_published_table_counts_seeds_as_by_hand(recorded, table):
    walk = recorded[(recorded.film == "walk") & recorded.full & recorded.round_trip]
    losses = walk.pivot_table(index="seed", columns="loader", values="final_loss").dropna()
    share, loss = table[
        (table.film == "walk") & (table.family == anomaly.PLANNED[0].family)
    ].itertuples()
    assert (share.seeds, loss.seeds) == (len(losses), len(losses))
    assert loss.worse == (losses.shared > losses.reused).sum()
    assert loss.ratio == pytest.approx((losses.shared / losses.reused).median())
    assert loss.margin == pytest.approx(losses.reused.std() / 4)
    beats = walk.pivot_table(
        index="seed", columns="loader", values="beats_repeating", aggfunc="first"
    )
    beats = beats.loc[losses.index]
    one_way, other_way = ((beats.reused > beats.shared).sum(), (beats.shared > beats.reused).sum())
    assert min(one_way, other_way) == 0
    assert share.p == pytest.approx(2.0 ** (1 - (one_way + other_way)))  # the exact sign test


def test_published_table_corrects_over_the_films_of_an_endpoint():
    rng = np.random.default_rng(1)
    parts = []
    for film in ("walk", "films/a.mp4", "films/b.mp4"):
        losses = rng.uniform(0.005, 0.02, 16)
        moved = losses + rng.normal(0, 0.004, 16)
        parts += [runs(losses=losses, film=film), runs(loader="shared", losses=moved, film=film)]
    table = companion.published_table(pd.concat(parts))
    for _, some in table.groupby("endpoint"):
        assert len(some) == 3
        smallest = some.p.idxmin()
        assert some.p_holm[smallest] == pytest.approx(min(1, 3 * some.p[smallest]))
    assert set(table.film) == {"walk", "a", "b"}
    assert table[table.film != "walk"].beat_blurred.isna().all()


# --- dose and response ----------------------------------------------------------------------------


def test_dose_cell_is_trained_like_gpulab_and_its_bias_is_that_of_the_first_window():
    found = gl.train(
        TRAINING, setting=CPU, seed=3, model_options={"size": "smoke"}, progress=False
    ).metrics
    for loader, name in (("copied", "copied"), ("reused", "shared")):
        run = gl.train(
            "prednet", setting=CPU, seed=3, profile="smoke", loader=loader, progress=False
        )
        assert run.record["summary"]["final_loss"] == found[name]
    windows = [
        companion.FirstWindow("prednet", loader, 3, "smoke").gradient(CPU)
        for loader in ("reused", "copied")
    ]
    assert found["bias_first"] == pytest.approx(
        windows[0].against(windows[1])["gradient_difference"], rel=1e-4
    )
    assert found["bias"] > 0


def test_rank_correlation_interval_keeps_its_level_at_twelve_pairs():
    generator = np.random.default_rng(0)
    for correlation in (0.0, 0.6, 0.9):
        rho = 6 / math.pi * math.asin(correlation / 2)  # Spearman's rho of normal pairs
        x = generator.standard_normal((600, 12))
        y = correlation * x + math.sqrt(1 - correlation**2) * generator.standard_normal((600, 12))
        covered = [low <= rho <= high for _, low, high in map(rank_correlation, x, y)]
        assert 0.92 < np.mean(covered) < 0.99


def test_rank_correlation_of_equal_ranks_is_not_certain_and_too_few_pairs_are_refused():
    rho, low, high = rank_correlation(CELLS, CELLS)
    assert rho == pytest.approx(1)
    assert 0.9 < low < high < 1
    assert rank_correlation(CELLS, -CELLS)[1:] == pytest.approx((-high, -low))
    with pytest.raises(gl.UsageError, match=r"at least 5 pairs.*got 4"):
        rank_correlation([1, 2, 3, 4], range(4))


def test_dose_cells_are_complete_and_geometric_means_over_seeds():
    runs = gl.recorded_runs("dose")
    assert (runs.status == "finished").all()
    cells = dose_cells(runs)
    assert cells.groupby("machine").size().to_dict() == {"AMD EPYC": 12, "NVIDIA H200": 12}
    assert (cells.bias > 0).all()
    one = runs[(runs.machine == "AMD EPYC") & (runs.window == 5) & (runs.speed == 2)]
    found = cells[(cells.machine == "AMD EPYC") & (cells.window == 5) & (cells.speed == 2)].iloc[0]
    assert found.ratio == pytest.approx(np.prod(one.shared / one.copied) ** (1 / found.seeds))
    assert found.bias == pytest.approx(one.bias.mean())


@pytest.mark.parametrize(
    ("ratios", "trend"),
    [
        ([1.3, 1.1, 0.9, 1.2, 1.1, 1.3, 1.0], "but no trend"),
        ([1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7], "and the loss rises with the error on A"),
        ([1.7, 1.6, 1.5, 1.4, 1.3, 1.2, 1.1], "and the loss falls with the error on A"),
    ],
)
def test_dose_title_follows_the_rank_correlation(ratios, trend):
    cells = pd.DataFrame({"machine": "A", "bias": np.arange(7) / 10, "ratio": ratios})
    first, second = companion.dose_title(cells).split("\n")
    assert f"in {sum(ratio > 1 for ratio in ratios)} of 7 combinations" in first
    assert second.startswith(trend)
