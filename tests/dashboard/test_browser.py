"""Pages in headless Chromium (`apt-get install chromium`): legible at every width, and safe against hostile texts."""

import contextlib
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runner.dashboard.app import DashboardApp, make_access_policy
from runner.dashboard.report import render_report
from runner.dashboard.server import PageData, SharedReader, make_server
from runner.history.sweep import SweepRun
from runner.metrics.file import read_rows
from runner.storage import LocalStore, Store
from tests.dashboard.scenes import SCENES, make_pictures, make_suspect_hosts
from tests.dashboard.sweeps import make_sweep, write_record
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
    pages = PageData(LocalStore(root))
    reader = SharedReader(pages.read)
    web = make_server(
        DashboardApp(make_access_policy("127.0.0.1", None), reader.get_data, pages.read_media), "127.0.0.1", 0
    )
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
        assert measure(browser, top, "document.querySelectorAll('tbody tr').length === 30") == []
        # Sort, filter, select and compare runs.
        browser.set_viewport(1600)
        head = "[...document.querySelectorAll('.sort')].find((each) => each.textContent === 'best validation')"
        column = browser.evaluate(f"[...{head}.closest('tr').children].indexOf({head}.closest('th'))")
        browser.evaluate(f"{head}.click()")
        cells = browser.evaluate(
            f"[...document.querySelectorAll('tbody tr')].map((row) => row.children[{column}].innerText)"
        )
        values = [float(cell) for cell in cells if re.fullmatch(r"\d+\.\d+", cell.strip())]
        assert len(values) > 10
        assert values == sorted(values)
        field = "document.querySelector('input[type=search]')"
        browser.evaluate(f"{field}.focus(); {field}.value = 'sweep/ done'; {field}.dispatchEvent(new Event('input'))")
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


def test_the_table_of_hosts_is_legible_at_every_width(tmp_path):
    make_suspect_hosts(tmp_path / "runs")
    with serve_dashboard(tmp_path / "runs") as top, Browser(tmp_path / "profile") as browser:
        browser.open(top)
        browser.wait_for("document.querySelector('tbody tr')")
        assert browser.evaluate("document.querySelector('nav a').href") == f"{top}hosts"
        assert measure(browser, f"{top}hosts", "document.querySelectorAll('table.runs tbody tr').length === 4") == []
        browser.set_viewport(1600)
        text = browser.evaluate("document.querySelector('tbody tr').textContent")
        for part in ("tpu-worker-1", "suspect", "1 x device fault", "device 3, device 5, hosts/1", "--exclude=tpu"):
            assert part in text
        assert browser.evaluate("document.querySelector('nav a').href") == top


@pytest.mark.parametrize("kind", ["report", "live page"])
def test_a_slider_shows_the_images_and_audio_of_other_steps(tmp_path, kind):
    make_pictures(tmp_path / "runs")
    with serve_dashboard(tmp_path / "runs") as top, Browser(tmp_path / "profile") as browser:
        browser.open(top)
        browser.wait_for("document.querySelector('td a')")
        address = browser.evaluate("document.querySelector('td a').href")
        browser.open(address if kind == "live page" else address.replace("/run/", "/report/"))
        browser.wait_for("document.querySelectorAll('.media img').length === 2")
        image, slider = "document.querySelector('.media img')", "document.querySelector('.slider input')"
        browser.wait_for(f"{image}.complete && {image}.naturalWidth === 28")
        assert browser.evaluate(f"{image}.alt") == "own/digit at step 1,200"
        for value, step in (("0", "500" if kind == "report" else "100"), ("2", "700" if kind == "report" else "300")):
            browser.evaluate(f"{slider}.value = {value}; {slider}.dispatchEvent(new Event('input'))")
            browser.wait_for(f"{image}.complete && {image}.naturalWidth === 28")
            assert browser.evaluate(f"{image}.alt") == f"own/digit at step {step}"
        # A redraw, as after a resize, keeps the step.
        browser.set_viewport(360)
        browser.evaluate("new Promise((done) => setTimeout(done, 500))")
        assert browser.evaluate(f"{image}.alt") == f"own/digit at step {step}"
        browser.wait_for("document.querySelector('audio').duration === 0.5")
        assert browser.page_errors == []


