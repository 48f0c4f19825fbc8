"""The model card of an export: README.md, with the front matter that the Hub reads.

All of it is a function of the checkpoint, the spec and the rows up to its step, so the same step gives the same card
however often it is pushed. How much time a run took is told only of one that has reached its end: it no longer changes.

A model repository on the Hub: found before anything is exported, pushed to in one commit.

1. `check` asks who may write, and whether what is there is as public as the user said. Nothing is made yet.
2. `push` makes the repository if it is missing, and sends the large files. What the Hub has of them by their digest, as
   from a push that was killed, is not sent again.
3. One commit names all that differs, and takes away what an earlier export has left and this one has not: of a model
   that had two shards and has one file now, both would be found by readers, and one of them be wrong. It follows on the
   commit that was read before, so of two pushes at a time one has to come again.
4. What the repository then holds is compared with what was exported.

Run again after a kill at any point it ends in the same files; where nothing differs there is no commit.
"""

import contextlib
import math
import re
import sys
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from runner.checkpoint.manifest import Manifest
from runner.checkpoint.weights import find_weight_names
from runner.config import SOURCE_NAME, DataConfig
from runner.console import hide_secret
from runner.errors import InvalidError, RetryableError, RunnerError, format_reason
from runner.history.records import History, RunState
from runner.huggingface.export import TOKENIZER, is_export_file
from runner.metrics.rows import Row
from runner.records import PARAMS
from runner.spec import ExecutionSpec
from runner.spec.imports import import_extra
from runner.storage import JsonObject

CARD_FILE = "README.md"
EVALUATIONS_MAX = 12  # lines of the table; of more, some, evenly, and the last
_LOSS = re.compile(r"val/(.+/)?loss")
_HUB_CACHE = re.compile(r"(?:^|/)models--([^/]+)--([^/]+)(?:/|$)")  # where the Hub's own library keeps a download
_GENERATES_TEXT = ("ForCausalLM", "LMHeadModel")


@dataclass(frozen=True)
class ModelCardText:
    """What a user says of the weights that no file of the run tells.

    Attributes:
        repository: OWNER/NAME, where they are to be.
        license: as the Hub calls it, such as apache-2.0; None: the card names none.
        base_model: OWNER/NAME of the model that training began with; None: what `init_from` tells.
    """

    repository: str
    license: str | None = None
    base_model: str | None = None


@dataclass(frozen=True)
class ExportedCheckpoint:
    """What a run has left of a step.

    Attributes:
        spec: resolved.
        data: None of a job that is no trainer.
        manifest: of the checkpoint.
        rows: of the surviving trajectory, up to its step.
        history: of the whole run.
        config: the content of the export's `config.json`.
        files: the names of what was exported.
    """

    spec: ExecutionSpec
    data: DataConfig | None
    manifest: Manifest
    rows: Sequence[Row]
    history: History
    config: JsonObject
    files: Collection[str]


def format_model_card(evidence: ExportedCheckpoint, words: ModelCardText) -> str:
    """The content of README.md."""
    front = yaml.safe_dump(_front_matter(evidence, words), sort_keys=False, allow_unicode=True)
    spec, manifest = evidence.spec, evidence.manifest
    parts = [
        f"---\n{front}---\n",
        f"# {spec.name}\n",
        f"Weights of step {manifest.step:,} of the run `{spec.name}`, a `{_code(spec.job)}` trained on JAX.\n",
        _table(("", ""), _facts(evidence)),
        _usage(evidence, words.repository),
        _evaluations(evidence.rows),
    ]
    return "\n".join(part for part in parts if part)


