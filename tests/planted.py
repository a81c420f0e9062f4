"""Models whose heads hide an answer: noisy copies of a few heads, in groups that do not lie side by side, each copy in a basis of its own."""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from headrank.config import ModelConfig
from headrank.model import Decoder, new_decoder

HIDDEN = (((0, 3), (1, 4), (2, 5)), ((0, 5), (1, 3), (2, 4)))  # groups of each layer
CONFIG = ModelConfig(kind="mha", n_layer=2, n_head=6, d_head=10, d_model=43, d_mlp=37, vocab_size=19, context=31)


def random_rotation(size: int, generator: torch.Generator) -> Tensor:
    return torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0]


def phase_turn(size: int, generator: torch.Generator) -> Tensor:
    """A rotation within each pair (i, i + size/2), the only ones that a rotary embedding lets pass."""
    angle = 6.28 * torch.rand(size // 2, generator=generator, dtype=torch.float64)
    c, s = angle.cos().diag(), angle.sin().diag()
    return torch.cat((torch.cat((c, s), 1), torch.cat((-s, c), 1)))


def planted_decoder(*, noise: float, copies_of_queries: bool = False, seed: int = 0) -> Decoder:
    """Heads of a hidden group have the same keys and the same W_V W_O but for noise, in turned bases; keys of other sizes too."""
    generator = torch.Generator().manual_seed(seed)
    model = new_decoder(CONFIG, seed=seed)
    H, D, d = CONFIG.n_head, CONFIG.d_head, CONFIG.d_model

    def near(matrix: Tensor) -> Tensor:
        return matrix + noise * matrix.std() * torch.randn(matrix.shape, generator=generator, dtype=torch.float64)

    for block, groups in zip(model.blocks, HIDDEN, strict=True):
        attn = block.attn
        Q = attn.c_q.weight.detach().double().view(H, D, d)
        K, V = (getattr(attn, name).weight.detach().double().view(H, D, d) for name in ("c_k", "c_v"))
        O = 4 * attn.c_proj.weight.detach().double().T.reshape(H, D, d)  # noqa: E741
        for group in groups:
            q, k, v, o = Q[group[0]].clone(), K[group[0]].clone(), V[group[0]].clone(), O[group[0]].clone()
            for number, head in enumerate(group):
                turn, mix = phase_turn(D, generator), random_rotation(D, generator)
                own = q if copies_of_queries else Q[head]
                Q[head], K[head] = turn.T @ own, (1 + number) * turn.T @ near(k)
                V[head], O[head] = mix.T @ near(v), mix.T @ near(o)
        with torch.no_grad():
            attn.c_q.weight.copy_(Q.flatten(0, 1))
            attn.c_k.weight.copy_(K.flatten(0, 1))
            attn.c_v.weight.copy_(V.flatten(0, 1))
            attn.c_proj.weight.copy_(O.flatten(0, 1).T)
    with torch.no_grad():
        model.lm_head.weight.mul_(3)  # decided enough that its own text is far from random
    return model.eval().requires_grad_(False)


def write_decoder(model: Decoder, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(model.config.to_json())
    save_file({name: p.detach().float().contiguous() for name, p in model.named_parameters()}, folder / "model.safetensors")
    return folder


def own_text(model: Decoder, *, n_sequences: int, length: int, seed: int = 0) -> Tensor:
    """Sequences drawn from the model, [n, length]: no other model is expected to have a lower loss on them."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(model.config.vocab_size, (n_sequences, 1), generator=generator)
    while ids.shape[1] < length:
        ids = torch.cat((ids, torch.multinomial(model(ids)[:, -1].softmax(-1), 1, generator=generator)), 1)
    return ids


def changed(model: Decoder, change: Callable[[Decoder], None]) -> Decoder:
    """A copy of a decoder with its weights changed in place."""
    copy = Decoder(model.config)
    copy.load_state_dict(model.state_dict())
    copy.requires_grad_(False)
    change(copy)
    return copy.eval()
