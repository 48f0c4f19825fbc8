"""Config of `BaseTrainer` jobs: model, data, optimizer, schedule, train, eval, precision, memory.

This module defines the keys below `config`, their defaults, and the rules between them. None of the keys depends on the
hardware; the topology determines how the global batch is split over devices. An experiment subclasses `ModelConfig` and
declares `Config = TrainerConfig[GPTConfig]`. The descriptions of the fields become the reference of a spec.
"""

import math
import re
from bisect import bisect
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Annotated, Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

from pydantic import (
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from runner.attempts.events import ROLL_BACKS_MAX
from runner.errors import InvalidError
from runner.optim.config import OPTIMIZERS, SCHEDULES, OptimizerConfig, ScheduleConfig
from runner.spec import Auto, Document, FrozenModel, JobConfig, Trajectory, is_below, is_class_path
from runner.spec.model import CLASS_PATH, PARAMS, Policy, list_keys
from runner.storage import JsonObject

DEFAULT_SOURCE = "python-stdlib"
Unit = Literal["tokens", "examples"]  # in which the length of a run is counted: examples where the data are arrays
# Keys that only data of tokens, and models of text, read.
_TOKEN_KEYS = ("tokenizer", "document_separator", "tokenise", "packing", "cache_bytes")
_TEXT_KEYS = (
    "eval.bits_per_byte",
    "eval.multiple_choice",
    "eval.samples",
    "memory.loss_chunk_positions",
    "memory.row_attention",
    "memory.attention",
)
# Names of sources, validation sets and tasks become parts of the keys of metrics.jsonl, hence no dot and no slash.
SOURCE_NAME = r"^[A-Za-z0-9_-]+$"
TOTAL_KEYS = ("train.total_steps", "train.total_tokens", "train.total_epochs")


class ModelConfig(FrozenModel):
    """Base of an experiment's architecture keys. Those marked `Policy.STAGE` may change during a run."""

    has_8bit_matmuls: ClassVar[bool] = False  # True if the model reads `precision.matmul`
    has_gradient_rounding: ClassVar[bool] = False  # True if the model reads `precision.gradient_rounding`


ModelConfigType = TypeVar("ModelConfigType", bound=ModelConfig)


class TokenSource(FrozenModel):
    """Source of tokens, or of examples of arrays."""

    source: str = Field(
        min_length=1,
        description="Origin of the tokens: `python-stdlib` (Python's own library, present on every machine); a path, a "
        "gs://, s3:// or az:// URL or a glob of text files or of token files, of this runner or another tool; the "
        "directory or URL of a corpus or of an MDS data set (with its index.json); or `module:Class`, a custom "
        "`Source`, or without `sequence_length` a data set whose examples are dicts of arrays.",
    )
    options: Annotated[dict[str, str | int | float | bool], Policy.STAGE] = Field(
        default={},
        description="Keyword arguments of a custom class; for MDS `column` (default `tokens`) and `dtype`, for "
        "ArrayRecord `dtype`, the type of the ids; for Parquet and Arrow `column` (default `input_ids`) and `mask`; "
        "for a corpus with predictions of a teacher `top_k`, the number of them that a batch has for each token; "
        "with `data.tokenise` `field`, instead of that of the section.",
    )
    dtype: Annotated[Literal["uint16", "uint32"] | None, Policy.STAGE] = Field(
        default=None,
        description="Type of the little-endian ids in .bin and .npy files without a header; null: uint16 in .bin files "
        "(those with wider ids are refused), and .npy files have a header.",
    )
    train_on: Annotated[Literal["answers", "all"] | None, Policy.STAGE] = Field(
        default=None,
        description="Tokens of dialogues that count in the loss: those of the answers (assistant tokens) or all. "
        "Required for a corpus of dialogues, and for tables with a mask or labels; unused otherwise.",
    )

    @field_validator("source")
    @classmethod
    def _validate_trust(cls, source: str, info: ValidationInfo) -> str:
        # Also if a file has this name now: it may be gone when the class is loaded.
        if isinstance(info.context, Document) and CLASS_PATH.fullmatch(source):
            info.context.validate_trust(source)
        return source


class MixtureSource(TokenSource):
    """One of several sources of the training data."""

    name: str = Field(pattern=SOURCE_NAME, description="Name of the source in metrics and messages.")
    weight: PositiveFloat = Field(
        default=1.0, description="Share of the examples relative to the other sources; weights need not add up to 1."
    )
    max_epochs: Annotated[PositiveFloat | None, Policy.FREE] = Field(
        default=None,
        description="Largest number of passes over the source; a run that would need more is refused. null: no limit.",
    )


class DataConfig(TokenSource):
    """Tokens, or examples of arrays, to train on."""

    source: Annotated[str, Policy.STAGE] = Field(
        default=DEFAULT_SOURCE, min_length=1, description=TokenSource.model_fields["source"].description
    )
    mixture: Annotated[list[MixtureSource], Policy.STAGE] = Field(
        default=[], description="Several weighted sources, instead of `source`."
    )
    tokenizer: Literal["bytes", "characters"] = Field(
        default="bytes", description="Tokenizer of text files; token files bring their own tokens."
    )
    document_separator: Literal["none", "newline", "nul"] = Field(
        default="none",
        description="Text between two text files: nothing (one file runs into the next), a newline, or a zero byte.",
    )
    tokenise: JsonObject | None = Field(
        default=None,
        description="Every source is text, which is tokenised before the first step: the keys of `config` of a "
        "`Tokenise` job besides `source` and `output`. null: sources hold tokens, or files of text without documents.",
    )
    sequence_length: Annotated[PositiveInt | None, Policy.STAGE, Policy.STATE] = Field(
        default=None,
        description="Tokens per example (sequence). Required for tokens; null where `source` names a data set whose "
        "examples are dicts of arrays.",
    )
    packing: Annotated[Literal["concatenate", "documents", "pad"], Policy.STAGE, Policy.STATE] = Field(
        default="concatenate",
        description="Content of one example: a stretch of the concatenated tokens, cut anywhere (concatenate); whole "
        "documents that do not attend to each other, long ones cut (documents); or one document and padding (pad).",
    )
    shuffle: Annotated[bool, Policy.STAGE] = Field(
        default=True,
        description="Another random order of the examples in each epoch. false: the order in which they lie in the "
        "source, in each epoch; of a mixture each source by itself, interleaved by its weight.",
    )
    validation_fraction: float = Field(
        default=0.05,
        ge=0,
        lt=1,
        description="Share of the tokens (or examples) held out for validation, taken from the end of each source.",
    )
    validation: Annotated[dict[str, TokenSource], Policy.FREE] = Field(
        default={}, description="Further validation sets by name, each a source that is read in order."
    )

    cache_bytes: Annotated[NonNegativeInt | None, Policy.FREE] = Field(
        default=None,
        description="Largest size in bytes of the on-disk cache (RUNNER_CACHE) of a bucket's tokens on each host; "
        "null: a quarter of the free space, 0: no cache. Never more than the free space.",
    )

    @property
    def sources(self) -> list[MixtureSource]:
        """Sources of the training data; a single source has the name `train`."""
        if self.mixture:
            return self.mixture
        return [MixtureSource(name="train", **{key: getattr(self, key) for key in TokenSource.model_fields})]

    @property
    def is_in_bucket(self) -> bool:
        """True if one of the sources is in a bucket."""
        return any("://" in each.source for each in [*self.sources, *self.validation.values()])

    @property
    def is_on_this_machine(self) -> bool:
        """True if one of the sources is not in a bucket: a file, or a class."""
        return any("://" not in each.source for each in [*self.sources, *self.validation.values()])

    @property
    def has_tokens(self) -> bool:
        """True if the data are tokens, False if their examples are dicts of arrays."""
        return self.sequence_length is not None

    @property
    def unit(self) -> Unit:
        """Unit in which the length of a run is counted."""
        return "tokens" if self.has_tokens else "examples"

    @property
    def units_per_example(self) -> int:
        """Tokens of an example; 1 where the examples themselves are counted."""
        return self.sequence_length or 1

    @property
    def tokens_per_example(self) -> int:
        """Tokens of an example, `sequence_length`. Raises `InvalidError` if the data are not tokens."""
        if self.sequence_length is None:
            raise InvalidError("missing key data.sequence_length: this job trains on tokens")
        return self.sequence_length

    @model_validator(mode="after")
    def _validate_kind(self) -> "DataConfig":
        if self.has_tokens:
            return self
        if not all(is_class_path(source.source) for source in self.sources):
            raise ValueError("missing key sequence_length")
        for name, source in self.validation.items():
            if not is_class_path(source.source):
                raise ValueError(
                    f"validation.{name}.source={source.source}: without sequence_length the data are arrays; name a "
                    "class with such examples, as module:Class"
                )
        sections = {"": self, **{f"validation.{name}.": source for name, source in self.validation.items()}}
        sections |= {f"mixture.{index}.": source for index, source in enumerate(self.mixture)}
        for prefix, section in sections.items():
            for key in ("dtype", "train_on", *(() if prefix else _TOKEN_KEYS)):
                if (value := getattr(section, key)) != type(section).model_fields[key].default:
                    raise ValueError(
                        f"{prefix}{key}={value}: nothing reads it, as data without sequence_length are arrays; leave "
                        "it out, or set sequence_length for tokens"
                    )
        return self

    @model_validator(mode="after")
    def _validate_tokenise(self) -> "DataConfig":
        if self.tokenise is None:
            return self
        if given := sorted({"source", "output"} & {*self.tokenise}):
            raise ValueError(f"tokenise.{given[0]}: the run sets it, from data.source and its directory; leave it out")
        for key in ("tokenizer", "document_separator"):
            if (value := getattr(self, key)) != type(self).model_fields[key].default:
                raise ValueError(f"{key}={value}: nothing reads it beside tokenise; leave it out")
        for source in [*self.sources, *self.validation.values()]:
            if is_class_path(source.source):
                raise ValueError(f"source={source.source} is a class, and tokenise needs text; tokenise it before")
            if unread := sorted({*source.options} - {"field"}):
                raise ValueError(f"options.{unread[0]}: nothing reads it beside tokenise, but field; leave it out")
            if source.dtype is not None:
                raise ValueError(f"dtype={source.dtype}: nothing reads it beside tokenise; leave it out")
        return self

    @model_validator(mode="after")
    def _validate_order(self) -> "DataConfig":
        if not self.shuffle and self.packing == "documents":
            raise ValueError(
                "shuffle=False: packing=documents combines documents by their length, so its examples have no order of "
                "the source; use packing: concatenate or pad, or leave shuffle out"
            )
        return self

    @model_validator(mode="after")
    def _validate_train_on(self) -> "DataConfig":
        if all(source.train_on != "answers" for source in self.sources):
            for name, source in self.validation.items():
                if source.train_on == "answers":
                    raise ValueError(
                        f"validation.{name}.train_on=answers, but no training source has train_on: answers; use all, "
                        "or train on answers"
                    )
        return self

    @field_validator("validation", mode="before")
    @classmethod
    def _expand_plain_sources(cls, sets: Any) -> Any:
        """Accept `name: source` as a short form of `name: {source: source}`."""
        if not isinstance(sets, dict):
            return sets
        return {name: {"source": given} if isinstance(given, str) else given for name, given in sets.items()}

    @model_validator(mode="after")
    def _validate_names(self) -> "DataConfig":
        names = [source.name for source in self.mixture]
        if duplicates := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"mixture names {duplicates[0]} twice; give each source a name of its own")
        # All of these names become parts of metric keys, so they must differ.
        taken = {*names, "train", "validation"}
        for name in self.validation:
            if name in taken or not re.fullmatch(SOURCE_NAME, name):
                raise ValueError(
                    f"validation has a set named {name!r}; use letters, digits, _ or -, and not train, validation or "
                    "the name of a source of the mixture"
                )
        if reserved := {"train", "validation"} & {*names}:
            raise ValueError(f"mixture has a source named {min(reserved)}, the name of a split; use another name")
        fields = type(self).model_fields
        given = [key for key in TokenSource.model_fields if getattr(self, key) != fields[key].default]
        # Nothing reads the keys of a single source if there is a mixture.
        if self.mixture and given:
            raise ValueError(f"got both {given[0]} and mixture; move {given[0]} into the sources of the mixture")
        if self.tokenizer == "characters" and (self.mixture or self.validation):
            raise ValueError("tokenizer=characters gives every source its own ids; use bytes with several sources")
        return self


