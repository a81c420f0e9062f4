"""Trains the variants of a family, or some of them, on text or token files.

    python scripts/train.py --config configs/nano.toml --text corpus.txt --steps 700 --batch-size 32
    torchrun --nproc-per-node 8 scripts/train.py --config configs/128M.toml --tokens train.bin --steps 20000

Matrices are trained by torch.optim.Muon, embeddings by AdamW. Every variant sees the same tokens in the same order. A run
that was stopped goes on from its last checkpoint; a finished one is left alone.
"""

import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer
from safetensors.torch import save_file
from torch import Tensor

from headrank.config import Family, ModelConfig, Variant, load_family
from headrank.errors import HeadrankError
from headrank.model import Decoder, new_decoder
from headrank.output import replace_atomically
from headrank.tokens import TokenStream, load_tokenizer, read_token_files

VALIDATION_BLOCK = 64 * 1024  # tokens; every twentieth block is held out, so that both splits hold all of the sources
VALIDATION_EVERY = 20
EVALUATE_EVERY = 100  # steps


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What decides the numbers of a run; a run is resumed only under the same."""

    steps: int
    """Optimizer steps."""
    batch_size: int
    """Sequences a step, over all processes."""
    seq_len: int
    """Tokens a sequence."""
    muon_lr: float
    """Peak learning rate of the matrices."""
    adamw_lr: float
    """Peak learning rate of the embeddings."""
    weight_decay: float
    """Decoupled weight decay of the matrices."""
    warmup: float
    """Fraction of the steps over which the rates rise from 0."""
    decay: float
    """Fraction of the steps, the last ones, over which they fall to 0."""
    seed: int
    """Seed of the weights and of the order of the data."""
    dtype: str
    """bfloat16 or float32: of the matrix products. Weights and optimizer are float32."""


class Data:
    """Token ids, split into training and validation blocks; batches are functions of seed and step alone."""

    def __init__(self, stream: TokenStream, seq_len: int) -> None:
        ids = torch.from_numpy(stream.ids.astype(np.int64, copy=False))
        blocks = ids.split(VALIDATION_BLOCK if len(ids) > 4 * VALIDATION_BLOCK * VALIDATION_EVERY else max(seq_len + 1, len(ids) // 100))
        held_out = range(VALIDATION_EVERY - 1, len(blocks), VALIDATION_EVERY)
        self.train = torch.cat([block for number, block in enumerate(blocks) if number not in held_out])
        self.validation = torch.cat([blocks[number] for number in held_out])
        self.seq_len, self.stream = seq_len, stream
        for name, part in (("training", self.train), ("validation", self.validation)):
            if len(part) <= seq_len:
                raise HeadrankError(f"{stream.name}: only {len(part)} {name} tokens, fewer than one sequence of {seq_len + 1}; give more text")

    def batch(self, part: Tensor, size: int, seed: int) -> Tensor:
        """[size, seq_len + 1] ids at random places."""
        starts = torch.randint(len(part) - self.seq_len, (size,), generator=torch.Generator().manual_seed(seed))
        return torch.stack([part[start : start + self.seq_len + 1] for start in starts.tolist()])


def rate(step: int, settings: Settings) -> float:
    """The learning rates' factor at a step: linear warm-up, constant, linear decay."""
    rise = (step + 1) / max(1.0, settings.warmup * settings.steps)
    fall = (settings.steps - step) / max(1.0, settings.decay * settings.steps)
    return min(1.0, rise, fall)


