"""A directory of safetensors, written leaf by leaf: no more than a leaf is in memory, and it is there whole or not.

The shapes and types of all tensors are known before the first is written, so each file gets its header and its size at
once, and then each piece goes to its place.

The files by which `transformers` finds the tokenizer of a run: `tokenizer.json` and `tokenizer_config.json`.

The weights of a run in Hugging Face's layout, so that `transformers` opens them with no code of ours.

Read as by whoever only looks: nothing is claimed, and the run may go on meanwhile.
"""

import contextlib
import errno
import math
import os
import re
import shutil
import tempfile
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import safetensors
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from runner.checkpoint.leaves import parse_dtype
from runner.checkpoint.manifest import LeafRecord, Manifest
from runner.checkpoint.weights import find_weight_names, read_weights, use_checkpoint
from runner.config import DataConfig, TokenSource
from runner.console import warn
from runner.data.corpus_index import INDEX as CORPUS_INDEX
from runner.data.corpus_index import CorpusIndex, read_tokenizer
from runner.data.open_source import open_source
from runner.data.source_files import find_corpus, find_source, is_class_path
from runner.data.text import TextTokens
from runner.data.tokenizers import TOKENIZER_FILES, parse_tokenizer
from runner.errors import DataError, InvalidError
from runner.huggingface.mapping import Family, Shape, TensorPiece, compute_tensor_shapes, find_table_problems
from runner.huggingface.safetensors import (
    CONFIG_FILE,
    DTYPE_NAMES,
    DTYPES,
    INDEX_FILE,
    SINGLE_FILE,
    SUFFIX,
    TensorLocation,
    encode_header,
)
from runner.records import PARAMS
from runner.storage import JsonObject, Store, default_cache_directory, encode_json, open_store, probe_store
from runner.storage.local import fsync
from runner.storage.store import make_directory, translate_errors

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"


@dataclass(frozen=True)
class TokenizerFiles:
    """What a tokenizer is to others.

    Attributes:
        files: by name.
        vocabulary_size: every id is below it.
        end: the id that ends every document, where one does.
        problem: why it has no `tokenizer.json`, if it has none.
    """

    files: Mapping[str, bytes] = field(default_factory=dict)
    vocabulary_size: int = 0
    end: int | None = None
    problem: str | None = None


def make_tokenizer_files(config: DataConfig) -> TokenizerFiles:
    """The tokenizer of the first source that has one. Reads a corpus's index, and of `characters` the text.

    Raises `DataError` if the source is not what it was, `OSError` if it cannot be reached.
    """
    for named in config.sources:
        found = _of_source(named, config)
        if found is not None:
            return found
    return TokenizerFiles(
        problem=f"data.source={config.sources[0].source} holds ids, and nobody knows of which tokenizer"
    )


def _of_source(named: TokenSource, config: DataConfig) -> TokenizerFiles | None:
    if is_class_path(named.source):
        return None
    corpus = find_corpus(named.source)
    if corpus is not None:
        return _of_corpus(corpus, config.sequence_length)
    files = find_source(named.source)
    if files.holds_tokens:
        return None
    if config.tokenizer == "bytes":
        return _made(_bytes(), 256, config.sequence_length)
    source = open_source(named, config, default_cache_directory(), None)
    assert isinstance(source, TextTokens), "characters are of text"
    characters = source.tokenizer.characters or ""
    return _made(_characters(characters), len(characters), config.sequence_length)


def _of_corpus(where: str, most_tokens: int) -> TokenizerFiles:
    store = open_store(where)
    index = CorpusIndex.decode(store.read(CORPUS_INDEX), f"{store.url}/{CORPUS_INDEX}")
    kind, size = index.tokenizer.get("kind"), index.vocabulary_size
    if kind == "bytes":
        return _made(_bytes(), size, most_tokens, index.separator)
    if kind not in TOKENIZER_FILES:
        return TokenizerFiles(
            problem=f"{store.url}/{CORPUS_INDEX} names a tokenizer of kind {kind!r}, which is not known"
        )
    content = read_tokenizer(index.tokenizer, store)
    if kind == "hf":
        words = {
            number: word for word, number in parse_tokenizer(index.tokenizer, content, store).list_tokens().items()
        }
        end = index.separator
        return _files(content, size, most_tokens, end, None if end is None else words.get(end))
    told = f"the tokenizer is of {kind}: its file is copied, and {TOKENIZER} must be made of it with {kind}'s own tools"
    return TokenizerFiles({TOKENIZER_FILES[kind]: content}, size, index.separator, told)


def _made(tokenizer: tokenizers.Tokenizer, size: int, most_tokens: int, end: int | None = None) -> TokenizerFiles:
    return _files(tokenizer.to_str(pretty=True).encode(), size, most_tokens, end)


def _files(content: bytes, size: int, most_tokens: int, end: int | None, end_word: str | None = None) -> TokenizerFiles:
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": most_tokens,
        "clean_up_tokenization_spaces": False,
    }
    if end_word is not None:
        config["eos_token"] = end_word
    return TokenizerFiles({TOKENIZER: content, TOKENIZER_CONFIG: encode_json(config)}, size, end)


