"""Open a page in a browser and collect everything that a reader would find broken."""

from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit
from urllib.request import url2pathname

LOCAL_SCHEMES = {"about", "blob", "data", "file"}
PHONE_WIDTH = 600  # pixels; a narrower window counts as a phone
TIMEOUT = 60_000  # milliseconds; a page of Voilà starts a kernel, which takes ten seconds

# `decode` waits until a picture is loaded, and rejects if it cannot be shown.
MISSING_PICTURES = """async () => {
    const pictures = [...document.images];
    pictures.forEach(picture => picture.loading = "eager");
    await Promise.all(pictures.map(picture => picture.decode().catch(() => {})));
    const missing = pictures.filter(picture => !picture.complete || picture.naturalWidth === 0);
    return missing.map(picture => picture.outerHTML.slice(0, 120));
}"""
LINKS = """() => [...document.querySelectorAll("a[href], area[href]")].map(
    link => new URL(link.getAttribute("href"), document.baseURI).href)"""
ANCHORS = """text => {
    const page = text === null ? document : new DOMParser().parseFromString(text, "text/html");
    const named = [...page.querySelectorAll("[id], a[name]")];
    return named.flatMap(element => [element.id, element.name]);
}"""
PAGE_WIDTH = "() => Math.max(document.documentElement.scrollWidth, document.body.scrollWidth)"


def needs_anchor(fragment):
    """Whether the page has to contain an element of this name.

    Browsers read `#top` as the top of the page, and reveal.js reads `#/3` as the number of a slide.
    """
    return fragment not in ("", "top") and not fragment.startswith("/")


class OpenedPage:
    """A page in a window of the given size in pixels; `faults` lists what is broken in it."""

    def __init__(self, browser, address, width, height=None):
        self.address, self.width = address, width
        self.host = urlsplit(address).netloc
        self.errors = []
        is_phone = width < PHONE_WIDTH
        size = {"width": width, "height": height or (844 if is_phone else 720)}
        self.window = browser.new_context(viewport=size, is_mobile=is_phone, has_touch=is_phone)
        self.window.set_default_timeout(TIMEOUT)
        self.window.route(self.is_foreign, lambda route: route.abort())
        self.tab = self.window.new_page()
        self.tab.on("console", self._note_message)
        self.tab.on("pageerror", lambda error: self.errors.append(f"exception: {error}"))
        self.tab.on("request", lambda request: self._note_address(request.url))
        self.tab.on("websocket", lambda socket: self._note_address(socket.url))
        self.tab.on("requestfailed", self._note_failure)
        self.tab.on("response", self._note_status)
        self.tab.goto(address)
        self.tab.wait_for_load_state("networkidle")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.window.close()

    def is_foreign(self, address):
        """Whether an address is neither on this disk nor on the server of the page."""
        parts = urlsplit(address)
        return parts.scheme not in LOCAL_SCHEMES and parts.netloc != self.host

    def _note_message(self, message):
        if message.type == "error":
            self.errors.append(f"console error: {message.text}")

    def _note_address(self, address):
        if self.is_foreign(address):
            self.errors.append(f"request to another host: {address}")

    def _note_failure(self, request):
        self.errors.append(f"request failed: {request.url}: {request.failure}")

    def _note_status(self, response):
        if response.status >= 400:
            self.errors.append(f"request failed: {response.url}: status {response.status}")

    def missing_pictures(self):
        """The pictures that are not shown."""
        return [f"missing picture: {tag}" for tag in self.tab.evaluate(MISSING_PICTURES)]

    def broken_links(self):
        """The links to local files or pages that do not exist or lack the linked anchor."""
        scheme = urlsplit(self.address).scheme
        anchors = {urldefrag(self.tab.url).url: self.tab.evaluate(ANCHORS, None)}
        broken = []
        for link in dict.fromkeys(self.tab.evaluate(LINKS)):
            if urlsplit(link).scheme != scheme or self.is_foreign(link):
                continue
            target, fragment = urldefrag(link)
            if target not in anchors:
                text = self.read(target)
                anchors[target] = None if text is None else self.tab.evaluate(ANCHORS, text)
            if anchors[target] is None:
                broken.append(f"broken link: {link}")
            elif needs_anchor(fragment) and unquote(fragment) not in anchors[target]:
                broken.append(f"broken link: {link} (no such anchor)")
        return broken

    def read(self, address):
        """The text at an address; None if there is no file or the status is not 200."""
        parts = urlsplit(address)
        if parts.scheme == "file":
            file = Path(url2pathname(parts.path))
            return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else None
        answer = self.window.request.get(address)
        return answer.text() if answer.status == 200 else None

    def overflow(self):
        """A fault if the page is wider than its window and has to be scrolled sideways."""
        width = self.tab.evaluate(PAGE_WIDTH)
        if width <= self.width + 1:
            return []
        return [f"scrolls sideways: {width} pixels in a window of {self.width}"]

    def faults(self):
        """All faults of the page."""
        found = [*self.missing_pictures(), *self.broken_links(), *self.overflow()]
        return [*self.errors, *found]
