"""What a batch would take: every prompt is read as its route would read it, and nothing is drawn."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from twinkle.core.job import JobFailed
from twinkle.jobs.batch_lines import BatchRequest
from twinkle.jobs.context import JobContext
from twinkle.jobs.estimate import Tokens, Work
from twinkle.wire.bodies.counting import MAX_COUNTED, Counted, CountResponse
from twinkle.wire.bodies.jobs_batch import BatchSpec

_COUNT = "/api/native/v1/count_tokens"


async def work_of_batch(context: JobContext[BatchSpec], requests: AsyncIterator[BatchRequest]) -> Work:
    """All that meshes will have to do, by base model; the one with the most lines first."""
    most: dict[str, Tokens] = {}
    fewest: dict[str, Tokens] = {}
    num_lines: dict[str, int] = {}
    num_refused = 0
    async for piece in _pieces(requests):
        for one in await _counted(context, piece):
            if one.base_model is None:
                num_refused += 1
                continue
            name = one.base_model
            read = Tokens(prefilled=one.prompt_tokens)
            most[name] = most.get(name, Tokens()) + replace(read, drawn=one.max_sampled_tokens)
            fewest[name] = fewest.get(name, Tokens()) + replace(read, drawn=one.num_samples)
            num_lines[name] = num_lines.get(name, 0) + 1
    names = sorted(num_lines, key=lambda name: -num_lines[name])
    if not names:
        raise JobFailed("invalid_batch", "its route would refuse every line", field="data")
    works = [
        Work(base_model=name, num_prefilled=most[name].prefilled, num_drawn=most[name].drawn, least=fewest[name])
        for name in names
    ]
    details = {"requests": sum(num_lines.values()), "refused": num_refused, "models": num_lines}
    return replace(works[0], elsewhere=tuple(works[1:]), details=details)


async def _counted(context: JobContext[BatchSpec], requests: Sequence[BatchRequest]) -> list[Counted]:
    body = {"endpoint": context.spec.endpoint, "requests": [one.body for one in requests]}
    answer = await context.door.request("POST", _COUNT, json=body)
    if not answer.is_success:
        raise JobFailed("internal", f"its prompts could not be counted: {answer.text}", is_transient=True)
    return CountResponse.model_validate_json(answer.content).counts


async def _pieces(requests: AsyncIterator[BatchRequest]) -> AsyncIterator[list[BatchRequest]]:
    piece: list[BatchRequest] = []
    async for request in requests:
        piece.append(request)
        if len(piece) == MAX_COUNTED:
            yield piece
            piece = []
    if piece:
        yield piece
