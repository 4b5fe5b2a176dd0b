"""locked.txt has the versions of constraints.txt, with the SHA-256 of every file."""

import re
from pathlib import Path

from packaging.markers import Marker

ROOT = Path(__file__).parent.parent
BUILDS = {
    "editables",
    "hatchling",
    "setuptools",
    "tomlkit",
    "trove-classifiers",
}  # and what torch asks for from Python 3.12 on


def test_locked_versions_are_those_of_the_constraints_each_with_its_hashes():
    text = re.sub(r"^#.*\n", "", (ROOT / "locked.txt").read_text(encoding="utf-8"), flags=re.M)
    entries = re.findall(r"^([a-z0-9.-]+)==(\S+)(?: ; (.+?))?((?: \\\n    --hash=sha256:[0-9a-f]{64})+)\n", text, re.M)
    assert sum(len(line) for entry in entries for line in entry) > 0.9 * len(text)
    assert len(entries) == len(re.findall("^[^ ]", text, re.M)), "a line that is no package, or has no hash"
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines())
    assert {name: version for name, version, *_ in entries if name not in BUILDS} == pins
    for python in ("3.11", "3.12", "3.13"):
        for platform in ("linux", "win32", "darwin"):
            here = {"python_version": python, "python_full_version": f"{python}.5", "sys_platform": platform}
            chosen = [name for name, _, marker, _ in entries if not marker or Marker(marker).evaluate(here)]
            assert len(chosen) == len(set(chosen)), "one version each"
            assert {"torch", "torchvision", "numpy", "av", "hatchling"} <= set(chosen)
