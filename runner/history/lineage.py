"""Lineage: the checkpoint of another run, its parent, with which a fork began, and that of each ancestor.

The ancestors of a run are in its newest manifest. The forks of a run are found by reading all runs below a root. A run
that was moved is recognised by its id.
"""

import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from runner.attempts.layout import DamagedRecordError, read_forecast, read_owner
from runner.checkpoint.manifest import CHECKPOINTS, UNREADABLE_ERRORS, read_manifest, read_newest_manifest
from runner.errors import InvalidError, StorageError
from runner.history.ledger import LedgerReader, to_single_line
from runner.history.reader import format_changes, read_fork
from runner.history.records import ForkRecord
from runner.history.sweep import Sweep
from runner.storage import JsonObject, Store, open_store

# A run among those that were read is named by its place. Any other one is named by its id too, since its place may have
# been taken by another.
_NodeKey = tuple[str, str]


class ParentState(enum.Enum):
    """State of the directory in which a parent was when it was forked."""

    THERE = "there"
    PRUNED = "there, without that checkpoint"
    REPLACED = "another run is there"
    GONE = "gone"
    UNREADABLE = "cannot be read"


@dataclass(frozen=True)
class RunLineage:
    """One run and its ancestors."""

    run: str  # its directory or URL
    id: str
    name: str | None
    step: int | None  # its newest committed step; None if it has none
    ancestors: tuple[ForkRecord, ...] = ()  # its parent, the parent of that, and so on; empty if it is not a fork
    # How often the program of its train step has changed, with spec and hardware unchanged, those of its ancestors
    # included.
    program_changes: int = 0
    # Forecast that was written before the run began, see `FORECAST_KEYS`, without the law; None if there is none.
    forecast: JsonObject | None = None


@dataclass(frozen=True)
class LineageNode:
    """One run in a tree of forks."""

    run: str  # its directory or URL; of a run that is not below the root, that at the time of the fork
    id: str
    name: str | None
    step: int | None  # its newest committed step; None if it has none, or is not below the root
    state: ParentState
    depth: int = 0  # number of its ancestors in the tree
    # Checkpoint of the nearest node above of lower depth with which it began; None if it has no ancestor.
    fork: ForkRecord | None = None
    program_changes: int = 0  # as in `RunLineage`; 0 if it is not below the root
    forecast: JsonObject | None = None  # as in `RunLineage`; None if it is not below the root


def read_lineage(store: Store) -> RunLineage:
    """Return the run in a directory and its ancestors, without reading the directories of the ancestors.

    Raises `InvalidError` if no run is there, or a newer runner has written it, and `OSError` if it cannot be read.
    """
    owner, manifest = read_owner(store), read_newest_manifest(store)
    try:
        forecast = read_forecast(store)
    except DamagedRecordError as error:
        raise InvalidError(str(error)) from error
    forecast = None if forecast is None else {key: value for key, value in forecast.items() if key != "law"}
    if manifest is not None:
        run_id, name = (manifest.job, None) if owner is None else (owner.id, owner.name)
        program = (manifest.topology or {}).get("program", {})
        ancestors = parse_ancestors(manifest.lineage or {})
        return RunLineage(store.url, run_id, name, manifest.step, ancestors, program.get("changes", 0), forecast)
    if owner is None:
        raise InvalidError(f"{store.url}: no run is here; give a run's directory, its spec, or a directory of runs")
    # A fork that was killed before its first commit is recorded only in the ledger.
    ancestors = parse_ancestors(LedgerReader(store).read(set()).fork)
    return RunLineage(store.url, owner.id, owner.name, None, ancestors, forecast=forecast)


def parse_ancestors(record: JsonObject) -> tuple[ForkRecord, ...]:
    """Return the parent and its ancestors from the lineage of a manifest, or from an event `fork`."""
    older = record.get("ancestors")
    found = []
    for each in (record, *(older if isinstance(older, list) else ())):
        fork = read_fork(each) if isinstance(each, dict) else None
        if fork is None:
            break
        found.append(fork)
    return tuple(found)


