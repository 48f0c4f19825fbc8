"""The generated reference: up to date, complete, and correct about keys that may change."""

from pathlib import Path

import pytest

from runner import hook
from runner.errors import InvalidError
from runner.spec import ExecutionSpec
from tests.repository.reference import BEGIN, INDEX, PAGES, collect_sections, generate_pages
from tests.support.tiny_jobs import make_counter

BASES = ("Act", "Hook", "HookConfig", "Moment", "Observer", "SeenJob", "Verdict")


def test_the_pages_of_the_reference_are_up_to_date() -> None:
    found = {path.name: path.read_text() for path in PAGES.iterdir()}
    _, marker, kept = found[INDEX].partition(BEGIN)
    assert marker, f"{INDEX}: the marker is missing"
    found[INDEX] = marker + kept
    assert found == generate_pages(), "python -m tests.repository.reference regenerates them"


def test_every_key_has_its_own_line() -> None:
    files = {
        "metrics.jsonl.md",
        "events.jsonl.md",
        "manifest.json.md",
        "result.json.md",
        "progress.json.md",
        "assets.json.md",
    }
    pages = {path.name: path.read_text() for path in PAGES.glob("*.md")}
    lines = [line for name in pages.keys() - files for line in pages[name].splitlines()]
    keys = [key for section in collect_sections(ExecutionSpec.model_json_schema()) for key in section.keys]
    assert {"name", "checkpoint.keep_best.mode", "topology.mesh.fsdp", "config"} <= {key.name for key in keys}
    for key in keys:
        assert sum(line.startswith(f"| `{key.name}` |") for line in lines) == 1


def test_the_name_of_a_run_cannot_change(tmp_path: Path) -> None:
    lines = (PAGES / "top.md").read_text().splitlines()
    assert any(line.startswith("| `name` | string | required | no |") for line in lines)
    make_counter(tmp_path / "run", **{"config.total_steps": 2})()
    with pytest.raises(InvalidError, match="belongs to the job 'count'"):
        make_counter(tmp_path / "run", name="other", **{"config.total_steps": 3})()


def test_the_reference_lists_the_config_of_every_shipped_hook() -> None:
    page = (PAGES / "hooks.md").read_text()
    found = [getattr(hook, name) for name in hook.__all__ if name not in BASES]
    assert found
    for each in found:
        section = page.partition(f"## `runner.hook:{each.__name__}`\n")[2].partition("\n## ")[0]
        assert section
        assert all(f"| `{key}` |" in section for key in each.Config.model_fields)


@pytest.mark.parametrize(
    ("page", "key", "cells"),
    [
        ("config.optimizer", "config.optimizer.learning_rate", "stage, fork | results"),
        ("config.model.gpt", "config.model.layers", "no | results"),
        ("config.data", "config.data.source", "same content | results"),
        ("config.train", "config.train.micro_batch_examples", "any restart | "),
    ],
)
def test_the_columns_of_a_key_say_how_it_may_change(page: str, key: str, cells: str) -> None:
    (line,) = [line for line in (PAGES / f"{page}.md").read_text().splitlines() if line.startswith(f"| `{key}` |")]
    assert f"| {cells} |" in line
