"""Models on the Hugging Face Hub: from the cache where they are there, else only the bytes of the tensors that are read.

Weights alone need a few matrices of each layer: a model of 140 GB costs its headers and what attention is made of. Formats
without a header to read ahead of the rest are downloaded whole, into huggingface_hub's cache.
"""

import hashlib
import json
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrank.checkpoints.base import Checkpoint, TensorInfo
from headrank.checkpoints.files import read_json
from headrank.checkpoints.safetensors import Span, as_tensor, check_header_length, parse_header
from headrank.errors import HeadrankError

if TYPE_CHECKING:
    from torch import Tensor

ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*?)(?:/([\w./-]+\.(?:gguf|safetensors|bin|pt|pth)))?(?:@([\w./-]+))?")
FIRST_BYTES = 1 << 17  # most headers fit in this
FETCHERS = 4  # tensors that are fetched at the same time
KEPT_BYTES = 1 << 30  # of tensors already fetched, for the other circuit
ATTEMPTS = 3
TIMEOUT_SECONDS = 30
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Remote:
    """One revision of a repository."""

    repo: str
    revision: str
    endpoint: str | None
    sizes: dict[str, int | None]
    """File name -> bytes."""
    hashes: dict[str, str]
    """File name -> hash of its content, as the Hub states it."""


class HubCheckpoint(Checkpoint):
    """Safetensors files that stay where they are; tensors are fetched by byte ranges."""

    def __init__(self, path: Path, remote: Remote, names: list[str], *, config: dict[str, Any]) -> None:
        self._remote = remote
        self._spans: dict[str, tuple[str, Span]] = {}
        self._kept: OrderedDict[str, Tensor] = OrderedDict()
        self._coming: dict[str, Future[Tensor]] = {}
        self._fetchers = ThreadPoolExecutor(FETCHERS, thread_name_prefix="fetch")
        tensors: dict[str, TensorInfo] = {}
        for name in names:
            infos, spans = _remote_header(remote, name)
            tensors |= infos
            self._spans |= {tensor: (name, span) for tensor, span in spans.items()}
        super().__init__(path, format="safetensors on the Hub", config=config, config_name="config.json", tensors=tensors)

    def expect(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self._kept and name not in self._coming:
                self._coming[name] = self._fetchers.submit(self._fetch, name)

    def read(self, name: str) -> "Tensor":
        if name not in self._kept:
            coming = self._coming.pop(name, None)
            self._kept[name] = coming.result() if coming else self._fetch(name)
        self._kept.move_to_end(name)
        while len(self._kept) > 1 and sum(tensor.nbytes for tensor in self._kept.values()) > KEPT_BYTES:
            self._kept.popitem(last=False)
        return self._kept[name]

    def _fetch(self, name: str) -> "Tensor":
        file, span = self._spans[name]
        data = bytearray(_fetch(self._remote, file, span)) if span.stop > span.start else bytearray()
        return as_tensor(data, name, self.tensors[name])

    def fingerprint(self) -> str:
        """Over the configuration, the headers, and the hashes that the Hub states of the files."""
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True, default=str).encode())
        for name, info in sorted(self.tensors.items()):
            digest.update(f"\n{name} {info.dtype} {list(info.shape)}".encode())
        for file in sorted({file for file, _ in self._spans.values()}):
            digest.update(f"\n{self._remote.sizes[file]}:{self._remote.hashes.get(file, self._remote.revision)}".encode())
        return f"sha256:{digest.hexdigest()}"

    def identity(self) -> str:
        return self.fingerprint()


def looks_like_id(text: str) -> bool:
    """Whether a text that is no path here can be the name of a model on the Hub: owner/name, with /FILE or @REVISION at most."""
    return ID.fullmatch(text) is not None


