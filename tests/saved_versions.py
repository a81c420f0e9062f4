"""Results that say in each of their files which version they are; light, since the output folder's tests start many processes."""

from pathlib import Path

from headrank.output import OutputFolder

SUFFIXES = ("png", "csv", "json")


def version(number: int, suffixes: tuple[str, ...] = SUFFIXES) -> dict[str, bytes]:
    """Files of a few hundred KB in all that name their version in every line."""
    return {suffix: f"{suffix} {number}\n".encode() * (10007 + 101 * number) for suffix in suffixes}


def save(folder: Path, files: dict[str, bytes], *, stem: str = "effrank", force: bool = False) -> list[Path]:
    """What a command does: prepares, then saves."""
    output = OutputFolder(folder, force=force)
    output.prepare(stem, files)
    return output.save(stem, files)
