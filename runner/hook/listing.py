"""The hooks that a spec lists, made and checked before any device is touched."""

import functools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from runner.errors import InvalidError
from runner.hook.counters import FIRED, HookState, first_counters
from runner.hook.protocol import Hook, Observer, SeenJob
from runner.run.layout import RunResult
from runner.spec import Document, HookEntry, Trajectory, hash_record, load_class, validate_config
from runner.train.state import AuxiliaryState

STATE_NAME = "hooks"


@dataclass(frozen=True)
class ListedHook:
    """One hook of the spec.

    Attributes:
        entry: as the spec has it, with every default of its config.
        counters: what it begins with; None of an observer.
    """

    hook: Hook
    entry: HookEntry
    counters: Any

    @property
    def name(self) -> str:
        """What it is called."""
        return self.entry.effective_name

    @property
    def rule(self) -> int:
        """32 bits that tell this hook, its class and its config from others: by whom a run was stopped."""
        return zlib.crc32(hash_record(self.entry.model_dump(mode="json")).encode())

    def listens_to(self, method: str) -> bool:
        """Whether its class has replaced a method."""
        return getattr(type(self.hook), method) is not getattr(Hook, method)


@dataclass(frozen=True)
class HookList:
    """The hooks of a job, in the order of its spec."""

    listed: Sequence[ListedHook] = ()

    @functools.cached_property
    def stateful(self) -> list[ListedHook]:
        """Those that may steer the run, and so have a part in its state."""
        return [each for each in self.listed if each.counters is not None]

    def list_implementing(self, method: str) -> list[ListedHook]:
        """Those that want to be called so."""
        return [each for each in self.listed if each.listens_to(method)]

    def branch(self) -> HookState:
        """What the state holds of them before the first step."""
        return HookState.first({each.name: each.counters for each in self.stateful})

    def auxiliary_states(self) -> tuple[AuxiliaryState, ...]:
        """What rides along for them in the train state: nothing, where all of them only look."""
        return (AuxiliaryState(STATE_NAME, lambda params: self.branch().arrays()),) if self.stateful else ()

    def identity(self) -> Trajectory:
        """The part of the trajectory on which the counters depend, by dotted key."""
        known: Trajectory = {}
        for each in self.stateful:
            prefix = f"{STATE_NAME}.{each.name}"
            config = each.hook.config.model_dump(mode="json", exclude=set(each.hook.config.free_keys))
            known[f"{prefix}.hook"] = each.entry.hook
            known |= {f"{prefix}.config.{key}": value for key, value in config.items()}
        return known

    def find_by_digest(self, rule: int) -> ListedHook | None:
        """The hook with this `rule`, as it stands in the spec now."""
        return next((each for each in self.stateful if each.rule == rule), None)

    def has_stopped(self, result: RunResult | None) -> bool:
        """Whether one of them, as it is told now, has ended the run that left this result."""
        return (
            result is not None
            and result.stopped_rule is not None
            and self.find_by_digest(result.stopped_rule) is not None
        )

    def entries(self) -> list[HookEntry]:
        """What the resolved spec has."""
        return [each.entry for each in self.listed]


def load_hooks(document: Document, entries: Sequence[HookEntry], job: SeenJob) -> HookList:
    """Import, check and make the hooks of a spec. Raises `InvalidError` with the place of what is wrong."""
    listed: list[ListedHook] = []
    for place, entry in enumerate(entries):
        with document.errors_at(f"{STATE_NAME}.{place}"):
            if entry.effective_name in (FIRED, *(each.name for each in listed)):
                raise InvalidError(f"a hook is called {entry.effective_name} already; give this one a name of its own")
            found: type[Hook] = load_class(entry.hook, Hook)
            config = validate_config(document, found.Config, place)
            listed.append(_listed(found(config, job), entry))
    return HookList(tuple(listed))


def _listed(hook: Hook, entry: HookEntry) -> ListedHook:
    entry = entry.model_copy(update={"config": hook.config.model_dump(mode="json")})
    return ListedHook(hook, entry, None if isinstance(hook, Observer) else first_counters(hook.init()))
