"""gpulab's Hessian beside curvlinops, hessian-eigenthings and PyHessian: time, memory on a GPU, and accuracy.

    pip install curvlinops-for-pytorch==3.0.1 hessian-eigenthings==1.0.0a5 PyHessian==0.1
    python benchmarks/hessian_speed.py --size quick --record data/measured/hessian_speed-my-cpu.json
    python benchmarks/hessian_speed.py --device cuda --steps 10 --record data/measured/hessian_speed-my-gpu.json
    python benchmarks/hessian_speed.py --write benchmarks/hessian_speed.md    # from what is recorded

The loss is that of one window of frames of the PredNet of a profile, in float32 without TF32. Each library is called as
its own documentation does. What is
not installed is noted as failed.
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
from measuring import keep, race, run, seconds, show, table
from torch import Tensor, nn

import gpulab as gl
from gpulab.store import recorded
from gpulab.training.spec import PROFILES, protocol

PROBES = 10
CHECKED = 4  # products compared with float64
ACCURATE = 10  # a peer whose error is more than this many times gpulab's is not compared in speed
Quadratures = tuple[np.ndarray, np.ndarray]


# --- the libraries ---------------------------------------------------------------------------------------


class Predictions(nn.Module):
    """PredNet as a function from inputs to outputs, for libraries that ask for one and a loss."""

    def __init__(self, net: gl.models.PredNet) -> None:
        super().__init__()
        self.net = net

    def forward(self, frames: Tensor) -> Tensor:
        return self.net(frames)[0]


class WindowLoss(nn.Module):
    """The loss of `PredNet.training_loss`, from the predictions and the frames that came."""

    reduction = "sum"  # curvlinops asks: the sum over the window, nothing to average

    def forward(self, predictions: Tensor, frames: Tensor) -> Tensor:
        return (predictions - frames).square().flatten(1).mean(1).sum()


def window_loss(net: gl.models.PredNet, window: Tensor) -> Tensor:
    return net.training_loss(window, None)[0]


class Operator:
    """A library's Hessian: made of a network and a window; `blocks` says whether it multiplies many vectors at once."""

    distribution: str
    blocks = False
    H: Any

    def product(self, vectors: Tensor) -> Any:
        return self.H @ vectors


class Gpulab(Operator):
    """The operator of this project."""

    distribution = "gpulab"
    blocks = True

    def __init__(self, net: gl.models.PredNet, window: Tensor) -> None:
        self.H = gl.hessian(net, lambda: window_loss(net, window))

    def density(self, probes: int, steps: int) -> Quadratures:
        spectrum = gl.saddles.spectral_density(self.H, probes=probes, steps=steps, seed=0, progress=False)
        return spectrum.nodes, spectrum.weights


class Curvlinops(Operator):
    """https://curvlinops.readthedocs.io: `jvp` of `jacrev`, under `vmap` for many vectors."""

    distribution = "curvlinops-for-pytorch"
    blocks = True

    def __init__(self, net: gl.models.PredNet, window: Tensor) -> None:
        self.library = importlib.import_module("curvlinops")
        model, parameters, data = Predictions(net), list(net.parameters()), [(window[:-1], window[1:])]
        # Its check that two products are the same is left out: it would make the set-up longer.
        self.H = self.library.HessianLinearOperator(model, WindowLoss(), parameters, data, check_deterministic=False)

    def density(self, probes: int, steps: int) -> Quadratures:
        # Boundaries are for its grid only; found by itself they would take products of their own.
        lanczos = self.library.LanczosApproximateSpectrumCached(self.H, steps, boundaries=(-1.0, 1.0))
        lanczos.approximate_spectrum(num_repeats=probes)
        nodes, vectors = zip(*lanczos._lanczos_iters, strict=True)
        return torch.stack(nodes).cpu().numpy(), torch.stack(vectors)[:, 0].square().cpu().numpy()


