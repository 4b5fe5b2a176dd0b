"""Runs from several seeds, in the worker processes of one machine or on a Ray cluster.

Runs need nothing from each other, so several copies of this program can share a store. Each copy
trains the runs that are missing, and reports which it found and which it trained.

On Ray, every missing run is a task. Ray gives it to a free node. If that node is lost, Ray starts
the task again on another one, and the run begins again: what is lost is the time since its
beginning. Nodes need no access to the store, because the results return to this program.

    python notebooks/programs/many_runs.py --store runs --seeds 0 2
    python notebooks/programs/many_runs.py --store runs --seeds 0 1 2 3 --engine ray
    RAY_ADDRESS=auto python notebooks/programs/many_runs.py --engine ray  # on a node of a cluster

Source: Moritz et al. 2018, *Ray* (arXiv 1712.05889).
"""

import argparse
import os
from pathlib import Path

import gpulab as gl
from gpulab.settings import Setting
from gpulab.store import recorded


def run_on_ray(experiment):
    """Train the runs missing from an experiment's store on a Ray cluster, and return all runs."""
    import ray  # pip install "gpulab[cluster]"

    # a cluster of this machine alone, unless $RAY_ADDRESS names another
    ray.init(os.environ.get("RAY_ADDRESS", "local"), include_dashboard=False, log_to_driver=False)
    there, tasks = gl.runs(experiment.folder), []
    for job in experiment.jobs():
        if (job["setting"], job["seed"]) not in set(zip(there.setting, there.seed, strict=True)):
            setting = Setting.parse(job["setting"])
            train = ray.remote(
                num_gpus=int(setting.kind == "cuda"),
                # needed from the start of a process
                runtime_env={"env_vars": setting.environment()},
                max_calls=1,  # a process does one run, so that no setting leaks into the next
                max_retries=4,  # if its node is lost
            )(gl.train)
            tasks.append(train.remote(**job | {"store": None, "progress": False}))
    for run in map(ray.get, tasks):
        gl.store.write_run(experiment.folder, run.record, run.history)
    ray.shutdown()
    return gl.runs(experiment.folder)


def main():
    """Train what is missing, and say which runs were there."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--store", type=Path, default=Path("runs"), help="folder of the runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--engine", choices=["local", "ray"], default="local")
    parser.add_argument("--model", default="autoencoder")
    parser.add_argument("--setting", default="cpu:threads=1")
    parser.add_argument("--profile", default="smoke", help="size of a run")
    parser.add_argument("--record", type=Path, help="JSON file for the table")
    args = parser.parse_args()
    experiment = gl.Experiment(args.model, [args.setting], args.seeds, args.profile, args.store)
    there = set(gl.runs(experiment.folder).id)
    runs = run_on_ray(experiment) if args.engine == "ray" else experiment.run(progress=False)
    runs = runs[runs.seed.isin(args.seeds)]
    table = runs[["seed", "final_loss"]].assign(
        run=["found in the store" if found else "trained" for found in runs.id.isin(there)]
    )
    print(table.to_string(index=False))
    if args.record:
        kind = Setting.parse(args.setting).kind
        rows = table.to_dict("records")
        recorded.write_document(args.record, recorded.make_measurement(kind, runs=rows))


if __name__ == "__main__":
    main()
