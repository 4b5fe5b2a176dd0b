"""Settings: everything that may change the arithmetic but should not change the result.

A setting is written as text, `cuda:1:tf32=off,deterministic=on`, applied with `gpulab.setting`, and
every global flag is as it was afterwards. torch is imported only when a setting is applied, because
the instruction set of a CPU is chosen through the environment before torch loads.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from gpulab.errors import GpulabError, UsageError

if TYPE_CHECKING:
    import torch

PRECISIONS = ("float32", "float64", "bfloat16")

# Three libraries compute on a CPU, and each has its own variable: ATen, oneDNN and MKL.
ISA_VARIABLES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
ISA_VALUES = {
    "sse4": ("default", "SSE41", "SSE4_2"),
    "avx2": ("avx2", "AVX2", "AVX2"),
    "avx512": ("avx512", "AVX512_CORE", "AVX512"),
}
ISA_CPU_FLAG = {"sse4": "sse4_2", "avx2": "avx2", "avx512": "avx512f"}

# OpenMP's threads wait for each other by spinning. When two programs share the cores that brings both
# nearly to a standstill, unless they give up spinning sooner; alone it costs a few per cent.
PATIENCE = {"GOMP_SPINCOUNT": "10000"}

# Which devices an option has a meaning on.
OPTIONS = {
    "threads": ("cpu",),
    "isa": ("cpu",),
    "tf32": ("cuda",),
    "cudnn": ("cuda",),
    "deterministic": ("cpu", "cuda", "mps", "xpu"),
    "precision": ("cpu", "cuda", "mps", "xpu"),
    "emulate": ("cpu", "cuda", "mps", "xpu"),
    "order": ("cpu", "cuda", "mps", "xpu"),
}


@dataclass(frozen=True)
class Setting:
    """Where and how to compute. `None` leaves a flag as the process has it.

    >>> Setting.parse("cuda:1:deterministic=on,tf32=off")
    Setting('cuda:1:tf32=off,deterministic=on')
    >>> Setting.parse("cpu:threads=1").threads
    1
    >>> str(Setting.parse("cpu"))
    'cpu'
    """

    device: str = "cpu"
    threads: int | None = None
    isa: str | None = None
    tf32: bool | None = None
    cudnn: bool | None = None
    deterministic: bool | None = None
    precision: str | None = None
    emulate: str | None = None
    order: str | None = None

    @classmethod
    def parse(cls, text: str | Setting) -> Setting:
        """Read `device[:index][:option=value,…]`; a malformed text raises `UsageError`."""
        if isinstance(text, Setting):
            return text
        match = re.fullmatch(r"\s*(cpu|mps|xpu|cuda(?::\d+)?)\s*(?::(.+))?", str(text))
        if not match:
            raise UsageError(
                f"setting {text!r}: expected a device (cpu, cuda, cuda:0, mps, xpu) and, after a "
                f"colon, options such as cpu:threads=1 or cuda:tf32=off,cudnn=off"
            )
        device, options = match.groups()
        kind, _, index = device.partition(":")
        device = f"{kind}:{int(index)}" if index else kind
        values: dict[str, Any] = {}
        for option in options.split(",") if options else ():
            name, _, value = (part.strip() for part in option.partition("="))
            if name in values:
                raise UsageError(f"setting {text!r}: {name!r} is given twice")
            values[name] = _parse_option(text, device, name, value)
        if values.get("precision", "float32") != "float32" and {"emulate", "order"} & set(values):
            raise UsageError(
                f"setting {text!r}: what is emulated is the arithmetic of float32 numbers: leave precision away"
            )
        return cls(device, **values)

    def __str__(self) -> str:
        options = []
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if value is not None:
                shown = {True: "on", False: "off"}[value] if isinstance(value, bool) else value
                options.append(f"{field.name}={shown}")
        return ":".join([self.device, *([",".join(options)] if options else [])])

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
        environment: dict[str, str] = {}
        if self.isa:
            environment |= dict(zip(ISA_VARIABLES, ISA_VALUES[self.isa], strict=True))
        if self.threads:
            environment |= {"OMP_NUM_THREADS": str(self.threads)}
        if self.kind == "cuda" and self.deterministic:
            environment |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # cuBLAS reads it once, at start
        return environment

    def prepare(self) -> None:
        """Put `environment` in force in this process, if torch has not been loaded yet."""
        if "torch" not in sys.modules:
            os.environ.update({**PATIENCE, **os.environ, **self.environment()})

    def check(self) -> None:
        """Raise `GpulabError`, naming what this machine lacks for the setting."""
        import torch

        missing = None
        if self.kind == "cuda":
            count = torch.cuda.device_count()
            index = int(self.device.partition(":")[2] or 0)
            if count == 0:
                missing = "no CUDA or ROCm GPU that this build of torch can use"
            elif index >= count:
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
            from gpulab.numerics.emulation import arithmetic_of

            arithmetic_of(self.emulate or "float32", self.order)
        self._check_isa_in_force()

    def _check_isa_in_force(self) -> None:
        if self.isa is None:
            return
        wanted = {name: self.environment()[name] for name in ISA_VARIABLES}
        if any(os.environ.get(name) != value for name, value in wanted.items()):
            command = " ".join(f"{name}={value}" for name, value in wanted.items())
            raise GpulabError(
                f"setting {str(self)!r}: a process chooses its instruction set when it starts. Use "
                f"gpulab.Experiment or the gpulab command, or start Python with {command}"
            )

    @contextlib.contextmanager
    def apply(self) -> Iterator[Setting]:
        """Compute under this setting inside the `with` block; afterwards every flag is restored."""
        import torch

        self.check()
        saved = _read_flags()
        try:
            _apply_flags(self)
            with contextlib.ExitStack() as stack:
                if self.kind == "cuda":
                    stack.enter_context(torch.cuda.device(self.device))
                if self.emulated:
                    from gpulab.numerics.emulation import emulate

                    stack.enter_context(emulate(self.emulate or "float32", order=self.order))
                yield self
        finally:
            _restore_flags(saved)


def setting(text: str | Setting) -> contextlib.AbstractContextManager[Setting]:
    """A context manager: compute under a setting, and restore every global flag on the way out.

    The default floating-point type follows the setting's precision, so tensors made inside have
    it. Yields the parsed `Setting`, whose `.device` and `.dtype` suit `tensor.to`.

    Raises `UsageError` for a malformed text and `GpulabError` for what this machine lacks.

    >>> import torch
    >>> with setting("cpu:precision=float64"):
    ...     torch.zeros(1).dtype
    torch.float64
    >>> torch.zeros(1).dtype
    torch.float32
    """
    return Setting.parse(text).apply()


@contextlib.contextmanager
def float32_products() -> Iterator[None]:
    """Inside the `with` block matrix products and convolutions keep float32, whatever the setting allows.

    For the one line of a training that needs all digits, while the rest may use TF32. The gradients of what is
    computed inside are computed later, outside of it, as the setting says. Emulated arithmetic is left out too.

    >>> import torch
    >>> x = torch.tensor([[1.0, 1 / 3]])
    >>> with setting("cpu:emulate=tf32"):
    ...     with float32_products():
    ...         inside = (x @ x.T).item()
    ...     inside, (x @ x.T).item()
    (1.1111111640930176, 1.1110568046569824)
    """
    from gpulab.numerics.emulation import emulate, emulating

    legacy, precisions = _legacy_tf32(), tuple(backend.fp32_precision for backend in _fp32_precisions())
    _apply_tf32(False)
    try:
        with emulate("float32") if emulating() else contextlib.nullcontext():
            yield
    finally:
        _restore_tf32(legacy, precisions)


def available_settings(device: str = "auto") -> list[str]:
    """The settings that this machine can run and that are worth comparing.

    `device` is `auto` for all of them, or `cpu`, `cuda`, `mps`, `xpu` for one kind alone. The first
    one listed is the plain `cpu`, against which the others are compared.

    >>> available_settings("cpu")[:2]
    ['cpu', 'cpu:threads=1']
    """
    candidates = [
        "cpu",
        "cpu:threads=1",
        "cpu:isa=avx2",
        "cpu:precision=float64",
        "cuda:tf32=off",
        "cuda:tf32=on",
        "cuda:cudnn=off",
        "cuda:deterministic=on",
        "mps",
        "xpu",
    ]
    if device not in ("auto", "cpu", "cuda", "mps", "xpu"):
        raise UsageError(f"device {device!r}: expected auto, cpu, cuda, mps or xpu")
    found = [text for text in candidates if device in ("auto", Setting.parse(text).kind)]
    found = [text for text in found if _runs_here(Setting.parse(text))]
    if not found:
        raise GpulabError(f"device {device!r}: this machine has none")
    return found


def working_threads(work: Callable[[], object], share: float = 0.2) -> int:
    """How many threads of this process really work while `work()` runs.

    The paper watched htop; this reads what htop reads: the processor time of each thread. A thread
    counts as working when it used at least `share` of the time that the busiest one used. `work`
    should run for half a second or more.
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


