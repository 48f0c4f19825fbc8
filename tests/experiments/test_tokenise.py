"""Tokenise jobs in this process: file formats, tokenizers, shuffling, buckets, resumes, keys and damaged input."""

import bz2
import gzip
import itertools
import json
import lzma
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tokenizers
import zstandard

from experiments.tokenise import corpus as output
from experiments.tokenise import documents as input_documents
from experiments.tokenise import inputs as input_files
from experiments.tokenise import job as tokenise_job
from experiments.tokenise.config import BpeConfig
from experiments.tokenise.corpus import FinishedPiece
from experiments.tokenise.documents import BadRecord, InputPart, cut_into_pieces, read_documents, shuffle_indices
from experiments.tokenise.inputs import find_files, open_store
from experiments.tokenise.job import Tally, sample_documents, train_bpe
from runner.config import DataConfig, TokenSource
from runner.data.corpus_index import CorpusShard
from runner.errors import DataError, InvalidError, StorageError
from runner.evaluation.generation import encode_prompt, find_start_token, load_source_codec
from runner.storage import DeadlineError
from tests.support import tokenise_inputs
from tests.support.object_stores import BACKENDS, Faults, route_stores_to, start_backend
from tests.support.tiny_jobs import StopAfter, stop_after
from tests.support.tokenise_inputs import (
    DOCUMENTS,
    FILE_FORMATS,
    SEPARATOR,
    decode_corpus,
    make_tokenise_job,
    read_corpus,
    read_corpus_files,
    read_index,
    write_text_files,
)

STDLIB = "python-stdlib"


