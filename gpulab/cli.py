"""The command line: `gpulab devices | train | experiment | verdict | runs | pack | record | audit | guard`."""

from __future__ import annotations

import contextlib
import re
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from gpulab import __version__, files, signals
from gpulab.errors import DataError, GpulabError, UsageError, in_one_line
from gpulab.options import (
    MARGIN,
    SETTING,
    STEP,
    STORE,
    OneSetting,
    Picture,
    Profile,
    Store,
    StoreArgument,
    StoreOption,
    Training,
    Where,
    argument,
    either,
    of_a_run,
    option,
    prepared,
    rows_where,
    value,
    writable,
)
from gpulab.store.factors import whole_numbers
from gpulab.terminal import printing, save_plot, say, say_csv, say_runs, say_table


class Commands(typer.core.TyperGroup):
    """Saves what was done when Ctrl-C comes, and says how to go on."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        with signals.Raising("gpulab: interrupted; run the same command again to go on"):
            return super().invoke(ctx)


app = typer.Typer(
    cls=Commands,
    help="Does the device change what a neural network learns? Train, compare and see.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def _main(version: Annotated[bool, option("print the version and exit", flag="--version")] = False) -> None:
    """What comes before any command."""
    if version:
        say(f"gpulab {__version__}")
        raise typer.Exit


# --- commands --------------------------------------------------------------------------------------------


@app.command()
def devices(as_json: Annotated[bool, option("print the passport as JSON", flag="--json")] = False) -> None:
    """Show this machine's passport and the settings that it can run."""
    from gpulab.passports import passport
    from gpulab.settings import available_settings

    here = passport()
    if as_json:
        say(here.to_json())
        return
    say_table("This machine", ["", ""], here.rows())
    say("Settings that run here: " + "  ".join(available_settings()))


@app.command()
@of_a_run
def train(
    model: Training,
    how: dict[str, Any],
    options: dict[str, Any],
    setting: OneSetting = "cpu",
    seed: Annotated[int, option("draws the initial weights and the order of images", min=0)] = 0,
    profile: Profile = "quick",
    rerun: Annotated[int, option("numbers repetitions of the same run", min=0)] = 0,
    store: Store = None,
    picture: Annotated[
        Path | None, option("write what the trained network makes to this PNG file", callback=writable)
    ] = None,
) -> None:
    """Train once, from one seed under one setting. A network of gpulab's that is interrupted resumes when run again."""
    from gpulab.store import runs as stores
    from gpulab.training.run import train as train_one

    if ":" in model:
        if picture:
            raise UsageError("--picture draws what gpulab's own networks make")
        options = {"model_options": options}
    asked = {"setting": setting, "seed": seed, "profile": profile, "rerun": rerun, **options}
    run = train_one(model, **asked, store=stores.store_folder(store), **how)
    say(run)
    say(f"kept in {run.path}")
    if picture:
        from gpulab import plots

        plots.sample(run).save(picture)
        say(f"picture in {picture}", sys.stderr)


@app.command()
@of_a_run
def experiment(
    model: Training,
    how: dict[str, Any],
    options: dict[str, Any],
    setting: Annotated[list[str], option(f"{SETTING}; give it several times")],
    seeds: Annotated[str | None, option("how many (10), or which (0,1,7)", "the profile's, or 10")] = None,
    profile: Profile = "quick",
    reruns: Annotated[int, option("how often each seed and setting is run", min=1)] = 1,
    workers: Annotated[int, option("runs at the same time; on a CUDA GPU they share it", min=1)] = 1,
    metric: Annotated[str | None, option("what the verdict compares", "final_loss, or the first")] = None,
    store: Store = None,
    picture: Picture = None,
    engine: Annotated[str, option("local, or ray (a cluster)")] = "local",
    address: Annotated[str | None, option("of the Ray cluster", "$RAY_ADDRESS or a local")] = None,
) -> None:
    """Train every seed under every setting, here or on a cluster, and compare. What is done already is skipped."""
    from gpulab.stats.verdicts import verdict as compare
    from gpulab.store import runs as stores
    from gpulab.training.experiment import Experiment

    numbers = whole_numbers(seeds) if seeds else None
    chosen = numbers[0] if numbers and "," not in str(seeds) else numbers
    exp = Experiment(model, setting, chosen, profile, store, reruns, workers, options, how=how)
    frame = exp.run(engine=engine, address=address)
    say_runs(frame, f", kept in {exp.folder}")
    named = (stores.record_of(run).get("metrics", ["final_loss", "heldout_loss"]) for run in frame.itertuples())
    metrics = list(next(filter(None, named), ["final_loss"]))
    if metric and metric not in metrics:
        raise UsageError(f"--metric {metric!r}: the runs have {', '.join(metrics)}")
    answer = compare(frame, metric or ("final_loss" if "final_loss" in metrics else metrics[0]))
    say(answer)
    save_plot(answer, picture)


