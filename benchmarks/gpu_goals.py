"""What a run on a GPU is measured against: each goal, and the figure beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from measures import rounded

PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0, "B200": 2250.0, "A100": 312.0, "L40S": 362.0}
"""Of dense products in bfloat16, as NVIDIA's data sheets have them, by a part of the device's name."""
FLOPS_PER_WEIGHT = 4
"""A token goes through a frozen weight once forward and once backward, to its input alone; two operations each."""
SWITCHING_GOAL = 8.0
PACKED_GOAL = 0.9
STEP_GOAL = 1.0 / 1.1
UTILISATION_GOAL = 0.4
AT_WORK_GOALS = {1: 0.9, 16: 0.97}
"""By tenants: the share of the time that a device of 5 ms a pass is at passes."""
VLLM_GOAL = 1.0
GRAPHS_GOAL = 3.0
"""The card worked 9 of the 62 ms that a token of 16 sequences took launched kernel by kernel."""
MOST_TENANTS = 16


@dataclass(frozen=True, kw_only=True)
class Goal:
    """One goal; ``found`` None where it was not measured."""

    name: str
    at_least: float
    found: float | None

    @property
    def line(self) -> str:
        """As it is printed."""
        if self.found is None:
            return f"{self.name:<72} at least {self.at_least:<6.3g} not measured"
        verdict = "reached" if self.found >= self.at_least else "MISSED"
        return f"{self.name:<72} at least {self.at_least:<6.3g} found {self.found:<8.3g} {verdict}"


def goals_of(result: Mapping[str, Any]) -> list[Goal]:
    """All goals, with what a run has found of them."""
    training = _measured(result.get("training"))
    fusion = [cell for cell in training.get("fusion", ()) if "tenants" in cell]
    steps = [cell for cell in training.get("step", ()) if "tenants" in cell]
    sampled = [cell for cell in result.get("sampling", ()) if isinstance(cell, dict) and "against_wall" in cell]
    short = min((cell["tokens"] for cell in fusion), default=0)
    crowded = [cell for cell in fusion if cell["tenants"] == MOST_TENANTS and cell["tokens"] == short]
    many = [cell for cell in fusion if cell["tenants"] > 1]
    sampling = [cell["against_wall"].get("torch_base", {}) for cell in sampled]
    queue = _measured(result.get("queue"))
    served = _measured(queue.get("step_overhead")).get("cells", ())
    at_work = {cell["tenants"]: cell["in_execute"] for cell in _measured(queue.get("device_wait")).get("cells", ())}
    return [
        Goal(
            name=f"{MOST_TENANTS} tenants of {short} tokens fused, times switching in PEFT",
            at_least=SWITCHING_GOAL,
            found=_least(cell["fused_against"].get("peft_switching") for cell in crowded),
        ),
        Goal(
            name="several tenants fused, times one packed tenant (the worst cell)",
            at_least=PACKED_GOAL,
            found=_least(cell["fused_against"].get("limit") for cell in many),
        ),
        Goal(
            name="one tenant's step, times plain PEFT",
            at_least=STEP_GOAL,
            found=_least(cell["step_against"].get("peft_step") for cell in steps),
        ),
        Goal(
            name="share of the device's peak in training (the best cell)",
            at_least=UTILISATION_GOAL,
            found=max((cell["peak_share"] for cell in fusion if "peak_share" in cell), default=None),
        ),
        Goal(
            name="our sampler on the base model, times vLLM (the worst cell)",
            at_least=VLLM_GOAL,
            found=_least(ratios.get("vllm_base") for ratios in sampling),
        ),
        Goal(
            name="our sampler on the base model, times itself without graphs (the worst cell)",
            at_least=GRAPHS_GOAL,
            found=_least(ratios.get("launched_base") for ratios in sampling),
        ),
        Goal(
            name="a step through the service, times plain PEFT",
            at_least=STEP_GOAL,
            found=_least(1 / cell["ratio"] for cell in served),
        ),
        *(
            Goal(
                name=f"share of the time at passes of 5 ms, {tenants} tenants",
                at_least=goal,
                found=at_work.get(tenants),
            )
            for tenants, goal in AT_WORK_GOALS.items()
        ),
    ]


def as_json(goals: Sequence[Goal]) -> list[dict[str, Any]]:
    """As the result keeps them."""
    return [asdict(goal) for goal in goals]


def peak_share(config: Mapping[str, int], device: str, tokens_per_s: float) -> float | None:
    """The share of the device's peak that so many trained tokens a second are; None for a device that is not known."""
    peak = next((tflops for name, tflops in PEAK_TFLOPS.items() if name in device), None)
    if peak is None:
        return None
    return rounded(FLOPS_PER_WEIGHT * multiplied_weights(config) * tokens_per_s / (peak * 1e12))


def multiplied_weights(config: Mapping[str, int]) -> int:
    """How many weights each token is multiplied with: layers and the head, no embedding."""
    hidden = config["hidden_size"]
    heads = config["num_attention_heads"] + config["num_key_value_heads"]
    layer = 2 * hidden * heads * config["head_dim"] + 3 * hidden * config["intermediate_size"]
    return config["num_hidden_layers"] * layer + config["vocab_size"] * hidden


def _measured(part: object) -> Mapping[str, Any]:
    """A part's figures; of one that failed or was left out, none."""
    return part if isinstance(part, dict) else {}


def _least(found: Any) -> float | None:
    return min((value for value in found if value is not None), default=None)
