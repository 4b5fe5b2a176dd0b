"""The registered runs of the published network: what the table, the figure and the page make of them."""

import numpy as np
import pandas as pd
import pytest

import gpulab as gl
from gpulab.companion import factorial
from gpulab.companion.learning import ALL, BEAT
from gpulab.stats.verdicts import p_text

REUSED, SHARED = "GPU, as published", "GPU, memory shared"


@pytest.fixture(scope="module")
def recorded():
    return gl.companion.published_runs()


def runs(device="cuda", loader="reused", losses=(), film="walk", size="160x120", round_trip=True, repeat=0.01):
    losses = np.array(losses, float)
    frame = pd.DataFrame({"final_loss": losses, "seed": range(100, 100 + len(losses))})
    frame = frame.assign(
        beats_repeating=losses < repeat, repeat_loss=repeat, device=device, loader=loader, data=film, setting=device
    )
    frame = frame.assign(size=size, round_trip=round_trip, frames=5000, speed=2.0, status="finished", recorded=True)
    return factorial.described(frame.assign(machine=device, experiment="published", profile="own", rerun=0))


def test_recorded_runs_are_the_registered_ones(recorded):
    assert set(recorded.seed) <= set(range(100, 132))
    assert set(recorded.frames) == {5000}
    assert set(recorded.window) == {20}
    assert set(recorded.channels) == {"3,48,96,192"}
    walk = recorded[(recorded.film == "walk") & recorded.full]
    assert set(walk.speed) == {2.0}
    for _, seeds in walk[walk.round_trip].groupby("condition").seed:
        assert sorted(seeds) == list(range(100, 100 + len(seeds)))  # in ascending order, none left out


def test_what_beats_repetition_is_what_the_losses_say(recorded):
    assert ((recorded.final_loss < recorded.repeat_loss) == recorded.beats_repeating).all()
    walk = recorded[recorded.film == "walk"]
    assert np.allclose(gl.companion.repeat_losses(walk[walk.full]), walk[walk.full].repeat_loss, rtol=1e-6)


def test_the_table_counts_seeds_by_hand(recorded):
    table = gl.companion.published_table(recorded)
    walk = recorded[(recorded.film == "walk") & recorded.full & recorded.round_trip]
    losses = walk.pivot_table(index="seed", columns="loader", values="final_loss").dropna()
    share, loss = table[(table.film == "walk") & (table.family == factorial.REGISTERED[0].family)].itertuples()
    assert (share.seeds, loss.seeds) == (len(losses), len(losses))
    assert loss.worse == (losses.shared > losses.reused).sum()
    assert loss.ratio == pytest.approx((losses.shared / losses.reused).median())
    assert loss.margin == pytest.approx(losses.reused.std() / 4)
    beats = walk.pivot_table(index="seed", columns="loader", values="beats_repeating", aggfunc="first").loc[
        losses.index
    ]
    one_way, other_way = ((beats.reused > beats.shared).sum(), (beats.shared > beats.reused).sum())
    if min(one_way, other_way) == 0:
        assert share.p == pytest.approx(2.0 ** (1 - (one_way + other_way)))  # the exact sign test


def test_a_factor_that_does_nothing_is_no_difference():
    rng = np.random.default_rng(0)
    losses = rng.uniform(0.005, 0.02, 16)
    same = pd.concat([runs(losses=losses), runs(loader="shared", losses=losses * rng.uniform(0.999, 1.001, 16))])
    table = gl.companion.published_table(same)
    assert list(table.decision) == ["inconclusive", "equivalent"]  # of 16 seeds up to 17 % could change sides


def test_the_correction_is_over_the_films_of_an_endpoint():
    rng = np.random.default_rng(1)
    parts = []
    for film in ("walk", "films/a.mp4", "films/b.mp4"):
        losses = rng.uniform(0.005, 0.02, 16)
        moved = losses + rng.normal(0, 0.004, 16)
        parts += [runs(losses=losses, film=film), runs(loader="shared", losses=moved, film=film)]
    table = gl.companion.published_table(pd.concat(parts))
    for _, some in table.groupby("endpoint"):
        assert len(some) == 3
        smallest = some.p.idxmin()
        assert some.p_holm[smallest] == pytest.approx(min(1, 3 * some.p[smallest]))
    assert set(table.film) == {"walk", "a", "b"}
    assert table[table.film != "walk"].beat_blurred.isna().all()
    page = gl.companion.published_page(pd.DataFrame(), table, pd.DataFrame())
    assert "".join(page.statistics()).count("a blurred copy") == 1
    assert "seeds on 3 films" in str(page)


