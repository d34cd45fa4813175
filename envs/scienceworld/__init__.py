"""ScienceWorld: 30 kinds of school experiments in one simulated house, in text (optional extra `scienceworld`)."""

from envs.scienceworld.environment import ScienceWorldEnvironment
from envs.scienceworld.simulator import java_path

__all__ = ["ScienceWorldEnvironment", "java_path"]
