"""Widgets that compute, for pages without code: a buffer, a ball on a saddle, and seeds."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping
from typing import Any

import ipywidgets
import numpy as np
import pandas as pd
import torch
from IPython.display import display
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor, nn

from companion.findings import in_words
from companion.overview import DECISION_COLOURS
from companion.widgets import Explorer
from gpulab.picture import Picture
from gpulab.plots import theme
from gpulab.plots._runs import verdict_title
from gpulab.plots.theme import FAINT, INK, ON_GPU, Style
from gpulab.report import paragraphs, table
from gpulab.saddles import CriticalPoint, Surface, find_critical_point, surface
from gpulab.saddles._escapes import Descent, Weights, choose_optimizer
from gpulab.saddles._optimizers import OPTIMIZERS
from gpulab.settings import Setting
from gpulab.stats import Verdict, verdict
from gpulab.store import recorded_runs
from gpulab.wording import metric_label, optimizer_words

FORMATS = {
    "float64": "cpu:precision=float64",
    "float32": "cpu",
    "bfloat16": "cpu:precision=bfloat16",
}
PUSHES = [("none", 0.0), ("1e-6", 1e-6), ("0.001", 1e-3), ("0.1", 0.1)]
STEPS = 200
ROLLED = 5  # steps at a time
FILL_SECONDS = 0.2  # for computing verdicts on fewer seeds as well
GPU = "cuda:tf32=off,deterministic=on"
# Recorded runs with two levels of one factor: a query, the factor, and its levels, the reference
# first.
COMPARISONS = {
    "Autoencoder: CPU and GPU": (
        "experiment == 'autoencoder' and profile == 'quick' and loader == 'copied'",
        "setting",
        ("cpu:threads=1", GPU),
    ),
    "PredNet: CPU and GPU": (
        "experiment == 'prednet' and profile == 'quick' and loader == 'copied' and speed == 4",
        "setting",
        ("cpu:threads=1", GPU),
    ),
    "PredNet: copied and overwritten frames": (
        f"experiment == 'prednet' and profile == 'paper' and setting == '{GPU}' and speed == 1",
        "loader",
        ("copied", "imitated"),
    ),
}
ALONE = (
    "This verdict answers a single question. If several are asked at once, as in the notebooks,"
    " verdicts are corrected for their number."
)


def _row(*widgets: ipywidgets.Widget) -> ipywidgets.HBox:
    return ipywidgets.HBox(widgets, layout=ipywidgets.Layout(flex_flow="row wrap"))


def _player(slider: ipywidgets.IntSlider, step: int = 1, interval: int = 250) -> ipywidgets.Play:
    """A player that moves a slider automatically."""
    play = ipywidgets.Play(
        min=slider.min, max=slider.max, step=step, interval=interval, show_repeat=False
    )
    ipywidgets.jslink((play, "value"), (slider, "value"))
    ipywidgets.jslink((slider, "max"), (play, "max"))
    return play


class BufferExplorer(ipywidgets.VBox):
    """Numbers that are written into one buffer frame by frame, and those that the gradient finds.

    >>> explorer = BufferExplorer()
    >>> explorer.seen()["the gradient finds"].tolist()
    [3.0, 3.0, 3.0]
    >>> explorer.copy.value = True
    >>> explorer.seen()["the gradient finds"].tolist()
    [1.0, 2.0, 3.0]
    """

    def __init__(self) -> None:
        self.numbers = ipywidgets.Text("1 2 3", description="frames")
        self.copy = ipywidgets.Checkbox(description="copy each frame")
        self.image = ipywidgets.HTML()
        super().__init__([_row(self.numbers, self.copy), self.image])
        for control in (self.numbers, self.copy):
            control.observe(self._show, "value")
        self._show()

    def seen(self) -> pd.DataFrame:
        """A row for each frame: its loss at w = 0, (w − frame)², and what the gradient finds.

        The gradient of that loss is −2 × frame.
        """
        weight, buffer, losses = torch.zeros((), requires_grad=True), np.zeros((), np.float32), []
        frames = [float(number) for number in self.numbers.value.replace(",", " ").split()]
        for number in frames:
            buffer[...] = number  # over the previous frame
            frame = torch.as_tensor(buffer.copy() if self.copy.value else buffer)
            losses.append(nn.functional.mse_loss(weight, frame))
        found = [-torch.autograd.grad(loss, weight)[0].item() / 2 for loss in losses]
        values = [loss.item() for loss in losses]
        return pd.DataFrame(
            {"frame": frames, "loss when it came": values, "the gradient finds": found}
        )

    def _ipython_display_(self) -> None:
        """Show the widget, or the table where no kernel runs."""
        view = "application/vnd.jupyter.widget-view+json"
        widget_data = self._repr_mimebundle_()[view]
        words = f"The buffer explorer, with the frames {self.numbers.value}."
        still = {"text/plain": words, "text/html": self.image.value}
        display({view: widget_data, **still}, raw=True)

    def _show(self, _: object = None) -> None:
        try:
            self.image.value = table(self.seen())
        except ValueError:
            self.image.value = "Type numbers separated by spaces."


class _TwoWeights(nn.Module):
    """One unit with two weights that learns a principal component; its whole loss can be drawn."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight)[:, None] * self.weight


