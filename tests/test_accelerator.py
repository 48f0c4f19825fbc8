"""Catalogue of accelerators: names, devices, hosts, shapes and compiler flags."""

import itertools
import math
import os
import subprocess
import sys

import jax
import pytest

from runner import accelerator
from runner.accelerator import (
    CHIPS,
    DETERMINISTIC_FLAGS,
    Accelerator,
    add_deterministic_flags,
    is_gpu_deterministic,
    make_compiler_options,
    parse_accelerator,
    validate_matmul,
)
from runner.errors import InvalidError
from tests.support.tiny_jobs import make_gpt


@pytest.mark.parametrize(
    ("text", "name", "number"),
    [
        ("v5e-16", "v5e", 16),
        ("2xv5e-256", "v5e", 512),
        ("h200-8", "h200", 8),
        ("cpu", "cpu", None),
        ("v6e", "v6e", None),
        ("tpu7x-4", "tpu7x", 8),
    ],
)
def test_accelerators_by_name(text, name, number):
    accelerator = parse_accelerator(text)
    assert (accelerator.name, accelerator.num_devices) == (name, number)
    assert parse_accelerator("any") is None


@pytest.mark.parametrize(
    ("text", "expected"),
    {"v5litepod-16": "v5e-16", "2xtrillium-8": "2xv6e-8", "ironwood-64": "tpu7x-64", "v7x-64": "tpu7x-64"}.items(),
)
def test_other_names_of_a_chip_are_accepted(text, expected):
    assert parse_accelerator(text) == parse_accelerator(expected)


@pytest.mark.parametrize("text", ["v7e-16", "16", "", "2xv5e", "v5e-16-2", "V5E", "gpu-8", "v5e-", "0xv5e-4", "v5e-0"])
def test_an_unknown_accelerator_is_rejected_with_the_known_ones(text):
    with pytest.raises(InvalidError, match=r"needs any, or .* one of cpu, v4, v5e"):
        parse_accelerator(text)


KINDS = {
    "cpu": "cpu",
    "v4": "TPU v4",
    "v5e": "TPU v5 lite",
    "v5p": "TPU v5",
    "v6e": "TPU v6 lite",
    "h100": "NVIDIA H100 80GB HBM3",
    "h200": "NVIDIA H200",
    "tpu7x": "TPU7x",
}


@pytest.mark.parametrize(("name", "kind"), list(itertools.product(KINDS, KINDS)))
def test_an_accelerator_matches_its_own_devices_and_no_others(name, kind):
    accelerator = parse_accelerator(name)
    assert accelerator.matches(KINDS[kind], 8) == (name == kind)


def test_an_accelerator_with_a_number_matches_only_that_number():
    assert parse_accelerator("2xv5e-8").matches("TPU v5 lite", 16)
    assert not parse_accelerator("v5e-8").matches("TPU v5 lite", 16)


@pytest.mark.parametrize(
    ("text", "hosts", "num_chips_per_host", "slices"),
    [("v5e-16", 4, 4, 1), ("2xv5e-256", 64, 4, 2), ("v5p-4", 1, 4, 1), ("v5e-1", 1, 1, 1), ("h200-16", 2, 8, 1)],
)
def test_hosts_and_chips_of_a_slice(text, hosts, num_chips_per_host, slices):
    accelerator = parse_accelerator(text)
    assert accelerator.hosts_per_slice == hosts
    assert accelerator.num_chips_per_host == num_chips_per_host
    assert accelerator.num_slices == slices


def test_a_slice_has_as_many_chips_as_its_shape():
    for name, chip in CHIPS.items():
        for number in chip.shapes or {}:
            assert math.prod(map(int, Accelerator(name, number).shape.split("x"))) == number


@pytest.mark.parametrize("text", ["v5e-12", "v5p-12", "h100-8"])
def test_an_impossible_slice_is_rejected_with_the_possible_ones(text):
    with pytest.raises(InvalidError, match=r"has no slice of \d+ chips; slices: (v5e-1, |v5p-4, |none)"):
        _ = parse_accelerator(text).shape


