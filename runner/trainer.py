"""BaseTrainer: a RestoreableJob that trains a flax model on tokens. Composes state, step, data and metrics.

An experiment says which model (`model`), and may replace the loss (`forward`), the optimizer, the schedule or the
evaluation. Everything is called on every host. `run` is the training loop.

What a step is made of is called on the class, and so cannot read what changes; of a job it sees `cls.config` alone,
since each job has a class of its own that holds it.
"""

import dataclasses
import functools
import itertools
from typing import Any, ClassVar

import flax.linen as nn
import jax
import optax

from runner.checkpoint.save import Payload
from runner.config import ModelConfig, TrainerConfig
from runner.data import Dataset, Prefetcher, batch_fields
from runner.hosts.agreement import Hosts
from runner.job import RestoreableJob
from runner.spec import Document, ExecutionSpec, InitFrom, Trajectory
from runner.train import state as train_state
from runner.train import step as pure
from runner.train import variables as other_variables
from runner.train.adapter import model_state, model_weights, with_base
from runner.train.blueprint import Blueprint
from runner.train.compilation import MEMORY_SHARE, CompiledStep
from runner.train.design import Design
from runner.train.ema_validation import ema_evaluators, with_averages
from runner.train.fields import document_arguments, target_weights
from runner.train.flops import Flops, Sizing, flops_of_forward, mfu_of_a_token_per_second
from runner.train.hint import refuse_other_hardware
from runner.train.loss import cross_entropy_sum
from runner.train.mesh import device_memory_bytes
from runner.train.micro_batch import known_micro_batch, record_of
from runner.train.optimizer import SPEC
from runner.train.report import Evaluator, Report
from runner.train.riding import options_of, riders_of
from runner.train.same_data import refuse_changed_data, refuse_different_data, share_ids
from runner.train.validation import Validation, validation_sets
from runner.train.variables import TrainState
from runner.weights.base import name_base
from runner.weights.source import load_source


