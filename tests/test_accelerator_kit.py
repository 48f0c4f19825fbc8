"""Accelerator benchmark kit on CPUs: results are kept for every outcome of a section, and the next section runs."""

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
from tests.benchmarks.accelerator.agenda import SECTIONS, chosen, ends
from tests.benchmarks.accelerator.result import Figure, Machine, Part, Results, read_figures, read_results
from tests.benchmarks.accelerator.section import determinism, forecast, speed, theorem
from tests.benchmarks.accelerator.size import ROOT, SIZES, Setting
from tests.benchmarks.accelerator.table import render
from tests.benchmarks.accelerator.turn import Player, PlayerError
from tests.support import leftover, simulated_devices

KIT = Path(package.__file__).parent
MACHINE = Machine("NVIDIA H100 80GB", 1, 80 * 10**9, 16, "3.12.3", {"jax": "0.10"})
FIRST_FIGURE, SECOND_FIGURE = Figure("seen", 1.5, "seconds", "a note"), Figure("also", True)

# What a section may do, as the program that it runs after its file of figures has been opened as `file`; how the
# kit calls that, and what is kept.
_SEE = "".join(
    f"file.write({json.dumps(dataclasses.asdict(figure)) + chr(10)!r}); " for figure in (FIRST_FIGURE, SECOND_FIGURE)
)
BEHAVIOURS = {
    "sees": (_SEE, "done", (FIRST_FIGURE, SECOND_FIGURE)),
    "sees nothing": ("", "done", ()),
    "raises": (_SEE + "file.flush(); raise MemoryError('on the device')", "failed", (FIRST_FIGURE, SECOND_FIGURE)),
    "is killed": (_SEE + "file.flush(); os.kill(os.getpid(), 9)", "failed", (FIRST_FIGURE, SECOND_FIGURE)),
    "leaves half a line": (_SEE + "file.write('{\"name\"')", "done", (FIRST_FIGURE, SECOND_FIGURE)),
    "writes another thing": ("file.write('[1]')", "done", ()),
    "exits": ("sys.exit('no device')", "failed", ()),
}
_HANGS = (
    _SEE + "file.flush(); subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(1e6)'],"
    " start_new_session=True); open('HUNG', 'w').close(); time.sleep(1e6)"
)


@dataclasses.dataclass(frozen=True)
class FakeSection:
    """A section that runs the given program."""

    name: str
    program: str
    share: float = 1.0

    def command(self, setting: Setting, figures: Path) -> list[str]:
        program = f"import os, subprocess, sys, time; file = open({str(figures)!r}, 'w')\n{self.program}"
        return [sys.executable, "-S", "-c", program]


@pytest.fixture(autouse=True)
def _machine_is_known(monkeypatch):
    monkeypatch.setattr(kit, "look_at_machine", lambda variables, seconds: MACHINE)


def run_kit(sections, out: Path) -> Results:
    return kit.Kit(sections, 60.0, "tiny", sys.executable, out, kit.variables_of(None)).run("c0ffee")


# Sections, as run by the kit.


def test_every_outcome_of_a_section_is_recorded_and_the_next_one_runs(tmp_path):
    results = run_kit([FakeSection(name, program) for name, (program, *_) in BEHAVIOURS.items()], tmp_path / "out.json")
    for part, (name, (_, status, figures)) in zip(results.parts, BEHAVIOURS.items(), strict=True):
        assert (part.name, part.status, part.figures) == (name, status, figures), part
    problems = {part.name: part.problem for part in results.parts}
    assert "MemoryError: on the device" in problems["raises"]
    assert "ended with -9" in problems["is killed"]
    assert "no device" in problems["exits"]
    assert read_results(tmp_path / "out.json") == results


def test_a_hanging_section_is_killed_with_its_children_and_keeps_its_figures(tmp_path, monkeypatch):
    hung, end_all_but = tmp_path / "hung", leftover.end_all_but

    def end_and_be_in_time_again(spared):
        end_all_but(spared)
        hung.unlink(missing_ok=True)

    monkeypatch.setattr(kit, "time", FutureClock(hung))
    monkeypatch.setattr(leftover, "end_all_but", end_and_be_in_time_again)
    before = leftover.find()
    sections = [FakeSection("hangs", _HANGS.replace("HUNG", str(hung))), FakeSection("next", _SEE)]
    results = run_kit(sections, tmp_path / "out.json")
    hanging, following = results.parts
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
    sections = [FakeSection("long", _SEE, 1.0), FakeSection("none left", _SEE, 0.0)]
    done = kit.Kit(sections, 1e-9, "tiny", sys.executable, tmp_path / "out.json", kit.variables_of(None)).run("c0ffee")
    assert [part.status for part in done.parts] == ["waiting", "waiting"]


