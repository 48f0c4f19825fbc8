"""Exceptions of the runner and their exit codes.

Schedulers branch only on the exit code, so the five codes are part of the public interface: 0 done, 1 failed, 2
invalid, 75 preempted, 76 retryable.
"""

import difflib
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_INVALID = 2
EXIT_PREEMPTED = 75
EXIT_RETRYABLE = 76


_MAX_LINES = 20
_MAX_LINE_CHARACTERS = 2000


def _limit_message(message: str) -> str:
    """Return a message of several lines, limited in their number and in their length.

    A message may list problems of a file of another program, of which there may be any number. The end of the message
    and of each line is kept, because it says what to do.
    """
    lines = message.split("\n")
    if len(lines) > _MAX_LINES:
        num_left_out = len(lines) - _MAX_LINES + 1
        lines = [*lines[: _MAX_LINES - 2], f"... and {num_left_out:,} more lines like these", lines[-1]]
    half = _MAX_LINE_CHARACTERS // 2
    return "\n".join(
        f"{line[:half]} ... {line[-half:]}" if len(line) > _MAX_LINE_CHARACTERS + 5 else line for line in lines
    )


class RunnerError(Exception):
    """Base of every error that the runner raises on purpose.

    The message is one line for the user, or a line for each of several problems, see `_limit_message`.
    """

    exit_code = EXIT_FAILED

    def __init__(self, *arguments: object) -> None:
        super().__init__(*(_limit_message(each) if isinstance(each, str) else each for each in arguments))


class FailedError(RunnerError):
    """A bug, or training that diverged: stop and page a person."""


class DivergedError(FailedError, ArithmeticError):
    """The loss or the gradient is no longer finite."""


class HookError(FailedError):
    """A hook raised an error, or returned a value that it may not return."""


class PhaseError(FailedError, RuntimeError):
    """A method of a job was called in the wrong phase, such as `save` before the job runs."""


class StateError(FailedError):
    """The state has a form that could not be restored."""


class MiscountError(FailedError):
    """The job counted its steps wrong, or ended before the last one."""


class FencedError(FailedError):
    """A newer attempt owns the directory, so this one may not write any more."""


class RemovedError(FencedError):
    """The directory is not the one that this attempt claimed: it was removed or unmounted under the running job."""

    exit_code = EXIT_INVALID


class InvalidError(RunnerError, ValueError):
    """The user must act: bad command line, bad spec, refused resume."""

    exit_code = EXIT_INVALID


class SpecError(InvalidError):
    """The spec is wrong. The message has one line `file:line: key: problem` per problem."""


class DataError(InvalidError):
    """The data cannot be used with this spec: empty, too short, or with token ids beyond the vocabulary."""


class EncodeError(DataError):
    """A tokenizer cannot encode a document."""


class ResumeError(InvalidError):
    """The directory contains something that this spec must not continue."""


class NewerFormatError(ResumeError):
    """A newer runner wrote this file, in a format that is unknown here; it must not be changed."""


class PreemptedError(RunnerError):
    """The job was asked to stop; its state is saved and committed."""

    exit_code = EXIT_PREEMPTED


class RetryableError(RunnerError):
    """The infrastructure failed: run the same command again."""

    exit_code = EXIT_RETRYABLE


class PeerLostError(RetryableError, ConnectionError):
    """Another process of the job died or stopped answering."""


class DeviceError(RetryableError):
    """A device computes wrong results."""


class StorageError(RetryableError, OSError):
    """The directory could not be read or written."""


def error_from_exit(error: SystemExit) -> FailedError:
    """Return the error for a `sys.exit` in a job's own code.

    Its code is ignored, because a scheduler could mistake it for the end of the job.
    """
    return FailedError(
        f"the job called sys.exit({error.code!r}), which does not end a job; return from run at the last step, or "
        "raise an error"
    )


def format_error(error: BaseException) -> str:
    """Return the type of an error and the first line of its message."""
    try:
        message = str(error)
    except Exception:  # noqa: BLE001 - the error of a user, whose message cannot be made
        message = "its message cannot be formatted"
    return f"{type(error).__name__}: {message.split(chr(10), 1)[0][:300]}"


def format_reason(error: BaseException) -> str:
    """Return the first line of the message of a library's error, or its type if there is no message."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def format_place(function: Any) -> str:
    """Return `file:line: Class.method` of a user's function, or of the class that inherits it from the runner."""
    function = inspect.unwrap(function)
    owner, code = getattr(function, "__self__", None), getattr(function, "__code__", None)
    name = getattr(function, "__qualname__", type(function).__name__)
    file, line = (code.co_filename, code.co_firstlineno) if code is not None else (None, 0)
    if isinstance(owner, type) and (file is None or Path(file).is_relative_to(Path(__file__).parent)):
        name = f"{owner.__qualname__}.{getattr(function, '__name__', name)}"
        try:
            file, line = inspect.getsourcefile(owner), inspect.getsourcelines(owner)[1]
        except (OSError, TypeError):  # defined in a prompt
            file = None
    if file is None:
        return name
    shown = os.path.relpath(file)
    return f"{file if shown.startswith('..') else shown}:{line}: {name}"


