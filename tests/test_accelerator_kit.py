"""Accelerator benchmark kit on CPUs, with fake sections and fake workers."""

import dataclasses
import importlib
import json
import re
import subprocess
import sys
import time
import tomllib
import zipfile
from pathlib import Path

import pytest

import tests.benchmarks.accelerator as package
from runner import RestoreableJob
from runner.spec import load_document, load_job_class, validate_config
from tests.benchmarks.accelerator import kit, wheels
from tests.benchmarks.accelerator.config import ROOT, SIZES, SectionConfig
from tests.benchmarks.accelerator.result import Figure, Machine, Results, SectionResult, read_figures, read_results
from tests.benchmarks.accelerator.sections import SECTIONS, determinism, plan, resume, select_sections, speed
from tests.benchmarks.accelerator.table import render
from tests.benchmarks.accelerator.worker import Worker, WorkerError
from tests.support import leftover, simulated_devices

KIT = Path(package.__file__).parent
MACHINE = Machine("NVIDIA H100 80GB", 1, 80 * 10**9, 16, "3.12.3", {"jax": "0.10"})
FIRST_FIGURE, SECOND_FIGURE = Figure("first", 1.5, "seconds", "a note"), Figure("second", True)

# Possible behaviours of a section: the program that it runs with its figures file open as `file`, and the status and
# figures that the kit records.
_WRITE_FIGURES = "".join(
    f"file.write({json.dumps(dataclasses.asdict(figure)) + chr(10)!r}); " for figure in (FIRST_FIGURE, SECOND_FIGURE)
)
BEHAVIOURS = {
    "succeeds": (_WRITE_FIGURES, "done", (FIRST_FIGURE, SECOND_FIGURE)),
    "writes nothing": ("", "done", ()),
    "raises": (
        _WRITE_FIGURES + "file.flush(); raise MemoryError('on the device')",
        "failed",
        (FIRST_FIGURE, SECOND_FIGURE),
    ),
    "is killed": (_WRITE_FIGURES + "file.flush(); os.kill(os.getpid(), 9)", "failed", (FIRST_FIGURE, SECOND_FIGURE)),
    "writes half a line": (_WRITE_FIGURES + "file.write('{\"name\"')", "done", (FIRST_FIGURE, SECOND_FIGURE)),
    "writes other JSON": ("file.write('[1]')", "done", ()),
    "exits": ("sys.exit('no device')", "failed", ()),
}
_HANG = (
    _WRITE_FIGURES + "file.flush(); subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(1e6)'],"
    " start_new_session=True); open('HUNG', 'w').close(); time.sleep(1e6)"
)


@dataclasses.dataclass(frozen=True)
class FakeSection:
    """A section that runs the given program."""

    name: str
    program: str
    share: float = 1.0

    def make_command(self, config: SectionConfig, figures: Path) -> list[str]:
        program = f"import os, subprocess, sys, time; file = open({str(figures)!r}, 'w')\n{self.program}"
        return [sys.executable, "-S", "-c", program]


@pytest.fixture(autouse=True)
def _fake_machine(monkeypatch):
    monkeypatch.setattr(kit, "query_machine", lambda environment, seconds: MACHINE)


def run_kit(sections, out: Path) -> Results:
    return kit.Kit(sections, 60.0, "tiny", sys.executable, out, kit.make_environment(None)).run("c0ffee")


# Sections, as run by the kit.


def test_every_outcome_of_a_section_is_recorded_and_the_next_one_runs(tmp_path):
    results = run_kit([FakeSection(name, program) for name, (program, *_) in BEHAVIOURS.items()], tmp_path / "out.json")
    for section, (name, (_, status, figures)) in zip(results.sections, BEHAVIOURS.items(), strict=True):
        assert (section.name, section.status, section.figures) == (name, status, figures), section
    problems = {section.name: section.problem for section in results.sections}
    assert "MemoryError: on the device" in problems["raises"]
    assert "ended with -9" in problems["is killed"]
    assert "no device" in problems["exits"]
    assert read_results(tmp_path / "out.json") == results


def test_a_hanging_section_is_killed_with_its_children_and_keeps_its_figures(tmp_path, monkeypatch):
    hung, end_all_but = tmp_path / "hung", leftover.end_all_but

    def end_processes_and_reset_clock(spared):
        end_all_but(spared)
        hung.unlink(missing_ok=True)

    monkeypatch.setattr(kit, "time", FutureClock(hung))
    monkeypatch.setattr(leftover, "end_all_but", end_processes_and_reset_clock)
    before = leftover.find()
    sections = [FakeSection("hangs", _HANG.replace("HUNG", str(hung))), FakeSection("next", _WRITE_FIGURES)]
    results = run_kit(sections, tmp_path / "out.json")
    hanging, following = results.sections
    assert (hanging.status, hanging.figures) == ("cut", (FIRST_FIGURE, SECOND_FIGURE))
    assert following.status == "done"
    assert leftover.find() == before
    assert read_results(tmp_path / "out.json") == results


