"""The command line: `gpulab devices | train | experiment | reproduce | verdict | runs | check | pack | …`."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Annotated, Any

import typer
import typer.core

from gpulab import __version__, files, signals
from gpulab.errors import DataError, GpulabError, UsageError, extra, in_one_line
from gpulab.settings import Setting
from gpulab.training.protocol import OPTIONS, Specification, whole_numbers

MOST_DRAWN = 500  # rows with lines around them, which take time; more are aligned only


# --- what the options are --------------------------------------------------------------------------------


def option(words: str, usually: str | bool = True, flag: str = "", **limits: Any) -> Any:
    """What an option says, and what holds where nothing is said, if the parameter's default does not tell."""
    return typer.Option(*filter(None, [flag]), help=words, show_default=usually, **limits)


def argument(words: str, usually: str | bool = False) -> Any:
    """What an argument says, and what holds where it is left out."""
    return typer.Argument(help=words, show_default=usually)


STEP = "module:name or file.py:name of a gpulab.Step or a function of one step"
SETTING = "such as cpu, cpu:threads=1, cuda:tf32=off,cudnn=off"
MARGIN = "largest difference of no importance, such as 0.25sd or 0.001; for yes and no a share, such as 0.1"
STORE = "folder in which runs are kept, s3://…, or a file of packed runs"
USUAL_STORE = "$GPULAB_STORE or ./runs"
REGISTRATION = "a file that lays down question, endpoint, margin, seeds, stopping; its digest is kept with each run"

Training = Annotated[str, argument("file.py:name, a training of your own; autoencoder, prednet, whitener")]
SettingText = Annotated[str, option(SETTING)]
Profile = Annotated[
    str, option("smoke (seconds), quick (a laptop) or paper (as published), for prednet also motion; not of a function")
]
Store = Annotated[Path | None, option(STORE, USUAL_STORE)]
StoreArgument = Annotated[Path | None, argument(STORE, USUAL_STORE)]
StoreOption = Annotated[Path | None, option("the same, as an option", False, "--store")]
Fresh = Annotated[bool, option("ignore a checkpoint or an earlier run", flag="--fresh")]
CheckpointSeconds = Annotated[float | None, option("time between checkpoints, of gpulab's own networks", "10", min=0)]
Guard = Annotated[bool, option("end with an error if something is overwritten before backward uses it", flag="--guard")]
Registered = Annotated[Path | None, option(REGISTRATION)]
Picture = Annotated[Path | None, option("draw every run and difference into this PNG file")]
Where = Annotated[list[str] | None, option("only these: column=value; several times")]
Options = dict[str, Any]  # those of a run


def _with_options_of_a_run(command: Callable[..., None]) -> Callable[..., None]:
    """A command that takes every option of a run, in `options`, as `gpulab.training.protocol.OPTIONS` lists them."""
    parameters = dict(inspect.signature(command, eval_str=True).parameters)
    del parameters["options"]

    def take(name: str, kind: Any, default: Any, words: Any) -> None:
        annotation = Annotated[kind, words]
        parameters[name] = inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
        )

    for name, each in OPTIONS.items():
        if each.flag:
            flag = f"--{name.replace('_', '-')}" + (f"/--no-{name}" if each.usual is True else "")
            kind, usual = (bool, bool(each.usual)) if each.kind is bool else (each.kind | None, each.usual)
            take(name, kind, usual, option(each.help, each.default or True, flag))
    take("option", list[str], [], option("an option of the model or function, such as width=64; several times"))
    take("data_option", list[str], [], option("an option of the data, such as seed=3; several times"))

    def with_options(**given: Any) -> None:
        flat = {name: given.pop(name) for name in OPTIONS if name in given}
        model, data = ({n: _value(text) for n, text in _pairs(given.pop(o))} for o in ("option", "data_option"))
        if ":" not in given["model"]:
            options = dict(Specification.from_options(given["model"], given["profile"], flat).options)
            options["model_options"] |= model
            options["data_options"] |= data
        elif data:
            raise UsageError(f"--data-option {next(iter(data))}: a function takes what it has as --option")
        else:
            said = {name: value for name, value in flat.items() if not OPTIONS[name].says_nothing(value)}
            options = {name: OPTIONS[name].parse(value) for name, value in said.items()} | model
        command(**given, options={name: value for name, value in options.items() if value != {}})

    with_options.__signature__ = inspect.Signature([*parameters.values()])  # type: ignore[attr-defined]
    with_options.__name__, with_options.__doc__ = command.__name__, command.__doc__
    return with_options


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


