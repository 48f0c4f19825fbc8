"""What a training job is before any device is touched, and how it is drawn on devices.

Of the spec: made with the job, its parts whole when they are first asked for. `run` and `plan` draw from the same one,
the former over the devices at hand, the latter over faked ones or those of a TPU topology.

What a job is on certain devices, before anything is allocated: drawn once, and handed down whole.

A `TrainSetupBuilder` draws it, for `run` and for `plan` alike.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from runner.checkpoint.leaves import make_strongly_typed
from runner.config import AdapterConfig, TrainerConfig
from runner.data import Dataset, load_dataset
from runner.errors import InvalidError
from runner.optim.groups import Parameter, describe_parameters, get_unit_rate
from runner.optim.library import update_in_float32
from runner.parallel import mesh as mesh_rules
from runner.parallel.mesh import (
    LOGICAL_AXIS_RULES,
    LogicalAxisRule,
    build_logical_axis_rules,
    make_mesh,
    resolve_mesh_sizes,
)
from runner.spec import Document, ExecutionSpec, Topology, Trajectory
from runner.storage import JsonObject
from runner.train import state as train_state
from runner.train.batch_layout import BatchLayout, list_batch_layouts
from runner.train.compile import (
    CompiledStep,
    compile_lowered,
    compile_to_fit,
    compute_program_digest,
    get_program_memory,
    lower_train_step,
    lower_val_step,
    trace_train_step,
    trace_val_step,
)
from runner.train.lora import combine_with_base, init_adapter, make_abstract_adapter, make_merge, merge_adapter
from runner.train.optimizer import OptimizerChoice, choose_optimizer
from runner.train.state import PARAMS, AuxiliaryState, TrainState, drop_params, init_auxiliary


@dataclass(frozen=True)
class TrainSetup:
    """The abstract job on one mesh.

    Attributes:
        key: the run's random key; that of step k is `fold_in(key, k)`.
        schedule: learning rate by completed steps; None where the job's own optimizer keeps it to itself.
        optimizer: the whole optax transformation, clipping included; it works in float32.
        abstract_state: shape, dtype and sharding of every leaf.
        make_state: the state at step 0 from a key; to be jitted with the shardings of `abstract_state`.
        riders: what rides along with the parameters in the state.
        rules: what logical axis names mean in the model.
        traced, traced_val: train and validation steps that were traced and not compiled yet, by micro-batch: nothing is
            traced twice.
    """

    mesh: Mesh
    key: jax.Array
    schedule: optax.Schedule | None
    optimizer: optax.GradientTransformation
    abstract_state: TrainState
    make_state: Callable[[jax.Array], TrainState]
    riders: Sequence[AuxiliaryState] = ()
    rules: Sequence[LogicalAxisRule] = LOGICAL_AXIS_RULES
    traced: dict[int, jax.stages.Traced] = field(default_factory=dict, repr=False, compare=False)
    traced_val: dict[int, jax.stages.Traced] = field(default_factory=dict, repr=False, compare=False)

    @property
    def mesh_sizes(self) -> dict[str, int]:
        """Devices by axis."""
        return {axis: int(size) for axis, size in self.mesh.shape.items()}

    def hardware(self, num_processes: int) -> JsonObject:
        """What the micro-batch was chosen for."""
        kind = self.mesh.devices.flat[0].device_kind
        return {"mesh": self.mesh_sizes, "device_kind": kind, "processes": num_processes}

    def init_state(self) -> TrainState:
        """The state at step 0, born sharded. Called on every host."""
        with self.sharding_rules():
            return train_state.init_state(self.make_state, self.key, self.abstract_state, self.mesh)

    def sharding_rules(self) -> contextlib.AbstractContextManager[None]:
        """Inside, logical axis names in the model mean axes of the mesh by the job's rules."""
        return mesh_rules.use_sharding_rules(self.mesh, self.rules)

    def restart_averages(self, state: TrainState) -> TrainState:
        """`state` with other parameters, means and all that rides along begun at these. Called on every host."""
        state = train_state.restart_averages(state)
        if not self.riders:
            return state
        begin = jax.jit(
            lambda params: make_strongly_typed(init_auxiliary(self.riders, params)),
            out_shardings=train_state.get_shardings(self.abstract_state.riders),
        )
        with self.sharding_rules():
            return state.replace(riders=begin(state.params))

    def trace_train(self, train_step: Callable[..., Any], layout: BatchLayout) -> None:
        """Trace `train_step` for one split of the batch. Raises `InvalidError` if a row cannot hold its meta."""
        if layout.micro_batch_examples not in self.traced:
            with self.sharding_rules():
                traced = trace_train_step(train_step, self.schedule, self.abstract_state, self.key, layout, self.riders)
            self.traced[layout.micro_batch_examples] = traced

    def compile_train(self, train_step: Callable[..., Any], layout: BatchLayout) -> CompiledStep:
        """Compile `train_step` for one split of the batch."""
        self.trace_train(train_step, layout)
        with self.sharding_rules():
            lowered = lower_train_step(self.traced.pop(layout.micro_batch_examples), layout)
        executable, options = compile_lowered(lowered, layout)
        return CompiledStep(
            layout, executable, compute_program_digest(lowered), get_program_memory(executable), options
        )

    def compile_to_fit(
        self, train_step: Callable[..., Any], layouts: Sequence[BatchLayout], limit_bytes: int
    ) -> CompiledStep:
        """Compile with the first of `layouts` (largest micro-batch first) that fits into `limit_bytes` of a device."""
        by_size = {layout.micro_batch_examples: layout for layout in layouts}
        return compile_to_fit(lambda size: self.compile_train(train_step, by_size[size]), list(by_size), limit_bytes)

    def compile_val(
        self, val_step: Callable[..., Any], abstract: TrainState, layout: BatchLayout
    ) -> jax.stages.Compiled:
        """Compile `val_step` for the same split; of the state it is shown what `abstract` has."""
        self.trace_val(val_step, abstract, layout)
        with self.sharding_rules():
            lowered = lower_val_step(self.traced_val.pop(layout.micro_batch_examples), layout)
        return compile_lowered(lowered, layout)[0]

    def trace_val(self, val_step: Callable[..., Any], abstract: TrainState, layout: BatchLayout) -> None:
        """Trace `val_step` for one split of the batch. Raises `InvalidError` if a row cannot hold its meta."""
        if layout.micro_batch_examples not in self.traced_val:
            with self.sharding_rules():
                self.traced_val[layout.micro_batch_examples] = trace_val_step(val_step, abstract, layout)


