"""What a model's attention does on a few tokens, written out in float64 and asked of the model itself: the other side of a self-check."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headrank.forward import DecoderRunner, Recorder, Runner
from headrank.store import LayerFacts


@dataclass(kw_only=True)
class HeadsSeen:
    """One layer's heads on a batch of B sequences of T tokens. None where the model does not show it."""

    scores: Tensor | None = None
    """[B, H, T, S] float64: what was recorded as entering the softmax."""
    allowed: Tensor | None = None
    """[B, H, T, S]: which query sees which key."""
    q: Tensor | None = None
    """[B, H, T, D]."""
    k: Tensor | None = None
    """[B, G, S, D]."""
    v: Tensor | None = None
    """[B, G, S, D_v]."""
    z: Tensor | None = None
    """[B, T, H, D_v]: what the heads hand to the output projection."""
    W_O: Tensor | None = None
    """[H, D_v, d_model]."""
    hidden: Tensor | None = None
    """[B, T, d_model]: the input of the attention block, after its norm."""
    shares: Tensor | None = None
    """[B, H, T, S]: attention probabilities that the model's own softmax gave."""
    block: Tensor | None = None
    """[B, T, d_model]: the block's output less its bias."""

    def move(self, device: torch.device) -> None:
        """Brings all of it to one device: layers may lie on several."""
        for name, tensor in vars(self).items():
            setattr(self, name, None if tensor is None else tensor.to(device))

    def softmax(self) -> Tensor:
        """Attention probabilities from the scores, [B, H, T, S] float64."""
        assert self.scores is not None
        assert self.allowed is not None
        return torch.softmax(self.scores.masked_fill(~self.allowed, torch.finfo(torch.float64).min), -1)

    def score_gram(self, keep: Tensor) -> Tensor:
        """Inner products of the heads' scores, each query's row about its mean over allowed keys, [H, H]. keep: [B, T]."""
        assert self.scores is not None
        assert self.allowed is not None
        allowed = self.allowed & (keep[:, None, :, None] & keep[:, None, None, :])
        scores = self.scores.masked_fill(~allowed, 0)
        means = scores.sum(-1, keepdim=True) / allowed.sum(-1, keepdim=True).clamp(min=1)
        rows = (scores - means).masked_fill(~allowed, 0).transpose(0, 1).flatten(1)
        return rows @ rows.T

    def written(self) -> Tensor:
        """What each head writes to the residual stream, [B, T, H, d_model] float64."""
        assert self.z is not None
        assert self.W_O is not None
        return torch.einsum("bthi,hid->bthd", self.z.double(), self.W_O.double())

    def output_gram(self, keep: Tensor) -> Tensor:
        """Inner products of what the heads write, about its mean over tokens, [H, H]. keep: [B, T]."""
        written = self.written()[keep]
        rows = (written - written.mean(0)).transpose(0, 1).flatten(1)
        return rows @ rows.T


