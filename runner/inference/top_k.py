"""Most likely tokens of a model for each token of a source, written as a corpus with predictions of a teacher.

1. `teacher.json` is created first: the model, the data and K. An output with another one is refused.
2. A shard is a fixed range of tokens. Its record `00007.json` is written after its files, and a shard that has a record
   is not made again. Each write is atomic, so a kill loses at most the work on one shard.
3. `index.json` is written last, when the files of all shards have been read back. It completes the corpus.

Shape legend: B sequences of a batch, T sequence length, K most likely tokens, V vocabulary.
"""

from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from runner.attempts.layout import read_owner
from runner.config import TokenSource
from runner.console import warn
from runner.data.corpus_index import (
    COMPLETION_DTYPE,
    ENDS_DTYPE,
    INDEX,
    CorpusIndex,
    CorpusShard,
    make_top_dtype,
    parse_shard,
    read_tokenizer,
)
from runner.data.packing import PACKINGS, Examples
from runner.data.sampling import TokenSplit
from runner.data.source import Source
from runner.data.source_files import find_corpus
from runner.data.token_files import LOSS_WEIGHT
from runner.distributed.agreement import Hosts
from runner.errors import DataError, InvalidError
from runner.evaluation.generation import TextCodec, infer_vocabulary_size, make_variables, replicate
from runner.inference.evaluate import DATA_SET, load_evaluation_data, make_evaluation_context
from runner.inference.open_run import ReadOnlyRun
from runner.parallel.mesh import BATCH_AXES, count_batch_shards, use_sharding_rules
from runner.storage import JsonObject, create_file, encode_json, open_store, parse_json, read_json
from runner.train.loss import document_arguments

TEACHER = "teacher.json"
SHARD_BYTES = 1 << 26  # of the predictions in a shard, about
_TOKENS_MAX_UINT16 = 1 << 16


@dataclass(frozen=True)
class Teacher:
    """Content of `teacher.json` and of the key `teacher` of the index: a corpus is never a mixture of two."""

    run: str  # id of the run
    step: int
    weights: str
    data: str  # fingerprint of the tokens
    packing: str
    sequence_length: int
    top_k: int


