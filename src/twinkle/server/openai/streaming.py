"""A streamed answer: tokens as they are heard, then what is left of the results as the journal has them.

What is heard may be lost, doubled, out of order or wrong. So it only ever moves forward what is sent, and the result is
held to what was sent: the parts of a stream that ends well are the text of the result, to the character.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

import orjson
from fastapi import Request, Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from twinkle.scheduler.token_stream import Listener
from twinkle.server.answering.token_feeds import Expected, ScoredToken, TokenFeed
from twinkle.server.errors import openai_error_of
from twinkle.server.model_texts import TextModel
from twinkle.server.openai.answers import JsonObject, choices_of, usage_of
from twinkle.server.openai.drawing import Drawing, ServedModel
from twinkle.server.openai.growing_choice import GrowingChoice, Part, Wanted
from twinkle.server.openai.ordering import Drawn, SampleOrder, Silence, give_up, outcome, prepare, submit
from twinkle.server.state import Server


class Form(Protocol):
    """How one route writes its chunks."""

    def chunks(self, head_id: str, part: Part) -> Iterator[JsonObject]:
        """A part of a choice, as one chunk or several."""
        ...

    def usage(self, head_id: str, usage: JsonObject) -> Iterator[JsonObject]:
        """The counts, if they are wanted."""
        ...


@dataclass(frozen=True, kw_only=True)
class Framing:
    """How chunks are put on the wire: one by one, then the last, or a refusal where something goes wrong on the way."""

    media_type: str
    write: Callable[[bytes], bytes]
    last: bytes | None
    refusal: Callable[[Request, Exception], bytes]


@dataclass(kw_only=True)
class _Prompt:
    """One operation of a stream: what is heard of it, and what became of it."""

    drawing: Drawing
    request_id: str
    feed: TokenFeed
    choices: list[GrowingChoice]
    first_index: int
    outcome: asyncio.Task[Drawn]
    is_sent: bool = False


async def stream_answer(
    server: Server,
    request: Request,
    tenant: str,
    model: ServedModel,
    text_model: TextModel | None,
    drawings: Sequence[Drawing],
    form: Form,
    wanted: Wanted,
) -> Response:
    """Draw, and send as it comes. An answer begins with its first chunk: what fails before that is a refusal."""
    order = await prepare(server, request, tenant, model, text_model, drawings)
    return await stream_order(server, request, order, text_model, drawings, form, wanted)


async def stream_order(
    server: Server,
    request: Request,
    order: SampleOrder,
    text_model: TextModel | None,
    drawings: Sequence[Drawing],
    form: Form,
    wanted: Wanted,
    framing: Framing | None = None,
) -> Response:
    """Submit an order, and send what comes of it as :func:`stream_answer` does."""
    chunks = _chunks(server, request, order, text_model, drawings, form, wanted)
    try:
        first = await anext(chunks)
    except BaseException:
        await chunks.aclose()
        raise
    return ChunkStream(request, first, chunks, framing or EVENTS)


async def _chunks(
    server: Server,
    request: Request,
    order: SampleOrder,
    text_model: TextModel | None,
    drawings: Sequence[Drawing],
    form: Form,
    wanted: Wanted,
) -> AsyncGenerator[JsonObject, None]:
    changed = asyncio.Event()
    silence = Silence()
    expected = {
        request_id: Expected(
            num_samples=drawing.num_samples,
            max_tokens=drawing.max_tokens,
            topk=drawing.topk if wanted.scores else None,
        )
        for request_id, drawing in zip(order.request_ids, drawings, strict=True)
    }
    head_id = order.request_ids[0]
    is_complete = False
    outcomes: list[asyncio.Task[Drawn]] = []
    # Before anything is accepted, so that nothing of it is missed.
    with server.queue.token_feeds.open(expected, changed) as feeds:
        try:
            await submit(server, order, Listener(id=server.queue.token_feeds.id, scores=wanted.scores))
            outcomes = [
                asyncio.create_task(_drawn(server, request, order.tenant, request_id, silence))
                for request_id in order.request_ids
            ]
            for task in outcomes:
                task.add_done_callback(lambda _: changed.set())
            prompts = _prompts(order, drawings, feeds, outcomes, text_model, wanted)
            async with aclosing(_parts(server, prompts, changed, text_model)) as parts:
                async for part in parts:
                    silence.renew()
                    for chunk in form.chunks(head_id, part):
                        yield chunk
            drawn = [task.result() for task in outcomes]
            for chunk in form.usage(head_id, usage_of(drawn, drawings)):
                yield chunk
            is_complete = True
        finally:
            for task in outcomes:
                task.cancel()
            await asyncio.gather(*outcomes, return_exceptions=True)
            if not is_complete:
                await give_up(server, order)


def _prompts(
    order: SampleOrder,
    drawings: Sequence[Drawing],
    feeds: Sequence[TokenFeed],
    outcomes: Sequence[asyncio.Task[Drawn]],
    text_model: TextModel | None,
    wanted: Wanted,
) -> list[_Prompt]:
    prompts: list[_Prompt] = []
    index = 0
    for request_id, drawing, feed, task in zip(order.request_ids, drawings, feeds, outcomes, strict=True):
        indices = range(index, index + drawing.num_samples)
        choices = [GrowingChoice(i, text_model, drawing.stops, wanted) for i in indices]
        prompts.append(
            _Prompt(
                drawing=drawing,
                request_id=request_id,
                feed=feed,
                choices=choices,
                first_index=index,
                outcome=task,
            )
        )
        index += drawing.num_samples
    return prompts


async def _parts(
    server: Server, prompts: Sequence[_Prompt], changed: asyncio.Event, text_model: TextModel | None
) -> AsyncGenerator[Part, None]:
    """Parts of all choices as they come, until every operation has ended. Whoever reads slowly gets larger ones."""
    while not all(prompt.is_sent for prompt in prompts):
        await changed.wait()
        changed.clear()
        for prompt in prompts:
            if prompt.is_sent:
                continue
            if prompt.outcome.done():
                drawn = prompt.outcome.result()
                for part in await server.common.object_io.run(_rest, prompt, drawn, text_model):
                    yield part
                prompt.is_sent = True
            else:
                heard = [sample.take() for sample in prompt.feed.samples]
                if any(heard):
                    for part in await server.common.object_io.run(_growth, prompt, heard):
                        yield part


def _growth(prompt: _Prompt, heard: Sequence[Sequence[ScoredToken]]) -> list[Part]:
    grown = [choice.grow(new) for choice, new in zip(prompt.choices, heard, strict=True) if new]
    return [part for part in grown if part is not None]


def _rest(prompt: _Prompt, drawn: Drawn, text_model: TextModel | None) -> list[Part]:
    results = choices_of([drawn], [prompt.drawing], text_model, first_index=prompt.first_index)
    return [choice.finish(result) for choice, result in zip(prompt.choices, results, strict=True)]


async def _drawn(server: Server, request: Request, tenant: str, request_id: str, silence: Silence) -> Drawn:
    return Drawn(request_id, await outcome(server, request, tenant, request_id, silence))


class ChunkStream(Response):
    """Chunks as they come. Whatever becomes of the connection, the source is closed."""

    def __init__(
        self, request: Request, first: JsonObject, rest: AsyncGenerator[JsonObject, None], framing: Framing
    ) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(headers=headers, media_type=framing.media_type)
        del self.headers["content-length"]
        self._framing = framing
        self._request = request
        self._first = first
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything; when the client hangs up, stop at once."""
        async with aclosing(self._rest):
            sending = asyncio.create_task(self._send(send))
            leaving = asyncio.create_task(_until_left(receive))
            try:
                await asyncio.wait([sending, leaving], return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (sending, leaving):
                    task.cancel()
                await asyncio.wait([sending, leaving])
            if not sending.cancelled() and (error := sending.exception()) is not None:
                raise error

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._lines()) as lines:
            async for line in lines:
                await send({"type": "http.response.body", "body": line, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _lines(self) -> AsyncGenerator[bytes, None]:
        yield self._framing.write(orjson.dumps(self._first))
        try:
            async for chunk in self._rest:
                yield self._framing.write(orjson.dumps(chunk))
        except ClientDisconnect:
            return
        except Exception as error:  # noqa: BLE001 - the border: the status is sent, so the stream must tell
            yield self._framing.write(self._framing.refusal(self._request, error))
            return
        if self._framing.last is not None:
            yield self._framing.write(self._framing.last)


async def _until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


EVENTS = Framing(media_type="text/event-stream", write=_event, last=b"[DONE]", refusal=openai_error_of)
"""Server-sent events, as OpenAI's clients read them."""
