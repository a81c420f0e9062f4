"""Activations of any transformers model, through its registry of attention functions.

Scores are counted from the queries and keys that the attention function is handed, after rotary embedding and QK norm, with the mask,
scale, softcap and biases of that very call. Outputs are counted where the output projection gets them. Models that bypass the registry
are watched at their softmax instead.
"""

import contextlib
import inspect
import re
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headrank.errors import HeadrankError
from headrank.forward import Recorder
from headrank.hf_loading import first_line, load_model, quiet
from headrank.hf_placement import device_map
from headrank.model.attention import keep_nan
from headrank.placement import Needs, fits_one
from headrank.store import LayerFacts

NAME = "headrank"  # in the registry; no part of it may be the name of one of the library's own functions
PROBE_TOKENS = 8
PROJECTIONS = ("o_proj", "out_proj", "c_proj", "dense", "Wo", "out_lin", "o")  # attributes that hold an output projection
# Architectures with attention of their own, whose softmax (or call of torch's fused attention) gets nothing but scores by head: tested one by one.
SERVED_AT_THE_SOFTMAX = {
    "bloom",
    "deberta",
    "deberta-v2",
    "falcon",
    "flaubert",
    "gpt_neo",
    "gpt_neox_japanese",
    "megatron-bert",
    "mpnet",
    "mpt",
    "rembert",
    "roformer",
    "xglm",
    "xlm",
}
HARMLESS = {  # keywords of attention functions that change no number here: the mask holds them, or other kernels alone read them
    "sliding_window",
    "position_ids",
    "use_cache",
    "cache_position",
    "layer_idx",
    "deterministic",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
}
SOFTMAXES = (F.softmax, torch.softmax, Tensor.softmax)

_watch: ContextVar["_Watch | None"] = ContextVar("watch", default=None)


