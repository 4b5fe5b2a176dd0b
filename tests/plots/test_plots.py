"""What figures say and show, drawn from tables made by hand."""

import io
import re
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
import torch
from markupsafe import escape
from matplotlib.colors import to_rgb
from matplotlib.text import Text
from PIL import Image

import gpulab as gl
from gpulab.plots import style

# Machado, Oliveira, Fernandes 2009, "A physiologically-based model for simulation of color vision deficiency":
# how linear RGB looks to eyes without the one or the other kind of cone.
EYES = {
    "usual": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
}
SETTINGS = ("cpu", "cuda:tf32=on", "cpu:threads=1,emulate=tf32")


@pytest.fixture
def runs():
    """Eight seeds from 0.1 to 0.8; the third setting moves each by a hundredth, and one run diverged."""
    rows = [
        {"setting": setting, "seed": seed, "final_loss": 0.1 * (seed + 1) * (1 + 0.01 * number), "status": "finished"}
        | {"recorded": setting.startswith("cuda"), "machine": setting[:4], "weights": f"{seed}{number // 2}"}
        for number, setting in ((0, SETTINGS[0]), (0, SETTINGS[1]), (1, SETTINGS[2]))
        for seed in range(8)
    ]
    return pd.DataFrame(rows).assign(experiment="prednet", profile="smoke", protocol="p", rerun=0)


def title(picture):
    return picture.figure._suptitle.get_text()


def words(picture):
    return [text.get_text() for legend in picture.figure.legends for text in legend.get_texts()]


def test_losses_join_the_seeds(runs):
    runs.loc[0, ["final_loss", "status"]] = np.nan, "diverged"
    picture = gl.plots.losses(runs)
    (axes,) = picture.figure.axes
    assert len(axes.lines) == 8
    assert title(picture) == "From seed to seed the loss varies up to 8.0-fold; along a line it hardly moves"
    assert "1 diverged" in {text.get_text() for text in axes.texts}
    assert words(picture) == ["made here, on cpu, cpu:", "recorded on cuda"]
    with pytest.raises(gl.UsageError, match="the frame mixes"):
        gl.plots.losses(pd.concat([runs, runs.assign(experiment="autoencoder")]))


def test_differences_are_those_of_the_verdict(runs):
    again = runs[runs.setting == "cpu"].assign(rerun=1)
    verdict = gl.verdict(pd.concat([runs, again]), reference="cpu")
    picture = gl.plots.differences(verdict)
    (axes,) = picture.figure.axes
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == [*SETTINGS[1:], "cpu again", "one seed against another"]
    assert title(picture) == f"The largest change of setting is {verdict.ratio:.2g} of the spread between seeds"
    same, moved, _, between = (points.get_offsets()[:, 0] for points in axes.collections)
    assert set(same) == {0.0}
    assert np.allclose(np.sort(moved), 0.001 * np.arange(1, 9))
    assert between.max() == pytest.approx(0.7) == -between.min()
    spread = f"standard deviation {runs.final_loss[:8].std():.2g}"
    said = [text.get_text().strip() for text in axes.texts]
    assert said == ["exactly the same", "largest 0.008", "exactly the same", spread]
    one = gl.verdict(runs[runs.seed == 0].assign(loader=runs.setting), factor="loader", reference="cpu")
    assert title(gl.plots.differences(one)) == "One seed has no spread to compare with"


def test_curves_leave_reruns_out():
    usual = {"experiment": "prednet", "setting": "cpu", "recorded": False, "machine": "m", "frames_seen": [20, 40, 60]}
    runs = [
        pd.DataFrame(usual).assign(id=name, seed=seed, rerun=rerun, loss=np.array([0.4, 0.2, 0.1]) / (1 + seed))
        for name, seed, rerun in (("a", 0, 0), ("b", 1, 0), ("c", 0, 1))
    ]
    picture = gl.plots.curves(pd.concat(runs), baseline=0.3, baseline_label="repeating")
    (axes,) = picture.figure.axes
    assert [list(line.get_xdata()) for line in axes.lines[:3]] == [[20, 40, 60]] * 3
    assert list(axes.lines[2].get_ydata()) == pytest.approx([0.3, 0.15, 0.075]), "the median of both"
    assert [text.get_text() for text in axes.texts] == ["cpu", "repeating"]
    assert title(picture) == "1 setting × 2 seeds: the runs end 2.0-fold apart"
    assert axes.get_xlabel() == "frames seen"


def test_the_roofline_names_the_least_used_layer():
    frame = gl.device.recorded_rooflines()
    here = frame[frame.machine == frame.machine.iloc[0]].drop(columns="machine")
    for table in (here, pd.concat([here, frame])):
        picture = gl.plots.roofline(table)
        named = table.assign(setting=table.get("machine", pd.Series("", table.index)).fillna("") + table.setting)
        least = gl.device.bounds(named).sort_values("reached").iloc[0]
        told = f"The least used operation: {least.operation} reaches {least.reached:.1%} of its ceiling"
        assert title(picture) == told


