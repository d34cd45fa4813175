"""Agents of other frameworks through the proxy play as the built-in loop does where the prompts are the same.

A chat server on a frozen executor answers them. It writes the messages of each framework as the executor's own chat, so
that every prompt, and hence every action, can be compared with the loop's.
"""

from __future__ import annotations

import importlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the proxy needs the extra serve")
pytest.importorskip("uvicorn", reason="the proxy needs the extra serve")

from agent.deliveries import find
from agent.episode import EpisodeLimits, run_episodes
from agent.records import Episode
from configs.evaluation import EvalConfig
from configs.load import load_config
from configs.proxy import ProxyConfig
from data_gen.experience import open_experience_bank
from data_gen.tasks import episode_specs, select_tasks
from envs.base import Environment, Task
from envs.registry import Environments, executor_instructions_for
from executor.build import load_frozen
from executor.prompt import ExecutorRequest, MemoryBlock, executor_text
from lm.prompt import ChatTurn
from memory.trajectory import goal_with_scene
from proxy.serve import load_proxy
from tests.upstreams import ScriptedUpstream, Sent, completion, listening_proxy

STEPS = 4
ENVIRONMENTS = {
    "household": ["env={name: household, visual_share: 0, scenes: {test: 2}, images: false}", "split=test", "limit=2"],
    "alfworld": ["memory.experience_limit=16", "limit=1"],
}
_CALLED = re.compile(r"'command': (['\"])(.*)\1\}\}\}\]\s*\Z")


@dataclass
class Game:
    """One episode that a framework's tool plays."""

    env: Environment
    task: Task
    views: list[str] = field(default_factory=list)
    actions: list[str] = field(default_factory=list)
    prompts: list[tuple[int, ...]] = field(default_factory=list)
    over: bool = False
    success: bool = False

    def begin(self) -> str:
        seen = self.env.reset(self.task)
        self.commands, self.views = seen.admissible or (), [seen.text]
        return seen.text

    def do(self, command: str) -> str:
        moved = self.env.step(command)
        self.actions.append(command)
        self.views.append(moved.observation.text)
        self.commands, self.success = moved.observation.admissible or (), moved.success
        self.over = moved.success or moved.done or len(self.actions) == STEPS
        return moved.observation.text


class ChatModel:
    """Answers chats with the command that the executor finds likeliest, in the form that a framework expects."""

    def __init__(self, executor: Any, ending: str) -> None:
        self.executor, self.ending, self.game = executor, ending, None

    def __call__(self, sent: Sent) -> bytes:
        assert self.game is not None
        if self.game.over:
            call = self._call("final_answer", {"answer": "done"})
            return completion(call if self.ending == "smolagents" else "done")
        prompt = self.executor.encoder.encode_chat([self._turn(m) for m in sent.messages if m["role"] != "system"])
        [scores] = self.executor.candidate_logprobs([prompt], [self.game.commands])
        self.game.prompts.append(prompt.ids)
        command = self.game.commands[int(scores.argmax())]
        return completion(self._call("do", {"command": command}) if "tools" in sent.json else command)

    def _call(self, name: str, arguments: dict[str, str]) -> dict[str, Any]:
        called = {"name": name, "arguments": json.dumps(arguments)}
        call = {"id": f"c{len(self.game.actions)}", "type": "function", "function": called}
        return {"role": "assistant", "content": None, "tool_calls": [call]}

    def _turn(self, message: dict[str, Any]) -> ChatTurn:
        text = message["content"] or ""
        text = text if isinstance(text, str) else "".join(part["text"] for part in text)
        if message["role"] == "assistant":
            for call in message.get("tool_calls") or ():
                text = json.loads(call["function"]["arguments"])["command"]
            called = _CALLED.search(text)
            return ChatTurn.of("assistant", called[2] if called else text)
        return ChatTurn.of("user", re.sub(r"\A(?:New task:\n|Observation:\n)", "", text))


# -- the agents --------------------------------------------------------------------------------------------------------


def play_openai(url: str, game: Game, view: str) -> None:
    """A loop around the client of `openai`, with a conversation that grows."""
    client = importlib.import_module("openai").OpenAI(base_url=f"{url}/v1", api_key="x")
    messages: list[Any] = [{"role": "user", "content": f"Goal: {goal_of(game)}\n{view}"}]
    while not game.over:
        reply = client.chat.completions.create(model="m", messages=messages).choices[0].message.content
        answer = game.do(reply)
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": answer}]


def play_rebuilt(url: str, game: Game, view: str) -> None:
    """A loop around the client of `openai` that writes one prompt anew at every step."""
    client = importlib.import_module("openai").OpenAI(base_url=f"{url}/v1", api_key="x")
    while not game.over:
        request = ExecutorRequest(
            goal_of(game),
            MemoryBlock(),
            tuple(game.actions),
            game.views[-1],
            first=view if game.actions else "",
            goal_last=True,
        )
        reply = client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": executor_text(request, "")}],
            extra_headers={"X-Memcompiler-Session": game.task.id.replace(" ", "_")[-150:]},
        )
        game.do(reply.choices[0].message.content)


