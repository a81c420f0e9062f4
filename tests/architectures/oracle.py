"""The library that defines an architecture as its oracle: what a tiny random model hands to attention, against our factors.

One token a sequence stands at position 0, where rotary embedding is the identity. Attention is replaced by a function that
writes down q, k and v and returns random outputs z, so that the output projection is seen alone. Architectures that do not go
through the library's registry are watched at their matrix products instead.
"""

import contextlib
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headrank.architectures import Architecture, AttentionLayer, Projection, describe
from headrank.checkpoints import Checkpoint, open_checkpoint
from headrank.factors import _factor, _Reader, head_factors

NAME = "headrank_oracle"
OUTPUTS = ("o_proj", "out_proj", "c_proj", "dense", "Wo", "out_lin", "o")
BATCH = 5


@dataclass(frozen=True)
class Case:
    """One architecture at a tiny size, and what of its attention is normalised on the way."""

    model_type: str
    config: dict[str, Any]
    norm: str = "rms"
    """What the residual stream goes through before: rms, layer, or "" for nothing."""
    qk: str = "layer"
    """What our q and k may differ by: one factor a "layer", a "token" (QK norm over the full width), a "head" of a token (QK norm), or
    "mla": the parts without position by token, the rotary parts, which may be laid out otherwise, by their products."""
    v: str = "exact"
    o: str = "exact"
    gated: bool = False
    """A gate stands between attention and the output projection: take what the projection gets as z."""
    kv_from: tuple[tuple[int, int], ...] = ()
    """Layer, and the earlier layer whose keys and values it reads."""
    input: str = ""
    """Module below the layer whose input is the residual stream; the layer itself where empty."""
    bypasses: bool = False
    """Attention is not found in the registry: watch matrix products."""
    variant: str = ""
    layout: str = ""
    """A row of the table to take instead, as TOML."""

    def __str__(self) -> str:
        return self.model_type + (f"-{self.variant}" if self.variant else "")


@dataclass
class Seen:
    """What one attention module was given and gave."""

    path: str
    q: Tensor
    """[N, H, D_qk], a row a token"""
    k: Tensor
    """[M, G, D_qk]"""
    v: Tensor
    """[M, G, D_v]"""
    z: Tensor = field(default_factory=lambda: torch.empty(0))
    """[N, H, D_v], what the output projection got."""
    written: Tensor = field(default_factory=lambda: torch.empty(0))
    """[N, d], what it gave, without its bias."""
    x: Tensor = field(default_factory=lambda: torch.empty(0))
    """[N, d], the normalised residual stream that queries were made from."""
    memory: Tensor = field(default_factory=lambda: torch.empty(0))
    """[M, d], likewise of keys and values."""


def build(case: Case, *, seed: int = 0) -> nn.Module:
    """A tiny model with every parameter random: gains away from 1, biases away from 0."""
    import transformers

    config = transformers.AutoConfig.for_model(case.model_type, **case.config)
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            if config.is_encoder_decoder or case.model_type in ("vit", "bert", "roberta"):
                raise ValueError("the model without a head")
            model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager")
        except ValueError:
            model = transformers.AutoModel.from_config(config, experts_implementation="eager")
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        if re.search("embed|wte|wpe|shared|position|cls_token", name) and parameter.dim() > 1:
            values *= 4  # so that the norms' epsilon is nothing beside it
        elif parameter.dim() > 1:
            values *= parameter.shape[-1] ** -0.5
        elif name.endswith("bias") and re.search(r"(q|k|query|key)_?(layer)?norm", name):
            values *= 0  # the bias of a QK norm is not scaled with the rest; it has a test of its own
        else:
            values = values * 0.3 + ("bias" not in name)
        parameter.data.copy_(values)
    return model.float().eval()


class _Products(TorchFunctionMode):
    """Inputs of the matrix products of the attention module that is running."""

    def __init__(self) -> None:
        super().__init__()
        self.running: list[tuple[Tensor, Tensor]] | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if self.running is not None:
            if name in ("matmul", "bmm") and args[0].dim() >= 3 and args[1].dim() >= 3:
                self.running.append((args[0].detach(), args[1].detach()))
            if name == "baddbmm":
                arguments = dict(zip(("input", "batch1", "batch2"), args, strict=False)) | (kwargs or {})
                self.running.append((arguments["batch1"].detach(), arguments["batch2"].detach()))
            if name == "scaled_dot_product_attention":
                q, k, v = (args[i] if len(args) > i else (kwargs or {})[key] for i, key in enumerate(("query", "key", "value")))
                self.running += [(q.detach(), k.detach().transpose(-1, -2)), (q.detach(), v.detach())]
        return func(*args, **(kwargs or {}))


