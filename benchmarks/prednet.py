"""Training PredNet: gpulab's plain and fast paths beside two ports to PyTorch, in one process, taking turns.

    git clone https://github.com/leido/pytorch-prednet; git clone https://github.com/eijwat/prednet_in_pytorch
    python benchmarks/prednet.py cpu:threads=2 --size quick --leido pytorch-prednet --authors prednet_in_pytorch
    python benchmarks/prednet.py cuda:tf32=on --size paper --size kitti --record data/speed/prednet-my-gpu.json
    python benchmarks/prednet.py --write benchmarks/prednet.md    # from what is recorded

A step is the forward and the backward pass through a window and Adam's update, on random frames that lie on the
device. Each network is trained as its authors' own script does it; both ports have the architecture of Lotter et al.,
the authors' is also measured without the hooks that log every layer. Neither is a dependency: they are read from a
folder, and left out where none is given.
"""

import importlib
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch.utils.flop_counter import FlopCounterMode
from tqdm.auto import tqdm

import gpulab as gl
from gpulab import records
from gpulab.passports import passport
from gpulab.settings import Setting
from gpulab.training.capture import Captured
from gpulab.training.plan import plan_run
from gpulab.training.step import Trainer

RECORDS = Path(__file__).parent.parent / "data" / "speed"
SIZES = {  # batch, frames, height, width, channels
    "quick": (1, 20, 48, 64, (3, 16, 32)),
    "paper": (1, 20, 120, 160, (3, 48, 96, 192)),
    "kitti": (16, 10, 128, 160, (3, 48, 96, 192)),
}
Step = Callable[[], Any]


def gpulabs(size: str, setting: Setting, fast: bool) -> Step:
    """One update from one window; the state goes on."""
    batch, count, height, width, channels = SIZES[size]
    options = {"channels": list(channels), "size": (height, width)}
    plan = plan_run("prednet", setting=setting, profile="quick", model_options=options, fast=fast)
    plan.begin()
    trainer = Trainer(plan)
    frames = torch.rand(count + 1, batch, channels[0], height, width, device=setting.device)
    _, state = trainer._updates([frames], None, fast)
    if not (fast and setting.kind == "cuda"):
        held = [state]

        def step() -> None:
            held[0] = trainer._updates([frames], held[0], fast)[1]

        return step
    changed = [*trainer.model.parameters(), *(t for moments in trainer.optimizer.state.values() for t in moments)]
    captured = Captured(lambda f, s: trainer._updates([f], s, True), frames, state, changed)
    return lambda: captured(frames, captured.after)


def leidos(folder: Path, size: str, setting: Setting) -> Step:
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


def authors(folder: Path, size: str, setting: Setting, hooks: bool) -> Step:
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
    entrants = {
        "gpulab, plain": lambda: gpulabs(size, setting, False),
        "gpulab": lambda: gpulabs(size, setting, True),
    }
    if leido:
        entrants["leido"] = lambda: leidos(leido, size, setting)
    if port:
        entrants["authors' port"] = lambda: authors(port, size, setting, True)
        entrants["authors' port, no hooks"] = lambda: authors(port, size, setting, False)
    wait = getattr(torch, setting.kind).synchronize
    steps, memory, times = {}, {}, {name: [] for name in entrants}
    for name, make in entrants.items():
        if setting.kind == "cuda":
            wait()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        steps[name] = make()
        for _ in range(3):
            steps[name]()
        wait()
        memory[name] = torch.cuda.max_memory_allocated() - before if setting.kind == "cuda" else None
    with FlopCounterMode(display=False) as counted:
        steps["gpulab, plain"]()
    batch, count, *_ = SIZES[size]
    for _ in tqdm(range(rounds), desc=f"{size} under {setting}"):
        for name, step in steps.items():
            wait()
            started = time.perf_counter()
            for _ in range(3):
                step()
            wait()
            times[name].append((time.perf_counter() - started) / 3)
    rows = []
    for name, taken in times.items():
        slow, median, fast = (batch * count / seconds for seconds in statistics.quantiles(taken, n=4)[::-1])
        row = {"size": size, "setting": str(setting), "entrant": name, "frames_per_second": median}
        rows.append({**row, "quartiles": [slow, fast], "flop": counted.get_total_flops(), "memory": memory[name]})
    return rows


def peak(setting: Setting) -> float:
    """FLOP/s of a large matrix product, the ceiling of all that is measured."""
    edge = 8192 if setting.kind == "cuda" else 2048
    a = torch.rand(edge, edge, device=setting.device)
    wait, times = getattr(torch, setting.kind).synchronize, []
    for _ in range(7):
        wait()
        started = time.perf_counter()
        a @ a
        wait()
        times.append(time.perf_counter() - started)
    return 2 * edge**3 / statistics.median(times[2:])


def table(records: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        __doc__.strip(),
        "",
        "| machine | setting | size | | frames/s (quartiles) | × leido | of the peak | memory |",
    ]
    lines.append("|---|---|---|---|---|---|---|---|")
    for record in records:
        for row in record["rows"]:
            of_kind = [r for r in record["rows"] if (r["size"], r["setting"]) == (row["size"], row["setting"])]
            usual = next((r["frames_per_second"] for r in of_kind if r["entrant"] == "leido"), None)
            batch, count, height, width, channels = SIZES[row["size"]]
            share = row["flop"] * row["frames_per_second"] / (batch * count) / record["peak"][row["setting"]]
            slow, fast = row["quartiles"]
            size = f"{row['size']}: {batch}×{count} frames, {width}×{height}, {'-'.join(map(str, channels))}"
            speed = f"{row['frames_per_second']:.0f} ({slow:.0f} to {fast:.0f})"
            times = f"{row['frames_per_second'] / usual:.2f}" if usual else ""
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
    record: Annotated[Path | None, typer.Option(help="JSON file, such as data/speed/prednet-my-gpu.json")] = None,
    write: Annotated[Path | None, typer.Option(help="Markdown file, from all that is recorded")] = None,
) -> None:
    rows: list[dict[str, Any]] = []
    peaks = {}
    for text in settings or []:
        with gl.setting(text) as setting:
            peaks[text] = peak(setting)
            for one in size or ["quick"]:
                rows += measure(one, setting, leido, authors, rounds)
    if rows:
        command, here = shlex.join(["python", "benchmarks/prednet.py", *sys.argv[1:]]), passport()
        machine = records.machine(here, setting.kind)
        document = {"passport": here, "command": command, "machine": machine, "peak": peaks, "rows": rows}
        print(table([document]).partition("| machine")[2])
        if record:
            records.write_json(record, document)
    if write:
        write.write_text(table([records.read_json(file) for file in sorted(RECORDS.glob("prednet-*.json"))]), "utf-8")


if __name__ == "__main__":
    typer.run(main)
