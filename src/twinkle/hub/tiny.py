"""Tiny language models made on the spot, for the demo and the tests: nothing is downloaded.

A tiny model is a real one in every respect but size: a config of its family, a byte-level BPE tokenizer trained on the
given texts, a chat template, safetensors weights. The weights are random, so it knows nothing until an adapter is
trained on it.
"""

# Half of transformers' constructors carry no annotations.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

from twinkle.core.errors import ConfigError

Family = Literal["qwen3", "qwen2", "llama", "qwen3_moe", "qwen3_5_text", "nemotron_h"]

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END, "<think>", "</think>", "<tool_call>", "</tool_call>")

RECIPE_FILE = "tiny_model.json"
HEAD_SIZE = 32
NUM_EXPERTS = 8
EXPERTS_PER_TOKEN = 2
BYTES = 256

# Qwen's splitting rule: words with their leading space, single digits, runs of punctuation, line ends.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# The turns of Qwen3's template, with its tool calls and its switch that closes the thinking block beforehand.
CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n\\nYou may call these functions:\\n' }}
{%- for tool in tools %}{{- (tool | tojson) + '\\n' }}{%- endfor %}
{{- 'Answer with a JSON object inside <tool_call></tool_call>.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- if message.reasoning_content %}{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{%- endif %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}
{%- set function = call.function or call %}
{{- '\\n<tool_call>\\n' + ({'name': function.name, 'arguments': function.arguments} | tojson) + '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- elif not (tools and loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""


@dataclass(frozen=True)
class TinyModelRecipe:
    """Everything a tiny model is made from; two equal recipes give the same model."""

    texts_sha256: str
    family: Family
    vocab_size: int
    hidden_size: int
    layers: int
    context: int
    seed: int
    format_version: int = 1

    def to_json(self) -> str:
        """Returns the text of the recipe file."""
        return json.dumps(asdict(self), indent=2, sort_keys=True) + "\n"


def make_tiny_model(
    path: str | os.PathLike[str],
    *,
    texts: Sequence[str],
    family: Family = "qwen3",
    vocab_size: int = 1024,
    hidden_size: int = 128,
    layers: int = 4,
    context: int = 2048,
    seed: int = 0,
) -> Path:
    """Makes a tiny model in the folder `path`, unless the same one is there already.

    The folder appears complete or not at all, also when two processes make it at once.

    Args:
        path: The folder to make; its parents are made too.
        texts: What the tokenizer is trained on.
        family: The architecture; ``qwen3_moe`` has 8 experts in each layer, 2 of them for each token; every other layer
            of ``qwen3_5_text`` is a gated delta net, of ``nemotron_h`` Mamba-2.
        vocab_size: Upper limit; a small text may give a smaller vocabulary.
        hidden_size: A multiple of 32, the size of an attention head.
        layers: Number of transformer layers.
        context: Longest sequence in tokens.
        seed: Of the random weights.

    Returns:
        The folder, absolute.

    Raises:
        ConfigError: A size is out of range, or `path` holds something else.
    """
    if hidden_size < HEAD_SIZE or hidden_size % HEAD_SIZE:
        raise ConfigError(f"hidden_size must be a multiple of {HEAD_SIZE}, not {hidden_size}")
    if vocab_size < BYTES + len(SPECIAL_TOKENS):
        raise ConfigError(f"vocab_size must be at least {BYTES + len(SPECIAL_TOKENS)}, not {vocab_size}")
    target = Path(path).absolute()
    recipe = TinyModelRecipe(
        texts_sha256=hashlib.sha256("\0".join(texts).encode()).hexdigest(),
        family=family,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        layers=layers,
        context=context,
        seed=seed,
    )
    if is_made(target, recipe):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        write_model(staging, texts=texts, recipe=recipe)
        staging.chmod(0o755)
        try:
            staging.rename(target)
        except OSError:
            # Another process was quicker; equal recipes make equal models.
            if not is_made(target, recipe):
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target


def is_made(target: Path, recipe: TinyModelRecipe) -> bool:
    """Returns whether `target` holds the model of this recipe; raises ConfigError when it holds anything else."""
    if not target.exists():
        return False
    recipe_file = target / RECIPE_FILE
    if recipe_file.is_file() and recipe_file.read_text() == recipe.to_json():
        return True
    raise ConfigError(f"{target} exists and holds something else; remove it or choose another folder")


def write_model(folder: Path, *, texts: Sequence[str], recipe: TinyModelRecipe) -> None:
    """Writes tokenizer, weights, configs and, last, the recipe into an empty folder."""
    tokenizer = train_tokenizer(texts, vocab_size=recipe.vocab_size, context=recipe.context)
    model = build_model(recipe, tokenizer)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    (folder / RECIPE_FILE).write_text(recipe.to_json())


def train_tokenizer(texts: Sequence[str], *, vocab_size: int, context: int) -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE tokenizer trained on `texts`, with the special tokens and the chat template."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[TURN_START],
        model_max_length=context,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def build_model(recipe: TinyModelRecipe, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Returns a model of the recipe's family with seeded random weights in float32."""
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    heads = recipe.hidden_size // HEAD_SIZE
    config = AutoConfig.for_model(
        recipe.family,
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        intermediate_size=3 * recipe.hidden_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        head_dim=HEAD_SIZE,
        max_position_embeddings=recipe.context,
        tie_word_embeddings=False,
        initializer_range=1 / math.sqrt(recipe.hidden_size),
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=pad,
        **_expert_sizes(recipe),
        **_delta_net_sizes(recipe),
        **_mamba_sizes(recipe),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        # Unit embeddings, so that the token itself outweighs the frozen random layers in the residual stream: with the
        # layers' smaller scale an adapter can hardly learn to copy a number from the question into the answer.
        embeddings = model.get_input_embeddings()
        assert isinstance(embeddings, torch.nn.Embedding)
        torch.nn.init.normal_(embeddings.weight, std=1.0)
    model.generation_config = GenerationConfig(eos_token_id=eos, pad_token_id=pad, bos_token_id=None)
    model.eval()
    return model


def _expert_sizes(recipe: TinyModelRecipe) -> dict[str, int | bool]:
    if recipe.family != "qwen3_moe":
        return {}
    return {
        "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": EXPERTS_PER_TOKEN,
        "moe_intermediate_size": 3 * recipe.hidden_size // EXPERTS_PER_TOKEN,
        "norm_topk_prob": True,
    }


def _delta_net_sizes(recipe: TinyModelRecipe) -> dict[str, int | list[str]]:
    """As many heads as attention has, of the same size, so that a layer is about as large as one of attention."""
    if recipe.family != "qwen3_5_text":
        return {}
    heads = recipe.hidden_size // HEAD_SIZE
    kinds = ("linear_attention", "full_attention")
    return {
        "linear_num_key_heads": max(1, heads // 2),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": HEAD_SIZE,
        "linear_value_head_dim": HEAD_SIZE,
        "layer_types": [kinds[layer % 2] for layer in range(recipe.layers)],
    }


def _mamba_sizes(recipe: TinyModelRecipe) -> dict[str, int | list[str]]:
    """The same for Mamba-2. Its MLPs count as layers: each of the recipe's layers is two of this model's."""
    if recipe.family != "nemotron_h":
        return {}
    heads = recipe.hidden_size // HEAD_SIZE
    kinds = ("linear_attention", "full_attention")
    return {
        "mamba_num_heads": heads,
        "mamba_head_dim": HEAD_SIZE,
        "ssm_state_size": HEAD_SIZE,
        "n_groups": 1,
        "layers_block_type": [kind for layer in range(recipe.layers) for kind in (kinds[layer % 2], "mlp")],
    }
