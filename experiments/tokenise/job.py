"""Tokenise text: a job whose steps are thousandths of its work, with the same corpus at the end whatever happens.

Round k makes the pieces between k and k + 1 thousandths of all, dealt out over the hosts; how many hosts there are, and
in which round a piece was made, changes nothing of it. A piece with a record is not made again, and the last round
makes whatever lacks one, so a kill costs the pieces that were in work.

How far a tokenise job is, in a line for a person now and then.
"""

import contextlib
import functools
import time
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.tokenise import corpus
from experiments.tokenise.chat import ChatReader, digest_of, load_chat, tell_too_long, validate_chat_read
from experiments.tokenise.config import BpeConfig, TokeniseConfig
from experiments.tokenise.corpus import FinishedPiece
from experiments.tokenise.documents import Piece, cut_into_pieces
from experiments.tokenise.inputs import InputFile, find_files, fingerprint_of, would_name
from experiments.tokenise.pipeline import EncodedBatch, encoded, too_many
from experiments.tokenise.vocabulary import Vocabulary, read_vocabulary, sample_of, train, trained_vocabulary
from runner import ExecutionSpec, RestoreableJob
from runner.data.corpus_index import CorpusIndex
from runner.data.tokenizers import TOKENIZER_FILES
from runner.distributed.agreement import Hosts
from runner.distributed.clock import Phase, TimeBucket
from runner.errors import DataError, InvalidError
from runner.spec import Trajectory
from runner.storage import JsonObject, Store, open_store, probe_store

_EVERY_SECONDS = 10.0


class Tally:
    """What this host has made in this attempt."""

    def __init__(self, num_pieces: int) -> None:
        self._num_pieces = num_pieces
        self._num_earlier = 0  # pieces made before this attempt
        self._own = [0, 0, 0, 0]  # pieces, documents, tokens, bad lines
        self.first_bad = ""
        self._began_seconds = self._said_seconds = time.monotonic()

    def begin(self, num_earlier: int) -> None:
        """With so many pieces done by earlier attempts."""
        self._num_earlier = num_earlier

    def add(self, done: FinishedPiece) -> None:
        """A piece more."""
        more = (1, done.num_documents, done.num_tokens, done.num_bad)
        self._own = [own + other for own, other in zip(self._own, more, strict=True)]
        self.first_bad = self.first_bad or done.first_bad

    def own(self) -> list[int]:
        """For the other hosts: pieces, documents, tokens, bad lines."""
        return self._own

    def line(self, hosts: Sequence[Sequence[int]], now_seconds: float) -> str | None:
        """What all hosts have made, if it is time to say so."""
        if now_seconds - self._said_seconds < _EVERY_SECONDS:
            return None
        self._said_seconds = now_seconds
        pieces, documents, tokens, _ = (sum(column) for column in zip(*hosts, strict=True))
        seconds = now_seconds - self._began_seconds
        made = self._num_earlier + pieces
        left_seconds = seconds / max(pieces, 1) * (self._num_pieces - made)
        return (
            f"{made:,} of {self._num_pieces:,} pieces; now {documents:,} documents, {tokens:,} tokens, "
            f"{tokens / seconds:,.0f} tokens/s, {_duration(left_seconds)} left"
        )


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


ROUNDS = 1000  # the last step; so many that a stop is heard soon, and so few that a round without work costs nothing
_DIGEST_WORDS = 8
_TOKENISE = Phase("tokenise", TimeBucket.STEPS)
_INDEX = Phase("the index", TimeBucket.STEPS)
_NAMES_OF_A_RUN = ("events.jsonl", "metrics.jsonl", "spec.yaml")  # of a kind that is read


