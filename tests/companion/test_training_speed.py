"""What is said about the speed of the two networks, also for numbers that contradict the usual
result.
"""

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from companion.benchmarks import benchmark
from companion.training_speed import (
    WAYS,
    compare_rates,
    describe_crossing,
    describe_peers,
    describe_training,
    draw_training,
    network_window,
    recorded_peers,
    recorded_training,
)
from gpulab.store import recorded

ROOT = Path(__file__).parents[2]
USUAL_LOOP, PORT = "the usual loop", "the usual PyTorch port"
ENGINE, PLAIN = "gpulab, with its engine", "gpulab, plain PyTorch"


@pytest.mark.parametrize(
    ("cpu", "gpu", "words"),
    [
        ([1, 1, 9, 9], [2, 2, 2, 2], r"CPU .*\bwidth 64\b.* GPU .*\b256\b"),
        ([1, 1, 1, 1], [2, 2, 2, 2], "^The CPU is faster at every width"),
        ([3, 3, 3, 3], [2, 2, 2, 2], "^The GPU is faster at every width"),
        ([1, 3, 1, 3], [2, 2, 2, 2], r"\b2 of 4 sizes\b.*\b3 times"),
        # A GPU that is faster only at small sizes: the title must not claim the usual order.
        ([3, 1, 1, 1], [2, 2, 2, 2], r"\b1 of 4 sizes\b.*\b(1 times|once)"),
        ([1, 1, 1, np.nan], [2, 2, 2, 2], "^The CPU is faster at every width"),
    ],
)
def test_describe_crossing_says_what_the_lines_do(cpu, gpu, words):
    seconds = pd.DataFrame({"CPU": cpu, "GPU": gpu}, index=[16, 64, 256, 1024], dtype=float)
    assert re.search(words, describe_crossing(seconds, "width"))


def test_describe_crossing_without_times():
    empty = pd.DataFrame({"CPU": [np.nan], "GPU": [1.0]}, index=[16])
    assert "No width" in describe_crossing(empty, "width")


def rates(values, network="prednet", size="quick"):
    """Make a table with a row for each (setting, way) and its rate."""
    rows = [
        {"setting": setting, "way": way, "per_second": rate, "lower": rate, "upper": rate}
        for (setting, way), rate in values.items()
    ]
    table = pd.DataFrame(rows)
    return table.assign(network=network, size=size, machine="M", recorded=True)


def test_describe_training_compares_each_way_with_the_fastest_cpu():
    frame = rates(
        {
            ("cpu:threads=1", PORT): 100.0,
            ("cpu:threads=2", PORT): 200.0,
            ("cuda:tf32=off", PORT): 100.0,
            ("cpu:threads=2", ENGINE): 200.0,
            ("cuda:tf32=off", ENGINE): 4000.0,
        }
    )
    (words,) = describe_training(frame)
    assert re.search(r"\b0\.5 times as fast.*\bslower\b.*\b20 times as fast\b.*\bgpulab\b", words)


def test_describe_training_leaves_out_what_was_withheld_or_has_no_other_side():
    alone = rates({("cuda:tf32=off", PORT): 100.0})
    assert describe_training(alone) == []
    withheld = rates({("cpu", PORT): np.nan, ("cuda:tf32=off", PORT): 100.0})
    assert describe_training(withheld) == []


def test_recorded_training_has_the_usual_loop_slower_on_the_gpu_than_on_one_thread():
    frame = recorded_training().query("network == 'autoencoder' and way == @USUAL_LOOP")
    by_setting = frame.set_index("setting").per_second
    assert by_setting["cuda:tf32=off"] < by_setting["cpu:threads=1"]


