"""Write smollm2_loglikelihoods_fp32.json: what transformers says of some continuations.

python tests/data/make_smollm2_loglikelihoods.py
"""

import json
from pathlib import Path

import torch
import transformers

from stoker.engine.runtime import gguf_weights, model_files

PAIRS = [
    ("The capital of France is", [" Paris", " London", " a large, old city by the river Seine."]),
    ("Q: Two plus two is?\nA:", [" 4", " 5", " four"]),
    ("A kilometre is a thousand", [" metres", " grams of sugar and salt"]),
    ("Die Hauptstadt von Österreich ist", [" Wien", " 東京 😀"]),
    ("def add(a, b):\n    return", [" a + b", " a * b\n"]),
    ("Rivers run to the sea. " * 6 + "And yet it is not full.", [" Rivers", " Mountains rise"]),
]


def main():
    files = model_files.resolve("smollm2-135m")
    where = {"pretrained_model_name_or_path": files.path.parent, "gguf_file": files.path.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(**where), dtype=torch.float32
    ).eval()
    tensors = dict(gguf_weights.from_gguf(files.gguf, files.config, torch.float32))
    result = model.load_state_dict(tensors, strict=False)
    assert result.missing_keys in ([], ["lm_head.weight"]) and not result.unexpected_keys
    model.tie_weights()
    items = []
    for context, continuations in PAIRS:
        for continuation in continuations:
            context_ids = tokenizer.encode(context, add_special_tokens=False)
            ids = tokenizer.encode(context + continuation, add_special_tokens=False)
            assert ids[: len(context_ids)] == context_ids
            with torch.no_grad():
                logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            rows = range(len(context_ids) - 1, len(ids) - 1)
            items.append(
                {
                    "context": context,
                    "continuation": continuation,
                    "context_ids": context_ids,
                    "continuation_ids": ids[len(context_ids) :],
                    "loglikelihood": sum(logprobs[i, ids[i + 1]].item() for i in rows),
                    "is_greedy": all(logprobs[i].argmax().item() == ids[i + 1] for i in rows),
                }
            )
    about = {"model": "smollm2-135m", "transformers": transformers.__version__}
    file = Path(__file__).with_name("smollm2_loglikelihoods_fp32.json")
    file.write_text(json.dumps({**about, "items": items}, ensure_ascii=False, indent=1) + "\n")


if __name__ == "__main__":
    main()
