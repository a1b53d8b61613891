"""What structured output costs: throughput with a schema on every request against none, the time of
masks, and what hostile sources do to another stream.

    python benchmarks/grammar.py [--rows 16] [--tokens 128] [--rounds 3] [--hostile]

Rounds with and without are taken in turns, so that their ratio means something on a shared machine.
The schema is an array that does not end, so that both give equally many tokens.
"""

import argparse
import asyncio
import itertools
import json
import statistics
import time

from stoker.engine import AsyncEngine, EngineConfig, GrammarSpec, SamplingParams
from stoker.engine.api.errors import StokerError

SCHEMA = {
    "type": "array",
    "minItems": 500,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "kind": {"enum": ["cat", "dog", "bird"]},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 4},
        },
        "required": ["name", "age", "kind", "tags"],
        "additionalProperties": False,
    },
}
NESTED = '{"type":"array","items":' * 150 + "{}" + "}" * 150
HOSTILE = [
    GrammarSpec("json_schema", NESTED),
    GrammarSpec("json_schema", json.dumps({"enum": [f"value {i}" for i in range(100_000)]})),
    GrammarSpec("json_schema", json.dumps({"properties": {f"p{i}": {} for i in range(5000)}})),
    GrammarSpec(
        "json_schema", json.dumps({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"})
    ),
    *(
        GrammarSpec("json_schema", json.dumps({"type": "string", "pattern": f"^({body})$"}))
        for body in ("|".join("x" * i + f"y{k}" for i in range(500)) for k in range(2))
    ),
    GrammarSpec("regex", "((a{1,999}){1,999}){1,999}"),
    GrammarSpec("regex", "|".join("x" * i + "y" for i in range(600))),
    GrammarSpec("regex", "(" * 5000 + ")" * 5000),
    GrammarSpec("ebnf", "root ::= " + "(" * 5000 + '"a"' + ")" * 5000),
]


async def consume(engine, prompt, params, grammar):
    """Run one request; the times of its outputs."""
    stream = engine.submit(prompt, params, grammar=grammar)
    return [time.perf_counter() async for _ in stream]


async def throughput(engine, args, grammar):
    """Output tokens a second of one batch."""
    params = SamplingParams(max_tokens=args.tokens, temperature=1.0, ignore_eos=True, seed=1)
    prompts = [
        await engine.encode(f"List of animals, number {i}, as JSON: ") for i in range(args.rows)
    ]
    began = time.perf_counter()
    await asyncio.gather(*(consume(engine, p, params, grammar) for p in prompts))
    return args.rows * args.tokens / (time.perf_counter() - began)


async def compare(engine, args):
    """Constrained against unconstrained throughput."""
    began = time.perf_counter()
    grammar = await engine.compile_grammar(GrammarSpec("json_schema", json.dumps(SCHEMA)))
    print(f"grammar compiled in {time.perf_counter() - began:.2f} s, worker's start included")
    for one in (None, grammar):
        await throughput(engine, args, one)
    rates = {"free": [], "constrained": []}
    before = engine.stats
    for _ in range(args.rounds):
        rates["free"].append(await throughput(engine, args, None))
        rates["constrained"].append(await throughput(engine, args, grammar))
    after = engine.stats
    free, constrained = (statistics.median(rates[name]) for name in rates)
    steps = args.rounds * args.tokens
    mask_s, num_masks = after.mask_s - before.mask_s, after.num_masks - before.num_masks
    print(f"free {free:.1f} tokens/s, constrained {constrained:.1f}: {constrained / free:.1%}")
    print(
        f"masks {1e3 * mask_s / steps:.2f} ms a step of {args.rows} rows, "
        f"{1e6 * mask_s / num_masks:.0f} us each"
    )


async def gaps(engine, args):
    """Inter-token latencies of one stream, s."""
    prompt = await engine.encode("The sea")
    params = SamplingParams(max_tokens=args.stream_tokens, ignore_eos=True, temperature=0)
    times = await consume(engine, prompt, params, None)
    return [b - a for a, b in itertools.pairwise(times)]


async def attack(engine, args):
    """A stream's latencies alone, and while hostile sources are compiled."""

    async def refuse(spec):
        began = time.perf_counter()
        try:
            await engine.compile_grammar(spec)
        except StokerError as error:
            return time.perf_counter() - began, str(error)[:90]
        return time.perf_counter() - began, "accepted"

    def p99(values):
        return sorted(values)[int(0.99 * len(values))] * 1e3

    await refuse(GrammarSpec("regex", "a"))  # the worker has started
    alone, under = [], []
    for i in range(args.rounds):
        alone += await gaps(engine, args)
        stream = asyncio.create_task(gaps(engine, args))
        await asyncio.sleep(0.2)
        # Each round's are new to the cache of refusals.
        specs = [GrammarSpec(s.kind, s.source + " " * (i + 1), param=s.param) for s in HOSTILE]
        results = await asyncio.gather(*map(refuse, specs))
        under += await stream
    for spent, reason in results:
        print(f"{spent:6.2f} s  {reason}")
    print(
        f"ITL p99 alone {p99(alone):.1f} ms, under attack {p99(under):.1f} ms: "
        f"{p99(under) / p99(alone) - 1:+.0%}"
    )


async def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--stream-tokens", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--grammar-backend", default="xgrammar")
    parser.add_argument("--hostile", action="store_true", help="measure the attack instead")
    args = parser.parse_args()
    config = EngineConfig(
        model=args.model,
        backend=args.backend,
        grammar_backend=args.grammar_backend,
        kv_tokens=32768,
    )
    async with await AsyncEngine.start(config) as engine:
        await (attack if args.hostile else compare)(engine, args)


asyncio.run(main())