def test_bits_have_a_box_each_and_named_sums_are_marked():
    (axes,) = gl.plots.bits(-3.0).figure.axes
    assert len(axes.patches) == 32 + 19 + 16 + 16 + 8 + 8
    x = torch.rand(100, generator=torch.Generator().manual_seed(0))
    table = gl.numerics.summation(x)
    picture = gl.plots.sums(gl.numerics.shuffled_sums(x), table)
    (axes,) = picture.figure.axes
    labels = ", ".join(text.get_text().strip() for text in axes.texts)
    assert sorted(labels.split(", ")) == sorted(", ".join(table.order[table.order != "exact"]).split(", "))


def test_frames_and_predictions_are_shown_beside_what_they_should_be():
    picture = gl.plots.frames(gl.load("walk", frames=100, size=(24, 32)), every=10)
    assert [len(axes.images) for axes in picture.figure.axes] == [1] * 10
    for net, panels in (("prednet", 4 * 5), ("autoencoder", 3 * 8)):
        run = gl.train(net, setting="cpu", profile="smoke", frames=20, progress=False)
        picture = gl.plots.sample(run)
        assert len(picture.figure.axes) == panels
        assert "Mean squared error of these" in title(picture)
    for tensor in run.model.state_dict().values():
        tensor.mul_(1e-5)
    run.data.held = np.full_like(run.data.held, 128)  # of which half is what a network without weights makes
    assert not re.search(r" 0\.0*$", title(gl.plots.sample(run)))


def test_a_name_with_dollars_is_no_mathematics(runs):
    odd = {SETTINGS[1]: r"$\nothing{$", SETTINGS[2]: "$2^3$"}
    table = runs.assign(loader=runs.setting.replace(odd), machine=r"a $\frac{1}{$").drop(columns="setting")
    verdict = gl.verdict(table, factor="loader", reference="cpu")
    for picture in (verdict.plot(), gl.plots.differences(verdict)):
        assert picture.png()
        shown = [text for text in picture.figure.findobj(Text) if "$2^3$" in text.get_text()]
        assert shown
        assert not any(text.get_parse_math() for text in shown)
    _, (axes,) = style.canvas(1, height=2)
    style.decades(axes.xaxis)
    assert style.finished(axes.figure, "powers", "").png()
    assert all(label.get_parse_math() for label in axes.get_xticklabels())
    assert style.power_of_ten(-12) == "10⁻¹²"


def test_a_setting_has_one_colour_and_dashes_where_it_is_emulated(runs):
    assert gl.plots.colour("cpu:threads=3") == gl.plots.colour("cpu:threads=3") in style.OTHER_CPU
    assert gl.plots.colour("cuda:tf32=off") == style.ON_GPU
    assert [style.dashes(setting) for setting in SETTINGS] == ["-", "-", "--"]
    assert style.setting_order(runs) == [SETTINGS[0], SETTINGS[2], SETTINGS[1]]
    levels = style.level_colours("loader", range(30))
    assert levels[0] != levels[1]
    assert len(levels) == 30


def lab(colours, eyes):
    """CIE L*a*b* of colours as such eyes see them: a distance of 2 can just be told."""
    rgb = np.array([to_rgb(colour) for colour in colours])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(linear @ np.transpose(EYES[eyes]), 0, 1)
    xyz = seen @ np.transpose([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x, y, z = np.cbrt(np.maximum(xyz / [0.9505, 1, 1.089], 1e-9)).T
    return np.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], axis=1)


@pytest.mark.parametrize("eyes", EYES)
def test_settings_can_be_told_apart_by_all_eyes(eyes):
    """By colour or, with as many as there are, by shape; lines have no shape, and those on white are seen."""
    names = list(style.COLOURS)
    places = lab(style.COLOURS.values(), eyes)
    apart = np.linalg.norm(places[:, None] - places, axis=-1)
    alike = [(a, b) for i, a in enumerate(names) for j, b in enumerate(names[:i]) if apart[i, j] < 20]
    assert [pair for pair in alike if len(set(map(style.shape, pair))) == 1] == []
    first = [names.index(name) for name in ("cpu", "cpu:threads=1", "cuda:tf32=off", "cuda:tf32=on")]
    assert apart[np.ix_(first, first)][np.triu_indices(4, 1)].min() > 15, "these stand in most figures"
    assert np.linalg.norm(places - lab(["white"], eyes), axis=1).min() > 30
    assert lab(["white"], "usual")[0] == pytest.approx([100, 0, 0], abs=0.1)
    assert np.linalg.norm(np.diff(lab(["#AA6E00", "#7C8500"], "deutan"), axis=0)) < 15, "alike colours would be found"


