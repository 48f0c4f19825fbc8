"""Training job on a mesh: abstract train state, shardings, optimizer and compiled steps.

`TrainSetupBuilder` describes the job independently of devices. It is constructed with the job, and reads data only when
they are first needed. Its method `build` returns the `TrainSetup` for given devices: the real ones in a run; simulated
ones, or those of an abstract TPU topology, in `plan`.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from runner.accelerator import find_chip, parse_accelerator, validate_matmul
from runner.checkpoint.leaves import AdapterMerge, list_leaf_names, make_strongly_typed
from runner.config import AdapterConfig, TrainerConfig
from runner.data import TRAIN, DataPosition, Dataset, Fields, get_batch_fields, load_dataset
from runner.errors import InvalidError
from runner.optim.groups import Parameter, describe_parameters
from runner.optim.library import update_in_float32
from runner.parallel import mesh as mesh_rules
from runner.parallel.mesh import LOGICAL_AXIS_RULES, LogicalAxisRule, make_abstract_mesh, make_mesh, resolve_mesh_sizes
from runner.spec import Document, ExecutionSpec, Topology, Trajectory
from runner.storage import JsonObject
from runner.train import state as train_state
from runner.train.auxiliary import AuxiliaryState, init_auxiliary
from runner.train.compile import (
    CompiledStep,
    SizedStepT,
    compile_lowered,
    compile_to_fit,
    compute_program_digest,
    get_program_memory,
    lower_step,
    trace_train_step,
    trace_val_step,
)
from runner.train.feature import Feature, TrainStep
from runner.train.kernel_check import KernelUse, use_kernels
from runner.train.layout import BatchLayout, list_batch_layouts, make_val_layout
from runner.train.lora import combine_with_base, init_adapter, make_abstract_adapter
from runner.train.optimizer import OptimizerChoice, choose_optimizer
from runner.train.state import PARAMS, TrainState, drop_params
from runner.train.weights import get_model_state

_LABELS_CHECKED = 64  # examples of a data set of arrays, at the start of a run


@dataclass(frozen=True)
class TrainSetup:
    """Abstract train state, shardings and optimizer of a job on a mesh. Allocates nothing until `init_state`."""

    mesh: Mesh  # may be abstract
    key: jax.Array  # random key of the run; the key of step k is `fold_in(key, k)`
    schedule: optax.Schedule | None  # learning rate by completed steps; None if a custom optimizer contains its own
    # Whole transformation, clipping included; it works in float32.
    optimizer: optax.GradientTransformation | train_state.ShardedOptimizer
    abstract_state: TrainState  # shape, dtype and sharding of every leaf
    # Function from a key to the state at step 0, to be jitted with the shardings of `abstract_state`.
    make_state: Callable[[jax.Array], TrainState]
    auxiliary_states: Sequence[AuxiliaryState] = ()
    rules: Sequence[LogicalAxisRule] = LOGICAL_AXIS_RULES
    num_logits: int | None = None  # V of the model's logits (B, T, V), or (B, V) of labels; None if it returns none
    # Choice of kernels, with the test cases of the kernels in the traced steps.
    kernels: KernelUse = field(default_factory=KernelUse, repr=False, compare=False)
    # Traced, uncompiled train steps by micro-batch size, kept so that compilation need not trace again.
    traced: dict[int, jax.stages.Traced] = field(default_factory=dict, repr=False, compare=False)
    # Traced, uncompiled validation steps, by the sizes of their batch and micro-batch.
    traced_val: dict[tuple[int, int], jax.stages.Traced] = field(default_factory=dict, repr=False, compare=False)

    @property
    def mesh_sizes(self) -> dict[str, int]:
        """Number of devices by mesh axis."""
        return {axis: int(size) for axis, size in self.mesh.shape.items()}

    def describe_hardware(self, num_processes: int) -> JsonObject:
        """Return the hardware for which a micro-batch size is chosen, as manifests record it."""
        kind = self.mesh.devices.flat[0].device_kind
        return {"mesh": self.mesh_sizes, "device_kind": kind, "processes": num_processes}

    @property
    def abstract_val_state(self) -> TrainState:
        """Abstract state of the validation step: an adapter merged, without optimizer and auxiliary states."""
        return get_model_state(self.abstract_state).replace(opt_state=(), riders={})

    @contextlib.contextmanager
    def sharding_rules(self) -> Iterator[None]:
        """Map logical axis names of the model to axes of the mesh by the job's rules, and use the job's kernels."""
        with mesh_rules.use_sharding_rules(self.mesh, self.rules), use_kernels(self.kernels):
            yield

    def init_state(self) -> TrainState:
        """Return the state at step 0, each leaf created in its sharding. Called on every host."""
        with self.sharding_rules():
            return train_state.init_state(self.make_state, self.key, self.abstract_state, self.mesh)

    def restart_averages(self, state: TrainState) -> TrainState:
        """Initialise averages and auxiliary states again from the parameters of `state`, which were replaced.

        Called on every host.
        """
        with self.sharding_rules():
            state = train_state.restart_averages(state)
        if not self.auxiliary_states:
            return state
        # Jitted with the shardings of the state, so that no leaf is ever whole on one device.
        begin = jax.jit(
            lambda params: make_strongly_typed(init_auxiliary(self.auxiliary_states, params)),
            out_shardings=train_state.get_shardings(self.abstract_state.riders),
        )
        with self.sharding_rules():
            return state.replace(riders=begin(state.params))

    def trace_train(self, train_step: Callable[..., Any], layout: BatchLayout) -> None:
        """Trace `train_step` for one split of the batch. Raises `InvalidError` if metrics cannot hold its meta."""
        # `validate_steps` traces before anything is claimed, and `compile_train` uses that trace.
        if layout.micro_batch_examples not in self.traced:
            with self.sharding_rules():
                self.traced[layout.micro_batch_examples] = trace_train_step(
                    train_step, self.schedule, self.abstract_state, self.key, layout, self.auxiliary_states
                )

    def trace_val(self, val_step: Callable[..., Any], abstract: TrainState, layout: BatchLayout) -> None:
        """Trace `val_step` for one split of the batch. Raises `InvalidError` if metrics cannot hold its meta."""
        sizes = (layout.global_batch_examples, layout.micro_batch_examples)
        if sizes not in self.traced_val:
            with self.sharding_rules():
                self.traced_val[sizes] = trace_val_step(val_step, abstract, layout)

    def compile_train(self, train_step: Callable[..., Any], layout: BatchLayout) -> CompiledStep:
        """Compile `train_step` for one split of the batch."""
        self.trace_train(train_step, layout)
        with self.sharding_rules():
            # Popped, since each trace is compiled once.
            lowered = lower_step(self.traced.pop(layout.micro_batch_examples), layout)
        executable, options = compile_lowered(lowered, layout)
        digest, memory = compute_program_digest(lowered), get_program_memory(executable)
        return CompiledStep(layout, executable, digest, memory, options)

    def lower_train(self, train_step: Callable[..., Any], layout: BatchLayout) -> jax.stages.Lowered:
        """Lower `train_step` for one split of the batch, without compiling it."""
        self.trace_train(train_step, layout)
        with self.sharding_rules():
            return lower_step(self.traced[layout.micro_batch_examples], layout)

    def lower_val(self, val_step: Callable[..., Any], abstract: TrainState, layout: BatchLayout) -> jax.stages.Lowered:
        """Lower `val_step` for one split of the batch, without compiling it; `abstract` as in `compile_val`."""
        self.trace_val(val_step, abstract, layout)
        with self.sharding_rules():
            return lower_step(self.traced_val[layout.global_batch_examples, layout.micro_batch_examples], layout)

    def compile_val(
        self, val_step: Callable[..., Any], abstract: TrainState, layout: BatchLayout
    ) -> jax.stages.Compiled:
        """Compile `val_step` for one split of the batch and the leaves of the state that `abstract` has."""
        lowered = self.lower_val(val_step, abstract, layout)
        self.traced_val.pop((layout.global_batch_examples, layout.micro_batch_examples))
        return compile_lowered(lowered, layout)[0]


def get_tokens(batch: Mapping[str, jax.Array], place: str = "model_inputs") -> tuple[jax.Array, ...]:
    """Return the inputs of a model of tokens: `x`. Raises `InvalidError` if the data have no such field.

    `place` names the code that asks for them.
    """
    if "x" not in batch:
        names = ", ".join(sorted(batch))
        raise InvalidError(
            f"{place}: the data's batches hold {names} and no x; override model_inputs to return the arguments of the "
            "model"
        )
    return (batch["x"],)


def _validate_model(model: Any) -> None:
    """Raise `InvalidError` unless a module can be called with `deterministic`, as it is without dropout."""
    if not isinstance(model, nn.Module):
        raise InvalidError(f"the job's model() returns {type(model).__name__}, needs a Flax module (flax.linen)")
    parameters = inspect.signature(type(model).__call__).parameters
    if "deterministic" not in parameters and all(each.kind is not each.VAR_KEYWORD for each in parameters.values()):
        raise InvalidError(
            f"{type(model).__name__}.__call__ does not take deterministic, which is True without dropout; add to its "
            "arguments *, deterministic: bool = True"
        )


def build_train_setup(
    model: nn.Module,
    sharded_init: Callable[..., tuple[Any, Any]],
    fields: Fields,
    make_optimizer: Callable[[Any], optax.GradientTransformation],
    schedule: optax.Schedule | None,
    mesh: Mesh,
    key: jax.Array,
    auxiliary_states: Sequence[AuxiliaryState] = (),
    adapter: AdapterConfig | None = None,
    compute: str = "float32",
    rules: Sequence[LogicalAxisRule] = LOGICAL_AXIS_RULES,
    offload_optimizer: bool = False,
    shard_optimizer: bool = False,
    model_inputs: Callable[[Any], tuple[Any, ...]] = get_tokens,
    kernels: KernelUse | None = None,
) -> TrainSetup:
    """Build the setup of `model` on `mesh`. Allocates nothing; neither mesh nor key needs real devices.

    `sharded_init` is a function of (model, key, *inputs, mesh=..., deterministic=...) that returns the variables and
    their shardings, `model_inputs` one from a batch (B, ...) to the positional arguments of the model, and
    `make_optimizer` one from a tree of `Parameter` to the optax transformation. The model is traced with one example
    of the `fields` to find its shapes. An `adapter` is trained instead of the model's own parameters, and merged in the
    dtype `compute`. `offload_optimizer` keeps the arrays of the optimizer state in pinned host memory,
    `shard_optimizer` shards them over `data` too.
    """
    _validate_model(model)

    def init(init_function: Callable[..., Any], key: jax.Array, **options: Any) -> Any:
        example = {name: jnp.zeros((1, *field.shape), field.dtype) for name, field in fields.items()}
        return init_function(key, *model_inputs(example), deterministic=True, **options)

    # 1. Shapes and shardings of the model's variables, from `model.init`, which needs no devices. A custom sharded_init
    # chooses its own, so it is traced as well.
    init_sharded = functools.partial(init, functools.partial(sharded_init, model), mesh=mesh)
    returned: list[tuple[int, ...]] = []

    def init_model(*args: Any, **options: Any) -> Any:
        output, variables = model.init_with_output(*args, **options)
        # Drop the output, which may be of any type: `eval_shape` can only return arrays.
        returned.extend(leaf.shape for leaf in jax.tree.leaves(output) if isinstance(leaf, jax.Array))
        return variables

    boxed = jax.eval_shape(functools.partial(init, init_model), key)
    # Logits of each token, or of each example with a label.
    targets_shape = (1, *fields["y"].shape) if "y" in fields else (1, *fields["x"].shape) if "x" in fields else ()
    num_logits = [shape[-1] for shape in returned if len(shape) > 1 and shape[:-1] == targets_shape]
    shapes, shardings = nn.unbox(boxed), train_state.compute_variable_shardings(boxed, mesh, rules)
    if sharded_init is not train_state.sharded_init:
        shapes, shardings = _trace_sharded_init(init_sharded, key, mesh, rules)
        # Rules, parameter groups and checkpoints refer to parameters by name, so the names of both must be equal.
        if list_leaf_names(shapes) != list_leaf_names(nn.unbox(boxed)):
            raise InvalidError(
                "sharded_init returns other parameters or variables than the model, by their names; return those of "
                "model.init"
            )

    # 2. The trained parameters (those of an adapter, if there is one), and their optimizer.
    trained = boxed[PARAMS] if adapter is None else make_abstract_adapter(boxed[PARAMS], adapter)
    merge = None if adapter is None else AdapterMerge(adapter.alpha / adapter.rank, compute)
    # Only what is trained has optimizer state; the frozen base of an adapter has none.
    optimizer: Any = update_in_float32(make_optimizer(describe_parameters(trained)))
    if adapter is not None:
        shapes = combine_with_base(shapes, nn.unbox(trained))
        shardings = combine_with_base(shardings, train_state.compute_variable_shardings(trained, mesh, rules))

    if shard_optimizer and mesh.shape["data"] > 1:
        optimizer = train_state.make_sharded_optimizer(optimizer, shapes[PARAMS], shardings[PARAMS])

    # 3. The whole state.
    def make_state(variables: Any) -> TrainState:
        return train_state.make_state_from_variables(model, variables, optimizer, auxiliary_states, merge)

    def init_variables(key: jax.Array) -> Any:
        variables = init_sharded(key)[0]
        return variables if adapter is None else combine_with_base(variables, init_adapter(trained, key))

    abstract = train_state.make_abstract_state(
        make_state, shapes, shardings[PARAMS], mesh, drop_params(shardings), offload_optimizer, shard_optimizer
    )
    return TrainSetup(
        mesh=mesh,
        key=key,
        schedule=schedule,
        optimizer=optimizer,
        abstract_state=abstract,
        make_state=lambda key: make_state(init_variables(key)),
        auxiliary_states=auxiliary_states,
        rules=rules,
        num_logits=max(num_logits, default=None),
        kernels=KernelUse() if kernels is None else kernels,
    )


def _trace_sharded_init(
    init_sharded: Callable[[jax.Array], tuple[Any, Any]], key: jax.Array, mesh: Mesh, rules: Sequence[LogicalAxisRule]
) -> tuple[Any, Any]:
    """Return shapes and shardings of the variables of a custom `sharded_init`, which is traced and not run."""
    # `eval_shape` can return arrays only, so the shardings leave the traced function through this list.
    found: list[Any] = []

    def init_variables(key: jax.Array) -> Any:
        variables, shardings = init_sharded(key)
        found.append(shardings)
        return variables

    with mesh_rules.use_sharding_rules(mesh, rules):
        return jax.eval_shape(init_variables, key), found[0]


class StepRecipe(Protocol):
    """Statements of a training job about its model, its optimizer and its steps; see `BaseTrainer`.

    The methods are called when first needed, with the config of the job's stage.
    """

    def model(self) -> nn.Module:
        """Return the Flax module."""

    def sharded_init(self, model: nn.Module, key: jax.Array, *args: Any, mesh: Mesh, **kwargs: Any) -> tuple[Any, Any]:
        """Return the variables of the model, and their shardings."""

    def model_inputs(self, batch: Any) -> tuple[Any, ...]:
        """Return the positional arguments of the model for a batch (B, ...)."""

    def optimizer(self) -> str | optax.GradientTransformation:
        """Return a library name, or an optax optimizer."""

    def schedule(self) -> str | optax.Schedule | None:
        """Return a library name, an optax schedule, or None for a constant."""

    def learning_rate_multiplier(self, parameter: Parameter) -> float:
        """Return the factor of the learning rate of a parameter."""

    @property
    def features(self) -> Sequence[Feature]:
        """Features that the config switches on, in order."""

    def list_auxiliary_states(self) -> Sequence[AuxiliaryState]:
        """Return the auxiliary states of the train state, those of hooks included."""

    def train_step(self, state: TrainState, batch: Any, key: jax.Array, accumulate_steps: int) -> Any:
        """Make one optimizer step over a batch (S, B, ...)."""

    def val_step(self, state: TrainState, batch: Any) -> Any:
        """Return the sums of the loss over a batch (S, B, ...)."""

    def identify_base(self) -> Trajectory:
        """Return the trajectory keys of the frozen weights of an adapter; empty without one. May read the weights."""


class StageContext(Protocol):
    """Dependence of a stage on the stages before it. Computing it may read the data of the first one."""

    @property
    def number(self) -> int:
        """Number of the stage; 0 before the first stage of the spec."""

    @property
    def num_steps(self) -> int:
        """Steps of the stage."""

    @property
    def schedule(self) -> optax.Schedule:
        """Learning rate of the stage by completed steps of the run."""

    @property
    def vocabulary_size(self) -> int:
        """Vocabulary size of the run."""


@dataclass(frozen=True, eq=False)
class TrainSetupBuilder:
    """Training job independent of devices; builds its `TrainSetup` on a mesh."""

    document: Document  # origin of the spec, for errors with a line
    config: TrainerConfig[Any]
    topology: Topology
    seed: int
    recipe: StepRecipe  # what the job says about its model, its optimizer and its steps
    rules: Sequence[LogicalAxisRule] = LOGICAL_AXIS_RULES
    stage: StageContext | None = None  # dependence of a stage on the stages before it; None for a run without stages

    @functools.cached_property
    def optimizer_choice(self) -> OptimizerChoice:
        """Optimizer and schedule, from the library or custom."""
        return choose_optimizer(self.recipe.optimizer(), self.recipe.schedule(), self.config)

    @functools.cached_property
    def train_step(self) -> TrainStep:
        """Train step of the job, with what its features add to it."""
        step: TrainStep = self.recipe.train_step
        for feature in self.recipe.features:
            step = feature.wrap(step)
        return step

    @functools.cached_property
    def base_identity(self) -> Trajectory:
        """Trajectory keys of the frozen weights of an adapter; empty without one. May read the weights."""
        return self.recipe.identify_base()

    @functools.cached_property
    def dataset(self) -> Dataset:
        """Data set of the spec. Reads the data on this host."""
        # A later stage has keys from the config that an earlier one may read.
        is_later_stage = self.stage is not None and self.stage.number > 0
        has_one_source = not self.config.data.mixture and not self.config.data.validation
        with self.document.errors_at("config.data.source" if has_one_source else "config.data"):
            vocabulary_size = self.vocabulary_size if self.has_vocabulary_size else None
            batch = self.config.train.global_batch_examples
            dataset = load_dataset(
                self.config.data,
                seed=self.seed,
                batch_examples=batch,
                vocabulary_size=vocabulary_size,
                may_have_unread_keys=is_later_stage,
            )
        # An unread key is an error, and only now is it known that the sources are token files.
        if not is_later_stage and dataset.tokenizer is None and not self.config.is_default("data.tokenizer"):
            raise self.document.error(
                "config.data.tokenizer", "it has no effect, because token files are tokenized already; leave it out"
            )
        # The number of examples that a stage takes from a source also depends on the stages before it.
        if self.config.data.mixture and self.stage is None:
            with self.document.errors_at("config.data.mixture"):
                dataset.validate_epochs(self.data_position.count_examples(self.config.total_steps, batch)[0])
        return dataset

    @functools.cached_property
    def fields(self) -> Fields:
        """Arrays of a batch. Data of arrays are opened for them; tokens are not read."""
        return get_batch_fields(self.config.data) if self.config.data.has_tokens else self.dataset.fields

    @functools.cached_property
    def data_position(self) -> DataPosition:
        """Position in the data by step, with the ranges that the spec skips."""
        return DataPosition.from_ranges(self.config.train.skip_steps)

    @functools.cached_property
    def config_in_steps(self) -> TrainerConfig[Any]:
        """Config with its total in steps, the same on every host. Reads the data if the total is in epochs."""
        if self.config.train.total_epochs is None:
            return self.config
        examples = self.dataset.num_train_examples
        with self.document.errors_at("config.train.total_epochs"):
            return self.config.resolve_epochs(examples)

    @functools.cached_property
    def vocabulary_size(self) -> int:
        """Vocabulary size of the spec, or that of the data if the spec says `auto`; 0 if the data are arrays."""
        if self.has_vocabulary_size:
            return int(self.config.model.vocabulary_size)
        if self.stage is not None and self.stage.number > 0:
            return self.stage.vocabulary_size
        return self.dataset.vocabulary_size

    @property
    def has_vocabulary_size(self) -> bool:
        """True if the spec itself gives the vocabulary size, so that it is known without the data."""
        return getattr(self.config.model, "vocabulary_size", "auto") != "auto"

    @property
    def needs_data(self) -> bool:
        """True if the train step depends on the data: on their arrays, vocabulary size, or number of examples."""
        data_has_tokens, is_in_epochs = self.config.data.has_tokens, self.config.train.total_epochs is not None
        return not data_has_tokens or not self.has_vocabulary_size or is_in_epochs

    def validate_keys_read(self) -> None:
        """Raise `InvalidError` with a line for each key that optimizer and schedule do not read, or need and lack.

        Also raised if the spec has an adapter, but no weights for it.
        """
        self.document.raise_problems(self.optimizer_choice.find_problems(self.config), "config.")
        checkpoint = self.document.data.get("checkpoint") or {}
        # A fork gets the frozen weights from the state of its parent.
        if self.config.adapter is not None and not (checkpoint.get("init_from") or checkpoint.get("fork_from")):
            reason = "an adapter is trained beside frozen weights; set checkpoint.init_from to them"
            raise self.document.error("config.adapter", reason)

    def make_mesh(self, devices: Sequence[jax.Device]) -> Mesh:
        """Return the mesh over these devices; the batch must divide over it. Reads no data."""
        with self.document.errors_at("topology.mesh"):
            mesh = make_mesh(resolve_mesh_sizes(self.topology.mesh, len(devices)), devices)
        self.validate_batch(mesh)
        if self.config.memory.offload_optimizer and not mesh_rules.has_host_memory(mesh):
            kind = mesh.devices.flat[0].device_kind
            raise self.document.error(
                "config.memory.offload_optimizer", f"{kind} has no pinned host memory for the optimizer; leave it out"
            )
        with self.document.errors_at("config.precision.matmul"):
            accelerator = parse_accelerator(self.topology.accelerator)
            chip = find_chip(mesh.devices.flat[0].device_kind) if accelerator is None else accelerator.chip
            validate_matmul(self.config.precision.matmul, chip)
        return mesh

    def validate_batch(self, mesh: Mesh) -> None:
        """Raise `SpecError` unless the batches divide over a mesh. Reads no tokens."""
        fields = self.fields
        with self.document.errors_at("config.train"):
            layouts = list_batch_layouts(self.config, mesh, None, fields, self.recipe.features)
        with self.document.errors_at("config.eval"):
            make_val_layout(self.config, layouts[-1])

    def fits(self, num_devices: int) -> bool:
        """Return True if mesh and batches divide over this number of devices."""
        _ = self.fields  # an error of the data is no error of the mesh
        try:
            self.validate_batch(make_abstract_mesh(resolve_mesh_sizes(self.topology.mesh, num_devices)))
        except InvalidError:
            return False
        return True

    def build(self, devices: Sequence[jax.Device], share_data: Callable[[], None] | None = None) -> TrainSetup:
        """Build the setup on these devices. Allocates nothing.

        `share_data` loads the data on every host, of which process 0 alone reads some. It is called after the checks of
        the spec, and before the vocabulary size, which is derived from the ids, is needed.
        """
        # Cheap checks first: reading the data may take minutes.
        self.validate_keys_read()
        mesh = self.make_mesh(devices)
        if share_data is not None:
            share_data()
        return self.build_on_mesh(mesh, jax.random.key(self.seed))

    def build_on_mesh(self, mesh: Mesh, key: jax.Array, example_length: int | None = None) -> TrainSetup:
        """Build the setup on a mesh. If mesh and key are abstract, no JAX backend is started.

        `example_length` is the sequence length with which the model is traced to find its shapes, by default that of
        the data. A shorter one saves time, because attention kernels of long sequences are slow to trace.
        """
        # Schedule and optimizer are made here from `config.optimizer.learning_rate`, see `runner.train.optimizer`.
        self.validate_keys_read()
        schedule = self.optimizer_choice.build_schedule(self.config, lambda: self.config_in_steps)
        if self.stage is not None and self.optimizer_choice.uses_config_rates(self.config):
            schedule = self.stage.schedule
        asked_for = []
        for feature in self.recipe.features:
            with self.document.errors_at(f"config.{feature.key}"):
                asked_for.append((feature, feature.make_auxiliary()))
        auxiliary_states = tuple(self.recipe.list_auxiliary_states())
        names = {each.name for each in auxiliary_states}
        for feature, asked in asked_for:
            if asked is not None and asked.name not in names:
                reason = "auxiliary_states of the job leaves it out; return those of super().auxiliary_states() too"
                raise self.document.error(f"config.{feature.key}", reason)

        def make_optimizer(parameters: Any) -> optax.GradientTransformation:
            with self.document.errors_at("config.optimizer"):
                parameters = jax.tree.map(
                    lambda parameter: replace(
                        parameter, rate_multiplier=self.recipe.learning_rate_multiplier(parameter)
                    ),
                    parameters,
                )
                return self.optimizer_choice.build_optimizer(self.config, schedule, parameters)

        fields = self.fields
        if example_length is not None and self.config.data.has_tokens:
            fields = get_batch_fields(self.config.data.model_copy(update={"sequence_length": example_length}))
        return build_train_setup(
            model=self.recipe.model(),
            sharded_init=self.recipe.sharded_init,
            fields=fields,
            make_optimizer=make_optimizer,
            schedule=schedule,
            mesh=mesh,
            key=key,
            auxiliary_states=auxiliary_states,
            adapter=self.config.adapter,
            compute=self.config.precision.compute,
            rules=self.rules,
            offload_optimizer=self.config.memory.offload_optimizer,
            shard_optimizer=self.config.memory.shard_optimizer,
            model_inputs=self.recipe.model_inputs,
            kernels=KernelUse(self.config.memory.attention),
        )

    def list_layouts(self, train_setup: TrainSetup, micro_batch: int | None = None) -> list[BatchLayout]:
        """Return the splits of the batch that `compile` tries, the one with the largest micro-batch first.

        `micro_batch` is the only size to try, if the spec allows it.
        """
        return list_batch_layouts(self.config, train_setup.mesh, micro_batch, self.fields, self.recipe.features)

    def trace(self, train_setup: TrainSetup, micro_batch: int | None = None) -> None:
        """Trace the train step with the largest micro-batch, which shows errors in it at little cost."""
        train_setup.trace_train(self.train_step, self.list_layouts(train_setup, micro_batch)[0])

    def trace_again(self, train_setup: TrainSetup, micro_batch: int | None = None) -> None:
        """Trace the train step once more, because the choice of kernels has changed."""
        train_setup.kernels.cases.clear()
        train_setup.kernels.slow_forms.clear()
        train_setup.traced.clear()
        train_setup.traced_val.clear()
        self.trace(train_setup, micro_batch)

    def is_language_model(self, train_setup: TrainSetup) -> bool:
        """Return True if the model returns logits over the ids of the data: its loss is then in nats a token."""
        return self.config.data.has_tokens and (train_setup.num_logits or 0) >= self.vocabulary_size

    def _validate_labels(self, num_logits: int) -> None:
        """Raise `InvalidError` if a label of the first examples has no logit; later ones are not read here."""
        count = min(_LABELS_CHECKED, self.dataset.num_train_examples)
        labels = self.dataset.read(TRAIN, 0, count).get("y", np.zeros(0))
        if np.issubdtype(labels.dtype, np.integer) and labels.ndim == 1:
            wrong = np.flatnonzero((labels < 0) | (labels >= num_logits))
            if len(wrong):
                raise InvalidError(
                    f"{self.dataset.source}: the label y of one of the first examples is {labels[wrong[0]]}, and the "
                    f"job's model returns {num_logits} logits; needs labels from 0 to {num_logits - 1}"
                )

    def validate_logits(self, train_setup: TrainSetup) -> None:
        """Raise `InvalidError` if the loss or a task of the spec needs logits that the model does not return."""
        owner = next(each for each in type(self.recipe).__mro__ if "forward" in vars(each))
        num_logits, num_ids = train_setup.num_logits, self.vocabulary_size
        if owner.__module__.partition(".")[0] == __name__.partition(".")[0] and num_logits is not None:
            if self.config.data.has_tokens and num_logits < num_ids:
                raise InvalidError(
                    f"the job's model returns {num_logits} logits for each token, and the data have {num_ids} ids; "
                    "needs as many logits as ids"
                )
            if not self.config.data.has_tokens:
                self._validate_labels(num_logits)
        for key in ("samples", "multiple_choice", "harness"):
            if getattr(self.config.eval, key) and not self.is_language_model(train_setup):
                reason = "needs a language model, and the job's model returns no logits (B, T, V); leave it out"
                raise self.document.error(f"config.eval.{key}", reason)

    def validate_steps(self, train_setup: TrainSetup, micro_batch: int | None) -> None:
        """Trace the train step to find its errors before compilation; in a new run the validation step too.

        A run is new if no micro-batch was chosen yet. A restart does not trace the validation step, to save time; an
        error in it is then found by the first evaluation.
        """
        if micro_batch is None:
            self.validate_logits(train_setup)
        self.trace(train_setup, micro_batch)
        if micro_batch is None and self.dataset.validation:
            layout = make_val_layout(self.config, self.list_layouts(train_setup)[0])
            train_setup.trace_val(self.recipe.val_step, train_setup.abstract_val_state, layout)

    def compile(self, train_setup: TrainSetup, limit_bytes: int, micro_batch: int | None = None) -> CompiledStep:
        """Compile the train step with the largest micro-batch that fits in `limit_bytes` of each device.

        With `micro_batch` only that size is tried, if the spec allows it.
        """
        compile_step = functools.partial(train_setup.compile_train, self.train_step)
        return self.compile_by(compile_step, train_setup, limit_bytes, micro_batch)

    def compile_by(
        self,
        compile_step: Callable[[BatchLayout], SizedStepT],
        train_setup: TrainSetup,
        limit_bytes: int,
        micro_batch: int | None = None,
    ) -> SizedStepT:
        """Return what `compile_step` returns for the largest micro-batch that fits; see `compile`."""
        # Outside of `errors_at`, because an error in the step is no error of the key `topology`.
        self.trace(train_setup, micro_batch)
        layouts = self.list_layouts(train_setup, micro_batch)
        with self.document.errors_at("topology"):
            by_size = {layout.micro_batch_examples: layout for layout in layouts}
            return compile_to_fit(lambda size: compile_step(by_size[size]), list(by_size), limit_bytes)

    def compile_val(self, train_setup: TrainSetup, layout: BatchLayout) -> jax.stages.Compiled:
        """Compile the validation step that belongs to a train step of this layout."""
        layout = make_val_layout(self.config, layout)
        return train_setup.compile_val(self.recipe.val_step, train_setup.abstract_val_state, layout)

    def compile_smallest(self, train_setup: TrainSetup) -> CompiledStep:
        """Compile the train step with the smallest micro-batch, whether it fits or not."""
        return train_setup.compile_train(self.train_step, self.list_layouts(train_setup)[-1])

    def resolve_spec(self, spec: ExecutionSpec, train_setup: TrainSetup, layout: BatchLayout | None) -> ExecutionSpec:
        """Return `spec` with mesh, vocabulary size and, if there is a layout, micro-batch filled in."""
        config = dict(spec.config)
        if layout is not None:
            config["train"] = config["train"] | {"micro_batch_examples": layout.micro_batch_examples}
        if "vocabulary_size" in config["model"]:
            config["model"] = config["model"] | {"vocabulary_size": self.vocabulary_size}
        mesh = self.topology.mesh.model_copy(update=train_setup.mesh_sizes)
        topology = self.topology.model_copy(update={"mesh": mesh})
        return spec.model_copy(update={"config": config, "topology": topology})
