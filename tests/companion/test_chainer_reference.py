"""The published network, where Chainer is not, and where it is."""

import os
import sys

import pytest

import gpulab as gl


def test_without_chainer_it_says_what_to_install(monkeypatch):
    monkeypatch.delenv("GPULAB_CHAINER_PYTHON", raising=False)
    monkeypatch.delenv("GPULAB_CHAINER_PREDNET", raising=False)
    told = gl.published_network()
    assert told.startswith("Skipped: ")
    assert "chainer==7.8.1" in told
    assert "GPULAB_CHAINER_PREDNET" in told


def test_a_folder_without_the_network_is_named(tmp_path):
    with pytest.raises(gl.GpulabError, match=r"holds no net\.py"):
        gl.published_network(sys.executable, tmp_path)


def test_a_python_that_fails_is_quoted(tmp_path):
    (tmp_path / "net.py").write_text("raise ImportError('no such thing here')\n")
    with pytest.raises(gl.GpulabError, match=r"(?i)chainer|no such thing here"):
        gl.published_network(sys.executable, tmp_path, profile="smoke")
    with pytest.raises(gl.GpulabError, match="could not run"):
        gl.published_network(str(tmp_path / "no-python"), tmp_path, profile="smoke")


def test_the_published_network_itself():
    if not (os.environ.get("GPULAB_CHAINER_PYTHON") and os.environ.get("GPULAB_CHAINER_PREDNET")):
        pytest.skip("GPULAB_CHAINER_PYTHON and GPULAB_CHAINER_PREDNET name no Chainer and no copy of the network")
    assert "19 of 19 forward losses have the same bits; the gradient is off" in gl.published_network(profile="smoke")
