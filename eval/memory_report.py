"""`memcompiler bank show`: tables and graphs of a memory's content, and how often a run recalled and followed
entries."""

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
from data_gen.memory_factory import open_memory, stored_system
from eval.metrics import succeeded
from eval.plots import ACCENT, GRID, INK, MUTED, figure_of, plain, save_figure, titled
from eval.runs import load_run
from eval.table import percent
from memory.bank import MemoryBank
from memory.bank_store import Place
from memory.protocol import DisplaysContents, Graph, MemorySystem, Table
from memory.registry import DEFAULT
from memory.trajectory import compact_text

ROW, WIDTH = 0.24, 9.0  # inches: of a node, of a figure


def show(bank: Place, run: Path | None, out: Path, most: int, env: str | None = None) -> None:
    """Print the tables of a memory of any system and draw its graphs.

    Args:
        env: the environment of its episodes; default: the one that the bank names.

    Raises:
        BankError: there is no memory, or its system reads views and no environment is known.
        FileNotFoundError, ValueError: `run` is incomplete.
    """
    system, console = stored_system(bank) or DEFAULT, Console()
    settings = {"text": MemoryBank(bank).text} if system == MemoryBank.name else {}
    memory = open_memory(MemoryConfig(system=system, settings=settings, bank=str(bank)), Path(), env)
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
    """Return tables of a memory: its size, its entries by kind, and the system's own tables."""
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
    own = memory.tables() if isinstance(memory, DisplaysContents) else []
    return [Table("memory", ("", ""), facts), Table("entries", ("source", "kind", "n"), rows), *own]


def drawn(memory: MemorySystem, folder: Path) -> list[Path]:
    """Draw the graphs of a memory's system, one PNG each."""
    graphs = memory.graphs() if isinstance(memory, DisplaysContents) else []
    return [draw(graph, folder / f"graph-{number}.png") for number, graph in enumerate(graphs)]


def draw(graph: Graph, path: Path) -> Path:
    """Draw a graph from left to right, nodes by their distance from the roots; edges with more weight are darker."""
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
    """Return each node's distance from the roots (without roots, from the first node)."""
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
    """Return a table of recalled entries, the most frequent first: episodes that recalled them, share in which a
    command of the entry was executed afterwards (`followed`), and success."""
    seen: dict[str, list[tuple[bool, bool]]] = defaultdict(list)
    for episode in episodes:
        for name, followed in _uses(episode, memory).items():
            seen[name].append((followed, succeeded(episode)))
    by_frequency = sorted(seen.items(), key=lambda one: (-len(one[1]), one[0]))
    rows = tuple(
        (
            name,
            str(len(uses)),
            percent(fmean(followed for followed, _ in uses)),
            percent(fmean(success for _, success in uses)),
        )
        for name, uses in by_frequency
    )
    return Table("recalled", ("what", "episodes", "followed %", "success %"), rows)


def _uses(episode: Episode, memory: MemorySystem) -> dict[str, bool]:
    """Return for each entry recalled in an episode (for entries generated for a step: each section) whether it was
    followed."""
    uses: dict[str, bool] = {}
    actions: Sequence[str] = [step.action for step in episode.steps]
    for t in range(len(episode.steps)):
        for entry in episode.memory_at(t, memory):
            name = entry.id.rpartition("/")[0] if entry.id in episode.made else entry.id
            if not uses.get(name):
                uses[name] = any(action and action in compact_text(entry.text) for action in actions[t:])
    return uses
