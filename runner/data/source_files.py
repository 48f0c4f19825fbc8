"""Resolution of `data.source`: which files it names, in which order, on a disk or in a bucket.

Works on names, sizes and suffixes. The only content that it reads is an `index.json`, to distinguish a corpus from MDS.
"""

import contextlib
import difflib
import fnmatch
import glob
import hashlib
import os
import re
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from runner.data.corpus_index import INDEX
from runner.errors import DataError, InvalidError
from runner.spec import is_class_path
from runner.storage import DeniedError, FileInfo, Store, Version, open_store, parse_json, validate_url

PYTHON_STDLIB = "python-stdlib"
_TOKEN_SUFFIXES = frozenset({".bin", ".npy"})
# A file with one of these suffixes is read as text. Files with other suffixes are refused, because they may be binary.
# fmt: off
# Suffixes of text that a `Tokenise` job reads, and the runner does not.
_RAW_TEXT = frozenset({".jsonl", ".ndjson", ".json", ".gz", ".zst", ".xz", ".bz2"})
_COMPRESSED = frozenset({".gz", ".zst", ".xz", ".bz2"})
TOKENISE_HINT = (
    "; to train on this text, tokenise it before the first step, with the key config.data.tokenise: "
    "{tokenizer: {kind: bpe, vocabulary_size: 32768}, separator: <|endoftext|>}"
)
TEXT_SUFFIXES = frozenset({
    "", ".txt", ".text", ".md", ".rst", ".tex", ".adoc", ".org", ".html", ".htm", ".xml", ".css",
    ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".cuh", ".java", ".kt", ".scala", ".js", ".ts",
    ".go", ".rs", ".rb", ".php", ".pl", ".lua", ".r", ".jl", ".m", ".swift", ".cs", ".hs", ".ml", ".ex", ".erl", ".clj",
    ".el", ".lisp", ".scm", ".f90", ".sh", ".bash", ".zsh", ".sql", ".toml", ".yaml", ".yml", ".ini", ".cfg", ".tf",
    ".proto", ".s", ".asm", ".v", ".sv", ".vhd", ".lean", ".dart", ".nim", ".zig",
})
# fmt: on

# Formats of other tools that are recognised by file names. MDS, a directory, is recognised by its index. A name may
# contain any character, so `.` matches a newline, and `\Z` does not match before one.
FORMATS = {
    "megatron": re.compile(r"(?s).\.idx\Z"),
    "array_record": re.compile(r"(?s).\.array_?record(-\d+-of-\d+)?\Z"),
    "parquet": re.compile(r"(?s).\.parquet\Z"),
    "arrow": re.compile(r"(?s).\.arrow\Z"),
}

# Installed packages are not the standard library, and generated files differ between machines of one version.
_STDLIB_FOREIGN_DIRECTORIES = frozenset({"site-packages", "dist-packages", "__pycache__"})
_STDLIB_GENERATED = ("config-", "_sysconfigdata", "sitecustomize", "usercustomize")


@dataclass(frozen=True)
class SourceFile:
    """File on a disk in the state it had when the source was resolved.

    No tool can set back `ctime_ns`, the time of the last change of content or metadata, and a replacement has another
    `inode`.
    """

    path: Path
    size_bytes: int
    mtime_ns: int
    ctime_ns: int = 0
    inode: int = 0

    def __str__(self) -> str:
        return str(self.path)

    @property
    def identity(self) -> list[str | int]:
        """Values that usually change with the content.

        Change time and inode are not included, because they also change by a copy, a chmod or a new hard link.
        """
        return [str(self.path), self.size_bytes, self.mtime_ns]


@dataclass(frozen=True)
class BucketFile:
    """Object of a bucket in the state it had when the source was resolved; `name` is relative to the store's `url`."""

    url: str
    name: str
    size_bytes: int
    version: Version
    crc32c: str | None = field(default=None, compare=False)  # only where the store reports it

    def __str__(self) -> str:
        return f"{self.url}/{self.name}"

    @property
    def identity(self) -> list[str | int]:
        """Values that differ for another content; part of the cache key of derived files."""
        return [str(self), self.size_bytes, self.version]

    @property
    def versioned_url(self) -> str:
        """Text that changes with the content; the key of cached ranges."""
        return f"{self}\0{self.version}"


File = SourceFile | BucketFile


@dataclass(frozen=True)
class SourceFiles:
    """Files on a disk that a source names."""

    name: str  # name as in the spec, for messages
    files: tuple[SourceFile, ...]  # files in reading order; of MDS these are the indexes
    holds_tokens: bool  # True for token ids, False for text
    # `megatron`, `mds`, `array_record`, `parquet` or `arrow`; None for text, `.bin` and `.npy`.
    format: str | None = None


