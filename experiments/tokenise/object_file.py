"""A file in a bucket, read in blocks as it is needed: of a large one a few blocks are in memory, never all."""

import io
from concurrent.futures import Future, ThreadPoolExecutor

from experiments.tokenise.source import InputFile, open_place
from runner.errors import DataError
from runner.storage import ChangedError

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
