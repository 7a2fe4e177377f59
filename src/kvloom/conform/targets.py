"""Targets to judge: Python callables, ONNX models, custom-operator libraries, C functions, and commands."""

import ctypes
import importlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from kvloom.conform.describe import Call, Operator, Results, Vector, result_shape
from kvloom.conform.judging import named
from kvloom.conform.outcomes import CallRefused, NoAnswer, Target, Unsupported
from kvloom.core.specs import dtype_name
from kvloom.errors import ArgumentError

_UNSUPPORTED: Final = -2
"""``KVLOOM_UNSUPPORTED`` of ``conform.h``."""
_LARGEST: Final = 64
"""Largest size of an output of a call that must be refused."""
TIMEOUT: Final = 60.0
"""Maximum seconds for one vector, if a target is a process or has one."""


def open_target(text: str, timeout: float = TIMEOUT) -> Target:
    """Open a target in this process; ``isolation`` has the same in a process of its own.

    ``text`` is ``package.module:function``; ``onnxruntime`` or ``onnx.reference``; ``model.onnx``;
    ``library.so``, custom operators of ONNX Runtime; ``library.so:function``, a C function, see
    ``conform.h``; or ``command:PROGRAM ARGUMENTS``, a program that may run ``timeout`` seconds for a vector.

    Raises:
        ArgumentError: it cannot be opened.
    """
    if text in ("onnxruntime", "onnx.reference"):
        from kvloom.conform.onnx_target import OnnxOperators, OnnxReference

        return OnnxOperators() if text == "onnxruntime" else OnnxReference()
    scheme, _, rest = text.partition(":")
    if scheme == "command" and rest:
        return _Command(shlex.split(rest), timeout)
    path, _, function = text.rpartition(":")
    if Path(path).suffix in (".so", ".dylib", ".dll") and function:
        return _CFunction(Path(path), function)
    if Path(text).suffix in (".onnx", ".so", ".dylib", ".dll"):
        from kvloom.conform.onnx_target import OnnxModel, OnnxOperators

        return OnnxModel(Path(text)) if Path(text).suffix == ".onnx" else OnnxOperators(Path(text))
    if path and function:
        return python_target(_import(path, function))
    raise ArgumentError(
        "TARGET must be package.module:function, onnxruntime, onnx.reference, model.onnx, library.so, "
        f"library.so:function or command:PROGRAM, got {text!r}"
    )


def _import(module: str, function: str) -> Callable[..., Any]:
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = importlib.import_module(module)
        for name in function.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError) as error:
        raise ArgumentError(f"TARGET must be a callable, got {module}:{function}: {error}") from error
    finally:
        sys.path.pop(0)
    if not callable(found):
        raise ArgumentError(f"TARGET must be a callable, got {module}:{function}")
    return found


def python_target(function: Callable[..., Any]) -> Target:
    """Target for a callable that takes keyword arguments and returns the outputs in order, or by name."""

    def run(operator: Operator, vector: Vector, call: Call) -> Results:
        try:
            out = function(**call)
        except Unsupported:
            raise
        except Exception as error:
            if type(error) is NotImplementedError:
                raise Unsupported(str(error) or "the target does not do this") from error
            raise CallRefused(f"{type(error).__name__}: {error}") from error
        found = {name: call[name] for name in operator.updated if name in call}
        if isinstance(out, dict):
            found |= out
        elif out is not None:
            values = out if isinstance(out, tuple | list) else (out,)
            found |= dict(zip(operator.wanted(vector.call), values, strict=False))
        return {name: x for name, x in named(found).items() if isinstance(x, Tensor)}

    return run


def _outputs_like(vector: Vector, operator: Operator) -> Results:
    """Zeroed outputs with the expected shapes and dtypes, also for a call that must be refused."""
    first = next(x for x in named(vector.call).values() if isinstance(x, Tensor))
    found = {}
    if vector.expected is None:
        for name in operator.wanted(vector.call):
            shape = [min(max(n, 1), _LARGEST) for n in result_shape(operator, name, vector.call) or [1]]
            found[name] = torch.zeros(shape, dtype=first.dtype)
    for name, x in (vector.expected or {}).items():
        if "@" not in name and name.split(".")[0] in operator.outputs:
            dtype = first.dtype if operator.how(name) == "close" else x.dtype
            found[name] = torch.zeros(x.shape, dtype=dtype)
    return found


