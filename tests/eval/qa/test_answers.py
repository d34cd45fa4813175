"""The runner of questions: what a reader sees, what is scored, and going on after a kill."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.collect import MemoryModels
from data_gen.questions.records import Question, QuestionSet
from envs.base import Task
from eval.paper.s3mem import s3mem_table
from eval.paper.tables import MEASURED
from eval.qa.answers import QaSettings, answer_questions, select_questions
from eval.qa.hf_readers import HfReader, is_complete
from eval.qa.readers import ABSTAIN, EndpointReader, Prompt, build_prompt, chat_ids, parse_answer, text_of
from eval.qa.retrievers import BASELINES, open_retriever
from eval.qa.summary import to_markdown
from lm.answer_cache import Answer
from lm.endpoint import Endpoint
from memory.protocol import Record, Trace
from runtime.checksums import parse_row
from tests.commands.running import memcompiler
from tests.faulty_server import MODEL, FaultyServer
from tests.memory.languages import LANGUAGES, Language
from tests.tiny_models import lm_backbone

KINDS = ("single-hop", "temporal")
THINGS = ("mug", "pen", "cat", "bicycle", "lamp", "vase", "spoon", "kettle")


class Echo:
    """Answers with the last word of the memory that shares a word with the question; notes its prompts."""

    name = "echo"

    def __init__(self) -> None:
        self.prompts = list[Prompt]()

    def answer(self, prompts: Sequence[Prompt]) -> list[Answer | None]:
        self.prompts += prompts
        return [self._one(text_of(prompt)) for prompt in prompts]

    def _one(self, prompt: str) -> Answer | None:
        memory, _, question = prompt.partition("\n\nQuestion: ")
        thing = next(thing for thing in THINGS if thing in question)
        found = next((line.split()[-1].strip(".") for line in memory.splitlines() if f"the {thing}" in line), "")
        return Answer(found or "Not mentioned", len(prompt.split()), 1) if thing != "kettle" else None

    def log_probs(self, prompts: Sequence[Prompt], answers: Sequence[str]) -> list[float | None]:
        """Like right answers that stand in the memory."""
        told = zip(map(text_of, prompts), answers, strict=True)
        return [None if a == ABSTAIN else -0.1 if a in p.partition("\n\nQuestion")[0] else -3.0 for p, a in told]

    def count(self, shown: Prompt) -> int:
        return len(text_of(shown).split())


def cases() -> list[QuestionSet]:
    def case(name: str) -> QuestionSet:
        records = tuple(
            Record(t, "", f"I put the {thing} in the room{t}.", "", id=f"D1:{t}", actor="Ann", when="8 May, 2023")
            for t, thing in enumerate(THINGS)
        )
        questions = tuple(
            Question(f"{name}/{t}", f"Where is the {thing}?", f"room{t}", KINDS[t % 2], (f"D1:{t}",))
            for t, thing in enumerate(THINGS)
        )
        absent = Question(f"{name}/x", "Where is the lamp of Bo?", "room4", "adversarial", ("D1:4",), absent=True)
        return QuestionSet(name, (Trace(Task(name, "", "", "", "dialogue"), records, True),), (*questions, absent))

    return [case("a"), case("b")]


def asked(memory: str = "bm25-stems", tokens: int = 40, **more: object) -> QaSettings:
    return QaSettings("data.json", memory, {}, tokens, False, "echo", **more)  # type: ignore[arg-type]


def test_answers_are_scored_by_category_and_abstention_stands_apart(tmp_path: Path) -> None:
    results = answer_questions(asked(), cases(), Echo(), tmp_path)
    assert results["n"] == 18 and results["failed"] == 2  # the kettles
    assert results["by_category"]["single-hop"]["f1"]["mean"] == 1.0
    assert results["by_category"]["temporal"]["f1"]["mean"] == pytest.approx(0.75)  # 2 of its 8 failed
    assert results["abstention"] == {"right": 0.0, "wrong": 0.0, "n": 2}
    assert results["overall"]["f1"]["n"] == 18 and results["overall_without_absent"]["f1"]["n"] == 16
    assert 0 < results["word_tokens_per_question"] <= 40 and results["recall"] == 1.0
    assert results["usage"]["reader"]["calls"] == 18 and results["usage"]["reader"]["tokens_in"] > 0
    assert results["logprob_without_absent"]["mean"] == pytest.approx(-0.1)
    assert json.loads((tmp_path / "results.json").read_text())["n"] == 18
    assert "| all | 18 |" in to_markdown(results)


class Quoting(Echo):
    """Answers right, as a sentence, where the memory says it; its tokens are characters."""

    def __init__(self, language: Language) -> None:
        super().__init__()
        self.language = language

    def _one(self, prompt: str) -> Answer:
        memory, _, question = prompt.partition("\n\nQuestion: ")
        [right] = [right for asked, right, _ in self.language.asked if question.startswith(asked)]
        return Answer(f"{right}{self.language.stop}" if right in memory else ABSTAIN, 0, 0)

    def count(self, shown: Prompt) -> int:
        return len(text_of(shown))


@pytest.mark.parametrize("language", LANGUAGES.values(), ids=LANGUAGES)
def test_budgets_are_of_the_readers_own_tokens_in_any_language(language: Language, tmp_path: Path) -> None:
    results = answer_questions(asked("s3mem", 80, counted="reader"), [language.case()], Quoting(language), tmp_path)
    rows = list(map(parse_row, (tmp_path / "answers.jsonl").read_text(encoding="utf-8").splitlines()))
    assert results["recall"] == results["overall"]["f1"]["mean"] == results["overall"]["bleu_1"]["mean"] == 1.0
    assert all(0 < row["tokens"] <= 80 for row in rows) and "budget: 80 of the reader" in to_markdown(results)


class Flaky(Echo):
    """Fails so many times at some questions."""

    def __init__(self, *things: str, times: int = 1) -> None:
        super().__init__()
        self.left = dict.fromkeys(things, times)

    def answer(self, prompts: Sequence[Prompt]) -> list[Any]:
        return [self._failure(text_of(prompt)) or Answer("room1", 3, 1) for prompt in prompts]

    def _failure(self, prompt: str) -> Exception | None:
        self.prompts.append(prompt)
        thing = next((thing for thing in self.left if f"the {thing}?" in prompt), None)
        if thing is None or not self.left[thing]:
            return None
        self.left[thing] -= 1
        return ConnectionError("no route\nto the reader")


@pytest.mark.parametrize(("times", "most", "failed"), [(2, 3, 0), (4, 2, 4)])
def test_what_failed_is_asked_again_up_to_a_number_of_attempts(
    tmp_path: Path, times: int, most: int, failed: int
) -> None:
    reader = Flaky("mug", "pen", times=2 * times)  # in two cases
    results = answer_questions(asked(), cases(), reader, tmp_path, attempts=most)
    assert results["failed"] == 4 and results["broken_due"] == 4
    assert "failed: 4 of 18, the first a/0: ConnectionError: no route to the reader; 4 have" in to_markdown(results)
    for _ in range(times):
        results = answer_questions(asked(), cases(), reader, tmp_path, attempts=most)
    assert (results["n"], results["failed"], results["broken_due"]) == (18, failed, 0)
    assert results["broken"]["played_again"] == 4 and len(reader.prompts) == 18 + 4 * min(times, most - 1)


def test_where_every_answer_failed_one_line_names_the_cause(tmp_path: Path) -> None:
    reader = Flaky(*THINGS)
    with pytest.raises(ValueError, match=r"no results of .*failed: 8 of 8.*no route to the reader") as told:
        answer_questions(asked(), [replace(cases()[0], questions=cases()[0].questions[:8])], reader, tmp_path)
    assert "\n" not in str(told.value) and not (tmp_path / "results.json").exists()


def test_scores_and_abstaining_look_at_answers_without_reasoning(tmp_path: Path) -> None:
    think = "<think>\nIs it not mentioned? No information available?\n</think>\n\n"
    told = lambda messages: think + ("Not mentioned" if "of Bo" in messages[0]["content"] else "room4")
    with FaultyServer(answer=told) as server:
        answer_questions(asked("oracle"), cases(), EndpointReader(MODEL, Endpoint(server.config())), tmp_path)
    rows = [parse_row(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert {row["answer"] for row in rows} == {"room4", "Not mentioned"}
    assert all(row["abstained"] == row["absent"] for row in rows) and sum(row["f1"] for row in rows) == 2


@pytest.mark.parametrize(
    ("written", "answer", "ended"),
    [
        ("\n\nroom4", "room4", False),
        ("room4\nfor", "room4", True),
        ("room4\n", "room4", True),
        ("<think>a\nb", None, False),
        ("<think>a\nb</think>\n\nroom4", "room4", False),
        ("a\n</think>\nroom4.\n", "room4.", True),
        ("", "", False),
    ],
)
def test_readers_on_this_machine_say_the_first_line_behind_their_reasoning(written, answer, ended) -> None:
    made = parse_answer(written, 1, 2)
    assert (made.text if made else None) == answer and is_complete(written) == ended


def test_a_run_asks_nothing_twice_and_takes_no_other_question(tmp_path: Path) -> None:
    first = Echo()
    answer_questions(asked(limit=4), cases(), first, tmp_path / "some")
    whole, again = Echo(), Echo()
    answer_questions(asked(), cases(), whole, tmp_path / "whole")
    answers = tmp_path / "whole" / "answers.jsonl"
    lines = answers.read_bytes().splitlines(keepends=True)
    before = json.loads((tmp_path / "whole" / "results.json").read_text())
    answers.write_bytes(b"".join(lines[:7]) + lines[7][:20])  # as a kill leaves it
    after = answer_questions(asked(), cases(), again, tmp_path / "whole")
    assert len(again.prompts) == 18 - 7 + sum(parse_row(line)["failed"] for line in lines[:7])
    unlike = {"usage", "broken", "broken_due"}
    assert {k: v for k, v in json.loads(json.dumps(after)).items() if k not in unlike} == {
        k: v for k, v in before.items() if k not in unlike
    }
    with pytest.raises(ValueError, match="name another folder"):
        answer_questions(asked(tokens=41), cases(), Echo(), tmp_path / "whole")


def test_a_hugging_face_reader_says_the_first_line_and_how_likely_an_answer_is() -> None:
    """What is read once of a prompt and gone on from is what a whole forward gives."""
    backbone = lm_backbone()
    reader = HfReader("tiny", backbone.model.eval(), backbone.processor)
    prompts = [
        build_prompt(["Ann: the mug was in cabinet 2"], "Where is the mug?"),
        build_prompt([], "Where is the pen?"),
    ]
    told, log_probs = reader.answer(prompts), reader.log_probs(prompts, ["cabinet 2", "Not mentioned"])
    for prompt, answer, wanted, found in zip(prompts, told, ["cabinet 2", "Not mentioned"], log_probs, strict=True):
        turn = [{"role": "user", "content": text_of(prompt)}]
        text = reader.tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        ids = reader.tokenizer(text, return_tensors="pt")["input_ids"]
        plain = reader.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=48, do_sample=False)
        said = reader.tokenizer.decode(plain[0, ids.shape[1] :], skip_special_tokens=True)
        assert answer is not None and answer.tokens_in == ids.shape[1]
        assert answer.text == next((line.strip() for line in said.splitlines() if line.strip()), "")
        gold = reader.tokenizer(wanted, add_special_tokens=False, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            whole = reader.model(torch.cat([ids, gold], 1)).logits[0, ids.shape[1] - 1 : -1]
        logits = whole.float().log_softmax(-1)
        assert found == pytest.approx(float(logits.gather(-1, gold[0][:, None]).mean()), abs=1e-4)
    assert reader.log_probs(prompts[:1], [""]) == [None]


def test_a_chat_begins_with_one_first_token() -> None:
    """Many tokenizers put it before any text, and a template writes it, too."""
    tokenizer = copy.deepcopy(lm_backbone().processor)
    tokenizer.bos_token, tokenizer.add_bos_token = "<|im_start|>", True
    assert tokenizer("hi")["input_ids"][0] == tokenizer.bos_token_id
    tokenizer.chat_template = "{{ bos_token }}{{ messages[0]['content'] }}"
    assert chat_ids(tokenizer, "hi") == tokenizer("hi")["input_ids"]


def test_the_reader_sees_pack_and_question_alone() -> None:
    [prompt] = build_prompt(["(8 May) Ann: hi"], "What?", ("a", "b"))
    assert str(prompt).endswith("Memory:\n(8 May) Ann: hi\n\nQuestion: What?\nChoose one of: a; b\nShort answer:")


def test_some_questions_are_chosen_of_every_category_the_same_each_time() -> None:
    some = select_questions(cases(), 6)
    assert some == select_questions(cases(), 6)
    categories = [question.category for of in some.values() for question in of]
    assert {"single-hop", "temporal", "adversarial"} == set(categories) and len(categories) <= 7


@pytest.mark.parametrize("memory", [*BASELINES, "s3mem", "trajectory", "brainmem"])
def test_anything_can_be_asked_within_a_budget(memory: str, tmp_path: Path) -> None:
    [case, _] = cases()
    ask = open_retriever(memory, case, {}, tmp_path)
    for question in case.questions[:2]:
        pack = ask(question, 40)
        assert pack.tokens <= 40 and pack.pointers <= {f"D1:{t}" for t in range(len(THINGS))}
        if memory in ("bm25", "windows", "hybrid", "oracle", "s3mem", "trajectory"):
            assert pack.recall(question.evidence) == 1.0
    with pytest.raises(ValueError, match="no memory 'nothing'"):
        open_retriever("nothing", case, {}, tmp_path)


def test_a_run_stands_in_the_papers_tables_as_an_analogue(tmp_path: Path) -> None:
    answer_questions(asked("s3mem", 100), cases(), Echo(), tmp_path)
    for number in (1, 2, 3, 4, 5):
        table = s3mem_table(number, [tmp_path])
        [ours] = [row for row in table.rows if row.source == MEASURED]
        assert ours.method == ("full unit" if number == 4 else "S3Mem")
        assert any(column.startswith("data.json: overall F1") for column in ours.cells)
        assert not set(ours.cells) & {"overall F1", "accuracy"}  # the paper's columns are of its own data
    example = s3mem_table(7, [])
    ours = {row.method: row.cells for row in example.rows if row.source == MEASURED}
    assert set(ours) == {row.method for row in example.rows if row.source != MEASURED}
    counted = [ours[f"step {t}: mix picture"]["y_sup"].value for t in (3, 4)]
    others = [cells["y_sup"].value for name, cells in ours.items() if not name.endswith("mix picture")]
    assert min(counted) > max(others)
    with pytest.raises(ValueError, match="there is no table 6"):
        s3mem_table(6, [])


def meaning(text: str) -> list[float]:
    """Tell cats and bicycles from all else, by other words than those that are said."""
    words = {"cat": 0, "pet": 0, "bicycle": 1, "bike": 1}
    return [0.1, *(float(any(w in text.lower() for w, at in words.items() if at == i)) for i in range(2))]


@pytest.mark.seconds
def test_embeddings_by_endpoint_find_what_shares_no_word(tmp_path: Path) -> None:
    """As a baseline, and as S3Mem's dense channel; answers say which model it was, and texts are sent once."""
    [case, _] = cases()
    pets = replace(case, questions=(Question("a/p", "What of our pet?", "room2", "single-hop", ("D1:2",)),))
    dense = {"dense": "embed", "channels": ["dense"], "router": "retrieval_rank", "n_single": 1}
    with FaultyServer(["429", "hang"], vector=meaning) as server:
        models = MemoryModels(embed_api=server.config(timeout_s=3.0)).cached_in(tmp_path / "responses.sqlite")
        for memory, settings in (("embed", {}), ("s3mem", dense)):
            ask = open_retriever(memory, pets, settings, tmp_path / memory, models=models)
            assert ask(pets.questions[0], 15).pointers == {"D1:2"}
        asked_of = QaSettings("data.json", "s3mem", dense, 15, False, "echo", None, models.model_names())
        results = answer_questions(asked_of, [pets], CatReader(), tmp_path / "run", models=models)
        sent = [text for body in server.bodies for text in body["input"]]
    assert results["models"] == {"embed": MODEL} and results["recall"] == 1.0
    assert json.loads((tmp_path / "run" / "asked.json").read_text())["models"] == {"embed": MODEL}
    assert "models" not in asked().to_json()
    assert max(Counter(sent).values()) == 3 and sent.count("What of our pet?") == 1  # texts: at the third attempt
    assert server.requests == 5  # these, and once whether the memory points to records
    with pytest.raises(ValueError, match=r"set memory\.embed or memory\.embed_api"):
        open_retriever("embed", pets, {}, tmp_path / "none")


