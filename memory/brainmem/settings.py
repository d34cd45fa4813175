"""Settings of BrainMem (arXiv 2604.16331): the paper's values, and a switch per ablation."""

from __future__ import annotations

from pydantic import Field

from runtime.settings import Settings


class Working(Settings):
    """Working memory (section 3.2.1, Tables 5 and 6)."""

    enabled: bool = True
    window: int = Field(default=5, ge=1)  # steps
    feedback: bool = True  # success or failure of each step
    success_state: bool = True  # success rate of the window
    agent_state: bool = True  # the held object
    consistency_check: bool = True


class Episodic(Settings):
    """Trajectory graph and spatial graph (section 3.2.2, Table 7)."""

    enabled: bool = True
    trajectory: bool = True
    spatial: bool = True
    facts: bool = True  # False: the template of C.2 and C.5, whose spatial guidance has no facts


class Semantic(Settings):
    """Experiences and guidelines (sections 3.2.3 and B.3, Tables 8 and 9)."""

    enabled: bool = True
    k: int = Field(default=2, ge=0)  # experiences shown
    success_patterns: bool = True
    failure_causes: bool = True
    learning_insights: bool = True
    guidelines: int = Field(default=20, ge=0)  # M of B.3.2; guidelines shown


class Evolve(Settings):
    """Counts, pruning, and retries of failed tasks (section 3.4)."""

    enabled: bool = True
    retries: int = Field(default=2, ge=0)  # at most, per failed task; never scored
    decay: float = Field(default=0.99, gt=0, le=1)  # of utility per episode since the last use


class BrainMemSettings(Settings):
    working: Working = Working()
    episodic: Episodic = Episodic()
    semantic: Semantic = Semantic()
    evolve: Evolve = Evolve()
    texts_only: bool = False  # control: fixed texts only, every tier empty
