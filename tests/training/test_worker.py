import json
import os
import subprocess
import sys

import gpulab as gl

JOB = {"net": "autoencoder", "profile": "smoke", "setting": "cpu:threads=1", "seed": 1, "frames": 40}


def test_a_worker_answers_each_job_with_lines_of_json_and_survives_bad_ones(tmp_path):
    jobs = [
        {**JOB, "store": str(tmp_path)},
        {**JOB, "setting": "cuda:77"},
        {**JOB, "model_options": {"hidden": []}},
        {**JOB, "colour": "red"},
        {**JOB, "store": str(tmp_path), "seed": 2},
    ]
    lines = "".join(json.dumps({"number": 10 * place, **job}) + "\n" for place, job in enumerate(jobs))
    command = [sys.executable, "-P", "-m", "gpulab.training.worker"]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=120, env=os.environ)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [answer.pop("number") for answer in answers] == [0, 0, 0, 10, 20, 30, 40, 40, 40]
    frame = gl.runs(tmp_path)
    kinds = ["+".join(answer) for answer in answers]
    assert kinds == ["done+loss", "done+loss", "id", "error", "error", "error", "done+loss", "done+loss", "id"]
    assert [answer["id"] for answer in answers if "id" in answer] == frame.id.tolist()
    assert [answer["done"] for answer in answers if "done" in answer] == [20, 40, 20, 40]
    assert "cuda:77" in answers[3]["error"]
    assert "hidden" in answers[4]["error"]
    assert "colour" in answers[5]["error"]
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