class HessianEigenthings(Operator):
    """https://noahgolmant.github.io/pytorch-hessian-eigenthings: both backward passes anew for each product."""

    distribution = "hessian-eigenthings"

    def __init__(self, net: gl.models.PredNet, window: Tensor) -> None:
        self.library = importlib.import_module("hessian_eigenthings")
        self.H = self.library.HessianOperator(net, [window], window_loss)

    def density(self, probes: int, steps: int) -> Quadratures:
        spectrum = self.library.spectral_density(self.H, num_runs=probes, lanczos_steps=steps, seed=0)
        return spectrum.raw_eigenvalues.cpu().numpy(), spectrum.raw_weights.cpu().numpy()


class PyHessian(Operator):
    """https://github.com/amirgholami/PyHessian: each product goes back through the kept graph of one gradient."""

    distribution = "PyHessian"

    def __init__(self, net: gl.models.PredNet, window: Tensor) -> None:
        self.library = importlib.import_module("pyhessian")
        torch.eig = removed_eig  # it calls what torch no longer has, for a matrix that is symmetric
        data = window[:-1], window[1:]
        self.H = self.library.hessian(Predictions(net), WindowLoss(), data=data, cuda=window.is_cuda)

    def product(self, vector: Tensor) -> list[Tensor]:
        pieces = vector.split([p.numel() for p in self.H.params])
        parts = [piece.view_as(p) for piece, p in zip(pieces, self.H.params, strict=True)]
        self.H.model.zero_grad()
        return self.library.utils.hessian_vector_product(self.H.gradsH, self.H.params, parts)

    def density(self, probes: int, steps: int) -> Quadratures:
        nodes, weights = self.H.density(iter=steps, n_v=probes)
        return np.array(nodes), np.array(weights)


def removed_eig(matrix: Tensor, eigenvectors: bool) -> tuple[Tensor, Tensor]:
    assert eigenvectors
    values, vectors = torch.linalg.eigh(matrix)
    return torch.stack([values, torch.zeros_like(values)], dim=1), vectors


