#!/usr/bin/env bash
# Installs gpupool as a system service, or removes it. Downloads nothing: what is installed is
# a copy of the environment that `make venv` has made, with the project in it.
#
#   scripts/install.sh install|uninstall
#
#   PREFIX=/usr/local    where; the environment goes to $PREFIX/lib/gpupool
#   SYSCONFDIR=/etc      where gpupool/gpupool.toml is, which is made once and never changed
#   DESTDIR=             a staging folder in front of both: nothing outside it is touched
#   VENV=.venv           the environment to copy
#
# Run as root, nothing that is installed belongs to, or can be changed by, anybody else.
set -euo pipefail
cd "$(dirname "$0")/.."
umask 022

readonly PREFIX=${PREFIX:-/usr/local} SYSCONFDIR=${SYSCONFDIR:-/etc} DESTDIR=${DESTDIR:-}
readonly VENV=${VENV:-.venv}
readonly LIB=$PREFIX/lib/gpupool DOC=$PREFIX/share/doc/gpupool
readonly CONFIG=$SYSCONFDIR/gpupool/gpupool.toml
readonly PROGRAMS=(gpupool gpupoold)
mapfile -t UNITS < <(cd systemd && printf '%s\n' *.service *.socket)
readonly UNITS
readonly MAN=$PREFIX/share/man
readonly SYSUSERS=$PREFIX/lib/sysusers.d/gpupool.conf TMPFILES=$PREFIX/lib/tmpfiles.d/gpupool.conf
# Shell and file, by what `gpupool completion` calls the shell.
readonly -A COMPLETIONS=(
    [bash]=$PREFIX/share/bash-completion/completions/gpupool
    [zsh]=$PREFIX/share/zsh/site-functions/_gpupool
    [fish]=$PREFIX/share/fish/vendor_completions.d/gpupool.fish
)

say() { printf 'install: %s\n' "$*"; }

