"""Programs of a run, one for each stage: layout of the batch, abstract state, data, and compiled steps.

A run without stages has one program. The data of a stage continue at the positions that the stages before it have
reached, and its steps are compiled while the devices train the stage before it.
"""

import collections
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import optax

from runner.attempts.attempt import Attempt
from runner.attempts.fence import RunIdentity
from runner.checkpoint.fork import find_continued_manifest
from runner.checkpoint.leaves import format_type, list_leaf_names
from runner.config import TrainerConfig
from runner.console import say, warn
from runner.data import TRAIN, DataPosition, Dataset, SkippedBatches, SkippedExamples, has_targets
from runner.distributed.agreement import Hosts
from runner.errors import InvalidError, format_error
from runner.metrics.meta import Meta
from runner.metrics.rows import Row
from runner.parallel.mesh import read_device_memory_bytes
from runner.process import keep_freed_memory, read_machine_id
from runner.spec import ExecutionSpec, ForkConfig, Trajectory, is_below
from runner.spec.model import Policy, list_keys
from runner.storage import Store
from runner.train.checks import (
    share_data,
    validate_hardware,
    validate_hosts,
    validate_same_on_all_hosts,
    validate_same_program,
)
from runner.train.compile import MEMORY_SHARE, CompiledStep
from runner.train.flops import Flops
from runner.train.kernel_check import KernelCase, KernelChecker, set_kernels_of_process
from runner.train.layout import BatchLayout
from runner.train.replay import ReplayedStep
from runner.train.setup import StepRecipe, TrainSetup, TrainSetupBuilder
from runner.train.stages import (
    CONTINUES,
    StagePlan,
    find_first_change,
    format_idle_rates,
    format_rounded_starts,
    list_restarts,
    make_schedules,
    split_trajectory,
)
from runner.train.state import PARAMS, TrainState, get_shardings
from runner.train.step import Batch, skip_step

_SKIP_STEPS = "config.train.skip_steps"


