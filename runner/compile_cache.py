"""The cache of compiled programs on this host's own disk, so that a restart compiles nothing again.

The cache is JAX's; two of its habits are not for jobs that are killed. It writes on process 0 only, as if all hosts
shared the directory; here each host has its own. And it writes an entry in place, so a kill can leave half of one,
which would be found unreadable and compiled anew at every start: here a mark stands beside an entry while it is being
written, and what has kept its mark is deleted by the next process.
"""

import os
from pathlib import Path
from typing import Any

import jax
from jax._src import compiler, distributed

from runner.storage import default_cache_directory

_MARK = ".unfinished"
_MIN_COMPILE_SECONDS = 0.1


def open_compile_cache() -> None:
    """Keep compiled programs on disk. Where the environment names a directory, JAX alone is in charge of it.

    Called on every host before anything is compiled.
    """
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _MIN_COMPILE_SECONDS)
    if os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return
    directory = default_cache_directory() / "xla"
    directory.mkdir(parents=True, exist_ok=True)
    for mark in directory.glob(f"*{_MARK}"):
        for entry in directory.glob(f"{mark.name.removesuffix(_MARK)}-*"):
            entry.unlink(missing_ok=True)
        mark.unlink(missing_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(directory))
    _write_marked_on_every_host(directory)


def _write_marked_on_every_host(directory: Path) -> None:
    write, job = compiler._cache_write, distributed.global_state

    def write_marked(*arguments: Any) -> None:
        key, *_ = arguments
        mark = directory / f"{key}{_MARK}"
        own, job.process_id = job.process_id, 0
        try:
            mark.touch()
            write(*arguments)
            mark.unlink(missing_ok=True)
        finally:
            job.process_id = own

    compiler._cache_write = write_marked  # type: ignore[assignment]
