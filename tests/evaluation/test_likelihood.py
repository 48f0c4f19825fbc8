"""Log likelihoods and multiple choice: equal to independent arithmetic and to lm-evaluation-harness."""

import itertools
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import yaml

from runner.data import ByteTokenizer
from runner.distributed.agreement import Hosts
from runner.evaluation.builtin import MultipleChoice
from runner.evaluation.generation import make_variables
from runner.evaluation.likelihood import (
    LikelihoodScorer,
    Question,
    TextPair,
    encode_pair,
    make_pairs,
    read_questions,
)
from runner.inference.evaluate import EvaluationRequest, evaluate
from runner.inference.open_run import ReadOnlyRun, open_run
from runner.parallel.mesh import make_mesh
from tests.support.tiny_jobs import make_gpt

NUM_QUESTIONS = 200
LENGTH = 32
SMALL: dict[str, Any] = {
    "config.model": {"layers": 1, "heads": 2, "width": 16},
    "config.data.sequence_length": LENGTH,
    "config.train.total_steps": 8,
    "config.schedule": {"name": "constant"},
    "config.optimizer.learning_rate": 0.03,
    "config.eval.batches": 1,
}
FIRST = ord("\n")


def make_questions(number: int) -> list[dict[str, Any]]:
    """Make questions of many lengths, some beyond the model's, some empty, with trailing spaces, or not ASCII."""
    rng = random.Random(0)
    words = ["squared", "is", "é", "12th", "n144", "日本", "a", "number", "of", "\n7 squared"]
    questions = []
    for index in range(number):
        context = "" if index == 3 else " ".join(rng.choices(words, k=rng.randint(1, 12))) + " " * (index % 3 == 0)
        choices = [" ".join(rng.choices(words, k=rng.randint(1, 3))) for _ in range(rng.randint(2, 5))]
        questions.append({"question": context, "choices": choices, "answer": rng.randrange(len(choices))})
    return questions


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run."""
    directory = tmp_path_factory.mktemp("likelihood") / "run"
    make_gpt(directory, **SMALL)()
    return directory


@pytest.fixture(scope="module")
def evaluated_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the weights of `run`, evaluated with the questions that lie beside it."""
    directory = tmp_path_factory.mktemp("judge") / "run"
    path = directory.parent / "questions.jsonl"
    path.write_text("".join(json.dumps(question) + "\n" for question in make_questions(NUM_QUESTIONS)))
    asked = {"config.eval.multiple_choice": [{"name": "made_up", "path": str(path)}]}
    make_gpt(directory, **SMALL, **asked)()
    return directory


@pytest.fixture(scope="module")
def weights(run: Path) -> Any:
    opened = open_run(str(run))
    mesh = make_mesh({"data": 8, "fsdp": 1, "tensor": 1})
    abstract = opened.job.weights(opened.job.setup_builder.build_on_mesh(mesh, jax.random.key(0)).abstract_state)
    return opened.load_weights(opened.find_checkpoint("newest"), abstract)


def encode_text(text: str) -> list[int]:
    return list(text.encode())


def compute_reference(model: Any, weights: Any, texts: Sequence[tuple[str, str]]) -> list[float]:
    """Compute the log likelihood of each continuation in float64, token by token."""
    rows, wholes, counts = np.zeros((len(texts), LENGTH), np.int32), [], []
    for row, (context, following) in zip(rows, texts, strict=True):
        whole = encode_text(context + following) if context.strip() else [FIRST, *encode_text(context + following)]
        counts += [len(whole) - (len(encode_text(context.rstrip())) if context.strip() else 1)]
        wholes += [whole[-(LENGTH + 1) :]]
        row[: len(wholes[-1]) - 1] = wholes[-1][:-1]
    totals = []
    logits_BxTxV = np.asarray(get_jitted_apply(model)(make_variables(weights), rows))
    for whole, num_following, logits_TxV in zip(wholes, counts, logits_BxTxV, strict=True):
        total = 0.0
        for place in range(max(0, len(whole) - 1 - num_following), len(whole) - 1):
            logits_V = logits_TxV[place].astype(np.float64)
            total += logits_V[whole[place + 1]] - np.log(np.sum(np.exp(logits_V - logits_V.max()))) - logits_V.max()
        totals += [total]
    return totals


_jit_cache: dict[str, Callable[..., Any]] = {}


def get_jitted_apply(model: Any) -> Callable[..., Any]:
    if "apply" not in _jit_cache:
        _jit_cache["apply"] = jax.jit(lambda variables, row: model.apply(variables, row, deterministic=True))
    return _jit_cache["apply"]


@pytest.mark.soak
def test_answers_to_200_questions_match_a_reference(evaluated_run: Path, weights: Any) -> None:
    job = open_run(str(evaluated_run)).job
    model = job.model()
    mesh = make_mesh({"data": 8, "fsdp": 1, "tensor": 1})
    likelihood = LikelihoodScorer(model, mesh, LENGTH, 4, lambda: False)
    questions = read_questions(str(evaluated_run.parent / "questions.jsonl"))
    evaluator = MultipleChoice("made_up", questions, encode_text, FIRST, likelihood)
    figures = evaluator.evaluate(weights, 8, Hosts.single_process())
    right = {"acc": 0, "acc_norm": 0, "acc_bytes": 0}
    texts = [(question.context, " " + choice) for question in questions for choice in question.choices]
    expected = compute_reference(model, weights, texts)
    left = iter(expected)
    for question in questions:
        sums = list(itertools.islice(left, len(question.choices)))
        norm = [total / len(choice) for total, choice in zip(sums, question.choices, strict=True)]
        per_byte = [total / len(choice.encode()) for total, choice in zip(sums, question.choices, strict=True)]
        for key, values in {"acc": sums, "acc_norm": norm, "acc_bytes": per_byte}.items():
            right[key] += values.index(max(values)) == question.answer
    assert figures == {f"val/made_up/{key}": number / NUM_QUESTIONS for key, number in right.items()}
    assert len({*right.values()}) > 1
    likely = likelihood.score(weights, make_pairs(questions, encode_text, FIRST))
    assert likely is not None
    np.testing.assert_allclose([each.log_likelihood for each in likely], expected, rtol=1e-4, atol=1e-4)
    rows = [json.loads(line) for line in (evaluated_run / "metrics.jsonl").read_text().splitlines()]
    assert {key: rows[-1][key] for key in figures} == figures


