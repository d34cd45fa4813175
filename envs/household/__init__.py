"""The built-in household: ALFWorld's text world as a native engine, with homes of its own and a small picture."""

from envs.household.environment import HouseholdEnvironment
from envs.household.render import RECEPTACLE_NAMES

__all__ = ["RECEPTACLE_NAMES", "HouseholdEnvironment"]
