"""The `config` of BaseTrainer jobs: model, data, optimizer, schedule, train, eval, precision and memory.

Owns their keys, defaults and the arithmetic between them. Knows no device: how the global batch is split belongs to the
topology. An experiment subclasses `ModelConfig` and writes `Config = TrainerConfig[GPTConfig]`.
"""

import math
import re
from bisect import bisect
from fractions import Fraction
from typing import Any, Generic, Literal, TypeVar

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from runner.errors import InvalidError
from runner.optim.config import OPTIMIZERS, OptimizerConfig, ScheduleConfig
from runner.spec import Auto, FrozenModel, JobConfig

DEFAULT_SOURCE = "python-stdlib"
SOURCE_NAME = r"^[A-Za-z0-9_-]+$"  # of a source or a validation set: it becomes a part of the keys of rows


class ModelConfig(FrozenModel):
    """Base of an experiment's own architecture keys."""


ModelConfigType = TypeVar("ModelConfigType", bound=ModelConfig)


class TokenSource(FrozenModel):
    """Where tokens come from."""

    source: str = Field(
        min_length=1,
        description="python-stdlib (Python's own library, on every machine), a path, a gs://, s3:// or az:// URL or a "
        "glob of text or of token files, ours or another tool's, the directory or URL of a corpus or of MDS (with its "
        "index.json), or module:Class, a `Source` of one's own.",
    )
    options: dict[str, str | int | float | bool] = Field(
        default={},
        description="Arguments by name of a source that is a class; of MDS `column` (tokens) and `dtype`, of "
        "ArrayRecord `dtype`, the type of the ids.",
    )
    dtype: Literal["uint16", "uint32"] | None = Field(
        default=None,
        description="Type of the ids in .bin files, little-endian; null: uint16, and wider ones are refused.",
    )
    train_on: Literal["answers", "all"] | None = Field(
        default=None,
        description="Of a corpus of dialogues, which needs it: whether the tokens of answers alone count in the loss.",
    )


class MixtureSource(TokenSource):
    """One of several sources that training draws from."""

    name: str = Field(pattern=SOURCE_NAME, description="Its name in rows and messages.")
    weight: PositiveFloat = Field(
        default=1.0, description="Its part of the examples, beside those of the others; they need not add up to 1."
    )
    max_epochs: PositiveFloat | None = Field(
        default=None, description="A run that would read it more often is refused; null: as often as it takes."
    )


class DataConfig(TokenSource):
    """The tokens to train on."""

    source: str = Field(
        default=DEFAULT_SOURCE, min_length=1, description=TokenSource.model_fields["source"].description
    )
    mixture: list[MixtureSource] = Field(default=[], description="Several sources instead of one.")
    tokenizer: Literal["bytes", "characters"] = Field(
        default="bytes", description="How text becomes tokens; token files have theirs."
    )
    document_separator: Literal["none", "newline", "nul"] = Field(
        default="none",
        description="Between two text files: nothing, so that one runs into the next, a line's end, or a zero byte.",
    )
    sequence_length: PositiveInt = Field(description="Tokens in one example.")
    packing: Literal["concatenate", "documents", "pad"] = Field(
        default="concatenate",
        description="What an example holds: a run of tokens, whatever documents it cuts; whole documents, of which "
        "none sees another, long ones cut; or one document, and padding.",
    )
    validation_fraction: float = Field(
        default=0.05, ge=0, lt=1, description="Share of the tokens of each source kept out of training, at its end."
    )
    validation: dict[str, TokenSource] = Field(
        default={}, description="Further validation sets by name, each a source that is read in order."
    )

    cache_bytes: NonNegativeInt | None = Field(
        default=None,
        description="Most that a host keeps of a bucket's tokens on its disk, in RUNNER_CACHE; null: a quarter of what "
        "is free, 0: nothing. Never more than is free.",
    )

    @property
    def sources(self) -> list[MixtureSource]:
        """What training draws from; the only source has the name of its split."""
        if self.mixture:
            return self.mixture
        return [MixtureSource(name="train", **{key: getattr(self, key) for key in TokenSource.model_fields})]

    @model_validator(mode="after")
    def _answers_count_where_they_train(self) -> "DataConfig":
        if all(source.train_on != "answers" for source in self.sources):
            for name, held in self.validation.items():
                if held.train_on == "answers":
                    raise ValueError(
                        f"validation.{name}.train_on=answers, and no source that is trained on says so; use all, or "
                        "train on answers"
                    )
        return self

    @field_validator("validation", mode="before")
    @classmethod
    def _a_source_alone(cls, sets: Any) -> Any:
        """A set may be named by its source alone."""
        if not isinstance(sets, dict):
            return sets
        return {name: {"source": given} if isinstance(given, str) else given for name, given in sets.items()}

    @model_validator(mode="after")
    def _names_and_kinds_fit(self) -> "DataConfig":
        names = [source.name for source in self.mixture]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"mixture names {twice[0]} twice; give each source a name of its own")
        own = {*names, "train", "validation"}
        for name in self.validation:
            if name in own or not re.fullmatch(SOURCE_NAME, name):
                raise ValueError(
                    f"validation has a set named {name!r}; needs letters, digits, _ or -, and not train, validation or "
                    "the name of a source of the mixture"
                )
        if reserved := {"train", "validation"} & {*names}:
            raise ValueError(f"mixture has a source named {min(reserved)}, which a split is called; use another name")
        fields = type(self).model_fields
        given = [key for key in TokenSource.model_fields if getattr(self, key) != fields[key].default]
        if self.mixture and given:
            raise ValueError(f"got both {given[0]} and mixture; name each source in the mixture alone")
        if self.tokenizer == "characters" and (self.mixture or self.validation):
            raise ValueError("tokenizer=characters gives every source its own ids; with several sources use bytes")
        return self


