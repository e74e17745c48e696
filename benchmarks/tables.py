"""From ``results/*.json`` to the tables in ``README.md``.

python benchmarks/tables.py [--results DIR] [--print]
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from cluster_tables import calls_text, moves_text, weights_text
from engine_tables import (
    custom_loss_text,
    dry_run_text,
    fusion_text,
    ranks_text,
    sampling_text,
    step_text,
    sweep_text,
    switch_text,
)
from library_tables import data_text, library_text
from markdown_table import Result
from queue_tables import dialects_text, native_text, queue_text, scale_text

HERE = Path(__file__).parent
README = HERE / "README.md"

RENDERERS: Mapping[str, Callable[[Result], str]] = {
    "queue_overhead": queue_text,
    "native_client": native_text,
    "dialects": dialects_text,
    "step_overhead": step_text,
    "custom_loss": custom_loss_text,
    "fusion": fusion_text,
    "sampling": sampling_text,
    "adapter_switch": switch_text,
    "ranks": ranks_text,
    "library": library_text,
    "data": data_text,
    "sweep": sweep_text,
    "dry_run": dry_run_text,
    "mesh_move": moves_text,
    "weight_sync": weights_text,
    "ray_calls": calls_text,
    "scale": scale_text,
    "scale_postgresql": scale_text,
}


def main() -> None:
    """Fills the README's marked places, or prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--print", action="store_true", dest="prints", help="print the tables, change no file")
    arguments = parser.parse_args()
    texts = {
        name: render(json.loads(path.read_text()))
        for name, render in RENDERERS.items()
        if (path := arguments.results / f"{name}.json").exists()
    }
    if arguments.prints:
        print("\n\n".join(texts.values()))
    else:
        README.write_text(filled(README.read_text(), texts))


def filled(document: str, texts: Mapping[str, str]) -> str:
    """Returns the document with each text between its ``<!-- name -->`` and ``<!-- /name -->``.

    Raises:
        ValueError: A text has no place in the document.
    """
    for name, text in texts.items():
        place = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        if place.search(document) is None:
            raise ValueError(f"no place for {name}")
        document = place.sub(lambda match, text=text: f"{match[1]}{text}\n{match[2]}", document)
    return document


if __name__ == "__main__":
    main()
