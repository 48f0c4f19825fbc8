"""The command `verify-resume`: check on this machine that the user's own job resumes bit-identically.

The job runs twice, as real processes in a scratch directory, to the same step: once undisturbed, and once with kills.
Both runs have the spec's configuration, except for settings that do not change the bits, such as the save interval.
Then the digest of every leaf at every checkpoint and every row of metrics are compared.

A run that ends by itself with 75 or 76, or is killed by another program, proves nothing about resume. It is started
again, the undisturbed run from scratch.
"""

import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from runner.attempts.events import ROLL_BACK_FOLDER
from runner.checkpoint.manifest import CHECKPOINTS, MANIFEST, list_steps, read_committed
from runner.cli.arguments import VerifyResumeArguments
from runner.config import TrainerConfig
from runner.console import say
from runner.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INVALID,
    EXIT_PREEMPTED,
    EXIT_RETRYABLE,
    FailedError,
    InvalidError,
    RetryableError,
)
from runner.job import RestoreableJob
from runner.metrics.file import read_rows
from runner.process import make_environment, start_processes
from runner.retrace.scratch import QUIET
from runner.spec import hash_record, load_document, load_job_class, validate_config, validate_spec
from runner.spec.document import format_overrides
from runner.storage import JsonObject, LocalStore, read_json, read_log

_BORDER_MOMENTS = ("before a stage", "after a stage begins")
_KILL_MOMENTS = ("between two saves", "in a save", "while starting")
_ROLL_BACK_MOMENT = "in a roll-back"  # the first one, if the undisturbed run was rolled back
_POLL_SECONDS = 0.005
_MAX_SURVIVAL_SECONDS = 2.0  # of the other processes after the first one was killed
_MAX_RETRIES = 3  # of each run
_RETRYABLE = (EXIT_DONE, EXIT_PREEMPTED, EXIT_RETRYABLE, -signal.SIGKILL, -signal.SIGABRT, -signal.SIGTERM)
_TAIL_LINES = 15


