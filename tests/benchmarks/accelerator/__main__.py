"""Command line of the accelerator kit; see the package."""

import argparse
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import FrameType

from tests.benchmarks.accelerator.config import ROOT, SIZES
from tests.benchmarks.accelerator.kit import Kit, make_environment
from tests.benchmarks.accelerator.sections import SECTIONS, select_sections
from tests.benchmarks.accelerator.wheels import unpack


def main() -> int:
    """Run the kit; return 0 if every section has completed."""
    names = ", ".join(repr(section.name) for section in SECTIONS)
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.accelerator")
    parser.add_argument("--out", type=Path, required=True, metavar="JSON", help="file for the results")
    parser.add_argument("--sections", nargs="+", default=[], metavar="NAME", help=f"prefixes of {names}; default all")
    parser.add_argument("--minutes", type=float, default=10.0, help="time limit for all sections; default 10")
    parser.add_argument("--size", choices=list(SIZES), help="default: full on an accelerator, tiny on a CPU")
    parser.add_argument("--wheels", type=Path, metavar="DIRECTORY", help="bundled wheels to unpack")
    parser.add_argument("--torch-python", default=sys.executable, metavar="PYTHON", help="interpreter that has torch")
    parser.add_argument("--commit", help="commit of this checkout, if it is not a git repository")
    parsed = parser.parse_args()
    signal.signal(signal.SIGTERM, _exit_on_signal)
    with tempfile.TemporaryDirectory(prefix="wheels-") as unpacked:
        try:
            sections = select_sections(parsed.sections)
            if parsed.wheels is not None:
                unpack(parsed.wheels, Path(unpacked))
        except ValueError as error:
            parser.error(str(error))
        environment = make_environment(Path(unpacked) if parsed.wheels else None)
        kit = Kit(sections, parsed.minutes, parsed.size, parsed.torch_python, parsed.out, environment)
        results = kit.run(parsed.commit or get_commit())
    return int(any(section.status != "done" for section in results.sections))


def get_commit() -> str:
    """Return the commit of this checkout, with `+` appended if files differ from it; `unknown` if git fails."""
    git = ["git", "-c", "safe.directory=*", "-C", str(ROOT)]
    try:
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit + ("+" if changed.strip() else "")


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    """Raise `SystemExit`, so that the running section is killed before the kit exits."""
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
