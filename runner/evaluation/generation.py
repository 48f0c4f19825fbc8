"""Token after token, each from those before it, as far as the model's sequence length reaches.

The window holds the tokens that the next one is made from: at first the last `length` of the prompt, then each new one
too. When it is full, its last half stays, as a text of its own that begins there. So a text may become as long as one
likes, and what is read anew is a few tokens for each that is made.

A model with `init_cache` reads each token once: see `experiments.gpt`. Any other reads its whole row for each token,
padded to one length, so that it is compiled once.

Shape legend: B batch, T tokens, V vocabulary.

How the tokens of a run become text, as they come: whole UTF-8 characters.

The next token: from logits and a key, by temperature and top-p. Pure.

Noise belongs to ids, not to ranks: logits that differ by rounding give the same token, unless two are nearly equal.

Shape legend: V vocabulary.

Texts that go on from some prompts, as the weights of a step write them: figures of a row, for people to read.
"""

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
from runner.data.open_source import SEPARATORS
from runner.data.remote import CacheSettings
from runner.data.source_files import find_corpus, find_source, is_class_path, wrap_source_errors
from runner.data.text import load_text
from runner.data.tokenizers import BatchTokenizer, load_tokenizer
from runner.distributed.agreement import Hosts
from runner.errors import DataError, InvalidError
from runner.parallel.mesh import count_batch_shards, use_sharding_rules
from runner.storage import JsonObject, default_cache_directory, open_store
from runner.train.evaluators import TEXT_MAX_CHARACTERS, EvaluationMetrics

_CONTEXT_TOKENS = 5  # that are decoded again with what is new: a tokenizer may write a token by the one before it
_REPLACEMENT = "\ufffd"


@dataclass(frozen=True)
class TextCodec:
    """What the tokens of a source mean.

    Attributes:
        tokenizer: that the tokens were made with.
        separator: the id that ends a document, where one does.
        kind: tells tokenizers apart; the same for the same ids.
    """

    tokenizer: Tokenizer | BatchTokenizer
    separator: int | None
    kind: JsonObject

    @property
    def is_of_bytes(self) -> bool:
        """Whether each token is a byte."""
        return bool(self.kind.get("kind") == "bytes")


def load_source_codec(named: TokenSource, data: DataConfig) -> TextCodec:
    """What the tokens of one source of `data` mean. Reads of a corpus its index, and text for its characters alone.

    Raises `DataError` if that is not known, or `OSError` if a bucket does not answer.
    """
    name = f"data.source={named.source}"
    if is_class_path(named.source):
        raise DataError(f"{name}: is a class, which brings ids and no tokenizer")
    with wrap_source_errors(named.source):
        if (corpus := find_corpus(named.source)) is not None:
            store = open_store(corpus)
            index = CorpusIndex.decode(store.read(INDEX), f"{corpus}/{INDEX}")
            record = {key: value for key, value in index.tokenizer.items() if key != "vocabulary_size"}
            return TextCodec(load_tokenizer(index.tokenizer, store), index.separator, record)
    files = find_source(named.source)
    if files.holds_tokens:
        raise DataError(f"{name}: names files of token ids, which say nothing of their tokenizer")
    separator = SEPARATORS[data.document_separator]
    tokenizer: Tokenizer = ByteTokenizer()
    if data.tokenizer == "characters":
        here = default_cache_directory()
        copies = CacheSettings(here, data.cache_bytes, 1)
        tokenizer = load_text(files, data.tokenizer, here, separator, copies).tokenizer
    kind = {"kind": data.tokenizer} | ({} if tokenizer.characters is None else {"characters": tokenizer.characters})
    return TextCodec(tokenizer, _id_of(separator, tokenizer), kind)


def _id_of(separator: bytes, tokenizer: Tokenizer) -> int | None:
    """The id that stands for it, if there is one: a single text of characters need not have it."""
    try:
        return next(iter(tokenizer.encode_file(separator).tolist()), None)
    except DataError:
        return None


