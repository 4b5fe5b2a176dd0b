"""Without the package of engines everything works, and results are equal up to rounding."""

import subprocess
import sys
from pathlib import Path

import pytest

import gpulab as gl

ROOT = Path(__file__).parents[2]
OF_SADDLES = [
    f"saddles/test_{name}.py" for name in ("spectrum", "critical", "landscapes", "escapes")
]
TESTS = [
    f"tests/{name}"
    for name in ("training/test_loop.py", "training/test_run.py", "models", *OF_SADDLES)
]


@pytest.mark.slow("runs the tests of the core once more")
def test_without_engines_the_tests_of_the_core_pass():
    code = f"""
import sys, pytest
sys.modules['gpulab.engines'] = None
sys.exit(pytest.main(['-q', '-m', 'not slow', '-p', 'no:cacheprovider', *{TESTS}]))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]


def test_without_engines_losses_are_the_same():
    options = {"profile": "smoke", "setting": "cpu:precision=float64", "frames": 60}
    code = f"""
import sys
sys.modules['gpulab.engines'] = None
import gpulab as gl
run = gl.train('prednet', progress=False, **{options})
print(run.record['gradients'], run.final_loss)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    gradients, final_loss = done.stdout.split()
    with_engines = gl.train("prednet", progress=False, **options)
    assert gradients == "autograd"
    assert float(final_loss) == pytest.approx(with_engines.final_loss, rel=1e-9)
