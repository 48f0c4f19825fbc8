"""Tokens/s of a tokenise job, relative to the batch encoding of `tokenizers`, on all cores of this machine.

Both encode copies of the standard library's source with the same trained BPE, in alternation. The library gets all
texts at once in memory, and its ids are converted to arrays; the job reads .jsonl from the disk and writes a corpus.
The time of the job covers its pieces, from the first document to the last record, without start-up and checkpoints.

    python -m tests.benchmarks.tokenise [--rounds 5] [--copies 2] [--vocabulary 8192]
"""

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import tokenizers

from experiments.tokenise import corpus
from experiments.tokenise.config import BpeConfig
from experiments.tokenise.documents import cut_into_pieces
from experiments.tokenise.inputs import find_files
from experiments.tokenise.job import sample_documents, train_bpe
from experiments.tokenise.pipeline import EncodingOptions, encode_pieces
from runner.data.tokenizers import HuggingFaceTokenizer
from runner.storage import LocalStore

SHARD_BYTES = 16 << 20


def time_library(library: tokenizers.Tokenizer, texts: list[str]) -> tuple[int, float]:
    """Encode with the library; return the number of tokens and the seconds."""
    started = time.perf_counter()
    num_tokens = sum(len(np.array(found.ids, np.uint16)) for found in library.encode_batch(texts))
    return num_tokens, time.perf_counter() - started


def time_job(content: bytes, source: Path, output: Path) -> tuple[int, float]:
    """Encode with the pipeline of the job; return the number of tokens and the seconds."""
    pieces = cut_into_pieces(find_files(str(source)), SHARD_BYTES)
    tokenizer, store, num_tokens = HuggingFaceTokenizer(content), LocalStore(output), 0
    started = time.perf_counter()
    with contextlib.closing(
        encode_pieces([*enumerate(pieces)], tokenizer, EncodingOptions("text", SHARD_BYTES))
    ) as stream:
        for number in range(len(pieces)):
            num_tokens += corpus.write_piece(store, number, "", stream).num_tokens
    return num_tokens, time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--copies", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parsed = parser.parse_args()
    files = find_files("python-stdlib")
    config = BpeConfig(kind="bpe", vocabulary_size=parsed.vocabulary)
    sample = sample_documents(cut_into_pieces(files, SHARD_BYTES), 16 << 20, "text", 0)
    content = train_bpe(config, (), sample, print)
    library = tokenizers.Tokenizer.from_str(content.decode())
    texts = [Path(file.name).read_bytes().decode(errors="replace") for file in files] * parsed.copies
    ratios = []
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory) / "texts.jsonl"
        source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        print(f"{len(texts)} documents, {source.stat().st_size:,} bytes of .jsonl")
        for round_number in range(parsed.rounds):
            tokens, seconds = time_library(library, texts)
            job_tokens, job_seconds = time_job(content, source, Path(directory) / str(round_number))
            assert job_tokens == tokens
            ratios.append(seconds / job_seconds)
            print(f"library {tokens / seconds:,.0f} tokens/s, job {tokens / job_seconds:,.0f}: {ratios[-1]:.3f}")
    print(f"median of job / library: {statistics.median(ratios):.3f}, worst {min(ratios):.3f}")


if __name__ == "__main__":
    main()
