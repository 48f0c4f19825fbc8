"""Hostile values in every file of a run: each read-only command still works, and other runs are shown unchanged."""

import base64
import contextlib
import json
import os
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runner.attempts.clock_file import HEADER_BYTES, encode_slot
from runner.attempts.events import EVENTS
from runner.checkpoint.manifest import Manifest, seal
from runner.cli.app import run_command
from runner.dashboard import report, server
from runner.dashboard.reader import RunReader, find_runs
from runner.dashboard.report import render_report
from runner.dashboard.server import PageData
from runner.distributed.clock import COUNTED_CATEGORIES, ClockReading, TimeCategory
from runner.errors import RunnerError
from runner.metrics.media import Image, encode_media
from runner.storage import ConfinedStore, JsonObject, LocalStore, WrongKindError, encode_json
from tests.dashboard.synthetic_runs import START_TIME, make_events, make_rows, make_run
from tests.support.memory_bucket import make_memory_bucket

HUGE = "9" * 400  # an integer too large for a float
# JSON texts that Python's parser accepts, although some are invalid JSON.
VALUES = {
    "beyond float64": "1e400",
    "below float64": "-1e400",
    "huge integer": HUGE,
    "huge negative integer": f"-{HUGE}",
    "integer without end": "9" * 5000,
    "beyond 64 bits": str(1 << 64),
    "beyond 62 bits": str(1 << 62),
    "large float": "1e308",
    "tiny": "5e-324",
    "NaN": "NaN",
    "infinity": "Infinity",
    "negative infinity": "-Infinity",
    "negative": "-1",
    "zero": "0",
    "fraction": "1.5",
    "text": '"abc"',
    "no text": '""',
    "lone surrogate": '"\\ud800\\udfff"',
    "controls": '"\\u0000\\u001b[31m\\u202e"',
    "yes": "true",
    "null": "null",
    "list": "[1, [2]]",
    "empty list": "[]",
    "object": '{"a": {"b": null}}',
    "nested": "[" * 500 + "]" * 500,
    "nested deeply": "[" * 200_000 + "]" * 200_000,
}
# Damages of a line or file: functions of its content.
DAMAGES = {
    "no UTF-8": lambda content: content[:5] + b"\xff\xfe\xc3" + content[5:],
    "a byte-order mark": lambda content: b"\xef\xbb\xbf" + content,
    "UTF-16": lambda content: content.decode().encode("utf-16"),
    "zeros": lambda content: b"\0" * len(content),
    "every key twice": lambda content: content.strip()[:-1] + b", " + content.strip()[1:],
    "torn": lambda content: content[: len(content) // 2],
    "a list": lambda content: b"[1]",
    "nothing": lambda content: b"",
}


def pack_clock(header: JsonObject, reading: ClockReading) -> bytes:
    return json.dumps(header).encode().ljust(HEADER_BYTES - 1) + b"\n" + encode_slot(1, reading) * 4


READING = ClockReading(
    START_TIME + 2700, 60, START_TIME + 2690, TimeCategory.SHUTDOWN, (1.0,) * len(COUNTED_CATEGORIES), 0
)
HEADER: JsonObject = {
    "format": 1, "began": START_TIME + 2000, "host": "host", "machine": "m", "pid": 1, "created": 1,
    "buckets": [category.value for category in COUNTED_CATEGORIES],
}  # fmt: skip
MANIFEST = Manifest("20", 1, START_TIME, 20, "0", {"seed": 0}, "arrays", files={"a": [1, "00000000"]}, fingerprint="f")
EXAMPLES = (20, 1.0, True, "x", {"a": 1}, ["x"])
OTHER_EVENTS: tuple[JsonObject, ...] = (
    {"event": "fork", "step": 20, "run": "x", "id": "1", "fingerprint": "f", "changes": {"seed": [0, 1]}},
    {"event": "evaluate", "step": 20, "figures": {"val/loss": 2.5}},
    {"event": "straggler", "step": 20, "late": [0], "after_seconds": [1.0]},
    {"event": "failed", "step": 20, "code": 1, "reason": "x"},
    {"event": "fallback", "step": 20, "rejected": 7, "reason": "x"},
    {"event": "corruption", "step": 20, "reason": "x"},
    {"event": "changed", "step": 20, "changes": ["x"]},
    {"event": "save", "step": 20, "blocked_seconds": 1.0, "clock": {"steps": 1.0}},
)
OTHER_EVENTS += tuple(
    {"event": each.name, "step": 20}
    | {key.name: next((value for value in EXAMPLES if isinstance(value, key.type)), None) for key in each.details}
    for each in EVENTS
    if each.name not in {event["event"] for event in OTHER_EVENTS}
)
# Records of each file, in which each value is replaced in turn.
RECORDS: dict[str, list[JsonObject]] = {
    "job.json": [{"id": "0" * 12, "name": "life", "time": START_TIME, "identity": {"seed": 0}, "format": 1}],
    "result.json": [{
        "step": 60, "fingerprint": "f", "tokens": 1, "train_loss": 1.0, "val_loss": 1.0, "stopped_by": "hook",
        "stopped_because": "x", "stopped_rule": 1, "best_step": 1, "best_value": 1.0,
    }],
    "events.jsonl": [
        *list(make_events(1, 20)),
        *({"time": START_TIME + 900, "attempt": 1, "process": 0} | each for each in OTHER_EVENTS),
    ],
    "metrics.jsonl": [list(make_rows(1, 20))[-1] | {
        "step": 61, "train/x": 1.0, "val/h": {"counts": [1], "edges": [0.0, 1.0]}, "data/web/tokens": 5,
        "val/picture": {"image": "media/00000061/val~picture.png", "width": 1, "height": 1},
        "val/tone": {"audio": "media/00000061/val~tone.wav", "seconds": 1.0, "sample_rate": 8000},
    }],
    "roll_backs/1": [{"number": 1, "begin": 20, "batches": 2, "rows": [{"step": 21, "train/loss": 3.0}]}],
    "attempts/3": [{"time": START_TIME + 2000}],
    "attempts/3.clock": [HEADER],
    "checkpoints/20/manifest.json": [MANIFEST.to_json()],
    "spec.yaml": [{"name": "life", "config": {"train": {"total_steps": 60}}, "topology": {"mesh": {"data": 1}}}],
}  # fmt: skip


PNG = encode_media(61, {"val/picture": Image([[0.5]])})[0]["val/picture"].content
PICTURE = "media/00000061/val~picture.png"


def iterate_paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in a JSON tree."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from iterate_paths(inner, (*path, key))


def encode_with(record: JsonObject, path: tuple[Any, ...], token: str) -> bytes:
    changed = json.loads(json.dumps(record))
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = "@@"
    return json.dumps(changed).replace('"@@"', token).encode()


def write_hostile(directory: Path, name: str, content: bytes) -> None:
    """Replace a file by hostile content; in a log, add it as lines among the others."""
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if name.endswith(".jsonl"):
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join([*lines[:2], content + b"\n", *lines[2:], content + b"\n"]))
    elif name.endswith(".clock"):
        path.write_bytes(content.ljust(HEADER_BYTES - 1)[: HEADER_BYTES - 1] + b"\n" + encode_slot(1, READING) * 4)
    elif name.endswith("manifest.json"):
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(record := json.loads(content), dict):
                content = seal(record)  # a manifest with a matching digest
        path.write_bytes(content)
    else:
        path.write_bytes(content)


