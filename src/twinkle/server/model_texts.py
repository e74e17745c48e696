"""Between text and tokens: the model's own tokenizer and chat template, without torch or transformers."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import structlog
from jinja2 import TemplateError
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from twinkle.core.clock import Clock
from twinkle.core.errors import InvalidInput
from twinkle.data_format.chat_template import ChatTemplateCode
from twinkle.data_format.messages import names_reasoning

BROKEN_CHARACTER = "\N{REPLACEMENT CHARACTER}"
"""What bytes that are no character, or not yet one, read as."""
# A character of UTF-8 has at most four bytes, hence at most four tokens.
_MAX_TOKENS_PER_CHARACTER = 4
MOST_BYTES_PER_TOKEN = 32
"""Of a text on average: longer ones are refused by their bytes, before they are cut into tokens.

Texts that people write have about four, those of spaces and repeated signs up to sixteen.
"""
_NAMED_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")

_log = structlog.get_logger()


class TextModel:
    """One model's tokenizer and chat template."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplateCode | None,
        named_tokens: Mapping[str, str],
        end_texts: Sequence[str],
        *,
        reads_reasoning: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._named_tokens = named_tokens
        self._byte_tokens = _byte_tokens(tokenizer)
        self.end_texts = tuple(end_texts)
        """The tokens that end a text, as they read."""
        self.reads_reasoning = reads_reasoning
        """Whether the chat template knows ``reasoning_content``."""

    def encode(self, text: str, *, context: int, field: str = "prompt") -> list[int]:
        """The tokens of a plain prompt, with what the tokenizer puts before it.

        Raises:
            InvalidInput: It is longer than a text of ``context`` tokens can be.
        """
        return self._tokens(text, context=context, field=field, with_special=True)

    def encode_chat(
        self, messages: Sequence[Mapping[str, object]], options: Mapping[str, object], *, context: int
    ) -> list[int]:
        """The tokens of a conversation up to where the assistant's turn begins.

        Raises:
            InvalidInput: The model has no chat template, or its template refuses these messages or would do too much
                for them, or they are longer than a text of ``context`` tokens can be.
        """
        if self._template is None:
            raise InvalidInput("model", "has no chat template; use /v1/completions")
        values = {**self._named_tokens, **options, "messages": messages, "add_generation_prompt": True}
        try:
            text = self._template.render(values)
        except TemplateError as error:
            raise InvalidInput("messages", f"the model's chat template refuses them: {error}") from error
        return self.encode_written(text, context=context)

    def encode_written(self, text: str, *, context: int) -> list[int]:
        """The tokens of a conversation that was written as the model reads it, raises as :meth:`encode` does."""
        return self._tokens(text, context=context, field="messages", with_special=False)

    def _tokens(self, text: str, *, context: int, field: str, with_special: bool) -> list[int]:
        num_bytes, most = len(text.encode("utf-8", "replace")), MOST_BYTES_PER_TOKEN * context
        if num_bytes > most:
            raise InvalidInput(
                field,
                f"are {num_bytes} bytes of text; the model's context of {context} tokens holds {most} at most,"
                " shorten it",
            )
        # Of a batch, be it of one: a single text is encoded with the interpreter's lock held.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=with_special)
        return list(encoding.ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without the special ones."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def decode_all(self, tokens: Sequence[int]) -> str:
        """The text of tokens, with the special ones."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))

    def decoder(self) -> Callable[[Sequence[int]], str]:
        """What decodes tokens piece by piece: the text that each piece completes, without the special ones.

        It raises ``InvalidInput`` where a piece changes the text of those before it.
        """
        stream = DecodeStream(skip_special_tokens=True)

        def decode_next(tokens: Sequence[int]) -> str:
            try:
                return "".join(stream.step(self._tokenizer, run) or "" for run in self._runs(tokens))
            except Exception as error:
                raise InvalidInput("tokens", f"cannot be decoded piece by piece: {error}") from error

        return decode_next

    def piece(self, token: int) -> str:
        """How one token reads; a part of a character reads as a broken one."""
        return str(self._tokenizer.decode([token], skip_special_tokens=False))

    def num_open(self, tokens: Sequence[int]) -> int:
        """How many of the last tokens cannot be decoded before it is known what follows them.

        Tokenizers that fall back to bytes decode a run of them as a whole: one wrong byte breaks its neighbours too.
        """
        num_open = 0
        for i, token in enumerate(reversed(tokens) if self._byte_tokens else (), start=1):
            if token in self._byte_tokens:
                num_open = i
            elif self.decode([token]):
                break
        return num_open

    def _runs(self, tokens: Sequence[int]) -> Iterator[list[int]]:
        """Single tokens, and whole runs of those that stand for bytes."""
        run: list[int] = []
        for token in tokens:
            if token in self._byte_tokens or (run and not self.decode([token])):
                run.append(token)
                continue
            if run:
                yield run
                run = []
            yield [token]
        if run:
            yield run

    def offsets(self, tokens: Sequence[int]) -> list[int]:
        """Where in the text each token begins; the parts of one character begin together."""
        offsets = TokenOffsets(self)
        offsets.extend(tokens)
        return offsets.known


class TokenOffsets:
    """Where in the text each token begins, told as tokens come. Later ones change nothing about earlier ones."""

    def __init__(self, text_model: TextModel) -> None:
        self.known: list[int] = []
        self._text_model = text_model
        self._pending: list[int] = []
        self._next = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Take in what comes next."""
        for token in tokens:
            self.known.append(self._next)
            self._pending.append(token)
            text = self._text_model.decode(self._pending)
            if not text.endswith(BROKEN_CHARACTER) or len(self._pending) >= _MAX_TOKENS_PER_CHARACTER:
                self._next += len(text)
                self._pending = []


class Texts:
    """The tokenizers of the models served, each read once. Callable from any thread; blocks."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._known: dict[str, TextModel] = {}
        self._lock = threading.Lock()

    def of(self, folder: str | None) -> TextModel | None:
        """The tokenizer in a folder; ``None`` when this process can read none there."""
        if folder is None:
            return None
        with self._lock:
            if folder not in self._known:
                try:
                    self._known[folder] = _read(Path(folder), self._clock)
                except Exception as error:  # noqa: BLE001 - the tokenizers library raises nothing narrower
                    _log.warning("openai.no_tokenizer", error=str(error), next="prompts must come as token ids")
                    return None
            return self._known[folder]


def _read(folder: Path, clock: Clock) -> TextModel:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = _read_json(folder / "tokenizer_config.json")
    named = {name: text for name in _NAMED_TOKENS if (text := _token_text(config.get(name))) is not None}
    ends = [_read_json(folder / name).get("eos_token_id") for name in ("generation_config.json", "config.json")]
    end_ids = [i for end in ends for i in (end if isinstance(end, list) else [end]) if isinstance(i, int)]
    end_texts = [text for i in end_ids if (text := tokenizer.id_to_token(i)) is not None]
    end_texts += [named["eos_token"]] if "eos_token" in named else []
    source = _template_source(folder, config)
    template = None
    if source is not None:
        template = ChatTemplateCode(source, lambda: datetime.fromtimestamp(clock.now(), UTC))
    reads_reasoning = source is not None and names_reasoning(source)
    return TextModel(tokenizer, template, named, list(dict.fromkeys(end_texts)), reads_reasoning=reads_reasoning)


def _byte_tokens(tokenizer: Tokenizer) -> frozenset[int]:
    """The tokens that stand for one byte each, if this tokenizer falls back to such."""
    found = {byte: tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256)}
    tokens = {byte: token for byte, token in found.items() if token is not None}
    some = [tokens[byte] for byte in "é".encode() if byte in tokens]
    return frozenset(tokens.values()) if tokenizer.decode(some) == "é" else frozenset()


def _read_json(path: Path) -> dict[str, object]:
    if not path.is_file():
        return {}
    value = json.loads(path.read_text())
    return value if isinstance(value, dict) else {}


def _token_text(value: object) -> str | None:
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _template_source(folder: Path, config: Mapping[str, object]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text()
    source = config.get("chat_template")
    if isinstance(source, list):
        named = {item.get("name"): item.get("template") for item in source if isinstance(item, dict)}
        source = named.get("default")
    return source if isinstance(source, str) else None
