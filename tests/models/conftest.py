"""A minimal serving loop: steps over a paged cache, as the runner makes them."""

import random
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from stoker.backends.api import BatchMeta, LayerCache, LayerState
from stoker.backends.cpu.torch_ops import TorchOps
from stoker.engine.models.decoder import Decoder
from stoker.engine.runtime.kv_buffers import with_states

sys.path.insert(0, str(Path(__file__).parent))

SHAPE = dict(
    vocab_size=300,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    initializer_range=0.15,
    tie_word_embeddings=False,
)


class Loop:
    """Runs a model on rows whose pages lie scattered over the pool."""

    def __init__(self, model: Decoder, num_slots: int, max_len: int, page_size: int = 3):
        dtype = torch.float32
        self.model, self.page_size = model, page_size
        max_pages = -(-max_len // page_size)
        pages = list(range(num_slots * max_pages))
        random.Random(0).shuffle(pages)
        self.block_table = torch.tensor(pages, dtype=torch.int32).view(num_slots, max_pages)
        self.caches = [
            LayerCache(*(torch.zeros(len(pages), page_size, h, d, dtype=dtype) for d in dims))
            for h, *dims in model.kv_spec
        ]
        self.caches = with_states(
            self.caches, model.state_spec, num_slots, dtype, torch.device("cpu")
        )
        self.lens = [0] * num_slots
        self._snapshots: dict[tuple[int, int], list[torch.Tensor]] = {}

    @property
    def _states(self) -> list[torch.Tensor]:
        return [x for cache in self.caches if isinstance(cache, LayerState) for x in cache]

    def hit(self, slot: int, other: int, num_pages: int) -> int:
        """A slot begins with another's first pages; how many tokens those are.

        If the model has states, the other's last step must have ended there.
        """
        self.block_table[slot, :num_pages] = self.block_table[other, :num_pages]
        self.lens[slot] = num_pages * self.page_size
        if self._states:
            for state, kept in zip(
                self._states, self._snapshots[other, self.lens[slot]], strict=True
            ):
                state[slot] = kept
        return self.lens[slot]

    @torch.inference_mode()
    def step(self, rows: Sequence[tuple[int, Sequence[int]]]) -> list[torch.Tensor]:
        """New tokens of some slots to their logits, [q_len, vocab] each."""
        rows = sorted(rows, key=lambda row: len(row[1]) > 1)  # decode rows come first
        q_lens = np.array([len(tokens) for _, tokens in rows], np.int32)
        starts = [self.lens[slot] for slot, _ in rows]
        positions = torch.cat(
            [torch.arange(s, s + int(n)) for s, n in zip(starts, q_lens, strict=True)]
        )
        out_slots = []
        for (slot, tokens), start in zip(rows, starts, strict=True):
            for at in range(start, start + len(tokens)):
                page = int(self.block_table[slot, at // self.page_size])
                out_slots.append(page * self.page_size + at % self.page_size)
            self.lens[slot] += len(tokens)
        qo_indptr = np.concatenate(([0], q_lens.cumsum())).astype(np.int32)
        kv_lens = np.array([self.lens[slot] for slot, _ in rows], np.int32)
        meta = BatchMeta(
            num_rows=len(rows),
            num_tokens=int(q_lens.sum()),
            num_decode_rows=int((q_lens == 1).sum()),
            page_size=self.page_size,
            qo_indptr=torch.from_numpy(qo_indptr),
            kv_lens=torch.from_numpy(kv_lens),
            slots=torch.tensor([slot for slot, _ in rows], dtype=torch.int32),
            block_table=self.block_table,
            positions=positions,
            out_slots=torch.tensor(out_slots),
            logit_tokens=torch.arange(int(q_lens.sum())),
            qo_indptr_cpu=qo_indptr,
            kv_lens_cpu=kv_lens,
            max_kv_len=int(kv_lens.max()),
        )
        tokens = torch.tensor([t for _, row in rows for t in row])
        hidden = self.model.forward(tokens, meta, self.caches)
        for slot, _ in rows:
            kept = [state[slot].clone() for state in self._states]
            self._snapshots[slot, self.lens[slot]] = kept
        logits = self.model.logits(hidden).split([int(n) for n in q_lens])
        by_slot = {slot: x for (slot, _), x in zip(rows, logits, strict=True)}
        return [by_slot[slot] for slot in sorted(by_slot)]

    def greedy(
        self, prompts: Sequence[Sequence[int]], num_new: Sequence[int], chunk: int = 1 << 30
    ) -> list[list[int]]:
        """Greedy tokens of all prompts in one changing batch, prompts in chunks."""
        pending = {slot: list(prompt) for slot, prompt in enumerate(prompts)}
        outputs: list[list[int]] = [[] for _ in prompts]
        while pending:
            rows = [(slot, tokens[:chunk]) for slot, tokens in pending.items()]
            logits = self.step(rows)
            for (slot, tokens), row in zip(rows, logits, strict=True):
                rest = pending[slot][len(tokens) :]
                if not rest:
                    rest = [int(row[-1].argmax())]
                    outputs[slot].append(rest[0])
                pending[slot] = rest
                if len(outputs[slot]) == num_new[slot]:
                    del pending[slot]
        return outputs


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Tiny products only get slower by waiting for a second thread."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def loop():
    """Makes a loop of a model: loop(model, num_slots, max_len, page_size)."""
    return Loop


@pytest.fixture(scope="session")
def float32_model():
    """Makes an empty float32 model on the CPU of a config."""
    return lambda config: Decoder(config, TorchOps(), torch.device("cpu"), torch.float32)


@pytest.fixture(scope="session")
def shape():
    """Fields of the models' configs, where a case has no others."""
    return SHAPE


@pytest.fixture(scope="session")
def make_hf_model():
    """Makes a random transformers model of a family: (name, fields of its config)."""
    return hf_model


@pytest.fixture(scope="session")
def save_model():
    """Saves a transformers model so that an engine can load it, with a tokenizer of bytes."""

    def save(hf: torch.nn.Module, folder: Path) -> None:
        hf.save_pretrained(folder)
        (folder / "generation_config.json").unlink()
        words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map(str, range(10, 54))]
        tokenizer = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[]))
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.save(str(folder / "tokenizer.json"))

    return save


def hf_model(family: str, fields: dict) -> torch.nn.Module:
    """Random, with norms and biases that matter, and answers that are not ties."""
    is_text = family in ("Gemma3", "Qwen3_5", "Qwen3_5Moe")
    config_class = getattr(transformers, f"{family}{'Text' * is_text}Config")
    config = config_class(**(SHAPE | fields), bos_token_id=1, eos_token_id=2, pad_token_id=0)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    for name, parameter in (*model.named_parameters(), *model.named_buffers()):
        if (parameter.ndim == 1 and "inv_freq" not in name) or "norm" in name or "bias" in name:
            parameter.data += 0.3 * torch.randn_like(parameter)
    return model
