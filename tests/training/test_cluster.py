"""Experiments on a Ray cluster, as notebook 08 does them."""

import json
import os
from pathlib import Path

import pytest

import gpulab as gl
from gpulab.settings import Setting

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "08_scale_out.ipynb"


@pytest.mark.slow("starts Ray")
def test_run_on_ray_keeps_the_runs_of_this_machine(tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed")
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    (source,) = (text for cell in cells if (text := "".join(cell["source"])).startswith("def run_on_ray("))
    names = {"gl": gl, "os": os, "Setting": Setting}
    exec(source, names)
    experiment = gl.Experiment("autoencoder", ["cpu:threads=1"], 3, "smoke", tmp_path, options={"frames": 20})
    alone = [gl.train(**job | {"store": None}, progress=False).record for job in experiment.jobs()]
    gl.train(**experiment.jobs()[1], progress=False)
    there = gl.runs(tmp_path)
    frame = names["run_on_ray"](experiment)
    assert frame.id.tolist() == [record["id"] for record in alone]
    assert frame.weights.tolist() == [record["summary"]["weights"] for record in alone]
    assert there.equals(frame[frame.seed == 1].reset_index(drop=True)), "what was there is as it was"
