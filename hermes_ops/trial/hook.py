"""Installed at the start of the user's interpreter: patches what it knows once that is imported.

Nothing is imported here that the script does not import itself, and at the start as good as
nothing: the GPU waits for it in every segment.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys

TYPE_CHECKING = False  # checkers of types know this name
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import ModuleType
    from typing import Any

_KERAS_3 = "keras.src.backend.tensorflow.trainer"
_KERAS_3_ELSEWHERE = ("keras.src.backend.jax.trainer", "keras.src.backend.torch.trainer")
_KERAS_2 = ("keras.src.engine.training", "keras.engine.training", "tf_keras.src.engine.training")
_SPAWN = (
    "multiprocessing.spawn", "multiprocess.spawn", "loky.backend.spawn",
    "joblib.externals.loky.backend.spawn",
)  # fmt: skip
_HOROVOD_KERAS = "horovod.tensorflow.keras"
_TORCH_OPTIMIZER = "torch.optim.optimizer"
_MLFLOW_CLIENT = "mlflow.tracking._tracking_service.client"
_MLFLOW_FLUENT = "mlflow.tracking.fluent"

TEMPORARY_VARIABLE = "HERMES_TEMPORARY_DIR"
"""Variable of the script: its TMPDIR, if that is the segment's own."""

HEAVY = ("tensorflow", "keras", "tf_keras", "sklearn", "numpy", "torch", "pandas", "scipy", "jax")
_environment: tuple[tuple[str, str], ...] = ()


def install() -> None:
    """Have what the script may leave unseeded seeded when it is imported; watch imports."""
    global _environment  # noqa: PLW0603 - one a process, by its nature
    _environment = import_variables(os.environ)
    for name in HEAVY:
        if name in sys.modules:
            _report_import(name)
    targets: dict[str, Callable[[ModuleType], None]] = {
        "random": _seed_random,
        "numpy": _seed_numpy,
        _KERAS_3: _patch_keras_3,
        _MLFLOW_CLIENT: _patch_mlflow_client,
        _MLFLOW_FLUENT: _patch_mlflow_fluent,
        _TORCH_OPTIMIZER: _patch_torch_optimizer,
        _HOROVOD_KERAS: lambda _: None,  # it is imported in a way of its own
    }
    targets.update(dict.fromkeys(_KERAS_2, _patch_keras_2))
    targets.update(dict.fromkeys(_SPAWN, _patch_spawn))
    targets.update(dict.fromkeys(_KERAS_3_ELSEWHERE, _patch_keras_3_elsewhere))
    for name in list(targets):
        if name in sys.modules:  # a standby interpreter has imported it already
            _run_suppressed(targets.pop(name), sys.modules[name])
    sys.meta_path.insert(0, _AfterImport(targets))


def _report_import(name: str) -> None:
    """Let standby interpreters of later segments import the module ahead of the script.

    An import ahead would not be the same if the script has changed its environment before, or if
    the module is the script's own, or on a path relative to its folder: then it is left out.
    """
    import contextlib

    from hermes_ops.trial.event_channel import send

    with contextlib.suppress(OSError):
        changed = import_variables(os.environ) != _environment
        paths = (os.environ.get("PYTHONPATH") or "/").split(os.pathsep)
        relative = [path or os.curdir for path in paths if not path.startswith("/")]
        script_spec = importlib.machinery.PathFinder.find_spec(name, [*sys.path[:1], *relative])
        is_scripts_own = script_spec is not None
        send({"kind": "import", "name": name, "ahead": not (changed or is_scripts_own)})


def _run_suppressed(action: Callable[[ModuleType], None], module: ModuleType) -> None:
    """Do what is to be done with an imported module; a failure must not break the script."""
    try:
        action(module)
    except Exception as error:
        sys.stderr.write(f"hermes: {module.__name__} is imported as it is: {error!r}\n")


def _seed_random(random: ModuleType) -> None:
    from hermes_ops.trial.process_seeds import seed_random

    seed_random(random)


def _seed_numpy(numpy: ModuleType) -> None:
    from hermes_ops.trial.process_seeds import seed_numpy

    seed_numpy(numpy)


