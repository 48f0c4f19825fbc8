"""Prove resume on this machine, with the user's own job: one undisturbed run and one killed again and again, compared.

Both run as real processes in a scratch directory, with the same spec, to the same step; only cadences differ from the
spec's, which move no bit. Compared are the digest of every leaf at every checkpoint, and every row of the metrics.

A run that ends by itself with 75 or 76, or is killed by others, says nothing about resume: it is started again, the
undisturbed one from nothing.

`python -m runner verify-resume`: prove resume on this machine, with the user's own job.
"""

import argparse
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

from runner.checkpoint.manifest import CHECKPOINTS, MANIFEST, list_steps, read_committed
from runner.cli.arguments import Parser
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
    RunnerError,
)
from runner.job import RestoreableJob
from runner.metrics.file import read_rows
from runner.process import make_environment, start_processes
from runner.spec import load_document, load_job_class, validate_config, validate_spec
from runner.storage import JsonObject, LocalStore

PLACES = ("between two saves", "in a save", "while starting")
_POLL_SECONDS = 0.005
_LONGEST_SURVIVAL_SECONDS = 2.0  # of the others after the first death
_MOST_RETRIES = 3  # of each run
_RETRYABLE = (EXIT_DONE, EXIT_PREEMPTED, EXIT_RETRYABLE, -signal.SIGKILL, -signal.SIGABRT, -signal.SIGTERM)
_TAIL_LINES = 15


