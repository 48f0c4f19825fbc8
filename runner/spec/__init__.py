"""Specs: frozen models, strict YAML, `--set` overrides, and errors that name file, line and the nearest valid key.

This package defines the top level of a spec. It does not depend on models, data or jax: `config` belongs to the job
class and is validated by that class's `JobConfig`.

A spec is read in three steps, each of which reports all of its problems at once:

1. `load_document` reads YAML into plain data and records the location of every key;
2. `validate_spec` checks the top level, and `load_job_class` imports the job;
3. `validate_config` checks `config` with that job's model.

Later stages report a problem of a key in the same form through `Document.error`.

- `model`: models of the sections, and policies of keys, which say what may change during a run
- `document`: YAML with locations, overrides, messages; modules that a run's directory may name
- `changes`: changes of values as text
- `imports`: classes by name, packages that are extras
- `validation`: documents against models; keys on which the bits of a run depend; specs as YAML and JSON Schema
"""

from runner.errors import suggest_choices
from runner.spec.changes import format_setting, list_value_changes
from runner.spec.document import (
    Document,
    KeyPath,
    SpecLocation,
    Trust,
    list_named_modules,
    load_document,
    make_document,
    parse_document,
)
from runner.spec.imports import is_class_path, list_former_paths, load_attribute, load_class, load_job_class
from runner.spec.model import (
    JOB_PATTERN,
    MAX_PROFILE_STEPS,
    NAME_PATTERN,
    PARAMS,
    Auto,
    CheckpointConfig,
    Deadlines,
    ExecutionSpec,
    ForkConfig,
    FrozenModel,
    HookEntry,
    InitFromConfig,
    JobConfig,
    LoggingConfig,
    MeshConfig,
    NotifyConfig,
    Topology,
)
from runner.spec.validation import (
    SpecModel,
    Trajectory,
    compute_trajectory,
    dump_spec,
    fill_in_defaults,
    flatten,
    hash_record,
    is_below,
    is_one_of,
    json_schema,
    read_spec,
    validate_config,
    validate_hooks,
    validate_spec,
)
