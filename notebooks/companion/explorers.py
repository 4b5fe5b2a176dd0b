"""The widgets of the pages without code which compute: two trainings, a ball on a saddle, seeds, an audit."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import ipywidgets
import numpy as np
import psutil
import torch
from markupsafe import Markup
from torch import Tensor, nn

from companion.explorer_figures import saddle_path, seed_by_seed, side_by_side
from companion.widgets import Explorer
from gpulab.diagnostics.audits import audit
from gpulab.diagnostics.comparison import check_same_step
from gpulab.diagnostics.traces import Trace
from gpulab.errors import DataError, GpulabError, in_one_line, printable
from gpulab.files import MOST_UPLOADED
from gpulab.report import Picture, paragraphs
from gpulab.saddles.critical import CriticalPoint, find_critical_point
from gpulab.saddles.escapes import trajectory
from gpulab.saddles.landscapes import surface
from gpulab.saddles.optimizers import OPTIMIZERS
from gpulab.settings import available_settings
from gpulab.stats.verdicts import Verdict, verdict
from gpulab.store.listing import recorded_runs
from gpulab.store.records import recorded_folder
from gpulab.training.engines import Engines
from gpulab.training.keeping import Keeping
from gpulab.training.plan import plan_with_command
from gpulab.training.run import carry_out, under

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
    "autoencoder: CPU and GPU": (
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

    Examples:
        >>> explorer = TrainingExplorer()
        >>> explorer.settings[1].value
        'cpu:emulate=tf32'
    """

    thread: threading.Thread | None = None  # in which the training goes on, until it is done or `stopping` is set

    def __init__(self) -> None:
        self.stopping = threading.Event()
        names = [name for name in available_settings() if "isa=" not in name]  # that one is chosen before torch loads
        names += [name for name in OTHERS if name not in names]
        self.net = ipywidgets.Dropdown(options=[*FRAMES], description="network")
        self.settings = [
            ipywidgets.Dropdown(options=names, value=value, description=description)
            for description, value in (("setting", names[0]), ("and", "cpu:emulate=tf32"))
        ]
        self.seed = ipywidgets.IntSlider(0, min=0, max=9, description="seed")
        self.train = ipywidgets.Button(description="Train", button_style="primary", icon="play")
        self.halt = ipywidgets.Button(description="Stop", icon="stop")
        self.said, self.image = ipywidgets.HTML(), ipywidgets.HTML()
        chosen = _row(self.net, *self.settings, self.seed)
        super().__init__([chosen, _row(self.train, self.halt), self.said, self.image])
        self.train.on_click(lambda _: self._begin())
        self.halt.on_click(self._end)
        for control in (self.net, *self.settings, self.seed):
            control.observe(self._anew, "value")
        self._anew()

    def picture(self) -> Picture:
        """The losses so far."""
        return side_by_side([chosen.value for chosen in self.settings], self.losses, FRAMES[self.net.value])

    def stop(self) -> None:
        """End the training that goes on, if any."""
        self.stopping.set()
        if self.thread:
            self.thread.join()

    def _anew(self, _: Any = None) -> None:
        self.stop()
        self.losses: tuple[list[tuple[int, float]], ...] = ([], [])
        self.said.value = f"Press Train to begin from seed {self.seed.value}."
        self.draw()

    def _begin(self) -> None:
        self._anew()
        self.said.value = "Training …"
        self.stopping.clear()
        self.thread = threading.Thread(target=self._train, daemon=True)
        self.thread.start()

    def _end(self, _: Any = None) -> None:
        self.stop()
        self.said.value = "Stopped."

    def _train(self) -> None:
        """Train the network under both settings in turns, a window at a time, and draw it now and then."""
        drawn, going, bits = time.monotonic(), [], set()
        net, seed = self.net.value, self.seed.value
        try:
            for chosen, rows in zip(self.settings, self.losses, strict=True):
                plan, _ = plan_with_command(net, None, chosen.value, seed, "smoke", 0, frames=FRAMES[net])
                note = functools.partial(lambda rows, seen, loss: rows.append((seen, loss)), rows)
                going.append((plan, carry_out(plan, {}, Keeping(), Engines, progress=note)))
            while going:
                for plan, turns in [*going]:
                    if self.stopping.is_set():
                        return
                    with under(plan.setting, plan.model.threads):  # its flags are in force for its own turns only
                        try:
                            next(turns)
                        except StopIteration as end:
                            bits.add(end.value.record["summary"]["weights"])
                            going.remove((plan, turns))
                if time.monotonic() - drawn > DRAW_SECONDS:
                    self.draw()
                    drawn = time.monotonic()
        except GpulabError as error:
            self.said.value = Markup.escape(error)
            return
        self.draw()
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


