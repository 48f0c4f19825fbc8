"""The command of the kit; see the package."""

import argparse
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import FrameType

from tests.benchmarks.accelerator.agenda import SECTIONS, chosen
from tests.benchmarks.accelerator.kit import Kit, variables_of
from tests.benchmarks.accelerator.size import ROOT, SIZES
from tests.benchmarks.accelerator.wheels import unpack


def main() -> int:
    """Run it; 0 if every section has seen all it came for."""
    names = ", ".join(repr(section.name) for section in SECTIONS)
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.accelerator")
    parser.add_argument("--out", type=Path, required=True, metavar="JSON")
    parser.add_argument("--sections", nargs="+", default=[], metavar="NAME", help=f"beginnings of {names}")
    parser.add_argument("--minutes", type=float, default=10.0, help="for all of it; default 10")
    parser.add_argument("--size", choices=list(SIZES), help="default: full on an accelerator, tiny on a CPU")
    parser.add_argument("--wheels", type=Path, metavar="DIRECTORY", help="what was carried along, to be unpacked")
    parser.add_argument("--torch-python", default=sys.executable, metavar="PYTHON", help="an interpreter with torch")
    parser.add_argument("--commit", help="of this checkout, where it is no git repository")
    parsed = parser.parse_args()
    signal.signal(signal.SIGTERM, _end)
    with tempfile.TemporaryDirectory(prefix="carried-") as carried:
        try:
            sections = chosen(parsed.sections)
            if parsed.wheels is not None:
                unpack(parsed.wheels, Path(carried))
        except ValueError as error:
            parser.error(str(error))
        variables = variables_of(Path(carried) if parsed.wheels else None)
        kit = Kit(sections, parsed.minutes, parsed.size, parsed.torch_python, parsed.out, variables)
        results = kit.run(parsed.commit or commit_here())
    return int(any(part.status != "done" for part in results.parts))


def commit_here() -> str:
    """The commit of this checkout, with a plus where files differ from it; `unknown` where git cannot tell."""
    git = ["git", "-c", "safe.directory=*", "-C", str(ROOT)]
    try:
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit + ("+" if changed.strip() else "")


def _end(number: int, frame: FrameType | None) -> None:
    """End as on Ctrl-C: with nothing left running."""
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
