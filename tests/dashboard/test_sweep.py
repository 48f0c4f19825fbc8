"""Sweeps as one thing: `status`, the report and the dashboard show their runs in order, whatever their record says."""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runner.cli.app import main, run_command
from runner.dashboard.report import render_report
from runner.dashboard.server import PageData
from runner.dashboard.sweep import build_sweep_view
from runner.errors import InvalidError
from runner.history.sweep import SWEEP, Sweep, SweepReader, SweepRow, SweepRun, compare_runs, shorten_keys
from runner.storage import JsonObject, LocalStore, encode_json
from tests.dashboard.sweeps import DIVERGED, make_sweep, write_record, write_sweep_run
from tests.dashboard.synthetic_runs import make_run
from tests.dashboard.test_hostile_files import VALUES
from tests.dashboard.test_report import HOSTILE
from tests.survival.test_damage_table import files_of

RATE, SEED = "config.optimizer.learning_rate", "seed"


def make_record(*runs: dict[str, Any], **more: Any) -> Sweep:
    """Return a sweep of runs with these values."""
    named = tuple(SweepRun(f"{index:03}", values) for index, values in enumerate(runs))
    return Sweep("s", "s.yaml", "0", "val/loss", **{"is_maximised": False, "rule": {}, "runs": named} | more)


def make_rows(*rows: tuple[str, int, float | None], values: list[dict[str, Any]] | None = None) -> list[SweepRow]:
    """Return rows of state, step and metric."""
    return [
        SweepRow(f"{index:03}", (values or [{}] * len(rows))[index], state, None, step, 100, metric, step)
        for index, (state, step, metric) in enumerate(rows)
    ]


@pytest.mark.parametrize(
    ("rows", "order", "best"),
    [
        ([("done", 100, 2.0), ("done", 100, 1.5), ("running", 60, 1.0)], "001 000 002", "001"),
        ([("stopped", 50, 1.0), ("stopped", 25, 0.5), ("done", 100, 3.0)], "002 000 001", "002"),
        # Without a finished run none is the best while others go on, and then the one that went furthest.
        ([("stopped", 50, 1.0), ("running", 60, 2.0)], "001 000", None),
        ([("stopped", 50, 1.0), ("stopped", 60, 2.0), ("failed", 60, 1.9)], "002 001 000", "002"),
        ([("diverged", 90, 1.0), ("done", 100, None), ("done", 100, 4.0)], "002 000 001", "002"),
        ([("not started", 0, None), ("diverged", 9, 9.0)], "000 001", None),
        ([], "", None),
    ],
)
@pytest.mark.parametrize("is_maximised", [False, True])
def test_runs_are_ranked_by_the_metric_at_the_end(rows, order, best, is_maximised):
    sign = -1 if is_maximised else 1
    flipped = [(state, step, None if metric is None else sign * metric) for state, step, metric in rows]
    status = compare_runs(make_record(is_maximised=is_maximised), make_rows(*flipped))
    assert (" ".join(row.name for row in status.rows), status.best) == (order, best)


def test_settings_are_compared_by_the_mean_over_their_seeds():
    values = [{RATE: rate, SEED: seed} for rate in (1e-3, 1e-2, 1e-1) for seed in (0, 1)]
    rows = make_rows(
        ("done", 100, 2.0), ("done", 100, 2.2), ("done", 100, 1.0), ("done", 100, 2.8), ("done", 100, 0.5),
        ("running", 50, 0.1), values=values,
    )  # fmt: skip
    status = compare_runs(make_record(*values), rows)
    found = [(each.values[RATE], each.count, each.mean, each.deviation) for each in status.settings]
    deviation = pytest.approx(0.02**0.5), pytest.approx(1.62**0.5)
    assert found == [(1e-2, 2, 1.9, deviation[1]), (1e-3, 2, pytest.approx(2.1), deviation[0]), (1e-1, 1, 0.5, None)]
    # The best single seed is that of a setting which is not the best.
    assert status.best is None
    assert status.best_setting is status.settings[0]
    # A seed that is drawn like any other key makes no settings.
    lone = compare_runs(make_record(*values[::2]), rows[:1])
    assert (lone.settings, lone.best) == ((), "000")


