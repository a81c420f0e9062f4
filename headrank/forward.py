"""Batched forward passes that feed the accumulators: our decoder here, transformers' models in huggingface.py."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrank.accumulators import PRODUCT_ROWS, OutputGram, ScoreGram
from headrank.architectures import Architecture, AttentionLayer
from headrank.checkpoints import Checkpoint
from headrank.config import MODEL_TYPE, ModelConfig
from headrank.errors import HeadrankError
from headrank.gram import Workspace
from headrank.memory import kept
from headrank.model import Decoder, load_decoder
from headrank.moments import HeadMoments, linear_cka_gram
from headrank.placement import Needs, place_parts
from headrank.resume import SavedPass
from headrank.store import MAX_GROUPS, LayerFacts
from headrank.tokens import Sequences

A = TypeVar("A", ScoreGram, OutputGram, HeadMoments)
TOKENS_PER_BATCH = {"cpu": 1024, "cuda": 65536}  # where no batch size is asked for: more is hardly faster on a CPU; halved until it fits
WORK_TOKENS = 4096  # of the smallest batch that room is kept for on a device; where more is left, batches are larger
WORK_BYTES = 1 << 30  # beside them: blocks of scores and outputs, several of accumulators.CUDA_BLOCK_BYTES each
RUN_BY_TRANSFORMERS = ("safetensors", "safetensors shards", "pytorch", "pytorch shards", "gguf", "gguf parts")


class Recorder:
    """Sends what attention layers compute to their accumulators, those alone that were asked for. One recorder a pass over all batches."""

    def __init__(self, layers: Sequence[LayerFacts], circuits: Sequence[str], *, n_groups: int) -> None:
        """circuits: names of the Gram matrices to make, see headrank.measures."""
        self.layers = {layer.key: layer for layer in layers}
        self.circuits, self.n_groups = circuits, n_groups
        self._scores: dict[str, ScoreGram] = {}
        self._outputs: dict[str, OutputGram] = {}
        self._moments: dict[str, HeadMoments] = {}
        self._projections: dict[str, Tensor] = {}
        self._restored: dict[str, dict[str, Tensor]] = {}  # accumulators that are made when their layer is seen first
        self._workspace = Workspace()
        self._groups = torch.empty(0, dtype=torch.long)
        self._keep: Tensor | None = None
        self._moved: dict[torch.device, tuple[Tensor, Tensor | None]] = {}  # the two, on each device that has layers

    def begin_batch(self, groups: Tensor, keep: Tensor | None) -> None:
        """groups: [B], the group of each sequence; keep: [B, T], False for tokens that do not count."""
        self._groups, self._keep = groups, keep
        self._moved.clear()

    def move_tokens(self, order: Tensor) -> None:
        """The batch is fed with its tokens in another order: token t of sequence b is the one that begin_batch knew as order[b, t]. [B, T]."""
        if self._keep is not None:
            self._keep = self._keep.gather(1, order)
            self._moved.clear()

    def _tokens_on(self, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """Groups and tokens that count, on a device: moved there once a batch, whatever number of its layers asks for them."""
        if device not in self._moved:
            self._moved[device] = self._groups.to(device), None if self._keep is None else self._keep.to(device)
        return self._moved[device]

    def wants(self, key: str, circuit: str) -> bool:
        """Whether a layer's scores (qk), outputs (ov), keys or values are to be counted."""
        return key in self.layers and (circuit in self.circuits or (circuit == "ov" and "cka" in self.circuits))

    def scores(self, key: str, q: Tensor, k: Tensor, *, scaling: float, **settings: Any) -> Tensor | None:
        """Counts one batch of a layer's scores; q, k, the settings and what is returned are those of ScoreGram.add."""
        if key not in self._scores:
            self._scores[key] = self._as_it_was(f"qk/{key}", ScoreGram(q.shape[1], self.n_groups, q.device, self._workspace))
        groups, keep = self._tokens_on(q.device)
        return self._scores[key].add(q, k, scaling=scaling, groups=groups, keep=keep, **settings)

    def ready_scores(self, key: str, scores: Tensor, *, mask: Tensor | None) -> None:
        """Counts one batch of a layer's scores that the model computed itself: [B, H, T, S], see ScoreGram.add_scores."""
        if key not in self._scores:
            self._scores[key] = self._as_it_was(f"qk/{key}", ScoreGram(scores.shape[1], self.n_groups, scores.device, self._workspace))
        groups, keep = self._tokens_on(scores.device)
        self._scores[key].add_scores(scores, groups=groups, keep=keep, mask=mask)

    def outputs(self, key: str, z: Tensor, W_O: Callable[[], Tensor]) -> None:
        """Counts one batch of what a layer's heads hand to the output projection. z: [B, T, H, D_v]; W_O() is [H, D_v, d_model]."""
        if "cka" in self.circuits:
            self._projections.setdefault(key, W_O().detach())
            self._count(f"cka/{key}", z)
        if "ov" in self.circuits:
            if key not in self._outputs:
                self._outputs[key] = self._as_it_was(f"ov/{key}", OutputGram(W_O().detach(), self.n_groups))
            groups, keep = self._tokens_on(z.device)
            self._outputs[key].add(z, groups=groups, keep=keep)

    def keys(self, key: str, k: Tensor) -> None:
        """Counts one batch of a layer's keys, as they enter the scores: [B, G, T, D]."""
        self._count(f"keys/{key}", k.transpose(1, 2))

    def values(self, key: str, v: Tensor) -> None:
        """Counts one batch of a layer's values: [B, G, T, D_v]."""
        self._count(f"values/{key}", v.transpose(1, 2))

    def _count(self, name: str, x: Tensor) -> None:
        _, keep = self._tokens_on(x.device)
        if keep is not None and x.shape[:2] != keep.shape:
            raise HeadrankError(f"{name}: these are {x.shape[1]} vectors a sequence, not one a token, so none can be left out; use --measure operator")
        if name not in self._moments:
            self._moments[name] = self._as_it_was(name, HeadMoments(x.shape[2], x.shape[3], x.device))
        self._moments[name].add(x, keep=keep)

    def state(self) -> dict[str, Tensor]:
        """'qk/3/sums' -> sums over the batches so far, one accumulator after the other: what restore() takes, in another process."""
        return {f"{name}/{part}": tensor for name, its in self._accumulators().items() for part, tensor in its.state().items()}

    def merge(self, state: Iterable[tuple[str, Tensor]]) -> None:
        """Adds what another recorder counted on other sequences: the entries of its state(), in their order."""
        own = self._accumulators()
        for name, parts in itertools.groupby(state, key=lambda entry: entry[0].rpartition("/")[0]):
            its = {path.rpartition("/")[2]: tensor for path, tensor in parts}
            if name in own:  # else grams() says that it is missing
                own[name].merge(its)

    def _accumulators(self) -> dict[str, ScoreGram | OutputGram | HeadMoments]:
        scores, outputs = ({f"{circuit}/{key}": its for key, its in held.items()} for circuit, held in (("qk", self._scores), ("ov", self._outputs)))
        return {**scores, **outputs, **self._moments}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Goes on from what state() gave between two batches, to the same bits."""
        for path, tensor in state.items():
            name, _, part = path.rpartition("/")
            self._restored.setdefault(name, {})[part] = tensor

    def _as_it_was(self, name: str, fresh: A) -> A:
        """A new accumulator with what was restored for it."""
        if name in self._restored:
            fresh.restore(self._restored.pop(name))
        return fresh

    def grams(self, *, center: bool) -> dict[str, NDArray[np.float64]]:
        """'qk/3' -> [S, H, H]. Raises HeadrankError where a layer that was asked for was never seen."""
        found = {f"qk/{key}": scores.grams() for key, scores in self._scores.items()}
        found |= {f"ov/{key}": outputs.grams(center=center) for key, outputs in self._outputs.items()}
        found |= {name: self._linear_cka(name, moments)[None] for name, moments in self._moments.items()}
        wanted = [f"{circuit}/{key}" for circuit in self.circuits for key in self.layers]
        if missing := [name for name in wanted if name not in found]:
            raise HeadrankError(f"the forward pass never came to {', '.join(missing)}; use --source weights")
        return {name: found[name].cpu().numpy() for name in wanted}

    def _linear_cka(self, name: str, moments: HeadMoments) -> Tensor:
        key = name.partition("/")[2]
        return linear_cka_gram(moments.covariance(), n_head=self.layers[key].n_head, W_O=self._projections[key] if name.startswith("cka/") else None)


class Runner(Protocol):
    """A loaded model that can be run over batches."""

    def run(self, ids: Tensor, valid: Tensor | None, recorder: Recorder, *, last_layer: int) -> None:
        """One forward pass of ids [B, T] (valid: [B, T], False where padding) that feeds the recorder and need not go beyond last_layer."""


class DecoderRunner:
    """Our own decoder, on one CUDA device or on as many as it takes."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        device: torch.device,
        dtype: torch.dtype,
        config: ModelConfig | None = None,
        needs: Needs | None = None,
        last_layer: int | None = None,
    ) -> None:
        """config: the geometry, where the checkpoint's configuration is not one of ours. needs: of the pass beside the weights.
        last_layer: the last that a pass comes to; those behind it get no memory, nor does the output layer, which none comes to.

        Raises HeadrankError where the devices have too little memory, and what load_decoder raises.
        """
        config = config or ModelConfig.from_dict(checkpoint.config, where=f"{checkpoint.path}/{checkpoint.config_name}")
        last = config.n_layer - 1 if last_layer is None else last_layer
        parts = ["transformer.wte.", *(f"transformer.h.{layer}." for layer in range(last + 1))]
        sizes = {name: math.prod(info.shape) * dtype.itemsize for name, info in checkpoint.tensors.items()}
        weights = [sum(size for name, size in sizes.items() if name.startswith(part)) for part in parts]
        remedies = ["--dtype bfloat16"] * (dtype == torch.float32) + ["--layer N (layers behind N are not loaded)"] * (last > 0)
        where, needs = str(checkpoint.path), needs or Needs()
        sums = [0, *(needs.sums.get(layer, 0) for layer in range(last + 1))]
        devices = place_parts(weights, sums, work=needs.work, device=device, where=where, remedies=remedies)
        places = dict(zip(parts, devices, strict=True))

        def device_of(name: str) -> torch.device | None:
            return next((place for part, place in places.items() if name.startswith(part)), None)

        self.model = load_decoder(config, checkpoint.read, names=checkpoint.tensors.keys(), device=device_of, dtype=dtype, where=where)

    @torch.no_grad()
    def run(self, ids: Tensor, valid: Tensor | None, recorder: Recorder, *, last_layer: int) -> None:
        config = self.model.config
        hooks = []
        for layer, block in enumerate(self.model.blocks):
            if recorder.wants(str(layer), "values"):

                def hook(module: Any, args: Any, v: Tensor, key: str = str(layer)) -> None:
                    v = v if v.ndim == 4 else v.unflatten(-1, (config.n_head, config.d_head))  # MLA's is one flat projection
                    recorder.values(key, v.transpose(1, 2))

                hooks.append(block.attn.c_v.register_forward_hook(hook))
        try:
            self.model.hidden(ids, valid=valid, probe=_DecoderProbe(self.model, recorder), last_layer=last_layer)
        finally:
            for handle in hooks:
                handle.remove()


