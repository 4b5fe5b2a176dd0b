"""Change each factor alone on this machine, and keep what it does: steps in a file, trainings as recorded runs.

python benchmarks/record_factors.py cuda --workers 8 --output data/factors/nvidia-h200.json
"""

import argparse
import shlex
import sys

from gpulab.companion.floating_point import record_factors

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["cpu", "cuda"], help="the device that the factors are changed on")
    parser.add_argument("--output", required=True, help="JSON file, such as data/factors/NAME.json")
    parser.add_argument("--store", default="data/factors/runs", help="folder of the runs")
    parser.add_argument("--profile", default="quick")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--frames", type=int, help="to train on  [default: the profile's]")
    parser.add_argument("--workers", type=int, default=1, help="runs at the same time")
    asked = vars(parser.parse_args())
    record_factors(asked.pop("output"), command=shlex.join(["python", *sys.argv]), **asked)
