"""Random histories of a run: changes of its spec in place, stops, kills at any write, and forks.

Whatever happened to a run, its rows, result, state and best checkpoint are those of the run that had its last spec from
the start; a change that cannot give this is refused. Attempts run in this process, with the runner's own classes. A
kill is an exception at one of the writes of an attempt, after which nothing of it writes any more.
"""

import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runner import BaseTrainer, ExecutionSpec
from runner.attempts.events import ROLL_BACK_FOLDER
from runner.checkpoint.inspect import find_best_name
from runner.checkpoint.manifest import read_newest_manifest
from runner.errors import EXIT_INVALID, DivergedError, PreemptedError, RunnerError
from runner.metrics.file import _LocalMetricsFile
from runner.storage import LocalStore
from tests.data.datasets import write_bin
from tests.support.tiny_jobs import StopAfter, make_gpt_document, read_outcome
from tests.test_values import TrainLookup
from tests.train.test_stability import SpikedLookup, make_poisoned_document

NUM_DAILY, NUM_SOAK, CHUNK = 1, 2000, 20
TOTAL_MAX = 16


class Killed(BaseException):
    """An attempt was killed."""


class Killer:
    """Counter of the writes of one attempt, which ends all of them at one."""

    def __init__(self) -> None:
        self.left: int | None = None
        self.is_dead = False
        self._lock = threading.Lock()

    def begin(self, left: int | None) -> None:
        """Begin an attempt that is killed at write `left`; None: never."""
        self.left, self.is_dead = left, False

    def write(self) -> None:
        with self._lock:
            if self.left is not None:
                self.left -= 1
                self.is_dead |= self.left < 0
        if self.is_dead:
            raise Killed


@pytest.fixture
def killer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Killer]:
    """Return a killer of all writes below a run's directory, other than of arrays, which nobody reads uncommitted."""
    found = Killer()

    def guard(owner: type, name: str) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
            found.write()
            return original(self, *args, **kwargs)

        monkeypatch.setattr(owner, name, guarded)

    for name in ("write", "write_chunks", "write_if", "create_from", "remove", "remove_tree", "move_tree"):
        guard(LocalStore, name)
    guard(_LocalMetricsFile, "_write")
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    yield found
    found.begin(None)


@dataclass(frozen=True)
class Plan:
    """Part of a spec that a history changes."""

    total: int
    stages: tuple[tuple[int, str], ...] = ()  # start, name of a change


@dataclass(frozen=True)
class Kind:
    """Kind of run: its job, its settings, and the changes that its stages may make."""

    job: type[BaseTrainer]
    document: Callable[..., Any]
    settings: dict[str, Any]
    changes: dict[str, dict[str, Any]]


def make_mixed_document(directory: Path, **changes: Any) -> Any:
    for name, seed in {"a": 0, "b": 1}.items():
        if not (path := directory.parent / f"{name}.bin").exists():
            write_bin(path, np.random.default_rng(seed).integers(256, size=4000))
    mixture = [
        {"name": name, "source": str(directory.parent / f"{name}.bin"), "weight": weight}
        for name, weight in {"a": 3, "b": 2}.items()
    ]
    data = {"mixture": mixture, "sequence_length": 16, "validation_fraction": 0.1}
    return make_gpt_document(directory, **changes | {"config.data": data})


