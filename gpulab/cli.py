"""The command line, `gpulab`: one function for each command."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer
from typer.models import ArgumentInfo, OptionInfo

from gpulab import __version__, files, interruption
from gpulab.errors import (
    DataError,
    GpulabError,
    UsageError,
    check_count,
    describe_error,
    printable,
)
from gpulab.report import Report
from gpulab.run_options import FACTORS, RUN_OPTIONS, whole_numbers
from gpulab.settings import Setting

if TYPE_CHECKING:
    import pandas as pd

    from gpulab.audits import Trace

# A value that JSON can represent. Options of a user's own function may have any of these types.
CommandValue = Any
PYTHON_FORMATWARNING = warnings.formatwarning

app = typer.Typer(
    help="Does the device change what a neural network learns? Train, compare and see.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

# --- printing -------------------------------------------------------------------------------------


def echo(text: object, to: IO[str] | None = None) -> None:
    """Print a text with control characters escaped, since it may come from an untrusted file."""
    print(printable(str(text)), file=to or sys.stdout, flush=True)  # a pipe would delay it


def echo_runs(frame: pd.DataFrame, store_note: str = "") -> None:
    """Print a table of runs, with the factors that differ and the metrics of functions."""
    from gpulab.store import _tables as tables

    differing = [name for name in ("rerun", *FACTORS) if frame[name].nunique(dropna=False) > 1]
    frame = tables.drop_empty_losses(frame)
    function_metrics = [
        name for name in frame.columns if name not in (*tables.RUN_COLUMNS, "options", "loss")
    ]
    columns = ["experiment", "profile", "setting", "seed", *differing, "status"]
    if "final_loss" in frame:
        columns.append("final_loss")
    columns += [*(function_metrics or ["heldout_loss"]), "seconds", "machine"]
    echo(
        f"{len(frame)}"
        f" runs{store_note}\n{frame[columns].to_string(index=False, float_format='{:.5g}'.format)}"
    )


def save_plot(result: Report, file: Path | None) -> None:
    """Draw a result into a file, if one was requested, and report the file on standard error."""
    if file:
        result.plot().save(file)
        echo(f"picture written to {file}", sys.stderr)


# --- options that several commands have -----------------------------------------------------------


def option(words: str, default: str | bool = True, flag: str = "", **parameters: Any) -> OptionInfo:
    """Declare an option; `default` describes its default if the value alone is not clear."""
    return typer.Option(*filter(None, [flag]), help=words, show_default=default, **parameters)


def argument(words: str, default: str | bool = False, **parameters: Any) -> ArgumentInfo:
    """Declare an argument; `default` describes what is used if it is omitted."""
    return typer.Argument(help=words, show_default=default, **parameters)


def check_writable_path(file: Path | None) -> Path | None:
    """Return the path of an output file after checking that it can be written.

    Raises `GpulabError` before any work if it cannot.
    """
    if file:
        files.check_writable(file)
    return file


def parse_and_prepare(setting: str) -> str:
    """Check a setting and select its CPU instruction set, before torch is loaded."""
    Setting.parse(setting).prepare()
    return setting


STEP_HELP = "module:name or file.py:name of a gpulab.Step or of a function that computes one step"
SETTING_HELP = "such as cpu, cpu:threads=1, cuda:tf32=off,cudnn=off"
MARGIN_HELP = (
    "largest difference that would not matter, such as 0.25sd, 1% or 0.001; for a yes/no metric, a"
    " share of the seeds, such as 0.1"
)
TABLE_HELP = (
    "a .csv, .tsv or .parquet file, a store, packed runs, a folder of logs, or a pattern such as"
    " 'logs/*/metrics.csv'"
)
LAST_HELP = (
    "the column that counts epochs or steps, such as --last epoch; the last row of each run is"
    " compared"
)
BEST_HELP = (
    "a column such as val_loss, instead of --last; the row of each run with the best value in this"
    " column is compared"
)
LOOKS_HELP = (
    "the largest number of times that you compute this verdict while seeds are added, including"
    " this time; the error rates hold for all of these together"
)
STORE_HELP = "folder in which runs are stored, or a file of packed runs"
DEFAULT_STORE_HELP = "$GPULAB_STORE or ./runs"
PROFILE_HELP = (
    "smoke (seconds), quick (on a laptop), paper (as published); for prednet also motion; your own"
    " functions have no profiles"
)
REGISTERED_HELP = (
    "file written before the runs that states the question and the planned analysis; its digest is"
    " recorded"
)
NETWORK_OPTION_NAMES = ", ".join(
    name for name, run_option in RUN_OPTIONS.items() if run_option.help
)
OPTION_HELP = (
    "option of the run as NAME=VALUE, such as frames=40; may be repeated. Networks take"
    f" {NETWORK_OPTION_NAMES}; a function takes its own parameters"
)

OneSetting = Annotated[str, option(SETTING_HELP, callback=parse_and_prepare)]
Store = Annotated[Path | None, option(STORE_HELP, DEFAULT_STORE_HELP, readable=False)]
Picture = Annotated[
    Path | None,
    option("draw every run and every difference into this PNG file", callback=check_writable_path),
]
Looks = Annotated[int, option(LOOKS_HELP, min=1)]
WhereOption = Annotated[list[str] | None, option("only runs with COLUMN=VALUE; may be repeated")]
# Options of a run.
Training = Annotated[
    str, argument("autoencoder, prednet or whitener; or file.py:name, your own training function")
]
Profile = Annotated[str, option(PROFILE_HELP)]
Registered = Annotated[Path | None, option(REGISTERED_HELP)]
Options = Annotated[list[str] | None, option(OPTION_HELP, flag="--option")]
DataOptions = Annotated[
    list[str] | None, option("option of the data, such as seed=3; may be repeated")
]

# --- parsing of options and arguments -------------------------------------------------------------


def train_arguments(
    model: str, options: list[str] | None, data_options: list[str] | None
) -> dict[str, Any]:
    """Return the arguments of `gpulab.train` that configure the run, its data and its model."""
    if ":" in model:
        if data_options:
            raise UsageError(
                f"--data-option {data_options[0]}: a training function has no data options; use"
                " --option"
            )
        return {"model_options": read_options(options)}
    grouped: dict[str, dict[str, Any]] = {
        "run": {},
        "data": read_options(data_options),
        "model": {},
    }
    for name, option_value in read_options(options).items():
        grouped[RUN_OPTIONS[name].argument_group if name in RUN_OPTIONS else "model"][name] = (
            option_value
        )
    return grouped["run"] | {"data_options": grouped["data"], "model_options": grouped["model"]}


def read_options(texts: list[str] | None) -> dict[str, Any]:
    """Parse the values of options written `name=text`."""
    return {name: parse_value(text) for name, text in split_options(texts)}


def split_options(options: list[str] | None) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each option written `name=text`."""
    for option in options or ():
        name, _, text = option.partition("=")
        if not (name and text):
            raise UsageError(f"{option!r}: expected name=value")
        yield name, text


