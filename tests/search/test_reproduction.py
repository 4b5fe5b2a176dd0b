import itertools
import math
import shutil

import numpy as np
import pandas as pd
import pytest
import torch

import gpulab as gl
from gpulab.search import trials
from gpulab.search.space import Space
from gpulab.search.trials import prune_reason
from gpulab.training.request import planned
from gpulab.training.workers import Workers

QUIET = {"progress": False}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def old(store):
    """A small autoencoder on real digits, from twelve seeds in float32."""
    given = {"model_options": {"hidden": [16, 4]}, "store": store, "keep_weights": False, **QUIET}
    for seed in range(12):
        gl.train("autoencoder", None, "cpu:threads=1", seed, "smoke", **given)
    return gl.store.runs(store)


def test_the_flag_is_the_answer_and_no_learning_rate_is(store, old, monkeypatch):
    asked = {"learning_rate": [5e-4], "precision": ["float32"]}
    found = gl.reproduce(old, asked, "cpu:threads=1,precision=bfloat16", store=store, **QUIET)
    assert found.best == {"precision": "float32"}
    assert found.confirmed
    assert found.best_setting == "cpu:threads=1,precision=float32"
    table = found.table
    flag = table.loc[found.chosen]
    assert (flag.distance, flag.difference, flag.seeds, flag.fresh_seeds, flag.fresh_alpha) == (1, 0, 6, 6, 0.025)
    assert found.smaller_left == 0
    runs = gl.store.runs(store)
    new = runs[(runs.setting == found.setting) & (runs.protocol == old.protocol[0])]
    (wanted,) = gl.verdict(pd.concat([old, new]), reference="cpu:threads=1").table.to_dict("records")
    for name in ("decision", "seeds", "difference", "low", "high", "p_equivalent"):
        assert table.loc[0, name] == wanted[name], "as judged without a search"
    assert (found.margin, wanted["decision"]) == (wanted["margin"], "different")
    monkeypatch.setattr(Workers, "train", None)
    again = gl.reproduce(old, asked, found.setting, store=store, **QUIET)
    pd.testing.assert_frame_equal(again.table, table)
    assert str(again) == str(found), "what is done is not trained again"


def test_what_can_be_changed_of_the_networks_of_gpulab(old, store):
    arguments, originals = trials.recorded_training(old, "final_loss")
    assert originals == {"learning_rate": 1e-3, "batch_size": 1}
    job = trials.changed_arguments(arguments, {"batch_size": 4, "learning_rate": 0.1})
    assert job["model_options"] == {"size": [28, 28], "hidden": [16, 4], "batch_size": 4}
    assert job["learning_rate"] == 0.1
    same = trials.changed_arguments(arguments, {}) | {"setting": "cpu:threads=1", "seed": 3}
    assert planned(**same).id == old.id[3], "with nothing changed it is the run that there was"
    with pytest.raises(gl.UsageError, match=r"'stride' can be changed; there are learning_rate, .*precision"):
        gl.reproduce(old, {"stride": [2]}, "cpu", store=store, **QUIET)


def moved(setting, seed, a=1.0, b=1, flag=False):
    """A loss without a training: away from the target's until a is 4, or a is 2 and b is 3."""
    noise = np.random.default_rng(seed).normal()
    right = a == 4.0 or (a == 2.0 and b == 3)
    if setting.threads == 2:  # the old one
        return noise
    return noise + (0.0 if right else 1.0 + 0.2 * np.random.default_rng(seed + 100).normal()) + 0.0 * flag


def note(log, *words):
    """What a function holds is a part of what it is; not what is in a file."""
    with log.open("a") as file:
        print(*words, file=file)


@pytest.fixture(scope="module")
def plain():
    return gl.seed_runs(moved, "cpu:threads=2", seeds=14, **QUIET)


@pytest.fixture
def search(plain, tmp_path):
    """Search for what gives the first six runs of `plain` again, by a function."""

    def search(space, train=moved, target=plain[:6], setting="cpu:threads=1", store=tmp_path, **options):
        return gl.reproduce(target, space, setting, train, store=store, **options, **QUIET)

    return search


def test_where_nothing_need_change_one_trial_says_so_and_where_nothing_helps_so_do_all(search):
    found = search({"a": [2.0]}, setting="cpu:threads=2")
    assert (found.best, found.confirmed, len(found.table)) == ({}, True, 1)
    found = search({"a": [2.0]})
    assert (found.best, found.best_setting, found.chosen, found.confirmed) == (None, None, None, False)
    assert (found.table.changes.tolist(), found.smaller_left) == (["nothing", "a 1 → 2"], 0)


