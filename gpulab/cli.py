"""The command line: `gpulab devices | train | experiment | reproduce | runs | record | audit | companion`."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from gpulab.errors import GpulabError, UsageError


class _Commands(typer.core.TyperGroup):
    """Says how to go on after Ctrl-C."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            print("gpulab: interrupted; run the same command again to go on", file=sys.stderr)
            raise typer.Exit(130) from None


app = typer.Typer(
    cls=_Commands,
    help="Does the device change what a neural network learns? Train, compare and see.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

MODEL_HELP = "autoencoder, prednet or whitener"
SETTING_HELP = "such as cpu, cpu:threads=1, cuda:tf32=off,cudnn=off"
DATA_HELP = "digits, mnist, mnist:DIR, walk, moving-digits, video:FILE, frames:DIR; or jpeg: and one of these"
PROFILE_HELP = "smoke (seconds), quick (a laptop) or paper (as published)"
STORE_HELP = "folder in which runs are kept  [default: $GPULAB_STORE or ./runs]"

FLIP_HELP = "number of the initial weight whose last bit is changed"
DRAWS_HELP = "whose generator draws the initial weights: cpu or device"
DECODER_HELP = "who decodes jpeg:NAME: pillow, torchvision, av or nvjpeg  [default: pillow]"
QUALITY_HELP = "of the frames of jpeg:NAME, 1 to 100  [default: 75]"
LOADER_HELP = "how frames reach the device: window, or one by one through a buffer: copied, reused, imitated"

Options = Annotated[
    list[str], typer.Option("--option", help="an option of the model, such as covariance=centred; several times")
]
Profile = Annotated[str, typer.Option(help=PROFILE_HELP)]
Loader = Annotated[str, typer.Option(help=LOADER_HELP)]
Flip = Annotated[int | None, typer.Option(min=0, help=FLIP_HELP)]
Draws = Annotated[str, typer.Option(help=DRAWS_HELP)]
Decoder = Annotated[str | None, typer.Option(help=DECODER_HELP)]
Quality = Annotated[int | None, typer.Option(help=QUALITY_HELP)]
Subsampling = Annotated[str | None, typer.Option(help="of the colours of jpeg:NAME: 4:4:4, 4:2:2 or 4:2:0")]
Store = Annotated[Path | None, typer.Option(help=STORE_HELP, show_default=False)]


@app.command()
def devices(as_json: Annotated[bool, typer.Option("--json", help="print the passport as JSON")] = False) -> None:
    """Show this machine's passport and the settings that it can run."""
    from gpulab.passports import passport
    from gpulab.settings import available_settings

    here = passport()
    if as_json:
        print(here.to_json())
        return
    _table("This machine", ["", ""], here.rows())
    print("Settings that run here: " + "  ".join(available_settings()))


@app.command()
def train(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    data: Annotated[str | None, typer.Option(help=DATA_HELP + "  [default: the profile's]")] = None,
    setting: Annotated[str, typer.Option(help=SETTING_HELP)] = "cpu",
    seed: Annotated[int, typer.Option(min=0, help="draws the initial weights and the order of images")] = 0,
    profile: Profile = "quick",
    frames: Annotated[int | None, typer.Option(help="how many to train on  [default: the profile's]")] = None,
    size: Annotated[str | None, typer.Option(help="height×width of the frames, such as 48x64")] = None,
    channels: Annotated[str | None, typer.Option(help="PredNet's channels, such as 3,16,32")] = None,
    option: Options = [],  # noqa: B006
    speed: Annotated[float, typer.Option(help="of the motion in walk and moving-digits")] = 1.0,
    grey: Annotated[bool, typer.Option("--grey", help="read a video or a folder with one channel")] = False,
    learning_rate: Annotated[float | None, typer.Option(help="Adam's  [default: 0.001]")] = None,
    loader: Loader = "window",
    decoder: Decoder = None,
    quality: Quality = None,
    subsampling: Subsampling = None,
    flip: Flip = None,
    draws: Draws = "cpu",
    store: Store = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="ignore a checkpoint or an earlier run")] = False,
    checkpoint_seconds: Annotated[float, typer.Option(min=0, help="time between checkpoints")] = 10.0,
    picture: Annotated[Path | None, typer.Option(help="write what the trained network makes to this PNG file")] = None,
    guard: Annotated[
        bool, typer.Option("--guard", help="end with an error if something is overwritten before backward uses it")
    ] = False,
) -> None:
    """Train one network from one seed under one setting. Interrupted, it resumes when run again."""
    from gpulab.settings import Setting

    Setting.parse(setting).prepare()
    from gpulab.training import run as training
    from gpulab.training import store as stores

    model_options = _model_options(option)
    data_options: dict[str, Any] = {}
    if size:
        model_options["size"] = data_options["size"] = tuple(_integers(size.replace("×", "x"), "x", "--size", 2))
    if channels:
        model_options["channels"] = _integers(channels, ",", "--channels")
    elif grey and model == "prednet":
        from gpulab.training.protocol import protocol

        model_options["channels"] = [1, *protocol(model, profile).model["channels"][1:]]
    data_options |= {"speed": speed} if speed != 1.0 else {}
    data_options |= {"grey": True} if grey else {}
    data_options |= _given(decoder=decoder, quality=quality, subsampling=subsampling)
    run = training.train(
        model,
        data,
        setting,
        seed,
        profile,
        frames=frames,
        learning_rate=learning_rate,
        loader=loader,
        flip=flip,
        draws=draws,
        data_options=data_options,
        model_options=model_options,
        store=store or stores.default_store(),
        resume=not fresh,
        checkpoint_seconds=checkpoint_seconds,
        guard=guard,
        command=shlex.join(["gpulab", *sys.argv[1:]]),
    )
    print(run)
    print(f"kept in {run.path}")
    if picture:
        from gpulab import plots

        plots.save(plots.sample(run), picture)
        print(f"picture in {picture}")


