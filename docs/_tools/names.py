"""Write the public names into `public_names.md`, which a test compares with the code: `python
docs/_tools/names.py`.
"""

import inspect
from pathlib import Path

import gpulab as gl

PAGE = Path(__file__).parents[1] / "public_names.md"
MADE = ("Experiment", "Step", "Autoencoder", "LinearAutoencoder", "PredNet", "Whitener")
HEAD = (
    "# Public names\n\n"
    "From 1.0 on, these names and the names of their parameters are stable. A name that has to be"
    " removed still works for a year, during which it warns and names its replacement. New"
    " parameters are added after the others, with a default. Everything else can change: modules"
    " that are not named here, printed text, `notebooks/companion`, `benchmarks`.\n\n`python"
    " docs/_tools/names.py` writes this page, and a test compares it with the code.\n"
)


def signature(thing):
    """Return the parameters of a function, or of a class that users instantiate; else ""."""
    if not callable(thing) or (inspect.isclass(thing) and thing.__name__ not in MADE):
        return ""
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    taken = inspect.signature(thing).parameters.values()
    return f"({', '.join(stars.get(given.kind, '') + given.name for given in taken)})"


def page():
    """Return the page, which has a list for each package."""
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
