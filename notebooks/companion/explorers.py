"""The widgets of the pages without code which compute: two trainings, a ball on a saddle, seeds, an audit."""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ipywidgets
import numpy as np
import pandas as pd
import psutil
import torch
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor, nn

from companion.findings import in_words
from companion.widgets import Explorer
from gpulab.audits.audits import audit
from gpulab.audits.comparison import check_same_step
from gpulab.audits.traces import Trace
from gpulab.content import weights_digest
from gpulab.errors import DataError, GpulabError, in_one_line, printable
from gpulab.plots import style
from gpulab.plots.names import names, optimizer_words, setting_words
from gpulab.plots.runs import decided
from gpulab.plots.style import FAINT, INK, ON_GPU, Look
from gpulab.report import Picture, paragraphs
from gpulab.saddles.critical import CriticalPoint, find_critical_point
from gpulab.saddles.escapes import Descent, Weights, choose_optimizer
from gpulab.saddles.landscapes import Surface, surface
from gpulab.saddles.optimizers import OPTIMIZERS
from gpulab.settings import Setting, available_settings
from gpulab.stats.decisions import DECISIONS
from gpulab.stats.verdicts import Verdict, verdict
from gpulab.store.recorded import recorded_folder
from gpulab.store.runs import recorded_runs
from gpulab.training import loop
from gpulab.training.run import engine_of, set_up, windows
from gpulab.training.spec import RunSpec

MOST_UPLOADED = 1 << 23  # bytes of a file that comes through a browser; the largest recorded trace has a tenth
MOST_NUMBERS = 1 << 21  # in a column of one, ten times as many as the largest network that was recorded
MORE_MEMORY = 2 << 30  # bytes that reading and comparing may take
DRAW_SECONDS = 0.3  # between two pictures of what goes on
FRAMES = {"autoencoder": 1000, "prednet": 400}  # of a training, which takes some seconds
OTHERS = "cpu:precision=bfloat16", "cpu:emulate=tf32", "cpu:emulate=bfloat16"  # beside those that a machine has itself
FORMATS = {"float64": "cpu:precision=float64", "float32": "cpu", "bfloat16": "cpu:precision=bfloat16"}
PUSHES = [("none", 0.0), ("1e-6", 1e-6), ("0.001", 1e-3), ("0.1", 0.1)]
STEPS = 200
ROLLED = 5  # steps at a time
FILL_SECONDS = 0.2  # in which verdicts of fewer seeds than are in are made, too
GPU = "cuda:tf32=off,deterministic=on"
# Recorded runs with two levels of one factor: a query, the factor, and its levels, the reference first.
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
    "PredNet: own and shared memory": (
        f"experiment == 'prednet' and profile == 'paper' and setting == '{GPU}' and speed == 1",
        "loader",
        ("copied", "imitated"),
    ),
}
DECIDED = dict(zip(DECISIONS, ("#CC3311", "#CC7711", FAINT, "#117733"), strict=True))


def _row(*widgets: ipywidgets.Widget) -> ipywidgets.HBox:
    return ipywidgets.HBox(widgets, layout=ipywidgets.Layout(flex_flow="row wrap"))


def _player(slider: ipywidgets.IntSlider, step: int = 1, interval: int = 250) -> ipywidgets.Play:
    """What moves a slider by itself."""
    play = ipywidgets.Play(min=slider.min, max=slider.max, step=step, interval=interval, show_repeat=False)
    ipywidgets.jslink((play, "value"), (slider, "value"))
    ipywidgets.jslink((slider, "max"), (play, "max"))
    return play


