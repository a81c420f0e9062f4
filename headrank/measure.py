"""The only joiner: a checkpoint and settings in, a Measurement out, from the store where it has it."""

import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from headrank.config import MODEL_TYPE
from headrank.errors import HeadrankError, NotFiniteError
from headrank.measures import OPERATOR, check_source, find_measure
from headrank.memory import kept
from headrank.processes import ALONE, Team, team
from headrank.selection import ModelRef, resolve_layers
from headrank.store import MAX_GROUPS, LayerFacts, Measurement, ModelFacts, Store, is_measurement, read_measurement

if TYPE_CHECKING:
    from torch import Tensor

    from headrank.architectures import Architecture, AttentionLayer
    from headrank.checkpoints import Checkpoint
    from headrank.forward import Recorder
    from headrank.gram import Workspace
    from headrank.resume import SavedPass
    from headrank.tokens import Sequences, TokenStream

OWN_MODELS = (MODEL_TYPE, "nanochat")  # run by our own decoder
FORM = {"measure": OPERATOR, "rope_offset": 0, "rope_mean": None}  # settings of what is measured of the heads, and what is plain
GPU_DEVICES = ("nvidia", "nvhost", "nvmap", "nvgpu", "dxg", "kfd")  # beginnings of what stands in /dev where there is a GPU: Linux, WSL, Jetson, AMD
KEEP_EVERY = 60.0  # seconds between two times that layers of one model are kept while others are still measured

Part = tuple[tuple[LayerFacts, ...], dict[str, np.ndarray], dict[str, str]]
"""Layers, their Gram matrices, and why a layer has none."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How a checkpoint is to be read, where its own files do not say."""

    config: Path | None = None
    """A config.json for a file that has none."""
    layout: Path | None = None
    """A TOML file that describes an architecture that the table does not have."""
    adapter: Path | None = None
    """A folder with a LoRA adapter that is added to the weights."""
    step: int | None = None
    """Which of a nanochat folder's models; the last where none is given."""
    part: str = "text"
    """text or vision of a multimodal model."""

    def open(self, path: str) -> "tuple[Checkpoint, Architecture]":
        """The checkpoint and what its tensors mean; headers alone are read. Raises HeadrankError where it cannot be read."""
        from headrank.architectures import describe
        from headrank.checkpoints import open_checkpoint

        checkpoint = open_checkpoint(path, config=self.config, step=self.step, adapter=self.adapter)
        return checkpoint, describe(checkpoint, layout=self.layout, part=self.part)

    @property
    def key(self) -> dict[str, str]:
        """What of this changes numbers and does not show in the checkpoint's own identity."""
        layout = {"layout": hashlib.sha256(self.layout.read_bytes()).hexdigest()} if self.layout is not None else {}
        return layout | ({"part": self.part} if self.part != "text" else {})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a measurement depends on, beside the checkpoint."""

    reading: Reading = field(default_factory=Reading)
    """How the checkpoint is read."""

    source: str = "activations"
    """activations or weights."""
    measure: str = OPERATOR
    """How two heads are compared, see headrank.measures."""
    raw: bool = False
    """Weights: matrices as they lie in the file, no gains or biases folded in."""
    mla_part: str = "both"
    """Weights of MLA: nope, rope or both."""
    rope_offset: int = 0
    """Weights: the form between a query and the key so many tokens before it."""
    rope_mean: int | None = None
    """Weights: the mean over the offsets 0 … rope_mean - 1 of the inner products of the forms there."""
    center: bool = True
    """Outputs: about their mean over tokens."""
    text: tuple[Path, ...] = ()
    """Text files to feed; the bundled text where neither these nor tokens are given."""
    tokens: tuple[Path, ...] = ()
    """Token files to feed."""
    seq_len: int | None = None
    """Tokens a sequence; by default the model's context, at most 512."""
    n_sequences: int = 64
    """Sequences to feed, at most."""
    seed: int = 0
    """Seed of the choice of sequences."""
    skip_first: int = 0
    """Positions at the start of each sequence that do not count."""
    null: bool = False
    """Also what random heads of the same geometry have."""
    batch_size: int | None = None
    """Sequences a batch; by default as many as fit."""
    device: str = "auto"
    """auto, cpu, cuda or mps."""
    dtype: str = "auto"
    """auto, float32, bfloat16 or float16: of the forward pass."""