def test_the_time_left_counts_runs_that_have_not_started():
    rows = make_rows(("running", 50, 2.0), ("running", 50, 2.0), ("done", 100, 2.0), *[("not started", 0, None)] * 3)
    timed = [
        dataclasses.replace(row, seconds=100.0, left_seconds=100.0 if row.state == "running" else None) for row in rows
    ]
    assert compare_runs(make_record(), timed).left_seconds == pytest.approx((200 + 3 * (100 + 200 + 200) / 3) / 2)
    assert compare_runs(make_record(), timed[2:]).left_seconds is None


@pytest.mark.parametrize(
    ("keys", "short"),
    [
        (["config.optimizer.learning_rate", "seed"], ["learning_rate", "seed"]),
        (["a.b.x", "c.b.x", "y"], ["a.b.x", "c.b.x", "y"]),
        (["a.b.x", "a.c.x"], ["b.x", "c.x"]),
        (["seed", "config.data.seed"], ["seed", "data.seed"]),
    ],
)
def test_names_of_keys_are_as_short_as_they_can_be(keys, short):
    assert list(shorten_keys(keys).values()) == short


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A sweep with a run in each state."""
    root = tmp_path / "rates"
    done, stop = {"event": "done"}, {"event": "preempt", "code": 75}
    ends = [(2.5, 40, done), (2.0, 40, done), (2.2, 13, DIVERGED), (1.0, 10, None), (1.5, 20, stop)]
    for index, (level, num_rows, end) in enumerate(ends):
        write_sweep_run(LocalStore(root / f"{index:03}"), level, num_rows=num_rows, end=end, rate=3.0)
    runs = [SweepRun(f"{index:03}", {RATE: rate, "config.model.tied": index % 2 == 0})
            for index, rate in enumerate((1e-4, 1e-3, 1e-1, 3e-4, 1e-2, 3e-3))]  # fmt: skip
    runs[4] = dataclasses.replace(runs[4], stopped_step=200, stopped_value=1.6)
    write_record(root, runs)
    return root


def test_the_screen_of_a_sweep(root: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    before = files_of(root)
    assert main(["status", str(root)]) == 0
    output, problems = capfd.readouterr()
    lines = [re.sub(r" +", " ", line).strip() for line in output.splitlines()]
    assert re.sub("about .* left", "about LEFT left", lines[0]) == (
        "gpt-small-rates 6 runs: 2 done, 1 diverged, 1 running, 1 stopped, 1 not started; about LEFT left"
    )
    assert lines[1:4] == [
        "best by val/loss, the lowest at the end",
        "",
        "run learning_rate tied state step time metric",
    ]
    shown = [re.sub(r"(\d min )?\d+(\.\d)? s.*? (?=\d)|(?<=400) [\d.]+ s$", "TIME ", line) for line in lines[4:]]
    assert [line.split(" TIME")[0] for line in shown[:4]] == [
        "001 0.001 false done 400 of 400",
        "000 0.0001 true done 400 of 400",
        "004 0.01 true stopped at 200 200 of 400",
        "003 0.0003 false running 100 of 400",
    ]
    assert [line.endswith(" best") for line in shown] == [True] + [False] * 6
    assert shown[4].startswith("002 0.1 true diverged 130 of 400")
    assert shown[5:] == [
        "005 0.003 false not started",
        "002: step 130: training diverged: the loss is nan",
    ]
    assert (problems, files_of(root)) == ("", before)


@pytest.mark.parametrize("width", [30, 60, 80, 120])
def test_no_line_of_a_sweep_is_wider_than_the_terminal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    make_sweep(tmp_path, 12, num_seeds=3)
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["status", str(tmp_path)]) == 0
    output = capfd.readouterr().out
    assert max(map(len, output.splitlines())) <= width
    assert "\x1b" not in output
    for words in ("seeds", "not started", "best", "0.000769", "[0.9,"):
        assert words in output


def test_the_json_of_a_sweep(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(root), "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["sweep"] == {
        "name": "gpt-small-rates", "spec": "specs/gpt_small.yaml", "metric": "val/loss", "is_maximised": False,
        "rule": {}, "keys": [RATE, "config.model.tied"],
    }  # fmt: skip
    assert found["best"] == "001"
    assert found["runs"][2] | {"seconds": 0, "metric": 0} == {
        "name": "004", "values": {RATE: 0.01, "config.model.tied": True}, "state": "stopped", "reason": None,
        "step": 200, "total_steps": 400, "metric": 0, "metric_step": 200, "stopped_step": 200, "seconds": 0,
        "left_seconds": None, "has_ended": True,
    }  # fmt: skip
    assert found["runs"][0]["metric"] == pytest.approx(2.05, abs=0.1)
    assert (found["settings"], found["best_setting"], len(found["runs"])) == ([], None, 6)


def test_a_sweep_is_watched_until_all_its_runs_have_ended(
    root: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    left = iter([None, None, {"event": "done"}])

    def finish(seconds: float) -> None:
        end = next(left)
        if end is not None:
            write_sweep_run(LocalStore(root / "003"), 1.0, end=end)
            write_sweep_run(LocalStore(root / "005"), 1.0, end=end)

    monkeypatch.setattr("time.sleep", finish)
    assert run_command(["status", str(root), "--watch", "--json"]) == 0
    found = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [each["counts"].get("done") for each in found] == [2, 2, 2, 4]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "torn": lambda content: content[:40],
    "a list": lambda content: b"[1]",
    "newer": lambda content: content.replace(b'"format": 1', b'"format": 9'),
    "a path": lambda content: content.replace(b'"001"', b'"../001"'),
    "an absolute path": lambda content: content.replace(b'"001"', b'"/etc"'),
    "no values": lambda content: content.replace(b'"values"', b'"value"'),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_record_is_one_note_and_the_runs_are_shown(
    root: Path, capfd: pytest.CaptureFixture[str], damage: str
) -> None:
    store = LocalStore(root)
    content = DAMAGES[damage](store.read(SWEEP))
    assert content != store.read(SWEEP)
    store.write(SWEEP, content)
    assert main(["status", str(root)]) == 0
    output, problems = capfd.readouterr()
    assert [line.split()[0] for line in sorted(output.splitlines())] == ["000", "001", "002", "003", "004"]
    assert len(problems.splitlines()) == 1
    assert "sweep.json" in problems
    page = read_page(render_report([store]))
    assert (len(page["runs"]), len(page["notes"])) == (5, 1)
    table = read(PageData(store))
    assert len(table["table"]) == 5
    assert "sweep.json" in table["sweeps"][0]["counts"]


def test_a_damaged_record_without_runs_is_an_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / SWEEP).write_text("[")
    for command in (["status", str(tmp_path)], ["report", str(tmp_path), "-o", str(tmp_path / "x.html")]):
        assert main(command) == 2
        assert "sweep.json" in capfd.readouterr().err


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.daily(4)
def test_any_values_are_shown_as_text(root: Path, capfd: pytest.CaptureFixture[str], kind: str) -> None:
    store = LocalStore(root)
    before = store.read(SWEEP).decode()
    value = VALUES[kind]
    # Every value of every run, and every value of the record itself.
    places = [
        f'"{RATE}": 0.001',
        '"rule": {}',
        '"stopped_value": 1.6',
        '"stopped_step": 200',
        '"val/loss"',
        '"gpt-small-rates"',
    ]
    for place in places:
        name, _, _ = place.rpartition(": ")
        assert place in before
        store.write(SWEEP, before.replace(place, f"{name}: {value}" if name else value).encode())
        assert main(["status", str(root)]) == 0
        assert main(["status", str(root), "--json"]) == 0
        assert "\x1b" not in capfd.readouterr().out
        render_report([store])
        assert read(PageData(store)) is not None


def test_hostile_texts_stay_in_their_block(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    values = {f"config.{text}": text for text in HOSTILE}
    runs = [SweepRun("000", values), SweepRun("001", {RATE: 1})]
    write_record(root, runs, name=HOSTILE[1], rule={HOSTILE[1]: HOSTILE[1]}, metric=HOSTILE[1])
    content = render_report([LocalStore(root)])
    assert "<script>document" not in content
    assert len(content) < 5_200_000
    page = read_page(content)["sweep"]
    assert page["keys"][0] | {"numbers": 0} == {
        "key": f"config.{HOSTILE[0]}", "title": HOSTILE[0], "numbers": 0,
        "categories": [HOSTILE[0][:80]],
    }  # fmt: skip
    assert main(["status", str(root)]) == 0
    assert not set("\x1b\x00\x07\u202e") & set(capfd.readouterr().out)


def read_page(page: str) -> JsonObject:
    """Return the data of a report."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    data: JsonObject = json.loads(found[1])
    return data


