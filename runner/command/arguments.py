"""How command lines are read: a mistake is an `InvalidError` with the usage of all commands."""

import argparse
from typing import NoReturn

from runner.errors import InvalidError
from runner.spec import load_document, validate_spec

USAGE = """python -m runner SPEC [--set KEY=VALUE ...] [--coordinator HOST:PORT --num-processes N --process-id K]
       python -m runner plan SPEC [--topology ACCELERATOR] [--search] [--chips auto --hours H] [--json]
                                  [--set KEY=VALUE ...]
       python -m runner checkpoints SPEC_OR_DIRECTORY [--verify] [--deep]
       python -m runner checkpoints copy SOURCE TARGET
       python -m runner verify-resume SPEC [--steps N] [--kills K] [--processes P] [--devices-per-process M]
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


def directory_of(where: str) -> str:
    """The directory that a spec names, or `where` itself."""
    if not where.endswith((".yaml", ".yml")):
        return where
    return str(validate_spec(load_document(where, [])).directory)
