"""Models of the sections of a spec: keys, defaults, descriptions, and the checks that need only one section.

The descriptions appear in the reference in `.github/docs/reference` and in the JSON Schema that editors show.
"""

import enum
import functools
import re
import types
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_serializer,
    field_validator,
    model_validator,
)

Auto = Literal["auto"]
PARAMS = "params"  # value of `--weights` for the trained parameters, as opposed to an average of them
Section = dict[str, Any]  # a section that the class of a job or a hook validates
_Level = Literal["debug", "info", "warning", "error"]

_REDACTED_URL = "$NOT_WRITTEN_DOWN"  # replaces a secret URL in the `spec.yaml` of a run

MAX_PROFILE_STEPS = 100  # a profile is kept in memory, and the job waits while it is written
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
HOOK_PATTERN = r"^[A-Za-z][A-Za-z0-9_-]*$"  # a hook's name becomes part of the names of leaves
JOB_PATTERN = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$"
CLASS_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")  # `module:Class`, where a name of files may stand too


class FrozenModel(BaseModel):
    """Base of every model in a spec: immutable, no unknown keys, no coercion between types, finite numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, validate_default=True)


class JobConfig(FrozenModel):
    """Base of the model that a job class has for its `config`."""

    @property
    def free_keys(self) -> frozenset[str]:
        """Dotted keys or sections of `config` that a resumed job may change, since they do not change its bits."""
        return frozenset()

    @property
    def content_keys(self) -> frozenset[str]:
        """Dotted keys or sections of `config` that locate content, and may change on resume if the content is the same.

        Their values are not compared: the job's `identity` must have a digest of the content.
        """
        return frozenset()

    @property
    def stage_trajectory(self) -> Section:
        """Keys of the trajectory for changes of the config during the run; by default none."""
        return {}

    def explain_refusal(self, keys: Sequence[str], saved: Section, step: int) -> str:
        """Return which changes a run with the trajectory `saved`, committed up to `step`, could continue with.

        `keys` are those of the trajectory that differ. Empty by default.
        """
        return ""

    def list_advised_stages(
        self, keys: Sequence[str], saved: Section, step: int, given: Sequence[Section]
    ) -> list[Section] | None:
        """Return `config.stages` that change these keys from `step` on; None if no stage can, as by default.

        The arguments are those of `explain_refusal`, and the stages that the spec has.
        """
        return None

    def explain_digest(self, key: str, keys: Sequence[str]) -> str:
        """Return why a key of the trajectory that is a digest has changed, as an end of a line; empty by default.

        `keys` are all keys that differ, of which others may be the cause.
        """
        return ""

    def list_fork_changes(self, keys: Sequence[str]) -> list[str]:
        """Return the keys to list in `fork_from.changes` to change these keys; empty if a fork cannot change them."""
        return list(keys)

    @property
    def output_keys(self) -> frozenset[str]:
        """Dotted keys of `config` that place output of the job outside of its directory, unless they are null."""
        return frozenset()


class MeshConfig(FrozenModel):
    """Axis sizes of the device mesh. At most one is auto: it takes the devices that the others leave."""

    data: PositiveInt | Auto = Field(default="auto", description="Data-parallel axis: shards the batch only.")
    fsdp: PositiveInt | Auto = Field(
        default=1, description="FSDP axis: shards the batch, parameters and optimizer state."
    )
    sequence: PositiveInt | Auto = Field(
        default=1, description="Context-parallel axis: shards the positions of a sequence."
    )
    tensor: PositiveInt | Auto = Field(default=1, description="Tensor-parallel axis: shards single weight matrices.")
    expert: PositiveInt | Auto = Field(
        default=1, description="Expert-parallel axis: shards the experts, and the batch together with data and fsdp."
    )

    @model_validator(mode="after")
    def _validate_autos(self) -> "MeshConfig":
        # Two of them would leave the split of the devices undetermined.
        autos = [axis for axis, size in self if size == "auto"]
        if len(autos) > 1:
            raise ValueError(f"axes {', '.join(autos)} are auto, but only one may be; give the others a size")
        return self


class PriceConfig(FrozenModel):
    """Price of the hardware, for the costs that `plan` and `status` print."""

    dollars_per_chip_hour: PositiveFloat = Field(description="Price of one chip for an hour, as your contract has it.")
    as_of: str | None = Field(
        default=None,
        pattern=r"^\d{4}-\d{2}-\d{2}$",
        description="Day of the price list, as YYYY-MM-DD, which is printed beside each cost; null: not known.",
    )


class Topology(FrozenModel):
    """The hardware that the job is sized for, and the mesh over it."""

    accelerator: str = Field(
        default="any",
        min_length=1,
        description="any, or the hardware that the job is sized for (cpu, v5e-16, 2xv5e-256, h200-8); the job refuses "
        "to run on other hardware.",
    )
    mesh: MeshConfig = Field(default=MeshConfig(), description="Axis sizes of the device mesh.")
    elastic: bool = Field(
        default=False,
        description="Start with the hosts that have joined within deadlines.start_seconds, whichever are missing; "
        "false: exit with 76 then.",
    )
    grow: Literal["never", "at_save"] = Field(
        default="never",
        description="Growth of an elastic job that began without some hosts. at_save: once all of them wait to join, "
        "a save stops the job with 75, and its restart begins with all hosts; never: they wait until it ends.",
    )
    deterministic: bool = Field(
        default=True,
        description="Compile programs that compute the same bits at every start, even where others are faster (GPUs).",
    )
    compile_cache: Literal["host", "directory"] = Field(
        default="host", description="Place of the compile cache: each host's own disk, or the run's directory as well."
    )
    price: PriceConfig | None = Field(
        default=None, description="Price of the hardware, with which plan and status print dollars; null: no costs."
    )

    @model_validator(mode="after")
    def _validate_grow(self) -> "Topology":
        if self.grow == "at_save" and not self.elastic:
            raise ValueError("grow: at_save is read by an elastic job only; set elastic: true too")
        return self


class Deadlines(FrozenModel):
    """Time limits of waits. A job that exceeds one exits with 76 and names the process that is late."""

    start_seconds: PositiveFloat = Field(default=300.0, description="Time limit for all hosts to join, at the start.")
    step_seconds: PositiveFloat | None = Field(
        default=None, description="Time limit of a step; null: 20 times the usual step time, and at least 60."
    )
    phase_seconds: PositiveFloat = Field(
        default=3600.0, description="Time limit of every other phase: compile, restore, data, evaluation, save."
    )


class BestCheckpointConfig(FrozenModel):
    """Choice of the best checkpoint by one metric, among the checkpoints whose step has that metric."""

    metric: str = Field(min_length=1, description="Key of metrics.jsonl, such as val/loss.")
    mode: Literal["min", "max"] = Field(default="min", description="min: lower is better; max: higher is better.")


class InitFromConfig(FrozenModel):
    """Weights to start from, and the differences from the model that are allowed."""

    path: str = Field(
        min_length=1, description="Source of the weights, in the same form as an init_from that is plain text."
    )
    weights: str = Field(
        default=PARAMS,
        min_length=1,
        description="Weights of a run to use: the trained ones (params), or an average of them (ema_0.999).",
    )
    allow_missing: list[str] = Field(
        default=[],
        description="Patterns (*, ?) of tensors, in Hugging Face's names, that may be missing or have another shape, "
        "and of keys of config.json (config.KEY) that may differ.",
    )
    ignored_config_keys: list[Annotated[str, Field(min_length=1)]] = Field(
        default=[],
        description="Keys of config.json that the model's family does not know, or not with their value, to read the "
        "file without; in a section SECTION.KEY.",
    )
    rename: dict[str, str | None] = Field(
        default={},
        description="Names of tensors in the model, by their names in the files or by the first parts of these; null: "
        "skip the tensor.",
    )


class ForkConfig(FrozenModel):
    """Checkpoint of another run that a new run begins with, whole, and the keys that differ from that run."""

    run: str = Field(min_length=1, description="Directory or URL of the run that is forked, the parent.")
    step: Annotated[int, Field(ge=0)] | Literal["newest", "best"] = Field(
        default="newest",
        description="Step of the parent's checkpoint; newest: its newest good one; best: the best by its keep_best.",
    )
    changes: list[Annotated[str, Field(min_length=1)]] = Field(
        default=[],
        description="Dotted keys or sections, such as config.optimizer, that may have other values than in the parent.",
    )


class CheckpointConfig(FrozenModel):
    """When to save, which checkpoints to keep, and which state to start from."""

    every_steps: PositiveInt | None = Field(
        default=1000, description="Steps between two saves; null: no saves by steps."
    )
    every_minutes: PositiveFloat | None = Field(
        default=None, description="Minutes between two saves, checked at logged steps; null: no saves by time."
    )
    every_epochs: PositiveFloat | None = Field(
        default=None,
        description="Passes over the training data between two saves, such as 1 or 0.5, each rounded up to a whole "
        "step; for a trainer with a single source and without stages. null: no saves by epochs.",
    )
    every: Auto | None = Field(
        default=None,
        description="auto: save at the interval that loses the least time (Young and Daly), from the measured stall of "
        "a save.",
    )
    mean_time_between_failures_hours: PositiveFloat | None = Field(
        default=None,
        description="Mean time between failures of the whole job, for checkpoint.every: auto; null: estimated "
        "from the number of devices (one failure in 50,000 hours of a device, at most 24) and from earlier attempts.",
    )
    keep_last: PositiveInt = Field(default=3, description="Number of newest checkpoints to keep.")
    keep_every_steps: PositiveInt | None = Field(
        default=None,
        description="Save at multiples of this number of steps, and keep these checkpoints forever; null: none.",
    )
    keep_best: BestCheckpointConfig | None = Field(
        default=None, description="Keep the best checkpoint by a metric as well; null: none."
    )
    init_from: Annotated[str, Field(min_length=1)] | InitFromConfig | None = Field(
        default=None,
        description="Weights to start from if the run has no checkpoint of its own: a run (RUN, RUN/checkpoints/STEP "
        "or RUN/checkpoints/best), or a directory or URL in Hugging Face's layout, which also gives the keys of "
        "config.model that the spec leaves out.",
    )
    fork_from: ForkConfig | None = Field(
        default=None,
        description="Checkpoint of another run to start from with its whole state, if the run has no checkpoint of its "
        "own; null: none.",
    )
    local_directory: str | None = Field(
        default=None,
        min_length=1,
        description="Directory of the fast tier, on each host's own disk or RAM disk and lost with it; null: none.",
    )
    local_every_steps: PositiveInt | None = Field(
        default=None, description="Steps between two saves to local_directory."
    )
    local_replicas: NonNegativeInt = Field(
        default=0,
        description="Number of copies of each host's part of the fast tier on other hosts, from which a host without "
        "its part restores.",
    )
    grace_seconds: PositiveFloat | None = Field(
        default=None, description="Time that the engine gives after SIGTERM; a save that takes longer causes a warning."
    )
    max_unsaved_minutes: PositiveFloat = Field(
        default=60.0, description="The run exits with 76 if no save could be committed for this long."
    )

    program: Literal["warn", "refuse"] = Field(
        default="warn",
        description="What a start does whose train step is another program than the one that has made the newest step, "
        "although spec and hardware are the same, because code or packages were changed. warn: it says so and goes on; "
        "refuse: it ends with 2.",
    )

    @property
    def initial_weights(self) -> InitFromConfig | None:
        """`init_from` as a section, None if it is null."""
        return InitFromConfig(path=self.init_from) if isinstance(self.init_from, str) else self.init_from

    @model_validator(mode="before")
    @classmethod
    def _drop_default_interval(cls, data: Any) -> Any:
        if not isinstance(data, dict) or (data.get("every") is None and data.get("every_epochs") is None):
            return data
        if isinstance(data.get("every"), int):
            raise ValueError(f"every: got {data['every']}, needs auto; an interval in steps is every_steps")
        return {"every_steps": None} | data

    @model_validator(mode="after")
    def _validate_keys_together(self) -> "CheckpointConfig":
        # Only keys that the user has written count, not defaults.
        keys = ("every_steps", "every_minutes", "every_epochs")
        given = [key for key in keys if key in self.model_fields_set and getattr(self, key)]
        if self.every is not None and given:
            raise ValueError(f"every: auto chooses the interval; leave out {' and '.join(given)}")
        if self.every is None and all(getattr(self, key) is None for key in keys):
            raise ValueError("every_steps, every_minutes and every_epochs are all null; give one of them")
        if self.fork_from is not None and self.init_from is not None:
            raise ValueError(
                "fork_from and init_from are both given; fork_from takes the whole state of a run, init_from weights "
                "alone: leave one of them out"
            )
        if (self.local_directory is None) != (self.local_every_steps is None):
            raise ValueError("local_directory and local_every_steps belong together; give both or none")
        if self.local_replicas and self.local_directory is None:
            raise ValueError("local_replicas are copies of the fast tier; give local_directory and local_every_steps")
        if self.local_directory is not None and "://" in self.local_directory:
            raise ValueError(f"local_directory is {self.local_directory}; needs a path on the host's own disk")
        return self


class NotifyConfig(FrozenModel):
    """Notifications when the run is done, failed, fell back to an older checkpoint, stalled, or is often preempted."""

    command: Annotated[list[str], Field(min_length=1)] | None = Field(
        default=None, description="Program with its arguments, which gets the event as JSON on standard input."
    )
    webhook: str | None = Field(
        default=None,
        pattern=r"^(\$[A-Za-z_]\w*|https?://\S+)$",
        description="URL to which the event is posted as JSON, or $NAME: the environment variable of process 0 that "
        "holds it. The URL is never written into the directory.",
    )
    preemptions_per_hour: PositiveInt = Field(
        default=4, description="Notify once if there are more preemptions than this within an hour."
    )

    @model_validator(mode="after")
    def _validate_target(self) -> "NotifyConfig":
        if self.command is None and self.webhook is None:
            raise ValueError("command and webhook are both null; give one of them, or notify: null")
        return self

    @field_serializer("webhook")
    def _redact_url(self, webhook: str | None) -> str | None:
        # The resolved spec is in the run's directory, which people may read who must not post.
        return webhook if webhook is None or webhook.startswith("$") else _REDACTED_URL


class LoggingConfig(FrozenModel):
    """Reports of a run, and their interval."""

    every_steps: PositiveInt = Field(
        default=10, description="Steps between two rows of metrics; the last step always has one."
    )
    wandb: Literal["disabled", "offline", "online"] = Field(
        default="disabled", description="Mode of Weights & Biases; online becomes offline without an API key."
    )
    wandb_entity: str | None = Field(
        default=None, min_length=1, description="User or team in W&B; null: the default of the API key."
    )
    wandb_tags: list[Annotated[str, Field(min_length=1, max_length=64)]] = Field(
        default=[], description="Tags of the run in W&B."
    )
    level: _Level = Field(default="info", description="Least severe level that process 0 prints.")
    level_other_hosts: _Level = Field(
        default="warning", description="Least severe level that the other processes print."
    )
    format: Literal["text", "json"] = Field(
        default="text", description="text: lines for a person; json: a JSON object per line, for cloud logging."
    )
    profile: str | None = Field(
        default=None,
        pattern=r"^\d{1,12}:\d{1,12}$",
        description="START:STOP, in completed steps: profile the steps after START up to STOP, at most "
        f"{MAX_PROFILE_STEPS}, on process 0.",
    )
    notify: NotifyConfig | None = Field(default=None, description="Notifications; null: none.")
    tensorboard: bool = Field(default=False, description="Write event files of TensorBoard into tensorboard/.")

    @field_validator("profile")
    @classmethod
    def _validate_profile(cls, profile: str | None) -> str | None:
        start, stop = map(int, (profile or "0:1").split(":"))
        if not start < stop <= start + MAX_PROFILE_STEPS:
            raise ValueError(f"{profile} is {stop - start} steps; needs START:STOP with 1 to {MAX_PROFILE_STEPS} steps")
        return profile


class HookEntry(FrozenModel):
    """A hook, its name and its own config."""

    hook: str = Field(pattern=JOB_PATTERN, description="Class of the hook, as module.path:Class.")
    name: str | None = Field(
        default=None,
        pattern=HOOK_PATTERN,
        description="Name of the hook and of its counters in the state, unique in the spec; null: its class's name.",
    )
    config: Section = Field(default={}, description="Options of the hook, validated by its class.")

    @property
    def effective_name(self) -> str:
        """Name of the hook and of its counters."""
        return self.name or self.hook.partition(":")[2]


class ExecutionSpec(FrozenModel):
    """A job: its class, its directory, its devices, and its own config."""

    name: str = Field(
        pattern=NAME_PATTERN,
        max_length=128,
        description="Name of the run, also in W&B; a valid file name. A directory belongs to one name.",
    )
    project: str = Field(default="general", min_length=1, description="Project of the run in W&B.")
    group: str = Field(default="default", min_length=1, description="Group of the run within the project in W&B.")
    job: str = Field(pattern=JOB_PATTERN, description="Class of the job, as module.path:Class; any RestoreableJob.")
    directory: str = Field(
        min_length=1,
        description="Directory of everything that the run writes: a local path shared by all hosts (~ is home), gs://, "
        "s3:// or az://.",
    )
    seed: int = Field(
        default=0, ge=0, lt=2**32, description="Seed of all random numbers: initialisation, data order, dropout."
    )
    topology: Topology | None = Field(
        default=None, description="Hardware and device mesh. null: any devices, for a trainer."
    )
    checkpoint: CheckpointConfig = Field(
        default=CheckpointConfig(), description="When to save, and which checkpoints to keep."
    )
    deadlines: Deadlines = Field(default=Deadlines(), description="Time limits of waits.")
    logging: LoggingConfig = Field(default=LoggingConfig(), description="Reports of the run, and their interval.")
    hooks: list[Annotated[str, Field(pattern=JOB_PATTERN)] | HookEntry] = Field(
        default=[],
        description="Hooks of a trainer, called in this order. A hook sees metrics and weights, and may save, evaluate "
        "or stop. Each is module.path:Class, or a section of hook, name and config.",
    )
    config: Section = Field(default={}, description="Options of the job, validated by its class.")

    @property
    def shares_compiled_programs(self) -> bool:
        """True if the compile cache is in the run's directory, for all hosts."""
        return self.topology is not None and self.topology.compile_cache == "directory"

    @property
    def hook_entries(self) -> list[HookEntry]:
        """`hooks`, each as a section of hook, name and config."""
        return [HookEntry(hook=entry) if isinstance(entry, str) else entry for entry in self.hooks]


