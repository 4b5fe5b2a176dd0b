"""The widgets of the pages without code: a control that is moved changes the picture, and no upload breaks anything."""

import datetime
import pickle

import numpy as np
import pytest
import torch

import companion
import gpulab as gl
from companion import explorers
from gpulab.diagnostics import trace_files
from gpulab.files import MOST_UPLOADED
from gpulab.store.records import recorded_folder

LOSS = torch.nn.functional.mse_loss


def changes(explorer, control, value, part="image"):
    """Whether a widget shows something else once a control has another value."""
    before = getattr(explorer, part).value
    control.value = value
    return getattr(explorer, part).value != before


# --- a ball on a saddle ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saddle():
    return companion.saddle_explorer()


MOVES = {"turn": 30, "tilt": 60, "step": 25, "optimizer": "rmsprop", "format": "float64", "rate": 0.1, "push": 0.1}


@pytest.mark.parametrize(("name", "value"), MOVES.items())
def test_every_control_of_the_saddle_changes_the_picture(saddle, name, value):
    assert changes(saddle, getattr(saddle, name), value)
    assert 'alt="The loss around a saddle' in saddle.image.value


def test_where_every_step_is_rounded_away_the_ball_stays():
    saddle = explorers.small_saddle()
    assert saddle.eigenvalues.tolist() == pytest.approx([-3, 4])
    for setting in explorers.FORMATS.values():
        stays = gl.saddles.trajectory(saddle, setting, optimizer="sgd", learning_rate=0.01)
        leaves = gl.saddles.trajectory(saddle, setting, optimizer="adam", learning_rate=0.01)
        assert stays.along.abs().max() < 0.01, setting
        assert leaves.along.abs().iloc[-1] == pytest.approx(1, abs=0.05), "beside the saddle lie the two minima"
        assert leaves.loss.iloc[-1] == pytest.approx(saddle.loss / 4, abs=0.01)


def test_a_trajectory_is_that_of_the_escape():
    saddle = explorers.small_saddle()
    options = {"optimizer": "momentum", "learning_rate": 0.05, "perturbation": 1e-3}
    path = gl.saddles.trajectory(saddle, "cpu:precision=float64", **options)
    history = gl.saddles.escape(saddle.model, saddle, "cpu:precision=float64", progress=False, **options).history
    same = path[: len(history)]
    np.testing.assert_allclose(np.hypot(same.along, same.across), history.distance, rtol=1e-12)
    np.testing.assert_allclose(same.loss, history.loss, rtol=1e-12)


def test_a_trajectory_that_leaves_the_finite_numbers_ends_there():
    path = gl.saddles.trajectory(explorers.small_saddle(), "cpu", learning_rate=10.0, perturbation=0.1)
    assert 1 < len(path) < 100
    assert np.isfinite(path).all(axis=None)


# --- seed by seed ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def seeds():
    return companion.seeds_explorer()


def test_a_false_difference_appears_and_vanishes(seeds):
    seeds.which.value = next(iter(explorers.COMPARISONS))
    for count, different in ((8, True), (seeds.seeds.max, False)):
        assert changes(seeds, seeds.seeds, count)
        (low,), (high,) = (seeds.verdicts[count].table[end] for end in ("low", "high"))
        assert (low > 0 or high < 0) == different
        assert f"{count} seeds: " in seeds.said.value
    assert seeds.verdicts[count].decision == "equivalent"


@pytest.mark.parametrize("name", explorers.COMPARISONS)
def test_every_comparison_has_the_verdict_of_all_its_runs(seeds, name):
    query, factor, levels = explorers.COMPARISONS[name]
    runs = gl.recorded_runs().query(query)
    runs = runs[runs[factor].isin(levels) & (runs.rerun == 0)]
    seeds.which.value = name
    seeds.seeds.value = seeds.seeds.max
    whole = gl.verdict(runs, factor=factor, reference=levels[0])
    assert seeds.verdicts[seeds.seeds.max].table.equals(whole.table)


def test_another_order_changes_what_is_seen_but_not_the_end(seeds):
    seeds.seeds.value = 8
    before = seeds.verdicts[8].table.difference.iloc[0]
    assert changes(seeds, seeds.order, seeds.order.value + 1)
    seeds.seeds.value = 8
    assert seeds.verdicts[8].table.difference.iloc[0] != before


# --- two trainings -----------------------------------------------------------------------------------------


@pytest.fixture
def training(monkeypatch):
    monkeypatch.setattr(explorers, "FRAMES", {"autoencoder": 100, "prednet": 400})
    monkeypatch.setattr(explorers, "DRAW_SECONDS", 0.0)
    explorer = companion.training_explorer()
    yield explorer
    explorer.stop()


def test_two_trainings_are_those_that_train_makes(training):
    training.train.click()
    training.thread.join(60)
    assert training.said.value == "Done. The trained weights differ."
    assert "After 100 of 100 the losses are" in training.image.value
    for control, rows in zip(training.settings, training.losses, strict=True):
        alone = gl.train("autoencoder", setting=control.value, profile="smoke", frames=100, progress=False)
        assert [loss for _, loss in rows] == alone.history.loss.tolist(), control.value


