"""Models on the Hub, against a server of our own on this machine that counts the bytes it sends."""

import json
import re
import struct
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import save, save_file

from headrank.architectures import describe
from headrank.checkpoints import open_checkpoint
from headrank.checkpoints.hub import HubCheckpoint
from headrank.errors import HeadrankError
from headrank.factors import head_factors, tensors_read
from tests.architectures.test_layouts import check
from tests.checkpoints.test_formats import CONFIG, HEADS, halves, llama, write_gguf

pytest.importorskip("huggingface_hub")

SHA = "0123456789abcdef0123456789abcdef01234567"
SECRET = "hf_thisTokenMustNeverBeSeen"


class Hub:
    """What a repository holds, and what was asked of it."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.requests: list[tuple[str, str, str | None]] = []
        self.sent: dict[str, int] = {}
        self.status = 0
        self.error_code = ""
        self.ranges = True
        self.broken_answers = 0

    def handler(hub) -> type[BaseHTTPRequestHandler]:  # noqa: N805
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: object) -> None:
                pass

            def do_HEAD(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                hub.requests.append((self.command, self.path, self.headers.get("range")))
                if hub.status:
                    self.answer(hub.status, b"{}", {"X-Error-Code": hub.error_code})
                elif match := re.fullmatch(r"/api/models/([^/]+/[^/?]+)(?:/revision/[^?]+)?(?:\?.*)?", self.path):
                    self.api(match.group(1))
                elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", self.path):
                    self.file(match.group(1), match.group(2))
                else:
                    self.answer(404, b"{}", {"X-Error-Code": "EntryNotFound"})

            def api(self, repo: str) -> None:
                if repo not in hub.repos:
                    return self.answer(401, b"{}", {"X-Error-Code": "RepoNotFound"})
                siblings = [{"rfilename": name, "size": len(content), "blobId": "b" + name} for name, content in hub.repos[repo].items()]
                self.answer(200, json.dumps({"id": repo, "sha": SHA, "siblings": siblings}).encode(), {"Content-Type": "application/json"})

            def file(self, repo: str, name: str) -> None:
                content = hub.repos[repo][name]
                headers = {"X-Repo-Commit": SHA, "ETag": f'"{name}{len(content)}"', "Accept-Ranges": "bytes"}
                asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range") or "")
                if asked and hub.ranges:
                    start, stop = int(asked.group(1)), int(asked.group(2)) + 1
                    part = content[start:stop]
                    if hub.broken_answers:
                        hub.broken_answers -= 1
                        part = part[: len(part) // 2]
                    hub.sent[name] = hub.sent.get(name, 0) + len(part)
                    return self.answer(206, part, {**headers, "Content-Range": f"bytes {start}-{start + len(part) - 1}/{len(content)}"})
                hub.sent[name] = hub.sent.get(name, 0) + len(content) * (self.command == "GET")
                self.answer(200, content, headers)

            def answer(self, status: int, content: bytes, headers: dict[str, str]) -> None:
                self.send_response(status)
                for key, value in {"Content-Length": str(len(content)), **headers}.items():
                    self.send_header(key, value)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(content)

        return Handler


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server_side = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), server_side.handler())
    server.handle_error = lambda request, client_address: None  # type: ignore[method-assign]  # answers that nobody waits for any more
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.chdir(tmp_path)
    from huggingface_hub import constants  # before the endpoint is set, which it takes in on its first import

    for name, value in (("HF_HUB_CACHE", str(tmp_path / "cache")), ("HF_HUB_OFFLINE", False)):
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setenv("HF_ENDPOINT", address)
    yield server_side
    server.shutdown()
    server.server_close()
    thread.join()


def files(*, shards: bool = False) -> dict[str, bytes]:
    """The known heads with a large tensor that attention does not need."""
    state = {**llama(), "model.embed_tokens.weight": torch.zeros(1 << 19)}
    config = json.dumps(CONFIG).encode()
    if not shards:
        return {"config.json": config, "model.safetensors": save(state), "README.md": b"x", "model.bin": b"y" * 999}
    parts = {f"model-{number:05d}-of-00002.safetensors": part for number, part in enumerate(halves(state), 1)}
    weight_map = {name: file for file, part in parts.items() for name in part}
    return {"config.json": config, "model.safetensors.index.json": json.dumps({"weight_map": weight_map}).encode(), **{n: save(p) for n, p in parts.items()}}


@pytest.mark.parametrize("shards", [False, True])
def test_only_headers_and_the_tensors_of_attention_are_fetched(shards: bool, hub: Hub) -> None:
    hub.repos["someone/some-model"] = files(shards=shards)
    checkpoint = open_checkpoint("someone/some-model")
    check(checkpoint, HEADS)
    assert checkpoint.format == "safetensors on the Hub"
    needed = sum(tensor.nbytes for tensor in llama().values())
    weights = sum(sent for name, sent in hub.sent.items() if name.endswith(".safetensors"))
    assert needed <= weights < needed + 2 * (1 << 17) + 4096 < sum(map(len, hub.repos["someone/some-model"].values())) / 3
    assert not any(name in hub.sent for name in ("README.md", "model.bin"))


def test_a_tensor_is_fetched_once_for_both_circuits(hub: Hub) -> None:
    hub.repos["someone/some-model"] = files()
    checkpoint = open_checkpoint("someone/some-model")
    architecture = describe(checkpoint)
    before = len(hub.requests)
    for circuit in ("qk", "ov", "qk"):
        head_factors(checkpoint, architecture, architecture.layers[0], circuit)
    assert len(hub.requests) - before == 5  # q, k, v, o, and the norm's gain


def test_what_is_expected_is_fetched_meanwhile_and_once(hub: Hub) -> None:
    hub.repos["someone/some-model"] = files()
    checkpoint = open_checkpoint("someone/some-model")
    layer = describe(checkpoint).layers[0]
    names = (*tensors_read(layer, "qk"), *tensors_read(layer, "ov"))
    before = len(hub.requests)
    checkpoint.expect(names)
    checkpoint.expect(names[:2])
    for name in (*names, *names):
        assert torch.equal(checkpoint.read(name), llama()[name])
    assert len(hub.requests) - before == len(names) == 4


def test_a_fetch_that_fails_meanwhile_is_an_error_where_the_tensor_is_read(hub: Hub) -> None:
    hub.repos["someone/some-model"] = files()
    checkpoint = open_checkpoint("someone/some-model")
    name = tensors_read(describe(checkpoint).layers[0], "qk")[0]
    hub.ranges = False
    checkpoint.expect([name])
    with pytest.raises(HeadrankError, match="does not send parts"):
        checkpoint.read(name)


def test_a_header_longer_than_the_first_piece(hub: Hub) -> None:
    content = save({**llama(), **{f"{number:06d}" * 9: torch.zeros(1) for number in range(1500)}})
    assert struct.unpack("<Q", content[:8])[0] > 1 << 17
    hub.repos["someone/some-model"] = {"config.json": json.dumps(CONFIG).encode(), "model.safetensors": content}
    check(open_checkpoint("someone/some-model"), HEADS)


def test_the_fingerprint_needs_no_weights(hub: Hub) -> None:
    hub.repos["someone/some-model"] = files()
    checkpoint = open_checkpoint("someone/some-model")
    before = dict(hub.sent)
    assert checkpoint.fingerprint() == open_checkpoint("someone/some-model").fingerprint() == checkpoint.identity()
    assert hub.sent["model.safetensors"] - before["model.safetensors"] == 1 << 17  # the second one's header


def test_what_is_in_the_cache_is_not_fetched(hub: Hub, tmp_path: Path) -> None:
    hub.repos["someone/some-model"] = files()
    snapshot = tmp_path / "cache" / "models--someone--some-model" / "snapshots" / SHA
    snapshot.mkdir(parents=True)
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text(SHA, encoding="utf-8")
    save_file(llama(), snapshot / "model.safetensors")
    (snapshot / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    check(open_checkpoint("someone/some-model"), HEADS)
    assert hub.requests == []


def test_another_revision_and_a_single_file(hub: Hub) -> None:
    hub.repos["someone/some-model"] = files()
    check(open_checkpoint("someone/some-model@v1.0"), HEADS)
    assert any("/revision/v1.0" in path for _, path, _ in hub.requests)
    checkpoint = open_checkpoint("someone/some-model/model.safetensors")
    assert isinstance(checkpoint, HubCheckpoint)
    check(checkpoint, HEADS)


def test_gguf_is_downloaded_whole_into_the_cache(hub: Hub, tmp_path: Path) -> None:
    content = write_gguf(tmp_path / "m.gguf").read_bytes()
    hub.repos["someone/some-gguf"] = {"m-q8.gguf": content, "m-q4.gguf": content}
    with pytest.raises(HeadrankError, match=r"several GGUF files; name one, such as someone/some-gguf/m-q8\.gguf"):
        open_checkpoint("someone/some-gguf")
    check(open_checkpoint("someone/some-gguf/m-q4.gguf"), HEADS)
    assert "m-q8.gguf" not in hub.sent


def test_an_answer_that_breaks_off_is_asked_for_again(hub: Hub) -> None:
    hub.repos["someone/some-model"] = files()
    hub.broken_answers = 2
    check(open_checkpoint("someone/some-model"), HEADS)
    hub.broken_answers = 9
    with pytest.raises(HeadrankError, match="did not come whole in 3 attempts"):
        open_checkpoint("someone/some-model")


@pytest.mark.parametrize(
    ("status", "code", "pattern"),
    [
        (403, "GatedRepo", "gated; accept its terms on its page on the Hub, and log in"),
        (401, "RepoNotFound", "no such file or folder here, and no such model on the Hub"),
        (404, "RevisionNotFound", "the Hub has no such revision of it"),
        (500, "", "the Hub answered with status 500"),
        (418, "", "the Hub answered with status 418"),
    ],
)
def test_every_refusal_is_one_line_without_the_token(status: int, code: str, pattern: str, hub: Hub) -> None:
    hub.status, hub.error_code = status, code
    with pytest.raises(HeadrankError, match=pattern) as caught:
        open_checkpoint("someone/some-model")
    assert len(str(caught.value).splitlines()) == 1
    assert SECRET not in str(caught.value)


def test_a_server_that_sends_whole_files_is_refused_before_it_does(hub: Hub) -> None:
    hub.repos["someone/some-model"] = files()
    hub.ranges = False
    with pytest.raises(HeadrankError, match="the server does not send parts of files"):
        open_checkpoint("someone/some-model")


def test_a_hub_that_cannot_be_reached(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HeadrankError, match=r"no such file or folder here, and .*the Hub cannot be reached"):
        open_checkpoint("someone/some-model")


def test_offline_without_a_cache(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(HeadrankError, match=r"no such file or folder here, and .*the Hub cannot be reached"):
        open_checkpoint("someone/some-model")


def test_a_repository_without_a_checkpoint(hub: Hub) -> None:
    hub.repos["someone/data"] = {"README.md": b"x"}
    with pytest.raises(HeadrankError, match=r"holds no checkpoint that is known; it has README\.md"):
        open_checkpoint("someone/data")
    with pytest.raises(HeadrankError, match=r"the repository has no model\.gguf"):
        open_checkpoint("someone/data/model.gguf")


def test_an_index_that_names_a_file_that_is_not_there(hub: Hub) -> None:
    hub.repos["someone/some-model"] = {name: content for name, content in files(shards=True).items() if "00002-of" not in name}
    with pytest.raises(HeadrankError, match=r"its index names model-00002-of-00002\.safetensors, which the repository does not have"):
        open_checkpoint("someone/some-model")


def test_without_the_package_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(HeadrankError, match=r"no such file or folder; for a model on the Hub: pip install 'headrank\[hf\]'"):
        open_checkpoint("someone/some-model")
