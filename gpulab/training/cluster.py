"""Experiments on a Ray cluster: each run is a task, done on whichever node is free, and kept by the driver.

Ray (Moritz et al. 2018, arXiv 1712.05889) says where a run goes, and begins it again elsewhere when its node dies: a
death costs the runs that were being done there, and nothing else. The store is the driver's own; no other node needs to
see it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from gpulab.errors import GpulabError, UsageError, extra
from gpulab.passports import Passport, passport
from gpulab.settings import Setting
from gpulab.store import runs as stores
from gpulab.training.workers import INSIDE, LOOK, Workers

MAX_RETRIES = 4  # of a run whose node died
AT_ONCE = 64  # runs that are handed to the cluster, which does as many of them as fit
LOCAL = {"include_dashboard": False, "_node_ip_address": "127.0.0.1"}  # a cluster that listens to this machine alone


class RayCluster(Workers):
    """The engine of an experiment on a cluster.

    Args:
        address: Of a node's head, or `auto`; without it `$RAY_ADDRESS`, or else a cluster that listens on 127.0.0.1
            alone, without a dashboard, and ends with this.

    Raises:
        UsageError: For an address that is one of a client.
        GpulabError: Where Ray is not installed, or the cluster does not answer.
    """

    def __init__(self, address: str | None = None) -> None:
        super().__init__(AT_ONCE)
        address = address or os.environ.get("RAY_ADDRESS") or "local"
        if address.startswith("ray://"):
            raise UsageError(f"address {address!r}: run this on a node of the cluster, with address='auto'")
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # Ray reads both when it is imported
        if address.startswith(("local", "127.")):  # else Ray replaces 127.0.0.1 by the address that others see
            os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        with extra("cluster"):
            import ray
        self.ray = ray
        try:
            ray.init(address, logging_level="error", log_to_driver=False, **LOCAL if address == "local" else {})
        except Exception as error:  # Ray raises what comes, also where a busy machine starts too slowly
            raise GpulabError(f"address {address!r}: no Ray cluster answers: {error}") from None

    def task_options(self, setting: str) -> dict[str, Any]:
        """What a run under a setting asks of its node: resources, and the environment of its process."""
        parsed = Setting.parse(setting)
        if parsed.device != parsed.kind:
            raise UsageError(f"{setting}: a cluster chooses the GPU of a run: write {parsed.kind}")
        cpus, gpus = parsed.threads or 1, 0 if parsed.kind == "cpu" else 1
        environment = {"env_vars": {**parsed.environment(), INSIDE: "1"}}
        # A process does one run, so that no setting leaks into the next.
        return {"num_cpus": cpus, "num_gpus": gpus, "max_calls": 1, "runtime_env": environment}

    def passports(self, setting: str) -> list[Passport]:
        """Those of the nodes that can do a run under a setting; `UsageError` where none can."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        options = self.task_options(setting)
        wanted = {"CPU": options["num_cpus"], "GPU": options["num_gpus"]}
        nodes = [node for node in self.ray.nodes() if node["Alive"]]
        able = [n for n in nodes if all(n["Resources"].get(name, 0) >= number for name, number in wanted.items())]
        if not able:
            raise UsageError(f"a run under {setting} asks for {wanted} on one node; none of {len(nodes)} has as much")
        on_each = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in able]
        return self.ray.get([self.ray.remote(**options, scheduling_strategy=at)(passport).remote() for at in on_each])

    def _shared_setting(self, job: dict[str, Any]) -> str:  # noqa: ARG002
        return ""

    def do(self, job: dict[str, Any]) -> str:
        """Have a run done on a node, keep it, and return its id."""
        remote = self.ray.remote(max_retries=MAX_RETRIES, **self.task_options(job["setting"]))(train_on_node)
        task = remote.remote({**job, "store": None})
        while not self.ray.wait([task], timeout=LOOK)[0]:
            self.check_stopping()
        try:
            return stores.write_run(Path(job["store"]), *self.ray.get(task)).name
        except self.ray.exceptions.RayTaskError as error:
            raise GpulabError(f"on its node: {error.cause}") from None
        except self.ray.exceptions.RayError as error:
            why = f"nodes died under it {MAX_RETRIES + 1} times: {error}"
            raise GpulabError(why.partition("\n")[0]) from None

    def __exit__(self, *_: object) -> None:
        self.ray.shutdown()  # which ends what the cluster does for this


def train_on_node(job: dict[str, Any]) -> tuple[dict[str, Any], Any, Any]:
    """Train in a task of its own: the record, the history, and the weights where they are to be kept."""
    from gpulab.training.run import train

    run = train(**job, progress=False)
    weights = run.model.state_dict() if job.get("keep_weights", True) and run.model else None
    return run.record, dict(run.columns), weights