_READS_ITSELF = """
file.flush()
for _ in range(6000):
    text = open('OUT').read()
    if 'a note' in text and 'the kit ended before it' in text:
        break
    time.sleep(0.01)
else:
    sys.exit('never came')
"""


def test_figures_are_written_while_their_section_runs(tmp_path):
    """The section reads the JSON output of the kit until it contains its figures, up to a time limit."""
    out = tmp_path / "out.json"
    (part,) = run_kit([FakeSection("waits for itself", _SEE + _READS_ITSELF.replace("OUT", str(out)))], out).parts
    assert part.status == "done"


def test_sections_run_without_a_device(tmp_path, monkeypatch):
    monkeypatch.setattr(kit, "look_at_machine", lambda variables, seconds: "jax does not start")
    results = run_kit([FakeSection("sees", _SEE)], tmp_path / "out.json")
    assert (results.machine, results.problem, results.parts[0].status) == (None, "jax does not start", "done")
    assert "No device: jax does not start" in render(results)


@pytest.mark.parametrize(("device", "size"), [("cpu", "tiny"), ("NVIDIA H100 80GB", "full")])
def test_the_size_depends_on_the_device(device, size, tmp_path, monkeypatch):
    machine = dataclasses.replace(MACHINE, device=device)
    monkeypatch.setattr(kit, "look_at_machine", lambda variables, seconds: machine)
    found = kit.Kit([], 1.0, None, sys.executable, tmp_path / "out.json", kit.variables_of(None)).run("c0ffee")
    assert found.sizes == size


def test_the_reason_why_jax_does_not_start_is_reported(tmp_path, monkeypatch):
    monkeypatch.undo()
    (tmp_path / "jax.py").write_text("raise RuntimeError('no CUDA')")
    found = kit.look_at_machine(kit.variables_of(tmp_path) | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}, 60.0)
    assert isinstance(found, str)
    assert found.endswith("RuntimeError: no CUDA")


# Schedule of sections.


def test_unused_time_of_a_section_passes_to_the_next():
    assert ends([1, 2, 1], 100.0) == [25.0, 75.0, 100.0]
    assert ends([section.share for section in SECTIONS], 600.0)[-1] == pytest.approx(600.0)


def test_every_section_module_is_scheduled_with_valid_arguments():
    modules = {path.stem for path in (KIT / "section").glob("*.py")} - {"__init__", "__main__"}
    assert {section.module for section in SECTIONS} == modules
    assert len({section.name for section in SECTIONS}) == len(SECTIONS)
    for section in SECTIONS:
        assert section.measure(Setting("tiny", "", "cpu", "")) is not None  # a generator, so nothing runs yet
        assert {*section.arguments} <= {*SIZES["tiny"].models}
        assert "measure" in vars(importlib.import_module(f"{package.__name__}.section.{section.module}"))


def test_sections_are_chosen_by_name_prefix():
    assert [section.name for section in chosen(["speed", "save"])] == [
        "speed of gpt2_124m",
        "save",
        "speed of llama_1b",
    ]
    assert chosen([]) == SECTIONS
    with pytest.raises(ValueError, match=r"--sections: got 'mfu', needs the beginning of one of 'theorems', "):
        chosen(["mfu"])


@pytest.mark.parametrize("name", SIZES["full"].models)
def test_full_size_models_match_their_specs(name, tmp_path):
    model = SIZES["full"].models[name]
    spec, *options = model.arguments(tmp_path, tmp_path / "tokens.bin", 10)
    found = [load_config(spec, overrides) for overrides in ([], options[1::2])]
    for key in ("model", "optimizer", "precision", "memory"):
        assert getattr(found[0], key).model_dump() == getattr(found[1], key).model_dump()
    assert found[0].data.sequence_length == model.shape.sequence_length


def load_config(spec, overrides):
    document = load_document(ROOT / spec, overrides)
    return validate_config(document, load_job_class(document, RestoreableJob).Config)


# Records, and the table generated from them.


WHOLE = Results(
    "c0ffee",
    "full",
    10.0,
    0.0,
    MACHINE,
    "",
    (
        Part("speed", "done", 9.0, (FIRST_FIGURE, Figure("MFU", 0.5, "share"), Figure("ratio", 2.0, "times"))),
        Part(
            "bits",
            "failed",
            1.0,
            (SECOND_FIGURE, Figure("other", False), Figure("peak", None, "bytes", "a|b")),
            "x\nlast",
        ),
        Part("late", "cut", 60.0, (), "cut off"),
        Part("never"),
    ),
)
TABLE = """\
**1 x NVIDIA H100 80GB** (74.51 GiB for jax), 16 CPUs; 1970-01-01, commit c0ffee, full sizes; Python 3.12.3, jax 0.10.

| section | figure | seen | note |
|---|---|---|---|
| speed | seen | 1.50 s | a note |
| speed | MFU | 50.0% |  |
| speed | ratio | 2.00 times |  |
| bits | also | yes |  |
| bits | other | **no** |  |
| bits | peak | not seen | a\\|b |
| bits | | failed | last |
| late | | its time was over | cut off |
| never | | its turn never came |  |
"""