class Progress(Protocol):
    """Is told how far a measurement has come."""

    def start(self, label: str, total: int, unit: str) -> None: ...
    def advance(self, done: int) -> None: ...
    def remark(self, text: str) -> None: ...


@dataclass
class Silent:
    """No progress; remarks are kept."""

    remarks: list[str] = field(default_factory=list)

    def start(self, label: str, total: int, unit: str) -> None:
        return

    def advance(self, done: int) -> None:
        return

    def remark(self, text: str) -> None:
        self.remarks.append(text)


LayerChoice = Callable[[Sequence[LayerFacts]], Sequence[int]]


def all_layers(layers: Sequence[LayerFacts]) -> Sequence[int]:
    """Every layer of a model."""
    return [layer.index for layer in layers]


def measure(
    ref: ModelRef, settings: Settings, *, layers: LayerChoice = all_layers, store: Store | None = None, progress: Progress | None = None
) -> Measurement:
    """Gram matrices of all circuits that the measure has, for the layers of a model that `layers` chooses from those with attention.

    ref.path: a checkpoint, or a measurement file. What the store has is not measured again; what is measured goes there. The processes of
    headrank.processes.company share the work: sequences from activations, layers from weights.
    Raises HeadrankError where the model cannot be read, a layer does not exist, or the tokens do not fit the model.
    """
    progress = progress or Silent()
    _check_settings(settings)
    path = Path(ref.path)
    if path.is_file() and is_measurement(path):
        return _stored(read_measurement(path), settings, layers, ref)

    checkpoint, architecture = settings.reading.open(ref.path)
    facts = [
        LayerFacts(index=layer.index, n_head=layer.n_head, n_kv_head=layer.n_kv_head, group=layer.group, window=layer.window) for layer in architecture.layers
    ]
    chosen = resolve_layers(list(layers(facts)), facts, label=ref.label)
    model = ModelFacts(
        checkpoint=ref.path,
        fingerprint=checkpoint.fingerprint(),
        family=architecture.family,
        kind=architecture.kind,
        n_layer=architecture.n_layer,
        n_head=architecture.n_head,
        n_kv_head=architecture.n_kv_head,
        d_model=architecture.d_model,
        d_head=architecture.d_head,
        n_parameters=architecture.n_parameters,
        kv_values_per_token=architecture.kv_values_per_token,
        kv_values_per_token_of_mha=architecture.kv_values_per_token_of_mha,
        trained=_trained(checkpoint.path),
    )
    work = _work(checkpoint, architecture, settings)
    key = Store.key(checkpoint=checkpoint.identity(), source=settings.source, **settings.reading.key, **work.settings)
    known = store.find(key) if store else None
    have = {layer.key for layer in known.layers} if known else set()
    missing = [layer for layer in chosen if layer.key not in have]
    last_kept = time.monotonic()
    folder = store.folder if store else None
    saved = work.saved_pass(folder, key, missing, progress, team()) if missing and folder else None
    if missing:
        task = Task(path=ref.path, fingerprint=model.fingerprint, settings=settings, decided=work.settings, layers=tuple(missing), key=key, folder=folder)
        with team().handing_out(task):
            for layers_done, grams, faults in work.run(missing, ref.label, progress, saved=saved, team=team()):
                fresh = Measurement(
                    model=model, source=settings.source, settings=work.settings, tokens=work.tokens, layers=layers_done, grams=grams, faults=faults
                )
                known = fresh.joined(known) if known else fresh
                if store and time.monotonic() - last_kept > KEEP_EVERY:  # what an interruption must not lose
                    store.keep(key, known)
                    last_kept = time.monotonic()
    assert known is not None
    twins = _WeightsWork(checkpoint, architecture, settings) if settings.null and (settings.measure == OPERATOR or settings.source == "weights") else None
    new_nulls = {circuit: name for circuit, name in twins.grams.items() if name not in known.null} if twins else {}
    if twins and new_nulls:
        from headrank.null import null_ranks

        progress.start(f"{ref.label}: null", 0, "")
        known = replace(
            known, null={**known.null, **{name: null_ranks(checkpoint, architecture, circuit, gram=twins.gram) for circuit, name in new_nulls.items()}}
        )
    if (missing or new_nulls) and store:
        if why_not := store.keep(key, known):
            progress.remark(why_not)
        elif saved:
            saved.remove()
    return replace(known, model=model, layers=tuple(chosen), null=known.null if settings.null else {})


