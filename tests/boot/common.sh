# Functions of inside.sh and deb.sh, for the booted root.

step() { printf '\n== %s\n' "$*"; }
fail() {
    printf 'FAILED: %s\n' "$*"
    systemctl --no-pager -l status gpupoold.service || true
    journalctl --no-pager -u gpupoold -n 60 || true
    exit 1
}
show() { systemctl show -P "$1" gpupoold.service; }
now_ms() { date +%s%3N; }
ask() {
    curl -sS --max-time 120 http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \
        -d '{"model": "tiny", "prompt": "Hello", "max_tokens": 12, "temperature": 0}' |
        python3 -c 'import json, sys; a = json.load(sys.stdin); print(a["choices"][0]["text"] if "choices" in a else a)'
}
# Waits until the model answers as before; prints what it took since the instant $1.
await_answer() {
    local deadline=$(($(now_ms) + 120000))
    until [[ $(ask 2>&1) == "$answer" ]]; do
        (($(now_ms) < deadline)) || fail "no answer as before: $(ask 2>&1)"
        sleep 0.2
    done
    echo "the same answer $(($(now_ms) - $1)) ms after"
}
# An environment in /src/.venv: one that sees the packages of the host, or that of `make venv`.
make_environment() {
    if [[ -x .venv/bin/python ]]; then return; fi
    if [[ -d /opt/packages ]]; then
        python3 -m venv --without-pip .venv
        echo /opt/packages >"$(echo .venv/lib/python3*/site-packages)/packages.pth"
    else
        make venv
    fi
}
write_config() {
    printf '[[device]]\nkind = "emulated"\nmemory = "256MiB"\n[memory]\nmodel_cache = "256MiB"\nkv_host = "64MiB"\n' \
        >/etc/gpupool/gpupool.toml
}
await_ready() {
    local deadline=$(($(now_ms) + 180000))
    until gpupool status | grep -q ready; do
        (($(now_ms) < deadline)) || fail "never ready"
        sleep 1
    done
}
# Adds a tiny model, and remembers its answer.
add_tiny() {
    gpupool make-tiny-models /var/lib/gpupool/models
    chown -R gpupool: /var/lib/gpupool/models
    await_ready
    gpupool add-model tiny --source /var/lib/gpupool/models/tiny-llama
    gpupool status
    answer=$(ask)
    echo "answer: $answer"
    [[ $answer && $answer != *error* ]] || fail "no answer"
}
