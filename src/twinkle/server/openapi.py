"""The service's OpenAPI document, made of the classes that read the bodies and write the answers.

Bodies are read by hand, within bounds, so FastAPI knows nothing of them: each route says what it takes and gives with
``openapi_extra=described(...)``, and :class:`Api` puts that into the document. Nothing of it runs when a request comes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from http import HTTPStatus
from typing import Any, TypeAlias

import orjson
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, TypeAdapter, model_serializer
from pydantic.json_schema import JsonSchemaMode
from starlette.types import Message, Receive, Scope, Send

from twinkle.server.answering.held_results import HeldResults
from twinkle.server.answering.turns import Turns
from twinkle.server.connections.direct import DirectRoutes
from twinkle.server.connections.echo import echoing, request_id_to_echo
from twinkle.server.connections.free_memory import FreedMemory
from twinkle.server.connections.mounting import unmounted
from twinkle.server.errors import JSON, OpenAIRefusal, Refusal
from twinkle.server.receiving.in_progress import RequestsInProgress
from twinkle.server.receiving.request_metadata import MAX_KEY_LENGTH
from twinkle.server.state import Common

PATH = "/openapi.json"
PROTOBUF = "application/x-protobuf"
BYTES = "application/octet-stream"
EVENTS = "text/event-stream"

# Where a route's own words are, so that FastAPI leaves them alone: it would make floats of limits of 64 bits.
_EXTENSION = "x-described"
_REFERENCE = "#/components/schemas/{model}"
_METHODS = {"get", "put", "post", "delete", "head"}

JsonObject: TypeAlias = dict[str, Any]
# A class of bodies, a typed dictionary, a union of such.
BodyType: TypeAlias = Any

router = APIRouter()


@dataclass(frozen=True)
class Raw:
    """A body that no schema describes; words do."""

    media_type: str
    description: str


class Access(Enum):
    """What opens a route, as lists of alternatives: names of security schemes."""

    NONE = ()
    TENANT = ("apiKey",)
    CALLER = ("bearer", "apiKey")
    """Of the OpenAI-compatible routes, whose refusals have OpenAI's form too."""
    TWINKLE = ("twinkleBearer", "bearer", "apiKey")
    """Of the Twinkle dialect."""
    ADMINISTRATOR = ("adminKey",)


_SCHEMES: JsonObject = {
    "apiKey": {"type": "apiKey", "in": "header", "name": "X-API-Key", "description": "A tenant's key, tml-..."},
    "bearer": {"type": "http", "scheme": "bearer", "description": "The same key, as OpenAI's clients send it."},
    "twinkleBearer": {
        "type": "apiKey",
        "in": "header",
        "name": "Twinkle-Authorization",
        "description": "Bearer and the same key, as Twinkle's clients send it; it goes before Authorization.",
    },
    "adminKey": {"type": "apiKey", "in": "header", "name": "X-Admin-Key", "description": "TWINKLE_ADMIN_KEY."},
}


class Description(BaseModel):
    """What a route takes and gives. Its words are made when the document is written, not when the route is."""

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)

    answers: tuple[BodyType | Raw, ...]
    status: int
    bodies: tuple[BodyType | Raw, ...]
    body_required: bool
    others: Mapping[int, BodyType | Raw]
    refusals: frozenset[int]
    headers: tuple[str, ...]
    access: Access

    @model_serializer
    def _words(self) -> JsonObject:
        schemas: JsonObject = {}
        refusal = _content([OpenAIRefusal if self.access is Access.CALLER else Refusal], "serialization", schemas)
        responses = {self.status: _content(self.answers, "serialization", schemas)}
        responses |= {status: _content([one], "serialization", schemas) for status, one in self.others.items()}
        responses |= {status: refusal for status in sorted(self._refused() - responses.keys())}
        words: JsonObject = {
            "security": [{scheme: []} for scheme in self.access.value],
            "parameters": [_header(name) for name in self.headers],
            "responses": {
                str(status): {"description": HTTPStatus(status).phrase, **content}
                for status, content in responses.items()
            },
            "refusal": refusal,
            "schemas": schemas,
        }
        if self.bodies:
            words["requestBody"] = {"required": self.body_required, **_content(self.bodies, "validation", schemas)}
        return words

    def _refused(self) -> frozenset[int]:
        unopened = {Access.NONE: set[int](), Access.ADMINISTRATOR: {404}}.get(self.access, {401, 429})
        return self.refusals | {400, 408, 414, 431, 503} | unopened | ({413, 429} if self.bodies else set())


def described(
    answer: BodyType | Raw | None,
    *also: BodyType | Raw,
    body: BodyType | Raw | None = None,
    also_body: BodyType | Raw | None = None,
    body_required: bool = True,
    status: int | None = None,
    others: Mapping[int, BodyType | Raw] | None = None,
    refusals: Iterable[int] = (),
    headers: Sequence[str] = (),
    access: Access = Access.TENANT,
) -> JsonObject:
    """What a route takes and gives, for its ``openapi_extra``.

    Args:
        answer: What it answers when all is well; ``None``: nothing.
        also: Other forms of that answer, in other media types.
        body: What it takes, by the class that reads it.
        also_body: Another form of that, in another media type.
        body_required: Whether it must be there.
        status: Of the answer when all is well; 200, or 204 without one.
        others: Answers under other statuses that are no refusals.
        refusals: Statuses of refusals beside those that follow from the rest: 400, 408, 414, 431 and 503 anywhere, 401
            where a key is needed, 413 and 429 where a body is taken, 422 where a query is.
        headers: Names of optional headers that change the answer.
        access: What opens it.
    """
    description = Description(
        answers=(*([answer] if answer is not None else []), *also),
        status=status or (204 if answer is None else 200),
        bodies=tuple(one for one in (body, also_body) if one is not None),
        body_required=body_required,
        others=others or {},
        refusals=frozenset(refusals),
        headers=tuple(headers),
        access=access,
    )
    return {_EXTENSION: description}