def parse_value(text: str) -> CommandValue:
    """Parse a number, a list of numbers, a boolean, or else a word."""
    with contextlib.suppress(ValueError):
        return json.loads(text)
    return text


def load_runs_or_table(names: list[Path]) -> pd.DataFrame:
    """Load the runs of a store, or the table in a file or in a folder of logs."""
    from gpulab.stats._tables import read_table
    from gpulab.store import _tables as tables
    from gpulab.store import recorded

    if len(names) == 1:
        (file,) = names
        is_store = os.path.isdir(file) and tables.has_runs(file)
        if file.suffix == ".parquet" and not os.path.isdir(file):
            with contextlib.suppress(DataError):
                is_store = bool(recorded.read_packed(file))
        if is_store:
            return tables.runs(file)
    return read_table(names[0] if len(names) == 1 else names)


# --- commands -------------------------------------------------------------------------------------


@app.callback(invoke_without_command=True)
def _main(
    version: Annotated[bool, option("print the version and exit", flag="--version")] = False,
) -> None:
    """Handle `--version`, which needs no command."""
    if version:
        echo(f"gpulab {__version__}")
        raise typer.Exit


@app.command()
def devices() -> None:
    """Show this machine's passport and the settings that it can run."""
    from gpulab.passports import passport
    from gpulab.settings import available_settings

    echo(passport())
    echo("Settings that run here: " + "  ".join(available_settings()))


