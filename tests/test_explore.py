"""The pages without code as a class would meet them: who is let in, what is answered, how soon, in a real browser.

What was seen is kept in build/screenshots/. Without Voilà, Playwright or Chromium the part that needs it is skipped.
"""

import json
import os
import re
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from gpulab.store.records import recorded_folder

voila = pytest.importorskip("voila")

ROOT = Path(__file__).parent.parent
SHOTS = ROOT / "build" / "screenshots"
PAGES = ("training", "bits", "saddle", "seeds", "audit")
READY = "main .jupyter-widgets:is(.widget-dropdown, .widget-upload)"
SEEN = """() => [...document.querySelectorAll("main .jupyter-widgets :is(img, .widget-html-content)")]
    .map(part => part.localName == "img" ? part.src : part.innerText).join()"""
MOVES = {"training": (1, 3), "bits": (0, 1), "saddle": (0, 5), "seeds": (1, 2)}  # controls that are moved on each page
SLOWEST = 3.0  # seconds; how soon it really is, is printed


class Server:
    """The pages on a free port."""

    def __init__(self, home, *options):
        command = [sys.executable, "-m", "companion", "explore", "--port", "0", "--no-open", *options]
        folders = {f"JUPYTER_{name}_DIR": str(home / name) for name in ("CONFIG", "RUNTIME")}
        packages = os.pathsep.join([str(ROOT), str(ROOT / "notebooks")])
        environment = os.environ | folders | {"IPYTHONDIR": str(home / "ipython"), "PYTHONPATH": packages}
        self.process = subprocess.Popen(
            command, cwd=home, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        line = self.process.stdout.readline()
        self.address, self.token = re.fullmatch(r"(http://127\.0\.0\.1:\d+)/\?token=(\S+)\n", line).groups()

    def get(self, path, token=None):
        """The status and the text of a page."""
        query = f"?token={token}" if token else ""
        try:
            with urllib.request.urlopen(f"{self.address}/{path}{query}", timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def end(self):
        self.process.terminate()
        return self.process.communicate(timeout=60)[0]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("explore"), "--pages", "1")
    yield server
    server.end()


@pytest.mark.parametrize("path", ["", "audit", "notebooks/06_saddle_points.ipynb"])
@pytest.mark.parametrize("token", [None, "wrong", "%00"])
def test_without_the_token_nobody_is_let_in(server, path, token):
    status, text = server.get(path, token)
    assert status == 403
    assert "The address lacks the right token" in text
    assert server.token not in text


ELSEWHERE = (
    *("login", "api/kernels", "api/contents/bits.ipynb", "audit.ipynb", "notebooks/../pyproject.toml"),
    *("pyproject.toml", "docs/../data/README.md", "notebooks/own.ipynb", "docs/%2e%2e/README.md", "tests/conftest.py"),
    *("voila/tree", "voila/files/bits.ipynb", "voila/render/bits.ipynb", "voila/static/../../../../etc/passwd"),
)


@pytest.mark.parametrize("path", ELSEWHERE)
def test_nothing_else_is_served(server, path):
    status, text = server.get(path, server.token)
    assert status in (403, 404)
    assert "root:" not in text


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("notebooks/06_saddle_points.ipynb", "saddle"),
        ("notebooks/solutions", 'href="/notebooks/solutions/00_solutions.ipynb"'),
        ("notebooks/solutions/00_solutions.ipynb", "00-1. Right"),
        ("docs/glossary.md", "<td>Hessian</td>"),
        ("docs/house.svg", "<svg"),
        ("gpulab/training/parallel.py", "import"),
    ],
)
def test_what_a_page_and_a_notebook_link_to_can_be_read(server, path, shown):
    status, text = server.get(path, server.token)
    assert status == 200
    assert shown in text


def test_the_start_lists_the_pages(server):
    text = server.get("", server.token)[1]
    assert re.findall(r'<a href="/(\w+)">', text) == [*PAGES]
    assert server.get("notebooks/99_none.ipynb", server.token)[0] == 404


def test_no_link_of_a_notebook_leads_to_what_is_not_handed_out():
    from companion import explore

    for notebook in sorted(explore.NOTEBOOKS.glob("[0-9][0-9]_*.ipynb")):
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        text = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
        for link in re.findall(r"\]\((?!https?:)([^)#\s]+)", text):
            file = (notebook.parent / link).resolve()
            path = file.relative_to(explore.NOTEBOOKS.parent.resolve()).as_posix()
            assert file.is_file(), f"{notebook.name}: {link}"
            assert re.fullmatch(explore.READABLE, f"/{path}"), f"{notebook.name}: {link}"


def test_where_all_places_are_taken_a_sentence_says_so(server):
    status, text = server.get("bits", server.token)
    assert (status, "bit_explorer" in text) == (200, False), "no source is shown"
    status, text = server.get("saddle", server.token)
    assert status == 503
    assert "All 1 places are taken" in text
    assert "tries again every five seconds" in text


def test_a_token_must_be_one_and_a_taken_port_is_named(tmp_path, server):
    def run(*options):
        command = [sys.executable, "-m", "companion", "explore", "--no-open", *options]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)

    assert "--token '': expected one that others cannot guess" in run("--token", "").stderr
    port = server.address.rpartition(":")[2]
    taken = run("--port", port)
    assert (taken.returncode, taken.stderr.count("\n")) == (1, 1)
    assert f"127.0.0.1:{port}: " in taken.stderr


