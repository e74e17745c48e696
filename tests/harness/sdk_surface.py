"""What the installed `tinker` package calls and sends, against what is served here.

    PYTHONPATH=src:tests python -m harness.sdk_surface

prints routes that are not served, parameters and request fields that are not read, response fields that are never sent,
and protobuf fields that are not known. `python -m harness.sdk_surface VERSION` asks another version, in an environment
of its own.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, get_args, get_origin

import tinker
from fastapi import FastAPI
from pydantic import AliasChoices, BaseModel
from pydantic.fields import FieldInfo

import twinkle.wire.bodies
from harness.sdk_versions import REPOSITORY, sdk_python
from twinkle.server import health
from twinkle.server.tinker.routes import router as tinker_router
from twinkle.wire import json_passes, json_results, protobuf
from twinkle.wire import sampling as wire_sampling

PREFIX = "/api/v1/"
_METHODS = {"get", "post", "put", "patch", "delete"}
# The SDK's name of a model, and ours where it is another.
_OUR_NAME = {
    "AuditLogResponse": "AuditResponse",
    "BillingUsageResponse": "UsageResponse",
    "CheckpointsListResponse": "CheckpointsResponse",
    "CurrentCheckpointStorageUsageResponse": "StoredResponse",
    "FutureRetrieveRequest": "RetrieveFutureRequest",
    "FuturesRetrieveRequest": "RetrieveFuturesRequest",
    "FuturesRetrieveResponse": "RetrieveFuturesResponse",
    "GetSamplerResponse": "SamplerResponse",
    "GetServerCapabilitiesResponse": "CapabilitiesResponse",
    "GetSessionResponse": "SessionResponse",
    "ListSessionsResponse": "SessionsResponse",
    "RequestFailedResponse": "FailedResponse",
    "SaveWeightsExternalResponseInternal": "SaveWeightsExternalResponse",
    "SaveWeightsForSamplerResponseInternal": "SaveWeightsForSamplerResponse",
    "SessionSearchRequest": "SearchRequest",
    "SessionSearchResponse": "SearchResponse",
    "TelemetrySendRequest": "TelemetryRequest",
    "UntypedAPIFuture": "FutureResponse",
}
_WIRE_NAMES = re.compile(r".*(Request|Response|ResponseInternal)$|UntypedAPIFuture$")


def main(arguments: Sequence[str]) -> int:
    """Prints the differences; returns 1 when there are any."""
    if arguments:
        print(told := differences_of(arguments[0]))
        return int(len(told.splitlines()) > 1)
    differences = [*unknown_routes(), *unknown_parameters(), *unknown_fields(), *unknown_protobuf_fields()]
    print(f"tinker {tinker.__version__}: {len(differences)} differences", *differences, sep="\n")
    return int(bool(differences))


def differences_of(version: str) -> str:
    """Returns what this prints under another version of the SDK."""
    paths = os.pathsep.join(str(REPOSITORY / name) for name in ("src", "tests"))
    command = [sdk_python(version), "-m", "harness.sdk_surface"]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": paths}, stdout=subprocess.PIPE, text=True, check=False
    )
    return done.stdout


def unknown_routes() -> list[str]:
    """Returns what the SDK calls and nobody here answers, as `METHOD path`."""
    served = _served_routes()
    return sorted({f"{method} {path}" for method, path in _called_routes() if not _is_served(method, path, served)})


def unknown_parameters() -> list[str]:
    """Returns what the SDK puts into the query of a route and nobody here reads, as `METHOD path?name`."""
    served = [
        (method, path, {parameter["name"] for parameter in parameters})
        for method, path, parameters in _served_parameters()
    ]
    unknown = set()
    for method, path, sent in _sent_parameters():
        read = [own for own_method, own_path, own in served if _is_served(method, path, [(own_method, own_path)])]
        unknown |= {f"{method} {path}?{name}" for name in sent.difference(*read)}
    return sorted(unknown)


def unknown_fields() -> list[str]:
    """Returns the fields of the SDK's bodies that ours do not have, as `Model.field.field`; of a model, `Model`."""
    ours = dict(_our_models())
    unknown: list[str] = []
    for name, theirs in _sdk_models():
        own = ours.get(_OUR_NAME.get(name, name))
        unknown += [name] if own is None else _unknown_fields([theirs], [own], name)
    return sorted(set(unknown))


def client_flags() -> set[str]:
    """Returns every flag by which the SDK lets a service tell it what to do."""
    return {*tinker.types.ClientConfigResponse.model_fields, *tinker.types.ClientDynamicConfigResponse.model_fields}


def unknown_protobuf_fields() -> list[str]:
    """Returns the fields of the SDK's messages that ours do not have under that number, as `Message.field = number`.

    An SDK that knows no protobuf has none.
    """
    if importlib.util.find_spec("tinker.proto") is None:
        return []
    theirs = importlib.import_module("tinker.proto.tinker_public_pb2").DESCRIPTOR.message_types_by_name
    ours = protobuf.ForwardBackwardRequest.DESCRIPTOR.file.message_types_by_name
    return sorted(
        f"{name}.{field.name} = {field.number}"
        for name, message in theirs.items()
        for field in message.fields
        if name not in ours or field.number not in ours[name].fields_by_number
    )


