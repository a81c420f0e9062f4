"""A suggestion carried out and judged: heads of a checkpoint of ours are joined or dropped, and the loss on text says what it cost."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrank.architectures import Architecture, AttentionLayer, describe
from headrank.checkpoints import Checkpoint, open_checkpoint
from headrank.diversity import Array, effective_rank, spectrum
from headrank.errors import HeadrankError
from headrank.grouping import Groups, clusters, consecutive_groups, random_groups
from headrank.measure import Progress, Settings, Silent, device_name, facts_of, measure, sequences_to_feed
from headrank.merging import VALUES, Heads, aligned, effective_ranks, key_turns, normalised, read_heads, shared, without
from headrank.regroup import Rewritten, check_free, grouped_config, losses, plain_config, rewritten, thinned_config, write_checkpoint
from headrank.selection import ModelRef
from headrank.store import Measurement, Store
from headrank.suggest import choose_groups, groups_to_form, likeness, measured_similarities

TOKENS_PER_BATCH = 8192
LOGITS_PER_BATCH = 1 << 26  # a quarter of a gigabyte, and a few copies of it
N_BOOTSTRAP = 2000
LEVEL = 95  # percent


@dataclass(frozen=True, kw_only=True)
class TrialRequest:
    """What is to be tried: groups, or heads to remove."""

    n_groups: int | None = None
    """Key-value heads to keep."""
    n_removed: int | None = None
    """Heads to remove from every layer."""
    threshold: float | None = None
    """Least likeness of a removed head and the one that stands in for it; None takes the most alike, however little that is."""
    values: str = "mean"
    """How values are merged, see merging.shared."""
    n_random: int = 5
    """Random choices to compare with."""


@dataclass(frozen=True)
class Arm:
    """One way of carrying it out."""

    name: str
    label: str
    model: Callable[[], Rewritten]


def try_out(
    ref: ModelRef, request: TrialRequest, settings: Settings, folder: Path, *, force: bool = False, store: Store | None = None, progress: Progress | None = None
) -> dict[str, Any]:
    """Carries the suggestion out, writes the new checkpoint to a folder, and measures its loss beside other choices of the same size.

    settings.source decides how heads are compared, as in suggest. Returns a document for JSON. Raises HeadrankError where the checkpoint
    is not one of ours with plain heads, or the request does not fit it.
    """
    progress = progress or Silent()
    if (request.n_groups is None) == (request.n_removed is None):
        raise HeadrankError("give either --groups G, to join heads, or --remove N, to drop them")
    checkpoint = open_checkpoint(ref.path)
    config = plain_config(checkpoint)
    architecture = describe(checkpoint)
    if any(file.resolve().parent == folder.resolve() for file in checkpoint.files):
        raise HeadrankError(f"{folder}: the checkpoint itself; choose another folder with -o DIR")
    check_free(folder, force=force)
    sequences = sequences_to_feed(checkpoint, architecture, settings)
    plan = (_Joining if request.n_groups is not None else _Removing)(checkpoint, architecture, request, settings, ref, store, progress)

    device, dtype = torch.device(device_name(settings.device)), getattr(torch, "float32" if settings.dtype == "auto" else settings.dtype)
    ids = torch.from_numpy(sequences.ids.astype(np.int64))
    batch_size = settings.batch_size or max(1, min(TOKENS_PER_BATCH, LOGITS_PER_BATCH // config.vocab_size) // ids.shape[1])
    arms = [Arm("before", "Before", lambda: Rewritten(config, checkpoint, {})), *plan.arms()]
    found: dict[str, Array] = {}
    progress.start(ref.label, len(arms), "models")
    for done, arm in enumerate(arms, 1):
        model = arm.model()
        if arm.name == "suggested":  # what was written is what is judged
            write_checkpoint(model, folder, {"program": "headrank", "command": "try", "from": checkpoint.fingerprint(), **plan.facts()})
            written = open_checkpoint(folder)
            model = Rewritten(model.config, written, {})
        found[arm.name] = losses(model, ids, device=device, dtype=dtype, batch_size=batch_size).numpy()
        if not np.isfinite(found[arm.name]).all():
            raise HeadrankError(f"{ref.label}: the loss of {arm.label.lower()} is not finite in {str(dtype).removeprefix('torch.')}; try --dtype float32")
        progress.advance(done)
    return {
        "label": ref.label,
        "checkpoint": ref.path,
        "fingerprint": checkpoint.fingerprint(),
        **plan.facts(),
        "kv_values_per_token": {"before": architecture.kv_values_per_token, "after": describe(written).kv_values_per_token},
        "tokens": facts_of(sequences, settings),
        "written": str(folder),
        "effective_rank": {"predicted": plan.predicted(), "measured": _measured(folder, progress)},
        "losses": [{"name": arm.name, "label": arm.label, "loss": float(found[arm.name].mean()), **_apart(arm, found)} for arm in arms],
        "verdict": verdict(found, plan.rival, is_only=plan.is_only),
        "layers": plan.layers(),
    }


class _Plan:
    """What joining and removing have in common: heads are read when a layer's turn comes, since all layers at once may not fit."""

    rival = ""
    """Name of the arm that the suggestion is judged against first."""
    is_only = False
    """Whether there is no other choice of that size."""

    def __init__(self, checkpoint: Checkpoint, architecture: Architecture, request: TrialRequest, settings: Settings, ref: ModelRef,
                 store: Store | None, progress: Progress) -> None:  # fmt: skip
        self.checkpoint, self.architecture, self.request, self.settings, self.label = checkpoint, architecture, request, settings, ref.label
        self.config = plain_config(checkpoint)
        self.check()
        self.measurement: Measurement = measure(ref, settings, store=store, progress=progress)
        self.ranks: dict[int, dict[str, float | None]] = {}
        self.entries: dict[int, dict[str, Any]] = {}

    def check(self) -> None:
        """Refuses a request that does not fit, before anything is computed."""

    def heads(self, layer: AttentionLayer) -> Heads:
        return read_heads(self.checkpoint, self.architecture, layer)

    def predicted(self) -> dict[str, float | None]:
        """Mean effective rank over layers, a circuit, from the merged heads."""
        return {circuit: _mean([ranks[circuit] for ranks in self.ranks.values()]) for circuit in ("qk", "ov")}

    def layers(self) -> list[dict[str, Any]]:
        return [{"layer": index, **self.entries[index], "effective_rank": self.ranks[index]} for index in sorted(self.entries)]


