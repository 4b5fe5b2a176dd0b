"""What holds memory along training steps: its peak, who made what is there, and what stays from step to step."""

from __future__ import annotations

import contextlib
import gc

import pandas as pd
import psutil
import torch
from markupsafe import Markup
from torch.autograd.graph import saved_tensors_hooks
from torch.optim.optimizer import register_optimizer_step_post_hook

from gpulab.diagnostics.followers import Follower, unpack
from gpulab.diagnostics.ledgers import KINDS, RISES, Blocks, Leak, Ledger, in_words
from gpulab.errors import UsageError
from gpulab.report import Report, paragraphs, table
from gpulab.settings import Setting

SHOWN = 6  # lines of a report


def memory_watch(device: Setting | str = "cpu") -> MemoryWatch:
    """A context manager that sees what holds memory on a device: the peak, its lines, and leaks.

    Call `step()` at the end of each training step, or give it to `gpulab.train` as `watch=lambda *_: watch.step()`.
    On a CPU it follows every tensor that torch's operations make or meet, until its memory is freed, and begins with
    all tensors that there are. On CUDA the bytes are those of torch's memory snapshots, which see what kernels
    allocate for themselves, too; recording these begins and ends with the block. Operations become slower: watch a
    few dozen steps.

    It does not see the memory that NumPy or a C library holds, nor on a CPU what a kernel takes while it runs; the
    resident memory of the whole process (RSS) stands beside what it sees.

    What autograd saves is seen through torch's hooks for saved tensors. Inside another's such hooks (`gpulab.guard`,
    `save_on_cpu`, checkpointing) these apply in its place, and what they keep counts as other.

    Args:
        device: `cpu`, `cuda` or `cuda:1`; options of a setting do not matter.

    Returns:
        A `MemoryWatch`, to be used in a `with` statement, and printed, plotted or saved after it.

    Raises:
        UsageError: for a device without such an instrument.
        GpulabError: for one that this machine lacks.

    Examples:
        >>> model = torch.nn.Linear(100, 100)
        >>> kept = []
        >>> with memory_watch() as watch:
        ...     for _ in range(6):
        ...         kept.append(model(torch.ones(5, 100)))
        ...         watch.step()
        >>> watch.leaks[0].rate >= 5 * 100 * 4, watch.leaks[0].held_by_python
        (True, True)
    """
    return MemoryWatch(Setting.parse(device))