def small_saddle() -> CriticalPoint:
    """A saddle of a network with two weights, at the smaller of two principal components.

    The second moments of the components are 4 and 1. The larger component is at an angle of 0.7;
    at other angles the weights would be rounded differently.
    """
    cosine, sine = math.cos(0.7), math.sin(0.7)
    large, small = torch.tensor([[cosine, sine], [-sine, cosine]], dtype=torch.float64)
    data = math.sqrt(2) * torch.stack([2 * large, small])
    return find_critical_point(
        _TwoWeights(small), nn.functional.mse_loss, (data, data), progress=False
    )


def trajectory(
    saddle: CriticalPoint, setting: str, optimizer: str, rate: float, push: float
) -> pd.DataFrame:
    """An optimiser's path from a saddle in the plane of extreme curvatures, a row for each step.

    Columns are the signed distances `along` and `across`, and the `loss`. The path ends where they
    become infinite or NaN.
    """
    rows: list[list[float]] = []
    with Setting.parse(setting).apply() as parsed:
        weights = Weights(saddle.model, parsed)
        descent = Descent(saddle, weights, choose_optimizer(saddle, weights, optimizer, rate))
        plane = torch.stack([saddle.direction, saddle.steepest]).to(descent.saddle)
        weights.set_weights(descent.saddle + push * plane[0])
        for loss, displacement in itertools.islice(descent.iterate(), STEPS + 1):
            row = [*(plane @ displacement).tolist(), float(loss)]
            if not all(map(math.isfinite, row)):
                break
            rows.append(row)
    return pd.DataFrame(rows, columns=["along", "across", "loss"])


class SaddleExplorer(Explorer):
    """A ball that an optimiser rolls down from a saddle, on a surface that can be rotated.

    >>> explorer = SaddleExplorer()
    >>> explorer.step.value = 200
    >>> "after 200 steps the ball is" in explorer.image.value
    True
    """

    def __init__(self) -> None:
        self.saddle = small_saddle()
        self.surface = surface(self.saddle, extent=1.4, places=20)
        optimizer_options = [(optimizer_words(name), name) for name in OPTIMIZERS]
        self.optimizer = ipywidgets.Dropdown(
            options=optimizer_options, value="adam", description="optimiser"
        )
        self.format = ipywidgets.Dropdown(
            options=[*FORMATS], value="float32", description="arithmetic"
        )
        self.rate = ipywidgets.Dropdown(options=[0.01, 0.03, 0.1], value=0.01, description="rate")
        self.push = ipywidgets.Dropdown(options=PUSHES, description="push")
        self.step = ipywidgets.IntSlider(0, min=0, max=STEPS, description="step")
        self.turn = ipywidgets.IntSlider(-60, min=-180, max=180, step=5, description="turn (°)")
        self.tilt = ipywidgets.IntSlider(35, min=0, max=90, step=5, description="tilt (°)")
        self.image = ipywidgets.HTML()
        controls = _row(self.optimizer, self.format, self.rate, self.push)
        super().__init__(
            [
                controls,
                _row(_player(self.step, ROLLED), self.step),
                _row(self.turn, self.tilt),
                self.image,
            ]
        )
        for control in (self.optimizer, self.format, self.rate, self.push):
            control.observe(self._roll, "value")
        for slider in (self.step, self.turn, self.tilt):
            slider.observe(self.draw, "value")
        self._roll()

    def picture(self) -> Picture:
        """Draw the ball at the step and from the angles that the sliders give."""
        push = f"a push of {self.push.label}" if self.push.value else "no push"
        title = f"{self.optimizer.label}, {self.format.value}, rate {self.rate.value}, {push}"
        return saddle_path(
            self.surface, self.path, self.step.value, self.turn.value, self.tilt.value, title
        )

    def _roll(self, _: object = None) -> None:
        setting, optimizer = FORMATS[self.format.value], self.optimizer.value
        self.path = trajectory(self.saddle, setting, optimizer, self.rate.value, self.push.value)
        self.draw()