def test_the_table_lists_every_figure_and_every_incomplete_section():
    assert render(WHOLE) == TABLE


def test_results_round_trip(tmp_path):
    WHOLE.write(tmp_path / "out.json")
    assert read_results(tmp_path / "out.json") == WHOLE
    assert json.loads((tmp_path / "out.json").read_text())["format"] == 1


@pytest.mark.parametrize("change", [{"format": 2}, {"format": None}, {"parts": [{}]}, {"parts": 3}, {"strange": 1}])
def test_malformed_results_are_rejected(change, tmp_path):
    WHOLE.write(tmp_path / "out.json")
    content = json.loads((tmp_path / "out.json").read_text()) | change
    (tmp_path / "out.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="no results of the kit"):
        read_results(tmp_path / "out.json")


@pytest.mark.parametrize("path", sorted((KIT / "seen").glob("*.json")), ids=lambda path: path.stem)
def test_the_committed_table_matches_the_committed_results(path):
    assert render(read_results(path)) in (KIT / "README.md").read_text()


# Bundled dependencies.


def test_the_command_needs_only_the_standard_library():
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import {package.__name__}.__main__"
    subprocess.run([sys.executable, "-I", "-S", "-c", program], check=True)


def test_every_dependency_is_installed_bundled_or_omitted():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {re.split(r"[<>=~]", text)[0].strip() for text in project["dependencies"]}
    assert needed <= {*wheels.THERE, *wheels.CARRIED, *wheels.LEFT_OUT}


def test_wheels_are_unpacked_for_import(tmp_path):
    make_wheel(tmp_path / "small-1.0-py3-none-any.whl")
    wheels.unpack(tmp_path, tmp_path / "site")
    assert (tmp_path / "site" / "small.py").read_text() == "VALUE = 1\n"


def make_wheel(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("small.py", "VALUE = 1\n")


def test_missing_wheels_and_wheels_of_another_python_are_rejected(tmp_path):
    with pytest.raises(ValueError, match=r"got no \*\.whl"):
        wheels.unpack(tmp_path, tmp_path / "site")
    make_wheel(tmp_path / "small-1.0-cp27-cp27mu-manylinux1_x86_64.whl")
    with pytest.raises(ValueError, match="is for another Python than"):
        wheels.unpack(tmp_path, tmp_path / "site")


# Players, and the sections that use them.

_PLAYER = """
import sys
from tests.benchmarks.accelerator.turn import Ending, Ready, Seat, Turn
seat = Seat()
print("what is printed goes to the log")
{before}
seat.tell(Ready(10, 1000, 6.0))
turns = 0
while (steps := seat.ask()) is not None:
    turns += 1
    {turn}
    seat.tell(Turn(steps * {seconds}))
seat.tell(Ending(2000, {fingerprint!r}))
"""


def player_command(before="", turn="", seconds=0.5, fingerprint="f"):
    program = _PLAYER.format(before=before, turn=turn, seconds=seconds, fingerprint=fingerprint)
    return [sys.executable, "-S", "-c", program]


def index_figures(measured) -> dict[str, Figure]:
    return {figure.name: figure for figure in measured}


@pytest.fixture
def setting(tmp_path) -> Setting:
    return Setting("tiny", str(tmp_path), MACHINE.device, sys.executable)


def test_a_player_that_exits_reports_the_reason(tmp_path):
    variables = kit.variables_of(None)
    with pytest.raises(PlayerError, match=r"ended with 1: what is printed(?s:.*)RuntimeError: no memory"):
        Player(player_command("raise RuntimeError('no memory')"), variables, tmp_path / "log")
    with Player(player_command(turn="sys.exit(3)"), variables, tmp_path / "log") as player:
        with pytest.raises(PlayerError, match="ended with 3"):
            player.turn(5)
        with pytest.raises(PlayerError, match="ended with 3"):
            player.turn(5)


@pytest.fixture
def two_players(monkeypatch):
    """Run `speed` with a player of ours against a peer of the given command."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def play(peer) -> None:
        monkeypatch.setattr(speed, "open_trainer", lambda model, scratch: player_command(seconds=0.5))
        monkeypatch.setattr(speed, "_peer_command", lambda setting, model: peer)

    return play


def test_speed_is_measured_in_turns_on_the_same_device(two_players, setting):
    two_players(player_command(seconds=0.75))
    found = index_figures(speed.measure(setting, "gpt2_124m"))
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
        player_command("raise ModuleNotFoundError('no torch')"),
        player_command(turn="if turns == 2: raise ModuleNotFoundError('no torch')"),
        ["/nonexistent/python"],
    ],
    ids=["at once", "in its second turn", "no interpreter"],
)
def test_a_missing_peer_is_noted_and_only_our_speed_measured(peer, two_players, setting):
    two_players(peer)
    found = index_figures(speed.measure(setting, "gpt2_124m"))
    assert found["ours: seconds of a step"].value == 0.5
    assert found["torch: seconds of a step"].value is None
    assert re.search("no torch|No such file", found["torch: seconds of a step"].note)
    assert "speed beside the peer" not in found


def test_an_unknown_peak_gives_no_mfu(two_players, setting):
    two_players(player_command())
    found = index_figures(speed.measure(dataclasses.replace(setting, device="cpu"), "gpt2_124m"))
    assert (found["ours: MFU"].value, found["ours: MFU"].note) == (None, "the peak of cpu is not known")


@pytest.mark.parametrize("is_gpu", [True, False])
def test_determinism_compares_separately_compiled_programs(is_gpu, monkeypatch, setting):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    caches = []

    def opened(model, scratch, name, option):
        is_set = option == "topology.deterministic=true"
        caches.append(name)
        return player_command(seconds=0.55 if is_set else 0.5, fingerprint="same" if is_set else name)

    monkeypatch.setattr(determinism, "open_trainer", opened)
    monkeypatch.setattr(determinism, "has_gpu", lambda variables: is_gpu)
    found = index_figures(determinism.measure(setting, "gpt2_124m"))
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


@pytest.mark.parametrize(("seen", "values"), OUTCOMES.values(), ids=OUTCOMES)
def test_a_failed_theorem_is_recorded_as_a_figure(seen, values, monkeypatch, setting):
    """Commands are replaced by fakes; the uninterrupted run has fingerprint a0."""
    after_kill, deep_code, of_host, verify_code = seen

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

    monkeypatch.setattr(theorem, "run_module", run_module)
    monkeypatch.setattr(theorem, "_kill_once", lambda directory, scratch, options: 50)
    assert [figure.value for figure in theorem.measure(setting)] == values


def test_a_plan_is_compared_with_measurements(monkeypatch, setting):
    plan = {
        "memory of a device": {"needed": {"value": 1100}},
        "roofline of a step": {"lowest step time": {"value": 0.25}},
        "forecast of a step": {"at the rooflines of its ops": {"value": 0.4}},
        "against a run": {"step": {"value": 0.5, "unit": "seconds", "note": "of rows"}},
    }

    def run_module(*words, codes=(0,), changes=None):
        if words[1] == "plan":
            assert ("--topology" in words) == (changes is not None)
            return 0, json.dumps({"plan": plan})
        row = json.dumps({"perf/step_seconds_median": 0.5, "perf/peak_bytes": 1000})
        (Path(setting.scratch) / "run").mkdir()
        (Path(setting.scratch) / "run" / "metrics.jsonl").write_text(f"{row}\n" * 3)
        return 0, ""

    monkeypatch.setattr(forecast, "run_module", run_module)
    found = index_figures(forecast.measure(setting, "gpt2_124m"))
    assert found["seconds of a step, measured"].value == 0.5
    assert found["memory planned on the device"] == Figure(
        "memory planned on the device", 1100, "bytes", "+10.0% of the measured peak"
    )
    assert found["lowest step time by plan"].note == "measured is 2.00 times that"
    assert found[forecast.FORECAST] == Figure(forecast.FORECAST, 0.4, "seconds", "measured is 1.25 times that")
    assert found["plan --against: step"] == Figure("plan --against: step", 0.5, "seconds", "of rows")


@pytest.mark.soak
def test_every_section_completes_on_a_cpu(tmp_path):
    """Run the whole kit as on an accelerator, at tiny sizes and without torch, which is not installed for the tests."""
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", package.__name__, "--out", str(out), "--size", "tiny", "--minutes", "60"]
    result = subprocess.run(command, cwd=ROOT, env=simulated_devices.environment(1), capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    results = read_results(out)
    figures = {(part.name, figure.name): figure.value for part in results.parts for figure in part.figures}
    for name in ("killed and undisturbed end in the same bits", "fingerprints of the device are the host's"):
        assert figures["theorems", name] is True
    assert figures["theorems", "verify-resume"] is True
    assert figures["determinism", "two programs with the flags give the same bits"] is True
    assert all(part.figures for part in results.parts)


def test_an_unfinished_figures_file_is_read_to_its_last_complete_line(tmp_path):
    assert read_figures(tmp_path / "none") == ()
