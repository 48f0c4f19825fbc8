"""A valid spec, the config class of its job, and the problems that changes to it raise."""

from typing import ClassVar, Literal

import pytest
from pydantic import Field

from runner.errors import SpecError
from runner.spec import JobConfig, parse_document, validate_config, validate_spec

SPEC = """\
name: tiny
job: experiments.gpt:PretrainGPT
directory: runs/tiny
seed: 7
topology:
  mesh: {data: auto, fsdp: 1}
checkpoint:
  every_steps: 50
config:
  train:
    total_steps: 500
    rate: 1e-3
"""


class Train(JobConfig):
    total_steps: int
    rate: float = 0.1
    shape: Literal["constant", "cosine"] = "cosine"
    sizes: tuple[int, ...] = (1, 2)


class Config(JobConfig):
    free_keys: ClassVar[frozenset[str]] = frozenset({"train.shape"})
    train: Train
    parts: list[Train] = Field(default=[])


def find_problems(text: str, *overrides: str, config: type[JobConfig] | None = None) -> list[str]:
    def read() -> None:
        document = parse_document(text, "specs/x.yaml", overrides)
        validate_spec(document)
        validate_config(document, config or JobConfig)

    with pytest.raises(SpecError) as caught:
        read()
    return str(caught.value).split("\n")


def edit_spec(old: str, new: str) -> str:
    assert old in SPEC
    return SPEC.replace(old, new)
