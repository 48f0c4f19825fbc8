"""Replay: gradients of a step are computed twice, to find a device that computes wrong numbers without an error.

`train.replay_every_steps` sets the interval. The gradients of a replayed step are computed twice by one compiled
program. Where several groups of devices have whole copies of the parameters, the second computation gives every shard
of the batch to the next group. Digests of the gradients of each shard, before any sum over shards, must be equal,
because the same program on the same numbers gives the same bits. If they differ, the update is not applied, and a third
computation, on the next group, finds out which of the two was wrong. The optimizer and the sums over devices are not
replayed.

The program of the step takes `ReplayInputs`, moves the shards, and returns the digests (`runner.train.step`). The
digest of an array is the sum of its words modulo 2^32, weighted by position. It does not depend on the order of
additions, and every flip of a single bit changes it. `ReplayedStep` runs the program and compares the digests.
`runner.train.features.replay` says which steps are replayed, and ends the run if a device is defective.

Shape legend: N data shards whose gradients are computed separately (`reduction.list_gradient_shards`), L arrays of
gradients.
"""

import contextlib
import contextvars
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from runner.checkpoint.fingerprint import format_leaf_name
from runner.errors import InvalidError
from runner.metrics.meta import REPLAY_DIGESTS, Meta
from runner.optim.groups import split_frozen
from runner.parallel.reduction import list_gradient_shards
from runner.train.state import TrainState

UPDATE, COMPARE, DIGEST = range(3)  # what a replayed step does, see `ReplayInputs`
_DIGEST_FACTORS = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1  # primes, one for each axis of an array


# Inputs and digests of a replayed step, to be traced.


@struct.dataclass
class ReplayInputs:
    """Inputs of a step whose gradients can be compared with those of another computation. Traced."""

    # `UPDATE`: a usual step; `COMPARE`: apply the update only if the digests of the gradients are `expected`, and
    # else return the unchanged state; `DIGEST`: return the unchanged state. int32.
    action: jax.Array
    # Number of shards (0 to 2) by which the computation is moved: shard n is computed by the devices that hold
    # shard n + shift, modulo N. int32.
    shift: jax.Array
    expected: jax.Array  # digests by shard and array of gradients; uint32 (N, L)


_current_replay: contextvars.ContextVar[ReplayInputs | None] = contextvars.ContextVar("replay", default=None)


@contextlib.contextmanager
def use_replay_inputs(replay: ReplayInputs | None) -> Iterator[None]:
    """Give these inputs to the train step that is traced inside the context."""
    token = _current_replay.set(replay)
    try:
        yield
    finally:
        _current_replay.reset(token)


def get_replay_inputs() -> ReplayInputs | None:
    """Return the inputs of `use_replay_inputs`; None outside of it, for a step that is not replayed."""
    return _current_replay.get()


def compute_digests(grads: Any) -> jax.Array:
    """Return a digest of each array of float32 gradients; uint32 (L)."""

    def compute_digest(grad: jax.Array) -> jax.Array:
        words, weights = lax.bitcast_convert_type(grad, jnp.uint32), jnp.ones(grad.shape, jnp.uint32)
        for axis, factor in zip(range(grad.ndim), _DIGEST_FACTORS, strict=False):
            weights += jnp.uint32(factor) * lax.broadcasted_iota(jnp.uint32, grad.shape, axis)
        # Odd weights keep each bit of a word in the sum.
        return jnp.sum(words * (2 * weights + 1), dtype=jnp.uint32)

    return jnp.stack([compute_digest(grad) for grad in jax.tree.leaves(grads)])


def get_digests(meta: Meta) -> jax.Array:
    """Return the digests in the meta of a step. Raises `InvalidError` if it has none."""
    if REPLAY_DIGESTS not in meta:
        raise InvalidError(
            "train.replay_every_steps compares the gradients of BaseTrainer.train_step, and train_step of the job does "
            "not call it; call it, or leave the key out"
        )
    digests: jax.Array = meta[REPLAY_DIGESTS]
    return digests


def make_abstract_replay(abstract: TrainState, mesh: Mesh, is_ordered: bool) -> ReplayInputs:
    """Return shapes, dtypes and sharding of the inputs of a step that can be replayed; see `BatchLayout.is_ordered`."""
    replicated = NamedSharding(mesh, PartitionSpec())
    num_shards = len(list_gradient_shards(mesh.abstract_mesh, is_ordered))
    shape = num_shards, len(_list_trained_names(abstract))
    scalar: Any = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated)
    digests: Any = jax.ShapeDtypeStruct(shape, jnp.uint32, sharding=replicated)
    return ReplayInputs(scalar, scalar, digests)


