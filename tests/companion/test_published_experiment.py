"""The registered runs of the published network, dose and response: what tables, figures and the page make of them."""

import itertools
import math

import numpy as np
import pandas as pd
import pytest

import companion
import gpulab as gl
from companion import anomaly
from companion.anomaly import dose_finding, dose_response, dose_table, rank_correlation
from companion.benchmarks import SCRIPTS, benchmark
from companion.learning import ALL, BEAT
from gpulab.stats.verdicts import p_text

REUSED, SHARED = "GPU, as published", "GPU, memory shared"
CPU = "cpu:threads=1"
TRAINING = f"{SCRIPTS}/dose_training.py:bias_and_loss"
CELLS = np.arange(12)


@pytest.fixture(scope="module")
def recorded():
    return companion.published_runs()


@pytest.fixture(scope="module")
def table(recorded):
    return companion.published_table(recorded)


@pytest.fixture(scope="module")
def longer():
    table = pd.DataFrame({"metric": [BEAT, ALL], "worse": [0, 15], "seeds": 16, "decision": "different"})
    return table.assign(relative=1.0, beat=0, beat_reference=16)


def runs(device="cuda", loader="reused", losses=(), film="walk", size="160x120", round_trip=True, repeat=0.01):
    losses = np.array(losses, float)
    frame = pd.DataFrame({"final_loss": losses, "seed": range(100, 100 + len(losses))})
    frame = frame.assign(
        beats_repeating=losses < repeat, repeat_loss=repeat, device=device, loader=loader, data=film, setting=device
    )
    frame = frame.assign(size=size, round_trip=round_trip, frames=5000, speed=2.0, status="finished", recorded=True)
    return anomaly.described(frame.assign(machine=device, experiment="published", profile="own", rerun=0))


def test_recorded_runs_are_the_registered_ones(recorded):
    assert set(recorded.seed) <= set(range(100, 132))
    assert set(recorded.frames) == {5000}
    assert set(recorded.window) == {20}
    assert set(recorded.channels) == {"3,48,96,192"}
    walk = recorded[(recorded.film == "walk") & recorded.full]
    assert set(walk.speed) == {2.0}
    for _, seeds in walk[walk.round_trip].groupby("condition").seed:
        assert sorted(seeds) == list(range(100, 100 + len(seeds)))  # in ascending order, none left out
    assert ((recorded.final_loss < recorded.repeat_loss) == recorded.beats_repeating).all()
    assert np.allclose(companion.repeat_losses(walk), walk.repeat_loss, rtol=1e-6)


def test_the_table_counts_seeds_by_hand(recorded, table):
    walk = recorded[(recorded.film == "walk") & recorded.full & recorded.round_trip]
    losses = walk.pivot_table(index="seed", columns="loader", values="final_loss").dropna()
    share, loss = table[(table.film == "walk") & (table.family == anomaly.REGISTERED[0].family)].itertuples()
    assert (share.seeds, loss.seeds) == (len(losses), len(losses))
    assert loss.worse == (losses.shared > losses.reused).sum()
    assert loss.ratio == pytest.approx((losses.shared / losses.reused).median())
    assert loss.margin == pytest.approx(losses.reused.std() / 4)
    beats = walk.pivot_table(index="seed", columns="loader", values="beats_repeating", aggfunc="first")
    beats = beats.loc[losses.index]
    one_way, other_way = ((beats.reused > beats.shared).sum(), (beats.shared > beats.reused).sum())
    assert min(one_way, other_way) == 0
    assert share.p == pytest.approx(2.0 ** (1 - (one_way + other_way)))  # the exact sign test


def test_the_correction_is_over_the_films_of_an_endpoint():
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
    assert "seeds on 3 films" in anomaly._over_films(table)


