"""Hooks of a spec, made and checked before any device is used."""

import functools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from runner.errors import InvalidError
from runner.hook.counters import FIRED, FiredCalls, HookState, make_first_counters
from runner.hook.protocol import Hook, Observer, SeenJob
from runner.run.layout import RunResult
from runner.spec import Document, HookEntry, Trajectory, hash_record, load_class, validate_config
from runner.train.auxiliary import AuxiliaryState

STATE_NAME = "hooks"  # of the auxiliary state; also the key in the spec and in the trajectory


@dataclass(frozen=True)
class ListedHook:
    """One hook of the spec.

    Attributes:
        hook: the hook.
        entry: entry of the spec with every default of the hook's config.
        counters: counters before the first step; None for an observer.
    """

    hook: Hook
    entry: HookEntry
    counters: Any

    @property
    def name(self) -> str:
        """Name of the hook in messages and in the train state."""
        return self.entry.effective_name

    @property
    def digest(self) -> int:
        """32 bits that distinguish hook, class and config; the train state holds those of the hook that stopped it."""
        return zlib.crc32(hash_record(self.entry.model_dump(mode="json")).encode())

    def implements(self, method: str) -> bool:
        """Return True if the hook's class overrides a method."""
        return getattr(type(self.hook), method) is not getattr(Hook, method)


@dataclass(frozen=True)
class HookList:
    """Hooks of a job, in the order of its spec."""

    listed: Sequence[ListedHook] = ()

    @functools.cached_property
    def stateful(self) -> list[ListedHook]:
        """Hooks that may influence the run, and so have a part in the train state."""
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

    def find_by_digest(self, digest: int) -> ListedHook | None:
        """Return the hook with this digest; None if the spec no longer has it with this config."""
        return next((each for each in self.stateful if each.digest == digest), None)

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
            # Names are keys in the train state, and `FIRED` is another key there.
            if entry.effective_name in (FIRED, *(each.name for each in listed)):
                raise InvalidError(f"a hook is called {entry.effective_name} already; give this one a name of its own")
            hook_class: type[Hook] = load_class(entry.hook, Hook)
            hook = hook_class(validate_config(document, hook_class.Config, place), job)
            # Defaults are filled in, since the resolved spec must not depend on a later version's defaults.
            entry = entry.model_copy(update={"config": hook.config.model_dump(mode="json")})
            counters = None if isinstance(hook, Observer) else make_first_counters(hook.init())
            listed.append(ListedHook(hook, entry, counters))
    return HookList(tuple(listed))
