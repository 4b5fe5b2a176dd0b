"""Training PredNet: gpulab's plain and fast paths beside two ports to PyTorch, in one process, taking turns.

    git clone https://github.com/leido/pytorch-prednet; git clone https://github.com/eijwat/prednet_in_pytorch
    python benchmarks/prednet.py cpu:threads=2 --size quick --leido pytorch-prednet --authors prednet_in_pytorch
    python benchmarks/prednet.py cuda:tf32=on --size paper --size kitti --record data/measured/prednet-my-gpu.json
    python benchmarks/prednet.py --write benchmarks/prednet.md    # from what is recorded

A step is the forward and the backward pass through a window and Adam's update, on random frames that lie on the
device. Each network is trained as its authors' own script does it; both ports have the architecture of Lotter et al.,
the authors' is also measured without the hooks that log every layer. Neither is a dependency: they are read from a
folder, and left out where none is given.
"""

import importlib
import itertools
import sys
from pathlib import Path
from typing import Annotated, Any

import entrants
import torch
import typer
from torch.utils.flop_counter import FlopCounterMode

import gpulab as gl
from gpulab.settings import Setting
from gpulab.training.capture import Graph
from gpulab.training.engines import Engines
from gpulab.training.plan import plan_run
from gpulab.training.run import set_up

SIZES = {  # batch, frames, height, width, channels
    "quick": (1, 20, 48, 64, (3, 16, 32)),
    "paper": (1, 20, 120, 160, (3, 48, 96, 192)),
    "kitti": (16, 10, 128, 160, (3, 48, 96, 192)),
}


def gpulabs(size: str, setting: Setting, fast: bool) -> entrants.Step:
    """One update from one window; the state goes on."""
    batch, count, height, width, channels = SIZES[size]
    options = {"channels": list(channels), "size": (height, width)}
    plan = plan_run("prednet", setting=setting, profile="quick", model_options=options, fast=fast)
    plan.draw_weights()
    training = set_up(plan)
    engine = Engines(plan, training).uncaptured()
    frames = torch.rand(count + 1, batch, channels[0], height, width, device=setting.device)
    _, state = engine.update([frames], None)
    if not (fast and setting.kind == "cuda"):
        held = [state]

        def step() -> None:
            held[0] = engine.update([frames], held[0])[1]

        return step
    moments = itertools.chain(*training.optimizer.state.values())
    graph = Graph(lambda f, s: engine.update([f], s), frames, state, [*training.model.parameters(), *moments])
    return lambda: (graph(frames, graph.after), engine)  # whose buffers the graph reads and writes


def leidos(folder: Path, size: str, setting: Setting) -> entrants.Step:
    """https://github.com/leido/pytorch-prednet, as its kitti_train.py trains it, on the lowest error units."""
    batch, count, height, width, channels = SIZES[size]
    if setting.kind == "cpu":  # it moves everything to a GPU
        torch.Tensor.cuda = lambda self, *_: self  # type: ignore[method-assign, assignment]
        torch.cuda.FloatTensor = torch.FloatTensor  # type: ignore[misc, assignment]
    net = _module(folder, "prednet").PredNet(channels, channels, output_mode="error").to(setting.device)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    frames = torch.rand(batch, count, channels[0], height, width, device=setting.device)
    weights = torch.full((count, 1), 1 / (count - 1), device=setting.device)
    weights[0] = 0

    def step() -> None:
        errors = net(frames)
        loss = torch.mm(errors.view(-1, count), weights).view(batch, -1)[:, 0].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def authors(folder: Path, size: str, setting: Setting, hooks: bool) -> entrants.Step:
    """https://github.com/eijwat/prednet_in_pytorch: the mean squared error of the predictions."""
    batch, count, height, width, channels = SIZES[size]
    net = _module(folder, "prednet").PredNet(list(channels), device=setting.device).to(setting.device)
    if not hooks:
        for module in net.modules():
            module._forward_hooks.clear()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    frames = torch.rand(batch, count + 1, channels[0], height, width, device=setting.device)

    def step() -> None:
        loss = net(frames)[0].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def _module(folder: Path, name: str) -> Any:
    """A module of a folder that is no package; those of the same names from elsewhere are forgotten."""
    for known in ("prednet", "convlstmcell", "debug"):
        sys.modules.pop(known, None)
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))


def measure(size: str, setting: Setting, leido: Path | None, port: Path | None, rounds: int) -> list[dict[str, Any]]:
    """A row an entrant."""
    batch, count, *_ = SIZES[size]
    made = {"gpulab, plain": lambda: gpulabs(size, setting, False), "gpulab": lambda: gpulabs(size, setting, True)}
    if leido:
        made["leido"] = lambda: leidos(leido, size, setting)
    if port:
        made["authors' port"] = lambda: authors(port, size, setting, True)
        made["authors' port, no hooks"] = lambda: authors(port, size, setting, False)
    rows, steps = entrants.race(made, batch * count, setting, rounds, f"{size} under {setting}")
    with FlopCounterMode(display=False) as counted:
        steps["gpulab, plain"]()
    return [{"size": size, **row, "flop": counted.get_total_flops()} for row in rows]


def table(records: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "# Training PredNet",
        "",
        __doc__.strip(),
        "",
        "| machine | setting | size | | frames/s (quartiles) | × leido | of the peak | memory |",
    ]
    lines.append("|---|---|---|---|---|---|---|---|")
    for record in records:
        for row in record["rows"]:
            of_kind = [r for r in record["rows"] if (r["size"], r["setting"]) == (row["size"], row["setting"])]
            usual = next((r["per_second"] for r in of_kind if r["entrant"] == "leido"), None)
            batch, count, height, width, channels = SIZES[row["size"]]
            share = row["flop"] * row["per_second"] / (batch * count) / record["peak"][row["setting"]]
            slow, fast = row["quartiles"]
            size = f"{row['size']}: {batch}×{count} frames, {width}×{height}, {'-'.join(map(str, channels))}"
            speed = f"{row['per_second']:.0f} ({slow:.0f} to {fast:.0f})"
            times = f"{row['per_second'] / usual:.2f}" if usual else ""
            memory = f"{row['memory'] / 2**30:.2f} GiB" if row["memory"] else ""
            cells = [record["machine"], row["setting"], size, row["entrant"], speed, times, f"{share:.0%}", memory]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def main(
    settings: Annotated[list[str] | None, typer.Argument()] = None,
    size: Annotated[list[str] | None, typer.Option(help="quick, paper or kitti; several times")] = None,
    leido: Annotated[Path | None, typer.Option(help="folder of leido/pytorch-prednet")] = None,
    authors: Annotated[Path | None, typer.Option(help="folder of eijwat/prednet_in_pytorch")] = None,
    rounds: int = 15,
    record: Annotated[Path | None, typer.Option(help="such as data/measured/prednet-my-gpu.json")] = None,
    write: Annotated[Path | None, typer.Option(help="Markdown file, from all that is recorded")] = None,
) -> None:
    rows: list[dict[str, Any]] = []
    peaks = {}
    for text in settings or []:
        with gl.setting(text) as setting:
            peaks[text] = entrants.peak(setting)
            for one in size or ["quick"]:
                rows += measure(one, setting, leido, authors, rounds)
    entrants.keep("prednet", table, {"peak": peaks, "rows": rows}, setting if rows else None, record, write)


if __name__ == "__main__":
    typer.run(main)
