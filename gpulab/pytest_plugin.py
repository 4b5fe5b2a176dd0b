"""Fixtures of pytest, `gpulab_guard` and `gpulab_guard_any`: the test that asks for one runs under `gpulab.guard()`.

pytest finds it once gpulab is installed. Nothing is imported until a test asks for the fixture.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from gpulab.guards.guards import Guard


@pytest.fixture
def gpulab_guard() -> Iterator[Guard]:
    """Run the whole test under `gpulab.guard()`; yields the guard.

    A test whose `backward` would use a tensor overwritten since it was saved fails with
    `OverwrittenError`::

        def test_my_step(gpulab_guard):
            my_training_step()
            assert gpulab_guard.checked  # the guard has seen something

    `@pytest.mark.usefixtures("gpulab_guard")` does the same for a class or a module.
    """
    from gpulab.guards.guards import guard

    with guard() as report:
        yield report


@pytest.fixture
def gpulab_guard_any() -> Iterator[Guard]:
    """The same under `gpulab.guard(reads="any")`: nothing may be read after it was overwritten, by any operation."""
    from gpulab.guards.guards import guard

    with guard(reads="any") as report:
        yield report
