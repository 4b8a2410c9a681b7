"""Make `from hermes_ops.trial import report` work in an interpreter without Hermes Ops.

Only the package itself becomes importable, not what is installed beside it.
"""

import os

__path__ = [
    os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
]
