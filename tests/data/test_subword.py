"""Tokenizers of files: the ids of their own libraries, the text back, and what a damaged file is told to be."""

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
MORE: dict[str, dict[str, Any]] = {"tiktoken": {"pattern": GPT2_PATTERN, "special_tokens": {SEPARATOR: 258}}}


def record_of(kind: str) -> dict[str, Any]:
    """Return the tokenizer's record in the index of a corpus."""
    content = CONTENTS[kind]
    if content is None:
        return {"kind": kind, "vocabulary_size": 256}
    return {
        "kind": kind,
        "file": TOKENIZER_FILES[kind],
        "sha256": hashlib.sha256(content).hexdigest(),
        **MORE.get(kind, {}),
    }


def ids_of_library(kind: str, text: str) -> list[int]:
    """Return the ids that the library gives for one text."""
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
def test_ids_are_the_librarys_and_all_are_in_the_vocabulary(kind):
    tokenizer = make_tokenizer(record_of(kind), CONTENTS[kind])
    found = tokenizer.encode_batch([text.encode() for text in TEXTS])
    assert [ids.tolist() for ids in found] == [ids_of_library(kind, text) for text in TEXTS]
    assert all(ids.dtype == tokenizer.dtype == "<u2" for ids in found)
    assert max(ids.max() for ids in found if len(ids)) < tokenizer.vocabulary_size
    assert tokenizer.encode(TEXTS[3]).tolist() == tokenizer.encode_file(TEXTS[3].encode()).tolist() == found[3].tolist()
    if kind != "sentencepiece":
        assert [tokenizer.decode(ids) for ids in found] == TEXTS


@pytest.mark.parametrize("kind", CONTENTS)
def test_it_is_loaded_by_the_record_of_an_index(tmp_path, kind):
    content, record = CONTENTS[kind], record_of(kind)
    store = LocalStore(tmp_path)
    if content is not None:
        with pytest.raises(DataError, match="is missing"):
            load_tokenizer(record, store)
        store.write(record["file"], content[:-1])
        with pytest.raises(DataError, match="is not the file that the corpus was tokenised with"):
            load_tokenizer(record, store)
        store.write(record["file"], content)
    assert load_tokenizer(record, store).encode("the end").tolist() == ids_of_library(kind, "the end")


@pytest.mark.parametrize("kind", TOKENIZER_FILES)
@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", b"YQ== x", b"YQ== 1 2"])
def test_a_file_of_another_kind_is_refused(kind, content):
    with pytest.raises(DataError, match=r"is not a |holds no ranks|line 1"):
        make_tokenizer(record_of(kind), content)


@pytest.mark.parametrize(
    ("content", "special", "message"),
    [
        (make_tiktoken_ranks().partition(b"\n")[2], {}, "1 of the 256 bytes have none, as 0x00"),
        (make_tiktoken_ranks() + b"dGhlbg== 7\n", {}, "two tokens have the same"),
        (make_tiktoken_ranks(), {SEPARATOR: 257}, "has a token of id 257 already"),
        (make_tiktoken_ranks(), {SEPARATOR: 258, "x": 258}, "has a token of id 258 already"),
    ],
)
def test_ranks_with_which_the_library_would_panic_or_mix_tokens_up_are_refused(content, special, message):
    with pytest.raises(DataError, match=message):
        TiktokenTokenizer(content, GPT2_PATTERN, special)


def test_a_pattern_that_is_none_is_refused():
    with pytest.raises(DataError, match="does not fit its pattern"):
        TiktokenTokenizer(make_tiktoken_ranks(), "(", {})


def test_an_unknown_kind_is_refused_with_a_list_of_kinds():
    with pytest.raises(DataError, match="choose from bytes, hf, sentencepiece, tiktoken"):
        make_tokenizer({"kind": "words"}, b"")


def test_a_package_that_is_missing_is_named_with_how_to_install_it():
    with pytest.raises(InvalidError, match=r"needs the package not_there; .* pip install -e \.$"):
        import_extra("not_there")
