"""A reader on vLLM answers what the same model of Hugging Face does."""

from __future__ import annotations

from eval.qa.hf_readers import HfReader
from eval.qa.readers import VllmReader, build_prompt
from tests import vllm_engines

pytestmark = vllm_engines.marks


def test_answers_and_their_tokens_equal_hugging_face() -> None:
    ours = VllmReader("tiny", vllm_engines.engine(False, "executor"))
    theirs = HfReader.load(str(vllm_engines.folder(False)))
    prompts = [
        build_prompt(["Ann: the mug was in cabinet 2"], "Where is the mug?"),
        build_prompt([], "Where is the pen?"),
    ]
    assert ours.answer(prompts) == theirs.answer(prompts)
