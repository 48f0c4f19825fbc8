"""Reports: a self-contained page that sends no request and runs only its own scripts."""

import base64
import hashlib
import itertools
import json
import re
import shlex
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from runner.cli.app import COMMANDS, main
from runner.dashboard import report
from runner.dashboard import report as report_module
from runner.dashboard.report import make_run_names, render_report
from runner.history.ledger import STAGES_MAX
from runner.history.records import ForkRecord
from runner.metrics.media import Audio, Image, encode_media
from runner.storage import JsonObject, LocalStore, encode_json, encode_line
from tests.dashboard.scenes import make_failed, make_forks, make_stages
from tests.dashboard.synthetic_runs import LOST_STEPS, START_TIME, encode_lines, make_events, make_rows, make_run
from tests.support.memory_bucket import make_memory_bucket

VOID_ELEMENTS = {"meta", "link", "br", "img", "input", "hr"}
HOSTILE = (
    "<script>document.body.id='owned'</script>",
    "</script><script>document.body.id='owned'</script>",
    "<!--<script>",
    "<img src=x onerror=\"document.body.id='owned'\">",
    "\"'`&lt;&amp; ${7*7} {{7*7}} %{x} $x^2$",
    "\u2028\u2029\u202e\ufeff\x00\x1b[31m\x07\r\n\t",
    "<a href=\"javascript:document.body.id='owned'\">here</a>",
    "__proto__",
    "x" * 100_000,
)
# Places of user-controlled text: file, and a form in which `{}` is the text as JSON.
EVENT = '{{"time": 1700000300.0, "attempt": 1, "process": 0, "event": {}}}\n'
START = '{{"time": 1700000000.0, "attempt": 1, "process": 0, "event": "start", "step": null, {}}}\n'
PLACES = {
    "spec": ("spec.yaml", "name: life\nx: {}\n"),
    "name": ("job.json", '{{"id": "0", "identity": {{}}, "name": {}}}'),
    "reason": ("events.jsonl", EVENT.replace("{}", '"failed", "step": 3, "code": 1, "reason": {}')),
    "event": ("events.jsonl", EVENT),
    "host": ("events.jsonl", START.replace("{}", '"hosts": [{}]')),
    "version": ("events.jsonl", START.replace("{}", '"versions": {{"jax": {}}}')),
    "device": ("events.jsonl", START.replace("{}", '"devices": 1, "device_kind": {}')),
    "metric": ("metrics.jsonl", '{{"step": 1, "train/loss": 1.0, {}: 2.0}}\n{{"step": 2, "train/loss": 1.0}}\n'),
    "log": ("logs/1.0.log", "{}\n"),
}


@pytest.fixture(autouse=True)
def stub_library(monkeypatch):
    """Replace plotly.js, of 4.8 MB, in all tests but one."""
    monkeypatch.setattr(report, "read_plotly", lambda: "globalThis.Plotly = {};")


