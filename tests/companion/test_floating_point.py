"""Notebook 02: how one bit grows, what GPUs draw, and each factor changed alone."""

import importlib
import os

import pandas as pd
import pytest
import torch

import companion
import gpulab as gl
from companion import floating_point as module
from companion.benchmarks import benchmark
from companion.floating_point import OTHER_SEED, THREADS, Factor, cuda_uniform, factors, measure, philox
from gpulab.store import runs as stores

record_factors = benchmark("record").record_factors
SMALL = {"profile": "smoke", "frames": 20, "progress": False}
GROWTH = {"profile": "smoke", "frames": 40, "progress": False}
NETS = {
    "prednet": gl.models.PredNet(channels=(3, 8, 16), size=(24, 32)),
    "autoencoder": gl.models.Autoencoder(hidden=(64, 16)),
}


# --- sums ------------------------------------------------------------------------------------------------


def test_named_sums_are_marked():
    picture = companion.sums_figure([-1, 0, 0, 2], pd.Series({"pairwise": 0, "sequential": -1, "dot": 0}))
    (axes,) = picture.figure.axes
    assert sorted(text.get_text().strip() for text in axes.texts) == ["pairwise, dot", "sequential"]
    assert "3 different sums of the same numbers; 50% of the orders" in picture.alt


# --- one bit ---------------------------------------------------------------------------------------------


def test_a_flipped_bit_begins_as_one_bit_and_nothing_changed_stays_nothing():
    table = companion.growth("prednet", seeds=2, **GROWTH)
    first = table[(table.change == "one bit of one weight") & (table.step == 0)]
    weights = sum(p.numel() for p in NETS["prednet"].parameters())
    assert first.changed.tolist() == pytest.approx([1 / weights] * 2)
    assert (table[table.change == "float64"].query("step == 0").distance == 0).all()
    assert (table[table.change == OTHER_SEED].distance > 1).all()
    table = companion.growth("autoencoder", seeds=1, changes={"nothing": {}}, **GROWTH)
    assert table.change.unique().tolist() == ["nothing"]
    assert (table[["distance", "changed", "ulps"]] == 0).all(axis=None)
    assert table.step.tolist() == [0, 20, 40]


# --- draws -----------------------------------------------------------------------------------------------


# Known answers of Random123 (Salmon et al. 2011), tests/kat_vectors, philox4x32 with ten rounds.
KNOWN = {
    "00000000 " * 6: "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    "ffffffff " * 6: "408f276d 41c83b0e a20bc7c6 6d5451fd",
    "243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0": "d16cfe09 94fdcceb 5001e420 24126ea1",
}


@pytest.mark.parametrize("given", KNOWN)
def test_philox_known_answers(given):
    *counter, high, low = (int(word, 16) for word in given.split())
    assert " ".join(f"{int(word):08x}" for word in philox(counter, (high, low))) == KNOWN[given]


def test_cuda_uniform_published_numbers():
    """`torch.manual_seed(0); torch.rand(12, device="cuda")`, as a test of TensorRT-LLM holds it, among others."""
    known = [0.3990, 0.5167, 0.0249, 0.9401, 0.9459, 0.7967, 0.4150, 0.8203, 0.2290, 0.9096, 0.1183, 0.0752]
    assert cuda_uniform(0, (3, 4), "T4").flatten().tolist() == pytest.approx(known, abs=5e-5)


@pytest.mark.parametrize(("card", "other"), [("T4", "H100"), ("V100", "RTX 4090"), ("H100", "H100")])
@pytest.mark.parametrize("count", [1, 40_961, 300_000])
def test_cuda_uniform_differs_from_where_a_thread_draws_again(card, other, count):
    equal = cuda_uniform(3, (count,), card) == cuda_uniform(3, (count,), other)
    same = count if THREADS[card] == THREADS[other] else min(count, THREADS[card], THREADS[other])
    assert equal[:same].all()
    assert equal[same:].sum() <= 2, "more than by chance"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA GPU")
