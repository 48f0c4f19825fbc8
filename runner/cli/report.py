"""`python -m runner report`: one page with pictures, of one run or several. Claims nothing; works beside the runs."""

from collections.abc import Sequence
from pathlib import Path

from runner.cli.arguments import Parser, directory_of, looking
from runner.console import say
from runner.dashboard.report import write_report
from runner.errors import EXIT_DONE, InvalidError
from runner.storage import open_store


def main(arguments: Sequence[str]) -> int:
    """Run the command."""
    parser = Parser("runner report")
    parser.add_argument("where", nargs="+", metavar="SPEC_OR_DIRECTORY")
    parser.add_argument("-o", "--output", required=True, metavar="OUT", help="the page, such as report.html")
    parsed = parser.parse_args(arguments)
    path = Path(parsed.output)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise InvalidError(f"-o {parsed.output}: needs the name of a file in a directory that is there")
    with looking():
        num_bytes = write_report([open_store(directory_of(where)) for where in parsed.where], path)
    say(f"{path}: {num_bytes / 1e6:.1f} MB")
    return EXIT_DONE