def build_train_setup(
    model: nn.Module,
    sharded_init: Callable[..., tuple[Any, Any]],
    example: jax.ShapeDtypeStruct,
    make_optimizer: Callable[[Any], optax.GradientTransformation],
    schedule: optax.Schedule | None,
    mesh: Mesh,
    key: jax.Array,
    riders: Sequence[AuxiliaryState] = (),
    adapter: tuple[AdapterConfig, str] | None = None,
    rules: Sequence[LogicalAxisRule] = LOGICAL_AXIS_RULES,
) -> TrainSetup:
    """The blueprint of `model` on `mesh`. Allocates nothing; neither mesh nor key needs real devices.

    `sharded_init(model, key, tokens, mesh=..., deterministic=...)` makes the variables, and says how they lie;
    `example` is what the model is shown to find its shapes; `make_optimizer` takes a pytree of `Parameter`. `adapter`,
    if any, is trained instead of the model's own parameters; with it the type of compute.
    """

    def variables(key: jax.Array, init: Callable[..., Any], **options: Any) -> Any:
        return init(key, jax.numpy.zeros(example.shape, example.dtype), deterministic=True, **options)

    born = functools.partial(variables, init=functools.partial(sharded_init, model), mesh=mesh)
    boxed = jax.eval_shape(functools.partial(variables, init=model.init), key)
    trained = boxed[PARAMS] if adapter is None else make_abstract_adapter(boxed[PARAMS], adapter[0])
    merge = None if adapter is None else make_merge(*adapter)
    optimizer = update_in_float32(make_optimizer(describe_parameters(trained)))
    shapes, shardings = nn.unbox(boxed), train_state.compute_variable_shardings(boxed, mesh, rules)
    if sharded_init is not train_state.sharded_init:  # whose variables are known without tracing it
        shapes, shardings = _variables_of(born, key, mesh, rules)
        if _names(shapes) != _names(nn.unbox(boxed)):
            raise InvalidError("sharded_init returns other parameters or variables than the model's, by their names")

    def make_state(variables: Any) -> TrainState:
        return train_state.make_state_from_variables(model, variables, optimizer, riders, merge)

    def begin(key: jax.Array) -> Any:
        own = born(key)[0]
        return own if adapter is None else combine_with_base(own, init_adapter(trained, key))

    if adapter is not None:
        shapes = combine_with_base(shapes, nn.unbox(trained))
        shardings = combine_with_base(shardings, train_state.compute_variable_shardings(trained, mesh, rules))
    abstract = train_state.make_abstract_state(make_state, shapes, shardings[PARAMS], mesh, drop_params(shardings))
    return TrainSetup(mesh, key, schedule, optimizer, abstract, lambda key: make_state(begin(key)), riders, rules=rules)


