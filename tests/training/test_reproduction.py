import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pandas as pd
import pytest
import torch

import gpulab as gl
from gpulab.training import objective, reproduction, search
from gpulab.training.plan import planned_id
from gpulab.training.reproduction import WITHIN

NEW = "cpu:threads=1,precision=bfloat16"
RATES = {"learning_rate": [5e-4, 2e-3]}
FLAG = {"precision": ["float32"]}
QUIET = {"progress": False}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def old(store):
    """The autoencoder on real digits, from twelve seeds in float32."""
    return gl.Experiment("autoencoder", ["cpu:threads=1"], 12, "smoke", store).run(progress=False)


@pytest.fixture(scope="module")
def by_flag(store, old):
    return gl.reproduce(old, RATES | FLAG, NEW, store=store, **QUIET)


# --- gpulab's own networks, trained again from their records --------------------------------------------


def test_the_flag_is_the_answer_and_no_learning_rate_is(by_flag):
    assert by_flag.best == {"precision": "float32"}
    assert by_flag.confirmed
    assert by_flag.best_setting == "cpu:threads=1,precision=float32"
    table = by_flag.table
    assert table.changes[0] == "nothing"
    assert table.decision[0] == "different"
    assert table[table.confirmed].changes.tolist() == ["precision bfloat16 → float32"]
    flag = table.loc[by_flag.chosen]
    assert (flag.distance, flag.difference, flag.seeds, flag.fresh_seeds, flag.fresh_alpha) == (1, 0, 6, 6, 0.025)
    assert by_flag.smaller_left == 0
    assert by_flag.fresh_verdict.table.seeds.tolist() == [6]


def test_a_row_is_what_the_verdict_says_of_those_runs(by_flag, old, store):
    """The table, against runs of the store that are trained and judged without a search."""
    new = gl.Experiment("autoencoder", [NEW], range(6), "smoke", store).run(progress=False)
    seen = gl.verdict(pd.concat([old, new]), reference="cpu:threads=1")
    (wanted,) = seen.table.to_dict("records")
    row = by_flag.table.loc[0]
    for name in ("decision", "seeds", "difference", "low", "high", "p_equivalent"):
        assert row[name] == wanted[name], name
    assert by_flag.margin == wanted["margin"]


def test_nothing_works(store, old):
    found = gl.reproduce(old, RATES, NEW, store=store, **QUIET)
    assert (found.best, found.best_setting, found.chosen, found.confirmed) == (None, None, None, False)
    assert found.smaller_left == 0
    assert found.table.changes.tolist() == ["nothing", "learning_rate 0.001 → 0.0005", "learning_rate 0.001 → 0.002"]
    assert not found.table.decision.isin(WITHIN).any()
    assert found.finding.startswith("No change tried gives the losses of cpu:threads=1 under " + NEW)
    assert "none in the space left untried" in found.finding


def test_where_nothing_need_change_one_trial_says_so(store, old):
    found = gl.reproduce(old, RATES, "cpu:threads=1,deterministic=on", store=store, **QUIET)
    assert (found.best, found.confirmed, len(found.table)) == ({}, True, 1)
    assert "Nothing need change" in str(found)


def test_a_search_that_is_done_is_read(store, old, by_flag, monkeypatch):
    monkeypatch.setattr(reproduction.Trainings, "losses", None)
    again = gl.reproduce(old, RATES | FLAG, NEW, store=store, **QUIET)
    pd.testing.assert_frame_equal(again.table, by_flag.table)
    assert str(again) == str(by_flag)


# --- networks of one's own ------------------------------------------------------------------------------


