"""Settings of BrainMem (arXiv 2604.16331): the paper's values, and a switch for each of its ablations."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from runtime.settings import Settings


class Working(Settings):
    """The last steps (section 3.2.1, Tables 5 and 6)."""

    enabled: bool = True
    window: int = Field(default=5, ge=1)  # steps
    feedback: bool = True  # whether each step succeeded
    success_state: bool = True  # the short-term success rate
    agent_state: bool = True  # what is held
    consistency_check: bool = True
    format: Literal["full", "short"] = "full"  # of C.1, or of B.1.1


class Episodic(Settings):
    """Both graphs (section 3.2.2, Table 7)."""

    enabled: bool = True
    trajectory: bool = True
    spatial: bool = True
    facts: bool = True  # False: the printed template of C.2 and C.5, whose spatial guidance holds no fact
    patterns: int = Field(default=2, ge=0)  # that are shown of a room
    pattern_actions: int = Field(default=12, ge=1)  # of a pattern, at most


class Semantic(Settings):
    """Experiences and guidelines (sections 3.2.3 and B.3, Tables 8 and 9)."""

    enabled: bool = True
    k: int = Field(default=2, ge=0)  # experiences that are shown
    success_patterns: bool = True
    failure_causes: bool = True
    learning_insights: bool = True
    guidelines: int = Field(default=20, ge=0)  # M of B.3.2; all are shown
    select: Literal["all", "matching"] = "all"


class Evolve(Settings):
    """What makes memory evolve (section 3.4): counts, pruning, and further attempts at what failed."""

    enabled: bool = True
    retries: int = Field(default=2, ge=0)  # at a task that failed, at most; never scored
    decay: float = Field(default=0.99, gt=0, le=1)  # of utility, by episodes since the last use; 1: none


class BrainMemSettings(Settings):
    working: Working = Working()
    episodic: Episodic = Episodic()
    semantic: Semantic = Semantic()
    evolve: Evolve = Evolve()
    texts_only: bool = False  # control: all fixed texts, every tier empty
