"""A fork begins with its parent's whole state, differs only in the keys that it lists, and then needs no parent."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

from experiments.gpt import PretrainGPT
from runner import BaseTrainer, RestoreableJob
from runner.checkpoint.fork import shorten_keys
from runner.checkpoint.manifest import MANIFEST, parse_manifest, read_committed, seal
from runner.cli.app import run_command
from runner.errors import EXIT_DONE, InvalidError, StorageError
from runner.history.reader import read_history
from runner.spec import read_spec
from runner.storage import LocalStore, Store, parse_lines, url
from tests.support.bigram import BIGRAM_OPTIONS, BigramTrainer
from tests.support.job_process import Job, just_committed
from tests.support.memory_bucket import MemoryDriver
from tests.support.tiny_jobs import get_job_name, make_counter, make_gpt, read_outcome, read_trajectory, stop_after

STEPS = 42
# Everything that a state may hold: dropout, averages, counters of hooks, sums of a window that is not closed yet.
WHOLE = {
    "checkpoint": {"every_steps": 2, "keep_last": 50},
    "logging.every_steps": 5,
    "config.train.total_steps": STEPS,
    "config.model.dropout": 0.1,
    "config.ema": {"decays": [0.9]},
    "config.eval.every_steps": 10,
    "hooks": [{"hook": "runner.hook:EarlyStopping", "config": {"metric": "val/loss", "patience": 100}}],
}


def fork_of(parent: Path | str, step: int | str, *changes: str) -> dict[str, Any]:
    return {"checkpoint.fork_from": {"run": str(parent), "step": step, "changes": list(changes)}}


def read_events(directory: Path, *names: str) -> list[dict[str, Any]]:
    return [row for row in parse_lines((directory / "events.jsonl").read_bytes()) if row["event"] in names]


def read_lineage(directory: Path) -> Any:
    lineages = [manifest.lineage for manifest in read_committed(LocalStore(directory)).values()]
    assert all(lineage == lineages[0] for lineage in lineages)
    return lineages[0]


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The parent of the soak."""
    directory = tmp_path_factory.mktemp("fork") / "parent"
    make_gpt(directory, **WHOLE)()
    return directory


@pytest.fixture(scope="module")
def counter_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("fork") / "counted"
    make_counter(directory, **{"checkpoint.keep_last": 3})()
    return directory


@pytest.fixture
def counted(counter_run: Path, tmp_path: Path) -> Path:
    """A copy, which a test may spoil."""
    return Path(shutil.copytree(counter_run, tmp_path / "counted"))


def check_fork_without_changes(
    parent: Path, step: int, whole: dict[str, Any], job_class: type[BaseTrainer] = PretrainGPT
) -> None:
    directory = parent.parent / f"same-{step}"
    make_gpt(directory, job_class, **whole, **fork_of(parent, step))()
    rows, result = read_outcome(parent)
    assert read_outcome(directory) == ([row for row in rows if row["step"] > step], result)
    digests = {number: manifest.fingerprint for number, manifest in read_committed(LocalStore(parent)).items()}
    own = {number: manifest.fingerprint for number, manifest in read_committed(LocalStore(directory)).items()}
    assert own == {number: digest for number, digest in digests.items() if number >= step}
    assert read_lineage(directory)["fingerprint"] == digests[step]


@pytest.mark.soak
@pytest.mark.parametrize("step", [10, 12], ids=["with_a_row", "between_rows"])
def test_a_fork_without_changes_has_the_bits_and_rows_of_its_parent(parent: Path, step: int) -> None:
    check_fork_without_changes(parent, step, WHOLE)


def test_a_short_fork_without_changes_has_the_bits_and_rows_of_its_parent(tmp_path: Path) -> None:
    # A model that compiles quickly, and returns sums over the steps between two rows.
    short = {"config.train.total_steps": 6, "logging.every_steps": 2, "config.eval.every_steps": 4}
    whole = {**WHOLE, **BIGRAM_OPTIONS, "checkpoint": {"every_steps": 3, "keep_last": 3}, **short}
    whole["job"] = get_job_name(BigramTrainer)
    make_gpt(tmp_path / "parent", BigramTrainer, **whole)()
    check_fork_without_changes(tmp_path / "parent", 3, whole, BigramTrainer)


