"""Training the autoencoder one image at a time: gpulab's plain and fast paths beside the loop that everybody writes.

    python benchmarks/autoencoder.py cpu:threads=1 cpu:threads=2 --record data/measured/autoencoder-my-cpu.json
    python benchmarks/autoencoder.py cuda:tf32=off --record data/measured/autoencoder-my-gpu.json
    python benchmarks/autoencoder.py --write benchmarks/autoencoder.md    # from what is recorded

A step is a window of 20 images that lie on the device, an update for each, and one look at the losses. The usual loop
is torch's own `nn.Linear`, `mse_loss` and `optim.Adam`, without further thought; a look at every loss, as most
tutorials take it, makes each update wait for the device.
"""

import itertools
from pathlib import Path
from typing import Annotated, Any

import entrants
import torch
import typer
from torch import nn

import gpulab as gl
from gpulab.settings import Setting
from gpulab.training.capture import Captured
from gpulab.training.engines import Engines
from gpulab.training.plan import plan_run
from gpulab.training.run import set_up

IMAGES = 20  # in a window


def gpulabs(setting: Setting, fast: bool) -> entrants.Step:
    """A window as `gpulab.train` does it."""
    plan = plan_run("autoencoder", setting=setting, profile="quick", fast=fast)
    plan.draw_weights()
    training, images = set_up(plan), torch.rand(IMAGES, 1, 28, 28, device=setting.device)
    engine = Engines(plan, training).choose(None)

    def step() -> None:
        if isinstance(engine, Captured):
            losses, _ = engine.replay(images, None)
        else:
            losses, _ = engine.update(training.model.batches(images), None)
        losses.tolist()

    return step


def usual(setting: Setting, look: bool) -> entrants.Step:
    """The loop that everybody writes."""
    widths = (784, 128, 32, 128, 784)
    layers = [part for pair in itertools.pairwise(widths) for part in (nn.Linear(*pair), nn.ReLU())]
    net = nn.Sequential(*layers[:-1], nn.Sigmoid()).to(setting.device)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    images = torch.rand(IMAGES, 1, 784, device=setting.device)

    def step() -> None:
        losses = []
        for image in images:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(net(image), image)
            loss.backward()
            optimizer.step()
            losses.append(loss.item() if look else loss.detach())
        if not look:
            torch.stack(losses).tolist()

    return step


def table(found: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "# Training the autoencoder",
        "",
        __doc__.strip(),
        "",
        "| machine | setting | | updates/s (quartiles) | × the usual loop | memory |",
    ]
    lines.append("|---|---|---|---|---|---|")
    for record in found:
        for row in record["rows"]:
            of_setting = {r["entrant"]: r["per_second"] for r in record["rows"] if r["setting"] == row["setting"]}
            slow, fast = row["quartiles"]
            speed = f"{row['per_second']:,.0f} ({slow:,.0f} to {fast:,.0f})"
            times = f"{row['per_second'] / of_setting['usual loop']:.2f}"
            memory = f"{row['memory'] / 2**20:.1f} MiB" if row["memory"] else ""
            cells = [record["machine"], row["setting"], row["entrant"], speed, times, memory]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def main(
    settings: Annotated[list[str] | None, typer.Argument()] = None,
    rounds: int = 25,
    record: Annotated[Path | None, typer.Option(help="such as data/measured/autoencoder-my-gpu.json")] = None,
    write: Annotated[Path | None, typer.Option(help="Markdown file, from all that is recorded")] = None,
) -> None:
    rows: list[dict[str, Any]] = []
    for text in settings or []:
        with gl.setting(text) as setting:
            made = {
                "gpulab, plain": lambda setting=setting: gpulabs(setting, False),
                "gpulab": lambda setting=setting: gpulabs(setting, True),
                "usual loop": lambda setting=setting: usual(setting, False),
                "usual loop, a look at every loss": lambda setting=setting: usual(setting, True),
            }
            rows += entrants.race(made, IMAGES, setting, rounds, text)[0]
    entrants.keep("autoencoder", table, {"rows": rows}, setting if rows else None, record, write)


if __name__ == "__main__":
    typer.run(main)