def make_runs(base: Path) -> None:
    """Make a run to damage, and a good one beside it."""
    for name in ("bad", "good"):
        store = make_run(LocalStore(base / name))
        store.write("attempts/3", encode_json({"time": START_TIME + 2000}))
        store.write("attempts/3.clock", pack_clock(HEADER, READING))
        store.write("checkpoints/20/manifest.json", MANIFEST.encode())
        store.write("roll_backs/1", encode_json(RECORDS["roll_backs/1"][0]))
        store.write("result.json", encode_json(RECORDS["result.json"][0]))
        store.write("logs/3.0.log", b"log\n")
        store.write(PICTURE, PNG)
        row = list(make_rows(3, 20))[-1] | {"step": 61, "val/picture": {"image": PICTURE, "width": 1, "height": 1}}
        store.write("metrics.jsonl", store.read("metrics.jsonl") + json.dumps(row).encode() + b"\n")


def read_page(pages: PageData, name: str) -> str:
    body = pages.read(name)
    assert body is not None
    return body.plain.decode()


@contextlib.contextmanager
def allow_one_line_error() -> Iterator[None]:
    """Allow an error of the command itself, such as a missing run, if it is one line of bounded length."""
    try:
        yield
    except RunnerError as error:
        found = error.exit_code, str(error)
    else:
        return
    assert found[0] in (2, 76)
    assert "\n" not in found[1]
    assert len(found[1]) < 2000


