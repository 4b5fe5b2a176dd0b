r"""The speed of training both networks, compared with other ways, by step and end to end.

    python benchmarks/speed/training_speed.py race prednet cpu:threads=2 \
        --leido pytorch-prednet --authors prednet_in_pytorch
    python benchmarks/speed/training_speed.py race autoencoder cuda:tf32=off \
        --record data/measured/autoencoder-my-gpu.json
    python benchmarks/speed/training_speed.py race autoencoder cuda:tf32=off --strongest \
        --record data/measured/peers-autoencoder-my-gpu.json
    python benchmarks/speed/training_speed.py end-to-end cuda:tf32=on \
        --record data/measured/end_to_end-my-gpu.json

These commands write the tables of the page from all recorded measurements:

    python benchmarks/speed/training_speed.py race prednet --write benchmarks/results/prednet.md
    python benchmarks/speed/training_speed.py end-to-end --write benchmarks/results/prednet.md
"""

from __future__ import annotations

import functools
import importlib
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import gpulab as gl
from benchmarks.measuring import (
    ROOT,
    Step,
    command_line,
    energy,
    keep,
    race,
    run,
    seconds,
    show,
    table,
)
from gpulab.data._feed import Loader, prefetch
from gpulab.engines import fastest
from gpulab.engines._graphs import Graph
from gpulab.settings import Setting
from gpulab.store import recorded
from gpulab.training._networks import NetworkRun
from gpulab.training.loop import AutogradEngine

app = command_line(__doc__)
Settings = Annotated[list[str], typer.Argument(help="such as cpu:threads=2, cuda:tf32=off")]
Sizes = Annotated[list[str], typer.Option(help="quick, paper or kitti; may be repeated")]
Record = Annotated[
    Path | None, typer.Option(help="JSON file, such as data/measured/KIND-my-gpu.json")
]
Write = Annotated[Path | None, typer.Option(help="Markdown page to fill between its marks")]

Shape = tuple[int, int, int, int, tuple[int, ...]]  # batch, frames, height, width, channels
SIZES: dict[str, Shape] = {
    "quick": (1, 20, 48, 64, (3, 16, 32)),
    "paper": (1, 20, 120, 160, (3, 48, 96, 192)),
    "kitti": (16, 10, 128, 160, (3, 48, 96, 192)),
}
STEPS = 3  # the number of steps that are timed together
IMAGES = 20  # the number of images in a window of the autoencoder


# --- PredNet --------------------------------------------------------------------------------------
# A step is the forward and the backward pass through a window and Adam's update, on random frames
# that are already on the device. Each network is trained as in its authors' own script; both ports
# have the architecture of Lotter et al.


def prednet_step(shape: Shape, setting: Setting, fast: bool) -> Step:
    """Make one update with gpulab from one window; the state is carried over."""
    batch, count, height, width, channels = shape
    options = {"channels": list(channels), "size": (height, width)}
    spec = NetworkRun.plan(
        "prednet", setting=setting, profile="quick", model_options=options, fast=fast
    )
    training = spec.init_training()
    plain = AutogradEngine(training, Loader("window", setting))
    engine = fastest(plain).choose_uncaptured_engine() if fast else plain
    frames = torch.rand(count + 1, batch, channels[0], height, width, device=setting.device)
    _, state = engine.update([frames], None)
    if not (fast and setting.kind == "cuda"):
        held = [state]

        def step() -> None:
            held[0] = engine.update([frames], held[0])[1]

        return step
    moments = itertools.chain(*training.optimizer.state.values())
    graph = Graph(
        lambda f, s: engine.update([f], s),
        (frames, state),
        [*training.model.parameters(), *moments],
    )
    # The graph reads and writes the buffers of this object.
    return lambda: (
        graph(frames, graph.outputs[1]),
        engine,
    )


def of_a_port(net: nn.Module, loss: Callable[[], torch.Tensor]) -> Step:
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)

    def step() -> None:
        found = loss()
        optimizer.zero_grad()
        found.backward()
        optimizer.step()

    return step


