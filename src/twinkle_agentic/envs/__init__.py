"""What an agent's calls change: environments, pools of them, and how they become tools."""

from twinkle_agentic.envs.agent_env import AgentEnv
from twinkle_agentic.envs.base import Env, StepResult
from twinkle_agentic.envs.env_tool import EnvTool
from twinkle_agentic.envs.openenv import OpenEnv
from twinkle_agentic.envs.pool import EnvPool, EnvPoolAdapter

__all__ = ["AgentEnv", "Env", "EnvPool", "EnvPoolAdapter", "EnvTool", "OpenEnv", "StepResult"]
