#!/bin/sh
# Runs the CUDA tests and benchmarks of this bundle on a machine with a GPU and a Python that has torch 2.11.0 for CUDA 13.
# It needs neither Go nor a network.
#
#   run.sh            all of it, some 15 minutes
#   run.sh tests      the tests (PACKAGES="torchddp data": of these packages), and the tutorial's program
#   run.sh bench      the benchmarks, with torch.compile
#   run.sh no-gpu     shows where there is no GPU that all programs start, and skip or say so
#
# Results go to $OUT, or ./out: machine.txt, tests.txt, tests.json, multigpu.txt, bench.txt, gpu.json, gpu.md.
# It ends with 1 if anything failed.
set -u
what=${1:-all}
case $what in
all | tests | bench | no-gpu) ;;
*)
  echo "run.sh: unknown part $what: all, tests, bench or no-gpu" >&2
  exit 2
  ;;
esac
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "${OUT:=$PWD/out}"
OUT=$(cd "$OUT" && pwd)
GODDP_PYTHON=${GODDP_PYTHON:-$(command -v python3)}
export GODDP_PYTHON OUT

# The libtorch of Python's torch, and what lies beside it of NVIDIA's.
libs=$("$GODDP_PYTHON" -c '
import glob, os, sys, torch
if torch.__version__.split("+")[0] != "2.11.0":
    sys.exit("run.sh: this Python has torch " + torch.__version__ + ", the bundle is built for 2.11.0")
if not (torch.version.cuda or "").startswith("13."):
    sys.exit("run.sh: this Python has torch for CUDA %s, the bundle is built for 13" % torch.version.cuda)
torch_dir = os.path.dirname(torch.__file__)
print(":".join([os.path.join(torch_dir, "lib")] + sorted(glob.glob(os.path.join(os.path.dirname(torch_dir), "nvidia", "*", "lib")))))
') || exit 1
LD_LIBRARY_PATH=$libs${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export LD_LIBRARY_PATH
commit=$(cat "$here/commit")
failed=0
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

{
  date -u +%FT%TZ
  echo "commit $commit"
  uname -sr
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>&1 || echo "no nvidia-smi"
  "$GODDP_PYTHON" -c 'import torch; print("torch", torch.__version__, "cuDNN", torch.backends.cudnn.version(), "NCCL", torch.cuda.nccl.version() if torch.cuda.is_available() else "-")'
} >"$OUT/machine.txt" 2>&1
cat "$OUT/machine.txt"

# run SECONDS FILE PROGRAM ARGUMENT…  appends what the program prints to the file.
run() {
  limit=$1 file=$2
  shift 2
  echo "== $*" >>"$file"
  timeout -k 10 "$limit" "$@" >>"$file" 2>&1
  status=$?
  echo "== exit $status" >>"$file"
  return $status
}

tests() {
  : >"$OUT/tests.txt"
  for package in ${PACKAGES:-$(cat "$here/packages")}; do
    echo "tests of $package"
    cd "$here/pkg/$package" || exit 1
    echo "== package $package" >>"$OUT/tests.txt"
    run 300 "$OUT/tests.txt" ./package.test -test.run '^TestCUDA' -test.v -test.timeout 290s || { failed=1; echo "  failed"; }
    cd "$here" || exit 1
  done
  "$GODDP_PYTHON" "$here/results.py" "$OUT/tests.txt" "$OUT/tests.json" "$1" || failed=1
}

case $what in all | tests)
  export GODDP_NEED_GPU=1
  tests run
  : >"$OUT/multigpu.txt"
  cd "$scratch" || exit 1
  run 120 "$OUT/multigpu.txt" "$here/bin/multigpu" 5 5 --loss mse || { failed=1; echo "multigpu failed"; }
  run 60 "$OUT/multigpu.txt" "$GODDP_PYTHON" -c 'import torch; print(torch.load("checkpoint.pt"))' || failed=1
  cd "$here" || exit 1
  ;;
esac
case $what in all | bench)
  echo "benchmarks"
  : >"$OUT/bench.txt"
  run 580 "$OUT/bench.txt" "$here/bin/gpu" -compile -commit "$commit" -out "$OUT" || { failed=1; echo "  failed"; }
  ;;
esac
case $what in no-gpu)
  tests skip
  : >"$OUT/bench.txt"
  run 60 "$OUT/bench.txt" "$here/bin/gpu" && failed=1
  grep -q "libtorch finds no GPU" "$OUT/bench.txt" || failed=1
  cd "$scratch" || exit 1
  : >"$OUT/multigpu.txt"
  run 120 "$OUT/multigpu.txt" "$here/bin/multigpu" --backend nccl --nproc-per-node 1 1 1 && failed=1
  grep -i "gpu" "$OUT/multigpu.txt" || failed=1
  ;;
esac
[ $failed = 0 ] && echo "all passed" || echo "something failed: see $OUT"
exit $failed
