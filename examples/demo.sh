#!/usr/bin/env bash
# What `make demo` does: start everything, follow one sweep to its end, leave the pages open.
set -euo pipefail
cd "$(dirname "$0")/.."
export HERMES_HOME="$PWD/.hermes"
hermes=.venv/bin/hermes

stop() {
  trap '' INT TERM # a second Ctrl-C does not cut the clean stop short
  "$hermes" down
}

# A start that fails stops what it had started by itself; one that is refused touches nothing.
# shellcheck disable=SC2086 # UP holds options
"$hermes" up --slots "${SLOTS:-2}" ${UP:-}
trap stop EXIT
trap 'exit 130' INT TERM

"$hermes" sweep run examples/digits/sweep.yaml --follow
# What it was good for: the same trials, had they been run one after the other.
"$hermes" replay "$(basename "$(ls -dt "$HERMES_HOME"/sweeps/*/ | head -n 1)")" --policy fifo
"$hermes" status
if [ -t 0 ]; then
  read -r -p "Airflow and MLflow stay open. Enter or Ctrl-C stops them. " || true
fi
