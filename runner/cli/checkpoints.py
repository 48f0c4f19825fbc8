"""Commands on the directory of a run that need jax: checkpoints, checkpoints copy, profile."""

from runner.checkpoint.inspect import VerifyDepth, copy_checkpoint, find_best_name, format_report
from runner.checkpoint.manifest import CHECKPOINTS
from runner.cli.arguments import CheckpointsArguments, CopyArguments, ProfileArguments
from runner.cli.status import convert_read_errors, find_directory, open_run_store
from runner.console import say, write_text
from runner.errors import EXIT_DONE, InvalidError
from runner.spec import MAX_PROFILE_STEPS
from runner.storage import open_store, split_checkpoint
from runner.train.profiler import FOLDER, POLL_BUCKET_SECONDS, request_profile


def list_checkpoints(arguments: CheckpointsArguments) -> int:
    """List the checkpoints of a run, verify them if asked to, and return the exit code."""
    with convert_read_errors():
        store = open_store(find_directory(arguments.where))
        if not store.list_names(CHECKPOINTS):
            # A mistyped directory must not pass as a run whose checkpoints are all good. A copy has no `job.json`.
            store = open_run_store(arguments.where)
        # `--deep` includes what `--verify` checks, so it decides last.
        depth = VerifyDepth.FILES if arguments.is_verify else VerifyDepth.MANIFEST
        depth = VerifyDepth.BITS if arguments.is_deep else depth
        lines, code = format_report(store, depth, find_best_name(store))
        write_text("".join(f"{line}\n" for line in lines))
    return code


def copy(arguments: CopyArguments) -> int:
    """Copy a checkpoint into another directory or bucket, and verify the copy."""
    with convert_read_errors():
        directory, name = split_checkpoint(arguments.source)
        copied = copy_checkpoint(open_store(directory), name, open_store(arguments.target))
        say(f"copied and verified: {arguments.target.rstrip('/')}/checkpoints/{copied}")
    return EXIT_DONE


def request_steps(arguments: ProfileArguments) -> int:
    """Ask a running job to profile its next steps: leave the request in its directory, and return at once."""
    if not 0 < arguments.steps <= MAX_PROFILE_STEPS:
        raise InvalidError(f"--steps {arguments.steps}: needs a number from 1 to {MAX_PROFILE_STEPS}")
    with convert_read_errors():
        # A request in a directory without a run would never be read, without any message.
        store = open_run_store(arguments.where)
        request_profile(store, arguments.steps)
    say(
        f"requested a profile of {arguments.steps} steps: a running job starts it within {POLL_BUCKET_SECONDS:g} s, "
        f"a stopped one when it runs again; the result will be below {store.url}/{FOLDER}"
    )
    return EXIT_DONE
