"""The same documents in every form that a tokenise job reads, and tokenizers of every kind to read them with."""

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
    """As .jsonl."""
    return b"".join(json.dumps({"id": i, field: text}).encode() + b"\n" for i, text in enumerate(documents))


def make_table(documents: Documents) -> pyarrow.Table:
    """As a table."""
    return pyarrow.table({"text": pyarrow.array(documents, pyarrow.string())})


def make_parquet(documents: Documents) -> bytes:
    """As .parquet, in row groups of seven."""
    file = io.BytesIO()
    pyarrow.parquet.write_table(make_table(documents), file, row_group_size=7)
    return file.getvalue()


def make_arrow(documents: Documents, new: Callable[..., Any]) -> bytes:
    """As .arrow, one of its two forms."""
    file = io.BytesIO()
    with new(file, make_table(documents).schema) as writer:
        writer.write_table(make_table(documents), max_chunksize=7)
    return file.getvalue()


def make_zstd_frames(documents: Documents) -> bytes:
    """As .jsonl.zst, of two frames."""
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
    """One text file a document; the glob that names them."""
    directory.mkdir(parents=True, exist_ok=True)
    for i, text in enumerate(documents):
        (directory / f"{i:05}.txt").write_bytes(text.encode())
    return str(directory / "*.txt")


def make_hf_tokenizer() -> bytes:
    """A small tokenizer.json, with truncation and padding, as many have."""
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
    """A small model of sentencepiece."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(DOCUMENTS), model_writer=model, vocab_size=120, minloglevel=2, hard_vocab_limit=False
    )
    return model.getvalue()


def make_tiktoken_ranks() -> bytes:
    """A file of tiktoken's ranks: all bytes, and one merge."""
    tokens = [bytes([i]) for i in range(256)] + [b"th", b"the"]
    return b"".join(base64.b64encode(token) + f" {rank}\n".encode() for rank, token in enumerate(tokens))


def make_tokenizer_files(directory: Path) -> dict[str, dict[str, Any]]:
    """The `config.tokenizer` of every kind, with its files in `directory`."""
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
    """The spec of a job that makes bytes of what `config.source` names; `changes` are dotted keys."""
    document = {
        "name": "tokenise",
        "job": "experiments.tokenise:Tokenise",
        "directory": str(directory),
        "checkpoint": {"every_steps": 1000},
        "config": {"tokenizer": {"kind": "bytes"}, "shard_bytes": 2000},
    }
    return merge(document, changes)


def make_tokenise_job(directory: Path | str, **changes: Any) -> Tokenise:
    """That job, in this process."""
    return Tokenise(ExecutionSpec.model_validate(make_tokenise_document(directory, **changes)))


def read_index(corpus: Path) -> CorpusIndex:
    """The index of a corpus on this disk."""
    return CorpusIndex.decode((corpus / "index.json").read_bytes(), str(corpus))


def read_corpus(corpus: Path) -> list[np.ndarray]:
    """The ids of each document, separators included."""
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
    """The text of each document, by the tokenizer that the index names, without separators."""
    index = read_index(corpus)
    tokenizer = load_tokenizer(index.tokenizer, LocalStore(corpus))
    tail = 0 if index.separator is None else 1
    return [tokenizer.decode(ids[: len(ids) - tail]) for ids in read_corpus(corpus)]


def read_corpus_files(corpus: Path) -> dict[str, bytes]:
    """Every file that a reader of the corpus reads."""
    return {path.name: path.read_bytes() for path in corpus.iterdir() if path.name != "owner.json"}


class FakeBucket:
    """Every `gs://` URL is a prefix of this bucket, which is in memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.driver = MemoryDriver()
        monkeypatch.setattr(url, "_open_bucket", self._open)
        open_store.cache_clear()

    def _open(self, address: str, *_: str) -> BucketStore:
        prefix = address.removeprefix("gs://").rstrip("/").partition("/")[2]
        return BucketStore(address.rstrip("/"), prefix, self.driver)

    def write(self, name: str, content: bytes) -> None:
        """Put an object there."""
        self.driver.put(name, content, None)

    def copy_to(self, prefix: str, directory: Path) -> Path:
        """What is below a prefix, on the disk."""
        directory.mkdir()
        for key, (content, _) in self.driver.objects.items():
            if key.startswith(f"{prefix}/"):
                (directory / key.removeprefix(f"{prefix}/")).write_bytes(content)
        return directory