def test_a_trial_that_raises_fails_alone(search):
    def brittle(setting, seed, a=1.0):
        if a == 2.0:
            raise KeyError(f"no {a}")
        return moved(setting, seed, a)

    found = search({"a": (0.7, 4)}, brittle, trials=6)
    assert found.table.a[:4].tolist() == [1.0, 0.7, 2.0, 4.0]
    assert (found.table.distance[4:] < 2).all(), "what is proposed is nearer than the best"
    assert (len(found.table), found.best, found.smaller_left) == (6, {"a": 4.0}, None)
    assert found.table.state.tolist() == ["finished", "finished", "failed", "finished", "finished", "finished"]
    assert "1 trial(s) failed; the first, a 1 → 2: KeyError" in found.finding


def test_a_combination_is_found_where_it_is_nearer_than_any_single_change(search):
    found = search({"a": [1.5, 2.0, 4.0], "b": [3]})
    assert found.best == {"a": 4.0}, "a combination of the same distance is not smaller"
    assert found.table.distance[found.chosen] == 3, "steps along the list"
    found = search({"a": [1.2, 1.5, 2.0, 3.0, 4.0], "b": [3]})
    assert found.best == {"a": 2.0, "b": 3}, "4 steps, where a = 4 alone takes 5"
    assert found.table.distance.tolist() == [0, 1, 1, 2, 3, 4, 5, 2, 3, 4]
    assert found.table[found.table.confirmed].a.tolist() == [4.0, 2.0]
    assert found.smaller_left == 0


ORIGINALS = {"a": 1.0, "b": 1, "rate": 1e-3}


def test_ranges_are_drawn_by_ratio_and_never_further_than_what_is_worth_a_try():
    ranges = Space({"rate": (1e-5, 1e-1), "b": (1, 1024)}, ORIGINALS, gl.Setting.parse("cpu"))
    singles = len(ranges.dimensions[0].values) + len(ranges.dimensions[1].values) - 1
    drawn = list(itertools.islice(ranges.candidates(lambda: math.inf), singles, 400))
    for name, low, high in (("rate", 1e-5, 1e-1), ("b", 1, 1024)):
        logs = np.log([point[name] for point in drawn])
        assert math.log(low) <= logs.min() < logs.max() <= math.log(high)
        assert np.mean(logs < math.log(low * high) / 2) == pytest.approx(0.5, abs=0.05), "half of them by ratio"
    assert {type(point["b"]) for point in drawn} == {int}
    near = list(ranges.candidates(lambda: 1.5))
    assert len(near) > 5
    assert max(map(ranges.distance, near)) < 1.5


def test_a_value_that_json_changes_stays_what_it_is(search):
    def train(setting, seed, kernel=(3, 3)):
        assert isinstance(kernel, tuple)
        return moved(setting, seed, 4.0 if kernel == (5, 5) else 1.0)

    for _ in range(2):  # searched, and read
        found = search({"kernel": [(5, 5)]}, train)
        assert found.best == {"kernel": (5, 5)}


def test_distances():
    offered = {
        "learning_rate": [1e-4, 4e-3],
        "momentum": [0.9, 0.5],
        "batch_size": (2, 64),
        "precision": ["float64", "float32"],
    }
    originals = {"learning_rate": 1e-3, "momentum": 0.0, "batch_size": 8}
    dimensions = {d.name: d for d in Space(offered, originals, gl.Setting.parse("cpu:precision=bfloat16")).dimensions}
    assert dimensions["learning_rate"].distance(1e-4) == pytest.approx(math.log2(10))
    assert dimensions["learning_rate"].distance(4e-3) == pytest.approx(2)
    assert [dimensions["momentum"].distance(value) for value in (0.0, 0.5, 0.9)] == [0, 1, 2]
    assert dimensions["batch_size"].distance(64) == 3
    assert [dimensions["precision"].distance(value) for value in ("bfloat16", "float32", "float64")] == [0, 1, 1]
    assert dimensions["batch_size"].values == (8, 2, 4, 16, 32, 64)


def test_pruning_spares_trainings_and_changes_no_answer(search, plain, monkeypatch):
    calls = {"pruned": 0, "finished": 0}
    for name in calls:

        def counted(setting, seed, a=1.0, flag=False, name=name):
            calls[name] += 1
            return moved(setting, seed, a, 1, flag)

        found = search({"a": [1.5, 4.0], "flag": [True]}, counted, plain)
        assert found.best == {"a": 4.0}
        assert found.confirmed
        assert set(found.table.state) == {name, "finished"}
        pruned = found.table[found.table.state == "pruned"]
        assert (pruned.seeds < 7).all()
        assert found.table.p_equivalent_holm.max() == 1
        monkeypatch.setattr(trials, "FIRST_LOOK", 8)  # more than there are
    assert calls["pruned"] < calls["finished"]