def _variables_of(
    born: Callable[[jax.Array], tuple[Any, Any]], key: jax.Array, mesh: Mesh, rules: Sequence[LogicalAxisRule]
) -> tuple[Any, Any]:
    """Shapes and shardings of the variables that `born` makes, which is traced and not run."""
    found: list[Any] = []

    def variables(key: jax.Array) -> Any:
        made, shardings = born(key)
        found.append(shardings)
        return made

    with mesh_rules.use_sharding_rules(mesh, rules):
        return jax.eval_shape(variables, key), found[0]


def _names(tree: Any) -> list[str]:
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


@dataclass(frozen=True, eq=False)
class TrainSetupBuilder:
    """The job on no devices yet. `document` is where the spec came from, for errors with a line.

    The callables are those of the job's class: `model`, `optimizer` and `schedule` say what it trains and how, and are
    called when that is first asked for; the others are functions of their arguments alone. `rules` say what logical
    axis names mean.
    """

    document: Document
    config: TrainerConfig[Any]
    topology: Topology
    seed: int
    model: Callable[[], nn.Module]
    optimizer: Callable[[], str | optax.GradientTransformation]
    schedule: Callable[[], str | optax.Schedule | None]
    sharded_init: Callable[..., tuple[Any, Any]]
    train_step: Callable[..., Any]
    val_step: Callable[..., Any]
    riders: Callable[[], Sequence[AuxiliaryState]] = tuple
    rules: Sequence[LogicalAxisRule] = LOGICAL_AXIS_RULES
    name_base: Callable[[], Trajectory] = dict
    learning_rate_multiplier: Callable[[Parameter], float] = get_unit_rate

    @functools.cached_property
    def optimizer_choice(self) -> OptimizerChoice:
        """Optimizer and schedule: of the library, or the job's own."""
        return choose_optimizer(self.optimizer(), self.schedule(), self.config)

    @functools.cached_property
    def base(self) -> Trajectory:
        """What names the weights that an adapter is trained beside, in the trajectory. Reads of them on this host."""
        return self.name_base()

    @functools.cached_property
    def dataset(self) -> Dataset:
        """The tokens that the spec names. Reads the data on this host."""
        is_one = not self.config.data.mixture and not self.config.data.validation
        with self.document.errors_at("config.data.source" if is_one else "config.data"):
            named = self.vocabulary_size if self.has_vocabulary_size else None
            batch = self.config.train.global_batch_examples
            dataset = load_dataset(self.config.data, seed=self.seed, batch_examples=batch, vocabulary_size=named)
        if dataset.tokenizer is None and not self.config.is_default("data.tokenizer"):
            raise self.document.error("config.data.tokenizer", "nothing reads it, token files hold tokens")
        if self.config.data.mixture:
            with self.document.errors_at("config.data.mixture"):
                dataset.validate_epochs(self.config.total_steps * self.config.train.global_batch_examples)
        return dataset

    @functools.cached_property
    def config_in_steps(self) -> TrainerConfig[Any]:
        """The config with its total in steps, the same on every host. Of epochs it reads the data on this host."""
        if self.config.train.total_epochs is None:
            return self.config
        examples = self.dataset.num_train_examples
        with self.document.errors_at("config.train.total_epochs"):
            return self.config.resolve_epochs(examples)

    @functools.cached_property
    def vocabulary_size(self) -> int:
        """The spec's, or the data's if that says `auto`."""
        return int(self.config.model.vocabulary_size) if self.has_vocabulary_size else self.dataset.vocabulary_size

    @property
    def has_vocabulary_size(self) -> bool:
        """Whether the spec itself gives the vocabulary's size: then it is known without the data."""
        return getattr(self.config.model, "vocabulary_size", "auto") != "auto"

    @property
    def needs_data(self) -> bool:
        """Whether the data alone tell what the train step is: the vocabulary's size, or the total."""
        return not self.has_vocabulary_size or self.config.train.total_epochs is not None

    def validate_keys_read(self) -> None:
        """Raise `InvalidError` with a line for each key that optimizer and schedule leave unread, or lack.

        Also if an adapter has nothing to be trained beside.
        """
        self.document.raise_problems(self.optimizer_choice.find_problems(self.config), "config.")
        if self.config.adapter is not None and not (self.document.data.get("checkpoint") or {}).get("init_from"):
            needs = "an adapter is trained beside weights that stand still; set checkpoint.init_from to them"
            raise self.document.error("config.adapter", needs)

    def make_mesh(self, devices: Sequence[jax.Device]) -> Mesh:
        """The mesh over these devices, over which the batch must divide. Reads no data."""
        with self.document.errors_at("topology.mesh"):
            mesh = make_mesh(resolve_mesh_sizes(self.topology.mesh, len(devices)), devices)
        with self.document.errors_at("config.train"):
            list_batch_layouts(self.config, mesh)
        return mesh

    def build(self, devices: Sequence[jax.Device], share_ids: Callable[[Dataset], None] | None = None) -> TrainSetup:
        """The job on these devices: mesh, optimizer, and the abstract state. Allocates nothing.

        `share_ids` is called with the data when the spec has been checked, before the vocabulary is asked for.
        """
        self.validate_keys_read()
        mesh = self.make_mesh(devices)
        if share_ids is not None:
            share_ids(self.dataset)
        return self.build_on_mesh(mesh, jax.random.key(self.seed))

    def build_on_mesh(self, mesh: Mesh, key: jax.Array, row_length: int | None = None) -> TrainSetup:
        """The job on a mesh, which may be abstract, with a key, which may be too: then no backend is started.

        `row_length` is that of the row which the model is shown to find its shapes, by default as the data have it: the
        kernels of long rows take long to trace.
        """
        self.validate_keys_read()
        schedule = self.optimizer_choice.build_schedule(self.config, lambda: self.config_in_steps)
        example = jax.ShapeDtypeStruct((1, row_length or self.config.data.sequence_length), jnp.int32)

        def make_optimizer(parameters: Any) -> optax.GradientTransformation:
            with self.document.errors_at("config.optimizer"):
                rated = jax.tree.map(
                    lambda parameter: replace(parameter, rate=self.learning_rate_multiplier(parameter)), parameters
                )
                return self.optimizer_choice.build_optimizer(self.config, schedule, rated)

        riders = tuple(self.riders())
        rule, compute = self.config.adapter, self.config.precision.compute
        adapter = None if rule is None else (rule, compute)
        init = self.sharded_init
        return build_train_setup(
            self.model(), init, example, make_optimizer, schedule, mesh, key, riders, adapter, self.rules
        )

    def trace(self, train_setup: TrainSetup, micro_batch: int | None = None) -> None:
        """Trace the train step with the micro-batch that `compile` tries first: errors in it show, cheaply."""
        train_setup.trace_train(self.train_step, self.largest_layout(train_setup, micro_batch))

    def largest_layout(self, train_setup: TrainSetup, micro_batch: int | None = None) -> BatchLayout:
        """The split of the batch that `compile` tries first: with the largest micro-batch that the spec allows."""
        return list_batch_layouts(self.config, train_setup.mesh, micro_batch)[0]

    def check(self, train_setup: TrainSetup, micro_batch: int | None) -> None:
        """Trace the train step, and the validation step of a run that has no micro-batch yet: errors in them show.

        A run that has one has evaluated before, or refuses when it first does: no restart waits for this.
        """
        self.trace(train_setup, micro_batch)
        if micro_batch is None and self.dataset.validation:
            abstract = merge_adapter(train_setup.abstract_state).replace(opt_state=(), riders={})
            train_setup.trace_val(self.val_step, abstract, self.largest_layout(train_setup))

    def compile(self, train_setup: TrainSetup, limit_bytes: int, micro_batch: int | None = None) -> CompiledStep:
        """The train step with the largest micro-batch that fits into `limit_bytes` of each device.

        With `micro_batch` only that size is tried, if the spec allows it.
        """
        self.trace(train_setup, micro_batch)  # what is wrong with the step is not the topology's fault
        layouts = list_batch_layouts(self.config, train_setup.mesh, micro_batch)
        with self.document.errors_at("topology"):
            return train_setup.compile_to_fit(self.train_step, layouts, limit_bytes)

    def resolve_spec(self, spec: ExecutionSpec, train_setup: TrainSetup, layout: BatchLayout) -> ExecutionSpec:
        """`spec` with mesh, vocabulary and micro-batch filled in."""
        config = dict(spec.config)
        config["train"] = config["train"] | {"micro_batch_examples": layout.micro_batch_examples}
        if "vocabulary_size" in config["model"]:
            config["model"] = config["model"] | {"vocabulary_size": self.vocabulary_size}
        mesh = self.topology.mesh.model_copy(update=train_setup.mesh_sizes)
        topology = self.topology.model_copy(update={"mesh": mesh})
        return spec.model_copy(update={"config": config, "topology": topology})

    def compile_smallest(self, train_setup: TrainSetup) -> CompiledStep:
        """The train step with the smallest micro-batch, whether it fits or not."""
        return train_setup.compile_train(self.train_step, list_batch_layouts(self.config, train_setup.mesh)[-1])


def make_setup_builder(
    job: Any, riders: Callable[[], Sequence[AuxiliaryState]], name_base: Callable[[], Trajectory]
) -> TrainSetupBuilder:
    """The design of a trainer, by its methods; `riders` gives what rides along in its state."""
    return TrainSetupBuilder(
        document=job.document,
        config=job.config,
        topology=job.topology,
        seed=job.spec.seed,
        model=job.model,
        optimizer=job.optimizer,
        schedule=job.schedule,
        sharded_init=job.sharded_init,
        train_step=job.train_step,
        val_step=job.val_step,
        riders=riders,
        rules=build_logical_axis_rules(job.logical_axis_rules, type(job).__name__),
        name_base=name_base,
        learning_rate_multiplier=job.learning_rate_multiplier,
    )
