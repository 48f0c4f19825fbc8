"""How command lines are read: a mistake is an `InvalidError` with the usage of all commands.

What commands share that only look at a run: which run, and what ends them.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from typing import NoReturn

from runner.errors import InvalidError, RetryableError, RunnerError
from runner.records import PARAMS
from runner.run.layout import read_owner
from runner.spec import load_document, validate_spec
from runner.storage import Store, open_store


def store_of(where: str) -> Store:
    """Where the run is that a spec or a directory names. Raises `InvalidError` if there is none."""
    store = open_store(directory_of(where))
    if read_owner(store) is None:
        raise InvalidError(f"{store.url} holds no run: there is no job.json; give a run's directory, or its spec")
    return store


@contextlib.contextmanager
def looking(*ends: type[BaseException]) -> Iterator[None]:
    """Around what a command does that only looks: what a store cannot do now is `RetryableError`.

    One of `ends` is the end of the command in order, such as nobody reading what it prints.
    """
    try:
        yield
    except ends:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - what Python flushes at its end
    except RunnerError:
        raise
    except OSError as error:
        raise RetryableError(str(error)) from error


USAGE = """python -m runner SPEC [--set KEY=VALUE ...] [--profile START:STOP]
                          [--coordinator HOST:PORT --num-processes N --process-id K]
       python -m runner plan SPEC [--topology ACCELERATOR] [--search] [--chips auto --hours H] [--json]
                                  [--set KEY=VALUE ...]
       python -m runner status SPEC_OR_DIRECTORY [--json] [--watch]
       python -m runner sample SPEC_OR_DIRECTORY [--prompt TEXT] [--step N|newest|best] [--weights W]
                               [--tokens N] [--temperature T] [--top-p P] [--seed S]
       python -m runner evaluate SPEC_OR_DIRECTORY [--data SOURCE] [--step N|newest|best | --all] [--weights W]
                                 [--json] [--coordinator HOST:PORT --num-processes N --process-id K]
       python -m runner metrics SPEC_OR_DIRECTORY [--csv] [-o FILE]
       python -m runner profile SPEC_OR_DIRECTORY [--steps N]
       python -m runner report SPEC_OR_DIRECTORY... -o OUT
       python -m runner dashboard ROOT [--port P] [--host H] [--token T]
       python -m runner checkpoints SPEC_OR_DIRECTORY [--verify] [--deep]
       python -m runner checkpoints copy SOURCE TARGET
       python -m runner export SPEC_OR_DIRECTORY [--step N|best|newest] [--weights W] [--adapter] [--dtype DTYPE]
                               [-o OUT] [--push OWNER/NAME [--public] [--license ID] [--base-model OWNER/NAME]]
       python -m runner verify-resume SPEC [--steps N] [--kills K] [--processes P] [--devices-per-process M[,M...]]
                                           [--seed S] [--set KEY=VALUE ...]
       python -m runner schema [SPEC]"""


class Helped(SystemExit):
    """The user has asked for help, and got it."""


class Parser(argparse.ArgumentParser):
    """Raises instead of ending the process."""

    def __init__(self, prog: str, description: str | None = None):
        super().__init__(prog=f"python -m {prog}", usage=USAGE, description=description)

    def error(self, message: str) -> NoReturn:
        """See `argparse`."""
        raise InvalidError(f"{message}\nusage: {USAGE}")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """See `argparse`: called after `--help` alone."""
        raise Helped(status)

    def add_set(self) -> None:
        """The option `--set`."""
        self.add_argument(
            "--set", action="append", default=[], metavar="KEY=VALUE", help="override one key; repeatable"
        )

    def add_weights(self) -> None:
        """The option `--weights`."""
        self.add_argument("--weights", default=PARAMS, metavar="W", help="params (default), or an average: ema_0.999")

    def add_placement(self) -> None:
        """The options that say which process of several this is; see `check_placement`."""
        self.add_argument("--coordinator", metavar="HOST:PORT", help="address of process 0")
        self.add_argument("--num-processes", type=int, metavar="N")
        self.add_argument("--process-id", type=int, metavar="K")


def check_placement(parsed: argparse.Namespace) -> None:
    """Raise `InvalidError` if the options of `add_placement` name no process."""
    given = [parsed.coordinator, parsed.num_processes, parsed.process_id]
    if any(value is None for value in given) and any(value is not None for value in given):
        raise InvalidError("--coordinator, --num-processes and --process-id: give all three or none")
    if parsed.num_processes is not None and not 0 <= parsed.process_id < parsed.num_processes:
        raise InvalidError(f"--process-id {parsed.process_id} is not in 0 .. {parsed.num_processes - 1}")


def directory_of(where: str) -> str:
    """The directory that a spec names, or `where` itself."""
    if not where.endswith((".yaml", ".yml")):
        return where
    return str(validate_spec(load_document(where, [])).directory)
