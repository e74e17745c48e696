"""The tables in ``models.md``, from the tables that the tests run over.

python docs/models_table.py    # rewrites the tables
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT / "tests") not in sys.path:
    sys.path.insert(0, str(ROOT / "tests"))

from harness.families import FAMILIES, MODELS  # noqa: E402 - found only now
from harness.pictures import PICTURE_FAMILIES, PICTURE_MODELS  # noqa: E402
from harness.refused import REFUSED  # noqa: E402
from twinkle.core.errors import ConfigError  # noqa: E402
from twinkle.hub.support import check_config  # noqa: E402

DOCUMENT = Path(__file__).parent / "models.md"
PLACE = re.compile(r"(<!-- (?P<table>tested|pictures|refused) -->\n).*?(<!-- /(?P=table) -->)", re.DOTALL)
SAID = re.compile(r"cannot be served: (.*); docs/models\.md")


def main() -> None:
    """Rewrites the tables in place."""
    DOCUMENT.write_text(with_tables(DOCUMENT.read_text()))


def with_tables(document: str) -> str:
    """Returns the document with the tables as the tests' are now."""
    tables = {"tested": _tested(), "pictures": _with_pictures(), "refused": _refused()}
    return PLACE.sub(lambda match: f"{match[1]}{tables[match['table']]}\n{match[3]}", document)


def _tested() -> str:
    rows = ["| models | class of transformers | what is peculiar |", "|---|---|---|"]
    for family, make_config in FAMILIES.items():
        names, peculiar = MODELS[family]
        model_class = AutoModelForCausalLM._model_mapping[type(make_config())]
        rows.append(f"| {names} | `{model_class.__name__}` | {peculiar} |")
    return "\n".join(rows)


def _with_pictures() -> str:
    rows = ["| models | class of transformers | what is peculiar |", "|---|---|---|"]
    for family, make_config in PICTURE_FAMILIES.items():
        names, peculiar = PICTURE_MODELS[family]
        model_class = AutoModelForImageTextToText._model_mapping[type(make_config())]
        rows.append(f"| {names} | `{model_class.__name__}` | {peculiar} |")
    return "\n".join(rows)


def _refused() -> str:
    rows = ["| such as | what it is told |", "|---|---|"]
    for name, (make_config, _) in REFUSED.items():
        try:
            check_config(name, make_config().to_dict())
        except ConfigError as error:
            reasons = SAID.findall(error.message)
            rows.append(f"| {name} | {'; '.join(reasons)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
