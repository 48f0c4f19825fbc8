"""Hooks of a spec, made and checked before any device is used, and their counters in the train state.

The hook state is an auxiliary state: replicated, unchanged by the train step, and read and replaced by the training
thread between two steps. A state may be saved between two hook calls of one step, if the job is asked to stop during
the evaluation. The record of calls (`FiredCalls`) then tells the next attempt which calls are missing.
"""

import base64
import functools
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np

from runner.attempts.layout import RunResult
from runner.errors import InvalidError
from runner.hook.hooks import Hook, Observer, SeenJob
from runner.spec import Document, HookEntry, Trajectory, hash_record, list_former_paths, load_class, validate_config
from runner.train.auxiliary import AuxiliaryState
from runner.train.state import TrainState

_FIRED = "fired"
_COUNTERS_MAX_BYTES = 64 * 1024  # per hook, since process 0 sends its counters to all processes by the coordinator
_KINDS = "biuf"  # numpy kinds: bool, int, unsigned, float
_MAX_ITEM_BYTES = 4
STATE_NAME = "hooks"  # of the auxiliary state; also the key in the spec and in the trajectory


@dataclass(frozen=True)
class FiredCalls:
    """Last calls that the counters include. All values but the last are steps; 0: none yet.

    The field names are leaf names in checkpoints (`riders.hooks.fired.<field>`).
    """

    row: int = 0  # last step for which `on_row` was called
    evaluation: int = 0  # last step for which `on_evaluation` was called
    asked: int = 0  # last step for which a hook requested an evaluation
    stopped: int = 0  # `digest` of the hook that has ended the run; 0: none has


@dataclass(frozen=True)
class HookState:
    """Hook state on the host."""

    fired: FiredCalls  # record of the calls that the counters include
    counters: Mapping[str, Any]  # counters by hook name, of the hooks that have some

    @classmethod
    def from_arrays(cls, arrays: Any) -> "HookState":
        """Return a copy of the arrays of a train state, whose memory the next step overwrites. Waits for the device."""
        # Copied, because device_get may return views of device memory on CPUs.
        copies = jax.tree.map(np.array, jax.device_get(arrays))
        fired = FiredCalls(**{name: int(value) for name, value in copies.pop(_FIRED).items()})
        return cls(fired, copies)

    def to_arrays(self) -> Mapping[str, Any]:
        """Return the numpy arrays that the train state holds."""
        # Types are part of the checkpoint format.
        types = {"stopped": np.uint32}
        fired = {name: np.array(value, types.get(name, np.int32)) for name, value in asdict(self.fired).items()}
        return {_FIRED: fired, **self.counters}

    def replace_in(self, state: TrainState, name: str) -> TrainState:
        """Return the train state with this hook state as its auxiliary state `name`, on the same devices."""

        # Every host has the same counters, so each makes its own shards and no communication is needed.
        def place(value: np.ndarray, old: jax.Array) -> jax.Array:
            return jax.make_array_from_callback(value.shape, old.sharding, lambda index: value[index])

        return state.replace(riders=state.riders | {name: jax.tree.map(place, self.to_arrays(), state.riders[name])})


def make_first_counters(counters: Any) -> Any:
    """Return the counters of `Hook.init` as arrays. Raises `InvalidError` if the train state cannot hold them."""
    arrays = jax.tree.map(np.asarray, counters)
    for leaf in jax.tree.leaves(arrays):
        if leaf.dtype.kind not in _KINDS or leaf.dtype.itemsize > _MAX_ITEM_BYTES:
            raise InvalidError(
                f"init returns an array of {leaf.dtype}; use numpy arrays of at most 32 bits a number, such as "
                "np.int32(0)"
            )
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(arrays))
    if num_bytes > _COUNTERS_MAX_BYTES:
        raise InvalidError(f"init returns {num_bytes:,} bytes of counters; a hook may have {_COUNTERS_MAX_BYTES:,}")
    return arrays


def encode_counters(counters: Any, first: Any) -> list[str]:
    """Encode counters for JSON. Raises `ValueError` if structure, shapes or types differ from the `first` ones."""
    found, needed = str(jax.tree.structure(counters)), str(jax.tree.structure(first))
    # A compiled step has one structure of the train state, so counters cannot change theirs during a run.
    if found != needed:
        raise ValueError(f"returned counters of {found}, init of {needed}")
    encoded = []
    for leaf, like in zip(jax.tree.leaves(counters), jax.tree.leaves(first), strict=True):
        value = np.asarray(leaf)
        if value.shape != like.shape or not np.can_cast(value.dtype, like.dtype, "same_kind"):
            raise ValueError(
                f"returned counters with {value.dtype} of shape {value.shape}, where init has {like.dtype} of shape "
                f"{like.shape}"
            )
        # Bytes instead of decimal numbers, so that every host gets the same bits.
        encoded.append(base64.b64encode(value.astype(like.dtype).tobytes()).decode())
    return encoded


