"""Opening of a source: makes the `Source` for the keys of a spec. Unused keys are errors.

Text files are tokenised once on each host; later starts memory-map the cached array. Text in a bucket is first copied
whole to this host's disk. The cached record of a text points to `<digest>.npy` and holds everything else that is needed
to open it: the digest (which is also part of the data set's fingerprint) and the characters of a character tokenizer.
"""

import copy
import dataclasses
import hashlib
import io
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from runner.attempts.layout import TEXT_FOLDER
from runner.data.array_record import read_array_record
from runner.data.corpus import TrainOn, open_corpus
from runner.data.mds import read_mds
from runner.data.megatron import read_megatron, validate_pairs
from runner.data.readers import cache_key, publish, read_record, warn_unwritable, write_record
from runner.data.remote import CacheSettings, open_reader
from runner.data.source import CheckedSource, Source, bind_options
from runner.data.source_files import (
    BucketFiles,
    File,
    SourceFile,
    SourceFiles,
    find_corpus,
    find_source,
    read_source_file,
)
from runner.data.tables import read_tables
from runner.data.token_files import DocumentFiles, TokenReader, TokenSequence, open_token_files
from runner.data.tokenizers import TOKENIZER_FILES, ByteTokenizer, CharacterTokenizer, Tokenizer, collect_characters
from runner.errors import DataError, InvalidError, SpecError
from runner.spec import Document, ExecutionSpec, KeyPath, is_class_path, load_class
from runner.storage import JsonObject

if TYPE_CHECKING:
    from runner.config import DataConfig, TokenSource


# An array up to this size is hashed whole each time it is opened (0.1 s); of a larger one only the size is checked.
VERIFIED_BYTES_MAX = 1 << 27
SEPARATORS = {"none": b"", "newline": b"\n", "nul": b"\0"}

_TOKEN_READERS: Mapping[str, TokenReader] = {  # by format
    "megatron": read_megatron,
    "mds": read_mds,
    "array_record": read_array_record,
    "parquet": read_tables,
    "arrow": read_tables,
}
_TABLE_FORMATS = ("parquet", "arrow")  # their reader also takes `train_on`


@dataclass(frozen=True)
class TokenisedText:
    """Token ids of all files of a text."""

    ids: np.ndarray  # 1-D, of the tokenizer's dtype
    tokenizer: Tokenizer
    sha256: str  # digest of the little-endian bytes of `ids`
    ends: np.ndarray  # int64 positions in `ids` at which the files end, without repetitions


class TextTokens(TokenSequence, Source):
    """Tokens of text files, made by this host or found in its cache. The files are not read again.

    A file is a document, and the separator that follows it belongs to it. The fingerprint is that of the ids alone;
    where documents matter, `ends` (int64 positions of the ends of files) must be compared, too.
    """

    has_documents = True

    def __init__(self, text: TokenisedText, bytes_copied: int = 0, files: Sequence[File] = ()) -> None:
        """Wrap the tokens of `files`, of which none is empty."""
        super().__init__([text.ids])
        self.bytes_copied = bytes_copied
        self._file_ends = text.ends[text.ends > 0]  # an empty file may be the first
        self._text_files = files if len(files) == len(self._file_ends) else None
        self.tokenizer = text.tokenizer
        self._sha256, self.ends = text.sha256, text.ends

    @property
    def fingerprint(self) -> str:
        """Digest of the ids."""
        return self._sha256

    @property
    def vocabulary_size(self) -> int:
        """Vocabulary size of the tokenizer."""
        return self.tokenizer.vocabulary_size

    def read_part_ends(self, part: int, start: int, stop: int) -> np.ndarray:
        """Return the ends of all files."""
        return self.ends

    def describe_position(self, position: int) -> str:
        """Return the position in its file, and the name of the file."""
        if self._text_files is None:
            return super().describe_position(position)
        index = int(np.searchsorted(self._file_ends, position, side="right"))
        return f"position {position - int(self._file_ends[index - 1] if index else 0)} of {self._text_files[index]}"

    def validate_vocabulary(self, size: int) -> None:
        """Raise `DataError` if the tokenizer has more than `size` ids."""
        need = self.vocabulary_size
        if need > size:
            raise DataError(
                f"data.tokenizer={self.tokenizer.name} has {need:,} token ids, the model's vocabulary {size:,}; use a "
                f"vocabulary of at least {need:,}"
            )


