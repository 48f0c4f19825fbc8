"""What `checkpoint.init_from` names: another run, or weights of others in Hugging Face's layout."""

from collections.abc import Callable
from typing import Any

import jax

from runner.attempt.claim import Attempt
from runner.checkpoint.checkpointer import Checkpointer
from runner.checkpoint.leaves import named
from runner.checkpoint.restore import check_source as check_run
from runner.checkpoint.weights import BEST, find_checkpoint
from runner.errors import InvalidError, StorageError
from runner.record import PARAMS
from runner.spec import Document, InitFrom
from runner.storage import Store, open_store, split_checkpoint
from runner.terminal import warn
from runner.weights.directory import Published, is_published, open_published
from runner.weights.family import Family
from runner.weights.match import Match, match
from runner.weights.read import read_leaf

FamilyOf = Callable[[], Family | None]


def check_source(document: Document, rule: InitFrom | None, family: FamilyOf, weights: Callable[[], Any]) -> None:
    """Refuse, with every line of what does not fit, weights that could not be begun with. Reads headers alone.

    `weights` gives the abstract leaves that are to be filled. Main host only. Nothing if there is no rule.
    """
    if rule is None:
        return
    with document.blaming("checkpoint.init_from"):
        store = _published_store(rule)
        if store is None:
            check_run(_named(rule.path), rule.weights)
        else:
            _match(open_published(store), rule, family, weights())


def load_source(
    document: Document, rule: InitFrom, family: FamilyOf, weights: Any, checkpointer: Checkpointer, attempt: Attempt
) -> Any:
    """Leaves like those of `weights`, which lie as the state does at its init. Called on every host.

    Raises `InvalidError` or `StorageError` on every host if one cannot read them.
    """
    with document.blaming("checkpoint.init_from"):
        store = _published_store(rule)
        if store is None:
            path = attempt.hosts.main_first(lambda: _named(rule.path))
            return checkpointer.load_weights(path, weights, rule.weights)
        loaded, problem = None, None
        told: tuple[str, ...] = ()
        try:
            loaded, told = _load(store, rule, family, weights)
        except (InvalidError, FileNotFoundError) as error:
            problem = ["invalid", str(error)]
        except OSError as error:
            problem = ["storage", str(error)]
        first = next((other for other in attempt.hosts.gather(problem) if other is not None), None)
        if first is not None:
            raise InvalidError(first[1]) if first[0] == "invalid" else StorageError(first[1])
    if attempt.hosts.is_main:
        for line in told:
            warn(line)
    attempt.say(f"weights taken from {store.url}")
    return loaded


def _named(path: str) -> str:
    """`path`, where it ends in `checkpoints/best` with the step that is the best now. On one host."""
    return find_checkpoint(path)[0] if split_checkpoint(path)[1] == BEST else path


def _published_store(rule: InitFrom) -> Store | None:
    """Where the weights of others are; None if the rule names a run, of which all is taken as it is."""
    directory, name = split_checkpoint(rule.path)
    store = open_store(directory)
    if name is None and is_published(store):
        if rule.weights != PARAMS:
            raise InvalidError(f"weights: nothing reads it: {rule.path}, in Hugging Face's layout, has no averages")
        return store
    for key in ("allow_missing", "rename"):
        if getattr(rule, key):
            raise InvalidError(
                f"{key}: nothing reads it: {rule.path} is not in Hugging Face's layout, and of a run all weights are "
                "taken as they are; export the run, and begin with that"
            )
    return None


def _match(published: Published, rule: InitFrom, family: FamilyOf, weights: Any) -> Match:
    known = family()
    if known is None:
        raise InvalidError(
            f"{published.store.url} is in Hugging Face's layout, and the job does not say how its weights are called "
            "there: see `family` of BaseTrainer"
        )
    return match(published, known, {name: leaf.shape for name, leaf in named(weights).items()}, rule)


def _load(store: Store, rule: InitFrom, family: FamilyOf, weights: Any) -> tuple[Any, tuple[str, ...]]:
    """The leaves, each host its part, and what was allowed, a line each."""
    published = open_published(store)
    found = _match(published, rule, family, weights)
    leaves = [read_leaf(store, published.versions, found.pieces[name], leaf) for name, leaf in named(weights).items()]
    return jax.tree.unflatten(jax.tree.structure(weights), leaves), found.told
