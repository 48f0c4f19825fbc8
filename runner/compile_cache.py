"""The cache of compiled programs on this host's own disk, so that a restart compiles nothing again.

The cache is JAX's; two of its habits are not for jobs that are killed. It writes on process 0 only, as if all hosts
shared the directory; here each host has its own. And it writes an entry in place and never again, so a kill or a full
disk can leave half of one, which would be found unreadable and compiled anew at every start: here an entry that cannot
be read is deleted, and so written again.
"""

import os
from pathlib import Path
from typing import Any

import jax
from jax._src import compiler, distributed

from runner.storage import default_cache_directory

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
    jax.config.update("jax_compilation_cache_dir", str(directory))
    _heal_what_is_read(directory)
    _write_on_every_host()


def _heal_what_is_read(directory: Path) -> None:
    read = compiler._cache_read

    def read_or_delete(module_name: str, key: str, *arguments: Any) -> Any:
        found = read(module_name, key, *arguments)
        if found[0] is None:
            for entry in directory.glob(f"{key}-*"):
                entry.unlink(missing_ok=True)
        return found

    compiler._cache_read = read_or_delete  # type: ignore[assignment]


def _write_on_every_host() -> None:
    write, job = compiler._cache_write, distributed.global_state

    def write_as_first(*arguments: Any) -> None:
        own, job.process_id = job.process_id, 0
        try:
            write(*arguments)
        finally:
            job.process_id = own

    compiler._cache_write = write_as_first  # type: ignore[assignment]
