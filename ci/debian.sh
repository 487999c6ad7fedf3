# Unpacks Debian packages of any release under a folder, installing nothing on this machine. Sourced by other scripts.
#
# The archive's address is the one that this machine's apt uses for Debian itself, its keys those that are installed.

# debian_unpack SUITE DIR PACKAGE...
# Unpacks the packages and all that they depend on into DIR. On failure says why on standard error and returns 1.
# DIR/.unpacked marks a finished tree, which is used again as it is.
debian_unpack() {
    local suite=$1 dir=$2
    shift 2
    if [ "$(cat "$dir/.unpacked" 2>/dev/null)" = "$*" ]; then
        return 0
    fi
    local tool
    for tool in apt-get dpkg-deb; do
        command -v "$tool" >/dev/null || { echo "$tool is not installed" >&2; return 1; }
    done
    local site
    site=$(apt-get indextargets --format '$(SITE)' \
        'Created-By: Packages' 'Origin: Debian' 'Label: Debian' 'Component: main' 2>/dev/null | head -n 1)
    if [ -z "$site" ]; then
        echo "apt has no Debian archive configured, or its lists were never fetched (apt-get update)" >&2
        return 1
    fi

    rm -rf "$dir"
    mkdir -p "$dir"
    # The apt state lies beside the tree and knows no installed package, so dependencies are unpacked too.
    local state
    state=$(realpath "$dir").apt
    rm -rf "$state"
    mkdir -p "$state/lists/partial" "$state/archives/partial" "$state/empty"
    : >"$state/status"
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $site $suite main" >"$state/sources.list"
    local options=(
        -q -o Debug::NoLocking=1 -o APT::Sandbox::User=root -o APT::Install-Recommends=false -o Acquire::Check-Valid-Until=false
        -o Acquire::Languages=none -o Dir::State="$state" -o Dir::State::status="$state/status"
        -o Dir::State::lists="$state/lists" -o Dir::Cache="$state" -o Dir::Cache::archives="$state/archives"
        -o Dir::Etc::sourcelist="$state/sources.list" -o Dir::Etc::sourceparts="$state/empty"
        -o Dir::Etc::preferencesparts="$state/empty" -o Dir::Etc::preferences=/dev/null
    )
    if ! apt-get "${options[@]}" update >"$state/log" 2>&1 ||
        ! apt-get "${options[@]}" --yes --download-only install "$@" >>"$state/log" 2>&1; then
        echo "apt cannot fetch $* of $suite: $(grep -m 1 '^[EW]:' "$state/log" || tail -n 1 "$state/log")" >&2
        return 1
    fi
    local package
    for package in "$state"/archives/*.deb; do
        dpkg-deb -x "$package" "$dir" || return 1
    done
    rm -rf "$state"
    echo "$*" >"$dir/.unpacked"
}

# Releases of Debian that package AMD's HIP: 5.2.3, 5.7.1, 6.4.3.
HIP_SUITES="bookworm trixie forky"

# hip_release SUITE DIR
# Unpacks that release's HIP runtime, compiler and headers, as debian_unpack does.
hip_release() {
    local runtime=libamdhip64-5
    [ "$1" = forky ] && runtime=libamdhip64-6
    debian_unpack "$1" "$2" "$runtime" libamdhip64-dev
}

# hip_version DIR
# The version of the HIP headers in an unpacked tree.
hip_version() {
    awk '$2 == "HIP_VERSION_MAJOR" || $2 == "HIP_VERSION_MINOR" || $2 == "HIP_VERSION_PATCH" { v = v dot $3; dot = "." } END { print v }' \
        "$1/usr/include/hip/hip_version.h"
}
