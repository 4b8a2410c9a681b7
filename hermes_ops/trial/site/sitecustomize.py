"""Loaded at the start of the user's interpreter: prepares the hook, then the user's own file."""

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def _chain() -> None:
    """Run the sitecustomize that this one hides."""
    import importlib.machinery

    others = [p for p in sys.path if os.path.abspath(p or os.getcwd()) != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        import importlib.util

        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _install() -> None:
    if os.environ.get("HERMES_TRIAL_DIR"):
        from hermes_ops.trial.hook import install

        install()


try:
    _install()
except Exception as error:  # the script must start, whatever happens here
    sys.stderr.write(f"hermes: the hook could not be installed: {error!r}\n")
_chain()
