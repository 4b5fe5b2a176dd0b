import pytest
from small_runs import HISTORY

import gpulab as gl
from gpulab.store import runs as stores


@pytest.fixture(scope="session")
def record():
    """The record of a real run, to make others from."""
    return gl.train("autoencoder", profile="smoke", frames=20, progress=False).record


@pytest.fixture(scope="session")
def written(record):
    """Write a run of a seed into a store, its record changed; returns its folder."""

    def write(store, seed, history=HISTORY, weights=None, **changes):
        return stores.write_run(store, {**record, "id": f"run-{seed}", "seed": seed, **changes}, history, weights)

    return write