def leidos(folder: Path, shape: Shape, setting: Setting, compiled: bool = False) -> Step:
    """Train the port as in its kitti_train.py, on the lowest error units.

    With `compiled`, its forward and backward pass are compiled by `torch.compile`.

    https://github.com/leido/pytorch-prednet
    """
    batch, count, height, width, channels = shape
    if setting.kind == "cpu":  # The port moves everything to a GPU.
        torch.Tensor.cuda = lambda self, *_: self  # type: ignore[method-assign, assignment]
        torch.cuda.FloatTensor = torch.FloatTensor  # type: ignore[misc, assignment]
    net = (
        module_of(folder, "prednet")
        .PredNet(channels, channels, output_mode="error")
        .to(setting.device)
    )
    frames = torch.rand(batch, count, channels[0], height, width, device=setting.device)
    weights = torch.full((count, 1), 1 / (count - 1), device=setting.device)
    weights[0] = 0
    errors = torch.compile(net, dynamic=False) if compiled else net
    return of_a_port(
        net, lambda: torch.mm(errors(frames).view(-1, count), weights).view(batch, -1)[:, 0].mean()
    )


def authors_port(folder: Path, shape: Shape, setting: Setting) -> Step:
    """https://github.com/eijwat/prednet_in_pytorch."""
    batch, count, height, width, channels = shape
    net = (
        module_of(folder, "prednet")
        .PredNet(list(channels), device=setting.device)
        .to(setting.device)
    )
    frames = torch.rand(batch, count + 1, channels[0], height, width, device=setting.device)
    return of_a_port(net, lambda: net(frames)[0].mean())


def jax_step(net: str, shape: Shape, setting: Setting) -> Step:
    """Train on a window with JAX, jitted, from the weights of gpulab.

    PredNet's gradients are cut between windows (`truncation="state"`).
    """
    in_jax = module_of(ROOT / "benchmarks" / "peers", "in_jax")
    jax, jnp = in_jax.jax, in_jax.jnp
    batch, count, height, width, channels = shape
    options = {"channels": list(channels), "size": (height, width)} if net == "prednet" else {}
    spec = NetworkRun.plan(net, setting=setting, profile="quick", model_options=options)
    spec.draw_weights()
    draw = np.random.default_rng(0)
    with in_jax.on(setting):
        weights = jax.tree.map(jnp.asarray, in_jax.weights_of(spec))
        zeros = jax.tree.map(jnp.zeros_like, weights)
        if net == "prednet":
            loss = functools.partial(in_jax.prednet_loss, "state")
            frames = (1, count + 1, batch, channels[0], height, width)
        else:
            loss = in_jax.autoencoder_loss
            frames = (IMAGES, 1, 1, 28, 28)
        state = jax.tree.map(
            lambda zero: jnp.zeros((batch, *zero.shape[-3:])), in_jax.blank(weights)
        )
        held = [(weights, (jnp.zeros(()), zeros, zeros), state)]
        window = jnp.asarray(draw.random(frames, np.float32))

    def step() -> None:
        with in_jax.on(setting):
            held[0], losses = in_jax.train_window(loss, held[0], window, 1e-3)
            jax.block_until_ready((held[0], losses))

    return step


def module_of(folder: Path, name: str) -> Any:
    """Load a module from a folder that is not a package; unload others of the same name."""
    for known in ("prednet", "convlstmcell", "debug"):
        sys.modules.pop(known, None)
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))


def peak(setting: Setting) -> float:
    """Measure the FLOP/s of a large matrix product, the ceiling for all other measurements."""
    edge = 8192 if setting.kind == "cuda" else 2048
    a = torch.rand(edge, edge, device=setting.device)
    times = [seconds(lambda: a @ a, setting) for _ in range(7)]
    return 2 * edge**3 / sorted(times[2:])[2]


# --- the autoencoder, one image at a time ---------------------------------------------------------
# A step is a window of images, with an update for each image, and one read of the losses.


