"""Every schema is honoured in 20 sampled outputs, or refused with a pointer."""

import json

import jsonschema
import pytest

from stoker.engine.api.errors import RequestError

from .schema_cases import ACCEPTED, REFUSED

NUM_SAMPLES = 20


def _check(schema, texts):
    validator = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    for text in texts:
        assert text is not None, "an output did not end"
        try:
            validator.validate(json.loads(text))
        except (ValueError, jsonschema.ValidationError) as error:
            raise AssertionError(f"{text!r}: {error}") from error


@pytest.mark.parametrize("name", ACCEPTED)
def test_sampled_outputs_satisfy_the_schema(name, compiled, random_model):
    schema = ACCEPTED[name]
    grammar = compiled("json_schema", json.dumps(schema))
    texts = [random_model.sample(grammar.matcher(), seed) for seed in range(NUM_SAMPLES)]
    _check(schema, texts)


@pytest.mark.parametrize("library", ["xgrammar", "llguidance"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_enforced_is_refused_with_its_pointer(name, library, compiled):
    schema, pointer = REFUSED[name]
    with pytest.raises(RequestError) as error:
        compiled("json_schema", json.dumps(schema), library)
    assert error.value.status == 400
    assert f" {pointer}" in error.value.message
