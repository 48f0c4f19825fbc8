"""`python -m runner dashboard`: all runs below a directory or a bucket's prefix, live. Claims and changes nothing."""

from collections.abc import Sequence

from runner.cli.arguments import Parser
from runner.dashboard.server import serve
from runner.errors import EXIT_DONE, InvalidError
from runner.storage import open_store

_PORT, _PORT_MAX = 8642, 65535


def main(arguments: Sequence[str]) -> int:
    """Run the command until it is asked to stop."""
    parser = Parser("runner dashboard")
    parser.add_argument("root", metavar="ROOT", help="a directory or URL below which runs are")
    parser.add_argument("--port", type=int, default=_PORT, metavar="P", help=f"default {_PORT}; 0 takes a free one")
    parser.add_argument("--host", default="127.0.0.1", metavar="H", help="default: this machine alone")
    parser.add_argument("--token", metavar="T", help="what a browser must bring; made if others can reach the server")
    parsed = parser.parse_args(arguments)
    if not 0 <= parsed.port <= _PORT_MAX:
        raise InvalidError(f"--port {parsed.port}: needs 0 to {_PORT_MAX}")
    root = open_store(parsed.root)
    if root.root is not None and not root.root.is_dir():
        raise InvalidError(f"{root.url}: no such directory")
    serve(root, parsed.host, parsed.port, parsed.token)
    return EXIT_DONE