def autoencoder_window(setting: Setting, fast: bool) -> Step:
    """Train on a window as `gpulab.train` does."""
    spec = NetworkRun.plan("autoencoder", setting=setting, profile="quick", fast=fast)
    training, images = (
        spec.init_training(),
        np.random.default_rng(0).integers(256, size=(IMAGES, 1, 28, 28), dtype=np.uint8),
    )
    plain = AutogradEngine(training, Loader("window", setting))
    engine = fastest(plain) if fast else plain

    def step() -> None:
        losses, _ = engine.train_window(images, None)
        losses.tolist()

    return step


def usual_network(setting: Setting) -> nn.Module:
    """Make the autoencoder from layers of PyTorch."""
    widths = (784, 128, 32, 128, 784)
    layers = [part for pair in itertools.pairwise(widths) for part in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1], nn.Sigmoid()).to(setting.device)


def update(net: nn.Module, optimizer: torch.optim.Optimizer, image: torch.Tensor) -> torch.Tensor:
    """Train on one image, and return its loss."""
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(net(image), image)
    loss.backward()
    optimizer.step()
    return loss.detach()


def usual_loop(setting: Setting, look: bool) -> Step:
    """Train with the usual loop; with `look`, it reads each loss, which waits for the device."""
    net = usual_network(setting)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    images = torch.rand(IMAGES, 1, 784, device=setting.device)

    def step() -> None:
        losses = []
        for image in images:
            loss = update(net, optimizer, image)
            losses.append(loss.item() if look else loss)
        if not look:
            torch.stack(losses).tolist()

    return step


def usual_loop_in_a_graph(setting: Setting) -> Step:
    """Train with the usual loop, all of whose launches are replayed by one CUDA graph."""
    net = usual_network(setting)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, capturable=True)
    images = torch.rand(IMAGES, 1, 784, device=setting.device)

    def train() -> torch.Tensor:
        return torch.stack([update(net, optimizer, image) for image in images])

    # Before a capture, PyTorch asks for a few steps in a stream of their own.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            train()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        losses = train()

    def step() -> None:
        graph.replay()
        losses.tolist()

    return step


# --- comparison of several ways -------------------------------------------------------------------

USUAL = {"prednet": "leido", "autoencoder": "usual loop"}  # the reference for the others


def ways_of(
    net: str,
    shape: Shape,
    setting: Setting,
    leido: Path | None = None,
    authors: Path | None = None,
    strongest: bool = False,
) -> dict[str, Callable[[], Step]]:
    """Return, for each way to train a network, a function that makes its step."""
    made: dict[str, Callable[[], Step]]
    if net == "autoencoder":
        made = {
            "gpulab, plain": lambda: autoencoder_window(setting, False),
            "gpulab": lambda: autoencoder_window(setting, True),
            "usual loop": lambda: usual_loop(setting, False),
            "usual loop, a look at every loss": lambda: usual_loop(setting, True),
        }
        if strongest and setting.kind == "cuda":
            made["usual loop, CUDA graph"] = lambda: usual_loop_in_a_graph(setting)
        if strongest:
            made["JAX"] = lambda: jax_step(net, shape, setting)
        return made
    made = {
        "gpulab, plain": lambda: prednet_step(shape, setting, False),
        "gpulab": lambda: prednet_step(shape, setting, True),
    }
    if strongest:
        made["JAX"] = lambda: jax_step(net, shape, setting)
    if leido and strongest:
        made["leido, compiled"] = lambda: leidos(leido, shape, setting, compiled=True)
    if leido:
        made["leido"] = lambda: leidos(leido, shape, setting)
    if authors:
        made["authors' port"] = lambda: authors_port(authors, shape, setting)
    return made


