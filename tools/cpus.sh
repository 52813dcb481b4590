#!/usr/bin/env bash
# Runs the tests as on other machines, and prints a table: setting, how, passed, failed, skipped, seconds.
#
#   tools/cpus.sh [--quick | --whole] [--jobs N] [--skips] [SETTING …]
#
# Settings:
#   cpu-avx2, cpu-avx512, cpu-amx    the package sees such a CPU (tests/cpus.py); the arithmetic is this one's
#   machine                          the package sees this CPU
#   avx2, avx512, avx512-bf16, amx   likewise, with torch, oneDNN and isotype's loops limited to these instructions
#   no-compiler                      nothing is compiled
#   one-thread, threads              on one core with one thread; four threads, however many cores there are
#   locale                           C, whose encoding is ASCII
#   spaces                           a copy of the repository, and a folder for temporary files, on a path with spaces
#   home                             a HOME in which nothing can be made, by root neither
#   optimized                        python -O, without asserts
#
# The settings up to threads run what computes, the others what reads, writes and prints; --whole runs everything in each, --quick a few
# files. A limit that this CPU is below is left out, with a line. A limit below a CPU's VNNI instructions is no such CPU: torch asks the
# CPU itself whether oneDNN's int8 products may overflow (github.com/pytorch/pytorch/pull/136942), and takes them.
#
# PYTHON: the interpreter, default .venv/bin/python. The exit status is 1 where a test failed. Logs are kept in the folder that is
# printed.
set -u
top=$(cd "$(dirname "$0")/.." && pwd)
cd "$top" || exit 2
python=${PYTHON:-$top/.venv/bin/python}

computes=(tests/core tests/precision tests/contracts tests/lora tests/model tests/rules tests/model/test_loss.py tests/train/test_step.py)
reads=(tests/core tests/data tests/report tests/cli tests/checkpoint tests/ranges/test_cache.py tests/train/test_training.py
    tests/train/test_validate.py tests/train/test_checkpoints.py tests/test_public.py)
quick_computes=(tests/core/test_compiled.py tests/precision tests/lora/test_linear.py tests/lora/test_products.py tests/lora/test_norms.py
    tests/lora/test_loss.py tests/model/test_boundary.py)
quick_reads=(tests/core tests/data/test_load.py tests/data/test_refusals.py tests/report/test_check.py tests/cli/test_main.py)
names=(cpu-avx2 cpu-avx512 cpu-amx machine avx2 avx512 avx512-bf16 amx no-compiler one-thread threads locale spaces home optimized)

jobs=auto size=usual skips=no chosen=()
while (($#)); do
    case $1 in
    --quick) size=quick ;;
    --whole) size=whole ;;
    --skips) skips=yes ;;
    --jobs) jobs=$2 && shift ;;
    -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "$0" && exit 0 ;;
    *)
        if [[ " ${names[*]} " != *" $1 "* ]]; then
            echo "unknown setting $1: expected one of ${names[*]}" >&2
            exit 2
        fi
        chosen+=("$1")
        ;;
    esac
    shift
