"""Opening of a source: from the keys of a spec to the `Source` that reads them. Unused keys are errors."""

import inspect
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from runner.data.array_record import open_array_record
from runner.data.corpus import TrainOn, open_corpus
from runner.data.mds import open_mds
from runner.data.megatron import open_megatron
from runner.data.remote import CacheSettings, open_reader
from runner.data.source import CheckedSource, Source
from runner.data.source_files import BucketFiles, SourceFiles, find_corpus, find_source, is_class_path
from runner.data.text import TextTokens, load_text
from runner.data.token_files import DocumentFiles, open_token_files
from runner.errors import DataError, InvalidError
from runner.spec import load_class

if TYPE_CHECKING:
    from runner.config import DataConfig, TokenSource

SEPARATORS = {"none": b"", "newline": b"\n", "nul": b"\0"}

# Each opener takes (files, reader, cache directory, trusted vocabulary size), and `data.options` as keywords.
FORMAT_OPENERS: Mapping[str, Callable[..., DocumentFiles]] = {
    "megatron": open_megatron,
    "mds": open_mds,
    "array_record": open_array_record,
}


def open_source(
    token_source: "TokenSource",
    config: "DataConfig",
    cache_directory: Path,
    vocabulary_size: int | None,
    *,
    default_train_on: TrainOn | None = None,
) -> Source:
    """Open one source of `config`. Called on every host.

    Args:
        token_source: keys of the source: an entry of the mixture, a validation set, or `config` itself.
        config: data config with the keys that all sources share, such as packing and tokenizer.
        cache_directory: directory of the cache on this host's disk.
        vocabulary_size: vocabulary of the model, if the spec names it.
        default_train_on: tokens of dialogues that count in the loss if the spec does not say.

    Raises:
        DataError: the source is empty, cannot be read, cannot serve `config.packing`, or does not read one of its keys.
        OSError: a bucket does not answer.
    """
    cache = CacheSettings(cache_directory, config.cache_bytes, config.sequence_length + 1)
    source: Source
    if is_class_path(token_source.source):
        _validate_unread_keys(token_source, "is a class", "dtype", "train_on")
        name = f"data.source={token_source.source}"
        source_class = load_source_class(token_source)
        if missing := sorted(getattr(source_class, "__abstractmethods__", ())):
            raise DataError(f"{name}: does not implement {', '.join(missing)}")
        # The arguments are bound before the call, so that a TypeError inside the class is not taken for bad options.
        try:
            inspect.signature(source_class).bind(**token_source.options)
        except TypeError as error:
            raise DataError(f"{name}: data.options: {error}") from error
        source = CheckedSource(source_class(**token_source.options), name)
    elif (corpus := find_corpus(token_source.source)) is not None:
        _validate_unread_keys(token_source, "names a corpus", "dtype", "options")
        source = open_corpus(
            token_source.source, corpus, cache, token_source.train_on, default_train_on=default_train_on
        )
    else:
        files = find_source(token_source.source)
        if files.format:
            _validate_unread_keys(token_source, f"is of {files.format}", "dtype", "train_on")
            source = open_format(files, token_source.options, cache_directory, vocabulary_size, cache)
        elif files.holds_tokens:
            _validate_unread_keys(token_source, "names token files", "options", "train_on")
            source = open_token_files(files, cache_directory, token_source.dtype, vocabulary_size, cache)
        else:
            _validate_unread_keys(token_source, "names text files", "dtype", "options", "train_on")
            separator = SEPARATORS[config.document_separator]
            text = load_text(files, config.tokenizer, cache_directory, separator, cache)
            # Text in a bucket is copied to this host's disk first; `plan` reports the space that the copies take.
            is_copied = isinstance(files, BucketFiles)
            source = TextTokens(text, sum(file.size_bytes for file in files.files) if is_copied else 0)
    if not len(source):
        raise DataError(f"data.source={token_source.source}: is empty: it holds 0 tokens")
    if config.packing != "concatenate" and not source.has_documents:
        raise DataError(
            f"data.packing={config.packing}: data.source={token_source.source} does not say where documents end; "
            "needs a corpus with an index, text files, or packing: concatenate"
        )
    return source


def open_format(
    source: SourceFiles | BucketFiles,
    options: Mapping[str, str | int | float | bool],
    cache_directory: Path,
    trusted_vocabulary_size: int | None = None,
    cache: CacheSettings | None = None,
) -> DocumentFiles:
    """Open token files in another tool's format (Megatron, MDS or ArrayRecord), as resolved by `find_source`.

    Args:
        source: files, whose `format` is set.
        options: value of `data.options`.
        cache_directory: directory of derived files, such as record lengths.
        trusted_vocabulary_size: vocabulary of the model, if the spec names it. Each id is then checked when it is read,
            and a long source is not scanned in advance.
        cache: cache of byte ranges of objects in a bucket; by default nothing is cached.

    Raises:
        DataError: the content is of another format, or the options do not fit.
    """
    assert source.format is not None
    reader = open_reader(source, cache or CacheSettings(cache_directory, 0, 1))
    opener = FORMAT_OPENERS[source.format]
    try:
        # Options are bound before the call, so that a TypeError inside an opener is not taken for bad options.
        bound = inspect.signature(opener).bind(
            source.files, reader, cache_directory, trusted_vocabulary_size, **options
        )
    except TypeError as error:
        raise DataError(f"data.source={source.name} is of {source.format}: data.options: {error}") from error
    return opener(*bound.args, **bound.kwargs)


def _validate_unread_keys(token_source: "TokenSource", kind: str, *unread: str) -> None:
    """Raise `DataError` if one of the keys `unread`, which a source of this kind ignores, is set."""
    for key in unread:
        if (value := getattr(token_source, key)) != type(token_source).model_fields[key].default:
            raise DataError(
                f"data.{key}={value}: nothing reads it, data.source={token_source.source} {kind}; leave it out"
            )


def validate_shared_keys(config: "DataConfig", sources: Collection[Source]) -> None:
    """Raise `DataError` if a key that all sources of `config` share is set, but no source uses it."""
    is_read = {
        "document_separator": any(isinstance(source, TextTokens) for source in sources),
        "cache_bytes": any(
            "://" in token_source.source for token_source in [*config.sources, *config.validation.values()]
        ),
    }
    needs = {"document_separator": "text", "cache_bytes": "in a bucket"}
    for key, is_needed in is_read.items():
        value = getattr(config, key)
        if not is_needed and value != type(config).model_fields[key].default:
            raise DataError(f"data.{key}={value}: nothing reads it, no source is {needs[key]}; leave it out")


def load_source_class(token_source: "TokenSource") -> type[Source]:
    """Import the class that `module:Class` names.

    Raises:
        DataError: the import fails, or the class is not a subclass of `Source`.
    """
    try:
        source_class: type[Source] = load_class(token_source.source, Source)
    except InvalidError as error:
        raise DataError(f"data.source={token_source.source}: {error}") from error
    return source_class
