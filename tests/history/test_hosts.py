"""Memory of hosts: each kind of incident, several runs, damaged ledgers, and what a start says."""

import functools
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from runner.attempts import environment
from runner.cli.app import run_command
from runner.errors import InvalidError, StorageError
from runner.history import hosts as memory
from runner.history.hosts import (
    FAULT_DAYS,
    SUSPECT_DAYS,
    HostRecord,
    fold_hosts,
    merge_hosts,
    name_suspects,
    read_hosts,
)
from runner.storage import JsonObject, LocalStore, Store, encode_line
from runner.storage.bucket import BucketStore
from tests.support.job_process import Job
from tests.support.memory_bucket import MemoryDriver

NOW = 1_800_000_000.0
DAY_SECONDS = 86_400.0
START: JsonObject = {
    "event": "start",
    "hosts": ["pod-0", "pod-1", "pod-2", "pod-3"],
    "nodes": ["a", "b", "c", "d"],
    "machines": ["0a", "0b", "0c", "0d"],
    "gpus": [[f"GPU-0000000{2 * place}", f"GPU-0000000{2 * place + 1}"] for place in range(4)],
    "engine": "slurm",
    "processes": 4,
    "devices": 8,
}


def make_rows(*events: JsonObject, attempt: int = 1, since: float = NOW - 3600, start: JsonObject = START) -> list[Any]:
    """Return the rows of one attempt: its start, and an event each minute."""
    common = {"attempt": attempt, "process": 0, "step": 10}
    return [common | {"time": since + 60 * index} | event for index, event in enumerate((start, *events))]


def write_run(store: Store, *rows: JsonObject) -> Store:
    store.write("job.json", b"{}")
    name = "events.jsonl" if store.root is not None else "events/000001.0.0000.jsonl"
    store.write(name, b"".join(map(encode_line, rows)))
    return store


def list_counts(records: Sequence[HostRecord]) -> dict[str, dict[str, int]]:
    return {record.name: dict(record.counts) for record in records if record.counts}


FAILED = {"event": "failed", "code": 1, "reason": "x"}
STUCK: JsonObject = {"event": "stuck", "reason": "x", "lost": [], "late": []}
# Events of an attempt -> incidents by host.
INCIDENTS: dict[str, tuple[list[JsonObject], dict[str, dict[str, int]]]] = {
    "a device fault": ([{"event": "device_fault", "processes": [1], "devices": [2]}], {"b": {"device_fault": 1}}),
    "different replicas": ([{"event": "corruption", "processes": [3]}] * 4, {"d": {"device_fault": 1}}),
    "one of two devices": (
        [{"event": "device_fault", "processes": [1, 2]}],
        {"b": {"possible_device_fault": 1}, "c": {"possible_device_fault": 1}},
    ),
    "a lost peer": ([STUCK | {"lost": [1]}, STUCK | {"lost": [1], "process": 2}], {"b": {"lost": 1}}),
    "a process that is cut off blames process 0": (
        [STUCK | {"lost": [0], "process": 3}, STUCK | {"lost": [3]}, STUCK | {"lost": [0], "process": 2}],
        {"d": {"lost": 1}},
    ),
    "a dead process 0": ([STUCK | {"lost": [0], "process": 3}] * 2, {"a": {"lost": 1}}),
    "a hang": ([STUCK | {"late": [2]}], {"c": {"hang": 1}}),
    "a hang of all": ([STUCK | {"late": [0, 1, 2, 3]}], {}),
    "a stall without a cause": ([STUCK], {}),
    "a stall of an older runner": ([{"event": "stuck", "reason": "process 1 (b) has died"}], {}),
    "a crash": ([FAILED | {"process": 1}, STUCK | {"lost": [1]}], {"b": {"crash": 1}}),
    "an error of all": ([FAILED | {"process": place} for place in range(4)], {}),
    "an invalid start": ([FAILED | {"process": 1, "code": 2}], {}),
    "stragglers": (
        [{"event": "straggler", "late": late} for late in ([1], [1, 2], [], [1])],
        {"b": {"straggling": 1}, "c": {"straggling": 1}},
    ),
    "a slow disk": ([{"event": "save_failed", "tier": "fast", "process": 3}] * 3, {"d": {"storage": 1}}),
    "a slow bucket": ([{"event": "save_failed", "tier": "durable"}, {"event": "save_failed"}], {}),
    "nothing": ([{"event": "done"}, {"event": "preempt"}, {"event": "roll_back"}], {}),
}