class TrainConfig(FrozenModel):
    """How much to train, and in what portions."""

    total_steps: PositiveInt | None = Field(
        default=None, description="Optimizer steps of the run; this, total_tokens or total_epochs is needed."
    )
    total_tokens: PositiveInt | None = Field(
        default=None, description="Tokens of the run, rounded up to whole steps, instead of total_steps."
    )
    total_epochs: PositiveFloat | None = Field(
        default=None,
        description="How often the run takes each training example of its one source, rounded up to whole steps, "
        "instead of total_steps; the last step goes on into the next epoch.",
    )
    global_batch_examples: PositiveInt = Field(description="Examples in one optimizer step, over all devices.")
    micro_batch_examples: PositiveInt | Auto = Field(
        default="auto",
        description="Examples that a device holds at once; auto: the most that its memory holds, by the compiled step.",
    )
    same_bits_devices: int | None = Field(
        default=None,
        ge=2,
        description="The run ends in the same bits on any number of devices that divides this one, 1 among them: "
        "data x fsdp, on any number of hosts. Needs micro_batch_examples; each device then holds whole gradients. "
        "null: on one number of them.",
    )

    @model_validator(mode="after")
    def _exactly_one_total(self) -> "TrainConfig":
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
    def _groups_are_whole(self) -> "TrainConfig":
        devices, micro = self.same_bits_devices, self.micro_batch_examples
        if devices is None:
            return self
        if micro == "auto":
            raise ValueError(
                f"same_bits_devices={devices} needs micro_batch_examples, which the bits depend on; set it"
            )
        if self.global_batch_examples % (devices * micro):
            share, size = self.global_batch_examples // (devices * micro), devices * micro
            near = " or ".join(str(count * size) for count in (share, share + 1) if count)
            raise ValueError(
                f"global_batch_examples={self.global_batch_examples} does not divide into micro-batches of {micro} on "
                f"same_bits_devices={devices}; use {near}"
            )
        return self


class MultipleChoiceConfig(FrozenModel):
    """Questions with choices, of which one is right: figures `val/<name>/acc`, `acc_norm` and `acc_bytes`."""

    name: str = Field(pattern=SOURCE_NAME, description="Its name in rows and messages.")
    path: str = Field(
        min_length=1,
        description="A .jsonl file: question (or context), choices, and answer, the index of the right one or its "
        "letter. A local path or a URL.",
    )
    every_steps: PositiveInt | None = Field(default=None, description="Its own cadence; null: that of eval.")
    limit: PositiveInt | None = Field(default=None, description="So many of its first questions; null: all.")


