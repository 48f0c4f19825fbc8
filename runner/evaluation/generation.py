"""Text generation: codecs between text and tokens, sampling, decoders, and the evaluator that writes samples.

**Window.** The next token is predicted from the tokens in a window: at first the last `length` tokens of the prompt,
then each new token too. When the window is full, its last half is kept and treated as the beginning of a text. A text
may therefore become arbitrarily long, and on average about one token is read again for each new one.

**Decoders.** A model with `init_cache` reads each token once, see `experiments.gpt`. Any other model reads the whole
window for each token, padded to one length, so that it is compiled once.

**Sampling.** Random numbers are assigned to token ids, not to ranks: logits that differ only by rounding give the same
token, unless two of them are nearly equal.

Shape legend: B batch, T tokens, V vocabulary.
"""

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from runner.config import DataConfig, TokenSource
from runner.data import ByteTokenizer, Tokenizer
from runner.data.corpus_index import INDEX, CorpusIndex
from runner.data.open_source import SEPARATORS, load_text
from runner.data.remote import CacheSettings
from runner.data.source_files import find_corpus, find_source, wrap_source_errors
from runner.data.tokenizers import BatchTokenizer, load_tokenizer
from runner.distributed.agreement import Hosts
from runner.errors import DataError, InvalidError
from runner.metrics.meta import TEXT_MAX_CHARACTERS
from runner.parallel.mesh import count_batch_shards, use_sharding_rules
from runner.spec import is_class_path
from runner.storage import JsonObject, default_cache_directory, open_store
from runner.train.evaluators import EvaluationMetrics

# Tokens before new ones that are decoded again with them: a tokenizer may write a token by the one before it.
_CONTEXT_TOKENS = 5
_REPLACEMENT = "\ufffd"
_CHUNK_TOKENS = 256  # tokens of a prompt that are read at a time, so that their logits need little memory
_SAMPLE = "val/sample"

# (logits_V, index of the token in the text) -> id
TokenChooser = Callable[[jax.Array, int], jax.Array]
# (window, number of its last tokens that are new) -> float32 logits_V of the token after it
_NextTokenLogits = Callable[[Sequence[int], int], jax.Array]


# Codecs.


@dataclass(frozen=True)
class TextCodec:
    """Meaning of the tokens of a source."""

    tokenizer: Tokenizer | BatchTokenizer  # tokenizer that made the tokens
    separator: int | None  # id that ends a document, if any
    kind: JsonObject  # record that identifies the tokenizer; sources with the same ids have the same
    begin: int | None = None  # id that begins a document, if any

    @property
    def is_of_bytes(self) -> bool:
        """True if each token is a byte."""
        return bool(self.kind.get("kind") == "bytes")


def load_source_codec(source: TokenSource, data: DataConfig) -> TextCodec:
    """Return the codec of a source of `data`; text is read only for its characters. Raises DataError or OSError."""
    name = f"data.source={source.source}"
    if is_class_path(source.source):
        raise DataError(f"{name}: is a class, which brings ids and no tokenizer")
    with wrap_source_errors(source.source):
        if (corpus := find_corpus(source.source)) is not None:
            store = open_store(corpus)
            index = CorpusIndex.decode(store.read(INDEX), f"{corpus}/{INDEX}")
            record = {key: value for key, value in index.tokenizer.items() if key != "vocabulary_size"}
            return TextCodec(load_tokenizer(index.tokenizer, store), index.separator, record, index.begin)
    # Text: the tokenizer is that of the config.
    files = find_source(source.source)
    if files.holds_tokens:
        raise DataError(f"{name}: names files of token ids, which say nothing of their tokenizer")
    separator = SEPARATORS[data.document_separator]
    tokenizer: Tokenizer = ByteTokenizer()
    if data.tokenizer == "characters":
        cache = CacheSettings(default_cache_directory(), data.cache_bytes)
        tokenizer = load_text(files, data.tokenizer, cache, separator).tokenizer
    kind = {"kind": data.tokenizer} | ({} if tokenizer.characters is None else {"characters": tokenizer.characters})
    try:
        separator_id = next(iter(tokenizer.encode_file(separator).tolist()), None)
    except DataError:
        separator_id = None  # the characters of a single text need not contain the separator
    return TextCodec(tokenizer, separator_id, kind)


def load_data_codec(data: DataConfig) -> TextCodec:
    """Return the codec of the training data. Raises `DataError` as `load_source_codec`, or if sources differ."""
    codecs = [load_source_codec(source, data) for source in data.sources]
    if other := next((index for index, codec in enumerate(codecs) if codec.kind != codecs[0].kind), None):
        names = data.sources[0].name, data.sources[other].name
        raise DataError(f"data.mixture: {names[0]} and {names[1]} have different tokenizers")
    return codecs[0]


