"""The pages without code: they are served, one opens, and no other machine reaches them."""

import os
import socket
import subprocess
import sys
import time
import urllib.request

import psutil
import pytest

pytest.importorskip("voila")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The process that serves, and its port."""
    home = tmp_path_factory.mktemp("explore")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folders = {f"JUPYTER_{name}_DIR": str(home / name) for name in ("CONFIG", "RUNTIME")}
    environment = os.environ | folders | {"IPYTHONDIR": str(home / "ipython")}
    command = [sys.executable, "-m", "companion", "explore", "--port", str(port)]
    with subprocess.Popen(command, cwd=home, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == f"http://127.0.0.1:{port}\n"
        for _ in range(300):
            if listening(process):
                break
            time.sleep(0.2)
        yield process, port
        process.terminate()


def listening(process):
    """The addresses that the process and its children, kernels apart, listen on."""
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    connections = [connection for member in family for connection in member.net_connections("inet")]
    return {connection.laddr.ip for connection in connections if connection.status == psutil.CONN_LISTEN}


@pytest.mark.slow("starts a server")
def test_explore_serves_a_page_on_this_machine_alone(server):
    process, port = server
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=60) as answer:
        assert answer.status == 200
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/voila/render/bits.ipynb", timeout=120) as answer:
        text = answer.read().decode()
    assert "The bits of a number" in text
    assert "bit_explorer" not in text, "no source is shown"
    assert "application/vnd.jupyter.widget-view+json" in text
    assert listening(process) == {"127.0.0.1"}
