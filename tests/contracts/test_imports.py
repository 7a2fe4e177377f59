"""Importing is cheap, and optional things stay optional."""

import subprocess
import sys

import pytest

import kvloom

pytestmark = pytest.mark.process


def run_python(code: str) -> str:
    """Standard output of ``code`` in a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_kvloom_imports_no_torch() -> None:
    loaded = run_python("import sys, kvloom, kvloom.errors, kvloom.models; print('torch' in sys.modules)")
    assert loaded == "False"


def test_import_kvloom_imports_its_own_files_and_no_package() -> None:
    code = "import sys\nbefore = set(sys.modules)\nimport kvloom\ndir(kvloom), kvloom.__all__\n"
    code += "print(*sorted(x for x in set(sys.modules) - before if x.partition('.')[0] not in "
    code += "sys.stdlib_module_names))"
    assert run_python(code) == "kvloom kvloom.lazy_names kvloom.moved"


def test_a_name_for_torch_alone_imports_no_transformers() -> None:
    code = "import sys\nfrom kvloom import Cache\nprint(Cache.__module__, 'transformers' in sys.modules)"
    assert run_python(code) == "kvloom.caches.cache False"


def test_a_name_for_transformers_is_that_of_its_door() -> None:
    door = pytest.importorskip("kvloom.integrations.transformers")
    for name in ("KVCache", "KVPool", "continuous_batching", "disable", "enable", "load_model"):
        assert getattr(kvloom, name) is getattr(door, name)


def test_command_line_help_imports_no_torch() -> None:
    code = "import sys\nfrom kvloom.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    assert run_python(code + "print('torch' in sys.modules)").endswith("False")


def test_operators_work_without_optional_packages() -> None:
    code = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"transformers", "onnx", "triton", "rich", "numpy"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Refuse())
import warnings
warnings.simplefilter("ignore")  # torch itself warns that there is no numpy
import torch
from kvloom.dialects import pmx
cache = torch.zeros(1, 1, 2, 8, 2, 4)
key, value = pmx.key_value_cache(torch.ones(1, 3, 2, 4), torch.ones(1, 3, 2, 4), 0, cache)
print(tuple(key.shape), float(cache.sum()))
"""
    assert run_python(code) == "(1, 3, 2, 4) 48.0"


def test_every_public_name_resolves() -> None:
    assert all(getattr(kvloom, name) is not None for name in kvloom.__all__)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        kvloom.nonsense  # noqa: B018
