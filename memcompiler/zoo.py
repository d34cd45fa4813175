"""The small models that ship: their gates, and the recipes that make them."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer

from memcompiler.options import command_group

if TYPE_CHECKING:
    from zoo.gates import Share

zoo_app = command_group("Reproduce and test the tiny models that the repository ships.")
World = Annotated[Literal["household", "alfworld"], typer.Option(help="Generated homes, or ALFWorld's real games.")]
Work = Annotated[Path, typer.Option(help="Stages and their checkpoints; the recipes of a world may share it.")]
MadeIn = Annotated[Path | None, typer.Option(help="The model's folder (default: zoo/WORLD/NAME).", show_default=False)]
Threads = Annotated[int, typer.Option(min=1, help="CPU threads; another number gives other weights.")]
WORK = Path("out/zoo/work")


@zoo_app.command("gate")
def zoo_gate(
    model: Annotated[str, typer.Option(help="Compiler base to test (household).")] = "zoo/household/compiler",
    scenes: Annotated[int, typer.Option(min=1, help="Held-out scenes (household).")] = 64,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the scenes (household).")] = 1,
    pictures: Annotated[int, typer.Option(min=0, help="Pictures an entry keeps, which are asked for (household).")] = 0,
    world: World = "household",
    executor: Annotated[str | None, typer.Option(help="Executor to test, or `script`, its teacher (alfworld).")] = None,
    compiler: Annotated[str | None, typer.Option(help="Compiler or compiler base to test (alfworld).")] = None,
    checkpoint: Annotated[str | None, typer.Option(help="The compiler's, after SFT or GRPO (alfworld).")] = None,
    split: Annotated[str, typer.Option(help="Games to test on (alfworld).")] = "valid_seen",
    limit: Annotated[int | None, typer.Option(min=1, help="The first so many of them (alfworld).")] = None,
    work: Work = WORK,
) -> None:
    """Test whether shipped models can do what all else rests on; exits 1 where one cannot.

    household: does the compiler base name the places that entries say and pictures mark? alfworld: does an executor
    find its own way, follow guidance and read pasted memory; does a compiler name the right place, keep silent, leave
    out what is ruled out and cite entries that exist?
    """
    from configs.models import model_path

    if world == "alfworld":
        _alfworld_gates(executor, compiler, checkpoint, split, limit, work / world / "gate")
    from zoo.household.gate import gate

    _told(gate(model_path(model), scenes, seed, pictures))


def _alfworld_gates(
    executor: str | None, compiler: str | None, checkpoint: str | None, split: str, limit: int | None, work: Path
) -> NoReturn:
    """Print the gates of what is named, and exit."""
    from configs.models import model_path
    from runtime.progress import quiet
    from zoo.alfworld.gate import SCRIPT, compiler_gates, executor_gates

    quiet()
    named = executor if executor in (None, SCRIPT) else model_path(executor)
    shares = executor_gates(named, work, split, limit) if named else []
    shares += compiler_gates(model_path(compiler), checkpoint, work, split, limit) if compiler else []
    if not shares:
        raise typer.BadParameter("name what to test: --executor FOLDER, --compiler FOLDER, or both")
    _told(shares)


def _told(shares: "Sequence[Share]") -> NoReturn:
    """Print gates, and exit."""
    for share in shares:
        typer.echo(share)
    raise typer.Exit(0 if all(share.passed for share in shares) else 1)


@zoo_app.command("compiler")
def zoo_compiler(
    out: MadeIn = None, work: Work = WORK, seed: int = 0, world: World = "household", threads: Threads = 1
) -> None:
    """Train a small compiler base from nothing on CPU; writes the model and RECORD.json."""
    _make("compiler", world, out, work, seed, threads)


@zoo_app.command("executor")
def zoo_executor(
    out: MadeIn = None, work: Work = WORK, seed: int = 0, world: World = "household", threads: Threads = 1
) -> None:
    """Train a small executor from nothing on CPU; writes the model and RECORD.json."""
    _make("executor", world, out, work, seed, threads)


def _make(name: str, world: str, out: Path | None, work: Path, seed: int, threads: int) -> None:
    """Make a model: its recipe gives the same weights again with as many threads."""
    import torch

    from configs.run_folder import output_folder
    from runtime.lock import FolderLock
    from runtime.progress import quiet

    quiet()
    torch.set_num_threads(threads)
    if world == "household":
        from zoo.household import recipes
    else:
        from zoo.alfworld import recipes

        work = work / world
    recipe = {"compiler": recipes.train_compiler, "executor": recipes.train_executor}[name]
    out, work = out or Path("zoo") / world / name, work / f"seed-{seed}"
    with (
        FolderLock(work, f"memcompiler zoo {name}"),
        output_folder(out, f"zoo {name}", ("RECORD.json", "config.json", "model.safetensors"), "sha256"),
    ):
        recipe(out, work, seed)
