"""Settings: everything that may change the arithmetic but should not change the result.

A setting is written as text, such as `cuda:1:tf32=off,deterministic=on`. `gpulab.setting` applies
it, and restores every global flag afterwards. torch is imported only when a setting is applied,
because the instruction set of a CPU must be chosen by environment variables before torch loads.

Each option is a field of `Setting`. `Setting._apply_flags` sets the flags of the options, and
`_restore_flags_on_exit` restores them.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

from gpulab.errors import GpulabError, UsageError
from gpulab.passports import cpu_description

if TYPE_CHECKING:
    import torch

    from gpulab._torch_internals import Nested

Value: TypeAlias = bool | int | str  # the value of an option
ValueType = TypeVar("ValueType", bool, int, str)
DEVICES = ("cpu", "cuda", "mps", "xpu")
PRECISIONS = ("float32", "float64", "bfloat16")
AUTOCAST_DTYPES = ("bfloat16", "float16")  # formats in which autocast computes products

TF32_CARDS = ("ampere", "hopper")  # GPUs whose TF32 can be emulated

# The environment variables that limit the instruction set of ATen, oneDNN and MKL, and their values
# for each option `isa`.
ISA_VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "MKL_ENABLE_INSTRUCTIONS",
)
ISA_VALUES = {
    "sse4": ("default", "SSE41", "SSE4_2"),
    "avx2": ("avx2", "AVX2", "AVX2"),
    "avx512": ("avx512", "AVX512_CORE", "AVX512"),
}
ISA_CPU_FLAGS = {"sse4": "sse4_2", "avx2": "avx2", "avx512": "avx512f"}
CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"  # cuBLAS reads it only once, when it starts
CUBLAS_DETERMINISTIC = ":4096:8"

COMPARED_SETTINGS = ["cpu", "cpu:threads=1", "cpu:isa=avx2", "cpu:precision=float64"]
COMPARED_SETTINGS += [
    "cuda:tf32=off",
    "cuda:tf32=on",
    "cuda:cudnn=off",
    "cuda:deterministic=on",
    "mps",
    "xpu",
]

# --- restoring flags ------------------------------------------------------------------------------


def _restore_flags_on_exit(stack: ExitStack) -> None:
    """Register callbacks that restore every flag that a setting, or code under it, may change."""
    import torch
    from torch.backends import cudnn

    from gpulab.numerics._flags import restore_tf32_on_exit

    def algorithms() -> tuple[bool, bool]:
        """Return whether torch uses only deterministic algorithms, and whether it only warns."""
        return (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )

    previous_algorithms = algorithms()
    workspace = os.environ.get(CUBLAS_VARIABLE)
    stack.callback(torch.set_num_threads, torch.get_num_threads())
    stack.callback(torch.set_default_dtype, torch.get_default_dtype())
    for flag in ("enabled", "benchmark", "deterministic"):
        stack.callback(setattr, cudnn, flag, getattr(cudnn, flag))

    @stack.callback
    def restore_determinism() -> None:
        """Restore the choice of algorithms and the variable that cuBLAS reads."""
        # The call imports torch's compiler, which takes 150 MB, so it is made only if necessary.
        if algorithms() != previous_algorithms:
            was_deterministic, only_warned = previous_algorithms
            torch.use_deterministic_algorithms(was_deterministic, warn_only=only_warned)
        os.environ.pop(CUBLAS_VARIABLE, None)
        if workspace is not None:
            os.environ[CUBLAS_VARIABLE] = workspace

    stack.enter_context(restore_tf32_on_exit())


# --- settings -------------------------------------------------------------------------------------


class SettingOption(NamedTuple):
    """An option of a setting: its devices, the pattern of its text, and its parser."""

    devices: tuple[str, ...]
    pattern: str
    words: str  # the end of the error message for a text that does not match the pattern
    value: Callable[[str], Value]

    def parse(self, name: str, text: str) -> Value:
        """Parse the value of `name=text`; `UsageError` if it is invalid."""
        if not re.fullmatch(self.pattern, text):
            raise UsageError(f"{name}={text!r} {self.words}")
        return self.value(text)


def _option(
    devices: tuple[str, ...], pattern: str, words: str, value: Callable[[str], ValueType]
) -> ValueType | None:
    """Declare a field of `Setting` that is an option; see `SettingOption`."""
    return field(default=None, metadata={"option": SettingOption(devices, pattern, words, value)})


def _choice(devices: tuple[str, ...], choices: Iterable[str]) -> str | None:
    """Declare an option with a fixed set of values."""
    return _option(devices, "|".join(choices), f"must be one of {', '.join(choices)}", str)


def _switch(*devices: str) -> bool | None:
    """Declare an option with the values `on` and `off`."""
    return _option(devices, "on|off", "must be on or off", lambda text: text == "on")


def _arithmetic() -> str | None:
    """Declare an option of the emulation, whose value is checked when the setting is applied."""
    return _option(DEVICES, ".+", "needs a value, such as emulate=tf32 or order=pairwise", str)


@dataclass(frozen=True)
class Setting:
    """Where and how to compute: what may change the arithmetic but should not change the result.

    A setting is usually written as text, `device:option=value,option=value`, such as
    `cuda:1:tf32=off`. `Setting.parse` reads it and checks every option; `str(setting)` writes it.
    An option that is None leaves the flag of the process unchanged. `gpulab.setting` activates
    a setting.

    Attributes:
        device: `cpu`, `cuda` (NVIDIA, or AMD with ROCm), `mps` (Apple) or `xpu` (Intel); `cuda:1`
            is the second GPU.
        threads: On a CPU, the number of threads that compute, 1 to 9999.
        isa: On a CPU, the newest vector instructions that may be used: `sse4`, `avx2` or `avx512`.
            A process chooses them when it starts, so this needs a process started with
            `environment()`. `gpulab.Experiment` and the `gpulab` command start one.
        tf32: On CUDA, whether float32 matrix products and convolutions may round their factors to
            TF32. With `emulate="ampere"` or `"hopper"`, the option is valid on every device.
        cudnn: On CUDA, whether cuDNN is used instead of PyTorch's own kernels.
        denormals: On a CPU, whether subnormal numbers (below 1.2e-38 in float32) are kept instead
            of being replaced by zero.
        deterministic: Whether to use only algorithms that return the same bits each time.
        precision: The floating-point type: `float32`, `float64` or `bfloat16`. It becomes torch's
            default type while the setting applies. Random numbers that are drawn in another type
            differ, even from the same seed. To train the same network in two types, draw weights
            and data with `dtype=torch.float32` and convert them to `setting.dtype`. A step that
            receives the setting in an audit runs with the usual default type instead.
        emulate: The number format, or the chip, whose products are imitated; see `gpulab.emulate`.
        order: The order in which products are added up; see `gpulab.emulate`.
        compile: The backend of `torch.compile` that `compiled` uses, such as `inductor`,
            `aot_eager`, `cudagraphs`, or one that you have registered.
        autocast: The format in which torch's mixed precision computes products, `bfloat16` or
            `float16`. Weights remain in float32. Converted weights are not cached, because they
            would be outdated after a step of the optimizer. Losses are not scaled, although small
            gradients in float16 may require it.

    Raises:
        UsageError: If the device or the value of an option is invalid.

    Examples:
        >>> import gpulab as gl
        >>> gl.Setting.parse("cuda:1:deterministic=on,tf32=off")
        Setting('cuda:1:tf32=off,deterministic=on')
        >>> gl.Setting.parse("cpu:threads=1").threads
        1
        >>> str(gl.Setting("cpu", precision="float64"))
        'cpu:precision=float64'
    """

    device: str = "cpu"
    threads: int | None = _option(("cpu",), r"[1-9]\d{0,3}", "must be a number from 1 to 9999", int)
    isa: str | None = _choice(("cpu",), ISA_VALUES)
    tf32: bool | None = _switch("cuda")
    cudnn: bool | None = _switch("cuda")
    denormals: bool | None = _switch("cpu")
    deterministic: bool | None = _switch(*DEVICES)
    precision: str | None = _choice(DEVICES, PRECISIONS)
    emulate: str | None = _arithmetic()
    order: str | None = _arithmetic()
    compile: str | None = _option(
        DEVICES, r"[\w-]+", "must be a backend of torch.compile, such as inductor", str
    )
    autocast: str | None = _choice(DEVICES, AUTOCAST_DTYPES)

    def __post_init__(self) -> None:
        """Check the device and the value of each option, also of a setting made without `parse`."""
        if not re.fullmatch(r"cpu|mps|xpu|cuda(:\d+)?", str(self.device)):
            raise UsageError(
                f"device {self.device!r}: expected cpu, cuda, cuda:1, mps or xpu; to read a string"
                f" with options, use Setting.parse({str(self.device)!r})"
            )
        for name, text in self._options():
            OPTIONS[name].parse(name, text)

    @classmethod
    def parse(cls, text: str | Setting) -> Setting:
        """Read a setting from its text.

        Args:
            text: `device[:index][:option=value,…]`. A `Setting` is returned unchanged.

        Returns:
            The setting, with its options in a fixed order.

        Raises:
            UsageError: If the device or an option is unknown, if an option is not valid on the
                device, is given twice or has an invalid value, or if options exclude each other.
                The values of `emulate` and `order` are checked when the setting is applied.
        """
        if isinstance(text, Setting):
            return text
        try:
            return cls._parse_text(str(text))
        except UsageError as error:
            raise UsageError(f"setting {text!r}: {error}") from None

    @classmethod
    def _parse_text(cls, text: str) -> Setting:
        """Read a setting from its text; the messages of errors do not name the text."""
        match = re.fullmatch(r"\s*(cpu|mps|xpu|cuda)(?:(?<=cuda):(\d+))?\s*(?::(.+))?", text)
        if not match:
            raise UsageError(
                "expected a device (cpu, cuda, cuda:0, mps, xpu), with any options after a colon,"
                " such as cpu:threads=1 or cuda:tf32=off,cudnn=off"
            )
        kind, index, options_text = match.groups()
        options = options_text.split(",") if options_text else []
        # Each value has the type of its field, which mypy cannot infer from a name.
        values: dict[str, Any] = {}
        for option in options:
            name, _, value = (part.strip() for part in option.partition("="))
            if name in values:
                raise UsageError(f"{name!r} is given twice")
            if name not in OPTIONS:
                raise UsageError(f"no option {name!r}; the options are {', '.join(OPTIONS)}")
            values[name] = OPTIONS[name].parse(name, value)
        for name in values:
            # `tf32` is valid on every device if a card with TF32 is emulated.
            emulated = name == "tf32" and values.get("emulate") in TF32_CARDS
            if kind not in OPTIONS[name].devices and not emulated:
                emulation_hint = (
                    f", and with emulate={' or '.join(TF32_CARDS)}" if name == "tf32" else ""
                )
                raise UsageError(
                    f"{name!r} is valid on {', '.join(OPTIONS[name].devices)} only{emulation_hint}"
                )
        if values.get("precision", "float32") != "float32" and {"emulate", "order"} & set(values):
            raise UsageError(
                "emulate and order imitate the arithmetic of float32 numbers: leave out precision"
            )
        if "autocast" in values and {"precision", "emulate", "order"} & set(values):
            raise UsageError(
                "autocast does its own rounding of float32 numbers: leave out precision, emulate"
                " and order"
            )
        if "compile" in values and {"isa", "emulate", "order"} & set(values):
            raise UsageError(
                "compiled code chooses its own instructions, and hides its operations from an"
                " emulation: leave out isa, emulate and order"
            )
        return cls(f"{kind}:{int(index)}" if index else kind, **values)

    def __str__(self) -> str:
        options = [f"{name}={text}" for name, text in self._options()]
        return f"{self.device}:{','.join(options)}" if options else self.device

    def _options(self) -> Iterator[tuple[str, str]]:
        """Yield the name and the text of each option that is set."""
        words = {True: "on", False: "off"}
        for name in OPTIONS:
            value = getattr(self, name)
            if value is not None:
                yield name, words[value] if isinstance(value, bool) else str(value)

    def __repr__(self) -> str:
        return f"Setting({str(self)!r})"

    @property
    def kind(self) -> str:
        """The device without its index, one of `cpu`, `cuda`, `mps` and `xpu`."""
        return self.device.partition(":")[0]

    @property
    def emulated(self) -> bool:
        """Whether another chip's arithmetic is imitated, by `emulate` or `order`."""
        return self.emulate is not None or self.order is not None

    @property
    def dtype(self) -> torch.dtype:
        """The floating-point type that `precision` names; by default `torch.float32`."""
        import torch

        return getattr(torch, self.precision or "float32")

    def environment(self) -> dict[str, str]:
        """Return the environment variables that this setting needs when a process starts."""
        variables = {"OMP_NUM_THREADS": str(self.threads)} if self.threads else {}
        if self.isa:
            variables |= zip(ISA_VARIABLES, ISA_VALUES[self.isa], strict=True)
        if self.kind == "cuda" and self.deterministic:
            variables[CUBLAS_VARIABLE] = CUBLAS_DETERMINISTIC
        return variables

    def prepare(self) -> None:
        """Set the variables of `environment()` in this process, unless torch is loaded."""
        if "torch" not in sys.modules:
            os.environ.update(self.environment())

    def check(self) -> None:
        """Check that the setting can be applied on this machine and in this process.

        Raises:
            GpulabError: If the machine or the process lacks something that the setting needs. The
                message names it.
            UsageError: If the format or order to emulate, or the backend to compile with, is
                unknown.
        """
        import torch

        is_cuda = self.kind == "cuda"
        is_mps = self.kind == "mps"
        count = torch.cuda.device_count() if is_cuda else 0
        uses_inductor = self.compile == "inductor"
        is_gpu = self.kind in ("cuda", "xpu")
        compiler = shutil.which(
            os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
        )
        lacking = {
            "no CUDA or ROCm GPU that this build of torch can use": is_cuda and count == 0,
            f"only {count} CUDA GPU(s), numbered from 0": is_cuda
            and int(self.device.partition(":")[2] or 0) >= count,
            "no cuDNN": self.cudnn and not torch.backends.cudnn.is_available(),
            "no Apple GPU (mps)": is_mps and not torch.backends.mps.is_available(),
            "no float64 on its Apple GPU": is_mps and self.precision == "float64",
            "no Intel GPU (xpu)": self.kind == "xpu" and not torch.xpu.is_available(),
            "no C++ compiler for Inductor (g++, or the one that $CXX names)": uses_inductor
            and not is_gpu
            and not compiler,
            "no Triton for Inductor": uses_inductor and is_gpu and find_spec("triton") is None,
            f"no {self.isa} instructions": self.isa
            and ISA_CPU_FLAGS[self.isa] not in cpu_description()["flags"],
        }
        for capability, is_lacking in lacking.items():
            if is_lacking:
                raise GpulabError(
                    f"setting {str(self)!r} cannot run here: this machine has {capability}"
                )
        if self.emulated:
            from gpulab.numerics._emulation import find_arithmetic

            find_arithmetic(self.emulate or "float32", self.order)
        if self.compile:
            backends = torch.compiler.list_backends(exclude_tags=())
            if self.compile not in backends:
                raise UsageError(
                    f"setting {str(self)!r}: torch.compile has no such backend; it has"
                    f" {', '.join(backends)}"
                )
        needed_variables = {
            name: value for name, value in self.environment().items() if name in ISA_VARIABLES
        }
        if any(os.environ.get(name) != value for name, value in needed_variables.items()):
            command = " ".join(f"{name}={value}" for name, value in needed_variables.items())
            raise GpulabError(
                f"setting {str(self)!r}: a process chooses its instruction set when it starts. Use "
                f"gpulab.Experiment or the gpulab command, or start Python with {command}"
            )

    def compiled(self, function: Callable[..., Nested]) -> Callable[..., Nested]:
        """Return a network or function that the backend in `compile` compiles at its first call.

        Args:
            function: A `torch.nn.Module`, or a function of tensors.

        Returns:
            The result of `torch.compile`, which compiles separately for each shape of the inputs.
            If `compile` is None, `function` itself. Compiled code uses the number of threads that
            is set when it is compiled.

        Examples:
            >>> import torch
            >>> import gpulab as gl
            >>> with gl.setting("cpu:compile=aot_eager") as setting:
            ...     double = setting.compiled(lambda x: 2 * x)
            ...     double(torch.ones(3))
            tensor([2., 2., 2.])
        """
        import torch

        if self.compile is None:
            return function
        # Inductor writes the number of threads into the code for a CPU, and caches the code on
        # disk. As an option, the number is part of the key of the cache.
        on_threads = (self.kind, self.compile) == ("cpu", "inductor")
        options: dict[str, str | int | bool | Callable[..., Nested]] | None = None
        if on_threads:
            options = {"cpp.threads": torch.get_num_threads()}
        return torch.compile(function, backend=self.compile, dynamic=False, options=options)

    @contextlib.contextmanager
    def apply(self) -> Iterator[Setting]:
        """Compute under this setting in a `with` block, and restore all flags afterwards.

        `check()` runs first.
        """
        self.check()
        with ExitStack() as stack:
            _restore_flags_on_exit(stack)
            self._apply_flags(stack)
            yield self

    def _apply_flags(self, stack: ExitStack) -> None:
        """Set the flags of all options; register context managers on `stack` to be left later."""
        import torch
        from joblib import cpu_count  # unlike torch, it respects the CPU quota of a container
        from torch.backends import cudnn

        from gpulab.numerics._flags import switch_denormals, switch_tf32

        current_threads = torch.get_num_threads()
        threads = self.threads or min(current_threads, cpu_count())
        if threads != current_threads:
            torch.set_num_threads(threads)
        if self.tf32 is not None:
            switch_tf32(self.tf32)
        if self.cudnn is not None:
            cudnn.enabled = self.cudnn
        if self.denormals is not None:
            switch_denormals(self.denormals, stack)
        if self.deterministic is not None:
            torch.use_deterministic_algorithms(self.deterministic)
            cudnn.deterministic = self.deterministic
        if self.deterministic:
            cudnn.benchmark = False  # the benchmark selects kernels by time, which varies
            os.environ.setdefault(CUBLAS_VARIABLE, CUBLAS_DETERMINISTIC)
        if self.precision is not None:
            torch.set_default_dtype(self.dtype)
        if self.emulated:
            from gpulab.numerics._emulation import emulate

            stack.enter_context(emulate(self.emulate or "float32", order=self.order))
        if self.autocast is not None:
            dtype = getattr(torch, self.autocast)
            stack.enter_context(torch.autocast(self.kind, dtype, cache_enabled=False))
        if self.compile is not None:
            from gpulab._torch_internals import recompilations_allowed

            # torch runs a function uncompiled after a few variants. Here the limit is higher, and
            # exceeding it is an error, so that nothing runs uncompiled unnoticed.
            stack.enter_context(recompilations_allowed(256))
        if self.kind == "cuda":
            stack.enter_context(torch.cuda.device(self.device))


