"""The decoder of arXiv 2601.11471, which is nanochat's: RMS norms without gain, relu squared, no biases, untied embeddings."""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrank.config import ModelConfig
from headrank.model.attention import Attention, Probe, rotary_table


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.d_model, config.d_mlp, bias=False)
        self.c_proj = nn.Linear(config.d_mlp, config.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.relu(self.c_fc(x)).square())


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attn = Attention(config, layer)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None, probe: Probe | None) -> Tensor:
        x = x + self.attn(_norm(x), rotary, mask, probe)
        return x + self.mlp(_norm(x))

    @property
    def device(self) -> torch.device:
        """Where its parameters lie."""
        return self.mlp.c_fc.weight.device


class Decoder(nn.Module):
    """A causal language model. Parameter names are nanochat's."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.d_model, _weight=torch.empty(config.vocab_size, config.d_model)),  # random ones cost a second
                "h": nn.ModuleList(Block(config, layer) for layer in range(config.n_layer)),
            }
        )
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: [B, T] ids. Returns logits [B, T, vocab_size] in float32, softly capped at 15 as nanochat's are."""
        logits = self.lm_head(_norm(self.hidden(tokens))).float()
        return 15 * torch.tanh(logits / 15)

    def hidden(self, tokens: Tensor, *, valid: Tensor | None = None, probe: Probe | None = None, last_layer: int | None = None) -> Tensor:
        """The residual stream [B, T, d_model] after the last layer, or after `last_layer`'s attention and nothing behind it.

        tokens: [B, T] ids. valid: [B, T], False where a token is padding, on either side. probe sees every layer's attention.
        Blocks may lie on several devices: what they take is moved to theirs.
        """
        embedding = cast(nn.Embedding, self.transformer["wte"])
        x = _norm(embedding(tokens.to(embedding.weight.device)))
        rotary = rotary_table(self.config, tokens.shape[1], device=x.device, dtype=x.dtype)
        mask = None if valid is None else attention_mask(valid.to(x.device))
        for block in self.blocks:
            if x.device != block.device:
                x, rotary = x.to(block.device), (rotary[0].to(block.device), rotary[1].to(block.device))
                mask = None if mask is None else mask.to(block.device)
            if block.attn.layer == last_layer:
                return x + block.attn(_norm(x), rotary, mask, probe)
            x = block(x, rotary, mask, probe)
        return x

    def output_projection(self, layer: int) -> Tensor:
        """W_O of a layer, [H, d_head, d_model]: what a head's output is multiplied with."""
        attn = self.blocks[layer].attn
        return attn.c_proj.weight.T.unflatten(0, (self.config.n_head, self.config.d_head))

    @property
    def blocks(self) -> list[Block]:
        return list(cast(nn.ModuleList, self.transformer["h"]))  # type: ignore[arg-type]


def attention_mask(valid: Tensor) -> Tensor:
    """valid: [B, T]. Returns [B, 1, T, T]: which query may see which key: causal, no padding, itself always (so that no row is empty)."""
    T = valid.shape[1]
    causal = torch.ones(T, T, dtype=torch.bool, device=valid.device).tril()
    itself = torch.eye(T, dtype=torch.bool, device=valid.device)
    return (causal & valid[:, None, None, :]) | itself


def _norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],))