def load_text(
    source: SourceFiles | BucketFiles,
    tokenizer_name: Literal["bytes", "characters"],
    cache: CacheSettings,
    separator: bytes = b"",
) -> TokenisedText:
    """Return the tokens of all files in order, with separators, from the cache if possible. Raises as a `Reader`."""
    # Everything that the ids depend on is part of the key.
    key = cache_key(f"{tokenizer_name}{separator.hex()}", source.files)
    record = read_record(cache.directory, key)
    text = _open_cached(cache.directory, record) if record is not None else None
    if text is not None:
        return text
    files = open_reader(source, cache).copies(source.files)
    text = tokenise(files, tokenizer_name, separator)
    with warn_unwritable(cache.directory):
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(text.ids))
        # The array is published before the record that points to it.
        publish(cache.directory / f"{text.sha256}.npy", [header.getvalue(), text.ids.data])
        write_record(
            cache.directory,
            key,
            {
                "sha256": text.sha256,
                "num_tokens": len(text.ids),
                "data_offset_bytes": len(header.getvalue()),
                "tokenizer": text.tokenizer.name,
                "characters": text.tokenizer.characters,
                "ends": text.ends.tolist(),
            },
        )
    return text


def tokenise(
    files: Sequence[SourceFile], tokenizer_name: Literal["bytes", "characters"], separator: bytes
) -> TokenisedText:
    """Tokenise file by file into one array, so that memory holds the tokens and one file."""

    def read_files() -> Iterator[bytes]:
        for index, file in enumerate(files):
            yield read_source_file(file) + (separator if index + 1 < len(files) else b"")

    tokenizer: Tokenizer
    if tokenizer_name == "bytes":
        num_separators = max(len(files) - 1, 0)
        # A byte is a token, so the sizes of the files give the number of ids without a first pass.
        num_tokens = sum(file.size_bytes for file in files) + num_separators * len(separator)
        tokenizer = ByteTokenizer()
    else:
        # A first pass collects the vocabulary; the second one encodes.
        characters, num_tokens = collect_characters(read_files())
        tokenizer = CharacterTokenizer(characters)
    ids = np.empty(num_tokens, tokenizer.dtype)
    ends = []
    start = 0
    for raw in read_files():
        piece = tokenizer.encode_file(raw)
        ids[start : start + len(piece)] = piece
        start += len(piece)
        ends.append(start)
    assert start == num_tokens
    return TokenisedText(ids, tokenizer, hashlib.sha256(ids.data).hexdigest(), np.unique(np.array(ends, np.int64)))


def _open_cached(directory: Path, record: JsonObject) -> TokenisedText | None:
    """Memory-map the array that a record points to; return None if it is missing, cut or altered."""
    characters = record["characters"]
    tokenizer: Tokenizer = ByteTokenizer() if characters is None else CharacterTokenizer(characters)
    path = directory / f"{record['sha256']}.npy"
    num_tokens, offset_bytes = record["num_tokens"], record["data_offset_bytes"]
    try:
        if num_tokens == 0 or path.stat().st_size != offset_bytes + num_tokens * tokenizer.dtype.itemsize:
            return None
        # The record describes the array. The file's own header may be damaged and is never parsed.
        ids = np.memmap(path, tokenizer.dtype, mode="r", offset=offset_bytes, shape=(num_tokens,))
    except OSError:
        return None
    # A damaged array would be trained on without notice, so it is verified where that is cheap.
    if ids.nbytes <= VERIFIED_BYTES_MAX and hashlib.sha256(ids.data).hexdigest() != record["sha256"]:
        return None
    return TokenisedText(ids, tokenizer, record["sha256"], np.array(record["ends"], np.int64))


