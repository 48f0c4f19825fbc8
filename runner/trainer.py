"""BaseTrainer: a RestoreableJob that trains a Flax model. It composes state, step, data, hooks and metrics.

The data are tokens, or examples that are dicts of arrays, such as images and labels (`config.data`).

An experiment defines the model (`model`), and may override the loss (`forward`), the optimizer, the schedule or the
evaluation. All methods are called on every host. `BaseTrainer.run` is the training loop.

The functions that make up a step are classmethods, so that a compiled step cannot depend on attributes of the job that
change. They can read only `cls.config`. Each job has its own class (`BaseTrainer.__new__`), so `config` differs between
jobs.
"""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import flax.linen as nn
import jax
import optax

from runner.checkpoint.fork import find_continued_manifest
from runner.checkpoint.manifest import Manifest
from runner.checkpoint.save import SaveContents
from runner.config import ModelConfig, TrainerConfig
from runner.console import say, warn
from runner.data import TRAIN, DataPosition, Dataset, SeekablePrefetcher
from runner.data.array_examples import describe_slowest_read
from runner.data.open_source import RawText, restore_text, split_text
from runner.distributed.agreement import Hosts
from runner.distributed.clock import COMPILE, Clock
from runner.distributed.preemption import StopNotice
from runner.distributed.watchdog import Watchdog
from runner.errors import DivergedError, InvalidError, PhaseError, PreemptedError, ResumeError
from runner.evaluation.builtin import BuiltinEvaluators, EvaluationTasks, list_returned, read_evaluation_tasks
from runner.hook.dispatch import HookDispatcher
from runner.hook.listing import load_hooks
from runner.huggingface.assets import record_assets
from runner.huggingface.load import complete_model, identify_adapter_base
from runner.job import RestoreableJob, TextJob
from runner.metrics.meta import ACCURACY, SUMS, Meta
from runner.metrics.rows import Row
from runner.metrics.window import SpikeError
from runner.optim.groups import get_default_multiplier
from runner.parallel.mesh import LogicalAxisRule, build_logical_axis_rules, read_device_memory_bytes
from runner.process import keep_freed_memory, read_machine_id
from runner.run.attempt import IncidentRecorder
from runner.run.events import ROLL_BACK_FOLDER
from runner.run.fence import RunIdentity
from runner.run.layout import read_owner, read_result
from runner.run.logs import begin_next_log_file
from runner.spec import (
    Document,
    ExecutionSpec,
    InitFromConfig,
    Trajectory,
    compute_trajectory,
    load_job_class,
    validate_config,
    validate_spec,
)
from runner.storage import JsonObject, Store
from runner.train import state as train_state
from runner.train import step as step_functions
from runner.train.auxiliary import AuxiliaryState, make_ema, make_noise_scale
from runner.train.checks import (
    find_known_micro_batch,
    find_unmeasured_saves,
    share_ids,
    validate_data_unchanged,
    validate_hardware,
    validate_hosts,
    validate_same_on_all_hosts,
    validate_same_program,
)
from runner.train.compile import MEMORY_SHARE, CompiledStep, compute_program_digest
from runner.train.evaluators import Evaluator, Validation, add_averages, make_ema_evaluators
from runner.train.flops import Flops, Sizing, compute_mfu_per_token_rate, count_forward_flops
from runner.train.kernel_check import KernelCase, KernelChecker, set_kernels_of_process
from runner.train.layout import BatchLayout
from runner.train.lora import get_model_weights, replace_base
from runner.train.loss import count_correct, cross_entropy_sum, document_arguments, target_weights
from runner.train.optimizer import SPEC
from runner.train.programs import Program, ProgramChange, ProgramHistory, get_program_record
from runner.train.replay import ReplaySchedule, get_replay_inputs
from runner.train.report import END, Report
from runner.train.setup import TrainSetup, TrainSetupBuilder, get_tokens
from runner.train.stability import RollBacks, find_earliest_begin, make_stability, validate_roll_backs
from runner.train.stages import (
    CONTINUES,
    CompiledStage,
    StagePlan,
    StageSequence,
    find_first_change,
    format_rounded_starts,
    list_restarts,
    make_stages,
    resolve_config,
    split_trajectory,
)
from runner.train.state import TrainState
from runner.train.step import Batch

SKIP_STEPS = "config.train.skip_steps"


