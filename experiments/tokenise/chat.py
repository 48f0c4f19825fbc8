"""Chat templates: read from the tokenizer's own file, rendered in a process of their own (see `template_process`).

Records of dialogues, and which of their tokens are of answers. Knows no template and no file.

What a tokenise job is told of dialogues: read, checked, and counted at the end. Knows no tokens.
"""

import difflib
import hashlib
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np

from experiments.tokenise import template_process
from experiments.tokenise.config import ChatConfig, TokeniseConfig
from experiments.tokenise.inputs import Form, read_file
from runner.data.corpus_index import COMPLETION_DTYPE
from runner.data.tokenizers import KINDS_WITH_SPANS
from runner.errors import DataError
from runner.spec import Document
from runner.spec.imports import import_extra
from runner.storage import JsonObject

ASSISTANT = "assistant"
FORMS = ("messages", "prompt", "completion")
DIALOGUE_KEYS = (*FORMS, "tools")  # of a line, or columns of a table


@dataclass(frozen=True)
class ChatRecord:
    """A record as it was read: messages in the order of the dialogue, and what tools they may call."""

    messages: list[JsonObject]
    tools: list[JsonObject] | None = None
    is_pair: bool = False  # of a prompt and a completion


@dataclass(frozen=True)
class Dialogue:
    """A dialogue as one text, and the spans of characters in it that are answers: ascending, apart."""

    text: str
    answers: tuple[tuple[int, int], ...]

    def __len__(self) -> int:
        """Bytes, as of the documents of other sources."""
        return len(self.text.encode())

    @property
    def ends_with_answer(self) -> bool:
        """Whether the token that ends it is the model's to write."""
        return bool(self.answers) and self.answers[-1][1] == len(self.text)


@dataclass(frozen=True)
class MarkedTokens:
    """The ids of a dialogue, and of each whether it is of an answer. `is_cut`: it had more."""

    ids: np.ndarray
    marks: np.ndarray
    is_cut: bool = False


def parse_dialogue(record: Any) -> ChatRecord | str:
    """What a line or row is, or lacks: `{"messages": [{"role", "content"}]}`, or `{"prompt", "completion"}`."""
    if not isinstance(record, dict):
        return "is no JSON object with messages, or a prompt and a completion"
    found = [key for key in FORMS if key in record]
    if found == ["messages"]:
        return _parse_messages(record)
    if found == ["prompt", "completion"]:
        wrong = next((key for key in found if not isinstance(record[key], str)), None)
        if wrong is not None:
            return f"{wrong!r} is no text: {str(record[wrong])[:40]}"
        if not record["completion"]:
            return "'completion' is empty: there is nothing to learn"
        pair = [{"role": "user", "content": record["prompt"]}, {"role": ASSISTANT, "content": record["completion"]}]
        return ChatRecord(pair, is_pair=True)
    if found:
        return f"has {' and '.join(map(repr, found))}; needs messages alone, or a prompt and a completion"
    near = [match for form in FORMS for match in difflib.get_close_matches(form, record, n=1)]
    hint = f"; did you mean {FORMS[0]}, where it has {near[0]!r}?" if near else ""
    return f"has no 'messages', and no 'prompt' and 'completion'{hint}"


def _parse_messages(record: JsonObject) -> ChatRecord | str:
    messages, tools = record["messages"], record.get("tools")
    if not isinstance(messages, list) or not messages:
        return f"'messages' is no list of messages: {str(messages)[:40]}"
    for place, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return f"message {place} is no object with a role: {str(message)[:40]}"
        content = message.get("content")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            return f"the content of message {place} is no text: {str(content)[:40]}"
    if tools is not None and not isinstance(tools, list):
        return f"'tools' is no list: {str(tools)[:40]}"
    if all(message["role"] != ASSISTANT for message in messages):
        return f"no message has the role {ASSISTANT}: there is nothing to learn"
    return ChatRecord(messages, tools)


