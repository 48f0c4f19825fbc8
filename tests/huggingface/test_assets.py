"""Assets of exports: tokenizer, special tokens and context from the run's data and its initial weights."""

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from runner.cli.app import run_command
from runner.config import DataConfig
from runner.data.tokenizers import ByteTokenizer, CharacterTokenizer
from runner.errors import DataError, InvalidError
from runner.huggingface.assets import (
    ExportAssets,
    TokenizerFiles,
    find_assets,
    make_tokenizer_files,
    read_assets,
    replace_tokenizer,
    save_assets,
)
from runner.spec import InitFromConfig
from runner.storage import LocalStore
from tests.data.buckets import write_corpus
from tests.support.tiny_jobs import TEXT as TRAINING_TEXT
from tests.support.tiny_jobs import make_gpt
from tests.support.tokenise_inputs import SEPARATOR, make_hf_tokenizer, make_tiktoken_ranks

TEXT = "héllo\n wörld\r\n\tthe 日本 \x00\x7f é 12 's\u00ad<|end|>" + "".join(map(chr, range(0x80, 0x180)))


def config(source: Path, **changes: Any) -> DataConfig:
    return DataConfig.model_validate({"source": str(source), "sequence_length": 16, **changes})


def open_record(found: TokenizerFiles) -> tokenizers.Tokenizer:
    assert found.problem is None
    assert json.loads(found.files["tokenizer_config.json"])["model_max_length"] == 16
    return tokenizers.Tokenizer.from_str(found.files["tokenizer.json"].decode())


def make_corpus_record(
    directory: Path, record: Mapping[str, Any], size: int, separator: int | None = None, begin: int | None = None
) -> Path:
    def of(index: Any) -> Any:
        return dataclasses.replace(index, tokenizer=dict(record), separator=separator, begin=begin)

    return write_corpus(directory, [[[1, 2, 3]]], vocabulary_size=size, change=of)


def make_tokenizer_record(directory: Path, kind: str, content: bytes, name: str) -> Mapping[str, Any]:
    directory.mkdir()
    (directory / name).write_bytes(content)
    return {"kind": kind, "file": name, "sha256": hashlib.sha256(content).hexdigest()}


@pytest.mark.parametrize("kind", ["bytes", "characters"])
def test_text_has_the_same_ids_and_round_trips(tmp_path: Path, kind: str):
    (tmp_path / "text.txt").write_bytes(TEXT.encode())
    found = make_tokenizer_files(config(tmp_path / "text.txt", tokenizer=kind))
    ours = ByteTokenizer() if kind == "bytes" else CharacterTokenizer("".join(sorted(set(TEXT))))
    ids = open_record(found).encode(TEXT).ids
    assert ids == ours.encode(TEXT).tolist()
    assert open_record(found).decode(ids) == TEXT
    assert found.vocabulary_size == ours.vocabulary_size
    if kind == "characters":
        with pytest.raises(Exception, match="UNK"):
            open_record(found).encode("\u4e00")


def test_every_byte_is_its_own_id(tmp_path: Path):
    found = make_tokenizer_files(config(make_corpus_record(tmp_path / "corpus", {"kind": "bytes"}, 256, 10)))
    assert found.end == 10
    text = bytes(np.arange(128, dtype=np.uint8)).decode()
    assert open_record(found).encode(text).ids == list(range(128))
    assert open_record(found).get_vocab().keys() == {*tokenizers.pre_tokenizers.ByteLevel.alphabet()}


def test_a_corpus_exports_its_own_tokenizer(tmp_path: Path):
    content = make_hf_tokenizer()
    record = make_tokenizer_record(tmp_path / "corpus", "hf", content, "tokenizer.json")
    end = tokenizers.Tokenizer.from_str(content.decode()).token_to_id(SEPARATOR)
    found = make_tokenizer_files(config(make_corpus_record(tmp_path / "corpus", record, 400, end)))
    assert found.files["tokenizer.json"] == content
    assert json.loads(found.files["tokenizer_config.json"])["eos_token"] == SEPARATOR
    assert (found.vocabulary_size, found.end) == (400, end)
    (tmp_path / "corpus" / "tokenizer.json").write_bytes(content + b" ")
    with pytest.raises(DataError, match="is not the file that the corpus was tokenised with"):
        make_tokenizer_files(config(tmp_path / "corpus"))


def test_a_missing_tokenizer_has_a_reason(tmp_path: Path):
    record = make_tokenizer_record(tmp_path / "ranks", "tiktoken", make_tiktoken_ranks(), "tokenizer.tiktoken")
    found = make_tokenizer_files(config(make_corpus_record(tmp_path / "ranks", record, 258)))
    assert (list(found.files), found.vocabulary_size) == (["tokenizer.tiktoken"], 258)
    assert found.problem is not None
    assert found.problem.startswith("the tokenizer is of tiktoken: its file is copied")
    np.arange(100, dtype="<u2").tofile(tmp_path / "ids.bin")
    found = make_tokenizer_files(config(tmp_path / "ids.bin"))
    assert (found.files, found.problem) == (
        {},
        f"data.source={tmp_path / 'ids.bin'} holds ids, and it is unknown which tokenizer made them",
    )