@app.command()
def experiment(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    setting: Annotated[list[str], typer.Option(help=SETTING_HELP + "; give it several times")],
    seeds: Annotated[str | None, typer.Option(help="how many (10), or which (0,1,7)  [default: the profile's]")] = None,
    profile: Profile = "quick",
    data: Annotated[str | None, typer.Option(help=DATA_HELP)] = None,
    frames: Annotated[int | None, typer.Option(help="how many to train on")] = None,
    speed: Annotated[float | None, typer.Option(help="of the motion in walk and moving-digits")] = None,
    loader: Annotated[str | None, typer.Option(help=LOADER_HELP)] = None,
    decoder: Decoder = None,
    quality: Quality = None,
    subsampling: Subsampling = None,
    flip: Flip = None,
    draws: Draws = "cpu",
    option: Options = [],  # noqa: B006
    reruns: Annotated[int, typer.Option(min=1, help="how often each seed and setting is run")] = 1,
    workers: Annotated[int, typer.Option(min=1, help="runs at the same time (seconds then say nothing)")] = 1,
    store: Store = None,
) -> None:
    """Train seeds × settings in worker processes. What is done already is skipped."""
    from gpulab.stats.verdicts import verdict
    from gpulab.training.experiment import Experiment

    options = _given(data=data, frames=frames, loader=loader, flip=flip)
    options |= {} if draws == "cpu" else {"draws": draws}
    if data_options := _given(speed=speed, decoder=decoder, quality=quality, subsampling=subsampling):
        options["data_options"] = data_options
    options |= {"model_options": model_options} if (model_options := _model_options(option)) else {}
    chosen = None
    if seeds:
        numbers = _integers(seeds, ",", "--seeds")
        chosen = numbers if "," in seeds else range(numbers[0])
    exp = Experiment(model, setting, chosen, profile, store, reruns, workers, options)
    frame = exp.run()
    _show(frame)
    print(verdict(frame))


