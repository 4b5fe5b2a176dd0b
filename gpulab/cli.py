"""The command line: `gpulab devices | train | experiment | reproduce | verdict | runs | check | pack | …`."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Annotated, Any

import typer
import typer.core

from gpulab import __version__, files, signals
from gpulab.errors import GpulabError, UsageError, extra, in_one_line
from gpulab.settings import Setting
from gpulab.training.protocol import OPTIONS, Specification, whole_numbers


class _Commands(typer.core.TyperGroup):
    """Saves what was done when Ctrl-C comes, and says how to go on."""

    def invoke(self, ctx: Any) -> Any:
        with signals.Raising("gpulab: interrupted; run the same command again to go on"):
            return super().invoke(ctx)


app = typer.Typer(
    cls=_Commands,
    help="Does the device change what a neural network learns? Train, compare and see.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        _say(f"gpulab {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="print the version and exit")
    ] = False,
) -> None:
    """What comes before any command."""


STEP_HELP = "module:name or file.py:name of a gpulab.Step or a function of one step"
SETTING_HELP = "such as cpu, cpu:threads=1, cuda:tf32=off,cudnn=off"
MARGIN_HELP = "largest difference of no importance, such as 0.25sd or 0.001; for yes and no a share, such as 0.1"
PICTURE_HELP = "draw every run and difference into this PNG file"
STORE_HELP = "folder in which runs are kept, s3://…, or a file of packed runs"
USUAL_STORE = "$GPULAB_STORE or ./runs"

SettingText = Annotated[str, typer.Option(help=SETTING_HELP)]
Training = Annotated[str, typer.Argument(help="file.py:name, a training of your own; autoencoder, prednet, whitener")]
Profile = Annotated[
    str,
    typer.Option(
        help="smoke (seconds), quick (a laptop) or paper (as published), for prednet also motion; not of a function"
    ),
]
Store = Annotated[Path | None, typer.Option(help=STORE_HELP, show_default=USUAL_STORE)]
StoreArgument = Annotated[Path | None, typer.Argument(help=STORE_HELP, show_default=USUAL_STORE)]
StoreOption = Annotated[Path | None, typer.Option("--store", help="the same, as an option", show_default=False)]
Fresh = Annotated[bool, typer.Option("--fresh", help="ignore a checkpoint or an earlier run")]
CheckpointSeconds = Annotated[
    float | None, typer.Option(min=0, help="time between checkpoints, of gpulab's own networks", show_default="10")
]
Guard = Annotated[
    bool, typer.Option("--guard", help="end with an error if something is overwritten before backward uses it")
]
Registered = Annotated[
    Path | None,
    typer.Option(
        help="a file that lays down question, endpoint, margin, seeds, stopping; its digest is kept with each run"
    ),
]


MOST_DRAWN = 500  # rows with lines around them, which take time; more are aligned only

NESTED = {"option": ("model or function", "width=64"), "data_option": ("data", "seed=3")}  # several times: name=value


def _run_options(command: Callable[..., None]) -> Callable[..., None]:
    """A command that takes every option of a run, in `options`, as `gpulab.training.protocol.OPTIONS` lists them."""

    def parameter(name: str, kind: Any, default: Any, **words: Any) -> inspect.Parameter:
        flag = f"--{name.replace('_', '-')}"
        annotation = Annotated[kind, typer.Option(f"{flag}/--no-{flag[2:]}" if default is True else flag, **words)]
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)

    own = inspect.signature(command, eval_str=True).parameters
    parameters = [own[name] for name in own if name != "options"]
    for name, option in OPTIONS.items():
        if option.flag:
            kind, default = (bool, bool(option.usual)) if option.kind is bool else (option.kind | None, option.usual)
            parameters.append(parameter(name, kind, default, help=option.help, show_default=option.default or True))
    for name, (what, example) in NESTED.items():
        words = f"an option of the {what}, such as {example}; several times"
        parameters.append(parameter(name, list[str], [], help=words))

    def with_options(**given: Any) -> None:
        flat = {name: given.pop(name) for name in OPTIONS if name in given}
        flags = {name: f"--{name.replace('_', '-')}" for name in NESTED}
        model, data = ({n: _value(t) for n, t in _pairs(given.pop(name), flags[name], "name=value")} for name in NESTED)
        if ":" in given["model"]:
            if data:
                raise UsageError(f"--data-option {next(iter(data))}: a function takes what it has as --option")
            said = {n: v for n, v in flat.items() if not OPTIONS[n].says_nothing(v)}
            options = {name: OPTIONS[name].parse(value) for name, value in said.items()} | model
        else:
            options = dict(Specification.from_options(given["model"], given["profile"], flat).options)
            options["model_options"] |= model
            options["data_options"] |= data
        command(**given, options={name: value for name, value in options.items() if value != {}})

    with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_options.__name__, with_options.__doc__ = command.__name__, command.__doc__
    return with_options


@app.command()
def devices(as_json: Annotated[bool, typer.Option("--json", help="print the passport as JSON")] = False) -> None:
    """Show this machine's passport and the settings that it can run."""
    from gpulab.passports import passport
    from gpulab.settings import available_settings

    here = passport()
    if as_json:
        _say(here.to_json())
        return
    _table("This machine", ["", ""], here.rows())
    _say("Settings that run here: " + "  ".join(available_settings()))