def test_a_change_that_makes_no_difference_on_average_is_not_pruned_away():
    """Pruning is by an interval at 99.9 %: of trials inside the margin it gives up nearly none."""
    shifts = np.random.default_rng(0).normal(0.0, 0.05, size=(2000, 6))
    pruned = 0
    for shift in shifts:
        row = {"difference": shift.mean(), "sd_of_differences": shift.std(ddof=1), "margin": 0.16}
        pruned += prune_reason(row | {"seeds": 6, "one_diverged": 0}, 10) != ""
    assert pruned <= 1


def test_luck_on_the_seeds_of_the_search_is_not_confirmed(search, plain):
    """Equal on the first seven seeds, which the search sees, and off by a standard deviation on the others."""

    def lucky(setting, seed, knob=0):
        luck = knob and seed < 7
        return moved(gl.Setting.parse("cpu:threads=2"), seed) + (0.0 if luck else 1.0) + 1e-3 * (-1) ** seed

    found = search({"knob": [1, 2, 3]}, lucky, plain, alpha=0.2)
    assert found.best == {"knob": 1}
    assert not found.confirmed
    assert found.table.fresh_alpha.tolist()[1:] == [0.2 / 2, 0.2 / 4, 0.2 / 8]
    assert (found.table.decision[1:] == "equivalent").all()
    assert (found.table.fresh_decision[1:] == "different").all()
    assert found.finding.startswith("Not confirmed: ")


@pytest.mark.parametrize("error", [ZeroDivisionError, np.linalg.LinAlgError, torch.linalg.LinAlgError])
def test_an_error_of_arithmetic_is_a_diverged_run(error):
    def train(setting, seed):
        raise error("no number")

    assert gl.seed_runs(train, seeds=2, **QUIET).status.tolist() == ["diverged", "diverged"]


@pytest.mark.parametrize("left", [0, 17])
def test_whatever_runs_a_kill_leaves_the_search_trains_the_others_and_ends_alike(search, tmp_path, left):
    log = tmp_path / "log"

    def train(setting, seed, a=1.0):
        note(log, a, seed)
        return moved(setting, seed, a)

    table, runs = search({"a": (0.9, 4.0)}, train, trials=6).table, sorted(tmp_path.glob("*-seed*"))
    trained = log.read_text().splitlines()
    assert len(runs) == len(trained) == len(set(trained)) > 20
    for run in runs[left:]:
        shutil.rmtree(run)
    pd.testing.assert_frame_equal(search({"a": (0.9, 4.0)}, train, trials=6).table, table)
    assert len(log.read_text().splitlines()) == 2 * len(runs) - left


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"search": {"a": (3.0, 2.0)}}, r"\(low, high\)"),
        ({"search": {"depth": [2]}}, "'depth' can be changed; there are a, b, flag, state, note, threads"),
        ({"target": lambda f: f[:1]}, r"target has 1 seed\(s\); at least 6"),
        ({"target": lambda f: f.assign(final_loss=f.final_loss.where(f.seed != 3))}, r"no finite final_loss"),
        ({"target": lambda f: f.assign(seed=0)}, "seed 0 more than once"),
    ],
)
def test_a_search_that_makes_no_sense_is_refused_before_anything_trains(wrong, named, plain, tmp_path):
    def never(setting, seed, a=1.0, b=1, flag=False, state=1, note="a"):
        raise AssertionError

    given = {"target": plain, "search": {"a": [2.0]}, "setting": "cpu:threads=1", "train": never} | wrong
    if callable(given["target"]):
        given["target"] = given["target"](plain)
    with pytest.raises(gl.UsageError, match=named):
        gl.reproduce(**given, store=tmp_path, **QUIET)
    assert list(tmp_path.iterdir()) == []


def test_diverging_runs_are_seen_early_and_counted_and_each_change_is_drawn(search, plain):
    def wild(setting, seed, a=1.0):
        return moved(setting, seed, a) if a == 4.0 else math.inf

    found = search({"a": [2.0, 4.0]}, wild, plain)
    assert (found.table.state.tolist(), found.best) == (["pruned", "pruned", "finished"], {"a": 4.0})
    assert found.table.diverged.tolist() == [3, 3, 0]
    assert found.table.note[0] == "3 of 3 seeds diverged"
    (axes,) = found.plot().figure.axes
    assert sum(len(points.get_offsets()) for points in axes.collections) == len(found.table)
