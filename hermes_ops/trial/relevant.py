"""The environment variables on which the import of a framework may depend."""

from __future__ import annotations

TYPE_CHECKING = False  # checkers of types know this name
if TYPE_CHECKING:
    from collections.abc import Mapping

_RELEVANT = (
    "TF_", "KERAS_", "XLA_", "OMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "PYTHON", "LD_", "JAX_",
    "TORCH_", "NCCL_", "NVIDIA_", "CUDA_", "LC_",
)  # fmt: skip
_ALSO_RELEVANT = ("PATH", "HOME", "LANG", "VIRTUAL_ENV", "CONDA_PREFIX", "TMPDIR")


def relevant(environment: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """The part of an environment on which an import may depend."""
    return tuple(
        sorted(
            (name, value)
            for name, value in environment.items()
            if (name.startswith(_RELEVANT) or name in _ALSO_RELEVANT)
            and name != "CUDA_VISIBLE_DEVICES"
        )
    )
