"""The section of a plan about saves: their size, the best interval and the expected goodput."""

import jax
import numpy as np
import pytest

from runner.accelerator import parse_accelerator
from runner.plan.figures import Section
from runner.plan.program import TargetMachine
from runner.plan.report import make_checkpoint_section
from runner.spec import ExecutionSpec

STATE_405B = {"state": jax.ShapeDtypeStruct((405, 10**9, 3), np.float32)}  # parameters and two moments
TIER = {"local_directory": "/ssd", "local_every_steps": 4, "local_replicas": 1}


def make_section(accelerator: str, checkpoint: dict[str, object], step_seconds: float | None) -> Section:
    found = parse_accelerator(accelerator)
    assert found is not None
    assert found.num_devices is not None
    devices = jax.devices()[:1] * found.num_devices
    machine = TargetMachine(devices, devices, found, "none", True, 1)
    document = {"name": "x", "job": "a:B", "directory": "x", "checkpoint": checkpoint}
    section, _ = make_checkpoint_section(ExecutionSpec.model_validate(document), STATE_405B, machine, step_seconds)
    return section


def get_shares(section: Section) -> dict[str, float]:
    return {each.name: float(each.value) for each in section.figures if each.unit == "share"}


def test_the_defaults_of_a_large_job_cost_more_than_its_best_saves() -> None:
    shares = get_shares(make_section("v5p-4096", {"mean_time_between_failures_hours": 3.0}, 10.0))
    # 1,000 steps of 20 s: each failure loses 10,000 s of 10,800 on average.
    assert shares["expected goodput"] == pytest.approx(1 / (1 + (10_000 + 120 + 4860e9 / 512 / 1e9) / 10_800), abs=1e-3)
    assert shares["expected goodput"] < 0.6 < 0.96 < shares["goodput at best interval"] < 0.98
    assert shares["goodput with replicas"] > 0.979
    at_4096_hosts = get_shares(make_section("4xv5p-8192", {"mean_time_between_failures_hours": 3.0}, 10.0))
    assert at_4096_hosts["goodput with replicas"] > 0.98


def test_the_expected_goodput_is_that_of_the_saves_of_the_spec() -> None:
    given = {"mean_time_between_failures_hours": 3.0}
    with_tier = get_shares(make_section("v5p-4096", given | TIER, 10.0))
    with_auto = get_shares(make_section("v5p-4096", given | {"every": "auto"}, 10.0))
    with_minutes = get_shares(make_section("v5p-4096", given | {"every_minutes": 5.0}, 10.0))
    best = get_shares(make_section("v5p-4096", given, 10.0))["goodput at best interval"]
    assert with_tier["expected goodput"] > 0.96
    assert "goodput with replicas" not in with_tier
    assert with_auto["expected goodput"] == best
    assert "goodput at best interval" not in with_auto
    assert with_minutes["expected goodput"] > 0.95


def test_the_interval_in_steps_needs_the_time_of_a_step() -> None:
    assert set(get_shares(make_section("v5p-4", {}, None))) == {"goodput at best interval"}
    assert set(get_shares(make_section("v5p-8", {}, None))) == {"goodput at best interval", "goodput with replicas"}
    assert "expected goodput" in get_shares(make_section("v5p-4", {"every_minutes": 5.0}, None))


def test_the_time_between_failures_is_that_of_the_spec_or_assumed_for_the_devices() -> None:
    def get_note(checkpoint: dict[str, object]) -> str:
        section = make_section("v5p-4096", checkpoint, None)
        return next(each.note for each in section.figures if each.name == "best interval")

    assert "12.2 h between failures" in get_note({})
    assert "assumed for 4096 device(s)" in get_note({})
    assert "3 h between failures" in get_note({"mean_time_between_failures_hours": 3.0})
    assert "assumed" not in get_note({"mean_time_between_failures_hours": 3.0})
