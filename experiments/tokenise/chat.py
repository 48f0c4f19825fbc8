"""What a tokenise job is told of dialogues: read, checked, and counted at the end. Knows no tokens."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from experiments.tokenise.config import ChatConfig, TokeniseConfig
from experiments.tokenise.source import Form
from experiments.tokenise.template import ChatTemplate, Renderer, read_template
from runner.data.subword import KINDS_WITH_SPANS
from runner.spec import Document


@dataclass(frozen=True)
class Chat:
    """How lines become dialogues: with which template, and of how many tokens at most."""

    template: ChatTemplate | None
    max_tokens: int | None
    is_cut: bool  # a longer one, else it is left out


class Counted(Protocol):
    """The record of a piece."""

    @property
    def num_dropped(self) -> int: ...

    @property
    def num_cut(self) -> int: ...


def load_chat(config: ChatConfig) -> Chat:
    """Read the template. Raises `DataError` if it is none."""
    template = None if config.template is None else read_template(config.template)
    Renderer(template).close()
    return Chat(template, config.max_tokens, config.longer == "cut")


def refuse_unread(config: TokeniseConfig, form: Form, document: Document) -> None:
    """Raise the document's error where a key says nothing of these files, or they and the tokenizer cannot serve it."""
    unread = {"field": form == "text" or config.chat is not None, "skip_bad": form == "text"}
    for key, is_unread in unread.items():
        value = getattr(config, key)
        if is_unread and value != TokeniseConfig.model_fields[key].default:
            reason = f"{config.source} names text files" if form == "text" else "with chat lines and rows are dialogues"
            raise document.error(f"config.{key}", f"is {value}: nothing reads it, {reason}; leave it out")
    if config.chat is None:
        return
    if form == "text":
        raise document.error(
            "config.chat", f"needs lines of .jsonl or rows of a table, {config.source} names text files"
        )
    if config.tokenizer.kind not in KINDS_WITH_SPANS:
        raise document.error(
            "config.tokenizer.kind",
            f"is {config.tokenizer.kind}, dialogues need one of {', '.join(KINDS_WITH_SPANS)}, which tells which "
            "characters a token is of",
        )


def digest_of(tokenizer: str, chat: Chat | None) -> str:
    """Another one where the same lines make other ids: of the tokenizer's digest, and the template if there is one."""
    if chat is None or chat.template is None:
        return tokenizer
    return hashlib.sha256(f"{tokenizer} {chat.template.sha256}".encode()).hexdigest()


def tell_too_long(done: Sequence[Counted], chat: Chat | None) -> str | None:
    """How many dialogues lost their end, and how many all; None where there were none."""
    num_dropped, num_cut = sum(piece.num_dropped for piece in done), sum(piece.num_cut for piece in done)
    if chat is None or not num_dropped + num_cut:
        return None
    return f"of dialogues of more than {chat.max_tokens:,} tokens {num_cut} lost their end, {num_dropped} were left out"
