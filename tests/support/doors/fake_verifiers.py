"""What stands for the package verifiers in a folder: load_environment of v0, written into modules of its name.

An environment of it plays as those of v0 do: it calls the chat API, and says what that was worth.
"""

from pathlib import Path

PACKAGE = '''
"""Version 0: load_environment(name, **options) imports a module of that name."""

import importlib
import json
import urllib.request


def load_environment(name, **options):
    return importlib.import_module(name).load_environment(**options)


class Environment:
    requires_group_rollouts = False
    eval_dataset = None

    def __init__(self, rows, play, eval_rows=None):
        self.rows, self.play, self.eval_dataset = rows, play, eval_rows

    def get_dataset(self):
        return self.rows

    def get_eval_dataset(self):
        return self.eval_dataset or self.rows

    async def run_rollout(self, row, client, model, sampling_args):
        import asyncio

        def chat(messages, **more):
            body = json.dumps({"model": model, "messages": messages, **sampling_args, **more}).encode()
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(client.api_base_url + "/chat/completions", body, headers)
            with urllib.request.urlopen(request) as answer:
                return json.load(answer)["choices"][0]["message"]

        return await asyncio.to_thread(self.play, row, chat)
'''
TYPES = """
class ClientConfig:
    def __init__(self, **given):
        self.__dict__.update(given)
"""
SUMS = """
import os
import time
import verifiers

print("printed by the environment", flush=True)


def play(row, chat):
    messages = list(row["prompt"])
    said = []
    for word in ("More.", "Last."):
        message = chat(messages)
        said.append(message["content"] or "")
        messages = [*messages, message, {"role": "user", "content": word}]
    return {"reward": sum(sum(text.encode()) % 5 for text in said) / 8, "error": None}


def bent(row, chat):
    return {"reward": float(bool(chat(list(row["prompt"]), temperature=0.1))), "error": None}


def broken(row, chat):
    if row["example_id"] == 1:
        os._exit(3)
    if row["example_id"] == 2:
        return {"reward": None, "error": {"error": "OSError", "message": "the disk is gone"}}
    if row["example_id"] == 3:
        chat(list(row["prompt"]))
        return {"reward": 0.25, "error": {"error": "EmptyModelResponseError", "message": "nothing"}}
    return play(row, chat)


def load_environment(num=12, apart=False, compares=False, sleeps=0.0, how="play"):
    time.sleep(sleeps)
    asked = [[{"role": "user", "content": f"{n} * 7?"}] for n in range(num)]
    rows = [{"prompt": prompt, "answer": str(7 * n), "example_id": n} for n, prompt in enumerate(asked)]
    others = [rows[0], {**rows[0], "prompt": "Apart?"}] if apart else None
    made = verifiers.Environment(rows, {"play": play, "bent": bent, "broken": broken}[how], others)
    made.requires_group_rollouts = compares
    return made
"""


def write_verifiers(folder: Path) -> None:
    """Write the package and an environment of it, `sums`."""
    (folder / "verifiers").mkdir()
    (folder / "verifiers" / "__init__.py").write_text(PACKAGE)
    (folder / "verifiers" / "types.py").write_text(TYPES)
    (folder / "sums.py").write_text(SUMS)
    (folder / "others.py").write_text(SUMS.replace("* 7?", "times 7?"))
