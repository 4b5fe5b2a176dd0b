"""A few cases of each attack; `python benchmarks/attack.py all` is the long form."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ATTACKS = ("mutate", "special", "kill", "interrupt", "hinder", "full", "writers")

pytestmark = [
    pytest.mark.slow("damages files and kills commands for a minute"),
    pytest.mark.skipif(sys.platform != "linux", reason="the attack forks, fills disks and limits memory"),
]


@pytest.fixture(scope="module")
def said():
    """What the short form prints: a row of the table for each attack, and every finding."""
    line = [sys.executable, "benchmarks/attack.py", "short"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


@pytest.mark.parametrize("attack", ATTACKS)
def test_gpulab_withstands(attack, said):
    if why := re.search(rf"^\| `{attack}` \| not done \| (.*?) \|", said, re.MULTILINE):
        pytest.skip(why[1])
    row = re.search(rf"^\| `{attack}` \| (\d[\d,]*) \| (\d[\d,]*) \|", said, re.MULTILINE)
    assert row, said
    examples, failures = row.groups()
    assert examples != "0"
    assert failures == "0", said