@pytest.mark.parametrize("case", INCIDENTS)
def test_each_incident_is_that_of_its_host(case: str) -> None:
    events, expected = INCIDENTS[case]
    found = fold_hosts(make_rows(*events), "run")
    assert list_counts(found) == expected
    assert {record.name: record.machine for record in found} == {"a": "0a", "b": "0b", "c": "0c", "d": "0d"}
    assert {(record.attempts, record.seconds) for record in found} == {(1, 60.0 * len(events))}


def test_an_incident_says_where_and_which_device() -> None:
    fault = {"event": "device_fault", "processes": [1], "devices": [3], "step": 7}
    (found,) = fold_hosts(make_rows(fault, attempt=4), "group/run")[1].incidents
    assert (found.run, found.attempt, found.step, found.devices) == ("group/run", 4, 7, ("GPU-00000003",))
    # Without an agreement about the numbers of devices only the id is known.
    for change in ({"devices": 16}, {"gpus": None}, {"gpus": [[], [], [], []]}, {"processes": 0}, {"devices": "8"}):
        (found,) = fold_hosts(make_rows(fault, start=START | change), "run")[1].incidents
        assert found.devices == ("device 3",), change


def test_runs_without_machines_are_read_by_host_name() -> None:
    start = {"event": "start", "hosts": ["a", "b"], "processes": 2}
    (first, second) = fold_hosts(make_rows(STUCK | {"lost": [1]}, start=start), "old")
    assert (second.name, second.machine, second.engine, dict(second.counts)) == ("b", "", "", {"lost": 1})
    merged = merge_hosts([[first, second], fold_hosts(make_rows(STUCK | {"lost": [1]}), "new")], NOW)
    assert (merged[0].name, merged[0].machine, merged[0].runs, merged[0].counts["lost"]) == ("b", "0b", 2, 2)
    # Another machine of the same name is another host.
    other = START | {"machines": ["0a", "0f", "0c", "0d"]}
    merged = merge_hosts([[second], *(fold_hosts(make_rows(start=each), "run") for each in (START, other))], NOW)
    assert sorted(record.machine for record in merged if record.name == "b") == ["", "0b", "0f"]


LOST = STUCK | {"lost": [1]}
FAULT = {"event": "device_fault", "processes": [1]}


@pytest.mark.parametrize(
    ("incidents", "is_suspect"),
    [
        ([(LOST, 0)], False),
        ([(LOST, 0), (LOST, 1)], True),
        ([(LOST, SUSPECT_DAYS - 1), (LOST, SUSPECT_DAYS - 1)], True),
        ([(LOST, SUSPECT_DAYS + 1), (LOST, 0)], False),
        ([(FAULT, FAULT_DAYS - 1)], True),
        ([(FAULT, FAULT_DAYS + 1)], False),
        ([(FAULT, 200), *[(LOST, 100)] * 29], True),
    ],
)
def test_two_recent_incidents_or_a_device_fault_make_a_host_suspect(
    incidents: list[tuple[JsonObject, int]], is_suspect: bool
) -> None:
    rows = [
        row
        for number, (event, days) in enumerate(incidents, 1)
        for row in make_rows(event, attempt=number, since=NOW - days * DAY_SECONDS)
    ]
    found = merge_hosts([fold_hosts(rows, "run")], NOW)
    assert [record.name for record in found if record.is_suspect(NOW)] == ["b"] * is_suspect
    assert found[0].name == "b"
    assert sum(found[0].counts.values()) == len(incidents)
    assert len(found[0].incidents) == min(len(incidents), 32)


