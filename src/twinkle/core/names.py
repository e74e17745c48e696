"""Names that people and tools can live with: what is refused when a name is made, not when one is read."""

from __future__ import annotations


def plain_name(name: str) -> str:
    """Gives back a name that may be made.

    Raises:
        ValueError: A tool would take it for an option, a reader for another name, or a proxy for another path.
    """
    if name.startswith("-"):
        raise ValueError("must not begin with '-': tools take it for an option")
    if name != name.strip(" "):
        raise ValueError("must not begin or end with a space")
    if not name.isprintable():
        raise ValueError("must not hold control characters, nor others that do not show, like look-alike spaces")
    if "%2f" in name.lower():
        raise ValueError("must not hold '%2f': it is read as '/' on the way")
    return name
