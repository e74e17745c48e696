"""The service's OpenAPI document, made of the classes that read the bodies and write the answers.

Bodies are read by hand, within bounds, so FastAPI knows nothing of them: each route says what it takes and gives with
``openapi_extra=described(...)``, and :class:`Api` puts that into the document. Nothing of it runs when a request comes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from http import HTTPStatus
from typing import Any, Literal, TypeAlias

import orjson
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter

from twinkle.server.errors import JSON, Refusal
from twinkle.server.openai_refusals import OpenAIRefusal
from twinkle.server.state import Server

PATH = "/openapi.json"
PROTOBUF = "application/x-protobuf"
BYTES = "application/octet-stream"
EVENTS = "text/event-stream"

# Where a route's own words wait, untouched by FastAPI, which would turn the limits of 64-bit numbers into floats.
_EXTENSION = "x-described"
_REFERENCE = "#/components/schemas/{model}"
_METHODS = {"get", "put", "post", "delete", "head"}
_MAX_HEADER_CHARS = 256

JsonObject: TypeAlias = dict[str, Any]
# A class of bodies, a typed dictionary, a union of such.
BodyType: TypeAlias = Any

router = APIRouter()


@dataclass(frozen=True)
class Raw:
    """A body that no schema describes; words do."""

    media_type: str
    description: str


class Key(Enum):
    """What opens a route, as lists of alternatives: names of security schemes."""

    NONE = ()
    TENANT = ("apiKey",)
    CALLER = ("bearer", "apiKey")
    """Of the OpenAI-compatible routes, whose refusals have OpenAI's form too."""
    ADMINISTRATOR = ("adminKey",)


_SCHEMES: JsonObject = {
    "apiKey": {"type": "apiKey", "in": "header", "name": "X-API-Key", "description": "A tenant's key, tml-..."},
    "bearer": {"type": "http", "scheme": "bearer", "description": "The same key, as OpenAI's clients send it."},
    "adminKey": {"type": "apiKey", "in": "header", "name": "X-Admin-Key", "description": "TWINKLE_ADMIN_KEY."},
}


def described(
    answer: BodyType | Raw | None,
    *also: BodyType | Raw,
    body: BodyType | Raw | None = None,
    body_required: bool = True,
    others: Mapping[int, BodyType] | None = None,
    refusals: Iterable[int] = (),
    headers: Sequence[str] = (),
    key: Key = Key.TENANT,
) -> JsonObject:
    """What a route takes and gives, for its ``openapi_extra``.

    Args:
        answer: What it answers with status 200; ``None``: an empty 204.
        also: Other forms of that answer, in other media types.
        body: What it takes, by the class that reads it.
        body_required: Whether it must be there.
        others: Answers under other statuses that are no refusals.
        refusals: Statuses of refusals beside those that follow from the rest: 400 and 503 anywhere, 401 where a key is
            needed, 413 and 429 where a body is taken, 422 where a query is.
        headers: Names of optional headers that change the answer.
        key: What opens it.
    """
    schemas: JsonObject = {}
    refusal = OpenAIRefusal if key is Key.CALLER else Refusal
    responses = {200: _content([answer, *also], "serialization", schemas)} if answer is not None else {204: {}}
    responses |= {status: _content([one], "serialization", schemas) for status, one in (others or {}).items()}
    for status in sorted({*refusals, *_usual_refusals(key, takes_body=body is not None)}):
        responses.setdefault(status, _content([refusal], "serialization", schemas))
    words: JsonObject = {
        "security": [{scheme: []} for scheme in key.value],
        "parameters": [_header(name) for name in headers],
        "responses": {
            str(status): {"description": HTTPStatus(status).phrase, **content} for status, content in responses.items()
        },
        "refusal": _content([refusal], "serialization", schemas),
        "schemas": schemas,
    }
    if body is not None:
        words["requestBody"] = {"required": body_required, **_content([body], "validation", schemas)}
    return {_EXTENSION: words}


class Api(FastAPI):
    """The app, with a document that is complete."""

    def openapi(self) -> JsonObject:
        """The document; made once.

        Raises:
            ValueError: A route does not describe itself, or two different classes have one name.
        """
        if self.openapi_schema is None:
            document = get_openapi(
                title=self.title, version=self.version, description=self.description, routes=self.routes
            )
            self.openapi_schema = _completed(document)
        return self.openapi_schema


@router.get(PATH, include_in_schema=False)
async def show_document(request: Request, server: Server) -> Response:
    """The document. No key is needed: it names nobody, and tools that read it have none."""
    app: Api = request.app
    return Response(orjson.dumps(await server.object_io.run(app.openapi)), media_type=JSON)


def _usual_refusals(key: Key, *, takes_body: bool) -> set[int]:
    unopened = {Key.NONE: set[int](), Key.ADMINISTRATOR: {404}}.get(key, {401})
    return {400, 503} | unopened | ({413, 429} if takes_body else set())


def _content(
    bodies: Sequence[BodyType | Raw], mode: Literal["validation", "serialization"], into: JsonObject
) -> JsonObject:
    """The ``content`` of a request or a response; the schemas it refers to go ``into`` the others."""
    content: JsonObject = {}
    words = []
    for body in bodies:
        if isinstance(body, Raw):
            content[body.media_type] = {"schema": {}}
            words.append(body.description)
            continue
        references, definitions = TypeAdapter.json_schemas([("", mode, TypeAdapter(body))], ref_template=_REFERENCE)
        content[JSON] = {"schema": references["", mode]}
        _merge(into, definitions.get("$defs", {}))
    return {"content": content} | ({"description": " ".join(words)} if words else {})


def _header(name: str) -> JsonObject:
    schema = {"type": "string", "maxLength": _MAX_HEADER_CHARS}
    return {"name": name, "in": "header", "required": False, "schema": schema}


def _completed(document: JsonObject) -> JsonObject:
    schemas: JsonObject = {}
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
