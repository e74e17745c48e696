"""Conversations to tokens and back, by the tokenizer and chat template of a model."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn, overload

import numpy as np
import PIL.Image
from transformers import AutoTokenizer

from twinkle.core.errors import InvalidInput
from twinkle.core.keywords import known_keywords
from twinkle.core.process.events import event_log
from twinkle.data_format.columns import Columns, Row, columns_of, rows_of
from twinkle.data_format.continuation import Texts, continued_row
from twinkle.data_format.conversation import ToolCall
from twinkle.data_format.media import NOT_TAKEN_REASON
from twinkle.data_format.messages import read_tools
from twinkle.data_format.row_error import RowError
from twinkle.data_format.tool_calls import parse_tool_calls, without_tool_calls
from twinkle.hub.model_path import resolve_model_id
from twinkle.hub.trust import check_model_code, naming_code
from twinkle.template.pictures import PicturePreparer, picture_preparer, put_in_place, read_picture
from twinkle.template.rendering import ChatTemplate, Renderer
from twinkle.template.tokenizing import Flags, Tokens, Written, plain_text, shifted, tokenize_all, tokenize_plain
from twinkle.template.truncation import (
    IGNORED_LABEL,
    TRUNCATION_STRATEGIES,
    TokenRow,
    TruncationStrategy,
    truncate,
)
from twinkle.template.writing import ConversationWriter

Trajectory = Mapping[str, Any]

OWN_ARGUMENTS = (
    "model_id",
    "use_chat_template",
    "max_length",
    "truncation_strategy",
    "default_system",
    "enable_thinking",
    "revision",
    "token",
)
ENCODE_KEYWORDS = ("add_generation_prompt",)

_log = event_log()


class _Deleted(RowError):
    """A row that is too long, where such rows are left out."""


class Template:
    """Encodes trajectories for one model.

    A row keeps the fields of its trajectory and gets ``input_ids``, ``labels``, ``attention_mask``, ``position_ids``
    (numpy arrays) and ``length``. Labels are shifted: ``labels[i]`` is the token to come after ``input_ids[i]``. Only
    what the assistant says trains; ``user_data`` may name the numbers of the messages that do, as ``key_rounds``.

    Args:
        model_id: A folder, or the id of a model of a hub. Only the files of its tokenizer are read.
        use_chat_template: False for plain text to train on as a whole: a row of one user message, or with ``text``.
        max_length: In tokens; None for no limit.
        truncation_strategy: What becomes of a longer row: ``raise`` an error, keep its end (``left`` is cut off) or its
            beginning (``right``), ``split`` it into several rows, or ``delete`` it.
        default_system: The system message of a conversation that has none.
        enable_thinking: What the chat template is told; it decides where an answer begins.
        revision: Of the model, if its id names none.
        token: For the hub.
        trust_remote_code: Has no effect: whose code runs is for the operator to say (``TWINKLE_TRUST_REMOTE_CODE``).
        variables: Further variables for the chat template.
    """

    def __init__(
        self,
        model_id: str,
        use_chat_template: bool = True,
        max_length: int | None = 8192,
        truncation_strategy: TruncationStrategy = "raise",
        default_system: str | None = None,
        enable_thinking: bool = True,
        *,
        revision: str | None = None,
        token: str | None = None,
        trust_remote_code: bool | None = None,
        **variables: Any,
    ) -> None:
        if truncation_strategy not in TRUNCATION_STRATEGIES:
            known = ", ".join(TRUNCATION_STRATEGIES)
            raise InvalidInput("truncation_strategy", f"is {truncation_strategy!r}; send one of {known}")
        if max_length is not None and (not isinstance(max_length, int) or max_length < 1):
            raise InvalidInput("max_length", f"is {max_length!r}; send at least 1, or None")
        self.model_id = model_id
        self.use_chat_template = use_chat_template
        self.max_length = max_length
        self.truncation_strategy: TruncationStrategy = truncation_strategy
        self.default_system = default_system
        self.enable_thinking = enable_thinking
        self.variables = dict(variables)
        self.model_path = resolve_model_id(model_id, revision=revision, token=token, ignore_model=True)
        runs_code = check_model_code(model_id, Path(self.model_path), revision=revision)
        with naming_code(model_id):
            self.tokenizer: Any = AutoTokenizer.from_pretrained(self.model_path, trust_remote_code=runs_code)

    @cached_property
    def renderer(self) -> Renderer:
        """What writes conversations."""
        chat_template = ChatTemplate(self.tokenizer, {"enable_thinking": self.enable_thinking, **self.variables})
        for name in self.variables:
            if not chat_template.reads(name):
                near = difflib.get_close_matches(name, OWN_ARGUMENTS, n=1)
                hint = f"did you mean {near[0]}?" if near else "the model's chat template knows no such"
                _log.warning("template.variable_ignored", variable=name, next=hint)
        return chat_template

    @cached_property
    def _writer(self) -> ConversationWriter:
        return ConversationWriter(self.renderer, self.tokenizer.get_added_vocab)

    # One row, and many.

    def encode(self, trajectory: Trajectory, add_generation_prompt: bool = False, **settings: object) -> Row:
        """The row of a trajectory.

        Args:
            trajectory: With ``messages`` and perhaps ``tools``, ``images`` and ``user_data``; or fields that are
                trajectories themselves, which are encoded each for itself and stay where they are.
            add_generation_prompt: Up to where the assistant's next turn begins, for sampling: then no label trains.
            settings: Others are taken, and named in the log.

        Raises:
            RowError: Names the field, the message and the reason.
            InvalidInput: The strategy is ``split``, which makes several rows; use :meth:`batch_encode`.
        """
        known_keywords("encode", settings, ENCODE_KEYWORDS)
        if self.truncation_strategy == "split":
            raise InvalidInput("truncation_strategy", "is 'split', which makes several rows of one; use batch_encode")
        (rows,) = self._encode([trajectory], add_generation_prompt)
        if not rows:
            raise _Deleted("messages", f"are longer than max_length {self.max_length}, and such rows are deleted")
        return rows[0]

    @overload
    def batch_encode(
        self, batch: Mapping[str, Sequence[Any]], add_generation_prompt: bool = False, **settings: object
    ) -> Columns: ...

    @overload
    def batch_encode(
        self, batch: Sequence[Trajectory], add_generation_prompt: bool = False, **settings: object
    ) -> list[Row]: ...

    def batch_encode(
        self,
        batch: Mapping[str, Sequence[Any]] | Sequence[Trajectory],
        add_generation_prompt: bool = False,
        **settings: object,
    ) -> Columns | list[Row]:
        """The rows of many trajectories, in the form they came in; some may become none or several.

        Raises:
            RowError: As :meth:`encode`, with the number of the row.
        """
        known_keywords("batch_encode", settings, ENCODE_KEYWORDS)
        encoded = [row for rows in self.encode_each(rows_of(batch), add_generation_prompt) for row in rows]
        return columns_of(encoded, batch) if isinstance(batch, Mapping) else encoded

    def encode_each(self, trajectories: Sequence[Trajectory], add_generation_prompt: bool = False) -> list[list[Row]]:
        """The rows of each of many trajectories: one, or by the strategy of truncation none or several.

        Raises:
            RowError: As :meth:`encode`, with the number of the first row that is wrong.
        """
        if type(self).encode is Template.encode:
            with suppress(RowError):  # it is met again below, and told of the first row that is wrong
                return self._encode(trajectories, add_generation_prompt)
        return self._encode_in_turn(trajectories, add_generation_prompt)

    def _encode_in_turn(self, trajectories: Sequence[Trajectory], add_generation_prompt: bool) -> list[list[Row]]:
        """By the ``encode`` of a template of one's own, if it has one."""
        encoded: list[list[Row]] = []
        for number, trajectory in enumerate(trajectories):
            try:
                encoded.append(self._rows_of(trajectory, add_generation_prompt))
            except RowError as error:
                raise error.at_row(number) from error
        return encoded

    def check(self, trajectory: Trajectory) -> bool:
        """Whether a trajectory can be encoded."""
        try:
            return bool(self._rows_of(trajectory, False))
        except RowError:
            return False

    def batch_check(self, batch: Mapping[str, Sequence[Any]] | Sequence[Trajectory]) -> list[bool]:
        """Of each row whether it can be encoded."""
        return [self.check(trajectory) for trajectory in rows_of(batch)]

    def format_trajectory(self, trajectory: Trajectory, add_generation_prompt: bool = False) -> str:
        """The text of a trajectory as the model reads it, before it is cut into tokens."""
        if not self.use_chat_template:
            return plain_text(trajectory)
        turns, _ = self._writer.turns(trajectory, add_generation_prompt, default_system=self.default_system)
        return self.renderer.render(turns, read_tools(trajectory), add_generation_prompt=add_generation_prompt)

    def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> str:
        """The text of tokens; those that are ignored as labels are left out."""
        kept = [token for token in np.asarray(token_ids).reshape(-1).tolist() if token >= 0]
        return str(self.tokenizer.decode(kept, skip_special_tokens=skip_special_tokens))

    def batch_decode(self, token_ids: Sequence[Any], skip_special_tokens: bool = False) -> list[str]:
        """The text of each of many."""
        return [self.decode(row, skip_special_tokens) for row in token_ids]

    # Pictures.

    @cached_property
    def pictures(self) -> PicturePreparer | None:
        """What prepares pictures; None for a model of text alone. It is loaded for the first picture."""
        return picture_preparer(self.model_path)

    @property
    def is_mm(self) -> bool:
        """Whether the model takes pictures."""
        return self.pictures is not None

    def preprocess_image(self, image: Any) -> PIL.Image.Image:
        """The picture that a data set holds, decoded."""
        return read_picture("image", image)

    def preprocess_images(self, images: Sequence[Any]) -> list[PIL.Image.Image]:
        """Those of a row, in order."""
        return [read_picture(f"images[{number}]", image) for number, image in enumerate(images)]

    def preprocess_video(self, video: Any) -> NoReturn:
        """Refuse a film: its pictures, chosen by whoever knows the film, go as ``images``.

        Raises:
            RowError: Always; names the field.
        """
        raise RowError("videos", NOT_TAKEN_REASON)

    def preprocess_videos(self, videos: Sequence[Any]) -> list[Any]:
        """Those of a row: none."""
        return [self.preprocess_video(video) for video in videos]

    def preprocess_audio(self, audio: Any) -> NoReturn:
        """Refuse a sound.

        Raises:
            RowError: Always; names the field.
        """
        raise RowError("audios", NOT_TAKEN_REASON)

    def preprocess_audios(self, audios: Sequence[Any]) -> list[Any]:
        """Those of a row: none."""
        return [self.preprocess_audio(audio) for audio in audios]

    def pre_forward_hook(self, model: Any, args: Any, kwargs: Any) -> Any:
        """What goes into the model, for a template of one's own to look at or to change (``(args, kwargs)``)."""
        return args, kwargs

    def get_vllm_input_ids(self, row: Mapping[str, Any]) -> list[int]:
        """The tokens of a row with one for each picture, as vLLM wants them: it counts by itself."""
        tokens = np.asarray(row["input_ids"], dtype=np.int64)
        if row.get("mm_token_type_ids") is None:
            return [int(token) for token in tokens]
        is_picture = np.asarray(row["mm_token_type_ids"]).reshape(-1) == 1
        is_first = is_picture & ~np.append(False, is_picture[:-1])
        borders = self.pictures.borders if self.pictures is not None else ()
        return [int(token) for token in tokens[(~is_picture | is_first) & ~np.isin(tokens, borders)]]

    def _picture_preparer(self) -> PicturePreparer:
        if self.pictures is None:
            raise RowError("images", f"are in the row, but {self.model_id} takes text alone")
        return self.pictures

    # What a model has written.

    def parse_tool_call(self, text: str) -> list[ToolCall]:
        """The calls of tools in a text, in whichever of the known ways they are written; arguments as JSON text."""
        return parse_tool_calls(text)

    def clean_tool_call(self, text: str) -> str:
        """The text without the calls."""
        return without_tool_calls(text)

    def concat_input_feature(self, prompt_feature: Trajectory, new_tokens: Sequence[int]) -> Row:
        """The row of a prompt extended by what was sampled, which alone trains; its message is appended."""

        def read(tokens: Sequence[int]) -> str:
            return self.decode(tokens, skip_special_tokens=True)

        texts = Texts(decode=self.decode, read=read, parse_tool_calls=self.parse_tool_call)
        return continued_row(prompt_feature, np.asarray(new_tokens, dtype=np.int64).tolist(), texts=texts)

    # The way of one row.

    def _rows_of(self, trajectory: Trajectory, add_generation_prompt: bool) -> list[Row]:
        """The rows of one trajectory among many: by the ``encode`` of a template of one's own, if it has one."""
        if type(self).encode is Template.encode:
            return self._encode([trajectory], add_generation_prompt)[0]
        try:
            return [self.encode(trajectory, add_generation_prompt=add_generation_prompt)]
        except _Deleted:
            return []

    def _encode(self, trajectories: Sequence[Trajectory], add_generation_prompt: bool) -> list[list[Row]]:
        """Of each its rows. All are written before any is cut into tokens."""
        written = [one for trajectory in trajectories for one in self._all_written(trajectory, add_generation_prompt)]
        cut = (
            tokenize_all(self.tokenizer, written) if self.use_chat_template else tokenize_plain(self.tokenizer, written)
        )
        parts = (self._token_row(one, *tokens) for one, tokens in zip(written, cut, strict=True))
        return [self._rows_made(trajectory, parts) for trajectory in trajectories]

    def _all_written(self, trajectory: Trajectory, add_generation_prompt: bool) -> list[Written]:
        """The trajectory, or those that are its fields, as text."""
        names = _nested(trajectory)
        if not names:
            return [self._written(trajectory, add_generation_prompt)]
        written: list[Written] = []
        for name in names:
            with _told_within(name):
                written += self._all_written(trajectory[name], add_generation_prompt)
        return written

    def _rows_made(self, trajectory: Trajectory, parts: Iterator[TokenRow]) -> list[Row]:
        """The rows of a trajectory, whose next parts are its own, in the order in which they were written."""
        names = _nested(trajectory)
        if not names:
            pieces = truncate(next(parts), self.max_length, self.truncation_strategy)
            return [{**trajectory, **piece.fields()} for piece in pieces]
        made: dict[str, list[Row]] = {}
        for name in names:
            with _told_within(name):
                made[name] = self._rows_made(trajectory[name], parts)
            if len(made[name]) > 1:
                raise RowError(name, "is too long, and of a row within a row 'split' can make no several; use 'delete'")
        if not all(made.values()):
            return []
        return [{**trajectory, **{name: rows[0] for name, rows in made.items()}}]

    def _written(self, trajectory: Trajectory, add_generation_prompt: bool) -> Written:
        if not self.use_chat_template:
            text = plain_text(trajectory)
            return Written(text, [] if add_generation_prompt else [(0, len(text))])
        return self._writer.written(trajectory, add_generation_prompt, default_system=self.default_system)

    def _token_row(self, written: Written, tokens: Tokens, is_trained: Flags) -> TokenRow:
        """Its tokens and their shifted labels, its pictures in their places."""
        media: dict[str, Any] = {}
        positions = None
        if written.pictures:
            preparer = self._picture_preparer()
            made = preparer.prepare(self.preprocess_images(written.pictures))
            tokens, is_trained, media, positions = put_in_place(tokens, is_trained, preparer, made)
        return TokenRow(tokens, shifted(np.where(is_trained, tokens, IGNORED_LABEL)), positions, media)


def _nested(trajectory: Trajectory) -> list[str]:
    """The names of fields that are trajectories themselves.

    Raises:
        RowError: It is none.
    """
    if not isinstance(trajectory, Mapping):
        raise RowError("row", f"is a {type(trajectory).__name__}; send an object with messages")
    return [name for name, value in trajectory.items() if isinstance(value, Mapping) and "messages" in value]


@contextmanager
def _told_within(name: str) -> Iterator[None]:
    """Say of what is wrong in a field in which one it is."""
    try:
        yield
    except RowError as error:
        raise error.within(name) from error