class Program:
    """Setup and compiled steps of one stage on the devices of this process, made when first needed.

    Attributes:
        plan: the stage as the spec describes it.
        builder: builder of its setup.
        val_step: compiled validation step, if it is compiled ahead.
    """

    def __init__(
        self,
        plan: StagePlan,
        builder: TrainSetupBuilder,
        devices: Sequence[jax.Device] | None = None,
        is_evaluated: bool = False,
    ):
        """Prepare the program on `devices`, by default all; builds and compiles nothing.

        If `is_evaluated`, the validation step is compiled ahead, after the train step.
        """
        self.plan, self.builder = plan, builder
        self._devices = devices
        self._compiled: Future[CompiledStep] | None = None
        self._micro_batch: int | None = None  # that an earlier attempt has chosen
        self._is_evaluated = is_evaluated
        self.val_step: Future[jax.stages.Compiled] | None = None
        self._lock, self._setup_lock = threading.Lock(), threading.Lock()
        self._train_setup: TrainSetup | None = None

    @property
    def train_setup(self) -> TrainSetup:
        """Abstract state, shardings and optimizer of the stage, built on first access, by any thread."""
        with self._setup_lock:
            if self._train_setup is None:
                self._train_setup = self.builder.build(jax.devices() if self._devices is None else self._devices)
            return self._train_setup

    def build(self, share_data: Callable[[], None]) -> None:
        """Build the setup; `share_data` as in `TrainSetupBuilder.build`. Called on every host."""
        with self._setup_lock:
            self._train_setup = self.builder.build(jax.devices(), share_data)

    @functools.cached_property
    def layout(self) -> BatchLayout:
        """Split of the batch. Waits for the compiler if several micro-batches may fit. Needs `start_compiling`."""
        layouts = self.builder.list_layouts(self.train_setup, self._micro_batch)
        return layouts[0] if len(layouts) == 1 else self.compiled.layout

    @property
    def executable(self) -> jax.stages.Compiled:
        """Executable of the compiled train step."""
        return self.compiled.executable

    @functools.cached_property
    def replayed(self) -> ReplayedStep:
        """Compiled train step of a layout that `is_replayable`."""
        setup = self.train_setup
        return ReplayedStep(self.executable, setup.abstract_state, setup.mesh, self.layout.is_ordered)

    @property
    def compiled(self) -> CompiledStep:
        """Compiled train step, for which this may wait. Needs `compile` or `start_compiling`."""
        assert self._compiled is not None, "the program is compiled"
        return self._compiled.result()

    def start_compiling(self, limit_bytes: int) -> Future[CompiledStep]:
        """Start to compile the train step on a thread at the first call, and return its future.

        If the stage is evaluated, the thread then compiles the validation step.
        """
        with self._lock:
            if self._compiled is None:
                compiler = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compile")
                self._compiled = train = compiler.submit(self._compile, limit_bytes, None)
                if self._is_evaluated and self.builder.dataset.validation:
                    self.val_step = compiler.submit(
                        lambda: self.builder.compile_val(self.train_setup, train.result().layout)
                    )
                compiler.shutdown(wait=False)  # the thread ends once it has compiled
            return self._compiled

    def compile(self, limit_bytes: int, micro_batch: int | None = None) -> CompiledStep:
        """Return the compiled train step; compiles on this thread, or waits for the one that does.

        `micro_batch` is the one that an earlier attempt has chosen; None: the largest that fits in `limit_bytes`.
        """
        with self._lock:
            if self._compiled is None:
                self._micro_batch, self._compiled = micro_batch, Future()
                try:
                    self._compiled.set_result(self._compile(limit_bytes, micro_batch))
                except BaseException as error:
                    self._compiled.set_exception(error)
                    raise
        return self._compiled.result()

    def _compile(self, limit_bytes: int, micro_batch: int | None) -> CompiledStep:
        return self.builder.compile(self.train_setup, limit_bytes, micro_batch)

    def validate(self, abstract: TrainState, devices: Sequence[jax.Device]) -> None:
        """Check the stage before the run begins, without compiling its step.

        Raises `SpecError`, also if its state differs in shape or type from that of the run, `abstract`.
        """
        self.builder.validate_keys_read()
        self.builder.make_mesh(devices)
        data = self.builder.config.data
        changes_arrays = not data.has_tokens and any(is_below(f"config.{key}", ("data",)) for key in self.plan.values)
        state_keys = list_keys(type(self.plan.config), Policy.STATE)
        if not changes_arrays and not any(is_below(f"config.{key}", state_keys) for key in self.plan.values):
            return
        if changes_arrays:
            # The data may have other fields, which the job's code reads.
            with self.plan.document.errors_at("config"):
                try:
                    self.builder.trace(self.train_setup)
                except (KeyError, TypeError, ValueError) as error:
                    raise InvalidError(f"its step cannot be traced with its data: {format_error(error)}") from error
        former, own = (
            {
                name: format_type(leaf.dtype, leaf.shape)
                for name, leaf in zip(list_leaf_names(state), jax.tree.leaves(state), strict=True)
            }
            for state in (abstract, self.train_setup.abstract_state)
        )
        problems = [
            f"{name} {former.get(name, 'is not there')} would become {own.get(name, 'nothing')}"
            for name in former | own
            if former.get(name) != own.get(name)
        ]
        if problems:
            shown = ", ".join(problems[:4]) + (f" and {len(problems) - 4} more" if len(problems) > 4 else "")
            # Weights of other shapes cannot be taken over.
            has_same_weights = not any(problem.startswith(f"{PARAMS}.") for problem in problems)
            advice = "begin another run" + (", with checkpoint.init_from" if has_same_weights else "")
            reason = f"it changes the shape of the state, which a run cannot: {shown}; {advice}"
            raise self.plan.document.error("config", reason)

    def find_restarts(self, dataset: Dataset) -> list[str]:
        """Return a line for each source that starts a new epoch although an earlier stage had it."""
        return [
            f"{self.plan.key}: the epoch of {train.name} starts again at step {self.plan.start}, because its examples "
            "are others than those before (sequence length, packing or split)"
            for train in dataset.train_sources
            if train.is_restarted
        ]

    @functools.cached_property
    def skip_step(self) -> Callable[[TrainState], tuple[TrainState, jax.Array, Meta]]:
        """Compiled step over a batch without a target; the state is donated."""
        setup = self.train_setup
        skip = functools.partial(skip_step, schedule=setup.schedule, auxiliary_states=setup.auxiliary_states)
        return jax.jit(skip, donate_argnums=0, out_shardings=(get_shardings(setup.abstract_state), None, None))

    def adopt(self, state: TrainState) -> TrainState:
        """Return a state of any stage with the (static) functions of this stage; the arrays are the same."""
        leaves, structure = jax.tree.flatten(state)
        own: Any = jax.tree.structure(self.train_setup.abstract_state)
        return state if structure == own else jax.tree.unflatten(own, leaves)


