# Process 1 of a machine for tests, until systemd takes its place: see hsx.testing.systemd_machine, which starts it in namespaces
# of its own. Environment: DISK (kept from boot to boot), BINDS (SOURCE:TARGET, one a line), BOOT (a file with the boot id),
# VARIABLES (for every unit).
set -eu
root=$DISK/root
mount --make-rprivate /
mkdir -p "$DISK/upper" "$DISK/work" "$root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$DISK/upper,workdir=$DISK/work" "$root"
mount -t proc -o nosuid,nodev,noexec proc "$root/proc"
mount --bind "$BOOT" "$root/proc/sys/kernel/random/boot_id"
mount -t sysfs -o ro,nosuid,nodev,noexec sysfs "$root/sys"
mount -t cgroup2 -o rw,nosuid,nodev,noexec cgroup2 "$root/sys/fs/cgroup"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
for device in null zero full random urandom tty; do
  : > "$root/dev/$device"
  mount --bind "/dev/$device" "$root/dev/$device"
done
mkdir "$root/dev/pts" "$root/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666,mode=620,gid=5 devpts "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
ln -s /proc/self/fd "$root/dev/fd"
ln -s fd/0 "$root/dev/stdin"
ln -s fd/1 "$root/dev/stdout"
ln -s fd/2 "$root/dev/stderr"
mount -t tmpfs -o mode=755 tmpfs "$root/run"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
printf '%s\n' "$BINDS" | while IFS=: read -r source target; do
  [ -n "$source" ] || continue
  mkdir -p "$root$target"
  mount --bind "$source" "$root$target"
done

# As little as systemd, its journal, D-Bus and polkit need. Nothing of the host's own services starts here.
units=$root/etc/systemd/system
if [ ! -e "$DISK/installed" ]; then
  rm -rf "$units"/*.wants "$units"/*.requires
  mkdir -p "$units" "$root/etc/systemd/journald.conf.d" "$root/etc/systemd/system.conf.d"
  cat > "$units/machine.target" <<'UNIT'
[Unit]
Description=A machine for tests
Requires=basic.target dbus.service
Wants=multi-user.target
After=basic.target dbus.service
AllowIsolate=yes
UNIT
  ln -sfn machine.target "$units/default.target"
  for service in systemd-udevd systemd-udev-trigger systemd-networkd systemd-resolved systemd-timesyncd systemd-logind \
    systemd-modules-load systemd-sysctl systemd-random-seed systemd-binfmt systemd-remount-fs systemd-pstore \
    systemd-tmpfiles-setup-dev systemd-update-utmp systemd-firstboot systemd-hwdb-update systemd-journal-flush systemd-update-utmp-runlevel systemd-user-sessions; do
    ln -sfn /dev/null "$units/$service.service"
  done
  for mount in dev-hugepages.mount dev-mqueue.mount sys-kernel-debug.mount sys-kernel-tracing.mount sys-kernel-config.mount \
    sys-fs-fuse-connections.mount proc-sys-fs-binfmt_misc.automount getty.target; do
    ln -sfn /dev/null "$units/$mount"
  done
  printf '[Journal]\nStorage=volatile\nRateLimitIntervalSec=0\nForwardToConsole=no\n' \
    > "$root/etc/systemd/journald.conf.d/machine.conf"
  printf '[Manager]\nDefaultTimeoutStopSec=10s\nDefaultEnvironment=%s\n' "$VARIABLES" \
    > "$root/etc/systemd/system.conf.d/machine.conf"
  : > "$root/etc/fstab"
  : > "$DISK/installed"
fi

cd "$root"
mkdir -p .old
pivot_root . .old
umount -l /.old
exec env -i container=hsx PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 \
  /lib/systemd/systemd --system --show-status=no --log-target=journal-or-kmsg < /dev/null