def load_runner(
    checkpoint: Checkpoint,
    architecture: Architecture,
    *,
    device: torch.device,
    dtype: torch.dtype,
    layers: Sequence[LayerFacts] | None = None,
    circuits: Sequence[str] = ("qk", "ov"),
) -> Runner:
    """The model of a checkpoint, ready to run over these layers (by default all): our own decoder, or one of transformers'.

    A CUDA device without a number stands for as many of the machine's as the model takes. Raises HeadrankError where the checkpoint
    cannot be run, and where the devices have too little memory.
    """
    wanted = [layer for layer in architecture.layers if layers is None or layer.index in {facts.index for facts in layers}]
    needs = needs_of(checkpoint, architecture, wanted, circuits, dtype)
    model_type = checkpoint.config.get("model_type")
    if model_type == MODEL_TYPE or (model_type == "nanochat" and checkpoint.format == "nanochat"):
        config = None if model_type == MODEL_TYPE else _nanochat_config(checkpoint, architecture)
        last_layer = None if layers is None else max(layer.index for layer in layers)
        return DecoderRunner(checkpoint, device=device, dtype=dtype, config=config, needs=needs, last_layer=last_layer)
    if checkpoint.format not in RUN_BY_TRANSFORMERS:
        raise HeadrankError(f"{checkpoint.path}: a forward pass needs a model folder or GGUF file on this disk, not {checkpoint.format}; use --source weights")
    from headrank.huggingface import TransformersRunner

    n_bytes = sum(math.prod(info.shape) for info in checkpoint.tensors.values()) * dtype.itemsize
    return TransformersRunner.load(checkpoint.path, device=device, dtype=dtype, needs=needs, n_bytes=n_bytes)