class BaseTrainer(RestoreableJob):
    """Base of every training job.

    Attributes:
        config: validated config; also an attribute of the job's class, for classmethods.
        train_setup: abstract train state, optimizer and shardings on the devices of this job. Available after `setup`.
        hooks: hooks that the spec lists.
        roll_backs: roll-backs of the run, and the data that they have skipped.
        stages: stages of the run, and the one that it is in.
        setup_builder: builder of `train_setup`.
        programs: programs of the train step that have made the steps of the run.
        calls_hooks: True if the class calls hooks, so that its spec may list some.
        text_job: path (`module:Class`) of the `TextJob` that tokenises the text of `config.data.tokenise`.
        texts: texts to tokenise before the run, with their jobs, in order; empty without `config.data.tokenise`.
        written_data: `config.data` as the user wrote it: with the text sources that `config.data` replaces by their
            corpora.
        logical_axis_rules: mesh axes of the model's own logical axis names; they precede the runner's
            (`runner.parallel.mesh`).
    """

    Config: ClassVar[type[TrainerConfig[Any]]] = TrainerConfig[ModelConfig]
    needs_topology: ClassVar[bool] = True
    writes_own_rows: ClassVar[bool] = False
    calls_hooks: ClassVar[bool] = True
    text_job: ClassVar[str] = "experiments.tokenise:Tokenise"

    config: TrainerConfig[Any]
    train_setup: TrainSetup

    logical_axis_rules: ClassVar[Sequence[LogicalAxisRule]] = ()
    # Averages of weights keep the names that they have at the start of the run, also in a stage that sets other decays.
    ema_names: ClassVar[Sequence[float] | None] = None
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
        names: dict[str, Any] = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
        names["former_paths"] = vars(cls).get("former_paths", ())
        job_class: type[Self] = type(cls.__name__, (cls,), names)
        return super().__new__(job_class)

    def __init__(self, spec: ExecutionSpec, document: Document | None = None):
        assert spec.topology is not None, "a trainer needs a spec with a topology"
        super().__init__(spec, document)
        # From here on document and config name the corpora instead of the texts; `resolved_spec` has what the user
        # wrote.
        self.written_data, self.texts = self.config.data, list[tuple[RawText, TextJob]]()
        if self.written_data.tokenise is not None:
            self.document, texts = split_text(self.document, spec, self.store.url, self.text_job)
            for text in texts:
                job_class: type[TextJob] = load_job_class(text.document, TextJob)
                self.texts.append((text, job_class(validate_spec(text.document), text.document)))
            self.config = validate_config(self.document, self.Config)
        plans = make_stages(self.document, self.Config, self.config)
        self.config = resolve_config(self.config, plans)
        # From here on classmethods see the config, including those that hooks and the builder call.
        type(self).config = plans[0].config
        self.topology = spec.topology
        self.hooks = load_hooks(self.document, spec.hook_entries, self)
        self.roll_backs = RollBacks(self.config.stability.roll_back)
        self.stages = StageSequence(
            self.config,
            plans,
            lambda: [job.setup_builder for job in self.stage_jobs],
            lambda: self.train_setup,
            lambda: self.data_position,
        )
        self.setup_builder = TrainSetupBuilder(
            document=self.document,
            config=plans[0].config,
            topology=self.topology,
            seed=spec.seed,
            recipe=self,
            rules=build_logical_axis_rules(self.logical_axis_rules, type(self).__name__),
            stage=self.stages.make_context(0),
        )
        self.programs = ProgramHistory()
        self._replays: ReplaySchedule | None = None  # from the restore on, if the spec asks for replays
        self._compiled: CompiledStep | None = None  # from `prepare` on
        self._hook_dispatcher: HookDispatcher | None = None
        # Of the current stage.
        self._builtin_evaluators: BuiltinEvaluators | None = None
        self._chosen_evaluators: list[Evaluator] | None = None

    # Methods for an experiment to override.

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
        return get_tokens(batch)

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
        """Return the auxiliary states that the config asks for: averages, gradient noise scale and stability policy.

        An experiment with its own adds them: `return *super().auxiliary_states(), AuxiliaryState(...)`.
        """
        config = cls._get_config()
        if config is None:
            return ()
        ema = [] if config.ema is None else [make_ema(config.ema.decays, cls.ema_names)]
        noise_scale = [] if config.noise_scale is None else [make_noise_scale(config.noise_scale.decay)]
        stability = [make_stability(config.stability)] if config.stability.is_on else []
        return (*ema, *noise_scale, *stability)

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

    # Step, batch and loop.

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

    def batch(self, slice: str = "train", step: int | None = None) -> Batch:
        """Return the global (S, B, ...) batch after `step` completed steps, by default those of this job.

        `slice` is `train` or the name of a validation set. Raises `ValueError` for any other, and `PhaseError` before
        the job is compiled.
        """
        compiled = self.get_compiled("batch")
        step = self.step if step is None else step
        if slice == TRAIN:
            return self.stages.load_batch(step)
        return compiled.layout.batch(self.stages.current.builder.dataset, slice, step)

    def get_data_step(self, step: int) -> int:
        """Return the index, in the order of the data, of the batch after `step` completed steps.

        A job that makes its own batches in `batch` must return the batch of this index, so that ranges of data can be
        skipped (`skip_steps` and roll-backs).
        """
        return self.data_position.get_data_step(step)

    @property
    def data_position(self) -> DataPosition:
        """Position in the data by step, with the ranges skipped by the spec and by roll-backs."""
        return DataPosition(tuple(sorted((*self.setup_builder.data_position.skipped, *self.roll_backs.skipped))))

    def run(self) -> None:
        """Train to the end: exactly `total_steps` steps in all, over any number of attempts."""
        key, report = self.train_setup.key, self.report
        with report.display(self.step):
            self.start_hooks()
            with contextlib.closing(SeekablePrefetcher(self.load_step)) as batches:
                while self.step < self.total_steps:
                    self.enter_stage(self.step)
                    # The state is donated to the step. The host runs ahead of the device, except at a replayed step.
                    # After `load` has set the step back, `seek` drops the batches that were read ahead.
                    following = batches.seek(self.step)
                    self.state, loss, meta = self.make_step(
                        self.state, *self.attempt.progress.take_batch(following), key
                    )
                    self.step += 1
                    self.stages.compile_next()
                    report.add_step(self.step, loss, meta)
                    # Raised where rows and saves fetch losses; nothing else reads a loss on the host.
                    try:
                        if report.is_row_due(self.step):
                            report.add_row(self.get_evaluated_weights(self.state), self.step)
                            self.call_hooks()
                        self.save_or_stop()
                    except SpikeError as spike:
                        self.roll_back(spike)

    def load_step(self, step: int) -> tuple[Batch, bool]:
        """Return the batch after `step` completed steps, and False if it is known to have no target.

        Called on the thread of the prefetcher.
        """
        batch = self.batch("train", step)
        # If the job overrides `batch`, each of several hosts sees only its own part.
        is_known = type(self).batch is BaseTrainer.batch or self.attempt.hosts.num_processes == 1
        return batch, not is_known or self.stages.has_targets(batch, step)

    def make_step(
        self, state: TrainState, batch: Batch, has_target: bool, key: jax.Array
    ) -> tuple[TrainState, jax.Array, Meta]:
        """Make one optimizer step; a batch without a target updates nothing. Waits for the device only in a replay.

        Raises:
            DeviceError: the replay of the step gives other gradients.
        """
        # Between steps the state holds the (static) functions of stage 0, like a state that is saved and restored.
        stage = self.stages.current
        state = stage.adopt(state) if stage.plan.number else state
        if not has_target:
            state, loss, meta = stage.skip_step(state)
        elif self._replays is None:
            state, loss, meta = self.compiled.executable(state, batch, key)
        else:
            state, loss, meta = self._replays.make_step(stage.replayed_step, self.step + 1, state, batch, key)
        return self.stages.compiled[0].adopt(state) if stage.plan.number else state, loss, meta

    def load(self, suffix: str | os.PathLike[str]) -> None:
        """Load state and step from `checkpoints/<suffix>`, see `RestoreableJob.load`. Batches follow the step."""
        super().load(suffix)
        self.state = self.hook_dispatcher.go_to(self.state, self.step)

    def roll_back(self, spike: SpikeError) -> None:
        """Skip the data of a spike, and continue from a checkpoint before it. Called on every host.

        Raises:
            DivergedError: the run was rolled back too often, or has no such checkpoint.
        """
        # A save in progress may be of the step to go back to.
        self.checkpointer.wait_until_finished()
        # The stage in which the spike begins, even if a later stage fetched its loss.
        stage = self.stages.plans[self.config.find_stage(spike.first - 1)]
        batch_examples = stage.config.train.global_batch_examples
        data_start = self.stages.find_data_start(stage.number).start
        steps = self.roll_backs.decide(
            self.attempt, spike, data_start, batch_examples, self.identity(), self.report.list_losses_after
        )
        for step in steps:
            try:
                self.load(str(step))
                return
            except ResumeError as error:
                self.attempt.say(f"cannot roll back to checkpoint {step}: {error}")
        raise DivergedError(f"{spike}; no good checkpoint of step {steps[0]} or earlier is left to go back to")

    def on_restored(self) -> None:
        """Mark the next step for replay, and restore the ranges of data that roll-backs have skipped."""
        every_steps = self.config.train.replay_every_steps
        if every_steps is not None:
            self._replays = ReplaySchedule(self.attempt, self.checkpointer, every_steps, self.step)
        if self.config.stability.roll_back is not None:
            self.state = self.roll_backs.restore(self.state, self.step, self.store.url)
            self.checkpointer.set_identity(self.identity())

    def start_hooks(self) -> None:
        """Call `on_start` of hooks; complete the evaluation and hook calls of this step if a stop interrupted them."""
        self.state = self.hook_dispatcher.start(self.state, self.step)

        def on_row(row: Row) -> None:
            self.state = self.hook_dispatcher.on_given_row(self.state, self.step, row)

        # Evaluate first: hooks get the complete row.
        if not self.report.complete_row(self.get_evaluated_weights(self.state), self.step, on_row):
            self.save_or_stop()
        self.call_hooks()
        best = self.spec.checkpoint.keep_best
        if best is not None and self.attempt.hosts.is_main:
            # The step may have been saved before it was evaluated.
            metric = self.report.metric(best.metric, self.step)
            if metric is not None:
                self.checkpointer.add_metric(self.step, metric, is_end=self.report.is_metric_of_end(best.metric))

    def call_hooks(self) -> None:
        """Call hooks with the row of this step, if it has one. They may request a save, or end the run at this step."""
        # Counters are part of the state, so hooks return a new one.
        self.state = self.hook_dispatcher.on_row(self.state, self.step)
        if self.hook_dispatcher.save_step == self.step:
            self.checkpointer.request_save(self.step)

    @property
    def total_steps(self) -> int:
        """Last step: that of the config, or the one at which a hook has ended the run.

        Reads the data on this host if the total is in epochs.
        """
        # The dispatcher needs the attempt, which may not exist yet, so this property must not create it.
        stop = None if self._hook_dispatcher is None else self._hook_dispatcher.stop
        return self.config_in_steps.total_steps if stop is None else stop.step

    @property
    def config_in_steps(self) -> TrainerConfig[Any]:
        """Config with its total in steps. Reads the data on this host if the total is in epochs."""
        return self.setup_builder.config_in_steps if len(self.stages.plans) == 1 else self.config

    @property
    def done(self) -> bool:
        """True if the job has reached its end, or was ended by a hook that is in the spec with the same config."""
        return super().done or self.hooks.has_stopped(read_result(self.store))

    # Parts of the job, created on first access.

    @property
    def dataset(self) -> Dataset:
        """Data set of the spec. Reads the data on this host on first access."""
        return self.setup_builder.dataset

    @property
    def vocabulary_size(self) -> int:
        """Vocabulary size of the spec, or that of the data if the spec says `auto`; 0 if the data are arrays."""
        return self.setup_builder.vocabulary_size

    def list_auxiliary_states(self) -> Sequence[AuxiliaryState]:
        """Return the auxiliary states of the train state, those of hooks included."""
        return (*self.auxiliary_states(), *self.hooks.auxiliary_states())

    def identify_base(self) -> Trajectory:
        """Return the trajectory keys of the frozen weights of an adapter; empty without one. May read the weights."""
        return identify_adapter_base(self.document, self.spec, self.config, self.store)

    # Stages.

    @functools.cached_property
    def stage_jobs(self) -> "list[BaseTrainer]":
        """This job, and for each stage one of the same class with the config of the stage, which never runs."""
        return [self, *(self.make_stage_job(stage) for stage in self.stages.plans[1:])]

    def make_stage_job(self, stage: StagePlan) -> "BaseTrainer":
        """Return a job of the same class with the config of a stage, which never runs."""
        data = stage.document.data | {"hooks": []}
        spec = self.spec.model_copy(update={"config": data["config"], "hooks": []})
        # The class of this job is one made for its config; its base is the class that the spec names.
        job_class: type[BaseTrainer] = type(self).__mro__[1]
        job = job_class(spec, dataclasses.replace(stage.document, data=data))
        type(job).ema_names = None if self.config.ema is None else self.config.ema.decays
        job.hooks = self.hooks
        job.setup_builder = dataclasses.replace(job.setup_builder, stage=self.stages.make_context(stage.number))
        return job

    def at_step(self, step: int) -> "BaseTrainer":
        """Return the job with the config that has made `step`, for tools that only read."""
        return self.stage_jobs[self.config.find_stage(max(step - 1, 0))]

    def enter_stage(self, step: int) -> None:
        """Enter the stage of the step after `step` completed ones. May wait for its program."""
        if self.config.find_stage(step) == self.stages.number:
            return
        with self.attempt.progress.report_phase(COMPILE):
            self._compiled = self.stages.enter(step)
        stage = self.stages.current
        # These are created again, for the model, the batch and the data of this stage.
        self._builtin_evaluators = self._chosen_evaluators = None
        self.report.enter_stage(self._evaluators, self._compute_mfu_per_token_rate())
        layout = self.compiled.layout
        self.attempt.record(
            "stage",
            step,
            number=stage.plan.number,
            from_step=stage.plan.start,
            why=stage.plan.why,
            program=self.compiled.digest,
            micro_batch_examples=layout.micro_batch_examples,
        )

    @property
    def compiled(self) -> CompiledStep:
        """Compiled train step of the current stage. Available after `prepare`."""
        return self.get_compiled("compiled")

    def get_compiled(self, name: str) -> CompiledStep:
        """Return the compiled step, which the member `name` needs. Raises `PhaseError` if there is none yet."""
        if self._compiled is None:
            raise PhaseError(
                f"{type(self).__name__}.{name}: the job is not compiled yet; call the job, and {name} inside of run or "
                "after it"
            )
        return self._compiled

    @property
    def hook_dispatcher(self) -> HookDispatcher:
        """Dispatcher of the hooks in this attempt."""
        if self._hook_dispatcher is None:
            self._hook_dispatcher = HookDispatcher(self.hooks, self.attempt, self.report, self.get_evaluated_weights)
        return self._hook_dispatcher

    @functools.cached_property
    def report(self) -> Report:
        """Rows of metrics of this attempt."""
        return Report(
            self.attempt,
            self.resolved_spec(),
            self.config_in_steps,
            self._evaluators,
            mfu_per_token_rate=self._compute_mfu_per_token_rate(),
            get_data_metrics=lambda step: self.stages.get_dataset(self.stages.number).compute_metrics(
                *self.stages.count_examples(self.stages.number, step)
            ),
            after_row=self._compile_evaluators,
            is_language_model=self.setup_builder.is_language_model(self.train_setup),
        )

    def _compile_evaluators(self) -> None:
        # A stage without evaluations needs no evaluator, except for hooks that request an evaluation.
        if len(self.stages.plans) == 1 or self.stages.current.plan.is_evaluated(self.config.total_steps):
            self.builtin_evaluators.start_compiling(self._evaluators)

    @property
    def _evaluators(self) -> list[Evaluator]:
        """Evaluators of the current stage."""
        if self._chosen_evaluators is None:
            # The job may replace evaluators, but not drop one that a key of the spec asks for.
            chosen = self.builtin_evaluators.validate_chosen(self.evaluator(), self.document)
            self._chosen_evaluators = [*chosen, *make_ema_evaluators(self.config, self.validation)]
        return self._chosen_evaluators

    def _compute_mfu_per_token_rate(self) -> float:
        job, train_setup = self.stage_jobs[self.stages.number], self.stages.current.train_setup
        return compute_mfu_per_token_rate(job.flops_per_token, train_setup)

    @property
    def validation(self) -> Validation:
        """Evaluator of the loss on each validation set, on `eval.batches` batches, or fewer if the set has fewer."""
        self.get_compiled("validation")
        return self.builtin_evaluators.validation

    @functools.cached_property
    def evaluation_tasks(self) -> EvaluationTasks:
        """Tasks of `config.eval` besides the loss. Reads the files that it names on this host."""
        return read_evaluation_tasks(self.document, self.config, self.vocabulary_size)

    @property
    def builtin_evaluators(self) -> BuiltinEvaluators:
        """Evaluators of the loss on the validation sets and of the tasks of `config.eval`. Iterate to get them.

        These are the evaluators of the current stage.
        """
        if self._builtin_evaluators is None:
            compiled, tasks = self.get_compiled("evaluator"), self.evaluation_tasks
            self._builtin_evaluators = BuiltinEvaluators(
                self.stages.current.builder,
                self.stages.current.train_setup,
                compiled.layout,
                dataclasses.replace(tasks, config=self.stages.current.plan.config) if self.stages.number else tasks,
                self.batch,
                self.attempt.stop,
                self.stages.current.val_step,
            )
        return self._builtin_evaluators

    def list_evaluators(self, builtin: BuiltinEvaluators) -> list[Evaluator]:
        """Return what `evaluator` returns if these are its built-in ones, for a job that is not set up."""
        self._builtin_evaluators = builtin
        return list_returned(self.evaluator())

    def get_evaluated_weights(self, state: Any) -> Any:
        """Return the part of a state that evaluators and hooks get: its weights, and their averages below `ema`."""
        return add_averages(self.weights, state)

    # Methods that the lifecycle calls.

    @classmethod
    def complete_document(cls, document: Document, spec: ExecutionSpec) -> Document:
        """Return the document with the model of the published weights that the spec starts from, if it has no own."""
        model_class: type[ModelConfig] = cls.Config.model_fields["model"].annotation  # type: ignore[assignment]
        return complete_model(document, spec, model_class, cls.read_published_model)

    def find_untokenised(self) -> list[str]:
        """Return the names of the texts whose corpus is not complete. Process 0 only.

        Raises:
            SpecError: a corpus was made with other keys, or from another text, than the spec has.
        """
        names = []
        for text, job in self.texts:
            owner = read_owner(job.store)
            # A job that is not done makes the same checks itself.
            if owner is None or not job.done:
                names.append(text.name)
                continue
            identity = compute_trajectory(job.spec, job.config)
            changes = job.make_run_identity(identity).compare_values(owner.identity)
            # The text may be deleted by now, so it cannot be checked if it has only moved.
            for key in (f"config.{name}" for name in job.config.content_keys):
                saved, value = owner.identity.get(key), identity.get(key)
                # A tokenizer in another corpus of this run moves with the run.
                if saved != value and not str(value).startswith(f"{self.store.url}/"):
                    changes[key] = [saved, value]
            where = f"the corpus in {job.store.url} was made with"
            job.document.raise_problems(
                {
                    key: f"is {value!r}, and {where} {saved!r}; restore the key (the text is not read again), or use "
                    "another directory"
                    for key, (saved, value) in changes.items()
                }
            )
        # A run that is done needs no data.
        return [] if names and self.lifecycle.validate_directory() else names

    def run_earlier_jobs(self, hosts: Hosts, stop: StopNotice, clock: Clock) -> None:
        """Tokenise the texts of `config.data.tokenise` that are not tokenised yet."""
        if not self.texts:
            return
        incidents = IncidentRecorder()
        # Each job has a watchdog of its own, and these checks wait for process 0 and its storage too.
        with Watchdog(
            hosts, self.spec.deadlines, clock, incidents.on_diagnosis, incidents.on_straggler, incidents.on_progress
        ):
            names = hosts.run_on_main(self.find_untokenised)
            if not names:
                return
            # Checks that do not need the data come before tokenising, which may take hours.
            self.validate_devices(hosts)
            self.setup_builder.validate_keys_read()
            self.setup_builder.make_mesh(jax.devices())
            unfinished = [(text, job) for text, job in self.texts if text.name in names]
            for _, job in unfinished:
                hosts.run_on_main(job.find_text)
        for text, job in unfinished:
            self.validate_vocabulary(job)
            if hosts.is_main:
                say(f"{self.spec.name}: tokenises {text.source} first, in {job.store.url}")
            job(hosts, stop, clock)
            clock.begin_next_job()
            begin_next_log_file()
        if stop.poll():
            raise PreemptedError("stopped as asked; the text is tokenised; run the same command again to train on it")
        stop.begin_next_job()

    def validate_vocabulary(self, job: TextJob) -> None:
        """Raise `SpecError` if the tokenizer of a text has more ids than the model."""
        builder = self.setup_builder
        if builder.has_vocabulary_size and job.vocabulary_size > builder.vocabulary_size:
            raise self.document.error(
                "config.model.vocabulary_size",
                f"is {builder.vocabulary_size:,}, and data.tokenise.tokenizer has {job.vocabulary_size:,} ids; use a "
                "vocabulary of at least that, or auto",
            )

    def validate_devices(self, hosts: Hosts) -> None:
        """Check the devices and the number of hosts against the spec. Reads no tokens."""
        with self.document.errors_at("topology.accelerator"):
            validate_hardware(self.spec, self.topology, self.config, hosts)
        validate_hosts(hosts, lambda number: all(stage.builder.fits(number) for stage in self.stages.compiled))

    def setup(self, hosts: Hosts) -> None:
        """Check devices, mesh, batch and data against the spec, and build the train setup."""
        self.validate_devices(hosts)
        for key in ("global_batch_examples", "micro_batch_examples"):
            if getattr(self.config.eval, key) is not None and type(self).batch is not BaseTrainer.batch:
                reason = "batch() of the job makes the batches, so nothing reads it; leave it out"
                raise self.document.error(f"config.eval.{key}", reason)
        fork = self.spec.checkpoint.fork_from
        if len(self.stages.plans) > 1:

            def read_past() -> tuple[int, list[int]]:
                newest = find_continued_manifest(self.store, fork)
                return (0, []) if newest is None else (newest.step, list_restarts(newest.identity))

            step, restarts = hosts.run_on_main(read_past)
            # The stage whose evaluators complete the newest row: the one that has made its step.
            self.stages.number = self.config.find_stage(max(step - 1, 0))
            self.stages.restarts = frozenset(start for start in restarts if start < step)
        self.train_setup = self.setup_builder.build(jax.devices(), lambda data: share_ids(data, self.store, hosts))
        for stage in self.stages.compiled:
            dataset = self.stages.get_dataset(stage.plan.number)
            if len(self.stages.plans) > 1 and stage.plan.config.data.mixture:
                with stage.builder.document.errors_at("config.data.mixture"):
                    dataset.validate_epochs(self.stages.count_examples(stage.plan.number)[0])
            if stage.plan.number:
                stage.validate(self.abstract_state(), jax.devices())
                share_ids(dataset, self.store, hosts)
            dataset.validate_vocabulary(self.vocabulary_size)
            validate_same_on_all_hosts(dataset.fingerprint, "data", hosts, f"{dataset.source}: ")
            for line in [*dataset.find_missing_targets(), *stage.find_restarts(dataset)] if hosts.is_main else []:
                warn(line)
        for line in format_rounded_starts(self.config, self.stages.plans) if hosts.is_main else []:
            say(line)
        missed = find_unmeasured_saves(self.spec, self.config, self.config_in_steps.total_steps)
        if missed is not None and hosts.is_main:
            warn(self.document.format_problem(("checkpoint", "keep_best"), missed))
        matmul = self.config.precision.matmul
        if matmul != "compute" and jax.default_backend() == "cpu" and hosts.is_main:
            say(f"config.precision.matmul={matmul}: emulated on this CPU, with the same rounding and no gain in time")
        if self.evaluation_tasks.digest:
            validate_same_on_all_hosts(self.evaluation_tasks.digest, "questions", hosts)
        # Process 0 reads the frozen weights of an adapter first, so that an error in them is reported once.
        hosts.run_on_main(lambda: self.setup_builder.base_identity)
        known = find_known_micro_batch(self.train_setup, self.store, hosts, fork, self.stages.current.plan.start)
        self.stages.current.builder.validate_steps(self.stages.current.train_setup, known)
        if self.spec.checkpoint.program == "refuse":
            # A start that is refused must not stop a running attempt, so this comes before the claim. Kernels that the
            # job must avoid, and a smaller micro-batch, are known only after it: `continue_program` compares again.
            hosts.run_on_main(lambda: self.validate_program(known, hosts.num_processes))

    def validate_newest(self, newest: Manifest) -> None:
        """Raise `ResumeError` if the run cannot end at its newest checkpoint, which was not saved as the last one.

        The row of the last step is made from the results that are saved with it.
        """
        if self.config.stability.roll_back is not None:
            find_change = self.make_run_identity(self.identity()).find_change
            validate_roll_backs(self.store, newest, find_change, self.total_steps)
        carry = newest.carry or {}
        if newest.step == self.total_steps and carry and not {END, "last"} & {*carry}:
            raise ResumeError(
                f"{self.store.url}: the spec ends the run at step {newest.step}, whose checkpoint an earlier version "
                "has saved without the metrics of its row; end the run at a later step"
            )

    def describe_wait(self) -> str:
        """Return the example of the data that is being read for longest."""
        return describe_slowest_read()

    def prepare(self) -> None:
        """Compile the train step with the largest micro-batch that fits, by the compiler's own memory figures."""
        hosts = self.attempt.hosts
        self.stages.limit_bytes = hosts.agree(int(read_device_memory_bytes() * MEMORY_SHARE))
        # Read again: until this attempt claimed the directory, another one could still commit its choice.
        fork = self.spec.checkpoint.fork_from
        known = find_known_micro_batch(self.train_setup, self.store, hosts, fork, self.stages.current.plan.start)
        self.check_kernels(known)
        self._compiled = self.stages.current.compile(self.stages.limit_bytes, known)
        validate_same_program(self.compiled.digest, hosts)
        if jax.default_backend() == "cpu":
            machine = read_machine_id()
            num_devices = hosts.gather(machine).count(machine) * jax.local_device_count()
            keep_freed_memory(self.compiled.memory.temporaries * num_devices)
        examples = self.compiled.layout.micro_batch_examples
        given: JsonObject = {"compiler_options": dict(self.compiled.options)} if self.compiled.options else {}
        # Commands that only read files, such as `report`, get it from here.
        if not self.setup_builder.is_language_model(self.train_setup):
            given["language_model"] = False
        program = self.describe_program(
            self.stages.current, self.compiled.layout, self.compiled.digest, hosts.num_processes
        )
        self.attempt.record(
            "compile",
            None,
            program=program.digest,
            facts=program.facts,
            micro_batch_examples=examples,
            **given,
        )

    def describe_program(self, stage: CompiledStage, layout: BatchLayout, digest: str, num_processes: int) -> Program:
        """Return the program of a stage, with the values besides the code on which its digest depends."""
        return self.programs.describe(stage, self.stages.plans, layout, digest, self.hooks.identity(), num_processes)

    def validate_program(self, known_micro_batch: int | None, num_processes: int) -> None:
        """Raise `SpecError` if the code has made the newest checkpoint with another program. Process 0 only."""
        manifest = find_continued_manifest(self.store, self.spec.checkpoint.fork_from)
        if manifest is None:
            return
        stage = self.stages.current
        layout = stage.builder.get_largest_layout(stage.train_setup, known_micro_batch)
        digest = compute_program_digest(stage.train_setup.lower_train(stage.builder.recipe.train_step, layout))
        program = self.describe_program(stage, layout, digest, num_processes)
        change = ProgramHistory().resume(get_program_record(manifest.topology), program)
        self.validate_program_change(change, manifest.step)

    def validate_program_change(self, change: ProgramChange | None, step: int) -> None:
        """Raise `SpecError` if the spec refuses this change of the program since `step`."""
        if change is not None and not change.is_expected and self.spec.checkpoint.program == "refuse":
            reason = f"is refuse, and {change.describe(step)}; restore the former ones, or set warn to go on with these"
            raise self.document.error("checkpoint.program", reason)

    def continue_program(self, manifest: Manifest, is_start: bool) -> None:
        """Compare the program with the one that has made a restored checkpoint, and report or refuse a change."""
        # The step was made by this stage; later ones have other programs.
        stage = self.stages.compiled[self.config.find_stage(max(manifest.step - 1, 0))]
        compiled = stage.start_compiling(self.stages.limit_bytes).result()
        hosts, step = self.attempt.hosts, manifest.step
        program = self.describe_program(stage, compiled.layout, compiled.digest, hosts.num_processes)

        def resume() -> None:
            change = self.programs.resume(get_program_record(manifest.topology), program)
            if change is None or not is_start:
                return
            self.validate_program_change(change, step)
            (say if change.is_expected else warn)(change.describe(step))
            self.attempt.record(
                "changed",
                step,
                changes=change.list_changes(),
                program=[change.before, change.now],
                expected=change.is_expected,
            )

        # Only process 0 writes manifests and prints, and all learn of a refusal.
        hosts.run_on_main(resume)

    def check_kernels(self, known_micro_batch: int | None) -> None:
        """Test the kernels of the step on the devices, and trace it again without those that fail."""
        stages, own = self.stages.compiled, self.stages.current
        set_kernels_of_process(own.train_setup.kernels)
        own.builder.trace(own.train_setup, known_micro_batch)
        # A CPU has kernels only where a test puts them.
        if jax.default_backend() == "cpu" and not self.kernel_cases(own.train_setup):
            return
        # Steps of later stages are compiled while the devices train, and their kernels must be known by then.
        for stage in stages:
            if stage is not own:
                stage.builder.trace(stage.train_setup)

        def trace_again() -> None:
            for stage in stages:
                stage.builder.trace_again(stage.train_setup, known_micro_batch if stage is own else None)

        checker = KernelChecker(self.attempt)
        jobs = list(zip(self.stage_jobs, stages, strict=True))
        checker.check(
            [stage.train_setup.kernels for stage in stages],
            lambda: [case for job, stage in jobs for case in job.kernel_cases(stage.train_setup)],
            trace_again,
        )

    def before_restore(self) -> None:
        """Complete a roll-back that a killed attempt has begun."""
        find_change = self.make_run_identity(self.identity()).find_change
        self.roll_backs.complete(self.attempt, self.spec.checkpoint.fork_from, find_change, self.total_steps)

    def after_restore(self) -> None:
        """Enter the stage that has made the newest step. A run that begins records the assets of its exports."""
        self.enter_stage(max(self.step - 1, 0))
        if self.step == 0 and not self.attempt.lineage and self.attempt.hosts.is_main and self.family() is not None:
            record_assets(self.store, self.config.data, self.spec.checkpoint.initial_weights)

    def adopt_parent(self, parent: Store) -> None:
        """Record the assets of exports: those of the parent, with the tokenizer of this run's data."""
        if self.family() is not None:
            record_assets(self.store, self.config.data, InitFromConfig(path=parent.url))

    def abstract_state(self) -> TrainState:
        """Return shape, dtype and sharding of every leaf."""
        return self.train_setup.abstract_state

    def init_state(self) -> TrainState:
        """Return the state at step 0, each leaf created in its sharding."""
        return self.train_setup.init_state()

    def replace_weights(self, state: TrainState, weights: Any) -> TrainState:
        """Return the state at step 0 with other weights; averages and auxiliary states are initialised from them."""
        return self.train_setup.restart_averages(replace_base(state, weights))

    @property
    def unread_keys(self) -> frozenset[str]:
        """Keys that only optimizers and schedules other than the chosen ones read."""
        unread = (f"config.{key}" for key in self.setup_builder.optimizer_choice.find_unread_keys())
        # Roll-backs follow from the rest of the trajectory.
        return frozenset((*unread, ROLL_BACK_FOLDER))

    @property
    def former_values(self) -> Mapping[str, Sequence[str]]:
        """Former paths of the classes of the job and of its hooks."""
        return {**super().former_values, **self.hooks.former_values}

    def make_run_identity(self, identity: Trajectory) -> RunIdentity:
        """Return the identity to compare with a saved trajectory, which may differ at later steps."""
        whole = super().make_run_identity(identity)
        identities = [
            (
                stage.start,
                dataclasses.replace(whole, config=stage.config, identity=piece.keys, unread=job.unread_keys),
            )
            for stage, piece, job in zip(self.stages.plans, split_trajectory(identity), self.stage_jobs, strict=True)
        ]
        find_first_other = functools.partial(
            find_first_change,
            identities,
            identity,
            self.config,
            self.setup_builder.optimizer_choice.uses_config_rates(self.stages.plans[0].config),
            lambda: self.dataset.num_train_examples,
        )

        def find_first(saved: Trajectory, keys: Sequence[str]) -> int | None:
            position, others = self.setup_builder.data_position, [key for key in keys if key != SKIP_STEPS]
            found = [find_first_other(saved)] if others else []
            if SKIP_STEPS in keys:
                found.append(DataPosition.from_ranges(saved[SKIP_STEPS]).find_first_change(position))
            return min((step for step in found if step is not None), default=None)

        return dataclasses.replace(whole, find_first_change=find_first, is_discarded=self.roll_backs.is_discarded)

    def identity(self) -> Trajectory:
        """Return the keys that identify the trajectory, with those of data, vocabulary, hooks and frozen weights."""
        keys = super().identity() | self.hooks.identity()
        keys |= {"config.data": self.dataset.fingerprint} | self.setup_builder.base_identity
        if self.roll_backs.skipped:
            keys |= {ROLL_BACK_FOLDER: [[*each] for each in self.roll_backs.skipped]}
        if len(self.stages.plans) > 1:
            # The data of a stage are compared by their content too.
            keys["config.stages"] = [
                [
                    *given,
                    {"config.data": stage.builder.dataset.fingerprint},
                    *([CONTINUES] if self.stages.continues_data(stage.plan.number) else []),
                ]
                for given, stage in zip(keys["config.stages"], self.stages.compiled[1:], strict=True)
            ]
        # `auto` in the spec stands for the size that the data have.
        return keys | {key: self.vocabulary_size for key in keys if key == "config.model.vocabulary_size"}

    def resolved_spec(self) -> ExecutionSpec:
        """Return the spec with mesh, vocabulary size, micro-batch and the config of each hook filled in."""
        spec = super().resolved_spec().model_copy(update={"hooks": self.hooks.entries()})
        # Stages may differ in the micro-batch that fits.
        layout = self.compiled.layout if len(self.stages.plans) == 1 else None
        spec = self.setup_builder.resolve_spec(spec, self.train_setup, layout)
        if self.written_data.tokenise is None:
            return spec
        config = restore_text(spec.config, [text for text, _ in self.texts], self.written_data.tokenise)
        return spec.model_copy(update={"config": config})

    def make_save_contents(self) -> SaveContents:
        """Return what is saved with the state. Raises `DivergedError`, or `DataError` if the data have changed."""
        # Waits for the device, and raises if a loss is not finite: a diverged state must not be saved.
        self.report.window.fetch()
        best, hosts, roll_back = self.spec.checkpoint.keep_best, self.attempt.hosts, self.config.stability.roll_back
        validate_data_unchanged(self.stages.current.builder.dataset, self.attempt)
        hardware = self.train_setup.describe_hardware(hosts.num_processes)
        if len(self.stages.plans) > 1:
            hardware["stage"] = self.stages.current.plan.start
        program = self.describe_program(
            self.stages.current, self.compiled.layout, self.compiled.digest, hosts.num_processes
        )
        return SaveContents(
            metric=None if best is None else self.report.metric(best.metric, self.step),
            roll_back_to=None if roll_back is None else find_earliest_begin(self.state, roll_back),
            topology=hardware
            | {
                "micro_batch_examples": self.compiled.layout.micro_batch_examples,
                "program": self.programs.add(program),
            },
            carry=self.report.carry
            if best is None
            else self.report.add_metric(self.report.carry, best.metric, self.step),
            attachments=self.report.attachments,
            flush=self.report.sync,
            announce=lambda: self.hook_dispatcher.on_checkpoint(self.state, self.step),
        )

    def result(self) -> JsonObject:
        """Return the content of `result.json`. Calls `on_end` of hooks, so the last step must be saved."""
        self.hook_dispatcher.on_end(self.state, self.step)
        return super().result() | self.hook_dispatcher.result()
