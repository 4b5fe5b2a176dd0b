"""Measure this machine's roofline and keep it with its passport.

python benchmarks/record_roofline.py cuda:tf32=off cuda:tf32=on data/measured/rooflines-nvidia-h200.json
"""

import sys
from pathlib import Path

import pandas as pd

from gpulab.device.rooflines import roofline
from gpulab.store.records import measured, write_json

if __name__ == "__main__":
    *settings, file = sys.argv[1:]
    frame = pd.concat([roofline(setting) for setting in settings], ignore_index=True)
    print(frame[["setting", "operation", "intensity", "gflops", "gigabytes_per_second", "spread"]].to_string())
    write_json(Path(file), measured(settings[0].partition(":")[0], rows=frame.to_dict("records")))
