#!/bin/bash
# setup_system.sh: Debian's packages `systemd` (for systemd-analyze) and `strace` (for the tests of failing disks), where one is
# missing and this user may install it.
set -euo pipefail
missing=()
command -v systemd-analyze > /dev/null || missing+=(systemd)
command -v strace > /dev/null || missing+=(strace)
if [ ${#missing[@]} = 0 ]; then
  exit 0
fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then
  echo "setup_system.sh: ${missing[*]} missing; install it from your distribution, or some tests are skipped" >&2
  exit 0
fi
echo "installing Debian's packages: ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -qq -y --no-install-recommends "${missing[@]}" > /dev/null
