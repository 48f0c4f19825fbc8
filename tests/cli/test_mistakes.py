"""Typical mistakes of new users: one clear line that names the place, what was given, and what is needed."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from runner.cli.app import main
from runner.errors import EXIT_INVALID, ResumeError
from runner.plan.checks import Findings

ROOT = Path(__file__).parents[2]
# Overrides of a small spec, and a pattern of the line that the user gets.
VALUES = {
    "misspelt key": ("config.train.total_stepz=5", r"config\.train.*total_stepz.*did you mean .*total_steps"),
    "another trainer's steps": ("config.train.steps=5", r"did you mean config\.train\.total_steps\?"),
    "another trainer's batch": ("config.train.batch_size=5", r"did you mean config\.train\.global_batch_examples\?"),
    "another trainer's rate": ("config.optimizer.lr=1.0", r"did you mean config\.optimizer\.learning_rate\?"),
    "another trainer's width": ("config.model.d_model=64", r"did you mean config\.model\.width\?"),
    "misspelt section": ("config.trian={}", r"config.*trian.*did you mean .*train"),
    "key at another level": ("total_steps=5", r"total_steps=5: unknown key.*are keys of config"),
    "key of another section": ("config.learning_rate=1.0", r"did you mean config\.optimizer\.learning_rate\?"),
    "text for a number": (
        "config.train.total_steps=many",
        r"total_steps=many: got 'many' \(text\), needs a whole number",
    ),
    "fraction for a number": ("config.train.total_steps=1.5", r"total_steps=1\.5: got 1\.5, needs a whole number"),
    "negative number": ("config.train.total_steps=-1", r"total_steps=-1: got -1, needs a number above 0"),
    "number with a unit": ("config.train.total_tokens=10B", r"config\.train\.total_tokens"),
    "interval in steps": ("checkpoint.every=50", r"^--set checkpoint\.every=50: got 50, needs auto; .*every_steps"),
    "unknown optimizer": ("config.optimizer.name=adamm", r"config\.optimizer\.name.*did you mean adam"),
    "unknown schedule": ("config.schedule.name=cosin", r"config\.schedule\.name.*cosine"),
    "unknown accelerator": ("topology.accelerator=v5-16", r"topology\.accelerator.*v5"),
    "no such slice": ("topology.accelerator=v5e-17", r"topology\.accelerator.*v5e-17"),
    "mesh larger than the devices": ("topology.mesh={data: 3}", r"topology\.mesh.*3"),
    "two automatic axes": ("topology.mesh={data: auto, fsdp: auto}", r"topology\.mesh.*only one"),
    "batch that does not divide": ("config.train.micro_batch_examples=5", r"micro_batch_examples=5.*does not divide"),
    "warm-up longer than the run": ("config.schedule.warmup_steps=9999", r"warmup_steps"),
    "null for a mapping": ("config.data.options=null", r"got null, needs a mapping; write {}, or leave the key out"),
    "null for a list": ("hooks=null", r"^--set hooks=null: got null, needs a list; write \[\], or leave the key out"),
    "missing data": ("config.data.source=data/*.bin", r"^--set config\.data\.source=data/\*\.bin: no file matches"),
    "glob below no directory": ("config.data.source=HEER/*.txt", r"no file matches; .* holds no HEER"),
    "glob that matches nothing": ("config.data.source=HERE/*.bin", r"no file matches; \S* holds file, own\.py, "),
    "missing source of a mixture": (
        "config.data.mixture=[{name: a, source: a.txt}, {name: b, source: HERE/text.txt}]",
        r"^--set config\.data\.mixture=.*: a: data\.source=a\.txt: no file matches",
    ),
    "data set of the Hub": ("config.data.source=hf://datasets/a/b", r"hf://.*config\.data\.tokenise"),
    "compressed text": ("config.data.source=HERE/x.jsonl.gz", r"x\.jsonl\.gz.*config\.data\.tokenise"),
    "compressed plain text": ("config.data.source=HERE/x.txt.gz", r"x\.txt\.gz.*; decompress it first"),
    "arrays without a class": ("config.data.source=HERE/x.npz", r"x\.npz.*source names a class that reads them"),
    "model without deterministic": ("job=own:Plain", r"Plain\.__call__ does not take deterministic.*\*, deterministic"),
    "no model": ("job=own:Nothing", r"model\(\) returns NoneType, needs a Flax module"),
    "fewer logits than ids": ("job=own:Narrow", r"returns 10 logits for each token, and the data have 256 ids"),
    "unknown scheme": ("directory=s4://bucket/run", r"directory.*s4:// is not known.*s3://"),
    "bucket without a name": ("directory=gs://", r"directory.*names no bucket"),
    "misspelt class": ("job=experiments.gpt:PretrainGTP", r"job.*did you mean .*PretrainGPT"),
    "missing module": ("job=experiment.gpt:PretrainGPT", r"no module experiment in .*did you mean experiments\?"),
    "class without a module": ("job=PretrainGPT", r"job.*needs module\.path:Class|job.*module"),
    "name with a slash": ("name=a/b", r"name=a/b: got 'a/b'.*needs a file name"),
    "weights of no run": ("checkpoint.init_from=nowhere", r"checkpoint\.init_from.*nowhere"),
    "heads that do not divide": ("config.model.heads=7", r"config\.model.*heads"),
    "file as directory": ("directory=HERE/file", r"directory|is a file"),
    "unknown hook": ("hooks=[runner.hook:EarlyStoping]", r"hooks.*did you mean .*EarlyStopping"),
}
# Jobs whose model is wrong.
OWN = """
import flax.linen as nn
from experiments.gpt import PretrainGPT
from runner import BaseTrainer

