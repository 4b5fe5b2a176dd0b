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


def test_every_run_made_under_a_registration_keeps_its_digest_which_is_no_part_of_what_is_run(plan, tmp_path):
    store, options = tmp_path / "store", {"profile": "smoke", "frames": 20}
    made = {"how": {"registered": str(plan)}, "options": {"frames": 20}, "store": store}
    gl.Experiment("autoencoder", ["cpu:threads=1"], 1, "smoke", **made).run(progress=False)
    gl.train(lambda seed: seed / 2, store=store, registered=plan, progress=False)
    registered = gl.train("autoencoder", store=store, registered=plan, progress=False, **options)
    gl.train("autoencoder", seed=1, store=store, progress=False, **options)
    gl.store.listing.pack(store, tmp_path / "packed.parquet")
    digest = hashlib.sha256(plan.read_bytes()).hexdigest()
    for runs in (gl.runs(store), gl.runs(tmp_path / "packed.parquet")):
        assert set(runs[runs.seed == 0].registered) == {f"a-plan {digest}"}
        assert runs[runs.seed == 1].registered.isna().all()
    again = gl.train("autoencoder", progress=False, **options)
    for name in ("id", "configuration"):
        assert registered.record[name] == again.record[name]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, r"a-plan\.md.: cannot be read"),
        (PLAN.replace("## Margin\n", "").encode(), "has no heading '## Margin'"),
        (b"\xff\xfe", "cannot be read"),
    ],
)
def test_what_lays_nothing_down_is_refused_before_anything_is_trained(content, words, plan):
    plan.unlink()
    if content:
        plan.write_bytes(content)
    with pytest.raises(gl.UsageError, match=words):
        gl.train("autoencoder", registered=plan)


def test_recorded_runs_were_made_under_the_registrations_that_are_here():
    files = [*REGISTERED.glob("*.md")]
    assert files
    for file in files:
        runs = gl.runs(records.recorded_folder("studies") / f"{file.stem}.parquet")
        assert len(runs)
        assert set(runs.registered) == {records.registration(file)["registered"]}, "changed since"