def load_data_codec(data: DataConfig) -> TextCodec:
    """Return the codec of the training data. Raises `DataError` as `load_source_codec`, or if sources differ."""
    found = [load_source_codec(named, data) for named in data.sources]
    if other := next((index for index, one in enumerate(found) if one.kind != found[0].kind), None):
        names = data.sources[0].name, data.sources[other].name
        raise DataError(f"data.mixture: {names[0]} and {names[1]} have different tokenizers")
    return found[0]


def find_start_token(language: TextCodec, data: DataConfig) -> int:
    """What a text without a prompt begins after: the separator of documents, or else a line's end, or else id 0.

    Where an example holds whole documents no separator is ever an input, so none is taken.
    """
    if language.separator is not None and data.packing == "concatenate":
        return language.separator
    try:
        return int(language.tokenizer.encode("\n")[-1])
    except (DataError, IndexError):  # characters that have none, or a tokenizer that leaves it out
        return 0


def encode_prompt(language: TextCodec, prompt: str) -> list[int]:
    """The ids of a prompt, which may hold bytes of the command line that are no UTF-8. Raises `DataError`."""
    return [int(token) for token in language.tokenizer.encode_file(os.fsencode(prompt))]


def parse_ids(prompt: str, num_ids: int, key: str = "--prompt") -> list[int]:
    """The ids that a prompt writes out, between spaces or commas. Raises `DataError`, blaming `key`."""
    words = prompt.replace(",", " ").split()
    bad = next((word for word in words if not word.isdecimal() or int(word) >= num_ids), None)
    if bad is not None:
        raise DataError(f"{key}: got {bad[:40]!r}, needs ids from 0 to {num_ids - 1} where no tokenizer is known")
    return [int(word) for word in words]


def stream_text(tokens: Iterable[int], prompt: Sequence[int], decode: Callable[[Sequence[int]], str]) -> Iterator[str]:
    """The text of each token after `prompt`, as soon as no character of it is cut; what is cut at the end comes last.

    Decoded are always a few tokens before it too, and taken is what they do not have alone.
    """
    ids = list(prompt[-_CONTEXT_TOKENS:])
    read = len(ids)  # of `ids`, those whose text is out
    for token in tokens:
        ids.append(token)
        before, text = decode(ids[:read]), decode(ids)
        if text.endswith(_REPLACEMENT):
            continue
        yield text[len(before) :]
        ids = ids[-_CONTEXT_TOKENS:]
        read = len(ids)
    yield decode(ids)[len(decode(ids[:read])) :]


def stream_output(tokens: Iterable[int], prompt: Sequence[int], text: str, language: TextCodec | None) -> Iterator[str]:
    """The prompt, whose text is `text`, and what follows it, up to a line's end; ids where no language is known."""
    yield text + (" " if text and language is None else "")
    if language is None:
        yield from (f"{token} " for token in tokens)
    else:
        yield from stream_text(tokens, prompt, language.tokenizer.decode)
    yield "\n"


TokenChooser = Callable[[jax.Array, int], jax.Array]


@dataclass(frozen=True)
class Sampler:
    """How a token is drawn.

    Attributes:
        temperature: logits are divided by it; 0 takes the most probable token.
        top_p: drawn is from the fewest, most probable tokens whose probabilities add up to this; 1: from all.
        seed: of the random keys; that of token i is `fold_in(key(seed), i)`.
    """

    temperature: float = 0.8
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise InvalidError(f"--temperature {self.temperature:g}: needs a number of at least 0")
        if not 0 < self.top_p <= 1:
            raise InvalidError(f"--top-p {self.top_p:g}: needs a number above 0, and at most 1")
        if not 0 <= self.seed < 1 << 32:
            raise InvalidError(f"--seed {self.seed}: needs a whole number of 0 to {(1 << 32) - 1}")

    def make_chooser(self, num_ids: int) -> TokenChooser:
        """`(logits_V, index of the token) -> id`, one of the first `num_ids`."""

        @jax.jit
        def choose(logits_V: jax.Array, index: jax.Array | int) -> jax.Array:
            logits_V = logits_V[:num_ids].astype(jnp.float32)
            if self.temperature == 0:
                return jnp.argmax(logits_V)
            key = jax.random.fold_in(jax.random.key(self.seed), index)
            return jax.random.categorical(key, filter_top_p(logits_V / self.temperature, self.top_p))

        return choose


