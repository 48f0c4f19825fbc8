"""`plan --profile`: its sections and its command line."""

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runner.accelerator import CHIPS, parse_accelerator
from runner.cli.app import run_command
from runner.errors import InvalidError
from runner.plan.figures import Section, format_sections, sections_to_json
from runner.plan.profile import (
    forecast_program,
    make_comparison_section,
    make_profile_sections,
    read_timed_rows,
    write_trace,
)
from runner.plan.program import TargetMachine
from runner.plan.search import CompiledCandidate
from runner.train.compile import ProgramMemory
from tests.plan.forecast.hlo_text import MESH, make_module, make_negate
from tests.support.job_process import environment, run_runner
from tests.support.libtpu import lock_libtpu

NANO = ("specs/gpt_nano.yaml", "--set", "config.model.layers=1", "--set", "config.model.width=16")
GROUPS = "channel_id=1, replica_groups=[2,2]<=[4], use_global_device_ids=true"
PLAIN = ("%y = f32[250]{0} negate(%x)",)
UNKNOWN_KERNEL = '%k = f32[250]{0} custom-call(%x), custom_call_target="tpu_custom_call"'
GATHER = f"%g = f32[500]{{0}} all-gather(%x), {GROUPS}, dimensions={{0}}"


def make_program(*lines: str) -> Any:
    """Return the parts of a compiled program that a profile reads."""
    step = SimpleNamespace(text=make_module(*lines), memory=ProgramMemory(0, 0, temporaries=3000, code=0, peak=2000))
    return SimpleNamespace(step=step, train_setup=SimpleNamespace(mesh_sizes=MESH))


def make_machine(name: str, *, is_faked: bool = False) -> TargetMachine:
    devices: Any = [None] * 4
    return TargetMachine(devices, devices, parse_accelerator(name), "libtpu 1.2", is_faked, 2**34)


@pytest.mark.parametrize(
    ("name", "is_faked", "spans"),
    [
        ("v5e-4", False, False),
        ("v5e-4", True, True),
        ("h100-4", False, True),
        ("h100-4", True, True),
        ("cpu-4", False, False),
    ],
)
def test_one_program_spans_the_domains_unless_libtpu_compiles_it(name: str, is_faked: bool, spans: bool) -> None:
    assert make_machine(name, is_faked=is_faked).spans_domains == spans


def sections(*lines: str, machine: TargetMachine, model_flops: float | None = 1e6) -> dict[str, Section]:
    found = forecast_program(make_program(*lines), machine)
    assert found is not None
    made = make_profile_sections(found, make_program(*lines), machine, model_flops)
    return {section.title: section for section in made}


def test_the_clock_of_a_chip_is_derived_from_its_peak() -> None:
    clocks = {name: chip.clock_hertz and round(chip.clock_hertz / 1e9, 2) for name, chip in CHIPS.items()}
    assert {name: clock for name, clock in clocks.items() if clock} == {
        "v4": 1.05,
        "v5e": 1.5,
        "v5p": 1.75,
        "v6e": 1.75,
        "tpu7x": 2.2,
    }


def test_a_range_has_two_ends_with_their_utilisation() -> None:
    found = sections(make_negate(estimated=1503), machine=make_machine("v5e-4"))["forecast of a step"]
    low, high = 2000 / 819e9, 1503 * 2 * 4 * 128**2 / 197e12
    assert found["at the rooflines of its ops"] == pytest.approx(low)
    assert found["by the compiler's estimates"] == pytest.approx(high)
    assert found["MFU at most"] == pytest.approx(1e6 / (4 * 197e12 * low))
    assert found["MFU by the estimates"] == pytest.approx(1e6 / (4 * 197e12 * high))


