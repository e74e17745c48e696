"""Tokenizers whose chat templates do what those of released models do, each in its smallest form."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedTokenizerFast

from twinkle.hub.tiny import train_tokenizer

TEXTS = (
    "The quick brown fox jumps over the lazy dog. What is the weather in Paris? Let me think about it.",
    "system user assistant tool weather city function parameter name arguments 0123456789",
)

# As Qwen3's: the thinking of rounds before the last question is left out; an empty one stands where there is none.
QWEN3 = """\
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n' }}
{%- for tool in tools %}{{- (tool | tojson) + '\\n' }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}[GENERATION]
{%- if loop.index0 > ns.last and (message.reasoning_content or loop.last) %}
{{- '<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' }}{%- endif %}
{{- message.content.strip() }}
{%- for call in message.tool_calls or [] %}
{%- if not loop.first or message.content %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) }}
{{- '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>' }}[ENDGENERATION]{{- '\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

# As Qwen3.5's: the generation prompt opens the thinking; parts of pictures; arguments in tags.
QWEN3_5 = """\
{%- macro write(content) %}
{%- if content is string %}{{- content }}{%- else %}{%- for part in content %}
{%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- else %}{{- part.text }}{%- endif %}{%- endfor %}{%- endif %}
{%- endmacro %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
{%- set content = write(message.content) | trim %}
{%- if message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last %}{{- '<think>\\n' }}[GENERATION]
{{- (message.reasoning_content or '') + '\\n</think>\\n\\n' }}
{{- content }}[ENDGENERATION]{%- else %}[GENERATION]{{- content }}[ENDGENERATION]{%- endif %}[GENERATION]
{%- for call in message.tool_calls or [] %}
{{- '\\n\\n' if loop.first and content else '\\n' if not loop.first }}
{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for name, value in call.function.arguments | items %}
{{- '<parameter=' + name + '>\\n' + (value if value is string else value | tojson) + '\\n</parameter>\\n' }}
{%- endfor %}
{{- '</function>\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>' }}[ENDGENERATION]{{- '\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

# As Llama 3.1's: a turn that calls a tool is the call alone, its content is left out.
LLAMA = """\
{{- '<|endoftext|>' }}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '<|im_end|>\\n\\n' }}
{%- if message.role == 'assistant' %}[GENERATION]{%- endif %}
{%- if message.tool_calls %}
{{- '{"name": "' + message.tool_calls[0].function.name + '", "parameters": ' }}
{{- (message.tool_calls[0].function.arguments | tojson) + '}' }}
{%- else %}{{- message.content | trim }}{%- endif %}
{{- '<think>' }}
{%- if message.role == 'assistant' %}[ENDGENERATION]{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant<|im_end|>\\n\\n' }}{%- endif %}"""

# As Mistral's: no generation prompt; a question's end is where an answer begins, and it knows no thinking.
MISTRAL = """\
{%- for message in messages %}
{%- if message.role == 'assistant' %}[GENERATION]{{- ' ' + message.content | trim + '<|im_end|>' }}[ENDGENERATION]
{%- else %}{{- '[INST] ' + message.content + '[/INST]' }}{%- endif %}
{%- endfor %}"""

CHAT_TEMPLATES = {"qwen3": QWEN3, "qwen3.5": QWEN3_5, "llama": LLAMA, "mistral": MISTRAL}


def chat_template(name: str, *, marks_generation: bool = False) -> str:
    """One of the templates, with or without marks around what the model generates."""
    begin, end = ("{%- generation %}", "{%- endgeneration %}") if marks_generation else ("", "")
    source = CHAT_TEMPLATES[name]
    # A mark belongs to a branch; blocks of Jinja must nest, so a mark in a branch is written with its whole branch.
    if name == "llama" and marks_generation:
        body = source.partition("[GENERATION]{%- endif %}")[2].partition("{%- if message.role == 'assistant' %}[ENDG")[
            0
        ]
        head = source.partition("{%- if message.role == 'assistant' %}[GENERATION]{%- endif %}")[0]
        tail = source.partition("[ENDGENERATION]{%- endif %}")[2]
        return f"{head}{{%- if message.role == 'assistant' %}}{begin}{body}{end}{{%- else %}}{body}{{%- endif %}}{tail}"
    return source.replace("[GENERATION]", begin).replace("[ENDGENERATION]", end)


def save_tokenizer(folder: Path, name: str = "qwen3", *, marks_generation: bool = False) -> Path:
    """The files of a tokenizer with one of the templates; there is no model beside it."""
    tokenizer = train_tokenizer(TEXTS, vocab_size=320, context=4096)
    tokenizer.chat_template = chat_template(name, marks_generation=marks_generation)
    tokenizer.save_pretrained(folder)
    return folder


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(folder)
