"""Compile cache: compiled programs on each host's own disk, and optionally shared in the run's directory.

JAX looks up a program by its key and compiles it on a miss. The key is a SHA-256 of the program (StableHLO), the
compile options, the versions of jaxlib and of the platform (libtpu, CUDA, driver), the XLA flags, and the topology with
the kind of its devices (on CPUs: the processor features). A different program, version or machine has a different key,
so an entry may be obsolete but never wrong.

1. Every entry begins with the SHA-256 of its key and its content. A torn or damaged entry, or one under another key, is
   a miss: the program is compiled and the entry replaced.
2. With `topology.compile_cache: directory` a program that this host lacks is read from `compiled/` in the run's
   directory. Once the attempt is claimed, a thread publishes there what this process has used or compiled and no
   process has published, as `<process>.<key>`. On CPUs every process has keys of its own. On accelerators JAX intends
   a program to have the same key on every process, so process 0 publishes first. A fenced attempt publishes nothing
   more; an entry that it had begun to write is still correct, because its name determines its content.
3. At most 64 programs of each process are kept: an attempt that lives for ten minutes deletes those that it has not
   used. If the store cannot be reached, a warning is printed and programs are compiled.

A program is code, while everything else in a run's directory is data. A person who can write there could run code
on the hosts, hence the opt-in. The digest detects damage, not an attack.
"""

import contextlib
import hashlib
import os
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import jax

from runner.console import warn
from runner.errors import FencedError
from runner.jax_internals import compilation_cache, compiler, distributed
from runner.storage import ABSENT, LocalStore, Store, Version, create_file, default_cache_directory

_MIN_COMPILE_SECONDS = 0.1
_HEAD_START_SECONDS = 5.0  # of process 0, which publishes the programs that have the same key everywhere
_PERIOD_SECONDS = 1.0
_RETRY_SECONDS = 60.0
_PRUNE_SECONDS = 600.0
_MOST_ENTRIES = 64  # per process
_DIRECTORY = "compiled"
_ENVIRONMENT = "JAX_COMPILATION_CACHE_DIR"
_NAME = re.compile(r"(\d+)\.([^/]+-[0-9a-f]{64})")
_DIGEST_BYTES = 32


