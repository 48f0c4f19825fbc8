"""Input files: resolution of `config.source` to files, and reading of objects in buckets and on the Hugging Face Hub.

Resolution lists names, sizes and versions on disk or in a bucket, and reads no content.

A data set on the Hub is read at one commit, like an immutable bucket. A revision that is the name of a branch or tag is
resolved to a commit once, when the corpus is begun (`pin_source`); the list of its input files then has that commit.
"""

import contextlib
import functools
import hashlib
import json
import os
import re
import sysconfig
import urllib.parse
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from runner.data.readers import SeekableStream
from runner.data.source_files import (
    PYTHON_STDLIB,
    TEXT_SUFFIXES,
    SourceFiles,
    find_source,
    get_glob_prefix,
    has_pattern,
    match_files,
    match_objects,
    matches_glob,
    split_url_glob,
    suggest_path,
)
from runner.errors import DataError, InvalidError, format_reason
from runner.huggingface.hub import parse_refusal
from runner.spec.imports import import_extra
from runner.storage import (
    ChangedError,
    FileInfo,
    ForbiddenError,
    Store,
    TransientError,
    Version,
    local_directory,
    make_store,
    validate_url,
)
from runner.storage.bucket import CALL_SECONDS, TRY_SECONDS, BucketStore, ObjectInfo
from runner.storage.store import retry_with_backoff

