"""The microbenchmarks of notebook 01: what each probe does, and how times are taken."""

import numpy as np
import pytest
import torch

from companion import microbenchmarks
from companion.microbenchmarks import (
    CPU_BENCHMARKS,
    KERNELS,
    MEASURED,
    PROBES,
    allowed_benchmarks,
    blocks_to_try,
    measure_inside,
    summarise_rounds,
    time_in_rounds,
)
from gpulab.errors import UsageError
from gpulab.store import recorded


@pytest.fixture
def small(monkeypatch):
    """Use sizes for which the probes take milliseconds."""
    monkeypatch.setattr(microbenchmarks, "MEMORY_SIZES", {"cpu": [2**13, 2**15]})
    monkeypatch.setattr(microbenchmarks, "MEMORY_TRAFFIC", {"cpu": 2**16})
    monkeypatch.setattr(microbenchmarks, "MIN_SECONDS", 1e-5)


@pytest.mark.usefixtures("small")
def test_measure_inside_cpu():
    frame = measure_inside("cpu", ["memory", "launch"], rounds=2, progress=False)
    assert set(frame.benchmark) == {"memory", "launch"}
    assert (frame.seconds > 0).all()
    assert (frame.fastest <= frame.seconds).all()
    assert (frame.seconds <= frame.slowest).all()
    assert set(frame.setting) == {"cpu"}


def test_measure_inside_refuses_what_a_cpu_cannot_show():
    with pytest.raises(UsageError, match=r"expected some of memory.*got bus"):
        measure_inside("cpu", ["bus"])
    with pytest.raises(UsageError, match="rounds=1"):
        measure_inside("cpu", ["launch"], rounds=1)


@pytest.mark.usefixtures("small")
def test_measure_inside_restores_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        measure_inside("cpu", ["launch"], rounds=2, progress=False)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_allowed_benchmarks_are_all_known():
    assert set(allowed_benchmarks("cuda")) == set(MEASURED) == set(PROBES)
    assert set(CPU_BENCHMARKS) < set(MEASURED)
    assert set(allowed_benchmarks("mps")) < set(MEASURED)


@pytest.mark.usefixtures("small")
def test_memory_probe_reads_the_same_amount_at_each_size():
    for probe in PROBES["memory"]("cpu"):
        sums = probe.call()
        assert 4 * probe.amount / 4 == len(sums) * probe.x  # every row has the working set
        assert torch.equal(sums, torch.full_like(sums, probe.x / 4))


def test_access_probe_reads_each_place_once():
    probes = list(PROBES["access"]("cpu"))
    assert {probe.amount for probe in probes} == {2**20}
    assert [probe.x for probe in probes] == [1, 2, 4, 8, 16, 32, 0]
    for probe in probes:
        places = probe.call.args[2]
        assert len(torch.unique(places)) == probe.amount
        assert int(places.max()) < 2**25


def test_branch_probe_only_the_order_differs():
    probes = list(PROBES["branch"]("cpu"))
    for ordered, shuffled in zip(probes[::2], probes[1::2], strict=True):
        assert ordered.x == shuffled.x
        assert (
            len(ordered.call()) == len(shuffled.call()) == pytest.approx(ordered.x * 2**20, abs=1)
        )


def test_blocks_to_try_has_both_sides_of_each_wave():
    counts = blocks_to_try(132)
    assert {132, 133, 264, 265, 528, 529} <= set(counts)
    assert counts == sorted(set(counts))
    assert counts[0] == 1
    assert blocks_to_try(1) == [1, 2, 3, 4, 5]


@pytest.mark.usefixtures("small")
def test_blocks_probe_does_each_task(monkeypatch):
    done = []
    monkeypatch.setattr(microbenchmarks, "do_task", done.append)
    monkeypatch.setattr(microbenchmarks, "count_cores", lambda: 2)
    for probe in PROBES["blocks"]("cpu"):
        done.clear()
        probe.call()
        assert sorted(done) == list(range(int(probe.x)))


def test_time_in_rounds_takes_turns():
    calls = []
    times = time_in_rounds([lambda: calls.append("a"), lambda: calls.append("b")], "cpu", 3, 1e-9)
    assert [len(seconds) for seconds in times] == [3, 3]
    # Each function is first called twice; then they take turns.
    assert "".join(calls) == "aabb" + "ab" * 3


def test_summarise_rounds():
    found = summarise_rounds([3.0, 1.0, 2.0, 5.0, 4.0])
    assert (found["fastest"], found["lower"], found["seconds"]) == (1.0, 2.0, 3.0)
    assert (found["upper"], found["slowest"], found["rounds"]) == (4.0, 5.0, 5)


def test_kernels_compile_and_keep_their_branch():
    """NVRTC needs no GPU, so a kernel that does not compile is found on any machine with NVRTC."""
    compile_source = pytest.importorskip("torch.cuda._utils")._nvrtc_compile
    try:
        compiled = [
            compile_source(KERNELS, name, "80")
            for name in ("read_memory", "read_at", "take_branch")
        ]
    except (OSError, RuntimeError) as problem:
        if "nvrtc" not in str(problem).lower() or "error:" in str(problem):
            raise
        pytest.skip(f"needs NVRTC: {problem}")
    assert all(len(binary) > 1_000 for binary, _ in compiled)


def test_hash_of_read_at_is_a_permutation():
    """In random order each number is read once: the kernel's hash never maps two places to one."""
    place = np.arange(2**20, dtype=np.uint32)
    with np.errstate(over="ignore"):
        place = (place ^ (place >> np.uint32(16))) * np.uint32(0x85EBCA6B)
        place = (place ^ (place >> np.uint32(13))) * np.uint32(0xC2B2AE35)
        place ^= place >> np.uint32(16)
    assert len(np.unique(place)) == len(place)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA or AMD GPU")
def test_measure_inside_cuda():
    frame = measure_inside("cuda:tf32=off", rounds=2, progress=False)
    assert set(frame.benchmark) == set(MEASURED)
    branch = frame[(frame.benchmark == "branch") & (frame.case == "threads of each warp")]
    times = branch.set_index("x").seconds
    assert times[0.5] > 1.5 * times[1.0]  # the two sides are computed one after the other


@pytest.mark.usefixtures("small")
def test_recorded_measurements_have_the_columns():
    frame = measure_inside("cpu", ["launch"], rounds=2, progress=False)
    for document in recorded.read_measured("inside"):
        assert set(frame.columns) == set(document["rows"][0])
        assert document["hardware"]["cpu"]["name"]
        assert document["failed"] == {}
