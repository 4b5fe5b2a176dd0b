import contextlib
import inspect
import itertools
import json
import os
import re
from types import SimpleNamespace

import psutil
import pytest
import torch

import gpulab as gl
from gpulab.settings import ISA_VALUES, ISA_VARIABLES, OPTIONS, PRECISIONS, Setting, arithmetic, cpu_flags

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA GPU")
needs_avx512 = pytest.mark.skipif("avx512f" not in cpu_flags(), reason="running as AVX2 shows on an AVX-512 CPU only")

ON_OFF = (None, "on", "off")
VALUES = {
    "threads": (None, "1", "12"),
    "isa": (None, "sse4", "avx2", "avx512"),
    "tf32": ON_OFF,
    "cudnn": ON_OFF,
    "denormals": ON_OFF,
    "deterministic": ON_OFF,
    "precision": (None, *PRECISIONS),
    "emulate": (None, "tf32", "hopper"),
    "order": (None, "pairwise", "tensor-core+split-4"),
    "compile": (None, "inductor"),
    "autocast": (None, "bfloat16"),
}


def options_of(device):
    """Every combination of the options that have a meaning on a device, as lists of `name=value`."""
    names = [name for name in OPTIONS if device.partition(":")[0] in OPTIONS[name].devices]
    for values in itertools.product(*(VALUES[name] for name in names)):
        *_, precision, emulate, order, backend, autocast = values
        if precision not in (None, "float32") and (emulate or order):
            continue  # what is emulated is the arithmetic of float32
        if (autocast and (precision or emulate or order)) or (
            backend and (emulate or order or values[1] in ISA_VALUES)
        ):
            continue  # what hides its operations, or rounds in its own way
        yield [f"{name}={value}" for name, value in zip(names, values, strict=True) if value is not None]


def denormal_products():
    """The share of a long tensor in which numbers below 1.2e-38 are kept; each thread computes a part of it."""
    return float((torch.full((1 << 22,), 1e-30, dtype=torch.float32) * 1e-10).ne(0).double().mean())


def flags():
    """The flags of torch that a setting may touch, read from torch and not from gpulab."""

    def read(what):
        try:
            return what()
        except RuntimeError:  # torch refuses to read the old interface once the new one was used
            return "refused"

    b = torch.backends
    every = ()
    if hasattr(b, "fp32_precision"):
        every = (b, b.cuda.matmul, b.cudnn, b.cudnn.conv, b.cudnn.rnn, b.mkldnn, b.mkldnn.matmul, b.mkldnn.conv)
    return {
        "old matmul": read(lambda: b.cuda.matmul.allow_tf32),
        "old cudnn": read(lambda: b.cudnn.allow_tf32),
        "old precision": read(torch.get_float32_matmul_precision),
        "new": [backend.fp32_precision for backend in every],
        "threads": torch.get_num_threads(),
        "dtype": str(torch.get_default_dtype()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "cudnn": (b.cudnn.enabled, b.cudnn.benchmark, b.cudnn.deterministic),
        "fused": (b.mha.get_fastpath_enabled(), b.cuda.flash_sdp_enabled(), b.cuda.mem_efficient_sdp_enabled()),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()),
        "recompile_limit": torch._dynamo.config.recompile_limit,
        "environment": {name: text for name, text in os.environ.items() if name.startswith(("CUBLAS", "OMP", "ATEN"))},
    }


def flags_and_denormals():
    return flags() | {"denormals": denormal_products()}


