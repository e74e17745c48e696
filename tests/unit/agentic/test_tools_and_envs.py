"""Tools, environments and pools of them."""

import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest

from twinkle.core.errors import ConfigError, InvalidInput
from twinkle_agentic.envs import AgentEnv, Env, EnvPool, EnvTool, OpenEnv, StepResult
from twinkle_agentic.tools import Tool, ToolManager

from .conftest import VowelEnv


class Adder(Tool):
    def __call__(self, tool_name, arguments):
        return str(arguments["a"] + arguments["b"])

    def tool_info(self):
        return {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}


def call(name, arguments):
    return {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}


def test_a_call_is_carried_out_with_arguments_as_text_or_as_an_object():
    tools = ToolManager([Adder()])
    assert tools(call("add", {"a": 1, "b": 2})) == tools(call("add", '{"a": 1, "b": 2}')) == "3"
    assert tools.call_many([call("add", {"a": 1, "b": 1}), call("add", {"a": 2, "b": 2})]) == ["2", "4"]
    assert tools.tool_infos()[0]["function"]["name"] == "add" and tools.names() == ["add"]
    assert tools.copy().names() == ["add"] and tools.unregister("add") is not None and not tools.names()
    assert tools.unregister("add") is None


@pytest.mark.parametrize(
    ("tool_call", "told"),
    [
        (call("addd", {}), "did you mean add?"),
        (call("xyz", {}), "there are: add"),
        (call("add", "{"), "no JSON"),
        (call("add", "[" * 100_000), "no JSON"),
        (call("add", "[1]"), "no object"),
        (call("add", {"a": 1}), "failed with KeyError"),
        ({}, "names no function"),
        ("text", "names no function"),
        ({"function": {"name": 3}}, "names no function"),
    ],
)
def test_what_is_wrong_with_a_call_is_what_the_model_reads(tool_call, told):
    said = ToolManager([Adder()])(tool_call)
    assert said.startswith("Error:") and told in said


def test_a_tool_without_a_name_is_refused():
    class Nameless(Adder):
        def tool_info(self):
            return {"type": "function"}

    with pytest.raises(InvalidInput, match=r"function\.name"):
        ToolManager([Nameless()])


def test_an_environments_actions_become_tools_that_keep_its_reward():
    env = VowelEnv()
    (tool,) = EnvTool.from_env(env)
    assert tool.episode_reward == 0.0 and not tool.done
    assert tool("say", {"text": "aab"}) == "2 vowels" and not tool.done
    tool("say", {"text": "b"})
    assert tool.done and tool.episode_reward == 2.0

    class Anything(Env):
        def step(self, tool_name, arguments):
            return StepResult("seen", 1.0, True, {"episode_reward": 7})

    with Anything() as anything:
        (tool,) = EnvTool.from_env(anything)
        assert ToolManager([tool])(call("env_action", {})) == "seen"
        assert tool.episode_reward == 7.0 and anything.evaluate([{}, {}]) == [0.0, 0.0]
        assert [result.observation for result in anything.step_batch([("x", {}), ("y", {})])] == ["seen", "seen"]


def test_a_pool_has_an_environment_for_each_slot_made_when_it_is_used():
    made = []

    def make(steps):
        made.append(VowelEnv(steps))
        return made[-1]

    pool = EnvPool(3, env_cls=make, env_kwargs={"steps": 1})
    first, second = pool.get_adapters(2)
    first.reset()
    assert len(made) == 1 and pool.pool_size == 3
    assert first.step("say", {"text": "a"}).info == {"episode_reward": 1.0}
    assert first.step("say", {"text": "a"}).info == {"episode_reward": 2.0}
    assert second.reset().observation and second.step("say", {"text": "b"}).done
    assert first.reset() and first.step("say", {"text": "b"}).info == {"episode_reward": 0.0}
    pool.close()
    assert [env.closed for env in made] == [True, True]
    with pytest.raises(InvalidInput, match="3 slots"):
        pool.get_adapters(4)


def test_an_environment_of_openenvs_form_runs_in_this_process(tmp_path, monkeypatch):
    package = tmp_path / "coin_env"
    (package / "server").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "server" / "__init__.py").touch()
    (package / "models.py").write_text("class CoinAction:\n    def __init__(self, side):\n        self.side = side\n")
    (package / "server" / "coin_environment.py").write_text(
        textwrap.dedent(
            """
            class Seen:
                def __init__(self, message, reward=0.0, done=False):
                    self.message, self.reward, self.done = message, reward, done

            class CoinEnvironment:
                def __init__(self, side):
                    self.side = side
                def reset(self):
                    return Seen("Heads or tails?")
                def step(self, action):
                    right = action.side == self.side
                    return Seen("Yes." if right else "No.", float(right), right)
            """
        )
    )
    monkeypatch.syspath_prepend(tmp_path)
    env = OpenEnv(
        env_name="coin_env", env_kwargs={"side": "heads"}, action_mapper=lambda name, arguments: {"side": name}
    )
    assert env.reset().observation == "Heads or tails?"
    assert env.step("tails", {}).info == {"episode_reward": 0.0}
    last = env.step("heads", {})
    assert (last.observation, last.reward, last.done) == ("Yes.", 1.0, True)
    env.close()
    for name in [name for name in sys.modules if name.startswith("coin_env")]:
        monkeypatch.delitem(sys.modules, name)


