"""Counts what a guard does not watch, and what runs differently because of the guard.

While a guard is active, functions that start processes, threads, CUDA graphs and so on are replaced
by functions that count the call and then make it.
"""

from __future__ import annotations

import functools
import multiprocessing
import sys
import threading
import types
from collections.abc import Callable
from contextlib import ExitStack

import torch

from gpulab._torch_internals import Nested, is_compiler_loaded, report_skipped_frames, uncompiled
from gpulab.guards._call_sites import is_user_file

POOL_MODULES = ("concurrent.futures.thread", "multiprocessing.pool")
COMPILED_CODE = "compiled code"
SENTENCES = {  # the sentence for each kind; `{count}` stands for a phrase of `COUNT_PHRASES`
    COMPILED_CODE: (
        "torch.compile was switched off: compiled code ran uncompiled, because"
        ' reads="any" watches each operation; to guard compiled code, use reads="backward"'
        " (gpulab guard --reads backward)"
    ),
    "processes": (
        "not watched: {count} that this program started, such as the workers of a DataLoader; with"
        " num_workers=0 the loader works in this process"
    ),
    "threads": (
        "not watched: {count} that this program started; enter the same guard in every thread"
    ),
    "hooks": (
        "not watched: tensors saved inside {count} with other saved-tensor hooks, such as"
        " save_on_cpu, because torch calls only the innermost hooks"
    ),
    "CUDA graphs": (
        "not watched: memory read and written by {count} of a CUDA graph, because a replay is not"
        " an operation of this program"
    ),
    "TorchScript": (
        "not watched: tensors saved internally by {count} of torch.jit; call the original function"
        " instead"
    ),
}
COUNT_PHRASES = {  # singular and plural
    COMPILED_CODE: ("", ""),
    "processes": ("1 process", "{count} processes"),
    "threads": ("1 thread", "{count} threads"),
    "hooks": ("1 block", "{count} blocks"),
    "CUDA graphs": ("1 replay", "{count} replays"),
    "TorchScript": ("1 function", "{count} functions"),
}


class BlindSpots:
    """Counts what a guard does not watch between `start` and `stop`; threads may share an instance.

    Attributes:
        counts: The number of occurrences of each kind. The kinds are the keys of `SENTENCES`.
    """

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.guarded_threads: set[int] = set()
        self._started_threads: list[threading.Thread] = []
        self._entry_count = 0
        self._originals = ExitStack()
        self._lock = threading.RLock()
        self._is_listening_to_compiler = False

    def start(self, keeps_compiled: bool) -> None:
        """Count from now on; nested calls count only once.

        Args:
            keeps_compiled: Whether compiled code stays compiled inside the guard. If it does not,
                the code that runs uncompiled is counted.
        """
        with self._lock:
            self.guarded_threads.add(threading.get_ident())
            self._entry_count += 1
            if self._entry_count == 1:
                self._observe_calls()
                if not keeps_compiled:
                    self._observe_compiler()

    def _observe_calls(self) -> None:
        """Observe calls that start something unwatched: processes, threads, hooks and so on."""
        for owner, name, kind in COUNTED_FUNCTIONS:
            self._call_before(owner, name, self._counter_of(kind))
        self._call_before(threading.Thread, "start", self._record_thread)
        self._call_before(torch.autograd.graph.saved_tensors_hooks, "__enter__", self._record_hooks)

    def _observe_compiler(self) -> None:
        """Count compiled code that runs uncompiled, once the compiler is loaded."""
        for owner in (torch, torch.nn.Module):
            self._call_before(owner, "compile", self._on_compile)
        if is_compiler_loaded():
            self._listen_to_compiler()

    def stop(self) -> None:
        """Undo one call of `start`; the last one restores the replaced functions."""
        with self._lock:
            self._entry_count -= 1
            if not self._entry_count:
                self._originals.close()
                self._is_listening_to_compiler = False

    def sentences(self) -> list[str]:
        """Return a sentence for each kind that was not watched, or ran differently."""
        counts = dict(self.counts)
        unguarded = [
            thread for thread in self._started_threads if thread.ident not in self.guarded_threads
        ]
        if unguarded:
            counts["threads"] = len(unguarded)
        sentences = []
        for kind, words in SENTENCES.items():
            count = counts.get(kind, 0)
            if count:
                singular, plural = COUNT_PHRASES[kind]
                phrase = singular if count == 1 else plural.format(count=count)
                sentences.append(words.format(count=phrase))
        return sentences

    def count(self, kind: str) -> None:
        """Increase the count of a kind by one."""
        with self._lock:
            self.counts[kind] = self.counts.get(kind, 0) + 1

    def _call_before(
        self, owner: type | types.ModuleType, name: str, observer: Callable[..., None]
    ) -> None:
        """Replace a function by one that first calls `observer` with the same arguments."""
        original = vars(owner).get(name)
        if original is None:  # This version of torch does not have the function.
            return

        @functools.wraps(original)
        def wrapper(*args: Nested, **kwargs: Nested) -> Nested:
            observer(*args)
            return original(*args, **kwargs)

        setattr(owner, name, uncompiled(wrapper))
        self._originals.callback(setattr, owner, name, original)

    def _counter_of(self, kind: str) -> Callable[..., None]:
        """Return a function that takes any arguments and counts one occurrence of a kind."""
        return lambda *_: self.count(kind)

    def _record_thread(self, thread: threading.Thread, *_: object) -> None:
        """Record a thread that the user's program or a pool starts, and ignore other threads."""
        caller = sys._getframe(2)  # the caller of the function that replaces `Thread.start`
        if (
            is_user_file(caller.f_code.co_filename)
            or caller.f_globals.get("__name__") in POOL_MODULES
        ):
            self._started_threads.append(thread)

    def _record_hooks(self, hooks: object, *_: object) -> None:
        """Count hooks for saved tensors that hide tensors from the guard."""
        # Checkpointing recomputes what it has not saved, so its hooks hide nothing from the guard.
        if not type(hooks).__module__.startswith("torch.utils.checkpoint"):
            self.count("hooks")

    def _on_compile(self, *_: object) -> None:
        """Start counting compiled code when the program calls `compile` for the first time."""
        with self._lock:
            self._listen_to_compiler()

    def _listen_to_compiler(self) -> None:
        """Count compiled code that runs uncompiled, from the first call until `stop`."""
        if not self._is_listening_to_compiler:
            self._is_listening_to_compiler = True
            self._originals.callback(
                report_skipped_frames(functools.partial(self.count, COMPILED_CODE))
            )


COUNTED_FUNCTIONS: list[tuple[type | types.ModuleType, str, str]] = [
    (multiprocessing.process.BaseProcess, "start", "processes"),
    (torch.cuda.CUDAGraph, "replay", "CUDA graphs"),
    *((torch.jit, name, "TorchScript") for name in ("script", "trace", "load")),
]