class StagedRecipe(StepRecipe, Protocol):
    """Statements of a training job, with those of its stages."""

    config: TrainerConfig[Any]
    setup_builder: TrainSetupBuilder

    @property
    def stage_jobs(self) -> "Sequence[StagedRecipe]":
        """The recipe with the config of each stage; the first is this one."""

    @property
    def unread_keys(self) -> frozenset[str]:
        """Dotted keys that have no effect with this config."""

    def flops_per_token(self, train_setup: TrainSetup) -> Flops:
        """Return the FLOPs of a train step per token, or per example of arrays."""

    def kernel_cases(self, train_setup: TrainSetup) -> Sequence[KernelCase]:
        """Return the cases of the kernels of a traced step."""


@dataclass(frozen=True, eq=False)
class _ProgramContext:
    """Dependence of a stage on the stages before it; see `runner.train.setup.StageContext`."""

    programs: "Programs"
    number: int

    @property
    def num_steps(self) -> int:
        """Steps of the stage."""
        plan = self.programs.plans[self.number]
        return plan.stop - plan.start

    @property
    def schedule(self) -> optax.Schedule:
        """Learning rate of the stage by completed steps of the run."""
        return self.programs.schedules[self.number]

    @property
    def vocabulary_size(self) -> int:
        """Vocabulary size of the run, by its first stage."""
        return self.programs.recipe.setup_builder.vocabulary_size


