"""What scripts give to components at a server, as it travels."""

from __future__ import annotations

import pytest

from twinkle.core.errors import InvalidInput
from twinkle.preprocessor import CountdownProcessor, Preprocessor, SelfCognitionProcessor
from twinkle_client.arguments import component_parts


def test_an_object_of_the_librarys_travels_as_its_name_and_what_it_was_made_with() -> None:
    made = SelfCognitionProcessor("twinkle model", "twinkle team")

    assert component_parts("preprocess_func", made) == (
        "SelfCognitionProcessor",
        {"model_name": "twinkle model", "model_author": "twinkle team"},
    )
    assert component_parts("preprocess_func", CountdownProcessor) == ("CountdownProcessor", None)
    assert component_parts("preprocess_func", "CountdownProcessor") == ("CountdownProcessor", None)


def test_an_object_of_the_scripts_own_is_refused_in_words() -> None:
    class Own(Preprocessor):
        pass

    with pytest.raises(InvalidInput, match="code of this process"):
        component_parts("preprocess_func", Own())
