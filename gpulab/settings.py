"""Settings: everything that may change the arithmetic but should not change the result.

A setting is written as text, `cuda:1:tf32=off,deterministic=on`, applied with `gpulab.setting`, and every global
flag is as it was afterwards. torch is imported only when a setting is applied, because the instruction set of a
CPU is chosen through the environment before torch loads.
To add an option, add a field to `Setting`: all there is to know about it stands there.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, fields
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from gpulab.errors import GpulabError, UsageError

if TYPE_CHECKING:
    import torch

DEVICES = ("cpu", "cuda", "mps", "xpu")
PRECISIONS = ("float32", "float64", "bfloat16")

TF32_CARDS = ("ampere", "hopper")  # that can be emulated

ISA_VARIABLES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")  # ATen's, oneDNN's, MKL's
ISA_VALUES = {
    "sse4": ("default", "SSE41", "SSE4_2"),
    "avx2": ("avx2", "AVX2", "AVX2"),
    "avx512": ("avx512", "AVX512_CORE", "AVX512"),
}
ISA_CPU_FLAG = {"sse4": "sse4_2", "avx2": "avx2", "avx512": "avx512f"}
WORKSPACE, REPEATABLE = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"  # cuBLAS reads it once, at start

WORTH_COMPARING = ["cpu", "cpu:threads=1", "cpu:isa=avx2", "cpu:precision=float64"]
WORTH_COMPARING += ["cuda:tf32=off", "cuda:tf32=on", "cuda:cudnn=off", "cuda:deterministic=on", "mps", "xpu"]

# --- how an option's text is read ------------------------------------------------------------------------


def _number(name: str, text: str) -> int:
    if not re.fullmatch(r"[1-9]\d{0,3}", text):
        raise UsageError(f"{name}={text!r} must be a number from 1 to 9999")
    return int(text)


def _arithmetic(name: str, text: str) -> str:
    if not text:
        raise UsageError(f"{name} needs a value, such as emulate=tf32 or order=pairwise")
    return text


def _lines(name: str, text: str) -> str:
    if not re.fullmatch(r"[^+:=]+\.py:\d+(\+[^+:=]+\.py:\d+)*", text):
        raise UsageError(f"{name}={text!r} must name lines of files, such as model.py:12 or model.py:12+loss.py:3")
    return "+".join(sorted(set(text.split("+"))))


def _one_of(choices: Iterable[str], name: str, text: str) -> str:
    if text not in choices:
        raise UsageError(f"{name}={text!r} must be one of {', '.join(choices)}")
    return text


def _on_or_off(name: str, text: str) -> bool:
    return _one_of(("on", "off"), name, text) == "on"


# --- how an option is put in force: what it changes, or could be changed inside, is put back by the stack -----


def _threads(setting: Setting, stack: ExitStack) -> None:
    import torch

    usual = torch.get_num_threads()
    stack.callback(torch.set_num_threads, usual)
    if (threads := setting.threads or min(usual, _granted_cores())) != usual:
        torch.set_num_threads(threads)


@cache
def _granted_cores() -> int:
    """Those that this process may use: a container's quota counts, which torch does not see."""
    from joblib import cpu_count

    return cpu_count()


def _default_dtype(setting: Setting, stack: ExitStack) -> None:
    import torch

    stack.callback(torch.set_default_dtype, torch.get_default_dtype())
    if setting.precision is not None:
        torch.set_default_dtype(setting.dtype)


def _cudnn(setting: Setting, stack: ExitStack) -> None:
    from torch.backends import cudnn

    stack.callback(setattr, cudnn, "enabled", cudnn.enabled)
    if setting.cudnn is not None:
        cudnn.enabled = setting.cudnn


def _deterministic(setting: Setting, stack: ExitStack) -> None:
    import torch
    from torch.backends import cudnn

    def algorithms() -> tuple[bool, bool]:
        return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()

    before, workspace = algorithms(), os.environ.get(WORKSPACE)
    stack.callback(setattr, cudnn, "benchmark", cudnn.benchmark)
    stack.callback(setattr, cudnn, "deterministic", cudnn.deterministic)

    @stack.callback
    def restore() -> None:
        if algorithms() != before:  # the call imports torch's compiler: 150 MB
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        os.environ.pop(WORKSPACE, None)
        os.environ.update({} if workspace is None else {WORKSPACE: workspace})

    if setting.deterministic is not None:
        torch.use_deterministic_algorithms(setting.deterministic)
        cudnn.deterministic = setting.deterministic
    if setting.deterministic:
        cudnn.benchmark = False  # the benchmark picks a kernel by a race
        os.environ.setdefault(WORKSPACE, REPEATABLE)