@app.command()
@_run_options
def train(
    model: Training,
    options: dict[str, Any],
    setting: SettingText = "cpu",
    seed: Annotated[int, typer.Option(min=0, help="draws the initial weights and the order of images")] = 0,
    profile: Profile = "quick",
    rerun: Annotated[int, typer.Option(min=0, help="numbers repetitions of the same run")] = 0,
    store: Store = None,
    fresh: Fresh = False,
    checkpoint_seconds: CheckpointSeconds = None,
    picture: Annotated[Path | None, typer.Option(help="write what the trained network makes to this PNG file")] = None,
    guard: Guard = False,
    registered: Registered = None,
) -> None:
    """Train once, from one seed under one setting. A network of gpulab's that is interrupted resumes when run again."""
    _check_outputs(picture)
    Setting.parse(setting).prepare()
    from gpulab.training import store as stores
    from gpulab.training.run import train as train_one

    if ":" in model:
        if picture:
            raise UsageError("--picture draws what gpulab's own networks make")
        arguments: dict[str, Any] = {"net": model, "setting": setting, "seed": seed, "rerun": rerun}
        arguments["model_options"] = options
    else:
        arguments = Specification(model, setting, seed, profile, rerun, options).arguments()
    how = _how(fresh, checkpoint_seconds, guard, registered)
    run = train_one(**arguments, store=store or stores.default_store(), **how)
    if not run.path:  # of several processes the first keeps the run, and tells of it
        return
    _say(run)
    _say(f"kept in {run.path}")
    if picture:
        from gpulab import plots

        plots.sample(run).save(picture)
        _say(f"picture in {picture}")


def _how(fresh: bool, checkpoint_seconds: float | None, guard: bool, registered: Path | None = None) -> dict[str, Any]:
    """How a run is done, in arguments of `gpulab.train`: those that were asked for."""
    asked: dict[str, Any] = {"resume": False if fresh else None, "checkpoint_seconds": checkpoint_seconds}
    asked |= {"guard": guard or None, "registered": str(registered) if registered else None}
    return {name: value for name, value in asked.items() if value is not None}


