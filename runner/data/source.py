"""Which files a `data.source` names, in which order. Knows paths and sizes, not what the files mean."""

import difflib
import glob
import hashlib
import os
import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from runner.errors import DataError, InvalidError
from runner.storage import check_url, parse_json

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
MDS_INDEX = "index.json"

# Installed packages are not the standard library, and what a build generates differs between machines of one version.
_STDLIB_FOREIGN_DIRECTORIES = frozenset({"site-packages", "dist-packages", "__pycache__"})
_STDLIB_GENERATED = ("config-", "_sysconfigdata", "sitecustomize", "usercustomize")


@dataclass(frozen=True)
class SourceFile:
    """A file as it was when the source was resolved: the identity under which what it yields is cached."""

    path: Path
    size_bytes: int
    mtime_ns: int


@dataclass(frozen=True)
class SourceFiles:
    """`name` as in the spec, for messages; `files` in reading order; `holds_tokens` for `.bin` and `.npy`.

    `format` is that of another tool: megatron, mds or array_record. Of mds the files are the indexes.
    """

    name: str
    files: tuple[SourceFile, ...]
    holds_tokens: bool
    format: str | None = None


def find_source(name: str) -> SourceFiles:
    """Resolve `python-stdlib`, a path or a glob (`~` and `**` work). Raises DataError if it names no readable file."""
    try:
        check_url(name.partition("://")[0])
    except InvalidError as error:
        raise DataError(f"data.source={name[:60]}: {error}") from error
    if "://" in name:
        raise DataError(f"data.source={name}: only local sources are read so far; copy it to a local path")
    paths = _stdlib_paths() if name == PYTHON_STDLIB else _matching_paths(name)
    if not paths:
        raise DataError(f"data.source={name}: no file matches{_nearest_name(name)}")
    formats = {_format_of(path) for path in paths}
    if len(formats) == 1 and (only := formats.pop()):
        return SourceFiles(name, tuple(map(describe_file, paths)), holds_tokens=True, format=only)
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
    return SourceFiles(name, tuple(map(describe_file, paths)), holds_tokens=num_token_files > 0)


def is_class(name: str) -> bool:
    """Whether `name` is `module:Class`, a source of the job's own, and no file."""
    return re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", name) is not None and not os.path.exists(name)


def is_available(name: str) -> bool:
    """Whether `name` names a class, or readable files on this machine."""
    if is_class(name):
        return True
    try:
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
        if _format_of(Path(pattern) / MDS_INDEX):
            return [Path(pattern) / MDS_INDEX]
        raise DataError(f"data.source={name}: is a directory; name its files, as {os.path.join(name, '**', '*.txt')}")
    if os.path.isfile(pattern):  # before globbing: a file's own name may hold brackets
        return [Path(pattern)]
    return [Path(path) for path in sorted(glob.glob(pattern, recursive=True)) if os.path.isfile(path)]


def _format_of(path: Path) -> str | None:
    """The format of another tool that a file is of; by its name alone, but for the index of MDS."""
    if path.name == MDS_INDEX and path.is_file():
        try:
            index = parse_json(path.read_bytes())
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: is no index of a data set: {error}") from error
        return "mds" if {"version", "shards"} <= index.keys() else None
    return next((name for name, pattern in FORMATS.items() if pattern.search(path.name)), None)


def _nearest_name(name: str) -> str:
    """What to try instead of a source that matched nothing: '; did you mean ...?', or '' if nothing is near."""
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
