"""langchain-openai, instructor, pydantic-ai and llm: text, streams, forms, tools."""

import asyncio
import json
import os
import subprocess
import sys

import pytest
from pydantic import BaseModel


class City(BaseModel):
    """A city."""

    name: str
    is_capital: bool


QUESTION = "What is the capital of France?"


# --- langchain-openai ---


@pytest.fixture
def langchain(url, model):
    langchain_openai = pytest.importorskip("langchain_openai")
    return langchain_openai.ChatOpenAI(
        base_url=url + "/v1", api_key="none", model=model, temperature=0, max_tokens=150
    )


def test_langchain(langchain):
    answer = langchain.invoke(QUESTION)
    assert "Paris" in answer.content
    assert answer.usage_metadata["output_tokens"] > 0
    assert "".join(chunk.content for chunk in langchain.stream(QUESTION)) == answer.content
    assert [a.content for a in langchain.batch([QUESTION] * 3)] == [answer.content] * 3


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_forms(langchain, method):
    answer = langchain.with_structured_output(City, method=method).invoke(QUESTION)
    assert isinstance(answer, City)


def test_langchain_tools(langchain):
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool

    @tool
    def weather(city: str) -> str:
        """The weather of a city."""
        return f"sunny in {city}"

    bound = langchain.bind_tools([weather], tool_choice="weather")
    question = HumanMessage("How is the weather in Paris?")
    answer = bound.invoke([question])
    [call] = answer.tool_calls
    assert call["name"] == "weather"
    result = ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])
    assert langchain.invoke([question, answer, result]).content


# --- instructor ---


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON", "JSON_SCHEMA"])
def test_instructor(url, model, mode):
    instructor = pytest.importorskip("instructor")
    openai = pytest.importorskip("openai")
    client = instructor.from_openai(
        openai.OpenAI(base_url=url + "/v1", api_key="none"), mode=instructor.Mode[mode]
    )
    options = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION + " Name it."}],
        "temperature": 0,
        "max_tokens": 200,
    }
    if mode == "JSON":  # any object: the small model need not find the right one
        with pytest.raises(Exception, match=r"(?i)valid|retr|finish|length"):
            client.create(response_model=City, max_retries=0, **options)
        return
    city = client.create(response_model=City, max_retries=0, **options)
    assert isinstance(city, City)
    parts = list(client.create_partial(response_model=City, max_retries=0, **options))
    assert isinstance(parts[-1].name, str)  # the form has another name here, so another answer


# --- pydantic-ai ---


@pytest.fixture
def pydantic_ai_model(url, model):
    pytest.importorskip("pydantic_ai")
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    return OpenAIChatModel(model, provider=OpenAIProvider(base_url=url + "/v1", api_key="none"))


SETTINGS = {"temperature": 0, "max_tokens": 150}


def test_pydantic_ai(pydantic_ai_model):
    from pydantic_ai import Agent

    agent = Agent(pydantic_ai_model, model_settings=SETTINGS)
    result = agent.run_sync(QUESTION)
    assert "Paris" in result.output
    assert result.usage.output_tokens > 0

    async def stream():
        async with agent.run_stream(QUESTION) as running:
            return [piece async for piece in running.stream_text(delta=True)]

    assert "".join(asyncio.run(stream())) == result.output


def test_pydantic_ai_forms(pydantic_ai_model):
    from pydantic_ai import Agent, NativeOutput

    for output in (City, NativeOutput(City)):  # through a required tool, and by json_schema
        agent = Agent(pydantic_ai_model, output_type=output, model_settings=SETTINGS)
        assert isinstance(agent.run_sync(QUESTION).output, City)


# --- llm ---


@pytest.fixture
def llm_command(url, model, tmp_path):
    pytest.importorskip("llm")
    entry = f"- model_id: here\n  model_name: {model}\n  api_base: {url}/v1\n"
    entry += "  supports_schema: true\n  supports_tools: true\n"
    (tmp_path / "extra-openai-models.yaml").write_text(entry)

    def run(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "llm", *arguments],
            env={**os.environ, "LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "none"},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        ).stdout

    return run


def test_llm(llm_command):
    options = ("-m", "here", "-o", "temperature", "0", "-o", "max_tokens", "30")
    answer = llm_command(QUESTION, *options)
    assert "Paris" in answer
    assert llm_command(QUESTION, *options, "--no-stream") == answer


def test_llm_forms(llm_command):
    options = ("-m", "here", "-o", "temperature", "0", "--schema", "name, population int")
    value = json.loads(llm_command(QUESTION, *options))
    assert set(value) == {"name", "population"}
    assert type(value["population"]) is int
