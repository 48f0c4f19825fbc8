"""Question files in the formats of common benchmarks; invalid lines are reported with file and line."""

import json
from pathlib import Path
from typing import Any

import pytest

from runner.errors import DataError
from runner.evaluation.likelihood import Question, read_questions

VALID_RECORDS: dict[str, tuple[dict[str, Any], Question]] = {
    "plain": ({"question": "q", "choices": ["a", "b"], "answer": 1}, Question("q", ("a", "b"), 1)),
    "context": ({"context": "q", "options": ["a", "b"], "gold": 0}, Question("q", ("a", "b"), 0)),
    "hellaswag": ({"ctx": "q", "endings": ["a", "b"], "label": "1"}, Question("q", ("a", "b"), 1)),
    "letter": ({"query": "q", "choices": ["a", "b"], "answer": "B"}, Question("q", ("a", "b"), 1)),
    "arc": (
        {"question": "q", "choices": {"text": ["a", "b"], "label": ["1", "2"]}, "answerKey": "1"},
        Question("q", ("a", "b"), 0),
    ),
    "more keys": ({"id": 7, "question": "q", "choices": ["a", "b"], "answer": 0}, Question("q", ("a", "b"), 0)),
}
INVALID_TEXTS: dict[str, tuple[str, str]] = {
    "not JSON": ("{", "Expecting"),
    "no object": ("[1]", "needs a JSON object"),
    "no question": ('{"choices": ["a", "b"], "answer": 0}', "has no question or context"),
    "no choices": ('{"question": "q", "answer": 0}', "has no choices or options"),
    "one choice": ('{"question": "q", "choices": ["a"], "answer": 0}', "at least two choices"),
    "a blank choice": ('{"question": "q", "choices": ["a", " "], "answer": 0}', "got ' ' as a choice"),
    "a number": ('{"question": "q", "choices": ["a", 1], "answer": 0}', "got 1 as a choice"),
    "beyond": ('{"question": "q", "choices": ["a", "b"], "answer": 2}', "got 2 as the answer"),
    "true": ('{"question": "q", "choices": ["a", "b"], "answer": true}', "got True as the answer"),
    "no letter": ('{"question": "q", "choices": ["a", "b"], "answer": "C"}', "got 'C' as the answer"),
    "half a character": ('{"question": "\\ud800", "choices": ["a", "b"], "answer": 0}', "surrogates not allowed"),
    "nothing": ("", "holds no question"),
}


@pytest.mark.parametrize(("record", "question"), VALID_RECORDS.values(), ids=VALID_RECORDS)
def test_common_formats_are_read(record: dict[str, Any], question: Question, tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text(f"{json.dumps(record)}\n\n{json.dumps(record)}\n")
    assert read_questions(str(path)) == [question] * 2
    assert read_questions(str(path), limit=1) == [question]


@pytest.mark.parametrize(("text", "reason"), INVALID_TEXTS.values(), ids=INVALID_TEXTS)
def test_an_invalid_question_is_reported_in_one_line_with_its_position(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    good = json.dumps({"question": "q", "choices": ["a", "b"], "answer": 1})
    path.write_text(f"{good}\n{text}\n" if text else "\n")
    with pytest.raises(DataError) as caught:
        read_questions(str(path))
    assert reason in str(caught.value)
    assert str(caught.value).startswith(f"{path}:2: " if text else f"{path}: ")
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no such file"):
        read_questions(str(tmp_path / "none.jsonl"))
