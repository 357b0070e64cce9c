#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# From a fresh clone to a model that has learned: installs, makes the tiny model, trains it. Arguments are config overrides (a.b=c).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$ROOT"
"$PYTHON" -m mrl.prepare tiny
exec "$PYTHON" -m mrl.train grpo_tiny.yaml "$@"