def read(pages: PageData, name: str = "") -> JsonObject:
    body = pages.read(name)
    assert body is not None
    data: JsonObject = json.loads(body.plain)
    return data


def test_the_report_has_axes_for_every_kind_of_value(tmp_path: Path) -> None:
    values: list[dict[str, Any]] = [
        {"rate": 1e-4, "layers": 2, "decay": 0.01, "tied": True, "name": "a", "betas": [0.9, 0.95]},
        {"rate": 1e-3, "layers": 4, "decay": 0.1, "tied": False, "name": "b", "betas": [0.9, 0.99]},
        {"rate": 1e-2, "layers": 8, "decay": 0.19, "tied": True, "name": "a", "extra": None},
        {"rate": 3e-4, "layers": 2, "decay": 0.15, "tied": True, "name": "a", "betas": [0.9, 0.99]},
    ]
    sweep = make_record(*values)
    status = compare_runs(sweep, make_rows(*[("done", 100, float(index)) for index in range(4)], values=values))
    keys = {key["title"]: key for key in build_sweep_view("s", status, {})["sweep"]["keys"]}
    assert {title: key.get("log", key.get("categories")) for title, key in keys.items()} == {
        "rate": True, "layers": True, "decay": False, "tied": ["false", "true"], "name": ["a", "b"],
        "betas": ["[0.9, 0.95]", "[0.9, 0.99]"], "extra": ["null"],
    }  # fmt: skip
    assert keys["tied"]["numbers"] == [1, 0, 1, 1]
    assert keys["betas"]["numbers"] == [0, 1, None, 1]


