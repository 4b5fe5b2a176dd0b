"""Where a training step stands under a device's roofline: what it computes, moves and launches, and how fast."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pandas as pd

from gpulab.audits.steps import PreparedStep, ready
from gpulab.device.rooflines import OperationCounter, roofline, timed
from gpulab.errors import UsageError, check_count
from gpulab.passports import machine, passport
from gpulab.report import Report
from gpulab.settings import Setting


@dataclass(frozen=True, eq=False)
class Placement(Report):
    """Where a training step stands under a device's roofline: what `place` returns. `print` says it in sentences.

    Attributes:
        setting: The setting that the step was done under.
        operations: How many calls of torch's operations compute or move something. One call may be several kernels.
        flop: Floating-point operations by precision, such as `{"float32": 256}`. They are those of products,
            convolutions and attention, by torch's own formulas (`torch.utils.flop_counter`), two for a multiplication
            with its addition. Nothing else counts.
        moved: The bytes that each operation reads and writes, added up. What stays in a cache between two operations is
            counted all the same.
        seconds: The median time of one step, after a warm-up.
        spread: The interquartile range of that time, over the median.
        at_least: The seconds that its bytes (`memory`), its floating-point operations (`arithmetic`) and its `launches`
            would take, each alone at its measured ceiling.
        unknown: The names of operations that multiply and for which torch has no formula.
        roofline: The ceilings, as `gpulab.roofline` measures them.

    Examples:
        >>> import pandas as pd
        >>> import gpulab as gl
        >>> counts = {"operations": 3, "flop": {"float32": 10**9}, "moved": 10**8, "seconds": 0.01, "spread": 0.02}
        >>> floors = {"memory": 0.004, "arithmetic": 0.005, "launches": 0.001}
        >>> found = gl.device.Placement("cpu", **counts, at_least=floors, unknown=(), roofline=pd.DataFrame())
        >>> found.intensity, found.gflops, found.bound, found.reached
        (10.0, 100.0, 'arithmetic', 0.5)
    """

    plots = "gpulab.plots.instruments"

    setting: str  # what it was done under
    operations: int  # calls of torch's operations that compute or move something; one may be several kernels
    # By precision, by torch's own formulas (`torch.utils.flop_counter`): products, convolutions and attention, two for
    # a multiplication with its addition; nothing else counts.
    flop: dict[str, int]
    # Bytes that each operation reads and writes. What stays in a cache between two operations is counted all the same.
    moved: int
    seconds: float  # the median of one step after a warm-up
    spread: float  # the interquartile range over that
    # The seconds that its bytes (`memory`), its FLOP (`arithmetic`) and its `launches` would take, each alone at its
    # measured ceiling.
    at_least: dict[str, float]
    unknown: tuple[str, ...]  # operations that multiply, for which torch has no formula
    roofline: pd.DataFrame  # the ceilings, from `gpulab.roofline`

    @property
    def intensity(self) -> float:
        """Floating-point operations per byte moved."""
        return sum(self.flop.values()) / max(1, self.moved)

    @property
    def gflops(self) -> float:
        """The rate that the step reached, in Gflop/s."""
        return sum(self.flop.values()) / self.seconds / 1e9

    @property
    def reached(self) -> float:
        """The share of the roof that the step reached; more than 1 where caches are faster than the memory measured.

        Arithmetic in the step's precisions sets the roof, or memory at the step's intensity.
        """
        return max(self.at_least["memory"], self.at_least["arithmetic"]) / self.seconds

    @property
    def launch_share(self) -> float:
        """The share of the time that launching the step's operations takes at least."""
        return self.at_least["launches"] / self.seconds

    @property
    def bound(self) -> str:
        """What would take longest, each at its ceiling, of `memory`, `arithmetic` and `launches`."""
        return max(self.at_least, key=self.at_least.__getitem__)

    def __str__(self) -> str:
        kinds = ", ".join(f"{name} {flop / 1e9:.3g}" for name, flop in self.flop.items())
        floors = ", ".join(f"its {name} {1e3 * seconds:.3g} ms" for name, seconds in self.at_least.items())
        lines = [
            f"The step takes {1e3 * self.seconds:.3g} ms (spread {self.spread:.0%}) under {self.setting}: "
            f"{self.operations} operations, {self.moved / 1e6:.3g} MB moved, Gflop: {kinds or 'none'}.",
            f"At the ceilings measured, each alone: {floors}. It is bound by {self.bound}.",
            f"{self.intensity:.3g} flop per byte, {self.gflops:.3g} Gflop/s, {self.reached:.0%} of the roof; launches "
            f"take {self.launch_share:.0%} of the time or more.",
        ]
        if self.reached > 1:
            lines.append("More than the roof: between operations, tensors stay in a cache faster than memory.")
        if self.unknown:
            lines.append(f"Not counted, for torch has no formula: the FLOP of {', '.join(self.unknown)}.")
        return "\n".join(lines)


