"""Where the time went over a scripted life of real processes, against a stop-watch that knows nothing of the ledger."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from runner.distributed.clock import TimeCategory
from runner.history.reader import read_history
from runner.history.records import RunState
from runner.storage import LocalStore
from tests.history.test_life import check_sums, flip_a_bit
from tests.support.job_process import Attempt, Job
from tests.support.tiny_jobs import make_gpt_document

SHARE = 0.02  # of the wall time, by which each category may differ
GAP_SECONDS = 2.0


class Life:
    """The attempts of one job, one after the other, and what the stop-watch says of them."""

    def __init__(self, base: Path):
        self.run, self.watch = base / "run", base / "watch.jsonl"
        changes = {
            "job": "tests.support.timed_gpt:TimedGPT",
            "config.train.total_steps": 400,
            "config.eval.every_steps": 100,
        }
        document = make_gpt_document(self.run, **changes, **{"checkpoint.every_steps": 50, "logging.every_steps": 10})
        spec = base / "timed.yaml"
        spec.write_text(yaml.safe_dump(document))
        self.job = Job(str(spec), self.run)
        self.lives: list[tuple[float, float]] = []

    def start(self, hold: str = "") -> Attempt:
        began = time.time()
        attempt = Attempt(self.job, ["runner", *self.job.arguments], 1, TIMED_FILE=str(self.watch), TIMED_HOLD=hold)
        self.lives.append((began, began))
        return attempt

    def ended(self) -> None:
        """Note that the newest attempt has ended."""
        self.lives[-1] = (self.lives[-1][0], time.time())

    def lines(self, attempt: int, key: str) -> list[dict[str, Any]]:
        """What the stop-watch wrote in an attempt, of those that have this key."""
        if not self.watch.exists():
            return []
        rows = [json.loads(line) for line in self.watch.read_text().splitlines() if line.endswith("}")]
        return [row for row in rows if row["attempt"] == attempt and key in row]

    def step(self, attempt: int) -> int:
        """That it has completed."""
        return max((row["step"] for row in self.lines(attempt, "seconds")), default=0)

    def kill_at(self, number: int, step: int) -> None:
        """Start an attempt and kill it while it is held after this step."""
        attempt = self.start(f"{number}:{step}")
        attempt.wait_until(lambda: self.lines(number, "held"), f"step {step}")
        attempt.kill()
        self.ended()


def stop_watch(life: Life, kept: dict[int, int]) -> dict[TimeCategory, float]:
    """Seconds by category; `kept` has the step that a later attempt went on from, by attempt."""
    found = dict.fromkeys(TimeCategory, 0.0)
    for number, (began, ended) in enumerate(life.lives, start=1):
        rows = life.lines(number, "seconds")
        last = rows[-1]
        before = sum(last["seconds"].values())
        for name, seconds in last["seconds"].items():
            found[TimeCategory(name)] += seconds  # type: ignore[call-arg]
        prepared = life.lines(number, "prepared")[0]["time"]
        found[TimeCategory.PROCESS_START] += prepared - began
        if number in kept:
            base = next((row["seconds"]["steps"] for row in rows if row["step"] == kept[number]), 0.0)
            standing = ended - last["time"]
            lost = last["seconds"]["steps"] - base + standing
            found[TimeCategory.STEPS] += standing - lost
            found[TimeCategory.LOST_STEPS] += lost
        else:
            finished = life.lines(number, "finished")
            more = sum(finished[0]["finished"].values()) - (before - last["seconds"]["steps"]) if finished else 0.0
            found[TimeCategory.SAVE_STALL] += more
            found[TimeCategory.SHUTDOWN] += ended - last["time"] - more
    for (_, ended), (began, _) in zip(life.lives, life.lives[1:], strict=False):
        found[TimeCategory.GAP] += began - ended
    return found


@pytest.mark.soak
def test_goodput_accounting_agrees_with_a_stopwatch(tmp_path: Path) -> None:
    life = Life(tmp_path)
    first = life.start()
    first.wait_until(lambda: life.step(1) >= 200, "step 200")
    first.process.send_signal(signal.SIGTERM)
    first.expect(75)
    life.ended()
    stopped = life.step(1)
    time.sleep(GAP_SECONDS)
    life.kill_at(2, 340)
    life.kill_at(3, 360)
    flip_a_bit(life.run / "checkpoints/350")
    last = life.start()
    last.expect(0)
    life.ended()

    history = read_history(LocalStore(life.run))
    told = [(each.state, each.resumed_step, each.reached_step, each.lost_steps) for each in history.attempts]
    assert told == [
        (RunState.PREEMPTED, 0, stopped, 0),
        (RunState.KILLED, stopped, 340, 40),
        (RunState.KILLED, 300, 360, 60),
        (RunState.DONE, 300, 400, 0),
    ]
    check_sums(history)
    expected = stop_watch(life, {2: 300, 3: 300})
    found = dict(history.seconds)
    for category in (TimeCategory.DISTRIBUTED_INIT, TimeCategory.SET_UP):  # the watch knows one wait before the compile
        found[TimeCategory.PROCESS_START] += found.pop(category)
    wall_seconds = life.lives[-1][1] - life.lives[0][0]
    for category, seconds in found.items():
        print(f"{category.value:>18} {seconds:8.3f} s, by the watch {expected[category]:8.3f} s")
    print(f"{'wall time':>18} {history.wall_seconds:8.3f} s, by the watch {wall_seconds:8.3f} s")
    assert history.seconds[TimeCategory.UNATTRIBUTED] < SHARE * wall_seconds
    assert abs(history.wall_seconds - wall_seconds) < SHARE * wall_seconds
    for category, seconds in found.items():
        assert abs(seconds - expected[category]) < SHARE * wall_seconds, category
