"""A fixture of pytest, `gpulab_guard`: the test that asks for it runs under `gpulab.guard()`.

pytest finds it once gpulab is installed. Nothing is imported until a test asks for it.
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
