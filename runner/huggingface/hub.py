"""Push of an export to the Hugging Face Hub, with a model card.

**Model card** (`format_model_card`): README.md with the front matter that the Hub reads. It is a function of the
checkpoint, the spec and the rows up to its step, so every push of a step has the same card. The duration
of a run is on the card only after the run has ended, when it no longer changes.

**Push** (`HubRepository`). The repository is checked before anything is exported, and changed in one commit:

1. `check` checks that the token may write, and that an existing repository has the requested visibility. Nothing is
   created yet.
2. `push` creates the repository if it is missing and uploads the large files. Files whose digest the Hub
   already has, for example from a push that was killed, are not uploaded again.
3. One commit contains all changes, and deletes files of an earlier export that this one does not have. If a model had
   two shards and now has one file, readers would otherwise find both, and one of them would be wrong. The
   commit is based on the commit that was read before, so one of two concurrent pushes has to be repeated.
4. The content of the repository is compared with the export.

A push that is run again after a kill at any point leads to the same files. If nothing differs there is no commit.
"""

import contextlib
import math
import re
import sys
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.checkpoint.inspect import find_weights
from runner.checkpoint.manifest import Manifest
from runner.config import SOURCE_NAME, DataConfig
from runner.console import hide_secret
from runner.errors import InvalidError, RetryableError, RunnerError, format_reason
from runner.history.records import History, RunState
from runner.huggingface.assets import TOKENIZER
from runner.huggingface.export import is_export_file
from runner.metrics.rows import Row
from runner.spec import PARAMS, ExecutionSpec
from runner.spec.document import TextDumper, dump_yaml
from runner.spec.imports import import_extra
from runner.storage import JsonObject

# Model card.

CARD_FILE = "README.md"
EVALUATIONS_MAX = 12  # lines of the table of losses; if there are more, evenly spaced ones and the last are shown
_LOSS = re.compile(r"val/(.+/)?loss")
_HUB_CACHE = re.compile(r"(?:^|/)models--([^/]+)--([^/]+)(?:/|$)")  # path of a download of the Hub's own library
_TEXT_GENERATION = ("ForCausalLM", "LMHeadModel")


@dataclass(frozen=True)
class ModelCardText:
    """Statements of the user for the model card, which no file of the run contains."""

    repository: str  # OWNER/NAME of the repository
    # Identifier of the licence on the Hub, such as apache-2.0; None for a card without a licence.
    license: str | None = None
    # OWNER/NAME of the model from which training started; None to derive it from `init_from`.
    base_model: str | None = None


@dataclass(frozen=True)
class ExportedCheckpoint:
    """Records of a run about the step that is exported."""

    spec: ExecutionSpec
    data: DataConfig | None  # data config; None for a job that is not a trainer
    manifest: Manifest
    rows: Sequence[Row]  # rows of the surviving trajectory up to the step
    history: History  # history of the whole run
    config: JsonObject  # content of the export's `config.json`
    files: Collection[str]  # names of the exported files


def format_model_card(checkpoint: ExportedCheckpoint, words: ModelCardText) -> str:
    """Return the content of README.md."""
    spec, manifest = checkpoint.spec, checkpoint.manifest
    generates_text = any(str(name).endswith(_TEXT_GENERATION) for name in checkpoint.config.get("architectures") or [])
    front = dump_yaml(_make_front_matter(checkpoint, words, generates_text), TextDumper)
    parts = [
        f"---\n{front}---\n",
        f"# {spec.name}\n",
        f"Weights of step {manifest.step:,} of the run `{spec.name}`, a `{_escape(spec.job)}` trained on JAX.\n",
        _format_table(("", ""), _list_facts(checkpoint, generates_text)),
    ]
    if generates_text:
        has_tokenizer = TOKENIZER in checkpoint.files
        usage = [
            "```python",
            f"from transformers import AutoModelForCausalLM{', AutoTokenizer' if has_tokenizer else ''}",
            "",
            f'model = AutoModelForCausalLM.from_pretrained("{words.repository}")',
            *([f'tokenizer = AutoTokenizer.from_pretrained("{words.repository}")'] if has_tokenizer else []),
            "```",
            "",
        ]
        parts.append("\n".join(usage))
    parts.append(_format_evaluations(checkpoint.rows))
    return "\n".join(part for part in parts if part)


