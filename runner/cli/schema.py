"""`python -m runner schema [SPEC]`: the JSON Schema of a spec, for editors and checkers."""

import json
from collections.abc import Sequence

from runner.cli.arguments import Parser
from runner.config import TrainerConfig
from runner.errors import EXIT_DONE
from runner.job import RestoreableJob
from runner.spec import JobConfig, json_schema, load_document, load_job_class, validate_spec


def main(arguments: Sequence[str]) -> int:
    """Print the schema: with SPEC, `config` has the form that its job takes; without, a trainer's or any other.

    Raises `InvalidError` if the spec's top level is wrong or its job cannot be imported; `config` may be unfinished.
    """
    parser = Parser("runner schema", description="Print the JSON Schema of a spec.")
    parser.add_argument("spec", nargs="?", metavar="SPEC", help="give `config` the form that the job of SPEC takes")
    parsed = parser.parse_args(arguments)
    config = TrainerConfig if parsed.spec is None else _config_of(parsed.spec)
    print(json.dumps(json_schema(config, any_other=parsed.spec is None), indent=2))
    return EXIT_DONE


def _config_of(path: str) -> type[JobConfig]:
    """The model of `config` that the job of a spec has."""
    document = load_document(path)
    validate_spec(document)
    job_class: type[RestoreableJob] = load_job_class(document, RestoreableJob)
    return job_class.Config
