"""Memory by category, now and over a run's time: the categories add up to what the device says is in use."""
import json
import subprocess
import sys

from front_end import BUILD, environment

ARENA = {"base", "head", "gather", "scratch", "adapters", "gradients", "optimizer", "activations", "work"}


def python(code, cwd):
    r = subprocess.run([sys.executable, "-c", "import qlora, json\n" + code], cwd=cwd, env=environment(engine=BUILD / "qlora-engine"),
                       capture_output=True, text=True, timeout=120)
    assert r.returncode == 0, r.stderr
    return r.stdout


def check(devices):
    for d in devices:
        assert sum(d["bytes"].values()) == d["used"] <= d["total"], d
        assert sum(v for k, v in d["bytes"].items() if k in ARENA) == d["arena"] <= d["process"], d
        assert set(d["bytes"]) <= ARENA | {"runtime", "others"}, d


def test_categories_add_up_on_two_ranks(tmp_path):
    out = python("qlora.run('load', 'tiny'); qlora.run('data', 'tiny')\n"
                 "qlora.run('config', devices='cpu:2', fsdp=True, max_length=64)\n"
                 "idle = qlora.run('memory'); r = qlora.run('train', max_steps=4); now = qlora.run('memory'); m = qlora.run('memory', 'run-1')\n"
                 "print('DATA' + json.dumps([idle, r.memory, now, m._bundle['data']['text/plain']]) + 'END')\nprint(now)", tmp_path)
    idle, over_time, now, text = json.loads(out.split("DATA")[1].split("END")[0])
    assert idle["devices"][0]["used"] == 0 and "bytes" in idle["devices"][0]
    assert len(now["devices"]) == 2 and len(over_time) >= 2
    for event in over_time + [now]:
        check(event["devices"])
    events = [json.loads(line) for line in open(tmp_path / "runs/run-1/events.jsonl")]
    assert [e["devices"] for e in events if e["ev"] == "memory"] == [e["devices"] for e in over_time]
    arena = now["devices"][0]["arena"]
    assert arena == json.loads(python("qlora.run('load', 'tiny'); qlora.run('data', 'tiny')\n"
                                      "qlora.run('config', devices='cpu:2', fsdp=True, max_length=64)\n"
                                      "print(json.dumps(qlora.run('plan', max_steps=4)))", tmp_path))["devices"][0]["total"]
    assert "device memory, MiB" in text and "0: " in text and "1: " in text and "activations" in text


def memory_event(t, used, resumed=()):
    parts = {"base": 3 << 30, "activations": used}
    return {"ev": "memory", "t": t, "host": 0, "devices": [
        {"rank": i, "name": "Fake T4", "bytes": dict(parts, **({"runtime": 1 << 29} if i else {})), "used": sum(parts.values()), "total": 15 << 30} for i in range(2)]}


def test_over_time_by_category_and_device(tmp_path):
    """A resumed run's engine counts its seconds from nought again: time goes on. A night's figures keep the highest moment."""
    run = tmp_path / "runs" / "long"
    run.mkdir(parents=True)
    (run / "job.json").write_text("{}")
    events = [memory_event(10 + i, 1 << 30) for i in range(1000)] + [memory_event(5, 2 << 30)] + [memory_event(6 + i, 1 << 30) for i in range(1000)]
    events.append({"ev": "step", "t": 1, "step": 1, "loss": 2.0})
    (run / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    chart = json.loads(python("print(json.dumps(qlora.run('plot', 'long', metric='memory')['chart']))", tmp_path))
    assert chart["title"] == "device memory, GiB" and len(chart["panels"]) == 2
    names = [[s["name"] for s in p["series"]] for p in chart["panels"]]
    assert names == [["base", "activations", "runtime"]] * 2
    first, second = (p["series"] for p in chart["panels"])
    xs = first[0]["x"]
    assert len(xs) <= 400 and xs == sorted(xs) and xs[0] == 0 and 1990 <= xs[-1] <= 2000
    assert max(first[1]["y"]) == 5.0 and min(first[1]["y"]) == 4.0 and first[1]["low"] == first[0]["y"]
    assert max(first[2]["y"]) == 5.0 and max(second[2]["y"]) == 5.5
    assert first[1]["label"] == "activations  2.00 GiB"
    assert "0: Fake T4, at most 5.00 GiB of 15.0 GiB" in chart["panels"][0]["text"]
    text = python("print(qlora.run('memory', 'long'))", tmp_path)
    assert max(len(line) for line in text.splitlines()) <= 80 and "activations  2.00 GiB" in text


def test_a_single_moment_and_many_devices_are_drawn(tmp_path):
    run = tmp_path / "runs" / "one"
    run.mkdir(parents=True)
    (run / "job.json").write_text("{}")
    event = dict(memory_event(1, 1 << 20), host=5 << 30)
    event["devices"] = [dict(event["devices"][0], rank=i) for i in range(8)]
    (run / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in (event, {"ev": "step", "t": 1, "step": 1, "loss": 2.0})))
    out = python("import sys, base64\np = qlora.run('memory', 'one')\n"
                 "print(base64.b64decode(p._bundle['data']['image/png'])[:4])\nsys.modules['matplotlib'] = None\n"
                 "print(base64.b64decode(qlora.run('memory', 'one')._bundle['data']['text/html'].split('base64,')[1].split('\"')[0]).decode())", tmp_path)
    assert "device memory, GiB; host memory at most 5.00 GiB" in out
    assert max(len(line) for line in python("print(qlora.run('memory', 'one'))", tmp_path).splitlines()) <= 80
    assert "PNG" in out and out.count("<rect") == 3 and out.count("Fake T4, at most") == 8
