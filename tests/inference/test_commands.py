"""`sample` and `evaluate` on a real run, also during training, and one line for every invalid input."""

import hashlib
import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from experiments.gpt import PretrainGPT
from experiments.model.decoder import PretrainDecoder
from runner import BaseTrainer
from runner.cli.app import main
from runner.data.tokenizers import TOKENIZER_FILES
from runner.process import make_placements
from tests.data.buckets import write_corpus
from tests.data.datasets import write_bin
from tests.support.job_process import hash_tree
from tests.support.tiny_jobs import make_counter, make_gpt, start_python, wait_for_output
from tests.support.tokenise_inputs import GPT2_PATTERN, SEPARATOR, FakeBucket, make_tiktoken_ranks

SETTINGS = {
    "config.train.total_steps": 4,
    "config.eval": {"every_steps": 2, "batches": 2},
    "checkpoint.every_steps": 2,
    "checkpoint.keep_last": 2,
    "config.optimizer.learning_rate": 0.1,  # high enough that each step changes the generated text
    "config.schedule.warmup_steps": 0,
}


def make_job(directory: Path, job_class: type[BaseTrainer] = PretrainGPT) -> BaseTrainer:
    """Return a job that trains on one text and validates on its end and on another one."""
    other = directory.parent / "other.txt"
    other.write_text("naïve counting: one, two, three.\n" * 12)
    return make_gpt(directory, job_class, **SETTINGS, **{"config.data.validation": {"other": str(other)}})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of a few steps."""
    directory = tmp_path_factory.mktemp("look") / "run"
    make_job(directory)()
    return directory


def copy_with_data(run: Path, name: str, **keys: object) -> Path:
    """Return a copy of the run with other data keys in its spec."""
    copy = run.parent / name
    shutil.copytree(run, copy, dirs_exist_ok=True)
    document = yaml.safe_load((copy / "spec.yaml").read_text())
    document["config"]["data"] |= keys
    (copy / "spec.yaml").write_text(yaml.safe_dump(document))
    return copy


def capture_command(capfd: pytest.CaptureFixture[str], *words: object, command: str = "sample") -> tuple[int, str, str]:
    """Run a command on a run whose job may be of a test, and return its exit code, output and errors."""
    capfd.readouterr()
    code = main([command, "--trust", "tests", *map(str, words)])
    out, err = capfd.readouterr()
    return code, out, err


@pytest.mark.soak
def test_sampling_continues_the_prompt_with_the_weights_of_a_step(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = hash_tree(run)
    code, text, err = capture_command(capfd, run, "--prompt", "12 squared", "--tokens", 40)
    assert (code, err) == (0, "tiny: step 4\n")
    assert text.startswith("12 squared")
    shorter = capture_command(capfd, run, "--prompt", "12 squared", "--tokens", 9)[1]
    assert 12 < len(shorter) < len(text)
    assert text.startswith(shorter.rstrip("\n\ufffd"))
    code, other, err = capture_command(capfd, run, "--prompt", "12 squared", "--tokens", 40, "--step", 2)
    assert (code, err) == (0, "tiny: step 2\n")
    assert other != text
    assert hash_tree(run) == before


def test_ids_are_printed_with_the_reason_without_a_tokenizer(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = write_bin(run.parent / "ids.bin", np.arange(200))
    copy = copy_with_data(run, "ids", source=str(source))
    code, text, err = capture_command(capfd, copy, "--prompt", "3, 4", "--tokens", 5)
    assert code == 0
    assert re.fullmatch(r"3, 4( \d+){5} \n", text)
    assert re.fullmatch(r"ids instead of text: data\.source=.*ids\.bin: names files of token ids, .*\n.*step 4\n", err)


CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def copy_with_template(run: Path, name: str, template: str, end_of_turn: int) -> Path:
    """Return a copy of the run that has recorded a chat template."""
    copy = run.parent / name
    shutil.copytree(run, copy)
    record = json.loads((copy / "assets/assets.json").read_text())
    content = json.dumps({"chat_template": template}).encode()
    (copy / "assets/tokenizer_config.json").write_bytes(content)
    record["files"]["tokenizer_config.json"] = hashlib.sha256(content).hexdigest()
    (copy / "assets/assets.json").write_text(json.dumps(record | {"end_of_turn": end_of_turn}))
    return copy


def test_a_chat_renders_the_prompt_and_ends_with_the_turn(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    chat = copy_with_template(run, "chat", CHAT_TEMPLATE, ord("\n"))
    code, answer, err = capture_command(capfd, chat, "--chat", "--prompt", "3 plus 3?", "--tokens", 30)
    assert (code, err) == (0, "tiny: step 4\n")
    rendered = "<user>3 plus 3?;<assistant>"
    text = capture_command(capfd, chat, "--prompt", rendered, "--tokens", 30)[1]
    assert text.startswith(rendered)
    assert "\n" in text[len(rendered) : -1]
    assert answer == text[len(rendered) :].partition("\n")[0] + "\n"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--chat"], "--chat: needs --prompt"),
        (["--chat", "--prompt", "hi"], "has no chat template: .*tokenizer_config.json"),
    ],
)
def test_an_impossible_chat_gives_one_line(
    run: Path, words: list[str], expected: str, capfd: pytest.CaptureFixture[str]
) -> None:
    code, out, err = capture_command(capfd, run, *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert re.search(expected, err)


def test_an_unsafe_chat_template_gives_one_line(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    hostile = copy_with_template(run, "hostile", "{{ ''.__class__ }}", 0)
    code, out, err = capture_command(capfd, hostile, "--chat", "--prompt", "hi")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "out of bounds" in err


def score(capfd: pytest.CaptureFixture[str], *words: object) -> list[dict[str, Any]]:
    """Return the records that `evaluate --json` prints."""
    code, out, err = capture_command(capfd, *words, "--json", command="evaluate")
    assert code == 0
    assert all("are left out, since they fill no sequence" in line for line in err.splitlines())
    return [json.loads(line) for line in out.splitlines()]


def read_evaluated_rows(run: Path) -> dict[int, dict[str, float]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row for row in rows if "val/loss" in row}


def test_the_loss_on_the_runs_own_sets_is_bit_identical_to_its_rows(
    run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before, rows = hash_tree(run), read_evaluated_rows(run)
    found = score(capfd, run, "--all")
    assert [record["step"] for record in found] == list(rows) == [2, 4]
    for record in found:
        row, sets = rows[record["step"]], record["sets"]
        for name in ("validation", "other"):
            assert np.float32(sets[name]["loss"]) == np.float32(row[f"val/{name}/loss"])
            assert sets[name]["metrics"]["accuracy"] == row[f"val/{name}/accuracy"]
            assert sets[name]["perplexity"] == pytest.approx(math.exp(sets[name]["loss"]))
            assert sets[name]["loss_per_byte"] == sets[name]["loss"]
            assert sets[name]["bytes"] == sets[name]["tokens"] > 300
        assert record["loss"] == row["val/loss"]
        assert record["metrics"]["accuracy"] == row["val/accuracy"] > 0
        assert record["tokens"] == sum(figures["tokens"] for figures in sets.values())
    assert score(capfd, run) == found[1:]
    assert hash_tree(run) == before


@pytest.mark.soak
def test_the_loss_does_not_depend_on_devices_and_covers_a_whole_source(
    run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (alone,) = score(capfd, run, "--data", run.parent / "other.txt")
    copy = copy_with_data(run, "mesh")
    text = (copy / "spec.yaml").read_text()
    assert "data: 8" in text
    (copy / "spec.yaml").write_text(text.replace("data: 8", "data: 3").replace("examples: 16", "examples: 18"))
    (there,) = score(capfd, copy)
    sharded, whole = there["sets"]["other"], alone["sets"]["data"]
    assert sharded.pop("metrics") == pytest.approx(whole.pop("metrics"), rel=1e-6)
    assert sharded == pytest.approx(whole, rel=1e-6)
    row = read_evaluated_rows(run)[4]
    assert np.float32(alone["loss"]) == np.float32(row["val/other/loss"])
    assert there["sets"]["validation"]["tokens"] == 36 * 16


def test_loss_per_byte_is_printed_or_the_reason_why_not(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ids = write_bin(run.parent / "ids.bin", np.arange(200))
    code, out, err = capture_command(capfd, run, "--data", ids, command="evaluate")
    assert code == 0
    assert re.fullmatch(r"step 4: loss [\d.]+ nats a token, perplexity [\d.]+, accuracy [\d.]+ \(192 tokens\)\n", out)
    left_out, unknown = err.splitlines()
    assert re.fullmatch(r"data: loss per byte is not known: .* names files of token ids, .*", unknown)
    assert left_out == f"--data {ids}: the last 7 tokens are left out, since they fill no sequence of 16"
    code, out, err = capture_command(
        capfd, run, "--data", write_bin(run.parent / "whole.bin", np.arange(193)), command="evaluate"
    )
    assert "(192 tokens)" in out
    assert "left out" not in err


def hash_files(run: Path) -> dict[str, str]:
    """Return digests of the run's files except ledger and clock, which its threads write at any time."""
    own = ("events.jsonl", ".clock")
    return {name: digest for name, digest in hash_tree(run).items() if not name.endswith(own)}