@dataclass(frozen=True)
class BucketFiles:
    """Objects of a bucket that a source names; attributes as in `SourceFiles`."""

    name: str
    files: tuple[BucketFile, ...]
    store: Store
    holds_tokens: bool
    format: str | None = None


def find_source(name: str) -> SourceFiles | BucketFiles:
    """Resolve `python-stdlib`, a path, a URL or a glob (`~` and `**` work). Raises DataError, or OSError of a bucket.

    A part of a path with `*`, `?` or `[` is a pattern only if nothing exists under exactly this name, see
    `_count_literal_parts`.
    """
    _validate_source_name(name)
    if "://" in name:
        return _find_in_bucket(name)
    if name == PYTHON_STDLIB:
        paths = _list_stdlib_paths()
    else:
        pattern = os.path.abspath(os.path.expanduser(name))
        if os.path.isdir(pattern) and not _is_mds_index(Path(pattern) / INDEX):
            files = os.path.join(name, "**", "*.txt")
            raise DataError(f"data.source={name}: is a directory, and no corpus ({INDEX}); name its files, as {files}")
        paths = [Path(pattern) / INDEX] if os.path.isdir(pattern) else match_files(pattern)
    if not paths and os.path.exists(os.path.expanduser(name)):
        raise DataError(f"data.source={name}: is a device, a pipe or a socket; needs a file")
    if not paths and os.path.islink(os.path.expanduser(name)):
        target = os.readlink(os.path.expanduser(name))
        raise DataError(f"data.source={name}: is a link to {target}, and no file is there")
    if not paths:
        raise DataError(f"data.source={name}: no file matches{suggest_path(name)}")
    # A format of another tool is recognised before suffixes, because `.idx` files are neither text nor ids here.
    format_name = _get_format(paths) or ("mds" if all(map(_is_mds_index, paths)) else None)
    holds_tokens = format_name is not None or _hold_tokens(name, paths)
    return SourceFiles(name, tuple(map(describe_file, paths)), holds_tokens, format_name)


def _find_in_bucket(name: str) -> BucketFiles:
    """Resolve a URL or a glob of one, by one listing of the objects below its literal prefix."""
    url, patterns = split_url_glob(name)
    if not patterns:
        raise DataError(f"data.source={name}: names no object; needs {url}/NAME")
    with wrap_source_errors(name):
        store = open_store(url)
        listing = store.list_files(get_glob_prefix(patterns))
        exact = "/".join(patterns)
        # A directory of MDS is named by its prefix, so its index counts as an exact match, too.
        names = match_objects(patterns, listing, (exact, f"{exact}/{INDEX}"))
        if not names:
            if any(found.startswith(f"{exact}/") for found in listing):
                hint = f"; {store.url}/{exact}/ holds no {INDEX}: name its objects, as {store.url}/{exact}/*.bin"
            elif has_pattern(patterns, listing):
                hint = ""
            else:
                near = difflib.get_close_matches(exact, sorted(store.list_names("")), n=1)
                hint = f"; did you mean {store.url}/{near[0]}?" if near else ""
            raise DataError(f"data.source={name}: no object matches{hint}")
        paths = [PurePath(found) for found in names]
        format_name = _get_format(paths)
        if {path.name for path in paths} == {INDEX} and _is_mds_content(store.read(names[0])):
            format_name = "mds"
    holds_tokens = format_name is not None or _hold_tokens(name, paths)
    files = tuple(make_bucket_file(url, found, listing[found]) for found in names)
    return BucketFiles(name, files, store, holds_tokens, format_name)


def find_corpus(name: str) -> str | None:
    """Return the directory or URL of the corpus that `name` or its index names, else None. Raises as `find_source`."""
    _validate_source_name(name)
    directory, _, last = name.rstrip("/").rpartition("/")
    if "://" not in name:
        path = os.path.abspath(os.path.expanduser(name))
        index = Path(path) / INDEX if os.path.isdir(path) else Path(path)
        return str(index.parent) if index.name == INDEX and index.is_file() and not _is_mds_index(index) else None
    directory = directory if last == INDEX else name.rstrip("/")
    split_url_glob(name)  # raises if the bucket's name is a glob
    # A token file is not a corpus, and asking the bucket would cost a request.
    if PurePath(directory).suffix in _TOKEN_SUFFIXES:
        return None
    with wrap_source_errors(name):
        store = open_store(directory)
        return directory if store.exists(INDEX) and not _is_mds_content(store.read(INDEX)) else None