def test_every_chip_has_peak_rates_and_every_tpu_its_names():
    for name, chip in CHIPS.items():
        assert (chip.speeds is None) == (name == "cpu")
        if chip.speeds is not None:
            assert chip.speeds.flops_per_second > chip.speeds.hbm_bytes_per_second > 0
            assert chip.speeds.interconnect_bytes_per_second > chip.speeds.network_bytes_per_second > 0
        assert chip.is_tpu == (chip.libtpu_name is not None)
        assert chip.slice_sizes == sorted(set(chip.slice_sizes))


@pytest.mark.parametrize("name", CHIPS)
def test_8bit_matmuls_are_refused_where_they_are_no_faster(name):
    chip = CHIPS[name]
    for matmul in ("compute", "int8", "float8"):
        rate = chip.speeds and chip.speeds.get_matmul_rate(matmul)
        if chip.speeds is None or rate is not None:
            validate_matmul(matmul, chip)
            assert rate is None or rate >= chip.speeds.flops_per_second
        else:
            with pytest.raises(
                InvalidError, match=f"{name} has no matmuls of {matmul}.*; use .*compute, or one of .*h100"
            ):
                validate_matmul(matmul, chip)
    validate_matmul("int8", None)


def test_a_job_for_a_chip_without_its_matmuls_is_refused(tmp_path):
    changes = {"topology.accelerator": "v5e-8", "config.precision.matmul": "float8"}
    with pytest.raises(InvalidError, match=r"config\.precision\.matmul: v5e has no .*float8.* use int8 or compute"):
        make_gpt(tmp_path / "run", **changes).setup_builder.make_mesh(jax.devices())


@pytest.mark.parametrize("text", ["v5e-16", "2xv5e-256", "h200-8", "cpu"])
def test_an_accelerator_round_trips_as_text(text):
    assert str(parse_accelerator(text)) == text


FLAG = "--xla_gpu_deterministic_ops"


@pytest.mark.parametrize(
    ("platforms", "flags", "expected"),
    [
        (None, None, f"{FLAG}=true"),
        ("cuda,cpu", "--xla_dump_to=x", f"--xla_dump_to=x {FLAG}=true"),
        ("cpu", None, None),
        ("tpu,cpu", "--xla_dump_to=x", "--xla_dump_to=x"),
        ("gpu", f"{FLAG}=false", f"{FLAG}=false"),
        ("gpu", FLAG, FLAG),
    ],
)
def test_deterministic_flags_respect_the_environment(monkeypatch, tmp_path, platforms, flags, expected):
    driver = tmp_path / "nvidiactl"
    given = {"JAX_PLATFORMS": platforms, "XLA_FLAGS": flags}
    variables = {name: value for name, value in given.items() if value is not None}
    monkeypatch.setattr(accelerator, "_GPU_FILES", (str(driver),))
    add_deterministic_flags(without := dict(variables))
    assert without == variables
    driver.touch()
    add_deterministic_flags(variables)
    assert variables.get("XLA_FLAGS") == expected
    assert is_gpu_deterministic(variables) == (expected in (FLAG, f"{FLAG}=true", f"--xla_dump_to=x {FLAG}=true"))


@pytest.mark.parametrize("flag", [flag for flags in DETERMINISTIC_FLAGS.values() for flag in flags])
def test_the_compiler_knows_each_flag(flag):
    """The compiler aborts the process on an unknown flag."""
    variables = os.environ | {"XLA_FLAGS": flag, "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", "import jax; jax.devices()"], env=variables, check=True)


FLAGGED = [name for name in KINDS if CHIPS[name].compiler_flags]


def test_some_chips_have_flags_and_a_cpu_has_none():
    assert "v5p" in FLAGGED
    assert make_compiler_options(KINDS["cpu"], {}, "") == make_compiler_options("a chip of tomorrow", {}, "") == {}


@pytest.mark.parametrize("name", FLAGGED)
def test_flags_of_the_user_replace_those_of_a_chip(name):
    options = make_compiler_options(KINDS[name], {}, "")
    assert len(options) == len(CHIPS[name].compiler_flags)
    assert not any(key.startswith("-") for key in options)
    for variable in ("LIBTPU_INIT_ARGS", "XLA_FLAGS"):
        for own in options:
            left = make_compiler_options(KINDS[name], {variable: f"--xla_another=1 --{own}=false"}, "")
            assert left == {key: value for key, value in options.items() if key != own}