class Model(nn.Module):
    @nn.compact
    def __call__(self, x, *, deterministic=True):
        return nn.Dense(10)(nn.Embed(256, 8)(x))

class Plain_(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(256)(nn.Embed(256, 8)(x))

class Own(BaseTrainer):
    Config = PretrainGPT.Config

    def model(self):
        return Model()

Narrow = type("Narrow", (Own,), {})
Plain = type("Plain", (Own,), {"model": lambda self: type("Plain", (Plain_,), {})()})
Nothing = type("Nothing", (Own,), {"model": lambda self: None})
"""
# Text of a whole spec, and a pattern of the line.
TEXTS = {
    "tab": ("name: a\n\tjob: b\n", r":2: unreadable YAML: column 1: .*indent with spaces"),
    "unquoted colon": ("name: a: b\n", r":1: unreadable YAML: column 8: .*quotes"),
    "open bracket": ("name: [a\n", r"unreadable YAML: .*not closed"),
    "empty file": ("", r":1: got nothing, needs a mapping"),
    "key twice": ("name: a\nname: b\n", r":2: name: duplicate key, first given at .*:1"),
    "no job": ("name: a\ndirectory: b\n", r"missing key job"),
}
COMMANDS: dict[str, tuple[list[str], str]] = {
    "depth of a ladder": (["scale", "specs/gpt_nano.yaml", "--depth", "3,2", "--json"], r"--depth '3,2': .*ascending"),
    "no decoder": (["scale", "specs/vit_nano.yaml", "--depth", "3"], r"vit_nano\.yaml:6: job: .*needs a decoder"),
    "missing spec": (["specs/gpt_nan.yaml"], r"did you mean specs/gpt_nano\.yaml\?"),
    "misspelt command": (["stauts", "runs/a"], r"'stauts' is neither a command nor a file.*status"),
    "misspelt option": (["plan", "specs/gpt_nano.yaml", "--topolgy", "v5e-4"], r"--topolgy.*--topology"),
    "unfit key of the file": (
        ["plan", "specs/gpt_nano.yaml", "--quick", "--set", "config.train.total_steps=3"],
        r"^--set config\.train\.total_steps=3: schedule\.warmup_steps=20 is not below the total of 3 steps",
    ),
    "key as an option": (["specs/gpt_nano.yaml", "--config.x=3"], r"did you mean --set config\.x=3\?"),
    "key and value as words": (["plan", "specs/gpt_nano.yaml", "--seed.x", "3"], r"did you mean --set seed\.x=3\?"),
    "--set without a value": (["plan", "specs/gpt_nano.yaml", "--set", "seed"], r"--set seed: needs the form"),
    "predictions in no format": (["predict", "runs/a", "--data", "x", "-o", "x.csv"], r"-o x\.csv: names no format"),
    "status of nothing": (["status", "runs/none"], r"runs/none: no run is here"),
}


def check(words: list[str], pattern: str, capfd: pytest.CaptureFixture[str]) -> None:
    code = main(words)
    output = "".join(capfd.readouterr())
    lines = [line.removeprefix("problem: ") for line in output.splitlines()]
    assert code == EXIT_INVALID, output
    assert "Traceback" not in output
    named = [line for line in lines if re.search(pattern, line)]
    assert named, output
    assert len(named[0]) < 700


@pytest.mark.parametrize("mistake", VALUES)
def test_a_wrong_value_is_named(
    mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    override, pattern = VALUES[mistake]
    spec: dict[str, Any] = yaml.safe_load((ROOT / "specs/gpt_nano.yaml").read_text())
    spec["directory"], spec["config"]["data"]["source"] = str(tmp_path / "run"), str(tmp_path / "text.txt")
    if "mixture" in override:
        del spec["config"]["data"]["source"]
    (tmp_path / "text.txt").write_text("some words " * 20_000)
    (tmp_path / "x.jsonl.gz").write_bytes(b"")
    for name in ("file", "x.txt.gz", "x.npz"):
        (tmp_path / name).write_text("")
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(spec, sort_keys=False))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own", raising=False)
    check(["plan", "spec.yaml", "--quick", "--set", override.replace("HERE", str(tmp_path))], pattern, capfd)


@pytest.mark.parametrize("mistake", TEXTS)
def test_a_spec_that_cannot_be_read_is_explained(
    mistake: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text, pattern = TEXTS[mistake]
    (tmp_path / "spec.yaml").write_text(text)
    check([str(tmp_path / "spec.yaml")], pattern, capfd)
    check(["plan", str(tmp_path / "spec.yaml"), "--quick"], pattern, capfd)


@pytest.mark.parametrize("command", [[], ["plan"]], ids=["run", "plan"])
def test_mistakes_in_both_levels_of_a_spec_are_named_at_once(
    command: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    mistakes = ("checkpoint.evry=3", "config.train.total_stepz=5")
    words = [word for mistake in (*mistakes, f"directory={tmp_path}/run") for word in ("--set", mistake)]
    assert main([*command, str(ROOT / "specs/gpt_nano.yaml"), *words]) == EXIT_INVALID
    output = "".join(capfd.readouterr())
    assert all(f"{mistake}: unknown key; did you mean" in output for mistake in mistakes)
    assert ("2 problems" in output) == bool(command)


def test_advice_is_no_problem_of_its_own() -> None:
    findings = Findings()
    with findings.collect():
        raise ResumeError("seed: has 1, the spec 2\n  use another directory\n  or fork\nname: has a, the spec b")
    assert findings.problems == [
        "seed: has 1, the spec 2\n  use another directory\n  or fork",
        "name: has a, the spec b",
    ]


@pytest.mark.parametrize("mistake", COMMANDS)
def test_a_wrong_command_line_is_explained(
    mistake: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    check(*COMMANDS[mistake], capfd)
