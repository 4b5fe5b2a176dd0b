"""The text and content of figures, drawn from tables made by hand."""

import io
import re
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
import torch
from markupsafe import escape
from matplotlib.text import Text
from PIL import Image

import gpulab as gl

SETTINGS = ("cpu", "cuda:tf32=on", "cpu:threads=1,emulate=tf32")


@pytest.fixture
def runs():
    """Return runs of eight seeds from 0.1 to 0.8.

    The third setting moves each seed by a hundredth, and one run diverged.
    """
    rows = [
        {
            "setting": setting,
            "seed": seed,
            "final_loss": 0.1 * (seed + 1) * (1 + 0.01 * number),
            "status": "finished",
        }
        | {
            "recorded": setting.startswith("cuda"),
            "machine": setting[:4],
            "weights": f"{seed}{number // 2}",
        }
        for number, setting in ((0, SETTINGS[0]), (0, SETTINGS[1]), (1, SETTINGS[2]))
        for seed in range(8)
    ]
    return pd.DataFrame(rows).assign(experiment="prednet", profile="smoke", protocol="p", rerun=0)


def test_plots_losses_refuse_two_experiments(runs):
    with pytest.raises(gl.UsageError, match="the frame mixes"):
        gl.plots.losses(pd.concat([runs, runs.assign(experiment="autoencoder")]))


def test_plots_differences_of_one_seed_have_no_spread(runs):
    one = gl.verdict(
        runs[runs.seed == 0].assign(loader=runs.setting), factor="loader", reference="cpu"
    )
    assert (
        gl.plots.differences(one).figure.get_suptitle() == "One seed has no spread to compare with"
    )


def suptitle(picture):
    return picture.figure.get_suptitle()


@pytest.mark.parametrize(
    ("shifts", "noise", "title"),
    [
        ((0.0, 0.0), 1e-4, "Against CPU: the means agree to within the margin for 2 of 2"),
        (
            (0.3, 0.0),
            1e-4,
            "Against CPU: the means differ for 1 of 2, the means agree to within the margin for"
            " 1 of 2",
        ),
        ((0.3, 0.3), 1e-4, "Against CPU: the means differ for 2 of 2"),
        (
            (0.001, 0.001),
            1e-4,
            "Against CPU: the means differ, but by less than the margin for 2 of 2",
        ),
        ((0.0, 0.0), 0.2, "Against CPU: too few seeds to decide for 2 of 2"),
    ],
)
def test_estimation_has_a_title_that_follows_the_decisions(runs, shifts, noise, title):
    noise = noise * (runs.seed % 3 - 1) * (runs.setting != "cpu")
    shift = runs.setting.map(dict(zip(SETTINGS, (0.0, *shifts), strict=True)))
    moved = runs.assign(final_loss=0.1 * (runs.seed + 1) + shift + noise)
    assert suptitle(gl.verdict(moved, reference="cpu").plot()) == title


def test_estimation_title_is_about_means_where_single_seeds_are_beyond_the_margin():
    seeds = np.arange(40)
    losses = 1 + 0.1 * np.sin(seeds)
    moves = np.where(seeds < 2, 0.05 * (-1.0) ** seeds, 0.0)  # two seeds move, the mean does not
    cpu = pd.DataFrame({"setting": "cpu", "seed": seeds, "final_loss": losses})
    cuda = cpu.assign(setting="cuda", final_loss=losses + moves)
    judged = gl.verdict(pd.concat([cpu, cuda], ignore_index=True))
    assert judged.pairs.difference.abs().max() > judged.table.margin.max()
    assert suptitle(judged.plot()) == "GPU, against CPU: the means agree to within the margin"


@pytest.mark.parametrize(
    ("by_seed", "by_setting", "title"),
    [
        (2.0, 1.1, "The loss varies up to 2.0-fold between seeds, and by at most 10 % between"),
        (1.0, 3.0, "The loss varies up to 1.0-fold between seeds, and by at most 2e+02 % between"),
    ],
)
def test_losses_have_a_title_that_compares_seeds_with_settings(runs, by_seed, by_setting, title):
    losses = 0.1 * by_seed ** (runs.seed == 3) * by_setting ** (runs.setting != "cpu")
    assert suptitle(gl.plots.losses(runs.assign(final_loss=losses))).startswith(title)


def histories(runs):
    """Return a history of ten windows with constant losses for each run."""
    runs = runs.assign(id=runs.index.astype(str), loss=runs.final_loss)
    return pd.concat([runs.assign(frames_seen=20 * n) for n in range(1, 11)], ignore_index=True)


