"""Commands that examine a spec without running its job: plan, schema."""

import json
import math

from runner.cli.arguments import PlanArguments, SchemaArguments
from runner.config import TrainerConfig
from runner.console import finish_output
from runner.errors import EXIT_DONE
from runner.job import RestoreableJob
from runner.plan.preflight import PlanRequest, plan
from runner.spec import JobConfig, json_schema, load_document, load_job_class, validate_spec
from runner.storage import local_directory


def print_plan(arguments: PlanArguments) -> int:
    """Print what a job would do on its hardware, which need not be present; the exit code is 2 if it would not run."""
    # `--topology` is an override like any other, applied last so that it outranks a `--set` of the same key.
    topology = [] if not arguments.topology else [f"topology.accelerator={arguments.topology}"]
    return plan(
        PlanRequest(
            arguments.spec,
            (*arguments.overrides, *topology),
            as_json=arguments.as_json,
            is_search=arguments.is_search,
            hours=arguments.hours,
            minutes=math.inf if arguments.minutes is None else arguments.minutes,
            is_profile=arguments.is_profile,
            trace=None if arguments.trace is None else local_directory(arguments.trace),
            against=arguments.against,
        )
    )


def print_schema(arguments: SchemaArguments) -> int:
    """Print the JSON Schema of a spec.

    With a spec, `config` has the keys of that spec's job class; without one, the keys of a trainer or any others. Only
    the top level of the spec must be valid, so `config` may be unfinished.
    """
    # Most specs are of trainers, so an editor without a spec at hand gets their keys.
    config: type[JobConfig] = TrainerConfig
    if arguments.spec is not None:
        document = load_document(arguments.spec)
        validate_spec(document)
        job_class: type[RestoreableJob] = load_job_class(document, RestoreableJob)
        config = job_class.Config
    print(json.dumps(json_schema(config, any_other=arguments.spec is None), indent=2))
    finish_output()
    return EXIT_DONE
