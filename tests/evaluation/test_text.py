"""The tokens of a run as text: of every tokenizer, whole characters as they come, and why there is none."""

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


def record_of(kind):
    """A tokenizer as the index of a corpus has it, and the content of its file."""
    content, more = FILE[kind]
    return {"kind": kind, "file": TOKENIZER_FILES[kind], "sha256": hashlib.sha256(content).hexdigest(), **more}, content


TOKENIZERS = {
    "bytes": ByteTokenizer(),
    "characters": CharacterTokenizer("".join(sorted(set(TEXT)))),
    **{kind: make_tokenizer(*record_of(kind)) for kind in FILE},
}


@pytest.mark.parametrize("num_prompt", [1, 4, 9])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_pieces_of_a_text_are_whole_characters_and_together_all_of_it(name, num_prompt):
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


def test_a_character_comes_with_its_last_token_and_a_cut_one_at_the_end():
    euro = list("a€".encode())
    seen = []

    def tokens():
        for token in [*euro, *euro[1:3]]:
            seen.append(token)
            yield token

    found = [(piece, len(seen)) for piece in stream_text(tokens(), [10], ByteTokenizer().decode)]
    assert found == [("a", 1), ("€", 4), ("\ufffd", 6)]


def test_bytes_that_are_no_text_become_what_decoding_them_whole_gives():
    ids = [0xFF, 0xFF, 0xE2, 0x82, 0x41, 0xC3, 0xA9, 0x80]
    assert "".join(stream_text(ids, [], ByteTokenizer().decode)) == bytes(ids).decode(errors="replace")


@pytest.fixture
def sources(tmp_path):
    """A source of each kind, by name."""
    (tmp_path / "a.txt").write_text(TEXT)
    write_bin(tmp_path / "ids.bin", np.arange(100))
    found = {"text": tmp_path / "a.txt", "ids": tmp_path / "ids.bin", "class": "tests.inference.test_text:Nothing"}
    for kind in ("bytes", *FILE):
        record, content = record_of(kind) if kind in FILE else ({"kind": "bytes", "vocabulary_size": 256}, None)
        made = lambda index, record=record: replace(index, tokenizer=record, separator=7)  # noqa: E731
        write_corpus(tmp_path / kind, [[[3, 7], [5, 7]]], vocabulary_size=400, change=made)
        if content is not None:
            (tmp_path / kind / TOKENIZER_FILES[kind]).write_bytes(content)
        found[kind] = tmp_path / kind
    return {name: str(path) for name, path in found.items()}


def data_of(source, **keys):
    return DataConfig.model_validate({"source": source, "sequence_length": 8, **keys})


@pytest.mark.parametrize("kind", ["bytes", *FILE])
def test_a_corpus_is_read_with_the_tokenizer_that_it_names_and_begins_after_its_separator(sources, kind):
    data = data_of(sources[kind])
    language = load_data_codec(data)
    assert encode_prompt(language, "the number") == TOKENIZERS[kind].encode("the number").tolist()
    assert language.tokenizer.decode(encode_prompt(language, "the number")) == "the number"
    assert (find_start_token(language, data), language.is_of_bytes) == (7, kind == "bytes")
    assert find_start_token(language, data_of(sources[kind], packing="documents")) != 7


def test_text_is_read_by_bytes_or_by_its_characters_and_begins_after_what_stands_between_files(sources):
    for keys, first in (
        ({}, 10),
        ({"document_separator": "nul"}, 0),
        ({"tokenizer": "characters"}, 0),
    ):
        data = data_of(sources["text"], **keys)
        language = load_data_codec(data)
        name = keys.get("tokenizer", "bytes")
        assert encode_prompt(language, TEXT) == TOKENIZERS[name].encode(TEXT).tolist()
        assert find_start_token(language, data) == first
    assert load_data_codec(data_of(sources["text"], tokenizer="characters", document_separator="nul")).separator is None
    with pytest.raises(DataError, match="character 'Q'"):
        encode_prompt(language, "Q")
    assert encode_prompt(load_data_codec(data_of(sources["text"])), "a\udcff") == [97, 255]


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
def test_why_there_is_no_tokenizer_is_one_line(sources, tmp_path, source, message):
    if source == "damaged":
        (tmp_path / "hf" / TOKENIZER_FILES["hf"]).unlink()
    morse = lambda index: replace(index, tokenizer={"kind": "morse"})  # noqa: E731
    other = write_corpus(tmp_path / "other", [[[1]]], change=morse)
    names = sources | {"none": str(tmp_path / "none.txt"), "damaged": sources["hf"], "other": str(other)}
    with pytest.raises(DataError, match=message) as caught:
        load_data_codec(data_of(names[source]))
    assert "\n" not in str(caught.value)


def test_the_sources_of_a_mixture_must_agree(sources):
    def mixture(*kinds):
        return DataConfig(sequence_length=8, mixture=[{"name": kind, "source": sources[kind]} for kind in kinds])

    assert load_data_codec(mixture("bytes", "text")).is_of_bytes
    assert not load_data_codec(mixture("hf")).is_of_bytes
    with pytest.raises(DataError, match="text and tiktoken have different tokenizers"):
        load_data_codec(mixture("text", "bytes", "tiktoken"))


def test_ids_are_read_from_a_prompt_where_no_tokenizer_is_known():
    assert parse_ids(" 3, 4 5,6", 7) == [3, 4, 5, 6]
    assert parse_ids("", 7) == []
    for prompt in ("def", "7", "-1", "3.5"):
        with pytest.raises(DataError, match=f"got '{prompt}', needs ids from 0 to 6"):
            parse_ids(f"1 {prompt}", 7)


def test_a_source_is_asked_for_alone(sources):
    data = data_of(sources["ids"])
    named = data.model_copy(update={"source": sources["hf"]})
    assert load_source_codec(named, data).kind["kind"] == "hf"
