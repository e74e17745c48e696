"""The names that scripts take from the package itself."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import twinkle
from twinkle.core.errors import ConfigError, InvalidInput
from twinkle.infra.remote import marks_of

NAMES = (
    "initialize remote_class remote_function get_device_placement is_master DeviceMesh DeviceGroup Platform GPU NPU"
    " check_unsafe exists requires find_free_port find_node_ip framework_util torch_util get_logger trust_remote_code"
    " __version__ init_tinker_client"
)


@pytest.mark.parametrize("name", NAMES.split())
def test_every_name_that_scripts_import_is_there(name: str) -> None:
    assert getattr(twinkle, name) is not None
    assert name in twinkle.__all__


def test_names_load_only_what_they_need() -> None:
    code = (
        "import sys; from twinkle import DeviceGroup, GPU, check_unsafe, exists, find_free_port, get_logger,"
        " remote_class, remote_function, requires, trust_remote_code;"
        "assert not {'torch', 'transformers', 'sqlalchemy', 'datasets', 'modelscope'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


SAYING = """
import twinkle
logger = twinkle.get_logger()
logger.info("said by the first")
logger.error("an error of %s", twinkle.Platform.get_rank())
"""


def test_the_first_rank_speaks_and_the_others_only_of_errors() -> None:
    said = [
        subprocess.run(
            [sys.executable, "-c", SAYING],
            env={**os.environ, "RANK": rank, "WORLD_SIZE": "2"},
            capture_output=True,
            text=True,
            check=True,
        ).stderr
        for rank in "01"
    ]

    assert "said by the first" in said[0]
    assert "an error of 0" in said[0]
    assert "said by" not in said[1]
    assert "an error of 1" in said[1]


def test_a_log_goes_to_a_file_too(tmp_path: Path) -> None:
    logger = twinkle.get_logger(log_file=tmp_path / "run.log")
    try:
        logger.info("step %d", 3)
    finally:
        for handler in [handler for handler in logger.handlers if isinstance(handler, logging.FileHandler)]:
            logger.removeHandler(handler)
            handler.close()

    assert (tmp_path / "run.log").read_text().endswith("[INFO:twinkle] step 3\n")


@twinkle.remote_class(execute="peer")
class Counter:
    """A component of a user's own."""

    def __init__(self, start: int = 0) -> None:
        self.count = start

    @twinkle.remote_function(dispatch="slice_dp", execute="all", collect="sum", lazy_collect=False)
    def add(self, numbers: list[int]) -> int:
        """Adds."""
        self.count += sum(numbers)
        return self.count


def test_a_marked_component_works_in_one_process_as_without_marks() -> None:
    counter = Counter(start=2, instance_id="a")

    assert counter.add([1, 2]) == 5
    assert Counter.add.remote_call.dispatch == "slice_dp"
    assert Counter.add.__doc__ == "Adds."


def test_in_one_process_a_group_is_where_the_script_is() -> None:
    twinkle.initialize("local", groups=[twinkle.DeviceGroup("model", 8, "GPU")])

    assert Counter(start=1, remote_group="model").add([1]) == 2
    with pytest.raises(ConfigError, match=r"remote_group: 'sampler' is no group.*they are model"):
        Counter(remote_group="sampler")
    with pytest.raises(ConfigError, match="dispatch: 'fast' is unknown"):
        twinkle.remote_function(dispatch="fast")


class Heir(Counter):
    """Derives from a marked class, and knows of no group."""

    def __init__(self, start: int) -> None:
        super().__init__(start)
        self.count *= 10

    def add(self, numbers: list[int]) -> int:
        return super().add(numbers) + 1


def test_what_derives_from_a_marked_component_is_marked_too() -> None:
    assert Heir(2, remote_group="anywhere", instance_id="b").add([1]) == 22
    assert marks_of(Heir)["add"].dispatch == "slice_dp"


def test_without_the_extra_the_mode_ray_says_what_to_install() -> None:
    code = (
        "import sys, importlib.util; find = importlib.util.find_spec;"
        "importlib.util.find_spec = lambda name, *more: None if name == 'ray' else find(name, *more);"
        "import twinkle; twinkle.initialize('ray', 8, 8)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.returncode == 1
    assert "mode: 'ray' needs Ray; pip install 'twinkle-queue[ray]'" in done.stderr


def test_arguments_come_by_place_too() -> None:
    twinkle.initialize("local", 8, 8, 11, False, None, None, False, "a run")

    assert "seed 11" in twinkle.get_device_placement()


def test_packages_are_asked_for_by_name_and_version() -> None:
    assert twinkle.exists("numpy>=1")
    assert not twinkle.exists("numpy>=1000")
    with pytest.raises(ImportError, match=r"no-such-package is not installed; pip install 'no-such-package'"):
        twinkle.requires("no-such-package")


def test_code_among_arguments_is_refused_unless_the_operator_trusts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TWINKLE_TRUST_REMOTE_CODE", raising=False)
    twinkle.check_unsafe(1, "text", rows=[{"a": 1}])
    assert not twinkle.trust_remote_code()
    with pytest.raises(InvalidInput, match=r"settings\.loss\[0\]"):
        twinkle.check_unsafe(settings={"loss": [print]})

    monkeypatch.setenv("TWINKLE_TRUST_REMOTE_CODE", "1")
    twinkle.check_unsafe(print)


def test_a_free_port_can_be_listened_at() -> None:
    assert 0 < twinkle.find_free_port() < 65536
    assert twinkle.find_free_port(start_port=20000) >= 20000
    assert twinkle.find_node_ip().count(".") == 3


def test_torch_is_asked_by_the_names_of_scripts() -> None:
    assert twinkle.torch_util.contains_nan({"a": [torch.tensor([float("nan")])]})
    assert not twinkle.torch_util.contains_nan(torch.zeros(2), text="nan")
    assert twinkle.framework_util.gather_object([1, 2]) == [1, 2]
    assert twinkle.GPU.device_prefix() == "cuda"
    assert twinkle.NPU.visible_device_env() == "ASCEND_RT_VISIBLE_DEVICES"


def test_a_run_that_ends_by_an_error_says_so_and_tells_its_notifier() -> None:
    code = (
        "import twinkle; twinkle.initialize(name='night', notifier=lambda text: print('told:', text));"
        "raise ValueError('no data')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.returncode == 1
    assert "told: rank 0 of 1 of night ends with ValueError: no data" in done.stdout
    assert "Traceback" in done.stderr