class Gradient(Operator):
    """One gradient, to measure products by."""

    distribution = "torch"

    def __init__(self, net: gl.models.PredNet, window: Tensor) -> None:
        self.net, self.window = net, window

    def product(self, _: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(window_loss(self.net, self.window), list(self.net.parameters()))


LIBRARIES: dict[str, Callable[..., Operator]] = {
    "gpulab": Gpulab,
    "curvlinops": Curvlinops,
    "hessian-eigenthings": HessianEigenthings,
    "PyHessian": PyHessian,
}
GRADIENTS = {"a gradient": Gradient}


# --- measuring -------------------------------------------------------------------------------------------


def measure(
    size: str, frames: int, setting: gl.Setting, names: Sequence[str], count: int, blocks: Sequence[int], steps: int
) -> list[dict[str, Any]]:
    """The rows of one size."""
    plan = protocol("prednet", size)
    net = gl.models.PredNet(channels=plan.model["channels"], size=plan.size).to(setting.device)
    film = next(gl.load("walk", frames=frames + 1, size=plan.size).windows(frames, 0)).frames
    window = torch.from_numpy(film / np.float32(255))[:, None].to(setting.device)
    parameters = sum(p.numel() for p in net.parameters())
    # Of length one, as Lanczos multiplies.
    vectors = torch.randn(max(10, *blocks), parameters, generator=torch.Generator().manual_seed(0))
    vectors = (vectors / vectors.norm(dim=1, keepdim=True)).to(setting.device)
    turn, said = itertools.cycle(vectors), dict[str, Quadratures]()
    same = {"size": size, "frames": frames, "parameters": parameters, "threads": torch.get_num_threads()}
    rows = {name: {"library": name, **same, "failed": {}, "memory": {}} for name in names}

    def make(name: str) -> Operator:
        return (LIBRARIES | GRADIENTS)[name](copy.deepcopy(net), window)  # PyHessian's finite differences change it

    def first_product(name: str) -> None:
        rows[name]["set_up"] = seconds(lambda: make(name).product(vectors[0]), setting)

    def density(name: str, operator: Operator) -> None:
        torch.manual_seed(0)
        said[name] = operator.density(PROBES, steps)

    def work(
        what: str, which: Sequence[str], rounds: int, step: Callable[[str, Operator], Any]
    ) -> dict[str, list[float]]:
        """Each library is made anew for a kind of work, so that what it holds counts as that work's memory."""
        failed: dict[str, str] = {}
        made = {name: lambda name=name: partial(step, name, make(name)) for name in which}
        found = race(made, setting, rounds, warm_up=1, label=f"{size}, {what}", failed=failed)
        for name, why in failed.items():
            rows[name]["failed"][what] = why
        for name, way in found.items():
            rows[name]["memory"][what] = {"allocated": way.memory} if way.memory else {}
        return {name: way.seconds for name, way in found.items()}

    work("set-up", names, 0, lambda name, _: first_product(name))
    able = [name for name in names if "set_up" in rows[name]]
    for name, taken in work("products", able, count, lambda _, operator: operator.product(next(turn))).items():
        rows[name] |= {"products": taken, "version": version_of(make(name).distribution)}
    able = [name for name in able if name in LIBRARIES]
    for name, taken in work("density", able, 1, density).items():
        rows[name] |= {"steps": steps, "densities": [{"seconds": taken[0], **moments(*said[name])}]}
    takers = [name for name in able if make(name).blocks]
    for k in blocks:
        block = vectors[:k].T.contiguous()
        for name, taken in work(f"block {k}", takers, 5, lambda _, operator, v=block: operator.product(v)).items():
            rows[name].setdefault("blocks", {})[str(k)] = {"seconds": taken}
    exact = exact_products(net, window, vectors[:CHECKED])
    for name in able:
        operator = make(name)
        found = torch.stack([flat(operator.product(v)).double() for v in vectors[:CHECKED]])
        rows[name]["error"] = float(((found - exact).norm(dim=1) / exact.norm(dim=1)).max())
    return list(rows.values())


def version_of(distribution: str) -> str:
    """Of a library; gpulab may run from its folder, without having been installed."""
    return gl.__version__ if distribution == "gpulab" else importlib.metadata.version(distribution)


def moments(nodes: np.ndarray, weights: np.ndarray) -> dict[str, Any]:
    """What a density says of the spectrum."""
    nodes, weights = (np.asarray(part, dtype=np.float64) for part in (nodes, weights))
    found: dict[str, Any] = {"lowest": float(nodes.min()), "highest": float(nodes.max())}
    for name, power in (("mean", 1), ("square", 2)):
        of_probes = (weights * nodes**power).sum(1)
        found[name] = [float(of_probes.mean()), float(of_probes.std(ddof=1) / len(of_probes) ** 0.5)]
    return found


def exact_products(net: gl.models.PredNet, window: Tensor, vectors: Tensor) -> Tensor:
    """Products in float64, by two backward passes through the whole loss."""
    net, window = copy.deepcopy(net).double(), window.double()
    parameters, exact = list(net.parameters()), []
    for vector in vectors.double():
        parts = vector.split([p.numel() for p in parameters])
        gradients = torch.autograd.grad(window_loss(net, window), parameters, create_graph=True)
        inner = sum((g * part.view_as(g)).sum() for g, part in zip(gradients, parts, strict=True))
        exact.append(flat(torch.autograd.grad(inner, parameters)))
    return torch.stack(exact)


def flat(result: Tensor | Sequence[Tensor]) -> Tensor:
    return result if isinstance(result, Tensor) else torch.cat([part.reshape(-1) for part in result])


# --- the page --------------------------------------------------------------------------------------------


def in_short(record: dict[str, Any], rows: list[dict[str, Any]]) -> list[list[str]]:
    """What gpulab and the fastest peer of the same accuracy need for the same work."""
    lines = []
    for own in (row for row in rows if row["library"] == "gpulab" and row.get("error") is not None):
        peers = [row for row in rows if row["library"] in LIBRARIES and not row["library"].startswith("gpulab")]
        costs_of_peers = [
            (costs(peer), peer["library"]) for peer in peers if (peer.get("error") or np.inf) <= ACCURATE * own["error"]
        ]
        for what, (taken, memory) in costs(own).items():
            if of_all := [(*costs_of_one[what], name) for costs_of_one, name in costs_of_peers if what in costs_of_one]:
                least, its_memory, name = min(of_all)
                of = f"{own['size']}, {own['frames']} frames, {own['threads']} threads"
                made = (statistics.median(row["products"]) for row in rows if row["library"] == "a gradient")
                gradient = next(made, np.nan)
                count = PROBES * own["steps"] if what == "a density" else 100
                cells = [record["machine"], of, what, f"{taken / count / gradient:.2f}"]
                share = memory / its_memory if its_memory else np.nan
                lines.append([*cells, f"{taken:.3g}", f"{least:.3g} ({name})", f"{least / taken:.2f}", f"{share:.2f}"])
    return lines


def costs(row: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """(seconds, peak bytes) of each kind of work that was measured."""

    def cost(taken: float, work: str) -> tuple[float, float]:
        memory = row["memory"].get(work) or {}
        return taken, float(memory.get("allocated", memory.get("resident", np.nan)))

    found = {}
    ways = [
        cost(100 / int(k) * statistics.median(part["seconds"]), f"block {k}")
        for k, part in row.get("blocks", {}).items()
        if part["seconds"]
    ]
    if row.get("products"):
        each = statistics.median(row["products"])
        found["100 products, one at a time"] = cost(100 * each, "products")
        found["the same and the set-up"] = cost(row["set_up"] + 99 * each, "products")
        ways.insert(0, found["100 products, one at a time"])
    if ways:
        found["100 products, one at a time or in blocks"] = min(ways)
    if made := densities(row):
        found["a density"] = cost(statistics.median(one["seconds"] for one in made), "density")
    return found


def densities(row: dict[str, Any]) -> list[dict[str, Any]]:
    return [made for made in row.get("densities", []) if made]


def main(
    size: Annotated[list[str], typer.Option(help="the PredNet of these profiles")] = ("quick", "paper"),
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    frames: Annotated[int, typer.Option(help="frames in the window")] = 20,
    products: Annotated[int, typer.Option(help="products timed one at a time, of each library")] = 100,
    block: Annotated[list[int], typer.Option(help="vectors multiplied at once")] = (10,),
    steps: Annotated[int, typer.Option(min=2, help="Lanczos steps of each of the density's ten probes")] = 30,
    record: Annotated[Path | None, typer.Option(help="measure, and keep it in this file")] = None,
    write: Annotated[
        Path | None, typer.Option(help="write the table of all records between the marks of a page")
    ] = None,
) -> None:
    """Measure with `--record`; else print the table of what is recorded."""
    if record is not None:
        for asked, known in ((size, PROFILES), ([device], ("cpu", "cuda"))):
            if unknown := set(asked) - set(known):
                raise gl.UsageError(f"{unknown.pop()!r}: expected one of {'; '.join(known)}")
        setting = gl.Setting.parse("cuda:tf32=off" if device == "cuda" else "cpu")
        names = [*LIBRARIES, *GRADIENTS]
        rows: list[dict[str, Any]] = []
        with setting.apply():
            for one in size:
                rows += measure(one, frames, setting, names, products, block, steps)
                keep(record, device, rows=rows)
    lines = []
    for document in recorded.read_measured("hessian_speed"):
        for one in dict.fromkeys(row["size"] for row in document["rows"]):
            lines += in_short(document, [row for row in document["rows"] if row["size"] == one])
    short = table(
        "machine|PredNet|what|a product, in gradients|gpulab, s|fastest peer, s|times as fast|of its memory", lines
    )
    show("A Hessian", write, short=short)


if __name__ == "__main__":
    run(lambda: typer.run(main))