COMMON = {
    "config.schedule": {"name": "constant"},
    "checkpoint": {"every_steps": 2, "keep_last": 3, "keep_best": {"metric": "val/loss", "mode": "min"}},
    "logging.every_steps": 3,
}
CHANGES: dict[str, dict[str, Any]] = {
    "nothing": {"optimizer.weight_decay": 0.1},
    "decay": {"optimizer.weight_decay": 0.5},
    "free": {"memory.remat": "none"},
    "rate": {"optimizer.learning_rate": 5e-4},
}
KINDS = {
    "mixture": Kind(
        TrainLookup,
        make_mixed_document,
        COMMON
        | {
            "job": "tests.test_values:TrainLookup",
            "config.model.vocabulary_size": 256,
            "config.train": {"global_batch_examples": 8, "total_steps": 0},
            "config.eval": {"every_steps": 4, "batches": 1},
        },
        CHANGES
        | {
            "weight": {"data.mixture.0.weight": 1.0},
            "batch": {"train.global_batch_examples": 16},
        },
    ),
    "roll_back": Kind(
        SpikedLookup,
        make_poisoned_document,
        COMMON
        | {
            "seed": 5,
            "job": "tests.train.test_stability:SpikedLookup",
            "config.optimizer": {"name": "sgd", "learning_rate": 3.0, "clip_norm": None},
            "config.stability": {"roll_back": {"after_steps": 3, "skip_examples": 40, "over_steps": 8, "at_most": 16}},
            "config.eval": {"every_steps": 4, "batches": 1},
            "checkpoint.keep_last": 9,
        },
        CHANGES | {"rate": {"optimizer.learning_rate": 1.0}},
    ),
}


@dataclass
class History:
    """A run with a random history, and its place."""

    kind: Kind
    root: Path
    killer: Killer
    plans: list[Plan]  # that were not refused; the next attempt may change the last one
    directory: Path
    fork: dict[str, Any] = field(default_factory=dict)
    forked_at: int = 0
    parent: Plan | None = None  # of the run that was forked
    inherited: list[Any] = field(default_factory=list)  # roll-backs in the state of the parent
    number: int = 0
    log: list[Any] = field(default_factory=list)

    def make(self, plan: Plan, directory: Path, **changes: Any) -> BaseTrainer:
        stages = [{"from_step": start, "set": self.kind.changes[name]} for start, name in plan.stages]
        settings = self.kind.settings | {"config.train.total_steps": plan.total, "config.stages": stages} | changes
        return self.kind.job(ExecutionSpec.model_validate(self.kind.document(directory, **settings)))

    def attempt(self, plan: Plan, stop: int | None = None, left: int | None = None) -> str:
        """Run an attempt, and return how it ended."""
        self.killer.begin(left)
        job, notice = None, None
        try:
            job = self.make(plan, self.directory, **self.fork)
            notice = None if stop is None else StopAfter(job, stop)
            job(stop=notice)
            ended = "done"
        except Killed:
            ended = "killed"
        except PreemptedError:
            ended = "stopped"
        except DivergedError:
            ended = "diverged"
        except RunnerError as error:
            if error.exit_code != EXIT_INVALID:
                raise
            ended = "refused"
        finally:
            if job is not None and "checkpointer" in vars(job):
                job.checkpointer._worker.shutdown()
                job.checkpointer._fast_worker.shutdown()
        # A plan whose attempt was killed may not have been checked yet.
        if ended != "refused":
            self.plans.append(plan)
        self.log.append((plan, self.directory.name, stop, left, ended))
        return ended


def read_state(directory: Path, after: int) -> Any:
    """Return rows after a step, result, and best checkpoint."""
    rows, result = read_outcome(directory)
    newest = read_newest_manifest(LocalStore(directory))
    assert newest is not None
    assert newest.fingerprint == result["fingerprint"]
    best = find_best_name(LocalStore(directory))
    return [row for row in rows if row["step"] > after], result, None if after else best


def read_roll_backs(directory: Path) -> list[Any]:
    """Return the ranges of data that the newest state has skipped."""
    newest = read_newest_manifest(LocalStore(directory))
    assert newest is not None
    return list(newest.identity.get(ROLL_BACK_FOLDER, []))