def test_names_at_the_ends_of_lines_are_kept_apart():
    _, (axes,) = style.canvas(1, height=3)
    axes.plot([0, 1], [1, 10])
    axes.set(yscale="log", ylim=(1, 100))
    style.end_labels(axes, [("high", 10.0, {}), ("low", 1.0, {}), ("beside", 1.01, {})])
    heights = {text.get_text(): text.get_position()[1] for text in axes.texts}
    assert heights == pytest.approx({"low": 0.0, "beside": 0.07, "high": 0.5})


def test_rows_of_points_have_their_words_beside_them_or_in_their_place():
    rows = [style.Row("a", [1.0, 2.0], "red", words="twice"), style.Row("b", [np.nan], "red", True, "not measured")]
    _, axes = style.rows_of_points(rows, "times", reference=1)
    assert [(text.get_text().strip(), text.xy) for text in axes.texts] == [("twice", (1, 0)), ("not measured", (0, 1))]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b"]
    first, second = axes.collections
    assert first.get_offsets()[:, 0].tolist() == [1.0, 2.0]
    assert second.get_facecolor()[0, :3].tolist() == [1, 1, 1], "white, as what was recorded"


def test_a_line_for_each_name_is_hollow_where_it_was_recorded():
    frame = pd.DataFrame({"name": ["b", "a", "b"], "setting": "cpu", "recorded": [True, False, True], "x": [1, 2, 3]})
    _, (axes,) = style.canvas(1, height=2)
    style.named_lines(axes, frame.assign(marker="s"), "x", "x")
    assert [(line.get_label(), list(line.get_xdata())) for line in axes.lines] == [("b", [1, 3]), ("a", [2])]
    assert [line.get_markerfacecolor() for line in axes.lines] == ["white", gl.plots.colour("cpu")]


def test_an_axis_is_logarithmic_where_ratios_matter_and_says_of_what_a_loss_is():
    for low, high, scale in ((0.0, 9.0, "linear"), (1.0, 3.0, "linear"), (1.0, 9.0, "log")):
        _, (axes,) = style.canvas(1, height=2)
        style.log_scale(axes.xaxis, low, high)
        assert axes.get_xscale() == scale
        axes.plot([0, 1], [low, high])
        style.loss_scale(axes)
        assert axes.get_yscale() == ("log" if low else "linear")
    for metric, models, label in (
        ("loss", ["prednet"] * 2, "loss (mean squared error per frame)"),
        ("final_loss", ["autoencoder", "whitener"], "final loss (mean squared error per image)"),
        ("loss", ["prednet", "autoencoder"], "loss (mean squared error)"),
        ("accuracy", ["prednet"], "accuracy"),
    ):
        assert style.metric_label(metric, models) == label


def test_a_picture_is_a_png_with_words_which_a_notebook_folds_below_it(tmp_path, outputs_of):
    picture = gl.plots.bits(0.1, ["float32"])
    picture.save(tmp_path / "new" / "bits.png")
    assert Image.open(tmp_path / "new" / "bits.png").mode == "P"
    wide = Image.open(io.BytesIO(picture.png())).width
    image = ElementTree.fromstring(re.sub(">$", "/>", picture.html()))
    assert image.attrib["alt"] == picture.alt
    assert image.attrib["src"].startswith("data:image/png;base64,")
    assert int(image.attrib["width"]) == wide // 2, "drawn twice as fine as it is shown"
    assert "background: white" in image.attrib["style"], "ink stays readable on a dark page"
    figure, fold = outputs_of(picture)
    assert set(figure.data) == {"image/png", "text/plain"}, "where there is HTML too, JupyterLab shows that"
    assert figure.metadata["image/png"]["width"] == wide // 2
    words = figure.data["text/plain"]
    assert fold.data["text/html"] == f"<details><summary>In words</summary><p>{escape(words)}</p></details>"
    assert figure.metadata["image/png"]["alt"] == words


def test_rows_put_below_each_other_may_bear_the_same_numbers(runs):
    """As two experiments do that were concatenated, or curvature made here and recorded."""
    twice = pd.concat([some.reset_index(drop=True) for _, some in runs.groupby("setting")])
    recorded = gl.saddles.recorded_curvature()
    recorded = recorded[(recorded.experiment == "autoencoder") & (recorded.setting == recorded.setting.iloc[0])]
    one = recorded[recorded.seed == recorded.seed.min()].reset_index(drop=True)
    measured = pd.concat([one, one.assign(recorded=False, largest=2 * one.largest)])
    drawings = (lambda frame: gl.verdict(frame).plot(), twice), (gl.plots.curvature_over_time, measured)
    for drawn, frame in drawings:
        assert drawn(frame).png() == drawn(frame.reset_index(drop=True)).png()
