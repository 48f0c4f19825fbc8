"""What a job is on certain devices, before anything is allocated: drawn once, and handed down whole.

A `Design` draws it, for `run` and for `plan` alike.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import flax.linen as nn
import jax
import optax
from jax.sharding import Mesh

from runner.checkpoint.leaves import strong
from runner.config import AdapterConfig
from runner.errors import InvalidError
from runner.storage import JsonObject
from runner.train import mesh as mesh_rules
from runner.train import state as train_state
from runner.train.adapter import begin_adapter, beside_base, boxed_adapter, make_merge
from runner.train.batch_layout import BatchLayout
from runner.train.compilation import (
    CompiledStep,
    compile_lowered,
    compile_to_fit,
    lower_train_step,
    lower_val_step,
    memory_of,
    program_digest,
    trace_train_step,
    trace_val_step,
)
from runner.train.mesh import LOGICAL_AXIS_RULES, Rule
from runner.train.recipe.optimizer import in_float32
from runner.train.recipe.parameter import parameters_of
from runner.train.rider import Rider, init_riders
from runner.train.variables import PARAMS, TrainState, others


@dataclass(frozen=True)
class Blueprint:
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
    riders: Sequence[Rider] = ()
    rules: Sequence[Rule] = LOGICAL_AXIS_RULES
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
        return mesh_rules.sharding_rules(self.mesh, self.rules)

    def begun_at_params(self, state: TrainState) -> TrainState:
        """`state` with other parameters, means and all that rides along begun at these. Called on every host."""
        state = train_state.begun_at_params(state)
        if not self.riders:
            return state
        begin = jax.jit(
            lambda params: strong(init_riders(self.riders, params)),
            out_shardings=train_state.shardings_of(self.abstract_state.riders),
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
        return CompiledStep(layout, executable, program_digest(lowered), memory_of(executable), options)

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


def draw(
    model: nn.Module,
    sharded_init: Callable[..., tuple[Any, Any]],
    example: jax.ShapeDtypeStruct,
    make_optimizer: Callable[[Any], optax.GradientTransformation],
    schedule: optax.Schedule | None,
    mesh: Mesh,
    key: jax.Array,
    riders: Sequence[Rider] = (),
    adapter: tuple[AdapterConfig, str] | None = None,
    rules: Sequence[Rule] = LOGICAL_AXIS_RULES,
) -> Blueprint:
    """The blueprint of `model` on `mesh`. Allocates nothing; neither mesh nor key needs real devices.

    `sharded_init(model, key, tokens, mesh=..., deterministic=...)` makes the variables, and says how they lie;
    `example` is what the model is shown to find its shapes; `make_optimizer` takes a pytree of `Parameter`. `adapter`,
    if any, is trained instead of the model's own parameters; with it the type of compute.
    """

    def variables(key: jax.Array, init: Callable[..., Any], **options: Any) -> Any:
        return init(key, jax.numpy.zeros(example.shape, example.dtype), deterministic=True, **options)

    born = functools.partial(variables, init=functools.partial(sharded_init, model), mesh=mesh)
    boxed = jax.eval_shape(functools.partial(variables, init=model.init), key)
    trained = boxed[PARAMS] if adapter is None else boxed_adapter(boxed[PARAMS], adapter[0])
    merge = None if adapter is None else make_merge(*adapter)
    optimizer = in_float32(make_optimizer(parameters_of(trained)))
    shapes, shardings = nn.unbox(boxed), train_state.variable_shardings(boxed, mesh, rules)
    if sharded_init is not train_state.sharded_init:  # whose variables are known without tracing it
        shapes, shardings = _variables_of(born, key, mesh, rules)
        if _names(shapes) != _names(nn.unbox(boxed)):
            raise InvalidError("sharded_init returns other parameters or variables than the model's, by their names")

    def make_state(variables: Any) -> TrainState:
        return train_state.state_of(model, variables, optimizer, riders, merge)

    def begin(key: jax.Array) -> Any:
        own = born(key)[0]
        return own if adapter is None else beside_base(own, begin_adapter(trained, key))

    if adapter is not None:
        shapes = beside_base(shapes, nn.unbox(trained))
        shardings = beside_base(shardings, train_state.variable_shardings(trained, mesh, rules))
    abstract = train_state.abstract_state(make_state, shapes, shardings[PARAMS], mesh, others(shardings))
    return Blueprint(mesh, key, schedule, optimizer, abstract, lambda key: make_state(begin(key)), riders, rules=rules)


def _variables_of(
    born: Callable[[jax.Array], tuple[Any, Any]], key: jax.Array, mesh: Mesh, rules: Sequence[Rule]
) -> tuple[Any, Any]:
    """Shapes and shardings of the variables that `born` makes, which is traced and not run."""
    found: list[Any] = []

    def variables(key: jax.Array) -> Any:
        made, shardings = born(key)
        found.append(shardings)
        return made

    with mesh_rules.sharding_rules(mesh, rules):
        return jax.eval_shape(variables, key), found[0]


def _names(tree: Any) -> list[str]:
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