class SamplesConfig(FrozenModel):
    """Texts that the model writes at an evaluation: rows hold them as `val/sample/<number of the prompt>`."""

    prompts: list[str] = Field(min_length=1, max_length=16, description="Each text goes on from one of them.")
    tokens: int = Field(default=64, ge=1, le=1024, description="Tokens after each prompt.")
    temperature: NonNegativeFloat = Field(
        default=0.0, description="Logits are divided by it; 0 takes the most probable token."
    )
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="Drawn is from the most probable tokens that add up to it."
    )
    every_steps: PositiveInt | None = Field(default=None, description="Their own cadence; null: that of eval.")


class EvalConfig(FrozenModel):
    """Validation during the run; it never changes the weights."""

    every_steps: PositiveInt | None = Field(
        default=None,
        description="Steps from one evaluation to the next; the last step is evaluated too. null: that one only.",
    )
    batches: PositiveInt = Field(
        default=20, description="Batches of one evaluation; fewer if they hold all that is kept out."
    )
    at_start: bool = Field(default=False, description="Evaluate before the first step too, as the row of step 0.")
    at_end: bool = Field(default=True, description="Evaluate after the last step, whatever every_steps says.")
    bits_per_byte: bool = Field(
        default=False, description="Beside the loss of each set, that over the bytes of its text, in bits."
    )
    multiple_choice: list[MultipleChoiceConfig] = Field(
        default=[], description="Questions of which the most probable answer is looked for, by name."
    )
    samples: SamplesConfig | None = Field(default=None, description="Texts from the model; null: none.")

    @model_validator(mode="after")
    def _names_differ(self) -> "EvalConfig":
        names = [each.name for each in self.multiple_choice]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"multiple_choice names {twice[0]} twice; give each a name of its own")
        return self


class PrecisionConfig(FrozenModel):
    """Floating-point types."""

    params: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="Type of the stored parameters. Of bfloat16 too the moments and the update are float32; their sum "
        "becomes a bfloat16 as `rounding` says. Weights in float32 of which matmuls see copies in bfloat16 (master "
        "weights) are params: float32 with compute: bfloat16.",
    )
    rounding: Literal["nearest", "stochastic"] = Field(
        default="nearest",
        description="How the sum of a bfloat16 parameter and its update becomes one: the nearest, so that an update "
        "below 1/512 of its parameter changes nothing; or one of the two nearest by chance, right on average.",
    )
    compute: Literal["float32", "bfloat16"] = Field(default="float32", description="Type of activations and matmuls.")

    @model_validator(mode="after")
    def _rounding_is_read(self) -> "PrecisionConfig":
        if self.rounding != "nearest" and self.params == "float32":
            raise ValueError(f"rounding={self.rounding}: nothing reads it, as params are float32; use params: bfloat16")
        return self


class EmaConfig(FrozenModel):
    """Exponential moving averages of the weights, in float32, which ride along in the state."""

    decays: list[float] = Field(
        min_length=1,
        description="One average for each, called ema_<decay>: a step moves it by 1 - decay of the way to the weights.",
    )
    evaluate: bool = Field(
        default=False, description="Evaluate each on the validation sets too: val/ema_<decay>/... in rows."
    )

    @field_validator("decays")
    @classmethod
    def _decays_are_shares(cls, decays: list[float]) -> list[float]:
        for decay in decays:
            if not 0 < decay < 1:
                raise ValueError(f"got a decay of {decay:g}; needs numbers above 0 and below 1, such as 0.999")
            if decays.count(decay) > 1:
                raise ValueError(f"got the decay {decay:g} twice; name each once")
        return decays


class NoiseScaleConfig(FrozenModel):
    """The gradient-noise scale, of McCandlish et al. 2018 (arXiv 1812.06162), from the two halves of each batch."""

    decay: float = Field(
        default=0.99, ge=0, lt=1, description="Of the averages over steps whose ratio it is; 0: of each step alone."
    )


class AdapterConfig(FrozenModel):
    """LoRA (arXiv 2106.09685): two small matrices are trained beside each target, and the model's own stand still."""

    rank: PositiveInt = Field(default=8, description="Columns of A and rows of B.")
    alpha: PositiveFloat = Field(default=16.0, description="The weight is that of the base + alpha / rank * A @ B.")
    targets: list[str] = Field(
        min_length=1,
        description="Patterns (*, ?) of matrices by their dotted names, or of the modules that hold them, such as "
        "blocks.query; each layer of a stack, and each expert, has matrices of its own.",
    )


