"""Pages without code, each a widget of gpulab's own in a kernel of its own, served by Voilà.

Whoever has the token can open a page and move what is on it, and nothing else: a browser may send no code, the server
hands out no file of the machine's but the notebooks and the pages and code that they link to, and what the kernels hold
is bounded, in number and in time.
"""

from __future__ import annotations

import logging
import re
import secrets
import socket
import tempfile
import threading
import webbrowser
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import nbformat
import psutil
from jupyter_server.base.handlers import JupyterHandler
from jupyter_server.services.kernels.kernelmanager import AsyncMappingKernelManager
from tornado.httpserver import HTTPServer
from tornado.ioloop import IOLoop
from tornado.netutil import bind_sockets
from tornado.web import HTTPError, authenticated
from traitlets import Integer
from traitlets.config import Config
from voila.app import Voila
from voila.tornado.handler import TornadoVoilaHandler

import gpulab
from companion.run import KERNEL, render
from gpulab.errors import GpulabError, UsageError
from gpulab.files import MOST_UPLOADED

PAGE_BYTES = 600 << 20  # of memory that a page may need; what it took while it trained was 490 MB of its own
IDLE_SECONDS = 600  # without a move, after which a page is put to sleep
NOTEBOOKS = Path(__file__).parents[1]
TEMPLATES = (NOTEBOOKS / "companion" / "templates" / "explore", Path(gpulab.__file__).parent / "templates")
READABLE = (  # in a clone; its pages link to others, and show pictures
    r"/(notebooks/(?:solutions/)?\d\d_\w+\.ipynb|notebooks/solutions|[A-Z]+\.md|"
    r"(?:docs|data|benchmarks|gpulab)/[\w/-]+\.(?:md|py|svg|png))"
)
AS_IT_IS = {".py": "text/plain; charset=utf-8", ".svg": "image/svg+xml", ".png": "image/png"}
# Of what Voilà serves: its scripts, and the way to a page's own kernel, which takes no code.
NEEDED = re.compile(r"/(voila/(static|labextensions|api/(themes|shutdown))|api/kernels)/")
EXTENSIONS = ["@jupyter-widgets/jupyterlab-manager", "@voila-dashboards/widgets-manager8"]
QUIET = ["--log-level=CRITICAL"]  # a kernel tells of its end
# A browser asks nobody else for anything. Voilà's scripts are bundles that evaluate text.
POLICY = "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; frame-ancestors 'self'; form-action 'none'"