# Assets of published weights that a run starts from, combined with those of its data.

HF_TOKENIZER = make_hf_tokenizer()
WORDS = tokenizers.Tokenizer.from_str(HF_TOKENIZER.decode()).get_vocab()
END, TURN = WORDS[SEPARATOR], WORDS["<|pad|>"]  # the second special token represents the end of a turn
BEGIN_TEXT = min(set(WORDS) - {SEPARATOR, "<|pad|>", "b"})  # any other token
BEGIN = WORDS[BEGIN_TEXT]
BASE_CONFIG = {"model_type": "llama", "max_position_embeddings": 8192, "bos_token_id": 5, "eos_token_id": 6}
TEMPLATE = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"


# The corpus was rendered with another `eos_token` than the end-of-turn token, which becomes that of the export.
PINNED = f'{{% set eos_token = "{SEPARATOR}" %}}\n{TEMPLATE}'


def write_base(directory: Path, tokenizer: bytes | None = HF_TOKENIZER) -> Path:
    directory.mkdir()
    files = {
        "config.json": json.dumps(BASE_CONFIG).encode(),
        "generation_config.json": json.dumps({"eos_token_id": [6, 7], "temperature": 0.6}).encode(),
        "tokenizer_config.json": json.dumps({"bos_token": "b", "model_max_length": 8192}).encode(),
        "chat_template.jinja": b"the template of the base",
        "merges.txt": b"#version",
        "pytorch_model.bin": b"never read",
    }
    for name, content in files.items() | ({"tokenizer.json": tokenizer}.items() if tokenizer else set()):
        (directory / name).write_bytes(content)
    return directory


def write_data(directory: Path, kind: str) -> Path:
    if kind == "token ids":
        np.arange(100, dtype="<u2").tofile(directory / "ids.bin")
        return directory / "ids.bin"
    begin = BEGIN if "begin" in kind else None
    if "bytes" in kind:
        return make_corpus_record(directory / "corpus", {"kind": "bytes"}, 256, begin=begin)
    content = HF_TOKENIZER if "same" in kind else HF_TOKENIZER.replace(b"<|pad|>", b"<|PAD|>")
    record = make_tokenizer_record(directory / "corpus", "hf", content, "tokenizer.json")
    if "chat" in kind:
        settings = {"chat_template": TEMPLATE, "eos_token": SEPARATOR, "end_of_turn_token": "<|pad|>"}
        (directory / "corpus" / "tokenizer_config.json").write_text(json.dumps(settings))
    return make_corpus_record(directory / "corpus", record, 400, END, begin=begin)


# Data -> (ids of special tokens, whether the files of the base are exported, chat template).
BASE_TEMPLATE = "the template of the base"
EXPECTED: dict[str, tuple[dict[str, Any], bool, str | None]] = {
    "token ids": ({"bos_token_id": 5, "eos_token_id": [6, 7], "pad_token_id": 6}, True, BASE_TEMPLATE),
    "bytes": ({"pad_token_id": 0}, False, None),
    "the same tokenizer": ({"bos_token_id": 5, "eos_token_id": [6, 7, END], "pad_token_id": 6}, True, BASE_TEMPLATE),
    "the same tokenizer, chat": (
        {"bos_token_id": 5, "eos_token_id": [TURN, 6, 7, END], "pad_token_id": TURN},
        True,
        PINNED,
    ),
    "the same tokenizer, begin": (
        {"bos_token_id": BEGIN, "eos_token_id": [6, 7, END], "pad_token_id": 6},
        True,
        BASE_TEMPLATE,
    ),
    "bytes, begin": ({"bos_token_id": BEGIN, "pad_token_id": 0}, False, None),
    "another tokenizer, begin": ({"bos_token_id": BEGIN, "eos_token_id": END, "pad_token_id": END}, False, None),
    "another tokenizer": ({"eos_token_id": END, "pad_token_id": END}, False, None),
}


def get_template(assets: ExportAssets) -> str | None:
    files = assets.tokenizer.files
    if "chat_template.jinja" in files:
        return files["chat_template.jinja"].decode()
    return json.loads(files["tokenizer_config.json"]).get("chat_template")