@pytest.mark.soak
def test_a_changed_rate_is_kept_by_resumes_and_by_forks_of_the_fork(parent: Path) -> None:
    changed = {**WHOLE, "config.optimizer.learning_rate": 3e-3, **fork_of(parent, 10, "config.optimizer")}
    whole, resumed, second = (parent.parent / name for name in ("whole", "resumed", "second"))
    make_gpt(whole, **changed)()
    assert read_outcome(whole)[1]["fingerprint"] != read_outcome(parent)[1]["fingerprint"]

    # A resume neither needs the key, nor another spec than that in the directory.
    stop_after(make_gpt(resumed, **changed), 17)
    make_gpt(resumed, **{key: value for key, value in changed.items() if key != "checkpoint.fork_from"})()
    assert read_outcome(resumed) == read_outcome(whole)
    assert read_lineage(resumed)["changes"] == {"config.optimizer.learning_rate": [1e-3, 3e-3]}

    make_gpt(second, **{**changed, **fork_of(resumed, 20)})()
    rows, result = read_outcome(whole)
    assert read_outcome(second) == ([row for row in rows if row["step"] > 20], result)
    lineage = read_lineage(second)
    assert [lineage["step"], *(each["step"] for each in lineage["ancestors"])] == [20, 10]
    assert [each["run"] for each in lineage["ancestors"]] == [str(parent)]
    assert lineage["ancestors"][0]["changes"] == read_lineage(resumed)["changes"]


def test_status_events_and_spec_report_a_fork(counted: Path, tmp_path: Path, capsys: Any) -> None:
    directory = tmp_path / "fork"
    make_counter(directory, seed=1, **{"config.total_steps": 60}, **fork_of(counted, "newest", "seed"))()
    (event,) = read_events(directory, "fork")
    assert (event["run"], event["step"], event["changes"]) == (str(counted), 40, {"seed": [0, 1]})
    assert [row["event"] for row in read_events(directory, "init", "fork", "save", "commit")][:3] == [
        *("fork", "save", "commit")
    ]
    # Run again in another directory, the resolved spec makes the same fork.
    fork = read_spec(directory / "spec.yaml").checkpoint.fork_from
    assert fork is not None
    assert (fork.run, fork.step, fork.changes) == (str(counted), 40, ["seed"])
    history = read_history(LocalStore(directory))
    assert history.fork is not None
    assert (history.fork.step, history.fork.changes) == (40, {"seed": [0, 1]})
    capsys.readouterr()
    assert run_command(["status", str(directory)]) == EXIT_DONE
    shown = "".join(capsys.readouterr().out.split())
    assert f"forkedfrom{counted}atstep40,withseed:0->1" in shown


# Errors: nothing is written, and the message says what to do.


def remove(path: str) -> Callable[[Path], None]:
    return lambda run: shutil.rmtree(run / path)


def damage_manifest(run: Path) -> None:
    (run / "checkpoints/40" / MANIFEST).write_bytes(b"{}")


def make_newer(run: Path) -> None:
    path = run / "checkpoints/40" / MANIFEST
    path.write_bytes(seal(parse_manifest(path.read_bytes()) | {"format": 99}))


def unfinish(run: Path) -> None:
    (run / "checkpoints/40" / MANIFEST).unlink()


def keep(run: Path) -> None:
    pass


def find_arrays(run: Path, step: int) -> Path:
    """Return the largest file with arrays."""
    files = [path for path in (run / f"checkpoints/{step}").rglob("*") if path.is_file() and path.name != MANIFEST]
    return max(files, key=lambda path: path.stat().st_size)


def damage_arrays(run: Path, step: int) -> None:
    path = find_arrays(run, step)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def damage_all_arrays(run: Path) -> None:
    for step in (20, 30, 40):
        damage_arrays(run, step)


