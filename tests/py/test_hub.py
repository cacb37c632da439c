"""Names on the hub, loaded from a stock kernel: downloaded once with a bar, gated with a token that is nowhere shown."""
import hashlib
import http.server
import json
import os
import threading
import time

import pytest
from front_end import ROOT, Kernel

TOKEN = "hf_secretsecretsecret"
TINY = ROOT / "notebooks" / "tiny"
SHA = "0123456789abcdef0123456789abcdef01234567"


class Hub(http.server.BaseHTTPRequestHandler):
    """What the hub answers for two repositories that hold notebooks/tiny; org/gated wants the token."""
    protocol_version = "HTTP/1.1"
    asked = []

    def log_message(self, *args):
        pass

    def answer(self, status, body):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        for i in range(0, len(body), 1 << 18):
            self.wfile.write(body[i:i + (1 << 18)])
            time.sleep(0.15 if len(body) > 1 << 19 else 0)  # slow enough for a bar

    def do_GET(self):
        self.asked.append(self.path)
        if "gated" in self.path and self.headers.get("Authorization") != "Bearer " + TOKEN:
            return self.answer(401, b"no")
        if self.path.startswith("/api/"):
            data = self.path.startswith("/api/datasets/")
            files = [p for p in sorted(TINY.iterdir()) if p.is_file() and (not data or p.name == "train.jsonl")]
            return self.answer(200, json.dumps({"sha": SHA, "siblings": [
                {"rfilename": p.name, "size": p.stat().st_size, "blobId": hashlib.sha1(b"blob %d\0" % p.stat().st_size + p.read_bytes()).hexdigest()}
                for p in files]}).encode())
        self.answer(200, (TINY / self.path.rsplit("/", 1)[1]).read_bytes())


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    home = tmp_path_factory.mktemp("hf")
    (home / "token").write_text(TOKEN + "\n")
    os.environ.update(HF_ENDPOINT=f"http://127.0.0.1:{server.server_port}", HF_HOME=str(home))
    for name in ("HF_TOKEN", "HF_HUB_CACHE", "HF_HUB_OFFLINE"):
        os.environ.pop(name, None)
    k = Kernel(tmp_path_factory.mktemp("notebook"))
    yield k
    k.close()
    server.shutdown()
    del os.environ["HF_ENDPOINT"], os.environ["HF_HOME"]


def test_download_once_with_a_bar(kernel):
    reply, out = kernel.run("m = %qlora load org/tiny\nm['name'], m['path']")
    assert reply["status"] == "ok", reply
    assert "/models--org--tiny/snapshots/" + SHA in str(out)
    (first,) = [c for t, c in out if t == "display_data"]
    assert "<progress" in first["data"]["text/html"] and "downloading" in first["data"]["text/plain"]
    assert not any(p.endswith((".py", ".md", ".jsonl")) for p in Hub.asked), Hub.asked
    before = len(Hub.asked)
    reply, out = kernel.run("%qlora load org/tiny;")
    assert reply["status"] == "ok" and not out[2:-1] and len(Hub.asked) == before, out


def test_gated_and_the_token(kernel):
    kernel.run("import os; os.environ['HF_TOKEN'] = 'hf_wrong'")
    reply, out = kernel.run("%qlora load org/gated")
    assert reply["status"] == "error" and "does not know your token" in reply["evalue"] and "hf_wrong" not in str(out)
    kernel.run("del os.environ['HF_TOKEN']")
    reply, out = kernel.run("%qlora load org/gated;")
    assert reply["status"] == "ok", reply
    assert TOKEN not in str(out)


def test_data(kernel):
    reply, out = kernel.run("%qlora load tiny;\nd = %qlora data org/tales")
    assert reply["status"] == "ok", reply
    assert kernel.value("d['rows']") == len((TINY / "train.jsonl").read_text().splitlines())
