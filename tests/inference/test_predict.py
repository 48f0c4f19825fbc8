"""`predict`: outputs of a run's model for each example of a source, in order, as a file."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from experiments.clip import MatchCaptions
from experiments.vit import ClassifyImages
from runner import BaseTrainer
from runner.inference.open_run import load_model, open_run
from runner.process import make_placements
from runner.storage import JsonObject, parse_lines
from tests.data.buckets import write_corpus
from tests.inference.test_commands import capture_command, score
from tests.support.images import CHANGES, Classify, Images, RateText
from tests.support.job_process import hash_tree
from tests.support.tiny_jobs import get_job_name, make_gpt, start_python, wait_for_output

SETTINGS: dict[str, Any] = {
    "config.train.total_steps": 2,
    "config.model": {"layers": 1, "heads": 2, "width": 16},
    "config.ema": {"decays": [0.5]},
    "config.optimizer.learning_rate": 0.1,
    "config.schedule.warmup_steps": 0,
    "checkpoint.every_steps": 1,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on text."""
    directory = tmp_path_factory.mktemp("predict") / "run"
    make_gpt(directory, **SETTINGS)()
    (directory.parent / "other.txt").write_text(("Counting: one, two, three.\n" * 12)[: 20 * 16 + 1])
    return directory


def predict(capfd: pytest.CaptureFixture[str], run: Path, source: object, *words: object, file: Path) -> Path:
    code, out, err = capture_command(capfd, run, "--data", source, "-o", file, *words, command="predict")
    assert code == 0, err
    assert f"written to {file}" in out + err
    return file


def read(file: Path) -> list[JsonObject]:
    return list(parse_lines(file.read_bytes()))


def compute_log_probs(run: Path, ids: np.ndarray, step: str = "newest", weights: str = "params") -> np.ndarray:
    """Return the log-probability of each token after the first, computed on one device without the command."""
    model, variables, *_ = load_model(open_run(str(run), ["tests"]), step, weights)
    logits: Any = model.apply(variables, ids[None, :-1], deterministic=True)
    return np.asarray(jax.nn.log_softmax(logits[0].astype(np.float32)))[np.arange(len(ids) - 1), ids[1:]]


