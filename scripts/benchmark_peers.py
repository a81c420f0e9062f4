"""GPT-2 small with random weights, through TransformerLens and nnsight: what scripts/benchmark.py --peers runs in their environments.

python scripts/benchmark_peers.py nnsight '{"path": "gpt2", "n_sequences": 8, "seq_len": 512}'

Each takes the attention scores and the heads' outputs of all layers the way its documentation does, and no more than these; the
inner products of heads are then taken pair by pair.
"""

from typing import Any

import torch
from benchmark_meter import Meter, main, weight_bytes
from torch import Tensor

TIMES = 3


def make_gpt2(path: str) -> dict[str, Any]:
    """A checkpoint of that size with random weights."""
    from transformers import GPT2Config, GPT2Model

    torch.manual_seed(0)
    GPT2Model(GPT2Config()).save_pretrained(path)
    return {}


def transformer_lens(path: str, n_sequences: int, seq_len: int) -> dict[str, Any]:
    """run_with_cache of scores and z. Its models are of its own making: of the same shapes, with random weights."""
    from transformer_lens import HookedTransformer, HookedTransformerConfig
    from transformers import GPT2Config

    meter = Meter()
    gpt2 = GPT2Config.from_pretrained(path)
    config = HookedTransformerConfig(
        n_layers=gpt2.n_layer,
        d_model=gpt2.n_embd,
        n_heads=gpt2.n_head,
        d_head=gpt2.n_embd // gpt2.n_head,
        d_mlp=4 * gpt2.n_embd,
        n_ctx=gpt2.n_positions,
        d_vocab=gpt2.vocab_size,
        act_fn="gelu_new",
        normalization_type="LN",
    )
    model = HookedTransformer(config)
    ids = torch.randint(0, gpt2.vocab_size, (n_sequences, seq_len))

    @torch.no_grad()
    def work() -> None:
        _, cache = model.run_with_cache(ids, return_type=None, names_filter=lambda name: name.endswith(("hook_attn_scores", "hook_z")))
        for layer, block in enumerate(model.blocks):
            scores = cache["attn_scores", layer].masked_fill(_future(seq_len), 0)
            _products(scores, cache["z", layer], block.attn.W_O)

    return {"seconds": meter.seconds(work, times=TIMES), "peak": meter.peak(), "weight_bytes": weight_bytes(model)}


def nnsight(path: str, n_sequences: int, seq_len: int) -> dict[str, Any]:
    """A trace that saves queries, keys and values and what enters the output projection."""
    from nnsight import NNsight
    from transformers import GPT2Model

    meter = Meter()
    gpt2 = GPT2Model.from_pretrained(path, attn_implementation="sdpa")
    model = NNsight(gpt2)
    H, D = gpt2.config.n_head, gpt2.config.n_embd // gpt2.config.n_head
    ids = torch.randint(0, gpt2.config.vocab_size, (n_sequences, seq_len))

    @torch.no_grad()
    def work() -> None:
        qkv, z = [], []
        with model.trace(ids, use_cache=False):
            for block in model.h:
                qkv.append(block.attn.c_attn.output.save())
                z.append(block.attn.c_proj.input.save())
        for layer, block in enumerate(gpt2.h):
            q, k, _ = (part.unflatten(2, (H, D)).transpose(1, 2) for part in qkv[layer].chunk(3, 2))
            scores = (q @ k.transpose(2, 3) * D**-0.5).masked_fill(_future(seq_len), 0)
            _products(scores, z[layer].unflatten(2, (H, D)), block.attn.c_proj.weight.unflatten(0, (H, D)))

    return {"seconds": meter.seconds(work, times=TIMES), "peak": meter.peak(), "weight_bytes": weight_bytes(gpt2)}


def _future(T: int) -> Tensor:
    return torch.ones(T, T, dtype=torch.bool).triu(1)


def _products(scores: Tensor, z: Tensor, W_O: Tensor) -> tuple[Tensor, Tensor]:
    """Gram matrices [H, H] of scores [B, H, T, T], 0 after the query and centred over the keys before it, and of outputs z_h W_O^h."""
    T = scores.shape[2]
    mean = scores.sum(3, keepdim=True) / torch.arange(1, T + 1)[:, None]
    centred = (scores - mean).masked_fill(_future(T), 0)
    outputs = [z[:, :, h] @ W_O[h] for h in range(len(W_O))]
    return _gram([centred[:, h] for h in range(len(W_O))]), _gram([output - output.mean((0, 1)) for output in outputs])


def _gram(heads: list[Tensor]) -> Tensor:
    flat = [head.flatten() for head in heads]
    gram = torch.empty(len(flat), len(flat))
    for i, one in enumerate(flat):
        for j, other in enumerate(flat[: i + 1]):
            gram[i, j] = gram[j, i] = one @ other
    return gram


if __name__ == "__main__":
    main({job.__name__: job for job in (make_gpt2, transformer_lens, nnsight)})