# Names that other trainers give to keys of a spec. Their spelling is near that of other keys.
_OTHER_NAMES = {
    **dict.fromkeys(("steps", "max_steps", "num_steps", "train_steps"), "total_steps"),
    **dict.fromkeys(("epochs", "num_epochs", "max_epochs", "num_train_epochs"), "total_epochs"),
    **dict.fromkeys(("tokens", "max_tokens"), "total_tokens"),
    **dict.fromkeys(("batch_size", "global_batch_size", "train_batch_size"), "global_batch_examples"),
    **dict.fromkeys(("micro_batch_size", "per_device_train_batch_size"), "micro_batch_examples"),
    **dict.fromkeys(("lr", "max_lr", "rate"), "learning_rate"),
    **dict.fromkeys(("seq_len", "seq_length", "block_size", "max_length", "context_length"), "sequence_length"),
    **dict.fromkeys(("num_layers", "n_layer", "n_layers", "depth"), "layers"),
    **dict.fromkeys(("num_heads", "n_head", "n_heads"), "heads"),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embed_dim"), "width"),
    **dict.fromkeys(("vocab_size", "n_vocab"), "vocabulary_size"),
}


def suggest_nearest(word: str, choices: Sequence[str], prefix: str = "") -> str:
    """Return `; did you mean ...?` with the choice nearest to a mistyped word, or nothing if none is near."""
    other = _OTHER_NAMES.get(word)
    nearest = [other] if other in choices else difflib.get_close_matches(word, choices, n=1)
    return f"; did you mean {prefix}{nearest[0]}?" if nearest else ""


def suggest_choices(word: str, choices: Sequence[str], prefix: str = "") -> str:
    """Return `; did you mean ...?`, or the list of all choices if none is near."""
    return suggest_nearest(word, choices, prefix) or (f"; choose from {', '.join(choices)}" if choices else "")


# Modules in the working directory that hide others of the same name. `python -m runner` looks for every module in the
# working directory first, so that a user's job is found there. A file `random.py` or a folder `jax/` then takes the
# place of the module that a library means.


def explain_hiding_modules(program: Callable[[], int]) -> int:
    """Run `program` and return its exit code.

    If it fails because a module of the working directory hides another one, print a line that says so, and return 2.
    """
    try:
        return program()
    except (ImportError, AttributeError, SyntaxError) as error:
        cause = describe_hiding_modules(error)
        if not cause:
            raise
        # Not by the console, which may be what cannot be imported.
        sys.stderr.write(f"{error}; {cause}".translate(dict.fromkeys(range(32), " ")) + "\n")
        return EXIT_INVALID


def describe_hiding_modules(error: BaseException) -> str:
    """Return the modules of the working directory that may have caused an error, as one clause; empty if none has."""
    text = f"{error} {getattr(error, 'name', '')}"
    files = set()
    trace = error.__traceback__
    while trace is not None:
        files.add(trace.tb_frame.f_code.co_filename)
        trace = trace.tb_next
    try:
        here = Path.cwd().resolve()
    except FileNotFoundError:  # the directory was removed
        return ""
    elsewhere = [path for path in sys.path if Path(path or os.curdir).resolve() != here]
    found = []
    for name, module in [*sys.modules.items()]:
        file = getattr(module, "__file__", None)
        if "." in name or file is None or not (name in text or file in files):
            continue
        if Path(file).resolve() not in (here / f"{name}.py", here / name / "__init__.py"):
            continue
        spec = PathFinder.find_spec(name, elsewhere)
        if spec is not None and spec.origin is not None:
            hidden = "Python's own module" if name in sys.stdlib_module_names else f"the one in {spec.origin}"
            found.append(f"{name} is {file} here, which hides {hidden}")
    return "; ".join(found) and f"{'; '.join(found)}; rename it, or run in another directory"


def describe_hidden_folder(module: str) -> str:
    """Return the file or folder of the working directory that a loaded module of its name hides; empty if none."""
    name = module.partition(".")[0]
    module_found = sys.modules.get(name)
    paths = [*getattr(module_found, "__path__", []), getattr(module_found, "__file__", None)]
    place = next((Path(path) for path in paths if path is not None), None)
    here = next((path for path in (Path(name), Path(f"{name}.py")) if path.exists()), None)
    if place is None or here is None or place.resolve() in (here.resolve(), here.resolve().parent / name):
        return ""
    return f"{name} is the package in {place}, which hides {here.resolve()}; give yours another name"
