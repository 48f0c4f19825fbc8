"""Dialogues: their records, chat templates, and the marking of completion tokens.

A chat template comes from the tokenizer's own files and is rendered in a sandboxed process (`template_process`).
"""

import difflib
import hashlib
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from runner.data.corpus_index import COMPLETION_DTYPE
from runner.errors import DataError
from runner.spec.imports import import_extra
from runner.storage import JsonObject

_ASSISTANT = "assistant"
FORMS = ("messages", "prompt", "completion")
DIALOGUE_KEYS = (*FORMS, "tools")  # of a line, or columns of a table

RENDER_SECONDS = 10.0  # CPU time for one dialogue
_MEMORY_BYTES = 1 << 30  # of the rendering process; a dialogue and a template need some kilobytes
_TEMPLATE_BYTES_MAX = 1 << 20
_TEMPLATE_FILE = "chat_template.jinja"
# Run by path and not imported: it needs jinja2, which only jobs with a chat template have to install.
_TEMPLATE_PROCESS = Path(__file__).with_name("template_process.py")


@dataclass(frozen=True)
class ChatRecord:
    """Dialogue as it was read, with the tools that its messages may call; `is_pair` for a prompt and a completion."""

    messages: list[JsonObject]
    tools: list[JsonObject] | None = None
    is_pair: bool = False


@dataclass(frozen=True)
class Dialogue:
    """Dialogue rendered to one text, with the spans of characters that are completions, ascending and disjoint."""

    text: str
    completions: tuple[tuple[int, int], ...]

    def __len__(self) -> int:
        """Return the number of bytes, as for the documents of other sources."""
        return len(self.text.encode())

    @property
    def ends_with_completion(self) -> bool:
        """True if the model has to generate the token that ends the dialogue."""
        return bool(self.completions) and self.completions[-1][1] == len(self.text)


@dataclass(frozen=True)
class MarkedTokens:
    """Token ids of a dialogue, with a mark for each completion token; `is_cut` if tokens were cut off the end."""

    ids: np.ndarray
    marks: np.ndarray
    is_cut: bool = False


def parse_dialogue(record: Any) -> ChatRecord | str:
    """Parse a line or row; return a description of the problem if it is invalid.

    A record is `{"messages": [{"role", "content"}, ...]}` or `{"prompt", "completion"}`.
    """
    if not isinstance(record, dict):
        return "is not a JSON object with messages, or a prompt and a completion"
    # Other keys, such as ids and sources of data sets, are ignored.
    found = [key for key in FORMS if key in record]
    if found == ["messages"]:
        return _parse_messages(record)
    if found == ["prompt", "completion"]:
        wrong = next((key for key in found if not isinstance(record[key], str)), None)
        if wrong is not None:
            return f"{wrong!r} is not a string: {str(record[wrong])[:40]}"
        if not record["completion"]:
            return "'completion' is empty, so there is nothing to learn"
        pair = [{"role": "user", "content": record["prompt"]}, {"role": _ASSISTANT, "content": record["completion"]}]
        return ChatRecord(pair, is_pair=True)
    if found:
        return f"has {' and '.join(map(repr, found))}; needs messages alone, or a prompt and a completion"
    near = [match for form in FORMS for match in difflib.get_close_matches(form, record, n=1)]
    hint = f"; did you mean {FORMS[0]}, where it has {near[0]!r}?" if near else ""
    return f"has no 'messages', and no 'prompt' and 'completion'{hint}"


def _parse_messages(record: JsonObject) -> ChatRecord | str:
    messages, tools = record["messages"], record.get("tools")
    if not isinstance(messages, list) or not messages:
        return f"'messages' is not a list of messages: {str(messages)[:40]}"
    for place, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return f"message {place} is not an object with a role: {str(message)[:40]}"
        content = message.get("content")
        # A message that only calls tools may have no content.
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            return f"the content of message {place} is not a string: {str(content)[:40]}"
    if tools is not None and not isinstance(tools, list):
        return f"'tools' is not a list: {str(tools)[:40]}"
    if all(message["role"] != _ASSISTANT for message in messages):
        return f"no message has the role {_ASSISTANT}, so there is nothing to learn"
    return ChatRecord(messages, tools)