@pytest.mark.soak
def test_evaluating_a_running_job_changes_neither_files_nor_bits(run: Path) -> None:
    """Run the commands in another process between two steps, while the run waits, to compare all files."""
    seen: list[str] = []

    class WatchedGPT(PretrainGPT):
        def save_or_stop(self) -> None:
            super().save_or_stop()
            if self.step == 3:
                self.checkpointer.wait_until_finished()
                self.attempt.background_writer.flush()
                before = hash_files(directory)
                program = f"sys.exit(main(['sample', {str(directory)!r}]) or main(['evaluate', {str(directory)!r}]))"
                program = f"import sys\nfrom runner.cli.app import main\n{program}"
                seen.append(wait_for_output(start_python("-c", program, devices=8)))
                assert hash_files(directory) == before

    directory = run.parent / "watched"
    watched = make_job(directory, WatchedGPT)
    watched()
    assert "tiny: step 2" in seen[0]
    assert re.search(r"step 2: loss [\d.]+ nats a token", seen[0])
    assert watched.attempt.fence.find_newest() == 1
    events = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    assert {(event["attempt"], event["process"]) for event in events} == {(1, 0)}
    assert [event["event"] for event in events].count("start") == 1
    for name in ("fingerprint", "val_loss"):
        results = [json.loads((path / "result.json").read_text())[name] for path in (run, directory)]
        assert results[0] == results[1]