def optimizers(model: Decoder, settings: Settings) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for embedding and output."""
    matrices = [p for name, p in model.named_parameters() if ".h." in name]
    others = [p for name, p in model.named_parameters() if ".h." not in name]
    return [
        torch.optim.Muon(matrices, lr=settings.muon_lr, weight_decay=settings.weight_decay, momentum=0.95),
        torch.optim.AdamW(others, lr=settings.adamw_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def loss_of(model: torch.nn.Module, batch: Tensor, device: torch.device, dtype: str) -> Tensor:
    """Mean cross entropy in nats a token; dtype: of the matrix products."""
    batch = batch.to(device)
    with torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
        logits = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


@torch.no_grad()
def validation_loss(model: Decoder, data: Data, settings: Settings, device: torch.device, *, batches: int) -> float:
    """Mean loss in nats a token over the same held-out sequences every time."""
    losses = [loss_of(model, data.batch(data.validation, settings.batch_size, 10**9 + number), device, settings.dtype) for number in range(batches)]
    return float(torch.stack(losses).mean())


def trigram_loss(train: Tensor, validation: Tensor, vocab_size: int) -> float:
    """Nats a token of an interpolated trigram model, its four weights fitted by EM on the validation text itself: the best it can do."""
    n = vocab_size
    unigram = torch.bincount(train, minlength=n).double()
    bigram = torch.bincount(train[:-1] * n + train[1:], minlength=n**2).double()
    trigram = torch.bincount((train[:-2] * n + train[1:-1]) * n + train[2:], minlength=n**3).double()
    a, b, c = validation[:-2], validation[1:-1], validation[2:]
    pair, triple = a * n + b, (a * n + b) * n + c
    contexts = bigram[pair].clamp(min=1), unigram[b].clamp(min=1)
    estimates = torch.stack(
        [trigram[triple] / contexts[0], bigram[b * n + c] / contexts[1], unigram[c] / len(train), torch.full(c.shape, 1 / n, dtype=torch.float64)]
    )
    weights = torch.full((4, 1), 0.25, dtype=torch.float64)
    for _ in range(50):
        shares = weights * estimates
        weights = (shares / shares.sum(0)).mean(1, keepdim=True)
    return float(-(weights * estimates).sum(0).log().mean())


@dataclass
class Run:
    """One variant's training: where it stands and what it has seen."""

    folder: Path
    step: int
    curve: list[dict[str, float]]

    def save(self, model: Decoder, states: list[dict[str, Any]], record: dict[str, Any], tokenizer: Path | None) -> None:
        """Writes the model as a checkpoint that headrank reads, and the state that a resumed run needs, each of them whole or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_checkpoint(self.folder, model, record, tokenizer)
        state = {"step": self.step, "curve": self.curve, "model": model.state_dict(), "optimizers": states}
        with replace_atomically(self.folder / "state.pt") as path:
            torch.save(state, path)


def write_checkpoint(folder: Path, model: Decoder, record: dict[str, Any], tokenizer: Path | None) -> None:
    """Writes config.json, model.safetensors (bfloat16), training.json and the tokenizer, if there is one."""
    folder.mkdir(parents=True, exist_ok=True)
    with replace_atomically(folder / "model.safetensors") as path:
        save_file({name: p.detach().to("cpu", torch.bfloat16).contiguous() for name, p in model.named_parameters()}, path)
    for name, text in (("config.json", model.config.to_json()), ("training.json", json.dumps(record, indent=1) + "\n")):
        with replace_atomically(folder / name) as path:
            path.write_text(text, encoding="utf-8")
    if tokenizer is not None:
        with replace_atomically(folder / "tokenizer.json") as path:
            load_tokenizer(tokenizer).save(str(path))


def kept_steps(steps: int, count: int) -> set[int]:
    """About `count` steps from 1 to the last, evenly spaced on a logarithmic scale."""
    return {round(math.exp(math.log(max(steps, 2)) * number / max(1, count - 1))) for number in range(count)} if count else set()


@contextmanager
def process_group() -> Iterator[tuple[int, int, torch.device]]:
    """Rank, number of processes and device: alone, or as torchrun started us."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if "RANK" not in os.environ:
        yield 0, 1, device
        return
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    try:
        yield dist.get_rank(), dist.get_world_size(), device
    finally:
        dist.destroy_process_group()


def average_gradients(model: Decoder, world: int) -> None:
    """The mean over processes. Muon updates whole matrices, so every process keeps all of them and does the same step."""
    if world > 1:
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad.div_(world)


def train(variant: Variant, data: Data, settings: Settings, folder: Path, *, record: dict[str, Any], tokenizer: Path | None,
          save_every: int, keep: int, rank: int, world: int, device: torch.device) -> None:  # fmt: skip
    """Trains one variant to the last step, from its last checkpoint where there is one."""
    model = new_decoder(variant.model, seed=settings.seed).to(device)
    opts = optimizers(model, settings)
    run = Run(folder=folder, step=0, curve=[])
    record = {**record, "variant": variant.name, "settings": asdict(settings)}
    if (folder / "state.pt").is_file():
        previous = json.loads((folder / "training.json").read_text())
        if previous["settings"] != record["settings"] or previous["data"] != record["data"]:
            raise HeadrankError(f"{folder}: holds a run with other settings or data; move it away, or give the settings it was started with")
        state = torch.load(folder / "state.pt", map_location=device, weights_only=True)
        run.step, run.curve = state["step"], state["curve"]
        model.load_state_dict(state["model"])
        for opt, saved in zip(opts, state["optimizers"], strict=True):
            opt.load_state_dict(saved)
    peaks = [group["lr"] if "peak" not in group else group["peak"] for opt in opts for group in opt.param_groups]
    for opt, peak in zip(opts, peaks, strict=True):
        opt.param_groups[0]["peak"] = peak
    if run.step >= settings.steps:
        say(rank, f"{variant.label}: finished before, validation loss {run.curve[-1]['validation_loss']:.3f}")
        return
    share = settings.batch_size // world
    saved_at = time.monotonic()
    began, began_step = time.monotonic(), run.step
    keep_at = kept_steps(settings.steps, keep)
    while run.step < settings.steps:
        batch = data.batch(data.train, settings.batch_size, settings.seed * 10**8 + run.step)[rank * share : (rank + 1) * share]
        loss = loss_of(model, batch, device, settings.dtype)
        loss.backward()
        average_gradients(model, world)
        for opt in opts:
            for group in opt.param_groups:
                group["lr"] = group["peak"] * rate(run.step, settings)
            opt.step()
            opt.zero_grad(set_to_none=True)
        run.step += 1
        due = time.monotonic() - saved_at > save_every
        if world > 1:  # one clock decides, or some processes would wait for the others for ever
            flag = torch.tensor(float(due), device=device)
            dist.broadcast(flag, 0)
            due = bool(flag)
        kept = run.step in keep_at
        last = run.step == settings.steps
        tokens = run.step * settings.batch_size * settings.seq_len
        if run.step % EVALUATE_EVERY == 0 or kept or last:
            held_out = validation_loss(model, data, settings, device, batches=64 if last else 8)
            pace = (run.step - began_step) * settings.batch_size * settings.seq_len / (time.monotonic() - began)
            run.curve.append({"step": run.step, "tokens": tokens, "loss": round(loss.item(), 4), "validation_loss": round(held_out, 4)})
            say(rank, f"{variant.label}: step {run.step}/{settings.steps}  loss {loss.item():.3f}  validation {held_out:.3f}  {pace:,.0f} tokens/s")
        if due or kept or last:
            now = {**record, "step": run.step, "tokens_seen": tokens, "loss_curve": run.curve}
            if rank == 0 and kept:
                write_checkpoint(folder / "steps" / f"step_{run.step:08d}", model, now, tokenizer)
            if rank == 0 and (due or last):
                run.save(model, [opt.state_dict() for opt in opts], now, tokenizer)
            saved_at = time.monotonic() if due else saved_at


