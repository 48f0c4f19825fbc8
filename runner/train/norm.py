"""Norms of gradients and parameters, for rows: of all, and of each group of parameters. Pure.

A group is what lies below a top-level module, by its path (`groups`), or one parameter (`parameters`).
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

Norms = Literal["none", "groups", "parameters"]


def norms_of_job(job_class: Any) -> Norms:
    """What the config of a job's class asks for; none of a class that belongs to no job."""
    config = getattr(job_class, "config", None)
    return "none" if config is None else config.metrics.norms


def norms_of(grads: Any, params: Any, norms: Norms) -> dict[str, jax.Array]:
    """`param_norm`, and `grad_norm/<group>` and `param_norm/<group>` of each; nothing if `norms` is `none`."""
    if norms == "none":
        return {}
    found = {"param_norm": optax.tree.norm(_in_float32(params))}
    for kind, tree in {"grad_norm": grads, "param_norm": params}.items():
        for group, leaves in _groups(tree, norms).items():
            found[f"{kind}/{group}"] = optax.tree.norm(_in_float32(leaves))
    return found


def _groups(tree: Any, norms: Norms) -> dict[str, list[jax.Array]]:
    groups: dict[str, list[jax.Array]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        own = path if norms == "parameters" else path[:1]
        groups.setdefault(jax.tree_util.keystr(own, simple=True, separator="/"), []).append(leaf)
    return groups


def _in_float32(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)
