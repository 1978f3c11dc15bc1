#!/bin/bash
# setup_system.sh: Debian's packages `systemd`, `dbus` and `polkitd` (for the tests of the units), and `strace`, `e2fsprogs`, `mount` and `util-linux` (for the
# tests on failing disks), `chromium` with `chromium-driver` (for those of the dashboard), `prometheus` and `jq` (for those of alerts and of
# the recipes for logs), where one is missing and this user may install it.
set -euo pipefail
missing=()
command -v systemd-analyze > /dev/null && [ -x /lib/systemd/systemd ] || missing+=(systemd)
command -v dbus-daemon > /dev/null || missing+=(dbus)
command -v pkcheck > /dev/null || missing+=(polkitd)
command -v strace > /dev/null || missing+=(strace)
command -v chromium > /dev/null || missing+=(chromium)
command -v chromedriver > /dev/null || missing+=(chromium-driver)
command -v prometheus > /dev/null && command -v promtool > /dev/null || missing+=(prometheus)
command -v jq > /dev/null || missing+=(jq)
command -v mkfs.ext4 > /dev/null || missing+=(e2fsprogs)
command -v mount > /dev/null || missing+=(mount)
command -v unshare > /dev/null || missing+=(util-linux)
if [ ${#missing[@]} = 0 ]; then
  exit 0
fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then
  echo "setup_system.sh: ${missing[*]} missing; install it from your distribution, or some tests are skipped" >&2
  exit 0
fi
echo "installing Debian's packages: ${missing[*]}"
# The tests start a Prometheus of their own; Debian's service stays down. A masked unit is not started by its package.
case " ${missing[*]} " in
  *" prometheus "*) mkdir -p /etc/systemd/system && { [ -e /etc/systemd/system/prometheus.service ] || ln -s /dev/null /etc/systemd/system/prometheus.service; } ;;
esac
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -qq -y --no-install-recommends "${missing[@]}" > /dev/null
