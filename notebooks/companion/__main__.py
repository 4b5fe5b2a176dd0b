"""`python -m companion` executes the notebooks and writes a report; `python -m companion explore`
serves pages.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from gpulab import cli
from gpulab.cli import Profile, argument, echo, option
from gpulab.errors import extra

NOTEBOOKS = Path(__file__).parents[1]
Device = Literal["auto", "cpu", "cuda", "mps", "xpu"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.callback(invoke_without_command=True)
def execute(
    context: typer.Context,
    profile: Profile = "quick",
    device: Annotated[Device, option("where the notebooks train")] = "auto",
    only: Annotated[
        str | None, option("only notebooks with these prefixes, such as 04 or 03,04")
    ] = None,
    output: Annotated[Path, option("folder for the executed notebooks and the report")] = Path(
        "build"
    ),
    notebooks: Annotated[
        Path, option("folder of the notebooks", "the one that contains companion")
    ] = NOTEBOOKS,
    store: Annotated[Path | None, option("folder in which runs are stored", "OUTPUT/runs")] = None,
    jobs: Annotated[
        int | None, option("number of notebooks at a time", "2 if cores and memory allow", min=1)
    ] = None,
    in_place: Annotated[
        bool, option("execute the notebooks themselves, to commit them", flag="--in-place")
    ] = False,
) -> None:
    """Execute the notebooks and bind them into one report. The exit status is 1 if one of them
    failed.
    """
    if context.invoked_subcommand:
        return
    from companion import report, run

    if in_place:
        for file in run.execute_in_place(notebooks, only):
            echo(f"executed: {file}")
        return
    results = run.execute(notebooks, output, profile, device, only, store, jobs)
    echo("writing the report", sys.stderr)
    page = report.write_report(results, output, profile)
    failed = [result.name for result in results if result.error]
    for name in failed:
        echo(f"failed: {name}", sys.stderr)
    echo(f"report: {page}")
    if failed:
        raise typer.Exit(1)


@app.command()
def copies(
    folder: Annotated[Path, argument("where to copy them, such as lab, next to notebooks")],
    notebooks: Annotated[
        Path, option("folder of the notebooks", "the one that contains companion")
    ] = NOTEBOOKS,
) -> None:
    """Copy the notebooks without their outputs, for a class that guesses the results first.
    Existing copies are kept.
    """
    from companion.notebooks import copy_without_outputs

    new_copies = copy_without_outputs(notebooks, folder)
    echo(f"{len(new_copies)} new copies in {folder}")


@app.command()
def explore(
    port: Annotated[int, option("to listen on", min=1, max=65535)] = 8866,
) -> None:
    """Serve interactive pages without code to a browser on this machine. They show a buffer, the
    bits of numbers, a saddle and verdicts.
    """
    with extra("notebooks"):
        import voila  # noqa: F401 - it is started as a separate program

        from companion.explore import HOST, serve
    echo(f"http://{HOST}:{port}\nCtrl-C ends it.")
    raise typer.Exit(serve(port))


if __name__ == "__main__":
    cli.main(app)
