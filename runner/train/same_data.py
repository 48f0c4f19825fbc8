"""Every host trains on the same data, from the first step to the last. Called on every host."""

from runner.attempt.claim import Attempt
from runner.checkpoint.manifest import newest_manifest
from runner.data import Dataset
from runner.errors import DataError
from runner.hosts.agreement import Hosts
from runner.hosts.progress import SAVE
from runner.storage import JsonObject, Store


def share_ids(dataset: Dataset, store: Store, hosts: Hosts) -> None:
    """Have every host know which ids its token files hold, of which process 0 alone reads all.

    What an earlier attempt on the same data has found is in its manifests: of many ids none is then read again.
    """

    def find() -> JsonObject:
        manifest = newest_manifest(store) if dataset.has_unread_ids else None
        known = {} if manifest is None else manifest.identity
        is_same = known.get("config.data") == dataset.fingerprint
        believed = known.get("config.model.vocabulary_size") if is_same else None
        return {"believed": believed, "found": dataset.find_ids(believed)}

    ids = hosts.main_first(find)
    if not hosts.is_main:
        dataset.take_ids(ids["believed"], ids["found"])


def refuse_different_data(dataset: Dataset, hosts: Hosts) -> None:
    """Raise `DataError` on every host if one reads other data than process 0."""
    fingerprints = hosts.gather(dataset.fingerprint)
    different = [process for process, other in enumerate(fingerprints) if other != fingerprints[0]]
    if different:
        raise DataError(f"{dataset.source}: processes {different} read other data than process 0")


def refuse_different_questions(digest: str, hosts: Hosts) -> None:
    """Raise `DataError` on every host if one has read other questions than process 0: it would ask more, or fewer.

    An empty digest says that the spec asks none.
    """
    if not digest:
        return
    digests = hosts.gather(digest)
    different = [process for process, other in enumerate(digests) if other != digests[0]]
    if different:
        raise DataError(f"processes {different} read other questions than process 0")


def refuse_changed_data(dataset: Dataset, attempt: Attempt) -> None:
    """Before a state is saved: raise `DataError` if a token file is not what it was at the start.

    Every host looks, and hears what host 0 has seen: where they share the files all of them end with 2. A host that
    alone sees a change, in a copy of its own, ends so alone; the others then lose a peer.
    """
    problem = None
    with attempt.progress.during(SAVE):
        try:
            dataset.check()
        except DataError as error:
            problem = f"{error}; what was trained since the last commit is not saved"
        problem = attempt.hosts.agree(problem) or problem
    if problem is not None:
        raise DataError(problem)
