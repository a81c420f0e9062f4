"""Makes a tokenizer.json from GPT-2's vocabulary and merges, as they are published (encoder.json or vocab.json, and vocab.bpe or merges.txt).

python scripts/make_tokenizer.py encoder.json vocab.bpe -o tokenizer.json
"""

from pathlib import Path
from typing import Annotated

import typer
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE


def main(
    vocabulary: Annotated[Path, typer.Argument(help="JSON file: token -> id.")],
    merges: Annotated[Path, typer.Argument(help="Text file: two tokens a line, in the order in which they are merged.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The tokenizer.json to write.")],
) -> None:
    """Makes a tokenizer.json from GPT-2's vocabulary and merges."""
    tokenizer = Tokenizer(BPE.from_file(str(vocabulary), str(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(output))
    typer.echo(f"Wrote {output}: {tokenizer.get_vocab_size()} tokens")


if __name__ == "__main__":
    typer.run(main)
