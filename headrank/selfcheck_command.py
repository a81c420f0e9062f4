"""The command `selfcheck`: the checks of headrank.selfcheck on a sample of a checkpoint's layers, a line a check."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrank.commands import PlainConsole
from headrank.errors import HeadrankError
from headrank.measure import Reading, Settings, device_name, sequences_to_feed
from headrank.selection import early_middle_late, resolve_layers

if TYPE_CHECKING:
    from torch import Tensor

    from headrank.architectures import Architecture, AttentionLayer
    from headrank.checkpoints import Checkpoint
    from headrank.selfcheck import Check

N_TOKENS = 12  # of a sequence; scores of all pairs are written out
N_SINGLE = 6  # tokens that are fed alone
BYTES_PER_PARAMETER = 8  # float32, and as much while some formats are loaded
VOCABULARY = 256  # where a checkpoint does not say how large it is


def run_selfcheck(
    path: str, reading: Reading, *, layers: Sequence[int], source: str | None, text: Sequence[Path], tokens: Sequence[Path], device: str, seed: int
) -> None:
    """Carries out selfcheck. source: weights, activations, or None for both where the model can be run.

    Raises HeadrankError for the first thing that does not hold.
    """
    from headrank.selfcheck import facts_of_layer, weights_checks

    console = PlainConsole(soft_wrap=True)
    checkpoint, architecture = reading.open(path)
    facts = [facts_of_layer(layer) for layer in architecture.layers]
    keys = {layer.key for layer in resolve_layers(layers or early_middle_late(facts), facts, label=path)}
    chosen = [layer for layer in architecture.layers if facts_of_layer(layer).key in keys]
    console.print(f"{path}: {architecture.family}, {architecture.kind}; layers {', '.join(facts_of_layer(layer).key for layer in chosen)}")
    n = 0
    if source != "activations":
        for circuit in ("qk", "ov"):
            n += _report((check for layer in chosen for check in weights_checks(checkpoint, architecture, layer, circuit, seed=seed)), path, console)
    if source != "weights":
        try:
            runner, ids, singles = _prepare(checkpoint, architecture, text=text, tokens=tokens, device=device, seed=seed)
        except HeadrankError as error:
            if source or text or tokens:
                raise
            console.print(f"Not checked: activations ({error})")
        else:
            n += _report(_activations(runner, checkpoint, architecture, chosen, ids, singles), path, console)
    console.print(f"{n} checks hold.")


def _report(checks: Iterable["Check"], path: str, console: PlainConsole) -> int:
    """Prints a line a kind of check, with the layer that is furthest off. Returns how many kinds there were; raises at the first that does not hold."""
    worst: dict[str, Check] = {}
    for check in checks:
        if not check.holds:
            relation = "only" if check.is_change else "off by"
            bound = f"more than {check.tolerance:.0e}" if check.is_change else f"at most {check.tolerance:.0e}"
            raise HeadrankError(
                f"{path}: does not hold in layer {check.layer}: {check.what}: {relation} {check.deviation:.1e}, {bound} expected\n"
                "Numbers of this checkpoint are not to be trusted: please report it, with the output of headrank inspect PATH --explain"
            )
        known = worst.get(check.what)
        if known is None or (check.deviation < known.deviation if check.is_change else check.deviation > known.deviation):
            worst[check.what] = check
    for check in worst.values():
        bound = f"{'more than' if check.is_change else 'at most'} {check.tolerance:.0e}"
        console.print(f"ok  {check.what}: {check.deviation:.1e}, {bound} (layer {check.layer})")
    return len(worst)


def _prepare(
    checkpoint: "Checkpoint", architecture: "Architecture", *, text: Sequence[Path], tokens: Sequence[Path], device: str, seed: int
) -> "tuple[Any, list[Tensor], Tensor]":
    """The model, ready to run, sequences of token ids, and single ones."""
    import torch

    from headrank.forward import load_runner

    place = torch.device(device_name(device))
    needed, free = architecture.n_parameters * BYTES_PER_PARAMETER, _free_memory()
    if place.type == "cpu" and free is not None and needed > free:
        raise HeadrankError(f"loading the model may take {needed / 1e9:.1f} GB, of which {free / 1e9:.1f} GB are free")
    T = min(architecture.context or N_TOKENS, N_TOKENS)
    settings = Settings(text=tuple(text), tokens=tuple(tokens), seq_len=T, n_sequences=3, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    vocabulary = architecture.vocab_size or VOCABULARY
    try:
        rows = torch.from_numpy(sequences_to_feed(checkpoint, architecture, settings).ids.astype("int64"))
    except HeadrankError:
        if text or tokens:
            raise
        rows = torch.randint(vocabulary, (3, T), generator=generator)  # without a tokenizer, any tokens
    lengths = [max(2, T - 5 * (number == len(rows) - 1)) for number in range(len(rows))]  # the last one is padded
    sequences = [row[:length].to(place) for row, length in zip(rows, lengths, strict=True)]
    runner = load_runner(checkpoint, architecture, device=place, dtype=torch.float32)
    return runner, sequences, torch.randperm(vocabulary, generator=generator)[:N_SINGLE].to(place)


def _activations(
    runner: Any, checkpoint: "Checkpoint", architecture: "Architecture", layers: Sequence["AttentionLayer"], sequences: "list[Tensor]", singles: "Tensor"
) -> "Iterator[Check]":
    from headrank.selfcheck import activations_checks, facts_of_layer, heads_checks

    yield from activations_checks(runner, sequences, [facts_of_layer(layer) for layer in layers])
    for layer in layers:
        yield from heads_checks(runner, checkpoint, architecture, layer, singles)


def _free_memory() -> int | None:
    """Bytes that programs can take without others being moved to disk; None where the system does not say."""
    try:
        return int(Path("/proc/meminfo").read_text(encoding="ascii").partition("MemAvailable:")[2].split()[0]) << 10
    except (OSError, ValueError, IndexError):
        return None
