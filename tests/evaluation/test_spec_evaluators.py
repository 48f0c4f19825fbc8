"""Evaluators of the spec: invalid ones are rejected before the first step, also if evaluator() omits them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runner.errors import InvalidError, SpecError
from tests.support.bigram import BIGRAM_OPTIONS, BigramTrainer, write_questions
from tests.support.tiny_jobs import make_gpt


class OwnEvaluatorGPT(BigramTrainer):
    """A job whose evaluator() omits those of the spec."""

    def evaluator(self) -> Any:
        return self.validation


def make_task(path: Path | str, name: str = "some") -> dict[str, Any]:
    return {"name": name, "path": str(path)}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"config.eval.multiple_choice": [make_task("none.jsonl")]}, "config.eval: none.jsonl: there is no such file"),
        ({"config.eval.multiple_choice": [make_task("a"), make_task("b")]}, "multiple_choice names some twice"),
        ({"config.eval.multiple_choice": [make_task("a", "a/b")]}, "config.eval.multiple_choice"),
        ({"config.eval.samples": {"prompts": []}}, "config.eval.samples.prompts"),
        ({"config.eval.samples": {"prompts": ["a"], "tokens": 2000}}, "config.eval.samples.tokens"),
        ({"config.metrics.norms": "layers"}, "config.metrics.norms"),
    ],
)
def test_impossible_evaluations_are_rejected_before_anything_is_written(
    changes: dict[str, Any], line: str, tmp_path: Path
) -> None:
    with pytest.raises(SpecError) as caught:
        make_gpt(tmp_path / "run", BigramTrainer, **BIGRAM_OPTIONS, **changes)()
    assert line in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_questions_need_a_tokenizer_and_prompts_can_be_ids(tmp_path: Path) -> None:
    np.arange(5000, dtype="<u2").__mod__(250).astype("<u2").tofile(tmp_path / "tokens.bin")
    tokens = BIGRAM_OPTIONS | {"config.data.source": str(tmp_path / "tokens.bin"), "config.train.total_steps": 3}
    asked = {"config.eval.multiple_choice": [make_task(write_questions(tmp_path / "q.jsonl"))]}
    with pytest.raises(InvalidError, match=r"config\.eval: multiple_choice needs the tokenizer of the data"):
        make_gpt(tmp_path / "run", BigramTrainer, **tokens, **asked)()
    job = make_gpt(
        tmp_path / "run", BigramTrainer, **tokens, **{"config.eval.samples": {"prompts": ["7 8 9", ""], "tokens": 2}}
    )
    job()
    texts = [job.session.report.get_newest_row()[f"val/sample/{number}"] for number in range(2)]
    assert [len(text.split()) for text in texts] == [5, 2]
    assert texts[0].startswith("7 8 9 ")


@pytest.mark.parametrize("key", ["samples", "multiple_choice"])
def test_a_key_of_an_omitted_evaluator_is_rejected_as_unread(key: str, tmp_path: Path) -> None:
    values = {
        "samples": {"prompts": ["a"], "tokens": 1},
        "multiple_choice": [make_task(write_questions(tmp_path / "q.jsonl"))],
    }
    with pytest.raises(SpecError, match=f"config.eval.{key}: nothing reads it, evaluator\\(\\) returns others"):
        make_gpt(tmp_path / "run", OwnEvaluatorGPT, **BIGRAM_OPTIONS, **{f"config.eval.{key}": values[key]})()