def _parse_option(text: str | Setting, device: str, name: str, value: str) -> Any:
    if name not in OPTIONS:
        raise UsageError(f"setting {text!r}: no option {name!r}; there are {', '.join(OPTIONS)}")
    if device.partition(":")[0] not in OPTIONS[name]:
        raise UsageError(f"setting {text!r}: {name!r} has a meaning on {', '.join(OPTIONS[name])} only")
    choices: dict[str, Any]
    if name == "threads":
        if not re.fullmatch(r"[1-9]\d{0,3}", value):
            raise UsageError(f"setting {text!r}: threads={value!r} must be a number from 1 to 9999")
        return int(value)
    if name in ("emulate", "order"):
        if not value:
            raise UsageError(f"setting {text!r}: {name} needs a value, such as emulate=tf32 or order=pairwise")
        return value
    if name == "isa":
        choices = {choice: choice for choice in ISA_VALUES}
    elif name == "precision":
        choices = {choice: choice for choice in PRECISIONS}
    else:
        choices = {"on": True, "off": False}
    if value not in choices:
        raise UsageError(f"setting {text!r}: {name}={value!r} must be one of {', '.join(choices)}")
    return choices[value]


def _runs_here(candidate: Setting) -> bool:
    if candidate.isa:  # a worker process can have what this one was not started with
        # Running as an older CPU says something only on a newer one.
        return candidate.isa == "avx2" and {"avx2", "avx512f"} <= cpu_flags()
    try:
        candidate.check()
    except GpulabError:
        return False
    return True