# --- commands --------------------------------------------------------------------------------------------


@app.command()
def devices(as_json: Annotated[bool, option("print the passport as JSON", flag="--json")] = False) -> None:
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
@_with_options_of_a_run
def train(
    model: Training,
    options: Options,
    setting: SettingText = "cpu",
    seed: Annotated[int, option("draws the initial weights and the order of images", min=0)] = 0,
    profile: Profile = "quick",
    rerun: Annotated[int, option("numbers repetitions of the same run", min=0)] = 0,
    store: Store = None,
    fresh: Fresh = False,
    checkpoint_seconds: CheckpointSeconds = None,
    picture: Annotated[Path | None, option("write what the trained network makes to this PNG file")] = None,
    guard: Guard = False,
    registered: Registered = None,
) -> None:
    """Train once, from one seed under one setting. A network of gpulab's that is interrupted resumes when run again."""
    _check_output(picture)
    Setting.parse(setting).prepare()
    from gpulab.store import listing as stores
    from gpulab.training.request import train as train_one

    if ":" in model:
        if picture:
            raise UsageError("--picture draws what gpulab's own networks make")
        options = {"model_options": options}
    run = train_one(
        **Specification(model, setting, seed, profile, rerun, options).arguments(),
        store=store or stores.default_store(),
        **_how(fresh, checkpoint_seconds, guard, registered),
    )
    if not run.path:  # of several processes the first keeps the run, and tells of it
        return
    _say(run)
    _say(f"kept in {run.path}")
    if picture:
        from gpulab import plots

        _save(plots.sample(run), picture)


def _how(fresh: bool, checkpoint_seconds: float | None, guard: bool, registered: Path | None) -> dict[str, Any]:
    """How a run is done, in arguments of `gpulab.train`: those asked for, since they keep a run from sharing a GPU."""
    asked: dict[str, Any] = {"resume": False if fresh else None, "checkpoint_seconds": checkpoint_seconds}
    asked |= {"guard": guard or None, "registered": str(registered) if registered else None}
    return {name: value for name, value in asked.items() if value is not None}


