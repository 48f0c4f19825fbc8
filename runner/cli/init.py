"""`init`: write a model and its spec, as the first two files of a repository of one's own."""

import contextlib
import keyword
import re
import sys
from importlib import resources, util
from pathlib import Path

from runner.cli.arguments import InitArguments
from runner.console import say
from runner.errors import EXIT_DONE, InvalidError

_MAX_CHARACTERS = 40


def write_first_files(arguments: InitArguments) -> int:
    """Write `NAME.py` and `NAME.yaml` into the working directory, and a `.gitignore` for the runs if there is none.

    Raises `InvalidError`, and writes nothing, if a file is there already, or the name cannot be that of a module.
    """
    name = arguments.name
    if re.fullmatch(r"[a-z][a-z0-9_]*", name) is None or keyword.iskeyword(name) or len(name) > _MAX_CHARACTERS:
        raise InvalidError(
            f"init {name!r:.100}: needs a lower case letter, then such letters, digits and '_', and no keyword"
        )
    paths = {kind: Path(f"{name}{suffix}") for kind, suffix in (("model", ".py"), ("spec", ".yaml"))}
    for path in paths.values():
        if path.exists() or path.is_symlink():
            raise InvalidError(f"init {name}: {path} exists already; choose another name")
    # A module of this name would not be found, or hide one that the runner imports.
    if name in sys.stdlib_module_names or util.find_spec(name) is not None:
        raise InvalidError(
            f"init {name}: a module {name} is installed already, and would be imported instead; choose another name"
        )
    title = "".join(part.capitalize() for part in name.split("_"))
    for kind, path in paths.items():
        text = resources.files(__package__).joinpath("template", f"{kind}.txt").read_text(encoding="utf-8")
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text.format(name=name, title=title))
        except OSError as error:
            raise InvalidError(f"init {name}: cannot write {path}: {error.strerror}") from None
    with contextlib.suppress(OSError), Path(".gitignore").open("x", encoding="utf-8") as file:  # if there is none
        file.write("/runs/\n")
    say(f"wrote {paths['model']} and {paths['spec']}; to train: python -m runner {paths['spec']}")
    return EXIT_DONE
