"""Store on a disk, and the directory for caches of this machine.

A file is published in three steps: it is written under a temporary name beside its target, flushed to the disk, and
then given its name by one atomic call. The directory is flushed after that, so that the name survives a power cut too.

Network and object file systems (gcsfuse, blobfuse, some configurations of Lustre) lack some calls of a local disk. A
missing call is recognised by its error code at each use, so that two directories may differ:

- hard links: `_create_once` takes turns by a claim file and renames instead;
- locks (`flock`): `try_lock` says that there is none; an append is one write with `O_APPEND` in either case;
- flush of a directory: `fsync` leaves it out; a name is then as durable as the file system makes it by itself;
- stale handles (ESTALE): `retry_stale` looks the file up again.

Nothing replaces the rest: creation with O_EXCL, rename over a file, rename of a directory with its content, appends,
and the flush of a file. `runner.attempts.environment.probe_file_system` tries all of it at the start of a job.
"""

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

from runner.storage.store import (
    ABSENT,
    STALE_TRIES,
    ChangedError,
    FileInfo,
    Result,
    Store,
    Version,
    WrongKindError,
    compute_chunked_crc32c,
    fsync,
    is_missing_call,
    make_directory,
    open_descriptor,
    open_file,
    retry_stale,
    translate_errors,
)

_RECORD_BYTES_MAX = 1 << 26  # of a manifest, the largest record: some megabytes for the largest models
_CHUNK_BYTES = 1 << 18
_REMOVE_TRIES = 10
_NUM_FLUSHES = 8
_CLAIM_SECONDS = 10.0  # a claim that does not change for so long is that of a process that was killed
_POLL_SECONDS = 0.05
# A file system without hard links may report that a file has too many.
NO_LINK = (errno.EMLINK, errno.EXDEV)


def default_cache_directory() -> Path:
    """Return $RUNNER_CACHE, else $XDG_CACHE_HOME/runner, else ~/.cache/runner."""
    if directory := os.environ.get("RUNNER_CACHE"):
        return Path(directory)
    if directory := os.environ.get("XDG_CACHE_HOME"):
        return Path(directory) / "runner"
    try:
        return Path.home() / ".cache" / "runner"
    except RuntimeError:  # a container's user may have no home
        return Path(tempfile.gettempdir()) / f"runner-{os.getuid()}"