@pytest.mark.parametrize("scene", ["three", "seeds", "halving"])
def test_the_page_of_a_sweep_is_legible_at_every_width(tmp_path, scene):
    root = tmp_path / "runs"
    options = {"three": (3, 1, False), "seeds": (30, 5, False), "halving": (60, 1, True)}
    num_runs, num_seeds, is_halving = options[scene]
    make_sweep(root, num_runs, num_seeds=num_seeds, is_halving=is_halving, kinds=scene == "halving")
    (tmp_path / "report.html").write_text(render_report([LocalStore(root)]))
    with Browser(tmp_path / "profile") as browser:
        assert measure(browser, (tmp_path / "report.html").as_uri()) == []
        browser.set_viewport(1600)
        browser.open((tmp_path / "report.html").as_uri())
        browser.wait_for(DRAWN)
        if scene == "halving":
            # All runs are shown on request, and a run that is marked stands out in every chart.
            press_button(browser, "show all 60 runs")
            assert browser.evaluate("document.querySelectorAll('table.runs tbody tr').length") == 60
            name = browser.evaluate("document.querySelectorAll('.chip.mark')[2].textContent")
            browser.evaluate("document.querySelectorAll('.chip.mark')[2].click()")
            assert browser.evaluate("location.hash") == f"#marked={name}"
            is_marked = "(each) => each.data.some((trace) => trace.line?.width === 3)"
            browser.wait_for(f"[...document.querySelectorAll('.plot')].filter({is_marked}).length === 3")
        assert browser.page_errors == []


def test_the_runs_of_a_sweep_are_shown_by_the_pointer_and_have_pages(tmp_path):
    root = tmp_path / "runs"
    make_sweep(root, 12)
    hostile = {f"config.{text}": text for text in HOSTILE[:6]}
    runs = [SweepRun(f"{index:03}", hostile | {"n": index}) for index in range(12)]
    with serve_dashboard(root) as top, Browser(tmp_path / "profile") as browser:
        browser.set_viewport(1600)
        browser.open(top)
        browser.wait_for("document.querySelectorAll('.plot .main-svg').length > 8")
        point = "document.querySelector('.plot .points path').getBoundingClientRect()"
        browser.evaluate("document.querySelector('.plot').scrollIntoView()")
        box = browser.evaluate(f"(({{left, top, width, height}}) => [left + width / 2, top + height / 2])({point})")
        move_pointer(browser, "mouseMoved", *box)
        browser.wait_for("document.querySelector('.tooltip')")
        shown = browser.evaluate("document.querySelector('.tooltip').textContent")
        assert "learning_rate" in shown
        assert "validation loss" in shown
        write_record(root, runs)
        browser.wait_for("document.querySelector('table.runs thead').textContent.includes('{7*7}')")
        browser.evaluate("new Promise((done) => setTimeout(done, 500))")
        assert browser.evaluate("document.body.id") == ""
        browser.open(browser.evaluate("document.querySelector('td a').href"))
        browser.wait_for("document.querySelector('h1').textContent.startsWith('0')")
        assert browser.page_errors == []


def move_pointer(browser: Browser, kind: str, x: float, y: float, **more: Any) -> None:
    browser.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)


def get_chart_box(browser: Browser) -> tuple[float, float, float, float]:
    """Return left, top, width and height of the plane of the first chart."""
    box = "document.querySelector('.plot .nsewdrag').getBoundingClientRect()"
    left, top, width, height = browser.evaluate(
        f"(({{left, top, width, height}}) => [left, top, width, height])({box})"
    )
    return left, top, width, height


def press_button(browser: Browser, text: str) -> None:
    browser.evaluate(f"[...document.querySelectorAll('button')].find((each) => each.textContent === '{text}').click()")


