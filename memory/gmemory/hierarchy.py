"""G-Memory's three tiers as a fold over journal rows: trajectories, the graph of tasks, and insights.

A node is an episode's task, its text is kind and goal. Edges link similar tasks. Insights change in rounds, one at
every fifth row: by the operations that a model wrote at commit, else by rule.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from envs.base import Task
from envs.command_reader import CommandReader
from memory.brainmem import rules
from memory.brainmem.episodic import topic_of
from memory.gmemory.insights import Insights, advice, warning
from memory.gmemory.settings import GMemorySettings
from memory.items import Items, Origin
from memory.journal import Row
from memory.protocol import Trace
from memory.replies import line
from memory.similarity import CachedEmbed
from memory.trajectory import command_lines, one_line, raw_lines

ROUND, MERGE_EVERY, MOST_EDGES = 5, 20, 10  # rows per round and between merges; edges of a new node
INSIGHT = "gmemory/insight/"  # prefix of the ids of insights
FOUND = 1e-9  # minimal similarity of a node that a recall enters by


@dataclass(frozen=True, slots=True)
class Node:
    """A task with the trajectory of its first success, else of its last attempt.

    Attributes:
        key: of its journal row, by which answers name the node.
        steps: key steps of a success, or the cause of a failure.
    """

    name: str
    key: str
    origin: Origin
    trace: Trace
    steps: tuple[str, ...]

    @property
    def success(self) -> bool:
        return self.origin.success

    @property
    def kind(self) -> str:
        return self.origin.task.kind

    def lines(self, raw: bool = False) -> list[str]:
        """Return the trajectory and what mattered in it."""
        head = "key steps" if self.success else "why it failed"
        steps = [one_line(f"{head}: {'; '.join(self.steps)}")] if self.steps else []
        return [*(raw_lines if raw else command_lines)(self.trace), *steps]


def task_text(task: Task) -> str:
    """Return the text by which tasks are compared: kind and goal."""
    return one_line("-".join(filter(None, (task.kind, task.goal))))


@dataclass
class Hierarchy:
    """All three tiers after `learned` rows."""

    settings: GMemorySettings
    reader: CommandReader
    embed: CachedEmbed | None = None
    learned: int = 0
    nodes: dict[str, Node] = field(default_factory=dict)
    by_key: dict[str, str] = field(default_factory=dict)  # names
    edges: dict[str, dict[str, None]] = field(default_factory=dict)  # by name, both directions
    insights: Insights = field(default_factory=Insights)
    tasks: Items = field(init=False)  # of all nodes, compared by `task_text`
    won: Items = field(init=False)  # of successful ones
    _kinds_won: set[str] = field(default_factory=set)
    _latest: list[Node] = field(default_factory=list)  # since the last round

    def __post_init__(self) -> None:
        self.tasks, self.won = Items(self.embed), Items(self.embed)

    def learn(self, row: Row) -> None:
        """Judge the insights that the episode was shown, add its node, and hold a round where one is due."""
        for trace in row.attempts:
            shown = [id.removeprefix(INSIGHT) for id in trace.shown if id.startswith(INSIGHT)]
            self.insights.judge(shown, trace.success)
        node = self.new_node(row)
        self._add(node, self.similar_tasks(node.origin.task))
        self.learned += 1
        if (operations := row.answers.get("operations")) is not None:
            for operation in operations:
                named = (self.by_key.get(key) for key in operation.get("support", ()))
                self.insights.apply(operation, {name: self.nodes[name].origin for name in named if name})
        elif self.learned % ROUND == 0:
            self._round_by_rule()
        if self.learned % ROUND == 0:
            self._latest = []

    def new_node(self, row: Row) -> Node:
        """Return the node of the next row, not yet added."""
        trace = next((trace for trace in row.attempts if trace.success), row.attempts[-1])
        given = row.answers.get("key_steps" if trace.success else "failure")
        steps = tuple(given) if given else self.steps_by_rule(trace)
        return Node(f"q{self.learned + 1}", row.key, Origin.of(self.learned, trace), trace, steps)

    def steps_by_rule(self, trace: Trace) -> tuple[str, ...]:
        """Return the key steps of a success, or the cause of a failure, without a language model."""
        if trace.success:
            return tuple(dict.fromkeys(line(self.reader.phrase(done)) for done in rules.effects(trace, self.reader)))
        topic = topic_of(trace.task, self.reader, trace.first)
        return (line(rules.cause(trace, topic, self.reader)),)

    def similar_tasks(self, task: Task) -> list[str]:
        """Return the nodes that a new task is linked with, nearest first."""
        found = self.tasks.search(task_text(task), MOST_EDGES, at_least=self.settings.edge, store=True)
        return [version.item for _, version in found]

    def neighbourhood(self, entered: Sequence[str], own: str) -> list[str]:
        """Return some nodes and those within the hops of the settings, without a task's own, in order of discovery."""
        found = dict.fromkeys(entered)
        reached = list(entered)
        for _ in range(self.settings.hops):
            further = dict.fromkeys(name for each in reached for name in self.edges[each])
            reached = [n for n in further if n not in found and self.nodes[n].origin.task.id != own]
            found |= dict.fromkeys(reached)
        return list(found)

    def anchors(self, number: int, nodes: Sequence[Node]) -> list[Node]:
        """Draw the tasks that a round is about; the draw depends on the row's number and the nodes' keys alone."""
        draw = lambda node: hashlib.sha256(f"{number} {node.key}".encode()).hexdigest()
        return sorted(nodes, key=draw)[:ROUND]

    def _add(self, node: Node, similar: Sequence[str]) -> None:
        self.nodes[node.name], self.by_key[node.key] = node, node.name
        self.edges[node.name] = dict.fromkeys(similar)
        for name in similar:
            self.edges[name][node.name] = None
        for items in (self.tasks, self.won) if node.success else (self.tasks,):
            items.put(
                node.name,
                "\n".join(node.lines(self.settings.text == "raw")),
                self.learned,
                [node.origin],
                actions=node.trace.actions,
                images=node.trace.views,
                searched=task_text(node.origin.task),
            )
        if node.success:
            self._kinds_won.add(node.kind)
        self._latest.append(node)

    def _round_by_rule(self) -> None:
        """Add advice from the successes since the last round, and warnings from failures of kinds that succeeded."""
        for node in self._latest:
            if node.success:
                text = advice([done.verb for done in rules.effects(node.trace, self.reader)], line(node.kind))
            else:
                text = warning("; ".join(node.steps), line(node.kind)) if node.kind in self._kinds_won else ""
            if text:
                self.insights.apply({"op": "ADD", "text": text, "by_rule": True}, {node.name: node.origin})