def draw_plan(rng: random.Random, kind: Kind, plan: Plan) -> Plan:
    """Return a changed plan."""
    choice = rng.randrange(4)
    if choice == 0 or (choice == 1 and not plan.stages):
        return replace(plan, total=rng.randrange(2, TOTAL_MAX + 1))
    stages = dict(plan.stages)
    if choice == 1:
        del stages[rng.choice([*stages])]
    elif plan.total > 1:
        stages[rng.randrange(1, plan.total)] = rng.choice([*kind.changes])
    return replace(plan, stages=tuple(sorted(stages.items())))


def run_history(kind: Kind, root: Path, killer: Killer, seed: int, references: dict[Plan, Path | None]) -> int:
    """Run a random history, compare its end with a run without one, and return the number of attempts."""
    rng = random.Random(seed)
    history = History(kind, root, killer, [Plan(rng.randrange(4, TOTAL_MAX + 1))], root / f"run-{seed}")
    history.attempt(history.plans[-1], stop=rng.choice([None, *range(1, history.plans[-1].total)]))
    for _ in range(rng.randrange(1, 6)):
        plan = history.plans[-1]
        newest = read_newest_manifest(LocalStore(history.directory))
        step = 0 if newest is None else newest.step
        if rng.random() < 0.15 and 0 < step < plan.total:
            history.number += 1
            history.fork = {"checkpoint.fork_from": {"run": str(history.directory), "step": step}}
            history.parent, history.inherited = plan, read_roll_backs(history.directory)
            history.directory, history.forked_at = root / f"run-{seed}-{history.number}", step
        if rng.random() < 0.7:
            plan = draw_plan(rng, kind, plan)
        # Totals at and around the newest step are the interesting ones.
        if rng.random() < 0.3:
            plan = replace(plan, total=max(step + rng.randrange(3), 2))
        history.attempt(
            plan,
            stop=rng.choice([None, rng.randrange(1, TOTAL_MAX)]),
            left=rng.randrange(60) if rng.random() < 0.5 else None,
        )
    plans = iter(history.plans[::-1])
    while (ended := history.attempt(plan := next(plans))) == "refused":
        pass
    if plan not in references:
        reference = History(kind, root, killer, [plan], root / f"whole-{len(references)}")
        references[plan] = reference.directory if reference.attempt(plan) == "done" else None
    whole = references[plan]
    if whole is None or (ended == "diverged" and history.forked_at):
        # A fork that begins within a spike has no checkpoint before it to go back to.
        assert ended == "diverged", (seed, history.log)
        return len(history.log)
    inherited = history.inherited
    if history.parent not in (None, plan) and read_roll_backs(whole)[: len(inherited)] != inherited:
        # A fork keeps the roll-backs in the state of its parent. The parent may have gone on to a spike that the fork,
        # with a lower total or other stages, would not have found.
        assert read_roll_backs(history.directory)[: len(inherited)] == inherited, (seed, history.log)
        return len(history.log)
    expected = read_state(whole, history.forked_at)
    assert read_state(history.directory, history.forked_at) == expected, (seed, history.log)
    return len(history.log)


def run_histories(kind: str, seeds: range, root: Path, killer: Killer) -> None:
    references: dict[Plan, Path | None] = {}
    num_attempts = [run_history(KINDS[kind], root, killer, seed, references) for seed in seeds]
    assert len(num_attempts) == len(seeds)
    print(f"{kind}: {len(seeds)} histories of {sum(num_attempts)} attempts, {len(references)} runs without history")


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_what_it_would_be_without_its_history(kind: str, tmp_path: Path, killer: Killer) -> None:
    run_histories(kind, range(NUM_DAILY), tmp_path, killer)


@pytest.mark.soak
@pytest.mark.parametrize("first", range(NUM_DAILY, NUM_DAILY + NUM_SOAK, CHUNK))
@pytest.mark.parametrize("kind", KINDS)
def test_many_runs_are_what_they_would_be_without_their_history(
    kind: str, first: int, tmp_path: Path, killer: Killer
) -> None:
    run_histories(kind, range(first, first + CHUNK), tmp_path, killer)
