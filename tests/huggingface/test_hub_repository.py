"""Pushes to the Hub: one commit with all files after any interruption, and one-line errors."""

import sys
from pathlib import Path

import pytest
from huggingface_hub import constants

from runner.console import warn
from runner.errors import InvalidError, RetryableError
from runner.huggingface import hub as repository
from runner.huggingface.hub import HubRepository, PushResult
from tests.support.hub import READ_TOKEN, TOKEN, Hub, StoredRepository, start_hub

NAME = "owner/model"
CARD = "---\ntags:\n- jax\n---\n\n# model\n"
SMALL = {"README.md": CARD, "config.json": "{}", "tokenizer.json": "{}"}
WHOLE = SMALL | {"model.safetensors": "all" * 5000}
SHARDS = SMALL | {f"model-0000{n}-of-00002.safetensors": f"{n}" * 9000 for n in (1, 2)}
SHARDED = SHARDS | {"model.safetensors.index.json": "{}"}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch):
    with start_hub(monkeypatch) as started:
        yield started


def write_files(directory: Path, files: dict[str, str] = SHARDED) -> Path:
    directory.mkdir(exist_ok=True)
    for name, text in files.items():
        (directory / name).write_text(text)
    return directory


def push(directory: Path, is_public: bool = False) -> PushResult:
    there = HubRepository(NAME, is_public=is_public)
    there.check()
    return there.push(directory, "Step 3 of model")


def read_text_files(repo: StoredRepository) -> dict[str, str]:
    return {name: text.decode() for name, text in repo.files.items() if name != ".gitattributes"}


@pytest.mark.parametrize("is_public", [False, True])
def test_a_push_is_one_commit_and_a_repetition_none(hub: Hub, tmp_path: Path, is_public: bool) -> None:
    directory = write_files(tmp_path / "out")
    assert push(directory, is_public) == PushResult(f"{hub.endpoint}/{NAME}", has_changed=True)
    repo = hub.repos[NAME]
    assert (read_text_files(repo), repo.is_private) == (SHARDED, not is_public)
    assert repo.commits == ["initial commit", "Step 3 of model"]
    sent = hub.count("PUT /lfs/")
    assert sent == 3
    assert not push(directory, is_public).has_changed
    assert len(repo.commits) == 2
    assert hub.count("PUT /lfs/") == sent


def test_a_push_deletes_only_files_of_earlier_exports(hub: Hub, tmp_path: Path) -> None:
    repo = hub.repos[NAME] = StoredRepository(is_private=True)
    theirs = {"LICENSE": b"theirs", "onnx/model.onnx": b"theirs", "model.bin": b"theirs"}
    repo.files |= theirs
    push(write_files(tmp_path / "sharded"))
    push(write_files(tmp_path / "whole", WHOLE))
    assert read_text_files(repo) == WHOLE | {name: text.decode() for name, text in theirs.items()}
    assert len(repo.commits) == 3


def test_a_push_can_be_repeated_after_any_network_failure(hub: Hub, tmp_path: Path) -> None:
    directory = write_files(tmp_path / "out")
    push(directory)
    whole = list(hub.requests)
    assert [sum(word in line for line in whole) for word in ("PUT /lfs/", "/commit/", "/create")] == [3, 1, 1]
    for first in range(len(whole)):
        for kind in (0, -1):
            hub.repos.clear()
            hub.objects.clear()
            hub.requests.clear()
            hub.fault = lambda number, line, first=first, kind=kind: kind if number >= first else None  # type: ignore[misc]
            with pytest.raises(RetryableError, match="run the same command again") as failed:
                push(directory)
            assert "\n" not in str(failed.value)
            kept, is_committed = set(hub.objects), bool(hub.repos) and len(hub.repos[NAME].commits) > 1
            hub.requests.clear()
            hub.fault = lambda number, line: None
            assert push(directory).has_changed is not is_committed
            assert read_text_files(hub.repos[NAME]) == SHARDED
            assert len(hub.repos[NAME].commits) == 2
            assert hub.count("PUT /lfs/") == 3 - len(kept)