@app.command()
@_run_options
def experiment(
    ctx: typer.Context,
    model: Training,
    options: dict[str, Any],
    setting: Annotated[list[str], typer.Option(help=SETTING_HELP + "; give it several times")],
    seeds: Annotated[
        str | None, typer.Option(help="how many (10), or which (0,1,7)", show_default="the profile's, or 10")
    ] = None,
    profile: Profile = "quick",
    reruns: Annotated[int, typer.Option(min=1, help="how often each seed and setting is run")] = 1,
    workers: Annotated[
        int,
        typer.Option(
            min=1, help="processes that train at the same time; with 1, up to 16 small networks share a CUDA GPU in one"
        ),
    ] = 1,
    metric: Annotated[str | None, typer.Option(help="of the verdict", show_default="final_loss, or the first")] = None,
    store: Store = None,
    fresh: Fresh = False,
    checkpoint_seconds: CheckpointSeconds = None,
    picture: Annotated[Path | None, typer.Option(help=PICTURE_HELP)] = None,
    guard: Guard = False,
    registered: Registered = None,
    engine: Annotated[str, typer.Option(help="local, ray (a cluster), or slurm, which prints a job array")] = "local",
    address: Annotated[
        str | None, typer.Option(help="of the Ray cluster", show_default="$RAY_ADDRESS or a local")
    ] = None,
    cpus: Annotated[
        float | None, typer.Option(help="of each run on a cluster", show_default="its threads, or 1")
    ] = None,
    gpus: Annotated[float | None, typer.Option(help="of each run on a cluster, such as 0.25", show_default="1")] = None,
    tasks: Annotated[int, typer.Option(min=1, help="of the job array")] = 16,
    share: Annotated[str | None, typer.Option(help="K/N does every N-th run from the K-th on, for one task")] = None,
) -> None:
    """Train seeds × settings in worker processes, here or on a cluster. What is done already is skipped."""
    _check_outputs(picture)
    from gpulab.stats.verdicts import verdict as compare
    from gpulab.training import store as stores
    from gpulab.training.experiment import Experiment

    numbers = whole_numbers(seeds, name="--seeds") if seeds else None
    chosen = numbers[0] if numbers and "," not in str(seeds) else numbers
    anew, how = {"fresh": fresh, "guard": guard}, _how(fresh, checkpoint_seconds, guard, registered)
    exp = Experiment(model, setting, chosen, profile, store, reruns, workers, options, how=how)
    if engine == "slurm":
        from gpulab.training.cluster import slurm_script
        from gpulab.training.plan import planned

        if share or address:
            raise UsageError("--share and --address go with other engines: each task of the array has its own share")
        jobs = exp.jobs()
        for job in {job["setting"]: job for job in jobs}.values():
            planned(**job)  # which refuses what makes no sense, here and not in every task
        command = _again(ctx, {"engine", "address", "cpus", "gpus", "tasks", "share", "store", "picture"})
        place = exp.folder if exp.remote else exp.folder.absolute()
        devices = max(job.get("devices") or 1 for job in jobs)
        script = [*command, "--store", str(place)]
        _say(slurm_script(script, min(tasks, len(jobs)), [*exp.settings], cpus, gpus, devices, workers))
        return
    k, n = whole_numbers(share, "/", 2, "--share") if share else (0, 1)
    frame = exp.run(engine=engine, address=address, cpus=cpus, gpus=gpus, share=(k, n))
    _show(frame)
    if share:
        without = " and ".join(["--share", *(f"--{name}" for name, asked in anew.items() if asked)])
        _say(f"share {share} is done; without {without} the same command compares all runs")
        return
    metrics = [*dict.fromkeys(name for run in frame.itertuples() for name in stores.metrics_of(run))]
    usual = "final_loss" if "final_loss" in metrics or not metrics else metrics[0]
    if metric and metrics and metric not in metrics:
        raise UsageError(f"--metric {metric!r}: the runs have {', '.join(metrics)}")
    answer = compare(frame, metric or usual)
    _say(answer)
    _draw(answer, picture)