class CompileCache:
    """Compiled programs of one process, by JAX's key. JAX calls `get` and `put` from any thread."""

    def __init__(self, shared: Store | None = None):
        """Create the cache; `shared` is the run's directory if programs are shared there."""
        # Programs of all runs on this host are in one place, because the key alone identifies a program.
        self._host = LocalStore(default_cache_directory() / _DIRECTORY)
        self._shared = shared
        self._changed = threading.Condition()
        self._listed: dict[str, list[str]] | None = None  # names in the run's directory, by key
        self._damaged: dict[str, tuple[str, Version]] = {}  # name and version of a damaged entry, by key
        self._used, self._unpublished = set[str](), set[str]()
        self._publisher: threading.Thread | None = None
        self._is_open = self._is_closing = False
        self._num_compiled = self._num_found = 0

    def get(self, key: str) -> bytes | None:
        """Return a compiled program, or None on a miss. Called by JAX."""
        program = self._read_host(key)
        if program is None and self._shared is not None:
            program = self._fetch(self._shared, key)
        if program is not None:
            self._record_use(key, num_found=1)
        return program

    def put(self, key: str, program: bytes) -> None:
        """Store a compiled program. Called by JAX, which turns an `OSError` into a warning."""
        try:
            self._host.write(key, _seal(key, program))
        finally:
            # Counted even if the disk is full, because the program was compiled.
            self._record_use(key, num_compiled=1)

    def open(self) -> None:
        """Make JAX use this cache. Called on every process before anything is compiled."""
        if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
            jax.config.update("jax_persistent_cache_min_compile_time_secs", _MIN_COMPILE_SECONDS)
        # A user who has set up JAX's own cache keeps it.
        if os.environ.get(_ENVIRONMENT):
            return
        jax.config.update("jax_compilation_cache_dir", str(self._host.root))
        if self._shared is not None:
            # XLA's own caches are on this host, and their path would be part of every key.
            jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
        # JAX has no public way to plug in a cache of one's own.
        compilation_cache.get_file_cache = lambda path: (self, path)  # type: ignore[assignment,return-value]
        write, state = compiler._cache_write, distributed.global_state

        # JAX writes on process 0 only, as if all hosts shared the directory. Here each host has its own.
        def write_as_first_process(*arguments: Any) -> None:
            process_id, state.process_id = state.process_id, 0
            try:
                write(*arguments)
            finally:
                state.process_id = process_id

        compiler._cache_write = write_as_first_process  # type: ignore[assignment]
        self._is_open = True

    def get_counts(self) -> dict[str, int]:
        """Return the numbers of kept programs compiled and found so far; empty where JAX manages the cache itself."""
        return {"compiled": self._num_compiled, "from_cache": self._num_found} if self._is_open else {}

    def publish(self, raise_if_fenced: Callable[[], None], process: int) -> None:
        """Copy used programs that the run's directory lacks to that directory from now on, in the background."""
        if self._shared is None:
            return
        if directory := os.environ.get(_ENVIRONMENT):
            if process == 0:
                warn(
                    f"topology.compile_cache: {_ENVIRONMENT} is {directory}, so JAX keeps programs there and none is "
                    "shared; unset it to share them"
                )
            return
        arguments = (self._shared, raise_if_fenced, process)
        self._publisher = threading.Thread(target=self._publish, args=arguments, name="programs", daemon=True)
        self._publisher.start()

    def close(self, seconds: float) -> None:
        """Give process 0 up to `seconds` to publish what is left, before the process ends. Never raises."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        if self._publisher is not None:
            self._publisher.join(seconds)

    def _record_use(self, key: str, num_compiled: int = 0, num_found: int = 0) -> None:
        with self._changed:
            self._num_compiled += num_compiled
            self._num_found += num_found
            self._used.add(key)
            self._unpublished.add(key)
            self._changed.notify()

    def _read_host(self, key: str) -> bytes | None:
        with contextlib.suppress(OSError):
            return _unseal(key, self._host.read(key))
        return None

    def _fetch(self, shared: Store, key: str) -> bytes | None:
        """Return a program from the run's directory and copy it to this host, or None if there is no good one."""
        try:
            if self._listed is None:
                self._listed = _list_entries(shared)
            for name in self._listed.get(key, []):
                content, version = shared.read_versioned(name)
                program = _unseal(key, content)
                if program is not None:
                    with contextlib.suppress(OSError):  # On a full disk the next start downloads again.
                        self._host.write(key, content)
                    return program
                if version != ABSENT:
                    self._damaged[key] = (name, version)
                    warn(f"{shared.url}/{name} is damaged; the program is compiled again")
        except OSError as error:
            self._listed = {}  # Do not ask a store that is down for each program.
            warn(f"compiled programs cannot be read and are compiled again: {error}")
        return None

    def _publish(self, shared: Store, raise_if_fenced: Callable[[], None], process: int) -> None:
        """Publish programs, and prune once. Runs on the publisher's thread until `close`."""
        # By then a job has compiled what it needs, so that an entry it has not used belongs to an earlier version.
        prune_at, has_warned = time.monotonic() + _PRUNE_SECONDS, False
        while True:
            self._wait(max(prune_at - time.monotonic(), 0.0), until_used=True)
            try:
                if self._unpublished:
                    # A pause collects the programs that are compiled together into one listing of the store.
                    self._wait(_PERIOD_SECONDS if process == 0 else _HEAD_START_SECONDS)
                    if self._is_closing and process != 0:  # Otherwise all processes would publish the same programs.
                        return
                    raise_if_fenced()
                    self._publish_missing(shared, process)
                if time.monotonic() > prune_at:
                    raise_if_fenced()
                    # Names that begin with a dot are left over from interrupted writes.
                    prefixes = (f"{process}.", f".{process}.")
                    own = [name for name in shared.list_names(_DIRECTORY) if name.startswith(prefixes)]
                    unused = [name for name in own if name.removeprefix(f"{process}.") not in self._used]
                    for name in unused if len(own) > _MOST_ENTRIES else []:
                        shared.remove(f"{_DIRECTORY}/{name}")
                    prune_at = threading.TIMEOUT_MAX
            except FencedError:
                return
            except OSError as error:
                if not has_warned:
                    warn(f"compiled programs cannot be published, will be tried again: {error}")
                has_warned = True
                self._wait(_RETRY_SECONDS)
            if self._is_closing:
                return

    def _wait(self, seconds: float, until_used: bool = False) -> None:
        """Wait for `seconds`, but not beyond `close`; with `until_used` only until there is something to publish."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closing or (until_used and self._unpublished), seconds)

    def _publish_missing(self, shared: Store, process: int) -> None:
        # Listed again, because another process may have published the same program meanwhile.
        present = _list_entries(shared)
        for key in sorted(self._unpublished):
            program = self._read_host(key)
            with contextlib.suppress(FileExistsError):
                if program is not None and key in self._damaged:
                    # Only the damaged version is replaced, in case another process has replaced it already.
                    name, version = self._damaged[key]
                    shared.write_if(name, _seal(key, program), version)
                elif program is not None and key not in present:
                    create_file(shared, f"{_DIRECTORY}/{process}.{key}", _seal(key, program))
            with self._changed:
                self._damaged.pop(key, None)
                self._unpublished.discard(key)


def _list_entries(shared: Store) -> dict[str, list[str]]:
    """Return the names of entries in the run's directory by key, each key's in the order of the processes."""
    found: dict[str, list[str]] = {}
    matches = filter(None, map(_NAME.fullmatch, shared.list_names(_DIRECTORY)))
    # Every host tries the entries in the same order, so that all of them run the same program.
    for match in sorted(matches, key=lambda match: int(match[1])):
        found.setdefault(match[2], []).append(f"{_DIRECTORY}/{match[0]}")
    return found


def _seal(key: str, program: bytes) -> bytes:
    return _compute_digest(key, program) + program


def _unseal(key: str, content: bytes) -> bytes | None:
    program = content[_DIGEST_BYTES:]
    return program if content[:_DIGEST_BYTES] == _compute_digest(key, program) else None


def _compute_digest(key: str, program: bytes) -> bytes:
    # The key is part of the digest: an entry that was renamed does not fit another program.
    digest = hashlib.sha256(key.encode())
    digest.update(program)
    return digest.digest()