def test_the_report_shows_runs_in_order_with_their_curves(root: Path) -> None:
    sweep = read_page(render_report([LocalStore(root)]))["sweep"]
    assert [(run["name"], run["rank"], run["mark"]) for run in sweep["runs"]] == [
        ("001", 0, "done"), ("000", 1, "done"), ("004", 2, "stopped"), ("003", 3, "on"), ("002", None, "broken"),
        ("005", None, "on"),
    ]  # fmt: skip
    assert sweep["rungs"] == [[200, 1]]
    assert sweep["best"] == "001"
    assert sweep["runs"][0]["curves"]["loss"]["step"][-1] == 400
    assert len(sweep["runs"][0]["curves"]["metric"]["step"]) == 8
    assert sweep["runs"][5]["curves"] == {}
    assert sweep["runs"][0]["address"] is None


def test_the_size_of_a_page_is_bounded(tmp_path: Path) -> None:
    values = {f"key{key}": "x" * 500 for key in range(60)}
    sweep = make_record(*[values | {"n": index} for index in range(1500)])
    rows = make_rows(*[("done", 400, 2.0)] * 1000, values=[dict(run.values) for run in sweep.runs])
    curves = {"loss": {"step": list(range(30)), "value": [1.23456] * 30}}
    view = build_sweep_view("s", compare_runs(sweep, rows), {row.name: curves for row in rows})
    assert len(encode_json(view)) < 4_500_000
    assert view["notes"] == ["Only the first 1,000 of 1,500 runs are shown.", "Only the first 24 of 61 keys are shown."]