class CatReader(Echo):
    def _one(self, prompt: str) -> Answer | None:
        return Answer("room2" if "cat" in prompt else "Not mentioned", 1, 1)


@pytest.mark.slow
def test_the_commands_take_the_memory_s_models(tmp_path: Path) -> None:
    """Cached in OUT: the second run asks for nothing. A server that refuses ends in one line."""
    data = locomo_file(tmp_path)
    with FaultyServer(vector=meaning) as server:
        named = {"base_url": server.url, "model": "m", "key_env": "null"}
        of = [part for name, value in named.items() for part in ("--with", f"embed_api.{name}={value}")]
        recall = ["bench", "memory", "recall", "--data", str(data), "--tokens", "20", *of, "--out", str(tmp_path / "r")]
        for memory in (["--memory", "embed"], ["--memory", "s3mem", "dense=embed"]):
            done = memcompiler(*recall, *memory)
            assert done.returncode == 0 and "recall@20:" in done.stdout, done.stderr
        texts = [text for body in server.bodies for text in body["input"]]
        assert len(texts) == len(set(texts)) == 2 * len(THINGS) + 1  # said, asked, and once whether it points
        assert json.loads((tmp_path / "r" / "recall.json").read_text())["models"] == {"embed": "m"}
        reader = ["--engine", "endpoint", "--base-url", server.url, "--model", "reader"]
        done = memcompiler("qa", "--data", str(data), *reader, *of, "--out", str(tmp_path / "q"), "dense=embed")
        assert done.returncode == 0 and "| single-hop | 8 |" in done.stdout, done.stderr
        refused = memcompiler(*recall, "--memory", "embed", "--with", "embed_api.tempo=3")
        assert refused.returncode == 1 and "tempo" in refused.stderr and "Traceback" not in refused.stderr


def locomo_file(folder: Path) -> Path:
    turn = lambda t, thing: {"speaker": "Ann", "dia_id": f"D1:{t}", "text": f"I put the {thing} in the room{t}."}
    talk = {"session_1_date_time": "8 May", "session_1": [turn(t, thing) for t, thing in enumerate(THINGS)]}
    asked = [
        {"question": f"Where is the {thing}?", "answer": "", "evidence": [f"D1:{t}"], "category": 4}
        for t, thing in enumerate(THINGS)
    ]
    data = folder / "locomo.json"
    data.write_text(json.dumps([{"sample_id": "c", "conversation": talk, "qa": asked}]))
    return data


@pytest.mark.seconds
def test_recall_ends_with_its_line(tmp_path: Path) -> None:
    data = locomo_file(tmp_path)
    told = memcompiler("bench", "memory", "recall", "--data", str(data), "--tokens", "20,1000")
    assert told.returncode == 0, told.stderr
    assert told.stdout.strip().splitlines()[-1] == "recall@1000: 100.0"
    assert "| single-hop | 8 |" in told.stdout
