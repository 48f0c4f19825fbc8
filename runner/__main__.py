"""Entry point of `python -m runner` and of the console script `runner`.

From here to the training loop: `runner.cli.app` parses the command line, `runner.cli.run` joins the hosts and calls the
job, `RestoreableJob.__call__` in `runner/job.py` claims the directory and restores, and `BaseTrainer.run` in
`runner/trainer.py` is the loop.

The process first requests transparent huge pages (2 MiB) from the C library. XLA allocates the memory of a CPU step
anew in each step, and the kernel faults it in; with 4 KiB pages this is a tenth of the step. The C library requests
larger pages only if its environment says so when the process starts, so the process is executed again. The bits of a
run do not depend on it, and the process needs hardly more memory.
"""

import importlib
import os
import platform
import re
import sys
from collections.abc import Mapping
from pathlib import Path

_MODES = Path("/sys/kernel/mm/transparent_hugepage/enabled")  # such as `always [madvise] never`
_TUNABLES, _TUNABLE = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"
_MIN_GLIBC = (2, 35)


def main() -> int:
    """Run the command line of this process and return its exit code."""
    # The process starts again with huge pages before it imports anything else, which would otherwise be imported twice.
    restart_with_huge_pages()
    return int(importlib.import_module("runner.cli.app").run_program())


def restart_with_huge_pages() -> None:
    """Execute the same command again, with the same process id, with transparent huge pages enabled.

    Returns without effect if they are enabled already or cannot be: on other systems, where the kernel gives them to
    every process or to none, and where the user has set the tunable. Call it before anything else is started.
    """
    if not _MODES.exists():
        return
    variables = add_huge_page_tunable(os.environ, " ".join(platform.libc_ver()), _MODES.read_text())
    if variables is not None and sys.executable:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], variables)


def add_huge_page_tunable(variables: Mapping[str, str], c_library: str, modes: str) -> dict[str, str] | None:
    """Return the environment with the request for huge pages, or None if that would change nothing.

    Args:
        variables: environment of the process.
        c_library: name and version, such as `glibc 2.36`.
        modes: content of the kernel's file, with the active mode in brackets.
    """
    given = variables.get(_TUNABLES, "")
    version = re.fullmatch(r"glibc (\d+)\.(\d+).*", c_library)
    # Only in the mode `madvise` does the request of a process decide.
    if _TUNABLE in given or "[madvise]" not in modes or version is None:
        return None
    if (int(version[1]), int(version[2])) < _MIN_GLIBC:
        return None
    return {**variables, _TUNABLES: ":".join(filter(None, (given, f"{_TUNABLE}=1")))}


if __name__ == "__main__":
    sys.exit(main())