def run_readers(base: Path) -> None:
    """Run every read-only command on the damaged run; exceptions other than its own errors fail the test."""
    bad = base / "bad"
    for words in (["status"], ["status", "--json"], ["metrics"], ["metrics", "--csv"], ["checkpoints"], ["lineage"]):
        with allow_one_line_error():
            # A manifest of a newer format is no damage.
            assert run_command([words[0], str(bad), *words[1:]]) in ((0, 1, 2) if words == ["checkpoints"] else (0, 1))
    with allow_one_line_error():
        assert run_command(["lineage", str(base)]) in (0, 1)
    with allow_one_line_error():
        assert len(render_report([LocalStore(bad), LocalStore(base / "good")])) < 1 << 20
    pages = PageData(LocalStore(base))
    lines = {line["name"]: line for line in json.loads(read_page(pages, ""))["table"]}
    assert lines["good"]["state"].startswith("done")
    assert set(lines) == {"bad", "good"}
    for line in lines.values():
        page = read_page(pages, line["id"])
        assert len(page) < 1 << 20
        is_shown = "runs" in json.loads(page)
        assert is_shown or line["name"] == "bad"


@pytest.fixture(autouse=True)
def stub_library(monkeypatch):
    monkeypatch.setattr(report, "read_plotly", lambda: "globalThis.Plotly = {};")


def damage_and_read(base: Path, cases: Iterable[tuple[str, str, bytes]]) -> None:
    """Damage a run with each case in turn, and report the commands that failed."""
    problems = []
    make_runs(base)
    for name, case, content in cases:
        path = base / "bad" / name
        before = path.read_bytes()
        write_hostile(base / "bad", name, content)
        try:
            run_readers(base)
        except Exception as error:  # noqa: BLE001 - whatever a reader lets out is what this test looks for
            place = traceback.extract_tb(error.__traceback__)[-1]
            problems.append(f"{name}: {case}: {type(error).__name__}: {error} ({place.filename}:{place.lineno})"[-300:])
        path.write_bytes(before)
    assert not problems, "\n".join(problems)


def iterate_cases(name: str) -> Iterator[tuple[str, str, bytes]]:
    """Yield each value at each path of a file; in a log all paths at once, because lines are independent."""
    records = RECORDS[name]
    for value, token in VALUES.items():
        lines = [(f"{'.'.join(map(str, path))} is {value}", encode_with(record, path, token))
                 for record in records for path in iterate_paths(record)]  # fmt: skip
        if name.endswith(".jsonl"):
            yield name, f"everything is {value}", b"\n".join(content for _, content in lines)
        else:
            yield from ((name, case, content) for case, content in lines)
    for damage, act in DAMAGES.items():
        yield name, damage, b"\n".join(act(json.dumps(record).encode()) for record in records)