def speeds(net: str, found: list[dict[str, Any]], others: tuple[str, ...] = ()) -> str:
    """The table of records, with ratios to the usual way and to others, each within a record."""
    references = (USUAL[net], *others)
    rows = []
    for record in found:
        rates = {
            (row["setting"], row.get("size"), row["entrant"]): row["per_second"]
            for row in record["rows"]
        }
        for row in record["rows"]:
            size = SIZES[row["size"]] if net == "prednet" else None
            slow, fast = row["quartiles"]
            speed = f"{row['per_second']:,.0f} ({slow:,.0f} to {fast:,.0f})"
            times = []
            for reference in references:
                rate = rates.get((row["setting"], row.get("size"), reference))
                times.append(f"{row['per_second'] / rate:.2f}" if rate else "")
            memory = f"{row['memory'] / 2**20:,.1f} MiB" if row["memory"] else ""
            # A CPU's energy is not measured, and earlier records have none.
            millijoules = f"{1000 * row['joules']:,.1f}" if row.get("joules") else ""
            words, share = "", ""
            if size:
                batch, count, height, width, channels = size
                words = (
                    f"{row['size']}: {batch}×{count} frames, {width}×{height},"
                    f" {'-'.join(map(str, channels))}"
                )
                flops = row["flop"] * row["per_second"] / (batch * count)
                share = f"{flops / record['peak'][row['setting']]:.0%}"
            rows.append(
                [
                    record["machine"],
                    row["setting"],
                    words,
                    row["entrant"],
                    speed,
                    *times,
                    share,
                    memory,
                    millijoules,
                ]
            )
    unit = {"prednet": "frames", "autoencoder": "updates"}[net]
    ratios = "|".join(f"× {reference}" for reference in references)
    heads = f"machine|setting|size||{unit}/s (quartiles)|{ratios}|of the peak|memory"
    if any(row[-1] for row in rows):
        return table(f"{heads}|mJ per {unit[:-1]}", rows)
    return table(heads, [row[:-1] for row in rows])


def peers(net: str, found: list[dict[str, Any]]) -> str:
    """The table of records with the strongest implementations of a network, and what failed."""
    of_net = [record for record in found if all(row["network"] == net for row in record["rows"])]
    failed = [
        f"- {record['machine']}, {case} failed: {reason}"
        for record in of_net
        for case, reason in record["failed"].items()
    ]
    parts = [speeds(net, of_net, ("gpulab",)), "\n".join(failed)]
    return "\n\n".join(filter(None, parts))


@app.command("race")
def race_ways(
    net: Annotated[
        str, typer.Argument(help="prednet (frames per second) or autoencoder (updates per second)")
    ],
    settings: Settings = (),
    size: Sizes = ("quick",),
    leido: Annotated[Path | None, typer.Option(help="folder of leido/pytorch-prednet")] = None,
    authors: Annotated[
        Path | None, typer.Option(help="folder of eijwat/prednet_in_pytorch")
    ] = None,
    strongest: Annotated[
        bool, typer.Option(help="also JAX, the compiled port, and the usual loop in a CUDA graph")
    ] = False,
    rounds: int = 15,
    record: Record = None,
    write: Write = None,
) -> None:
    """Compare training by gpulab, plain and fast, with ports in a folder or the usual loop."""
    rows: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    peaks = {}
    for text in settings:
        with gl.setting(text) as setting:
            peaks[text] = peak(setting)
            for one in size:
                missing: dict[str, str] = {}
                ways = race(
                    ways_of(net, SIZES[one], setting, leido, authors, strongest),
                    setting,
                    rounds,
                    STEPS,
                    label=f"{one} {text}",
                    failed=missing if strongest else None,
                )
                failed |= {f"{one} {text} {name}": reason for name, reason in missing.items()}
                for way in ways.values():
                    way.joules = energy(way.step, setting)
                same, count = {"network": net, "setting": text}, IMAGES
                if net == "prednet":
                    with FlopCounterMode(display=False) as counted:
                        ways["gpulab, plain"].step()
                    same |= {"size": one, "flop": counted.get_total_flops()}
                    count = SIZES[one][0] * SIZES[one][1]
                rows += [
                    {**same, "entrant": name, **way.per_second(count)} for name, way in ways.items()
                ]
    if settings:
        print(speeds(net, [keep(record, setting.kind, peak=peaks, rows=rows, failed=failed)]))
        for name, reason in failed.items():
            print(f"{name} failed: {reason}")
    if write:
        show(
            f"Training: {net}",
            write,
            measured=speeds(net, recorded.read_measured(net)),
            peers=peers(net, recorded.read_measured("peers")),
        )