# Policies of keys: what depends on a key during a run, `Annotated[int, Policy.FREE]`. A policy of a section holds for
# all keys in it. The reference in .github/docs/reference shows them.


class Policy(enum.Enum):
    """Statement about a key of `config`. A key without any never changes during a run, and no array depends on it."""

    FREE = enum.auto()  # a resumed run may have another value, which changes its results by rounding at most
    STAGE = enum.auto()  # a stage of the run may set it (`config.stages`)
    STATE = enum.auto()  # shapes and types of the arrays of the state depend on it
    NO_STATE = enum.auto()  # shapes and types do not depend on it, although its section is marked `STATE`
    # The program of a step depends on it only by other facts of the program, such as the shapes of a batch
    # (`runner.train.program_history`).
    NO_PROGRAM = enum.auto()


@functools.cache
def list_keys(model: type[BaseModel], policy: Policy) -> tuple[str, ...]:
    """Return the dotted keys of a model that are marked with a policy, without those inside a marked section.

    Indices of lists are left out: `data.mixture.max_epochs` is the key of every source of the mixture. Sections by
    name, such as validation sets, are not searched.
    """
    found: list[str] = []
    for name, field in model.model_fields.items():
        if policy in field.metadata:
            found.append(name)
        else:
            for inner in iterate_models(field.annotation):
                found += [f"{name}.{key}" for key in list_keys(inner, policy)]
    return tuple(dict.fromkeys(found))


def iterate_models(annotation: Any, everywhere: bool = False) -> Iterator[type[BaseModel]]:
    """Yield the models of the values of a key: one, alternatives, or those in a list; `everywhere`: in mappings too."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif everywhere or get_origin(annotation) in (Union, types.UnionType, list):
        for argument in get_args(annotation):
            yield from iterate_models(argument, everywhere)