@dataclass(frozen=True, kw_only=True)
class Task:
    """What other processes need to know to do their shares of a measurement."""

    path: str
    """The checkpoint, as each of them opens it."""
    fingerprint: str
    """Of the checkpoint that the first process reads."""
    settings: Settings
    """As they were asked for."""
    decided: dict[str, Any]
    """Every setting that changes a number, as the first process understood them; tokens among them."""
    layers: tuple[LayerFacts, ...]
    """The layers to measure."""
    key: str
    """Of the measurement in the store."""
    folder: Path | None
    """Where an interrupted pass may leave its sums."""


def do_share(task: Task, team: Team) -> None:
    """Another process's part of measure(): its share, from a checkpoint that it opens itself, and must find to be the same."""
    progress = Silent()

    def opened() -> "_WeightsWork | _ActivationsWork":
        checkpoint, architecture = task.settings.reading.open(task.path)
        if checkpoint.fingerprint() != task.fingerprint:
            raise HeadrankError(f"{task.path}: here it is another checkpoint than the first process reads; give all of them the same")
        work = _work(checkpoint, architecture, task.settings)
        if unlike := [name for name, value in task.decided.items() if work.settings.get(name) != value]:
            raise HeadrankError(f"{task.path}: {', '.join(unlike)} would be others here than in the first process; give all of them the same files and devices")
        return work

    work = team.together(opened)
    saved = work.saved_pass(task.folder, task.key, task.layers, progress, team) if task.folder else None
    for _ in work.run(task.layers, "", progress, saved=saved, team=team):
        continue
    if saved:
        saved.remove()


def _work(checkpoint: "Checkpoint", architecture: "Architecture", settings: Settings) -> "_WeightsWork | _ActivationsWork":
    return _WeightsWork(checkpoint, architecture, settings) if settings.source == "weights" else _ActivationsWork(checkpoint, architecture, settings)


def _stored(measurement: Measurement, settings: Settings, layers: LayerChoice, ref: ModelRef) -> Measurement:
    if measurement.source != settings.source:
        raise HeadrankError(f"{ref.path}: measured from {measurement.source}; give --source {measurement.source}")
    held, asked = ({name: other.get(name, plain) for name, plain in FORM.items()} for other in (measurement.settings, vars(settings)))
    if held != asked:
        flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in held.items() if value != FORM[name]) or "the plain measure"
        raise HeadrankError(f"{ref.path}: was measured with {flags}; ask for that, or give the checkpoint")
    chosen = tuple(resolve_layers(list(layers(measurement.layers)), measurement.layers, label=ref.label))
    return replace(measurement, layers=chosen, null=measurement.null if settings.null else {})


def _check_settings(settings: Settings) -> None:
    """Refuses combinations that have no meaning, before anything is read."""
    check_source(settings.measure, settings.source)
    if settings.rope_offset or settings.rope_mean is not None:
        flag = "--rope-offset" if settings.rope_offset else "--rope-mean"
        if settings.rope_offset and settings.rope_mean is not None:
            raise HeadrankError("give --rope-offset or --rope-mean, not both")
        if settings.source != "weights":
            raise HeadrankError(f"{flag} is about the form of the weights, and activations have their positions in them; add --source weights")
        if settings.measure != OPERATOR:
            raise HeadrankError(f"{flag} turns keys towards queries, which --measure {settings.measure} does not compare; leave out one of them")
        if settings.reading.part != "text":
            raise HeadrankError(f"{flag}: how the {settings.reading.part} part turns its heads is not recorded; leave it out")
        if settings.mla_part == "nope":
            raise HeadrankError(f"{flag}: --mla-part nope is the part that is not turned; leave out one of them")
    if settings.measure != OPERATOR and settings.source == "activations" and not settings.center:
        raise HeadrankError(f"--measure {settings.measure} is linear CKA, which is centred by definition; leave out --no-center")