def _again(ctx: typer.Context, without: set[str]) -> list[str]:
    """The command line as it was given, without some of its options."""
    words = ["gpulab", str(ctx.info_name)]
    for parameter in ctx.command.params:
        name, value = str(parameter.name), ctx.params[str(parameter.name)]
        source = ctx.get_parameter_source(name)
        if name in without or source is None or source.name != "COMMANDLINE":
            continue
        if parameter.param_type_name == "argument":
            words.append(str(value))
        elif isinstance(value, bool):
            words.append(parameter.opts[0] if value else parameter.secondary_opts[0])
        else:
            for each in value if isinstance(value, list | tuple) else [value]:
                words += [parameter.opts[0], str(each)]
    return words


@app.command()
def reproduce(
    model: Training,
    target: Annotated[str, typer.Option(help="the old setting, whose runs are in the store")],
    setting: Annotated[str, typer.Option(help="the new setting, " + SETTING_HELP)],
    search: Annotated[
        list[str],
        typer.Option(
            help="what may change: learning_rate=0.0003,0.003 or 0.0001..0.01, tf32=off; give it several times"
        ),
    ],
    profile: Profile = "quick",
    metric: Annotated[str, typer.Option(help="final_loss, heldout_loss, or what a function gives")] = "final_loss",
    margin: Annotated[str, typer.Option(help=MARGIN_HELP)] = "0.25sd",
    trials: Annotated[int, typer.Option(min=1, help="changes to try at most")] = 30,
    workers: Annotated[int, typer.Option(min=1, help="runs at the same time")] = 1,
    store: Store = None,
    csv: Annotated[bool, typer.Option("--csv", help="print the table of trials as CSV")] = False,
    picture: Annotated[Path | None, typer.Option(help="draw distance against difference into this PNG file")] = None,
) -> None:
    """Find the smallest change that gives the old setting's losses under the new one. Exit status 1 when none does.

    The runs of the old setting come from the store; `gpulab experiment` makes them. Killed, the search
    goes on when it is run again.
    """
    _check_outputs(picture)
    from gpulab.search.reproduction import reproduce as find
    from gpulab.training import store as stores
    from gpulab.training.functions import TrainingFunction

    space = _space(search)
    size = margin if margin.strip().endswith("sd") else _numbers(margin, "--margin")[0]
    folder = store or stores.default_store()
    frame = stores.runs(folder)
    old_setting, name, train = str(Setting.parse(target)), model, model if ":" in model else None
    if train:
        name, profile = TrainingFunction(model).name, TrainingFunction.profile
    old = frame[(frame.experiment == name) & (frame.profile == profile) & (frame.setting == old_setting)]
    if old.empty:
        raise UsageError(
            f"no runs of {model} under {old_setting} with profile {profile} in {folder}; make them with "
            f"`gpulab experiment {model} --setting {old_setting}{'' if train else f' --profile {profile}'} --seeds 20`"
        )
    found = find(old, space, setting, train, metric=metric, margin=size, trials=trials, workers=workers, store=folder)
    if csv:
        _say_csv(found.table)
    else:
        columns = ["changes", "distance", "state", "decision", "seeds", "diverged", "difference", "confirmed"]
        _rows(f"{len(found.table)} trials", found.table, columns)
        _say(found)
    if picture:
        found.plot().save(picture)
        _say(f"picture in {picture}", sys.stderr)
    if not found.confirmed:
        raise typer.Exit(1)


