"""From numbers to decisions: which heads to join, which ranks to choose, which heads to drop.

All three come from one pass over the layers of a checkpoint's weights. Where heads are to be compared by what they do on text, their
similarity is the measured one; what a merge loses is always told from the weights.
"""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrank.alignment import Turns, aligning_turns, best_overlaps, column_products
from headrank.architectures import Architecture, AttentionLayer, describe
from headrank.checkpoints import Checkpoint, open_checkpoint
from headrank.diversity import Array, most_similar_pair, similarity
from headrank.errors import HeadrankError, NotFiniteError
from headrank.grouping import Grouping, Groups, consecutive_groups, equal_groups
from headrank.measure import Progress, Settings, Silent, measure
from headrank.merging import Heads, aligned, effective_ranks, key_turns, lost_keys, lost_values, normalised, read_heads, shared, written_spaces
from headrank.ranks import lost_energy, uniform_rank, water_filling
from headrank.selection import ModelRef
from headrank.store import Measurement, Store

PERCENT = re.compile(r"(\d+(?:\.\d+)?)\s*%")
NO_CACHE_SAVED = "heads share what is cached: removing a query head saves computation, but no cache"


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked for."""

    n_groups: int | None = None
    """Key-value heads to keep; by default the largest number that divides those there are."""
    budget: str = "50%"
    """Cache for one token, all layers: bytes, or a percentage of what plain heads (MHA) take."""
    bytes_per_value: int = 2
    """Of a number in the cache; 2 for bfloat16."""
    threshold: float = 0.9
    """Least similarity of near-duplicates, in both circuits."""
    values: str = "mean"
    """How values are merged, see merging.shared."""


class Spectra(NamedTuple):
    """What LRKV and MLA of each rank lose in one layer, and the layer's entry in the document."""

    entry: dict[str, Any]
    lrkv: Array
    mla: Array
    layer: AttentionLayer


def suggest(ref: ModelRef, request: Request, settings: Settings, *, store: Store | None = None, progress: Progress | None = None) -> dict[str, Any]:
    """The suggestions for one model as a document for JSON; what has no answer is None with a `reason` beside it.

    settings.source decides how heads are compared: by weights, or by what they do on text. Raises HeadrankError where the model cannot
    be read or the request does not fit it. Layers that cannot be read are left out and listed under `faults`.
    """
    progress = progress or Silent()
    checkpoint = open_checkpoint(ref.path)
    architecture = describe(checkpoint)
    n_groups = groups_to_form(architecture, request.n_groups, label=ref.label) if not _why_not_join(architecture) else None
    budget = _budget(request, architecture)
    measurement = measure(ref, settings, store=store, progress=progress)
    entries: list[dict[str, Any]] = []
    spectra: list[Spectra] = []
    progress.start(ref.label, len(architecture.layers), "layers")
    for done, layer in enumerate(architecture.layers, 1):
        entry: dict[str, Any] = {"layer": layer.index, **({"group": layer.group} if layer.group else {})}
        entries.append(entry)
        try:
            similarities = measured_similarities(measurement, layer)
            heads = None if architecture.kind == "mla" else normalised(read_heads(checkpoint, architecture, layer))
        except NotFiniteError as error:
            entry["reason"] = str(error)
            continue
        entry.update(_duplicates(similarities, layer, request.threshold))
        if heads is not None:
            turns, _ = key_turns(checkpoint, layer)
            if n_groups is not None:
                entry.update(_join(heads, turns, n_groups, request.values, None if settings.source == "weights" else similarities))
            if layer.kv_values_per_token:
                spectra.append(Spectra(entry, lrkv_losses(heads, turns), mla_losses(heads), layer))
        progress.advance(done)
    return {
        "label": ref.label,
        "scale": ref.scale,
        **{name: value for name, value in asdict(measurement.model).items() if name != "trained"},
        "tokens": measurement.tokens,
        "join": _joined(architecture, checkpoint, entries, n_groups, request),
        "ranks": _ranks(architecture, entries, spectra, budget, request),
        "duplicates": _all_duplicates(architecture, entries, request),
        "layers": entries,
    }


def measured_similarities(measurement: Measurement, layer: AttentionLayer) -> dict[str, Array]:
    """Similarity matrices of a layer's heads, "qk" and "ov". Raises NotFiniteError where the layer could not be measured."""
    facts = next(facts for facts in measurement.layers if (facts.group, facts.index) == (layer.group, layer.index))
    found = {}
    for circuit in ("qk", "ov"):
        gram = measurement.gram(circuit, facts)
        if gram is None:
            raise NotFiniteError(measurement.faults[f"{circuit}/{facts.key}"])
        found[circuit] = similarity(gram)
    return found


