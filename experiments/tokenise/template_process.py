"""A process that renders chat templates, and can do nothing else: run as a program, it imports nothing of the project.

A template is data of whoever made the tokenizer, and a program in all but name. It runs in Jinja's sandbox, which lets
it neither change nor reach what it is not given; in this process, which can open no file and has a bounded memory;
and for a bounded time, after which the system ends the process. Nothing in a template is random and none sees a clock.

Lines of JSON in, a line of JSON out for each: first the template and its bounds, then one line for each dialogue.
"""

import contextlib
import encodings.unicode_escape  # noqa: F401 - see `jinja2.debug`
import functools
import json
import re
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import jinja2
import jinja2.debug  # the library would import these two later, when there are no files
import jinja2.ext
import jinja2.sandbox

# What a template or its input may do wrong. Anything else ends the process.
_RAISED = (
    *(jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, MemoryError, OSError, RuntimeError),
    *(TypeError, ValueError),
)
_HOSTILE = (jinja2.sandbox.SecurityError, MemoryError, OSError)
_MARK = "\ue000"  # for private use: no character of a text
_OPEN, _CLOSE = f"{_MARK}<", f"{_MARK}>"  # stand around what is generated


class _Generation(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}`: what the model is to write."""

    tags = {"generation"}  # noqa: RUF012 - as the library declares it

    def parse(self, parser: Any) -> Any:
        """Mark what comes out of the block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        self.environment.has_generation = True  # type: ignore[attr-defined]
        return jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return f"{_OPEN}{caller()}{_CLOSE}"


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """As `transformers` has it; what is unsafe is refused, where Jinja would print nothing."""

    has_generation = False

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        raise jinja2.sandbox.SecurityError(f"{attribute!r} of a {type(obj).__name__} is out of bounds")


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys)


def _compile(source: str) -> tuple[jinja2.Template, bool]:
    """The template, and whether it says what is generated."""
    sandbox = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols], cache_size=0
    )
    del sandbox.globals["lipsum"], sandbox.filters["random"]
    sandbox.filters["tojson"] = _to_json
    sandbox.globals["raise_exception"] = _refuse
    return sandbox.from_string(source), sandbox.has_generation


def _bound(memory_bytes: int) -> None:
    """From here on: so much memory, and no file more."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Inside, the system ends the process after so many seconds of its own CPU."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _take_marks(rendered: str) -> tuple[str, list[tuple[int, int]]]:
    """The text without marks, and the spans that were between them."""
    text, spans, begun = "", [], None
    for part in re.split(f"({_OPEN}|{_CLOSE})", rendered):
        if part == _OPEN:
            begun = len(text) if begun is None else begun
        elif part == _CLOSE:
            if begun is not None:
                spans.append((begun, len(text)))
            begun = None
        else:
            text += part
    return text, spans


class _UnlikeError(ValueError):
    """A template renders a dialogue otherwise once it goes on."""


def _spans_by_prefixes(render: Callable[..., str], messages: list[Any], text: str) -> list[tuple[int, int]]:
    """Where answers stand in `text`: from the end of what prompts each, to where the dialogue up to it ends."""
    spans = []
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = render(messages[:place], add_generation_prompt=True)
        until = render(messages[: place + 1])
        if not (until.startswith(prompt) and text.startswith(until)):
            raise _UnlikeError(
                f"it renders message {place + 1}, an answer, otherwise where it ends the dialogue or is asked for; "
                "mark answers in it with {% generation %}"
            )
        spans.append((len(prompt), len(until)))
    return spans


def _dialogue(template: jinja2.Template, marks: bool, names: dict[str, object], asked: Any) -> dict[str, object]:
    """The text of a dialogue, and the spans of its answers."""

    def render(messages: list[Any], add_generation_prompt: bool = False) -> str:
        found = template.render(
            **names | {"messages": messages, "tools": asked["tools"], "documents": None},
            add_generation_prompt=add_generation_prompt,
        )
        return str(found)

    if marks and _MARK in _to_json(asked):
        raise ValueError("it holds the character U+E000, which is for private use, and marks answers here")
    rendered = render(asked["messages"])
    text, spans = _take_marks(rendered) if marks else (rendered, [])
    if not marks:
        spans = _spans_by_prefixes(render, asked["messages"], text)
    spans = [(begin, end) for begin, end in spans if begin < end]
    if not spans:
        raise ValueError("it shows none of the answers")
    return {"text": text, "answers": spans}


def _answer(act: Callable[[], dict[str, object]], seconds: float) -> dict[str, object]:
    try:
        with _limited(seconds):
            return act()
    except _RAISED as error:
        said = " ".join(str(error).split())[:300] or "more memory than it may have"
        return {"error": said, "is_hostile": isinstance(error, _HOSTILE)}


def main() -> None:
    """Serve until the input ends."""
    given = json.loads(sys.stdin.readline())
    seconds, names = given["seconds"], given["names"]
    compiled: list[tuple[jinja2.Template, bool]] = []

    def begin() -> dict[str, object]:
        compiled.append(_compile(given["template"]))
        return {"has_generation": compiled[0][1]}

    _bound(given["memory_bytes"])
    print(json.dumps(_answer(begin, seconds)), flush=True)
    for line in sys.stdin if compiled else ():
        act = functools.partial(_dialogue, *compiled[0], names, json.loads(line))
        print(json.dumps(_answer(act, seconds)), flush=True)


if __name__ == "__main__":
    main()
