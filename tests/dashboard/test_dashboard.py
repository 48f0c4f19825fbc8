"""Dashboard server: runs are found below a directory, and read again only after changes."""

import concurrent.futures
import contextlib
import http.client
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runner.cli.app import main
from runner.dashboard import reader as discovery
from runner.dashboard import server
from runner.dashboard.app import DashboardApp, ResponseBody, make_access_policy
from runner.dashboard.reader import find_runs
from runner.dashboard.server import PageData, SharedReader
from runner.distributed.clock import TimeCategory
from runner.history.reader import HistoryReader
from runner.storage import JsonObject, LocalStore, Store, encode_line, jsonl
from runner.storage.bucket import BucketStore
from tests.benchmarks.dashboard import measure
from tests.dashboard.scenes import make_forks, make_suspect_hosts
from tests.dashboard.synthetic_runs import LOST_STEPS, SPEC, START_TIME, encode_lines, make_events, make_rows, make_run
from tests.dashboard.test_report import HOSTILE
from tests.support.memory_bucket import MemoryDriver

KINDS = ("disk", "bucket")


class RunDirectory:
    """A directory or bucket that contains runs."""

    def __init__(self, kind: str, directory: Path, monkeypatch: pytest.MonkeyPatch):
        self.driver = MemoryDriver()
        self.directory = directory if kind == "disk" else None
        monkeypatch.setattr(discovery, "make_store", lambda url: self.get_store(url.removeprefix("mem://b/r/")))

    def get_store(self, path: str) -> Store:
        if self.directory is not None:
            return LocalStore(self.directory / path)
        prefix = f"r/{path}".rstrip("/")
        return BucketStore(f"mem://b/{prefix}", prefix, self.driver)


@pytest.fixture(params=KINDS)
def run_directory(request, tmp_path, monkeypatch):
    return RunDirectory(request.param, tmp_path, monkeypatch)


def read(reader: PageData, name: str = "") -> JsonObject:
    body = reader.read(name)
    assert body is not None
    data: JsonObject = json.loads(body.plain)
    return data


def test_runs_are_found_at_any_depth_but_not_inside_each_other(run_directory):
    paths = ["a", "group/b", "group/deep/er/c", "z"]
    for path in [*paths, "a/inner", "group/b/checkpoints/7"]:
        make_run(run_directory.get_store(path), num_attempts=1, num_rows=2)
    run_directory.get_store("empty").write("notes.txt", b"")
    run_directory.get_store(".hidden/run").write("job.json", b"{}")
    found = find_runs(run_directory.get_store(""))
    assert [run.path for run in found.runs] == paths
    assert found.notes == []
    assert len({run.id for run in found.runs}) == len(paths)
    assert all(run.store.exists("metrics.jsonl") for run in found.runs)
    assert [run.path for run in find_runs(run_directory.get_store("a")).runs] == [""]
    assert find_runs(run_directory.get_store("empty")).runs == []


def test_a_search_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(discovery, "RUNS_MAX", 3)
    monkeypatch.setattr(discovery, "DIRECTORIES_MAX", 6)
    for index in range(9):
        (tmp_path / f"{index}").mkdir()
    (tmp_path / "0" / "loop").symlink_to(tmp_path)
    assert "after 6 directories" in find_runs(LocalStore(tmp_path)).notes[0]
    for index in range(9):
        (tmp_path / f"{index}" / "job.json").write_text("{}")
    found = find_runs(LocalStore(tmp_path))
    assert (len(found.runs), len(found.notes)) == (3, 1)


def test_the_table_and_pages_show_the_state_of_runs(run_directory):
    make_run(run_directory.get_store("a"))
    make_run(run_directory.get_store("b"), num_attempts=1, num_rows=5)
    reader = PageData(run_directory.get_store(""))
    table = read(reader)["table"]
    assert [(line["name"], line["state"], line["steps"]) for line in table] == [
        ("a", "done", "60 / 60"),
        ("b", "done", "5 / 5"),
    ]
    assert [len(line["trend"]) for line in table] == [60, 5]
    (run,) = read(reader, table[1]["id"])["runs"]
    assert run["rows"] == 5
    assert reader.read("0123456789abcdef") is None
    assert reader.read("../a") is None


