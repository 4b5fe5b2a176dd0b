r"""One training run on several devices: every process has the whole network and takes its share of
each batch.

DistributedDataParallel averages the gradients of all processes while the backward pass is still
running, so that all make the same step. The program trains PredNet on one device, then on all
devices, which either divide the same batches (strong scaling) or get a whole batch each (weak
scaling). It asserts that the weights are the same in every process at the end, and that they agree
with those of one process up to rounding.

On GPUs, `--graph` adds two more comparisons. Python launches some thousand kernels for an update,
one by one, and takes as long for a small share as for a large one. Two CUDA graphs launch them at
once, one before and one after the sum of all gradients, which lie in one buffer. The first
comparison uses autograd's gradient, the second gpulab's formulas for the gradient of PredNet.

    python notebooks/programs/data_parallel.py
    python notebooks/programs/data_parallel.py --processes 4 --size kitti --batch 16 \
        --setting cuda:tf32=on --graph

The processes meet through a file, and nothing listens beyond 127.0.0.1. On several machines,
torchrun would start them, and `init_process_group` would find the meeting point, the rank and the
number of processes in the environment.

Source: Li et al. 2020, *PyTorch distributed: experiences on accelerating data parallel training*
(arXiv 2006.15704).
"""

import argparse
import itertools
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import pandas as pd
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector

import gpulab as gl
from gpulab.engines._graphs import Graph
from gpulab.engines._prednet_windows import WindowGradients
from gpulab.store import recorded
from gpulab.training._adam import Adam

SIZES = {  # of PredNet: the channels of its layers, height and width of its frames
    "small": ((3, 8, 16), (24, 32)),
    "quick": ((3, 16, 32), (48, 64)),
    "paper": ((3, 48, 96, 192), (120, 160)),
    "kitti": ((3, 48, 96, 192), (128, 160)),
}
WARM_UP, LEARNING_RATE = 2, 1e-3  # updates before the timed ones; learning rate of Adam


class Loss(torch.nn.Module):
    """The loss of films (T, B, C, H, W), as a module, because DistributedDataParallel wraps
    `forward`.
    """

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, films):
        """Return the loss, a scalar."""
        return self.net.training_loss(films, None)[0]


class KernelByKernel:
    """The usual update; DistributedDataParallel averages the gradients of `size` processes."""

    def __init__(self, net, films, size):  # noqa: ARG002
        self.loss = DistributedDataParallel(Loss(net)) if size > 1 else Loss(net)
        self.optimizer = torch.optim.Adam(net.parameters(), LEARNING_RATE)

    def __call__(self, films):
        """Update the weights with a share of a batch."""
        self.optimizer.zero_grad()
        self.loss(films).backward()
        self.optimizer.step()


class InGraphs:
    """An update as two CUDA graphs, one before and one after the gradients are averaged in one
    buffer.
    """

    def __init__(self, net, films, size, written_out=False):
        self.weights, self.size, self.loss = [*net.parameters()], size, Loss(net)
        self.optimizer = Adam(self.weights, LEARNING_RATE)
        self.windows = WindowGradients(net, films) if written_out else None
        self.gradients = torch.zeros_like(parameters_to_vector(self.weights))
        self.before = Graph(self.find_gradients, [films], [self.gradients])
        self.after = Graph(
            self.step, [], [*self.weights, *itertools.chain(*self.optimizer.state.values())]
        )

    def find_gradients(self, films):
        """Compute the gradients and copy them into one buffer."""
        self.loss.zero_grad()
        self.windows(films, None) if self.windows else self.loss(films).backward()
        torch.cat([weight.grad.reshape(-1) for weight in self.weights], out=self.gradients)

    def step(self):
        """Make a step of Adam with the gradients in the buffer."""
        parts = self.gradients.split([weight.numel() for weight in self.weights])
        for weight, part in zip(self.weights, parts, strict=True):
            weight.grad = part.view_as(weight)
        self.optimizer.step()

    def __call__(self, films):
        """Update the weights with a share of a batch."""
        self.before(films)
        if self.size > 1:
            dist.all_reduce(self.gradients, dist.ReduceOp.AVG)
        self.after()


UPDATES = {  # by their names in the record
    "kernel by kernel": KernelByKernel,
    "in graphs": InGraphs,
    "in graphs, written out": partial(InGraphs, written_out=True),
}


def seconds_of(do, inputs, times):
    """Mean seconds of a call; each call gets the next of the inputs."""
    for number in range(WARM_UP + times):
        if number == WARM_UP:
            inputs[0].sum().item()  # waits for the device
            start = time.perf_counter()
        do(inputs[number % len(inputs)])
    inputs[0].sum().item()
    return (time.perf_counter() - start) / times


