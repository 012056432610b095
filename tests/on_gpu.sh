#!/usr/bin/env bash
# What is run on a GPU host: device tests, and the commands behind docs/measurements.md.
#
#   tests/on_gpu.sh OUT PART...      from the repository's root; OUT is a folder for logs and results
#
# parts: tests kernels verify prefix boundaries prefill throughput kimi accuracy. PYTHON names the interpreter of an environment with
# SGLang, this package and its `bench` extra; MODEL a folder with the config.json of a 27B-shaped Qwen3.5 and KIMI one of a
# Kimi-Linear shape (dummy weights). Nothing else may use the GPU while figures are taken, least of all the tests.
set -uo pipefail

OUT=$(mkdir -p "$1" && cd "$1" && pwd)
shift
PYTHON=${PYTHON:-python3}
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
SERVER="--load-format dummy --skip-tokenizer-init --attention-backend triton --sampling-backend pytorch
  --grammar-backend none --disable-prefill-cuda-graph --random-seed 1 --context-length 8192 --mem-fraction-static 0.85"
FEW="--cuda-graph-bs-decode 1 2 4 8 12 16 24 32 40 48"
MANY="--disable-radix-cache --max-running-requests 256 --cuda-graph-bs-decode 1 8 32 64 128 192 256"

bench() { "$PYTHON" -m replayssm_kernels.bench "$@" | tee -a "$OUT/kernels.txt"; }
rag() { local name=$1; shift; "$PYTHON" -m bench_rag --out "$OUT/$name" --order grouped --overlap-starts "$@"; }

tests() { # servers first and alone, then compiling: a process per core but two, each with one thread
  export OMP_NUM_THREADS=1
  FAILURES=$OUT/servers-failed.txt "$PYTHON" -m pytest -q --long -p tests.harness.failures tests/integration/device \
    tests/integration/test_direct_steps.py tests/integration/test_host_tier.py tests/integration/test_boundaries.py \
    >"$OUT/servers.txt" 2>&1
  FAILURES=$OUT/failed.txt "$PYTHON" -m pytest -q -n "$(($(nproc) - 2))" -p tests.harness.failures tests/kernels/test_device.py \
    tests/plugin/test_device.py tests/kernels/test_{direct,verify,cursors,materialise,extend}.py \
    tests/plugin/test_{extend_hooks,boundaries,direct_steps}.py >"$OUT/tests.txt" 2>&1
  unset OMP_NUM_THREADS
  tail -q -n 3 "$OUT/tests.txt" "$OUT/servers.txt"
  grep -h "^#####" "$OUT"/*failed.txt
}

kernels() {
  bench gdn_decode --rounds 5 --json "$OUT/kernels.jsonl"
  bench gdn_decode --rounds 5 --state bf16 --json "$OUT/kernels.jsonl"
  bench kda_decode --rounds 5 --json "$OUT/kernels.jsonl"
  bench kda_decode --rounds 5 --state bf16 --json "$OUT/kernels.jsonl"
  bench kda_decode --rounds 5 --lower-bound -5 --json "$OUT/kernels.jsonl"
  bench materialise --json "$OUT/kernels.jsonl"
}

verify() {
  for gate in gdn kda; do
    bench ${gate}_verify --width 4 --capacity 36 --accepted 3 --batch 1,8,64,256 --rounds 5 --json "$OUT/verify.jsonl"
    bench ${gate}_verify --width 8 --capacity 40 --accepted 6 --batch 1,8,64,256 --rounds 5 --json "$OUT/verify.jsonl"
  done
}

prefix() { # hit rate and TTFT, as of bench_rag's results in the README
  rag prefix --model "$MODEL" --arms "${ARMS:-plain,plugin,intree}" --workload gsp,rag,multi --tokenizer small_models/gdn \
    --seeds "${SEEDS:-1,2}" --server-args "$SERVER $FEW --enable-metrics"
}

write_off_arm() {
  cat >"$OUT/boundaries.toml" <<'TOML'
[arms.off]
about = "the plugin, prefix cache as SGLang has it"
plugin = true
args = "--enable-linear-replayssm"
env = { SGLANG_REPLAYSSM_BOUNDARIES = "off" }
TOML
}

boundaries() { # states at boundaries on and off; lengths that are no multiple of anything
  write_off_arm
  rag boundaries --config "$OUT/boundaries.toml" --model "$MODEL" --arms plain,plugin,off --workload gsp,zipf,multi --seeds "${SEEDS:-1,2,3}" \
    --server-args "$SERVER $FEW"
  rag odd --model "$MODEL" --arms plain,plugin --workload gsp --prefix-len 1937 --question-len 100 --server-args "$SERVER $FEW"
  rag odd-zipf --model "$MODEL" --arms plain,plugin --workload zipf --document-len 437 --prefix-len 77 \
    --server-args "$SERVER $FEW"
}

prefill() { # what states at boundaries cost a prefill: prompts that share nothing, one and four at a time
  write_off_arm
  rag prefill --config "$OUT/boundaries.toml" --model "$MODEL" --arms off,plugin,plain --workload burst --batch 1,4 \
    --prompt-len 2112 --output-len 2 --seeds 1,2,3,4,5,6 --server-args "$SERVER $FEW"
}

throughput() { # decode alone, at a fixed number of requests
  rag throughput --model "$MODEL" --arms plain,intree,plugin --workload burst --batch 128,256 --output-len 128 \
    --server-args "$SERVER $MANY"
}

kimi() {
  rag kimi --model "$KIMI" --arms plain,plugin --workload gsp,burst --batch 128,256 --output-len 128 \
    --server-args "$SERVER --max-running-requests 256 $FEW 128 256"
}

accuracy() {
  for model in gdn kda; do
    "$PYTHON" -m bench_rag accuracy --model small_models/$model --out "$OUT/accuracy-$model" --server-args "--attention-backend triton
      --sampling-backend pytorch --grammar-backend none --disable-prefill-cuda-graph --mem-fraction-static 0.5
      --max-running-requests 16 --max-total-tokens 400000 --context-length 32768 --cuda-graph-bs-decode 1 2 4 8 16"
  done
}

for part in "$@"; do
  case $part in
    tests | kernels | verify | prefix | boundaries | prefill | throughput | kimi | accuracy) ;;
    *) echo "tests/on_gpu.sh: no part $part" >&2 && exit 2 ;;
  esac
  begin=$SECONDS
  "$part"
  echo "$part: $((SECONDS - begin)) s"
done
