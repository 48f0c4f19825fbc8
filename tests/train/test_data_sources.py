"""Resume from every kind of data source: a stopped and resumed run is bit-identical to an uninterrupted one."""

from pathlib import Path
from typing import Any

import pytest

from runner.spec import load_document, validate_spec
from runner.storage import parse_lines
from tests.data.datasets import KINDS, make_config, write_documents
from tests.support.tiny_jobs import (
    RecordingCountBright,
    RecordingGPT,
    are_leaves_equal,
    make_gpt,
    read_recorded_rows,
    stop_after,
)

STOP, STEPS = 4, 8
DAILY = ("mixture", "array_mixture")


def read_trajectory(directory: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics without speeds, which are not part of the trajectory."""
    rows = parse_lines((directory / "metrics.jsonl").read_bytes())
    return [{key: value for key, value in row.items() if not key.startswith("perf/")} for row in rows]


@pytest.mark.soak
@pytest.mark.parametrize("kind", [pytest.param(k, marks=() if k in DAILY else pytest.mark.soak) for k in KINDS])
def test_resumed_run_is_bit_identical(tmp_path: Path, kind: str) -> None:
    data = {"sequence_length": 16, "validation_fraction": 0.2, **make_config(kind, tmp_path)}
    unit, job = ("tokens", RecordingGPT) if data["sequence_length"] else ("examples", RecordingCountBright)
    other = {"source": "tests.support.arrays:Images", "options": {"seed": 3}}
    data["validation"] = {"other": write_documents(tmp_path / "other", 60, 9) if unit == "tokens" else other}
    if "mixture" in data:
        data["mixture"] = [named | {"max_epochs": 1000} for named in data["mixture"]]
    changes = {"config.data": data} | ({} if unit == "tokens" else {"config.model": {}})
    whole = make_gpt(tmp_path / "whole", job, **changes)
    whole()
    parts = make_gpt(tmp_path / "parts", job, **changes)
    stop_after(parts, STOP)
    document = load_document(tmp_path / "parts" / "spec.yaml")  # the spec that the run wrote, fully resolved
    parts = job(validate_spec(document), document)
    parts()
    assert parts.step == whole.step == STEPS
    assert are_leaves_equal(parts.state, whole.state)
    assert read_trajectory(tmp_path / "parts") == read_trajectory(tmp_path / "whole")
    for step in range(STEPS):
        assert read_recorded_rows(tmp_path / "parts", step) == read_recorded_rows(tmp_path / "whole", step)
    last = read_trajectory(tmp_path / "whole")[-1]
    sets = [named["name"] for named in data["mixture"]] if "mixture" in data else ["validation"]
    assert {key for key in last if key.startswith("val/")} == {
        *(f"val/{figure}" for figure in ("loss", "accuracy")),
        *(f"val/{name}/{figure}" for name in [*sets, "other"] for figure in ("loss", "accuracy")),
    }
    assert {key for key in last if key.startswith("data/")} == {
        f"data/{named['name']}/{figure}" for named in data.get("mixture", []) for figure in (unit, "epochs")
    }