@pytest.mark.parametrize(
    ("lines", "machine", "said"),
    [
        (PLAIN, make_machine("v5e-4"), "none in the program of libtpu 1.2"),
        ((make_negate(),), make_machine("v5e-4", is_faked=True), "stands in"),
        (PLAIN, make_machine("h100-4", is_faked=True), "stands in"),
    ],
)
def test_a_program_without_estimates_is_forecast_by_its_bound(
    lines: tuple[str, ...], machine: TargetMachine, said: str
) -> None:
    found = sections(*lines, machine=machine)
    assert said in found["forecast of a step"]["estimates"]
    assert found["where the time goes"].figures[0].basis == "assumed"


def test_a_program_for_gpus_is_forecast_at_typical_shares_of_the_peaks() -> None:
    found = sections(*PLAIN, machine=make_machine("h100-4"))["forecast of a step"]
    low, high = found["at the rooflines of its ops"], found["at typical shares of the peaks"]
    assert 1 / 0.75 * low <= high
    assert found["MFU at typical shares"] == pytest.approx(found["MFU at most"] * low / high)


def test_a_program_with_estimates_is_forecast_by_them() -> None:
    forecast = forecast_program(make_program(make_negate()), make_machine("v5e-4"))
    assert forecast is not None
    assert forecast.has_estimates
    assert forecast.high == pytest.approx(5000 * 2 * 4 * 128**2 / 197e12)


def test_a_kernel_without_a_cost_is_reported() -> None:
    assert (
        sections(UNKNOWN_KERNEL, make_negate(), machine=make_machine("v5e-4"))["forecast of a step"][
            "kernels without a cost"
        ]
        == 1
    )
    names = [
        figure.name for figure in sections(make_negate(), machine=make_machine("v5e-4"))["forecast of a step"].figures
    ]
    assert "kernels without a cost" not in names


def test_collectives_use_the_bandwidth_of_chip_links_or_the_network() -> None:
    found = sections(GATHER, machine=make_machine("v5e-4"))["collectives in time"]
    assert found["all-gather over fsdp"] == pytest.approx(1000 / 200e9)
    alone = sections(GATHER, machine=make_machine("h100-4", is_faked=True))["collectives in time"]
    assert alone["all-gather over fsdp"] == pytest.approx(1000 / 450e9)
    halves = make_machine("tpu7x-4")
    assert sections(GATHER, machine=halves)["collectives in time"]["all-gather over fsdp"] == pytest.approx(
        2000 / 600e9
    )


def test_memory_is_listed_beside_the_figure_of_the_compiler() -> None:
    found = sections("%a = f32[250]{0} reverse(%x)", "ROOT " + make_negate(), machine=make_machine("v5e-4"))
    memory = found["memory over the step"]
    names = "temporaries at the peak", "the same by the compiler", "temporaries as planned"
    assert [memory[name] for name in names] == [1000, 2000, 3000]
    assert "-50.0% off" in memory.figures[1].note
    faked = sections(make_negate(estimated=1503), machine=make_machine("v5e-4", is_faked=True))["memory over the step"]
    assert not any("% off" in figure.note for figure in faked.figures)


def test_every_section_is_a_table_and_json() -> None:
    made = sections(GATHER, UNKNOWN_KERNEL, make_negate(), machine=make_machine("v5e-4"), model_flops=None)
    lines = format_sections(made.values())
    assert any(line.startswith("  1. y ") for line in lines)
    assert (
        json.loads(json.dumps(sections_to_json(made.values())))["where the time goes"]["all-gather over fsdp"]["unit"]
        == "seconds"
    )


def test_an_unwritable_trace_is_reported_in_one_line(tmp_path: Path) -> None:
    found = forecast_program(make_program(make_negate()), make_machine("v5e-4"))
    assert found is not None
    with pytest.raises(InvalidError, match=r"--trace .*no/file\.json: No such file"):
        write_trace(tmp_path / "no" / "file.json", found, "name")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--trace", "f.json"], "--trace FILE and --against RUN need --profile"),
        (["--against", "runs/a"], "--trace FILE and --against RUN need --profile"),
        (["--profile", "--trace", "/no/such/f.json"], "--trace /no/such/f.json: /no/such is not a directory"),
        (["--profile", "--against", "/no/such"], "--against /no/such: .*perf/step_seconds_median"),
        (["--profile", "--search"], "--profile describes one plan"),
        (["--profile", "--chips", "auto", "--hours", "1"], "--profile describes one plan"),
    ],
)
def test_incompatible_options_are_rejected(options: list[str], message: str) -> None:
    with pytest.raises(InvalidError, match=message):
        run_command(["plan", NANO[0], *options])


