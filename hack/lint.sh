#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Every check that reads code without running it; warnings fail. All of them run before the first failure is reported.
set -uo pipefail
cd "$(dirname "$0")/.."
PY=${PY:-.venv/bin/python}
failed=()
check() {
    local name=$1
    shift
    if ! output=$("$@" 2>&1); then
        failed+=("$name")
        printf '%s\n%s\n' "--- $name" "$output"
    fi
}
check ruff "$PY" -m ruff check -q .
check ruff-format "$PY" -m ruff format -q --check .
for package in proto/atp_api operator/atp_operator switch-agent/atp_switch_agent softswitch/atp_softswitch sidecar/atp_sidecar \
    client/atp_client hack; do
    check "mypy $package" "$PY" -m mypy "$package"
done
check "generated wire layout" "$PY" proto/generate.py --check
check "chart definitions" charts/sync-crds --check
check rustfmt bash -c 'cd native && cargo fmt --check'
check clippy bash -c 'cd native && cargo clippy -q --all-targets -- -D warnings'
check clang-format make -s -C softswitch format-check
check "chart" bash -c 'helm=$(hack/atp-cluster which helm 2>/dev/null) || exit 0; "$helm" lint --quiet charts/atp'
if [ ${#failed[@]} -ne 0 ]; then
    echo "lint: failed: ${failed[*]}"
    exit 1
fi
echo "lint: clean"
