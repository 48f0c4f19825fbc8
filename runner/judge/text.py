"""How the tokens of a run become text, as they come: whole UTF-8 characters."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from runner.config import DataConfig, TokenSource
from runner.data import ByteTokenizer, Tokenizer
from runner.data.index import INDEX, CorpusIndex
from runner.data.opening import SEPARATORS
from runner.data.remote.cache import CacheSettings
from runner.data.source import blaming, find_corpus, find_source, is_class
from runner.data.subword import BatchTokenizer, load_tokenizer
from runner.data.text import load_text
from runner.errors import DataError
from runner.storage import JsonObject, default_cache_directory, open_store

_CONTEXT_TOKENS = 5  # that are decoded again with what is new: a tokenizer may write a token by the one before it
_REPLACEMENT = "\ufffd"


@dataclass(frozen=True)
class Language:
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


def find_language(named: TokenSource, data: DataConfig) -> Language:
    """What the tokens of one source of `data` mean. Reads of a corpus its index, and text for its characters alone.

    Raises `DataError` if that is not known, or `OSError` if a bucket does not answer.
    """
    name = f"data.source={named.source}"
    if is_class(named.source):
        raise DataError(f"{name}: is a class, which brings ids and no tokenizer")
    with blaming(named.source):
        if (corpus := find_corpus(named.source)) is not None:
            store = open_store(corpus)
            index = CorpusIndex.decode(store.read(INDEX), f"{corpus}/{INDEX}")
            record = {key: value for key, value in index.tokenizer.items() if key != "vocabulary_size"}
            return Language(load_tokenizer(index.tokenizer, store), index.separator, record)
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
    return Language(tokenizer, _id_of(separator, tokenizer), kind)


def _id_of(separator: bytes, tokenizer: Tokenizer) -> int | None:
    """The id that stands for it, if there is one: a single text of characters need not have it."""
    try:
        return next(iter(tokenizer.encode_file(separator).tolist()), None)
    except DataError:
        return None


def language_of(data: DataConfig) -> Language:
    """What the tokens that a run trains on mean. Raises as `find_language` does, and if its sources differ in that."""
    found = [find_language(named, data) for named in data.sources]
    if other := next((index for index, one in enumerate(found) if one.kind != found[0].kind), None):
        names = data.sources[0].name, data.sources[other].name
        raise DataError(f"data.mixture: {names[0]} and {names[1]} have different tokenizers")
    return found[0]


def first_token(language: Language, data: DataConfig) -> int:
    """What a text without a prompt begins after: the separator of documents, or else a line's end, or else id 0.

    Where an example holds whole documents no separator is ever an input, so none is taken.
    """
    if language.separator is not None and data.packing == "concatenate":
        return language.separator
    try:
        return int(language.tokenizer.encode("\n")[-1])
    except (DataError, IndexError):  # characters that have none, or a tokenizer that leaves it out
        return 0


def encode_prompt(language: Language, prompt: str) -> list[int]:
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


def pieces(tokens: Iterable[int], prompt: Sequence[int], text: str, language: Language | None) -> Iterator[str]:
    """The prompt, whose text is `text`, and what follows it, up to a line's end; ids where no language is known."""
    yield text + (" " if text and language is None else "")
    if language is None:
        yield from (f"{token} " for token in tokens)
    else:
        yield from stream_text(tokens, prompt, language.tokenizer.decode)
    yield "\n"
