"""What scripts/benchmark.py compares, a process a job: headrank, the obvious way, the bare forward pass, and what the machine can do.

python scripts/benchmark_jobs.py weights '{"path": "checkpoints/128M/mha"}'
"""

from typing import Any

import numpy as np
import torch
from benchmark_meter import Meter, main, weight_bytes
from torch import Tensor

import headrank.null
import headrank.rotary  # noqa: F401  (what a measurement imports when it needs it)
from headrank.architectures import Architecture, AttentionLayer, describe
from headrank.checkpoints import Checkpoint, open_checkpoint
from headrank.forward import DecoderRunner, Recorder, load_runner, pass_over
from headrank.gram import product_of_rows
from headrank.measure import Settings, measure
from headrank.measures import find_measure
from headrank.memory import kept
from headrank.selection import ModelRef
from headrank.store import LayerFacts
from headrank.tokens import Sequences

CIRCUITS = tuple(find_measure("operator").grams.values())


# Weights


def weights(path: str, times: int = 1) -> dict[str, Any]:
    """headrank: every layer, both circuits, from opening the files to the Gram matrices."""
    meter = Meter()
    seconds = meter.seconds(lambda: measure(ModelRef(path=path, label="", scale=None), Settings(source="weights")), times=times)
    return {"seconds": seconds, "peak": meter.peak()}


def materialise(path: str) -> dict[str, Any]:
    """The obvious way, for plain heads of our own checkpoints: every M_h = L_h R_h^T written out, flattened, multiplied."""
    meter = Meter()

    def work() -> None:
        checkpoint = open_checkpoint(path)
        H = checkpoint.config["n_head"]
        for layer in range(checkpoint.config["n_layer"]):
            q, k, v, o = (checkpoint.read(f"transformer.h.{layer}.attn.{name}.weight").float() for name in ("c_q", "c_k", "c_v", "c_proj"))
            for left, right in ((q, k), (v, o.T)):
                M = left.unflatten(0, (H, -1)).transpose(1, 2) @ right.unflatten(0, (H, -1))  # [H, d, d]
                M.flatten(1) @ M.flatten(1).T

    return {"seconds": meter.seconds(work), "peak": meter.peak()}


def floor(path: str) -> dict[str, Any]:
    """What the machine needs at least: one matrix product a circuit of as many operations as symmetry and sharing leave, or reading the bytes.

    `torch` is torch's own product, `fastest` the fastest one that we know.
    """
    meter = Meter()
    checkpoint = open_checkpoint(path)
    architecture = describe(checkpoint)
    names = [name for name in checkpoint.tensors if ".attn." in name]
    buffer = torch.empty(max(checkpoint.read(name).numel() for name in names))

    def read() -> None:
        for name in names:
            tensor = checkpoint.read(name).flatten()
            buffer[: len(tensor)].copy_(tensor)

    seconds = {"read": meter.seconds(read)}
    for name, product in (("torch", lambda a, b: a @ b.T), ("fastest", product_of_rows)):
        factors = [_factors_of(layer, architecture) for layer in architecture.layers]

        def multiply(product: Any = product, factors: Any = factors) -> None:
            for a, b in factors:
                product(a, b), product(a, b)  # two circuits

        seconds[name] = meter.seconds(multiply)
    return {"seconds": max(seconds["read"], min(seconds["torch"], seconds["fastest"])), **seconds}


_made: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}


def _factors_of(layer: AttentionLayer, architecture: Architecture) -> tuple[Tensor, Tensor]:
    """Two matrices whose product takes as many operations as one circuit: distinct pairs of heads, on and above the diagonal, left and right."""
    H, G, k = layer.n_head, layer.n_kv_head, layer.d_qk
    pairs = (H * (H + 1) + G * (G + 1)) / 2
    shape = H * k, architecture.d_model, round(pairs * k / H)
    if shape not in _made:
        _made[shape] = torch.randn(shape[0], shape[1]), torch.randn(shape[2], shape[1])
    return _made[shape]


# Activations


def _load(path: str, device: str, dtype: str) -> tuple[Checkpoint, Architecture, Any]:
    checkpoint = open_checkpoint(path)
    architecture = describe(checkpoint)
    runner = load_runner(checkpoint, architecture, device=torch.device(device), dtype=getattr(torch, dtype))
    return checkpoint, architecture, runner


def _random_sequences(vocab_size: int, n_sequences: int, seq_len: int) -> Sequences:
    ids = np.random.default_rng(0).integers(0, vocab_size, (n_sequences, seq_len), dtype=np.int32)
    return Sequences(ids=ids, lengths=np.full(n_sequences, seq_len), source="random")


