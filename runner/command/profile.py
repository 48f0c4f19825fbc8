"""`python -m runner profile`: have a running job record its next steps. Asks; claims nothing and waits for nothing."""

from collections.abc import Sequence

from runner.attempt.owner import read_owner
from runner.command.arguments import Parser, directory_of
from runner.errors import EXIT_DONE, InvalidError, RetryableError, RunnerError
from runner.spec import STEPS_OF_A_PROFILE_MAX
from runner.storage import open_store
from runner.terminal import say
from runner.train.profile import FOLDER, POLL_BUCKET_SECONDS, request

_STEPS = 5


def main(arguments: Sequence[str]) -> int:
    """Leave the request in the run's directory."""
    parser = Parser("runner profile")
    parser.add_argument("where", metavar="SPEC_OR_DIRECTORY")
    parser.add_argument("--steps", type=int, default=_STEPS, metavar="N", help=f"default {_STEPS}")
    parsed = parser.parse_args(arguments)
    if not 0 < parsed.steps <= STEPS_OF_A_PROFILE_MAX:
        raise InvalidError(f"--steps is {parsed.steps}; needs 1 to {STEPS_OF_A_PROFILE_MAX}")
    try:
        store = open_store(directory_of(parsed.where))
        if read_owner(store) is None:
            raise InvalidError(f"{store.url} holds no run: there is no job.json; give a run's directory, or its spec")
        request(store, parsed.steps)
    except RunnerError:
        raise
    except OSError as error:
        raise RetryableError(str(error)) from error
    say(
        f"asked for {parsed.steps} steps: the job looks within {POLL_BUCKET_SECONDS:g} s, if it runs, else when it "
        f"runs again; they will be below {store.url}/{FOLDER}"
    )
    return EXIT_DONE