@app.command()
def train(
    model: Training,
    setting: OneSetting = "cpu",
    seed: Annotated[int, option("seed of the initial weights and the order of images", min=0)] = 0,
    rerun: Annotated[int, option("repetition number; 0 is the first run", min=0)] = 0,
    profile: Profile = "quick",
    store: Store = None,
    registered: Registered = None,
    options: Options = None,
    data_option: DataOptions = None,
) -> None:
    """Train once, from one seed under one setting. If the training of one of gpulab's networks is
    interrupted, the same command resumes it.
    """
    from gpulab.store import _run_store as stores
    from gpulab.training._run import train as train_one

    run_arguments = train_arguments(model, options, data_option)
    run_arguments |= {"rerun": rerun, "store": stores.store_folder(store), "registered": registered}
    run = train_one(model, setting=setting, seed=seed, profile=profile, **run_arguments)
    echo(f"{run}\nstored in {run.path}")


@app.command()
def experiment(
    model: Training,
    setting: Annotated[list[str], option(f"{SETTING_HELP}; repeat the option for each setting")],
    seeds: Annotated[
        str | None, option("number of seeds (10), or the seeds (0,1,7)", "the profile's, or 10")
    ] = None,
    workers: Annotated[
        int, option("number of runs to train at the same time; runs on a CUDA GPU share it", min=1)
    ] = 1,
    metric: Annotated[str, option("the metric that the verdict compares")] = "final_loss",
    looks: Looks = 1,
    picture: Picture = None,
    profile: Profile = "quick",
    store: Store = None,
    registered: Registered = None,
    options: Options = None,
    data_option: DataOptions = None,
) -> None:
    """Train from every seed under every setting, and compare the settings. Runs that the store
    already has are skipped.
    """
    from gpulab.stats._verdict import verdict as compare
    from gpulab.training._experiment import Experiment

    run_arguments = train_arguments(model, options, data_option)
    if ":" in model:
        run_arguments = run_arguments["model_options"]
    numbers = whole_numbers(seeds) if seeds else None
    seed_values = numbers[0] if numbers and "," not in str(seeds) else numbers
    exp = Experiment(
        model,
        setting,
        seed_values,
        profile,
        store,
        workers=workers,
        options=run_arguments,
        registered=registered,
    )
    frame = exp.run()
    echo_runs(frame, f", stored in {exp.folder}")
    answer = compare(frame, metric, looks=looks)
    save_plot(answer, picture)
    echo(answer)


@app.command()
def verdict(
    file: Annotated[list[Path], argument(TABLE_HELP, metavar="FILE", readable=False)],
    metric: Annotated[
        str, option("the column that is compared: numbers, or true and false")
    ] = "final_loss",
    factor: Annotated[str, option("the column whose levels are compared")] = "setting",
    block: Annotated[str, option("the column by which runs are paired")] = "seed",
    reference: Annotated[
        str | None, option("the level that others are compared with", "cpu, or else the first")
    ] = None,
    margin: Annotated[str | None, option(MARGIN_HELP, "0.25sd, or 0.1")] = None,
    alpha: Annotated[float, option("the level of significance")] = 0.05,
    looks: Looks = 1,
    last: Annotated[str | None, option(LAST_HELP, default=False)] = None,
    best: Annotated[str | None, option(BEST_HELP, default=False)] = None,
    mode: Annotated[
        str | None, option("min or max: which value of --best is the best", "from its name")
    ] = None,
    where: WhereOption = None,
    picture: Picture = None,
    html: Annotated[
        Path | None,
        option("write the whole report to this HTML file", callback=check_writable_path),
    ] = None,
) -> None:
    """Decide whether the levels of a factor (such as two settings) differ, given any table of runs
    or folder of logs.

    A run that finished with NaN or infinity counts as diverged. A run is left out with a note
    if its `status` is neither `finished` nor `diverged`, or if it has no value of the metric. If
    the table has a row for each epoch, --last or --best chooses the row that is compared.
    """
    from gpulab.stats._pairs import select_rows
    from gpulab.stats._verdict import verdict as compare

    frame = select_rows(load_runs_or_table(file), split_options(where))
    given_margin = parse_value(margin) if margin else None
    answer = compare(
        frame,
        metric,
        factor,
        block,
        given_margin,
        alpha,
        reference,
        looks,
        last=last,
        best=best,
        mode=mode,
    )
    echo(answer)
    save_plot(answer, picture)
    if html:
        answer.save(html)
        echo(f"report written to {html}")


