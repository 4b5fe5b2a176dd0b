"""Where an experiment's runs are done: in processes of their own, in threads that share a GPU, or on a Ray cluster.

`Workers` is the engine of an experiment on this machine, `RayCluster` that of a cluster. An engine says on which
machines a run may be done (`passports`), does one (`do`), and does many at the same time (`each`).
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from joblib.externals.loky import ProcessPoolExecutor, process_executor

from gpulab.data import scenes
from gpulab.errors import GpulabError, UsageError, extra
from gpulab.passports import Passport, passport
from gpulab.settings import Setting
from gpulab.store import runs as stores
from gpulab.training.run import train

INSIDE = "GPULAB_WORKER"  # in the environment of workers, which must not start others
MOST_THREADS = 16  # trainings that share a GPU: more gain nothing, and torch has 32 streams
LOOK = 1.0  # seconds after which Ctrl-C is heard where waiting does not hear it, as on Windows
DEAF = 10.0  # seconds after which a process that was asked to end is killed
IDLE = 20.0  # seconds after which a process without work ends by itself, such as one whose parent was killed
MAX_RETRIES = 4  # of a run whose node died
AT_ONCE = 64  # runs that are handed to the cluster, which does as many of them as fit
LOCAL = {"include_dashboard": False, "_node_ip_address": "127.0.0.1"}  # a cluster that listens to this machine alone
WHOLE_FILM = 100  # chunks of frames: 5,000 frames of 160×120, 288 MB


class Workers(contextlib.AbstractContextManager):
    """Does up to `count` runs at the same time, each of them given by the arguments of `gpulab.train`.

    Each is done in a process of its own, which has the environment of its setting and does no run of another. Those
    that may share a GPU are done in threads of this process, each on a stream of its own.
    """

    def __init__(self, count: int) -> None:
        self.count, self.stopping = count, threading.Event()
        self.pools: dict[tuple[int, str], ProcessPoolExecutor] = {}  # by thread and setting, of one process each

    def passports(self, setting: str) -> list[Passport]:  # noqa: ARG002
        """Those of the machines on which a run may be done: this one."""
        return [passport()]

    def each(self, do: Callable[[int], None], jobs: dict[int, dict[str, Any]]) -> None:
        """Call `do` with the number of every run, in threads. When Ctrl-C comes, those under way save checkpoints."""
        # The flags of a setting hold for all threads of a process, so those that share a GPU have one setting.
        for setting, numbers in itertools.groupby(jobs, lambda number: self._shared_setting(jobs[number])):
            with sharing(setting) if setting else contextlib.nullcontext() as initializer:
                count = min(self.count, MOST_THREADS) if setting else self.count
                with ThreadPoolExecutor(count, "", initializer) as threads:
                    tasks: set[Future[None]] = set()
                    try:
                        tasks = {threads.submit(do, number) for number in numbers}
                        while tasks:
                            ended, tasks = wait(tasks, LOOK, FIRST_COMPLETED)
                            for task in ended:
                                task.result()  # raises what `do` raised
                    except BaseException:
                        threads.shutdown(wait=False, cancel_futures=True)
                        self.stop({task for task in tasks if not task.cancelled()})
                        raise

    def _shared_setting(self, job: dict[str, Any]) -> str:
        """The setting of a run that is to share a GPU with others in threads, or nothing.

        gpulab's own networks may: weights and orders are drawn from generators that each training has for itself, and a
        stream keeps its kernels in their order. A function of the user's draws from torch's global generators.
        """
        may_share = isinstance(job["net"], str) and Setting.parse(job["setting"]).kind == "cuda"
        return job["setting"] if may_share and self.count > 1 else ""

    def do(self, job: dict[str, Any]) -> str:
        """Do a run, and return its id when it is done and kept. `GpulabError` where its process ends by itself."""
        if self._shared_setting(job):
            return train(**job, watch=self.check_stopping, progress=False).record["id"]
        try:
            pickled = cloudpickle.dumps(job)  # what is typed into a notebook goes by value
        except Exception as error:  # whatever an object says that hides what it holds
            named = getattr(job["net"], "name", job["net"])
            raise GpulabError(f"{named} cannot be sent to a process: {error}") from None
        try:
            return self._pool(job["setting"]).submit(do_run, pickled).result()
        except process_executor.BrokenProcessPool as error:  # killed, or out of memory?
            self.pools.pop((threading.get_ident(), job["setting"]))
            raise GpulabError(f"its worker process ended: {error}") from None

    def _pool(self, setting: str) -> ProcessPoolExecutor:
        """This thread's process, with the environment of a setting: a pool of one, whose end costs others nothing."""
        key = threading.get_ident(), setting
        if key not in self.pools:
            # Python does not look in the current folder while it starts, where a queue.py may lie.
            environment = {**Setting.parse(setting).environment(), INSIDE: "1", "PYTHONSAFEPATH": "1"}
            if self.count > 1 and not setting.startswith("cpu"):
                environment["OMP_NUM_THREADS"] = "1"  # the work is the GPU's; the cores are shared
            self.pools[key] = ProcessPoolExecutor(1, timeout=IDLE, env=environment, initializer=_begin)
        return self.pools[key]

    def check_stopping(self, *_: Any) -> None:
        """Interrupt a run that shares this process, after a window, as a signal does in a process of its own."""
        if self.stopping.is_set():
            raise KeyboardInterrupt

    def stop(self, tasks: set[Future[Any]]) -> None:
        """Have what is under way save checkpoints and end; a process that does not hear is killed."""
        self.stopping.set()
        for pool in list(self.pools.values()):
            for process in list(pool._processes.values()):
                process.terminate()  # SIGTERM
        deaf = wait(tasks, DEAF)[1]
        for pool in list(self.pools.values()):
            pool.shutdown(kill_workers=bool(deaf))

    def __exit__(self, *_: object) -> None:
        for pool in self.pools.values():
            pool.shutdown()


@contextlib.contextmanager
def sharing(setting: str) -> Iterator[Callable[[], None]]:
    """Have a setting in force around threads; yields what each of them calls first: it takes a stream of its own."""
    parsed = Setting.parse(setting)
    with scenes.remembered_chunks(WHOLE_FILM), parsed.apply():
        on_gpu = parsed.kind == "cuda"
        yield lambda: torch.cuda.set_stream(torch.cuda.Stream(parsed.device)) if on_gpu else None


def do_run(job: bytes) -> str:
    """Do a run, and return its id. It is unpickled here, since loky ends a process that cannot unpickle its work."""
    return train(**cloudpickle.loads(job), progress=False).record["id"]


def _begin() -> None:
    """Ctrl-C in a terminal comes to all processes: what becomes of the runs is for the parent to say, by SIGTERM."""

    def interrupt(*_: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, interrupt)
    process_executor._MAX_MEMORY_LEAK_SIZE = math.inf  # loky would begin a new process when a training needs memory


class RayCluster(Workers):
    """The same on a Ray cluster: each run is a task, done on whichever node is free, and kept by the driver.

    Ray (Moritz et al. 2018, arXiv 1712.05889) says where a run goes, and begins it again elsewhere when its node dies:
    a death costs the runs that were being done there, and nothing else. The store is the driver's own; no other node
    needs to see it.

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
    run = train(**job, progress=False)
    weights = run.model.state_dict() if job.get("keep_weights", True) and run.model else None
    return run.record, dict(run.columns), weights