@pytest.mark.soak
@pytest.mark.parametrize("topology", ["h100-2", "v5e-4"])
def test_the_command_prints_the_profile_of_a_spec_and_writes_its_trace(topology: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    words = (*NANO, "--topology", topology, "--set", f"directory={tmp_path}", "--profile", "--trace", str(trace))
    with lock_libtpu() if topology == "v5e-4" else nullcontext():
        code, output = run_runner(environment(1), "plan", *words, "--json", has_progress=True)
    assert code == 0, output
    found = json.loads(output)["plan"]
    first = found["forecast of a step"]
    assert ("by the compiler's estimates" in first) == (topology == "v5e-4")
    assert 0 < first["at the rooflines of its ops"]["value"] < 1e-3
    assert {"matmuls", "attention", "loss", "optimizer", "all-reduce over data"} <= found["where the time goes"].keys()
    assert any(line.startswith("experiments/gpt.py:") for line in found["by line of source"])
    assert len(found["the most expensive ops"]) == 20
    memory = found["memory over the step"]
    if topology != "v5e-4":  # such a small model is placed in fast memory
        planned = memory["temporaries as planned"]["value"]
        assert memory["temporaries at the peak"]["value"] == pytest.approx(planned, rel=0.25)
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"process_name", "thread_name"} <= names


def test_a_device_without_peak_figures_has_no_forecast() -> None:
    assert forecast_program(make_program(make_negate()), make_machine("cpu-4")) is None


def test_compiled_candidates_are_ranked_by_forecast_then_by_their_ops_then_by_the_bound() -> None:
    bound: Any = SimpleNamespace(step_seconds=1.0)
    nothing: Any = None
    bounded = CompiledCandidate(nothing, bound, 0)
    scheduled = CompiledCandidate(nothing, bound, 0, op_by_op_seconds=2.0)
    first, second = (CompiledCandidate(nothing, bound, 0, op_by_op_seconds=5.0, forecast_seconds=s) for s in (6.0, 8.0))
    assert (bounded.least_seconds, scheduled.least_seconds) == (1.0, 2.0)
    assert sorted([second, scheduled, first, bounded], key=lambda each: each.rank) == [
        first,
        second,
        bounded,
        scheduled,
    ]
    assert first.get_share_saved(second) == pytest.approx(0.25)
    assert scheduled.get_share_saved(second) == pytest.approx(0.6)
    assert bounded.get_share_saved(scheduled) == pytest.approx(0.5)


def test_the_measured_time_of_a_run_is_listed_beside_the_range(tmp_path: Path) -> None:
    rows: list[dict[str, float]] = [
        {"step": step, "train/loss": 2.0, "perf/step_seconds_median": 1e-8 * step, "perf/peak_bytes": 1000}
        for step in (1, 2, 3)
    ]
    rows.append({"step": 4, "train/loss": 2.0})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = forecast_program(make_program(make_negate()), make_machine("v5e-4"))
    assert found is not None
    section = make_comparison_section(found, 1500, read_timed_rows(str(tmp_path)))
    assert section["step"] == 2e-8
    assert section["over the rooflines of its ops"] == pytest.approx(2e-8 / found.low)
    assert section["over the compiler's estimates"] == pytest.approx(2e-8 / found.high)
    assert section["peak memory of a device"] == 1000
    assert "+50.0%" in section.figures[-1].note


def test_a_directory_without_speed_rows_is_reported_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(InvalidError, match=r"--against .*perf/step_seconds_median"):
        read_timed_rows(str(tmp_path))
