"""Subword tokenizers from files: ids equal those of their libraries, text round-trips, damaged files are rejected."""

import base64
import hashlib
from typing import Any

import pytest
import sentencepiece
import tiktoken
import tokenizers

from runner.data.tokenizers import TOKENIZER_FILES, TiktokenTokenizer, load_tokenizer, make_tokenizer
from runner.errors import DataError, InvalidError
from runner.spec.imports import import_extra
from runner.storage import LocalStore
from tests.support.tokenise_inputs import (
    DOCUMENTS,
    GPT2_PATTERN,
    SEPARATOR,
    make_hf_tokenizer,
    make_sentencepiece_model,
    make_tiktoken_ranks,
)

TEXTS = [*DOCUMENTS, "", " ", f"a {SEPARATOR} b", "\0\x7f\r\n", "é" * 100]
CONTENTS = {
    "hf": make_hf_tokenizer(),
    "sentencepiece": make_sentencepiece_model(),
    "tiktoken": make_tiktoken_ranks(),
    "bytes": None,
}
OPTIONS: dict[str, dict[str, Any]] = {"tiktoken": {"pattern": GPT2_PATTERN, "special_tokens": {SEPARATOR: 258}}}


def make_record(kind: str) -> dict[str, Any]:
    """Return the tokenizer's record in a corpus index."""
    content = CONTENTS[kind]
    if content is None:
        return {"kind": kind, "vocabulary_size": 256}
    return {
        "kind": kind,
        "file": TOKENIZER_FILES[kind],
        "sha256": hashlib.sha256(content).hexdigest(),
        **OPTIONS.get(kind, {}),
    }


def encode_with_library(kind: str, text: str) -> list[int]:
    """Encode one text with the tokenizer's own library."""
    content = CONTENTS[kind]
    if content is None:
        return list(text.encode())
    if kind == "hf":
        library = tokenizers.Tokenizer.from_str(content.decode())
        library.no_truncation()
        library.no_padding()
        return list(library.encode(text, add_special_tokens=False).ids)
    if kind == "sentencepiece":
        return list(sentencepiece.SentencePieceProcessor(model_proto=content).encode(text))
    ranks = {base64.b64decode(line.split()[0]): int(line.split()[1]) for line in content.splitlines()}
    encoding = tiktoken.Encoding("x", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={SEPARATOR: 258})
    return encoding.encode_ordinary(text)


@pytest.mark.parametrize("kind", CONTENTS)
def test_ids_equal_those_of_the_library(kind):
    tokenizer = make_tokenizer(make_record(kind), CONTENTS[kind])
    found = tokenizer.encode_batch([text.encode() for text in TEXTS])
    assert [ids.tolist() for ids in found] == [encode_with_library(kind, text) for text in TEXTS]
    assert all(ids.dtype == tokenizer.dtype == "<u2" for ids in found)
    assert max(ids.max() for ids in found if len(ids)) < tokenizer.vocabulary_size
    assert tokenizer.encode(TEXTS[3]).tolist() == tokenizer.encode_file(TEXTS[3].encode()).tolist() == found[3].tolist()
    if kind != "sentencepiece":
        assert [tokenizer.decode(ids) for ids in found] == TEXTS


@pytest.mark.parametrize("kind", CONTENTS)
def test_a_tokenizer_is_loaded_by_its_index_record(tmp_path, kind):
    content, record = CONTENTS[kind], make_record(kind)
    store = LocalStore(tmp_path)
    if content is not None:
        with pytest.raises(DataError, match="is missing"):
            load_tokenizer(record, store)
        store.write(record["file"], content[:-1])
        with pytest.raises(DataError, match="is not the file that the corpus was tokenised with"):
            load_tokenizer(record, store)
        store.write(record["file"], content)
    assert load_tokenizer(record, store).encode("the end").tolist() == encode_with_library(kind, "the end")


@pytest.mark.parametrize("kind", TOKENIZER_FILES)
@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", b"YQ== x", b"YQ== 1 2"])
def test_a_file_of_another_kind_is_rejected(kind, content):
    with pytest.raises(DataError, match=r"is not a |holds no ranks|line 1"):
        make_tokenizer(make_record(kind), content)


@pytest.mark.parametrize(
    ("content", "special", "message"),
    [
        (make_tiktoken_ranks().partition(b"\n")[2], {}, "1 of the 256 bytes have none, as 0x00"),
        (make_tiktoken_ranks() + b"dGhlbg== 7\n", {}, "two tokens have the same"),
        (make_tiktoken_ranks(), {SEPARATOR: 257}, "has a token of id 257 already"),
        (make_tiktoken_ranks(), {SEPARATOR: 258, "x": 258}, "has a token of id 258 already"),
    ],
)
def test_inconsistent_ranks_are_rejected(content, special, message):
    with pytest.raises(DataError, match=message):
        TiktokenTokenizer(content, GPT2_PATTERN, special)


def test_an_invalid_pattern_is_rejected():
    with pytest.raises(DataError, match="does not fit its pattern"):
        TiktokenTokenizer(make_tiktoken_ranks(), "(", {})


def test_an_unknown_kind_is_rejected_with_the_available_kinds():
    with pytest.raises(DataError, match="choose from bytes, hf, sentencepiece, tiktoken"):
        make_tokenizer({"kind": "words"}, b"")


def test_a_missing_package_is_reported_with_its_install_command():
    with pytest.raises(InvalidError, match=r"needs the package not_there; .* pip install -e \.$"):
        import_extra("not_there")
