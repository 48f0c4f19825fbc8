"""A store on a disk. Publish = write aside, flush to the disk, then one atomic name.

Where this machine keeps what it can make again.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

import google_crc32c

from runner.storage.store import (
    ABSENT,
    ChangedError,
    FileInfo,
    Version,
    WrongKindError,
    make_directory,
    open_file,
    translate_errors,
)


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


_CHUNK_BYTES = 1 << 18
_REMOVE_TRIES = 10


class LocalStore:
    """A directory on a disk that all hosts of the job share, or that is this host's own."""

    def __init__(self, root: Path):
        self.root = root
        self.url = str(root)

    def read(self, name: str) -> bytes:
        """See `Store`."""
        path = self.root / name
        with translate_errors(path), open_file(path) as file:
            return file.read()

    def lines(self, name: str) -> Iterator[bytes]:
        """The lines of a file as they are asked for, each with its newline; none if it is missing."""
        path = self.root / name
        with contextlib.suppress(FileNotFoundError), translate_errors(path), open_file(path) as file:
            yield from file

    def read_versioned(self, name: str) -> tuple[bytes, Version]:
        """See `Store`."""
        path = self.root / name
        try:
            with translate_errors(path), open_file(path) as file:
                return file.read(), _version(os.fstat(file.fileno()))
        except FileNotFoundError:
            return b"", ABSENT

    def read_range(self, name: str, start: int, stop: int, version: Version) -> bytes:
        """See `Store`."""
        path = self.root / name
        with translate_errors(path), open_file(path) as file:
            if _version(os.fstat(file.fileno())) != version:
                raise ChangedError(f"{path} is no longer the file that it was")
            file.seek(start)
            content = file.read(stop - start)
        if len(content) != stop - start:
            raise ChangedError(f"{path} ends at {start + len(content)} bytes, needs {stop}")
        return content

    def write(self, name: str, content: bytes) -> None:
        """See `Store`."""
        self.write_chunks(name, [content])

    def write_chunks(self, name: str, chunks: Iterable[bytes]) -> None:
        """Like `write`, for content that need not be in memory at once."""
        path = self.root / name
        with translate_errors(path), _written_aside(path, chunks) as aside:
            os.replace(aside, path)
            fsync(path.parent)

    def write_if(self, name: str, content: bytes, version: Version) -> Version:
        """See `Store`."""
        path = self.root / name
        with translate_errors(path), _written_aside(path, [content]) as aside, contextlib.ExitStack() as stack:
            new = _version(aside.stat())
            if version == ABSENT:
                os.link(aside, path)
            else:
                stack.enter_context(_locked(path.parent))
                if self.read_versioned(name)[1] != version:
                    raise FileExistsError(f"{path} has changed")
                os.replace(aside, path)
            fsync(path.parent)
            return new

    def create_from(self, directory: str, name: str, content: bytes) -> None:
        """Create `name` by way of a file in `directory`, which must be there until it is done.

        Raises `FileNotFoundError` if `directory` is gone, `FileExistsError` if `name` is there.
        """
        path, beside = self.root / name, self.root / directory / Path(name).name
        with translate_errors(beside), _written_aside(beside, [content], make_parents=False) as aside:
            os.link(aside, path)
            fsync(path.parent)

    def exists(self, name: str) -> bool:
        """See `Store`."""
        path = self.root / name
        try:
            with translate_errors(path):
                path.lstat()
        except (FileNotFoundError, WrongKindError):
            return False
        return True

    def list_names(self, prefix: str) -> list[str]:
        """See `Store`."""
        path = self.root / prefix
        try:
            with translate_errors(path):
                return os.listdir(path)
        except FileNotFoundError:
            return []

    def list_sizes(self, prefix: str) -> dict[str, int]:
        """See `Store`."""
        top = self.root / prefix
        with translate_errors(top):
            paths = (Path(directory) / name for directory, _, names in os.walk(top, onerror=_raise) for name in names)
            files = ((path.relative_to(top).as_posix(), path) for path in paths if path.is_file())
            return {name: path.stat().st_size for name, path in sorted(files)}

    def list_files(self, start: str) -> dict[str, FileInfo]:
        """See `Store`."""
        parent = start.rpartition("/")[0]
        names = (f"{parent}/{name}" if parent else name for name in self.list_sizes(parent))
        with translate_errors(self.root / parent):
            found = {name: (self.root / name).stat() for name in names if name.startswith(start)}
        return {name: FileInfo(status.st_size, _version(status)) for name, status in found.items()}

    def compute_digest(self, name: str) -> str:
        """See `Store`."""
        checksum, path = google_crc32c.Checksum(), self.root / name
        with translate_errors(path), open_file(path) as file:
            while chunk := file.read(_CHUNK_BYTES):
                checksum.update(chunk)
        return checksum.hexdigest().decode()

    def upload(self, source: Path, name: str, deadline_seconds: float) -> None:
        """See `Store`."""
        path = self.root / name
        with translate_errors(path):
            make_directory(path.parent)
            shutil.copyfile(source, path)
            with path.open("rb") as file:
                os.fsync(file.fileno())

    def move_tree(self, source: str, target: str) -> None:
        """See `Store`."""
        path = self.root / target
        with translate_errors(path):
            make_directory(path.parent)
            (self.root / source).rename(path)

    def remove(self, name: str) -> None:
        """See `Store`."""
        path = self.root / name
        with translate_errors(path):
            path.unlink(missing_ok=True)

    def remove_tree(self, prefix: str) -> None:
        """See `Store`. A dying attempt may still be writing into it, so what appears meanwhile is deleted too."""
        directory = self.root / prefix
        with translate_errors(directory):
            if directory.is_symlink() or not directory.is_dir():
                directory.unlink(missing_ok=True)
                return
            for _ in range(_REMOVE_TRIES):
                shutil.rmtree(directory, ignore_errors=True)
                if not directory.exists():
                    return
                time.sleep(0.1)
            shutil.rmtree(directory)


def _raise(error: OSError) -> None:
    """What has gone while a tree is walked is not there; nothing else is passed over."""
    if not isinstance(error, FileNotFoundError):
        raise error


def _version(status: os.stat_result) -> Version:
    return f"{status.st_ino}.{status.st_mtime_ns}"


@contextlib.contextmanager
def _written_aside(path: Path, chunks: Iterable[bytes], make_parents: bool = True) -> Iterator[Path]:
    """A file beside `path` that holds `chunks`, flushed; whatever happens it does not stay under its own name."""
    if make_parents:
        make_directory(path.parent)
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:  # a disk that is full must not fill up with parts
        with aside.open("wb") as file:
            file.writelines(chunks)
            file.flush()
            os.fsync(file.fileno())
        yield aside
    finally:
        aside.unlink(missing_ok=True)


def fsync(path: Path) -> None:
    """Bring a file, or what a directory names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def append_line(path: Path, line: bytes) -> None:
    """Append one line, in one write, so that lines of several processes never mix.

    A line that a full disk or a power cut has torn is closed first, so that it takes no other with it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        size = os.fstat(descriptor).st_size
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        os.write(descriptor, b"\n" * torn + line)
    finally:
        os.close(descriptor)
