"""Pictures of raw records: a record points to a file, its caption is text, and a reader that sees is shown it."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from PIL import Image

from data_gen.questions.records import QuestionSet
from eval.qa.answers import QaSettings, answer_questions, load_reader
from eval.qa.benchmark_files import read_question_sets
from eval.qa.hf_readers import HfVisionReader
from eval.qa.readers import EndpointReader, Prompt, build_prompt, text_of
from eval.qa.retrievers import open_retriever
from lm.answer_cache import Answer
from lm.endpoint import Endpoint
from lm.prompt import PromptPart
from memory.journal import trace_from_json, trace_json
from memory.protocol import TokenCosts
from memory.s3mem.rule_writer import write_units
from memory.s3mem.system import S3Mem
from memory.trajectory import png_bytes
from runtime.checksums import parse_row
from tests.faulty_server import FaultyServer
from tests.tiny_models import lm_backbone, vlm_backbone

SEES = TokenCosts(picture=50)
SAID = ("I put the mug on a shelf.", "Look at this!", "I sold my old pen.", "And here is my garden.")


def sample(folder: Path, **more: object) -> Path:
    """Write a dialogue whose second turn has a picture with a caption, and whose last has one that lies nowhere."""
    Image.new("RGB", (64, 64), (200, 30, 30)).save(folder / "cat.jpg")
    turns: list[dict[str, object]] = [
        {"speaker": "Ann", "dia_id": f"D1:{t}", "text": text} for t, text in enumerate(SAID)
    ]
    turns[1] |= {"blip_caption": "a red cat on a sofa", "picture": "cat.jpg"} | more
    turns[3] |= {"img_url": ["https://example.org/garden.jpg"]}
    qa = [{"question": "Which animal is on the sofa?", "answer": "cat", "evidence": ["D1:1"], "category": 4}]
    told = {"session_1_date_time": "8 May", "session_1": turns}
    path = folder / "locomo.json"
    path.write_text(json.dumps([{"sample_id": "c", "conversation": told, "qa": qa}]))
    return path


@pytest.fixture
def case(tmp_path: Path) -> QuestionSet:
    (tmp_path / "data").mkdir()
    [case] = read_question_sets(sample(tmp_path / "data"))
    return case


class Looking:
    """A reader that notes what it is shown, and whose pictures are 7 tokens each."""

    name = "looking"

    def __init__(self) -> None:
        self.prompts = list[Prompt]()

    def answer(self, prompts: Sequence[Prompt]) -> list[Answer | None]:
        self.prompts += prompts
        return [Answer("cat", 10, 1) for _ in prompts]

    def log_probs(self, prompts: Sequence[Prompt], answers: Sequence[str]) -> list[float | None]:
        return [None for _ in prompts]

    def count(self, shown: Prompt) -> int:
        return sum(7 if isinstance(part, bytes) else len(part.split()) for part in shown)


def test_records_point_to_files_beside_the_data(case: QuestionSet, tmp_path: Path) -> None:
    [trace] = case.histories
    assert [r.picture for r in trace.records] == [
        "",
        str(tmp_path / "data" / "cat.jpg"),
        "",
        "https://example.org/garden.jpg",
    ]
    assert trace.records[1].action == "Look at this! [photo: a red cat on a sofa]"
    assert trace_from_json(json.loads(json.dumps(trace_json(trace)))) == trace
    units = write_units(trace)
    assert [unit.pictures for unit in units] == [(r.picture,) if r.picture else () for r in trace.records]
    [image] = units[1].entry(pictures=True).images
    assert Image.open(io.BytesIO(image)).size == (64, 64) and units[1].entry().images == ()
    assert units[3].entry(pictures=True).images == ()  # nothing is fetched
    assert units[1].cost(costs=SEES) == units[1].cost() + 50 and units[3].cost(costs=SEES) == units[3].cost()


@pytest.mark.parametrize("picture", ["../outside.jpg", "/etc/hostname"])
def test_nothing_outside_of_the_data_s_folder_is_shown(tmp_path: Path, picture: str) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "outside.jpg").touch()
    with pytest.raises(ValueError, match="has a picture outside of"):
        read_question_sets(sample(tmp_path / "data", picture=picture))


def test_a_file_that_is_no_picture_is_said(tmp_path: Path) -> None:
    (tmp_path / "not.jpg").write_text("no picture")
    [case] = read_question_sets(sample(tmp_path, picture="not.jpg"))
    with pytest.raises(ValueError, match=r"not\.jpg is not a readable picture"):
        write_units(case.histories[0])[1].entry(pictures=True)
    [unnamed] = read_question_sets(sample(tmp_path, picture="x" * 5000))
    assert write_units(unnamed.histories[0])[1].entry(pictures=True).images == ()


@pytest.mark.parametrize("memory", ["s3mem", "bm25-stems", "oracle"])
def test_a_picture_counts_in_the_budget_and_goes_with_its_record(
    case: QuestionSet, tmp_path: Path, memory: str
) -> None:
    """Found by its caption's words. Where it does not fit, its record does not either; who sees none is not charged."""
    settings = {"fill": True} if memory == "s3mem" else {}
    [question] = case.questions
    seen = open_retriever(memory, case, settings, tmp_path / "a", costs=SEES)(question, 75)
    assert "D1:1" in seen.pointers and 50 < seen.tokens <= 75
    [pictures] = [own for own in seen.pictures if own]
    assert len(pictures) == 1 and seen.texts[seen.pictures.index(pictures)].endswith("a red cat on a sofa]")
    small = open_retriever(memory, case, settings, tmp_path / "b", costs=SEES)(question, 50)
    assert "D1:1" not in small.pointers and small.pictures == ()
    blind = open_retriever(memory, case, settings, tmp_path / "c")(question, 75)
    assert "D1:1" in blind.pointers and blind.pictures == () and blind.tokens < 60
    assert len(blind.texts) > len(seen.texts)


