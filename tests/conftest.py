import ctypes
import importlib.metadata
import json
import os
import re
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from filelock import FileLock
from nbval.plugin import IPyNbCell

# The kernels of the notebooks inherit this and train small networks.
os.environ.setdefault("GPULAB_PROFILE", "smoke")
# One thread per test process: the trainings are so small that a second thread only adds waiting.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Threads that spin while they wait would starve the other test processes.
os.environ["GOMP_SPINCOUNT"] = "0"
ROOT = Path(__file__).parents[1]

# `make test` executes the notebooks that daily work is likely to break, `make test-all` the others.
EVERY_DAY = ("00_start_here", "03_autoencoder", "05_the_anomaly", "10_verdict")
OTHER_NOTEBOOKS = pytest.mark.slow("a notebook that daily work seldom breaks")


@pytest.fixture(scope="module")
def two_threads():
    """Use two threads. The setting `cpu` does not change the number of threads; with this fixture
    it differs from `cpu:threads=1` even on a machine with one core.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


CAPABILITY_VERSION = 0x20080522  # version 3 of the interface of `capset`
# CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH: by these, root ignores the modes of files.
IGNORE_FILE_MODES = (1 << 1) | (1 << 2)


@pytest.fixture
def file_modes():
    """Make the modes of files apply to this thread, even if it belongs to root.

    A test that uses this fixture can call `chmod(0)`. The test is skipped where root keeps its
    rights.
    """
    if not hasattr(os, "geteuid"):
        pytest.skip("Windows has no modes that forbid reading")
    if os.geteuid() != 0:
        yield
        return
    if sys.platform != "linux":
        pytest.skip("root can give up its rights on files only on Linux")
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)  # 0 is the calling thread
    # The effective, permitted and inheritable capabilities, numbers 0 to 31 and then 32 to 63.
    before = (ctypes.c_uint32 * 6)()
    assert libc.capget(header, before) == 0, os.strerror(ctypes.get_errno())
    changed = (ctypes.c_uint32 * 6)(*before)
    changed[0] &= ~IGNORE_FILE_MODES
    assert libc.capset(header, changed) == 0, os.strerror(ctypes.get_errno())
    yield
    assert libc.capset(header, before) == 0, os.strerror(ctypes.get_errno())


def pytest_collection_modifyitems(items):
    """Mark slow notebooks, and require a reason for each test that only `make test-all` runs, such
    as `@pytest.mark.slow("starts a server")`.
    """
    for item in items:
        if isinstance(item, IPyNbCell) and item.path.stem not in EVERY_DAY:
            item.add_marker(OTHER_NOTEBOOKS)
        for mark in item.iter_markers("slow"):
            if not mark.args:
                raise pytest.UsageError(
                    f"{item.nodeid}: expected a reason why the test is slow, such as"
                    " slow('starts a server')"
                )


@pytest.fixture(scope="session")
def real_data():
    """A function that returns the path of a file of real data, or skips the test. CONTRIBUTING.md
    lists the files.
    """
    folder = os.environ.get("GPULAB_REAL_DATA")

    def find(name):
        if not folder:
            pytest.skip(f"needs {name}: GPULAB_REAL_DATA is not set to a folder of real data")
        if not Path(folder).is_dir():
            pytest.fail(
                f"GPULAB_REAL_DATA={folder!r}: expected a folder; unset it to skip the tests on"
                " real data"
            )
        file = Path(folder).resolve() / name
        if not file.is_file():
            pytest.skip(f"needs {name}: it is not in the folder that GPULAB_REAL_DATA names")
        return file

    return find


@pytest.fixture(scope="session")
def python():
    """Run Python code in a separate process, with variables added to the environment."""

    def run(code, *arguments, check=True, timeout=400, **environment):
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert not check or done.returncode == 0, done.stderr
        return done

    return run


def build_once(tmp_path_factory, name, build):
    """A folder that the first test process fills by calling `build` while the others wait."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    folder, built = base / name, base / f"{name}.built"
    with FileLock(base / f"{name}.lock"):
        if not built.exists():
            folder.mkdir(exist_ok=True)
            build(folder)
            built.touch()
    return folder


