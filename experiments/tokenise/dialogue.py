"""Records of dialogues, and which of their tokens are of answers. Knows no template and no file."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from runner.data.index import ANSWERS_DTYPE
from runner.storage import JsonObject

ASSISTANT = "assistant"
FORMS = ("messages", "prompt", "completion")
DIALOGUE_KEYS = (*FORMS, "tools")  # of a line, or columns of a table


@dataclass(frozen=True)
class Asked:
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
class Marked:
    """The ids of a dialogue, and of each whether it is of an answer. `is_cut`: it had more."""

    ids: np.ndarray
    marks: np.ndarray
    is_cut: bool = False


def parse_dialogue(record: Any) -> Asked | str:
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
        return Asked(pair, is_pair=True)
    if found:
        return f"has {' and '.join(map(repr, found))}; needs messages alone, or a prompt and a completion"
    near = [match for form in FORMS for match in difflib.get_close_matches(form, record, n=1)]
    hint = f"; did you mean {FORMS[0]}, where it has {near[0]!r}?" if near else ""
    return f"has no 'messages', and no 'prompt' and 'completion'{hint}"


def _parse_messages(record: JsonObject) -> Asked | str:
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
    return Asked(messages, tools)


def marks_of(spans: np.ndarray, answers: Sequence[tuple[int, int]]) -> np.ndarray:
    """Whether each token is of an answer, (number of tokens,): one that shares a character with one is.

    `spans` are the characters of each token, (number of tokens, 2).
    """
    starts, stops = spans[:, 0], spans[:, 1]
    marks = np.zeros(len(spans), ANSWERS_DTYPE)
    for begin, end in answers:
        marks |= (starts < end) & ((stops > begin) | ((starts == stops) & (starts >= begin)))
    return marks


def mark(dialogue: Dialogue, ids: np.ndarray, spans: np.ndarray, separator: int | None, most: int | None) -> Marked:
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
    return Marked(ids, marks, is_cut)