def bare(path: str, n_sequences: int, seq_len: int, device: str, dtype: str, times: int) -> dict[str, Any]:
    """The forward pass alone: no output layer, no cache, scaled-dot-product attention."""
    meter = Meter(device)
    _, architecture, runner = _load(path, device, dtype)
    ids = torch.from_numpy(_random_sequences(architecture.vocab_size or 0, n_sequences, seq_len).ids).long().to(device)

    @torch.no_grad()
    def work() -> None:
        if isinstance(runner, DecoderRunner):
            runner.model.hidden(ids)
        else:
            runner.model(input_ids=ids, use_cache=False)

    return {"seconds": meter.seconds(work, times=times), "peak": meter.peak(), "weight_bytes": weight_bytes(runner.model)}


def activations(path: str, n_sequences: int, seq_len: int, device: str, dtype: str, times: int, layers: list[int] | None = None) -> dict[str, Any]:
    """headrank: the pass over the same tokens with both circuits, of all layers or of those given."""
    meter = Meter(device)
    _, architecture, runner = _load(path, device, dtype)
    sequences = _random_sequences(architecture.vocab_size or 0, n_sequences, seq_len)
    facts = [LayerFacts(index=layer.index, n_head=layer.n_head, n_kv_head=layer.n_kv_head) for layer in architecture.layers]
    chosen = [layer for layer in facts if layers is None or layer.index in layers]

    def work() -> None:
        pass_over(runner, sequences, chosen, CIRCUITS, device=torch.device(device), batch_size=None, n_groups=n_sequences)

    return {"seconds": meter.seconds(work, times=times), "peak": meter.peak(), "weight_bytes": weight_bytes(runner.model)}


def pass_and_counting(path: str, n_sequences: int, seq_len: int, device: str, dtype: str, times: int) -> dict[str, Any]:
    """headrank's pass, and on its own what it does with queries, keys and outputs, of random numbers: scores, sums and Gram matrices."""
    whole = activations(path, n_sequences, seq_len, device, dtype, times)
    architecture = describe(open_checkpoint(path))
    H, D, d = architecture.n_head, architecture.d_head, architecture.d_model
    q, k, z = (torch.randn(n_sequences, seq_len, H, D, dtype=getattr(torch, dtype), device=device) for _ in range(3))
    W_O = torch.randn(d, H * D, dtype=z.dtype, device=device).T.unflatten(0, (H, D))
    layers = [LayerFacts(index=layer.index, n_head=H, n_kv_head=H) for layer in architecture.layers]

    @kept()
    def work() -> None:
        recorder = Recorder(layers, CIRCUITS, n_groups=n_sequences)
        recorder.begin_batch(torch.arange(n_sequences, device=device), None)
        for layer in layers:
            recorder.scores(layer.key, q.transpose(1, 2), k.transpose(1, 2), scaling=D**-0.5)
            recorder.outputs(layer.key, z, lambda: W_O)
        recorder.grams(center=True)

    return {**whole, "counting": Meter(device).seconds(work, times=times)}


# Loading


def first_layer(path: str) -> dict[str, Any]:
    """From the path to the numbers of the first layer, in weights mode."""
    meter = Meter()
    ref, settings = ModelRef(path=path, label="", scale=None), Settings(source="weights")
    return {"seconds": meter.seconds(lambda: measure(ref, settings, layers=lambda facts: [facts[0].index])), "peak": meter.peak()}


def read_layers(path: str, n_layers: int) -> dict[str, Any]:
    """Reading all tensors of so many layers into memory as float32."""
    meter = Meter()
    checkpoint = open_checkpoint(path)
    names = [name for name in checkpoint.tensors if any(f".h.{layer}." in name for layer in range(n_layers))]
    return {"seconds": meter.seconds(lambda: [checkpoint.read(name).float() for name in names]), "peak": meter.peak()}


def load(path: str, device: str, dtype: str) -> dict[str, Any]:
    """From the path to a running forward pass of a few tokens."""
    meter = Meter(device)
    loaded = []

    @torch.no_grad()
    def work() -> None:
        loaded.append(_load(path, device, dtype)[2].model)
        loaded[0].hidden(torch.zeros(1, 8, dtype=torch.long, device=device))

    return {"seconds": meter.seconds(work), "peak": meter.peak(), "weight_bytes": weight_bytes(loaded[0])}


if __name__ == "__main__":
    main({job.__name__: job for job in (weights, materialise, floor, bare, activations, pass_and_counting, first_layer, read_layers, load)})