class SaddleExplorer(Explorer):
    """A ball that an optimiser rolls down from a saddle, in an arithmetic, on a surface that can be turned.

    Examples:
        >>> explorer = SaddleExplorer()
        >>> explorer.optimizer.value = "sgd"
        >>> explorer.step.value = 200
        >>> "after 200 steps the ball is" in explorer.image.value
        True
    """

    def __init__(self) -> None:
        self.saddle = small_saddle()
        self.surface = surface(self.saddle, extent=1.4, places=20)
        self.optimizer = ipywidgets.Dropdown(options=[*OPTIMIZERS], value="adam", description="optimiser")
        self.format = ipywidgets.Dropdown(options=[*FORMATS], value="float32", description="arithmetic")
        self.rate = ipywidgets.Dropdown(options=[0.01, 0.03, 0.1], value=0.01, description="rate")
        self.push = ipywidgets.Dropdown(options=PUSHES, description="push")
        self.step = ipywidgets.IntSlider(0, min=0, max=STEPS, description="step")
        self.turn = ipywidgets.IntSlider(-60, min=-180, max=180, step=5, description="turn (°)")
        self.tilt = ipywidgets.IntSlider(35, min=0, max=90, step=5, description="tilt (°)")
        self.image = ipywidgets.HTML()
        chosen = _row(self.optimizer, self.format, self.rate, self.push)
        super().__init__([chosen, _row(_player(self.step, ROLLED), self.step), _row(self.turn, self.tilt), self.image])
        for control in (self.optimizer, self.format, self.rate, self.push):
            control.observe(self._roll, "value")
        for slider in (self.step, self.turn, self.tilt):
            slider.observe(self.draw, "value")
        self._roll()

    def picture(self) -> Picture:
        """The ball where the sliders say."""
        how = f"{self.optimizer.value}, {self.format.value}, rate {self.rate.value}, push {self.push.label}"
        return saddle_path(self.surface, self.path, self.step.value, self.turn.value, self.tilt.value, how)

    def _roll(self, _: Any = None) -> None:
        how = {"optimizer": self.optimizer.value, "learning_rate": self.rate.value, "perturbation": self.push.value}
        self.path = trajectory(self.saddle, FORMATS[self.format.value], steps=STEPS, **how)
        self.draw()


class SeedsExplorer(Explorer):
    """Recorded runs that come in one seed at a time, and the verdict on those that are in.

    Examples:
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
        chosen = _row(self.which, self.order)
        super().__init__([chosen, _row(_player(self.seeds, interval=500), self.seeds), self.image, self.said])
        self.which.observe(self._anew, "value")
        self.order.observe(self._anew, "value")
        self.seeds.observe(self._show, "value")
        self._anew()

    def picture(self) -> Picture:
        """The verdicts so far."""
        return seed_by_seed({n: some for n, some in self.verdicts.items() if n <= self.seeds.value})

    def _anew(self, _: Any = None) -> None:
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
        count, until = self.seeds.value, time.monotonic() + FILL_SECONDS
        for fewer in range(count, 1, -1):
            if fewer not in self.verdicts and (fewer == count or time.monotonic() < until):
                runs = self.chosen[self.chosen.seed.isin(self.in_order[:fewer])]
                self.verdicts[fewer] = verdict(runs, factor=self.factor, reference=self.reference)
        first, _, more = str(self.verdicts[count]).partition(". ")
        self.said.value = Markup("<p>{}.</p><details><summary>more</summary>{}</details>").format(
            first, paragraphs(more.splitlines())
        )
        self.draw()


class AuditExplorer(ipywidgets.VBox):
    """An uploaded trace, compared with the recorded one of the same step; or two, with one another.

    Examples:
        >>> "not a trace" in AuditExplorer().compare([("mine.trace", b"anything")])
        True
    """

    def __init__(self) -> None:
        self.upload = ipywidgets.FileUpload(
            multiple=True,
            description="Upload a trace, or two",
            layout=ipywidgets.Layout(width="auto", align_self="flex-start"),
        )
        self.said = ipywidgets.HTML(f"Each may have {MOST_UPLOADED:,} bytes.")
        super().__init__([self.upload, self.said])
        self.add_class("gpulab-upload")  # where the page says that a file is too large to be sent
        self.upload.observe(self._came, "value")

    def _came(self, change: dict[str, Any]) -> None:
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
    for file in sorted(recorded_folder("audits").glob("*.trace")):
        recorded = Trace.load(file)
        with contextlib.suppress(DataError):
            check_same_step(trace, recorded)
            return recorded
    raise DataError(f"{trace}: no recorded trace is of this step; upload two of the same step, to be compared")


@contextlib.contextmanager
def at_most(more: int) -> Iterator[None]:
    """Inside, this process may take so many more bytes of memory, where the system can say so."""
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    taken = psutil.Process().memory_info().vms
    soft = min(limit for limit in (taken + more, *before) if limit != resource.RLIM_INFINITY)
    resource.setrlimit(resource.RLIMIT_AS, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


audit_explorer, saddle_explorer = AuditExplorer, SaddleExplorer
seeds_explorer, training_explorer = SeedsExplorer, TrainingExplorer
