"""What is said about the speed of the two networks, also for numbers that contradict the usual
result.
"""

import re

import numpy as np
import pandas as pd
import pytest

from companion.training_speed import (
    compare_rates,
    describe_crossing,
    describe_training,
    draw_training,
    network_window,
    recorded_training,
)


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
    port, engine = "the usual PyTorch port", "gpulab, with its engine"
    frame = rates(
        {
            ("cpu:threads=1", port): 100.0,
            ("cpu:threads=2", port): 200.0,
            ("cuda:tf32=off", port): 100.0,
            ("cpu:threads=2", engine): 200.0,
            ("cuda:tf32=off", engine): 4000.0,
        }
    )
    (words,) = describe_training(frame)
    assert re.search(r"\b0\.5 times as fast.*\bslower\b.*\b20 times as fast\b.*\bgpulab\b", words)


def test_describe_training_leaves_out_what_was_withheld_or_has_no_other_side():
    port = "the usual PyTorch port"
    alone = rates({("cuda:tf32=off", port): 100.0})
    assert describe_training(alone) == []
    withheld = rates({("cpu", port): np.nan, ("cuda:tf32=off", port): 100.0})
    assert describe_training(withheld) == []


def test_recorded_training_has_the_usual_loop_slower_on_the_gpu_than_on_one_thread():
    frame = recorded_training().query("network == 'autoencoder' and way == 'the usual loop'")
    by_setting = frame.set_index("setting").per_second
    assert by_setting["cuda:tf32=off"] == pytest.approx(527.9, rel=1e-3)
    assert by_setting["cpu:threads=1"] == pytest.approx(1018.2, rel=1e-3)


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
