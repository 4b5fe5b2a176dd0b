"""Record on this machine what `data/` keeps of others: a subcommand each, and with `--help` what it takes.

    python benchmarks/record.py roofline cuda:tf32=off cuda:tf32=on data/measured/rooflines-my-gpu.json
    python benchmarks/record.py speed cuda:tf32=off --write data/measured/speed-my-gpu.json
    python benchmarks/record.py factors cuda --workers 8 --output data/measured/factors-my-gpu.json

`record_NAME.py` in the commands of older records is the subcommand of that name here, with the same arguments.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shlex
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Annotated

import networks
import numpy as np
import pandas as pd
import psutil
import torch
import typer
from measuring import Step, command_line, keep, quartiles, race, run

import companion
import gpulab as gl
from companion.floating_point import factors, step_rows, trained_levels
from companion.learning import FILM, LOSSES_OF_A_FILM, RENDERED, blurred_loss
from companion.workloads import PARTS, Row, measure_speed
from gpulab.data.datasets import load
from gpulab.data.jpeg import compare_decoders
from gpulab.device.operations import byte_round_trip, fused_share, repeatability
from gpulab.device.rooflines import roofline
from gpulab.diagnostics.audits import Audit
from gpulab.errors import UsageError, in_one_line
from gpulab.passports import Passport
from gpulab.progress import Progress
from gpulab.saddles.optimizers import OPTIMIZERS
from gpulab.store import records
from gpulab.store.listing import pack
from gpulab.training.protocol import protocol

app = command_line(__doc__)
Settings = Annotated[list[str], typer.Argument(help="such as cpu:threads=2, cuda:tf32=off")]
File = Annotated[Path, typer.Argument(help="JSON file, such as data/measured/KIND-my-gpu.json")]
Workers = Annotated[int, typer.Option(help="runs at the same time")]


@app.command("roofline")
def record_roofline(settings: Settings, file: File) -> None:
    """The roofline of this machine under the settings given."""
    frame = pd.concat([roofline(setting) for setting in settings], ignore_index=True)
    print(frame[["setting", "operation", "intensity", "gflops", "gigabytes_per_second", "spread"]].to_string())
    keep(file, settings[0].partition(":")[0], rows=frame.to_dict("records"))


@app.command("films")
def record_films(file: File) -> None:
    """The losses that need no network, of each film of recorded runs.

    Rendered and measured here, they are the same: this only saves the minutes that the films of 50,000 frames take.
    """
    runs = [gl.recorded_runs(), companion.longer_runs(), companion.title_runs(), companion.recorded_films()]
    runs += [companion.published_runs(), companion.atlas()]
    rendered = [frame[frame.data.isin(RENDERED)] for frame in runs]
    films = pd.concat(rendered)[[*FILM]].drop_duplicates().sort_values([*FILM])
    rows = [
        dict(zip(FILM, film, strict=True)) | {name: loss(*film) for name, loss in LOSSES_OF_A_FILM.items()}
        for film in Progress([*films.itertuples(index=False, name=None)], unit="film")
    ]
    keep(file, "cpu", rows=rows)


@app.command("blurred")
def record_blurred(file: File, films: list[Path]) -> None:
    """What the last frame, blurred, would lose on the real films of the published network's runs: it takes no motion.

    Over the windows that a final loss is the mean of: the last fifth of 250, of every fifth frame, at 160×120.
    """
    from published import windows

    rows = []
    for film in films:
        before, coming, seen = [], [], []
        for frames, restart in itertools.islice(windows(load(f"video:{film}", None, (120, 160)), 20, every=5), 250):
            whole = frames if restart else np.concatenate([*seen, frames])
            seen = [frames[-1:]]
            before.append(whole[:-1])
            coming.append(whole[1:])
        last, there = (np.concatenate(parts[-50:]) for parts in (before, coming))
        rows.append({"film": film.stem, "loss": blurred_loss(last, there)})
        print(f"{rows[-1]}, repeated {np.square(last - there).mean():.6f}", flush=True)
    keep(file, "cpu", rows=rows)


@app.command("published")
def record_published(
    net: Annotated[Path, typer.Argument(help="the authors' net.py, or its folder")], file: File, profile: str = "paper"
) -> None:
    """The first windows of the published network: a CPU's and a GPU's, frames handed over in each way.

    What is compared was registered in data/README.md; the runs themselves are made by `published.py`.
    """
    from published import Cell, published_windows

    copied, reused = Cell("cpu", "copied"), Cell("cpu", "reused")
    on_gpu = {loader: Cell("cuda", loader) for loader in ("reused", "copied", "shared")}
    pairs = [
        (on_gpu["reused"], on_gpu["copied"]),  # as published on a GPU, against copies there
        (copied, on_gpu["reused"]),  # alike on both
        (reused, on_gpu["shared"]),
        (copied, reused),  # the line, on a CPU and on a GPU
        (on_gpu["reused"], on_gpu["shared"]),
        (on_gpu["reused"], Cell("cuda", "reused", round_trip=False)),
    ]
    table = published_windows(net, pairs, count=3, seed=100, profile=profile, speed=2.0)
    print(table.to_string())
    keep(file, "cuda", rows=table.to_dict("list"))


# --- dose and response -----------------------------------------------------------------------------------

TRAINING = f"{os.path.relpath(Path(__file__).with_name('dose_training.py'))}:bias_and_loss"
CELLS = [{"window": window, "speed": speed} for window, speed in itertools.product((2, 5, 10, 20), (1.0, 2.0, 4.0))]


@app.command("dose")
def record_dose(
    setting: str,
    output: Annotated[Path, typer.Option(help="such as data/studies/dose-my-gpu.parquet")],
    store: Path = Path("runs/dose"),
    size: Annotated[str, typer.Option(help="smoke, quick or paper")] = "quick",
    seeds: int = 8,
    workers: Workers = 1,
    minutes: float = math.inf,
) -> None:
    """Whether the bias of a gradient predicts the loss, over lengths of window and speeds of motion.

    A cell is a length and a speed. In each of the twelve a seed is trained twice: on copied frames, and on shared
    memory. Seeds are done whole, one after the other, until the next would not end within the minutes; what is in the
    store is not made again, so it can be stopped and called again.
    """
    until, longest = time.monotonic() + 60 * minutes, 0.0
    for seed in range(seeds):
        began = time.monotonic()
        if began + longest > until:
            break
        common = {"store": store, "workers": workers, "options": {"size": size}, "variants": CELLS}
        gl.Experiment(TRAINING, [setting], [seed], **common).run()
        pack(store, output)
        longest = max(longest, time.monotonic() - began)
        print(f"seed {seed}: {time.monotonic() - began:.0f} s", flush=True)


# --- audits ----------------------------------------------------------------------------------------------


@app.command("audits")
def record_audits(
    settings: Annotated[list[str], typer.Argument(help="the first against each of the others")],
    output: Path = Path("data"),
    only: Annotated[str, typer.Option(help="networks, separated by commas")] = ",".join(networks.NETWORKS),
    keep_traces: Annotated[str, typer.Option("--keep", help="settings, separated by semicolons")] = "",
    recorded: Annotated[Path | None, typer.Option(help="read NETWORK-SETTING.trace there instead of running")] = None,
) -> None:
    """The audit of the networks of `networks.py` between settings of this machine, and traces of what is to be kept."""
    reference, *others = settings
    rows = []
    for name in only.split(","):
        step = networks.NETWORKS[name]()
        first = gl.record(step, reference, progress=False)
        for setting in others:
            started = time.perf_counter()
            file = re.sub(r"[^\w.]+", "-", f"{name}-{setting}.trace")
            if recorded is None:
                second = gl.record(step, setting, reference=first, progress=False)
            else:
                second = gl.diagnostics.Trace.load(recorded / file)
            row = {"network": name, **summary_of(gl.audit(first, second)), "seconds": time.perf_counter() - started}
            print(json.dumps(row)[:400], flush=True)
            rows.append(row)
            if setting in keep_traces.split(";"):
                second.save(output / "traces" / file)
    kinds = {gl.Setting.parse(setting).kind for setting in settings}
    keep(output / "measured" / "audits-here.json", "cpu" if kinds == {"cpu"} else "cuda", rows=rows)


def summary_of(report: Audit) -> dict[str, object]:
    table = report.table
    return {
        "a": report.a.setting,
        "b": report.b.setting,
        "machine_a": Passport(report.a.passport).summary(),
        "machine_b": Passport(report.b.passport).summary(),
        "operations": len(table),
        "matched": int((table.difference.notna() & table.error_a.notna()).sum()),
        "checked": int(table.ratio_a.notna().sum() + table.ratio_b.notna().sum()),
        "findings": dict(Counter(finding.kind for finding in report.findings)),
        "largest_ratio": float(table[["ratio_a", "ratio_b"]].max().max()),
        "largest_so_far": float(table[["so_far_a", "so_far_b"]].max().max()),
        "worst": [str(finding) for finding in report.findings[:3]],
    }


# --- factors ---------------------------------------------------------------------------------------------


@app.command("factors")
def record_factors(
    file: Annotated[Path, typer.Option("--output", help="JSON file, for all but the runs")],
    store: Annotated[Path, typer.Option(help="folder of the runs")] = Path("runs/factors"),
    net: str = "prednet",
    profile: str = "quick",
    seeds: int = 10,
    frames: Annotated[int | None, typer.Option(help="to train on  [default: the profile's]")] = None,
    workers: Workers = 1,
    kind: Annotated[str, typer.Argument(help="cpu or cuda: where the factors are changed")] = "cpu",
    progress: bool = True,
) -> None:
    """Each factor changed alone, one step and the final loss, as notebook 02 shows it of other machines.

    And how this machine converts, repeats, fuses and decodes.
    """
    here = [factor for factor in factors(net, profile) if factor.kind == kind and factor.runs_here()]
    if not here:
        raise UsageError(f"kind {kind!r}: expected cpu, or cuda on a machine with such a GPU")
    base = here[0].base["setting"]
    settings = (base, "cuda:tf32=off,deterministic=off") if kind == "cuda" else (base, "cpu")
    tables = {
        "conversions": byte_round_trip(kind),
        "repeatability": repeatability(settings),
        "decoders": compare_decoders(next(load("walk", frames=20, size=(48, 64)).windows(20)).frames),
    }
    keep(
        file,
        kind,
        network=net,
        profile=profile,
        frames=protocol(net, profile).frames if frames is None else frames,
        kind=kind,
        recorded=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        steps=step_rows(here, net, profile, progress),
        fused=fused_share(base, 100_000),
        **{name: json.loads(table.to_json(orient="records")) for name, table in tables.items()},
    )
    options = {} if frames is None else {"frames": frames}  # last: an interruption leaves what is quickly done
    trained_levels(here, net, profile, seeds, {"store": store, "workers": workers, "options": options}, progress)


# --- notebook 07 -----------------------------------------------------------------------------------------


@app.command("speed")
def record_speed(
    setting: str,
    write: Annotated[Path, typer.Option(help="JSON file, such as data/measured/speed-my-gpu.json")],
    sizes: Annotated[list[str], typer.Option(help="of smoke, quick and paper; several times")] = ("quick", "paper"),
    parts: Annotated[list[str], typer.Option(help="some sections only; several times")] = PARTS,
    wait: Annotated[float, typer.Option(help="seconds, before each section, for other programs to end")] = 0,
    attempts: Annotated[int, typer.Option(help="at a section that others disturb; the best is kept")] = 1,
    quiet: Annotated[float, typer.Option(help="cores that others may use without another attempt")] = 0.5,
) -> None:
    """Everything that notebook 07 shows, under one setting, and how many cores other programs used meanwhile.

    What this machine lacks is kept as a row that says so.
    """
    frames, others = [], {}
    for size, part in itertools.product(sizes, parts):
        tries: list[tuple[pd.DataFrame, float]] = []
        while len(tries) < attempts and not (tries and tries[-1][1] < quiet):
            patience = time.perf_counter() + wait
            while time.perf_counter() < patience and psutil.cpu_percent(2) * psutil.cpu_count() / 100 > quiet:
                pass
            tries.append(section(part, setting, size))
        rows, others[f"{size} {part}"] = min(tries, key=lambda one: one[1])
        frames.append(rows)
        print(f"{size} {part}: {len(rows)} rows; others used {others[f'{size} {part}']:.1f} cores", flush=True)
        table = (
            pd.concat(frames, ignore_index=True).drop(columns=["machine", "recorded"], errors="ignore").astype(object)
        )
        found = table.where(table.notna(), None).to_dict("records")
        keep(write, setting.partition(":")[0], cores_of_others=others, rows=found)  # so far, if it is cut off


def section(part: str, setting: str, size: str) -> tuple[pd.DataFrame, float]:
    """The rows of a section, and how many cores other programs used meanwhile."""

    def used() -> np.ndarray:
        all_cores, me = psutil.cpu_times(), psutil.Process()
        mine = [*me.cpu_times()[:2], *(t for child in me.children(True) for t in child.cpu_times()[:2])]
        busy = sum(all_cores) - all_cores.idle - getattr(all_cores, "iowait", 0.0)
        return np.array([busy - sum(mine), time.perf_counter()])

    before = used()
    try:
        rows = measure_speed(part, [setting], size)
    except Exception as error:  # of one section, which says so: the others are worth having
        why = Row(part, note=f"failed: {in_one_line(error)[:200]}")._asdict()
        rows = pd.DataFrame([{"part": part, **why, "size": size, "setting": setting}])
    of_others, seconds = used() - before
    return rows, max(0.0, of_others / seconds)


# --- the price of a precision ----------------------------------------------------------------------------

# One pass in TF32 is left out: it makes NaN, and a factorisation that fails may be done sooner.
WAYS = (("cuda:tf32=off", "one-pass"), ("cuda:tf32=on", "float32"), ("cuda:tf32=on", "centred"))


def whitener_steps(setting: str, covariance: str, count: int, hidden: int, code: int, batch_size: int) -> Step:
    """So many updates of one network on one batch of images, under one setting; the last loss is returned."""
    applied = gl.Setting.parse(setting)
    net = gl.models.Whitener(hidden, code, batch_size, covariance).to(applied.device)
    optimizer = torch.optim.Adam(net.parameters(), 0.0)  # no way learns more than another
    images = torch.from_numpy(next(gl.load("digits").windows(batch_size)).frames).float().div(255).to(applied.device)

    def step() -> torch.Tensor:
        with applied.apply():
            for _ in range(count):
                optimizer.zero_grad()
                loss = net.training_loss(images, None)[0]
                loss.backward()
                optimizer.step()
        return loss.detach()

    return step


@app.command("precision_price")
def record_precision_price(
    output: Path,
    setting: Annotated[list[str], typer.Option(help="instead of float32 and TF32 on a GPU")] = (),
    hidden: int = 8192,
    code: int = 512,
    batch_size: int = 16384,
    rounds: Annotated[int, typer.Option(help="each way is timed once a round")] = 25,
    steps: Annotated[int, typer.Option(help="steps that are timed together")] = 4,
) -> None:
    """A step of a large whitened autoencoder in float32, in TF32, and in TF32 with one product kept in float32."""
    names = list(itertools.product(setting, ("one-pass", "float32", "centred"))) if setting else list(WAYS)
    device = gl.Setting.parse(names[0][0])
    made = {name: partial(whitener_steps, *name, steps, hidden, code, batch_size) for name in names}
    rows = []
    for name, way in race(made, device, rounds, warm_up=1).items():
        if not way.step().isfinite():
            raise gl.GpulabError(f"the loss of {name} is not finite: NaN may take another time than numbers")
        low, middle, high = (1000 * seconds / steps for seconds in quartiles(way.seconds))
        row = {"setting": name[0], "covariance": name[1], "ms": middle, "ms_low": low, "ms_high": high}
        rows.append(row | {"rounds": rounds, "batch_size": batch_size})
        print(json.dumps(rows[-1]))
    keep(output, device.kind, hidden=hidden, code=code, steps=steps, rows=rows)


# --- saddles ---------------------------------------------------------------------------------------------

# The most wanted first: network, profile, options of gpulab.saddles.curvature_along.
CURVATURE = [
    ("autoencoder", "quick", {}),
    ("prednet", "quick", {}),
    ("prednet", "paper", {"snapshots": 4, "steps": 40}),
    ("autoencoder", "paper", {}),
]
ALONG = {
    "cuda": ["cuda:tf32=off", "cuda:tf32=on"],
    "cpu": ["cpu", "cpu:precision=float64", "cpu:emulate=tf32", "cpu:threads=1"],
}
ESCAPES = {
    "cuda": ["cuda:precision=float64", "cuda:tf32=off", "cuda:tf32=on", "cuda:cudnn=off", "cuda:precision=bfloat16"],
    "cpu": ["cpu:precision=float64", "cpu", "cpu:precision=bfloat16"],
}
# The arithmetic in which optimisers are let go: notebook 06 draws them beside its own.
ONE_THREAD = ["", ",precision=float64", ",precision=bfloat16", ",emulate=tf32", ",emulate=bfloat16"]
ARITHMETIC = {
    "cuda": ["cuda:precision=float64", "cuda:tf32=off", "cuda:tf32=on", "cuda:precision=bfloat16"],
    "cpu": [f"cpu:threads=1{more}" for more in ONE_THREAD],
}
LARGE_EPSILON = partial(torch.optim.Adam, eps=1e-4, foreach=False)
RATES = {
    "sgd": [8.0, 16.0, None],
    "momentum": [2.0, 4.0, 8.0, 16.0, None],
    "rmsprop": [1e-5, 1e-4, 3e-4, 1e-3, 1e-2],
    "adam": [1e-5, 1e-4, 3e-4, 1e-3, 1e-2],
    LARGE_EPSILON: [1e-3, 1e-2],
}


@app.command("saddles")
def record_saddles(
    kind: Annotated[str, typer.Argument(help="cpu or cuda: the device that trains")],
    output: Path = Path("data/saddles"),
    seeds: int = 8,
    minutes: float = 9,
    part: Annotated[str, typer.Option(help="which part of the seeds, of how many: 0/3, 1/3, …")] = "0/1",
    only: Annotated[str, typer.Option(help="such as prednet:paper,autoencoder:quick; or escapes")] = "",
) -> None:
    """The Hessian's spectrum along trainings, and escapes from a known saddle by each optimiser.

    What is there already is not made again, so it can be stopped and called again; it stops by itself when the next
    training would not end within the minutes. The escapes, in four files, take about ten minutes.
    """
    until = time.perf_counter() + 60 * minutes
    if kind not in ALONG:
        raise UsageError(f"kind {kind!r}: expected cpu or cuda")
    gl.Setting.parse(ALONG[kind][0]).check()
    first, parts = map(int, part.split("/"))
    if first == 0:
        name = "-".join(records.machine(gl.passport(), kind).lower().split())
        record_escapes(output / "escapes", name, kind)
    for net, profile, options in CURVATURE:
        longest = 0.0
        wanted = not only or f"{net}:{profile}" in only.split(",")
        for seed, setting in itertools.product(range(first, seeds, parts) if wanted else (), ALONG[kind]):
            started = time.perf_counter()
            if started + longest > until:
                print(f"{net} {profile} stops before seed {seed} under {setting}: call again for the rest")
                return
            own = {"setting": setting, "seeds": [seed], "profile": profile, "store": output / "curvature"}
            frame = gl.saddles.curvature_along(net, **own, **options, command=this_command(), progress=False)
            longest = max(longest, took := time.perf_counter() - started)
            last = frame.iloc[-1]
            print(
                f"{net} {profile} {setting} seed {seed}: {took:.1f} s, {last.status}, loss {last.loss:.4g}, "
                f"index {last.index_fraction:.2e}, λ from {last.smallest:.3g} to {last.largest:.3g}",
                flush=True,
            )


def record_escapes(folder: Path, name: str, kind: str) -> None:
    """Gradient descent pushed off and let go, and all optimisers let go, with weights in float64, with minibatches."""
    batches = {"optimizers": {"sgd": [1.0], "adam": [1e-3]}, "batch_sizes": [20], "steps": 5_000}
    jobs = {
        name: (ESCAPES[kind], {"perturbations": (0.0, 1e-2, 1e-3, 1e-4, 1e-6, 1e-8)}),
        f"{name}-optimizers": (ARITHMETIC[kind], {"optimizers": RATES}),
        f"{name}-master-weights": (ARITHMETIC[kind], {"optimizers": list(OPTIMIZERS), "master_weights": True}),
        f"{name}-minibatches": (ARITHMETIC[kind], batches),
    }
    for title, (settings, options) in jobs.items():
        if (file := folder / f"{title}.parquet").is_file():
            continue
        started = time.perf_counter()
        table = gl.saddles.escape_table(known_saddle(), settings, seeds=3, **options).table
        records.write_table(file, table, {"passport": dict(gl.passport()), "command": this_command()})
        print(f"{title}: {len(table)} escapes in {time.perf_counter() - started:.0f} s", flush=True)


def this_command() -> str:
    return shlex.join(["python", *sys.argv])


def known_saddle() -> gl.saddles.LinearAutoencoderSaddle:
    """Digits of 7×7 pixels, of which components 0 and 2 are held: the way out is component 1."""
    images = torch.from_numpy(gl.load("digits").train[:500]).double() / 255
    pixels = torch.nn.functional.avg_pool2d(images, 4).flatten(1)
    return gl.saddles.linear_autoencoder_saddle(pixels - pixels.mean(0), [0, 2])


if __name__ == "__main__":
    run(app)