class StrictParser(HTMLParser):
    """An HTML parser that requires elements to be closed where they were opened."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[int, str] = {}  # keyed by the index of the parent element
        self._owner: list[int] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID_ELEMENTS:
            self.open.append(tag)
            self._owner.append(len(self.elements) - 1)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        self._owner.pop()

    def handle_data(self, data):
        if self._owner:
            self.texts[self._owner[-1]] = self.texts.get(self._owner[-1], "") + data

    def all(self, tag: str) -> list[tuple[dict[str, str | None], str]]:
        """Return attributes and text of the elements with this tag."""
        return [(found, self.texts.get(index, "")) for index, (name, found) in enumerate(self.elements) if name == tag]


def parse_page(page: str) -> JsonObject:
    """Check the structure of a page, and return its data."""
    walk = StrictParser(page)
    assert walk.open == []
    assert page.startswith("<!DOCTYPE html>")
    (policy,) = (found["content"] for found, _ in walk.all("meta") if found.get("http-equiv"))
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    scripts = walk.all("script")
    assert [found.get("type") for found, _ in scripts] == ["application/json", None, None]
    for _, script in scripts[1:]:
        assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in policy
    for _, found in walk.elements:
        assert not {name for name in found if name.startswith("on")} | ({"src", "action", "srcset"} & set(found))
        assert found.get("href", "data:,") == "data:,"
    (style,) = walk.all("style")
    assert "url(" not in style[1]
    assert "@import" not in style[1]
    rest = page.replace(report.read_plotly(), "")
    assert set(re.findall(r"https?://[^\"' ]*", rest)) <= {"http://www.w3.org/2000/svg"}
    data: JsonObject = json.loads(scripts[0][1])
    return data


def test_the_page_contains_its_plotting_library(tmp_path, monkeypatch):
    monkeypatch.undo()
    page = render_report([make_run(LocalStore(tmp_path))])
    parse_page(page)
    assert "plotly.js v" in page
    assert len(page.encode()) < 6e6


def test_a_report_covers_the_whole_run(tmp_path):
    data = parse_page(render_report([make_run(LocalStore(tmp_path / "life"))]))
    (run,) = data["runs"]
    loss, validation = run["charts"]["Loss"]
    assert loss["step"] == list(range(1, 61))
    assert loss["tokens"] == [step * 512 for step in range(1, 61)]
    assert loss["seconds"] == sorted(loss["seconds"])
    assert max(loss["value"]) == 99.0
    assert validation["step"] == [20, 40, 60]
    assert run["thinning"] == "all 243 values are drawn"
    assert [(each["resumed"], each["reached"], each["lost"]) for each in run["attempts"]] == [
        (0, 20 + LOST_STEPS, LOST_STEPS),
        (20, 40 + LOST_STEPS, LOST_STEPS),
        (40, 60, 0),
    ]
    assert [save["step"] for save in run["saves"]] == [20, 40, 60]
    assert ["jax", "1"] in run["environment"]
    assert ["devices", "8 x TPU v5e"] in run["environment"]
    assert {chart["title"] for chart in data["charts"]} >= set(run["charts"])
    assert all(chart["unit"] for chart in data["charts"])
    wall = sum(run["buckets"].values())
    assert wall == pytest.approx(run["seconds"], abs=1.0)
    assert run["goodput"] == sorted(run["goodput"])
    assert all(0 <= share <= 1 for _, share in run["goodput"])


@pytest.mark.parametrize("place", PLACES)
def test_texts_of_a_run_are_shown_and_never_markup_or_code(tmp_path, place):
    for number, text in enumerate(HOSTILE):
        store = make_run(LocalStore(tmp_path / str(number)), num_attempts=1, num_rows=2)
        name, form = PLACES[place]
        encoded = text.replace("\n", " ") if place == "log" else json.dumps(text)
        path = store.root / name
        path.parent.mkdir(exist_ok=True)
        added = form.format(encoded).encode(errors="surrogatepass")
        path.write_bytes((path.read_bytes() if name == "events.jsonl" else b"") + added)
        data = parse_page(render_report([store]))
        shown = json.dumps(data["runs"], ensure_ascii=False)
        if text.startswith("<script") and place != "name":
            assert text in shown


@pytest.mark.parametrize("name", HOSTILE[:5])
def test_the_directory_name_is_escaped(tmp_path, name):
    stores = [make_run(LocalStore(tmp_path / word / name.replace("/", "|"))) for word in ("a", "b")]
    data = parse_page(render_report(stores))
    assert [run["label"] for run in data["runs"]] == [f"{word}/{name.replace('/', '|')}" for word in ("a", "b")]


def test_long_series_are_thinned_and_keep_their_peak(tmp_path, monkeypatch):
    monkeypatch.setattr(report_module, "POINTS_MAX", 1000)
    store = make_run(
        LocalStore(tmp_path), num_attempts=10, num_rows=200, **{f"train/x{index}": 1.0 for index in range(60)}
    )
    page = render_report([store])
    (run,) = parse_page(page)["runs"]
    assert max(run["charts"]["Loss"][0]["value"]) == 99.0
    assert sum(len(series["step"]) for chart in run["charts"].values() for series in chart) < 2000
    assert re.fullmatch(
        r"\d+ of \d+ values are drawn: the lowest and the highest of each bin, so peaks are kept", run["thinning"]
    )
    assert any("not drawn: train/x" in text for text in run["warnings"])
    assert len(run["attempts"]) == 10


def test_non_finite_values_are_marked_at_their_step(tmp_path):
    store = make_run(LocalStore(tmp_path), num_attempts=1, num_rows=4)
    broken = [
        b'{"step": 5, "train/loss": NaN, "train/tokens": 5}\n',
        b'{"step": 6, "train/loss": 1.0, "train/aux": null}\n',
    ]
    (tmp_path / "metrics.jsonl").write_bytes(b"".join([*encode_lines(make_rows(1, 4)), *broken]))
    (run,) = parse_page(render_report([store]))["runs"]
    assert run["charts"]["Loss"][0]["broken"]["step"] == [5]
    assert run["charts"]["Aux"][0]["broken"]["step"] == [6]
    assert "2 of which are not finite" in run["thinning"]


def test_runs_in_different_stores_are_compared(tmp_path):
    spec = "name: {0}\ndirectory: runs/{0}\nconfig: {{train: {{total_steps: 60}}, rate: {1}}}\n"
    bucket = make_run(make_memory_bucket(), spec=spec.format("b", 2))
    stores = [make_run(LocalStore(tmp_path / "a"), spec=spec.format("a", 1)), bucket]
    data = parse_page(render_report(stores))
    assert [run["label"] for run in data["runs"]] == ["a", "run"]
    assert data["differences"] == [["config.rate", ["1", "2"]]]
    a, b = (
        {key: value for key, value in run.items() if key in ("charts", "attempts", "saves")} for run in data["runs"]
    )
    assert a == b


def test_the_headline_shows_the_state_of_a_run(tmp_path):
    (run,) = parse_page(render_report([make_run(LocalStore(tmp_path / "life"), **{"perf/mfu": 0.5})]))["runs"]
    tiles = {tile["label"]: tile for tile in run["tiles"]}
    assert list(tiles) == ["State", "Progress", "Training loss", "Validation loss", "Tokens / s", "MFU", "Goodput"]
    assert tiles["State"]["value"] == "done"
    assert (tiles["Progress"]["value"], tiles["Progress"]["share"]) == ("100.0%", 1.0)
    assert tiles["Progress"]["note"] == "step 60 of 60"
    assert tiles["Training loss"]["note"].endswith(" over 11 steps")
    assert len(tiles["Training loss"]["trend"]) == 60
    assert tiles["Validation loss"]["value"] == "2.5000"
    assert run["values"]["best_validation_loss"] == 2.5
    assert parse_page(render_report([LocalStore(tmp_path / "life")]))["charts"][0]["unit"] == "nats / token"


def test_a_run_without_rows_has_a_headline_too(tmp_path):
    store = make_run(LocalStore(tmp_path / "life"))
    store.remove("metrics.jsonl")
    (run,) = parse_page(render_report([store]))["runs"]
    assert [tile["label"] for tile in run["tiles"]][:2] == ["State", "Progress"]
    assert run["charts"] == {}


def test_a_failure_is_told_once_and_marked_at_its_step(tmp_path):
    make_failed(tmp_path)
    (run,) = parse_page(render_report([LocalStore(tmp_path / "failed")]))["runs"]
    assert (run["end"]["step"], run["end"]["label"]) == (800, "failed")
    shown = {key: run[key] for key in ("tiles", "warnings", "facts")}
    assert json.dumps(shown).count("RESOURCE_EXHAUSTED") == 1
    (run,) = parse_page(render_report([make_run(LocalStore(tmp_path / "life"))]))["runs"]
    assert (run["end"], run["warnings"]) == (None, [])


def test_repeated_notices_are_counted(tmp_path):
    store = make_run(LocalStore(tmp_path))
    event = {"time": START_TIME + 300, "attempt": 1, "process": 0, "event": "grace", "reason": "late"}
    store.write("events.jsonl", store.read("events.jsonl") + encode_line(event) * 3)
    (run,) = parse_page(render_report([store]))["runs"]
    assert run["warnings"] == ["grace: late (3 times)"]


def test_events_are_shown_in_words(tmp_path):
    (run,) = parse_page(render_report([make_run(LocalStore(tmp_path), num_attempts=1)]))["runs"]
    assert [[attempt, step, text] for _, attempt, step, text in run["events"]] == [
        [1, 20, "the job is done"],
        [1, 20, "the save is durable, 5.0 s after it began"],
        [1, 20, "a save has begun; training waited for 1.0 s"],
        [1, 0, "the state was initialised in 20.0 s"],
        [1, None, "everything is compiled, after 50.0 s"],
        [1, None, "the attempt has begun with 1 processes on 8 x TPU v5e"],
    ]


def test_keys_that_are_no_defaults_come_before_the_spec(tmp_path):
    spec = "name: a\nseed: 0\nlogging: {every_steps: 5, level: info}\nconfig: {own: [1], train: {total_steps: null}}\n"
    (run,) = parse_page(render_report([make_run(LocalStore(tmp_path), spec=spec)]))["runs"]
    assert run["changed"] == [["name", '"a"', ""], ["logging.every_steps", "5", "10"], ["config.own", "[1]", ""]]


def test_samples_are_spread_over_the_run_with_the_newest_first(tmp_path):
    store = make_run(LocalStore(tmp_path), num_attempts=1, num_rows=2000, **{"val/sample/0": "a" * 5000})
    (run,) = parse_page(render_report([store]))["runs"]
    steps = [step for step, _ in run["samples"]]
    assert (steps[0], steps == sorted(steps, reverse=True), len(steps) <= 13) == (2000, True, True)
    assert max(before - after for before, after in itertools.pairwise(steps)) < 300
    assert run["samples"][0][1] == [["sample/0", "a" * 1500]]


@pytest.mark.parametrize("kind", ["disk", "bucket"])
def test_the_newest_images_and_audio_are_embedded_up_to_a_size(tmp_path, kind, monkeypatch):
    store = make_run(LocalStore(tmp_path) if kind == "disk" else make_memory_bucket(), num_attempts=1, num_rows=30)
    sizes, rows = {}, []
    for row in map(json.loads, store.read("metrics.jsonl").splitlines()):
        files, _ = encode_media(row["step"], {"val/x": Image([[0.5]]), "val/y": Audio([0.0], 8000)})
        for key, file in files.items():
            # The files of one step are gone.
            if row["step"] != 28:
                store.write(file.name, file.content)
            row[key], sizes[key] = file.reference, len(file.content)
        rows.append(row)
    store.write("metrics.jsonl", b"".join(map(encode_line, rows)))

    def list_steps():
        (run,) = parse_page(render_report([store]))["runs"]
        assert all(source.startswith("data:") for media in run["media"] for _, source in media["items"])
        return {media["key"]: [step for step, _ in media["items"]] for media in run["media"]}

    assert list_steps() == {key: [30, 29, 27, 26, 25, 24, 23, 22] for key in ("x", "y")}
    # The newest of each key come first.
    monkeypatch.setattr(report, "_MEDIA_BYTES_MAX", 2 * sum(sizes.values()))
    assert list_steps() == {"x": [30, 29], "y": [30, 29]}
    monkeypatch.setattr(report, "_MEDIA_FILES_MAX", 3)
    assert list_steps() == {"x": [30, 29], "y": [30]}
    monkeypatch.setattr(report, "_MEDIA_BYTES_MAX", 0)
    assert list_steps() == {}


def test_histograms_and_many_norms_are_drawn_over_steps(tmp_path):
    norms = {f"train/grad_norm/{index}": 10.0**index for index in range(40)}
    more = {"train/h": {"counts": [1, 3], "edges": [0.0, 1.0, 2.0]}, "train/torn": {"counts": [1], "edges": [0.0]}}
    store = make_run(LocalStore(tmp_path), num_attempts=1, num_rows=500, **norms, **more)
    (run,) = parse_page(render_report([store]))["runs"]
    own, gradients = run["histograms"]
    assert (own["title"], gradients["title"]) == ("H", "Logarithm of the gradient norms")
    assert (sum(own["shares"][0][:16]), sum(own["shares"][0])) == (
        pytest.approx(0.25, abs=0.02),
        pytest.approx(1, abs=0.02),
    )
    assert (own["step"][0], len(own["step"]) <= 41, len(own["centers"])) == (1, True, 32)
    assert gradients["centers"][0] > 0 > gradients["centers"][0] - 1
    assert "Gradient norm by module" not in run["charts"]
    assert run["warnings"] == []


def test_commands_name_the_directory(tmp_path):
    (run,) = parse_page(render_report([make_run(LocalStore(tmp_path / "a b"))]))["runs"]
    assert {shlex.split(text)[-1] for text, _ in run["commands"]} == {str(tmp_path / "a b")}
    for text, _ in run["commands"]:
        COMMANDS.parse(shlex.split(text)[3:])


def test_smoothing_of_a_thinned_curve_uses_bin_means(tmp_path, monkeypatch):
    monkeypatch.setattr(report_module, "POINTS_MAX", 500)
    (run,) = parse_page(render_report([make_run(LocalStore(tmp_path), num_attempts=1, num_rows=2000)]))["runs"]
    loss = run["charts"]["Loss"][0]
    assert len(loss["means"]["value"]) < len(loss["value"]) < 200
    assert min(loss["means"]["value"]) > 1.9
    assert max(loss["value"]) == 99.0
    assert "means" not in run["charts"]["Learning rate"][0]


def test_each_run_has_its_shortest_unique_name():
    assert make_run_names(["runs/a/", "s3://b/c"]) == ["a", "c"]
    assert make_run_names(["x/1/run", "x/2/run", "x/2/other"]) == ["1/run", "2/run", "2/other"]
    assert make_run_names(["a", "a"]) == ["a (1)", "a (2)"]
    assert make_run_names(["run", "x/run"]) == ["run", "x/run"]


FILES = ("job.json", "spec.yaml", "events.jsonl", "metrics.jsonl")


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe{", b"[1, 2", b'{"step": "x", "parts": 7}\n' * 3], ids=repr)
@pytest.mark.parametrize("name", FILES)
def test_an_incomplete_or_damaged_directory_is_shown_partially(tmp_path, name, content):
    store = make_run(LocalStore(tmp_path))
    (tmp_path / "attempts").mkdir()
    (tmp_path / "attempts" / "1").write_text('{"time": 1700000000.0}')
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(content)
    (run,) = parse_page(render_report([store]))["runs"]
    assert run["rows"] == (0 if name == "metrics.jsonl" else 60)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{}/none", "-o", "{}/x.html"], "no run is here"),
        (["{}", "-o", "{}"], "needs the name of a file"),
        (["{}", "-o", "{}/none/x.html"], "needs the name of a file"),
        (["{}"], "missing option '-o'"),
        (["-o", "{}/x.html"], "missing argument 'SPEC_OR_DIRECTORY...'"),
        (["ftp://x", "-o", "{}/x.html"], "ftp:// is not known"),
    ],
)
def test_invalid_arguments_give_one_line_and_leave_no_file(tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.setattr("runner.distributed.preemption.StopNotice.install_signal_handlers", lambda self: None)
    assert main(["report", *(word.format(tmp_path) for word in arguments)]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_command_writes_only_the_page(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("runner.distributed.preemption.StopNotice.install_signal_handlers", lambda self: None)
    make_run(LocalStore(tmp_path / "life"))
    before = {path: path.stat().st_mtime_ns for path in sorted(tmp_path.rglob("*"))}
    assert main(["report", str(tmp_path / "life"), "-o", str(tmp_path / "page.html")]) == 0
    assert {path: path.stat().st_mtime_ns for path in sorted(tmp_path.rglob("*")) if path.name != "page.html"} == before
    parse_page((tmp_path / "page.html").read_text())
    assert capsys.readouterr().out.startswith(f"{tmp_path / 'page.html'}: ")


@pytest.mark.soak
def test_the_page_of_a_million_rows_and_five_hundred_attempts_is_small(tmp_path: Path):
    store = make_run(LocalStore(tmp_path), num_attempts=500, num_rows=2000)
    page = render_report([store])
    (run,) = parse_page(page)["runs"]
    assert (run["rows"], len(run["attempts"])) == (1_000_000, 500)
    assert max(run["charts"]["Loss"][0]["value"]) == 99.0
    assert len(page.encode()) < 10e6
    assert len(list(make_events(500, 2000))) == 3000


# A fork over its parent.


def test_a_fork_is_drawn_over_its_ancestors(tmp_path):
    make_forks(tmp_path)
    place = tmp_path / "forked"
    data = parse_page(render_report([LocalStore(place / "branch")]))
    (run,), (trunk,) = data["runs"], data["ancestors"]
    assert (run["fork"]["step"], run["part"]) == (1000, None)
    assert "forked from trunk at step 1,000; its parent is dimmed" in run["fork"]["text"]
    assert (trunk["label"], trunk["part"]) == ("trunk", 1000)
    assert run["charts"]["Loss"][0]["step"][0] == 1010
    assert trunk["charts"]["Loss"][0]["step"][-1] == 2000
    # Throughput and memory are those of the parent's hardware.
    assert run["charts"].keys() - trunk["charts"].keys() >= {"Throughput", "Step time", "Device memory"}
    facts = dict(map(tuple, run["facts"]))
    assert (
        facts["forked from"] == f"{place / 'trunk'} at step 1,000, with config.optimizer.learning_rate: 0.001 -> 0.003"
    )

    # The parent of the parent too, and charts before the fork has a row.
    data = parse_page(render_report([LocalStore(place / "twig")]))
    assert [(run["label"], run["part"]) for run in data["ancestors"]] == [("branch", 1300), ("trunk", 1000)]
    assert {chart["title"]: chart["unit"] for chart in data["charts"]}["Loss"] == "nats / token"

    # Runs of the page are no ancestors beside it.
    data = parse_page(render_report([LocalStore(place / name) for name in ("trunk", "branch", "twig")]))
    assert data["ancestors"] == []
    assert [run["part"] for run in data["runs"]] == [1000, 1300, None]


def forget(place: Path) -> None:
    shutil.rmtree(place / "trunk")


def replace(place: Path) -> None:
    (place / "trunk/job.json").write_text('{"id": "0", "name": "x", "time": 0, "identity": {}}')


def damage(place: Path) -> None:
    (place / "trunk/job.json").write_text("{")


def link(place: Path) -> None:
    (place / "trunk").rename(place / "there")
    for name in ("trunk", "elsewhere"):
        (place / name).mkdir()
    (place / "trunk/job.json").symlink_to(place / "there/job.json")


@pytest.mark.parametrize("change", [forget, replace, damage, link])
def test_a_parent_that_is_not_there_is_told_and_no_other_run_is_drawn(tmp_path, change):
    make_forks(tmp_path)
    change(tmp_path / "forked")
    data = parse_page(render_report([LocalStore(tmp_path / "forked/branch")]))
    assert data["ancestors"] == []
    assert "is gone or elsewhere, so it is not drawn" in data["runs"][0]["fork"]["text"]


def test_a_parent_is_found_beside_its_moved_fork(tmp_path):
    make_forks(tmp_path / "before")
    (tmp_path / "before").rename(tmp_path / "after")
    data = parse_page(render_report([LocalStore(tmp_path / "after/forked/twig")]))
    assert [run["label"] for run in data["ancestors"]] == ["branch", "trunk"]


@pytest.mark.parametrize(
    ("parent", "url", "places"),
    [
        ("/a/run", "/b/fork", ["/a/run", "/b/run"]),
        ("gs://a/x/run", "gs://a/y/fork", ["gs://a/x/run", "gs://a/y/run"]),
        ("gs://a/x/run", "gs://b/y/fork", ["gs://b/y/run"]),
        ("gs://a/x/run", "/b/fork", ["/b/run"]),
        ("/a/run", "s3://b/fork", ["s3://b/run"]),
        ("?", "/b/fork", ["/b/?"]),
    ],
)
def test_no_record_of_a_run_sends_the_report_to_another_bucket(monkeypatch, parent, url, places):
    monkeypatch.setattr(report_module, "make_store", lambda place: place)
    found = report_module.list_parent_places(ForkRecord(parent, "0", 1, "0"), url)
    assert [each for each in found if each != "?"] == places


def test_the_stages_of_a_run_are_marked_and_listed(tmp_path):
    make_stages(tmp_path)
    (run,) = parse_page(render_report([LocalStore(tmp_path / "staged/trunk")]))["runs"]
    assert [(stage["number"], stage["step"], stage["tokens"], stage["tokens_per_step"]) for stage in run["stages"]] == [
        (1, 600, 600 * 524288, 524288),
        (2, 1200, 1200 * 524288, 1048576),
        (3, 1900, 1200 * 524288 + 700 * 1048576, 1048576),
    ]
    assert run["stages"][1]["changes"] == [
        "train.global_batch_examples: 256 -> 512",
        "optimizer.learning_rate: 0.001 -> 0.0014",
    ]
    assert all(stage["began"] > run["began"] for stage in run["stages"])
    assert run["tiles"][1]["note"].endswith("left, stage 3 of 3")
    assert ["stage", "3 of 3"] in [[name, text.removeprefix("stage ")] for name, text in run["facts"]]


def test_a_comparison_shows_where_stages_begin_instead_of_their_json(tmp_path):
    make_stages(tmp_path)
    stores = [LocalStore(tmp_path / "staged" / name) for name in ("trunk", "anneal", "hot")]
    found = dict(map(tuple, parse_page(render_report(stores))["differences"]))
    assert found["config.stages"] == ["from step 600, 1,200, 1,900", "from step 600, 1,200, 1,210", "(absent)"]


def test_a_run_has_no_more_stages_on_a_page_than_are_read(tmp_path):
    store = make_run(LocalStore(tmp_path))
    stages = [{"from_step": step, "set": {"a" * 500: "b" * 5000}, "why": "c" * 5000} for step in range(1, 300)]
    store.write("spec.yaml", encode_json({"config": {"stages": stages[:30]}}))
    (run,) = parse_page(render_report([store]))["runs"]
    assert len(run["stages"]) == 30
    assert len(json.dumps(run["stages"])) < 30 * 1000
    store.write(
        "spec.yaml", encode_json({"config": {"stages": [stage | {"set": {"a": 1}, "why": ""} for stage in stages]}})
    )
    (run,) = parse_page(render_report([store]))["runs"]
    assert len(run["stages"]) == STAGES_MAX
    assert any("299 stages" in text for text in run["warnings"])