class MemoryWatch(Report):
    """What held memory; see `memory_watch`.

    Attributes:
        peak_bytes: the most that was held at a time, and in which step (`peak_step`).
        before_bytes: what of that was there before the watch.
        peak: a row for each `kind` and `line` with the `bytes` held at the peak, the largest first. The kinds are
            parameters (of modules that were there before, buffers, too), gradients, optimizer state, what was saved
            for backward, and other; the lines are those that made it, of a backward pass those that it differentiates.
        steps: a row a step: `step`, `bytes` held after it, and `rss`, the resident memory of the process.
        leaks: see `Leak`.
    """

    def __init__(self, setting: Setting) -> None:
        if setting.kind not in ("cpu", "cuda"):
            raise UsageError(f"device {setting.device!r}: memory is watched on cpu and cuda")
        setting.check()
        self.device = torch.device(setting.device)
        if setting.kind == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.leaks: list[Leak] = []
        self._open = contextlib.ExitStack()

    def __enter__(self) -> MemoryWatch:
        self._follower = follower = Follower(self.device)
        self._rows: list[tuple[int, int, int]] = []
        self._rss = [psutil.Process().memory_info().rss]
        follower.meet_what_there_is()
        self._blocks = None
        if self.device.type == "cuda":
            torch.cuda.memory._record_memory_history("all", stacks="python")
            self._open.callback(torch.cuda.memory._record_memory_history, None)
            self._blocks = Blocks(torch.cuda.memory._snapshot(), self.device.index, follower.take_addresses())
        self._open.callback(follower.close)
        self._open.callback(register_optimizer_step_post_hook(follower.optimizer_stepped).remove)
        self._open.enter_context(saved_tensors_hooks(follower.pack, unpack))
        self._open.enter_context(follower)
        return self

    def step(self) -> None:
        """Mark the end of a training step."""
        self._catch_up()
        rss = psutil.Process().memory_info().rss
        self._rows.append((self._ledger.step, self._ledger.total, rss))
        self._ledger.mark()
        if self._blocks:
            self._follower.ledger.mark()

    def __exit__(self, *_: object) -> None:
        try:
            self._catch_up()
            self._conclude()
        finally:
            self._open.close()

    @property
    def _ledger(self) -> Ledger:
        return self._blocks.ledger if self._blocks else self._follower.ledger

    def _catch_up(self) -> None:
        if self._blocks:
            self._blocks.replay(torch.cuda.memory._snapshot(), self._follower.take_addresses())

    def _conclude(self) -> None:
        ledger = self._ledger
        self.steps = pd.DataFrame(self._rows, columns=["step", "bytes", "rss"])
        self.peak_bytes, self.peak_step = ledger.peak, ledger.peak_step
        pieces = list(ledger.at_peak())
        self.before_bytes = sum(piece.size for piece in pieces if piece.step == 0)
        rows = pd.DataFrame([(p.origin.kind, p.origin.line, p.size) for p in pieces], columns=["kind", "line", "bytes"])
        sums = rows.groupby(["kind", "line"], as_index=False).bytes.sum()
        self.peak = sums.sort_values("bytes", ascending=False, ignore_index=True)
        self.leaks = ledger.leaks()
        if self.leaks:
            gc.collect()
            self._catch_up()
            held = self._follower.lines_held_by_python()
            for leak in self.leaks:
                leak.collected = sum(piece.size for piece in ledger.old(leak.line)) < leak.held[-1] / 2
                leak.held_by_python = leak.line in held
        self._rss.append(psutil.Process().memory_info().rss)

    # --- what it says ----------------------------------------------------------------------------------------

    @property
    def growth(self) -> float:
        """Bytes more after each step, from the second to the last; 0 with fewer than two."""
        held = self.steps.bytes
        return float((held.iloc[-1] - held.iloc[1]) / (len(held) - 2)) if len(held) > 2 else 0.0

    @property
    def headline(self) -> str:
        """The peak and the worst leak."""
        peak = f"Peak {in_words(self.peak_bytes)} in step {self.peak_step}"
        if not self.leaks:
            return f"{peak}; {self._no_leak()}"
        return f"{peak}; a leak of {in_words(sum(leak.rate for leak in self.leaks))} a step"

    def _no_leak(self) -> str:
        count = len(self.steps)
        return f"no leak in {count} steps" if count > RISES else f"{count} steps are too few to see a leak"

    def __str__(self) -> str:
        kinds = self.peak.groupby("kind").bytes.sum().reindex(KINDS).dropna()
        shares = ", ".join(f"{kind} {size / max(1, self.peak_bytes):.0%}" for kind, size in kinds.items())
        lines = [
            f"Peak {in_words(self.peak_bytes)} on {self.device} in step {self.peak_step}, "
            f"{in_words(self.before_bytes)} of it there before: {shares}."
        ]
        rows = self.peak.head(SHOWN).itertuples()
        lines += [f"  {in_words(row.bytes)}, {row.kind}: {row.line or 'no line known'}" for row in rows]
        if len(self.steps):
            first, last, more = map(in_words, (self.steps.bytes.iloc[0], self.steps.bytes.iloc[-1], self.growth))
            lines.append(
                f"Held: {first} after the first step, {last} after the last, {more} more a step since the second."
            )
        lines += self._findings() or [f"{self._no_leak()[0].upper()}{self._no_leak()[1:]}."]
        rss = f"The process's resident memory went from {in_words(self._rss[0])} to {in_words(self._rss[1])}"
        if self._blocks:
            seen = "torch's memory snapshots. Not seen: what other libraries allocate, such as NCCL"
        else:
            seen = "every tensor of torch's operations. Not seen: NumPy's memory, C libraries', and what kernels take"
        return "\n".join([*lines, f"Seen: {seen}. {rss}."])

    def _findings(self) -> list[str]:
        """A sentence a leak: first what the program holds, then what hangs on it."""
        found = []
        for leak in sorted(self.leaks, key=lambda leak: not leak.held_by_python)[:SHOWN]:
            words = (
                f"A leak: {in_words(leak.rate)} more a step stay of what was made in {leak.line or 'an unknown line'}"
            )
            if leak.collected:
                words += "; reference cycles held it until Python's collector ran (gc.collect)"
            elif not leak.held_by_python:
                words += "; no tensor of the program holds it, but the graph of one: keep loss.item() or x.detach()"
            found.append(f"{words}.")
        return found

    def html(self) -> str:
        """The sentences, and what was held at the peak as a table."""
        return paragraphs(str(self).splitlines()) + Markup(table(self.peak.head(20)))