def test_without_voila_a_sentence_says_what_to_install(python):
    done = python(
        """
        import sys
        sys.modules["voila"] = None
        sys.argv = ["companion", "explore"]
        import runpy
        runpy.run_module("companion", run_name="__main__", alter_sys=True)
    """,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == "gpulab: voila is not installed: pip install 'gpulab[notebooks]'\n"


# --- in a browser ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def classroom(browser, tmp_path_factory):  # noqa: ARG001 - without a browser there is nothing to serve
    server = Server(tmp_path_factory.mktemp("class"), "--pages", "3")
    yield server
    server.end()


@pytest.fixture
def opened(classroom, browser):
    """Open a page: it, and what the browser complained of."""
    pages = []

    def open_page(name, **how):
        page = browser.new_page(viewport={"width": 1366, "height": 768}, **how)
        pages.append(page)
        page.set_default_timeout(60_000)
        complaints = []
        page.on("console", lambda message: message.type == "error" and complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "request", lambda r: r.url.startswith((classroom.address, "data:", "blob:")) or complaints.append(r.url)
        )
        page.goto(f"{classroom.address}/{name}?token={classroom.token}")
        page.wait_for_selector(READY)
        return page, complaints

    yield open_page
    for page in pages:
        page.goto("about:blank")  # which ends its kernel
        page.close()


def answered(page, act):
    """The seconds until the page shows something else."""
    before, start = page.evaluate(SEEN), time.perf_counter()
    act()
    page.wait_for_function(f"before => ({SEEN})() != before", arg=before, polling="raf")
    return time.perf_counter() - start


def move(control):
    if control.evaluate("control => control.localName == 'select'"):
        control.select_option(index=control.evaluate("control => (control.selectedIndex + 1) % control.length"))
    else:
        control.press("ArrowRight")


def try_moves(name, page, complaints):
    """Move what is on a page, and look at it."""
    controls = page.locator("main .jupyter-widgets :is(select, [role=slider])").all()
    times = [answered(page, lambda at=at: move(controls[at])) for at in MOVES[name] for _ in range(3)]
    print(f"{name}: median {1000 * statistics.median(times):.0f} ms, worst {1000 * max(times):.0f} ms")
    assert max(times) < SLOWEST
    assert complaints == []
    assert page.evaluate("[...document.images].every(image => image.alt && image.naturalWidth)")
    assert page.title() == page.locator("h1").inner_text()
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SHOTS / f"explore-{name}.png", full_page=True)
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.screenshot(path=SHOTS / f"explore-{name}-phone.png", full_page=True)


@pytest.mark.parametrize("name", ["saddle", "seeds"])
def test_a_page_answers_a_move(name, opened):
    try_moves(name, *opened(name))


def test_trainings_stream_and_stop(opened):
    page, complaints = opened("training")
    try_moves("training", page, complaints)
    assert answered(page, page.get_by_role("button", name="Train").click) < SLOWEST
    page.wait_for_function("/After [0-9,]+ of/.test(document.querySelector('main img').alt)")
    assert answered(page, page.get_by_role("button", name="Stop").click) < SLOWEST
    assert page.locator("main .widget-html-content").first.inner_text() == "Stopped."
    assert complaints == []


def test_an_upload_is_audited_or_refused_in_a_sentence(opened, tmp_path):
    page, complaints = opened("audit")
    said = page.locator(".gpulab-upload .widget-html-content")

    def upload(file):
        with page.expect_file_chooser() as chooser:
            page.get_by_role("button", name="Upload").click()
        chooser.value.set_files(file)

    large = tmp_path / "large.trace"
    large.write_bytes(bytes(100_000_000))
    upload(large)
    assert said.inner_text() == "large.trace: it has 100,000,000 bytes, and may have 8,388,608"
    upload({"name": "<img src=x onerror=alert(1)>", "mimeType": "", "buffer": b"no trace"})
    page.wait_for_function("document.body.innerText.includes('not a trace')")
    upload(recorded_folder("traces") / "resnet18-cuda-tf32-off.trace")
    page.wait_for_function("document.body.innerText.includes('operations and 123 results were matched')")
    assert complaints == []
    page.screenshot(path=SHOTS / "explore-audit.png", full_page=True)


EXECUTE = """async code => {
    const kernel = JSON.parse(document.getElementById("jupyter-config-data").textContent).kernelId;
    const socket = new WebSocket(`ws://${location.host}/api/kernels/${kernel}/channels`), heard = [];
    await new Promise(open => socket.onopen = open);
    socket.onmessage = message => heard.push(JSON.parse(message.data).msg_type);
    const send = (kind, content) => socket.send(JSON.stringify({channel: "shell", content, metadata: {},
        parent_header: {}, header: {msg_id: kind, msg_type: kind, session: "", username: "", version: "5.3"}}));
    send("execute_request", {code, silent: false, store_history: false, user_expressions: {}, allow_stdin: false});
    send("kernel_info_request", {});
    while (!heard.includes("kernel_info_reply")) await new Promise(wait => setTimeout(wait, 20));
    return heard;
}"""


def test_bits_answer_and_a_browser_cannot_have_code_executed(opened, tmp_path):
    page, complaints = opened("bits")
    try_moves("bits", page, complaints)
    heard = page.evaluate(EXECUTE, f"open({json.dumps(str(tmp_path / 'made'))}, 'w').close()")
    assert "kernel_info_reply" in heard
    assert "execute_reply" not in heard
    assert not (tmp_path / "made").exists()
