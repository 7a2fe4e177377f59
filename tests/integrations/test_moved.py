"""Names of modules of earlier releases, as pickles and programs have them, mean the modules of today."""

import pickle
import sys
from importlib import import_module

import pytest

import kvloom  # noqa: F401
from kvloom.moved import MOVED

PACKAGE = "kvloom.integrations.transformers."


@pytest.mark.parametrize("old", sorted(MOVED))
def test_an_earlier_name_means_the_same_module(old: str) -> None:
    try:
        now = import_module(f"kvloom.{MOVED[old]}")
    except ImportError as error:
        if str(error.name).startswith("kvloom"):
            raise
        pytest.skip(f"{error.name} is not installed, or older than what this module needs")
    found = import_module(f"kvloom.{old}")
    assert found is now and now.__spec__ is not None and now.__spec__.name == now.__name__


def test_a_module_of_a_moved_package_is_not_loaded_twice() -> None:
    for name in ("report", "held"):
        found = import_module(f"{PACKAGE}batching.{name}")
        assert found is import_module(f"{PACKAGE}session.{name}") is sys.modules[found.__name__]


@pytest.mark.parametrize(
    "name",
    [
        "caches.fixed FixedLayer",
        "caches.paged PagedLayer",
        "caches.prefix PrefixCache",
        "caches.prefix_group GroupTable",
        "caches.prefixes Prefixes",
        "integrations.transformers.attention IMPLEMENTATION",
        "integrations.transformers.cache KVCache",
        "integrations.transformers.layers KVCacheLayer",
        "integrations.transformers.pool KVPool",
    ],
)
def test_a_saved_name_is_found(name: str) -> None:
    module, attribute = name.split()
    saved = f"ckvloom.{module}\n{attribute}\n.".encode()
    assert pickle.loads(saved) is not None  # noqa: S301 (written above)


@pytest.mark.parametrize("package", ["kvloom.", "kvloom.caches.", PACKAGE, f"{PACKAGE}batching."])
def test_a_name_that_never_was_is_not_found(package: str) -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        import_module(package + "no_such_module")