class _Joining(_Plan):
    """Keys and values a group instead of a head."""

    rival = "consecutive"

    def check(self) -> None:
        assert self.request.n_groups is not None
        self.n_groups = groups_to_form(self.architecture, self.request.n_groups, label=self.label)
        self.new_config = grouped_config(self.config, self.n_groups)
        self.is_only = self.n_groups == 1

    def facts(self) -> dict[str, Any]:
        return {
            "kind_before": "mha",
            "kind_after": self.new_config.kind,
            "n_groups": self.n_groups,
            "values": self.request.values,
            "source": self.settings.source,
        }

    def arms(self) -> Iterator[Arm]:
        H, layers = self.config.n_head, self.architecture.layers
        values = self.request.values
        other = next(name for name in VALUES if name != values)
        yield Arm("suggested", "Suggested groups", lambda: self.model(self.choose, values, is_suggested=True))
        yield Arm("other values", f"Suggested, values: {other}", lambda: self.model(self.chosen, other))
        if not self.is_only:
            yield self.fixed("consecutive", "Consecutive groups", {layer.index: consecutive_groups(H, self.n_groups) for layer in layers})
        yield Arm("as they lie", "Consecutive, not aligned", lambda: self.rewrite(lambda layer: shared(self.heads(layer), self.n_groups)))
        for number in range(0 if self.is_only else self.request.n_random):
            random = np.random.default_rng([self.settings.seed, number])
            groups = {layer.index: random_groups(H, self.n_groups, random) for layer in layers}
            yield self.fixed(f"random {number}", f"Random groups {number + 1}", groups)

    def fixed(self, name: str, label: str, groups: dict[int, Groups]) -> Arm:
        return Arm(name, label, lambda: self.model(lambda layer, heads: groups[layer.index], self.request.values))

    def rewrite(self, heads: Callable[[AttentionLayer], Heads]) -> Rewritten:
        return rewritten(self.checkpoint, self.new_config, self.architecture.layers, heads)

    def model(self, choose: Callable[[AttentionLayer, Heads], Groups], values: str, *, is_suggested: bool = False) -> Rewritten:
        def merge(layer: AttentionLayer) -> Heads:
            heads = normalised(self.heads(layer))
            groups = choose(layer, heads)
            merged = shared(aligned(heads, groups, key_turns(self.checkpoint, layer)[0]), self.n_groups, values=values)
            if is_suggested:
                self.entries[layer.index] = {"groups": [list(group) for group in groups]}
                self.ranks[layer.index] = effective_ranks(merged)
            return merged

        return self.rewrite(merge)

    def choose(self, layer: AttentionLayer, heads: Heads) -> Groups:
        similarities = None if self.settings.source == "weights" else measured_similarities(self.measurement, layer)
        return choose_groups(heads, key_turns(self.checkpoint, layer)[0], self.n_groups, self.request.values, similarities).groups

    def chosen(self, layer: AttentionLayer, heads: Heads) -> Groups:
        """The groups that the suggestion had."""
        return tuple(tuple(group) for group in self.entries[layer.index]["groups"])


