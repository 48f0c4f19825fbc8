"""The files by which `transformers` finds the tokenizer of a run: `tokenizer.json` and `tokenizer_config.json`."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from runner.config import DataConfig, TokenSource
from runner.data.index import INDEX as CORPUS_INDEX
from runner.data.index import CorpusIndex, read_tokenizer
from runner.data.opening import open_source
from runner.data.source import find_corpus, find_source, is_class
from runner.data.subword import FILES, parse_tokenizer
from runner.data.text import Text
from runner.storage import default_cache_directory, encode_json, open_store

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"


@dataclass(frozen=True)
class TokenizerFiles:
    """What a tokenizer is to others.

    Attributes:
        files: by name.
        vocabulary_size: every id is below it.
        end: the id that ends every document, where one does.
        told: why it has no `tokenizer.json`, if it has none.
    """

    files: Mapping[str, bytes] = field(default_factory=dict)
    vocabulary_size: int = 0
    end: int | None = None
    told: str | None = None


def tokenizer_files(config: DataConfig) -> TokenizerFiles:
    """The tokenizer of the first source that has one. Reads a corpus's index, and of `characters` the text.

    Raises `DataError` if the source is not what it was, `OSError` if it cannot be reached.
    """
    for named in config.sources:
        found = _of_source(named, config)
        if found is not None:
            return found
    return TokenizerFiles(told=f"data.source={config.sources[0].source} holds ids, and nobody knows of which tokenizer")


def _of_source(named: TokenSource, config: DataConfig) -> TokenizerFiles | None:
    if is_class(named.source):
        return None
    corpus = find_corpus(named.source)
    if corpus is not None:
        return _of_corpus(corpus, config.sequence_length)
    files = find_source(named.source)
    if files.holds_tokens:
        return None
    if config.tokenizer == "bytes":
        return _made(_bytes(), 256, config.sequence_length)
    source = open_source(named, config, default_cache_directory(), None)
    assert isinstance(source, Text), "characters are of text"
    characters = source.tokenizer.characters or ""
    return _made(_characters(characters), len(characters), config.sequence_length)


def _of_corpus(where: str, most_tokens: int) -> TokenizerFiles:
    store = open_store(where)
    index = CorpusIndex.decode(store.read(CORPUS_INDEX), f"{store.url}/{CORPUS_INDEX}")
    kind, size = index.tokenizer.get("kind"), index.vocabulary_size
    if kind == "bytes":
        return _made(_bytes(), size, most_tokens, index.separator)
    if kind not in FILES:
        return TokenizerFiles(told=f"{store.url}/{CORPUS_INDEX} names a tokenizer of kind {kind!r}, which is not known")
    content = read_tokenizer(index.tokenizer, store)
    if kind == "hf":
        words = {number: word for word, number in parse_tokenizer(index.tokenizer, content, store).tokens().items()}
        end = index.separator
        return _files(content, size, most_tokens, end, None if end is None else words.get(end))
    told = f"the tokenizer is of {kind}: its file is copied, and {TOKENIZER} must be made of it with {kind}'s own tools"
    return TokenizerFiles({FILES[kind]: content}, size, index.separator, told)


def _made(tokenizer: tokenizers.Tokenizer, size: int, most_tokens: int, end: int | None = None) -> TokenizerFiles:
    return _files(tokenizer.to_str(pretty=True).encode(), size, most_tokens, end)


def _files(content: bytes, size: int, most_tokens: int, end: int | None, end_word: str | None = None) -> TokenizerFiles:
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": most_tokens,
        "clean_up_tokenization_spaces": False,
    }
    if end_word is not None:
        config["eos_token"] = end_word
    return TokenizerFiles({TOKENIZER: content, TOKENIZER_CONFIG: encode_json(config)}, size, end)


def _bytes() -> tokenizers.Tokenizer:
    """An id is a byte: byte-level BPE without a merge."""
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={_letter(byte): byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _letter(byte: int) -> str:
    """What byte-level BPE writes for a byte: itself where that can be seen, else the next letter from U+0100 on."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in seen:
        return chr(byte)
    return chr(0x100 + sum(other not in seen for other in range(byte)))


def _characters(characters: str) -> tokenizers.Tokenizer:
    """An id is a character: a word of one letter. One that is not among them has no id, which is an error."""
    vocabulary = {character: number for number, character in enumerate(characters)}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocab=vocabulary, unk_token=""))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer
