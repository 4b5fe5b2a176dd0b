import contextlib
import inspect
import json
import os
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gpulab as gl
from gpulab.numerics._flags import arithmetic
from gpulab.settings import ISA_VALUES, ISA_VARIABLES, OPTIONS, PRECISIONS, Setting

needs_cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="this machine has no CUDA GPU"
)
VALUES = dict.fromkeys(("tf32", "cudnn", "denormals", "deterministic"), ("on", "off"))
VALUES |= {
    "threads": ["1", "12"],
    "isa": [*ISA_VALUES],
    "precision": [*PRECISIONS],
    "compile": ["inductor"],
}
VALUES |= {
    "emulate": ["tf32", "hopper"],
    "order": ["pairwise", "tensor-core+split-4"],
    "autocast": ["bfloat16"],
}


def denormal_products():
    """The share of the elements of a long tensor that keep values below 1.2e-38; each thread
    computes a part of the tensor.
    """
    return float((torch.full((1 << 22,), 1e-30, dtype=torch.float32) * 1e-10).ne(0).double().mean())


def flags():
    """The flags of torch that a setting may touch, read from torch and not from gpulab."""

    def read(what):
        try:
            return what()
        except RuntimeError:  # torch cannot read the old interface once the new one was used
            return "refused"

    b = torch.backends
    every = ()
    if hasattr(b, "fp32_precision"):
        every = (
            b,
            b.cuda.matmul,
            b.cudnn,
            b.cudnn.conv,
            b.cudnn.rnn,
            b.mkldnn,
            b.mkldnn.matmul,
            b.mkldnn.conv,
        )
    return {
        "old": [read(lambda: b.cuda.matmul.allow_tf32), read(lambda: b.cudnn.allow_tf32)],
        "old precision": read(torch.get_float32_matmul_precision),
        "new": [backend.fp32_precision for backend in every],
        "threads": torch.get_num_threads(),
        "dtype": str(torch.get_default_dtype()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "cudnn": (b.cudnn.enabled, b.cudnn.benchmark, b.cudnn.deterministic),
        "fused": (
            b.mha.get_fastpath_enabled(),
            b.cuda.flash_sdp_enabled(),
            b.cuda.mem_efficient_sdp_enabled(),
        ),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()),
        "recompile_limit": torch._dynamo.config.recompile_limit,
        "environment": {
            name: text
            for name, text in os.environ.items()
            if name.startswith(("CUBLAS", "OMP", "ATEN"))
        },
    }


# --- text -----------------------------------------------------------------------------------------


@given(st.sampled_from(["cpu", "cuda", "cuda:0", "cuda:13", "mps", "xpu"]), st.data())
def test_setting_and_its_text_are_inverse(device, data):
    kind, options = device.partition(":")[0], {}
    for name in OPTIONS:
        if kind in OPTIONS[name].devices and data.draw(st.booleans()):
            options[name] = data.draw(st.sampled_from(VALUES[name]))
    emulated, others = (
        {"emulate", "order"} & options.keys(),
        {"precision", "autocast", "compile"} & options.keys(),
    )
    if len(others) + bool(emulated) > 1 or {"compile", "isa"} <= options.keys():
        options = {
            name: value
            for name, value in options.items()
            if name in ("threads", "tf32", "deterministic")
        }
    text = f"{device}:{','.join('='.join(option) for option in options.items())}".rstrip(":")
    parsed = Setting.parse(text)
    assert (str(parsed), repr(parsed)) == (text, f"Setting({text!r})")
    assert Setting.parse(str(parsed)) == parsed
    assert (parsed.device, parsed.kind) == (device, kind)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", ["''", "cpu", "cuda"]),
        ("cpu:2", ["'cpu:2'", "threads"]),
        ("cuda:-1", ["'cuda:-1'", "tf32"]),
        ("cpu:threads=0", ["'0'", "1 to 9999"]),
        ("cpu:threads=1,threads=2", ["'threads'", "twice"]),
        (
            "cpu:colour=red",
            ["'colour'", "threads, isa, tf32, cudnn, denormals, deterministic, precision"],
        ),
        ("cpu:tf32=off,emulate=tf32", ["'tf32'", "cuda only", "emulate=ampere or hopper"]),
        ("cpu:precision=bfloat16,order=pairwise", ["float32", "leave out precision"]),
        ("cpu:compile=", ["''", "inductor"]),
        ("cpu:compile=inductor,emulate=tf32", ["compiled code", "emulate"]),
        ("cpu:compile=inductor,isa=avx2", ["instructions"]),
        ("cpu:autocast=bfloat16,precision=float64", ["leave out precision"]),
    ],
)
def test_setting_refuses_a_malformed_text_naming_the_value(text, named):
    with pytest.raises(gl.UsageError) as error:
        Setting.parse(text)
    assert [word for word in named if word not in str(error.value)] == []


def test_setting_refuses_values_that_it_cannot_have():
    with pytest.raises(gl.UsageError, match=re.escape("Setting.parse('cpu:threads=1')")):
        gl.Setting("cpu:threads=1")
    with pytest.raises(gl.UsageError, match="threads='-1' must be a number"):
        gl.Setting("cpu", threads=-1)