# --- text ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:0", "cuda:13", "mps", "xpu"])
def test_text_and_setting_are_inverse_for_every_combination_of_options(device):
    for options in options_of(device):
        text = ":".join([device, *([",".join(options)] if options else [])])
        parsed = Setting.parse(text)
        assert str(parsed) == text
        assert repr(parsed) == f"Setting({text!r})"
        assert Setting.parse(str(parsed)) == parsed
        assert Setting.parse(parsed) is parsed
        assert (parsed.device, parsed.kind) == (device, device.partition(":")[0])


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", ["''", "cpu", "cuda"]),
        ("cpu:2", ["'cpu:2'", "threads"]),
        ("cuda:-1", ["'cuda:-1'", "tf32"]),
        ("cpu:threads=0", ["'0'", "1 to 9999"]),
        ("cpu:threads=1,threads=2", ["'threads'", "twice"]),
        ("cpu:colour=red", ["'colour'", "threads, isa, tf32, cudnn, denormals, deterministic, precision"]),
        ("cpu:tf32=off,emulate=tf32", ["'tf32'", "cuda only", "emulate=ampere or hopper"]),
        ("cuda:threads=1", ["'threads'", "cpu only"]),
        ("cpu:precision=bfloat16,order=pairwise", ["float32", "leave precision away"]),
        ("cpu:compile=", ["''", "inductor"]),
        ("cpu:compile=inductor,emulate=tf32", ["hides its operations"]),
        ("cpu:compile=inductor,isa=avx2", ["instructions"]),
        ("cpu:autocast=float64", ["'float64'", "bfloat16, float16"]),
        ("cpu:autocast=bfloat16,precision=float64", ["leave precision"]),
    ],
)
def test_malformed_text_is_refused_naming_the_value_and_what_is_valid(text, named):
    with pytest.raises(gl.UsageError) as error:
        Setting.parse(text)
    assert [word for word in named if word not in str(error.value)] == []


def test_the_environment_of_a_setting_holds_what_a_process_reads_only_when_it_starts():
    isa = dict(zip(ISA_VARIABLES, ("avx2", "AVX2", "AVX2"), strict=True))
    assert Setting.parse("cuda:tf32=on").environment() == {}
    assert Setting.parse("cpu:isa=avx2,threads=3").environment() == {"OMP_NUM_THREADS": "3"} | isa
    assert Setting.parse("cuda:deterministic=on").environment() == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


# --- applying and restoring --------------------------------------------------------------------------


@pytest.fixture
def unusual_flags(monkeypatch):
    """Flags that are nobody's default, so that a restored default would be seen."""
    before, cudnn, matmul = flags(), torch.backends.cudnn, torch.backends.cuda.matmul
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    cudnn.enabled, cudnn.benchmark, cudnn.deterministic = False, True, True
    matmul.allow_tf32, cudnn.allow_tf32 = True, False
    torch.set_num_threads(3)
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before["deterministic"], warn_only=before["warn_only"])
    torch.set_default_dtype(torch.float32)
    torch.set_num_threads(before["threads"])
    matmul.allow_tf32, cudnn.allow_tf32 = before["old matmul"], before["old cudnn"]
    if new := before["new"]:
        matmul.fp32_precision, cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision = new[1], new[3], new[4]
    cudnn.enabled, cudnn.benchmark, cudnn.deterministic = before["cudnn"]


@pytest.fixture
def default_flags():
    """Those of this process."""


CPU_SETTINGS = ["cpu", "cpu:threads=1", "cpu:deterministic=on", "cpu:deterministic=off", "cpu:precision=float64"]
CPU_SETTINGS += ["cpu:denormals=off", "cpu:threads=2,denormals=off", "cpu:autocast=bfloat16", "cpu:compile=aot_eager"]
CPU_SETTINGS += ["cpu:threads=2,deterministic=on,precision=bfloat16", "cpu:emulate=hopper,order=tensor-core+split-2"]
CUDA_SETTINGS = ["cuda:tf32=off", "cuda:tf32=on", "cuda:cudnn=off", "cuda:tf32=off,deterministic=on"]


@pytest.mark.parametrize("user", ["default_flags", "unusual_flags"])
@pytest.mark.parametrize("text", [*CPU_SETTINGS, *(pytest.param(text, marks=needs_cuda) for text in CUDA_SETTINGS)])
def test_every_flag_is_restored_also_after_an_exception(text, user, request):
    request.getfixturevalue(user)
    before = flags_and_denormals()
    with gl.setting(text):
        pass
    assert flags_and_denormals() == before
    with contextlib.suppress(ZeroDivisionError), gl.setting(text) as inside:
        assert str(inside) == text
        torch.set_num_threads(4)  # what somebody does inside is undone, too
        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.allow_tf32 = False
        assert os.environ.get("CUBLAS_WORKSPACE_CONFIG", ":4096:8") == (
            ":16:8" if user == "unusual_flags" else ":4096:8"
        )
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:2"
        raise ZeroDivisionError
    assert flags_and_denormals() == before


