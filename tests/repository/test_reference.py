"""The generated reference in .github/docs/specs.md: up to date, complete, and correct about keys that may change."""

from pathlib import Path

import pytest

from runner import hook
from runner.errors import InvalidError
from runner.spec import ExecutionSpec
from tests.repository.reference import BEGIN, PAGE, collect_sections, generate_reference
from tests.support.tiny_jobs import make_counter

BASES = ("Act", "Hook", "HookConfig", "Moment", "Observer", "SeenJob", "Verdict")


def test_the_reference_page_is_up_to_date() -> None:
    _, marker, kept = PAGE.read_text().partition(BEGIN)
    assert marker, f"{PAGE}: the marker is missing"
    assert kept.strip() == generate_reference().strip(), "python -m tests.repository.reference regenerates it"


def test_every_key_has_its_own_line() -> None:
    lines = PAGE.read_text().partition("## Reference: `metrics.jsonl`")[0].splitlines()
    keys = [key for section in collect_sections(ExecutionSpec.model_json_schema()) for key in section.keys]
    assert {"name", "checkpoint.keep_best.mode", "topology.mesh.fsdp", "config"} <= {key.name for key in keys}
    for key in keys:
        assert sum(line.startswith(f"| `{key.name}` |") for line in lines) == 1


def test_the_name_of_a_run_cannot_change(tmp_path: Path) -> None:
    (line,) = [line for line in PAGE.read_text().splitlines() if line.startswith("| `name` | string | required")]
    assert line.endswith("| stays |")
    make_counter(tmp_path / "run", **{"config.total_steps": 2})()
    with pytest.raises(InvalidError, match="belongs to the job 'count'"):
        make_counter(tmp_path / "run", name="other", **{"config.total_steps": 3})()


def test_the_reference_lists_the_config_of_every_shipped_hook() -> None:
    page = PAGE.read_text().partition("## Reference: hooks")[2].partition("## Reference: ")[0]
    found = [getattr(hook, name) for name in hook.__all__ if name not in BASES]
    assert found
    for each in found:
        section = page.partition(f"### `runner.hook:{each.__name__}`")[2].partition("###")[0]
        assert section
        assert all(f"| `{key}` |" in section for key in each.Config.model_fields)
