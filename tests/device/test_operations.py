import importlib
import os

import pytest
import torch

import gpulab as gl
from gpulab.device.operations import measure
from gpulab.settings import Setting


def test_what_an_operation_fuses_is_measured():
    table = gl.device.fused_operations(("cpu",), count=2000).set_index("operation")
    plain = table.loc["a * b + c"]
    assert plain.rounded_twice == 1.0 > plain.rounded_once, "two operations cannot be fused eagerly"
    assert table.rounded_once.between(0, 1).all()


@pytest.mark.slow("another process loads torch")
def test_an_older_instruction_set_fuses_nothing():
    if "sse4_1" not in gl.passport()["cpu"]["vector_extensions"]:
        pytest.skip("no such CPU")
    table = gl.device.fused_operations(("cpu:isa=sse4",), count=1000)
    assert (table.rounded_twice == 1).all()
    assert (table.rounded_once < 1).all()


def test_an_operation_that_does_not_repeat_itself_is_counted(monkeypatch):
    results = iter(torch.tensor([1.0, 2.0, 1.0, 4.0]))
    monkeypatch.setattr(torch.Tensor, "sum", lambda *_: next(results))
    monkeypatch.setattr(torch.autograd, "grad", lambda *_: [torch.zeros(1)])
    monkeypatch.setattr(torch.nn.functional, "conv2d", lambda *_: torch.zeros(1))
    monkeypatch.setattr(torch.Tensor, "square", lambda *_: type("Squares", (), {"sum": lambda _: None})())
    row = gl.device.repeatability(("cpu",), times=4).set_index("operation").loc["sum"]
    assert row.results == 3
    assert row.spread == 3.0


LIGHT = """
import os

def variables(setting, names):
    if "abort" in names:
        os.abort()
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


def test_a_setting_that_needs_a_process_gets_one_with_its_variables_and_what_goes_wrong_there_is_told(variables):
    environment = Setting.parse(NEEDY).environment()
    assert measure(variables, NEEDY, names=[*environment, "nothing"]) == {**environment, "nothing": None}
    assert "ATEN_CPU_CAPABILITY" not in os.environ
    assert measure(variables, "cpu", names=[*environment]) == dict.fromkeys(environment), "others are measured here"
    with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
        measure(variables, NEEDY, nonsense=1)
    with pytest.raises(gl.GpulabError, match=r"(?s)'cpu:isa=avx2': its process ended: .*SIGABRT"):
        measure(variables, NEEDY, names=["abort"])
