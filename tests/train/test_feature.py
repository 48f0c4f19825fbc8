"""The example of a feature in CONTRIBUTING.md."""

import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from experiments.gpt import PretrainGPT
from runner.storage import LocalStore, read_json
from runner.train.compile import compute_program_digest
from tests.repository.structure import ROOT
from tests.support.tiny_jobs import make_gpt, read_outcome, stop_after
from tests.test_values import TrainLookup

STEPS = 4
SETTINGS: dict[str, Any] = {
    "config.model": {"layers": 1, "heads": 2, "width": 16},
    "config.schedule": {"warmup_steps": 1},
    "config.train": {"total_steps": STEPS, "global_batch_examples": 16},
    "config.eval.every_steps": None,
    "checkpoint.every_steps": 2,
}


@pytest.fixture(scope="module")
def example() -> Iterator[types.ModuleType]:
    """The module of the example, under a name of its own, as a spec would name it."""
    (source,) = re.findall(r"```python\n(.*?)```", (ROOT / ".github/CONTRIBUTING.md").read_text(), re.DOTALL)
    module = types.ModuleType("example_feature")
    sys.modules[module.__name__] = module
    exec(compile(source, "CONTRIBUTING.md", "exec"), module.__dict__)
    yield module
    del sys.modules[module.__name__]


def test_a_feature_is_in_state_rows_and_manifest_and_survives_a_stop(example: Any, tmp_path: Path) -> None:
    # The loss begins at log(257), and every step is above the ceiling.
    settings = SETTINGS | {"config.ceiling": {"at": 2.5}}

    class CeilingLookup(TrainLookup):
        """A trainer with the feature, whose model compiles fast."""

        Config = example.CeilingGPT.Config
        feature_classes = example.CeilingGPT.feature_classes

    whole = make_gpt(tmp_path / "whole", CeilingLookup, **settings)
    whole()
    stop_after(make_gpt(tmp_path / "run", CeilingLookup, **settings), 3)
    make_gpt(tmp_path / "run", CeilingLookup, **settings)()
    assert read_outcome(tmp_path / "run") == read_outcome(tmp_path / "whole")
    assert int(whole.state.riders["ceiling"]) == STEPS
    row = whole.session.report.get_newest_row()
    assert (row["train/loss"], row["train/clipped_losses"]) == (2.5, STEPS)
    counts = [
        read_json(LocalStore(tmp_path / "run"), f"checkpoints/{step}/manifest.json")["features"] for step in (3, STEPS)
    ]
    assert counts == [{"ceiling": {"clipped_losses": step}} for step in (3, STEPS)]


def test_without_its_key_a_feature_changes_no_program(example: Any, tmp_path: Path) -> None:
    def compute_digest(job_class: Any) -> str:
        job = make_gpt(tmp_path / "run", job_class, **SETTINGS)
        setup = job.setup_builder.build(jax.devices())
        return compute_program_digest(setup.lower_train(job.train_step, job.setup_builder.list_layouts(setup)[0]))

    assert compute_digest(example.CeilingGPT) == compute_digest(PretrainGPT)
