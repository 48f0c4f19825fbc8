"""Chat templates: read from the tokenizer's own file, rendered in a process of their own (see `template_process`)."""

import hashlib
import json
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from experiments.tokenise import template_process
from experiments.tokenise.dialogue import Asked, Dialogue
from experiments.tokenise.source import read_file
from runner.data.extra import import_extra
from runner.errors import DataError
from runner.storage import JsonObject

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

    def render(self, asked: Asked) -> Dialogue | str:
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
