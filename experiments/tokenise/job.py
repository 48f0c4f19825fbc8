"""The tokenise job, whose output does not depend on interruptions or on the number of hosts, and its tokenizers.

Steps are thousandths of the work. Step k makes the pieces between k and k + 1 thousandths of all pieces, distributed
over the hosts. A piece with a record is not made again, and the last step makes every piece that lacks one, so a kill
loses only the pieces that were being made.

The tokenizer is loaded from a file, or trained on a sample of the source before the first step (`Vocabulary`).
"""

import contextlib
import difflib
import functools
import hashlib
import itertools
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers

from experiments.tokenise import corpus
from experiments.tokenise.config import (
    BpeConfig,
    BytesConfig,
    SampleSource,
    TiktokenConfig,
    TokeniseConfig,
    TokenizerConfig,
)
from experiments.tokenise.corpus import FinishedPiece
from experiments.tokenise.documents import (
    BadRecord,
    ChatReader,
    DocumentSet,
    Piece,
    combine_digests,
    cut_into_pieces,
    load_chat,
    read_documents,
    start_renderer,
)
from experiments.tokenise.inputs import (
    FileFormat,
    InputFile,
    compute_fingerprint,
    find_files,
    hash_entries,
    pin_source,
    read_file,
    would_match,
)
from experiments.tokenise.pipeline import EncodedBatch, EncodingOptions, encode_pieces, format_too_many, read_piece
from runner import ExecutionSpec
from runner.attempts.fence import is_unstarted
from runner.attempts.layout import read_owner
from runner.data.chat import find_end_of_turn
from runner.data.corpus_index import INDEX, CorpusIndex
from runner.data.tokenizers import KINDS_WITH_SPANS, TOKENIZER_FILES, BatchTokenizer, ByteBatchTokenizer, make_tokenizer
from runner.distributed.agreement import Hosts
from runner.distributed.clock import Phase, TimeCategory
from runner.errors import DataError, InvalidError
from runner.huggingface.assets import END_OF_TURN, TOKENIZER_CONFIG
from runner.job import TextJob
from runner.spec import Document, Trajectory
from runner.spec.imports import import_extra
from runner.storage import JsonObject, Store, encode_json, open_store, parse_json, probe_store

_MIN_SAMPLE_BYTES = 1 << 20  # from each sampled piece
ROUNDS = 1000  # Steps of a job: enough to react to a stop quickly, but few enough that empty steps cost little.
_PROGRESS_SECONDS = 10.0
_DIGEST_WORDS = 8
_TOKENISE = Phase("tokenise", TimeCategory.STEPS)
_FINISH = Phase("the index", TimeCategory.STEPS)
# Files of a run that have the suffix of an input.
_RUN_FILES = ("events.jsonl", "metrics.jsonl", "spec.yaml", "job.json", "result.json", "checkpoints/1000/manifest.json")
_PROBED_RECORDS = 1000  # lines of the source that are tried before the directory is claimed
_HASH_ROUNDS = 100


@dataclass(frozen=True)
class Vocabulary:
    """Tokenizer with its record in the corpus index, and the content of its file if it has one."""

    tokenizer: BatchTokenizer
    record: JsonObject
    content: bytes | None = field(repr=False)

    @property
    def sha256(self) -> str:
        """SHA-256 of the file; "" without one."""
        return str(self.record.get("sha256", ""))

    def list_special_tokens(self) -> list[str]:
        """Return the texts of the special tokens of a `tokenizer.json`; nothing for other kinds of tokenizers."""
        if self.content is None or self.record.get("kind") != "hf":
            return []
        added = parse_json(self.content).get("added_tokens", [])
        return [token["content"] for token in added if token.get("special")]

    def find_token(self, token: int | str | None) -> int | None:
        """Return the id of a token. Raises `InvalidError` with the nearest token if there is none."""
        if token is None:
            return None
        if isinstance(token, int):
            if token >= self.tokenizer.vocabulary_size:
                raise InvalidError(f"is {token}; the largest id is {self.tokenizer.vocabulary_size - 1:,}")
            return token
        tokens = self.tokenizer.list_tokens()
        if token in tokens:
            return tokens[token]
        if not tokens:
            raise InvalidError(f"a tokenizer of kind {self.tokenizer.name} has no token {token!r}; give an id")
        special = [known for known in tokens if known.startswith("<")]
        near = difflib.get_close_matches(token, special, n=1) or difflib.get_close_matches(token, tokens, n=1)
        hint = (
            f"; did you mean {near[0]!r}?" if near else f"; its special tokens are {', '.join(special[:8]) or 'none'}"
        )
        raise InvalidError(f"the tokenizer has no token {token!r}{hint}")