@app.command()
def verdict(
    file: Annotated[Path, argument("a .csv, .tsv or .parquet, a store, or packed runs")],
    metric: Annotated[str, option("the column that is compared: numbers, or true and false")] = "final_loss",
    factor: Annotated[str, option("the column whose levels are compared")] = "setting",
    block: Annotated[str, option("the column that says which rows are pairs")] = "seed",
    reference: Annotated[str | None, option("what others are compared with", "cpu, or else the first")] = None,
    margin: Annotated[str | None, option(MARGIN, "0.25sd, or 0.1")] = None,
    alpha: Annotated[float, option("the level of significance")] = 0.05,
    where: Where = None,
    picture: Picture = None,
) -> None:
    """Say whether the levels of a factor differ, such as two settings: from any table with a row for each run.

    `--metric loss` finds `metrics.loss`, `--block seed` finds `params.seed`. A run that finished with NaN or infinity
    diverged, which is counted. One whose `status` is neither `finished` nor `diverged` is left out, which is said.
    """
    from gpulab.stats.tables import read_table
    from gpulab.stats.verdicts import verdict as compare
    from gpulab.store import recorded
    from gpulab.store import runs as stores

    is_store = file.is_dir()
    if file.suffix == ".parquet":
        with contextlib.suppress(DataError):
            is_store = bool(recorded.read_packed(file))
    frame = rows_where(stores.runs(file) if is_store else read_table(file, metric), where)
    answer = compare(frame, metric, factor, block, value(margin) if margin else None, alpha, reference)
    say(answer)
    save_plot(answer, picture)


@app.command()
def runs(
    store: StoreArgument = None,
    kept_in: StoreOption = None,
    recorded: Annotated[bool, option("the runs shipped with gpulab", flag="--recorded")] = False,
    where: Where = None,
    csv: Annotated[bool, option("print all columns as CSV", flag="--csv")] = False,
) -> None:
    """List the runs in a store."""
    from gpulab.store import runs as stores

    folder = stores.store_folder(either(store, kept_in))
    if not recorded and not folder.exists():
        raise GpulabError(f"{folder}: no such folder; `gpulab train` and `gpulab experiment` make one")
    frame = rows_where(stores.recorded_runs() if recorded else stores.runs(folder), where)
    if csv:
        say_csv(frame)
    elif frame.empty:
        below = sorted({str(record.parents[1]) for record in Path(folder).glob("*/*/run.json")})
        say(f"no runs in {folder}{'; there are some in ' * bool(below)}{', '.join(below)}")
    else:
        say_runs(frame)


@app.command()
def pack(
    store: Annotated[Path, argument(STORE)],
    file: Annotated[Path, argument("the file to write, such as my-runs.parquet", callback=writable)],
    where: Where = None,
) -> None:
    """Pack runs of a store, without weights, into one file for others: `gpulab runs FILE` reads it."""
    from gpulab.store import runs as stores

    frame = rows_where(stores.runs(store), where)
    if frame.empty:
        raise GpulabError(f"{store}: no runs to pack")
    count = stores.pack(frame, file)
    say(f"{count} runs packed into {file}, {file.stat().st_size / 1e6:.2g} MB")


@app.command()
def record(
    step: Annotated[str, argument(STEP)],
    trace_file: Annotated[Path | None, argument("the trace file", "NAME-SETTING.trace")] = None,
    setting: OneSetting = "cpu",
    output: Annotated[Path | None, option("the trace file", "NAME-SETTING.trace")] = None,
) -> None:
    """Record what every operation of a training step computes, to be compared with another machine's."""
    from gpulab.audits import steps, traces

    if trace_file and output:
        raise UsageError(f"the trace file is given twice: {trace_file}, and --output {output}")
    file = trace_file or output or Path(re.sub(r"[^\w.]+", "-", f"{step.rpartition(':')[2]}-{setting}") + ".trace")
    files.check_writable(file)
    trace = traces.record(steps.find_step(step), setting, file)
    say(f"{trace}\nkept in {file}")