class TrainingExplorer(Explorer):
    """Two settings under which the same network is trained from the same weights; losses are drawn as they come.

    >>> TrainingExplorer().settings[1].value
    'cpu:emulate=tf32'
    """

    thread: threading.Thread | None = None  # in which the training goes on, until it is done or `stopping` is set

    def __init__(self) -> None:
        self.stopping = threading.Event()
        usable = [name for name in available_settings() if "isa=" not in name]  # that one is chosen before torch loads
        usable += [name for name in OTHERS if name not in usable]
        options = [(words, name) for name, words in names(usable).items()]
        self.net = ipywidgets.Dropdown(options=[*FRAMES], description="network")
        self.settings = [
            ipywidgets.Dropdown(options=options, value=value, description=description)
            for description, value in (("setting", usable[0]), ("and", "cpu:emulate=tf32"))
        ]
        self.seed = ipywidgets.IntSlider(0, min=0, max=9, description="seed")
        self.train = ipywidgets.Button(description="Train", button_style="primary", icon="play")
        self.halt = ipywidgets.Button(description="Stop", icon="stop")
        self.said, self.image = ipywidgets.HTML(), ipywidgets.HTML()
        controls = _row(self.net, *self.settings, self.seed)
        super().__init__([controls, _row(self.train, self.halt), self.said, self.image])
        self.train.on_click(lambda _: self._begin())
        self.halt.on_click(self._end)
        for control in (self.net, *self.settings, self.seed):
            control.observe(self._restart, "value")
        self._restart()

    def picture(self) -> Picture:
        """The losses so far."""
        return side_by_side([dropdown.value for dropdown in self.settings], self.losses, FRAMES[self.net.value])

    def stop(self) -> None:
        """End the training that goes on, if any."""
        self.stopping.set()
        if self.thread:
            self.thread.join()

    def _restart(self, _: Any = None) -> None:
        self.stop()
        self.losses: tuple[list[tuple[int, float]], ...] = ([], [])
        self.said.value = f"Press Train to begin from seed {self.seed.value}."
        self.draw()

    def _begin(self) -> None:
        self._restart()
        self.said.value = "Training …"
        self.stopping.clear()
        self.thread = threading.Thread(target=self._train, daemon=True)
        self.thread.start()

    def _end(self, _: Any = None) -> None:
        self.stop()
        self.said.value = "Stopped."

    def _train(self) -> None:
        """Train the network under both settings in turns, a window at a time, and draw it now and then."""
        drawn_at, running = time.monotonic(), []
        net, seed = self.net.value, self.seed.value
        try:
            for dropdown in self.settings:
                spec = RunSpec.of(net, setting=dropdown.value, seed=seed, profile="smoke", frames=FRAMES[net])
                training = set_up(spec)
                running.append((spec, training, engine_of(spec, training), windows(spec, training)))
            for number in range(1, FRAMES[net] // running[0][0].window + 1):
                for (spec, training, engine, left), rows in zip(running, self.losses, strict=True):
                    if self.stopping.is_set():
                        return
                    if training.diverged_at is None:
                        with spec.in_force():  # its flags are in force for its own turns only
                            loop.train(training, [next(left)], engine)
                        rows.append((number * spec.window, training.history[-1].loss))
                if time.monotonic() - drawn_at > DRAW_SECONDS:
                    self.draw()
                    drawn_at = time.monotonic()
        except GpulabError as error:
            self.said.value = Markup.escape(error)
            return
        self.draw()
        bits = {weights_digest(training.model.state_dict()) for _, training, *_ in running}
        self.said.value = f"Done. The trained weights {'have the same bits' if len(bits) == 1 else 'differ'}."


class _TwoWeights(nn.Module):
    """One unit whose two weights lead in and out: a principal component, whose whole loss can be drawn."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight)[:, None] * self.weight


def small_saddle() -> CriticalPoint:
    """A saddle of a network of two weights, which holds the smaller of two principal components of second moments 4, 1.

    The larger one is at an angle of 0.7, for at others the weights would round otherwise.
    """
    cosine, sine = math.cos(0.7), math.sin(0.7)
    large, small = torch.tensor([[cosine, sine], [-sine, cosine]], dtype=torch.float64)
    data = math.sqrt(2) * torch.stack([2 * large, small])
    return find_critical_point(_TwoWeights(small), nn.functional.mse_loss, (data, data), progress=False)


def trajectory(saddle: CriticalPoint, setting: str, optimizer: str, rate: float, push: float) -> pd.DataFrame:
    """An optimiser's way from a saddle, in the plane of its least and its greatest curvature; a row for each step.

    Columns are the signed distances `along` and `across`, and the `loss`. It ends where they become infinite or NaN.
    """
    rows: list[list[float]] = []
    with Setting.parse(setting).apply() as parsed:
        weights = Weights(saddle.model, parsed)
        descent = Descent(saddle, weights, choose_optimizer(saddle, weights, optimizer, rate))
        plane = torch.stack([saddle.direction, saddle.steepest]).to(descent.saddle)
        weights.move_to(descent.saddle + push * plane[0])
        for loss, displacement in itertools.islice(descent.walk(), STEPS + 1):
            row = [*(plane @ displacement).tolist(), float(loss)]
            if not all(map(math.isfinite, row)):
                break
            rows.append(row)
    return pd.DataFrame(rows, columns=["along", "across", "loss"])


class SaddleExplorer(Explorer):
    """A ball that an optimiser rolls down from a saddle, in an arithmetic, on a surface that can be turned.

    >>> explorer = SaddleExplorer()
    >>> explorer.step.value = 200
    >>> "after 200 steps the ball is" in explorer.image.value
    True
    """

    def __init__(self) -> None:
        self.saddle = small_saddle()
        self.surface = surface(self.saddle, extent=1.4, places=20)
        optimizer_options = [(optimizer_words(name), name) for name in OPTIMIZERS]
        self.optimizer = ipywidgets.Dropdown(options=optimizer_options, value="adam", description="optimiser")
        self.format = ipywidgets.Dropdown(options=[*FORMATS], value="float32", description="arithmetic")
        self.rate = ipywidgets.Dropdown(options=[0.01, 0.03, 0.1], value=0.01, description="rate")
        self.push = ipywidgets.Dropdown(options=PUSHES, description="push")
        self.step = ipywidgets.IntSlider(0, min=0, max=STEPS, description="step")
        self.turn = ipywidgets.IntSlider(-60, min=-180, max=180, step=5, description="turn (°)")
        self.tilt = ipywidgets.IntSlider(35, min=0, max=90, step=5, description="tilt (°)")
        self.image = ipywidgets.HTML()
        controls = _row(self.optimizer, self.format, self.rate, self.push)
        super().__init__(
            [controls, _row(_player(self.step, ROLLED), self.step), _row(self.turn, self.tilt), self.image]
        )
        for control in (self.optimizer, self.format, self.rate, self.push):
            control.observe(self._roll, "value")
        for slider in (self.step, self.turn, self.tilt):
            slider.observe(self.draw, "value")
        self._roll()

    def picture(self) -> Picture:
        """The ball where the sliders say."""
        push = f"a push of {self.push.label}" if self.push.value else "no push"
        title = f"{self.optimizer.label}, {self.format.value}, rate {self.rate.value}, {push}"
        return saddle_path(self.surface, self.path, self.step.value, self.turn.value, self.tilt.value, title)

    def _roll(self, _: Any = None) -> None:
        setting, optimizer = FORMATS[self.format.value], self.optimizer.value
        self.path = trajectory(self.saddle, setting, optimizer, self.rate.value, self.push.value)
        self.draw()


class SeedsExplorer(Explorer):
    """Recorded runs that come in one seed at a time, and the verdict on those that are in.

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
        super().__init__([controls, _row(_player(self.seeds, interval=500), self.seeds), self.image, self.said])
        self.which.observe(self._restart, "value")
        self.order.observe(self._restart, "value")
        self.seeds.observe(self._show, "value")
        self._restart()

    def picture(self) -> Picture:
        """The verdicts so far."""
        return seed_by_seed(
            {count: partial_verdict for count, partial_verdict in self.verdicts.items() if count <= self.seeds.value}
        )

    def _restart(self, _: Any = None) -> None:
        """The runs of a comparison in an order: 0 is as they were recorded, others are shuffled."""
        query, self.factor, levels = COMPARISONS[self.which.value]
        runs = self.runs.query(f"rerun == 0 and {query}")
        self.chosen, self.reference = runs[runs[self.factor].isin(levels)], levels[0]
        seeds = np.sort(self.chosen.seed.unique())
        self.in_order = np.random.default_rng(self.order.value).permutation(seeds) if self.order.value else seeds
        self.verdicts: dict[int, Verdict] = {}
        self.seeds.max = len(seeds)
        if self.seeds.value > 2:
            self.seeds.value = 2  # which shows it
        else:
            self._show()

    def _show(self, _: Any = None) -> None:
        """Say the verdict on the seeds that are in, and draw it, with those of fewer seeds as far as there is time."""
        count, deadline = self.seeds.value, time.monotonic() + FILL_SECONDS
        for fewer in range(count, 1, -1):
            if fewer not in self.verdicts and (fewer == count or time.monotonic() < deadline):
                runs = self.chosen[self.chosen.seed.isin(self.in_order[:fewer])]
                self.verdicts[fewer] = verdict(runs, factor=self.factor, reference=self.reference)
        judged = self.verdicts[count]
        self.said.value = Markup("<p>{} {}</p><details><summary>The statistics</summary>{}</details>").format(
            " ".join(in_words(judged)), ALONE, paragraphs(str(judged).splitlines())
        )
        self.draw()


ALONE = "This asks one question. Where several are asked at once, as in the notebooks, luck is allowed for."
EXAMPLE = ("whitener-cuda-tf32-off.trace", "whitener-cuda-tf32-on.trace")
EXAMPLE_WORDS = (
    "One step of a small network, recorded on one GPU twice: in float32, and with TF32, which rounds the factors of a "
    "matrix product. Each paragraph is an operation that rounded more than it should; the first leads to NaN."
)


class AuditExplorer(ipywidgets.VBox):
    """An uploaded trace, compared with the recorded one of the same step; or two, with one another.

    Before anything is uploaded it shows an example: a network that becomes NaN on a card that rounds to TF32.

    >>> "not a trace" in AuditExplorer().compare([("mine.trace", b"anything")])
    True
    """

    def __init__(self) -> None:
        self.upload = ipywidgets.FileUpload(
            multiple=True,
            description="Upload a trace, or two",
            layout=ipywidgets.Layout(width="auto", align_self="flex-start"),
        )
        self.said = ipywidgets.HTML(self.example())
        super().__init__([self.upload, ipywidgets.HTML(f"Each may have {MOST_UPLOADED:,} bytes."), self.said])
        self.add_class("gpulab-upload")  # where the page says that a file is too large to be sent
        self.upload.observe(self._compare_uploaded, "value")

    def example(self) -> Markup:
        """The audit of two recorded traces, and a sentence that says of what."""
        files = [(name, (recorded_folder("traces") / name).read_bytes()) for name in EXAMPLE]
        return Markup("<p><b>An example.</b> {}</p>").format(EXAMPLE_WORDS) + self.compare(files)

    def _compare_uploaded(self, change: dict[str, Any]) -> None:
        if not change["new"]:
            return
        files = [(printable(file["name"])[:40], bytes(file["content"])) for file in change["new"]]
        self.upload.value = ()  # so that the same file can come again
        self.said.value = Markup("<p>Reading {} …</p>").format(" and ".join(name for name, _ in files))
        self.said.value = self.compare(files)

    def compare(self, files: Sequence[tuple[str, bytes]]) -> Markup:
        """The audit of (name, content) of one trace or two as HTML, or a sentence that says why there is none."""
        try:
            if len(files) > 2:
                raise DataError(f"{len(files)} files: expected one trace, or two")
            with at_most(MORE_MEMORY):
                traces = [Trace.load(name, content, MOST_NUMBERS) for name, content in files]
                a, b = traces if len(traces) == 2 else (traces[0], recorded_twin(traces[0]))
                if a.title == b.title:
                    for trace, (name, _) in zip((a, b), (*files, ("recorded", b"")), strict=False):
                        trace.label = f"{trace.title} ({name})"
                return Markup(audit(a, b, progress=False).html())
        except GpulabError as error:
            return Markup("<p>{}</p>").format(error)
        except MemoryError:
            return Markup("<p>This would take more than {:,} bytes of memory.</p>").format(MORE_MEMORY)
        except Exception as error:  # of what a stranger wrote: a page says so, and goes on
            return Markup("<p>This cannot be compared: {}</p>").format(in_one_line(error))


def recorded_twin(trace: Trace) -> Trace:
    """The recorded trace of the same step as this one. Raises `DataError` where there is none."""
    for file in sorted(recorded_folder("traces").glob("*.trace")):
        recorded = Trace.load(file)
        with contextlib.suppress(DataError):
            check_same_step(trace, recorded)
            return recorded
    raise DataError(f"{trace}: no recorded trace is of this step; upload two of the same step, to be compared")


@contextlib.contextmanager
def at_most(more_bytes: int) -> Iterator[None]:
    """Inside, this process may take so many more bytes of memory, where the system can say so."""
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        yield
        return
    limits_before = resource.getrlimit(resource.RLIMIT_AS)
    used_bytes = psutil.Process().memory_info().vms
    soft_limit = min(limit for limit in (used_bytes + more_bytes, *limits_before) if limit != resource.RLIM_INFINITY)
    resource.setrlimit(resource.RLIMIT_AS, (soft_limit, limits_before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits_before)


# --- their figures ---------------------------------------------------------------------------------------


def side_by_side(settings: Sequence[str], losses: Sequence[Sequence[tuple[int, float]]], total: int) -> Picture:
    """Two trainings that go on at the same time: their (frames seen, loss) so far of `total`, and how far apart."""
    figure, (loss_axes, difference_axes) = style.canvas(2, height=3.4)
    tints = style.colour(settings[0]), style.colour(settings[1])
    looks: tuple[Look, Look] = {"lw": 3.5}, {"lw": 1.5, "ls": (0, (4, 3))}
    setting_names = [setting_words(setting) for setting in settings]
    for tint, look, words, rows in zip(tints, looks, setting_names, losses, strict=True):
        loss_axes.plot(*np.reshape(rows, (-1, 2)).T, color=tint, label=words, **look)
    distances = [(frames_seen, abs(a - b)) for (frames_seen, a), (_, b) in zip(*losses, strict=False)]
    frames_seen, differences = np.reshape(distances, (-1, 2)).T
    difference_axes.plot(
        frames_seen, np.where(differences > 0, differences, np.nan), color=INK, lw=1.3, marker=".", ms=4
    )
    difference_axes.set(yscale="log", ylim=(1e-10, 1))
    difference_axes.set_yticks(
        [10.0**n for n in range(-10, 1, 2)], [style.power_of_ten(10.0**n) for n in range(-10, 1, 2)]
    )
    difference_axes.minorticks_off()
    if len(differences):
        style.log_scale(loss_axes.yaxis)
    else:
        loss_axes.set_yticks([])
    for axes in (loss_axes, difference_axes):
        axes.set(xlim=(0, total), xlabel="frames or images seen")
    loss_axes.set_ylabel("loss (mean squared error)")
    difference_axes.set_ylabel("difference of the losses")
    headline = "Nothing is trained yet"
    if len(differences):
        latest = f"are {differences[-1]:.1e} apart" if differences[-1] else "have the same bits"
        headline = f"After {frames_seen[-1]:,.0f} of {total:,} the losses {latest}"
    alt = f"The losses of two trainings ({'; '.join(setting_names)}), and their difference. {headline}."
    return style.finished(figure, headline, alt)


@style.themed
def seed_by_seed(verdicts: Mapping[int, Verdict]) -> Picture:
    """The difference and its interval as seeds come in, by how many are in, coloured by what was decided."""
    counts = sorted(verdicts)
    rows = pd.concat([verdicts[count].table for count in counts]).assign(count=counts)
    figure, (axes,) = style.canvas()
    margin = f"margin, ±{rows.margin.iloc[-1]:.2g}"
    axes.fill_between(counts, -rows.margin, rows.margin, color=FAINT, alpha=0.18, lw=0, step="mid", label=margin)
    axes.axhline(0, color=INK, lw=0.8, zorder=1)
    for decision, decision_rows in rows.groupby("decision"):
        axes.vlines(
            decision_rows["count"], decision_rows.low, decision_rows.high, color=DECIDED[decision], lw=2.2, zorder=2
        )
        look: Look = {"ls": "", "marker": "o", "ms": 5, "color": DECIDED[decision], "label": decision}
        axes.plot(decision_rows["count"], decision_rows.difference, zorder=3, **look)
    reach = 1.2 * np.nanmax(rows[["low", "high", "difference"]].abs())  # of the margin what there is room for
    axes.set(xlim=(0.5, max(counts[-1], 10) + 0.5), ylim=(-reach, reach) if reach > 0 else None)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    latest = verdicts[counts[-1]]
    metric = style.metric_label(latest.metric, latest.runs.get("experiment", ())).replace(" (", "\n(")
    axes.set(xlabel=f"number of {latest.block}s", ylabel=f"difference in {metric}")
    headline = f"After {len(latest.pairs)} {latest.block}s: {decided(latest)}"
    alt = f"The mean difference and its interval against the number of {latest.block}s. {headline}."
    return style.finished(figure, headline, alt, columns=3)


def saddle_path(surface: Surface, path: pd.DataFrame, step: int, turn: float, tilt: float, title: str) -> Picture:
    """The way of a ball up to a step on the loss around a saddle, seen from `turn` and `tilt` degrees."""
    path_so_far = path[: step + 1]
    ball, top = path_so_far.iloc[-1], 1.8 * surface.loss
    low = surface.losses[:, len(surface.along) // 2] <= 1.3 * surface.loss  # what rises further would hide the rest
    figure = Figure(figsize=(7.2, 4.8))
    axes: Any = figure.add_axes((0.02, 0.02, 0.94, 0.9), projection="3d", computed_zorder=False)
    height = np.minimum(surface.losses[low], top)
    x, y = np.meshgrid(surface.along, surface.across[low])
    axes.plot_surface(x, y, height, cmap="cividis", rcount=40, ccount=40, lw=0, alpha=0.9, zorder=1)
    axes.plot(path_so_far.along, path_so_far.across, path_so_far.loss, color="white", lw=3, zorder=2)
    axes.plot(path_so_far.along, path_so_far.across, path_so_far.loss, color=ON_GPU, lw=1.6, zorder=3)
    axes.plot([0], [0], [surface.loss], marker="+", ms=9, color=INK, zorder=4)
    axes.plot([ball.along], [ball.across], [ball.loss], marker="o", ms=10, color=ON_GPU, markeredgecolor=INK, zorder=5)
    axes.view_init(elev=tilt, azim=turn)
    axes.set_box_aspect((2.2, 1.4, 1.0), zoom=0.95)
    axes.set(zlim=(0, top), xlim=surface.along[[0, -1]], ylim=(y.min(), y.max()))
    axes.set_xlabel("along the steepest way down", fontsize=8)
    axes.set_ylabel("along the steepest way up", fontsize=8)
    axes.set_zlabel("loss", fontsize=8)
    axes.tick_params(labelsize=7)
    ball_words = f"{math.hypot(ball.along, ball.across):.2g} from the saddle, at a loss of {ball.loss:.2g}"
    headline = f"{title}: after {len(path_so_far) - 1} steps the ball is {ball_words}"
    return style.finished(figure, headline, f"The loss around a saddle, and the way of a ball on it. {headline}.")


audit_explorer, saddle_explorer = AuditExplorer, SaddleExplorer
seeds_explorer, training_explorer = SeedsExplorer, TrainingExplorer
