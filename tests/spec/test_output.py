"""Dumped specs, which round-trip, and the schema of every key."""

import pytest
import yaml

from runner.errors import FailedError
from runner.spec import ExecutionSpec, Topology, dump_spec, json_schema, parse_document, validate_spec
from runner.spec.document import TextDumper, dump_yaml
from tests.spec.sample import Config
from tests.support.special_characters import CONTROL_CHARACTER_TEXTS, TEXTS


def test_a_dumped_spec_round_trips_in_declared_order() -> None:
    config = {"text": ["1e-3", "12", "on", "null", "a: b", "", "é\n"], "rate": 1e-05, "large": 1e22, "none": None}
    spec = ExecutionSpec(name="x", job="a:B", directory="gs://b/x", topology=Topology(), config=config)
    text = dump_spec(spec)
    assert validate_spec(parse_document(text, "x")) == spec
    assert list(yaml.safe_load(text)) == list(ExecutionSpec.model_fields)


@pytest.mark.parametrize("text", [*TEXTS, *CONTROL_CHARACTER_TEXTS], ids=ascii)
def test_every_text_round_trips(text: str) -> None:
    config = {text: [text, {"nested": text}], "long": (text + " ") * 50}
    spec = ExecutionSpec(name="x", job="a:B", directory="gs://b/x", config=config)
    assert validate_spec(parse_document(dump_spec(spec), "x")) == spec
    assert yaml.safe_load(dump_yaml(config, TextDumper)) == config


def test_a_dump_that_does_not_round_trip_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TextDumper, "represent_text", lambda dumper, text: dumper.represent_int(7))
    with pytest.raises(FailedError, match="reads back"):
        dump_yaml({"a": "b"})


def test_the_schema_describes_every_key_and_allows_configs_of_other_jobs() -> None:
    schema = json_schema(Config)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert list(schema["properties"]) == list(ExecutionSpec.model_fields)
    assert all("description" in part or "$ref" in part for part in schema["properties"].values())
    assert schema["required"] == ["name", "job", "directory"]
    form, anything = schema["properties"]["config"]["anyOf"]
    assert anything == {"type": "object"}
    assert set(schema["$defs"][form["$ref"].split("/")[-1]]["properties"]) == {"train", "parts"}
    assert json_schema()["properties"]["config"]["type"] == "object"