class Listener(Recorder):
    """Takes a recorder's place in one pass, and keeps what it is shown instead of summing it up."""

    def __init__(self, layers: Sequence[LayerFacts]) -> None:
        super().__init__(layers, ("qk", "ov", "keys", "values"), n_groups=1)
        self.seen = {layer.key: HeadsSeen() for layer in layers}

    def scores(self, key: str, q: Tensor, k: Tensor, *, scaling: float, **settings: Any) -> None:
        """The settings are those of headrank.accumulators.ScoreGram.add."""
        seen, (B, H, T, _), (_, G, S, _) = self.seen[key], q.shape, k.shape
        scores = scaling * (q.double() @ k.double().repeat_interleave(H // G, 1).transpose(2, 3))
        softcap, bias, mask = (settings.get(name) for name in ("softcap", "bias", "mask"))
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if bias is not None:
            scores = scores + bias.double()
        if mask is None:
            mask = torch.ones(T, S, dtype=torch.bool, device=q.device)
            mask = mask.tril() if settings.get("causal", True) else mask
        seen.q, seen.scores, seen.allowed = q, scores, mask.expand(B, H, T, S)

    def ready_scores(self, key: str, scores: Tensor, *, mask: Tensor | None) -> None:
        self.seen[key].scores = scores.double()
        self.seen[key].allowed = torch.ones_like(scores, dtype=torch.bool) if mask is None else mask.expand_as(scores)

    def outputs(self, key: str, z: Tensor, W_O: Callable[[], Tensor]) -> None:
        self.seen[key].z, self.seen[key].W_O = z, W_O().detach()

    def keys(self, key: str, k: Tensor) -> None:
        self.seen[key].k = k

    def values(self, key: str, v: Tensor) -> None:
        self.seen[key].v = v


def listen(runner: Runner, ids: Tensor, valid: Tensor | None, layers: Sequence[LayerFacts]) -> dict[str, HeadsSeen]:
    """One pass, and what it showed of each layer: key -> heads. ids: [B, T]; valid: [B, T], False where padding, which comes last."""
    listener = Listener(layers)
    listener.begin_batch(torch.zeros(len(ids), dtype=torch.long, device=ids.device), valid)
    with _inputs_of(attention_modules(runner), listener.seen):
        runner.run(ids, valid, listener, last_layer=max(layer.index for layer in layers))
    for heads in listener.seen.values():
        heads.move(ids.device)
    return listener.seen


def eager_pass(runner: Runner, ids: Tensor, valid: Tensor | None, layers: Sequence[LayerFacts]) -> dict[str, HeadsSeen]:
    """As listen, with what the model says of itself: the blocks' outputs, and attention probabilities where it computes any."""
    if isinstance(runner, DecoderRunner):
        outputs: dict[str, Tensor] = {}
        with _outputs_of(attention_modules(runner), outputs):
            seen = listen(runner, ids, valid, layers)
        for key, heads in seen.items():
            heads.block = outputs[key]
    else:
        seen = listen(runner, ids, valid, layers)
        _stock_pass(runner, ids, valid, seen)
    for heads in seen.values():
        heads.move(ids.device)
    return seen


def attention_modules(runner: Any) -> dict[str, tuple[nn.Module, int]]:
    """Layer -> its attention module, and which of the module's calls within a pass is the layer's."""
    if isinstance(runner, DecoderRunner):
        return {str(number): (block.attn, 0) for number, block in enumerate(runner.model.blocks)}
    layers = runner.layers  # finds the places
    assert layers
    return {facts.key: (runner.model.get_submodule(path), nth) for (path, nth), facts in runner.places.items()}


@contextlib.contextmanager
def _inputs_of(modules: dict[str, tuple[nn.Module, int]], seen: dict[str, HeadsSeen]) -> Iterator[None]:
    """Keeps the input of attention modules while it runs."""

    def keep(key: str, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        hidden = named.get("hidden_states", args[0] if args else None)
        if key in seen and isinstance(hidden, Tensor) and hidden.ndim == 3:
            seen[key].hidden = hidden

    with _hooked(modules, lambda module, hook: module.register_forward_pre_hook(lambda _, args, named: hook(args, named), with_kwargs=True), keep):
        yield


@contextlib.contextmanager
def _outputs_of(modules: dict[str, tuple[nn.Module, int]], outputs: dict[str, Any]) -> Iterator[None]:
    """Keeps the output of modules while it runs."""
    with _hooked(modules, lambda module, hook: module.register_forward_hook(lambda _, args, output: hook(output)), outputs.__setitem__):
        yield


@contextlib.contextmanager
def _hooked(modules: dict[str, tuple[nn.Module, int]], register: Callable[..., Any], keep: Callable[..., None]) -> Iterator[None]:
    """Calls keep(layer, …) with what the hook of each layer's module is given, at the call that is the layer's."""
    times: Counter[nn.Module] = Counter()
    layer_of = {(module, nth): key for key, (module, nth) in modules.items()}

    def hook_of(module: nn.Module) -> Callable[..., None]:
        def hook(*given: Any) -> None:
            key = layer_of.get((module, times[module]))
            times[module] += 1
            if key is not None:
                keep(key, *given)

        return hook

    handles = [register(module, hook_of(module)) for module in {module for module, _ in modules.values()}]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def _stock_pass(runner: Any, ids: Tensor, valid: Tensor | None, seen: dict[str, HeadsSeen]) -> None:
    """One pass of a transformers model with the library's own eager attention: fills in z, block and shares."""
    import inspect

    from headrank.hf_loading import quiet
    from headrank.huggingface import NAME

    modules = attention_modules(runner)
    projections = {key: (runner.projection(runner.paths[module]), nth) for key, (module, nth) in modules.items()}
    results: dict[str, Any] = {}

    def project(key: str, args: tuple[Tensor, ...], output: Tensor) -> None:
        if key in seen:
            seen[key].z = args[0].unflatten(-1, seen[key].W_O.shape[:2])  # type: ignore[union-attr]
            bias = getattr(projections[key][0], "bias", None)
            seen[key].block = output if bias is None else output - bias

    with contextlib.ExitStack() as stack:
        stack.enter_context(quiet())
        if not runner.bypasses:
            runner.model.set_attn_implementation("eager")
            stack.callback(runner.model.set_attn_implementation, NAME)
        stack.enter_context(_outputs_of(modules, results))
        stack.enter_context(_hooked(projections, lambda module, hook: module.register_forward_hook(lambda _, args, output: hook(args, output)), project))
        takes = inspect.signature(runner.model.forward).parameters
        runner.model(**runner.inputs(ids, valid), **({"use_cache": False} if "use_cache" in takes else {}))
    for key, heads in seen.items():
        parts = results[key] if isinstance(results.get(key), tuple) else ()
        like = None if heads.scores is None else heads.scores.shape
        heads.shares = next((part for part in parts if isinstance(part, Tensor) and part.shape == like), None)