def test_waiting_for_the_hub_has_a_limit(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repository, "ANSWER_SECONDS", 0.5)
    hub.fault = lambda number, line: -2 if "/commit/" in line else None
    with pytest.raises(RetryableError, match=r"does not answer: .*timed out"):
        push(write_files(tmp_path / "out"))


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_hub_is_retryable(hub: Hub, tmp_path: Path, status: int) -> None:
    hub.fault = lambda number, line: status if "/commit/" in line else None
    with pytest.raises(RetryableError, match=f"{status}: as the test said; run the same command again"):
        push(write_files(tmp_path / "out"))


def test_one_of_two_concurrent_pushes_is_retryable(hub: Hub, tmp_path: Path) -> None:
    directory = write_files(tmp_path / "out")
    repo = hub.repos[NAME] = StoredRepository(is_private=True)

    def commit_meanwhile(number: int, line: str) -> None:
        if "/preupload/" in line:
            repo.commits.append("somebody else's")

    hub.fault = commit_meanwhile
    with pytest.raises(RetryableError, match="412"):
        push(directory)
    assert read_text_files(repo) == {}
    hub.fault = lambda number, line: None
    push(directory)
    assert read_text_files(repo) == SHARDED


REFUSALS = {
    "wrong token": (
        lambda hub, patch: patch.setenv("HF_TOKEN", "hf_a-wrong-token"),
        "does not accept the token of HF_",
    ),
    "no token": (lambda hub, patch: patch.delenv("HF_TOKEN"), "no token; set HF_TOKEN, or log in"),
    "broken token": (lambda hub, patch: patch.setenv("HF_TOKEN", "hf_a-tok\x07en"), "a character that no token has"),
    "a token that reads": (lambda hub, patch: patch.setenv("HF_TOKEN", READ_TOKEN), "the token may only read"),
    "offline": (lambda hub, patch: patch.setattr(constants, "HF_HUB_OFFLINE", True), "HF_HUB_OFFLINE is set"),
    "no library": (
        lambda hub, patch: patch.setitem(sys.modules, "huggingface_hub", None),
        r"needs the package huggingface_hub; .*pip install -e '\.\[hub\]'",
    ),
    "no URL": (
        lambda hub, patch: patch.setattr(constants, "ENDPOINT", "hub.example"),
        "HF_ENDPOINT=hub.example: needs",
    ),
    "public already": (
        lambda hub, patch: hub.repos.update({NAME: StoredRepository(False)}),
        "is public; give --public",
    ),
    "not allowed there": (
        lambda hub, patch: setattr(hub, "fault", lambda number, line: 403 if "create" in line else None),
        "the token may not write to owner/model: as the test said",
    ),
    "ignored": (
        lambda hub, patch: hub.repos.update({NAME: StoredRepository(True, ignored=("config.json",))}),
        "has not taken config.json: see its .gitignore",
    ),
}


@pytest.mark.daily(4)
@pytest.mark.parametrize("name", REFUSALS)
def test_a_refused_push_prints_one_line_without_the_token(
    name: str, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arrange, message = REFUSALS[name]
    arrange(hub, monkeypatch)
    with pytest.raises(InvalidError, match=message) as refused:
        push(write_files(tmp_path / "out"))
    warn(str(refused.value))
    (line,) = capsys.readouterr().err.splitlines()
    assert "hf_a-" not in line


def test_a_private_repository_is_not_pushed_to_as_public(hub: Hub, tmp_path: Path) -> None:
    hub.repos[NAME] = StoredRepository(is_private=True)
    with pytest.raises(InvalidError, match="and is private; leave out --public"):
        push(write_files(tmp_path / "out"), is_public=True)


@pytest.mark.parametrize("name", ["model", "owner/", "a/b/c", "owner/mo del", "owner/-model--.", "https://hub/a/b"])
def test_an_invalid_name_is_refused(hub: Hub, name: str) -> None:
    with pytest.raises(InvalidError, match=f"--push {name}: "):
        HubRepository(name, is_public=False).check()


def test_the_token_is_never_printed(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    HubRepository(NAME, is_public=False)
    warn(f"refused: {TOKEN}")
    assert capsys.readouterr().err == "refused: ***\n"
