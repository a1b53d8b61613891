"""Real weights through the whole engine: the tokens are those that transformers gave."""

from stoker.engine import Engine, EngineConfig, SamplingParams


def test_smollm2_in_a_batch_in_chunks_retracted_and_cached(smollm2, smollm2_greedy):
    """All recorded prompts twice at once, in chunks, with a pool that cannot hold them all."""
    items = smollm2_greedy
    prompts = [item["prompt_ids"] for item in items]
    expected = [item["output_ids"] for item in items]
    longest = max(map(len, prompts)) + 64
    config = EngineConfig(
        model="smollm2-135m",
        dtype="float32",
        max_running_requests=32,
        chunked_prefill_size=48,
        kv_tokens=longest // 16 * 16 * 8,
        schedule_conservativeness=0.1,  # admits more than fit, so that some are retracted
        check=True,
    )
    with Engine(config) as engine:
        greedy = SamplingParams(temperature=0, max_tokens=64)
        done = engine.generate(prompts + prompts, greedy)
        assert [c.token_ids for c in done] == expected + expected
        assert engine.engine.stats.retractions > 0
        for _ in range(2):  # the second time out of the cache, whatever was evicted before
            again = engine.generate(prompts[:1], greedy)[0]
            assert again.token_ids == expected[0]
        assert again.num_cached == (len(prompts[0]) - 1) // 16 * 16


def test_a_second_turn_reuses_the_first(smollm2):
    with Engine(model="smollm2-135m", dtype="float32") as engine:
        turns = [{"role": "user", "content": "Name a fruit."}]
        params = SamplingParams(temperature=0, max_tokens=12)
        first = engine.chat(turns, params)
        turns.append({"role": "assistant", "content": first.text})
        turns.append({"role": "user", "content": "And a vegetable?"})
        second = engine.chat(turns, params)
        # The answer's text may be tokenized in another way, so only the prompt's pages are certain.
        assert first.num_prompt // 16 * 16 <= second.num_cached < second.num_prompt