die() {
    printf 'install: error: %s\n' "$1" >&2
    shift
    if (($#)); then printf '         %s\n' "$@" >&2; fi
    exit 1
}

check() {
    local path
    for path in "$PREFIX" "$SYSCONFDIR" ${DESTDIR:+"$DESTDIR"}; do
        [[ $path == /* ]] || die "$path is not an absolute path"
    done
    [[ -x $VENV/bin/python ]] || die "there is no environment in $VENV" \
        "run \`make venv\` first, as the user whom this folder belongs to"
    "$VENV/bin/python" -m pip show --quiet setuptools 2>/dev/null || die "$VENV has no pip or setuptools" \
        "make it anew: rm -r $VENV && make venv"
    check_interpreter
    check_room
    is_staged_or_not_root || is_roots "$PREFIX" || die "$PREFIX can be changed by others than root" \
        "whoever can do that would decide what root runs: use another PREFIX"
}

# The service runs as a user of its own, who may not look into other people's homes.
check_interpreter() {
    local python
    python=$(readlink -f "$VENV/bin/python")
    case $python in
        /home/* | /root/*)
            [[ -n $DESTDIR ]] || die "the environment's Python is $python: the service cannot run it" \
                "make it with the system's: rm -r $VENV && make venv PYTHON=/usr/bin/python3"
            ;;
    esac
}

# The environment is copied as a whole, beside the last one.
check_room() {
    local place=$DESTDIR$LIB need free
    while [[ ! -e $place ]]; do place=$(dirname "$place"); done
    need=$(($(du -sk "$VENV" | cut -f 1) / 1000))
    free=$(($(df --output=avail -k "$place" | tail -n 1) / 1000))
    ((free > need)) || die "$VENV takes $need MB, and the disk of $place has $free MB free" \
        "free some space, or use another PREFIX"
}

is_staged_or_not_root() { [[ -n $DESTDIR || $EUID != 0 ]]; }

# Whether nobody but root can change what is, or would be, at a path. Groups of the system, such
# as Debian's staff for /usr/local, count as root's.
is_roots() {
    local path owner group mode
    path=$(readlink -m "$1")
    while :; do
        if [[ -e $path ]]; then
            read -r owner group mode < <(stat -c '%u %g %a' "$path")
            ((owner == 0)) || return 1
            if ((!(8#$mode & 8#1000))); then # in a sticky folder others cannot replace it
                ((!(8#$mode & 8#002) && (!(8#$mode & 8#020) || group < 1000))) || return 1
            fi
        fi
        if [[ $path == / ]]; then return 0; fi
        path=$(dirname "$path")
    done
}

# Prints what an environment takes its code from: the interpreter and its library, folders that
# .pth files and editable installs name, targets of symbolic links.
sources_of() {
    "$1/bin/python" -I -c 'import sys
finders = [module for name, module in sys.modules.items() if name.startswith("__editable__")]
mapped = [path for finder in finders for path in getattr(finder, "MAPPING", {}).values()]
print(*sys.path, *mapped, sys.base_prefix, sep="\n")'
    find "$1" -type l -exec readlink -m {} +
}

# What is imported from elsewhere stays where it is, and changes there.
check_sources() {
    local path untrusted=()
    if [[ $EUID != 0 ]]; then return; fi
    while read -r path; do
        if [[ $path != "$1" && $path != "$1"/* ]] && ! is_roots "$path"; then untrusted+=("$path"); fi
    done < <(sources_of "$1" | sort -u)
    if ((!${#untrusted[@]})); then return; fi
    if [[ -n $DESTDIR ]]; then
        say "warning: $VENV takes code from where others than root can change it: ${untrusted[*]}"
        return
    fi
    rm -rf "$1"
    die "$VENV takes code from where others than root can change it: ${untrusted[*]}" \
        "root and the service would run it: make the environment anew, without editable installs" \
        "and with the system's Python: rm -r $VENV && make venv PYTHON=/usr/bin/python3"
}

# Nothing of the owner, the modes and the access lists that the files had for their builder.
hand_to_root() {
    if [[ $EUID == 0 ]]; then chown -hR 0:0 "$1"; fi
    chmod -R u=rwX,go=rX,ug-s,o-t "$1"
}

# Copies the environment with the project in it, then puts it in the place of the last one.
install_environment() {
    local target=$DESTDIR$LIB fresh=$DESTDIR$LIB.new source
    rm -rf "$fresh"
    mkdir -p "$fresh"
    say "copying $VENV to $LIB"
    # Modes are not preserved, as access lists would be with them.
    cp -dR --preserve=links,timestamps --reflink=auto "$VENV/." "$fresh/"
    hand_to_root "$fresh"
    rm -f "$fresh"/bin/{activate*,Activate.ps1} "$fresh"/.gpupool-*
    source=$(mktemp -d)
    # shellcheck disable=SC2064 # its present value is meant
    trap "rm -rf '$source'" EXIT
    # Building a wheel leaves files beside the sources, which may be another user's.
    tar -c --exclude=__pycache__ --exclude='*.egg-info' pyproject.toml README.md gpupoold cli state \
        $(compgen -G 'tui' || true) | tar -x -C "$source"
    PYTHONPATH='' "$fresh/bin/python" -m pip install --quiet --no-input --no-index --no-deps \
        --no-build-isolation --disable-pip-version-check --root-user-action=ignore \
        --no-warn-script-location --force-reinstall "$source" >/dev/null ||
        die "the project could not be installed into $fresh"
    relocate "$fresh"
    check_sources "$(readlink -f "$fresh")"
    hand_to_root "$fresh"
    rm -rf "$target.old"
    if [[ -e $target ]]; then mv "$target" "$target.old"; fi
    mv "$fresh" "$target"
    rm -rf "$target.old"
}

# Scripts name the interpreter by its path, or a shell that runs it where that is too long.
relocate() {
    local script python=$LIB/bin/python
    for script in "$1"/bin/*; do
        [[ -f $script && ! -L $script && $(head -c 2 "$script" | tr -d '\0') == '#!' ]] || continue
        sed -i -e "1s|^#!.*/bin/python[0-9.]*|#!$python|" \
            -e "2s|^'''exec' \"\{0,1\}[^ ]*/bin/python[0-9.]*\"\{0,1\} |'''exec' $python |" "$script"
    done
    sed -i '/^command = /d' "$1/pyvenv.cfg"
}

# Writes one of our files with the folders as they are here.
put() {
    local mode=$1 source=$2 target=$DESTDIR$3
    mkdir -p "$(dirname "$target")"
    sed -e "s|/usr/bin/gpupool|$PREFIX/bin/gpupool|g" -e "s|/usr/share/doc|$PREFIX/share/doc|g" \
        "$source" >"$target.new"
    chmod "$mode" "$target.new"
    mv "$target.new" "$target"
}

install_files() {
    local name shell file
    mkdir -p "$DESTDIR$PREFIX/bin" "$DESTDIR$DOC"
    for name in "${PROGRAMS[@]}"; do
        ln -sfn "../lib/gpupool/bin/$name" "$DESTDIR$PREFIX/bin/$name"
    done
    for name in "${UNITS[@]}"; do put 644 "systemd/$name" "$PREFIX/lib/systemd/system/$name"; done
    put 644 systemd/sysusers.d/gpupool.conf "$SYSUSERS"
    put 644 systemd/tmpfiles.d/gpupool.conf "$TMPFILES"
    for file in CHANGELOG.md examples/gpupool.toml; do
        put 644 "$file" "$DOC/$(basename "$file")"
    done
    for file in docs/*.md docs/*/*.md; do put 644 "$file" "$DOC/${file#docs/}"; done
    for shell in "${!COMPLETIONS[@]}"; do
        file=$DESTDIR${COMPLETIONS[$shell]}
        mkdir -p "$(dirname "$file")"
        "$DESTDIR$LIB/bin/python" -m gpupool_cli.main completion "$shell" >"$file"
        chmod 644 "$file"
    done
    env -u PYTHONPATH "$DESTDIR$LIB/bin/python" scripts/man_pages.py "$DESTDIR$MAN"
    if [[ -e $DESTDIR$CONFIG ]]; then
        say "$CONFIG is there and stays as it is"
    else
        put 644 examples/gpupool.toml "$CONFIG"
    fi
}

is_live() { [[ -z $DESTDIR && -d /run/systemd/system ]]; }

activate() {
    if [[ -n $DESTDIR ]]; then return; fi
    if command -v systemd-sysusers >/dev/null; then
        systemd-sysusers "$SYSUSERS"
        systemd-tmpfiles --create "$TMPFILES"
    fi
    if ! is_live; then return; fi
    systemctl daemon-reload
    if systemctl --quiet is-active gpupoold.service; then
        say "the service still runs what was there before: systemctl restart gpupoold"
    else
        say "start it, now and at every boot: systemctl enable --now gpupoold"
        say "who may use it: usermod -aG gpupool NAME"
    fi
}

deactivate() {
    if is_live; then
        systemctl --quiet disable --now "${UNITS[@]}" 2>/dev/null || true
    fi
}

uninstall() {
    local name shell
    deactivate
    if [[ -e $DESTDIR$CONFIG ]]; then
        if cmp -s "$DESTDIR$CONFIG" "$DESTDIR$DOC/gpupool.toml"; then
            rm -f "$DESTDIR$CONFIG"
            drop_folder "$SYSCONFDIR/gpupool"
        else
            say "$CONFIG has been changed and stays"
        fi
    fi
    for name in "${PROGRAMS[@]}"; do rm -f "$DESTDIR$PREFIX/bin/$name"; done
    for name in "${UNITS[@]}"; do rm -f "$DESTDIR$PREFIX/lib/systemd/system/$name"; done
    for shell in "${!COMPLETIONS[@]}"; do rm -f "$DESTDIR${COMPLETIONS[$shell]}"; done
    rm -f "$DESTDIR$SYSUSERS" "$DESTDIR$TMPFILES" \
        "$DESTDIR$MAN"/man1/gpupool{,-*}.1 "$DESTDIR$MAN/man8/gpupoold.8"
    rm -rf "$DESTDIR$LIB" "$DESTDIR$DOC"
    if is_live; then systemctl daemon-reload; fi
    say "models, history and the user gpupool stay: rm -r /var/lib/gpupool /var/cache/gpupool; userdel gpupool"
}

drop_folder() { rmdir --ignore-fail-on-non-empty "$DESTDIR$1" 2>/dev/null || true; }

case ${1:-} in
    install)
        check
        install_environment
        install_files
        activate
        say "done"
        ;;
    uninstall) uninstall ;;
    *) die "what? install or uninstall" ;;
esac