def test_a_reader_is_shown_it_behind_its_line(case: QuestionSet, tmp_path: Path) -> None:
    reader = Looking()
    asked = QaSettings("locomo.json", "s3mem", {"fill": True}, 75, False, "looking", picture=50)
    results = answer_questions(asked, [case], reader, tmp_path / "run")
    [prompt] = reader.prompts
    [at] = [i for i, part in enumerate(prompt) if isinstance(part, bytes)]
    assert str(prompt[at - 1]).endswith("[photo: a red cat on a sofa]") and "Question: Which" in str(prompt[-1])
    [row] = [parse_row(line) for line in (tmp_path / "run" / "answers.jsonl").read_text().splitlines()]
    assert row["pictures"] == 1 and row["word_tokens"] > 50
    shown = str(prompt[at - 1]).partition("Memory:\n")[2]
    rest = str(prompt[at + 1]).partition("\n\nQuestion")[0]
    assert row["tokens"] == 7 + len(shown.split()) + len(rest.split())
    assert results["picture"] == 50 and results["pictures_per_question"] == 1.0
    assert "picture" not in QaSettings("d", "s3mem", {}, 75, False, "r").to_json()


def test_a_model_behind_an_endpoint_gets_the_picture(case: QuestionSet, tmp_path: Path) -> None:
    evidence = open_retriever("oracle", case, {}, tmp_path, costs=SEES)(case.questions[0], 75)
    prompt = build_prompt(evidence.texts, "Which animal?", (), evidence.pictures)
    with FaultyServer(answer=lambda messages: "cat") as server:
        reader = EndpointReader("m", Endpoint(server.config()))
        [answer] = reader.answer([prompt])
        content = server.bodies[0]["messages"][0]["content"]
        reader.answer([("text alone",)])
        assert server.bodies[1]["messages"] == [{"role": "user", "content": "text alone"}]
    assert answer is not None and answer.text == "cat"
    [url] = [part["image_url"]["url"] for part in content if part["type"] == "image_url"]
    sent = Image.open(io.BytesIO(base64.b64decode(url.partition("base64,")[2])))
    red, green, _ = sent.convert("RGB").getpixel((30, 30))  # type: ignore[misc]
    assert red > 150 > green and [part["type"] for part in content][:2] == ["text", "image_url"]
    assert reader.count(prompt) > 1000 > reader.count(("text",))