def test_autocast_sees_weights_that_an_optimizer_has_changed():
    layer, x = torch.nn.Linear(4, 4), torch.ones(1, 4)
    with gl.setting("cpu:autocast=bfloat16"):
        before = layer(x)
        before.sum().backward()
        torch.optim.SGD(layer.parameters(), lr=1.0).step()
        after = layer(x)
    assert before.dtype == torch.bfloat16
    assert layer.weight.dtype == torch.float32
    assert (after < before - 4).all(), "a cast that was kept would give the same again"


def test_setting_compiled_uses_its_backend_or_leaves_the_function():
    compiled_graphs = []

    def backend(graph, inputs):
        compiled_graphs.append(len(inputs))
        return lambda *args: [2 * out for out in graph(*args)]

    torch._dynamo.register_backend(backend, "twice")
    function = torch.nn.Linear(2, 2)
    assert Setting.parse("cpu").compiled(function) is function
    with gl.setting("cpu:compile=twice") as setting, torch.no_grad():
        assert torch.equal(setting.compiled(function)(torch.ones(1, 2)), 2 * function(torch.ones(1, 2)))
    assert len(compiled_graphs) == 1


def test_recompile_limit_is_an_error():
    with gl.setting("cpu:compile=eager") as setting, torch._dynamo.config.patch(recompile_limit=2):
        compiled = setting.compiled(lambda x: x + 1)
        with pytest.raises(Exception, match="recompile_limit"):
            [compiled(torch.ones(size)) for size in range(1, 9)]


def test_a_backend_that_torch_does_not_have_and_a_missing_compiler_are_refused(monkeypatch):
    with (
        pytest.raises(gl.UsageError, match=r"'cpu:compile=inducter'.*it has .*inductor"),
        gl.setting("cpu:compile=inducter"),
    ):
        pass
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(gl.GpulabError, match=r"no C\+\+ compiler"), gl.setting("cpu:compile=inductor"):
        pass


def test_values_that_a_setting_cannot_have_are_refused():
    with pytest.raises(gl.UsageError, match=re.escape("Setting.parse('cpu:threads=1')")):
        gl.Setting("cpu:threads=1")
    with pytest.raises(gl.UsageError, match="threads='-1' must be a number"):
        gl.Setting("cpu", threads=-1)


def test_a_setting_is_in_force_inside_and_nested_ones_are_undone_one_by_one():
    before = flags()
    with gl.setting("cpu:threads=1,deterministic=on,precision=float64") as outside:
        outer = flags()
        assert torch.get_num_threads() == arithmetic()["threads"] == 1
        assert torch.are_deterministic_algorithms_enabled()
        assert arithmetic()["deterministic"]
        assert (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark) == (True, False)
        assert torch.zeros(1).dtype == outside.dtype == torch.float64
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        with gl.setting("cpu:threads=2,precision=bfloat16") as inner:
            assert (torch.get_num_threads(), torch.zeros(1).dtype) == (2, inner.dtype) == (2, torch.bfloat16)
            assert torch.are_deterministic_algorithms_enabled(), "an option that is not named leaves a flag as it is"
        assert flags() == outer
        with pytest.raises(gl.GpulabError), gl.setting("cuda:77"):
            pass
        assert flags() == outer
    assert flags() == before


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_denormal_numbers_are_switched_off_in_every_thread(threads):
    with gl.setting(f"cpu:threads={threads}"):
        assert denormal_products() == 1
        torch.set_flush_denormal(True)
        assert denormal_products() < 1, "torch's own switch"
        torch.set_flush_denormal(False)
        with gl.setting("cpu:denormals=off"):
            assert denormal_products() == 0
            with gl.setting("cpu:denormals=on"):
                assert denormal_products() == 1
            assert denormal_products() == 0
            x = torch.full((1 << 22,), 1e-30, requires_grad=True)
            x.mul(1e-20).mul(1e-20).sum().backward()
            assert not x.grad.any(), "the backward pass, too"
        assert denormal_products() == 1