def test_half_size_is_judged_apart():
    losses = np.linspace(0.008, 0.012, 16)
    cells = [("cpu", "reused", 2.0), ("cpu", "copied", 1.0), ("cuda", "reused", 1.0), ("cuda", "shared", 2.0)]
    frame = pd.concat(runs(device, loader, losses * k, size="80x56") for device, loader, k in cells)
    table = companion.published_table(frame)
    assert set(table.family) == {"four cells"}
    of_loss = table[table.endpoint == anomaly.LOSS].set_index(["condition", "reference"]).decision
    assert of_loss["CPU, frames copied", REUSED] == "equivalent"
    assert of_loss["CPU, as published", SHARED] == "equivalent"
    assert of_loss["CPU, as published", "CPU, frames copied"] == "different"


def test_in_short_has_every_registered_pair_and_those_that_go_the_other_way(table, longer):
    rows = [("paper", 30, 0, "inconclusive"), ("paper", 32, 0, "different"), ("quick", 28, 0, "equivalent")]
    port = pd.DataFrame(rows, columns=["profile", "worse", "same_bits", "decision"])
    copies = port.assign(worse=0, same_bits=32)  # a GPU copies whatever the loader: there the memory does not differ
    port = pd.concat([port, copies]).assign(experiment="prednet", metric=ALL, seeds=32)
    first, devices, size = anomaly._short(table, longer, port)
    pairs = (table.family != "four cells") | (table.reference == "CPU, frames copied")
    worse, seeds = table[pairs & (table.endpoint == anomaly.LOSS)][["worse", "seeds"]].sum()
    assert f"{worse} of {seeds} of the authors' code, 15 of 16 of our port after 50,000 frames, " in first
    assert "62 of 64 of our port at the published size (of 2 speeds inconclusive at 1, different at 1)" in first
    assert "28 of 32 of our port at the quick size (of 1 speeds equivalent at 1)." in first
    assert devices.startswith("Where only the device differs")
    assert "on a GPU alone" in size
    full_on_cpu = table.assign(condition=table.condition.where(table["size"] != anomaly.FULL, "CPU, as published"))
    assert "on a GPU alone" not in "".join(anomaly._short(full_on_cpu, longer, port))


def test_the_figure_and_the_page_show_what_is_there(recorded, table, longer):
    first = table[(table.family == "one line, on a GPU") & (table.endpoint == anomaly.LOSS)]
    assert f"ends worse in {first.worse.sum()} of {first.seeds.sum()} pairs" in companion.published_figure(recorded).alt
    trips, window = companion.round_trips(recorded), companion.first_window(["cpu"], profile="smoke")
    quick = "loader != 'window' and profile == 'quick' and device == 'cpu'"
    port = companion.anomaly_table(gl.recorded_runs().query(quick))
    dose, windows = companion.recorded_dose(), companion.recorded_windows()
    page = companion.published_page(window, table, trips, dose, windows, longer, port)
    said, statistics = str(page), "\n".join(page.statistics())
    row = table[table.endpoint == anomaly.LOSS].iloc[0]
    assert f"{row.ratio:.2f} times as high (median), higher for {row.worse} of {row.seeds} seeds" in statistics
    for row in table[table.decision == "equivalent"].itertuples():
        assert f"({row.decision}, p = {p_text(row.p_equivalent)})" in statistics
    assert f"higher for {first.worse.sum()} of {first.seeds.sum()} seeds" in said
    walk = table[(table.film == "walk") & (table["size"] == anomaly.FULL)].iloc[0]
    assert f"Of those that do, {walk.beat_blurred:.0f} of {walk.beat_reference} (walk), " in said
    assert f"the losses of {trips.windows.sum():,} windows have the same bits ({trips.seeds.sum()} pairs" in said


# --- dose and response -----------------------------------------------------------------------------------


def cells(ratios):
    """Runs of three seeds in twelve cells, the more biased the later; ratios of shape (12,) or (12, 3)."""
    rows = []
    ratios = np.broadcast_to(np.reshape(ratios, (12, -1)), (12, 3))
    for place, (window, speed) in enumerate(itertools.product((2, 5, 10, 20), (1.0, 2.0, 4.0))):
        for seed, ratio in enumerate(ratios[place]):
            row = {"window": window, "speed": speed, "seed": seed, "ratio": ratio}
            rows.append(row | {"bias": 0.05 * (1 + place) + 0.001 * seed})
    return pd.DataFrame(rows).assign(size="smoke", setting=CPU, machine="m", recorded=False)