def test_setting_environment_is_what_a_process_reads_when_it_starts():
    isa = dict(zip(ISA_VARIABLES, ("avx2", "AVX2", "AVX2"), strict=True))
    assert Setting.parse("cuda:tf32=on").environment() == {}
    assert Setting.parse("cpu:isa=avx2,threads=3").environment() == {"OMP_NUM_THREADS": "3"} | isa
    assert Setting.parse("cuda:deterministic=on").environment() == {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8"
    }


# --- applying and restoring -----------------------------------------------------------------------


@pytest.fixture(params=["as a process begins", "unusual"])
def users_flags(request, monkeypatch):
    """Leave the flags of this process as they are, or set them to values that are not a default
    anywhere, so that the test notices if a default is restored instead of the user's value.
    """
    before, cudnn, matmul = flags(), torch.backends.cudnn, torch.backends.cuda.matmul
    if request.param == "unusual":
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
    matmul.allow_tf32, cudnn.allow_tf32 = before["old"]
    if new := before["new"]:
        matmul.fp32_precision, cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision = (
            new[1],
            new[3],
            new[4],
        )
    cudnn.enabled, cudnn.benchmark, cudnn.deterministic = before["cudnn"]


CPU_SETTINGS = [
    "cpu",
    "cpu:deterministic=off",
    "cpu:threads=2,denormals=off",
    "cpu:autocast=bfloat16",
]
CPU_SETTINGS += ["cpu:compile=aot_eager", "cpu:threads=2,deterministic=on,precision=bfloat16"]
CPU_SETTINGS += ["cpu:emulate=hopper,order=tensor-core+split-2"]
CUDA_SETTINGS = [
    "cuda:tf32=off",
    "cuda:tf32=on",
    "cuda:cudnn=off",
    "cuda:tf32=off,deterministic=on",
]


@pytest.mark.usefixtures("users_flags")
@pytest.mark.parametrize(
    "text", [*CPU_SETTINGS, *(pytest.param(text, marks=needs_cuda) for text in CUDA_SETTINGS)]
)
def test_setting_restores_every_flag_also_after_an_exception(text):
    before = flags() | {"denormals": denormal_products()}
    with contextlib.suppress(ZeroDivisionError), gl.setting(text) as inside:
        assert str(inside) == text
        torch.set_num_threads(4)  # changes made inside the context are undone as well
        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.allow_tf32 = False
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:2"
        raise ZeroDivisionError
    assert flags() | {"denormals": denormal_products()} == before


def test_setting_is_active_inside_and_a_nested_one_is_undone():
    with gl.setting("cpu:threads=1,deterministic=on,precision=float64") as outside:
        outer = flags()
        assert torch.get_num_threads() == arithmetic()["threads"] == 1
        assert torch.are_deterministic_algorithms_enabled()
        assert arithmetic()["deterministic"]
        assert (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark) == (True, False)
        assert torch.zeros(1).dtype == outside.dtype == torch.float64
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        with gl.setting("cpu:threads=2,precision=bfloat16") as inner:
            assert (
                (torch.get_num_threads(), torch.zeros(1).dtype)
                == (2, inner.dtype)
                == (2, torch.bfloat16)
            )
            assert torch.are_deterministic_algorithms_enabled(), (
                "an option that is not named leaves a flag as it is"
            )
        with pytest.raises(gl.GpulabError), gl.setting("cuda:77"):
            pass
        assert flags() == outer


@pytest.mark.parametrize("threads", [1, 3])
def test_setting_denormals_holds_in_every_thread_forward_and_backward(threads):
    with gl.setting(f"cpu:threads={threads}"), gl.setting("cpu:denormals=off"):
        assert denormal_products() == 0
        with gl.setting("cpu:denormals=on"):
            assert denormal_products() == 1
        x = torch.full((1 << 22,), 1e-30, requires_grad=True)
        x.mul(1e-20).mul(1e-20).sum().backward()
        assert not x.grad.any()


def test_setting_denormals_names_threads_that_it_cannot_switch(monkeypatch):
    monkeypatch.setattr("threadpoolctl.threadpool_info", list)
    with gl.setting("cpu:threads=3"):
        denormal_products()  # starts the threads
        with pytest.raises(gl.GpulabError, match=r"denormal.* \d+ threads"):
            gl.setting("cpu:denormals=off").__enter__()
        assert denormal_products() == 1


def test_setting_autocast_sees_weights_that_an_optimizer_has_changed():
    layer, x = torch.nn.Linear(4, 4), torch.ones(1, 4)
    with gl.setting("cpu:autocast=bfloat16"):
        before = layer(x)
        before.sum().backward()
        torch.optim.SGD(layer.parameters(), lr=1.0).step()
        after = layer(x)
    assert (before.dtype, layer.weight.dtype) == (torch.bfloat16, torch.float32)
    assert (after < before - 4).all(), "a cached cast would give the same result again"