def test_recorded_training_takes_each_case_from_one_record():
    """A machine that was measured twice is shown once, as measured beside the strongest others."""
    frame = recorded_training()
    case = ["network", "size", "setting", "machine"]
    assert not frame.duplicated([*case, "way"]).any()
    peers = recorded_peers().dropna(subset="per_second")
    both = frame.merge(peers[case].drop_duplicates())
    columns = [*case, "way", "per_second", "lower", "upper"]
    ordered = [rows[columns].sort_values(columns, ignore_index=True) for rows in (both, peers)]
    pd.testing.assert_frame_equal(*ordered)
    older = {row["entrant"] for row in recorded.read_measured("prednet")[-1]["rows"]}
    small = frame.query("size == 'quick' and setting == 'cuda:tf32=on'")
    assert set(small.way) == {WAYS[name] for name in older}, "measured only without them"


def test_recorded_ways_are_in_words():
    assert set(recorded_peers().way) | set(recorded_training().way) <= set(WAYS.values())


def peers_of(values, failures=(), record=0, setting="cuda:tf32=off"):
    """Make a table with the rate of each way at the small size, and with the ways that failed."""
    frame = rates({(setting, way): rate for way, rate in values.items()})
    frame = frame.assign(lower=0.99 * frame.per_second, upper=1.01 * frame.per_second, failure="")
    failed = frame.iloc[: len(failures)].assign(
        way=list(failures), per_second=np.nan, failure="an error"
    )
    return pd.concat([frame, failed], ignore_index=True).assign(record=record)


def test_describe_peers_names_the_fastest_and_compares_with_the_strongest():
    (ahead,) = describe_peers(peers_of({PORT: 10.0, "JAX, jit": 50.0, ENGINE: 100.0}))
    assert f"the fastest is {ENGINE} (100 frames/s)" in ahead
    assert f"2 times as fast as JAX, jit and 10 times as fast as {PORT}." in ahead
    (behind,) = describe_peers(peers_of({PORT: 10.0, "JAX, jit": 50.0, ENGINE: 40.0}))
    assert "the fastest is JAX, jit (50 frames/s)" in behind
    assert "gpulab's engine is 0.8 times as fast as JAX, jit" in behind
    (port,) = describe_peers(peers_of({PORT: 60.0, "JAX, jit": 50.0, ENGINE: 40.0}))
    assert "JAX" not in port
    assert port.count(PORT) == 2
    (plain,) = describe_peers(peers_of({PORT: 60.0, PLAIN: 90.0, ENGINE: 80.0}))
    assert f"the fastest is {PLAIN} (90 frames/s)" in plain
    assert f"gpulab's engine is 1.33 times as fast as {PORT}" in plain


def test_describe_peers_names_no_winner_if_rounds_overlap():
    (words,) = describe_peers(peers_of({"JAX, jit": 100.0, ENGINE: 101.0, PORT: 10.0}))
    assert f"overlap: {ENGINE} (101 frames/s) and JAX, jit (100 frames/s)." in words
    assert "the fastest is" not in words


def test_describe_peers_compares_within_a_record():
    records = [
        peers_of({"JAX, jit": 100.0, ENGINE: 50.0}, record=0),
        peers_of({"JAX, jit": 10.0, ENGINE: 20.0}, record=1),
    ]
    first, second = describe_peers(pd.concat(records))
    assert "0.5 times" in first
    assert "2 times" in second


def test_describe_peers_says_what_failed_and_nothing_without_the_engine_or_others():
    lines = describe_peers(peers_of({PORT: 10.0, ENGINE: 100.0}, failures=["JAX, jit"]))
    assert len(lines) == 2
    assert re.search("no TF32.*JAX, jit failed with an error", lines[1])
    assert describe_peers(peers_of({PORT: 10.0, PLAIN: 20.0})) == []
    assert describe_peers(peers_of({PLAIN: 20.0, ENGINE: 100.0})) == []


def test_recorded_peers_are_described_by_their_own_numbers():
    frame = recorded_peers()
    lines = describe_peers(frame)
    measured = frame.dropna(subset="per_second")
    case = ["record", "network", "size", "setting", "machine"]
    groups = [rows for _, rows in measured.groupby(case, sort=False)]
    failed = frame[frame.failure != ""]
    assert len(lines) == len(groups) + len(failed.drop_duplicates(["network", "size", "way"]))
    for line, rows in zip(lines, groups, strict=False):
        fastest = rows.loc[rows.per_second.idxmax()]
        assert f"the fastest is {fastest.way} ({fastest.per_second:,.0f} " in line
        others = rows[~rows.way.isin([ENGINE, PLAIN])].set_index("way").per_second
        ratio = rows.set_index("way").per_second[ENGINE] / others.max()
        assert f"{ratio:.3g} times as fast as {others.idxmax()}" in line