class BatchRampConfig(FrozenModel):
    """Growth of the global batch at the beginning of the run, in equal increments; a short form of stages."""

    from_examples: PositiveInt = Field(description="Examples per optimizer step at the beginning of the ramp.")
    over_steps: PositiveInt | None = Field(
        default=None, description="Length of the ramp in steps. Exactly one of over_steps and over_tokens is needed."
    )
    over_tokens: PositiveInt | None = Field(
        default=None, description="Length of the ramp in tokens; each increment is made at a whole step."
    )
    increments: PositiveInt = Field(description="Number of equal increments up to global_batch_examples.")

    @model_validator(mode="after")
    def _validate_length(self) -> "BatchRampConfig":
        if (self.over_steps is None) == (self.over_tokens is None):
            raise ValueError("needs exactly one of over_steps and over_tokens")
        if self.over_steps is not None and self.over_steps < self.increments:
            raise ValueError(
                f"over_steps={self.over_steps} has no room for {self.increments} increments; use more steps"
            )
        return self

    def list_stages(self, batch_examples: int) -> list[JsonObject]:
        """Return the stages of the ramp; the last of them has the whole batch."""
        key, length = ("from_step", self.over_steps) if self.over_tokens is None else ("from_tokens", self.over_tokens)
        assert length is not None, "the ramp has one of the two"
        growth = (batch_examples - self.from_examples) // self.increments
        return [
            {
                key: -(-length * index // self.increments),
                "set": {"train.global_batch_examples": self.from_examples + growth * index},
                "why": "batch ramp",
            }
            for index in range(1, self.increments + 1)
        ]


class TrainConfig(FrozenModel):
    """Length of the run and size of its batches."""

    total_steps: Annotated[PositiveInt | None, Policy.STAGE, Policy.NO_PROGRAM] = Field(
        default=None,
        description="Optimizer steps of the run. Exactly one of total_steps, total_tokens and total_epochs is needed.",
    )
    total_tokens: Annotated[PositiveInt | None, Policy.STAGE, Policy.NO_PROGRAM] = Field(
        default=None, description="Tokens of the run, rounded up to whole steps, instead of total_steps."
    )
    total_epochs: Annotated[PositiveFloat | None, Policy.NO_PROGRAM] = Field(
        default=None,
        description="Passes over the training examples of the single source, rounded up to whole steps, instead of "
        "total_steps; the last step may reach into the next epoch.",
    )
    global_batch_examples: Annotated[PositiveInt, Policy.STAGE] = Field(
        description="Examples per optimizer step, over all devices."
    )
    batch_ramp: Annotated[BatchRampConfig | None, Policy.NO_PROGRAM] = Field(
        default=None, description="Growth of the global batch at the beginning of the run; null: it is constant."
    )
    micro_batch_examples: Annotated[PositiveInt | Auto, Policy.STAGE, Policy.NO_PROGRAM] = Field(
        default="auto",
        description="Examples per device and micro-batch; gradient accumulation steps follow from it. auto: the "
        "largest number whose compiled step fits in device memory.",
    )
    same_bits_devices: int | None = Field(
        default=None,
        ge=2,
        description="Number of devices up to which results are bit-identical: the run ends in the same bits on any "
        "number of devices (data x fsdp, on any number of hosts) that divides this one, 1 included. Needs "
        "micro_batch_examples; each device then holds whole gradients. null: bit-identical on one number of devices "
        "only.",
    )
    replay_every_steps: Annotated[PositiveInt | None, Policy.FREE] = Field(
        default=None,
        description="Steps between two checks of the devices: the gradients of every step with a number divisible by "
        "this one, and of the first step after each restore, are computed twice and compared bit by bit; on different "
        "devices if several hold whole copies of the parameters. If they differ, the update is not applied, and the "
        "run ends with 76 and names the device. null: never.",
    )
    skip_steps: Annotated[list[tuple[NonNegativeInt, PositiveInt]], Policy.NO_PROGRAM] = Field(
        default=[],
        description="Batches to skip: with [s, t], those of the rows s + 1 to t are left out, and the step after s "
        "completed ones takes the next batch. Steps are those of the run with all earlier ranges applied. A range that "
        "begins at the newest checkpoint or later may be added to a run in progress.",
    )

    @model_validator(mode="after")
    def _validate_skip_steps(self) -> "TrainConfig":
        end = 0
        for start, stop in self.skip_steps:
            if start >= stop:
                raise ValueError(f"skip_steps: [{start}, {stop}] does not end after its beginning; write [first, end]")
            if start < end:
                raise ValueError(
                    f"skip_steps: [{start}, {stop}] begins before the range in front of it ends, at {end}; sort the "
                    "ranges, and join those that overlap"
                )
            end = stop
        return self

    @model_validator(mode="after")
    def _validate_total(self) -> "TrainConfig":
        totals = {key: getattr(self, key) for key in ("total_steps", "total_tokens", "total_epochs")}
        given = [
            f"{key}={value:g}" if key == "total_epochs" else f"{key}={value}" for key, value in totals.items() if value
        ]
        if not given:
            raise ValueError("missing key total_steps (or total_tokens, or total_epochs)")
        if len(given) > 1:
            raise ValueError(f"got both {given[0]} and {given[1]}; keep one of them")
        return self

    @model_validator(mode="after")
    def _validate_ramp(self) -> "TrainConfig":
        ramp = self.batch_ramp
        growth = 0 if ramp is None else self.global_batch_examples - ramp.from_examples
        if ramp is not None and (growth <= 0 or growth % ramp.increments):
            counts = [count for count in range(1, growth + 1) if growth % count == 0]
            near = sorted(counts, key=lambda count: abs(count - ramp.increments))[:2]
            hint = f"use {' or '.join(map(str, sorted(near)))} increments" if near else "let the batch grow"
            raise ValueError(
                f"batch_ramp from {ramp.from_examples} to global_batch_examples={self.global_batch_examples} has no "
                f"{ramp.increments} equal increments; {hint}"
            )
        return self

    @model_validator(mode="after")
    def _validate_same_bits(self) -> "TrainConfig":
        devices, micro_batch = self.same_bits_devices, self.micro_batch_examples
        if devices is None:
            return self
        if micro_batch == "auto":
            raise ValueError(
                f"same_bits_devices={devices} needs micro_batch_examples, because the bits depend on it; set it"
            )
        # The batch must divide into whole groups of micro-batches, one group for each of the `devices`.
        if self.global_batch_examples % (devices * micro_batch):
            share, size = self.global_batch_examples // (devices * micro_batch), devices * micro_batch
            near = " or ".join(str(count * size) for count in (share, share + 1) if count)
            raise ValueError(
                f"global_batch_examples={self.global_batch_examples} does not divide into micro-batches of "
                f"{micro_batch} on same_bits_devices={devices}; use {near}"
            )
        return self


class StageConfig(FrozenModel):
    """Change of the config from one step of the run on, until the next stage."""

    from_step: PositiveInt | None = Field(
        default=None,
        description="Completed steps after which the stage begins. Exactly one of from_step and from_tokens is needed.",
    )
    from_tokens: PositiveInt | None = Field(
        default=None, description="Tokens after which the stage begins, rounded up to a whole step."
    )
    set: JsonObject = Field(
        min_length=1,
        description="New values by dotted key below `config`; each replaces the whole value of its key. The column "
        "*in a stage* of the reference says which keys a stage may set.",
    )
    why: str | None = Field(default=None, description="Reason of the change, for people.")

    @model_validator(mode="after")
    def _validate_start(self) -> "StageConfig":
        if (self.from_step is None) == (self.from_tokens is None):
            raise ValueError("needs exactly one of from_step and from_tokens")
        return self

    def sets(self, key: str) -> bool:
        """Return True if the stage sets a dotted key or a part of it."""
        return any(is_below(f"config.{each}", (key,)) for each in self.set)


def complete_sources(values: JsonObject) -> JsonObject:
    """Return the values of a stage with those that follow: a mixture replaces a single source, and the reverse."""
    if values.get("data.mixture"):
        defaults = {name: field.get_default() for name, field in TokenSource.model_fields.items() if name != "source"}
        return {"data.source": DEFAULT_SOURCE, **{f"data.{name}": value for name, value in defaults.items()}} | values
    return {"data.mixture": []} | values if "data.source" in values else values


class StageStart(NamedTuple):
    """Beginning of a stage; the first is the beginning of the run."""

    step: int  # steps completed before it
    units: int  # tokens consumed before it, or examples where the data are arrays
    units_per_step: int  # tokens (or examples) of each step in it


def locate_stages(batch_examples: int, units_per_example: int, stages: Iterable[StageConfig]) -> list[StageStart]:
    """Return the beginning of a run and that of each of its stages, in order.

    The batch and the length of an example (1 where the data are arrays) are those before the first stage.
    """
    sizes = {"train.global_batch_examples": batch_examples, "data.sequence_length": units_per_example}
    starts = [StageStart(0, 0, batch_examples * units_per_example)]
    for stage in stages:
        step, units, units_per_step = starts[-1]
        # A value of a wrong type is reported when the config of the stage is validated.
        sizes |= {key: value for key in sizes if isinstance(value := stage.set.get(key), int) and value > 0}
        if stage.from_step is not None:
            start = stage.from_step
        else:
            assert stage.from_tokens is not None, "a stage has one of the two"
            start = step - (units - stage.from_tokens) // units_per_step
        starts.append(StageStart(start, units + (start - step) * units_per_step, math.prod(sizes.values())))
    return starts


class MultipleChoiceConfig(FrozenModel):
    """Multiple-choice task, reported as `val/<name>/acc`, `acc_norm` and `acc_bytes`."""

    name: str = Field(pattern=SOURCE_NAME, description="Name of the task in metrics and messages.")
    path: str = Field(
        min_length=1,
        description="Local path or URL of a .jsonl file with question (or context), choices, and answer (index or "
        "letter of the correct choice).",
    )
    every_steps: PositiveInt | None = Field(
        default=None, description="Steps between two evaluations of the task; null: eval.every_steps."
    )
    limit: PositiveInt | None = Field(default=None, description="Number of leading questions to use; null: all.")
    micro_batch_examples: PositiveInt | None = Field(
        default=None,
        description="Sequences that a device scores at a time; null: the micro-batch of the train step. Changes no "
        "metric beyond rounding.",
    )


class SamplesConfig(FrozenModel):
    """Text samples written at evaluations, kept in metrics as `val/sample/<index of the prompt>`."""

    prompts: list[str] = Field(min_length=1, max_length=16, description="Prompts, each continued by one sample.")
    tokens: int = Field(default=64, ge=1, le=1024, description="Tokens generated per prompt.")
    temperature: NonNegativeFloat = Field(
        default=0.0, description="Divisor of the logits; 0: the most probable token (greedy)."
    )
    top_p: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Probability mass of the most probable tokens that are sampled from (nucleus sampling); 1: all.",
    )
    every_steps: PositiveInt | None = Field(
        default=None, description="Steps between two sets of samples; null: eval.every_steps."
    )