class FutureClock:
    """A clock that is far in the future while a file exists."""

    time, sleep = staticmethod(time.time), staticmethod(time.sleep)

    def __init__(self, file: Path):
        self._file = file

    def monotonic(self) -> float:
        return time.monotonic() + (1e6 if self._file.exists() else 0)


def test_a_section_without_time_left_stays_waiting(tmp_path):
    sections = [FakeSection("long", _WRITE_FIGURES, 1.0), FakeSection("out of time", _WRITE_FIGURES, 0.0)]
    results = kit.Kit(sections, 1e-9, "tiny", sys.executable, tmp_path / "out.json", kit.make_environment(None)).run(
        "c0ffee"
    )
    assert [section.status for section in results.sections] == ["waiting", "waiting"]


_READ_RESULTS = """
file.flush()
for _ in range(6000):
    text = open('OUT').read()
    if 'a note' in text and 'the kit ended before it' in text:
        break
    time.sleep(0.01)
else:
    sys.exit('the results do not contain the figures')
"""


def test_figures_are_written_while_their_section_runs(tmp_path):
    """The section reads the JSON output of the kit until it contains its figures, up to a time limit."""
    out = tmp_path / "out.json"
    (section,) = run_kit(
        [FakeSection("reads the results", _WRITE_FIGURES + _READ_RESULTS.replace("OUT", str(out)))], out
    ).sections
    assert section.status == "done"


def test_sections_run_without_a_device(tmp_path, monkeypatch):
    monkeypatch.setattr(kit, "query_machine", lambda environment, seconds: "jax does not start")
    results = run_kit([FakeSection("succeeds", _WRITE_FIGURES)], tmp_path / "out.json")
    assert (results.machine, results.problem, results.sections[0].status) == (None, "jax does not start", "done")
    assert "No device: jax does not start" in render(results)


@pytest.mark.parametrize(("device", "size"), [("cpu", "tiny"), ("NVIDIA H100 80GB", "full")])
def test_the_size_depends_on_the_device(device, size, tmp_path, monkeypatch):
    machine = dataclasses.replace(MACHINE, device=device)
    monkeypatch.setattr(kit, "query_machine", lambda environment, seconds: machine)
    results = kit.Kit([], 1.0, None, sys.executable, tmp_path / "out.json", kit.make_environment(None)).run("c0ffee")
    assert results.size == size


def test_the_reason_why_jax_does_not_start_is_reported(tmp_path, monkeypatch):
    monkeypatch.undo()
    (tmp_path / "jax.py").write_text("raise RuntimeError('no CUDA')")
    found = kit.query_machine(kit.make_environment(tmp_path) | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}, 60.0)
    assert isinstance(found, str)
    assert found.endswith("RuntimeError: no CUDA")


# Schedule of sections.


def test_unused_time_of_a_section_passes_to_the_next():
    assert kit.compute_deadlines([1, 2, 1], 100.0) == [25.0, 75.0, 100.0]
    assert kit.compute_deadlines([section.share for section in SECTIONS], 600.0)[-1] == pytest.approx(600.0)


def test_every_section_module_is_scheduled_with_valid_arguments():
    modules = {path.stem for path in (KIT / "sections").glob("*.py")} - {"__init__", "__main__"}
    assert {section.module for section in SECTIONS} == modules
    assert len({section.name for section in SECTIONS}) == len(SECTIONS)
    for section in SECTIONS:
        assert section.measure(SectionConfig("tiny", "", "cpu", "")) is not None  # a generator, so nothing runs yet
        assert {*section.arguments} <= {*SIZES["tiny"].models}
        assert "measure" in vars(importlib.import_module(f"{package.__name__}.sections.{section.module}"))


def test_sections_are_chosen_by_name_prefix():
    assert [section.name for section in select_sections(["speed", "save"])] == [
        "speed of gpt2_124m",
        "save",
        "speed of llama_1b",
    ]
    assert select_sections([]) == SECTIONS
    with pytest.raises(ValueError, match=r"--sections: 'mfu' matches no section; use a prefix of 'theorems', "):
        select_sections(["mfu"])