class _Removing(_Plan):
    """Fewer heads: others write what they wrote."""

    rival = "dropped"

    def check(self) -> None:
        assert self.request.n_removed is not None
        H, N = self.config.n_head, self.request.n_removed
        if not 1 <= N < H:
            raise HeadrankError(f"{self.label}: of {H} heads a layer, {N} cannot be removed; choose from 1 to {H - 1}")
        self.new_config = thinned_config(self.config, H - N)

    def facts(self) -> dict[str, Any]:
        return {"kind_before": "mha", "kind_after": "mha", "n_removed": self.request.n_removed, "source": self.settings.source}

    def arms(self) -> Iterator[Arm]:
        chosen = {layer.index: self.choose(layer) for layer in self.architecture.layers}  # all layers: refusals come first
        yield Arm("suggested", "Most alike, joined", lambda: self.model(chosen, is_suggested=True))
        yield Arm("dropped", "Same heads, not added", lambda: self.model(chosen, add=False))
        for number in range(self.request.n_random):
            random = np.random.default_rng([self.settings.seed, number])
            others = {layer.index: _shuffled(chosen[layer.index], random) for layer in self.architecture.layers}
            yield Arm(f"random {number}", f"Random heads {number + 1}", partial(self.model, others))

    def choose(self, layer: AttentionLayer) -> Groups:
        alike = likeness(measured_similarities(self.measurement, layer))
        found = clusters(1 - alike, self.new_config.n_head)
        least, pair = min((float(alike[i, j]), (i, j)) for cluster in found if len(cluster) > 1 for i in cluster for j in cluster if i < j)
        if self.request.threshold is not None and least < self.request.threshold:
            raise HeadrankError(
                f"{self.label}: every layer must lose as many heads, but of layer {layer.index} none can go above {self.request.threshold}: "
                f"heads {pair[0]} and {pair[1]} are {least:.3f} alike\nLeave out --threshold to remove them all the same, or remove fewer"
            )
        self.entries[layer.index] = {"least_alike": least}
        return found

    def model(self, chosen: dict[int, Groups], *, add: bool = True, is_suggested: bool = False) -> Rewritten:
        def thin(layer: AttentionLayer) -> Heads:
            heads = self.heads(layer)
            stand_ins = strongest_first(heads, chosen[layer.index])
            thinned = without(heads, stand_ins, add=add)
            if is_suggested:
                self.entries[layer.index]["stand_ins"] = [list(cluster) for cluster in stand_ins if len(cluster) > 1]
                self.ranks[layer.index] = effective_ranks(thinned)
            return thinned

        return rewritten(self.checkpoint, self.new_config, self.architecture.layers, thin)


def strongest_first(heads: Heads, found: Groups) -> list[tuple[int, ...]]:
    """Clusters with the head of largest |W_V W_O| first, which is kept; clusters in the order of the heads that are kept."""
    sizes = ((heads.W_V.transpose(1, 2) @ heads.W_V) * (heads.W_O[:, 0] @ heads.W_O[:, 0].transpose(1, 2))).sum((1, 2)).tolist()
    return sorted(tuple(sorted(cluster, key=lambda head: (-sizes[head], head))) for cluster in found)