class Api(FastAPI):
    """The app, with a document that is complete, and direct ways to the routes that have them."""

    direct: DirectRoutes | None = None
    mounted_at: str = ""
    """The path of its host under which it lies."""
    public_url: str = ""
    document: bytes | None = None
    """The document as it is sent, once it was asked for."""
    results: HeldResults | None = None
    """What answers hold until they have left."""
    in_progress: RequestsInProgress | None = None
    """Whose requests there are."""
    writing: asyncio.Lock
    """Of the document, which one request does and those that come meanwhile wait for."""
    freed: FreedMemory
    """What requests and connections let go of."""
    turns: Turns
    """Whose large answer is written next."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "http":
            scope = unmounted(scope, self.mounted_at)
        if scope["type"] != "http" or self.results is None or self.in_progress is None:
            await self._answer(scope, receive, send)
            return
        holds, begun = self.results.watch(scope), self.in_progress.watch(scope)
        try:
            await self._answer(scope, receive, self.turns.writing(scope, send))
        finally:
            self.results.release(holds)
            self.in_progress.end(begun)

    async def build_routes(self) -> None:
        """Build and import all that the first requests would, while every other one waits."""
        nowhere: Scope = {"type": "http", "method": "GET", "path": "/", "root_path": "", "headers": []}
        for route in self.routes:
            route.matches(dict(nowhere))
        # What streamed answers run on is imported by the first of them.
        await StreamingResponse(iter([b""]))(nowhere, _never_receive, _send_nowhere)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = None if self.direct is None else self.direct.find(scope)
        if route is None:
            request_id = request_id_to_echo(scope) if scope["type"] == "http" else None
            answer = super().__call__
            await (answer if request_id is None else echoing(answer, request_id))(scope, receive, send)
            return
        scope["app"] = self
        await route(scope, receive, send)

    def openapi(self) -> JsonObject:
        """The document; made once.

        Raises:
            ValueError: A route does not describe itself, or two different classes have one name.
        """
        if self.openapi_schema is None:
            document = get_openapi(title=self.title, version=self.version, summary=self.summary, routes=self.routes)
            self.openapi_schema = _completed(document)
            at = self.public_url or self.mounted_at
            if at:
                self.openapi_schema["servers"] = [{"url": at}]
        return self.openapi_schema


@router.get(PATH, include_in_schema=False)
async def show_document(request: Request, common: Common) -> Response:
    """The document. No key is needed: it names nobody, and tools that read it have none."""
    app: Api = request.app
    async with app.writing:
        if app.document is None:
            app.document = await common.object_io.run(lambda: orjson.dumps(app.openapi()))
            # Thousands of small objects that nobody reads again.
            app.openapi_schema = None
    return Response(app.document, media_type=JSON)


async def _never_receive() -> Message:
    await asyncio.Event().wait()
    return {"type": "http.disconnect"}


async def _send_nowhere(message: Message) -> None:
    del message


def _content(bodies: Sequence[BodyType | Raw], mode: JsonSchemaMode, into: JsonObject) -> JsonObject:
    """The ``content`` of a request or a response; the schemas it refers to go ``into`` the others."""
    content: JsonObject = {}
    words = []
    for body in bodies:
        if isinstance(body, Raw):
            content[body.media_type] = {"schema": {}}
            words.append(body.description)
            continue
        content[JSON], definitions = _schema(body, mode)
        _merge(into, definitions)
    return ({"content": content} if content else {}) | ({"description": " ".join(words)} if words else {})


@cache
def _schema(body: BodyType, mode: JsonSchemaMode) -> tuple[JsonObject, JsonObject]:
    """A body's ``schema``, and those it refers to by name."""
    references, definitions = TypeAdapter.json_schemas([("", mode, TypeAdapter(body))], ref_template=_REFERENCE)
    return {"schema": references["", mode]}, definitions.get("$defs", {})


def _header(name: str) -> JsonObject:
    schema = {"type": "string", "maxLength": MAX_KEY_LENGTH}
    return {"name": name, "in": "header", "required": False, "schema": schema}


def _completed(document: JsonObject) -> JsonObject:
    # Those of parameters; FastAPI's own refusals are never answered.
    schemas: JsonObject = {
        name: schema
        for name, schema in document.get("components", {}).get("schemas", {}).items()
        if not name.endswith("ValidationError")
    }
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            if method not in _METHODS:
                continue
            words = operation.pop(_EXTENSION, None)
            if words is None:
                raise ValueError(f"{method.upper()} {path} does not say what it takes and gives: see described()")
            _merge(schemas, words.pop("schemas"))
            refusal = words.pop("refusal")
            parameters = [*operation.get("parameters", []), *words.pop("parameters")]
            operation.update(words)
            if parameters:
                operation["parameters"] = parameters
            if any(parameter["in"] == "query" for parameter in parameters):
                phrase = HTTPStatus.UNPROCESSABLE_ENTITY.phrase
                operation["responses"]["422"] = {"description": phrase, **refusal}
    document["components"] = {"schemas": dict(sorted(schemas.items())), "securitySchemes": _SCHEMES}
    return document


def _merge(into: JsonObject, schemas: JsonObject) -> None:
    for name, schema in schemas.items():
        if into.setdefault(name, schema) != schema:
            raise ValueError(f"two different classes of bodies are called {name}")