def test_the_table_has_project_tags_and_the_keys_in_which_runs_differ(tmp_path):
    spec = "name: {0}\nproject: {1}\nlogging: {{wandb_tags: [{0}, 7]}}\nconfig: {{rate: {2}, same: 1, kind: x{0}}}\n"
    for name, project, rate in (("a", "one", 1), ("b", "one", 2), ("c", "[two]", 2)):
        make_run(LocalStore(tmp_path / name), spec=spec.format(name, project, rate))
    make_run(LocalStore(tmp_path / "d"), spec="config: [")
    data = read(PageData(LocalStore(tmp_path)))
    assert data["keys"] == ["config.kind", "config.rate"]
    assert [(line["project"], line["tags"], line["keys"]) for line in data["table"]] == [
        ("one", ["a", "7"], {"config.kind": "xa", "config.rate": "1"}),
        ("one", ["b", "7"], {"config.kind": "xb", "config.rate": "2"}),
        ("['two']", ["c", "7"], {"config.kind": "xc", "config.rate": "2"}),
        ("", [], {}),
    ]
    assert data["next"].endswith(f" --set directory={tmp_path}/first")


def test_the_page_of_hosts_lists_suspects_first(tmp_path, monkeypatch):
    make_suspect_hosts(tmp_path)
    (tmp_path / "broken" / "events.jsonl").mkdir(parents=True)
    (tmp_path / "broken" / "job.json").write_text("{}")
    reads = []
    read_hosts = server.read_hosts
    monkeypatch.setattr(server, "read_hosts", lambda store, run: reads.append(run) or read_hosts(store, run))
    reader = PageData(LocalStore(tmp_path))
    data = read(reader, "hosts")
    name = "tpu-worker-{}.example.internal"
    assert [(host["name"], host["suspect"], host["words"]) for host in data["hosts"]] == [
        (name.format(1), True, "1 x device fault"),
        (name.format(2), True, "2 x lost"),
        (name.format(0), False, ""),
        (name.format(3), False, ""),
    ]
    first = data["hosts"][0]
    assert (first["attempts"], first["exclude"], first["incidents"][0]["run"]) == (
        2,
        [f"--exclude={name.format(1)}"],
        "hosts/1",
    )
    assert "device 3" in first["incidents"][0]["devices"]
    assert (data["num_hosts"], len(data["notes"])) == (4, 1)
    assert "broken" in data["notes"][0]
    assert sorted(reads) == ["broken", "hosts/0", "hosts/1"]
    # Only a run with new events is read again.
    store = LocalStore(tmp_path / "hosts/0")
    store.write("events.jsonl", store.read("events.jsonl") * 2)
    assert read(reader, "hosts")["hosts"][0]["attempts"] == 2
    assert reads[3:] == ["hosts/0"]


def test_many_runs_are_read_for_hosts_over_several_rounds(run_directory, monkeypatch):
    for number in range(3):
        make_run(run_directory.get_store(f"{number}"), num_attempts=1, num_rows=2)
    reader = PageData(run_directory.get_store(""))
    monkeypatch.setattr(server, "_ROUND_SECONDS", -1.0)
    assert read(reader, "hosts")["notes"] == ["3 more runs are being read."]
    monkeypatch.setattr(server, "_ROUND_SECONDS", 5.0)
    data = read(reader, "hosts")
    assert data["notes"] == []
    assert {host["runs"] for host in data["hosts"]} == {3}


@pytest.mark.parametrize("text", HOSTILE[:-1])
def test_a_hostile_host_is_an_ordinary_row(tmp_path, text):
    store = make_run(LocalStore(tmp_path / "run"), num_attempts=1, num_rows=2)
    start = {"time": START_TIME, "attempt": 1, "process": 0, "event": "start", "nodes": [text, "b"], "engine": "slurm"}
    fault = start | {"event": "device_fault", "processes": [0], "devices": [0], "step": 5, "time": time.time()}
    store.write("events.jsonl", encode_line(start) + encode_line(fault))
    body = PageData(LocalStore(tmp_path)).read("hosts")
    assert body is not None
    assert not {b"<", b">", b"&"} & {bytes([byte]) for byte in body.plain}
    first = json.loads(body.plain)["hosts"][0]
    assert (first["suspect"], first["exclude"]) == (True, [])


