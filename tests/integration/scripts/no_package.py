"""Imports what no interpreter has."""

import no_such_package_anywhere

print(f"epoch=1 loss={no_such_package_anywhere.loss}")
