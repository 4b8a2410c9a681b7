"""The interpreters that the Keras tests are run in: Keras 3 in this one, others in their own.

Scripts run in forks of a standby interpreter, as under `hermes up`: TensorFlow is imported once for
each interpreter. The tests that are about the start or the end of a process use a new one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.standby_server import Taught

ROOT = Path(__file__).parents[2]
KERAS_2 = Path(os.environ.get("HERMES_TEST_KERAS2_PYTHON", ROOT / ".venvs/keras2/bin/python"))
JAX = Path(os.environ.get("HERMES_TEST_KERAS_JAX_PYTHON", ROOT / ".venvs/keras-jax/bin/python"))
TORCH = os.environ.get("HERMES_TEST_KERAS_TORCH_PYTHON")


IMPORTS = "numpy, tensorflow, keras"
# Without thread pools an interpreter can be forked after its imports.
# Scripts train on the CPU, or on the GPU that HERMES_TEST_GPU names.
VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": os.environ.get("HERMES_TEST_GPU", ""),
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


@dataclass(frozen=True)
class Interpreter:
    """A Python with Keras, perhaps with a standby server that has imported it."""

    path: str
    taught: Taught | None = None

    @property
    def plain(self) -> Interpreter:
        """The same one without its standby server: each script starts in a new process."""
        return replace(self, taught=None)

    @property
    def options(self) -> list[str]:
        """The options of hermes-trial that let it use the standby server."""
        return [] if self.taught is None else self.taught.options

    def script(self, otherwise: Path) -> Path:
        """Where a script has to lie: a standby interpreter serves one place alone."""
        return otherwise if self.taught is None else self.taught.script


@pytest.fixture(scope="session")
def standby(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Interpreter]]:
    """Give an interpreter by its path, with a standby server that has done the imports."""
    known: dict[str, Interpreter] = {}
    with ExitStack() as servers:

        def started(path: str) -> Interpreter:
            if path not in known:
                taught = Taught(tmp_path_factory.mktemp("standby"))
                servers.callback(taught.teach(path, IMPORTS, VARIABLES).close)
                known[path] = Interpreter(path, taught)
            return known[path]

        yield started


@pytest.fixture(params=["keras3", pytest.param("keras2", marks=pytest.mark.heavy)])
def interpreter(
    request: pytest.FixtureRequest, standby: Callable[[str], Interpreter]
) -> Interpreter:
    if request.param == "keras3":
        return standby(sys.executable)
    if not KERAS_2.exists():
        message = f"no Keras 2 interpreter at {KERAS_2}"
        if os.environ.get("HERMES_TEST_KERAS2") == "required":
            pytest.fail(message)
        pytest.skip(message)
    return standby(str(KERAS_2))


@pytest.fixture(params=["jax", "torch"])
def backend(request: pytest.FixtureRequest) -> tuple[str, Interpreter]:
    """Keras 3 on another backend: its name and an interpreter that has it."""
    python = str(JAX) if request.param == "jax" else TORCH
    if python is None:
        pytest.skip("HERMES_TEST_KERAS_TORCH_PYTHON names no interpreter with Keras and PyTorch")
    return request.param, Interpreter(python)
