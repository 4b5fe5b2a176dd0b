"""Drawings for notebook 08: four ways in which several devices share work."""

from __future__ import annotations

from companion.drawings import FRAME_COLOUR, _blank_axes, _draw_arrow, _draw_box, _label
from gpulab.plots import Picture
from gpulab.plots.theme import INK, ON_CPU, ON_GPU

GRADIENT_COLOUR = "#009E73"
WEIGHTS_COLOUR = "#CC79A7"
FIRST_TURNS = ((3.1, 1.7), (8.0, 3.2))  # where the bars of a device begin, and how long they are
SECOND_TURN = ((4.9, 3.0),)


def draw_data_parallel() -> Picture:
    """Draw data-parallel training: each device has a share of the batch; gradients are averaged."""
    figure, axes = _blank_axes(7.4, 3.0, (-0.2, 12.6), (-0.3, 4.9))
    _draw_box(axes, (1.0, 2.2), 1.8, 2.6, "one\nbatch", FRAME_COLOUR)
    for number, y in enumerate((3.6, 0.9), 1):
        _draw_box(axes, (4.9, y), 2.6, 1.2, f"device {number}:\nall weights", ON_GPU)
        _draw_arrow(axes, (1.95, 2.2 + 0.4 * (y - 2.2)), (3.55, y), FRAME_COLOUR)
        _draw_arrow(axes, (6.25, y), (7.7, 2.2 + 0.35 * (y - 2.2)), GRADIENT_COLOUR)
        _draw_arrow(axes, (9.75, 2.2 + 0.35 * (y - 2.2)), (10.3, y), GRADIENT_COLOUR)
        _draw_box(axes, (11.4, y), 2.1, 1.2, f"device {number}:\nsame step", ON_GPU)
    _draw_box(axes, (8.7, 2.2), 2.0, 1.5, "mean of the\ngradients", GRADIENT_COLOUR)
    _label(axes, (2.75, 4.35), "half each", FRAME_COLOUR, "center")
    _label(axes, (8.7, 4.35), "all wait here", GRADIENT_COLOUR, "center")
    return Picture(
        figure,
        "Data parallel: every device has all weights and computes the gradient of its share of the"
        " batch. The devices wait for each other, average their gradients, and make the same step.",
    )


def draw_lock_free() -> Picture:
    """Draw lock-free training: workers read and write the same weights and never wait."""
    figure, axes = _blank_axes(7.4, 2.9, (-0.2, 12.6), (-0.4, 4.6))
    _draw_box(axes, (6.2, 2.1), 2.6, 1.3, "weights in\nshared memory", WEIGHTS_COLOUR)
    for number, x in enumerate((1.4, 11.0), 1):
        _draw_box(axes, (x, 2.1), 2.6, 1.3, f"worker {number}:\nown batch", ON_CPU)
        near = x + (1.35 if number == 1 else -1.35)
        edge = 4.85 if number == 1 else 7.55
        _draw_arrow(axes, (edge, 2.45), (near, 2.45), WEIGHTS_COLOUR)
        _draw_arrow(axes, (near, 1.75), (edge, 1.75), GRADIENT_COLOUR)
        middle = (near + edge) / 2
        _label(axes, (middle, 2.6), "reads", WEIGHTS_COLOUR, "center", "bottom")
        _label(axes, (middle, 1.6), "subtracts its\ngradient", GRADIENT_COLOUR, "center", "top")
    _label(axes, (6.2, 3.9), "nobody waits", INK, "center")
    _label(axes, (6.2, 0.1), "two changes at the same moment: one is lost", INK, "center")
    return Picture(
        figure,
        "Without a lock: two workers read the same weights, and each subtracts its gradient when it"
        " is ready. Nobody waits. If both write at the same moment, one change is lost.",
    )


def draw_model_parallel() -> Picture:
    """Draw model-parallel training: layers on two devices, one of which computes at a time."""
    figure, axes = _blank_axes(7.4, 2.9, (-0.2, 12.6), (-0.4, 4.6))
    _draw_box(axes, (1.0, 2.7), 1.8, 1.3, "batch", FRAME_COLOUR)
    _draw_box(axes, (4.9, 2.7), 2.8, 1.3, "device 1:\nfirst layers", ON_GPU)
    _draw_box(axes, (9.2, 2.7), 2.8, 1.3, "device 2:\nother layers", ON_GPU)
    _draw_arrow(axes, (1.95, 2.7), (3.45, 2.7), FRAME_COLOUR)
    _draw_arrow(axes, (6.35, 2.95), (7.75, 2.95), WEIGHTS_COLOUR)
    _draw_arrow(axes, (7.75, 2.4), (6.35, 2.4), GRADIENT_COLOUR)
    _label(axes, (7.05, 3.1), "forward", WEIGHTS_COLOUR, "center", "bottom")
    _label(axes, (7.05, 2.25), "backward", GRADIENT_COLOUR, "center", "top")
    for y, words, turns in ((1.1, "device 1", FIRST_TURNS), (0.4, "device 2", SECOND_TURN)):
        _label(axes, (2.9, y), f"{words} computes", ON_GPU, "right")
        for left, width in turns:
            axes.barh(y, width, left=left, height=0.45, color=ON_GPU, alpha=0.6)
    return Picture(
        figure,
        "Model parallel: the first layers are on one device, the others on a second. The batch goes"
        " through both and the gradient comes back, so one device computes while the other waits.",
    )


def draw_serving() -> Picture:
    """Draw serving: a copy of the network on each device, and one process that starts them all."""
    figure, axes = _blank_axes(7.4, 3.0, (-0.2, 12.6), (-0.3, 4.9))
    _draw_box(axes, (1.0, 2.2), 1.8, 2.6, "requests", FRAME_COLOUR)
    _draw_box(axes, (4.7, 2.2), 2.4, 1.5, "one Python\nprocess", ON_CPU)
    _draw_arrow(axes, (1.95, 2.2), (3.45, 2.2), FRAME_COLOUR)
    for number, y in enumerate((3.6, 0.9), 1):
        _draw_box(axes, (9.0, y), 2.6, 1.2, f"device {number}:\na copy", ON_GPU)
        _draw_arrow(axes, (5.95, 2.2 + 0.3 * (y - 2.2)), (7.65, y), ON_CPU)
        _draw_arrow(axes, (10.35, y), (11.5, y), FRAME_COLOUR)
        _label(axes, (11.6, y), "answers", FRAME_COLOUR, "left")
    _label(axes, (4.7, 4.35), "starts every operation, one by one", ON_CPU, "center")
    return Picture(
        figure,
        "Serving: each device has a copy of the network and answers its share of the requests."
        " Nothing is averaged, but one Python process starts every operation on every device.",
    )
