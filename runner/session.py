"""Session: the training of one attempt: batches, rows, evaluations, hooks, and the contents of saves.

`runner.lifecycle` calls the methods of `JobSession` around the training loop, and the loop (`BaseTrainer.run`) calls
the others. All are called on every host, unless their docstring says process 0 only.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax

from runner.checkpoint.manifest import Manifest
from runner.checkpoint.policy import compute_epoch_interval, is_due
from runner.checkpoint.save import SaveContents
from runner.console import say, warn
from runner.data import TRAIN, SeekablePrefetcher
from runner.data.array_examples import describe_slowest_read
from runner.distributed.agreement import Hosts
from runner.distributed.clock import COMPILE
from runner.errors import DivergedError, PhaseError, ResumeError
from runner.evaluation.builtin import BuiltinEvaluators, EvaluationTasks, list_returned, read_evaluation_tasks
from runner.hook.dispatch import HookDispatcher
from runner.huggingface.assets import record_assets
from runner.metrics.meta import Meta
from runner.metrics.rows import Row
from runner.metrics.window import LAST_STEP
from runner.process import GarbageCollection
from runner.recipe import JobSession
from runner.spec import InitFromConfig
from runner.storage import JsonObject, Store
from runner.train.checks import (
    find_known_micro_batch,
    find_unmeasured_saves,
    validate_loss_is_sum,
    validate_same_on_all_hosts,
)
from runner.train.evaluators import Evaluator, Validation
from runner.train.feature import RewindError
from runner.train.flops import compute_mfu_per_token_rate
from runner.train.program import Program
from runner.train.program_history import ProgramGuard
from runner.train.report import END, Report
from runner.train.state import TrainState
from runner.train.step import Batch
from runner.train.weights import add_averages
from runner.train_recipe import TrainRecipe

# Steps between two collections of garbage where rows are farther apart.
_COLLECT_EVERY_STEPS = 100


class Session(JobSession):
    """Training of one attempt.

    Attributes:
        job: the job, whose state the session replaces.
        guard: comparison of its programs with those of earlier attempts.
        garbage_collection: Python's garbage collector during the steps.
    """

    def __init__(self, job: TrainRecipe, makes_own_batches: bool):
        """Prepare the session of a job that is constructed, and may override `batch`; reads nothing."""
        self._makes_own_batches = makes_own_batches
        self.job, self.programs = job, job.programs
        self.guard = ProgramGuard(job.spec, job.document, job.programs, job.hooks.identity())
        self._is_compiled = False
        self._hook_dispatcher: HookDispatcher | None = None
        self.garbage_collection = GarbageCollection()
        # Of the current stage.
        self._builtin_evaluators: BuiltinEvaluators | None = None
        self._chosen_evaluators: list[Evaluator] | None = None

    # Before the first step.

    def setup(self, hosts: Hosts) -> None:
        """Check devices, mesh, batch and data against the spec, and build the train setup."""
        job, config = self.job, self.job.config
        self.programs.validate_devices(job.spec, hosts)
        if self._makes_own_batches:
            for key in ("global_batch_examples", "micro_batch_examples"):
                if getattr(config.eval, key) is not None:
                    reason = "batch() of the job makes the batches, so nothing reads it; leave it out"
                    raise job.document.error(f"config.eval.{key}", reason)
        fork = job.spec.checkpoint.fork_from
        self.programs.build(hosts, job.store, fork)
        missed = find_unmeasured_saves(job.spec, config, self.programs.config_in_steps.total_steps)
        if missed is not None and hosts.is_main:
            warn(job.document.format_problem(("checkpoint", "keep_best"), missed))
        matmul = config.precision.matmul
        if matmul != "compute" and jax.default_backend() == "cpu" and hosts.is_main:
            say(f"config.precision.matmul={matmul}: emulated on this CPU, with the same rounding and no gain in time")
        if self.evaluation_tasks.digest:
            validate_same_on_all_hosts(self.evaluation_tasks.digest, "questions", hosts)
        # Process 0 reads the frozen weights of an adapter first, so that an error in them is reported once.
        hosts.run_on_main(lambda: job.setup_builder.base_identity)
        program, known = self.programs.current, self._find_known_micro_batch(hosts)
        program.builder.validate_steps(program.train_setup, known)
        self.guard.validate_start(job.store, known, hosts)

    def _find_known_micro_batch(self, hosts: Hosts) -> int | None:
        program, fork = self.programs.current, self.job.spec.checkpoint.fork_from
        return find_known_micro_batch(self.programs[0].train_setup, self.job.store, hosts, fork, program.plan.start)

    def validate_newest(self, newest: Manifest) -> None:
        """Raise `ResumeError` if a feature cannot go on from the newest checkpoint, or the run cannot end there.

        The row of the last step is made from the results that are saved with it. Process 0 only.
        """
        job = self.job
        for feature in job.features:
            feature.validate_newest(job, newest)
        carry = newest.carry or {}
        if newest.step == job.total_steps and carry and not {END, LAST_STEP} & {*carry}:
            raise ResumeError(
                f"{job.store.url}: the spec ends the run at step {newest.step}, whose checkpoint an earlier version "
                "has saved without the metrics of its row; end the run at a later step"
            )

    def describe_wait(self) -> str:
        """Return the example of the data that is being read for longest."""
        return describe_slowest_read()

    def prepare(self) -> None:
        """Compile the train step with the largest micro-batch that fits, by the compiler's own memory figures."""
        attempt, program = self.job.attempt, self.programs.current
        # Read again: until this attempt claimed the directory, another one could still commit its choice.
        compiled = self.programs.prepare(attempt, self._find_known_micro_batch(attempt.hosts))
        self._is_compiled = True
        given: JsonObject = {"compiler_options": dict(compiled.options)} if compiled.options else {}
        # Commands that only read files, such as `report`, get it from here.
        if not self.is_language_model:
            given["language_model"] = False
        record = self.guard.describe_compiled(program, attempt.hosts.num_processes)
        attempt.record(
            "compile",
            None,
            program=record.digest,
            facts=record.facts,
            micro_batch_examples=program.layout.micro_batch_examples,
            **given,
        )

    def before_restore(self) -> None:
        """Complete what a killed attempt has begun, such as a roll-back."""
        for feature in self.job.features:
            feature.before_restore(self.job)

    def continue_program(self, manifest: Manifest, is_start: bool) -> None:
        """Compare the program with the one that has made a restored checkpoint, and report or refuse a change."""
        self.guard.continue_from(manifest, self.job.attempt, is_start)

    def on_restored(self) -> None:
        """Adapt the features to the state, which was restored or initialised."""
        for feature in self.job.features:
            feature.on_restored(self.job)

    def find_problem(self, attachments: dict[str, bytes]) -> str | None:
        """Return the reason why the job cannot continue from a fast-tier state with these attachments; None if it can.

        Process 0 only.
        """
        return self.report.find_problem(attachments)

    def resume(self, step: int, attachments: dict[str, bytes], carry: JsonObject | None) -> None:
        """Continue the rows at `step`; see `Report.resume`."""
        self.report.resume(step, attachments, carry)

    def adopt_parent(self, parent: Store) -> None:
        """Record the assets of exports: those of the parent, with the tokenizer of this run's data. Process 0 only."""
        self._record_assets(InitFromConfig(path=parent.url))

    def after_restore(self) -> None:
        """Enter the stage that has made the newest step. A run that begins records the assets of its exports."""
        job = self.job
        self.enter_stage(max(job.step - 1, 0))
        if job.step == 0 and not job.attempt.lineage:
            if job.attempt.hosts.is_main:
                self._record_assets(job.spec.checkpoint.initial_weights)
            program = self.programs.current
            # A job that makes its own batches may not read those of the data set.
            if not self._makes_own_batches and not program.layout.is_ordered:
                validate_loss_is_sum(job, program.train_setup, job.state, program.builder.dataset)

    def _record_assets(self, weights: InitFromConfig | None) -> None:
        if self.job.family() is not None:
            record_assets(self.job.store, self.job.config.data, weights)

    # Steps.

    @contextlib.contextmanager
    def open(self) -> Iterator["SeekablePrefetcher[tuple[Batch, bool]]"]:
        """Display rows and read batches ahead inside the context. Calls `on_start` of hooks first.

        An evaluation and hook calls of the present step that a stop has interrupted are completed.
        """
        with self.report.display(self.job.step), self.garbage_collection:
            self._start()
            with contextlib.closing(SeekablePrefetcher(self.load_step)) as batches:
                yield batches

    def _start(self) -> None:
        job = self.job
        job.state = self.hook_dispatcher.start(job.state, job.step)
        # Evaluate first: hooks get the complete row.
        if not self.report.complete_row(self.get_evaluated_weights(job.state), job.step, self._call_hooks):
            job.save_or_stop()
        # The calls that the attempt before has not made.
        job.state = self.hook_dispatcher.on_newest_row(job.state, job.step)
        self._request_hook_save()
        best = job.spec.checkpoint.keep_best
        if best is not None and job.attempt.hosts.is_main:
            # The step may have been saved before it was evaluated.
            metric = self.report.metric(best.metric, job.step)
            if metric is not None:
                job.checkpointer.add_metric(job.step, metric, is_end=self.report.is_metric_of_end(best.metric))

    def load_batch(self, slice: str, step: int) -> Batch:
        """Return the global (S, B, ...) batch of a slice after `step` completed steps, see `BaseTrainer.batch`."""
        self.validate_compiled("batch")
        if slice == TRAIN:
            return self.programs.load_batch(step)
        program = self.programs.current
        return program.layout.batch(program.builder.dataset, slice, step)

    def load_step(self, step: int) -> tuple[Batch, bool]:
        """Return the batch after `step` completed steps, and False if it is known to have no target.

        Called on the thread of the prefetcher.
        """
        batch = self.job.batch(TRAIN, step)
        # If the job overrides `batch`, each of several hosts sees only its own part.
        is_known = not self._makes_own_batches or self.job.attempt.hosts.num_processes == 1
        return batch, not is_known or self.programs.has_targets(batch, step)

    def make_step(
        self, state: TrainState, batch: Batch, has_target: bool, key: jax.Array
    ) -> tuple[TrainState, jax.Array, Meta]:
        """Make one optimizer step; a batch without a target updates nothing. Waits for the device only in a replay.

        Raises `DeviceError` if the replay of the step gives other gradients.
        """
        # Between steps the state holds the (static) functions of stage 0, like a state that is saved and restored.
        program = self.programs.current
        state = program.adopt(state) if program.plan.number else state
        if not has_target:
            state, loss, meta = program.skip_step(state)
        else:
            made = (each.execute(program, self.job.step + 1, state, batch, key) for each in self.job.features)
            results = next((each for each in made if each is not None), None)
            state, loss, meta = program.executable(state, batch, key) if results is None else results
        return self.programs[0].adopt(state) if program.plan.number else state, loss, meta

    def add_step(self, step: int, loss: jax.Array, meta: Meta) -> None:
        """Add the results of a step to the next row; they stay on the device.

        After the first step it also begins to compile the program of the next stage.
        """
        self.programs.compile_next()
        self.report.add_step(step, loss, meta)

    def write_row(self) -> None:
        """Write the row of this step if it is due, with an evaluation if that is, and call hooks with it.

        Waits for the device. Raises `RewindError` or `DivergedError` for the losses since the last row.
        """
        job = self.job
        if not self.report.is_row_due(job.step):
            if is_due(job.step, _COLLECT_EVERY_STEPS):
                self.garbage_collection.collect()
            return

        # Evaluators and hooks may run for long and leave as much garbage as they like.
        with self.garbage_collection.allow():
            weights = self.get_evaluated_weights(job.state)
            self.report.add_row(weights, job.step, self._call_hooks if self.hook_dispatcher.has_hooks else None)
        # Once the first row is written, the evaluators are compiled in the background. A stage without evaluations
        # needs none, except for hooks that request an evaluation.
        if not self.programs.has_stages or self.programs.current.plan.is_evaluated(job.config.total_steps):
            self.builtin_evaluators.start_compiling(self.evaluators)
        self._request_hook_save()

    def _call_hooks(self, row: Row) -> None:
        # Counters are part of the state, so hooks return a new one.
        self.job.state = self.hook_dispatcher.on_row(self.job.state, self.job.step, row)

    def _request_hook_save(self) -> None:
        """Request the save that a hook has asked for at this step."""
        if self.hook_dispatcher.save_step == self.job.step:
            self.job.checkpointer.request_save(self.job.step)

    def go_back(self, cause: RewindError) -> None:
        """Continue from a checkpoint before the cause, such as a spike of the loss.

        Raises `DivergedError` if the run went back too often, or has no such checkpoint.
        """
        job = self.job
        # A restore needs memory, and arrays may lie in reference cycles.
        self.garbage_collection.collect(2)
        # A save in progress may be of the step to go back to.
        job.checkpointer.wait_until_finished()
        # The stage in which the cause begins, even if a later stage fetched its loss.
        plan = self.programs.at(cause.first - 1).plan
        data_start, examples = self.programs.find_data_start(plan.number).start, plan.config.train.global_batch_examples
        steps = cause.feature.rewind(job, cause, data_start, examples, self.report.list_losses_after)
        for step in steps:
            try:
                found = job.checkpointer.load(str(step))
            except ResumeError as error:
                job.attempt.say(f"cannot roll back to checkpoint {step}: {error}")
                continue
            job.lifecycle.go_back(found, str(step))
            return
        raise DivergedError(f"{cause}; no good checkpoint of step {steps[0]} or earlier is left to go back to")

    def after_load(self) -> None:
        """Set hooks back to the step that was loaded."""
        self.job.state = self.hook_dispatcher.go_to(self.job.state, self.job.step)

    # Stages.

    def enter_stage(self, step: int) -> None:
        """Enter the stage of the step after `step` completed ones. May wait for its program."""
        if self.programs.at(step) is self.programs.current:
            return
        job = self.job
        with job.attempt.progress.report_phase(COMPILE):
            program = self.programs.enter(step)
        # These are created again, for the model, the batch and the data of this stage.
        self._builtin_evaluators = self._chosen_evaluators = None
        self.report.enter_stage(self.evaluators, self._compute_mfu_per_token_rate())
        self.garbage_collection.collect(2)  # the program of the stage before
        job.attempt.record(
            "stage",
            step,
            number=program.plan.number,
            from_step=program.plan.start,
            why=program.plan.why,
            program=program.compiled.digest,
            micro_batch_examples=program.layout.micro_batch_examples,
        )

    def get_program(self, member: str) -> Program:
        """Return the compiled program of the current stage, which a member of the job needs.

        Raises `PhaseError` before `prepare`.
        """
        self.validate_compiled(member)
        return self.programs.current

    def validate_compiled(self, member: str) -> None:
        """Raise `PhaseError` if the job, whose `member` needs a program, is not compiled yet."""
        if not self._is_compiled:
            raise PhaseError(
                f"{type(self.job).__name__}.{member}: the job is not compiled yet; call the job, and {member} inside "
                "of run or after it"
            )

    # Rows and evaluations.

    @property
    def is_language_model(self) -> bool:
        """True if the model returns logits over the ids of the data."""
        return self.job.setup_builder.is_language_model(self.programs[0].train_setup)

    @functools.cached_property
    def report(self) -> Report:
        """Rows of metrics of this attempt."""
        every_epochs = self.job.config.eval.every_epochs
        return Report(
            self.job.attempt,
            self.job.resolved_spec(),
            self.programs.config_in_steps,
            self.evaluators,
            mfu_per_token_rate=self._compute_mfu_per_token_rate(),
            get_data_metrics=self.programs.compute_data_metrics,
            is_language_model=self.is_language_model,
            features=self.job.features,
            epoch_steps=None
            if every_epochs is None
            else compute_epoch_interval(every_epochs, self.job.steps_per_epoch),
        )

    def _compute_mfu_per_token_rate(self) -> float:
        job = self.programs.recipe.stage_jobs[self.programs.number]
        return compute_mfu_per_token_rate(job.flops_per_token, self.programs.current.train_setup)

    @property
    def evaluators(self) -> list[Evaluator]:
        """Evaluators of the current stage."""
        if self._chosen_evaluators is None:
            # The job may replace evaluators, but not drop one that a key of the spec asks for.
            chosen = self.builtin_evaluators.validate_chosen(self.job.evaluator(), self.job.document)
            self._chosen_evaluators = [*chosen]
            for feature in self.job.features:
                self._chosen_evaluators += feature.make_evaluators(self.validation)
        return self._chosen_evaluators

    @property
    def validation(self) -> Validation:
        """Evaluator of the loss on each validation set, on `eval.batches` batches, or fewer if the set has fewer."""
        self.validate_compiled("validation")
        return self.builtin_evaluators.validation

    @functools.cached_property
    def evaluation_tasks(self) -> EvaluationTasks:
        """Tasks of `config.eval` besides the loss. Reads the files that it names on this host."""
        return read_evaluation_tasks(self.job.document, self.job.config, self.job.setup_builder.vocabulary_size)

    @property
    def builtin_evaluators(self) -> BuiltinEvaluators:
        """Evaluators of the loss on the validation sets and of the tasks of `config.eval`, of the current stage."""
        if self._builtin_evaluators is None:
            program, tasks = self.get_program("evaluator"), self.evaluation_tasks
            self._builtin_evaluators = BuiltinEvaluators(
                program.builder,
                program.train_setup,
                program.layout,
                dataclasses.replace(tasks, config=program.plan.config) if program.plan.number else tasks,
                self.job.batch,
                self.job.attempt.stop,
                program.val_step,
            )
        return self._builtin_evaluators

    def list_evaluators(self, builtin: BuiltinEvaluators) -> list[Evaluator]:
        """Return what `evaluator` returns if these are its built-in ones, for a job that is not set up."""
        self._builtin_evaluators = builtin
        return list_returned(self.job.evaluator())

    def get_evaluated_weights(self, state: Any) -> Any:
        """Return the part of a state that evaluators and hooks get: its weights, and their averages below `ema`."""
        return add_averages(self.job.weights, state)

    # Hooks.

    @property
    def hook_dispatcher(self) -> HookDispatcher:
        """Dispatcher of the hooks in this attempt."""
        if self._hook_dispatcher is None:
            job = self.job
            self._hook_dispatcher = HookDispatcher(job.hooks, job.attempt, self.report, self.get_evaluated_weights)
        return self._hook_dispatcher

    @property
    def stop_step(self) -> int | None:
        """Step at which a hook has ended the run; None if none has. Available before the attempt exists."""
        stop = None if self._hook_dispatcher is None else self._hook_dispatcher.stop
        return None if stop is None else stop.step

    # Saves and the end.

    def make_save_contents(self) -> SaveContents:
        """Return what is saved with the state. Raises `DivergedError`."""
        job, report, program = self.job, self.report, self.programs.current
        # Waits for the device, and raises if a loss is not finite: a diverged state must not be saved.
        report.window.fetch()
        best, hosts = job.spec.checkpoint.keep_best, job.attempt.hosts
        hardware = self.programs[0].train_setup.describe_hardware(hosts.num_processes)
        if self.programs.has_stages:
            hardware["stage"] = program.plan.start
        hardware["micro_batch_examples"] = program.layout.micro_batch_examples
        hardware["program"] = self.guard.make_record(hosts.num_processes)
        earliest = [feature.find_earliest_rewind(job.state) for feature in job.features]
        fields = {each.key: found for each in job.features if (found := each.save_fields(job.state))}
        return SaveContents(
            metric=None if best is None else report.metric(best.metric, job.step),
            roll_back_to=min((step for step in earliest if step is not None), default=None),
            features=fields or None,
            topology=hardware,
            carry=report.carry if best is None else report.add_metric(report.carry, best.metric, job.step),
            check=functools.partial(program.builder.dataset.check, hosts.is_main),
            attachments=report.attachments,
            flush=report.sync,
            announce=lambda: self.hook_dispatcher.on_checkpoint(job.state, job.step),
        )

    def result(self, step: int) -> JsonObject:
        """Return the keys of `result.json` besides step and fingerprint."""
        return self.report.result(step)

    def format_next_steps(self) -> list[str]:
        """Return a line with a command for the trained model."""
        return [*self.report.format_next_steps()]