@pytest.mark.parametrize("name", SIZES["full"].models)
def test_full_size_models_match_their_specs(name, tmp_path):
    model = SIZES["full"].models[name]
    spec, *options = model.make_arguments(tmp_path, tmp_path / "tokens.bin", 10)
    found = [load_config(spec, overrides) for overrides in ([], options[1::2])]
    for key in ("model", "optimizer", "precision", "memory"):
        assert getattr(found[0], key).model_dump() == getattr(found[1], key).model_dump()
    assert found[0].data.sequence_length == model.shape.sequence_length


def load_config(spec, overrides):
    document = load_document(ROOT / spec, overrides)
    return validate_config(document, load_job_class(document, RestoreableJob).Config)


# Records, and the table generated from them.


RESULTS = Results(
    "c0ffee",
    "full",
    10.0,
    0.0,
    MACHINE,
    "",
    (
        SectionResult("speed", "done", 9.0, (FIRST_FIGURE, Figure("MFU", 0.5, "share"), Figure("ratio", 2.0, "times"))),
        SectionResult(
            "bits",
            "failed",
            1.0,
            (SECOND_FIGURE, Figure("other", False), Figure("peak", None, "bytes", "a|b")),
            "x\nlast",
        ),
        SectionResult("late", "cut", 60.0, (), "cut off after its 60 s"),
        SectionResult("never"),
    ),
)
TABLE = """\
**1 x NVIDIA H100 80GB** (74.51 GiB for jax), 16 CPUs; 1970-01-01, commit c0ffee, full sizes; Python 3.12.3, jax 0.10.

| section | figure | value | note |
|---|---|---|---|
| speed | first | 1.50 s | a note |
| speed | MFU | 50.0% |  |
| speed | ratio | 2.00 times |  |
| bits | second | yes |  |
| bits | other | **no** |  |
| bits | peak | not measured | a\\|b |
| bits | | failed | last |
| late | | cut off | cut off after its 60 s |
| never | | not run |  |
"""


def test_the_table_lists_every_figure_and_every_incomplete_section():
    assert render(RESULTS) == TABLE


def test_results_round_trip(tmp_path):
    RESULTS.write(tmp_path / "out.json")
    assert read_results(tmp_path / "out.json") == RESULTS
    assert json.loads((tmp_path / "out.json").read_text())["format"] == 1