def test_the_view_is_shared_by_all_charts_and_kept_in_the_address(tmp_path):
    SCENES["ten_runs"](tmp_path / "runs")
    stores: list[Store] = [LocalStore(path.parent) for path in sorted((tmp_path / "runs").rglob("job.json"))]
    (tmp_path / "report.html").write_text(render_report(stores[:5]))
    ranges = "[...document.querySelectorAll('#charts .plot')].map((each) => each.layout.xaxis.range.map(Math.round))"
    with Browser(tmp_path / "profile") as browser:
        browser.set_viewport(1600)
        browser.open((tmp_path / "report.html").as_uri())
        browser.wait_for(DRAWN)
        left, top, width, height = get_chart_box(browser)
        # The pointer shows the values of all runs at its place, and draws over a part of the steps.
        move_pointer(browser, "mouseMoved", left + width * 0.4, top + height / 2)
        browser.wait_for("document.querySelector('.tooltip')")
        shown = browser.evaluate("document.querySelector('.tooltip').textContent")
        assert [shown.count(f"rate-{rate}, training") for rate in ("0.0001", "0.0002", "0.0003", "0.0005")] == [1] * 4
        button = {"button": "left", "buttons": 1, "clickCount": 1}
        move_pointer(browser, "mousePressed", left + width * 0.2, top + height / 2, **button)
        for part in (0.3, 0.4, 0.5, 0.6):
            move_pointer(browser, "mouseMoved", left + width * part, top + height / 2, **button)
        move_pointer(browser, "mouseReleased", left + width * 0.6, top + height / 2, **button)
        browser.wait_for("location.hash.includes('zoom')")
        ((first, last), *others) = browser.evaluate(ranges)
        assert 150 < first < last < 700
        assert others == [[first, last]] * len(others)
        # The same part of the run on another axis, and in another window.
        press_button(browser, "tokens")
        (tokens, *_) = browser.evaluate(ranges)
        assert [round(each / 524288 / 10) for each in tokens] == [round(first / 10), round(last / 10)]
        browser.evaluate("document.querySelector('td .chip').click()")
        press_button(browser, "95th percentile")
        address = browser.evaluate("location.href")
        browser.call("Page.navigate", url="about:blank")
        browser.open(address)
        browser.wait_for(DRAWN)
        assert browser.evaluate(ranges)[-1] == pytest.approx(tokens, rel=1e-6)
        assert browser.evaluate("document.querySelector('td .chip').ariaPressed") == "false"
        chip = "[...document.querySelectorAll('.chip')].find((each) => each.textContent === '95th percentile')"
        assert browser.evaluate(f"{chip}.ariaPressed") == "true"
        press_button(browser, "reset zoom")
        browser.wait_for("!location.hash.includes('zoom')")
        assert browser.page_errors == []


@pytest.mark.parametrize("axis", ["step", "tokens", "time"])
def test_a_click_on_a_curve_shows_the_command_that_explains_the_step(tmp_path, axis):
    SCENES["ten_runs"](tmp_path / "runs")
    stores: list[Store] = [LocalStore(path.parent) for path in sorted((tmp_path / "runs").rglob("job.json"))]
    (tmp_path / "report.html").write_text(render_report(stores[:3]))
    with Browser(tmp_path / "profile") as browser:
        browser.set_viewport(1600)
        browser.open((tmp_path / "report.html").as_uri() + f"#axis={axis}")
        browser.wait_for(DRAWN)
        left, top, width, height = get_chart_box(browser)
        place = (left + width * 0.5, top + height * 0.6)
        move_pointer(browser, "mouseMoved", *place)
        browser.wait_for("document.querySelector('.tooltip')")
        button = {"button": "left", "buttons": 1, "clickCount": 1}
        move_pointer(browser, "mousePressed", *place, **button)
        move_pointer(browser, "mouseReleased", *place, **button)
        browser.wait_for("document.querySelector('.explained code')")
        command = browser.evaluate("document.querySelector('.explained code').textContent")
        found = re.fullmatch(r"python -m runner explain (\S+) --step (\d+)", command)
        assert found is not None
        rows = read_rows(LocalStore(Path(found[1])))
        assert int(found[2]) in {row["step"] for row in rows}
        if axis == "step":
            first, last = browser.evaluate("document.querySelector('.plot').layout.xaxis.range")
            assert int(found[2]) == pytest.approx((first + last) / 2, abs=0.1 * (last - first))
        assert browser.page_errors == []


@pytest.mark.parametrize("hash", ["zoom=1", "zoom=5,1", "zoom=NaN,Infinity", "axis=__proto__&scale=x&smoothing=9", "%"])
def test_an_invalid_view_is_the_initial_one(tmp_path, hash):
    SCENES["running"](tmp_path / "runs")
    (tmp_path / "report.html").write_text(render_report([LocalStore(tmp_path / "runs/gpt-small-running")]))
    with Browser(tmp_path / "profile") as browser:
        browser.open(f"{(tmp_path / 'report.html').as_uri()}#{hash}")
        browser.wait_for(DRAWN)
        assert browser.evaluate("location.hash") == ""
        assert browser.page_errors == []


