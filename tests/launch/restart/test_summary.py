"""The launcher's summary of attempts and goodput, computed from the run directory."""

from launch import supervisor
from runner.history.reader import read_history
from runner.storage import LocalStore, encode_line


def test_a_summary_lists_outcomes_lost_steps_and_goodput(tmp_path):
    def make_event(attempt, time, event, step=None, **details):
        return {"time": time, "attempt": attempt, "process": 0, "event": event, "step": step} | details

    rows = [
        make_event(1, 100.0, "start"),
        make_event(1, 108.0, "init", 0, seconds=2.0),
        make_event(1, 118.0, "save", 10, blocked_seconds=1.0),
        make_event(1, 150.0, "stuck", 33, reason="process 1 has died"),
        make_event(2, 155.0, "start"),
        make_event(2, 159.0, "restore", 10, seconds=4.0),
        make_event(2, 200.0, "done", 60),
    ]
    (tmp_path / "events.jsonl").write_bytes(b"".join(map(encode_line, rows)))
    assert supervisor.format_summary(read_history(LocalStore(tmp_path), now=500.0)) == [
        "launch: 2 attempts (1 retryable, 1 done) in 100.0 s, 23 steps repeated, goodput 50.0%",
        "launch: gap 5.0 s, restore 6.0 s, steps 50.0 s, lost steps 32.0 s, save stall 1.0 s, unattributed 6.0 s",
    ]