class Programs:
    """Programs of a run by stage, with their data and learning rates. The run is in one of the stages.

    The constructor builds and compiles nothing.

    Attributes:
        recipe: the training job.
        plans: the stages; the first is the config before any stage of the spec, and the only one if it has no stages.
        number: number of the current stage: that of the next step or, until it begins, of the last step.
        limit_bytes: memory of a device that a step may use; known from `prepare` on.
        restarts: starts of stages at which the run has restarted the interleaving of sources; known after `build`.
    """

    def __init__(self, recipe: StagedRecipe, plans: Sequence[StagePlan]):
        self.recipe, self.plans = recipe, plans
        self.number = 0
        self.limit_bytes = 0
        self.restarts: frozenset[int] = frozenset()
        # By skipped ranges of data, and stage.
        self._datasets: dict[tuple[tuple[SkippedBatches, ...], int], Dataset] = {}

    @functools.cached_property
    def _programs(self) -> list[Program]:
        total_steps = self.recipe.config.total_steps if self.has_stages else 0
        # The validation step of the first stage is compiled by its evaluator.
        return [
            Program(plan, job.setup_builder, is_evaluated=plan.number > 0 and plan.is_evaluated(total_steps))
            for plan, job in zip(self.plans, self.recipe.stage_jobs, strict=True)
        ]

    def __getitem__(self, number: int) -> Program:
        return self._programs[number]

    def __iter__(self) -> Iterator[Program]:
        return iter(self._programs)

    def at(self, step: int) -> Program:
        """Return the program of the step after `step` completed ones."""
        return self._programs[self.recipe.config.find_stage(step)]

    @property
    def has_stages(self) -> bool:
        """True if the spec has stages."""
        return len(self.plans) > 1

    @property
    def config_in_steps(self) -> TrainerConfig[Any]:
        """Config with its total in steps. Reads the data on this host if the total is in epochs."""
        return self.recipe.config if self.has_stages else self.recipe.setup_builder.config_in_steps

    @functools.cached_property
    def schedules(self) -> list[optax.Schedule]:
        """Learning rate of each stage by completed steps."""
        return make_schedules(self.plans)

    def make_context(self, number: int) -> _ProgramContext | None:
        """Return the dependencies of a stage on those before it; None if the run has no stages."""
        return _ProgramContext(self, number) if self.has_stages else None

    # Checks and compilation, before the first step. Called on every host.

    def validate_devices(self, spec: ExecutionSpec, hosts: Hosts) -> None:
        """Check the devices and the number of hosts against the spec. Reads no tokens."""
        builder = self.recipe.setup_builder
        with builder.document.errors_at("topology.accelerator"):
            validate_hardware(spec, builder.topology, self.recipe.config, hosts)
        validate_hosts(hosts, lambda number: all(program.builder.fits(number) for program in self))

    def build(self, hosts: Hosts, store: Store, fork: ForkConfig | None) -> None:
        """Build the train setup of the first stage, check the others, and find the stage that the run is in."""
        if self.has_stages:

            def read_past() -> tuple[int, list[int]]:
                newest = find_continued_manifest(store, fork)
                return (0, []) if newest is None else (newest.step, list_restarts(newest.identity))

            step, restarts = hosts.run_on_main(read_past)
            # The stage whose evaluators complete the newest row: the one that has made its step.
            self.number = self.recipe.config.find_stage(max(step - 1, 0))
            self.restarts = frozenset(start for start in restarts if start < step)

        def share(program: Program) -> None:
            builder = program.builder
            share_data(lambda: builder.dataset, builder.config.data.is_in_bucket, store, hosts)

        first = self[0]
        first.build(lambda: share(first))
        warned = set[str]()  # the stages may have the same data
        for program in self:
            if program is not first:
                share(program)
            dataset = self.get_dataset(program.plan.number)
            if self.has_stages and program.plan.config.data.mixture:
                with program.builder.document.errors_at("config.data.mixture"):
                    dataset.validate_epochs(self.count_examples(program.plan.number)[0])
            if program is not first:
                program.validate(first.train_setup.abstract_state, jax.devices())
            dataset.validate_vocabulary(first.builder.vocabulary_size)
            validate_same_on_all_hosts(dataset.fingerprint, "data", hosts, f"{dataset.source}: ")
            warnings = dataset.list_warnings(program.plan.config.train.global_batch_examples) if hosts.is_main else []
            for line in [*warnings, *program.find_restarts(dataset)] if hosts.is_main else []:
                if line not in warned:
                    warn(line)
                warned.add(line)
        for line in format_rounded_starts(self.recipe.config, self.plans) if hosts.is_main else []:
            say(line)
        for line in self.list_idle_rates() if hosts.is_main else []:
            warn(line)

    def list_idle_rates(self) -> list[str]:
        """Return a warning for each stage whose learning rate changes no step."""
        choice = self.recipe.setup_builder.optimizer_choice
        has_rates = self.has_stages and choice.uses_config_rates(self.plans[0].config)
        return format_idle_rates(self.plans) if has_rates else []

    def prepare(self, attempt: Attempt, known_micro_batch: int | None) -> CompiledStep:
        """Test the kernels and compile the train step of the current stage with the largest micro-batch that fits."""
        hosts = attempt.hosts
        self.limit_bytes = hosts.agree(int(read_device_memory_bytes() * MEMORY_SHARE))
        self.check_kernels(attempt, known_micro_batch)
        compiled = self.current.compile(self.limit_bytes, known_micro_batch)
        validate_same_program(compiled.digest, hosts)
        if jax.default_backend() == "cpu":
            num_processes = hosts.distribute(read_machine_id(), lambda ids: [*map(collections.Counter(ids).get, ids)])
            keep_freed_memory(compiled.memory.temporaries * num_processes * jax.local_device_count())
        return compiled

    def check_kernels(self, attempt: Attempt, known_micro_batch: int | None) -> None:
        """Test the kernels of the steps on the devices, and trace the steps again without those that fail."""
        own = self.current
        set_kernels_of_process(own.train_setup.kernels)
        own.builder.trace(own.train_setup, known_micro_batch)
        # A CPU has kernels only where a test puts them.
        if jax.default_backend() == "cpu" and not self.recipe.kernel_cases(own.train_setup):
            return
        # Steps of later stages are compiled while the devices train, and their kernels must be known by then.
        for program in self:
            if program is not own:
                program.builder.trace(program.train_setup)

        def trace_again() -> None:
            for program in self:
                program.builder.trace_again(program.train_setup, known_micro_batch if program is own else None)

        def list_cases() -> list[KernelCase]:
            jobs = zip(self.recipe.stage_jobs, self, strict=True)
            return [case for job, program in jobs for case in job.kernel_cases(program.train_setup)]

        KernelChecker(attempt).check([program.train_setup.kernels for program in self], list_cases, trace_again)

    # The current stage.

    @property
    def current(self) -> Program:
        """Program of the next step or, until its stage begins, of the last step."""
        return self[self.number]

    def enter(self, step: int) -> Program:
        """Enter the stage of the step after `step` completed ones, and wait for its program."""
        program = self.at(step)
        program.start_compiling(self.limit_bytes).result()
        self.number = program.plan.number
        return program

    def compile_next(self) -> None:
        """Start to compile the step of the next stage on a background thread, unless that has been started."""
        if self.number + 1 < len(self.plans):
            self[self.number + 1].start_compiling(self.limit_bytes)

    # Data.

    @property
    def data_position(self) -> DataPosition:
        """Position in the data by step, with the ranges skipped by the spec and by features."""
        skipped = [*self.recipe.setup_builder.data_position.skipped]
        for feature in self.recipe.features:
            skipped += feature.skipped
        return DataPosition(tuple(sorted(skipped)))

    def continues_data(self, number: int) -> bool:
        """Return True if the data of a stage continue those of the stage before it as if there were no border."""
        plan, before = self.plans[number], self.plans[number - 1]
        if not number or plan.start in self.restarts:
            return not number
        batches = {each.config.train.global_batch_examples for each in (plan, before)}
        return len(batches) == 1 and (
            not plan.sets("data")
            or self[number].builder.dataset.fingerprint == self[number - 1].builder.dataset.fingerprint
        )

    def find_data_start(self, number: int) -> StagePlan:
        """Return the first of the successive stages that have the data and the batch size of this one."""
        while number and self.continues_data(number):
            number -= 1
        return self.plans[number]

    def count_examples(self, number: int, step: int | None = None) -> tuple[int, Sequence[SkippedExamples]]:
        """Return (number of examples of a stage's data up to `step`, ranges of those that were skipped).

        `step` is by default the end of the stage. Examples count from the first stage with the same data.
        """
        plan, start = self.plans[number], self.find_data_start(number).start
        # Without stages `plan.stop` is 0, and the caller passes `step`.
        end = plan.stop if step is None else step
        skipped = [each for each in self.data_position.skipped if each.begin >= start]
        own = DataPosition(tuple(each._replace(begin=each.begin - start) for each in skipped))
        return own.count_examples(end - start, plan.config.train.global_batch_examples)

    def compute_data_metrics(self, step: int) -> Row:
        """Return the metrics of the data of the current stage at a step."""
        return self.get_dataset(self.number).compute_metrics(*self.count_examples(self.number, step))

    def get_dataset(self, number: int) -> Dataset:
        """Return the data set of a stage, whose sources continue at the positions that earlier stages have reached."""
        key = self.data_position.skipped, number
        if key not in self._datasets:
            loaded, first = self[number].builder.dataset, self.find_data_start(number).number
            if first < number:
                self._datasets[key] = loaded.continue_equal(self.get_dataset(first))
                return self._datasets[key]
            # A roll-back in one stage moves the position in the data of the later ones. Stages with the same data
            # count together.
            ends = [each for each in range(number) if self.find_data_start(each + 1).number == each + 1]
            earlier = [(self.get_dataset(each), *self.count_examples(each)) for each in ends]
            self._datasets[key] = loaded.continue_stages(earlier) if earlier else loaded
        return self._datasets[key]

    def locate_batch(self, step: int) -> tuple[Program, int]:
        """Return (program of the step after `step` completed ones, batches of its data before it)."""
        program, position = self.at(step), self.data_position
        start = self.find_data_start(program.plan.number).start
        return program, position.get_data_step(step) - position.count_examples(start, 1)[0]

    def load_batch(self, step: int) -> Batch:
        """Return the global (S, B, ...) training batch after `step` completed steps.

        Waits for the compiler only if it has to choose the micro-batch of a later stage.
        """
        program, data_step = self.locate_batch(step)
        program.start_compiling(self.limit_bytes)
        return program.layout.batch(self.get_dataset(program.plan.number), TRAIN, data_step)

    def has_targets(self, batch: Batch, step: int) -> bool:
        """Return False if `batch`, the one of `load_batch`, is known to have no target."""
        program, data_step = self.locate_batch(step)
        dataset = self.get_dataset(program.plan.number)
        return has_targets(dataset, batch, data_step, program.plan.config.train.global_batch_examples)

    # Identity of the run.

    def identify_stages(self, stages: Sequence[Any]) -> list[Any]:
        """Return the items of `config.stages` in a trajectory with what identifies the data of each stage."""
        return [
            [
                *given,
                {"config.data": program.builder.dataset.fingerprint},
                *([CONTINUES] if self.continues_data(program.plan.number) else []),
            ]
            for given, program in zip(stages, self._programs[1:], strict=True)
        ]

    def make_run_identity(self, whole: RunIdentity, identity: Trajectory) -> RunIdentity:
        """Return the identity of the run, `whole`, so that saved trajectories are compared with it stage by stage.

        `identity` has the keys of the run that are known so far.
        """
        jobs, builder = self.recipe.stage_jobs, self.recipe.setup_builder
        identities = [
            (plan.start, dataclasses.replace(whole, config=plan.config, identity=piece.keys, unread=job.unread_keys))
            for plan, piece, job in zip(self.plans, split_trajectory(identity), jobs, strict=True)
        ]
        find_first_other = functools.partial(
            find_first_change,
            identities,
            identity,
            self.recipe.config,
            builder.optimizer_choice.uses_config_rates(self.plans[0].config),
            lambda: builder.dataset.num_train_examples,
        )

        def find_first(saved: Trajectory, keys: Sequence[str]) -> int | None:
            others = [key for key in keys if key != _SKIP_STEPS]
            found = [find_first_other(saved)] if others else []
            if _SKIP_STEPS in keys:
                found.append(DataPosition.from_ranges(saved[_SKIP_STEPS]).find_first_change(builder.data_position))
            return min((step for step in found if step is not None), default=None)

        def is_discarded(saved: Trajectory, step: int) -> bool:
            return any(feature.is_discarded(saved, step) for feature in self.recipe.features)

        return dataclasses.replace(whole, find_first_change=find_first, is_discarded=is_discarded)
