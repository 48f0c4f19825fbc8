"""A trainer that is no language model: output has no terms of text, and its own metrics are shown beside its loss."""

import io
import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import pytest
import yaml
from rich.console import Console

from runner import BaseTrainer
from runner.cli.app import main
from runner.dashboard.report import render_report
from runner.errors import InvalidError, SpecError
from runner.history.ledger import LedgerSummary, apply_events
from runner.history.reader import read_history
from runner.metrics.writers import _LiveProgress
from runner.storage import JsonObject, LocalStore, parse_lines
from tests.support.images import CHANGES, Classify, RateText
from tests.support.tiny_jobs import get_job_name, make_gpt, make_gpt_document, read_rows

TERMS_OF_TEXT = re.compile(r"\bnats\b|perplexity|\bbytes?\b|\btext\b|tokenizer|\bsample\b", re.IGNORECASE)
SAMPLES = {"samples": {"prompts": ["0 1"]}}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A finished run's directory, and what it printed."""
    directory, output = tmp_path_factory.mktemp("images") / "run", io.StringIO()
    handler = logging.StreamHandler(output)
    logging.getLogger("runner").addHandler(handler)
    make_gpt(directory, Classify, **CHANGES)()
    logging.getLogger("runner").removeHandler(handler)
    return directory, output.getvalue()


@pytest.fixture
def run(trained: tuple[Path, str]) -> Path:
    return trained[0]


def get_newest_row(run: Path) -> JsonObject:
    return list(parse_lines((run / "metrics.jsonl").read_bytes()))[-1]