def _front_matter(evidence: ExportedCheckpoint, words: ModelCardText) -> Mapping[str, str | list[str]]:
    """What the Hub sorts and filters by; a key of which nothing is known is left out."""
    found: dict[str, str | list[str]] = {}
    if _generates_text(evidence.config):
        found |= {"library_name": "transformers", "pipeline_tag": "text-generation"}
    if words.license is not None:
        found["license"] = words.license
    base = words.base_model or _base_model(evidence.spec)
    if base is not None:
        found["base_model"] = base
    # The Hub takes names of its own kind alone: a path or a pattern of files is told in the table.
    datasets = [name for name in _sources(evidence.data) if re.match(SOURCE_NAME, name)]
    if datasets:
        found["datasets"] = datasets
    kind = evidence.config.get("model_type")
    return found | {"tags": ["jax", *([kind] if isinstance(kind, str) else [])]}


def _generates_text(config: JsonObject) -> bool:
    return any(str(name).endswith(_GENERATES_TEXT) for name in config.get("architectures") or [])


def _base_model(spec: ExecutionSpec) -> str | None:
    """OWNER/NAME where `init_from` is a download as the Hub's library keeps it; of another path nobody knows."""
    found = None if spec.checkpoint.initial_weights is None else _HUB_CACHE.search(spec.checkpoint.initial_weights.path)
    return None if found is None else "/".join(found.groups())


def _sources(data: DataConfig | None) -> list[str]:
    return [] if data is None else [named.source for named in data.sources]


def _facts(evidence: ExportedCheckpoint) -> Iterable[tuple[str, str]]:
    """What is told of the weights, by name."""
    spec, data, manifest = evidence.spec, evidence.data, evidence.manifest
    yield "step", f"{manifest.step:,}"
    tokens = _newest(evidence.rows, "train/tokens")
    if tokens is not None:
        yield "tokens", f"{int(tokens):,}"
    for name, key in (("training loss", "train/loss"), ("validation loss", "val/loss")):
        loss = _newest(evidence.rows, key)
        if loss is not None:
            yield f"{name}, nats a token", f"{loss:.4f}"
    weights = [manifest.leaves[name]["shape"] for name in find_weight_names(manifest, PARAMS)]
    yield "parameters", f"{sum(math.prod(shape) for shape in weights):,}"
    if data is not None:
        yield "data", ", ".join(f"`{_code(_public(source))}`" for source in _sources(data))
        yield "tokens of an example", f"{data.sequence_length:,}"
        has_tokenizer = TOKENIZER in evidence.files
        yield "tokenizer", f"`{TOKENIZER}`" if has_tokenizer else f"not here as `{TOKENIZER}`"
    if spec.checkpoint.initial_weights is not None:
        yield "began with", f"`{_code(_public(spec.checkpoint.initial_weights.path))}`"
    yield "seed", str(spec.seed)
    yield from _hardware(manifest)
    if evidence.history.state is RunState.DONE:
        yield "time", f"{evidence.history.wall_seconds / 3600:.2f} h, {evidence.history.goodput:.1%} of it in steps"
    yield "fingerprint of the whole state", f"`{manifest.fingerprint}`"


def _hardware(manifest: Manifest) -> Iterable[tuple[str, str]]:
    """What has saved the step: its devices, and the versions of what ran on them."""
    topology, environment = manifest.topology or {}, manifest.environment or {}
    mesh = topology.get("mesh")
    if isinstance(mesh, dict) and "device_kind" in topology:
        axes = ", ".join(f"{axis} {size}" for axis, size in mesh.items() if size != 1)
        kind = _code(str(topology["device_kind"]))
        yield "hardware", f"{math.prod(mesh.values())} x `{kind}`" + (f" ({axes})" if axes else "")
    versions = environment.get("versions")
    if isinstance(versions, dict):
        yield "versions", ", ".join(f"{_code(str(name))} {_code(str(number))}" for name, number in versions.items())


def _newest(rows: Sequence[Row], key: str) -> float | None:
    """The newest value of a key that is a number, None if no row has one."""
    found = (row[key] for row in reversed(rows) if isinstance(row.get(key), int | float))
    return next(found, None)


