"""Which files `config.source` names, in which order, on a disk or in a bucket. Knows names and sizes, no content.

A file in a bucket, read in blocks as it is needed: of a large one a few blocks are in memory, never all.
"""

import functools
import hashlib
import io
import json
import os
import re
import sysconfig
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from runner.data.source_files import (
    PYTHON_STDLIB,
    TEXT_SUFFIXES,
    SourceFiles,
    find_source,
    get_glob_prefix,
    match_files,
    match_objects,
    matches_glob,
    split_url_glob,
    suggest_path,
)
from runner.errors import DataError
from runner.storage import (
    ChangedError,
    FileInfo,
    ForbiddenError,
    Store,
    Version,
    local_directory,
    make_store,
    validate_url,
)

Form = Literal["text", "jsonl", "parquet", "arrow"]
_SUFFIXES: dict[str, Form] = {
    ".jsonl": "jsonl",
    ".jsonl.gz": "jsonl",
    ".jsonl.zst": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
_WILD = re.compile(r"[*?\[]")


@dataclass(frozen=True)
class InputFile:
    """A file as it was when the source was resolved.

    Attributes:
        place: the URL of the bucket's prefix that `name` is below; None for a file on a disk.
        name: its path, absolute on a disk.
        label: what it is called in the source's fingerprint; the same on every host.
        version: time of its last change in nanoseconds, in a bucket its version; "" of python-stdlib, where each host
            has its own copy: there names and sizes tell.
    """

    place: str | None
    name: str
    label: str
    size_bytes: int
    version: Version
    form: Form

    @property
    def where(self) -> str:
        """For messages."""
        return self.name if self.place is None else f"{self.place}/{self.name}"

    @property
    def compression(self) -> str:
        """`.gz`, `.zst` or nothing."""
        suffix = Path(self.name).suffix.lower()
        return suffix if suffix in (".gz", ".zst") else ""

    def validate_unchanged(self) -> None:
        """Raise `DataError` if a file on a disk is no longer the one that was resolved."""
        if self.place is not None:
            return
        size_bytes, version = _size_and_version(Path(self.name))
        if size_bytes != self.size_bytes or (self.version and version != self.version):
            raise DataError(f"{self.where} has changed since the job started; use a source that nobody writes to")


def find_files(source: str) -> tuple[InputFile, ...]:
    """The files that `source` names, in reading order. Raises `DataError` if there are none, or not of one form."""
    if source == PYTHON_STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        found = find_source(source)
        assert isinstance(found, SourceFiles)
        return tuple(
            InputFile(None, str(file.path), file.path.relative_to(root).as_posix(), file.size_bytes, "", "text")
            for file in found.files
        )
    validate_url(source)
    files = _in_bucket(source) if "://" in source else _on_disk(source)
    if not files:
        raise DataError(f"no file matches {source}{'' if '://' in source else suggest_path(source)}")
    forms = sorted({file.form for file in files})
    if len(forms) > 1:
        first = [next(file.where for file in files if file.form == form) for form in forms]
        raise DataError(f"{source} matches {' and '.join(forms)} files ({', '.join(first)}); name one form")
    return files


def fingerprint_of(files: Sequence[InputFile]) -> str:
    """Another one where a file was added, removed, replaced or renamed."""
    content = [[file.label, file.size_bytes, file.version] for file in files]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


@functools.lru_cache(maxsize=8)
def open_place(url: str) -> Store:
    """The store of a prefix; one client serves all of its files."""
    return make_store(url)


def read_file(text: str) -> bytes:
    """The whole content of a path or URL. Raises `DataError` if it is not there."""
    place, _, name = (text if "://" in text else str(local_directory(text))).rpartition("/")
    try:
        return open_place(place or "/").read(name)
    except FileNotFoundError as error:
        near = "" if "://" in text else suggest_path(text)
        is_name = "://" not in text and not os.path.isabs(text)
        hint = "; needs a file: what a library or a hub knows by a name is saved as one first" if is_name else ""
        raise DataError(f"is not there{near}{hint}") from error


def _on_disk(source: str) -> tuple[InputFile, ...]:
    pattern = str(local_directory(source))
    if os.path.isdir(pattern):
        raise DataError(f"{source} is a directory; name its files, as {os.path.join(source, '*.jsonl')}")
    names = [str(path) for path in match_files(pattern)]
    files = [(name, *_size_and_version(Path(name))) for name in names]
    for name in names:
        if not os.access(name, os.R_OK):
            raise DataError(f"cannot read {name}: permission denied")
    return tuple(InputFile(None, name, name, size, version, _form_of(name)) for name, size, version in files)


def _size_and_version(path: Path) -> tuple[int, str]:
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    return status.st_size, str(status.st_mtime_ns)


def _in_bucket(source: str) -> tuple[InputFile, ...]:
    """Of a glob, of a prefix, or of one object, whose own name may hold brackets. One listing."""
    place, patterns = split_url_glob(source)
    listing, exact = _listing(place, get_glob_prefix(patterns)), "/".join(patterns)
    is_prefix = exact not in listing and not _WILD.search(exact)
    names = match_objects([*patterns, "**"] if is_prefix else patterns, listing, [exact])
    return tuple(
        InputFile(place, name, f"{place}/{name}", listing[name].size_bytes, listing[name].version, _form_of(name))
        for name in names
    )


def _listing(place: str, start: str) -> dict[str, FileInfo]:
    try:
        return open_place(place).list_files(start)
    except FileNotFoundError as error:
        raise DataError(f"{place} is not there: {error}") from error
    except ForbiddenError:
        raise
    except PermissionError as error:
        raise DataError(f"cannot read {place}: no permission ({error})") from error


def would_name(source: str, path: str) -> bool:
    """Whether `source` names the file at a path or URL, were it there."""
    if ("://" in source) != ("://" in path) or source == PYTHON_STDLIB:
        return False
    if "://" not in source:
        source = str(local_directory(source))
    elif not _WILD.search(source):
        source = f"{source.rstrip('/')}/**"
    return matches_glob(path.split("/"), source.split("/"))


def _form_of(name: str) -> Form:
    lower = os.path.basename(name).lower()
    for suffix, form in _SUFFIXES.items():
        if lower.endswith(suffix):
            return form
    if Path(lower).suffix in TEXT_SUFFIXES:
        return "text"
    raise DataError(f"{name} is of a kind that is not read; needs text, {', '.join(_SUFFIXES)}")


BLOCK_BYTES = 8 << 20
_BLOCKS_AHEAD = 3


def read_object(file: InputFile, start: int, stop: int) -> bytes:
    """Bytes `start .. stop` of a file in a bucket. Raises `DataError` if it is no longer the one that was resolved.

    Raises `StorageError` if the bucket does not answer.
    """
    assert file.place is not None
    try:
        return open_place(file.place).read_range(file.name, start, stop, file.version)
    except ChangedError as error:
        raise DataError(
            f"{file.where} has changed since the job started; use a source that nobody writes to"
        ) from error
    except FileNotFoundError as error:
        raise DataError(f"{file.where} is gone since the job started") from error
    except PermissionError as error:
        raise DataError(f"cannot read {file.where}: no permission ({error})") from error


class ObjectFile(io.RawIOBase):
    """The content of a file in a bucket; the blocks behind the one that is read are fetched meanwhile. One thread."""

    def __init__(self, file: InputFile) -> None:
        self._file, self._position = file, 0
        self._blocks: dict[int, Future[bytes]] = {}
        self._pool = ThreadPoolExecutor(_BLOCKS_AHEAD + 1, thread_name_prefix="block")

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """Bytes before the next one."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """See `io.IOBase`."""
        self._position = (
            offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size_bytes}[whence]
        )
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """See `io.RawIOBase`; no more than a block at a time. Raises what `read_object` does."""
        number, offset = divmod(self._position, BLOCK_BYTES)
        found = memoryview(self._block(number))[offset : offset + len(buffer)]
        buffer[: len(found)] = found
        self._position += len(found)
        return len(found)

    def close(self) -> None:
        """Fetch no more."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._blocks.clear()
        super().close()

    def _block(self, number: int) -> bytes:
        num_blocks = -(-self._file.size_bytes // BLOCK_BYTES)
        if number >= num_blocks:
            return b""
        wanted = range(number, min(number + 1 + _BLOCKS_AHEAD, num_blocks))
        for old in self._blocks.keys() - set(wanted):
            self._blocks.pop(old).cancel()
        for block in wanted:
            if block not in self._blocks:
                start, stop = block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, self._file.size_bytes)
                self._blocks[block] = self._pool.submit(read_object, self._file, start, stop)
        return self._blocks[number].result()