@pytest.mark.parametrize("words", [[], ["--step", "1"], ["--weights", "ema_0.5"]], ids="_".join)
def test_each_window_has_the_log_probabilities_of_its_targets(
    run: Path, words: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source, before = run.parent / "other.txt", hash_tree(run)
    records = read(predict(capfd, run, source, *words, file=tmp_path / "out.jsonl"))
    ids, T = np.frombuffer(source.read_bytes(), np.uint8).astype(np.int32), records[0]["tokens"]
    assert [record["start"] for record in records] == list(range(0, len(ids) - T, T))
    assert [record["example"] for record in records] == list(range(len(records)))
    given = {word.lstrip("-"): value for word, value in zip(words[::2], words[1::2], strict=True)}
    for record in (records[0], records[-1]):
        expected = compute_log_probs(run, ids[record["start"] :][: T + 1], **given)
        np.testing.assert_allclose(record["log_probs"], expected, rtol=1e-4, atol=1e-5)
        assert record["log_prob"] == pytest.approx(sum(expected), rel=1e-4)
    assert hash_tree(run) == before
    if not words:
        (whole,) = score(capfd, run, "--data", source)
        assert -sum(record["log_prob"] for record in records) / whole["tokens"] == pytest.approx(whole["loss"])


def test_arrays_hold_what_lines_hold_and_files_are_repeatable(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = run.parent / "other.txt"
    lines = [predict(capfd, run, source, file=tmp_path / f"{name}.jsonl") for name in "ab"]
    arrays = [predict(capfd, run, source, file=tmp_path / f"{name}.npz") for name in "ab"]
    assert lines[0].read_bytes() == lines[1].read_bytes()
    assert arrays[0].read_bytes() == arrays[1].read_bytes()
    found, records = np.load(arrays[0]), read(lines[0])
    assert {*found} == {*records[0]}
    for name in found:
        assert found[name].tolist() == [record[name] for record in records]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "a.npz", "b.jsonl", "b.npz"]


def test_documents_keep_the_order_of_the_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    random = np.random.default_rng(0)
    documents = [random.integers(1, 255, length).tolist() for length in (9, 40, 5, 100, 17, 2, 30)]
    corpus = write_corpus(tmp_path / "corpus", [documents * 12])
    packed = {"config.data": {"source": str(corpus), "sequence_length": 64, "packing": "documents"}}
    make_gpt(tmp_path / "run", **SETTINGS | packed)()
    other = write_corpus(tmp_path / "other", [documents])
    records = read(predict(capfd, tmp_path / "run", other, file=tmp_path / "out.jsonl"))
    # A document that is longer than a sequence has two.
    assert [record["tokens"] for record in records] == [8, 39, 4, 64, 35, 16, 1, 29]
    assert [len(record["log_probs"]) for record in records] == [8, 39, 4, 64, 35, 16, 1, 29]
    expected = compute_log_probs(tmp_path / "run", np.array(documents[4], np.int32))
    np.testing.assert_allclose(records[5]["log_probs"], expected, rtol=1e-4, atol=1e-5)
    assert records[5]["start"] == 9 + 40 + 5 + 100


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("classifier") / "run"
    make_gpt(directory, Classify, **CHANGES, **{"config.schedule.warmup_steps": 0})()
    return directory


def test_a_classifier_gives_what_its_model_returns(
    classifier: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = predict(capfd, classifier, "tests.support.images:Images", file=tmp_path / "out.npz")
    found = np.load(file)
    assert found["output"].shape == (512, 2)
    assert found["example"].tolist() == list(range(512))
    loaded = load_model(open_run(str(classifier), ["tests"]))
    expected: Any = loaded.model.apply(loaded.variables, Images().shades[500:], deterministic=True)
    np.testing.assert_allclose(found["output"][500:], expected, rtol=1e-5, atol=1e-6)


def make_images(directory: Path, job_class: type[BaseTrainer], model: JsonObject, **changes: Any) -> BaseTrainer:
    source = "CaptionedPatterns" if job_class is MatchCaptions else "Patterns"
    module = job_class.__module__
    data = {"source": f"{module}:{source}", "options": {"examples": 256}, "validation_fraction": 0.1}
    changes = {"job": get_job_name(job_class), "config.model": model, "config.data": data, **changes}
    return make_gpt(
        directory, job_class, **{"config.train.total_steps": 1, "config.schedule.warmup_steps": 0}, **changes
    )


SIZES = {"layers": 1, "heads": 2, "width": 8, "patch": 4, "classes": 8}


def test_vit_gives_the_class_and_the_logits(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make_images(tmp_path / "run", ClassifyImages, SIZES)()
    source = "{source: 'experiments.vit:Patterns', options: {examples: 21}}"
    records = read(predict(capfd, tmp_path / "run", source, file=tmp_path / "out.jsonl"))
    assert [record["example"] for record in records] == list(range(21))
    assert [record["class"] for record in records] == [int(np.argmax(record["logits"])) for record in records]
    assert len(records[0]["logits"]) == 8


@pytest.mark.soak
def test_a_model_of_several_outputs_needs_its_own_predict(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make_images(tmp_path / "run", MatchCaptions, {"image": SIZES, "text_layers": 1, "group": 2})()
    words = [tmp_path / "run", "--data", "experiments.clip:CaptionedPatterns", "-o", tmp_path / "out.npz"]
    code, _, err = capture_command(capfd, *words, command="predict")
    assert (code, err.count("\n")) == (2, 1)
    assert "returns a tuple as 'output'" in err
    assert not (tmp_path / "out.npz").exists()


def test_a_trainer_that_writes_no_text_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    changes = {"job": get_job_name(RateText), "config.model": {}, "config.train.total_steps": 1}
    make_gpt(tmp_path / "run", RateText, **changes, **{"config.schedule.warmup_steps": 0})()
    (tmp_path / "text.txt").write_text("some words " * 200)
    words = [tmp_path / "run", "--data", tmp_path / "text.txt", "-o", tmp_path / "out.npz"]
    code, _, err = capture_command(capfd, *words, command="predict")
    assert (code, err.count("\n")) == (2, 1)
    assert "trains no language model" in err


MISTAKES = {
    "format": (["-o", "HERE/out.csv"], r"out.csv: names no format; end it in .jsonl"),
    "file that exists": (["-o", "HERE/there.npz"], r"there.npz: exists already"),
    "missing directory": (["-o", "HERE/none/out.npz"], "in a directory that exists"),
    "inside the run": (["-o", "RUN/out.npz"], "lies in the run's directory"),
    "step": (["-o", "HERE/out.npz", "--step", "9"], "got step 9, has 1, 2"),
    "weights": (["-o", "HERE/out.npz", "--weights", "ema_0.9"], "ema_0.9"),
    "data": (["-o", "HERE/out.npz", "--data", "HERE/none.txt"], "none.txt"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gives_one_line_and_no_file(
    run: Path, mistake: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there.npz").touch()
    given, expected = MISTAKES[mistake]
    words = [word.replace("HERE", str(tmp_path)).replace("RUN", str(run)) for word in given]
    data = [] if "--data" in words else ["--data", run.parent / "other.txt"]
    code, out, err = capture_command(capfd, run, *data, *words, command="predict")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert expected in err
    assert [path.name for path in tmp_path.iterdir()] == ["there.npz"]


@pytest.mark.soak
def test_several_processes_write_the_file_of_one(run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = run.parent / "other.txt"
    alone = read(predict(capfd, run, source, file=tmp_path / "alone.jsonl"))
    words = ["-m", "runner", "predict", str(run), "--data", str(source), "-o", str(tmp_path / "out.jsonl")]
    for process in [start_python(*words, *place, devices=2) for place in make_placements(2)]:
        wait_for_output(process)
    several = read(tmp_path / "out.jsonl")
    assert json.dumps([each["start"] for each in several]) == json.dumps([each["start"] for each in alone])
    for one, other in zip(several, alone, strict=True):
        np.testing.assert_allclose(one["log_probs"], other["log_probs"], rtol=1e-4, atol=1e-5)