def test_a_cell_is_trained_as_gpulab_trains_and_its_bias_is_that_of_the_first_window():
    found = gl.train(TRAINING, setting=CPU, seed=3, model_options={"size": "smoke"}, progress=False).metrics
    for loader, name in (("copied", "copied"), ("reused", "shared")):
        run = gl.train("prednet", setting=CPU, seed=3, profile="smoke", loader=loader, progress=False)
        assert run.record["summary"]["final_loss"] == found[name]
    (window,) = companion.first_window([CPU], "prednet", seed=3, profile="smoke").itertuples()
    assert found["bias_first"] == pytest.approx(window.gradient_difference, rel=1e-4)
    assert found["bias"] > 0


def test_a_window_of_two_frames_has_one_frame_to_come_and_nothing_to_overwrite_at_first():
    with gl.setting(CPU):
        found = benchmark("dose_training").bias_and_loss(0, gl.Setting.parse(CPU), window=2, size="smoke")
    assert found["bias_first"] == 0
    assert found["bias"] > 0, "later windows begin with the last frame of the one before"
    assert found["shared"] != found["copied"]


def test_the_interval_of_a_rank_correlation_keeps_its_level_at_twelve_pairs():
    generator = np.random.default_rng(0)
    for correlation in (0.0, 0.6, 0.9):
        rho = 6 / math.pi * math.asin(correlation / 2)  # Spearman's of normal pairs
        x = generator.standard_normal((600, 12))
        y = correlation * x + math.sqrt(1 - correlation**2) * generator.standard_normal((600, 12))
        covered = [low <= rho <= high for _, low, high in map(rank_correlation, x, y)]
        assert 0.92 < np.mean(covered) < 0.99


def test_ranks_that_all_agree_are_not_taken_for_certainty_and_too_few_are_refused():
    rho, low, high = rank_correlation(CELLS, CELLS)
    assert rho == pytest.approx(1)
    assert 0.9 < low < high < 1
    assert rank_correlation(CELLS, -CELLS)[1:] == pytest.approx((-high, -low))
    for x in ([1, 2, 3, 4], [1] * 6):
        with pytest.raises(gl.UsageError, match=f"{len(x)} pairs"):
            rank_correlation(x, range(len(x)))


@pytest.mark.parametrize(
    ("ratios", "worse", "rho", "said"),
    [
        (0.95 + CELLS / 10, 11, "+1.00", "the loss is higher."),
        (3 - CELLS / 10, 12, "-1.00", "the loss is lower."),
        (1.01 + CELLS * 5 % 12 / 10, 12, "+0.22", "no trend is shown"),
    ],
)
def test_finding_and_figure_follow_from_the_cells(ratios, worse, rho, said):
    frame = cells(ratios)
    finding = dose_finding(frame)
    assert said in str(finding)
    assert "3 seeds in 12 cells" in finding.statistics()[0]
    assert dose_response(frame).figure._suptitle.get_text() == (
        f"Sharing memory ended worse in {worse} of 12 cells; rank correlation with the bias {rho}"
    )


def test_cells_are_counted_whole_and_by_the_geometric_mean_of_their_seeds():
    table = dose_table(cells([[0.5, 1.0, 4.0]] * 12))
    assert len(table) == 12
    assert table.ratio.to_numpy() == pytest.approx(2 ** (1 / 3))
    assert table.bias[0] == pytest.approx(0.051)
    runs = companion.recorded_dose()
    assert (runs.status == "finished").all()
    for _, recorded in dose_table(runs).groupby(["size", "setting"]):
        assert len(recorded) == 12
        assert recorded.seeds.nunique() == 1
        assert (recorded.bias > 0).all()
