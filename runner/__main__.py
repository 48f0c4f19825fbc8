"""Entry point of `python -m runner` and of the console script `runner`.

From here to the training loop: `runner.cli.app` parses the command line, `runner.cli.run` joins the hosts and calls the
job, `RestoreableJob.__call__` in `runner/job.py` claims the directory and restores, and `BaseTrainer.run` in
`runner/trainer.py` is the loop.
"""

import importlib
import sys

from runner.huge_pages import restart_with_huge_pages


def main() -> int:
    """Run the command line of this process and return its exit code."""
    # The process starts again with huge pages before it imports anything else, which would otherwise be imported twice.
    restart_with_huge_pages()
    return int(importlib.import_module("runner.cli.app").main(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(main())
