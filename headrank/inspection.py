"""What a checkpoint is, from its headers alone: facts for `headrank inspect`, and which rows of which tensor are which head's."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from headrank.architectures import Architecture, AttentionLayer
from headrank.architectures.layout import Projection, Slice
from headrank.checkpoints import Checkpoint

BYTES_PER_VALUE = 2  # of a KV cache in bfloat16


def facts(checkpoint: Checkpoint, architecture: Architecture) -> dict[str, Any]:
    """Everything that is known without reading a tensor, ready for JSON."""
    dtypes = Counter(info.dtype for info in checkpoint.tensors.values())
    return {
        "path": str(checkpoint.path),
        "format": checkpoint.format,
        "files": len(checkpoint.files),
        "family": architecture.family,
        "kind": architecture.kind,
        "n_layer": architecture.n_layer,
        "d_model": architecture.d_model,
        "n_head": architecture.n_head,
        "n_kv_head": architecture.n_kv_head,
        "d_head": architecture.d_head,
        "vocab_size": architecture.vocab_size,
        "context": architecture.context,
        "n_parameters": architecture.n_parameters,
        "dtypes": dict(dtypes.most_common()),
        "kv_bytes_per_token": architecture.kv_values_per_token * BYTES_PER_VALUE,
        "folded": list(architecture.folded),
        "remarks": list(architecture.remarks),
        "fingerprint": checkpoint.fingerprint(),
        "layers": [_layer(layer) for layer in architecture.layers],
    }


def _layer(layer: AttentionLayer) -> dict[str, Any]:
    return {
        "layer": layer.index,
        **({"group": layer.group} if layer.group else {}),
        "n_head": layer.n_head,
        "n_kv_head": layer.n_kv_head,
        "d_qk": layer.d_qk,
        "d_v": layer.d_v,
        "window": layer.window,
    }


def fact_lines(known: dict[str, Any]) -> list[tuple[str, str]]:
    """The facts as names and texts for the terminal."""
    layers = known["layers"]
    local = sum(layer["window"] is not None for layer in layers)
    windows = sorted({layer["window"] for layer in layers if layer["window"] is not None})
    attention = f"{len(layers)} of {known['n_layer']} layers" + (
        f", {local} of them local (window {', '.join(map(str, windows))})" if local else ", all global"
    )
    groups = {layer["group"] for layer in layers if "group" in layer}
    return [
        ("Format", f"{known['format']}, {known['files']} file{'s' if known['files'] > 1 else ''}"),
        ("Architecture", f"{known['family']}, {known['kind'].upper()}"),
        ("Heads", f"{known['n_head']} query, {known['n_kv_head']} key-value, size {known['d_head']}; d_model {known['d_model']}"),
        ("Attention", attention + (f" ({', '.join(sorted(groups))})" if groups else "")),
        ("Vocabulary", _or_unknown(known["vocab_size"])),
        ("Context", _or_unknown(known["context"])),
        ("Parameters", f"{known['n_parameters']:,}"),
        ("Stored as", ", ".join(f"{dtype} ({count})" for dtype, count in known["dtypes"].items())),
        ("KV cache", f"{known['kv_bytes_per_token']:,} bytes a token in bfloat16"),
        ("Folded", "; ".join(known["folded"]) or "nothing"),
        *(("Remark", remark) for remark in known["remarks"]),
        ("Fingerprint", known["fingerprint"]),
    ]


def _or_unknown(number: int | None) -> str:
    return "not stated" if number is None else f"{number:,}"


def explanation(architecture: Architecture) -> Iterator[dict[str, Any]]:
    """Tensor -> slice -> head for every layer: a dictionary a stored matrix, head by head."""
    for layer in architecture.layers:
        for role, projection in (("q", layer.q), ("k", layer.k), ("v", layer.v), ("o", layer.o)):
            for part, slice_ in _slices(projection):
                yield {
                    "layer": layer.index,
                    **({"group": layer.group} if layer.group else {}),
                    "role": role if len(projection.parts) == 1 else f"{role} ({part})",
                    "tensor": slice_.tensor,
                    "pattern": slice_.pattern,
                    "transposed": slice_.transposed,
                    "heads": [[start, start + slice_.size] for start in slice_.starts],
                }


def _slices(projection: Projection) -> Iterator[tuple[str, Slice]]:
    for part, chains in projection.parts.items():
        for chain in chains:
            for step in chain:
                yield part, step.weight


def explanation_cells(entries: Sequence[dict[str, Any]]) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Names of columns and cells for the terminal."""
    table: list[Sequence[str]] = []
    for entry in entries:
        heads = [f"{start}-{stop - 1}" for start, stop in entry["heads"]]
        shown = heads if len(heads) <= 4 else [*heads[:3], "…", heads[-1]]
        place = f"{entry['group']}.{entry['layer']}" if "group" in entry else str(entry["layer"])
        axis = "columns" if entry["transposed"] else "rows"
        table.append((place, entry["role"], entry["tensor"], entry["pattern"] or "-", f"{axis} {' '.join(shown)}"))
    return ("Layer", "Role", "Tensor", "Pattern", "Head by head"), table