FileFormat = Literal["text", "jsonl", "parquet", "arrow"]
BLOCK_BYTES = 8 << 20
_BLOCKS_AHEAD = 3
_COMPRESSIONS = {".gz": ".gz", ".zst": ".zst", ".zstd": ".zst", ".bz2": ".bz2", ".xz": ".xz"}  # kind by suffix
_LINES = (".jsonl", ".json", ".ndjson")  # corpora are published as lines of JSON under all three
_SUFFIXES: dict[str, FileFormat] = {
    **dict.fromkeys([lines + compression for lines in _LINES for compression in ("", *_COMPRESSIONS)], "jsonl"),
    ".parquet": "parquet",
    ".arrow": "arrow",
}
_HUB = "hf://"
_DATASET = re.compile(r"hf://datasets/([\w.-]+/[\w.-]+?)(?:@([^/@]+))?(?:/(.+))?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class InputFile:
    """Input file with the size and version it had when the source was resolved."""

    bucket_url: str | None  # URL of the bucket prefix that `name` is relative to; None for a local file
    name: str  # path, absolute for a local file
    label: str  # name in the fingerprint of the source; the same on every host
    size_bytes: int
    # Modification time in nanoseconds, or the object's version in a bucket; "" for python-stdlib, because each host has
    # its own copy.
    version: Version
    format: FileFormat
    # Time of the last change of content or metadata, which no tool can set back; 0 if it is not compared.
    ctime_ns: int = 0

    @property
    def where(self) -> str:
        """Path or URL, for messages."""
        return self.name if self.bucket_url is None else f"{self.bucket_url}/{self.name}"

    @property
    def compression(self) -> str:
        """Kind of compression, as its usual suffix; "" for none."""
        return _COMPRESSIONS.get(Path(self.name).suffix.lower(), "")

    @property
    def has_mutable_content(self) -> bool:
        """True if the content may change while size and version stay."""
        # Each request for an object names its version, and fails if that is gone.
        return self.ctime_ns != 0

    def validate_unchanged(self) -> None:
        """Raise `DataError` if the size or version of a local file has changed since the source was resolved."""
        if self.bucket_url is not None:
            return
        size_bytes, version, _ = _describe(Path(self.name))
        if size_bytes != self.size_bytes or (self.version and version != self.version):
            raise DataError(f"{self.where} has changed since the job started; use a source that is not being written")

    def was_touched(self) -> bool:
        """Return True if content or metadata of a local file have changed since the source was resolved.

        A file that was deleted, perhaps because it has been read, counts as unchanged.
        """
        if not self.has_mutable_content or not os.path.lexists(self.name):
            return False
        return _describe(Path(self.name))[2] != self.ctime_ns


def find_files(source: str) -> tuple[InputFile, ...]:
    """Return the files that `source` names, in reading order.

    Raises:
        DataError: no file matches, or the files have different formats.
    """
    if source == PYTHON_STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        # The same files that the source `python-stdlib` of a training job has.
        found = find_source(source)
        assert isinstance(found, SourceFiles)
        return tuple(
            InputFile(None, str(file.path), file.path.relative_to(root).as_posix(), file.size_bytes, "", "text")
            for file in found.files
        )
    if source.startswith(_HUB):
        _, revision, _ = _split_hub_source(source)
        if _COMMIT.fullmatch(revision) is None:
            raise DataError(f"{source}: {revision} may change; name a commit, as hf://datasets/OWNER/NAME@COMMIT/PATH")
    else:
        validate_url(source)
    files = _find_in_bucket(source) if "://" in source else _find_on_disk(source)
    if not files:
        raise DataError(f"no file matches {source}{'' if '://' in source else suggest_path(source)}")
    formats = sorted({file.format for file in files})
    if len(formats) > 1:
        examples = [next(file.where for file in files if file.format == format_) for format_ in formats]
        raise DataError(
            f"{source} matches {' and '.join(formats)} files ({', '.join(examples)}); name files of one format"
        )
    return files


def compute_fingerprint(files: Sequence[InputFile]) -> str:
    """Return a digest that changes if a file is added, removed, replaced or renamed."""
    return hash_entries([(file.label, file.size_bytes, file.version) for file in files])


def hash_entries(entries: Sequence[tuple[str, int, Version]]) -> str:
    """Return the digest of files that are given by label, size and version."""
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()


@functools.lru_cache(maxsize=8)
def open_store(url: str) -> Store:
    """Return the store of a bucket prefix or directory. It is cached, so that all files below it share one client."""
    if (match := _DATASET.fullmatch(url)) is None:
        return make_store(url)
    repository, revision, prefix = match.groups(default="")
    return BucketStore(url, prefix, _HubDriver(repository, urllib.parse.unquote(revision)))


def read_file(text: str) -> bytes:
    """Return the whole content of a path or URL. Raises `DataError` if it does not exist."""
    directory, _, name = (text if "://" in text else str(local_directory(text))).rpartition("/")
    try:
        return open_store(directory or "/").read(name)
    except FileNotFoundError as error:
        near = "" if "://" in text else suggest_path(text)
        is_name = "://" not in text and not os.path.isabs(text)
        hint = "; needs a file: download a tokenizer that a library or hub knows by name first" if is_name else ""
        raise DataError(f"does not exist{near}{hint}") from error


def _find_on_disk(source: str) -> tuple[InputFile, ...]:
    pattern = str(local_directory(source))
    if os.path.isdir(pattern):
        raise DataError(f"{source} is a directory; name its files, as {os.path.join(source, '*.jsonl')}")
    names = [str(path) for path in match_files(pattern)]
    files = [(name, *_describe(Path(name))) for name in names]
    for name in names:
        if not os.access(name, os.R_OK):
            raise DataError(f"cannot read {name}: permission denied")
    return tuple(
        InputFile(None, name, name, size, version, _detect_format(name), ctime) for name, size, version, ctime in files
    )


def _describe(path: Path) -> tuple[int, str, int]:
    """Return size, version and change time of a file."""
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    return status.st_size, str(status.st_mtime_ns), status.st_ctime_ns


def _find_in_bucket(source: str) -> tuple[InputFile, ...]:
    """Return the files of a glob, a prefix, or one object, whose name may contain brackets. Lists the bucket once."""
    bucket_url, patterns = split_url_glob(source)
    try:
        listing: dict[str, FileInfo] = open_store(bucket_url).list_files(get_glob_prefix(patterns))
    except FileNotFoundError as error:
        raise DataError(f"{bucket_url} does not exist: {error}") from error
    # Raised before the `PermissionError` below, because its message already names the object.
    except ForbiddenError:
        raise
    except PermissionError as error:
        raise DataError(f"cannot read {bucket_url}: no permission ({error})") from error
    exact = "/".join(patterns)
    # The name of an object may contain `*` or `[`, so an exact match comes before any pattern.
    is_prefix = exact not in listing and not has_pattern(patterns, listing)
    names = match_objects([*patterns, "**"] if is_prefix else patterns, listing, [exact])
    return tuple(
        InputFile(
            bucket_url,
            name,
            f"{bucket_url}/{name}",
            listing[name].size_bytes,
            listing[name].version,
            _detect_format(name),
        )
        for name in names
    )


def would_match(source: str, path: str) -> bool:
    """Return True if `source` would match a file at `path` (a path or URL), whether or not the file exists.

    A part of the source with `*`, `?` or `[` counts as a name and as a pattern, because the job itself may create a
    directory of this name.
    """
    if ("://" in source) != ("://" in path) or source == PYTHON_STDLIB:
        return False
    if "://" not in source:
        source = str(local_directory(source))
    names, patterns = path.split("/"), source.rstrip("/").split("/")
    literal = len(os.path.commonprefix([names, patterns]))  # noqa: RUF071 - of lists of parts, not of texts
    if "://" in source and literal == len(patterns):
        return True  # a prefix names every object below it
    return any(matches_glob(names[depth:], patterns[depth:]) for depth in range(literal + 1))


def _detect_format(name: str) -> FileFormat:
    lower = os.path.basename(name).lower()
    for suffix, file_format in _SUFFIXES.items():
        if lower.endswith(suffix):
            return file_format
    if Path(lower).suffix in TEXT_SUFFIXES:
        return "text"
    compressed = ", ".join(_COMPRESSIONS)
    raise DataError(
        f"{name}: unsupported file type; needs text, lines of JSON ({', '.join(_LINES)}, also with {compressed}), "
        ".parquet or .arrow"
    )


# Data sets on the Hugging Face Hub.


def _split_hub_source(source: str) -> tuple[str, str, str]:
    """Return OWNER/NAME, revision (by default main) and path of `hf://datasets/OWNER/NAME@REVISION/PATH`.

    Raises `DataError` if the source has another form.
    """
    match = _DATASET.fullmatch(source)
    if match is None or not match[3]:
        raise DataError(f"{source}: needs hf://datasets/OWNER/NAME/PATH or hf://datasets/OWNER/NAME@REVISION/PATH")
    return match[1], match[2] or "main", match[3]


def pin_source(source: str, begun: Iterable[str]) -> str:
    """Return a source with the commit of its revision, if it is on the Hub; any other source as it is.

    `begun` are the labels of the files from which the corpus was begun, whose commit is used.

    Raises:
        DataError: there is no such data set or revision, or it may not be read.
        StorageError: the Hub does not answer.
    """
    if not source.startswith(_HUB):
        return source
    repository, revision, path = _split_hub_source(source)
    if _COMMIT.fullmatch(revision):
        return source
    for match in map(_DATASET.fullmatch, begun):
        if match is not None and match[1] == repository and match[2]:
            return f"hf://datasets/{repository}@{match[2]}/{path}"
    try:
        driver = _HubDriver(repository, urllib.parse.unquote(revision))
        commit = retry_with_backoff(lambda _: driver.find_commit(), f"look up {source}", CALL_SECONDS)
    except (FileNotFoundError, PermissionError) as error:
        raise DataError(f"{source}: {error}") from error
    return f"hf://datasets/{repository}@{commit}/{path}"


class _HubDriver:
    """Read-only client of a data set on the Hub at one revision. `BucketStore`, which calls it, retries.

    Every call may raise `TransientError`, and `FileNotFoundError` or `PermissionError` with the answer of the Hub.
    """

    batch_size = 1

    def __init__(self, repository: str, revision: str):
        self._repository, self._revision = repository, revision
        self._hub, self._errors, self._utils = (
            import_extra(f"huggingface_hub{part}") for part in ("", ".errors", ".utils")
        )
        self._utils.logging.set_verbosity_error()
        self._api = self._hub.HfApi()

    def find_commit(self) -> str:
        """Return the commit of the revision."""
        with self._translate_errors():
            return str(self._api.dataset_info(self._repository, revision=self._revision, timeout=TRY_SECONDS).sha)

    def list(self, prefix: str, delimiter: str) -> Iterator[ObjectInfo]:
        """Iterate over the files whose path begins with `prefix`, at any depth."""
        with self._translate_errors():
            tree = self._api.list_repo_tree(
                self._repository, recursive=True, revision=self._revision, repo_type="dataset"
            )
            for entry in tree:
                # A directory has no size.
                if hasattr(entry, "size") and entry.path.startswith(prefix):
                    yield ObjectInfo(entry.path, entry.size, entry.blob_id)

    def get(self, key: str) -> tuple[bytes, Version]:
        """Return the content of a file."""
        return self._request(key, {}), self._revision

    def get_range(self, key: str, start: int, stop: int, version: Version | None) -> bytes:
        """Return bytes `start .. stop`. The version is not compared, because a commit does not change."""
        return self._request(key, {"Range": f"bytes={start}-{stop - 1}"})

    def _request(self, key: str, headers: dict[str, str]) -> bytes:
        revision, path = urllib.parse.quote(self._revision, safe=""), urllib.parse.quote(key)
        url = f"{self._api.endpoint}/datasets/{self._repository}/resolve/{revision}/{path}"
        headers = {**self._utils.build_hf_headers(), **headers}
        with self._translate_errors():
            answer = self._hub.get_session().get(url, headers=headers, follow_redirects=True, timeout=TRY_SECONDS)
            self._utils.hf_raise_for_status(answer)
            return bytes(answer.content)

    def refuse(self, *_: Any) -> NoReturn:
        """Raise `PermissionError`: nothing is written to the Hub."""
        raise PermissionError(f"{_HUB}datasets/{self._repository} is only read")

    put = put_file = crc32c = copy = delete = delete_batch = refuse

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Translate exceptions of the library into those of a driver."""
        errors, where = self._errors, f"{self._api.endpoint}: {self._repository}@{self._revision}"
        try:
            yield
        except errors.HfHubHTTPError as error:
            status, reason, is_transient = parse_refusal(error)
            if is_transient:
                raise TransientError(f"{where}: {status}: {reason}") from error
            kind = FileNotFoundError if status == 404 else PermissionError
            raise kind(f"{where}: {status}: {reason}; check name, revision and the token of HF_TOKEN") from error
        except errors.OfflineModeIsEnabled as error:
            raise InvalidError("HF_HUB_OFFLINE is set, and the source is on the Hub; unset it") from error
        # The HTTP library's own errors have no common base in the standard library.
        except Exception as error:
            if not isinstance(error, OSError | errors.HTTPError):
                raise
            raise TransientError(f"{where} does not answer: {format_reason(error)}") from error


def read_object(file: InputFile, start: int, stop: int) -> bytes:
    """Return bytes `start .. stop` of a file in a bucket.

    Raises:
        DataError: the object has changed or disappeared since the source was resolved, or may not be read.
        StorageError: the bucket does not answer.
    """
    assert file.bucket_url is not None
    try:
        return open_store(file.bucket_url).read_range(file.name, start, stop, file.version)
    except ChangedError as error:
        raise DataError(
            f"{file.where} has changed since the job started; use a source that is not being written"
        ) from error
    except FileNotFoundError as error:
        raise DataError(f"{file.where} has disappeared since the job started") from error
    except PermissionError as error:
        raise DataError(f"cannot read {file.where}: no permission ({error})") from error


class ObjectFile(SeekableStream):
    """File in a bucket as a raw stream, read in blocks with read-ahead. Not thread-safe.

    Only the current block and the next `_BLOCKS_AHEAD` blocks are in memory, however large the object is.
    """

    def __init__(self, file: InputFile) -> None:
        super().__init__(file.size_bytes)
        self._file = file
        self._blocks: dict[int, Future[bytes]] = {}
        self._pool = ThreadPoolExecutor(_BLOCKS_AHEAD + 1, thread_name_prefix="block")

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Read at most one block into `buffer` and return the number of bytes. Raises what `read_object` raises."""
        number, offset = divmod(self._position, BLOCK_BYTES)
        found = memoryview(self._read_block(number))[offset : offset + len(buffer)]
        buffer[: len(found)] = found
        self._position += len(found)
        return len(found)

    def close(self) -> None:
        """Cancel the read-ahead and close the stream."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._blocks.clear()
        super().close()

    def _read_block(self, number: int) -> bytes:
        """Return one block, and start to fetch the blocks after it."""
        num_blocks = -(-self._file.size_bytes // BLOCK_BYTES)
        if number >= num_blocks:
            return b""
        wanted = range(number, min(number + 1 + _BLOCKS_AHEAD, num_blocks))
        # A seek leaves blocks behind, which are dropped so that memory stays bounded.
        for old in self._blocks.keys() - set(wanted):
            self._blocks.pop(old).cancel()
        for block in wanted:
            if block not in self._blocks:
                start, stop = block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, self._file.size_bytes)
                self._blocks[block] = self._pool.submit(read_object, self._file, start, stop)
        return self._blocks[number].result()