def _list_trained_names(state: TrainState) -> list[str]:
    """Return the names of the parameters that get gradients, in the order of the digests of a replayed step."""
    trained, _ = split_frozen(state.params, state.opt_state)
    return [format_leaf_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(trained)]


# Replays, on the host.


@dataclass(frozen=True)
class DeviceFault:
    """Result of a replay in which two computations of the same gradients differ."""

    parameters: list[str]  # names of those whose gradients differ
    devices: list[jax.Device]  # they include the defective one

    def __str__(self) -> str:
        count = len(self.parameters) - 1
        more = f" and {count} more" if count else ""
        names = ", ".join(f"{device.id} (process {device.process_index})" for device in self.devices)
        which = f"device {names} is" if len(self.devices) == 1 else f"one of the devices {names} is"
        return f"the gradient of {self.parameters[0]}{more} differs when it is computed again; {which} defective"


class ReplayedStep:
    """Compiled train step that can compute the gradients of a step again. All calls are made on every process."""

    def __init__(self, executable: jax.stages.Compiled, abstract: TrainState, mesh: Mesh, is_ordered: bool):
        """Prepare the inputs of `executable`, the compiled step of a layout that `is_replayable`."""
        self._run, self._names = executable, _list_trained_names(abstract)
        flat = mesh.devices.flat
        shards = list_gradient_shards(mesh.abstract_mesh, is_ordered)
        self._groups = [[flat[index] for index in shard] for shard in shards]
        inputs = make_abstract_replay(abstract, mesh, is_ordered)
        no_digests = _replicate(0, inputs.expected)
        self._update, self._moved, self._third = (
            ReplayInputs(_replicate(action, inputs.action), _replicate(shift, inputs.shift), no_digests)
            for action, shift in ((UPDATE, 0), (DIGEST, 1), (DIGEST, 2))
        )
        self._compare = _replicate(COMPARE, inputs.action)

    def run(
        self, state: TrainState, batch: Mapping[str, jax.Array], key: jax.Array
    ) -> tuple[TrainState, jax.Array, Any]:
        """Make a step without replay and return (state, loss, meta). Does not wait for the device."""
        state, loss, meta, _ = self._run(state, batch, key, self._update)
        return state, loss, meta

    def compare(
        self, state: TrainState, batch: Mapping[str, jax.Array], key: jax.Array
    ) -> tuple[TrainState, jax.Array, Any, DeviceFault | None]:
        """Make a step whose gradients are computed twice, and wait for it.

        Returns (state, loss, meta, None), or the unchanged state and the fault if the gradients differ.
        """
        state, _, _, moved = self._run(state, batch, key, self._moved)
        inputs = ReplayInputs(self._compare, self._update.shift, moved)
        state, loss, meta, first = self._run(state, batch, key, inputs)
        first, moved = np.asarray(first), np.asarray(moved)
        if np.array_equal(first, moved):
            return state, loss, meta, None
        state, _, _, third = self._run(state, batch, key, self._third)
        names = [name for name, differs in zip(self._names, (first != moved).any(axis=0), strict=True) if differs]
        digests = first, moved, np.asarray(third)
        devices = [device for group in find_faulty_groups(digests) for device in self._groups[group]]
        return state, loss, meta, DeviceFault(names, devices)


def _replicate(value: int, abstract: Any) -> jax.Array:
    whole = np.full(abstract.shape, value, abstract.dtype)
    return jax.make_array_from_callback(whole.shape, abstract.sharding, lambda index: whole[index])


def find_faulty_groups(digests: Sequence[np.ndarray]) -> list[int]:
    """Return the groups of devices that include the one that made the first two of three computations differ.

    The `digests` of each are uint32 (N, L); in number k, group n + k, modulo N, computed shard n.
    """
    num_groups = len(digests[0])
    suspects = []
    for shard, (first, moved, third) in enumerate(zip(*digests, strict=True)):
        if np.array_equal(first, moved):
            continue
        groups = [(shard + shift) % num_groups for shift in range(3)]
        if np.array_equal(moved, third):
            suspects.append({groups[0]})
        elif np.array_equal(first, third):
            # With two groups the third computation runs on the same group as the first, which may be wrong each time.
            suspects.append({groups[1]} if num_groups > 2 else {*groups})
        else:
            suspects.append({*groups})
    return sorted(set.intersection(*suspects) or set.union(*suspects))