def test_a_fork_is_drawn_over_ancestors_below_the_root_alone(tmp_path):
    make_forks(tmp_path)
    reader = PageData(LocalStore(tmp_path))
    ids = {line["name"]: line["id"] for line in read(reader)["table"]}
    data = read(reader, ids["forked/twig"])
    assert [(run["label"], run["part"]) for run in data["ancestors"]] == [
        ("forked/branch", 1300),
        ("forked/trunk", 1000),
    ]
    data = read(reader, ",".join(ids.values()))
    assert (data["ancestors"], {run["label"]: run["part"] for run in data["runs"]}) == (
        [],
        {"forked/branch": 1300, "forked/trunk": 1000, "forked/twig": None},
    )
    # The server shows no run outside of its root, whatever a record says.
    (tmp_path / "root").mkdir()
    (tmp_path / "forked/branch").rename(tmp_path / "root/branch")
    reader = PageData(LocalStore(tmp_path / "root"))
    data = read(reader, read(reader)["table"][0]["id"])
    assert (data["ancestors"], data["runs"][0]["fork"]["step"]) == ([], 1000)
    assert "is not drawn" in data["runs"][0]["fork"]["text"]


def test_a_page_is_sent_again_only_after_changes(tmp_path, monkeypatch):
    make_run(LocalStore(tmp_path / "done"))
    make_run(LocalStore(tmp_path / "dead"))
    (tmp_path / "dead" / "events.jsonl").write_bytes(b"".join(encode_lines(make_events(3, 20)))[:-200])
    monkeypatch.setattr(server, "LIVING_SECONDS", 0.0)
    reader = PageData(LocalStore(tmp_path))
    for name in ("", *(line["id"] for line in read(reader)["table"])):
        first = reader.read(name)
        time.sleep(0.02)
        again = reader.read(name)
        assert first is not None
        assert again is not None
        assert first.tag == again.tag


def test_several_runs_are_compared_and_unreadable_ones_reported(tmp_path):
    for name in ("a", "b", "c"):
        make_run(LocalStore(tmp_path / name), num_attempts=1, num_rows=5, spec=f"name: {name}\nrate: {name}\n")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "job.json").write_text("{}")
    reader = PageData(LocalStore(tmp_path))
    ids = [line["id"] for line in read(reader)["table"]]
    data = read(reader, ",".join(ids))
    assert [run["label"] for run in data["runs"]] == ["a", "b", "c"]
    assert data["differences"] == [["rate", ['"a"', '"b"', '"c"']]]
    assert "no run is here" in data["notes"][0]
    assert data["run_ids"] == ",".join(ids)
    assert reader.read(f"{ids[0]},0123456789abcdef") is None
    assert len(read(reader, f"{ids[0]},{ids[0]}")["runs"]) == 1


def test_a_page_is_updated_with_new_rows(run_directory):
    store = make_run(run_directory.get_store("a"), num_attempts=2)
    reader = PageData(run_directory.get_store(""))
    name = read(reader)["table"][0]["id"]
    rows = list(make_rows(4, 20))
    for number in (40, 41, 43, 80, 30):  # the last row is after a resume from an earlier step
        store.write("metrics.jsonl", b"".join(encode_lines(iter(rows[:number]))))
        (run,) = read(reader, name)["runs"]
        assert (run["rows"], run["charts"]["Loss"][0]["step"][-1]) == (number, number)


@pytest.mark.parametrize("text", HOSTILE[:-1])
def test_a_hostile_name_is_an_ordinary_table_row(tmp_path, text):
    name = text.replace("/", "|").replace("\0", "0")
    make_run(LocalStore(tmp_path / name), num_attempts=1, num_rows=2)
    body = PageData(LocalStore(tmp_path)).read("")
    assert body is not None
    assert not {b"<", b">", b"&"} & {bytes([byte]) for byte in body.plain}
    assert body.plain.isascii()
    assert json.loads(body.plain)["table"][0]["name"] == name