@app.command()
def verdict(
    file: Annotated[Path, typer.Argument(help="a .csv, .tsv or .parquet, a store, or packed runs", show_default=False)],
    metric: Annotated[str, typer.Option(help="the column that is compared: numbers, or true and false")] = "final_loss",
    factor: Annotated[str, typer.Option(help="the column whose levels are compared")] = "setting",
    block: Annotated[str, typer.Option(help="the column of what they are compared on")] = "seed",
    reference: Annotated[str | None, typer.Option(help="a level", show_default="cpu, or else the first")] = None,
    margin: Annotated[str | None, typer.Option(help=MARGIN_HELP, show_default="0.25sd, or 0.1")] = None,
    alpha: Annotated[float, typer.Option(help="the level of significance")] = 0.05,
    where: Annotated[list[str], typer.Option(help="take only these rows: column=value; several times")] = [],  # noqa: B006
    picture: Annotated[Path | None, typer.Option(help=PICTURE_HELP)] = None,
) -> None:
    """Say whether the levels of a factor differ, from a table of runs made anywhere: a row per run.

    Exports of Weights & Biases and MLflow are read as they are: `--metric loss` finds `metrics.loss`, `--block seed`
    finds `params.seed`. A run that finished with NaN or infinity diverged, which is counted. One that crashed, failed,
    was killed or still runs has no known result: it is left out, which is said.
    """
    _check_outputs(picture)
    from gpulab.stats.verdicts import verdict as compare

    frame = _read_runs(file, metric)
    frame = _rows_where(frame, where)
    size = margin if margin is None or margin.strip().endswith("sd") else _numbers(margin, "--margin")[0]
    answer = compare(frame, metric, factor, block, size, alpha, reference)
    _say(answer)
    _draw(answer, picture)


@app.command()
def runs(
    store: StoreArgument = None,
    kept_in: StoreOption = None,
    recorded: Annotated[bool, typer.Option("--recorded", help="the runs shipped with gpulab")] = False,
    where: Annotated[list[str], typer.Option(help="only these: column=value; several times")] = [],  # noqa: B006
    csv: Annotated[bool, typer.Option("--csv", help="print all columns as CSV")] = False,
) -> None:
    """List the runs in a store."""
    from gpulab.training import store as stores
    from gpulab.training.remote import url_of

    folder = _either(store, kept_in) or stores.default_store()
    if not recorded and not url_of(folder) and not folder.exists():
        raise GpulabError(f"{folder}: no such folder; `gpulab train` and `gpulab experiment` make one")
    frame = stores.recorded_runs() if recorded else stores.runs(folder)
    frame = _rows_where(frame, where)
    if csv:
        _say_csv(frame)
    elif frame.empty:
        _say(f"no runs in {folder}")
    else:
        _show(frame)


@app.command()
def check(
    store: StoreArgument = None,
    kept_in: StoreOption = None,
    look: Annotated[bool, typer.Option("--look", help="look only, and mend nothing")] = False,
) -> None:
    """Read and verify everything in a store, and mend it. Exit status 1 where something was damaged.

    Damaged runs are set aside, in `.damaged` inside the store, so that the next `gpulab experiment` does them again.
    What killed processes left half-written is removed.
    """
    from gpulab.training import checks

    found = checks.check(_either(store, kept_in), mend=not look)
    for row in found.itertuples():
        _say(f"{row.path}: {row.problem}: {row.remedy}")
    freed = found.megabytes[found.remedy == checks.REMOVED].sum()
    aside = int((found.remedy == checks.SET_ASIDE).sum())
    would = "would be " if look else ""
    _say(f"whole: {found.attrs['runs']}; {would}set aside: {aside}; {would}freed: {freed:.3g} MB")
    if aside:
        raise typer.Exit(1)


@app.command()
def pack(
    store: Annotated[Path, typer.Argument(help=STORE_HELP, show_default=False)],
    file: Annotated[Path, typer.Argument(help="the file to write, such as my-runs.parquet", show_default=False)],
    where: Annotated[list[str], typer.Option(help="only these: column=value; several times")] = [],  # noqa: B006
    share: Annotated[
        bool, typer.Option("--share", help="for others' atlases: nothing private in it, and shown before it is written")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="share without asking")] = False,
) -> None:
    """Pack runs of a store, without weights, into one file for others: `gpulab runs FILE` reads it."""
    from gpulab.training import sharing
    from gpulab.training import store as stores

    _check_outputs(file)
    frame = _rows_where(stores.runs(store), where)
    if frame.empty:
        raise GpulabError(f"{store}: no runs to pack")
    if share:
        chosen = sharing.shared_runs(frame)
        _say(chosen)
        if yes and (names := chosen.private()):
            raise UsageError(f"{', '.join(names)} occurs in it: look, and say so without --yes")
        if chosen.runs and not yes:
            typer.confirm(f"Write this to {file}?", abort=True)
        _say(f"SHA-256 {chosen.save(file)}")
    count = len(chosen.runs) if share else stores.pack(frame, file)
    _say(f"{count} runs packed into {file}, {file.stat().st_size / 1e6:.2g} MB")


