"""Large memory in pages of 2 MiB, where Linux gives them to those who ask. Imports nothing that is slow.

XLA takes the memory of a step on a CPU anew for each step, and the kernel faults it in: in pages of 4 KiB that is a
tenth of the step. The C library asks for larger ones only if its environment says so when the process starts. Bits do
not depend on it, and a process needs hardly more memory.
"""

import os
import platform
import re
import sys
from collections.abc import Mapping
from pathlib import Path

_MODES = Path("/sys/kernel/mm/transparent_hugepage/enabled")  # such as `always [madvise] never`
_TUNABLES, _TUNABLE = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"
_SINCE = (2, 35)  # of the C library


def restart_with_huge_pages() -> None:
    """Become the same command, with the same process id, in an environment that asks for them. Returns where it does.

    And where there is nobody to ask: on other systems, where the kernel gives them to all or to nobody, and where the
    user has said something of them. To be called before anything else is begun.
    """
    if not _MODES.exists():
        return
    variables = add_huge_page_tunable(os.environ, " ".join(platform.libc_ver()), _MODES.read_text())
    if variables is not None and sys.executable:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], variables)


def add_huge_page_tunable(variables: Mapping[str, str], c_library: str, modes: str) -> dict[str, str] | None:
    """The variables with the request for huge pages; None if they have it, or if it would change nothing.

    `c_library` is such as `glibc 2.36`, and `modes` what the kernel says, the present one in brackets.
    """
    given = variables.get(_TUNABLES, "")
    version = re.fullmatch(r"glibc (\d+)\.(\d+).*", c_library)
    if _TUNABLE in given or "[madvise]" not in modes or version is None:
        return None
    if (int(version[1]), int(version[2])) < _SINCE:
        return None
    return {**variables, _TUNABLES: ":".join(filter(None, (given, f"{_TUNABLE}=1")))}