def watch(model: nn.Module, case: Case, inputs: dict[str, Tensor]) -> list[Seen]:
    """Every attention module of one forward pass, in the order in which they ran."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    paths = {module: path for path, module in model.named_modules()}
    seen: list[Seen] = []
    entries: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(7)

    def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any) -> tuple[Tensor, None]:
        B, H, T, _ = query.shape
        z = torch.randn(B, T, H, value.shape[-1], generator=generator)
        seen.append(Seen(paths[module], _rows(query), _rows(key), _rows(value), z=z.flatten(0, 1)))
        return z, None

    def enter(path: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            states = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.is_floating_point() and value.dim() >= 3]
            if states:
                entries[path], entries[f"{path}/memory"] = states[0].detach(), states[min(1, len(states) - 1)].detach()

        return hook

    with contextlib.ExitStack() as stack:
        for module, path in paths.items():
            if path:
                stack.callback(module.register_forward_pre_hook(enter(path), with_kwargs=True).remove)
        for path, projection in _output_projections(model):
            stack.callback(projection.register_forward_hook(_leave(seen, path, take_z=case.gated or case.bypasses)).remove)
        if case.bypasses:
            mode = stack.enter_context(_Products())
            for path, projection in _output_projections(model):
                stack.enter_context(_watch_products(model.get_submodule(path), projection, path, mode, seen))
        else:
            AttentionInterface.register(NAME, attention)
            AttentionMaskInterface.register(NAME, sdpa_mask)
            model.set_attn_implementation(NAME)
        with torch.no_grad():
            model.base_model(**inputs)
    for one in seen:
        _fill_inputs(one, case, entries)
    for layer, earlier in case.kv_from:
        seen[layer].memory = seen[earlier].x
    return seen


def _rows(x: Tensor) -> Tensor:
    """[B, H, T, D] -> [B T, H, D]"""
    return x.detach().transpose(1, 2).flatten(0, 1)


def _output_projections(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Path of every attention module, and its output projection."""
    for path, module in model.named_modules():
        if re.search(r"(attn|attention|Attention|self|mixer)$", path):
            owner, names = (model.get_submodule(path.rpartition(".")[0]), ("output.dense",)) if path.endswith("self") else (module, OUTPUTS)
            for name in names:
                with contextlib.suppress(AttributeError):
                    yield path, owner.get_submodule(name)
                    break


def _leave(seen: list[Seen], path: str, *, take_z: bool) -> Any:
    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        for one in seen:
            if one.path == path and not one.written.numel():
                bias = getattr(module, "bias", None)
                one.written = (output if bias is None else output - bias).detach().flatten(0, -2)
                if take_z:
                    one.z = args[0].detach().flatten(0, -2).unflatten(-1, (one.q.shape[1], -1))

    return hook


