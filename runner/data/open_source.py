"""From the keys of a spec to a `Source`: which class reads what they name. Refuses keys that it does not read.

The formats of other tools by name. Knows how each is opened, and nothing of its bytes.
"""

import inspect
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from runner.data.array_record import open_array_record
from runner.data.corpus import TrainOn, open_corpus
from runner.data.documents import DocumentFiles, open_megatron
from runner.data.mds import open_mds
from runner.data.remote import CacheSettings, open_reader
from runner.data.source import CheckedSource, Source
from runner.data.source_files import BucketFiles, SourceFiles, find_corpus, find_source, is_class_path
from runner.data.text import TextTokens, load_text
from runner.data.token_files import open_token_files
from runner.errors import DataError, InvalidError
from runner.spec import load_class

if TYPE_CHECKING:
    from runner.config import DataConfig, TokenSource


FORMAT_OPENERS: Mapping[str, Callable[..., DocumentFiles]] = {
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
    opener = FORMAT_OPENERS[source.format]
    try:
        bound = inspect.signature(opener).bind(source.files, reader, cache_directory, vocabulary_size, **options)
    except TypeError as error:
        raise DataError(f"data.source={source.name} is of {source.format}: data.options: {error}") from error
    return opener(*bound.args, **bound.kwargs)


SEPARATORS = {"none": b"", "newline": b"\n", "nul": b"\0"}


def open_source(
    named: "TokenSource",
    config: "DataConfig",
    cache_directory: Path,
    vocabulary_size: int | None,
    *,
    unsaid: TrainOn | None = None,
) -> Source:
    """The tokens that one source of `config` names. Called on every host.

    `vocabulary_size` is the model's, where the spec names it; `unsaid` what counts of dialogues where it does not say.
    Raises DataError, also if there are no tokens, and where
    the source cannot serve `config.packing`.
    """
    source = _open(named, config, cache_directory, vocabulary_size, unsaid)
    if not len(source):
        raise DataError(f"data.source={named.source}: is empty: it holds 0 tokens")
    if config.packing != "concatenate" and not source.has_documents:
        raise DataError(
            f"data.packing={config.packing}: data.source={named.source} does not say where documents end; needs a "
            "corpus with an index, text files, or packing: concatenate"
        )
    return source


def _open(
    named: "TokenSource",
    config: "DataConfig",
    cache_directory: Path,
    vocabulary_size: int | None,
    unsaid: TrainOn | None,
) -> Source:
    if is_class_path(named.source):
        _refuse_unread(named, "is a class", "dtype", "train_on")
        return _make_own(named)
    ranges = CacheSettings(cache_directory, config.cache_bytes, config.sequence_length + 1)
    if (corpus := find_corpus(named.source)) is not None:
        _refuse_unread(named, "names a corpus", "dtype", "options")
        return open_corpus(named.source, corpus, ranges, named.train_on, unsaid=unsaid)
    files = find_source(named.source)
    if files.format:
        _refuse_unread(named, f"is of {files.format}", "dtype", "train_on")
        return open_format(files, named.options, cache_directory, vocabulary_size, ranges)
    if files.holds_tokens:
        _refuse_unread(named, "names token files", "options", "train_on")
        return open_token_files(files, cache_directory, named.dtype, vocabulary_size, ranges)
    _refuse_unread(named, "names text files", "dtype", "options", "train_on")
    separator = SEPARATORS[config.document_separator]
    text = load_text(files, config.tokenizer, cache_directory, separator, ranges)
    is_copied = isinstance(files, BucketFiles)
    return TextTokens(text, sum(file.size_bytes for file in files.files) if is_copied else 0)


def _refuse_unread(named: "TokenSource", kind: str, *keys: str) -> None:
    """Refuse a key of the source that says something, and that one of this kind does not read."""
    for key in keys:
        if (value := getattr(named, key)) != type(named).model_fields[key].default:
            raise DataError(f"data.{key}={value}: nothing reads it, data.source={named.source} {kind}; leave it out")


def validate_options_read(config: "DataConfig", sources: Collection[Source]) -> None:
    """Raise `DataError` if a key that is said once, for all sources of `config`, is read by none of them."""
    is_read = {
        "document_separator": any(isinstance(source, TextTokens) for source in sources),
        "cache_bytes": any("://" in named.source for named in [*config.sources, *config.validation.values()]),
    }
    reader = {"document_separator": "text", "cache_bytes": "in a bucket"}
    for key, is_needed in is_read.items():
        value = getattr(config, key)
        if not is_needed and value != type(config).model_fields[key].default:
            raise DataError(f"data.{key}={value}: nothing reads it, no source is {reader[key]}; leave it out")


def _make_own(named: "TokenSource") -> Source:
    """The source that a class of somebody else's makes."""
    name = f"data.source={named.source}"
    own = load_source_class(named)
    if lacking := sorted(getattr(own, "__abstractmethods__", ())):
        raise DataError(f"{name}: lacks {', '.join(lacking)}")
    try:
        inspect.signature(own).bind(**named.options)
    except TypeError as error:
        raise DataError(f"{name}: data.options: {error}") from error
    return CheckedSource(own(**named.options), name)


def load_source_class(named: "TokenSource") -> type[Source]:
    """The class that `module:Class` names. Raises DataError if it is none, or no `Source`."""
    try:
        found: type[Source] = load_class(named.source, Source)
    except InvalidError as error:
        raise DataError(f"data.source={named.source}: {error}") from error
    return found
