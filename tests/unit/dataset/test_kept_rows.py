"""Rows of an earlier run are read again only if nothing that they depend on has changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.chat_templates import save_tokenizer
from harness.rows import conversation, write_jsonl
from twinkle.dataset.workspace import kept_file, key_of
from twinkle.preprocessor import SelfCognitionProcessor

SCRIPT = """
    import sys
    sys.path.insert(0, "FOLDER")
    from own_preprocessor import Mark
    from twinkle.dataset import Dataset, DatasetMeta

    dataset = Dataset(DatasetMeta("FOLDER/rows.jsonl"))
    dataset.map(Mark(SETTING), load_from_cache_file=True)
    dataset.set_template("Template", model_id="FOLDER/tokenizer", default_system=SYSTEM)
    dataset.encode(load_from_cache_file=True)
    print(Mark.calls, dataset[0]["mark"], dataset[0]["length"])
"""
PREPROCESSOR = """
    from twinkle.preprocessor import Preprocessor
    from own_words import word

    class Mark(Preprocessor):
        calls = 0
        def __init__(self, setting):
            self.setting = setting
        def __call__(self, columns):
            type(self).calls += 1
            return {"mark": [word() + self.setting for _ in columns["messages"]]}
"""

# Each script in a process forked from one that has imported what all of them need and has read nothing.
FORKS = """
    import os, sys, traceback
    import datasets, transformers, twinkle.template
    from twinkle.dataset import Dataset, DatasetMeta
    from twinkle.preprocessor import Preprocessor

    for path in sys.stdin:
        if os.fork() == 0:
            code = 1
            try:
                exec(compile(open(path.strip()).read(), path, "exec"), {"__name__": "__main__"})
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code)
        print("ended", os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


class Run:
    """A script with a preprocessor in another file, which uses a third."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        environment = {**os.environ, "HF_HOME": str(folder / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
        self._forks = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(FORKS)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        save_tokenizer(folder / "tokenizer")
        write_jsonl(folder / "rows.jsonl", [conversation(n) for n in range(3)])
        self.word("a")

    def word(self, word: str) -> None:
        (self.folder / "own_preprocessor.py").write_text(textwrap.dedent(PREPROCESSOR))
        (self.folder / "own_words.py").write_text(f"def word():\n    return {word!r}\n")

    def template(self, before: str) -> None:
        folder = self.folder / "tokenizer"
        config = json.loads((folder / "tokenizer_config.json").read_text())
        if "chat_template" in config:
            config["chat_template"] = before + config["chat_template"]
            (folder / "tokenizer_config.json").write_text(json.dumps(config))
        else:
            path = folder / "chat_template.jinja"
            path.write_text(before + path.read_text())

    def __call__(self, setting: str = "", system: str | None = None) -> str:
        script = textwrap.dedent(SCRIPT).replace("FOLDER", str(self.folder))
        script = script.replace("SETTING", repr(setting)).replace("SYSTEM", repr(system))
        path = self.folder / "script.py"
        path.write_text(script)
        assert self._forks.stdin is not None and self._forks.stdout is not None
        print(path, file=self._forks.stdin, flush=True)
        said = []
        for line in self._forks.stdout:
            if line.startswith("ended "):
                assert line == "ended 0\n", said
                break
            said.append(line.strip())
        return said[-1]

    def end(self) -> None:
        self._forks.communicate()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    run.end()


def test_what_has_not_changed_is_read_and_what_has_changed_is_made_anew(run: Run) -> None:
    calls, mark, length = run().split()
    assert (calls, mark) == ("1", "a")

    assert run() == f"0 a {length}"
    # The rows that were mapped and those that were encoded: none was made again under another key.
    assert len(list((run.folder / "cache" / "datasets" / "twinkle" / "kept").glob("*.arrow"))) == 2

    run.template("more words ")
    calls, mark, longer = run().split()
    assert (calls, mark) == ("0", "a")
    assert int(longer) > int(length)

    run.word("b")
    calls, mark, longest = run(system="Be brief.").split()
    assert (calls, mark) == ("1", "b")
    assert int(longest) > int(longer)


def test_a_preprocessor_with_other_settings_has_another_key() -> None:
    assert key_of(SelfCognitionProcessor("a", "b")) == key_of(SelfCognitionProcessor("a", "b"))
    assert key_of(SelfCognitionProcessor("a", "b")) != key_of(SelfCognitionProcessor("a", "c"))
    assert key_of(lambda columns: columns) != key_of(lambda columns: {**columns})


def test_what_cannot_be_pickled_has_no_key() -> None:
    assert key_of(number for number in range(3)) is None


def test_what_no_run_has_read_for_long_is_removed() -> None:
    old, used = kept_file("old"), kept_file("used")
    for path in (old, used):
        path.write_bytes(b"rows")
        os.utime(path, (time.time() - 40 * 24 * 3600,) * 2)

    kept_file("used")
    kept_file("new")

    assert (old.exists(), used.exists()) == (False, True)
