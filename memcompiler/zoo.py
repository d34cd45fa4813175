"""Commands around the shipped small models: their gates, and the recipes that train them."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer

from memcompiler.options import command_group

if TYPE_CHECKING:
    from zoo.gates import GateResult

zoo_app = command_group("Reproduce and test the tiny models that the repository ships.")
World = Annotated[Literal["household", "alfworld"], typer.Option(help="Generated homes, or ALFWorld's real games.")]
Pair = Annotated[
    Literal["household", "alfworld", "alfworld-frozen"],
    typer.Option("--world", help="Generated homes, real games, or real games for a frozen public executor."),
]
Work = Annotated[Path, typer.Option(help="Folder of stages and checkpoints; recipes of one world may share it.")]
Out = Annotated[Path | None, typer.Option(help="Model folder to write (default: zoo/WORLD/NAME).", show_default=False)]
Threads = Annotated[int, typer.Option(min=1, help="CPU threads; another number gives other weights.")]
Engine = Annotated[
    Literal["hf", "vllm"], typer.Option(help="What plays games with the compiler (alfworld-frozen); vllm is faster.")
]
WORK = Path("out/zoo/work")


@zoo_app.command("gate")
def zoo_gate(
    model: Annotated[str, typer.Option(help="Compiler base to test (household).")] = "zoo/household/compiler",
    scenes: Annotated[int, typer.Option(min=1, help="Number of held-out scenes (household).")] = 64,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the scenes (household).")] = 1,
    pictures: Annotated[int, typer.Option(min=0, help="Pictures per entry to ask about (household).")] = 0,
    world: Pair = "household",
    executor: Annotated[str | None, typer.Option(help="Executor to test, or `script`, its teacher (alfworld).")] = None,
    compiler: Annotated[str | None, typer.Option(help="Compiler or compiler base to test (real games).")] = None,
    checkpoint: Annotated[str | None, typer.Option(help="Its checkpoint of SFT or GRPO (real games).")] = None,
    split: Annotated[str, typer.Option(help="Split to test on (real games).")] = "valid_seen",
    limit: Annotated[int | None, typer.Option(min=1, help="Number of games (real games; default: all).")] = None,
    work: Work = WORK,
    engine: Engine = "hf",
) -> None:
    """Test the skills of shipped models that all results rest on; exit 1 if one fails.

    household: the compiler base names the places in entries and pictures. alfworld: an executor searches alone, follows
    guidance and reads pasted memory; a compiler names the right place, omits needless guidance, skips excluded places
    and cites existing entries. alfworld-frozen: a compiler says the command that its teacher says, is silent where
    memory holds nothing of the kind, and plays with an executor that always obeys.
    """
    from configs.models import model_path

    if world == "household":
        from zoo.household.gate import gate

        _print_and_exit(gate(model_path(model), scenes, seed, pictures))

    from runtime.progress import disable_library_progress_bars
    from zoo.alfworld.gate import SCRIPT, compiler_gates, executor_gates

    disable_library_progress_bars()
    work = work / world / "gate"
    results: list[GateResult] = []
    if world == "alfworld-frozen":
        from zoo.alfworld.command_gate import command_gates

        if executor or not compiler:
            raise typer.BadParameter("alfworld-frozen tests --compiler FOLDER: its executor is a public model")
        _print_and_exit(
            command_gates(model_path(compiler), checkpoint, work=work, split=split, limit=limit, engine=engine)
        )
    if executor:
        results += executor_gates(executor if executor == SCRIPT else model_path(executor), work, split, limit)
    if compiler:
        results += compiler_gates(model_path(compiler), checkpoint, work=work, split=split, limit=limit)
    if not results:
        raise typer.BadParameter("name what to test: --executor FOLDER, --compiler FOLDER, or both")
    _print_and_exit(results)


def _print_and_exit(results: "Sequence[GateResult]") -> NoReturn:
    for result in results:
        typer.echo(result)
    raise typer.Exit(0 if all(result.passed for result in results) else 1)


@zoo_app.command("compiler")
def zoo_compiler(
    out: Out = None,
    work: Work = WORK,
    seed: int = 0,
    world: Pair = "household",
    threads: Threads = 1,
    engine: Engine = "hf",
) -> None:
    """Train a small compiler base on CPU; write it and RECORD.json. alfworld-frozen begins with alfworld's base."""
    options = {"engine": engine} if world == "alfworld-frozen" else {}
    _train("compiler", world, out=out, work=work, seed=seed, threads=threads, **options)


@zoo_app.command("executor")
def zoo_executor(
    out: Out = None, work: Work = WORK, seed: int = 0, world: World = "household", threads: Threads = 1
) -> None:
    """Train a small executor from scratch on CPU; write the model and RECORD.json."""
    _train("executor", world, out=out, work=work, seed=seed, threads=threads)


def _train(name: str, world: str, out: Path | None, work: Path, seed: int, threads: int, **options: str) -> None:
    """Run a recipe; it reproduces the same weights with the same number of threads."""
    import torch

    from configs.run_folder import output_folder
    from runtime.lock import FolderLock
    from runtime.progress import disable_library_progress_bars

    disable_library_progress_bars()
    torch.set_num_threads(threads)
    if world == "household":
        from zoo.household import recipes
    elif world == "alfworld":
        from zoo.alfworld import recipes
    else:
        from zoo.alfworld import commands as recipes
    work = work if world == "household" else work / world
    recipe = getattr(recipes, f"train_{name}")
    out, work = out or Path("zoo") / world / name, work / f"seed-{seed}"
    with (
        FolderLock(work, f"memcompiler zoo {name}"),
        output_folder(out, f"zoo {name}", ("RECORD.json", "config.json", "model.safetensors"), "sha256"),
    ):
        recipe(out, work, seed, **options)