def _trained(path: Path) -> dict[str, Any]:
    """What a training.json beside the weights says of the training, if there is one."""
    try:
        record = json.loads((path / "training.json").read_text(encoding="utf-8"))
        loss = float(record["loss_curve"][-1]["validation_loss"])
        return {"tokens_seen": int(record["tokens_seen"]), "validation_loss": loss} if math.isfinite(loss) else {}
    except (OSError, ValueError, KeyError, IndexError, TypeError, OverflowError, RecursionError):
        return {}


class _WeightsWork:
    """Gram matrices from the weights alone."""

    def __init__(self, checkpoint: Any, architecture: Any, settings: Settings) -> None:
        self.checkpoint, self.architecture = checkpoint, architecture
        self.device = device_name(settings.device)
        self.factors: dict[str, Any] = {"raw": settings.raw}
        if architecture.kind == "mla":
            self.factors["mla_part"] = settings.mla_part
        self.offset, self.n_offsets = settings.rope_offset, settings.rope_mean
        self.settings = self.factors | form_of(settings)
        self.grams = find_measure(settings.measure).grams
        if self.offset or self.n_offsets is not None:
            self.grams = {"qk": self.grams["qk"]}
        self.tokens = None

    def run(self, layers: Sequence[LayerFacts], label: str, progress: Progress, *, saved: "SavedPass | None" = None, team: Team = ALONE) -> Iterator[Part]:
        """A layer at a time, as many as there are processes side by side. In the first process all come, in the others their own."""
        progress.start(label, len(layers), "layers")
        with kept():
            for first in range(0, len(layers), team.world):
                row = layers[first : first + team.world]
                own, following = row[team.rank : team.rank + 1], layers[first + team.world + team.rank :][:1]
                grams, faults = team.together(partial(self._measured, own, following, progress, first + len(row)))
                yield from self._part(own, grams, faults)
                for _, (its, its_faults), its_grams in team.collect((own, faults), grams):
                    yield from self._part(its, dict(its_grams), its_faults)

    def _measured(
        self, layers: Sequence[LayerFacts], following: Sequence[LayerFacts], progress: Progress, done: int
    ) -> "tuple[dict[str, Tensor], dict[str, str]]":
        """Gram matrices of some layers, or why there are none. following: which come next. done: how far the measurement has come then."""
        from headrank.factors import tensors_read

        places = self._places
        for layer in following:  # is read from the disk or the net while this one is worked on
            for circuit in self.grams:
                self.checkpoint.expect(tensors_read(places[layer.group, layer.index], circuit))
        grams, faults = {}, {}
        for layer in layers:
            for circuit, name in self.grams.items():
                try:
                    grams[f"{name}/{layer.key}"] = self.gram(self.checkpoint, places[layer.group, layer.index], circuit)[None].cpu()
                except NotFiniteError as error:
                    faults[f"{name}/{layer.key}"] = str(error)
        progress.advance(done)
        return grams, faults

    def _part(self, layers: Sequence[LayerFacts], grams: "Mapping[str, Tensor]", faults: dict[str, str]) -> Iterator[Part]:
        if layers:
            yield tuple(layers), {name: gram.numpy() for name, gram in grams.items()}, faults

    def saved_pass(self, folder: Path, key: str, layers: Sequence[LayerFacts], progress: Progress, team: Team) -> None:
        """Layers are kept as they are: there is no pass to continue."""

    @cached_property
    def _places(self) -> "dict[tuple[str, int], AttentionLayer]":
        return {(layer.group, layer.index): layer for layer in self.architecture.layers}

    @cached_property
    def _workspaces(self) -> "tuple[Workspace, Workspace]":
        from headrank.gram import Workspace

        return Workspace(), Workspace()

    def gram(self, checkpoint: Any, layer: Any, circuit: str, **options: Any) -> Any:
        """One layer's Gram matrix as a tensor [H, H] on the device; the tensors are read from the checkpoint that is given."""
        import torch

        from headrank.factors import head_factors
        from headrank.kernels import weights_gram

        chosen = {**self.factors, "as_stored": self.settings == self.factors, **options}
        factors = head_factors(checkpoint, self.architecture, layer, circuit, device=torch.device(self.device), **chosen)
        if self.offset or self.n_offsets is not None:
            from headrank.rotary import at_offset, mean_gram_over_offsets, rotary_of

            rotary = rotary_of(self.checkpoint, layer, mla_part=self.factors.get("mla_part", "both"))
            if self.n_offsets is not None and self.n_offsets > 1:
                return mean_gram_over_offsets(factors, rotary, self.n_offsets)
            factors = at_offset(factors, rotary, self.offset)
        return weights_gram(self.grams[circuit], factors, workspaces=self._workspaces)