def marks_of(spans: np.ndarray, answers: Sequence[tuple[int, int]]) -> np.ndarray:
    """Whether each token is of an answer, (number of tokens,): one that shares a character with one is.

    `spans` are the characters of each token, (number of tokens, 2).
    """
    starts, stops = spans[:, 0], spans[:, 1]
    marks = np.zeros(len(spans), COMPLETION_DTYPE)
    for begin, end in answers:
        marks |= (starts < end) & ((stops > begin) | ((starts == stops) & (starts >= begin)))
    return marks


def mark(
    dialogue: Dialogue, ids: np.ndarray, spans: np.ndarray, separator: int | None, most: int | None
) -> MarkedTokens:
    """The tokens of a dialogue, the separator last; what would make them more than `most` is cut off before it.

    The separator is of an answer where one stands before it, and nothing of it was cut.
    """
    marks, tail = marks_of(spans, dialogue.answers), 0 if separator is None else 1
    is_cut = most is not None and len(ids) + tail > most
    if is_cut and most is not None:
        ids, marks = ids[: most - tail], marks[: most - tail]
    if separator is not None:
        ids = np.concatenate([ids, np.array([separator], ids.dtype)])
        marks = np.concatenate([marks, np.array([dialogue.ends_with_answer and not is_cut], marks.dtype)])
    return MarkedTokens(ids, marks, is_cut)


RENDER_SECONDS = 10.0  # of the CPU, for one dialogue
MEMORY_BYTES = 1 << 30  # of the process; a dialogue and a template take some kilobytes
TEMPLATE_BYTES_MAX = 1 << 20
BESIDE = "chat_template.jinja"


@dataclass(frozen=True)
class ChatTemplate:
    """A template, and the names that it may use besides the dialogue: texts of special tokens."""

    source: str = field(repr=False)
    names: dict[str, str]

    @property
    def sha256(self) -> str:
        """Of all of it."""
        return hashlib.sha256(json.dumps([self.source, self.names], sort_keys=True).encode()).hexdigest()


def read_template(name: str) -> ChatTemplate:
    """The template of the `tokenizer_config.json` at a path or URL, or of the `chat_template.jinja` beside it.

    Of several the one named `default` is taken. Raises `DataError` if there is none.
    """
    try:
        config = json.loads(read_file(name))
    except DataError as error:
        raise DataError(f"{name}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{name} is no tokenizer_config.json: {error}") from error
    if not isinstance(config, dict):
        raise DataError(f"{name} is no tokenizer_config.json: it holds no object")
    source = _default_of(config.get("chat_template"))
    if source is None:
        try:
            source = read_file(f"{name.rpartition('/')[0] or '.'}/{BESIDE}").decode(errors="replace")
        except DataError as error:
            raise DataError(f"{name} has no chat_template, and there is no {BESIDE} beside it") from error
    if len(source) > TEMPLATE_BYTES_MAX:
        raise DataError(f"{name}: its template has {len(source):,} characters, needs at most {TEMPLATE_BYTES_MAX:,}")
    return ChatTemplate(source, {key: text for key in config if (text := _token(key, config[key])) is not None})


def _default_of(templates: Any) -> str | None:
    """The template itself, or of a list of named ones that named `default`."""
    if isinstance(templates, list):
        named = {each.get("name"): each.get("template") for each in templates if isinstance(each, dict)}
        templates = named.get("default")
    return templates if isinstance(templates, str) else None


def _token(key: str, value: Any) -> str | None:
    """The text of a special token, if the key is of one: it stands alone, or as an object's content."""
    if not key.endswith("_token"):
        return None
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