def _patch_spawn(spawn: ModuleType) -> None:
    from hermes_ops.trial.process_seeds import patch_spawn

    patch_spawn(spawn)


def _patch_keras_3(trainer: ModuleType) -> None:
    from hermes_ops.trial.keras.keras3 import patch

    patch(trainer)


def _patch_keras_3_elsewhere(trainer: ModuleType) -> None:
    from hermes_ops.trial.keras.keras3 import patch_other_backend

    patch_other_backend(trainer)


def _patch_keras_2(training: ModuleType) -> None:
    from hermes_ops.trial.keras.keras2 import patch

    patch(training)


def _patch_torch_optimizer(optimizer: ModuleType) -> None:
    from hermes_ops.trial.optimizer_steps import patch

    patch(optimizer)


def _patch_mlflow_client(client: ModuleType) -> None:
    from hermes_ops.trial.mlflow.hook import patch_client

    patch_client(client)


def _patch_mlflow_fluent(fluent: ModuleType) -> None:
    from hermes_ops.trial.mlflow.hook import patch_fluent

    patch_fluent(fluent)


class _AfterImport:
    """Call a function once a named module has been imported."""

    def __init__(self, targets: dict[str, Callable[[ModuleType], None]]) -> None:
        self._targets = targets

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> importlib.machinery.ModuleSpec | None:
        """Find the module as usual, and wrap its loader if it is one that is waited for."""
        if name in HEAVY:
            _report_import(name)
        action = self._targets.pop(name, None)
        if action is None:
            return None
        import importlib.util  # with all that it imports itself, only for scripts that need it

        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            kind = _AliasingLoader if name == _HOROVOD_KERAS else _PatchingLoader
            spec.loader = kind(spec.loader, action)  # type: ignore[assignment]  # it acts as one
        return spec


class _PatchingLoader:
    """A loader that has something to do afterwards."""

    def __init__(self, loader: Any, action: Callable[[ModuleType], None]) -> None:  # noqa: ANN401
        self._loader = loader
        self._action = action

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """Create the module as the wrapped loader does."""
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, then the action."""
        self._loader.exec_module(module)
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        if os.environ.get("HERMES_TRIAL_DIR"):
            _run_suppressed(self._action, module)


class _AliasingLoader(_PatchingLoader):
    """A loader for Horovod's Keras module, which imports Keras 3 where tf_keras is meant."""

    def exec_module(self, module: ModuleType) -> None:
        """Run the module while `keras` means tf_keras."""
        from hermes_ops.trial.keras.legacy_keras import tf_keras_as_keras

        with tf_keras_as_keras():
            super().exec_module(module)


_IMPORT_PREFIXES = (
    "TF_", "KERAS_", "XLA_", "OMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "PYTHON", "LD_", "JAX_",
    "TORCH", "PYTORCH_", "NCCL_", "NVIDIA_", "CUDA_", "LC_", "NPY_", "SCIPY_", "SKLEARN_", "KMP_",
    "GOMP_", "BLIS_", "NUMBA_",
)  # fmt: skip
_NOT_OF_IMPORTS = (  # the segment's own, which differ from one to the next
    "CUDA_VISIBLE_DEVICES", "TF_CONFIG", "NCCL_SOCKET_IFNAME", "JAX_COORDINATOR_ADDRESS",
    "JAX_COORDINATOR_BIND_ADDRESS", "JAX_LOCAL_DEVICE_IDS",
)  # fmt: skip
_IMPORT_NAMES = ("PATH", "HOME", "LANG", "VIRTUAL_ENV", "CONDA_PREFIX", "TMPDIR")


def without_temporary_folder(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the segment's own TMPDIR, for what outlives the segment."""
    temporary = environment.get(TEMPORARY_VARIABLE)
    return {k: v for k, v in environment.items() if k != "TMPDIR" or v != temporary}


def import_variables(environment: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the variables of an environment on which an import may depend, sorted."""
    return tuple(
        sorted(
            (name, value)
            for name, value in without_temporary_folder(environment).items()
            if (name.startswith(_IMPORT_PREFIXES) or name in _IMPORT_NAMES)
            and name not in _NOT_OF_IMPORTS
        )
    )