def _make_front_matter(
    checkpoint: ExportedCheckpoint, words: ModelCardText, generates_text: bool
) -> Mapping[str, str | list[str]]:
    """Return the metadata by which the Hub sorts and filters. Unknown keys are left out."""
    found: dict[str, str | list[str]] = {}
    if generates_text:
        found |= {"library_name": "transformers", "pipeline_tag": "text-generation"}
    if words.license is not None:
        found["license"] = words.license
    base = words.base_model
    if not base:
        # A download of the Hub's own library has the name of the model in its path; other paths do not name a model.
        rule = checkpoint.spec.checkpoint.initial_weights
        download = None if rule is None else _HUB_CACHE.search(rule.path)
        base = None if download is None else "/".join(download.groups())
    if base is not None:
        found["base_model"] = base
    # The Hub accepts only names in its own form; paths and patterns of files are in the table.
    datasets = [name for name in _list_sources(checkpoint.data) if re.match(SOURCE_NAME, name)]
    if datasets:
        found["datasets"] = datasets
    kind = checkpoint.config.get("model_type")
    return found | {"tags": ["jax", *([kind] if isinstance(kind, str) else [])]}


def _list_sources(data: DataConfig | None) -> list[str]:
    return [] if data is None else [named.source for named in data.sources]


def _list_facts(checkpoint: ExportedCheckpoint, generates_text: bool) -> Iterable[tuple[str, str]]:
    """Yield the lines of the card's table, (name, value)."""
    spec, data, manifest = checkpoint.spec, checkpoint.data, checkpoint.manifest
    yield "step", f"{manifest.step:,}"
    for unit in ("tokens", "examples"):
        number = _find_newest(checkpoint.rows, f"train/{unit}")
        if number is not None:
            yield unit, f"{int(number):,}"
    for name, key in (("training loss", "train/loss"), ("validation loss", "val/loss")):
        loss = _find_newest(checkpoint.rows, key)
        if loss is not None:
            # The loss of a model that is not a language model has an unknown unit.
            yield f"{name}, nats a token" if generates_text else name, f"{loss:.4f}"
    weights = [manifest.leaves[name]["shape"] for name in find_weights(manifest, PARAMS).names]
    yield "parameters", f"{sum(math.prod(shape) for shape in weights):,}"
    if data is not None:
        yield "data", ", ".join(f"`{_escape(_hide_directories(source))}`" for source in _list_sources(data))
        if data.sequence_length is not None:
            yield "tokens of an example", f"{data.sequence_length:,}"
        has_tokenizer = TOKENIZER in checkpoint.files
        if has_tokenizer or generates_text:
            yield "tokenizer", f"`{TOKENIZER}`" if has_tokenizer else f"not here as `{TOKENIZER}`"
    if spec.checkpoint.initial_weights is not None:
        yield "began with", f"`{_escape(_hide_directories(spec.checkpoint.initial_weights.path))}`"
    yield "seed", str(spec.seed)
    # Hardware and versions are those of the attempt that saved the step.
    topology, environment = manifest.topology or {}, manifest.environment or {}
    mesh = topology.get("mesh")
    if isinstance(mesh, dict) and "device_kind" in topology:
        axes = ", ".join(f"{axis} {size}" for axis, size in mesh.items() if size != 1)
        kind = _escape(str(topology["device_kind"]))
        yield "hardware", f"{math.prod(mesh.values())} x `{kind}`" + (f" ({axes})" if axes else "")
    versions = environment.get("versions")
    if isinstance(versions, dict):
        yield "versions", ", ".join(f"{_escape(str(name))} {_escape(str(number))}" for name, number in versions.items())
    if checkpoint.history.state is RunState.DONE:
        hours, goodput = checkpoint.history.wall_seconds / 3600, checkpoint.history.goodput
        yield "time", f"{hours:.2f} h, {goodput:.1%} of it in steps"
    yield "fingerprint of the whole state", f"`{manifest.fingerprint}`"


