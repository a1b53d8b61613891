"""Constrained requests through the whole engine, with SmolLM2's tokenizer and random weights."""

import asyncio
import json
import re
from contextlib import asynccontextmanager
from dataclasses import replace

import jsonschema
import pytest

from stoker.engine import AsyncEngine, Engine, EngineConfig, GrammarSpec, SamplingParams
from stoker.engine.api.errors import EngineError, RequestError
from stoker.engine.api.grammar import Reasoning

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
JSON = GrammarSpec("json_schema", json.dumps(SCHEMA))


def test_what_is_no_grammar_says_so():
    with pytest.raises(RequestError, match="no grammar of kind 'json', want json_schema, regex"):
        GrammarSpec("json", "{}")
    with pytest.raises(RequestError, match="source must be text, got a dict"):
        GrammarSpec("json_schema", {"type": "object"})


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 49152 + 40,  # 40 more than the tokenizer knows
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
    "eos_token_id": 2,
}


@pytest.fixture
def config(tmp_path, smollm2):
    """Makes configurations of a tiny model with random weights and SmolLM2's tokenizer."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))

    def make(**options):
        model = {
            "model": str(tmp_path),
            "load_format": "dummy",
            "tokenizer": str(smollm2.gguf.path),
            "grammar_timeout": 30,  # a worker starts slowly on a busy machine
        }
        return EngineConfig(**{**model, "kv_tokens": 4096, "threads": 1, **options})

    return make


@pytest.fixture
def engine(config):
    """Makes engines of these."""

    @asynccontextmanager
    async def make(**options):
        async with await AsyncEngine.start(config(**options)) as started:
            yield started

    return make


async def texts_of(engine, params, prompt="Write JSON: "):
    texts, ends = {}, {}
    async for output in engine.generate(prompt, params):
        texts[output.choice] = texts.get(output.choice, "") + output.text
        ends[output.choice] = output.finish_reason or ends.get(output.choice)
    return [texts[i] for i in sorted(texts)], [ends[i] for i in sorted(ends)]


def test_the_blocking_engine_constrains_too(config):
    params = SamplingParams(max_tokens=20, seed=5, grammar=GrammarSpec("regex", "[0-9]{3}"))
    with Engine(config()) as engine:
        [done] = engine.generate("A number: ", params)
        assert re.fullmatch("[0-9]{3}", done.text) and done.finish_reason == "stop"
        with pytest.raises(RequestError):
            engine.generate("A number: ", replace(params, grammar=GrammarSpec("regex", "[0-9")))


async def test_all_that_goes_with_a_grammar(engine):
    async with engine() as e:
        # n > 1, log-probabilities, a seed
        many = SamplingParams(max_tokens=120, n=3, seed=5, grammar=JSON, logprobs=2)
        texts, ends = await texts_of(e, many)
        assert ends == ["stop"] * 3
        for text in texts:
            jsonschema.validate(json.loads(text), SCHEMA)
        assert len(set(texts)) > 1
        assert (await texts_of(e, many))[0] == texts

        # beside free requests, which go on as if alone
        free = SamplingParams(max_tokens=30, temperature=0)
        alone = await texts_of(e, free, "The sea")
        greedy = SamplingParams(max_tokens=120, temperature=0, grammar=JSON)
        both = await asyncio.gather(
            texts_of(e, free, "The sea"), *(texts_of(e, greedy) for _ in range(3))
        )
        assert both[0] == alone
        for (text,), _ in both[1:]:
            jsonschema.validate(json.loads(text), SCHEMA)

        # the other library gives what the grammar allows, too
        other = SamplingParams(
            max_tokens=120,
            seed=1,
            grammar=GrammarSpec(
                "json_schema", json.dumps({"allOf": [SCHEMA, {}, {"maxProperties": 3}]})
            ),
        )
        (text,), _ = await texts_of(e, other)
        jsonschema.validate(json.loads(text), SCHEMA)

        # stop strings, min_tokens, ignore_eos: the grammar's own end comes first
        digits = GrammarSpec("regex", "[0-9]{40}")
        (text,), ends = await texts_of(
            e, SamplingParams(max_tokens=60, grammar=digits, stop=("7",))
        )
        assert re.fullmatch("[0-689]*", text) and ends == ["stop"]
        letters = GrammarSpec("regex", "(ab|cd)*")
        (text,), ends = await texts_of(
            e, SamplingParams(max_tokens=40, min_tokens=20, ignore_eos=True, grammar=letters)
        )
        assert re.fullmatch("(ab|cd)+", text) or ends == ["length"]
        assert len(e.tokenizer.encode(text, False)) >= 10
        short = GrammarSpec("choice", '["yes"]')
        reply = await texts_of(
            e, SamplingParams(max_tokens=40, min_tokens=20, ignore_eos=True, grammar=short)
        )
        assert reply == (["yes"], ["stop"])

        # after reasoning, whose end the model is led to by its bias
        [end] = [i for i in range(e.vocab_size) if e.tokenizer.token_bytes(i) == b"###"]
        thinks = GrammarSpec("choice", '["yes", "no"]', reasoning=Reasoning(("###",)))
        (text,), ends = await texts_of(
            e, SamplingParams(max_tokens=400, logit_bias={end: 12.0}, seed=2, grammar=thinks)
        )
        assert ends == ["stop"] and re.search("###(yes|no)$", text)

        with pytest.raises(RequestError) as error:
            await e.compile_grammar(GrammarSpec("json_schema", '{"not": {}}'))
        assert error.value.param == "response_format"


async def test_grammars_survive_retraction_and_chunks(engine):
    """A pool that holds half of what runs: requests are retracted and come back in the middle."""
    config = {
        "kv_tokens": 160,
        "page_size": 4,
        "chunked_prefill_size": 16,
        "check": True,
        "schedule_conservativeness": 0.1,
        "max_running_requests": 6,
    }
    async with engine(**config) as e:
        params = SamplingParams(
            max_tokens=70, temperature=0, grammar=GrammarSpec("regex", "([0-9]{8} ){7}")
        )
        replies = await asyncio.gather(
            *(texts_of(e, params, f"Numbers of row {i}: ") for i in range(5))
        )
        assert e.stats.retractions > 0
        for (text,), ends in replies:
            assert re.fullmatch("([0-9]{8} ){7}", text) and ends == ["stop"]


class Deaf:
    """A compiled grammar that allows every token and then accepts none."""

    is_terminated = False

    def matcher(self):
        return self

    def fill_masks(self, matchers, table, rows):
        table[rows] = -1
        return [True] * len(rows)

    def accept(self, token):
        return False


async def test_a_grammar_that_gives_up_fails_its_request_alone(engine):
    async with engine() as e:
        good = await e.compile_grammar(GrammarSpec("regex", "[a-z]{5}"))
        tokens = await e.encode("1 2 3")
        params = SamplingParams(max_tokens=20)
        streams = [
            e.submit(tokens, params, grammar=grammar)
            for grammar in (good, replace(good, compiled=Deaf()))
        ]
        text = "".join([output.text async for output in streams[0]])
        assert re.fullmatch("[a-z]{5}", text)
        with pytest.raises(EngineError):
            async for _ in streams[1]:
                pass
