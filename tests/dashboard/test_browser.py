"""Pages in headless Chromium (`apt-get install chromium`): legible at every width, and safe against hostile texts."""

import contextlib
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.dashboard.app import DashboardApp, make_access_policy
from runner.dashboard.report import render_report
from runner.dashboard.server import PageData, SharedReader, make_server
from runner.storage import LocalStore, Store
from tests.dashboard.scenes import SCENES
from tests.dashboard.synthetic_runs import make_run
from tests.dashboard.test_report import HOSTILE, PLACES
from tests.support.browser import Browser

pytestmark = pytest.mark.soak

WIDTHS = (360, 800, 1600)
INJECTED_MARKUP = '<body id="owned"'
DRAWN = "document.querySelectorAll('.plot').length === document.querySelectorAll('.plot .main-svg:first-child').length"
MEASURE = (Path(__file__).parent / "measure.js").read_text()


@contextlib.contextmanager
def serve_dashboard(root: Path) -> Iterator[str]:
    """Serve the runs below a directory and return the URL."""
    reader = SharedReader(PageData(LocalStore(root)).read)
    web = make_server(DashboardApp(make_access_policy("127.0.0.1", None), reader.get_data), "127.0.0.1", 0)
    for act in (web.run, reader.serve):
        threading.Thread(target=act, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{web.effective_listen[0][1]}/"
    finally:
        web.close()


def measure(browser: Browser, address: str, ready: str = "true") -> list[str]:
    """Return the layout problems of a page at each width, in light and dark mode."""
    problems = []
    for width in WIDTHS:
        for is_dark in (False, True):
            browser.set_viewport(width, is_dark)
            if not is_dark:
                browser.open(address)
                browser.wait_for(ready)
            # Sections that are initially closed are measured too.
            browser.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
            browser.wait_for(DRAWN)
            browser.evaluate("new Promise((done) => setTimeout(done, 400))")
            problems += [f"{width} {'dark' if is_dark else 'light'}: {each}" for each in browser.evaluate(MEASURE)]
    # The window is resized after loading.
    browser.set_viewport(WIDTHS[0])
    browser.evaluate("new Promise((done) => setTimeout(done, 1000))")
    return problems + [f"made narrow: {each}" for each in browser.evaluate(MEASURE)] + browser.page_errors


@pytest.mark.parametrize("scene", SCENES)
def test_a_report_of_every_state_is_legible_at_every_width(tmp_path, scene):
    SCENES[scene](tmp_path / "runs")
    stores: list[Store] = [LocalStore(path.parent) for path in sorted((tmp_path / "runs").rglob("job.json"))]
    (tmp_path / "report.html").write_text(render_report(stores))
    with Browser(tmp_path / "profile") as browser:
        assert measure(browser, (tmp_path / "report.html").as_uri()) == []
        # The headline and the loss curve are on the first screen.
        browser.set_viewport(1600)
        browser.open((tmp_path / "report.html").as_uri())
        if scene not in ("empty",):
            assert browser.evaluate("document.querySelector('figure .plot').getBoundingClientRect().top") < 700
        assert browser.evaluate("document.querySelector('main').getBoundingClientRect().width") > 1500


def test_the_table_and_a_comparison_are_legible_at_every_width(tmp_path):
    root = tmp_path / "runs"
    for make in SCENES.values():
        make(root)
    (root / "broken").mkdir()
    (root / "broken" / "job.json").write_text("{}")
    with serve_dashboard(root) as top, Browser(tmp_path / "profile") as browser:
        assert measure(browser, top, "document.querySelectorAll('tbody tr').length === 24") == []
        # Sort, filter, select and compare runs.
        browser.set_viewport(1600)
        first = "document.querySelector('tbody tr a').textContent"
        head = "[...document.querySelectorAll('.sort')].find((each) => each.textContent === 'best validation')"
        browser.evaluate(f"{head}.click()")
        assert browser.evaluate(first) == "sweep/gpt-small-learning-rate-0.0008"
        field = "document.querySelector('input[type=search]')"
        browser.evaluate(f"{field}.focus(); {field}.value = 'sweep done'; {field}.dispatchEvent(new Event('input'))")
        assert browser.evaluate("document.querySelectorAll('tbody tr').length") == 6
        assert browser.evaluate("document.activeElement.type") == "search"
        for index in range(3):
            browser.evaluate(f"document.querySelectorAll('tbody input')[{index}].click()")
        compare = browser.evaluate("document.querySelector('.controls a').href")
        assert compare.count(",") == 2
        assert measure(browser, compare, "document.querySelectorAll('.main-svg').length > 8") == []
        assert browser.evaluate("document.querySelector('.best-row').textContent").count("0.0008") >= 1
        assert "optimizer.learning_rate" in browser.evaluate("document.querySelector('thead').textContent")
        count = "document.querySelector('figure .plot').data.length"
        before = browser.evaluate(count)
        browser.evaluate("document.querySelector('td .chip').click()")
        assert browser.evaluate(count) < before
        # Open the report of the same runs and return.
        report = browser.evaluate("document.querySelectorAll('nav a')[1].href")
        browser.open(report)
        assert browser.evaluate("document.querySelectorAll('tbody tr').length") >= 3
        assert browser.evaluate("[...document.querySelectorAll('nav a')].map((each) => each.href)") == [top, compare]
        assert browser.page_errors == []


def make_hostile_run(directory: Path) -> LocalStore:
    """Make a run in which every text is hostile."""
    store = make_run(LocalStore(directory), num_attempts=3, num_rows=20)
    for text in HOSTILE[:-1]:
        for name, form in PLACES.values():
            if name in ("events.jsonl", "metrics.jsonl", "logs/1.0.log"):
                path = directory / name
                path.parent.mkdir(exist_ok=True)
                encoded = re.sub(r"[\n\"\\]", " ", text).encode("ascii", "backslashreplace").decode().replace("\\", "/")
                with path.open("a") as file:
                    file.write(form.format(f'"{encoded}"'))
    (directory / "spec.yaml").write_text("".join(f"x: {text}\n" for text in HOSTILE[:5]))
    return store


def check_page(browser: Browser, address: str) -> None:
    browser.open(address)
    browser.wait_for("document.querySelectorAll('.main-svg').length >= 8")
    page = browser.evaluate("document.documentElement.outerHTML")
    assert browser.page_errors == []
    assert INJECTED_MARKUP not in page
    assert 'id="owned"' not in page
    assert "&lt;script&gt;document.body" in page
    for unit in (
        "nats / token",
        "optimizer steps",
        "tokens / s",
        "share of wall time",
        "wall time since the first start",
    ):
        assert unit in page


def test_a_report_of_hostile_runs_only_draws(tmp_path):
    stores = [make_hostile_run(tmp_path / name) for name in ("a", "<img src=x onerror=\"document.body.id='owned'\">")]
    with Browser(tmp_path / "profile") as browser:
        for number, some in enumerate((stores[:1], stores)):
            path = tmp_path / f"{number}.html"
            path.write_text(render_report(some))
            check_page(browser, path.as_uri())


def test_the_dashboard_draws_the_table_and_each_run(tmp_path):
    make_hostile_run(tmp_path / "runs" / "<script>document.body.id='owned'<script>")
    with serve_dashboard(tmp_path / "runs") as top, Browser(tmp_path / "profile") as browser:
        browser.open(top)
        browser.wait_for("document.querySelector('polyline')")
        assert INJECTED_MARKUP not in browser.evaluate("document.documentElement.outerHTML")
        (run,) = browser.evaluate("[...document.querySelectorAll('td a')].map((each) => each.href)")
        check_page(browser, run)