def _evaluations(rows: Sequence[Row]) -> str:
    """A table of the validation losses over the steps; empty where there are none."""
    evaluated = [row for row in rows if any(_LOSS.fullmatch(key) for key in row)]
    if not evaluated:
        return ""
    stride = math.ceil(len(evaluated) / EVALUATIONS_MAX)
    shown = evaluated[::-1][::stride][::-1]
    keys = list(dict.fromkeys(key for row in shown for key in row if _LOSS.fullmatch(key)))
    lines = [(f"{row['step']:,}", *(_figure(row.get(key)) for key in ("train/loss", *keys))) for row in shown]
    return "## Losses\n\n" + _table(("step", "train/loss", *keys), lines)


def _figure(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, int | float) else ""


def _usage(evidence: ExportedCheckpoint, repository: str) -> str:
    """How the weights are opened, where `transformers` knows their architecture."""
    if not _generates_text(evidence.config):
        return ""
    has_tokenizer = TOKENIZER in evidence.files
    lines = [
        "```python",
        f"from transformers import AutoModelForCausalLM{', AutoTokenizer' if has_tokenizer else ''}",
        "",
        f'model = AutoModelForCausalLM.from_pretrained("{repository}")',
        *([f'tokenizer = AutoTokenizer.from_pretrained("{repository}")'] if has_tokenizer else []),
        "```",
        "",
    ]
    return "\n".join(lines)


def _public(where: str) -> str:
    """A path without the directories of the machine that it was on, which tell a reader nothing; a URL as it is."""
    return where if "://" in where else where.rstrip("/").rpartition("/")[2]


def _code(text: str) -> str:
    """Text that may stand in a cell, inside of backticks or not: one line that begins no markup."""
    return "".join(each if each.isprintable() and each not in "`|<>" else " " for each in text)


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


ANSWER_SECONDS = 300.0  # in which a byte must come or go
_NAME = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_MODULES = ("", ".errors", ".utils")
_TRANSIENT = (408, 409, 412, 429)  # besides all that begin with 5


@dataclass(frozen=True)
class PushResult:
    """Where an export is, and whether it was there before."""

    url: str
    has_changed: bool


def _set_up(utils: ModuleType, hub: ModuleType) -> None:
    """What holds for the library in all of this process: few words, and an end to each wait, else there is none."""
    utils.logging.set_verbosity_error()
    if not sys.stderr.isatty():
        utils.disable_progress_bars()
    client = hub.get_session()
    kind, hooks = type(client), client.event_hooks
    hub.set_client_factory(lambda: kind(event_hooks=hooks, follow_redirects=True, timeout=ANSWER_SECONDS))


