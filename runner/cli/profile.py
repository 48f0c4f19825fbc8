"""`python -m runner profile`: have a running job record its next steps. Asks; claims nothing and waits for nothing."""

from collections.abc import Sequence

from runner.cli.arguments import Parser, looking, store_of
from runner.console import say
from runner.errors import EXIT_DONE, InvalidError
from runner.spec import MAX_PROFILE_STEPS
from runner.train.profiler import FOLDER, POLL_BUCKET_SECONDS, request_profile

_STEPS = 5


def main(arguments: Sequence[str]) -> int:
    """Leave the request in the run's directory."""
    parser = Parser("runner profile")
    parser.add_argument("where", metavar="SPEC_OR_DIRECTORY")
    parser.add_argument("--steps", type=int, default=_STEPS, metavar="N", help=f"default {_STEPS}")
    parsed = parser.parse_args(arguments)
    if not 0 < parsed.steps <= MAX_PROFILE_STEPS:
        raise InvalidError(f"--steps is {parsed.steps}; needs 1 to {MAX_PROFILE_STEPS}")
    with looking():
        store = store_of(parsed.where)
        request_profile(store, parsed.steps)
    say(
        f"asked for {parsed.steps} steps: the job looks within {POLL_BUCKET_SECONDS:g} s, if it runs, else when it "
        f"runs again; they will be below {store.url}/{FOLDER}"
    )
    return EXIT_DONE