ContextParallelMethod = Literal["auto", "ring", "gather"]


class MemoryConfig(FrozenModel):
    """What a step keeps and what it computes again, so that a large model fits. Moves bits by rounding alone."""

    remat: Literal["none", "dots", "layers"] = Field(
        default="none",
        description="What the backward pass finds of a layer: all (none), results of matmuls and on TPUs of attention "
        "(dots), its input (layers).",
    )
    loss_chunk_positions: PositiveInt | None = Field(
        default=None,
        description="Positions of the sequence whose logits exist at once; divides sequence_length; null: all.",
    )
    row_attention: ContextParallelMethod = Field(
        default="auto",
        description="Where topology.mesh.sequence cuts rows, a device collects all keys and values that its queries "
        "see (gather), or they go round from device to device (ring); auto: what is predicted to be faster.",
    )


class MetricsConfig(FrozenModel):
    """What rows tell of a step besides its loss. It never changes the weights, but for rounding."""

    norms: Literal["none", "groups", "parameters"] = Field(
        default="none",
        description="Norms of gradients and of parameters, besides that of the whole gradient: of each top-level "
        "module, or of each parameter, and of all parameters.",
    )


class TrainerConfig(JobConfig, Generic[ModelConfigType]):
    """All that a BaseTrainer job is told under `config`."""

    model: ModelConfigType = Field(description="The experiment's architecture.")
    data: DataConfig = Field(description="The tokens to train on.")
    optimizer: OptimizerConfig = Field(default=OptimizerConfig(), description="The optimizer.")
    schedule: ScheduleConfig = Field(default=ScheduleConfig(), description="The learning rate over the run.")
    train: TrainConfig = Field(description="How much to train, and in what portions.")
    eval: EvalConfig = Field(default=EvalConfig(), description="Validation during the run.")
    metrics: MetricsConfig = Field(default=MetricsConfig(), description="What rows tell of a step.")
    precision: PrecisionConfig = Field(default=PrecisionConfig(), description="Floating-point types.")
    memory: MemoryConfig = Field(default=MemoryConfig(), description="What is computed again instead of kept.")
    ema: EmaConfig | None = Field(default=None, description="Averages of the weights that ride along; null: none.")
    adapter: AdapterConfig | None = Field(
        default=None,
        description="Train an adapter of the weights that checkpoint.init_from names, which stand still; null: train "
        "the weights themselves.",
    )
    noise_scale: NoiseScaleConfig | None = Field(
        default=None,
        description="train/noise_scale, in tokens, in each row; null: not measured. It takes the memory of one more "
        "gradient, and an even number of micro-batches.",
    )

    @property
    def tokens_per_step(self) -> int:
        return self.train.global_batch_examples * self.data.sequence_length

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run; a token budget is rounded up to whole steps.

        Raises `InvalidError` of epochs: how many steps they are is known once the data are, see `counted`.
        """
        if self.train.total_steps is not None:
            return self.train.total_steps
        if self.train.total_tokens is not None:
            return -(-self.train.total_tokens // self.tokens_per_step)
        raise InvalidError(
            f"total_epochs={self.train.total_epochs:g} are no number of steps before the data are read; what asks for "
            "one, such as a schedule of one's own, needs total_steps or total_tokens"
        )

    def resolve_epochs(self, num_examples: int) -> "TrainerConfig[ModelConfigType]":
        """The same with its epochs of so many training examples as `total_steps`.

        The steps are the fewest that take each example as often as the spec says: epochs x examples / global batch,
        rounded up. Raises `InvalidError` if the schedule does not fit into them.
        """
        if self.train.total_epochs is None:
            return self
        examples = Fraction(str(self.train.total_epochs)) * num_examples  # as it was written, not its nearest float
        steps = math.ceil(examples / self.train.global_batch_examples)
        train = self.train.model_copy(update={"total_epochs": None, "total_steps": steps})
        counted = self.model_copy(update={"train": train})
        try:
            counted._check_schedule()
        except ValueError as error:
            raise InvalidError(f"{num_examples:,} examples an epoch: {error}") from error
        return counted

    def is_default(self, key: str) -> bool:
        """Whether a key, dotted below `config`, has its default value."""
        section_name, _, name = key.partition(".")
        section = getattr(self, section_name)
        is_by_name = isinstance(section, OptimizerConfig)
        default = section.default_of(name) if is_by_name else type(section).model_fields[name].get_default()
        return bool(getattr(section, name) == default)

    @property
    def free_keys(self) -> frozenset[str]:
        """Evaluation, what rows tell, micro-batches, memory, limits; the total too, if no learning rate reads it."""
        free = {"eval", "metrics", "memory", "data.validation", "data.cache_bytes"}
        free |= {"train.micro_batch_examples"} if self.train.same_bits_devices is None else set()
        free |= {"ema.evaluate"}
        free |= {"data.mixture.max_epochs"}
        if not self.schedule.reads_total:
            free |= {"train.total_steps", "train.total_tokens", "train.total_epochs"}
        return frozenset(free)

    @model_validator(mode="after")
    def _sums_have_an_order(self) -> "TrainerConfig[ModelConfigType]":
        """Of what works on whole matrices, or on halves of a batch, the sums depend on how it is cut."""
        devices, name = self.train.same_bits_devices, self.optimizer.name
        if devices is not None and not OPTIMIZERS[name].is_elementwise:
            raise ValueError(
                f"train.same_bits_devices={devices}: optimizer.name={name} adds up over whole matrices, which devices "
                "share; use one that works element by element, such as adamw"
            )
        if devices is not None and self.noise_scale is not None:
            raise ValueError(f"train.same_bits_devices={devices}: noise_scale has no such order; leave one of them out")
        return self

    @model_validator(mode="after")
    def _adapter_is_float32(self) -> "TrainerConfig[ModelConfigType]":
        if self.adapter is not None and self.precision.rounding != "nearest":
            raise ValueError(
                f"precision.rounding={self.precision.rounding}: nothing reads it, as an adapter is float32; leave it "
                "out"
            )
        return self

    @model_validator(mode="after")
    def _parts_fit_together(self) -> "TrainerConfig[ModelConfigType]":
        tokens = self.train.total_tokens
        if tokens is not None and tokens < self.tokens_per_step:
            batch, length = self.train.global_batch_examples, self.data.sequence_length
            step = f"{batch} examples x {length} tokens = {self.tokens_per_step}"
            raise ValueError(f"train.total_tokens={tokens} is less than one step of {step}")
        if self.train.total_epochs is not None and self.data.mixture:
            raise ValueError(
                f"train.total_epochs={self.train.total_epochs:g} is of one source, and data.mixture has "
                f"{len(self.data.mixture)}, each with epochs of its own; use total_steps or total_tokens"
            )
        if self.train.total_epochs is None:
            self._check_schedule()
        if (
            self.ema is not None
            and self.ema.evaluate
            and not self.data.validation_fraction
            and not self.data.validation
        ):
            raise ValueError(
                "ema.evaluate: there is no validation set; set data.validation_fraction or data.validation"
            )
        self._check_chunks()
        return self

    def _check_schedule(self) -> None:
        """Raise ValueError if the parts of the schedule do not fit into the total."""
        schedule, total, peak = self.schedule, self.total_steps, self.optimizer.learning_rate
        warmup = schedule.warmup_of(total)
        key = "warmup_steps" if schedule.warmup_share is None else f"warmup_share={schedule.warmup_share} in steps"
        if warmup >= total:
            raise ValueError(f"schedule.{key}={warmup} is not below the total of {total} steps")
        if schedule.name != "constant" and peak is not None and schedule.final_learning_rate > peak:
            final = schedule.final_learning_rate
            raise ValueError(f"schedule.final_learning_rate={final} is above optimizer.learning_rate={peak}")
        if schedule.decay_steps is not None and warmup + schedule.decay_steps > total:
            parts = f"{key}={warmup} + schedule.decay_steps={schedule.decay_steps}"
            raise ValueError(f"schedule.{parts} do not fit into the total of {total} steps")

    def _check_chunks(self) -> None:
        chunk, length = self.memory.loss_chunk_positions, self.data.sequence_length
        if chunk is None or length % chunk == 0:
            return
        divisors = [size for size in range(1, length + 1) if length % size == 0]
        below, above = divisors[bisect(divisors, chunk) - 1], divisors[bisect(divisors, chunk) :][:1]
        raise ValueError(
            f"memory.loss_chunk_positions={chunk} does not divide data.sequence_length={length}; "
            f"use {' or '.join(map(str, [below, *above]))}"
        )