def _validate_source_name(name: str) -> None:
    """Raise `DataError` if the text cannot be a path or URL."""
    try:
        validate_url(name)
    except InvalidError as error:
        hint = TOKENISE_HINT if name.startswith("hf://") else ""
        raise DataError(f"data.source={name[:60]}: {error}{hint}") from error


@contextlib.contextmanager
def wrap_source_errors(name: str) -> Iterator[None]:
    """Turn every error that a person must resolve into a `DataError` that names the source."""
    try:
        yield
    except DataError:
        raise
    except (InvalidError, DeniedError) as error:
        raise DataError(f"data.source={name}: {error}") from error
    except FileNotFoundError as error:
        raise DataError(f"data.source={name}: the bucket does not exist ({error})") from error


def _suggest_form(path: PurePath) -> str:
    """Return what can be done with a file that is not read, for the end of a message."""
    *_, inner, last = ["", "", *(suffix.lower() for suffix in path.suffixes)]
    if last in _COMPRESSED and inner in TEXT_SUFFIXES:
        return "; decompress it first"
    if last == ".npz":
        return "; for arrays of examples, source names a class that reads them (page Your data, Arrays)"
    return TOKENISE_HINT if _RAW_TEXT & {inner, last} else ""


def _hold_tokens(name: str, paths: Sequence[PurePath]) -> bool:
    """Return True if the suffixes are those of token ids, False for text. Raises DataError if mixed or unknown."""
    unknown = [path for path in paths if path.suffix.lower() not in TEXT_SUFFIXES | _TOKEN_SUFFIXES]
    if unknown:
        raise DataError(
            f"data.source={name}: {len(unknown)} of {len(paths)} files are of a kind that is not read, the first is "
            f"{unknown[0]}; needs text (.txt, .md, source code ...) or token ids (.bin, .npy), or nothing but .idx, "
            f".array_record, .parquet or .arrow{_suggest_form(unknown[0])}"
        )
    num_token_files = sum(path.suffix in _TOKEN_SUFFIXES for path in paths)
    if num_token_files not in (0, len(paths)):
        raise DataError(
            f"data.source={name}: matches {num_token_files} token files (.bin, .npy) and "
            f"{len(paths) - num_token_files} text files; name one kind"
        )
    return num_token_files > 0


def make_bucket_file(url: str, name: str, listed: FileInfo) -> BucketFile:
    """Return the object that a listing describes."""
    return BucketFile(url, name, listed.size_bytes, listed.version, listed.crc32c)


def split_url_glob(name: str) -> tuple[str, list[str]]:
    """Split a URL or glob into a store's URL and the parts of names in it. Raises DataError if a bucket is a glob."""
    scheme, _, rest = name.partition("://")
    parts = rest.rstrip("/").split("/")
    # The store is opened at the longest prefix without a glob, which keeps the listing short.
    num_fixed = next((i for i, part in enumerate(parts) if glob.has_magic(part)), max(len(parts) - 1, 1))
    if num_fixed == 0:
        raise DataError(f"{name}: the name of a bucket cannot hold *, ? or [; needs {scheme}://BUCKET/NAME")
    return f"{scheme}://{'/'.join(parts[:num_fixed])}", parts[num_fixed:]


def get_glob_prefix(patterns: Sequence[str]) -> str:
    """Return the literal prefix of all object names that the parts of a glob may match."""
    return re.split(r"[*?[]", "/".join(patterns))[0]


def _count_literal_parts(parts: Sequence[str], exists: Callable[[str], bool]) -> int:
    """Return how many of the first parts of a path are names; the rest, if there is any, is a glob.

    A part with `*`, `?` or `[` is a name if it exists under exactly this name, and a pattern otherwise. So
    `runs[2]/*.txt` names the files of the directory `runs[2]`, and never those of its sibling `runs2`. After the first
    pattern every part belongs to the glob. `exists` is True for the first parts of a path that exist, joined by
    slashes.
    """
    magic = (number for number, part in enumerate(parts) if glob.has_magic(part))
    return next((number for number in magic if not exists("/".join(parts[: number + 1]))), len(parts))


def has_pattern(patterns: Sequence[str], listing: Mapping[str, FileInfo]) -> bool:
    """Return True if a part of an object name, split at slashes, is a pattern by the names that exist."""
    return _count_literal_objects(patterns, listing) < len(patterns)


