"""The driver of a run on Ray, beside very many workers: how many episodes a second it takes in, how much memory it
needs, and how long workers wait for it.

    python -m benchmarks.cluster_driver --workers 100 1000 --episodes 100000

The workers are simulated, and nothing else: `runtime.crew.Crew` and the crash-safe record on disk are those of a real
run, lines have `--chars` characters. Ray is not there: what its own calls cost is not in these figures
(`benchmarks.cluster_overhead` has it). Time is simulated, too: workers answer when the times that are drawn for them
are over, and the clock goes on by what the driver has really taken (its CPU time, and with `--disk` what it waits for
the disk, which on a busy machine is waiting for a core, too), in which nobody gets another unit. Times of episodes are
drawn, with replacement, from those of a record (`--times RUN/episodes.jsonl`: what its steps took, of all roles), or
else log-normal: `--median` seconds, and `--spread` (the standard deviation of the logarithm; 0.6 has one in a hundred
take four times the median).
"""

from __future__ import annotations

import argparse
import heapq
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median, pstdev
from typing import Any

from agent.records import read_episodes
from runtime.cluster import RaySettings
from runtime.crew import Answered, Crew, Event, Finished, Line, Ready, Unit, units_of
from runtime.store import JsonLines, to_json

WORDS = "You are in the middle of a room. Looking quickly around you, you see a cabinet 1, a drawer 2 and a fridge 1. "


@dataclass(frozen=True, slots=True)
class Drawn:
    """Times of a simulated worker, in seconds: of an episode (log-normal, or one of those that were measured), and
    until it is there."""

    median: float
    spread: float
    measured: Sequence[float] = ()
    start: float = 30.0

    @staticmethod
    def of_record(path: Path) -> Drawn:
        """Draw from what the episodes of a run took."""
        times = [sum(sum(step.seconds.values()) for step in episode.steps) for episode in read_episodes(path, False)]
        return Drawn(median(times), pstdev([math.log(took) for took in times if took > 0]), times)

    def episode(self, chance: Random) -> float:
        return chance.choice(self.measured) if self.measured else self.median * math.exp(chance.gauss(0, self.spread))


class SimulatedFleet:
    """Workers that do nothing but take the time that is drawn for them (`runtime.crew.Fleet`). Their clock is ours."""

    def __init__(self, workers: int, drawn: Drawn, line: Callable[[str], str], seed: int = 0) -> None:
        self.workers, self.drawn, self.line, self.chance = workers, drawn, line, Random(seed)
        self.now, self.waited, self.worked = 0.0, 0.0, 0.0  # simulated seconds: the clock, and those of all workers
        self._hired, self._events = 0, list[tuple[float, int, int, Event]]()
        self._free: dict[int, float] = {}  # since when
        self._turns, self._cpu = 0, time.process_time()

    def room(self) -> int:
        return self.workers - 1  # one more is asked for

    def hire(self) -> int:
        self._hired += 1
        self._at(self.now + self.drawn.start * self.chance.uniform(0.5, 1.5), self._hired, Ready())
        return self._hired

    def begin(self, handle: int, unit: Unit) -> None:
        at = self.pass_time()
        self.waited += at - self._free.pop(handle)
        for key in unit.items:
            took = self.drawn.episode(self.chance)
            at, self.worked = at + took, self.worked + took
            self._at(at, handle, Answered([(key, "")]))
        self._at(at, handle, Finished())

    def wait(self, timeout_s: float) -> Iterator[tuple[int, Event]]:
        now = self.pass_time()
        if self._events and self._events[0][0] > now:  # the driver has nothing to do until then
            self.now = self._events[0][0]
        due: list[tuple[float, int, Event]] = []
        while self._events and self._events[0][0] <= self.now:
            at, _, handle, event = heapq.heappop(self._events)
            due.append((at, handle, event))
        for at, handle, event in due:
            if isinstance(event, Answered):
                event = Answered([(key, self.line(key)) for key, _ in event.lines])
            else:
                self._free[handle] = at
            yield handle, event
        self._cpu = self._cpu if due else time.process_time()

    def dismiss(self, handle: int) -> None:
        pass

    def pass_time(self, more: float = 0.0) -> float:
        """Have the clock go on by what the driver has taken since, and `more`."""
        cpu = time.process_time()
        self.now, self._cpu = self.now + cpu - self._cpu + more, cpu
        return self.now

    def _at(self, at: float, handle: int, event: Event) -> None:
        self._turns += 1
        heapq.heappush(self._events, (at, self._turns, handle, event))


def drive(
    workers: int, episodes: int, drawn: Drawn, size: int, chars: int, counts_disk: bool, folder: Path
) -> dict[str, Any]:
    """Have simulated workers play; say what the driver took. `size`: episodes of a unit; `chars`: of a line."""
    text = (WORDS * (chars // len(WORDS) + 1))[:chars]
    fleet = SimulatedFleet(workers, drawn, lambda key: f'{{"task_id": "{key}", "steps": [], "text": "{text}"}}')
    store, memory = JsonLines(folder / f"{workers}.jsonl"), list[tuple[int, int]]()
    units = list(units_of(None, {f"{number:06}": number for number in range(episodes)}, size))
    written, appends, disk, cpu = 0, 0, 0.0, time.process_time()

    def record(lines: Sequence[Line]) -> None:
        nonlocal written, appends, disk
        before = time.perf_counter(), time.process_time()
        store.append_lines(*(line for _, line in lines))
        waits = max(0.0, time.perf_counter() - before[0] - (time.process_time() - before[1]))
        appends, disk = appends + 1, disk + waits
        fleet.pass_time(waits if counts_disk else 0.0)
        if (written := written + len(lines)) * 10 // episodes > len(memory):
            memory.append((written, _resident()))

    with Crew(fleet, RaySettings(workers=workers)) as crew:
        crew.play(units, record, lambda *_: "")
    cpu = time.process_time() - cpu
    busy = cpu + (disk if counts_disk else 0.0)
    store.path.unlink()
    return {
        "workers": workers, "episodes": episodes, "unit": size, "chars": chars,
        "median_s": round(drawn.median, 3), "spread": round(drawn.spread, 3), "measured_episodes": len(drawn.measured),
        "driver_episodes_per_s": round(episodes / busy, 1), "driver_cpu_s": round(cpu, 2),
        "disk_s": round(disk, 2), "disk_counts": counts_disk, "appends": appends,
        "played_per_s": round(episodes / fleet.now, 1), "driver_busy": round(busy / fleet.now, 4),
        "workers_wait": round(fleet.waited / (fleet.waited + fleet.worked), 5),
        "mib": [(n, round(kib / 1024, 1)) for n, kib in memory],
    }  # fmt: skip


def _resident() -> int:
    """Return the resident memory of this process, KiB (Linux)."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmRSS:"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1000])
    parser.add_argument("--episodes", type=int, default=100_000)
    parser.add_argument("--median", type=float, default=20.0)
    parser.add_argument("--spread", type=float, default=0.6)
    parser.add_argument("--times", type=Path, help="episodes.jsonl of a run, from whose times those here are drawn")
    parser.add_argument("--unit", type=int, default=8)
    parser.add_argument("--chars", type=int, default=4_000)
    parser.add_argument("--disk", action="store_true", help="count what the driver waits for the disk")
    a = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        drawn = Drawn.of_record(a.times) if a.times else Drawn(a.median, a.spread)
        for workers in a.workers:
            print(to_json(drive(workers, a.episodes, drawn, a.unit, a.chars, a.disk, Path(folder))), flush=True)


if __name__ == "__main__":
    main()