def compute_marks(spans: np.ndarray, completions: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return a mark for each token whose span (first character, end) shares a character with a completion's."""
    starts, stops = spans[:, 0], spans[:, 1]
    marks = np.zeros(len(spans), COMPLETION_DTYPE)
    for begin, end in completions:
        # An empty token, such as one byte of a multi-byte character, belongs to the completion around it.
        marks |= (starts < end) & ((stops > begin) | ((starts == stops) & (starts >= begin)))
    return marks


def mark_tokens(
    dialogue: Dialogue,
    ids: np.ndarray,
    spans: np.ndarray,
    begin: int | None,
    separator: int | None,
    max_tokens: int | None,
) -> MarkedTokens:
    """Return the marked tokens of a dialogue: `begin` first, unless the template has added it, and the separator last.

    Tokens beyond `max_tokens` are cut off before the separator. The separator counts as a completion token if a
    completion precedes it and nothing was cut off, so that the model learns to end its completions.
    """
    marks, tail = compute_marks(spans, dialogue.completions), 0 if separator is None else 1
    if begin is not None and ids[:1].tolist() not in ([], [begin]):
        ids = np.concatenate([np.array([begin], ids.dtype), ids])
        marks = np.concatenate([np.array([False], marks.dtype), marks])
    is_cut = max_tokens is not None and len(ids) + tail > max_tokens
    if is_cut and max_tokens is not None:
        ids, marks = ids[: max_tokens - tail], marks[: max_tokens - tail]
    if separator is not None:
        ids = np.concatenate([ids, np.array([separator], ids.dtype)])
        marks = np.concatenate([marks, np.array([dialogue.ends_with_completion and not is_cut], marks.dtype)])
    return MarkedTokens(ids, marks, is_cut)


@dataclass(frozen=True)
class ChatTemplate:
    """Chat template with the names that it may use besides the dialogue: the texts of special tokens."""

    source: str = field(repr=False)
    names: dict[str, str]

    @property
    def sha256(self) -> str:
        """SHA-256 of the template and its names."""
        return hashlib.sha256(json.dumps([self.source, self.names], sort_keys=True).encode()).hexdigest()


def read_template(name: str, read: Callable[[str], bytes]) -> ChatTemplate:
    """Read the template of the `chat_template.jinja` beside a `tokenizer_config.json`, or else of the config itself.

    `transformers` prefers them in this order. If a config has several templates, the one named `default` is used.
    `read` returns the content of a file or raises `DataError`, as this function does for a malformed or too large one.
    """
    try:
        config = json.loads(read(name))
    except DataError as error:
        raise DataError(f"{name}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{name} is not a tokenizer_config.json: {error}") from error
    if not isinstance(config, dict):
        raise DataError(f"{name} is not a tokenizer_config.json: it does not hold an object")
    source: Any
    try:
        source = read(f"{name.rpartition('/')[0] or '.'}/{_TEMPLATE_FILE}").decode(errors="replace")
    except DataError as error:
        source = config.get("chat_template")
        if isinstance(source, list):
            named = {each.get("name"): each.get("template") for each in source if isinstance(each, dict)}
            source = named.get("default")
        if not isinstance(source, str):
            raise DataError(f"{name} has no chat_template, and there is no {_TEMPLATE_FILE} beside it") from error
    if len(source) > _TEMPLATE_BYTES_MAX:
        raise DataError(f"{name}: its template has {len(source):,} characters, needs at most {_TEMPLATE_BYTES_MAX:,}")
    names = {}
    for key, value in config.items():
        text = get_token_text(value)
        if key.endswith("_token") and text is not None:
            names[key] = text
    return ChatTemplate(source, names)


def get_token_text(value: Any) -> str | None:
    """Return the text of a special token in a `tokenizer_config.json`: a string, or an object with it as `content`."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


class Renderer:
    """Process that renders dialogues with one template. For one thread; use it as a context manager.

    Without a template it concatenates a prompt and its completion, and starts no process.
    """

    def __init__(self, template: ChatTemplate | None):
        """Start the process. Raises `DataError` if the template does not compile."""
        self._process: subprocess.Popen[str] | None = None
        if template is None:
            return
        # The process imports it; a missing package is reported here, where the error can name the extra.
        import_extra("jinja2")
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(_TEMPLATE_PROCESS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={},
        )
        # A template is untrusted code: it gets no environment, no files, and limited time and memory.
        limits = {"seconds": RENDER_SECONDS, "memory_bytes": _MEMORY_BYTES}
        response = self._request({"template": template.source, "names": template.names, **limits})
        if "error" in response:
            self.close()
            raise DataError(f"is not a chat template: {response['error']}")

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

    def render(self, record: ChatRecord) -> Dialogue | str:
        """Render a dialogue; return the reason if the template rejects it. Raises DataError for a harmful template."""
        if self._process is None:
            if not record.is_pair:
                return "has messages, which need chat.template"
            prompt, completion = (_replace_surrogates(message["content"]) for message in record.messages)
            return Dialogue(prompt + completion, ((len(prompt), len(prompt) + len(completion)),))
        return self._render(record, is_prompt=False)

    def render_prompt(self, messages: list[JsonObject]) -> str:
        """Render a dialogue up to the position from which the model continues. Needs a template. Raises DataError."""
        dialogue = self._render(ChatRecord(messages), is_prompt=True)
        if isinstance(dialogue, str):
            raise DataError(dialogue)
        return dialogue.text

    def _render(self, record: ChatRecord, is_prompt: bool) -> Dialogue | str:
        response = self._request({"messages": record.messages, "tools": record.tools, "is_prompt": is_prompt})
        if "error" in response:
            # A forbidden access ends the job, while a record that the template rejects is skipped like any bad line.
            if response["is_hostile"]:
                raise DataError(f"the chat template is not rendered: {response['error']}")
            return f"the chat template refuses it: {response['error']}"
        return Dialogue(
            _replace_surrogates(response["text"]), tuple((begin, end) for begin, end in response["completions"])
        )

    def _request(self, request: JsonObject) -> JsonObject:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            response: JsonObject = json.loads(self._process.stdout.readline())
        except (BrokenPipeError, ValueError) as error:
            code = self._process.wait()
            # The kernel's timer ends the process by this signal, see `_limit_cpu` in `template_process.py`.
            if code == -signal.SIGPROF:
                raise DataError(f"the chat template takes more than {RENDER_SECONDS:g} s for one dialogue") from error
            raise DataError(f"the chat template ends the process that renders it ({code})") from error
        return response


def _replace_surrogates(text: str) -> str:
    """Replace lone surrogates, which JSON can hold and UTF-8 cannot."""
    return text.encode(errors="replace").decode()


def find_end_of_turn(template: ChatTemplate, special_tokens: Collection[str]) -> str | None:
    """Return the special token that ends an assistant's message; None if the template writes none there."""
    content = "This is the end of the message."
    messages = [{"role": "user", "content": "Hello"}, {"role": _ASSISTANT, "content": content}]
    try:
        with Renderer(template) as renderer:
            dialogue = renderer.render(ChatRecord(messages))
    except DataError:
        return None  # The first dialogue of the data gives the same error, with its file and line.
    if isinstance(dialogue, str):
        return None
    rest = dialogue.text.rpartition(content)[2].lstrip()
    return max((token for token in special_tokens if rest.startswith(token)), key=len, default=None)