class HarnessConfig(FrozenModel):
    """Tasks of lm-evaluation-harness, reported as `eval/<task>/<metric>`; needs the extra `lm-eval`."""

    tasks: list[str] = Field(min_length=1, description="Names of tasks or groups of the harness.")
    include_path: str | None = Field(
        default=None, min_length=1, description="Directory with tasks of your own; null: those of the harness alone."
    )
    limit: PositiveInt | None = Field(default=None, description="Number of leading questions of each task; null: all.")
    every_steps: PositiveInt | None = Field(
        default=None, description="Steps between two evaluations of the tasks; null: eval.every_steps."
    )


class EvalConfig(FrozenModel):
    """Validation during the run; it never changes the weights."""

    every_steps: PositiveInt | None = Field(
        default=None, description="Steps between two evaluations; null: an evaluation at the last step only."
    )
    every_epochs: PositiveFloat | None = Field(
        default=None,
        description="Passes over the training data between two evaluations, such as 1 or 0.5, each rounded up to a "
        "whole step, for a single source without stages; in addition to those of every_steps. null: none.",
    )
    batches: PositiveInt = Field(
        default=20,
        description="Number of validation examples of an evaluation, in batches of train.global_batch_examples; fewer "
        "if the validation set has fewer.",
    )
    global_batch_examples: PositiveInt | None = Field(
        default=None,
        description="Validation examples that are computed as one batch, over all devices; null: "
        "train.global_batch_examples. Changes no metric beyond rounding.",
    )
    micro_batch_examples: PositiveInt | None = Field(
        default=None,
        description="Validation examples per device and micro-batch; null: the largest number that divides a device's "
        "share of the batch and is at most that of the train step. Changes no metric beyond rounding.",
    )
    at_start: bool = Field(default=False, description="Evaluation before the first step, as the metrics of step 0.")
    at_end: bool = Field(default=True, description="Evaluation after the last step, independent of every_steps.")
    bits_per_byte: bool = Field(
        default=False,
        description="Loss in bits per byte of the text of each validation set, in addition to the loss per token.",
    )
    multiple_choice: list[MultipleChoiceConfig] = Field(
        default=[], description="Multiple-choice tasks, scored by the likelihood of each choice."
    )
    samples: SamplesConfig | None = Field(default=None, description="Text samples from the model; null: none.")
    harness: HarnessConfig | None = Field(
        default=None, description="Tasks of lm-evaluation-harness, run on every host; null: none."
    )

    @model_validator(mode="after")
    def _validate_task_names(self) -> "EvalConfig":
        names = [task.name for task in self.multiple_choice]
        if duplicates := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"multiple_choice names {duplicates[0]} twice; give each task a name of its own")
        return self