@app.command()
def runs(
    store: Annotated[Path | None, argument(STORE_HELP, DEFAULT_STORE_HELP, readable=False)] = None,
    recorded: Annotated[
        bool, option("list the runs shipped with gpulab", flag="--recorded")
    ] = False,
    where: WhereOption = None,
    csv: Annotated[bool, option("print all columns as CSV", flag="--csv")] = False,
) -> None:
    """List the runs in a store."""
    from gpulab.stats._pairs import select_rows
    from gpulab.store import _run_store as stores
    from gpulab.store import _tables as tables

    folder = stores.store_folder(store)
    with files.convert_read_errors(folder):
        is_there = recorded or folder.exists()
    if not is_there:
        raise GpulabError(
            f"{folder}: no such folder; `gpulab train` and `gpulab experiment` create one"
        )
    frame = select_rows(
        tables.recorded_runs() if recorded else tables.runs(folder), split_options(where)
    )
    if csv:
        echo(frame.to_csv(index=False, lineterminator="\n").removesuffix("\n"))
    elif frame.empty:
        echo(f"no runs in {folder}")
    else:
        echo_runs(frame)


@app.command()
def record(
    step: Annotated[str, argument(f"{STEP_HELP}; with --at-step, an unchanged script")],
    trace_file: Annotated[
        Path, argument("the file to write, such as here.trace", callback=check_writable_path)
    ],
    arguments: Annotated[
        list[str] | None, argument("arguments of the script that --at-step runs", "none")
    ] = None,
    setting: OneSetting = "cpu",
    at_step: Annotated[
        int | None,
        option("run STEP as a script, and record the training step with this number", "none"),
    ] = None,
) -> None:
    """Record what every operation of a training step computes, for comparison with another
    machine.
    """
    if at_step is None and arguments:
        raise UsageError(f"{arguments[0]}: arguments are only for a script that --at-step runs")
    if at_step is not None:
        trace = _record_script(step, trace_file, arguments or [], setting, at_step)
    else:
        from gpulab.audits import _recording as recording
        from gpulab.user_code import find_function

        trace = recording.record(find_function(step, "step"), setting, trace_file)
    echo(f"{trace}\nstored in {trace_file}", None if at_step is None else sys.stderr)


def _record_script(
    script: str, trace_file: Path, arguments: list[str], setting: str, at_step: int
) -> Trace:
    """Run a script, and record one of its training steps."""
    check_count("--at-step", at_step)
    if setting != "cpu":
        raise UsageError(
            f"--setting {setting}: a script chooses its own device; leave out --setting"
        )
    if not Path(script).is_file():
        raise UsageError(f"{script}: no such script")
    from gpulab.audits import _running_step as running_step

    warnings.formatwarning = PYTHON_FORMATWARNING  # the script's warnings are not gpulab's
    interruption.restore_default_handler()
    return running_step.record_script_step(script, arguments, at_step, trace_file)


