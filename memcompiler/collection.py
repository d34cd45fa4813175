"""`memcompiler collect`: collects a split's memory bank and SFT rows into OUT/bank and OUT/rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from configs.collect import CollectConfig
from configs.load import ConfigError
from configs.run_folder import RunFolder
from data_gen.collect import (
    EPISODES,
    CollectionPlan,
    Teacher,
    expert_actor,
    expert_teacher_name,
    load_collection_teacher,
    open_record,
    plan_collection,
    play_collection,
    write_rows,
)
from data_gen.endpoint_teacher import EndpointTeacher, load_actor
from data_gen.ray_collect import play_on_ray
from envs.registry import Environments, compiler_instructions_for, find
from executor.records import Executor
from lm.endpoint import Endpoint
from runtime import cluster
from runtime.progress import disable_library_progress_bars

console = Console(width=120)
RESPONSES = "responses.sqlite"  # cached answers of endpoints

# Settings that a resumed collection may change: how endpoints are called, not the content of requests.
MAY_CHANGE_ON_RESUME = (
    "episode_attempts",
    *cluster.MAY_CHANGE_ON_RESUME,
    *(
        f"{block}.{name}"
        for block in ("api", "executor.api", "memory.api")
        for name in (
            "base_url",
            "key_env",
            "price_in",
            "price_out",
            "budget",
            "budget_tokens",
            "rpm",
            "tpm",
            "concurrency",
            "timeout_s",
            "retries",
            "backoff_s",
        )
    ),
)


def run_collect(config: CollectConfig, out: Path, on_exists: str = "resume") -> None:
    """Collect bank and rows of a split into OUT, or resume.

    Raises:
        ConfigError: the settings need an expert and the environment has none.
    """
    if config.acting_role == "expert" and not find(config.env.name).expert:
        raise ConfigError(
            f"{config.env.name} has no expert to teach or act: use an endpoint for both (teacher=endpoint "
            "actor=teacher api.model=NAME, docs/guides/endpoints.md), or an executor as actor (actor=executor)"
        )
    if config.cluster == "ray":
        cluster.require_ray()
    with RunFolder.create(out, config, on_exists=on_exists, ignore=MAY_CHANGE_ON_RESUME) as run:
        _collect(config, run)


def _collect(config: CollectConfig, run: RunFolder) -> None:
    out = run.path
    (record := open_record(out / EPISODES, config.episode_attempts)).load()
    if (out / "collect.json").exists() and not record.due:
        console.print(f"{out} is complete already: {(out / 'collect.json').read_text()}")
        return
    facts: dict[str, Any] = {"teacher": expert_teacher_name(config)}
    with Environments(config.env) as envs:
        collection = plan_collection(config, envs, run)
        (out / "collect.json").unlink(missing_ok=True)  # of the previous session: broken episodes are played again
        if config.cluster == "ray":
            play_on_ray(config, collection)
        else:
            facts |= _play_here(config, collection, envs, run)
    disable_library_progress_bars()
    summary, broke = write_rows(config, collection, run, facts)
    console.print(f"  success: {summary['success_filter']}")
    console.print(
        f"  {summary['bank_entries']} memory entries, {summary['rows']} rows from "
        f"{summary['successes']} of {summary['episodes']} teacher episodes"
    )
    if broke:
        console.print(f"  {broke}", markup=False, highlight=False, soft_wrap=True)


def _play_here(config: CollectConfig, of: CollectionPlan, envs: Environments, run: RunFolder) -> dict[str, Any]:
    """Play in this process; return teacher, actor and the endpoints' accounts."""
    teacher, actor, endpoints = _load_models(config, run.path / RESPONSES)
    try:
        play_collection(of, envs.lease, teacher, actor)
    finally:
        account = _account(run, endpoints) if endpoints else {}
    return {"teacher": config.api.model, "actor": config.acting_role, "endpoints": account} if account else {}


def _load_models(config: CollectConfig, cache: Path) -> tuple[Teacher, Executor, Mapping[str, Endpoint]]:
    """Load teacher and actor; also return their endpoints by role."""
    if config.teacher == "expert":
        return load_collection_teacher(config), expert_actor(config), {}
    endpoint = Endpoint(config.api, cache)
    actor, endpoints = load_actor(config, endpoint, cache)
    teacher = EndpointTeacher(
        endpoint,
        attempts=config.attempts,
        max_new_tokens=config.max_new_tokens,
        environment=compiler_instructions_for(config.env),
        level=config.teacher_level,
        history=config.history,
    )
    return teacher, actor, endpoints


def _account(run: RunFolder, endpoints: Mapping[str, Endpoint]) -> dict[str, Any]:
    """Write the endpoints' requests and costs to endpoints.json, also if the run stops."""
    accounts = {name: endpoint.account() for name, endpoint in endpoints.items()}
    run.write_json("endpoints.json", accounts)
    for name, account in accounts.items():
        console.print(f"  {name}: {account['requests']} requests, {account['price']:.4f} spent")
    return accounts
