"""What other processes do for notebooks 02 and 08. They load this file, so it loads neither tables nor plots."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import numpy as np
import torch
from gpulab.training.data_parallel import DataParallel

import gpulab as gl
from companion.first_windows import FirstWindow
from gpulab.data.base import Window
from gpulab.training import loop, parallel
from gpulab.training.engines import Engines
from gpulab.training.plan import plan_run
from gpulab.training.run import set_up

WARM_UP = 2  # windows


def first_step(setting: str, net: str, profile: str, seeds: int, options: dict[str, Any]) -> dict[str, np.ndarray]:
    """The first step's `losses` (seeds, frames) and `gradient` (seeds, weights)."""
    losses, gradients = [], []
    for seed in range(seeds):
        computed = FirstWindow(net, seed=seed, profile=profile, setting=setting, **options).gradient(setting)
        losses.append(computed.losses.float())
        gradients.append(torch.cat([g.reshape(-1) for _, g in sorted(computed.gradient.items())]))
    return {"losses": torch.stack(losses).numpy(), "gradient": torch.stack(gradients).numpy()}


def times(seed: int, setting: gl.Setting, task: str = "{}", updates: int = 10) -> dict[str, float]:
    """Seconds of an update in one of the processes of `scaling_table`, which calls it."""
    size = int(os.environ["WORLD_SIZE"])
    with parallel.join(setting, size) as group:
        plan = plan_run(**json.loads(task), setting=setting, seed=seed, devices=size)
        plan.draw_weights()
        training = set_up(plan)
        engines = Engines(plan, training)
        engine = DataParallel(engines, group) if size > 1 else engines
        windows = plan.data.windows(plan.window, seed)

        def timed(windows: list[Window]) -> float:
            start = time.perf_counter()
            for _ in loop.train(training, windows, engine):
                pass  # each window ends with a look at the device
            return (time.perf_counter() - start) / len(windows)

        timed([next(windows) for _ in range(WARM_UP)])
        timed_windows = [next(windows) for _ in range(updates)]
        seconds = timed(timed_windows)
        if not isinstance(engine, DataParallel):
            return {"update": seconds, "compute": seconds, "wait": 0.0, "communicate": 0.0}
        engine.timed, engine.times = True, dict.fromkeys(engine.times, 0.0)
        seconds_with_barrier = timed(timed_windows)
        wait, communicate = (engine.times[name] / updates for name in ("wait", "communicate"))
        compute = seconds_with_barrier - wait - communicate  # the optimizer's step, too
        return {"update": seconds, "compute": compute, "wait": wait, "communicate": communicate}
