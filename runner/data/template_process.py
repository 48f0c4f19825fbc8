"""Sandboxed process that renders chat templates. Run as a program; it imports nothing of the project.

A chat template comes from a third party and is effectively a program, so it is confined three times: by Jinja's
sandbox, which hides everything that is not passed to the template; by this process, which can open no file and has a
memory limit; and by a CPU time limit, after which the kernel kills the process. Templates have no access to random
numbers or to a clock.

Protocol, in lines of JSON: the first request holds the template and its limits, each further one a dialogue. Each
request gets one line as the response.
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
import jinja2.debug  # The library would import these two on first use, when no file can be opened any more.
import jinja2.ext
import jinja2.sandbox

# Errors that a template or its input may cause. Any other error ends the process.
_EXPECTED_ERRORS = (
    *(jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, MemoryError, OSError, RuntimeError),
    *(TypeError, ValueError),
)
_HOSTILE_ERRORS = (jinja2.sandbox.SecurityError, MemoryError, OSError)
_MARK = "\ue000"  # A private-use character, which occurs in no text.
_OPEN, _CLOSE = f"{_MARK}<", f"{_MARK}>"  # Enclose generated text in the rendered template.


class _Generation(jinja2.ext.Extension):
    """Extension for `{% generation %} ... {% endgeneration %}`, which encloses text that the model generates."""

    tags = {"generation"}  # noqa: RUF012 - as the library declares it

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        self.environment.has_generation = True  # type: ignore[attr-defined]
        return jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return f"{_OPEN}{caller()}{_CLOSE}"


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Environment that `transformers` uses, except that unsafe access is an error instead of empty text."""

    has_generation = False

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        raise jinja2.sandbox.SecurityError(f"{attribute!r} of a {type(obj).__name__} is out of bounds")


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys)


def _compile(source: str) -> tuple[jinja2.Template, bool]:
    """Return the template, and True if it marks generated text."""
    sandbox = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols], cache_size=0
    )
    # The text of a dialogue must be the same each time, and these two draw random numbers.
    del sandbox.globals["lipsum"], sandbox.filters["random"]
    sandbox.filters["tojson"] = _to_json
    sandbox.globals["raise_exception"] = _raise_exception
    return sandbox.from_string(source), sandbox.has_generation


@contextlib.contextmanager
def _limit_cpu(seconds: float) -> Iterator[None]:
    """Let the kernel kill the process if the body takes more than `seconds` of CPU time."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _remove_marks(rendered: str) -> tuple[str, list[tuple[int, int]]]:
    """Return the text without marks, and the spans of characters that were between marks."""
    text, spans, start = "", [], None
    for part in re.split(f"({_OPEN}|{_CLOSE})", rendered):
        if part == _OPEN:
            # Marks of nested blocks are ignored: the outermost block is the completion.
            start = len(text) if start is None else start
        elif part == _CLOSE:
            if start is not None:
                spans.append((start, len(text)))
            start = None
        else:
            text += part
    return text, spans


class _InconsistentTemplateError(ValueError):
    """A template renders a message differently once the dialogue continues."""


def _find_spans_by_prefix(render: Callable[..., str], messages: list[Any], text: str) -> list[tuple[int, int]]:
    """Return the spans of completions in `text`, for templates that do not mark them.

    A completion begins where the rendered prompt before it ends, and ends where the dialogue up to it ends.
    """
    spans = []
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = render(messages[:place], add_generation_prompt=True)
        until = render(messages[: place + 1])
        # Some templates, such as those that drop earlier reasoning, render a message by what follows it.
        if not (until.startswith(prompt) and text.startswith(until)):
            raise _InconsistentTemplateError(
                f"it renders message {place + 1}, a completion, differently as the last message and within the "
                "dialogue; mark completions in the template with {% generation %}"
            )
        spans.append((len(prompt), len(until)))
    return spans


def _render_dialogue(
    template: jinja2.Template, has_marks: bool, names: dict[str, object], request: Any
) -> dict[str, object]:
    """Return the text of a dialogue and the spans of its completions, or the text up to its next completion."""

    def render(messages: list[Any], add_generation_prompt: bool = False) -> str:
        found = template.render(
            **names | {"messages": messages, "tools": request["tools"], "documents": None},
            add_generation_prompt=add_generation_prompt,
        )
        return str(found)

    if has_marks and _MARK in _to_json(request):
        raise ValueError("it holds the private-use character U+E000, which marks completions here")
    if request["is_prompt"]:
        return {"text": _remove_marks(render(request["messages"], add_generation_prompt=True))[0], "completions": []}
    rendered = render(request["messages"])
    text, spans = _remove_marks(rendered) if has_marks else (rendered, [])
    if not has_marks:
        spans = _find_spans_by_prefix(render, request["messages"], text)
    spans = [(begin, end) for begin, end in spans if begin < end]
    if not spans:
        raise ValueError("it shows none of the completions")
    return {"text": text, "completions": spans}


def _respond(act: Callable[[], dict[str, object]], seconds: float) -> dict[str, object]:
    try:
        with _limit_cpu(seconds):
            return act()
    except _EXPECTED_ERRORS as error:
        message = " ".join(str(error).split())[:300] or "it needs more memory than allowed"
        return {"error": message, "is_hostile": isinstance(error, _HOSTILE_ERRORS)}


def main() -> None:
    """Serve requests until the input ends."""
    first = json.loads(sys.stdin.readline())
    seconds, names = first["seconds"], first["names"]
    compiled: list[tuple[jinja2.Template, bool]] = []

    def compile_template() -> dict[str, object]:
        compiled.append(_compile(first["template"]))
        return {"has_generation": compiled[0][1]}

    # Everything is imported by now; from here on no file can be opened, not even by a bug of the sandbox.
    resource.setrlimit(resource.RLIMIT_AS, (first["memory_bytes"], first["memory_bytes"]))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print(json.dumps(_respond(compile_template, seconds)), flush=True)
    for line in sys.stdin if compiled else ():
        act = functools.partial(_render_dialogue, *compiled[0], names, json.loads(line))
        print(json.dumps(_respond(act, seconds)), flush=True)


if __name__ == "__main__":
    main()
