"""Entry point: it re-executes with options of the allocator where they have an effect, as the same process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from runner.__main__ import add_allocator_options

MADVISE, ALWAYS, NEVER = "always [madvise] never\n", "[always] madvise never\n", "always madvise [never]\n"
HUGE = "glibc.malloc.hugetlb=1"
ONE_HEAP = "glibc.malloc.arena_max=1"


@pytest.mark.parametrize("c_library", ["glibc 2.35", "glibc 2.36", "glibc 3.0", "glibc 2.36.9000"])
@pytest.mark.parametrize(
    ("modes", "has_only_cpus", "expected"),
    [
        (MADVISE, False, HUGE),
        (MADVISE, True, f"{HUGE}:{ONE_HEAP}"),
        (ALWAYS, True, f"{HUGE}:{ONE_HEAP}"),
        (NEVER, True, f"{HUGE}:{ONE_HEAP}"),
        ("", True, f"{HUGE}:{ONE_HEAP}"),
    ],
)
def test_options_are_added_where_they_have_an_effect(c_library, modes, has_only_cpus, expected):
    found = add_allocator_options({"HOME": "/root"}, c_library, modes, has_only_cpus)
    assert found == {"HOME": "/root", "GLIBC_TUNABLES": expected}
    assert add_allocator_options(found, c_library, modes, has_only_cpus) is None  # the process starts again only once


@pytest.mark.parametrize(
    ("tunables", "c_library", "modes", "has_only_cpus"),
    [
        (None, "glibc 2.36", ALWAYS, False),  # enabled for all processes
        (None, "glibc 2.36", NEVER, False),  # disabled for all processes
        (None, "glibc 2.36", "", False),
        *((None, c_library, MADVISE, True) for c_library in ("glibc 2.34", "glibc 1.99", "", "musl 1.2")),
        *((HUGE, "glibc 2.36", MADVISE, has_only_cpus) for has_only_cpus in (False, True)),
        ("glibc.malloc.hugetlb=0", "glibc 2.36", MADVISE, True),  # disabled by the user
        ("glibc.malloc.perturb=0:glibc.malloc.hugetlb=2", "glibc 2.36", MADVISE, True),
    ],
)
def test_nothing_is_added_where_it_has_no_effect(tunables, c_library, modes, has_only_cpus):
    variables = {} if tunables is None else {"GLIBC_TUNABLES": tunables}
    assert add_allocator_options(variables, c_library, modes, has_only_cpus) is None


def test_other_tunables_are_kept():
    given = {"GLIBC_TUNABLES": "glibc.malloc.perturb=0:glibc.malloc.arena_max=4"}
    found = add_allocator_options(given, "glibc 2.36", MADVISE, True)
    assert found == {"GLIBC_TUNABLES": f"{given['GLIBC_TUNABLES']}:{HUGE}"}


def test_the_command_reexecutes_with_its_arguments_and_options(tmp_path):
    """Inspect a run from its job: it has the pid that was started, and large arrays are on kept huge pages."""
    (tmp_path / "job_of_pages.py").write_text(
        """
import os, pathlib, re, resource, sys, threading
import numpy as np
from runner import RestoreableJob
from runner.process import keep_freed_memory

class Job(RestoreableJob):
    def __init__(self, spec, document):
        array = np.ones(64 << 20, np.uint8)
        sizes = re.findall(r"AnonHugePages: +([1-9][0-9]*) kB", pathlib.Path("/proc/self/smaps").read_text())
        has_pages = sum(map(int, sizes)) * 1024 >= array.size // 2
        del array
        keep_freed_memory(64 << 20)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(4):
            thread = threading.Thread(target=np.ones, args=(64 << 20, np.uint8))
            thread.start()
            thread.join()
        is_kept = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 64  # the pages of one array
        print(os.getpid(), os.environ.get("GLIBC_TUNABLES"), has_pages, is_kept, sys.argv[-1], sep=";", flush=True)
        os._exit(0)
"""
    )
    spec = tmp_path / "spec.yaml"
    spec.write_text("name: pages\njob: job_of_pages:Job\ndirectory: unset\n")
    variables = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    variables |= {"PYTHONPATH": str(Path(__file__).parents[1]), "JAX_PLATFORMS": "cpu"}
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
    added = add_allocator_options({}, os.confstr("CS_GNU_LIBC_VERSION") or "", kernel, True)
    has_pages = "[always]" in kernel or (added is not None and "[madvise]" in kernel)
    tunables = f"{HUGE}:{ONE_HEAP}" if added else None
    assert output == f"{process.pid};{tunables};{has_pages};{added is not None};directory={tmp_path}/run with a space\n"
