"""Configs of models that are not served, and what they are told: by their traits, whatever their names."""

from collections.abc import Callable

import transformers

from harness.families import SIZES


class ChatGLMConfig(transformers.PretrainedConfig):
    """As it is written by code that transformers does not have."""

    model_type = "chatglm"


REFUSED: dict[str, tuple[Callable[[], transformers.PretrainedConfig], str]] = {
    "pictures of another kind": (
        lambda: transformers.LlavaConfig(architectures=["LlavaForConditionalGeneration"]),
        r"LlavaForConditionalGeneration\) cannot be served: it takes images \(vision_config\)",
    ),
    "another linear attention": (
        lambda: transformers.MiniMaxConfig(**SIZES),
        r"gated delta nets and Nemotron-H's \(linear_attention\)",
    ),
    "lfm2": (lambda: transformers.Lfm2Config(), "other than attention, gated delta nets and"),
    "mamba": (lambda: transformers.MambaConfig(), "model_type mamba"),
    "bloom": (lambda: transformers.BloomConfig(), r"an older form \(bloom\)"),
    "mpt": (lambda: transformers.MptConfig(), r"an older form \(mpt\)"),
    "gpt2": (lambda: transformers.GPT2Config(), r"an older form \(gpt2\)"),
    "stablelm": (lambda: transformers.StableLmConfig(), r"an older form \(stablelm\)"),
    "t5": (lambda: transformers.T5Config(architectures=["T5ForConditionalGeneration"]), "an encoder and a decoder"),
    "a classifier": (
        lambda: transformers.Qwen3Config(**SIZES, architectures=["Qwen3ForSequenceClassification"]),
        "no head that writes on",
    ),
    "quantised": (
        lambda: transformers.LlamaConfig(**SIZES, quantization_config={"quant_method": "gptq", "bits": 4}),
        r"quantised \(gptq\)",
    ),
    "a moving rope": (
        lambda: transformers.LlamaConfig(**SIZES, rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
        r"rotary embedding depends on .* \(dynamic\)",
    ),
    "chatglm3": (
        lambda: ChatGLMConfig(padded_vocab_size=65024, num_layers=28),
        r"ChatGLM 1 to 3 needs transformers<4\.42",
    ),
    "deepseek-v3.2": (
        lambda: transformers.DeepseekV32Config(),
        r"picks the keys it sees by an index \(index_topk\)",
    ),
    "glm-5": (lambda: transformers.GlmMoeDsaConfig(), r"picks the keys it sees by an index \(index_topk\)"),
    "glm-5.3": (lambda: transformers.Glm5NextConfig(), r"picks the keys it sees by an index \(index_topk\)"),
    "qwen4": (lambda: transformers.Qwen4ExpConfig(), "several residual streams"),
    "kimi-linear": (lambda: transformers.KimiLinearConfig(), r"Nemotron-H's \(linear_attention\)"),
    "compressed floats": (
        lambda: transformers.Kimi_K25Config(
            text_config={
                "model_type": "deepseek_v3",
                "quantization_config": {"quant_method": "compressed-tensors", "format": "float-quantized"},
            }
        ),
        r"quantised \(compressed-tensors, float-quantized\)",
    ),
    "deepseek-v4 in 8 bits": (
        lambda: transformers.DeepseekV4Config(quantization_config={"quant_method": "fp8", "expert_dtype": "fp4"}),
        r"quantised \(fp8\)",
    ),
    "gemma3n": (lambda: transformers.Gemma3nTextConfig(), r"several streams .* \(AltUp\)"),
    "looking ahead": (
        lambda: transformers.Gemma3TextConfig(**SIZES, head_dim=16, use_bidirectional_attention=True),
        r"looks ahead \(use_bidirectional_attention\)",
    ),
}
