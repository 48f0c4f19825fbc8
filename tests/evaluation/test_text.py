"""Tokens of a run as text: every tokenizer, whole characters while streaming, and the reason for no tokenizer."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest

from runner.config import DataConfig
from runner.data import ByteTokenizer, CharacterTokenizer
from runner.data.tokenizers import TOKENIZER_FILES, make_tokenizer
from runner.errors import DataError
from runner.evaluation.generation import (
    encode_prompt,
    find_start_token,
    load_data_codec,
    load_source_codec,
    parse_ids,
    stream_text,
)
from tests.data.buckets import write_corpus
from tests.data.datasets import write_bin
from tests.support.tokenise_inputs import (
    GPT2_PATTERN,
    SEPARATOR,
    make_hf_tokenizer,
    make_sentencepiece_model,
    make_tiktoken_ranks,
)

TEXT = "naïve, 数字 🙂🙃 the end. é"
TIKTOKEN = {"pattern": GPT2_PATTERN, "special_tokens": {SEPARATOR: 258}}
FILE = {
    "hf": (make_hf_tokenizer(), {}),
    "sentencepiece": (make_sentencepiece_model(), {}),
    "tiktoken": (make_tiktoken_ranks(), TIKTOKEN),
}


def make_record(kind):
    """Return a tokenizer's record in a corpus index, and the content of its file."""
    content, more = FILE[kind]
    return {"kind": kind, "file": TOKENIZER_FILES[kind], "sha256": hashlib.sha256(content).hexdigest(), **more}, content


TOKENIZERS = {
    "bytes": ByteTokenizer(),
    "characters": CharacterTokenizer("".join(sorted(set(TEXT)))),
    **{kind: make_tokenizer(*make_record(kind)) for kind in FILE},
}


@pytest.mark.parametrize("num_prompt", [1, 4, 9])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_streamed_pieces_are_whole_characters_and_form_the_text(name, num_prompt):
    tokenizer = TOKENIZERS[name]
    text = TEXT if name != "sentencepiece" else "Document 7: the number 49"
    ids = tokenizer.encode(text).tolist()
    while tokenizer.decode(ids[:num_prompt]).endswith("\ufffd"):
        num_prompt += 1
    prompt, tokens = ids[:num_prompt], ids[num_prompt:]
    pieces = list(stream_text(iter(tokens), prompt, tokenizer.decode))
    assert "".join(pieces) == tokenizer.decode(ids)[len(tokenizer.decode(prompt)) :]
    assert not any("\ufffd" in piece for piece in pieces)
    assert len([piece for piece in pieces if piece]) > len(tokens) / 5


def test_a_character_is_emitted_with_its_last_token():
    euro = list("a€".encode())
    seen = []

    def tokens():
        for token in [*euro, *euro[1:3]]:
            seen.append(token)
            yield token

    found = [(piece, len(seen)) for piece in stream_text(tokens(), [10], ByteTokenizer().decode)]
    assert found == [("a", 1), ("€", 4), ("\ufffd", 6)]


def test_invalid_bytes_are_decoded_as_in_the_whole_text():
    ids = [0xFF, 0xFF, 0xE2, 0x82, 0x41, 0xC3, 0xA9, 0x80]
    assert "".join(stream_text(ids, [], ByteTokenizer().decode)) == bytes(ids).decode(errors="replace")


@pytest.fixture
def sources(tmp_path):
    """Return a source of each kind, by name."""
    (tmp_path / "a.txt").write_text(TEXT)
    write_bin(tmp_path / "ids.bin", np.arange(100))
    found = {"text": tmp_path / "a.txt", "ids": tmp_path / "ids.bin", "class": "tests.inference.test_text:Nothing"}
    for kind in ("bytes", *FILE):
        record, content = make_record(kind) if kind in FILE else ({"kind": "bytes", "vocabulary_size": 256}, None)
        made = lambda index, record=record: replace(index, tokenizer=record, separator=7)  # noqa: E731
        write_corpus(tmp_path / kind, [[[3, 7], [5, 7]]], vocabulary_size=400, change=made)
        if content is not None:
            (tmp_path / kind / TOKENIZER_FILES[kind]).write_bytes(content)
        found[kind] = tmp_path / kind
    return {name: str(path) for name, path in found.items()}