def test_half_size_is_judged_apart():
    losses = np.linspace(0.008, 0.012, 16)
    cells = [("cpu", "reused", 2.0), ("cpu", "copied", 1.0), ("cuda", "reused", 1.0), ("cuda", "shared", 2.0)]
    frame = pd.concat(runs(device, loader, losses * k, size="80x56") for device, loader, k in cells)
    table = gl.companion.published_table(frame)
    assert set(table.family) == {"four cells"}
    of_loss = table[table.endpoint == factorial.LOSS].set_index(["condition", "reference"]).decision
    assert of_loss["CPU, frames copied", REUSED] == "equivalent"
    assert of_loss["CPU, as published", SHARED] == "equivalent"
    assert of_loss["CPU, as published", "CPU, frames copied"] == "different"


def test_in_short_has_every_registered_pair_and_those_that_go_the_other_way(recorded):
    table = gl.companion.published_table(recorded)
    rows = [("paper", 30, 0, "inconclusive"), ("paper", 32, 0, "different"), ("quick", 28, 0, "equivalent")]
    port = pd.DataFrame(rows, columns=["profile", "worse", "same_bits", "decision"])
    copies = port.assign(worse=0, same_bits=32)  # a GPU copies whatever the loader: there the memory does not differ
    port = pd.concat([port, copies]).assign(experiment="prednet", metric=ALL, seeds=32)
    longer = pd.DataFrame({"metric": [BEAT, ALL], "worse": [0, 15], "seeds": 16, "decision": "different"})
    longer = longer.assign(relative=1.0, beat=0, beat_reference=16)
    said = str(gl.companion.published_page(pd.DataFrame(), table, pd.DataFrame(), longer=longer))
    first, devices, size, *_ = factorial._short(table, longer, port)
    one_line = table[(table.endpoint == factorial.LOSS) & (table.family != "four cells")]
    cpu = table[(table.endpoint == factorial.LOSS) & (table.reference == "CPU, frames copied")]
    counts = [pd.concat([one_line, cpu])[name].sum() for name in ("worse", "seeds")]
    assert f"{counts[0]} of {counts[1]} of the authors' code, 15 of 16 of our port after 50,000 frames, " in first
    assert "62 of 64 of our port at the published size (of 2 speeds inconclusive at 1, different at 1)" in first
    assert "28 of 32 of our port at the quick size (of 1 speeds equivalent at 1)." in first
    assert devices.startswith("Where only the device differs")
    assert "on a GPU alone" in size
    full_on_cpu = table.assign(condition=table.condition.where(table["size"] != factorial.FULL, "CPU, as published"))
    assert "on a GPU alone" not in "".join(factorial._short(full_on_cpu, None, None))
    walk = table[(table.film == "walk") & (table["size"] == factorial.FULL)].iloc[0]
    assert f"Of those that do, {walk.beat_blurred:.0f} of {walk.beat_reference} (walk), " in said


def test_the_figure_and_the_page_show_what_is_there(recorded):
    picture = gl.companion.published_figure(recorded)
    assert len(picture.png()) > 5000
    table, trips = gl.companion.published_table(recorded), gl.companion.round_trips(recorded)
    window = gl.companion.first_window(["cpu"], profile="smoke")
    page = gl.companion.published_page(window, table, trips)
    said = str(page)
    statistics = "\n".join(page.statistics())
    row = table[table.endpoint == factorial.LOSS].iloc[0]
    assert f"{row.ratio:.2f} times as high (median), higher for {row.worse} of {row.seeds} seeds" in statistics
    for row in table[table.decision == "equivalent"].itertuples():
        assert f"({row.decision}, p = {p_text(row.p_equivalent)})" in statistics
    first = table[(table.family == "one line, on a GPU") & (table.endpoint == factorial.LOSS)]
    assert f"higher for {first.worse.sum()} of {first.seeds.sum()} seeds" in said
    assert "<b>Claimed.</b>" in page.html()
    assert ("to the CPU and back at each update" in said) == bool(len(trips))
