"""BaseTrainer: a RestoreableJob that trains a flax model on tokens. Composes state, step, data and metrics.

An experiment says which model (`model`), and may replace the loss (`forward`), the optimizer, the schedule or the
evaluation. Everything is called on every host. `run` is the training loop.

What a step is made of is called on the class, and so cannot read what changes; of a job it sees `cls.config` alone,
since each job has a class of its own that holds it.
"""

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import flax.linen as nn
import jax
import optax

from runner.checkpoint.save import SaveContents
from runner.config import ModelConfig, TrainerConfig
from runner.data import Dataset, Prefetcher, get_batch_fields
from runner.distributed.agreement import Hosts
from runner.evaluation.builtin import BuiltinEvaluators, EvaluationTasks, read_evaluation_tasks
from runner.hook.dispatch import HookedJob
from runner.huggingface.load import identify_adapter_base
from runner.optim.groups import get_unit_rate
from runner.parallel.mesh import LogicalAxisRule, read_device_memory_bytes
from runner.spec import Document, ExecutionSpec, Trajectory
from runner.train import state as other_variables
from runner.train import state as train_state
from runner.train import step as pure
from runner.train.auxiliary import groups_of, make_auxiliary_states, make_step_options
from runner.train.checks import (
    find_known_micro_batch,
    record_of,
    share_ids,
    validate_data_unchanged,
    validate_hardware,
    validate_same_data,
    validate_same_questions,
)
from runner.train.compile import MEMORY_SHARE, CompiledStep
from runner.train.evaluators import Evaluator, Validation, make_ema_evaluators
from runner.train.flops import Flops, Sizing, compute_mfu_per_token_rate, count_forward_flops
from runner.train.lora import get_model_weights, replace_base
from runner.train.loss import cross_entropy_sum, document_arguments, target_weights
from runner.train.optimizer import SPEC
from runner.train.report import Report
from runner.train.setup import TrainSetup, make_setup_builder
from runner.train.state import TrainState


