"""Models that filters ask, and rows by how hard they are for one: by hand, and of a real model."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest

from harness.scripted_server import Reply, ScriptedServer
from twinkle.core.errors import ConfigError, InvalidInput
from twinkle.sampler import TorchSampler
from twinkle.template import Template
from twinkle_agentic.preprocessor import (
    IFDFilter,
    IFDScorer,
    LLMBackend,
    OpenAIBackend,
    PerplexityFilter,
    ResponseRefiner,
    SamplerBackend,
    ScoreFilter,
    SIFDScorer,
)
from twinkle_agentic.preprocessor.difficulty import selective_ifd

ANSWER = "It beats its wings, which push air down."
ROW = {"messages": [{"role": "user", "content": "How does a bird fly?"}, {"role": "assistant", "content": ANSWER}]}


@pytest.fixture(scope="module")
def sampler(model_id):
    sampler = TorchSampler(model_id)
    sampler.set_template(Template, model_id=model_id)
    return sampler


class Told(LLMBackend):
    """Scores of the answer alone are -2; after the question those that it is told, for the last tokens."""

    def __init__(self, gains):
        self.gains = gains

    def chat(self, messages, *, temperature=0.0, max_tokens=16, n=1):
        return [{"content": f"{len(messages)} before"}] * n

    def prompt_logprobs_ids(self, input_ids_list):
        told = []
        for ids in input_ids_list:
            if ids[0] == 0:  # the prompt below begins with it
                told.append([None] + [-2.0] * (len(ids) - 1 - len(self.gains)) + [-2.0 + gain for gain in self.gains])
            else:
                told.append([None] + [-2.0] * (len(ids) - 1))
        return told


class Letters:
    """A template whose tokens are letters, and whose prompt is one 0."""

    def encode(self, trajectory, add_generation_prompt=False):
        return {"input_ids": np.zeros(1, dtype=np.int64)}

    def tokenizer(self, text, add_special_tokens=True):
        return {"input_ids": [ord(letter) for letter in text]}


# Of an answer of seven letters the first has no gain: it is preceded by nothing when it stands alone.
GAINS = [1.0, -2.0, 0.5, 0.0, 0.25, 0.0]
SEVEN = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "letters"}], "user_data": []}


def test_selective_ifd_is_that_of_the_largest_gains():
    assert selective_ifd(GAINS, 0.5) == math.exp(-(-2.0 + 1.0 + 0.5) / 3)
    # Three quarters of six tokens are 4.5, rounded up.
    assert selective_ifd(GAINS, 0.75) == math.exp(-(-2.0 + 1.0 + 0.5 + 0.25 + 0.0) / 5)
    assert selective_ifd(GAINS, 1.0) == math.exp(0.25 / 6)


def test_scores_by_hand_are_noted_and_easy_turns_no_longer_train():
    (row,) = ScoreFilter(Letters(), [SIFDScorer(), IFDScorer(None, 0.0, 2.0)], backend=Told(GAINS)).apply([SEVEN])
    assert row["scores"]["s_ifd"] == row["scores"]["s_ifd_75"] == [math.exp(0.25 / 5)]
    assert row["scores"]["s_ifd_50"] == [math.exp(0.5 / 3)] and row["scores"]["mean_delta"] == [-0.25 / 6]
    assert row["scores"]["ifd"] == [pytest.approx(math.exp(0.25 / 6))] and row["user_data"] == [("key_rounds", [1])]
    strict = ScoreFilter(Letters(), [SIFDScorer(ifd_threshold=1.06)], backend=Told(GAINS))
    assert strict.apply([SEVEN]) == [] and strict.dropped == {"s_ifd": 1}

    hard, easy = Told([0.5] * 6), Told([1.0] * 6)  # exp(-0.5) = 0.61, exp(-1) = 0.37
    assert len(IFDFilter(hard, Letters()).apply([SEVEN])) == 1 and IFDFilter(easy, Letters()).apply([SEVEN]) == []
    misled = IFDFilter(Told([-0.5] * 6), Letters())  # exp(0.5) > 1
    assert misled.apply([SEVEN]) == [] and misled.dropped == {"ifd": 1}
    # Seven tokens of the answer: -2 for the first, then those that are told.
    (row,) = PerplexityFilter(hard, Letters()).apply([SEVEN])
    assert row["scores"]["perplexity"] == [pytest.approx(math.exp((2.0 + 6 * 1.5) / 7))]
    assert PerplexityFilter(hard, Letters(), 1.0, 4.0).apply([SEVEN]) == []
    assert PerplexityFilter(hard, Letters(), 5.0).apply([SEVEN]) == []


def test_the_perplexity_of_a_real_model_is_that_of_its_own_logprobs(sampler):
    (row,) = PerplexityFilter(sampler, ppl_max=1e9).apply([ROW])
    answer = sampler.template.tokenizer(ANSWER, add_special_tokens=False)["input_ids"]
    prompt = sampler.template.encode({"messages": ROW["messages"][:1]}, add_generation_prompt=True)["input_ids"]
    params = {"max_tokens": 0, "prompt_logprobs": 0}
    values = sampler.sample([{"input_ids": [*prompt.tolist(), *answer]}], params)[0].prompt_logprobs[-len(answer) :]
    assert row["scores"]["perplexity"][0] == pytest.approx(math.exp(-sum(values) / len(values)), rel=1e-4)
    (row,) = ScoreFilter(sampler.template, [SIFDScorer(sampler)]).apply([ROW])
    (same,) = ScoreFilter(sampler.template, [IFDScorer(sampler, 0.0, 1e9)]).apply([ROW])
    # The mean over all tokens is what IFD is.
    assert row["scores"]["ifd"] == [pytest.approx(same["scores"]["ifd"][0])]
    assert row["scores"]["ifd"] == [pytest.approx(math.exp(-row["scores"]["mean_delta"][0]))]


def test_a_sampler_is_a_backend(sampler):
    backend = SamplerBackend(sampler)
    conversations = [ROW["messages"][:1], [{"role": "user", "content": "Why?"}]]
    answers = backend.chat_batch(conversations, max_tokens=3, n=2)
    assert [len(choices) for choices in answers] == [2, 2] and all(isinstance(c["content"], str) for c in answers[0])
    assert backend.chat(conversations[0], max_tokens=3)[0]["content"] == answers[0][0]["content"]
    ids = sampler.template.encode(ROW)["input_ids"].tolist()
    values = backend.prompt_logprobs(ROW["messages"])
    assert (
        values == pytest.approx(backend.prompt_logprobs_ids([ids])[0]) and values[0] is None and len(values) == len(ids)
    )
    assert backend.chat_batch([]) == [] == backend.prompt_logprobs_ids([])
    with pytest.raises(ConfigError, match="embed_endpoint"):
        backend.embeddings(["a"])


def test_a_server_is_a_backend():
    def reply(seen):
        body = json.loads(seen.content)
        if seen.path == "/v1/embeddings":
            rows = [{"object": "embedding", "index": i, "embedding": [float(i), 1.0]} for i in (1, 0)]
            return Reply(200, {"object": "list", "model": "m", "data": rows, "usage": {}})
        base = {"id": "x", "created": 0, "model": "m"}
        if seen.path == "/v1/completions":
            assert body["prompt_logprobs"] == 0 and body["prompt"] == [[7, 8], [9]]
            told = [[None, {"3": {"logprob": -1.0}, "8": {"logprob": -2.5}}], [None]]
            choices = [
                {"index": i, "text": "", "finish_reason": "length", "logprobs": None, "prompt_logprobs": told[i]}
                for i in (1, 0)
            ]
            return Reply(200, {**base, "object": "text_completion", "choices": choices})
        if "fail" in body["messages"][0]["content"]:
            return Reply(400, {"error": {"message": "no"}})
        message = {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
        answer = {
            **base,
            "object": "chat.completion",
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        }
        return Reply(
            200, {**answer, "prompt_logprobs": [None, {"5": {"logprob": -0.5}}]} if "score" in str(body) else answer
        )

    def ask(text):
        return [{"role": "user", "content": text}]

    with ScriptedServer(reply) as server:
        backend = OpenAIBackend(server.url, "m")
        assert backend.chat_batch([ask("a"), ask("fail")]) == [[{"content": "yes", "reasoning_content": "hm"}], []]
        with pytest.raises(Exception, match="400"):
            backend.chat_batch([ask("fail"), ask("fail")])
        assert backend.prompt_logprobs(ask("score")) == [None, -0.5]
        assert backend.prompt_logprobs_ids([[7, 8], [9]]) == [[None, -2.5], [None]]
        with pytest.raises(ConfigError, match="prompt_logprobs"):
            backend.prompt_logprobs(ask("a"))
        assert SamplerBackend(None, server.url, "m").embeddings(["a", "b"]).tolist() == [[0.0, 1.0], [1.0, 1.0]]
    with pytest.raises(ConfigError, match="no logprobs of prompts"):
        LLMBackend.prompt_logprobs_ids(backend, [[1]])


def test_turns_that_train_are_said_again_each_after_those_said_before():
    class Numbered(Told):
        def chat_batch(self, messages_list, *, temperature=0.0, max_tokens=16, n=1):
            self.asked.append([[message["content"] for message in messages] for messages in messages_list])
            return [[{"content": f"new {len(messages)}", "reasoning_content": "hm"}] for messages in messages_list]

    backend = Numbered([])
    backend.asked = []
    texts = [{"role": role, "content": role[0]} for role in ("user", "assistant", "user", "assistant")]
    calls = [texts[0], {**texts[1], "tool_calls": [{"function": {"name": "f"}}]}]
    rows = [
        {"messages": texts, "user_data": [("key_rounds", [3, 1])]},
        {"messages": calls, "user_data": [("key_rounds", [1])]},
        {"messages": texts[:2], "user_data": {"key_rounds": [1, 9]}},
        {"messages": texts},
    ]
    one = ResponseRefiner(backend)
    kept = one.apply(rows)
    assert [row["refined"] for row in kept] == [2, 0, 1] and one.dropped == {"no key rounds": 1}
    assert backend.asked == [[["u"], ["u"]], [["u", "new 1", "u"]]]
    assert kept[0]["messages"][3] == {"role": "assistant", "content": "new 3", "reasoning_content": "hm"}
    assert kept[1]["messages"] == calls and rows[0]["messages"] == texts and texts[3]["content"] == "a"
    assert len(ResponseRefiner(backend, keep_if_no_key_rounds=True).apply(rows)) == 4


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: SIFDScorer(ifd_threshold=-1.0), "ifd_threshold"),
        (lambda: IFDFilter(Told([]), Letters(), 1.0), "ifd_threshold"),
        (lambda: PerplexityFilter(Told([]), Letters(), 5.0, 4.0), "ppl_min"),
        (lambda: PerplexityFilter(), "backend"),
        (lambda: PerplexityFilter(Told([])), "template"),
        (lambda: ScoreFilter(Letters(), [SIFDScorer()]).apply([SEVEN]), "backend"),
        (lambda: OpenAIBackend(""), "endpoint"),
        (lambda: ResponseRefiner(), "backend"),
        (lambda: ResponseRefiner(Told([]), max_tokens=0), "max_tokens"),
        (lambda: ResponseRefiner(Told([]), max_workers=0), "max_workers"),
    ],
)
def test_wrong_settings_are_refused_by_their_name(make, field):
    with pytest.raises(InvalidInput) as refused:
        make()
    assert refused.value.field == field


def test_filters_are_imported_without_what_only_models_need():
    code = "import sys, twinkle_agentic.preprocessor; print([m for m in sys.argv[1:] if m in sys.modules])"
    heavy = ("torch", "transformers", "openai", "scipy", "py3langid", "faker")
    done = subprocess.run([sys.executable, "-c", code, *heavy], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
