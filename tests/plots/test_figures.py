"""Every figure is as recorded when somebody last looked at it: words, positions, sizes, colours.

`test_figures.json` has a line for each thing that is drawn.
"""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

import gpulab as gl
from gpulab.plots import _instruments as instruments

SEEN = (
    "text",
    "position",
    "xydata",
    "offsets",
    "segments",
    "xy",
    "array",
    "sizes",
    "color",
    "facecolor",
    "edgecolor",
)
SEEN += (
    "alpha",
    "linewidth",
    "linestyle",
    "marker",
    "markersize",
    "markerfacecolor",
    "fontsize",
    "ha",
    "va",
    "zorder",
)
SEEN += ("xlim", "ylim", "xscale", "yscale", "xlabel", "ylabel", "size_inches", "label")

SADDLE = gl.saddles.linear_autoencoder_saddle(torch.diag(torch.tensor([4.0, 3.0, 2.0])), [1])
THREE_VALUES = torch.diag(torch.tensor([-1.0, 0.0, 4.0]).repeat(9))


def runs():
    """Return runs of six seeds under three settings.

    The losses of the second setting are 1.5 times as high; a run of the third diverged; one run is
    repeated.
    """
    table = [
        {"setting": setting, "seed": seed, "final_loss": 0.1 * (seed + 1) ** 2 * times, "rerun": 0}
        for setting, times in (("cpu", 1.0), ("cuda:tf32=on", 1.5), ("cpu:threads=1", 1.0))
        for seed in range(6)
    ]
    frame = pd.DataFrame([*table, table[0] | {"final_loss": 0.5, "rerun": 1}])
    frame = frame.assign(
        experiment="prednet", profile="smoke", protocol="p", machine="m", status="finished"
    )
    frame.loc[15, ["final_loss", "status"]] = np.nan, "diverged"
    return frame.assign(recorded=frame.setting.str.startswith("cuda"), id=frame.index.astype(str))


def histories(settings):
    frame = runs()[lambda frame: frame.setting.isin(settings)].fillna({"final_loss": 9.0})
    windows = [(20 * n, frame.final_loss * (1 + 9 / n) * (1 + n % 3)) for n in range(1, 121)]
    return pd.concat(
        [frame.assign(frames_seen=seen, loss=loss) for seen, loss in windows], ignore_index=True
    )


def step():
    floors = {"memory": 0.004, "arithmetic": 0.005, "launches": 0.001}
    roofline = gl.device.recorded_rooflines()
    return gl.device.Placement(
        "cuda:tf32=off", 7, {"float32": 10**11}, 10**10, 0.02, 0.01, floors, (), roofline
    )


def audit():
    """Return an audit with a finding, an operation without error, and one without a reference."""
    kinds, phases = (
        ["rounding", "mismatch", "rounding", "mismatch"],
        ["forward", "forward", "backward", "backward"],
    )
    errors = {
        "error_a": [1e-8, 3e-8, 0.0, np.nan],
        "error_b": [2e-8, 1e-3, 4e-7, np.nan],
        "bound_a": [1e-6] * 4,
    }
    table = pd.DataFrame({"kind": kinds, "phase": phases, **errors, "bound_b": [2e-6, 2e-6, 0, 0]})
    a, b = (
        SimpleNamespace(setting=setting, title=f"step under {setting}")
        for setting in ("cpu", "cpu:threads=1")
    )
    return SimpleNamespace(table=table, a=a, b=b, kind="mismatch")


def untrained(net):
    """Return an untrained network, so that its pictures do not depend on a processor's rounding."""
    run = gl.train(net, setting="cpu:threads=1", profile="smoke", frames=20, progress=False)
    for tensor in run.model.state_dict().values():
        tensor.copy_(torch.linspace(-0.1, 0.1, tensor.numel()).reshape(tensor.shape))
    return run


FIGURES = {
    "losses": lambda: gl.plots.losses(runs()),
    "curves": lambda: gl.plots.curves(histories(runs().setting), 0.3, "repeating"),
    "curves of two": lambda: gl.plots.curves(histories(["cpu", "cuda:tf32=on"])),
    "estimation": lambda: gl.verdict(runs(), margin=0.5).plot(),
    "differences": lambda: gl.plots.differences(gl.verdict(runs(), margin=0.5)),
    "audit": lambda: instruments.audit(audit()),
    "roofline": lambda: gl.plots.roofline(gl.device.recorded_rooflines()),
    "placement": lambda: step().plot(),
    "predictions": lambda: gl.plots.predictions(untrained("prednet")),
    "reconstructions": lambda: gl.plots.reconstructions(untrained("autoencoder")),
    "frames": lambda: gl.plots.frames(gl.load("walk", frames=100, size=(24, 32)), every=10),
    "spectrum": lambda: gl.plots.spectrum(gl.saddles.spectral_density(THREE_VALUES, steps=9)),
    "surface": lambda: gl.saddles.surface(SADDLE, places=7).plot(),
    "escape law": lambda: gl.plots.escape_law(gl.saddles.recorded_escapes()),
}


def words(value):
    """Return a property in words; many numbers as their ends, mean, maximum and count."""
    try:
        numbers = np.ma.asarray(value, float).compressed()
    except (TypeError, ValueError):
        return str(value)
    if len(numbers) > 12:
        numbers = [*numbers[[0, -1]], numbers.mean(), numbers.max(), len(numbers)]
    return " ".join(f"{number:.4g}" for number in numbers)


def described(picture):
    """Return a line for each thing that is drawn."""
    figure, lines = picture.figure, [picture.alt]
    seen = [figure, figure._suptitle]
    for axes in figure.axes:
        seen += [
            axes,
            axes.title,
            *axes.lines,
            *axes.collections,
            *axes.patches,
            *axes.texts,
            *axes.images,
        ]
        for axis in (axes.xaxis, axes.yaxis):
            lines.append(str(axis.get_major_formatter().format_ticks(axis.get_majorticklocs())))
    for legend in figure.legends:
        seen += [legend, *legend.get_texts(), *legend.get_lines(), *legend.get_patches()]
    for artist in seen:
        had = artist.properties()
        told = (f"{name} {words(had[name])}" for name in SEEN if name in had)
        lines.append(f"{type(artist).__name__}: {', '.join(told)}")
    return lines


@pytest.mark.parametrize("name", FIGURES)
def test_figure_is_as_recorded(name, as_recorded):
    as_recorded(name, described(FIGURES[name]()), "matplotlib")