OPTIONS: dict[str, SettingOption] = {
    option.name: option.metadata["option"] for option in fields(Setting)[1:]
}


def setting(text: str | Setting) -> AbstractContextManager[Setting]:
    """Compute under a setting inside a `with` block, and restore every global flag afterwards.

    The flags are those of torch: the number of threads, the default floating-point type, TF32,
    cuDNN, deterministic algorithms and denormal numbers. A CUDA device becomes the current device.
    Tensors are not moved to it; use `tensor.to(setting.device)`.

    Args:
        text: A setting as text, `device[:index][:option=value,…]`, such as `cuda:1:tf32=off`, or a
            `Setting`, which lists the options.

    Returns:
        A context manager that gives the active `Setting`, whose `device` and `dtype` can be passed
        to `tensor.to`. Inside the block, new tensors have the floating-point type of the setting's
        `precision`.

    Raises:
        UsageError: If the text is malformed. When the block is entered, if the format or order to
            emulate is unknown.
        GpulabError: When the block is entered, if this machine lacks something that the setting
            needs, or if this process was not started with the instruction set `isa`.

    Examples:
        >>> import torch
        >>> import gpulab as gl
        >>> with gl.setting("cpu:precision=float64"):
        ...     torch.zeros(1).dtype
        torch.float64
        >>> torch.zeros(1).dtype
        torch.float32
    """
    return Setting.parse(text).apply()


