"""`memcompiler bank show`: what a memory knows, as tables and pictures; what of it was recalled in a run, and was
followed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from agent.records import Episode
from configs.collect import MemoryConfig
from data_gen.memories import open_memory, system_of
from eval.metrics import succeeded
from eval.plots import ACCENT, GRID, INK, MUTED, figure_of, plain, save_figure, titled
from eval.runs import load_run
from eval.table import percent
from memory.protocol import Graph, MemorySystem, Table, Telling
from memory.registry import DEFAULT

ROW, WIDTH = 0.24, 9.0  # inches: of a node, of a figure


def show(bank: Path, run: Path | None, out: Path, most: int) -> None:
    """Print the tables of a memory and draw its graphs, whichever system it is of.

    Raises:
        BankError: there is none.
        FileNotFoundError, ValueError: `run` is no whole run.
    """
    memory, console = open_memory(MemoryConfig(system=system_of(bank) or DEFAULT, bank=str(bank)), bank), Console()
    tables = tables_of(memory)
    if run is not None:
        tables.append(recalled_in(load_run(run)[1](False), memory))
    for each in tables:
        table = RichTable(title=Text(each.title), title_justify="left", show_edge=False)
        for head in each.heads:
            table.add_column(Text(head))
        for row in each.rows[:most]:
            table.add_row(*map(Text, row))
        left = len(each.rows) - most
        console.print(table, f"{left} more (--most)\n" if left > 0 else "")
    for path in drawn(memory, out):
        console.print(str(path), markup=False)


def tables_of(memory: MemorySystem) -> list[Table]:
    """Say what a memory holds: of what kind and from which scenes, and what its system tells beside."""
    entries = list(memory)
    counts = Counter((entry.provenance.source, entry.id.rpartition("/")[0]) for entry in entries)
    rows = tuple((source, kind.rpartition("/")[2] or "entry", str(n)) for (source, kind), n in sorted(counts.items()))
    scenes = len({entry.provenance.scene for entry in entries})
    facts = (
        ("system", memory.name),
        ("version", str(memory.snapshot())),
        ("episodes", str(memory.origins().total())),
        ("entries", str(len(entries))),
        ("scenes", str(scenes)),
    )
    own = memory.tables() if isinstance(memory, Telling) else []
    return [Table("memory", ("", ""), facts), Table("entries", ("source", "kind", "n"), rows), *own]


def drawn(memory: MemorySystem, folder: Path) -> list[Path]:
    """Draw what a memory's system has of graphs, one PNG each."""
    graphs = memory.graphs() if isinstance(memory, Telling) else []
    return [draw(graph, folder / f"graph-{number}.png") for number, graph in enumerate(graphs)]


def draw(graph: Graph, path: Path) -> Path:
    """Draw a graph from left to right, each node as far from where nothing leads to as it is; sure edges are dark."""
    columns: dict[int, list[str]] = defaultdict(list)
    for node, depth in _depths(graph).items():
        columns[depth].append(node)
    place = {
        node: (depth / max(1, len(columns) - 1), (i + 0.5) / len(nodes))
        for depth, nodes in columns.items()
        for i, node in enumerate(sorted(nodes))
    }
    tallest = max(map(len, columns.values()))
    figure, [panel] = figure_of((WIDTH, 1.0 + ROW * max(6, tallest)), 1, 1)
    titled(panel, plain(graph.title))
    for edge in graph.edges:
        (x, y), (u, v) = place[edge.start], place[edge.end]
        panel.plot([x, u], [y, v], color=ACCENT, alpha=0.15 + 0.85 * edge.weight, linewidth=0.6 + 1.4 * edge.weight)
        if edge.label:
            at = (x + 0.35 * (u - x), y + 0.35 * (v - y))
            panel.text(*at, plain(edge.label), fontsize=5.5, color=MUTED, ha="center", va="center")
    for node, (x, y) in place.items():
        box = {"facecolor": "white", "edgecolor": GRID, "boxstyle": "round,pad=0.25"}
        panel.text(x, y, plain(node), fontsize=7, color=INK, ha="center", va="center", bbox=box)
    panel.set(xlim=(-0.12, 1.12), ylim=(0, 1))
    panel.axis("off")
    return save_figure(figure, path)


def _depths(graph: Graph) -> dict[str, int]:
    """Give each node its distance from those that nothing leads to (or, in a circle, from the first)."""
    ends = {edge.end for edge in graph.edges if edge.start != edge.end}
    nodes = list(dict.fromkeys(node for edge in graph.edges for node in (edge.start, edge.end)))
    found = dict.fromkeys([node for node in nodes if node not in ends] or nodes[:1], 0)
    while True:
        front = {e.end: found[e.start] + 1 for e in graph.edges if e.start in found and e.end not in found}
        left = [node for node in nodes if node not in found and node not in front]
        if not front and not left:
            return found
        found |= front or {left[0]: 0}


def recalled_in(episodes: Iterable[Episode], memory: MemorySystem) -> Table:
    """Say, of a run's episodes, what was recalled most often, in which episodes and with which success; `followed`: of
    these episodes, in how many a command that it tells was done afterwards."""
    seen: dict[str, list[tuple[bool, bool]]] = defaultdict(list)
    for episode in episodes:
        for name, followed in _uses(episode, memory).items():
            seen[name].append((followed, succeeded(episode)))
    often = sorted(seen.items(), key=lambda one: (-len(one[1]), one[0]))
    rows = tuple(
        (name, str(len(uses)), percent(fmean(done for done, _ in uses)), percent(fmean(won for _, won in uses)))
        for name, uses in often
    )
    return Table("recalled", ("what", "episodes", "followed %", "success %"), rows)


def _uses(episode: Episode, memory: MemorySystem) -> dict[str, bool]:
    """Say of each thing that was recalled in an episode (of what is made for a step: of each section) whether it was
    followed."""
    uses: dict[str, bool] = {}
    actions: Sequence[str] = [step.action for step in episode.steps]
    for t in range(len(episode.steps)):
        for entry in episode.memory_at(t, memory):
            name = entry.id.rpartition("/")[0] if entry.id in episode.made else entry.id
            if not uses.get(name):
                uses[name] = any(action and action in entry.text for action in actions[t:])
    return uses
