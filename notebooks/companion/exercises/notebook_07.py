"""Checks of the exercises in `07_speed.ipynb`."""

from __future__ import annotations

from companion.exercises.answers import Answer, exercise, fields, near, need, number, pair
from gpulab.device import Placement
from gpulab.store.recorded import recorded_table


@exercise("07-1", "an hourly price, in the currency in which an hour on the CPU costs 0.10")
def _break_even(answer: Answer) -> str:
    rows = recorded_table("speed").query(
        "part == 'text' and way == 'float32' and unit == 's' and size == 'quick'"
    )
    seconds = rows.groupby("setting").value.median()
    times = seconds.filter(like="cpu").min() / seconds["cuda:tf32=off"]
    mistakes = {
        times: (
            "this is the ratio of hourly prices: multiply it by the price of an hour on the CPU"
        ),
        0.1 / times: "this is the inverse: the faster device can cost more",
    }
    near(answer, 0.1 * times, mistakes)
    return (
        f"{0.1 * times:.3g} an hour. The ratio `breaks even at`, {times:.3g}, does not depend on"
        " the prices."
    )


@exercise("07-2", "{'usual': …, 'words': …, 'width': …}, three placements of gl.device.place")
def _placements(answer: Answer) -> str:
    placed = [
        fields(answer, "usual", "words", "width")[name] for name in ("usual", "words", "width")
    ]
    need(
        all(isinstance(each, Placement) for each in placed),
        "expected three placements from gl.device.place",
    )
    usual, words, width = (sum(each.flop.values()) for each in placed)
    need(
        1.8 < words / usual < 2.8,
        "'words' should take about twice as many operations: double the number of words",
    )
    need(
        width / usual > 2.8,
        "'width' should take nearly four times as many operations: double the width of the network",
    )
    intensities = ", ".join(f"{name} {each.intensity:.3g}" for name, each in answer.items())
    return (
        f"flop per byte: {intensities}. As the width grows, the operations of a product grow faster"
        " than the bytes that it moves."
    )


@exercise("07-3", "(slow, fast), two rows of the table `recorded`, in seconds")
def _any_number(answer: Answer) -> str:
    slow, fast = (
        fields(row, "what", "way", "size", "value", "unit", "setting", "machine")
        for row in pair(answer)
    )
    need(
        slow["unit"] == fast["unit"] == "s",
        f"expected two times in seconds, got {slow['unit']} and {fast['unit']}",
    )
    for name in ("what", "size"):
        need(
            slow[name] == fast[name],
            f"{slow[name]} and {fast[name]} are not the same work",
        )
    need(
        any(slow[name] != fast[name] for name in ("machine", "setting")),
        "both times are from the same device",
    )
    ratio = number(slow["value"]) / number(fast["value"])
    need(abs(ratio * 13.76 - 1) > 0.02, "this is the inverse: put the slow one first")
    need(
        abs(ratio / 13.76 - 1) < 0.02,
        f"the ratio is {ratio:.4g}, which is more than 2 % away from 13.76",
    )
    return (
        f"{ratio:.4g} times, from {slow['what']}, {slow['way']}. With enough pairs of times,"
        " some pair gives any ratio that you want."
    )
