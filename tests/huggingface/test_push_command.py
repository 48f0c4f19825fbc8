"""The command `export --push`: pushed files, continuation after a kill, and errors."""

import hashlib
import json
import signal
import time
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from runner import BaseTrainer
from runner.checkpoint.manifest import read_manifest
from runner.cli.app import run_command
from runner.errors import InvalidError
from tests.support.hub import Hub, StoredRepository, start_hub
from tests.support.tiny_jobs import make_gpt, start_python

NAME = "owner/model"
SMALL = {"config.model": {"layers": 1, "heads": 1, "width": 16}, "config.eval.batches": 1}
DEADLINE_SECONDS = 300.0


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> BaseTrainer:
    """A finished run."""
    job = make_gpt(tmp_path_factory.mktemp("push") / "run", **SMALL)
    job()
    return job


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch):
    with start_hub(monkeypatch) as started:
        yield started


def read_files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def read_pushed_files(repo: StoredRepository) -> dict[str, bytes]:
    return {name: text for name, text in repo.files.items() if name != ".gitattributes"}


def test_a_push_contains_the_export_and_a_card(
    run: BaseTrainer, hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = str(run.store.root)
    before = read_files(run.store.root / "attempts")
    options = ["--push", NAME, "--license", "mit", "--base-model", "owner/base"]
    assert run_command(["export", where, "-o", str(tmp_path / "plain")]) == 0
    assert run_command(["export", where, *options]) == 0
    files = read_pushed_files(hub.repos[NAME])
    card = ModelCard(files.pop("README.md").decode())
    assert files == read_files(tmp_path / "plain")
    assert (card.data.license, card.data.base_model, card.data.library_name) == ("mit", "owner/base", "transformers")
    assert card.data.to_dict()["pipeline_tag"] == "text-generation"
    assert read_manifest(run.store, "checkpoints/8").fingerprint in card.text
    result = json.loads((run.store.root / "result.json").read_text())
    assert f"| tokens | {result['tokens']:,} |" in card.text
    assert f"| {result['train_loss']:.4f} | {result['val_loss']:.4f} |" in card.text
    assert run_command(["export", where, *options, "-o", str(tmp_path / "kept")]) == 0
    assert read_files(tmp_path / "kept") == read_pushed_files(hub.repos[NAME])
    assert len(hub.repos[NAME].commits) == 2
    assert read_files(run.store.root / "attempts") == before
    assert "nothing to push, the repository already has step 8" in capsys.readouterr().out


@pytest.mark.soak
def test_a_push_continues_after_a_kill(run: BaseTrainer, hub: Hub, tmp_path: Path) -> None:
    command = [str(run.store.root), "--push", NAME, "-o", str(tmp_path / "out")]
    assert run_command(["export", str(run.store.root), "-o", str(tmp_path / "plain")]) == 0
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "plain").iterdir()}
    largest = hashlib.sha256((tmp_path / "plain" / "model.safetensors").read_bytes()).hexdigest()
    hub.is_held = lambda digest: digest == largest
    process = start_python("-m", "runner", "export", *command, devices=1)
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not (hub.objects and hub.held):
        assert process.poll() is None, "the process ended before the middle of its upload"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert hub.repos[NAME].commits == ["initial commit"]
    assert not (tmp_path / "out").exists()
    num_puts = hub.count("PUT /lfs/")
    assert len(hub.objects) == 1
    hub.is_held = lambda digest: False
    assert run_command(["export", *command]) == 0
    assert hub.count("PUT /lfs/") == num_puts + 1
    assert len(hub.objects) == 2
    assert len(hub.repos[NAME].commits) == 2
    files = read_pushed_files(hub.repos[NAME])
    assert files == read_files(tmp_path / "out")
    assert {name: files[name] for name in sizes} == read_files(tmp_path / "plain")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "give -o OUT, --push OWNER/NAME, or both"),
        (["-o", "out", "--public"], "--public .* without --push"),
        (["-o", "out", "--base-model", "a/b"], "--base-model .* without --push"),
    ],
)
def test_options_without_effect_are_refused(options: list[str], message: str) -> None:
    with pytest.raises(InvalidError, match=message):
        run_command(["export", "nowhere", *options])


def test_a_wrong_token_ends_the_command_before_the_export(
    run: BaseTrainer, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_a-wrong-token")
    with pytest.raises(InvalidError, match="does not accept the token of HF_TOKEN") as refused:
        run_command(["export", str(run.store.root), "--push", NAME, "-o", str(tmp_path / "out")])
    assert refused.value.exit_code == 2
    assert "\n" not in str(refused.value)
    assert list(tmp_path.iterdir()) == []
    assert hub.repos == {}
