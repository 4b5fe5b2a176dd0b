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

# the kernels of the notebooks inherit it and train small
os.environ.setdefault("GPULAB_PROFILE", "smoke")
# A thread for each test process: what is trained here is so small that a second one would only be
# waited for.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Threads that wait by spinning starve the other test processes.
os.environ["GOMP_SPINCOUNT"] = "0"
ROOT = Path(__file__).parents[1]

# Of the notebooks, `make test` executes those that daily work breaks; `make test-all` the others.
EVERY_DAY = ("00_start_here", "03_autoencoder", "05_the_anomaly", "10_verdict")
OTHER_NOTEBOOKS = pytest.mark.slow("a notebook that daily work seldom breaks")


@pytest.fixture(scope="module")
def two_threads():
    """`cpu` leaves the number of threads as it is: on a machine with one core too, it shall not
    be that of B.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def pytest_collection_modifyitems(items):
    """A test that `make test` leaves to `make test-all` says why: `@pytest.mark.slow("starts a
    server")`.
    """
    for item in items:
        if isinstance(item, IPyNbCell) and item.path.stem not in EVERY_DAY:
            item.add_marker(OTHER_NOTEBOOKS)
        for mark in item.iter_markers("slow"):
            if not mark.args:
                raise pytest.UsageError(
                    f"{item.nodeid}: say why it is slow, in a few words: slow('starts a server')."
                )


@pytest.fixture(scope="session")
def real_data():
    """A function that finds a file of real data, or skips the test. CONTRIBUTING.md lists the
    files.
    """
    folder = os.environ.get("GPULAB_REAL_DATA")

    def find(name):
        if not folder:
            pytest.skip(f"needs {name}: GPULAB_REAL_DATA names no folder of real data")
        if not Path(folder).is_dir():
            pytest.fail(
                f"GPULAB_REAL_DATA={folder!r}: expected a folder; unset it to skip the tests on"
                " real data"
            )
        file = Path(folder).resolve() / name
        if not file.is_file():
            pytest.skip(f"needs {name}: the folder that GPULAB_REAL_DATA names does not hold it")
        return file

    return find


@pytest.fixture(scope="session")
def python():
    """Run a piece of Python in a process of its own, with variables added to the environment."""

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
    """A folder that the first test process fills by `build`, while the others wait for it."""
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
    """Skip what needs the extra `site` where it is not installed."""
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
    """The process that serves the pages without code on a port of this machine."""

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
    """`python -m companion explore`, once it listens."""
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
    """What a notebook's cell puts out that ends with this value."""
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
    """Compare lines with those that somebody has looked at, in a JSON file with the name of the
    test's.

    `GPULAB_RECORD=1 pytest tests/plots/test_figures.py` writes them anew, after a change that is
    meant; the diff says what moved. The words are compared exactly, the numbers to `rtol`; and only
    with the library that they come from, since another version may choose other kernels or places
    of ticks.
    """
    file = request.path.with_suffix(".json")

    def check(name, lines, library, rtol=0.01):
        # where a line stands moves with those before it
        lines = [re.sub(r"\.py:\d+", ".py", line) for line in lines]
        version = importlib.metadata.version(library).rpartition(".")[0]
        recorded = json.loads(file.read_text()) if file.exists() else {}
        if os.environ.get("GPULAB_RECORD"):
            recorded |= {library: version, name: lines}
            file.write_text(
                json.dumps(recorded, indent=0, ensure_ascii=False, sort_keys=True) + "\n"
            )
        assert name in recorded, (
            f"{name} is not in {file.name} yet: look at it, and write it with GPULAB_RECORD=1"
        )
        if recorded[library] != version:
            pytest.skip(f"recorded with {library} {recorded[library]}, and this is {version}")
        assert [NUMBER.sub("#", line) for line in lines] == [
            NUMBER.sub("#", line) for line in recorded[name]
        ]
        np.testing.assert_allclose(
            numbers_in(lines), numbers_in(recorded[name]), rtol=rtol, atol=1e-9
        )

    return check