def test_an_unreadable_run_is_reported_and_others_are_shown(tmp_path):
    make_run(LocalStore(tmp_path / "good"), num_attempts=1, num_rows=2)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "job.json").write_text("{}")
    reader = PageData(LocalStore(tmp_path))
    bad, good = read(reader)["table"]
    assert "no run is here" in bad["state"]
    assert good["state"] == "done"
    assert "no run is here" in read(reader, bad["id"])["problem"]


def test_a_missing_root_is_reported_and_read_when_it_returns(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "SEARCH_SECONDS", 0.0)
    reader = PageData(LocalStore(tmp_path / "root"))
    assert "No such file" in read(reader)["notes"][0]
    make_run(LocalStore(tmp_path / "root" / "a"), num_attempts=1, num_rows=2)
    assert [line["name"] for line in read(reader)["table"]] == ["a"]


def test_an_unchanged_run_is_not_read_again(tmp_path, monkeypatch):
    times = []
    monkeypatch.setattr(server, "HistoryReader", lambda store: times.append(store) or HistoryReader(store))
    store = make_run(LocalStore(tmp_path / "a"), num_attempts=1, num_rows=2)
    reader = PageData(LocalStore(tmp_path))
    for _ in range(5):
        read(reader)
    assert len(times) == 1
    os.utime(tmp_path / "a" / "events.jsonl", (START_TIME, START_TIME))
    read(reader)
    assert len(times) == 2
    (tmp_path / "a" / "attempts").mkdir()
    read(reader)
    assert len(times) == 3
    assert store.exists("job.json")


def test_a_live_run_is_read_incrementally_for_table_and_page(tmp_path, monkeypatch):
    parsed, parse = [], jsonl.parse_lines
    monkeypatch.setattr(jsonl, "parse_lines", lambda content: parsed.append(content) or parse(content))
    monkeypatch.setattr(server, "LIVING_SECONDS", 0.0)
    make_run(LocalStore(tmp_path / "a"), num_attempts=3, num_rows=20)
    progress = {"time": time.time(), "attempt": 4, "process": 0, "event": "start", "step": None}
    reader, counts = PageData(LocalStore(tmp_path)), []
    for _ in range(3):
        with (tmp_path / "a" / "events.jsonl").open("ab") as file:
            file.write(encode_line(progress))
        (line,) = read(reader)["table"]
        assert read(reader, line["id"])["runs"]
        counts.append(len(parsed))
        parsed.clear()
    assert line["state"] == "running"
    assert counts == [2 * (18 + 1), 2, 2]


def test_a_page_is_read_once_per_interval_for_all_clients():
    times: list[str] = []
    start = threading.Event()

    def count(name: str) -> ResponseBody | None:
        times.append(name)
        return ResponseBody.from_text("text/plain", name) if name != "none" else None

    crowd = SharedReader(count)
    with concurrent.futures.ThreadPoolExecutor(51) as pool:
        asked = [
            pool.submit(lambda name: start.wait() and crowd.get_data(name), name) for name in ["a", "b", "none"] * 17
        ]
        start.set()
        while not all(each.done() for each in asked):
            crowd.read_wanted()
        found = [each.result() for each in asked]
    assert [body and body.plain for body in found] == [b"a", b"b", None] * 17
    crowd.read_wanted()
    later = [crowd.get_data("a") for _ in range(50)]
    assert {body.plain for body in later if body} == {b"a"}
    before = len(times)
    crowd.read_wanted()
    crowd.read_wanted()
    assert times[before:] == ["a"], "not read without clients"


def test_a_slow_reading_is_reported_as_late():
    with pytest.raises(TimeoutError):
        SharedReader(lambda name: None, wait_seconds=0.0).get_data("a")