class BaseTrainer(RestoreableJob):
    """Base of every training job."""

    Config: ClassVar[type[TrainerConfig[Any]]] = TrainerConfig[ModelConfig]
    needs_topology: ClassVar[bool] = True

    blueprint: Blueprint  # from `setup` on: the job on the devices at hand
    compiled: CompiledStep  # from `prepare` on

    sharded_init = staticmethod(train_state.sharded_init)
    update_variables = staticmethod(other_variables.unchanged)
    riders = classmethod(riders_of)

    def __init__(self, spec: ExecutionSpec, document: Document | None = None):
        assert spec.topology is not None, "a trainer needs a spec with a topology"
        super().__init__(spec, document)
        self.topology = spec.topology
        self.__class__ = _bound_to(type(self), self.config)
        self.design = Design(
            document=self.document,
            config=self.config,
            topology=self.topology,
            seed=spec.seed,
            model=self.model,
            optimizer=self.optimizer,
            schedule=self.schedule,
            sharded_init=self.sharded_init,
            train_step=self.train_step,
            val_step=self.val_step,
            riders=self.riders,
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

        `batch` holds `x`, `y` and `padding_mask` (B, T), what else the data declares (see `runner.train.fields`; what
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
        """A library name (`SPEC`, the default: the one in the spec), or an optax object, to which nothing is added."""
        return SPEC

    @classmethod
    def schedule(cls) -> str | optax.Schedule | None:
        """A library name (`SPEC`, the default: the one in the spec), an optax schedule, or None for a constant."""
        return SPEC

    def evaluator(self) -> Evaluator | list[Evaluator] | None:
        """What evaluates the weights: by default the loss on the validation sets, if there are any. Called once."""
        return self.validation if self.dataset.validation else None

    def flops_per_token(self, blueprint: Blueprint) -> Flops:
        """FLOPs of a train step for one token, counted in the traced `forward`; replace it where there is a formula.

        Raises `ValueError` if `forward` calls kernels that cannot be counted.
        """
        return flops_of_forward(
            self.forward, blueprint, batch_fields(self.config.data), self.config.data.sequence_length
        )

    def sizing(self, tensor: int) -> Sizing:
        """What a token keeps and sends where single matrices lie on `tensor` devices; by default nothing is known."""
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
        return pure.train_step(cls.forward, state, batch, key, accumulate_steps, *options_of(cls))

    @classmethod
    def val_step(cls, state: TrainState, batch: pure.Batch) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """(loss_sum, token_count, last_meta) over (S, B, T). Pure; of `state` it reads no `opt_state`."""
        return pure.val_step(cls.forward, state, batch)

    def batch(self, slice: str = "train", step: int | None = None) -> pure.Batch:
        """The global (S, B, T) batch after `step` completed steps, by default this job's: see `batch_fields`.

        `slice` is `train` or the name of a validation set. Raises ValueError for any other.
        """
        return self.compiled.layout.batch(self.dataset, slice, self.step if step is None else step)

    def run(self) -> None:
        """Train to the end: exactly `total_steps` steps in all, over any number of attempts."""
        train_step, key, report = self.compiled.executable, self.blueprint.key, self.report
        with report.showing(self.step):
            if not report.complete_row(with_averages(self.weights, self.state), self.step):
                self.save_or_stop()
            with Prefetcher(self.batch("train", step) for step in itertools.count(self.step)) as batches:
                while self.step < self.total_steps:
                    self.state, loss, meta = train_step(self.state, self.attempt.progress.take(batches), key)
                    self.step += 1
                    report.add_step(self.step, loss, meta)
                    if report.is_row_due(self.step):
                        report.add_row(with_averages(self.weights, self.state), self.step)
                    self.save_or_stop()

    # Parts, each made whole when it is first asked for.

    @property
    def dataset(self) -> Dataset:
        """The tokens that the spec names. Reads the data on this host when first asked for."""
        return self.design.dataset

    @property
    def vocabulary_size(self) -> int:
        """The spec's, or the data's if that says `auto`."""
        return self.design.vocabulary_size

    @functools.cached_property
    def report(self) -> Report:
        """The rows of this attempt."""
        found = self.evaluator()
        evaluators = [] if found is None else found if isinstance(found, list) else [found]
        compile_validation = self.validation.begin_to_compile if self.validation in evaluators else lambda: None
        return Report(
            self.attempt,
            self.resolved_spec(),
            self.config,
            [*evaluators, *ema_evaluators(self.config, self.validation)],
            mfu_of_a_token_per_second(self.flops_per_token, self.blueprint),
            lambda step: self.dataset.figures(step * self.config.train.global_batch_examples),
            compile_validation,
        )

    @functools.cached_property
    def validation(self) -> Validation:
        """The loss on each validation set: on `eval.batches` batches, or fewer if they hold all of it."""
        return Validation(
            model_state(self.blueprint.abstract_state),
            lambda abstract: self.blueprint.compile_val(self.val_step, abstract, self.compiled.layout),
            validation_sets(self.dataset, self.config, self.batch),
            self.attempt.stop.poll,
        )

    # Set-up: the design on the devices at hand, then the compiler.

    def setup(self, hosts: Hosts) -> None:
        """Check the devices, the mesh, the batch and the data against the spec."""
        with self.document.blaming("topology.accelerator"):
            refuse_other_hardware(self.spec, self.topology, self.config)
        self.blueprint = self.design.draw(jax.devices(), lambda data: share_ids(data, self.store, hosts))
        self.dataset.refuse_vocabulary(self.vocabulary_size)
        refuse_different_data(self.dataset, hosts)
        self.blueprint = _beside_base(self, hosts)
        self.design.trace(self.blueprint, known_micro_batch(self.blueprint, self.store, hosts))

    def prepare(self) -> None:
        """Choose the micro-batch by the compiled train step's own memory figures."""
        hosts = self.attempt.hosts
        limit_bytes = hosts.agree(int(device_memory_bytes() * MEMORY_SHARE))
        known = known_micro_batch(self.blueprint, self.store, hosts)  # again: until the claim another might commit
        self.compiled = self.design.compile(self.blueprint, limit_bytes, known)
        examples = self.compiled.layout.micro_batch_examples
        self.attempt.record("compile", None, program=self.compiled.digest, micro_batch_examples=examples)

    # What the base asks for.

    def abstract_state(self) -> TrainState:
        """Shape, dtype and sharding of every leaf."""
        return self.blueprint.abstract_state

    def init_state(self) -> TrainState:
        """The state at step 0, born sharded."""
        return self.blueprint.init_state()

    def weights(self, state: TrainState) -> Any:
        """The model's parameters, merged where an adapter is trained, and its other variables where it has any."""
        return model_weights(state)

    def first_state(self) -> TrainState:
        """The state at step 0; what rides along begins from the weights that the spec names, if it names some."""
        state, rule = self.init_state(), self.spec.checkpoint.weights
        return state if rule is None else _begun_with(self, state, rule)

    @property
    def unread_keys(self) -> frozenset[str]:
        """Those of other optimizers and schedules than the chosen ones."""
        return frozenset(f"config.{key}" for key in self.design.recipe.unread())

    def identity(self) -> Trajectory:
        """The trajectory's keys, with the size of the vocabulary, and the data set's fingerprint."""
        known = super().identity() | {"config.data": self.dataset.fingerprint} | self.blueprint.base
        return known | {key: self.vocabulary_size for key in known if key == "config.model.vocabulary_size"}

    def resolved_spec(self) -> ExecutionSpec:
        """The spec with mesh, vocabulary and micro-batch filled in."""
        return self.design.resolved(super().resolved_spec(), self.blueprint, self.compiled.layout)

    def payload(self) -> Payload:
        """The rows, and the hardware with the micro-batch chosen for it. Raises `DivergedError`, `DataError`."""
        self.report.window.fetch()
        best, hosts = self.spec.checkpoint.keep_best, self.attempt.hosts
        refuse_changed_data(self.dataset, self.attempt)
        return Payload(
            None if best is None else self.report.metric(best.metric, self.step),
            record_of(self.blueprint, self.compiled.layout, hosts),
            self.report.attachments,
            self.report.sync,
        )


def _beside_base(job: BaseTrainer, hosts: Hosts) -> Blueprint:
    """The job's blueprint, which knows the base of its adapter, if it has one."""
    base = name_base(job.document, job.spec, job.config, job.store, hosts)
    return dataclasses.replace(job.blueprint, base=base)


def _begun_with(job: BaseTrainer, state: TrainState, rule: InitFrom) -> TrainState:
    """The state at step 0, begun with other weights, and all that rides along begun from these."""
    weights = load_source(job.document, rule, job.family, job.weights(state), job.checkpointer, job.attempt)
    return job.blueprint.begin_riders(with_base(state, weights))


def _bound_to(job_class: type[BaseTrainer], config: TrainerConfig[Any]) -> type[BaseTrainer]:
    """A subclass that is the same, but for `config`: the class of one job."""
    names = {"__module__": job_class.__module__, "__qualname__": job_class.__qualname__, "__doc__": job_class.__doc__}
    return type(job_class.__name__, (job_class,), {"config": config, **names})
