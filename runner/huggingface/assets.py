"""Assets of an export, which accompany the weights: tokenizer, chat template, special tokens and context length.

They come from two places: the corpus or text that the run trains on, and the published weights that it starts from.
Both may be gone when the run is exported, so the first attempt records them below `assets` in the run's directory;
exports of older runs read the sources again.

The tokenizer is that of the data, or of the published weights if the data are ids without a record of their tokenizer.
If both tokenizers have the same vocabulary, the files of the published weights are used, because they have special
tokens and settings that a corpus does not record.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from runner.attempts.layout import FORMAT, DamagedRecordError, read_record
from runner.config import DataConfig, TokenSource
from runner.console import warn
from runner.data.chat import ChatTemplate, get_token_text, read_template
from runner.data.corpus_index import INDEX as CORPUS_INDEX
from runner.data.corpus_index import CorpusIndex, read_tokenizer
from runner.data.open_source import TextTokens, open_source
from runner.data.source_files import find_corpus, find_source
from runner.data.tokenizers import TOKENIZER_FILES, parse_tokenizer
from runner.errors import DataError, InvalidError
from runner.huggingface.safetensors import CONFIG_FILE, drop_config_keys
from runner.spec import InitFromConfig, is_class_path
from runner.storage import (
    JsonObject,
    Key,
    Store,
    default_cache_directory,
    encode_json,
    open_store,
    parse_json,
    split_checkpoint,
)

# Tokenizer of the data.

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
# Files of published weights that an export includes, by the names under which readers of the format look for them.
BASE_TOKENIZER_FILES = (
    TOKENIZER,
    TOKENIZER_CONFIG,
    CHAT_TEMPLATE,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
FILE_BYTES_MAX = 100 << 20  # of a tokenizer file; the largest ones known have 33 MB
END_OF_TURN = "end_of_turn_token"  # key of a corpus's tokenizer_config.json


@dataclass(frozen=True)
class TokenizerFiles:
    """Tokenizer of a run in the form that `transformers` reads."""

    files: Mapping[str, bytes] = field(default_factory=dict)  # content of the files by name
    vocabulary_size: int = 0  # every id is below it
    end: int | None = None  # id that ends every document, if there is one
    end_of_turn: int | None = None  # id that ends a completion by the chat template, if there is one
    pad: int | None = None  # id for padding, if one is known
    problem: str | None = None  # reason why there is no `tokenizer.json`; None if there is one
    begin: int | None = None  # id that begins every document, if there is one


def make_tokenizer_files(config: DataConfig) -> TokenizerFiles:
    """Return the tokenizer of the first source that has one.

    It reads the index of a corpus, and for the tokenizer `characters` the text.

    Raises:
        DataError: The source has changed.
        OSError: The source cannot be reached.
    """
    for source in config.sources:
        found = _make_source_tokenizer(source, config)
        if found is not None:
            return found
    return TokenizerFiles(
        problem=f"data.source={config.sources[0].source} holds ids, and it is unknown which tokenizer made them"
    )


def _make_source_tokenizer(source: TokenSource, config: DataConfig) -> TokenizerFiles | None:
    """Return the tokenizer of one source; None if the source holds ids and does not name a tokenizer."""
    if is_class_path(source.source):
        return None
    length = config.tokens_per_example
    # A corpus records its own tokenizer, whatever the spec says.
    corpus = find_corpus(source.source)
    if corpus is not None:
        return _make_corpus_tokenizer(corpus, length)
    if find_source(source.source).holds_tokens:
        return None
    if config.tokenizer == "bytes":
        return _make_byte_files(256, length, None)
    text = open_source(source, config, default_cache_directory(), None)
    assert isinstance(text, TextTokens), "only text has characters"
    characters = text.tokenizer.characters or ""
    # An id is a character: a word of one letter. The tokenizer fails on a character without an id.
    vocabulary = {character: number for number, character in enumerate(characters)}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocab=vocabulary, unk_token=""))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    files = {TOKENIZER: _encode_tokenizer(tokenizer), TOKENIZER_CONFIG: _encode_tokenizer_config(length)}
    return TokenizerFiles(files, len(characters))


def _make_corpus_tokenizer(where: str, sequence_length: int) -> TokenizerFiles:
    store = open_store(where)
    index = CorpusIndex.decode(store.read(CORPUS_INDEX), f"{store.url}/{CORPUS_INDEX}")
    kind, size, end, begin = index.tokenizer.get("kind"), index.vocabulary_size, index.separator, index.begin
    # A corpus of dialogues has its chat template and special tokens beside the index.
    names: dict[str, str] = {
        key: value
        for key, value in (_read_optional_object(store, TOKENIZER_CONFIG) or {}).items()
        if isinstance(value, str) and (key == "chat_template" or key.endswith("_token"))
    }
    end_of_turn, template = names.pop(END_OF_TURN, None), names.pop("chat_template", None)
    if kind == "bytes":
        # No special token's text is a token.
        settings = {} if template is None else {"chat_template": _pin_names(template, names, {})}
        return replace(_make_byte_files(size, sequence_length, end, settings), begin=begin)
    if kind not in TOKENIZER_FILES:
        return TokenizerFiles(problem=f"{store.url}/{CORPUS_INDEX} names a tokenizer of unknown kind {kind!r}")
    content = read_tokenizer(index.tokenizer, store)
    if kind != "hf":
        problem = (
            f"the tokenizer is of {kind}: its file is copied, and {TOKENIZER} must be made from it with the tools of "
            f"{kind}"
        )
        return TokenizerFiles({TOKENIZER_FILES[kind]: content}, size, end, problem=problem, begin=begin)
    ids = parse_tokenizer(index.tokenizer, content, store).list_tokens()
    words = {number: word for word, number in ids.items()}
    eos_token = end_of_turn if end_of_turn in ids else None if end is None else words.get(end)
    settings = {key: text for key, text in names.items() if text in ids}
    if eos_token is not None:
        # Batches of texts need a token for padding, and transformers would add one that a tokenizer.json only names.
        settings = {"pad_token": eos_token} | settings | {"eos_token": eos_token}
    if begin in words:
        settings["bos_token"] = words[begin]
    pad = ids.get(names.get("pad_token", ""))
    if template is not None:
        settings["chat_template"] = _pin_names(template, names, settings)
    return TokenizerFiles(
        {TOKENIZER: content, TOKENIZER_CONFIG: _encode_tokenizer_config(sequence_length, settings)},
        size,
        end,
        None if end_of_turn is None else ids.get(end_of_turn),
        pad,
        begin=begin,
    )


def _pin_names(template: str, names: Mapping[str, str], settings: Mapping[str, str]) -> str:
    """Return a chat template that renders the same text with the special tokens of `settings` as with `names`.

    The end of a turn may be another token than the `eos_token` that the template knows, and a text that is no token
    cannot be a special token of the tokenizer.
    """
    keys = [key for key in {**names, **settings} if names.get(key, "") != settings.get(key, "")]
    pinned = {key: names.get(key, "") for key in keys if re.search(rf"\b{re.escape(key)}\b", template)}
    # The newline belongs to the block, so the template begins on a line of its own, as before.
    return (
        "".join(f"{{% set {key} = {json.dumps(text, ensure_ascii=False)} %}}\n" for key, text in pinned.items())
        + template
    )


def _encode_tokenizer_config(sequence_length: int, settings: Mapping[str, str] | None = None) -> bytes:
    common = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": sequence_length,
        "clean_up_tokenization_spaces": False,
    }
    return encode_json(common | dict(settings or {}))


def _make_byte_files(
    size: int, sequence_length: int, end: int | None, settings: Mapping[str, str] | None = None
) -> TokenizerFiles:
    """Return the tokenizer whose ids are bytes: byte-level BPE without merges."""
    # Byte-level BPE writes a byte as its own character if that is visible, else as the next letter from U+0100 on.
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    vocabulary = {chr(byte if byte in visible else 0x100 + hidden.index(byte)): byte for byte in range(256)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    config = _encode_tokenizer_config(sequence_length, settings)
    files = {TOKENIZER: _encode_tokenizer(tokenizer), TOKENIZER_CONFIG: config}
    # No id is free for padding, so it is that of the byte 0, which no text has. It is no special token of the
    # tokenizer, which would look for its character, U+0100, in texts.
    return TokenizerFiles(files, size, end, pad=0)


def _encode_tokenizer(tokenizer: tokenizers.Tokenizer) -> bytes:
    return tokenizer.to_str(pretty=True).encode()


# Files of published weights that a run starts from.

GENERATION_CONFIG = "generation_config.json"
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def unnest_config(config: JsonObject) -> JsonObject:
    """Return a `config.json` with the keys of its `text_config`, in which models with images nest those of the text."""
    text = config.get("text_config")
    return (text if isinstance(text, dict) else {}) | config


def read_files(store: Store) -> dict[str, bytes]:
    """Return the tokenizer files of a directory by name, without those that are too large for one."""
    listed = store.list_files("")
    found = {}
    for name in BASE_TOKENIZER_FILES:
        if name in listed and listed[name].size_bytes > FILE_BYTES_MAX:
            warn(f"{store.url}/{name} has {listed[name].size_bytes:,} bytes, too many for a tokenizer; it is left out")
        elif name in listed:
            found[name] = store.read(name)
    return found


def _read_optional_object(store: Store, name: str) -> JsonObject | None:
    try:
        return parse_json(store.read(name))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise InvalidError(f"{store.url}/{name} cannot be read: {error}") from error


def _read_vocabulary(content: bytes | None) -> dict[str, int] | None:
    """Return the ids of all tokens of a `tokenizer.json`; None if there is none, or it cannot be read."""
    if content is None:
        return None
    try:
        return tokenizers.Tokenizer.from_str(content.decode()).get_vocab(with_added_tokens=True)
    except Exception:  # noqa: BLE001 - the library raises nothing more specific
        return None


# Assets of a run.

ASSETS = "assets"
_RECORD = f"{ASSETS}/assets.json"
_TOKENIZER_KEYS = ("vocabulary_size", "end", "end_of_turn", "pad", "problem", "begin")
ASSET_KEYS = (
    Key("format", int, "Version of the format of this file."),
    Key("base", str | None, "Path or URL of the published weights that the run started from; null: none."),
    Key("config", dict | None, "Content of their `config.json`."),
    Key("ids", dict, "Special tokens of the tokenizer, as `config.json` has them."),
    Key("generation", dict, "Content of their `generation_config.json`, if the tokenizer is theirs."),
    Key("vocabulary_size", int, "Every id of the tokenizer is below it; 0 if that is unknown."),
    Key("end", int | None, "Id that ends every document; null: none."),
    Key("end_of_turn", int | None, "Id that ends a completion by the chat template; null: none."),
    Key("pad", int | None, "Id for padding; null: unknown."),
    Key("problem", str | None, "Reason why there is no `tokenizer.json`; null: there is one."),
    Key("begin", int | None, "Id that begins every document; null, or absent in older runs: none."),
    Key("files", dict, "SHA-256 of each file below `assets`, by its name."),
)


@dataclass(frozen=True)
class ExportAssets:
    """Assets of the exports of a run."""

    tokenizer: TokenizerFiles
    base: str | None = None  # path or URL of the published weights that the run started from; None if there are none
    config: JsonObject | None = None  # their `config.json`
    ids: JsonObject = field(default_factory=dict)  # special tokens of the tokenizer, as `config.json` has them
    generation: JsonObject = field(default_factory=dict)  # their `generation_config.json`, if the tokenizer is theirs

    def list_ids(self) -> JsonObject:
        """Return the keys of special tokens for `config.json` and `generation_config.json`."""
        ids: JsonObject = dict.fromkeys(_IDS) | self.ids
        if self.tokenizer.begin is not None:
            ids["bos_token_id"] = self.tokenizer.begin
        ends = [self.tokenizer.end_of_turn]
        for given in (ids["eos_token_id"], self.generation.get("eos_token_id")):
            ends += given if isinstance(given, list) else [given]
        ends.append(self.tokenizer.end)
        ends = list(dict.fromkeys(end for end in ends if end is not None))
        ids["eos_token_id"] = ends[0] if len(ends) == 1 else ends or None
        if ids["pad_token_id"] is None:
            # Without an id of its own padding is commonly an end token.
            ids["pad_token_id"] = self.tokenizer.pad if self.tokenizer.pad is not None else (ends or [None])[0]
        return {key: value for key, value in ids.items() if value is not None}

    def read_template(self) -> ChatTemplate:
        """Return the chat template. Raises `DataError` if there is none."""

        def read(name: str) -> bytes:
            # The name of a file beside another one begins with its directory.
            content = self.tokenizer.files.get(name.rpartition("/")[2])
            if content is None:
                raise DataError("does not exist")
            return content

        return read_template(TOKENIZER_CONFIG, read)


def find_assets(data: DataConfig | None, rule: InitFromConfig | None) -> ExportAssets:
    """Return the assets of a run by reading its sources.

    `data` is None for a job without data, and `rule`, which is `checkpoint.init_from`, for random initial weights.

    Raises:
        InvalidError: A file is damaged.
        OSError: A source cannot be reached.
    """
    tokenizer = TokenizerFiles(problem="the job has no data") if data is None else make_tokenizer_files(data)
    if rule is None:
        return ExportAssets(tokenizer)
    directory, _ = split_checkpoint(rule.path)
    earlier = read_assets(open_store(directory))
    if earlier is not None:
        # The run that this one starts from has recorded its own base.
        return _combine(tokenizer, replace(earlier, base=earlier.base or directory, ids=earlier.list_ids()))
    store = open_store(directory)
    config = _read_optional_object(store, CONFIG_FILE)
    if config is None:
        return ExportAssets(tokenizer)
    config = drop_config_keys(config, rule.ignored_config_keys)
    every = unnest_config(config)
    ids = {key: every[key] for key in _IDS if every.get(key) is not None}
    generation = _read_optional_object(store, GENERATION_CONFIG) or {}
    published = ExportAssets(TokenizerFiles(read_files(store)), directory, config, ids, generation)
    return _combine(tokenizer, published)


def _combine(tokenizer: TokenizerFiles, base: ExportAssets) -> ExportAssets:
    """Return the assets of a run with the tokenizer of its data that starts from weights with the assets `base`."""
    is_known, theirs = bool(tokenizer.files), base.tokenizer.files
    if is_known and not _is_same_tokenizer(tokenizer.files, theirs):
        return ExportAssets(tokenizer, base.base, base.config)
    settings: JsonObject = {}
    if TOKENIZER_CONFIG in theirs:
        try:
            settings = parse_json(theirs[TOKENIZER_CONFIG])
        except ValueError as error:
            raise InvalidError(f"{base.base}/{TOKENIZER_CONFIG} cannot be read: {error}") from error
    files = dict(theirs)
    if is_known and TOKENIZER_CONFIG in tokenizer.files:
        made = parse_json(tokenizer.files[TOKENIZER_CONFIG])
        if "chat_template" in made:
            # The data were rendered with this template, so it replaces that of the published weights.
            files.pop(CHAT_TEMPLATE, None)
            # The special tokens that it renders come with it.
            pad_token = settings.get("pad_token")
            settings |= {key: text for key, text in made.items() if key == "chat_template" or key.endswith("_token")}
            settings |= {} if pad_token is None else {"pad_token": pad_token}
        settings = settings or made
        # The token that the documents of the data begin with replaces that of the published weights.
        settings |= {"bos_token": made["bos_token"]} if tokenizer.begin is not None and "bos_token" in made else {}
    if settings:
        files[TOKENIZER_CONFIG] = encode_json(settings)
    size = tokenizer.vocabulary_size
    if not size:
        size = max((_read_vocabulary(files.get(TOKENIZER)) or {}).values(), default=-1) + 1
    problem = tokenizer.problem
    if TOKENIZER in files:
        problem = None
    elif not is_known:
        problem = f"{base.base} has no {TOKENIZER}"
    return replace(base, tokenizer=replace(tokenizer, files=files, vocabulary_size=size, problem=problem))


def _is_same_tokenizer(own: Mapping[str, bytes], theirs: Mapping[str, bytes]) -> bool:
    """Return True if all files of `own` are among `theirs`, or both have the same vocabulary."""
    content = own.get(TOKENIZER)
    if own.items() <= theirs.items() or (content is not None and content == theirs.get(TOKENIZER)):
        return True
    # Parsing a large vocabulary takes up to a second, so it comes last.
    vocabulary = _read_vocabulary(content)
    return vocabulary is not None and vocabulary == _read_vocabulary(theirs.get(TOKENIZER))


def record_assets(store: Store, data: DataConfig, rule: InitFromConfig | None) -> None:
    """Record the assets of a run that begins. Process 0 calls it; a failure only causes a warning."""
    try:
        save_assets(store, find_assets(data, rule))
    except (InvalidError, OSError) as error:
        warn(f"{store.url}/{ASSETS} is not written, an export will read the sources again: {error}")


def save_assets(store: Store, assets: ExportAssets) -> None:
    """Record assets in a run's directory. Process 0 calls it, before the first step."""
    tokenizer = assets.tokenizer
    for name, content in tokenizer.files.items():
        store.write(f"{ASSETS}/{name}", content)
    record = {
        "format": FORMAT,
        "base": assets.base,
        "config": assets.config,
        "ids": assets.ids,
        "generation": assets.generation,
        **{key: getattr(tokenizer, key) for key in _TOKENIZER_KEYS},
        "files": {name: hashlib.sha256(content).hexdigest() for name, content in tokenizer.files.items()},
    }
    # Written last: without it the files are not read.
    store.write(_RECORD, encode_json(record))


