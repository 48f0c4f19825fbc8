"""The Grafana dashboard in the documentation: its expressions name metrics of the endpoint, and its panels fit."""

import itertools
import json
import re
from pathlib import Path

from runner.dashboard.server import PageData
from runner.storage import LocalStore
from tests.dashboard.synthetic_runs import make_run

PATH = Path(__file__).parents[2] / ".github" / "docs" / "files" / "grafana.json"
DASHBOARD = json.loads(PATH.read_text())
PANELS = DASHBOARD["panels"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]


def read_metrics(directory):
    """Return the metrics that the endpoint describes, and the labels of those with samples."""
    make_run(LocalStore(directory / "a"), num_attempts=2, num_rows=5)
    body = PageData(LocalStore(directory)).read("metrics")
    text = body.plain.decode()
    names = set(re.findall(r"^# TYPE (\w+) ", text, re.MULTILINE))
    labels = {
        name: set(re.findall(r"(\w+)=", found)) for name, found in re.findall(r"^(\w+)\{(.*)\} ", text, re.MULTILINE)
    }
    return names, labels


def test_expressions_name_exported_metrics_and_labels(tmp_path):
    names, labels = read_metrics(tmp_path)
    variables = [
        variable["query"]["query"] for variable in DASHBOARD["templating"]["list"] if variable["name"] == "run"
    ]
    assert len(EXPRESSIONS) >= len(PANELS)
    for expression in (*EXPRESSIONS, *variables):
        used = re.findall(r"\brunner_\w+", expression)
        assert used
        assert set(used) <= names, expression
        for name, selector in re.findall(r"(runner_\w+)\{(.*?)\}", expression):
            assert set(re.findall(r"(\w+)=", selector)) <= labels.get(name, {"run"}), expression
        for label in re.findall(r"by \((\w+)\)", expression):
            assert label in set().union(*(labels[name] for name in used)), expression


def test_every_metric_has_a_panel(tmp_path):
    names, _ = read_metrics(tmp_path)
    assert names == {name for expression in EXPRESSIONS for name in re.findall(r"\brunner_\w+", expression)}


def test_panels_have_different_ids_and_do_not_overlap():
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    assert len({panel["title"] for panel in PANELS}) == len(PANELS)
    places = [panel["gridPos"] for panel in PANELS]
    assert all(place["x"] >= 0 and place["w"] > 0 and place["x"] + place["w"] <= 24 for place in places)
    for a, b in itertools.combinations(places, 2):
        is_apart = (
            a["x"] + a["w"] <= b["x"]
            or b["x"] + b["w"] <= a["x"]
            or a["y"] + a["h"] <= b["y"]
            or b["y"] + b["h"] <= a["y"]
        )
        assert is_apart, (a, b)


def test_panels_use_the_chosen_data_source_and_runs():
    (source,) = {target["datasource"]["uid"] for panel in PANELS for target in (panel, *panel["targets"])}
    assert source == "${datasource}"
    assert all('run=~"$run"' in expression for expression in EXPRESSIONS)