@app.command()
def reproduce(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    target: Annotated[str, typer.Option(help="the old setting, whose runs are in the store")],
    setting: Annotated[str, typer.Option(help="the new setting, " + SETTING_HELP)],
    search: Annotated[
        list[str],
        typer.Option(
            help="what may change: learning_rate=0.0003,0.003 or 0.0001..0.01, tf32=off; give it several times"
        ),
    ],
    profile: Profile = "quick",
    metric: Annotated[str, typer.Option(help="final_loss or heldout_loss")] = "final_loss",
    margin: Annotated[
        str, typer.Option(help="largest difference of no importance, such as 0.25sd or 0.001")
    ] = "0.25sd",
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
    from gpulab.settings import Setting
    from gpulab.training import store as stores
    from gpulab.training.reproduction import reproduce as find

    space = _space(search)
    size = margin if margin.strip().endswith("sd") else _numbers(margin, "--margin")[0]
    folder = store or stores.default_store()
    frame = stores.runs(folder)
    wanted = str(Setting.parse(target))
    old = frame[(frame.experiment == model) & (frame.profile == profile) & (frame.setting == wanted)]
    if old.empty:
        raise UsageError(
            f"no runs of {model} under {wanted} with profile {profile} in {folder}; make them with "
            f"`gpulab experiment {model} --setting {wanted} --profile {profile} --seeds 20`"
        )
    found = find(old, space, setting, metric=metric, margin=size, trials=trials, workers=workers, store=folder)
    if csv:
        found.table.to_csv(sys.stdout, index=False)
    else:
        columns = ["changes", "distance", "state", "decision", "seeds", "diverged", "difference", "confirmed"]
        _rows(f"{len(found.table)} trials", found.table, columns)
        print(found)
    if picture:
        from gpulab import plots

        plots.save(found.plot(), picture)
        print(f"picture in {picture}", file=sys.stderr)
    if not found.confirmed:
        raise typer.Exit(1)


@app.command()
def runs(
    store: Annotated[Path | None, typer.Argument(help=STORE_HELP, show_default=False)] = None,
    recorded: Annotated[bool, typer.Option("--recorded", help="the runs shipped with gpulab")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="print all columns as CSV")] = False,
) -> None:
    """List the runs in a store."""
    from gpulab.training import store as stores

    folder = store or stores.default_store()
    if not recorded and not folder.is_dir():
        raise GpulabError(f"{folder}: no such folder; `gpulab train` and `gpulab experiment` make one")
    frame = stores.recorded_runs() if recorded else stores.runs(folder)
    if csv:
        frame.to_csv(sys.stdout, index=False)
    elif frame.empty:
        print(f"no runs in {folder}")
    else:
        _show(frame)


@app.command()
def record(
    step: Annotated[str, typer.Argument(help="module:name or file.py:name, a gpulab.Step or a function of one step")],
    setting: Annotated[str, typer.Option(help=SETTING_HELP)] = "cpu",
    output: Annotated[Path | None, typer.Option(help="trace file  [default: NAME-SETTING.trace]")] = None,
) -> None:
    """Record what every operation of a training step computes, to be compared with another machine's."""
    from gpulab.settings import Setting

    Setting.parse(setting).prepare()
    import re

    from gpulab.diagnostics import traces as tracing

    file = output or Path(re.sub(r"[^\w.]+", "-", f"{step.rpartition(':')[2]}-{setting}") + ".trace")
    trace = tracing.record(tracing.find_step(step), setting, file)
    print(f"{trace}\nkept in {file}")


@app.command()
def audit(
    a: Annotated[Path, typer.Argument(help="a trace from `gpulab record`", show_default=False)],
    b: Annotated[Path, typer.Argument(help="another, of the same step", show_default=False)],
    html: Annotated[Path | None, typer.Option(help="write the whole report to this HTML file")] = None,
) -> None:
    """Compare two traces: which operation differs, by how much, why. Exit status 1 when something is wrong."""
    from gpulab.diagnostics.audits import audit as compare

    report = compare(a, b)
    print(report)
    if html:
        report.save(html)
        print(f"report in {html}")
    if report.faulty:
        raise typer.Exit(1)


