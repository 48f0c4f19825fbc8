"""What weights are scored on: a run's own validation sets, or any source."""

from runner.config import TokenSource
from runner.data import load_set
from runner.errors import DataError, InvalidError
from runner.inference.opening import Opened
from runner.judge.size import ScoredData, language_or_reason, own_sets
from runner.judge.text import Language, language_of
from runner.trainer import BaseTrainer

DATA = "data"  # the set that the command line names


def open_scored_data(run: Opened, named: TokenSource | None) -> ScoredData:
    """All of a source, or of the run's own validation sets as many examples as the run looks at. On every host.

    Raises `InvalidError` if there is nothing to score, or if the ids of the source mean something else to the run.
    """
    job = run.job
    data = job.config.data
    if named is not None:
        language = language_or_reason(named, data)
        _refuse_another(language, job, named)
        return ScoredData(load_set(data, DATA, named, vocabulary_size=job.vocabulary_size), {DATA: language})
    dataset = job.dataset
    dataset.refuse_vocabulary(job.vocabulary_size)
    if not dataset.validation:
        raise InvalidError(f"{run.store.url}: its spec keeps no validation set; name a source with --data")
    return own_sets(dataset, job.config)


def _refuse_another(found: Language | str, job: BaseTrainer, named: TokenSource) -> None:
    """Raise `DataError` if the ids of a source are known to mean something else than those that the run trains on."""
    try:
        own = language_of(job.config.data)
    except DataError:
        return
    if isinstance(found, Language) and found.kind != own.kind:
        raise DataError(
            f"--data {named.source}: its tokens are of another tokenizer ({found.kind.get('kind')}) than those of the "
            f"run ({own.kind.get('kind')}); tokenise it with the run's"
        )