class SeedsExplorer(Explorer):
    """Recorded runs, added one seed at a time, and the verdict on those added so far.

    >>> explorer = SeedsExplorer()
    >>> explorer.seeds.value = 10
    >>> explorer.verdicts[10].decision
    'different but negligible'
    """

    def __init__(self) -> None:
        self.runs = recorded_runs()
        self.which = ipywidgets.Dropdown(
            options=[*COMPARISONS], description="compare", layout=ipywidgets.Layout(width="26rem")
        )
        self.order = ipywidgets.IntSlider(0, min=0, max=20, description="order")
        self.seeds = ipywidgets.IntSlider(2, min=2, max=2, description="seeds")
        self.image, self.said = ipywidgets.HTML(), ipywidgets.HTML()
        controls = _row(self.which, self.order)
        super().__init__(
            [controls, _row(_player(self.seeds, interval=500), self.seeds), self.image, self.said]
        )
        self.which.observe(self._restart, "value")
        self.order.observe(self._restart, "value")
        self.seeds.observe(self._show, "value")
        self._restart()

    def picture(self) -> Picture:
        """Draw the verdicts so far."""
        return seed_by_seed(
            {
                count: partial_verdict
                for count, partial_verdict in self.verdicts.items()
                if count <= self.seeds.value
            }
        )

    def _restart(self, _: object = None) -> None:
        """Start a comparison anew: in order 0 the seeds are ascending, in the others shuffled."""
        query, self.factor, levels = COMPARISONS[self.which.value]
        runs = self.runs.query(f"rerun == 0 and {query}")
        self.chosen, self.reference = runs[runs[self.factor].isin(levels)], levels[0]
        seeds = np.sort(self.chosen.seed.unique())
        self.in_order = (
            np.random.default_rng(self.order.value).permutation(seeds)
            if self.order.value
            else seeds
        )
        self.verdicts: dict[int, Verdict] = {}
        self.seeds.max = len(seeds)
        if self.seeds.value > 2:
            self.seeds.value = 2  # this calls `_show`
        else:
            self._show()

    def _show(self, _: object = None) -> None:
        """Show the verdict on the seeds so far, and draw it with earlier ones if there is time."""
        count, deadline = self.seeds.value, time.monotonic() + FILL_SECONDS
        for fewer in range(count, 1, -1):
            if fewer not in self.verdicts and (fewer == count or time.monotonic() < deadline):
                runs = self.chosen[self.chosen.seed.isin(self.in_order[:fewer])]
                self.verdicts[fewer] = verdict(runs, factor=self.factor, reference=self.reference)
        judged = self.verdicts[count]
        self.said.value = Markup(
            "<p>{} {}</p><details><summary>The statistics</summary>{}</details>"
        ).format(" ".join(in_words(judged)), ALONE, paragraphs(str(judged).splitlines()))
        self.draw()


# --- their figures --------------------------------------------------------------------------------