def match_objects(patterns: Sequence[str], listing: Mapping[str, FileInfo], exact: Sequence[str]) -> list[str]:
    """Return the listed names that the glob matches; the first of `exact` alone: a name may look like a glob."""
    if found := next((name for name in exact if name in listing), None):
        return [found]
    depth = _count_literal_objects(patterns, listing)
    prefix = "".join(f"{part}/" for part in patterns[:depth])
    below = [name for name in listing if name.startswith(prefix)] if depth < len(patterns) else []
    return [name for name in below if matches_glob(name.removeprefix(prefix).split("/"), patterns[depth:])]


def _count_literal_objects(patterns: Sequence[str], listing: Mapping[str, FileInfo]) -> int:
    return _count_literal_parts(patterns, lambda place: any(name.startswith(f"{place}/") for name in listing))


def matches_glob(parts: Sequence[str], patterns: Sequence[str]) -> bool:
    """Return True if a name matches a glob part by part: `**` is any number of parts, `*` matches no hidden one."""
    if not patterns:
        return not parts
    # `**` may match no part at all; at the end of a pattern it matches any name.
    if patterns[0] == "**" and matches_glob(parts, patterns[1:] or ["*"]):
        return True
    if not parts or (parts[0].startswith(".") and not patterns[0].startswith(".")):
        return False
    if patterns[0] == "**":
        return matches_glob(parts[1:], patterns)
    return fnmatch.fnmatchcase(parts[0], patterns[0]) and matches_glob(parts[1:], patterns[1:])


def is_available(name: str) -> bool:
    """Return True if `name` names a class, readable files on this machine, or a bucket (reachable from everywhere)."""
    if is_class_path(name):
        return True
    try:
        _validate_source_name(name)
        if "://" not in name and find_corpus(name) is None:
            find_source(name)
    except DataError:
        return False
    return True


def read_source_file(file: SourceFile) -> bytes:
    """Read the whole file. Raises DataError if it cannot be read, or has another size than when it was resolved."""
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
    """Return the present size and modification time of a file. Raises DataError if they cannot be read."""
    try:
        stat = path.stat()
    except OSError as error:
        raise DataError(f"data.source: cannot read {path}: {error.strerror}") from error
    return SourceFile(path, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)


def match_files(path: str) -> list[Path]:
    """Return the file of this absolute path, else the files that match it as a glob, sorted."""
    directory, pattern = _split_glob(path)
    if not pattern:
        return [Path(directory)] if os.path.isfile(directory) else []
    # `root_dir` is not part of the pattern, so its name may contain any character.
    found = (os.path.join(directory, name) for name in glob.glob(pattern, root_dir=directory, recursive=True))
    return [Path(name) for name in sorted(found) if os.path.isfile(name)]


def _split_glob(path: str) -> tuple[str, str]:
    """Split a path into a directory that is taken literally, and a glob below it; that is empty without a pattern."""
    parts = path.split("/")
    depth = _count_literal_parts(parts, os.path.lexists)
    return "/".join(parts[:depth]) or "/", "/".join(parts[depth:])


def suggest_path(name: str) -> str:
    """Return a hint for a path or a glob that matched nothing, with the nearest path that exists; '' without one."""
    if difflib.get_close_matches(name, [PYTHON_STDLIB]):
        return f"; did you mean {PYTHON_STDLIB}?"
    path = os.path.abspath(os.path.expanduser(name))
    directory, pattern = _split_glob(path)
    missing = Path(directory if pattern else path)
    if pattern and missing.is_dir():
        try:
            names = sorted(os.listdir(missing))
        except OSError:
            return ""
        return (
            f"; {directory} holds {', '.join(names[:3])}{', ...' * (len(names) > 3)}"
            if names
            else f"; {directory} is empty"
        )
    while not missing.parent.exists():
        missing = missing.parent
    try:
        siblings = sorted(os.listdir(missing.parent))
    except OSError:
        return ""
    near = difflib.get_close_matches(missing.name, siblings, n=1)
    return f"; did you mean {missing.parent / near[0]}?" if near else f"; {missing.parent} holds no {missing.name}"


def _list_stdlib_paths() -> list[Path]:
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
    # Ordered by digest: the end of the order, which becomes the validation set, is then a fair sample of the library.
    relative_paths.sort(key=lambda path: hashlib.sha256(path.encode()).digest())
    return [root / path for path in relative_paths if (root / path).is_file()]


def _get_format(paths: Sequence[PurePath]) -> str | None:
    return next((name for name, pattern in FORMATS.items() if all(pattern.search(path.name) for path in paths)), None)


def _is_mds_index(path: Path) -> bool:
    try:
        return path.name == INDEX and path.is_file() and _is_mds_content(path.read_bytes())
    except OSError:
        return False


def _is_mds_content(content: bytes) -> bool:
    try:
        return {"version", "shards"} <= parse_json(content).keys()
    except ValueError:
        return False