def open_hub(text: str, open_local: Callable[[Path], Checkpoint]) -> Checkpoint:
    """The model of that name. open_local opens what had to be downloaded, or was in the cache.

    Raises HeadrankError, in one line and without any token, where it is not there, gated, or cannot be reached.
    """
    match = ID.fullmatch(text)
    if match is None:
        raise HeadrankError(f"{text}: not the name of a model on the Hub, which is owner/name")
    repo, file, revision = match.groups()
    hub = _package(text)
    if cached := _cached(hub, repo, file, revision):
        return open_local(cached)
    with _told(text, but="no such file or folder here, and "):
        remote = _look_up(hub, repo, revision)
    names = _safetensors_of(hub, text, remote, file)
    if names:
        config = _small_file(hub, text, remote, "config.json") if "config.json" in remote.sizes else {}
        return HubCheckpoint(Path(text), remote, names, config=config)
    return open_local(_download(hub, text, remote, file))


def _package(text: str) -> Any:
    try:
        import huggingface_hub
    except ImportError:
        raise HeadrankError(f"{text}: no such file or folder; for a model on the Hub: pip install 'headrank[hf]'") from None
    return huggingface_hub


def _endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT") or None


def _cached(hub: Any, repo: str, file: str | None, revision: str | None) -> Path | None:
    """The cached snapshot, where it holds all files that are needed."""
    config = hub.try_to_load_from_cache(repo, file or "config.json", revision=revision)
    if not isinstance(config, str):
        return None
    if file:
        return Path(config)
    folder = Path(config).parent
    index = folder / INDEX
    wanted = set(read_json(index).get("weight_map", {}).values()) if index.exists() else {"model.safetensors"}
    return folder if wanted and all(isinstance(name, str) and (folder / name).exists() for name in wanted) else None


def _look_up(hub: Any, repo: str, revision: str | None) -> Remote:
    info = hub.HfApi(endpoint=_endpoint()).model_info(repo, revision=revision, files_metadata=True, timeout=TIMEOUT_SECONDS)
    siblings = info.siblings or []
    hashes = {file.rfilename: (file.lfs.sha256 if file.lfs else file.blob_id) or "" for file in siblings}
    return Remote(repo, info.sha or revision or "main", _endpoint(), {file.rfilename: file.size for file in siblings}, hashes)


def _safetensors_of(hub: Any, text: str, remote: Remote, file: str | None) -> list[str]:
    """Names of the safetensors files that hold the model; none where it has another format."""
    if file:
        if file not in remote.sizes:
            raise HeadrankError(f"{text}: the repository has no {file}; it has {', '.join(list(remote.sizes)[:8])}")
        return [file] if file.endswith(".safetensors") else []
    if INDEX in remote.sizes:
        weight_map = _small_file(hub, text, remote, INDEX).get("weight_map")
        names = sorted(set(weight_map.values())) if isinstance(weight_map, dict) else []
        if missing := [name for name in names if name not in remote.sizes]:
            raise HeadrankError(f"{text}: its index names {missing[0]}, which the repository does not have")
        return names
    return ["model.safetensors"] if "model.safetensors" in remote.sizes else []


def _small_file(hub: Any, text: str, remote: Remote, name: str) -> dict[str, Any]:
    with _told(text):
        path = hub.hf_hub_download(remote.repo, name, revision=remote.revision, endpoint=remote.endpoint)
    return read_json(Path(path))


def _download(hub: Any, text: str, remote: Remote, file: str | None) -> Path:
    """Fetches a model of another format whole: the file that was asked for, or what the usual names say."""
    names = [file] if file else _usual_files(text, remote)
    paths = []
    for name in names:
        with _told(text):
            paths.append(Path(hub.hf_hub_download(remote.repo, name, revision=remote.revision, endpoint=remote.endpoint)))
    return paths[0] if file or len(paths) == 1 else paths[0].parent


