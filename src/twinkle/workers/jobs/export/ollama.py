"""What Ollama wants to be told of a model in GGUF: where it is, how a conversation is written, what ends a turn."""

from __future__ import annotations

from dataclasses import dataclass

MODELFILE = "Modelfile"


@dataclass(frozen=True)
class Conversation:
    """How turns are written.

    Args:
        mark: What a chat template has in it that writes them so.
        template: The same in Ollama's words.
        stops: What ends a turn.
    """

    mark: str
    template: str
    stops: tuple[str, ...]


CONVERSATIONS = (
    Conversation(
        "<|im_start|>",
        "{{- range .Messages }}<|im_start|>{{ .Role }}\n{{ .Content }}<|im_end|>\n{{ end }}<|im_start|>assistant\n",
        ("<|im_end|>", "<|im_start|>"),
    ),
    Conversation(
        "<|start_header_id|>",
        "{{- range .Messages }}<|start_header_id|>{{ .Role }}<|end_header_id|>\n\n{{ .Content }}<|eot_id|>{{ end }}"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ("<|eot_id|>", "<|start_header_id|>"),
    ),
)
"""Those that are known."""


def modelfile(gguf_name: str, chat_template: str | None) -> str:
    """The text of a Modelfile beside a GGUF file.

    A template that is not known is left to Ollama, which reads the one in the file if it can.
    """
    lines = [f"FROM ./{gguf_name}"]
    for conversation in CONVERSATIONS:
        if chat_template is not None and conversation.mark in chat_template:
            lines.append(f'TEMPLATE """{conversation.template}"""')
            lines += [f'PARAMETER stop "{stop}"' for stop in conversation.stops]
            break
    return "\n".join(lines) + "\n"
