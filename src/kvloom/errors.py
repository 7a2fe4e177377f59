"""Errors that kvloom raises on purpose. Each is also the builtin that a caller would expect to catch."""


class KVError(Exception):
    """Base class: ``except KVError`` catches all errors that kvloom raises on purpose."""


class ArgumentError(KVError, ValueError):
    """An argument has a value that is not allowed; nothing was written."""


class ShapeError(ArgumentError):
    """A tensor has the wrong shape, dtype, device or strides; nothing was written."""


class ConfigError(KVError, ValueError):
    """A specification or configuration object cannot be built from these values."""


class ModelError(KVError, ValueError):
    """An ONNX model is damaged, or uses an operator in a way that its document does not allow."""


class UnsupportedError(KVError, NotImplementedError):
    """The request is legal, but this build, backend or class does not support it."""


class OutOfPages(KVError, MemoryError):
    """A bounded pool has too few pages, or fixed storage finds too little memory; nothing was written."""


class OutOfMemory(KVError, MemoryError):
    """Memory that a call needs cannot be allocated; nothing was written."""


class StateError(KVError, RuntimeError):
    """The object is in a state that does not allow this call."""
