"""Inference on several devices: each has a copy of the network and predicts its share of the films.

Films do not depend on each other, so only films and predictions are communicated. A thread for each
device is enough, since Python's lock is free while a device computes. The program asserts that the
predictions are those of one device, up to rounding, and reports how many images per second one
device and all devices predict: the median over rounds, in which they take turns. A number is
withheld if the rounds disagree or other programs use the cores.

    python notebooks/programs/serve.py  # all GPUs, or the CPU twice
    python notebooks/programs/serve.py --size paper --films 64 --devices cuda:0 cuda:1
"""

import argparse
import copy
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

import gpulab as gl
from companion.timing import (
    describe_trust,
    rows_for_record,
    share_of_cores,
    time_rounds,
    withhold,
)
from gpulab.store import recorded

# of PredNet: the channels of its layers; height and width of its frames
SIZES = {
    "quick": ((3, 16, 32), (48, 64)),
    "paper": ((3, 48, 96, 192), (120, 160)),
}


@torch.inference_mode()
def predict(copies, films):
    """Predict films (T, B, C, H, W) with copies of a network, one on each device."""

    @torch.inference_mode()  # applies to one thread only
    def work(net, share):
        return net(share.to(next(net.parameters()).device))[0].cpu()

    with ThreadPoolExecutor(len(copies)) as pool:
        return torch.cat([*pool.map(work, copies, films.chunk(len(copies), 1))], 1)


def measure(copies, films, setting, rounds):
    """Time one device and all of them, in turns: a table with the images predicted per second, and
    whether it can be trusted.
    """
    share = share_of_cores()
    ways = {n: partial(predict, copies[:n], films) for n in (1, len(copies))}
    times = time_rounds(ways, setting, rounds)
    table = withhold(times, share)[["seconds", "spread", "rounds"]]
    images = films.shape[0] * films.shape[1]
    table.insert(0, "images_per_second", images / table.seconds)
    return table.rename_axis("devices").reset_index(), describe_trust(times, share)


def main():
    """Predict on one device and on all of them, and compare."""
    gpus = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", nargs="+", default=gpus if len(gpus) > 1 else ["cpu", "cpu"])
    parser.add_argument("--size", choices=SIZES, default="quick", help="size of PredNet")
    parser.add_argument("--films", type=int, default=8, help="number of films, each of ten frames")
    parser.add_argument("--rounds", type=int, default=7, help="rounds in which times are measured")
    parser.add_argument("--record", type=Path, help="JSON file for the numbers")
    args = parser.parse_args()
    if len(args.devices) < 2 or args.rounds < 2:
        parser.error(
            f"expected two or more --devices and --rounds >= 2, got {len(args.devices)} and"
            f" --rounds {args.rounds}"
        )
    kind = torch.device(args.devices[0]).type
    with gl.setting("cpu:threads=1" if kind == "cpu" else f"{kind}:tf32=off") as setting:
        net = gl.models.PredNet(*SIZES[args.size]).eval()
        copies = [copy.deepcopy(net).to(device) for device in args.devices]
        films = torch.rand(10, args.films, 3, *net.size)
        difference = (predict(copies, films) - predict(copies[:1], films)).abs().max().item()
        assert difference < 1e-5, (
            f"the predictions of several devices differ by {difference} from those of one"
        )
        measured, trust = measure(copies, films, setting, args.rounds)
    serving = measured.assign(
        size=args.size, films=args.films, setting=str(setting), difference=difference
    )
    print(
        "Several devices predict the same as one, up to rounding:\n"
        f"{serving.to_string(index=False, na_rep='withheld')}\n{trust}"
    )
    if args.record:
        tables = {
            "serving": rows_for_record(serving),
            "trust": [{"what": f"serving PredNet ({args.size})", "sentence": trust}],
        }
        recorded.write_document(args.record, recorded.make_measurement(kind, **tables))


if __name__ == "__main__":
    main()
