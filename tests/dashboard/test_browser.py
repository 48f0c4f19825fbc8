"""Pages in headless Chromium (`apt-get install chromium`): drawn, and without effect of hostile texts."""

import re
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
import waitress

from runner.dashboard.app import DashboardApp, make_access_policy
from runner.dashboard.report import render_report
from runner.dashboard.server import PageData, SharedReader
from runner.storage import LocalStore
from tests.dashboard.lives import make_run
from tests.dashboard.test_report import HOSTILE, PLACES

pytestmark = pytest.mark.soak

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
DEADLINE_SECONDS = 300.0  # for a hang
OWNED = '<body id="owned"'


def look_at(address: str, profile: Path) -> tuple[str, list[str]]:
    """Return the page as the browser has drawn it, as HTML, and the lines of its console."""
    browser = next(path for path in map(shutil.which, BROWSERS) if path)
    result = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
         f"--user-data-dir={profile}", "--window-size=390,844", "--virtual-time-budget=8000", "--dump-dom", address],
        capture_output=True, timeout=DEADLINE_SECONDS, check=True,
    )  # fmt: skip
    complaints = [line for line in result.stderr.decode(errors="replace").splitlines() if "CONSOLE" in line]
    return result.stdout.decode(errors="replace"), complaints


def hostile_run(directory: Path) -> LocalStore:
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


def check(page: str, complaints: list[str]) -> None:
    assert complaints == []
    assert OWNED not in page
    assert 'id="owned"' not in page
    assert page.count('class="main-svg"') >= 8
    assert "&lt;script&gt;document.body" in page
    for unit in (
        "loss (nats / token)",
        "optimizer steps",
        "tokens / s",
        "share of wall time",
        "wall time since the first start",
    ):
        assert unit in page


def test_a_report_of_hostile_runs_is_drawn_and_does_nothing_else(tmp_path):
    stores = [hostile_run(tmp_path / name) for name in ("a", "<img src=x onerror=\"document.body.id='owned'\">")]
    for number, some in enumerate((stores[:1], stores)):
        path = tmp_path / f"{number}.html"
        path.write_text(render_report(some))
        check(*look_at(path.as_uri(), tmp_path / "profile"))


def test_the_dashboard_draws_all_runs_and_each(tmp_path):
    hostile_run(tmp_path / "runs" / "<script>document.body.id='owned'<script>")
    source = PageData(LocalStore(tmp_path / "runs"))
    watcher = SharedReader(source.read)
    server = waitress.create_server(
        DashboardApp(make_access_policy("127.0.0.1", None), watcher.get_data), host="127.0.0.1", port=0
    )
    for act in (server.run, watcher.serve):
        threading.Thread(target=act, daemon=True).start()
    top = f"http://127.0.0.1:{server.effective_port}/"
    try:
        page, complaints = look_at(top, tmp_path / "profile")
        assert complaints == []
        assert OWNED not in page
        assert "<polyline" in page
        (name,) = re.findall(r'href="run/([0-9a-f]{16})"', page)
        check(*look_at(f"{top}run/{name}", tmp_path / "profile"))
    finally:
        server.close()