class TransformersRunner:
    """A transformers model, ready to be run over batches: headrank.forward.Runner."""

    def __init__(self, model: Any, *, name: str = "") -> None:
        """model: a transformers model, loaded with an implementation of attention of the library's own; it is switched to ours. name: for messages.

        Raises HeadrankError where the architecture bypasses the registry and is not among those served otherwise.
        """
        self.model = model.base_model.eval()
        self.name = name or type(model).__name__
        self.paths = {module: path for path, module in self.model.named_modules()}
        self.bypasses = not type(self.model)._can_set_attn_implementation()
        if self.bypasses and self.model.config.model_type not in SERVED_AT_THE_SOFTMAX:
            raise self.refusal("it bypasses transformers' attention functions")
        self.model.config.use_cache = False  # where the forward pass takes no such argument
        self.places: dict[tuple[str, int], LayerFacts] = {}
        self.device = _home(self.model)

    @classmethod
    def load(
        cls,
        path: Path,
        *,
        device: torch.device,
        dtype: torch.dtype,
        gguf_file: str | None = None,
        needs: Needs | None = None,
        n_bytes: int = 0,
    ) -> "TransformersRunner":
        """Loads a folder, or a GGUF file, onto one CUDA device or onto as many as it takes.

        n_bytes: of all weights, at most; needs: of a pass beside them. Raises HeadrankError where transformers is missing or cannot load
        it whole, and where the devices have too little memory.
        """
        needs = needs or Needs()
        if fits_one(n_bytes, device, needs):
            return cls(load_model(path, dtype=dtype, gguf_file=gguf_file).to(device), name=str(path))

        def spread(model: Any) -> Mapping[str, torch.device | str]:
            return device_map(model, dtype=dtype, device=device, needs=needs, where=str(path))

        return cls(load_model(path, dtype=dtype, gguf_file=gguf_file, device_map_of=spread), name=str(path))

    @property
    def vocab_size(self) -> int:
        """Token ids that the model knows are below this."""
        return int(self.model.config.get_text_config().vocab_size)

    @property
    def context(self) -> int | None:
        """Tokens in the longest sequence that the model takes, where its config says so."""
        config = self.model.config.get_text_config()
        named = (getattr(config, name, None) for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"))
        return next((length for length in named if isinstance(length, int) and length > 0), None)

    @property
    def layers(self) -> tuple[LayerFacts, ...]:
        """The layers with attention, in the order in which they are called; a short pass finds them where none has been made."""
        if not self.places:
            self._look(None)
        return tuple(self.places.values())

    def run(self, ids: Tensor, valid: Tensor | None, recorder: Recorder, *, last_layer: int) -> None:
        """One pass over ids [B, T]; valid: [B, T], False where padding, on whichever side. It ends where the recorder wants nothing more.

        An encoder-decoder gets the text on both sides, the decoder's shifted by its start token, as in training.
        Raises HeadrankError where the model does not read tokens, or its attention cannot be watched.
        """
        if valid is not None:  # every model counts positions rightly where padding comes last; not all do where it comes first
            order = valid.logical_not().to(torch.uint8).argsort(dim=1, stable=True)
            ids, valid = ids.gather(1, order), valid.gather(1, order)
            recorder.move_tokens(order)
        if not self.places:
            self._look(None)
        self._forward(self.inputs(ids, valid), _Recording(self, recorder))

    def feed(self, inputs: Mapping[str, Tensor], recorder: Recorder) -> None:
        """One pass over inputs by name, unpadded: for models that read pictures or sound."""
        inputs = {name: tensor.to(self.device) for name, tensor in inputs.items()}
        if not self.places:
            self._look({name: tensor[:1] for name, tensor in inputs.items()})
        self._forward(inputs, _Recording(self, recorder))

    def projection(self, path: str) -> nn.Module:
        """The output projection of an attention module."""
        module = self.model.get_submodule(path)
        parent = self.model.get_submodule(path.rpartition(".")[0])
        beside = getattr(getattr(parent, "output", None), "dense", None)  # BERT and its kin
        homes = [module, parent] if "Attention" in type(parent).__name__ else [module]
        found = [getattr(home, name, None) for home in homes for name in PROJECTIONS]
        for candidate in [*found[: len(PROJECTIONS)], beside, *found[len(PROJECTIONS) :]]:
            if isinstance(candidate, nn.Module) and getattr(candidate, "weight", None) is not None and candidate.weight.ndim == 2:
                return candidate
        raise self.refusal(f"{path} has no output projection called {', '.join(PROJECTIONS)} or output.dense")

    def refusal(self, why: str) -> HeadrankError:
        """An error that names the architecture and the way out."""
        return HeadrankError(f"{self.name}: activations of {type(self.model).__name__} cannot be measured: {why}; use --source weights")

    def inputs(self, ids: Tensor, valid: Tensor | None) -> dict[str, Tensor]:
        """Arguments of the model for ids [B, T]; valid: [B, T], False where padding, which comes last."""
        if self.model.main_input_name != "input_ids":
            raise self.refusal(f"it reads {self.model.main_input_name}, not tokens")
        ids, valid = ids.to(self.device), None if valid is None else valid.to(self.device)
        config = self.model.config
        pad = getattr(config.get_text_config(), "pad_token_id", None)
        inputs = {"input_ids": ids}
        if valid is not None:  # RoBERTa and its kin find padding by its id
            inputs = {"input_ids": ids.masked_fill(~valid, pad if isinstance(pad, int) and pad >= 0 else 0), "attention_mask": valid.long()}
        if config.is_encoder_decoder:
            start = getattr(config, "decoder_start_token_id", None)
            first = ids.new_full((len(ids), 1), start if isinstance(start, int) else pad or 0)
            inputs["decoder_input_ids"] = torch.cat([first, inputs["input_ids"][:, :-1]], 1)
            if valid is not None:
                inputs["decoder_attention_mask"] = inputs["attention_mask"]
        return inputs

    def _look(self, inputs: Mapping[str, Tensor] | None) -> None:
        """Short passes that find which attention modules are called, and in which order, and check that nothing else changed by watching them.

        inputs: what to feed; where None, two short sequences, one of them padded.
        """
        variants: list[tuple[Mapping[str, Tensor], Tensor | None]]
        if inputs is not None:
            variants = [(inputs, None)]
        else:
            middle = torch.arange(2 * PROBE_TOKENS, device=self.device).view(2, -1) + self.vocab_size // 2  # special tokens are at the ends
            ids, valid = middle % self.vocab_size, torch.ones_like(middle, dtype=torch.bool)
            valid[1, PROBE_TOKENS - 3 :] = False
            variants = [(self.inputs(ids, valid), valid), (self.inputs(ids, None), None)]
        if not self.bypasses:
            if self.model.config._attn_implementation == NAME:
                self._switch("eager")
            try:
                stock = [self._forward(its, _Watch(self)) for its, _ in variants]
            except (MemoryError, torch.OutOfMemoryError):
                raise
            except Exception as error:  # nothing of ours has been in its way yet
                raise self.refusal(f"a pass over tokens ends with: {first_line(error)}") from error
            self._switch(NAME)
        for order, (its, counts) in enumerate(variants):
            probe = _Probe(self)
            seen = self._forward(its, probe)
            if not self.bypasses:
                self._check_unchanged(stock[order], seen, counts)
        self.places = _places(probe.calls, self)
        if probe.unprojected:
            raise self.refusal(f"the output projection of {min(probe.unprojected)} is not called")

    def _switch(self, implementation: str) -> None:
        _register()
        with quiet():
            self.model.set_attn_implementation(implementation)
        if self.model.config._attn_implementation != implementation:
            raise self.refusal("its attention function cannot be switched")

    def _check_unchanged(self, stock: Tensor, switched: Tensor, valid: Tensor | None) -> None:
        """An architecture that goes through the registry in parts of it only, or counts on a default, computes something else when switched."""
        if valid is not None and stock.shape[:2] == valid.shape:
            valid = valid.to(stock.device)
            stock, switched = stock[valid], switched[valid]
        tolerance = 1e-3 if stock.dtype == torch.float32 else 0.1
        apart, size = (switched.float() - stock.float()).norm(), stock.float().norm()
        if bool(size.isfinite()) and not apart <= tolerance * size:
            raise self.refusal(f"under headrank's attention function it computes something else (by {float(apart / size):.0%})")

    @torch.no_grad()
    def _forward(self, inputs: Mapping[str, Tensor], watch: "_Watch") -> Tensor:
        """One pass under a watch. Returns the model's first output, or nothing (an empty tensor) where the watch ended it."""
        takes = inspect.signature(self.model.forward).parameters
        no_cache = {"use_cache": False} if "use_cache" in takes else {}
        token = _watch.set(watch)
        with contextlib.ExitStack() as stack:
            stack.callback(_watch.reset, token)
            stack.callback(watch.close)
            stack.enter_context(quiet())
            if self.bypasses:
                for module in self.paths:
                    if _is_innermost_attention(module):
                        watch.hooks.append(module.register_forward_pre_hook(lambda module, args: watch.inside.append(module)))
                        watch.hooks.append(module.register_forward_hook(lambda module, args, output: watch.leave()))
                stack.enter_context(_SoftmaxInputs(watch))
            with contextlib.suppress(_SeenEnough):
                output: Tensor = self.model(**inputs, **no_cache)[0]
                return output
        return torch.empty(0)


class _SeenEnough(Exception):  # noqa: N818 (no error)
    """Ends a forward pass that has nothing more to show."""


@dataclass(frozen=True, kw_only=True)
class _Call:
    """One call of an attention module within a pass."""

    path: str
    nth: int
    n_head: int
    n_kv_head: int
    window: int | None


class _Watch:
    """Sees the attention calls of one forward pass."""

    def __init__(self, runner: TransformersRunner) -> None:
        self.runner = runner
        self.times: Counter[str] = Counter()
        self.inside: list[nn.Module] = []  # attention modules that are running, where the registry is bypassed
        self.hooks: list[Any] = []
        self._causal: dict[int, tuple[weakref.ref[Tensor], bool]] = {}

    def is_causal(self, mask: Tensor) -> bool:
        """Whether a mask says that a query sees itself and all before it, and nothing else. Layers share masks: each is looked at once."""
        known = self._causal.get(id(mask))
        if known is None or known[0]() is not mask:  # a number that another mask had before; where layers are on several devices, masks come and go
            T, S = mask.shape[-2:]
            plain = mask.dtype == torch.bool and T == S and bool((mask == torch.ones(T, T, dtype=torch.bool, device=mask.device).tril()).all())
            known = self._causal[id(mask)] = weakref.ref(mask), plain
        return known[1]

    def close(self) -> None:
        """Takes the hooks off the model."""
        for hook in self.hooks:
            hook.remove()

    def leave(self) -> None:
        """The innermost attention module has ended."""
        self.inside.pop()

    def called(self, module: nn.Module, *, n_head: int, n_kv_head: int, window: int | None) -> tuple[str, int]:
        """Counts a call. Returns the module's path and which of its calls in this pass it is."""
        path = self.runner.paths[module]
        self.times[path] += 1
        return path, self.times[path] - 1

    def scores(self, call: tuple[str, int], query: Tensor, key: Tensor, **settings: Any) -> Tensor | None:
        """A call's queries and keys, with the settings of Recorder.scores. Returns attention where it was computed on the way."""

    def ready_scores(self, call: tuple[str, int], scores: Tensor, mask: Tensor) -> None:
        """The scores of a call that bypasses the registry. [B, H, T, S] both."""

    def keys_and_values(self, call: tuple[str, int], key: Tensor, value: Tensor) -> None:
        """A call's keys and values, [B, G, S, D]."""


class _Probe(_Watch):
    """Lists the calls, and checks that each output projection multiplies by the matrix that it holds."""

    def __init__(self, runner: TransformersRunner) -> None:
        super().__init__(runner)
        self.calls: list[_Call] = []
        self.unprojected: set[str] = set()

    def called(self, module: nn.Module, *, n_head: int, n_kv_head: int, window: int | None) -> tuple[str, int]:
        path, nth = super().called(module, n_head=n_head, n_kv_head=n_kv_head, window=window)
        self.calls.append(_Call(path=path, nth=nth, n_head=n_head, n_kv_head=n_kv_head, window=window))
        if not nth:
            self.unprojected.add(path)
            self.hooks.append(
                self.runner.projection(path).register_forward_hook(lambda module, args, output: self._check(path, n_head, module, args[0], output))
            )
        return path, nth

    def _check(self, path: str, n_head: int, projection: nn.Module, z: Tensor, output: Tensor) -> None:
        self.unprojected.discard(path)
        if not isinstance(output, Tensor):
            raise self.runner.refusal(f"the output projection of {path} gives more than one tensor")
        if z.shape[-1] % n_head:
            raise self.runner.refusal(f"the output projection of {path} takes {z.shape[-1]} numbers, which {n_head} heads cannot share")
        expected = z.float() @ output_weights(projection, n_head).flatten(0, 1).to(z.device).float()
        bias = _held(projection, "bias")
        if isinstance(bias, Tensor):
            expected = expected + bias.to(expected.device).float()
        apart = (output.float() - expected).norm()
        if apart.isfinite() and apart > 0.03 * expected.norm():  # bfloat16 keeps three digits; a wrong matrix is apart by the whole
            raise self.runner.refusal(f"the output projection of {path} does more than multiply by its weight")


class _Recording(_Watch):
    """Sends what is wanted to a recorder, and ends the pass when all of it is there."""

    def __init__(self, runner: TransformersRunner, recorder: Recorder) -> None:
        super().__init__(runner)
        self.recorder = recorder
        self.current: dict[str, LayerFacts] = {}
        wanted = {facts.key: [c for c in ("qk", "ov", "keys", "values") if recorder.wants(facts.key, c)] for facts in runner.places.values()}
        self.awaited = {(circuit, key) for key, circuits in wanted.items() for circuit in circuits}
        for path in {path for path, nth in runner.places if "ov" in wanted[runner.places[path, nth].key]}:
            self.hooks.append(runner.projection(path).register_forward_pre_hook(self._project(path)))

    def called(self, module: nn.Module, *, n_head: int, n_kv_head: int, window: int | None) -> tuple[str, int]:
        call = super().called(module, n_head=n_head, n_kv_head=n_kv_head, window=window)
        if call not in self.runner.places:
            raise self.runner.refusal(f"{call[0]} is called at some times and not at others")
        self.current[call[0]] = self.runner.places[call]
        return call

    def scores(self, call: tuple[str, int], query: Tensor, key: Tensor, **settings: Any) -> Tensor | None:
        layer = self.runner.places[call].key
        if query.shape[2] != key.shape[2] and self.runner.places[call].group != "cross":
            raise self.runner.refusal(f"{call[0]} has {query.shape[2]} queries for {key.shape[2]} keys")
        if not self.recorder.wants(layer, "qk"):
            return None
        z = self.recorder.scores(layer, query, key, **settings)
        self._seen("qk", layer)
        return z

    def ready_scores(self, call: tuple[str, int], scores: Tensor, mask: Tensor) -> None:
        layer = self.runner.places[call].key
        if self.recorder.wants(layer, "qk"):
            self.recorder.ready_scores(layer, scores, mask=mask)
            self._seen("qk", layer)

    def keys_and_values(self, call: tuple[str, int], key: Tensor, value: Tensor) -> None:
        layer = self.runner.places[call].key
        if self.recorder.wants(layer, "keys"):
            self.recorder.keys(layer, key)
            self._seen("keys", layer)
        if self.recorder.wants(layer, "values"):
            self.recorder.values(layer, value)
            self._seen("values", layer)

    def _project(self, path: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(projection: nn.Module, args: tuple[Any, ...]) -> None:
            facts = self.current.get(path)
            if facts is None or not self.recorder.wants(facts.key, "ov"):
                return
            z = args[0]
            self.recorder.outputs(facts.key, z.unflatten(-1, (facts.n_head, -1)), lambda: output_weights(projection, facts.n_head).to(z.device))
            self._seen("ov", facts.key)

        return hook

    def _seen(self, circuit: str, layer: str) -> None:
        self.awaited.discard((circuit, layer))
        if not self.awaited:
            raise _SeenEnough


def output_weights(projection: nn.Module, n_head: int) -> Tensor:
    """[H, D_v, d_model]: the matrix of an output projection by head. A Conv1D holds it in x out, all else out x in."""
    weight: Any = _held(projection, "weight")
    return (weight if type(projection).__name__ == "Conv1D" else weight.T).detach().unflatten(0, (n_head, -1))


def _held(module: nn.Module, name: str) -> Any:
    """A parameter of a module, also of one that accelerate keeps elsewhere while the module is not running."""
    tensor = getattr(module, name, None)
    if isinstance(tensor, Tensor) and tensor.is_meta:
        hook: Any = module._hf_hook
        return hook.weights_map[name]
    return tensor


def _home(model: Any) -> torch.device:
    """Where token ids go: to the embedding."""
    try:
        parameter = next(model.get_input_embeddings().parameters())
    except (AttributeError, NotImplementedError, StopIteration):  # models of pictures and sound
        return torch.device(model.device)
    return torch.device("cpu") if parameter.is_meta else parameter.device


def _places(calls: Sequence[_Call], runner: TransformersRunner) -> dict[tuple[str, int], LayerFacts]:
    """Names the calls by layer: by the number in the module's path, or by their order where modules are called again."""
    if not calls:
        raise runner.refusal("its attention never goes through transformers' attention functions")
    groups = [_group(call.path, runner) for call in calls]
    places: dict[tuple[str, int], LayerFacts] = {}
    owners: dict[str, str] = {}
    for group in dict.fromkeys(groups):
        own = [call for call, its in zip(calls, groups, strict=True) if its == group]
        repeated = any(call.nth for call in own)
        if repeated and len(own) != getattr(runner.model.config.get_text_config(), "num_hidden_layers", None):
            raise runner.refusal(f"{own[0].path} is called again, and {len(own)} calls in all are not one a layer")
        for order, call in enumerate(own):
            numbers = [int(part) for part in call.path.split(".") if part.isdigit()]
            if not repeated and not numbers:
                raise runner.refusal(f"the path {call.path} has no number of a layer")
            facts = LayerFacts(index=order if repeated else numbers[0], n_head=call.n_head, n_kv_head=call.n_kv_head, group=group, window=call.window)
            if facts.key in owners:
                raise runner.refusal(f"{owners[facts.key]} and {call.path} are both in layer {facts.key}")
            owners[facts.key] = call.path
            places[call.path, call.nth] = facts
    return places


def _group(path: str, runner: TransformersRunner) -> str:
    if not runner.model.config.is_encoder_decoder:
        return ""
    parts = path.split(".")
    if re.search(r"encoder_attn|EncDecAttention|cross", parts[-1]):
        return "cross"
    return next((part for part in parts if part in ("encoder", "decoder")), "")


# The registry


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)  # without a mask function of that name every mask is silently None


def _mask(*args: Any, **settings: Any) -> Tensor | None:
    """The library's boolean mask [B, 1, T, S], never left out where it is causal: None then means that every query sees every key, as in eager mode.

    The library leaves it out for implementations that go by the modules' is_causal, and not all modules have theirs right.
    """
    from transformers.masking_utils import sdpa_mask

    mask: Tensor | None = sdpa_mask(*args, **{**settings, "allow_is_causal_skip": False})
    return mask


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention function: shows the call to the watch of the pass, and computes what the library's own function would.

    query: [B, H, T, D]; key: [B, G, S, D]; value: [B, G, S, D_v]. Returns [B, T, H, D_v].
    """
    T, S = query.shape[2], key.shape[2]
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    watch = _watch.get()
    causal = watch is not None and attention_mask is not None and watch.is_causal(attention_mask)
    if causal:  # the fast way of torch and of the accumulator
        attention_mask = None
    mask, bias = _mask_and_bias(attention_mask, position_bias, T, S)
    z = None
    if watch is not None:
        unknown = [name for name, given in others.items() if given is not None and given is not False and name not in HARMLESS]
        if unknown:
            raise watch.runner.refusal(f"its attention takes {', '.join(unknown)}, which headrank does not know")
        call = watch.called(module, n_head=query.shape[1], n_kv_head=key.shape[1], window=others.get("sliding_window"))
        v = value if s_aux is None else None
        z = watch.scores(call, query, key, v=v, scaling=scaling, causal=causal, mask=mask, bias=bias, softcap=softcap)
        watch.keys_and_values(call, key, value)
    if z is not None:
        return z, None
    if softcap is not None or s_aux is not None:  # torch's fused function knows neither
        return _plain_attention(query, key, value, mask, bias, scaling, causal, softcap, s_aux), None
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    fused = ALL_ATTENTION_FUNCTIONS["sdpa"]
    z, _ = fused(module, query, key, value, attention_mask, dropout=0.0, scaling=scaling, is_causal=causal, position_bias=position_bias)
    return keep_nan(z, query), None


def _mask_and_bias(mask: Tensor | None, bias: Tensor | None, T: int, S: int) -> tuple[Tensor | None, Tensor | None]:
    """What is allowed (True) and what is added, [B or 1, H or 1, T, S] each, from a boolean or an additive mask and a bias."""
    if mask is not None and mask.dtype != torch.bool:
        additive, mask = mask, mask > torch.finfo(mask.dtype).min / 2
        additive = additive.masked_fill(~mask, 0)
        bias = additive if bias is None else bias + additive
    return tuple(None if x is None else x.expand(*x.shape[:2], T, S) for x in (mask, bias))  # type: ignore[return-value]


def _plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    scaling: float,
    causal: bool,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention with a softcap c tanh(score / c) and sinks, logits [H] that take part in the softmax alone. One sequence at a time bounds the memory."""
    B, H, T, _ = query.shape
    G, S = key.shape[1:3]
    if causal:
        mask = torch.ones(1, 1, T, S, dtype=torch.bool, device=query.device).tril()
    out = query.new_empty(B, T, H, value.shape[-1])
    for b in range(B):
        scores = (query[b].unflatten(0, (G, H // G)) @ key[b, :, None].transpose(-1, -2)).flatten(0, 1) * scaling  # [H, T, S]
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if bias is not None:
            scores = scores + bias[b if len(bias) > 1 else 0]
        if mask is not None:
            scores = scores.masked_fill(~mask[b if len(mask) > 1 else 0], torch.finfo(scores.dtype).min)
        if sinks is not None:
            scores = torch.cat([scores, sinks.to(scores.dtype).view(H, 1, 1).expand(H, T, 1)], -1)
        shares = scores.softmax(-1, dtype=torch.float32).to(value.dtype)[..., :S]
        out[b] = (shares.unflatten(0, (G, H // G)) @ value[b, :, None]).flatten(0, 1).transpose(0, 1)
    return out


# Models that bypass the registry


class _SoftmaxInputs(TorchFunctionMode):
    """Shows the watch what enters the softmax, or torch's fused attention, within attention modules."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if self.watch.inside:
            if func in SOFTMAXES:
                self._softmax(args[0] if args else kwargs["input"])
            elif func is F.scaled_dot_product_attention:
                self._fused(*args, **kwargs)
        return func(*args, **kwargs)

    def _softmax(self, scores: Tensor) -> None:
        module = self.watch.inside[-1]
        H = _heads_of(module)
        if H is None or scores.ndim not in (3, 4) or scores.shape[-3] % H or (scores.ndim == 4 and scores.shape[1] != H):
            raise self.watch.runner.refusal(f"the softmax of {self.watch.runner.paths[module]} gets {list(scores.shape)}, no scores by head")
        scores = scores if scores.ndim == 4 else scores.unflatten(0, (-1, H))
        call = self.watch.called(module, n_head=H, n_kv_head=H, window=None)
        lowest = torch.finfo(self.watch.runner.model.dtype).min  # masks hold it, and what is added to it does not bring it far up
        self.watch.ready_scores(call, scores, scores > lowest / 2)

    def _fused(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False, **rest: Any
    ) -> None:
        scale = rest.get("scale")
        call = self.watch.called(self.watch.inside[-1], n_head=query.shape[1], n_kv_head=key.shape[1], window=None)
        mask, bias = _mask_and_bias(attn_mask, None, query.shape[2], key.shape[2])
        self.watch.scores(call, query, key, scaling=query.shape[-1] ** -0.5 if scale is None else scale, causal=is_causal, mask=mask, bias=bias)
        self.watch.keys_and_values(call, key, value)


def _is_innermost_attention(module: nn.Module) -> bool:
    """Whether a module is an attention, and holds none."""
    inner = [other for other in module.modules() if other is not module and "Attention" in type(other).__name__]
    return "Attention" in type(module).__name__ and not inner


def _heads_of(module: nn.Module) -> int | None:
    return next(
        (getattr(module, name) for name in ("num_heads", "num_attention_heads", "n_heads", "n_head") if isinstance(getattr(module, name, None), int)), None
    )
