"""The frozen models of a spec. Owns its keys, defaults, descriptions and the checks that one section can make alone."""

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    field_serializer,
    field_validator,
    model_validator,
)

from runner.records import PARAMS

Auto = Literal["auto"]
Section = dict[str, Any]  # of a spec that a class of the user's own validates
Level = Literal["debug", "info", "warning", "error"]

REDACTED_URL = "$NOT_WRITTEN_DOWN"  # in the place of a URL in a spec that is written

MAX_PROFILE_STEPS = 100  # what is recorded is kept in memory, and written while the job stands still
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
HOOK_PATTERN = r"^[A-Za-z][A-Za-z0-9_-]*$"  # it becomes a part of the names of leaves
JOB_PATTERN = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$"


class FrozenModel(BaseModel):
    """Base of every model in a spec: immutable, no unknown keys, no coercion between types, finite numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, validate_default=True)


class JobConfig(FrozenModel):
    """Base of what a job class accepts under `config`."""

    @property
    def free_keys(self) -> frozenset[str]:
        """Dotted keys (or whole sections) inside `config` that a resumed job may change: they move no bit of it."""
        return frozenset()

    @property
    def output_keys(self) -> frozenset[str]:
        """Keys inside `config` that lead what a job writes out of its directory; where they are null it stays there."""
        return frozenset()


class MeshConfig(FrozenModel):
    """Axis sizes of the device mesh; at most one is auto, which takes the devices that the others leave."""

    data: PositiveInt | Auto = Field(default="auto", description="Devices over which only the batch is cut.")
    fsdp: PositiveInt | Auto = Field(
        default=1, description="Devices over which batch, parameters and optimizer state are cut."
    )
    sequence: PositiveInt | Auto = Field(default=1, description="Devices over which the positions of a row are cut.")
    tensor: PositiveInt | Auto = Field(default=1, description="Devices over which single matrices are cut.")
    expert: PositiveInt | Auto = Field(
        default=1, description="Devices over which experts are cut, and the batch beside data and fsdp."
    )

    @model_validator(mode="after")
    def _at_most_one_auto(self) -> "MeshConfig":
        autos = [axis for axis, size in self if size == "auto"]
        if len(autos) > 1:
            raise ValueError(f"axes {', '.join(autos)} are auto; at most one can be, give the others a size")
        return self


class Topology(FrozenModel):
    """The hardware that the job is sized for, and the mesh over it."""

    accelerator: str = Field(
        default="any",
        min_length=1,
        description="any, or what the job is sized for (cpu, v5e-16, 2xv5e-256, h200-8); other hardware is refused.",
    )
    mesh: MeshConfig = Field(default=MeshConfig(), description="Axis sizes of the device mesh.")
    elastic: bool = Field(
        default=False, description="Begin with the hosts that came in time, if some did not; else that ends with 76."
    )
    deterministic: bool = Field(
        default=True,
        description="Compile programs that give the same bits at every start, also where others are faster (GPUs).",
    )
    compile_cache: Literal["host", "directory"] = Field(
        default="host",
        description="Where compiled programs are kept: on each host's own disk, or in the run's directory too.",
    )


class Deadlines(FrozenModel):
    """When a wait is a failure: the job then ends with 76 and names who is late."""

    start_seconds: PositiveFloat = Field(default=300.0, description="For all hosts to come, at the start.")
    step_seconds: PositiveFloat | None = Field(
        default=None, description="For one step; null: 20 times the usual one, and at least 60."
    )
    phase_seconds: PositiveFloat = Field(
        default=3600.0, description="For anything else: compile, restore, data, evaluation, a save."
    )


class BestCheckpointConfig(FrozenModel):
    """The checkpoint with the best value of one metric, of those whose step has it."""

    metric: str = Field(min_length=1, description="Key of a row of metrics.jsonl, such as val/loss.")
    mode: Literal["min", "max"] = Field(default="min", description="Whether less or more is better.")


class InitFromConfig(FrozenModel):
    """Weights to begin with, and what of them need not be as the model has it."""

    path: str = Field(min_length=1, description="What init_from is where it is text alone.")
    weights: str = Field(
        default=PARAMS,
        min_length=1,
        description="Which of a run's: those that it trained, params, or an average of them, as ema_0.999.",
    )
    allow_missing: list[str] = Field(
        default=[],
        description="Patterns (*, ?) of tensors, in Hugging Face's names, that may be missing or of another shape, and "
        "of keys of config.json, as config.KEY, that may differ.",
    )
    rename: dict[str, str | None] = Field(
        default={},
        description="By the name of a tensor in the files, or the first parts of its dotted name, what the model calls "
        "it; null: not read.",
    )


class CheckpointConfig(FrozenModel):
    """When to save, what to keep, what to start from."""

    every_steps: PositiveInt | None = Field(default=1000, description="Save each time so many steps are complete.")
    every_minutes: PositiveFloat | None = Field(
        default=None, description="Save each time so many minutes have passed; asked at logged steps."
    )
    every: Auto | None = Field(
        default=None,
        description="auto: the interval that loses the least time (Young and Daly), by the measured stall of a save.",
    )
    mean_time_between_failures_hours: PositiveFloat = Field(
        default=24.0, description="Of the whole job, for checkpoint.every: auto."
    )
    keep_last: PositiveInt = Field(default=3, description="Number of newest checkpoints kept.")
    keep_every_steps: PositiveInt | None = Field(
        default=None, description="Checkpoints at multiples of this stay for good."
    )
    keep_best: BestCheckpointConfig | None = Field(
        default=None, description="The best checkpoint by a metric stays too; null: none does."
    )
    init_from: Annotated[str, Field(min_length=1)] | InitFromConfig | None = Field(
        default=None,
        description="Begin with the weights of this run (or RUN/checkpoints/STEP, or RUN/checkpoints/best), or of this "
        "directory or URL in Hugging Face's layout, where there is no own checkpoint.",
    )
    local_directory: str | None = Field(
        default=None,
        min_length=1,
        description="Fast tier on each host's own disk or RAM disk, lost with the machine; null: none.",
    )
    local_every_steps: PositiveInt | None = Field(
        default=None, description="Save to local_directory each time so many steps are complete."
    )
    grace_seconds: PositiveFloat | None = Field(
        default=None, description="What the engine gives after SIGTERM; a save that takes longer is warned of."
    )
    max_unsaved_minutes: PositiveFloat = Field(
        default=60.0, description="If no save could be committed for so long, the run ends with 76."
    )

    @property
    def initial_weights(self) -> InitFromConfig | None:
        """What `init_from` says."""
        return InitFromConfig(path=self.init_from) if isinstance(self.init_from, str) else self.init_from

    @model_validator(mode="before")
    @classmethod
    def _auto_has_no_steps(cls, data: Any) -> Any:
        """`every: auto` takes the place of the default interval."""
        return {"every_steps": None} | data if isinstance(data, dict) and data.get("every") is not None else data

    @model_validator(mode="after")
    def _some_cadence(self) -> "CheckpointConfig":
        given = {key for key in self.model_fields_set & {"every_steps", "every_minutes"} if getattr(self, key)}
        if self.every is not None and given:
            raise ValueError("every: auto chooses the interval; leave out every_steps and every_minutes")
        if self.every is None and self.every_steps is None and self.every_minutes is None:
            raise ValueError("every_steps and every_minutes are both null; a restorable job needs one of them")
        if (self.local_directory is None) != (self.local_every_steps is None):
            raise ValueError("local_directory and local_every_steps: give both or none")
        if self.local_directory is not None and "://" in self.local_directory:
            raise ValueError(f"local_directory is {self.local_directory}; it needs a disk of this host's own")
        return self


class NotifyConfig(FrozenModel):
    """Who is called when the run is done, failed, fell back to an older checkpoint, stalled, or is often preempted."""

    command: Annotated[list[str], Field(min_length=1)] | None = Field(
        default=None, description="A program and its arguments; what happened comes as JSON on its standard input."
    )
    webhook: str | None = Field(
        default=None,
        pattern=r"^(\$[A-Za-z_]\w*|https?://\S+)$",
        description="URL to which JSON is posted, or $NAME of the variable in the environment of process 0 that holds "
        "it. Of a URL nothing is written into the directory.",
    )
    preemptions_per_hour: PositiveInt = Field(
        default=4, description="More preemptions than this within an hour are told, once."
    )

    @model_validator(mode="after")
    def _somebody(self) -> "NotifyConfig":
        if self.command is None and self.webhook is None:
            raise ValueError("command and webhook are both null; give one of them, or notify: null")
        return self

    @field_serializer("webhook")
    def _keep_secret(self, webhook: str | None) -> str | None:
        return webhook if webhook is None or webhook.startswith("$") else REDACTED_URL


class LoggingConfig(FrozenModel):
    """What is reported, and how often."""

    every_steps: PositiveInt = Field(
        default=10, description="Steps from one row of metrics to the next; the last step has one too."
    )
    wandb: Literal["disabled", "offline", "online"] = Field(
        default="disabled", description="Weights & Biases mode; without a key online becomes offline."
    )
    wandb_entity: str | None = Field(
        default=None, min_length=1, description="User or team in W&B; null: the default of whose key it is."
    )
    wandb_tags: list[Annotated[str, Field(min_length=1, max_length=64)]] = Field(
        default=[], description="Tags of the run in W&B."
    )
    level: Level = Field(default="info", description="What process 0 shows, from this level on.")
    level_other_hosts: Level = Field(default="warning", description="Likewise what the other processes show.")
    format: Literal["text", "json"] = Field(
        default="text", description="Of what is shown: lines for a person, or an object a line for cloud logging."
    )
    profile: str | None = Field(
        default=None,
        pattern=r"^\d{1,12}:\d{1,12}$",
        description="START:STOP, in completed steps: record those after START up to STOP, "
        f"{MAX_PROFILE_STEPS} at most, on process 0.",
    )
    notify: NotifyConfig | None = Field(default=None, description="Who is called when something happens; null: nobody.")
    tensorboard: bool = Field(default=False, description="Write TensorBoard's event files, into tensorboard/.")

    @field_validator("profile")
    @classmethod
    def _some_steps(cls, profile: str | None) -> str | None:
        start, stop = map(int, (profile or "0:1").split(":"))
        if not start < stop <= start + MAX_PROFILE_STEPS:
            raise ValueError(f"{profile} are {stop - start} steps; needs 1 to {MAX_PROFILE_STEPS}, START:STOP")
        return profile


class HookEntry(FrozenModel):
    """A hook, and what it is told."""

    hook: str = Field(pattern=JOB_PATTERN, description="module.path:Class, any Hook.")
    name: str | None = Field(
        default=None,
        pattern=HOOK_PATTERN,
        description="What it is called, and its counters in the state; null: as its class. Each hook has its own.",
    )
    config: Section = Field(default={}, description="Belongs to the hook's class, and is validated by it.")

    @property
    def effective_name(self) -> str:
        """The name of this hook."""
        return self.name or self.hook.partition(":")[2]


class ExecutionSpec(FrozenModel):
    """One job: what runs, where it writes, on which devices, and the job's own config."""

    name: str = Field(
        pattern=NAME_PATTERN,
        max_length=128,
        description="Run name, usable as a file name; in W&B too. A directory belongs to one name.",
    )
    project: str = Field(default="general", min_length=1, description="W&B project that the run is filed under.")
    group: str = Field(default="default", min_length=1, description="Group of runs within the project, in W&B.")
    job: str = Field(pattern=JOB_PATTERN, description="module.path:Class, any RestoreableJob.")
    directory: str = Field(
        min_length=1,
        description="All that the run writes: a local path shared by all hosts (~ is home), gs://, s3:// or az://.",
    )
    seed: int = Field(
        default=0, ge=0, lt=2**32, description="Seed of every random number: initialisation, data order, dropout."
    )
    topology: Topology | None = Field(default=None, description="Devices and mesh; a trainer needs it.")
    checkpoint: CheckpointConfig = Field(default=CheckpointConfig(), description="When to save and what to keep.")
    deadlines: Deadlines = Field(default=Deadlines(), description="When a wait is a failure.")
    logging: LoggingConfig = Field(default=LoggingConfig(), description="What is reported, and how often.")
    hooks: list[Annotated[str, Field(pattern=JOB_PATTERN)] | HookEntry] = Field(
        default=[],
        description="What looks at a trainer's rows and weights, and may save, evaluate or stop: module.path:Class, or "
        "that as hook, with name and config. Called in this order.",
    )
    config: Section = Field(default={}, description="Belongs to the job class, and is validated by it.")

    @property
    def shares_compiled_programs(self) -> bool:
        """Whether compiled programs are kept in the run's directory, for all hosts."""
        return self.topology is not None and self.topology.compile_cache == "directory"

    @property
    def hook_entries(self) -> list[HookEntry]:
        """`hooks`, each as a section."""
        return [HookEntry(hook=entry) if isinstance(entry, str) else entry for entry in self.hooks]