@app.command()
def audit(
    compared: Annotated[
        list[str],
        argument(f"two traces from `gpulab record`; or a step ({STEP_HELP}) and two settings"),
    ],
    html: Annotated[
        Path | None,
        option("write the whole report to this HTML file", callback=check_writable_path),
    ] = None,
    as_json: Annotated[bool, option("print the result as JSON", flag="--json")] = False,
    markdown: Annotated[
        bool, option("print the result as Markdown, to paste into an issue", flag="--markdown")
    ] = False,
    fail_on: Annotated[
        list[str] | None, option("a further kind of finding that counts as a fault", "none")
    ] = None,
) -> None:
    """Compare two traces, or a step under two settings: what differs, by how much, and why.

    Exit status 0: rounding, or a difference that a correct device may show; 1: a fault, or a
    finding of a kind given with --fail-on; 2: no comparison was possible.
    """
    if len(compared) not in (2, 3):
        raise UsageError(
            f"expected two traces, or a step and two settings; got {' '.join(compared)}"
        )
    input_a, input_b, *further_settings = compared
    # With three inputs, the first one is a step, and the other two are settings.
    if further_settings:
        for setting in (input_b, *further_settings):
            parse_and_prepare(setting)
    from gpulab.audits import _audit as audits
    from gpulab.audits._findings import KINDS
    from gpulab.user_code import find_function

    for kind in fail_on or ():
        if kind not in KINDS:
            raise UsageError(f"--fail-on {kind!r}: expected one of {', '.join(KINDS)}")
    try:
        if further_settings:
            report = audits.audit(find_function(input_a, "step"), input_b, *further_settings)
            report.step_name = input_a
        else:
            report = audits.audit(files.find_shipped(input_a), files.find_shipped(input_b))
    except GpulabError as error:
        echo(f"gpulab: {error}", sys.stderr)
        raise typer.Exit(2) from None
    if as_json:
        echo(json.dumps(report.as_json(), indent=1))
    elif markdown:
        echo(report.as_markdown())
    else:
        echo(report)
    if html:
        report.save(html)
        echo(f"report written to {html}", sys.stderr if as_json or markdown else None)
    if report.faulty or any(finding.kind in (fail_on or ()) for finding in report.findings):
        raise typer.Exit(1)


@app.command(
    name="guard",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
def guard_script(
    script: Annotated[str, argument("a Python script, which need not use gpulab")],
    arguments: Annotated[list[str] | None, argument("arguments of the script", "none")] = None,
    is_module: Annotated[
        bool, option("SCRIPT is the name of a module, as for python -m", flag="-m")
    ] = False,
    reads: Annotated[
        str,
        option(
            "which reads are checked: any (every later read of shared memory) or backward (reads of"
            " tensors that autograd saved)"
        ),
    ] = "any",
    stop: Annotated[bool, option("end the script at the first finding", flag="--stop")] = False,
) -> None:
    """Run a script or module, and report tensors that were overwritten before they were used. The
    exit status is 1 if there were any.

    If the script ends with an error or with its own exit status, so does the command. With --reads
    any, torch.compile is switched off. The report at the end states this and lists what was not
    watched.
    """
    from gpulab.guards import _guard as guards
    from gpulab.guards import _scripts as scripts

    report = guards.guard("raise" if stop else "warn", reads)
    if not is_module and not Path(script).is_file():
        raise UsageError(f"{script}: no such script")
    warnings.formatwarning = PYTHON_FORMATWARNING  # the script's warnings are not gpulab's
    interruption.restore_default_handler()
    with warnings.catch_warnings(action="ignore", category=guards.OverwrittenWarning):
        try:
            failed = scripts.run_script(script, arguments or (), report, is_module)
        except SystemExit as exit_request:
            if exit_request.code or not report.findings:  # the script's own status
                raise
            failed = False
        finally:
            echo(report, sys.stderr)
    if failed or report.findings:
        raise typer.Exit(1)


def _error_line(error: GpulabError | OSError) -> str:
    """Describe an error in one line: what failed, or which file could not be opened, and why."""
    if isinstance(error, PermissionError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return str(error) if isinstance(error, GpulabError) else describe_error(error)


def main(commands: typer.Typer = app) -> None:
    """Run the command line; report gpulab's own errors in one line, with an exit status."""
    with contextlib.suppress(AttributeError):  # a terminal may lack the character ×
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    warnings.formatwarning = lambda message, *_, **__: printable(f"gpulab: {message}\n")
    try:
        commands()
    except SystemExit as exit_request:
        # The exit status after Ctrl-C. By then, training has saved a checkpoint.
        if exit_request.code == interruption.INTERRUPTED_EXIT_STATUS:
            interruption.report_interruption()
        raise
    except (GpulabError, OSError) as error:
        echo(f"gpulab: {_error_line(error)}", sys.stderr)
        sys.exit(2 if isinstance(error, UsageError) else 1)