HOSTILE_ROWS: list[Any] = [
    {},
    {"attempt": 1, "time": NOW},
    {"attempt": "1", "time": NOW, "event": "start"},
    {"attempt": 1, "time": 1e300, "event": "start"},
    {"attempt": 10**30, "time": NOW, "event": "stuck"},
    {"attempt": -1, "time": NOW, "event": "stuck", "lost": [0]},
    *({"event": "start", "attempt": 1, "time": NOW, "nodes": each} for each in (None, "ab", {}, [None, {}, [[]]], [])),
    {"event": "start", "attempt": 1, "time": NOW, "nodes": ["a"], "machines": "x", "engine": [], "gpus": 3},
    *({"event": "stuck", "attempt": 1, "time": NOW, "lost": each} for each in (None, 3, "0", [-1], [10**9], [True])),
    {"event": "straggler", "attempt": 1, "time": NOW, "late": [[], {}, None, 1.0, "1"]},
    {"event": "failed", "attempt": 1, "time": NOW, "process": [0]},
    {"event": ["stuck"], "attempt": 1, "time": NOW},
    {"event": "device_fault", "attempt": 1, "time": NOW, "processes": [0], "devices": [True, None, "x", 10**40]},
]


def test_hostile_events_are_skipped(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    good = make_rows(STUCK | {"lost": [1]}, attempt=3)
    assert list_counts(fold_hosts([*HOSTILE_ROWS, *good, *HOSTILE_ROWS], "run"))["b"] == {"lost": 1}
    evil = "b\x1b[2J; rm -rf /\n<script>"
    start = START | {"nodes": ["a", evil, "c", "d"], "machines": ["0a", evil * 99, "0c", "0d"], "engine": evil}
    write_run(LocalStore(tmp_path), *make_rows(*[FAULT], start=start))
    (tmp_path / "events.jsonl").open("ab").write(b'\xff\xfe\n{"a":\n' + b"[" * 5000 + b"\n")
    assert run_command(["status", str(tmp_path), "--hosts"]) == 0
    output = capsys.readouterr().out
    assert "\x1b[2J" not in output
    assert "--exclude" not in output
    (record, *_) = read_hosts(LocalStore(tmp_path), "run")[1:]
    assert len(record.machine) <= 300
    assert record.list_exclusions() == []


def test_memory_is_bounded_whatever_a_ledger_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_HOSTS_MAX", 20)
    rows = [
        row
        for number in range(1, 200)
        for row in make_rows(*[FAULT] * 3, attempt=number, start=START | {"nodes": [f"n{number}", "b", "c", "d"]})
    ]
    found = fold_hosts(rows, "run")
    assert len(found) == 20
    assert max(record.attempts for record in found) == 199
    assert len(merge_hosts([found, fold_hosts(make_rows(start=START | {"nodes": list("wxyz")}), "run")], NOW)) == 20


@pytest.mark.parametrize(
    ("engine", "exclusions"),
    [
        ("slurm", ["--exclude=b"]),
        ("kubernetes", ["--exclude=b", "kubectl cordon b"]),
        ("tpu-vm", ["a new TPU VM in place of b"]),
        ("other", []),
        ("", []),
    ],
)
def test_the_exclusion_is_that_of_the_engine(engine: str, exclusions: list[str]) -> None:
    assert HostRecord("b", engine=engine).list_exclusions() == exclusions
    assert HostRecord("-b", engine=engine).list_exclusions() == HostRecord("b c", engine=engine).list_exclusions() == []


# The command.


def test_status_lists_the_hosts_of_all_runs_below_a_directory(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    now = time.time()
    write_run(LocalStore(tmp_path / "x"), *make_rows(LOST, since=now - 500))
    write_run(LocalStore(tmp_path / "group/y"), *make_rows(FAILED | {"process": 1, "step": None}, since=now - 300))
    assert run_command(["status", str(tmp_path), "--hosts"]) == 0
    output = capsys.readouterr().out
    assert output.splitlines()[0].startswith("b  suspect ")
    assert "suspect  2 attempts, 2 min 0 s" in output
    assert "1 x lost, 1 x crash" in output
    assert "group/y, attempt 1, before its first step" in output
    assert "\nto avoid b: --exclude=b\n" in output.replace(" \n", "\n").replace("  ", "")
    assert "3 hosts have no incidents" in output
    assert memory.RULE in output
    assert run_command(["status", str(tmp_path), "--hosts", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["root"], found["rule"], found["notes"]) == (str(tmp_path), memory.RULE, [])
    first = found["hosts"][0]
    assert [first[key] for key in ("name", "machine", "engine", "runs", "attempts", "suspect", "exclude")] == [
        *("b", "0b", "slurm", 2, 2, True, ["--exclude=b"])
    ]
    assert [incident["kind"] for incident in first["incidents"]] == ["crash", "lost"]
    # One run alone, also one whose `job.json` is missing.
    for has_owner in (True, False):
        assert run_command(["status", str(tmp_path / "x"), "--hosts", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["hosts"][0]["counts"] == {"lost": 1}, has_owner
        (tmp_path / "x/job.json").unlink(missing_ok=True)
    with pytest.raises(InvalidError, match="--hosts and --watch"):
        run_command(["status", str(tmp_path), "--hosts", "--watch"])


# At a start.


def test_a_start_names_the_hosts_that_were_suspect_beside_it(tmp_path: Path) -> None:
    now, said = time.time(), list[str]()
    write_run(
        LocalStore(tmp_path / "x"), *make_rows(LOST, since=now - 900), *make_rows(LOST, attempt=2, since=now - 600)
    )
    write_run(LocalStore(tmp_path / "own"), *make_rows(FAULT | {"processes": [2]}, since=now - 900))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/events.jsonl").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "x")
    before = sorted(tmp_path.rglob("*"))
    own = LocalStore(tmp_path / "own")
    name_suspects(own, [("a", "0a"), ("b", "0b"), ("c", "0c")], said.append)
    assert said[0].startswith("host b was suspect in other runs: 2 x lost; last in x, ")
    assert said[1:] == [f"python -m runner status {tmp_path} --hosts lists all hosts"]
    assert sorted(tmp_path.rglob("*")) == before
    for hosts, is_named in (([("b", "")], True), ([("b", "0f")], False), ([("a", "0a")], False), ([], False)):
        said.clear()
        name_suspects(own, hosts, said.append)
        assert bool(said) == is_named, hosts


def test_a_start_reads_a_bounded_number_of_siblings_and_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, opened = time.time(), []
    for number in range(6):
        store = write_run(LocalStore(tmp_path / f"{number}"), *make_rows(FAULT, since=now - 900))
        assert store.root is not None
        os.utime(store.root / "events.jsonl", (number, number))
    monkeypatch.setattr(memory, "_SIBLINGS_MAX", 3)
    read = memory._read_newest_events
    monkeypatch.setattr(memory, "_read_newest_events", lambda store: opened.append(store.root.name) or read(store))
    said = list[str]()
    name_suspects(LocalStore(tmp_path / "own"), [("b", "0b")], said.append)
    assert opened == ["3", "4", "5"]
    assert "3 x device fault" in said[0]
    monkeypatch.setattr(memory, "_EVENTS_BYTES_MAX", 100)
    said.clear()
    name_suspects(LocalStore(tmp_path / "own"), [("b", "0b")], said.append)
    assert said == []


def test_siblings_in_a_bucket_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, now, said = MemoryDriver(), time.time(), list[str]()

    def open_bucket(url: str) -> Store:
        return BucketStore(url, url.removeprefix("mem://b/"), driver)

    monkeypatch.setattr(memory, "make_store", open_bucket)
    write_run(open_bucket("mem://b/runs/x"), *make_rows(FAULT, since=now - 900))
    own = write_run(open_bucket("mem://b/runs/own"), *make_rows(FAULT | {"processes": [2]}, since=now - 900))
    calls: list[tuple[str, str]] = []
    # The other processes of large attempts take nothing from what process 0 has recorded.
    for process in range(1, 80):
        open_bucket("mem://b/runs/x").write(f"events/000001.{process}.0000.jsonl", b"{}\n")
    driver.before = lambda verb, key: calls.append((verb, key))
    name_suspects(own, [("b", "0b"), ("c", "0c")], said.append)
    assert "host b was suspect in other runs: 1 x device fault" in said[0]
    assert len(said) == 2
    assert {verb for verb, _ in calls} == {"get", "list"}
    assert not any("own" in key for _, key in calls)
    assert len(calls) == 66


@pytest.mark.parametrize(
    "error", [StorageError("down"), PermissionError("no"), InvalidError("no bucket"), ValueError()]
)
@pytest.mark.filterwarnings("error")
def test_siblings_that_cannot_be_read_say_nothing(
    error: Exception, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, machines = LocalStore(tmp_path / "gone/own"), {"nodes": ["a"], "machines": [""]}
    memory.start_naming_suspects(store, machines).join()

    def fail(store: Store) -> Any:
        raise error

    monkeypatch.setattr(memory, "_list_siblings", fail)
    memory.start_naming_suspects(store, machines).join()
    assert capsys.readouterr() == ("", "")


# Real runs.


def test_the_machine_is_recorded_without_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, uuid in (("0000:17:00.0", "aaaaaaaa"), ("0000:03:00.0", "bbbbbbbb")):
        (tmp_path / "gpus" / name).mkdir(parents=True)
        text = f"Model: \t\t NVIDIA H100\nGPU UUID: \t GPU-{uuid}-1111-2222-3333-444444444444\n"
        (tmp_path / "gpus" / name / "information").write_text(text)
    (tmp_path / "machine-id").write_text("5f0e1d2c\n")
    monkeypatch.setattr(environment, "_GPU_FILES", tmp_path / "gpus")
    monkeypatch.setattr(environment, "_MACHINE_ID", tmp_path / "machine-id")
    monkeypatch.setenv("RUNNER_NODE", "node-7")
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    found = environment.describe_machine()
    assert found["node"] == "node-7"
    assert found["gpus"] == ["GPU-bbbbbbbb", "GPU-aaaaaaaa"]
    assert len(found["machine"]) == 16
    assert "5f0e1d2c" not in found["machine"]
    (tmp_path / "machine-id").unlink()
    assert environment.describe_machine()["machine"] == ""
    other = found | {"gpus": [], "node": "node-8"}
    recorded = environment.collect_machines([found, other], {})
    assert recorded == {
        "nodes": ["node-7", "node-8"],
        "machines": [found["machine"]] * 2,
        "gpus": [found["gpus"], []],
    }
    assert "gpus" not in environment.collect_machines([other], {})


@pytest.mark.parametrize(
    ("variables", "engine"),
    [
        ({"SLURM_JOB_ID": "7"}, "slurm"),
        ({"RUNNER_ENGINE": "kubernetes"}, "kubernetes"),
        ({"RUNNER_ENGINE": "tpu-vm", "SLURM_JOB_ID": ""}, "tpu-vm"),
        ({"KUBERNETES_SERVICE_HOST": "api"}, None),  # the name of the node is unknown
        ({}, None),
    ],
)
def test_the_engine_is_known_by_its_variables(variables: dict[str, str], engine: str | None) -> None:
    assert environment.collect_machines([], variables).get("engine") == engine


COUNTER = ("config.total_steps=4000", "config.width=8", "checkpoint.every_steps=10", "config.step_seconds=0.02")


def test_another_run_names_the_host_of_a_killed_process(tmp_path: Path) -> None:
    spec = str(Path(__file__).parents[2] / "specs" / "counter.yaml")
    nodes = {place: {"RUNNER_NODE": name} for place, name in enumerate("ab")}
    job = Job(spec, tmp_path / "first", COUNTER)
    for _ in range(2):
        first, other = job.start_processes(2, nodes)
        first.wait_until(functools.partial(first.events, "commit"), "a save")
        other.kill()
        first.expect(76)
    assert job.events("stuck")[-1]["lost"] == [1]
    second = Job(spec, tmp_path / "second", (*COUNTER, "config.total_steps=20"))
    for attempt in second.start_processes(2, nodes):
        attempt.expect(0)
        said = "host b was suspect in other runs: 2 x lost; last in first, " in attempt.output
        assert said == ("[0]" in attempt.output), attempt.output
