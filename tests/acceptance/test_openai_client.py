"""The official ``openai`` client on a real model: the base model, and an adapter that was saved for sampling."""

from __future__ import annotations

import openai

from harness.leftovers import sdk_client
from harness.served import Served

MESSAGES = [{"role": "user", "content": "two and three?"}]


def test_a_base_model_and_a_saved_adapter_answer_a_conversation(served: Served) -> None:
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key=(key := served.create_key("openai")), timeout=120)
    run = sdk_client(served.url, key).create_lora_training_client(base_model="tiny", rank=4).result()
    path = run.save_weights_for_sampler("chat").result().path
    options = {"messages": MESSAGES, "max_completion_tokens": 12, "seed": 1, "temperature": 0}

    base = client.chat.completions.create(model="tiny", **options)
    adapted = client.chat.completions.create(model=path, logprobs=True, top_logprobs=2, **options)
    streamed = client.chat.completions.create(model=path, stream=True, **options)

    assert [model.id for model in client.models.list()] == ["tiny", path]
    assert base.usage is not None and 0 < base.usage.completion_tokens <= 12
    assert base.choices[0].finish_reason in {"stop", "length"}
    # A fresh adapter changes nothing yet.
    assert adapted.choices[0].message.content == base.choices[0].message.content
    assert adapted.choices[0].logprobs is not None
    text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed)
    assert text == adapted.choices[0].message.content
