"""Restore: the newest state that every host can have and that is, bit for bit, what was saved.

Called on every host. The candidates are the steps of the durable tier, as host 0 lists them, and the steps of which
every host still has its part in the fast tier; newest first, of one step the fast tier first. Each is checked in three
layers, bytes (size and CRC of every file against the manifest), shape (names, shapes, dtypes) and bits (the
fingerprint, computed again on the device from the restored arrays), and all hosts take the same verdict.

What fails in the durable tier is quarantined, but only after an older one has passed: if none does nothing is touched.
"""

from dataclasses import dataclass
from typing import Any

import jax

from runner.checkpoint import fingerprint, reader
from runner.checkpoint.manifest import (
    CHECKPOINTS,
    MANIFEST,
    NotCommittedError,
    check_leaves,
    committed,
    file_problems,
    read_manifest,
    steps,
)
from runner.checkpoint.save import Place
from runner.checkpoint.tombstone import retire, settle
from runner.errors import ResumeError, StorageError
from runner.storage import Store, read_log
from runner.terminal import warn

State = tuple[Any, dict[str, Any]]  # the arrays, and the manifest that they came with


@dataclass(frozen=True)
class Fallback:
    """A checkpoint that was not restored, and why."""

    step: int
    reason: str
    tier: str
    committed: bool = True