def play_smolagents(url: str, game: Game, view: str) -> None:
    """The tool-calling agent of smolagents."""
    smolagents = importlib.import_module("smolagents")

    @smolagents.tool
    def do(command: str) -> str:
        """Carry out a command.

        Args:
            command: the command.
        """
        return game.do(command)

    model = smolagents.OpenAIServerModel(model_id="m", api_base=f"{url}/v1", api_key="x")
    agent = smolagents.ToolCallingAgent(tools=[do], model=model, max_steps=STEPS + 1, verbosity_level=0)
    agent.run(f"Goal: {goal_of(game)}\n{view}")


def play_langgraph(url: str, game: Game, view: str) -> None:
    """The ReAct agent of LangGraph."""
    tool = importlib.import_module("langchain_core.tools").tool

    @tool
    def do(command: str) -> str:
        """Carry out a command."""
        return game.do(command)

    chat = importlib.import_module("langchain_openai").ChatOpenAI
    model = chat(model="m", base_url=f"{url}/v1", api_key="x", max_retries=0)
    agent = importlib.import_module("langgraph.prebuilt").create_react_agent(model, [do])
    agent.invoke({"messages": [("user", f"Goal: {goal_of(game)}\n{view}")]}, {"recursion_limit": 2 * STEPS + 4})


def goal_of(game: Game) -> str:
    return goal_with_scene(game.task.goal, game.task.scene)


_GOAL, _SCENE = r"\A(?:New task:\n)?Goal: (?:in [^:\n]+: )?([^\n]*)", r"\A(?:New task:\n)?Goal: in ([^:\n]+): "
_VIEW = r"(?s)\A(?:New task:\n|Observation:\n)?(?:Goal: [^\n]*\n)?(.*)\Z"
_TASK = {
    "goal": {"match": _GOAL},
    "scene": {"match": _SCENE},
    "observation": {"roles": ["user", "tool"], "match": _VIEW},
}
AGENTS: dict[str, tuple[Callable[..., None], dict[str, Any], tuple[str, ...]]] = {
    "openai": (play_openai, {"preset": "turns"}, ("openai",)),
    "rebuilt": (play_rebuilt, {"preset": "rebuilt"}, ("openai",)),
    "smolagents": (play_smolagents, {"preset": "smolagents", **_TASK}, ("smolagents",)),
    "langgraph": (play_langgraph, {"preset": "langgraph", **_TASK}, ("langgraph", "langchain_openai")),
}


# -- both ways ---------------------------------------------------------------------------------------------------------


@dataclass
class Material:
    """What the built-in loop and the proxy share: settings, memory, tasks, and the loop's episodes by context."""

    config: EvalConfig
    envs: Environments
    tasks: Sequence[Task]
    executors: dict[str, Any]
    episodes: dict[str, list[Episode]]
    compiler: Any
    bank: Path


@pytest.fixture(scope="module", params=ENVIRONMENTS)
def material(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Material]:
    if request.param == "alfworld" and not os.environ.get("ALFWORLD_DATA"):
        pytest.skip("needs ALFWORLD_DATA")
    work = tmp_path_factory.mktemp(request.param)
    overrides = [*ENVIRONMENTS[request.param], f"max_steps={STEPS}"]
    config = load_config(EvalConfig, "eval/alfworld", overrides)
    with Environments(config.env) as envs:
        tasks, experience = select_tasks(config, envs, config.split or "test")
        bank = open_experience_bank(config, envs, experience, work)
        from eval.model_cache import ModelCache

        models = ModelCache()
        executor = models.executor(config)
        turns = config.executor.model_copy(update={"context": "turns", "first_view": False, "goal_last": False})
        executors = {"rebuilt": executor, "turns": load_frozen(turns, executor_instructions_for(config.env))}
        compiler = models.compiler(config)
        specs = episode_specs(tasks, bank, config.memory.k)
        delivery = find("compiled_text").create(compiler, 0)
        episodes = {
            name: run_episodes(envs.lease, specs, delivery, each, EpisodeLimits(STEPS), concurrency=1)
            for name, each in executors.items()
        }
        yield Material(config, envs, tasks, executors, episodes, compiler, bank.path.resolve())


@pytest.mark.slow
@pytest.mark.parametrize("agent", AGENTS)
def test_an_agent_plays_through_the_proxy_as_the_built_in_loop_does(
    material: Material, agent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play, mapping, packages = AGENTS[agent]
    for package in packages:
        pytest.importorskip(package, reason=f"needs {package}")
    context = "rebuilt" if agent == "rebuilt" else "turns"
    model = ChatModel(material.executors[context], agent)
    with ScriptedUpstream(answer=model) as upstream:
        config = ProxyConfig.model_validate(
            {
                "upstream": {"url": upstream.url},
                "mapping": mapping,
                "format": context,
                "deliver": "compiled_text",
                "compiler": material.config.compiler.model_dump(),
                "memory": {"bank": str(material.bank), "k": material.config.memory.k},
            }
        )
        with listening_proxy(load_proxy(config, tmp_path)) as url:
            for task, episode in zip(material.tasks, material.episodes[context], strict=True):
                game = model.game = Game(material.envs.lease(), task)
                play(url, game, game.begin())
                assert game.actions == [step.action for step in episode.steps]
                assert game.success == episode.success
                assert game.prompts == [step.executor_prompt_ids for step in episode.steps]
    assert any(step.guidance for episode in material.episodes[context] for step in episode.steps)
