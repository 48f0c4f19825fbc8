"""Warning of a `keep_best` whose metric is missing in most checkpoints, as a table of intervals."""

import pytest

from runner.train.checks import BEST_HOOK, find_unmeasured_saves
from tests.support.tiny_jobs import make_gpt


def find_warning(tmp_path, changes):
    options = {
        "config.train.total_steps": 100,
        "config.eval.every_steps": 10,
        "checkpoint": {"every_steps": 20, "keep_best": {"metric": "val/loss", "mode": "min"}},
    }
    job = make_gpt(tmp_path / "run", **(options | changes))
    return find_unmeasured_saves(job.spec, job.config, job.programs.config_in_steps.total_steps)


def make_rule(every_steps=20, metric="val/loss", **rule):
    return {"checkpoint": {"every_steps": every_steps, "keep_best": {"metric": metric, "mode": "min"}} | rule}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, None),
        (make_rule(5), None),
        (make_rule(10), None),
        (make_rule(keep_best=None), None),
        (
            make_rule(15),
            "every 10 steps, and 3 of these 9 steps before the end are saved by steps; saves are due every 15 ",
        ),
        (make_rule(4) | {"config.eval.every_steps": 3, "config.train.total_steps": 11}, "and 0 of these 3 steps"),
        (make_rule(4) | {"config.eval.every_steps": 3}, "set checkpoint.every_steps: 3,"),
        (make_rule(1000), "set checkpoint.every_steps: 90,"),
        (make_rule(15, keep_every_steps=10), None),
        (make_rule(None, every_minutes=5.0), "saves by time or epochs rarely meet them"),
        (make_rule(15) | {"hooks": [BEST_HOOK]}, None),
        (make_rule(15) | {"config.eval.every_steps": None}, None),
        (make_rule(15, "train/loss") | {"logging.every_steps": 5}, None),
        (make_rule(15, "train/loss") | {"logging.every_steps": 10}, "train/loss, which is measured every 10 steps"),
        (make_rule(15, "val/of_my_evaluator"), None),
    ],
    ids=str,
)
def test_a_metric_that_checkpoints_lack_causes_a_warning(changes, expected, tmp_path):
    found = find_warning(tmp_path, changes)
    assert found is None if expected is None else expected in found


@pytest.mark.parametrize("every_steps", [4, 14, 1000])
def test_the_advice_of_the_warning_is_followed_without_a_warning(every_steps, tmp_path):
    found = find_warning(tmp_path, make_rule(every_steps) | {"config.eval.every_steps": 3})
    advice = int(found.partition("checkpoint.every_steps: ")[2].partition(",")[0])
    assert find_warning(tmp_path, make_rule(advice) | {"config.eval.every_steps": 3}) is None