@pytest.mark.parametrize("kind", EXPECTED)
def test_assets_combine_the_data_and_the_base(tmp_path: Path, kind: str):
    base, data = write_base(tmp_path / "base"), write_data(tmp_path, kind)
    found = find_assets(config(data), InitFromConfig(path=str(base)))
    ids, has_base_files, template = EXPECTED[kind]
    assert found.list_ids() == ids
    assert ("merges.txt" in found.tokenizer.files) is has_base_files
    assert "pytorch_model.bin" not in found.tokenizer.files
    assert get_template(found) == template
    assert found.config == BASE_CONFIG
    if "tokenizer, begin" in kind:
        assert json.loads(found.tokenizer.files["tokenizer_config.json"])["bos_token"] == BEGIN_TEXT

    # The record restores the same assets after the sources are deleted.
    save_assets(LocalStore(tmp_path / "run"), found)
    assert read_assets(LocalStore(tmp_path / "run")) == found
    # A run that starts from this run inherits them.
    (tmp_path / "next.bin").write_bytes(bytes(200))
    following = find_assets(config(tmp_path / "next.bin"), InitFromConfig(path=str(tmp_path / "run")))
    assert following.list_ids() == ids
    assert following.tokenizer.files == found.tokenizer.files


def test_a_corpus_of_dialogues_alone_has_its_template(tmp_path: Path):
    found = find_assets(config(write_data(tmp_path, "the same tokenizer, chat")), None)
    settings = json.loads(found.tokenizer.files["tokenizer_config.json"])
    assert (settings["chat_template"], settings["eos_token"]) == (PINNED, "<|pad|>")
    assert found.list_ids() == {"eos_token_id": [TURN, END], "pad_token_id": TURN}


DAMAGES = {
    "other bytes": lambda run: (run / "assets" / "tokenizer.json").write_bytes(b"{}"),
    "a missing file": lambda run: (run / "assets" / "merges.txt").unlink(),
    "half a record": lambda run: (run / "assets" / "assets.json").write_bytes(b'{"format": 1'),
    "a path": lambda run: (run / "assets" / "assets.json").write_text(
        (run / "assets" / "assets.json").read_text().replace("merges.txt", "../../secret")
    ),
    "a newer format": lambda run: (run / "assets" / "assets.json").write_text(
        (run / "assets" / "assets.json").read_text().replace('"format": 1', '"format": 2')
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_assets_are_rejected(tmp_path: Path, damage: str):
    base, data = write_base(tmp_path / "base"), write_data(tmp_path, "token ids")
    save_assets(LocalStore(tmp_path / "run"), find_assets(config(data), InitFromConfig(path=str(base))))
    DAMAGES[damage](tmp_path / "run")
    with pytest.raises(InvalidError, match=r"assets.json is damaged|cannot be read"):
        read_assets(LocalStore(tmp_path / "run"))


def test_another_tokenizer_can_be_given(tmp_path: Path):
    given = replace_tokenizer(ExportAssets(TokenizerFiles(problem="none")), str(write_base(tmp_path / "base")))
    assert given.list_ids() == {"bos_token_id": WORDS["b"], "eos_token_id": [6, 7], "pad_token_id": 6}
    assert given.tokenizer.files["tokenizer.json"] == HF_TOKENIZER
    with pytest.raises(InvalidError, match="--tokenizer"):
        replace_tokenizer(given, str(write_base(tmp_path / "none", tokenizer=b"not json")))


@pytest.mark.soak
def test_a_run_exports_the_assets_of_its_base(tmp_path: Path):
    text = tmp_path / "text.txt"
    text.write_text(TRAINING_TEXT)
    first = make_gpt(tmp_path / "first", **{"config.train.total_steps": 4})
    first()
    base = tmp_path / "base"
    assert run_command(["export", str(first.store.root), "-o", str(base)]) == 0
    (base / "chat_template.jinja").write_text(TEMPLATE)
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": 3, "top_p": 0.9}))
    ids = np.frombuffer(TRAINING_TEXT.encode(), np.uint8).astype("<u2")
    ids[-1] = first.vocabulary_size - 1  # the model has the vocabulary size of the base
    ids.tofile(tmp_path / "ids.bin")
    second = make_gpt(
        tmp_path / "second",
        **{
            "config.train.total_steps": 4,
            "config.data.source": str(tmp_path / "ids.bin"),
            "checkpoint.init_from": str(base),
        },
    )
    second()
    (tmp_path / "ids.bin").unlink()
    shutil.rmtree(base)
    assert run_command(["export", str(second.store.root), "-o", str(tmp_path / "out")]) == 0
    out = tmp_path / "out"
    assert (out / "chat_template.jinja").read_text() == TEMPLATE
    assert json.loads((out / "generation_config.json").read_text()) == {
        **{"_from_model_config": True, "eos_token_id": 3, "top_p": 0.9, "pad_token_id": 0},
    }
    assert (out / "tokenizer.json").read_bytes() == (second.store.root / "assets" / "tokenizer.json").read_bytes()
