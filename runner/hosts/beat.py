"""What every process reports each second, and the one line that says what is wrong by all reports."""

import collections
from collections.abc import Collection
from dataclasses import dataclass

from runner.hosts.progress import DATA, STEP


@dataclass(frozen=True)
class Beat:
    """One report of one process.

    Attributes:
        number: one more each second; a process whose number stays is frozen or cut off.
        host: its machine's name.
        phase, step: of its training thread; `step` is the last one completed.
        seconds: since that thread entered the phase, or completed the step.
        is_overdue: whether that is longer than the phase, or a step, may take.
        suspects_peer: whether a collective has failed there.
    """

    number: int
    host: str
    phase: str
    step: int
    seconds: float
    is_overdue: bool
    suspects_peer: bool


def is_overdue(beats: Collection[Beat], seconds_since_data: float, step_deadline_seconds: float) -> bool:
    """Whether one of them is overdue for no reason that is known.

    A step lasts on every host while one of them waits for its data, and for a step's time after that:
    `seconds_since_data` is how long ago one was last seen at it.
    """
    is_fed = seconds_since_data > step_deadline_seconds
    return any(beat.is_overdue and (is_fed or beat.phase != STEP.name) for beat in beats)


def waits_for_data(beats: Collection[Beat]) -> bool:
    """Whether one of them does."""
    return any(beat.phase == DATA.name for beat in beats)


def describe(beats: dict[int, Beat], silent: dict[int, str]) -> str:
    """One line: who is silent and how, who is overdue in which phase, and in which phases the others are."""
    parts = []
    for process, how in sorted(silent.items()):
        beat = beats.get(process)
        last = "" if beat is None else f", last seen {_where(beat)}"
        parts.append(f"{_name([process], beat)} {how}{last}")
    groups: dict[tuple[bool, str], list[int]] = collections.defaultdict(list)
    for process, beat in sorted(beats.items()):
        if process not in silent:
            groups[not beat.is_overdue, _where(beat)].append(process)
    for (is_in_time, where), processes in sorted(groups.items()):
        beat = beats[processes[0]]
        name, verb = (_name(processes, beat), "is") if len(processes) == 1 else (_name(processes, None), "are")
        late = "" if is_in_time else ", past the deadline"
        parts.append(f"{name} {verb} {where} for {beat.seconds:.0f} s{late}")
    return "the job does not go on: " + "; ".join(parts)


def _name(processes: list[int], beat: Beat | None) -> str:
    host = f" ({beat.host})" if beat is not None else ""
    return f"process{'es' * (len(processes) > 1)} {', '.join(map(str, processes))}{host}"


def _where(beat: Beat) -> str:
    """The phase, and the step: the one in hand, which is the one after the last completed."""
    return f"in step {beat.step + 1}" if beat.phase == STEP.name else f"in {beat.phase} at step {beat.step}"
