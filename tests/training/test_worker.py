import json

import gpulab as gl
from gpulab.training.worker import worker_loop

JOB = {"net": "autoencoder", "profile": "smoke", "setting": "cpu:threads=1", "seed": 1, "frames": 40}


def test_a_worker_answers_each_job_with_lines_of_json_and_survives_bad_ones(tmp_path, capfd):
    jobs = [
        {**JOB, "store": str(tmp_path)},
        {**JOB, "setting": "cuda:77"},
        {**JOB, "model_options": {"hidden": []}},
        {**JOB, "colour": "red"},
        {**JOB, "store": str(tmp_path), "seed": 2},
    ]
    worker_loop(iter([json.dumps({"number": 10 * place, **job}) + "\n" for place, job in enumerate(jobs)]))
    said, errors = capfd.readouterr()
    answers = [json.loads(line) for line in said.splitlines()]
    assert [answer.pop("number") for answer in answers] == [0, 0, 0, 10, 20, 30, 40, 40, 40]
    frame = gl.runs(tmp_path)
    kinds = ["+".join(answer) for answer in answers]
    assert kinds == ["done+loss", "done+loss", "id", "error", "error", "error", "done+loss", "done+loss", "id"]
    assert [answer["id"] for answer in answers if "id" in answer] == frame.id.tolist()
    assert [answer["done"] for answer in answers if "done" in answer] == [20, 40, 20, 40]
    for answer, wrong in zip(answers[3:6], ("cuda:77", "hidden", "colour"), strict=True):
        assert wrong in answer["error"]
    assert "Traceback" not in errors
