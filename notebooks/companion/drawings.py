"""Drawings for the notebooks: the two networks, the published loop, and a saddle."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from gpulab.plots import Picture
from gpulab.plots.theme import FAINT, INK, ON_CPU, ON_GPU

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Point = tuple[float, float]

ERROR_COLOUR = "#D55E00"
STATE_COLOUR = "#0072B2"
PREDICTION_COLOUR = "#009E73"
FRAME_COLOUR = "#777777"


def draw_autoencoder() -> Picture:
    """Draw the autoencoder: its five layers of numbers, and the weights between them."""
    from torch import nn

    from gpulab.models import Autoencoder

    network = Autoencoder()
    layers = [layer for layer in network.layers if isinstance(layer, nn.Linear)]
    widths = [layers[0].in_features, *(layer.out_features for layer in layers)]
    pixels = "{}×{} pixels".format(*network.size)
    names = [f"image\n{pixels}", "", "code", "", f"reconstruction\n{pixels}"]
    figure, axes = _blank_axes(7.2, 2.9, (-0.7, 8.7), (-1.9, 2.1))
    heights = [0.75 * np.log2(width / 4) / np.log2(784 / 4) * 2 for width in widths]
    for number, (width, height) in enumerate(zip(widths, heights, strict=True)):
        x = 2 * number
        colour = ERROR_COLOUR if width == min(widths) else STATE_COLOUR
        _draw_box(axes, (x, 0), 0.36, 2 * height, str(width), colour)
        axes.text(x, -height - 0.16, names[number], ha="center", va="top", color=INK, fontsize=9)
        if number:
            left, right = 2 * number - 2 + 0.2, x - 0.2
            corners = [
                (left, heights[number - 1]),
                (right, height),
                (right, -height),
                (left, -heights[number - 1]),
            ]
            axes.fill(*zip(*corners, strict=True), color=FAINT, alpha=0.35, zorder=0, linewidth=0)
            function = "sigmoid" if number == len(widths) - 1 else "ReLU"
            label = f"{widths[number - 1]}×{width}\nweights,\n{function}"
            axes.text(2 * number - 1, 0, label, ha="center", va="center", color=INK, fontsize=8)
    return Picture(
        figure,
        f"The autoencoder: five layers of {', '.join(map(str, widths))} numbers, with a matrix of"
        " weights between neighbouring layers. Each matrix is followed by a ReLU, the last one by a"
        " sigmoid. The middle layer is the code.",
    )


def draw_prednet() -> Picture:
    """Draw two of PredNet's layers at two frames, with the data that flow between them."""
    figure, axes = _blank_axes(7.6, 5.4, (-2.0, 11.1), (-0.75, 7.1))
    for time, left in enumerate((0.0, 6.2)):
        frame = "frame t" if time == 0 else "frame t + 1"
        for layer, bottom in enumerate((1.3, 5.0)):
            number = _subscript(layer)
            centre = left + 2.9
            # In the lowest layer, the input is the frame.
            text = f"input A{number}:\n{frame}" if layer == 0 else f"input A{number}"
            _draw_box(axes, (left, bottom - 1.5), 1.7, 0.85, text, FRAME_COLOUR)
            _draw_box(axes, (left, bottom), 1.7, 0.85, f"error E{number}", ERROR_COLOUR)
            state = f"state R{number}, cell C{number}"
            _draw_box(axes, (centre, bottom + 1.3), 2.4, 0.85, state, STATE_COLOUR)
            prediction = f"prediction P{number}"
            _draw_box(axes, (centre, bottom), 1.9, 0.85, prediction, PREDICTION_COLOUR)
            _draw_arrow(axes, (left, bottom - 1.07), (left, bottom - 0.43), FRAME_COLOUR)
            # The error goes into the state of the same layer, and the state makes the prediction.
            _draw_arrow(axes, (left + 0.5, bottom + 0.43), (left + 1.7, bottom + 1.3), ERROR_COLOUR)
            _draw_arrow(axes, (centre, bottom + 0.87), (centre, bottom + 0.43), STATE_COLOUR)
        _draw_arrow(axes, (left, 1.73), (left, 3.07), ERROR_COLOUR)
        _draw_arrow(axes, (left + 3.95, 5.87), (left + 3.95, 3.03), STATE_COLOUR, "arc3,rad=-0.35")
    for bottom in (1.3, 5.0):
        _draw_arrow(axes, (3.85, bottom), (5.35, bottom), PREDICTION_COLOUR)
        _draw_arrow(axes, (4.1, bottom + 1.3), (7.9, bottom + 1.3), STATE_COLOUR, "arc3,rad=-0.12")
    _label(axes, (-0.2, 2.4), "up: convolution,\nReLU, pooling", ERROR_COLOUR, "right")
    _label(axes, (4.15, 3.8), "down: R₁,\nenlarged", STATE_COLOUR, "right")
    _label(axes, (6.0, 6.75), "R and C, to the next frame", STATE_COLOUR, "center")
    _label(axes, (4.6, 1.02), "compared\nwith A", PREDICTION_COLOUR, "center", "top")
    _label(axes, (-1.0, 1.3), "layer 0", INK, "right")
    _label(axes, (-1.0, 5.0), "layer 1", INK, "right")
    return Picture(
        figure,
        "PredNet at two frames. Each layer has a convolutional LSTM with a state R and a cell C."
        " The prediction P is computed from R. At the next frame, the prediction is compared with"
        " the input A of the layer, which in the lowest layer is the frame. The difference is the"
        " error E. It goes into the state of its layer, and up to the layer above, which computes"
        " its input from it. R is passed down to the layer below, and R and C to the next frame.",
    )