def make_data_config(source, **keys):
    return DataConfig.model_validate({"source": source, "sequence_length": 8, **keys})


@pytest.mark.parametrize("kind", ["bytes", *FILE])
def test_a_corpus_uses_its_own_tokenizer_and_separator(sources, kind):
    data = make_data_config(sources[kind])
    language = load_data_codec(data)
    assert encode_prompt(language, "the number") == TOKENIZERS[kind].encode("the number").tolist()
    assert language.tokenizer.decode(encode_prompt(language, "the number")) == "the number"
    assert (find_start_token(language, data), language.is_of_bytes) == (7, kind == "bytes")
    assert find_start_token(language, make_data_config(sources[kind], packing="documents")) != 7


def test_text_uses_bytes_or_characters_and_the_document_separator(sources):
    for keys, first in (
        ({}, 10),
        ({"document_separator": "nul"}, 0),
        ({"tokenizer": "characters"}, 0),
    ):
        data = make_data_config(sources["text"], **keys)
        language = load_data_codec(data)
        name = keys.get("tokenizer", "bytes")
        assert encode_prompt(language, TEXT) == TOKENIZERS[name].encode(TEXT).tolist()
        assert find_start_token(language, data) == first
    assert (
        load_data_codec(make_data_config(sources["text"], tokenizer="characters", document_separator="nul")).separator
        is None
    )
    with pytest.raises(DataError, match="character 'Q'"):
        encode_prompt(language, "Q")
    assert encode_prompt(load_data_codec(make_data_config(sources["text"])), "a\udcff") == [97, 255]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("ids", "names files of token ids, which say nothing of their tokenizer"),
        ("class", "is a class, which brings ids and no tokenizer"),
        ("none", "no file matches"),
        ("damaged", r"tokenizer\.json is missing"),
        ("other", "a tokenizer of kind 'morse' is not known"),
    ],
)
def test_the_reason_for_no_tokenizer_is_one_line(sources, tmp_path, source, message):
    if source == "damaged":
        (tmp_path / "hf" / TOKENIZER_FILES["hf"]).unlink()
    morse = lambda index: replace(index, tokenizer={"kind": "morse"})  # noqa: E731
    other = write_corpus(tmp_path / "other", [[[1]]], change=morse)
    names = sources | {"none": str(tmp_path / "none.txt"), "damaged": sources["hf"], "other": str(other)}
    with pytest.raises(DataError, match=message) as caught:
        load_data_codec(make_data_config(names[source]))
    assert "\n" not in str(caught.value)


def test_the_sources_of_a_mixture_must_agree(sources):
    def mixture(*kinds):
        return DataConfig(sequence_length=8, mixture=[{"name": kind, "source": sources[kind]} for kind in kinds])

    assert load_data_codec(mixture("bytes", "text")).is_of_bytes
    assert not load_data_codec(mixture("hf")).is_of_bytes
    with pytest.raises(DataError, match="text and tiktoken have different tokenizers"):
        load_data_codec(mixture("text", "bytes", "tiktoken"))


def test_a_prompt_is_parsed_as_ids_without_a_tokenizer():
    assert parse_ids(" 3, 4 5,6", 7) == [3, 4, 5, 6]
    assert parse_ids("", 7) == []
    for prompt in ("def", "7", "-1", "3.5"):
        with pytest.raises(DataError, match=f"got '{prompt}', needs ids from 0 to 6"):
            parse_ids(f"1 {prompt}", 7)


def test_a_single_source_is_looked_up_by_name(sources):
    data = make_data_config(sources["ids"])
    named = data.model_copy(update={"source": sources["hf"]})
    assert load_source_codec(named, data).kind["kind"] == "hf"
