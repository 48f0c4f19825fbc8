"""Documents in every file format of a tokenise job, tokenizers of every kind, and readers of the resulting corpus."""

import base64
import gzip
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import sentencepiece
import tokenizers
import zstandard

from experiments.tokenise import Tokenise
from experiments.tokenise.inputs import open_store
from runner import ExecutionSpec
from runner.data.corpus_index import ENDS_DTYPE, CorpusIndex
from runner.data.tokenizers import load_tokenizer
from runner.storage import LocalStore, url
from runner.storage.bucket import BucketStore
from tests.support.memory_bucket import MemoryDriver
from tests.support.tiny_jobs import merge

DOCUMENTS = [f"Document {i}: {'the number ' * (i % 7)}{i * i}, naïve, 数字 🙂\n\n" for i in range(120)] + ["one line"]
SEPARATOR = "<|endoftext|>"
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

Documents = Sequence[str | None]


def make_jsonl(documents: Documents, field: str = "text") -> bytes:
    return b"".join(json.dumps({"id": i, field: text}).encode() + b"\n" for i, text in enumerate(documents))


def make_table(documents: Documents) -> pyarrow.Table:
    return pyarrow.table({"text": pyarrow.array(documents, pyarrow.string())})


def make_parquet(documents: Documents) -> bytes:
    """Encode documents as .parquet with row groups of seven."""
    file = io.BytesIO()
    pyarrow.parquet.write_table(make_table(documents), file, row_group_size=7)
    return file.getvalue()


def make_arrow(documents: Documents, new: Callable[..., Any]) -> bytes:
    """Encode documents as .arrow, in the stream or the file format."""
    file = io.BytesIO()
    with new(file, make_table(documents).schema) as writer:
        writer.write_table(make_table(documents), max_chunksize=7)
    return file.getvalue()


def make_zstd_frames(documents: Documents) -> bytes:
    """Encode documents as .jsonl.zst with two frames."""
    content, half = make_jsonl(documents), len(make_jsonl(documents)) // 2
    compress = zstandard.ZstdCompressor().compress
    return compress(content[:half]) + compress(content[half:])


FILE_FORMATS: dict[str, Callable[[Documents], bytes]] = {
    "a.jsonl": make_jsonl,
    "b.jsonl.gz": lambda documents: gzip.compress(make_jsonl(documents)),
    "c.jsonl.zst": make_zstd_frames,
    "d.parquet": make_parquet,
    "e.arrow": lambda documents: make_arrow(documents, pyarrow.ipc.new_stream),
    "f.arrow": lambda documents: make_arrow(documents, pyarrow.ipc.new_file),
}


def write_text_files(directory: Path, documents: Sequence[str]) -> str:
    """Write one text file per document, and return a glob that matches them."""
    directory.mkdir(parents=True, exist_ok=True)
    for i, text in enumerate(documents):
        (directory / f"{i:05}.txt").write_bytes(text.encode())
    return str(directory / "*.txt")


def make_hf_tokenizer() -> bytes:
    """Make a small tokenizer.json with truncation and padding enabled, as many published ones have."""
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=[SEPARATOR, "<|pad|>"], initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator(DOCUMENTS, trainer)
    library.enable_truncation(4)
    library.enable_padding(length=64)
    return library.to_str().encode()


def make_sentencepiece_model() -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(DOCUMENTS), model_writer=model, vocab_size=120, minloglevel=2, hard_vocab_limit=False
    )
    return model.getvalue()


def make_tiktoken_ranks() -> bytes:
    """Make a tiktoken rank file: all bytes and two merged tokens."""
    tokens = [bytes([i]) for i in range(256)] + [b"th", b"the"]
    return b"".join(base64.b64encode(token) + f" {rank}\n".encode() for rank, token in enumerate(tokens))


def make_tokenizer_files(directory: Path) -> dict[str, dict[str, Any]]:
    """Write the files of every kind of tokenizer to `directory`, and return the `config.tokenizer` of each."""
    for name, make in (
        ("hf.json", make_hf_tokenizer),
        ("sp.model", make_sentencepiece_model),
        ("tk.tiktoken", make_tiktoken_ranks),
    ):
        (directory / name).write_bytes(make())
    special = {"pattern": GPT2_PATTERN, "special_tokens": {SEPARATOR: 258}}
    return {
        "bytes": {"kind": "bytes"},
        "hf": {"kind": "hf", "file": str(directory / "hf.json")},
        "sentencepiece": {"kind": "sentencepiece", "file": str(directory / "sp.model")},
        "tiktoken": {"kind": "tiktoken", "file": str(directory / "tk.tiktoken"), **special},
        "bpe": {"kind": "bpe", "vocabulary_size": 300},
    }


def make_tokenise_document(directory: Path | str, **changes: Any) -> dict[str, Any]:
    """Return the spec of a tokenise job with the byte tokenizer; `changes` are dotted keys."""
    document = {
        "name": "tokenise",
        "job": "experiments.tokenise:Tokenise",
        "directory": str(directory),
        "checkpoint": {"every_steps": 1000},
        "config": {"tokenizer": {"kind": "bytes"}, "shard_bytes": 2000},
    }
    return merge(document, changes)


def make_tokenise_job(directory: Path | str, **changes: Any) -> Tokenise:
    return Tokenise(ExecutionSpec.model_validate(make_tokenise_document(directory, **changes)))


def read_index(corpus: Path) -> CorpusIndex:
    return CorpusIndex.decode((corpus / "index.json").read_bytes(), str(corpus))


def read_corpus(corpus: Path) -> list[np.ndarray]:
    """Return the token ids of each document including separators, and check the shards against the index."""
    index, found = read_index(corpus), []
    for shard in index.shards:
        ids = np.fromfile(corpus / f"{shard.name}.bin", np.dtype(index.dtype))
        ends = np.fromfile(corpus / f"{shard.name}.ends", ENDS_DTYPE)
        assert (len(ids), len(ends), ids.max()) == (shard.num_tokens, shard.num_documents, shard.largest_id)
        assert ends[-1] == len(ids)
        assert (np.diff(ends) > 0).all()
        found += np.split(ids, ends[:-1])
    return found


def decode_corpus(corpus: Path) -> list[str]:
    """Return the text of each document without separators, decoded by the tokenizer in the index."""
    index = read_index(corpus)
    tokenizer = load_tokenizer(index.tokenizer, LocalStore(corpus))
    tail = 0 if index.separator is None else 1
    return [tokenizer.decode(ids[: len(ids) - tail]) for ids in read_corpus(corpus)]


def read_corpus_files(corpus: Path) -> dict[str, bytes]:
    """Return the content of the files that readers of the corpus use."""
    return {path.name: path.read_bytes() for path in corpus.iterdir() if path.name != "owner.json"}


class FakeBucket:
    """In-memory bucket that replaces the bucket of every `gs://` URL in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.driver = MemoryDriver()
        monkeypatch.setattr(url, "_open_bucket", self._open)
        open_store.cache_clear()

    def _open(self, address: str, *_: str) -> BucketStore:
        prefix = address.removeprefix("gs://").rstrip("/").partition("/")[2]
        return BucketStore(address.rstrip("/"), prefix, self.driver)

    def write(self, name: str, content: bytes) -> None:
        """Create or replace an object."""
        self.driver.put(name, content, None)

    def copy_to(self, prefix: str, directory: Path) -> Path:
        """Copy the objects below a prefix to a local directory."""
        directory.mkdir()
        for key, (content, _) in self.driver.objects.items():
            if key.startswith(f"{prefix}/"):
                (directory / key.removeprefix(f"{prefix}/")).write_bytes(content)
        return directory