def _tf32(setting: Setting, stack: ExitStack) -> None:
    """Switches both of torch's interfaces; what has not changed is left alone, for writing a value pins it."""
    import torch

    torch_backends: Any = torch.backends
    matmul, cudnn, on_cpu = torch_backends.cuda.matmul, torch_backends.cudnn, torch_backends.mkldnn.matmul
    backends = (matmul, cudnn.conv, cudnn.rnn)

    def readable(read: Callable[[], Any]) -> Any:
        try:
            return read()
        except RuntimeError:  # the old interface refuses to be read once the new one has been used
            return None

    def old_interface() -> tuple[bool, bool, str]:
        return matmul.allow_tf32, cudnn.allow_tf32, torch.get_float32_matmul_precision()

    every = (*backends, on_cpu)  # which `set_float32_matmul_precision` sets as well
    old, new = readable(old_interface), [backend.fp32_precision for backend in every]

    @stack.callback
    def restore() -> None:
        if old is not None and old != readable(old_interface):
            matmul.allow_tf32, cudnn.allow_tf32, precision = old
            if readable(torch.get_float32_matmul_precision) != precision:  # unreadable if switched after "medium"
                torch.set_float32_matmul_precision(precision)
        for backend, precision in zip(every, new, strict=True):
            if backend.fp32_precision != precision:
                backend.fp32_precision = precision

    if setting.tf32 is not None and old is None:
        for backend in backends:
            backend.fp32_precision = "tf32" if setting.tf32 else "ieee"
    elif setting.tf32 is not None:  # this sets the new interface as well, so that both can still be read
        matmul.allow_tf32 = cudnn.allow_tf32 = setting.tf32


def _emulation(setting: Setting, stack: ExitStack) -> None:
    if setting.emulated:
        from gpulab.numerics.emulation import emulate

        stack.enter_context(emulate(setting.emulate or "float32", order=setting.order))


def _float32_lines(setting: Setting, stack: ExitStack) -> None:
    if setting.float32:
        from gpulab.numerics.call_sites import Float32Lines

        stack.enter_context(Float32Lines(setting.float32.split("+"), float32_products))


def _denormals(setting: Setting, stack: ExitStack) -> None:
    """Every thread has a flag of its own, and `torch.set_flush_denormal` sets it in the thread that calls it alone."""
    import torch

    if setting.denormals is None:
        return
    before = not _keeps_denormals(1)
    stack.callback(_flush_denormals, before)
    _flush_denormals(not setting.denormals)
    if _keeps_denormals(threads := torch.get_num_threads()) != setting.denormals:
        raise GpulabError(
            f"setting {str(setting)!r}: this machine cannot switch denormal numbers off in all of its {threads} "
            "threads; one may be enough: add threads=1"
        )


def _keeps_denormals(threads: int) -> bool | None:
    """Whether products that are denormal numbers come out as such; None where some do and some do not."""
    import torch

    long = torch.full((threads << 16,), 1e-30, dtype=torch.float32)  # so that each thread computes a part of it
    kept = (long * 1e-10).ne(0)
    return bool(kept[0]) if kept.min() == kept.max() else None


def _flush_denormals(flush: bool) -> None:
    """In this thread and those that compute for it, which OpenMP keeps."""
    import torch
    from threadpoolctl import threadpool_info  # type: ignore[import-untyped]

    torch.set_flush_denormal(flush)

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def in_a_thread(_: int) -> None:
        torch.set_flush_denormal(flush)

    for library in threadpool_info():
        if library["user_api"] == "openmp":
            with contextlib.suppress(AttributeError):  # a runtime without it: whether all has been switched is checked
                ctypes.CDLL(library["filepath"]).GOMP_parallel(in_a_thread, None, torch.get_num_threads(), 0)