def _usual_files(text: str, remote: Remote) -> list[str]:
    names = list(remote.sizes)
    small = [name for name in names if name in ("config.json", "pytorch_model.bin.index.json")]
    if pickled := [name for name in names if re.fullmatch(r"pytorch_model(-\d+-of-\d+)?\.bin", name)]:
        return small + pickled
    ggufs = [name for name in names if name.endswith(".gguf")]
    if len(ggufs) == 1:
        return ggufs
    if ggufs:
        raise HeadrankError(f"{text}: has several GGUF files; name one, such as {remote.repo}/{ggufs[0]}")
    raise HeadrankError(f"{text}: the repository holds no checkpoint that is known; it has {', '.join(names[:8]) or 'no files'}")


def _remote_header(remote: Remote, name: str) -> tuple[dict[str, TensorInfo], dict[str, Span]]:
    file, size = Path(remote.repo) / name, remote.sizes[name]
    if size is None:
        raise HeadrankError(f"{file}: the Hub does not state its size")
    start = _fetch(remote, name, Span(0, min(FIRST_BYTES, size)))
    length = int.from_bytes(start[:8], "little")
    check_header_length(file, length, size)
    if 8 + length > len(start):
        start += _fetch(remote, name, Span(len(start), 8 + length))
    return parse_header(file, start[8 : 8 + length], size)


def _fetch(remote: Remote, name: str, span: Span) -> bytes:
    """Bytes of a file. A server that sends the whole file instead is refused before it does."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    url = hf_hub_url(remote.repo, name, revision=remote.revision, endpoint=remote.endpoint)
    headers = {**build_hf_headers(library_name="headrank"), "range": f"bytes={span.start}-{span.stop - 1}"}
    where = f"{remote.repo}/{name}"
    for attempt in range(ATTEMPTS):
        try:
            with _told(where), get_session().stream("GET", url, headers=headers, timeout=TIMEOUT_SECONDS) as response:
                hf_raise_for_status(response)
                if response.status_code != 206:
                    raise HeadrankError(f"{where}: the server does not send parts of files; download the model and give its folder")
                data = b"".join(response.iter_bytes())
        except _UnreachableError:
            if attempt + 1 == ATTEMPTS:
                raise
            continue
        if len(data) == span.stop - span.start:
            return data
    raise HeadrankError(f"{where}: bytes {span.start}…{span.stop} did not come whole in {ATTEMPTS} attempts; try again")


class _UnreachableError(HeadrankError):
    """No answer, or not a whole one: worth another attempt."""


@contextmanager
def _told(where: str, *, but: str = "") -> Iterator[None]:
    """Turns what huggingface_hub and its transport raise into one line of our own: theirs can hold signed addresses."""
    from huggingface_hub import errors

    try:
        yield
    except HeadrankError:
        raise
    except errors.GatedRepoError:
        raise HeadrankError(f"{where}: gated; accept its terms on its page on the Hub, and log in with `hf auth login`") from None
    except errors.RevisionNotFoundError:
        raise HeadrankError(f"{where}: the Hub has no such revision of it") from None
    except errors.RepositoryNotFoundError:
        raise HeadrankError(f"{where}: {but}no such model on the Hub (a private one needs `hf auth login`)") from None
    except errors.HFValidationError:
        raise HeadrankError(f"{where}: {but}not a name that a model on the Hub can have") from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        raise _UnreachableError(f"{where}: {but}not in the cache, and the Hub cannot be reached (offline)") from None
    except errors.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        kind = _UnreachableError if status is None or status >= 500 else HeadrankError
        raise kind(f"{where}: the Hub answered with status {status}") from None
    except OSError as error:  # the transport's own errors are not all of one family
        raise _UnreachableError(f"{where}: {but}the Hub cannot be reached: {type(error).__name__}") from None
    except Exception as error:
        if type(error).__module__.startswith(("httpx", "httpcore", "requests")):
            raise _UnreachableError(f"{where}: {but}the Hub cannot be reached: {type(error).__name__}") from None
        raise