# --- end to end -----------------------------------------------------------------------------------
# What a user of `gl.train` experiences with one film at a time: frames are rendered or decoded and
# copied to the device; losses, checkpoints and the record are stored.

WARM_WINDOWS = 5  # first windows of a training, in which kernels are chosen and a graph is captured
SCENES = itertools.count()


def end_to_end_row(size: str, setting: Setting, data: str, count: int) -> dict[str, Any]:
    """Time a training on some frames, its step alone, and its data alone, in seconds per window."""
    _, window, height, width, channels = SIZES[size]
    step = prednet_step((1, window, height, width, channels), setting, True)
    for _ in range(WARM_WINDOWS):
        step()
    alone = statistics.median(seconds(step, setting, STEPS) for _ in range(15))
    options = {"channels": list(channels), "size": (height, width)}
    # Rendered frames are cached for a while, so each call uses another walk.
    walks = [{"seed": next(SCENES)} if data == "walk" else {} for _ in range(2)]
    with tempfile.TemporaryDirectory() as store:
        common = {"profile": "quick", "frames": count, "window": window, "model_options": options}
        run = gl.train(
            "prednet", data, setting, store=store, progress=False, data_options=walks[0], **common
        )
    each = float(run.history.seconds.diff()[WARM_WINDOWS:].median())
    film, number = gl.load(data, frames=count, size=(height, width), **walks[1]), count // window
    began = time.perf_counter()  # before the first window, with which several are rendered
    for _ in itertools.islice(prefetch(film.windows(window), setting, film), number):
        pass
    of_data = (time.perf_counter() - began) / number
    found = {"window": window, "seconds": each, "step_seconds": alone, "data_seconds": of_data}
    kind = data.partition(":")[0]
    whole = run.record["summary"]["frames_per_second"]
    return {"size": size, "setting": str(setting), "data": kind, **found, "whole_per_second": whole}


def end_to_end_table(found: list[dict[str, Any]]) -> str:
    """The table of records."""
    rows = []
    for machine_name, row in (
        (record["machine"], row) for record in found for row in record["rows"]
    ):
        each, alone, of_data = (
            row["window"] / row[f"{of}seconds"] for of in ("", "step_", "data_")
        )
        _, _, height, width, _ = SIZES[row["size"]]
        words = [f"{row['size']}: {row['window']} frames, {width}×{height}", row["data"]]
        speeds = [f"{speed:,.0f}" for speed in (each, alone, of_data, row["whole_per_second"])]
        limit = f"{each / alone:.0%}" + (", the data are the limit" if of_data < alone else "")
        rows.append([machine_name, row["setting"], *words, *speeds[:2], limit, *speeds[2:]])
    heads = (
        "machine|setting|size|data|end to end, frames/s|captured step alone|of its speed|data"
        " alone|with the capture"
    )
    return table(heads, rows)


@app.command("end-to-end")
def measure_end_to_end(
    settings: Settings = (),
    size: Sizes = ("quick", "paper", "kitti"),
    data: Annotated[
        list[str], typer.Option(help="walk, video:FILE or frames:DIR; may be repeated")
    ] = ("walk",),
    frames: Annotated[int, typer.Option(help="number of frames to train on")] = 2000,
    record: Record = None,
    write: Write = None,
) -> None:
    """Compare the time of `gl.train("prednet")` per window with that of the captured step alone."""
    rows = []
    for text, one, film in itertools.product(settings, size, data):
        with gl.setting(text) as setting:
            rows.append(end_to_end_row(one, setting, film, frames))
        print(rows[-1], flush=True)
        keep(record, setting.kind, rows=rows)  # the rows so far, in case it is interrupted
    if write:
        show(
            "Training: prednet",
            write,
            end_to_end=end_to_end_table(recorded.read_measured("end_to_end")),
        )


if __name__ == "__main__":
    run(app)