def fit(setting, seed, learning_rate=0.1, momentum=0.0, batch_size=8, steps=40):
    """Least squares on noisy lines: the loss of every step."""
    x = torch.linspace(-1, 1, 64, dtype=setting.dtype)[:, None]
    y = 2 * x + 0.3 * torch.randn(64, 1).to(setting.dtype)
    net = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), learning_rate, momentum)
    for step in range(steps):
        some = slice(step * batch_size % 64, step * batch_size % 64 + batch_size)
        loss = (net(x[some]) - y[some]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


def slow(setting, seed, learning_rate=0.01, batch_size=8):
    """The same with a learning rate that is too small."""
    return fit(setting, seed, learning_rate, batch_size=batch_size)


def moved(setting, seed, a=1.0, b=1, flag=False):
    """A loss without a training: away from the target's until a is 4, or a is 2 and b is 3."""
    noise = np.random.default_rng(seed).normal()
    right = a == 4.0 or (a == 2.0 and b == 3)
    if setting.threads == 2:  # the old one
        return noise
    return noise + (0.0 if right else 1.0 + 0.2 * np.random.default_rng(seed + 100).normal()) + 0.0 * flag


@pytest.fixture(scope="module")
def lines():
    return gl.seed_runs(fit, "cpu:threads=1", seeds=12, **QUIET)


@pytest.fixture(scope="module")
def plain():
    return gl.seed_runs(moved, "cpu:threads=2", seeds=20, **QUIET)


def test_seed_runs_are_the_runs_that_a_verdict_takes(lines):
    assert lines.columns.tolist() == ["setting", "seed", "status", "final_loss"]
    assert set(lines.status) == {"finished"}
    with gl.setting("cpu:threads=1"):
        torch.manual_seed(5)
        losses = list(fit(gl.Setting.parse("cpu:threads=1"), 5))
    assert lines.final_loss[5] == pytest.approx(math.fsum(losses[-8:]) / 8, rel=1e-12)
    fast = gl.seed_runs(fit, "cpu:threads=1", seeds=[3, 1], learning_rate=0.2, **QUIET)
    assert fast.seed.tolist() == [3, 1]
    assert fast.final_loss[1] != lines.final_loss[1]


def test_seed_runs_leave_the_random_numbers_alone():
    torch.manual_seed(1)
    wanted = torch.rand(1)
    torch.manual_seed(1)
    gl.seed_runs(fit, "cpu", 1, **QUIET)
    assert torch.rand(1) == wanted


def test_parallel_gives_the_table_of_serial(lines, tmp_path):
    space = {"learning_rate": (0.005, 0.02), "batch_size": [4, 16]}
    given = {"trials": 7, **QUIET}
    one, two = (
        gl.reproduce(lines, space, NEW, slow, workers=workers, store=tmp_path / str(workers), **given)
        for workers in (1, 2)
    )
    pd.testing.assert_frame_equal(one.table, two.table)
    assert len(one.table) == 7
    assert str(one) == str(two)


def test_a_combination_is_found_where_it_is_nearer_than_any_single_change(plain, tmp_path):
    """a = 4 alone is at distance 2 in ratios, as a list in steps it is 3; a = 2 with b = 3 is at 2."""
    space = {"a": [1.5, 2.0, 4.0], "b": [2, 3], "flag": [True]}
    found = gl.reproduce(plain, space, "cpu:threads=1", moved, store=tmp_path, **QUIET)
    table = found.table
    assert table.distance.tolist()[:7] == [0, 1, 1, 1, 2, 2, 3]
    assert found.best == {"a": 4.0}
    assert found.table.distance[found.chosen] == 3
    nearer = {"a": [1.5, 2.0, 4.0], "b": [3]}
    found = gl.reproduce(plain, nearer, "cpu:threads=1", moved, store=tmp_path, **QUIET)
    assert found.best == {"a": 4.0}, "a combination of the same distance is not smaller"
    further = {"a": [1.2, 1.5, 2.0, 3.0, 4.0], "b": [3]}
    found = gl.reproduce(plain, further, "cpu:threads=1", moved, store=tmp_path, **QUIET)
    assert found.best == {"a": 2.0, "b": 3}, "4 steps, where a = 4 alone takes 5"
    assert found.smaller_left == 0
    assert {"a": 4.0} in [{"a": row.a} for row in found.table[found.table.confirmed].itertuples()]


def test_another_chips_arithmetic_is_left_again(lines, tmp_path):
    space, new = {"emulate": ["ampere", None]}, "cpu:threads=1,emulate=float8_e5m2"
    found = gl.reproduce(lines, space, new, fit, margin=1e-3, store=tmp_path, **QUIET)
    assert found.table.emulate[0] == "float8_e5m2"
    assert found.table.decision[0] not in WITHIN
    assert found.confirmed
    assert (
        found.best_setting == f"cpu:threads=1,emulate={found.best['emulate']}" or found.best_setting == "cpu:threads=1"
    )


def test_distances():
    space = {
        "learning_rate": [1e-4, 4e-3],
        "momentum": [0.9, 0.5],
        "batch_size": (2, 64),
        "precision": ["float64", "float32"],
    }
    lab = objective.Own(lambda setting, seed, learning_rate=1e-3, momentum=0.0, batch_size=8: 0.0)
    factors = {
        name: search.factor_of(name, given, lab, gl.Setting.parse("cpu:precision=bfloat16"))
        for name, given in space.items()
    }
    assert factors["learning_rate"].distance(1e-4) == pytest.approx(math.log2(10))
    assert factors["learning_rate"].distance(4e-3) == pytest.approx(2)
    assert [factors["momentum"].distance(value) for value in (0.0, 0.5, 0.9)] == [0, 1, 2]
    assert factors["batch_size"].distance(64) == 3
    assert [factors["precision"].distance(value) for value in ("bfloat16", "float32", "float64")] == [0, 1, 1]
    assert list(factors["batch_size"].alone()) == [2, 4, 16, 32, 64]


def test_pruning_spares_trainings_and_changes_no_answer(plain, tmp_path):
    space = {"a": [1.2, 1.5, 3.0, 4.0], "flag": [True]}
    calls = {}
    for prune in (True, False):
        calls[prune] = []

        def counted(setting, seed, a=1.0, flag=False, prune=prune):
            calls[prune].append(seed)
            return moved(setting, seed, a, 1, flag)

        found = gl.reproduce(plain, space, "cpu:threads=1", counted, store=tmp_path / str(prune), prune=prune, **QUIET)
        assert found.best == {"a": 4.0}
        assert found.confirmed
        assert set(found.table.state) == ({"pruned", "finished"} if prune else {"finished"})
        given_up = found.table[found.table.state == "pruned"]
        assert (given_up.seeds < 10).all()
        assert given_up.note.str.contains("outside the margin").all()
        assert found.table.p_equivalent_holm.max() == 1
    assert len(calls[True]) < 0.7 * len(calls[False])


def test_a_change_that_makes_no_difference_on_average_is_not_pruned_away():
    """Pruning is by an interval at 99.9 %: of trials inside the margin it gives up nearly none."""
    generator = np.random.default_rng(0)
    target = pd.DataFrame({"runs": "target", "seed": range(20), "final_loss": generator.normal(size=20)})
    given_up = 0
    for _ in range(150):
        shift = generator.normal(0.0, 0.05, size=6)
        new = target[:6].assign(runs="changed", final_loss=target.final_loss[:6] + shift)
        seen = gl.verdict(pd.concat([target, new]), factor="runs", reference="target")
        given_up += reproduction.hopeless(seen, 10) != ""
    assert given_up <= 1


def test_luck_on_the_seeds_of_the_search_is_not_confirmed(plain, tmp_path):
    """Equal on the first ten seeds, which the search sees, and off by a standard deviation on the others."""

    def lucky(setting, seed, knob=0):
        return moved(gl.Setting.parse("cpu:threads=2"), seed) + (
            1.0 if knob == 0 or seed >= 10 else 1e-3 * (-1) ** seed
        )

    found = gl.reproduce(plain, {"knob": [1, 2, 3]}, "cpu:threads=1", lucky, store=tmp_path, **QUIET)
    assert found.best == {"knob": 1}
    assert not found.confirmed
    assert found.table.fresh_alpha.tolist()[1:] == [0.05 / 2, 0.05 / 4, 0.05 / 8]
    assert (found.table.decision[1:] == "equivalent").all()
    assert (found.table.fresh_decision[1:] == "different").all()
    assert found.finding.startswith("Not confirmed: ")


def test_diverging_runs_are_seen_early_and_counted(lines, tmp_path):
    found = gl.reproduce(lines, {"learning_rate": [50.0, 0.1]}, "cpu:threads=1", fit, store=tmp_path, **QUIET)
    assert found.best == {}, "the old setting itself"
    slow = gl.seed_runs(fit, "cpu:threads=1", 12, learning_rate=0.05, **QUIET)

    def wild(setting, seed, learning_rate=50.0):
        yield from fit(setting, seed, learning_rate, steps=100)

    found = gl.reproduce(slow, {"learning_rate": [40.0, 0.05]}, "cpu:threads=1", wild, store=tmp_path, **QUIET)
    assert found.table.state.tolist()[:2] == ["pruned", "pruned"]
    assert found.table.diverged.tolist()[:2] == [3, 3]
    assert found.table.note[0] == "3 of 3 seeds diverged"
    assert "3 of 3 seeds diverged" in found.finding


@pytest.mark.parametrize(
    "error", [ZeroDivisionError, FloatingPointError, np.linalg.LinAlgError, torch.linalg.LinAlgError]
)
def test_an_error_of_arithmetic_is_a_diverged_run(error):
    def train(setting, seed):
        raise error("no number")

    assert gl.seed_runs(train, seeds=2, **QUIET).status.tolist() == ["diverged", "diverged"]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_trial_that_raises_fails_and_the_search_goes_on(plain, tmp_path, workers):
    def brittle(setting, seed, a=1.0):
        if a == 2.0:
            raise KeyError(f"no {a}")
        return moved(setting, seed, a)

    given = {"store": tmp_path, "workers": workers, **QUIET}
    found = gl.reproduce(plain, {"a": [2.0, 4.0]}, "cpu:threads=1", brittle, **given)
    assert found.best == {"a": 4.0}
    assert found.table.state.tolist() == ["pruned", "failed", "finished"]
    assert found.table.note[1] == "KeyError: 'no 2.0'"
    assert "1 trial(s) failed; the first, a 1 → 2: KeyError" in found.finding


def test_when_every_trial_fails_the_first_error_is_told(plain, tmp_path):
    def broken(setting, seed, a=1.0):
        raise RuntimeError("no data")

    with pytest.raises(gl.GpulabError, match=r"every trial failed \(2\); the first: RuntimeError: no data"):
        gl.reproduce(plain, {"a": [2.0]}, "cpu:threads=1", broken, store=tmp_path, **QUIET)


def test_what_failed_is_tried_again_when_the_search_is_called_again(plain, tmp_path):
    flaw = tmp_path / "flaw"
    flaw.touch()

    def brittle(setting, seed, a=1.0):
        if a == 4.0 and flaw.exists():
            raise OSError("no disk")
        return moved(setting, seed, a)

    first = gl.reproduce(plain, {"a": [4.0]}, "cpu:threads=1", brittle, store=tmp_path, **QUIET)
    assert first.table.state.tolist() == ["pruned", "failed"]
    flaw.unlink()
    second = gl.reproduce(plain, {"a": [4.0]}, "cpu:threads=1", brittle, store=tmp_path, **QUIET)
    assert second.table.state.tolist() == ["pruned", "finished"]
    assert second.best == {"a": 4.0}


# --- a search that survives -----------------------------------------------------------------------------

KILLED = """
    import sys, time
    from pathlib import Path
    import numpy as np
    import pandas as pd
    import gpulab as gl

    log = Path(sys.argv[1]) / "log"

    def train(setting, seed, a=1.0):
        with log.open("a") as stream:
            stream.write(f"{a} {seed}\\n")
        time.sleep(0.05)
        noise = np.random.default_rng(seed).normal()
        return noise + (0.0 if a == 4.0 else 0.5)

    seeds = range(16)
    old = pd.DataFrame({"seed": seeds, "final_loss": [np.random.default_rng(s).normal() for s in seeds]})
    found = gl.reproduce(old, {"a": [1.5, 2.0, 3.0, 4.0]}, "cpu", train, store=sys.argv[1], prune=False, progress=False)
    print(found.table.to_json())
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this operating system has no SIGKILL")
def test_a_search_that_is_killed_goes_on_and_trains_nothing_twice(tmp_path):
    (tmp_path / "script.py").write_text(textwrap.dedent(KILLED))
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    tables = {}
    for folder, kills in ((whole, ()), (broken, (3, 13))):
        folder.mkdir()
        command = [sys.executable, str(tmp_path / "script.py"), str(folder)]
        log = folder / "log"
        for lines in kills:  # in the first trial, and in the second
            process = subprocess.Popen(command)
            deadline = time.monotonic() + 60
            while not log.exists() or len(log.read_text().splitlines()) < lines:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.005)
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        tables[folder] = json.loads(done.stdout)
    assert tables[broken] == tables[whole]
    trained = (broken / "log").read_text().splitlines()
    assert set(trained) == set((whole / "log").read_text().splitlines())
    assert len(trained) - len(set(trained)) <= 2, "only the training that a kill hit is done again"


def test_a_larger_number_of_trials_goes_further(plain, tmp_path):
    space = {"a": [1.2, 1.5, 2.0, 4.0]}
    first = gl.reproduce(plain, space, "cpu:threads=1", moved, store=tmp_path, trials=2, **QUIET)
    assert (len(first.table), first.best, first.smaller_left) == (2, None, 3)
    assert "3 in the space left untried" in first.finding
    second = gl.reproduce(plain, space, "cpu:threads=1", moved, store=tmp_path, trials=9, **QUIET)
    assert second.best == {"a": 4.0}
    pd.testing.assert_frame_equal(
        second.table[:2].drop(columns="p_equivalent_holm"), first.table.drop(columns="p_equivalent_holm")
    )


@pytest.fixture
def studied(plain, tmp_path):
    file = tmp_path / "my.journal"
    gl.reproduce(plain, {"a": [2.0, 4.0]}, "cpu:threads=1", moved, study=file, **QUIET)
    return file


def test_half_a_line_at_the_end_is_dropped_and_the_search_goes_on(plain, studied):
    whole = gl.reproduce(plain, {"a": [2.0, 4.0]}, "cpu:threads=1", moved, study=studied, **QUIET)
    text = studied.read_bytes()
    lines = text.splitlines(keepends=True)
    studied.write_bytes(b"".join(lines[:-6]) + lines[-6][:20])
    again = gl.reproduce(plain, {"a": [2.0, 4.0]}, "cpu:threads=1", moved, study=studied, **QUIET)
    pd.testing.assert_frame_equal(again.table, whole.table)
    assert studied.read_bytes().endswith(b"\n")


@pytest.mark.parametrize("damage", [b"", b"nonsense\n", b"\x00\xff\n{}\n", b"{}\n[]\n"])
def test_a_damaged_study_is_refused(plain, studied, damage):
    lines = studied.read_bytes().splitlines(keepends=True)
    studied.write_bytes(b"".join([*lines[:3], damage or lines[3][30:], *lines[4:]]))
    with pytest.raises(gl.DataError, match=r"my\.journal: not a whole study"):
        gl.reproduce(plain, {"a": [2.0, 4.0]}, "cpu:threads=1", moved, study=studied, **QUIET)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"target": "shifted"}, "another target"),
        ({"search": {"a": [2.0, 8.0]}}, "another space"),
        ({"setting": "cpu"}, "another setting"),
        ({"train": fit}, "another training"),
        ({"margin": 0.1}, "another way of judging"),
    ],
)
def test_a_study_of_another_question_is_refused(plain, studied, other, named):
    asked = {"target": plain, "search": {"a": [2.0, 4.0]}, "setting": "cpu:threads=1", "train": moved} | other
    if other.get("target"):
        asked["target"] = plain.assign(final_loss=plain.final_loss + 1)
    if asked["train"] is fit:
        asked["search"] = {"learning_rate": [0.2]}
    with pytest.raises(gl.DataError, match=named):
        gl.reproduce(**asked, study=studied, **QUIET)


def test_one_process_at_a_time(plain, studied):
    filelock = pytest.importorskip("filelock")
    with filelock.FileLock(f"{studied}.owner"), pytest.raises(gl.UsageError, match="another process is at work"):
        gl.reproduce(plain, {"a": [2.0, 4.0]}, "cpu:threads=1", moved, study=studied, **QUIET)


def test_a_missing_extra_is_named(plain, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(gl.GpulabError, match=r"needs optuna.*pip install 'gpulab\[search\]'"):
        gl.reproduce(plain, {"a": [2.0]}, "cpu:threads=1", moved, store=tmp_path, **QUIET)


# --- bad input ------------------------------------------------------------------------------------------


def without(frame, **columns):
    return frame.assign(**columns)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"search": {}}, r"search \{\}"),
        ({"search": {"a": []}}, r"a=\[\]: no value"),
        ({"search": {"a": 2.0}}, r"a=2\.0: expected a list"),
        ({"search": {"a": "2"}}, r"a='2': expected a list"),
        ({"search": {"a": ["two"]}}, r"'two' where the original is 1\.0; expected numbers"),
        ({"search": {"a": [math.nan]}}, "nan where the original"),
        ({"search": {"b": [1.5]}}, r"1\.5 where the original is 1; expected whole numbers"),
        ({"search": {"flag": ["yes"]}}, "'yes' where the original is False"),
        ({"search": {"a": [1.0]}}, "nothing can change"),
        ({"search": {"a": (3.0, 2.0)}}, r"\(low, high\)"),
        ({"search": {"a": (0.0, 2.0)}}, "all must be numbers above 0"),
        ({"search": {"depth": [2]}}, "'depth' can be changed by train.*there are a, b, flag, threads"),
        ({"search": {"tf32": ["off"]}}, "'tf32' has a meaning on cuda only"),
        ({"search": {"precision": ["int8"]}}, "precision='int8' must be one of"),
        ({"setting": "gpu"}, "'gpu'"),
        ({"margin": "big"}, "'big'"),
        ({"alpha": 2}, "alpha 2"),
        ({"trials": 0}, "trials=0"),
        ({"workers": 1.5}, r"workers=1\.5"),
        ({"metric": "accuracy"}, "no column 'accuracy'"),
        ({"train": 3}, "train 3"),
        ({"train": lambda: 0.0}, r"train\(setting, seed"),
        ({"train": lambda setting, seed, a: 0.0}, "a without a default"),
        ({"target": [1.0]}, "target is a list"),
        ({"target": lambda f: f[:1]}, r"target has 1 seed\(s\); at least 6"),
        ({"target": lambda f: f.assign(final_loss=f.final_loss.where(f.seed != 3))}, "no finite final_loss for seed 3"),
        ({"target": lambda f: f.assign(seed=0)}, "seed 0 more than once"),
        ({"target": lambda f: f.assign(setting=["cpu", "cuda"] * 10)}, "runs of cpu, cuda; choose"),
        ({"target": lambda f: f.drop(columns="seed")}, "no column 'seed'"),
        ({"target": lambda f: f.assign(final_loss=1.0)}, "all the same"),
        ({"train": None}, "give train="),
    ],
)
def test_a_search_that_makes_no_sense_is_refused_before_anything_trains(wrong, named, plain, tmp_path):
    def never(setting, seed, a=1.0, b=1, flag=False):
        raise AssertionError

    asked = {"target": plain, "search": {"a": [2.0]}, "setting": "cpu:threads=1", "train": never} | wrong
    if callable(asked["target"]):
        asked["target"] = asked["target"](plain)
    with pytest.raises(gl.UsageError, match=named):
        gl.reproduce(**asked, store=tmp_path, **QUIET)
    assert list(tmp_path.iterdir()) == []


def test_a_factor_that_the_network_does_not_have_is_refused(old, store):
    with pytest.raises(gl.UsageError, match=r"'stride' can be changed; there are learning_rate, .*precision"):
        gl.reproduce(old, {"stride": [2]}, NEW, store=store, **QUIET)


def test_what_can_be_changed_of_the_networks_of_gpulab(old, store):
    lab = objective.Records(old, "final_loss", store)
    assert lab.originals == {"learning_rate": 1e-3, "batch_size": 1}
    job = lab.job(NEW, 3, {"batch_size": 4})
    assert job["model_options"] == {"size": [28, 28], "hidden": [64, 16], "batch_size": 4}
    same = lab.job("cpu:threads=1", 3, {})
    assert planned_id(**same) == old.id[3], "with nothing changed it is the run that there was"


# --- how it looks ---------------------------------------------------------------------------------------


def test_it_prints_and_draws_itself(by_flag):
    shown, _ = by_flag._repr_mimebundle_()
    assert shown["text/plain"] == by_flag.finding == str(by_flag)
    assert shown["text/html"].count("<tr") == 1 + len(by_flag.table)
    picture = by_flag.plot()
    assert "precision bfloat16 → float32" in picture.alt
    (axes,) = picture.figure.axes
    drawn = [tuple(at) for points in axes.collections for at in points.get_offsets()]
    assert len(drawn) == len(by_flag.table)
    heights = sorted(height for _, height in drawn)
    assert heights == pytest.approx(sorted(by_flag.table.difference / by_flag.margin))
    assert len(picture.png()) < 150_000


def test_diverged_and_pruned_trials_are_drawn(lines, tmp_path):
    def wild(setting, seed, learning_rate=50.0, late=False):
        if late:
            yield 3.0 + seed
        yield from fit(setting, seed, learning_rate, steps=100)

    found = gl.reproduce(
        lines, {"learning_rate": [40.0], "late": [True]}, "cpu:threads=1", wild, store=tmp_path, **QUIET
    )
    (axes,) = found.plot().figure.axes
    assert sum(len(points.get_offsets()) for points in axes.collections) == len(found.table)
