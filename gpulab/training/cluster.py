"""Experiments on a cluster of Ray's: the same runs as on one machine, in the same store, on whichever node is free.

Ray (Moritz et al. 2018, arXiv 1712.05889) says where a run goes and when a node has died. All else is as on one
machine: every run has a process of its own, the store must be one that every node sees, and claims in it keep two
experiments from doing one run twice. A run whose node dies is begun again on another, from its last checkpoint.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from gpulab.errors import GpulabError, UsageError, extra
from gpulab.passports import Passport
from gpulab.settings import Setting
from gpulab.store.object_store import remote
from gpulab.training.workers import Worker, as_text, outcome

DEATHS = 5  # of nodes under a run, after which it counts as failed
HERE = ("local", "127.")  # how addresses begin that only this machine sees
TOLD = 1.0  # seconds between what a run says of its progress


def ray(address: str) -> ModuleType:
    """Ray, which is told before it starts to send nothing."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    if address.startswith(HERE):  # else Ray replaces 127.0.0.1 by the address that others see
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    with extra("cluster"):
        import ray
    return ray


class RayCluster:
    """The engine of an experiment on a cluster.

    Args:
        address: Of a node's head, or `auto`; without it `$RAY_ADDRESS`, or else a cluster that listens on 127.0.0.1
            alone, without a dashboard, and ends with this.
        cpus: CPUs kept for each run; by default the threads of its setting, or 1.
        gpus: GPUs kept for each run under a setting of a GPU: 1, or a fraction, so that several share one.
        most: Runs at the same time at most; 1, an experiment's default, says as many as fit.

    Raises:
        UsageError: For an address or a share of a node that makes no sense.
        GpulabError: Where Ray is not installed, or the cluster does not answer.
    """

    def __init__(
        self, address: str | None = None, cpus: float | None = None, gpus: float | None = None, most: int = 1
    ) -> None:
        if cpus is not None and not cpus > 0:
            raise UsageError(f"cpus={cpus!r}: expected a number above 0")
        if gpus is not None and not 0 < gpus <= 1:
            raise UsageError(f"gpus={gpus!r}: a run uses one GPU: 1, or a fraction such as 0.25")
        address = address or os.environ.get("RAY_ADDRESS") or "local"
        if address.startswith("ray://"):
            raise UsageError(f"address {address!r}: run this on a node of the cluster, with address='auto'")
        self.ray, self.cpus, self.gpus, self.stopped = ray(address), cpus, gpus, False
        only_here = {"include_dashboard": False, "_node_ip_address": "127.0.0.1"} if address == "local" else {}
        usual = signal.getsignal(signal.SIGTERM)
        try:
            self.ray.init(address, logging_level="error", log_to_driver=False, **only_here)
        except Exception as error:  # Ray raises what comes, also where a busy machine starts too slowly
            raise GpulabError(f"address {address!r}: no Ray cluster answers: {error}") from None
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, usual)  # Ray's own ends the process with what is being done unsaved
        self.nodes = [node for node in self.ray.nodes() if node["Alive"]]
        self.count = most if most > 1 else 0  # as many as fit, which depends on the settings
        self.lock, self.going = threading.Lock(), dict[int, Any]()

    def asked(self, setting: str) -> dict[str, float]:
        """What the cluster is to keep for a run under a setting."""
        parsed = Setting.parse(setting)
        if parsed.kind == "cpu":
            return {"num_cpus": self.cpus or parsed.threads or 1, "num_gpus": 0}
        if parsed.device != parsed.kind:
            raise UsageError(f"{setting}: a cluster chooses the GPU of a run: write {parsed.kind}")
        return {"num_cpus": self.cpus or 1, "num_gpus": self.gpus or 1}

    def passports(self, setting: str) -> list[Passport]:
        """Those of the kinds of nodes that can do a run under a setting; `UsageError` where none can."""
        asked = self.asked(setting)
        cpus, gpus = asked["num_cpus"], asked["num_gpus"]
        nodes = [{"CPU": 0.0, "GPU": 0.0, **node["Resources"]} for node in self.nodes]
        fits = [min(node["CPU"] // cpus, (node["GPU"] + 1e-9) // gpus if gpus else math.inf) for node in nodes]
        if not sum(fits):
            most = {name: max(node[name] for node in nodes) for name in ("CPU", "GPU")}
            raise UsageError(
                f"a run under {setting} asks for {cpus:g} CPU and {gpus:g} GPU on one node; of {len(nodes)} nodes "
                f"none has as much (the most are {most['CPU']:g} CPU and {most['GPU']:g} GPU): start a larger one"
            )
        self.count = max(self.count, int(sum(fits)))
        if not gpus:
            return self.kinds
        return [
            Passport({**kind, "gpus": [gpu]})
            for kind in self.kinds
            for number, gpu in enumerate(kind["gpus"])
            if gpu not in kind["gpus"][:number]
        ]

    @functools.cached_property
    def kinds(self) -> list[Passport]:
        """The passports of the nodes, those that are alike once, with all their GPUs."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        ask = self.ray.remote(num_cpus=0, max_retries=0)(_passport_here)
        on_each = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in self.nodes]
        texts = self.ray.get([ask.options(scheduling_strategy=strategy).remote() for strategy in on_each])
        return [Passport(json.loads(text)) for text in dict.fromkeys(texts)]

    def room(self, job: dict[str, Any]) -> contextlib.AbstractContextManager[Any]:  # noqa: ARG002
        """Ray keeps what a job asks for."""
        return contextlib.nullcontext()

    def train(self, job: dict[str, Any], tell: Callable[[int, float], None]) -> Any:
        """Have a job done on a node, and begun again on another when that dies."""
        errors = self.ray.exceptions
        store = None if remote(job["store"]) else Path(job["store"]).absolute()
        text = as_text(job if store is None else {**job, "store": str(store)})
        go = self.ray.remote(num_returns="streaming", max_retries=0, **self.asked(job["setting"]))(_train_here)
        for _ in range(DEATHS):
            if self.stopped:
                raise GpulabError("interrupted")
            messages = go.remote(job["setting"], text)
            with self.lock:
                self.going[id(messages)] = messages
            try:
                done = outcome((json.loads(self.ray.get(message)) for message in messages), tell)
            except errors.RayTaskError as error:  # of this file's own code
                raise GpulabError(f"on its node: {error.cause!r}") from None
            except errors.TaskCancelledError:
                raise GpulabError("interrupted") from None
            except errors.RayError as error:  # the node, or what Ray runs on it
                died = str(error).partition("\n")[0]
            else:
                if store is not None and not (store / done).exists():
                    raise GpulabError(
                        f"{done} was kept on its node, in {store}, which is not this machine's {store}: "
                        "name a store that every node sees"
                    )
                return done
            finally:
                with self.lock:
                    del self.going[id(messages)]
        raise GpulabError(f"{DEATHS} nodes died under it: {died}")

    def stop(self) -> None:
        """Ask every run to save a checkpoint and end, and begin no other."""
        self.stopped = True
        with self.lock:
            for messages in self.going.values():
                self.ray.cancel(messages)

    def close(self) -> None:
        """Leave the cluster, which ends if it was made here."""
        self.ray.shutdown()

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


# --- on the nodes ------------------------------------------------------------------------------------------


def _passport_here() -> str:
    """The passport of a node with all its GPUs, which Ray hides from a task that asks for none."""
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_VISIBLE_DEVICES")}
    code = "import gpulab; print(gpulab.passport().to_json())"
    return subprocess.run(
        [sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True, check=True
    ).stdout


def _train_here(setting: str, text: str) -> Iterator[str]:
    """Do a job in a process of its own; yields what that says, its progress now and then."""
    worker, told = Worker(setting, beside=1), 0.0
    try:
        for message in worker.answers_to(text):
            if "done" not in message or time.monotonic() - told > TOLD:
                told = time.monotonic()
                yield json.dumps(message)
    except GpulabError as error:  # it died, which is not its node's fault
        yield json.dumps({"error": str(error)})
    except BaseException:
        worker.stop()
        raise
    finally:
        worker.close()


# --- without a daemon --------------------------------------------------------------------------------------


def slurm_script(
    command: list[str],
    tasks: int,
    settings: list[str],
    cpus: float | None = None,
    gpus: float | None = None,
    devices: int = 1,
    workers: int = 1,
) -> str:
    """Write a job array for Slurm's `sbatch`, of which each task does its share of an experiment.

    All tasks need to see the store in which the experiment keeps its runs.

    Args:
        command: The words of the command line of the experiment, without `--share`.
        tasks: How many tasks the array has.
        settings: The settings of the experiment. Where one is of a GPU, every task asks for GPUs.
        cpus: CPUs of each task. By default the most threads that a setting names, or 1, for each worker and device.
        gpus: Whole GPUs of each task. By default as many as `devices`.
        devices: How many devices share a run.
        workers: How many runs a task trains at the same time. They share the task's GPUs.

    Returns:
        The text of the script.

    Raises:
        UsageError: For a part of a GPU, for `gpus` where no setting is of a GPU, and for a malformed setting.

    Examples:
        >>> import gpulab as gl
        >>> print(gl.training.slurm_script(["gpulab", "experiment", "prednet"], 4, ["cpu:threads=2"]))
        #!/bin/bash
        #SBATCH --job-name=gpulab
        #SBATCH --array=0-3
        #SBATCH --cpus-per-task=2
        #SBATCH --requeue
        srun gpulab experiment prednet --share "$SLURM_ARRAY_TASK_ID/4"
    """
    parsed = [Setting.parse(text) for text in settings]
    on_gpu = any(setting.kind != "cpu" for setting in parsed)
    if gpus is not None and (gpus != int(gpus) or gpus < 1):
        raise UsageError(f"gpus={gpus!r}: Slurm gives whole GPUs; several runs share one with --workers")
    if gpus is not None and not on_gpu:
        raise UsageError(f"gpus={gpus!r}: no setting of {', '.join(settings)} is of a GPU")
    cores = math.ceil(cpus or max(setting.threads or 1 for setting in parsed) * devices * workers)
    lines = ["#!/bin/bash", "#SBATCH --job-name=gpulab", f"#SBATCH --array=0-{tasks - 1}"]
    lines += [f"#SBATCH --cpus-per-task={cores}"]
    lines += [f"#SBATCH --gpus-per-task={int(gpus or devices)}"] if on_gpu else []
    lines += ["#SBATCH --requeue", f'srun {shlex.join(command)} --share "$SLURM_ARRAY_TASK_ID/{tasks}"']
    return "\n".join(lines)