def test_setting_compiled_uses_its_backend_or_leaves_the_function():
    torch._dynamo.register_backend(
        lambda graph, _: lambda *args: [2 * out for out in graph(*args)], "twice"
    )
    function = torch.nn.Linear(2, 2)
    assert Setting.parse("cpu").compiled(function) is function
    with gl.setting("cpu:compile=twice") as setting, torch.no_grad():
        assert torch.equal(
            setting.compiled(function)(torch.ones(1, 2)), 2 * function(torch.ones(1, 2))
        )
    with gl.setting("cpu:compile=eager") as setting, torch._dynamo.config.patch(recompile_limit=2):
        compiled = setting.compiled(lambda x: x + 1)
        with pytest.raises(Exception, match="recompile_limit"):
            [compiled(torch.ones(size)) for size in range(1, 9)]


def test_setting_compile_refuses_unknown_backends_and_a_missing_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    for text, words in (
        ("inducter", r"'cpu:compile=inducter'.*it has .*inductor"),
        ("inductor", r"no C\+\+ compiler"),
    ):
        with pytest.raises(gl.GpulabError, match=words), gl.setting(f"cpu:compile={text}"):
            pass


# --- TF32 through both interfaces, in separate processes: using the new one disables the old one --

USED_BEFORE = [
    "pass",
    "torch.backends.cuda.matmul.allow_tf32 = True",
    "torch.backends.cudnn.allow_tf32 = False",
    "torch.set_float32_matmul_precision('medium')",
    "torch.backends.fp32_precision = 'tf32'",
    "torch.backends.cudnn.fp32_precision = 'tf32'",
    "torch.backends.cudnn.conv.fp32_precision = 'ieee'",
    "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'",
]
FLAGS_IN_FORKS = f"""
import contextlib, json, os
import torch
import gpulab as gl

{inspect.getsource(flags)}
torch.use_deterministic_algorithms(False)  # loads much of torch, once for all forks
for used in json.loads(os.environ["USED_BEFORE"]):
    if os.fork():
        os.wait()
        continue
    exec(used)
    before = flags()
    with gl.setting("cpu:deterministic=on"):
        # as a setting of a GPU would do
        if "refused" not in (*before["old"], before["old precision"]):
            torch.backends.cuda.matmul.allow_tf32 = not torch.backends.cuda.matmul.allow_tf32
            torch.backends.cudnn.allow_tf32 = not torch.backends.cudnn.allow_tf32
    print(json.dumps([used, before == flags()]), flush=True)
    os._exit(0)

for context in (contextlib.nullcontext(), gl.setting("cpu")):
    if os.fork():
        os.wait()
        continue
    torch.backends.fp32_precision = "tf32"
    with context:
        pass
    torch.backends.fp32_precision = "ieee"
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    print(cuda.matmul.fp32_precision, cudnn.conv.fp32_precision, flush=True)
    os._exit(0)
"""


@pytest.mark.skipif(
    not hasattr(torch.backends, "fp32_precision"), reason="this torch has only the old interface"
)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this operating system cannot fork")
def test_setting_restores_tf32_whichever_interface_was_used_before(python):
    *answers, without, after = python(
        FLAGS_IN_FORKS, USED_BEFORE=json.dumps(USED_BEFORE)
    ).stdout.splitlines()
    assert [json.loads(answer) for answer in answers] == [[used, True] for used in USED_BEFORE]
    assert after == without, (
        "each backend still follows the global precision, as it does without a setting"
    )


@needs_cuda
def test_setting_switches_tf32_and_cudnn_on_a_gpu():
    a = torch.full((64, 64), 1 + 2**-12, device="cuda")  # TF32 keeps 10 bits: 1 + 2**-12 becomes 1
    image, kernel = a.repeat(16, 1).reshape(1, 64, 16, 64), a.reshape(64, 64, 1, 1)
    for text, exact in (
        ("tf32=off", True),
        ("tf32=on", torch.cuda.get_device_capability() < (8, 0)),
    ):
        with gl.setting(f"cuda:{text}"):
            assert bool((a @ a > 64).all()) is exact
            assert bool((torch.nn.functional.conv2d(image, kernel) > 64).all()) is exact
    with gl.setting("cuda:cudnn=off"):
        assert not torch.backends.cudnn.enabled


# --- threads and instructions ---------------------------------------------------------------------


@pytest.mark.parametrize(("setting", "granted"), [("cpu", 1), ("cpu:threads=2", 2)])
def test_setting_takes_no_more_threads_than_a_quota_grants(python, setting, granted):
    code = (
        f"import gpulab as gl, torch\nwith gl.setting('{setting}'): print(torch.get_num_threads())"
    )
    # joblib's stand-in for a quota
    told = python(code, LOKY_MAX_CPU_COUNT="1", OMP_NUM_THREADS="3").stdout
    assert int(told) == granted


def test_setting_prepares_the_environment_of_a_process_without_torch(python):
    code = """
    import os
    from gpulab.settings import Setting

    Setting.parse("cpu:isa=avx2,threads=3").prepare()
    print(os.environ["OMP_NUM_THREADS"], os.environ["ATEN_CPU_CAPABILITY"])
    """
    assert python(code).stdout.split() == ["3", "avx2"]