def _bytes() -> tokenizers.Tokenizer:
    """An id is a byte: byte-level BPE without a merge."""
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={_letter(byte): byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _letter(byte: int) -> str:
    """What byte-level BPE writes for a byte: itself where that can be seen, else the next letter from U+0100 on."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in seen:
        return chr(byte)
    return chr(0x100 + sum(other not in seen for other in range(byte)))


def _characters(characters: str) -> tokenizers.Tokenizer:
    """An id is a character: a word of one letter. One that is not among them has no id, which is an error."""
    vocabulary = {character: number for number, character in enumerate(characters)}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocab=vocabulary, unk_token=""))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


SHARD_BYTES = 5_000_000_000
UPLOAD_SECONDS = 3600.0  # for one file


class SafetensorsWriter:
    """The files of some tensors in a directory on this disk, which is there and empty."""

    def __init__(self, directory: Path, tensors: Mapping[str, tuple[np.dtype, Shape]], shard_bytes: int = SHARD_BYTES):
        self._directory = directory
        self._places: dict[str, TensorLocation] = {}
        shards = _shards(tensors, shard_bytes)
        for number, names in enumerate(shards, start=1):
            file = SINGLE_FILE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}{SUFFIX}"
            head, places = encode_header({name: (DTYPE_NAMES[tensors[name][0]], tensors[name][1]) for name in names})
            with translate_errors(directory / file), (directory / file).open("wb", buffering=0) as stream:
                stream.write(head)
                os.posix_fallocate(stream.fileno(), 0, max([len(head), *(place.stop for place in places.values())]))
            self._places |= {name: place._replace(file=file) for name, place in places.items()}
        if len(shards) > 1:
            total = sum(place.stop - place.start for place in self._places.values())
            files = {name: self._places[name].file for name in sorted(self._places)}
            (directory / INDEX_FILE).write_bytes(encode_json({"metadata": {"total_size": total}, "weight_map": files}))

    def put(self, piece: TensorPiece, values: np.ndarray) -> None:
        """Write one piece, `values` as its leaf has them, in the tensor's type: the nearest of it.

        Raises `InvalidError` if a value is too large for that type.
        """
        place = self._places[piece.tensor]
        dtype = DTYPES[place.dtype]
        values = values.swapaxes(-1, -2) if piece.transpose else values
        with np.errstate(over="ignore"):
            converted = values.astype(dtype)
        if dtype.itemsize < values.dtype.itemsize and (np.isinf(converted) & ~np.isinf(values)).any():
            raise InvalidError(f"{piece.tensor} has values that {dtype} cannot hold; use another --dtype")
        if not converted.size:
            return
        target = np.memmap(self._directory / place.file, dtype, "r+", place.start, place.shape)
        box = [slice(None)] * target.ndim
        if piece.part is not None:
            axis, start, stop = piece.part
            box[axis] = slice(start, stop)
        target[tuple(box)] = converted

    def verify(self) -> None:
        """Open every file with the format's own library."""
        for file in sorted({place.file for place in self._places.values()}):
            with safetensors.safe_open(self._directory / file, framework="np") as found:
                names = {name for name, place in self._places.items() if place.file == file}
                assert set(found.keys()) == names, f"{file} does not hold what was written"


def _shards(tensors: Mapping[str, tuple[np.dtype, Shape]], shard_bytes: int) -> list[list[str]]:
    """The names of each file's tensors, in order: no file is larger than `shard_bytes`, but of one tensor."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, (dtype, shape) in tensors.items():
        num_bytes = math.prod(shape) * dtype.itemsize
        if shards[-1] and size + num_bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += num_bytes
    return shards


@contextlib.contextmanager
def publish_directory(where: str) -> Iterator[Path]:
    """A directory on this disk to write into; what it holds at the end is at `where`, a path or URL, whole or not.

    In a bucket `config.json`, without which nobody reads the rest, is sent last. Raises `InvalidError` at once if
    something is at `where`, or it may not be written.
    """
    store = open_store(where)
    _validate_output_empty(store)
    if store.root is None:
        with tempfile.TemporaryDirectory(prefix="export-") as directory:
            yield Path(directory)
            _upload(Path(directory), store)
        return
    aside = store.root.with_name(f".{store.root.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with translate_errors(aside):
            make_directory(aside)
        yield aside
        with translate_errors(store.root):
            for path in [*aside.iterdir(), aside]:
                fsync(path)
            _rename(aside, store.root)
            fsync(store.root.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _rename(aside: Path, target: Path) -> None:
    """Give it its name, where there is nothing, or an empty directory."""
    try:
        aside.rename(target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise InvalidError(f"{target} is not empty; nothing is overwritten") from error
        raise


def _validate_output_empty(store: Store) -> None:
    """Raise `InvalidError` if something is where an export is to be, or if nothing can be written there."""
    if store.list_names(""):
        raise InvalidError(f"{store.url} is not empty; nothing is overwritten")
    if store.root is None:
        probe_store(store)


def _upload(directory: Path, store: Store) -> None:
    for path in sorted(directory.iterdir(), key=lambda path: (path.name == CONFIG_FILE, path.name)):
        store.upload(path, path.name, UPLOAD_SECONDS)


GENERATION_CONFIG = "generation_config.json"
_NAMES = {
    CONFIG_FILE,
    GENERATION_CONFIG,
    INDEX_FILE,
    SINGLE_FILE,
    TOKENIZER,
    TOKENIZER_CONFIG,
    *TOKENIZER_FILES.values(),
}
_SHARD = re.compile(r"model-\d{5,}-of-\d{5,}\.safetensors")
Dtype = Literal["float32", "bfloat16", "float16"]


def export(
    where: str,
    step: int | str,
    family: Family,
    data: DataConfig | None,
    out: str,
    dtype: Dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    weights: str = PARAMS,
) -> int:
    """Write the weights of a checkpoint to `out`, a path or URL where nothing is yet; the step that they are of.

    `where`, `step` and `weights` as of `open_checkpoint`. `data` says which tokenizer goes with them; `dtype` is the
    type of the files, by default that of each leaf. No more than a gibibyte, or one leaf, is in memory at a time.

    Raises `InvalidError`, or `StorageError` if something cannot be reached; then nothing is at `out`.
    """
    with publish_directory(out) as directory:
        return export_into(directory, where, step, family, data, dtype, shard_bytes, weights).step


def export_into(
    directory: Path,
    where: str,
    step: int | str,
    family: Family,
    data: DataConfig | None,
    dtype: Dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    weights: str = PARAMS,
) -> Manifest:
    """Likewise into a directory on this disk that is there and empty; the manifest of the checkpoint."""

    def use(store: Store, manifest: Manifest) -> Manifest:
        _write(directory, store, manifest, family, data, dtype, shard_bytes, weights)
        return manifest

    return use_checkpoint(where, step, use)[0]


def is_export_file(name: str) -> bool:
    """Whether some export has a file of this name."""
    return name in _NAMES or _SHARD.fullmatch(name) is not None


def _write(
    directory: Path,
    store: Store,
    manifest: Manifest,
    family: Family,
    data: DataConfig | None,
    dtype: Dtype | None,
    shard_bytes: int,
    weights: str,
) -> None:
    names = find_weight_names(manifest, weights)
    leaves = {name: manifest.leaves[saved] for name, saved in names.items()}
    pieces, tensors = _tensors(manifest.name, leaves, family, dtype)
    tokenizer = _tokenizer(data, family.config())
    writer = SafetensorsWriter(directory, tensors, shard_bytes)
    for name, array in read_weights(store, manifest, weights):
        values = np.asarray(array)
        for piece in pieces[name]:
            writer.put(piece, values[piece.index])
    writer.verify()
    config = dict(family.config())
    config["torch_dtype"] = max((dtype for dtype, _ in tensors.values()), key=lambda dtype: dtype.itemsize).name
    if tokenizer.end is not None:
        config["eos_token_id"] = tokenizer.end
    ends = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config}
    files = {CONFIG_FILE: encode_json(config), GENERATION_CONFIG: encode_json({"_from_model_config": True, **ends})}
    for name, content in {**tokenizer.files, **files}.items():
        (directory / name).write_bytes(content)


def _tensors(
    checkpoint: str, leaves: Mapping[str, LeafRecord], family: Family, dtype: Dtype | None
) -> tuple[Mapping[str, list[TensorPiece]], dict[str, tuple[np.dtype, Shape]]]:
    """The pieces of each leaf, and the type and shape of every tensor, in the order of the table."""
    shapes = {name: tuple(leaf["shape"]) for name, leaf in leaves.items()}
    pieces = family.pieces()
    wrong = find_table_problems(pieces, shapes)
    if wrong:
        raise InvalidError("\n".join(f"checkpoint {checkpoint} is not of this model: {line}" for line in wrong))
    by_leaf: dict[str, list[TensorPiece]] = defaultdict(list)
    dtypes: dict[str, np.dtype] = {}
    for piece in pieces:
        by_leaf[piece.leaf_name].append(piece)
        own = np.dtype(parse_dtype(dtype or leaves[piece.leaf_name]["dtype"]))
        if own not in DTYPE_NAMES:
            raise InvalidError(f"{piece.leaf_name} is of type {own}; use --dtype")
        dtypes[piece.tensor] = own
    return by_leaf, {name: (dtypes[name], shape) for name, shape in compute_tensor_shapes(pieces, shapes).items()}


def _tokenizer(data: DataConfig | None, config: JsonObject) -> TokenizerFiles:
    """The files of the tokenizer; none, and a line that says why, where it cannot be had."""
    try:
        found = TokenizerFiles(problem="the job has no data") if data is None else make_tokenizer_files(data)
    except DataError as error:
        found = TokenizerFiles(problem=str(error))
    size = config.get("vocab_size")
    if size is not None and found.vocabulary_size > size:
        raise InvalidError(f"the tokenizer has {found.vocabulary_size:,} ids, the model a vocabulary of {size:,}")
    if found.problem is not None:
        warn(f"no tokenizer.json is written: {found.problem}")
    return found