class LocalStore:
    """`Store` of a directory on a disk that all hosts of the job share, or on this host's own disk."""

    def __init__(self, root: Path):
        self.root = root
        self.url = str(root)

    def open(self, name: str) -> BinaryIO:
        """Open a file for reading. Raises `WrongKindError` for anything else, without waiting for a pipe."""
        path = self.root / name
        with translate_errors(path):
            return open_file(path)

    def read(self, name: str) -> bytes:
        return self._read_open(name, lambda file: file.read())

    def _read_open(self, name: str, read: Callable[[BinaryIO], Result]) -> Result:
        """Return the result of `read` for an open file, which is opened again if its handle is stale."""

        def open_and_read() -> Result:
            with self.open(name) as file, translate_errors(self.root / name):
                return read(file)

        return retry_stale(open_and_read)

    def lines(self, name: str) -> Iterator[bytes]:
        """Iterate over the lines of a file, each with its newline; over nothing if the file is missing.

        A file that is replaced meanwhile is read to its end, and an error if its handle goes stale before that.
        """
        try:
            file = self.open(name)
        except FileNotFoundError:
            return
        with contextlib.ExitStack() as opened:
            opened.enter_context(file)
            inode, offset, num_failures = os.fstat(file.fileno()).st_ino, 0, 0
            while True:
                try:
                    with translate_errors(self.root / name):
                        for line in file:
                            yield line
                            offset, num_failures = offset + len(line), 0
                    return
                except OSError as error:
                    num_failures += 1
                    if error.errno != errno.ESTALE or num_failures == STALE_TRIES:
                        raise
                    file = opened.enter_context(self.open(name))
                    if os.fstat(file.fileno()).st_ino != inode:
                        raise
                    file.seek(offset)

    def read_versioned(self, name: str) -> tuple[bytes, Version]:
        try:
            return self._read_open(name, lambda file: (file.read(), _get_version(os.fstat(file.fileno()))))
        except FileNotFoundError:
            return b"", ABSENT

    def read_range(self, name: str, start: int, stop: int, version: Version | None) -> bytes:
        path = self.root / name

        def read(file: BinaryIO) -> bytes:
            if version not in (None, _get_version(os.fstat(file.fileno()))):
                raise ChangedError(f"{path} is no longer the file that it was")
            file.seek(start)
            return file.read(stop - start)

        content = self._read_open(name, read)
        if len(content) != stop - start:
            raise ChangedError(f"{path} ends at {start + len(content)} bytes, needs {stop}")
        return content

    def write(self, name: str, content: bytes) -> None:
        self.write_chunks(name, [content])

    def write_chunks(self, name: str, chunks: Iterable[bytes]) -> None:
        """Replace `name` like `write`, by content that need not be in memory at once."""
        path = self.root / name
        with translate_errors(path), _write_temporary(path, chunks) as temporary:
            # A rename within one directory is atomic, and the flush of the directory makes it durable.
            os.replace(temporary, path)
            fsync(path.parent)

    def write_if(self, name: str, content: bytes, version: Version) -> Version:
        path = self.root / name
        with translate_errors(path), _write_temporary(path, [content]) as temporary, contextlib.ExitStack() as stack:
            new_version = _get_version(temporary.stat())
            if version == ABSENT:
                _create_once(temporary, path)
            else:
                # No call replaces a file on a condition, so writers take turns.
                stack.enter_context(take_turns(path))
                if self.read_versioned(name)[1] != version:
                    raise FileExistsError(f"{path} has changed")
                os.replace(temporary, path)
            fsync(path.parent)
            return new_version

    def create_from(self, directory: str, name: str, content: bytes) -> None:
        """Create `name` by way of a temporary file in `directory`, which must exist until this is done.

        Raises `FileNotFoundError` if `directory` is gone, and `FileExistsError` if `name` already exists.
        """
        path, beside = self.root / name, self.root / directory / Path(name).name
        with translate_errors(beside), _write_temporary(beside, [content], make_parents=False) as temporary:
            # This fails if another process has renamed `directory` meanwhile: this is how a commit and the retirement
            # of the same step exclude each other.
            _create_once(temporary, path)
            fsync(path.parent)

    def exists(self, name: str) -> bool:
        """Return True if there is anything under `name`, a broken link included."""
        path = self.root / name
        try:
            with translate_errors(path):
                retry_stale(path.lstat)
        except (FileNotFoundError, WrongKindError):
            return False
        return True

    def list_names(self, prefix: str) -> list[str]:
        path = self.root / prefix
        try:
            with translate_errors(path):
                return retry_stale(lambda: os.listdir(path))
        except FileNotFoundError:
            return []

    def list_sizes(self, prefix: str) -> dict[str, int]:
        top = self.root / prefix

        def raise_unless_gone(error: OSError) -> None:
            # A directory that disappears while the tree is walked is left out of the result.
            if not isinstance(error, FileNotFoundError):
                raise error

        with translate_errors(top):
            walk = os.walk(top, onerror=raise_unless_gone)
            paths = (Path(directory) / name for directory, _, names in walk for name in names)
            files = ((path.relative_to(top).as_posix(), path) for path in paths if path.is_file())
            return {name: path.stat().st_size for name, path in sorted(files)}

    def list_files(self, start: str) -> dict[str, FileInfo]:
        parent = start.rpartition("/")[0]
        names = (f"{parent}/{name}" if parent else name for name in self.list_sizes(parent))
        with translate_errors(self.root / parent):
            found = {name: (self.root / name).stat() for name in names if name.startswith(start)}
        return {name: FileInfo(status.st_size, _get_version(status)) for name, status in found.items()}

    def compute_digest(self, name: str) -> str:
        return self._read_open(name, lambda file: compute_chunked_crc32c(iter(lambda: file.read(_CHUNK_BYTES), b"")))

    def upload(self, source: Path, name: str, deadline_seconds: float) -> None:
        path = self.root / name
        with translate_errors(path):
            make_directory(path.parent)
            shutil.copyfile(source, path)
            fsync(path)
            fsync(path.parent)

    def flush_tree(self, prefix: str, is_included: Callable[[str], bool] = lambda name: True) -> None:
        """Flush files of other libraries below `prefix`, and its name in every directory above it, to the disk.

        Files whose name, relative to `prefix`, is not included are left out.
        """
        top = self.root / prefix
        with translate_errors(top):
            tree = [(Path(directory), names) for directory, _, names in os.walk(top)]
            files = [directory / name for directory, names in tree for name in names]
            files = [path for path in files if is_included(path.relative_to(top).as_posix())]
            above = [path for path in top.parents if path.is_relative_to(self.root)]
            # Files come before the directories that name them, as after a rename. The disk orders the requests.
            with ThreadPoolExecutor(_NUM_FLUSHES, thread_name_prefix="flush") as pool:
                list(pool.map(fsync, files))
                list(pool.map(fsync, [*(directory for directory, _ in tree), *above]))

    def flush_names(self, prefix: str) -> None:
        """Make durable which files and directories are directly below `prefix`."""
        path = self.root / prefix
        with translate_errors(path):
            fsync(path)

    def move_tree(self, source: str, target: str) -> None:
        """Rename `source` atomically. Raises `OSError` if `target` is there and not empty."""
        path = self.root / target
        with translate_errors(path):
            make_directory(path.parent)
            (self.root / source).rename(path)
            # A checkpoint that was moved aside must not be back in its place after a power cut.
            for directory in {path.parent, (self.root / source).parent}:
                fsync(directory)

    def remove(self, name: str) -> None:
        path = self.root / name
        with translate_errors(path):
            path.unlink(missing_ok=True)

    def remove_tree(self, prefix: str) -> None:
        directory = self.root / prefix
        with translate_errors(directory):
            # A link is deleted itself and never followed: it may lead out of the run's directory.
            if directory.is_symlink() or not directory.is_dir():
                directory.unlink(missing_ok=True)
                return
            # A dying attempt may still be writing into the tree, so one pass may leave files that appeared behind it.
            for _ in range(_REMOVE_TRIES):
                shutil.rmtree(directory, ignore_errors=True)
                if not directory.exists():
                    return
                time.sleep(0.1)
            shutil.rmtree(directory)  # the last pass raises its error


