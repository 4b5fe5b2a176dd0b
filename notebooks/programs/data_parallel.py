"""One training on several devices: every process has the whole network and takes its share of each batch.

DistributedDataParallel averages the gradients of all processes while the backward pass still runs, so that all make the
same step. The program trains a PredNet on one device, then on all of them, with the same batches (strong scaling) and
with as large a batch for each (weak scaling). It asserts that the weights end the same in every process, and where one
process alone ends, up to rounding.

    python notebooks/programs/data_parallel.py
    python notebooks/programs/data_parallel.py --processes 4 --size paper --batch 16 --setting cuda:tf32=off

These start their processes themselves: they meet through a file, and nothing listens beyond 127.0.0.1. On several
machines torchrun starts them, whose meeting point can be reached from outside:

    torchrun --standalone --nproc-per-node 2 notebooks/programs/data_parallel.py

Source: Li et al. 2020, *PyTorch distributed: experiences on accelerating data parallel training* (arXiv 2006.15704).
"""

import argparse
import contextlib
import os
import sys
import tempfile
import time
from pathlib import Path

import pandas as pd
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector

import gpulab as gl
from gpulab.store import recorded

SIZES = {  # of PredNet: the channels of its layers, height and width of its frames
    "small": ((3, 8, 16), (24, 32)),
    "quick": ((3, 16, 32), (48, 64)),
    "paper": ((3, 48, 96, 192), (120, 160)),
}
WARM_UP = 2  # updates before those that are timed


