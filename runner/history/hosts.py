"""Memory of hosts: incidents of each physical host over all attempts of a run, and over all runs below a directory.

Incidents are read from the ledgers of runs; nothing else is stored. `read_hosts` folds one ledger into a record of each
host, in one pass and in bounded memory, and `merge_hosts` adds the records of several runs. An incident counts once for
each attempt, host and kind, so that counts can be compared with the number of attempts. It is attributed to the hosts
that caused it. If that is every host of the attempt, as with an error in the job's code, it says nothing about any of
them and is left out, except for a device fault.

A host is suspect (`HostRecord.is_suspect`) after a device fault in the last `FAULT_DAYS`, or `SUSPECT_INCIDENTS`
incidents in the last `SUSPECT_DAYS`.

At the start of an attempt, process 0 names its hosts that were suspect in sibling runs, those in the same parent
directory (`start_naming_suspects`). It reads the end of their ledgers, at most `_SIBLINGS_MAX` of `_EVENTS_BYTES_MAX`,
in a thread that no start waits for. A summary file of each run would be cheaper to read, but lacks the incidents of an
attempt that could not write it: those that end with a kill.
"""

import contextlib
import math
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.console import format_duration, warn
from runner.errors import EXIT_INVALID, RunnerError
from runner.history.ledger import get_int, get_step, get_time, to_single_line
from runner.history.records import to_json
from runner.storage import ConfinedStore, JsonObject, Store, as_local, iterate_log, make_store
from runner.storage.jsonl import PART_BYTES, parse_lines

SUSPECT_INCIDENTS, SUSPECT_DAYS = 2, 30
FAULT_DAYS = 365  # a device that computes wrong results does so until it is replaced
RULE = (
    f"suspect: a device fault in the last {FAULT_DAYS} days, or {SUSPECT_INCIDENTS} incidents in the last "
    f"{SUSPECT_DAYS} days"
)
# Kinds of incidents, the gravest first, each with its meaning.
KINDS = {
    "device_fault": "a device computed other bits than before, or than its replicas",
    "possible_device_fault": "a device of one of several hosts did so",
    "lost": "the host died or did not respond",
    "hang": "the others waited for the host until a deadline",
    "crash": "the job failed on this host, but not on all",
    "straggling": "the host completed its steps late",
    "storage": "the host could not write to its local disk",
}
_DAY_SECONDS = 86_400.0
_HOSTS_MAX = 1 << 14  # of a run, or of all runs below a directory
_INCIDENTS_MAX = 32  # newest incidents that are kept of each host
_OPEN_ATTEMPTS_MAX = 16  # whose events may mix
_SIBLINGS_MAX, _EVENTS_BYTES_MAX = 50, 2 * PART_BYTES
_INCIDENT = re.compile(rb'"event": "(start|stuck|failed|straggler|device_fault|corruption|save_failed)"')
_NAMED_MAX = 4  # hosts in a message, devices of an incident


@dataclass(frozen=True)
class HostIncident:
    """One incident of a host."""

    time: float
    kind: str  # a key of `KINDS`
    run: str  # path of the run below the directory that was read, or name of the run's directory
    attempt: int
    step: int | None  # last completed step; None before the first
    devices: tuple[str, ...] = ()  # the suspected devices, by the beginning of the UUID if it is known


