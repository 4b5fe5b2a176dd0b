"""The widgets: what is moved changes what is said and drawn, and no upload breaks anything."""

import datetime
import math
import pickle

import numpy as np
import pytest
import torch

import companion
import gpulab as gl
from companion import explorers
from companion.widgets import bits_figure, format_bits
from gpulab.audits.traces import Trace
from gpulab.store.recorded import recorded_folder

LOSS = torch.nn.functional.mse_loss


def changes(explorer, control, value, part="image"):
    """Whether a widget shows something else once a control has another value."""
    before = getattr(explorer, part).value
    control.value = value
    return getattr(explorer, part).value != before


# --- the bits of a number ----------------------------------------------------------------------------------


def pattern(explorer):
    return "".join(bit.description for bit in explorer.bits)


@pytest.mark.parametrize("bit", [0, 8, 31])
def test_a_clicked_bit_changes_the_number_and_nothing_else(bit):
    explorer = companion.bit_explorer(0.75)
    before = pattern(explorer)
    explorer.bits[bit].click()
    after = pattern(explorer)
    assert [n for n in range(32) if before[n] != after[n]] == [bit]
    assert explorer.number.value == explorer.x
    stored = torch.tensor([explorer.x], dtype=torch.float32).view(torch.int32)
    assert f"{int(stored) & 0xFFFFFFFF:032b}" == after
    explorer.bits[bit].click()
    assert explorer.number.value == 0.75


def test_what_is_no_number_is_not_sent_to_the_page():
    explorer = companion.bit_explorer(1.5)
    for bit in explorer.bits[1:9]:
        if bit.description == "0":
            bit.click()  # exponent all ones, fraction not zero
    assert math.isnan(explorer.x)
    assert math.isfinite(explorer.number.value)
    assert "nan" in explorer.answer.value


def test_without_a_kernel_there_is_the_still_picture(outputs_of):
    figure, fold = outputs_of(companion.bit_explorer(0.1))
    assert set(figure.data) == {"application/vnd.jupyter.widget-view+json", "image/png", "text/plain"}
    assert fold.data["text/plain"].startswith("In words, before anything is moved: Bits of 0.1")


FORMATS = {"float32": torch.int32, "float16": torch.int16, "bfloat16": torch.int16}
FORMATS |= {"float8_e4m3fn": torch.uint8, "float8_e5m2": torch.uint8}


@pytest.mark.parametrize("name", FORMATS)
def test_the_bits_are_those_that_torch_stores_and_tf32_lacks_the_last(name):
    dtype = getattr(torch, name)
    for x in (-0.1, 1e-7):
        stored = torch.tensor([x]).to(dtype)
        parts = format_bits(x, name)
        width = 8 * stored.element_size()
        assert "".join(parts) == f"{int(stored.view(FORMATS[name])) & (1 << width) - 1:0{width}b}"
        assert len(parts[0]) == 1
        assert len(parts[2]) == -round(math.log2(torch.finfo(dtype).eps))
    sign, exponent, fraction = format_bits(1 / 3, "tf32")
    assert (sign, exponent, len(fraction)) == (*format_bits(1 / 3)[:2], 10)
    (axes,) = bits_figure(-3.0).figure.axes
    assert len(axes.patches) == 32 + 19 + 16 + 16 + 8 + 8, "a box each"


# --- a ball on a saddle ------------------------------------------------------------------------------------


MOVES = {"turn": 30, "tilt": 60, "step": 25, "optimizer": "rmsprop", "format": "float64", "rate": 0.1, "push": 0.1}


def test_every_control_of_the_saddle_and_of_a_slice_changes_the_picture():
    saddle, step = companion.saddle_explorer(), (torch.eye(2), torch.ones(2, 1))
    for name, value in MOVES.items():
        assert changes(saddle, getattr(saddle, name), value), name
    assert 'alt="The loss around a saddle' in saddle.image.value
    cut = companion.slice_explorer(gl.saddles.landscape(torch.nn.Linear(2, 1), LOSS, step))
    assert changes(cut, cut.angle, 45)
    assert changes(cut, cut.reach, 0.1)


def test_a_trajectory_is_that_of_the_escape_and_ends_where_it_leaves_the_finite_numbers():
    saddle = explorers.small_saddle()
    options = {"optimizers": {"momentum": [0.05]}, "perturbations": [1e-3], "progress": False}
    path = explorers.trajectory(saddle, "cpu:precision=float64", optimizer="momentum", rate=0.05, push=1e-3)
    history = gl.saddles.escape_table(saddle, ["cpu:precision=float64"], **options).paths
    same = path[: len(history)]
    np.testing.assert_allclose(np.hypot(same.along, same.across), history.distance, rtol=1e-12)
    np.testing.assert_allclose(same.loss, history.loss, rtol=1e-12)
    path = explorers.trajectory(saddle, "cpu", optimizer="sgd", rate=10.0, push=0.1)
    assert 1 < len(path) < 100
    assert np.isfinite(path).all(axis=None)


# --- seed by seed ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def seeds():
    return companion.seeds_explorer()


@pytest.mark.parametrize("name", explorers.COMPARISONS)
def test_every_comparison_has_the_verdict_of_all_its_runs(seeds, name):
    query, factor, levels = explorers.COMPARISONS[name]
    runs = gl.recorded_runs().query(query)
    runs = runs[runs[factor].isin(levels) & (runs.rerun == 0)]
    seeds.which.value = name
    seeds.seeds.value = seeds.seeds.max
    whole = gl.verdict(runs, factor=factor, reference=levels[0])
    assert seeds.verdicts[seeds.seeds.max].table.equals(whole.table)


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


def test_a_hostile_upload_is_answered_in_a_sentence(audit, tmp_path):
    large = Trace.load("resnet18", resnet())
    large.sketches[large.operations[0].outputs[0]] = np.zeros(10_000_000)  # which unpacks into too much
    bomb, flipped = large.save(tmp_path / "bomb.trace").read_bytes(), bytearray(resnet())
    flipped[9000] ^= 1
    assert len(bomb) < explorers.MOST_UPLOADED
    for content, said in (
        (b"", "not a trace"),
        (pickle.dumps(Malicious()), "not a trace"),
        (resnet()[:-1000], "not a trace, or a damaged one"),
        (bytes(flipped), "checksum"),
        (bomb, "too large: more than 2097152 numbers in a column"),
    ):
        answer = str(audit.compare([("theirs.trace", content)]))
        assert answer.startswith("<p>theirs.trace: ")
        assert said in answer
        assert len(answer) < 300


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


def test_a_trace_is_compared_with_the_recorded_one_of_its_step_or_two_are_asked_for(audit, trace):
    answer = audit.compare([("mine.trace", resnet())])
    assert "cuda:tf32=off (mine.trace) against cuda:tf32=off (recorded)" in answer
    assert "<img alt=" in answer
    assert "no recorded trace is of this step; upload two" in audit.compare([("mine.trace", trace)])
    assert "identical to the last bit" in audit.compare([("mine.trace", trace), ("theirs.trace", trace)])
    assert "3 files: expected one trace, or two" in audit.compare([("a", trace)] * 3)
    assert "of different steps" in audit.compare([("mine.trace", trace), ("theirs.trace", resnet())])


def test_memory_is_bounded_while_a_strangers_file_is_read(audit, monkeypatch):
    pytest.importorskip("resource")
    monkeypatch.setattr(explorers.Trace, "load", lambda *_: np.ones(1 << 29))
    assert "more than 2,147,483,648 bytes of memory" in audit.compare([("theirs.trace", b"")])
    assert len(np.ones(1 << 24)) == 1 << 24
