"""Specs out again: as YAML, and as the JSON Schema of what may be written."""

from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from runner.spec.dialect import Dumper
from runner.spec.model import ExecutionSpec


def dump_spec(spec: ExecutionSpec) -> str:
    """YAML text that `parse_document` reads back as the same spec."""
    return yaml.dump(spec.model_dump(mode="json"), Dumper=Dumper, sort_keys=False, allow_unicode=True)


def json_schema(config_model: type[BaseModel] | None = None) -> dict[str, Any]:
    """JSON Schema of a spec (draft 2020-12), with `config_model` as one form that `config` may take."""
    models: list[type[BaseModel]] = [ExecutionSpec] if config_model is None else [ExecutionSpec, config_model]
    refs, definitions = models_json_schema([(model, "validation") for model in models])
    defs = definitions["$defs"]
    schema = defs.pop(refs[ExecutionSpec, "validation"]["$ref"].rpartition("/")[2])
    if config_model is not None:
        any_form = schema["properties"]["config"]
        any_form["anyOf"] = [refs[config_model, "validation"], {"type": any_form.pop("type")}]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "$defs": defs}
