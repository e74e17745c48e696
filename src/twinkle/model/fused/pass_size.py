"""How many tokens a pass may have on a device whose memory others use too."""

from __future__ import annotations

from twinkle.core.process.events import event_log

log = event_log()

GROW_AFTER_PASSES = 64
LONGEST_WAIT_PASSES = 4096


class PassSize:
    """How many tokens a pass may have: fewer once memory ran out, more again when enough passes have gone well since.

    A larger size that fails doubles the wait for the next try: to find that nothing has changed costs ever less.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_tokens = limit
        self._times_out_of_memory = 0
        self._wait_passes = GROW_AFTER_PASSES
        self._passes_well = 0
        self._has_grown = False

    def shrink(self, num_tokens: int) -> None:
        """A pass of so many tokens did not fit."""
        self._times_out_of_memory += 1
        if self._has_grown:
            self._wait_passes = min(2 * self._wait_passes, LONGEST_WAIT_PASSES)
        self.num_tokens = max(1, min(self.num_tokens, num_tokens) // 2)
        self._passes_well, self._has_grown = 0, False
        log.warning(
            "model.pass.out_of_memory",
            num_tokens=num_tokens,
            next_budget_tokens=self.num_tokens,
            larger_again_after_passes=self._wait_passes,
            times=self._times_out_of_memory,
        )

    def went_well(self) -> None:
        """A pass fitted."""
        if self.num_tokens == self.limit:
            return
        self._passes_well += 1
        if self._passes_well >= self._wait_passes:
            self.num_tokens = min(2 * self.num_tokens, self.limit)
            self._passes_well, self._has_grown = 0, True
            log.info("model.pass.larger_again", budget_tokens=self.num_tokens, limit_tokens=self.limit)