def test_a_vision_language_model_reads_it_and_answers_depend_on_it() -> None:
    backbone = vlm_backbone()
    reader = HfVisionReader("tiny", backbone)
    picture = lambda color: png_bytes(Image.new("RGB", (64, 64), color))
    red, blue = (build_prompt(["the mug is here"], "Where is the mug?", (), [[picture(c)]]) for c in ("red", "blue"))
    [answer] = reader.answer([red])
    parts = [PromptPart(text=p) if isinstance(p, str) else PromptPart(image=Image.open(io.BytesIO(p))) for p in red]
    encoded = backbone.encode(parts)
    assert answer is not None and answer.tokens_in == len(encoded.ids) and answer.tokens_out > 0
    places = sum(p.tokens for p in encoded.pictures)
    texts = [part for part in red if isinstance(part, str)]
    assert places > 1 and reader.count(red) == places + sum(len(backbone.ids(text)) for text in texts)
    assert reader.count(texts[:1]) == len(backbone.ids(texts[0]))  # type: ignore[arg-type]

    log_probs, other, plain = reader.log_probs([red, blue, build_prompt(["the mug is here"], "Where?")], ["shelf"] * 3)
    gold = backbone.ids("shelf")
    with torch.no_grad():
        hidden = backbone.hidden(backbone.pad([encoded.extended(gold)], "left"))
        scores = backbone.logits(hidden[0, -len(gold) - 1 : -1]).float().log_softmax(-1)
    wanted = float(scores.gather(-1, torch.tensor(gold)[:, None]).mean())
    assert log_probs == pytest.approx(wanted, abs=1e-4) and log_probs != other and plain is not None
    assert reader.log_probs([red], [""]) == [None]
    spelled = build_prompt([f"a text that says {backbone.image_token}"], "Where?")
    [again] = reader.answer([spelled])  # a token that a text spells is text
    assert again is not None and again.tokens_in == len(backbone.encode([PromptPart(*spelled)]).ids)  # type: ignore[arg-type]


def test_who_sees_nothing_is_shown_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="sees no pictures"):
        text_of(("text", b"picture"))
    with pytest.raises(ValueError, match="read no pictures here"):
        load_reader("vllm", "m", {}, tmp_path, sees=True)
    backbone = lm_backbone()
    backbone.model.save_pretrained(tmp_path / "m")
    backbone.processor.save_pretrained(tmp_path / "m")
    with pytest.raises(ValueError, match=r"m sees no pictures"):
        load_reader("hf", str(tmp_path / "m"), {}, tmp_path, sees=True)


def test_steps_of_logs_have_pictures_too(tmp_path: Path) -> None:
    step = {"t": 0, "action": "look", "image": "frames/0.png", "caption": "a door"}
    (tmp_path / "frames").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "frames" / "0.png")
    (tmp_path / "qa_context.json").write_text(json.dumps({"steps": [step]}))
    (tmp_path / "qa.jsonl").write_text(json.dumps({"question": "Q", "gt": "a"}))
    [case] = read_question_sets(tmp_path)
    [record] = case.histories[0].records
    assert record.picture == str(tmp_path / "frames" / "0.png") and record.feedback == "caption: a door"
    memory = S3Mem(tmp_path / "memory")
    memory.commit([list(case.histories)])
    assert memory.units[0].pictures == (record.picture,)
    turn = {"action": "look", "observation": "dark", "image": ["frames/0.png"]}
    ama = tmp_path / "ama.jsonl"
    ama.write_text(json.dumps({"episode_id": 1, "trajectory": [turn], "qa_pairs": []}))
    [log] = read_question_sets(ama)
    assert log.histories[0].records[0].picture == record.picture
