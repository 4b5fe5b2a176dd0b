"""gpulab's Hessian compared with other libraries: time, GPU memory and accuracy.

The other libraries are curvlinops, hessian-eigenthings and PyHessian.

    pip install curvlinops-for-pytorch==3.0.1 hessian-eigenthings==1.0.0a5 PyHessian==0.1 python
    benchmarks/speed/hessian_speed.py --size quick --record data/measured/hessian_speed-my-cpu.json
    python benchmarks/speed/hessian_speed.py cuda:tf32=off --record
    data/measured/hessian_speed-my-gpu.json

The loss is that of one window of frames of a profile's PredNet, in float32 without TF32. Each
library is called as in its own documentation. A library that is not installed is recorded as
failed. The version of this script that also timed densities and wrote the tables of
`benchmarks/results/hessian_speed.md` is at commit 6aece191.
"""

from __future__ import annotations

import copy
import importlib
import importlib.metadata
import itertools
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor, nn

import gpulab as gl
from benchmarks.measuring import keep, race, run, seconds, table
from gpulab.training._profiles import protocol

CHECKED = 4  # the number of products that are compared with float64
Product = Callable[[Tensor], Any]


# --- the libraries --------------------------------------------------------------------------------
# Each function takes a network and a window, and returns an object that multiplies by the Hessian.


class Predictions(nn.Module):
    """PredNet as a function from inputs to outputs, for libraries that need it and a loss."""

    def __init__(self, net: gl.models.PredNet) -> None:
        super().__init__()
        self.net = net

    def forward(self, frames: Tensor) -> Tensor:
        return self.net(frames)[0]


class WindowLoss(nn.Module):
    """The loss of `PredNet.training_loss`, from the predictions and the actual frames."""

    reduction = "sum"  # read by curvlinops: the sum over the window, without averaging

    def forward(self, predictions: Tensor, frames: Tensor) -> Tensor:
        return (predictions - frames).square().flatten(1).mean(1).sum()


def window_loss(net: gl.models.PredNet, window: Tensor) -> Tensor:
    return net.training_loss(window, None)[0]


def gpulab(net: gl.models.PredNet, window: Tensor) -> Product:
    """The operator of this project."""
    return gl.hessian(net, lambda: window_loss(net, window)).__matmul__


def curvlinops(net: gl.models.PredNet, window: Tensor) -> Product:
    """https://curvlinops.readthedocs.io: `jvp` of `jacrev`, under `vmap` for many vectors."""
    library = importlib.import_module("curvlinops")
    model, parameters, data = Predictions(net), list(net.parameters()), [(window[:-1], window[1:])]
    # Its check that two products are equal is disabled, because it would lengthen the set-up.
    return library.HessianLinearOperator(
        model, WindowLoss(), parameters, data, check_deterministic=False
    ).__matmul__


def hessian_eigenthings(net: gl.models.PredNet, window: Tensor) -> Product:
    """Both backward passes are repeated for each product.

    https://noahgolmant.github.io/pytorch-hessian-eigenthings
    """
    library = importlib.import_module("hessian_eigenthings")
    return library.HessianOperator(net, [window], window_loss).__matmul__


def pyhessian(net: gl.models.PredNet, window: Tensor) -> Product:
    """Each product goes back through the kept graph of one gradient.

    https://github.com/amirgholami/PyHessian
    """
    library = importlib.import_module("pyhessian")
    hessian = library.hessian(
        Predictions(net), WindowLoss(), data=(window[:-1], window[1:]), cuda=window.is_cuda
    )

    def product(vector: Tensor) -> list[Tensor]:
        pieces = vector.split([p.numel() for p in hessian.params])
        parts = [piece.view_as(p) for piece, p in zip(pieces, hessian.params, strict=True)]
        hessian.model.zero_grad()
        return library.utils.hessian_vector_product(hessian.gradsH, hessian.params, parts)

    return product


def a_gradient(net: gl.models.PredNet, window: Tensor) -> Product:
    """One gradient, as a reference for the time of products."""
    return lambda _: torch.autograd.grad(window_loss(net, window), list(net.parameters()))


LIBRARIES: dict[str, tuple[str, Callable[..., Product]]] = {
    "gpulab": ("gpulab", gpulab),
    "curvlinops": ("curvlinops-for-pytorch", curvlinops),
    "hessian-eigenthings": ("hessian-eigenthings", hessian_eigenthings),
    "PyHessian": ("PyHessian", pyhessian),
    "a gradient": ("torch", a_gradient),
}
BLOCKS = ("gpulab", "curvlinops")  # the libraries that multiply many vectors at once


# --- measuring ------------------------------------------------------------------------------------