class ConfinedStore(LocalStore):
    """Directory below `top` as a server or a report reads it, which follows no symbolic link below `top`.

    Otherwise anyone who can write to a run's directory could make the server show any file of this user. Each part of a
    path is opened relative to its parent, so a link that is created meanwhile is not followed either. `top` itself may
    be a link. A file that is read whole has a size limit, which no record of a run exceeds.
    """

    def __init__(self, top: Path, path: str = ""):
        super().__init__(top / path)
        self._top, self._path = top, path

    def _open_part(self, name: str, flags: int) -> int:
        path = self.root / name
        descriptor = os.open(self._top, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        parts = Path(self._path, name).parts
        for index, part in enumerate(parts, start=1):
            try:
                if part == ".." or os.sep in part:
                    raise WrongKindError(f"{path} is outside of {self._top}")
                mode = os.stat(part, dir_fd=descriptor, follow_symlinks=False).st_mode
                if stat.S_ISLNK(mode):
                    raise WrongKindError(f"{path} is behind a symbolic link, which is not followed here")
                # Opening a device may have side effects, so the kind of the file is checked first.
                if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
                    raise WrongKindError(f"{path} is neither a file nor a directory")
                more = flags if index == len(parts) else os.O_DIRECTORY
                inner = os.open(
                    part, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | more, dir_fd=descriptor
                )
            finally:
                os.close(descriptor)
            descriptor = inner
        return descriptor

    @contextlib.contextmanager
    def _open_directory(self, name: str) -> Iterator[int]:
        with translate_errors(self.root / name):
            descriptor = self._open_part(name, os.O_DIRECTORY)
            try:
                yield descriptor
            finally:
                os.close(descriptor)

    def open(self, name: str) -> BinaryIO:
        path = self.root / name
        with translate_errors(path):
            return open_descriptor(self._open_part(name, 0), path)

    def read(self, name: str) -> bytes:
        """Return the content of `name`. Raises `WrongKindError` if it is too large for a record."""
        with self.open(name) as file, translate_errors(self.root / name):
            content = file.read(_RECORD_BYTES_MAX + 1)
        if len(content) > _RECORD_BYTES_MAX:
            raise WrongKindError(f"{self.root / name} is larger than {_RECORD_BYTES_MAX} bytes, which no record is")
        return content

    def list_kinds(self, prefix: str) -> dict[str, bool]:
        """Return the names directly below `prefix`, each with True if it is a directory; none if it does not exist."""
        try:
            with self._open_directory(prefix) as descriptor, os.scandir(descriptor) as entries:
                return {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries}
        except FileNotFoundError:
            return {}

    def list_names(self, prefix: str) -> list[str]:
        return list(self.list_kinds(prefix))

    def exists(self, name: str) -> bool:
        try:
            return Path(name).name in self.list_kinds(str(Path(name).parent))
        except WrongKindError:
            return False

    def list_files(self, start: str) -> dict[str, FileInfo]:
        parent = start.rpartition("/")[0]
        found = {}
        try:
            with self._open_directory(parent) as descriptor:
                for top, _, names, inner in os.fwalk(".", dir_fd=descriptor):
                    for name in names:
                        with contextlib.suppress(FileNotFoundError):
                            status = os.stat(name, dir_fd=inner, follow_symlinks=False)
                            if stat.S_ISREG(status.st_mode):
                                path = Path(parent, top, name).as_posix()
                                found[path] = FileInfo(status.st_size, _get_version(status))
        except FileNotFoundError:
            return {}
        return {name: found[name] for name in sorted(found) if name.startswith(start)}

    def list_sizes(self, prefix: str) -> dict[str, int]:
        start = f"{prefix}/" if prefix else ""
        return {name.removeprefix(start): info.size_bytes for name, info in self.list_files(start).items()}


def as_local(store: Store) -> LocalStore:
    """Return the store of a directory on a disk with the methods that only a disk has."""
    if isinstance(store, LocalStore):
        return store
    assert store.root is not None, "a bucket has no files to open"
    return LocalStore(store.root)


def _get_version(status: os.stat_result) -> Version:
    # A file is only replaced by a rename, which changes the inode; the time detects a reused inode.
    return f"{status.st_ino}.{status.st_mtime_ns}"


@contextlib.contextmanager
def _write_temporary(path: Path, chunks: Iterable[bytes], make_parents: bool = True) -> Iterator[Path]:
    """Yield a flushed temporary file beside `path` that holds `chunks`; delete its temporary name afterwards."""
    if make_parents:
        make_directory(path.parent)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:  # a failed write must not leave its part behind: the disk may be full
        with retry_stale(lambda: temporary.open("wb")) as file:
            file.writelines(chunks)
            file.flush()
            os.fsync(file.fileno())
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


# Creation and locks.


def _create_once(temporary: Path, path: Path) -> None:
    """Give a complete file its name `path`, unless something has that name already. Atomic among all processes.

    With hard links the kernel decides. Without them a process first creates `.<name>.claim`, which O_EXCL allows only
    one process, then checks that `path` is free and renames `temporary`. In both cases `path` appears with its whole
    content, and not at all once the directory of `temporary` was renamed. A claim whose process was killed is removed
    by the next process, after `_CLAIM_SECONDS`. A process that is suspended for longer than that, exactly between its
    last check and its rename, replaces the file of another. Attempts and commits are safe from that too: attempts by
    the id in their claim (`Fence.check`), commits because a newer attempt has renamed the directory.

    Raises `FileExistsError`, or `FileNotFoundError` if `temporary` or the directory is gone.
    """
    try:
        os.link(temporary, path)
    except OSError as error:
        if not is_missing_call(error) and error.errno not in NO_LINK:
            raise
    else:
        return
    with _claim(path) as is_own:
        # In this order: a process that had the claim before may have created the file meanwhile.
        if os.path.lexists(path) or not is_own():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        os.rename(temporary, path)


@contextlib.contextmanager
def take_turns(path: Path) -> Iterator[None]:
    """Exclude other processes that replace `path` on a condition, for as long as the context lasts."""
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        if try_lock(descriptor, fcntl.LOCK_EX):
            yield
        else:
            with _claim(path):
                yield
    finally:
        os.close(descriptor)


def try_lock(descriptor: int, operation: int) -> bool:
    """Lock an open file with `flock`; return False if the file system has no locks.

    With `LOCK_NB` this raises `BlockingIOError` if another process holds the lock.
    """
    try:
        fcntl.flock(descriptor, operation)
    except OSError as error:
        if not is_missing_call(error) and error.errno != errno.ENOLCK:
            raise
        return False
    return True


@contextlib.contextmanager
def _claim(path: Path) -> Iterator[Callable[[], bool]]:
    """Hold the claim of a name, and yield a function that returns True if it is still held."""
    claim, own = path.with_name(f".{path.name}.claim"), uuid.uuid4().hex.encode()
    seen, since = None, time.monotonic()
    while True:
        try:
            descriptor = os.open(claim, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            break
        except FileExistsError:
            holder = _read_or_none(claim)
            if holder != seen:
                seen, since = holder, time.monotonic()
            elif time.monotonic() - since > _CLAIM_SECONDS:
                claim.unlink(missing_ok=True)
            time.sleep(_POLL_SECONDS)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(own)
        yield lambda: _read_or_none(claim) == own
    finally:
        if _read_or_none(claim) == own:
            claim.unlink(missing_ok=True)


def _read_or_none(path: Path) -> bytes | None:
    def read() -> bytes:
        with open_file(path) as file:
            return file.read()

    try:
        return retry_stale(read)
    except (FileNotFoundError, WrongKindError):
        return None