def place(step: Callable[..., Any], ceilings: pd.DataFrame | Setting | str = "cpu", repeats: int = 7) -> Placement:
    """Find out what holds a training step back: memory, arithmetic, or the launching of its operations.

    The step's operations and bytes are counted, its time is measured, and both are compared with what the device can do
    at most. The step is done a dozen times and more, and once of these under torch's FLOP counter. A `Step` is left as
    it was, and begins without gradients each time. Of a function of your own, the model trains on.

    Args:
        step: A `Step`, or a function that does one training step, as for `gpulab.record`.
        ceilings: What the device can do: a data frame from `gpulab.roofline` on this machine, of one setting, under
            which the step is done. Or a setting, whose roofline is measured now.
        repeats: How many batches of calls are timed, at least 2.

    Returns:
        The `Placement`, which prints as sentences.

    Raises:
        UsageError: For ceilings of several settings or of another machine, for fewer than 2 repeats, and for products
            in a format whose ceiling was not measured.
        GpulabError: For a setting that cannot run here.

    Examples:
        >>> import pandas as pd
        >>> import torch
        >>> import gpulab as gl
        >>> ceilings = pd.DataFrame(  # as of gpulab.roofline("cpu"), which takes seconds
        ...     {
        ...         "operation": ["copy", "matrix product 1024, float32", "launch"],
        ...         "kind": ["memory", "precision", "launch"],
        ...         "precision": ["", "float32", ""],
        ...         "gigabytes_per_second": [20.0, 0.5, 0.01],
        ...         "gflops": [0.0, 100.0, 0.001],
        ...         "seconds": [1e-2, 2e-2, 1e-6],
        ...         "setting": "cpu",
        ...     }
        ... )
        >>> weight = torch.ones(8, 4, requires_grad=True)
        >>> found = gl.device.place(lambda: (torch.ones(2, 4) @ weight.T).sum().backward(), ceilings)
        >>> found.flop, found.bound
        ({'float32': 256}, 'launches')

    References:
        Williams, Waterman, Patterson 2009, *Roofline* (Communications of the ACM 52:4).
    """
    check_count("repeats", repeats)
    frame = roofline(ceilings) if isinstance(ceilings, Setting | str) else ceilings
    settings = list(frame.setting.unique())
    if len(settings) != 1:
        raise UsageError(f"ceilings of {', '.join(settings) or 'nothing'}: expected those of one setting")
    setting = Setting.parse(settings[0])
    this_machine = machine(passport(), setting.kind)
    if elsewhere := sorted(set(frame.get("machine", ())) - {this_machine}):
        raise UsageError(f"ceilings of {elsewhere[0]}: the step runs on {this_machine}; measure gpulab.roofline here")
    with setting.apply(), ready(step, setting) as once:

        def again() -> None:
            if isinstance(once, PreparedStep):
                once.model.zero_grad()
            once()

        again()  # what is made in the first step alone, such as Adam's moments, is none of its operations
        with OperationCounter() as counter:
            again()
        seconds, spread = timed(setting, again, repeats)
    flop = dict(counter.flop.most_common())
    at_least = {
        "memory": counter.moved / (1e9 * frame[frame.kind == "memory"].gigabytes_per_second.max()),
        "arithmetic": sum(number / (1e9 * _peak(frame, precision)) for precision, number in flop.items()),
        "launches": counter.operations * frame[frame.operation == "launch"].seconds.iloc[0],
    }
    counts = str(setting), counter.operations, flop, counter.moved
    return Placement(*counts, seconds, spread, at_least, tuple(sorted(counter.unknown)), frame)


def _peak(frame: pd.DataFrame, precision: str) -> float:
    """The highest rate measured in a precision, in Gflop/s."""
    rows = frame[frame.precision == precision]
    if rows.empty:
        measured = ", ".join(sorted(set(frame.precision) - {""}))
        raise UsageError(f"products in {precision}: there are ceilings of {measured} alone")
    return rows.gflops.max()