def pick_cases(name: str) -> Iterator[tuple[str, str, bytes]]:
    """Yield about five cases of a file, with different values and paths."""
    cases = list(iterate_cases(name))
    return iter(cases[3 :: max(len(cases) // 5, 1) | 1])


@pytest.mark.daily(4)
@pytest.mark.parametrize("choose", [pick_cases, pytest.param(iterate_cases, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", RECORDS)
def test_no_value_in_any_file_breaks_a_reader(tmp_path, capsys, name, choose):
    damage_and_read(tmp_path / "runs", choose(name))


def test_an_invalid_line_is_skipped_and_counted(tmp_path):
    store = make_run(LocalStore(tmp_path / "a"), num_attempts=1, num_rows=4)
    for name in ("events.jsonl", "metrics.jsonl"):
        long = b'{"step": 3, "x": "' + b"x" * (2 << 20) + b'"}'
        write_hostile(
            tmp_path / "a", name, b"\n".join([b'{"step": 2, "time": NaN', b"\xff", b'{"step": 1e400}', b"", long])
        )
    assert store.root is not None
    pages = PageData(LocalStore(tmp_path))
    (line,) = json.loads(read_page(pages, ""))["table"]
    (run,) = json.loads(read_page(pages, line["id"]))["runs"]
    assert run["rows"] == 4
    assert {text.partition(":")[0].partition(" are")[0] for text in run["warnings"]} == {
        "8 lines of events.jsonl", "8 lines of metrics.jsonl",
    }  # fmt: skip


def test_an_invalid_line_in_a_bucket_is_skipped_and_counted():
    store = make_run(make_memory_bucket(), num_attempts=1, num_rows=4)
    for name in ("metrics.jsonl", "events/000001.0.0000.jsonl"):
        store.write(name, store.read(name) + b'\xff\n{"step": true}\n[]\n')
    warnings = RunReader(store, "a").read()
    assert [note.partition(" are")[0] for note in warnings.notes] == ["3 lines of metrics.jsonl"]
    assert [note.partition(":")[0] for note in warnings.history.unread] == ["3 lines of events.jsonl"]


def test_an_exception_in_reading_one_run_is_one_table_row(tmp_path, monkeypatch):
    make_runs(tmp_path)

    def build(title, *more, original=server.build_view):
        return 1 // 0 if title == "bad" else original(title, *more)

    monkeypatch.setattr(server, "build_view", build)
    monkeypatch.setattr(server, "_build_line", lambda run, history, original=server._build_line: (
        1 // 0 if run.path == "bad" else original(run, history)))  # fmt: skip
    pages = PageData(LocalStore(tmp_path))
    bad, good = json.loads(read_page(pages, ""))["table"]
    assert "a bug: ZeroDivisionError" in bad["state"]
    assert good["state"].startswith("done")
    assert "a bug: ZeroDivisionError" in json.loads(read_page(pages, bad["id"]))["problem"]
    assert json.loads(read_page(pages, good["id"]))["runs"]


@pytest.mark.soak
def test_a_line_of_a_hundred_megabytes_is_skipped(tmp_path, capsys):
    for name in ("events.jsonl", "metrics.jsonl", "spec.yaml", "job.json", "result.json", "attempts/3"):
        make_runs(tmp_path / name)
        write_hostile(tmp_path / name / "bad", name, b'{"step": 61, "x": "' + b"x" * 100_000_000 + b'"}')
        run_readers(tmp_path / name)


SECRET = "the-servers-own-secret"


def outside_file(tmp_path: Path) -> Path:
    """Return a file outside of the root that the server's user can read."""
    path = tmp_path / "elsewhere" / "secret"
    path.parent.mkdir(exist_ok=True)
    line = {
        "time": START_TIME,
        "attempt": 1,
        "event": "failed",
        "reason": SECRET,
        "step": 9,
        "train/loss": 1.0,
        SECRET: 1.0,
    }
    path.write_text(json.dumps(line | {"name": SECRET, "id": SECRET, "identity": {}, "fingerprint": SECRET}) + "\n")
    return path


def replace_by_link(path: Path, secret: Path) -> None:
    path.symlink_to(secret)


def replace_parent_by_link(path: Path, secret: Path) -> None:
    """Replace the directory of the file by a link."""
    inner = secret.parent / path.name
    inner.write_bytes(secret.read_bytes())
    parent = path.parent
    parent.rename(parent.with_name("moved"))
    parent.symlink_to(secret.parent)


def replace_by_pipe(path: Path, secret: Path) -> None:
    os.mkfifo(path)


def replace_by_directory(path: Path, secret: Path) -> None:
    path.mkdir()


def replace_by_device(path: Path, secret: Path) -> None:
    path.symlink_to("/dev/zero")


REPLACEMENTS = (replace_by_link, replace_parent_by_link, replace_by_pipe, replace_by_directory, replace_by_device)
# Daily a link and a pipe at each place, and the others at these.
DAILY_PLACES = ("metrics.jsonl", "logs/4.0.log")


@pytest.mark.daily(10)
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(
            name,
            kind,
            marks=() if kind in (replace_by_link, replace_by_pipe) or name in DAILY_PLACES else pytest.mark.soak,
        )
        for name in (*RECORDS, "logs/4.0.log")
        for kind in REPLACEMENTS
    ],
)
def test_no_page_shows_outside_files_or_blocks_on_a_pipe(tmp_path, name, kind):
    make_runs(tmp_path / "runs")
    path = tmp_path / "runs" / "bad" / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    kind(path, outside_file(tmp_path))
    pages = PageData(LocalStore(tmp_path / "runs"))
    lines = json.loads(read_page(pages, ""))["table"]
    shown = [read_page(pages, ""), *(read_page(pages, line["id"]) for line in lines)]
    # The directory named for a report may itself be a link.
    if not (tmp_path / "runs" / "bad").is_symlink():
        shown.append(render_report([LocalStore(tmp_path / "runs" / "bad")]))
    assert [line["state"] for line in lines if line["name"] == "good"] == ["done: stopped by hook: x"]
    assert not [page for page in shown if SECRET in page]


@pytest.mark.parametrize("kind", [None, *REPLACEMENTS])
def test_no_image_is_read_from_elsewhere(tmp_path, kind):
    make_runs(tmp_path / "runs")
    if kind is not None:
        path = tmp_path / "runs" / "bad" / PICTURE
        path.unlink()
        outside = tmp_path / "elsewhere" / "secret.png"
        outside.parent.mkdir()
        outside.write_bytes(PNG)
        kind(path, outside)
    pages = PageData(LocalStore(tmp_path / "runs"))
    bad, _ = sorted(json.loads(read_page(pages, ""))["table"], key=lambda line: line["name"])
    assert pages.read_media(bad["id"], PICTURE) is None, "no page of the run has been read"
    read_page(pages, bad["id"])
    assert pages.read_media(bad["id"], PICTURE) == (None if kind else PNG)
    # A file that no row refers to is not served, even if it is an image.
    (tmp_path / "runs" / "bad" / "other.png").write_bytes(PNG)
    for name in ("other.png", "job.json", f"../good/{PICTURE}", "media/../other.png", ""):
        assert pages.read_media(bad["id"], name) is None
    encoded = base64.b64encode(PNG).decode()
    assert (encoded in render_report([LocalStore(tmp_path / "runs" / "bad")])) == (kind is None)


def test_a_directory_replaced_by_a_link_is_not_followed(tmp_path):
    make_runs(tmp_path / "runs")
    found = find_runs(ConfinedStore(tmp_path / "runs"))
    (tmp_path / "runs" / "bad").rename(tmp_path / "moved")
    (tmp_path / "runs" / "bad").symlink_to(tmp_path / "moved")
    for name, word in (
        ("spec.yaml", "symbolic link"),
        ("../good/spec.yaml", "symbolic link"),
        ("/etc/passwd", "outside"),
    ):
        with pytest.raises(WrongKindError, match=word):
            found.runs[0].store.read(name)
    with pytest.raises(WrongKindError, match="outside"):
        found.runs[1].store.read("../good/spec.yaml")
    assert found.runs[1].store.read("spec.yaml")


def test_a_root_can_be_a_link(tmp_path):
    make_runs(tmp_path / "runs")
    (tmp_path / "link").symlink_to(tmp_path / "runs")
    assert len(json.loads(read_page(PageData(LocalStore(tmp_path / "link")), ""))["table"]) == 2
    (tmp_path / "run").symlink_to(tmp_path / "runs" / "good")
    assert '"rows":61' in render_report([LocalStore(tmp_path / "run")])


def test_both_stores_of_a_directory_list_the_same_files(tmp_path):
    make_runs(tmp_path)
    plain, confined = LocalStore(tmp_path), ConfinedStore(tmp_path)
    inner = ConfinedStore(tmp_path, "good")
    assert confined.list_files("") == plain.list_files("")
    assert confined.list_files("good/attempts/3") == plain.list_files("good/attempts/3")
    assert inner.list_sizes("checkpoints") == plain.list_sizes("good/checkpoints")
    assert sorted(inner.list_names("")) == sorted(plain.list_names("good"))
    assert (inner.list_names("none"), inner.list_files("none/"), inner.exists("none")) == ([], {}, False)
    assert inner.exists("spec.yaml")
    assert inner.exists("checkpoints/20")
    with pytest.raises(FileNotFoundError):
        inner.read("none")
