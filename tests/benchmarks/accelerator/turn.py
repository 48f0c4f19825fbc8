"""Processes that are held open and take turns, so that programs that may not share a process share a device fairly.

The player writes one JSON a line to what was its standard output: `Ready`, then for each line that it reads (a number
of steps) a `Turn`, then, when its input ends, `Ending`. All else that it prints goes to its log.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from runner.process import bind_to_parent
from tests.benchmarks.accelerator.size import ROOT

_TAIL_LINES = 12


@dataclass(frozen=True)
class Ready:
    """Said once, right before the first step.

    Attributes:
        planned_bytes: of the compiled step, by its compiler; None where that is not known.
        flops_per_token: of the model, by formula; None for a peer, whose model is the same.
        version: of the library that a peer is written in.
    """

    parameters: int
    planned_bytes: int | None = None
    flops_per_token: float | None = None
    version: str = ""


@dataclass(frozen=True)
class Turn:
    """One slice of steps, done and waited for."""

    seconds: float


@dataclass(frozen=True)
class Ending:
    """Said at the end. None is what nobody has counted."""

    peak_bytes: int | None = None
    fingerprint: str | None = None


Record = TypeVar("Record", Ready, Turn, Ending)


class PlayerError(Exception):
    """A player has ended; the message is the end of what it printed."""


class Seat:
    """The player's side. To be made before anything is printed."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def tell(self, record: Ready | Turn | Ending) -> None:
        """Write one record."""
        self._out.write(json.dumps(asdict(record)) + "\n")
        self._out.flush()

    def ask(self) -> int | None:
        """Wait for the next turn; how many steps it has, None at the end."""
        line = sys.stdin.readline()
        return int(line) if line.strip() else None


class Player:
    """The other side: a process of that kind. Raises `PlayerError` wherever it has ended instead of answering."""

    def __init__(self, command: Sequence[str], variables: Mapping[str, str], log: Path):
        self._log = log
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                bind_to_parent(command),
                cwd=ROOT,
                env=dict(variables),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
            )
        self.turns: list[float] = []  # seconds of a step, by turn
        self.ready = self._hear(Ready)

    def turn(self, num_steps: int) -> None:
        """Have it make so many steps, and note what each took."""
        self._say(f"{num_steps}\n")
        self.turns.append(self._hear(Turn).seconds / num_steps)

    def end(self) -> Ending:
        """Hear what it says at the end, and let it go."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        ending = self._hear(Ending)
        self._process.wait()
        return ending

    def __enter__(self) -> "Player":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._error() from None

    def _hear(self, kind: type[Record]) -> Record:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._error()
        return kind(**json.loads(line))

    def _error(self) -> PlayerError:
        code = self._process.wait()
        return PlayerError(f"ended with {code}: {tail(self._log.read_text(errors='replace'))}")


def tail(text: str) -> str:
    """The end of what a process has printed."""
    return "\n".join(text.strip().splitlines()[-_TAIL_LINES:])
