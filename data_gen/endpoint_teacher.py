"""The endpoint teacher (paper C.2): a chat model behind an endpoint compiles, and writes rationales.

It reads exactly what its student reads (M, b_t, the last command and o_t), and answers in the emission language.
After an answer that does not parse, or whose operations do not apply, it is prompted again with the reason. After the
last attempt the step is a NOACTION (or keeps the valid operations); its raw text and error are recorded, and it gives
no row (`data_gen.collect.valid_rows`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agent.expert import ExpertExecutor
from agent.records import Episode
from compiler.brief_state import apply_ops, one_line
from compiler.language import Emission, ParseError, ParseResult, parse, render
from compiler.prompt import compiler_instructions, compiler_parts
from compiler.records import Compilation, CompileRequest, History
from configs.collect import CollectConfig
from envs.command_reader import TeacherLevel
from envs.registry import executor_instructions_for
from executor.api import ApiExecutor
from executor.build import executor_view, load_executor
from executor.records import Executor
from lm.answer_cache import Answer
from lm.endpoint import Endpoint, EndpointFailure, user_message
from lm.reply_cleaning import extract_labelled
from lm.responses import Message
from memory.trajectory import png_bytes

COMPILE, RETRY, RATIONALE = "teacher", "teacher, again", "rationale"  # roles in the endpoint's account

STATE = """The state's lines: goal; done, now, next (the plan); note (facts, until updated or deleted). It is the \
agent's only record of the episode besides the line `did`, its last command, which the view answers; and you keep it: \
create `plan` at the first step; create a fact that will matter later (what a searched place holds, which places are \
not searched yet, what is in hand, that something is stuck); update or delete what turned out wrong; fold when a \
subgoal is done. Create only keys that are not there, update and delete only keys that are."""

# What the guidance says, by `teacher_level`.
LEVELS: dict[TeacherLevel, str] = {
    "place": """The guidance is one line, at most a command or two, for the next steps only; its reason cites the \
memory or the fact that makes it apply now. Where the agent does the right thing already, stay silent.

For example, at a first step:
> in home 17 the mug was in cabinet 2 | go to cabinet 2
+ plan: find mug; heat mug; put mug in cabinet
later, on the way:
+ cabinet 1: no mug
and when the mug has been taken:
^ took mug 1 from cabinet 2""",
    "subgoal": """The guidance is one line that says what is to be done now, with the names that are in view or noted \
(find mug in cabinet 2; heat mug 1), as long as it is not done. {rules}

For example, at a first step:
> in home 17 the mug was in cabinet 2 | find mug in cabinet 2
+ plan: find mug; heat mug; put mug in cabinet
and when the mug has been taken:
> in home 17 after take mug came heat mug with microwave | heat mug 1
^ took mug 1 from cabinet 2""",
    "command": """The guidance is the very next command, one only, in the environment's words and with the names that \
are in view or noted, at every step that the memory supports. {rules}

For example, at a first step:
> in home 17 the mug was in cabinet 2 | go to cabinet 2
+ plan: find mug; heat mug; put mug in cabinet
+ unsearched: cabinet 1, cabinet 2, shelf 1, fridge 1
there:
> mug 1 is in view; in home 17 first came take mug | take mug 1 from cabinet 2
- unsearched: cabinet 2
and when the mug has been taken:
> in home 17 after take mug came heat mug with microwave | go to microwave 1
^ took mug 1 from cabinet 2""",
}
RULES = """This replaces what is said above of when to be silent. Take it from the memory: a place that it names; \
else, where nothing is searched for, the next step of the routine that its entries of this kind of task show; while \
something is searched for and the memory's places are used up, a place not yet searched, opened where it is closed; \
where the last command did nothing, or the agent repeats itself, another way. The reason cites the entry or the fact. \
Stay silent where the memory holds no entry of this kind of task, whatever you know of such tasks from elsewhere."""

WRITING = """You write the memory of an embodied agent. Read one episode and say in one sentence what a later episode \
in the same place should know: where things were and what made it succeed, or what went wrong and what to do instead. \
State facts that the episode shows, with their names; no preamble."""

RATIONALE_TOKENS = 256


