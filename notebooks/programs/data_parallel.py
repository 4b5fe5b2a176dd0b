r"""One training run on several devices: every process has the whole network and takes its share of
each batch.

DistributedDataParallel averages the gradients of all processes while the backward pass is still
running, so that all make the same step. The program trains PredNet on one device, then on all
devices, which either divide the same batches (strong scaling) or get a whole batch each (weak
scaling). It asserts that the weights are the same in every process at the end, and that they agree
with those of one process up to rounding.

Times are medians over rounds, in which the ways to train take turns. If the middle half of the
rounds differs by more than a fifth of the median, or if other programs take more than 15 % of the
cores, a time is withheld: it is missing in the output and in the record.

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

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector

import gpulab as gl
from companion.timing import (
    describe_trust,
    rows_for_record,
    share_of_cores,
    summarise_times,
    withhold,
)
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
COMPARED_UPDATES, LEARNING_RATE = 6, 1e-3  # before weights are compared; of Adam


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


class Trainer:
    """A new network, which `size` processes train together. Each call is an update with this
    process's share of the next batch.
    """

    def __init__(self, args, shares, update, size=1):
        self.net = gl.models.PredNet(*SIZES[args.size]).to(shares[0])
        self.update = UPDATES[update](self.net, shares[0], size)
        self.shares = itertools.cycle(shares)

    def __call__(self):
        """Update the weights."""
        self.update(next(self.shares))

    def weights(self):
        """All weights in one vector."""
        return parameters_to_vector(self.net.parameters()).detach()


def share_of(batches):
    """This process's share of each batch."""
    rank, size = dist.get_rank(), dist.get_world_size()
    return [batch.chunk(size, 1)[rank].contiguous() for batch in batches]


def compare_weights(args, films, update):
    """Train alone and together, and return the largest difference of a weight at the end."""

    def train(shares, size):
        trainer = Trainer(args, shares, update, size)
        for _ in range(COMPARED_UPDATES):
            trainer()
        return trainer.weights()

    batches = films[:, : 2 * args.batch].split(args.batch, 1)
    # meanwhile, the other processes wait at the start of the joint training
    alone = train(batches, 1) if dist.get_rank() == 0 else 0.0
    together = train(share_of(batches), dist.get_world_size())
    everywhere = [torch.empty_like(together) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, together)
    assert all(torch.equal(each, together) for each in everywhere), (
        "the weights differ between the processes"
    )
    return (together - alone).abs().max().item()


def time_updates(args, films, update):
    """Return the seconds of an update in each round, for each way to train."""
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = films[:, : 2 * args.batch].split(args.batch, 1)
    larger = films.split(size * args.batch, 1)
    ways = {
        "one device": Trainer(args, whole, update) if rank == 0 else None,  # the others wait
        "strong": Trainer(args, share_of(whole), update, size),
        "strong, own share": Trainer(args, share_of(whole), update),
        "weak": Trainer(args, share_of(larger), update, size),
        "weak, own share": Trainer(args, share_of(larger), update),
    }
    ways["communication"] = partial(dist.all_reduce, torch.empty_like(ways["strong"].weights()))
    seconds = {way: [] for way in ways}
    for _ in range(1 + args.rounds):
        for way, do in ways.items():
            dist.barrier()  # all processes begin at the same time
            start = time.perf_counter()
            for _ in range(args.updates if do else 0):
                do()
            getattr(torch, films.device.type).synchronize()
            seconds[way].append((time.perf_counter() - start) / args.updates if do else np.nan)
    # the mean over the processes, without the first round, which warms up
    own = torch.tensor([*seconds.values()], device=films.device)[:, 1:].contiguous()
    everywhere = [torch.empty_like(own) for _ in range(size)]
    dist.all_gather(everywhere, own)
    mean = torch.stack(everywhere).nanmean(0)
    return dict(zip(ways, mean.tolist(), strict=True))


def work(rank, size, args, meeting, share):
    """Join the other processes, compare and measure; the first process reports."""
    with gl.setting(args.setting.replace("cuda", f"cuda:{rank}", 1)) as setting:
        dist.init_process_group(
            "nccl" if setting.kind == "cuda" else "gloo", meeting, rank=rank, world_size=size
        )
        windows = gl.load("walk", size=SIZES[args.size][1]).windows(args.frames)
        films = [
            torch.from_numpy(next(windows).frames[-args.frames :])
            for _ in range(2 * size * args.batch)
        ]
        films = torch.stack(films, 1).to(setting.device) / 255
        updates = UPDATES if args.graph else ["kernel by kernel"]
        ends = [
            (
                update,
                str(precise.dtype).removeprefix("torch."),
                compare_weights(args, precise, update),
            )
            for update in updates
            for precise in (films.double(), films)
        ]
        times = {update: time_updates(args, films, update) for update in updates}
        dist.destroy_process_group()
    if rank == 0:
        report(args, setting.kind, ends, times, share)