@pytest.mark.soak
def test_a_greedy_continuation_consists_of_the_most_probable_tokens(run: Path, weights: Any) -> None:
    job = open_run(str(run)).job
    model = job.model()
    likelihood = LikelihoodScorer(model, make_mesh({"data": 8, "fsdp": 1, "tensor": 1}), LENGTH, 1, lambda: False)
    ids = encode_text("7 squared")
    row = np.zeros((1, LENGTH), np.int32)
    row[0, : len(ids)] = ids
    best = int(np.argmax(get_jitted_apply(model)(make_variables(weights), row)[0, len(ids) - 1]))
    found = likelihood.score(weights, [TextPair(ids, [best]), TextPair(ids, [(best + 1) % 256])])
    assert found is not None
    assert [each.is_greedy for each in found] == [True, False]


def test_evaluation_ends_after_a_stop_request(run: Path, weights: Any) -> None:
    model = open_run(str(run)).job.model()
    mesh = make_mesh({"data": 8, "fsdp": 1, "tensor": 1})
    stopping = LikelihoodScorer(model, mesh, LENGTH, 1, lambda: True)
    evaluator = MultipleChoice("some", [Question("a", ("b", "c"), 0)], encode_text, FIRST, stopping)
    assert evaluator.evaluate(weights, 1, Hosts.single_process()) is None


@pytest.mark.parametrize(
    ("context", "following", "pair"),
    [
        ("ab", " c", TextPair(encode_text("ab"), encode_text(" c"))),
        ("ab  ", " c", TextPair(encode_text("ab"), encode_text("   c"))),
        ("", " c", TextPair([FIRST], encode_text(" c"))),
        ("", "\nc", TextPair([FIRST], encode_text("c"))),
        ("  ", "c", TextPair([FIRST], encode_text("  c"))),
        ("é", "日", TextPair(encode_text("é"), encode_text("日"))),
    ],
)
def test_trailing_spaces_of_a_context_belong_to_the_continuation(context: str, following: str, pair: TextPair) -> None:
    assert encode_pair(encode_text, FIRST, context, following) == pair
    assert ByteTokenizer().encode(context + following).tolist() == encode_text(context + following)


TASK = {
    "task": "made_up",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "QUESTIONS"}},
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": name} for name in ("acc", "acc_norm", "acc_bytes")],
}


@pytest.mark.soak
def test_the_harness_computes_the_same_accuracy(
    evaluated_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluate a tiny local JSON task with the harness's own prompts and metrics, without downloads."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    harness = pytest.importorskip("runner.inference.harness", reason="needs pip install -e '.[lm-eval]'")
    harness_tasks = pytest.importorskip("runner.evaluation.harness")
    task = TASK | {"dataset_kwargs": {"data_files": {"test": str(evaluated_run.parent / "questions.jsonl")}}}
    (tmp_path / "made_up.yaml").write_text(yaml.safe_dump(task))
    opened = open_run(str(evaluated_run))
    hosts = Hosts.single_process()
    tasks, evaluators = harness_tasks.load_tasks(["made_up"], str(tmp_path)), []

    def make_evaluator(run: ReadOnlyRun) -> Any:
        evaluators.append(harness.HarnessEvaluator(run, hosts, tasks))
        return evaluators[-1]

    # Every checkpoint with one compiled program, like `--all` and `--follow`.
    every = list(evaluate(opened, EvaluationRequest(None, None, "params"), hosts, make_evaluator))
    assert [record["step"] for record in every] == opened.list_steps()
    assert len(evaluators) == 1
    (record,) = evaluate(opened, EvaluationRequest(None, "newest", "params"), hosts, make_evaluator)
    assert record == every[-1]
    row = json.loads((evaluated_run / "metrics.jsonl").read_text().splitlines()[-1])
    figures = record["harness"]["made_up"]
    for name in ("acc", "acc_norm", "acc_bytes"):
        assert figures[f"{name},none"] == pytest.approx(row[f"val/made_up/{name}"], abs=1e-12)
    assert harness.format_record(record)[0].startswith("step 8 made_up: ")
    check_texts(evaluators[0].model, make_requests)


def make_requests(*arguments: Sequence[Any]) -> list[Any]:
    return [type("Request", (), {"args": each})() for each in arguments]


def check_texts(model: Any, requests: Callable[..., list[Any]]) -> None:
    """Check that rolling likelihoods cover each token once, and that generation stops before a stop text."""
    long = "squared is " * 10
    (whole,) = model.loglikelihood_rolling(requests((long,)))
    assert whole < 0
    short = "7 squared"
    ((likely, _),) = model.loglikelihood(requests(("", short)))
    assert model.loglikelihood_rolling(requests((short,))) == [pytest.approx(likely, rel=1e-5)]
    (text,) = model.generate_until(requests((short, {"until": [], "max_gen_toks": 12})))
    assert 0 < len(text.encode()) <= 40
    (cut,) = model.generate_until(requests((short, {"until": [text[3]], "max_gen_toks": 12})))
    assert cut == text[: text.index(text[3])]