def needs_of(checkpoint: Checkpoint, architecture: Architecture, layers: Sequence[AttentionLayer], circuits: Sequence[str], dtype: torch.dtype) -> Needs:
    """The memory that a pass takes beside the weights. circuits: names of the Gram matrices to make, see headrank.measures."""
    sums: Counter[int] = Counter()
    for layer in layers:
        sums[layer.index] += sums_bytes(layer, circuits)
    in_layers = [info.shape for name, info in checkpoint.tensors.items() if len(info.shape) > 1 and any(part.isdigit() for part in name.split("."))]
    widest = max((max(shape[-2:]) for shape in in_layers), default=0)
    batch = WORK_TOKENS * (8 * architecture.d_model + 4 * widest) * dtype.itemsize
    n = max((layer.n_head * layer.d_v for layer in layers), default=0)
    end = 32 * n * n if "ov" in circuits or "cka" in circuits else 0  # when sums become Gram matrices: four [n, n] of float64 at a time
    return Needs(work=max(WORK_BYTES + batch, end), sums=sums)


def sums_bytes(layer: AttentionLayer, circuits: Sequence[str]) -> int:
    """Bytes of the accumulators of one layer, at most. circuits: names of the Gram matrices to make, see headrank.measures."""
    H, n, G = layer.n_head, layer.n_head * layer.d_v, layer.n_kv_head
    grams = 8 * MAX_GROUPS * H * H
    rows = max(PRODUCT_ROWS, layer.d_v)
    sizes = {
        "qk": grams,
        "ov": grams + 8 * MAX_GROUPS * n + 2 * n * (n + rows),  # half of a float32 matrix [n, n], and a block of rows
        "cka": 8 * n * n,
        "keys": 8 * (G * layer.d_qk) ** 2,
        "values": 8 * (G * layer.d_v) ** 2,
    }
    return sum(sizes[circuit] for circuit in circuits)