def decode_counters(encoded: list[str], first: Any) -> Any:
    """Decode the counters of `encode_counters` into new arrays."""
    leaves = [
        np.frombuffer(base64.b64decode(text), like.dtype).reshape(like.shape).copy()
        for text, like in zip(encoded, jax.tree.leaves(first), strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(first), leaves)


def _compute_digest(entry: HookEntry) -> int:
    return zlib.crc32(hash_record(entry.model_dump(mode="json")).encode())


@dataclass(frozen=True)
class ListedHook:
    """One hook of the spec."""

    hook: Hook
    entry: HookEntry  # entry of the spec with every default of the hook's config
    counters: Any  # counters before the first step; None for an observer

    @property
    def name(self) -> str:
        """Name of the hook in messages and in the train state."""
        return self.entry.effective_name

    @property
    def digest(self) -> int:
        """32-bit digest of hook, class and config. The train state stores that of the hook that stopped the run."""
        return _compute_digest(self.entry)

    @property
    def former_paths(self) -> tuple[str, ...]:
        """Paths that the class of the hook had earlier."""
        return list_former_paths(type(self.hook))

    def has_digest(self, digest: int) -> bool:
        """Return True if this is the digest of the hook, now or under a former path of its class."""
        former = [self.entry.model_copy(update={"hook": path}) for path in self.former_paths]
        return digest in map(_compute_digest, [self.entry, *former])

    def implements(self, method: str) -> bool:
        """Return True if the hook's class overrides a method."""
        return getattr(type(self.hook), method) is not getattr(Hook, method)


@dataclass(frozen=True)
class HookList:
    """Hooks of a job, in the order of its spec."""

    listed: Sequence[ListedHook] = ()

    @functools.cached_property
    def stateful(self) -> list[ListedHook]:
        """Hooks that may influence the run, and therefore have counters in the train state."""
        return [each for each in self.listed if each.counters is not None]

    def list_implementing(self, method: str) -> list[ListedHook]:
        """Return the hooks that override a method."""
        return [each for each in self.listed if each.implements(method)]

    def auxiliary_states(self) -> tuple[AuxiliaryState, ...]:
        """Return the auxiliary state of the hooks; none if all of them are observers."""
        if not self.stateful:
            return ()
        first = HookState(FiredCalls(), {each.name: each.counters for each in self.stateful})
        return (AuxiliaryState(STATE_NAME, lambda params: first.to_arrays()),)

    def identity(self) -> Trajectory:
        """Return the part of the trajectory on which the counters depend, by dotted key."""
        keys: Trajectory = {}
        for each in self.stateful:
            prefix = f"{STATE_NAME}.{each.name}"
            config = each.hook.config.model_dump(mode="json", exclude=set(each.hook.config.free_keys))
            keys[f"{prefix}.hook"] = each.entry.hook
            keys |= {f"{prefix}.config.{key}": value for key, value in config.items()}
        return keys

    @property
    def former_values(self) -> dict[str, tuple[str, ...]]:
        """Former paths of the classes of hooks with counters, by the key of the trajectory that has the present one."""
        return {f"{STATE_NAME}.{each.name}.hook": each.former_paths for each in self.stateful}

    def find_by_digest(self, digest: int) -> ListedHook | None:
        """Return the hook with this digest; None if the spec no longer has it with this config."""
        return next((each for each in self.stateful if each.has_digest(digest)), None)

    def has_stopped(self, result: RunResult | None) -> bool:
        """Return True if a hook, with the config it has now, ended the run with this result."""
        return (
            result is not None
            and result.stopped_rule is not None
            and self.find_by_digest(result.stopped_rule) is not None
        )

    def entries(self) -> list[HookEntry]:
        """Return the entries of the resolved spec."""
        return [each.entry for each in self.listed]


def load_hooks(document: Document, entries: Sequence[HookEntry], job: SeenJob) -> HookList:
    """Import, check and make the hooks of a spec. Raises `InvalidError` with the location of the problem."""
    listed: list[ListedHook] = []
    for place, entry in enumerate(entries):
        with document.errors_at(f"{STATE_NAME}.{place}"):
            # Names are keys in the train state, and `_FIRED` is another key there.
            if entry.effective_name in (_FIRED, *(each.name for each in listed)):
                raise InvalidError(f"a hook is called {entry.effective_name} already; give this one a name of its own")
            # The class is imported before its config is validated, because it declares the config's keys.
            document.validate_trust(entry.hook)
            hook_class: type[Hook] = load_class(entry.hook, Hook)
            hook = hook_class(validate_config(document, hook_class.Config, place), job)
            # Defaults are filled in, since the resolved spec must not depend on a later version's defaults.
            entry = entry.model_copy(update={"config": hook.config.model_dump(mode="json")})
            list_former_paths(hook_class)  # raises if they are not paths
            counters = None if isinstance(hook, Observer) else make_first_counters(hook.init())
            listed.append(ListedHook(hook, entry, counters))
    return HookList(tuple(listed))