def measure(
    size: str, frames: int, setting: gl.Setting, count: int, block: int
) -> list[dict[str, Any]]:
    """Return a row for each library, for one size."""
    plan = protocol("prednet", size)
    net = gl.models.PredNet(channels=plan.model["channels"], size=plan.size).to(setting.device)
    film = next(gl.load("walk", frames=frames + 1, size=plan.size).windows(frames, 0)).frames
    window = torch.from_numpy(film / np.float32(255))[:, None].to(setting.device)
    parameters = sum(p.numel() for p in net.parameters())
    # The vectors have length one, as in Lanczos' method.
    vectors = torch.randn(
        max(CHECKED, block), parameters, generator=torch.Generator().manual_seed(0)
    )
    vectors = (vectors / vectors.norm(dim=1, keepdim=True)).to(setting.device)
    same = {
        "size": size,
        "frames": frames,
        "parameters": parameters,
        "threads": torch.get_num_threads(),
    }
    rows = {name: {"library": name, **same, "failed": {}, "memory": {}} for name in LIBRARIES}

    def make(name: str) -> Product:
        # PyHessian's finite differences change the weights.
        return LIBRARIES[name][1](copy.deepcopy(net), window)

    def make_first(name: str) -> Product:
        """Create a library's operator; the first one is timed, including its first product."""
        if "set_up" not in rows[name]:
            rows[name]["set_up"] = seconds(lambda: make(name)(vectors[0]), setting)
        return make(name)

    def work(
        what: str, which: Sequence[str], rounds: int, given: Callable[[], Tensor]
    ) -> dict[str, list[float]]:
        """Create each operator again for each kind of work, to measure the memory of that work."""
        failed: dict[str, str] = {}
        made = {
            name: lambda name=name: partial(lambda product: product(given()), make_first(name))
            for name in which
        }
        ways = race(made, setting, rounds, warm_up=1, label=f"{size}, {what}", failed=failed)
        for name, why in failed.items():
            rows[name]["failed"][what] = why
        for name, way in ways.items():
            rows[name]["memory"][what] = {"allocated": way.memory} if way.memory else {}
        return {name: way.seconds for name, way in ways.items()}

    turn = itertools.cycle(vectors)
    for name, taken in work("products", [*LIBRARIES], count, lambda: next(turn)).items():
        distribution = LIBRARIES[name][0]
        version = gl.__version__ if name == "gpulab" else importlib.metadata.version(distribution)
        rows[name] |= {"products": taken, "version": version}
    able = [name for name in rows if "products" in rows[name]]
    many = vectors[:block].T.contiguous()
    for name, taken in work(
        f"block {block}", [name for name in BLOCKS if name in able], 5, lambda: many
    ).items():
        rows[name]["blocks"] = {str(block): {"seconds": taken}}
    exact = exact_products(net, window, vectors[:CHECKED])
    for name in able[:-1]:
        product = make(name)
        found = torch.stack([flat(product(v)).double() for v in vectors[:CHECKED]])
        rows[name]["error"] = float(((found - exact).norm(dim=1) / exact.norm(dim=1)).max())
    return list(rows.values())


def exact_products(net: gl.models.PredNet, window: Tensor, vectors: Tensor) -> Tensor:
    """Compute products in float64, by two backward passes through the whole loss."""
    net, window = copy.deepcopy(net).double(), window.double()
    parameters, exact = list(net.parameters()), []
    for vector in vectors.double():
        parts = vector.split([p.numel() for p in parameters])
        gradients = torch.autograd.grad(window_loss(net, window), parameters, create_graph=True)
        inner = sum((g * part.view_as(g)).sum() for g, part in zip(gradients, parts, strict=True))
        exact.append(flat(torch.autograd.grad(inner, parameters)))
    return torch.stack(exact)


def flat(result: Tensor | Sequence[Tensor]) -> Tensor:
    return (
        result if isinstance(result, Tensor) else torch.cat([part.reshape(-1) for part in result])
    )


def in_words(row: dict[str, Any]) -> list[Any]:
    """Return a row of the table."""
    if "products" not in row:
        return [row["size"], row["library"], "", "", "", "", "; ".join(row["failed"].values())]
    blocks = [
        f"{1000 * statistics.median(part['seconds']) / int(k):.3g}"
        for k, part in row.get("blocks", {}).items()
    ]
    memory = [f"{part['allocated'] / 2**20:,.0f}" for part in row["memory"].values() if part]
    each = f"{1000 * statistics.median(row['products']):.3g}"
    cells = [
        f"{row['library']} {row['version']}",
        f"{row['set_up']:.3g}",
        each,
        "".join(blocks),
        ", ".join(memory),
    ]
    return [row["size"], *cells, f"{row['error']:.1e}" if "error" in row else ""]


def main(
    setting: Annotated[str, typer.Argument(help="such as cpu, cuda:tf32=off")] = "cpu",
    size: Annotated[list[str], typer.Option(help="profiles whose PredNet is measured")] = (
        "quick",
        "paper",
    ),
    frames: Annotated[int, typer.Option(help="frames in the window")] = 20,
    products: Annotated[
        int, typer.Option(help="products timed one at a time, of each library")
    ] = 100,
    block: Annotated[int, typer.Option(help="vectors multiplied at once")] = 10,
    record: Annotated[Path | None, typer.Option(help="JSON file for the results")] = None,
) -> None:
    """Measure, and print a table."""
    rows: list[dict[str, Any]] = []
    with gl.setting(setting) as applied:
        for one in size:
            rows += measure(one, frames, applied, products, block)
            keep(record, applied.kind, rows=rows)
    heads = "PredNet|library|set-up, s|a product, ms|in a block, ms each|peak, MiB|error"
    print(table(heads, map(in_words, rows)))


if __name__ == "__main__":
    run(lambda: typer.run(main))