@dataclass(frozen=True)
class Trial:
    """What to verify.

    Attributes:
        arguments: SPEC and its `--set` options.
        steps: how far both runs go.
        kills: how often the second is killed.
        processes: of the job, on this machine.
        devices_per_process: faked CPU devices in each; of several numbers the undisturbed run has the first, and each
            start of the killed run the next one. None for those that are here.
        seed: of the moments of the kills.
        output_keys: dotted keys that would lead what the job writes out of its directory.
    """

    arguments: Sequence[str]
    steps: int
    kills: int
    processes: int
    devices_per_process: Sequence[int] | None
    seed: int
    output_keys: Sequence[str] = ()

    @property
    def every_steps(self) -> int:
        """Save interval: more commits than kills."""
        return max(1, self.steps // (self.kills + 3))


class TrialRun:
    """One run of the job in a directory of its own; an undisturbed one never goes on from a checkpoint."""

    def __init__(self, trial: Trial, directory: Path, is_undisturbed: bool = False):
        self._trial = trial
        self.directory = directory
        self._is_undisturbed = is_undisturbed
        self._num_starts = self._num_retries = 0
        self._log = directory.with_suffix(".log")
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """All processes of one attempt."""
        trial = self._trial
        overrides = {
            "directory": self.directory,
            "checkpoint.every_steps": trial.every_steps,
            "checkpoint.every_minutes": "null",
            "checkpoint.every": "null",
            "checkpoint.keep_last": trial.steps + 1,
            "checkpoint.keep_best": "null",
            "checkpoint.local_directory": "null",
            "checkpoint.local_every_steps": "null",
            "logging.every_steps": 1,
            "logging.wandb": "disabled",
            "logging.tensorboard": "false",
            "logging.notify": "null",
            "logging.profile": "null",
            **dict.fromkeys(trial.output_keys, "null"),
        }
        options = [word for key, value in overrides.items() for word in ("--set", f"{key}={value}")]
        command = [sys.executable, "-m", "runner", *trial.arguments, *options]
        environment = make_environment(self._devices())
        self._num_starts += 1
        with self._log.open("ab") as log:
            self._processes = start_processes(command, trial.processes, environment, log)

    def _devices(self) -> int | None:
        numbers = self._trial.devices_per_process
        return numbers[0 if self._is_undisturbed else self._num_starts % len(numbers)] if numbers else None

    def kill(self, chance: random.Random) -> int:
        """kill -9 to one process, whose number it returns, and a moment later to the others."""
        victim = chance.randrange(len(self._processes))
        self._processes[victim].kill()
        time.sleep(chance.uniform(0, _LONGEST_SURVIVAL_SECONDS) if len(self._processes) > 1 else 0)
        self.end()
        return victim

    def end(self) -> None:
        """No process is left."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()

    def run_on(self) -> None:
        """To the commit of the last step, and then to a clean stop. Raises as `until` does."""
        while self.until(lambda: self.newest() >= self._trial.steps):
            for process in self._processes:
                if process.poll() is None:
                    process.send_signal(signal.SIGTERM)
            codes = [process.wait() for process in self._processes]
            if all(code in (EXIT_DONE, EXIT_PREEMPTED) for code in codes):
                return
            self._retry(codes)

    def until(self, happens: Callable[[], bool]) -> bool:
        """Wait for it; False if the job was done before.

        Raises if it ended in any other way: `InvalidError`, `FailedError`, or `RetryableError` if no further try helps.
        """
        while not happens():
            codes = [process.poll() for process in self._processes]
            if None not in codes:
                if not any(codes):
                    return happens()
                self._retry([code for code in codes if code is not None])
            time.sleep(_POLL_SECONDS)
        return True

    def _retry(self, codes: Sequence[int]) -> None:
        """Start again a job that has ended with these codes by itself. Raises if that is no use."""
        ended = f"the job ended with {', '.join(map(str, codes))} by itself"
        if self._num_retries == _MOST_RETRIES or any(code not in _RETRYABLE for code in codes):
            raise self._failure(codes, ended)
        self._num_retries += 1
        say(f"verify-resume: {ended}, which is no difference; try {self._num_retries} of {_MOST_RETRIES} again")
        if self._is_undisturbed:
            shutil.rmtree(self.directory, ignore_errors=True)
        self.start()

    def _failure(self, codes: Sequence[int], ended: str) -> RunnerError:
        """What to raise when the job has ended with these codes, which it should not have."""
        tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
        if all(code == EXIT_INVALID for code in codes):
            return InvalidError(tail)
        if all(code in _RETRYABLE for code in codes):
            return RetryableError(f"{ended}, after {_MOST_RETRIES} retries; nothing is proved, run it again:\n{tail}")
        return FailedError(f"{ended}:\n{tail}")

    # What stands in the directory.

    def leaves(self) -> dict[int, dict[str, str]]:
        """Digest of every leaf, by committed step."""
        return {
            step: {leaf: record["digest"] for leaf, record in manifest.leaves.items()}
            for step, manifest in read_committed(LocalStore(self.directory)).items()
        }

    def newest(self) -> int:
        """The newest committed step, 0 if there is none."""
        manifests = self.directory.glob(f"{CHECKPOINTS}/*/{MANIFEST}")
        return max((int(path.parent.name) for path in manifests), default=0)

    def is_saving(self) -> bool:
        """Whether arrays of a step beyond the newest are being written."""
        newest = self.newest()
        return any(step > newest for step in list_steps(LocalStore(self.directory)))

    def rows(self) -> dict[int, JsonObject]:
        """Metrics by step, without those of speed."""
        rows = read_rows(LocalStore(self.directory))
        return {row["step"]: {key: row[key] for key in row if not key.startswith("perf/")} for row in rows}


def verify(trial: Trial, scratch: Path) -> int:
    """Run both, say what was found, and return the exit code: 0 for the same bits, 1 for a difference."""
    chance = random.Random(trial.seed)
    whole, killed = TrialRun(trial, scratch / "undisturbed", is_undisturbed=True), TrialRun(trial, scratch / "killed")
    try:
        began = time.monotonic()
        whole.start()
        whole.until(lambda: whole.newest() > 0)
        first_commit_seconds = time.monotonic() - began
        whole.run_on()
        if whole.newest() < trial.steps:
            raise InvalidError(f"the job ends at step {whole.newest()}; --steps {trial.steps} needs to be at most that")
        interval_seconds = (time.monotonic() - began - first_commit_seconds) / (trial.kills + 3)
        say(f"verify-resume: undisturbed: {len(whole.leaves())} checkpoints, {len(whole.rows())} rows of metrics")
        first_kill = _kill_again_and_again(killed, trial, chance, first_commit_seconds, interval_seconds)
    finally:
        whole.end()
        killed.end()
    problem = compare(whole, killed, trial.steps, first_kill)
    if problem is None:
        compared = [step for step in killed.leaves() if step <= trial.steps]
        say(
            f"verify-resume: SAME BITS after {trial.kills} kills: every leaf at steps "
            f"{', '.join(map(str, compared))}, and every row of metrics"
        )
        return EXIT_DONE
    say(f"verify-resume: DIFFERENT: {problem}")
    return EXIT_FAILED


def _kill_again_and_again(
    run: TrialRun, trial: Trial, chance: random.Random, first_commit_seconds: float, interval_seconds: float
) -> int:
    """The run with its kills, to its end; the step that was the newest at the first kill after a commit."""
    first_kill = 0 if trial.kills else trial.steps
    for number in range(trial.kills):
        place = PLACES[number % len(PLACES)]
        before = run.newest()
        run.start()
        if place == "while starting":
            time.sleep(chance.uniform(0, first_commit_seconds))
        else:
            run.until(lambda before=before: run.newest() > before)  # type: ignore[misc]
            if place == "in a save":
                run.until(run.is_saving)
            else:
                time.sleep(chance.uniform(0, interval_seconds))
        victim = run.kill(chance)
        first_kill = first_kill or run.newest()
        say(
            f"verify-resume: kill {number + 1} of {trial.kills}: -9 to process {victim} {place}, "
            f"step {run.newest()} the newest committed"
        )
    if run.newest() < trial.steps:
        run.start()
        run.run_on()
    return first_kill


def compare(whole: TrialRun, killed: TrialRun, last_step: int, first_kill: int) -> str | None:
    """The first difference in words, None if there is none up to `last_step`."""
    expected_rows, rows = whole.rows(), killed.rows()
    different_rows = [
        step for step in sorted(expected_rows | rows) if step <= last_step and expected_rows.get(step) != rows.get(step)
    ]
    expected, found = whole.leaves(), killed.leaves()
    common = [step for step in expected if step in found and step <= last_step]
    if not common:
        return "no checkpoint of the same step in both runs"
    different = [step for step in common if expected[step] != found[step]]
    if not different and not different_rows:
        return None
    first = min(different[:1] + different_rows[:1])
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
    if first <= first_kill:
        lines.append(
            f"this is before the first kill (after step {first_kill}): two undisturbed runs would differ too. What the "
            "job does depends on more than its spec: a clock, an unseeded generator, the order of threads or of a set"
        )
    else:
        lines.append(
            "the runs were equal up to the first kill: the job keeps state outside its pytree (a random key that is "
            "split and not folded from the step, an iterator, an attribute), or its init is taken for its state"
        )
    return "\n  ".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Run the command; its exit code is 1 if the bits differ."""
    parser = Parser("runner verify-resume")
    parser.add_argument("spec", metavar="SPEC")
    parser.add_argument("--steps", type=int, default=30, metavar="N", help="how far both runs go; default 30")
    parser.add_argument("--kills", type=int, default=3, metavar="K", help="default 3")
    parser.add_argument("--processes", type=int, default=1, metavar="P", help="of the job, on this machine; default 1")
    parser.add_argument(
        "--devices-per-process",
        type=_numbers,
        metavar="M[,M...]",
        help="fake M CPU devices in each process; of several numbers each start of the killed run has the next one",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the moments of the kills; default 0")
    parser.add_set()
    parsed = parser.parse_args(arguments)
    if parsed.kills < 0 or parsed.processes < 1 or parsed.steps < parsed.kills + 3:
        given = f"--steps {parsed.steps} --kills {parsed.kills} --processes {parsed.processes}"
        raise InvalidError(f"{given}: needs a process, no negative number of kills, and 3 steps more than kills")
    options = [word for override in parsed.set for word in ("--set", override)]
    trial = Trial(
        (parsed.spec, *options),
        parsed.steps,
        parsed.kills,
        parsed.processes,
        parsed.devices_per_process,
        parsed.seed,
        _output_keys(parsed.spec, parsed.set),
    )
    with tempfile.TemporaryDirectory(prefix="verify-resume-") as scratch:
        return verify(trial, Path(scratch))


def _numbers(text: str) -> list[int]:
    """Positive numbers with commas between them; argparse says which option has others."""
    words = text.split(",")
    if not all(word.isdecimal() and int(word) for word in words):
        raise argparse.ArgumentTypeError(f"{text!r}: needs numbers of devices, such as 4 or 8,2,1")
    return [*map(int, words)]


def _output_keys(spec: str, overrides: Sequence[str]) -> list[str]:
    """Dotted keys of the spec that say where the job writes beside its directory. Raises `InvalidError`."""
    document = load_document(spec, overrides)
    validate_spec(document)
    job_class: type[RestoreableJob] = load_job_class(document, RestoreableJob)
    return [f"config.{key}" for key in sorted(validate_config(document, job_class.Config).output_keys)]
