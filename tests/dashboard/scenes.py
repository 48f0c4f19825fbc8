"""Directories with runs in every state that pages show: names, and functions that create them."""

import json
import math
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from runner.attempts.clock_file import HEADER_BYTES, encode_slot
from runner.config import StageConfig, locate_stages
from runner.distributed.clock import COUNTED_CATEGORIES, ClockReading, TimeCategory
from runner.metrics.media import Audio, Image, encode_media
from runner.storage import JsonObject, LocalStore, encode_json, encode_line
from tests.dashboard.synthetic_runs import make_run

SPEC = """name: {name}
project: general
group: sweep
job: experiments.gpt:PretrainGPT
directory: runs/{name}
seed: {seed}
config:
  model: {{layers: 6, heads: 6, width: 384}}
  optimizer: {{name: adamw, learning_rate: {rate}}}
  data: {{sequence_length: 2048}}
  schedule: {{name: constant, final_learning_rate: 0.0}}
  train: {{total_steps: {total}, global_batch_examples: 256}}
"""


def make_synthetic_run(
    root: Path,
    name: str,
    num_rows: int,
    total: int,
    ago_seconds: float = 0.0,
    rate: float = 1e-3,
    seed: int = 0,
    end: JsonObject | None = None,
    num_attempts: int = 1,
    sources: tuple[str, ...] = (),
    run_id: str = "0" * 12,
    fork: JsonObject | None = None,
    stages: Sequence[JsonObject] = (),
) -> Path:
    """Make a run of `num_rows` rows of ten steps each, whose last heartbeat is `ago_seconds` old.

    Args:
        fork: `run`, `id` and `step` of its parent, after which the rows begin.
        stages: `config.stages` of its spec.
    """
    starts = locate_stages(256, 2048, [StageConfig.model_validate(stage) for stage in stages])
    first = 0 if fork is None else fork["step"] // 10
    numbers = random.Random(seed)
    store = LocalStore(root / name)
    now = time.time() - ago_seconds
    began = now - 40 - 6.0 * num_rows
    store.write("job.json", encode_json({"id": run_id, "name": name, "time": began, "identity": {}}))
    spec = SPEC.format(name=name, seed=seed, rate=rate, total=total)
    store.write("spec.yaml", (f"{spec}  stages: {json.dumps(list(stages))}\n" if stages else spec).encode())
    rows, events = [], []
    per_attempt = max(num_rows // num_attempts, 1)
    for number in range(1, num_attempts + 1):
        since = began + (number - 1) * 6.0 * per_attempt
        start = {"time": since + 5, "attempt": number, "process": 0, "event": "start", "step": None, "began": since,
                 "total_steps": total, "processes": 4, "devices": 16, "device_kind": "TPU v5e", "cpus": 112,
                 "hosts": [f"tpu-worker-{host}.example.internal" for host in range(4)],
                 "versions": {"jax": "0.10.2", "runner": "0.9.0"}, "commit": "0123456789abcdef"}  # fmt: skip
        events += [start, {"time": since + 20, "attempt": number, "process": 0, "event": "prepare", "seconds": 14.0}]
        resumed = (number - 1) * per_attempt * 10
        events.append({"time": since + 30, "attempt": number, "process": 0, "event": "restore" if resumed else "init",
                       "step": resumed, "seconds": 9.0})  # fmt: skip
    if fork is not None:
        events[2] |= {"event": "fork", "changes": {"config.optimizer.learning_rate": [1e-3, rate]}} | fork
    for number, start in enumerate(starts[1:], 1):
        if first * 10 <= start.step < num_rows * 10:
            events.append({"time": began + 28.5 + 0.6 * start.step, "attempt": 1, "process": 0, "event": "stage",
                           "step": start.step, "number": number, "from_step": start.step, "why": ""})  # fmt: skip
    for index in range(first, num_rows):
        step, moment = (index + 1) * 10, began + 34 + 6.0 * index
        stage = [start for start in starts if start.step < step][-1]
        attempt = min(index // per_attempt + 1, num_attempts)
        loss = 1.6 + 1e-4 / rate * 0.2 + 9 * math.exp(-step / 90 * (rate / 1e-3) ** 0.3) + numbers.gauss(0, 0.05)
        row = {"step": step, "train/loss": loss, "train/loss_mean": loss + 0.01, "train/grad_norm": 3 / (1 + step / 30),
               "train/learning_rate": rate * min(step / 100, 1.0),
               "train/tokens": stage.units + (step - stage.step) * stage.units_per_step,
               "perf/tokens_per_second": 874_000 + numbers.gauss(0, 9000), "perf/mfu": 0.52 + numbers.gauss(0, 0.004),
               "perf/step_seconds_median": 0.6, "perf/step_seconds_p95": 0.64, "perf/peak_bytes": 13_958_643_712,
               "perf/device_bytes": 12_884_901_888, "perf/device_utilization": 0.97 + numbers.gauss(0, 0.01),
               "perf/host_bytes": 6_442_450_944 + index * 1_000_000,
               "perf/host_free_bytes": 60_000_000_000 - index * 1_000_000, "perf/cpu_cores": 3.2,
               "perf/time": moment, "perf/attempt": attempt, "train/router_z": 0.1, "train/accuracy": 0.3}  # fmt: skip
        if sources:
            edges = [numbers.gauss(0, 0.01) - 1 + 0.1 * edge for edge in range(17)]
            row["train/router_load"] = {"counts": [1 + edge * (16 - edge) for edge in range(16)], "edges": edges}
            row |= {f"train/grad_norm/layer_{layer}": 10 ** numbers.gauss(-1 - step / 3000, 0.4) for layer in range(24)}
        for place, source in enumerate(sources):
            row |= {f"data/{source}/tokens": step * 524288 * (place + 1) // 10, f"data/{source}/epochs": step / 1000}
        if (index + 1) % 10 == 0:
            row |= {"val/loss": loss + 0.12, "val/accuracy": 0.31, "val/bits_per_byte": loss / 2.9}
            row |= {"perf/eval_seconds": 4.1, "perf/eval_tokens_per_second": 2_560_000 + numbers.gauss(0, 9000)}
            row |= {
                f"val/sample/{number}": f"Once upon a time\nthere was, at step {step}, a <b>fox</b>."
                for number in (0, 1)
            }
        rows.append(row)
        if (index + 1) % 20 == 0:
            events.append(
                {
                    "time": moment + 1,
                    "attempt": attempt,
                    "process": 0,
                    "event": "save",
                    "step": step,
                    "blocked_seconds": 0.2,
                }
            )
            events.append({"time": moment + 4, "attempt": attempt, "process": 0, "event": "commit", "step": step,
                           "seconds_to_durable": 3.0, "bytes": 1_500_000_000, "read_back": True})  # fmt: skip
    if end is not None:
        events.append({"time": now, "attempt": num_attempts, "process": 0, "step": num_rows * 10} | end)
    store.write("events.jsonl", b"".join(map(encode_line, sorted(events, key=lambda each: each["time"]))))
    if rows:
        store.write("metrics.jsonl", b"".join(map(encode_line, rows)))
    seconds = dict.fromkeys(COUNTED_CATEGORIES, 0.0) | {
        TimeCategory.PROCESS_START: 4.0,
        TimeCategory.COMPILE: 14.0,
        TimeCategory.RESTORE: 9.0,
    }
    last = began + (num_attempts - 1) * 6.0 * per_attempt
    seconds[TimeCategory.STEPS] = max(now - last - sum(seconds.values()) - 3.0, 0.0)
    seconds[TimeCategory.DATA_WAIT] = 1.5
    reading = ClockReading(now, num_rows * 10, now, TimeCategory.STEPS, tuple(seconds.values()),
                           None if end is None else end.get("code", 0))  # fmt: skip
    header = {"format": 1, "began": last, "host": "h", "machine": "another", "pid": 1, "created": 1,
              "buckets": [category.value for category in COUNTED_CATEGORIES]}  # fmt: skip
    clock = encode_json(header).replace(b"\n", b" ").ljust(HEADER_BYTES - 1) + b"\n" + encode_slot(1, reading) * 4
    store.write(f"attempts/{num_attempts}.clock", clock)
    store.write(f"logs/{num_attempts}.0.log", b"step 10: loss 2.1\n" * 40)
    return root / name


OUT_OF_MEMORY = {
    "event": "failed",
    "code": 1,
    "reason": "XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes on device "
    "3, at experiments/model/decoder.py line 214",
}


def make_running(root: Path) -> None:
    make_synthetic_run(root, "gpt-small-running", 300, 6000, sources=("web", "code", "books", "papers"))


def make_stalled(root: Path) -> None:
    make_synthetic_run(root, "stalled", 120, 6000, ago_seconds=5000)


def make_failed(root: Path) -> None:
    make_synthetic_run(root, "failed", 80, 6000, ago_seconds=60, end=OUT_OF_MEMORY)


def make_failed_early(root: Path) -> None:
    """Make a run that failed before its first row, and one that diverged at its first row."""
    make_synthetic_run(root, "early/failed", 0, 6000, ago_seconds=60, end=OUT_OF_MEMORY)
    end = OUT_OF_MEMORY | {"reason": "DivergedError: the loss of step 10 is not finite"}
    diverged = LocalStore(make_synthetic_run(root, "early/diverged", 1, 6000, ago_seconds=60, end=end))
    (row,) = map(json.loads, diverged.read("metrics.jsonl").splitlines())
    diverged.write(
        "metrics.jsonl", encode_line(row | {"train/loss": None, "train/loss_mean": None, "train/grad_norm": None})
    )


def make_unlike(root: Path) -> None:
    """Make three runs that differ in dozens of keys, some of which have long values."""
    for index in range(3):
        name = f"unlike/run-{index}"
        end: JsonObject | None = [{"event": "done"}, OUT_OF_MEMORY, None][index]
        place = make_synthetic_run(
            root, name, 40 + 60 * index, 2000, rate=[1e-3, 3e-4, 2e-3][index], seed=index, end=end
        )
        more = {
            f"key_{number}": [index, f"gs://corpus/of-run-{index}/shards-of-text-{number}/*.bin"]
            for number in range(30)
        }
        store = LocalStore(place)
        store.write("spec.yaml", store.read("spec.yaml") + f"  more: {json.dumps(more)}\n".encode())


def make_empty(root: Path) -> None:
    make_synthetic_run(root, "empty", 0, 6000)


def make_one_point(root: Path) -> None:
    make_synthetic_run(root, "one-point", 1, 6000)


def make_many_attempts(root: Path) -> None:
    make_run(LocalStore(root / "five-hundred-attempts"), num_attempts=500, num_rows=6)


def make_ten_runs(root: Path) -> None:
    for index in range(10):
        rate = [1e-4, 2e-4, 3e-4, 5e-4, 8e-4, 1e-3, 1.5e-3, 2e-3, 3e-3, 5e-3][index]
        end = {"event": "done"} if index < 6 else None if index < 9 else OUT_OF_MEMORY
        name = f"gpt-small-learning-rate-{rate:g}"
        make_synthetic_run(root / "sweep", name, 100, 1000, ago_seconds=600 * index, rate=rate, seed=index, end=end)


def make_forks(root: Path) -> None:
    """Make a run, a fork of it, and a fork of that which has no row yet."""
    trunk = make_synthetic_run(root, "forked/trunk", 200, 2000, run_id="a" * 12, end={"event": "done"})
    fork = {"run": str(trunk), "id": "a" * 12, "step": 1000}
    branch = make_synthetic_run(root, "forked/branch", 160, 3000, rate=3e-3, seed=1, run_id="b" * 12, fork=fork)
    make_synthetic_run(
        root, "forked/twig", 130, 2000, rate=2e-4, seed=2, run_id="c" * 12,
        fork={"run": str(branch), "id": "b" * 12, "step": 1300},
    )  # fmt: skip


MIXTURE = ("web", "code", "books")
STAGES: list[JsonObject] = [
    {"from_step": 600, "why": "code and books were too rare for the evaluations that count: see the report of May",
     "set": {"data.mixture": [{"name": name, "source": f"gs://corpus/{name}/*.bin", "weight": weight}
                              for name, weight in zip(MIXTURE, (2.0, 1.5, 0.5), strict=True)]}},
    {"from_tokens": 629_145_600, "set": {"train.global_batch_examples": 512, "optimizer.learning_rate": 1.4e-3}},
    {"from_step": 1900, "why": "anneal", "set": {"schedule": {"name": "linear", "final_learning_rate": 0.0}}},
]  # fmt: skip


def make_stages(root: Path) -> None:
    """Make a run of three stages, two forks of it, one of which has a stage, and a run that was rolled back."""
    trunk = make_synthetic_run(root, "staged/trunk", 200, 2200, run_id="1" * 12, sources=MIXTURE, stages=STAGES)
    fork = {"run": str(trunk), "id": "1" * 12}
    make_synthetic_run(
        root, "staged/anneal", 150, 1600, rate=8e-4, seed=1, run_id="2" * 12, fork=fork | {"step": 1200},
        sources=MIXTURE, stages=[*STAGES[:2], STAGES[2] | {"from_step": 1210}], end={"event": "done"},
    )  # fmt: skip
    make_synthetic_run(root, "staged/hot", 130, 2200, rate=3e-3, seed=2, run_id="3" * 12, fork=fork | {"step": 800})
    rolled = make_synthetic_run(root, "staged/rolled-back", 160, 2200, seed=3, run_id="4" * 12)
    spike = [
        {"step": step, "train/loss": 2 + (step - 900) / 15, "train/tokens": step * 524288}
        for step in range(910, 960, 10)
    ]
    record = {
        "number": 1,
        "begin": 900,
        "batches": 60,
        "first": 912,
        "detected": 950,
        "reason": "loss 5.33 is above 3.1",
    }
    store = LocalStore(rolled)
    store.write("roll_backs/1", encode_json(record | {"rows": spike}))
    event = {"time": time.time() - 400, "attempt": 1, "process": 0, "event": "roll_back", "step": 900} | record
    store.write("events.jsonl", store.read("events.jsonl") + encode_line(event))


def make_suspect_hosts(root: Path) -> None:
    """Make two runs that have lost the same of their four hosts, one of which has a defective device too."""
    ends: list[JsonObject] = [
        {"event": "stuck", "reason": "the job cannot continue: process 2 has died", "lost": [2], "late": []},
        {"event": "device_fault", "devices": [3, 5], "processes": [1], "parameters": ["embed"], "verified": 0},
    ]
    for number, end in enumerate(ends):
        store = LocalStore(make_synthetic_run(root, f"hosts/{number}", 20, 2000, ago_seconds=60, end=end, seed=number))
        rows = [json.loads(line) for line in store.read("events.jsonl").splitlines()]
        rows[0] |= {"engine": "slurm", "machines": [f"{place:016x}" for place in range(4)]}
        rows.append(rows[-1] | {"event": "stuck", "lost": [2], "devices": []})
        store.write("events.jsonl", b"".join(map(encode_line, rows)))


def make_pictures(root: Path) -> None:
    """Make a run whose evaluator returns images and audio of several kinds at each tenth row."""
    place = make_synthetic_run(root, "pictures", 120, 2000)
    store = LocalStore(place)
    numbers = np.random.default_rng(0)
    rows = []
    for row in map(json.loads, store.read("metrics.jsonl").splitlines()):
        step = row["step"]
        if step % 100 == 0:
            noise = numbers.random((28, 28)) * 100 / step
            ramp = np.linspace(0, 1, 640)[None, :, None] ** [[[step / 600, 1.0, 1.5]]]
            tone = np.sin(np.arange(4000) * step / 4000) * np.linspace(1, 0, 4000)
            media = {
                "val/own/digit": Image(np.clip(noise + (np.hypot(*np.mgrid[-14:14, -14:14]) < 9), 0, 1)),
                "val/own/attention_of_every_head_in_the_last_layer": Image(np.repeat(ramp, 200, axis=0)),
                "val/own/tone": Audio(tone, 8000),
            }
            files, _ = encode_media(step, media)
            for file in files.values():
                store.write(file.name, file.content)
            row |= {key: file.reference for key, file in files.items()}
        rows.append(row)
    store.write("metrics.jsonl", b"".join(map(encode_line, rows)))


SCENES: dict[str, Callable[[Path], None]] = {
    scene.__name__.removeprefix("make_"): scene
    for scene in (
        make_running,
        make_stalled,
        make_failed,
        make_failed_early,
        make_unlike,
        make_empty,
        make_one_point,
        make_many_attempts,
        make_ten_runs,
        make_forks,
        make_stages,
        make_pictures,
    )
}