MatmulType = Literal["compute", "int8", "float8"]


class PrecisionConfig(FrozenModel):
    """Floating-point types, and 8-bit matmuls."""

    params: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="Type of the stored parameters. Moments and updates are float32 for bfloat16 parameters too, and "
        "the updated parameter is rounded as `rounding` says. float32 master weights with bfloat16 matmuls are "
        "params: float32 with compute: bfloat16.",
    )
    rounding: Annotated[Literal["nearest", "stochastic"], Policy.NO_STATE] = Field(
        default="nearest",
        description="Rounding of an updated bfloat16 parameter: to the nearest value, which loses updates below 1/512 "
        "of the parameter, or stochastically to one of the two neighbours, which is exact on average.",
    )
    compute: Annotated[Literal["float32", "bfloat16"], Policy.NO_STATE] = Field(
        default="float32", description="Type of activations and matmuls."
    )
    matmul: Annotated[MatmulType, Policy.NO_STATE] = Field(
        default="compute",
        description="Type of the operands of the layers' matmuls: that of `compute`, or 8 bits (int8, or float8: e4m3 "
        "forward, e5m2 for gradients) with scales for each token and each column, computed at each step. Forward pass "
        "and gradients of activations are in 8 bits; gradients of weights, attention, embedding, head, routers and "
        "norms stay in `compute`. The accelerator must have the type (int8: v5e, v5p, v6e, A100, H100, H200, B200; "
        "float8: tpu7x, H100, H200, B200); a CPU emulates it.",
    )
    gradient_rounding: Annotated[Literal["nearest", "stochastic"], Policy.NO_STATE] = Field(
        default="nearest",
        description="Rounding of gradients to 8 bits, from which gradients of activations are computed: to the nearest "
        "value, or stochastically to one of the two neighbours, which is exact on average. Random numbers depend on "
        "the seed, the step, the example and the position, and not on the mesh. Other operands, and the gradients of "
        "routed experts, are rounded to the nearest value.",
    )

    @model_validator(mode="after")
    def _validate_rounding(self) -> "PrecisionConfig":
        if self.rounding != "nearest" and self.params == "float32":
            raise ValueError(f"rounding={self.rounding}: nothing reads it, as params are float32; use params: bfloat16")
        if self.gradient_rounding != "nearest" and self.matmul == "compute":
            raise ValueError(
                f"gradient_rounding={self.gradient_rounding}: nothing reads it, as matmul is compute; use matmul: int8 "
                "or float8"
            )
        return self


class EmaConfig(FrozenModel):
    """Exponential moving averages of the weights, kept in float32 in the train state."""

    decays: Annotated[list[float], Policy.STAGE] = Field(
        min_length=1,
        description="Decay of each average, named ema_<decay>; a step moves it by 1 - decay of the way to the weights.",
    )
    evaluate: Annotated[bool, Policy.FREE] = Field(
        default=False, description="Also report the validation loss of each average, as val/ema_<decay>/... in metrics."
    )

    @field_validator("decays")
    @classmethod
    def _validate_decays(cls, decays: list[float]) -> list[float]:
        for decay in decays:
            if not 0 < decay < 1:
                raise ValueError(f"got a decay of {decay:g}; use numbers above 0 and below 1, such as 0.999")
            if decays.count(decay) > 1:
                raise ValueError(f"got the decay {decay:g} twice; name each once")
        return decays