def test_progress_never_runs_backwards_in_time(tmp_path):
    SCENES["running"](tmp_path / "runs")
    store = LocalStore(tmp_path / "runs/gpt-small-running")
    page = render_report([store])
    # A stage that is compiled beside the steps adds to the time of compilation.
    late = re.sub(r'"stepping":([0-9.]+)', lambda found: f'"stepping":{float(found[1]) + 40}', page)
    (tmp_path / "report.html").write_text(late)
    with Browser(tmp_path / "profile") as browser:
        browser.open((tmp_path / "report.html").as_uri())
        browser.wait_for(DRAWN)
        traces = "[...document.querySelectorAll('.plot')].flatMap((each) => each.data)"
        kept = browser.evaluate(
            f"{traces}.find((each) => each.name === 'surviving steps').x.filter((each) => each !== null)"
        )
        assert late != page
        assert kept == sorted(kept)


def test_unlike_runs_have_few_columns_and_a_failure_is_told_once(tmp_path):
    SCENES["unlike"](tmp_path / "runs")
    SCENES["failed_early"](tmp_path / "runs")
    places = [path.parent for path in sorted((tmp_path / "runs/unlike").rglob("job.json"))]
    with Browser(tmp_path / "profile") as browser:
        browser.set_viewport(1600)
        path = tmp_path / "report.html"
        path.write_text(render_report(list(map(LocalStore, places))))
        browser.open(path.as_uri())
        heads = browser.evaluate("[...document.querySelectorAll('.runs th')].map((each) => each.textContent)")
        assert heads[:5] == ["run", "loss", "best validation", "optimizer.learning_rate", "seed"]
        browser.wait_for(DRAWN)
        marks = browser.evaluate("document.querySelector('.plot').data.filter((each) => each.marker?.symbol === 'x')")
        assert [mark["meta"]["label"] for mark in marks] == ["run-1, training, failed"]
        press_button(browser, "30 more keys differ")
        assert browser.evaluate("document.querySelectorAll('#differences tbody tr').length") == 32
        # Curves of one colour would be told apart by their names alone.
        off = browser.evaluate(
            "[...document.querySelectorAll('.chip[aria-pressed=false]')].map((each) => each.textContent)"
        )
        assert {"95th percentile", "peak so far", "free"} <= set(off)

        path.write_text(render_report([LocalStore(tmp_path / "runs/early/failed")]))
        browser.open(path.as_uri())
        assert browser.evaluate("document.body.innerText.split('RESOURCE_EXHAUSTED').length") == 2
        assert browser.evaluate("document.querySelectorAll('.plot').length") == 2
        path.write_text(render_report([LocalStore(tmp_path / "runs/early/diverged")]))
        browser.open(path.as_uri())
        browser.wait_for(DRAWN)
        assert browser.evaluate("document.querySelectorAll('#charts .plot').length") == 1
        assert browser.evaluate("document.querySelector('#charts .plot').layout.annotations[0].text") == "failed"
        assert browser.page_errors == []


def test_an_empty_root_shows_the_next_command(tmp_path):
    with serve_dashboard(tmp_path) as top, Browser(tmp_path / "profile") as browser:
        browser.open(top)
        browser.wait_for("document.querySelector('code')")
        command = browser.evaluate("document.querySelector('code').textContent")
        assert command == f"python -m runner specs/gpt_nano.yaml --set directory={tmp_path}/first"
        browser.evaluate("document.oncopy = (event) => { window.copied = document.activeElement.value; }")
        click = "document.querySelector('.copy').click()"
        browser.call("Runtime.evaluate", expression=click, userGesture=True)
        assert browser.evaluate("window.copied") == command


def test_runs_are_sorted_by_activity_and_filtered_by_their_keys(tmp_path):
    SCENES["ten_runs"](tmp_path)
    names = "[...document.querySelectorAll('tbody tr a')].map((each) => each.textContent.split('-').pop())"
    with serve_dashboard(tmp_path) as top, Browser(tmp_path / "profile") as browser:
        browser.open(top)
        browser.wait_for("document.querySelectorAll('tbody tr').length === 10")
        assert browser.evaluate(names)[:3] == ["0.0001", "0.0002", "0.0003"]
        browser.evaluate("location.hash = 'filter=learning_rate%3D0.001+general&columns=seed&columns=mfu'")
        browser.wait_for("document.querySelectorAll('tbody tr').length === 2")
        assert browser.evaluate(names) == ["0.001", "0.0015"]
        heads = browser.evaluate("[...document.querySelectorAll('thead th')].map((each) => each.textContent)")
        assert "seed" in heads
        assert "MFU" not in heads


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
