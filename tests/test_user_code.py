import pytest

import gpulab as gl
from gpulab.user_code import find_function


def test_a_step_is_found_by_module_and_by_file(tmp_path, monkeypatch):
    (tmp_path / "my_steps_here.py").write_text("def step(setting):\n    return setting\n\nnumber = 3\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    assert find_function("my_steps_here:step", "step")("x") == "x"
    assert find_function(f"{tmp_path / 'my_steps_here.py'}:step", "step")("y") == "y"
    for words, name in {
        "expected module:name": "my_steps_here",
        "no function": "my_steps_here:number",
        "cannot be imported": "no_such_module_anywhere:step",
    }.items():
        with pytest.raises(gl.UsageError, match=words):
            find_function(name, "step")
