"""Export of a run's weights in Hugging Face's layout, with the tokenizer, so that `transformers` opens them unchanged.

An export is read-only for the run, which may continue meanwhile. Shapes and types of all tensors are known before the
first one is written: each file gets its header and its size at once, and then each piece is written to its place.
Memory holds no more than a gibibyte, or one leaf. The result is published as a whole or not at all.
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
from runner.data.open_source import TextTokens, open_source
from runner.data.source_files import find_corpus, find_source, is_class_path
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

# Tokenizer files.

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"


@dataclass(frozen=True)
class TokenizerFiles:
    """Tokenizer of a run in the form that `transformers` reads.

    Attributes:
        files: Content of the files by name.
        vocabulary_size: Every id is below it.
        end: Id that ends every document, if there is one.
        problem: Reason why there is no `tokenizer.json`; None if there is one.
    """

    files: Mapping[str, bytes] = field(default_factory=dict)
    vocabulary_size: int = 0
    end: int | None = None
    problem: str | None = None


def make_tokenizer_files(config: DataConfig) -> TokenizerFiles:
    """Return the tokenizer of the first source that has one.

    It reads the index of a corpus, and for the tokenizer `characters` the text.

    Raises:
        DataError: The source has changed.
        OSError: The source cannot be reached.
    """
    for source in config.sources:
        found = _make_source_tokenizer(source, config)
        if found is not None:
            return found
    return TokenizerFiles(
        problem=f"data.source={config.sources[0].source} holds ids, and it is unknown which tokenizer made them"
    )


def _make_source_tokenizer(source: TokenSource, config: DataConfig) -> TokenizerFiles | None:
    """Return the tokenizer of one source; None if the source holds ids and does not name a tokenizer."""
    if is_class_path(source.source):
        return None
    length = config.sequence_length
    # A corpus records its own tokenizer, whatever the spec says.
    corpus = find_corpus(source.source)
    if corpus is not None:
        return _make_corpus_tokenizer(corpus, length)
    if find_source(source.source).holds_tokens:
        return None
    if config.tokenizer == "bytes":
        return _make_files(_make_byte_tokenizer(), 256, length)
    text = open_source(source, config, default_cache_directory(), None)
    assert isinstance(text, TextTokens), "only text has characters"
    characters = text.tokenizer.characters or ""
    # An id is a character: a word of one letter. The tokenizer fails on a character without an id.
    vocabulary = {character: number for number, character in enumerate(characters)}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocab=vocabulary, unk_token=""))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return _make_files(_encode_tokenizer(tokenizer), len(characters), length)


def _make_corpus_tokenizer(where: str, sequence_length: int) -> TokenizerFiles:
    store = open_store(where)
    index = CorpusIndex.decode(store.read(CORPUS_INDEX), f"{store.url}/{CORPUS_INDEX}")
    kind, size, end = index.tokenizer.get("kind"), index.vocabulary_size, index.separator
    if kind == "bytes":
        return _make_files(_make_byte_tokenizer(), size, sequence_length, end)
    if kind not in TOKENIZER_FILES:
        return TokenizerFiles(problem=f"{store.url}/{CORPUS_INDEX} names a tokenizer of unknown kind {kind!r}")
    content = read_tokenizer(index.tokenizer, store)
    if kind == "hf":
        words = {
            number: word for word, number in parse_tokenizer(index.tokenizer, content, store).list_tokens().items()
        }
        return _make_files(content, size, sequence_length, end, None if end is None else words.get(end))
    problem = (
        f"the tokenizer is of {kind}: its file is copied, and {TOKENIZER} must be made from it with the tools of {kind}"
    )
    return TokenizerFiles({TOKENIZER_FILES[kind]: content}, size, end, problem)


def _make_files(
    content: bytes, size: int, sequence_length: int, end: int | None = None, end_word: str | None = None
) -> TokenizerFiles:
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": sequence_length,
        "clean_up_tokenization_spaces": False,
    }
    if end_word is not None:
        config["eos_token"] = end_word
    return TokenizerFiles({TOKENIZER: content, TOKENIZER_CONFIG: encode_json(config)}, size, end)


def _encode_tokenizer(tokenizer: tokenizers.Tokenizer) -> bytes:
    return tokenizer.to_str(pretty=True).encode()


def _make_byte_tokenizer() -> bytes:
    """Return the tokenizer whose ids are bytes: byte-level BPE without merges."""
    # Byte-level BPE writes a byte as its own character if that is visible, else as the next letter from U+0100 on.
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    vocabulary = {chr(byte if byte in visible else 0x100 + hidden.index(byte)): byte for byte in range(256)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _encode_tokenizer(tokenizer)


# Files of tensors.

SHARD_BYTES = 5_000_000_000
UPLOAD_SECONDS = 3600.0  # for one file


class SafetensorsWriter:
    """Safetensors files of some tensors in an existing empty directory on this disk.

    Args:
        directory: The directory.
        tensors: Type and shape of each tensor, in order.
        shard_bytes: Size of a file, which only a file with a single tensor may exceed.
    """

    def __init__(self, directory: Path, tensors: Mapping[str, tuple[np.dtype, Shape]], shard_bytes: int = SHARD_BYTES):
        self._directory = directory
        self._locations: dict[str, TensorLocation] = {}
        shards: list[list[str]] = [[]]
        size = 0
        for name, (dtype, shape) in tensors.items():
            num_bytes = math.prod(shape) * dtype.itemsize
            if shards[-1] and size + num_bytes > shard_bytes:
                shards.append([])
                size = 0
            shards[-1].append(name)
            size += num_bytes
        for number, names in enumerate(shards, start=1):
            file = SINGLE_FILE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}{SUFFIX}"
            head, locations = encode_header({name: (DTYPE_NAMES[tensors[name][0]], tensors[name][1]) for name in names})
            with translate_errors(directory / file), (directory / file).open("wb", buffering=0) as stream:
                stream.write(head)
                # A full disk is noticed here, and not as a crash when a page of the mapped file is written.
                os.posix_fallocate(stream.fileno(), 0, max([len(head), *(each.stop for each in locations.values())]))
            self._locations |= {name: each._replace(file=file) for name, each in locations.items()}
        if len(shards) > 1:
            # The index is the form in which transformers finds the shard of each tensor.
            total = sum(each.stop - each.start for each in self._locations.values())
            files = {name: self._locations[name].file for name in sorted(self._locations)}
            (directory / INDEX_FILE).write_bytes(encode_json({"metadata": {"total_size": total}, "weight_map": files}))

    def put(self, piece: TensorPiece, values: np.ndarray) -> None:
        """Write one piece, rounded to the nearest values of the tensor's type.

        Args:
            piece: The piece.
            values: Its values in the form of the leaf.

        Raises:
            InvalidError: A value is too large for the type.
        """
        location = self._locations[piece.tensor]
        dtype = DTYPES[location.dtype]
        values = values.swapaxes(-1, -2) if piece.transpose else values
        with np.errstate(over="ignore"):
            converted = values.astype(dtype)
        # Infinite values of the leaf stay infinite; only values that become infinite are an error.
        if dtype.itemsize < values.dtype.itemsize and (np.isinf(converted) & ~np.isinf(values)).any():
            raise InvalidError(f"{piece.tensor} has values that {dtype} cannot hold; use another --dtype")
        if not converted.size:
            return
        target = np.memmap(self._directory / location.file, dtype, "r+", location.start, location.shape)
        box = [slice(None)] * target.ndim
        if piece.part is not None:
            axis, start, stop = piece.part
            box[axis] = slice(start, stop)
        target[tuple(box)] = converted

    def verify(self) -> None:
        """Open every file with the format's own library."""
        for file in sorted({each.file for each in self._locations.values()}):
            with safetensors.safe_open(self._directory / file, framework="np") as found:
                names = {name for name, each in self._locations.items() if each.file == file}
                assert set(found.keys()) == names, f"{file} does not hold what was written"