def find_start_token(codec: TextCodec, data: DataConfig) -> int:
    """Return the token to which the model continues a text without a prompt.

    It is the token that begins documents, or else their separator, the newline, or id 0. If examples hold whole
    documents, the separator is never an input of the model, so it is not used.
    """
    if codec.begin is not None:
        return codec.begin
    if codec.separator is not None and data.packing == "concatenate":
        return codec.separator
    try:
        return int(codec.tokenizer.encode("\n")[-1])
    except (DataError, IndexError):  # characters without a newline, or a tokenizer that drops it
        return 0


def encode_prompt(codec: TextCodec, prompt: str) -> list[int]:
    """Return the ids of a prompt, which need not be UTF-8, after the token that begins documents. Raises DataError."""
    ids = [int(token) for token in codec.tokenizer.encode_file(os.fsencode(prompt))]
    return ids if codec.begin is None or ids[:1] in ([], [codec.begin]) else [codec.begin, *ids]


def parse_ids(prompt: str, num_ids: int, key: str = "--prompt") -> list[int]:
    """Parse ids separated by spaces or commas. Raises `DataError` that names `key`."""
    words = prompt.replace(",", " ").split()
    bad = next((word for word in words if not word.isdecimal() or int(word) >= num_ids), None)
    if bad is not None:
        raise DataError(f"{key}: got {bad[:40]!r}, needs ids from 0 to {num_ids - 1} where no tokenizer is known")
    return [int(word) for word in words]


def stream_text(tokens: Iterable[int], prompt: Sequence[int], decode: Callable[[Sequence[int]], str]) -> Iterator[str]:
    """Yield the text of each token after `prompt` as soon as its characters are complete; an incomplete rest last.

    A few tokens before the new ones are always decoded with them, and their own text is removed.
    """
    ids = list(prompt[-_CONTEXT_TOKENS:])
    num_yielded = len(ids)  # number of leading ids whose text has been yielded
    for token in tokens:
        ids.append(token)
        # Decoding ids one by one would lose spaces and break characters that span tokens.
        before, text = decode(ids[:num_yielded]), decode(ids)
        # The last character is still incomplete; the next token may complete it.
        if text.endswith(_REPLACEMENT):
            continue
        yield text[len(before) :]
        ids = ids[-_CONTEXT_TOKENS:]
        num_yielded = len(ids)
    # An incomplete character at the end is shown as replacement characters.
    yield decode(ids)[len(decode(ids[:num_yielded])) :]


def stream_output(tokens: Iterable[int], prompt: Sequence[int], text: str, codec: TextCodec | None) -> Iterator[str]:
    """Yield the prompt, whose text is `text`, its continuation, and a newline; ids instead of text without a codec."""
    yield text + (" " if text and codec is None else "")
    if codec is None:
        yield from (f"{token} " for token in tokens)
    else:
        yield from stream_text(tokens, prompt, codec.tokenizer.decode)
    yield "\n"


# Sampling.


@dataclass(frozen=True)
class Sampler:
    """Settings of sampling."""

    temperature: float = 0.8  # divisor of the logits; 0: the most probable token
    top_p: float = 1.0  # the fewest most probable tokens whose probabilities add up to this are sampled from; 1: all
    seed: int = 0  # seed of the random keys; that of token i is `fold_in(key(seed), i)`

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise InvalidError(f"--temperature {self.temperature:g}: needs a number of at least 0")
        if not 0 < self.top_p <= 1:
            raise InvalidError(f"--top-p {self.top_p:g}: needs a number above 0, and at most 1")
        if not 0 <= self.seed < 1 << 32:
            raise InvalidError(f"--seed {self.seed}: needs a whole number of 0 to {(1 << 32) - 1}")

    def make_chooser(self, num_ids: int) -> TokenChooser:
        """Return a jitted `(logits_V, index of the token) -> id`, which chooses one of the first `num_ids`."""

        @jax.jit
        def choose(logits_V: jax.Array, index: jax.Array | int) -> jax.Array:
            # The vocabulary of a model may be padded beyond the ids of its tokenizer.
            logits_V = logits_V[:num_ids].astype(jnp.float32)
            if self.temperature == 0:
                return jnp.argmax(logits_V)
            key = jax.random.fold_in(jax.random.key(self.seed), index)
            return jax.random.categorical(key, filter_top_p(logits_V / self.temperature, self.top_p))

        return choose


