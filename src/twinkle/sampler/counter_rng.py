"""Uniform numbers addressed by (seed, stream, position) instead of drawn from a generator.

A token's randomness depends on nothing but its own coordinates: not on the batch it was computed in, nor on how often
the request was restarted. There is no state to save, so a replayed request draws the same numbers.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def uniform(seed: int, stream: int, position: int) -> float:
    """Returns a float64 in [0, 1): the three coordinates, hashed in turn by splitmix64 (Steele et al., OOPSLA 2014)."""
    state = _splitmix64(seed & _MASK)
    state = _splitmix64(state ^ (stream & _MASK))
    state = _splitmix64(state ^ (position & _MASK))
    return (state >> 11) / float(1 << 53)


def _splitmix64(value: int) -> int:
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