# ---- joining heads ------------------------------------------------------------------------------------------------------


def groups_to_form(architecture: Architecture, asked: int | None, *, label: str) -> int:
    """The number of key-value heads to keep. Raises HeadrankError where the heads that there are do not divide into so many groups."""
    counts = {layer.n_kv_head for layer in architecture.layers}
    possible = [n for n in range(1, max(min(counts), 2)) if all(count % n == 0 for count in counts)]
    if asked is None:
        return possible[-1]
    if asked not in possible:
        raise HeadrankError(f"{label}: {max(counts)} key-value heads cannot be joined into {asked} groups; choose from {', '.join(map(str, possible))}")
    return asked


def _why_not_join(architecture: Architecture) -> str | None:
    if architecture.kind in ("mla", "lrkv"):
        return f"{architecture.kind} shares keys and values in a way of its own; only heads with keys of their own can be joined"
    if any(layer.n_kv_head == 1 for layer in architecture.layers):
        return "all heads share one key-value head already"
    return None


def unit_costs(heads: Heads, turns: Turns, values: str) -> Array:
    """What it costs to join two key-value heads: [U, U], none negative. heads: normalised.

    Half of it are the keys: their squared distance in the bases that bring them closest, in the mean square of a unit's keys. Half are
    the values: likewise, or where values are to be fitted twice the squared error of W_V W_O that the best shared values leave.
    """
    D = heads.W_V.shape[2]
    keys = _distances(heads.W_K, turns)
    if values == "mean":
        return (keys + _distances(heads.W_V, Turns.anything(D))) / 2
    spaces = written_spaces(heads.W_V, heads.W_O)
    products = column_products(spaces).transpose(1, 2)  # [U, U, D, D]
    return (keys + 2 * _shared_space_errors(products) / (float(spaces.square().sum()) / len(spaces) or 1.0)) / 2


def _distances(matrices: Tensor, turns: Turns) -> Array:
    """Squared distances of aligned pairs, as multiples of the mean square: [U, U]."""
    overlap = best_overlaps(column_products(matrices), turns).numpy()
    sizes = matrices.square().sum((1, 2)).numpy()
    return (sizes[:, None] + sizes - 2 * overlap).clip(min=0) / (sizes.mean() or 1.0)


def _shared_space_errors(products: Tensor) -> Array:
    """What D dimensions leave of two matrices [n, D] side by side: the sum of their smaller D squared singular values, [U, U]."""
    U, _, D, _ = products.shape
    errors = np.zeros((U, U))
    own = products[range(U), range(U)]  # [U, D, D]
    for i in range(U):
        top = torch.cat((own[i].expand(U, D, D), products[i]), 2)
        both = torch.cat((top, torch.cat((products[:, i], own), 2)), 1)  # [U, 2 D, 2 D]
        errors[i] = torch.linalg.eigvalsh(both)[:, :D].clamp(min=0).sum(1).numpy()
    np.fill_diagonal(errors, 0.0)
    return (errors + errors.T) / 2


def measured_costs(similarities: dict[str, Array], n_units: int) -> Array:
    """1 - mean similarity of both circuits, between key-value heads: [U, U]; where several heads read one, their mean."""
    mean = (similarities["qk"] + similarities["ov"]) / 2
    R = len(mean) // n_units
    return 1.0 - mean.reshape(n_units, R, n_units, R).mean((1, 3))


def choose_groups(heads: Heads, turns: Turns, n_groups: int, values: str, similarities: dict[str, Array] | None) -> Grouping:
    """Groups of the normalised heads' units, by the weights, or by measured similarities of both circuits where these are given."""
    cost = unit_costs(heads, turns, values) if similarities is None else measured_costs(similarities, len(heads.W_K))
    return equal_groups(cost, n_groups)


def _join(heads: Heads, turns: Turns, n_groups: int, values: str, similarities: dict[str, Array] | None) -> dict[str, Any]:
    grouping = choose_groups(heads, turns, n_groups, values, similarities)
    plain = consecutive_groups(len(heads.W_K), n_groups)
    merged, losses = join_losses(heads, grouping.groups, turns, values)
    return {
        "groups": [list(group) for group in grouping.groups],
        "is_best": grouping.is_best,
        **losses,
        "consecutive": join_losses(heads, plain, turns, values)[1],
        "effective_rank": effective_ranks(merged),
    }


