"""From a checkpoint's names, shapes and configuration to an Architecture."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrank.architectures.facts import Facts
from headrank.architectures.layout import Architecture, AttentionLayer
from headrank.architectures.stack import PACKED, Stack, find_stack
from headrank.architectures.table import EXAMPLE, Row, families, read_layout
from headrank.checkpoints import Checkpoint
from headrank.config import MODEL_TYPE, ModelConfig
from headrank.errors import HeadrankError

ATTENTION_LIKE = re.compile(r"(^|[._])att|attn|attention|qkv|kqv|query|key|value|[._](q|k|v|o)[._]|wq|wk|wv|wo\b", re.IGNORECASE)
BUFFERS = re.compile(r"(weight_scale(_inv)?|input_scale|(attn|attention)\.(masked_)?bias|inv_freq|position_ids|relative_position_index)$")
COUNTLESS = {"BOOL", "I64", "I32"}  # masks and indices
PARTS = {"text": ("text_config", "llm_config", "language_config"), "vision": ("vision_config",)}


def describe(checkpoint: Checkpoint, *, layout: Path | None = None, part: str = "text") -> Architecture:
    """What the tensors of a checkpoint mean; no tensor is read.

    layout: a TOML file in the form of families.toml, for an architecture that the table does not have.
    part: "text" or "vision" of a multimodal model.
    Raises HeadrankError on an unknown family, and where the configuration and the tensors contradict each other.
    """
    view = _view(checkpoint, part)
    if view.config.get("model_type") == MODEL_TYPE:
        ModelConfig.from_dict(dict(view.config), where=view.where)
    rows = [read_layout(layout)] if layout is not None else _candidates(checkpoint, view)
    for row in rows:
        facts = {group: Facts(view.config, stack, where=view.where, nested=view.nested) for group, stack in row.stacks.items()}
        stacks = [find_stack(checkpoint, stack, facts[group], group) for group, stack in row.stacks.items()]
        found = [stack for stack in stacks if stack is not None]
        if found and len(found) == len(stacks):
            return _architecture(checkpoint, row, found)
    raise HeadrankError(_nothing_found(checkpoint, rows))


@dataclass(frozen=True)
class _View:
    """The part of the configuration that speaks of the stack that is asked for."""

    config: Mapping[str, Any]
    model_type: Any
    nested: bool
    where: str


def _view(checkpoint: Checkpoint, part: str) -> _View:
    if part not in PARTS:
        raise HeadrankError(f"part {part!r} is not known; known: {', '.join(PARTS)}")
    config, where = checkpoint.config, _config_file(checkpoint)
    if architecture := config.get("general.architecture"):  # GGUF: every key begins with the architecture's name
        return _View(_gguf_facts(checkpoint, architecture), f"gguf:{architecture}", False, where)
    for key in PARTS[part]:
        inner = config.get(key)
        if isinstance(inner, dict):
            return _View(inner, inner.get("model_type", config.get("model_type")), True, f"{where} ({key})")
    if part != "text":
        raise HeadrankError(f"{where}: has no {PARTS[part][0]}, so there is no {part} part")
    return _View(config, config.get("model_type"), False, where)


def _gguf_facts(checkpoint: Checkpoint, architecture: str) -> dict[str, Any]:
    """GGUF's metadata without the architecture's name, and what the format lets one leave out or work out."""
    facts = {key.removeprefix(f"{architecture}."): value for key, value in checkpoint.config.items()}
    d_model, H = facts.get("embedding_length"), facts.get("attention.head_count")
    if type(d_model) is int and type(H) is int and H > 0 and d_model % H == 0:
        facts = {"attention.key_length": d_model // H, "attention.value_length": d_model // H, **facts}
    key, rope = facts.get("attention.key_length_mla", facts.get("attention.key_length")), facts.get("rope.dimension_count")
    if type(key) is int and type(rope) is int and key >= rope:
        facts["mla.nope"] = key - rope
    facts["mla.value"] = facts.get("attention.value_length_mla", facts.get("attention.value_length"))
    facts["mla.head_count_kv"] = H  # newer files say 1, for the latent that all heads share
    if embedding := checkpoint.tensors.get("token_embd.weight"):
        facts.setdefault("vocab_size", embedding.shape[0])
    return facts


def _config_file(checkpoint: Checkpoint) -> str:
    if not checkpoint.config_name:
        return f"the configuration of {checkpoint.path}"
    return str(checkpoint.path / checkpoint.config_name) if checkpoint.path.is_dir() else f"{checkpoint.config_name} of {checkpoint.path}"


def _candidates(checkpoint: Checkpoint, view: _View) -> list[Row]:
    rows = [row for row in families() if view.model_type in row.model_types]
    if not rows:
        raise HeadrankError(_unknown(checkpoint, view.model_type))
    fitting = [row for row in rows if all(_fits(view.config.get(key, row.defaults.get(key)), value) for key, value in row.when.items())]
    if not fitting:
        keys = ", ".join(sorted({key for row in rows for key in row.when}))
        raise HeadrankError(f"{view.where}: no layout of {view.model_type} has {keys} as given there")
    return fitting


def _fits(value: Any, wanted: Any) -> bool:
    return value in wanted if isinstance(wanted, list) else value == wanted


def _unknown(checkpoint: Checkpoint, model_type: Any) -> str:
    what = f"model_type {model_type!r} is not in the table of architectures" if model_type else "nothing says what architecture this is (no model_type)"
    found = [name for name in checkpoint.tensors if ATTENTION_LIKE.search(name)][:8]
    remedy = f"Describe it in a TOML file and give it with --layout FILE, for example:\n{EXAMPLE}"
    return f"{checkpoint.path}: {what}; attention-like tensors: {', '.join(found) or 'none'}\n{remedy}"


def _nothing_found(checkpoint: Checkpoint, rows: list[Row]) -> str:
    if packed := next((name for name in checkpoint.tensors if name.endswith(PACKED) and ATTENTION_LIKE.search(name)), None):
        return f"{checkpoint.tensors[packed].file}: {packed} belongs to a matrix of packed integers, which are not unpacked here; take the original weights"
    row = rows[0]
    wanted = row.layer.format(i=0) + next(iter(row.projections["q"].values()))[0][0].name
    found = [name for name in checkpoint.tensors if ATTENTION_LIKE.search(name)][:5]
    return f"{checkpoint.path}: no tensor of a {row.name} layer such as {wanted}; found {', '.join(found) or 'no attention-like tensor'}"


def _architecture(checkpoint: Checkpoint, row: Row, stacks: list[Stack]) -> Architecture:
    layers = tuple(layer for stack in stacks for layer in stack.layers())
    if not layers:
        raise HeadrankError(f"{checkpoint.path}: none of its {stacks[0].facts.depth()} layers has attention")
    depths = {stack.row.layer: stack.facts.depth() for stack in stacks}  # cross attention sits in the decoder's layers
    facts = stacks[0].facts
    return Architecture(
        family=row.name,
        kind=_kind(row, layers),
        layers=layers,
        n_layer=sum(depths.values()),
        d_model=facts.number("d_model"),
        n_head=max(layer.n_head for layer in layers),
        n_kv_head=max(layer.n_kv_head for layer in layers),
        d_head=max(layer.d_qk - layer.k.sizes.get("rope", 0) for layer in layers),
        vocab_size=facts.optional("vocab_size"),
        context=facts.optional("context"),
        n_parameters=_count_parameters(checkpoint),
        kv_values_per_token=sum(layer.kv_values_per_token for layer in layers),
        kv_values_per_token_of_mha=sum(layer.n_head * (layer.d_qk + layer.d_v) for layer in layers if layer.kv_values_per_token),
        folded=tuple({text: None for stack in stacks for text in stack.folded}),
        remarks=(*checkpoint.remarks, *{text: None for stack in stacks for text in stack.remarks}),
    )


def _kind(row: Row, layers: tuple[AttentionLayer, ...]) -> str:
    keys = row.projections["k"]
    if "nope" in keys:
        return "mla"
    if any(len(chains) > 1 for chains in keys.values()):
        return "lrkv"
    if all(layer.n_kv_head == layer.n_head for layer in layers):
        return "mha"
    return "mqa" if all(layer.n_kv_head == 1 for layer in layers) else "gqa"


def _count_parameters(checkpoint: Checkpoint) -> int:
    counted = {name: info for name, info in checkpoint.tensors.items() if info.dtype not in COUNTLESS and not BUFFERS.search(name)}
    tied = checkpoint.config.get("tie_word_embeddings") is True
    return sum(math.prod(info.shape) for name, info in counted.items() if not (tied and name == "lm_head.weight"))