@pytest.mark.soak
def test_a_run_in_a_bucket_is_only_read(
    run: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket, verbs = FakeBucket(monkeypatch), set()
    for path in filter(Path.is_file, run.rglob("*")):
        bucket.write(f"run/{path.relative_to(run)}", path.read_bytes())
    bucket.driver.before = lambda verb, key: verbs.add(verb)
    code, text, err = capture_command(capfd, "gs://bucket/run", "--prompt", "12", "--tokens", 9)
    assert (code, err) == (0, "tiny: step 4\n")
    assert text.startswith("12")
    assert verbs <= {"get", "list"}


@pytest.mark.soak
def test_experts_are_evaluated_with_their_balancing_biases(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    experts = {
        "experts": 4,
        "experts_per_token": 2,
        "expert_width": 16,
        "dense_layers": 1,
        "gate": "sigmoid",
        "bias_rate": 0.5,
    }
    model = {"layers": 2, "heads": 4, "width": 32, "mlp_width": 48, "moe": experts}
    job_name = {"job": "experiments.model.decoder:PretrainDecoder"}
    make_gpt(tmp_path / "run", PretrainDecoder, **SETTINGS, **job_name, **{"config.model": model})()
    (found,) = score(capfd, tmp_path / "run")
    assert found["loss"] == read_evaluated_rows(tmp_path / "run")[4]["val/loss"]
    assert capture_command(capfd, tmp_path / "run", "--tokens", 9)[0] == 0


@pytest.mark.soak
def test_several_processes_score_like_one(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (alone,) = score(capfd, run)
    placements = make_placements(2)
    words = ["-m", "runner", "evaluate", str(run), "--json"]
    processes = [start_python(*words, *place, devices=4) for place in placements]
    outputs = [wait_for_output(process) for process in processes]
    several = json.loads(outputs[0].splitlines()[-1])
    assert several["loss"] == pytest.approx(alone["loss"], rel=1e-6)
    assert several["tokens"] == alone["tokens"]
    assert "loss" not in outputs[1]


INVALID_INPUTS = {
    "no run": ([], "no spec.yaml is here; needs the directory of a run that has begun"),
    "no checkpoint": ([], "no checkpoint is committed yet"),
    "counter": ([], "its job experiments.counter:Counter trains no model of tokens"),
    "wider": ([], r"checkpoint 4 does not fit this job"),
    "vocabulary": ([], "its tokenizer has 300 ids, its model 256"),
    "ids": (["--prompt", "def"], "got 'def', needs ids from 0 to 255 where no tokenizer is known"),
    "characters": (["--prompt", "Ω"], "character 'Ω'"),
    "run": (["--step", "3"], "got step 3, has 2, 4; needs one of them, newest or best"),
    "run ": (["--step", "best"], r"its spec has no checkpoint\.keep_best"),
    "run  ": (["--tokens", "0"], "--tokens 0: needs at least 1"),
    "run   ": (["--temperature", "-1"], "--temperature -1: needs a number of at least 0"),
}


def make_invalid_run(run: Path, name: str) -> Path:
    """Return the directory of an invalid input."""
    if name == "no run":
        return run.parent / "nothing"
    if name == "no checkpoint":
        copy = copy_with_data(run, name)
        shutil.rmtree(copy / "checkpoints")
        return copy
    if name == "counter":
        make_counter(run.parent / name, **{"config.total_steps": 1})()
        return run.parent / name
    if name == "wider":
        copy = copy_with_data(run, name)
        text = (copy / "spec.yaml").read_text()
        (copy / "spec.yaml").write_text(text.replace("width: 32", "width: 64"))
        return copy
    if name == "ids":
        return copy_with_data(run, name, source=str(write_bin(run.parent / "ids.bin", np.arange(200))))
    if name == "vocabulary":
        content = make_tiktoken_ranks()
        record = {
            "kind": "tiktoken",
            "file": TOKENIZER_FILES["tiktoken"],
            "sha256": hashlib.sha256(content).hexdigest(),
        }
        record |= {"pattern": GPT2_PATTERN, "special_tokens": {SEPARATOR: 299}}
        corpus = write_corpus(run.parent / "corpus", [[[1]]], change=lambda index: replace(index, tokenizer=record))
        (corpus / TOKENIZER_FILES["tiktoken"]).write_bytes(content)
        return copy_with_data(run, name, source=str(corpus))
    if name == "characters":
        return copy_with_data(run, name, tokenizer="characters", validation={})
    return run


def test_invalid_input_to_evaluate_gives_one_line(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make_invalid_run(run, "vocabulary")  # creates the corpus
    (run.parent / "short.txt").write_text("short")
    raw = run.parent / "raw.jsonl"
    raw.write_text('{"text": "some words"}\n')
    for words, message in (
        ([run.parent / "nothing"], "no spec.yaml is here"),
        ([run, "--step", "3"], "got step 3, has 2, 4"),
        ([run, "--data", "nowhere.txt"], "^--data nowhere.txt: no file matches"),
        ([run, "--data", raw], rf"^--data {raw}: .*of a kind that is not read.*; write this text into a \.txt file$"),
        ([run, "--data", run.parent / "short.txt"], "holds less than one example"),
        ([run, "--data", "{source: x, kind: y}"], "--data: .*unknown key"),
        ([run, "--data", run.parent / "corpus"], r"its tokens are of another tokenizer \(tiktoken\) than"),
        ([run, "--step", "2", "--all"], "--step, --all .* exclude each other"),
        (
            [copy_with_data(run, "all", validation_fraction=0.0, validation={})],
            "keeps no validation set; name a source",
        ),
        ([make_invalid_run(run, "wider")], "checkpoint 4 does not fit this job"),
    ):
        code, out, err = capture_command(capfd, *words, command="evaluate")
        assert (code, out) == (2, "")
        assert re.search(message, err.splitlines()[0]), err


@pytest.mark.daily(5)
@pytest.mark.parametrize("name", INVALID_INPUTS)
def test_invalid_input_to_sample_gives_one_line_and_exit_code_2(
    run: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    words, message = INVALID_INPUTS[name]
    directory = make_invalid_run(run, name.strip())
    code, out, err = capture_command(capfd, directory, *words)
    assert (code, out) == (2, "")
    assert re.search(message, err.splitlines()[-1])
    assert len(err.splitlines()) <= 2