@app.command()
@_with_options_of_a_run
def experiment(
    model: Training,
    options: Options,
    setting: Annotated[list[str], option(f"{SETTING}; give it several times")],
    seeds: Annotated[str | None, option("how many (10), or which (0,1,7)", "the profile's, or 10")] = None,
    profile: Profile = "quick",
    reruns: Annotated[int, option("how often each seed and setting is run", min=1)] = 1,
    workers: Annotated[
        int,
        option("processes that train at the same time; with 1, up to 16 small networks share a CUDA GPU in one", min=1),
    ] = 1,
    metric: Annotated[str | None, option("of the verdict", "final_loss, or the first")] = None,
    store: Store = None,
    fresh: Fresh = False,
    checkpoint_seconds: CheckpointSeconds = None,
    picture: Picture = None,
    guard: Guard = False,
    registered: Registered = None,
    engine: Annotated[str, option("local, ray (a cluster), or slurm, which prints a job array")] = "local",
    address: Annotated[str | None, option("of the Ray cluster", "$RAY_ADDRESS or a local")] = None,
    cpus: Annotated[float | None, option("of each run on a cluster", "its threads, or 1")] = None,
    gpus: Annotated[float | None, option("of each run on a cluster, such as 0.25", "1")] = None,
    tasks: Annotated[int, option("of the job array", min=1)] = 16,
    share: Annotated[str | None, option("K/N does every N-th run from the K-th on, for one task")] = None,
) -> None:
    """Train seeds × settings in worker processes, here or on a cluster. What is done already is skipped."""
    _check_output(picture)
    from gpulab.stats.verdicts import verdict as compare
    from gpulab.store import listing as stores
    from gpulab.training.experiment import Experiment

    numbers = whole_numbers(seeds, name="--seeds") if seeds else None
    chosen = numbers[0] if numbers and "," not in str(seeds) else numbers
    how = _how(fresh, checkpoint_seconds, guard, registered)
    exp = Experiment(model, setting, chosen, profile, store, reruns, workers, options, how=how)
    if engine == "slurm":
        if share or address:
            raise UsageError("--share and --address go with other engines: each task of the array has its own share")
        _say(_job_array(exp, tasks, cpus, gpus))
        return
    k, n = whole_numbers(share, "/", 2, "--share") if share else (0, 1)
    frame = exp.run(engine=engine, address=address, cpus=cpus, gpus=gpus, share=(k, n))
    _show(frame)
    if share:
        _say(f"share {share} is done; without --share, --fresh and --guard the same command compares all runs")
        return
    metrics = next(filter(None, map(stores.metrics_of, frame.itertuples())), ["final_loss"])
    if metric and metric not in metrics:
        raise UsageError(f"--metric {metric!r}: the runs have {', '.join(metrics)}")
    answer = compare(frame, metric or ("final_loss" if "final_loss" in metrics else metrics[0]))
    _say(answer)
    if picture:
        _save(answer.plot(), picture)


def _job_array(exp: Any, tasks: int, cpus: float | None, gpus: float | None) -> str:
    """The script for Slurm: the same command for each task, but for how the tasks are made."""
    from gpulab.training.cluster import slurm_script
    from gpulab.training.request import planned

    jobs = exp.jobs()
    for job in {job["setting"]: job for job in jobs}.values():
        planned(**job)  # which refuses what makes no sense, here and not in every task
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option in ("engine", "cpus", "gpus", "tasks", "store", "picture"):
        parser.add_argument(f"--{option}")
    _, words = parser.parse_known_args(sys.argv[1:])
    store = exp.folder if exp.remote else exp.folder.absolute()
    devices = max(job.get("devices") or 1 for job in jobs)
    command = ["gpulab", *words, "--store", str(store)]
    return slurm_script(command, min(tasks, len(jobs)), [*exp.settings], cpus, gpus, devices, exp.workers)


@app.command()
def reproduce(
    model: Training,
    target: Annotated[str, option("the old setting, whose runs are in the store")],
    setting: Annotated[str, option(f"the new setting, {SETTING}")],
    search: Annotated[
        list[str],
        option("what may change: learning_rate=0.0003,0.003 or 0.0001..0.01, tf32=off; give it several times"),
    ],
    profile: Profile = "quick",
    metric: Annotated[str, option("final_loss, heldout_loss, or what a function gives")] = "final_loss",
    margin: Annotated[str, option(MARGIN)] = "0.25sd",
    trials: Annotated[int, option("changes to try at most", min=1)] = 30,
    workers: Annotated[int, option("runs at the same time", min=1)] = 1,
    store: Store = None,
    csv: Annotated[bool, option("print the table of trials as CSV", flag="--csv")] = False,
    picture: Annotated[Path | None, option("draw distance against difference into this PNG file")] = None,
) -> None:
    """Find the smallest change that gives the old setting's losses under the new one. Exit status 1 when none does.

    The runs of the old setting come from the store; `gpulab experiment` makes them. Killed, the search
    goes on when it is run again.
    """
    _check_output(picture)
    from gpulab.search.reproduction import reproduce as find
    from gpulab.store import listing as stores
    from gpulab.training.functions import TrainingFunction

    space = {
        name: tuple(map(_value, text.split(".."))) if ".." in text else [*map(_value, text.split(","))]
        for name, text in _pairs(search)
    }
    folder = store or stores.default_store()
    old_setting, name, train = str(Setting.parse(target)), model, model if ":" in model else None
    if train:
        name, profile = TrainingFunction(model).name, TrainingFunction.profile
    frame = stores.runs(folder)
    old = frame[(frame.experiment == name) & (frame.profile == profile) & (frame.setting == old_setting)]
    if old.empty:
        raise UsageError(
            f"no runs of {model} under {old_setting} with profile {profile} in {folder}; make them with "
            f"`gpulab experiment {model} --setting {old_setting}{'' if train else f' --profile {profile}'} --seeds 20`"
        )
    how: dict[str, Any] = {"metric": metric, "margin": _value(margin), "trials": trials, "workers": workers}
    reproduction = find(old, space, setting, train, store=folder, **how)
    if csv:
        _say_csv(reproduction.table)
    else:
        columns = ["changes", "distance", "state", "decision", "seeds", "diverged", "difference", "confirmed"]
        _rows(f"{len(reproduction.table)} trials", reproduction.table, columns)
        _say(reproduction)
    if picture:
        _save(reproduction.plot(), picture)
    if not reproduction.confirmed:
        raise typer.Exit(1)


