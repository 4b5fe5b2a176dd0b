"""Against a real S3 server: moto's, which runs in an environment of its own, for it wants older packages than gpulab.

python -m venv moto && moto/bin/pip install 'moto[server]' && export GPULAB_MOTO=$PWD/moto/bin/moto_server
"""

import os
import shutil
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

import gpulab as gl
from gpulab.store import checks, run_files
from gpulab.store.identities import Identity
from gpulab.store.object_store import remote

MOTO = os.environ.get("GPULAB_MOTO") or shutil.which("moto_server")
pytest.importorskip("obstore")


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture(scope="module")
def server():
    if not MOTO:
        pytest.skip("no S3 server here")
    port = free_port()
    process = subprocess.Popen([MOTO, "-H", "127.0.0.1", "-p", str(port)], stderr=subprocess.DEVNULL)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            break
        except OSError:
            time.sleep(0.1)
    yield port
    process.terminate()
    process.wait()


@pytest.fixture
def bucket(server, monkeypatch, tmp_path, request):
    """The address of an empty store, and the environment in which it is one."""
    own = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{server}", "AWS_REGION": "us-east-1", "XDG_CACHE_HOME": str(tmp_path)}
    for name, value in {**own, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}.items():
        monkeypatch.setenv(name, value)
    name = f"b{abs(hash(request.node.name))}"
    urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{server}/{name}", method="PUT")).close()
    return f"s3://{name}/some/where"


def objects(url):
    there = remote(url)
    return sorted(each["path"] for batch in there.api.list(there.store) for each in batch)


def pressed(*_):
    raise KeyboardInterrupt


def test_what_was_trained_when_an_upload_was_cut_off_is_uploaded_and_not_trained_again(bucket, tmp_path, monkeypatch):
    image = {"profile": "smoke", "setting": "cpu:threads=1", "frames": 20, "progress": False, "keep_weights": False}
    with monkeypatch.context() as cut_off:
        cut_off.setattr("gpulab.store.object_store.Remote.push", pressed)
        with pytest.raises(KeyboardInterrupt):
            gl.train("autoencoder", store=bucket, **image)
    assert objects(bucket) == []
    assert gl.runs(bucket).empty
    (kept,) = remote(bucket).work.glob("autoencoder-*")
    again = gl.train("autoencoder", store=bucket, **image)
    assert again.record == run_files.read_record(kept)
    assert objects(bucket) == [f"{kept.name}.parquet"]
    assert gl.runs(bucket).id.tolist() == [kept.name]
    held = [remote(bucket).has(Identity(name, again.record)) for name in (kept.name, "absent")]
    assert held == [True, False]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another machine"))
    assert gl.train("autoencoder", store=bucket, **image).record == again.record


def test_an_address_is_known_as_one_and_refused_by_name_where_it_is_none_or_of_no_use():
    assert remote(Path("s3://bucket/a/b")).url == "s3://bucket/a/b", "a path has lost a slash"
    assert remote(Path("a/b")) is None
    for store in ("s3://", "s3:", "gs:/"):
        with pytest.raises(gl.UsageError, match="expected a bucket"):
            remote(store)
    with pytest.raises(gl.UsageError, match="s3://bucket/prefix: train, experiment, runs and pack"):
        checks.check("s3://bucket/prefix")