def _parts(call: Call) -> tuple[Results, Call]:
    """Tensors of a call by name, lists of them flattened; and its other arguments."""
    tensors = {name: x for name, x in named(call).items() if isinstance(x, Tensor)}
    return tensors, {name: x for name, x in call.items() if not {name, f"{name}.0"} & tensors.keys()}


class _CTensor(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("dtype", ctypes.c_char_p),
        ("rank", ctypes.c_int64),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("data", ctypes.c_void_p),
    )


class _CFunction:
    """C function as declared in ``conform.h``."""

    _MESSAGE: Final = 512

    def __init__(self, path: Path, function: str) -> None:
        try:
            self._function = getattr(ctypes.CDLL(str(path.resolve())), function)
        except (OSError, AttributeError) as error:
            raise ArgumentError(f"TARGET must be a shared library and a function of it: {error}") from error
        self._function.restype = ctypes.c_int

    def __call__(self, operator: Operator, vector: Vector, call: Call) -> Results:
        tensors, attributes = _parts(call)
        outputs = _outputs_like(vector, operator)
        message = ctypes.create_string_buffer(self._MESSAGE)
        status = self._function(
            operator.name.encode(),
            json.dumps(attributes).encode(),
            ctypes.c_int64(len(tensors)),
            _c_tensors(tensors),
            ctypes.c_int64(len(outputs)),
            _c_tensors(outputs),
            message,
            ctypes.c_int64(self._MESSAGE),
        )
        text = message.value.decode(errors="replace") or f"status {status}"
        if status == _UNSUPPORTED:
            raise Unsupported(text)
        if status:
            raise CallRefused(text)
        updated = {name: x for name, x in tensors.items() if name.split(".")[0] in operator.updated}
        return {**updated, **outputs}


def _c_tensors(tensors: Results) -> Any:
    array = (_CTensor * max(len(tensors), 1))()
    for c, (name, x) in zip(array, tensors.items(), strict=False):
        sizes = ctypes.c_int64 * max(x.ndim, 1)
        c.name, c.dtype, c.rank = name.encode(), dtype_name(x.dtype).encode(), x.ndim
        c.shape, c.strides, c.data = sizes(*x.shape), sizes(*x.stride()), x.data_ptr()
    return array


class _Command:
    """Program that reads ``call.json`` and ``call.safetensors`` and writes ``result.safetensors``."""

    def __init__(self, words: list[str], timeout: float) -> None:
        self._words, self._timeout = words, timeout

    def __call__(self, operator: Operator, vector: Vector, call: Call) -> Results:
        from safetensors.torch import load_file, save_file

        tensors, attributes = _parts(call)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder)
            save_file({name: x.contiguous() for name, x in tensors.items()}, path / "call.safetensors")
            description = {"operator": operator.name, "vector": vector.name, "attributes": attributes}
            (path / "call.json").write_text(json.dumps(description), encoding="utf-8")
            status, text = self._run(folder, vector)
            if status < 0:
                raise NoAnswer(ended(status, at(vector)))
            if status:
                raise CallRefused(text.strip()[-300:] or f"status {status}")
            file = path / "result.safetensors"
            return load_file(file) if file.exists() else {}

    def _run(self, folder: str, vector: Vector) -> tuple[int, str]:
        """Run the program; returns exit status and output. After a timeout it and its children are ended."""
        words, piped = [*self._words, folder], subprocess.PIPE
        try:
            process = subprocess.Popen(words, stdout=piped, stderr=piped, text=True, start_new_session=True)
        except OSError as error:
            raise ArgumentError(f"TARGET must be a command that can be started: {error}") from error
        try:
            out, errors = process.communicate(timeout=self._timeout)
        except subprocess.TimeoutExpired as error:
            raise NoAnswer(f"no answer within {self._timeout:g} s{at(vector)}") from error
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
        return process.returncode, errors or out


def at(vector: Vector) -> str:
    """Place of a vector in a message: `` at vector 17``."""
    return f" at vector {vector.name.rpartition('/')[2]}"


def ended(status: int, when: str) -> str:
    """Description of a process's end, by exit status: ``crashed at vector 17 (SIGSEGV)``."""
    if status >= 0:
        return f"ended with status {status}{when}"
    try:
        return f"crashed{when} ({signal.Signals(-status).name})"
    except ValueError:
        return f"crashed{when} (signal {-status})"
