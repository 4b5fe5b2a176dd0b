"""Registrations: what was laid down before a run, by its digest."""

import hashlib
from pathlib import Path

import pytest

import gpulab as gl
from gpulab.store import records

REGISTERED = Path(__file__).parents[2] / "data" / "registered"
PLAN = "# A plan\n\n" + "".join(f"## {heading}\nWords.\n\n" for heading in records.LAID_DOWN)


@pytest.fixture
def plan(tmp_path):
    file = tmp_path / "a-plan.md"
    file.write_text(PLAN, encoding="utf-8")
    return file


def test_every_run_made_under_a_registration_keeps_its_digest(plan, tmp_path):
    how = {"registered": str(plan)}
    options = {"seeds": 1, "profile": "smoke", "store": tmp_path / "store", "how": how}
    gl.Experiment("autoencoder", ["cpu:threads=1"], **options).run(progress=False)
    gl.train(lambda seed: seed / 2, store=tmp_path / "store", registered=plan, progress=False)
    gl.train("autoencoder", seed=1, profile="smoke", store=tmp_path / "store", progress=False)
    gl.store.listing.pack(tmp_path / "store", tmp_path / "packed.parquet")
    digest = hashlib.sha256(plan.read_bytes()).hexdigest()
    for runs in (gl.runs(tmp_path / "store"), gl.runs(tmp_path / "packed.parquet")):
        made_under = set(runs[runs.seed == 0].registered)
        assert made_under == {f"a-plan {digest}"}
        assert runs[runs.seed == 1].registered.isna().all()


def test_a_registration_is_no_part_of_what_is_run(plan, tmp_path):
    run = gl.train("autoencoder", profile="smoke", store=tmp_path, registered=plan, progress=False)
    again = gl.train("autoencoder", profile="smoke", progress=False)
    assert run.record["id"] == again.record["id"]
    assert run.record["summary"]["weights"] == again.record["summary"]["weights"]


def test_what_lays_nothing_down_is_refused_before_anything_is_trained(plan, tmp_path):
    with pytest.raises(gl.UsageError, match=r"none\.md.: cannot be read"):
        gl.train("autoencoder", registered=tmp_path / "none.md")
    plan.write_text(PLAN.replace("## Margin\n", ""), encoding="utf-8")
    with pytest.raises(gl.UsageError, match="has no heading '## Margin'"):
        gl.train("autoencoder", registered=plan)
    plan.write_bytes(b"\xff\xfe")
    with pytest.raises(gl.UsageError, match="cannot be read"):
        gl.train("autoencoder", registered=plan)


def test_recorded_runs_were_made_under_the_registrations_that_are_here():
    files = [*REGISTERED.glob("*.md")]
    assert files
    for file in files:
        runs = gl.runs(records.recorded_folder("studies") / f"{file.stem}.parquet")
        assert len(runs)
        assert set(runs.registered) == {records.registration(file)["registered"]}, "changed since"
