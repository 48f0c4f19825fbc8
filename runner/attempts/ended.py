"""Fold the files of ended attempts, so that no start and no command reads more of them as a run gets older.

`attempts/<first>-<last>.zip` holds the claims and the clock files of `BLOCK` attempts, under their names; in a bucket
`events/<first>-<last>.jsonl` holds their events. Process 0 of a new attempt folds each block whose last attempt is
`NUM_RECENT` attempts old, in a thread, and deletes what an earlier attempt has folded. In between, and if a file has
changed since, an attempt has files of its own beside the block: readers use the own claim and clock, and the events in
the block.
"""

import contextlib
import io
import struct
import threading
import zipfile
import zlib

from runner.attempts.layout import ATTEMPTS
from runner.console import warn
from runner.storage import Store, fold_files, merge_parts, parse_number

BLOCK = 256  # attempts
NUM_RECENT = 64  # newest attempts, whose files stay as they are
_FILE_BYTES_MAX = 1 << 16  # of a claim or a clock, which have about 200 and 1,500 bytes


def start_folding(store: Store, newest: int) -> None:
    """Fold the files of ended attempts in a thread. Process 0 of attempt `newest` only; never raises."""

    def fold() -> None:
        try:
            fold_attempts(store, newest)
        except OSError as error:
            warn(f"files of ended attempts are not folded ({error})")

    if newest >= BLOCK + NUM_RECENT:
        threading.Thread(target=fold, name="fold", daemon=True).start()


def fold_attempts(store: Store, newest: int) -> None:
    """Fold, or complete, each block that is old enough once attempt `newest` has begun. Raises `OSError`."""
    sizes = {f"{ATTEMPTS}/{name}": size for name, size in store.list_sizes(ATTEMPTS).items()}
    numbers = {name: parse_number(name.rpartition("/")[2].removesuffix(".clock")) for name in sizes}
    # On a disk the events of all attempts are in one file.
    logs = {name: info.size_bytes for name, info in store.list_files("events/").items()} if store.root is None else {}
    for last in range(BLOCK, newest - NUM_RECENT + 1, BLOCK):
        first = last - BLOCK + 1
        own = {name: sizes[name] for name, number in numbers.items() if number is not None and first <= number <= last}
        fold_files(store, f"{ATTEMPTS}/{first}-{last}.zip", own, sizes, combine=_pack, find_contained=_find_packed)
        merge_parts(store, "events", first, last, logs)


def _pack(contents: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in contents.items():
            file.writestr(zipfile.ZipInfo(name.rpartition("/")[2]), content, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def _find_packed(contents: dict[str, bytes], packed: bytes) -> list[str]:
    with contextlib.suppress(ValueError):  # of a damaged block, which is reported to whoever reads the history
        files = unpack(packed)
        return [name for name, content in contents.items() if files.get(name.rpartition("/")[2]) == content]
    return []


def unpack(content: bytes) -> dict[str, bytes]:
    """Return the files in a block, by name. Raises `ValueError` if it is damaged, or has other files."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as file:
            infos = file.infolist()
            if len(infos) > 2 * BLOCK or any(info.file_size > _FILE_BYTES_MAX for info in infos):
                raise ValueError("it has more or larger files than a block of attempts")
            return {info.filename: file.read(info) for info in infos}
    except (zipfile.BadZipFile, zlib.error, struct.error, OverflowError, RuntimeError, EOFError) as error:
        raise ValueError(f"it is no archive of attempts: {error}") from error