# Publishing.


@contextlib.contextmanager
def publish_directory(where: str) -> Iterator[Path]:
    """Yield a local directory to write into, and publish its files at `where` at the end, all or nothing.

    On a disk the directory is renamed. In a bucket `config.json`, without which no reader accepts the rest, is uploaded
    last.

    Args:
        where: Path or URL of the target.

    Raises:
        InvalidError: The target is not empty, or cannot be written. Raised at the start.
    """
    store = open_store(where)
    _validate_output_empty(store)
    if store.root is None:
        with tempfile.TemporaryDirectory(prefix="export-") as directory:
            yield Path(directory)
            for path in sorted(Path(directory).iterdir(), key=lambda path: (path.name == CONFIG_FILE, path.name)):
                store.upload(path, path.name, UPLOAD_SECONDS)
        return
    temporary = store.root.with_name(f".{store.root.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with translate_errors(temporary):
            make_directory(temporary)
        yield temporary
        with translate_errors(store.root):
            # The content must be durable before the name is, or a power cut could leave an empty export.
            for path in [*temporary.iterdir(), temporary]:
                fsync(path)
            try:
                temporary.rename(store.root)
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise InvalidError(f"{store.root} is not empty; nothing is overwritten") from error
                raise
            fsync(store.root.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _validate_output_empty(store: Store) -> None:
    if store.list_names(""):
        raise InvalidError(f"{store.url} is not empty; nothing is overwritten")
    if store.root is None:
        probe_store(store)


# Export.

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
    """Write the weights of a checkpoint to `out`, and return their step.

    Args:
        where: Run directory or URL, as for `open_checkpoint`.
        step: Step, as for `open_checkpoint`.
        family: Mapping of the job.
        data: Data config, which determines the tokenizer.
        out: Path or URL, at which there is nothing yet.
        dtype: Type of the files; by default that of each leaf.
        shard_bytes: Size of a file.
        weights: Weights, as for `open_checkpoint`.

    Raises:
        InvalidError: The weights cannot be exported in this form. Nothing is then at `out`.
        StorageError: A store cannot be reached. Nothing is then at `out`.
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
    """Write the weights of a checkpoint into an existing empty directory on this disk, and return its manifest.

    The arguments and errors are those of `export`.
    """

    def write(store: Store, manifest: Manifest) -> Manifest:
        names = find_weight_names(manifest, weights)
        leaves = {name: manifest.leaves[saved] for name, saved in names.items()}
        pieces, tensors = _plan_tensors(manifest.name, leaves, family, dtype)
        tokenizer = _find_tokenizer(data, family.config())
        writer = SafetensorsWriter(directory, tensors, shard_bytes)
        for name, array in read_weights(store, manifest, weights):
            values = np.asarray(array)
            for piece in pieces[name]:
                writer.put(piece, values[piece.index])
        # A damaged export is found here, before it is published.
        writer.verify()
        config = dict(family.config())
        # transformers loads all tensors in one type; the widest one loses nothing.
        config["torch_dtype"] = max((dtype for dtype, _ in tensors.values()), key=lambda dtype: dtype.itemsize).name
        if tokenizer.end is not None:
            config["eos_token_id"] = tokenizer.end
        ends = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config}
        files = {CONFIG_FILE: encode_json(config), GENERATION_CONFIG: encode_json({"_from_model_config": True, **ends})}
        for name, content in {**tokenizer.files, **files}.items():
            (directory / name).write_bytes(content)
        return manifest

    return use_checkpoint(where, step, write)[0]


def is_export_file(name: str) -> bool:
    """Return True if an export may have a file of this name."""
    return name in _NAMES or _SHARD.fullmatch(name) is not None


def _plan_tensors(
    checkpoint: str, leaves: Mapping[str, LeafRecord], family: Family, dtype: Dtype | None
) -> tuple[Mapping[str, list[TensorPiece]], dict[str, tuple[np.dtype, Shape]]]:
    """Return the pieces of each leaf, and the type and shape of every tensor in the order of the table."""
    shapes = {name: tuple(leaf["shape"]) for name, leaf in leaves.items()}
    pieces = family.pieces()
    problems = find_table_problems(pieces, shapes)
    if problems:
        raise InvalidError("\n".join(f"checkpoint {checkpoint} is not of this model: {line}" for line in problems))
    by_leaf: dict[str, list[TensorPiece]] = defaultdict(list)
    dtypes: dict[str, np.dtype] = {}
    for piece in pieces:
        by_leaf[piece.leaf_name].append(piece)
        own = np.dtype(parse_dtype(dtype or leaves[piece.leaf_name]["dtype"]))
        if own not in DTYPE_NAMES:
            raise InvalidError(f"{piece.leaf_name} is of type {own}, which cannot be exported; use --dtype")
        dtypes[piece.tensor] = own
    return by_leaf, {name: (dtypes[name], shape) for name, shape in compute_tensor_shapes(pieces, shapes).items()}


def _find_tokenizer(data: DataConfig | None, config: JsonObject) -> TokenizerFiles:
    """Return the files of the tokenizer. Without one a warning says why, and the weights are exported alone."""
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
