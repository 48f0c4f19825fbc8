"""Which files a `data.source` names, in which order, on the disk or in a bucket. Knows names and sizes, no content."""

import contextlib
import difflib
import fnmatch
import glob
import hashlib
import os
import re
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from runner.data.corpus_index import INDEX
from runner.errors import DataError, InvalidError
from runner.storage import DeniedError, FileInfo, Store, Version, open_store, parse_json, validate_url

PYTHON_STDLIB = "python-stdlib"
TOKEN_SUFFIXES = frozenset({".bin", ".npy"})
# What is read as text. Of any other suffix nobody knows whether its bytes are what a model should learn.
# fmt: off
TEXT_SUFFIXES = frozenset({
    "", ".txt", ".text", ".md", ".rst", ".tex", ".adoc", ".org", ".html", ".htm", ".xml", ".css",
    ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".cuh", ".java", ".kt", ".scala", ".js", ".ts",
    ".go", ".rs", ".rb", ".php", ".pl", ".lua", ".r", ".jl", ".m", ".swift", ".cs", ".hs", ".ml", ".ex", ".erl", ".clj",
    ".el", ".lisp", ".scm", ".f90", ".sh", ".bash", ".zsh", ".sql", ".toml", ".yaml", ".yml", ".ini", ".cfg", ".tf",
    ".proto", ".s", ".asm", ".v", ".sv", ".vhd", ".lean", ".dart", ".nim", ".zig",
})
# fmt: on

# Formats of other tools, by the names of the files that are named in `data.source`; of MDS that is a directory.
FORMATS = {"megatron": re.compile(r".\.idx$"), "array_record": re.compile(r".\.array_?record(-\d+-of-\d+)?$")}

# Installed packages are not the standard library, and what a build generates differs between machines of one version.
_STDLIB_FOREIGN_DIRECTORIES = frozenset({"site-packages", "dist-packages", "__pycache__"})
_STDLIB_GENERATED = ("config-", "_sysconfigdata", "sitecustomize", "usercustomize")


@dataclass(frozen=True)
class SourceFile:
    """A file as it was when the source was resolved: the identity under which what it yields is cached."""

    path: Path
    size_bytes: int
    mtime_ns: int

    def __str__(self) -> str:
        return str(self.path)

    @property
    def identity(self) -> list[str | int]:
        """What tells this content from others."""
        return [str(self.path), self.size_bytes, self.mtime_ns]


@dataclass(frozen=True)
class BucketFile:
    """An object as it was when the source was resolved; `name` is relative to the `url` of the store that it is in."""

    url: str
    name: str
    size_bytes: int
    version: Version
    crc32c: str | None = field(default=None, compare=False)  # where the store reports it

    def __str__(self) -> str:
        return f"{self.url}/{self.name}"

    @property
    def identity(self) -> list[str | int]:
        """What tells this content from others."""
        return [str(self), self.size_bytes, self.version]

    @property
    def versioned_url(self) -> str:
        """Another text for another content."""
        return f"{self}\0{self.version}"


File = SourceFile | BucketFile


@dataclass(frozen=True)
class SourceFiles:
    """`name` as in the spec, for messages; `files` in reading order; `holds_tokens` for `.bin` and `.npy`.

    `format` is that of another tool: megatron, mds or array_record. Of mds the files are the indexes.
    """

    name: str
    files: tuple[SourceFile, ...]
    holds_tokens: bool
    format: str | None = None


@dataclass(frozen=True)
class BucketFiles:
    """Objects of a bucket, in reading order. `holds_tokens` and `format` as of `SourceFiles`."""

    name: str
    files: tuple[BucketFile, ...]
    store: Store
    holds_tokens: bool
    format: str | None = None


def find_source(name: str) -> SourceFiles | BucketFiles:
    """Resolve `python-stdlib`, a path, a URL or a glob (`~` and `**` work).

    Raises DataError if it names no readable file, `OSError` if the bucket does not answer.
    """
    validate_source_name(name)
    if "://" in name:
        return _find_in_bucket(name)
    paths = _stdlib_paths() if name == PYTHON_STDLIB else _matching_paths(name)
    if not paths and os.path.exists(os.path.expanduser(name)):
        raise DataError(f"data.source={name}: is a device, a pipe or a socket; needs a file")
    if not paths:
        raise DataError(f"data.source={name}: no file matches{suggest_path(name)}")
    format_name = _format_of(paths) or ("mds" if all(map(_is_mds_index, paths)) else None)
    holds_tokens = format_name is not None or _hold_tokens(name, paths)
    return SourceFiles(name, tuple(map(describe_file, paths)), holds_tokens, format_name)