def say(rank: int, text: str) -> None:
    if rank == 0:
        print(text, flush=True)


def main(
    config: Annotated[Path, typer.Option(help="The family's TOML file.")],
    text: Annotated[list[Path] | None, typer.Option(help="Text files (UTF-8); several after one flag each.")] = None,
    tokens: Annotated[list[Path] | None, typer.Option(help="Token ids: .npy, or .bin of 16-bit unsigned integers.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="tokenizer.json for --text; without one, text is read as bytes.")] = None,
    variant: Annotated[list[str] | None, typer.Option(help="Names of variants; all of the family by default.")] = None,
    out: Annotated[Path, typer.Option("-o", "--out", help="Where families live.")] = Path("checkpoints"),
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 1000,
    batch_size: Annotated[int, typer.Option(help="Sequences a step, over all processes.")] = 32,
    seq_len: Annotated[int, typer.Option(help="Tokens a sequence; the family's context by default.")] = 0,
    muon_lr: Annotated[float, typer.Option(help="Peak learning rate of the matrices.")] = 0.02,
    adamw_lr: Annotated[float, typer.Option(help="Peak learning rate of embedding and output.")] = 0.003,
    weight_decay: Annotated[float, typer.Option(help="Decoupled weight decay of the matrices.")] = 0.0,
    warmup: Annotated[float, typer.Option(help="Fraction of the steps of rising rates.")] = 0.05,
    decay: Annotated[float, typer.Option(help="Fraction of the steps of falling rates.")] = 0.4,
    seed: Annotated[int, typer.Option(help="Seed of weights and order of data.")] = 0,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32, of the matrix products; auto: bfloat16 on CUDA.")] = "auto",
    save_every: Annotated[int, typer.Option(help="Seconds between checkpoints.")] = 60,
    keep: Annotated[int, typer.Option(help="Keep about this many steps, logarithmically spaced, under steps/.")] = 0,
) -> None:
    """Trains the variants of a family, or some of them."""
    try:
        family: Family = load_family(config)
        if dtype not in ("auto", "bfloat16", "float32"):
            raise HeadrankError(f"--dtype {dtype}: give bfloat16, float32 or auto")
        if dtype == "auto":
            dtype = "bfloat16" if torch.cuda.is_available() else "float32"
        geometry: ModelConfig = family.variants[0].model
        settings = Settings(steps=steps, batch_size=batch_size, seq_len=seq_len or geometry.context, muon_lr=muon_lr, adamw_lr=adamw_lr,
                            weight_decay=weight_decay, warmup=warmup, decay=decay, seed=seed, dtype=dtype)  # fmt: skip
        stream = read_token_files(text=text or (), tokens=tokens or (), tokenizer=tokenizer, vocab_size=geometry.vocab_size)
        data = Data(stream, settings.seq_len)
        record: dict[str, Any] = {"data": {"name": stream.name, "sha256": stream.sha256, "n_tokens": len(stream.ids)}}
        if geometry.vocab_size <= 256:
            record["trigram_loss"] = round(trigram_loss(data.train, data.validation, geometry.vocab_size), 4)
        with process_group() as (rank, world, device):
            if batch_size % world:
                raise HeadrankError(f"--batch-size {batch_size} is not a multiple of the {world} processes")
            say(rank, f"{stream.name}: {len(data.train):,} tokens to train on, {len(data.validation):,} held out"
                + (f"; a trigram model's loss is {record['trigram_loss']}" if "trigram_loss" in record else ""))  # fmt: skip
            for chosen in [family.variant(name) for name in variant] if variant else family.variants:
                train(chosen, data, settings, out / family.scale / chosen.name, record=record, tokenizer=tokenizer,
                      save_every=save_every, keep=keep, rank=rank, world=world, device=device)  # fmt: skip
    except HeadrankError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from None


if __name__ == "__main__":
    typer.run(main)
