"""Checks of the exercises in `07_speed.ipynb`."""

from __future__ import annotations

from companion.exercises.answers import Answer, exercise, fields, near, need, number, pair
from gpulab.device import Placement
from gpulab.store.recorded import recorded_table


@exercise("07-1", "a price of an hour, in the currency in which an hour of the CPU costs 0.10")
def _break_even(answer: Answer) -> str:
    rows = recorded_table("speed").query(
        "part == 'text' and way == 'float32' and unit == 's' and size == 'quick'"
    )
    seconds = rows.groupby("setting").value.median()
    times = seconds.filter(like="cpu").min() / seconds["cuda:tf32=off"]
    mistakes = {
        times: (
            "how many times as dear an hour may be: multiply it by the price of an hour of the CPU"
        ),
        0.1 / times: "the wrong way round: the faster device may cost more",
    }
    near(answer, 0.1 * times, mistakes)
    return (
        f"{0.1 * times:.3g} an hour. `breaks even at`, {times:.3g}, is the same whatever the prices"
        " are."
    )


@exercise("07-2", "{'usual': …, 'words': …, 'width': …}, three placements of gl.device.place")
def _placements(answer: Answer) -> str:
    placed = [
        fields(answer, "usual", "words", "width")[name] for name in ("usual", "words", "width")
    ]
    need(all(isinstance(each, Placement) for each in placed), "these are not three placements")
    usual, words, width = (sum(each.flop.values()) for each in placed)
    need(
        1.8 < words / usual < 2.8,
        "'words' does not about twice the operations: take texts of twice as many words",
    )
    need(
        width / usual > 2.8,
        "'width' does not nearly four times the operations: take a network of twice the width",
    )
    intensities = ", ".join(f"{name} {each.intensity:.3g}" for name, each in answer.items())
    return (
        f"flop per byte: {intensities}. A product's operations grow faster with its width than what"
        " it moves."
    )


@exercise("07-3", "(slow, fast), two rows of the table `recorded`, in seconds")
def _any_number(answer: Answer) -> str:
    slow, fast = (
        fields(row, "what", "way", "size", "value", "unit", "setting", "machine")
        for row in pair(answer)
    )
    need(
        slow["unit"] == fast["unit"] == "s",
        f"{slow['unit']} and {fast['unit']}: two times in seconds are compared",
    )
    for name in ("what", "size"):
        need(
            slow[name] == fast[name],
            f"{slow[name]} against {fast[name]}: that is not the same work",
        )
    need(any(slow[name] != fast[name] for name in ("machine", "setting")), "both are of one device")
    ratio = number(slow["value"]) / number(fast["value"])
    need(abs(ratio * 13.76 - 1) > 0.02, "the inverse: the slow one comes first")
    need(abs(ratio / 13.76 - 1) < 0.02, f"{ratio:.4g} times, which is more than 2 % from 13.76")
    return (
        f"{ratio:.4g} times, by {slow['what']}, {slow['way']}. Among enough pairs there is one for"
        " any number."
    )