class HubRepository:
    """OWNER/NAME on the Hub that HF_ENDPOINT names, with the token of HF_TOKEN or of the library's own login."""

    def __init__(self, name: str, *, is_public: bool):
        """Raises `InvalidError` if the library is missing, the name is none, or there is no token."""
        if _NAME.fullmatch(name) is None:
            raise InvalidError(f"--push {name}: needs OWNER/NAME, such as my-team/my-model")
        self._name, self._is_public = name, is_public
        self._hub, self._errors, utils = (import_extra(f"huggingface_hub{part}", "hub") for part in _MODULES)
        _set_up(utils, self._hub)
        with self._answers():
            token = self._hub.get_token()
        if token is None:
            raise InvalidError(f"--push {name}: no token: set HF_TOKEN, or log in with `hf auth login`")
        if not (token.isascii() and token.isprintable()):
            raise InvalidError(f"--push {name}: the token holds a character that none has; copy it again")
        hide_secret(token)
        self._api = self._hub.HfApi(token=token)
        if not self._api.endpoint.startswith(("http://", "https://")):
            raise InvalidError(f"HF_ENDPOINT={self._api.endpoint}: needs a URL that begins with http:// or https://")

    def check(self) -> None:
        """Raise `InvalidError` if a push would be refused, `RetryableError` if the Hub does not answer."""
        with self._answers():
            auth = self._api.whoami().get("auth") or {}
            if (auth.get("accessToken") or {}).get("role") == "read":
                raise InvalidError(f"--push {self._name}: the token may only read; make one that may write")
            self._find()

    def push(self, directory: Path, message: str) -> PushResult:
        """Bring the repository to hold the files of `directory`, which has no others inside.

        Raises `InvalidError`, or `RetryableError` if running it again may help.
        """
        paths = {path.name: path for path in sorted(directory.iterdir())}
        with self._answers():
            if self._find() is None:
                self._api.create_repo(self._name, private=not self._is_public, exist_ok=True)
            before = self._api.repo_info(self._name)
            left = sorted(each.rfilename for each in before.siblings or [] if each.rfilename not in paths)
            operations = [self._hub.CommitOperationDelete(name) for name in left if is_export_file(name)]
            operations += [self._hub.CommitOperationAdd(name, path) for name, path in paths.items()]
            with warnings.catch_warnings(action="ignore"):  # of metadata that the Hub does not know: it takes them
                commit = self._api.create_commit(
                    self._name, operations, commit_message=message, parent_commit=before.sha
                )
            self._compare(paths)
        return PushResult(f"{self._api.endpoint}/{self._name}", commit.oid != before.sha)

    def _find(self) -> Any:
        """What the Hub tells of the repository, None if there is none that this token may see."""
        try:
            found = self._api.repo_info(self._name)
        except self._errors.RepositoryNotFoundError as error:
            if error.response.status_code == 401:
                raise
            return None
        if found.private is False and not self._is_public:
            raise InvalidError(f"{self._name} is there, and public; give --public, or another name")
        if found.private and self._is_public:
            raise InvalidError(f"{self._name} is there, and private; leave out --public, or change it on the Hub first")
        return found

    def _compare(self, paths: dict[str, Path]) -> None:
        """Raise `InvalidError` if the repository has not taken all that was sent: its .gitignore may name a file."""
        found = self._api.repo_info(self._name, files_metadata=True)
        sizes = {each.rfilename: each.size for each in found.siblings or []}
        wrong = [name for name, path in paths.items() if sizes.get(name) != path.stat().st_size]
        if wrong:
            raise InvalidError(f"{self._name} has not taken {', '.join(wrong)}: see its .gitignore")

    @contextlib.contextmanager
    def _answers(self) -> Iterator[None]:
        """Inside, what the library raises becomes an error of one line."""
        errors = self._errors
        try:
            yield
        except RunnerError:
            raise
        except (errors.HTTPError, OSError, RuntimeError, ValueError) as error:
            raise self._meaning(error) from error

    def _meaning(self, error: BaseException) -> RunnerError:
        """What an error of the library means to the user; a thread's own hides behind the one that tells of it."""
        errors = self._errors
        found: BaseException | None = error
        while found is not None and not isinstance(found, errors.HTTPError | OSError | ValueError):
            found = found.__cause__
        found = found or error
        if isinstance(found, errors.HfHubHTTPError):
            return self._refusal(found)
        if isinstance(found, errors.OfflineModeIsEnabled):
            return InvalidError(f"--push {self._name}: HF_HUB_OFFLINE is set, and a push needs the Hub")
        if isinstance(found, ValueError):
            return InvalidError(f"--push {self._name}: {' '.join(str(found).split())[:300]}")
        host = getattr(getattr(self, "_api", None), "endpoint", "the Hub")
        return RetryableError(f"{host} does not answer: {format_reason(found)}; run the same again, it goes on")

    def _refusal(self, error: Any) -> RunnerError:
        """What an answer of the Hub means."""
        status = error.response.status_code
        reason = " ".join((error.server_message or format_reason(error)).split())[:300]
        if status == 401:
            return InvalidError(f"{self._api.endpoint} does not take the token of HF_TOKEN, or of the login: {reason}")
        if status == 403:
            return InvalidError(f"the token may not write to {self._name}: {reason}")
        if status in _TRANSIENT or status >= 500:
            return RetryableError(f"{self._name}: {status}: {reason}; run the same again, it goes on")
        return InvalidError(f"{self._name}: {status}: {reason}")