def _isa_variables(setting: Setting) -> dict[str, str]:
    return dict(zip(ISA_VARIABLES, ISA_VALUES[setting.isa or ""], strict=True))


def _workspace(setting: Setting) -> dict[str, str]:
    return {WORKSPACE: REPEATABLE} if setting.kind == "cuda" and setting.deterministic else {}


# --- settings --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Option:
    """An option: the devices it has a meaning on, how its name and text give a value, and how that is put in force.

    `in_force` has the stack put back whatever flags of this option are changed inside, also where the setting
    leaves the option open (`None`); `environment` are the variables that a process must start with.
    """

    devices: tuple[str, ...]
    parse: Callable[[str, str], Any]
    in_force: Callable[[Setting, ExitStack], None] = lambda *_: None
    environment: Callable[[Setting], dict[str, str]] = lambda _: {}


def _option(*arguments: Any, **more: Any) -> Any:
    return field(default=None, metadata={"option": Option(*arguments, **more)})


@dataclass(frozen=True)
class Setting:
    """Where and how to compute. `None` leaves a flag as the process has it.

    Examples:
        >>> Setting.parse("cuda:1:deterministic=on,tf32=off")
        Setting('cuda:1:tf32=off,deterministic=on')
        >>> Setting.parse("cpu:threads=1").threads
        1
        >>> str(Setting.parse("cpu"))
        'cpu'
    """

    device: str = "cpu"
    threads: int | None = _option(("cpu",), _number, _threads, lambda s: {"OMP_NUM_THREADS": str(s.threads)})
    isa: str | None = _option(("cpu",), partial(_one_of, ISA_VALUES), environment=_isa_variables)
    tf32: bool | None = _option(("cuda",), _on_or_off, _tf32)
    cudnn: bool | None = _option(("cuda",), _on_or_off, _cudnn)
    denormals: bool | None = _option(("cpu",), _on_or_off, _denormals)
    deterministic: bool | None = _option(DEVICES, _on_or_off, _deterministic, _workspace)
    precision: str | None = _option(DEVICES, partial(_one_of, PRECISIONS), _default_dtype)
    emulate: str | None = _option(DEVICES, _arithmetic, _emulation)
    order: str | None = _option(DEVICES, _arithmetic)  # put in force by `emulate`
    float32: str | None = _option(DEVICES, _lines, _float32_lines)  # lines whose products keep it, backward too

    def __post_init__(self) -> None:
        if not re.fullmatch(r"cpu|mps|xpu|cuda(:\d+)?", str(self.device)):
            raise UsageError(f"device {self.device!r}: Setting.parse({str(self.device)!r}) reads a text with options")

    @classmethod
    def parse(cls, text: str | Setting | AbstractContextManager[Setting]) -> Setting:
        """Read `device[:index][:option=value,…]`; a malformed text raises `UsageError`."""
        if isinstance(text, _UnenteredSetting):
            return text.parsed
        if isinstance(text, Setting):
            return text
        try:
            return cls._read(str(text))
        except UsageError as error:
            raise UsageError(f"setting {text!r}: {error}") from None

    @classmethod
    def _read(cls, text: str) -> Setting:
        match = re.fullmatch(r"\s*(cpu|mps|xpu|cuda)(?:(?<=cuda):(\d+))?\s*(?::(.+))?", text)
        if not match:
            raise UsageError(
                "expected a device (cpu, cuda, cuda:0, mps, xpu) and, after a colon, options such as cpu:threads=1 or "
                "cuda:tf32=off,cudnn=off"
            )
        kind, index, options = match.groups()
        values: dict[str, Any] = {}
        for option in options.split(",") if options else ():
            name, _, value = (part.strip() for part in option.partition("="))
            if name in values:
                raise UsageError(f"{name!r} is given twice")
            if name not in OPTIONS:
                raise UsageError(f"no option {name!r}; there are {', '.join(OPTIONS)}")
            values[name] = OPTIONS[name].parse(name, value)
        for name in values:
            emulated = name == "tf32" and values.get("emulate") in TF32_CARDS
            if kind not in OPTIONS[name].devices and not emulated:
                also = f", and with emulate={' or '.join(TF32_CARDS)}" if name == "tf32" else ""
                raise UsageError(f"{name!r} has a meaning on {', '.join(OPTIONS[name].devices)} only{also}")
        if values.get("precision", "float32") != "float32" and {"emulate", "order"} & set(values):
            raise UsageError("what is emulated is the arithmetic of float32 numbers: leave precision away")
        return cls(f"{kind}:{int(index)}" if index else kind, **values)

    def __str__(self) -> str:
        values = ((name, getattr(self, name)) for name in OPTIONS)
        options = [f"{name}={'on' if v is True else 'off' if v is False else v}" for name, v in values if v is not None]
        return f"{self.device}:{','.join(options)}" if options else self.device

    def __repr__(self) -> str:
        return f"Setting({str(self)!r})"

    @property
    def kind(self) -> str:
        """The device without its index: `cpu`, `cuda`, `mps` or `xpu`."""
        return self.device.partition(":")[0]

    @property
    def emulated(self) -> bool:
        """Whether another chip's arithmetic is imitated (`gpulab.emulate`)."""
        return self.emulate is not None or self.order is not None

    @property
    def dtype(self) -> torch.dtype:
        """The floating-point type to compute in."""
        import torch

        return getattr(torch, self.precision or "float32")

    def environment(self) -> dict[str, str]:
        """The variables that a process must be started with for this setting to hold in full."""
        options = [option for name, option in OPTIONS.items() if getattr(self, name) is not None]
        return {name: value for option in options for name, value in option.environment(self).items()}

    def prepare(self) -> None:
        """Put `environment` in force in this process, if torch has not been loaded yet."""
        if "torch" not in sys.modules:
            os.environ.update(self.environment())

    def check(self) -> None:
        """Raise `GpulabError`, naming what this machine lacks for the setting."""
        import torch

        missing = None
        if self.kind == "cuda":
            count = torch.cuda.device_count()
            if count == 0:
                missing = "no CUDA or ROCm GPU that this build of torch can use"
            elif int(self.device.partition(":")[2] or 0) >= count:
                missing = f"only {count} CUDA GPU(s), numbered from 0"
            elif self.cudnn and not torch.backends.cudnn.is_available():
                missing = "no cuDNN"
        elif self.kind == "mps" and not torch.backends.mps.is_available():
            missing = "no Apple GPU (mps)"
        elif self.kind == "mps" and self.precision == "float64":
            missing = "no float64 on its Apple GPU"
        elif self.kind == "xpu" and not torch.xpu.is_available():
            missing = "no Intel GPU (xpu)"
        elif self.isa and ISA_CPU_FLAG[self.isa] not in cpu_flags():
            missing = f"no {self.isa} instructions"
        if missing:
            raise GpulabError(f"setting {str(self)!r} cannot run here: this machine has {missing}")
        if self.emulated:
            from gpulab.numerics.arithmetic import arithmetic_of

            arithmetic_of(self.emulate or "float32", self.order)
        variables = _isa_variables(self) if self.isa else {}
        if any(os.environ.get(name) != value for name, value in variables.items()):
            command = " ".join(f"{name}={value}" for name, value in variables.items())
            raise GpulabError(
                f"setting {str(self)!r}: a process chooses its instruction set when it starts. Use "
                f"gpulab.Experiment or the gpulab command, or start Python with {command}"
            )

    @contextlib.contextmanager
    def apply(self) -> Iterator[Setting]:
        """Compute under this setting inside the `with` block; afterwards every flag is restored."""
        import torch

        self.check()
        with ExitStack() as stack:
            for option in OPTIONS.values():
                option.in_force(self, stack)
            if self.kind == "cuda":
                stack.enter_context(torch.cuda.device(self.device))
            yield self


