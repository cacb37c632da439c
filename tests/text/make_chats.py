#!/usr/bin/env python3
"""Makes tests/text/data/chats.jsonl and chats.expected: conversations, and what transformers' own set-up of jinja2
makes of them with every template in tests/text/templates (a hash each, or "error").

    python tests/text/make_chats.py            # needs transformers (5.23) and jinja2 (3.1.6)
"""
import datetime
import glob
import json
import os
import random

from transformers.utils.chat_template_utils import _compile_jinja_template

import gen

HERE = os.path.dirname(os.path.abspath(__file__))
WORDS = ["Hello", "wörld", "how  are", "you?", "\n", "<think>", "</think>", "\n\n", "{{ x }}", "日本語", "42", "\"quoted\"",
         "it's", "<|im_end|>", "  ", "emoji 🙂", "<tool_response>", "\ttab", "a\\b", "[INST]"]
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "Weather of a place \"now\"",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer", "default": 1.5}},
                       "required": ["city"]}}}
NOW = datetime.datetime(2025, 3, 3, 12)  # the test stands still there too; not the day that templates name themselves
r = random.Random(3407)


def text(n=8):
    return " ".join(r.choice(WORDS) for _ in range(r.randint(0 if r.random() < .1 else 1, n)))


def conversation(i):
    messages = [{"role": "system", "content": text(5)}] if r.random() < .5 else []
    for turn in range(r.randint(1, 4)):
        messages.append({"role": "user", "content": text()})
        if i % 5 == 3 and turn == 0:
            call = {"name": "get_weather", "arguments": {"city": text(2), "days": r.randint(1, 9)}}
            messages.append({"role": "assistant", "content": "" if r.random() < .5 else text(3),
                             "tool_calls": [{"type": "function", "function": call}]})
            messages.append({"role": "tool", "content": text(3)})
        m = {"role": "assistant", "content": text(12)}
        if i % 7 == 2:
            m["reasoning_content"] = text(4)
        if i % 4 == 1 and r.random() < .5:
            m["content"] = "<think>\n" + text(3) + "\n</think>\n\n" + m["content"]
        messages.append(m)
    if i % 3 == 0:
        messages.pop()
    if i == 40:
        messages = [{"role": "user", "content": None}]
    if i == 41:
        messages = []
    if i == 42:
        messages = [{"role": "user", "content": [{"type": "text", "text": "parts"}]}]
    if i == 43:
        messages = [{"role": "robot", "content": "x"}]
    case = {"messages": messages}
    if i % 5 in (3, 4):
        case["tools"] = [TOOL] * r.randint(1, 2)
    if i % 6 == 1:
        case["extra"] = {"enable_thinking": bool(i % 4), "date_string": "1 Jan 2025"}
    return case


def expected(template, case, prompt):
    spans, out = [], []
    env_ext = next(e for e in template.environment.extensions.values() if hasattr(e, "activate_tracker"))
    try:
        with env_ext.activate_tracker(out, spans):
            for block in template.generate(messages=case["messages"], tools=case.get("tools"), documents=None,
                                           add_generation_prompt=prompt, bos_token="<s>", eos_token="</s>", strftime_now=NOW.strftime,
                                           **case.get("extra", {})):
                out.append(block)
    except Exception:
        return "error", 0, ""
    s = "".join(out)
    h = gen.fnv(gen.FNV, s.encode())
    for a, b in spans:
        h = gen.fnv(h, f"{a}:{b};".encode())
    return f"{h:016x}", len(s.encode()), s


def main():
    cases = [conversation(i) for i in range(60)]
    for c in cases[::2]:
        c.setdefault("extra", {}).setdefault("date_string", "26 Jul 2024")
    with open(os.path.join(HERE, "data", "chats.jsonl"), "w", encoding="utf-8") as f:
        for c in cases:
            f.write(json.dumps(c, ensure_ascii=False) + "\n")
    with open(os.path.join(HERE, "data", "chats.expected"), "w") as f:
        for path in sorted(glob.glob(os.path.join(HERE, "templates", "*.jinja"))):
            template = _compile_jinja_template(open(path, encoding="utf-8", newline="").read())
            for i, c in enumerate(cases):
                for prompt in (False, True):
                    h, n, s = expected(template, c, prompt)
                    f.write(f"{os.path.basename(path)} {i} {int(prompt)} {n} {h}\n")
                    if os.environ.get("SHOW") == f"{os.path.basename(path)} {i} {int(prompt)}":
                        open("/tmp/want.txt", "w").write(s)


main()