def open_source(
    token_source: "TokenSource",
    config: "DataConfig",
    cache_directory: Path,
    vocabulary_size: int | None,
    *,
    default_train_on: TrainOn | None = None,
) -> Source:
    """Open one source of `config`: an entry of the mixture, a validation set, or `config` itself. Called on every host.

    Raises DataError if the source is empty, cannot be read, cannot serve `config.packing`, or does not read one of its
    keys; OSError if a bucket does not answer.
    """
    cache = CacheSettings(cache_directory, config.cache_bytes, config.tokens_per_example + 1)
    source: Source
    if is_class_path(token_source.source):
        _validate_unread_keys(token_source, "is a class", "dtype", "train_on")
        name = f"data.source={token_source.source}"
        source_class = load_source_class(token_source)
        if missing := sorted(getattr(source_class, "__abstractmethods__", ())):
            raise DataError(f"{name}: does not implement {', '.join(missing)}")
        bind_options(source_class, token_source.options, name)
        source = CheckedSource(source_class(**token_source.options), name)
    elif (corpus := find_corpus(token_source.source)) is not None:
        _validate_unread_keys(token_source, "names a corpus", "dtype")
        bind_options(find_top_k, token_source.options, f"data.source={token_source.source} is a corpus")
        source = open_corpus(
            token_source.source,
            corpus,
            cache,
            token_source.train_on,
            default_train_on=default_train_on,
            top_k=find_top_k(**token_source.options),
        )
    else:
        files = find_source(token_source.source)
        if files.format:
            unread = ("dtype",) if files.format in _TABLE_FORMATS else ("dtype", "train_on")
            _validate_unread_keys(token_source, f"is of {files.format}", *unread)
            train_on = token_source.train_on, default_train_on
            source = open_format(files, token_source.options, cache, vocabulary_size, train_on)
        elif files.holds_tokens:
            _validate_unread_keys(token_source, "names token files", "options", "train_on")
            source = tokens = open_token_files(files, cache, token_source.dtype, vocabulary_size)
            validate_pairs(tokens)
        else:
            _validate_unread_keys(token_source, "names text files", "dtype", "options", "train_on")
            separator = SEPARATORS[config.document_separator]
            text = load_text(files, config.tokenizer, cache, separator)
            # Text in a bucket is copied to this host's disk first; `plan` reports the space that the copies take.
            is_copied = isinstance(files, BucketFiles)
            num_bytes = sum(file.size_bytes for file in files.files) if is_copied else 0
            # No separator follows the last file.
            with_tokens = [
                file for file in files.files if file.size_bytes or (separator and file is not files.files[-1])
            ]
            source = TextTokens(text, num_bytes, with_tokens)
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
    cache: CacheSettings,
    trusted_vocabulary_size: int | None = None,
    train_on: tuple[TrainOn | None, TrainOn | None] = (None, None),
) -> DocumentFiles:
    """Open token files in another tool's format, as resolved by `find_source`. Raises as their `TokenReader`.

    With a trusted vocabulary each id is checked when it is read, and a long source is not scanned in advance.
    `train_on` has the tokens that count in the loss by the spec, and by default, for the formats that may say it.
    """
    assert source.format is not None
    read = _TOKEN_READERS[source.format]
    given = (source.files, open_reader(source, cache), *(train_on if source.format in _TABLE_FORMATS else ()))
    bind_options(read, options, f"data.source={source.name} is of {source.format}", *given)
    return DocumentFiles(read(*given, **options), trusted_vocabulary_size)


def find_top_k(top_k: str | int | float | bool | None = None) -> int | None:
    """Return the key of `data.options` of a corpus: the number of a teacher's predictions. Raises DataError."""
    if top_k is not None and (type(top_k) is not int or top_k < 1):
        raise DataError(f"data.options.top_k={top_k}: needs a whole number of at least 1")
    return top_k


def _validate_unread_keys(token_source: "TokenSource", kind: str, *unread: str) -> None:
    """Raise `DataError` if one of the keys `unread`, which a source of this kind ignores, is set."""
    for key in unread:
        default = type(token_source).model_fields[key].default
        if (value := getattr(token_source, key)) != default:
            raise DataError(
                f"data.{key}={value}: nothing reads it, data.source={token_source.source} {kind}; leave it out (or "
                f"set it to {default or 'null'} in a stage that sets the source)"
            )


def validate_shared_keys(config: "DataConfig", sources: Collection[Source]) -> None:
    """Raise `DataError` if a key that all sources of `config` share is set, but no source uses it."""
    is_read = {
        "document_separator": any(isinstance(source, TextTokens) for source in sources),
        "cache_bytes": config.is_in_bucket,
    }
    needs = {"document_separator": "text", "cache_bytes": "in a bucket"}
    for key, is_needed in is_read.items():
        value = getattr(config, key)
        if not is_needed and value != type(config).model_fields[key].default:
            raise DataError(f"data.{key}={value}: nothing reads it, no source is {needs[key]}; leave it out")


def load_source_class(token_source: "TokenSource") -> type[Source]:
    """Import the class that `module:Class` names. Raises DataError if there is none, or it is no `Source`."""
    try:
        source_class: type[Source] = load_class(token_source.source, Source)
    except InvalidError as error:
        hint = "; for a data set of arrays, leave data.sequence_length out" if "not a subclass" in str(error) else ""
        raise DataError(f"data.source={token_source.source}: {error}{hint}") from error
    return source_class


# Text that is tokenised before the run (`data.tokenise`). Each source becomes a corpus, made by a job with a directory
# of its own in that of the run.
_MINUTES_BETWEEN_SAVES = 5  # saves show a supervisor that a job makes progress


@dataclass(frozen=True)
class RawText:
    """Source of text that a job tokenises before the run."""

    name: str  # name of the source; `train` for a single one
    source: str  # name of the text in the spec
    options: JsonObject  # options of the source in the spec
    corpus: str  # directory or URL of its corpus
    document: Document  # spec of the job, whose messages have the keys of the spec of the run


