"""Every family of models: logits as transformers computes them, alone and packed among others."""

import dataclasses

import pytest
import torch
import transformers

from harness.families import FAMILIES, SAMPLED, SAMPLED_WITH_STATES, SIZES, WINDOW
from twinkle.core.errors import ConfigError
from twinkle.model.fused.model import FusedLoraModel
from twinkle.module.packed_attention import CausalSpans
from twinkle.sampler.probe import SamplerProbe

LOOKS_AHEAD = transformers.Gemma3TextConfig(**SIZES, head_dim=16, use_bidirectional_attention=True)
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


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in (*SAMPLED, *SAMPLED_WITH_STATES)])
def test_what_is_sampled_alone_and_in_company_has_the_logprobs_of_training(family, load_model):
    SamplerProbe(load_model(family)).check()


def with_a_third_weight(model):
    for module in list(model.modules()):
        if hasattr(module, "down_proj") and hasattr(module, "num_experts"):
            module.third = torch.nn.Parameter(torch.zeros(2, 2, 2))


@pytest.mark.parametrize(
    ("config", "change", "reason"),
    [
        (FAMILIES["qwen3-moe"](), with_a_third_weight, "in a form that is not supported"),
        (FAMILIES["cohere"](), lambda model: None, "same logits"),
        (transformers.FalconMambaConfig(**SIZES), lambda model: None, "not supported"),
    ],
    ids=["experts of another form", "scaled logits", "no attention"],
)
def test_a_model_that_would_be_computed_wrongly_is_refused_though_its_config_did_not_tell(
    config, change, reason, monkeypatch
):
    monkeypatch.setattr("twinkle.model.fused.model.check_config", lambda name, config: None)
    monkeypatch.setattr("twinkle.model.fused.logit_form.FACTORS", ())
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    change(model)
    with pytest.raises(ConfigError, match=reason):
        FusedLoraModel(model, name="tiny")


def test_a_model_is_refused_by_its_config_before_it_is_touched():
    model = transformers.AutoModelForCausalLM.from_config(LOOKS_AHEAD)
    with pytest.raises(ConfigError, match="use_bidirectional_attention"):
        FusedLoraModel(model, name="tiny")


def test_a_window_that_is_not_kept_is_noticed_with_a_few_tokens(base_dirs, monkeypatch):
    class FullSpans(CausalSpans):
        def __call__(self, *args, form):
            return super().__call__(*args, form=dataclasses.replace(form, window=None))

    monkeypatch.setattr("twinkle.model.fused.probe.CausalSpans", FullSpans)
    with pytest.raises(ConfigError, match="same logits"):
        FusedLoraModel.from_pretrained(str(base_dirs("mistral")))


def test_a_model_is_refused_by_its_config_before_its_weights_are_read(tmp_path):
    LOOKS_AHEAD.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="use_bidirectional_attention"):
        FusedLoraModel.from_pretrained(str(tmp_path))


def test_a_cap_that_is_left_out_is_noticed(base_dirs, monkeypatch):
    monkeypatch.setattr("twinkle.model.fused.logit_form.CAP", "none")
    with pytest.raises(ConfigError, match="same logits"):
        FusedLoraModel.from_pretrained(str(base_dirs("gemma2")))
