"""A tokenizer small enough to know by heart: one token for each byte, then two special ones."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

TEMPLATE = """{%- for message in messages %}
{%- if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}
{{- '<s>' + message.role + ':' + message.content + '<e>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<s>assistant:' }}{% endif %}"""


def write_tokenizer(folder: Path) -> Tokenizer:
    """Token 0 reads '!', token 1 reads '"', and so on; ``<e>`` ends a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("<e>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": {"content": "<e>"}, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer
