"""Targets that read texts: endpoint answers, the emission language, Brief States, prompts and actions."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from random import Random
from typing import Any

from agent.disclosure import disclose
from compiler import brief_state
from compiler.brief_state import BriefState, parse_brief_state, render_brief_state
from compiler.language import Emission, parse, render
from compiler.prompt import compiler_parts
from compiler.records import CompileRequest
from data_gen.endpoint_teacher import read_emission
from envs.base import EnvironmentFailure, Task
from envs.command_reader import AgentState
from envs.household.environment import HouseholdEnvironment
from envs.registry import BUILT_IN, find
from eval.qa.metrics import abstains, bleu_1, locomo_score, set_f1
from executor.program import ProgramExecutor, read_plan
from executor.prompt import ExecutorRequest, MemoryBlock, executor_text
from executor.records import Grounding, ground
from executor.scripted import ScriptedPlanner
from lm import responses
from lm.answer_cache import Answer
from lm.endpoint import user_message
from memory.brainmem.agent import read_experience
from memory.brainmem.episodic import state_summary
from memory.entry import MemoryEntry, Provenance
from memory.karma.graph import read_graph
from memory.karma.units import read_states, read_unit
from memory.protocol import Record
from memory.words import search_terms
from tests.fuzz.inputs import MARKS, RARE, json_text, line, mutated, pick, text, texts, value
from tests.fuzz.target import Target, expect

ADMISSIBLE = (
    "go to cabinet 2",
    "take mug 1 from shelf 1",
    "look",
    "open drawer 3",
    "inventory",
    "move mug 1 to desk 1",
    "examine mug 1",
    "examine desk 1",
    "use desklamp 1",
    "heat mug 1 with microwave 1",
)
REASONING = "SECRET REASONING"


# -- endpoint answers --


def make_answer(rng: Random) -> tuple[str, str]:
    """Draw a response body, intact or damaged, and its text if it is intact."""
    sent = text(rng) or "look"
    content: Any = pick(
        rng, (sent, f"<think>{REASONING}</think>{sent}", [{"type": "text", "text": sent}], None, "", value(rng))
    )
    call = {"tool_calls": [{"function": {"name": "act", "arguments": sent}}]}
    more = pick(rng, ({}, {"reasoning_content": REASONING}, {"reasoning": REASONING}, {"refusal": sent}, call))
    message = {"role": "assistant", "content": content, **more}
    reason = pick(rng, ("stop", "length", "content_filter", "tool_calls", None))
    choice = {"index": 0, "message": message, "finish_reason": reason}
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "completion_tokens_details": {"reasoning_tokens": 1}}
    body = {"id": "x", "object": "chat.completion", "choices": [choice] * rng.randint(1, 2), "usage": usage}
    whole = content == sent and not {"refusal", "tool_calls"} & message.keys() and rng.random() < 0.5
    return (json.dumps(body), sent) if whole else (json_text(rng, mutated(rng, body)), "")


def check_answer(given: tuple[str, str]) -> None:
    body, sent = given
    answer = responses.parse_answer(body, [user_message("look", b"png")])
    expect(isinstance(answer.text, str) and answer.text.encode(), "an answer is not text")
    expect(REASONING not in answer.text, "reasoning is part of an answer")
    expect(min(answer.tokens_in, answer.tokens_out) >= 0, "a count of tokens is negative")
    plain = sent.isascii() and not any(mark in sent for mark in "<`")
    expect(not sent or not plain or answer.text.split() == sent.split(), "an answer reads back as another text")
    for read in (read_emission, lambda answer: read_emission(Answer(answer.text, 0, 0, True))):
        check_emission(read(answer).emission)


def make_vectors(rng: Random) -> tuple[str, int]:
    n = rng.randint(0, 3)
    rows = [
        {"index": i, "embedding": [rng.choice((0.5, -1, 1e30, 3)) for _ in range(2)]} for i in rng.sample(range(n), n)
    ]
    return json_text(rng, mutated(rng, {"data": rows, "usage": {"prompt_tokens": 3}}, 2)), n or 1


def check_vectors(given: tuple[str, int]) -> None:
    body, n = given
    vectors, tokens = responses.parse_vectors(body, n, 5)
    expect(len(vectors) == n and len(set(map(len, vectors))) == 1 and len(vectors[0]) > 0, "not a vector for each text")
    expect(tokens >= 0, "a count of tokens is negative")


def make_action(rng: Random) -> tuple[str, tuple[str, ...] | None, str]:
    """Draw an answer, the admissible commands, and the intended one ("" for any)."""
    command = pick(rng, ADMISSIBLE)
    sent = pick(rng, (command, command.upper(), command.replace(" ", "  ")))
    if rng.random() < 0.3:
        return pick(rng, (sent, f" {sent}\n", f"{sent}.", f"\n\n{sent}", f"{sent}\nit is there")), ADMISSIBLE, command
    return text(rng), pick(rng, (ADMISSIBLE, None, (), texts(rng))), ""


def check_action(given: tuple[str, tuple[str, ...] | None, str]) -> None:
    answer, admissible, meant = given
    action, how = ground(answer, admissible)
    known = action in (admissible or ())
    expect(known or how in (Grounding.FREE, Grounding.FAILED), "an action is not admissible")
    expect(known or len(action.splitlines()) < 2, "an action has two lines")
    expect(not meant or action == meant, "another command was intended")


READERS: tuple[Callable[[str], Any], ...] = (
    read_plan,
    read_experience,
    read_graph,
    read_unit,
    lambda answer: read_states(answer, ["mug 1"]),
    search_terms,
    abstains,
    lambda answer: set_f1(answer, "mug") + bleu_1(answer, "mug") + locomo_score(answer, "mug, desk", "multi-hop"),
)
ANSWERS = {
    "program": ['GoToObject(robot, "desk 1")', "PickupObject(robot, mug)"],
    "areas": ["area 1"],
    "success_patterns": ["go to desk 1"],
    "failure_causes": [],
    "learning_insights": ["x"],
    "recommendations": [],
}


def make_structured(rng: Random) -> str:
    if rng.random() < 0.4:
        return text(rng, 12)
    return pick(rng, ("{}", "```json\n{}\n```", "Here: {} so.")).replace("{}", json_text(rng, mutated(rng, ANSWERS)))


def check_structured(answer: str) -> None:
    for read in READERS:
        read(answer)


# -- the emission language and the Brief State --

OPERATIONS = {"+": brief_state.Create, "~": brief_state.Update, "-": brief_state.Delete, "^": brief_state.Fold}


def emission(guidance: str, reason: str, ops: Sequence[Sequence[str]]) -> Emission:
    operations = [OPERATIONS[sigil](*fields[: 1 if sigil == "^" else 2]) for sigil, *fields in ops]
    return Emission(guidance, reason, tuple(operations))


def make_emission(rng: Random) -> tuple[str, str, list[list[str]]]:
    ops = [[rng.choice("+~-^"), text(rng, 3), text(rng, 3)] for _ in range(rng.randint(0, 3))]
    return text(rng, 4), text(rng, 4), ops


def check_emission(emission: Emission) -> None:
    again = parse(render(emission))
    expect((again.emission, again.error) == (emission, None), "an emission reads back as another")


def make_lines(rng: Random) -> str:
    lines = (pick(rng, ("> ", "+ ", "~ ", "- ", "^ ", "", ".")) + text(rng, 4) for _ in range(rng.randint(0, 5)))
    return pick(rng, ("\n", "\n", "\n", "\r\n", *RARE)).join(lines)


def check_lines(given: str) -> None:
    parsed = parse(given)
    expect(parsed.error is None or parsed.emission == Emission(), "a failed emission has content")
    check_emission(parsed.emission)


def make_state(rng: Random) -> tuple[str, list[list[str]]]:
    field = lambda: pick(rng, (text(rng, 3), line(rng), "plan", "mug 1", "a; b; c"))
    return text(rng, 4), [[rng.choice("+++~-^"), field(), field()] for _ in range(rng.randint(0, 8))]


def check_state(given: tuple[str, list[list[str]]]) -> None:
    goal, ops = given
    state = BriefState(goal)
    for op in ops:
        with suppress(ValueError):  # an operation with an empty field is invalid
            state, _ = brief_state.apply_ops(emission("", "", [op]).ops, state)
    written = render_brief_state(state)
    expect(len(written.splitlines()) <= 5, "a text became a line of the Brief State")
    expect(parse_brief_state(written) == state or " ".join(goal.split()) != goal, "a Brief State reads back as another")
    check_state_text(written)


def make_state_text(rng: Random) -> str:
    names = pick(rng, (("goal", "done", "now", "next", "note"), MARKS))
    lines = (pick(rng, names) + pick(rng, (": ", ":", "")) + text(rng, 4) for _ in range(rng.randint(0, 5)))
    return pick(rng, ("\n", "\n", *RARE)).join(lines)


def check_state_text(given: str) -> None:
    written = render_brief_state(parse_brief_state(given))
    expect(render_brief_state(parse_brief_state(written)) == written, "a Brief State is rendered differently")


# -- prompts and rule-based readers --


def make_step(rng: Random) -> dict[str, Any]:
    return {
        "goal": text(rng),
        "observation": text(rng, 10),
        "memory": texts(rng, 3),
        "history": texts(rng),
        "admissible": pick(rng, (ADMISSIBLE, texts(rng), ())),
        "guidance": text(rng, 3),
        "reason": text(rng, 2),
    }


def compile_request(given: Mapping[str, Any]) -> CompileRequest:
    origin = Provenance("t", "home 1", "", "train", True)
    memory = tuple(MemoryEntry(f"e{i}", text, origin) for i, text in enumerate(given["memory"]))
    return CompileRequest(
        given["goal"], memory, BriefState(" ".join(given["goal"].split())), given["observation"], None, given["history"]
    )


def executor_request(given: Mapping[str, Any]) -> ExecutorRequest:
    block = MemoryBlock("\n".join(given["memory"]), "", given["guidance"], given["reason"])
    return ExecutorRequest(given["goal"], block, given["history"], given["observation"], given["admissible"])


def check_step(given: Mapping[str, Any]) -> None:
    """Run every rule-based executor, reader and discloser on a step."""
    check_emission(disclose(compile_request(given)))
    request = executor_request(given)
    for executor in (ScriptedPlanner(), ProgramExecutor()):
        [action] = executor.act([request])
        expect(isinstance(action.action, str), "an action is not text")
    for name in BUILT_IN:
        reader, actions, scene = find(name).reader, given["history"], given["goal"]
        plan = [*actions, *given["admissible"]]
        outputs = [
            reader.rationale(scene, actions),
            *reader.subgoals(plan, given["goal"], frozenset(plan)),
            *reader.steps(plan),
        ]
        outputs += [
            reader.place_without(outputs[0], given["observation"]),
            *reader.similar_places(outputs[0] or "x 1", given["observation"]),
        ]
        outputs += [reader.sentence(scene, fact.need, fact.place) for fact in reader.facts(plan)]
        expect(all(isinstance(each, str) for each in outputs), "a command reader returns a non-text")
        for read in (reader.searched, reader.need, find(name).views):
            read(plan)
        reader.here(given["observation"], actions)
        now, (first, *_) = AgentState().after(reader.look(given["observation"])), [*plan, ""]
        step = Record(0, given["observation"], first, given["observation"], bool(plan[1:2]))
        state_summary(given["observation"], now.after(reader.read(now, step)), reader)


@cache
def encoder() -> Any:
    from transformers import AutoTokenizer

    from configs.models import model_path
    from lm.prompt import PromptEncoder

    return PromptEncoder(AutoTokenizer.from_pretrained(model_path("zoo/household/executor")))


def check_prompt(given: Mapping[str, Any]) -> None:
    """Expect that marks in data stay text: no reserved token and no additional turn."""
    from lm.prompt import PromptPart

    parts = [PromptPart(executor_text(executor_request(given), ""))]
    plain, held = encoder().encode([PromptPart("look")], "Act.").ids, encoder().encode(parts, "Act.").ids
    special = {encoder().end_id, encoder().memory_id, *encoder().suppressed}
    count = lambda ids: sum(id in special for id in ids)
    expect(count(held) == count(plain), "text became a reserved token")
    compiler_parts(compile_request(given), images=False)


# -- environments --


@cache
def household() -> tuple[HouseholdEnvironment, list[Task]]:
    env = HouseholdEnvironment(scenes={"train": 2}, images=False)
    return env, env.tasks("train")


def make_play(rng: Random) -> list[Any]:
    return [
        rng.randrange(8),
        *(text(rng, 3) if rng.random() < 0.5 else rng.randrange(99) for _ in range(rng.randint(1, 6))),
    ]


def check_play(given: list[Any]) -> None:
    """Play actions: texts, or indices of admissible commands."""
    env, tasks = household()
    seen = env.reset(tasks[given[0] % len(tasks)])
    for action in given[1:]:
        commands = seen.admissible or ("look",)
        step = env.step(action if isinstance(action, str) else commands[action % len(commands)])
        seen = step.observation
        expect(0 <= step.progress <= 1 and seen.text and (step.success == step.done), "a malformed step")
        if step.done:
            return


def make_gymnasium(rng: Random) -> dict[str, Any]:
    mask = lambda: pick(rng, ([1, 0, 1], [True], None, text(rng)))
    seen = lambda: pick(rng, (text(rng), {"text": text(rng), "goal": text(rng), "mask": mask()}, value(rng)))
    valid = {"mask": [0, 1, 1], "share": 0.5, "won": False}
    info = lambda: pick(rng, (valid, mutated(rng, valid)))
    named = {"goal": "goal", "admissible": "mask", "progress": "share", "success": "won", "image": "goal"}
    keys = {key: name for key, name in named.items() if rng.random() < 0.4}
    ends = lambda: (pick(rng, (0.0, 1.0, value(rng, 0))), rng.random() < 0.2, rng.random() < 0.1)
    steps = [(seen(), *ends(), info()) for _ in range(3)]
    return {"keys": keys, "start": pick(rng, (0, 1, -2)), "first": (seen(), info()), "steps": steps}


def check_gymnasium(given: Mapping[str, Any]) -> None:
    import gymnasium

    from envs.gymnasium.environment import GymnasiumTextEnvironment

    class ScriptedEnv(gymnasium.Env):
        action_space = gymnasium.spaces.Discrete(3, start=given["start"])

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            self.left = list(given["steps"])
            return given["first"]

        def step(self, action: Any) -> Any:
            assert self.action_space.contains(action), "SPACE"
            return self.left.pop(0)

    names = ("pull lever one", "pull lever two", "pull lever three")
    settings = {"id": "made", "splits": {"a": {"seeds": (1,)}}, "goal": "win", "actions": names, "keys": given["keys"]}
    env = GymnasiumTextEnvironment(settings, ScriptedEnv)
    try:
        env.reset(env.tasks("a")[0])
        for name in names:
            step = env.step(name)
            whole = 0 <= step.progress <= 1 and isinstance(step.success, bool) and isinstance(step.done, bool)
            expect(whole, "a malformed step")
            expect(set(step.observation.admissible or ()) <= set(names), "an admissible name that is no action")
            if step.done:
                break
    except EnvironmentFailure as error:
        expect("SPACE" not in str(error), "an action outside of the space reached the environment")


TARGETS = (
    Target("endpoint.answer", make_answer, check_answer, (responses.RequestFault,), 3),
    Target("endpoint.vectors", make_vectors, check_vectors, (responses.RequestFault,)),
    Target("endpoint.action", make_action, check_action, (), 2),
    Target("endpoint.structured", make_structured, check_structured),
    Target("language.emission", make_emission, lambda given: check_emission(emission(*given)), (ValueError,), 3),
    Target("language.text", make_lines, check_lines, (), 3),
    Target("state.operations", make_state, check_state, (), 3),
    Target("state.text", make_state_text, check_state_text, (ValueError,), 2),
    Target("step.rules", make_step, check_step, (), 0.5),
    Target("step.prompt", lambda rng: (encoder(), make_step(rng))[1], check_prompt),
    Target("environment.household", make_play, check_play, (), 1),
    *([Target("environment.gymnasium", make_gymnasium, check_gymnasium, (ValueError,))] * bool(find_spec("gymnasium"))),
)