@dataclass(frozen=True)
class Trial:
    """Settings of a verification."""

    arguments: Sequence[str]  # SPEC and its `--set` options
    steps: int  # last step of both runs
    kills: int  # number of kills of the second run
    processes: int  # number of processes of the job, on this machine
    # CPU devices to simulate in each process. The undisturbed run has the first number; the starts of the killed run
    # cycle through the numbers, beginning with the second. None for the devices of this machine.
    devices_per_process: Sequence[int] | None
    seed: int  # of the moments of the kills
    # Dotted keys of the spec that would place output of the job outside of its directory.
    output_keys: Sequence[str] = ()
    borders: Sequence[int] = ()  # steps at which stages of the config begin

    @property
    def every_steps(self) -> int:
        """Save interval, short enough for more commits than kills."""
        return max(1, self.steps // (self.kills + 3))


class TrialRun:
    """One run of the job in a directory of its own. An undisturbed run never continues from a checkpoint."""

    def __init__(self, trial: Trial, directory: Path, is_undisturbed: bool = False):
        self._trial = trial
        self.directory = directory
        self._is_undisturbed = is_undisturbed
        self._num_starts = self._num_retries = 0
        self._log = directory.with_suffix(".log")
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start all processes of an attempt."""
        trial = self._trial
        # Frequent saves that are all kept, metrics at every step, and no output outside the scratch directory.
        overrides = QUIET | {
            "directory": str(self.directory),
            "checkpoint.every_steps": trial.every_steps,
            "checkpoint.every_minutes": None,
            "checkpoint.every_epochs": None,
            "checkpoint.every": None,
            "checkpoint.keep_last": trial.steps + 1,
            "checkpoint.keep_every_steps": None,
            "checkpoint.keep_best": None,
            "logging.every_steps": 1,
            **dict.fromkeys(trial.output_keys),
        }
        options = [word for override in format_overrides(overrides) for word in ("--set", override)]
        # The user's own `--set` options come first, so that the overrides above outrank them.
        command = [sys.executable, "-m", "runner", *trial.arguments, *options]
        counts = trial.devices_per_process
        # The killed run has another number of devices at each start, to check that it resumes on another mesh.
        num_devices = counts[0 if self._is_undisturbed else self._num_starts % len(counts)] if counts else None
        self._num_starts += 1
        with self._log.open("ab") as log:
            self._processes = start_processes(command, trial.processes, make_environment(num_devices), log)

    def kill(self, chance: random.Random) -> int:
        """Kill one process with SIGKILL and the others a moment later; return the number of the first."""
        victim = chance.randrange(len(self._processes))
        self._processes[victim].kill()
        # The survivors may notice the loss. Whatever they still commit must not differ.
        time.sleep(chance.uniform(0, _MAX_SURVIVAL_SECONDS) if len(self._processes) > 1 else 0)
        self.end()
        return victim

    def end(self) -> None:
        """Kill the processes that are left, and wait for all."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()

    def finish(self) -> None:
        """Wait for the commit of the last step, and stop the job cleanly. Raises like `wait_until`."""
        while self.wait_until(lambda: self.find_newest_step() >= self._trial.steps):
            for process in self._processes:
                if process.poll() is None:
                    process.send_signal(signal.SIGTERM)
            # The last save is committed, so a stop now loses nothing; the job may be longer than the trial.
            codes = [process.wait() for process in self._processes]
            if all(code in (EXIT_DONE, EXIT_PREEMPTED) for code in codes):
                return
            self._retry(codes)

    def wait_until(self, condition: Callable[[], bool]) -> bool:
        """Wait until a condition holds, and return False if the job was done before.

        Raises InvalidError if the job refused to start, FailedError if it failed, RetryableError if it ended too often
        with a code that asks for another try.
        """
        while not condition():
            codes = [process.poll() for process in self._processes]
            if None not in codes:
                if not any(codes):
                    # The job has ended in order, perhaps between the check above and now.
                    return condition()
                self._retry([code for code in codes if code is not None])
            time.sleep(_POLL_SECONDS)
        return True

    def _retry(self, codes: Sequence[int]) -> None:
        """Restart a job that has ended by itself with these codes, or raise its error if a retry cannot help."""
        problem = f"the job ended with {', '.join(map(str, codes))} by itself"
        is_retryable = all(code in _RETRYABLE for code in codes)
        if self._num_retries == _MAX_RETRIES or not is_retryable:
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
            # All processes refuse a wrong spec alike; a mixture of codes is a failure.
            if all(code == EXIT_INVALID for code in codes):
                raise InvalidError(tail)
            if is_retryable:
                raise RetryableError(
                    f"{problem}, after {_MAX_RETRIES} retries; nothing is proved, run the command again:\n{tail}"
                )
            raise FailedError(f"{problem}:\n{tail}")
        self._num_retries += 1
        say(f"verify-resume: {problem}, which proves nothing; retry {self._num_retries} of {_MAX_RETRIES}")
        if self._is_undisturbed:
            # A run that continued from a checkpoint could not serve as the reference.
            shutil.rmtree(self.directory, ignore_errors=True)
        self.start()

    def read_leaf_digests(self) -> dict[int, dict[str, str]]:
        """Return the digest of every leaf, by committed step."""
        return {
            step: {leaf: record["digest"] for leaf, record in manifest.leaves.items()}
            for step, manifest in read_committed(LocalStore(self.directory)).items()
        }

    def find_newest_step(self) -> int:
        """Return the newest committed step, 0 if there is none."""
        manifests = self.directory.glob(f"{CHECKPOINTS}/*/{MANIFEST}")
        return max((int(path.parent.name) for path in manifests), default=0)

    def find_roll_back(self) -> int | None:
        """Return the step at which the first roll-back was decided; None if there was none."""
        try:
            return int(read_json(LocalStore(self.directory), f"{ROLL_BACK_FOLDER}/1")["detected"])
        except FileNotFoundError:
            return None

    def read_programs(self) -> list[tuple[str, str]]:
        """Return (digest of the facts, digest of the program) of the train step of each start, in order."""
        return [
            (hash_record(event["facts"]), event["program"])
            for event in read_log(LocalStore(self.directory), "events")
            if event["event"] == "compile"
        ]

    def is_saving(self) -> bool:
        """Return True if a step beyond the newest committed one is being written."""
        # A directory of a step appears with its first array, long before the manifest that commits it.
        newest = self.find_newest_step()
        return any(step > newest for step in list_steps(LocalStore(self.directory)))

    def read_metrics(self) -> dict[int, JsonObject]:
        """Return the metrics by step, without speeds."""
        # Speeds are measured, so they differ between any two runs.
        rows = read_rows(LocalStore(self.directory))
        return {row["step"]: {key: row[key] for key in row if not key.startswith("perf/")} for row in rows}


def verify_resume(arguments: VerifyResumeArguments) -> int:
    """Run the job undisturbed and with kills, and return the exit code: 0 for the same bits, 1 for a difference."""
    document = load_document(arguments.spec, arguments.overrides)
    spec = validate_spec(document)
    job_class: type[RestoreableJob] = load_job_class(document, RestoreableJob)
    config = validate_config(job_class.complete_document(document, spec), job_class.Config)
    output_keys = sorted(config.output_keys)
    starts = config.list_starts()[1:] if isinstance(config, TrainerConfig) else []
    options = [word for override in arguments.overrides for word in ("--set", override)]
    trial = Trial(
        (arguments.spec, *options),
        arguments.steps,
        arguments.kills,
        arguments.processes,
        arguments.device_counts,
        arguments.seed,
        [f"config.{key}" for key in output_keys],
        [start.step for start in starts if start.step < arguments.steps],
    )
    with tempfile.TemporaryDirectory(prefix="verify-resume-") as scratch:
        undisturbed = TrialRun(trial, Path(scratch) / "undisturbed", is_undisturbed=True)
        killed = TrialRun(trial, Path(scratch) / "killed")
        try:
            # The undisturbed run comes first; it measures how long a start takes and the time between two saves.
            began = time.monotonic()
            undisturbed.start()
            undisturbed.wait_until(lambda: undisturbed.find_newest_step() > 0)
            first_commit_seconds = time.monotonic() - began
            undisturbed.finish()
            last_step = undisturbed.find_newest_step()
            if last_step < trial.steps:
                raise InvalidError(f"the job ends at step {last_step}; --steps {trial.steps} needs to be at most that")
            # `every_steps` spreads about `kills + 3` saves over the run.
            interval_seconds = (time.monotonic() - began - first_commit_seconds) / (trial.kills + 3)
            say(
                f"verify-resume: undisturbed: {len(undisturbed.read_leaf_digests())} checkpoints, "
                f"{len(undisturbed.read_metrics())} rows of metrics"
            )
            # Cycle through the kinds of moments, so that few kills cover every kind.
            usual = (*_BORDER_MOMENTS, *_KILL_MOMENTS) if trial.borders else _KILL_MOMENTS
            moments = [usual[number % len(usual)] for number in range(trial.kills)]
            # The kill in the roll-back comes first only if no border does, since the run would pass it before.
            rolled_back = undisturbed.find_roll_back()
            if rolled_back is not None:
                is_behind_border = any(step < rolled_back for step in trial.borders)
                moments.insert(len(_BORDER_MOMENTS) if is_behind_border else 0, _ROLL_BACK_MOMENT)
            first_kill = _run_with_kills(killed, trial, moments[: trial.kills], first_commit_seconds, interval_seconds)
        finally:
            undisturbed.end()
            killed.end()
        programs = find_program_change([*undisturbed.read_programs(), *killed.read_programs()])
        if programs is not None:
            say(f"verify-resume: {programs}")
        problem = find_difference(undisturbed, killed, trial.steps, first_kill)
        if problem is not None:
            say(f"verify-resume: DIFFERENT: {problem}")
            return EXIT_FAILED
        compared = [step for step in killed.read_leaf_digests() if step <= trial.steps]
    say(
        f"verify-resume: SAME BITS after {trial.kills} kill{'s' * (trial.kills != 1)}: every leaf at steps "
        f"{', '.join(map(str, compared))}, and every row of metrics"
    )
    return EXIT_DONE


def _run_with_kills(
    run: TrialRun, trial: Trial, moments: Sequence[str], first_commit_seconds: float, interval_seconds: float
) -> int:
    """Run the job with its kills, to its end, and return the newest committed step at the first kill after a commit."""
    chance = random.Random(trial.seed)
    first_kill = 0 if trial.kills else trial.steps
    for number, moment in enumerate(moments):
        before = run.find_newest_step()
        border = next((step for step in trial.borders if step > before), None)
        if moment in _BORDER_MOMENTS and border is None:
            moment = _KILL_MOMENTS[0]
        run.start()
        if moment in _BORDER_MOMENTS:
            assert border is not None, "a stage lies ahead"
            # The save before the stage, or the first one in it.
            saved = (border - (moment == _BORDER_MOMENTS[0])) // trial.every_steps * trial.every_steps
            saved += trial.every_steps if moment == _BORDER_MOMENTS[1] and saved < border else 0
            saved = min(saved, trial.steps)
            run.wait_until(lambda saved=saved: run.find_newest_step() >= saved)  # type: ignore[misc]
            # After a restart at that save, the stage begins once the job has started.
            seconds = interval_seconds + (first_commit_seconds if saved <= before else 0)
            time.sleep(chance.uniform(0, seconds if moment == _BORDER_MOMENTS[0] else 0))
        elif moment == "while starting":
            time.sleep(chance.uniform(0, first_commit_seconds))
        elif moment == _ROLL_BACK_MOMENT:
            # The record is the first thing that a roll-back writes.
            run.wait_until(lambda: run.find_roll_back() is not None)
        else:
            run.wait_until(lambda before=before: run.find_newest_step() > before)  # type: ignore[misc]
            if moment == "in a save":
                run.wait_until(run.is_saving)
            else:
                time.sleep(chance.uniform(0, interval_seconds))
        victim = run.kill(chance)
        # A kill before the first commit makes the run start from scratch, which is not a resume.
        first_kill = first_kill or run.find_newest_step()
        say(
            f"verify-resume: kill {number + 1} of {trial.kills}: -9 to process {victim} {moment}, "
            f"newest committed step {run.find_newest_step()}"
        )
    if run.find_newest_step() < trial.steps:
        run.start()
        run.finish()
    return first_kill


def find_program_change(programs: Sequence[tuple[str, str]]) -> str | None:
    """Return the first change of the train step in words, None if starts with equal facts have the same program.

    `programs` has (digest of the facts, digest of the program) of each start, in order.
    """
    known: dict[str, str] = {}
    for facts, program in programs:
        before = known.setdefault(facts, program)
        if program != before:
            return (
                f"the program of the train step has changed between two starts on the same hardware, {before} -> "
                f"{program}: the code was edited meanwhile, or it builds the model from more than its spec"
            )
    return None


def find_difference(undisturbed: TrialRun, killed: TrialRun, last_step: int, first_kill: int) -> str | None:
    """Return the first difference in words, or None if both runs are equal up to `last_step`."""
    expected_rows, rows = undisturbed.read_metrics(), killed.read_metrics()
    different_rows = [
        step for step in sorted(expected_rows | rows) if step <= last_step and expected_rows.get(step) != rows.get(step)
    ]
    expected, found = undisturbed.read_leaf_digests(), killed.read_leaf_digests()
    # A kill may have prevented a save that the other run made; the rows cover the steps between.
    common = [step for step in expected if step in found and step <= last_step]
    if not common:
        return "no checkpoint of the same step in both runs"
    different = [step for step in common if expected[step] != found[step]]
    if not different and not different_rows:
        return None
    lines = []
    if different:
        step = different[0]
        leaves = [name for name in expected[step] if expected[step][name] != found[step].get(name)]
        equal = max((other for other in common if other < step), default=0)
        lines.append(
            f"step {step} is the first checkpoint that differs (step {equal} is equal), in {len(leaves)} of "
            f"{len(expected[step])} leaves: {', '.join(leaves[:3])}"
        )
    if different_rows:
        step = different_rows[0]
        lines.append(
            f"step {step} is the first row of metrics that differs: {expected_rows.get(step)}, {rows.get(step)}"
        )
    # A difference from before the first kill cannot come from a resume.
    if min(different[:1] + different_rows[:1]) <= first_kill:
        lines.append(
            f"this is before the first kill (after step {first_kill}): two undisturbed runs would differ too. The job "
            "depends on more than its spec: a clock, an unseeded generator, the order of threads or of a set"
        )
    else:
        lines.append(
            "the runs were equal up to the first kill: the job keeps state outside its pytree (a random key that is "
            "split instead of folded from the step, an iterator, an attribute), or goes on from a fresh init"
        )
    return "\n  ".join(lines)
