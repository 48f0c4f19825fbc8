"""Invalid paths: for every key and command that takes a path, they are rejected in one line and nothing is created."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from experiments.counter import Counter
from runner import open_checkpoint
from runner.cli.app import run_command
from runner.data.source_files import find_source
from runner.errors import EXIT_INVALID, InvalidError
from runner.spec import CheckpointConfig, parse_document, validate_spec
from runner.storage import local_directory
from tests.support.tiny_jobs import merge

RUN = Path(__file__).parent / "data/format_1/counter"
INVALID_PATHS = {
    "a long name": "{here}/" + "x" * 256,
    "a name that is long in bytes": "{here}/" + "é" * 128,
    "a long path": "{here}" + "/xxxxxxxxx" * 500,
    "nobody's home": "~nosuchuser/x",
    "a file": "{here}/file",
    "below a file": "{here}/file/x",
    "far below a file": "{here}/file/x/y",
    "a NUL": "{here}/a\0b",
    "no text": "{here}/\ud800",
    "a link that leads nowhere": "{here}/dangling",
    "below a link that leads nowhere": "{here}/dangling/x",
    "a loop of links": "{here}/loop",
    "below a loop of links": "{here}/loop/x",
    "a pipe": "{here}/pipe",
    "a variable": "$HOME/x",
    "a variable in braces": "{here}/${{HOME}}/x",
    "a command": "{here}/$(date)",
    "an older command": "{here}/`date`",
    "a path of Windows": r"C:\runs\x",
    "a mixed path": r"{here}/runs\x",
}


def run_counter(here: Path, **changes: Any) -> None:
    """Run a counter whose spec is parsed like on the command line."""
    base = {
        "name": "count",
        "job": "experiments.counter:Counter",
        "directory": str(here / "run"),
        "config": {"total_steps": 3, "width": 8},
    }
    document = parse_document(json.dumps(merge(base, changes)), "spec.yaml")
    Counter(validate_spec(document), document)()


PATH_USERS: dict[str, Callable[[Path, str], Any]] = {
    "directory": lambda here, path: run_counter(here, directory=path),
    "checkpoint.local_directory": lambda here, path: run_counter(
        here, checkpoint={"local_directory": path, "local_every_steps": 1}
    ),
    "checkpoint.init_from": lambda here, path: run_counter(here, checkpoint={"init_from": path}),
    "a checkpoint in checkpoint.init_from": lambda here, path: run_counter(
        here, checkpoint={"init_from": f"{path}/checkpoints/4"}
    ),
    "config.data.source": lambda here, path: find_source(path),
    "checkpoints": lambda here, path: run_command(["checkpoints", path]),
    "checkpoints --verify": lambda here, path: run_command(["checkpoints", path, "--verify"]),
    "checkpoints copy from": lambda here, path: run_command(["checkpoints", "copy", path, str(here / "copy")]),
    "checkpoints copy to": lambda here, path: run_command(["checkpoints", "copy", str(RUN), path]),
    "open_checkpoint": lambda here, path: open_checkpoint(path),
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "file").write_text("text")
    (tmp_path / "text.txt").write_text("text of its own")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def list_all(here: Path) -> list[Path]:
    return sorted(here.rglob("*"))


@pytest.mark.parametrize("taker", PATH_USERS)
def test_invalid_paths_are_rejected_and_nothing_is_created(taker: str, here: Path) -> None:
    before, problems = list_all(here), []
    for name, form in INVALID_PATHS.items():
        if (taker, name) == ("config.data.source", "a file"):
            continue  # a file is valid here
        try:
            PATH_USERS[taker](here, form.format(here=here))
        except InvalidError as error:
            if error.exit_code != EXIT_INVALID or "\n" in str(error):
                problems.append(f"{name}: {error}")
        except Exception as error:  # noqa: BLE001 - whatever comes out is what this test looks for
            problems.append(f"{name}: {type(error).__name__}: {error}"[:200])
        else:
            problems.append(f"{name}: was taken")
        if list_all(here) != before:
            problems.append(f"{name}: made {sorted(set(list_all(here)) - set(before))}")
            before = list_all(here)
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("path", [r"C:\runs\x", "$HOME/x", "$(date)", "`date`"])
@pytest.mark.parametrize(
    "words",
    [
        ["report", str(RUN), "-o"],
        ["metrics", str(RUN), "-o"],
        ["evaluate", str(RUN), "--follow", "-o"],
        ["predict", str(RUN), "--data", "x.txt", "-o"],
        ["plan", "spec.yaml", "--profile", "--trace"],
    ],
    ids=lambda words: words[0],
)
def test_output_paths_with_backslashes_or_variables_are_rejected(words: list[str], path: str, here: Path) -> None:
    before = list_all(here)
    with pytest.raises(InvalidError, match=r"backslash|variables"):
        run_command([*words, path])
    assert list_all(here) == before


# Outputs that would replace a device, or lose a part of the run.
LOST_OUTPUTS = ("pipe", "link", "run/metrics.jsonl", "run/checkpoints/9", "run/job.json", "beside/result.json")


@pytest.mark.parametrize(
    "words",
    [["report", "run", "-o"], ["metrics", "run", "--csv", "-o"], ["export", "run", "-o"]],
    ids=lambda words: words[0],
)
def test_an_output_replaces_neither_a_device_nor_a_part_of_the_run(words: list[str], here: Path) -> None:
    shutil.copytree(RUN, here / "run")
    (here / "link").symlink_to("pipe")
    (here / "beside").symlink_to("run")
    before = {path: path.read_bytes() for path in list_all(here) if path.is_file()}
    for output in LOST_OUTPUTS:
        with pytest.raises(InvalidError, match=rf"^-o {output}: (is a|would be a part of the run)"):
            run_command([*words, output])
        assert (here / "pipe").is_fifo()
        assert {path: path.read_bytes() for path in list_all(here) if path.is_file()} == before


def test_an_output_behind_a_link_leaves_the_link(here: Path) -> None:
    shutil.copytree(RUN, here / "run")
    (here / "newest.csv").symlink_to(here / "text.txt")
    assert run_command(["metrics", "run", "--csv", "-o", "newest.csv"]) == 0
    assert (here / "newest.csv").is_symlink()
    assert (here / "text.txt").read_text() != "text of its own"


@pytest.mark.parametrize("option", [[], ["--verify"], ["--deep"]])
@pytest.mark.parametrize("where", ["nowhere", "empty", "run/checkpoints/4"])
def test_a_directory_without_a_run_has_no_good_checkpoints(where: str, option: list[str], here: Path) -> None:
    shutil.copytree(RUN, here / "run")
    (here / "empty").mkdir()
    with pytest.raises(InvalidError, match="holds no run"):
        run_command(["checkpoints", where, *option])
    # A copy has no `job.json`.
    (here / "run/job.json").unlink()
    assert run_command(["checkpoints", "run", *option]) == 0


def test_every_path_key_is_in_the_table() -> None:
    keys = {"directory", *(f"checkpoint.{key}" for key in CheckpointConfig.model_fields)}
    named = {key for key in keys if key.endswith(("directory", "init_from"))}
    assert named <= set(PATH_USERS)


def test_home_directories_are_expanded_and_missing_directories_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert local_directory("~/runs/new") == tmp_path / "runs/new"
    (tmp_path / "link").symlink_to(tmp_path)
    assert local_directory(f"{tmp_path}/link/new") == tmp_path / "link/new"
    assert local_directory("costs 5$ or $5") == Path.cwd() / "costs 5$ or $5"
    # Output of an earlier version is found again.
    (tmp_path / r"a\b").mkdir()
    assert local_directory(r"~/a\b") == tmp_path / r"a\b"
