"""llama.cpp as a peer: token-id prompts in, its greedy token ids out.

It runs as the server inside the PyPI wheel `xllamacpp`, in a child process: the wheel keeps Python's lock while it
loads and closes, so that only a process can be given a deadline; the child's threads never meet ours either.
"""

from __future__ import annotations

import http.client
import json
import select
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

LOAD_DEADLINE_S = 120.0
DECODE_DEADLINE_S = 600.0
CLOSE_DEADLINE_S = 10.0

_KV_TYPES = {"float32": 0, "float16": 1, "bfloat16": 30}  # of ggml


class LlamaCpp:
    """A model that decodes up to `num_slots` sequences of up to `max_len` tokens at once, with `num_threads` threads.

    `kv_dtype` is float16 (llama.cpp's own choice), float32 or bfloat16. Raises RuntimeError if the model does not load.
    """

    def __init__(
        self, gguf_path: Path, num_slots: int, max_len: int, num_threads: int, *, kv_dtype: str = "float16"
    ) -> None:
        self.num_slots = num_slots
        options = {
            "path": str(gguf_path), "num_slots": num_slots, "max_len": max_len, "num_threads": num_threads,
            "kv_type": _KV_TYPES[kv_dtype],
        }  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), json.dumps(options)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._process.stdout
        ready, _, _ = select.select([self._process.stdout], [], [], LOAD_DEADLINE_S)
        self._address = self._process.stdout.readline().strip() if ready else ""
        if not self._address:
            self.close()
            reason = "ended while it loaded" if ready else f"has not loaded within {LOAD_DEADLINE_S:.0f} s"
            raise RuntimeError(
                f"llama.cpp {reason} ({gguf_path}); see its messages, and pip install xllamacpp if it is missing"
            )

    def decode(self, prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
        """Greedy continuations of all prompts at once, prefill included; an end-of-sequence token is the last id.

        Sequences end at the file's end-of-sequence tokens and at those that llama.cpp knows by name.
        Raises TimeoutError, or RuntimeError with the server's reason.
        """
        if not 1 <= len(prompts) <= self.num_slots:
            raise ValueError(f"{len(prompts)} prompts for {self.num_slots} slots")
        body = {
            "prompt": prompts, "n_predict": max_new_tokens, "return_tokens": True, "cache_prompt": False,
            "samplers": ["top_k"], "top_k": 1, "temperature": 0.0, "repeat_penalty": 1.0,
        }  # fmt: skip
        connection = http.client.HTTPConnection(urlsplit(self._address).netloc, timeout=DECODE_DEADLINE_S)
        try:
            connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()  # comes in one piece at the end: the socket's deadline is the whole's
            answer = json.load(response)
        finally:
            connection.close()
        if response.status != 200:
            raise RuntimeError(f"llama.cpp refuses to decode: {answer['error']['message']}")
        found = sorted(answer if isinstance(answer, list) else [answer], key=lambda one: one["index"])
        for prompt, one in zip(prompts, found, strict=True):
            if one["truncated"] or one["timings"]["prompt_n"] != len(prompt):
                raise RuntimeError("llama.cpp has not decoded a prompt afresh and whole; give a larger max_len")
        return [one["tokens"] for one in found]

    def close(self) -> None:
        """End the child process; it also ends by itself when this process does."""
        if self._process.stdin:
            self._process.stdin.close()
        try:
            self._process.wait(CLOSE_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()


def _serve(options: dict) -> None:
    """The child process: print the server's address, serve until standard input ends."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = options["path"]
    params.n_parallel = options["num_slots"]
    params.n_ctx = options["max_len"] * options["num_slots"]  # shared out evenly among the slots
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options["num_threads"]
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type(options["kv_type"])
    params.cache_prompt = params.cache_idle_slots = False  # every call prefills afresh
    params.cache_ram_mib = params.n_ctx_checkpoints = 0
    params.fit_params = False
    params.ui = params.endpoint_slots = False
    params.verbosity = 1  # errors
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()
    del server


if __name__ == "__main__":
    _serve(json.loads(sys.argv[1]))