class _ActivationsWork:
    """Gram matrices from what the heads compute on tokens."""

    def __init__(self, checkpoint: Any, architecture: Any, settings: Settings) -> None:
        self.checkpoint, self.architecture, self.asked = checkpoint, architecture, settings
        self.device = device_name(settings.device)
        self.dtype = settings.dtype if settings.dtype != "auto" else ("bfloat16" if self.device == "cuda" else "float32")
        self.circuits = tuple(find_measure(settings.measure).grams.values())
        self.sequences = sequences_to_feed(checkpoint, architecture, settings)
        self.tokens = facts_of(self.sequences, settings)
        self.settings = {
            "center": settings.center,
            "skip_first": settings.skip_first,
            "device": self.device,
            "dtype": self.dtype,
            "tokens": self.sequences.sha256,
        } | form_of(settings)

    def run(self, layers: Sequence[LayerFacts], label: str, progress: Progress, *, saved: "SavedPass | None" = None, team: Team = ALONE) -> Iterator[Part]:
        """All layers together, in one pass that can be interrupted. The first process has what all of them counted; from the others nothing comes."""
        if not layers:
            return
        recorder = team.together(lambda: self._recorded(layers, label, progress, saved, team))
        for rank, remarks, state in team.collect(progress.remarks if isinstance(progress, Silent) else [], recorder.state()):
            recorder.merge(state)
            for text in remarks:
                progress.remark(f"process {rank}: {text}")
        grams = team.together(lambda: {} if team.rank else recorder.grams(center=self.asked.center))
        if team.rank:
            return
        faults = {}
        for name, gram in grams.items():
            if not np.isfinite(gram).all():
                measured, _, layer = name.partition("/")
                heads = sorted(set(np.argwhere(~np.isfinite(gram.sum(0).diagonal())).ravel().tolist()))
                what = {"qk": "attention scores", "keys": "keys", "values": "values"}.get(measured, "head outputs")
                faults[name] = f"layer {layer}: {what} of head {', '.join(map(str, heads))} are not finite in {self.settings['dtype']}"
        yield tuple(layers), {name: gram for name, gram in grams.items() if name not in faults}, faults

    def _recorded(self, layers: Sequence[LayerFacts], label: str, progress: Progress, saved: "SavedPass | None", team: Team) -> "Recorder":
        """What is counted on this process's share of the sequences."""
        import torch

        from headrank.forward import Recorder, load_runner, recorded

        N, T = self.sequences.ids.shape
        share, n_groups = team.share(N), min(N, MAX_GROUPS)
        if not share:
            return Recorder(layers, self.circuits, n_groups=n_groups)
        device = torch.device(self.device)
        runner = load_runner(self.checkpoint, self.architecture, device=device, dtype=getattr(torch, self.dtype), layers=layers, circuits=self.circuits)
        progress.start(f"{label}, {len(layers)} layers", N * T, "tokens")

        def on_batch(done: int, total: int) -> None:
            team.check()
            progress.advance(done * N // total * T)  # the others are about as far

        return recorded(
            runner,
            self.sequences,
            layers,
            self.circuits,
            device=device,
            batch_size=self.asked.batch_size,
            skip_first=self.asked.skip_first,
            n_groups=n_groups,
            share=share,
            saved=saved,
            on_batch=on_batch,
            remark=progress.remark,
        )

    def saved_pass(self, folder: Path, key: str, layers: Sequence[LayerFacts], progress: Progress, team: Team) -> "SavedPass":
        """Where this process's pass over these layers saves its sums."""
        from headrank.resume import SavedPass

        parts = {"layers": [layer.key for layer in layers], "circuits": self.circuits, "batch_size": self.asked.batch_size}
        share = {"share": [team.rank, team.world]} if team.world > 1 else {}
        return SavedPass(folder, on_fault=progress.remark, key=key, **parts, **share)


def form_of(settings: Settings) -> dict[str, Any]:
    """What is measured of the heads, where it is not their plain operators."""
    return {name: getattr(settings, name) for name, plain in FORM.items() if getattr(settings, name) != plain}


def device_name(name: str) -> str:
    """The device that --device means. Raises HeadrankError where PyTorch does not find it."""
    if name == "auto":
        return "cuda" if _finds_cuda() else "cpu"
    if name == "cuda" and not _finds_cuda():
        raise HeadrankError("--device cuda: PyTorch finds no CUDA device here; use --device cpu")
    if name == "mps":
        raise HeadrankError("--device mps: sums are kept in float64, which Metal does not have; use --device cpu")
    return name


def _finds_cuda() -> bool:
    """Whether PyTorch finds a CUDA device, or one of AMD's. Where Linux knows of none, PyTorch need not be loaded to ask it."""
    if sys.platform == "linux" and not any(entry.name.startswith(GPU_DEVICES) for entry in os.scandir("/dev")):
        return False
    import torch

    return torch.cuda.is_available()


def sequences_to_feed(checkpoint: Any, architecture: Any, settings: Settings) -> "Sequences":
    """The sequences that settings choose. Raises HeadrankError where they do not fit the model."""
    from headrank.tokens import cut_sequences

    context = architecture.context
    seq_len = settings.seq_len or min(context or 512, 512)
    if context and seq_len > context:
        raise HeadrankError(f"{checkpoint.path}: --seq-len {seq_len} is more than the {context} tokens that the model was trained on")
    if settings.skip_first >= seq_len - 1:
        raise HeadrankError(f"--skip-first {settings.skip_first} leaves no pair of tokens in sequences of {seq_len}")
    stream, before, after = _stream(checkpoint, architecture, settings)
    return cut_sequences(stream, seq_len=seq_len, n_sequences=settings.n_sequences, seed=settings.seed, before=before, after=after)


def facts_of(sequences: "Sequences", settings: Settings) -> dict[str, Any]:
    """What was fed, for documents."""
    N, T = sequences.ids.shape
    return {"source": sequences.source, "sha256": sequences.sha256, "n_sequences": N, "seq_len": T, "n_tokens": sequences.n_tokens, "seed": settings.seed}


def _stream(checkpoint: Any, architecture: Any, settings: Settings) -> "tuple[TokenStream, tuple[int, ...], tuple[int, ...]]":
    """The tokens to feed, and the special tokens that stand before and after each sequence of text.

    As asked for, else the bundled text: as bytes where the vocabulary is 256, else through the checkpoint's own tokenizer.
    """
    from headrank.tokens import BYTE_VOCABULARY, calibration_text, read_texts, read_token_files, token_stream

    vocab_size = architecture.vocab_size
    if settings.tokens or vocab_size == BYTE_VOCABULARY:
        text = settings.text or (() if settings.tokens else (calibration_text(),))
        return read_token_files(text=text, tokens=settings.tokens, tokenizer=None, vocab_size=vocab_size), (), ()
    if checkpoint.config.get("model_type") in OWN_MODELS and not (checkpoint.path / "tokenizer.json").is_file():
        raise HeadrankError(
            f"{checkpoint.path}: no tokenizer.json, so no text can be fed to its {vocab_size} token ids\n"
            "Give token ids with --tokens FILE (.npy or .bin), or measure the weights with --source weights"
        )
    from headrank.hf_loading import load_tokenizer_ids

    paths = settings.text or (calibration_text(),)
    texts = load_tokenizer_ids(checkpoint.path, read_texts(paths))
    return token_stream(paths, texts.ids, vocab_size=vocab_size), texts.before, texts.after