def _nanochat_config(checkpoint: Checkpoint, architecture: Architecture) -> ModelConfig:
    """nanochat's first decoder is ours. Later ones have windows and tensors that ours has not, which loading refuses by name."""
    pattern = str(checkpoint.config.get("window_pattern", "L"))
    if "S" in pattern.upper():
        where = f"{checkpoint.path}/{checkpoint.config_name}"
        raise HeadrankError(f"{where}: has local layers (window_pattern {pattern!r}), whose reach the file does not say; use --source weights")
    H, G = architecture.n_head, architecture.n_kv_head
    fc = next((info for name, info in checkpoint.tensors.items() if name.endswith("h.0.mlp.c_fc.weight")), None)
    embedding = next((info for name, info in checkpoint.tensors.items() if name.endswith("wte.weight")), None)
    if fc is None or embedding is None:
        raise HeadrankError(f"{checkpoint.path}: no MLP or no embedding of nanochat's; use --source weights")
    return ModelConfig(
        kind="mha" if G == H else "mqa" if G == 1 else "gqa",
        n_layer=architecture.n_layer,
        n_head=H,
        n_kv_head=G,
        d_head=architecture.d_head,
        d_model=architecture.d_model,
        d_mlp=fc.shape[0],
        vocab_size=embedding.shape[0],
        context=architecture.context or 2048,
    )


