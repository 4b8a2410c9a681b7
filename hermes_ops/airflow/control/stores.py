"""Checkpoints of a sweep in an object store: they are deleted when those in the folders are."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from hermes_ops.errors import HermesError
from hermes_ops.trial.copies import Copies, NotInstalledError, StoreError, connect, place

log = logging.getLogger(__name__)

Opener = Callable[[str], Copies]
_warned: set[str] = set()  # the places of which the log has said so


def check_store(store: str | None) -> None:
    """HermesError where the store's package is not installed here, where it is needed too."""
    if store is None:
        return
    try:
        connect(store)
    except NotInstalledError as error:
        raise HermesError(str(error)) from error
    except StoreError as error:  # trials may still reach it, with credentials of their own
        log.warning("checkpoints.store %s does not open here: %s", store, error)


def clear_trials(
    store: str | None, sweep: str, numbers: Iterable[int], open_store: Opener = connect
) -> bool:
    """Delete the copies of these trials; False, said once in the log, if the store did not obey."""
    if store is None:
        return True
    return _clear([place(store, sweep, number) for number in sorted(numbers)], open_store)


def clear_sweep(store: str | None, sweep: str, open_store: Opener = connect) -> bool:
    """Delete all copies of a sweep; False, said once in the log, if the store did not obey."""
    return True if store is None else _clear([place(store, sweep)], open_store)


def _clear(places: list[str], open_store: Opener) -> bool:
    for url in places:
        try:
            open_store(url).clear()
        except StoreError as error:
            if url not in _warned:
                _warned.add(url)
                log.warning("Checkpoints at %s could not be deleted: %s", url, error)
            return False
    return True