@dataclass
class HostRecord:
    """Record of one physical host."""

    name: str  # name for the engine, or else the host name
    machine: str = ""  # digest of its machine id; empty if unknown
    engine: str = ""  # engine of a run on it; empty if unknown
    runs: int = 0
    attempts: int = 0
    seconds: float = 0.0  # duration of these attempts, from the first event of each to its last
    counts: Counter[str] = field(default_factory=Counter)  # attempts with an incident, by kind
    incidents: list[HostIncident] = field(default_factory=list)  # the newest, in descending order of time

    def merge(self, other: "HostRecord") -> None:
        """Add the record of the same host in other runs."""
        self.engine, self.machine = other.engine or self.engine, self.machine or other.machine
        self.runs += other.runs
        self.attempts += other.attempts
        self.seconds += other.seconds
        self.counts += other.counts
        self.incidents = sorted([*self.incidents, *other.incidents], key=lambda each: -each.time)[:_INCIDENTS_MAX]

    def is_suspect(self, now: float) -> bool:
        """Return True if the host is suspect at `now`, see `RULE`."""
        ages = [(incident.kind, (now - incident.time) / _DAY_SECONDS) for incident in self.incidents]
        has_fault = any(kind == "device_fault" and days <= FAULT_DAYS for kind, days in ages)
        return has_fault or sum(days <= SUSPECT_DAYS for _, days in ages) >= SUSPECT_INCIDENTS

    def describe_counts(self) -> str:
        """Return the number of incidents of each kind in words, the gravest first."""
        return ", ".join(f"{self.counts[kind]} x {kind.replace('_', ' ')}" for kind in KINDS if self.counts[kind])

    def list_exclusions(self) -> list[str]:
        """Return options and commands that keep a job off the host, for its engine; none if it has no such name."""
        # A name is data: it must not become another command where it is pasted.
        if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name) is None:
            return []
        # No option makes a cloud avoid a machine under a TPU VM.
        forms = {
            "slurm": ["--exclude={}"],
            "kubernetes": ["--exclude={}", "kubectl cordon {}"],
            "tpu-vm": ["a new TPU VM in place of {}"],
        }
        return [form.format(self.name) for form in forms.get(self.engine, [])]

    def to_json(self, now: float) -> JsonObject:
        """Return the record as JSON values, with what follows from it at `now`."""
        record: JsonObject = to_json(self)
        return record | {"suspect": self.is_suspect(now), "exclude": self.list_exclusions()}


@dataclass
class _Attempt:
    """Events of one attempt that are not folded yet."""

    first: float = math.inf
    last: float = -math.inf
    start: JsonObject = field(default_factory=dict)
    hosts: list[tuple[str, str]] = field(default_factory=list)  # name and machine of each process
    # By kind: the processes that caused it, time, step, and devices of its first event.
    causes: dict[str, tuple[set[int], float, int | None, tuple[str, ...]]] = field(default_factory=dict)
    diagnosed_by: int | None = None  # process whose diagnosis counts

    def add(self, row: JsonObject, moment: float) -> None:
        """Add an event."""
        self.first, self.last = min(self.first, moment), max(self.last, moment)
        process = get_int(row, "process")
        match row.get("event"):
            case "start":
                names, machines = row.get("nodes", row.get("hosts")), row.get("machines")  # older runs have host names
                names = list(map(to_single_line, names[:_HOSTS_MAX])) if isinstance(names, list) else []
                ids = list(map(to_single_line, machines[:_HOSTS_MAX])) if isinstance(machines, list) else []
                ids = ids if len(ids) == len(names) else [""] * len(names)
                self.start, self.hosts = row, list(zip(names, ids, strict=True))
            case "device_fault" | "corruption":
                self._blame("device_fault", row.get("processes"), row, moment)
            case "stuck" if self.diagnosed_by != 0 and (self.diagnosed_by is None or process == 0):
                # A process that lost its connection blames process 0, which knows the heartbeats of all.
                self.diagnosed_by = process
                for kind, key in (("lost", "lost"), ("hang", "late")):
                    self.causes.pop(kind, None)
                    self._blame(kind, row.get(key), row, moment)
            case "failed" if get_int(row, "code") != EXIT_INVALID:
                self._blame("crash", [process], row, moment)
            case "straggler":
                self._blame("straggling", row.get("late"), row, moment)
            case "save_failed" if row.get("tier") == "fast":
                self._blame("storage", [process], row, moment)

    def _blame(self, kind: str, processes: Any, row: JsonObject, moment: float) -> None:
        found = processes if isinstance(processes, list) else []
        known = {each for each in found if type(each) is int and 0 <= each < len(self.hosts)}
        if known:
            new = (set[int](), moment, get_step(row), _list_devices(self.start, row))
            self.causes.setdefault(kind, new)[0].update(known)

    def list_incidents(self, run: str, number: int) -> Iterator[tuple[tuple[str, str], HostIncident]]:
        """Iterate over the incidents, each with name and machine of its host."""
        crashed = self.causes["crash"][0] if "crash" in self.causes else set()
        for kind, (processes, moment, step, devices) in self.causes.items():
            # A process that fails disconnects from its peers, which miss it.
            hosts = {self.hosts[each] for each in (processes - crashed if kind == "lost" else processes)}
            if kind == "device_fault" and len(hosts) > 1:
                kind = "possible_device_fault"
            elif kind != "device_fault" and len(hosts) == len({*self.hosts}):
                continue
            for host in hosts:
                yield host, HostIncident(moment, kind, run, number, step, devices)


