"""Config models of optimizers and schedules, and tables of their keys, defaults and sources.

`runner.optim.library` implements them. A new optimizer or schedule needs an entry in the table of this module, its name
in the `Literal` of its config model, and a function in `runner.optim.library`. This module imports no jax.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from runner.spec import FrozenModel
from runner.spec.model import Policy


@dataclass(frozen=True)
class LibraryEntry:
    """Entry of the library: an optimizer or a schedule."""

    source: str
    # Keys that this entry uses, but not every entry of the table, with their published defaults.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    # True if the bits of an optimizer can be made independent of how devices share a matrix: it updates each element
    # from that element alone, or each matrix on one device.
    supports_same_bits: bool = True


# Defaults that the table and the config model below share.
_RANK, _PROJECTION_EVERY_STEPS, _PROJECTION_SCALE = 128, 200, 0.25
# Of muon and its variants; b1, b2 and eps are those of adamw for the other parameters, and of the moments of normuon.
_MUON: Mapping[str, Any] = {
    "momentum": 0.95,
    "b1": 0.9,
    "b2": 0.95,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "moments": "float32",
    "matrices": None,
}
# Defaults are those of the publication, except where `source` names another one.
OPTIMIZERS: dict[str, LibraryEntry] = {
    "adamw": LibraryEntry(
        "Decoupled Weight Decay Regularization, arXiv:1711.05101; b2 and weight decay of GPT-3, arXiv:2005.14165",
        {"b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "moments": "float32"},
    ),
    "adam": LibraryEntry(
        "Adam, arXiv:1412.6980, with weight decay added to the gradient",
        {"b1": 0.9, "b2": 0.999, "eps": 1e-8, "weight_decay": 0.0, "moments": "float32"},
    ),
    "lion": LibraryEntry(
        "Symbolic Discovery of Optimization Algorithms, arXiv:2302.06675, which uses b2 0.99, and 0.98 for language",
        {"b1": 0.9, "b2": 0.95, "weight_decay": 0.1, "moments": "float32"},
    ),
    "adafactor": LibraryEntry(
        "Adafactor, arXiv:1804.04235, without momentum", {"weight_decay": 0.1}, supports_same_bits=False
    ),
    "sgd": LibraryEntry(
        "On the importance of initialization and momentum, ICML 2013 (Sutskever et al.), without Nesterov momentum",
        {"momentum": 0.9, "weight_decay": 0.1, "moments": "float32"},
    ),
    "muon": LibraryEntry(
        "Muon is Scalable for LLM Training, arXiv:2502.16982, of kellerjordan.github.io/posts/muon; adamw for others",
        _MUON,
    ),
    "normuon": LibraryEntry(
        "NorMuon, arXiv:2510.05491, with the Nesterov momentum of its published code; adamw for others", _MUON
    ),
    "muonh": LibraryEntry(
        "Hyperball Optimization, arXiv:2606.16899, with the Nesterov momentum of Levanter's code; adamw for others",
        {**_MUON, "weight_decay": 0.0},
    ),
    "galore": LibraryEntry(
        "GaLore, arXiv:2403.03507, with adamw; eps and weight decay of its published code; adamw for others",
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
        supports_same_bits=False,
    ),
    "schedule_free_adamw": LibraryEntry(
        "The Road Less Scheduled, arXiv:2405.15682; for a constant learning rate after a warm-up",
        {"b1": 0.9, "b2": 0.999, "eps": 1e-8, "weight_decay": 0.0},
    ),
}
# In formulas `u` is the share of the steps after the warm-up that are completed.
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
_TABLES = {"optimizer": OPTIMIZERS, "schedule": SCHEDULES}
# Names of the optimizers or schedules that use a key, by dotted key. Keys that all of them use are not listed.
READERS: dict[str, tuple[str, ...]] = {
    f"{section}.{key}": readers
    for section, table in _TABLES.items()
    for key in dict.fromkeys(key for entry in table.values() for key in entry.defaults)
    if (readers := tuple(name for name, entry in table.items() if key in entry.defaults)) != tuple(table)
}


def _describe(key: str, meaning: str) -> str:
    """Return the description of a key, followed by the names of the optimizers or schedules that use it."""
    return f"{meaning} ({', '.join(READERS[key])})."


class ParameterGroup(FrozenModel):
    """Optimizer settings of the parameters whose dotted names match a pattern."""

    pattern: str = Field(
        min_length=1,
        description="Glob of dotted parameter names, such as `blocks.*.kernel` or `*embedding`; `*` also matches dots. "
        "It must match at least one parameter, and none that another group matches.",
    )
    rate: PositiveFloat = Field(default=1.0, description="Learning-rate multiplier of the group.")
    weight_decay: NonNegativeFloat | None = Field(
        default=None, description="Weight decay of the group's matrices; null: that of all other matrices."
    )
    clip_norm: PositiveFloat | None = Field(
        default=None,
        description="Norm to which the gradient of this group alone is clipped; the global norm then leaves the group "
        "out. null: clipped together with all others.",
    )
    frozen: bool = Field(
        default=False,
        description="Keep these parameters unchanged: they get no gradient, no moments and no weight decay.",
    )

    @model_validator(mode="after")
    def _validate_frozen(self) -> "ParameterGroup":
        # A key without effect is an error, because the user expects it to have one.
        for key in ("rate", "weight_decay", "clip_norm"):
            if self.frozen and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key} of a group that is frozen is not read; leave it out")
        return self


class OptimizerConfig(FrozenModel):
    """Optimizer, by its name in the library. A key that is left out has the published default of that optimizer."""

    name: Literal[
        "adamw", "adam", "lion", "adafactor", "sgd", "muon", "normuon", "muonh", "galore", "schedule_free_adamw"
    ] = Field(default="adamw", description="Name of the optimizer in the library.")
    learning_rate: Annotated[PositiveFloat | None, Policy.STAGE] = Field(
        default=None, description="Peak learning rate. Required unless the job brings its own optimizer or schedule."
    )
    b1: Annotated[float, Policy.STAGE] = Field(
        default=0.9,
        ge=0,
        lt=1,
        description=_describe(
            "optimizer.b1",
            "Decay rate of the first moment; the weight of the averaged parameters for schedule_free_adamw",
        ),
    )
    b2: Annotated[float, Policy.STAGE] = Field(
        default=0.95,
        ge=0,
        lt=1,
        description=_describe("optimizer.b2", "Decay rate of the second moment; the default depends on the optimizer"),
    )
    eps: Annotated[PositiveFloat, Policy.STAGE] = Field(
        default=1e-8,
        description=_describe(
            "optimizer.eps", "Term added to the root of the second moment; the default depends on the optimizer"
        ),
    )
    momentum: Annotated[float, Policy.STAGE] = Field(
        default=0.9,
        ge=0,
        lt=1,
        description=_describe("optimizer.momentum", "Momentum; 0.95 by default for muon and its variants"),
    )
    weight_decay: Annotated[NonNegativeFloat, Policy.STAGE] = Field(
        default=0.1,
        description="Coefficient of weight decay: a step subtracts the learning rate times this share of every matrix. "
        "For sgd the decay passes through the momentum, for adam through the moments; the matrices whose norm muonh "
        "keeps do not decay. The default depends on the optimizer.",
    )
    clip_norm: Annotated[PositiveFloat | None, Policy.STAGE] = Field(
        default=1.0, description="Norm to which the global gradient is clipped; null: no clipping."
    )
    moments: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description=_describe(
            "optimizer.moments",
            "Type of the first moments. Second moments are always float32: bfloat16 would lose their small updates",
        ),
    )
    matrices: list[str] | None = Field(
        default=None,
        min_length=1,
        description=_describe(
            "optimizer.matrices",
            "Globs of the dotted names of the matrices that are orthogonalised or projected; adamw updates the rest. "
            "null: all matrices but embeddings and those with the vocabulary or positions as an axis",
        ),
    )
    rank: PositiveInt = Field(
        default=_RANK, description=_describe("optimizer.rank", "Rank of the subspace to which gradients are projected")
    )
    projection_every_steps: Annotated[PositiveInt, Policy.NO_STATE] = Field(
        default=_PROJECTION_EVERY_STEPS,
        description=_describe("optimizer.projection_every_steps", "Steps between two updates of the projection"),
    )
    projection_scale: Annotated[PositiveFloat, Policy.NO_STATE] = Field(
        default=_PROJECTION_SCALE,
        description=_describe("optimizer.projection_scale", "Factor on the update of projected matrices"),
    )
    groups: Annotated[list[ParameterGroup], Policy.STAGE] = Field(
        default=[], description="Groups of parameters with their own settings."
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_in_published_defaults(cls, given: Any) -> Any:
        # The validation of the fields reports values of a wrong type and unknown names.
        if not isinstance(given, dict) or not isinstance(name := given.get("name", "adamw"), str):
            return given
        return (dict(OPTIMIZERS[name].defaults) if name in OPTIMIZERS else {}) | given

    def get_published_default(self, key: str) -> Any:
        """Return the default of a key for the chosen optimizer."""
        return OPTIMIZERS[self.name].defaults.get(key, type(self).model_fields[key].get_default())


class ScheduleConfig(FrozenModel):
    """Learning-rate schedule."""

    name: Literal["constant", "linear", "cosine", "cosine_restarts", "polynomial", "wsd", "inverse_square_root"] = (
        Field(default="cosine", description="Shape of the schedule after the warm-up.")
    )
    warmup_steps: NonNegativeInt = Field(default=0, description="Steps of linear warm-up from 0.")
    warmup_share: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Warm-up as a share of all steps, rounded to the nearest step, instead of warmup_steps.",
    )
    final_learning_rate: NonNegativeFloat = Field(
        default=0.0, description=_describe("schedule.final_learning_rate", "Learning rate at the end of the run")
    )
    decay_steps: PositiveInt | None = Field(
        default=None,
        description=_describe("schedule.decay_steps", "Steps of linear decay at the end of the run; required for wsd"),
    )
    power: PositiveFloat = Field(
        default=1.0, description=_describe("schedule.power", "Power of the share of steps that is left")
    )
    cycles: PositiveInt = Field(
        default=2,
        description=_describe("schedule.cycles", "Cycles, each of which decays from the peak to final_learning_rate"),
    )

    def compute_warmup_steps(self, total_steps: int) -> int:
        """Return the steps of warm-up in a run of `total_steps`."""
        return self.warmup_steps if self.warmup_share is None else round(self.warmup_share * total_steps)

    @property
    def depends_on_total_steps(self) -> bool:
        """True if the learning rate of a step depends on the total number of steps."""
        return self.is_fixed_to_total(self.name) or self.warmup_share is not None

    @staticmethod
    def is_fixed_to_total(name: str) -> bool:
        """Return True if the shape of a schedule after its warm-up depends on the total number of steps."""
        return name not in ("constant", "inverse_square_root")

    @model_validator(mode="after")
    def _validate_keys(self) -> "ScheduleConfig":
        if self.name == "wsd" and self.decay_steps is None:
            raise ValueError("missing key decay_steps, which wsd needs; give the steps of its decay")
        if self.warmup_share is not None and self.warmup_steps:
            steps, share = self.warmup_steps, self.warmup_share
            raise ValueError(f"got both warmup_steps={steps} and warmup_share={share}; keep one of them")
        if self.name == "inverse_square_root" and not self.warmup_steps and self.warmup_share is None:
            raise ValueError(
                "missing key warmup_steps (or warmup_share), which inverse_square_root needs: it decays from the end "
                "of the warm-up"
            )
        return self
