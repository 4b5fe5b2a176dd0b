"""The published experiment with its own code: the authors' unchanged network, in stock Chainer.

    python benchmarks/peers/published.py prednet_in_chainer_py3/PredNet --seeds 8 --loader reused
    copied --workers 2

This trains seeds × loaders in worker processes, on a CPU or a GPU. Runs that are already done are
skipped. `--help` lists the requirements.

The operations and their order are those of the authors' `main.py`
(github.com/eijwat/prednet_in_chainer_py3): one NumPy buffer for the current frame and one for the
next frame, wrapped by `xp.asarray`; the losses of a window summed; `zerograds`, `backward`,
`unchain_backward`, Adam; and, on a GPU, the network moved `to_cpu()` and back `to_gpu()` after each
update. On a CPU the weights have the same bits as those of `main.py` itself (a test checks this),
although three things differ: `main.py` draws its weights without a seed, writes a window's last
frame into the first buffer after the update instead of before it, and computes predictions for
frames that do not fill a window.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from threadpoolctl import threadpool_limits

from benchmarks.measuring import run
from benchmarks.peers import stock_chainer
from gpulab.data import load
from gpulab.data._base import Sequence
from gpulab.data._datasets import Rendered
from gpulab.errors import UsageError
from gpulab.run_options import whole_numbers
from gpulab.settings import Setting
from gpulab.stats import verdict
from gpulab.training import Experiment

LOADERS = ("reused", "copied", "shared")
SETTINGS = "cpu, cpu:threads=N and cuda:tf32=off,cudnn=off"
Arrays = dict[str, npt.NDArray[Any]]


class Published:
    """The authors' network with its optimiser, and their loop over one window.

    The network comes from their `net.py`, or its folder; `size` is (height, width). NumPy's global
    generator draws the weights, on a CPU.

    The loader `reused` is the authors': one buffer, whose memory all steps of a window share on a
    CPU, and which is copied to a GPU at each step. With `copied`, every frame has its own array.
    With `shared`, one array on the device is overwritten, which is what `reused` does on a CPU.
    With `round_trip`, the network is moved from the GPU to the CPU and back after each update, as
    in their code.

    References:
        Pietrowski et al. 2021, *Impact of GPU uncertainty on the training of predictive deep neural
        networks* (arXiv 2109.01451).
    """

    def __init__(
        self,
        net: str | Path,
        kind: str = "cpu",
        seed: int = 0,
        size: tuple[int, int] = (120, 160),
        channels: tuple[int, ...] = (3, 48, 96, 192),
        loader: str = "reused",
        round_trip: bool = True,
    ) -> None:
        if loader not in LOADERS:
            raise UsageError(f"loader {loader!r}: expected one of {', '.join(LOADERS)}")
        self.chainer, authors = stock_chainer.chainer(), stock_chainer.network(net)
        self.xp, self.on_gpu = stock_chainer.arrays(kind), kind == "cuda"
        self.loader, self.round_trip = loader, round_trip and self.on_gpu
        np.random.seed(seed)
        self.network = authors.PredNet(size[1], size[0], list(channels))
        self.model = self.chainer.links.Classifier(
            self.network, lossfun=self.chainer.functions.loss.mean_squared_error.mean_squared_error
        )
        self.model.compute_accuracy = False
        self.optimizer = self.chainer.optimizers.Adam()
        self.optimizer.setup(self.model)
        if self.on_gpu:
            self.chainer.backends.cuda.get_device_from_id(0).use()
            self.model.to_gpu()

    def restart(self, first: npt.NDArray[np.float32]) -> None:
        """Start a pass over the frames with the first frame."""
        self.network.reset_state()
        self.seen, self.coming = (np.ndarray((1, *first.shape), np.float32) for _ in range(2))
        self.wrap_seen, self.wrap_coming = self._wrapper(first.shape), self._wrapper(first.shape)
        self.seen[0] = first

    def _wrapper(self, shape: tuple[int, ...]) -> Callable[[Any], Any]:
        """Return the function that turns a buffer into an array on the device."""
        if self.loader == "reused":
            return self.xp.asarray
        if self.loader == "copied":
            return lambda buffer: self.xp.asarray(buffer.copy())
        there = self.xp.empty((1, *shape), np.float32)

        def overwrite(buffer: Any) -> Any:
            there[...] = self.xp.asarray(buffer)
            return there

        return overwrite

    def window(
        self, frames: npt.NDArray[np.float32], on_gradient: Callable[[], None] | None = None
    ) -> list[float]:
        """Predict each frame from the previous ones, and update once.

        Args:
            frames: The next frames, (T, C, H, W), in [0, 1].
            on_gradient: Called when gradients are computed, before the weights are updated.

        Returns:
            The loss of each frame.
        """
        loss, losses = 0, []
        for frame in frames:
            self.coming[0] = frame
            variables = (self.wrap_seen(self.seen), self.wrap_coming(self.coming))
            loss += self.model(*map(self.chainer.Variable, variables))
            losses.append(self.model.loss.data)
            self.seen[0] = self.coming[0]
        self.model.zerograds()
        loss.backward()  # type: ignore[attr-defined]
        loss.unchain_backward()  # type: ignore[attr-defined]
        if on_gradient:
            on_gradient()
        self.optimizer.update()
        if self.round_trip:
            self.model.to_cpu()
        numbers = [float(value) for value in losses]
        if self.round_trip:
            self.model.to_gpu()
        return numbers

    def gradients(self) -> Arrays:
        """Return the gradient of each array of weights, by its name."""
        to_cpu = self.chainer.backends.cuda.to_cpu
        return {
            name: to_cpu(p.grad).copy()
            for name, p in sorted(self.model.namedparams())
            if p.grad is not None
        }


def windows(
    data: Sequence, length: int = 20, every: int = 1
) -> Iterator[tuple[npt.NDArray[np.float32], bool]]:
    """Yield windows of frames in [0, 1] without end, and whether the state is reset.

    The first window of a pass has `length` frames, the first of which is not predicted. Each later
    window has the `length` frames that follow. Frames at the end of a pass that do not fill a
    window are not used for training, as in the published loop.

    Args:
        data: The data. All frames are used for training, including the held-out part.
        length: The length of a window.
        every: Take one frame in this many. Passes start at the first frame, the second, … in turn.
    """
    stop = data.frames if isinstance(data, Rendered) else data.frames + data.heldout_count
    if stop // every < length:
        raise UsageError(
            f"{data.name}: {stop // every} frames with every={every}; a window needs {length}"
        )
    film = None if isinstance(data, Rendered) else list(data.stream(0, stop))  # decoded once
    for offset in itertools.cycle(range(every)):
        frames = itertools.islice(film or data.stream(0, stop), offset, None, every)
        restart = True
        while len(window := list(itertools.islice(frames, length))) == length:
            whole = np.stack(window).astype(np.float32)
            whole /= 255
            yield whole, restart
            restart = False


def published(
    seed: int,
    setting: Setting,
    net: str = "net.py",
    data: str = "walk",
    speed: float = 1.0,
    every: int = 1,
    frames: int = 5000,
    window: int = 20,
    size: str = "160x120",
    channels: str = "3,48,96,192",
    loader: str = "reused",
    round_trip: bool = True,
) -> dict[str, float]:
    """Train the authors' network in a loop with their operations.

    `gpulab.train` and `gpulab experiment` call this function. An interrupted training starts again.

    Args:
        seed: The seed of the weights.
        setting: `cpu`, `cpu:threads=N`, or `cuda:tf32=off,cudnn=off`, the only settings that CuPy
            and Chainer support today.
        net: The authors' `net.py`.
        data: `walk`, with the given `speed`, or a video file, of which one frame in `every` is
            used.
        frames: The number of frames to train on. There is one update for each window they fill.
        size: Width x height of a frame in pixels, as the authors write it.
        loader, round_trip: As in `Published`.

    Returns:
        Means over the last fifth of the windows: the `loss` of all frames; that of the
        `last_frame`, which the authors log; `repeat_loss`, that of repeating the previous frame;
        and `beats_repeating`, whether `loss` is below `repeat_loss`.
    """
    if str(setting) not in ("cpu", f"cpu:threads={setting.threads}", "cuda:tf32=off,cudnn=off"):
        raise UsageError(f"setting {setting}: the published network supports {SETTINGS}")
    width, height = whole_numbers(size)
    layers = tuple(whole_numbers(channels))
    film = data if data == "walk" else f"video:{data}"
    source = load(film, frames if data == "walk" else None, (height, width), speed=speed)
    if not isinstance(source, Sequence) or frames < window:
        raise UsageError(
            f"data {data!r}, frames {frames}: expected walk or a video, and a window of {window} at"
            " least"
        )
    trained = Published(net, setting.kind, seed, (height, width), layers, loader, round_trip)
    rows = []
    with threadpool_limits(setting.threads):
        for whole, restart in itertools.islice(windows(source, window, every), frames // window):
            if restart:
                trained.restart(whole[0])
            before, coming = (
                (whole[:-1], whole[1:])
                if restart
                else (np.concatenate([trained.seen, whole[:-1]]), whole)
            )
            repeats = np.square(coming - before).mean()
            losses = trained.window(coming)
            rows.append({"loss": np.mean(losses), "last_frame": losses[-1], "repeat_loss": repeats})
    last = rows[-max(1, len(rows) // 5) :]
    means = {name: float(np.mean([row[name] for row in last])) for name in rows[0]}
    return {**means, "beats_repeating": means["loss"] < means["repeat_loss"]}


# --- the command ----------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=stock_chainer.HOW,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("net", type=Path, help="the authors' net.py, or its folder PredNet")
    parser.add_argument("--setting", default="cpu", help=SETTINGS)
    parser.add_argument("--seeds", default="1", help="their number (10), or a list (0,1,7)")
    parser.add_argument(
        "--loader", nargs="+", default=["reused"], help="reused (as published), copied, or shared"
    )
    parser.add_argument(
        "--no-round-trip", action="store_true", help="on a GPU: do not move to the CPU and back"
    )
    parser.add_argument("--workers", type=int, default=1, help="runs at the same time")
    parser.add_argument("--store", default=None, help="folder of the runs")
    names = ("data", "speed", "every", "frames", "window", "size", "channels")
    for name in names:
        default = inspect.signature(published).parameters[name].default
        parser.add_argument(
            f"--{name}", type=type(default), default=default, help="as of `published`"
        )
    asked = parser.parse_args()
    options = {name: getattr(asked, name) for name in names} | {
        "round_trip": not asked.no_round_trip
    }
    stock_chainer.chainer()
    options["net"] = str(asked.net / "net.py" if asked.net.is_dir() else asked.net)
    stock_chainer.network(options["net"])
    numbers = whole_numbers(asked.seeds)
    seeds = numbers if "," in asked.seeds else numbers[0]
    more = {
        "store": asked.store,
        "workers": asked.workers,
        "variants": [{"loader": loader} for loader in asked.loader],
    }
    training = f"{os.path.relpath(__file__)}:published"
    frame = Experiment(training, [asked.setting], seeds, options=options, **more).run()
    columns = [
        "setting",
        "seed",
        "loader",
        "status",
        "final_loss",
        "repeat_loss",
        "beats_repeating",
        "seconds",
    ]
    print(frame[columns].to_string(index=False))
    if frame.loader.nunique() > 1:
        print(verdict(frame, factor="loader", reference=asked.loader[0]))


if __name__ == "__main__":
    run(main)
