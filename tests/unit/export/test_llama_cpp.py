"""GGUF files against llama.cpp itself: the logits and the tokens of transformers."""

import numpy as np
import pytest
import torch
import transformers

from harness.exports import make_adapter, request_for
from harness.llama_cpp import run_llama_cpp
from twinkle.workers.jobs.export.build import outline_of, take_step
from twinkle.workers.jobs.export.verification import probe_tokens, tuned_logits

pytestmark = pytest.mark.soak

TEXT = "Hello World 12345, it's a test\n\n  don't  \tä€ 😀 <|im_start|>user\nhi<|im_end|>"
# It keeps keys and values in 16 bits, and multiplies weights of 16 bits with inputs rounded to them.
LIMITS = {torch.float32: 5e-3, torch.bfloat16: 5e-2}


def apart(found, meant):
    return np.median(np.sqrt(((found - meant) ** 2).mean(-1)) / np.sqrt((meant**2).mean(-1)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "kind", ["llama", "llama-tied", "llama3-rope", "llama3-tokens", "qwen2", "qwen3", "qwen3-tied", "qwen3-moe"]
)
def test_llama_cpp_computes_what_peft_does(kind, dtype, gguf_base, tmp_path):
    base = gguf_base(kind, dtype)
    is_tied = kind.endswith("tied")
    adapter = make_adapter(tmp_path / "adapter", base, train_unembed=not is_tied)
    request = request_for(tmp_path / "out", base, adapter, ["gguf", "gguf-adapter"])
    for step in outline_of(request).steps:
        take_step(request, step)
    nothing = make_adapter(tmp_path / "nothing", base, alpha=1e-30)
    bare = request_for(tmp_path / "bare", base, nothing, ["gguf"])
    for step in outline_of(bare).steps:
        take_step(bare, step)
    tokens = probe_tokens(307)[0].tolist()

    merged = run_llama_cpp(tmp_path / "out/gguf/model.gguf", tokens, TEXT)
    beside = run_llama_cpp(
        tmp_path / "bare/gguf/model.gguf", tokens, TEXT, adapter=tmp_path / "out/gguf-adapter/adapter.gguf"
    )

    tuned, untrained = (logits.numpy() for logits in tuned_logits(base, adapter))
    assert apart(untrained, tuned) > 0.1
    assert apart(np.array(merged["logits"]), tuned) < LIMITS[dtype]
    assert apart(np.array(beside["logits"]), tuned) < LIMITS[dtype]
    assert merged["tokens"] == transformers.AutoTokenizer.from_pretrained(base)(TEXT)["input_ids"]


def test_llama_cpp_cuts_texts_into_the_pieces_that_transformers_does(gguf_base, tmp_path):
    base = gguf_base("llama2-tokens")
    adapter = make_adapter(tmp_path / "adapter", base)
    request = request_for(tmp_path / "out", base, adapter, ["gguf"])
    for step in outline_of(request).steps:
        take_step(request, step)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)

    for text in ("Hello World 12345, it's a test", "  two\n\ttab", "ä€ 😀", "the the  the", "and</s>again"):
        found = run_llama_cpp(tmp_path / "out/gguf/model.gguf", probe_tokens(512)[0].tolist(), text)

        assert found["tokens"] == tokenizer(text)["input_ids"]
    tuned, _ = tuned_logits(base, adapter)
    assert apart(np.array(found["logits"]), tuned.numpy()) < LIMITS[torch.float32]


def test_llama_cpp_computes_a_trained_head_of_a_tied_model(gguf_base, tmp_path):
    base = gguf_base("qwen3-tied")
    adapter = make_adapter(tmp_path / "adapter", base)
    request = request_for(tmp_path / "out", base, adapter, ["gguf"])
    for step in outline_of(request).steps:
        take_step(request, step)

    found = run_llama_cpp(tmp_path / "out/gguf/model.gguf", probe_tokens(307)[0].tolist(), TEXT)

    tuned, _ = tuned_logits(base, adapter)
    assert apart(np.array(found["logits"]), tuned.numpy()) < LIMITS[torch.float32]


@pytest.mark.parametrize("kind", ["llama", "qwen3-moe"])
def test_llama_cpp_reads_blocks_of_eight_bits(kind, gguf_base, tmp_path):
    base = gguf_base(kind)
    adapter = make_adapter(tmp_path / "adapter", base)
    request = request_for(tmp_path / "out", base, adapter, ["gguf-q8_0"])
    for step in outline_of(request).steps:
        take_step(request, step)

    found = run_llama_cpp(tmp_path / "out/gguf-q8_0/model.gguf", probe_tokens(307)[0].tolist(), TEXT)

    # What it was rounded to is what is computed with, so nothing but the rounding of inputs lies between.
    tuned, _ = tuned_logits(base, adapter)
    assert apart(np.array(found["logits"]), tuned.numpy()) < LIMITS[torch.bfloat16]
    assert found["tokens"] == transformers.AutoTokenizer.from_pretrained(base)(TEXT)["input_ids"]
