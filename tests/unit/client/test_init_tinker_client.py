"""The official SDK pointed at our server: by variables, with any key, and rows of our templates."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from twinkle_client.tinker import ANY_KEY, DEFAULT_URL, input_feature_to_datum

VARIABLES = ("TINKER_BASE_URL", "TINKER_API_KEY", "TWINKLE_SERVER_URL", "TWINKLE_SERVER_TOKEN")


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, "unset")
        monkeypatch.delenv(name)


def in_a_process_of_its_own(script: str) -> str:
    """What a script prints: the SDK stays patched for as long as a process lives."""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_arguments_win_over_the_environment() -> None:
    said = in_a_process_of_its_own(
        "import os; os.environ.update(TWINKLE_SERVER_URL='http://elsewhere:1', TWINKLE_SERVER_TOKEN='tml-elsewhere')\n"
        "from twinkle_client import init_tinker_client\n"
        "init_tinker_client(base_url='http://127.0.0.1:9000/', api_key='tml-mine')\n"
        "print(os.environ['TINKER_BASE_URL'], os.environ['TINKER_API_KEY'])"
    )
    assert said == "http://127.0.0.1:9000 tml-mine"


def test_the_twinkle_variables_are_enough_and_without_any_it_is_a_server_here() -> None:
    script = (
        "import os; from twinkle_client import init_tinker_client\n"
        "init_tinker_client(); print(os.environ['TINKER_BASE_URL'], os.environ['TINKER_API_KEY'])"
    )
    given = "import os; os.environ.update(TWINKLE_SERVER_URL='http://there:8000', TWINKLE_SERVER_TOKEN='ms-there')\n"

    assert in_a_process_of_its_own(given + script) == "http://there:8000 ms-there"
    assert in_a_process_of_its_own(script) == f"{DEFAULT_URL} {ANY_KEY}"


@pytest.mark.parametrize(
    "begin",
    [
        "from twinkle_client import init_tinker_client; init_tinker_client(base_url='http://127.0.0.1:1')",
        "from tinker import ServiceClient\nfrom twinkle.server.common import input_feature_to_datum",
        "from twinkle.server.tinker.common import input_feature_to_datum\nfrom tinker import ServiceClient",
        "from twinkle.server.model.tinker_datum import input_feature_to_datum\nfrom tinker import ServiceClient",
    ],
)
def test_the_sdk_takes_any_key_and_sends_it_as_it_is(begin: str) -> None:
    said = in_a_process_of_its_own(
        f"{begin}\n"
        "from tinker.lib._auth_token_provider import ApiKeyAuthProvider as Provider\n"
        "from tinker.types.checkpoint import ParsedCheckpointTinkerPath as Path\n"
        "print(Provider('your-api-key').api_key, Provider('tml-own').api_key,"
        " Path.from_tinker_path('twinkle://run/weights/one').checkpoint_id)\n"
        "import sys; assert 'fastapi' not in sys.modules and 'sqlalchemy' not in sys.modules"
    )
    assert said == "your-api-key tml-own weights/one"


def test_training_a_whole_model_is_asked_for_as_a_lora_of_rank_0() -> None:
    said = in_a_process_of_its_own(
        "import asyncio, tinker; from unittest import mock; from twinkle_client import init_tinker_client\n"
        "init_tinker_client(base_url='http://127.0.0.1:1')\n"
        "client = object.__new__(tinker.ServiceClient)\n"
        "with mock.patch.object(tinker.ServiceClient, 'create_lora_training_client') as made,"
        " mock.patch.object(tinker.ServiceClient, 'create_lora_training_client_async') as later:\n"
        "    client.create_full_training_client(base_model='m', user_metadata={'a': 'b'})\n"
        "    asyncio.run(client.create_full_training_client_async('m'))\n"
        "print(made.call_args, later.call_args)"
    )
    assert said == "call('m', rank=0, user_metadata={'a': 'b'}) call('m', rank=0)"


def test_without_any_of_that_the_sdk_judges_keys_as_ever() -> None:
    said = in_a_process_of_its_own(
        "import twinkle_client, tinker\n"
        "from tinker.lib._auth_token_provider import ApiKeyAuthProvider\n"
        "try: ApiKeyAuthProvider('your-api-key')\n"
        "except tinker.TinkerError as error: print(error)"
    )
    assert "'tml-' prefix" in said


def test_a_compatible_client_is_the_sdks_own() -> None:
    said = in_a_process_of_its_own(
        "from twinkle_client import init_tinker_compat_client\n"
        "import tinker\n"
        "from unittest import mock\n"
        "with mock.patch.object(tinker, 'ServiceClient') as made:\n"
        "    init_tinker_compat_client('http://host/twinkle', 'a-key', user_metadata={'a': 'b'})\n"
        "print(made.call_args.kwargs)"
    )
    assert said == "{'base_url': 'http://host/twinkle', 'api_key': 'a-key', 'user_metadata': {'a': 'b'}}"


def test_a_row_becomes_a_datum_whose_ignored_tokens_weigh_nothing() -> None:
    datum = input_feature_to_datum(
        {"input_ids": np.array([[5, 6, 7, 0]]), "labels": [-100, 7, 8, -100], "attention_mask": [1, 1, 1, 0]}
    )

    assert datum.model_input.to_ints() == [5, 6, 7]
    assert datum.loss_fn_inputs["target_tokens"].data == [0, 7, 8]
    assert datum.loss_fn_inputs["weights"].data == [0.0, 1.0, 1.0]


def test_a_rows_pictures_go_along_in_its_datum() -> None:
    datum = input_feature_to_datum(
        {
            "input_ids": [5, 300, 6, 0],
            "labels": [-100, 6, 7, -100],
            "attention_mask": [1, 1, 1, 0],
            "position_ids": np.zeros((3, 4), dtype=int),
            "pixel_values": np.ones((4, 12), dtype=np.float32),
            "image_grid_thw": [[1, 2, 2]],
            "mm_token_type_ids": [0, 1, 0, 0],
        }
    )

    inputs = datum.loss_fn_inputs
    assert inputs["pixel_values"].shape == [4, 12] and inputs["pixel_values"].data == [1.0] * 48
    assert (inputs["image_grid_thw"].shape, inputs["image_grid_thw"].data) == ([1, 3], [1, 2, 2])
    assert inputs["mm_token_type_ids"].data == [0, 1, 0]


ROW: dict[str, Any] = {"input_ids": [1, 2, 3], "labels": [2, 3, 4]}


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"input_ids": [1]}, "labels: is missing"),
        ({"input_ids": [1], "labels": [1, 2]}, "as many"),
        ({**ROW, "member_lengths": [1, 2]}, "member_lengths: are of 2 sequences"),
        ({**ROW, "position_ids": np.array([0, 0, 1])}, "position_ids: begin again"),
        ({**ROW, "pixel_values": [[1.0]], "image_position_ids": [[0, 0]]}, "image_position_ids: do not travel"),
    ],
)
def test_a_row_that_is_no_datum_is_refused(row: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        input_feature_to_datum(row)
