"""The pages without code as a class would meet them: who is let in, what is answered, in a real browser.

What was seen is kept in build/screenshots/. Without Voilà, Playwright or Chromium the part that needs it is skipped.
"""

import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from gpulab.store.records import recorded_folder

pytest.importorskip("voila")

ROOT = Path(__file__).parent.parent
SHOTS = ROOT / "build" / "screenshots"
PAGES = ["training", "bits", "saddle", "seeds", "audit"]
COMMAND = [sys.executable, "-m", "companion", "explore", "--no-open"]
READY = "main .jupyter-widgets:is(.widget-dropdown, .widget-upload)"
SEEN = """() => [...document.querySelectorAll("main .jupyter-widgets :is(img, .widget-html-content)")]
    .map(part => part.localName == "img" ? part.src : part.innerText).join()"""
MOVES = {"training": (1, 3), "bits": (0, 1), "saddle": (0, 5), "seeds": (1, 2)}  # controls that are moved on each page
SERVER = pytest.mark.slow("starts a server and a browser")


class Server:
    """The pages on a free port."""

    def __init__(self, home, *options):
        folders = {f"JUPYTER_{name}_DIR": str(home / name) for name in ("CONFIG", "RUNTIME")}
        packages = os.pathsep.join([str(ROOT), str(ROOT / "notebooks")])
        environment = os.environ | folders | {"IPYTHONDIR": str(home / "ipython"), "PYTHONPATH": packages}
        environment["PYTHONUNBUFFERED"] = ""  # as a user's: what is said has to arrive by itself
        how = {"cwd": home, "env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.process = subprocess.Popen([*COMMAND, "--port", "0", *options], **how)
        line = self.process.stdout.readline()
        self.address, self.token = re.fullmatch(r"(http://127\.0\.0\.1:\d+)/\?token=(\S+)\n", line).groups()

    def get(self, path, token):
        """The status and the text of a page."""
        try:
            with urllib.request.urlopen(f"{self.address}/{path}?token={token}", timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def end(self):
        self.process.terminate()
        self.process.communicate(timeout=60)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("explore"), "--pages", "1")
    yield server
    server.end()


ELSEWHERE = (
    *("login", "api/kernels", "api/contents/bits.ipynb", "audit.ipynb", "notebooks/../pyproject.toml"),
    *("pyproject.toml", "docs/../data/README.md", "notebooks/own.ipynb", "docs/%2e%2e/README.md", "tests/conftest.py"),
    *("voila/tree", "voila/files/bits.ipynb", "voila/render/bits.ipynb", "voila/static/../../../../etc/passwd"),
)
READ = {
    "": "".join(f'<a href="/{name}">' for name in PAGES),
    "notebooks/06_saddle_points.ipynb": "saddle",
    "notebooks/solutions": 'href="/notebooks/solutions/00_solutions.ipynb"',
    "docs/glossary.md": "<td>Hessian</td>",
    "docs/house.svg": "<svg",
    "gpulab/training/parallel.py": "import",
}


@SERVER
def test_who_has_the_token_can_read_what_is_linked_and_nobody_anything_else(server):
    for path, shown in READ.items():
        status, text = server.get(path, server.token)
        links = "".join(re.findall(r'<a href="/\w+">', text))
        assert (status, shown in (text if path else links)) == (200, True), path
    for path in ("", "audit", "notebooks/06_saddle_points.ipynb"):
        for token in ("", "wrong", "%00"):
            status, text = server.get(path, token)
            assert (status, "The address lacks the right token" in text) == (403, True), (path, token)
            assert server.token not in text
    for path in ELSEWHERE:
        status, text = server.get(path, server.token)
        assert status in (403, 404), path
        assert "root:" not in text
    assert server.get("notebooks/99_none.ipynb", server.token)[0] == 404


@SERVER
def test_where_all_places_are_taken_a_sentence_says_so(server):
    status, text = server.get("bits", server.token)
    assert (status, "bit_explorer" in text) == (200, False), "no source is shown"
    status, text = server.get("saddle", server.token)
    assert (status, "All 1 places are taken" in text) == (503, True)
    assert "tries again every five seconds" in text


def test_a_token_must_be_one():
    from companion import explore

    with pytest.raises(explore.UsageError, match="--token ''"):
        explore.serve("127.0.0.1", 0, " ", None, False)


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


# --- in a browser ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def classroom(browser, tmp_path_factory):  # noqa: ARG001 - without a browser there is nothing to serve
    server = Server(tmp_path_factory.mktemp("class"), "--pages", "3")
    yield server
    server.end()


@pytest.fixture
def page(request, classroom, browser):
    """The page of a name; nothing but the server is asked for anything, and the browser has nothing to complain of."""
    page, complaints = browser.new_page(viewport={"width": 1366, "height": 768}), []
    page.set_default_timeout(60_000)
    page.on("console", lambda message: message.type == "error" and complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda r: r.url.startswith((classroom.address, "data:", "blob:")) or complaints.append(r.url))
    page.goto(f"{classroom.address}/{request.param}?token={classroom.token}")
    page.wait_for_selector(READY)
    yield page
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SHOTS / f"explore-{request.param}.png", full_page=True)
    page.goto("about:blank")  # which ends its kernel
    page.close()
    assert complaints == []


def wait_for_answer(page, act):
    """Until the page shows something else."""
    before = page.evaluate(SEEN)
    act()
    page.wait_for_function(f"before => ({SEEN})() != before", arg=before, polling="raf")


def move(control):
    if control.evaluate("control => control.localName == 'select'"):
        control.select_option(index=control.evaluate("control => (control.selectedIndex + 1) % control.length"))
    else:
        control.press("ArrowRight")


@SERVER
@pytest.mark.parametrize(("page", "moved"), MOVES.items(), indirect=["page"], ids=MOVES)
def test_a_page_answers_a_move(page, moved):
    controls = page.locator("main .jupyter-widgets :is(select, [role=slider])").all()
    for control in [controls[at] for at in moved for _ in range(2)]:
        wait_for_answer(page, lambda control=control: move(control))
    assert page.evaluate("[...document.images].every(image => image.alt && image.naturalWidth)")
    assert page.title() == page.locator("h1").inner_text()
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


@SERVER
@pytest.mark.parametrize("page", ["audit"], indirect=True)
def test_an_upload_is_audited_or_refused_in_a_sentence(page, tmp_path):
    def upload(file):
        with page.expect_file_chooser() as chooser:
            page.get_by_role("button", name="Upload").click()
        chooser.value.set_files(file)

    page.wait_for_function("document.body.innerText.includes('An example.')")
    large = tmp_path / "large.trace"
    large.write_bytes(bytes(100_000_000))
    upload(large)
    said = page.locator(".gpulab-upload .widget-html-content").first.inner_text()
    assert said == "large.trace: it has 100,000,000 bytes, and may have 8,388,608"
    upload({"name": "<img src=x onerror=alert(1)>", "mimeType": "", "buffer": b"no trace"})
    page.wait_for_function("document.body.innerText.includes('not a trace')")
    upload(recorded_folder("traces") / "resnet18-cuda-tf32-off.trace")
    page.wait_for_function("document.body.innerText.includes('operations and 123 results were matched')")


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


@SERVER
@pytest.mark.parametrize("page", ["bits"], indirect=True)
def test_a_browser_cannot_have_code_executed(page, tmp_path):
    heard = page.evaluate(EXECUTE, f"open({json.dumps(str(tmp_path / 'made'))}, 'w').close()")
    assert "kernel_info_reply" in heard
    assert "execute_reply" not in heard
    assert not (tmp_path / "made").exists()
