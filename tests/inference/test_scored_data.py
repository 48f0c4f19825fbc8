"""Text bytes covered by the loss: those of all targets, for every tokenizer and packing."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest

from runner.config import DataConfig, TokenSource
from runner.data import load_validation_set
from runner.data.tokenizers import TOKENIZER_FILES, make_tokenizer
from runner.evaluation.builtin import EvaluationData
from runner.evaluation.generation import load_source_codec
from runner.inference.evaluate import DATA_SET
from tests.data.buckets import write_corpus
from tests.data.datasets import write_bin
from tests.support.tokenise_inputs import DOCUMENTS, GPT2_PATTERN, SEPARATOR, make_hf_tokenizer, make_tiktoken_ranks

LENGTH = 96
RECORDS = {
    "bytes": ({"kind": "bytes"}, None),
    "hf": ({"kind": "hf"}, make_hf_tokenizer()),
    "tiktoken": (
        {"kind": "tiktoken", "pattern": GPT2_PATTERN, "special_tokens": {SEPARATOR: 258}},
        make_tiktoken_ranks(),
    ),
}


def load_scored_set(source, **keys):
    data = DataConfig.model_validate({"source": str(source), "sequence_length": LENGTH, **keys})
    named = TokenSource(source=str(source))
    return EvaluationData(
        load_validation_set(data, DATA_SET, named, vocabulary_size=5000), {DATA_SET: load_source_codec(named, data)}
    )


@pytest.mark.parametrize("packing", ["concatenate", "documents"])
@pytest.mark.parametrize("kind", RECORDS)
def test_bytes_cover_the_text_of_all_targets_without_separators(tmp_path, kind, packing):
    record, content = RECORDS[kind]
    if content is not None:
        record = record | {"file": TOKENIZER_FILES[kind], "sha256": hashlib.sha256(content).hexdigest()}
    tokenizer = make_tokenizer(record, content)
    separator = {"bytes": 0, "hf": tokenizer.vocabulary_size + 1, "tiktoken": 258}[kind]
    documents = [[*tokenizer.encode(text).tolist(), separator] for text in DOCUMENTS]
    told = lambda index: replace(index, tokenizer=record, separator=None if kind == "bytes" else separator)  # noqa: E731
    corpus = write_corpus(tmp_path / "corpus", [documents], vocabulary_size=5000, change=told)
    if content is not None:
        (corpus / TOKENIZER_FILES[kind]).write_bytes(content)

    size = load_scored_set(corpus, packing=packing).measure(DATA_SET)
    if packing == "documents":
        targets = [document[1:] for document in documents]
    else:
        ids = np.concatenate(documents)
        num_targets = (len(ids) - 1) // LENGTH * LENGTH
        ends = np.cumsum(list(map(len, documents)))
        targets = [part.tolist() for part in np.split(ids[1 : 1 + num_targets], ends[ends <= num_targets] - 1)]
    assert size.num_targets == sum(map(len, targets))
    if kind == "bytes":
        assert size.num_bytes == size.num_targets
    else:
        texts = [tokenizer.decode([token for token in part if token != separator]) for part in targets]
        num_rows = -(-len(np.concatenate(documents)) // LENGTH)  # both ends can split a character
        assert abs(size.num_bytes - sum(len(text.encode()) for text in texts)) <= num_rows * (packing == "documents")
        assert size.num_bytes > size.num_targets


def test_characters_count_by_their_bytes(tmp_path):
    (tmp_path / "a.txt").write_text("né" * 500)
    size = load_scored_set(tmp_path / "a.txt", tokenizer="characters").measure(DATA_SET)
    assert (size.num_targets, size.num_bytes) == (960, 960 * 3 // 2)


def test_the_reason_for_unknown_bytes_is_reported(tmp_path):
    ids = write_bin(tmp_path / "ids.bin", np.arange(100))
    data = DataConfig(source=str(ids), sequence_length=LENGTH)
    found = load_validation_set(data, DATA_SET, TokenSource(source=str(ids)), vocabulary_size=100)
    assert EvaluationData(found, {DATA_SET: "nobody knows"}).measure(DATA_SET).reason == "nobody knows"
