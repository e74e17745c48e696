"""Every family of models: logits as transformers computes them, alone and packed among others."""

import pytest
import torch
import transformers

from harness.families import FAMILIES, SIZES, WINDOW
from twinkle.core.errors import ConfigError
from twinkle.model.fused_lora import FusedLoraModel
from twinkle.module.packed_attention import CausalSpans

GPT_OSS_SIZES = {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}
LENGTHS = (3 * WINDOW + 2, 1, WINDOW, WINDOW + 1, 40)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_logits_equal_those_of_transformers(family, base_dirs, load_model):
    model = load_model(family)
    plain = transformers.AutoModelForCausalLM.from_pretrained(base_dirs(family), dtype=torch.float32)
    sequences = [torch.randint(0, SIZES["vocab_size"], (length,)) for length in LENGTHS]
    ends = torch.tensor(LENGTHS).cumsum(0).tolist()
    spans = list(zip([0, *ends[:-1]], ends, strict=True))

    hidden = model.run_packed(
        torch.cat(sequences), torch.cat([torch.arange(length) for length in LENGTHS]), [], CausalSpans(spans)
    )

    ours = model.logits(hidden, [])
    for tokens, (start, end) in zip(sequences, spans, strict=True):
        theirs = plain(input_ids=tokens[None]).logits[0]
        torch.testing.assert_close(ours[start:end], theirs, atol=1e-5 * theirs.abs().max().item(), rtol=1e-4)


@pytest.mark.parametrize(
    ("make_config", "reason"),
    [
        (
            lambda: transformers.GptOssConfig(**SIZES, head_dim=16, num_local_experts=4, num_experts_per_tok=2),
            "unusual has_bias",
        ),
        (lambda: transformers.CohereConfig(**SIZES, pad_token_id=0, bos_token_id=1, logit_scale=3.0), "same logits"),
        (lambda: transformers.FalconMambaConfig(**SIZES), "not supported"),
    ],
    ids=["experts of another form", "scaled logits", "no attention"],
)
def test_a_model_that_would_be_computed_wrongly_is_refused_though_its_config_did_not_tell(
    make_config, reason, monkeypatch
):
    monkeypatch.setattr("twinkle.model.fused_lora.check_config", lambda name, config: None)
    model = transformers.AutoModelForCausalLM.from_config(make_config(), dtype=torch.float32)
    with pytest.raises(ConfigError, match=reason):
        FusedLoraModel(model, name="tiny")


def test_a_model_is_refused_by_its_config_before_it_is_touched():
    model = transformers.AutoModelForCausalLM.from_config(transformers.Gemma2Config(**SIZES, head_dim=16))
    with pytest.raises(ConfigError, match="attn_logit_softcapping"):
        FusedLoraModel(model, name="tiny")


def test_a_window_that_is_not_kept_is_noticed_with_a_few_tokens(base_dirs, monkeypatch):
    class FullSpans(CausalSpans):
        def __call__(self, *args, window, **settings):
            return super().__call__(*args, window=None, **settings)

    monkeypatch.setattr("twinkle.model.probe.CausalSpans", FullSpans)
    with pytest.raises(ConfigError, match="same logits"):
        FusedLoraModel.from_pretrained(str(base_dirs("mistral")))


def test_a_capped_model_is_refused_before_its_weights_are_read(tmp_path):
    transformers.Gemma2Config(**SIZES, head_dim=16).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="attn_logit_softcapping"):
        FusedLoraModel.from_pretrained(str(tmp_path))