def split_text(document: Document, spec: ExecutionSpec, url: str, job: str) -> tuple[Document, list[RawText]]:
    """Return the spec of a run on corpora, and the text of each, in the order in which they are made.

    If a tokenizer is to be trained, the first job trains it on all sources of the training data; the other jobs use it.
    `document` and `spec` are the spec of a run with `data.tokenise`, `url` is its directory, and `job` the class of the
    jobs that tokenise. Raises SpecError if two texts have one name.
    """
    # The digest remains that of the spec as the user wrote it, because supervisors compute that digest too.
    unfilled = document.data if document.unfilled is None else document.unfilled
    document = dataclasses.replace(document, data=copy.deepcopy(document.data), unfilled=unfilled)
    config = document.data["config"]
    section = config["data"].pop("tokenise")
    found: dict[str, tuple[KeyPath, JsonObject]] = {}
    for place, name, entry in _list_texts(config):
        text = {"source": entry.get("source", "python-stdlib"), "options": entry.pop("options", None) or {}}
        if name in found and found[name][1] != text:
            problem = f"names another text than before for {name}; give it a name of its own"
            raise SpecError(document.format_problem(place, problem))
        found.setdefault(name, (place, text))
        entry["source"] = f"{url}/{TEXT_FOLDER}/{name}/corpus"
    for number, stage in enumerate(config.get("stages") or []):
        if "data.source" in stage["set"]:
            problem = "a stage cannot name another text beside data.tokenise; set data.mixture, with names"
            raise SpecError(document.format_problem(("config", "stages", str(number), "set", "data.source"), problem))
    texts = []
    for name, (place, text) in found.items():
        own = {**section, "source": text["source"], **text["options"]}
        written: dict[KeyPath, KeyPath] = {
            ("config",): ("config", "data", "tokenise"),
            ("config", "source"): (*place, "source"),
            ("config", "output"): ("directory",),
            **{("config", key): (*place, "options", key) for key in text["options"]},
        }
        if isinstance(own.get("tokenizer"), dict) and own["tokenizer"].get("kind") == "bpe":
            first = next(iter(found))
            trained_on = [
                {"source": each["source"], **{key: section[key] for key in ("field",) if key in section}}
                | each["options"]
                for where, each in found.values()
                if "validation" not in where
            ]
            if name != first:
                own["tokenizer"] = {"kind": "hf", "file": f"{url}/{TEXT_FOLDER}/{first}/corpus/{TOKENIZER_FILES['hf']}"}
            elif len(trained_on) > 1:
                own["tokenizer"] = {"sources": trained_on, **own["tokenizer"]}
        logging = document.data.get("logging") or {}
        data = {
            "name": spec.name,
            "project": spec.project,
            "group": spec.group,
            "job": job,
            "directory": f"{url}/{TEXT_FOLDER}/{name}",
            # The tokens depend on it only if documents are mixed.
            "seed": spec.seed if own.get("shuffle") else 0,
            "checkpoint": {
                "every_steps": None,
                "every_minutes": _MINUTES_BETWEEN_SAVES,
                "keep_last": 1,
                "grace_seconds": spec.checkpoint.grace_seconds,
            },
            "deadlines": spec.deadlines.model_dump(mode="json"),
            "logging": {"every_steps": 1}
            | {key: logging[key] for key in ("level", "level_other_hosts", "format") if key in logging},
            "config": own,
        }
        own_document = Document(data, document.locations, written=written, trust=document.trust)
        texts.append(RawText(name, text["source"], text["options"], f"{data['directory']}/corpus", own_document))
    return document, texts


def restore_text(config: JsonObject, texts: Sequence[RawText], section: JsonObject) -> JsonObject:
    """Return a config on corpora as the user has written it, with `texts` as sources and `section` as data.tokenise."""
    config = copy.deepcopy(config)
    by_corpus = {text.corpus: text for text in texts}
    for _, _, entry in _list_texts(config):
        if (text := by_corpus.get(entry.get("source", ""))) is not None:
            entry |= {"source": text.source, "options": text.options}
    config["data"]["tokenise"] = section
    return config


def _list_texts(config: JsonObject) -> Iterator[tuple[KeyPath, str, dict[str, Any]]]:
    """Yield path, name and keys of each source of a config; values of stages that are not sources are left out."""
    data = config["data"]
    mixture = data.get("mixture") or []
    if not mixture:
        yield ("config", "data"), "train", data
    places: list[tuple[KeyPath, Any]] = [(("config", "data", "mixture"), mixture)]
    for number, stage in enumerate(config.get("stages") or []):
        path = ("config", "stages", str(number), "set", "data.mixture")
        places.append((path, stage["set"].get("data.mixture") or []))
    for place, entries in places:
        for number, entry in enumerate(entries if isinstance(entries, list) else []):
            if isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("source"), str):
                yield (*place, str(number)), entry["name"], entry
    sets = data.get("validation") or {}
    for name in sets:
        if isinstance(sets[name], str):
            sets[name] = {"source": sets[name]}
        yield ("config", "data", "validation", name), name, sets[name]
