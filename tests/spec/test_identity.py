"""What defines the bits of a run is its trajectory; the rest may change on a resume."""

from typing import Any, Literal

import pytest
from pydantic import Field

from runner.spec import (
    FrozenModel,
    JobConfig,
    Trajectory,
    compute_trajectory,
    fill_in_defaults,
    hash_record,
    parse_document,
    validate_config,
    validate_spec,
)
from tests.spec.sample import SPEC, Config


def test_only_what_moves_the_bits_is_part_of_the_trajectory() -> None:
    def digest(*overrides: str) -> str:
        document = parse_document(SPEC, "x", overrides)
        return hash_record(compute_trajectory(validate_spec(document), validate_config(document, Config)))

    free = ("name=b", "directory=b", "project=b", "group=b", "topology.mesh.fsdp=4", "checkpoint.every_steps=5")
    for override in (*free, "logging.every_steps=1", "config.train.shape=constant", "config.train.rate=0.001"):
        assert digest(override) == digest()
    for override in ("seed=8", "job=a:B", "config.train.rate=0.002", "config.train.sizes=[1]"):
        assert digest(override) != digest()


def test_the_trajectory_is_flat_and_holds_defaults() -> None:
    document = parse_document(SPEC, "x")
    assert compute_trajectory(validate_spec(document), validate_config(document, Config)) == {
        "job": "experiments.gpt:PretrainGPT",
        "seed": 7,
        "config.train.total_steps": 500,
        "config.train.rate": 0.001,
        "config.train.sizes": [1, 2],
        "config.parts": [],
    }


# What an older version has saved, compared by a later one that has more keys.


class Adam(FrozenModel):
    name: Literal["adam"] = "adam"
    rate: float = 1.0
    eps: float = 1e-8


class Sgd(FrozenModel):
    name: Literal["sgd"] = "sgd"
    rate: float = 1.0
    momentum: float = 0.9


class Decay(FrozenModel):
    factor: float = 0.5
    every: int = 2


class Part(Decay):
    limit: int = 1


class LaterConfig(JobConfig):
    width: int
    parts: list[Part] = Field(default=[])
    optimizer: Adam | Sgd = Field(default=Adam(), discriminator="name")
    average: Decay | None = None
    decay: Decay = Decay(factor=0.9)
    free: int = 3

    @property
    def free_keys(self) -> frozenset[str]:
        return frozenset({"free", "parts.limit"})


def compare(saved: Trajectory, **config: Any) -> set[str]:
    """Keys in which what was saved differs from a job of the later version."""
    present_config = LaterConfig.model_validate({"width": 8, **config})
    present = {
        key: value
        for key, value in compute_trajectory(validate_spec(parse_document(SPEC, "x")), present_config).items()
        if key.startswith("config.")
    }
    filled = fill_in_defaults(saved, present, present_config)
    return {key for key in filled | present if filled.get(key, "nothing") != present.get(key, "nothing")}


OLD = {"config.width": 8}


@pytest.mark.parametrize(
    ("saved", "config", "different"),
    [
        (OLD, {}, set()),
        (OLD, {"free": 7}, set()),
        (OLD, {"width": 9}, {"config.width"}),
        ({}, {}, {"config.width"}),
        (OLD, {"decay": {"factor": 0.9, "every": 2}}, set()),
        (OLD, {"decay": {}}, {"config.decay.factor"}),
        (OLD, {"average": {}}, {"config.average.factor", "config.average.every"}),
        (OLD | {"config.average": None}, {}, set()),
        (OLD | {"config.average.factor": 0.5}, {"average": {}}, set()),
        (OLD | {"config.average.factor": 0.5}, {}, {"config.average.factor", "config.average"}),
        (OLD | {"config.optimizer.name": "adam"}, {}, set()),
        (OLD | {"config.optimizer.name": "sgd"}, {"optimizer": {"name": "sgd"}}, set()),
        (OLD | {"config.optimizer.name": "adam"}, {"optimizer": {"name": "sgd"}}, {"config.optimizer.name"}),
        (OLD, {"optimizer": {"name": "sgd"}}, {"config.optimizer.name", "config.optimizer.momentum"}),
        (OLD, {"parts": [{"limit": 2}]}, {"config.parts.0.factor", "config.parts.0.every"}),
        (OLD | {"config.parts.0.factor": 0.5}, {"parts": [{"limit": 2}]}, set()),
        (OLD | {"config.parts": [{"factor": 0.5}]}, {"parts": [{"limit": 2}]}, set()),
        (OLD | {"config.parts.0.factor": 0.4}, {"parts": [{}]}, {"config.parts.0.factor"}),
        (OLD | {"config.parts.0.factor": 0.5}, {"parts": []}, {"config.parts.0.factor", "config.parts"}),
        (OLD | {"config.gone": 1}, {}, {"config.gone"}),
        (OLD | {"config.decay.gone": 1}, {}, {"config.decay.gone", "config.decay.factor"}),
    ],
    ids=lambda value: str(sorted(value) if isinstance(value, set) else value),
)
def test_a_key_that_was_not_there_is_compared_with_its_default(
    saved: Trajectory, config: dict[str, Any], different: set[str]
) -> None:
    assert compare(saved, **config) == different
