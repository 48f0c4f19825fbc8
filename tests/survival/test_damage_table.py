"""Every file and directory of a run x every damage: the next start ends in the same bits, with 2, or with 76.

Never with 1, never with a traceback, never not at all, and nothing that was committed is lost. What stands in a
directory is listed from real ones, so the next file is covered when it is born.
"""

import functools
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from experiments.counter import Counter
from runner.attempts.attempt import IncidentRecorder
from runner.attempts.layout import LAYOUT, OPTIONAL_ENTRIES
from runner.checkpoint.inspect import VerifyDepth, format_report
from runner.checkpoint.manifest import read_committed
from runner.distributed.watchdog import Diagnosis
from runner.errors import EXIT_DONE, EXIT_FAILED, EXIT_INVALID, EXIT_RETRYABLE, RunnerError
from runner.storage import LocalStore, read_json, read_log
from tests.support.attempt import start
from tests.support.damage import ERRORS, inject_errors, list_damages
from tests.support.job_process import environment, make_killed_run, make_uninterrupted_counter_run, run_runner
from tests.support.tiny_jobs import make_counter, stop_after

STEPS, NEWEST = 8, 6
HANG_SECONDS = 120  # no start takes so long, on any machine
OPTIONS = {"config.total_steps": STEPS, "config.width": 8, "checkpoint.every_steps": 3, "checkpoint.keep_last": 99}
BESIDE = "elsewhere"  # another disk
READ_FIRST = {"job.json", "result.json", "manifest.json", "part.json"}

Act = Callable[[Path], None]


# Directories of real runs.


def make(base: Path, **more: object) -> Counter:
    return make_counter(base / "run", **OPTIONS, **more)


def with_fast_tier(base: Path) -> Counter:
    return make(base, **{"checkpoint.local_directory": str(base / "fast"), "checkpoint.local_every_steps": 1})


def events(base: Path, kind: str) -> list[dict[str, object]]:
    return [event for event in read_log(LocalStore(base / "run"), "events") if event["event"] == kind]


def stop_at(job: Counter, step: int) -> None:
    stop_after(job, step)


def finish(base: Path) -> Counter:
    make(base)()
    return make(base)


def stop_twice(base: Path) -> Counter:
    """With something in quarantine, and the stacks of an attempt that was stuck."""
    stop_at(make(base), 5)
    manifest = base / "run/checkpoints/5/manifest.json"
    manifest.write_text(manifest.read_text().replace('"attempt": 1', '"attempt": 9'))
    stop_at(make(base), NEWEST)
    incidents = IncidentRecorder()
    incidents.attempt = start(make(base)).attempt
    incidents.on_diagnosis(Diagnosis("stuck", 76), is_recorder=True)
    return make(base)


def stop_with_fast_tier(base: Path) -> Counter:
    """The fast tier alone has the newest two steps."""
    stop_at(with_fast_tier(base), 5)
    shutil.rmtree(base / "run/checkpoints/5")
    return with_fast_tier(base)


RUNS: dict[str, Callable[[Path], Counter]] = {
    "finished": finish,
    "unfinished": stop_twice,
    "fast tier": stop_with_fast_tier,
}


@functools.cache
def template(kind: str) -> Path:
    base = Path(os.environ["RUNNER_TESTS_SESSION"]) / "damage" / f"{kind}.{os.getpid()}"
    (base / BESIDE).mkdir(parents=True)
    RUNS[kind](base)
    for name in (*LAYOUT, *OPTIONAL_ENTRIES):  # what only other jobs have
        path = base / "run" / name
        if not path.exists() and name != "result.json":
            path.touch() if LAYOUT.get(name) == "a file" else path.mkdir()
    return base


@functools.cache
def result() -> dict[str, object]:
    return read_json(LocalStore(template("finished") / "run"), "result.json")


@functools.cache
def places(kind: str) -> list[Path]:
    """All that stands in a template, below its base; of names that the writer of arrays draws, one."""
    base = template(kind)
    found = {}
    for path in sorted(base.rglob("*")):
        relative = path.relative_to(base)
        is_of_the_tier = relative.parts[0] == ("fast" if kind == "fast tier" else "run") and len(relative.parts) > 1
        is_older = re.search(r"checkpoints/[35]/|/0/4|quarantine/.*/.*/", str(relative))
        is_read = kind != "finished" or len(relative.parts) == 2
        if is_of_the_tier and is_read and not is_older:
            found[re.sub(r"[0-9a-f]{12,}", "<drawn>", str(relative))] = relative
    return [found[name] for name in sorted(found)]


# What a start makes of a damage.