@app.command()
def verdict(
    file: Annotated[Path, argument("a .csv, .tsv or .parquet, a store, or packed runs")],
    metric: Annotated[str, option("the column that is compared: numbers, or true and false")] = "final_loss",
    factor: Annotated[str, option("the column whose levels are compared")] = "setting",
    block: Annotated[str, option("the column of what they are compared on")] = "seed",
    reference: Annotated[str | None, option("a level", "cpu, or else the first")] = None,
    margin: Annotated[str | None, option(MARGIN, "0.25sd, or 0.1")] = None,
    alpha: Annotated[float, option("the level of significance")] = 0.05,
    where: Where = None,
    picture: Picture = None,
) -> None:
    """Say whether the levels of a factor differ, from a table of runs made anywhere: a row per run.

    Exports of Weights & Biases and MLflow are read as they are: `--metric loss` finds `metrics.loss`, `--block seed`
    finds `params.seed`. A run that finished with NaN or infinity diverged, which is counted. One that crashed, failed,
    was killed or still runs has no known result: it is left out, which is said.
    """
    _check_output(picture)
    from gpulab.stats.tables import read_table
    from gpulab.stats.verdicts import verdict as compare
    from gpulab.store import listing as stores
    from gpulab.store import records

    is_store = file.is_dir()
    if file.suffix == ".parquet":
        with contextlib.suppress(DataError):
            is_store = is_store or bool(records.packed_runs(file))
    frame = _rows_where(stores.runs(file) if is_store else read_table(file, metric), where)
    answer = compare(frame, metric, factor, block, _value(margin) if margin else None, alpha, reference)
    _say(answer)
    if picture:
        _save(answer.plot(), picture)


@app.command()
def runs(
    store: StoreArgument = None,
    kept_in: StoreOption = None,
    recorded: Annotated[bool, option("the runs shipped with gpulab", flag="--recorded")] = False,
    where: Where = None,
    csv: Annotated[bool, option("print all columns as CSV", flag="--csv")] = False,
) -> None:
    """List the runs in a store."""
    from gpulab.store import listing as stores
    from gpulab.store.object_store import url_of

    folder = _either(store, kept_in) or stores.default_store()
    if not recorded and not url_of(folder) and not folder.exists():
        raise GpulabError(f"{folder}: no such folder; `gpulab train` and `gpulab experiment` make one")
    frame = _rows_where(stores.recorded_runs() if recorded else stores.runs(folder), where)
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
    look: Annotated[bool, option("look only, and mend nothing", flag="--look")] = False,
) -> None:
    """Read and verify everything in a store, and mend it. Exit status 1 where something was damaged.

    Damaged runs are set aside, in `.damaged` inside the store, so that the next `gpulab experiment` does them again.
    What killed processes left half-written is removed.
    """
    from gpulab.store import checks

    troubles = checks.check(_either(store, kept_in), mend=not look)
    for trouble in troubles.itertuples():
        _say(f"{trouble.path}: {trouble.problem}: {trouble.remedy}")
    freed = troubles.megabytes[troubles.remedy == checks.REMOVED].sum()
    set_aside = int((troubles.remedy == checks.SET_ASIDE).sum())
    would = "would be " if look else ""
    _say(f"whole: {troubles.attrs['runs']}; {would}set aside: {set_aside}; {would}freed: {freed:.3g} MB")
    if set_aside:
        raise typer.Exit(1)


