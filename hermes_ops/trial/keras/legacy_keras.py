"""Let Horovod find Keras 2: its `import keras` finds Keras 3 beside TensorFlow 2.16 and later."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator

_VARIABLE = "TF_USE_LEGACY_KERAS"
_NAMES = {"keras": "tf_keras", "keras.backend": "tf_keras.backend"}


@contextlib.contextmanager
def tf_keras_as_keras() -> Iterator[None]:
    """While a module is imported, let `keras` mean tf_keras, if the script trains with that.

    Without it Horovod's MetricAverageCallback fails: Keras 3 has no `backend.constant`.
    """
    if os.environ.get(_VARIABLE, "").lower() not in ("1", "true"):
        yield
        return
    try:
        modules = {name: importlib.import_module(real) for name, real in _NAMES.items()}
    except ImportError:  # no tf_keras: TensorFlow says so better
        yield
        return
    before = {name: sys.modules.get(name) for name in _NAMES}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module