def test_an_environment_behind_a_server_is_used_through_its_client():
    class Client:
        def __init__(self, base_url, **settings):
            self.base_url, self.left = base_url, False

        def sync(self):
            return self

        def __enter__(self):
            return self

        def __exit__(self, *args):
            self.left = True

        def reset(self):
            return StepResult({"text": f"hello from {self.base_url}"})

        def step(self, action):
            return StepResult({"tool": action["tool_name"], "n": 1}, 0.5, True)

    env = OpenEnv("http://127.0.0.1:1", Client)
    assert env.reset().observation == "hello from http://127.0.0.1:1"
    assert env.step("go", {}).observation == '{"tool": "go", "n": 1}'
    env.close()
    assert env._backend.left


class Box:
    """A sandbox of E2B's form in a folder of this machine."""

    class Failed(Exception):
        pass

    def __init__(self, template, folder, **settings):
        self.template, self.folder, self.settings, self.timeouts, self.is_alive = template, folder, settings, [], True
        self.sandbox_id = "box"
        self.commands = SimpleNamespace(run=self._run)
        self.files = SimpleNamespace(
            write=lambda path, text: (folder / path).write_text(text), read=lambda path: (folder / path).read_text()
        )

    def _run(self, command, cwd, timeout):
        if command == "hang":
            raise TimeoutError("took too long")
        ended = subprocess.run(command, shell=True, cwd=cwd or self.folder, capture_output=True, text=True, check=False)
        result = self.Failed() if ended.returncode else SimpleNamespace()
        result.stdout, result.stderr, result.exit_code = ended.stdout, ended.stderr, ended.returncode
        if ended.returncode:
            raise result
        return result

    def set_timeout(self, seconds):
        self.timeouts.append(seconds)

    def kill(self):
        self.is_alive = False
        raise OSError("nobody there")


def test_a_sandbox_is_made_for_each_episode_and_tools_run_in_it(tmp_path):
    made = []

    def make(template, **settings):
        made.append(Box(template, tmp_path, **settings))
        return made[-1]

    env = AgentEnv("image", "http://127.0.0.1:1", setup_commands=["echo ready"], make_sandbox=make)
    count = {"type": "function", "function": {"name": "count", "parameters": {}}}
    env.register_command_tool(count, "wc -c < {path}")
    assert [tool["function"]["name"] for tool in env.tools()] == ["run_command", "write_file", "read_file", "count"]
    assert env.step("run_command", {"command": "ls"}).done
    assert env.reset().observation.strip() == "ready"
    assert (made[0].template, made[0].settings["api_url"], made[0].settings["api_key"]) == (
        "image",
        "http://127.0.0.1:1",
        "none",
    )

    def said(name, **arguments):
        step = env.step(name, arguments)
        assert not step.done and step.info in ({"sandbox_id": "box"}, {})
        return step.observation.strip()

    assert said("write_file", path="a b; c", content="four") == "Wrote a b; c"
    assert said("read_file", path="a b; c") == "four" and said("count", path="a b; c") == "4"
    assert said("run_command", command="echo out; echo err >&2; exit 3") == "out\n\n[stderr]\nerr\n\n[exit code: 3]"
    assert said("run_command", command="true") == "(no output)"
    assert said("run_command", command="hang") == "Error: TimeoutError: took too long"
    assert said("run_command") == "Error: run_command needs the argument 'command'"
    assert said("fly").startswith("Error: there is no tool 'fly'")
    assert len(said("run_command", command="head -c 99999 /dev/zero | tr '\\0' x")) < 33_000
    assert set(made[0].timeouts) == {300}
    env.reset()
    env.close()
    assert [box.is_alive for box in made] == [False, False] and env.sandbox is None
    with pytest.raises(InvalidInput, match="template"):
        AgentEnv("", make_sandbox=make)


def test_what_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "e2b", None)
    with pytest.raises(ConfigError, match="twinkle-queue\\[agents\\]"):
        AgentEnv("image")
    with pytest.raises(ConfigError, match="no_such_env is not installed"):
        OpenEnv(env_name="no_such_env")
    with pytest.raises(ConfigError, match="pip install openenv"):
        OpenEnv("http://127.0.0.1:1")
    with pytest.raises(InvalidInput, match="one of them"):
        OpenEnv()