def test_the_same_setting_twice_gives_the_same_bits(training):
    training.settings[1].value = training.settings[0].value
    training.train.click()
    training.thread.join(60)
    assert training.said.value == "Done. The trained weights have the same bits."
    assert "the losses are nothing apart" in training.image.value


def test_a_training_can_be_stopped_and_another_one_begun(training):
    training.net.value = "prednet"
    training.train.click()
    assert training.said.value == "Training …"
    training.halt.click()
    assert training.said.value == "Stopped."
    assert len(training.losses[0]) < 20
    assert changes(training, training.net, "autoencoder")
    assert "Press Train" in training.said.value


# --- the audit of an upload --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def audit():
    return companion.audit_explorer()


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """The content of a trace of a step that nobody else recorded."""
    step = gl.Step(torch.nn.Linear(3, 1), (torch.ones(2, 3), torch.ones(2, 1)), LOSS)
    file = tmp_path_factory.mktemp("trace") / "mine.trace"
    gl.record(step, "cpu", file, progress=False)
    return file.read_bytes()


def resnet():
    return (recorded_folder("traces") / "resnet18-cuda-tf32-off.trace").read_bytes()


class Malicious:
    def __reduce__(self):
        return (exec, ("raise SystemExit('executed')",))


HOSTILE = {
    "nothing": (lambda: b"", "not a trace"),
    "a pickle": (lambda: pickle.dumps(Malicious()), "not a trace"),
    "cut short": (lambda: resnet()[:-1000], "damaged trace"),
    "a flipped bit": (lambda: resnet()[:9000] + bytes([resnet()[9000] ^ 1]) + resnet()[9001:], "checksum"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_upload_is_answered_in_a_sentence(audit, kind):
    make, said = HOSTILE[kind]
    answer = str(audit.compare([("theirs.trace", make())]))
    assert answer.startswith("<p>theirs.trace: ")
    assert said in answer
    assert len(answer) < 300


def test_a_trace_that_unpacks_into_too_much_is_refused(audit, tmp_path):
    notes, rows, sketches = trace_files.read("resnet18", resnet())
    sketches[rows[0]["outputs"][0]] = np.zeros(10_000_000)
    trace_files.write(tmp_path / "bomb.trace", notes, rows, sketches)
    bomb = (tmp_path / "bomb.trace").read_bytes()
    assert len(bomb) < MOST_UPLOADED
    answer = audit.compare([("theirs.trace", bomb)])
    assert answer == "<p>theirs.trace: too large: more than 2097152 numbers in a column</p>"


def test_a_name_is_shown_and_nothing_else(audit, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = "../../<script>alert(1)</script>\x1b[31m" + "long" * 100 + "/etc/passwd"
    when = datetime.datetime.now(datetime.UTC)
    file = {"name": name, "type": "", "size": 3, "content": memoryview(b"abc"), "last_modified": when}
    audit.upload.value = (file,)
    assert "&lt;script&gt;" in audit.said.value
    assert "not a trace" in audit.said.value
    assert "<script" not in audit.said.value
    assert "\x1b" not in audit.said.value
    assert audit.upload.value == ()
    assert [*tmp_path.iterdir()] == []


def test_a_trace_is_compared_with_the_recorded_one_of_its_step(audit):
    answer = audit.compare([("mine.trace", resnet())])
    assert "cuda:tf32=off (mine.trace) against cuda:tf32=off (recorded)" in answer
    assert "<img alt=" in answer


def test_without_a_recorded_one_two_are_asked_for_and_compared(audit, trace):
    assert "no recorded trace is of this step; upload two" in audit.compare([("mine.trace", trace)])
    assert "all is well" in audit.compare([("mine.trace", trace), ("theirs.trace", trace)])
    assert "3 files: expected one trace, or two" in audit.compare([("a", trace)] * 3)
    assert "of different steps" in audit.compare([("mine.trace", trace), ("theirs.trace", resnet())])


def test_a_trace_with_nan_and_with_html_in_it_is_audited(audit, tmp_path):
    class Broken(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.ModuleDict({"<b>bold<": torch.nn.Linear(3, 1)})

        def forward(self, x):
            return torch.log(self.inner["<b>bold<"](x) - 1e6)

    step = gl.Step(Broken(), (torch.ones(2, 3), torch.ones(2, 1)), LOSS)
    gl.record(step, "cpu", tmp_path / "nan.trace", label="<i>nan</i>", progress=False)
    content = (tmp_path / "nan.trace").read_bytes()
    answer = audit.compare([("nan.trace", content), ("nan.trace", content)])
    assert "&lt;i&gt;nan&lt;/i&gt;" in answer
    assert "<i>" not in answer
    assert "<b>" not in answer


def test_memory_is_bounded_while_a_strangers_file_is_read(audit, monkeypatch):
    pytest.importorskip("resource")
    monkeypatch.setattr(explorers.Trace, "load", lambda *_: np.ones(1 << 29))
    assert "more than 2,147,483,648 bytes of memory" in audit.compare([("theirs.trace", b"")])
    assert len(np.ones(1 << 24)) == 1 << 24
