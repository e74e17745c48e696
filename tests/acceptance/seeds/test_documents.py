"""What is taken from the documents is what they show."""

from __future__ import annotations

from harness.seeds import Script

HERE = {"000:32", "000:60", "000:106", "002:38", "002:78", "002:141"}
"""Document and line of what needs neither Ray nor Megatron nor a server; the tests beside this one run them."""


def test_every_script_is_python_and_has_the_words_of_its_document(scripts: list[Script]) -> None:
    for script in scripts:
        compile(script.text, script.name, "exec")
        shown = [line.strip() for line in script.lines if line.strip()]
        assert [line.strip() for line in script.text.splitlines() if line.strip()] == shown, script.name


def test_no_script_that_could_run_here_is_left_out(scripts: list[Script]) -> None:
    assert {script.name for script in scripts if script.is_whole and not script.needs} == HERE


def test_two_prints_of_a_script_have_the_same_shape(scripts: list[Script]) -> None:
    """The English text lost its indentation and the Chinese one did not: they nest the same words alike."""
    named = {script.name: script for script in scripts}
    for one, other in (("000:32", "002:38"), ("000:60", "002:78"), ("000:106", "002:141")):
        assert _shape(named[one].text) == _shape(named[other].text)


def _shape(text: str) -> list[tuple[int, str]]:
    """Level and first word of every line of code outside of strings."""
    code = [line for line in text.partition('"""')[0].splitlines() if line.strip() and not line.strip().startswith("#")]
    return [(len(line) - len(line.lstrip()), line.split("(")[0].strip()) for line in code]
