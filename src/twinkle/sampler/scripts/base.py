"""What a script samples with. A subclass of one's own needs ``sample`` and nothing else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from twinkle.core.errors import InvalidInput
from twinkle.data_format.sampling import SampleResponse, SamplingParams
from twinkle.infra.remote import remote_class, remote_function
from twinkle.plugin.construct import construct_class
from twinkle.plugin.registry import Registry
from twinkle.sampler.scripts.groups import joined_responses, rows_for_each

Row = Mapping[str, Any] | Sequence[int]
"""Token ids, a row with ``input_ids``, or a trajectory with ``messages``."""
Params = SamplingParams | Mapping[str, Any] | None

TEMPLATES = Registry("twinkle.templates")


@runtime_checkable
class PromptEncoder(Protocol):
    """The part of a template that a sampler cannot do without."""

    def encode(self, trajectory: Any, add_generation_prompt: bool = False) -> Any:
        """Return the trajectory with ``input_ids``."""
        ...


@remote_class()
class Sampler(ABC):
    """Continues prompts: one response for each, in their order.

    ``sample`` is for a subclass to bring; the rest works whether its constructor calls ours or not. On a group of
    devices every rank continues its share of the rows.
    """

    meets_other_ranks = False
    """Each rank samples for itself, and vLLM makes a world of its own."""

    template: PromptEncoder | None = None

    @remote_function(dispatch=rows_for_each, collect=joined_responses, lazy_collect=False)
    @abstractmethod
    def sample(
        self,
        inputs: Sequence[Row] | Row,
        sampling_params: Params = None,
        adapter_name: str = "",
        adapter_path: str | None = None,
    ) -> list[SampleResponse]:
        """Continue every row and wait for all."""

    @remote_function(dispatch="all", collect="first", lazy_collect=False)
    def set_template(self, template_cls: str | type[Any] | PromptEncoder, **settings: Any) -> None:
        """Set what turns conversations into prompts: an object, or a class or its name with settings (``model_id=``).

        Rows that hold ``input_ids`` need none.
        """
        self.template = construct_class("template_cls", template_cls, PromptEncoder, TEMPLATES, **settings)  # type: ignore[type-abstract]

    @remote_function(dispatch="all", collect="first", lazy_collect=False)
    def apply_patch(self, patch_cls: Any, **settings: Any) -> None:
        """Change the model that samples; a sampler that has none to show refuses it."""
        raise NotImplementedError(f"{type(self).__name__} has no model that a patch could be applied to")

    @remote_function(dispatch="all", collect="first", lazy_collect=False)
    def add_adapter_to_sampler(self, adapter_name: str, config: Any) -> None:
        """Make an adapter known under a name; a sampler without adapters has no use for it."""
        raise NotImplementedError(f"{type(self).__name__} takes no adapters")

    @remote_function(dispatch="all", execute="first", collect="first", lazy_collect=False)
    def encode_trajectory(
        self, trajectory: Mapping[str, Any], adapter_name: str = "", add_generation_prompt: bool = True
    ) -> Mapping[str, Any]:
        """The row of a conversation, by the template, which is that of all adapters.

        Raises:
            InvalidInput: No template is set.
        """
        encoded: Mapping[str, Any] = self._require_template().encode(
            trajectory, add_generation_prompt=add_generation_prompt
        )
        return encoded

    @remote_function(dispatch="all", execute="first", collect="first", lazy_collect=False)
    def decode_response(self, token_ids: Sequence[int], adapter_name: str = "") -> str:
        """The text of sampled tokens, by the template of all adapters, without special tokens.

        Raises:
            InvalidInput: No template is set, or it has no tokenizer.
        """
        tokenizer = getattr(self._require_template(), "tokenizer", None)
        if tokenizer is None:
            raise InvalidInput("template", "has no tokenizer; set one that decodes")
        return str(tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def _require_template(self) -> PromptEncoder:
        if self.template is None:
            raise InvalidInput("inputs", "a row has no input_ids; encode the data set, or call set_template before")
        return self.template