def compare(args, films, update):
    """Train alone and together: return a row for each kind of scaling, and how far the weights
    differ at the end.
    """
    rank, size, timed = dist.get_rank(), dist.get_world_size(), films.dtype == torch.float32
    whole, larger = (
        films[:, : 2 * args.batch].split(args.batch, 1),
        films.split(size * args.batch, 1),
    )

    def trained(batches, size):
        """The seconds of an update in `size` processes, and the weights at the end."""
        net = gl.models.PredNet(*SIZES[args.size]).to(films)
        shares = [batch.chunk(size, 1)[rank % size].contiguous() for batch in batches]
        seconds = seconds_of(
            UPDATES[update](net, shares[0], size), shares, args.updates if timed else 1
        )
        return seconds, parameters_to_vector(net.parameters()).detach()

    # meanwhile, the other processes wait at the start of the joint training
    seconds, alone = trained(whole, 1) if rank == 0 else (0.0, 0.0)
    strong, weights = trained(whole, size)
    everywhere = [torch.empty_like(weights) for _ in range(size)]
    dist.all_gather(everywhere, weights)
    assert all(torch.equal(each, weights) for each in everywhere), (
        "the weights differ between the processes"
    )
    end = update, str(films.dtype).removeprefix("torch."), (weights - alone).abs().max().item()
    if not timed:
        return [], end
    rows = [
        (update, scaling, 1, args.batch, seconds, seconds, 0.0) for scaling in ("strong", "weak")
    ]
    communication = seconds_of(dist.all_reduce, [torch.empty_like(weights)], args.updates)
    for scaling, batches, together in (
        ("strong", whole, strong),
        ("weak", larger, trained(larger, size)[0]),
    ):
        compute, _ = trained([batch.chunk(size, 1)[rank] for batch in batches], 1)
        rows.append((update, scaling, size, batches[0].shape[1], together, compute, communication))
    return rows, end


def work(rank, size, args, meeting):
    """Join the other processes and compare; the first process reports."""
    with gl.setting(args.setting.replace("cuda", f"cuda:{rank}", 1)) as setting:
        dist.init_process_group(
            "nccl" if setting.kind == "cuda" else "gloo", meeting, rank=rank, world_size=size
        )
        windows = gl.load("walk", size=SIZES[args.size][1]).windows(args.frames)
        films = [
            torch.from_numpy(next(windows).frames[-args.frames :])
            for _ in range(2 * size * args.batch)
        ]
        films, updates = (
            torch.stack(films, 1).to(setting.device) / 255,
            UPDATES if args.graph else ["kernel by kernel"],
        )
        compared = [
            compare(args, each, update) for update in updates for each in (films, films.double())
        ]
        dist.destroy_process_group()
    if rank == 0:
        report(args, setting.kind, *zip(*compared, strict=True))


def report(args, kind, rows, ends):
    """Print the table and the result of the comparison, and write the record."""
    columns = ["update", "scaling", "devices", "batch", "seconds", "compute", "communication"]
    scaling = pd.DataFrame(itertools.chain(*rows), columns=columns)
    ends = pd.DataFrame(ends, columns=["update", "precision", "weights"]).assign(
        devices=args.processes
    )
    scaling["frames_per_second"] = scaling.batch * args.frames / scaling.seconds
    scaling["speedup"] = scaling.frames_per_second / scaling.groupby(
        "update"
    ).frames_per_second.transform("first")
    print(
        f"PredNet ({args.size}), films of {args.frames} frames, {args.processes} processes under"
        f" {args.setting}"
    )
    print(scaling.to_string(index=False, float_format="{:.4g}".format))
    most = ends.groupby("precision").weights.max()
    assert most.float64 < 1e-9, f"the weights differ by {most.float64} from those of one process"
    print(
        f"All {args.processes} processes end with the same weights; one process alone differs"
        f" by\n{most.to_string()}"
    )
    if args.record:
        common = {"network": "prednet", "size": args.size, "setting": args.setting}
        tables = {"scaling": scaling, "ends": ends}
        tables = {name: table.assign(**common).to_dict("records") for name, table in tables.items()}
        recorded.write_document(args.record, recorded.make_measurement(kind, **tables))


def main():
    """Start the processes."""
    gpus = torch.cuda.device_count()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=max(2, gpus), help="number of processes")
    parser.add_argument(
        "--setting",
        default="cuda:tf32=off" if gpus > 1 else "cpu:threads=1",
        help="on cpu or cuda",
    )
    parser.add_argument("--size", choices=SIZES, default="small", help="size of PredNet")
    parser.add_argument("--batch", type=int, default=8, help="films in a batch")
    parser.add_argument("--frames", type=int, default=5, help="frames of a film")
    parser.add_argument("--updates", type=int, default=5, help="number of timed updates")
    parser.add_argument("--graph", action="store_true", help="also use CUDA graphs")
    parser.add_argument("--record", type=Path, help="JSON file for the numbers")
    args = parser.parse_args()
    size, on_cpu = args.processes, args.setting.startswith("cpu")
    if size < 2 or args.batch % size:
        parser.error(
            "expected --processes >= 2 and --batch divisible by it, got"
            f" --processes {size} and --batch {args.batch}"
        )
    if on_cpu and args.graph:
        parser.error(
            f"--graph needs GPUs, got --setting {args.setting}; use --setting cuda:tf32=off"
        )
    # NVLink multicast hangs if containers share a host's switch
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = (
        "lo0" if sys.platform == "darwin" else "lo"
    )
    method = "fork" if on_cpu and sys.platform == "linux" else "spawn"
    if method == "fork":
        # the first optimizer imports large modules, which the forked processes then share
        torch.optim.Adam([torch.zeros(1)])
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(
            work, (size, args, Path(folder, "meeting").as_uri()), size, start_method=method
        )


if __name__ == "__main__":
    main()