def _called_routes() -> Iterator[tuple[str, str]]:
    for tree in _sdk_modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                yield from _called_by(node)


def _sdk_modules() -> Iterator[ast.Module]:
    folder = Path(tinker.__file__).parent
    for file in sorted(folder.rglob("*.py")):
        if not file.name.endswith("_test.py"):
            yield ast.parse(file.read_text(encoding="utf-8"))


def _sent_parameters() -> Iterator[tuple[str, str, set[str]]]:
    """Each GET, and what may be in its query: the keys of `params`, wherever its function writes them down."""
    for tree in _sdk_modules():
        for node in ast.walk(tree):
            if not isinstance(node, ast.AsyncFunctionDef):
                continue
            calls = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
            sent = set(_keys_of_params(node))
            for method, path in {route for call in calls for route in _called_by(call)}:
                if method == "GET" and sent:
                    yield method, path, sent


def _keys_of_params(function: ast.AST) -> Iterator[str]:
    for node in ast.walk(function):
        match node:
            case ast.AnnAssign(target=ast.Name(id="params"), value=ast.Dict() as given):
                yield from (_text(key) for key in given.keys if key is not None)
            case ast.Subscript(value=ast.Name(id="params"), slice=name):
                yield _text(name)
            case ast.Dict(keys=[ast.Constant(value="params")], values=[ast.Dict() as given]):
                yield from (_text(key) for key in given.keys if key is not None)


def _called_by(call: ast.Call) -> Iterator[tuple[str, str]]:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    words = [_text(argument) for argument in (*call.args, *(keyword.value for keyword in call.keywords))]
    verbs = [word.lower() for word in (name.strip("_"), *words) if word.lower() in _METHODS]
    for word in words:
        if word.startswith(PREFIX):
            yield (verbs[0].upper() if verbs else "ANY", word.removeprefix(PREFIX))


def _text(node: ast.expr) -> str:
    """The text of a literal, with `{name}` for what is put in; empty for anything else."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if not isinstance(node, ast.JoinedStr):
        return ""
    return "".join(
        f"{{{ast.unparse(part.value)}}}" if isinstance(part, ast.FormattedValue) else _text(part)
        for part in node.values
    )


def _served_routes() -> list[tuple[str, str]]:
    return [(method, path) for method, path, _ in _served_parameters()]


def _served_parameters() -> list[tuple[str, str, list[dict[str, str]]]]:
    app = FastAPI()
    app.include_router(health.router)
    app.include_router(tinker_router)
    return [
        (method.upper(), path.removeprefix(PREFIX), call.get("parameters", []))
        for path, calls in app.openapi()["paths"].items()
        for method, call in calls.items()
    ]


def _is_served(method: str, path: str, served: list[tuple[str, str]]) -> bool:
    # A checkpoint's id is its kind and its name; the kind may be written out here.
    pieces = [
        r"([^/]+/)?\{[^/]+\}" if piece == "{checkpoint_id}" else r"\{[^/]+\}" if "{" in piece else re.escape(piece)
        for piece in path.split("/")
    ]
    pattern = re.compile("/".join(pieces))
    return any(method in ("ANY", own_method) and pattern.fullmatch(own_path) for own_method, own_path in served)


def _sdk_models() -> Iterator[tuple[str, type[BaseModel]]]:
    for name in sorted(vars(tinker.types)):
        model = getattr(tinker.types, name)
        if isinstance(model, type) and issubclass(model, BaseModel) and _WIRE_NAMES.match(name):
            yield name, model


def _our_models() -> Iterator[tuple[str, type[BaseModel]]]:
    folder = twinkle.wire.bodies
    modules = [
        importlib.import_module(f"{folder.__name__}.{found.name}") for found in pkgutil.iter_modules(folder.__path__)
    ]
    for module in (*modules, wire_sampling, json_passes, json_results):
        for name, model in vars(module).items():
            if isinstance(model, type) and issubclass(model, BaseModel):
                yield name, model


def _unknown_fields(theirs: Sequence[type[BaseModel]], ours: Sequence[type[BaseModel]], place: str) -> list[str]:
    """Compares the fields of unions of models, and of what is nested in them."""
    unknown: list[str] = []
    for name, field in {name: field for model in theirs for name, field in model.model_fields.items()}.items():
        matching = [own.model_fields[key] for own in ours for key in _names(name, field) if key in own.model_fields]
        if not matching and not _is_constant(field):
            unknown.append(f"{place}.{name}")
        nested = [model for own in matching for model in _models_in(own.annotation)]
        if nested:
            unknown += _unknown_fields(_models_in(field.annotation), nested, f"{place}.{name}")
    return unknown


def _is_constant(field: FieldInfo) -> bool:
    """A discriminator of one value, which the route says already."""
    return get_origin(field.annotation) is Literal and len(get_args(field.annotation)) == 1


def _names(name: str, field: FieldInfo) -> list[str]:
    alias = field.validation_alias
    return [name, *(str(choice) for choice in alias.choices)] if isinstance(alias, AliasChoices) else [name]


def _models_in(annotation: object) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models_in(part)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
