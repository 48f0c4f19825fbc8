"""The index of a corpus: what it says comes back, and every damage is told."""

import dataclasses
import json
from typing import Any

import pytest

from runner.data.corpus_index import INDEX_KEYS, CorpusIndex, CorpusShard
from runner.errors import DataError

SHARD = CorpusShard("00000", 7, 2, 40, "00000000", "11111111", "22222222")
INDEX = CorpusIndex("uint16", 50, {"kind": "bytes"}, None, (SHARD, dataclasses.replace(SHARD, name="00001")), 1)
OTHER = [None, True, 3, 1.5, "text", ["text"], {"a": 1}]


def rewritten(**changes: Any) -> bytes:
    record = json.loads(INDEX.encode()) | changes
    return json.dumps({key: value for key, value in record.items() if value is not ...}).encode()


def test_it_comes_back():
    assert CorpusIndex.decode(INDEX.encode(), "here") == INDEX
    assert (INDEX.num_tokens, INDEX.num_documents) == (14, 4)


def test_without_a_begin_token_it_has_the_older_format_and_no_such_key():
    index = dataclasses.replace(INDEX, begin=None)
    assert CorpusIndex.decode(index.encode(), "here") == index
    record = json.loads(index.encode())
    assert record["format"] == 1
    assert "begin" not in record


def test_its_keys_are_those_of_the_table():
    shards = [dataclasses.replace(shard, answers_crc32c="33333333") for shard in INDEX.shards]
    record = json.loads(dataclasses.replace(INDEX, shards=tuple(shards)).encode())
    below = {f"shards.{name}" for name in record["shards"][0]}
    assert {*record, *below} == {key.name for key in INDEX_KEYS}


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(CorpusIndex)])
def test_every_key_is_part_of_its_digest(field):
    other = {"dtype": "uint32", "vocabulary_size": 51, "tokenizer": {"kind": "hf"}, "separator": 3, "shards": (SHARD,)}
    other["begin"] = 2
    assert dataclasses.replace(INDEX, **{field: other[field]}).digest != INDEX.digest


TOP = [key for key in INDEX_KEYS if "." not in key.name]
RECORD = json.loads(INDEX.encode())
CASES = [(key.name, value) for key in TOP for value in [..., *OTHER] if value is ... or value != RECORD[key.name]]


@pytest.mark.parametrize(("name", "value"), CASES, ids=str)
def test_a_missing_or_mistyped_key_is_refused(name, value):
    with pytest.raises(DataError, match=r"^here "):
        CorpusIndex.decode(rewritten(**{name: value}), "here")


@pytest.mark.parametrize("size", [-1, 0, 40, 1 << 33])
def test_an_impossible_vocabulary_is_refused(size):
    index = dataclasses.replace(INDEX, vocabulary_size=size)
    with pytest.raises(DataError, match=rf"^here is not the index of a corpus: vocabulary_size is {size}"):
        CorpusIndex.decode(index.encode(), "here")


def test_a_newer_format_is_refused():
    with pytest.raises(DataError, match=r"^here has format 4, needs 3: written by a newer runner"):
        CorpusIndex.decode(rewritten(format=4), "here")


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b"null", INDEX.encode()[:-3], b"[" * 99999])
def test_other_content_is_refused(content):
    with pytest.raises(DataError, match=r"^here is not the index of a corpus"):
        CorpusIndex.decode(content, "here")


@pytest.mark.parametrize(
    "changes",
    [
        *({"name": name} for name in ("", "../00000", "/etc/passwd", "00001")),
        *({"num_tokens": -1}, {"num_documents": -1}, {"largest_id": -2}, {"largest_id": 50}),
    ],
)
def test_an_impossible_shard_is_refused(changes):
    index = dataclasses.replace(INDEX, shards=(dataclasses.replace(SHARD, **changes), *INDEX.shards[1:]))
    with pytest.raises(DataError, match=r"^here is not the index of a corpus"):
        CorpusIndex.decode(index.encode(), "here")