def find_parent_state(parent: ForkRecord) -> ParentState:
    """Return the state of the directory in which a parent was when it was forked."""
    try:
        store = open_store(parent.run)
        try:
            fingerprint = read_manifest(store, f"{CHECKPOINTS}/{parent.step}").fingerprint
        except UNREADABLE_ERRORS:
            fingerprint = ""
        owner = read_owner(store)
    except (InvalidError, StorageError, OSError):
        return ParentState.UNREADABLE
    if fingerprint == parent.fingerprint:
        return ParentState.THERE
    if owner is None:
        return ParentState.GONE
    return ParentState.PRUNED if owner.id == parent.id else ParentState.REPLACED


def build_tree(runs: Sequence[RunLineage]) -> list[LineageNode]:
    """Return these runs and their ancestors, each before its forks."""
    nodes: dict[_NodeKey, LineageNode] = {}
    forks: dict[_NodeKey, list[_NodeKey]] = {}
    places_by_id: dict[str, list[str]] = {}
    for run in sorted(runs, key=lambda each: each.run):
        places_by_id.setdefault(run.id, []).append(run.run)
        nodes[run.run, ""] = LineageNode(
            run.run, run.id, run.name, run.step, ParentState.THERE, 0, None, run.program_changes, run.forecast
        )
    for run in runs:
        key: _NodeKey = (run.run, "")
        for ancestor in run.ancestors:
            # A run that was moved is found by its id.
            places = places_by_id.get(ancestor.id, [])
            place = ancestor.run if ancestor.run in places else next(iter(places), None)
            parent = (ancestor.run, ancestor.id) if place is None else (place, "")
            nodes[key] = replace(nodes[key], fork=ancestor)
            forks.setdefault(parent, []).append(key)
            if parent in nodes:
                break  # Its own ancestors are, or will be, added with it.
            nodes[parent] = LineageNode(ancestor.run, ancestor.id, None, None, find_parent_state(ancestor))
            key = parent

    found: dict[_NodeKey, LineageNode] = {}
    # Damaged records may make a run its own ancestor; then the tree begins anywhere in the cycle.
    for root in [key for key in nodes if nodes[key].fork is None] + list(nodes):
        pending = [(root, 0)]
        while pending:
            key, depth = pending.pop()
            if key not in found:
                found[key] = replace(nodes[key], depth=depth)
                pending += [(fork, depth + 1) for fork in reversed(forks.get(key, []))]
    return list(found.values())


def format_forecast(forecast: JsonObject) -> str:
    """Return a line about the forecast of a run."""
    interval = f"{forecast['low']:.4f} to {forecast['high']:.4f}, {forecast['coverage']:.0%}"
    ladder = to_single_line(forecast["ladder"])
    return f"forecast before it began: loss {forecast['loss']:.4f} ({interval}), by {ladder}"


def format_ladder(sweep: Sweep) -> list[str]:
    """Return a line for each forecast of a ladder, with its law; none for another sweep."""
    lines = []
    for name, forecast in sweep.forecasts.items():
        interval = f"{forecast['low']:.4f} to {forecast['high']:.4f}, {forecast['coverage']:.0%}"
        law, size = to_single_line(str(forecast["law"].get("formula"))), f"{forecast['parameters']:,} parameters"
        lines.append(f"{law}; {to_single_line(name)} of {size}: loss {forecast['loss']:.4f} ({interval})")
    return lines


def format_tree(nodes: Iterable[LineageNode]) -> Iterator[str]:
    """Yield lines about the nodes of a tree, in their order."""
    for node in nodes:
        indent = "    " * node.depth
        name = "" if node.name is None else f"{to_single_line(node.name)}, "
        reached = "" if node.step is None else f", step {node.step:,}"
        state = "" if node.state is ParentState.THERE else f": {node.state.value}"
        yield f"{indent}{to_single_line(node.run)} ({name}id {to_single_line(node.id)}{reached}){state}"
        if node.program_changes:
            times = f"{node.program_changes:,} time{'s' * (node.program_changes != 1)}"
            yield f"{indent}  the code of the train step has changed {times}, see the events `changed`"
        if node.forecast is not None:
            yield f"{indent}  {format_forecast(node.forecast)}"
        if node.fork is not None:
            yield f"{indent}  from step {node.fork.step:,}, fingerprint {node.fork.fingerprint}"
            yield from (f"{indent}  {line}" for line in format_changes(node.fork))
