"""A Hub on this machine: what `huggingface_hub` asks of one to describe models and to download."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

MODEL = "toys/series"


def _commit(revision: str) -> str:
    return hashlib.sha1(revision.encode()).hexdigest()


@contextmanager
def hub(
    directory: Path, cache: Path, patch: pytest.MonkeyPatch, *, has_digests: bool = True
) -> Iterator[list[str]]:
    """Serve MODEL, whose revisions are directories; yields what was asked for, in order.

    The answers have the form that huggingface_hub 2.4 reads, weights in LFS and all else in Git.
    """
    asked: list[str] = []
    folders = {_commit(path.name): path for path in directory.iterdir()}

    class Hub(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path).strip("/")
            asked.append(f"{self.command} {path}")
            api, revision = f"api/models/{MODEL}", path.rpartition("/")[2]
            if path.startswith(f"{api}/revision/") and _commit(revision) in folders:
                words = ("blobId", "sha256") if has_digests else ()
                siblings = _files(folders[_commit(revision)], "rfilename", *words)
                self._answer({"id": MODEL, "sha": _commit(revision), "siblings": siblings})
            elif path.startswith(f"{api}/tree/"):
                self._answer(_files(folders[revision], "path", "oid", "oid"))
            elif path.startswith(f"{MODEL}/resolve/"):
                commit, name = path.split("/")[3:]
                content = (folders[commit] / name).read_bytes()
                etag = hashlib.sha256(content).hexdigest()
                self._send(content, {"ETag": f'"{etag}"', "X-Repo-Commit": commit})
            else:
                self._send(b"", {"X-Error-Code": "RevisionNotFound"}, 404)

        do_HEAD = do_GET

        def _answer(self, content: Any) -> None:
            self._send(json.dumps(content).encode(), {"Content-Type": "application/json"})

        def _send(self, content: bytes, headers: dict[str, str], status: int = 200) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Leave stderr to the command."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server, patch.context() as settings:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        # What the library reads of the environment when it is imported.
        address = f"http://127.0.0.1:{server.server_port}"
        resolve = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        settings.setattr(constants, "ENDPOINT", address)
        settings.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", resolve)
        settings.setattr(constants, "HF_HUB_OFFLINE", False)
        settings.setattr(constants, "HF_HUB_CACHE", str(cache))
        yield asked
        server.shutdown()


def _files(directory: Path, name: str, git: str = "", sha256: str = "") -> list[dict[str, Any]]:
    """The files of a revision, with an answer's words for name and digests; without some, none."""
    files: list[dict[str, Any]] = []
    for file in sorted(directory.iterdir()):
        content = file.read_bytes()
        blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        known: dict[str, Any] = {"type": "file", name: file.name, "size": len(content), git: blob}
        if sha256 and file.suffix == ".safetensors":
            digest = hashlib.sha256(content).hexdigest()
            known["lfs"] = {sha256: digest, "size": len(content), "pointerSize": 134}
        files.append(known)
    return files