class EndpointTeacher:
    """A `Compiler` behind an endpoint.

    Args:
        attempts: at each emission.
        max_new_tokens: of an emission.
        environment: the environment's part of the instructions (`EnvSpec.compiler_instructions`).
        level: what the guidance says.
        history: past commands that it reads, the same as its student (`compiler.history`).
    """

    def __init__(
        self,
        endpoint: Endpoint,
        attempts: int = 3,
        max_new_tokens: int = 512,
        environment: str = "",
        level: TeacherLevel = "place",
        history: History = 1,
    ) -> None:
        self.endpoint, self.attempts, self.max_new_tokens = endpoint, attempts, max_new_tokens
        self.history: History = history
        guidance = LEVELS[level].replace("{rules}", RULES)
        self.instructions = f"{compiler_instructions(environment)}\n\n{STATE}\n{guidance}"

    def compile(self, requests: Sequence[CompileRequest]) -> list[Any]:
        """Return one compilation, or the endpoint's failure, per request, in order."""
        return self.endpoint.run([self._compile(request) for request in requests])

    def rationales(self, episodes: Sequence[Episode]) -> list[str]:
        """Return one line per episode on why it succeeded or failed; the stop reason after a failed request.

        Raises:
            EndpointStop: the endpoint is gone or its budget is spent.
        """
        answers = self.endpoint.run([self._rationale(episode) for episode in episodes])
        self.endpoint.check()
        return [
            str(episode.stop_reason) if isinstance(answer, EndpointFailure) else answer or str(episode.stop_reason)
            for episode, answer in zip(episodes, answers, strict=True)
        ]

    def messages(self, request: CompileRequest) -> list[Message]:
        """Return the chat that requests an emission."""
        read = compiler_parts(request, self.endpoint.config.images, self.history)
        parts = [part.text if part.image is None else png_bytes(part.image) for part in read]
        return [{"role": "system", "content": self.instructions}, user_message(*parts)]

    async def _compile(self, request: CompileRequest) -> Compilation:
        chat, read, written = self.messages(request), 0, 0
        answer, parsed = Answer("", 0, 0), ParseResult(Emission(), ParseError.EMPTY)
        for attempt in range(self.attempts):
            answer = await self.endpoint.ask(chat, RETRY if attempt else COMPILE, self.max_new_tokens)
            read, written = read + answer.tokens_in, written + answer.tokens_out
            parsed = read_emission(answer)
            if not (problem := _problem(parsed, request)):
                break
            if chat[-2]["content"] == answer.text:
                break  # the model repeats itself
            complaint = f"That cannot be used ({problem}). Answer again, with the lines and nothing else."
            chat = [*chat, {"role": "assistant", "content": answer.text}, user_message(complaint)]
        text = answer.text if parsed.error else render(parsed.emission)
        return Compilation(text, parsed.emission, parsed.error, request=request, tokens_in=read, tokens_out=written)

    async def _rationale(self, episode: Episode) -> str:
        steps = [f"{step.action} -> {step.feedback}" for step in episode.steps]
        outcome = "It succeeded." if episode.success else f"It failed ({episode.stop_reason})."
        place = f"in {episode.scene}: " if episode.scene else ""
        summary = "\n".join([f"goal: {place}{episode.goal}", *map(one_line, steps), outcome])
        system = {"role": "system", "content": WRITING}
        answer = await self.endpoint.ask([system, user_message(summary)], RATIONALE, RATIONALE_TOKENS)
        return one_line(extract_labelled(answer.text))


def read_emission(answer: Answer) -> ParseResult:
    """Parse an emission from a chat model's answer, or from a fenced or labelled part of it."""
    parsed = parse(answer.text)
    if parsed.error:
        inner = parse(extract_labelled(answer.text))
        parsed = parsed if inner.error else inner
    return ParseResult(Emission(), ParseError.TRUNCATED) if answer.truncated else parsed


def _problem(parsed: ParseResult, request: CompileRequest) -> str:
    """Return why an emission is unusable; "" for a valid one."""
    if parsed.error:
        return str(parsed.error).replace("_", " ")
    if request.state is None:
        return ""
    return "; ".join(apply_ops(parsed.emission.ops, request.state)[1])


def load_actor(config: CollectConfig, teacher: Endpoint, cache: Path) -> tuple[Executor, dict[str, Endpoint]]:
    """Load the actor; also return all endpoints by role."""
    endpoints, environment = {"teacher": teacher}, executor_instructions_for(config.env)
    if config.acting_role == "expert":
        return ExpertExecutor(config.noise, config.seed), endpoints
    if config.acting_role == "teacher":
        executor = ApiExecutor(
            teacher,
            instructions=environment.instructions if config.executor.instructions == "full" else "",
            max_new_tokens=config.executor.max_new_tokens,
            role="actor",
            reads=executor_view(config.executor, environment),
        )
        return executor, endpoints
    actor = load_executor(config.executor, environment, cache)
    if isinstance(actor, ApiExecutor):
        endpoints["executor"] = actor.endpoint
    return actor, endpoints
