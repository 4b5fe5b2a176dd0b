"""Gradient-boosted trees (XGBoost, in the extra `trees`): a section of notebook 07.

python benchmarks/recording/record.py speed cpu:threads=2 --parts trees --write
data/measured/speed-my-cpu.json
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from companion.workloads import REPEATS, Row, clocked, summary
from gpulab.settings import Setting

TABLE_ROWS = {"smoke": 2_000, "quick": 50_000, "paper": 1_000_000}


def trees(setting: Setting, size: str) -> Iterator[Row]:
    """Train fifty gradient-boosted trees (XGBoost) on a random table in the host's memory."""
    try:
        import xgboost
    except ImportError:
        yield Row("XGBoost", note="XGBoost is not installed: pip install 'gpulab[trees]'")
        return
    draw = np.random.default_rng(0)
    table = draw.standard_normal((TABLE_ROWS[size], 50), np.float32)
    target = np.sin(3 * table[:, 0]) * table[:, 1] + table[:, 2] ** 2
    options = {"device": setting.device, "nthread": torch.get_num_threads(), "max_depth": 6}

    def train() -> None:
        xgboost.train(options, xgboost.DMatrix(table, target, nthread=options["nthread"]), 50)

    if setting.kind == "cuda" and not xgboost.build_info()["USE_CUDA"]:
        yield Row(
            "XGBoost",
            note="this XGBoost was built without CUDA: pip install xgboost, not xgboost-cpu",
        )
    elif setting.kind not in ("cpu", "cuda"):
        yield Row("XGBoost", note=f"XGBoost runs on cpu and cuda, not on {setting.kind}")
    else:
        times = [clocked(setting, train)[0] for _ in range(1 + REPEATS[size])]
        yield Row("XGBoost", "fifty trees", *summary(times[1:]))