class _DecoderProbe:
    def __init__(self, model: Decoder, recorder: Recorder) -> None:
        self.model, self.recorder = model, recorder

    def scores(self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, scaling: float) -> Tensor | None:
        if self.recorder.wants(str(layer), "keys"):
            self.recorder.keys(str(layer), k)
        return self.recorder.scores(str(layer), q, k, scaling=scaling, v=v) if self.recorder.wants(str(layer), "qk") else None

    def outputs(self, layer: int, z: Tensor) -> None:
        if self.recorder.wants(str(layer), "ov"):
            self.recorder.outputs(str(layer), z, lambda: self.model.output_projection(layer))


def pass_over(
    runner: Runner, sequences: Sequences, layers: Sequence[LayerFacts], circuits: Sequence[str], *, center: bool = True, **settings: Any
) -> Mapping[str, NDArray[np.float64]]:
    """Runs all sequences and returns the Gram matrices, 'qk/3' -> [n_groups, H, H]. settings: those of recorded."""
    return recorded(runner, sequences, layers, circuits, **settings).grams(center=center)


@kept()
def recorded(
    runner: Runner,
    sequences: Sequences,
    layers: Sequence[LayerFacts],
    circuits: Sequence[str],
    *,
    device: torch.device,
    batch_size: int | None,
    skip_first: int = 0,
    n_groups: int,
    share: range | None = None,
    saved: SavedPass | None = None,
    on_batch: Callable[[int, int], None] = lambda done, total: None,
    remark: Callable[[str], None] = lambda text: None,
) -> Recorder:
    """Runs all sequences, or a share of them, and returns what was counted.

    Where no batch size is given, one is chosen and halved until a batch fits in memory. skip_first leaves out the first tokens of
    each sequence as queries and keys. saved: where the sums are kept at intervals; the pass goes on from what is there. on_batch is
    told how many sequences of how many are done. Raises HeadrankError where memory does not suffice for the batch size that was
    asked for, or for one sequence.
    """
    T = sequences.ids.shape[1]
    share = range(len(sequences.ids)) if share is None else share
    n = len(share)
    size = batch_size or max(1, min(n, TOKENS_PER_BATCH[device.type] // T))
    last_layer = max(layer.index for layer in layers)
    first = 0
    recorder = Recorder(layers, circuits, n_groups=n_groups)
    if saved is not None and (sums := saved.load()) is not None:
        recorder.restore(sums.state)
        first, size = sums.done, sums.batch_size
        remark(f"going on after {first} of {n} sequences, where an earlier pass was interrupted")
    while True:
        try:
            for done in range(first, n, size):
                on_batch(done, n)
                batch = share[done : done + size]
                _run_batch(runner, sequences, slice(batch.start, batch.stop), recorder, device, skip_first, n_groups, last_layer)
                if saved is not None and done + size < n:
                    saved.offer(recorder.state, done=done + size, batch_size=size)
            on_batch(n, n)
            return recorder
        except RuntimeError as error:  # torch.OutOfMemoryError is one; the CPU's allocator raises a plain one
            if not _is_out_of_memory(error):
                raise
            if batch_size:
                raise HeadrankError(f"out of memory with --batch-size {batch_size}; give a smaller one, or leave it out") from None
            if size == 1:
                raise HeadrankError(f"out of memory with a single sequence of {T} tokens; give a smaller --seq-len") from None
        first, size = 0, max(1, size // 2)  # from the start: sums of a batch that broke off half-way must not count
        remark(f"out of memory; going on with {size} sequences a batch")
        recorder = Recorder(layers, circuits, n_groups=n_groups)
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _run_batch(
    runner: Runner, sequences: Sequences, batch: slice, recorder: Recorder, device: torch.device, skip_first: int, n_groups: int, last_layer: int
) -> None:
    N, T = sequences.ids.shape
    ids = torch.from_numpy(sequences.ids[batch].astype(np.int64)).to(device)
    lengths = torch.from_numpy(sequences.lengths[batch]).to(device)
    position = torch.arange(T, device=device)
    valid = None if bool((lengths == T).all()) else position < lengths[:, None]
    keep = valid
    if skip_first:
        late = (position >= skip_first).expand(len(ids), T)
        keep = late if valid is None else late & valid
    groups = torch.arange(batch.start, batch.stop, device=device) * n_groups // N
    recorder.begin_batch(groups, keep)
    runner.run(ids, valid, recorder, last_layer=last_layer)


def _is_out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)
