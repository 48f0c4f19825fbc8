"""Exported tokenizers give the ids that the run was trained on."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from runner.config import DataConfig
from runner.data.tokenizers import ByteTokenizer, CharacterTokenizer
from runner.errors import DataError
from runner.huggingface.export import TokenizerFiles, make_tokenizer_files
from tests.data.buckets import write_corpus
from tests.support.inputs import SEPARATOR, make_hf, make_ranks

TEXT = "héllo\n wörld\r\n\tthe 日本 \x00\x7f é 12 's\u00ad<|end|>" + "".join(map(chr, range(0x80, 0x180)))


def config(source: Path, **changes: Any) -> DataConfig:
    return DataConfig.model_validate({"source": str(source), "sequence_length": 16, **changes})


def opened(found: TokenizerFiles) -> tokenizers.Tokenizer:
    assert found.problem is None
    assert json.loads(found.files["tokenizer_config.json"])["model_max_length"] == 16
    return tokenizers.Tokenizer.from_str(found.files["tokenizer.json"].decode())


def corpus(directory: Path, record: Mapping[str, Any], size: int, separator: int | None = None) -> Path:
    def of(index: Any) -> Any:
        return dataclasses.replace(index, tokenizer=dict(record), separator=separator)

    return write_corpus(directory, [[[1, 2, 3]]], vocabulary_size=size, change=of)


def with_file(directory: Path, kind: str, content: bytes, name: str) -> Mapping[str, Any]:
    directory.mkdir()
    (directory / name).write_bytes(content)
    return {"kind": kind, "file": name, "sha256": hashlib.sha256(content).hexdigest()}


@pytest.mark.parametrize("kind", ["bytes", "characters"])
def test_text_has_the_same_ids_and_round_trips(tmp_path: Path, kind: str):
    (tmp_path / "text.txt").write_bytes(TEXT.encode())
    found = make_tokenizer_files(config(tmp_path / "text.txt", tokenizer=kind))
    ours = ByteTokenizer() if kind == "bytes" else CharacterTokenizer("".join(sorted(set(TEXT))))
    ids = opened(found).encode(TEXT).ids
    assert ids == ours.encode(TEXT).tolist()
    assert opened(found).decode(ids) == TEXT
    assert found.vocabulary_size == ours.vocabulary_size
    if kind == "characters":
        with pytest.raises(Exception, match="UNK"):
            opened(found).encode("\u4e00")


def test_every_byte_is_its_own_id(tmp_path: Path):
    found = make_tokenizer_files(config(corpus(tmp_path / "corpus", {"kind": "bytes"}, 256, 10)))
    assert found.end == 10
    text = bytes(np.arange(128, dtype=np.uint8)).decode()
    assert opened(found).encode(text).ids == list(range(128))
    assert opened(found).get_vocab().keys() == {*tokenizers.pre_tokenizers.ByteLevel.alphabet()}


def test_a_corpus_exports_its_own_tokenizer(tmp_path: Path):
    content = make_hf()
    record = with_file(tmp_path / "corpus", "hf", content, "tokenizer.json")
    end = tokenizers.Tokenizer.from_str(content.decode()).token_to_id(SEPARATOR)
    found = make_tokenizer_files(config(corpus(tmp_path / "corpus", record, 400, end)))
    assert found.files["tokenizer.json"] == content
    assert json.loads(found.files["tokenizer_config.json"])["eos_token"] == SEPARATOR
    assert (found.vocabulary_size, found.end) == (400, end)
    (tmp_path / "corpus" / "tokenizer.json").write_bytes(content + b" ")
    with pytest.raises(DataError, match="is not the file that the corpus was tokenised with"):
        make_tokenizer_files(config(tmp_path / "corpus"))


def test_a_missing_tokenizer_has_a_reason(tmp_path: Path):
    record = with_file(tmp_path / "ranks", "tiktoken", make_ranks(), "tokenizer.tiktoken")
    found = make_tokenizer_files(config(corpus(tmp_path / "ranks", record, 258)))
    assert (list(found.files), found.vocabulary_size) == (["tokenizer.tiktoken"], 258)
    assert found.problem is not None
    assert found.problem.startswith("the tokenizer is of tiktoken: its file is copied")
    np.arange(100, dtype="<u2").tofile(tmp_path / "ids.bin")
    found = make_tokenizer_files(config(tmp_path / "ids.bin"))
    assert (found.files, found.problem) == (
        {},
        f"data.source={tmp_path / 'ids.bin'} holds ids, and it is unknown which tokenizer made them",
    )