def draw_published_loop() -> Picture:
    """Draw the memory of the published loop: a buffer that a CPU keeps using and a GPU copies."""
    figure, axes = _blank_axes(4.4, 4.2, (-0.1, 12.1), (-0.9, 7.2))
    _label(axes, (0, 6.75), "CPU: each tensor is the buffer itself", ON_CPU, "left")
    _label(axes, (0, 2.75), "GPU: each tensor is a copy", ON_GPU, "left")
    for row, colour in ((5.7, ON_CPU), (1.1, ON_GPU)):
        _draw_box(axes, (1.1, row), 2.1, 1.0, "buffer:\nframe 3", FRAME_COLOUR)
        for number in range(3):
            x = 4.6 + 3.1 * number
            text = f"step {number + 1} saw\nframe {number + 1}"
            _draw_box(axes, (x, row), 2.3, 1.0, text, colour)
    for number in range(3):
        x = 4.6 + 3.1 * number
        _draw_arrow(axes, (x, 5.2), (1.3, 5.2), ON_CPU, f"arc3,rad={-0.1 - 0.05 * number}")
        _draw_arrow(axes, (1.3, 1.6), (x, 1.6), ON_GPU, f"arc3,rad={-0.1 - 0.05 * number}")
    _label(
        axes,
        (0, 4.0),
        "In the backward pass, all three steps find frame 3:\nthe gradients are wrong.",
        ON_CPU,
        "left",
        "top",
    )
    _label(
        axes,
        (0, 0.3),
        "In the backward pass, each step finds its own frame:\nthe gradients are right.",
        ON_GPU,
        "left",
        "top",
    )
    return Picture(
        figure,
        "The published loop writes each frame into the same buffer. On a CPU, all time steps share"
        " this buffer, so in the backward pass each step finds the last frame. On a GPU, every"
        " tensor is a copy, so each step finds its own frame.",
    )


def draw_saddle() -> Picture:
    """Draw a saddle, its descent direction, and the path of a network that leaves it."""
    figure, axes = plt.subplots(figsize=(4.8, 4.0), layout="constrained")
    x, y = np.meshgrid(np.linspace(-1, 1, 81), np.linspace(-1, 1, 81))
    axes.contourf(x, y, y**2 - x**2, levels=20, cmap="Greys", vmin=-1, vmax=3)
    axes.contour(x, y, y**2 - x**2, levels=[0], colors=INK, linewidths=0.8, linestyles="--")
    along = 0.03 * 1.22 ** np.arange(18)
    across = 0.8 * 0.75 ** np.arange(18)
    axes.plot(along, across, color=ERROR_COLOUR, marker="o", markersize=4)
    axes.plot(0, 0, color=INK, marker="o", markersize=7)
    _draw_arrow(axes, (-0.08, 0), (-0.85, 0), STATE_COLOUR)
    _label(
        axes, (-0.82, 0.05), "descent direction:\nthe loss falls", STATE_COLOUR, "left", "bottom"
    )
    _label(axes, (0, -0.4), "saddle:\nthe gradient is zero", INK, "center", "top")
    _label(axes, (0.1, 0.85), "a network starts here,", ERROR_COLOUR, "left")
    _label(axes, (0.96, 0.12), "and leaves here", ERROR_COLOUR, "right", "bottom")
    _label(axes, (0, -0.92), "the loss rises", INK, "center")
    axes.set(
        xticks=[], yticks=[], xlabel="one direction of the weights", ylabel="another direction"
    )
    return Picture(
        figure,
        "The loss around a saddle, seen from above: it rises in two directions (dark) and falls in"
        " the other two. A network that starts near the saddle first moves towards it, and then"
        " leaves along the descent direction in growing steps.",
    )


def _blank_axes(
    width: float, height: float, x_limits: Point, y_limits: Point
) -> tuple[plt.Figure, Axes]:
    """Make a figure with hidden axes."""
    figure, axes = plt.subplots(figsize=(width, height), layout="constrained")
    axes.set(xlim=x_limits, ylim=y_limits)
    axes.axis("off")
    return figure, axes


def _draw_box(
    axes: Axes, centre: Point, width: float, height: float, text: str, colour: str
) -> None:
    """Draw a box with rounded corners and a centred text."""
    corner = (centre[0] - width / 2, centre[1] - height / 2)
    style = "round,pad=0,rounding_size=0.12"
    box = FancyBboxPatch(
        corner, width, height, boxstyle=style, facecolor="white", edgecolor=colour, linewidth=1.8
    )
    axes.add_patch(box)
    axes.text(*centre, text, ha="center", va="center", color=INK, fontsize=9)


def _draw_arrow(
    axes: Axes, start: Point, end: Point, colour: str, connection: str = "arc3,rad=0"
) -> None:
    """Draw a straight or curved arrow."""
    arrow = FancyArrowPatch(
        start,
        end,
        arrowstyle="-|>",
        mutation_scale=13,
        color=colour,
        linewidth=1.6,
        connectionstyle=connection,
        shrinkA=0,
        shrinkB=0,
    )
    axes.add_patch(arrow)


def _label(
    axes: Axes,
    place: Point,
    text: str,
    colour: str,
    horizontal: str,
    vertical: str = "center",
) -> None:
    """Write a label."""
    axes.text(*place, text, ha=horizontal, va=vertical, color=colour, fontsize=9)


def _subscript(number: int) -> str:
    """Return a digit as a subscript.

    >>> _subscript(1)
    '₁'
    """
    return "₀₁₂₃₄₅₆₇₈₉"[number]