class NoiseScaleConfig(FrozenModel):
    """Gradient-noise scale of McCandlish et al. 2018 (arXiv 1812.06162), from the two halves of each batch."""

    decay: Annotated[float, Policy.STAGE] = Field(
        default=0.99,
        ge=0,
        lt=1,
        description="Decay of the running averages whose ratio is the noise scale; 0: each step by itself.",
    )


class AdapterConfig(FrozenModel):
    """LoRA adapter (arXiv 2106.09685): two small matrices per target are trained, the base weights stay frozen."""

    rank: PositiveInt = Field(default=8, description="Rank of the adapter: columns of A and rows of B.")
    alpha: Annotated[PositiveFloat, Policy.NO_STATE] = Field(
        default=16.0, description="Scale of the adapter; the effective weight is base + alpha / rank * A @ B."
    )
    targets: list[str] = Field(
        min_length=1,
        description="Glob patterns of the dotted names of matrices, or of the modules that hold them, such as "
        "blocks.query; each layer of a stack and each expert gets matrices of its own.",
    )


ContextParallelMethod = Literal["auto", "ring", "gather"]
AttentionKernels = Literal["auto", "ours", "library"]


class MemoryConfig(FrozenModel):
    """Trade-offs between memory and computation; they change results by rounding only."""

    remat: Annotated[Literal["none", "dots", "layers"], Policy.STAGE] = Field(
        default="none",
        description="Activation checkpointing (rematerialisation): everything is kept for the backward pass (none), "
        "only results of matmuls and on TPUs of attention (dots), or only the input of each layer (layers).",
    )
    loss_chunk_positions: Annotated[PositiveInt | None, Policy.STAGE] = Field(
        default=None,
        description="Positions of the sequence whose logits exist at the same time (chunked cross-entropy); a divisor "
        "of sequence_length. null: all.",
    )
    row_attention: Annotated[ContextParallelMethod, Policy.STAGE] = Field(
        default="auto",
        description="Context-parallel attention where topology.mesh.sequence shards sequences: all-gather of the keys "
        "and values that a device's queries see (gather), ring attention (ring), or the one predicted to be faster "
        "(auto).",
    )
    attention: Annotated[AttentionKernels, Policy.STAGE] = Field(
        default="auto",
        description="Kernels of causal attention: the fastest that pass their test at the start of a run (auto), the "
        "same with the run ending with 2 if one of this repository fails it, and no cuDNN on GPUs (ours), or only "
        "those of JAX: splash attention on TPUs, cuDNN on GPUs (library). CPUs have one without a kernel.",
    )
    offload_optimizer: bool = Field(
        default=False,
        description="Keep the moments of the optimizer in pinned host memory between steps (host offload): less device "
        "memory, longer steps, the same bits.",
    )
    shard_optimizer: bool = Field(
        default=False,
        description="Shard the moments of the optimizer over topology.mesh.data too, where a parameter is replicated "
        "(ZeRO-1). Gradients are reduce-scattered, each device updates its part, and new parameters are all-gathered.",
    )


class SpikeConfig(FrozenModel):
    """Threshold above which a value is a spike, relative to the last accepted steps."""

    sigmas: Annotated[PositiveFloat, Policy.NO_STATE] = Field(
        default=6.0, description="Standard deviations above the mean of the window at which a spike begins."
    )
    over_steps: int = Field(
        default=128,
        ge=2,
        le=10_000,
        description="Accepted steps in the window of mean and standard deviation; no update is skipped before the "
        "window is full.",
    )


class SkipUpdateConfig(FrozenModel):
    """Spikes whose update is skipped: those of exactly one quantity."""

    grad_norm_above: SpikeConfig | None = Field(
        default=None, description="Skip the update if the global gradient norm, before clipping, is a spike."
    )
    loss_above: SpikeConfig | None = Field(default=None, description="Skip the update if the loss is a spike.")

    @model_validator(mode="after")
    def _validate_one_quantity(self) -> "SkipUpdateConfig":
        if self.grad_norm_above is not None and self.loss_above is not None:
            raise ValueError("got both grad_norm_above and loss_above; keep one of them")
        if self.grad_norm_above is None and self.loss_above is None:
            raise ValueError("missing key grad_norm_above (or loss_above)")
        return self


class RollBackConfig(FrozenModel):
    """Rollback on lasting loss spikes: the run returns to a checkpoint before the spike and skips its data."""

    after_steps: PositiveInt = Field(
        default=5,
        description="Successive steps with a loss above the threshold at which the run is rolled back. "
        "Fewer such steps at the end of the run have no effect.",
    )
    loss_above_sigmas: PositiveFloat = Field(
        default=5.0, description="Standard deviations above the mean of the window at which the threshold lies."
    )
    over_steps: int = Field(
        default=128,
        ge=2,
        le=10_000,
        description="Steps in the window of mean and standard deviation, without those above the threshold; no loss "
        "is above it before the window is full.",
    )
    skip_examples: PositiveInt = Field(
        description="Examples to skip, from the first step above the threshold on, in whole batches."
    )
    steps_before: NonNegativeInt = Field(
        default=1,
        description="Steps before the first one above the threshold whose updates and data are discarded too, because "
        "an update may do damage before the loss shows it.",
    )
    at_most: Annotated[PositiveInt, Policy.FREE] = Field(
        default=3, le=ROLL_BACKS_MAX, description="Roll-backs of a run; the next spike ends it with exit code 1."
    )


class StabilityConfig(FrozenModel):
    """Reaction to steps that would ruin a run: their update is skipped, or the run is rolled back."""

    skip_update: SkipUpdateConfig | None = Field(
        default=None, description="Skip the update of a step whose gradient norm or loss is a spike; null: never."
    )
    non_finite: Literal["stop", "skip", "roll_back"] = Field(
        default="stop",
        description="Reaction to a loss or gradient norm that is not finite: end the run with exit code 1 (stop), "
        "skip the update (skip), or roll the run back at once (roll_back).",
    )
    roll_back: RollBackConfig | None = Field(
        default=None, description="Return to a checkpoint before a lasting loss spike, and skip its data; null: never."
    )
    max_consecutive_skips: Annotated[PositiveInt, Policy.FREE] = Field(
        default=100, description="Successive skipped updates at which the run ends with exit code 1."
    )

    @property
    def is_on(self) -> bool:
        """True if there is a policy; a job without one has no state for it."""
        return self.skips_updates or self.roll_back is not None

    @property
    def skips_updates(self) -> bool:
        """True if the policy may skip an update."""
        return self.skip_update is not None or self.non_finite == "skip"

    @property
    def spike(self) -> SpikeConfig | None:
        """Threshold of the watched quantity; None if no spike is skipped."""
        return None if self.skip_update is None else self.skip_update.grad_norm_above or self.skip_update.loss_above

    @property
    def watches_grad_norm(self) -> bool:
        """True if spikes of the gradient norm are skipped, and not those of the loss."""
        return self.skip_update is not None and self.skip_update.grad_norm_above is not None

    @model_validator(mode="after")
    def _validate_policy(self) -> "StabilityConfig":
        if self.non_finite == "roll_back" and self.roll_back is None:
            raise ValueError("non_finite: roll_back needs the section roll_back; write roll_back: {skip_examples: ...}")
        if (
            not self.skips_updates
            and self.max_consecutive_skips != type(self).model_fields["max_consecutive_skips"].default
        ):
            raise ValueError(
                f"max_consecutive_skips={self.max_consecutive_skips}: nothing reads it, as no update is skipped; set "
                "skip_update or non_finite: skip, or leave it out"
            )
        return self