class Renderer:
    """A process that renders one template. One thread at a time; close it, as a context.

    Without a template prompts and completions stand one after the other, and there is no process.
    """

    def __init__(self, template: ChatTemplate | None):
        """Raises `DataError` if the template is none."""
        self._process: subprocess.Popen[str] | None = None
        if template is None:
            return
        import_extra("jinja2", "chat")
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(Path(template_process.__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={},
        )
        limits = {"seconds": RENDER_SECONDS, "memory_bytes": MEMORY_BYTES}
        found = self._ask({"template": template.source, "names": template.names, **limits})
        if "error" in found:
            self.close()
            raise DataError(f"is no chat template: {found['error']}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def render(self, asked: ChatRecord) -> Dialogue | str:
        """The dialogue as the template has it, or why it cannot be. Raises `DataError` for what no template may do."""
        if self._process is None:
            if not asked.is_pair:
                return "has messages, which need config.chat.template"
            prompt, completion = (_whole(message["content"]) for message in asked.messages)
            return Dialogue(prompt + completion, ((len(prompt), len(prompt) + len(completion)),))
        found = self._ask({"messages": asked.messages, "tools": asked.tools})
        if "error" in found:
            if found["is_hostile"]:
                raise DataError(f"the chat template is not rendered: {found['error']}")
            return f"the chat template refuses it: {found['error']}"
        return Dialogue(_whole(found["text"]), tuple((begin, end) for begin, end in found["answers"]))

    def _ask(self, question: JsonObject) -> JsonObject:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            answer: JsonObject = json.loads(self._process.stdout.readline())
        except (BrokenPipeError, ValueError) as error:
            code = self._process.wait()
            if code == -signal.SIGPROF:
                raise DataError(f"the chat template takes more than {RENDER_SECONDS:g} s for one dialogue") from error
            raise DataError(f"the chat template ends the process that renders it ({code})") from error
        return answer


def _whole(text: str) -> str:
    """JSON can hold half a character, which no text can."""
    return text.encode(errors="replace").decode()


@dataclass(frozen=True)
class ChatReader:
    """How lines become dialogues: with which template, and of how many tokens at most."""

    template: ChatTemplate | None
    max_tokens: int | None
    is_cut: bool  # a longer one, else it is left out


class ChatCounts(Protocol):
    """The record of a piece."""

    @property
    def num_dropped(self) -> int: ...

    @property
    def num_cut(self) -> int: ...


def load_chat(config: ChatConfig) -> ChatReader:
    """Read the template. Raises `DataError` if it is none."""
    template = None if config.template is None else read_template(config.template)
    Renderer(template).close()
    return ChatReader(template, config.max_tokens, config.longer == "cut")


def validate_chat_read(config: TokeniseConfig, form: Form, document: Document) -> None:
    """Raise the document's error where a key says nothing of these files, or they and the tokenizer cannot serve it."""
    unread = {"field": form == "text" or config.chat is not None, "skip_bad": form == "text"}
    for key, is_unread in unread.items():
        value = getattr(config, key)
        if is_unread and value != TokeniseConfig.model_fields[key].default:
            reason = f"{config.source} names text files" if form == "text" else "with chat lines and rows are dialogues"
            raise document.error(f"config.{key}", f"is {value}: nothing reads it, {reason}; leave it out")
    if config.chat is None:
        return
    if form == "text":
        raise document.error(
            "config.chat", f"needs lines of .jsonl or rows of a table, {config.source} names text files"
        )
    if config.tokenizer.kind not in KINDS_WITH_SPANS:
        raise document.error(
            "config.tokenizer.kind",
            f"is {config.tokenizer.kind}, dialogues need one of {', '.join(KINDS_WITH_SPANS)}, which tells which "
            "characters a token is of",
        )


def digest_of(tokenizer: str, chat: ChatReader | None) -> str:
    """Another one where the same lines make other ids: of the tokenizer's digest, and the template if there is one."""
    if chat is None or chat.template is None:
        return tokenizer
    return hashlib.sha256(f"{tokenizer} {chat.template.sha256}".encode()).hexdigest()


def tell_too_long(done: Sequence[ChatCounts], chat: ChatReader | None) -> str | None:
    """How many dialogues lost their end, and how many all; None where there were none."""
    num_dropped, num_cut = sum(piece.num_dropped for piece in done), sum(piece.num_cut for piece in done)
    if chat is None or not num_dropped + num_cut:
        return None
    return f"of dialogues of more than {chat.max_tokens:,} tokens {num_cut} lost their end, {num_dropped} were left out"
