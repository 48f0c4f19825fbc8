"""`python -m runner metrics`: the rows of the surviving trajectory, on a disk or in a bucket. Claims nothing."""

from collections.abc import Sequence

from runner.cli.arguments import Parser, looking, store_of
from runner.console import write_text
from runner.errors import EXIT_DONE
from runner.metrics.file import read_encoded_rows
from runner.metrics.rows import format_csv
from runner.storage import LocalStore, local_directory


def main(arguments: Sequence[str]) -> int:
    """Print the rows of a run, live or dead, or write them into a file."""
    parser = Parser("runner metrics")
    parser.add_argument("where", metavar="SPEC_OR_DIRECTORY")
    parser.add_argument("--csv", action="store_true", help="a header, and a line a row; default: JSON objects")
    parser.add_argument("-o", "--output", metavar="FILE", help="default: standard output")
    parsed = parser.parse_args(arguments)
    with looking(BrokenPipeError):
        lines = list(read_encoded_rows(store_of(parsed.where)))
        texts = format_csv(lines) if parsed.csv else (line.text.decode() for line in lines)
        if parsed.output is None:
            for text in texts:
                write_text(text)
        else:
            path = local_directory(parsed.output)
            LocalStore(path.parent).write_chunks(path.name, (text.encode() for text in texts))
    return EXIT_DONE