@pytest.mark.parametrize("change", [{"format": 2}, {"format": None}, {"parts": [{}]}, {"parts": 3}, {"strange": 1}])
def test_malformed_results_are_rejected(change, tmp_path):
    RESULTS.write(tmp_path / "out.json")
    content = json.loads((tmp_path / "out.json").read_text()) | change
    (tmp_path / "out.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="not results of the accelerator kit"):
        read_results(tmp_path / "out.json")


def test_a_figures_file_is_read_up_to_its_first_incomplete_line(tmp_path):
    file = tmp_path / "figures.jsonl"
    assert read_figures(file) == ()
    file.write_text(json.dumps(dataclasses.asdict(FIRST_FIGURE)) + '\n{"name"')
    assert read_figures(file) == (FIRST_FIGURE,)


@pytest.mark.parametrize("path", sorted((KIT / "results").glob("*.json")), ids=lambda path: path.stem)
def test_committed_results_are_readable_and_match_the_readme(path, tmp_path):
    results = read_results(path)
    assert render(results) in (KIT / "README.md").read_text()
    results.write(tmp_path / "out.json")
    assert (tmp_path / "out.json").read_text() == path.read_text()


# Bundled dependencies.


def test_the_command_needs_only_the_standard_library():
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import {package.__name__}.__main__"
    subprocess.run([sys.executable, "-I", "-S", "-c", program], check=True)


def test_every_dependency_is_installed_bundled_or_omitted():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {re.split(r"[<>=~]", text)[0].strip() for text in project["dependencies"]}
    assert needed <= {*wheels.PREINSTALLED, *wheels.BUNDLED, *wheels.OMITTED}


def test_wheels_are_unpacked_for_import(tmp_path):
    make_wheel(tmp_path / "small-1.0-py3-none-any.whl")
    wheels.unpack(tmp_path, tmp_path / "site")
    assert (tmp_path / "site" / "small.py").read_text() == "VALUE = 1\n"


def make_wheel(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("small.py", "VALUE = 1\n")


def test_missing_wheels_and_wheels_of_another_python_are_rejected(tmp_path):
    with pytest.raises(ValueError, match=r"no \*\.whl"):
        wheels.unpack(tmp_path, tmp_path / "site")
    make_wheel(tmp_path / "small-1.0-cp27-cp27mu-manylinux1_x86_64.whl")
    with pytest.raises(ValueError, match="is for another Python than"):
        wheels.unpack(tmp_path, tmp_path / "site")


# Workers, and the sections that use them.

_WORKER = """
import sys
from tests.benchmarks.accelerator.worker import Finished, Ready, SliceDone, WorkerConnection
connection = WorkerConnection()
print("printed text goes to the log")
{before}
connection.send(Ready(10, 1000, 6.0))
num_slices = 0
while (steps := connection.wait_for_slice()) is not None:
    num_slices += 1
    {in_slice}
    connection.send(SliceDone(steps * {seconds}))
connection.send(Finished(2000, {fingerprint!r}))
"""


def make_worker_command(before="", in_slice="", seconds=0.5, fingerprint="f"):
    program = _WORKER.format(before=before, in_slice=in_slice, seconds=seconds, fingerprint=fingerprint)
    return [sys.executable, "-S", "-c", program]


def index_figures(measured) -> dict[str, Figure]:
    return {figure.name: figure for figure in measured}


@pytest.fixture
def config(tmp_path) -> SectionConfig:
    return SectionConfig("tiny", str(tmp_path), MACHINE.device, sys.executable)


def test_a_worker_that_exits_reports_the_reason(tmp_path):
    environment = kit.make_environment(None)
    with pytest.raises(WorkerError, match=r"ended with 1: printed text(?s:.*)RuntimeError: no memory"):
        Worker(make_worker_command("raise RuntimeError('no memory')"), environment, tmp_path / "log")
    with Worker(make_worker_command(in_slice="sys.exit(3)"), environment, tmp_path / "log") as worker:
        with pytest.raises(WorkerError, match="ended with 3"):
            worker.run_slice(5)
        with pytest.raises(WorkerError, match="ended with 3"):
            worker.run_slice(5)


@pytest.fixture
def fake_workers(monkeypatch):
    """Return a function that makes `speed` compare a fake runner with a peer of the given command."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def replace_commands(peer) -> None:
        monkeypatch.setattr(speed, "make_trainer_command", lambda model, scratch: make_worker_command(seconds=0.5))
        monkeypatch.setattr(speed, "_make_torch_command", lambda config, model: peer)

    return replace_commands


def test_speed_is_measured_in_alternating_slices(fake_workers, config):
    fake_workers(make_worker_command(seconds=0.75))
    found = index_figures(speed.measure(config, "gpt2_124m"))
    tokens = SIZES["tiny"].models["gpt2_124m"].shape.tokens_per_step
    assert found["ours alone: seconds of a step"].value == found["ours: seconds of a step"].value == 0.5
    assert found["torch: seconds of a step"].value == 0.75
    assert found["ours: MFU"].value == pytest.approx(6.0 * tokens / 0.5 / 989e12)
    assert found["speed beside the peer"].value == pytest.approx(1.5)
    assert found["ours: peak memory"].value == 2000
    assert found["ours: memory of the step by its compiler"].value == 1000


@pytest.mark.parametrize(
    "peer",
    [
        make_worker_command("raise ModuleNotFoundError('no torch')"),
        make_worker_command(in_slice="if num_slices == 2: raise ModuleNotFoundError('no torch')"),
        ["/nonexistent/python"],
    ],
    ids=["at once", "in its second slice", "no interpreter"],
)
def test_a_missing_peer_is_noted_and_only_our_speed_measured(peer, fake_workers, config):
    fake_workers(peer)
    found = index_figures(speed.measure(config, "gpt2_124m"))
    assert found["ours: seconds of a step"].value == 0.5
    assert found["torch: seconds of a step"].value is None
    assert re.search("no torch|No such file", found["torch: seconds of a step"].note)
    assert "speed beside the peer" not in found


def test_an_unknown_peak_gives_no_mfu(fake_workers, config):
    fake_workers(make_worker_command())
    found = index_figures(speed.measure(dataclasses.replace(config, device="cpu"), "gpt2_124m"))
    assert (found["ours: MFU"].value, found["ours: MFU"].note) == (None, "the peak of cpu is not known")


@pytest.mark.parametrize("is_gpu", [True, False])
def test_determinism_compares_separately_compiled_programs(is_gpu, monkeypatch, config):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    caches = []

    def make_fake_command(model, scratch, name, option):
        is_set = option == "topology.deterministic=true"
        caches.append(name)
        return make_worker_command(seconds=0.55 if is_set else 0.5, fingerprint="same" if is_set else name)

    monkeypatch.setattr(determinism, "make_trainer_command", make_fake_command)
    monkeypatch.setattr(determinism, "has_gpu", lambda environment: is_gpu)
    found = index_figures(determinism.measure(config, "gpt2_124m"))
    assert found["cost of the flags"].value == (pytest.approx(0.1) if is_gpu else None)
    assert found["two programs with the flags give the same bits"].value is True
    assert found["two programs without give the same bits"].value is False
    assert len(set(caches)) == 4


# Sections that run commands.


# Fingerprint after the kill, exit code and fingerprint of the host's check, and exit code of verify-resume.
ALL_EQUAL = ("a0", 0, "a0", 0)
OUTCOMES = {
    "all hold": (ALL_EQUAL, [True, True, True]),
    "other bits": (("b0", 0, "b0", 0), [False, True, True]),
    "damaged": (("a0", 1, "a0", 0), [True, False, True]),
    "another fingerprint": (("a0", 0, "b0", 0), [True, False, True]),
    "resume differs": (("a0", 0, "a0", 1), [True, True, False]),
}


@pytest.mark.parametrize(("outcome", "values"), OUTCOMES.values(), ids=OUTCOMES)
def test_a_violated_guarantee_is_recorded_as_a_figure(outcome, values, monkeypatch, config):
    """Commands are replaced by fakes; the uninterrupted run has fingerprint a0."""
    after_kill, deep_code, of_host, verify_code = outcome

    def run_module(*words, codes=(0,), changes=None):
        if words[1] == "checkpoints":
            assert changes == {"JAX_PLATFORMS": "cpu"}
            return deep_code, f"  50  good\n 100  good  fingerprint {of_host}"
        if words[1] == "verify-resume":
            return verify_code, "verify-resume: the last line"
        directory = Path(words[words.index("--set") + 1].removeprefix("directory="))
        directory.mkdir(exist_ok=True)
        fingerprint = after_kill if directory.name == "killed" else "a0"
        (directory / "result.json").write_text(json.dumps({"fingerprint": fingerprint}))
        return 0, ""

    monkeypatch.setattr(resume, "run_module", run_module)
    monkeypatch.setattr(resume, "_kill_once", lambda directory, scratch, options: 50)
    assert [figure.value for figure in resume.measure(config)] == values


def test_a_plan_is_compared_with_measurements(monkeypatch, config):
    content = {
        "memory of a device": {"needed": {"value": 1100}},
        "roofline of a step": {"lowest step time": {"value": 0.25}},
        "forecast of a step": {"at the rooflines of its ops": {"value": 0.4}},
        "against a run": {"step": {"value": 0.5, "unit": "seconds", "note": "of rows"}},
    }

    def run_module(*words, codes=(0,), changes=None):
        if words[1] == "plan":
            assert ("--topology" in words) == (changes is not None)
            return 0, json.dumps({"plan": content})
        row = json.dumps({"perf/step_seconds_median": 0.5, "perf/peak_bytes": 1000})
        (Path(config.scratch) / "run").mkdir()
        (Path(config.scratch) / "run" / "metrics.jsonl").write_text(f"{row}\n" * 3)
        return 0, ""

    monkeypatch.setattr(plan, "run_module", run_module)
    found = index_figures(plan.measure(config, "gpt2_124m"))
    assert found["seconds of a step, measured"].value == 0.5
    assert found["memory planned on the device"] == Figure(
        "memory planned on the device", 1100, "bytes", "+10.0% of the measured peak"
    )
    assert found["lowest step time by plan"].note == "measured is 2.00 times that"
    assert found[plan.FORECAST] == Figure(plan.FORECAST, 0.4, "seconds", "measured is 1.25 times that")
    assert found["plan --against: step"] == Figure("plan --against: step", 0.5, "seconds", "of rows")


@pytest.mark.soak
def test_every_section_completes_on_a_cpu(tmp_path):
    """Run the whole kit as on an accelerator, at tiny sizes and without torch, which is not installed for the tests."""
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", package.__name__, "--out", str(out), "--size", "tiny", "--minutes", "60"]
    result = subprocess.run(command, cwd=ROOT, env=simulated_devices.environment(1), capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    results = read_results(out)
    figures = {(section.name, figure.name): figure.value for section in results.sections for figure in section.figures}
    for name in ("killed and undisturbed end in the same bits", "fingerprints of the device are the host's"):
        assert figures["theorems", name] is True
    assert figures["theorems", "verify-resume"] is True
    assert figures["determinism", "two programs with the flags give the same bits"] is True
    assert all(section.figures for section in results.sections)
