"""`python -m runner checkpoints`: list, verify or copy checkpoints, on a disk or in a bucket. Claims nothing."""

from collections.abc import Sequence

from runner.checkpoint.inspect import VerifyDepth, copy_checkpoint, format_report
from runner.checkpoint.weights import find_best_name
from runner.cli.arguments import Parser, directory_of, looking
from runner.errors import EXIT_DONE
from runner.storage import open_store, split_checkpoint


def main(arguments: Sequence[str]) -> int:
    """Run the command; its exit code is 1 if a committed checkpoint is bad, 2 if a newer runner has written one."""
    with looking():
        if arguments and arguments[0] == "copy":
            return _copy(arguments[1:])
        return _list(arguments)


def _list(arguments: Sequence[str]) -> int:
    parser = Parser("runner checkpoints")
    parser.add_argument("where", metavar="SPEC_OR_DIRECTORY")
    parser.add_argument("--verify", action="store_true", help="compare every file with its manifest")
    parser.add_argument("--deep", action="store_true", help="read every byte back, compute each fingerprint anew")
    parsed = parser.parse_args(arguments)
    depth = VerifyDepth.BITS if parsed.deep else VerifyDepth.FILES if parsed.verify else VerifyDepth.MANIFEST
    store = open_store(directory_of(parsed.where))
    lines, code = format_report(store, depth, find_best_name(store))
    print("\n".join(lines))
    return code


def _copy(arguments: Sequence[str]) -> int:
    parser = Parser("runner checkpoints copy")
    parser.add_argument("source", help="a run's directory or URL, or DIRECTORY/checkpoints/NAME")
    parser.add_argument("target", help="the directory or URL of a run")
    parsed = parser.parse_args(arguments)
    directory, name = split_checkpoint(parsed.source)
    copied = copy_checkpoint(open_store(directory), name, open_store(parsed.target))
    print(f"copied and verified: {parsed.target.rstrip('/')}/checkpoints/{copied}")
    return EXIT_DONE
