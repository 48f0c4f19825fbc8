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


def json_schema(config_model: type[BaseModel] | None = None, *, any_other: bool = True) -> dict[str, Any]:
    """JSON Schema of a spec (draft 2020-12), with `config_model` as a form of `config`, or as the only one."""
    models: list[type[BaseModel]] = [ExecutionSpec] if config_model is None else [ExecutionSpec, config_model]
    refs, definitions = models_json_schema([(model, "validation") for model in models])
    defs = definitions["$defs"]
    schema = defs.pop(refs[ExecutionSpec, "validation"]["$ref"].rpartition("/")[2])
    if config_model is not None:
        config = schema["properties"]["config"]
        other = {"type": config.pop("type")}
        config["anyOf"] = [refs[config_model, "validation"], *([other] if any_other else [])]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "$defs": defs}
