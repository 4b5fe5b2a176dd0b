from pathlib import Path

import pytest

import gpulab as gl
from gpulab.audits._rounding import PRODUCT_OPERANDS
from gpulab.models import example_steps

ROOT = Path(__file__).parents[2]
TRACES = ROOT / "data" / "traces"
RECORDED = sorted(file for file in TRACES.glob("*.trace") if not file.name.startswith("whitener"))


def network_of(trace):
    return trace.name.partition("-cuda")[0]


SMALL = ("lstm", "transformer")
SLOW = pytest.mark.slow("a network of full size")


@pytest.mark.parametrize(
    "file",
    [
        pytest.param(file, marks=[SLOW] * (network_of(file) not in SMALL), id=network_of(file))
        for file in RECORDED
    ],
)
def test_audit_of_this_cpu_and_a_recorded_gpu_is_not_faulty(file):
    """The trace of the same step was recorded on an NVIDIA H200 with another version of torch."""
    there = gl.audits.Trace.load(file)
    assert "H200" in there.passport["gpus"][0]["name"]
    here = gl.record(getattr(example_steps, network_of(file)), "cpu", progress=False)
    report = gl.audit(here, there)
    assert not report.faulty, str(report)
    kinds = {finding.kind for finding in report.findings}
    assert kinds <= {"nondeterminism", "different random numbers", "rounding"}
    products = [op for op in there.operations if op.name in PRODUCT_OPERANDS]
    assert all(op.ratio <= 1 and op.format is None for op in products), (
        "each was compared with float64"
    )
    matched = report.table.difference.notna()
    # An LSTM or dropout is a single kernel on a GPU, and several kernels on this CPU.
    assert matched.mean() > 0.9 or any(
        "_rnn" in op.name or "dropout" in op.name for op in there.operations
    )
    assert not report.table.same_bits[matched].all(), "two devices do round differently"


def test_audit_tells_what_becomes_nan_under_one_setting_first():
    """The product that leads to NaN comes before the products of other layers."""
    report = gl.audit(
        TRACES / "whitener-cuda-tf32-off.trace", TRACES / "whitener-cuda-tf32-on.trace"
    )
    first = report.findings[0]
    assert (first.kind, first.operation, first.module) == ("reduced precision", "mm", "Whitener")
    assert "linalg_cholesky_ex (forward) in Whitener at autoencoders.py:" in first.detail