def filter_top_p(logits_V: jax.Array, top_p: float) -> jax.Array:
    """`logits_V`, and -inf for all but the fewest most probable tokens whose probabilities add up to `top_p`."""
    if top_p == 1:
        return logits_V
    order_V = jnp.argsort(-logits_V)
    sorted_V = jax.nn.softmax(logits_V)[order_V]
    before_V = jnp.cumsum(sorted_V) - sorted_V
    is_kept_V = jnp.zeros(logits_V.shape, bool).at[order_V].set((before_V < top_p).at[0].set(True))
    return jnp.where(is_kept_V, logits_V, -jnp.inf)


CHUNK_TOKENS = 256  # of a prompt that are read at a time, so that their logits stay few

# (window, how many of its last tokens are new) -> logits_V of the token after it, in float32
NextTokenLogits = Callable[[Sequence[int], int], jax.Array]


def generate(
    read: NextTokenLogits, choose: TokenChooser, prompt: Sequence[int], num_tokens: int, length: int
) -> Iterator[int]:
    """The `num_tokens` ids after `prompt`, which has at least one; see the top of this file for `length`."""
    window = list(prompt[-length:])
    num_new = len(window)
    for index in range(num_tokens):
        token = int(choose(read(window, num_new), index))
        yield token
        window, num_new = [*window, token], 1
        if len(window) > length:
            window = window[-max(1, length // 2) :]
            num_new = len(window)


def make_decoder(
    model: nn.Module, weights: Any, length: int, dtype: DTypeLike, mesh: Mesh
) -> "CachedDecoder | RecomputingDecoder":
    """What reads tokens with a model: by its cache, of `dtype`, if it can make one. `weights` lie on `mesh`."""
    if hasattr(model, "init_cache"):
        return CachedDecoder(model, weights, length, dtype, mesh)
    return RecomputingDecoder(model, weights, length, mesh)


class CachedDecoder:
    """Reads what is new, and keeps of it what later tokens look at."""

    def __init__(self, model: Any, weights: Any, length: int, dtype: DTypeLike, mesh: Mesh):
        self._mesh, self._chunk = mesh, min(CHUNK_TOKENS, length)
        # Whole chunks: the last one may be padded, and what it writes behind the window is never seen.
        places = -(-length // self._chunk) * self._chunk
        self._make_cache = lambda: model.init_cache(count_batch_shards(mesh), places, dtype)
        self._weights, self._cache = weights, None if weights is None else self._make_cache()

        def step(weights: Any, cache: Any, tokens_BxT: jax.Array, start: jax.Array, last: jax.Array) -> Any:
            logits_BxTxV, cache = model.apply(weights, tokens_BxT, cache=cache, start=start, deterministic=True)
            return replicate(logits_BxTxV[0, last].astype(jnp.float32), mesh), cache

        self._step = jax.jit(step, donate_argnums=1)

    def set_weights(self, weights: Any) -> None:
        """Read with other weights from now on; with None, hold none, and no memory, until the next."""
        self._weights = weights
        self._cache = None if weights is None else self._make_cache()

    def __call__(self, window: Sequence[int], num_new: int) -> jax.Array:
        """See `NextTokenLogits`."""
        T = 1 if num_new == 1 else self._chunk
        logits_V = None
        for start in range(len(window) - num_new, len(window), T):
            tokens = window[start : start + T]
            tokens_BxT, place = _rows(tokens, T, self._mesh), (np.int32(start), np.int32(len(tokens) - 1))
            with use_sharding_rules(self._mesh):
                logits_V, self._cache = self._step(self._weights, self._cache, tokens_BxT, *place)
        assert logits_V is not None, "a window has a token"
        return logits_V


class RecomputingDecoder:
    """Reads the whole window each time."""

    def __init__(self, model: nn.Module, weights: Any, length: int, mesh: Mesh):
        self._weights, self._length, self._mesh = weights, length, mesh

        @jax.jit
        def step(weights: Any, tokens_BxT: jax.Array, last: jax.Array) -> jax.Array:
            logits_BxTxV: Any = model.apply(weights, tokens_BxT, deterministic=True)
            return replicate(logits_BxTxV[0, last].astype(jnp.float32), mesh)

        self._step = step

    def set_weights(self, weights: Any) -> None:
        """Read with other weights from now on; with None, hold none until the next."""
        self._weights = weights

    def __call__(self, window: Sequence[int], num_new: int) -> jax.Array:
        """See `NextTokenLogits`."""
        with use_sharding_rules(self._mesh):
            return self._step(self._weights, _rows(window, self._length, self._mesh), np.int32(len(window) - 1))


def _rows(tokens: Sequence[int], length: int, mesh: Mesh) -> np.ndarray:
    """A row of `length`, padded at its end, since no token sees one after it; once for each device that shares a batch.

    Over several devices only weights are to be cut. Then each reads the same row.
    """
    row = np.zeros(length, np.int32)
    row[: len(tokens)] = tokens
    return np.tile(row, (count_batch_shards(mesh), 1))


def replicate(array: jax.Array, mesh: Mesh) -> jax.Array:
    """A copy on every device, so that every process can look at it. For traced code."""
    return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, PartitionSpec()))


def make_variables(weights: Any) -> Any:
    """What a model is applied to: the parameters, and by collection what else it has."""
    return {"params": weights["params"], **weights.get("variables", {})}


def infer_vocabulary_size(model: nn.Module, weights: Any, length: int) -> int:
    """V, by the logits of one row; `weights` may be abstract. Raises `InvalidError` if the model returns no logits."""
    tokens_BxT = jax.ShapeDtypeStruct((1, length), jnp.int32)
    found: Any = jax.eval_shape(
        lambda weights, tokens: model.apply(weights, tokens, deterministic=True), weights, tokens_BxT
    )
    if not isinstance(found, jax.ShapeDtypeStruct) or found.shape[:2] != (1, length) or len(found.shape) != 3:
        what = f"an array of {found.shape}" if isinstance(found, jax.ShapeDtypeStruct) else f"a {type(found).__name__}"
        raise InvalidError(
            f"{type(model).__name__} returns {what} for tokens (1, {length}); a model of tokens returns logits "
            f"(1, {length}, V)"
        )
    return int(found.shape[2])


SAMPLE = "val/sample"


class SampleEvaluator:
    """An evaluator: the figures `val/sample/<number of the prompt>`. Made and called on every host.

    `make_decoder` is called at the first evaluation. The same weights write the same texts, at any step.
    """

    name = "samples"

    def __init__(
        self,
        prompts: Sequence[tuple[str, list[int]]],
        language: TextCodec | None,
        make_decoder: Callable[[Any], CachedDecoder | RecomputingDecoder],
        choose: TokenChooser,
        num_tokens: int,
        length: int,
        is_stopping: Callable[[], bool],
        every_steps: int | None = None,
    ):
        self.every_steps = every_steps
        self._prompts, self._language, self._make_reader, self._choose = prompts, language, make_decoder, choose
        self._num_tokens, self._length, self._is_stopping = num_tokens, length, is_stopping
        self._reader: CachedDecoder | RecomputingDecoder | None = None

    def evaluate(self, weights: Any, step: int, hosts: Hosts) -> EvaluationMetrics | None:
        """See `Evaluator`."""
        texts = self.write(weights)
        if texts is None:
            return None
        return {f"{SAMPLE}/{number}": text[:TEXT_MAX_CHARACTERS] for number, text in enumerate(texts)}

    def write(self, weights: Any) -> list[str] | None:
        """A text for each prompt, which it begins with; None if the job was asked to stop. Called on every host."""
        if self._reader is None:
            self._reader = self._make_reader(make_variables(weights))
        texts = []
        for text, ids in self._prompts:
            if self._is_stopping():
                return None
            self._reader.set_weights(make_variables(weights))
            tokens = generate(self._reader, self._choose, ids, self._num_tokens, self._length)
            texts.append("".join(stream_output(tokens, ids, text, self._language))[:-1])
        self._reader.set_weights(None)
        return texts
