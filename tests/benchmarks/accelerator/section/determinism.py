"""Bits of two programs compiled apart, with the flags of `topology.deterministic` and without, and what they cost."""

import os
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from runner.accelerator import DETERMINISTIC_FLAGS, has_gpu
from tests.benchmarks.accelerator.result import Figure
from tests.benchmarks.accelerator.section.speed import SHARED, open_trainer
from tests.benchmarks.accelerator.size import Model, Setting
from tests.benchmarks.accelerator.turn import Player

WITH, WITHOUT = "with the flags", "without"
_VALUES = {WITH: "true", WITHOUT: "false"}


def measure(setting: Setting, name: str) -> Iterator[Figure]:
    """First the cost, of one program of each kind in turns; then a second program of each, for its bits."""
    model, scratch = setting.sizes.models[name], Path(setting.scratch)
    bits = {}
    num_steps = max(1, model.steps // 2)  # of a turn
    with ExitStack() as stack:
        players = {kind: stack.enter_context(_open(model, scratch, kind, 1)) for kind in _VALUES}
        for _ in range(model.rounds + 1):
            for player in players.values():
                player.turn(num_steps)
        turns = {kind: player.turns[1:] for kind, player in players.items()}
        for kind, seconds in turns.items():
            yield Figure(f"seconds of a step {kind}", statistics.median(seconds), "seconds")
        yield _cost(turns, DETERMINISTIC_FLAGS["gpu" if has_gpu(os.environ) else "cpu"])
        for kind, player in players.items():
            bits[kind] = player.end().fingerprint
    num_steps *= model.rounds + 1
    for kind in _VALUES:
        with _open(model, scratch, kind, 2) as player:
            player.turn(num_steps)
            again = player.end().fingerprint
        about = f"of the state after {num_steps} steps, each compiled with an empty cache: {bits[kind]}, {again}"
        yield Figure(f"two programs {kind} give the same bits", bits[kind] == again, "", about)


def _cost(turns: dict[str, list[float]], flags: Sequence[str]) -> Figure:
    if not flags:
        return Figure("cost of the flags", None, "share", "the runner sets none here: both programs are the same")
    ratios = [slow / fast for slow, fast in zip(turns[WITH], turns[WITHOUT], strict=True)]
    about = f"{' '.join(flags)}; median over pairs of turns, {min(ratios) - 1:+.1%} to {max(ratios) - 1:+.1%}"
    return Figure("cost of the flags", statistics.median(ratios) - 1, "share", about)


def _open(model: Model, scratch: Path, kind: str, number: int) -> Player:
    """A process that compiles anew: with a cache of its own, since a program that was kept is the same program."""
    name = f"{_VALUES[kind]}_{number}"
    command = open_trainer(model, scratch, name, f"topology.deterministic={_VALUES[kind]}")
    variables = os.environ | SHARED | {"RUNNER_CACHE": str(scratch / f"cache_{name}")}
    return Player(command, variables, scratch / f"{name}.log")