class BaseTrainer(HookedJob):
    """Base of every training job."""

    Config: ClassVar[type[TrainerConfig[Any]]] = TrainerConfig[ModelConfig]
    needs_topology: ClassVar[bool] = True

    train_setup: TrainSetup  # from `setup` on: the job on the devices at hand
    compiled: CompiledStep  # from `prepare` on

    # Logical axis names of the job's own model, and what of a mesh they mean, before the runner's: see `train.mesh`.
    logical_axis_rules: ClassVar[Sequence[LogicalAxisRule]] = ()
    sharded_init = staticmethod(train_state.sharded_init)
    update_variables = staticmethod(other_variables.keep_variables)
    weights = staticmethod(get_model_weights)
    learning_rate_multiplier = staticmethod(get_unit_rate)
    auxiliary_states = classmethod(make_auxiliary_states)

    def __init__(self, spec: ExecutionSpec, document: Document | None = None):
        assert spec.topology is not None, "a trainer needs a spec with a topology"
        super().__init__(spec, document)
        self.topology = spec.topology
        self.__class__ = _bound_to(type(self), self.config)
        base = functools.partial(identify_adapter_base, self.document, spec, self.config, self.store)
        self.setup_builder = make_setup_builder(
            self, lambda: (*self.auxiliary_states(), *self.hooks.auxiliary_states()), base
        )

    # What an experiment says.

    def model(self) -> nn.Module:
        """The flax module; called as `module(x_BxT, deterministic=...)`, it returns logits (B, T, V).

        Where rows hold several documents it is called with `segments=` and `positions=` (B, T) too, and refused if it
        does not take them: a position attends to those of its own segment alone.
        """
        raise NotImplementedError

    @classmethod
    def forward(
        cls, apply_fn: Any, params: Any, batch: pure.Batch, key: jax.Array | None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Loss summed over the real target tokens of a micro-batch, and meta. No key: deterministic. Pure.

        `batch` holds `x`, `y` and `padding_mask` (B, T), what else the data declares (see `runner.train.loss`; what
        is not read is refused), and `example` (B): the place of each example in the step. What is random should depend
        on that and the step's `key`; this default draws by micro-batch. A forward that masks targets itself returns as
        meta `token_count` how many it has counted; meta `statistics` is summed for `update_variables`.
        """
        rngs = None if key is None else {"dropout": jax.random.fold_in(key, batch["example"][0])}
        documents = document_arguments(apply_fn, batch)
        logits_BxTxV = apply_fn({"params": params}, batch["x"], **documents, deterministic=key is None, rngs=rngs)
        loss_sum, _ = cross_entropy_sum(logits_BxTxV, batch["y"], target_weights(batch))
        return loss_sum, {}

    @classmethod
    def optimizer(cls) -> str | optax.GradientTransformation:
        """A library name (`SPEC`, the default: the one in the spec), or an optax object, to which nothing is added.

        Keys that the spec leaves out have the defaults of the name that stands in the spec.
        """
        return SPEC

    @classmethod
    def schedule(cls) -> str | optax.Schedule | None:
        """A library name (`SPEC`, the default: the one in the spec), an optax schedule, or None for a constant."""
        return SPEC

    def evaluator(self) -> Evaluator | list[Evaluator] | None:
        """What evaluates the weights: by default `builtin_evaluators`. Called once, on every host."""
        return [*self.builtin_evaluators]

    def flops_per_token(self, train_setup: TrainSetup) -> Flops:
        """FLOPs of a train step for one token, counted in the traced `forward`; replace it where there is a formula.

        Raises `ValueError` if `forward` calls kernels that cannot be counted.
        """
        return count_forward_flops(
            self.forward, train_setup, get_batch_fields(self.config.data), self.config.data.sequence_length
        )

    def sizing(self, sizes: Mapping[str, int]) -> Sizing:
        """What a token keeps and sends on a mesh of these sizes, devices by axis; by default nothing is known."""
        return Sizing()

    def search_space(self) -> dict[str, tuple[Any, ...]]:
        """What `plan --search` may vary besides mesh and micro-batch: values by dotted key. Nothing by default."""
        return {}

    # The step, the batch and the loop.

    @classmethod
    def train_step(
        cls, state: TrainState, batch: pure.Batch, key: jax.Array, accumulate_steps: int
    ) -> tuple[TrainState, jax.Array, dict[str, jax.Array]]:
        """One optimizer step over (S, B, T): (state, loss, meta). Pure."""
        return pure.train_step(cls.forward, state, batch, key, accumulate_steps, make_step_options(cls))

    @classmethod
    def val_step(cls, state: TrainState, batch: pure.Batch) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """(loss_sum, token_count, last_meta) over (S, B, T). Pure; of `state` it reads no `opt_state`."""
        return pure.val_step(cls.forward, state, batch, groups_of(cls))

    def batch(self, slice: str = "train", step: int | None = None) -> pure.Batch:
        """The global (S, B, T) batch after `step` completed steps, by default this job's: see `get_batch_fields`.

        `slice` is `train` or the name of a validation set. Raises ValueError for any other.
        """
        return self.compiled.layout.batch(self.dataset, slice, self.step if step is None else step)

    def run(self) -> None:
        """Train to the end: exactly `total_steps` steps in all, over any number of attempts."""
        train_step, key, report = self.compiled.executable, self.train_setup.key, self.report
        with report.showing(self.step):
            self.begin_steering()
            with Prefetcher(self.batch("train", step) for step in itertools.count(self.step)) as batches:
                while self.step < self.total_steps:
                    self.state, loss, meta = train_step(self.state, self.attempt.progress.take_batch(batches), key)
                    self.step += 1
                    report.add_step(self.step, loss, meta)
                    if report.is_row_due(self.step):
                        report.add_row(self.get_evaluated_weights(self.state), self.step)
                        self.steer()
                    self.save_or_stop()

    # Parts, each made whole when it is first asked for.

    @property
    def dataset(self) -> Dataset:
        """The tokens that the spec names. Reads the data on this host when first asked for."""
        return self.setup_builder.dataset

    @property
    def vocabulary_size(self) -> int:
        """The spec's, or the data's if that says `auto`."""
        return self.setup_builder.vocabulary_size

    @functools.cached_property
    def report(self) -> Report:
        """The rows of this attempt."""
        evaluators = self.builtin_evaluators.check(self.evaluator(), self.document)
        return Report(
            self.attempt,
            self.resolved_spec(),
            self.setup_builder.config_in_steps,
            [*evaluators, *make_ema_evaluators(self.config, self.validation)],
            compute_mfu_per_token_rate(self.flops_per_token, self.train_setup),
            lambda step: self.dataset.compute_metrics(step * self.config.train.global_batch_examples),
            lambda: self.builtin_evaluators.start_compiling(evaluators),
        )

    @property
    def validation(self) -> Validation:
        """The loss on each validation set: on `eval.batches` batches, or fewer if they hold all of it."""
        return self.builtin_evaluators.validation

    @functools.cached_property
    def evaluation_tasks(self) -> EvaluationTasks:
        """What `config.eval` asks for besides the loss. Reads the files that it names on this host."""
        return read_evaluation_tasks(self.document, self.config, self.vocabulary_size)

    @functools.cached_property
    def builtin_evaluators(self) -> BuiltinEvaluators:
        """Its `evaluators` are the loss on the validation sets, and what `config.eval` asks for besides."""
        return BuiltinEvaluators(
            self.setup_builder,
            self.train_setup,
            self.compiled.layout,
            self.evaluation_tasks,
            self.batch,
            self.attempt.stop,
        )

    # Set-up: the design on the devices at hand, then the compiler.

    def setup(self, hosts: Hosts) -> None:
        """Check the devices, the mesh, the batch and the data against the spec."""
        with self.document.errors_at("topology.accelerator"):
            validate_hardware(self.spec, self.topology, self.config)
        self.train_setup = self.setup_builder.build(jax.devices(), lambda data: share_ids(data, self.store, hosts))
        self.dataset.validate_vocabulary(self.vocabulary_size)
        validate_same_data(self.dataset, hosts)
        validate_same_questions(self.evaluation_tasks.digest, hosts)
        hosts.run_on_main(lambda: self.setup_builder.base)  # what is wrong with it the main host finds first
        self.setup_builder.check(self.train_setup, find_known_micro_batch(self.train_setup, self.store, hosts))

    def prepare(self) -> None:
        """Choose the micro-batch by the compiled train step's own memory figures."""
        hosts = self.attempt.hosts
        limit_bytes = hosts.agree(int(read_device_memory_bytes() * MEMORY_SHARE))
        known = find_known_micro_batch(
            self.train_setup, self.store, hosts
        )  # again: until the claim another might commit
        self.compiled = self.setup_builder.compile(self.train_setup, limit_bytes, known)
        examples = self.compiled.layout.micro_batch_examples
        given = {"compiler_options": dict(self.compiled.options)} if self.compiled.options else {}
        self.attempt.record("compile", None, program=self.compiled.digest, micro_batch_examples=examples, **given)

    # What the base asks for.

    def abstract_state(self) -> TrainState:
        """Shape, dtype and sharding of every leaf."""
        return self.train_setup.abstract_state

    def init_state(self) -> TrainState:
        """The state at step 0, born sharded."""
        return self.train_setup.init_state()

    def replace_weights(self, state: TrainState, weights: Any) -> TrainState:
        """The state at step 0, begun with other weights, and with it averages and what rides along."""
        return self.train_setup.restart_averages(replace_base(state, weights))

    @property
    def unread_keys(self) -> frozenset[str]:
        """Those of other optimizers and schedules than the chosen ones."""
        return frozenset(f"config.{key}" for key in self.setup_builder.optimizer_choice.find_unread_keys())

    def identity(self) -> Trajectory:
        """The trajectory's keys, with the size of the vocabulary, and the data set's fingerprint."""
        known = super().identity() | {"config.data": self.dataset.fingerprint} | self.setup_builder.base
        return known | {key: self.vocabulary_size for key in known if key == "config.model.vocabulary_size"}

    def resolved_spec(self) -> ExecutionSpec:
        """The spec with mesh, vocabulary and micro-batch filled in."""
        return self.setup_builder.resolve_spec(super().resolved_spec(), self.train_setup, self.compiled.layout)

    def make_save_contents(self) -> SaveContents:
        """The rows, and the hardware with the micro-batch chosen for it. Raises `DivergedError`, `DataError`."""
        self.report.window.fetch()
        best, hosts = self.spec.checkpoint.keep_best, self.attempt.hosts
        validate_data_unchanged(self.dataset, self.attempt)
        return SaveContents(
            None if best is None else self.report.metric(best.metric, self.step),
            record_of(self.train_setup, self.compiled.layout, hosts),
            self.report.window.carry,
            self.report.attachments,
            self.report.sync,
            lambda: self.hook_dispatcher.checkpoint(self.state, self.step),
        )


def _bound_to(job_class: type[BaseTrainer], config: TrainerConfig[Any]) -> type[BaseTrainer]:
    """A subclass that is the same, but for `config`: the class of one job."""
    names = {"__module__": job_class.__module__, "__qualname__": job_class.__qualname__, "__doc__": job_class.__doc__}
    return type(job_class.__name__, (job_class,), {"config": config, **names})
