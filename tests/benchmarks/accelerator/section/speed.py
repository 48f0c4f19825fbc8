"""MFU of a model beside a compiled peer in torch, step by step on the same shapes, in turns on the same device."""

import json
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import numpy as np

from runner.accelerator import find_chip
from tests.benchmarks.accelerator.result import Figure
from tests.benchmarks.accelerator.size import Model, Setting
from tests.benchmarks.accelerator.turn import Ending, Player, PlayerError

OURS, PEER = "ours", "torch"
_NUM_TOKENS = 10_000_000  # a validation split of 0.0005 of them holds a window of either model
# Leave the device's memory to who else is on it, and the CPUs: who waits for its turn, or for a thread, does not spin.
SHARED = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "OMP_WAIT_POLICY": "passive"}


def measure(setting: Setting, name: str) -> Iterator[Figure]:
    """Step times, their ratio, MFU, memory. Where there is no peer, or it fails, of ours only, and that is said."""
    model, scratch = setting.sizes.models[name], Path(setting.scratch)
    commands = {OURS: open_trainer(model, scratch), PEER: _peer_command(setting, model)}
    with ExitStack() as stack:
        players: dict[str, Player] = {}
        for who, command in commands.items():
            try:
                player = Player(command, os.environ | SHARED, scratch / f"{who}.log")
            except (PlayerError, OSError) as error:
                if who == OURS:
                    raise
                yield Figure(f"{PEER}: seconds of a step", None, "seconds", f"no compiled torch here: {error}")
                continue
            players[who] = stack.enter_context(player)
            yield Figure(f"{who}: parameters", player.ready.parameters, "", player.ready.version)
            if who == OURS:
                yield from _alone(setting, model, player)
        yield from _play(setting, model, players)


def _alone(setting: Setting, model: Model, ours: Player) -> Iterator[Figure]:
    """What is known of ours before the peer, which may take long to compile."""
    for _ in range(2):  # the first warms up
        ours.turn(model.steps)
    yield Figure("ours alone: seconds of a step", ours.turns[-1], "seconds", f"one turn of {model.steps} steps")
    yield _mfu("ours alone", setting.device, model, ours.ready.flops_per_token, ours.turns[-1])


def _play(setting: Setting, model: Model, players: dict[str, Player]) -> Iterator[Figure]:
    """All rounds, and what they come to."""
    for _ in range(model.rounds + 1):  # the first compiles and warms up
        for who, player in list(players.items()):
            try:
                player.turn(model.steps)
            except PlayerError as error:
                if who == OURS:
                    raise
                yield Figure(f"{PEER}: seconds of a step", None, "seconds", str(error))
                del players[who]
    seconds = {who: player.turns[-model.rounds :] for who, player in players.items()}
    flops = players[OURS].ready.flops_per_token
    for who, turns in seconds.items():
        about = f"median of {model.rounds} turns of {model.steps} steps, {min(turns):.4g} to {max(turns):.4g}"
        yield Figure(f"{who}: seconds of a step", statistics.median(turns), "seconds", about)
        yield _mfu(who, setting.device, model, flops, statistics.median(turns))
    if PEER in seconds:
        ratios = [peer / mine for mine, peer in zip(seconds[OURS], seconds[PEER], strict=True)]
        about = f"{PEER} / {OURS}, median over pairs of turns, {min(ratios):.3f} to {max(ratios):.3f}"
        yield Figure("speed beside the peer", statistics.median(ratios), "times", about)
    for who, player in players.items():
        yield from _memory(who, player.ready.planned_bytes, player.end())


def open_trainer(model: Model, scratch: Path, who: str = OURS, *options: str) -> list[str]:
    """The command of the runner's own loop for a model, with as many steps as it may ever be asked for."""
    arguments = model.arguments(scratch / who, write_tokens(model, scratch), 10**6, *options)
    return [sys.executable, "-m", "tests.benchmarks.accelerator.trainer", *arguments]


def write_tokens(model: Model, scratch: Path) -> Path:
    """A file of random tokens below the vocabulary, the same each time."""
    path = scratch / f"{model.name}.bin"
    if not path.exists():
        tokens = np.random.default_rng(0).integers(model.shape.vocabulary_size, size=_NUM_TOKENS)
        path.write_bytes(tokens.astype("<u2").tobytes())
    return path


def _peer_command(setting: Setting, model: Model) -> Sequence[str]:
    return [
        setting.torch_python,
        "-m",
        "tests.benchmarks.accelerator.torch_gpt",
        json.dumps(asdict(model.shape)),
    ]


def _mfu(who: str, device: str, model: Model, flops: float | None, seconds: float) -> Figure:
    chip = find_chip(device)
    if chip is None or chip.speeds is None or flops is None:
        return Figure(f"{who}: MFU", None, "share", f"the peak of {device} is not known")
    achieved = flops * model.shape.tokens_per_step / seconds
    about = f"{flops:,.0f} FLOPs a token, {model.shape.tokens_per_step:,} tokens a step"
    return Figure(f"{who}: MFU", achieved / chip.speeds.flops_per_second, "share", about)


def _memory(who: str, planned: int | None, ending: Ending) -> Iterator[Figure]:
    about = "" if ending.peak_bytes is not None else "not counted on this device"
    yield Figure(f"{who}: peak memory", ending.peak_bytes, "bytes", about)
    if planned is not None:
        yield Figure(f"{who}: memory of the step by its compiler", planned, "bytes")