def _list_devices(start: JsonObject, row: JsonObject) -> tuple[str, ...]:
    devices, gpus = row.get("devices"), start.get("gpus")
    found = [each for each in devices if type(each) is int] if isinstance(devices, list) else []
    # Ids count the devices of each process in turn. Where the numbers do not agree, the id is all that is known.
    per_process = (get_int(start, "devices") or 0) // max(get_int(start, "processes") or 0, 1)

    def describe(device: int) -> str:
        if isinstance(gpus, list) and per_process > 0 and 0 <= device // per_process < len(gpus):
            own = gpus[device // per_process]
            if isinstance(own, list) and len(own) == per_process:
                return to_single_line(own[device % per_process])
        return f"device {device}"

    return tuple(map(describe, found[:_NAMED_MAX]))


def fold_hosts(rows: Iterable[JsonObject], run: str) -> list[HostRecord]:
    """Return the record of each host in the events of one run. What is no valid event is skipped."""
    found: dict[tuple[str, str], HostRecord] = {}
    attempts: dict[int, _Attempt] = {}

    def close(number: int) -> None:
        attempt = attempts.pop(number)
        incidents: dict[tuple[str, str], list[HostIncident]] = {}
        for host, incident in attempt.list_incidents(run, number):
            incidents.setdefault(host, []).append(incident)
        engine, seconds = to_single_line(attempt.start.get("engine", "")), attempt.last - attempt.first
        for host in dict.fromkeys(attempt.hosts):
            if host in found or len(found) < _HOSTS_MAX:
                own = incidents.get(host, [])
                counts = Counter(each.kind for each in own)
                record = HostRecord(*host, engine, attempts=1, seconds=seconds, counts=counts, incidents=own)
                found.setdefault(host, HostRecord(*host, runs=1)).merge(record)

    for row in rows:
        number, moment = get_int(row, "attempt"), get_time(row)
        if number is None or moment is None:
            continue
        if number not in attempts and len(attempts) >= _OPEN_ATTEMPTS_MAX:
            close(next(iter(attempts)))
        attempts.setdefault(number, _Attempt()).add(row, moment)
    for number in [*attempts]:
        close(number)
    return list(found.values())


def read_hosts(store: Store, run: str) -> list[HostRecord]:
    """Return the record of each host of a run. Raises `OSError`; a run without a ledger has no hosts."""
    try:
        return fold_hosts(iterate_log(store, "events"), run)
    except FileNotFoundError:
        return []


def merge_hosts(runs: Iterable[Iterable[HostRecord]], now: float) -> list[HostRecord]:
    """Return one record of each host over several runs, the most suspect first."""
    found: dict[tuple[str, str], HostRecord] = {}
    for record in (record for records in runs for record in records):
        key = record.name, record.machine
        if key in found or len(found) < _HOSTS_MAX:
            found.setdefault(key, HostRecord(record.name, record.machine)).merge(record)
    # A run of an older runner tells the name alone, which is enough where one machine has that name.
    machines: dict[str, list[str]] = {}
    for name, machine in found:
        machines.setdefault(name, []).append(machine)
    for name, ids in machines.items():
        if len(ids) == 2 and "" in ids:
            found[name, max(ids)].merge(found.pop((name, "")))

    def rank(record: HostRecord) -> tuple[Any, ...]:
        return not record.is_suspect(now), *(-record.counts[kind] for kind in KINDS), record.name, record.machine

    return sorted(found.values(), key=rank)


# At a start.


def start_naming_suspects(store: Store, machines: Mapping[str, Sequence[str]]) -> threading.Thread:
    """Name the hosts of this attempt that were suspect in sibling runs, in a thread. Process 0 only; never raises.

    `machines` are those of `runner.attempts.environment.collect_machines`.
    """
    hosts = list(zip(machines.get("nodes", ()), machines.get("machines", ()), strict=True))

    def act() -> None:
        # A directory beside the run that cannot be read is no matter of the run.
        with contextlib.suppress(OSError, RunnerError, ValueError):
            name_suspects(store, hosts, warn)

    thread = threading.Thread(target=act, name="suspects", daemon=True)
    thread.start()
    return thread


def name_suspects(store: Store, hosts: Iterable[tuple[str, str]], say: Callable[[str], None]) -> None:
    """Say which of these hosts, each a name and a machine, were suspect in sibling runs. Raises `OSError`."""
    siblings, now = _list_siblings(store), time.time()
    records = []
    for name, sibling in siblings:
        try:
            records.append(fold_hosts(_read_newest_events(sibling), name))
        except (OSError, RunnerError):
            continue  # One damaged run must not hide the others.
    machines = dict(hosts)

    def is_present(record: HostRecord) -> bool:
        # Where either id is unknown, the name decides.
        machine = machines.get(record.name)
        return machine is not None and (machine == record.machine or not (machine and record.machine))

    found = [record for record in merge_hosts(records, now) if record.is_suspect(now) and is_present(record)]
    for record in found[:_NAMED_MAX]:
        last = record.incidents[0]
        age = format_duration(max(now - last.time, 0.0))
        say(f"host {record.name} was suspect in other runs: {record.describe_counts()}; last in {last.run}, {age} ago")
    if found:
        more = f"{len(found) - _NAMED_MAX} more hosts were; " if len(found) > _NAMED_MAX else ""
        say(f"{more}python -m runner status {store.url.rpartition('/')[0] or '.'} --hosts lists all hosts")


def _list_siblings(store: Store) -> list[tuple[str, Store]]:
    """Return names and directories beside a run's: on a disk those with the newest events, in a bucket the last names.

    A bucket tells no times of directories, and names of runs often end with a number or date.
    """
    if store.root is None:
        parent, _, own = store.url.rpartition("/")
        if "://" not in parent:
            return []
        names = [name for name in make_store(parent).list_names("") if "." not in name and name != own]
        return [(name, make_store(f"{parent}/{name}")) for name in sorted(names)[-_SIBLINGS_MAX:]]
    root = Path(os.path.abspath(store.root))
    times = {}
    for name, is_directory in ConfinedStore(root.parent).list_kinds("").items():
        try:
            if is_directory and name != root.name:
                times[name] = os.stat(root.parent / name / "events.jsonl", follow_symlinks=False).st_mtime
        except OSError:
            continue  # not a run
    newest = sorted(times, key=lambda name: times[name])[-_SIBLINGS_MAX:]
    return [(name, ConfinedStore(root.parent, name)) for name in newest]


def _read_newest_events(store: Store) -> Iterator[JsonObject]:
    """Iterate over the newest events of a run. Those of an attempt whose start is older are useless, and dropped."""
    if store.root is not None:
        with as_local(store).open("events.jsonl") as file:
            file.seek(max(os.fstat(file.fileno()).st_size - _EVENTS_BYTES_MAX, 0))
            yield from _parse_incidents(file.read(_EVENTS_BYTES_MAX))
        return
    chosen, left_bytes, files = [], _EVENTS_BYTES_MAX, store.list_files("events/")
    # Events of process 0 first, which has recorded the starts, and of these the newest.
    for name in sorted(files, key=lambda name: (name.split(".")[1:2] == ["0"], name), reverse=True):
        left_bytes -= max(files[name].size_bytes, _EVENTS_BYTES_MAX // 64)  # each object is a request
        if left_bytes < 0:
            break
        chosen.append(name)
    for name in sorted(chosen):
        yield from _parse_incidents(store.read(name))


def _parse_incidents(content: bytes) -> list[JsonObject]:
    # Most events are saves, whose parsing would take the time of the start from the thread that compiles.
    return parse_lines(b"\n".join(filter(_INCIDENT.search, content.split(b"\n"))))
