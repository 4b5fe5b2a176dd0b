import importlib
import os

import pytest

import gpulab as gl
from gpulab.device.processes import measure
from gpulab.settings import Setting

LIGHT = """
import os

def variables(setting, names):
    print("what a function prints is not its answer")
    return {name: os.environ.get(name) for name in names}
"""
NEEDY = "cpu:isa=avx2"


@pytest.fixture
def variables(tmp_path, monkeypatch):
    """A function of a module that is quickly imported, here and in another process."""
    (tmp_path / "light.py").write_text(LIGHT, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    return importlib.import_module("light").variables


def test_a_setting_that_needs_a_process_gets_one_with_its_variables(variables):
    environment = Setting.parse(NEEDY).environment()
    assert measure(variables, NEEDY, names=[*environment, "nothing"]) == {**environment, "nothing": None}
    assert "ATEN_CPU_CAPABILITY" not in os.environ


def test_others_are_measured_here(variables):
    assert measure(variables, "cpu", names=["ATEN_CPU_CAPABILITY"]) == {"ATEN_CPU_CAPABILITY": None}
    assert measure(lambda setting: setting, "cpu:threads=1") == "cpu:threads=1"


def test_a_process_that_fails_says_why(variables):
    with pytest.raises(gl.GpulabError, match=r"'cpu:isa=avx2': its process ended with status 1: .*unexpected"):
        measure(variables, NEEDY, nonsense=1)