@app.command()
def companion(
    profile: Profile = "quick",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, mps or xpu")] = "auto",
    only: Annotated[str | None, typer.Option(help="notebooks whose names begin so, such as 04 or 03,04")] = None,
    output: Annotated[Path, typer.Option(help="folder for the executed notebooks and the report")] = Path("build"),
    notebooks: Annotated[Path, typer.Option(help="folder of the notebooks")] = Path("notebooks"),
    store: Annotated[Path | None, typer.Option(help="folder in which runs are kept  [default: OUTPUT/runs]")] = None,
    in_place: Annotated[
        bool, typer.Option("--in-place", help="execute the notebooks themselves, to commit them")
    ] = False,
) -> None:
    """Execute the notebooks and bind them into one report. Exit status 1 when one of them failed."""
    from gpulab.companion import run as binding

    if in_place:
        for file in binding.execute_in_place(notebooks, only):
            print(f"executed: {file}")
        return
    results = binding.execute(notebooks, output, profile, device, only, store)
    report = binding.write_report(results, output, profile)
    failed = [result.name for result in results if result.error]
    for name in failed:
        print(f"failed: {name}", file=sys.stderr)
    print(f"report: {report}")
    if failed:
        raise typer.Exit(1)


def main() -> None:
    """Run the command line; an error of gpulab's own is one line, and the exit status says which."""
    try:
        app()
    except UsageError as error:
        _complain(error, 2)
    except GpulabError as error:
        _complain(error, 1)
    except BrokenPipeError:  # `gpulab runs | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(error: Exception, status: int) -> None:
    print(f"gpulab: {error}", file=sys.stderr)
    sys.exit(status)


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _integers(text: str, separator: str, option: str, count: int | None = None) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(separator)]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 0 or (count and len(numbers) != count):
        raise UsageError(f"{option} {text!r}: expected whole numbers separated by {separator!r}")
    return numbers


def _pairs(options: list[str], flag: str, expected: str) -> Iterator[tuple[str, str]]:
    """The names and the texts of options written `name=text`, each name once."""
    seen = set()
    for option in options:
        name, equals, text = option.partition("=")
        if not (equals and name and text) or name in seen:
            raise UsageError(f"{flag} {option!r}: expected {expected}, each name once")
        seen.add(name)
        yield name, text


def _space(options: list[str]) -> dict[str, Any]:
    """What `--search` says: lists of values, or ranges."""
    return {
        name: tuple(_numbers(text.replace("..", ","), "--search")) if ".." in text else [*map(_value, text.split(","))]
        for name, text in _pairs(options, "--search", "name=value,value or name=low..high")
    }


def _model_options(options: list[str]) -> dict[str, Any]:
    """What `--option` says: a value for each name."""
    return {name: _value(text) for name, text in _pairs(options, "--option", "name=value")}


def _value(text: str) -> Any:
    """A whole number, a number, or a word."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _numbers(text: str, option: str) -> list[float]:
    numbers = [_value(part) for part in text.split(",")]
    if any(isinstance(number, str) for number in numbers):
        raise UsageError(f"{option} {text!r}: expected numbers")
    return numbers


def _show(frame: Any) -> None:
    columns = ["experiment", "profile", "setting", "seed", "status", "final_loss", "heldout_loss", "seconds", "machine"]
    _rows(f"{len(frame)} runs", frame, columns)


def _rows(title: str, frame: Any, columns: list[str]) -> None:
    rows = []
    for row in frame[columns].itertuples(index=False):
        rows.append([f"{value:.5g}" if isinstance(value, float) else str(value) for value in row])
    _table(title, columns, rows)


def _table(title: str, columns: list[str], rows: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*columns, title=title, show_header=any(columns))
    for row in rows:
        table.add_row(*row)
    console = Console()
    # Piped into a file there is no terminal whose width to keep to.
    (console if console.is_terminal else Console(width=200)).print(table)


if __name__ == "__main__":
    main()
