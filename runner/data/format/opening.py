"""The formats of other tools by name. Knows how each is opened, and nothing of its bytes."""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path

from runner.data.format.array_record import open_array_record
from runner.data.format.document import DocumentFiles
from runner.data.format.mds import open_mds
from runner.data.format.megatron import open_megatron
from runner.data.remote.cache import CacheSettings
from runner.data.remote.reader import open_reader
from runner.data.source import BucketFiles, SourceFiles
from runner.errors import DataError

OPENERS: Mapping[str, Callable[..., DocumentFiles]] = {
    "megatron": open_megatron,
    "mds": open_mds,
    "array_record": open_array_record,
}


def open_format(
    source: SourceFiles | BucketFiles,
    options: Mapping[str, str | int | float | bool],
    cache_directory: Path,
    vocabulary_size: int | None = None,
    ranges: CacheSettings | None = None,
) -> DocumentFiles:
    """Open files of the format that `find_source` has told them to be of. Raises DataError on other content.

    `options` is `data.options`; `vocabulary_size` is what the spec names, if it does; `ranges` says where ranges of
    objects are kept.
    """
    assert source.format is not None
    reader = open_reader(source, ranges or CacheSettings(cache_directory, 0, 1))
    opener = OPENERS[source.format]
    try:
        bound = inspect.signature(opener).bind(source.files, reader, cache_directory, vocabulary_size, **options)
    except TypeError as error:
        raise DataError(f"data.source={source.name} is of {source.format}: data.options: {error}") from error
    return opener(*bound.args, **bound.kwargs)