def filter_top_p(logits_V: jax.Array, top_p: float) -> jax.Array:
    """Set all logits to -inf but those of the fewest most probable tokens whose probabilities add up to `top_p`."""
    if top_p == 1:
        return logits_V
    order_V = jnp.argsort(-logits_V)
    sorted_V = jax.nn.softmax(logits_V)[order_V]
    # A token is kept if those before it do not reach top_p yet; the most probable one always is.
    before_V = jnp.cumsum(sorted_V) - sorted_V
    is_kept_V = jnp.zeros(logits_V.shape, bool).at[order_V].set((before_V < top_p).at[0].set(True))
    return jnp.where(is_kept_V, logits_V, -jnp.inf)


def generate(
    read: _NextTokenLogits, choose: TokenChooser, prompt: Sequence[int], num_tokens: int, length: int
) -> Iterator[int]:
    """Yield `num_tokens` ids after `prompt`, which has at least one; the window has `length` tokens."""
    window = list(prompt[-length:])
    num_new = len(window)
    for index in range(num_tokens):
        token = int(choose(read(window, num_new), index))
        yield token
        window, num_new = [*window, token], 1
        if len(window) > length:
            # Dropping half at a time makes re-reading rare: the cache of a shifted window would be invalid.
            window = window[-max(1, length // 2) :]
            num_new = len(window)


# Decoders.


def make_decoder(
    model: nn.Module, weights: Any, length: int, dtype: DTypeLike, mesh: Mesh
) -> "CachedDecoder | RecomputingDecoder":
    """Return a decoder with a cache of `dtype` if the model supports one. `weights` are placed on `mesh`."""
    if hasattr(model, "init_cache"):
        return CachedDecoder(model, weights, length, dtype, mesh)
    return RecomputingDecoder(model, weights, length, mesh)


class CachedDecoder:
    """`_NextTokenLogits` that reads new tokens only, and keeps the keys and values of earlier ones."""

    def __init__(self, model: Any, weights: Any, length: int, dtype: DTypeLike, mesh: Mesh):
        self._mesh, self._chunk = mesh, min(_CHUNK_TOKENS, length)
        # Whole chunks: the last one may be padded, and no token attends to the padding that it writes after the window.
        num_positions = -(-length // self._chunk) * self._chunk
        # One sequence per batch shard, because a smaller batch cannot be sharded.
        self._make_cache = lambda: model.init_cache(count_batch_shards(mesh), num_positions, dtype)
        self._weights, self._cache = weights, None if weights is None else self._make_cache()

        # Padding must not change a recurrent state. In a cache of keys it does no harm, because the next tokens
        # overwrite it.
        takes_count = "count" in inspect.signature(type(model).__call__).parameters

        def step(weights: Any, cache: Any, tokens_BxT: jax.Array, start: jax.Array, last: jax.Array) -> Any:
            more = {"count": last + 1} if takes_count else {}
            logits_BxTxV, cache = model.apply(weights, tokens_BxT, cache=cache, start=start, **more, deterministic=True)
            return replicate(logits_BxTxV[0, last].astype(jnp.float32), mesh), cache

        self._step = jax.jit(step, donate_argnums=1)

    def set_weights(self, weights: Any) -> None:
        """Use other weights from now on; None releases the weights and the cache until the next call."""
        self._weights = weights
        self._cache = None if weights is None else self._make_cache()

    def __call__(self, window: Sequence[int], num_new: int) -> jax.Array:
        """Return the logits of the next token, as `_NextTokenLogits` says."""
        # Two compiled shapes: one new token, or a chunk of a prompt.
        T = 1 if num_new == 1 else self._chunk
        logits_V = None
        for start in range(len(window) - num_new, len(window), T):
            tokens = window[start : start + T]
            tokens_BxT, place = _make_batch(tokens, T, self._mesh), (np.int32(start), np.int32(len(tokens) - 1))
            with use_sharding_rules(self._mesh):
                logits_V, self._cache = self._step(self._weights, self._cache, tokens_BxT, *place)
        assert logits_V is not None, "a window has a token"
        return logits_V


class RecomputingDecoder:
    """`_NextTokenLogits` that reads the whole window for each token."""

    def __init__(self, model: nn.Module, weights: Any, length: int, mesh: Mesh):
        self._weights, self._length, self._mesh = weights, length, mesh

        @jax.jit
        def step(weights: Any, tokens_BxT: jax.Array, last: jax.Array) -> jax.Array:
            logits_BxTxV: Any = model.apply(weights, tokens_BxT, deterministic=True)
            return replicate(logits_BxTxV[0, last].astype(jnp.float32), mesh)

        self._step = step

    def set_weights(self, weights: Any) -> None:
        """Use other weights from now on; None releases them until the next call."""
        self._weights = weights

    def __call__(self, window: Sequence[int], num_new: int) -> jax.Array:
        """Return the logits of the next token, as `_NextTokenLogits` says."""
        with use_sharding_rules(self._mesh):
            return self._step(self._weights, _make_batch(window, self._length, self._mesh), np.int32(len(window) - 1))


def _make_batch(tokens: Sequence[int], length: int, mesh: Mesh) -> np.ndarray:
    """Return tokens padded to `length` at the end, since no token attends to later ones, repeated for each batch shard.

    Over several devices only the weights should be sharded, so each batch shard reads the same sequence.
    """
    sequence = np.zeros(length, np.int32)
    sequence[: len(tokens)] = tokens
    return np.tile(sequence, (count_batch_shards(mesh), 1))


def replicate(array: jax.Array, mesh: Mesh) -> jax.Array:
    """Replicate an array on every device, so that every process can read it. For traced code."""
    return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, PartitionSpec()))


def make_variables(weights: Any) -> Any:
    """Return the variables that a model is applied to: its parameters and its other collections."""
    return {"params": weights["params"], **weights.get("variables", {})}


def infer_vocabulary_size(model: nn.Module, weights: Any, length: int) -> int:
    """Return V from the abstract logits of one sequence. Raises `InvalidError` if the model returns no logits."""
    tokens_BxT = jax.ShapeDtypeStruct((1, length), jnp.int32)
    returned: Any = jax.eval_shape(
        lambda weights, tokens: model.apply(weights, tokens, deterministic=True), weights, tokens_BxT
    )
    is_array = isinstance(returned, jax.ShapeDtypeStruct)
    if not is_array or returned.shape[:2] != (1, length) or len(returned.shape) != 3:
        kind = f"an array of {returned.shape}" if is_array else f"a {type(returned).__name__}"
        raise InvalidError(
            f"{type(model).__name__} returns {kind} for tokens (1, {length}); a model of tokens returns logits "
            f"(1, {length}, V)"
        )
    return int(returned.shape[2])


class SampleEvaluator:
    """Evaluator that generates sample texts, with the metrics `val/sample/<index of the prompt>`.

    Made and called on every host. The texts depend only on the weights, not on the step.
    """

    name = "samples"

    def __init__(
        self,
        prompts: Sequence[tuple[str, list[int]]],
        codec: TextCodec | None,
        make_decoder: Callable[[Any], CachedDecoder | RecomputingDecoder],
        choose: TokenChooser,
        num_tokens: int,
        length: int,
        is_stopping: Callable[[], bool],
        every_steps: int | None = None,
    ):
        """Prepare the evaluator of text and ids of prompts. Without a codec it shows ids instead of text.

        `make_decoder` makes a decoder from variables, at the first evaluation. `length` is the number of tokens of the
        window, and `every_steps` those between two evaluations; None: `eval.every_steps`.
        """
        self.every_steps = every_steps
        self._prompts, self._codec, self._make_decoder, self._choose = prompts, codec, make_decoder, choose
        self._num_tokens, self._length, self._is_stopping = num_tokens, length, is_stopping
        self._decoder: CachedDecoder | RecomputingDecoder | None = None

    def evaluate(self, weights: Any, step: int, hosts: Hosts) -> EvaluationMetrics | None:
        """Return the texts by their key in a row, shortened; None if the job was asked to stop."""
        texts = self.write(weights)
        if texts is None:
            return None
        return {f"{_SAMPLE}/{number}": text[:TEXT_MAX_CHARACTERS] for number, text in enumerate(texts)}

    def write(self, weights: Any) -> list[str] | None:
        """Return each prompt with its continuation; None if the job was asked to stop. Called on every host."""
        if self._decoder is None:
            # Made late, so that its memory and compilation do not delay the first steps.
            self._decoder = self._make_decoder(make_variables(weights))
        texts = []
        for text, ids in self._prompts:
            if self._is_stopping():
                return None
            self._decoder.set_weights(make_variables(weights))
            tokens = generate(self._decoder, self._choose, ids, self._num_tokens, self._length)
            texts.append("".join(stream_output(tokens, ids, text, self._codec))[:-1])
        self._decoder.set_weights(None)  # training needs the memory
        return texts
