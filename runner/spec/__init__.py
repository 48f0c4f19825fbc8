"""What a job is told: frozen models, strict YAML, `--set` overrides, and errors that name file, line and nearest key.

Owns the top level of a spec. Knows no neural net, no data and no jax: what stands under `config` belongs to the job
class and is validated by that class's `JobConfig`.

The map, in layers; a module imports only from those above it.


Reading goes in three steps, each listing all of its problems at once:

1. `load_document` reads YAML into plain data and remembers the place of every key;
2. `validate_spec` checks the top level and `load_job_class` imports the job;
3. `validate_config` checks `config` with that job's model.

Later stages blame a key in the same words through `Document.error`.

- `model`: The frozen models of a spec. Owns its keys, defaults, descriptions and the checks that one section c
- `document`: The YAML that specs are written in: one document, plain values only, every key once
- `imports`: A user's class by its name: `module:Class` becomes the class, or one line that says why it cannot
- `trajectory`: The trajectory: the keys of a spec on which the bits of a run depend. A resume refuses a change in a
- `validation`: A document against a model. Owns the words in which pydantic's findings reach the user: one line per
"""

from runner.errors import suggest_choices
from runner.spec.document import (
    Document,
    KeyPath,
    SpecLocation,
    load_document,
    make_document,
    parse_document,
)
from runner.spec.imports import load_class, load_job_class
from runner.spec.model import (
    JOB_PATTERN,
    MAX_PROFILE_STEPS,
    NAME_PATTERN,
    Auto,
    CheckpointConfig,
    Deadlines,
    ExecutionSpec,
    FrozenModel,
    HookEntry,
    InitFromConfig,
    JobConfig,
    LoggingConfig,
    MeshConfig,
    NotifyConfig,
    Topology,
)
from runner.spec.trajectory import Trajectory, compute_trajectory, fill_in_defaults, hash_record
from runner.spec.validation import (
    SpecModel,
    dump_spec,
    json_schema,
    read_spec,
    validate_config,
    validate_hooks,
    validate_spec,
)

__all__ = [
    "JOB_PATTERN",
    "MAX_PROFILE_STEPS",
    "NAME_PATTERN",
    "Auto",
    "CheckpointConfig",
    "Deadlines",
    "Document",
    "ExecutionSpec",
    "FrozenModel",
    "HookEntry",
    "InitFromConfig",
    "JobConfig",
    "KeyPath",
    "LoggingConfig",
    "MeshConfig",
    "NotifyConfig",
    "SpecLocation",
    "SpecModel",
    "Topology",
    "Trajectory",
    "compute_trajectory",
    "dump_spec",
    "fill_in_defaults",
    "hash_record",
    "json_schema",
    "load_class",
    "load_document",
    "load_job_class",
    "make_document",
    "parse_document",
    "read_spec",
    "suggest_choices",
    "validate_config",
    "validate_hooks",
    "validate_spec",
]
