"""From what a spec says, a path or a URL, to a store."""

import importlib
import os
import re
from pathlib import Path

from runner.errors import InvalidError
from runner.storage.bucket import BucketStore
from runner.storage.local import LocalStore
from runner.storage.store import Store, find_kind

_DRIVERS = {  # scheme: module, class, extra of this package that brings the client
    "gs": ("runner.storage.gcs", "GCSDriver", "gcs"),
    "s3": ("runner.storage.s3", "S3Driver", "s3"),
    "az": ("runner.storage.azure", "AzureDriver", "azure"),
}


_MOST_NAME_BYTES = 255  # of one name, on the disks of Linux
_MOST_PATH_BYTES = 4095
_VARIABLE = re.compile(r"\$[A-Za-z_{]")


def validate_url(text: str) -> None:
    """Raise `InvalidError` if `text` cannot name a directory, or files, on any machine, without touching it."""
    try:
        path = os.fsencode(text)
    except UnicodeEncodeError as error:
        raise InvalidError(f"{text[:60]!r} is not text that a file can be named by") from error
    if b"\0" in path:
        raise InvalidError(f"{text[:60]!r} holds a NUL, which no path can")
    scheme, separator, rest = text.partition("://")
    if not separator:
        _check_path(text, path)
        return
    if scheme not in _DRIVERS:
        choices = ", ".join(f"{known}://" for known in _DRIVERS)
        raise InvalidError(f"{scheme}:// is not known; got {text}, needs a local path or one of {choices}")
    if not rest.partition("/")[0]:
        raise InvalidError(f"{text} names no bucket; needs {scheme}://BUCKET/PREFIX")


def _check_path(text: str, path: bytes) -> None:
    longest = max(map(len, path.split(b"/")))
    if longest > _MOST_NAME_BYTES:
        raise InvalidError(f"{text[:60]}... has a name of {longest} bytes; a name has at most {_MOST_NAME_BYTES}")
    if len(path) > _MOST_PATH_BYTES:
        raise InvalidError(f"{text[:60]}... has {len(path)} bytes; a path has at most {_MOST_PATH_BYTES}")
    if variable := _VARIABLE.search(text):
        raise InvalidError(
            f"{text} has {variable[0]}...: variables are not expanded; write the path, or ~ for the home directory"
        )


def local_directory(text: str) -> Path:
    """The absolute path that `text` names on this machine; `~` is the home directory. Nothing is looked at.

    Raises `InvalidError` if no directory can be called so: a name too long, a user who is not known.
    """
    validate_url(text)
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError as error:
        raise InvalidError(f"{text}: no home directory is known of {text.partition('/')[0]}") from error


def validate_path(path: Path) -> None:
    """Raise `InvalidError` if `path`, which may be yet to be made, can be no directory for what stands on the way."""
    for place in (*reversed(path.parents), path):
        kind = find_kind(place)
        if kind is None:
            break
        if kind != "a directory":
            raise InvalidError(f"{place} is {kind}, needs a directory")


def find_extra(text: str) -> str | None:
    """The extra of this package that brings the client of a URL's store; None for a local path."""
    validate_url(text)
    scheme, separator, _ = text.partition("://")
    return _DRIVERS[scheme][2] if separator else None


def make_store(text: str) -> Store:
    """The store of a local path or URL, of which nothing is looked at yet.

    Raises `InvalidError` with what is missing: a package, credentials, a name.
    """
    validate_url(text)
    scheme, separator, _ = text.partition("://")
    if separator:
        return _open_bucket(text, *_DRIVERS[scheme])
    return LocalStore(local_directory(text))


def open_store(text: str) -> Store:
    """Like `make_store`; raises `InvalidError` too if what stands on the way to a local path is no directory."""
    store = make_store(text)
    if store.root is not None:
        validate_path(store.root)
    return store


def split_checkpoint(text: str) -> tuple[str, str | None]:
    """A run's directory, and the name of one of its checkpoints if `text` ends in `checkpoints/<name>`."""
    directory, separator, name = text.rstrip("/").rpartition("/checkpoints/")
    return (directory, name) if separator and "/" not in name else (text, None)


def _open_bucket(url: str, module: str, driver_name: str, extra: str) -> Store:
    try:
        driver = getattr(importlib.import_module(module), driver_name)(url.rstrip("/"))
    except ModuleNotFoundError as error:
        raise InvalidError(f"{url} needs the package {error.name}: pip install 'runner[{extra}]'") from error
    except ValueError as error:
        raise InvalidError(f"{url}: {str(error).splitlines()[0]}") from error
    return BucketStore(url.rstrip("/"), driver.prefix, driver)
