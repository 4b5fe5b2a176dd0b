"""Write the public names into `public_names.md`: `python docs/_tools/names.py`. A test compares."""

import inspect
from pathlib import Path

import gpulab as gl

PAGE = Path(__file__).parents[1] / "public_names.md"
MADE = ("Experiment", "Step", "Autoencoder", "LinearAutoencoder", "PredNet", "Whitener")
HEAD = (
    "# Public names\n\n"
    "From 1.0 on, these names stay, and so do the names of their parameters. One that has to go"
    " is kept for a year, in which it warns and says what takes its place. New parameters come"
    " after the others, with a default. Everything else may change: modules that are not named"
    " here, what is printed, `notebooks/companion`, `benchmarks`.\n\n`python"
    " docs/_tools/names.py` writes this page, and a test compares it with the code.\n"
)


def signature(thing):
    """What a function takes, or a class that people make objects of; empty for anything else."""
    if not callable(thing) or (inspect.isclass(thing) and thing.__name__ not in MADE):
        return ""
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    taken = inspect.signature(thing).parameters.values()
    return f"({', '.join(stars.get(given.kind, '') + given.name for given in taken)})"


def page():
    """The page: a list for each package."""
    text = HEAD
    for package in (gl, *(getattr(gl, name) for name in gl.PACKAGES)):
        own = [
            name for name in sorted(package.__all__) if name not in gl.PACKAGES or package is not gl
        ]
        lines = [f"- `{name}{signature(getattr(package, name))}`" for name in own]
        text += f"\n## `{package.__name__}`\n" + "\n".join(lines) + "\n"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