@app.command()
def pack(
    store: Annotated[Path, argument(STORE)],
    file: Annotated[Path, argument("the file to write, such as my-runs.parquet")],
    where: Where = None,
    share: Annotated[
        bool, option("for others' atlases: nothing private in it, and shown before it is written", flag="--share")
    ] = False,
    yes: Annotated[bool, option("share without asking", flag="--yes")] = False,
) -> None:
    """Pack runs of a store, without weights, into one file for others: `gpulab runs FILE` reads it."""
    from gpulab.store import listing as stores
    from gpulab.training import sharing

    _check_output(file)
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
    file: Annotated[Path, argument("what `gpulab pack --share` wrote")],
    store: Annotated[Path | None, option("the folder to add to", "$GPULAB_ATLAS, data/atlas or ./atlas")] = None,
) -> None:
    """Check a file of shared runs and add them to an atlas, all or none. Exit status 2 where it is refused."""
    from gpulab.training import sharing

    folder = store or sharing.atlas_folder()
    try:
        _say(f"{sharing.merge(file, folder)} runs added to {folder}")
    except DataError as error:
        raise UsageError(f"refused: {error}") from None


@app.command()
def record(
    step: Annotated[str, argument(STEP)],
    setting: SettingText = "cpu",
    output: Annotated[Path | None, option("trace file", "NAME-SETTING.trace")] = None,
) -> None:
    """Record what every operation of a training step computes, to be compared with another machine's."""
    Setting.parse(setting).prepare()
    from gpulab.diagnostics import steps, traces

    file = output or Path(re.sub(r"[^\w.]+", "-", f"{step.rpartition(':')[2]}-{setting}") + ".trace")
    _check_output(file)
    trace = traces.record(steps.find_step(step), setting, file)
    _say(f"{trace}\nkept in {file}")


@app.command()
def audit(
    a: Annotated[str, argument(f"a trace from `gpulab record`; or a step, {STEP}")],
    b: Annotated[str | None, argument("another trace of the same step")] = None,
    setting: Annotated[list[str] | None, option(f"of a step: the two to compare, {SETTING}")] = None,
    confirm: Annotated[
        bool, option("do a step again with each line that was found put right", flag="--confirm")
    ] = False,
    html: Annotated[Path | None, option("write the whole report to this HTML file")] = None,
) -> None:
    """Compare two traces, or a step under two settings: what differs, by how much, why. Exit status 1 if wrong."""
    _check_output(html)
    for text in setting or ():
        Setting.parse(text).prepare()
    from gpulab.diagnostics import audits, steps
    from gpulab.store.records import shipped

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
    device: Annotated[str, option("auto, cpu, cuda, mps or xpu")] = "auto",
    only: Annotated[str | None, option("notebooks whose names begin so, such as 04 or 03,04")] = None,
    output: Annotated[Path, option("folder for the executed notebooks and the report")] = Path("build"),
    notebooks: Annotated[Path, option("folder of the notebooks")] = Path("notebooks"),
    store: Annotated[Path | None, option("folder in which runs are kept", "OUTPUT/runs")] = None,
    in_place: Annotated[bool, option("execute the notebooks themselves, to commit them", flag="--in-place")] = False,
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
    port: Annotated[int, option("0 for any that is free", min=0, max=65535)] = 8866,
    host: Annotated[str, option("the address to listen on; others can reach 0.0.0.0")] = "127.0.0.1",
    token: Annotated[str | None, option("what lets in", "a new one each time")] = None,
    pages: Annotated[int | None, option("open at the same time", "what the free memory holds", min=1)] = None,
    no_open: Annotated[bool, option("leave the browser alone", flag="--no-open")] = False,
) -> None:
    """Serve pages without code, to be explored in a browser: bits, a saddle, trainings, verdicts, audits."""
    with extra("notebooks"):
        from gpulab.companion import explore as exploring
    exploring.serve(host, port, token, pages, not no_open, lambda address: _say(f"{address}\nCtrl-C ends it."))


