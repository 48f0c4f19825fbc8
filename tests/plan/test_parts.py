"""Arithmetic and formatting of plans."""

import math

import pytest

from runner.accelerator import CHIPS, parse_accelerator
from runner.plan.figures import Figure, Section, format_sections, sections_to_json
from runner.plan.program import Roofline, StepWork, compute_hbm_traffic, compute_roofline, split_over_domains


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0, "bytes", "0 B"),
        (1536, "bytes", "1.50 KiB"),
        (16 * 2**30, "bytes", "16.00 GiB"),
        (2.5e15, "FLOP", "2.50 PFLOP"),
        (0.125, "seconds", "125.00 ms"),
        (90.0, "seconds", "1.50 min"),
        (0.0, "seconds", "0 ns"),
        (3e-8, "seconds", "30.00 ns"),
        (0.456, "share", "45.6%"),
        (1234567, "", "1,234,567"),
        ("v5e-16", "text", "v5e-16"),
    ],
)
def test_values_are_formatted_in_a_suitable_unit(value, unit, text):
    assert Figure("name", value, unit, "counted").text == text


def test_the_table_and_the_json_have_every_figure_with_its_basis():
    section = Section("memory")
    section.add("needed", 2**30, "bytes", "compiled", "arguments + temporaries")
    section.add("mesh", "data 2", "text", "counted")
    assert format_sections([section, Section("empty")]) == [
        "memory",
        "  needed  1.00 GiB  compiled: arguments + temporaries",
        "  mesh    data 2",
    ]
    needed = {"value": 2**30, "unit": "bytes", "basis": "compiled", "note": "arguments + temporaries"}
    assert sections_to_json([section])["memory"]["needed"] == needed


def test_a_roofline_is_bound_by_its_slowest_resource():
    speeds = CHIPS["v5e"].speeds
    work = StepWork(flops=197e12, hbm_bytes=819e9 * 2, interconnect_bytes=200e9 / 2, network_bytes=0)
    times = compute_roofline(work, speeds, 1)
    assert times == Roofline(pytest.approx(1.0), pytest.approx(2.0), pytest.approx(0.5), 0.0)
    assert (times.step_seconds, times.bound) == (pytest.approx(2.0), "memory")
    assert compute_roofline(work, speeds, 2).compute == pytest.approx(2.0)  # a device is half a chip


def test_traffic_is_twice_the_state_plus_the_parameters_per_pass():
    assert compute_hbm_traffic(state_bytes=12, parameter_bytes=2, passes=3, accumulate_steps=4) == 2 * 12 + 4 * 3 * 2


@pytest.mark.parametrize(
    ("sizes", "domains", "inside", "across"),
    [
        ((8, 1), (1, 1), 7 / 8, 0),  # one slice: one ring over all devices
        ((8, 1), (8, 1), 0, 7 / 8),  # one device in each
        ((8, 1), (2, 1), 3 / 4, 1 / 4 * 1 / 2),  # 2 domains of 4 devices: a quarter is sent across
        ((2, 4), (2, 1), 3 / 4, 1 / 4 * 1 / 2),
        ((1, 1), (1, 1), 0, 0),
    ],
)
def test_a_collective_runs_inside_its_domains_first(sizes, domains, inside, across):
    axes = ("data", "fsdp")
    found = split_over_domains(dict(zip(axes, sizes, strict=True)), dict(zip(axes, domains, strict=True)), axes, 1, 1.0)
    assert found == (pytest.approx(inside), pytest.approx(across))
    twice = split_over_domains(dict(zip(axes, sizes, strict=True)), dict(zip(axes, domains, strict=True)), axes, 2, 1.0)
    assert twice == (pytest.approx(2 * inside), pytest.approx(2 * across))


@pytest.mark.parametrize("text", ["v5e-16", "2xv5e-256", "v5p-256", "v5p-512", "v5p-2048", "h200-16", "h100-512"])
def test_every_accelerator_has_a_device_count_and_memory(text):
    accelerator = parse_accelerator(text)
    assert accelerator.num_devices == math.prod((accelerator.num_slices, accelerator.num_chips))
    assert accelerator.chip.speeds.hbm_bytes > 10 * 2**30