@contextlib.contextmanager
def _watch_products(module: nn.Module, projection: nn.Module, path: str, mode: _Products, seen: list[Seen]) -> Iterator[None]:
    def before(module: nn.Module, args: Any) -> None:
        mode.running = []

    def before_output(projection: nn.Module, args: Any) -> None:
        (q, k), (_, v) = mode.running[:2]
        mode.running = None
        if q.dim() == 3:  # batch and heads in one
            q, k, v = (x.unflatten(0, (BATCH, -1)) for x in (q, k, v))
        seen.append(Seen(path, _rows(q), _rows(k.transpose(-1, -2)), _rows(v)))

    handles = [module.register_forward_pre_hook(before), projection.register_forward_pre_hook(before_output)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _fill_inputs(one: Seen, case: Case, entries: dict[str, Tensor]) -> None:
    match = re.match(r"(.*\.\d+)(\.|$)", one.path)
    assert match is not None
    layer = match.group(1)
    is_cross = "encoder_attn" in one.path or "EncDecAttention" in one.path
    is_bare = case.model_type == "modernbert" and layer.endswith(".0")
    if is_cross and not case.norm:
        one.x, one.memory = (_normalised(entries[path], "") for path in (one.path, f"{one.path}/memory"))
        return
    source = f"{layer}.encoder_attn_layer_norm" if "encoder_attn" in one.path else f"{layer}.{case.input}".rstrip(".")
    one.x = one.memory = _normalised(entries[source], "" if is_bare else case.norm)
    if is_cross:
        final = next(path for path in entries if re.fullmatch(r"encoder\.(layer_norm|final_layer_norm)", path))
        one.memory = _normalised(entries[final], case.norm)


def _normalised(x: Tensor, norm: str) -> Tensor:
    """Rows divided by their size; a LayerNorm's mean is left in, for taking it away is what our factors do."""
    x = x.flatten(0, -2)
    if not norm:
        return x
    centred = x - x.mean(-1, keepdim=True) if norm == "layer" else x
    return x / centred.square().mean(-1, keepdim=True).sqrt()


def full(checkpoint: Checkpoint, layer: AttentionLayer, projection: Projection, x: Tensor) -> Tensor:
    """What our factors make of inputs [N, d]: [N, n, D], biases included (those of keys too)."""
    factor, _ = _factor(_Reader(checkpoint, layer), projection, raw=False, with_bias=True)
    if factor.shape[1] == x.shape[1] + 1:
        x = torch.cat((x, x.new_ones(len(x), 1)), 1)
    return torch.einsum("nd,hdk->nhk", x, factor)


def unlike(ours: Tensor, theirs: Tensor, up_to: str) -> float:
    """Largest difference over largest entry, after one positive factor a layer, token, or head of a token is taken out."""
    if ours.shape != theirs.shape:
        return float("inf")
    axes = {"exact": None, "layer": (0, 1, 2), "token": (1, 2), "head": (2,)}[up_to]
    if axes is not None:
        axes = axes[: ours.dim()] if up_to == "layer" else tuple(a for a in axes if a < ours.dim())
        ours, theirs = (x / x.square().mean(axes, keepdim=True).sqrt() for x in (ours, theirs))
    return float((ours - theirs).abs().max() / theirs.abs().max())


def compare(case: Case, folder: Path, *, layout: Path | None = None) -> tuple[Architecture, dict[str, float]]:
    """Saves the model, reads it back with our code, and says by how much q, k, v and o of any layer differ at worst."""
    model = build(case)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)
    checkpoint = open_checkpoint(folder)
    architecture = describe(checkpoint, layout=layout)
    seen = watch(model, case, _inputs(case, model))
    worst = dict.fromkeys("qkvo", 0.0)
    assert len(seen) == len(architecture.layers), ([one.path for one in seen], [(layer.group, layer.index) for layer in architecture.layers])
    for layer, one in zip(architecture.layers, _in_order(seen), strict=True):
        errors = _errors(case, checkpoint, architecture, layer, one)
        worst = {key: max(worst[key], errors[key]) for key in worst}
    return architecture, worst


def _errors(case: Case, checkpoint: Checkpoint, architecture: Architecture, layer: AttentionLayer, one: Seen) -> dict[str, float]:
    q, k = full(checkpoint, layer, layer.q, one.x), full(checkpoint, layer, layer.k, one.memory)
    v = full(checkpoint, layer, layer.v, one.memory)
    written = torch.einsum("nhk,hdk->nd", one.z, head_factors(checkpoint, architecture, layer, "ov").right)
    k_theirs, v_theirs = one.k[:, :: one.k.shape[1] // k.shape[1]], one.v[:, :: one.v.shape[1] // v.shape[1]]
    if case.qk == "mla":
        nope = layer.q.sizes["nope"]
        rotary = unlike(_scores(q[..., nope:], k[..., nope:]), _scores(one.q[..., nope:], one.k[..., nope:]), "exact")
        q_error, k_error = unlike(q[..., :nope], one.q[..., :nope], "token"), unlike(k[..., :nope], one.k[..., :nope], "token")
        return {"q": max(q_error, rotary), "k": max(k_error, rotary), "v": unlike(v, one.v, case.v), "o": unlike(written, one.written, case.o)}
    return {"q": unlike(q, one.q, case.qk), "k": unlike(k, k_theirs, case.qk), "v": unlike(v, v_theirs, case.v), "o": unlike(written, one.written, case.o)}


def _scores(q: Tensor, k: Tensor) -> Tensor:
    """Products of all queries and keys [H, N, M], each token's brought to size 1 first."""
    q, k = (x / x.square().mean((1, 2), keepdim=True).sqrt() for x in (q, k))
    return torch.einsum("nhk,mhk->hnm", q, k)


def _in_order(seen: list[Seen]) -> list[Seen]:
    """As describe lists them: encoder, decoder, cross."""

    def stack(one: Seen) -> int:
        return 2 if re.search("encoder_attn|EncDec", one.path) else 1 if one.path.startswith("decoder.") else 0

    return sorted(seen, key=stack)


def _inputs(case: Case, model: nn.Module) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    config = model.config
    if "image_size" in case.config:
        return {"pixel_values": torch.randn(BATCH, 3, config.image_size, config.image_size, generator=generator)}
    tokens = torch.randint(3, config.vocab_size, (BATCH, 1), generator=generator)
    if case.model_type == "whisper":
        return {"input_features": torch.randn(BATCH, config.num_mel_bins, 2 * config.max_source_positions, generator=generator), "decoder_input_ids": tokens}
    if config.is_encoder_decoder:
        return {"input_ids": tokens, "decoder_input_ids": tokens.flip(0)}
    return {"input_ids": tokens}