@pytest.mark.parametrize(
    ("times", "title"),
    [
        (2.0, "On average, the final loss is 2 times as high for GPU, TF32 as for CPU"),
        (0.5, "On average, the final loss is 2 times as high for CPU as for GPU, TF32"),
    ],
)
def test_curves_of_two_have_a_title_that_names_the_higher_loss(runs, times, title):
    both = runs[runs.setting.isin(SETTINGS[:2])]
    both = both.assign(final_loss=both.final_loss * times ** (both.setting != "cpu"))
    assert suptitle(gl.plots.curves(histories(both))) == title


@pytest.mark.parametrize(("largest", "fold"), [(0.8, "8.0"), (0.1, "1.0")])
def test_curves_of_one_setting_have_a_title_that_says_how_far_seeds_differ(runs, largest, fold):
    one = runs[runs.setting == "cpu"]
    one = one.assign(final_loss=one.final_loss.clip(upper=largest))
    assert suptitle(gl.plots.curves(histories(one))) == (
        f"8 seeds: final losses differ up to {fold}-fold"
    )


@pytest.mark.parametrize("shift", [0.01, 1.0])
def test_differences_have_a_title_with_the_largest_move_of_a_seed(runs, shift):
    losses = 0.1 * (runs.seed + 1)
    moved = (runs.setting == SETTINGS[2]) & (runs.seed == 5)
    judged = gl.verdict(runs.assign(final_loss=losses + shift * moved), reference="cpu")
    ratio = shift / losses[:8].std()
    assert suptitle(gl.plots.differences(judged)) == (
        f"The setting changes a seed's result by up to {ratio:.2g} times the spread between seeds"
    )


@pytest.mark.parametrize(
    ("values", "below", "above"),
    [([-1.0, 0.0, 4.0], "33.33%", "33.33%"), ([0.0, 1.0, 4.0], "0.00%", "66.67%")],
)
def test_spectrum_has_a_title_that_counts_signs(values, below, above):
    matrix = torch.diag(torch.tensor(values).repeat(9))
    title = suptitle(gl.plots.spectrum(gl.saddles.spectral_density(matrix, probes=64, steps=9)))
    found_below, found_above = re.findall(r"([\d.]+)% ", title)
    assert float(found_below) == pytest.approx(float(below[:-1]), abs=3)
    assert float(found_above) == pytest.approx(float(above[:-1]), abs=3)
    assert title.endswith("clearly above")


@pytest.mark.parametrize(
    ("predicted", "title"),
    [
        ("next", "Mean squared error: 0 for these predictions, 0.25 for repeating frame t"),
        ("previous", "Mean squared error: 0.25 for these predictions, 0.25 for repeating frame t"),
    ],
)
def test_predictions_have_a_title_with_their_error_and_that_of_repeating(predicted, title):
    films = torch.zeros(20, 1, 3, 8, 8)
    films[1::2] = 0.5  # every frame differs from the one before by a half
    predictions = {"next": films, "previous": 0.5 - films}[predicted]
    run = SimpleNamespace(predict=lambda: (films, predictions))
    assert suptitle(gl.plots.predictions(run)) == title


@pytest.mark.parametrize(("output", "error"), [(0.5, "0"), (0.0, "0.25")])
def test_reconstructions_have_a_title_with_their_error(output, error):
    images = torch.full((9, 1, 8, 8), 0.5)
    run = SimpleNamespace(predict=lambda: (images, torch.full_like(images, output)))
    assert suptitle(gl.plots.reconstructions(run)) == (
        f"Mean squared error of these 8 images: {error}"
    )


def test_plots_predictions_and_reconstructions_refuse_a_function():
    run = gl.train(lambda seed: 0.1 * seed, progress=False)
    for plot in (gl.plots.predictions, gl.plots.reconstructions):
        with pytest.raises(gl.UsageError, match="no network to predict with"):
            plot(run)


def test_plots_reconstructions_do_not_call_a_tiny_error_zero():
    run = gl.train("autoencoder", setting="cpu", profile="smoke", frames=20, progress=False)
    for tensor in run.model.state_dict().values():
        tensor.mul_(1e-5)
    run.data.heldout_images = np.full_like(
        run.data.heldout_images, 128
    )  # of which half is what a network without weights makes
    assert not re.search(r" 0\.0*$", gl.plots.reconstructions(run).figure.get_suptitle())


def test_plots_do_not_take_names_with_dollars_for_mathematics(runs):
    odd = {SETTINGS[1]: r"$\nothing{$", SETTINGS[2]: "$2^3$"}
    table = runs.assign(loader=runs.setting.replace(odd), machine=r"a $\frac{1}{$").drop(
        columns="setting"
    )
    verdict = gl.verdict(table, factor="loader", reference="cpu")
    for picture in (verdict.plot(), gl.plots.differences(verdict)):
        assert picture.png()
        texts = [text for text in picture.figure.findobj(Text) if text.get_visible()]
        shown = [text for text in texts if "$2^3$" in text.get_text()]
        assert shown
        assert not any(text.get_parse_math() for text in shown)