class TopKWriter:
    """Writer of the K most likely tokens of a run's model, a `CheckpointEvaluator` of one step."""

    def __init__(self, run: ReadOnlyRun, source: TokenSource, hosts: Hosts, weights: str, top_k: int, output: str):
        """Prepare the writer. Raises InvalidError if the run has no language model or too few ids."""
        self._run, self._hosts, self._data_config = run, hosts, run.job.config.data
        self.weights, self._top_k, self._store = weights, top_k, open_store(output)
        if not self._data_config.has_tokens:
            raise InvalidError(f"{run.store.url}: --save-top-k needs a language model, and its data are arrays")
        self._length = self._data_config.tokens_per_example
        context, self.abstract = make_evaluation_context(run)
        model, mesh = context.model, context.mesh
        try:
            self._num_ids = infer_vocabulary_size(model, make_variables(self.abstract), self._length)
        except InvalidError as error:
            raise InvalidError(f"{run.store.url}: --save-top-k needs a language model: {error}") from error
        if top_k > self._num_ids:
            raise InvalidError(
                f"--save-top-k {top_k}: the model's vocabulary has {self._num_ids:,} ids; use at most those"
            )
        data = load_evaluation_data(run, source)
        (tokens,) = data.dataset.sources
        assert isinstance(tokens, Source), "the data are tokens"
        self._source, self._source_name, self._codec = tokens, source.source, data.codecs[DATA_SET]
        if unknown := sorted({*tokens.fields} - {LOSS_WEIGHT}):
            raise InvalidError(f"--data {source.source}: has the field {unknown[0]}, which a corpus cannot hold")
        self._id_dtype = "uint16" if self._num_ids <= _TOKENS_MAX_UINT16 else "uint32"
        self._dtype = make_top_dtype(top_k, self._id_dtype)
        # Whole windows, so that shards do not change the windows of packing: concatenate.
        self._shard_tokens = max(1, SHARD_BYTES // self._dtype.itemsize // self._length) * self._length
        self._num_shards = -(-(len(tokens) - 1) // self._shard_tokens)
        self._batch_size = context.sequences_per_device * count_batch_shards(mesh)
        self._mesh = mesh

        @jax.jit
        def predict(variables: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
            documents: Any = document_arguments(model.apply, batch)
            logits_BxTxV: Any = model.apply(variables, batch["x"], **documents, deterministic=True)
            logits_BxTxV = logits_BxTxV.astype(jnp.float32)
            top_BxTxK, ids_BxTxK = jax.lax.top_k(logits_BxTxV, top_k)
            log_sum_BxT = jax.nn.logsumexp(logits_BxTxV, axis=-1)
            return replicate(log_sum_BxT, mesh), replicate(top_BxTxK, mesh), replicate(ids_BxTxK, mesh)

        self._predict = predict

    def evaluate(self, step: int, weights: Any) -> JsonObject | None:
        """Write what is missing of the corpus, and return its size; None on processes other than 0."""
        # The id is read on process 0 alone; all have the same data.
        data = self._data_config
        owner = self._hosts.run_on_main(lambda: getattr(read_owner(self._run.store), "id", ""))
        content = self._source.fingerprint, data.packing, self._length, self._top_k
        teacher = Teacher(owner, step, self.weights, *content)
        variables = make_variables(weights)
        finished: list[str] = self._hosts.run_on_main(lambda: self._begin(teacher))
        for number in range(self._num_shards):
            if f"{number:05}.json" in finished:
                continue
            # Every process computes, and process 0 writes.
            records = self._compute_records(number, variables)
            if self._hosts.is_main:
                self._write_shard(number, records)
                warn(f"{self._store.url}: shard {number + 1} of {self._num_shards}")
        if not self._hosts.is_main:
            return None
        index = self._complete(teacher)
        return {"step": step, "tokens": index.num_tokens, "top_k": self._top_k, "output": self._store.url}

    def _begin(self, teacher: Teacher) -> list[str]:
        """Return the names in the output, which belongs to this teacher now. Raises InvalidError if it cannot."""
        names, content = self._store.list_names(""), asdict(teacher)
        if TEACHER not in names and (others := sorted(name for name in names if not name.startswith("."))):
            raise InvalidError(
                f"-o {self._store.url}: holds {others[0]}, which this command has not written; use another"
            )
        try:
            create_file(self._store, TEACHER, encode_json(content))
        except FileExistsError:
            try:
                found = read_json(self._store, TEACHER)
            except ValueError as error:
                raise InvalidError(f"{self._store.url}/{TEACHER} is damaged ({error}); use another output") from error
            if differing := next((key for key, value in content.items() if found.get(key) != value), None):
                raise InvalidError(
                    f"-o {self._store.url}: holds another data set, whose {differing} is {found.get(differing)!r} and "
                    f"not {content[differing]!r}; use another output, or the same arguments as before"
                ) from None
        return names

    def _get_bounds(self, number: int) -> tuple[int, int]:
        """Return the tokens of a shard as a range of positions; the first token is no target."""
        end = min((number + 1) * self._shard_tokens + 1, len(self._source))
        return number * self._shard_tokens + (number > 0), end

    def _compute_records(self, number: int, variables: Any) -> np.ndarray:
        start, stop = self._get_bounds(number)
        records = np.zeros(stop - start, self._dtype)
        records["log_sum"] = np.inf
        first = number * self._shard_tokens
        split = TokenSplit(first, stop - first, self._length)
        examples: Examples = PACKINGS[self._data_config.packing](self._source, split)
        sharding = NamedSharding(self._mesh, PartitionSpec(BATCH_AXES))
        for begin in range(0, examples.num_examples, self._batch_size):
            # One shape for all batches: the last example is repeated at the end.
            indices = np.minimum(np.arange(begin, begin + self._batch_size), examples.num_examples - 1)
            batch = {
                name: jax.make_array_from_callback(values.shape, sharding, np.ascontiguousarray(values).__getitem__)
                for name, values in examples.read(indices).items()
                if name in ("x", "segment", "position")
            }
            with use_sharding_rules(self._mesh):
                found = jax.device_get(self._predict(variables, batch))
            for row, index in enumerate(indices.tolist()):
                offset = 0
                for position, length in examples.get_spans(index).tolist():
                    # The prediction after the input at `position` is that of the token after it.
                    target = slice(position + 1 - start, position + 1 - start + length)
                    for name, values in zip(("log_sum", "logits", "ids"), found, strict=True):
                        records[name][target] = values[row, offset : offset + length]
                    offset += length
        return records

    def _write_shard(self, number: int, records: np.ndarray) -> None:
        start, stop = self._get_bounds(number)
        name = f"{number:05}"
        ids = self._source.read(start, stop).astype(self._dtype["ids"].base)
        ends = self._source.document_ends(start, stop) if self._source.has_documents else np.zeros(0, np.int64)
        # A document lies within one shard.
        ends = np.unique([*ends, stop]) - start
        files = {"bin": ids, "ends": ends.astype(ENDS_DTYPE), "top": records}
        if LOSS_WEIGHT in self._source.fields:
            weights = self._source.read_field(LOSS_WEIGHT, start, stop)
            if not np.isin(weights, (0, 1)).all():
                raise DataError(
                    f"--data {self._source_name}: has loss weights other than 0 and 1, which no corpus holds"
                )
            files["answers"] = weights.astype(COMPLETION_DTYPE)
        for suffix, array in files.items():
            self._store.write(f"{name}.{suffix}", array.tobytes())
        shard = CorpusShard.from_arrays(name, ids, files["ends"], files.get("answers"), records)
        self._store.write(f"{name}.json", encode_json(shard.to_json()))

    def _complete(self, teacher: Teacher) -> CorpusIndex:
        """Read the files of all shards back, and write the index. Raises DataError if one is damaged."""
        store, shards = self._store, []
        for number in range(self._num_shards):
            name = f"{number:05}"
            try:
                shards.append(shard := parse_shard(parse_json(store.read(f"{name}.json"))))
                found = asdict(shard)
                digests = {"bin": "tokens", "ends": "ends", "answers": "answers", "top": "top"}
                wanted = {f"{name}.{suffix}": found[f"{key}_crc32c"] for suffix, key in digests.items()}
                damaged = [file for file, digest in wanted.items() if digest and store.compute_digest(file) != digest]
            except (FileNotFoundError, ValueError, TypeError) as error:
                raise DataError(f"{store.url}/{name}.json: {error}; remove it and run again") from error
            if damaged:
                raise DataError(f"{store.url}/{damaged[0]} is damaged; remove {name}.json and run again")
        codec = self._codec
        kind: JsonObject = codec.kind if isinstance(codec, TextCodec) else {"kind": "unknown"}
        separator, begin = (codec.separator, codec.begin) if isinstance(codec, TextCodec) else (None, None)
        if "file" in kind and (corpus := find_corpus(self._source_name)) is not None:
            store.write(kind["file"], read_tokenizer(kind, open_store(corpus)))
        index = CorpusIndex(self._id_dtype, self._num_ids, kind, separator, tuple(shards), begin, asdict(teacher))
        # A write that was killed leaves a temporary file.
        for leftover in [each for each in store.list_names("") if each.startswith(".") and each.endswith(".tmp")]:
            store.remove(leftover)
        store.write(INDEX, index.encode())
        return index


def format_record(record: JsonObject) -> list[str]:
    """Format the record of a finished corpus for the terminal."""
    return [
        f"step {record['step']}: {record['tokens']:,} tokens, each with the {record['top_k']} most likely ones at its "
        f"place, in {record['output']}"
    ]
