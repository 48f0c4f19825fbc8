"""From what a spec says, a path or a URL, to a store."""

import importlib
from pathlib import Path

from runner.errors import InvalidError
from runner.storage.bucket import BucketStore
from runner.storage.local import LocalStore
from runner.storage.store import Store

_DRIVERS = {  # scheme: module, class, extra of this package that brings the client
    "gs": ("runner.storage.google", "GoogleDriver", "gcs"),
    "s3": ("runner.storage.amazon", "AmazonDriver", "s3"),
    "az": ("runner.storage.azure", "AzureDriver", "azure"),
}


def check_url(text: str) -> None:
    """Raise `InvalidError` if `text` cannot name a directory, without touching it."""
    scheme, separator, rest = text.partition("://")
    if not separator:
        return
    if scheme not in _DRIVERS:
        choices = ", ".join(f"{known}://" for known in _DRIVERS)
        raise InvalidError(f"{scheme}:// is not known; got {text}, needs a local path or one of {choices}")
    if not rest.partition("/")[0]:
        raise InvalidError(f"{text} names no bucket; needs {scheme}://BUCKET/PREFIX")


def extra_of(text: str) -> str | None:
    """The extra of this package that brings the client of a URL's store; None for a local path."""
    check_url(text)
    scheme, separator, _ = text.partition("://")
    return _DRIVERS[scheme][2] if separator else None


def open_store(text: str) -> Store:
    """The store of a local path or URL. Raises `InvalidError` with what is missing: a package, credentials, a name."""
    check_url(text)
    scheme, separator, _ = text.partition("://")
    if separator:
        return _open_bucket(text, *_DRIVERS[scheme])
    path = Path(text).expanduser().absolute()
    if path.exists() and not path.is_dir():
        raise InvalidError(f"{path} is a file, needs a directory")
    return LocalStore(path)


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
