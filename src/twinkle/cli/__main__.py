"""``python -m twinkle.cli``: how the supervisor starts its children."""

from __future__ import annotations

from twinkle.cli.app import main

if __name__ == "__main__":
    main()
