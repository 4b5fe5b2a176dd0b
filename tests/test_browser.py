"""Every notebook in JupyterLab, in a browser: it fits and says what its pictures show.

That the notebooks run is nbval's to show, and that widgets answer is in `test_explore.py`; here they are opened as they
are committed. Without Playwright or Chromium all of this is skipped.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow("starts a browser")

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
LAPTOP = {"width": 1366, "height": 768}
SETTINGS = {  # JupyterLab's own, but that every cell is drawn and no window asks for anything
    "@jupyterlab/notebook-extension:tracker": {"windowingMode": "none", "scrollPastEnd": False},
    "@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False},
}
IDLE = "window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel?.status == 'idle'"
FAULTS = """() => {
    const panel = jupyterapp.shell.currentWidget, faults = [];
    const all = (selector) => panel.node.querySelectorAll(selector);
    const text = (node) => (node.alt || node.innerText || node.outerHTML).slice(0, 90);
    const below = (image) => image.closest(".jp-OutputArea-child")?.nextElementSibling;
    const fold = (image) => /^In words.+/.test(below(image)?.querySelector("details")?.textContent);
    const tell = (fault, node) => faults.push(`${fault}: ${text(node)}`);
    for (const cell of panel.content.model.toJSON().cells.filter(cell => cell.cell_type == "code")) {
        if (!cell.execution_count) faults.push(`not run: ${cell.source}`);
        for (const output of cell.outputs) {
            if (output.output_type == "error") faults.push(`error: ${output.ename}: ${output.evalue}`);
            if (output.name == "stderr") faults.push(`warning: ${output.text}`);
        }
    }
    for (const image of all("img")) {
        const silent = ["", "Image"].includes(image.alt.trim());  // "Image" is JupyterLab's own
        if (silent && !fold(image)) tell("no words", image);
        if (!image.naturalWidth) tell("no picture", image);
    }
    for (const output of all(".jp-OutputArea-output, .jp-OutputArea-output *, .jp-MarkdownOutput"))
        if (output.scrollWidth > output.clientWidth + 1 && getComputedStyle(output).overflowX == "auto")
            tell(`${output.scrollWidth} pixels in ${output.clientWidth}`, output);
    for (const bar of all(".progress-bar:not(.progress-bar-success)")) tell("unfinished bar", bar);
    return faults;
}"""


@pytest.fixture(scope="module")
def lab(browser, tmp_path_factory):  # noqa: ARG001 - without a browser there is nothing to serve
    """The address of a JupyterLab with a copy of the notebooks."""
    home = tmp_path_factory.mktemp("lab")
    shutil.copytree(ROOT / "notebooks", home / "notebooks", ignore=shutil.ignore_patterns("runs", ".*"))
    (home / "config" / "labconfig").mkdir(parents=True)
    (home / "config" / "labconfig" / "default_setting_overrides.json").write_text(json.dumps(SETTINGS))
    folders = {f"JUPYTER_{name.upper()}_DIR": str(home / name) for name in ("config", "data", "runtime")}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}/{{}}?token=ours&reset"
    options = {"ip": "127.0.0.1", "port": port, "ServerApp.port_retries": 0, "IdentityProvider.token": "ours"}
    options |= {"ServerApp.root_dir": home / "notebooks", "LabApp.expose_app_in_browser": True}
    options |= {"LabApp.open_browser": False, "ServerApp.allow_root": True}
    command = [sys.executable, "-m", "jupyterlab", *(f"--{name}={value}" for name, value in options.items())]
    with (home / "log").open("w") as log:
        server = subprocess.Popen(command, env=os.environ | folders, stdout=log, stderr=log)
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(address.format("api"), timeout=10).close()
                break
            except urllib.error.URLError:
                assert server.poll() is None, (home / "log").read_text()
                time.sleep(0.1)
        yield address
    finally:
        server.terminate()
        server.wait(60)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda file: file.stem)
def test_notebook_in_a_browser(notebook, lab, browser):
    page, complaints = browser.new_page(viewport=LAPTOP), []
    page.set_default_timeout(60_000)
    page.on("console", lambda message: message.type == "error" and complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(lab.format(f"lab/tree/{notebook.name}"))
    page.wait_for_function(IDLE)
    assert page.evaluate(FAULTS) == []
    assert complaints == []
    page.evaluate("jupyterapp.serviceManager.sessions.shutdownAll()")
    page.close()
