"""The OpenAPI document says of every route what it takes and gives, and no more or less than is enforced."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import fastapi.routing
import httpx
import pytest
from fastapi import Response
from openapi_spec_validator import validate
from pydantic import Field

import twinkle.server
from twinkle.core.settings import Settings
from twinkle.server.app import create_app
from twinkle.server.openapi import PATH, Api, described
from twinkle.wire.bodies.base import RequestBody

if TYPE_CHECKING:
    from conftest import Api as ServedApi

DOCUMENT = create_app(Settings(redis_url="redis://nowhere")).openapi()
SERVER = Path(twinkle.server.__file__).parent
# Taken, as the SDK sends them, and not looked at.
UNREAD = {"client_config", "client_dynamic_config", "telemetry"}


def operations() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, calls in DOCUMENT["paths"].items():
        for method, call in calls.items():
            yield method.upper(), path, call


OPERATIONS = list(operations())
IDS = [f"{method} {path}" for method, path, _ in OPERATIONS]


@dataclass(frozen=True)
class Route:
    """A route as it is written: what it calls its body, and the words of all that its function leads to in its file."""

    name: str
    body: str | None
    words: str


def _routes() -> Iterator[Route]:
    for file in sorted(SERVER.rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        for function in functions.values():
            for decorator in function.decorator_list:
                if isinstance(decorator, ast.Call) and ast.unparse(decorator.func).startswith("router."):
                    yield Route(f"{file.stem}.{function.name}", _body_of(decorator), _words(function, functions, set()))


def _body_of(decorator: ast.Call) -> str | None:
    for node in ast.walk(decorator):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "described":
            return next((ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg == "body"), None)
    return None


def _words(function: ast.AST, functions: dict[str, Any], seen: set[str]) -> str:
    assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
    text = ast.unparse(ast.Module([function.args, *function.body], []))
    for name in {node.id for node in ast.walk(function) if isinstance(node, ast.Name)} & functions.keys() - seen:
        seen.add(name)
        text += _words(functions[name], functions, seen)
    return text


ROUTES = list(_routes())


def test_the_document_is_valid_openapi() -> None:
    validate(DOCUMENT)


@pytest.mark.parametrize(("method", "path", "call"), OPERATIONS, ids=IDS)
def test_a_route_says_how_it_answers_and_refuses(method: str, path: str, call: dict[str, Any]) -> None:
    well = [answer for status, answer in call["responses"].items() if status[0] in "23"]
    refused = [answer for status, answer in call["responses"].items() if status[0] == "4"]

    assert well and refused
    assert call["description"] and call["responses"].keys() >= {"400", "503"}
    for answer in refused:
        assert answer["content"]["application/json"]["schema"]


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
def test_a_route_reads_the_body_that_it_describes(route: Route) -> None:
    reads = any(call in route.words for call in (".bodies.", "IncomingBody(", "receive_part("))

    if route.name.split(".")[1] in UNREAD:
        return
    assert reads == (route.body is not None), "a route that reads a body says so: described(..., body=...)"
    # No class reads what is no JSON.
    is_raw = route.body in ("_PASSES", "_FORM") or (route.body or "").startswith("Raw(")
    assert route.body is None or route.body in route.words or is_raw


def test_a_route_without_a_description_is_an_error() -> None:
    app = Api()

    @app.get("/somewhere")
    async def somewhere() -> Response:
        """Nobody knows what this answers."""
        return Response()

    with pytest.raises(ValueError, match="GET /somewhere does not say"):
        app.openapi()


def test_two_bodies_of_one_name_are_an_error() -> None:
    class First(RequestBody):
        number: int

    second = type("First", (RequestBody,), {"__annotations__": {"number": str}})
    app = Api()
    app.get("/first", openapi_extra=described(None, body=First))(_nothing)
    app.get("/second", openapi_extra=described(None, body=second))(_nothing)

    with pytest.raises(ValueError, match="called First"):
        app.openapi()


def test_limits_of_64_bits_are_exact() -> None:
    class Large(RequestBody):
        number: Annotated[int, Field(ge=-(2**63), le=2**64 - 1)]

    app = Api()
    app.get("/large", openapi_extra=described(None, body=Large))(_nothing)

    schema = app.openapi()["components"]["schemas"]["Large"]["properties"]["number"]
    assert (schema["minimum"], schema["maximum"]) == (-(2**63), 2**64 - 1)


async def _nothing() -> Response:
    return Response(status_code=204)


@pytest.mark.parametrize(
    ("name", "field", "limits"),
    [
        ("SampleRequest", "num_samples", {"minimum": 1, "maximum": 1024}),
        ("SamplingParams", "top_p", {"exclusiveMinimum": 0, "maximum": 1}),
        ("SearchRequest", "limit", {"minimum": 1, "maximum": 200}),
        ("SessionProjectRequest", "project_id", {"minLength": 1, "maxLength": 512}),
        ("CollectRequest", "request_ids", {"minItems": 1, "maxItems": 500}),
        ("OptimStepRequest", "seq_id", {"minimum": 1, "maximum": 2**31 - 1}),
    ],
)
def test_limits_stand_in_the_schemas(name: str, field: str, limits: dict[str, int]) -> None:
    schema = DOCUMENT["components"]["schemas"][name]["properties"][field]

    assert schema.items() >= limits.items()


def test_a_query_s_limits_stand_in_the_document() -> None:
    limit = next(one for one in DOCUMENT["paths"]["/api/v1/sessions"]["get"]["parameters"] if one["name"] == "limit")

    assert (limit["schema"]["minimum"], limit["schema"]["maximum"]) == (0, 1000)


def test_anybody_may_read_the_document(api: ServedApi) -> None:
    response = httpx.get(f"{api.url}{PATH}")

    assert response.headers["content-type"] == "application/json"
    assert response.json() == DOCUMENT


# Without a key no database is asked: the other one has its turn in soak.
@pytest.mark.parametrize("api", [pytest.param("sqlite", marks=pytest.mark.soak), "postgres"], indirect=True)
@pytest.mark.parametrize(("method", "path", "call"), OPERATIONS, ids=IDS)
def test_what_needs_a_key_is_what_says_so(api: ServedApi, method: str, path: str, call: dict[str, Any]) -> None:
    response = httpx.request(method, f"{api.url}{path}", content=b"{}")

    keys = {scheme for one in call["security"] for scheme in one}
    assert (response.status_code == 401) == (keys not in (set(), {"adminKey"}))


async def test_no_request_waits_until_the_routes_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []
    build = fastapi.routing.get_dependant

    def counted(**arguments: Any) -> Any:
        built.append(arguments["path"])
        return build(**arguments)

    monkeypatch.setattr(fastapi.routing, "get_dependant", counted)
    app = create_app(Settings(redis_url="redis://nowhere"))
    assert isinstance(app, Api)
    num_made = len(built)
    await app.build_routes()
    num_built = len(built)
    for method, path, _ in OPERATIONS:
        for route in app.routes:
            route.matches({"type": "http", "method": method, "path": path, "root_path": "", "headers": []})

    # Routes of included routers are built once more with what the routers say of them.
    assert len(built) == num_built > num_made