def join_losses(heads: Heads, groups: Groups, turns: Turns, values: str) -> tuple[Heads, dict[str, float]]:
    """The merged heads, and which shares of the Frobenius norms of keys and of W_V W_O merging loses. heads: normalised."""
    together = aligned(heads, groups, turns)
    merged = shared(together, len(groups), values=values)
    return merged, {"lost_keys": lost_keys(together, merged), "lost_values": lost_values(together, merged)}


def _joined(architecture: Architecture, checkpoint: Checkpoint, entries: list[dict[str, Any]], n_groups: int | None, request: Request) -> dict[str, Any]:
    if n_groups is None:
        return {"n_groups": None, "reason": _why_not_join(architecture)}
    done = [entry for entry in entries if "groups" in entry]
    return {
        "n_groups": n_groups,
        "kind": "mqa" if n_groups == 1 else "gqa",
        "values": request.values,
        "key_turns": key_turns(checkpoint, architecture.layers[0])[1],
        "is_best": all(entry["is_best"] for entry in done),
        "kv_values_per_token": sum(layer.kv_values_per_token * n_groups // layer.n_kv_head for layer in architecture.layers),
        "only_grouping": n_groups == 1,
        **{name: _mean([entry[name] for entry in done]) for name in ("lost_keys", "lost_values")},
        "consecutive": {name: _mean([entry["consecutive"][name] for entry in done]) for name in ("lost_keys", "lost_values")},
        "effective_rank": {circuit: _mean([entry["effective_rank"][circuit] for entry in done]) for circuit in ("qk", "ov")},
    }


def _mean(values: Sequence[float | None]) -> float | None:
    defined = [value for value in values if value is not None]
    return float(np.mean(defined)) if defined else None


# ---- ranks at a budget --------------------------------------------------------------------------------------------------


def _budget(request: Request, architecture: Architecture) -> int:
    """Bytes for one token. Raises HeadrankError where the request says neither bytes nor a percentage."""
    plain = architecture.kv_values_per_token_of_mha * request.bytes_per_value
    text = request.budget.strip()
    if match := PERCENT.fullmatch(text):
        return int(float(match[1]) / 100 * plain)
    if text.isdecimal():
        return int(text)
    raise HeadrankError(f"--budget {request.budget!r} is neither a number of bytes a token nor a percentage of plain heads; give 8192 or 50%")


def lrkv_losses(heads: Heads, turns: Turns) -> Array:
    """What LRKV of rank 0, 1, … loses: the squared share that each key-value head's difference from their mean has beyond that rank.

    heads: normalised; their bases are aligned first. Keys and values count half each. The mean is one choice of the shared part, and
    training may find a better one, so this is a bound from above. Ranks end where LRKV would cache as much as plain heads do.
    """
    total = np.zeros(max(heads.W_K.shape[2], heads.W_V.shape[2]))
    for matrices, allowed in ((heads.W_K, turns), (heads.W_V, Turns.anything(heads.W_V.shape[2]))):
        turned = matrices @ aligning_turns(column_products(matrices), allowed)
        rest = turned - turned.mean(0)
        energies = torch.linalg.eigvalsh(rest.transpose(1, 2) @ rest).flip(1).clamp(min=0).sum(0).numpy()
        total[: len(energies)] += energies / (2 * float(matrices.square().sum()) or 1.0)
    U = len(heads.W_K)
    largest = (U - 1) * (heads.W_K.shape[2] + heads.W_V.shape[2]) // (2 * U)
    return lost_energy(total)[: largest + 1]


def mla_losses(heads: Heads) -> Array:
    """What a latent of width 0, 1, … loses of all heads' keys and values side by side, as a squared share; keys and values count half each.

    heads: normalised. Turning heads changes nothing here. Widths end where the latent is as wide as plain keys and values.
    """
    n = max(heads.W_K.shape[1], heads.W_V.shape[1])
    columns = []
    for matrices in (heads.W_K, heads.W_V):
        flat = matrices.transpose(0, 1).flatten(1)
        padded = torch.zeros(n, flat.shape[1], dtype=flat.dtype)
        padded[: len(flat)] = flat  # values may have a bias row that keys have not
        columns.append(padded / (2 * float(flat.square().sum()) or 1.0) ** 0.5)
    joint = torch.cat(columns, 1)
    gram = joint @ joint.T if joint.shape[0] < joint.shape[1] else joint.T @ joint
    return lost_energy(torch.linalg.eigvalsh(gram).flip(0).clamp(min=0).numpy())


def _ranks(
    architecture: Architecture,
    entries: list[dict[str, Any]],
    spectra: list[Spectra],
    budget: int,
    request: Request,
) -> dict[str, Any]:
    plain = architecture.kv_values_per_token_of_mha * request.bytes_per_value
    asked = {"budget_bytes_per_token": budget, "bytes_per_value": request.bytes_per_value, "plain_bytes_per_token": plain}
    missing = [entry["layer"] for entry in entries if "reason" in entry]
    reason = (
        "mla caches a latent already; its width is what there is to choose" if architecture.kind == "mla"
        else "nothing is cached: the model is not causal" if not plain
        else f"layer {', '.join(map(str, missing))} has no numbers, so the budget cannot be shared out" if missing
        else None
    )  # fmt: skip
    if reason:
        return {**asked, "lrkv": None, "mla": None, "reason": reason}
    layers = [layer for *_, layer in spectra]
    shared_values, own_values = [layer.d_qk + layer.d_v for layer in layers], [2 * layer.n_kv_head for layer in layers]
    lrkv = _filled([one.lrkv for one in spectra], shared_values, own_values, budget, request.bytes_per_value)
    mla = _filled([one.mla for one in spectra], [0] * len(layers), [1] * len(layers), budget, request.bytes_per_value)
    for name, choice in (("lrkv_rank", lrkv), ("mla_latent", mla)):
        for one, rank in zip(spectra, choice.pop("ranks"), strict=True):
            one.entry[name] = rank
    return {**asked, "percent_of_plain": 100 * budget / plain, "lrkv": lrkv, "mla": mla}


def _filled(lost: list[Array], fixed: list[int], steps: list[int], budget: int, size: int) -> dict[str, Any]:
    """Ranks of all layers and what they lose, beside one rank for all. fixed, steps: numbers cached at rank 0, and for each rank."""
    left = budget // size - sum(fixed)
    if left < 0:
        reason = f"the budget of {budget} bytes is less than the {sum(fixed) * size} that the shared keys and values take"
        return {"ranks": [None] * len(lost), "bytes_per_token": None, "lost": None, "reason": reason}
    ranks = water_filling(lost, steps, left)
    same = uniform_rank(lost, steps, left)
    return {
        "ranks": ranks,
        "bytes_per_token": size * sum(base + step * rank for base, step, rank in zip(fixed, steps, ranks, strict=True)),
        "lost": float(np.sqrt(np.mean([losses[rank] for losses, rank in zip(lost, ranks, strict=True)]))),
        "uniform_rank": same,
        "uniform_lost": float(np.sqrt(np.mean([losses[min(same, len(losses) - 1)] for losses in lost]))),
    }


# ---- heads that do the same ---------------------------------------------------------------------------------------------


def likeness(similarities: dict[str, Array]) -> Array:
    """How far two heads do the same: the lesser of their similarities in where they look and in what they write, [H, H]."""
    return np.minimum(similarities["qk"], similarities["ov"])


def _duplicates(similarities: dict[str, Array], layer: AttentionLayer, threshold: float) -> dict[str, Any]:
    alike = likeness(similarities)
    R = layer.n_head // layer.n_kv_head
    pairs = [(i, j) for i in range(layer.n_head) for j in range(i + 1, layer.n_head) if R == 1 or i // R == j // R]
    found = sorted(((float(alike[i, j]), i, j) for i, j in pairs if alike[i, j] >= threshold), reverse=True)
    best = most_similar_pair(alike)
    return {
        "duplicates": [{"heads": [i, j], "similarity": _both(similarities, i, j)} for _, i, j in found],
        "removable": _removable(found),
        "most_alike": None if best is None else {"heads": list(best[1]), "similarity": _both(similarities, *best[1])},
    }


def _removable(found: list[tuple[float, int, int]]) -> int:
    """Heads that can go, each while a head that it doubles stays."""
    kept, gone = set(), set()
    for _, i, j in found:
        if i in gone or j in gone or (i in kept and j in kept):
            continue
        stays, goes = (j, i) if j in kept else (i, j)
        kept.add(stays)
        gone.add(goes)
    return len(gone)


def _both(similarities: dict[str, Array], i: int, j: int) -> dict[str, float]:
    return {circuit: float(S[i, j]) for circuit, S in similarities.items()}


def _all_duplicates(architecture: Architecture, entries: list[dict[str, Any]], request: Request) -> dict[str, Any]:
    known = [entry for entry in entries if "duplicates" in entry]
    saves = architecture.kind in ("mha", "lrkv")
    return {
        "threshold": request.threshold,
        "n_pairs": sum(len(entry["duplicates"]) for entry in known),
        "removable_in_every_layer": min((entry["removable"] for entry in known), default=0),
        "saves_cache": saves,
        **({} if saves else {"reason": NO_CACHE_SAVED}),
    }
