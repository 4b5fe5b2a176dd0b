"""Gradient descent by several processes on the same weights, without a lock: Hogwild.

Each worker computes the gradient of its own batch and subtracts it from the weights, which lie in
shared memory, without waiting. So a gradient can be a few updates old when it is applied, and if
two workers change a weight at the same time, one change is lost. Synchronous workers instead wait
for each other before and after they change the weights, one at a time. From each seed both ways
begin with the same weights and see the same batches.

The two ways take turns, and each seed is a round of the timing. If the middle half of the rounds
differs by more than a fifth of the median, or if other programs take more than 15 % of the cores,
the updates per second are withheld.

    python notebooks/programs/hogwild.py
    python notebooks/programs/hogwild.py --seeds 24 --updates 400

Source: Recht, Ré, Wright, Niu 2011 (arXiv 1106.5730); pytorch/examples has the
same program for a classifier, `mnist_hogwild`.
"""

import argparse
import contextlib
import itertools
import sys
import time
from pathlib import Path

import pandas as pd
import torch
import torch.multiprocessing as mp
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import gpulab as gl
from companion.timing import (
    describe_trust,
    rows_for_record,
    share_of_cores,
    summarise_times,
    withhold,
)
from gpulab.store import recorded

WAYS = ("synchronous", "lock-free")
BATCH, LEARNING_RATE = 20, 1.0  # images per gradient; rate of plain gradient descent


def pixels(window):
    """Images (n, 1, 28, 28) as numbers from 0 to 1."""
    return torch.from_numpy(window.frames).float() / 255


def work(rank, args, weights, counts, moved, logs, lock, barrier):
    """Make one worker's share of the updates for each seed and way; each pair has a row of
    `weights`.
    """
    torch.set_num_threads(1)
    net = gl.models.Autoencoder(args.hidden)
    for row, shared in enumerate(weights):
        way, windows = WAYS[row % 2], gl.load("digits", size=(28, 28)).windows(BATCH, seed=row // 2)
        batches = [pixels(window) for window in itertools.islice(windows, args.updates)]
        wait = barrier.wait if way == "synchronous" else lambda: None
        # makes the parameters views of the shared memory
        vector_to_parameters(shared, net.parameters())
        barrier.wait()
        start = time.perf_counter()
        for number, batch in enumerate(batches[rank :: args.workers]):
            before = int(counts[row].sum())  # updates of all workers so far
            net.zero_grad()
            loss = net.training_loss(batch, None)[0]
            loss.backward()
            change = -LEARNING_RATE * parameters_to_vector(
                weight.grad for weight in net.parameters()
            )
            moved[row, rank] += change
            age = int(counts[row].sum()) - before
            wait()
            with lock if way == "synchronous" else contextlib.nullcontext():
                shared += change
            counts[row, rank] += 1
            logs[row, rank, number] = torch.tensor([time.perf_counter() - start, loss.item(), age])
            wait()


def main():
    """Run the workers and compare the two ways."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--updates", type=int, default=200, help="updates of all workers together")
    parser.add_argument("--seeds", type=int, default=2, help="number of seeds")
    parser.add_argument(
        "--hidden",
        type=int,
        nargs="+",
        default=[64, 16],
        help="widths of the layers up to the code",
    )
    parser.add_argument("--record", type=Path, help="JSON file for the numbers")
    args = parser.parse_args()
    if args.workers < 1 or args.updates % args.workers:
        parser.error(
            "expected --workers >= 1 and --updates divisible by it, got"
            f" --workers {args.workers} and --updates {args.updates}"
        )
    if args.seeds < 2:
        parser.error(f"expected --seeds >= 2, got --seeds {args.seeds}")
    nets = [gl.models.Autoencoder(args.hidden) for _ in range(args.seeds)]
    for seed, net in enumerate(nets):
        net.draw_weights(torch.Generator().manual_seed(seed))
    begin = torch.stack(
        [parameters_to_vector(net.parameters()).detach() for net in nets for _ in WAYS]
    )
    weights = begin.clone().share_memory_()
    shape = len(weights), args.workers
    counts = torch.zeros(shape, dtype=torch.int64).share_memory_()
    moved = torch.zeros(*shape, begin.shape[1], dtype=torch.float64).share_memory_()
    logs = torch.zeros(*shape, args.updates // args.workers, 3, dtype=torch.float64).share_memory_()
    new = mp.get_context("fork" if sys.platform == "linux" else "spawn")
    shared = (args, weights, counts, moved, logs, new.Lock(), new.Barrier(args.workers))
    share = share_of_cores()  # before the workers start
    mp.start_processes(work, shared, args.workers, start_method=new.get_start_method())
    report(args, begin, weights, moved, logs, share)


def speed_table(descents, updates, share):
    """Return a row for each way: the updates per second, if they can be trusted, and their spread.
    The second result says whether they can be trusted.
    """
    seconds = updates / descents.updates_per_second
    times = summarise_times({way: list(seconds[descents.way == way]) for way in WAYS})
    table = withhold(times, share)[["seconds", "spread", "rounds"]]
    table.insert(0, "updates_per_second", updates / table.seconds)
    return table.rename_axis("way").reset_index(), describe_trust(times, share)


def report(args, begin, weights, moved, logs, share):
    """Print the results of both ways, and write the record: a row for each run, and the
    losses in 20 pieces of time.
    """
    images = torch.cat(
        [pixels(window) for window in gl.load("digits", size=(28, 28)).heldout(1000)]
    )
    net, descents, curves = gl.models.Autoencoder(args.hidden).requires_grad_(False), [], []
    for row, end in enumerate(weights):
        vector_to_parameters(end, net.parameters())
        log = pd.DataFrame(logs[row].flatten(0, 1).numpy(), columns=["seconds", "loss", "age"])
        log = log.sort_values("seconds", ignore_index=True).assign(way=WAYS[row % 2], seed=row // 2)
        curves.append(log.assign(step=log.index, piece=log.index * 20 // len(log)))
        lost = (begin[row] + moved[row].sum(0) - end).abs().sum() / moved[row].abs().sum()
        loss, speed = net.training_loss(images, None)[0].item(), args.updates / log.seconds.max()
        descent = {
            "heldout_loss": loss,
            "updates_per_second": speed,
            "age": log.age.mean(),
            "lost_share": lost.item(),
        }
        descents.append({"way": WAYS[row % 2], "seed": row // 2, "weights": len(end), **descent})
    table = pd.DataFrame(descents)
    print(f"{args.workers} workers, {args.updates} updates from each of {args.seeds} seeds")
    speeds, trust = speed_table(table, args.updates, share)
    means = table.groupby("way")[["heldout_loss", "age", "lost_share"]].mean()
    means.insert(1, "updates_per_second", speeds.set_index("way").updates_per_second)
    print(means.to_string(na_rep="withheld"), trust, sep="\n")
    assert all(table[table.way == "synchronous"].lost_share < 1e-3), (
        "changes of synchronous workers were lost"
    )
    if args.record:
        curve = (
            pd.concat(curves)
            .groupby(["way", "seed", "piece"])[["step", "seconds", "loss"]]
            .mean()
            .reset_index()
        )
        what = f"{args.workers} workers, {args.updates} updates"
        tables = {
            "descents": table.to_dict("records"),
            "curve": curve.to_dict("records"),
            "speeds": rows_for_record(speeds),
            "trust": [{"what": what, "sentence": trust}],
        }
        recorded.write_document(args.record, recorded.make_measurement("cpu", **tables))


if __name__ == "__main__":
    main()
