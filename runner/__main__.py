"""Entry point of `python -m runner` and of the console script `runner`.

From here to the training loop: `runner.cli.app` parses the command line, `runner.cli.run` joins the hosts and calls the
job, `Lifecycle.run` in `runner/lifecycle.py` claims the directory and restores, and `BaseTrainer.run` in
`runner/trainer.py` is the loop.

The process first sets options of the C library's memory allocator. The C library reads them from the environment when a
process starts, so the process is executed again. On CPUs XLA allocates the memory of every step again, and the kernel
clears every page of it. With 4 KiB pages this takes a tenth of the step; transparent huge pages (2 MiB) make it faster.
On hosts without accelerators all threads share one heap, so that a job can keep the memory of a step for the next one
(`runner.process.keep_freed_memory`). The bits of a run do not depend on these options.
"""

import importlib
import os
import platform
import re
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from runner.accelerator import ACCELERATOR_DEVICES, GPU_PLUGINS, has_device
from runner.errors import explain_hiding_modules

_MODES = Path("/sys/kernel/mm/transparent_hugepage/enabled")  # such as `always [madvise] never`
_VARIABLE, _MIN_GLIBC = "GLIBC_TUNABLES", (2, 35)
_HUGE_PAGES, _ONE_HEAP = "glibc.malloc.hugetlb", "glibc.malloc.arena_max"  # options that are set to 1


def main() -> int:
    """Run the command line of this process and return its exit code."""

    def run() -> int:
        # This comes before other imports, which would otherwise be made twice.
        restart_with_allocator_options()
        if not has_device(ACCELERATOR_DEVICES) and any(map(find_spec, ("libtpu", *GPU_PLUGINS))):
            # JAX would look for a TPU or a GPU, and its plugins would print many lines that there is none.
            os.environ.setdefault("JAX_PLATFORMS", "cpu")
        return int(importlib.import_module("runner.cli.app").run_program())

    return explain_hiding_modules(run)


def restart_with_allocator_options() -> None:
    """Execute the same command again, in the same process, with allocator options in its environment.

    Returns without effect if they are set already, on other systems, and where they would change nothing. Call it
    before anything else is started.
    """
    modes = _MODES.read_text() if _MODES.exists() else ""
    has_only_cpus = os.environ.get("JAX_PLATFORMS") == "cpu" or not has_device(ACCELERATOR_DEVICES)
    variables = add_allocator_options(os.environ, " ".join(platform.libc_ver()), modes, has_only_cpus)
    if variables is not None and sys.executable:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], variables)


def add_allocator_options(
    variables: Mapping[str, str], c_library: str, modes: str, has_only_cpus: bool
) -> dict[str, str] | None:
    """Return the environment with options of the allocator, or None if they would change nothing.

    Args:
        variables: environment of the process. If it has an option for huge pages, no option is added.
        c_library: name and version, such as `glibc 2.36`.
        modes: content of the kernel's file of huge pages, with the active mode in brackets; empty if there is none.
        has_only_cpus: True if the process computes on no accelerator.
    """
    given = variables.get(_VARIABLE, "")
    version = re.fullmatch(r"glibc (\d+)\.(\d+).*", c_library)
    if version is None or (int(version[1]), int(version[2])) < _MIN_GLIBC or _HUGE_PAGES in given:
        return None
    # A process can only request huge pages in the mode `madvise`; in other modes the request has no effect.
    if "[madvise]" not in modes and not has_only_cpus:
        return None
    options = (_HUGE_PAGES, _ONE_HEAP) if has_only_cpus else (_HUGE_PAGES,)
    added = (f"{option}=1" for option in options if option not in given)
    return {**variables, _VARIABLE: ":".join(filter(None, (given, *added)))}


if __name__ == "__main__":
    sys.exit(main())
