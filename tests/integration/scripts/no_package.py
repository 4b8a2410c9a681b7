"""Imports what no interpreter has."""

import no_such_package_anywhere  # type: ignore[import-not-found]

print(f"epoch=1 loss={no_such_package_anywhere.loss}")
