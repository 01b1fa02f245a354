"""Settings that all tests share."""

import os
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():  # the kernels of the fast path then run as numpy; read when Triton is imported
    os.environ["TRITON_INTERPRET"] = "1"

settings.register_profile(
    "ddlab", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("ddlab")
torch.set_num_threads(1)  # the tests run in one process per core

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="session")
def browser():
    """A headless Chromium, one for all tests: playwright runs once in a process."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="the browser tests need playwright")
    if CHROMIUM is None:
        pytest.skip("no Chromium on the PATH: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def cut_off(browser):
    """cut_off(html, width): titles of the views in that page that are higher than their frames."""

    def cut_off(html, width):
        page = browser.new_page(viewport={"width": width, "height": 900})
        page.set_content(html)
        for frame in page.frames[1:]:
            frame.wait_for_load_state()
        tall = "document.documentElement.scrollHeight > innerHeight ? document.title : null"
        found = [title for frame in page.frames[1:] if (title := frame.evaluate(tall))]
        page.close()
        return found

    return cut_off


@pytest.fixture
def ticking(monkeypatch):
    """ticking(module): in this block the module's clock goes on by a second whenever it is read."""

    @contextmanager
    def ticking(module):
        ticks = iter(range(10**6))
        with monkeypatch.context() as patch:
            patch.setattr(module, "time", type("Clock", (), {"time": staticmethod(lambda: next(ticks))}))
            yield

    return ticking


class Seen:
    """A page with everything it asked of the network and everything it complained of."""

    def __init__(self, browser, **context):
        self.context = browser.new_context(viewport={"width": 1280, "height": 900}, offline=True, **context)
        self.page = self.context.new_page()
        self.requests, self.complaints = [], []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def open(self, path):
        self.page.goto(Path(path).as_uri())
        return self.page


@pytest.fixture
def look(browser):
    """Opens files in pages of their own; fails on what a page complained of."""
    opened = []

    def look(path, **context):
        seen = Seen(browser, **context)
        opened.append(seen)
        seen.open(path)
        return seen

    yield look
    for seen in opened:
        assert seen.complaints == []
        seen.context.close()
