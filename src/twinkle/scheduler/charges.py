"""What an operation is charged for in fair share, and towards its tenant's rate: what the device did, in tokens.

- A forward pass, with or without its backward pass: its tokens. It shares its device time with others. An operation
  whose loss compares datums goes through the model twice, and is charged twice.
- A sample: the tokens of its prompt and those that were drawn, for the same reason; also one that was cancelled or came
  too late while it was drawn.
- Everything else has the device to itself, and is charged for the device's time: the seconds it took, times the tokens
  per second that the mesh's passes have come to lately. A fork or a rewind replays past operations at its tenant's
  wish: those tokens are the least it is charged.
- Weights of a past state that are made anew to be sampled from are charged like a fork, to the sample for which they
  were made, even if it is refused then. The samples that find them there are charged nothing for them.
- An adapter that is rebuilt because its worker died, or because others needed its place on the device, is charged to
  nobody: that is the service's doing. So is an attempt that is tried again; what else failed counts as one token.
"""

from __future__ import annotations

from dataclasses import dataclass

_DECAY = 0.95
"""How much of a pass's weight is left after the next one: the rate is that of the last twenty or so."""


@dataclass
class PassRate:
    """The tokens per second that a mesh's passes have come to lately."""

    _num_tokens: float = 0.0
    _device_s: float = 0.0

    def note(self, num_tokens: int, device_s: float) -> None:
        """A pass, of one operation or of several, has run."""
        self._num_tokens = _DECAY * self._num_tokens + num_tokens
        self._device_s = _DECAY * self._device_s + device_s

    @property
    def tokens_per_s(self) -> float:
        """0 until a pass was measured: then nobody has waited for one either."""
        return self._num_tokens / self._device_s if self._device_s > 0 else 0.0


def charge_of_tokens(num_tokens: int) -> int:
    """The charge of a pass or a sample; and what is reckoned with for whatever waits, one token where it has none."""
    return max(num_tokens, 1)


def charge_of_time(device_s: float, *, tokens_per_s: float, num_replayed: int = 0) -> int:
    """The charge of what had the device to itself.

    Args:
        device_s: For how long.
        tokens_per_s: What the device would have done for others in that time.
        num_replayed: The tokens of the past passes it ran once more.
    """
    return max(round(device_s * tokens_per_s), num_replayed, 1)
