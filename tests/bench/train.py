"""Tokens per second of real shapes on the devices here, through the engine as a front end drives it.

    python3 tests/bench/train.py MODEL_FOLDER NAME '{"setting": value, …}' [NAME '{…}' …]

MODEL_FOLDER is one of make_model's. Each job runs WARM + STEPS optimizer steps; a Markdown table has the median step's tokens/s, the first step's time, the arena and
the driver's count for this process per device, and what the planner said. Beside settings a job may have "bar": tokens/s that are wanted.
QLORA_ENGINE names the engine (default build/qlora-engine)."""
import json, os, socket, statistics, subprocess, sys, tempfile, time

WARM, STEPS = int(os.environ.get("WARM", 3)), int(os.environ.get("STEPS", 7))


class Engine:
    def __init__(self):
        ours, theirs = socket.socketpair()
        path = os.environ.get("QLORA_ENGINE", "build/qlora-engine")
        self.process = subprocess.Popen([path], preexec_fn=lambda: os.dup2(theirs.fileno(), 3), close_fds=False,
                                        env=dict(os.environ, OPENBLAS_NUM_THREADS="1"))
        theirs.close()
        self.file, self.id = ours.makefile("rw"), 0

    def run(self, **command):
        self.id += 1
        self.file.write(json.dumps(dict(command, id=self.id)) + "\n")
        self.file.flush()
        for line in self.file:
            event = json.loads(line)
            yield event
            if event["ev"] in ("done", "error", "stopped") and event.get("id") == self.id:
                return
        raise SystemExit("the engine has gone")


def main():
    folder, jobs = sys.argv[1], sys.argv[2:]
    engine, bad = Engine(), 0
    print("| job | tokens/s | bar | ms/step | first | arena GiB | process GiB | start s | loss bits | plan |\n|---|---|---|---|---|---|---|---|---|---|", flush=True)
    for name, text in zip(jobs[::2], jobs[1::2]):
        job = dict(model=folder, max_steps=WARM + STEPS, max_length=1 << 20, gradient_accumulation_steps=1, save_strategy="no",
                   logging_steps=1, learning_rate=1e-4, output_dir=tempfile.gettempdir() + "/bench-runs", data_seed=1)
        job.update(json.loads(text))
        data, bar = job.pop("train_data", folder + "/train.data"), job.pop("bar", 0)
        seconds, tokens, memory, why, last, started = [], 0, None, [], None, None
        began = time.time()
        for e in engine.run(cmd="train", job=job, run=job["output_dir"] + "/" + name.replace(" ", "-").replace("/", "-"), train_data=data):
            if e["ev"] == "start":
                why, started = e["text"], time.time() - began
            elif e["ev"] == "step":
                seconds.append(e["seconds"])
                tokens, last = e["tokens"], e
            elif e["ev"] == "memory":
                memory = e["devices"]
            elif e["ev"] == "error":
                print(f"| {name} | {e['text'][:400]} |||||||", flush=True)
                bad = 1
        if len(seconds) > WARM:
            s = statistics.median(seconds[WARM:])
            arena = max(d["arena"] for d in memory) / 2**30
            process = max(d["process"] for d in memory) / 2**30
            wanted = f"{bar:,}: {'met' if tokens / s >= bar else 'MISSED'}" if bar else ""
            print(f"| {name} | {tokens / s:,.0f} | {wanted} | {1e3 * s:.1f} | {1e3 * seconds[0]:.0f} | {arena:.2f} | {process:.2f} | {started:.1f} | {last['loss_bits']} | {'; '.join(why)[:150]} |",
                  flush=True)
    sys.exit(bad)


if __name__ == "__main__":
    main()
