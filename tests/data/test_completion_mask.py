"""Corpora with a completion mask: weights of targets on disk and in a bucket for every packing, and rejected masks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from runner.config import DataConfig, TokenSource
from runner.data import Dataset, get_batch_fields, load_validation_set
from runner.data.corpus_index import CorpusIndex
from runner.errors import DataError
from tests.data.buckets import URL, CountingDriver, put_in_bucket, write_corpus
from tests.data.datasets import load, mark_every_third, write_bin

T = 8
# One dialogue per line: prompts are even ids, completions odd ones. The last dialogue is longer than an example.
SHARDS = [[[2, 4, 6, 1, 3], [8, 5], [10, 12, 7, 9, 11]], [[14, 13, 16, 15], [18, 20, *range(1, 16, 2)]]]
NUM_TOKENS = sum(len(document) for shard in SHARDS for document in shard)
PACKINGS = ("concatenate", "documents", "pad")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "corpus", SHARDS, vocabulary_size=32, marks_of=lambda ids: ids % 2)


def load_dialogues(where: str, corpus: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Dataset:
    if where == "bucket":
        put_in_bucket(monkeypatch, corpus, CountingDriver())
    keys = {"sequence_length": T, "validation_fraction": 0.0, "train_on": "answers"} | changes
    return load(URL if where == "bucket" else corpus, cache=corpus.parent / "cache", **keys)


@pytest.mark.parametrize("where", ["disk", "bucket"])
@pytest.mark.parametrize("packing", PACKINGS)
def test_only_completion_tokens_count_in_the_loss(corpus, monkeypatch, where, packing):
    data = load_dialogues(where, corpus, monkeypatch, packing=packing)
    assert dict(data.fields) == dict(
        get_batch_fields(DataConfig(sequence_length=T, packing=packing, train_on="answers"))
    )
    rows = data.read("train", 0, data.num_train_examples)
    np.testing.assert_array_equal(rows["loss_weight"], rows["padding_mask"] & (rows["y"] % 2 == 1))
    counted = rows["y"][rows["loss_weight"] > 0]
    told = [token for shard in SHARDS for document in shard for token in document if token % 2]
    lost = NUM_TOKENS - 1 - NUM_TOKENS // T * T if packing == "concatenate" else 0
    assert sorted(counted) == sorted(told[: len(told) - lost])


def test_train_on_all_counts_every_token(corpus, monkeypatch):
    data = load_dialogues("disk", corpus, monkeypatch, train_on="all", packing="pad")
    assert "loss_weight" not in data.read("train", 0, 4)
    other = load_dialogues("disk", corpus, monkeypatch, packing="pad")
    for name, array in data.read("train", 0, 4).items():
        np.testing.assert_array_equal(array, other.read("train", 0, 4)[name])


def test_sources_mixed_with_dialogues_count_every_token(tmp_path, corpus):
    plain = write_bin(tmp_path / "plain.bin", np.arange(200) % 30)
    mixture = [
        {"name": "chat", "source": str(corpus), "train_on": "answers"},
        {"name": "plain", "source": str(plain)},
    ]
    keys = {"sequence_length": T, "mixture": mixture, "validation_fraction": 0.0}
    keys["validation"] = {"held": str(plain), "asked": {"source": str(corpus), "train_on": "answers"}}
    data = load("python-stdlib", cache=tmp_path / "cache", **keys)
    rows = data.read("train", 0, 8)
    sums = rows["loss_weight"].sum(axis=1)
    assert ((sums == T) == (np.arange(8) % 2 == 1)).all()
    assert (data.read("held", 0, 2)["loss_weight"] == 1).all()
    assert 0 < data.read("asked", 0, 1)["loss_weight"].sum() < T


def test_another_completion_mask_changes_the_fingerprint(tmp_path, corpus, monkeypatch):
    other = write_corpus(tmp_path / "other", SHARDS, vocabulary_size=32, marks_of=mark_every_third)
    plain = write_corpus(tmp_path / "plain", SHARDS, vocabulary_size=32)
    found = {
        load_dialogues("disk", corpus, monkeypatch).fingerprint,
        load_dialogues("disk", other, monkeypatch).fingerprint,
        load_dialogues("disk", plain, monkeypatch, train_on=None).fingerprint,
    }
    assert len(found) == 3


def test_a_validation_set_counts_completion_tokens_by_default(corpus):
    keys = DataConfig(sequence_length=T, packing="pad")
    data = load_validation_set(keys, "data", TokenSource(source=str(corpus)), vocabulary_size=32)
    assert "loss_weight" in data.fields
    assert data.read("data", 0, 6)["loss_weight"].sum() == sum(
        token % 2 for shard in SHARDS for document in shard for token in document
    )


def test_train_on_must_be_set_for_dialogues(tmp_path, corpus, monkeypatch):
    with pytest.raises(DataError, match=r"completion mask; set data\.train_on to answers"):
        load_dialogues("disk", corpus, monkeypatch, train_on=None)
    plain = write_corpus(tmp_path / "plain", SHARDS, vocabulary_size=32)
    for source in (plain, write_bin(tmp_path / "plain.bin", np.arange(200))):
        with pytest.raises(DataError, match=r"data\.train_on=answers: nothing reads it, .*; leave it out"):
            load(source, cache=tmp_path / "cache", train_on="answers")
    with pytest.raises(ValidationError, match=r"validation\.held\.train_on=answers, but no training source"):
        DataConfig(sequence_length=T, validation={"held": {"source": str(corpus), "train_on": "answers"}})


@pytest.mark.parametrize("where", ["disk", "bucket"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "00001.answers is missing, index.json names it"),
        (b"", "by index.json it has"),
        (b"\x07" * 14, "00001.answers is not the file that index.json|of .*00001.answers is 7, needs 1"),
    ],
)
def test_a_damaged_completion_mask_is_named(corpus, monkeypatch, where, content, message):
    path = corpus / "00001.answers"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        load_dialogues(where, corpus, monkeypatch).read("train", 0, 3)
    assert "\n" not in str(caught.value)


def test_a_mask_that_changes_under_a_running_job_is_noticed(corpus, monkeypatch):
    data = load_dialogues("disk", corpus, monkeypatch)
    data.check()
    (corpus / "00000.answers").write_bytes(b"\1" * 12)
    with pytest.raises(DataError, match="changed since the job started"):
        data.check()


def test_an_index_without_a_mask_keeps_its_bytes(tmp_path, corpus):
    plain = write_corpus(tmp_path / "plain", SHARDS, vocabulary_size=32) / "index.json"
    assert b"answers" not in plain.read_bytes()
    assert b'"format": 1' in plain.read_bytes()
    content = (corpus / "index.json").read_bytes()
    assert b'"format": 2' in content
    assert CorpusIndex.decode(content, "here").has_completion_mask


def test_an_index_with_a_mask_for_some_shards_is_rejected(tmp_path):
    def halve(index: CorpusIndex) -> CorpusIndex:
        first, *others = index.shards
        bare = type(first)(**first.to_json() | {"answers_crc32c": None})
        return CorpusIndex(index.dtype, index.vocabulary_size, index.tokenizer, None, (bare, *others))

    corpus = write_corpus(tmp_path / "half", SHARDS, vocabulary_size=32, change=halve, marks_of=mark_every_third)
    with pytest.raises(DataError, match="some of its shards have a completion mask"):
        CorpusIndex.decode((corpus / "index.json").read_bytes(), "here")
