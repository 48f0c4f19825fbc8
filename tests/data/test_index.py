"""Index of a corpus: round trip, and an error for every damage."""

import dataclasses
import json
from typing import Any

import pytest

from runner.data.corpus_index import INDEX_KEYS, CorpusIndex, CorpusShard
from runner.errors import DataError

SHARD = CorpusShard("00000", 7, 2, 40, "00000000", "11111111", "22222222", top_crc32c="44444444")
SHARDS = (SHARD, dataclasses.replace(SHARD, name="00001"))
INDEX = CorpusIndex("uint16", 50, {"kind": "bytes"}, None, SHARDS, 1, {"top_k": 2})
WRONG_VALUES = [None, True, 3, 1.5, "text", ["text"], {"a": 1}]


def encode_changed(**changes: Any) -> bytes:
    record = json.loads(INDEX.encode()) | changes
    return json.dumps({key: value for key, value in record.items() if value is not ...}).encode()


def test_the_index_round_trips():
    assert CorpusIndex.decode(INDEX.encode(), "here") == INDEX
    assert (INDEX.num_tokens, INDEX.num_documents) == (14, 4)


@pytest.mark.parametrize(("begin", "teacher", "version"), [(None, None, 1), (1, None, 3), (None, {"top_k": 2}, 4)])
def test_an_index_has_the_oldest_format_with_its_keys(begin, teacher, version):
    shards = tuple(dataclasses.replace(shard, top_crc32c=teacher and "44444444") for shard in SHARDS)
    index = dataclasses.replace(INDEX, begin=begin, teacher=teacher, shards=shards)
    assert CorpusIndex.decode(index.encode(), "here") == index
    record = json.loads(index.encode())
    assert record["format"] == version
    assert ("begin" in record, "teacher" in record) == (begin is not None, teacher is not None)


@pytest.mark.parametrize("changes", [{"teacher": None}, {"teacher": {}}, {"teacher": {"top_k": 0}}, {"shards": ()}])
def test_predictions_without_a_teacher_are_rejected(changes):
    shards = (SHARD, dataclasses.replace(SHARDS[1], top_crc32c=None)) if "shards" in changes else SHARDS
    index = dataclasses.replace(INDEX, **(changes | {"shards": shards}))
    with pytest.raises(DataError, match=r"^here is not the index of a corpus: .*(teacher)"):
        CorpusIndex.decode(index.encode(), "here")


def test_the_keys_match_the_documented_table():
    shards = [dataclasses.replace(shard, answers_crc32c="33333333") for shard in INDEX.shards]
    record = json.loads(dataclasses.replace(INDEX, shards=tuple(shards)).encode())
    below = {f"shards.{name}" for name in record["shards"][0]}
    assert {*record, *below} == {key.name for key in INDEX_KEYS}


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(CorpusIndex)])
def test_every_key_enters_the_digest(field):
    other = {"dtype": "uint32", "vocabulary_size": 51, "tokenizer": {"kind": "hf"}, "separator": 3, "shards": (SHARD,)}
    other |= {"begin": 2, "teacher": {"top_k": 3}}
    assert dataclasses.replace(INDEX, **{field: other[field]}).digest != INDEX.digest


TOP_KEYS = [key for key in INDEX_KEYS if "." not in key.name]
RECORD = json.loads(INDEX.encode())
CASES = [
    (key.name, value) for key in TOP_KEYS for value in [..., *WRONG_VALUES] if value is ... or value != RECORD[key.name]
]


@pytest.mark.parametrize(("name", "value"), CASES, ids=str)
def test_a_missing_or_mistyped_key_is_rejected(name, value):
    with pytest.raises(DataError, match=r"^here "):
        CorpusIndex.decode(encode_changed(**{name: value}), "here")


@pytest.mark.parametrize("size", [-1, 0, 40, 1 << 33])
def test_an_impossible_vocabulary_is_rejected(size):
    index = dataclasses.replace(INDEX, vocabulary_size=size)
    with pytest.raises(DataError, match=rf"^here is not the index of a corpus: vocabulary_size is {size}"):
        CorpusIndex.decode(index.encode(), "here")


def test_a_newer_index_format_is_rejected():
    with pytest.raises(DataError, match=r"^here has format 5, needs 4: written by a newer runner"):
        CorpusIndex.decode(encode_changed(format=5), "here")


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b"null", INDEX.encode()[:-3], b"[" * 99999])
def test_content_that_is_no_index_is_rejected(content):
    with pytest.raises(DataError, match=r"^here is not the index of a corpus"):
        CorpusIndex.decode(content, "here")


@pytest.mark.parametrize(
    "changes",
    [
        *({"name": name} for name in ("", "../00000", "/etc/passwd", "00001")),
        *({"num_tokens": -1}, {"num_documents": -1}, {"largest_id": -2}, {"largest_id": 50}),
    ],
)
def test_an_impossible_shard_is_rejected(changes):
    index = dataclasses.replace(INDEX, shards=(dataclasses.replace(SHARD, **changes), *INDEX.shards[1:]))
    with pytest.raises(DataError, match=r"^here is not the index of a corpus"):
        CorpusIndex.decode(index.encode(), "here")
