"""Damage to files of a run directory: functions of a path, by name, and I/O errors.

`list_damages` gives the damages that exist on disk. `ERRORS` are injected into system calls instead, because tests run
as root, for whom permissions do not fail.
"""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runner.checkpoint.manifest import seal

Damage = Callable[[Path], None]


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def delete(path: Path) -> None:
    remove(path)


def make_empty(path: Path) -> None:
    is_directory = path.is_dir()
    remove(path)
    path.mkdir() if is_directory else path.touch()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def write_binary(path: Path) -> None:
    path.write_bytes(bytes(range(256)) * 8)


def _make_writer(content: bytes) -> Damage:
    def damage(path: Path) -> None:
        path.write_bytes(content)

    return damage


def change_value_types(path: Path) -> None:
    """Give every key a value of another type; a manifest keeps a valid digest, so only its content is wrong."""
    record = json.loads(path.read_bytes())
    others = {key: [key] if not isinstance(value, list) else 1 for key, value in record.items() if key != "format"}
    _rewrite(path, record | others)


def drop_keys(path: Path) -> None:
    record = json.loads(path.read_bytes())
    _rewrite(path, {key: record[key] for key in record if key == "format"})


def write_newer_format(path: Path) -> None:
    _rewrite(path, json.loads(path.read_bytes()) | {"format": 99, "more": 1})


def _rewrite(path: Path, record: dict[str, Any]) -> None:
    is_manifest = path.name == "manifest.json"
    record.pop("digest", None)
    path.write_bytes(seal(record) if is_manifest else json.dumps(record).encode())


def change_file_type(path: Path) -> None:
    is_directory = path.is_dir()
    remove(path)
    path.write_bytes(b"{}") if is_directory else path.mkdir()


def replace_by_dangling_link(path: Path) -> None:
    remove(path)
    path.symlink_to(path.parent / "nowhere" / "at all")


def replace_by_link_loop(path: Path) -> None:
    remove(path)
    path.symlink_to(path)


def replace_by_pipe(path: Path) -> None:
    remove(path)
    os.mkfifo(path)


def move_behind_link(path: Path) -> None:
    """Move the file elsewhere and leave a symlink, as users do to free a disk: this must not count as damage."""
    elsewhere = next(parent / "elsewhere" for parent in path.parents if (parent / "elsewhere").is_dir())
    shutil.move(path, elsewhere / path.name)
    path.symlink_to(elsewhere / path.name)


PATH_DAMAGES = (
    delete,
    make_empty,
    change_file_type,
    replace_by_dangling_link,
    replace_by_link_loop,
    replace_by_pipe,
    move_behind_link,
)
FILE_DAMAGES = {"torn": truncate, "no text": write_binary}
JSON_DAMAGES: dict[str, Damage] = {
    "a list": _make_writer(b"[]"),
    "an object": _make_writer(b"{}"),
    "text": _make_writer(b'"void contested"'),
    "a number": _make_writer(b"7"),
    "null": _make_writer(b"null"),
    "deep": _make_writer(b"[" * 100_000),
    "other types": change_value_types,
    "fewer keys": drop_keys,
    "newer format": write_newer_format,
}
ERRORS = {name: getattr(errno, name) for name in ("EACCES", "EIO", "ESTALE", "ELOOP", "EISDIR", "EROFS")}


def list_damages(path: Path) -> dict[str, Damage]:
    """Return the damages that apply to the file or directory at `path`."""
    found: dict[str, Damage] = {damage.__name__.replace("_", " "): damage for damage in PATH_DAMAGES}
    if path.is_file():
        found |= FILE_DAMAGES
    return found | (JSON_DAMAGES if path.suffix == ".json" else {})


def inject_errors(monkeypatch: pytest.MonkeyPatch, path: Path, number: int) -> None:
    """Make every open or listing at or below `path` in this process raise OSError.

    `stat` still works, as on a disk with bad blocks, where the directory entry remains readable.
    """
    for module, name in (("os", "open"), ("os", "listdir"), ("os", "scandir"), ("io", "open")):
        monkeypatch.setattr(f"{module}.{name}", _fail_below(getattr(__import__(module), name), path, number))


def _fail_below(original: Callable[..., Any], path: Path, number: int) -> Callable[..., Any]:
    def fail_or_call(name: Any = ".", *arguments: Any, **named: Any) -> Any:
        if isinstance(name, str | os.PathLike) and Path(name).is_relative_to(path):
            raise OSError(number, os.strerror(number), str(name))
        return original(name, *arguments, **named)

    return fail_or_call
