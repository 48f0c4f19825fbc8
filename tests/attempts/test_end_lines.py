"""Lines printed at the end of a run: few, short and correct."""

import re
from pathlib import Path

import pytest

from runner.lifecycle import format_end_lines
from tests.support.tiny_jobs import make_counter, make_gpt


def test_the_end_lines_are_short_and_differ_from_the_machine_readable_line() -> None:
    lines = format_end_lines("runs/x", 7)
    assert len(lines) == 3
    assert all(line == line.strip() and "\n" not in line and len(line) <= 120 for line in lines)
    assert not any(re.search(r"done at step|attempt \d+ in", line) for line in lines)


@pytest.mark.soak
@pytest.mark.parametrize("make", [make_gpt, make_counter])
def test_the_end_lines_name_existing_files_and_how_to_sample(
    make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path / "run", **{"config.train.total_steps" if make is make_gpt else "config.total_steps": 3})()
    found = re.fullmatch(r"files: (\S+) \((.*) \.\.\.\)", format_end_lines(str(tmp_path / "run"), 3)[0])
    assert found is not None
    for name in found[2].split(", "):
        assert (Path(found[1]) / name).exists()
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.endswith(f"python -m runner sample {found[1]}") == (make is make_gpt)