def read_assets(store: Store) -> ExportAssets | None:
    """Return the assets that a run has recorded; None if it has none.

    Raises:
        InvalidError: They are damaged.
        OSError: The store cannot be read.
    """
    try:
        record = read_record(store, _RECORD, ASSET_KEYS, [key.name for key in ASSET_KEYS if key.name != "begin"])
        if record is None:
            return None
        strange = [name for name in record["files"] if name not in (*BASE_TOKENIZER_FILES, *TOKENIZER_FILES.values())]
        if strange:
            raise ValueError(f"{strange[0][:60]!r} is not the name of a tokenizer file")
        files = {name: store.read(f"{ASSETS}/{name}") for name in record["files"]}
        for name, content in files.items():
            if hashlib.sha256(content).hexdigest() != record["files"][name]:
                raise ValueError(f"{name} is not the file that was recorded")
    except (DamagedRecordError, ValueError, FileNotFoundError) as error:
        raise InvalidError(f"{store.url}/{_RECORD} is damaged: {error}") from error
    found: JsonObject = {key: record.get(key) for key in _TOKENIZER_KEYS}
    tokenizer = TokenizerFiles(files, **found)
    return ExportAssets(tokenizer, record["base"], record["config"], record["ids"], record["generation"])


def replace_tokenizer(assets: ExportAssets, where: str) -> ExportAssets:
    """Return assets with the tokenizer files of a directory or URL.

    Raises:
        InvalidError: The directory has no `tokenizer.json` that can be read.
    """
    store = open_store(where)
    files = read_files(store)
    vocabulary = _read_vocabulary(files.get(TOKENIZER))
    if vocabulary is None:
        raise InvalidError(f"--tokenizer {where}: needs a directory with a {TOKENIZER} of the tokenizers library")
    generation = _read_optional_object(store, GENERATION_CONFIG) or {}
    settings = _read_optional_object(store, TOKENIZER_CONFIG) or {}

    words = {key: get_token_text(settings.get(key.removesuffix("_id"))) for key in _IDS}
    ids = {key: vocabulary[word] for key, word in words.items() if word in vocabulary}
    tokenizer = TokenizerFiles(files, max(vocabulary.values(), default=-1) + 1)
    return ExportAssets(tokenizer, assets.base, assets.config, ids, generation)