OPTIONS: dict[str, Option] = {each.name: each.metadata["option"] for each in fields(Setting)[1:]}


class _UnenteredSetting(ExitStack):
    """A setting that `with` puts in force. What asks for its device before that would train as if there were none."""

    def __init__(self, parsed: Setting) -> None:
        super().__init__()
        self.parsed = parsed

    def __enter__(self) -> Setting:  # type: ignore[override]
        return self.enter_context(self.parsed.apply())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(Setting, name):
            raise AttributeError(name)
        text = str(self.parsed)
        raise UsageError(
            f"gpulab.setting({text!r}) has no {name} before it is in force: "
            f"with gpulab.setting({text!r}) as setting: train(0, setting)"
        )


def setting(text: str | Setting) -> AbstractContextManager[Setting]:
    """A context manager: compute under a setting, and restore every global flag on the way out.

    Args:
        text: `device[:index][:option=value,…]`, or a `Setting`.

    Returns:
        It yields the `Setting`, whose `.device` and `.dtype` suit `tensor.to`; tensors made inside have that type.

    Raises:
        UsageError: for a malformed text.
        GpulabError: for what this machine lacks.

    Examples:
        >>> import torch
        >>> with setting("cpu:precision=float64"):
        ...     torch.zeros(1).dtype
        torch.float64
        >>> torch.zeros(1).dtype
        torch.float32
    """
    return _UnenteredSetting(Setting.parse(text))