def _shuffled(found: Groups, random: np.random.Generator) -> Groups:
    """Clusters of the same sizes with heads drawn at random."""
    order = random.permutation(sum(map(len, found))).tolist()
    return tuple(tuple(order.pop() for _ in cluster) for cluster in found)


# ---- judging ------------------------------------------------------------------------------------------------------------


def _apart(arm: Arm, found: dict[str, Array]) -> dict[str, Any]:
    """How much more a choice loses than the suggestion, with an interval."""
    if arm.name in ("before", "suggested"):
        return {}
    return {"suggested_less_this": difference(found["suggested"], found[arm.name])}


def difference(first: Array, second: Array) -> dict[str, float]:
    """Mean of first - second over sequences, with a 95 % bootstrap interval over sequences: both saw the same ones."""
    apart = first - second
    draws = np.random.default_rng(0).integers(len(apart), size=(N_BOOTSTRAP, len(apart)))
    tail = (100 - LEVEL) / 2
    low, high = np.percentile(apart[draws].mean(1), [tail, 100 - tail])
    return {"mean": float(apart.mean()), "low": float(low), "high": float(high)}


def verdict(found: dict[str, Array], rival: str, *, is_only: bool = False) -> str:
    """The result in a few sentences, whichever way it went. found: losses by arm, [N] each."""
    cost = f"It costs {found['suggested'].mean() - found['before'].mean():+.4f} nats a token."
    if is_only:
        gain = difference(found["suggested"], found["as they lie"])
        sentences = ["One group: there is only one grouping, so nothing to choose.", cost, f"Aligned bases change that by {_interval(gain)}."]
        return " ".join([*sentences, *_other_values(found)])
    name = {"consecutive": "consecutive groups", "dropped": "removing the same heads without adding what they wrote"}[rival]
    against = difference(found["suggested"], found[rival])
    how = "better than" if against["high"] < 0 else "worse than" if against["low"] > 0 else "no better than"
    sentences = [cost, f"The suggestion is {how} {name}: {_interval(against)}."]
    random = [losses.mean() for arm, losses in found.items() if arm.startswith("random")]
    if random:
        beaten = sum(found["suggested"].mean() < loss for loss in random)
        judged = "better than every" if beaten == len(random) else "worse than every" if not beaten else f"better than {beaten} of {len(random)}"
        sentences.append(f"It is {judged} random choice{'s' if beaten not in (0, len(random)) else ''}.")
    return " ".join([*sentences, *_other_values(found)])


def _other_values(found: dict[str, Array]) -> list[str]:
    """A sentence where merging the values the other way would have lost clearly less."""
    if "other values" not in found:
        return []
    apart = difference(found["suggested"], found["other values"])
    less = f"{apart['mean']:.3f} nats a token less ({LEVEL} % interval {apart['low']:.3f} to {apart['high']:.3f})"
    return [f"With values merged the other way it would cost {less}."] if apart["low"] > 0 else []


def _interval(apart: dict[str, float]) -> str:
    return f"{apart['mean']:+.3f} nats a token ({LEVEL} % interval {apart['low']:+.3f} to {apart['high']:+.3f})"


def _measured(folder: Path, progress: Progress) -> dict[str, float | None]:
    """Mean effective rank over layers of the checkpoint that was written, from its weights."""
    measurement = measure(ModelRef(label=folder.name, path=str(folder)), Settings(source="weights"), progress=progress)
    layers = describe(open_checkpoint(folder)).layers
    ranks = [{circuit: float(effective_rank(spectrum(S))) for circuit, S in measured_similarities(measurement, layer).items()} for layer in layers]
    return {circuit: _mean([None if rank[circuit] != rank[circuit] else rank[circuit] for rank in ranks]) for circuit in ("qk", "ov")}


def _mean(values: Sequence[float | None]) -> float | None:
    defined = [value for value in values if value is not None]
    return float(np.mean(defined)) if defined else None
