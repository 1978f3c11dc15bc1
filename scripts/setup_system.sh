#!/bin/bash
# setup_system.sh: Debian's package `systemd`, for systemd-analyze, where it is missing and this user may install it.
set -euo pipefail
if command -v systemd-analyze > /dev/null; then
  exit 0
fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then
  echo "setup_system.sh: systemd-analyze is missing; install your distribution's systemd to test the units" >&2
  exit 0
fi
echo "installing Debian's package systemd, for systemd-analyze"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -qq -y --no-install-recommends systemd > /dev/null
