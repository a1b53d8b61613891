"""openai's own client: chat, completions, parse, stream, tools; plain and asyncio."""

import asyncio
import json

import pytest
from pydantic import BaseModel

openai = pytest.importorskip("openai")


QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


class City(BaseModel):
    """An answer with a form."""

    name: str
    is_capital: bool
    population_millions: int


class Weather(BaseModel):
    """Look up the weather of a city."""

    city: str
    unit: str


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def test_models(client, model):
    assert model in [card.id for card in client.models.list()]
    assert client.models.retrieve(model).id == model


def test_chat(client, model):
    reply = client.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, max_completion_tokens=20, logprobs=True
    )
    assert "Paris" in reply.choices[0].message.content
    assert reply.usage.completion_tokens == len(reply.choices[0].logprobs.content)
    assert reply._request_id
    stream = client.chat.completions.create(
        model=model,
        messages=QUESTION,
        temperature=0,
        max_completion_tokens=20,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == reply.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == reply.usage.completion_tokens


def test_completions(client, model):
    options = {"model": model, "prompt": ["One, two,", "A, B,"], "temperature": 0, "max_tokens": 8}
    reply = client.completions.create(**options, logprobs=2, echo=True)
    assert [choice.index for choice in reply.choices] == [0, 1]
    assert reply.choices[0].text.startswith("One, two,")
    assert len(reply.choices[1].logprobs.tokens) == len(reply.choices[1].logprobs.top_logprobs)
    pieces = ["", ""]
    for chunk in client.completions.create(**options, echo=True, stream=True):
        for choice in chunk.choices:
            pieces[choice.index] += choice.text
    assert pieces == [choice.text for choice in reply.choices]


def test_errors(client, model):
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="no-such", messages=QUESTION)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=model, messages=QUESTION, temperature=9, stream=True)
    assert bad.value.param == "temperature"


def test_parse(client, model):
    options = {"model": model, "messages": QUESTION, "temperature": 0, "max_completion_tokens": 200}
    reply = client.chat.completions.parse(**options, response_format=City)
    city = reply.choices[0].message.parsed
    assert isinstance(city, City)
    assert city.model_dump_json()
    with client.chat.completions.stream(**options, response_format=City) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == city
    assert "content.delta" in events
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(
            **{**options, "max_completion_tokens": 3}, response_format=City
        )


@pytest.mark.parametrize("choice", ["required", "named"])
def test_tools(client, model, choice):
    tool = openai.pydantic_function_tool(Weather)
    named = {"type": "function", "function": {"name": "Weather"}}
    options = {
        "model": model,
        "messages": [{"role": "user", "content": "How is the weather in Paris?"}],
        "tools": [tool],
        "tool_choice": "required" if choice == "required" else named,
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_completion_tokens": 200,
    }
    reply = client.chat.completions.parse(**options)
    [call] = reply.choices[0].message.tool_calls
    assert call.function.name == "Weather"
    assert isinstance(call.function.parsed_arguments, Weather)
    with client.chat.completions.stream(**options) as stream:
        final = stream.get_final_completion()
    [streamed] = final.choices[0].message.tool_calls
    assert json.loads(streamed.function.arguments) == json.loads(call.function.arguments)
    history = [
        *options["messages"],
        reply.choices[0].message.model_dump(exclude_none=True, exclude={"parsed"}),
        {"role": "tool", "tool_call_id": call.id, "content": "sunny, 20 degrees"},
    ]
    answer = client.chat.completions.create(
        model=model, messages=history, tools=[tool], max_completion_tokens=20, temperature=0
    )
    assert answer.choices[0].finish_reason


def test_async(url, model):
    async def work():
        async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none") as client:
            replies = await asyncio.gather(
                *(
                    client.chat.completions.create(
                        model=model, messages=QUESTION, temperature=0, max_completion_tokens=12
                    )
                    for _ in range(8)
                )
            )
            texts = {reply.choices[0].message.content for reply in replies}
            stream = await client.chat.completions.create(
                model=model, messages=QUESTION, temperature=0, max_tokens=100, stream=True
            )
            async for _ in stream:
                break  # leaving closes the connection, which ends the work
            await stream.close()
            return texts

    texts = asyncio.run(work())
    assert len(texts) == 1