@contextlib.contextmanager
def float32_products() -> Iterator[None]:
    """Inside the `with` block matrix products and convolutions keep float32, whatever the setting allows.

    For the one line of a training that needs all digits, while the rest may use TF32 or emulated arithmetic. The
    gradients of what is computed inside are computed later, as the setting says.

    Examples:
        >>> import torch
        >>> x = torch.tensor([[1.0, 1 / 3]])
        >>> with setting("cpu:emulate=tf32"):
        ...     with float32_products():
        ...         inside = (x @ x.T).item()
        ...     inside, (x @ x.T).item()
        (1.1111111640930176, 1.1110568046569824)
    """
    from gpulab.numerics.emulation import emulate, emulating

    with ExitStack() as stack:
        _tf32(Setting(tf32=False), stack)
        if emulating():
            stack.enter_context(emulate("float32"))
        yield


def available_settings(device: str = "auto") -> list[str]:
    """The settings that this machine can run and that are worth comparing.

    Args:
        device: `auto` for all of them, or `cpu`, `cuda`, `mps`, `xpu` for one kind alone.

    Returns:
        Their texts, first the plain `cpu`, against which the others are compared.

    Raises:
        UsageError: for another device.
        GpulabError: where this machine has none.

    Examples:
        >>> available_settings("cpu")[:2]
        ['cpu', 'cpu:threads=1']
    """
    if device not in ("auto", *DEVICES):
        raise UsageError(f"device {device!r}: expected auto, cpu, cuda, mps or xpu")
    settings = [Setting.parse(text) for text in WORTH_COMPARING]
    texts = [str(each) for each in settings if device in ("auto", each.kind) and _runs_here(each)]
    if not texts:
        raise GpulabError(f"device {device!r}: this machine has none")
    return texts


def _runs_here(candidate: Setting) -> bool:
    if candidate.isa:  # a worker process can have what this one was not started with
        # Running as an older CPU says something only on a newer one.
        return candidate.isa == "avx2" and {"avx2", "avx512f"} <= cpu_flags()
    try:
        candidate.check()
        return True
    except GpulabError:
        return False


def working_threads(work: Callable[[], object], share: float = 0.2) -> int:
    """How many threads of this process really work while `work()` runs.

    The paper watched htop; this reads what htop reads, each thread's processor time.

    Args:
        work: what to run, for half a second or more.
        share: of the busiest thread's time; a thread that used as much counts as working.

    Returns:
        The number of threads that worked.
    """
    import psutil

    def processor_time() -> dict[int, float]:
        return {t.id: t.user_time + t.system_time for t in psutil.Process().threads()}

    before = processor_time()
    work()
    spent = [used - before.get(thread, 0.0) for thread, used in processor_time().items()]
    return sum(used >= share * max(spent) for used in spent) if max(spent) > 0 else 0


def cpu_flags() -> frozenset[str]:
    """The names of the vector extensions and other features that this CPU reports."""
    from gpulab.passports import cpu_description

    return frozenset(cpu_description()["flags"])


def arithmetic() -> dict[str, Any]:
    """The flags now in force, under the names that a run records them with."""
    import torch

    cudnn: Any = torch.backends.cudnn
    return {
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn": cudnn.enabled,
        "cudnn_benchmark": cudnn.benchmark,
        "cudnn_deterministic": cudnn.deterministic,
        "matmul_fp32": torch.backends.cuda.matmul.fp32_precision,
        "convolution_fp32": cudnn.conv.fp32_precision,
    }
