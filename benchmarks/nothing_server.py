"""The Tinker protocol with nothing behind it: no keys, no journal, no queue, no worker; every future is done at once.

What a loop costs against this server is the cost of the SDK, of HTTP and of a minimal FastAPI app. Whatever a real
server adds, it adds to that.
"""

from __future__ import annotations

import argparse
import itertools

import numpy as np
import uvicorn
from fastapi import FastAPI, Request, Response

from twinkle.wire import protobuf as pb
from twinkle.wire.training_result import ForwardBackwardResult, encode_forward_backward_output
from workload import BASE_MODEL, NUM_DATUMS, RANK, TOKENS_PER_DATUM

JSON = "application/json"
PROTOBUF = "application/x-protobuf"


def create_app() -> FastAPI:
    """Makes the app. Its futures' ids say what was asked, and that is all it remembers."""
    app = FastAPI(openapi_url=None)
    _add_start_up(app)
    _add_operations(app)
    return app


def _add_start_up(app: FastAPI) -> None:
    sessions = itertools.count()

    @app.get("/api/v1/healthz")
    async def healthz() -> Response:
        return Response(b'{"status":"ok"}', media_type=JSON)

    @app.get("/api/v1/get_server_capabilities")
    async def get_server_capabilities() -> Response:
        return Response(f'{{"supported_models":[{{"model_name":"{BASE_MODEL}"}}]}}', media_type=JSON)

    @app.post("/api/v1/client/config")
    @app.post("/api/v1/client/dynamic_config")
    @app.post("/api/v1/session_heartbeat")
    async def nothing() -> Response:
        return Response(b"{}", media_type=JSON)

    @app.post("/api/v1/telemetry")
    async def telemetry() -> Response:
        return Response(b'{"status":"accepted"}', media_type=JSON)

    @app.post("/api/v1/create_session")
    async def create_session() -> Response:
        return Response(f'{{"session_id":"session-{next(sessions)}"}}', media_type=JSON)


def _add_operations(app: FastAPI) -> None:
    models = itertools.count()
    logprobs = [np.zeros(TOKENS_PER_DATUM, dtype=np.float32)] * NUM_DATUMS
    output = encode_forward_backward_output(
        ForwardBackwardResult(tuple(logprobs), {"loss:sum": 0.0, "num_tokens:sum": 0.0})
    )

    @app.post("/api/v1/create_model")
    async def create_model() -> Response:
        return Response(f'{{"request_id":"create:model-{next(models)}"}}', media_type=JSON)

    @app.post("/api/v1/get_info")
    async def get_info(request: Request) -> Response:
        model_id = (await request.json())["model_id"]
        body = f'{{"model_id":"{model_id}","model_data":{{"model_name":"{BASE_MODEL}"}},"lora_rank":{RANK}}}'
        return Response(body, media_type=JSON)

    @app.post("/api/v1/forward_backward")
    async def forward_backward(request: Request) -> Response:
        pb.parse_message(pb.ForwardBackwardRequest, await request.body())
        return Response(b'{"request_id":"forward_backward"}', media_type=JSON)

    @app.post("/api/v1/optim_step")
    async def optim_step(request: Request) -> Response:
        await request.json()
        return Response(b'{"request_id":"optim_step"}', media_type=JSON)

    @app.post("/api/v1/retrieve_future")
    async def retrieve_future(request: Request) -> Response:
        request_id = (await request.json())["request_id"]
        if request_id == "forward_backward":
            return Response(output, media_type=PROTOBUF)
        if request_id == "optim_step":
            return Response(b'{"metrics":{"step":1.0}}', media_type=JSON)
        return Response(f'{{"model_id":"{request_id.removeprefix("create:")}"}}', media_type=JSON)


def main() -> None:
    """Serves until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    port = parser.parse_args().port
    uvicorn.run(
        create_app(), host="127.0.0.1", port=port, loop="uvloop", http="httptools", log_level="warning", backlog=4096
    )


if __name__ == "__main__":
    main()