def scaling_table(args, update, times, share):
    """Return a row for each kind of scaling on one device and on all. Speeds that cannot be trusted
    are missing.

    `overhead` is how much longer an update takes together than that of a share alone takes: the
    time of waiting, and of communication that is not hidden. It is the median over the rounds, and
    missing unless it is above zero in three quarters of them.
    """
    measured = withhold(summarise_times(times), share)
    seconds, spread, rows = measured.seconds, measured.spread, []
    for scaling, batch in (("strong", args.batch), ("weak", args.processes * args.batch)):
        own = f"{scaling}, own share"
        extra = np.subtract(times[scaling], times[own])
        is_clear = seconds[[scaling, own]].notna().all() and np.quantile(extra, 0.25) > 0
        overhead = np.median(extra) if is_clear else np.nan
        one, talk = seconds["one device"], seconds["communication"]
        together = seconds[scaling], seconds[own], talk, overhead, spread[scaling]
        rows += [
            (scaling, 1, args.batch, one, one, 0.0, 0.0, spread["one device"]),
            (scaling, args.processes, batch, *together),
        ]
    columns = ["scaling", "devices", "batch", "seconds", "compute"]
    table = pd.DataFrame(rows, columns=[*columns, "communication", "overhead", "spread"])
    table["frames_per_second"] = table.batch * args.frames / table.seconds
    table["speedup"] = table.frames_per_second / table.frames_per_second.iloc[0]
    table.insert(0, "update", update)
    return table.assign(rounds=args.rounds)


def report(args, kind, ends, times, share):
    """Print the table and the result of the comparison, and write the record."""
    scaling = pd.concat(
        [scaling_table(args, update, seconds, share) for update, seconds in times.items()],
        ignore_index=True,
    )
    trust = [
        (f"PredNet ({args.size}), {update}", describe_trust(summarise_times(seconds), share), share)
        for update, seconds in times.items()
    ]
    trust = pd.DataFrame(trust, columns=["what", "sentence", "share_of_cores"])
    ends = pd.DataFrame(ends, columns=["update", "precision", "weights"]).assign(
        devices=args.processes
    )
    print(
        f"PredNet ({args.size}), films of {args.frames} frames, {args.processes} processes under"
        f" {args.setting}"
    )
    print(scaling.to_string(index=False, float_format="{:.4g}".format, na_rep="withheld"))
    print(*trust.sentence, sep="\n")
    most = ends.groupby("precision").weights.max()
    assert most.float64 < 1e-9, f"the weights differ by {most.float64} from those of one process"
    print(
        f"All {args.processes} processes end with the same weights; one process alone differs"
        f" by\n{most.to_string()}"
    )
    if args.record:
        common = {"network": "prednet", "size": args.size, "setting": args.setting}
        tables = {"scaling": scaling, "ends": ends, "trust": trust}
        rows = {name: rows_for_record(table.assign(**common)) for name, table in tables.items()}
        recorded.write_document(args.record, recorded.make_measurement(kind, **rows))


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
    parser.add_argument("--rounds", type=int, default=7, help="rounds in which times are measured")
    parser.add_argument("--updates", type=int, default=3, help="timed updates in each round")
    parser.add_argument("--graph", action="store_true", help="also use CUDA graphs")
    parser.add_argument("--record", type=Path, help="JSON file for the numbers")
    args = parser.parse_args()
    size, on_cpu = args.processes, args.setting.startswith("cpu")
    if size < 2 or args.batch % size:
        parser.error(
            "expected --processes >= 2 and --batch divisible by it, got"
            f" --processes {size} and --batch {args.batch}"
        )
    if args.rounds < 2 or args.updates < 1:
        parser.error(
            "expected --rounds >= 2 and --updates >= 1, got"
            f" --rounds {args.rounds} and --updates {args.updates}"
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
    share = share_of_cores()  # before the processes start
    method = "fork" if on_cpu and sys.platform == "linux" else "spawn"
    if method == "fork":
        # the first optimizer imports large modules, which the forked processes then share
        torch.optim.Adam([torch.zeros(1)])
    with tempfile.TemporaryDirectory() as folder:
        meeting = Path(folder, "meeting").as_uri()
        mp.start_processes(work, (size, args, meeting, share), size, start_method=method)


if __name__ == "__main__":
    main()