def main() -> None:
    """Run the command line; an error of gpulab's own is one line, and the exit status says which."""
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


# --- what a command is given -----------------------------------------------------------------------------


def _check_output(file: Path | None) -> None:
    """Raise `GpulabError` before any work for a file that could not be written after it."""
    if file:
        files.check_writable(file)


def _either(argument: Path | None, option: Path | None) -> Path | None:
    """A store that is named in one of two ways."""
    if argument and option:
        raise UsageError(f"{argument} and --store {option}: expected one store")
    return argument or option


def _pairs(options: list[str] | None) -> Iterator[tuple[str, str]]:
    """The names and the texts of options written `name=text`."""
    for option in options or ():
        name, _, text = option.partition("=")
        if not (name and text):
            raise UsageError(f"{option!r}: expected name=value")
        yield name, text


def _value(text: str) -> Any:
    """A number, a list of them, true or false; or else a word."""
    for read in (int, float, json.loads):
        with contextlib.suppress(ValueError):
            return read(text)
    return text


def _rows_where(frame: Any, where: list[str] | None) -> Any:
    """The rows of runs that `--where` asks for."""
    from gpulab.stats.pairs import find_column

    for name, text in _pairs(where):
        frame = frame[frame[find_column(frame.columns, name)].astype(str) == text]
    return frame


# --- what it says ----------------------------------------------------------------------------------------


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


def _say_csv(frame: Any) -> None:
    _say(frame.to_csv(index=False, lineterminator="\n").removesuffix("\n"))


def _save(picture: Any, file: Path) -> None:
    picture.save(file)
    _say(f"picture in {file}", sys.stderr)


def _show(frame: Any) -> None:
    """A table of runs: their factors that are not all the same, and the metrics of functions."""
    from gpulab.store import listing as stores
    from gpulab.training.protocol import FACTORS

    differing = [name for name in ("rerun", *FACTORS) if frame[name].nunique(dropna=False) > 1]
    of_functions = [name for name in frame.columns if name not in (*stores.COLUMNS, "options", "loss")]
    columns = ["experiment", "profile", "setting", "seed", *differing, "status", "final_loss"]
    _rows(f"{len(frame)} runs", frame, [*columns, *(of_functions or ["heldout_loss"]), "seconds", "machine"])


def _rows(title: str, frame: Any, columns: list[str]) -> None:
    rows = frame[columns].itertuples(index=False)
    _table(title, columns, ([f"{v:.5g}" if isinstance(v, float) else str(v) for v in row] for row in rows))


def _table(title: str, columns: list[str], rows: Any) -> None:
    names, *cells = [[files.printable(cell) for cell in row] for row in (columns, *rows)]
    if len(cells) > MOST_DRAWN:
        widths = [max(map(len, column)) for column in zip(names, *cells, strict=True)]
        _say("\n".join([title, *("  ".join(map(str.ljust, row, widths)).rstrip() for row in (names, *cells))]))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(*names, title=title, show_header=any(names))
    for row in cells:
        table.add_row(*row)
    # Piped into a file there is no terminal whose width to keep to. A cell is shown as it is: `[/red]` is no markup.
    width = None if Console().is_terminal else 200
    with _output(sys.stdout), contextlib.suppress(SystemExit):  # with which rich ends where nobody reads
        Console(width=width, markup=False, emoji=False, highlight=False).print(table)


if __name__ == "__main__":
    main()
