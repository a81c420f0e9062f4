"""Loading of transformers' models and tokenizers from local files: nothing is fetched, no code of a checkpoint's is run, no tensor is made up."""

import contextlib
import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headrank.errors import HeadrankError
from headrank.tokens import encoded, load_tokenizer

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class TokenizedTexts:
    """Texts as token ids."""

    ids: tuple[NDArray[np.int32], ...]
    """An array a text, without special tokens: none stands in the middle when the ids are cut into sequences."""
    before: tuple[int, ...]
    """Special tokens that the tokenizer puts before a sequence."""
    after: tuple[int, ...]
    """Special tokens that it puts after one."""


def load_tokenizer_ids(path: Path, texts: Sequence[str], *, gguf_file: str | None = None) -> TokenizedTexts:
    """Texts through the tokenizer of a checkpoint: its tokenizer.json, or what transformers makes of the folder or GGUF file.

    Raises HeadrankError where there is none.
    """
    folder, gguf_file = _folder_and_gguf(path, gguf_file)
    if gguf_file is None and (folder / "tokenizer.json").is_file():
        fast = load_tokenizer(folder / "tokenizer.json")

        def encode(text: str, special: bool) -> list[int]:
            return encoded(fast, text, path=folder / "tokenizer.json", special=special)
    else:
        transformers = _transformers()
        options = {"gguf_file": gguf_file} if gguf_file else {}
        with quiet():
            try:
                slow = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False, **options)
            except Exception as error:  # of many classes
                raise HeadrankError(f"{path}: has no tokenizer that transformers can read ({first_line(error)}); give token ids with --tokens") from error
        if len(slow) < 2 + len(slow.all_special_ids):  # where files are missing the library makes up an empty one
            raise HeadrankError(f"{path}: has no tokenizer; give --tokenizer, or token ids with --tokens")

        def encode(text: str, special: bool) -> list[int]:
            with quiet():
                return slow(text, add_special_tokens=special)["input_ids"]

    plain, framed = encode("a", False), encode("a", True)
    start = next((i for i in range(len(framed)) if framed[i : i + len(plain)] == plain), 0) if plain else 0
    ids = tuple(np.asarray(encode(text, False), dtype=np.int32) for text in texts)
    return TokenizedTexts(ids=ids, before=tuple(framed[:start]), after=tuple(framed[start + len(plain) :]))


def load_model(path: Path, *, dtype: "torch.dtype", gguf_file: str | None = None) -> Any:
    """A transformers model from a local folder or GGUF file, on the CPU. Nothing is fetched, and no code of the checkpoint's is run.

    Raises HeadrankError where transformers is missing, the checkpoint is quantised, an adapter, broken, or lacks a tensor of the model.
    """
    import torch

    transformers = _transformers()
    folder, gguf_file = _folder_and_gguf(path, gguf_file)
    if (folder / "adapter_config.json").is_file():
        raise HeadrankError(f"{path}: an adapter (adapter_config.json); merge it into its base model first, or use --source weights with --adapter")
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    if gguf_file:
        options["gguf_file"] = gguf_file
    with quiet(), contextlib.redirect_stderr(io.StringIO()):  # a progress bar that has no switch
        try:
            config = transformers.AutoConfig.from_pretrained(str(folder), **options)
            if getattr(config, "quantization_config", None) is not None and not gguf_file:
                raise HeadrankError(f"{path}: quantised ({_quantisation(config)}); give the unquantised model, or use --source weights")
            config._attn_implementation = None  # a checkpoint may name code to fetch here; the library's own choice is safe
            config._experts_implementation = None
            model, info = _model_class(transformers, config, gguf_file).from_pretrained(
                str(folder), config=config, dtype=dtype, weights_only=True, output_loading_info=True, **options
            )
        except (HeadrankError, MemoryError, torch.OutOfMemoryError):
            raise
        except ImportError as error:
            extra = "gguf" if "gguf" in str(error).lower() else "hf"
            raise HeadrankError(f"{path}: {first_line(error)}; pip install 'headrank[{extra}]'") from error
        except Exception as error:  # of many classes, whatever is wrong with the files
            raise HeadrankError(f"{path}: transformers cannot load it: {first_line(error)}; use --source weights") from error
    _check_whole(model, info, path)
    return model


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise HeadrankError("activations of this model need transformers: pip install 'headrank[hf]', or use --source weights") from None
    return transformers


def _folder_and_gguf(path: Path, gguf_file: str | None) -> tuple[Path, str | None]:
    if path.is_dir():
        files = sorted(path.glob("*.gguf")) if gguf_file is None and not (path / "config.json").exists() else []
        return path, files[0].name if len(files) == 1 else gguf_file
    if not path.is_file():
        raise HeadrankError(f"{path}: no such file or folder")
    with path.open("rb") as file:
        is_gguf = file.read(4) == b"GGUF"
    if is_gguf:
        if re.search(r"-\d{5}-of-\d{5}\.gguf$", path.name) and not path.name.endswith("-00001-of-00001.gguf"):
            raise HeadrankError(f"{path}: transformers reads no split GGUF files; merge them with gguf-split, or use --source weights")
        return path.parent, path.name
    if path.name == "model.safetensors" or (path.name == "pytorch_model.bin" and not (path.parent / "model.safetensors").exists()):
        return path.parent, None
    raise HeadrankError(f"{path}: transformers loads folders with a config.json, and GGUF files; give the folder, or use --source weights")


def _model_class(transformers: Any, config: Any, gguf_file: str | None) -> Any:
    """The class that the checkpoint was saved from, so that no tensor is missing; else the one that the library takes for the config."""
    named = (getattr(config, "architectures", None) or [""])[0]
    own: Any = getattr(transformers, named, None) if isinstance(named, str) and named.isidentifier() else None
    if isinstance(own, type) and issubclass(own, transformers.PreTrainedModel) and getattr(own, "config_class", None) is type(config):
        return own
    if gguf_file:
        return transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    return transformers.AutoModel


def _check_whole(model: Any, info: Mapping[str, Any], path: Path) -> None:
    """Tensors that were not in the checkpoint are random numbers: none may take part. Poolers and heads come after all attention."""
    base = model.base_model
    prefix = "" if base is model else f"{model.base_model_prefix}."
    own = set(base.state_dict())
    missing = sorted(name for name in info["missing_keys"] if name.removeprefix(prefix) in own and "pooler" not in name and name.startswith(prefix))
    if missing:
        raise HeadrankError(f"{path}: lacks {len(missing)} tensors that {type(model).__name__} needs, {missing[0]} among them; use --source weights")


def _quantisation(config: Any) -> str:
    given = config.quantization_config
    return str(given.get("quant_method", "unknown") if isinstance(given, dict) else getattr(given, "quant_method", "unknown"))


def first_line(error: BaseException) -> str:
    """What an error says first, cut short: for one-line messages."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """A stretch of code without warnings, remarks or progress bars of transformers'."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