class Loss(torch.nn.Module):
    """The loss of films (T, B, C, H, W): DistributedDataParallel takes care of what goes through `forward`."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, films):
        """A scalar."""
        return self.net.training_loss(films, None)[0]


def train(loss, batches, updates, communicate=True):
    """Seconds of an update. Without communication each process goes on by itself, to see what computing alone takes."""
    optimizer, clock = torch.optim.Adam(loss.parameters(), 1e-3), []
    with contextlib.nullcontext() if communicate else loss.no_sync():
        for update in range(WARM_UP + updates):
            optimizer.zero_grad()
            value = loss(batches[update % len(batches)])
            value.backward()
            optimizer.step()
            if update in (WARM_UP - 1, WARM_UP + updates - 1):
                next(loss.parameters()).sum().item()  # waits for the device
                clock.append(time.perf_counter())
    return (clock[1] - clock[0]) / updates


def compare(args, device, dtype):
    """Train alone and together: a row for each kind of scaling, and how far the weights differ in the end."""
    rank, size, (channels, frame) = dist.get_rank(), dist.get_world_size(), SIZES[args.size]
    windows = gl.load("walk", size=frame).windows(args.frames)
    films = [torch.from_numpy(next(windows).frames[-args.frames :]) for _ in range(2 * size * args.batch)]
    films = torch.stack(films, 1).to(device, dtype) / 255
    whole = films[:, : 2 * args.batch].split(args.batch, 1)

    def together(batches, communicate=True):
        loss = DistributedDataParallel(Loss(gl.models.PredNet(channels, frame)).to(device, dtype))
        shares = [batch.chunk(size, 1)[rank].contiguous() for batch in batches]
        return train(loss, shares, args.updates, communicate), parameters_to_vector(loss.parameters())

    alone = Loss(gl.models.PredNet(channels, frame)).to(device, dtype)
    seconds = train(alone, whole, args.updates) if rank == 0 else 0.0  # the others wait where they train together
    rows = [(scaling, 1, args.batch, seconds, seconds) for scaling in ("strong", "weak")]
    strong, weights = together(whole)
    everywhere = [torch.empty_like(weights) for _ in range(size)]
    dist.all_gather(everywhere, weights.detach())
    assert all(torch.equal(each, weights) for each in everywhere), "the weights differ between the processes"
    difference = (weights - parameters_to_vector(alone.parameters())).abs().max().item()
    if dtype == torch.float64:  # which is not timed
        return rows, difference
    rows.append(("strong", size, args.batch, strong, together(whole, communicate=False)[0]))
    larger = films.split(size * args.batch, 1)
    rows.append(("weak", size, size * args.batch, together(larger)[0], together(larger, communicate=False)[0]))
    return rows, difference


def work(rank, size, args, meeting):
    """What one of the processes does: it joins the others, compares, and the first one reports."""
    on_gpu = not args.setting.startswith("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank))) if on_gpu else torch.device("cpu")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # NVLink multicast hangs where containers share a host's switch
    if int(os.environ.get("LOCAL_WORLD_SIZE", size)) == size:  # all on this machine: no other need hear them
        names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        os.environ |= dict.fromkeys(names, "lo0" if sys.platform == "darwin" else "lo")
    if on_gpu:
        torch.cuda.set_device(device)
    with gl.setting(args.setting):
        dist.init_process_group("nccl" if on_gpu else "gloo", meeting, rank=rank, world_size=size)
        rows, float32 = compare(args, device, torch.float32)
        _, float64 = compare(args, device, torch.float64)
        dist.destroy_process_group()
    if rank == 0:
        report(args, size, rows, {"float32": float32, "float64": float64})


def report(args, size, rows, differences):
    """Print the table and what was asserted, and write the record."""
    scaling = pd.DataFrame(rows, columns=["scaling", "devices", "batch", "seconds", "compute"])
    scaling["frames_per_second"] = scaling.batch * args.frames / scaling.seconds
    scaling["speedup"] = scaling.frames_per_second / scaling.frames_per_second[0]
    print(f"PredNet ({args.size}), films of {args.frames} frames, {size} processes under {args.setting}")
    print(scaling.round({"seconds": 4, "compute": 4, "frames_per_second": 0, "speedup": 2}).to_string(index=False))
    assert differences["float64"] < 1e-9, f"other weights than one process: {differences}"
    words = " and ".join(f"{largest:.1e} in {precision}" for precision, largest in differences.items())
    print(f"All {size} processes end with the same weights, which differ from those of one process by {words} at most.")
    if args.record:
        common = {"network": "prednet", "size": args.size, "setting": args.setting}
        ends = pd.DataFrame(differences.items(), columns=["precision", "weights"]).assign(devices=size, **common)
        tables = {"scaling": scaling.assign(**common).to_dict("records"), "ends": ends.to_dict("records")}
        recorded.write_json(args.record, recorded.measured(args.setting.partition(":")[0], **tables))


def main():
    """Start the processes, unless torchrun has."""
    gpus = torch.cuda.device_count()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=max(2, gpus), help="how many; torchrun decides it otherwise")
    parser.add_argument("--setting", default="cuda:tf32=off" if gpus > 1 else "cpu:threads=1", help="of cpu or cuda")
    parser.add_argument("--size", choices=SIZES, default="small", help="of PredNet")
    parser.add_argument("--batch", type=int, default=8, help="films, in all")
    parser.add_argument("--frames", type=int, default=5, help="of a film")
    parser.add_argument("--updates", type=int, default=5, help="that are timed")
    parser.add_argument("--record", type=Path, help="JSON file for the numbers")
    args = parser.parse_args()
    size = int(os.environ.get("WORLD_SIZE", args.processes))
    if size < 2 or args.batch % size:
        parser.error(f"{size} processes cannot have equal shares of a batch of {args.batch}: --batch, --processes")
    if not args.setting.startswith("cpu") and int(os.environ.get("LOCAL_WORLD_SIZE", size)) > gpus:
        parser.error(f"{size} processes need a GPU each, and there are {gpus}: --processes, --setting cpu:threads=1")
    if "RANK" in os.environ:
        work(int(os.environ["RANK"]), size, args, "env://")
    else:
        method = "fork" if args.setting.startswith("cpu") and sys.platform == "linux" else "spawn"
        with tempfile.TemporaryDirectory() as folder:
            mp.start_processes(work, (size, args, Path(folder, "meeting").as_uri()), size, start_method=method)


if __name__ == "__main__":
    main()
