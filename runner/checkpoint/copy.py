"""Copy a checkpoint from one directory to another, on any stores, verified on both sides."""

from concurrent.futures import ThreadPoolExecutor

from runner.checkpoint.manifest import (
    CHECKPOINTS,
    MANIFEST,
    file_problems,
    newest_manifest,
    read_manifest,
)
from runner.errors import InvalidError
from runner.storage import Store, create, digest_of

_NUM_COPIERS = 4


def copy(source: Store, name: str | None, target: Store) -> str:
    """Copy one committed checkpoint, by default the newest, to the same name in `target`; its name.

    Every byte is checked on the way, and what has arrived is checked again before its manifest commits it. Raises
    `InvalidError` if there is none, if it is damaged, or if the target has one of that name.
    """
    newest = newest_manifest(source) if name is None else None
    if name is None:
        if newest is None:
            raise InvalidError(f"{source.url}: no checkpoint is here")
        name = newest.name
    directory = f"{CHECKPOINTS}/{name}"
    try:
        manifest = read_manifest(source, directory)
    except (FileNotFoundError, ValueError) as error:
        raise InvalidError(f"{source.url}/{directory}: {error}") from error
    if target.exists(f"{directory}/{MANIFEST}"):
        raise InvalidError(f"{target.url}/{directory} is there already; nothing is overwritten")

    def copy_file(file: str) -> None:
        content = source.read(f"{directory}/{file}")
        if [len(content), digest_of(content)] != list(manifest.files[file]):
            raise InvalidError(f"{source.url}/{directory}: {file} is not what its manifest says; nothing was committed")
        target.write(f"{directory}/{file}", content)

    with ThreadPoolExecutor(_NUM_COPIERS, thread_name_prefix="copy") as pool:
        list(pool.map(copy_file, manifest.files))
    problems = file_problems(target, directory, manifest.files)
    if problems:
        raise InvalidError(f"{target.url}/{directory}: {problems[0]}; nothing was committed")
    try:
        create(target, f"{directory}/{MANIFEST}", manifest.encode())
    except FileExistsError as error:
        raise InvalidError(f"{target.url}/{directory} is there already; nothing is overwritten") from error
    return name
