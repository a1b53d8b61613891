"""Traces: what a line says, and what is said of a wrong one."""

import json

import pytest

from stoker.engine.api.errors import StartError
from stoker.engine.simulate_load import LoadRequest, read_trace


def write(tmp_path, *rows):
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return file


GOOD = {"arrival_s": 1.5, "prompt_len": 10, "output_len": 4}


def test_a_line_is_a_request(tmp_path):
    tokens = {"arrival_s": 0, "prompt_tokens": [1, 2], "output_tokens": [3], "max_tokens": 9}
    options = {"priority": 2, "client": "a", "namespace": ["lora", "x"]}
    file = write(tmp_path, GOOD | {"prefix_ids": [7, 8]} | options, "", tokens)
    by_tokens, by_length = read_trace(file, block_size=5)  # by arrival
    assert by_tokens == LoadRequest(0.0, 2, 1, 9, block_size=5, prompt=(1, 2), output=(3,))
    options["namespace"] = ("lora", "x")
    assert by_length == LoadRequest(1.5, 10, 4, 4, (7, 8), 5, options=options)
    assert [r.max_tokens for r in read_trace(file, max_tokens=6)] == [9, 6]


def test_the_names_of_mooncake_traces(tmp_path):
    row = {"timestamp": 2500, "input_length": 600, "output_length": 5, "hash_ids": [0, 3], "x": 1}
    [request] = read_trace(write(tmp_path, row))
    assert request == LoadRequest(2.5, 600, 5, 5, (0, 3), 512)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("{", "Expecting"),
        ([], "want an object"),
        ({}, "arrival_s: want a number of 0 or more, got None"),
        (GOOD | {"arrival_s": -1}, "arrival_s: want a number of 0 or more, got -1"),
        (GOOD | {"arrival_s": True}, "arrival_s"),
        ({"timestamp": "x"}, "timestamp: want a number"),
        (GOOD | {"prompt_len": 0}, "prompt_len: want a positive integer, got 0"),
        (GOOD | {"prompt_len": 1.5}, "prompt_len"),
        ({"arrival_s": 0, "prompt_len": 3}, "output_len: want a positive integer, got None"),
        ({"arrival_s": 0, "output_len": 3}, "prompt_len: want a positive integer, got None"),
        (GOOD | {"prefix_ids": 5}, "prefix_ids: want a list of integers"),
        (GOOD | {"prefix_ids": [-1]}, "prefix_ids"),
        (GOOD | {"prompt_tokens": [1, "a"]}, "prompt_tokens: want a list of integers"),
        (GOOD | {"prompt_tokens": [1]}, "prompt_len: 10, but there are 1 prompt_tokens"),
        (GOOD | {"output_tokens": [1]}, "output_len: 4, but there are 1 output_tokens"),
        (GOOD | {"prompt_tokens": [1] * 10, "prefix_ids": [1]}, "prefix_ids: the prompt is given"),
        (GOOD | {"max_tokens": 3}, "max_tokens: 3 is less than output_len 4"),
        (GOOD | {"priority": "high"}, "priority: want a int, got 'high'"),
        (GOOD | {"namespace": "x"}, "namespace: want a list, got 'x'"),
    ],
)
def test_a_wrong_line_is_named_with_its_field(tmp_path, row, words):
    with pytest.raises(StartError) as caught:
        read_trace(write(tmp_path, GOOD, row))
    assert f"trace.jsonl, line 2: {words}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_are_no_traces(tmp_path):
    with pytest.raises(StartError, match="has no requests"):
        read_trace(write(tmp_path, "", ""))
    with pytest.raises(StartError, match="No such file"):
        read_trace(tmp_path / "none")
    file = tmp_path / "binary"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(StartError, match="binary"):
        read_trace(file)
