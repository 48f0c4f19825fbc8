"""BaseTrainer: a RestoreableJob that trains a Flax model. `run` is the training loop.

The data are tokens, or examples that are dicts of arrays, such as images and labels (`config.data`). An experiment
overrides the statements of `runner.train_recipe`. All methods are called on every host.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from runner.attempts.fence import RunIdentity
from runner.attempts.layout import read_owner, read_result
from runner.checkpoint.inspect import read_document
from runner.checkpoint.save import SaveContents
from runner.config import ModelConfig
from runner.console import say
from runner.data import Dataset
from runner.distributed.agreement import Hosts
from runner.distributed.clock import Clock
from runner.distributed.preemption import StopNotice
from runner.errors import InvalidError
from runner.evaluation.builtin import BuiltinEvaluators
from runner.huggingface.export import ExportOptions, export_into, has_export, publish_directory
from runner.huggingface.load import complete_model
from runner.session import Session
from runner.spec import Document, ExecutionSpec, Trajectory, validate_spec
from runner.storage import JsonObject, open_store
from runner.train.compile import CompiledStep
from runner.train.evaluators import Validation
from runner.train.feature import RewindError
from runner.train.setup import TrainSetup
from runner.train.state import TrainState
from runner.train.step import Batch
from runner.train.weights import replace_base
from runner.train_recipe import TrainRecipe


class BaseTrainer(TrainRecipe):
    """Base of every training job.

    Attributes:
        session: training of this attempt.
    """

    session: Session

    def __init__(self, spec: ExecutionSpec, document: Document | None = None):
        super().__init__(spec, document)
        self.session = Session(self, makes_own_batches=type(self).batch is not BaseTrainer.batch)

    # The training loop, and what an experiment may call.

    def run(self) -> None:
        """Train to the end: exactly `total_steps` steps in all, over any number of attempts."""
        session, key = self.session, self.train_setup.key
        with session.open() as batches:
            while self.step < self.total_steps:
                session.enter_stage(self.step)
                # The state is donated to the step. The host runs ahead of the device, except at a replayed step. After
                # `load` has set the step back, `seek` drops the batches that were read ahead.
                batch, has_target = self.attempt.progress.take_batch(batches.seek(self.step))
                self.state, loss, meta = session.make_step(self.state, batch, has_target, key)
                self.step += 1
                session.add_step(self.step, loss, meta)
                # Raised where rows and saves fetch losses; nothing else reads a loss on the host.
                try:
                    session.write_row()
                    self.save_or_stop()
                except RewindError as cause:
                    session.go_back(cause)

    def batch(self, slice: str = "train", step: int | None = None) -> Batch:
        """Return the global (S, B, ...) batch after `step` completed steps, by default those of this job.

        `slice` is `train` or the name of a validation set. Raises `ValueError` for any other, and `PhaseError` before
        the job is compiled.
        """
        return self.session.load_batch(slice, self.step if step is None else step)

    @property
    def compiled(self) -> CompiledStep:
        """Compiled train step of the current stage. Available after `prepare`."""
        return self.session.get_program("compiled").compiled

    @property
    def builtin_evaluators(self) -> BuiltinEvaluators:
        """Evaluators of the loss on the validation sets and of the tasks of `config.eval`. Iterate to get them.

        These are the evaluators of the current stage. Available after `prepare`.
        """
        return self.session.builtin_evaluators

    @property
    def validation(self) -> Validation:
        """Evaluator of the loss on each validation set, on `eval.batches` batches, or fewer if the set has fewer."""
        return self.session.validation

    # The data, and the state on the devices of this process.

    @property
    def dataset(self) -> Dataset:
        """Data set of the spec. Reads the data on this host on first access."""
        return self.setup_builder.dataset

    @property
    def vocabulary_size(self) -> int:
        """Vocabulary size of the spec, or that of the data if the spec says `auto`; 0 if the data are arrays."""
        return self.setup_builder.vocabulary_size

    @property
    def train_setup(self) -> TrainSetup:
        """Abstract train state, optimizer and shardings on the devices of this job."""
        return self.programs[0].train_setup

    def abstract_state(self) -> TrainState:
        """Return shape, dtype and sharding of every leaf."""
        return self.train_setup.abstract_state

    def init_state(self) -> TrainState:
        """Return the state at step 0, each leaf created in its sharding."""
        return self.train_setup.init_state()

    def replace_weights(self, state: TrainState, weights: Any) -> TrainState:
        """Return the state at step 0 with other weights; averages and auxiliary states are initialised from them."""
        return self.train_setup.restart_averages(replace_base(state, weights))

    # The end, and the phases before the first step.

    @classmethod
    def complete_document(cls, document: Document, spec: ExecutionSpec) -> Document:
        """Return the document with the model of the published weights that the spec starts from, if it has no own."""
        model_class: type[ModelConfig] = cls.Config.model_fields["model"].annotation  # type: ignore[assignment]
        return complete_model(document, spec, model_class, cls.read_published_model)

    @property
    def total_steps(self) -> int:
        """Last step: that of the config, or the one at which a hook has ended the run.

        Reads the data on this host if the total is in epochs.
        """
        stop_step = self.session.stop_step
        return self.programs.config_in_steps.total_steps if stop_step is None else stop_step

    def find_epoch_problem(self) -> str | None:
        """Return why the data have no epochs: there are several sources or stages. None if they have."""
        return self.config.find_epoch_problem()

    @property
    def steps_per_epoch(self) -> Fraction:
        """Steps in which the training examples of the single source are read once. Reads the data on this host."""
        return Fraction(self.dataset.num_train_examples, self.config.train.global_batch_examples)

    @property
    def done(self) -> bool:
        """True if the job has reached its end, or was ended by a hook that is in the spec with the same config."""
        return super().done or self.hooks.has_stopped(read_result(self.store))

    def run_earlier_jobs(self, hosts: Hosts, stop: StopNotice, clock: Clock) -> None:
        """Tokenise the texts of `config.data.tokenise` that are not tokenised yet."""
        if self.texts:
            self.texts.run(self, self.programs, hosts, stop, clock)

    def setup(self, hosts: Hosts) -> None:
        """Check devices, mesh, batch and data against the spec, and build the train setup."""
        self.session.setup(hosts)

    def prepare(self) -> None:
        """Compile the train step with the largest micro-batch that fits, by the compiler's own memory figures."""
        self.session.prepare()

    def make_save_contents(self) -> SaveContents:
        """Return what is saved with the state. Raises `DivergedError`."""
        return self.session.make_save_contents()

    def result(self) -> JsonObject:
        """Return the content of `result.json`. Calls `on_end` of hooks, so the last step must be saved."""
        self.session.hook_dispatcher.on_end(self.state, self.step)
        return super().result() | self.session.hook_dispatcher.result()

    def validate_export(self) -> None:
        """Raise `SpecError` if the model has no layout of Hugging Face, or something else is where the export goes."""
        if self.config.export is None:
            return
        with self.document.errors_at("config.export"):
            family = self.family()
            if family is None:
                raise InvalidError(
                    f"{self.spec.job} does not map its parameters to Hugging Face's names; implement `family` of the "
                    "job, or remove the key"
                )
            # Both refuse models that the files cannot describe.
            family.config()
            family.pieces()
            self._find_export(self.total_steps)

    def export(self) -> None:
        """Export the weights of the finished run to `config.export`, unless the export is complete."""
        result, config = read_result(self.store), self.config.export
        if config is None or result is None:
            return
        with self.document.errors_at("config.export"):
            mark = self._find_export(result.step)
            if mark is None:
                return
            # The spec that the run has recorded has the size of its vocabulary, which else only the data tell.
            document = dataclasses.replace(self.given_document, data=read_document(self.store).data)
            recorded = type(self)(validate_spec(document), document).at_step(result.step)
            family = recorded.family()
            assert family is not None, "checked before the first step"
            options = ExportOptions(config.dtype, weights=config.weights, base=recorded.spec.checkpoint.initial_weights)
            with publish_directory(config.directory, mark) as directory:
                export_into(directory, self.store.url, result.step, family, recorded.config.data, options)
        say(f"exported step {result.step} to {config.directory}")

    def _find_export(self, step: int) -> JsonObject | None:
        """Return the mark of an export of `step` that is to be made; None if it is complete. Raises `InvalidError`."""
        config, owner = self.config.export, read_owner(self.store)
        assert config is not None, "an export is asked for"
        if f"{open_store(config.directory).url}/".startswith(f"{self.store.url}/"):
            raise InvalidError(f"{config.directory} is in the directory of the run; name another one")
        run = "" if owner is None else owner.id
        mark = {"run": run, "step": step, "dtype": config.dtype, "weights": config.weights}
        return None if has_export(config.directory, mark) else mark

    # Identity.

    @property
    def unread_keys(self) -> frozenset[str]:
        """Keys that only other optimizers and schedules than the chosen ones read, and keys that follow from others."""
        unread = {f"config.{key}" for key in self.setup_builder.optimizer_choice.find_unread_keys()}
        # Those of features that are off, too: an earlier attempt may have had them.
        return frozenset(unread.union(*(feature.derived_keys for feature in self.feature_classes)))

    @property
    def former_values(self) -> Mapping[str, Sequence[str]]:
        """Former paths of the classes of the job and of its hooks."""
        return {**super().former_values, **self.hooks.former_values}

    def make_run_identity(self, identity: Trajectory) -> RunIdentity:
        """Return the identity to compare with a saved trajectory, which may differ at later steps."""
        return self.programs.make_run_identity(super().make_run_identity(identity), identity)

    def identity(self) -> Trajectory:
        """Return the keys that identify the trajectory, with those of data, vocabulary, hooks and frozen weights."""
        keys = super().identity() | self.hooks.identity()
        keys |= {"config.data": self.dataset.fingerprint} | self.setup_builder.base_identity
        for feature in self.features:
            keys |= feature.identity()
        if self.programs.has_stages:
            # The data of a stage are compared by their content too.
            keys["config.stages"] = self.programs.identify_stages(keys["config.stages"])
        if "config.model.vocabulary_size" in keys:
            # `auto` in the spec stands for the size that the data have.
            keys["config.model.vocabulary_size"] = self.vocabulary_size
        return keys

    def list_spec_comments(self) -> list[str]:
        """Return a line for the optimizer and for the schedule, if the code of the job chooses it."""
        return self.setup_builder.optimizer_choice.describe_code(type(self))

    def resolved_spec(self) -> ExecutionSpec:
        """Return the spec with mesh, vocabulary size, micro-batch and the config of each hook filled in."""
        spec = super().resolved_spec().model_copy(update={"hooks": self.hooks.entries()})
        # Stages may differ in the micro-batch that fits.
        layout = None if self.programs.has_stages else self.programs.current.layout
        spec = self.setup_builder.resolve_spec(spec, self.train_setup, layout)
        return spec.model_copy(update={"config": self.texts.restore(spec.config)})
