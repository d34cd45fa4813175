"""Settings of BrainMem (arXiv 2604.16331): the paper's values, and a switch per ablation."""

from __future__ import annotations

from pydantic import Field

from runtime.settings import Settings


class Working(Settings):
    """Working memory (section 3.2.1, Tables 5 and 6)."""

    enabled: bool = True
    """Use working memory."""
    window: int = Field(default=5, ge=1)
    """Number of last steps shown."""
    feedback: bool = True
    """Mark each step as success or failure."""
    success_state: bool = True
    """Show the success rate of the window and the number of actions."""
    agent_state: bool = True
    """Show the held object."""
    consistency_check: bool = True
    """Warn of repeated and inconsistent actions."""


class Episodic(Settings):
    """Trajectory graph and spatial graph (section 3.2.2, Table 7)."""

    enabled: bool = True
    """Use episodic memory."""
    trajectory: bool = True
    """Learn the trajectory graph: patterns of the room and action hints."""
    spatial: bool = True
    """Learn the spatial graph: places of objects."""
    facts: bool = True
    """List facts in the spatial guidance; false: only the template of C.2 and C.5."""


class Semantic(Settings):
    """Experiences and guidelines (sections 3.2.3 and B.3, Tables 8 and 9)."""

    enabled: bool = True
    """Use semantic memory."""
    k: int = Field(default=2, ge=0)
    """Number of experiences shown."""
    success_patterns: bool = True
    """Show the success pattern of each experience."""
    failure_causes: bool = True
    """Show the failure cause of each experience."""
    learning_insights: bool = True
    """Show the insight of each experience."""
    guidelines: int = Field(default=20, ge=0)
    """Maximum number of guidelines shown; above 1.5 times as many, guidelines are dropped (M of B.3.2)."""


class Evolve(Settings):
    """Counts, pruning, and retries of failed tasks (section 3.4)."""

    enabled: bool = True
    """Count how guidelines fare, drop the least useful, and retry failed tasks."""
    retries: int = Field(default=2, ge=0)
    """Maximum retries per failed task; retries are never scored."""
    decay: float = Field(default=0.99, gt=0, le=1)
    """Decay of a guideline's utility per episode since its last use."""


class BrainMemSettings(Settings):
    """Settings of the memory system `brainmem` (docs/experiments/brainmem.md)."""

    working: Working = Working()
    """Working memory."""
    episodic: Episodic = Episodic()
    """Episodic memory."""
    semantic: Semantic = Semantic()
    """Semantic memory."""
    evolve: Evolve = Evolve()
    """Counts, pruning and retries."""
    texts_only: bool = False
    """Control: show only the fixed texts, without any content of the tiers."""
