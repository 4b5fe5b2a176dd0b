import json
import os
import platform
import subprocess

import psutil
import pytest
import torch

import gpulab as gl
from gpulab import passports
from gpulab.passports import Passport


@pytest.fixture(scope="module")
def here():
    return gl.passport()


def test_passport_has_the_values_of_torch_psutil_and_platform(here):
    assert here["cpu"]["architecture"] == platform.machine()
    assert here["cpu"]["logical_cores"] == psutil.cpu_count()
    assert 1 <= here["cpu"]["physical_cores"] <= here["cpu"]["logical_cores"]
    assert here["memory_bytes"] == psutil.virtual_memory().total
    told = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "gpulab": gl.__version__,
    }
    told |= {"python": platform.python_version(), "os": platform.platform()}
    assert told.items() <= here["software"].items()
    gpus = [gpu for gpu in here["gpus"] if gpu["kind"] == "cuda"]
    assert len(gpus) == torch.cuda.device_count()
    for index, gpu in enumerate(gpus):
        assert gpu["name"] == torch.cuda.get_device_name(index)
        assert gpu["compute_capability"] == ".".join(
            map(str, torch.cuda.get_device_capability(index))
        )


@pytest.mark.skipif(
    not os.path.exists("/proc/cpuinfo") or platform.machine() != "x86_64",
    reason="only x86-64 Linux reports the model",
)
def test_passport_cpu_is_the_kernels_also_when_cpuinfo_is_killed(here, monkeypatch):
    with open("/proc/cpuinfo") as lines:
        reported = dict(
            (part.strip() for part in line.split(":", 1)) for line in lines if ":" in line
        )
    assert here["cpu"]["model"] == reported["model name"]
    assert ("avx2" in here["cpu"]["vector_extensions"]) == ("avx2" in reported["flags"].split())
    monkeypatch.setattr("cpuinfo.get_cpu_info", dict)
    assert passports.cpu_description.__wrapped__() == passports.cpu_description()
    monkeypatch.setattr(passports.Path, "read_text", lambda *_, **__: "")  # another system
    assert passports.cpu_description.__wrapped__() == {
        "model": platform.processor() or platform.machine(),
        "flags": [],
    }


def test_passport_text_and_table_escape_every_name(here):
    known = {"kind": "cuda", "name": "<script>alert(1)</script> & co", "compute_capability": "7.5"}
    known |= {"multiprocessors": 72, "memory_bytes": 24 * 2**30, "driver": "550.1"}
    two = Passport(
        json.loads(json.dumps(here)) | {"gpus": [known, {"kind": "mps", "name": "Apple GPU"}]}
    )
    assert two._repr_html_().count("<tr>") == len(two.rows()) == len(str(two).splitlines())
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; co, compute capability" in two._repr_html_()
    words = f"{known['name']}, compute capability 7.5, 72 multiprocessors, 24 GiB, driver 550.1"
    assert {("GPU 0", words), ("GPU 1", "Apple GPU"), ("python", platform.python_version())} <= set(
        two.rows()
    )
    assert two.summary() == f"{known['name']}, Apple GPU, torch {torch.__version__}"


def test_passport_commit_is_that_of_the_checkout(here):
    root = os.path.dirname(os.path.dirname(gl.__file__))
    if not os.path.exists(os.path.join(root, ".git")):
        pytest.skip("gpulab does not run from a git checkout")
    head = subprocess.run(
        ["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout
    assert here["software"]["commit"].removesuffix("-dirty") == head.strip()