def _find_newest(rows: Sequence[Row], key: str) -> float | None:
    found = (row[key] for row in reversed(rows) if isinstance(row.get(key), int | float))
    return next(found, None)


def _format_evaluations(rows: Sequence[Row]) -> str:
    """Return a table of validation losses by step; empty if there are none."""
    evaluated = [row for row in rows if any(_LOSS.fullmatch(key) for key in row)]
    if not evaluated:
        return ""

    def format_cell(value: object) -> str:
        return f"{value:.4f}" if isinstance(value, int | float) else ""

    # Every `stride`-th evaluation, counted from the end, so that the last one is always shown.
    stride = math.ceil(len(evaluated) / EVALUATIONS_MAX)
    shown = evaluated[::-1][::stride][::-1]
    keys = list(dict.fromkeys(key for row in shown for key in row if _LOSS.fullmatch(key)))
    lines = [(f"{row['step']:,}", *(format_cell(row.get(key)) for key in ("train/loss", *keys))) for row in shown]
    return "## Losses\n\n" + _format_table(("step", "train/loss", *keys), lines)


def _hide_directories(where: str) -> str:
    """Return a path without its directories, which only its machine has; a URL as it is."""
    return where if "://" in where else where.rstrip("/").rpartition("/")[2]


def _escape(text: str) -> str:
    """Return text for a cell, inside of backticks or not: one line that begins no markup."""
    return "".join(each if each.isprintable() and each not in "`|<>" else " " for each in text)


def _format_table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


# Push.

ANSWER_SECONDS = 300.0  # limit for the next byte of a request or an answer
_NAME = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_MODULES = ("", ".errors", ".utils")
_TRANSIENT = (408, 409, 412, 429)  # besides all from 500 on


def parse_refusal(error: Any) -> tuple[int, str, bool]:
    """Return HTTP status and reason of an `HfHubHTTPError`, and True if the same request may succeed later."""
    status = int(error.response.status_code)
    reason = " ".join((error.server_message or format_reason(error)).split())[:300]
    return status, reason, status in _TRANSIENT or status >= 500


@dataclass(frozen=True)
class PushResult:
    """Result of a push."""

    url: str  # URL of the repository
    has_changed: bool  # False if it already held the export