def available_settings(device: str = "auto") -> list[str]:
    """List the settings that can run on this machine, out of ten that are worth comparing.

    Args:
        device: The kind of device, `cpu`, `cuda`, `mps` or `xpu`; or `auto` for all kinds.

    Returns:
        The settings as strings. If the CPU is among the devices, the list begins with `cpu`, the
        default reference of verdicts. Two settings are listed only on some CPUs:

        - `cpu:threads=1`, if torch uses more than one thread. Otherwise it is the same as `cpu`.
        - `cpu:isa=avx2`, on a CPU with AVX-512. It needs a process that was started for it:
          `gpulab.Experiment` starts one, and `gpulab.setting` raises an error.

    Raises:
        UsageError: If the kind of device is unknown.
        GpulabError: If this machine has no such device.

    Examples:
        >>> import gpulab as gl
        >>> settings = gl.available_settings("cpu")
        >>> settings[0], settings[-1]
        ('cpu', 'cpu:precision=float64')
    """
    if device not in ("auto", *DEVICES):
        raise UsageError(f"device {device!r}: expected auto, cpu, cuda, mps or xpu")
    settings = [Setting.parse(text) for text in COMPARED_SETTINGS]
    texts = [
        str(candidate)
        for candidate in settings
        if device in ("auto", candidate.kind) and _runs_here(candidate)
    ]
    if not texts:
        raise GpulabError(f"device {device!r}: this machine has no such device")
    return texts


def _runs_here(candidate: Setting) -> bool:
    """Return whether a setting can run on this machine and differs from the plain device."""
    import torch

    if candidate.isa:
        # This process cannot change its instruction set, but a worker process can be started with
        # another one. AVX2 differs from the default only on a CPU that has AVX-512.
        return candidate.isa == "avx2" and {"avx2", "avx512f"} <= set(cpu_description()["flags"])
    try:
        candidate.check()
        # With torch's current number of threads, the setting would be the same as `cpu`.
        return candidate.threads != torch.get_num_threads()
    except GpulabError:
        return False
