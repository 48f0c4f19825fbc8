"""Entry point: it re-executes with huge pages where they have an effect, as the same process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from runner.__main__ import add_huge_page_tunable

MADVISE = "always [madvise] never\n"
REQUESTED = {"HOME": "/root", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


@pytest.mark.parametrize("c_library", ["glibc 2.35", "glibc 2.36", "glibc 3.0", "glibc 2.36.9000"])
def test_huge_pages_are_requested_in_the_madvise_mode(c_library):
    assert add_huge_page_tunable({"HOME": "/root"}, c_library, MADVISE) == REQUESTED


@pytest.mark.parametrize(
    ("variables", "c_library", "modes"),
    [
        ({}, "glibc 2.36", "[always] madvise never\n"),  # enabled for all processes
        ({}, "glibc 2.36", "always madvise [never]\n"),  # disabled for all processes
        ({}, "glibc 2.36", ""),
        ({}, "glibc 2.34", MADVISE),
        ({}, "glibc 1.99", MADVISE),
        ({}, "", MADVISE),
        ({}, "musl 1.2", MADVISE),
        (REQUESTED, "glibc 2.36", MADVISE),
        ({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}, "glibc 2.36", MADVISE),  # disabled by the user
        ({"GLIBC_TUNABLES": "glibc.malloc.perturb=0:glibc.malloc.hugetlb=2"}, "glibc 2.36", MADVISE),
    ],
)
def test_nothing_is_requested_where_it_has_no_effect(variables, c_library, modes):
    assert add_huge_page_tunable(variables, c_library, modes) is None


def test_other_tunables_are_kept():
    given = {"GLIBC_TUNABLES": "glibc.malloc.perturb=0"}
    expected = "glibc.malloc.perturb=0:glibc.malloc.hugetlb=1"
    assert add_huge_page_tunable(given, "glibc 2.36", MADVISE) == {"GLIBC_TUNABLES": expected}


def test_the_command_reexecutes_with_its_arguments_and_huge_pages(tmp_path):
    """Inspect a run from its job: the process has the pid that was started, and a large array has huge pages."""
    (tmp_path / "job_of_pages.py").write_text(
        """
import os, pathlib, re, sys
import numpy as np
from runner import RestoreableJob

class Job(RestoreableJob):
    def __init__(self, spec, document):
        array = np.ones(64 << 20, np.uint8)
        sizes = re.findall(r"AnonHugePages: +([1-9][0-9]*) kB", pathlib.Path("/proc/self/smaps").read_text())
        has_pages = sum(map(int, sizes)) * 1024 >= array.size // 2
        print(os.getpid(), os.environ.get("GLIBC_TUNABLES"), has_pages, sys.argv[-1], sep=";", flush=True)
        os._exit(0)
"""
    )
    spec = tmp_path / "spec.yaml"
    spec.write_text("name: pages\njob: job_of_pages:Job\ndirectory: unset\n")
    variables = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    variables["PYTHONPATH"] = str(Path(__file__).parents[1])
    process = subprocess.Popen(
        [sys.executable, "-m", "runner", str(spec), "--set", f"directory={tmp_path}/run with a space"],
        cwd=tmp_path,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    output, _ = process.communicate(timeout=120)
    modes = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    kernel = modes.read_text() if modes.exists() else ""
    asks = add_huge_page_tunable({}, os.confstr("CS_GNU_LIBC_VERSION") or "", kernel) is not None
    has_pages = asks or "[always]" in kernel
    tunables = "glibc.malloc.hugetlb=1" if asks else None
    assert output == f"{process.pid};{tunables};{has_pages};directory={tmp_path}/run with a space\n"
