"""Sentences and figures of the microbenchmarks, for made-up times."""

import numpy as np
import pandas as pd
import pytest

import companion
from companion.microbenchmark_figures import DESCRIPTIONS, LOOKS, describe_inside, draw_inside

CPU = {"setting": "cpu", "machine": "this machine", "recorded": False, "spread": 0.01}
GPU = {"setting": "cuda:tf32=off", "machine": "A GPU", "recorded": True, "spread": 0.01}


def rows(benchmark, times, case="read", amount=1.0, **where):
    """Make a table with a row for each x and its seconds."""
    table = pd.DataFrame({"x": list(times), "seconds": list(times.values())})
    return table.assign(benchmark=benchmark, case=case, amount=amount, **where)


def test_describe_memory_compares_the_fastest_cache_with_the_largest_size():
    steps = rows("memory", {2**13: 1.0, 2**20: 2.0, 2**27: 5.0}, amount=1e9, **CPU)
    assert "5.0 times as fast" in describe_inside(steps, "memory")[0]
    flat = rows("memory", {2**13: 1.0, 2**27: 1.1}, amount=1e9, **CPU)
    assert "times as fast" not in describe_inside(flat, "memory")[0]


def test_describe_access_says_no_difference_where_there_is_none():
    slow = rows("access", {1: 1.0, 32: 4.0, 0: 9.0}, **GPU)
    assert "9.0 times as long" in describe_inside(slow, "access")[0]
    same = rows("access", {1: 1.0, 32: 1.0, 0: 1.1}, **GPU)
    assert "times as long" not in describe_inside(same, "access")[0]


def test_describe_launch_names_the_size_at_which_work_counts():
    times = rows("launch", {1: 2e-6, 1024: 2.2e-6, 4096: 8e-6}, case="one by one", **CPU)
    (words,) = describe_inside(times, "launch")
    assert "2.0 µs" in words
    assert "4,096 numbers" in words


def test_describe_blocks_compares_one_more_than_there_are_units():
    waves = {count: float(-(-count // 132)) for count in (1, 66, 132, 133, 264, 265, 528, 529)}
    (words,) = describe_inside(rows("blocks", waves, **GPU), "blocks")
    assert "1.00 times as long for 132 blocks" in words
    assert "2.00 times as long for 133" in words


@pytest.mark.parametrize(("mixed", "words"), [(2.0, "2.0 times as long"), (1.0, "no more")])
def test_describe_branch_compares_mixed_with_sorted(mixed, words):
    frame = pd.concat(
        [
            rows("branch", {0.0: 1.0, 0.5: mixed, 1.0: 1.0}, case="threads of each warp", **GPU),
            rows("branch", {0.0: 1.0, 0.5: 1.0, 1.0: 1.0}, case="whole warps", **GPU),
        ]
    )
    assert words in describe_inside(frame, "branch")[0]


def test_describe_threads_counts_those_for_nine_tenths():
    frame = rows("threads", {32: 1.0, 4096: 1.0, 65536: 1.0, 131072: 1.0}, case="a", **GPU)
    frame = frame.assign(amount=[1.0, 100.0, 950.0, 1000.0])
    assert "needs 65,536 threads" in describe_inside(frame, "threads")[0]
    assert "1,000 times that of 32 threads" in describe_inside(frame, "threads")[0]


def test_describe_inside_says_that_times_were_withheld():
    steps = rows("memory", {2**13: np.nan, 2**27: np.nan}, **CPU)
    (words,) = describe_inside(steps, "memory")
    assert words.startswith("This machine, CPU")
    assert "too busy" in words
    access = rows("access", {1: 1.0, 0: np.nan}, **CPU)
    assert "too busy" in describe_inside(access, "access")[0]


def test_draw_inside_leaves_out_what_was_withheld():
    steps = rows("memory", {2**13: 1.0, 2**20: np.nan, 2**27: 5.0}, **CPU)
    (line,) = draw_inside(steps, "memory").figure.axes[0].lines
    assert list(line.get_xdata()) == [2**13, 2**27]


def test_draw_inside_hollow_points_were_recorded():
    frame = pd.concat([rows("memory", {8192: 1.0, 16384: 2.0}, **where) for where in (CPU, GPU)])
    here, elsewhere = draw_inside(frame, "memory").figure.axes[0].lines
    assert here.get_markerfacecolor() == here.get_color()
    assert elsewhere.get_markerfacecolor() == "white"


def test_every_description_has_a_figure():
    assert set(DESCRIPTIONS) == set(LOOKS)


def test_draw_devices_draws_each_multiprocessor_and_names_it():
    cpu = {"name": "A CPU", "physical_cores": 2, "memory_bytes": 2**34}
    gpu = {"name": "A GPU", "sms": 20, "memory_bytes": 2**33, "l2_cache_bytes": 2**22}
    few = companion.draw_devices(cpu, gpu)
    many = companion.draw_devices(cpu, gpu | {"sms": 30})
    patches = [len(picture.figure.axes[0].patches) for picture in (few, many)]
    assert patches[1] - patches[0] == 3 * 10  # arithmetic, cache and control of ten more
    assert "20 SMs" in few.alt
    assert "4 MiB" in " ".join(text.get_text() for text in few.figure.axes[0].texts)


def test_inside_finding_shows_this_machine_and_folds_the_recorded_ones():
    recorded = companion.recorded_inside()
    here = recorded.assign(machine="this machine", recorded=False)
    limits = pd.DataFrame(
        {
            "operation": ["first layer", "gates"],
            "setting": "cuda:tf32=off",
            "intensity": [0.5, 400.0],
            "bound": ["memory", "arithmetic"],
        }
    )
    found = companion.inside_finding(pd.concat([here, recorded]), limits)
    page = str(found.words())
    visible, _, folded = page.partition("<details>")
    assert "This machine, GPU" in visible
    assert "Limited by memory on the GPU, no TF32: first layer (0.5 flop per byte)." in visible
    assert "(recorded)" not in visible
    assert "(recorded)" in folded
    for name in DESCRIPTIONS:
        (sentence,) = describe_inside(recorded[recorded.benchmark == name], name)
        words = sentence.partition(": ")[2]
        assert words[1:] in str(found)