# --- the pages of benchmarks ----------------------------------------------------------------------


@pytest.mark.parametrize("network", ["autoencoder", "prednet"])
def test_pages_show_the_records(network):
    script = benchmark("speed/training_speed")
    page = (ROOT / "benchmarks" / "results" / f"{network}.md").read_text(encoding="utf-8")
    parts = {
        "measured": script.speeds(network, recorded.read_measured(network)),
        "peers": script.peers(network, recorded.read_measured("peers")),
    }
    for name, part in parts.items():
        assert f"<!-- {name} -->\n{part}\n<!-- /{name} -->" in page


def test_overview_of_benchmarks_states_the_ratios_to_the_strongest_other():
    text = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    rows = {
        network: next(line for line in text.splitlines() if f"race {network} " in line)
        for network in ("autoencoder", "prednet")
    }
    case = ["record", "network", "size", "setting", "machine"]
    for (_, network, *_), found in recorded_peers().groupby(case):
        speed = found.set_index("way").per_second
        strongest = speed.drop([ENGINE, PLAIN]).idxmax()
        assert ("as fast as JAX" if "JAX" in strongest else "as fast as a port") in rows[network]
        assert f"{speed[ENGINE] / speed[strongest]:.2f}" in rows[network]


def test_table_of_peers_has_ratios_to_gpulab_and_what_failed():
    script = benchmark("speed/training_speed")
    row = {"network": "prednet", "setting": "cuda", "size": "quick", "flop": 1e9, "memory": 0}
    speeds = {"gpulab": 40.0, "JAX": 20.0, "leido": 10.0}
    rows = [
        row | {"entrant": name, "per_second": rate, "quartiles": [rate, rate]}
        for name, rate in speeds.items()
    ]
    failed = {"quick cuda leido, compiled": "an error"}
    record = {"machine": "M", "peak": {"cuda": 1e12}, "rows": rows, "failed": failed}
    other = {"machine": "N", "rows": [{"network": "autoencoder"}], "failed": {}}
    table = script.peers("prednet", [record, other])
    heads, _, *lines = (line.split(" | ") for line in table.splitlines()[:5])
    ratios = heads.index("× leido"), heads.index("× gpulab")
    assert [[line[ratio] for ratio in ratios] for line in lines] == [
        ["4.00", "1.00"],
        ["2.00", "0.50"],
        ["1.00", "0.25"],
    ]
    assert "leido, compiled failed: an error" in table
    assert "| N |" not in table


def test_compare_rates_near_one():
    assert "about as fast" in compare_rates(0.95)
    assert "slower" in compare_rates(0.85)


def test_draw_training_has_a_panel_for_each_network_and_a_point_for_each_row():
    frame = recorded_training()
    picture = draw_training(frame)
    assert len(picture.figure.axes) == len(frame.groupby(["network", "size"]))
    points = sum(
        len(points.get_offsets())
        for axes in picture.figure.axes
        for points in axes.collections
        if hasattr(points, "get_sizes") and len(points.get_sizes())
    )
    assert points == len(frame)


def test_network_window_trains_on(monkeypatch):
    """The second call continues the training with the state of the first."""
    from companion import training_speed

    seen = []

    class Engine:
        def train_window(self, pixels, state):
            seen.append((pixels.shape, state))
            return np.zeros(1), len(seen)

    monkeypatch.setattr(training_speed, "AutogradEngine", lambda *_: Engine())
    train = network_window("autoencoder", "cpu", fast=False)
    train()
    train()
    assert seen == [((20, 1, 28, 28), None), ((20, 1, 28, 28), 1)]