def find_corpus(name: str) -> str | None:
    """The directory or URL of the corpus that `name` is, or whose index it is; None if it is something else.

    Raises DataError if it cannot be looked for, `OSError` if the bucket does not answer.
    """
    validate_source_name(name)
    directory, _, last = name.rstrip("/").rpartition("/")
    if "://" not in name:
        path = os.path.abspath(os.path.expanduser(name))
        index = Path(path) / INDEX if os.path.isdir(path) else Path(path)
        return str(index.parent) if index.name == INDEX and index.is_file() and not _is_mds_index(index) else None
    directory = directory if last == INDEX else name.rstrip("/")
    if glob.has_magic(directory) or PurePath(directory).suffix in TOKEN_SUFFIXES:
        return None
    with wrap_source_errors(name):
        store = open_store(directory)
        return directory if store.exists(INDEX) and not _is_of_mds(store.read(INDEX)) else None


def validate_source_name(name: str) -> None:
    """Raise `DataError` if no path or URL can be called so."""
    try:
        validate_url(name)
    except InvalidError as error:
        raise DataError(f"data.source={name[:60]}: {error}") from error


@contextlib.contextmanager
def wrap_source_errors(name: str) -> Iterator[None]:
    """Inside, whatever a person must mend is a `DataError` that names the source."""
    try:
        yield
    except DataError:
        raise
    except (InvalidError, DeniedError) as error:
        raise DataError(f"data.source={name}: {error}") from error
    except FileNotFoundError as error:
        raise DataError(f"data.source={name}: the bucket does not exist ({error})") from error


def _hold_tokens(name: str, paths: Sequence[PurePath]) -> bool:
    """Whether the files hold ids, by their suffixes. Raises DataError if these are of several kinds, or of no known."""
    unread = [path for path in paths if path.suffix.lower() not in TEXT_SUFFIXES | TOKEN_SUFFIXES]
    if unread:
        raise DataError(
            f"data.source={name}: {len(unread)} of {len(paths)} files are of a kind that is not read, the first is "
            f"{unread[0]}; needs text (.txt, .md, source code ...) or token ids (.bin, .npy), or nothing but .idx or "
            ".array_record"
        )
    num_token_files = sum(path.suffix in TOKEN_SUFFIXES for path in paths)
    if num_token_files not in (0, len(paths)):
        raise DataError(
            f"data.source={name}: matches {num_token_files} token files (.bin, .npy) and "
            f"{len(paths) - num_token_files} text files; name one kind"
        )
    return num_token_files > 0


def _find_in_bucket(name: str) -> BucketFiles:
    """One listing of what begins like the name's fixed part."""
    url, patterns = split_url_glob(name)
    if not patterns:
        raise DataError(f"data.source={name}: names no object; needs {url}/NAME")
    with wrap_source_errors(name):
        store = open_store(url)
        listing = store.list_files(get_glob_prefix(patterns))
        exact = "/".join(patterns)
        names = match_objects(patterns, listing, (exact, f"{exact}/{INDEX}"))
        if not names:
            raise DataError(f"data.source={name}: no object matches{_nearest_object(store, exact, listing)}")
        paths = [PurePath(found) for found in names]
        format_name = _format_of(paths)
        if {path.name for path in paths} == {INDEX} and _is_of_mds(store.read(names[0])):
            format_name = "mds"
    holds_tokens = format_name is not None or _hold_tokens(name, paths)
    files = tuple(make_bucket_file(url, found, listing[found]) for found in names)
    return BucketFiles(name, files, store, holds_tokens, format_name)


def make_bucket_file(url: str, name: str, listed: FileInfo) -> BucketFile:
    """The object that a listing has named."""
    return BucketFile(url, name, listed.size_bytes, listed.version, listed.crc32c)


def split_url_glob(name: str) -> tuple[str, list[str]]:
    """The URL below which the objects of a URL or a glob lie, and the parts of their names there; none of a bucket.

    Raises DataError if the bucket's own name is a glob.
    """
    scheme, _, rest = name.partition("://")
    parts = rest.rstrip("/").split("/")
    num_fixed = next((i for i, part in enumerate(parts) if glob.has_magic(part)), max(len(parts) - 1, 1))
    if num_fixed == 0:
        raise DataError(f"{name}: the name of a bucket cannot hold *, ? or [; needs {scheme}://BUCKET/NAME")
    return f"{scheme}://{'/'.join(parts[:num_fixed])}", parts[num_fixed:]


def get_glob_prefix(patterns: Sequence[str]) -> str:
    """What the names of all objects begin with that the parts of a glob may match."""
    return re.split(r"[*?[]", "/".join(patterns))[0]


def match_objects(patterns: Sequence[str], listing: Mapping[str, FileInfo], exact: Sequence[str]) -> list[str]:
    """The first of the names `exact` that is listed, for a name may look like a glob; else what the glob matches."""
    found = next((name for name in exact if name in listing), None)
    return [found] if found else [name for name in listing if matches_glob(name.split("/"), patterns)]


def matches_glob(parts: Sequence[str], patterns: Sequence[str]) -> bool:
    """Whether a name matches a glob, part by part: `**` stands for any number of parts; `*` for no hidden one."""
    if not patterns:
        return not parts
    if patterns[0] == "**" and matches_glob(parts, patterns[1:] or ["*"]):
        return True
    if not parts or (parts[0].startswith(".") and not patterns[0].startswith(".")):
        return False
    if patterns[0] == "**":
        return matches_glob(parts[1:], patterns)
    return fnmatch.fnmatchcase(parts[0], patterns[0]) and matches_glob(parts[1:], patterns[1:])