def test_a_report_takes_one_sweep_or_several_runs(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = str(root.parent / "page.html")
    assert main(["report", str(root), str(root / "000"), "-o", out]) == 2
    assert "is the root of a sweep" in capfd.readouterr().err
    assert main(["report", str(root / "001"), str(root / "000"), "-o", out]) == 0
    assert main(["report", str(root), "-o", out]) == 0
    for inside in (root / SWEEP, root / "000/metrics.jsonl"):
        before = inside.read_bytes()
        assert main(["report", str(root), "-o", str(inside)]) == 2
        assert inside.read_bytes() == before


def test_the_dashboard_lists_a_sweep_as_one_entry_with_a_page(root: Path) -> None:
    make_run(LocalStore(root.parent / "alone"))
    make_sweep(root.parent / "deep/seeds", 6, num_seeds=3, kinds=False)
    pages = PageData(LocalStore(root.parent))
    table = read(pages)
    assert [line["name"] for line in table["table"]] == ["alone"]
    lines = table["sweeps"]
    assert [(line["name"], line["best"] != "") for line in lines] == [("deep/seeds", True), ("rates", True)]
    assert lines[1]["values"] == "learning_rate 0.001, tied false"
    page = read(pages, f"sweep/{lines[1]['id']}")
    assert [run["name"] for run in page["sweep"]["runs"]][:2] == ["001", "000"]
    # Each run that has begun has the page that it has elsewhere.
    addresses = [run["address"] for run in page["sweep"]["runs"]]
    assert addresses[-1] is None
    assert [read(pages, address)["runs"][0]["id"] for address in addresses[:-1]] == [
        f"rates/{run['name']}" for run in page["sweep"]["runs"][:-1]
    ]
    assert pages.read("sweep/0123456789abcdef") is None
    # Prometheus gets all runs.
    assert b'run="rates/000"' in pages.read("metrics").plain  # type: ignore[union-attr]


def test_a_stop_by_the_rule_is_shown_though_the_run_has_not_changed(root: Path) -> None:
    pages, store = PageData(LocalStore(root)), LocalStore(root)
    page = read(pages)
    assert page["is_top"]
    assert {run["name"]: run["state"] for run in page["sweep"]["runs"]}["004"] == "stopped at 200"
    store.write(SWEEP, store.read(SWEEP).replace(b'"stopped_step": 200', b'"stopped_step": null'))
    assert {run["name"]: run["state"] for run in read(pages)["sweep"]["runs"]}["004"] == "preempted"


def test_a_run_behind_a_link_is_not_followed(root: Path, tmp_path: Path) -> None:
    make_run(LocalStore(tmp_path / "secret"))
    (root / "005").symlink_to(tmp_path / "secret")
    status = SweepReader(LocalStore(root)).read(write_record(root, [SweepRun("005", {})]))
    assert [row.state for row in status.rows] == ["not started"]


def test_a_sweep_without_a_metric_ranks_no_run(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_record(root, [SweepRun("000", {RATE: 1}), SweepRun("001", {RATE: 2})], metric="")
    assert main(["status", str(root)]) == 0
    assert "best" not in capfd.readouterr().out
    sweep = read_page(render_report([LocalStore(root)]))["sweep"]
    assert (sweep["metric"], sweep["best"], [run["rank"] for run in sweep["runs"]]) == ("metric", None, [None, None])


def test_a_report_without_a_run_says_so(tmp_path: Path) -> None:
    write_record(tmp_path, [SweepRun("000", {"a": 1})])
    assert read_page(render_report([LocalStore(tmp_path)]))["sweep"]["runs"][0]["state"] == "not started"
    with pytest.raises(InvalidError):
        render_report([LocalStore(tmp_path / "none")])
