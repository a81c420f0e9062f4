"""Our own checkpoints with other heads: the weights of a smaller model from those of plain heads, and the folder that holds it."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from headrank.architectures import AttentionLayer
from headrank.checkpoints import Checkpoint
from headrank.config import MODEL_TYPE, ModelConfig
from headrank.errors import HeadrankError
from headrank.merging import Heads
from headrank.output import replace_atomically

RECORD = "merged.json"  # marks a folder as one that may be replaced


@dataclass(frozen=True)
class Rewritten:
    """A model that has the checkpoint's tensors but for some of its own."""

    config: ModelConfig
    checkpoint: Checkpoint
    own: Mapping[str, Tensor]

    def read(self, name: str) -> Tensor:
        """One named tensor."""
        return self.own[name] if name in self.own else self.checkpoint.read(name)


def plain_config(checkpoint: Checkpoint) -> ModelConfig:
    """The geometry of a checkpoint of ours whose heads are plain. Raises HeadrankError for any other."""
    config = checkpoint.config
    what = f"kind {config.get('kind')}" if config.get("model_type") == MODEL_TYPE else f"model_type {config.get('model_type')!r}"
    if config.get("model_type") != MODEL_TYPE or config.get("kind") != "mha":
        raise HeadrankError(
            f"{checkpoint.path}: headrank try rewrites headrank's own checkpoints of kind mha, and this one is {what}\n"
            "Take the groups from headrank suggest, and merge with the tools of that model"
        )
    return ModelConfig.from_dict(config, where=f"{checkpoint.path}/{checkpoint.config_name}")


def grouped_config(config: ModelConfig, n_groups: int) -> ModelConfig:
    """The same geometry with fewer key-value heads."""
    return replace(config, kind="mqa" if n_groups == 1 else "gqa" if n_groups < config.n_head else "mha", n_kv_head=n_groups)


def thinned_config(config: ModelConfig, n_head: int) -> ModelConfig:
    """The same geometry with fewer heads."""
    return replace(config, n_head=n_head, n_kv_head=n_head)


def rewritten(checkpoint: Checkpoint, config: ModelConfig, layers: tuple[AttentionLayer, ...], heads: Callable[[AttentionLayer], Heads]) -> Rewritten:
    """The model of that geometry whose attention has these heads, float32, and the checkpoint's tensors elsewhere."""
    own = {name: matrix for layer in layers for name, matrix in _matrices(layer, heads(layer))}
    return Rewritten(config, checkpoint, own)


def _matrices(layer: AttentionLayer, heads: Heads) -> Iterator[tuple[str, Tensor]]:
    """Linear weights, out × in: rows of c_q, c_k, c_v a head after the other, columns of c_proj likewise."""
    rows = {"c_q": heads.W_Q.flatten(0, 1), "c_k": heads.W_K, "c_v": heads.W_V}
    for name, matrices in rows.items():
        yield f"transformer.h.{layer.index}.attn.{name}.weight", matrices.transpose(1, 2).flatten(0, 1).float().contiguous()
    yield f"transformer.h.{layer.index}.attn.c_proj.weight", heads.W_O.flatten(0, 2).T.float().contiguous()


def check_free(folder: Path, *, force: bool) -> None:
    """Raises HeadrankError where a folder holds what a merged checkpoint must not replace."""
    if folder.is_dir() and any(folder.iterdir()) and not (folder / RECORD).is_file() and not force:
        raise HeadrankError(f"{folder}: not written by headrank try\nMove it, choose another folder with -o DIR, or pass --force to write there")
    if folder.exists() and not folder.is_dir():
        raise HeadrankError(f"{folder}: not a folder; choose another with -o DIR")


def write_checkpoint(model: Rewritten, folder: Path, record: dict[str, Any]) -> None:
    """Writes a model as a checkpoint of ours: config.json, model.safetensors, merged.json with how it was made, the tokenizer if there is one.

    Tensors that were not rewritten keep their type. The weights of an earlier one are taken away first, so that no config.json ever
    stands beside weights that it does not describe.
    """
    names = [name for name in model.checkpoint.tensors if name not in model.own]
    tensors = {**{name: model.checkpoint.read(name) for name in names}, **model.own}
    tokenizer = model.checkpoint.path / "tokenizer.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.safetensors").unlink(missing_ok=True)
        for name, text in ((RECORD, json.dumps(record, indent=1) + "\n"), ("config.json", model.config.to_json())):
            with replace_atomically(folder / name) as path:
                path.write_text(text, encoding="utf-8")
        if tokenizer.is_file():
            with replace_atomically(folder / tokenizer.name) as path:
                shutil.copyfile(tokenizer, path)
        with replace_atomically(folder / "model.safetensors") as path:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    except OSError as error:
        raise HeadrankError(f"{folder}: cannot be written: {error.strerror or error}; choose another folder with -o DIR") from None


def losses(model: Rewritten, ids: Tensor, *, device: torch.device, dtype: torch.dtype, batch_size: int) -> Tensor:
    """Mean cross entropy of each sequence in nats a token, [N] float64: every token but the first is predicted. ids: [N, T]."""
    from headrank.model import load_decoder

    decoder = load_decoder(model.config, model.read, names=model.checkpoint.tensors.keys(), device=device, dtype=dtype, where=str(model.checkpoint.path))
    found = []
    with torch.no_grad():
        for batch in ids.split(batch_size):
            batch = batch.to(device)
            logits = decoder(batch[:, :-1])
            each = torch.nn.functional.cross_entropy(logits.transpose(1, 2), batch[:, 1:], reduction="none")
            found.append(each.double().mean(1).cpu())
    return torch.cat(found)