def capture_command(capfd: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    capfd.readouterr()
    code = main([*map(str, words)])
    out, err = capfd.readouterr()
    return code, out, err


def evaluate(capfd: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    return capture_command(capfd, "evaluate", "--trust", "tests", *words)


def test_the_console_shows_its_own_metrics(trained: tuple[Path, str]) -> None:
    run, printed = trained
    row = get_newest_row(run)
    own = f"accuracy {row['train/accuracy']:.4g}  val accuracy {row['val/accuracy']:.4g}  "
    assert re.search(rf"step 6/6  loss [\d.]+  val [\d.]+  {re.escape(own)}[\d,]+ examples/s", printed)
    assert "token" not in printed
    assert not TERMS_OF_TEXT.search(printed.replace(str(run), ""))


@pytest.mark.parametrize(
    ("metrics", "shown"),
    [
        ({"train/loss": 1.0, "val/web/loss": 2.0, "val/bits_per_byte": None}, "loss 1.0000  val web/loss 2"),
        ({"train/loss": 1.0, "train/moe/0/load": 2.0, "val/sample/0": "a"}, "loss 1.0000"),
        ({"train/loss": 1.0, "train/grad_norm/mlp": 2.0, "train/param_norm": 1.0, "data/web/tokens": 9}, "loss 1.0000"),
        ({"reward": 0.25, "eval/accuracy": 0.5}, "reward 0.25  eval/accuracy 0.5"),
        ({"val/accuracy": 0.5}, "val accuracy 0.5"),
        ({f"val/{name}": 1 for name in "abcdefgh"}, "  ".join(f"val {name} 1" for name in "abcdef")),
    ],
)
def test_a_progress_line_has_few_metrics_and_none_of_single_layers(metrics: JsonObject, shown: str) -> None:
    output = io.StringIO()
    progress = _LiveProgress("run", 10, 0, Console(file=output, width=200))
    progress.show({"step": 5, **metrics})
    progress.close()
    assert shown in output.getvalue()
    assert "moe" not in output.getvalue()
    assert "norm" not in output.getvalue()


def test_evaluate_has_its_own_metrics_and_no_perplexity(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    accuracy = get_newest_row(run)["val/accuracy"]
    code, out, err = evaluate(capfd, run)
    assert (code, err) == (0, "")
    assert re.fullmatch(rf"step 6: loss [\d.]+, accuracy {accuracy:.4g} \(32 targets\)\n", out)
    record = json.loads(evaluate(capfd, run, "--json")[1])
    assert record["loss"] == get_newest_row(run)["val/loss"]
    assert record["metrics"] == record["sets"]["validation"]["metrics"] == {"accuracy": accuracy}
    assert (record["perplexity"], record["loss_per_byte"], record["language_model"]) == (None, None, False)


@pytest.mark.parametrize(
    ("job", "figures", "warning"),
    [
        ("ClassifyAndJudge", {"bright", "step"}, "evaluator Broken: ValueError: no image is there"),
        ("NeedsBatch", set(), "evaluators of the job are left out: .*not compiled yet"),
    ],
)
def test_evaluate_calls_its_own_evaluators(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], job: str, figures: set[str], warning: str
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    spec = (copy / "spec.yaml").read_text()
    (copy / "spec.yaml").write_text(spec.replace("images:Classify", f"images:{job}"))
    code, out, err = evaluate(capfd, copy, "--json")
    assert code == 0
    assert re.fullmatch(f"{warning}.*\n", err)
    metrics = json.loads(out)["metrics"]
    assert set(metrics) == {"accuracy", *figures}
    assert metrics.get("step", 6) == 6
    assert "bright" not in evaluate(capfd, copy, "--data", CHANGES["config.data"]["source"])[1]


def test_means_over_a_large_set_are_exact(
    run: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Means are sums over parts of the set."""
    whole = json.loads(
        capture_command(
            capfd, "evaluate", "--trust", "tests", run, "--json", "--data", CHANGES["config.data"]["source"]
        )[1]
    )
    monkeypatch.setattr("runner.inference.evaluate._STRETCH_BATCHES", 3)
    parts = json.loads(
        capture_command(
            capfd, "evaluate", "--trust", "tests", run, "--json", "--data", CHANGES["config.data"]["source"]
        )[1]
    )
    assert whole["metrics"] == parts["metrics"]
    assert whole["tokens"] > 64 * 3


def test_sample_rejects_a_classifier_in_one_line(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, out, err = capture_command(capfd, "sample", run, "--trust", "tests")
    assert (code, out) == (2, "")
    assert "trains no language model" in err
    assert len(err.splitlines()) == 1


def test_text_tasks_are_rejected_before_an_attempt_is_claimed(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"eval\.samples.*language model"):
        make_gpt(tmp_path / "run", RateText, **{"config.model": {}, "config.eval": SAMPLES})()
    assert not (tmp_path / "run").exists()
    with pytest.raises(SpecError, match=r"eval\.samples: is for text, and the data are arrays"):
        make_gpt(tmp_path / "run", Classify, **CHANGES | {"config.eval": SAMPLES})


def test_plan_counts_examples(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(yaml.safe_dump(make_gpt_document(tmp_path / "run", **CHANGES)))
    code, out, _ = capture_command(capfd, "plan", spec)
    assert (code, out.splitlines()[0]) == (0, "would run")
    for figure in (r"examples in a step +16", r"examples of the run +96", r"model FLOPs per example +768"):
        assert re.search(rf"^  {figure} ", out, re.MULTILINE), figure
    assert re.search(r"training examples +460 +counted: label int32, padding_mask bool, shades int32 16$", out, re.M)
    assert "token" not in out.lower()


def test_evaluate_refuses_data_with_other_arrays(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, _, err = evaluate(capfd, run, "--data", "tests.support.arrays:Images")
    assert code == 2
    assert "its examples hold image float32 4x4x1," in err


def test_plan_rejects_text_tasks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    spec = tmp_path / "spec.yaml"
    changes = {"job": "tests.support.images:RateText", "config.model": {}, "config.eval": SAMPLES}
    spec.write_text(yaml.safe_dump(make_gpt_document(tmp_path / "run", **changes)))
    code, out, _ = capture_command(capfd, "plan", spec)
    assert code == 2
    assert "needs a language model" in out
    assert len(re.findall("needs a language model", out)) == 1


def test_status_and_report_show_its_own_metrics(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    accuracy = get_newest_row(run)["val/accuracy"]
    status = capture_command(capfd, "status", run)[1]
    assert f"val accuracy {accuracy:.4g}" in status
    assert re.search(r"^96 examples ", status, re.MULTILINE)
    assert re.search(r"examples/s  .* examples/s per device", status)
    assert "token" not in status
    history = read_history(LocalStore(run))
    assert history.figures["val/accuracy"] == accuracy
    assert not history.is_language_model
    (content,) = re.findall(
        r'<script type="application/json"[^>]*>(.*?)</script>', render_report([LocalStore(run)]), re.DOTALL
    )
    data = json.loads(content)
    assert {chart["title"]: chart["unit"] for chart in data["charts"]}["Loss"] == "value"
    tiles = {tile["label"]: tile["value"] for tile in data["runs"][0]["tiles"]}
    assert tiles["Validation accuracy"] == f"{accuracy:.1%}"
    assert ["validation accuracy", f"{accuracy:.1%}"] in data["runs"][0]["facts"]
    assert ["examples", "96"] in data["runs"][0]["facts"]
    assert "Examples / s" in tiles
    assert "Examples per second" in {chart["title"] for chart in data["charts"]}
    assert not any("token" in name.lower() for name, _ in data["runs"][0]["facts"])


def test_metrics_of_repeated_steps_are_dropped() -> None:
    event = {"attempt": 1, "time": 1.0, "process": 0}
    figures = {"val/loss": 1.0, "val/accuracy": 0.5, "val/no number": "x", "val/\x1b": 1.0}
    found = apply_events(LedgerSummary(), [event | {"event": "evaluate", "step": 6, "figures": figures}])
    assert found.figures == {"val/loss": (6, 1.0), "val/accuracy": (6, 0.5), "val/": (6, 1.0)}
    assert apply_events(found, [event | {"event": "restore", "step": 3}]).figures == {}
    many = {f"val/{number}": 1.0 for number in range(1000)}
    apply_events(found, [event | {"event": "evaluate", "step": 9, "figures": many}])
    assert len(found.figures) < 100


class Labelled:
    """Examples of two numbers, of which the sixth has another label."""

    def __init__(self, label: float, kind: str = "int32") -> None:
        self.label, self.kind = label, kind
        self.fingerprint = f"{label} {kind}"

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> dict[str, Any]:
        label = self.label if index % 6 == 5 else index % 3
        return {"x": np.float32([index % 3, 1]), "y": np.asarray(label, self.kind)}


class ThreeLogits(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, *, deterministic: bool) -> jax.Array:
        return nn.Dense(3)(x)


class ClassifyLabelled(BaseTrainer):
    def model(self) -> nn.Module:
        return ThreeLogits()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"label": 2}, None),
        ({"label": 0, "kind": "uint8"}, None),
        ({"label": 3}, 3),
        ({"label": -1}, -1),
        ({"label": 255, "kind": "uint8"}, 255),
    ],
)
def test_a_label_without_a_logit_is_named_before_the_first_step(
    options: dict[str, Any], named: int | None, tmp_path: Path
) -> None:
    data = {"config.data": {"source": get_job_name(Labelled), "options": options}, "config.model": {}}
    job = make_gpt(tmp_path / "run", ClassifyLabelled, **data | {"config.eval.every_steps": 100})
    if named is None:
        job()
        assert read_rows(tmp_path / "run")[-1]["train/loss"] > 0
    else:
        with pytest.raises(InvalidError, match=f"the label y .* is {named}, .*3 logits; needs labels from 0 to 2"):
            job()
        assert not (tmp_path / "run/metrics.jsonl").exists()