class Tokenise(RestoreableJob):
    """Reads `config.source` and writes a corpus of tokens with its index."""

    Config = TokeniseConfig

    @property
    def total_steps(self) -> int:
        """Thousandths of the work."""
        return ROUNDS

    @functools.cached_property
    def output(self) -> Store:
        """Where the corpus goes."""
        with self.document.errors_at("config.output"):
            return open_store(self.config.output or f"{self.store.url}/corpus")

    @functools.cached_property
    def files(self) -> tuple[InputFile, ...]:
        """What is read, as it was found at the start."""
        with self.document.errors_at("config.source"):
            return find_files(self.config.source)

    @functools.cached_property
    def pieces(self) -> list[Piece]:
        """The work."""
        with self.document.errors_at("config.source"):
            return cut_into_pieces(self.files, self.config.shard_bytes)

    @functools.cached_property
    def vocabulary(self) -> Vocabulary:
        """The tokenizer; one that is trained is there from `prepare` on."""
        with self.document.errors_at("config.tokenizer"):
            if isinstance(self.config.tokenizer, BpeConfig):
                return trained_vocabulary(self.output)
            return read_vocabulary(self.config.tokenizer)

    @functools.cached_property
    def separator(self) -> int | None:
        """The id that ends every document."""
        with self.document.errors_at("config.separator"):
            return self.vocabulary.separator(self.config.separator)

    @functools.cached_property
    def chat(self) -> ChatReader | None:
        """How lines become dialogues."""
        with self.document.errors_at("config.chat.template"):
            return None if self.config.chat is None else load_chat(self.config.chat)

    @property
    def maker(self) -> str:
        """Of what makes ids."""
        return digest_of(self.vocabulary.sha256, self.chat)

    # What a job says of itself.

    def setup(self, hosts: Hosts) -> None:
        """Find the input and read the tokenizer. Raises `InvalidError` on every host if these do not serve."""
        _refuse_own_files(self)
        validate_chat_read(self.config, self.files[0].form, self.document)
        seen = [fingerprint_of(self.files), len(self.pieces)]
        if not isinstance(self.config.tokenizer, BpeConfig):
            _ = self.separator
            seen.append(self.maker)
        others = hosts.gather(seen)
        different = [process for process, other in enumerate(others) if other != others[0]]
        if different:
            raise DataError(f"processes {different} see other input files or another tokenizer than process 0")
        hosts.run_on_main(self._check_output)

    def prepare(self) -> None:
        """Take the output, and put the tokenizer there, trained if need be. Others wait for the main host."""
        self.attempt.hosts.run_on_main(self._begin_output)
        _ = self.separator

    def init(self) -> Any:
        """The digest of the corpus, zero until it is whole: so the fingerprint tells one from another.

        How far the job is, the step says.
        """
        return {"index": jnp.zeros(_DIGEST_WORDS, jnp.uint32)}

    def identity(self) -> Trajectory:
        """The keys, and what is in the files that they name."""
        found = super().identity() | {"config.source.files": fingerprint_of(self.files)}
        if self.chat is not None and self.chat.template is not None:
            found |= {"config.chat.template.sha256": self.chat.template.sha256}
        if isinstance(self.config.tokenizer, BpeConfig):
            return found
        return found | {"config.tokenizer.sha256": self.vocabulary.sha256}

    def resolved_spec(self) -> ExecutionSpec:
        """With the output filled in."""
        spec = super().resolved_spec()
        return spec.model_copy(update={"config": spec.config | {"output": self.output.url}})

    def run(self) -> None:
        """Make the pieces of each round, then the index."""
        hosts, tally = self.attempt.hosts, Tally(len(self.pieces))
        lacking = _read_bits(hosts.run_on_main(self._lacking))
        own = lacking[hosts.process_id :: hosts.num_processes]
        tally.begin(len(self.pieces) - len(lacking))
        with contextlib.closing(self._encode(own)) as stream:
            while self.step < ROUNDS:
                end = len(self.pieces) * (self.step + 1) // ROUNDS
                while own and own[0] < end:
                    tally.add(self._make(own.pop(0), stream))
                if lacking and lacking[0] < end:
                    lacking = [piece for piece in lacking if piece >= end]
                    self._meet(tally)
                if self.step + 1 == ROUNDS:
                    with self.attempt.progress.report_phase(_INDEX):
                        self.state = self._state_of(hosts.run_on_main(self._end))
                self.step += 1
                self.save_or_stop()

    def result(self) -> JsonObject:
        """Besides, how many tokens the corpus has."""
        index = corpus.read_index(self.output)
        return super().result() | {"tokens": index.num_tokens}

    # The parts of it.

    def _check_output(self) -> None:
        """Refuse an output that is another run's or was begun from other files. Main host only; changes nothing."""
        with self.document.errors_at("config.output"):
            corpus.validate_owner(self.output, self.store.url)
        with self.document.errors_at("config.source"):
            corpus.validate_sources_unchanged(self.output, self.files)

    def _begin_output(self) -> None:
        """Main host only."""
        output, attempt, config = self.output, self.attempt, self.config
        with self.document.errors_at("config.output"):
            try:
                if output.root is None:
                    probe_store(output)
                corpus.take(output, self.store.url, self.spec.name, attempt.run_id)
            except PermissionError as error:
                raise InvalidError(f"{output.url} cannot be written: no permission ({error})") from error
        corpus.write_sources(output, self.files)
        if isinstance(config.tokenizer, BpeConfig) and not output.exists(TOKENIZER_FILES["hf"]):
            attempt.say(f"{self.spec.name}: training a BPE of {config.tokenizer.vocabulary_size:,} tokens")
            sample = sample_of(self.pieces, config.tokenizer.sample_bytes, config.field, config.skip_bad)
            output.write(TOKENIZER_FILES["hf"], train(config.tokenizer, config.separator, sample))
        with self.document.errors_at("config.tokenizer"):
            corpus.validate_same_tokenizer(output, self.maker)
        if self.vocabulary.content is not None:
            corpus.write_once(output, self.vocabulary.record["file"], self.vocabulary.content)

    def _lacking(self) -> str:
        """Which pieces have no record, as bits: every host must see the same. Main host only."""
        done = corpus.finished(self.output)
        bits = [corpus.name_of(piece) not in done for piece in range(len(self.pieces))]
        return np.packbits(bits).tobytes().hex()

    def _encode(self, pieces: Sequence[int]) -> Generator[EncodedBatch]:
        config, skip_bad = self.config, self.config.skip_bad
        work = [(piece, self.pieces[piece]) for piece in pieces]
        how = config.field, config.shard_bytes, skip_bad, self.chat
        return encoded(work, self.vocabulary.tokenizer, self.separator, *how)

    def _make(self, piece: int, stream: Iterator[EncodedBatch]) -> corpus.FinishedPiece:
        """Write the next piece of the stream."""
        if self.attempt.hosts.is_main:
            self.attempt.fence.check_locally()
        try:
            with self.attempt.progress.report_phase(_TOKENISE):
                return corpus.write_piece(self.output, piece, self.maker, self._reported(stream))
        except FileNotFoundError:
            if self.attempt.hosts.is_main:
                self.attempt.fence.check()  # a newer attempt has removed what this one was writing
            raise

    def _reported(self, stream: Iterator[EncodedBatch]) -> Iterator[EncodedBatch]:
        """The same, each batch with a deadline of its own: a piece may be large."""
        while True:
            with self.attempt.progress.report_phase(_TOKENISE):
                batch = next(stream)
            yield batch

    def _meet(self, tally: Tally) -> None:
        """At the end of a round with work: hosts stay together, so that a stop finds them near one step."""
        with self.attempt.progress.report_phase(_TOKENISE):
            parts = self.attempt.hosts.gather(tally.own())
        num_bad = sum(part[-1] for part in parts)
        if num_bad > self.config.skip_bad:
            raise DataError(too_many(tally.first_bad or "lines without a text", num_bad, self.config.skip_bad))
        line = tally.line(parts, time.monotonic())
        if line is not None:
            self.attempt.say(f"{self.spec.name}: {line}")

    def _state_of(self, digest: str) -> Any:
        """The state at the end. No compiled program, no word between hosts: each has the same values."""
        words = np.frombuffer(bytes.fromhex(digest), ">u4").astype(np.uint32)
        sharding = self.state["index"].sharding
        return {"index": jax.make_array_from_callback(words.shape, sharding, lambda place: words[place])}

    def _end(self) -> str:
        """Write the index; its digest. Main host only."""
        self.attempt.fence.check()
        vocabulary, separator, url = self.vocabulary, self.separator, self.output.url
        dtype = vocabulary.tokenizer.dtype
        done = corpus.read_done(self.output, len(self.pieces), self.maker, dtype.itemsize)
        num_bad = sum(piece.num_bad for piece in done)
        first_bad = next((piece.first_bad for piece in done if piece.num_bad), "")
        if num_bad > self.config.skip_bad:
            raise DataError(too_many(first_bad, num_bad, self.config.skip_bad))
        shards = tuple(shard for piece in done for shard in piece.shards)
        index = CorpusIndex(dtype.name, vocabulary.tokenizer.vocabulary_size, vocabulary.record, separator, shards)
        if not index.num_tokens:
            raise self.document.error("config.source", f"{self.config.source} holds no document, so no token")
        corpus.remove_leftovers(self.output)
        corpus.write_index(self.output, index)
        if num_bad:
            self.attempt.say(f"{self.spec.name}: left out {num_bad} lines without a text, the first is {first_bad}")
        if num_left_out := sum(piece.num_left_out for piece in done):
            self.attempt.say(f"{self.spec.name}: left out {num_left_out} empty documents: there is no separator")
        if too_long := tell_too_long(done, self.chat):
            self.attempt.say(f"{self.spec.name}: {too_long}")
        train_on = " and config.data.train_on: answers" if index.has_completion_mask else ""
        self.attempt.say(
            f"{self.spec.name}: {url} holds {index.num_tokens:,} tokens of {index.num_documents:,} documents, "
            f"vocabulary {index.vocabulary_size:,} ({dtype}); train on it with config.data.source: {url}{train_on}"
        )
        return index.digest


def _refuse_own_files(job: Tokenise) -> None:
    """A source that names what the job writes would be another one at the next attempt."""
    own = [f"{job.store.url}/{name}" for name in _NAMES_OF_A_RUN]
    own += [f"{job.output.url}/{name}" for name in corpus.NAMES]
    found = next((path for path in own if would_name(job.config.source, path)), None)
    if found is not None:
        raise job.document.error(
            "config.source",
            f"{job.config.source} names what this job writes, as {found}; use a narrower source, or another "
            "directory and output",
        )


def _read_bits(text: str) -> list[int]:
    """The numbers of the bits that are set."""
    return [int(place) for place in np.flatnonzero(np.unpackbits(np.frombuffer(bytes.fromhex(text), np.uint8)))]