@pytest.fixture(scope="module")
def tokenizers_by_kind(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return tokenise_inputs.make_tokenizer_files(tmp_path_factory.mktemp("tokenizers"))


def get_error_line(directory: Path, **changes: Any) -> str:
    """Return the single error line of a rejected job, and check that it leaves no index."""
    with pytest.raises(InvalidError) as caught:
        make_tokenise_job(directory, **changes)()
    assert not list(directory.rglob("index.json"))
    message = str(caught.value)
    assert "\n" not in message
    return message


# Documents and ids.


@pytest.mark.daily(3)
@pytest.mark.parametrize("name", ["texts", *FILE_FORMATS])
def test_every_file_format_gives_the_same_documents(tmp_path, name):
    if name == "texts":
        source = write_text_files(tmp_path / "in", DOCUMENTS)
    else:
        (tmp_path / name).write_bytes(FILE_FORMATS[name](DOCUMENTS))
        source = str(tmp_path / name)
    make_tokenise_job(tmp_path / "run", **{"config.source": source, "config.separator": 0})()
    corpus = tmp_path / "run/corpus"
    assert decode_corpus(corpus) == DOCUMENTS
    assert all(ids[-1] == 0 for ids in read_corpus(corpus))
    assert len(read_index(corpus).shards) > 1
    assert read_index(corpus).num_tokens == sum(len(text.encode()) + 1 for text in DOCUMENTS)


@pytest.mark.parametrize("kind", ["bytes", "hf", "sentencepiece", "tiktoken", "bpe"])
def test_every_tokenizer_is_restored_from_the_index(tmp_path, tokenizers_by_kind, kind):
    separator = {"bytes": None, "sentencepiece": "</s>"}.get(kind, SEPARATOR)
    changes = {"config.tokenizer": tokenizers_by_kind[kind], "config.separator": separator}
    make_tokenise_job(tmp_path / "run", **{"config.source": write_text_files(tmp_path / "in", DOCUMENTS)}, **changes)()
    found = decode_corpus(tmp_path / "run/corpus")
    is_exact = kind != "sentencepiece"  # sentencepiece normalises text
    assert found == DOCUMENTS if is_exact else len(found) == len(DOCUMENTS)
    assert read_index(tmp_path / "run/corpus").tokenizer["kind"] == {"bpe": "hf"}.get(kind, kind)


def test_ids_equal_those_of_the_library(tmp_path):
    _compare_with_the_library(tmp_path, 30)


@pytest.mark.soak
def test_ids_equal_those_of_the_library_for_every_file(tmp_path):
    _compare_with_the_library(tmp_path, None)


def _compare_with_the_library(tmp_path: Path, num_files: int | None) -> None:
    texts = [Path(file.name).read_bytes().decode(errors="replace") for file in find_files(STDLIB)[:num_files]]
    texts = [text for text in texts if SEPARATOR not in text]
    source = write_text_files(tmp_path / "in", texts)
    changes = {"config.tokenizer": {"kind": "bpe", "vocabulary_size": 1000, "sample_bytes": 100_000}}
    changes |= {"config.separator": SEPARATOR, "config.shard_bytes": 100_000}
    make_tokenise_job(tmp_path / "run", **{"config.source": source}, **changes)()
    corpus = tmp_path / "run/corpus"
    library = tokenizers.Tokenizer.from_file(str(corpus / "tokenizer.json"))
    end = library.token_to_id(SEPARATOR)
    found = read_corpus(corpus)
    assert len(found) == len(texts)
    for ids, text in zip(found, texts, strict=True):
        assert ids.tolist() == [*library.encode(text, add_special_tokens=False).ids, end]
        assert library.decode(ids[:-1].tolist(), skip_special_tokens=False) == text


def test_training_a_vocabulary_is_deterministic(tmp_path):
    write_text_files(tmp_path / "in", DOCUMENTS)
    config = make_tokenise_job(
        tmp_path / "run", **{"config.tokenizer": {"kind": "bpe", "vocabulary_size": 290}}, **_make_some(tmp_path)
    )
    pieces = cut_into_pieces(find_files(str(tmp_path / "in/*.txt")), 500)

    def train_once(sample_bytes: int) -> bytes:
        sample = sample_documents(pieces, sample_bytes, "text", 0)
        return train_bpe(config.config.tokenizer, (SEPARATOR,), sample, print)

    assert train_once(8 << 20) == train_once(8 << 20)
    assert train_once(8 << 20) != train_once(100)
    vocabulary = json.loads(train_once(8 << 20))["model"]["vocab"]
    assert len(vocabulary) == 290
    assert vocabulary[SEPARATOR] == 0


def test_a_vocabulary_smaller_than_asked_is_reported(tmp_path, caplog):
    (tmp_path / "a.txt").write_text("ab ab ab")
    bpe = {"kind": "bpe", "vocabulary_size": 1000}
    make_tokenise_job(tmp_path / "run", **{"config.source": str(tmp_path / "a.txt"), "config.tokenizer": bpe})()
    found = re.search(r"goes on with a vocabulary of (\d+) tokens instead of 1,000, since the sample", caplog.text)
    assert found is not None
    assert int(found[1]) == read_index(tmp_path / "run/corpus").vocabulary_size < 1000


def test_a_vocabulary_is_trained_on_several_sources(tmp_path):
    write_text_files(tmp_path / "in", ["aaaa bbbb " * 50] * 5)
    (tmp_path / "x.jsonl").write_bytes(tokenise_inputs.make_jsonl(["wxyz " * 60] * 5, "content"))
    sources = [{"source": str(tmp_path / "in/*.txt")}, {"source": str(tmp_path / "x.jsonl"), "field": "content"}]
    bpe = {"kind": "bpe", "vocabulary_size": 290, "sources": sources}
    source = {"config.source": str(tmp_path / "in/*.txt"), "config.tokenizer": bpe}
    make_tokenise_job(tmp_path / "one", **source)()
    content = (tmp_path / "one/corpus/tokenizer.json").read_bytes()
    assert {"aaaa", "wxyz"} <= json.loads(content)["model"]["vocab"].keys()
    other = {"config.source": str(tmp_path / "x.jsonl"), "config.field": "content"}
    make_tokenise_job(tmp_path / "two", **other, **{"config.tokenizer": bpe})()
    assert (tmp_path / "two/corpus/tokenizer.json").read_bytes() == content
    (tmp_path / "x.jsonl").write_bytes(tokenise_inputs.make_jsonl(["changed"], "content"))
    with pytest.raises(InvalidError, match=r"config\.tokenizer\.sources"):
        make_tokenise_job(tmp_path / "one", **source, **{"checkpoint.keep_last": 4}).lifecycle.validate_checkpoints()
    bad = [*sources, {"source": str(tmp_path / "none.jsonl")}]
    assert "config.tokenizer.sources.2.source: no file matches" in get_error_line(
        tmp_path / "run", **source | {"config.tokenizer": bpe | {"sources": bad}}
    )


def test_the_training_of_a_vocabulary_reports_its_progress(monkeypatch):
    monkeypatch.setattr(tokenise_job, "_PROGRESS_SECONDS", 0.01)
    said: list[str] = []

    def sample() -> Iterator[bytes]:
        yield b"a document" * 1000
        deadline = time.monotonic() + 60
        while not said and time.monotonic() < deadline:
            time.sleep(0.01)

    train_bpe(BpeConfig(kind="bpe", vocabulary_size=257), (None,), sample(), said.append)
    assert "training a BPE: 0.0 MB of text read" in said[0]


def test_large_ids_are_written_as_uint32(tmp_path, tokenizers_by_kind):
    wide = tokenizers_by_kind["tiktoken"] | {"special_tokens": {SEPARATOR: 70_000}}
    changes = {"config.tokenizer": wide, "config.separator": SEPARATOR}
    make_tokenise_job(tmp_path / "run", **_make_some(tmp_path), **changes)()
    index = read_index(tmp_path / "run/corpus")
    assert (index.dtype, index.vocabulary_size, index.separator) == ("uint32", 70_001, 70_000)
    assert decode_corpus(tmp_path / "run/corpus") == DOCUMENTS


@pytest.mark.parametrize("separator", [None, 7])
def test_an_empty_document_is_a_separator_or_is_dropped(tmp_path, capsys, separator):
    (tmp_path / "a.jsonl").write_bytes(tokenise_inputs.make_jsonl(["one", "", "two", ""]))
    changes = {"config.source": str(tmp_path / "a.jsonl"), "config.separator": separator}
    make_tokenise_job(tmp_path / "run", **changes)()
    assert decode_corpus(tmp_path / "run/corpus") == (["one", "two"] if separator is None else ["one", "", "two", ""])
    assert ("left out 2 empty documents" in capsys.readouterr().out) == (separator is None)


def test_a_document_longer_than_a_shard_gets_a_long_shard(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(tokenise_inputs.make_jsonl(["short", "x" * 5000, "short"]))
    make_tokenise_job(tmp_path / "run", **{"config.source": str(tmp_path / "a.jsonl"), "config.shard_bytes": 100})()
    assert decode_corpus(tmp_path / "run/corpus") == ["short", "x" * 5000, "short"]
    assert max(shard.num_tokens for shard in read_index(tmp_path / "run/corpus").shards) > 5000


@pytest.mark.parametrize("shard_bytes", [1, 100, 3000, 1 << 30])
@pytest.mark.parametrize("name", ["a.jsonl", "c.jsonl.zst", "d.parquet"])
def test_the_size_of_pieces_does_not_change_the_documents(tmp_path, name, shard_bytes):
    (tmp_path / name).write_bytes(FILE_FORMATS[name](DOCUMENTS))
    files = find_files(str(tmp_path / name))
    parts = [part for piece in cut_into_pieces(files, shard_bytes) for part in piece]
    found = [text for part in parts for text in read_documents(part, None, "text")]
    assert found == [text.encode() for text in DOCUMENTS]
    assert sum(part.size_bytes for part in parts) == files[0].size_bytes or name == "d.parquet"


def test_a_bad_line_has_its_number_in_the_whole_file(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(tokenise_inputs.make_jsonl(DOCUMENTS[:50]) + b"{oh\n" + tokenise_inputs.make_jsonl(DOCUMENTS[:50]))
    for shard_bytes in (10, 100, 1000, 1 << 20):
        parts = [part for piece in cut_into_pieces(find_files(str(path)), shard_bytes) for part in piece]
        (bad,) = [text for part in parts for text in read_documents(part, None, "text") if isinstance(text, BadRecord)]
        assert bad.where == f"{path}:51"


# Formats of published corpora.

COMPRESSIONS: dict[str, Any] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstandard.compress,
    ".zstd": zstandard.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}


@pytest.mark.parametrize("lines", [".jsonl", ".json", ".ndjson", ".JSONL"])
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_json_lines_are_read_with_every_extension_and_compression(tmp_path, lines, compression):
    path = tmp_path / f"part-0000{lines}{compression}"
    path.write_bytes(COMPRESSIONS[compression](tokenise_inputs.make_jsonl(DOCUMENTS)))
    (file,) = find_files(str(path))
    ((part,),) = cut_into_pieces([file], 1 << 20)
    assert list(read_documents(part, None, "text")) == [text.encode() for text in DOCUMENTS]
    path.write_bytes(COMPRESSIONS[compression](tokenise_inputs.make_jsonl(DOCUMENTS))[:-9])
    if compression:
        with pytest.raises(DataError, match=r"is not a valid \..* file"):
            list(read_documents(InputPart(find_files(str(path))[0], 0), None, "text"))


# Files of two frames, by what stands where; then the compressions whose tools accept it.
_SKIPPED = b"\x50\x2a\x4d\x18\x05\0\0\0skips"  # a frame of zstd that holds no content
FRAMES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "joined": (lambda a, b: a + b, (".gz", ".zst", ".bz2", ".xz")),
    "padded to a block": (lambda a, b: a + b + bytes(512), (".gz", ".bz2", ".xz")),
    "padded by one byte": (lambda a, b: a + b + bytes(1), (".gz", ".bz2")),
    "padded by more than is read at once": (lambda a, b: a + b + bytes(3 << 20), (".gz", ".bz2", ".xz")),
    "padded between frames": (lambda a, b: a + bytes(1 << 20) + b, (".gz", ".bz2", ".xz")),
    "padded twice": (lambda a, b: a + bytes(4) + b + bytes(8), (".gz", ".bz2", ".xz")),
    "with a frame that is skipped": (lambda a, b: a + _SKIPPED + b, (".zst",)),
    "cut": (lambda a, b: a + b[:-5], ()),
    "cut and padded": (lambda a, b: a + b[:-5] + bytes(512), ()),
    "followed by something else": (lambda a, b: a + b + b"something else", ()),
    "padded and followed by something else": (lambda a, b: a + b + bytes(512) + b"something else", ()),
    "padded in front": (lambda a, b: bytes(512) + a + b, ()),
    "zeros": (lambda a, b: bytes(512), ()),
}


@pytest.mark.parametrize("name", FRAMES)
@pytest.mark.parametrize("compression", [".gz", ".zst", ".bz2", ".xz"])
def test_frames_are_joined_and_padded_as_the_tools_of_a_format_allow(tmp_path, compression, name):
    path, (arrange, accepting) = tmp_path / f"a.jsonl{compression}", FRAMES[name]
    lines, compress = tokenise_inputs.make_jsonl(DOCUMENTS), COMPRESSIONS[compression]
    path.write_bytes(arrange(compress(lines[:1000]), compress(lines[1000:])))
    ((part,),) = cut_into_pieces(find_files(str(path)), 1 << 30)
    if compression in accepting:
        assert list(read_documents(part, None, "text")) == [text.encode() for text in DOCUMENTS]
        return
    with pytest.raises(DataError, match=r"is not a valid \..* file"):
        list(read_documents(part, None, "text"))


TEXT_TYPES = {
    "string": pyarrow.string(),
    "large_string": pyarrow.large_string(),
    "string_view": pyarrow.string_view(),
    "binary": pyarrow.binary(),
    "large_binary": pyarrow.large_binary(),
    "dictionary": pyarrow.dictionary(pyarrow.int32(), pyarrow.string()),
    "large dictionary": pyarrow.dictionary(pyarrow.int8(), pyarrow.large_string()),
}


@pytest.mark.parametrize("name", ["d.parquet", "e.arrow"])
@pytest.mark.parametrize("kind", TEXT_TYPES)
def test_a_text_column_is_read_in_every_arrow_encoding(tmp_path, monkeypatch, kind, name):
    texts = pyarrow.array(["naïve", None, "naïve", ""]).cast(TEXT_TYPES[kind])
    monkeypatch.setattr(tokenise_inputs, "make_table", lambda _: pyarrow.table({"text": texts}))
    (tmp_path / name).write_bytes(FILE_FORMATS[name]([]))
    (file,) = find_files(str(tmp_path / name))
    found = list(read_documents(InputPart(file, file.size_bytes), None, "text"))
    assert found[0] == found[2] == "naïve".encode()
    assert isinstance(found[1], BadRecord)
    assert found[3] == b""


def test_columns_of_nulls_and_of_numbers_are_reported(tmp_path, monkeypatch):
    for values, message in (([None, None], "'text' is null"), ([1, 2], "column 'text' is int64, needs string")):
        monkeypatch.setattr(tokenise_inputs, "make_table", lambda _, values=values: pyarrow.table({"text": values}))
        (tmp_path / "d.parquet").write_bytes(FILE_FORMATS["d.parquet"]([]))
        assert message in get_error_line(tmp_path / "run", **{"config.source": str(tmp_path / "d.parquet")})


def test_every_document_has_one_begin_token(tmp_path, tokenizers_by_kind):
    texts = ["one", f"{SEPARATOR}two", ""]  # tokenizers of kind hf encode the text of a special token as that token
    (tmp_path / "a.jsonl").write_bytes(tokenise_inputs.make_jsonl(texts))
    content = json.loads(Path(tokenizers_by_kind["hf"]["file"]).read_bytes())
    process = {"single": [{"SpecialToken": {"id": SEPARATOR, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]}
    process |= {
        "pair": process["single"],
        "special_tokens": {SEPARATOR: {"id": SEPARATOR, "ids": [0], "tokens": [SEPARATOR]}},
    }
    content["post_processor"] = {"type": "TemplateProcessing", **process}
    (tmp_path / "t.json").write_text(json.dumps(content))
    changes = {"config.source": str(tmp_path / "a.jsonl"), "config.begin": SEPARATOR, "config.separator": "<|pad|>"}
    for name, file in (
        ("plain", tokenizers_by_kind["hf"]["file"]),
        ("with a post-processor", str(tmp_path / "t.json")),
    ):
        make_tokenise_job(tmp_path / name, **changes, **{"config.tokenizer": {"kind": "hf", "file": file}})()
        corpus = tmp_path / name / "corpus"
        found = read_corpus(corpus)
        assert [ids.tolist().count(0) for ids in found] == [1, 1, 1]
        assert all(ids[0] == 0 and ids[-1] == 1 for ids in found)
        assert (read_index(corpus).begin, json.loads((corpus / "index.json").read_bytes())["format"]) == (0, 3)
        codec = load_source_codec(TokenSource(source=str(corpus)), DataConfig(source=str(corpus), sequence_length=8))
        assert (find_start_token(codec, DataConfig(source="x", sequence_length=8)), codec.separator) == (0, 1)
        assert encode_prompt(codec, "one") == found[0][:-1].tolist()


# Documents that a tokenizer cannot encode.

LONG_BLANKS = " " * 1_200_000  # the regular expressions of tiktoken overflow their stack on them, which is a panic


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_document_that_crashes_the_tokenizer_is_named_or_skipped(tmp_path, tokenizers_by_kind, capsys, shuffle):
    texts = [*DOCUMENTS[:5], LONG_BLANKS, *DOCUMENTS[5:9]]
    (tmp_path / "a.jsonl").write_bytes(b"\n{}\n" + tokenise_inputs.make_jsonl(texts))
    changes = {"config.source": str(tmp_path / "a.jsonl"), "config.tokenizer": tokenizers_by_kind["tiktoken"]}
    changes |= {"config.shuffle": shuffle, "config.shard_bytes": 1 << 30}
    found = get_error_line(tmp_path / "run", **changes, **{"config.skip_bad": 1})
    assert "skip_bad allows 1" in found
    make_tokenise_job(tmp_path / "run", **changes, **{"config.skip_bad": 2})()
    assert sorted(decode_corpus(tmp_path / "run/corpus")) == sorted(DOCUMENTS[:9])
    record = FinishedPiece.from_json(json.loads((tmp_path / "run/corpus/00000.json").read_bytes()))
    assert (record.num_bad, "a.jsonl:8: the tokenizer cannot encode" in record.first_bad) == (2, True)


def test_a_text_file_that_crashes_the_tokenizer_is_named(tmp_path, tokenizers_by_kind):
    source = write_text_files(tmp_path / "in", [*DOCUMENTS[:3], LONG_BLANKS])
    changes = {"config.source": source, "config.tokenizer": tokenizers_by_kind["tiktoken"]}
    found = get_error_line(tmp_path / "run", **changes)
    assert "00003.txt: the tokenizer cannot encode" in found
    assert "set skip_bad" in found
    make_tokenise_job(tmp_path / "run", **changes, **{"config.skip_bad": 1})()
    assert decode_corpus(tmp_path / "run/corpus") == DOCUMENTS[:3]


# Shuffling and deduplication.


# Texts, lines, and rows of tables; the others are read alike in test_every_file_format_gives_the_same_documents.
DAILY_FORMATS = ("texts", "a.jsonl", "d.parquet")
ALL_FORMATS = [
    pytest.param(name, marks=() if name in DAILY_FORMATS else pytest.mark.soak) for name in ("texts", *FILE_FORMATS)
]


@pytest.mark.daily(1)
@pytest.mark.parametrize("name", ALL_FORMATS)
def test_a_shuffled_corpus_has_an_order_determined_by_the_seed(tmp_path, name):
    source = write_text_files(tmp_path / "in", DOCUMENTS) if name == "texts" else str(tmp_path / name)
    if name != "texts":
        (tmp_path / name).write_bytes(FILE_FORMATS[name](DOCUMENTS))
    changes = {"config.source": source, "config.shuffle": True}
    orders = []
    for run, seed in (("one", 0), ("again", 0), ("other", 1)):
        make_tokenise_job(tmp_path / run, **changes, seed=seed)()
        orders.append(decode_corpus(tmp_path / run / "corpus"))
    assert read_corpus_files(tmp_path / "one/corpus") == read_corpus_files(tmp_path / "again/corpus")
    assert orders[0] != orders[2]
    for order in orders:
        assert order != DOCUMENTS
        assert sorted(order) == sorted(DOCUMENTS)


def test_the_order_of_a_seed_is_stable():
    assert shuffle_indices(8, 0, 3, 1) == [4, 0, 6, 2, 5, 3, 7, 1]


def test_pieces_of_a_shuffled_source_mix_its_parts(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(tokenise_inputs.make_jsonl(DOCUMENTS * 20))
    pieces = cut_into_pieces(find_files(str(tmp_path / "a.jsonl")), 20_000, 5)
    starts = [[part.start or 0 for part in piece] for piece in pieces]
    assert min(len(each) for each in starts[:-1]) > 10
    assert sum(max(each) - min(each) > 50_000 for each in starts) > len(starts) // 2


REPEATED = [*DOCUMENTS[:40], *DOCUMENTS[20:60], DOCUMENTS[3], *DOCUMENTS[60:], *DOCUMENTS[:2]]


@pytest.mark.daily(2)
@pytest.mark.parametrize("name", ALL_FORMATS)
@pytest.mark.parametrize("range_documents", [1 << 22, 5])
def test_only_the_first_of_equal_documents_is_kept(tmp_path, capsys, monkeypatch, name, range_documents):
    monkeypatch.setattr(output, "_RANGE_DOCUMENTS", range_documents)
    source = write_text_files(tmp_path / "in", REPEATED) if name == "texts" else str(tmp_path / name)
    if name != "texts":
        (tmp_path / name).write_bytes(FILE_FORMATS[name](REPEATED))
    make_tokenise_job(tmp_path / "run", **{"config.source": source, "config.deduplicate": True})()
    assert decode_corpus(tmp_path / "run/corpus") == DOCUMENTS
    assert "left out 23 documents that repeat an earlier one" in capsys.readouterr().out
    assert not list((tmp_path / "run/corpus").glob("*.digests"))


def test_duplicate_dialogues_are_dropped(tmp_path):
    pairs = [{"prompt": f"{i % 7}?", "completion": "yes" if i < 20 else "no"} for i in range(40)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    changes = {"config.source": str(tmp_path / "a.jsonl"), "config.chat": {}, "config.deduplicate": True}
    make_tokenise_job(
        tmp_path / "run", **changes, **{"config.shard_bytes": 30, "config.separator": 0, "config.begin": 1}
    )()
    found = decode_corpus(tmp_path / "run/corpus")
    assert found == list(dict.fromkeys(f"\x01{pair['prompt']}{pair['completion']}" for pair in pairs))


def test_a_source_without_documents_has_no_duplicates(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\n\n")
    changes = {"config.source": str(tmp_path / "a.jsonl"), "config.deduplicate": True, "config.shuffle": True}
    assert "holds no document" in get_error_line(tmp_path / "run", **changes)


def test_a_deduplicated_corpus_is_restored_after_every_loss_of_files(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(tokenise_inputs.make_jsonl(REPEATED))
    changes = {"config.source": str(tmp_path / "a.jsonl"), "config.deduplicate": True, "config.shuffle": True}
    make_tokenise_job(tmp_path / "whole", **changes)()
    whole = read_corpus_files(tmp_path / "whole/corpus")
    assert sorted(decode_corpus(tmp_path / "whole/corpus")) == sorted(DOCUMENTS)
    job = make_tokenise_job(tmp_path / "run", **changes)
    with pytest.raises(RuntimeError, match="crash"):
        job(stop=CrashNotice(job, 500))
    shutil.copytree(tmp_path / "run", tmp_path / "crashed")
    # All sets of files that a kill may leave: digests of some pieces, with or without their results.
    for lost in ("none", "0000[0-3].digests", "*.digests", "duplicates.bin", "[0d]*.*[ns]", "0000[2-9].json"):
        shutil.rmtree(tmp_path / "run")
        shutil.copytree(tmp_path / "crashed", tmp_path / "run")
        for path in (tmp_path / "run/corpus").glob(lost):
            path.unlink()
        make_tokenise_job(tmp_path / "run", **changes)()
        assert read_corpus_files(tmp_path / "run/corpus") == whole, lost


# Buckets.


@pytest.mark.parametrize(
    "source", ["gs://b/web/*.jsonl.zst", "gs://b/web/**/*.zst", "gs://b/web/[ab]*.zst", "gs://b/web"]
)
def test_a_corpus_is_read_from_and_written_to_a_bucket(tmp_path, monkeypatch, source):
    bucket = tokenise_inputs.FakeBucket(monkeypatch)
    for i, name in enumerate(["a", "b"]):
        bucket.write(f"web/{name}.jsonl.zst", FILE_FORMATS["c.jsonl.zst"](DOCUMENTS[i * 50 : i * 50 + 50]))
    bucket.write("other/a.jsonl.zst", b"not read")
    bucket.write("webb/a.jsonl.zst", b"not read")
    bucket.write("t.json", tokenise_inputs.make_hf_tokenizer())
    changes = {"config.tokenizer": {"kind": "hf", "file": "gs://b/t.json"}, "config.separator": SEPARATOR}
    job = make_tokenise_job(tmp_path / "run", **{"config.source": source, "config.output": "gs://b/out"}, **changes)
    job()
    assert decode_corpus(bucket.copy_to("out", tmp_path / "out")) == DOCUMENTS[:100]


def test_one_object_of_a_bucket_is_a_source(tmp_path, monkeypatch):
    bucket = tokenise_inputs.FakeBucket(monkeypatch)
    bucket.write("web/a.jsonl", tokenise_inputs.make_jsonl(DOCUMENTS))
    bucket.write("web/a.jsonl2", b"not read")
    make_tokenise_job(tmp_path / "run", **{"config.source": "gs://b/web/a.jsonl"})()
    assert decode_corpus(tmp_path / "run/corpus") == DOCUMENTS


@pytest.mark.parametrize("own", ["a[1].jsonl", "a b*.jsonl"])
def test_an_object_with_wildcards_in_its_name_is_a_source(tmp_path, monkeypatch, own):
    bucket = tokenise_inputs.FakeBucket(monkeypatch)
    bucket.write(f"web/{own}", tokenise_inputs.make_jsonl(DOCUMENTS))
    bucket.write("web/a1.jsonl", b"not read")
    make_tokenise_job(tmp_path / "run", **{"config.source": f"gs://b/web/{own}"})()
    assert decode_corpus(tmp_path / "run/corpus") == DOCUMENTS


@pytest.mark.daily(3)
@pytest.mark.parametrize("name", ["texts.txt", *FILE_FORMATS])
def test_a_large_file_in_a_bucket_is_read_in_blocks(tmp_path, monkeypatch, name):
    bucket, most_bytes, block_bytes = tokenise_inputs.FakeBucket(monkeypatch), 0, 512
    monkeypatch.setattr(input_files, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(input_documents, "BLOCK_BYTES", block_bytes)
    real = bucket.driver.get_range

    def get_range(key: str, start: int, stop: int, version: str) -> bytes:
        nonlocal most_bytes
        most_bytes = max(most_bytes, stop - start)
        return real(key, start, stop, version)

    monkeypatch.setattr(bucket.driver, "get_range", get_range)
    texts = ["".join(DOCUMENTS)] if name == "texts.txt" else DOCUMENTS
    bucket.write(f"web/{name}", texts[0].encode() if name == "texts.txt" else FILE_FORMATS[name](texts))
    make_tokenise_job(tmp_path / "run", **{"config.source": f"gs://b/web/{name}"})()
    assert decode_corpus(tmp_path / "run/corpus") == texts
    assert most_bytes == block_bytes


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("gs://b/[z-a]/*", "no file matches"),
        ("gs://b/wep/*.jsonl", "no file matches gs://b/wep"),
        ("gs://b*/web/*.jsonl", "the name of a bucket cannot hold *"),
        ("gs://b/*/a.*", "matches jsonl and text files"),
    ],
)
def test_a_source_missing_in_a_bucket_is_rejected(tmp_path, monkeypatch, source, message):
    bucket = tokenise_inputs.FakeBucket(monkeypatch)
    bucket.write("web/a.jsonl", tokenise_inputs.make_jsonl(DOCUMENTS))
    bucket.write("web/a.txt", b"text")
    assert message in get_error_line(tmp_path / "run", **{"config.source": source})


@pytest.mark.parametrize("block_bytes", [None, 512])
@pytest.mark.parametrize("name", ["c.jsonl", "c.jsonl.zst", "c.parquet"])
@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (PermissionError("denied"), InvalidError),
        (FileNotFoundError("gone"), InvalidError),
        ("cut", InvalidError),
        ("replaced", InvalidError),
        (DeadlineError("silent: web/c"), StorageError),
    ],
    ids=str,
)
def test_an_unreadable_object_is_named(tmp_path, monkeypatch, error, raised, name, block_bytes):
    bucket = tokenise_inputs.FakeBucket(monkeypatch)
    if block_bytes is not None:
        monkeypatch.setattr(input_files, "BLOCK_BYTES", block_bytes)
        monkeypatch.setattr(input_documents, "BLOCK_BYTES", block_bytes)
    key = f"web/{name}"
    form = {"c.jsonl": "a.jsonl", "c.parquet": "d.parquet"}.get(name, name)
    bucket.write(key, FILE_FORMATS[form](DOCUMENTS))
    content = bucket.driver.objects[key][0]

    def fail(verb: str, failing_name: str) -> None:
        if (verb, failing_name) == ("get", key):
            if isinstance(error, OSError):
                raise error
            bucket.driver.objects[key] = (content[:-1] if error == "cut" else content[::-1], "other")

    bucket.driver.before = fail
    with pytest.raises(raised, match=r"web/c"):
        make_tokenise_job(tmp_path / "run", **{"config.source": f"gs://b/web/{name}"})()


# Resumes, and changes between attempts.


def _make_some(tmp_path: Path) -> dict[str, Any]:
    is_there = (tmp_path / "in").exists()
    return {"config.source": str(tmp_path / "in/*.txt") if is_there else write_text_files(tmp_path / "in", DOCUMENTS)}


def _make_stopped_run(tmp_path: Path, **changes: Any) -> Path:
    """Run a job and stop it in the middle."""
    job = make_tokenise_job(tmp_path / "run", **_make_some(tmp_path), **changes)
    stop_after(job, 500)
    return tmp_path / "run"


def test_a_resumed_job_makes_no_piece_twice(tmp_path):
    run = _make_stopped_run(tmp_path)
    records = {path: path.stat().st_mtime_ns for path in (run / "corpus").glob("0*")}
    assert len(records) > 2
    make_tokenise_job(run, **_make_some(tmp_path))()
    assert records == {path: path.stat().st_mtime_ns for path in records}
    make_tokenise_job(tmp_path / "whole", **_make_some(tmp_path))()
    assert read_corpus_files(run / "corpus") == read_corpus_files(tmp_path / "whole/corpus")
    results = [json.loads((directory / "result.json").read_bytes()) for directory in (run, tmp_path / "whole")]
    assert results[0] == results[1]
    assert results[0]["tokens"] == read_index(run / "corpus").num_tokens


@pytest.mark.daily(1)
@pytest.mark.parametrize("name", ["00000.json", "00000-000.bin", "00000-000.ends"])
def test_lost_files_are_reported_or_made_again(tmp_path, name):
    run = _make_stopped_run(tmp_path)
    (run / "corpus" / name).unlink()
    if not name.endswith(".json"):
        assert re.search(
            rf"{re.escape(name)} is missing or truncated; remove .*00000.json",
            get_error_line(run, **_make_some(tmp_path)),
        )
        (run / "corpus/00000.json").unlink()
    make_tokenise_job(run, **_make_some(tmp_path))()
    assert decode_corpus(run / "corpus") == DOCUMENTS


def test_a_finished_job_does_nothing_even_without_its_corpus(tmp_path):
    make_tokenise_job(tmp_path / "run", **_make_some(tmp_path))()
    (tmp_path / "run/corpus").rename(tmp_path / "elsewhere")
    make_tokenise_job(tmp_path / "run", **_make_some(tmp_path))()
    assert not (tmp_path / "run/corpus").exists()


@pytest.mark.daily(2)
@pytest.mark.parametrize("damage", [b"{", b"[]", b"{}", b'{"num_bad": "x"}', b'{"shards": [3]}'])
def test_a_damaged_record_is_reported_and_its_piece_made_again(tmp_path, damage):
    run = _make_stopped_run(tmp_path)
    path = run / "corpus/00001.json"
    record = path.read_bytes()
    is_part = damage.startswith(b'{"')
    path.write_bytes(json.dumps(json.loads(record) | json.loads(damage)).encode() if is_part else damage)
    assert "00001.json is missing or damaged; remove it and run again" in get_error_line(run, **_make_some(tmp_path))
    path.unlink()
    make_tokenise_job(run, **_make_some(tmp_path))()
    assert path.read_bytes() == record


def test_partial_files_of_a_killed_process_are_removed(tmp_path):
    run = _make_stopped_run(tmp_path)
    (run / "corpus/.00009-000.bin.0123abcd.tmp").write_bytes(b"half")
    (run / "corpus/.mine").write_bytes(b"somebody's own")
    make_tokenise_job(run, **_make_some(tmp_path))()
    assert [path.name for path in (run / "corpus").glob(".*")] == [".mine"]


def test_a_changed_input_is_rejected_and_named(tmp_path):
    run, first = _make_stopped_run(tmp_path), tmp_path / "in/00000.txt"
    source = {"config.source": str(tmp_path / "in/*.txt")}
    before, status = first.read_bytes(), first.stat()
    first.write_bytes(before + b"more")
    assert f"{first} has changed" in get_error_line(run, **source)
    first.unlink()
    assert f"{first} is gone" in get_error_line(run, **source)
    first.write_bytes(before)
    os.utime(first, ns=(status.st_atime_ns, status.st_mtime_ns))
    (tmp_path / "in/new.txt").write_text("new")
    assert "new.txt is new" in get_error_line(run, **source)
    (tmp_path / "in/new.txt").unlink()
    make_tokenise_job(run, **source)()


# Edits of a file whose size and modification time stay.


def _rewrite(path: Path) -> None:
    content = path.read_bytes()
    with path.open("r+b") as file:
        file.write(content.replace(b"number", b"NUMBER"))


def _rename_over(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes().replace(b"number", b"NUMBER"))
    os.replace(other, path)


def _restore_copy(path: Path) -> None:
    shutil.copy2(path, path.with_name("copy"))
    path.with_name("copy").replace(path)


def _move_and_return(path: Path) -> None:
    other = path.parent.with_name("elsewhere")
    path.parent.rename(other)
    (other / path.name).rename(other / "moved")
    (other / "moved").rename(other / path.name)
    other.rename(path.parent)


EDITS: dict[str, Any] = {"rewrite": _rewrite, "rename_over": _rename_over}
TOUCHES: dict[str, Any] = {
    "chmod": lambda path: path.chmod(0o640),
    "link": lambda path: os.link(path, path.parent.parent / "link"),
    "restored copy": _restore_copy,
    "move": _move_and_return,
}
# Inputs by the file that is changed, and keys of the job.
LOCAL_INPUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "texts": ("in/00011.txt", {"config.source": "in/*.txt"}),
    "lines": ("in/a.jsonl", {"config.source": "in/a.jsonl"}),
    "table": ("in/d.parquet", {"config.source": "in/d.parquet"}),
    "duplicates": ("in/a.jsonl", {"config.source": "in/a.jsonl", "config.deduplicate": True}),
    "mixed": ("in/a.jsonl", {"config.source": "in/a.jsonl", "config.shuffle": True}),
}


def _make_local_input(tmp_path: Path, kind: str) -> tuple[Path, dict[str, Any]]:
    """Write inputs, and return the file that is changed and the keys of the job."""
    name, keys = LOCAL_INPUTS[kind]
    write_text_files(tmp_path / "in", DOCUMENTS)
    (tmp_path / "in/a.jsonl").write_bytes(tokenise_inputs.make_jsonl(DOCUMENTS))
    # Without compression the text stands in the file.
    table = tokenise_inputs.make_table(DOCUMENTS)
    options = {"row_group_size": 7, "use_dictionary": False, "write_statistics": False}
    pyarrow.parquet.write_table(table, tmp_path / "in/d.parquet", compression="none", **options)
    return tmp_path / name, keys | {"config.source": f"{tmp_path}/{keys['config.source']}"}


class ChangeAt(StopAfter):
    """Stop notice that never stops, and changes a file once the job has completed some steps."""

    def __init__(self, job: Any, step: int, change: Any):
        super().__init__(job, step)
        self._change = change

    def poll(self) -> bool:
        if self._change is not None and super().poll():
            change, self._change = self._change, None
            change()
        return False


def _change(path: Path, how: Any) -> None:
    """Change a file, and set its modification time back."""
    status = path.stat()
    how(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (status.st_size, status.st_mtime_ns)


def _run_changed(run: Path, keys: dict[str, Any], when: str, change: Any) -> None:
    """Run a job, and change a file between two attempts or during the only one."""
    if when == "between":
        stop_after(make_tokenise_job(run, **keys), 500)
        change()
        make_tokenise_job(run, **keys)()
    else:
        job = make_tokenise_job(run, **keys)
        job(stop=ChangeAt(job, 500, change))


_DAILY_EDITS = {
    ("texts", "between", "rename_over"),
    ("lines", "during", "rewrite"),
    ("duplicates", "between", "rewrite"),
}
_EVERY_EDIT = [
    pytest.param(*case, marks=() if case in _DAILY_EDITS else pytest.mark.soak)
    for case in itertools.product(LOCAL_INPUTS, ("between", "during"), EDITS)
]


@pytest.mark.daily(1)
@pytest.mark.parametrize(("kind", "when", "edit"), _EVERY_EDIT)
def test_an_edit_that_keeps_size_and_time_is_refused_until_it_is_undone(tmp_path, kind, when, edit):
    path, keys = _make_local_input(tmp_path, kind)
    before = path.read_bytes()
    with pytest.raises(InvalidError, match=rf"{path} has changed since this job began; restore it") as caught:
        _run_changed(tmp_path / "run", keys, when, lambda: _change(path, EDITS[edit]))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run/corpus/index.json").exists()
    _change(path, lambda path: path.write_bytes(before))
    make_tokenise_job(tmp_path / "run", **keys)()
    make_tokenise_job(tmp_path / "other", **keys)()
    found, expected = (_read_tokens(tmp_path / name / "corpus") for name in ("run", "other"))
    assert found == expected


@pytest.mark.daily(1)
@pytest.mark.parametrize("when", ["between", "during"])
@pytest.mark.parametrize(
    "kind", ["texts", *(pytest.param(each, marks=pytest.mark.soak) for each in ("duplicates", "lines"))]
)
def test_files_that_were_only_touched_are_no_other_input(tmp_path, kind, when):
    path, keys = _make_local_input(tmp_path, kind)
    make_tokenise_job(tmp_path / "other", **keys)()

    def touch() -> None:
        for number, how in enumerate(TOUCHES.values()):
            _change(path if kind != "texts" else tmp_path / f"in/{number:05}.txt", how)

    _run_changed(tmp_path / "run", keys, when, touch)
    found, expected = (_read_tokens(tmp_path / name / "corpus") for name in ("run", "other"))
    assert found == expected


def test_an_edit_before_its_first_piece_is_made_is_the_input(tmp_path):
    _, keys = _make_local_input(tmp_path, "texts")
    stop_after(make_tokenise_job(tmp_path / "run", **keys), 100)
    _change(tmp_path / "in/00119.txt", _rewrite)
    make_tokenise_job(tmp_path / "run", **keys)()
    make_tokenise_job(tmp_path / "other", **keys)()
    assert _read_tokens(tmp_path / "run/corpus") == _read_tokens(tmp_path / "other/corpus")


def test_a_corpus_that_an_earlier_version_has_begun_is_continued(tmp_path):
    path, keys = _make_local_input(tmp_path, "texts")
    stop_after(make_tokenise_job(tmp_path / "run", **keys), 500)
    sources = tmp_path / "run/corpus/sources.json"
    sources.write_text(json.dumps({"files": json.loads(sources.read_text())["files"]}))
    for record in (tmp_path / "run/corpus").glob("[0-9]*.json"):
        content = json.loads(record.read_text())
        record.write_text(json.dumps({key: content[key] for key in content if key != "digest"}))
    _change(path, TOUCHES["chmod"])
    make_tokenise_job(tmp_path / "run", **keys)()
    assert decode_corpus(tmp_path / "run/corpus") == DOCUMENTS


def _read_tokens(corpus: Path) -> dict[str, bytes]:
    return {name: content for name, content in read_corpus_files(corpus).items() if name != "sources.json"}


def test_a_replaced_object_of_equal_size_is_rejected_and_named(tmp_path, monkeypatch):
    bucket = tokenise_inputs.FakeBucket(monkeypatch)
    bucket.write("web/a.jsonl", tokenise_inputs.make_jsonl(DOCUMENTS[:60]))
    bucket.write("web/b.jsonl", tokenise_inputs.make_jsonl(DOCUMENTS[60:]))
    changes = {"config.source": "gs://b/web/*"}
    job = make_tokenise_job(tmp_path / "run", **changes)
    stop_after(job, 500)
    bucket.write("web/b.jsonl", tokenise_inputs.make_jsonl(DOCUMENTS[:59:-1]))
    assert "gs://b/web/b.jsonl has changed since this job began" in get_error_line(tmp_path / "run", **changes)


def test_another_tokenizer_is_rejected(tmp_path, tokenizers_by_kind):
    run = _make_stopped_run(tmp_path, **{"config.tokenizer": tokenizers_by_kind["hf"]})
    path = Path(tokenizers_by_kind["hf"]["file"])
    before = path.read_bytes()
    path.write_bytes(before.replace(b"<|pad|>", b"<|PAD|>"))
    changes = _make_some(tmp_path) | {"config.tokenizer": tokenizers_by_kind["hf"]}
    with pytest.raises(InvalidError, match=r"config.tokenizer.sha256: checkpoint 500 has"):
        make_tokenise_job(run, **changes)()
    path.write_bytes(before)
    make_tokenise_job(run, **_make_some(tmp_path), **{"config.tokenizer": tokenizers_by_kind["hf"]})()


class CrashNotice(StopAfter):
    """Stop notice that ends the process after some steps, so that nothing is saved."""

    def poll(self) -> bool:
        if super().poll():
            raise RuntimeError("crash")
        return False


def test_another_tokenizer_is_rejected_before_the_first_checkpoint(tmp_path, tokenizers_by_kind):
    shutil.copy(tokenizers_by_kind["hf"]["file"], tmp_path / "t.json")
    changes = _make_some(tmp_path) | {"config.tokenizer": {"kind": "hf", "file": str(tmp_path / "t.json")}}
    job = make_tokenise_job(tmp_path / "run", **changes)
    with pytest.raises(RuntimeError, match="crash"):
        job(stop=CrashNotice(job, 500))
    (tmp_path / "t.json").write_bytes((tmp_path / "t.json").read_bytes().replace(b"<|pad|>", b"<|PAD|>"))
    assert "differs from the one that its pieces were made with" in get_error_line(tmp_path / "run", **changes)


def test_a_replaced_trained_tokenizer_is_rejected(tmp_path, tokenizers_by_kind):
    changes = {"config.tokenizer": tokenizers_by_kind["bpe"]}
    run = _make_stopped_run(tmp_path, **changes)
    shutil.copy(tokenizers_by_kind["hf"]["file"], run / "corpus/tokenizer.json")
    assert "differs from the one that its pieces were made with" in get_error_line(
        run, **_make_some(tmp_path), **changes
    )


def test_two_runs_never_write_one_corpus(tmp_path):
    output = {"config.output": str(tmp_path / "corpus")}
    job = make_tokenise_job(tmp_path / "run", **_make_some(tmp_path), **output)
    stop_after(job, 500)
    found = get_error_line(tmp_path / "other", **_make_some(tmp_path), **output)
    assert f"is the corpus of the run 'tokenise' in {tmp_path / 'run'}; use another output" in found
    shutil.rmtree(tmp_path / "run")
    assert "is the corpus of the run" in get_error_line(tmp_path / "run", **_make_some(tmp_path), **output)


# Keys.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config.source": "python-stdlb"}, "did you mean python-stdlib?"),
        ({"config.source": "/nowhere/*.txt"}, "no file matches /nowhere/"),
        ({"config.source": "IN"}, "is a directory; name its files"),
        ({"config.source": "IN/*.tx"}, "no file matches"),
        ({"config.source": "IN/00000.tx"}, "did you mean .*/in/00000.txt?"),
        ({"config.source": "MIXED"}, "matches jsonl and text files"),
        ({"config.source": "OTHER"}, "unsupported file type"),
        ({"config.source": "ftp://x/y"}, "ftp:// is not known"),
        ({"config.field": "body"}, "config.field: is body, but nothing reads it"),
        ({"config.separator": 256}, "config.separator: is 256; the largest id is 255"),
        ({"config.separator": "</s>"}, "a tokenizer of kind bytes has no token '</s>'; give an id"),
        ({"config.tokenizer": "hf", "config.separator": "<|endoftxt|>"}, r"did you mean '<\|endoftext\|>'?"),
        (
            {"config.tokenizer": {"kind": "hf", "file": "/nowhere/t.json"}},
            ".*/t.json: does not exist",
        ),
        (
            {"config.tokenizer": {"kind": "tiktoken", "file": "cl100k_base", "pattern": "."}},
            "config.tokenizer: cl100k_base: does not exist; .* holds no cl100k_base; needs a file: download ",
        ),
        ({"config.tokenizer": {"kind": "hf", "file": "IN/00000.tx"}}, "does not exist; did you mean .*/in/00000.txt?"),
        ({"config.tokenizer": {"kind": "hf", "file": "TEXT"}}, "is not a tokenizer.json"),
        ({"config.tokenizer": {"kind": "sentencepiece", "file": "TEXT"}}, "is not a sentencepiece model"),
        ({"config.tokenizer": {"kind": "tiktoken", "file": "TEXT", "pattern": "."}}, "line 1 is not a tiktoken rank"),
        ({"config.output": "TEXT"}, "needs a directory"),
        (
            {"config.source": "IN/[0]*", "config.output": "IN"},
            "matches files that this job writes, such as .*/in/00000",
        ),
        ({"config.source": "TOP/**"}, "files that this job writes, such as .*/run/events.jsonl; use a narrower"),
        ({"config.source": "TOP/**/*.jsonl"}, "files that this job writes, such as .*/run/events.jsonl"),
        ({"config.tokenizer": {"kind": "hf", "file": "EMPTY"}}, "is not a usable tokenizer.json: it has no tokens"),
    ],
    ids=str,
)
def test_an_invalid_value_is_rejected_before_anything_is_written(tmp_path, tokenizers_by_kind, change, message):
    source = write_text_files(tmp_path / "in", DOCUMENTS[:3])
    (tmp_path / "in/a.jsonl").write_bytes(tokenise_inputs.make_jsonl(DOCUMENTS))
    (tmp_path / "in/b.zip").write_bytes(b"PK")
    (tmp_path / "in/none.json").write_text(tokenizers.Tokenizer(tokenizers.models.BPE()).to_str())
    words = {"IN": str(tmp_path / "in"), "TEXT": str(tmp_path / "in/00000.txt"), "OTHER": str(tmp_path / "in/b.zip")}
    words["EMPTY"] = str(tmp_path / "in/none.json")
    words["MIXED"] = str(tmp_path / "in/[0a]*")

    def replace_placeholder(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: replace_placeholder(inner) for key, inner in value.items()}
        if value in tokenizers_by_kind:
            return tokenizers_by_kind[value] if value == "hf" and change.get("config.tokenizer") == "hf" else value
        return (
            re.sub("^TOP/", f"{tmp_path}/", re.sub("^IN/", f"{tmp_path}/in/", words.get(value, value)))
            if isinstance(value, str)
            else value
        )

    changes = {"config.source": source} | {key: replace_placeholder(value) for key, value in change.items()}
    assert re.search(message, get_error_line(tmp_path / "run", **changes))
    assert not (tmp_path / "run/corpus").exists()


# Damaged input.


def _cut(content: bytes) -> bytes:
    return content[:-9]


DAMAGES: dict[str, tuple[list[str], Any, str]] = {
    "cut": (["b.jsonl.gz", "c.jsonl.zst"], _cut, "is truncated"),
    "cut table": (["d.parquet", "f.arrow"], _cut, "is not a valid (parquet|arrow) file"),
    "another kind": (
        ["b.jsonl.gz", "c.jsonl.zst", "d.parquet", "e.arrow"],
        lambda _: b"what is this?" * 9,
        "is not a valid",
    ),
    "nothing": (["b.jsonl.gz", "c.jsonl.zst"], lambda _: b"", "is truncated"),
    "no file": (["d.parquet", "e.arrow"], lambda _: b"", "is not a valid"),
    "not JSON": (["a.jsonl"], lambda content: b"{}x\n" + content, r"a.jsonl:1: is not JSON"),
    "not UTF-8": (["a.jsonl"], lambda content: b'{"text": "\xff"}\n' + content, r"a.jsonl:1: is not JSON"),
    "nested": (["a.jsonl"], lambda content: content + b"[" * 99999 + b"\n", r"a.jsonl:122: is not JSON"),
    "an array": (["a.jsonl"], lambda _: b'\n [{"text": "a"}]', r"a.jsonl is one JSON array; .* jq -c '.\[\]'"),
    "an array of lines": (["b.jsonl.gz"], lambda _: gzip.compress(b'[\n{"text": "a"},\n'), "is one JSON array"),
    "a list": (["a.jsonl"], lambda content: content + b"[1]\n", r"a.jsonl:122: is not a JSON object"),
    "no field": (
        ["a.jsonl"],
        lambda content: content + b'{"txt": 1}\n',
        "has no 'text'; did you mean field: txt?",
    ),
    "a number": (["a.jsonl"], lambda content: content + b'{"text": 1}\n', "'text' is not a string: 1"),
    "strange fields": (
        ["a.jsonl"],
        lambda content: content + b'{"a\\nb": 1}\n',
        r"has no 'text'; it has 'a\\nb'",
    ),
    "empty": (["a.jsonl"], lambda _: b"", "holds no document"),
    "blank": (["a.jsonl"], lambda _: b"\n \n\n", "holds no document"),
}
CASES = [(name, damage) for damage, (names, _, _) in DAMAGES.items() for name in names]


@pytest.mark.daily(8)
@pytest.mark.parametrize(("name", "damage"), CASES)
def test_a_damaged_input_is_named_in_one_line(tmp_path, name, damage):
    _, spoil, message = DAMAGES[damage]
    (tmp_path / name).write_bytes(spoil(FILE_FORMATS[name](DOCUMENTS)))
    found = get_error_line(tmp_path / "run", **{"config.source": str(tmp_path / name)})
    assert re.search(message, found), found
    assert name in found


@pytest.mark.parametrize("name", ["d.parquet", "e.arrow", "f.arrow"])
def test_two_columns_of_one_name_are_rejected(tmp_path, monkeypatch, name):
    twice = pyarrow.table([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["text", "text"])
    monkeypatch.setattr(tokenise_inputs, "make_table", lambda _: twice)
    (tmp_path / name).write_bytes(FILE_FORMATS[name](DOCUMENTS))
    found = get_error_line(tmp_path / "run", **{"config.source": str(tmp_path / name)})
    assert f"{name} has 2 columns 'text', needs one" in found


def test_a_text_that_cannot_be_encoded_ends_the_job_with_one_line(tmp_path):
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="[UNK]"))
    (tmp_path / "t.json").write_text(library.to_str())
    changes = {"config.tokenizer": {"kind": "hf", "file": str(tmp_path / "t.json")}}
    found = get_error_line(tmp_path / "run", **_make_some(tmp_path), **changes)
    assert "the tokenizer cannot encode a document: WordLevel error: Missing [UNK] token" in found


@pytest.mark.parametrize("name", ["a.jsonl", "d.parquet", "e.arrow"])
def test_a_missing_field_is_reported_with_the_nearest_name(tmp_path, name):
    (tmp_path / name).write_bytes(FILE_FORMATS[name](DOCUMENTS))
    found = get_error_line(tmp_path / "run", **{"config.source": str(tmp_path / name), "config.field": "texts"})
    assert "has no " in found
    assert "did you mean field: text?" in found


@pytest.mark.daily(2)
@pytest.mark.parametrize("name", ["a.jsonl", "b.jsonl.gz", "c.jsonl.zst", "d.parquet", "e.arrow"])
def test_bad_lines_are_skipped_up_to_the_limit(tmp_path, capsys, name):
    (tmp_path / name).write_bytes(FILE_FORMATS[name]([*DOCUMENTS[:60], None, *DOCUMENTS[60:], None]))
    source = {"config.source": str(tmp_path / name)}
    assert re.search("'text' is (not a string: null|null)", get_error_line(tmp_path / "strict", **source))
    found = get_error_line(tmp_path / "run", **source, **{"config.skip_bad": 1})
    assert "skip_bad allows 1" in found
    make_tokenise_job(tmp_path / "run", **source, **{"config.skip_bad": 2})()
    assert decode_corpus(tmp_path / "run/corpus") == DOCUMENTS
    assert "skipped 2 lines without text, the first is" in capsys.readouterr().out


@pytest.mark.daily(2)
@pytest.mark.parametrize("name", list(FILE_FORMATS))
def test_a_wrong_field_is_rejected_before_the_claim(tmp_path, name):
    (tmp_path / name).write_bytes(FILE_FORMATS[name](DOCUMENTS))
    changes = {"config.source": str(tmp_path / name), "config.tokenizer": {"kind": "bpe", "vocabulary_size": 290}}
    get_error_line(tmp_path / "run", **changes, **{"config.field": "content"})
    assert not list((tmp_path / "run").glob("*"))
    make_tokenise_job(tmp_path / "run", **changes)()
    assert decode_corpus(tmp_path / "run/corpus") == DOCUMENTS


def test_a_directory_without_pieces_accepts_a_corrected_spec(tmp_path):
    """Check with a second file without the field, which only the training finds, after the claim of the directory."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.jsonl").write_bytes(b"".join(b'{"text": "x", "body": "%d"}\n' % i for i in range(99)))
    (tmp_path / "in/b.jsonl").write_bytes(b'{"body": "y"}\n')
    bpe = {"kind": "bpe", "vocabulary_size": 290}
    wrong = {"config.source": str(tmp_path / "in/*"), "config.tokenizer": bpe, "config.deduplicate": True}
    assert "has no 'text'" in get_error_line(tmp_path / "run", **wrong)
    assert (tmp_path / "run/job.json").exists()
    right = wrong | {"config.field": "body", "config.tokenizer": bpe | {"vocabulary_size": 280}}
    make_tokenise_job(tmp_path / "run", **right)()
    assert read_index(tmp_path / "run/corpus").vocabulary_size <= 280
    assert decode_corpus(tmp_path / "run/corpus") == [*map(str, range(99)), "y"]
    with pytest.raises(InvalidError, match="another trajectory"):
        make_tokenise_job(tmp_path / "run", **wrong)()


def test_a_directory_with_pieces_rejects_another_spec(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(tokenise_inputs.make_jsonl(DOCUMENTS) + b"{}\n")
    changes = {"config.source": str(tmp_path / "a.jsonl"), "config.shard_bytes": 300}
    assert "has no 'text'" in get_error_line(tmp_path / "run", **changes)
    assert list((tmp_path / "run/corpus").glob("0*.json"))
    assert "another trajectory" in list_error_lines(tmp_path / "run", **changes, **{"config.separator": 0})


def list_error_lines(directory: Path, **changes: Any) -> str:
    """Return the error lines of a rejected job."""
    with pytest.raises(InvalidError) as caught:
        make_tokenise_job(directory, **changes)()
    return str(caught.value)


def test_a_line_without_the_field_suggests_skipping(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(tokenise_inputs.make_jsonl(DOCUMENTS) + b'{"name": 1}\n')
    found = get_error_line(tmp_path / "run", **{"config.source": str(tmp_path / "a.jsonl")})
    assert "a.jsonl:122: has no 'text'" in found
    assert "set skip_bad" in found


def test_an_unreadable_file_is_reported_before_anything_is_written(tmp_path, monkeypatch):
    """Check with a patched `os.access`, since root may read every file."""
    source = write_text_files(tmp_path / "in", DOCUMENTS[:3])
    monkeypatch.setattr(os, "access", lambda name, _: not name.endswith("00002.txt"))
    assert "cannot read" in get_error_line(tmp_path / "run", **{"config.source": source})
    assert not (tmp_path / "run").exists()


def test_a_file_that_changes_during_the_job_ends_it(tmp_path):
    write_text_files(tmp_path / "in", DOCUMENTS)
    job = make_tokenise_job(tmp_path / "run", **{"config.source": str(tmp_path / "in/*.txt")})
    assert len(job.files) == len(DOCUMENTS)
    (tmp_path / "in/00100.txt").write_text("other")
    with pytest.raises(DataError, match=r"00100\.txt has changed since the job started"):
        job()


def test_the_job_reports_its_progress():
    tally = Tally(40, 10)
    tally.add(
        FinishedPiece(
            "", (CorpusShard("a", 700, 7, 3, "", "", ""), CorpusShard("b", 300, 3, 3, "", "", "")), 1, "here:1", 0
        )
    )
    began = time.monotonic()
    assert tally.format_progress(tally.counts, began + 1) is None
    line = tally.format_progress([5, 100, 10_000, 0], began + 20)
    assert re.fullmatch(
        r"15 of 40 pieces; this attempt 100 documents, 10,000 tokens, (499|500) tokens/s, 100 s left", line
    ), line
    assert tally.format_progress(tally.counts, began + 21) is None


@pytest.mark.parametrize(("seconds", "words"), [(100, "100 s"), (1200, "20 min"), (9000, "2.5 h")])
def test_the_remaining_time_has_a_suitable_unit(seconds, words):
    tally = Tally(2)
    tally.add(FinishedPiece("", (), 0, "", 0))
    assert tally.format_progress(tally.counts, time.monotonic() + seconds).endswith(f"{words} left")


def test_bad_lines_are_counted_over_pieces(tmp_path):
    for name in "abcdef":
        (tmp_path / f"{name}.jsonl").write_bytes(tokenise_inputs.make_jsonl([*DOCUMENTS[:60], None]))
    source = {"config.source": str(tmp_path / "*.jsonl"), "config.skip_bad": 2}
    found = get_error_line(tmp_path / "run", **source)
    assert "a.jsonl:61" in found
    assert "3 bad lines so far, skip_bad allows 2" in found
    num_pieces = len(make_tokenise_job(tmp_path / "run", **source).pieces)
    assert len(list((tmp_path / "run/corpus").glob("[0-9]*.json"))) < num_pieces


def test_a_lone_surrogate_in_json_becomes_a_question_mark(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a\\ud800b"}\n')
    make_tokenise_job(tmp_path / "run", **{"config.source": str(tmp_path / "a.jsonl")})()
    assert decode_corpus(tmp_path / "run/corpus") == ["a?b"]


def test_text_that_is_not_utf8_keeps_its_bytes(tmp_path):
    (tmp_path / "a.txt").write_bytes(bytes(range(256)))
    make_tokenise_job(tmp_path / "run", **{"config.source": str(tmp_path / "a.txt")})()
    (ids,) = read_corpus(tmp_path / "run/corpus")
    assert np.array_equal(ids, np.arange(256))


@pytest.mark.soak
@pytest.mark.parametrize("name", BACKENDS)
def test_a_job_from_cloud_to_cloud_survives_failing_requests(tmp_path, monkeypatch, name):
    """Check with input, tokenizer, output and run in a bucket that answers 30% of requests with 503."""
    with start_backend(name) as backend:
        route_stores_to(monkeypatch, backend)
        open_store.cache_clear()
        top = f"tokenise-{tmp_path.name}"
        for i, own in enumerate("abc"):
            backend.write(f"{top}/in/{own}.jsonl.zst", FILE_FORMATS["c.jsonl.zst"](DOCUMENTS[i * 40 : i * 40 + 40]))
        backend.write(f"{top}/t.json", tokenise_inputs.make_hf_tokenizer())
        tokenizer = {"kind": "hf", "file": backend.url(f"{top}/t.json")}
        changes = {"config.source": backend.url(f"{top}/in/*.zst"), "config.tokenizer": tokenizer}
        backend.proxy.faults = Faults(error_rate=0.3, error_statuses=(503,))
        job = make_tokenise_job(backend.url(f"{top}/run"), **changes)
        with pytest.raises(RuntimeError, match="crash"):
            job(stop=CrashNotice(job, 500))
        make_tokenise_job(backend.url(f"{top}/run"), **changes)()
        assert backend.proxy.fired["error"]
        (tmp_path / "corpus").mkdir()
        for file in backend.names(f"{top}/run/corpus/"):
            (tmp_path / "corpus" / file.rpartition("/")[2]).write_bytes(backend.read(file))
    open_store.cache_clear()
    assert decode_corpus(tmp_path / "corpus") == DOCUMENTS[:120]
