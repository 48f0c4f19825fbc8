"""Questions with choices, of which one is right, in a file of JSON lines as benchmarks ship them.

A line has one key of each row, under any of these names:

- `question`, `context`, `query` or `ctx`: the text that a choice goes on from;
- `choices`, `options` or `endings`: a list of texts, or `{"text": [...], "label": [...]}` as ARC has it;
- `answer`, `label`, `gold` or `answerKey`: the place of the right choice (0 is the first), or its label or letter.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from runner.errors import DataError
from runner.storage import JsonObject, open_store

_CONTEXTS = ("question", "context", "query", "ctx")
_CHOICES = ("choices", "options", "endings")
_ANSWERS = ("answer", "label", "gold", "answerKey")
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class Question:
    """A text, what may follow it, and which of these is right."""

    context: str
    choices: tuple[str, ...]
    answer: int


def read_questions(path: str, limit: int | None = None) -> list[Question]:
    """The first `limit` questions of a file, or all. Raises `DataError` naming file and line."""
    folder, _, name = path.rpartition("/")
    try:
        content = open_store(folder or ("/" if path.startswith("/") else ".")).read(name)
    except FileNotFoundError as error:
        raise DataError(f"{path}: there is no such file") from error
    found: list[Question] = []
    for number, line in enumerate(content.splitlines(), 1):
        if len(found) == limit:
            break
        if line.strip():
            try:
                found.append(_question(json.loads(line)))
            except (ValueError, RecursionError) as error:
                raise DataError(f"{path}:{number}: {error}") from error
    if not found:
        raise DataError(f"{path}: holds no question")
    return found


def _question(record: Any) -> Question:
    """Raises `ValueError`."""
    if not isinstance(record, dict):
        raise ValueError("needs a JSON object")
    context, answer = _first(record, _CONTEXTS), _first(record, _ANSWERS)
    choices: Any = _first(record, _CHOICES)
    labels: Sequence[Any] = _LETTERS
    if isinstance(choices, dict):
        choices, labels = choices.get("text"), choices.get("label", _LETTERS)
    if not isinstance(context, str) or not isinstance(choices, list) or len(choices) < 2:
        raise ValueError("needs a question that is text, and a list of at least two choices")
    if bad := [choice for choice in choices if not isinstance(choice, str) or not choice.strip()]:
        raise ValueError(f"got {bad[0]!r} as a choice, needs a text that is not blank")
    for text in (context, *choices):
        text.encode()  # JSON can write halves of characters, which no tokenizer takes
    return Question(context, tuple(choices), _place(answer, labels, len(choices)))


def _first(record: JsonObject, names: Sequence[str]) -> Any:
    found = next((name for name in names if name in record), None)
    if found is None:
        raise ValueError(f"has no {' or '.join(names)}")
    return record[found]


def _place(answer: Any, labels: Sequence[Any], number: int) -> int:
    """The index that an answer means: a number, or else a label, or else digits."""
    place: Any = answer
    if isinstance(answer, str):
        known = [str(label) for label in labels][:number]
        place = known.index(answer) if answer in known else int(answer) if answer.isdecimal() else None
    if type(place) is not int or not 0 <= place < number:
        raise ValueError(f"got {answer!r} as the answer, needs the index of one of {number} choices, or its letter")
    return place


def digest_of_questions(questions: Sequence[Question]) -> str:
    """Tells lists of questions apart."""
    return hashlib.sha256(repr(list(questions)).encode()).hexdigest()
