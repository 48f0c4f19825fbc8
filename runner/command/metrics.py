"""`python -m runner metrics`: the rows of the surviving trajectory, on a disk or in a bucket. Claims nothing."""

import os
import sys
from collections.abc import Iterator, Sequence

from runner.attempt.owner import read_owner
from runner.command.arguments import Parser, directory_of
from runner.errors import EXIT_DONE, InvalidError, RetryableError, RunnerError
from runner.storage import LocalStore, Store, local_directory, open_store
from runner.terminal import show
from runner.train.metrics.file import read_lines
from runner.train.metrics.table import csv_lines


def main(arguments: Sequence[str]) -> int:
    """Print the rows of a run, live or dead, or write them into a file."""
    parser = Parser("runner metrics")
    parser.add_argument("where", metavar="SPEC_OR_DIRECTORY")
    parser.add_argument("--csv", action="store_true", help="a header, and a line a row; default: JSON objects")
    parser.add_argument("-o", "--output", metavar="FILE", help="default: standard output")
    parsed = parser.parse_args(arguments)
    try:
        texts = _texts(open_store(directory_of(parsed.where)), parsed.csv)
        if parsed.output is None:
            for text in texts:
                show(text)
        else:
            path = local_directory(parsed.output)
            LocalStore(path.parent).write_chunks(path.name, (text.encode() for text in texts))
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - what Python flushes at its end
    except RunnerError:
        raise
    except OSError as error:
        raise RetryableError(str(error)) from error
    return EXIT_DONE


def _texts(store: Store, is_csv: bool) -> Iterator[str]:
    if read_owner(store) is None:
        raise InvalidError(f"{store.url} holds no run: there is no job.json; give a run's directory, or its spec")
    lines = list(read_lines(store))
    return csv_lines(lines) if is_csv else (line.text.decode() for line in lines)