@contextmanager
def ends() -> Iterator[None]:
    def fail(*_: object) -> None:
        raise AssertionError(f"not within {HANG_SECONDS} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(HANG_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def files_of(directory: Path) -> dict[str, bytes]:
    """Content of every regular file, links to files followed."""
    found = {}
    for top, _, names in os.walk(directory, followlinks=True):
        for path in (Path(top) / name for name in names):
            if path.is_file():
                found[path.relative_to(directory).as_posix()] = path.read_bytes()
    return found


def start_again(kind: str, base: Path) -> RunnerError | None:
    """The next start, in this process; what it ends with if not with the end of the job."""
    try:
        with ends():
            (with_fast_tier if kind == "fast tier" else make)(base)()
    except RunnerError as error:
        return error
    return None


def check(error: RunnerError | None, before: dict[str, bytes], base: Path) -> str:
    """The outcome of a start: `same bits`, or the exit code. Fails if it is another, or something is lost."""
    after = files_of(base)
    if error is None:
        assert read_json(LocalStore(base / "run"), "result.json") == result(), "other bits"
        was_committed = {name.rpartition("/")[0] for name in before if name.endswith("/manifest.json")}
        kept = [name for name in before if any(name.startswith(f"{directory}/") for directory in was_committed)]
        lost = [name for name in kept if before[name] not in after.values()]
        assert not lost, f"lost {lost}"
        return "same bits"
    assert error.exit_code in (EXIT_INVALID, EXIT_RETRYABLE), f"ends with {error.exit_code}: {error}"
    assert str(error).strip(), "says nothing"
    assert not re.search(r"\(\d+, '", str(error)), f"says a tuple: {error}"
    changed = [name for name, content in before.items() if after.get(name) != content]
    assert set(changed) <= {"run/events.jsonl"}, f"refused, and changed {changed}"
    return str(error.exit_code)


def strike(kind: str, place: Path, damage: str, base: Path) -> str:
    """The outcome in a copy of a template where one thing is damaged."""
    shutil.copytree(template(kind), base, symlinks=True)
    path = base / place
    if damage not in ERRORS:
        list_damages(path)[damage](path)
    before = files_of(base)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("runner.storage.local._REMOVE_TRIES", 1)
        if damage in ERRORS:
            inject_errors(patch, path, ERRORS[damage])
        error = start_again(kind, base)
    return check(error, before, base)


def cases(kind: str) -> list[tuple[Path, str]]:
    return [(place, damage) for place in places(kind) for damage in (*list_damages(template(kind) / place), *ERRORS)]


def daily(kind: str) -> list[tuple[Path, str]]:
    """Every place in some ways, and every damage in some places: more of the files that are read first."""
    order = {damage: number for number, damage in enumerate(dict.fromkeys(damage for _, damage in cases(kind)))}
    return [
        (place, damage)
        for number, place in enumerate(places(kind))
        for other, damage in cases(kind)
        if place == other and (number + order[damage]) % (6 if place.name in READ_FIRST else 23) == 0
    ]


@pytest.mark.parametrize("choose", [daily, pytest.param(cases, marks=pytest.mark.soak)])
@pytest.mark.parametrize("kind", RUNS)
def test_every_damage_gives_equal_bits_or_a_refusal(
    kind: str, choose: Callable[[str], list[tuple[Path, str]]], tmp_path: Path
) -> None:
    problems, outcomes = {}, {}
    for number, (place, damage) in enumerate(choose(kind)):
        base = tmp_path / str(number)
        try:
            outcomes[place, damage] = strike(kind, place, damage, base)
        except Exception as error:  # noqa: BLE001 - whatever a start lets out is what this test looks for
            problems[f"{place}: {damage}"] = f"{type(error).__name__}: {error}"[:300]
        shutil.rmtree(base)
    assert not problems, "\n".join(f"{case}: {problem}" for case, problem in problems.items())
    # A table of arrays that does not have the checksum in the manifest is damaged, whatever it says.
    read = {
        (place, damage): end
        for (place, damage), end in outcomes.items()
        if place.parts[:2] != ("run", "quarantine") and not place.parent.name.startswith("arrays")
    }
    assert {end for (_, damage), end in outcomes.items() if damage == "move behind link"} <= {"same bits"}
    newer = {
        end
        for (place, damage), end in read.items()
        # Each start writes progress.json again, which only supervisors read.
        if damage == "newer format" and place.parts[0] == "run" and place.name != "progress.json"
    }
    assert newer <= {"2"}


def test_every_file_of_a_run_has_a_known_kind() -> None:
    names = {path.name for kind in RUNS for path in (template(kind) / "run").iterdir()}
    assert names == {*LAYOUT, *OPTIONAL_ENTRIES}


# Names that no run gives.


def copy(source: str, target: str) -> Act:
    return lambda run: shutil.copytree(run / source, run / target) and None


def rename(source: str, target: str) -> Act:
    return lambda run: (run / source).rename(run / target) and None


def leave_half_deleted_step(run: Path) -> None:
    """A killed attempt has renamed a step; it had been committed, and one that writes on has made it anew."""
    rename("checkpoints/6", "checkpoints/6.retired")(run)
    (run / "checkpoints/6/arrays.2").mkdir(parents=True)


def lose_attempt_count(run: Path) -> None:
    """Attempts count from 1 again, and meet what they have put into quarantine before."""
    shutil.rmtree(run / "attempts")
    copy("quarantine/5.2", "quarantine/6.1")(run)
    (run / "checkpoints/6/manifest.json").write_bytes(b"")


LEFT_ALONE: dict[str, Act] = {
    "checkpoints/007": copy("checkpoints/6", "checkpoints/007"),
    "checkpoints/\u0663": copy("checkpoints/3", "checkpoints/\u0663"),
    "checkpoints/best.retired": copy("checkpoints/3", "checkpoints/best.retired"),
    "checkpoints/6.retired": copy("checkpoints/6", "checkpoints/6.retired"),
    "checkpoints/9.retired": lambda run: (run / "checkpoints/9.retired").write_bytes(b"") and None,
    "checkpoints/2": lambda run: (run / "checkpoints/2").symlink_to(run / "nowhere"),
    "attempts/007": copy("attempts", "attempts/007"),
    "attempts/\u0663": lambda run: (run / "attempts/\u0663").mkdir(),
}
SET_ASIDE: dict[str, Act] = {
    "50": copy("checkpoints/3", "checkpoints/50"),
    "7": lambda run: (run / "checkpoints/7").symlink_to(run / "nowhere"),
    "8": lambda run: os.mkfifo(run / "checkpoints/8"),
    "60": lambda run: (run / "checkpoints/60").write_bytes(b"no directory") and None,
}


def act_and_start(base: Path, act: Act) -> None:
    shutil.copytree(template("unfinished"), base, symlinks=True)
    act(base / "run")
    before = files_of(base)
    assert check(start_again("unfinished", base), before, base) == "same bits"


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_unknown_files_are_left_alone(name: str, tmp_path: Path) -> None:
    base = tmp_path / "base"
    act_and_start(base, LEFT_ALONE[name])
    assert os.path.lexists(base / "run" / name)
    assert (base / "run/attempts/4").is_file()
    assert {path.name for path in (base / "run/quarantine").iterdir()} == {"5.2"}


@pytest.mark.parametrize("name", SET_ASIDE)
def test_a_checkpoint_with_a_wrong_step_number_is_quarantined(name: str, tmp_path: Path) -> None:
    base = tmp_path / "base"
    act_and_start(base, SET_ASIDE[name])
    assert os.path.lexists(base / f"run/quarantine/{name}.4")
    manifests = read_committed(LocalStore(base / "run"))
    assert list(manifests) == [3, 6, 8]
    assert all(manifest.attempt == 4 for step, manifest in manifests.items() if step > NEWEST)


def test_the_error_names_a_copied_checkpoint(tmp_path: Path) -> None:
    shutil.copytree(template("unfinished") / "run", tmp_path / "run")
    copy("checkpoints/3", "checkpoints/50")(tmp_path / "run")
    lines, code = format_report(LocalStore(tmp_path / "run"), VerifyDepth.MANIFEST)
    assert code == EXIT_FAILED
    assert "50  DAMAGED" in lines[2]
    assert "it is of checkpoint 3, step 3, but lies in the directory 50" in lines[3]


def test_a_renamed_checkpoint_gets_its_name_back(tmp_path: Path) -> None:
    for number, act in enumerate((rename("checkpoints/6", "checkpoints/6.retired"), leave_half_deleted_step)):
        base = tmp_path / str(number)
        act_and_start(base, act)
        assert [event["step"] for event in events(base, "restore")][-1] == NEWEST
        assert read_committed(LocalStore(base / "run"))[6].attempt == 2


def test_quarantine_is_never_overwritten(tmp_path: Path) -> None:
    base = tmp_path / "base"
    act_and_start(base, lose_attempt_count)
    assert {path.name for path in (base / "run/quarantine").iterdir()} == {"5.2", "6.1", "6.1.1"}


# The same with whole processes.

SPEC = "specs/counter.yaml"
PROCESS = ("config.total_steps=8", "config.width=8", "checkpoint.every_steps=2", "config.step_seconds=0")
STRUCK = ("checkpoints/4/manifest.json", "checkpoints/4", "job.json", "attempts", "events.jsonl", "spec.yaml")


@pytest.mark.soak
@pytest.mark.parametrize("place", STRUCK)
def test_processes_survive_or_report_every_damage(place: str, tmp_path: Path) -> None:
    begun = make_killed_run(4, SPEC, PROCESS)
    for number, name in enumerate(list_damages(begun.directory / place)):
        (tmp_path / str(number) / BESIDE).mkdir(parents=True)
        job = begun.copy_to(tmp_path / str(number) / "run")
        list_damages(job.directory / place)[name](job.directory / place)
        code, output = run_runner(environment(1), *job.arguments)
        assert "Traceback" not in output, f"{name}: {output}"
        assert code in (EXIT_DONE, EXIT_INVALID, EXIT_RETRYABLE), f"{name}: ended with {code}: {output}"
        assert output.strip(), f"{name}: says nothing"
        assert code != EXIT_DONE or job.result() == make_uninterrupted_counter_run(PROCESS).result(), name