@app.command()
def merge(
    file: Annotated[Path, typer.Argument(help="what `gpulab pack --share` wrote", show_default=False)],
    store: Annotated[
        Path | None, typer.Option(help="the folder to add to", show_default="$GPULAB_ATLAS, data/atlas or ./atlas")
    ] = None,
) -> None:
    """Check a file of shared runs and add them to an atlas, all or none. Exit status 2 where it is refused."""
    from gpulab.errors import DataError
    from gpulab.training import sharing

    folder = store or sharing.atlas_folder()
    try:
        _say(f"{sharing.merge(file, folder)} runs added to {folder}")
    except DataError as error:
        raise UsageError(f"refused: {error}") from None


@app.command()
def record(
    step: Annotated[str, typer.Argument(help=STEP_HELP)],
    setting: SettingText = "cpu",
    output: Annotated[Path | None, typer.Option(help="trace file", show_default="NAME-SETTING.trace")] = None,
) -> None:
    """Record what every operation of a training step computes, to be compared with another machine's."""
    Setting.parse(setting).prepare()
    import re

    from gpulab.diagnostics import steps, traces

    file = output or Path(re.sub(r"[^\w.]+", "-", f"{step.rpartition(':')[2]}-{setting}") + ".trace")
    _check_outputs(file)
    trace = traces.record(steps.find_step(step), setting, file)
    _say(f"{trace}\nkept in {file}")


@app.command()
def audit(
    a: Annotated[str, typer.Argument(help="a trace from `gpulab record`; or a step, " + STEP_HELP, show_default=False)],
    b: Annotated[str | None, typer.Argument(help="another trace of the same step", show_default=False)] = None,
    setting: Annotated[list[str] | None, typer.Option(help="of a step: the two to compare, " + SETTING_HELP)] = None,
    confirm: Annotated[
        bool, typer.Option("--confirm", help="do a step again with each line that was found put right")
    ] = False,
    html: Annotated[Path | None, typer.Option(help="write the whole report to this HTML file")] = None,
) -> None:
    """Compare two traces, or a step under two settings: what differs, by how much, why. Exit status 1 if wrong."""
    _check_outputs(html)
    for text in setting or ():
        Setting.parse(text).prepare()
    from gpulab.diagnostics import audits, steps
    from gpulab.records import shipped

    if (b is None) == (len(setting or ()) != 2):
        raise UsageError("expected two traces, or a step with --setting twice")
    if b is None:
        report = audits.audit(steps.find_step(a), *(setting or ()), confirm=confirm)
    else:
        report = audits.audit(shipped(a), shipped(b), confirm=confirm)
    _say(report)
    if html:
        report.save(html)
        _say(f"report in {html}")
    if report.faulty:
        raise typer.Exit(1)


