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


def test_the_values_are_those_of_torch_psutil_and_platform(here):
    assert here["cpu"]["architecture"] == platform.machine()
    assert here["cpu"]["logical_cores"] == psutil.cpu_count()
    assert 1 <= here["cpu"]["physical_cores"] <= here["cpu"]["logical_cores"]
    assert here["memory_bytes"] == psutil.virtual_memory().total
    assert len([gpu for gpu in here["gpus"] if gpu["kind"] == "cuda"]) == torch.cuda.device_count()
    told = {"torch": torch.__version__, "cuda": torch.version.cuda, "rocm": torch.version.hip, "gpulab": gl.__version__}
    told |= {"python": platform.python_version(), "os": platform.platform()}
    assert {name: here["software"][name] for name in told} == told


of_linux = pytest.mark.skipif(
    not os.path.exists("/proc/cpuinfo") or platform.machine() != "x86_64",
    reason="Linux tells the model on x86-64 alone",
)


@of_linux
def test_the_cpu_is_the_one_that_the_kernel_reports(here):
    with open("/proc/cpuinfo") as lines:
        reported = dict((part.strip() for part in line.split(":", 1)) for line in lines if ":" in line)
    assert here["cpu"]["model"] == reported["model name"]
    flags = {flag.replace("_", "") for flag in reported["flags"].split()}  # some have two spellings
    assert {name.replace("_", "") for name in here["cpu"]["vector_extensions"]} <= flags
    assert ("avx2" in here["cpu"]["vector_extensions"]) == ("avx2" in reported["flags"].split())


@of_linux
def test_the_cpu_keeps_its_name_when_the_process_that_is_asked_for_the_rest_is_killed(here, monkeypatch):
    monkeypatch.setattr("cpuinfo.get_cpu_info", dict)
    assert passports.cpu_description.__wrapped__() == {"model": here["cpu"]["model"], "flags": []}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA GPU")
def test_the_gpus_are_those_that_torch_sees(here):
    gpu, properties = here["gpus"][0], torch.cuda.get_device_properties(0)
    assert gpu["name"] == torch.cuda.get_device_name(0)
    assert gpu["compute_capability"] == ".".join(map(str, torch.cuda.get_device_capability(0)))
    assert (gpu["memory_bytes"], gpu["multiprocessors"]) == (properties.total_memory, properties.multi_processor_count)
    assert here["software"]["cudnn"] == str(torch.backends.cudnn.version())


def test_a_passport_shows_its_cpu_torch_and_version_as_text_and_as_a_table(here):
    for shown in (str(here), here._repr_html_()):
        for value in (gl.__version__, here["software"]["torch"], platform.python_version()):
            assert value in shown
    assert here._repr_html_().count("<tr>") == len(here.rows()) == len(str(here).splitlines())
    assert torch.__version__ in here.summary()


def test_names_cannot_break_out_of_the_html(here):
    odd = json.loads(json.dumps(here))
    odd["cpu"]["model"] = "<script>alert(1)</script> & co"
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; co" in Passport(odd)._repr_html_()


def test_gpus_are_named_with_all_that_is_known_and_nothing_else(here):
    known = {"kind": "cuda", "name": "Titan", "compute_capability": "7.5", "multiprocessors": 72}
    known |= {"memory_bytes": 24 * 2**30, "driver": "550.1"}
    two = Passport(json.loads(json.dumps(here)) | {"gpus": [known, {"kind": "mps", "name": "Apple GPU"}]})
    assert ("GPU 0", "Titan, compute capability 7.5, 72 multiprocessors, 24 GiB, driver 550.1") in two.rows()
    assert ("GPU 1", "Apple GPU") in two.rows()
    assert two.summary() == f"Titan, Apple GPU, torch {torch.__version__}"


def test_the_commit_is_that_of_the_checkout(here):
    root = os.path.dirname(os.path.dirname(gl.__file__))
    if not os.path.exists(os.path.join(root, ".git")):
        pytest.skip("gpulab does not run from a git checkout")
    head = subprocess.run(["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout
    assert here["software"]["commit"].removesuffix("-dirty") == head.strip()
