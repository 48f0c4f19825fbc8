"""Identity of a run: keys that define its trajectory; other keys may change on a resume."""

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


def test_only_keys_that_change_bits_belong_to_the_trajectory() -> None:
    def digest(*overrides: str) -> str:
        document = parse_document(SPEC, "x", overrides)
        return hash_record(compute_trajectory(validate_spec(document), validate_config(document, Config)))

    free = ("name=b", "directory=b", "project=b", "group=b", "topology.mesh.fsdp=4", "checkpoint.every_steps=5")
    for override in (*free, "logging.every_steps=1", "config.train.shape=constant", "config.train.rate=0.001"):
        assert digest(override) == digest()
    for override in ("seed=8", "job=a:B", "config.train.rate=0.002", "config.train.sizes=[1]"):
        assert digest(override) != digest()


def test_the_trajectory_is_flat_and_contains_defaults() -> None:
    document = parse_document(SPEC, "x")
    assert compute_trajectory(validate_spec(document), validate_config(document, Config)) == {
        "job": "experiments.gpt:PretrainGPT",
        "seed": 7,
        "config.train.total_steps": 500,
        "config.train.rate": 0.001,
        "config.train.sizes": [1, 2],
        "config.parts": [],
    }


# Identities saved by an older version, compared by a later version with more keys.


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


def find_differences(saved: Trajectory, **config: Any) -> set[str]:
    """Return the keys in which the saved identity differs from a job of the later version."""
    present_config = LaterConfig.model_validate({"width": 8, **config})
    present = {
        key: value
        for key, value in compute_trajectory(validate_spec(parse_document(SPEC, "x")), present_config).items()
        if key.startswith("config.")
    }
    filled = fill_in_defaults(saved, present, present_config)
    return {key for key in filled | present if filled.get(key, "nothing") != present.get(key, "nothing")}


OLD_IDENTITIES = {"config.width": 8}


@pytest.mark.parametrize(
    ("saved", "config", "different"),
    [
        (OLD_IDENTITIES, {}, set()),
        (OLD_IDENTITIES, {"free": 7}, set()),
        (OLD_IDENTITIES, {"width": 9}, {"config.width"}),
        ({}, {}, {"config.width"}),
        (OLD_IDENTITIES, {"decay": {"factor": 0.9, "every": 2}}, set()),
        (OLD_IDENTITIES, {"decay": {}}, {"config.decay.factor"}),
        (OLD_IDENTITIES, {"average": {}}, {"config.average.factor", "config.average.every"}),
        (OLD_IDENTITIES | {"config.average": None}, {}, set()),
        (OLD_IDENTITIES | {"config.average.factor": 0.5}, {"average": {}}, set()),
        (OLD_IDENTITIES | {"config.average.factor": 0.5}, {}, {"config.average.factor", "config.average"}),
        (OLD_IDENTITIES | {"config.optimizer.name": "adam"}, {}, set()),
        (OLD_IDENTITIES | {"config.optimizer.name": "sgd"}, {"optimizer": {"name": "sgd"}}, set()),
        (OLD_IDENTITIES | {"config.optimizer.name": "adam"}, {"optimizer": {"name": "sgd"}}, {"config.optimizer.name"}),
        (OLD_IDENTITIES, {"optimizer": {"name": "sgd"}}, {"config.optimizer.name", "config.optimizer.momentum"}),
        (OLD_IDENTITIES, {"parts": [{"limit": 2}]}, {"config.parts.0.factor", "config.parts.0.every"}),
        (OLD_IDENTITIES | {"config.parts.0.factor": 0.5}, {"parts": [{"limit": 2}]}, set()),
        (OLD_IDENTITIES | {"config.parts": [{"factor": 0.5}]}, {"parts": [{"limit": 2}]}, set()),
        (OLD_IDENTITIES | {"config.parts.0.factor": 0.4}, {"parts": [{}]}, {"config.parts.0.factor"}),
        (OLD_IDENTITIES | {"config.parts.0.factor": 0.5}, {"parts": []}, {"config.parts.0.factor", "config.parts"}),
        (OLD_IDENTITIES | {"config.gone": 1}, {}, {"config.gone"}),
        (OLD_IDENTITIES | {"config.decay.gone": 1}, {}, {"config.decay.gone", "config.decay.factor"}),
    ],
    ids=lambda value: str(sorted(value) if isinstance(value, set) else value),
)
def test_a_missing_key_is_compared_by_its_default(
    saved: Trajectory, config: dict[str, Any], different: set[str]
) -> None:
    assert find_differences(saved, **config) == different