def test_pages_without_clients_are_evicted(monkeypatch):
    crowd = SharedReader(lambda name: ResponseBody.from_text("text/plain", name), wait_seconds=0.0)
    for name in ("a", "b"):
        with pytest.raises(TimeoutError):
            crowd.get_data(name)
    crowd.read_wanted()
    assert crowd.get_data("a") is not None
    monkeypatch.setattr(server, "KEEP_SECONDS", -1.0)
    crowd.read_wanted()
    assert set(crowd._cache) == {"a"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{}/none"], "no such directory"),
        (["{}", "--token", "short"], "--token needs"),
        (["{}", "--host", "no.such.host.example", "--port", "0"], "cannot be served"),
        (["{}", "--port", "99999999"], "--port 99999999: needs"),
        (["{}", "--port", "-1"], "--port -1: needs"),
        (["{}", "--port", "x"], "--port: "),
        ([], "missing argument 'ROOT'"),
    ],
)
def test_invalid_arguments_give_one_line(tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.setattr("runner.distributed.preemption.StopNotice.install_signal_handlers", lambda self: None)
    assert main(["dashboard", *(word.format(tmp_path) for word in arguments)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.soak
def test_fifty_clients_are_served_while_a_run_trains(tmp_path):
    ratios, crowds = measure(tmp_path, num_clients=50, seconds=60.0, rounds=1)
    print(f"step time with 50 clients over that without: {ratios}")
    for crowd in crowds:
        assert crowd.problems == []
        assert set(crowd.statuses) <= {200, 304}
        assert len(crowd.statuses) > 50


@contextlib.contextmanager
def serve(app: Callable[..., Any]) -> Iterator[int]:
    """Serve an application on real sockets and yield the port."""
    web = server.make_server(app, "127.0.0.1", 0)
    thread = threading.Thread(target=web.run, daemon=True)
    thread.start()
    try:
        yield web.effective_listen[0][1]
    finally:
        # The loop ends when no socket is left.
        web.close()
        thread.join(60)


def answer(environ: dict[str, Any], start: Callable[..., Any]) -> list[bytes]:
    content = b"x" * (1 << 24) if environ["PATH_INFO"] == "/large" else b"ok"
    start("200 OK", [("Content-Length", str(len(content)))])
    return [content]


def send_request(port: int) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", "/")
        return connection.getresponse().read()
    finally:
        connection.close()


def is_closed(client: socket.socket) -> bool:
    """Wait until the server closes the connection, ignoring what it sent."""
    client.settimeout(60)
    with contextlib.suppress(ConnectionError):
        while client.recv(1 << 20):
            pass
    return True


def test_idle_connections_do_not_block_new_ones(monkeypatch):
    monkeypatch.setattr(server, "CONNECTIONS_MAX", 20)
    with serve(answer) as port, contextlib.ExitStack() as stack:
        idle = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(60)]
        assert send_request(port) == b"ok"
        # The oldest connection was closed, the newest is still open.
        assert all(map(is_closed, idle[:40]))
        idle[-1].sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert idle[-1].recv(1000).startswith(b"HTTP/1.0 200")


@pytest.mark.soak
def test_520_idle_connections_do_not_block_new_ones():
    with serve(answer) as port, contextlib.ExitStack() as stack:
        for _ in range(520):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        assert send_request(port) == b"ok"


def send_slowly(client: socket.socket) -> None:
    """Send a request one byte at a time, without finishing it."""
    with contextlib.suppress(OSError):
        client.sendall(b"GET / HTTP/1.1\r\nA: ")
        while True:
            client.sendall(b"x")
            time.sleep(0.05)


def keep_open(client: socket.socket) -> None:
    """Send one complete request and nothing after it."""
    client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")


def read_nothing(client: socket.socket) -> None:
    """Request a large page and read nothing."""
    client.sendall(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n")
    time.sleep(3)


@pytest.mark.daily(2)
@pytest.mark.parametrize("act", [lambda client: None, send_slowly, keep_open, read_nothing])
def test_a_slow_client_is_dropped(monkeypatch, act):
    monkeypatch.setattr(server, "IDLE_SECONDS", 0.5)
    monkeypatch.setattr(server, "RESPONSE_SECONDS", 0.5)
    with serve(answer) as port, socket.create_connection(("127.0.0.1", port)) as client:
        act(client)
        assert is_closed(client)
        assert send_request(port) == b"ok"


UNESCAPED = {r"\\": "\\", r"\"": '"', r"\n": "\n"}


def parse_prometheus(text: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Parse the text format strictly: help and type once before the samples of a name, and no series twice."""
    label = r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\\\|\\"|\\n)*)"'
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    kinds: dict[str, str] = {}
    assert text.endswith("\n")
    for line in text.removesuffix("\n").split("\n"):
        if comment := re.fullmatch(r"# (HELP|TYPE) ([a-zA-Z_:][a-zA-Z0-9_:]*) (.+)", line):
            assert (comment[1] == "HELP") == (comment[2] not in kinds), line
            kinds[comment[2]] = comment[3]
            continue
        sample = re.fullmatch(rf"([a-zA-Z_:][a-zA-Z0-9_:]*)\{{({label}(?:,{label})*)\}} (\S+)", line)
        assert sample, line
        assert kinds[sample[1]] in ("gauge", "counter")
        assert list(kinds)[-1] == sample[1]
        assert (kinds[sample[1]] == "counter") == sample[1].endswith("_total")
        pairs = re.findall(label, sample[2])
        labels = tuple((key, re.sub(r"\\.", lambda match: UNESCAPED[match[0]], value)) for key, value in pairs)
        assert labels not in found.setdefault(sample[1], {}), line
        found[sample[1]][labels] = float(line.rpartition(" ")[2])
    return found


def test_prometheus_metrics_include_each_run(tmp_path):
    names = ["a", 'b "\\" \n {} ü', "c\udcff"]
    for name in names:
        make_run(LocalStore(tmp_path / name), num_attempts=2, num_rows=5, **{"perf/mfu": 0.4})
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "job.json").write_text("{}")
    body = PageData(LocalStore(tmp_path)).read("metrics")
    assert body is not None
    found = parse_prometheus(body.plain.decode())
    key = (("run", "a"),)
    assert found["runner_run_step"][key] == found["runner_run_total_steps"][key] == 10
    assert found["runner_run_validation_loss"][key] == 2.5
    assert found["runner_run_restarts_total"][key] == 1
    assert 0 < found["runner_run_goodput_ratio"][key] < 1
    assert found["runner_run_mfu_ratio"][key] > 0
    assert found["runner_run_tokens_per_second"][key] > 0
    assert 1 < found["runner_run_loss"][key] < 3
    assert found["runner_run_seconds_since_last_row"][key] == pytest.approx(time.time() - START_TIME - 1580, abs=60)
    assert found["runner_run_seconds_since_last_commit"][key] == pytest.approx(time.time() - START_TIME - 1705, abs=60)
    assert found["runner_run_lost_steps"][key] == LOST_STEPS
    seconds = {
        dict(labels)["category"]: value
        for labels, value in found["runner_run_wall_seconds"].items()
        if key[0] in labels
    }
    assert set(seconds) == {category.value for category in TimeCategory}
    assert seconds["steps"] / sum(seconds.values()) == pytest.approx(found["runner_run_goodput_ratio"][key])
    states = {labels[0][1]: labels[1][1] for labels, value in found["runner_run_state"].items() if value == 1}
    assert states == {"a": "done", names[1]: "done", "c\\udcff": "done", "bad": "unreadable"}
    assert all(len(samples) <= 4 * 13 for samples in found.values())


def test_prometheus_metrics_include_the_cost_of_a_run_with_a_price(tmp_path):
    spec = f"{SPEC % 10}topology: {{accelerator: v5e-8, price: {{dollars_per_chip_hour: 2.5}}}}\n"
    make_run(LocalStore(tmp_path), num_attempts=1, num_rows=10, spec=spec)
    body = PageData(LocalStore(tmp_path)).read("metrics")
    assert body is not None
    (dollars,) = parse_prometheus(body.plain.decode())["runner_run_cost_dollars"].values()
    assert dollars == pytest.approx(8 * 2.5 * 706 / 3600)


def test_prometheus_metrics_need_the_token(tmp_path):
    make_run(LocalStore(tmp_path / "a"), num_attempts=1, num_rows=2)
    app = DashboardApp(make_access_policy("0.0.0.0", "a-token-of-some-length"), PageData(LocalStore(tmp_path)).read)
    with serve(app) as port:
        for headers, status in (({}, 401), ({"Authorization": "Bearer a-token-of-some-length"}, 200)):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            connection.request("GET", "/metrics", headers=headers)
            response = connection.getresponse()
            content = response.read()
            connection.close()
            assert (response.status, b"runner_run_step" in content) == (status, status == 200)
    assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
