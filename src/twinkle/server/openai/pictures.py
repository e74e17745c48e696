"""Pictures in a conversation: read out of their URLs, then put where the model's template leaves a place for each."""

from __future__ import annotations

import base64
from collections.abc import Sequence

from twinkle.core.errors import InvalidInput
from twinkle.core.mesh import MeshCapabilities
from twinkle.core.pictures import PictureLimits, PictureRules, expand_places
from twinkle.server.openai.drawing import PlacedPicture
from twinkle.wire.pictures import read_data_url
from twinkle.wire.sampling import IMAGE, PromptChunk


def read_pictures(
    urls: Sequence[tuple[str, str]], rules: PictureRules | None, limits: PictureLimits
) -> list[PromptChunk]:
    """The pictures of some URLs, each given with its place in the request, and counted.

    Raises:
        InvalidInput: One is no picture that is taken, or an address.
    """
    limits.check_number("messages", len(urls))
    chunks: list[PromptChunk] = []
    for field, url in urls:
        sent = read_data_url(url, field=field)
        chunks.append(
            PromptChunk(
                type=IMAGE,
                data=base64.b64encode(sent.data).decode(),
                format=sent.format,
                expected_tokens=sent.num_tokens(field, rules, limits),
            )
        )
    return chunks


def place_pictures(
    tokens: list[int], pictures: Sequence[PromptChunk], capabilities: MeshCapabilities
) -> tuple[list[int], list[PlacedPicture]]:
    """The tokens of a conversation with those of its pictures where the template has put one for each.

    Raises:
        InvalidInput: The template has no places for pictures, or a text holds the token for one.
    """
    rules = capabilities.pictures
    if rules is None:
        return tokens, []
    num_places = tokens.count(rules.token_id)
    if num_places != len(pictures):
        raise InvalidInput(
            "messages",
            f"hold {len(pictures)} pictures, but the model's chat template has places for {num_places}",
        )
    filled, starts = expand_places(tokens, rules.token_id, [chunk.length for chunk in pictures])
    return filled, [PlacedPicture(start, chunk) for start, chunk in zip(starts, pictures, strict=True)]
