"""TrainRecipe: what a training job says about its model, loss, optimizer, data and evaluation.

An experiment overrides the statements that differ: it defines the model (`model`), and may override the loss
(`forward`), the optimizer, the schedule or the evaluation. `BaseTrainer` adds how the job trains.

The functions that make up a step are classmethods, so that a compiled step cannot depend on attributes of the job that
change. They can read only `cls.config`. Each job has its own class (`TrainRecipe.__new__`), so `config` differs between
jobs.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from runner.config import ModelConfig, TrainerConfig
from runner.errors import InvalidError, format_place
from runner.evaluation.builtin import BuiltinEvaluators
from runner.hook.listing import HookList, load_hooks
from runner.huggingface.load import identify_frozen_base
from runner.job import RestoreableJob
from runner.metrics.meta import ACCURACY, SUMS
from runner.optim.groups import get_default_multiplier
from runner.parallel.mesh import LogicalAxisRule, build_logical_axis_rules
from runner.spec import Document, ExecutionSpec, Trajectory, validate_config
from runner.storage import JsonObject
from runner.train import state as train_state
from runner.train import step as step_functions
from runner.train.auxiliary import AuxiliaryState
from runner.train.evaluators import Evaluator
from runner.train.feature import Feature
from runner.train.features import FEATURES, make_features
from runner.train.flops import Flops, Sizing, count_forward_flops
from runner.train.kernel_check import KernelCase
from runner.train.loss import compute_log_probs, count_correct, cross_entropy_sum, document_arguments, target_weights
from runner.train.optimizer import SPEC
from runner.train.program import Programs
from runner.train.replay import get_replay_inputs
from runner.train.setup import TrainSetup, TrainSetupBuilder, get_tokens
from runner.train.stages import StagePlan, make_stages, resolve_config
from runner.train.state import TrainState
from runner.train.step import Batch
from runner.train.text_first import TextsFirst
from runner.train.weights import get_model_weights


class TrainRecipe(RestoreableJob):
    """Definition of a training job: its model, loss, optimizer, data and evaluators.

    All methods are called on every host. Those that make up a step read the config of its stage.

    Attributes:
        config: validated config; also an attribute of the job's class, for classmethods.
        hooks: hooks that the spec lists.
        programs: programs of the run by stage, and the stage that it is in.
        features: features that the config switches on, in order.
        setup_builder: builder of the train setup, before any stage of the spec.
        calls_hooks: True if the class calls hooks, so that its spec may list some.
        text_job: path (`module:Class`) of the `TextJob` that tokenises the text of `config.data.tokenise`.
        texts: texts to tokenise before the run; empty without `config.data.tokenise`.
        logical_axis_rules: mesh axes of the model's own logical axis names; they precede the runner's
            (`runner.parallel.mesh`).
        feature_classes: features that the config of the class may switch on; an experiment may add its own.
        stage_of: in a job of a later stage, the job of the run and the number of the stage; None elsewhere.
    """

    Config: ClassVar[type[TrainerConfig[Any]]] = TrainerConfig[ModelConfig]
    needs_topology: ClassVar[bool] = True
    writes_own_rows: ClassVar[bool] = False
    calls_hooks: ClassVar[bool] = True
    text_job: ClassVar[str] = "experiments.tokenise:Tokenise"

    config: TrainerConfig[Any]

    logical_axis_rules: ClassVar[Sequence[LogicalAxisRule]] = ()
    feature_classes: ClassVar[Sequence[type[Feature]]] = FEATURES
    stage_of: ClassVar[tuple["TrainRecipe", int] | None] = None
    sharded_init = staticmethod(train_state.sharded_init)
    update_variables = staticmethod(train_state.keep_variables)
    weights = staticmethod(get_model_weights)
    learning_rate_multiplier = staticmethod(get_default_multiplier)

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Create the instance from a new subclass, made for this job only, that adds nothing but `config`.

        `train_step`, `optimizer` and the like are classmethods by contract and read `cls.config`. Two jobs of one class
        with different configs may exist in a process (tests, `plan --search`), so the config cannot be an attribute of
        the class that they share. The subclass has the name and the module of its base; `__init__` sets its `config`.
        """
        # `_make_stage_job` has made such a class already.
        return super().__new__(cls._make_own_class() if cls.stage_of is None else cls)

    @classmethod
    def _make_own_class(cls, **attributes: Any) -> type[Self]:
        names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
        former_paths = vars(cls).get("former_paths", ())
        return type(cls.__name__, (cls,), {**names, "former_paths": former_paths, **attributes})

    def __init__(self, spec: ExecutionSpec, document: Document | None = None):
        assert spec.topology is not None, "a trainer needs a spec with a topology"
        super().__init__(spec, document)
        self.texts = TextsFirst(self.document, spec, self.config.data, self.store, self.text_job)
        if self.texts:
            # From here on document and config name the corpora instead of the texts.
            self.document = self.texts.document
            self.config = validate_config(self.document, self.Config)
        plans = make_stages(self.document, self.Config, self.config)
        self.config = resolve_config(self.config, plans)
        # From here on classmethods see the config, including those that hooks and the builder call.
        type(self).config = plans[0].config
        self.topology = spec.topology
        run, number = self.stage_of or (self, 0)
        self.hooks: HookList = load_hooks(self.document, spec.hook_entries, self) if run is self else run.hooks
        self.features = make_features(self.config, run.config, self.feature_classes)
        self.programs = Programs(self, plans)
        self.setup_builder = TrainSetupBuilder(
            document=self.document,
            config=plans[0].config,
            topology=self.topology,
            seed=spec.seed,
            recipe=self,
            rules=build_logical_axis_rules(self.logical_axis_rules, type(self).__name__),
            stage=run.programs.make_context(number),
        )

    # Model, loss and optimizer.

    def model(self) -> nn.Module:
        """Return the Flax module; called as `module(x_BxT, deterministic=...)`, it returns logits (B, T, V).

        Where the data are arrays, it is called with the arguments of `model_inputs` and may return anything. If
        sequences hold several documents it is also called with `segments=` and `positions=` (B, T), so that
        positions attend only within their segment. A module without these arguments is then refused.
        """
        raise NotImplementedError

    @classmethod
    def read_published_model(cls, config: Mapping[str, Any]) -> JsonObject | None:
        """Return the keys of `config.model` that the content of a published `config.json` describes.

        They replace keys that a spec with `checkpoint.init_from` leaves out. None, the default: the job cannot
        translate such files, so the spec needs every key of the model. Raises `InvalidError`, as one line, for a file
        that describes no model of this job.
        """
        return None

    @classmethod
    def model_inputs(cls, batch: Batch) -> tuple[Any, ...]:
        """Return the positional arguments of the model for a batch (B, ...); by default `x`. Pure.

        The model is initialised with them. A job whose data are arrays overrides this, and uses it in `forward`.
        """
        return get_tokens(batch, format_place(cls.model_inputs))

    # True in the class that defines `forward`: its loss is a sum over targets, and is not checked at the first start.
    returns_loss_sum: ClassVar[bool] = True

    @classmethod
    def forward(
        cls, apply_fn: Any, params: Any, batch: Batch, key: jax.Array | None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return (loss summed over the real targets of a micro-batch, meta). Pure.

        This default is the cross-entropy of tokens. A job whose data are arrays overrides it.

        Args:
            apply_fn: `apply` of the model.
            params: parameters of the model.
            batch: `x`, `y` and `padding_mask` (B, T), further fields that the data declare (see `runner.train.loss`; it
                is an error not to read one), and `example` (B), the index of each example in the step. If the data are
                arrays: their fields (B, ...), and `padding_mask` (B), True for a real example.
            key: key of the step; None: deterministic. Fold `example` into it to make random numbers independent of the
                split into micro-batches. This default draws one key per micro-batch.

        A forward that counts targets in another way returns their number as meta `target_count` (or `token_count`).
        Otherwise each real position is one, or each real example of arrays. Meta `statistics` are summed for
        `update_variables`.
        """
        if missing := sorted({"x", "y"} - {*batch}):
            names = ", ".join(sorted({*batch} - {"example"}))
            reason = f"the data's batches hold {names} and no {missing[0]}"
            raise InvalidError(f"{reason}; override forward of {cls.__name__}, which returns the loss of such a batch")
        rngs = None if key is None else {"dropout": jax.random.fold_in(key, batch["example"][0])}
        documents = document_arguments(apply_fn, batch)
        logits_BxTxV = apply_fn({"params": params}, batch["x"], **documents, deterministic=key is None, rngs=rngs)
        targets = batch["y"], target_weights(batch)
        shapes = logits_BxTxV.shape[:-1], *(each.shape for each in targets)
        if len({*shapes}) > 1:
            raise InvalidError(
                f"logits of shape {logits_BxTxV.shape} do not fit targets y of shape {shapes[1]} with weights of shape "
                f"{shapes[2]}; override forward of {cls.__name__}, or give the data and the model other shapes"
            )
        loss_sum, _ = cross_entropy_sum(logits_BxTxV, *targets)
        meta: dict[str, Any] = {} if key is not None else {SUMS: {ACCURACY: count_correct(logits_BxTxV, *targets)}}
        return loss_sum, meta

    @classmethod
    def predict(cls, apply_fn: Any, params: Any, batch: Batch) -> dict[str, jax.Array]:
        """Return outputs (B, ...) of the model by name, for `python -m runner predict`. Pure.

        By default these are `log_probs` (B, T) of the target tokens, NaN for a position that is no target, and their
        sums `log_prob` (B); and of a model that returns no logits (B, T, V) for targets `y`, what it returns: `output`.

        Args:
            apply_fn: `apply` of the model.
            params: parameters of the model.
            batch: as in `forward`, with the index of each example in the data as `example` (B).
        """
        documents = document_arguments(apply_fn, batch)
        output = apply_fn({"params": params}, *cls.model_inputs(batch), **documents, deterministic=True)
        if "y" not in batch or batch["y"].ndim != 2 or getattr(output, "shape", ())[:-1] != batch["y"].shape:
            return output if isinstance(output, dict) else {"output": output}
        is_target_BxT = target_weights(batch) > 0
        log_probs_BxT = compute_log_probs(output, batch["y"])
        sum_B = jnp.sum(jnp.where(is_target_BxT, log_probs_BxT, 0), axis=-1)
        return {"log_prob": sum_B, "log_probs": jnp.where(is_target_BxT, log_probs_BxT, jnp.nan)}

    @classmethod
    def optimizer(cls) -> str | optax.GradientTransformation:
        """Return a library name (`SPEC`: the one in the spec), or an optax optimizer, which is used unchanged.

        The defaults of `config.optimizer` are those of the name in the spec, also if this returns another name.
        """
        return SPEC

    @classmethod
    def schedule(cls) -> str | optax.Schedule | None:
        """Return a library name (`SPEC`: the one in the spec), an optax schedule, or None for a constant."""
        return SPEC

    @classmethod
    def auxiliary_states(cls) -> tuple[AuxiliaryState, ...]:
        """Return the auxiliary states that the features of the config keep, such as averages.

        An experiment with its own adds them: `return *super().auxiliary_states(), AuxiliaryState(...)`.
        """
        config = cls._get_config()
        run_config = None if cls.stage_of is None else cls.stage_of[0].config
        features = [] if config is None else make_features(config, run_config, cls.feature_classes)
        return tuple(state for feature in features if (state := feature.make_auxiliary()) is not None)

    def batch(self, slice: str = "train", step: int | None = None) -> Batch:
        """Return the global (S, B, ...) batch after `step` completed steps, see `BaseTrainer.batch`."""
        raise NotImplementedError

    @property
    def builtin_evaluators(self) -> BuiltinEvaluators:
        """Evaluators of the loss on the validation sets and of the tasks of `config.eval`. Iterate to get them."""
        raise NotImplementedError

    def evaluator(self) -> Evaluator | list[Evaluator] | None:
        """Return the evaluators of the weights, by default `builtin_evaluators`. Called once in each stage."""
        return [*self.builtin_evaluators]

    def flops_per_token(self, train_setup: TrainSetup) -> Flops:
        """Return the FLOPs of a train step per token, or per example of arrays. Override it with a formula if you can.

        By default FLOPs are counted in the traced `forward`. Raises `ValueError` if `forward` calls kernels that
        cannot be counted.
        """
        fields, units = self.setup_builder.fields, self.config.data.units_per_example
        return count_forward_flops(self.forward, train_setup, fields, units)

    def sizing(self, sizes: Mapping[str, int]) -> Sizing:
        """Return memory and communication per token on a mesh of these sizes (devices by axis); unknown by default."""
        return Sizing()

    def kernel_cases(self, train_setup: TrainSetup) -> Sequence[KernelCase]:
        """Return the cases of the kernels of a traced step, which are tested before the first step.

        By default these are the cases that the blocks of the model recorded while the step was traced. A job that calls
        kernels of its own may record them in its model too (`runner.train.kernel_check`), or add them here.
        """
        return [*train_setup.kernels.cases.values()]

    def search_space(self) -> dict[str, tuple[Any, ...]]:
        """Return the values by dotted key that `plan --search` varies besides mesh and micro-batch; none by default."""
        return {}

    def final_choices(self) -> dict[str, tuple[Any, ...]]:
        """Return the values by dotted key that `plan --search` varies for the best candidate alone; none by default.

        All other candidates have the first value of each key.
        """
        return {}

    # Step.

    @classmethod
    def train_step(
        cls, state: TrainState, batch: Batch, key: jax.Array, accumulate_steps: int
    ) -> tuple[TrainState, jax.Array, dict[str, jax.Array]]:
        """Make one optimizer step over a batch (S, B, ...) and return (state, loss, meta). Pure."""
        config = cls._get_config()
        options = step_functions.StepOptions(
            update_variables=cls.update_variables,
            auxiliary_states=cls.auxiliary_states(),
            rounding="nearest" if config is None else config.precision.rounding,
            norms="none" if config is None else config.metrics.norms,
            num_groups=None if config is None else config.train.same_bits_devices,
            replay=get_replay_inputs(),
        )
        return step_functions.train_step(cls.forward, state, batch, key, accumulate_steps, options)

    @classmethod
    def val_step(cls, state: TrainState, batch: Batch) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """Return (loss_sum, token_count, last_meta) over a batch (S, B, ...). Pure; reads no `opt_state`."""
        config = cls._get_config()
        num_groups = None if config is None else config.train.same_bits_devices
        return step_functions.val_step(cls.forward, state, batch, num_groups=num_groups)

    @classmethod
    def _get_config(cls) -> TrainerConfig[Any] | None:
        """Return the job's config; None on a class that is not the class of one job."""
        return getattr(cls, "config", None)

    def get_data_step(self, step: int) -> int:
        """Return the index, in the order of the data, of the batch after `step` completed steps.

        A job that makes its own batches in `batch` must return the batch of this index, so that ranges of data can be
        skipped (`skip_steps` and roll-backs).
        """
        return self.programs.data_position.get_data_step(step)

    # Parts that programs and evaluators ask for.

    def list_auxiliary_states(self) -> Sequence[AuxiliaryState]:
        """Return the auxiliary states of the train state, those of hooks included."""
        return (*self.auxiliary_states(), *self.hooks.auxiliary_states())

    def identify_base(self) -> Trajectory:
        """Return the trajectory keys of the frozen weights of an adapter; empty without one. May read the weights."""
        return identify_frozen_base(self.document, self.spec, self.config, self.store)

    @functools.cached_property
    def stage_jobs(self) -> list[Self]:
        """This job, and for each stage one of the same class with the config of the stage, which never runs."""
        return [self, *(self._make_stage_job(stage) for stage in self.programs.plans[1:])]

    def _make_stage_job(self, stage: StagePlan) -> Self:
        data = stage.document.data | {"hooks": []}
        spec = self.spec.model_copy(update={"config": data["config"], "hooks": []})
        # The class of this job is one made for its config; its base is the class that the spec names.
        base: type[Self] = type(self).__mro__[1]
        job_class = base._make_own_class(stage_of=(self, stage.number))
        return job_class(spec, dataclasses.replace(stage.document, data=data))

    def at_step(self, step: int) -> Self:
        """Return the job with the config that has made `step`, for tools that only read."""
        return self.stage_jobs[self.config.find_stage(max(step - 1, 0))]