@app.command()
def companion(
    profile: Profile = "quick",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, mps or xpu")] = "auto",
    only: Annotated[str | None, typer.Option(help="notebooks whose names begin so, such as 04 or 03,04")] = None,
    output: Annotated[Path, typer.Option(help="folder for the executed notebooks and the report")] = Path("build"),
    notebooks: Annotated[Path, typer.Option(help="folder of the notebooks")] = Path("notebooks"),
    store: Annotated[
        Path | None, typer.Option(help="folder in which runs are kept", show_default="OUTPUT/runs")
    ] = None,
    in_place: Annotated[
        bool, typer.Option("--in-place", help="execute the notebooks themselves, to commit them")
    ] = False,
) -> None:
    """Execute the notebooks and bind them into one report. Exit status 1 when one of them failed."""
    from gpulab.companion import run as binding

    if in_place:
        for file in binding.execute_in_place(notebooks, only):
            _say(f"executed: {file}")
        return
    results = binding.execute(notebooks, output, profile, device, only, store)
    report = binding.write_report(results, output, profile)
    failed = [result.name for result in results if result.error]
    for name in failed:
        _say(f"failed: {name}", sys.stderr)
    _say(f"report: {report}")
    if failed:
        raise typer.Exit(1)


@app.command()
def explore(
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 for any that is free")] = 8866,
    host: Annotated[str, typer.Option(help="the address to listen on; others can reach 0.0.0.0")] = "127.0.0.1",
    token: Annotated[str | None, typer.Option(help="what lets in", show_default="a new one each time")] = None,
    pages: Annotated[
        int | None, typer.Option(min=1, help="open at the same time", show_default="what the free memory holds")
    ] = None,
    no_open: Annotated[bool, typer.Option("--no-open", help="leave the browser alone")] = False,
) -> None:
    """Serve pages without code, to be explored in a browser: bits, a saddle, trainings, verdicts, audits."""
    with extra("notebooks"):
        from gpulab.companion import explore as exploring
    exploring.serve(host, port, token, pages, not no_open, lambda address: _say(f"{address}\nCtrl-C ends it."))


def main() -> None:
    """Run the command line; an error of gpulab's own is one line, and the exit status says which."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed, as by `>&-`
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    with contextlib.suppress(AttributeError):  # where a terminal has no ×
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    warnings.formatwarning = lambda message, *_, **__: files.printable(f"gpulab: {message}\n")
    try:
        try:
            app()
        finally:
            for stream in (sys.stderr, sys.stdout):
                with _output(stream):
                    stream.flush()
    except GpulabError as error:
        _say(f"gpulab: {error}", sys.stderr)
        sys.exit(2 if isinstance(error, UsageError) else 1)
    except OSError as error:
        why = files.WHY.get(error.errno or 0, error.strerror)
        _say(f"gpulab: {error.filename}: {why}" if error.filename else f"gpulab: {in_one_line(error)}", sys.stderr)
        sys.exit(1)


@contextlib.contextmanager
def _output(stream: IO[str]) -> Iterator[None]:
    """A disk that is full is met once: not again when Python ends. A command that nobody reads goes on to its end."""
    try:
        with files.writing("standard output"):
            yield
    except BrokenPipeError:  # `gpulab runs | head`
        files.write_nowhere(stream)
    except GpulabError:
        files.write_nowhere(stream)
        if stream is not sys.stderr:  # else the exit status would be that of what was to be said
            raise


def _say(text: object, to: Any = None) -> None:
    """Print a text, whatever is in it: it may come from a file of a stranger's."""
    with _output(to or sys.stdout):
        print(files.printable(str(text)), file=to)


def _draw(result: Any, file: Path | None) -> None:
    if file:
        result.plot().save(file)
        _say(f"picture in {file}")


def _say_csv(frame: Any) -> None:
    _say(frame.to_csv(index=False, lineterminator="\n").removesuffix("\n"))


def _check_outputs(*names: Path | None) -> None:
    """Raise `GpulabError` before any work for a file that could not be written after it."""
    import logging

    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # without a home its cache goes elsewhere, and that is well
    for file in filter(None, names):
        files.check_writable(file)


def _either(argument: Path | None, option: Path | None) -> Path | None:
    """A store that is named in one of two ways."""
    if argument and option:
        raise UsageError(f"{argument} and --store {option}: expected one store")
    return argument or option


