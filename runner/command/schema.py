"""`python -m runner schema`: the JSON Schema of the spec, for editors."""

import json
from collections.abc import Sequence

from runner.command.arguments import Parser
from runner.config import TrainerConfig
from runner.errors import EXIT_DONE
from runner.spec import json_schema


def main(arguments: Sequence[str]) -> int:
    """Print the schema."""
    Parser("runner schema").parse_args(arguments)
    print(json.dumps(json_schema(TrainerConfig), indent=2))
    return EXIT_DONE
