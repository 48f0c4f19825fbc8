"""Runs of a sweep as processes of this machine, each `python -m launch local` or `tpu-vm`.

The state of a run is that of its directory: a finished run costs no process, and a run that was interrupted resumes. A
process ends with this one, by kill -9 too (`runner.process`), and saves first; its successor waits until it has ended.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from types import FrameType

from launch.options import set_arguments
from launch.sweep.halving import HalvingRule, HalvingState, decide
from launch.sweep.points import SEED, SweepPlan, format_name, format_setting_line
from launch.sweep.record import SweepRecord
from runner.attempts.take_over import describe_running_attempt
from runner.console import format_duration, say
from runner.errors import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED, EXIT_RETRYABLE
from runner.history.sweep import RungReader, SweepRun
from runner.process import list_stop_signals, start_process

_POLL_SECONDS = 0.1
_READ_SECONDS = 0.5  # between two readings of the rows
_MAX_DEATHS = 5  # of a run's process in a row, by signals from outside
_TAIL_BYTES = 1 << 14


class State(Enum):
    """State of a run."""

    WAITING = "waiting"  # it has a start before it
    RUNNING = "running"
    DONE = "done"
    DIVERGED = "diverged"
    STOPPED = "stopped"  # by the rule
    FAILED = "failed"
    RETRYABLE = "retryable"  # the infrastructure failed, after all restarts

    @property
    def is_final(self) -> bool:
        """True if this command does not start the run again."""
        return self not in (State.WAITING, State.RUNNING)

    @property
    def is_result(self) -> bool:
        """True if no later command starts the run again."""
        return self in (State.DONE, State.DIVERGED, State.STOPPED)


@dataclass
class _Child:
    """A run, and its process while there is one."""

    run: SweepRun
    state: State
    process: "subprocess.Popen[bytes] | None" = None
    slot: int = 0
    began: float = 0.0
    log_bytes: int = 0  # of the log before this start
    is_told: bool = False  # the process was asked to stop
    num_deaths: int = 0
    is_announced: bool = False  # it waits for another process on its directory, and a line says so
    value: float | None = None
    reason: str = ""


@dataclass
class LocalSweep:
    """The runs of one sweep on this machine."""

    record: SweepRecord
    plan: SweepPlan
    rule: HalvingRule | None
    engine: str
    engine_words: Sequence[str]
    devices: Sequence[str | None]  # CUDA_VISIBLE_DEVICES of each slot; None to leave it alone
    _children: list[_Child] = field(default_factory=list, init=False)
    _readers: dict[str, RungReader] = field(default_factory=dict, init=False)
    _signals: list[int] = field(default_factory=list, init=False)
    _seconds: list[float] = field(default_factory=list, init=False)  # of the runs that have ended here

    @property
    def total(self) -> int:
        """Number of runs at the end."""
        return self.plan.number or 0 if self.plan.searched else len(self.record.sweep.runs)

    def run(self) -> int:
        """Make all runs, and return the exit code."""
        self.record.logs.mkdir(parents=True, exist_ok=True)
        for number in list_stop_signals():
            signal.signal(number, self._note_signal)
        self._children = [self._open(run) for run in self.record.sweep.runs]
        num_ended = sum(child.state.is_final for child in self._children)
        where, logs = self.record.store.url, self.record.logs
        say(f"sweep: {self.total} runs in {where}, {num_ended} of them have ended; logs: {logs}")
        halving, read_at = self._decide(), time.monotonic()
        while True:
            if self._signals:
                self._forward()
            ended = [
                child for child in self._children if child.process is not None and child.process.poll() is not None
            ]
            for child in ended:
                self._end(child)
            if ended or time.monotonic() - read_at >= _READ_SECONDS:
                halving, read_at = self._decide(), time.monotonic()
                self._stop_early(halving)
                self._start(halving)
            running = [child for child in self._children if child.process is not None]
            if not running and (self._signals or not self._find_candidates(halving)):
                break
            time.sleep(_POLL_SECONDS)
        self._children.sort(key=lambda child: child.run.name)
        states = [child.state for child in self._children]
        if State.FAILED in states:
            return EXIT_FAILED
        if self._signals:
            return EXIT_PREEMPTED if not all(state.is_result for state in states) else EXIT_DONE
        return EXIT_RETRYABLE if State.RETRYABLE in states else EXIT_DONE

    def list_outcomes(self) -> list[tuple[SweepRun, str, float | None]]:
        """Return each run with its state and its metric."""
        return [
            (child.run, child.state.value, child.run.stopped_value if child.state is State.STOPPED else child.value)
            for child in self._children
        ]

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    def _forward(self) -> None:
        """Ask all processes to stop; at a repeated signal for a second time, which ends them at once."""
        for child in self._children:
            if child.process is not None and child.process.poll() is None and not child.is_told:
                child.process.send_signal(signal.SIGTERM)
                child.is_told = True
        if len(self._signals) > 1:
            del self._signals[1:]
            for child in self._children:
                if child.process is not None and child.process.poll() is None:
                    child.process.send_signal(signal.SIGTERM)

    def _open(self, run: SweepRun) -> _Child:
        """Return a run in the state that its directory shows."""
        child = _Child(run, State.WAITING)
        self._read_state(child)
        return child

    def _read_state(self, child: _Child) -> None:
        run = child.run
        if run.stopped_step is not None:
            child.state, child.value = State.STOPPED, run.stopped_value
        elif self.record.is_done(run):
            child.state, child.value = State.DONE, self.record.read_metric(run)
        elif (reason := self.record.find_divergence(run)) is not None:
            child.state, child.reason = State.DIVERGED, reason

    def _decide(self) -> HalvingState:
        """Read the rows of the runs, and record which of them the rule stops."""
        if self.rule is None:
            return HalvingState({}, None, ())
        for child in self._children:
            name = child.run.name
            if name not in self._readers:
                self._readers[name] = RungReader(self.record.open_run(name), self.record.sweep.metric, self.rule.steps)
            if len(self._readers[name].values) < len(self.rule.steps):
                with contextlib.suppress(OSError):  # the run reports it
                    self._readers[name].read()
        values = {name: reader.values for name, reader in self._readers.items()}
        settings: dict[str, list[str]] = {}
        for child in self._children:
            varied = {key: value for key, value in child.run.values.items() if key != SEED}
            settings.setdefault(format_setting_line(varied), []).append(child.run.name)
        diverged = [child.run.name for child in self._children if child.state is State.DIVERGED]
        found = decide(self.rule, [*settings.values()], values, diverged, self.record.sweep.is_maximised)
        new = {
            run.name: replace(run, stopped_step=step, stopped_value=values[run.name][step])
            for run in self.record.sweep.runs
            if (step := found.stopped.get(run.name)) is not None and run.stopped_step is None
        }
        if new:
            runs = tuple(new.get(run.name, run) for run in self.record.sweep.runs)
            self.record.write(replace(self.record.sweep, runs=runs))
            for child in self._children:
                if child.run.name in new:
                    child.run = new[child.run.name]
                    if child.process is None:
                        child.state = State.STOPPED
                    value = f"{self.record.sweep.metric} {child.run.stopped_value:.6g}"
                    self._say(child, f"stopped by the rule at step {child.run.stopped_step}, {value}")
        return found

    def _stop_early(self, halving: HalvingState) -> None:
        """Ask the processes to stop whose runs are out, or make way for one that has not reached the rung."""
        waits = len(self._find_candidates(halving)) > 0
        for child in self._children:
            if child.process is None or child.is_told:
                continue
            is_beyond = halving.undecided is not None and child.run.name not in halving.missing
            if child.run.stopped_step is not None or (is_beyond and waits):
                child.process.send_signal(signal.SIGTERM)
                child.is_told = True

    def _find_candidates(self, halving: HalvingState) -> list[_Child]:
        """Return the runs that may start, in order; a search is asked for the next one."""
        waiting = [child for child in self._children if child.state is State.WAITING]
        if halving.undecided is not None:
            waiting = [child for child in waiting if child.run.name in halving.missing]
        if not waiting and self.plan.searched and not self._signals and len(self._children) < self.total:
            # Trial i knows the results of the first i - K + 1 trials, in order of number, and no others.
            number = len(self._children)
            known = self._children[: max(number - len(self.devices) + 1, 0)]
            if all(child.state.is_result for child in known):
                trials = [(dict(child.run.values), child.value) for child in known]
                setting = self.plan.ask(number, trials, self.record.sweep.is_maximised)
                run = SweepRun(format_name(number), setting)
                self.record.add_run(run)
                self._children.append(_Child(run, State.WAITING))
                waiting = [self._children[-1]]
        return waiting

    def _start(self, halving: HalvingState) -> None:
        """Start runs in the free slots."""
        if self._signals:
            return
        while True:
            used = {child.slot for child in self._children if child.process is not None}
            free = [slot for slot in range(len(self.devices)) if slot not in used]
            ready = [child for child in self._find_candidates(halving) if self._is_free(child)] if free else []
            if not ready:
                return
            child, child.slot = ready[0], free[0]
            words = [self.record.spec, *self.engine_words, *set_arguments(self.record.list_overrides(child.run))]
            devices = self.devices[child.slot]
            variables = dict(os.environ) | ({} if devices is None else {"CUDA_VISIBLE_DEVICES": devices})
            log = self.log_path(child.run)
            child.log_bytes = log.stat().st_size if log.exists() else 0
            with log.open("ab") as output:
                child.process = start_process([sys.executable, "-m", "launch", self.engine, *words], variables, output)
            child.state, child.is_told, child.began, child.is_announced = State.RUNNING, False, time.monotonic(), False
            self._say(child, f"started: {format_setting_line(child.run.values)}")

    def _is_free(self, child: _Child) -> bool:
        """Return True if no process works in the directory of a run, such as one of a sweep that was killed."""
        if self.engine != "local":  # the command attaches to it
            return True
        with contextlib.suppress(OSError):  # the run reports it
            if (other := describe_running_attempt(self.record.open_run(child.run.name))) is not None:
                if not child.is_announced:
                    self._say(child, f"waits for {other}")
                child.is_announced = True
                return False
        return True

    def log_path(self, run: SweepRun) -> Path:
        """Return the file of a run's output."""
        return self.record.logs / f"{run.name}.log"

    def _end(self, child: _Child) -> None:
        """Note the end of a process."""
        assert child.process is not None, "only runs with a process end"
        code, child.process, child.state = child.process.wait(), None, State.WAITING
        seconds = time.monotonic() - child.began
        self._read_state(child)
        if child.state is State.WAITING and not child.is_told:
            child.num_deaths += 1
            if code in (EXIT_DONE, EXIT_PREEMPTED) or code < 0:  # something else stopped it
                child.state = State.FAILED if child.num_deaths >= _MAX_DEATHS else State.WAITING
            else:
                child.state = State.RETRYABLE if code == EXIT_RETRYABLE else State.FAILED
        elif child.state is State.WAITING and code not in (EXIT_DONE, EXIT_PREEMPTED, EXIT_RETRYABLE) and code > 0:
            child.state = State.FAILED
        metric = self.record.sweep.metric
        match child.state:
            case State.DONE:
                self._seconds.append(seconds)
                self._say(child, f"done{'' if child.value is None else f', {metric} {child.value:.6g}'}")
            case State.DIVERGED:
                self._seconds.append(seconds)
                self._say(child, f"diverged: {child.reason}")
            case State.FAILED | State.RETRYABLE:
                child.reason = self._read_reason(child)
                self._say(child, f"{child.state.value} with {code}: {child.reason}; log: {self.log_path(child.run)}")
            case State.WAITING:
                self._say(child, f"stopped with {code}, goes on later")

    def _read_reason(self, child: _Child) -> str:
        """Return the line of the log that says why a run failed."""
        with self.log_path(child.run).open("rb") as log:
            log.seek(max(child.log_bytes, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
        own = [line for line in lines if not line.startswith("launch: ")]
        return (own or lines or ["its log is empty"])[-1][:300]

    def _say(self, child: _Child, event: str) -> None:
        """Print a line about a run, with the number of runs that have ended and the time that is left."""
        num_ended = sum(each.state.is_final for each in self._children)
        left = ""
        if self._seconds and num_ended < self.total:
            mean = sum(self._seconds) / len(self._seconds)
            left = f", about {format_duration(mean * (self.total - num_ended) / len(self.devices))} left"
        say(f"sweep: {child.run.name}: {event} ({num_ended} of {self.total} ended{left})")
