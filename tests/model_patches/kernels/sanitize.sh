#!/bin/sh
# The operators' tests under AddressSanitizer and UndefinedBehaviorSanitizer, over a library built with both into a folder
# of its own. Not part of the suite. Fails at the first finding.
#   tests/model_patches/kernels/sanitize.sh [PYTHON]
set -eu
python=${1:-.venv/bin/python}
cd "$(dirname "$0")/../../.."
preloaded=$(${CXX:-g++} -print-file-name=libasan.so):$(${CXX:-g++} -print-file-name=libubsan.so):$(${CXX:-g++} -print-file-name=libstdc++.so)
built=$(PYTHONPATH=. "$python" -m tests.model_patches.kernels.sanitized build)
# Python and torch leak on purpose and at their end; oneDNN's generated code is not instrumented.
ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 OMP_NUM_THREADS=2 PYTHONMALLOC=malloc LD_PRELOAD=$preloaded \
  PYTHONPATH=. "$python" -m tests.model_patches.kernels.sanitized run "$built"