def require_site_extra():
    """Skip a test that needs the extra `site` if the extra is not installed."""
    for library in ("sphinx", "myst_nb", "furo", "sphinx_revealjs"):
        pytest.importorskip(library, reason=f"{library} is not installed: pip install gpulab[site]")


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The folder of the site, built as `make site` does."""
    require_site_extra()

    def build(folder):
        (folder / "source").mkdir(exist_ok=True)
        places = [
            ROOT / "docs" / "_tools",
            "-d",
            folder / "doctrees",
            folder / "source",
            folder / "site",
        ]
        command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", *places]
        done = subprocess.run(command, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, done.stderr

    return build_once(tmp_path_factory, "site", build) / "site"


@pytest.fixture(scope="session")
def slides(tmp_path_factory):
    """The folder of the slides, written as `make slides` does."""
    require_site_extra()
    command = [sys.executable, ROOT / "docs" / "_tools" / "slides.py"]

    def build(folder):
        subprocess.run([*command, folder], check=True, timeout=300)

    return build_once(tmp_path_factory, "slides", build)


class ExplorerServer:
    """The process that serves the pages without code on a local port."""

    def __init__(self, process, port):
        self.process, self.port = process, port

    def address(self, page):
        """The address of a page, such as `bits`."""
        return f"http://127.0.0.1:{self.port}/voila/render/{page}.ipynb"

    def listening_addresses(self):
        """The addresses that the process and its children, kernels included, listen on."""
        parent = psutil.Process(self.process.pid)
        family = [parent, *parent.children(recursive=True)]
        sockets = [socket for member in family for socket in member.net_connections("inet")]
        return {socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN}


@pytest.fixture(scope="module")
def explorer_server(tmp_path_factory):
    """`python -m companion explore`, after it has started to listen."""
    pytest.importorskip("voila", reason="voila is not installed: pip install gpulab[notebooks]")
    home = tmp_path_factory.mktemp("explore")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folders = {f"JUPYTER_{name}_DIR": str(home / name) for name in ("CONFIG", "RUNTIME")}
    folders["IPYTHONDIR"] = str(home / "ipython")
    environment = os.environ | folders
    command = [sys.executable, "-m", "companion", "explore", "--port", str(port)]
    options = {"cwd": home, "env": environment, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **options) as process:
        assert process.stdout.readline() == f"http://127.0.0.1:{port}\n"
        server = ExplorerServer(process, port)
        for _ in range(300):
            if server.listening_addresses():
                break
            time.sleep(0.2)
        yield server
        process.terminate()


@pytest.fixture
def outputs_of():
    """A function that returns the outputs of a notebook cell that ends with a given value."""
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.display import display
    from IPython.utils.capture import capture_output

    InteractiveShell.instance()

    def outputs(value):
        with capture_output() as captured:
            display(value)
        return captured.outputs

    yield outputs
    InteractiveShell.clear_instance()


NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]\d+)?(?!\w)")


def numbers_in(lines):
    return [float(number.replace(",", "")) for line in lines for number in NUMBER.findall(line)]


@pytest.fixture
def as_recorded(request):
    """Compare lines with reviewed ones, which are in a JSON file named after the test file.

    After an intended change, `GPULAB_RECORD=1 pytest tests/plots/test_figures.py` rewrites the
    file; the diff shows what changed. Words are compared exactly, numbers to a relative tolerance
    `rtol`. The comparison is skipped if the version of the library differs from the recorded one,
    because another version may choose different kernels or positions of ticks.
    """
    file = request.path.with_suffix(".json")

    def check(name, lines, library, rtol=0.01):
        # line numbers change whenever the lines above change
        lines = [re.sub(r"\.py:\d+", ".py", line) for line in lines]
        version = importlib.metadata.version(library).rpartition(".")[0]
        recorded = json.loads(file.read_text()) if file.exists() else {}
        if os.environ.get("GPULAB_RECORD"):
            recorded |= {library: version, name: lines}
            file.write_text(
                json.dumps(recorded, indent=0, ensure_ascii=False, sort_keys=True) + "\n"
            )
        assert name in recorded, (
            f"{name} is not in {file.name} yet; review it, then record it with GPULAB_RECORD=1"
        )
        if recorded[library] != version:
            pytest.skip(f"recorded with {library} {recorded[library]}, got {version}")
        assert [NUMBER.sub("#", line) for line in lines] == [
            NUMBER.sub("#", line) for line in recorded[name]
        ]
        np.testing.assert_allclose(
            numbers_in(lines), numbers_in(recorded[name]), rtol=rtol, atol=1e-9
        )

    return check