@pytest.mark.parametrize("seed", [0, 2**40 + 7])
@pytest.mark.parametrize("size", [0.001, 1, 1.01, 3.5, 4.001, 13.7], ids="{} times the threads".format)
def test_cuda_uniform_on_this_gpu(seed, size, monkeypatch):
    card = torch.cuda.get_device_properties(0)
    threads = card.multi_processor_count * (card.max_threads_per_multi_processor // 256) * 256
    monkeypatch.setitem(THREADS, "this one", threads)
    shape = (2, int(threads * size) // 2)
    drawn = torch.rand(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))
    assert torch.equal(drawn.cpu(), cuda_uniform(seed, shape, "this one"))


# --- factors ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "STEP_SEEDS", 1)
        return companion.factor_table("prednet", seeds=2, store=tmp_path_factory.mktemp("factors"), **SMALL)


@pytest.fixture(scope="module")
def here(report):
    """What was changed on a CPU; where there is a GPU, some factors are changed there as well."""
    table = report.table
    return table[(table.source == "made here") & table.base.str.startswith("cpu")].set_index("factor")


def test_each_factor_changes_one_thing():
    for factor in factors():
        base, change = ({**side, **side.get("data_options", {})} for side in (factor.base, factor.change))
        apart = {name for name in base | change if base.get(name) != change.get(name)} - {"data_options"}
        assert len(apart) == 1, factor.name
        if apart == {"setting"} and factor.name != "the device itself":
            one, other = (vars(gl.Setting.parse(side["setting"])) for side in (factor.base, factor.change))
            assert sum(one[name] != other[name] for name in one) == 1, factor.name


def test_a_step_is_measured_against_float64(here):
    assert (here.base_error.between(1e-9, 1e-5)).all()
    tf32 = here.loc["TF32"]
    assert tf32.emulated
    assert tf32.step_error > 100 * tf32.base_error
    assert 9 <= tf32.gradient_bit <= 13
    assert here.loc["determinism", "step_moved"] == 0
    assert pd.isna(here.loc["determinism", "loss_bit"])


def test_the_effect_is_the_verdict_s(report, here):
    (verdict,) = (
        v for (source, _, base), v in report.verdicts.items() if (source, base) == ("made here", "cpu:threads=1")
    )
    for row in verdict.table.to_dict("records"):
        (mine,) = here[here.change == row["change"]].to_dict("records")
        assert mine["decision"] == row["decision"]
        assert mine["effect"] == pytest.approx(row["difference"] / verdict.between_seeds)
        assert mine["same_bits"] == row["same_bits"]
    assert here.loc["determinism", "same_bits"] == 2
    assert here.loc["one bit of one weight", "same_bits"] == 0
    assert set(verdict.table.change) >= {"cpu", "cpu:threads=1, flip 0"}, "one correction over all that share a base"


def test_what_is_kept_is_not_made_again_and_a_recording_is_read_as_recorded(monkeypatch, tmp_path):
    some = ("determinism", "TF32", "one bit of one weight")
    monkeypatch.setattr(Factor, "runs_here", lambda factor, **_: factor.name in some and factor.kind == "cpu")
    store = tmp_path / "runs"
    record_factors(tmp_path / "measured" / "factors-here.json", store, "autoencoder", seeds=2, **SMALL)
    (tmp_path / "studies").mkdir()
    stores.pack(store, tmp_path / "studies" / "factors-here.parquet")
    monkeypatch.setattr("gpulab.store.recorded.DATA", tmp_path)
    before = {file: file.stat().st_mtime_ns for file in store.glob("*/run.json")}
    report = companion.factor_table("autoencoder", seeds=2, store=store, **SMALL)
    assert before == {file: file.stat().st_mtime_ns for file in store.glob("*/run.json")} != {}
    mine, theirs = (
        report.table[report.table.source == source].set_index("factor") for source in ("made here", "recorded")
    )
    columns = ["step_moved", "step_error", "effect", "same_bits", "decision"]
    pd.testing.assert_frame_equal(mine[columns], theirs[columns])


# --- a setting that needs a process of its own -----------------------------------------------------------


LIGHT = """
import os

def variables(setting, names):
    if "abort" in names:
        os.abort()
    print("what a function prints is not its answer")
    return {name: os.environ.get(name) for name in names}
"""
NEEDY = "cpu:isa=avx2"


@pytest.fixture
def variables(tmp_path, monkeypatch):
    """A function of a module that is quickly imported, here and in another process."""
    (tmp_path / "light.py").write_text(LIGHT, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    return importlib.import_module("light").variables


def test_measure_in_a_process_of_its_own(variables):
    environment = gl.Setting.parse(NEEDY).environment()
    assert measure(variables, NEEDY, names=[*environment, "nothing"]) == {**environment, "nothing": None}
    assert "ATEN_CPU_CAPABILITY" not in os.environ
    assert measure(variables, "cpu", names=[*environment]) == dict.fromkeys(environment), "others are measured here"
    with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
        measure(variables, NEEDY, nonsense=1)
    with pytest.raises(gl.GpulabError, match=r"(?s)'cpu:isa=avx2': its process ended: .*SIGABRT"):
        measure(variables, NEEDY, names=["abort"])
