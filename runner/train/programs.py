"""Programs that have made the steps of a run: a start compares its own with the recorded ones to notice edited code.

The digest of a program depends on the code, and on `facts`: the config, the mesh, the device kind, the micro-batch,
versions and options. Each manifest records the program that has made its step, with its facts, and the newest program
for each of the last facts, because an elastic job may return to a mesh that it had before. If two programs have equal
facts and other digests, the code has changed. If facts differ too, they are reported as possible causes.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from runner.config import TOTAL_KEYS, TrainerConfig
from runner.run.environment import collect_options, collect_versions, compare_environments
from runner.spec import Trajectory, hash_record
from runner.storage import JsonObject
from runner.train.layout import BatchLayout
from runner.train.stages import CompiledStage, StagePlan, list_schedule_stages

_DIGEST_CHARACTERS = 12
KNOWN_MAX = 8  # programs in a manifest, each with other facts
_RECORD_KEYS = {"digest", "facts", "known", "changes"}
# Sections of the config that are no part of the program of a step, or of which only what is named below is.
_OTHER_SECTIONS = ("data", "eval", "schedule", "stages", "train")
_OTHER_TRAIN_KEYS = {*(key.partition(".")[2] for key in TOTAL_KEYS), "batch_ramp", "micro_batch_examples", "skip_steps"}
_SOFTWARE = ("versions", "options")  # facts that are compared as a part of the environment


@dataclass(frozen=True)
class Program:
    """Program of a train step.

    Attributes:
        digest: digest of its StableHLO.
        facts: values on which the digest depends, other than the code: JSON values by name.
    """

    digest: str
    facts: JsonObject

    @functools.cached_property
    def facts_digest(self) -> str:
        """Digest of the facts, by which programs are looked up."""
        return hash_record(self.facts)[:16]


@dataclass(frozen=True)
class ProgramChange:
    """Difference of a program from the one that has made the newest step.

    Attributes:
        before: digest of the recorded program.
        now: digest of the present one.
        settings: differing facts that belong to the spec or the hardware, as text.
        software: differing versions and options, as text.
    """

    before: str
    now: str
    settings: Sequence[str]
    software: Sequence[str]

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


def get_program_record(topology: JsonObject | None) -> JsonObject | None:
    """Return the program from `topology` of a manifest; None if it has none, as those of older versions."""
    record = (topology or {}).get("program", {})
    return record if record.keys() >= _RECORD_KEYS else None


class ProgramHistory:
    """Programs of the trajectory of one run, as its manifests record them (`topology.program`)."""

    def __init__(self) -> None:
        self._num_changes = 0
        self._known: dict[str, str] = {}  # digests of programs by digest of their facts, the newest last
        self._described: dict[tuple[int, str], Program] = {}  # by number of the stage and digest; each save asks again

    @functools.cached_property
    def software(self) -> JsonObject:
        """Versions and options of this process, as facts."""
        return {"versions": collect_versions(), "options": collect_options()}

    def describe(
        self,
        stage: CompiledStage,
        plans: Sequence[StagePlan],
        layout: BatchLayout,
        digest: str,
        hooks: Trajectory,
        num_processes: int,
    ) -> Program:
        """Return the program of a stage with its facts.

        Args:
            stage: the stage.
            plans: all stages of the run.
            layout: split of the batch for which the program was made.
            digest: digest of the program.
            hooks: identity of the hooks, whose counters the program may update.
            num_processes: number of processes of the job.
        """
        key = stage.plan.number, digest
        if key in self._described:
            return self._described[key]
        builder, setup = stage.builder, stage.train_setup
        plans = plans[: stage.plan.number + 1]
        if len(plans) == 1:  # The total of a run without stages may be in epochs.
            plans = [replace(plans[0], config=builder.config_in_steps)]
        config: TrainerConfig[Any] = plans[-1].config
        sections = config.model_dump(mode="json")
        described = {name: value for name, value in sections.items() if name not in _OTHER_SECTIONS}
        described["train"] = {key: value for key, value in sections["train"].items() if key not in _OTHER_TRAIN_KEYS}
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
        facts["hooks"] = hash_record(hooks)[:_DIGEST_CHARACTERS]
        facts |= setup.describe_hardware(num_processes)
        facts["micro_batch_examples"] = layout.micro_batch_examples
        facts["avoided_kernels"] = sorted(setup.kernels.avoided)
        self._described[key] = Program(digest, facts | self.software)
        return self._described[key]

    def resume(self, record: JsonObject | None, program: Program) -> ProgramChange | None:
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

    def add(self, program: Program) -> JsonObject:
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


def find_change(record: JsonObject, program: Program) -> ProgramChange | None:
    """Return the difference of `program` from the record in a manifest; None if the digests are equal."""
    # The order of the keys in a file is no property of a record, so the newest program is stored by itself.
    known = record["known"].get(program.facts_digest)
    if known is not None:
        return None if known == program.digest else ProgramChange(known, program.digest, [], [])
    if record["digest"] == program.digest:
        return None
    settings, software = compare_facts(record["facts"], program.facts)
    return ProgramChange(record["digest"], program.digest, settings, software)


def compare_facts(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the differences (of spec and hardware, of software) as text. A fact that one side lacks is ignored."""
    settings = []
    for name in sorted({*before} & {*now} - {*_SOFTWARE}):
        if before[name] != now[name]:
            # Sections of the config are given by their digests.
            settings.append(name if name.startswith("config.") else f"{name} {before[name]} -> {now[name]}")
    software = compare_environments(
        *({name: facts[name] for name in _SOFTWARE if name in facts} for facts in (before, now))
    )
    return settings, software