@app.command()
def audit(
    a: Annotated[str, argument(f"a trace from `gpulab record`; or a step, {STEP}")],
    b: Annotated[str | None, argument("another trace of the same step")] = None,
    setting: Annotated[list[str] | None, option(f"of a step: the two to compare, {SETTING}")] = None,
    confirm: Annotated[
        bool, option("do a step again with each line that was found put right", flag="--confirm")
    ] = False,
    html: Annotated[Path | None, option("write the whole report to this HTML file", callback=writable)] = None,
) -> None:
    """Compare two traces, or a step under two settings: what differs, how far, why. Exit status 1 if it is wrong."""
    for text in setting or ():
        prepared(text)
    from gpulab.audits import audits, steps
    from gpulab.report import render
    from gpulab.store.recorded import shipped

    drawn = find_spec("matplotlib") is not None
    if html and not drawn:
        say(
            "gpulab: the report will have no picture, which needs matplotlib: pip install 'gpulab[notebooks]'",
            sys.stderr,
        )

    if (b is None) == (len(setting or ()) != 2):
        raise UsageError("expected two traces, or a step with --setting twice")
    if b is None:
        report = audits.audit(steps.find_step(a), *(setting or ()), confirm=confirm)
    else:
        report = audits.audit(shipped(a), shipped(b), confirm=confirm)
    say(report)
    if html:
        if drawn:
            report.save(html)
        else:
            files.write(html, render("page.html", title="Audit", body=report.words()).encode())
        say(f"report in {html}")
    if report.faulty:
        raise typer.Exit(1)


@app.command(name="guard", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def guard_script(
    script: Annotated[str, argument("a Python script, which knows nothing of gpulab")],
    arguments: Annotated[list[str] | None, argument("what the script is given", "nothing")] = None,
    reads: Annotated[str, option("any: every later read of shared memory; backward: what autograd saved")] = "any",
    stop: Annotated[bool, option("end the script at the first finding", flag="--stop")] = False,
    json: Annotated[
        Path | None, option("write each finding to this file, as a line of JSON", callback=writable)
    ] = None,
) -> None:
    """Run a script and tell which tensors were overwritten before they were used. Exit status 1 if one was."""
    from gpulab.errors import OverwrittenError
    from gpulab.guards import guards, scripts

    for given in {"--reads", "--stop", "--json"}.intersection(arguments or ()):
        say(f"{given} is given to {script}: what is for gpulab stands before it", sys.stderr)
    report = guards.guard("raise" if stop else "warn", reads)
    file = json and json.absolute()  # the script may go to another folder
    scripts.check_script(script)
    with warnings.catch_warnings(action="ignore", category=guards.OverwrittenWarning):
        try:
            scripts.run_script(script, arguments or (), report)
        except OverwrittenError:
            if not report.findings:  # another guard's
                raise
        except SystemExit as ended:
            if ended.code or not report.findings:  # the script's own status
                raise
        finally:
            say(report, sys.stderr)
            if file:
                files.write(file, "".join(f"{line}\n" for line in scripts.json_lines(report)).encode())
    if report.findings:
        raise typer.Exit(1)


def main(commands: typer.Typer = app) -> None:
    """Run the command line; an error of gpulab's own is one line, and the exit status says which."""
    with contextlib.suppress(AttributeError):  # where a terminal has no ×
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    warnings.formatwarning = lambda message, *_, **__: files.printable(f"gpulab: {message}\n")
    try:
        try:
            commands()
        finally:
            for stream in (sys.stderr, sys.stdout):
                with printing(stream):
                    stream.flush()
    except GpulabError as error:
        say(f"gpulab: {error}", sys.stderr)
        sys.exit(2 if isinstance(error, UsageError) else 1)
    except OSError as error:
        why = files.WHY.get(error.errno or 0, error.strerror)
        say(f"gpulab: {error.filename}: {why}" if error.filename else f"gpulab: {in_one_line(error)}", sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
