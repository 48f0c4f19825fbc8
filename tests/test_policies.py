"""Claims of the policies beside the keys (`runner.spec.model`), with every value of every key of a GPT config."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from experiments.gpt import PretrainGPT
from runner import BaseTrainer
from runner.checkpoint.leaves import flatten_with_names
from runner.config import TrainerConfig
from runner.errors import SpecError
from runner.spec import is_below
from runner.spec.model import Policy, list_keys
from tests.support.bigram import BigramTrainer
from tests.support.tiny_jobs import make_gpt, stop_after
from tests.test_values import BASE, TRAINERS, Case, make_job_factory, merge_changes, pack_cases

CONFIG = PretrainGPT.Config
STAGE_KEYS = list_keys(CONFIG, Policy.STAGE)
# Stages are compared step by step, and a stage sets a list or a mapping as a whole; data in buckets need one.
CASES = [
    case
    for case in TRAINERS
    if case.key.startswith("config.")
    and "stages" not in case.key
    and "*" not in case.key
    and "s3:" not in str(case.changes)
]


def is_free(key: str) -> bool:
    return is_below(key, list_keys(CONFIG, Policy.FREE))


def has_state(key: str) -> bool:
    return is_below(key, list_keys(CONFIG, Policy.STATE)) and not is_below(key, list_keys(CONFIG, Policy.NO_STATE))


def check_change(own: dict[str, Any], beside: dict[str, Any], directory: Path, job_class: type[BaseTrainer]) -> None:
    """Change keys between two attempts, and compare the run with one in which they never change."""
    make, change = (make_job_factory(each, directory, job_class, BASE) for each in (beside, beside | own))
    whole = make("whole")
    whole()
    stop_after(make("run"), 2)
    resumed = change("run")
    resumed()
    expected, found = (flatten_with_names(job.state.params) for job in (whole, resumed))
    tolerance = 1e-5 if any(key.startswith("config.memory.") for key in own) else 0
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=0, atol=tolerance, err_msg=name)


# An export needs a model with names of Hugging Face: tests/train/test_export.py changes these keys.
FREE = [case for case in CASES if is_free(case.key) and not case.key.startswith("config.export.")]


FREE_ROWS = pack_cases([case for case in FREE if all(map(is_free, case.changes))])


@pytest.mark.parametrize(
    "row",
    [FREE_ROWS[-1], *(pytest.param(row, marks=pytest.mark.soak) for row in FREE_ROWS[:-1])],
    ids=lambda row: f"{len(row)} values",
)
def test_free_keys_may_change_in_a_run_and_change_no_bit(row: list[Case], tmp_path: Path) -> None:
    check_change(merge_changes(row), {}, tmp_path, BigramTrainer)


@pytest.mark.soak
@pytest.mark.parametrize("case", FREE, ids=str)
def test_a_free_key_may_change_in_a_run_and_changes_results_by_rounding_alone(case: Case, tmp_path: Path) -> None:
    own = {key: value for key, value in case.changes.items() if is_free(key)}
    beside = {key: value for key, value in case.changes.items() if not is_free(key)}
    check_change(own, beside, tmp_path, PretrainGPT)


def test_a_stage_may_set_the_keys_that_are_marked_and_no_others(tmp_path: Path) -> None:
    found = {}
    for case in CASES:
        others = {key: value for key, value in case.changes.items() if key != case.key}
        stage = {"from_step": 1, "set": {case.key.removeprefix("config."): case.changes[case.key]}}
        try:
            make_gpt(tmp_path / "run", BigramTrainer, **BASE | others | {"config.stages": [stage]})
            found[case.key] = True
        except SpecError as error:
            # Other rules may refuse this value in a stage, too.
            found[case.key] = "may not change during a run" not in str(error)
    assert found == {case.key: is_below(case.key, STAGE_KEYS) for case in CASES}


@pytest.mark.parametrize(
    "row",
    pack_cases(
        [case for case in CASES if not any(map(has_state, case.changes)) and "tokenise" not in str(case.changes)]
    ),
    ids=lambda row: f"{len(row)} values",
)
def test_keys_without_state_leave_its_arrays_as_they_are(row: list[Case], tmp_path: Path) -> None:
    model = BASE | {"config.model.vocabulary_size": 300}  # `auto` would follow the data
    jobs = [make_job_factory(each, tmp_path, PretrainGPT, model)("run") for each in ({}, merge_changes(row))]
    before, after = (
        {name: (leaf.shape, leaf.dtype) for name, leaf in flatten_with_names(state).items()}
        for state in (job.setup_builder.build(jax.devices()).abstract_state for job in jobs)
    )
    assert before == after


def test_every_section_of_the_config_has_a_case() -> None:
    assert {case.key.split(".")[1] for case in CASES} == {*TrainerConfig.model_fields} - {"stages"}