def _pairs(options: list[str], flag: str, expected: str) -> Iterator[tuple[str, str]]:
    """The names and the texts of options written `name=text`, each name once."""
    seen = set()
    for option in options:
        name, equals, text = option.partition("=")
        if not (equals and name and text) or name in seen:
            raise UsageError(f"{flag} {option!r}: expected {expected}, each name once")
        seen.add(name)
        yield name, text


def _rows_where(frame: Any, where: list[str]) -> Any:
    """The rows of runs that `--where` asks for."""
    from gpulab.stats.pairs import find_column

    for name, text in _pairs(where, "--where", "column=value"):
        frame = frame[frame[find_column(frame.columns, name)].astype(str) == text]
    return frame


def _space(options: list[str]) -> dict[str, Any]:
    """What `--search` says: lists of values, or ranges."""
    return {
        name: tuple(_numbers(text.replace("..", ","), "--search")) if ".." in text else [*map(_value, text.split(","))]
        for name, text in _pairs(options, "--search", "name=value,value or name=low..high")
    }


def _value(text: str) -> Any:
    """A number, a list of them, true or false; or else a word."""
    for read in (int, float, json.loads):
        with contextlib.suppress(ValueError):
            return read(text)
    return text


def _numbers(text: str, option: str) -> list[float]:
    numbers = [_value(part) for part in text.split(",")]
    if any(isinstance(number, str) for number in numbers):
        raise UsageError(f"{option} {text!r}: expected numbers")
    return numbers


def _read_runs(file: Path, metric: str) -> Any:
    """The runs in a store or a file of packed ones, or a table from elsewhere."""
    from gpulab import records
    from gpulab.errors import DataError
    from gpulab.stats.tables import read_table
    from gpulab.training import store as stores

    if not file.exists():
        raise DataError(f"{file}: no such file")
    with contextlib.suppress(DataError):
        if file.is_dir() or (file.suffix == ".parquet" and records.packed_runs(file)):
            return stores.runs(file)
    return read_table(file, metric)


def _show(frame: Any) -> None:
    from gpulab.training import store as stores
    from gpulab.training.protocol import FACTORS

    columns = ["experiment", "profile", "setting", "seed", "status", "final_loss", "heldout_loss", "seconds", "machine"]
    columns[4:4] = [name for name in ("rerun", *FACTORS) if frame[name].nunique(dropna=False) > 1]
    if functions := [name for name in frame.columns if name not in (*stores.COLUMNS, "options", "loss")]:
        place = columns.index("heldout_loss")
        columns[place : place + 1] = functions
    _rows(f"{len(frame)} runs", frame, columns)


def _rows(title: str, frame: Any, columns: list[str]) -> None:
    rows = frame[columns].itertuples(index=False)
    _table(title, columns, ([f"{v:.5g}" if isinstance(v, float) else str(v) for v in row] for row in rows))


def _table(title: str, columns: list[str], rows: Any) -> None:
    cells = [list(map(files.printable, row)) for row in rows]
    (_aligned if len(cells) > MOST_DRAWN else _drawn)(title, list(map(files.printable, columns)), cells)


def _aligned(title: str, columns: list[str], cells: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    _say("\n".join([title, *("  ".join(map(str.ljust, row, widths)).rstrip() for row in (columns, *cells))]))


def _drawn(title: str, columns: list[str], cells: list[list[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), show_header=any(columns))
    for name in columns:
        table.add_column(Text(name))
    for row in cells:
        table.add_row(*map(Text, row))  # as `Text` a cell is shown as it is: `[/red]` is no markup
    # Piped into a file there is no terminal whose width to keep to.
    with _output(sys.stdout), contextlib.suppress(SystemExit):  # with which rich ends where nobody reads
        Console(width=None if Console().is_terminal else 200).print(table)


if __name__ == "__main__":
    main()