def _legacy_tf32() -> tuple[bool, bool, str] | None:
    """The old interface to TF32, which refuses to be read once the new one has been used."""
    import torch

    try:
        matmul, cudnn = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
        return matmul, cudnn, torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def _apply_tf32(wanted: bool) -> None:
    import torch

    if _legacy_tf32() is None:
        for backend in _fp32_precisions():
            backend.fp32_precision = "tf32" if wanted else "ieee"
    else:  # this sets the new interface as well, so that both can still be read
        torch.backends.cuda.matmul.allow_tf32 = wanted
        torch.backends.cudnn.allow_tf32 = wanted


def _restore_tf32(legacy: tuple[bool, bool, str] | None, precisions: tuple[str, ...]) -> None:
    """Put both interfaces back; what has not changed is left alone, for writing a value pins it."""
    import torch

    if legacy is not None and legacy != _legacy_tf32():
        on_cpu: Any = torch.backends.mkldnn
        before = on_cpu.matmul.fp32_precision
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = legacy[:2]
        with contextlib.suppress(RuntimeError):  # unreadable where TF32 was switched after "medium" was set
            if torch.get_float32_matmul_precision() == legacy[2]:
                legacy = None
        if legacy is not None:
            torch.set_float32_matmul_precision(legacy[2])
            if on_cpu.matmul.fp32_precision != before:
                on_cpu.matmul.fp32_precision = before
    for backend, precision in zip(_fp32_precisions(), precisions, strict=True):
        if backend.fp32_precision != precision:
            backend.fp32_precision = precision


def _fp32_precisions() -> tuple[Any, Any, Any]:
    import torch

    cudnn: Any = torch.backends.cudnn
    return torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn


def _read_flags() -> dict[str, Any]:
    import torch

    cudnn = torch.backends.cudnn
    return {
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "cudnn": (cudnn.enabled, cudnn.benchmark, cudnn.deterministic),
        "tf32": _legacy_tf32(),
        "fp32_precision": tuple(backend.fp32_precision for backend in _fp32_precisions()),
        "workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    }


def _apply_flags(wanted: Setting) -> None:
    import torch

    cudnn = torch.backends.cudnn
    if wanted.threads is not None:
        torch.set_num_threads(wanted.threads)
    if wanted.precision is not None:
        torch.set_default_dtype(wanted.dtype)
    if wanted.cudnn is not None:
        cudnn.enabled = wanted.cudnn
    if wanted.tf32 is not None:
        _apply_tf32(wanted.tf32)
    if wanted.deterministic is not None:
        torch.use_deterministic_algorithms(wanted.deterministic)
        cudnn.deterministic = wanted.deterministic
        if wanted.deterministic:
            cudnn.benchmark = False  # the benchmark picks a kernel by a race
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def _restore_flags(saved: dict[str, Any]) -> None:
    import torch

    cudnn = torch.backends.cudnn
    torch.set_num_threads(saved["threads"])
    torch.set_default_dtype(saved["dtype"])
    now = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if now != (saved["deterministic"], saved["warn_only"]):  # the call imports torch's compiler: 150 MB
        torch.use_deterministic_algorithms(saved["deterministic"], warn_only=saved["warn_only"])
    cudnn.enabled, cudnn.benchmark, cudnn.deterministic = saved["cudnn"]
    _restore_tf32(saved["tf32"], saved["fp32_precision"])
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    if saved["workspace"] is not None:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = saved["workspace"]


def arithmetic() -> dict[str, Any]:
    """The flags now in force, under the names that a run records them with."""
    import torch

    flags = _read_flags()
    enabled, benchmark, deterministic = flags["cudnn"]
    matmul, conv, _ = flags["fp32_precision"]
    return {
        "threads": flags["threads"],
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "deterministic": flags["deterministic"],
        "cudnn": enabled,
        "cudnn_benchmark": benchmark,
        "cudnn_deterministic": deterministic,
        "matmul_fp32": matmul,
        "convolution_fp32": conv,
    }