@theme.with_theme
def seed_by_seed(verdicts: Mapping[int, Verdict]) -> Picture:
    """Draw the difference and its interval against the number of seeds, coloured by decision."""
    counts = sorted(verdicts)
    rows = pd.concat([verdicts[count].table for count in counts]).assign(count=counts)
    figure, (axes,) = theme.canvas()
    margin = f"margin, ±{rows.margin.iloc[-1]:.2g}"
    axes.fill_between(
        counts, -rows.margin, rows.margin, color=FAINT, alpha=0.18, lw=0, step="mid", label=margin
    )
    axes.axhline(0, color=INK, lw=0.8, zorder=1)
    for decision, decision_rows in rows.groupby("decision"):
        axes.vlines(
            decision_rows["count"],
            decision_rows.low,
            decision_rows.high,
            color=DECISION_COLOURS[decision],
            lw=2.2,
            zorder=2,
        )
        style: Style = {
            "ls": "",
            "marker": "o",
            "ms": 5,
            "color": DECISION_COLOURS[decision],
            "label": decision,
        }
        axes.plot(decision_rows["count"], decision_rows.difference, zorder=3, **style)
    # as much of the margin as there is room for
    reach = 1.2 * np.nanmax(rows[["low", "high", "difference"]].abs())
    axes.set(xlim=(0.5, max(counts[-1], 10) + 0.5), ylim=(-reach, reach) if reach > 0 else None)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    latest = verdicts[counts[-1]]
    metric = metric_label(latest.metric, latest.runs.get("experiment", ())).replace(" (", "\n(")
    axes.set(xlabel=f"number of {latest.block}s", ylabel=f"difference in {metric}")
    headline = f"After {len(latest.pairs)} {latest.block}s: {verdict_title(latest)}"
    alt = f"The mean difference and its interval against the number of {latest.block}s. {headline}."
    return theme.finish_figure(figure, headline, alt, columns=3)


def saddle_path(
    surface: Surface, path: pd.DataFrame, step: int, turn: float, tilt: float, title: str
) -> Picture:
    """Draw a ball's path on the loss around a saddle up to a step, seen from `turn` and `tilt`."""
    path_so_far = path[: step + 1]
    ball, top = path_so_far.iloc[-1], 1.8 * surface.loss
    # what rises higher would hide the rest
    low = surface.losses[:, len(surface.along) // 2] <= 1.3 * surface.loss
    figure = Figure(figsize=(7.2, 4.8))
    # Matplotlib has no types for its axes in three dimensions.
    axes: Any = figure.add_axes((0.02, 0.02, 0.94, 0.9), projection="3d", computed_zorder=False)
    height = np.minimum(surface.losses[low], top)
    x, y = np.meshgrid(surface.along, surface.across[low])
    axes.plot_surface(x, y, height, cmap="cividis", rcount=40, ccount=40, lw=0, alpha=0.9, zorder=1)
    axes.plot(
        path_so_far.along, path_so_far.across, path_so_far.loss, color="white", lw=3, zorder=2
    )
    axes.plot(
        path_so_far.along, path_so_far.across, path_so_far.loss, color=ON_GPU, lw=1.6, zorder=3
    )
    axes.plot([0], [0], [surface.loss], marker="+", ms=9, color=INK, zorder=4)
    axes.plot(
        [ball.along],
        [ball.across],
        [ball.loss],
        marker="o",
        ms=10,
        color=ON_GPU,
        markeredgecolor=INK,
        zorder=5,
    )
    axes.view_init(elev=tilt, azim=turn)
    axes.set_box_aspect((2.2, 1.4, 1.0), zoom=0.95)
    axes.set(zlim=(0, top), xlim=surface.along[[0, -1]], ylim=(y.min(), y.max()))
    axes.set_xlabel("along the least curvature", fontsize=8)
    axes.set_ylabel("along the greatest curvature", fontsize=8)
    axes.set_zlabel("loss", fontsize=8)
    axes.tick_params(labelsize=7)
    ball_words = (
        f"{math.hypot(ball.along, ball.across):.2g} from the saddle, at a loss of {ball.loss:.2g}"
    )
    # In one line the title would be wider than the figure.
    headline = f"{title}:\nafter {len(path_so_far) - 1} steps the ball is {ball_words}"
    return theme.finish_figure(
        figure, headline, f"The loss around a saddle, and the path of a ball on it. {headline}."
    )


buffer_explorer, saddle_explorer, seeds_explorer = BufferExplorer, SaddleExplorer, SeedsExplorer