class Restorer:
    """Restores of one attempt. Made and called on every host."""

    def __init__(self, place: Place):
        self._place = place
        self.companions: dict[str, bytes] = {}
        self.tier = ""  # that the state was restored from

    def restore(self, abstract: Any, identity: dict[str, Any]) -> State | None:
        """The newest state that passes every check, and its manifest; None if nothing was ever committed.

        `abstract` has the shape, dtype and sharding of every leaf: the checkpoint may have been written on any other
        mesh. Raises `ResumeError`, with nothing touched, if checkpoints exist and none can be restored.
        """
        place = self._place
        if place.hosts.is_main:
            settle(place.store)
        durable = place.hosts.agree(steps(place.store) if place.hosts.is_main else [])
        candidates = [(step, 0, "durable") for step in durable] + [(step, 1, "fast") for step in self._common(identity)]
        rejected: list[Fallback] = []
        for step, _, tier in sorted(candidates, reverse=True):
            result = (
                self._try_fast(step, abstract, rejected)
                if tier == "fast"
                else self._try(place.store, f"{CHECKPOINTS}/{step}", abstract, rejected)
            )
            if result is not None:
                self.tier = tier
                self._set_aside(rejected, step)
                return result
        events = read_log(place.store, "events") if place.hosts.is_main else []
        was_committed = place.hosts.agree(any(event.get("event") == "commit" for event in events))
        if was_committed or any(fallback.committed for fallback in rejected):
            reasons = "".join(f"\n  step {fallback.step}: {fallback.reason}" for fallback in rejected)
            raise ResumeError(
                f"{place.store.url}: checkpoints were committed here and none can be restored; nothing was touched. "
                f"Repair one, or use another directory to start over{reasons or chr(10) + '  all are missing'}"
            )
        self._set_aside(rejected, None)
        return None

    def load(self, name: str, abstract: Any) -> State:
        """The checkpoint `name`, checked like any other. Raises `ResumeError` if it cannot be restored."""
        rejected: list[Fallback] = []
        result = self._try(self._place.store, f"{CHECKPOINTS}/{name}", abstract, rejected)
        if result is None:
            raise ResumeError(f"{self._place.store.url}/{CHECKPOINTS}/{name}: {rejected[0].reason}")
        return result

    def restore_weights(self, source: Store, name: str | None, abstract: Any) -> State:
        """The leaves of `abstract` alone from another run: from its checkpoint `name`, or from the newest that is good.

        Raises `ResumeError` if there is none.
        """
        hosts = self._place.hosts
        names = [] if name is None else [name]
        if name is None and hosts.is_main:
            names = [str(step) for step in sorted(committed(source), reverse=True)]
        rejected: list[Fallback] = []
        for candidate in hosts.agree(names):
            result = self._try(source, f"{CHECKPOINTS}/{candidate}", abstract, rejected, weights_only=True)
            if result is not None:
                return result
        reasons = "; ".join(f"{fallback.step}: {fallback.reason}" for fallback in rejected)
        raise ResumeError(f"checkpoint.init_from: {source.url}: {reasons or 'no checkpoint is here'}")

    def _common(self, identity: dict[str, Any]) -> list[int]:
        """Steps of which every host has its part in the fast tier."""
        fast = self._place.fast
        present = self._place.hosts.gather([] if fast is None else fast.steps(identity))
        return sorted(set.intersection(*(set(own) for own in present)))

    def _try_fast(self, step: int, abstract: Any, rejected: list[Fallback]) -> State | None:
        fast = self._place.fast
        assert fast is not None, "only a fast tier has such a step"
        leaves, problem, part = _flatten(abstract), None, None
        arrays: dict[str, jax.Array] = {}
        try:
            arrays, part = fast.read(step, leaves)
            check_leaves(part, abstract)
        except (ValueError, OSError, KeyError) as error:
            problem = f"process {self._place.hosts.process_id}: {error}"
        problem = self._first(problem)
        if problem is None and part is not None:
            state = _unflatten(abstract, arrays)
            problem = _bits_problem(state, part)
            if problem is None:
                self.companions = fast.companions(step)
                return state, part
        rejected.append(Fallback(step, problem or "no part", "fast"))
        return None

    def _try(
        self, store: Store, directory: str, abstract: Any, rejected: list[Fallback], weights_only: bool = False
    ) -> State | None:
        hosts = self._place.hosts
        manifest, problem, was_committed = None, None, True
        try:
            manifest = read_manifest(store, directory)
            if "shards" not in manifest:
                found = file_problems(store, directory, manifest, hosts.process_id, hosts.num_processes)
                problem = next(iter(found), None)
        except NotCommittedError as error:
            problem, was_committed = str(error), False
        except StorageError:
            raise  # that the store is down says nothing of the checkpoint
        except (ValueError, OSError) as error:
            problem = f"{MANIFEST}: {error}"
        problem = self._first(problem)
        if problem is None and manifest is not None:
            check_leaves(manifest, abstract, weights_only)
            arrays: dict[str, jax.Array] = {}
            try:
                arrays = reader.read(store, directory, manifest, _flatten(abstract))
            except StorageError:
                raise
            except (OSError, ValueError) as error:
                problem = str(error)
            problem = self._first(problem)
            if problem is None:
                state = _unflatten(abstract, arrays)
                problem = _bits_problem(state, manifest)
                if problem is None:
                    return state, manifest
        name = directory.rpartition("/")[2]
        step = int(name) if name.isdecimal() else -1
        rejected.append(Fallback(step, problem or "no manifest", "durable", was_committed))
        return None

    def _first(self, problem: str | None) -> str | None:
        """The first problem that any host has, on every host."""
        return next((text for text in self._place.hosts.gather(problem) if text is not None), None)

    def _set_aside(self, rejected: list[Fallback], restored: int | None) -> None:
        """Quarantine what was committed and is bad, delete what was never committed, and record both."""
        place = self._place
        if place.fast is not None:
            place.fast.forget_after(-1 if restored is None else restored)
        if not place.hosts.is_main:
            return
        assert place.fence.attempt is not None
        for fallback in rejected:
            place.fence.check()
            if fallback.tier == "durable" and fallback.committed:
                self._quarantine(fallback, place.fence.attempt)
            place.ledger.append(
                "fallback", restored, rejected=fallback.step, reason=fallback.reason, tier=fallback.tier
            )
            warn(f"checkpoint {fallback.step} ({fallback.tier}) not restored: {fallback.reason}")
        for step in steps(place.store):
            place.fence.check()
            retire(place.store, step, place.fence.attempt)

    def _quarantine(self, fallback: Fallback, attempt: int) -> None:
        """Move a bad checkpoint away as evidence, its manifest first, so that it is never picked again."""
        store, source = self._place.store, f"{CHECKPOINTS}/{fallback.step}"
        target = f"quarantine/{fallback.step}.{attempt}"
        if store.root is None and store.exists(f"{source}/{MANIFEST}"):
            store.write(f"{target}/{MANIFEST}", store.read(f"{source}/{MANIFEST}"))
            store.remove(f"{source}/{MANIFEST}")
        store.move_tree(source, target)
        self._place.ledger.append("quarantine", fallback.step, reason=fallback.reason, moved_to=f"{store.url}/{target}")


def _flatten(tree: Any) -> dict[str, Any]:
    return dict(zip(fingerprint.leaf_names(tree), jax.tree.leaves(tree), strict=True))


def _unflatten(abstract: Any, arrays: dict[str, jax.Array]) -> Any:
    return jax.tree.unflatten(jax.tree.structure(abstract), [arrays[name] for name in _flatten(abstract)])


def _bits_problem(state: Any, manifest: dict[str, Any]) -> str | None:
    for name, digest in fingerprint.leaf_digests(state).items():
        if digest != manifest["leaves"][name]["digest"]:
            return f"the bits of {name} are not those that were saved"
    return None
