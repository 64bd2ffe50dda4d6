"""The built site in a real browser: links hold, axe finds nothing serious, no page scrolls sideways."""

import functools
import http.server
import os
import subprocess
import sys
import threading
from pathlib import Path

import axe_core_python
import pytest

from tests.browser import Browser

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    *("", "start/", "which_method/", "trainers/", "guides/cost/", "methods/", "methods/drop_key/"),
    *("results/", "results/digits_panel/", "writing_a_method/"),
)
AXE = next(Path(axe_core_python.__file__).parent.rglob("axe.min.js"))
SERIOUS = """axe.run({resultTypes: ['violations']}).then(found => found.violations
    .filter(v => ['serious', 'critical'].includes(v.impact))
    .map(v => `${v.id}: ${v.nodes[0].html}`))"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        """Nothing: a server of a test does not print."""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built as CI builds it and as its publisher does: with the address of a repository."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(folder)]
    environment = {**os.environ, "DAMPEN_REPOSITORY": "https://code.example/dampen"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def address(site):
    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.mark.slow
def test_pages_can_be_edited_and_lead_on(site):
    page = (site / "guides" / "cost" / "index.html").read_text()
    assert "https://code.example/dampen/edit/main/docs/guides/cost.md" in page
    assert "https://code.example/dampen/blob/main/docs/costs.md" in page
    assert 'rel="prev"' in page
    assert 'rel="next"' in page
    assert not (site / "costs").exists()


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_nothing_serious_is_found_by_axe_and_no_page_scrolls_sideways(address, dark):
    browser, found = Browser(), []  # a new profile: the theme remembers the mode of the first visit
    try:
        for name in PAGES:
            page = browser.page(1440, 900, dark)
            page.open(address + name)
            assert page.run("document.body.dataset.mdColorScheme") == ["default", "slate"][dark]
            page.run(AXE.read_text() + "; 1")
            found += [f"{name}: {problem}" for problem in page.run(SERIOUS)]
            page.resize(420, 900)
            if page.run("document.documentElement.scrollWidth") > 420:
                found.append(f"{name}: wider than a phone")
            page.close()
    finally:
        browser.close()
    assert found == []