def _load_vocabulary(config: TokenizerConfig) -> Vocabulary:
    """Load a tokenizer that needs no training. Raises `DataError` if its file is missing or damaged."""
    assert not isinstance(config, BpeConfig)
    if isinstance(config, BytesConfig):
        return Vocabulary(
            ByteBatchTokenizer(), {"kind": "bytes", "vocabulary_size": ByteBatchTokenizer.vocabulary_size}, None
        )
    more: JsonObject = {}
    if isinstance(config, TiktokenConfig):
        more = {"pattern": config.pattern, "special_tokens": config.special_tokens}
    try:
        return _make_vocabulary(config.kind, read_file(config.file), more)
    except DataError as error:
        raise DataError(f"{config.file}: {error}") from error


def _load_trained_vocabulary(store: Store) -> Vocabulary:
    """Load the tokenizer that was trained for the corpus in `store`. Raises `DataError` if it cannot be read."""
    name = TOKENIZER_FILES["hf"]
    try:
        return _make_vocabulary("hf", store.read(name), {})
    except (FileNotFoundError, DataError) as error:
        raise DataError(
            f"{store.url}/{name}, the trained tokenizer, is missing or damaged; remove {store.url} and run again"
        ) from error


def _make_vocabulary(kind: str, content: bytes, more: JsonObject) -> Vocabulary:
    record = {"kind": kind, "file": TOKENIZER_FILES[kind], "sha256": hashlib.sha256(content).hexdigest(), **more}
    tokenizer = make_tokenizer(record, content)
    return Vocabulary(tokenizer, record | {"vocabulary_size": tokenizer.vocabulary_size}, content)


def train_bpe(
    config: BpeConfig, special: Sequence[int | str | None], sample: Iterable[bytes], report: Callable[[str], None]
) -> bytes:
    """Train a byte-level BPE and return its `tokenizer.json`; deterministic in the sample, for any number of cores.

    Of the special tokens only texts are added to the vocabulary. `report` is called with a line of progress every ten
    seconds, from another thread.
    """
    started, read_bytes, is_done = time.monotonic(), 0, threading.Event()

    def read_sample() -> Iterator[str]:
        nonlocal read_bytes
        for document in sample:
            read_bytes += len(document)
            yield document.decode(errors="replace")

    def report_progress() -> None:
        # The library trains in one call, so only the size of the sample and the elapsed time are known.
        while not is_done.wait(_PROGRESS_SECONDS):
            seconds = time.monotonic() - started
            report(f"training a BPE: {read_bytes / 1e6:,.1f} MB of text read, {seconds:.0f} s so far")

    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=config.vocabulary_size,
        special_tokens=[token for token in dict.fromkeys(special) if isinstance(token, str)],
        # All 256 bytes are in the vocabulary, so that any text can be encoded; sorted, so that ids do not depend on a
        # set's order.
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    thread = threading.Thread(target=report_progress, name="progress", daemon=True)
    thread.start()
    try:
        library.train_from_iterator(read_sample(), trainer)
    finally:
        is_done.set()
        thread.join()
    return str(library.to_str()).encode()