@dataclass(frozen=True)
class Page:
    """A page: its title, what of `companion` it shows, two sentences, and the notebook that explains it."""

    title: str
    call: str
    move: str
    see: str
    notebook: str

    def source(self) -> nbformat.NotebookNode:
        """The page as Voilà wants it: a notebook of one cell."""
        path_setup = f"import sys\n\nsys.path.append({str(NOTEBOOKS)!r})"  # a page lies elsewhere
        cell = nbformat.v4.new_code_cell(f"{path_setup}\n\nimport companion\n\ncompanion.{self.call}()")
        kernel = {"name": KERNEL, "display_name": "Python 3", "language": "python"}
        bounds = {"most_bytes": MOST_UPLOADED, "idle_minutes": IDLE_SECONDS // 60}
        metadata = {"kernelspec": kernel, "title": self.title, "page": asdict(self), **bounds}
        return nbformat.v4.new_notebook(cells=[cell], metadata=metadata)


PAGES = {
    "training": Page(
        "Two settings, side by side",
        "training_explorer",
        "Choose two settings and press Train: the same network starts from the same weights under both.",
        "On the left are the losses as they come, on the right their difference: where does it begin, does it grow?",
        "02_floating_point",
    ),
    "bits": Page(
        "The bits of a number",
        "bit_explorer",
        "Type a number, or click a bit, and choose the format that it is rounded to.",
        "Below the bits stands what is left of the number, and by how much that is off.",
        "02_floating_point",
    ),
    "saddle": Page(
        "A ball on a saddle",
        "saddle_explorer",
        "Choose an optimiser and an arithmetic, press play to let the ball roll, and turn the saddle.",
        "The surface is the whole loss of a network of two weights; where every step is rounded away, the ball stays.",
        "06_saddle_points",
    ),
    "seeds": Page(
        "The verdict, seed by seed",
        "seeds_explorer",
        "Press play: recorded runs come in one seed at a time, in the order you choose, with a verdict each time.",
        "An interval without zero shows a difference; see which differences are still there when all seeds are in.",
        "10_verdict",
    ),
    "audit": Page(
        "The audit of a trace",
        "audit_explorer",
        "Look at the example; then upload a trace that gpulab record wrote, or two of the same step.",
        "You see which operations differ, how far, and whether rounding explains it.",
        "02_floating_point",
    ),
}


def serve(
    host: str, port: int, token: str | None, pages: int | None, open_browser: bool, tell: Callable[[str], Any] = print
) -> None:
    """Serve the pages until a signal comes; `tell` is called with the address, token included, once they can be opened.

    By default the token is one that nobody can guess, and as many `pages` may be open at a time as the free memory
    holds.
    """
    if token is not None and not token.strip():
        raise UsageError("--token '': expected one that others cannot guess")
    token = token or secrets.token_urlsafe(24)
    with tempfile.TemporaryDirectory(prefix="gpulab-") as folder:
        for name, page in PAGES.items():
            nbformat.write(page.source(), Path(folder) / f"{name}.ipynb")
        config = Config()
        config.Voila.update(root_dir=folder, connection_dir_root=folder, ip=host, token=token, log_level=logging.ERROR)
        config.Voila.config_file_paths = []  # no file of the user's can tell otherwise
        config.Voila.tornado_settings = {
            "websocket_max_message_size": 2 * MOST_UPLOADED + (1 << 20),
            "headers": {"Content-Security-Policy": POLICY, "Referrer-Policy": "same-origin"},
        }
        config.VoilaConfiguration.update(
            allow_template_override="NO", extension_allowlist=EXTENSIONS, multi_kernel_manager_class=Kernels
        )
        config.VoilaExecutor.cell_error_instruction = "Reload the page."
        config.Kernels.most = pages or max(1, psutil.virtual_memory().available // PAGE_BYTES)
        config.MappingKernelManager.update(cull_idle_timeout=IDLE_SECONDS, cull_interval=60, cull_connected=True)
        server = Explore(config=config)
        server.initialize([])
        server.port, server.open_browser, server.tell = port, open_browser, tell
        server.start()


class Kernels(AsyncMappingKernelManager):
    """At most so many kernels at a time."""

    most = Integer(1, config=True)
    starting = 0

    async def start_kernel(self, **options: Any) -> str:
        """Start one. Without a place for it, the page says so and asks again by itself."""
        if len(self) + self.starting >= self.most:
            raise HTTPError(503, f"All {self.most} places are taken")
        self.starting += 1
        try:
            return await super().start_kernel(**options, extra_arguments=QUIET)
        finally:
            self.starting -= 1


class _Closed(JupyterHandler):
    """Nobody is asked for a password: without the token there is nothing."""

    def get_login_url(self) -> str:
        raise HTTPError(403, "The address lacks the right token")

    def render_template(self, name: str, **about: Any) -> str:
        return render(f"explore/{name}", **about)


class _Start(_Closed):
    @authenticated
    def get(self) -> None:
        """The list of pages."""
        self.finish(self.render_template("start.html", pages=PAGES))


class _Page(_Closed, TornadoVoilaHandler):
    async def get(self, path: str) -> None:
        """A page, in a kernel of its own, which it ends when it is closed: that takes the cookie that is set here."""
        assert self.xsrf_token
        await super().get(f"{path}.ipynb")


class _File(_Closed):
    @authenticated
    def get(self, name: str) -> None:
        """A notebook as it was committed, a list of them, or what one links to: to be read, not executed."""
        from nbconvert import HTMLExporter

        file = NOTEBOOKS.parent / name
        if not file.exists():
            raise HTTPError(404, "There is no such file")
        if file.suffix in AS_IT_IS:
            self.set_header("Content-Type", AS_IT_IS[file.suffix])
            self.finish(file.read_bytes())
            return
        if file.is_dir():
            text = "\n".join(f"- [{inside.stem}](/{name}/{inside.name})" for inside in sorted(file.glob("*.ipynb")))
        else:
            text = file.read_text(encoding="utf-8")
        page = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(text)])
        notebook = nbformat.reads(text, 4) if file.suffix == ".ipynb" else page
        self.finish(HTMLExporter().from_notebook_node(notebook, {"metadata": {"name": file.stem}})[0])


class Explore(Voila):
    """Voilà, with the pages above and little else."""

    tell: Callable[[str], Any]
    template_paths: Any
    port: Any

    def setup_template_dirs(self) -> None:
        """Those of Voilà, and before them ours."""
        super().setup_template_dirs()
        self.template_paths = [*map(str, TEMPLATES), *self.template_paths]

    def init_handlers(self) -> list[Any]:
        """The pages, and what they need."""
        page_options = {"template_paths": self.template_paths, "config": self.config}
        page_options |= {"voila_configuration": self.voila_configuration}
        voila_handlers = [handler for handler in super().init_handlers() if NEEDED.match(handler[0])]
        return [("/", _Start), (f"/({'|'.join(PAGES)})", _Page, page_options), (READABLE, _File), *voila_handlers]

    def listen(self) -> None:
        """Listen on one port, and no other where that is taken, until a signal comes."""
        try:
            sockets = bind_sockets(self.port, self.ip)
        except OSError as error:
            raise GpulabError(f"{self.ip}:{self.port}: {error.strerror}; name another one with --port") from None
        HTTPServer(self.app, max_body_size=1 << 16).add_sockets(sockets)
        self.port = sockets[0].getsockname()[1]
        name = socket.gethostname() if self.ip in ("", "0.0.0.0", "::") else self.ip
        address = f"http://{name}:{self.port}/?token={self.token}"
        self.tell(address)
        if self.open_browser:
            threading.Thread(target=webbrowser.open, args=[address], daemon=True).start()
        self.ioloop = IOLoop.current()
        try:
            self.ioloop.start()
        finally:
            self.stop()