def test_threads_that_cannot_be_switched_are_named(monkeypatch):
    before = flags_and_denormals()
    monkeypatch.setattr("threadpoolctl.threadpool_info", list)
    with gl.setting("cpu:threads=3"):
        denormal_products()  # now the threads are there
        with pytest.raises(gl.GpulabError, match=r"cannot switch denormal numbers off in all of its \d+ threads"):
            gl.setting("cpu:denormals=off").__enter__()
    with gl.setting("cpu:threads=1,denormals=off"):
        assert denormal_products() == 0
    assert flags_and_denormals() == before


needs_both_interfaces = pytest.mark.skipif(
    not hasattr(torch.backends, "fp32_precision"), reason="this torch has only the old interface to TF32"
)

USED_BEFORE = [
    "pass",
    "torch.backends.cuda.matmul.allow_tf32 = True",
    "torch.backends.cudnn.allow_tf32 = False",
    "torch.set_float32_matmul_precision('high')",
    "torch.set_float32_matmul_precision('medium')",
    "torch.backends.fp32_precision = 'tf32'",
    "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
    "torch.backends.cudnn.fp32_precision = 'tf32'",
    "torch.backends.cudnn.conv.fp32_precision = 'ieee'",
    "torch.backends.cudnn.rnn.fp32_precision = 'ieee'",
    "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'",
]

# Using the new interface makes the old one unreadable for good: each case has a process of its own.
FLAGS_IN_FORKS = f"""
import contextlib, json, os
import torch
import gpulab as gl

{inspect.getsource(flags)}
torch.use_deterministic_algorithms(False)  # loads much of torch, here once for all
for used in json.loads(os.environ["USED_BEFORE"]):
    if os.fork():
        os.wait()
        continue
    exec(used)
    before = flags()
    with gl.setting("cpu"):
        inside = flags()
    after = flags()
    with contextlib.suppress(ZeroDivisionError), gl.setting("cpu:deterministic=on"):
        1 / 0
    again = flags()
    with gl.setting("cpu"):
        if "refused" not in before.values():  # as a setting of a GPU would
            torch.backends.cuda.matmul.allow_tf32 = not torch.backends.cuda.matmul.allow_tf32
            torch.backends.cudnn.allow_tf32 = not torch.backends.cudnn.allow_tf32
    print(json.dumps([used, before == inside, before == after, before == again, before == flags()]), flush=True)
    os._exit(0)

for context in (contextlib.nullcontext(), gl.setting("cpu")):
    if os.fork():
        os.wait()
        continue
    torch.backends.fp32_precision = "tf32"
    with context:
        pass
    torch.backends.fp32_precision = "ieee"
    print(torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision, flush=True)
    os._exit(0)
"""


@needs_both_interfaces
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this operating system cannot fork")
def test_either_interface_to_tf32_may_have_been_used_before(python):
    *answers, without, after = python(FLAGS_IN_FORKS, USED_BEFORE=json.dumps(USED_BEFORE)).stdout.splitlines()
    assert [json.loads(answer) for answer in answers] == [[used, *4 * [True]] for used in USED_BEFORE]
    assert after == without, "backends follow the precision of all backends as they would without a setting"
    assert after.startswith("ieee")  # convolutions do not follow in torch 2.11


# --- what a machine lacks ----------------------------------------------------------------------------


@pytest.mark.parametrize("threads", range(1, 1 + min(2, os.cpu_count() or 1)))
def test_as_many_threads_work_as_are_asked_for(threads):
    a = torch.randn(1000, 1000)

    def work():
        for _ in range(60):
            a @ a

    with gl.setting(f"cpu:threads={threads}"):
        assert gl.working_threads(work) == threads


