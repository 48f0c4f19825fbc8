"""Optimizers and schedules by name: which keys of a spec each reads, with what defaults, and its source.

What they compute is in `runner.optim`. A new one is an entry here, its name in the `Literal` below, and a
function there.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from runner.spec import FrozenModel


@dataclass(frozen=True)
class LibraryEntry:
    """An optimizer or a schedule.

    Attributes:
        source: where it was published.
        defaults: the keys that it alone or with some others reads.
        is_elementwise: whether what an optimizer makes of an element depends on that element alone, and not on others
            of its matrix, which devices may share.
    """

    source: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    is_elementwise: bool = True


_RANK, _PROJECTION_EVERY_STEPS, _PROJECTION_SCALE = 128, 200, 0.25
OPTIMIZERS: dict[str, LibraryEntry] = {
    "adamw": LibraryEntry(
        "Decoupled Weight Decay Regularization, arXiv:1711.05101; b2 and decay of GPT-3, arXiv:2005.14165",
        {"b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "moments": "float32"},
    ),
    "adam": LibraryEntry(
        "Adam, arXiv:1412.6980, whose decay is added to the gradient",
        {"b1": 0.9, "b2": 0.999, "eps": 1e-8, "weight_decay": 0.0, "moments": "float32"},
    ),
    "lion": LibraryEntry(
        "Symbolic Discovery of Optimization Algorithms, arXiv:2302.06675, where b2 is 0.99, and 0.98 for language",
        {"b1": 0.9, "b2": 0.95, "weight_decay": 0.1, "moments": "float32"},
    ),
    "adafactor": LibraryEntry(
        "Adafactor, arXiv:1804.04235, without momentum", {"weight_decay": 0.1}, is_elementwise=False
    ),
    "sgd": LibraryEntry(
        "On the importance of initialization and momentum, ICML 2013 (Sutskever et al.), without Nesterov's step",
        {"momentum": 0.9, "weight_decay": 0.1, "moments": "float32"},
    ),
    "muon": LibraryEntry(
        "Muon is Scalable for LLM Training, arXiv:2502.16982, of kellerjordan.github.io/posts/muon; adamw for the rest",
        {
            "momentum": 0.95,
            "b1": 0.9,
            "b2": 0.95,
            "eps": 1e-8,
            "weight_decay": 0.1,
            "moments": "float32",
            "matrices": None,
        },
        is_elementwise=False,
    ),
    "galore": LibraryEntry(
        "GaLore, arXiv:2403.03507, with adamw; eps and decay of its published code; adamw for the rest",
        {
            "b1": 0.9,
            "b2": 0.999,
            "eps": 1e-6,
            "weight_decay": 0.0,
            "moments": "float32",
            "matrices": None,
            "rank": _RANK,
            "projection_every_steps": _PROJECTION_EVERY_STEPS,
            "projection_scale": _PROJECTION_SCALE,
        },
        is_elementwise=False,
    ),
    "schedule_free_adamw": LibraryEntry(
        "The Road Less Scheduled, arXiv:2405.15682; meant for a constant learning rate after a warm-up",
        {"b1": 0.9, "b2": 0.999, "eps": 1e-8, "weight_decay": 0.0},
    ),
}
_FINAL = {"final_learning_rate": 0.0}
SCHEDULES: dict[str, LibraryEntry] = {
    "constant": LibraryEntry("peak"),
    "linear": LibraryEntry("peak + (final - peak) * u", _FINAL),
    "cosine": LibraryEntry("final + (peak - final) * (1 + cos(pi * u)) / 2, arXiv:1608.03983 without restarts", _FINAL),
    "cosine_restarts": LibraryEntry(
        "cosine with u' = (cycles * u) mod 1 for u, arXiv:1608.03983 with cycles of one length", {**_FINAL, "cycles": 2}
    ),
    "polynomial": LibraryEntry("final + (peak - final) * (1 - u) ^ power", {**_FINAL, "power": 1.0}),
    "wsd": LibraryEntry(
        "peak, and linear over the last decay_steps, arXiv:2404.06395", {**_FINAL, "decay_steps": None}
    ),
    "inverse_square_root": LibraryEntry("peak * sqrt(warmup_steps / step), arXiv:1706.03762"),
}
_NAMES = {"optimizer": OPTIMIZERS, "schedule": SCHEDULES}
# The names of its section that read a key, by dotted key. A key that is not here is read by all of them.
READERS: dict[str, tuple[str, ...]] = {
    f"{section}.{key}": readers
    for section, table in _NAMES.items()
    for key in dict.fromkeys(key for published in table.values() for key in published.defaults)
    if (readers := tuple(name for name, published in table.items() if key in published.defaults)) != tuple(table)
}


def _read(key: str, meaning: str) -> str:
    """The description of a key that not all read: who does stands at its end."""
    return f"{meaning} ({', '.join(READERS[key])})."


class ParameterGroup(FrozenModel):
    """What is other for some parameters: those whose dotted names fit the pattern."""

    pattern: str = Field(
        min_length=1,
        description="A glob of dotted names, such as `blocks.*.kernel` or `*embedding`; `*` stands for dots too. It "
        "must fit some parameter, and none that another group's pattern fits.",
    )
    rate: PositiveFloat = Field(default=1.0, description="Times the learning rate.")
    weight_decay: NonNegativeFloat | None = Field(
        default=None, description="For its matrices; null: that of all others."
    )
    clip_norm: PositiveFloat | None = Field(
        default=None,
        description="The norm of this group's gradient alone to clip to, which the global one then leaves out; null: "
        "it is clipped with all others.",
    )
    frozen: bool = Field(
        default=False, description="Whether they stay as they are: without gradient, moments and decay."
    )

    @model_validator(mode="after")
    def _frozen_means_frozen(self) -> "ParameterGroup":
        for key in ("rate", "weight_decay", "clip_norm"):
            if self.frozen and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key} of a group that is frozen is not read; leave it out")
        return self


class OptimizerConfig(FrozenModel):
    """The optimizer, by library name. A key that is left out has the default of that name: see runner/train/recipe."""

    name: Literal["adamw", "adam", "lion", "adafactor", "sgd", "muon", "galore", "schedule_free_adamw"] = Field(
        default="adamw", description="Library name."
    )
    learning_rate: PositiveFloat | None = Field(
        default=None, description="Peak learning rate; needed, but for a job that brings its own optimizer or schedule."
    )
    b1: float = Field(
        default=0.9, ge=0, lt=1, description=_read("optimizer.b1", "Decay of the first moment, or weight of the mean")
    )
    b2: float = Field(
        default=0.95, ge=0, lt=1, description=_read("optimizer.b2", "Decay of the second moment; by default by name")
    )
    eps: PositiveFloat = Field(
        default=1e-8, description=_read("optimizer.eps", "Added to the root of the second moment; by default by name")
    )
    momentum: float = Field(
        default=0.9, ge=0, lt=1, description=_read("optimizer.momentum", "Momentum; by default 0.95 of muon")
    )
    weight_decay: NonNegativeFloat = Field(
        default=0.1,
        description="A step takes this share, times the learning rate, off every matrix; sgd's goes through momentum, "
        "adam's through the moments. By default by name.",
    )
    clip_norm: PositiveFloat | None = Field(
        default=1.0, description="Global gradient norm to clip to; null does not clip."
    )
    moments: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description=_read(
            "optimizer.moments", "Type of the first moments; the second, which bfloat16 would hold still, are float32"
        ),
    )
    matrices: list[str] | None = Field(
        default=None,
        min_length=1,
        description=_read(
            "optimizer.matrices",
            "Globs of the dotted names of the matrices that are orthogonalised or projected, the rest being adamw's; "
            "null: all but embeddings and what has the vocabulary or positions as an axis",
        ),
    )
    rank: PositiveInt = Field(
        default=_RANK, description=_read("optimizer.rank", "Rank that gradients are projected to")
    )
    projection_every_steps: PositiveInt = Field(
        default=_PROJECTION_EVERY_STEPS,
        description=_read("optimizer.projection_every_steps", "Steps from one projection to the next"),
    )
    projection_scale: PositiveFloat = Field(
        default=_PROJECTION_SCALE,
        description=_read("optimizer.projection_scale", "Times the update of what is projected"),
    )
    groups: list[ParameterGroup] = Field(default=[], description="Parameters that are treated otherwise, by name.")

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_name(cls, given: Any) -> Any:
        """What is left out is as the optimizer of that name was published."""
        if not isinstance(given, dict) or not isinstance(name := given.get("name", "adamw"), str):
            return given
        return (dict(OPTIMIZERS[name].defaults) if name in OPTIMIZERS else {}) | given

    def get_published_default(self, key: str) -> Any:
        """What a key is that is left out."""
        return OPTIMIZERS[self.name].defaults.get(key, type(self).model_fields[key].get_default())


class ScheduleConfig(FrozenModel):
    """The learning rate over the steps of the run."""

    name: Literal["constant", "linear", "cosine", "cosine_restarts", "polynomial", "wsd", "inverse_square_root"] = (
        Field(default="cosine", description="Shape after the warm-up.")
    )
    warmup_steps: NonNegativeInt = Field(default=0, description="Steps of linear warm-up from 0.")
    warmup_share: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Warm-up as a share of all steps, to the nearest step, instead of warmup_steps.",
    )
    final_learning_rate: NonNegativeFloat = Field(
        default=0.0, description=_read("schedule.final_learning_rate", "Learning rate at the end")
    )
    decay_steps: PositiveInt | None = Field(
        default=None, description=_read("schedule.decay_steps", "Length of the decay at the end, which wsd needs")
    )
    power: PositiveFloat = Field(
        default=1.0, description=_read("schedule.power", "Power of the share of steps that is left")
    )
    cycles: PositiveInt = Field(
        default=2, description=_read("schedule.cycles", "Times that the learning rate falls from its peak to the end")
    )

    def compute_warmup_steps(self, total_steps: int) -> int:
        """Steps of the warm-up of a run of so many steps."""
        return self.warmup_steps if self.warmup_share is None else round(self.warmup_share * total_steps)

    @property
    def depends_on_total_steps(self) -> bool:
        """Whether the learning rate of a step depends on how many there will be."""
        return self.name not in ("constant", "inverse_square_root") or self.warmup_share is not None

    @model_validator(mode="after")
    def _keys_belong_to_the_name(self) -> "ScheduleConfig":
        if self.name == "wsd" and self.decay_steps is None:
            raise ValueError("missing key decay_steps, which wsd needs")
        if self.name != "wsd" and self.decay_steps is not None:
            raise ValueError(f"decay_steps={self.decay_steps} is for wsd only, and the schedule is {self.name}")
        if self.warmup_share is not None and self.warmup_steps:
            steps, share = self.warmup_steps, self.warmup_share
            raise ValueError(f"got both warmup_steps={steps} and warmup_share={share}; keep one of them")
        if self.name == "inverse_square_root" and not self.warmup_steps and self.warmup_share is None:
            raise ValueError("missing key warmup_steps (or warmup_share), from whose end inverse_square_root falls")
        return self
