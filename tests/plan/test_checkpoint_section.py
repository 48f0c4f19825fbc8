"""The sections of a plan about saves (their size, the best interval, the expected goodput) and about costs."""

import jax
import numpy as np
import pytest

from runner.accelerator import parse_accelerator
from runner.plan.figures import Section
from runner.plan.program import TargetMachine
from runner.plan.report import make_checkpoint_section, make_cost_section
from runner.spec import ExecutionSpec

STATE_405B = {"state": jax.ShapeDtypeStruct((405, 10**9, 3), np.float32)}  # parameters and two moments
TIER = {"local_directory": "/ssd", "local_every_steps": 4, "local_replicas": 1}


def make_machine(accelerator: str) -> TargetMachine:
    found = parse_accelerator(accelerator)
    assert found is not None
    assert found.num_devices is not None
    devices = jax.devices()[:1] * found.num_devices
    return TargetMachine(devices, devices, found, "none", True, 1)


def make_section(accelerator: str, checkpoint: dict[str, object], step_seconds: float | None) -> Section:
    machine = make_machine(accelerator)
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


def make_cost(accelerator: str, price: object, *figures: tuple[str, float]) -> Section:
    """Return the section of costs beside one section with these figures."""
    other = Section("other")
    for name, value in figures:
        other.add(name, value, "seconds", "assumed")
    document = {"name": "x", "job": "a:B", "directory": "x", "topology": {"accelerator": accelerator, "price": price}}
    return make_cost_section(ExecutionSpec.model_validate(document), make_machine(accelerator), [other])


@pytest.mark.parametrize(("accelerator", "chips"), [("v5e-16", 16), ("2xv5e-16", 32), ("tpu7x-8", 8), ("h100-16", 16)])
def test_a_cost_is_that_of_all_chips_at_typical_speed_and_goodput(accelerator: str, chips: int) -> None:
    price = {"dollars_per_chip_hour": 1.5, "as_of": "2026-11-30"}
    section = make_cost(accelerator, price, ("time to the end", 7200.0), ("expected goodput", 0.8))
    assert section["lowest cost"] == pytest.approx(2 * 1.5 * chips)
    assert section["expected cost"] == pytest.approx(2 * 1.5 * chips / 0.5 / 0.8)
    assert f"{chips} chips at $1.50 an hour, prices of 2026-11-30" in section.figures[0].note


def test_the_time_of_the_whole_run_counts_and_not_that_before_its_stages() -> None:
    figures = [("time to the end", 1.0), ("time to the end", 3600.0)]
    assert make_cost("v5e-16", {"dollars_per_chip_hour": 1.0}, *figures)["lowest cost"] == pytest.approx(16)


@pytest.mark.parametrize(
    ("price", "figures"), [(None, [("time to the end", 9.0)]), ({"dollars_per_chip_hour": 1.0}, [])]
)
def test_without_a_price_or_a_time_there_is_no_cost(price: object, figures: list[tuple[str, float]]) -> None:
    assert make_cost("v5e-16", price, *figures).figures == []
