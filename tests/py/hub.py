"""A small hub on 127.0.0.1: repositories of files, one of them gated, as huggingface.co's API has it."""
import hashlib
import http.server
import json
import threading

TOKEN = "hf_secret0123456789token"


def sha1(data):
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Hub:
    def __init__(self, repositories, gated=()):
        """repositories: {"models/org/name": {file: bytes}}; gated: names that need TOKEN."""
        self.repositories, self.gated, self.requests, self.slow = repositories, set(gated), [], 0
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, *a):
                pass

            def do_GET(self):
                outer.answer(self)

            do_HEAD = do_GET

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()

    def reply(self, h, status, body, headers=()):
        h.send_response(status)
        h.send_header("Content-Length", str(len(body)))
        for k, v in headers:
            h.send_header(k, v)
        h.end_headers()
        if h.command == "HEAD":
            return
        step = 1 << 14
        try:
            for at in range(0, len(body), step):
                h.wfile.write(body[at:at + step])
                if self.slow:
                    threading.Event().wait(self.slow)
        except OSError:
            pass

    def answer(self, h):
        path = h.path.split("?")[0].strip("/")
        self.requests.append((path, h.headers.get("Authorization")))
        kind, rest = ("datasets", path[9:]) if path.startswith("datasets/") else ("models", path)
        if path.startswith("api/") and path.count("/") < 5:
            return self.reply(h, 404, b"{}")
        if path.startswith("api/"):
            kind, org, name, what, revision = path[4:].split("/", 4)
            repo = f"{kind}/{org}/{name}"
        else:
            org, name, _, revision, file = rest.split("/", 4)
            repo = f"{kind}/{org}/{name}"
        if repo not in self.repositories:
            return self.reply(h, 404, b"{}")
        if repo in self.gated and h.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.reply(h, 403 if h.headers.get("Authorization") else 401, b"{}")
        files = self.repositories[repo]
        commit = hashlib.sha1(repr(sorted((k, sha1(v)) for k, v in files.items())).encode()).hexdigest()
        if path.startswith("api/") and what == "tree":
            return self.reply(h, 200, json.dumps([{"type": "file", "path": k, "size": len(v), "oid": sha1(v)} for k, v in files.items()]).encode())
        if path.startswith("api/"):
            return self.reply(h, 200, json.dumps({"id": f"{org}/{name}", "sha": commit, "private": False, "downloads": 0, "tags": [], "siblings": [{"rfilename": k, "size": len(v), "blobId": sha1(v)} for k, v in files.items()]}).encode())
        if file not in files:
            return self.reply(h, 404, b"", [("X-Error-Code", "EntryNotFound")])
        self.reply(h, 200, files[file], [("ETag", f'"{sha1(files[file])}"'), ("X-Repo-Commit", commit)])
