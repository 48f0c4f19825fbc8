"""Entry point of `python -m launch ENGINE SPEC` and of the console script `runner-launch`; see `launch.app`."""

import importlib
import sys

from runner.errors import explain_hiding_modules


def main() -> int:
    """Run the command line of this process and return its exit code."""
    return explain_hiding_modules(lambda: int(importlib.import_module("launch.app").main()))


if __name__ == "__main__":
    sys.exit(main())
