"""Tokens per second of generated text, through the engine as a front end drives it, the adapters live.

    python3 tests/bench/generate.py MODEL_FOLDER [NAME '{"setting": value, …}' …]

MODEL_FOLDER is one of make_model's. Prompts of PROMPT random ids; the time of NEW tokens each is that of a command with so many more, the best of three.
Settings are the job's (`{}` where none are named). QLORA_ENGINE names the engine (default build/qlora-engine)."""
import json, os, random, sys, time

from train import Engine

PROMPT, NEW = int(os.environ.get("PROMPT", 128)), int(os.environ.get("NEW", 128))
HOW = {"greedy": {}, "temperature 0.7, top-k 50, top-p 0.9": {"temperature": 0.7, "top_k": 50, "top_p": 0.9},
       "temperature 0.7": {"temperature": 0.7}, "temperature 0.7, top-p 0.9": {"temperature": 0.7, "top_p": 0.9}}


def seconds(engine, job, count, new, how):
    draw = random.Random(1)
    prompts = [[draw.randrange(1000) for _ in range(PROMPT)] for _ in range(count)]
    start = time.perf_counter()
    for e in engine.run(cmd="generate", job=job, prompts=prompts, max_new_tokens=new, seed=1, **how):
        if e["ev"] == "error":
            raise SystemExit(e["text"])
    took = [len(t) for t in e["result"]["tokens"]]
    return time.perf_counter() - start, max(took)


def main():
    folder, jobs = sys.argv[1], sys.argv[2:] or ["as planned", "{}"]
    engine = Engine()
    print("| job | prompts | how | tokens/s | ms a token of each |\n|---|---|---|---|---|")
    for name, text in zip(jobs[::2], jobs[1::2]):
        job = dict(model=folder, max_length=2048, per_device_train_batch_size=1, **json.loads(text))
        seconds(engine, job, 1, 2, {})
        for how in HOW:
            for count in (1, 8):
                runs = []
                for _ in range(3):
                    few, n = seconds(engine, job, count, 2, HOW[how])
                    many, m = seconds(engine, job, count, 2 + NEW, HOW[how])
                    runs.append((many - few) / (m - n))
                print(f"| {name} | {count} | {how} | {count / min(runs):,.1f} | {1000 * min(runs):.2f} |", flush=True)


if __name__ == "__main__":
    main()
