"""Synthetic run directories with a given number of attempts and rows, in the format of the runner."""

import json
import math
from collections.abc import Iterator

from runner.storage import JsonObject, LocalStore, Store, encode_json

START_TIME = 1_700_000_000.0
ATTEMPT_SECONDS = 1000.0
LOST_STEPS = 7
SPEC = "name: life\njob: a:B\ndirectory: runs/life\nconfig: {train: {total_steps: %d}}\n"


def make_rows(num_attempts: int, num_rows: int, **more: object) -> Iterator[JsonObject]:
    """Yield the surviving rows, one per step and `num_rows` per attempt, with a peak of 99 in the middle."""
    for index in range(num_attempts * num_rows):
        attempt, place = index // num_rows, index % num_rows
        row = {
            "step": index + 1,
            "train/loss": 99.0 if index == num_attempts * num_rows // 2 else 2.0 + math.sin(index) / 7,
            "train/grad_norm": 1.0,
            "train/learning_rate": 1e-3,
            "train/tokens": (index + 1) * 512,
            "perf/tokens_per_second": 1000.0 + place,
            "perf/time": START_TIME + attempt * ATTEMPT_SECONDS + 100 + 600 * place / num_rows,
            "perf/attempt": attempt + 1,
        }
        yield row | ({"val/loss": 2.5} if place == num_rows - 1 else {}) | more


def make_events(num_attempts: int, num_rows: int) -> Iterator[JsonObject]:
    """Yield the events; each attempt but the last, which finishes, is killed `LOST_STEPS` steps after its only save."""
    for number in range(1, num_attempts + 1):
        began, resumed, saved = START_TIME + (number - 1) * ATTEMPT_SECONDS, (number - 1) * num_rows, number * num_rows
        start = {"processes": 1, "devices": 8, "device_kind": "TPU v5e", "hosts": ["host"], "cpus": 2}
        state = ("restore", {"tier": "durable"}) if resumed else ("init", {})
        for after, event, step, details in (
            (
                5.0,
                "start",
                None,
                {"began": began, "total_steps": num_attempts * num_rows, "versions": {"jax": "1"}} | start,
            ),
            (60.0, "prepare", None, {"seconds": 50.0}),
            (90.0, state[0], resumed, {"seconds": 20.0, "fingerprint": "f"} | state[1]),
            (700.0, "save", saved, {"blocked_seconds": 1.0}),
            (705.0, "commit", saved, {"seconds_to_durable": 5.0, "bytes": 1000, "fingerprint": "f"}),
            (706.0, "done", saved, {}) if number == num_attempts else (720.0, "progress", saved + LOST_STEPS, {}),
        ):
            yield {"time": began + after, "attempt": number, "process": 0, "event": event, "step": step} | details


def encode_lines(rows: Iterator[JsonObject]) -> Iterator[bytes]:
    return ((json.dumps(row) + "\n").encode() for row in rows)


def make_run(store: Store, num_attempts: int = 3, num_rows: int = 20, spec: str | None = None, **more: object) -> Store:
    """Write the run directory; `more` is added to each row."""
    owner = {"id": "0" * 12, "name": "life", "time": START_TIME, "identity": {}}
    store.write("job.json", encode_json(owner))
    store.write("spec.yaml", (spec or SPEC % (num_attempts * num_rows)).encode())
    contents = {
        "events.jsonl" if store.root else "events/000001.0.0000.jsonl": encode_lines(
            make_events(num_attempts, num_rows)
        ),
        "metrics.jsonl": encode_lines(make_rows(num_attempts, num_rows, **more)),
    }
    for name, lines in contents.items():
        if isinstance(store, LocalStore):
            store.write_chunks(name, lines)
        else:
            store.write(name, b"".join(lines))
    return store
