"""What a job is told: frozen models, strict YAML, `--set` overrides, and errors that name file, line and nearest key.

Owns the top level of a spec. Knows no neural net, no data and no jax: what stands under `config` belongs to the job
class and is validated by that class's `JobConfig`.

The map, in layers; a module imports only from those above it.

- `model`       the frozen models, from `ExecutionSpec` down
- `wording`     the parts of a one-line message: its place, what was got, the nearest choice
- `dialect`     the YAML that specs are written in -> plain data and the place of every key
- `document`    a file, a text or an `ExecutionSpec`, with overrides -> `Document`
- `validation`  a document against a model; pydantic's findings in the user's words
- `job_class`   `module:Class` -> the class
- `output`      `ExecutionSpec` -> YAML, models -> JSON Schema
- `identity`    the trajectory: the keys on which the bits of a run depend, and their hash

Reading goes in three steps, each listing all of its problems at once:

1. `load_document` reads YAML into plain data and remembers the place of every key;
2. `validate_spec` checks the top level and `load_job_class` imports the job;
3. `validate_config` checks `config` with that job's model.

Later stages blame a key in the same words through `Document.error`.
"""

from runner.spec.document import Document, document_of, load_document, parse_document
from runner.spec.identity import Trajectory, filled_in, hash_of, trajectory
from runner.spec.job_class import load_class, load_job_class
from runner.spec.model import (
    JOB_PATTERN,
    NAME_PATTERN,
    STEPS_OF_A_PROFILE_MAX,
    Auto,
    Checkpoint,
    Deadlines,
    ExecutionSpec,
    Frozen,
    HookEntry,
    InitFrom,
    JobConfig,
    Logging,
    Mesh,
    Notify,
    Topology,
)
from runner.spec.output import dump_spec, json_schema
from runner.spec.validation import SpecModel, read_spec, spec_without_unread_hooks, validate_config, validate_spec
from runner.spec.wording import KeyPath, Place, nearest_or_all

__all__ = [
    "JOB_PATTERN",
    "NAME_PATTERN",
    "STEPS_OF_A_PROFILE_MAX",
    "Auto",
    "Checkpoint",
    "Deadlines",
    "Document",
    "ExecutionSpec",
    "Frozen",
    "HookEntry",
    "InitFrom",
    "JobConfig",
    "KeyPath",
    "Logging",
    "Mesh",
    "Notify",
    "Place",
    "SpecModel",
    "Topology",
    "Trajectory",
    "document_of",
    "dump_spec",
    "filled_in",
    "hash_of",
    "json_schema",
    "load_class",
    "load_document",
    "load_job_class",
    "nearest_or_all",
    "parse_document",
    "read_spec",
    "spec_without_unread_hooks",
    "trajectory",
    "validate_config",
    "validate_spec",
]