@pytest.mark.parametrize(("setting", "granted"), [("cpu", 1), ("cpu:threads=2", 2)])
def test_no_more_threads_than_a_quota_grants(python, setting, granted):
    code = f"import gpulab as gl, torch\nwith gl.setting('{setting}'): print(torch.get_num_threads())"
    told = python(code, LOKY_MAX_CPU_COUNT="1", OMP_NUM_THREADS="3").stdout  # joblib's stand-in for a quota
    assert int(told) == granted


def test_nobody_works_when_there_is_nothing_to_do(monkeypatch):
    threads = [SimpleNamespace(id=n, user_time=n, system_time=1.0) for n in range(3)]
    monkeypatch.setattr(psutil.Process, "threads", lambda _: threads)
    assert gl.working_threads(lambda: None) == 0


CONVOLVE = """
import sys
from gpulab.settings import Setting

setting = Setting.parse(sys.argv[1])
setting.prepare()

import torch

with setting.apply():
    torch.nn.functional.conv2d(torch.ones(1, 64, 64, 64), torch.ones(64, 64, 3, 3))
print("capability", torch.backends.cpu.get_cpu_capability(), "threads", torch.get_num_threads())
"""


@needs_avx512
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
def test_a_setting_prepares_a_process_in_which_torch_is_not_loaded(python):
    plain = python(CONVOLVE, "cpu", ONEDNN_VERBOSE="1").stdout
    older = python(CONVOLVE, "cpu:isa=avx2,threads=1", ONEDNN_VERBOSE="1").stdout
    assert "capability AVX512" in plain
    assert re.search(r"convolution,\w+:avx(512|10)", plain), "nothing to tell AVX2 from"
    assert "capability AVX2 threads 1" in older
    assert re.search(r"isa:.*AVX2", older)
    assert re.search(r"convolution,\w+:avx2", older)
    assert not re.search(r"avx-?512|avx10|amx", older, re.IGNORECASE)


# --- on a GPU ----------------------------------------------------------------------------------------


TF32_ON_AND_OFF = """
import json, os
import torch
import gpulab as gl

torch.use_deterministic_algorithms(False)
for used in json.loads(os.environ["USED_BEFORE"]):
    if os.fork():
        os.wait()
        continue
    exec(used)
    a = torch.full((64, 64), 1 + 2**-12, device="cuda")  # TF32 keeps 10 bits: 1 + 2**-12 becomes 1
    image, kernel = a.repeat(16, 1).reshape(1, 64, 16, 64), a.reshape(64, 64, 1, 1)
    old = torch.backends.cudnn.conv.fp32_precision, torch.backends.cuda.matmul.fp32_precision
    exact = []
    for text in ("cuda:tf32=off", "cuda:tf32=on"):
        with gl.setting(text):
            exact.append([bool((a @ a > 64).all()), bool((torch.nn.functional.conv2d(image, kernel) > 64).all())])
    new = torch.backends.cudnn.conv.fp32_precision, torch.backends.cuda.matmul.fp32_precision
    print(json.dumps([used, old == new, *exact]), flush=True)
    os._exit(0)
"""


@needs_both_interfaces
@needs_cuda
def test_tf32_is_switched_whichever_interface_was_used_before(python):
    answers = python(TF32_ON_AND_OFF, USED_BEFORE=json.dumps(USED_BEFORE)).stdout.splitlines()
    every_bit, too_few = [True, True], [torch.cuda.get_device_capability() < (8, 0)] * 2
    assert [json.loads(answer) for answer in answers] == [[used, True, every_bit, too_few] for used in USED_BEFORE]


@needs_cuda
def test_cudnn_can_be_switched_off():
    image, kernel = torch.ones(1, 1, 8, 8, device="cuda"), torch.ones(1, 1, 3, 3, device="cuda")
    with gl.setting("cuda:cudnn=off"):
        assert not torch.backends.cudnn.enabled
        assert torch.nn.functional.conv2d(image, kernel).sum() == 9 * 36