def sample_documents(
    pieces: Sequence[Piece], sample_bytes: int, field_name: str, skip_bad: int
) -> Generator[bytes, Any, None]:
    """Yield about `sample_bytes` of documents, from the beginnings of pieces spread evenly over the source."""
    num_sampled = min(len(pieces), max(1, sample_bytes // _MIN_SAMPLE_BYTES))
    piece_bytes = -(-sample_bytes // num_sampled)
    bad: list[BadRecord] = []
    for index in range(num_sampled):
        # Pieces are spread evenly, since sources are often sorted by language or date.
        piece = pieces[index * len(pieces) // num_sampled]
        left_bytes = piece_bytes
        for document in read_piece(piece, field_name, skip_bad, bad):
            assert isinstance(document, bytes), "a vocabulary is not trained on dialogues"
            yield document
            left_bytes -= len(document)
            if left_bytes <= 0:
                break


class Tally:
    """Counts of what this host has made in this attempt, for progress lines."""

    def __init__(self, num_pieces: int, num_earlier: int = 0) -> None:
        self._num_pieces = num_pieces
        self._num_earlier = num_earlier  # pieces made by earlier attempts
        self.counts = [0, 0, 0, 0]  # pieces, documents, tokens, bad lines
        self.first_bad = ""
        self._start_seconds = self._printed_seconds = time.monotonic()

    def add(self, finished: FinishedPiece) -> None:
        """Count a piece."""
        more = (1, finished.num_documents, finished.num_tokens, finished.num_bad)
        self.counts = _add_columns([self.counts, more])
        self.first_bad = self.first_bad or finished.first_bad

    def format_progress(self, totals: Sequence[int], now_seconds: float) -> str | None:
        """Format the counts of all hosts together, or return None if the last line is less than ten seconds old."""
        if now_seconds - self._printed_seconds < _PROGRESS_SECONDS:
            return None
        self._printed_seconds = now_seconds
        pieces, documents, tokens, _ = totals
        seconds = now_seconds - self._start_seconds
        finished = self._num_earlier + pieces
        # The rate is that of this attempt alone; earlier attempts may have had other machines.
        left_seconds = seconds / max(pieces, 1) * (self._num_pieces - finished)
        if left_seconds < 120:
            left = f"{left_seconds:.0f} s"
        else:
            left = f"{left_seconds / 60:.0f} min" if left_seconds < 7200 else f"{left_seconds / 3600:.1f} h"
        return (
            f"{finished:,} of {self._num_pieces:,} pieces; this attempt {documents:,} documents, {tokens:,} tokens, "
            f"{tokens / seconds:,.0f} tokens/s, {left} left"
        )


class Tokenise(TextJob):
    """Job that reads `config.source` and writes a corpus of tokens with its index."""

    Config = TokeniseConfig

    @property
    def total_steps(self) -> int:
        """Number of steps: thousandths of the work."""
        return ROUNDS

    @functools.cached_property
    def output(self) -> Store:
        """Directory of the corpus."""
        with self.document.errors_at("config.output"):
            return open_store(self.config.output or f"{self.store.url}/corpus")

    @functools.cached_property
    def pinned_source(self) -> str:
        """`config.source`; for a data set on the Hub, with the commit from which the corpus was or is begun."""
        with self.document.errors_at("config.source"):
            owner = read_owner(self.store)
            is_begun = owner is not None and owner.identity.get("config.source") == self.config.source
            return pin_source(self.config.source, corpus.list_labels(self.output) if is_begun else ())

    @functools.cached_property
    def files(self) -> tuple[InputFile, ...]:
        """Input files as found at the start."""
        with self.document.errors_at("config.source"):
            return find_files(self.pinned_source)

    @functools.cached_property
    def pieces(self) -> list[Piece]:
        """Pieces of the input, the units of work."""
        with self.document.errors_at("config.source"):
            return cut_into_pieces(self.files, self.config.shard_bytes, self.order_seed)

    @property
    def order_seed(self) -> int | None:
        """Seed of the order of documents; None for the order in which they are read."""
        return self.spec.seed if self.config.shuffle else None

    @functools.cached_property
    def sample_files(self) -> list[tuple[SampleSource, tuple[InputFile, ...]]]:
        """Files of each source that the vocabulary is trained on, if they are not those of `config.source`."""
        config = self.config.tokenizer
        if not isinstance(config, BpeConfig):
            return []
        found = []
        for index, sample in enumerate(config.sources):
            with self.document.errors_at(f"config.tokenizer.sources.{index}.source"):
                found.append((sample, find_files(sample.source)))
        return found

    @functools.cached_property
    def vocabulary(self) -> Vocabulary:
        """Tokenizer. One that the job trains exists from `prepare` on."""
        with self.document.errors_at("config.tokenizer"):
            if isinstance(self.config.tokenizer, BpeConfig):
                return _load_trained_vocabulary(self.output)
            return _load_vocabulary(self.config.tokenizer)

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids; for a tokenizer that the job trains, its upper bound."""
        config = self.config.tokenizer
        return config.vocabulary_size if isinstance(config, BpeConfig) else self.vocabulary.tokenizer.vocabulary_size

    @property
    def least_vocabulary_size(self) -> int:
        """Number of token ids; for a tokenizer that the job trains, which begins with all bytes, its lower bound."""
        return 256 if isinstance(self.config.tokenizer, BpeConfig) else self.vocabulary_size

    @functools.cached_property
    def separator(self) -> int | None:
        """Id of the token that ends every document."""
        with self.document.errors_at("config.separator"):
            return self.vocabulary.find_token(self.config.separator)

    @functools.cached_property
    def begin(self) -> int | None:
        """Id of the token that begins every document."""
        with self.document.errors_at("config.begin"):
            return self.vocabulary.find_token(self.config.begin)

    @functools.cached_property
    def chat(self) -> ChatReader | None:
        """Reader of dialogues; None if documents are plain text."""
        with self.document.errors_at("config.chat.template"):
            return None if self.config.chat is None else load_chat(self.config.chat)

    @property
    def tokenizer_digest(self) -> str:
        """Digest of everything that maps text to ids: the tokenizer and the chat template."""
        return combine_digests(self.vocabulary.sha256, self.chat)

    def find_text(self) -> None:
        """Find the input files, and check the keys that depend on their format."""
        _validate_keys(self.config, self.files[0].format, self.document)

    def setup(self, hosts: Hosts) -> None:
        """Find the input files and load the tokenizer. Every process must call this.

        Raises:
            InvalidError: they cannot be used, or differ between processes; on every process.
        """
        # Only process 0 resolves the revision, because a branch on the Hub may move meanwhile.
        self.pinned_source = hosts.run_on_main(lambda: self.pinned_source)
        # If the source matched the job's own output, it would be different at the next attempt.
        own = [f"{self.store.url}/{name}" for name in _RUN_FILES]
        own += [f"{self.output.url}/{name}" for name in corpus.NAMES]
        if (matched := next((path for path in own if would_match(self.config.source, path)), None)) is not None:
            raise self.document.error(
                "config.source",
                f"{self.config.source} matches files that this job writes, such as {matched}; use a narrower source, "
                "or another directory and output",
            )
        self.find_text()
        with self.document.errors_at("config.source"):
            if {self.files[0].format, *(files[0].format for _, files in self.sample_files)} & {"parquet", "arrow"}:
                import_extra("pyarrow")
        # Compared on all hosts, because pieces are distributed by number, so every host must have the same pieces.
        inputs = [compute_fingerprint(self.files), len(self.pieces), self._sample_fingerprint()]
        if not isinstance(self.config.tokenizer, BpeConfig):
            _ = self.separator, self.begin
            inputs.append(self.tokenizer_digest)
        gathered = hosts.gather(inputs)
        different = [process for process, other in enumerate(gathered) if other != gathered[0]]
        if different:
            raise DataError(f"processes {different} see other input files or another tokenizer than process 0")
        hosts.run_on_main(self._validate_output)

    def has_output(self) -> bool:
        """Return True if a piece is finished."""
        return any(name.isdecimal() for name in corpus.list_finished(self.output))

    def discard_output(self) -> None:
        """Remove the tokenizer and the lists of an earlier spec, if no piece is finished."""
        owner = read_owner(self.store)
        if owner is not None and not self.has_output():
            corpus.discard(self.output, owner.id)

    def prepare(self) -> None:
        """Take ownership of the output and write the tokenizer, which process 0 trains if needed; others wait."""
        self.attempt.hosts.run_on_main(self._begin_output)
        _ = self.separator, self.begin

    def init(self) -> Any:
        """Return the state at step 0: a digest of the corpus, zero until the corpus is complete.

        The digest makes the fingerprint of the state identify the corpus. The step is the progress.
        """
        return {"index": jnp.zeros(_DIGEST_WORDS, jnp.uint32)}

    def identity(self) -> Trajectory:
        """Return the keys of the trajectory and digests of the files that they name."""
        found = super().identity() | {
            "config.source.files": hash_entries(corpus.identify_sources(self.output, self.files))
        }
        if self.chat is not None and self.chat.template is not None:
            found |= {"config.chat.template.sha256": self.chat.template.sha256}
        if isinstance(self.config.tokenizer, BpeConfig):
            sample = self._sample_fingerprint()
            return found | ({"config.tokenizer.sources.files": sample} if sample else {})
        return found | {"config.tokenizer.sha256": self.vocabulary.sha256}

    def resolved_spec(self) -> ExecutionSpec:
        """Return the spec with the output filled in."""
        spec = super().resolved_spec()
        return spec.model_copy(update={"config": spec.config | {"output": self.output.url}})

    def run(self) -> None:
        """Make the pieces of each step, and the index in the last one."""
        hosts = self.attempt.hosts
        touched = hosts.run_on_main(lambda: _pack_bits(corpus.list_touched(self.output, self.files), len(self.files)))
        self._validate_touched(_unpack_bits(touched))
        hosts.run_on_main(lambda: corpus.write_times(self.output, self.files))
        # Process 0 decides which pieces are unfinished, so that all hosts distribute the same list.
        unfinished = _unpack_bits(hosts.run_on_main(self._find_unfinished))
        own = unfinished[hosts.process_id :: hosts.num_processes]
        read_here = {part.file for piece in own for part in self.pieces[piece]}
        duplicates = self._find_duplicates() if self.config.deduplicate and unfinished else None
        tally = Tally(len(self.pieces), len(self.pieces) - len(unfinished))
        num_files = len(self.files)
        with contextlib.closing(self._encode(own, duplicates)) as stream:
            while self.step < ROUNDS:
                # With fewer pieces than steps most steps make nothing, and cost next to nothing.
                end = len(self.pieces) * (self.step + 1) // ROUNDS
                while own and own[0] < end:
                    tally.add(self._make_piece(own.pop(0), stream))
                if unfinished and unfinished[0] < end:
                    unfinished = [piece for piece in unfinished if piece >= end]
                    self._synchronise(tally)
                if self.step + 1 == ROUNDS:
                    # A file may have been edited between its pieces, or while one was read.
                    with self.attempt.progress.report_phase(_FINISH):
                        own_files = ((index, file) for index, file in enumerate(self.files) if file in read_here)
                        touched = [index for index, file in own_files if file.was_touched()]
                        merged = hosts.reduce(
                            _pack_bits(touched, num_files),
                            lambda texts: _pack_bits([bit for text in texts for bit in _unpack_bits(text)], num_files),
                        )
                    self._validate_touched(_unpack_bits(merged))
                    with self.attempt.progress.report_phase(_FINISH):
                        self.state = self._make_state(hosts.run_on_main(self._finish_corpus))
                self.step += 1
                self.save_or_stop()

    def result(self) -> JsonObject:
        """Return the content of `result.json`, with the number of tokens."""
        index = corpus.read_index(self.output)
        return super().result() | {"tokens": index.num_tokens}

    def _validate_output(self) -> None:
        """Refuse an output of another run, or one begun from other files. Process 0 only; writes nothing."""
        with self.document.errors_at("config.output"):
            owner = read_owner(self.store)
            corpus.validate_owner(self.output, self.store.url, None if owner is None else owner.id)
        is_free = is_unstarted(self.store) and not self.has_output()
        with self.document.errors_at("config.source"):
            if not is_free:
                corpus.validate_sources_unchanged(self.output, self.files)
        if is_free or not self.output.exists(corpus.OWNER):
            self._probe_source()

    def _probe_source(self) -> None:
        """Read the source up to its first document, so that a wrong key is refused before the directory is claimed."""
        bad: list[BadRecord] = []
        with start_renderer(self.chat) as renderer:
            parts = (read_documents(part, None, self.config.field, renderer) for piece in self.pieces for part in piece)
            for found in itertools.islice(itertools.chain.from_iterable(parts), _PROBED_RECORDS):
                if not isinstance(found, BadRecord):
                    return
                bad.append(found)
                if len(bad) > self.config.skip_bad:
                    raise DataError(format_too_many(str(bad[0]), len(bad), self.config.skip_bad))

    def _sample_fingerprint(self) -> str:
        """Return a digest of the files that the vocabulary is trained on; "" if they are those of `config.source`."""
        files = [file for _, files in self.sample_files for file in files]
        return compute_fingerprint(files) if files else ""

    def _sample_documents(self, config: BpeConfig) -> Iterator[bytes]:
        key, skip_bad = self.config.field, self.config.skip_bad
        if not config.sources:
            yield from sample_documents(self.pieces, config.sample_bytes, key, skip_bad)
        for sample, files in self.sample_files:
            pieces = cut_into_pieces(files, self.config.shard_bytes)
            yield from sample_documents(pieces, config.sample_bytes // len(config.sources), sample.field, skip_bad)

    def _begin_output(self) -> None:
        """Take ownership of the output, train the tokenizer if need be, and write it. Process 0 only."""
        output, attempt, config = self.output, self.attempt, self.config
        with self.document.errors_at("config.output"):
            try:
                if output.root is None:
                    probe_store(output)
                corpus.take_ownership(output, self.store.url, self.spec.name, attempt.run_id)
            except PermissionError as error:
                raise InvalidError(f"{output.url} cannot be written: no permission ({error})") from error
        corpus.write_sources(output, self.files)
        if isinstance(config.tokenizer, BpeConfig) and not output.exists(TOKENIZER_FILES["hf"]):
            attempt.say(f"{self.spec.name}: training a BPE of {config.tokenizer.vocabulary_size:,} tokens")
            sample, added = self._sample_documents(config.tokenizer), (config.separator, config.begin)
            content = train_bpe(config.tokenizer, added, sample, lambda line: attempt.say(f"{self.spec.name}: {line}"))
            output.write(TOKENIZER_FILES["hf"], content)
            size, wanted = self.vocabulary.tokenizer.vocabulary_size, config.tokenizer.vocabulary_size
            if size < wanted:
                attempt.say(
                    f"{self.spec.name}: goes on with a vocabulary of {size:,} tokens instead of {wanted:,}, since the "
                    "sample has text for no more; a larger sample or text would give more"
                )
        with self.document.errors_at("config.tokenizer"):
            corpus.validate_same_tokenizer(output, self.tokenizer_digest)
        if self.vocabulary.content is not None:
            corpus.write_once(output, self.vocabulary.record["file"], self.vocabulary.content)
        if self.chat is not None and self.chat.template is not None:
            # Exports of runs that train on the corpus include the template.
            template, special = self.chat.template, self.vocabulary.list_special_tokens()
            settings = template.names | {"chat_template": template.source}
            if (end_of_turn := find_end_of_turn(template, special)) is not None:
                settings[END_OF_TURN] = end_of_turn
            corpus.write_once(output, TOKENIZER_CONFIG, encode_json(settings))

    def _validate_touched(self, indices: Sequence[int]) -> None:
        """Refuse these files, given by index, if finished pieces were made of other documents. Every process calls it.

        Each process compares a share of the pieces. Nothing is read if no file was touched.
        """
        if not indices:
            return
        hosts, touched = self.attempt.hosts, {self.files[index] for index in indices}
        found = ""
        with start_renderer(self.chat) as renderer:
            for piece in range(hosts.process_id, len(self.pieces), hosts.num_processes):
                parts = self.pieces[piece]
                file = next((part.file for part in parts if part.file in touched), None)
                if file is None or found:
                    continue
                with self.attempt.progress.report_phase(_TOKENISE):
                    documents = read_piece(parts, self.config.field, sys.maxsize, [], renderer)
                    found = file.where if corpus.has_changed(self.output, piece, documents) else ""
        with self.attempt.progress.report_phase(_TOKENISE):
            changed = next(filter(None, hosts.gather(found)), None)
        if changed is not None:
            with self.document.errors_at("config.source"):
                raise DataError(f"{changed} has changed since this job began; restore it, or use another directory")

    def _find_unfinished(self) -> str:
        """Return a bit for each piece without a record, packed, in hexadecimal. Process 0 only."""
        finished = corpus.list_finished(self.output)
        unfinished = [piece for piece in range(len(self.pieces)) if corpus.format_piece(piece) not in finished]
        return _pack_bits(unfinished, len(self.pieces))

    def _find_duplicates(self) -> DocumentSet:
        """Return the documents to leave out. Every host computes digests of its pieces; process 0 compares them."""
        hosts, output, total = self.attempt.hosts, self.output, len(self.pieces)
        names = [f"{corpus.format_piece(piece)}{corpus.DIGESTS}" for piece in range(total)]

        def find_missing() -> str:
            present = {*output.list_names("")}
            is_found = corpus.DUPLICATES in present
            return np.packbits([not is_found and name not in present for name in names]).tobytes().hex()

        def compare() -> None:
            if not output.exists(corpus.DUPLICATES):
                output.write(corpus.DUPLICATES, corpus.encode_set(corpus.mark_duplicates(output, names, report)))

        def report(done: int, number: int) -> None:
            self.attempt.say(f"{self.spec.name}: compared {done:,} of {number:,} documents")

        missing, printed_seconds = _unpack_bits(hosts.run_on_main(find_missing)), time.monotonic()
        with start_renderer(self.chat) as renderer:
            # The hosts synchronise repeatedly, so that none waits long for the others.
            for number in range(_HASH_ROUNDS if missing else 0):
                first, last = (len(missing) * (number + i) // _HASH_ROUNDS for i in range(2))
                for piece in missing[first:last][hosts.process_id :: hosts.num_processes]:
                    with self.attempt.progress.report_phase(_TOKENISE):
                        parts, skip_bad = self.pieces[piece], self.config.skip_bad
                        documents = read_piece(parts, self.config.field, skip_bad, [], renderer)
                        output.write(names[piece], corpus.compute_digests(documents))
                if first < last:
                    with self.attempt.progress.report_phase(_TOKENISE):
                        hosts.barrier()
                if time.monotonic() - printed_seconds > _PROGRESS_SECONDS:
                    printed_seconds = time.monotonic()
                    self.attempt.say(f"{self.spec.name}: hashed {total - len(missing) + last:,} of {total:,} pieces")
        with self.attempt.progress.report_phase(_TOKENISE):
            hosts.run_on_main(compare)
        return corpus.decode_set(output.read(corpus.DUPLICATES), f"{output.url}/{corpus.DUPLICATES}")

    def _encode(self, pieces: Sequence[int], duplicates: DocumentSet | None) -> Generator[EncodedBatch]:
        config = self.config
        work = [(piece, self.pieces[piece]) for piece in pieces]
        options = EncodingOptions(
            field=config.field,
            shard_bytes=config.shard_bytes,
            skip_bad=config.skip_bad,
            begin=self.begin,
            separator=self.separator,
            chat=self.chat,
            seed=self.order_seed,
            duplicates=duplicates,
        )
        return encode_pieces(work, self.vocabulary.tokenizer, options)

    def _make_piece(self, piece: int, stream: Iterator[EncodedBatch]) -> corpus.FinishedPiece:
        if self.attempt.hosts.is_main:
            self.attempt.fence.check_locally()
        try:
            with self.attempt.progress.report_phase(_TOKENISE):
                return corpus.write_piece(self.output, piece, self.tokenizer_digest, self._report_progress(stream))
        except FileNotFoundError:
            if self.attempt.hosts.is_main:
                # A newer attempt may have removed the temporary file that this one was writing: raise that error
                # instead.
                self.attempt.fence.check()
            raise

    def _report_progress(self, stream: Iterator[EncodedBatch]) -> Iterator[EncodedBatch]:
        """Yield the batches, each with a watchdog deadline of its own, since a piece may be large."""
        while True:
            with self.attempt.progress.report_phase(_TOKENISE):
                batch = next(stream)
            yield batch

    def _synchronise(self, tally: Tally) -> None:
        """Exchange counts at the end of a step with work, which also keeps the hosts near one step for a stop."""
        with self.attempt.progress.report_phase(_TOKENISE):
            totals = self.attempt.hosts.reduce(tally.counts, _add_columns)
        num_bad = totals[-1]
        if num_bad > self.config.skip_bad:
            raise DataError(format_too_many(tally.first_bad or "lines without text", num_bad, self.config.skip_bad))
        line = tally.format_progress(totals, time.monotonic())
        if line is not None:
            self.attempt.say(f"{self.spec.name}: {line}")

    def _make_state(self, digest: str) -> Any:
        """Return the final state. Needs no compiled program and no communication: every host has the same values."""
        words = np.frombuffer(bytes.fromhex(digest), ">u4").astype(np.uint32)
        sharding = self.state["index"].sharding
        return {"index": jax.make_array_from_callback(words.shape, sharding, lambda place: words[place])}

    def _finish_corpus(self) -> str:
        """Write the index and return its digest. Process 0 only."""
        self.attempt.fence.check()
        vocabulary, separator, url, name = self.vocabulary, self.separator, self.output.url, self.spec.name
        dtype = vocabulary.tokenizer.dtype
        finished = corpus.read_finished(self.output, len(self.pieces), self.tokenizer_digest, dtype.itemsize)
        num_bad = sum(piece.num_bad for piece in finished)
        first_bad = next((piece.first_bad for piece in finished if piece.num_bad), "")
        if num_bad > self.config.skip_bad:
            raise DataError(format_too_many(first_bad, num_bad, self.config.skip_bad))
        shards = tuple(shard for piece in finished for shard in piece.shards)
        size, begin = vocabulary.tokenizer.vocabulary_size, self.begin
        index = CorpusIndex(dtype.name, size, vocabulary.record, separator, shards, begin)
        if not index.num_tokens:
            raise self.document.error("config.source", f"{self.config.source} holds no document, so no token")
        corpus.remove_leftovers(self.output)
        self.output.write(INDEX, index.encode())
        if num_bad:
            self.attempt.say(f"{name}: skipped {num_bad} lines without text, the first is {first_bad}")
        if self.config.deduplicate:
            num_duplicates = sum(piece.num_duplicates for piece in finished)
            self.attempt.say(f"{name}: left out {num_duplicates:,} documents that repeat an earlier one")
        if num_left_out := sum(piece.num_left_out for piece in finished):
            self.attempt.say(f"{name}: left out {num_left_out} empty documents, since there is no separator")
        num_dropped, num_cut = sum(piece.num_dropped for piece in finished), sum(piece.num_cut for piece in finished)
        if self.chat is not None and num_dropped + num_cut:
            limit = f"{self.chat.max_tokens:,} tokens"
            self.attempt.say(f"{name}: dialogues of more than {limit}: {num_cut} cut, {num_dropped} dropped")
        train_on = " and config.data.train_on: answers" if index.has_completion_mask else ""
        # In a run with `config.data.tokenise` the training follows by itself.
        hint = "" if self.document.written else f"; train on it with config.data.source: {url}{train_on}"
        self.attempt.say(
            f"{name}: {url} holds {index.num_tokens:,} tokens of {index.num_documents:,} documents, vocabulary "
            f"{index.vocabulary_size:,} ({dtype}){hint}"
        )
        return index.digest


def _pack_bits(positions: Sequence[int], size: int) -> str:
    """Return a bit string of `size` bits with those at the positions set, packed, in hexadecimal."""
    bits = np.zeros(size, bool)
    bits[list(positions)] = True
    return np.packbits(bits).tobytes().hex()


def _unpack_bits(text: str) -> list[int]:
    """Return the positions of the bits that are set in a packed bit string."""
    return [int(place) for place in np.flatnonzero(np.unpackbits(np.frombuffer(bytes.fromhex(text), np.uint8)))]


def _add_columns(rows: Sequence[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip(*rows, strict=True)]


def _validate_keys(config: TokeniseConfig, file_format: FileFormat, document: Document) -> None:
    """Raise a spec error for keys that do not apply to this file format, or that files and tokenizer do not allow."""
    is_read = file_format != "text" and config.chat is None
    if not is_read and config.field != TokeniseConfig.model_fields["field"].default:
        reason = f"{config.source} names text files" if file_format == "text" else "chat reads whole records"
        raise document.error("config.field", f"is {config.field}, but nothing reads it: {reason}; remove it")
    if config.chat is None:
        return
    if file_format == "text":
        raise document.error(
            "config.chat", f"needs lines of JSON or rows of a table, but {config.source} names text files"
        )
    if config.tokenizer.kind not in KINDS_WITH_SPANS:
        raise document.error(
            "config.tokenizer.kind",
            f"is {config.tokenizer.kind}; dialogues need one of {', '.join(KINDS_WITH_SPANS)}, which map tokens to "
            "characters",
        )