class MetricsConfig(FrozenModel):
    """Additional metrics of a step; they change the weights by rounding at most."""

    norms: Literal["none", "groups", "parameters"] = Field(
        default="none",
        description="Norms of gradients and parameters besides the global gradient norm: none, per top-level module "
        "(groups) or per parameter (parameters), each with the norm of all parameters.",
    )


class ExportConfig(FrozenModel):
    """Export of the weights in Hugging Face's layout, once the run is done."""

    directory: str = Field(
        min_length=1,
        description="Directory or URL of the export, outside of the run's; nothing is there yet, or this very export.",
    )
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        default=None, description="Type of the files; null: that of the parameters."
    )
    weights: str = Field(
        default=PARAMS,
        min_length=1,
        description="Weights to export: the trained ones (params), or an average (ema_0.999).",
    )


class TrainerConfig(JobConfig, Generic[ModelConfigType]):
    """Config of a `BaseTrainer` job."""

    # Accept no model in the JSON Schema: `checkpoint.init_from` may stand for it.
    model_config = ConfigDict(
        json_schema_extra=lambda schema: schema.update(
            required=[key for key in schema.get("required", []) if key != "model"]
        )
    )

    model: Annotated[ModelConfigType, Policy.STATE] = Field(description="Architecture of the experiment's model.")
    data: Annotated[DataConfig, Policy.NO_PROGRAM] = Field(description="Tokens, or examples of arrays, to train on.")
    optimizer: Annotated[OptimizerConfig, Policy.STATE] = Field(default=OptimizerConfig(), description="Optimizer.")
    schedule: Annotated[ScheduleConfig, Policy.STAGE, Policy.NO_PROGRAM] = Field(
        default=ScheduleConfig(), description="Learning-rate schedule."
    )
    train: TrainConfig = Field(description="Length of the run and size of its batches.")
    eval: Annotated[EvalConfig, Policy.FREE, Policy.NO_PROGRAM] = Field(
        default=EvalConfig(), description="Validation during the run."
    )
    metrics: Annotated[MetricsConfig, Policy.FREE] = Field(
        default=MetricsConfig(), description="Additional metrics of a step."
    )
    stability: Annotated[StabilityConfig, Policy.STATE] = Field(
        default=StabilityConfig(), description="Reaction to bad steps."
    )
    precision: Annotated[PrecisionConfig, Policy.STATE] = Field(
        default=PrecisionConfig(), description="Floating-point types."
    )
    memory: Annotated[MemoryConfig, Policy.FREE] = Field(
        default=MemoryConfig(), description="Activation checkpointing and other trade-offs between memory and compute."
    )
    ema: Annotated[EmaConfig | None, Policy.STATE] = Field(
        default=None, description="Exponential moving averages of the weights, part of the train state; null: none."
    )
    adapter: Annotated[AdapterConfig | None, Policy.STATE] = Field(
        default=None,
        description="LoRA adapter trained beside the frozen weights of checkpoint.init_from; null: all weights are "
        "trained.",
    )
    noise_scale: Annotated[NoiseScaleConfig | None, Policy.STATE] = Field(
        default=None,
        description="Gradient-noise scale in tokens, as train/noise_scale in metrics; null: not measured. Costs the "
        "memory of one more gradient and needs an even number of micro-batches.",
    )
    export: Annotated[ExportConfig | None, Policy.FREE, Policy.NO_PROGRAM] = Field(
        default=None, description="Export of the weights at the end of the run; null: none."
    )
    stages: Annotated[list[StageConfig], Policy.FREE, Policy.NO_PROGRAM] = Field(
        default=[],
        description="Changes of the config during the run, in order; each applies from its start on, in addition to "
        "the earlier ones.",
    )

    @property
    def output_keys(self) -> frozenset[str]:
        """The export."""
        return frozenset({"export"})

    @property
    def units_per_step(self) -> int:
        """Tokens of one optimizer step before the first stage; examples where the data are arrays."""
        return self.train.global_batch_examples * self.data.units_per_example

    def list_starts(self, num_stages: int | None = None) -> list[StageStart]:
        """Return the beginning of the run and those of its first `num_stages` stages, by default of all of them."""
        return locate_stages(self.train.global_batch_examples, self.data.units_per_example, self.stages[:num_stages])

    def find_stage(self, step: int) -> int:
        """Return the index of the stage that contains the step after `step` completed ones; 0 is the config itself."""
        return bisect([start.step for start in self.list_starts()[1:]], step) if self.stages else 0

    def count_units(self, step: int) -> int:
        """Return the number of tokens (`data.unit`) that training has consumed after `step` steps."""
        start = self.list_starts()[self.find_stage(max(step - 1, 0))]
        return start.units + (step - start.step) * start.units_per_step

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run; a token budget is rounded up to whole steps.

        Raises `InvalidError` if the total is in epochs, which only the data convert to steps (`resolve_epochs`).
        """
        return self.get_total_steps()

    def get_total_steps(self, num_stages: int | None = None) -> int:
        """Return `total_steps` of the run with only its first `num_stages` stages, by default with all of them."""
        total_steps, total_tokens = self.train.total_steps, self.train.total_tokens
        for stage in self.stages[:num_stages]:
            if isinstance(steps := stage.set.get("train.total_steps"), int):
                total_steps, total_tokens = steps, None
            elif isinstance(tokens := stage.set.get("train.total_tokens"), int):
                total_steps, total_tokens = None, tokens
        if total_steps is not None:
            return total_steps
        if total_tokens is not None:
            start = self.list_starts(num_stages)[-1]
            return start.step - (start.units - total_tokens) // start.units_per_step
        raise InvalidError(
            f"total_epochs={self.train.total_epochs:g} cannot be converted to steps before the data are read; use "
            "total_steps or total_tokens with code that needs the total, such as a custom schedule"
        )

    def resolve_epochs(self, num_examples: int) -> "TrainerConfig[ModelConfigType]":
        """Return the config with its epochs of `num_examples` training examples converted to `total_steps`.

        The total is the smallest number of steps that covers the given epochs: epochs x examples / global batch,
        rounded up. A config without epochs is returned as it is. Raises `InvalidError` if the schedule does not fit
        into the total.
        """
        if self.train.total_epochs is None:
            return self
        # Computed with the decimal that the user wrote: the nearest float could round up to one step too many.
        examples = Fraction(str(self.train.total_epochs)) * num_examples
        steps = math.ceil(examples / self.train.global_batch_examples)
        train = self.train.model_copy(update={"total_epochs": None, "total_steps": steps})
        resolved = self.model_copy(update={"train": train})
        try:
            # Validated only now, because warm-up and decay are compared with the steps that the epochs give.
            resolved.validate_schedule()
        except ValueError as error:
            raise InvalidError(f"{num_examples:,} examples an epoch: {error}") from error
        return resolved

    def find_epoch_problem(self) -> str | None:
        """Return why the run has no epochs of one length, by which it could save or evaluate; None if it has."""
        if self.data.mixture:
            return f"data.mixture has {len(self.data.mixture)} sources, each with its own epochs; use every_steps"
        return (
            "stages may have other data and batches, each with its own epochs; use every_steps" if self.stages else None
        )

    def is_default(self, key: str) -> bool:
        """Return True if `key`, dotted below `config`, has its default value."""
        section_name, _, name = key.partition(".")
        section = getattr(self, section_name)
        if isinstance(section, OptimizerConfig):
            default = section.get_published_default(name)  # its defaults depend on the optimizer's name
        else:
            default = type(section).model_fields[name].get_default()
        return bool(getattr(section, name) == default)

    @property
    def free_keys(self) -> frozenset[str]:
        """Keys that may change on resume: those marked `Policy.FREE`, and some that depend on the values of others.

        The total is free if no learning rate depends on it.
        """
        # Stages are among them because they are compared piece by piece, from `stage_trajectory`.
        free = {*list_keys(type(self), Policy.FREE)}
        # With same_bits_devices the micro-batch determines the order of sums, and so the bits.
        free |= {"train.micro_batch_examples"} if self.train.same_bits_devices is None else set()
        if not self.schedule.depends_on_total_steps and not any(stage.sets("schedule") for stage in self.stages):
            free |= set(TOTAL_KEYS)
        return frozenset(free)

    @property
    def stage_trajectory(self) -> Trajectory:
        """Stages as a part of the trajectory: start and values of each, without those that change no bits."""
        if not self.stages:
            return {}
        values = [
            {key: value for key, value in stage.set.items() if not is_below(f"config.{key}", self.free_keys)}
            for stage in self.stages
        ]
        starts = [start.step for start in self.list_starts()[1:]]
        return {"config.stages": [[start, given] for start, given in zip(starts, values, strict=True)]}

    def explain_refusal(self, keys: Sequence[str], saved: Trajectory, step: int) -> str:
        """Return which changes of these keys a run could continue with; empty if there are none."""
        keys = self._drop_equal_totals(keys, saved)
        if keys and all(key == "config.train.skip_steps" for key in keys):
            return f"ranges of skip_steps may change from step {max(step, 1)} on"
        if any(key.startswith("config.train.total_") for key in keys):
            names = ", ".join(name for name in SCHEDULES if not ScheduleConfig.is_fixed_to_total(name))
            return (
                f"the learning rates of {self.schedule.name} depend on the total; a run whose schedule is one of "
                f"{names}, without warmup_share, can be extended, and one of wsd before its decay begins"
            )
        if [*keys] == ["config.stages"]:
            return f"a stage may be added, changed or removed if it begins at step {step} or later"
        return super().explain_refusal(keys, saved, step)

    def _drop_equal_totals(self, keys: Sequence[str], saved: Trajectory) -> list[str]:
        """Return `keys` without totals that are missing on one side because no learning rate there depends on them."""
        totals = {f"config.{key}": getattr(self.train, key.partition(".")[2]) for key in TOTAL_KEYS}
        return [key for key in keys if key not in totals or saved.get(key, totals[key]) != totals[key]]

    def list_advised_stages(
        self, keys: Sequence[str], saved: Trajectory, step: int, given: Sequence[JsonObject]
    ) -> list[JsonObject] | None:
        """Return the given stages with one that sets the values of these keys in this config from `step` on.

        None if a stage cannot change these keys.
        """
        changed = [key.removeprefix("config.") for key in self._drop_equal_totals(keys, saved) if key != "config.data"]
        allowed = list_keys(type(self), Policy.STAGE)
        if not changed or not all(is_below(f"config.{key}", allowed) for key in changed):
            return None
        # The first stages may be those of a batch ramp.
        starts = [start.step for start in self.list_starts()[1:]][len(self.stages) - len(given) :]
        entry: JsonObject = {"from_step": step, "set": self.list_stage_values(changed, saved, step)}
        is_at_end = saved.get("config.train.total_steps") == step
        if is_at_end and not any(key.startswith("train.total_") for key in entry["set"]):
            entry["set"] |= {"train.total_steps": 2 * step}  # a stage needs steps; any greater number would do
        before = [stage for stage, start in zip(given, starts, strict=True) if start < step]
        after = [stage for stage, start in zip(given, starts, strict=True) if start > step]
        for stage in (stage for stage, start in zip(given, starts, strict=True) if start == step):
            entry = stage | {"set": entry["set"] | stage["set"]}
        return [*before, entry, *after]

    def explain_digest(self, key: str, keys: Sequence[str]) -> str:
        """Return that the content of the data has changed, unless another key may be the cause."""
        consequences = {"config.data", "config.stages"}
        if getattr(self.model, "vocabulary_size", "auto") == "auto":
            consequences.add("config.model.vocabulary_size")
        if key != "config.data" or not {*keys} <= consequences:
            return ""
        names = ", ".join(source.source for source in self.data.sources)
        return f": {names} does not hold the data of the earlier steps; put them back, or name their present place"

    def list_fork_changes(self, keys: Sequence[str]) -> list[str]:
        """Return the keys to list in `fork_from.changes`; empty if these changes may alter the arrays of the state."""
        allowed = [*list_keys(type(self), Policy.STAGE), *list_keys(type(self), Policy.NO_STATE)]
        if any(is_below(key, list_keys(type(self), Policy.STATE)) and not is_below(key, allowed) for key in keys):
            return []
        # Digests of the data follow from these keys, but are known only once the data are read.
        changes_data = any(key == "seed" or is_below(key, ("data",)) for key in keys)
        return [*keys, *(["config.data", *(["config.stages"] if self.stages else [])] if changes_data else [])]

    def list_stage_values(self, keys: Sequence[str], saved: Trajectory, step: int) -> JsonObject:
        """Return the `set` of a stage that begins at `step` and gives these keys their values in this config."""
        values: JsonObject = {}
        dumped = self.model_dump(mode="json", exclude_defaults=True)
        for key in keys:
            section, name, *_ = key.split(".")
            if section == "schedule" or key in TOTAL_KEYS:
                if key in TOTAL_KEYS:
                    total = self.train.model_dump(
                        include={"total_steps", "total_tokens", "total_epochs"}, exclude_none=True
                    )
                    values |= {f"train.{each}": value for each, value in total.items()}
                # A warm-up has happened already.
                own = {each: value for each, value in dumped.get("schedule", {}).items() if "warmup" not in each}
                values["schedule"] = {"name": self.schedule.name} | own
                is_at_end = saved.get("config.train.total_steps") == step
                if is_at_end and not self.schedule.final_learning_rate and self.schedule.name != "constant":
                    values["optimizer.learning_rate"] = self.optimizer.learning_rate
            else:
                values[f"{section}.{name}"] = self.model_dump(mode="json").get(section, {}).get(name)
        if "data.mixture" in values and not self.data.mixture:
            # Where the source was is not compared, so it is not among the keys.
            del values["data.mixture"]
            values |= {f"data.{key}": dumped.get("data", {}).get(key) for key in ("dtype", "train_on")}
            values["data.source"] = self.data.source
        return values

    @property
    def content_keys(self) -> frozenset[str]:
        """Paths of the training data, including options that are paths; only the data's fingerprint is compared."""
        keys = {"data.source", "data.dtype", "data.mixture.source", "data.mixture.dtype"}
        sources: list[tuple[str, TokenSource]] = [("data", self.data)]
        for prefix, source in [*sources, *(("data.mixture", source) for source in self.data.mixture)]:
            options = source.options.items()
            keys |= {f"{prefix}.options.{name}" for name, value in options if isinstance(value, str) and "/" in value}
        return frozenset(keys)

    @model_validator(mode="after")
    def _validate_no_tokens(self) -> "TrainerConfig[ModelConfigType]":
        if self.data.has_tokens:
            return self
        reason = "the data are arrays (no data.sequence_length)"
        if self.train.total_tokens is not None:
            raise ValueError(f"train.total_tokens={self.train.total_tokens}: {reason}; use train.total_steps")
        if self.train.batch_ramp is not None and self.train.batch_ramp.over_tokens is not None:
            raise ValueError(
                f"train.batch_ramp.over_tokens={self.train.batch_ramp.over_tokens}: {reason}; use over_steps"
            )
        for index, stage in enumerate(self.stages):
            if stage.from_tokens is not None:
                raise ValueError(f"stages.{index}.from_tokens={stage.from_tokens}: {reason}; use from_step")
            if "data.sequence_length" in stage.set:
                raise ValueError(f"stages.{index}.set: data.sequence_length: {reason}; begin another run with tokens")
            if "train.total_tokens" in stage.set:
                raise ValueError(f"stages.{index}.set: train.total_tokens: {reason}; use train.total_steps")
        for key in _TEXT_KEYS:
            section, _, name = key.partition(".")
            if not self.is_default(key):
                value = getattr(getattr(self, section), name)
                shown = f"={value}" if isinstance(value, str | int) else ""
                raise ValueError(f"{key}{shown}: is for text, and {reason}; leave it out")
        return self

    @model_validator(mode="after")
    def _expand_batch_ramp(self) -> "TrainerConfig[ModelConfigType]":
        # This comes before the rules below, so that they check the batch of the first step.
        ramp = self.train.batch_ramp
        if ramp is None:
            return self
        update = {"global_batch_examples": ramp.from_examples, "batch_ramp": None}
        stages = [StageConfig.model_validate(stage) for stage in ramp.list_stages(self.train.global_batch_examples)]
        return self.model_copy(
            update={"train": self.train.model_copy(update=update), "stages": [*stages, *self.stages]}
        )

    @model_validator(mode="after")
    def _validate_sections_together(self) -> "TrainerConfig[ModelConfigType]":
        # The order of sums over whole matrices, or over halves of a batch, depends on how these are sharded.
        devices, name = self.train.same_bits_devices, self.optimizer.name
        if devices is not None and not OPTIMIZERS[name].supports_same_bits:
            raise ValueError(
                f"train.same_bits_devices={devices}: optimizer.name={name} sums over whole matrices, which are "
                "sharded over devices; use another optimizer, such as adamw or muon"
            )
        if self.adapter is not None and name == "muonh":
            raise ValueError(
                "optimizer.name=muonh keeps the norm of each matrix, and one matrix of an adapter begins at zero; use "
                "muon or adamw"
            )
        if devices is not None and self.noise_scale is not None:
            raise ValueError(
                f"train.same_bits_devices={devices}: noise_scale has no fixed order of sums; leave one of them out"
            )
        if self.adapter is not None and self.precision.rounding != "nearest":
            raise ValueError(
                f"precision.rounding={self.precision.rounding}: nothing reads it, as an adapter is float32; leave it "
                "out"
            )
        if self.precision.matmul != "compute" and not self.model.has_8bit_matmuls:
            raise ValueError(
                f"precision.matmul={self.precision.matmul}: nothing reads it, as {type(self.model).__name__} has no "
                "8-bit matmuls; leave it out"
            )
        if self.precision.gradient_rounding != "nearest" and not self.model.has_gradient_rounding:
            raise ValueError(
                f"precision.gradient_rounding={self.precision.gradient_rounding}: nothing reads it, as "
                f"{type(self.model).__name__} rounds to the nearest value; leave it out"
            )
        tokens = self.train.total_tokens
        # Such a budget would be rounded up to one step, which is far more than the spec asks for.
        if tokens is not None and tokens < self.units_per_step:
            batch, length = self.train.global_batch_examples, self.data.sequence_length
            step = f"{batch} examples x {length} tokens = {self.units_per_step}"
            raise ValueError(f"train.total_tokens={tokens} is less than one step of {step}")
        if self.train.total_epochs is not None and self.data.mixture:
            raise ValueError(
                f"train.total_epochs={self.train.total_epochs:g} needs a single source, and data.mixture has "
                f"{len(self.data.mixture)}, each with its own epochs; use total_steps or total_tokens"
            )
        if self.train.total_epochs is not None and self.stages:
            raise ValueError(
                f"train.total_epochs={self.train.total_epochs:g} has no meaning beside stages, each with its own "
                "examples; use total_steps or total_tokens"
            )
        if self.eval.every_epochs is not None and (problem := self.find_epoch_problem()):
            raise ValueError(f"eval.every_epochs={self.eval.every_epochs:g}: {problem}")
        if self.train.total_epochs is None:
            self.validate_schedule()
        has_validation = bool(self.data.validation_fraction or self.data.validation)
        if self.ema is not None and self.ema.evaluate and not has_validation:
            raise ValueError(
                "ema.evaluate: there is no validation set; set data.validation_fraction or data.validation"
            )
        chunk, length = self.memory.loss_chunk_positions, self.data.units_per_example
        if chunk is not None and length % chunk:
            # The message names the nearest divisor on either side.
            divisors = [size for size in range(1, length + 1) if length % size == 0]
            below, above = divisors[bisect(divisors, chunk) - 1], divisors[bisect(divisors, chunk) :][:1]
            raise ValueError(
                f"memory.loss_chunk_positions={chunk} does not divide data.sequence_length={length}; "
                f"use {' or '.join(map(str, [below, *above]))}"
            )
        return self

    def validate_schedule(self) -> None:
        """Raise `ValueError` if warm-up and decay, or the ranges of data to skip, do not fit into the total."""
        ranges, end = self.train.skip_steps, self.total_steps
        if ranges and ranges[-1][1] > end:
            raise ValueError(f"train.skip_steps: {[*ranges[-1]]} ends beyond the total of {end} steps")
        if sum(stop - start for start, stop in ranges) >= end:
            raise ValueError(f"train.skip_steps={[[*each] for each in ranges]} leaves none of the {end} steps")
        # Stages are validated by their own configs; a schedule does not depend on those that begin after it.
        schedule, total, peak = self.schedule, self.get_total_steps(0), self.optimizer.learning_rate
        warmup = schedule.compute_warmup_steps(total)
        key = "warmup_steps" if schedule.warmup_share is None else f"warmup_share={schedule.warmup_share} in steps"
        if warmup >= total:
            raise ValueError(f"schedule.{key}={warmup} is not below the total of {total} steps")
        if schedule.name != "constant" and peak is not None and schedule.final_learning_rate > peak:
            final = schedule.final_learning_rate
            raise ValueError(f"schedule.final_learning_rate={final} is above optimizer.learning_rate={peak}")
        if schedule.decay_steps is not None and warmup + schedule.decay_steps > total:
            parts = f"{key}={warmup} + schedule.decay_steps={schedule.decay_steps}"
            raise ValueError(f"schedule.{parts} do not fit into the total of {total} steps")