Refusal = tuple[Callable[[Path], None], dict[str, Any], str]
REFUSALS: dict[str, Refusal] = {
    "being_written": (unfinish, {"step": 40}, r"step 40 is not committed.*has steps 20, 30$"),
    "pruned": (keep, {"step": 10}, r"step 10 was never saved, or has been deleted.*has steps 20, 30, 40$"),
    "none_left": (remove("checkpoints"), {"step": 10}, "has no checkpoint$"),
    "nothing_there": (shutil.rmtree, {}, "no checkpoint is here"),
    "damaged": (damage_manifest, {"step": 40}, "damaged.*choose another step"),
    "damaged_arrays": (lambda run: damage_arrays(run, 40), {"step": 40}, "no good checkpoint to fork from: 40: .*CRC"),
    "missing_arrays": (lambda run: find_arrays(run, 40).unlink(), {"step": 40}, "to fork from: 40: .* is missing"),
    "truncated_arrays": (lambda run: os.truncate(find_arrays(run, 40), 5), {"step": 40}, "40: .* has 5 bytes"),
    "all_damaged": (damage_all_arrays, {}, "40: .*CRC.*; 30: .*CRC.*; 20: .*CRC"),
    "newer": (make_newer, {"step": 40}, "newer runner"),
    "newer_newest": (make_newer, {}, "newer runner"),
    "best_of_nothing": (keep, {"step": "best"}, "keep_best"),
    "names_a_checkpoint": (keep, {"run": "{run}/checkpoints/40"}, "write run: .*counted and step: 40"),
    "unknown_change": (keep, {"changes": ["config.widht"]}, "no key config.widht; did you mean config.width"),
    "unlisted": (keep, {"seed": 7}, r"seed: the parent has 0, this spec 7\n +changes: \[seed\]"),
    "unlisted_too": (
        keep,
        {"seed": 7, "changes": ["config.width"]},
        r"seed: the parent has 0, this spec 7\n +changes: \[config.width, seed\]",
    ),
    "other_model": (
        keep,
        {"width": 32, "changes": ["config.width"]},
        r"values: checkpoint has uint32\[64\].*uint32\[32",
    ),
    "nothing_left_to_do": (keep, {"total": 40}, "at step 40, and the run ends at step 40"),
    "own_directory": (keep, {"directory": "{run}/../counted"}, "the parent's own directory"),
    "below_the_parent": (keep, {"directory": "{run}/forks/a"}, "lies in the parent's directory"),
    "above_the_parent": (keep, {"directory": "{run}/.."}, "contains the parent's directory"),
    "weights_too": (keep, {"init_from": "{run}"}, "fork_from and init_from are both given"),
    "no_path": (keep, {"run": "ftp://host/run"}, "ftp:// is not known"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_an_invalid_fork_is_rejected_and_writes_nothing(counted: Path, tmp_path: Path, case: str) -> None:
    spoil, given, message = REFUSALS[case]
    spoil(counted)
    given = {key: value.format(run=counted) if isinstance(value, str) else value for key, value in given.items()}
    before = sorted(tmp_path.rglob("*"))
    fork = {key: given[key] for key in ("step", "changes") if key in given} | {"run": given.get("run", str(counted))}
    changes = {"checkpoint.fork_from": fork, "seed": given.get("seed", 0), "config.width": given.get("width", 64)}
    changes |= {"config.total_steps": given.get("total", 60), "checkpoint.init_from": given.get("init_from")}
    with pytest.raises(ValueError, match=re.compile(message, re.DOTALL)) as caught:
        make_counter(Path(given.get("directory", tmp_path / "fork")), **changes)()
    if case != "weights_too":  # which no constructor of a spec lets pass
        assert isinstance(caught.value, InvalidError)
        assert "checkpoint.fork_from" in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_parent_of_another_job_class_is_rejected(counter_run: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidError, match=r"is of the job experiments.counter:Counter, this one is .*PretrainGPT"):
        make_gpt(tmp_path / "fork", **fork_of(counter_run, 40))()
    assert not (tmp_path / "fork").exists()


@pytest.mark.soak
def test_a_parent_of_another_model_size_is_rejected_with_each_leaf(parent: Path, tmp_path: Path) -> None:
    changed = {**WHOLE, "config.model.width": 16, **fork_of(parent, 10, "config.model")}
    with pytest.raises(
        InvalidError, match=r"(?s)whole state.*float32\[2,32\].*float32\[2,16\].*and \d+ more"
    ) as caught:
        make_gpt(tmp_path / "fork", **changed)()
    assert len(str(caught.value).splitlines()) <= 20
    assert "init_from" not in str(caught.value)  # these weights do not fit either
    assert not (tmp_path / "fork").exists()


@pytest.mark.soak
def test_changed_data_must_be_listed_by_section_or_key(parent: Path, tmp_path: Path) -> None:
    data = {**WHOLE, "config.data.validation_fraction": 0.2}
    with pytest.raises(InvalidError, match=r"changes: \[config.data.validation_fraction\]"):
        make_gpt(tmp_path / "fork", **data, **fork_of(parent, 40))()
    make_gpt(tmp_path / "fork", **data, **fork_of(parent, 40, "config.data.validation_fraction"))()
    changes = read_lineage(tmp_path / "fork")["changes"]
    assert set(changes) == {"config.data", "config.data.validation_fraction"}


@pytest.mark.soak
def test_a_change_of_later_steps_need_not_be_listed(tmp_path: Path) -> None:
    stable = {"name": "wsd", "warmup_steps": 1, "decay_steps": 2, "final_learning_rate": 0.0}
    parent = {**WHOLE, "config.train.total_steps": 8, "config.schedule": stable}
    make_gpt(tmp_path / "parent", **parent)()
    longer = {**parent, "config.train.total_steps": 10}
    with pytest.raises(InvalidError, match=r"changes: \[config.train.total_steps\]"):
        make_gpt(tmp_path / "late", **longer, **fork_of(tmp_path / "parent", 8))()
    make_gpt(tmp_path / "fork", **longer, **fork_of(tmp_path / "parent", 4))()
    assert read_lineage(tmp_path / "fork")["changes"] == {"config.train.total_steps": [8, 10]}


@pytest.mark.parametrize(
    ("keys", "short"),
    [
        (["seed"], ["seed"]),
        (["config.data", "config.data.sequence_length"], ["config.data.sequence_length"]),
        (["config.data"], ["config.data"]),
        ([f"config.optimizer.{name}" for name in "abcd"], ["config.optimizer"]),
        (
            ["seed", *(f"config.optimizer.{name}" for name in "abc")],
            ["seed", *(f"config.optimizer.{n}" for n in "abc")],
        ),
    ],
)
def test_the_list_to_paste_is_short(keys: list[str], short: list[str]) -> None:
    assert shorten_keys(keys) == short


def test_newest_falls_back_to_an_older_step(counted: Path, tmp_path: Path) -> None:
    damage_arrays(counted, 40)
    before = sorted(counted.rglob("*"))
    make_counter(tmp_path / "fork", **{"config.total_steps": 60}, **fork_of(counted, "newest"))()
    assert read_lineage(tmp_path / "fork")["step"] == 30
    assert [row["rejected"] for row in read_events(tmp_path / "fork", "fallback")] == [40]
    assert sorted(counted.rglob("*")) == before


def test_damage_after_the_check_leaves_the_directory_to_a_corrected_spec(
    counted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = {"config.total_steps": 60}
    job = make_counter(tmp_path / "fork", seed=1, **spec, **fork_of(counted, 40, "seed"))
    monkeypatch.setattr(job, "prepare", lambda: damage_arrays(counted, 40))
    with pytest.raises(InvalidError, match="no good checkpoint to fork from: 40"):
        job()
    assert not (tmp_path / "fork/checkpoints").exists()
    make_counter(tmp_path / "fork", **spec, **fork_of(counted, 30))()
    assert read_lineage(tmp_path / "fork")["step"] == 30


@pytest.mark.soak
def test_a_fork_takes_the_best_step_with_its_metric(parent: Path, tmp_path: Path) -> None:
    best = {**WHOLE, "checkpoint.keep_best": {"metric": "val/loss"}}
    make_gpt(tmp_path / "best", **best)()
    losses = {row["step"]: row["val/loss"] for row in read_trajectory(tmp_path / "best") if "val/loss" in row}
    step = min((step for step in losses if step < STEPS), key=lambda step: losses[step])
    shutil.rmtree(tmp_path / f"best/checkpoints/{STEPS}")
    make_gpt(tmp_path / "fork", **best, **fork_of(tmp_path / "best", "best"))()
    manifest = read_committed(LocalStore(tmp_path / "fork"))[step]
    assert manifest.lineage is not None
    assert (manifest.lineage["step"], manifest.metric) == (step, losses[step])


# A directory is forked once.


@pytest.mark.daily(10)
@pytest.mark.parametrize("is_finished", [False, True], ids=["stopped", "finished"])
@pytest.mark.parametrize(
    ("fork", "is_good"),
    [
        ({"step": 40}, True),
        ({"step": "newest"}, True),
        ({"step": "best"}, True),
        ({"step": 30}, False),
        ({"step": 40, "run": "{run}-other"}, False),
        ({"step": 40, "run": "gs://bucket/run"}, False),
        ({"step": 40, "run": "{run}/"}, True),
        ({"step": 40, "run": "{run}/../counted"}, True),
        ({"step": 40, "run": "/{run}//"}, True),
        ({"step": 40, "run": "{run}.link"}, True),
    ],
)
def test_a_started_fork_resumes_or_is_rejected(
    counted: Path, tmp_path: Path, fork: dict[str, Any], is_good: bool, is_finished: bool
) -> None:
    longer = {"config.total_steps": 60}
    counted.with_name("counted.link").symlink_to(counted)
    first = make_counter(tmp_path / "fork", **longer, **fork_of(counted, "newest"))
    if is_finished:
        first()
    else:
        stop_after(first, 45)
    shutil.rmtree(counted)
    given = {"run": str(counted), **fork}
    given["run"] = given["run"].format(run=counted)
    again = make_counter(tmp_path / "fork", **longer, **{"checkpoint.fork_from": given})
    if is_good:
        again()
        assert read_lineage(tmp_path / "fork")["step"] == 40
    else:
        with pytest.raises(InvalidError, match=r"was forked from .* at step 40"):
            again()


@pytest.mark.parametrize("step", [5, 60])
def test_a_started_run_cannot_become_a_fork(counted: Path, tmp_path: Path, step: int) -> None:
    own = make_counter(tmp_path / "own", **{"config.total_steps": 60})
    if step == 60:
        own()
    else:
        stop_after(own, step)
    with pytest.raises(InvalidError, match=f"has a run that is no fork, at step {step}"):
        make_counter(tmp_path / "own", **{"config.total_steps": 60}, **fork_of(counted, 40))()


# Kills, buckets and meshes.


def has_forked(attempt: Any) -> bool:
    return bool(attempt.events("fork")) and not attempt.job.committed()


@pytest.mark.soak
def test_a_fork_killed_around_its_first_commit_needs_the_parent_only_before(tmp_path: Path) -> None:
    options = ("config.total_steps=40", "config.step_seconds=0.02", "config.width=3000000", "checkpoint.every_steps=10")
    whole = Job("specs/counter.yaml", tmp_path / "whole", options)
    whole.finish()
    fork = Job("specs/counter.yaml", tmp_path / "fork", (*options, f"checkpoint.fork_from={{run: {whole.directory}}}"))
    fork = fork.with_options("checkpoint.fork_from.step=30")
    killed = fork.start()
    assert killed.kill_during(has_forked), killed.report("committed before it could be killed")
    assert not fork.committed()
    attempt = fork.start()
    attempt.wait_until(lambda: just_committed(attempt), "its first commit")
    attempt.kill()
    assert fork.committed()[0] == 30
    shutil.rmtree(whole.checkpoints)
    fork.finish()
    assert fork.result() == whole.result()
    assert [event["step"] for event in fork.events("fork")] == [30, 30]


class ParentBucket(MemoryDriver):
    """Bucket in memory in the place of one of Google's; all stores of the process share it."""

    prefix = "run"
    shared: "ParentBucket | None" = None
    is_down = False

    def __new__(cls, address: str) -> "ParentBucket":
        if cls.shared is None:
            cls.shared = super().__new__(cls)
            MemoryDriver.__init__(cls.shared)
        return cls.shared

    def __init__(self, address: str):
        self.before = self.fail

    def fail(self, verb: str, key: str) -> None:
        if self.is_down:
            raise StorageError("bucket: is down")


def test_forks_between_disk_and_bucket(counted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(url._DRIVERS, "gs", (__name__, ParentBucket.__name__, ""))
    monkeypatch.setattr(ParentBucket, "shared", None)

    def make(directory: str | Path, **changes: Any) -> RestoreableJob:
        job = make_counter(tmp_path / "unused", **changes)
        return type(job)(job.spec.model_copy(update={"directory": str(directory)}))

    # A bucket may leave out saves, but not that of the fork's first step.
    longer = {"config.total_steps": 60, "checkpoint.keep_last": 9}
    make("gs://bucket/run", **longer, **fork_of(counted, 30))()
    make(tmp_path / "back", **longer, **fork_of("gs://bucket/run", 30))()
    stored: Store = url.make_store("gs://bucket/run")
    result = json.loads(stored.read("result.json"))
    assert json.loads((tmp_path / "back/result.json").read_text()) == result
    with pytest.raises(InvalidError, match="the parent's own directory"):
        make("gs://bucket/run", **{"config.total_steps": 90}, **fork_of("gs://bucket/run/", "newest"))()
    monkeypatch.setattr(ParentBucket, "is_down", True)
    with pytest.raises(StorageError, match="is down"):
        make(tmp_path / "late", **{"config.total_steps": 90}, **fork_of("gs://bucket/run", "newest"))()
    assert not (tmp_path / "late").exists()


@pytest.mark.soak
def test_a_fork_takes_another_mesh(parent: Path, tmp_path: Path) -> None:
    assert jax.device_count() == 8
    mesh = {"topology.mesh": {"data": 2, "fsdp": 2, "tensor": 2}}
    stop_after(make_gpt(tmp_path / "fork", **WHOLE, **mesh, **fork_of(parent, 10)), 11)
    assert (
        read_committed(LocalStore(tmp_path / "fork"))[10].fingerprint == read_lineage(tmp_path / "fork")["fingerprint"]
    )
