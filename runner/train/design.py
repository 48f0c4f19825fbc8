"""What a training job is before any device is touched, and how it is drawn on devices.

Of the spec: made with the job, its parts whole when they are first asked for. `run` and `plan` draw from the same one,
the former over the devices at hand, the latter over faked ones or those of a TPU topology.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from runner.config import TrainerConfig
from runner.data import Dataset, load_dataset
from runner.spec import Document, ExecutionSpec, Topology, Trajectory
from runner.train.adapter import model_state
from runner.train.batch_layout import BatchLayout, batch_layouts
from runner.train.blueprint import Blueprint, draw
from runner.train.compilation import CompiledStep
from runner.train.mesh import LOGICAL_AXIS_RULES, Rule, logical_rules, make_mesh, mesh_sizes
from runner.train.recipe.choice import Recipe, choose_recipe
from runner.train.recipe.parameter import Parameter, one_rate
from runner.train.rider import Rider


@dataclass(frozen=True, eq=False)
class Design:
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
    riders: Callable[[], Sequence[Rider]] = tuple
    rules: Sequence[Rule] = LOGICAL_AXIS_RULES
    name_base: Callable[[], Trajectory] = dict
    rate_of: Callable[[Parameter], float] = one_rate

    @functools.cached_property
    def recipe(self) -> Recipe:
        """Optimizer and schedule: of the library, or the job's own."""
        return choose_recipe(self.optimizer(), self.schedule(), self.config)

    @functools.cached_property
    def base(self) -> Trajectory:
        """What names the weights that an adapter is trained beside, in the trajectory. Reads of them on this host."""
        return self.name_base()

    @functools.cached_property
    def dataset(self) -> Dataset:
        """The tokens that the spec names. Reads the data on this host."""
        is_one = not self.config.data.mixture and not self.config.data.validation
        with self.document.blaming("config.data.source" if is_one else "config.data"):
            named = self.vocabulary_size if self.names_vocabulary else None
            batch = self.config.train.global_batch_examples
            dataset = load_dataset(self.config.data, seed=self.seed, batch_examples=batch, vocabulary_size=named)
        if dataset.tokenizer is None and not self.config.is_default("data.tokenizer"):
            raise self.document.error("config.data.tokenizer", "nothing reads it, token files hold tokens")
        if self.config.data.mixture:
            with self.document.blaming("config.data.mixture"):
                dataset.refuse_epochs(self.config.total_steps * self.config.train.global_batch_examples)
        return dataset

    @functools.cached_property
    def counted(self) -> TrainerConfig[Any]:
        """The config with its total in steps, the same on every host. Of epochs it reads the data on this host."""
        if self.config.train.total_epochs is None:
            return self.config
        examples = self.dataset.num_train_examples
        with self.document.blaming("config.train.total_epochs"):
            return self.config.counted(examples)

    @functools.cached_property
    def vocabulary_size(self) -> int:
        """The spec's, or the data's if that says `auto`."""
        return int(self.config.model.vocabulary_size) if self.names_vocabulary else self.dataset.vocabulary_size

    @property
    def names_vocabulary(self) -> bool:
        """Whether the spec itself gives the vocabulary's size: then it is known without the data."""
        return getattr(self.config.model, "vocabulary_size", "auto") != "auto"

    @property
    def needs_data(self) -> bool:
        """Whether the data alone tell what the train step is: the vocabulary's size, or the total."""
        return not self.names_vocabulary or self.config.train.total_epochs is not None

    def refuse_unread_keys(self) -> None:
        """Raise `InvalidError` with a line for each key that optimizer and schedule leave unread, or lack.

        Also if an adapter has nothing to be trained beside.
        """
        self.document.refuse(self.recipe.problems(self.config), "config.")
        if self.config.adapter is not None and not (self.document.data.get("checkpoint") or {}).get("init_from"):
            needs = "an adapter is trained beside weights that stand still; set checkpoint.init_from to them"
            raise self.document.error("config.adapter", needs)

    def lay_out(self, devices: Sequence[jax.Device]) -> Mesh:
        """The mesh over these devices, over which the batch must divide. Reads no data."""
        with self.document.blaming("topology.mesh"):
            mesh = make_mesh(mesh_sizes(self.topology.mesh, len(devices)), devices)
        with self.document.blaming("config.train"):
            batch_layouts(self.config, mesh)
        return mesh

    def draw(self, devices: Sequence[jax.Device], share_ids: Callable[[Dataset], None] | None = None) -> Blueprint:
        """The job on these devices: mesh, optimizer, and the abstract state. Allocates nothing.

        `share_ids` is called with the data when the spec has been checked, before the vocabulary is asked for.
        """
        self.refuse_unread_keys()
        mesh = self.lay_out(devices)
        if share_ids is not None:
            share_ids(self.dataset)
        return self.draw_on(mesh, jax.random.key(self.seed))

    def draw_on(self, mesh: Mesh, key: jax.Array, row_length: int | None = None) -> Blueprint:
        """The job on a mesh, which may be abstract, with a key, which may be too: then no backend is started.

        `row_length` is that of the row which the model is shown to find its shapes, by default as the data have it: the
        kernels of long rows take long to trace.
        """
        self.refuse_unread_keys()
        schedule = self.recipe.schedule_of(self.config, lambda: self.counted)
        example = jax.ShapeDtypeStruct((1, row_length or self.config.data.sequence_length), jnp.int32)

        def make_optimizer(parameters: Any) -> optax.GradientTransformation:
            with self.document.blaming("config.optimizer"):
                rated = jax.tree.map(lambda parameter: replace(parameter, rate=self.rate_of(parameter)), parameters)
                return self.recipe.optimizer_of(self.config, schedule, rated)

        riders = tuple(self.riders())
        rule, compute = self.config.adapter, self.config.precision.compute
        adapter = None if rule is None else (rule, compute)
        init = self.sharded_init
        return draw(self.model(), init, example, make_optimizer, schedule, mesh, key, riders, adapter, self.rules)

    def trace(self, blueprint: Blueprint, micro_batch: int | None = None) -> None:
        """Trace the train step with the micro-batch that `compile` tries first: errors in it show, cheaply."""
        blueprint.trace_train(self.train_step, self.first_layout(blueprint, micro_batch))

    def first_layout(self, blueprint: Blueprint, micro_batch: int | None = None) -> BatchLayout:
        """The split of the batch that `compile` tries first: with the largest micro-batch that the spec allows."""
        return batch_layouts(self.config, blueprint.mesh, micro_batch)[0]

    def check(self, blueprint: Blueprint, micro_batch: int | None) -> None:
        """Trace the train step, and the validation step of a run that has no micro-batch yet: errors in them show.

        A run that has one has evaluated before, or refuses when it first does: no restart waits for this.
        """
        self.trace(blueprint, micro_batch)
        if micro_batch is None and self.dataset.validation:
            abstract = model_state(blueprint.abstract_state).replace(opt_state=(), riders={})
            blueprint.trace_val(self.val_step, abstract, self.first_layout(blueprint))

    def compile(self, blueprint: Blueprint, limit_bytes: int, micro_batch: int | None = None) -> CompiledStep:
        """The train step with the largest micro-batch that fits into `limit_bytes` of each device.

        With `micro_batch` only that size is tried, if the spec allows it.
        """
        self.trace(blueprint, micro_batch)  # what is wrong with the step is not the topology's fault
        layouts = batch_layouts(self.config, blueprint.mesh, micro_batch)
        with self.document.blaming("topology"):
            return blueprint.compile_to_fit(self.train_step, layouts, limit_bytes)

    def resolved(self, spec: ExecutionSpec, blueprint: Blueprint, layout: BatchLayout) -> ExecutionSpec:
        """`spec` with mesh, vocabulary and micro-batch filled in."""
        config = dict(spec.config)
        config["train"] = config["train"] | {"micro_batch_examples": layout.micro_batch_examples}
        if "vocabulary_size" in config["model"]:
            config["model"] = config["model"] | {"vocabulary_size": self.vocabulary_size}
        mesh = self.topology.mesh.model_copy(update=blueprint.mesh_sizes)
        topology = self.topology.model_copy(update={"mesh": mesh})
        return spec.model_copy(update={"config": config, "topology": topology})

    def compile_smallest(self, blueprint: Blueprint) -> CompiledStep:
        """The train step with the smallest micro-batch, whether it fits or not."""
        return blueprint.compile_train(self.train_step, batch_layouts(self.config, blueprint.mesh)[-1])


def design_of(job: Any, riders: Callable[[], Sequence[Rider]], name_base: Callable[[], Trajectory]) -> Design:
    """The design of a trainer, by its methods; `riders` gives what rides along in its state."""
    return Design(
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
        rules=logical_rules(job.logical_axis_rules, type(job).__name__),
        name_base=name_base,
        rate_of=job.rate_of,
    )