def _nearest_object(store: Store, name: str, listing: dict[str, FileInfo]) -> str:
    """What to try instead of a name that no object has."""
    if any(found.startswith(f"{name}/") for found in listing):
        return f"; {store.url}/{name}/ holds no {INDEX}: name its objects, as {store.url}/{name}/*.bin"
    if glob.has_magic(name):
        return ""
    near = difflib.get_close_matches(name, sorted(store.list_names("")), n=1)
    return f"; did you mean {store.url}/{near[0]}?" if near else ""


def is_class_path(name: str) -> bool:
    """Whether `name` is `module:Class`, a source of the job's own, and no file."""
    return re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", name) is not None and not os.path.exists(name)


def is_available(name: str) -> bool:
    """Whether `name` names a class, readable files on this machine, or a bucket, which is the same from everywhere."""
    if is_class_path(name):
        return True
    try:
        validate_source_name(name)
        if "://" not in name and find_corpus(name) is None:
            find_source(name)
    except DataError:
        return False
    return True


def read_source_file(file: SourceFile) -> bytes:
    """Read the whole file. Raises DataError if it cannot be read or is no longer the file that was resolved."""
    try:
        raw = file.path.read_bytes()
    except OSError as error:
        raise DataError(f"data.source: cannot read {file.path}: {error.strerror}") from error
    if len(raw) != file.size_bytes:
        raise DataError(
            f"data.source: {file.path} changed while it was read: {file.size_bytes} bytes became {len(raw)}; "
            "run again when nothing writes to it"
        )
    return raw


def describe_file(path: Path) -> SourceFile:
    """Return the file's identity as of now. Raises DataError if it cannot be read."""
    try:
        stat = path.stat()
    except OSError as error:
        raise DataError(f"data.source: cannot read {path}: {error.strerror}") from error
    return SourceFile(path, stat.st_size, stat.st_mtime_ns)


def _stdlib_paths() -> list[Path]:
    """The standard library's own `.py` files, scattered: the tail that becomes validation is a fair sample of it."""
    root = Path(sysconfig.get_paths()["stdlib"])
    relative_paths: list[str] = []
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = [
            name
            for name in subdirectories
            if name not in _STDLIB_FOREIGN_DIRECTORIES and not name.startswith(_STDLIB_GENERATED)
        ]
        relative_paths += [
            (Path(directory) / name).relative_to(root).as_posix()
            for name in names
            if name.endswith(".py") and not name.startswith(_STDLIB_GENERATED)
        ]
    relative_paths.sort(key=lambda path: hashlib.sha256(path.encode()).digest())
    return [root / path for path in relative_paths if (root / path).is_file()]


def _matching_paths(name: str) -> list[Path]:
    pattern = os.path.abspath(os.path.expanduser(name))
    if os.path.isdir(pattern):
        if _is_mds_index(Path(pattern) / INDEX):
            return [Path(pattern) / INDEX]
        files = os.path.join(name, "**", "*.txt")
        raise DataError(f"data.source={name}: is a directory, and no corpus ({INDEX}); name its files, as {files}")
    return match_files(pattern)


def match_files(pattern: str) -> list[Path]:
    """The file that is called so, else those on the disk that match it as a glob, in order."""
    if os.path.isfile(pattern):  # before globbing: a file's own name may hold brackets
        return [Path(pattern)]
    return [Path(path) for path in sorted(glob.glob(pattern, recursive=True)) if os.path.isfile(path)]


def _format_of(paths: Sequence[PurePath]) -> str | None:
    """The format of another tool that all these files are of, by their names; None if there is none."""
    return next((name for name, pattern in FORMATS.items() if all(pattern.search(path.name) for path in paths)), None)


def _is_mds_index(path: Path) -> bool:
    """Whether a file of the disk is the index of a directory of MDS."""
    try:
        return path.name == INDEX and path.is_file() and _is_of_mds(path.read_bytes())
    except OSError:
        return False


def _is_of_mds(content: bytes) -> bool:
    """Whether an `index.json` is one of MDS, and not of a corpus."""
    try:
        return {"version", "shards"} <= parse_json(content).keys()
    except ValueError:
        return False


def suggest_path(name: str) -> str:
    """What to try instead of a path that matched nothing: '; did you mean ...?', or '' if nothing is near."""
    if any(character in name for character in "*?["):
        return ""
    if difflib.get_close_matches(name, [PYTHON_STDLIB]):
        return f"; did you mean {PYTHON_STDLIB}?"
    missing = Path(os.path.abspath(os.path.expanduser(name)))
    while not missing.parent.exists():
        missing = missing.parent
    try:
        siblings = sorted(os.listdir(missing.parent))
    except OSError:
        return ""
    near = difflib.get_close_matches(missing.name, siblings, n=1)
    return f"; did you mean {missing.parent / near[0]}?" if near else f"; {missing.parent} holds no {missing.name}"