done
((${#chosen[@]})) || chosen=("${names[@]}")
"$python" -c 'import pytest, xdist' || exit 2

logs=$(mktemp -d "${TMPDIR:-/tmp}/isotype-cpus.XXXXXX")
flags=" $(grep -m1 -E '^(flags|Features)' /proc/cpuinfo 2>/dev/null | cut -d: -f2) "
has() { [[ $flags == *" $1 "* ]]; }

# Sets `where` (a folder), `how`, `environment`, `through` (a command) and `arguments` of a setting, and `needs` (a flag of the CPU).
prepare() {
    where=$top how=really needs= environment=() through=() arguments=()
    case $1 in
    cpu-*) how=pretended environment=("ISOTYPE_TEST_CPU=$1") ;;
    machine) environment=(ISOTYPE_TEST_CPU=machine) ;;
    avx2) limit avx2 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 ;;
    # without products of bfloat16; there is no table of its own, oneDNN takes no 16-bit dtype, as with AVX2
    avx512) limit avx512f ATEN_CPU_CAPABILITY=avx512 ONEDNN_MAX_CPU_ISA=AVX512_CORE_VNNI ;;
    avx512-bf16) limit avx512_bf16 ATEN_CPU_CAPABILITY=avx512 ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 ;;
    amx) limit amx_bf16 ONEDNN_MAX_CPU_ISA=AVX512_CORE_AMX ;;
    no-compiler) environment=(CXX=none-such) ;;
    one-thread)
        environment=(OMP_NUM_THREADS=1 MKL_NUM_THREADS=1)
        if command -v taskset >/dev/null; then through=(taskset -c 0); else how="one thread, several cores"; fi
        ;;
    threads) environment=(OMP_NUM_THREADS=4 MKL_NUM_THREADS=4) ;;
    locale) environment=(-u LANG -u LANGUAGE LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0) ;;
    spaces)
        where="$logs/a path with spaces"
        mkdir -p "$where" "$logs/temporary files"
        git ls-files -z --cached --others --exclude-standard | xargs -0 cp -p --parents -t "$where" 2>/dev/null
        environment=("TMPDIR=$logs/temporary files")
        ;;
    home) environment=(-u XDG_CACHE_HOME -u HF_HOME -u ISOTYPE_CACHE HOME=/proc/none) ;;
    optimized)
        environment=(PYTHONOPTIMIZE=1)
        # Those of test modules are rewritten, and hold.
        arguments=(-W "ignore:assertions not in test modules:pytest.PytestConfigWarning")
        ;;
    esac
}
limit() { needs=$1 environment=(ISOTYPE_TEST_CPU=machine "${@:2}"); }

selection() {
    case $size:$1 in
    whole:*) tests=(tests) ;;
    quick:cpu-* | quick:machine | quick:avx* | quick:amx | quick:no-compiler | quick:one-thread | quick:threads) tests=("${quick_computes[@]}") ;;
    quick:*) tests=("${quick_reads[@]}") ;;
    *:cpu-* | *:machine | *:avx* | *:amx | *:no-compiler | *:one-thread | *:threads) tests=("${computes[@]}") ;;
    *) tests=("${reads[@]}") ;;
    esac
}

count() { grep -oE "[0-9]+ $1" <<<"$2" | cut -d' ' -f1 | grep . || echo 0; }

printf '%-12s %-26s %7s %7s %7s %8s\n' setting how passed failed skipped seconds
status=0
for name in "${chosen[@]}"; do
    prepare "$name"
    if [[ $needs ]] && ! has "$needs"; then
        printf '%-12s %-26s\n' "$name" "left out: no $needs here"
        continue
    fi
    selection "$name"
    log=$logs/$name.log begun=$SECONDS
    (cd "$where" && exec env "${environment[@]}" "PYTHONPATH=$where/src:$where" "${through[@]}" \
        "$python" -m pytest -p no:cacheprovider -rfEs -n "$jobs" --dist worksteal "${arguments[@]}" "${tests[@]}") >"$log" 2>&1
    code=$?
    last=$(grep -E '[0-9]+ (passed|failed|error)' "$log" | tail -1)
    failed=$(($(count failed "$last") + $(count error "$last")))
    # A run that ended before it counted (a usage error, a killed process) failed as a whole.
    ((code && !failed)) && failed="status $code"
    ((code)) && status=1
    printf '%-12s %-26s %7s %7s %7s %8s\n' "$name" "$how" "$(count passed "$last")" "$failed" "$(count skipped "$last")" $((SECONDS - begun))
    grep -E '^(FAILED|ERROR) ' "$log" | cut -c1-160 | sed 's/^/    /'
    [[ $skips == yes ]] && grep -E '^SKIPPED ' "$log" | sed 's/^/    /'
done
echo "logs: $logs"
exit $status
