"""Stores from the paths and URLs of specs."""

import os
import re
from pathlib import Path

from runner.errors import InvalidError
from runner.spec.imports import import_extra
from runner.storage.bucket import BucketStore
from runner.storage.local import LocalStore
from runner.storage.store import Store, find_kind

_DRIVERS = {  # scheme: module, class, extra of this package that installs the client
    "gs": ("runner.storage.gcs", "GCSDriver", "gcs"),
    "s3": ("runner.storage.s3", "S3Driver", "s3"),
    "az": ("runner.storage.azure", "AzureDriver", "azure"),
}
_MAX_NAME_BYTES = 255  # of one name, on the disks of Linux
_MAX_PATH_BYTES = 4095
# Files and directories of a run and of published weights, of which a checkpoint has none.
_NOT_IN_CHECKPOINTS = frozenset({"job.json", "spec.yaml", "config.json", "checkpoints"})
_VARIABLE = re.compile(r"\$[A-Za-z_{(]|`")


def validate_url(text: str) -> None:
    """Raise `InvalidError` if `text` cannot name a directory or files on any machine. Writes nothing."""
    try:
        path = os.fsencode(text)
    except UnicodeEncodeError as error:
        raise InvalidError(f"{text[:60]!r} is not text that a file can be named by") from error
    if b"\0" in path:
        raise InvalidError(f"{text[:60]!r} holds a NUL, which no path can")
    scheme, separator, rest = text.partition("://")
    if separator:
        if scheme not in _DRIVERS:
            choices = ", ".join(f"{known}://" for known in _DRIVERS)
            raise InvalidError(f"{scheme}:// is not known; got {text}, needs a local path or one of {choices}")
        if not rest.partition("/")[0]:
            raise InvalidError(f"{text} names no bucket; needs {scheme}://BUCKET/PREFIX")
        return
    longest = max(map(len, path.split(b"/")))
    if longest > _MAX_NAME_BYTES:
        raise InvalidError(f"{text[:60]}... has a name of {longest} bytes; a name has at most {_MAX_NAME_BYTES}")
    if len(path) > _MAX_PATH_BYTES:
        raise InvalidError(f"{text[:60]}... has {len(path)} bytes; a path has at most {_MAX_PATH_BYTES}")
    # These are legal names, and a directory may have got one by a move; otherwise they are never the intended ones.
    parts = text.split("/")
    for number, part in enumerate(parts, start=1):
        variable = _VARIABLE.search(part)
        if (variable is None and "\\" not in part) or os.path.lexists(os.path.expanduser("/".join(parts[:number]))):
            continue
        if variable is None:
            raise InvalidError(
                f"{text} has a backslash, which separates no directories here; write / between their names"
            )
        raise InvalidError(
            f"{text} has {variable[0]}...: variables are not expanded; write the path, or ~ for the home directory"
        )


def local_directory(text: str) -> Path:
    """Return the absolute path that `text` names on this machine; `~` is the home directory. Writes nothing.

    Raises `InvalidError` if no directory can have this name, or the user after `~` is not known.
    """
    validate_url(text)
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError as error:
        # As in a shell, `~name` is the name itself where there is no such user.
        if os.path.lexists(text.partition("/")[0]):
            return Path(text).absolute()
        raise InvalidError(f"{text}: no home directory is known of {text.partition('/')[0]}") from error


def validate_path(path: Path) -> None:
    """Raise `InvalidError` if `path` or one of its parents exists and is not a directory."""
    for place in (*reversed(path.parents), path):
        kind = find_kind(place)
        if kind is None:
            break
        if kind != "a directory":
            raise InvalidError(f"{place} is {kind}, needs a directory")


def find_extra(text: str) -> str | None:
    """Return the extra of this package that installs the client of a URL's store; None for a local path."""
    validate_url(text)
    scheme, separator, _ = text.partition("://")
    return _DRIVERS[scheme][2] if separator else None


def make_store(text: str) -> Store:
    """Return the store of a local path or URL, without accessing it.

    Raises `InvalidError` if a package, credentials or a name is missing.
    """
    validate_url(text)
    scheme, separator, _ = text.partition("://")
    if not separator:
        return LocalStore(local_directory(text))
    return _open_bucket(text, *_DRIVERS[scheme][:2])


def open_store(text: str) -> Store:
    """Return the store of a local path or URL like `make_store`, and check a local path.

    Raises `InvalidError` as `make_store`, or if a local path or one of its parents is not a directory.
    """
    store = make_store(text)
    # A bucket is not accessed here; `probe_store` checks it.
    if store.root is not None:
        validate_path(store.root)
    return store


def resolve_place(text: str) -> str:
    """Return the one name of the directory that a path or URL names by links, with `..`, or with further slashes."""
    scheme, separator, rest = text.partition("://")
    if separator:
        # Drivers drop the slashes at both ends of a prefix; those inside belong to the names of objects.
        bucket, _, prefix = rest.partition("/")
        return f"{scheme}://{bucket}/{prefix.strip('/')}".rstrip("/")
    return f"/{os.path.realpath(local_directory(text)).lstrip('/')}"


def split_checkpoint(text: str) -> tuple[str, str | None]:
    """Split `<run>/checkpoints/<name>` into run and name; return other text whole, with None as the name.

    A local path of this form is whole, too, if a run or published weights are there, because their parent directory may
    be called `checkpoints` as well. In a bucket, which is not accessed, this form always names a checkpoint.
    """
    directory, separator, name = text.rstrip("/").rpartition("/checkpoints/")
    if not separator or "/" in name:
        return text, None
    is_whole = "://" not in text and not _NOT_IN_CHECKPOINTS.isdisjoint(make_store(text).list_names(""))
    return (text, None) if is_whole else (directory, name)


def _open_bucket(url: str, module: str, driver_name: str) -> Store:
    try:
        # Imported by name: the client is an optional package, and takes a second to import.
        driver = getattr(import_extra(module), driver_name)(url.rstrip("/"))
    except ValueError as error:
        raise InvalidError(f"{url}: {str(error).splitlines()[0]}") from error
    return BucketStore(url.rstrip("/"), driver.prefix, driver)
