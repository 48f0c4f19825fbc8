"""Notifications: one per event, and a failing recipient is only a warning."""

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from experiments.counter import Counter
from runner.attempts import notify as notifications
from runner.attempts.events import EVENTS
from runner.attempts.notify import _HOUR_SECONDS, _NOTIFIED_EVENTS, Notifier
from runner.errors import DivergedError
from runner.spec import NotifyConfig, read_spec
from runner.storage import LocalStore, read_json
from tests.support.tiny_jobs import make_counter, stop_after

RUN = {"run": "count", "directory": "runs/count", "attempt": 3}


class RecordingHandler(http.server.BaseHTTPRequestHandler):
    """An HTTP handler that records posted payloads."""

    def do_POST(self) -> None:
        self.server.told.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))  # type: ignore[attr-defined]
        self.send_response(204 if self.path == "/good" else 500)
        self.end_headers()

    def log_message(self, *arguments: Any) -> None:
        """Print nothing."""


@pytest.fixture
def server() -> Iterator[http.server.HTTPServer]:
    server = http.server.HTTPServer(("127.0.0.1", 0), RecordingHandler)
    server.told = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def make_append_command(path: Path) -> dict[str, Any]:
    return {"command": ["sh", "-c", 'cat >> "$0"; echo >> "$0"', str(path)]}


def read_payloads(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def read_events(path: Path) -> list[tuple[str, int | None, str | None]]:
    return [(each["event"], each["step"], each["reason"]) for each in read_payloads(path)]


def test_notified_events_are_ledger_events() -> None:
    assert _NOTIFIED_EVENTS.keys() <= {event.name for event in EVENTS}


def test_a_command_receives_the_payload(tmp_path: Path) -> None:
    alerts = Notifier(NotifyConfig(**make_append_command(tmp_path / "told")), RUN)
    alerts.on_event({"event": "commit", "step": 10})
    alerts.on_event({"event": "fallback", "step": 20, "rejected": 30, "reason": "flipped"})
    alerts.drain(600)
    (found,) = read_payloads(tmp_path / "told")
    assert found.pop("host")
    assert found.pop("time") > 0
    assert found == {**RUN, "event": "fallback", "step": 20, "reason": "flipped"}


def test_a_webhook_is_a_url_or_the_name_of_a_variable(
    server: http.server.HTTPServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("SOME_HOOK", f"{base}/good")
    for number, url in enumerate(
        (f"{base}/good", "$SOME_HOOK", f"{base}/bad", "$NO_SUCH_HOOK", "http://127.0.0.1:9/x")
    ):
        alerts = Notifier(NotifyConfig(webhook=url), RUN)
        alerts.notify("done", number, None)
        alerts.drain(600)
    assert [each["step"] for each in server.told] == [0, 1, 2]  # type: ignore[attr-defined]
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[1] for line in lines] == [
        "the webhook failed",
        "there is no NO_SUCH_HOOK in the environment; nothing will be posted",
        "the webhook failed",
    ]


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (["sleep", "600"], "TimeoutExpired"),
        (["sh", "-c", "sleep 600 & wait"], "TimeoutExpired"),
        (["false"], "SubprocessError: it ended with 1"),
        (["/no/such/program"], "FileNotFoundError"),
        (["a\0b"], "ValueError"),
    ],
)
def test_a_failing_or_hanging_command_is_a_warning(
    command: list[str], reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(notifications, "DEADLINE_SECONDS", 0.1)
    alerts = Notifier(NotifyConfig(command=command), RUN)
    alerts.notify("done", 1, None)
    alerts.drain(600)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"notify: the command failed: {reason}")


@pytest.mark.parametrize(
    ("minutes_ago", "attempt", "is_told"),
    [
        ([], 2, False),
        ([1, 2], 2, False),
        ([1, 2, 3], 2, True),
        ([1, 2, 3], 1, False),  # the previous attempt ended otherwise
        ([1, 2, 3, 4], 2, False),  # already reported
        ([1, 2, 3, 70], 2, True),
        ([1, 2, 61.5], 2, False),
    ],
)
def test_only_the_preemption_that_exceeds_the_limit_is_reported(
    minutes_ago: list[float], attempt: int, is_told: bool, tmp_path: Path
) -> None:
    events = [{"event": "preempt", "time": 2 * _HOUR_SECONDS - 60 * each, "attempt": attempt} for each in minutes_ago]
    alerts = Notifier(NotifyConfig(preemptions_per_hour=2, **make_append_command(tmp_path / "told")), RUN)
    alerts.report_frequent_preemption(
        lambda: [{"event": "start", "time": 1.0, "attempt": 2}, {"event": "preempt"}, *events]
    )
    alerts.drain(600)
    assert read_events(tmp_path / "told") == [("preempted", None, "3 times within an hour")] * is_told


def test_an_unreadable_ledger_is_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> list[Any]:
        raise TimeoutError("the bucket is down")

    alerts = Notifier(NotifyConfig(command=["false"]), RUN)
    alerts.report_frequent_preemption(fail)
    alerts.drain(600)
    assert capsys.readouterr().err.endswith("cannot be counted: TimeoutError: the bucket is down\n")


class DivergingCounter(Counter):
    def save_or_stop(self) -> None:
        super().save_or_stop()
        if self.step == 5:
            raise DivergedError("step 5: training diverged")


@pytest.mark.parametrize("code", [1, 2, 76])
def test_a_retryable_end_is_not_reported_as_a_failure(code: int, tmp_path: Path) -> None:
    alerts = Notifier(NotifyConfig(**make_append_command(tmp_path / "told")), RUN)
    alerts.on_event({"event": "failed", "step": 5, "code": code, "reason": "so"})
    alerts.drain(600)
    assert read_events(tmp_path / "told") == [("failed", 5, "so")] * (code != 76)


def test_each_event_is_sent_once_and_the_url_is_never_written(tmp_path: Path, server: http.server.HTTPServer) -> None:
    secret = f"http://127.0.0.1:{server.server_port}/good"
    changes = {
        "config.step_seconds": 0,
        "logging.notify": {"webhook": secret, "preemptions_per_hour": 1, **make_append_command(tmp_path / "told")},
    }
    for steps in (3, 4):
        job = make_counter(tmp_path / "run", **changes)
        stop_after(job, steps)
    with pytest.raises(DivergedError):
        make_counter(tmp_path / "run", DivergingCounter, **changes)()
    make_counter(tmp_path / "run", **changes)()
    make_counter(tmp_path / "run", **changes)()
    assert read_events(tmp_path / "told") == [
        ("preempted", None, "2 times within an hour"),
        ("failed", 5, "step 5: training diverged; checkpoint 4 is kept"),
        ("done", 40, None),
    ]
    assert server.told == read_payloads(tmp_path / "told")  # type: ignore[attr-defined]
    assert not any(secret.encode() in path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file())
    spec = read_spec(tmp_path / "run" / "spec.yaml")
    assert spec.logging.notify is not None
    assert spec.logging.notify.webhook == "$NOT_WRITTEN_DOWN"


def test_failing_recipients_do_not_change_the_result(tmp_path: Path) -> None:
    make_counter(tmp_path / "plain")()
    make_counter(tmp_path / "told", **{"logging.notify": {"command": ["false"], "webhook": "http://127.0.0.1:9"}})()
    results = [read_json(LocalStore(tmp_path / name), "result.json") for name in ("plain", "told")]
    assert results[0] == results[1]
