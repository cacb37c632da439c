#!/usr/bin/env python3
"""Writes names.json: every field of the argument classes whose names the settings have.

    python tests/golden/make_names.py       (with transformers, trl and peft)
"""
import dataclasses
import inspect
import json
import os

import peft
import transformers
import trl

CLASSES = (transformers.TrainingArguments, trl.SFTConfig, peft.LoraConfig)
names = {f.name for c in CLASSES for f in dataclasses.fields(c)}
names |= set(inspect.signature(transformers.BitsAndBytesConfig.__init__).parameters) - {"self", "kwargs"}
versions = {m.__name__: m.__version__ for m in (transformers, trl, peft)}
with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "names.json"), "w") as f:
    json.dump({"versions": versions, "names": sorted(names)}, f, indent=1)
    f.write("\n")
