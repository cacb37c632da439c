"""save and merge --push_to_hub with the real huggingface_hub, against a hub on 127.0.0.1."""
import base64
import hashlib
import http.server
import json
import os
import pathlib
import subprocess
import sys
import threading

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = ROOT / os.environ.get("BUILD", "build")
TOKEN = "hf_writes0123456789secret"


class Hub(http.server.BaseHTTPRequestHandler):
    """Repositories that are created, files that arrive by commits or as LFS objects; wants TOKEN for everything."""
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def answer(self, status, body=b"", **headers):
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for k, v in {"Content-Length": len(body), "Content-Type": "application/json", **headers}.items():
            self.send_header(k.replace("_", "-"), str(v))
        self.end_headers()
        self.wfile.write(body)

    def body(self):
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def do_PUT(self):
        self.server.objects[self.path.rsplit("/", 1)[1]] = self.body()
        self.answer(200)

    def do_GET(self):
        if self.headers.get("Authorization") != "Bearer " + TOKEN:
            return self.answer(401, {"error": "Invalid username or password."})
        self.answer(200, {"id": "me/adapter", "sha": "0" * 40, "siblings": [], "name": "me", "private": False, "type": "user"})

    def do_POST(self):
        body, server = self.body(), self.server
        server.asked.append((self.path, body))
        if self.headers.get("Authorization") != "Bearer " + TOKEN:
            return self.answer(401, {"error": "Invalid username or password: " + (self.headers.get("Authorization") or "")})
        if self.path == "/api/repos/create":
            what = json.loads(body)
            name = f"{what.get('organization') or 'me'}/{what['name']}"
            server.private[name] = bool(what.get("private") or what.get("visibility") == "private")
            return self.answer(200, {"url": f"{server.url}/{name}", "name": name, "id": "1"})
        if self.path == "/api/validate-yaml":
            return self.answer(200, {"errors": [], "warnings": []})
        if "/preupload/" in self.path:
            files = [{"path": f["path"], "uploadMode": "lfs" if f["path"].endswith(".safetensors") else "regular", "shouldIgnore": False, "oid": None}
                     for f in json.loads(body)["files"]]
            return self.answer(200, {"files": files})
        if self.path.endswith("/info/lfs/objects/batch"):
            objects = [{"oid": o["oid"], "size": o["size"], "actions": {"upload": {"href": f"{server.url}/put/{o['oid']}"}}}
                       for o in json.loads(body)["objects"]]
            return self.answer(200, {"transfer": "basic", "objects": objects})
        if "/commit/" in self.path:
            repo = "/".join(self.path.split("/")[3:5])
            for line in body.splitlines():
                record = json.loads(line)
                value = record["value"]
                if record["key"] == "file":
                    server.files.setdefault(repo, {})[value["path"]] = base64.b64decode(value["content"])
                elif record["key"] == "lfsFile":
                    assert value["oid"] == hashlib.sha256(server.objects[value["oid"]]).hexdigest()
                    server.files.setdefault(repo, {})[value["path"]] = server.objects[value["oid"]]
            return self.answer(200, {"success": True, "commitOid": "c" * 40, "commitUrl": f"{server.url}/{repo}/commit/{'c' * 40}"})
        self.answer(404, {"error": self.path})


@pytest.fixture
def hub():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.url = f"http://127.0.0.1:{server.server_port}"
    server.files, server.objects, server.private, server.asked = {}, {}, {}, []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def script(folder, hub, text, token=TOKEN):
    """A process of its own: huggingface_hub reads its environment once."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and k != "TRANSFORMERS_OFFLINE"}
    env.update(HF_ENDPOINT=hub.url, HF_HOME=str(folder / "home"), HF_HUB_DISABLE_XET="1", HF_HUB_DISABLE_TELEMETRY="1", PYTHONPATH=str(BUILD / "python"))
    env.update({"HF_TOKEN": token} if token else {})
    return subprocess.run([sys.executable, "-c", "import qlora\nqlora.run('load', 'tiny'); qlora.run('data', 'tiny')\n"
                           "qlora.run('config', devices='cpu:1', max_length=128, max_steps=2)\n" + text],
                          cwd=folder, env=env, capture_output=True, text=True, timeout=300)


def test_adapter_and_merged_model(tmp_path, hub):
    out = script(tmp_path, hub, "r = qlora.run('train')\n"
                 "s = qlora.run('save', 'mine', push_to_hub='adapter', private=True)\nprint(s)\nassert s['hub']['commit'] == 'c' * 40, s\n"
                 "qlora.run('merge', 'whole', push_to_hub='org/whole')\n")
    assert out.returncode == 0, out.stderr[-3000:]
    assert hub.private == {"me/adapter": True, "org/whole": False}
    assert set(hub.files["me/adapter"]) == {"adapter_config.json", "adapter_model.safetensors", "README.md"}
    assert hub.files["me/adapter"]["adapter_model.safetensors"] == (tmp_path / "mine" / "adapter_model.safetensors").read_bytes()
    # A folder of this machine is no base that a card on the hub may name.
    assert b"base_model" not in hub.files["me/adapter"]["README.md"] and b"library_name: peft" in hub.files["me/adapter"]["README.md"]
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= set(hub.files["org/whole"])
    assert f"pushed to {hub.url}/me/adapter" in out.stdout
    assert TOKEN not in out.stdout + out.stderr


def test_refused(tmp_path, hub):
    refused = ("qlora.run('train')\ntry:\n    qlora.run('save', 'mine', push_to_hub='adapter')\nexcept qlora.Error as e:\n    print('ERROR', e)\n"
               "import os; print(sorted(os.listdir('mine')))")
    wrong = script(tmp_path, hub, refused, token="hf_wrongwrongwrong")
    assert wrong.returncode == 0, wrong.stderr[-3000:]
    assert "ERROR adapter: " in wrong.stdout and "401" in wrong.stdout and "is saved and can be pushed later" in wrong.stdout
    assert "adapter_model.safetensors" in wrong.stdout, "what was asked for is saved all the same"
    assert "hf_wrongwrongwrong" not in wrong.stdout + wrong.stderr
    none = script(tmp_path, hub, refused, token=None)
    assert "needs a token that may write" in none.stdout, none.stdout + none.stderr[-2000:]
    missing = script(tmp_path, hub, "import sys; sys.modules['huggingface_hub'] = None\n" + refused)
    assert "pip install huggingface_hub" in missing.stdout, missing.stdout + missing.stderr[-2000:]


def test_trainer_pushes(tmp_path, hub):
    out = script(tmp_path, hub, "from trl import SFTConfig\nfrom peft import LoraConfig\n"
                 "args = SFTConfig(output_dir='out', use_cpu=True, bf16=False, max_steps=2, max_length=128, report_to='none', push_to_hub=True,\n"
                 "                 hub_model_id='org/trained', hub_private_repo=True)\n"
                 "t = qlora.SFTTrainer(qlora.run('load', 'tiny')['path'], args=args, train_dataset=[{'text': 'a cat'}] * 32, peft_config=LoraConfig(r=8))\n"
                 "t.train(); t.save_model('saved'); print('AT', t.push_to_hub(), t.job.ignored)\n")
    assert out.returncode == 0, out.stderr[-3000:]
    assert f"AT {hub.url}/org/trained []" in out.stdout, out.stdout
    assert hub.private == {"org/trained": True} and "adapter_model.safetensors" in hub.files["org/trained"]
    assert TOKEN not in out.stdout + out.stderr