class HubRepository:
    """OWNER/NAME on the Hub that HF_ENDPOINT names, with the token of HF_TOKEN or of the library's own login."""

    def __init__(self, name: str, *, is_public: bool):
        """Open the repository OWNER/NAME, which is, or is to be, public or not, without a request.

        Raises:
            InvalidError: The library is missing, the name is invalid, or there is no token.
        """
        if _NAME.fullmatch(name) is None:
            raise InvalidError(f"--push {name}: needs OWNER/NAME, such as my-team/my-model")
        self._name, self._is_public = name, is_public
        self._hub, self._errors, utils = (import_extra(f"huggingface_hub{part}") for part in _MODULES)
        # Settings of the library for this whole process: few lines, and a limit for each wait, which it has not.
        utils.logging.set_verbosity_error()
        if not sys.stderr.isatty():
            utils.disable_progress_bars()
        client = self._hub.get_session()
        kind, hooks = type(client), client.event_hooks
        self._hub.set_client_factory(lambda: kind(event_hooks=hooks, follow_redirects=True, timeout=ANSWER_SECONDS))
        with self._translate_errors():
            token = self._hub.get_token()
        if token is None:
            raise InvalidError(f"--push {name}: there is no token; set HF_TOKEN, or log in with `hf auth login`")
        # The HTTP library would reject such a token with an error that contains it.
        if not (token.isascii() and token.isprintable()):
            raise InvalidError(f"--push {name}: the token contains a character that no token has; copy it again")
        hide_secret(token)
        self._api = self._hub.HfApi(token=token)
        if not self._api.endpoint.startswith(("http://", "https://")):
            raise InvalidError(f"HF_ENDPOINT={self._api.endpoint}: needs a URL that begins with http:// or https://")

    def check(self) -> None:
        """Check that a push would be accepted.

        Raises:
            InvalidError: It would be refused.
            RetryableError: The Hub does not answer.
        """
        with self._translate_errors():
            auth = self._api.whoami().get("auth") or {}
            if (auth.get("accessToken") or {}).get("role") == "read":
                raise InvalidError(f"--push {self._name}: the token may only read; make one that may write")
            self._has_repository()

    def push(self, directory: Path, message: str) -> PushResult:
        """Make the repository hold the files of `directory`, which has no directories inside.

        Raises:
            InvalidError: The Hub refuses it.
            RetryableError: The push may succeed if it is run again.
        """
        paths = {path.name: path for path in sorted(directory.iterdir())}
        with self._translate_errors():
            if not self._has_repository():
                self._api.create_repo(self._name, private=not self._is_public, exist_ok=True)
            # The commit names its parent, so a concurrent push fails instead of mixing both exports.
            before = self._api.repo_info(self._name)
            # Files of an earlier export are removed; any others belong to the owner of the repository.
            left = sorted(each.rfilename for each in before.siblings or [] if each.rfilename not in paths)
            operations = [self._hub.CommitOperationDelete(name) for name in left if is_export_file(name)]
            operations += [self._hub.CommitOperationAdd(name, path) for name, path in paths.items()]
            with warnings.catch_warnings(action="ignore"):  # about metadata that the Hub does not know but accepts
                commit = self._api.create_commit(
                    self._name, operations, commit_message=message, parent_commit=before.sha
                )
            # The repository's own .gitignore may have excluded a file.
            found = self._api.repo_info(self._name, files_metadata=True)
            sizes = {each.rfilename: each.size for each in found.siblings or []}
            wrong = [name for name, path in paths.items() if sizes.get(name) != path.stat().st_size]
            if wrong:
                raise InvalidError(f"{self._name} has not taken {', '.join(wrong)}: see its .gitignore")
        return PushResult(f"{self._api.endpoint}/{self._name}", commit.oid != before.sha)

    def _has_repository(self) -> bool:
        """Return True if the repository exists and this token may see it.

        Raises:
            InvalidError: It is public and should be private, or the other way round.
        """
        try:
            found = self._api.repo_info(self._name)
        except self._errors.RepositoryNotFoundError as error:
            # The Hub hides repositories from strangers, so a wrong token also looks like a missing repository.
            if error.response.status_code == 401:
                raise
            return False
        if found.private is False and not self._is_public:
            raise InvalidError(f"{self._name} exists and is public; give --public, or another name")
        if found.private and self._is_public:
            raise InvalidError(f"{self._name} exists and is private; leave out --public, or change it on the Hub first")
        return True

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Translate exceptions of the library into errors of one line."""
        errors = self._errors
        try:
            yield
        except RunnerError:
            raise
        except (errors.HTTPError, OSError, RuntimeError, ValueError) as error:
            raise self._make_error(error) from error

    def _make_error(self, error: BaseException) -> RunnerError:
        errors = self._errors
        # An exception of a thread is the cause of the one that reports it.
        found: BaseException | None = error
        while found is not None and not isinstance(found, errors.HTTPError | OSError | ValueError):
            found = found.__cause__
        found = found or error
        if isinstance(found, errors.HfHubHTTPError):
            status, reason, is_transient = parse_refusal(found)
            if status == 401:
                return InvalidError(
                    f"{self._api.endpoint} does not accept the token of HF_TOKEN or the login: {reason}"
                )
            if status == 403:
                return InvalidError(f"the token may not write to {self._name}: {reason}")
            if is_transient:
                return RetryableError(f"{self._name}: {status}: {reason}; run the same command again to continue")
            return InvalidError(f"{self._name}: {status}: {reason}")
        if isinstance(found, errors.OfflineModeIsEnabled):
            return InvalidError(f"--push {self._name}: HF_HUB_OFFLINE is set, and a push needs the Hub; unset it")
        if isinstance(found, ValueError):
            return InvalidError(f"--push {self._name}: {' '.join(str(found).split())[:300]}")
        # An error may occur before the client exists.
        host = getattr(getattr(self, "_api", None), "endpoint", "the Hub")
        return RetryableError(f"{host} does not answer: {format_reason(found)}; run the same command again to continue")