def test_roofline_draws_no_layer_above_its_ceiling():
    frame = gl.device.recorded_rooflines()
    frame = frame[frame.setting == frame.setting.iloc[0]]
    peak = frame[frame.kind == "matrix"].gflops.max()
    faster = frame.assign(gflops=frame.gflops.where(frame.kind != "network", 10 * peak))
    words = "faster than the ceilings"
    for table, expected in ((frame, False), (faster, True)):
        figure = gl.plots.roofline(table).figure
        highest = max(
            points.get_offsets()[:, 1].max()
            for axes in figure.axes
            for points in axes.collections
            if len(points.get_offsets())
        )
        assert highest <= peak * (1 + 1e-9)
        assert any(words in text.get_text() for text in figure.findobj(Text)) is expected


def test_picture_is_a_png_with_words_that_a_notebook_folds_below_it(tmp_path, outputs_of):
    picture = gl.plots.roofline(gl.device.recorded_rooflines())
    picture.save(tmp_path / "new" / "roofline.png")
    assert Image.open(tmp_path / "new" / "roofline.png").mode == "P"
    wide = Image.open(io.BytesIO(picture.png())).width
    image = ElementTree.fromstring(re.sub(">$", "/>", picture.html()))
    assert image.attrib["alt"] == picture.alt
    assert image.attrib["src"].startswith("data:image/png;base64,")
    assert int(image.attrib["width"]) == wide // 2, "drawn twice as fine as it is shown"
    figure, fold = outputs_of(picture)
    assert set(figure.data) == {"image/png", "text/plain"}, (
        "where there is HTML too, JupyterLab shows that"
    )
    words = figure.data["text/plain"]
    assert (
        fold.data["text/html"]
        == f"<details><summary>In words</summary><p>{escape(words)}</p></details>"
    )
    assert figure.metadata["image/png"]["alt"] == words


def test_plots_take_rows_with_the_same_index(runs):
    """Two experiments that were concatenated have repeated indices."""
    twice = pd.concat([some.reset_index(drop=True) for _, some in runs.groupby("setting")])
    drawn, drawn_again = (
        gl.verdict(frame).plot() for frame in (twice, twice.reset_index(drop=True))
    )
    assert drawn.png() == drawn_again.png()


def test_draw_finds_the_figure_of_a_derived_result_and_refuses_others(python):
    done = python("""
        import dataclasses
        import pandas as pd
        import gpulab as gl
        from gpulab.plots._drawing import draw

        class Mine(gl.stats.Verdict):
            pass

        seeds = [number // 2 for number in range(12)]
        settings = ["cpu", "cuda"] * 6
        runs = pd.DataFrame({"setting": settings, "seed": seeds, "final_loss": range(12)})
        verdict = gl.verdict(runs)
        names = [field.name for field in dataclasses.fields(verdict)]
        mine = Mine(**{name: getattr(verdict, name) for name in names})
        print(type(mine.plot()).__name__)
        try:
            draw(3)
        except TypeError as error:
            print(error)
    """)
    assert done.stdout.splitlines() == ["Picture", "no module of gpulab.plots draws a int"]


def test_plots_curves_of_runs_without_their_histories_name_what_reads_them():
    runs = gl.recorded_runs().head(2)
    with pytest.raises(
        gl.UsageError,
        match=r"without frames_seen, loss; .* gl\.plots\.curves\(gl\.store\.history\(runs\)\)$",
    ):
        gl.plots.curves(runs)
    with pytest.raises(gl.UsageError, match="without colour"):
        gl.plots.curves(gl.store.history(runs), factor="colour")


@pytest.mark.parametrize("number", [2, 3, 4, 5])
def test_plots_curves_have_a_panel_for_each_of_more_than_two_settings(number):
    settings = ["cpu", "cpu:threads=1", "cuda:tf32=off", "cuda:tf32=on", "cuda"][:number]
    rows = [
        {
            "setting": setting,
            "id": f"{setting} {seed}",
            "seed": seed,
            "frames_seen": 20 * n,
            "loss": 1 / (n + 1),
        }
        for setting in settings
        for seed in range(2)
        for n in range(10)
    ]
    histories = pd.DataFrame(rows).assign(experiment="prednet", rerun=0)
    axes = gl.plots.curves(histories).figure.axes
    assert len(axes) == (number if number > 2 else 1)
    assert all(each.lines for each in axes)
    # Each column of panels has the numbers and their meaning at its foot.
    feet = {each.get_subplotspec().colspan.start: each for each in axes}
    assert {each.get_xlabel() for each in feet.values()} == {"frames seen"}
    assert all(each.xaxis.label.get_visible() for each in feet.values())
