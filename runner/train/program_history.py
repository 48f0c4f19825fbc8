"""Programs that have made the steps of a run: a start compares its own with the recorded ones to notice edited code.

The digest of a program depends on the code, and on `facts`: the config, the mesh, the device kind, the micro-batch,
versions and options. Each manifest records the program that has made its step, with its facts, and the newest program
for each of the last facts, because an elastic job may return to a mesh that it had before. If two programs have equal
facts and other digests, the code has changed. If facts differ too, they are reported as possible causes.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from runner.attempts.attempt import Attempt
from runner.attempts.environment import collect_options, collect_versions, compare_environments
from runner.checkpoint.fork import find_continued_manifest
from runner.checkpoint.manifest import Manifest
from runner.config import TrainerConfig
from runner.console import say, warn
from runner.distributed.agreement import Hosts
from runner.spec import Document, ExecutionSpec, Trajectory, hash_record
from runner.spec.model import Policy, list_keys
from runner.storage import JsonObject, Store
from runner.train.compile import compute_program_digest
from runner.train.layout import BatchLayout
from runner.train.program import Program, Programs
from runner.train.stages import list_schedule_stages

_DIGEST_CHARACTERS = 12
KNOWN_MAX = 8  # programs in a manifest, each with other facts
_RECORD_KEYS = {"digest", "facts", "known", "changes"}
_SOFTWARE = ("versions", "options")  # facts that are compared as a part of the environment


@dataclass(frozen=True)
class ProgramRecord:
    """Program of a train step, as it is recorded."""

    digest: str  # digest of its StableHLO
    facts: JsonObject  # values on which the digest depends, other than the code: JSON values by name

    @functools.cached_property
    def facts_digest(self) -> str:
        """Digest of the facts, by which programs are looked up."""
        return hash_record(self.facts)[:16]


@dataclass(frozen=True)
class ProgramChange:
    """Difference of a program from the one that has made the newest step."""

    before: str  # digest of the recorded program
    now: str  # digest of the present one
    settings: Sequence[str]  # differing facts that belong to the spec or the hardware, as text
    software: Sequence[str]  # differing versions and options, as text

    @property
    def is_expected(self) -> bool:
        """True if the spec or the hardware differ, which changes the program of unchanged code too."""
        return bool(self.settings)

    def list_changes(self) -> list[str]:
        """Return the change in a few words, then the other differences, or the code if there are none."""
        others = [*self.settings, *self.software] or ["the code, since nothing else has changed"]
        return [f"program of the train step {self.before} -> {self.now}", *others]

    def describe(self, step: int) -> str:
        """Return the change since `step` was saved, as a part of a line."""
        return f"these have changed since step {step} was saved: {'; '.join(self.list_changes())}"


def _get_program_record(topology: JsonObject | None) -> JsonObject | None:
    """Return the program from `topology` of a manifest; None if it has none, as those of older versions."""
    record = (topology or {}).get("program", {})
    return record if record.keys() >= _RECORD_KEYS else None


class ProgramHistory:
    """Programs of the trajectory of one run, as its manifests record them (`topology.program`)."""

    def __init__(self) -> None:
        self._num_changes = 0
        self._known: dict[str, str] = {}  # digests of programs by digest of their facts, the newest last

    def resume(self, record: JsonObject | None, program: ProgramRecord) -> ProgramChange | None:
        """Continue from the record in a manifest, and return the difference of `program` from it.

        None means that there is none, or that the manifest has no record.
        """
        self._num_changes, self._known = 0, {}
        if record is None:
            return None
        self._num_changes, self._known = record["changes"], dict(record["known"])
        change = find_change(record, program)
        if change is not None and not change.is_expected:
            self._num_changes += 1
            # The other ones are programs of the former code.
            self._known = {}
        return change

    def add(self, program: ProgramRecord) -> JsonObject:
        """Return the record for a manifest whose step `program` has made."""
        self._known.pop(program.facts_digest, None)
        self._known[program.facts_digest] = program.digest
        self._known = dict([*self._known.items()][-KNOWN_MAX:])
        return {
            "digest": program.digest,
            "facts": program.facts,
            "known": dict(self._known),
            "changes": self._num_changes,
        }


def find_change(record: JsonObject, program: ProgramRecord) -> ProgramChange | None:
    """Return the difference of `program` from the record in a manifest; None if the digests are equal."""
    # The order of the keys in a file is no property of a record, so the newest program is stored by itself.
    known = record["known"].get(program.facts_digest)
    if known is not None:
        return None if known == program.digest else ProgramChange(known, program.digest, [], [])
    if record["digest"] == program.digest:
        return None
    before, now = record["facts"], program.facts
    # A fact that one side lacks is ignored. Sections of the config are given by their digests.
    settings = [
        name if name.startswith("config.") else f"{name} {before[name]} -> {now[name]}"
        for name in sorted({*before} & {*now} - {*_SOFTWARE})
        if before[name] != now[name]
    ]
    software = compare_environments(
        *({name: facts[name] for name in _SOFTWARE if name in facts} for facts in (before, now))
    )
    return ProgramChange(record["digest"], program.digest, settings, software)


class ProgramGuard:
    """Comparison of the programs of this attempt with those that have made the steps of the run."""

    def __init__(self, spec: ExecutionSpec, document: Document, programs: Programs, hooks: Trajectory):
        """Begin without records of earlier attempts. `hooks` is their identity: programs may update their counters."""
        self._spec, self._document, self._programs, self._hooks = spec, document, programs, hooks
        self._history = ProgramHistory()
        self._described: dict[tuple[int, str], ProgramRecord] = {}  # by number of the stage and digest, for saves

    @functools.cached_property
    def software(self) -> JsonObject:
        """Versions and options of this process, as facts."""
        return {"versions": collect_versions(), "options": collect_options()}

    def describe(self, program: Program, layout: BatchLayout, digest: str, num_processes: int) -> ProgramRecord:
        """Return the record of a program of this `layout` and `digest`, with the values on which that depends."""
        key = program.plan.number, digest
        if key in self._described:
            return self._described[key]
        builder, setup = program.builder, program.train_setup
        plans = self._programs.plans[: program.plan.number + 1]
        if len(plans) == 1:  # The total of a run without stages may be in epochs.
            plans = [replace(plans[0], config=builder.config_in_steps)]
        config: TrainerConfig[Any] = plans[-1].config
        other_keys = list_keys(type(config), Policy.NO_PROGRAM)
        described = {name: value for name, value in config.model_dump(mode="json").items() if name not in other_keys}
        train = described.pop("train")
        described["train"] = {key: value for key, value in train.items() if f"train.{key}" not in other_keys}
        described["schedule"] = [
            [each.start, each.begins_schedule, each.schedule.model_dump(mode="json"), each.peak]
            # Other schedules are the same function of the step in a run that is extended.
            + ([each.total_steps] if each.schedule.depends_on_total_steps else [])
            for each in list_schedule_stages(plans)
        ]
        # Of the data, a program has their shapes and the size of the vocabulary.
        described["data"] = [[name, *field.shape, str(field.dtype)] for name, field in sorted(layout.fields.items())]
        described["data"].append([builder.vocabulary_size])
        facts: JsonObject = {
            f"config.{name}": hash_record({"section": value})[:_DIGEST_CHARACTERS] for name, value in described.items()
        }
        facts["hooks"] = hash_record(self._hooks)[:_DIGEST_CHARACTERS]
        facts |= setup.describe_hardware(num_processes)
        facts["micro_batch_examples"] = layout.micro_batch_examples
        facts["avoided_kernels"] = sorted(setup.kernels.avoided)
        self._described[key] = ProgramRecord(digest, facts | self.software)
        return self._described[key]

    def describe_compiled(self, program: Program, num_processes: int) -> ProgramRecord:
        """Return the record of a program that is compiled."""
        return self.describe(program, program.layout, program.compiled.digest, num_processes)

    def make_record(self, num_processes: int) -> JsonObject:
        """Return the record for a manifest whose step the current program has made."""
        return self._history.add(self.describe_compiled(self._programs.current, num_processes))

    def validate_start(self, store: Store, known_micro_batch: int | None, hosts: Hosts) -> None:
        """Raise `SpecError` if the spec refuses other programs, and the code no longer makes that of the newest step.

        Called on every host, before the claim, since a start that is refused must not stop a running attempt.
        Kernels that the job must avoid, and a smaller micro-batch, are known only later: `continue_from` compares
        again.
        """
        if self._spec.checkpoint.program != "refuse":
            return

        def compare() -> None:
            manifest = find_continued_manifest(store, self._spec.checkpoint.fork_from)
            if manifest is None:
                return
            program = self._programs.current
            layout = program.builder.list_layouts(program.train_setup, known_micro_batch)[0]
            lowered = program.train_setup.lower_train(program.builder.train_step, layout)
            record = self.describe(program, layout, compute_program_digest(lowered), hosts.num_processes)
            former = _get_program_record(manifest.topology)
            self._validate_change(None if former is None else find_change(former, record), manifest.step)

        hosts.run_on_main(compare)

    def continue_from(self, manifest: Manifest, attempt: Attempt, is_start: bool) -> None:
        """Compare with the program that has made a restored step, and report a change. Called on every host.

        Raises `SpecError` if the spec refuses the change.
        """
        # The step was made by this stage; later ones have other programs.
        program = self._programs.at(max(manifest.step - 1, 0))
        program.start_compiling(self._programs.limit_bytes)
        record, step = self.describe_compiled(program, attempt.hosts.num_processes), manifest.step

        def resume() -> None:
            change = self._history.resume(_get_program_record(manifest.topology), record)
            if change is None or not is_start:
                return
            self._validate_change(change, step)
            (say if change.is_expected else warn)(change.describe(step))
            programs = [change.before, change.now]
            attempt.record(
                "changed", step, changes=change.list_changes(), program=programs, expected=change.is_expected
            )

        # Only process 0 writes manifests and prints, and all learn of a refusal.
        attempt.hosts.run_on_main(resume)

    def _validate_change(self, change: ProgramChange | None, step: int) -> None:
        if change is not None and not change.is_expected and self._spec.checkpoint.program == "refuse":
            reason = f"is refuse, and {change.describe(step)}; restore the former ones, or set warn to go on with these"
            raise self._document.error("checkpoint.program", reason)
